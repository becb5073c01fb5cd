//! Random models with the published shapes: folders for tests at full scale, and
//! weights in memory for measuring speed before a download.

mod quantized;

pub use quantized::{random_quantized, random_trellis};

use crate::checkpoint::Checkpoint;
use crate::config::GenerationDefaults;
use crate::error::{Error, Result};
use crate::files::{CONFIG, Files, GENERATION_CONFIG, VirtualFiles};
use crate::gguf::tokenizer::{byte_level, pre_tokenizer};
use crate::progress::Progress;
use crate::published::{Form, Published};
use crate::scheme::Scheme;
use crate::serialize::{MAX_SHARD, ShardLayout, TensorSpec, write_folder};
use crate::store::{TensorEntry, WeightStore};
use crate::task::Task;
use crate::tensor::Tensor;
use crate::weight::{QuantizedWeight, Weight};
use bytes::Bytes;
use half::bf16;
use nq_model::names::{
    Shape, expert_name, is_less_one, layer_vector, parameter_of, parameters, split_layer, stack,
    tensor_name,
};
use nq_model::{Architecture, DType, Dims, ModelConfig, NgramTable, VectorKind};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Standard deviation of weights, as in the initialization of the published models.
const WEIGHT_STD: f64 = 0.02;
/// Norm gains are 1 plus noise of this deviation.
const NORM_STD: f64 = 0.05;

/// Means and deviations of what recurrences have besides: a convolution that passes its inputs on at about
/// their size, and states of which some are forgotten within a few positions and others kept for hundreds.
const CONV: (f64, f64) = (0.0, 0.4);
const DECAY: (f64, f64) = (0.0, 1.0);
const TIME_STEP: (f64, f64) = (-1.0, 1.0);

/// Writes a random model of shape `config` to the folder `dest`, which appears whole or not at
/// all: bf16 weights from normal(0, 0.02), norms near 1, and a byte-level tokenizer. The bytes
/// depend on `config` and `seed` alone; it takes only a few megabytes of memory.
///
/// # Errors
/// [`Error::Exists`] if `dest` exists, [`Error::Space`] if the disk is too small, [`Error::Io`];
/// [`Error::Malformed`] if the vocabulary is too small for a byte-level tokenizer.
pub fn write(dest: &Path, config: &ModelConfig, seed: u64, progress: &dyn Progress) -> Result<()> {
    let tensors = parameters(config).into_iter();
    let tensors = tensors.flat_map(|(name, shape)| tensors_of(&name, shape, config));
    let specs = tensors.map(|(name, shape)| TensorSpec {
        name: tensor_name(&name),
        dtype: DType::BF16,
        shape: stored_shape(&name, shape, config),
    });
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let layout = ShardLayout::new(specs.collect(), &metadata, MAX_SHARD);
    let files = files(config)?;
    let mut buffer = vec![0; 1 << 24];
    write_folder(dest, &files, &layout, progress, &mut |spec, sink| {
        let name = parameter_of(&spec.name).expect("every tensor here holds a parameter");
        let stream = RandomStream::new(
            seed,
            name,
            values_of(config.architecture, name, spec.shape.len()),
        );
        let mut done = 0;
        while done < spec.bytes() {
            let n = (spec.bytes() - done).min(buffer.len() as u64);
            let part = &mut buffer[..n as usize];
            stream.fill(done / 2, part);
            sink.write(part)?;
            done += n;
        }
        Ok(())
    })
}

/// The tensors in which published files store a parameter: one for each expert of a stack. The matrices of a
/// recurrence may be parts of others, which come in the place of the first.
fn tensors_of(name: &str, shape: Shape, config: &ModelConfig) -> Vec<(String, Shape)> {
    if let (true, Some((within, part)), Some(d)) = (
        config.architecture.fused_delta,
        name.rsplit_once(".in_proj_"),
        config.delta,
    ) {
        let fused = |name: &str, rows| {
            let shape = Shape::Matrix(rows, config.hidden_size);
            vec![(format!("{within}.in_proj_{name}"), shape)]
        };
        return match part {
            "qkv" => fused("qkvz", d.channels() + d.values()),
            "b" => fused("ba", 2 * d.value_heads),
            _ => Vec::new(),
        };
    }
    match (stack(name), shape) {
        (Some(linear), Shape::Matrix(rows, cols)) => {
            let count = linear.copies(config);
            let each = Shape::Matrix(rows / count, cols);
            let expert = |e| (expert_name(name, e), each);
            (0..count).map(expert).collect()
        }
        _ => vec![(name.into(), shape)],
    }
}

/// The shape in which published files store a parameter.
pub(crate) fn stored_shape(name: &str, shape: Shape, config: &ModelConfig) -> Vec<usize> {
    match (layer_vector(name).map(|v| v.kind), config.delta) {
        (Some(VectorKind::Conv), Some(delta)) => vec![delta.channels(), 1, delta.conv],
        (Some(VectorKind::NgramConv), _) => {
            let taps = config.ngrams.as_ref().map_or(1, |n| n.taps);
            vec![shape.elements() / taps, 1, taps]
        }
        _ => shape.dims(),
    }
}

/// A random model in memory, opened like a folder. Weights are drawn when asked for, and are
/// the same as those that [`write()`] puts into files.
///
/// # Errors
/// Errors of [`write()`] for the tokenizer.
pub fn checkpoint(label: &str, config: &ModelConfig, seed: u64) -> Result<Checkpoint> {
    checkpoint_of(label, config, seed, Box::new(|_| None))
}

/// Like [`checkpoint`], but matrices with a scheme by `scheme_of` are drawn as quantized
/// weights: for measuring speed where rounding a model first would take longer than the
/// measurement. Codes are uniform; scales and zero-points vary around values that give the
/// standard deviation of unquantized weights. Large stacks of experts are the same in all layers.
///
/// # Errors
/// Errors of [`write()`] for the tokenizer.
pub fn quantized_checkpoint<S: Into<Scheme>>(
    label: &str,
    config: &ModelConfig,
    seed: u64,
    scheme_of: impl Fn(&str) -> Option<S> + Send + Sync + 'static,
) -> Result<Checkpoint> {
    let scheme_of = move |name: &str| scheme_of(name).map(S::into);
    checkpoint_of(label, config, seed, Box::new(scheme_of))
}

/// The scheme in which a matrix is drawn; `None`: bf16.
type SchemeOf = Box<dyn Fn(&str) -> Option<Scheme> + Send + Sync>;

fn checkpoint_of(
    label: &str,
    config: &ModelConfig,
    seed: u64,
    scheme_of: SchemeOf,
) -> Result<Checkpoint> {
    let files = Files::Virtual(Arc::new(MemoryFiles {
        label: label.into(),
        files: files(config)?,
    }));
    let path = files.path(GENERATION_CONFIG);
    let generation = GenerationDefaults::parse(&path, &files.require(GENERATION_CONFIG)?)?;
    let store = RandomStore {
        label: label.into(),
        config: config.clone(),
        parameters: (parameters(config).into_iter())
            .flat_map(|(name, shape)| match stack(&name) {
                Some(_) => vec![(name, shape)],
                None => tensors_of(&name, shape, config),
            })
            .collect(),
        seed,
        scheme_of,
        shared: Mutex::default(),
    };
    let store = Published::over(Box::new(store), config, Form::HuggingFace, label.into());
    Ok(Checkpoint::new(
        files,
        config.clone(),
        generation,
        Task::Generate,
        store,
    ))
}

/// The result of [`files`], under a label.
#[derive(Debug)]
struct MemoryFiles {
    label: String,
    files: BTreeMap<String, Bytes>,
}

impl VirtualFiles for MemoryFiles {
    fn root(&self) -> PathBuf {
        self.label.clone().into()
    }

    fn names(&self) -> Vec<String> {
        self.files.keys().cloned().collect()
    }

    fn get(&self, name: &str) -> Result<Option<Bytes>> {
        Ok(self.files.get(name).cloned())
    }
}

struct RandomStore {
    label: String,
    config: ModelConfig,
    parameters: BTreeMap<String, Shape>,
    seed: u64,
    scheme_of: SchemeOf,
    /// Matrices that are the same in several places, by their name without its place.
    shared: Mutex<Vec<(String, Weight)>>,
}

/// Stacks of experts of so many weights are drawn once for all layers, as drawing them takes longer than packing them; and
/// parts of tables of n-grams once for all parts, which together are larger than memory.
pub const LARGE: usize = 1 << 26;

impl RandomStore {
    /// The random weight `name` of this scheme.
    fn quantized(&self, name: &str, dims: Dims, scheme: Scheme) -> Result<Weight> {
        let drawn = match scheme {
            Scheme::Affine(scheme) => {
                random_quantized(self.seed, name, dims, scheme).map(QuantizedWeight::Affine)
            }
            Scheme::Trellis(scheme) => {
                random_trellis(self.seed, name, dims, scheme).map(QuantizedWeight::Trellis)
            }
            Scheme::Exl3(_) => unreachable!("no recipe has EXL3"),
        };
        drawn.map(Weight::Quantized)
    }

    /// The matrix that `draw` makes for a name: that of `name`, or of several places one for all.
    fn shared(
        &self,
        name: &str,
        dims: Dims,
        scheme: Option<Scheme>,
        draw: impl Fn(&str) -> Result<Weight>,
    ) -> Result<Weight> {
        let table = NgramTable::part_of(name).map(|_| "table");
        let of_experts = stack(name).filter(|_| scheme.is_some());
        let of_experts = of_experts.and_then(|_| Some(split_layer(name)?.1));
        let Some(common) = table.or(of_experts).filter(|_| dims.elements() >= LARGE) else {
            return draw(name);
        };
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let of_scheme = |w: &Weight| match w {
            Weight::Dense(_) => None,
            Weight::Quantized(q) => Some(q.scheme()),
        };
        let mut same = shared.iter();
        let found =
            same.find(|(name, w)| name == common && of_scheme(w) == scheme && w.dims() == dims);
        if let Some((_, weight)) = found {
            return Ok(weight.clone());
        }
        let weight = draw(common)?;
        shared.push((common.into(), weight.clone()));
        Ok(weight)
    }

    /// The parameter `name` in files of the model.
    fn drawn(&self, name: &str, shape: Vec<usize>) -> Tensor {
        random_tensor(self.config.architecture, self.seed, name, shape)
    }

    /// Refuses parameters that the model does not have.
    fn check(&self, name: &str, wanted: Shape) -> Result<()> {
        if self.parameters.get(name) != Some(&wanted) {
            return Err(Error::Tensor {
                path: self.label.clone().into(),
                tensor: name.into(),
                expected: format!("{:?}", wanted.dims()),
                found: match self.parameters.get(name) {
                    Some(shape) => format!("{:?}", shape.dims()),
                    None => "no such tensor".into(),
                },
            });
        }
        Ok(())
    }
}

/// How the values of a parameter are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Distribution {
    /// A weight, or a bias.
    Weight,
    /// Gains of a norm.
    Gain,
    /// Gains of a norm less 1.
    GainLessOne,
    /// A vector of a recurrence, or of a table of n-grams.
    Recurrence(VectorKind),
}

/// How files of an architecture spread the parameter `name` of so many dimensions.
fn values_of(architecture: &Architecture, name: &str, dimensions: usize) -> Distribution {
    if let Some(vector) = layer_vector(name) {
        return Distribution::Recurrence(vector.kind);
    }
    // Biases are drawn like weights.
    match dimensions == 1 && tensor_name(name) != name {
        true if is_less_one(architecture, name) => Distribution::GainLessOne,
        true => Distribution::Gain,
        false => Distribution::Weight,
    }
}

/// The random bf16 tensor of the parameter `name` in files of a model of an architecture, drawn with a
/// seed.
pub fn random_tensor(
    architecture: &Architecture,
    seed: u64,
    name: &str,
    shape: Vec<usize>,
) -> Tensor {
    let mut bytes = vec![0; 2 * shape.iter().product::<usize>()];
    let values = values_of(architecture, name, shape.len());
    RandomStream::new(seed, name, values).fill(0, &mut bytes);
    let tensor = Tensor::new(DType::BF16, shape, bytes.into());
    tensor.expect("the buffer was made for the shape")
}

impl WeightStore for RandomStore {
    fn format(&self) -> &'static str {
        "random"
    }

    fn contains(&self, name: &str) -> bool {
        self.parameters.contains_key(name)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        self.check(name, Shape::Vector(len))?;
        Ok(self.drawn(name, vec![len]))
    }

    fn matrix(&self, name: &str, Dims { rows, cols }: Dims) -> Result<Weight> {
        let shape = Shape::Matrix(rows, cols);
        self.check(name, shape)?;
        let scheme = (self.scheme_of)(name);
        self.shared(name, Dims::new(rows, cols), scheme, |name| match scheme {
            Some(scheme) => self.quantized(name, Dims::new(rows, cols), scheme),
            None => {
                let tensors = match stack(name) {
                    Some(_) => tensors_of(name, shape, &self.config),
                    None => vec![(name.to_owned(), shape)],
                };
                let drawn =
                    |(name, shape): &(String, Shape)| Weight::Dense(self.drawn(name, shape.dims()));
                match tensors.as_slice() {
                    [one] => Ok(drawn(one)),
                    experts => Weight::stack(&experts.iter().map(drawn).collect::<Vec<_>>()),
                }
            }
        })
    }

    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        (self.scheme_of)(name)
    }

    fn is_float(&self, name: &str) -> bool {
        (self.scheme_of)(name).is_none()
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        let name = parameter_of(name).unwrap_or(name);
        let stored = self.parameters.get(name);
        let stored = stored.map(|&s| stored_shape(name, s, &self.config));
        let same = stored.is_some_and(|s| s == shape);
        Ok(same.then(|| self.drawn(name, shape.to_vec())))
    }

    fn entries(&self) -> Vec<TensorEntry> {
        let entry = |(name, &shape): (&String, &Shape)| {
            let (dtype, bytes) = match (shape, (self.scheme_of)(name)) {
                (Shape::Matrix(rows, cols), Some(s)) => (s.to_string(), s.bytes(rows, cols)),
                _ => (DType::BF16.name().into(), 2 * shape.elements()),
            };
            TensorEntry {
                name: tensor_name(name),
                dtype,
                shape: stored_shape(name, shape, &self.config),
                bytes: bytes as u64,
                file: String::new(),
            }
        };
        self.parameters.iter().map(entry).collect()
    }

    fn file_bytes(&self) -> u64 {
        self.entries().iter().map(|e| e.bytes).sum()
    }
}

/// The random numbers of one tensor, addressable by element.
struct RandomStream {
    key: u64,
    quantiles: &'static [[u8; 2]],
}

/// The starting point of the random numbers of `name`.
fn key(seed: u64, name: &str) -> u64 {
    name.bytes().fold(mix(seed), |k, b| mix(k ^ u64::from(b)))
}

/// Number of elements drawn from one 64-bit hash.
const LANES: u64 = 4;

impl RandomStream {
    fn new(seed: u64, name: &str, values: Distribution) -> Self {
        type Table = LazyLock<Vec<[u8; 2]>>;
        static WEIGHTS: Table = LazyLock::new(|| quantiles(0.0, WEIGHT_STD));
        static GAINS: Table = LazyLock::new(|| quantiles(1.0, NORM_STD));
        static LESS_ONE: Table = LazyLock::new(|| quantiles(0.0, NORM_STD));
        static CONVS: Table = LazyLock::new(|| quantiles(CONV.0, CONV.1));
        static DECAYS: Table = LazyLock::new(|| quantiles(DECAY.0, DECAY.1));
        static TIME_STEPS: Table = LazyLock::new(|| quantiles(TIME_STEP.0, TIME_STEP.1));
        RandomStream {
            key: key(seed, name),
            quantiles: match values {
                Distribution::Weight => &WEIGHTS,
                Distribution::Gain => &GAINS,
                Distribution::GainLessOne => &LESS_ONE,
                Distribution::Recurrence(VectorKind::Conv | VectorKind::NgramConv) => &CONVS,
                Distribution::Recurrence(VectorKind::Decay) => &DECAYS,
                Distribution::Recurrence(VectorKind::TimeStep) => &TIME_STEPS,
            },
        }
    }

    /// Writes the elements from `start`, a multiple of [`LANES`], as bf16.
    fn fill(&self, start: u64, out: &mut [u8]) {
        const CHUNK: usize = 1 << 18;
        out.par_chunks_mut(CHUNK)
            .enumerate()
            .for_each(|(i, chunk)| {
                let first = start / LANES + (i * CHUNK / (2 * LANES as usize)) as u64;
                for (counter, quad) in (first..).zip(chunk.chunks_mut(2 * LANES as usize)) {
                    let mut random = mix(self.key.wrapping_add(counter.wrapping_mul(GOLDEN)));
                    for value in quad.chunks_exact_mut(2) {
                        value.copy_from_slice(&self.quantiles[random as usize & 0xFFFF]);
                        random >>= 16;
                    }
                }
            });
    }
}

/// 2^64 divided by the golden ratio: counters this far apart hash independently.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The output function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The quantiles `(i + 1/2) / 2^16` of normal(mean, std) as bf16 bytes: choosing one uniformly
/// draws from that distribution.
fn quantiles(mean: f64, std: f64) -> Vec<[u8; 2]> {
    let mut table = vec![[0; 2]; 1 << 16];
    // The quantile function x(p) solves dx/dp = 1 / density(x): Runge-Kutta from x(1/2) = 0.
    const SUBSTEPS: u32 = 16;
    let slope = |x: f64| (std::f64::consts::TAU).sqrt() * (x * x / 2.0).exp();
    let mut x = 0.0;
    let half = 1 << 15;
    for i in 0..half {
        // The first step is half a cell: to the middle of the first cell above the median.
        let step = if i == 0 { 0.5 } else { 1.0 };
        let h = step / f64::from(1 << 16) / f64::from(SUBSTEPS);
        for _ in 0..SUBSTEPS {
            let k1 = slope(x);
            let k2 = slope(x + h / 2.0 * k1);
            let k3 = slope(x + h / 2.0 * k2);
            let k4 = slope(x + h * k3);
            x += h / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4);
        }
        table[half + i] = bf16::from_f64(mean + std * x).to_le_bytes();
        table[half - 1 - i] = bf16::from_f64(mean - std * x).to_le_bytes();
    }
    table
}

/// Everything but the weights: configuration, and a tokenizer of single bytes with as many
/// other tokens as the model has rows for.
fn files(config: &ModelConfig) -> Result<BTreeMap<String, Bytes>> {
    let end = config.eos_token_ids.first().copied().unwrap_or(0);
    if end < 258 || end as usize >= config.vocab_size {
        return Err(Error::Malformed {
            path: CONFIG.into(),
            what: "eos_token_id".into(),
            expected: "258 or more, below vocab_size: 256 bytes and 3 special tokens".into(),
            found: end.to_string(),
        });
    }
    let special = [
        ("<|endoftext|>", end - 2),
        ("<|im_start|>", end - 1),
        ("<|im_end|>", end),
    ];
    let mut vocab: BTreeMap<String, u32> = (0..=255u8)
        .map(|b| (byte_symbol(b).to_string(), u32::from(b)))
        .collect();
    vocab.extend(special.map(|(text, id)| (text.to_owned(), id)));
    // A random model may produce any of its ids, so each has a text of its own. Without merges,
    // encoding never yields these other tokens.
    let known: BTreeSet<u32> = vocab.values().copied().collect();
    let rest = (0..config.vocab_size as u32).filter(|id| !known.contains(id));
    vocab.extend(rest.map(|id| (format!("<{id:x}>"), id)));
    let added = special.map(|(text, id)| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "NFC"}, "pre_tokenizer": pre_tokenizer(),
        "post_processor": byte_level(), "decoder": byte_level(),
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
                  "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": false,
                  "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []},
    });
    let template = "{%- for message in messages %}\
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
        {%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";
    let tokenizer_config = json!({
        "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "model_max_length": config.max_position_embeddings,
        "chat_template": template,
    });
    let generation = json!({
        "bos_token_id": end - 2, "pad_token_id": end - 2, "eos_token_id": [end, end - 2],
        "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    });
    let mut model = crate::config::to_json(config);
    model.insert("bos_token_id".into(), (end - 2).into());
    let text = |value: &Value| {
        let mut text = serde_json::to_vec_pretty(value).expect("string keys");
        text.push(b'\n');
        Bytes::from(text)
    };
    Ok(BTreeMap::from([
        (CONFIG.into(), text(&Value::Object(model))),
        (GENERATION_CONFIG.into(), text(&generation)),
        ("tokenizer.json".into(), text(&tokenizer)),
        ("tokenizer_config.json".into(), text(&tokenizer_config)),
    ]))
}

/// The character that represents a byte in byte-level BPE: itself if it is printable Latin-1,
/// otherwise the next free one from U+0100.
fn byte_symbol(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + before).expect("at most U+0143")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheme::{AffineScheme, Bits, Group, Zeros};

    #[test]
    fn quantiles_are_normal() {
        let values: Vec<f64> = quantiles(0.0, 1.0)
            .iter()
            .map(|b| bf16::from_le_bytes(*b).to_f64())
            .collect();
        assert!(values.is_sorted());
        let n = values.len() as f64;
        let moment = |k: i32| values.iter().map(|v| v.powi(k)).sum::<f64>() / n;
        assert_eq!(moment(1), 0.0); // symmetric
        assert!((moment(2) - 1.0).abs() < 2e-3, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 2e-2, "{}", moment(4));
        // Published quantiles: 97.5 % and 99.9 %, within bf16's rounding.
        let at = |p: f64| values[(p * n) as usize];
        assert!((at(0.975) - 1.959_964).abs() < 8e-3);
        assert!((at(0.999) - 3.090_232).abs() < 1.6e-2);
        assert!((values[65535] - 4.32).abs() < 0.05, "{}", values[65535]);
    }

    #[test]
    fn quantized_weights_vary_like_others() {
        for (bits, zeros) in [
            (Bits::B4, Zeros::Integer),
            (Bits::B4, Zeros::Offset),
            (Bits::B8, Zeros::None),
        ] {
            let group = Group::Size(64);
            let scheme = AffineScheme::new(bits, group, zeros);
            let draw = |seed| random_quantized(seed, "a", Dims::new(64, 320), scheme).unwrap();
            let (a, again, other) = (draw(1), draw(1), draw(2));
            assert_eq!(a.codes(), again.codes());
            assert_ne!(a.codes(), other.codes());
            let mut row = [0f32; 320];
            let (mut sum, mut squares) = (0.0, 0.0);
            for r in 0..64 {
                a.dequantize_row(r, &mut row);
                sum += row.iter().map(|&v| f64::from(v)).sum::<f64>();
                squares += row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
            }
            let n = 64.0 * 320.0;
            assert!((sum / n).abs() < 0.2 * WEIGHT_STD, "{scheme}: {}", sum / n);
            let std = (squares / n).sqrt();
            assert!((std / WEIGHT_STD - 1.0).abs() < 0.1, "{scheme}: {std}");
        }
    }

    #[test]
    fn byte_symbols_are_distinct() {
        let all: std::collections::BTreeSet<char> = (0..=255).map(byte_symbol).collect();
        assert_eq!(all.len(), 256);
        // As in published vocabularies: space is U+0120, newline U+010A.
        let symbols = [b' ', b'\n', 0x7F, 0xAD].map(byte_symbol);
        assert_eq!(symbols, ['\u{120}', '\u{10A}', '\u{121}', '\u{143}']);
    }
}
