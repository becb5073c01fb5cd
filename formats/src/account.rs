//! The account of a checkpoint: every tensor and every key that its files hold is used by a reader, refused by
//! name, or left over for a stated reason.
//!
//! Readers say what they use: [`WeightStore::sources`] names the tensors behind a parameter, and an object of
//! a configuration notes each key that is asked for. Whatever nobody uses ends up here.

use crate::error::{Error, Result};
use crate::left_over::LeftOver;
use crate::store::{TensorEntry, WeightStore};
use crate::weight::Weight;
use nq_model::names::{EMBEDDING, HEAD, layer_of, parameters};
use nq_model::{Dims, ModelConfig};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Names of tensors that a model computes the same without, and why. Those of the second list are known to be
/// so in quantized files only: elsewhere they are what is left of a quantization.
const HARMLESS: [(&str, &str); 5] = [
    ("visual.", "images are not read"),
    (
        ".rotary_emb.inv_freq",
        "rotary frequencies are computed from the configuration",
    ),
    ("mtp.", SEVERAL),
    ("v_head.", "a value head is for training"),
    ("value_head.", "a value head is for training"),
];
const HARMLESS_IF_QUANTIZED: [(&str, &str); 10] = [
    (".k_scale", CACHE),
    (".v_scale", CACHE),
    (".q_scale", CACHE),
    (".prob_scale", CACHE),
    (".output_scale", CACHE),
    (".input_scale", ACTIVATIONS),
    (".input_zero_point", ACTIVATIONS),
    (".input_global_scale", ACTIVATIONS),
    ("_input_scale", ACTIVATIONS),
    ("_input_global_scale", ACTIVATIONS),
];
const SEVERAL: &str = "of an MTP layer that nq does not use";
pub(crate) const CACHE: &str = "the cache of keys and values is kept in a type of nq's own";
pub(crate) const ACTIVATIONS: &str = "activations are rounded by nq's own rules";

/// True if `pattern` describes `name`: with a dot or `_` in front, it is the end of a name, otherwise the start.
fn describes(pattern: &str, name: &str) -> bool {
    match pattern.starts_with(['.', '_']) {
        true => name.ends_with(pattern),
        false => name.starts_with(pattern) || name.contains(&format!(".{pattern}")),
    }
}

/// Accounts for all tensors of `store`, which has some of every layer: those that no parameter of `config`, and none of
/// `others`, is read from.
///
/// # Errors
/// [`Error::Unsupported`], naming a tensor without which the numbers could be wrong.
pub(crate) fn tensors(
    store: &dyn WeightStore,
    config: &ModelConfig,
    others: &[String],
    root: &Path,
) -> Result<Vec<LeftOver>> {
    let entries = store.entries();
    let layers = config.num_hidden_layers;
    let own = parameters(config).into_iter().map(|(name, _)| name);
    let used: BTreeSet<String> = (own.chain(others.iter().cloned()))
        .flat_map(|name| store.sources(&name))
        .collect();
    // GGUF files keep layers that predict several tokens at once behind the others.
    let beyond: BTreeSet<usize> = (entries.iter())
        .filter_map(|e| {
            let block = block_of(&e.name)?;
            let (_, part) = e.name.split_once(".nextn.")?;
            (block >= layers && part == "eh_proj.weight").then_some(block)
        })
        .collect();
    let unused = entries.iter().filter(|e| !used.contains(&e.name));
    let left = |e: &TensorEntry| match block_of(&e.name).filter(|block| beyond.contains(block)) {
        Some(_) => Ok(LeftOver::new(&e.name, SEVERAL)),
        None => left_over(e, store, config, root),
    };
    unused.map(left).collect()
}

/// Why the tensor that nobody reads may be left out.
fn left_over(
    entry: &TensorEntry,
    store: &dyn WeightStore,
    config: &ModelConfig,
    root: &Path,
) -> Result<LeftOver> {
    let name = entry.name.as_str();
    let quantized = store.quantization().is_some();
    let also = HARMLESS_IF_QUANTIZED.iter().filter(|_| quantized);
    let mut known = also.chain(&HARMLESS);
    if let Some((_, why)) = known.find(|(pattern, _)| describes(pattern, name)) {
        return Ok(LeftOver::new(name, *why));
    }
    // Ollama keeps what sees images beside the text model.
    if store.format() == "gguf" && name.starts_with("v.") {
        return Ok(LeftOver::new(name, HARMLESS[0].1));
    }
    if config.tie_word_embeddings && store.sources(HEAD).iter().any(|s| s == name) {
        let why = "a copy of the embedding, to which the head is tied";
        return Ok(LeftOver::new(name, why));
    }
    if name.ends_with(".bias")
        && let Some(tensor) = store.tensor(name, &entry.shape)?
    {
        match tensor.to_f32()?.iter().find(|v| **v != 0.0) {
            None => return Ok(LeftOver::new(name, "a bias of zeros")),
            Some(v) => {
                return Err(Error::Tensor {
                    path: path_of(entry, root),
                    tensor: name.into(),
                    expected: "no bias, or one of zeros".into(),
                    found: v.to_string(),
                });
            }
        }
    }
    let title = config.architecture.title;
    let adapter = [".lora_", "lora_embedding", "lora_magnitude"];
    let why = if adapter.iter().any(|part| name.contains(part)) {
        "an adapter that is not merged into the weights".into()
    } else if layer_of(name).is_some_and(|l| l >= config.num_hidden_layers) {
        format!("config.json says {} layers", config.num_hidden_layers)
    } else {
        let layers = config.num_hidden_layers;
        format!("a {title} model of {layers} layers has no such parameter")
    };
    Err(Error::Unsupported {
        path: path_of(entry, root),
        what: format!("tensor {name}"),
        why,
    })
}

/// The layer of a tensor by its name in GGUF files.
pub(crate) fn block_of(name: &str) -> Option<usize> {
    let (block, _) = name.strip_prefix("blk.")?.split_once('.')?;
    block.parse().ok()
}

fn path_of(entry: &TensorEntry, root: &Path) -> PathBuf {
    match root.is_dir() {
        true => root.join(&entry.file),
        false => root.into(),
    }
}

/// Whether the head is the embedding. A head that the files have and that differs from the embedding is the
/// head, whatever the configuration says: training set it apart.
pub(crate) fn is_tied(
    store: &dyn WeightStore,
    config: &ModelConfig,
    left: &mut Vec<LeftOver>,
) -> Result<bool> {
    if !config.tie_word_embeddings || !store.contains(HEAD) {
        return Ok(config.tie_word_embeddings);
    }
    let dims = Dims::new(config.vocab_size, config.hidden_size);
    if let (Weight::Dense(head), Weight::Dense(embedding)) =
        (store.matrix(HEAD, dims)?, store.matrix(EMBEDDING, dims)?)
    {
        let same = head.dtype() == embedding.dtype() && head.data() == embedding.data();
        crate::mapping::release(head.data());
        crate::mapping::release(embedding.data());
        if same {
            return Ok(true);
        }
    }
    let why = format!("{HEAD} differs from the embedding, and is the head");
    left.push(LeftOver::new("config.json: tie_word_embeddings true", why));
    Ok(false)
}
