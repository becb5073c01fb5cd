//! Lists the files that the manifest names, and tells nq-kernels where the manifest is.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let manifest = root.join("manifest");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", manifest.display());
    println!("cargo::metadata=MANIFEST={}", manifest.display());
    // Without a manifest there is no code; nq-kernels reports that when the code is needed.
    let text = fs::read_to_string(&manifest).unwrap_or_default();
    let targets = text.lines().filter_map(|line| {
        let mut words = line.strip_prefix("code ")?.split(' ');
        words.nth(1)
    });
    let entries: String = targets
        .map(|target| {
            let file = root.join(format!("{target}.zst"));
            println!("cargo::rerun-if-changed={}", file.display());
            format!("({target:?}, include_bytes!({file:?}).as_slice()),")
        })
        .collect();
    fs::write(out.join("code.rs"), format!("&[{entries}]")).expect("OUT_DIR can be written");
}
