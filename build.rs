//! Sets `demo` if the feature of that name is on and the demo model exists, whose weights it unpacks. The published crate
//! does not include it, because crates are limited to 10 MB.

#[cfg(feature = "demo")]
#[path = "assets/unpack.rs"]
mod unpack;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(demo)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=assets/demo/config.json");
    #[cfg(feature = "demo")]
    if std::path::Path::new("assets/demo/config.json").exists() {
        unpack::unpack("assets".as_ref()).expect("assets/packed is unpacked to assets/demo");
        println!("cargo::rustc-cfg=demo");
    }
}
