//! Random models for tests.
#![allow(dead_code, reason = "each test file uses a part of it")]

pub(crate) mod adapted;
pub(crate) mod device;
pub(crate) mod mtp;
pub(crate) mod oracle;
pub(crate) mod published;

use nq_formats::gguf::{BlockType, BlockWeight};
use nq_formats::{
    AffineScheme, AffineWeight, Bits, Error, Exl3Weight, Group, GroupValues, Parts, Progress,
    QuantizedWeight, Result, Tensor, TensorEntry, TrellisScheme, TrellisWeight, Weight,
    WeightStore, Zeros, pack, product, synth::random_trellis, trellis::BLOCK,
};
use nq_kernels::pages::PAGE;
use nq_kernels::rng::Philox;
use nq_model::names::{EMBEDDING, HEAD, Shape, end_parameters, is_kept, stack};
use nq_model::{ARCHITECTURES, DType, Delta, Dims, Experts, ModelConfig, Rope, find};
use nq_runtime::{
    ActivationChoice, DeviceChoice, Engine, EngineKind, KvType, LoadOptions, LogitsWanted, Session,
};
pub(crate) use nq_testkit::compare::distance;
use nq_testkit::models::{delta, experts, rope, tiny};
pub(crate) use nq_testkit::sessions::feed;
use nq_testkit::sessions::{chunk, session_spec};
use nq_testkit::weights::{exl3, exl3_schemes, shuffled_groups};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// A small model whose dimensions are all different.
pub(crate) fn small_config() -> ModelConfig {
    ModelConfig {
        hidden_size: 48,
        intermediate_size: 80,
        num_hidden_layers: 3,
        num_attention_heads: 8,
        vocab_size: 101,
        max_position_embeddings: 256,
        rope: rope(1e6, None),
        eos_token_ids: vec![],
        ..tiny("qwen3")
    }
}

/// The same as a mixture of 9 experts whose widths do not fill panels.
pub(crate) fn small_mixture(per_token: usize, normalized: bool) -> ModelConfig {
    ModelConfig {
        architecture: ARCHITECTURES[1],
        experts: Some(Experts {
            count: 9,
            per_token,
            width: 40,
            normalized,
            shared: 0,
        }),
        ..small_config()
    }
}

/// A small model with recurrences in three of four layers and gated attention in the fourth.
pub(crate) fn hybrid(gguf: &str, value_heads: usize, tied: bool) -> ModelConfig {
    let architecture = find(|a| a.gguf, gguf).unwrap();
    let experts = architecture.router().map(|_| experts(6, 32, 48));
    ModelConfig {
        hidden_size: 96,
        intermediate_size: if experts.is_some() { 32 } else { 160 },
        experts,
        delta: Some(delta(value_heads, 16, 4)),
        num_hidden_layers: 5,
        head_dim: 32,
        vocab_size: 320,
        max_position_embeddings: 131_072,
        rope: rope(1e7, Some(8)),
        tie_word_embeddings: tied,
        eos_token_ids: vec![300],
        dtype: Some(DType::BF16),
        ..tiny(gguf)
    }
}

/// A hybrid whose sizes the GPU's kernels serve.
pub(crate) fn wide_hybrid(gguf: &str, value_heads: usize, tiled: bool) -> ModelConfig {
    let small = hybrid(gguf, value_heads, false);
    ModelConfig {
        hidden_size: 256,
        intermediate_size: 768,
        experts: small.experts.map(|e| Experts {
            width: 256,
            shared: 256,
            ..e
        }),
        delta: small.delta.map(|d| Delta {
            key_dim: 128,
            value_dim: 128,
            tiled,
            ..d
        }),
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 256,
        rope: Rope {
            dims: Some(64),
            ..small.rope
        },
        ..small
    }
}

/// Weights by name.
#[derive(Clone, Default)]
pub(crate) struct Store {
    pub(crate) vectors: BTreeMap<String, Tensor>,
    pub(crate) matrices: BTreeMap<String, Weight>,
}

impl Store {
    /// Random f32 weights that keep activations near 1.
    pub(crate) fn random(c: &ModelConfig, seed: u64) -> Self {
        let mut store = Store::default();
        let mut stream = 0;
        let mut normal = |n: usize, mean: f32, deviation: f32| -> Vec<f32> {
            stream += 1;
            let mut rng = Philox::new(seed, stream);
            (0..n).map(|_| mean + deviation * rng.normal()).collect()
        };
        let mut matrix = |store: &mut Store, name: String, dims: Dims| {
            let (out, inputs) = dims.pair();
            let deviation = 1.0 / (inputs as f32).sqrt();
            let t = Tensor::from_f32(vec![out, inputs], normal(out * inputs, 0.0, deviation));
            store.matrices.insert(name, Weight::Dense(t.unwrap()));
        };
        let vocab = Dims::new(c.vocab_size, c.hidden_size);
        matrix(&mut store, EMBEDDING.into(), vocab);
        if !c.tie_word_embeddings {
            matrix(&mut store, HEAD.into(), vocab);
        }
        for layer in 0..c.num_hidden_layers {
            for linear in c.layer(layer).matrices() {
                matrix(&mut store, linear.name(layer), linear.dims(c));
            }
        }
        let tables = c.ngrams.iter().flat_map(|n| n.parameters());
        for (name, shape) in tables.chain(end_parameters(c)) {
            if let Shape::Matrix(rows, cols) = shape {
                matrix(&mut store, name, Dims::new(rows, cols));
            }
        }
        let mut vector = |name: String, n: usize, mean: f32| {
            let t = Tensor::from_f32(vec![n], normal(n, mean, 0.2)).unwrap();
            store.vectors.insert(name, t);
        };
        for layer in 0..c.num_hidden_layers {
            for norm in c.layer(layer).norms() {
                vector(norm.name(layer), norm.len.of(c), 1.0);
            }
            for linear in c.layer(layer).biased() {
                vector(linear.bias_name(layer), linear.dims(c).rows, 0.0);
            }
            for row in c.layer(layer).vectors() {
                vector(row.name(layer), row.len.of(c), 0.0);
            }
        }
        for (name, shape) in end_parameters(c) {
            if let Shape::Vector(len) = shape {
                vector(name, len, 1.0);
            }
        }
        store.with_mtp(c, seed)
    }

    /// The same weights, and random ones of the MTP layer, if the model has one.
    fn with_mtp(mut self, c: &ModelConfig, seed: u64) -> Self {
        for (i, (name, shape)) in nq_model::mtp::parameters(c).enumerate() {
            let mut rng = Philox::new(seed, 1 << 20 | i as u64);
            let mut normal = |n: usize, mean: f32, deviation: f32| -> Vec<f32> {
                (0..n).map(|_| mean + deviation * rng.normal()).collect()
            };
            match shape {
                Shape::Matrix(out, inputs) => {
                    let values = normal(out * inputs, 0.0, 1.0 / (inputs as f32).sqrt());
                    let t = Tensor::from_f32(vec![out, inputs], values).unwrap();
                    self.matrices.insert(name, Weight::Dense(t));
                }
                Shape::Vector(n) => {
                    let t = Tensor::from_f32(vec![n], normal(n, 1.0, 0.2)).unwrap();
                    self.vectors.insert(name, t);
                }
            }
        }
        self
    }

    /// The same weights, but with NaN in `token`'s embedding.
    pub(crate) fn with_poison(mut self, token: u32) -> Self {
        let embedding = &self.matrices[EMBEDDING];
        let Dims { rows, cols: width } = embedding.dims();
        let mut values = vec![0.0; rows * width];
        for (row, values) in values.chunks_exact_mut(width).enumerate() {
            embedding.dequantize_row(row, values).unwrap();
        }
        values[token as usize * width..][..width].fill(f32::NAN);
        let poisoned = Tensor::from_f32(vec![rows, width], values).unwrap();
        let name = EMBEDDING.to_owned();
        self.matrices.insert(name, Weight::Dense(poisoned));
        self
    }

    /// The same weights, each rounded to `scheme`.
    pub(crate) fn quantized(&self, scheme: AffineScheme) -> Self {
        let mut store = self.clone();
        for w in store.matrices.values_mut() {
            *w = round_to_nearest(w, scheme);
        }
        store
    }

    /// Rounded to `scheme`, with inputs in groups of an order of their own: of Linears with as many inputs the same,
    /// but for those whose names contain `other`.
    pub(crate) fn in_activation_order(&self, scheme: AffineScheme, other: &str) -> Self {
        let mut store = self.quantized(scheme);
        let linears = store.matrices.iter_mut();
        for (name, w) in linears.filter(|(name, _)| !is_kept(name) && name.as_str() != EMBEDDING) {
            let Weight::Quantized(QuantizedWeight::Affine(a)) = &*w else {
                unreachable!("all are rounded");
            };
            let dims = w.dims();
            let seed = u64::from(!other.is_empty() && name.contains(other));
            let order = shuffled_groups(dims.cols, scheme.group.size(dims.cols), seed);
            let parts = Parts {
                g_idx: Some(order.into()),
                ..a.parts()
            };
            let ordered = AffineWeight::assemble(scheme, dims, parts).unwrap();
            *w = Weight::Quantized(QuantizedWeight::Affine(ordered));
        }
        store
    }

    /// Random weights of the same size in trellis codes, each name's in the scheme that `scheme` gives, but for those
    /// that nq never quantizes.
    pub(crate) fn in_trellises(&self, scheme: impl Fn(&str) -> TrellisScheme) -> Self {
        let mut store = self.clone();
        let quantized = |(name, _): &(&String, &mut Weight)| !is_kept(name);
        for (name, w) in store.matrices.iter_mut().filter(quantized) {
            let dims = w.dims();
            let drawn = random_trellis(7, name, dims, scheme(name)).unwrap();
            let mut row = vec![0f32; dims.cols];
            drawn.dequantize_row(0, &mut row);
            let squares: f32 = row.iter().map(|v| v * v).sum();
            // Rows of length 1 keep activations near 1.
            let scales = drawn.row_scales().iter();
            let scale = |s: &half::f16| half::f16::from_f32(s.to_f32() / squares.sqrt());
            let scaled = TrellisWeight::new(
                drawn.scheme(),
                dims,
                drawn.words().clone(),
                scales.map(scale).collect(),
                drawn.input_scales().into(),
            );
            *w = Weight::Quantized(QuantizedWeight::Trellis(scaled.unwrap()));
        }
        store
    }

    /// Random weights of the same size in EXL3's codes, of all kinds in turn, where a file of exllamav3 of a model of shape `c`
    /// has them.
    pub(crate) fn in_exl3(&self, c: &ModelConfig) -> Self {
        let mut store = self.clone();
        let schemes: Vec<_> = exl3_schemes().collect();
        let copies = |name: &str| stack(name).map_or(1, |linear| linear.copies(c));
        let has_codes = |(name, w): &(&String, &mut Weight)| {
            let Dims { rows, cols } = w.dims();
            let rows = rows / copies(name);
            let whole = rows.is_multiple_of(BLOCK) && cols.is_multiple_of(BLOCK);
            whole && !is_kept(name) && name.as_str() != EMBEDDING
        };
        let coded = store.matrices.iter_mut().filter(has_codes);
        for (i, (name, w)) in coded.enumerate() {
            let (scheme, all, copies) = (schemes[5 * i % schemes.len()], w.dims(), copies(name));
            let dims = Dims::new(all.rows / copies, all.cols);
            let one = |copy: usize| {
                let seed = (i + 1000 * copy) as u64;
                let Weight::Quantized(QuantizedWeight::Exl3(drawn)) =
                    exl3(scheme, dims, seed, seed)
                else {
                    unreachable!("it is asked for");
                };
                // Rows of length 1 keep activations near 1.
                let size = 1.0 / (1.5 * dims.cols as f32).sqrt();
                let scale = |row: usize| if row.is_multiple_of(3) { -size } else { size };
                let scaled = Exl3Weight::new(
                    scheme,
                    dims,
                    drawn.tiles().clone(),
                    drawn.input_scales().clone(),
                    (0..dims.rows)
                        .map(|row| half::f16::from_f32(scale(row)))
                        .collect(),
                );
                Weight::Quantized(QuantizedWeight::Exl3(scaled.unwrap()))
            };
            let experts: Vec<Weight> = (0..copies).map(one).collect();
            *w = Weight::stack(&experts).unwrap();
        }
        store
    }

    /// Rounded to schemes that nq mixes in files of 4 bits: another for each product of a layer.
    pub(crate) fn mixed(&self) -> Self {
        let mut store = self.clone();
        for (name, w) in &mut store.matrices {
            let (bits, group, zeros) = match name.as_str() {
                n if n.contains("mlp.down") => (Bits::B6, 64, Zeros::None),
                n if n.contains("mlp") => (Bits::B5, 64, Zeros::Integer),
                n if n.contains("o_proj") => (Bits::B5, 32, Zeros::Integer),
                n if n.contains("self_attn") => (Bits::B4, 32, Zeros::Integer),
                n if n == HEAD => (Bits::B4, 64, Zeros::Integer),
                _ => (Bits::B6, 32, Zeros::None),
            };
            let scheme = AffineScheme::new(bits, Group::Size(group), zeros);
            *w = round_to_nearest(w, scheme.two_level(Bits::B8));
        }
        store
    }

    /// Rounded to schemes that a GGUF file of type Q4_K_M mixes, with parts of products among them
    /// that differ.
    pub(crate) fn k_quants(&self) -> Self {
        let mut store = self.clone();
        for (name, w) in &mut store.matrices {
            let more = ["v_proj", "down_proj", "up_proj", HEAD, EMBEDDING];
            let scheme = if more.iter().any(|part| name.contains(part)) {
                AffineScheme::new(Bits::B8, Group::Size(16), Zeros::None)
            } else {
                AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Offset)
            };
            *w = round_to_nearest(w, scheme);
        }
        store
    }

    /// Random weights of the same size in GGUF blocks, each name's of the type that `kind` gives, as GPUs read them.
    pub(crate) fn in_blocks(&self, kind: impl Fn(&str) -> BlockType) -> Self {
        let mut store = self.clone();
        for (i, (name, w)) in store.matrices.iter_mut().enumerate() {
            let (kind, dims) = (kind(name), w.dims());
            // Places of the factors of scales and minima, and how large they are for values of about 0.03.
            let (places, factor, minimum): (&[usize], f32, f32) = match kind {
                BlockType::Q2_K => (&[80, 82], 1.7e-3, 1.5),
                BlockType::Q3_K => (&[108], 4e-4, 0.0),
                BlockType::Q4_K => (&[0, 2], 1.4e-4, 7.5),
                BlockType::Q5_K => (&[0, 2], 7e-5, 15.5),
                BlockType::Q6_K => (&[208], 2.6e-5, 0.0),
                BlockType::IQ4_NL => (&[0], 5e-4, 0.0),
                BlockType::IQ4_XS => (&[0], 2.5e-5, 0.0),
                BlockType::IQ1_S => (&[0], 5e-3, 0.0),
                BlockType::IQ1_M | BlockType::MXFP4 | BlockType::NVFP4 => (&[], 5e-3, 0.0),
                _ => (&[0], 5e-4, 0.0),
            };
            let mut rng = Philox::new(23, i as u64);
            let blocks = dims.rows * dims.cols / kind.elements();
            let mut data: Vec<u8> = (0..blocks * kind.bytes())
                .map(|_| rng.next_u32() as u8)
                .collect();
            for block in data.chunks_exact_mut(kind.bytes()) {
                let d = half::f16::from_f32(factor * (0.7 + 0.6 * rng.uniform()));
                for (&at, times) in places.iter().zip([1.0, minimum]) {
                    let d = half::f16::from_f32(d.to_f32() * times);
                    block[at..at + 2].copy_from_slice(&d.to_le_bytes());
                }
                match kind {
                    BlockType::IQ1_M => {
                        for nibble in 0..4 {
                            let byte = &mut block[49 + 2 * nibble];
                            *byte = *byte & 15 | (d.to_bits() >> (4 * nibble) << 4) as u8;
                        }
                    }
                    BlockType::MXFP4 => block[0] = 120 + block[0] % 3,
                    BlockType::NVFP4 => block[..4].iter_mut().for_each(|s| *s = 8 + *s % 8),
                    _ => {}
                }
            }
            let blocks = BlockWeight::new(kind, dims, data.into()).unwrap();
            *w = Weight::Quantized(QuantizedWeight::Affine(blocks.to_levels().unwrap()));
        }
        store
    }

    /// The same weights as dense f32.
    pub(crate) fn dequantized(&self) -> Self {
        let mut store = self.clone();
        for w in store.matrices.values_mut() {
            let (out, inputs) = w.dims().pair();
            let mut values = vec![0.0; out * inputs];
            for (row, values) in values.chunks_exact_mut(inputs).enumerate() {
                w.dequantize_row(row, values).unwrap();
            }
            *w = Weight::Dense(Tensor::from_f32(vec![out, inputs], values).unwrap());
        }
        store
    }

    fn missing(name: &str) -> Error {
        Error::Tensor {
            path: PathBuf::from("random"),
            tensor: name.into(),
            expected: "a parameter of the test's model".into(),
            found: "none".into(),
        }
    }
}

impl WeightStore for Store {
    fn format(&self) -> &'static str {
        "random"
    }

    fn contains(&self, name: &str) -> bool {
        self.vectors.contains_key(name) || self.matrices.contains_key(name)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        let t = self.vectors.get(name).ok_or_else(|| Self::missing(name))?;
        assert_eq!(t.shape(), [len], "{name}");
        Ok(t.clone())
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        let w = self.matrices.get(name).ok_or_else(|| Self::missing(name))?;
        assert_eq!(w.dims(), dims, "{name}");
        Ok(w.clone())
    }

    fn scheme(&self, name: &str) -> Option<nq_formats::Scheme> {
        match self.matrices.get(name)? {
            Weight::Quantized(q) => Some(q.scheme()),
            _ => None,
        }
    }

    fn is_float(&self, name: &str) -> bool {
        matches!(self.matrices.get(name), Some(Weight::Dense(_)))
    }

    fn entries(&self) -> Vec<TensorEntry> {
        let entry = |name: &String, bytes: usize| TensorEntry {
            name: name.clone(),
            dtype: "F32".into(),
            shape: vec![],
            bytes: bytes as u64,
            file: String::new(),
        };
        let vectors = self.vectors.iter().map(|(n, t)| entry(n, t.data().len()));
        let matrices = self.matrices.iter().map(|(n, w)| entry(n, w.bytes()));
        vectors.chain(matrices).collect()
    }

    fn file_bytes(&self) -> u64 {
        0
    }

    fn quantization(&self) -> Option<&serde_json::Value> {
        None
    }
}

/// The plainest rounding to `scheme`: scale and zero-point from each group's range. Scales in two levels
/// have 8 bits and an f16 per row.
pub(crate) fn round_to_nearest(w: &Weight, scheme: AffineScheme) -> Weight {
    let (out, inputs) = w.dims().pair();
    let (groups, size) = (scheme.group.count(inputs), scheme.group.size(inputs));
    let top = f32::from(scheme.bits.max_code());
    let (mut codes, mut scales, mut zeros) = (Vec::new(), Vec::new(), Vec::new());
    let (mut small, mut of_rows) = (Vec::new(), Vec::new());
    let middle = if scheme.zeros == Zeros::None { 128 } else { 0 };
    let mut row = vec![0.0; inputs];
    for o in 0..out {
        w.dequantize_row(o, &mut row).unwrap();
        let range = row.iter().fold(0f32, |m, v| m.max(v.abs()));
        let of_row = half::f16::from_f32(range / 100.0 * 2.0 / top);
        of_rows.push(of_row);
        for group in row.chunks(size) {
            let low = group.iter().copied().fold(0.0, f32::min);
            let high = group.iter().copied().fold(0.0, f32::max);
            let (scale, zero) = match scheme.zeros {
                Zeros::None => {
                    let midpoint = f32::from(scheme.bits.midpoint());
                    (high.max(-low) / (midpoint - 1.0), midpoint)
                }
                _ => {
                    let scale = (high - low) / top;
                    (scale, (-low / scale).round())
                }
            };
            let scale = if scheme.scales.is_half() {
                half::f16::from_f32(scale)
            } else {
                let most = 255 - middle;
                let n = (scale / of_row.to_f32()).ceil().clamp(1.0, f32::from(most)) as i16;
                small.push((n + middle) as u8);
                product(of_row, n)
            };
            let code = |w: &f32| (w / scale.to_f32() + zero).round().clamp(0.0, top) as u8;
            codes.extend(group.iter().map(code));
            scales.push(scale);
            zeros.push(zero);
        }
    }
    let offsets = scales.iter().zip(&zeros);
    let offsets = offsets.map(|(s, z)| half::f16::from_f32(-s.to_f32() * z));
    let offsets = GroupValues::Half(offsets.collect());
    let zeros: Vec<u8> = zeros.iter().map(|&z| z as u8).collect();
    let parts = Parts {
        codes: pack::pack_rows(scheme.bits, &codes, inputs).into(),
        zeros: (scheme.zeros == Zeros::Integer)
            .then(|| pack::pack_rows(scheme.bits, &zeros, groups).into()),
        offsets: (scheme.zeros == Zeros::Offset).then_some(offsets),
        scales: if scheme.scales.is_half() {
            GroupValues::Half(scales.into())
        } else {
            GroupValues::TwoLevel {
                small: small.into(),
                of_spans: of_rows.into(),
            }
        },
        levels: None,
        g_idx: None,
    };
    let weight = AffineWeight::assemble(scheme, Dims::new(out, inputs), parts);
    Weight::Quantized(QuantizedWeight::Affine(weight.unwrap()))
}

/// Options for f32 everywhere, on the CPU.
pub(crate) fn options(engine: EngineKind) -> LoadOptions {
    LoadOptions {
        device: DeviceChoice::Cpu,
        engine,
        activations: ActivationChoice::F32,
        ..LoadOptions::default()
    }
}

/// nq's CPU engine in f32.
pub(crate) fn nq(config: &ModelConfig, store: &Store) -> Arc<dyn Engine> {
    nq_load::load(config, store, &options(EngineKind::Nq), &()).expect("nq loads it")
}

/// candle's engine.
pub(crate) fn candle(config: &ModelConfig, store: &Store) -> Arc<dyn Engine> {
    nq_load::load(config, store, &options(EngineKind::Candle), &()).expect("candle loads it")
}

/// A session of `slots` sequences with an f32 cache.
pub(crate) fn session(engine: &dyn Engine, slots: usize) -> Box<dyn Session> {
    engine
        .session(session_spec(slots, 64, KvType::F32, 128))
        .expect("it fits")
}

/// `n` tokens of a reproducible text.
pub(crate) fn tokens(n: usize, seed: u64) -> Vec<u32> {
    let mut rng = Philox::new(seed, 0);
    (0..n).map(|_| rng.next_u32() % 101).collect()
}

/// What loading says.
#[derive(Default)]
pub(crate) struct Notes(pub(crate) Mutex<Vec<String>>);

impl Progress for Notes {
    fn note(&self, message: &str) {
        self.0.lock().unwrap().push(message.to_owned());
    }
}

/// The model on the first GPU; `None`, said in print, where there is none and none is required.
pub(crate) fn gpu_engine(
    config: &ModelConfig,
    store: &Store,
    kernels: nq_kernels::KernelSet,
) -> Option<std::sync::Arc<dyn Engine>> {
    nq_testkit::on_gpu(nq_cuda::device_count())?;
    let options = nq_runtime::LoadOptions {
        device: nq_runtime::DeviceChoice::Cuda(0),
        kernels,
        ..nq_runtime::LoadOptions::default()
    };
    Some(nq_load::load(config, store, &options, &()).expect("the GPU loads it"))
}

/// A small model whose heads are as wide as those that fused GPU kernels take.
pub(crate) fn fused_config() -> ModelConfig {
    ModelConfig {
        hidden_size: 320,
        intermediate_size: 520,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 128,
        ..small_config()
    }
}

/// A session of two short sequences.
pub(crate) fn fused_session(engine: &dyn Engine, kv: KvType) -> Box<dyn Session> {
    engine
        .session(session_spec(2, 64, kv, 128))
        .expect("it fits")
}

/// Gives slot 1 of a hybrid's session the page that `text` begins with, then its states, without which it is no
/// sequence, and feeds it the rest of `text`.
pub(crate) fn restore(s: &mut dyn Session, page: &[u8], state: &[u8], text: &[u32]) {
    s.pages().unwrap().append(1, page).unwrap();
    assert_eq!(s.len(1), PAGE);
    assert_eq!(s.reach(1, PAGE), 0);
    assert_eq!(s.fork(1, 0, PAGE).unwrap(), 0);
    let refused = s
        .forward(&[chunk(1, &text[PAGE..], LogitsWanted::None)], None)
        .map(|_| ())
        .unwrap_err();
    assert!(refused.to_string().contains("states"), "{refused}");
    let pages = s.pages().unwrap();
    assert!(pages.write_state(1, &state[1..]).is_err());
    pages.write_state(1, state).unwrap();
    assert_eq!([s.reach(1, PAGE), s.snapshots().0], [PAGE, 1]);
    feed(s, 1, &text[PAGE..]);
}

/// Feeds both sessions the same tokens at `slot`, in pieces of so many, and has `check` compare the logits of each piece,
/// whose rows end before so many.
pub(crate) fn in_pieces(
    sessions: [&mut dyn Session; 2],
    slot: usize,
    text: &[u32],
    pieces: &[usize],
    mut check: impl FnMut(&[f32], &[f32], usize),
) {
    let [ours, theirs] = sessions;
    let mut at = 0;
    for rows in pieces {
        let part = &text[at..at + rows];
        at += rows;
        check(&feed(ours, slot, part), &feed(theirs, slot, part), at);
    }
}
