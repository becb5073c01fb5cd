//! One file per subcommand, with its flags and its code.

pub mod bench;
pub mod chat;
pub mod convert;
pub mod doctor;
pub mod embed;
pub mod eval;
pub mod inspect;
pub mod models;
pub mod quantize;
pub mod reading;
pub mod rerank;
pub mod serve;
pub mod synth;
