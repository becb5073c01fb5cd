//! Model architectures. A new one is a file here and a line in the loader.

pub mod qwen3;
