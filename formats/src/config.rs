//! Reads `config.json` and `generation_config.json`.

use crate::error::{Error, Result};
use crate::keys::CONFIG;
use crate::left_over::LeftOver;
use crate::object::Object;
use nq_model::{Architecture, DType, Dims, Experts, LayerSpec, ModelConfig, NormKind};
use serde_json::{Map, Value};
use std::path::Path;

/// Sampling defaults from `generation_config.json`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// False means greedy.
    pub do_sample: Option<bool>,
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Number of best tokens to keep.
    pub top_k: Option<usize>,
    /// Keeps the smallest set of tokens with this probability.
    pub top_p: Option<f32>,
    /// Drops tokens below this share of the best one's probability.
    pub min_p: Option<f32>,
    /// Multiplicative repetition penalty.
    pub repetition_penalty: Option<f32>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
}

/// Reads a `config.json`.
///
/// # Errors
/// [`Error::Unsupported`], naming it, for another architecture, biases or norms that it has not, sliding
/// windows or a rope scaling other than YaRN and Llama 3's; [`Error::Malformed`] for missing,
/// mistyped or inconsistent keys.
pub fn parse(path: &Path, json: &[u8]) -> Result<ModelConfig> {
    read(path, json).map(|(config, _)| config)
}

/// Like [`parse`]; also returns the keys that it does not know.
pub fn read(path: &Path, json: &[u8]) -> Result<(ModelConfig, Vec<LeftOver>)> {
    let obj = Object::parse(path, json)?;
    let architecture = obj.architecture()?;
    // Read before this, to find the reader of the weights.
    for key in ["quantization_config", "compression_config"] {
        obj.get(key);
    }
    let within = obj.object(TEXT, |text| shape(text, &obj, architecture))?;
    let config = match within {
        Some(config) => config,
        None => shape(&obj, &obj, architecture)?,
    };
    Ok((config, obj.left_over("config.json")))
}

/// The shape that `obj` describes: all of a config.json, or the part on text of one that also describes
/// how images are seen. `whole` is all of it.
fn shape(
    obj: &Object<'_>,
    whole: &Object<'_>,
    architecture: &'static Architecture,
) -> Result<ModelConfig> {
    let path = obj.path;
    if !std::ptr::eq(obj, whole)
        && let Some(found) = obj.str("model_type")?.filter(|t| !architecture.is_type(t))
    {
        return Err(obj.bad(
            "text_config.model_type",
            architecture.model_type.into(),
            found,
        ));
    }
    obj.check_layers(architecture)?;
    let heads = obj.dim("num_attention_heads")?;
    let kv_heads = obj.dim("num_key_value_heads")?;
    let head_dim = obj.head_dim(architecture)?;
    let experts = obj.experts(architecture)?;
    let layers = obj.dim("num_hidden_layers")?;
    let (eos, within) = (whole.ids("eos_token_id")?, obj.ids("eos_token_id")?);
    // As in transformers, the whole model's word counts where both have one.
    const TIED: &str = "tie_word_embeddings";
    let (tied, within_tied) = (whole.bool(TIED)?, obj.bool(TIED)?);
    let (dtype, within_dtype) = (whole.float_type()?, obj.float_type()?);
    let cfg = ModelConfig {
        architecture,
        hidden_size: obj.dim("hidden_size")?,
        intermediate_size: match experts {
            // Some mixtures, which have no other MLP, leave it out.
            Some(e) if obj.get("intermediate_size").is_none() => e.width,
            _ => obj.dim("intermediate_size")?,
        },
        experts,
        delta: obj.delta(architecture, layers)?,
        hyper: obj.hyper(architecture)?,
        indexer: obj.indexer(architecture)?,
        ngrams: obj.ngrams(architecture, layers)?,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim,
        vocab_size: obj.dim("vocab_size")?,
        max_position_embeddings: obj.dim("max_position_embeddings")?,
        rms_norm_eps: obj.epsilon()?,
        rope: match architecture.rotary_parts {
            1 => obj.whole_rope(head_dim)?,
            parts => obj.rope(head_dim, parts)?,
        },
        tie_word_embeddings: tied.or(within_tied).unwrap_or(false),
        mtp_layers: obj.mtp_layers(architecture)?,
        eos_token_ids: if eos.is_empty() { within } else { eos },
        dtype: within_dtype.or(dtype),
    };
    check_eos(path, &cfg.eos_token_ids, cfg.vocab_size)?;
    obj.check_streams(&cfg)?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(obj.bad(
            "num_attention_heads",
            format!("a multiple of num_key_value_heads ({kv_heads})"),
            heads.to_string(),
        ));
    }
    // Each dimension is in range; their product must be too, or sizes overflow later.
    let layer = |spec: &LayerSpec| -> u128 {
        let dims = spec.matrices().map(|l| l.dims(&cfg));
        dims.map(
            |Dims {
                 rows: out,
                 cols: inputs,
             }| out as u128 * inputs as u128,
        )
        .sum()
    };
    let largest = architecture.kinds.iter().map(layer).max().unwrap_or(0);
    let tables = cfg.ngrams.iter().flat_map(|n| n.parameters());
    let tables: u128 = tables.map(|(_, shape)| shape.elements() as u128).sum();
    let total = largest * cfg.num_hidden_layers as u128
        + 2 * cfg.vocab_size as u128 * cfg.hidden_size as u128
        + tables;
    if total > MAX_PARAMETERS {
        return Err(obj.bad(
            "the model's dimensions",
            format!("at most {MAX_PARAMETERS} parameters"),
            total.to_string(),
        ));
    }
    let even = cfg.head_dim.is_multiple_of(2) && cfg.rotary_dims().is_multiple_of(2);
    if cfg.head_dim == 0 || !even {
        return Err(obj.bad(
            "head_dim",
            "an even number above 0".into(),
            cfg.head_dim.to_string(),
        ));
    }
    Ok(cfg)
}

/// The `config.json` of a model, with the keys of the published ones.
pub fn to_json(c: &ModelConfig) -> Map<String, Value> {
    // What other programs look for.
    let mut map = Map::from_iter([
        ("attention_dropout".into(), 0.0.into()),
        ("initializer_range".into(), 0.02.into()),
        ("max_window_layers".into(), c.num_hidden_layers.into()),
        ("sliding_window".into(), Value::Null),
        ("use_cache".into(), true.into()),
    ]);
    if c.experts.is_some() {
        map.insert("output_router_logits".into(), false.into());
        map.insert("router_aux_loss_coef".into(), 0.001.into());
    }
    let own = (CONFIG.iter()).filter(|key| !key.name.is_empty() && (key.models)(c.architecture));
    map.extend(own.filter_map(|key| Some((key.name.to_owned(), (key.value)(c)?))));
    map.sort_keys();
    map
}

impl GenerationDefaults {
    /// Reads a `generation_config.json`.
    ///
    /// # Errors
    /// [`Error::Malformed`] for mistyped keys.
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self> {
        Self::read(path, json).map(|(defaults, _)| defaults)
    }

    /// Like [`GenerationDefaults::parse`]; also returns the keys that it does not know.
    pub fn read(path: &Path, json: &[u8]) -> Result<(Self, Vec<LeftOver>)> {
        let obj = Object::parse(path, json)?;
        // Programs differ in how they say that all tokens are kept.
        let top_k = obj.typed("top_k", "an integer", Value::as_i64)?;
        let defaults = GenerationDefaults {
            do_sample: obj.bool("do_sample")?,
            temperature: obj.f64("temperature")?.map(|v| v as f32),
            top_k: top_k.map(|v| v.max(0) as usize),
            top_p: obj.f64("top_p")?.map(|v| v as f32),
            min_p: obj.f64("min_p")?.map(|v| v as f32),
            repetition_penalty: obj.f64("repetition_penalty")?.map(|v| v as f32),
            eos_token_ids: obj.ids("eos_token_id")?,
        };
        Ok((defaults, obj.left_over("generation_config.json")))
    }
}

/// Refuses ids outside the vocabulary: the model cannot produce them, and answers would never end.
pub(crate) fn check_eos(path: &Path, ids: &[u32], vocab_size: usize) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= vocab_size) {
        None => Ok(()),
        Some(id) => Err(Error::Malformed {
            path: path.into(),
            what: "eos_token_id".into(),
            expected: format!("ids below the vocabulary of {vocab_size}"),
            found: id.to_string(),
        }),
    }
}

/// More parameters than this (a hundred trillion) are rejected.
pub(crate) const MAX_PARAMETERS: u128 = 100_000_000_000_000;

/// The part of a config.json that describes the text model of one that also sees images.
pub(crate) const TEXT: &str = "text_config";

/// More experts per layer than this are rejected.
const MAX_EXPERTS: usize = 1 << 16;

impl Object<'_> {
    /// Width of a head: `head_dim`, or in families that may leave it out, an equal share of the residual
    /// stream for each query head.
    fn head_dim(&self, architecture: &Architecture) -> Result<usize> {
        const KEY: &str = "head_dim";
        if self.get(KEY).is_some() || !architecture.heads_split_hidden {
            return self.dim(KEY);
        }
        let (hidden, heads) = (self.dim("hidden_size")?, self.dim("num_attention_heads")?);
        if !hidden.is_multiple_of(heads) {
            let expected = format!("a multiple of num_attention_heads ({heads}), or a {KEY}");
            return Err(self.bad("hidden_size", expected, hidden.to_string()));
        }
        Ok(hidden / heads)
    }

    /// RMSNorm's epsilon; 1e-6 if absent.
    pub(crate) fn epsilon(&self) -> Result<f32> {
        const KEY: &str = "rms_norm_eps";
        match self.f64(KEY)?.unwrap_or(1e-6) {
            eps if (0.0..1.0).contains(&eps) => Ok(eps as f32),
            eps => Err(self.bad(KEY, "0 or more, below 1".into(), eps.to_string())),
        }
    }

    /// Token ids given as a number or a list of numbers.
    pub(crate) fn ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let read = |v: &Value| match v {
            Value::Array(a) => a.iter().map(id).collect(),
            v => id(v).map(|n| vec![n]),
        };
        Ok(self
            .typed(key, "a token id or a list of them", read)?
            .unwrap_or_default())
    }

    fn float_type(&self) -> Result<Option<DType>> {
        let (new, old) = (self.str("dtype")?, self.str("torch_dtype")?);
        let name = new.or(old).unwrap_or_default();
        Ok(match name.strip_prefix("torch.").unwrap_or(&name) {
            "bfloat16" => Some(DType::BF16),
            "float16" => Some(DType::F16),
            "float32" => Some(DType::F32),
            // No type of a dense weight: tensors state their own.
            _ => None,
        })
    }

    /// The architecture named by `architectures` and `model_type`.
    fn architecture(&self) -> Result<&'static Architecture> {
        let unsupported =
            |what: String| Err(self.unsupported(what, &nq_model::supported(|a| a.class)));
        let model_type = self.str("model_type")?;
        let classes = self.strings("architectures")?;
        let mut found = None;
        for class in classes {
            // Saved without a head: Qwen3Model.
            let causal = class
                .strip_suffix("Model")
                .map(|family| format!("{family}ForCausalLM"));
            found = nq_model::of_class(causal.as_deref().unwrap_or(&class));
            if found.is_none() {
                return unsupported(format!("architecture {class}"));
            }
        }
        let types: Vec<String> = nq_model::ARCHITECTURES
            .iter()
            .filter(|&&a| found.is_none_or(|f| f == a))
            .map(|a| format!("{:?}", a.model_type))
            .collect();
        match model_type {
            Some(t) => match nq_model::of_type(&t) {
                None => unsupported(format!("model_type {t}")),
                Some(a) if found.is_none_or(|f| f == a) => Ok(a),
                Some(_) => Err(self.bad("model_type", types.join(" or "), t)),
            },
            None => found
                .ok_or_else(|| self.bad("model_type", types.join(" or "), "no such key".into())),
        }
    }

    /// Refuses features that the architecture's layers do not have.
    fn check_layers(&self, architecture: &Architecture) -> Result<()> {
        let family = architecture.family;
        let biased = architecture.matrices().any(|l| l.bias);
        let norms = architecture.kinds.iter().flat_map(LayerSpec::norms);
        let head_norms = norms.into_iter().any(|n| n.kind == NormKind::Q);
        let gated = architecture.has_gates();
        for (key, has, what) in [
            ("attn_output_gate", gated, "gates of attention's output"),
            ("attention_bias", biased, "biases in attention"),
            ("qkv_bias", biased, "biases of queries, keys and values"),
            ("mlp_bias", false, "biases in the MLP"),
            ("use_qk_norm", head_norms, "norms of queries and keys"),
        ] {
            if self.bool(key)?.is_some_and(|says| says != has) {
                let no = if has { "" } else { "no " };
                let why = format!("{family} has {no}{what}");
                return Err(self.unsupported(format!("{key} {}", !has), &why));
            }
        }
        if !architecture.has_delta() {
            let types = self.strings("layer_types")?;
            if let Some(other) = types.iter().find(|t| *t != "full_attention") {
                let what = format!("a layer of type {other}");
                return Err(self.unsupported(what, "nq attends fully"));
            }
        }
        if self.bool("use_sliding_window")?.unwrap_or(false) {
            return Err(self.unsupported("use_sliding_window true".into(), "nq attends fully"));
        }
        if let Some(act) = self.str("hidden_act")?.filter(|a| a != "silu") {
            let why = format!("{family} uses silu");
            return Err(self.unsupported(format!("hidden_act {act}"), &why));
        }
        // Of recurrences: the gates of attention are sigmoids in every model.
        if !architecture.has_delta()
            && let Some(gate) = self.str("output_gate_type")?
            && !["silu", "swish"].contains(&gate.as_str())
        {
            let why = "nq gates the output of recurrences by silu";
            return Err(self.unsupported(format!("output_gate_type {gate}"), why));
        }
        Ok(())
    }

    /// The experts of a mixture, which every layer must have: a layer has none if
    /// `mlp_only_layers` lists it or `decoder_sparse_step` does not divide its number, counted from 1.
    fn experts(&self, architecture: &Architecture) -> Result<Option<Experts>> {
        if architecture.router().is_none() {
            return Ok(None);
        }
        let some_without = |what: String| {
            Err(self.unsupported(what, "nq runs mixtures whose every layer has experts"))
        };
        match self.u64("decoder_sparse_step")? {
            None | Some(1) => {}
            Some(n) => return some_without(format!("decoder_sparse_step {n}")),
        }
        let list = self.typed("mlp_only_layers", "a list", |v| v.as_array().cloned())?;
        if let Some(layer) = list.iter().flatten().next() {
            return some_without(format!("mlp_only_layers with {layer}"));
        }
        const SHARED: &str = "shared_expert_intermediate_size";
        let shared = match architecture.shares_expert() {
            true => self.dim(SHARED)?,
            false => 0,
        };
        if let Some(n) = self.u64(SHARED)?.filter(|&n| shared == 0 && n > 0) {
            let why = format!("{} shares no expert", architecture.family);
            return Err(self.unsupported(format!("{SHARED} {n}"), &why));
        }
        const COUNT: (&str, &str) = ("num_experts", "num_local_experts");
        let (key, other) = match self.get(COUNT.0) {
            Some(_) => COUNT,
            None => (COUNT.1, COUNT.0),
        };
        let count = self.dim(key)?;
        if self.get(other).is_some() && self.dim(other)? != count {
            return Err(self.bad(other, count.to_string(), self.dim(other)?.to_string()));
        }
        if count > MAX_EXPERTS {
            return Err(self.bad(key, format!("at most {MAX_EXPERTS}"), count.to_string()));
        }
        let per_token = self.dim("num_experts_per_tok")?;
        if per_token > count {
            let expected = format!("at most {key} ({count})");
            return Err(self.bad("num_experts_per_tok", expected, per_token.to_string()));
        }
        Ok(Some(Experts {
            count,
            per_token,
            width: self.dim("moe_intermediate_size")?,
            // Families with a shared expert divide unless told otherwise, and those that see.
            normalized: self
                .bool("norm_topk_prob")?
                .unwrap_or(shared > 0 || !architecture.also.is_empty()),
            shared,
        }))
    }
}
