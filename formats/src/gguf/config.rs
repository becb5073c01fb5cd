//! `config.json` and `generation_config.json` from GGUF metadata.

use super::file::GgufFile;
use super::hyper;
use super::metadata::DEEPSTACK_LAYERS;
use super::names::ROPE_FACTORS;
use super::tokenizer::{END_TOKENS, TokenKind, Vocabulary};
use super::value::malformed;
use crate::blocks::BlockType;
use crate::error::{Error, Result};
use crate::keys::{CONFIG, Gguf, TILED, UNKNOWN, VALUE_HEADS};
use crate::left_over::LeftOver;
use crate::mtp;
use nq_model::{Architecture, RopeScaling};
use serde_json::{Map, Value, json};

/// A float as its shortest decimal: 1e-6, not the f64 nearest to its f32 value.
fn decimal(v: f64) -> Value {
    match (v as f32).to_string().parse::<f64>() {
        Ok(short) if f64::from(v as f32) == v => short.into(),
        _ => v.into(),
    }
}

/// The classifier of a reranker: a row for each label.
pub(super) const CLASSIFIER: &str = "cls.output.weight";

/// The tokens whose logits the rows of [`CLASSIFIER`] compute.
///
/// # Errors
/// [`Error::Unsupported`] for other labels than yes and no; [`Error::Malformed`] without such tokens.
pub(super) fn labels(
    file: &GgufFile,
    architecture: &Architecture,
    vocabulary: &Vocabulary<'_>,
) -> Result<Vec<usize>> {
    let key = format!("{}.classifier.output_labels", architecture.gguf);
    let labels = file.required(&key, file.strings(&key)?)?;
    let mut sorted = labels.clone();
    sorted.sort_unstable();
    if sorted != ["no", "yes"] {
        return Err(Error::Unsupported {
            path: file.path().into(),
            what: format!("{key} {labels:?}"),
            why: "nq ranks by yes and no".into(),
        });
    }
    let id = |label: &&str| {
        let found = vocabulary.iter().find(|(_, text, _)| text == label);
        let found = found.map(|(id, ..)| id as usize);
        found.ok_or_else(|| malformed(file.path(), &key, "tokens".into(), format!("{label:?}")))
    };
    labels.iter().map(id).collect()
}

/// What a configuration needs to know of the tensors of a file.
pub(super) struct FoundTensors<'a> {
    /// The type of `token_embd.weight`.
    pub(super) embedding: BlockType,
    /// The rows of `token_embd.weight`.
    pub(super) vocab: usize,
    /// True if there is no `output.weight`.
    pub(super) tied: bool,
    /// The divisors of the rotary frequencies, if there are any.
    pub(super) factors: Option<Vec<f32>>,
    /// The shape of a table of n-grams, if there is one.
    pub(super) table: Option<&'a [usize]>,
}

/// The object of `config.json`.
///
/// # Errors
/// [`Error::Malformed`], naming a key that is absent, has another type, or contradicts others.
pub(super) fn config(
    file: &GgufFile,
    architecture: &Architecture,
    tensors: &FoundTensors<'_>,
    vocabulary: &Vocabulary<'_>,
) -> Result<Map<String, Value>> {
    let key = |name: &str| format!("{}.{name}", architecture.gguf);
    let dim = |name: &str| {
        let key = key(name);
        file.required(&key, file.u64(&key)?)
    };
    let optional = |name: &str| file.u64(&key(name));
    let heads = dim("attention.head_count")?;
    let hidden = dim("embedding_length")?;
    let head_dim = match optional("attention.key_length")? {
        Some(n) => n,
        None => hidden / heads.max(1),
    };
    let equal = |name: &str, expected: u64| match optional(name)? {
        Some(n) if n != expected => Err(malformed(
            file.path(),
            &key(name),
            expected.to_string(),
            n.to_string(),
        )),
        _ => Ok(()),
    };
    equal("attention.value_length", head_dim)?;
    let rotary_dims = match optional("rope.dimension_count")? {
        Some(n) if architecture.rotary_parts > 1 => n,
        _ => {
            equal(
                "rope.dimension_count",
                head_dim / architecture.rotary_parts as u64,
            )?;
            head_dim / architecture.rotary_parts as u64
        }
    };
    let rows = tensors.vocab as u64;
    equal("vocab_size", rows)?;
    if vocabulary.len() as u64 != rows {
        let expected = format!("{rows} tokens, the rows of token_embd.weight");
        let found = vocabulary.len().to_string();
        return Err(malformed(
            file.path(),
            "tokenizer.ggml.tokens",
            expected,
            found,
        ));
    }
    let mixture = architecture.router().is_some();
    let eps = key("attention.layer_norm_rms_epsilon");
    let eps = file.required(&eps, file.f64(&eps)?)?;
    let theta = file.f64(&key("rope.freq_base"))?.unwrap_or(10_000.0);
    let kv_heads = match kv_heads_by_layer(file, architecture)? {
        Some(of_layers) => of_layers.into_iter().max().unwrap_or(0),
        None => optional(KV_HEADS)?.unwrap_or(heads),
    };
    let dtype = [
        (BlockType::F32, "float32"),
        (BlockType::F16, "float16"),
        (BlockType::BF16, "bfloat16"),
    ];
    let dtype = dtype.iter().find(|(t, _)| *t == tensors.embedding);
    let dtype = dtype.map(|(_, name)| name);
    let mut stretch = match &tensors.factors {
        None => rope_scaling(file, key)?,
        Some(factors) => llama3(file, factors, theta, head_dim)?,
    };
    if let Some(sections) = sections(file, architecture)? {
        if stretch.is_null() {
            stretch = json!({ "rope_type": "default" });
        }
        stretch["mrope_section"] = sections.into();
        stretch["mrope_interleaved"] = true.into();
    }
    let config = json!({
        "architectures": [architecture.class],
        "bos_token_id": file.u64("tokenizer.ggml.bos_token_id")?,
        "eos_token_id": file.u64("tokenizer.ggml.eos_token_id")?,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "model_type": architecture.model_type,
        "num_hidden_layers": trunk(file, key("block_count"), key("nextn_predict_layers"))?,
        "num_key_value_heads": kv_heads,
        "pad_token_id": file.u64("tokenizer.ggml.padding_token_id")?,
        "rms_norm_eps": decimal(eps),
        "rope_scaling": stretch,
        "rope_theta": decimal(theta),
        "tie_word_embeddings": tensors.tied,
        "torch_dtype": dtype,
        "use_sliding_window": false,
        "vocab_size": rows,
    });
    let Value::Object(mut config) = config else {
        unreachable!("the literal above is an object");
    };
    for entry in CONFIG
        .iter()
        .filter(|k| (k.models)(architecture) && !k.name.is_empty())
    {
        let value = match entry.gguf {
            _ if config.contains_key(entry.name) => None,
            // Some mixtures, which have no other MLP, leave its width out.
            Gguf::Must(name) if entry.name != "intermediate_size" || !mixture => Some(dim(name)?),
            Gguf::Must(name) | Gguf::May(name) => optional(name)?,
            Gguf::No => None,
        };
        config.extend(value.map(|v| (entry.name.to_owned(), v.into())));
    }
    if mixture {
        // A default that files of this architecture do not state.
        config.insert("norm_topk_prob".into(), true.into());
    }
    if architecture.has_delta() {
        let part = rotary_dims as f64 / head_dim.max(1) as f64;
        config.insert("partial_rotary_factor".into(), part.into());
        delta(file, architecture, &mut config)?;
        config.entry(mtp::LAYERS_KEY).or_insert(0.into());
    }
    if architecture.has_streams() {
        hyper::config(file, architecture, tensors.table, &mut config)?;
    }
    Ok(config)
}

/// How many frequencies follow time, row and column of a token of an image, in files of models that see: llama.cpp writes
/// four numbers, the last a 0, Ollama three.
fn sections(file: &GgufFile, architecture: &Architecture) -> Result<Option<Vec<i32>>> {
    let key = format!("{}.rope.dimension_sections", architecture.gguf);
    let Some(array) = file.array(&key)?.filter(|_| !architecture.also.is_empty()) else {
        return Ok(None);
    };
    let sections: Option<Vec<i32>> = array.i32s().map(|all| all.take(5).collect());
    match sections.as_deref() {
        Some([time, row, column] | [time, row, column, 0]) => Ok(Some(vec![*time, *row, *column])),
        found => {
            let expected = "time, row, column and perhaps a 0".into();
            let found = found.map_or("another type".into(), |all| format!("{all:?}"));
            Err(malformed(file.path(), &key, expected, found))
        }
    }
}

/// Layers but MTP layers, which stand behind the others.
fn trunk(file: &GgufFile, blocks: String, beyond: String) -> Result<u64> {
    let count = file.required(&blocks, file.u64(&blocks)?)?;
    let more = file.u64(&beyond)?.unwrap_or(0);
    count.checked_sub(more).ok_or_else(|| {
        let expected = format!("at most {count}, the {blocks}");
        malformed(file.path(), &beyond, expected, more.to_string())
    })
}

const KV_HEADS: &str = "attention.head_count_kv";

/// Key heads of each layer, where a file lists them: 0 for layers with a recurrence, and as many in all others.
fn kv_heads_by_layer(file: &GgufFile, architecture: &Architecture) -> Result<Option<Vec<u64>>> {
    let key = &format!("{}.{KV_HEADS}", architecture.gguf);
    let Some(array) = file.metadata().get(key).and_then(|v| v.as_array()) else {
        return Ok(None);
    };
    let heads = array.i32s().map(|all| all.map(u64::try_from).collect());
    let heads: Option<Vec<u64>> = heads.and_then(std::result::Result::ok);
    let most = heads.as_ref().and_then(|all| all.iter().max().copied());
    let fits = |n: &u64| (*n == 0 && architecture.has_delta()) || Some(*n) == most;
    match heads.filter(|all| all.iter().all(fits)) {
        Some(all) => Ok(Some(all)),
        None => {
            let expected = "one number for all layers with attention".into();
            Err(malformed(file.path(), key, expected, array.to_string()))
        }
    }
}

/// Adds the keys of the recurrences of a hybrid.
fn delta(
    file: &GgufFile,
    architecture: &Architecture,
    config: &mut Map<String, Value>,
) -> Result<()> {
    let key = |name: &str| format!("{}.{name}", architecture.gguf);
    let dim = |name: &str| file.required(&key(name), file.u64(&key(name))?);
    let (width, heads) = (dim("ssm.state_size")?, dim("ssm.time_step_rank")?);
    let inner = dim("ssm.inner_size")?;
    if width.checked_mul(heads) != Some(inner) {
        let expected = format!("{heads} value heads of ssm.state_size ({width})");
        return Err(malformed(
            file.path(),
            &key("ssm.inner_size"),
            expected,
            inner.to_string(),
        ));
    }
    config.insert("linear_value_head_dim".into(), width.into());
    let recurrent = key("attention.recurrent_layers");
    // Writers state a default beside a list, and readers take the list.
    if file.metadata().contains_key(&recurrent) {
        config.shift_remove("full_attention_interval");
    }
    let kind = |recurrent| match recurrent {
        true => "linear_attention",
        false => "full_attention",
    };
    // MTP layers stand behind the others.
    let layers = config["num_hidden_layers"].as_u64().unwrap_or(0) as usize;
    if let Some(heads) = kv_heads_by_layer(file, architecture)? {
        let types: Vec<&str> = heads.iter().take(layers).map(|n| kind(*n == 0)).collect();
        config.insert("layer_types".into(), types.into());
    }
    if let Some(array) = file.array(&recurrent)? {
        let Some(all) = array.bools() else {
            let expected = "an array of bool".into();
            return Err(malformed(
                file.path(),
                &recurrent,
                expected,
                array.to_string(),
            ));
        };
        let types: Vec<&str> = all.take(layers).map(kind).collect();
        config.insert("layer_types".into(), types.into());
    }
    if architecture.gguf_tiled && file.bool(&key("ssm.v_head_reordered"))? != Some(false) {
        config.insert(VALUE_HEADS.into(), TILED.into());
    }
    Ok(())
}

/// The `rope_scaling` of kind llama3 that gives these divisors of the frequencies, which files keep alone. Its factor is
/// the divisor of the lowest frequency. Between the bounds, the waves of a frequency within the original length
/// decide; only the quotients of that length and of the bounds count, so that the lower bound is 1.
fn llama3(file: &GgufFile, factors: &[f32], theta: f64, head_dim: u64) -> Result<Value> {
    let factor = f64::from(factors.last().copied().unwrap_or(1.0));
    let frequency = |i: usize| theta.powf(-2.0 * i as f64 / head_dim as f64);
    let scaling = |high: f64, length: u64| RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: high,
        original_max_position_embeddings: length as usize,
    };
    let fits = |scaling: &RopeScaling| {
        let close = |(i, &found): (usize, &f32)| {
            let divisor = scaling.divisor(frequency(i)).unwrap_or(1.0);
            (f64::from(found) - divisor).abs() <= 1e-4 * divisor
        };
        factors.len() as u64 == head_dim / 2 && factors.iter().enumerate().all(close)
    };
    // How much of each frequency between the bounds is kept.
    let kept = |&f: &f32| (1.0 / f64::from(f) - 1.0 / factor) / (1.0 - 1.0 / factor);
    let between: Vec<(f64, f64)> = (factors.iter().enumerate())
        .map(|(i, f)| (frequency(i) / std::f64::consts::TAU, kept(f)))
        .filter(|(_, kept)| (1e-3..1.0 - 1e-3).contains(kept))
        .collect();
    // Lengths beyond any model's, and NaN, are none.
    let whole = |v: f64| (1.0..1e9).contains(&v).then(|| v.round() as u64);
    let published = (4.0, 8192);
    let solved = match between[..] {
        [] => None,
        [(waves, kept)] => whole((3.0 * kept + 1.0) / waves).map(|length| (4.0, length)),
        [(waves, kept), .., (others, less)] => {
            let slope = (kept - less) / (waves - others);
            let low = slope * waves - kept; // by the distance of the bounds
            let high = ((1.0 + 1.0 / low) * 100.0).round() / 100.0;
            whole(slope / low).map(|length| (high, length))
        }
    };
    let candidates = [Some(published), solved].into_iter().flatten();
    let mut known = candidates.filter(|&(high, length)| fits(&scaling(high, length)));
    let Some((high, length)) = known.next() else {
        return Err(Error::Tensor {
            path: file.path().into(),
            tensor: ROPE_FACTORS.into(),
            expected: format!(
                "{} divisors of frequencies as in Llama 3.1, which grow between two bounds of wave length",
                head_dim / 2
            ),
            found: format!("{} others, the last {factor}", factors.len()),
        });
    };
    Ok(json!({
        "rope_type": "llama3",
        "factor": decimal(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }))
}

/// Keys of an architecture, behind its name, that are read beside those of [`CONFIG`].
const READ: &[&str] = &[
    "attention.layer_norm_rms_epsilon",
    "attention.recurrent_layers",
    "classifier.output_labels",
    "pooling_type",
    "rope.dimension_sections",
    "rope.freq_base",
    "rope.mrope_interleaved", // they are in turn in every model that nq runs
    DEEPSTACK_LAYERS,         // the tower's file says the same
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned", // whether a context was stretched before or after training changes nothing
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
    "ssm.v_head_reordered",
    "vocab_size",
];

/// Keys that record where a file comes from, or are read by other modules.
const OTHERS: [&str; 6] = [
    "general.",
    "imatrix.",
    "nq.",
    "quantize.",
    "split.",
    "tokenizer.",
];

/// The keys that nobody reads.
pub(super) fn left_over(file: &GgufFile, architecture: &Architecture) -> Vec<LeftOver> {
    let known = |key: &str| {
        let own = key
            .strip_prefix(architecture.gguf)
            .and_then(|k| k.strip_prefix('.'));
        let in_table = |k| CONFIG.iter().any(|key| key.gguf.name() == Some(k));
        own.is_some_and(|k| READ.contains(&k) || hyper::READ.contains(&k) || in_table(k))
            || OTHERS.iter().any(|prefix| key.starts_with(prefix))
    };
    let unknown = file.metadata().keys().filter(|key| !known(key));
    unknown
        .map(|key| LeftOver::new(format!("metadata: {key}"), UNKNOWN))
        .chain(hyper::left_over(file, architecture))
        .collect()
}

fn rope_scaling(file: &GgufFile, key: impl Fn(&str) -> String) -> Result<Value> {
    let name = |part: &str| key(&format!("rope.scaling.{part}"));
    let kind = match file.str(&name("type"))? {
        None | Some("none") => return Ok(Value::Null),
        Some(kind) => kind,
    };
    let factor = file.required(&name("factor"), file.f64(&name("factor"))?)?;
    let mut scaling = json!({ "rope_type": kind, "factor": decimal(factor) });
    if let Some(n) = file.u64(&name("original_context_length"))? {
        scaling["original_max_position_embeddings"] = n.into();
    }
    for (part, json) in [
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ] {
        if let Some(v) = file.f64(&name(part))? {
            scaling[json] = decimal(v);
        }
    }
    // As llama.cpp computes them: nothing else multiplies what YaRN's own factor is.
    for (part, neutral) in [("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0)] {
        if let Some(v) = file
            .f64(&name(part))?
            .filter(|v| *v >= 0.0 && *v != neutral)
        {
            return Err(Error::Unsupported {
                path: file.path().into(),
                what: format!("{} {v}", name(part)),
                why: format!("nq computes YaRN with {neutral}"),
            });
        }
    }
    if let Some(v) = file
        .f64(&name("yarn_log_multiplier"))?
        .filter(|v| *v != 0.0)
    {
        scaling["mscale"] = 1.0.into();
        scaling["mscale_all_dim"] = decimal(v);
    }
    if let Some(v) = file.f64(&name("attn_factor"))? {
        scaling["attn_factor"] = decimal(v);
    }
    Ok(scaling)
}

/// The tokens that end a text: those that keys name, and the control tokens that end turns.
pub(super) fn eos_ids(file: &GgufFile, vocabulary: &Vocabulary<'_>) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        if let Some(id) = file.u64(key)? {
            if id >= vocabulary.len() as u64 {
                let expected = format!("below {}, the number of tokens", vocabulary.len());
                return Err(malformed(file.path(), key, expected, id.to_string()));
            }
            ids.push(id as u32); // the vocabulary's length fits 32 bits
        }
    }
    for text in END_TOKENS {
        let end = |&(_, token, kind): &(u32, &str, TokenKind)| {
            token == text && kind == TokenKind::Control
        };
        ids.extend(vocabulary.iter().find(end).map(|(id, ..)| id));
    }
    let mut seen = Vec::new();
    ids.retain(|id| {
        !seen.contains(id) && {
            seen.push(*id);
            true
        }
    });
    Ok(ids)
}

/// Builds the object of `generation_config.json`.
///
/// # Errors
/// [`Error::Malformed`], naming a key of another type.
pub(super) fn generation(file: &GgufFile, eos: &[u32]) -> Result<Map<String, Value>> {
    let mut map = Map::new();
    let name = |part: &str| format!("general.sampling.{part}");
    if let Some(t) = file.f64(&name("temp"))? {
        map.insert("do_sample".into(), (t > 0.0).into());
        map.insert("temperature".into(), decimal(t));
    }
    if let Some(k) = file.u64(&name("top_k"))? {
        map.insert("top_k".into(), k.into());
    }
    for (part, json) in [
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("penalty_repeat", "repetition_penalty"),
    ] {
        if let Some(v) = file.f64(&name(part))? {
            map.insert(json.into(), decimal(v));
        }
    }
    map.insert("eos_token_id".into(), eos.into());
    Ok(map)
}
