//! What a config.json says of a residual of several streams, of what chooses the positions that attention sees, and of
//! tables of n-grams (transformers' `qwen4_exp`).

use crate::error::{Error, Result};
use crate::object::{MAX_DIM, Object};
use crate::store::WeightStore;
use nq_model::{Architecture, HyperShape, IndexerShape, ModelConfig, NgramTable};
use serde_json::Value;
use std::path::Path;

/// More streams, heads of an indexer or taps are rejected, and wider ones.
const MOST_STREAMS: usize = 64;
const MOST_HEADS: usize = 1 << 12;
/// More heads of all tables together are rejected: each takes the next prime.
const MOST_NGRAM_HEADS: usize = 1 << 10;
/// Longer n-grams are rejected.
const MOST_TOKENS: usize = 16;
/// A vocabulary of n-grams has ids that a state of f32 values keeps exactly.
const MOST_IDS: usize = 1 << 24;
/// Positions of a page of keys and values, which blocks of an indexer must not straddle.
const PAGE: usize = 128;

const LAYERS: &str = "ple_layer_ids";
const WIDTH: &str = "ple_embed_dim";
const PARTS: &str = "split_ngram_parts";

impl Object<'_> {
    /// A dimension from `least` to `most`.
    fn within(&self, key: &str, least: usize, most: usize) -> Result<usize> {
        match self.dim(key)? {
            n if (least..=most).contains(&n) => Ok(n),
            n => Err(self.bad(key, format!("{least} to {most}"), n.to_string())),
        }
    }

    /// As [`Object::within`], or `otherwise` if there is no such key.
    fn within_or(&self, key: &str, bounds: (usize, usize), otherwise: usize) -> Result<usize> {
        match self.get(key) {
            None => Ok(otherwise),
            Some(_) => self.within(key, bounds.0, bounds.1),
        }
    }

    /// The streams of the residual, if the architecture has several.
    pub(crate) fn hyper(&self, architecture: &Architecture) -> Result<Option<HyperShape>> {
        if !architecture.has_streams() {
            return Ok(None);
        }
        Ok(Some(HyperShape {
            streams: self.within("hc_count", 2, MOST_STREAMS)?,
            rank: self.dim("hc_lowrank")?,
        }))
    }

    /// What chooses the positions that attention sees, if the architecture has such.
    pub(crate) fn indexer(&self, architecture: &Architecture) -> Result<Option<IndexerShape>> {
        if architecture.kinds.iter().all(|k| k.indexer().is_none()) {
            return Ok(None);
        }
        const KEY_HEADS: &str = "indexer_kv_heads";
        const BUDGET: &str = "indexer_budget";
        const BLOCK: &str = "indexer_compress_ratio";
        let key_heads = self.dim(KEY_HEADS)?;
        if key_heads != 1 {
            let what = format!("{KEY_HEADS} {key_heads}");
            return Err(self.unsupported(what, "nq runs indexers with one head of keys"));
        }
        let shape = IndexerShape {
            heads: self.within("indexer_n_heads", 1, MOST_HEADS)?,
            head_dim: self.within("indexer_head_dim", 1, MOST_HEADS)?,
            budget: self.dim(BUDGET)?,
            block: self.dim(BLOCK)?,
        };
        if !PAGE.is_multiple_of(shape.block) {
            let what = format!("{BLOCK} {}", shape.block);
            let why = format!("nq keeps blocks within pages of {PAGE} positions");
            return Err(self.unsupported(what, &why));
        }
        if !shape.budget.is_multiple_of(shape.block) {
            let expected = format!("a multiple of {BLOCK} ({})", shape.block);
            return Err(self.bad(BUDGET, expected, shape.budget.to_string()));
        }
        Ok(Some(shape))
    }

    /// The tables of n-grams of a model of `layers` layers; `None` if no layer has one.
    pub(crate) fn ngrams(
        &self,
        architecture: &Architecture,
        layers: usize,
    ) -> Result<Option<NgramTable>> {
        if architecture.kinds.iter().all(|k| k.ngrams().is_none()) {
            return Ok(None);
        }
        const TYPES: [&str; 4] = ["bfloat16", "float16", "float32", "float8_e4m3fn"];
        if let Some(kind) = self.str("ple_embedding_dtype")?
            && !TYPES.contains(&kind.as_str())
        {
            let what = format!("ple_embedding_dtype {kind}");
            return Err(self.unsupported(what, "nq reads tables of n-grams in floats and FP8"));
        }
        let id = |v: &Value| {
            let id = v.as_u64()?.checked_sub(1)?;
            usize::try_from(id).ok().filter(|&id| id < layers)
        };
        let ids = |v: &Value| v.as_array()?.iter().map(id).collect::<Option<Vec<usize>>>();
        let expected = format!("numbers of layers from 1 to {layers}");
        let mut with_table = self.typed(LAYERS, &expected, ids)?.unwrap_or_default();
        with_table.sort_unstable();
        with_table.dedup();
        if with_table.is_empty() {
            return Ok(None);
        }
        let ends = self.ids("eos_token_id")?;
        let Some(&end) = ends.first() else {
            let expected = "a token that ends a text, which n-grams do not reach across".into();
            return Err(self.bad("eos_token_id", expected, "no such key".into()));
        };
        let table = NgramTable {
            width: match self.get(WIDTH) {
                None => self.dim("hidden_size")?,
                Some(_) => self.dim(WIDTH)?,
            },
            taps: self.within_or("ple_conv_kernel_size", (1, MOST_STREAMS), 4)?,
            longest: self.within_or("ngram_size", (2, MOST_TOKENS), 3)?,
            heads_per_length: self.within_or("heads_per_ngram", (1, MOST_NGRAM_HEADS), 8)?,
            least_rows: self.within_or(
                "ngram_vocab_size_base",
                (1, MAX_DIM as usize),
                20_000_000,
            )?,
            multiple: self.within_or(
                "make_ngram_vocab_size_divisible_by",
                (1, MAX_DIM as usize),
                128,
            )?,
            parts: self.within_or(PARTS, (1, 1 << 16), 512)?,
            seed: self.u64("seed")?.unwrap_or(1234),
            layers: with_table,
            end,
        };
        self.check_table(&table)?;
        Ok(Some(table))
    }

    /// Refuses tables that cannot be.
    fn check_table(&self, table: &NgramTable) -> Result<()> {
        let heads = table.heads();
        if heads * table.layers.len() > MOST_NGRAM_HEADS {
            let expected = format!("at most {MOST_NGRAM_HEADS} heads of n-grams");
            let found = format!("{heads} in each of {} layers", table.layers.len());
            return Err(self.bad("heads_per_ngram", expected, found));
        }
        if !table.width.is_multiple_of(heads) {
            let expected = format!("a multiple of {heads}, the heads of n-grams");
            return Err(self.bad(WIDTH, expected, table.width.to_string()));
        }
        for place in 0..table.layers.len() {
            let rows = table.table_rows(place);
            if !rows.is_multiple_of(table.parts) {
                let expected = format!("a divisor of {rows}, the rows of a table of n-grams");
                return Err(self.bad(PARTS, expected, table.parts.to_string()));
            }
        }
        Ok(())
    }

    /// Refuses streams, indexers and tables that do not fit the rest of the model.
    pub(crate) fn check_streams(&self, c: &ModelConfig) -> Result<()> {
        if c.stream_width() as u64 > MAX_DIM {
            let expected = format!("at most {MAX_DIM} values of all streams");
            return Err(self.bad("hc_count", expected, c.stream_width().to_string()));
        }
        if let Some(indexer) = &c.indexer
            && indexer.head_dim < c.rotary_dims()
        {
            let expected = format!("at least {}, the values that are rotated", c.rotary_dims());
            return Err(self.bad("indexer_head_dim", expected, indexer.head_dim.to_string()));
        }
        let Some(table) = &c.ngrams else {
            return Ok(());
        };
        if c.vocab_size > MOST_IDS {
            let expected = format!("at most {MOST_IDS} with tables of n-grams");
            return Err(self.bad("vocab_size", expected, c.vocab_size.to_string()));
        }
        if table.end as usize >= c.vocab_size {
            let expected = format!("an id below the vocabulary of {}", c.vocab_size);
            return Err(self.bad("eos_token_id", expected, table.end.to_string()));
        }
        let interval = c.delta.map_or(1, |d| d.interval);
        let attends = |layer: &&usize| (*layer + 1).is_multiple_of(interval);
        match table.layers.iter().find(attends) {
            None => Ok(()),
            Some(layer) => {
                let what = format!("{LAYERS} with {}", layer + 1);
                let why = "nq runs tables of n-grams in layers with a recurrence";
                Err(self.unsupported(what, why))
            }
        }
    }
}

/// Compares the integers that files keep of tables of n-grams with those that follow from the configuration. Returns the
/// names of those that are there.
///
/// # Errors
/// [`Error::Tensor`] for a tensor with others.
pub(crate) fn check_integers(
    store: &dyn WeightStore,
    c: &ModelConfig,
    root: &Path,
) -> Result<Vec<String>> {
    let mut there = Vec::new();
    let Some(table) = &c.ngrams else {
        return Ok(there);
    };
    for (place, &layer) in table.layers.iter().enumerate() {
        let hash = table.hash(place, c.vocab_size);
        for (what, values) in [
            ("layer_multipliers", &hash.factors),
            ("ngram_heads_vocab_sizes", &hash.rows),
            ("ngram_heads_offsets", &hash.offsets),
        ] {
            let name = NgramTable::integers_name(layer, what);
            let Some(found) = store.integers(&name, values.len())? else {
                continue;
            };
            let expected: Vec<i64> = values.iter().map(|&n| n as i64).collect();
            if found != expected {
                return Err(Error::Tensor {
                    path: root.into(),
                    tensor: name,
                    expected: format!("{expected:?}, which follow from the configuration"),
                    found: format!("{found:?}"),
                });
            }
            there.push(name);
        }
    }
    Ok(there)
}

/// Refuses to write a model with several streams as a folder for other programs, in whose formats nq has no place for them.
pub(crate) fn refuse_export(c: &ModelConfig, out: &Path) -> Result<()> {
    match c.hyper {
        None => Ok(()),
        Some(_) => Err(Error::Unsupported {
            path: out.into(),
            what: format!("{} as a folder for other programs", c.architecture.family),
            why: "nq writes these models in its own format and as GGUF files".into(),
        }),
    }
}
