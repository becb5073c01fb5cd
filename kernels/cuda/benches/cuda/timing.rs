//! Timing by the device's own clock; shapes and weights of the benches.

use nq_cuda::{DeviceLinear, Gpu, Mark, PackedKind, Stack, Stream, Uploader};
use nq_formats::{
    AffineScheme, AffineWeight, Bits, Group, GroupValues, Parts, QuantizedWeight, Tensor, Weight,
    Zeros,
};
use nq_kernels::Result;
use nq_model::{DType, Dims};

/// Operations in a recorded graph, and runs of the graph.
const CHAIN: usize = 24;
const RUNS: usize = 7;
/// Number of operations timed kernel by kernel.
const ALONE: usize = 10;

/// Sizes of a model.
#[derive(Clone, Copy)]
pub(crate) struct Model {
    pub(crate) name: &'static str,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) mlp: usize,
}

pub(crate) const MODELS: [Model; 2] = [
    Model {
        name: "0.6B",
        hidden: 1024,
        heads: 16,
        kv_heads: 8,
        mlp: 3072,
    },
    Model {
        name: "8B",
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        mlp: 12288,
    },
];
pub(crate) const VOCAB: usize = 151_936;

impl Model {
    /// Products of a layer: name, outputs and inputs.
    pub(crate) fn products(&self) -> [(&'static str, usize, usize); 4] {
        let (q, kv) = (self.heads * 128, self.kv_heads * 128);
        [
            ("qkv", q + 2 * kv, self.hidden),
            ("o", self.hidden, q),
            ("gate_up", 2 * self.mlp, self.hidden),
            ("down", self.hidden, self.mlp),
        ]
    }
}

/// The format that weights are rounded to.
#[derive(Clone, Copy)]
pub(crate) enum Scheme {
    Int4,
    /// Codes of 4, 5 or 6 bits with scales in two levels.
    Mixed(Bits),
    Int8,
    /// INT4 as most GGUF files have it.
    Offsets,
    Fp16,
}

pub(crate) const SCHEMES: [(Scheme, &str); 7] = [
    (Scheme::Int4, "int4 g128"),
    (Scheme::Mixed(Bits::B4), "int4 g64 scales8"),
    (Scheme::Mixed(Bits::B5), "int5 g64 scales8"),
    (Scheme::Mixed(Bits::B6), "int6 g64 scales8"),
    (Scheme::Int8, "int8"),
    (Scheme::Offsets, "int4 g32 offsets"),
    (Scheme::Fp16, "fp16"),
];

impl Scheme {
    /// An arbitrary weight `[out, inp]`: its values do not change the time.
    pub(crate) fn weight(self, out: usize, inp: usize) -> Weight {
        let (bits, group, zeros) = match self {
            Scheme::Int4 => (Bits::B4, Group::Size(128), Zeros::Integer),
            Scheme::Mixed(Bits::B6) => (Bits::B6, Group::Size(64), Zeros::None),
            Scheme::Mixed(bits) => (bits, Group::Size(64), Zeros::Integer),
            Scheme::Int8 => (Bits::B8, Group::Channel, Zeros::None),
            Scheme::Offsets => (Bits::B4, Group::Size(32), Zeros::Offset),
            Scheme::Fp16 => {
                let data = [0x1e, 0x2b, 0x31, 0xac].repeat(out * inp / 2);
                let tensor = Tensor::new(DType::F16, vec![out, inp], data.into());
                return Weight::Dense(tensor.expect("a tensor of these sizes"));
            }
        };
        let mut scheme = AffineScheme::new(bits, group, zeros);
        let groups = group.count(inp);
        let scales = if let Scheme::Mixed(_) = self {
            scheme = scheme.two_level(Bits::B8);
            GroupValues::TwoLevel {
                small: vec![0x9au8; out * groups].into(),
                of_spans: vec![half::f16::from_f32(1e-4); out].into(),
            }
        } else {
            GroupValues::Half(vec![half::f16::from_f32(0.01); out * groups].into())
        };
        let parts = Parts {
            codes: vec![0x5au8; out * bits.bytes(inp)].into(),
            scales,
            zeros: (zeros == Zeros::Integer).then(|| vec![0x77u8; out * bits.bytes(groups)].into()),
            offsets: (zeros == Zeros::Offset)
                .then(|| GroupValues::Half(vec![half::f16::from_f32(-0.1); out * groups].into())),
            levels: None,
            g_idx: None,
        };
        let weight = AffineWeight::assemble(scheme, Dims::new(out, inp), parts);
        Weight::Quantized(QuantizedWeight::Affine(
            weight.expect("a weight of these sizes"),
        ))
    }
}

/// A device and its measured bandwidth.
pub(crate) struct Timing {
    pub(crate) gpu: Gpu,
    pub(crate) stream: Stream,
    /// Measured bandwidth of reading its memory, in bytes per second.
    pub(crate) rate: f64,
}

impl Timing {
    pub(crate) fn new() -> Result<Self> {
        let gpu = Gpu::open(0)?;
        let rate = gpu.read_bandwidth(32 * gpu.info().l2_bytes)?;
        println!("{}: memory is read at {:.2} TB/s", gpu.info(), rate / 1e12);
        Ok(Timing {
            stream: gpu.stream()?,
            gpu,
            rate,
        })
    }

    pub(crate) fn begin(&self, name: &str) {
        println!("\n{name}");
    }

    /// Copies of a weight that are larger than the cache together.
    pub(crate) fn weights(
        &self,
        scheme: Scheme,
        out: usize,
        inp: usize,
    ) -> Result<Vec<DeviceLinear>> {
        let weight = scheme.weight(out, inp);
        let bytes = DeviceLinear::zeros(&self.gpu, PackedKind::of(&weight)?, &[out], inp)?.bytes();
        let copies = (3 * self.gpu.info().l2_bytes).div_ceil(bytes).clamp(1, 96);
        let mut uploader = Uploader::new(&self.gpu)?;
        let all: Result<Vec<_>> = (0..copies)
            .map(|_| uploader.pack(&[&weight], Stack::Concat, false))
            .collect();
        uploader.finish()?;
        all
    }

    fn print(&self, what: &str, seconds: f64, bytes: usize) {
        let share = match bytes {
            0 => String::new(),
            bytes => format!(
                "{:>10.3} MB {:>6.1} %",
                bytes as f64 / 1e6,
                100.0 * bytes as f64 / seconds / self.rate
            ),
        };
        println!("  {what:<58} {:>10.2} us{share}", seconds * 1e6);
    }

    /// Times each kernel of `op` between two events; `op` is given the number of its turn. `bytes` are
    /// those that one turn reads and writes in memory.
    pub(crate) fn alone(
        &self,
        what: &str,
        bytes: usize,
        mut op: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        op(0)?; // loads the kernels
        self.gpu.synchronize()?;
        self.gpu.start_profile_by_kernel();
        let outcome = (0..ALONE).try_for_each(&mut op);
        self.gpu.synchronize()?;
        self.gpu.settle_profile()?;
        let kernels = self.gpu.stop_profile();
        outcome?;
        let seconds: f64 = kernels.iter().map(|k| k.seconds).sum();
        self.print(what, seconds / ALONE as f64, bytes);
        if kernels.len() > 1 {
            for k in kernels {
                let (blocks, threads) = k.shape.pair();
                let calls = k.calls as f64 / ALONE as f64;
                let name = format!("  {calls} x {} ({blocks} blocks of {threads})", k.kernel);
                self.print(&name, k.seconds / k.calls as f64, 0);
            }
        }
        Ok(())
    }

    /// Like [`Timing::alone`], and also times the operations one after another in a recorded graph.
    pub(crate) fn chained(
        &self,
        what: &str,
        bytes: usize,
        mut op: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        self.alone(what, bytes, &mut op)?;
        let stream = &self.stream;
        let graph = stream.record(|| (0..CHAIN).try_for_each(&mut op))?;
        stream.run(&graph)?;
        let mut marks: Vec<Mark> = vec![stream.mark()?];
        for _ in 0..RUNS {
            stream.run(&graph)?;
            marks.push(stream.mark()?);
        }
        stream.synchronize()?;
        let mut seconds = Vec::new();
        for pair in marks.windows(2) {
            seconds.push(pair[0].seconds_until(&pair[1])?);
        }
        seconds.sort_by(f64::total_cmp);
        let each = seconds[RUNS / 2] / CHAIN as f64;
        self.print(&format!("{what}, chained"), each, bytes);
        Ok(())
    }
}
