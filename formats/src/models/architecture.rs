//! What a row of the table of architectures says.

use super::layer::LayerSpec;
use super::shape::Experts;
use std::fmt;

/// A family of models whose layers are alike.
pub struct Architecture {
    /// The family, for messages: `Qwen3`.
    pub family: &'static str,
    /// Which of its models these are, for messages: `Qwen3 dense`.
    pub title: &'static str,
    /// The class that config.json's `architectures` names.
    pub class: &'static str,
    /// config.json's `model_type`.
    pub model_type: &'static str,
    /// GGUF's `general.architecture`, which the keys of its metadata begin with.
    pub gguf: &'static str,
    /// Its layers, all alike.
    pub layer: LayerSpec,
    /// Its published models.
    pub presets: &'static [Preset],
}

impl PartialEq for Architecture {
    /// Classes differ.
    fn eq(&self, other: &Self) -> bool {
        self.class == other.class
    }
}

impl fmt::Debug for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.class)
    }
}

/// A published model's shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preset {
    /// What `--preset` and `nq synth` call it.
    pub name: &'static str,
    /// The published model.
    pub hub_id: &'static str,
    pub(super) architecture: &'static Architecture,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) experts: Option<Experts>,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) vocab: usize,
    pub(super) positions: usize,
    pub(super) eps: f32,
    pub(super) theta: f64,
    pub(super) tied: bool,
    pub(super) eos: u32,
}
