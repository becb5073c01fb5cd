//! GGUF files, versions 2 and 3: one file, or a split set, holds weights, configuration,
//! tokenizer and chat template; other files beside it are not read.
//!
//! `file` parses, `blocks` takes integer blocks apart, `weight` turns them into
//! canonical weights, `affine` writes those as blocks, `config` and `tokenizer` rebuild the files that other formats
//! keep beside their weights.

pub mod affine;
mod architecture;
pub mod blocks;
mod config;
pub mod encode;
pub mod file;
mod grids;
pub(crate) use grids::FP4_VALUES;
pub mod metadata;
pub mod names;
pub(crate) mod order;
mod store;
pub mod tokenizer;
pub mod types;
pub mod value;
pub mod weight;
pub mod writer;

pub use file::{GgufFile, MAGIC};
pub(crate) use names::ROPE_FACTORS;
pub(crate) use store::{find, open};
pub use types::BlockType;
pub use value::{Array, Value};
pub use weight::BlockWeight;
pub use writer::GgufPlan;
