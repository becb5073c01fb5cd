//! A model's weights on an adapter.

use crate::gpu::Gpu;
use crate::linear::Linear;
use nq_formats::Weight;
use nq_model::ModelConfig;
use nq_model::forward::{Layer, Mix};
use nq_runtime::rope::Rotary;

/// A model in the memory of an adapter.
pub(crate) struct WgpuModel {
    pub(crate) config: ModelConfig,
    pub(crate) gpu: Gpu,
    pub(crate) rotary: Rotary,
    /// `[vocab, hidden]`, in the computer's memory: only rows that are looked up are read.
    pub(crate) embedding: Weight,
    pub(crate) layers: Vec<Layer<Linear, Vec<f32>>>,
    pub(crate) norm: Vec<f32>, // [hidden]
    pub(crate) head: Linear,   // [vocab, hidden]
}

impl WgpuModel {
    pub(crate) fn linears(&self) -> impl Iterator<Item = &Linear> {
        let layers = self.layers.iter();
        let layers = layers.flat_map(|layer| layer.linears().chain(layer.kept()));
        layers.chain([&self.head])
    }

    /// True if a layer's gates and what they multiply are in matrices of their own.
    pub(crate) fn has_gates_apart(&self) -> bool {
        let blocks = self.layers.iter().flat_map(|layer| &layer.blocks);
        blocks
            .filter_map(|block| match &block.mixer {
                Mix::Mlp(mlp) => Some(&mlp.gate_up.linear),
                Mix::Experts(experts) => Some(&experts.shared.as_ref()?.mlp.gate_up.linear),
                Mix::Attention(_) | Mix::Delta(_) | Mix::Ngrams(_) => None,
            })
            .any(|gate_up| !gate_up.interleaved)
    }

    /// Most inputs that are rounded to bytes; 0 if none are.
    pub(crate) fn rounded_inputs(&self) -> usize {
        let rounded = self.linears().filter(|linear| linear.rounds);
        let most = rounded.map(|linear| linear.inputs).max().unwrap_or(0);
        // Prompts round what each of a row's experts gates.
        let routes = self.config.experts.map_or(0, |e| e.per_token);
        let experts = self.layers.iter().filter_map(Layer::experts);
        let stacks = experts.map(|e| &e.down.linear).filter(|down| down.rounds);
        most.max(stacks.map(|down| routes * down.inputs).max().unwrap_or(0))
    }

    /// Values of all vectors.
    pub(crate) fn vector_values(&self) -> usize {
        let vectors = self.layers.iter().flat_map(Layer::vectors);
        vectors.map(Vec::len).sum::<usize>() + self.norm.len()
    }
}
