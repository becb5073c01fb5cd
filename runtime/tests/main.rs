//! All tests of the engine: one program, so that it is linked once.

mod chat_template;
mod fuzz_smoke;
mod jinja;
mod sampler;
mod tokenizer;
