//! EAGLE-3 heads (arXiv 2503.01840): one layer that drafts tokens for a model from the model's residual streams.
//!
//! A folder of config.json and safetensors, as published for Qwen3:
//!
//! ```text
//! fc                              [hidden, 3 hidden]        of three residual streams, side by side
//! midlayer.input_layernorm        [hidden]                  of a token's embedding
//! midlayer.hidden_norm            [hidden]                  of fc's output, or of the layer's own
//! midlayer.self_attn.{q,k,v,o}_proj                         inputs of q, k, v: both, side by side
//! midlayer.post_attention_layernorm, midlayer.mlp.{gate,up,down}_proj
//! norm                            [hidden]
//! lm_head                         [draft vocab, hidden]
//! d2t                             I64 [draft vocab]         id in the model's vocabulary, less that in the head's
//! ```
//!
//! The layer may be called `layers.0` too. Without `embed_tokens` the model's embedding is used.

use crate::config::MAX_PARAMETERS;
use crate::dense::DenseStore;
use crate::error::{Error, Result};
use crate::files::{CONFIG, Files};
use crate::object::Object;
use crate::shards::Shards;
use crate::store::{Overlay, WeightStore};
use crate::tensor::Tensor;
use crate::weight::Weight;
use bytes::Bytes;
use nq_model::names::{EMBEDDING, HEAD};
use nq_model::{DType, Dims, LLAMA, ModelConfig, Rope};
use std::path::{Path, PathBuf};

/// Number of residual streams that a head reads.
pub const TAPS: usize = 3;

/// The shape of a head.
#[derive(Clone, Debug, PartialEq)]
pub struct EagleConfig {
    /// Width of the model's residual stream, and of the head's.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Rows of the model's embedding.
    pub vocab_size: usize,
    /// Tokens that the head can draft.
    pub draft_vocab_size: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// True if the normalized stream, not the stream itself, is what attention is added to.
    pub norm_before_residual: bool,
    /// Numbers of layers after which the model's residual stream is read; `None`: the customary ones.
    pub taps: Option<[usize; TAPS]>,
}

impl EagleConfig {
    /// Reads a head's `config.json`.
    ///
    /// # Errors
    /// [`Error::Unsupported`], naming it, for another architecture or rope scaling; [`Error::Malformed`] for
    /// missing, mistyped or inconsistent keys.
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self> {
        let obj = Object::parse(path, json)?;
        let classes = obj.strings("architectures")?;
        if !classes.iter().any(|c| c.contains("Eagle3")) {
            let why = "expected an EAGLE-3 head (LlamaForCausalLMEagle3)";
            return Err(obj.unsupported(format!("architectures {classes:?}"), why));
        }
        let layers = obj.dim("num_hidden_layers")?;
        if layers != 1 {
            let why = "heads have one layer";
            return Err(obj.unsupported(format!("num_hidden_layers {layers}"), why));
        }
        // EAGLE 3.1: each of the streams that are read has a norm of its own.
        let within = obj
            .get("eagle_config")
            .and_then(|v| v.get("norm_before_fc"));
        let within = within.is_some_and(|v| v.as_bool() != Some(false) && !v.is_null());
        if within || obj.bool("norm_before_fc")?.unwrap_or(false) {
            let why = "nq drafts with EAGLE-3 heads, which have no norms before fc";
            return Err(obj.unsupported("norm_before_fc true".into(), why));
        }
        let (hidden, heads) = (obj.dim("hidden_size")?, obj.dim("num_attention_heads")?);
        let kv_heads = obj.dim("num_key_value_heads")?;
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a multiple of num_key_value_heads ({kv_heads})");
            return Err(obj.bad("num_attention_heads", expected, heads.to_string()));
        }
        let vocab = obj.dim("vocab_size")?;
        let or = |key: &str, otherwise: usize| match obj.get(key) {
            Some(_) => obj.dim(key),
            None => Ok(otherwise),
        };
        let draft_vocab = or("draft_vocab_size", vocab)?;
        if draft_vocab > vocab {
            let expected = format!("at most vocab_size ({vocab})");
            return Err(obj.bad("draft_vocab_size", expected, draft_vocab.to_string()));
        }
        let head_dim = or("head_dim", hidden / heads)?;
        let config = EagleConfig {
            hidden_size: hidden,
            intermediate_size: obj.dim("intermediate_size")?,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            vocab_size: vocab,
            draft_vocab_size: draft_vocab,
            rms_norm_eps: obj.epsilon()?,
            rope: obj.whole_rope(head_dim)?,
            norm_before_residual: obj.bool("norm_before_residual")?.unwrap_or(false),
            taps: taps(&obj)?,
        };
        if config.head_dim == 0 || !config.head_dim.is_multiple_of(2) {
            let found = config.head_dim.to_string();
            return Err(obj.bad("head_dim", "an even number above 0".into(), found));
        }
        // Each dimension is in range; their product must be too, or sizes overflow later.
        match config.weights() {
            n if n <= MAX_PARAMETERS => Ok(config),
            n => Err(obj.bad(
                "the head's dimensions",
                format!("at most {MAX_PARAMETERS} parameters"),
                n.to_string(),
            )),
        }
    }

    /// The shape of the layer as a model of one layer, which drafts for `model`.
    pub fn layer(&self, model: &ModelConfig) -> ModelConfig {
        ModelConfig {
            architecture: &LLAMA,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            experts: None,
            delta: None,
            hyper: None,
            indexer: None,
            ngrams: None,
            num_hidden_layers: 1,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            rms_norm_eps: self.rms_norm_eps,
            rope: self.rope,
            mtp_layers: 0,
            ..model.clone()
        }
    }

    /// Number of values in the weights that a drafted token reads.
    pub fn elements(&self) -> u64 {
        self.weights() as u64
    }

    fn weights(&self) -> u128 {
        let (h, d) = (self.hidden_size as u128, self.head_dim as u128);
        let q = self.num_attention_heads as u128 * d;
        let kv = self.num_key_value_heads as u128 * d;
        let attention = 2 * (q + 2 * kv) + q;
        let others = 3 * self.intermediate_size + TAPS * self.hidden_size + self.draft_vocab_size;
        h * (attention + others as u128)
    }

    /// The numbers of layers of a model with `layers` of them after which its residual stream is read.
    pub fn taps_of(&self, layers: usize) -> [usize; TAPS] {
        let customary = [2, layers / 2, layers.saturating_sub(3)];
        self.taps.unwrap_or(customary)
    }
}

/// `eagle_config.eagle_aux_hidden_state_layer_ids`: layers whose inputs are read.
fn taps(obj: &Object<'_>) -> Result<Option<[usize; TAPS]>> {
    let key = "eagle_config.eagle_aux_hidden_state_layer_ids";
    let list = (obj.get("eagle_config")).and_then(|v| v.get("eagle_aux_hidden_state_layer_ids"));
    let Some(list) = list.filter(|v| !v.is_null()) else {
        return Ok(None);
    };
    let ids: Option<Vec<usize>> = list.as_array().and_then(|list| {
        let id = |v: &serde_json::Value| usize::try_from(v.as_u64()?).ok();
        list.iter().map(id).collect()
    });
    match ids.and_then(|ids| <[usize; TAPS]>::try_from(ids).ok()) {
        Some(ids) => Ok(Some(ids)),
        None => Err(obj.bad(key, "three layers".into(), list.to_string())),
    }
}

/// The inputs of q, k and v: a token's embedding, or a stream. A [`Half`]'s name is appended to that of the
/// projection.
const HALVES: [&str; 2] = [".of_embedding", ".of_stream"];

/// One half of the inputs of q, k and v: `[rows, hidden]` of `[rows, 2 hidden]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// A token's normalized embedding.
    Embedding,
    /// The normalized stream before it.
    Stream,
}

/// The weights of a head, q, k and v also by halves.
struct HalvedStore(DenseStore);

impl Overlay for HalvedStore {
    fn inner(&self) -> &dyn WeightStore {
        &self.0
    }

    fn matrix(&self, name: &str, Dims { rows, cols }: Dims) -> Result<Weight> {
        let mut halves = HALVES.iter().enumerate();
        let part = halves.find_map(|(half, suffix)| Some((half, name.strip_suffix(suffix)?)));
        let Some((half, whole)) = part else {
            return self.0.matrix(name, Dims::new(rows, cols));
        };
        let Weight::Dense(whole) = self.0.matrix(whole, Dims::new(rows, 2 * cols))? else {
            unreachable!("the store is dense");
        };
        Ok(Weight::Dense(columns(&whole, half * cols, cols)?))
    }
}

/// The `n` columns of a matrix from `first` on.
fn columns(matrix: &Tensor, first: usize, n: usize) -> Result<Tensor> {
    let (rows, size) = (matrix.shape()[0], matrix.dtype().size());
    let row = matrix.data().len() / rows.max(1);
    let data: Vec<u8> = matrix
        .data()
        .chunks_exact(row.max(1))
        .flat_map(|row| &row[first * size..(first + n) * size])
        .copied()
        .collect();
    Tensor::new(matrix.dtype(), vec![rows, n], Bytes::from(data))
}

/// An opened head.
pub struct EagleHead {
    /// Its shape.
    pub config: EagleConfig,
    /// Its weights, by the names of [`EagleHead::name`].
    pub store: Box<dyn WeightStore>,
    /// The model's token for each of the head's.
    pub tokens: Vec<u32>,
    /// True if it has an embedding of its own.
    pub has_embedding: bool,
    path: PathBuf,
    /// Prefix of the names of the layer's weights, and of others.
    prefixes: (&'static str, &'static str),
}

impl EagleHead {
    /// Opens the folder `path`.
    ///
    /// # Errors
    /// [`Error::Missing`] without config.json or safetensors; errors of [`EagleConfig::parse`]; [`Error::Tensor`]
    /// for tokens outside the model's vocabulary.
    pub fn open(path: &Path) -> Result<Self> {
        let files = Files::Folder(path.into());
        let config = EagleConfig::parse(&files.path(CONFIG), &files.require(CONFIG)?)?;
        let shards = Shards::open(&files)?;
        let tokens = tokens(&shards, &config)?;
        let has = |name: &str| shards.contains(&format!("{name}.weight"));
        let layers = ["midlayer", "layers.0", "model.midlayer", "model.layers.0"];
        let layer = layers
            .into_iter()
            .find(|l| has(&format!("{l}.hidden_norm")));
        let others = if has("model.fc") { "model." } else { "" };
        let has_embedding = has(EMBEDDING);
        Ok(EagleHead {
            prefixes: (layer.unwrap_or(layers[0]), others),
            config,
            store: Box::new(HalvedStore(DenseStore { shards })),
            tokens,
            has_embedding,
            path: path.into(),
        })
    }

    /// The head with its weights read through `wrap`.
    pub fn wrapped(self, wrap: impl FnOnce(Box<dyn WeightStore>) -> Box<dyn WeightStore>) -> Self {
        EagleHead {
            store: wrap(self.store),
            ..self
        }
    }

    /// The stored name of the part `part` (of the layer, if it begins with a dot).
    pub fn name(&self, part: &str) -> String {
        match part {
            EMBEDDING | HEAD => part.to_owned(),
            part if part.starts_with('.') => format!("{}{part}", self.prefixes.0),
            part => format!("{}{part}", self.prefixes.1),
        }
    }

    /// The name of one half of the inputs of the stored projection `part` (`.self_attn.q_proj`, k or v).
    pub fn half(&self, part: &str, half: Half) -> String {
        self.name(part) + HALVES[half as usize]
    }

    /// Refuses a model that the head was not made for.
    ///
    /// # Errors
    /// [`Error::Malformed`], naming the key that differs.
    pub fn check_model(&self, model: &ModelConfig) -> Result<()> {
        let layers = model.num_hidden_layers;
        let differs = |what: &str, expected: String, found: String| {
            Err(Error::Malformed {
                path: self.path.join(CONFIG),
                what: what.into(),
                expected: format!("{expected}, as the model has"),
                found,
            })
        };
        let pairs = [
            ("hidden_size", model.hidden_size, self.config.hidden_size),
            ("vocab_size", model.vocab_size, self.config.vocab_size),
        ];
        for (what, expected, found) in pairs {
            if expected != found {
                return differs(what, expected.to_string(), found.to_string());
            }
        }
        let taps = self.config.taps_of(layers);
        match taps.iter().all(|tap| (1..=layers).contains(tap)) {
            true => Ok(()),
            false => differs(
                "layers to read",
                format!("1 to {layers}"),
                format!("{taps:?}"),
            ),
        }
    }
}

/// The model's token for each of the head's.
fn tokens(shards: &Shards, config: &EagleConfig) -> Result<Vec<u32>> {
    let (vocab, drafted) = (config.vocab_size, config.draft_vocab_size);
    let names = ["d2t", "model.d2t"];
    let name = names.into_iter().find(|n| shards.contains(n));
    let Some(name) = name.or((vocab != drafted).then_some(names[0])) else {
        return Ok((0..vocab as u32).collect());
    };
    let table = shards.require(name, &[DType::I64], &[drafted])?;
    let offsets = table.data().chunks_exact(8);
    let offsets = offsets.map(|b| i64::from_le_bytes(b.try_into().expect("eight bytes")));
    let token = |(id, offset): (usize, i64)| {
        let token = offset.checked_add(id as i64);
        match token
            .and_then(|t| u32::try_from(t).ok())
            .filter(|&t| (t as usize) < vocab)
        {
            Some(token) => Ok(token),
            None => Err(shards.error(
                name,
                format!("tokens below {vocab}"),
                format!("{id} + {offset}"),
            )),
        }
    };
    offsets.enumerate().map(token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_of_no_width_or_with_norms_before_fc_are_refused() {
        let parse = |heads: usize, norms: bool| {
            let json = serde_json::json!({
                "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": 128,
                "intermediate_size": 256, "num_attention_heads": heads, "num_key_value_heads": heads,
                "vocab_size": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "norm_before_fc": norms,
            });
            EagleConfig::parse(Path::new("config.json"), json.to_string().as_bytes())
        };
        assert_eq!(parse(4, false).unwrap().head_dim, 32);
        let error = parse(4, true).unwrap_err().to_string();
        assert!(error.contains("norm_before_fc true"), "{error}");
        let error = parse(256, false).unwrap_err().to_string();
        assert!(
            error.contains("head_dim") && error.contains("above 0, found 0"),
            "{error}"
        );
    }
}
