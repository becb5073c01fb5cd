//! Layers of a step by clusters, compared with the same layers by one kernel per operation.

use super::attention::{Case, Uploaded, new_cache, step_bounds};
use super::common::{affine, nmse, normal};
use super::{finish, gpu, guarded, is_sanitizing, pack};
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::cpu::KvType;
use nq_kernels::cuda::{
    AttentionOutput, AttentionScratch, AttentionShape, Buffer, Checked, ClusterLayer, ClusterParts,
    ClusterPlan, DeviceLinear, DevicePages, GemvOutput, Gpu, HEAD_DIM, Norm, Stack, Step, Stream,
};

const KV_HEADS: usize = 8;
const SLOT: usize = 1;
const LAYERS: usize = 3;

/// Sizes of a model.
#[derive(Clone, Copy, Debug)]
struct Shape {
    hidden: usize,
    heads: usize,
    mlp: usize,
}

/// A layer's weights and gains.
struct Weights {
    gains: [Buffer<f32>; 2],
    qkv: DeviceLinear,
    o: DeviceLinear,
    gate_up: DeviceLinear,
    down: DeviceLinear,
}

impl Weights {
    fn new(gpu: &Gpu, shape: Shape, scheme: AffineScheme, seed: u64) -> Self {
        let Shape { hidden, heads, mlp } = shape;
        let weight = |out, inp, seed| affine(scheme, out, inp, None, seed);
        let gain = |seed| {
            let values: Vec<f32> = normal(hidden, seed).iter().map(|v| 1.0 + 0.3 * v).collect();
            gpu.upload("a test", &values).unwrap()
        };
        let concat = |w| pack(gpu, &[&w], Stack::Concat);
        let (gate, up) = (weight(mlp, hidden, seed + 2), weight(mlp, hidden, seed + 3));
        Weights {
            gains: [gain(seed + 5), gain(seed + 6)],
            qkv: concat(weight((heads + 2 * KV_HEADS) * HEAD_DIM, hidden, seed)),
            o: concat(weight(hidden, heads * HEAD_DIM, seed + 1)),
            gate_up: pack(gpu, &[&gate, &up], Stack::Interleave),
            down: concat(weight(hidden, mlp, seed + 4)),
        }
    }
}

/// One kernel for each operation: clusters must agree with this.
struct Plain {
    qkv: Buffer<f32>,
    attended: Buffer<f32>,
    gated: Buffer<f32>,
    scratch: AttentionScratch,
    cache: DevicePages,
}

impl Plain {
    fn run(
        &mut self,
        stream: &Stream,
        layers: &[Weights],
        heads: &Uploaded,
        x: &mut Buffer<f32>,
        step: &Checked<Step>,
        positions: usize,
    ) {
        let norm = |gain| Norm { gain, eps: 1e-6 };
        for (i, w) in layers.iter().enumerate() {
            let out = GemvOutput::Store(norm(&w.gains[0]), &mut self.qkv);
            stream.gemv(&w.qkv, x, out, false).unwrap();
            let shape = AttentionShape {
                m: 1,
                splits: AttentionScratch::splits(stream.gpu(), KV_HEADS, 1, positions),
                late: false,
                runs: false,
                shared: None,
            };
            let out = AttentionOutput::Full(&mut self.attended);
            let settings = heads.settings();
            stream
                .attention_decode(
                    &self.qkv,
                    step,
                    &settings,
                    self.cache.layer(i),
                    &mut self.scratch,
                    out,
                    shape,
                )
                .unwrap();
            stream
                .gemv(&w.o, &self.attended, GemvOutput::Add(x), false)
                .unwrap();
            let out = GemvOutput::Silu(norm(&w.gains[1]), &mut self.gated);
            stream.gemv(&w.gate_up, x, out, false).unwrap();
            stream
                .gemv(&w.down, &self.gated, GemvOutput::Add(x), false)
                .unwrap();
        }
    }
}

/// Steps of one sequence from its first position on, in both ways; each has its own cache, so that
/// appended keys and values are tested by later steps.
fn check(gpu: &Gpu, shape: Shape, scheme: AffineScheme, len: usize) {
    let stream = gpu.stream().unwrap();
    let Shape { hidden, heads, mlp } = shape;
    let case = Case::new(heads, KV_HEADS, KvType::F16, len);
    let on_device = Uploaded::new(gpu, &case);
    let weights: Vec<Weights> = (0..LAYERS as u64)
        .map(|i| Weights::new(gpu, shape, scheme, 100 * i))
        .collect();
    let zeros = |n| gpu.zeros::<f32>("a test", n).unwrap();
    let mut plain = Plain {
        qkv: zeros((heads + 2 * KV_HEADS) * HEAD_DIM),
        attended: zeros(heads * HEAD_DIM),
        gated: zeros(mlp),
        scratch: AttentionScratch::new(gpu, heads, KV_HEADS, 1).unwrap(),
        cache: new_cache(gpu, &stream, &case, SLOT + 1),
    };
    let cache = new_cache(gpu, &stream, &case, SLOT + 1);
    let layers: Vec<ClusterLayer<'_>> = weights
        .iter()
        .enumerate()
        .map(|(i, w)| ClusterLayer {
            attention_norm: &w.gains[0],
            qkv: &w.qkv,
            heads: on_device.settings(),
            cache: cache.layer(i),
            o: &w.o,
            mlp_norm: &w.gains[1],
            gate_up: &w.gate_up,
            down: &w.down,
        })
        .collect();
    let name = format!("{shape:?} {scheme:?}");
    let Some(plan) = ClusterPlan::new(gpu, &layers).unwrap() else {
        panic!("{name}: not by clusters");
    };
    let mut parts = ClusterParts::new(gpu, hidden).unwrap();
    let bounds = step_bounds(&cache);
    let mut step = Checked::new(gpu, "a test", 1, Step::default(), bounds).unwrap();
    for position in 0..len {
        let at = Step {
            position: position as i32,
            slot: SLOT as i32,
            ..Step::default()
        };
        step.write(0, &[at]).unwrap();
        let start = normal(hidden, 7 + position as u64);
        let mut x = guarded(gpu, &start);
        plain.run(&stream, &weights, &on_device, &mut x, &step, position + 1);
        let expected = finish(&stream, &x);
        let mut last: Option<Vec<f32>> = None;
        for _ in 0..2 {
            let mut x = guarded(gpu, &start);
            stream
                .cluster_layers(&plan, &layers, &mut x, &step, &mut parts)
                .unwrap();
            let found = finish(&stream, &x);
            let error = nmse(&found, &expected);
            assert!(error < 1e-7, "{name} position {position}: {error:e}");
            assert!(
                last.is_none_or(|l| l == found),
                "{name} position {position}: not the same again"
            );
            last = Some(found);
        }
    }
}

/// A GPU on which clusters run.
fn clusters() -> Option<Gpu> {
    let gpu = gpu()?;
    if gpu.info().capability == (9, 0) {
        Some(gpu)
    } else {
        println!("skipped: no clusters on {}", gpu.info());
        None
    }
}

#[test]
fn layers_by_clusters() {
    let Some(gpu) = clusters() else { return };
    let scheme = |zeros, group| AffineScheme::new(Bits::B4, group, zeros);
    let of = |hidden, heads, mlp| Shape { hidden, heads, mlp };
    // As in 0.6B and 1.7B, except for the number of layers.
    if !is_sanitizing() {
        let usual = scheme(Zeros::Integer, Group::Size(64));
        check(&gpu, of(1024, 16, 3072), usual, 3);
        check(&gpu, of(2048, 16, 6144), usual, 3);
        check(&gpu, of(256, 16, 512), usual, 700);
        check(&gpu, of(256, 32, 512), usual, 300);
    }
    // Shares of clusters that begin inside a span and differ in size.
    for zeros in [Zeros::None, Zeros::Integer, Zeros::Offset] {
        for group in [Group::Size(64), Group::Size(128), Group::Channel] {
            check(&gpu, of(256, 16, 640), scheme(zeros, group), 3);
            check(&gpu, of(512, 32, 704), scheme(zeros, group), 3);
        }
    }
}

#[test]
fn weights_that_clusters_do_not_serve() {
    let Some(gpu) = clusters() else { return };
    let stream = gpu.stream().unwrap();
    let shape = Shape {
        hidden: 256,
        heads: 16,
        mlp: 512,
    };
    let case = Case::new(shape.heads, KV_HEADS, KvType::F16, 8);
    let on_device = Uploaded::new(&gpu, &case);
    let of = |bits, group, kv| {
        let scheme = AffineScheme::new(bits, group, Zeros::Integer);
        let case = Case::new(shape.heads, KV_HEADS, kv, 8);
        let cache = new_cache(&gpu, &stream, &case, SLOT + 1);
        let w = Weights::new(&gpu, shape, scheme, 1);
        let layer = ClusterLayer {
            attention_norm: &w.gains[0],
            qkv: &w.qkv,
            heads: on_device.settings(),
            cache: cache.layer(0),
            o: &w.o,
            mlp_norm: &w.gains[1],
            gate_up: &w.gate_up,
            down: &w.down,
        };
        ClusterPlan::new(&gpu, &[layer]).unwrap().is_some()
    };
    assert!(of(Bits::B4, Group::Size(64), KvType::F16));
    assert!(!of(Bits::B8, Group::Size(64), KvType::F16));
    assert!(!of(Bits::B4, Group::Size(32), KvType::F16));
    assert!(!of(Bits::B4, Group::Size(64), KvType::Int8));
}
