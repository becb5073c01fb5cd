//! All layers of a step at once, compared with the same layers by one kernel per operation.

use super::attention::{Case, Uploaded, new_cache, step_bounds};
use super::common::{affine, nmse, normal, two_level};
use super::{finish, gpu, guarded, is_sanitizing, pack};
use nq_formats::{AffineScheme, Bits, Group, Zeros};
use nq_kernels::cuda::{
    AttentionOutput, AttentionScratch, AttentionShape, Buffer, Checked, DeviceLinear, DevicePages,
    GemvOutput, Gpu, HEAD_DIM, LayersPlan, LayersScratch, LayersSizes, Norm, Stack, Step,
    StepLayer, Stream,
};
use nq_kernels::pages::KvType;

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
    /// Of the schemes of qkv, o, gate and up, and down.
    fn new(gpu: &Gpu, shape: Shape, schemes: [AffineScheme; 4], seed: u64) -> Self {
        let Shape { hidden, heads, mlp } = shape;
        let weight = |which: usize, out, inp, seed| affine(schemes[which], out, inp, None, seed);
        let gain = |seed| {
            let values: Vec<f32> = normal(hidden, seed).iter().map(|v| 1.0 + 0.3 * v).collect();
            gpu.upload("a test", &values).unwrap()
        };
        let concat = |w| pack(gpu, &[&w], Stack::Concat);
        let gate = weight(2, mlp, hidden, seed + 2);
        let up = weight(2, mlp, hidden, seed + 3);
        Weights {
            gains: [gain(seed + 5), gain(seed + 6)],
            qkv: concat(weight(0, (heads + 2 * KV_HEADS) * HEAD_DIM, hidden, seed)),
            o: concat(weight(1, hidden, heads * HEAD_DIM, seed + 1)),
            gate_up: pack(gpu, &[&gate, &up], Stack::Interleave),
            down: concat(weight(3, hidden, mlp, seed + 4)),
        }
    }
}

/// One kernel for each operation: all at once must agree with this.
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
/// appended keys and values are tested by later steps. Products of all layers take their schemes from
/// `schemes` in turn.
fn check(gpu: &Gpu, shape: Shape, schemes: &[AffineScheme], kv: KvType, len: usize) {
    let case = Case::new(shape.heads, KV_HEADS, kv, len);
    check_case(gpu, shape, schemes, case);
}

fn check_case(gpu: &Gpu, shape: Shape, schemes: &[AffineScheme], case: Case) {
    let stream = gpu.stream().unwrap();
    let Shape { hidden, heads, mlp } = shape;
    let (kv, len) = (case.kv, case.len);
    let on_device = Uploaded::new(gpu, &case);
    let mut turns = schemes.iter().cycle();
    let mut next = || std::array::from_fn(|_| *turns.next().unwrap());
    let weights: Vec<Weights> = (0..LAYERS as u64)
        .map(|i| Weights::new(gpu, shape, next(), 100 * i))
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
    let layers: Vec<StepLayer<'_>> = weights
        .iter()
        .enumerate()
        .map(|(i, w)| StepLayer {
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
    let name = format!(
        "{shape:?} {:?}, {} in all, {kv:?}",
        schemes[0],
        schemes.len()
    );
    // Both round x to 16 bits, each in its way, and layers amplify the difference. Codes of keys and values
    // may differ by one where rounding is a close call.
    let tolerance = match kv {
        KvType::Int8 => 1e-3,
        _ => 1e-5,
    };
    let Some(plan) = LayersPlan::new(gpu, &layers).unwrap() else {
        panic!("{name}: not at once");
    };
    let sizes = LayersSizes {
        hidden,
        heads,
        kv_heads: KV_HEADS,
        intermediate: mlp,
    };
    let mut scratch = LayersScratch::new(gpu, sizes).unwrap();
    let bounds = step_bounds(&cache);
    let mut step = Checked::new(gpu, "a test", 1, Step::default(), bounds).unwrap();
    let mut worst = 0f64;
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
                .step_layers(&plan, &layers, &mut x, &step, &mut scratch)
                .unwrap();
            let found = finish(&stream, &x);
            let error = nmse(&found, &expected);
            assert!(error < tolerance, "{name} position {position}: {error:e}");
            worst = worst.max(error);
            assert!(
                last.is_none_or(|l| l == found),
                "{name} position {position}: not the same again"
            );
            last = Some(found);
        }
    }
    println!("{name}: NMSE {worst:.1e} at most");
}

/// A GPU on which all layers run at once.
fn hopper() -> Option<Gpu> {
    let gpu = gpu()?;
    if gpu.info().capability == (9, 0) {
        Some(gpu)
    } else {
        println!("skipped: layers do not run at once on {}", gpu.info());
        None
    }
}

#[test]
fn all_layers_at_once() {
    let Some(gpu) = hopper() else { return };
    let scheme = |zeros, group| AffineScheme::new(Bits::B4, group, zeros);
    let of = |hidden, heads, mlp| Shape { hidden, heads, mlp };
    let (f16, int8) = (KvType::F16, KvType::Int8);
    let usual = &[scheme(Zeros::Integer, Group::Size(64))];
    // 12 products have each of these twice, in other places.
    let mix = &two_level(&[Group::Size(32), Group::Size(64)]);
    let other_mix = &two_level(&[Group::Size(64), Group::Channel, Group::Size(32)])[2..];
    if !is_sanitizing() {
        // As in 0.6B, 1.7B and 4B, except for the number of layers; then each number of query heads for a
        // key head.
        check(&gpu, of(1024, 16, 3072), usual, f16, 3);
        check(&gpu, of(2048, 16, 6144), usual, f16, 3);
        check(&gpu, of(2560, 32, 9728), usual, f16, 2);
        check(&gpu, of(1280, 40, 4352), usual, f16, 3);
        check(&gpu, of(1280, 64, 6400), usual, f16, 3);
        // Up to contexts of which each source has several pages.
        check(&gpu, of(256, 16, 1024), usual, f16, 4200);
        check(&gpu, of(256, 16, 1024), usual, int8, 4200);
        check(&gpu, of(512, 32, 1024), usual, f16, 2200);
        check(&gpu, of(1024, 16, 3072), mix, f16, 3);
        check(&gpu, of(2048, 16, 6144), other_mix, f16, 3);
        check(&gpu, of(1280, 64, 6400), mix, int8, 3);
        for kv in [f16, int8] {
            check(&gpu, of(512, 40, 1024), usual, kv, 300);
            check(&gpu, of(512, 64, 1024), usual, kv, 300);
        }
    }
    check(&gpu, of(256, 16, 1280), mix, f16, 3);
    check(&gpu, of(512, 32, 768), other_mix, f16, 3);
    for kv in [f16, int8] {
        let biased = |heads, len| Case::biased(heads, KV_HEADS, kv, len);
        check_case(&gpu, of(256, 16, 1280), usual, biased(16, 140));
        check_case(&gpu, of(512, 40, 768), usual, biased(40, 5));
    }
    for zeros in [Zeros::None, Zeros::Integer, Zeros::Offset] {
        for group in [Group::Size(64), Group::Size(128), Group::Channel] {
            check(&gpu, of(256, 16, 1280), &[scheme(zeros, group)], f16, 3);
            check(&gpu, of(512, 32, 768), &[scheme(zeros, group)], int8, 3);
        }
    }
}

#[test]
fn layers_that_do_not_run_at_once() {
    let Some(gpu) = hopper() else { return };
    let stream = gpu.stream().unwrap();
    let shape = Shape {
        hidden: 256,
        heads: 16,
        mlp: 1024,
    };
    let case = Case::new(shape.heads, KV_HEADS, KvType::F16, 8);
    let on_device = Uploaded::new(&gpu, &case);
    let of = |schemes| {
        let cache = new_cache(&gpu, &stream, &case, SLOT + 1);
        let w = Weights::new(&gpu, shape, schemes, 1);
        let layer = StepLayer {
            attention_norm: &w.gains[0],
            qkv: &w.qkv,
            heads: on_device.settings(),
            cache: cache.layer(0),
            o: &w.o,
            mlp_norm: &w.gains[1],
            gate_up: &w.gate_up,
            down: &w.down,
        };
        LayersPlan::new(&gpu, &[layer]).unwrap().is_some()
    };
    let scheme = |bits, group| AffineScheme::new(bits, Group::Size(group), Zeros::Integer);
    let (usual, two_level) = (
        scheme(Bits::B4, 64),
        scheme(Bits::B5, 32).two_level(Bits::B8),
    );
    assert!(of([usual; 4]));
    assert!(of([two_level; 4]));
    assert!(!of([scheme(Bits::B8, 64); 4]));
    assert!(!of([scheme(Bits::B4, 32); 4]));
    assert!(!of([usual, usual, usual, two_level]));
}
