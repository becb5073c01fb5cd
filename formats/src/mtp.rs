//! What files say of the layer with which a model predicts the token after the next ([`nq_model::mtp`]), and a view of it
//! ([`LayerStore`]) as that of a model of one layer, for code that reads layers.

use crate::error::Result;
use crate::left_over::LeftOver;
use crate::object::Object;
use crate::scheme::Scheme;
use crate::store::{Overlay, WeightStore};
use crate::weight::Weight;
use nq_model::mtp::{in_mtp_layer, parameters};
use nq_model::{Architecture, Dims, ModelConfig, in_layer};
use std::borrow::Cow;

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
        } else if layers == 1 && architecture.has_streams() {
            let why = "nq does not draft with a layer that reads several streams, and runs the model without it";
            self.note(LeftOver::new(format!("config.json: {LAYERS_KEY} 1"), why));
            return Ok(0);
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

impl Overlay for LayerStore<'_> {
    fn inner(&self) -> &dyn WeightStore {
        self.0
    }

    fn inner_name<'n>(&self, name: &'n str) -> Cow<'n, str> {
        match name.strip_prefix(&in_layer(0, "")) {
            Some(suffix) => in_mtp_layer(suffix).into(),
            // Of the whole model, beside its layers.
            None => name.into(),
        }
    }

    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        self.0.scheme_in_levels(&self.inner_name(name))
    }

    fn matrix_in_codes(&self, name: &str, dims: Dims) -> Result<Weight> {
        self.0.matrix_in_codes(&self.inner_name(name), dims)
    }

    fn matrix_in_levels(&self, name: &str, dims: Dims) -> Result<Weight> {
        self.0.matrix_in_levels(&self.inner_name(name), dims)
    }
}
