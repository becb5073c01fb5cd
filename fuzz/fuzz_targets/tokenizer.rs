#![no_main]

#[path = "../src/text_targets.rs"]
mod text_targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| text_targets::tokenizer(data));
