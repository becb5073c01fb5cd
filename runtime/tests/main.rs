//! All tests of the engine: one program, so that it is linked once.

mod ahead;
mod batch;
mod chat_template;
mod common;
mod cuda;
mod cuts;
mod drafts_ahead;
mod eagle;
mod encoder;
mod exact;
mod experts;
mod families;
mod forward;
mod fuzz_smoke;
mod generate;
mod golden;
mod hybrids;
mod jinja;
mod mtp;
mod rope;
mod sampler;
mod shards;
mod speculation;
mod tokenizer;
