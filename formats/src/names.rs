//! The parameters of a Qwen3 dense model by their Hugging Face names (without `.weight`).

use crate::config::ModelConfig;

/// Token embedding `[vocab, hidden]`; the head too where it is tied.
pub const EMBEDDING: &str = "model.embed_tokens";
/// Final RMSNorm `[hidden]`.
pub const NORM: &str = "model.norm";
/// Untied head `[vocab, hidden]`.
pub const HEAD: &str = "lm_head";

/// A parameter's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `[len]`: a norm.
    Vector(usize),
    /// `[out_features, in_features]`: a Linear or the embedding.
    Matrix(usize, usize),
}

impl Shape {
    /// Number of elements.
    pub fn elements(self) -> usize {
        match self {
            Shape::Vector(n) => n,
            Shape::Matrix(rows, cols) => rows * cols,
        }
    }

    /// Dimensions, outermost first.
    pub fn dims(self) -> Vec<usize> {
        match self {
            Shape::Vector(n) => vec![n],
            Shape::Matrix(rows, cols) => vec![rows, cols],
        }
    }
}

/// The full name of a parameter of layer `layer`.
pub fn in_layer(layer: usize, suffix: &str) -> String {
    format!("model.layers.{layer}.{suffix}")
}

/// The parameters of one layer by suffix, norms included, in the order they are used.
pub fn layer_parameters(c: &ModelConfig) -> [(&'static str, Shape); 11] {
    use Shape::{Matrix, Vector};
    let (h, m) = (c.hidden_size, c.intermediate_size);
    [
        ("input_layernorm", Vector(h)),
        ("self_attn.q_proj", Matrix(c.q_dim(), h)),
        ("self_attn.k_proj", Matrix(c.kv_dim(), h)),
        ("self_attn.v_proj", Matrix(c.kv_dim(), h)),
        ("self_attn.q_norm", Vector(c.head_dim)),
        ("self_attn.k_norm", Vector(c.head_dim)),
        ("self_attn.o_proj", Matrix(h, c.q_dim())),
        ("post_attention_layernorm", Vector(h)),
        ("mlp.gate_proj", Matrix(m, h)),
        ("mlp.up_proj", Matrix(m, h)),
        ("mlp.down_proj", Matrix(h, m)),
    ]
}

/// Every parameter of a model of this shape, in the order they are used. A tied head is
/// the embedding and not listed again.
pub fn parameters(c: &ModelConfig) -> Vec<(String, Shape)> {
    let embedding = Shape::Matrix(c.vocab_size, c.hidden_size);
    let mut all = vec![(EMBEDDING.to_owned(), embedding)];
    for layer in 0..c.num_hidden_layers {
        for (suffix, shape) in layer_parameters(c) {
            all.push((in_layer(layer, suffix), shape));
        }
    }
    all.push((NORM.to_owned(), Shape::Vector(c.hidden_size)));
    if !c.tie_word_embeddings {
        all.push((HEAD.to_owned(), embedding));
    }
    all
}

/// The layer that a parameter or tensor belongs to, by its name; `None` outside of layers.
pub fn layer_of(name: &str) -> Option<usize> {
    let rest = name.strip_prefix("model.layers.")?;
    rest.split('.').next()?.parse().ok()
}

/// True for the seven Linears of each layer: what a quantization's default scheme covers.
pub fn is_layer_linear(name: &str) -> bool {
    name.starts_with("model.layers.") && name.ends_with("_proj")
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
    use super::natural_order;

    #[test]
    fn layers_sort_by_number() {
        let mut names = ["m.layers.10.a", "m.layers.9.b", "m.embed", "m.layers.9.a"];
        names.sort_by(|a, b| natural_order(a, b));
        let sorted = ["m.embed", "m.layers.9.a", "m.layers.9.b", "m.layers.10.a"];
        assert_eq!(names, sorted);
    }
}
