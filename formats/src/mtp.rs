//! The layer with which a model predicts the token after the next (multi-token prediction), a drafter that comes with
//! it: hybrids are published with one. It is a layer with attention like those of the model, behind a Linear:
//!
//! `layer(fc([embedding_norm(embedding(token)), hidden_norm(h)]))`, normalized by [`NORM`], is what the model's head
//! turns into logits of the token behind `token`. `h` is what the head sees at the position before `token`.
//!
//! Files name its parameters `mtp.`, and so does nq. [`config`] and [`LayerStore`] show its layer as that of a model
//! of one layer, for code that reads layers.

use crate::error::Result;
use crate::exactness::Exactness;
use crate::left_over::LeftOver;
use crate::models::{Architecture, ModelConfig, Shape, in_layer};
use crate::object::Object;
use crate::scheme::Scheme;
use crate::store::{TensorEntry, WeightStore};
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::weight::Weight;
use std::borrow::Cow;
use std::path::Path;

/// The Linear `[hidden, 2 hidden]` before the layer. Its inputs are first the embedding's, then the hidden state's.
pub const FC: &str = "mtp.fc";
/// RMSNorm `[hidden]` of a token's embedding.
pub const EMBEDDING_NORM: &str = "mtp.pre_fc_norm_embedding";
/// RMSNorm `[hidden]` of the hidden state, which the model's final norm has normalized already.
pub const HIDDEN_NORM: &str = "mtp.pre_fc_norm_hidden";
/// RMSNorm `[hidden]` behind the layer.
pub const NORM: &str = "mtp.norm";

/// Prefix of the names of the layer's parameters.
pub(crate) const LAYER: &str = "mtp.layers.0.";

/// The key of config.json that says how many such layers a model has.
pub(crate) const LAYERS_KEY: &str = "mtp_num_hidden_layers";

/// The key that says that the layer has an embedding of its own.
pub(crate) const DEDICATED: &str = "mtp_use_dedicated_embeddings";

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

impl Object<'_> {
    /// [`ModelConfig::mtp_layers`] of a model of this architecture. That of layers which nq does not run is noted,
    /// and is 0: a model computes the same without them.
    pub(crate) fn mtp_layers(&self, architecture: &Architecture) -> Result<usize> {
        if !architecture.has_delta() {
            return Ok(0);
        }
        let unsaid = u64::from(architecture.mtp_unsaid);
        let layers = self.u64(LAYERS_KEY)?.unwrap_or(unsaid);
        let dedicated = self.bool(DEDICATED)?.unwrap_or(false);
        if layers > 1 {
            let why = "nq drafts with one such layer, and without these";
            self.note(LeftOver::new(
                format!("config.json: {LAYERS_KEY} {layers}"),
                why,
            ));
        } else if layers == 1 && dedicated {
            let why = "nq drafts with the model's embedding and head, and without this layer";
            self.note(LeftOver::new(format!("config.json: {DEDICATED} true"), why));
        }
        Ok(usize::from(layers == 1 && !dedicated))
    }
}

/// [`ModelConfig::mtp_layers`] of a model with these weights: files are published without the layer that their
/// configuration speaks of. What is missing is added to `left`.
pub(crate) fn stored_layers(
    store: &dyn WeightStore,
    c: &ModelConfig,
    left: &mut Vec<LeftOver>,
) -> usize {
    let absent = |name: &&String| !store.contains(name);
    let names: Vec<String> = parameters(c).map(|(name, _)| name).collect();
    let Some(first) = names.iter().find(absent) else {
        return c.mtp_layers;
    };
    // Where config.json does not say that there is a layer, nothing is missing.
    if !c.architecture.mtp_unsaid || names.iter().any(|name| store.contains(name)) {
        let name = format!("config.json: {LAYERS_KEY} {}", c.mtp_layers);
        left.push(LeftOver::new(name, format!("the files have no {first}")));
    }
    0
}

/// A view of a model's weights in which `model.layers.0` is its MTP layer, as [`config`] describes it.
pub struct LayerStore<'a>(&'a dyn WeightStore);

impl<'a> LayerStore<'a> {
    /// A view of the weights of the whole model.
    pub fn new(store: &'a dyn WeightStore) -> Self {
        LayerStore(store)
    }
}

/// The name in the whole model of a parameter of the view.
fn whole(name: &str) -> Cow<'_, str> {
    match name.strip_prefix(&in_layer(0, "")) {
        Some(suffix) => in_mtp_layer(suffix).into(),
        // Of the whole model, beside its layers.
        None => name.into(),
    }
}

impl WeightStore for LayerStore<'_> {
    fn format(&self) -> &'static str {
        self.0.format()
    }

    fn contains(&self, name: &str) -> bool {
        self.0.contains(&whole(name))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        self.0.vector(&whole(name), len)
    }

    fn matrix(&self, name: &str, dims: (usize, usize)) -> Result<Weight> {
        self.0.matrix(&whole(name), dims)
    }

    fn scheme(&self, name: &str) -> Option<Scheme> {
        self.0.scheme(&whole(name))
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        self.0.tensor(&whole(name), shape)
    }

    fn stored(&self, name: &str, dims: (usize, usize)) -> Result<StoredWeight> {
        self.0.stored(&whole(name), dims)
    }

    fn sources(&self, name: &str) -> Vec<String> {
        self.0.sources(&whole(name))
    }

    fn exactness(&self, name: &str) -> Exactness {
        self.0.exactness(&whole(name))
    }

    fn is_bare(&self) -> bool {
        self.0.is_bare()
    }

    fn entries(&self) -> Vec<TensorEntry> {
        self.0.entries()
    }

    fn file_bytes(&self) -> u64 {
        self.0.file_bytes()
    }

    fn quantization(&self) -> Option<&serde_json::Value> {
        self.0.quantization()
    }

    fn gguf_file(&self) -> Option<&Path> {
        self.0.gguf_file()
    }
}
