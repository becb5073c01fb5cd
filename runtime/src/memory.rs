//! How much memory a model takes, before any of it is allocated.

use crate::cpu::session_bytes;
use crate::engine::SessionSpec;
use crate::error::Result;
use nq_formats::names::{EMBEDDING, HEAD};
use nq_formats::{ModelConfig, WeightStore, Zeros};
use nq_kernels::registry::WeightKind;
use std::collections::BTreeMap;

/// Bytes of the least that is mapped.
const PAGE: usize = 4096;

/// Different tokens of a text, at most: longer texts repeat theirs.
const DISTINCT: usize = 8192;

/// Where weights come from when a model is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightSource {
    /// Views of mapped files: what is not read takes no memory, what was read is given back.
    Mapped,
    /// Made in memory: quantized or drawn at load.
    Made,
}

/// Bytes that loading and running a model on the CPU takes, besides the program itself and
/// its tokenizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Weights as they are kept, norms included.
    pub weights: usize,
    /// Weights in the form they are read in, that are held at once while the rest is already
    /// packed: those of one layer.
    pub loading: usize,
    /// The same for the head, which is packed first.
    pub loading_head: usize,
    /// Keys and values of all sequences, filled to the last position.
    pub kv: usize,
    /// Activations of the greatest batch.
    pub scratch: usize,
    /// Logits, and the input of the head, of the rows wanted at once.
    pub logits: usize,
}

impl MemoryEstimate {
    /// What a model of shape `config` takes whose matrix `name` is of kind `kinds(name)`, in
    /// sessions that ask for the logits of at most `logits_rows` rows at once.
    pub fn new(
        config: &ModelConfig,
        kinds: &dyn Fn(&str) -> WeightKind,
        source: WeightSource,
        spec: &SessionSpec,
        logits_rows: usize,
    ) -> Self {
        let c = config;
        let vocab = (c.vocab_size, c.hidden_size);
        let head_name = match c.tie_word_embeddings {
            true => EMBEDDING,
            false => HEAD,
        };
        let head = kinds(head_name);
        let norms: usize = c.layer().norms().iter().map(|n| n.len.of(c)).sum();
        let norms = c.num_hidden_layers * norms + c.hidden_size;
        let mut weights = packed_bytes(head, vocab) + 4 * norms;
        if !c.tie_word_embeddings {
            let embedding = canonical_bytes(kinds(EMBEDDING), vocab);
            weights += match source {
                WeightSource::Made => embedding,
                // Pages of the rows that were looked up stay mapped.
                WeightSource::Mapped => {
                    let row = (embedding / c.vocab_size).max(PAGE);
                    embedding.min(row * DISTINCT.min(spec.slots * spec.ctx))
                }
            };
        }
        let mut loading = 0;
        for layer in 0..c.num_hidden_layers {
            let mut read = 0;
            for linear in c.layer().linears() {
                let kind = kinds(&linear.name(layer));
                weights += packed_bytes(kind, linear.dims(c));
                read += canonical_bytes(kind, linear.dims(c));
            }
            loading = loading.max(read);
        }
        MemoryEstimate {
            weights,
            loading,
            loading_head: packed_bytes(head, vocab) + canonical_bytes(head, vocab),
            kv: session_bytes::kv(c, spec),
            scratch: session_bytes::scratch(c, spec),
            logits: 4 * logits_rows * (c.vocab_size + c.hidden_size),
        }
    }

    /// Bytes while the model runs.
    pub fn running(&self) -> usize {
        self.weights + self.kv + self.scratch + self.logits
    }

    /// The most bytes at any moment, loading included.
    pub fn peak(&self) -> usize {
        let loading = (self.weights + self.loading).max(self.loading_head);
        self.running().max(loading)
    }
}

/// The kinds of all matrices in `store`, by name. A store that makes its weights makes all of
/// them for this; its owner knows the kinds already.
///
/// # Errors
/// A missing or misshapen tensor.
pub fn weight_kinds(
    config: &ModelConfig,
    store: &dyn WeightStore,
) -> Result<BTreeMap<String, WeightKind>> {
    let mut kinds = BTreeMap::new();
    let mut add = |name: &str, dims| -> Result<()> {
        kinds.insert(name.to_owned(), WeightKind::of(&store.matrix(name, dims)?));
        Ok(())
    };
    let vocab = (config.vocab_size, config.hidden_size);
    add(EMBEDDING, vocab)?;
    if !config.tie_word_embeddings {
        add(HEAD, vocab)?;
    }
    for layer in 0..config.num_hidden_layers {
        for linear in config.layer().linears() {
            add(&linear.name(layer), linear.dims(config))?;
        }
    }
    Ok(kinds)
}

/// Bytes of a weight as it is read.
fn canonical_bytes(kind: WeightKind, (out, inputs): (usize, usize)) -> usize {
    match kind {
        WeightKind::Dense(dtype) => out * inputs * dtype.size(),
        WeightKind::Affine { scheme, .. } => scheme.bytes(out, inputs),
    }
}

/// Bytes of a weight in the kernels' panels of 16 rows, whose zero-points are not padded to
/// whole bytes per row.
fn packed_bytes(kind: WeightKind, (out, inputs): (usize, usize)) -> usize {
    let rows = out.next_multiple_of(16);
    match kind {
        WeightKind::Dense(dtype) => rows * inputs * dtype.size(),
        WeightKind::Affine { scheme, act_order } => {
            let groups = scheme.group.count(inputs);
            let zeros = match scheme.zeros {
                Zeros::None => 0,
                Zeros::Integer => scheme.bits.bytes(rows * groups),
                Zeros::Offset => 2 * rows * groups,
            };
            let order = if act_order { 4 * inputs } else { 0 };
            rows * (scheme.bits.bytes(inputs) + 2 * groups) + zeros + order
        }
    }
}
