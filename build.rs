//! Sets `demo` if the feature of that name is on and the demo model exists. The published crate
//! does not include it, because crates are limited to 10 MB.

use std::env;
use std::path::Path;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(demo)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=assets/demo/config.json");
    let wanted = env::var_os("CARGO_FEATURE_DEMO").is_some();
    if wanted && Path::new("assets/demo/config.json").exists() {
        println!("cargo::rustc-cfg=demo");
    }
}
