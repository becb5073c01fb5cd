//! Parameters of a model by their Hugging Face names: those of their tensors, without `.weight`. Names outside the layers
//! are the same in every architecture; those within layers are in the rows of [`crate::ARCHITECTURES`], those of an MTP layer's own parts in
//! [`crate::mtp`].

use crate::mtp;
use crate::{
    ARCHITECTURES, Architecture, LAYERS, LayerSpec, LinearSpec, ModelConfig, NgramTable, VectorRow,
};
pub use crate::{Shape, expert_name, in_layer, parameter_of, tensor_name};
use std::borrow::Cow;

/// Token embedding `[vocab, hidden]`; also the head if they are tied.
pub const EMBEDDING: &str = "model.embed_tokens";
/// Final RMSNorm `[hidden]`.
pub const NORM: &str = "model.norm";
/// Of a residual of several streams, in place of [`NORM`]: the norm `[streams hidden]` of what reads the last layer's output.
pub const MIX_NORM: &str = "model.hyper_connection_mixer.hc_norm";
/// The first matrix `[rank, streams hidden]` by which it weighs the streams.
pub const MIX_DOWN: &str = "model.hyper_connection_mixer.input_mix_weight_down";
/// The second `[streams hidden, rank]`.
pub const MIX_UP: &str = "model.hyper_connection_mixer.input_mix_weight_up";
/// Untied head `[vocab, hidden]`.
pub const HEAD: &str = "lm_head";

/// Prefix of the names of experts' weights within a layer.
pub const EXPERTS: &str = "mlp.experts";

/// The matrix that computes logits: the embedding if they are tied.
pub fn head(c: &ModelConfig) -> &'static str {
    if c.tie_word_embeddings {
        EMBEDDING
    } else {
        HEAD
    }
}

/// The parameters between the last layer and the head: the final norm `[hidden]`, or in a model whose residual has several
/// streams the norm of these `[streams hidden]` and the two matrices by which they are weighed
/// ([`crate::HyperSpec`] without `inject`).
pub fn end_parameters(c: &ModelConfig) -> impl Iterator<Item = (String, Shape)> {
    let (stream, h) = (c.stream_width(), c.hidden_size);
    let all = match c.hyper {
        None => vec![(NORM.to_owned(), Shape::Vector(h))],
        Some(hyper) => vec![
            (MIX_NORM.to_owned(), Shape::Vector(stream)),
            (MIX_DOWN.to_owned(), Shape::Matrix(hyper.rank, stream)),
            (MIX_UP.to_owned(), Shape::Matrix(stream, hyper.rank)),
        ],
    };
    all.into_iter()
}

/// The parameters of layer `layer`, in the order they are used.
pub fn layer_parameters(c: &ModelConfig, layer: usize) -> impl Iterator<Item = (String, Shape)> {
    let all = c.layer(layer).parameters().into_iter();
    all.map(move |p| (in_layer(layer, &p.suffix()), p.shape(c)))
}

/// Every parameter of a model of this shape, in the order they are used, and then those of its MTP layer. A tied head is
/// not listed in addition to the embedding.
pub fn parameters(c: &ModelConfig) -> Vec<(String, Shape)> {
    let embedding = Shape::Matrix(c.vocab_size, c.hidden_size);
    let mut all = vec![(EMBEDDING.to_owned(), embedding)];
    for layer in 0..c.num_hidden_layers {
        all.extend(layer_parameters(c, layer));
    }
    all.extend(c.ngrams.iter().flat_map(|n| n.parameters()));
    all.extend(end_parameters(c));
    if !c.tie_word_embeddings {
        all.push((HEAD.to_owned(), embedding));
    }
    all.extend(mtp::parameters(c));
    all
}

/// Splits the name of a layer's parameter or tensor into the layer and the rest of the name.
pub fn split_layer(name: &str) -> Option<(usize, &str)> {
    let (layer, suffix) = name.strip_prefix(LAYERS)?.split_once('.')?;
    Some((layer.parse().ok()?, suffix))
}

/// The name of a layer's parameter or tensor within the layer: one of the model, or its MTP layer.
fn within(name: &str) -> Option<&str> {
    let trunk = split_layer(name).map(|(_, suffix)| suffix);
    trunk.or_else(|| name.strip_prefix(mtp::LAYER))
}

/// The layer of a parameter or tensor, from its name; `None` outside of layers, and for an MTP layer, which is behind
/// them.
pub fn layer_of(name: &str) -> Option<usize> {
    Some(split_layer(name)?.0)
}

/// The Linear of a layer whose weight has this name.
pub fn layer_linear(name: &str) -> Option<&'static LinearSpec> {
    let suffix = within(name)?;
    let kinds = ARCHITECTURES.iter().flat_map(|a| a.kinds);
    let mut linears = kinds.flat_map(LayerSpec::linears);
    linears.find(|l| l.suffix == suffix)
}

/// The matrix of a layer with this name, whether it can be quantized or not.
pub fn layer_matrix(name: &str) -> Option<&'static LinearSpec> {
    let suffix = within(name)?;
    let kinds = ARCHITECTURES.iter().flat_map(|a| a.kinds);
    let mut matrices = kinds.flat_map(LayerSpec::matrices);
    matrices.find(|l| l.suffix == suffix)
}

/// The stack of the weights of a layer's experts, if the parameter `name` is one.
pub fn stack(name: &str) -> Option<&'static LinearSpec> {
    layer_linear(name).filter(|linear| linear.stacked)
}

/// The experts of the layer that a parameter or tensor of theirs is in, and the rest of its name: `5.gate_proj.weight`.
pub fn in_experts(name: &str) -> Option<(&str, &str)> {
    let rest = within(name)?.strip_prefix(EXPERTS)?.strip_prefix('.')?;
    Some((&name[..name.len() - rest.len() - 1], rest))
}

/// The name of the stack that the expert's weight `name` is in; `name` itself, if it is no expert's.
pub fn stack_name(name: &str) -> Cow<'_, str> {
    let linear = |rest: &str| Some(rest.split_once('.')?.1.to_owned());
    match in_experts(name).and_then(|(experts, rest)| Some((experts, linear(rest)?))) {
        Some((experts, linear)) => format!("{experts}.{linear}").into(),
        None => name.into(),
    }
}

/// True for the matrices of a layer, and behind the last one, that are never quantized: those that score experts, tables of
/// n-grams and the like.
pub fn is_kept(name: &str) -> bool {
    let kinds = ARCHITECTURES.iter().flat_map(|a| a.kinds);
    let mut kept = kinds.flat_map(LayerSpec::kept);
    [MIX_DOWN, MIX_UP].contains(&name)
        || NgramTable::part_of(name).is_some()
        || within(name).is_some_and(|suffix| kept.any(|k| k.suffix == suffix))
}

/// The vector of a layer, neither a norm nor a bias, whose name this is.
pub fn layer_vector(name: &str) -> Option<&'static VectorRow> {
    let suffix = within(name)?;
    let kinds = ARCHITECTURES.iter().flat_map(|a| a.kinds);
    let mut vectors = kinds.flat_map(LayerSpec::vectors);
    vectors.find(|v| v.suffix == suffix)
}

/// True if Hugging Face files of the architecture hold the gains of this norm less 1.
pub fn is_less_one(architecture: &Architecture, name: &str) -> bool {
    let ends = [
        NORM,
        MIX_NORM,
        mtp::EMBEDDING_NORM,
        mtp::HIDDEN_NORM,
        mtp::NORM,
    ];
    if ends.contains(&name) {
        return architecture.norm_less_one;
    }
    let mut norms = architecture.kinds.iter().flat_map(LayerSpec::norms);
    within(name).is_some_and(|suffix| norms.any(|n| n.less_one && n.suffix == suffix))
}

/// True for the Linears of each layer, which a quantization's default scheme applies to, and for the one before an MTP
/// layer.
pub fn is_layer_linear(name: &str) -> bool {
    name == mtp::FC || layer_linear(name).is_some()
}

/// Compares names so that layer 2 comes before layer 10.
pub fn natural_order(a: &str, b: &str) -> std::cmp::Ordering {
    fn key(part: &str) -> (u64, &str) {
        (part.parse().map_or(u64::MAX, |n: u64| n), part)
    }
    a.split('.').map(key).cmp(b.split('.').map(key))
}

#[cfg(test)]
mod tests {
    use super::{expert_name, natural_order, stack_name};

    #[test]
    fn experts_have_the_names_of_their_stacks() {
        let stack = "model.layers.3.mlp.experts.down_proj";
        assert_eq!(stack_name(&expert_name(stack, 17)), stack);
        let shared = "model.layers.3.mlp.shared_expert.down_proj";
        assert_eq!(stack_name(shared), shared);
        assert_eq!(stack_name(stack), stack);
    }

    #[test]
    fn layers_sort_by_number() {
        let mut names = ["m.layers.10.a", "m.layers.9.b", "m.embed", "m.layers.9.a"];
        names.sort_by(|a, b| natural_order(a, b));
        let sorted = ["m.embed", "m.layers.9.a", "m.layers.9.b", "m.layers.10.a"];
        assert_eq!(names, sorted);
    }
}
