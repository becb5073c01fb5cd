//! The Linears of a layer and their weights.

use crate::error::Result;
use nq_formats::{ModelConfig, Tensor, Weight, WeightStore};
use std::fmt;

/// The seven Linears of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinearKind {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Attention output.
    O,
    /// MLP gate.
    Gate,
    /// MLP up.
    Up,
    /// MLP down.
    Down,
}

impl LinearKind {
    /// In the order they run.
    pub const ALL: [LinearKind; 7] = [
        LinearKind::Q,
        LinearKind::K,
        LinearKind::V,
        LinearKind::O,
        LinearKind::Gate,
        LinearKind::Up,
        LinearKind::Down,
    ];

    /// The Linears that share one input, in the order they run.
    pub const INPUTS: [&'static [LinearKind]; 4] = [
        &[LinearKind::Q, LinearKind::K, LinearKind::V],
        &[LinearKind::O],
        &[LinearKind::Gate, LinearKind::Up],
        &[LinearKind::Down],
    ];

    /// Hugging Face's name within a layer, without `.weight`.
    pub const fn suffix(self) -> &'static str {
        match self {
            LinearKind::Q => "self_attn.q_proj",
            LinearKind::K => "self_attn.k_proj",
            LinearKind::V => "self_attn.v_proj",
            LinearKind::O => "self_attn.o_proj",
            LinearKind::Gate => "mlp.gate_proj",
            LinearKind::Up => "mlp.up_proj",
            LinearKind::Down => "mlp.down_proj",
        }
    }

    /// `(out_features, in_features)` in a model of this shape.
    pub fn dims(self, c: &ModelConfig) -> (usize, usize) {
        match self {
            LinearKind::Q => (c.q_dim(), c.hidden_size),
            LinearKind::K | LinearKind::V => (c.kv_dim(), c.hidden_size),
            LinearKind::O => (c.hidden_size, c.q_dim()),
            LinearKind::Gate | LinearKind::Up => (c.intermediate_size, c.hidden_size),
            LinearKind::Down => (c.hidden_size, c.intermediate_size),
        }
    }
}

/// One Linear of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinearId {
    /// Layer, counted from 0.
    pub layer: usize,
    /// Which one.
    pub kind: LinearKind,
}

impl fmt::Display for LinearId {
    /// Hugging Face's full name, without `.weight`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "model.layers.{}.{}", self.layer, self.kind.suffix())
    }
}

/// The canonical weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// By [`LinearKind`], in the order of [`LinearKind::ALL`].
    pub linears: [Weight; 7],
    /// RMSNorm before attention, `[hidden]`.
    pub input_norm: Tensor,
    /// RMSNorm before the MLP, `[hidden]`.
    pub post_attention_norm: Tensor,
    /// Per-head RMSNorm of queries, `[head_dim]`.
    pub q_norm: Tensor,
    /// Per-head RMSNorm of keys, `[head_dim]`.
    pub k_norm: Tensor,
}

impl LayerWeights {
    /// Reads layer `index` of a checkpoint.
    ///
    /// # Errors
    /// A missing tensor, or one of another shape than the config says.
    pub fn read(store: &dyn WeightStore, config: &ModelConfig, index: usize) -> Result<Self> {
        let linear = |kind: LinearKind| -> Result<Weight> {
            let id = LinearId { layer: index, kind };
            Ok(store.matrix(&id.to_string(), kind.dims(config))?)
        };
        let norm = |name: &str, len| -> Result<Tensor> {
            Ok(store.vector(&format!("model.layers.{index}.{name}"), len)?)
        };
        let [q, k, v, o, gate, up, down] = LinearKind::ALL.map(linear);
        Ok(LayerWeights {
            linears: [q?, k?, v?, o?, gate?, up?, down?],
            input_norm: norm("input_layernorm", config.hidden_size)?,
            post_attention_norm: norm("post_attention_layernorm", config.hidden_size)?,
            q_norm: norm("self_attn.q_norm", config.head_dim)?,
            k_norm: norm("self_attn.k_norm", config.head_dim)?,
        })
    }

    /// The weight of one Linear.
    pub fn linear(&self, kind: LinearKind) -> &Weight {
        &self.linears[kind as usize]
    }
}
