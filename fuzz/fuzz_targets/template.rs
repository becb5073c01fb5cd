#![no_main]

#[path = "../src/text_targets.rs"]
mod text_targets;

libfuzzer_sys::fuzz_target!(
    // A panic of the template engine becomes an error, but libFuzzer's hook would end the process at
    // it.
    init: std::panic::set_hook(Box::new(|_| {})),
    |data: &[u8]| text_targets::template(data)
);
