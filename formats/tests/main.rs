//! All tests of reading and writing checkpoints: one program, so that it is linked once.

mod account;
mod adapters;
mod common;
mod crash;
mod destination;
mod experts;
mod export_folders;
mod export_hybrids;
mod fuzz_smoke;
mod gguf_blocks;
mod gguf_hostile;
mod gguf_model;
mod gguf_others;
mod gguf_said;
mod hub;
mod hybrids;
mod import;
mod lora;
mod mtp;
mod nq_folder;
mod packages;
mod parquet;
mod reading;
mod synth;
mod tokenizer;
mod trellis;
