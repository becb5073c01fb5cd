//! Model architectures. A new one is a file here and a line in the loader.

mod layer;
pub mod qwen3;

pub use layer::{LayerWeights, LinearId, LinearKind};
