//! The architectures that nq supports: the names and dimensions of a layer's weights,
//! which of them share an input, and what a layer computes. All other code walks these tables.
//!
//! A layer is a list of blocks. A new architecture whose blocks the others have is a file here and a
//! row of [`ARCHITECTURES`]; one whose layers compute something else also needs a variant of [`Mixer`]
//! and kernels.

#![forbid(unsafe_code)]

mod architecture;
mod dimensions;
mod dtype;
pub mod forward;
mod kind;
mod layer;
mod llama;
pub mod mtp;
pub mod names;
mod ngrams;
mod packed;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen4_exp;
mod shape;
mod streams;
pub mod vision;

pub use architecture::{Architecture, Preset};
pub use dimensions::{Delta, Experts, HyperShape, IndexerShape, OutputGate, Rope, RopeScaling};
pub use dtype::{DType, FLOATS};
pub use kind::{LinearKind, NormKind, VectorKind, Width};
pub use layer::{
    AttentionSpec, BlockSpec, DeltaSpec, ExpertsSpec, HeadNorms, HyperSpec, IndexerSpec,
    InputSource, LAYERS, LayerSpec, LinearSpec, Mixer, MlpSpec, NgramsSpec, NormSpec, Parameter,
    Product, SharedSpec, VectorRow, expert_name, in_layer, parameter_of, tensor_name,
};
pub use llama::LLAMA;
pub use ngrams::{NgramHash, NgramTable};
pub use shape::{Dims, ModelConfig, Shape};

/// Every architecture.
pub static ARCHITECTURES: &[&Architecture] = &[
    &qwen3::QWEN3,
    &qwen3::QWEN3_MOE,
    &qwen3::QWEN3_VL,
    &qwen3::QWEN3_VL_MOE,
    &qwen3_5::QWEN3_5,
    &qwen3_5::QWEN3_5_MOE,
    &qwen3_5::QWEN3_NEXT,
    &qwen4_exp::QWEN4_EXP,
    &qwen2::QWEN2,
    &LLAMA,
];

/// The architecture whose `key` is `value`, e.g. the one whose `model_type` is `qwen3`.
pub fn find(key: fn(&Architecture) -> &'static str, value: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().copied().find(|a| key(a) == value)
}

/// The architecture of the class that config.json's `architectures` names.
pub fn of_class(class: &str) -> Option<&'static Architecture> {
    ARCHITECTURES.iter().copied().find(|a| a.is_class(class))
}

/// The architecture of a `model_type` of config.json.
pub fn of_type(model_type: &str) -> Option<&'static Architecture> {
    ARCHITECTURES
        .iter()
        .copied()
        .find(|a| a.is_type(model_type))
}

/// The supported architectures, for messages, each with its `key` in brackets.
pub fn supported(key: fn(&Architecture) -> &'static str) -> String {
    let name = |a: &Architecture| format!("{} models ({})", a.title, key(a));
    let names: Vec<String> = ARCHITECTURES.iter().copied().map(name).collect();
    format!("nq runs {}", names.join(", "))
}

impl Preset {
    /// The presets of all architectures.
    pub fn all() -> impl Iterator<Item = Preset> {
        ARCHITECTURES.iter().flat_map(|a| a.presets.iter().copied())
    }

    /// The preset with this name, ignoring case; the family may be left out (`30b-a3b`).
    pub fn find(name: &str) -> Option<Preset> {
        let name = name.to_ascii_lowercase();
        let size = |p: &Preset| p.name.split_once('-').map(|(_, size)| size);
        Self::all().find(|p| p.name == name || size(p) == Some(&name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::borrow::Cow;
    use std::collections::BTreeSet;

    /// Properties that all other code assumes of a row.
    #[test]
    fn rows_are_told_apart_and_name_each_weight_once() {
        for (i, a) in ARCHITECTURES.iter().copied().enumerate() {
            assert_eq!(find(|a| a.class, a.class), Some(a));
            assert_eq!(find(|a| a.model_type, a.model_type), Some(a));
            assert_eq!(find(|a| a.gguf, a.gguf), Some(a));
            assert!(!ARCHITECTURES[..i].contains(&a), "{a:?} twice");
            for kind in a.kinds {
                let parameters = kind.parameters();
                let distinct = |name: fn(&Parameter) -> Cow<'static, str>| {
                    let names: BTreeSet<_> = parameters.iter().map(name).collect();
                    assert_eq!(names.len(), parameters.len(), "{a:?}: {names:?}");
                };
                distinct(Parameter::suffix);
                distinct(Parameter::gguf);
                let kinds: BTreeSet<_> = kind.matrices().map(|l| l.kind).collect();
                assert_eq!(kinds.len(), kind.matrices().count(), "{a:?}: {kinds:?}");
                let norms: BTreeSet<_> = kind.norms().iter().map(|n| n.kind).collect();
                assert_eq!(norms.len(), kind.norms().len(), "{a:?}: {norms:?}");
            }
        }
    }

    /// A layer ends with its MLP: who only looks at the inputs of products needs not compute the last one.
    #[test]
    fn layers_end_with_an_mlp() {
        for kind in ARCHITECTURES.iter().flat_map(|a| a.kinds) {
            let last = &kind.blocks.last().unwrap().mixer;
            assert!(
                matches!(last, Mixer::Mlp(..) | Mixer::Experts(..)),
                "{last:?}"
            );
        }
    }

    /// One matrix for a kernel, and scales that can be moved to where the input is produced.
    #[test]
    fn products_share_an_input_that_its_source_makes() {
        for &a in ARCHITECTURES {
            for preset in a.presets {
                let c = preset.config();
                assert_eq!(c.architecture, a);
                for (layer, product) in
                    (c.layers()).flat_map(|l| l.products().into_iter().map(move |p| (l, p)))
                {
                    let inputs = product.inputs(&c);
                    assert!(product.linears.iter().all(|l| l.dims(&c).cols == inputs));
                    match product.source {
                        InputSource::Norm(kind) => assert_eq!(layer.norm(kind).len.of(&c), inputs),
                        InputSource::Rows(kind) => {
                            assert_eq!(kind.dims(&c).rows, inputs * product.shares(&c));
                        }
                        InputSource::Fixed => {}
                        InputSource::Heads(kind) => {
                            let groups = c.num_attention_heads / c.num_key_value_heads;
                            assert_eq!(kind.dims(&c).rows * groups, inputs);
                        }
                    }
                }
            }
        }
    }
}
