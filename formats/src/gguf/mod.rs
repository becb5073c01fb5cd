//! GGUF files, versions 2 and 3: one file, or a split set, holds weights, configuration,
//! tokenizer and chat template; beside it, a file called `mmproj` may hold the tower that sees images.
//!
//! `file` parses, `blocks` takes integer blocks apart and turns them into
//! canonical weights, `affine` writes those as blocks, `config` and `tokenizer` rebuild the files that other formats
//! keep beside their weights.

pub mod affine;
mod architecture;
mod config;
pub mod encode;
pub mod file;
mod hyper;
pub mod metadata;
pub(crate) mod mmproj;
pub mod names;
pub(crate) mod order;
mod pieces;
mod split;
mod store;
pub mod tokenizer;
pub mod value;
pub(crate) mod writer;

pub use crate::blocks::{BlockType, BlockWeight};
pub use file::{GgufFile, MAGIC};
pub(crate) use hyper::TABLE;
pub(crate) use names::ROPE_FACTORS;
pub use store::{NamedFile, models};
pub(crate) use store::{find, open};
pub use value::{Array, Value};
pub use writer::GgufPlan;
