//! What files say of the layer with which a model predicts the token after the next ([`nq_model::mtp`]), and a view of it
//! ([`LayerStore`]) as that of a model of one layer, for code that reads layers.

use crate::error::Result;
use crate::exactness::Exactness;
use crate::left_over::LeftOver;
use crate::object::Object;
use crate::scheme::Scheme;
use crate::store::{TensorEntry, WeightStore};
use crate::stored::StoredWeight;
use crate::tensor::Tensor;
use crate::weight::Weight;
use nq_model::mtp::{in_mtp_layer, parameters};
use nq_model::{Architecture, ModelConfig, in_layer};
use std::borrow::Cow;
use std::path::Path;

/// The key of config.json that says how many such layers a model has.
pub(crate) const LAYERS_KEY: &str = "mtp_num_hidden_layers";

/// The key that says that the layer has an embedding of its own.
pub(crate) const DEDICATED: &str = "mtp_use_dedicated_embeddings";

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

/// A view of a model's weights in which `model.layers.0` is its MTP layer, as [`nq_model::mtp::config`] describes it.
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
