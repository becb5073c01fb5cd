//! One file per subcommand, with its flags and its code.

pub(crate) mod bench;
pub mod chat;
pub mod convert;
pub(crate) mod doctor;
pub mod embed;
pub mod eval;
pub(crate) mod fit;
pub(crate) mod inspect;
pub mod models;
pub mod quantize;
pub(crate) mod rank;
pub mod reading;
pub mod rerank;
pub mod serve;
pub(crate) mod synth;
