//! `--engine candle`: candle-transformers on the CPU, the standard implementation that nq's
//! own forward is tested and measured against. Unquantized models run in f32; a GGUF file runs
//! as it is, through candle's quantized Qwen3.

use candle_core::quantized::gguf_file;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::quantized_qwen3::ModelWeights;
use candle_transformers::models::{qwen3, qwen3_moe};
use nq_formats::gguf::names::to_gguf;
use nq_formats::{Progress, Weight, WeightStore};
use nq_kernels::Activations;
use nq_kernels::pages::KvType;
use nq_model::names::{EMBEDDING, HEAD, NORM};
use nq_model::{ModelConfig, RopeScaling};
use nq_runtime::checks::check_chunks;
use nq_runtime::interface::{
    Chunk, DeviceChoice, Engine, EngineDescription, LoadOptions, Logits, Observer, Session,
    SessionSpec,
};
use nq_runtime::models::{self, LayerWeights};
use nq_runtime::weights::{Census, LoadProgress};
use nq_runtime::{Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::BufReader;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Loads the candle engine.
pub(crate) fn load(
    config: &ModelConfig,
    store: &dyn WeightStore,
    options: &LoadOptions,
    progress: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    let engine = CandleEngine::load(config, store, options, progress)?;
    Ok(Arc::new(engine))
}

/// An error of candle as one of nq.
fn failed(e: candle_core::Error) -> Error {
    Error::Candle { why: e.to_string() }
}

/// [`Engine`] over candle's Qwen3.
struct CandleEngine {
    config: ModelConfig,
    model: CandleModel,
    pool: Arc<rayon::ThreadPool>,
    description: EngineDescription,
    bytes_per_token: usize,
}

/// `model_type`s that this engine supports.
const MODEL_TYPES: [&str; 2] = ["qwen3", "qwen3_moe"];

/// One of candle's implementations, with its cache.
#[derive(Clone)]
enum CandleModel {
    Dense {
        model: qwen3::Model,
        head: Tensor, // [hidden, vocab], a transposed view
    },
    Experts {
        model: qwen3_moe::Model,
        head: Tensor, // as above
    },
    Gguf(ModelWeights),
}

impl CandleModel {
    /// Runs `tokens` after the `cached` ones: logits `[rows, vocab]`.
    fn forward(
        &mut self,
        tokens: &[u32],
        cached: usize,
        rows: Range<usize>,
    ) -> candle_core::Result<Vec<f32>> {
        let input = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        let (hidden, head) = match self {
            CandleModel::Dense { model, head } => (model.forward(&input, cached)?, head),
            CandleModel::Experts { model, head } => (model.forward(&input, cached)?, head),
            // This model always returns the last row's logits alone.
            CandleModel::Gguf(model) => {
                let logits = model.forward(&input, cached)?;
                if rows.is_empty() {
                    return Ok(Vec::new());
                }
                return logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1();
            }
        };
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let hidden = hidden.squeeze(0)?.narrow(0, rows.start, rows.len())?;
        hidden.matmul(head)?.flatten_all()?.to_vec1()
    }
}

/// # Errors
/// [`Error::Unsupported`] for anything that this engine cannot do.
fn check_request(config: &ModelConfig, options: &LoadOptions) -> Result<()> {
    let gpus = match options.device {
        DeviceChoice::Auto | DeviceChoice::Cpu | DeviceChoice::WgpuOrCpu(_) => None,
        DeviceChoice::Cuda(n) => Some(format!("cuda:{n}")),
        DeviceChoice::Gpus(several) => Some(several.to_string()),
        DeviceChoice::AllGpus => Some("cuda:all".into()),
        DeviceChoice::Wgpu(None) => Some("gpu".into()),
        DeviceChoice::Wgpu(Some(n)) => Some(format!("wgpu:{n}")),
    };
    if let Some(found) = gpus {
        return Err(unsupported("device", "the CPU", found));
    }
    if options.activations.is_forced() {
        let found = options.activations.to_string();
        return Err(unsupported("activations", "f32", found));
    }
    if !MODEL_TYPES.contains(&config.architecture.model_type) {
        let found = format!("{:?}", config.architecture);
        return Err(unsupported(
            "architecture",
            &MODEL_TYPES.join(" or "),
            found,
        ));
    }
    if config.rope.scaling != RopeScaling::None {
        let found = format!("{:?}", config.rope.scaling);
        return Err(unsupported("rope scaling", "none", found));
    }
    Ok(())
}

/// Every weight in f32 by its name in the checkpoint, and the head.
fn dense_tensors(
    config: &ModelConfig,
    store: &dyn WeightStore,
    progress: &dyn Progress,
) -> Result<(HashMap<String, Tensor>, Tensor)> {
    let mut done = LoadProgress::begin(config, store, progress);
    let mut tensors = HashMap::new();
    let mut matrix = |name: String, weight: &Weight| -> Result<Tensor> {
        let t = to_tensor(&name, weight)?;
        tensors.insert(format!("{name}.weight"), t.clone());
        done.add(weight);
        Ok(t)
    };
    let mut norms = Vec::new();
    for layer in 0..config.num_hidden_layers {
        let weights = LayerWeights::read(store, config, layer)?;
        for linear in weights.spec.matrices() {
            let weight = weights.linear(linear.kind);
            if !linear.stacked {
                matrix(linear.name(layer), weight)?;
                continue;
            }
            for (e, part) in weight.unstack(linear.copies(config)).enumerate() {
                matrix(linear.expert_name(layer, e), &part)?;
            }
        }
        for (kind, norm) in weights.norms {
            norms.push((weights.spec.norm(kind).name(layer), norm));
        }
    }
    let embedding = models::embedding(store, config)?;
    let mut head = matrix(EMBEDDING.into(), &embedding)?;
    if !config.tie_word_embeddings {
        head = matrix(HEAD.into(), &models::head(store, config)?)?;
    }
    norms.push((NORM.into(), models::final_norm(store, config)?));
    for (name, norm) in norms {
        let t = Tensor::from_vec(norm.to_f32()?, norm.shape(), &Device::Cpu).map_err(failed)?;
        tensors.insert(format!("{name}.weight"), t);
    }
    done.end();
    Ok((tensors, head))
}

impl CandleEngine {
    /// Hands the store's GGUF file to candle, or converts every weight to f32.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for anything that candle's Qwen3 cannot do: quantized weights outside GGUF
    /// files, other devices, rounded activations, YaRN.
    fn load(
        config: &ModelConfig,
        store: &dyn WeightStore,
        options: &LoadOptions,
        progress: &dyn Progress,
    ) -> Result<Self> {
        check_request(config, options)?;
        if let Some(path) = store.gguf_file() {
            if config.experts.is_some() {
                let found = format!("{:?}", config.architecture);
                return Err(unsupported("GGUF files", "those of dense models", found));
            }
            return Self::load_gguf(path, config, options, progress);
        }
        let (tensors, head) = dense_tensors(config, store, progress)?;
        let looked_up = if config.tie_word_embeddings {
            0
        } else {
            config.vocab_size * config.hidden_size
        };
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let pool = threads(options)?;
        let mut census = Census::default();
        census.add(&[], Activations::F32);
        Ok(CandleEngine {
            model: match candle_experts(config) {
                None => CandleModel::Dense {
                    model: qwen3::Model::new(&candle_config(config), vb).map_err(failed)?,
                    head: head.t().map_err(failed)?,
                },
                Some(experts) => CandleModel::Experts {
                    model: qwen3_moe::Model::new(&experts, vb).map_err(failed)?,
                    head: head.t().map_err(failed)?,
                },
            },
            description: EngineDescription {
                engine: "candle".into(),
                device: "cpu".into(),
                kernels: "candle".into(),
                activations: census.activations(),
                bits: 32,
                threads: pool.current_num_threads(),
            },
            pool: Arc::new(pool),
            config: config.clone(),
            bytes_per_token: 4 * (config.active_parameters() - looked_up),
        })
    }

    /// Candle's quantized Qwen3 over a GGUF file, which it reads itself.
    fn load_gguf(
        path: &Path,
        config: &ModelConfig,
        options: &LoadOptions,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let open = File::open(path).map_err(|e| {
            let file = path.display();
            unsupported("file", "one that opens", format!("{file}: {e}"))
        })?;
        let mut reader = BufReader::new(open);
        let content = gguf_file::Content::read(&mut reader).map_err(failed)?;
        let stored = |name| {
            to_gguf(config.architecture, config.num_hidden_layers, name)
                .map(|n| format!("{n}.weight"))
        };
        let (embedding, head) = (stored(EMBEDDING), stored(HEAD));
        let tied = head.is_none_or(|head| !content.tensor_infos.contains_key(&head));
        let (mut bytes, mut parameters) = (0, BTreeMap::new());
        for (name, info) in &content.tensor_infos {
            let (kind, n) = (info.ggml_dtype, info.shape.elem_count());
            // If the head has its own matrix, only the embedding rows that are looked up are read.
            if tied || embedding.as_ref() != Some(name) {
                bytes += n / kind.block_size() * kind.type_size();
            }
            *parameters
                .entry(8 * kind.type_size() / kind.block_size())
                .or_insert(0) += n;
        }
        let most = parameters.iter().max_by_key(|&(_, n)| n);
        let bits = most.map_or(0, |(&bits, _)| bits);
        let isa = match (cfg!(target_feature = "avx2"), cfg!(target_feature = "neon")) {
            (true, _) => "avx2",
            (_, true) => "neon",
            _ => "no vector instructions",
        };
        if !cfg!(any(target_feature = "avx2", target_feature = "neon")) {
            progress.note(
                "candle chooses its instructions when it is compiled, and this build allows none: \
                 build with RUSTFLAGS=\"-C target-cpu=native\" to measure candle at its best",
            );
        }
        let pool = threads(options)?;
        Ok(CandleEngine {
            model: CandleModel::Gguf(
                ModelWeights::from_gguf(content, &mut reader, &Device::Cpu).map_err(failed)?,
            ),
            description: EngineDescription {
                engine: "candle".into(),
                device: format!("cpu ({isa})"),
                kernels: "candle".into(),
                activations: "int8, by block of the weights".into(),
                bits,
                threads: pool.current_num_threads(),
            },
            pool: Arc::new(pool),
            config: config.clone(),
            bytes_per_token: bytes,
        })
    }
}

/// The thread pool that candle runs on.
fn threads(options: &LoadOptions) -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads.unwrap_or(0))
        .build()
        .map_err(|e| unsupported("threads", "as many as can be started", e.to_string()))
}

impl Engine for CandleEngine {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn description(&self) -> &EngineDescription {
        &self.description
    }

    fn bytes_per_token(&self) -> usize {
        self.bytes_per_token
    }

    /// A session of one sequence with f32 keys and values, in a cache that grows with the sequence.
    fn session(&self, spec: SessionSpec) -> Result<Box<dyn Session>> {
        if spec.slots != 1 {
            return Err(unsupported("slots", "1", spec.slots.to_string()));
        }
        if spec.kv != KvType::F32 {
            return Err(unsupported("KV cache", "f32", spec.kv.to_string()));
        }
        if spec.ctx > self.config.max_position_embeddings {
            let most = format!("at most {} positions", self.config.max_position_embeddings);
            return Err(unsupported("context", &most, spec.ctx.to_string()));
        }
        Ok(Box::new(CandleSession {
            fresh: self.model.clone(),
            model: self.model.clone(),
            pool: self.pool.clone(),
            vocab: self.config.vocab_size,
            spec,
            tokens: Vec::new(),
            cached: 0,
            logits: Vec::new(),
        }))
    }
}

/// A sequence in progress. candle's cache can only grow, so a shortened sequence is recomputed
/// at once: continuing from it is timed as if the cache had been kept.
struct CandleSession {
    fresh: CandleModel, // shares its weights with `model`; its cache is empty
    model: CandleModel,
    pool: Arc<rayon::ThreadPool>,
    vocab: usize,
    spec: SessionSpec,
    tokens: Vec<u32>,
    cached: usize, // tokens in `model`'s cache
    logits: Vec<f32>,
}

impl CandleSession {
    /// Recomputes the cache if it is not that of `tokens`.
    fn refill(&mut self) -> candle_core::Result<()> {
        if self.cached == self.tokens.len() {
            return Ok(());
        }
        self.model = self.fresh.clone();
        self.cached = 0;
        if !self.tokens.is_empty() {
            self.model.forward(&self.tokens, 0, 0..0)?;
            self.cached = self.tokens.len();
        }
        Ok(())
    }

    fn run(&mut self, chunk: &Chunk<'_>) -> candle_core::Result<()> {
        self.refill()?;
        let rows = chunk.logits.rows(chunk.tokens.len());
        self.logits = self.model.forward(chunk.tokens, self.cached, rows)?;
        self.cached += chunk.tokens.len();
        Ok(())
    }
}

impl Session for CandleSession {
    fn spec(&self) -> SessionSpec {
        self.spec
    }

    fn len(&self, _slot: usize) -> usize {
        self.tokens.len()
    }

    fn truncate(&mut self, _slot: usize, len: usize) -> usize {
        if len < self.tokens.len() {
            self.tokens.truncate(len);
            self.cached = usize::MAX; // longer than any sequence: compute it again
            let pool = self.pool.clone();
            if pool.install(|| self.refill()).is_err() {
                self.cached = usize::MAX; // the next forward tries again, and says why not
            }
        }
        self.tokens.len()
    }

    fn fork(&mut self, from: usize, to: usize, _len: usize) -> Result<usize> {
        let found = format!("slot {from} to {to}");
        Err(unsupported("fork", "one sequence", found))
    }

    fn hidden(&mut self, _chunks: &[Chunk<'_>], _out: &mut Vec<f32>) -> Result<()> {
        Err(unsupported("output", "logits", "hidden states".into()))
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        if observer.is_some() {
            return Err(unsupported("observer", "none", "one".into()));
        }
        check_chunks(chunks, &self.spec, self.vocab, |_| self.tokens.len())?;
        if let [chunk] = chunks {
            let n = chunk.tokens.len();
            let rows = chunk.logits.rows(n);
            if matches!(self.model, CandleModel::Gguf(_)) && !rows.is_empty() && rows != (n - 1..n)
            {
                let found = format!("{rows:?} of {n}");
                return Err(unsupported("logits", "those of the last token", found));
            }
            let pool = self.pool.clone();
            if let Err(e) = pool.install(|| self.run(chunk)) {
                self.cached = usize::MAX; // the cache may be half-written
                return Err(failed(e));
            }
            self.tokens.extend(chunk.tokens);
        }
        Ok(Logits {
            data: &self.logits,
            vocab: self.vocab,
        })
    }
}

/// An error for something that candle's Qwen3 cannot do.
fn unsupported(what: &'static str, expected: &str, found: String) -> Error {
    Error::Unsupported {
        engine: "candle",
        what,
        expected: expected.into(),
        found,
    }
}

/// A dense weight as candle's tensor, in f32.
fn to_tensor(name: &str, weight: &Weight) -> Result<Tensor> {
    match weight {
        Weight::Dense(t) => Tensor::from_vec(t.to_f32()?, t.shape(), &Device::Cpu).map_err(failed),
        Weight::Quantized(_) => {
            let found = format!("{} in {name}", weight.scheme_name());
            Err(unsupported("weights", "unquantized ones", found))
        }
    }
}

/// The config as candle's type.
fn candle_config(c: &ModelConfig) -> qwen3::Config {
    qwen3::Config {
        vocab_size: c.vocab_size,
        hidden_size: c.hidden_size,
        intermediate_size: c.intermediate_size,
        num_hidden_layers: c.num_hidden_layers,
        num_attention_heads: c.num_attention_heads,
        head_dim: c.head_dim,
        attention_bias: false,
        num_key_value_heads: c.num_key_value_heads,
        max_position_embeddings: c.max_position_embeddings,
        sliding_window: None,
        max_window_layers: c.num_hidden_layers,
        tie_word_embeddings: c.tie_word_embeddings,
        rope_theta: c.rope.theta,
        rms_norm_eps: f64::from(c.rms_norm_eps),
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    }
}

/// The config of a mixture of experts as candle's type.
fn candle_experts(c: &ModelConfig) -> Option<qwen3_moe::Config> {
    let experts = c.experts?;
    let dense = candle_config(c);
    Some(qwen3_moe::Config {
        vocab_size: dense.vocab_size,
        hidden_size: dense.hidden_size,
        intermediate_size: dense.intermediate_size,
        num_hidden_layers: dense.num_hidden_layers,
        num_attention_heads: dense.num_attention_heads,
        head_dim: dense.head_dim,
        attention_bias: dense.attention_bias,
        num_key_value_heads: dense.num_key_value_heads,
        max_position_embeddings: dense.max_position_embeddings,
        sliding_window: dense.sliding_window,
        max_window_layers: dense.max_window_layers,
        tie_word_embeddings: dense.tie_word_embeddings,
        rope_theta: dense.rope_theta,
        rms_norm_eps: dense.rms_norm_eps,
        use_sliding_window: dense.use_sliding_window,
        hidden_act: dense.hidden_act,
        decoder_sparse_step: 1,
        moe_intermediate_size: experts.width,
        num_experts_per_tok: experts.per_token,
        num_experts: experts.count,
        norm_topk_prob: experts.normalized,
    })
}
