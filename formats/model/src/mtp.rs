//! The layer with which a model predicts the token after the next (multi-token prediction), a drafter that comes with
//! it: hybrids are published with one. It is a layer with attention like those of the model, behind a Linear:
//!
//! `layer(fc([embedding_norm(embedding(token)), hidden_norm(h)]))`, normalized by [`NORM`], is what the model's head
//! turns into logits of the token behind `token`. `h` is what the head sees at the position before `token`.
//!
//! Files name its parameters `mtp.`, and so does nq. [`config`] is its layer as a model of one layer, for code that
//! reads layers.

use crate::{ModelConfig, Shape};

/// The Linear `[hidden, 2 hidden]` before the layer. Its inputs are first the embedding's, then the hidden state's.
pub const FC: &str = "mtp.fc";
/// RMSNorm `[hidden]` of a token's embedding.
pub const EMBEDDING_NORM: &str = "mtp.pre_fc_norm_embedding";
/// RMSNorm `[hidden]` of the hidden state, which the model's final norm has normalized already.
pub const HIDDEN_NORM: &str = "mtp.pre_fc_norm_hidden";
/// RMSNorm `[hidden]` behind the layer.
pub const NORM: &str = "mtp.norm";

/// Prefix of the names of the layer's parameters.
pub const LAYER: &str = "mtp.layers.0.";

/// The name of the layer's parameter of this name within a layer.
pub fn in_mtp_layer(suffix: &str) -> String {
    format!("{LAYER}{suffix}")
}

/// True for the name of a tensor of the layer or around it, in Hugging Face and GGUF files of a model of this shape.
pub fn is_of_layer(tensor: &str, c: &ModelConfig) -> bool {
    // GGUF files have the layer behind the others.
    let block = format!("blk.{}.", c.num_hidden_layers);
    tensor.starts_with("mtp.") || tensor.starts_with(&block)
}

/// The shape of the layer as a model of one layer, which has attention; `None` without one.
pub fn config(c: &ModelConfig) -> Option<ModelConfig> {
    (c.mtp_layers > 0).then(|| ModelConfig {
        num_hidden_layers: 1,
        mtp_layers: 0,
        // Without recurrences, every layer has attention.
        delta: None,
        ..c.clone()
    })
}

/// The parameters of the layer and around it, in the order they are used; none without one.
pub fn parameters(c: &ModelConfig) -> impl Iterator<Item = (String, Shape)> {
    config(c).into_iter().flat_map(|layer| {
        let hidden = layer.hidden_size;
        let norm = |name: &str| (name.to_owned(), Shape::Vector(hidden));
        let before = [
            norm(EMBEDDING_NORM),
            norm(HIDDEN_NORM),
            (FC.to_owned(), Shape::Matrix(hidden, 2 * hidden)),
        ];
        let within = layer.layer(0).parameters().into_iter();
        let within = within.map(|p| (in_mtp_layer(&p.suffix()), p.shape(&layer)));
        let all: Vec<_> = before.into_iter().chain(within).collect();
        all.into_iter().chain([norm(NORM)])
    })
}

impl ModelConfig {
    /// Number of parameters of the model with its MTP layer; a tied head counts once.
    pub fn parameters(&self) -> usize {
        let mtp = parameters(self).map(|(_, shape)| shape.elements());
        self.trunk_parameters() + mtp.sum::<usize>()
    }
}
