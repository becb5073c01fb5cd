//! What GGUF files say of models whose residual has several streams (`qwen4exp`): of indexers and tables of n-grams. Files
//! state a table's primes, offsets and factors in place of what they follow from.

use super::file::GgufFile;
use super::value::{Array, malformed};
use super::writer::GgufPlan;
use crate::error::Result;
use crate::left_over::LeftOver;
use nq_model::{Architecture, ModelConfig, NgramTable};
use serde_json::{Map, Value, json};

/// Positions of a block of an indexer: 0 for layers without one.
const RATIOS: &str = "attention.compress_ratios";
/// Where no file says otherwise, as in all published models.
const USUAL_RATIO: u64 = 4;
/// The layers with a table, from 0.
const LAYERS: &str = "ple.layers";
/// Width of a row of a table.
const ROW_WIDTH: &str = "embedding_length_per_layer_input";
const FACTORS: &str = "ple.layer_multipliers";
const ROWS: &str = "ple.head_vocab_sizes";
const OFFSETS: &str = "ple.head_offsets";
/// The token that n-grams do not reach across, which need not be the one that ends answers.
const END: &str = "ple.eos_token_id";
/// The token whose n-grams stand for those of images.
const IMAGE: &str = "ple.image_token_id";
/// Seed of the factors, a key of nq's own: other files are of models with the usual one.
const SEED: &str = "nq.ngram_seed";

/// The keys that are read here, behind the architecture's name.
pub(super) const READ: [&str; 8] = [
    RATIOS, LAYERS, ROW_WIDTH, FACTORS, ROWS, OFFSETS, END, IMAGE,
];

/// The tensor that holds a table whole.
pub(crate) const TABLE: &str = "per_layer_token_embd.weight";

/// Matrices in which a table is shown, if its rows can be divided so: what reads a part at a time needs little memory.
const PARTS: u64 = 128;

/// The integers of the array `name`, if the file has it.
///
/// # Errors
/// [`crate::Error::Malformed`] for an array of something else, or of negative numbers.
fn numbers(file: &GgufFile, name: &str) -> Result<Option<Vec<u64>>> {
    let Some(array) = file.array(name)? else {
        return Ok(None);
    };
    let numbers = array.integers();
    let bad = || {
        let expected = "integers of 0 or more".into();
        malformed(file.path(), name, expected, array.to_string())
    };
    numbers.ok_or_else(bad).map(Some)
}

/// Adds to `config` what files of a model with several streams say in their own way. `table` is the shape of [`TABLE`].
///
/// # Errors
/// [`crate::Error::Malformed`], naming a key that is absent, has another type, or contradicts others.
pub(super) fn config(
    file: &GgufFile,
    architecture: &Architecture,
    table: Option<&[usize]>,
    config: &mut Map<String, Value>,
) -> Result<()> {
    let key = |name: &str| format!("{}.{name}", architecture.gguf);
    let dim = |name: &str| file.required(&key(name), file.u64(&key(name))?);
    // What files of this architecture do not state, as all are of models with these.
    config.insert("indexer_kv_heads".into(), 1.into());
    config.insert("output_gate_type".into(), "sigmoid".into());
    let ratio = ratio(file, &key(RATIOS), config)?;
    config.insert("indexer_compress_ratio".into(), ratio.into());
    let layers = numbers(file, &key(LAYERS))?.unwrap_or_default();
    let ids: Vec<u64> = layers.iter().map(|l| l.saturating_add(1)).collect();
    config.insert("ple_layer_ids".into(), ids.into());
    match layers.len() {
        0 => return Ok(()),
        1 => {}
        n => {
            let expected = "at most one layer: a file holds one table".into();
            return Err(malformed(
                file.path(),
                &key(LAYERS),
                expected,
                n.to_string(),
            ));
        }
    }
    let heads =
        (dim("ple.ngram_size")?.saturating_sub(1)).saturating_mul(dim("ple.heads_per_ngram")?);
    let width = dim(ROW_WIDTH)?.saturating_mul(heads);
    config.insert("ple_embed_dim".into(), width.into());
    let sizes = file.required(&key(ROWS), numbers(file, &key(ROWS))?)?;
    let Some(&first) = sizes.first() else {
        let expected = format!("{heads} numbers of rows");
        return Err(malformed(file.path(), &key(ROWS), expected, "none".into()));
    };
    config.insert("ngram_vocab_size_base".into(), first.into());
    let least = sizes.iter().fold(0, |sum: u64, n| sum.saturating_add(*n));
    let rows = table
        .and_then(|shape| shape.first())
        .map_or(least, |n| *n as u64);
    // A power of two fills the rows of published tables up; where none does, their own number.
    let fills = |multiple: &u64| least.checked_next_multiple_of(*multiple) == Some(rows);
    let multiple = (0..=16)
        .map(|bits| 1u64 << bits)
        .find(fills)
        .unwrap_or(rows);
    config.insert("make_ngram_vocab_size_divisible_by".into(), multiple.into());
    let parts = 1 << rows.trailing_zeros().min(PARTS.trailing_zeros());
    config.insert("split_ngram_parts".into(), json!(parts));
    if let Some(seed) = file.u64(SEED)? {
        config.insert("seed".into(), seed.into());
    }
    let end = dim(END)?;
    let other = config.get("eos_token_id").and_then(Value::as_u64);
    let ends: Vec<u64> = [Some(end), other.filter(|&id| id != end)]
        .into_iter()
        .flatten()
        .collect();
    config.insert("eos_token_id".into(), ends.into());
    Ok(())
}

/// The positions of a block, one number for all layers with attention.
fn ratio(file: &GgufFile, key: &str, config: &Map<String, Value>) -> Result<u64> {
    let ratios = match file.metadata().get(key) {
        None => return Ok(USUAL_RATIO),
        Some(value) => match value.as_u64() {
            Some(one) => return Ok(one),
            None => numbers(file, key)?.unwrap_or_default(),
        },
    };
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64);
    let layers = layers.unwrap_or(0) as usize;
    let most = ratios.iter().take(layers).max().copied().unwrap_or(0);
    let regular = ratios.iter().take(layers).all(|&n| n == 0 || n == most);
    if !regular || ratios.len() < layers {
        let expected = format!("for {layers} layers one number, or 0 for those without an indexer");
        let found = format!("{} up to {most}", ratios.len());
        return Err(malformed(file.path(), key, expected, found));
    }
    Ok(if most == 0 { USUAL_RATIO } else { most })
}

/// What a file says of blocks of positions that cannot be: converters that do not know how newer versions of transformers
/// call layers with an indexer write 0 for these, too.
pub(super) fn left_over(file: &GgufFile, architecture: &Architecture) -> Option<LeftOver> {
    let key = format!("{}.{RATIOS}", architecture.gguf);
    let ratios = numbers(file, &key).ok()??;
    let none = architecture.has_streams() && ratios.iter().all(|n| *n == 0);
    let why =
        "is 0 for all layers: blocks are taken to have 4 positions, as in the published model";
    none.then(|| LeftOver::new(format!("metadata: {key}"), why))
}

/// The integers that folders keep of a table under `name`, of which there are to be `len`.
///
/// # Errors
/// [`crate::Error::Malformed`] for another number of them, or others than integers.
pub(super) fn integers(
    file: &GgufFile,
    c: &ModelConfig,
    name: &str,
    len: usize,
) -> Result<Option<Vec<i64>>> {
    let layers = c.ngrams.iter().flat_map(|table| &table.layers);
    let of_layers = |what: &str| {
        layers
            .clone()
            .any(|&l| NgramTable::integers_name(l, what) == name)
    };
    let keys = [
        ("layer_multipliers", FACTORS),
        ("ngram_heads_vocab_sizes", ROWS),
        ("ngram_heads_offsets", OFFSETS),
    ];
    let Some((_, key)) = keys.into_iter().find(|(what, _)| of_layers(what)) else {
        return Ok(None);
    };
    let key = format!("{}.{key}", c.architecture.gguf);
    let Some(found) = numbers(file, &key)? else {
        return Ok(None);
    };
    if found.len() != len {
        let found = found.len().to_string();
        return Err(malformed(
            file.path(),
            &key,
            format!("{len} numbers"),
            found,
        ));
    }
    // Greater ones are none that nq computes.
    let signed = |n: u64| i64::try_from(n).unwrap_or(-1);
    Ok(Some(found.into_iter().map(signed).collect()))
}

/// Adds to `plan` the keys that [`config`] and [`integers`] read of a model of shape `c`.
pub(super) fn describe(plan: &mut GgufPlan, c: &ModelConfig) {
    let key = |name: &str| format!("{}.{name}", c.architecture.gguf);
    if let Some(indexer) = &c.indexer {
        let ratio = |layer: usize| match c.layer(layer).indexer() {
            Some(_) => indexer.block as i32, // divides a page
            None => 0,
        };
        let ratios: Vec<i32> = (0..c.num_hidden_layers).map(ratio).collect();
        plan.set(key(RATIOS), Array::of_i32s(&ratios));
    }
    let Some((table, &layer)) = c.ngrams.as_ref().and_then(|n| Some((n, n.layers.first()?))) else {
        return;
    };
    let hash = table.hash(0, c.vocab_size);
    plan.set(key(LAYERS), Array::of_i32s(&[layer as i32])); // below 2^28, as all dimensions
    plan.set(key(ROW_WIDTH), table.row_width() as u32);
    plan.set(key(FACTORS), Array::of_u64s(&hash.factors));
    plan.set(key(ROWS), Array::of_u64s(&hash.rows));
    plan.set(key(OFFSETS), Array::of_u64s(&hash.offsets));
    plan.set(key(END), table.end);
    plan.set(SEED, super::Value::U64(table.seed));
}
