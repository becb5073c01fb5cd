//! Unpacks the demo model's weights, which many tests read.

#[path = "../assets/unpack.rs"]
mod unpack;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    unpack::unpack("../assets".as_ref()).expect("assets/packed is unpacked to assets/demo");
}
