//! A row of the table of architectures.

use super::layer::LayerSpec;
use super::shape::Experts;
use std::fmt;

/// A family of models with identical layers.
pub struct Architecture {
    /// The family, for messages: `Qwen3`.
    pub family: &'static str,
    /// The models of the family that this row covers, for messages: `Qwen3 dense`.
    pub title: &'static str,
    /// The class that config.json's `architectures` names.
    pub class: &'static str,
    /// config.json's `model_type`.
    pub model_type: &'static str,
    /// GGUF's `general.architecture`, which is also the prefix of its metadata keys.
    pub gguf: &'static str,
    /// Its layers, which are all alike.
    pub layer: LayerSpec,
    /// Its published models.
    pub presets: &'static [Preset],
}

impl PartialEq for Architecture {
    /// Compares classes, which are unique.
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
    /// Its name in `--preset` and `nq synth`.
    pub name: &'static str,
    /// Hub id of the published model.
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
