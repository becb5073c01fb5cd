//! A row of the table of architectures.

use super::dimensions::{Delta, Experts, HyperShape, IndexerShape, RopeScaling};
use super::layer::{LayerSpec, LinearSpec, Parameter};
use super::shape::ModelConfig;
use std::fmt;

/// A family of models with the same kinds of layers.
pub struct Architecture {
    /// The family, for messages: `Qwen3`.
    pub family: &'static str,
    /// The models of the family that this row covers, for messages: `Qwen3 dense`.
    pub title: &'static str,
    /// The class that config.json's `architectures` names.
    pub class: &'static str,
    /// config.json's `model_type`.
    pub model_type: &'static str,
    /// Other classes and types of the same models: those that also see images.
    pub also: &'static [(&'static str, &'static str)],
    /// GGUF's `general.architecture`, which is also the prefix of its metadata keys.
    pub gguf: &'static str,
    /// The kinds of layers that its models have.
    pub kinds: &'static [LayerSpec],
    /// Which of [`Architecture::kinds`] layer `index` of a model of this shape is.
    pub kind_of: fn(&ModelConfig, usize) -> usize,
    /// True if `head_dim` may be absent from config.json, and is then `hidden_size / num_attention_heads`.
    pub heads_split_hidden: bool,
    /// Heads are rotated in the first of this many parts, unless a config says otherwise.
    pub rotary_parts: usize,
    /// True if Hugging Face files hold the gains of the final norm less 1.
    pub norm_less_one: bool,
    /// True if Hugging Face files hold the inputs of a recurrence in two matrices: `in_proj_qkvz`, for each key
    /// head its rows of queries, keys, values and gates, and likewise `in_proj_ba`.
    pub fused_delta: bool,
    /// True if a config.json that does not say how many MTP layers the model has means one.
    pub mtp_unsaid: bool,
    /// True if a GGUF file keeps the rows of a head of queries and keys so that the two values that a
    /// rotation turns are neighbours, where the rest of nq has them half a head apart.
    pub gguf_pairs: bool,
    /// True if a config may say that recurrences gate their output by a sigmoid.
    pub sigmoid_gates: bool,
    /// True if a GGUF file keeps the value heads of recurrences as [`Delta::tiled`] says.
    pub gguf_tiled: bool,
    /// Its published models.
    pub presets: &'static [Preset],
}

/// The [`Architecture::kind_of`] of models whose kinds of layers are one with a recurrence and one with
/// attention.
pub(super) fn hybrid(c: &ModelConfig, index: usize) -> usize {
    let interval = c.delta.map_or(1, |d| d.interval.max(1));
    usize::from((index + 1).is_multiple_of(interval))
}

/// A model whose layers are all alike, without anything particular: architectures state what they have beside
/// their names and layers.
pub(super) const PLAIN: Architecture = Architecture {
    family: "",
    title: "",
    class: "",
    model_type: "",
    also: &[],
    gguf: "",
    kinds: &[],
    kind_of: |_, _| 0,
    heads_split_hidden: false,
    rotary_parts: 1,
    norm_less_one: false,
    fused_delta: false,
    mtp_unsaid: false,
    gguf_pairs: false,
    sigmoid_gates: false,
    gguf_tiled: false,
    presets: &[],
};

impl Architecture {
    /// All matrices of its kinds of layers.
    pub fn matrices(&self) -> impl Iterator<Item = &'static LinearSpec> {
        self.kinds.iter().flat_map(LayerSpec::matrices)
    }

    /// The parameters of its kinds of layers.
    pub fn parameters(&self) -> impl Iterator<Item = Parameter> {
        self.kinds.iter().flat_map(LayerSpec::parameters)
    }

    /// True if `class` is the class of its models.
    pub(crate) fn is_class(&self, class: &str) -> bool {
        self.class == class || self.also.iter().any(|(c, _)| *c == class)
    }

    /// True if `model_type` is the type of its models.
    pub fn is_type(&self, model_type: &str) -> bool {
        self.model_type == model_type || self.also.iter().any(|(_, t)| *t == model_type)
    }

    /// True if some of its layers have a recurrence.
    pub fn has_delta(&self) -> bool {
        self.kinds.iter().any(|k| k.recurrence().is_some())
    }

    /// True if its layers have a shared expert.
    pub fn shares_expert(&self) -> bool {
        let mut experts = self.kinds.iter().filter_map(LayerSpec::experts);
        experts.any(|(_, e)| e.shared.is_some())
    }

    /// True if its residual has several streams.
    pub fn has_streams(&self) -> bool {
        let mut blocks = self.kinds.iter().flat_map(|k| k.blocks);
        blocks.any(|b| b.hyper.is_some())
    }

    /// True if gates stand behind the queries of its attention.
    pub fn has_gates(&self) -> bool {
        let mut attention = self.kinds.iter().filter_map(LayerSpec::attention);
        attention.any(|a| a.gated)
    }

    /// The Linear that scores the experts of its layers, if they have any.
    pub fn router(&self) -> Option<&'static LinearSpec> {
        self.kinds.iter().find_map(LayerSpec::router)
    }
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
    pub(super) delta: Option<Delta>,
    pub(super) streams: Option<StreamsPreset>,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) vocab: usize,
    pub(super) positions: usize,
    pub(super) eps: f32,
    pub(super) theta: f64,
    pub(super) scaling: RopeScaling,
    pub(super) tied: bool,
    pub(super) eos: &'static [u32],
}

/// What a published model has whose residual has several streams.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StreamsPreset {
    pub(super) hyper: HyperShape,
    pub(super) indexer: IndexerShape,
    /// The layer with a table of n-grams, from 0.
    pub(super) table: usize,
    /// The token that n-grams do not reach across.
    pub(super) end: u32,
}
