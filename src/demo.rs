//! The demo model and its evaluation text, built into the program by the feature `demo` if the
//! sources have them (`build.rs`).

use nq_formats::{Checkpoint, Files};
use nq_model::ModelConfig;

/// Name of the built-in model in messages.
pub(crate) const LABEL: &str = "demo";

#[cfg(demo)]
macro_rules! asset {
    ($name:literal) => {
        (
            $name,
            include_bytes!(concat!("../assets/demo/", $name)) as &[u8],
        )
    };
}

#[cfg(demo)]
static FILES: &[(&str, &[u8])] = &[
    asset!("LICENSE"),
    asset!("config.json"),
    asset!("generation_config.json"),
    asset!("model-00001-of-00002.safetensors"),
    asset!("model-00002-of-00002.safetensors"),
    asset!("model.safetensors.index.json"),
    asset!("tokenizer.json"),
    asset!("tokenizer_config.json"),
];

/// The demo model's files, if this build has them.
pub fn files() -> Option<Files> {
    #[cfg(demo)]
    return Some(Files::Embedded {
        label: LABEL,
        files: FILES,
    });
    #[cfg(not(demo))]
    None
}

/// True if a model has the shape of the demo model, whatever it was quantized to.
pub(crate) fn is_demo(config: &ModelConfig) -> bool {
    let demo = files().and_then(|files| Checkpoint::open_files(files).ok());
    demo.is_some_and(|demo| demo.config() == config)
}

/// Text sampled from the demo model at temperature 1: on this text, the model's perplexity is its
/// own entropy.
pub(crate) fn eval_text() -> Option<&'static str> {
    #[cfg(demo)]
    return Some(include_str!("../assets/demo-eval.txt"));
    #[cfg(not(demo))]
    None
}
