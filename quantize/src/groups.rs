//! The groups of weights that share a scheme, and their places in a model.

use nq_formats::{Group, Scheme};
use nq_model::names::{EMBEDDING, HEAD};
use nq_model::{Dims, LinearKind, ModelConfig, Product, mtp};

/// Weights that share one scheme, because a kernel reads them as one matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WeightGroup {
    /// Name for tables, e.g. `layers.3 q k v`.
    pub name: String,
    /// Its place in the model.
    pub place: GroupPlace,
    /// Names and dimensions `(out, in)` of its weights.
    pub weights: Vec<(String, Dims)>,
    /// Inputs of a head whose place differs between formats: a scheme's groups and spans must not reach beyond it.
    /// `None` if inputs have the same order everywhere.
    pub head: Option<usize>,
}

/// The place of a group in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupPlace {
    /// The Linears of one product of a layer.
    Layer {
        /// Layer, counted from 0.
        index: usize,
        /// Index in [`nq_model::LayerSpec::products`].
        product: usize,
    },
    /// The embedding, which is also the head if they are tied.
    Embedding,
    /// A head with its own weight.
    Head,
    /// An MTP layer, or the Linear before it.
    Mtp,
}

impl WeightGroup {
    /// Bytes of the group under `scheme`.
    pub(crate) fn bytes(&self, scheme: Scheme) -> u64 {
        let bytes = |w: &(String, Dims)| scheme.bytes(w.1.rows, w.1.cols) as u64;
        self.weights.iter().map(bytes).sum()
    }

    /// True if whole groups of `scheme`, and whole spans, fill the rows of all weights, and each of their heads where these
    /// are moved; blocks of a trellis need only fill rows, as no format that moves heads has them.
    pub(crate) fn fits(&self, scheme: Scheme) -> bool {
        let scheme = match scheme {
            Scheme::Affine(scheme) => scheme,
            Scheme::Trellis(scheme) => {
                return self.weights.iter().all(|w| scheme.check(w.1).is_ok());
            }
            Scheme::Exl3(_) => return false,
        };
        let lengths = [Some(scheme.group), scheme.scales.span()];
        let fills = |length| match length {
            Group::Channel => true,
            Group::Size(n) => (self.weights.iter().map(|w| w.1.cols))
                .chain(self.head)
                .all(|inputs| inputs.is_multiple_of(n as usize)),
        };
        lengths.into_iter().flatten().all(fills)
    }
}

/// All groups of a model, in running order: the embedding first, an untied head last.
pub(crate) fn groups(config: &ModelConfig) -> Vec<WeightGroup> {
    let ends = Dims::new(config.vocab_size, config.hidden_size);
    let tied = config.tie_word_embeddings;
    let mut groups = vec![WeightGroup {
        name: if tied {
            "embedding and head"
        } else {
            "embedding"
        }
        .into(),
        place: GroupPlace::Embedding,
        weights: vec![(EMBEDDING.into(), ends)],
        head: None,
    }];
    for index in 0..config.num_hidden_layers {
        for (place, product) in config.layer(index).products().into_iter().enumerate() {
            let linears = product.linears.iter();
            groups.push(WeightGroup {
                name: format!("layers.{index} {}", product.words()),
                place: GroupPlace::Layer {
                    index,
                    product: place,
                },
                weights: linears.map(|l| (l.name(index), l.dims(config))).collect(),
                head: moved_head(config, product),
            });
        }
    }
    if !tied {
        groups.push(WeightGroup {
            name: "head".into(),
            place: GroupPlace::Head,
            weights: vec![(HEAD.into(), ends)],
            head: None,
        });
    }
    groups
}

/// Inputs of a value head of a recurrence, for the product that reads them, if GGUF files have these heads in another
/// order than published folders.
fn moved_head(config: &ModelConfig, product: &Product) -> Option<usize> {
    let delta =
        (config.delta).filter(|d| config.architecture.gguf_tiled && d.value_heads > d.key_heads);
    let reads = product
        .linears
        .iter()
        .any(|l| l.kind == LinearKind::DeltaOut);
    delta.filter(|_| reads).map(|d| d.value_dim)
}

/// The groups of an MTP layer and of the Linear before it. No sensitivity is measured for them, and nothing is chosen: an
/// answer is the same whatever drafts are.
pub(crate) fn mtp_groups(config: &ModelConfig) -> Vec<WeightGroup> {
    let Some(layer) = mtp::config(config) else {
        return Vec::new();
    };
    let group = |name: String, weights| WeightGroup {
        name,
        place: GroupPlace::Mtp,
        weights,
        head: None,
    };
    let product = |p: &Product| {
        let linears = p.linears.iter();
        let named = linears.map(|l| (mtp::in_mtp_layer(l.suffix), l.dims(&layer)));
        group(format!("mtp {}", p.words()), named.collect())
    };
    let hidden = config.hidden_size;
    let fc = group(
        "mtp fc".into(),
        vec![(mtp::FC.into(), Dims::new(hidden, 2 * hidden))],
    );
    let products = layer.layer(0).products().into_iter().map(product);
    [fc].into_iter().chain(products).collect()
}
