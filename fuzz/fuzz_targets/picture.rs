#![no_main]

#[path = "../src/picture_targets.rs"]
mod picture_targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| picture_targets::picture(data));
