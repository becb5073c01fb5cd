//! All layers of a step at once, compared with the same layers by one kernel per operation.

use super::attention::{Case, Uploaded, new_cache, step_bounds};
use super::{finish, gpu, guarded, is_sanitizing, pack};
use nq_cuda::{
    AttentionOutput, AttentionScratch, AttentionShape, Buffer, Checked, CodedExperts, DeltaVectors,
    DeviceLinear, DevicePages, DeviceStates, GemvOutput, Gpu, HalfRows, LayersPlan, LayersScratch,
    LayersSizes, Norm, Rates, Stack, StatesShape, Step, StepLayer, StepMixer, Stream,
    StreamOptions, TrellisRoom, TrellisSizes, WIDE_HEAD_DIM, gated_width, stacked,
};
use nq_formats::trellis::Code;
use nq_formats::{AffineScheme, Bits, Group, Scheme, TrellisScheme, Zeros};
use nq_kernels::DeltaShape;
use nq_kernels::pages::KvType;
use nq_model::{DType, Dims, Experts};
use nq_testkit::compare::nmse;
use nq_testkit::delta::{self, EPS};
use nq_testkit::weights::{affine, blocks, dense, normal, trellis, two_level};

const KV_HEADS: usize = 8;
const SLOT: usize = 1;
const LAYERS: usize = 3;

/// Sizes of a model. With `delta`, heads are wide, and even layers have a recurrence in place of attention. With
/// `experts`, layers have mixtures, and `mlp` is the width of an expert.
#[derive(Clone, Copy, Debug)]
struct LayersShape {
    hidden: usize,
    heads: usize,
    mlp: usize,
    delta: Option<DeltaShape>,
    experts: Option<Experts>,
}

/// A layer's weights and gains.
struct LayerWeights {
    gains: [Buffer<f32>; 2],
    /// Of attention, or the inputs of a recurrence.
    qkv: DeviceLinear,
    delta: Option<Recurrence>,
    o: DeviceLinear,
    /// Of a mixture, for both ways.
    router: Option<(HalfRows, DeviceLinear)>,
    gate_up: DeviceLinear,
    down: DeviceLinear,
}

/// What else a recurrence has.
struct Recurrence {
    rates: HalfRows,
    vectors: [Buffer<f32>; 4],
}

impl Recurrence {
    fn new(gpu: &Gpu, shape: &DeltaShape, hidden: usize, seed: u64) -> Self {
        let w = delta::vectors(shape);
        let rows = |seed| dense(DType::BF16, shape.value_heads, hidden, seed);
        Recurrence {
            rates: HalfRows::new(gpu, &[&rows(seed), &rows(seed + 1)]).unwrap(),
            vectors: [&w.conv, &w.decay, &w.dt_bias, &w.norm]
                .map(|v| gpu.upload("a test", v).unwrap()),
        }
    }

    fn vectors(&self) -> DeltaVectors<'_> {
        let [conv, decay, dt_bias, norm] = &self.vectors;
        DeltaVectors {
            gate: nq_model::OutputGate::Silu,
            conv,
            decay,
            dt_bias,
            norm,
            eps: EPS,
        }
    }
}

impl LayerWeights {
    /// Of the schemes of qkv, o, gate and up, and down.
    fn new(gpu: &Gpu, (shape, case): (LayersShape, &Case), schemes: [Scheme; 4], i: usize) -> Self {
        let LayersShape { hidden, mlp, .. } = shape;
        let seed = 100 * i as u64;
        // Parts of a product in trellis codes have the same scales of inputs.
        let weight = |which: usize, out, inp, seed| match schemes[which] {
            Scheme::Affine(scheme) => affine(scheme, out, inp, None, seed),
            Scheme::Exl3(_) => unreachable!("the kernel of all layers has no EXL3"),
            Scheme::Trellis(scheme) => trellis(scheme, Dims::new(out, inp), seed, which as u64),
        };
        let gain = |seed| {
            let values: Vec<f32> = normal(hidden, seed).iter().map(|v| 1.0 + 0.3 * v).collect();
            gpu.upload("a test", &values).unwrap()
        };
        let concat = |w| pack(gpu, &[&w], Stack::Concat);
        let stacks = shape.experts.map_or(1, |e| stacked(&e));
        let gate = weight(2, stacks * mlp, hidden, seed + 2);
        let up = weight(2, stacks * mlp, hidden, seed + 3);
        let router = shape.experts.map(|_| {
            let rows = dense(DType::BF16, stacks, hidden, seed + 9);
            let halves = HalfRows::new(gpu, &[&rows]).unwrap();
            (halves, pack(gpu, &[&rows], Stack::Concat))
        });
        let delta = shape.delta.filter(|_| i.is_multiple_of(2));
        let rows = delta.map_or(case.width(), |d| d.channels() + d.values());
        LayerWeights {
            gains: [gain(seed + 5), gain(seed + 6)],
            qkv: concat(weight(0, rows, hidden, seed)),
            delta: delta.map(|d| Recurrence::new(gpu, &d, hidden, seed + 7)),
            o: concat(weight(1, hidden, case.heads * case.dim, seed + 1)),
            router,
            gate_up: pack(gpu, &[&gate, &up], Stack::Interleave),
            down: concat(weight(3, stacks * hidden, mlp, seed + 4)),
        }
    }

    /// In the form of all layers at once.
    fn layer<'a>(&'a self, i: usize, heads: &'a Uploaded, kept: &'a Kept) -> StepLayer<'a> {
        let mixer = match &self.delta {
            None => StepMixer::Attention {
                qkv: &self.qkv,
                heads: heads.settings(),
                cache: kept.cache.layer(i),
            },
            Some(delta) => StepMixer::Recurrence {
                inputs: &self.qkv,
                rates: &delta.rates,
                vectors: delta.vectors(),
                states: kept.states().layer(i),
            },
        };
        StepLayer {
            norm: &self.gains[0],
            mixer,
            o: &self.o,
            mlp_norm: &self.gains[1],
            router: self.router.as_ref().map(|(halves, _)| halves),
            gate_up: &self.gate_up,
            down: &self.down,
        }
    }
}

/// What is kept of sequences.
struct Kept {
    cache: DevicePages,
    states: Option<DeviceStates>,
}

impl Kept {
    fn new(gpu: &Gpu, stream: &Stream, shape: LayersShape, case: &Case) -> Self {
        let states = |delta| StatesShape {
            delta,
            layers: LAYERS,
            places: SLOT + 1 + 1,
            kept: SLOT + 1,
        };
        Kept {
            // The last slot is the idle one.
            cache: new_cache(gpu, stream, case, SLOT + 1),
            states: (shape.delta).map(|d| DeviceStates::new(gpu, states(d)).unwrap()),
        }
    }

    fn states(&self) -> &DeviceStates {
        self.states.as_ref().unwrap()
    }
}

/// One kernel for each operation: all at once must agree with this.
struct Plain {
    qkv: Buffer<f32>,
    attended: Buffer<f32>,
    gated: Buffer<f32>,
    scores: Buffer<f32>,
    scratch: AttentionScratch,
    kept: Kept,
}

impl Plain {
    fn run(
        &mut self,
        stream: &Stream,
        layers: &[LayerWeights],
        (heads, case, experts): (&Uploaded, &Case, Option<&Experts>),
        x: &mut Buffer<f32>,
        step: &Checked<Step>,
        positions: usize,
    ) {
        let norm = |gain| Norm { gain, eps: 1e-6 };
        for (i, w) in layers.iter().enumerate() {
            let out = GemvOutput::Store(Some(norm(&w.gains[0])), &mut self.qkv);
            stream.gemv(&w.qkv, x, out, false).unwrap();
            let out = AttentionOutput::Full(&mut self.attended);
            if let Some(delta) = &w.delta {
                let rates = Rates::Of(x, norm(&w.gains[0]), &delta.rates);
                let states = self.kept.states().layer(i);
                stream
                    .delta_step(
                        &self.qkv,
                        rates,
                        step,
                        &delta.vectors(),
                        states,
                        out,
                        1,
                        SLOT + 1,
                        false,
                    )
                    .unwrap();
            } else {
                let shape = AttentionShape {
                    m: 1,
                    splits: AttentionScratch::splits(stream.gpu(), case.kv_heads, 1, positions),
                    holds_dependents: false,
                    runs: false,
                    shared: None,
                };
                let (settings, cache) = (heads.settings(), self.kept.cache.layer(i));
                stream
                    .attention_decode(
                        &self.qkv,
                        step,
                        &settings,
                        cache,
                        &mut self.scratch,
                        out,
                        shape,
                    )
                    .unwrap();
            }
            stream
                .gemv(&w.o, &self.attended, GemvOutput::Add(x), false)
                .unwrap();
            let (Some((_, router)), Some(shape)) = (&w.router, experts) else {
                let out = GemvOutput::Silu(Some(norm(&w.gains[1])), &mut self.gated);
                stream.gemv(&w.gate_up, x, out, false).unwrap();
                stream
                    .gemv(&w.down, &self.gated, GemvOutput::Add(x), false)
                    .unwrap();
                continue;
            };
            let out = GemvOutput::Store(Some(norm(&w.gains[1])), &mut self.scores);
            stream.gemv(router, x, out, false).unwrap();
            let (up, gated, scores) = (&w.gate_up, &mut self.gated, &self.scores);
            let inputs = (&*x, Some(norm(&w.gains[1])));
            stream
                .experts_up(up, inputs, scores, gated, shape, 1)
                .unwrap();
            stream
                .experts_down(&w.down, gated, scores, x, shape, 1)
                .unwrap();
        }
    }
}

/// Runs drafts of a sequence through the recurrence of each layer that has one: three rows from `position` on,
/// which are kept.
fn draft(
    gpu: &Gpu,
    stream: &Stream,
    (weights, shape): (&[LayerWeights], &DeltaShape),
    kept: &Kept,
    position: usize,
) {
    let recurrent = weights.iter().enumerate();
    for (i, delta) in recurrent.filter_map(|(i, w)| Some((i, w.delta.as_ref()?))) {
        let [qkvz, ba] = delta::rows(shape, 3, 50 + i as u64);
        let upload = |v: &[f32]| gpu.upload("a test", v).unwrap();
        let (qkvz, ba) = (upload(&qkvz), upload(&ba));
        let at = |row| Step {
            position: (position + row) as i32,
            slot: SLOT as i32,
            ..Step::default()
        };
        let steps = [0, 1, 2].map(at);
        let steps = Checked::upload(gpu, "a test", &steps, step_bounds(&kept.cache)).unwrap();
        let mut out = gpu.zeros("a test", 3 * shape.values()).unwrap();
        stream
            .delta_step(
                &qkvz,
                Rates::Products(&ba),
                &steps,
                &delta.vectors(),
                kept.states().layer(i),
                AttentionOutput::Full(&mut out),
                3,
                SLOT + 1,
                false,
            )
            .unwrap();
        stream.synchronize().unwrap();
    }
}

/// Steps of one sequence from its first position on, in both ways; each has its own cache, so that
/// appended keys and values are tested by later steps. Products of all layers take their schemes from
/// `schemes` in turn.
fn check<S: Copy + Into<Scheme>>(
    gpu: &Gpu,
    shape: LayersShape,
    schemes: &[S],
    kv: KvType,
    len: usize,
) {
    let case = Case::new(shape.heads, KV_HEADS, kv, len);
    check_case(gpu, shape, schemes, case);
}

fn check_case<S: Copy + Into<Scheme>>(gpu: &Gpu, shape: LayersShape, schemes: &[S], case: Case) {
    let schemes: Vec<Scheme> = schemes.iter().map(|s| (*s).into()).collect();
    let trellis = schemes[0].trellis().is_some();
    let LayersShape {
        hidden, heads, mlp, ..
    } = shape;
    let (kv, len) = (case.kv, case.len);
    let on_device = Uploaded::new(gpu, &case);
    let room = TrellisSizes {
        rows: 1,
        many: 1,
        inputs: hidden.max(mlp).max(heads * case.dim),
        weights: 0,
        gate: 0,
        experts: CodedExperts::default(),
    };
    let options = StreamOptions {
        room: trellis.then(|| TrellisRoom::new(gpu, room).unwrap()),
        ..StreamOptions::default()
    };
    let stream = gpu.stream_with(options).unwrap();
    let mut turns = schemes.iter().cycle();
    let mut next = || std::array::from_fn(|_| *turns.next().unwrap());
    let weights: Vec<LayerWeights> = (0..LAYERS)
        .map(|i| LayerWeights::new(gpu, (shape, &case), next(), i))
        .collect();
    let zeros = |n| gpu.zeros::<f32>("a test", n).unwrap();
    let rows = weights.iter().map(|w| w.qkv.rows()).max().unwrap();
    let mut plain = Plain {
        qkv: zeros(rows),
        attended: zeros(heads * case.dim),
        gated: zeros(shape.experts.map_or(mlp, |e| gated_width(&e))),
        scores: zeros(shape.experts.map_or(0, |e| stacked(&e))),
        scratch: AttentionScratch::new(gpu, heads * case.dim / 128, case.kv_heads, 1).unwrap(),
        kept: Kept::new(gpu, &stream, shape, &case),
    };
    // A recurrence changes what it reads: what runs a second time has states of its own.
    let kept = [0, 1].map(|_| Kept::new(gpu, &stream, shape, &case));
    let layers = kept.each_ref().map(|kept| -> Vec<StepLayer<'_>> {
        let all = weights.iter().enumerate();
        all.map(|(i, w)| w.layer(i, &on_device, kept)).collect()
    });
    let name = format!(
        "{shape:?} {:?}, {} in all, {kv:?}",
        schemes[0],
        schemes.len()
    );
    // Both round x to 16 bits, each in its way, and layers amplify the difference. Codes of keys and values
    // may differ by one where rounding is a close call.
    let tolerance = match kv {
        KvType::Int8 => 1e-3,
        _ if shape.experts.is_some() => 1e-4,
        _ => 1e-5,
    };
    let Some(plan) = LayersPlan::new(gpu, &layers[0], shape.experts).unwrap() else {
        // 99 KiB of shared memory are too little for the keys of a page of wide heads, and for digits of the widest inputs
        // of trellis codes.
        let room = gpu.info().shared_memory;
        let large = case.dim == WIDE_HEAD_DIM || trellis && mlp > 9000;
        assert!(room < 100 << 10 && large, "{name}: not at once");
        println!("skipped: {name}: {room} bytes of shared memory are too little");
        return;
    };
    let sizes = LayersSizes {
        hidden,
        heads,
        kv_heads: case.kv_heads,
        head_dim: case.dim,
        delta: shape.delta,
        experts: shape.experts,
        intermediate: mlp,
        trellis,
    };
    let mut scratch = LayersScratch::new(gpu, sizes).unwrap();
    let bounds = step_bounds(&kept[0].cache);
    let mut step = Checked::new(gpu, "a test", 1, Step::default(), bounds).unwrap();
    let mut worst = 0f64;
    let mut behind = 0;
    for position in 0..len {
        if let (Some(delta), 5) = (&shape.delta, position) {
            for kept in [&plain.kept, &kept[0], &kept[1]] {
                draft(gpu, &stream, (&weights, delta), kept, position - 2);
            }
            behind = 2;
        }
        let at = Step {
            position: position as i32,
            slot: SLOT as i32,
            behind,
            ..Step::default()
        };
        behind = 0;
        step.write(0, &[at]).unwrap();
        let start = normal(hidden, 7 + position as u64);
        let mut x = guarded(gpu, &start);
        plain.run(
            &stream,
            &weights,
            (&on_device, &case, shape.experts.as_ref()),
            &mut x,
            &step,
            position + 1,
        );
        let expected = finish(&stream, &x);
        let mut last: Option<Vec<f32>> = None;
        for layers in &layers {
            let mut x = guarded(gpu, &start);
            stream
                .step_layers(&plan, layers, &mut x, &step, &mut scratch)
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

fn hybrid_shape(key_heads: usize, value_heads: usize) -> DeltaShape {
    delta::shape([key_heads, value_heads, 128, 128, 4])
}

#[test]
fn all_layers_at_once() {
    let Some(gpu) = gpu() else { return };
    let scheme = |zeros, group| AffineScheme::new(Bits::B4, group, zeros);
    let sizes = |hidden, heads, mlp| LayersShape {
        hidden,
        heads,
        mlp,
        delta: None,
        experts: None,
    };
    let (f16, int8) = (KvType::F16, KvType::Int8);
    let usual = &[scheme(Zeros::Integer, Group::Size(64))];
    // 12 products have each of these twice, in other places.
    let mix = &two_level(&[Group::Size(32), Group::Size(64)]);
    let other_mix = &two_level(&[Group::Size(64), Group::Channel, Group::Size(32)])[2..];
    if !is_sanitizing() {
        // As in 0.6B, 1.7B and 4B, except for the number of layers; then each number of query heads for a
        // key head.
        check(&gpu, sizes(1024, 16, 3072), usual, f16, 3);
        check(&gpu, sizes(2048, 16, 6144), usual, f16, 3);
        check(&gpu, sizes(2560, 32, 9728), usual, f16, 2);
        check(&gpu, sizes(1280, 40, 4352), usual, f16, 3);
        check(&gpu, sizes(1280, 64, 6400), usual, f16, 3);
        // Up to contexts of which each source has several pages.
        check(&gpu, sizes(256, 16, 1024), usual, f16, 4200);
        check(&gpu, sizes(256, 16, 1024), usual, int8, 4200);
        check(&gpu, sizes(512, 32, 1024), usual, f16, 2200);
        check(&gpu, sizes(1024, 16, 3072), mix, f16, 3);
        check(&gpu, sizes(2048, 16, 6144), other_mix, f16, 3);
        check(&gpu, sizes(1280, 64, 6400), mix, int8, 3);
        for kv in [f16, int8] {
            check(&gpu, sizes(512, 40, 1024), usual, kv, 300);
            check(&gpu, sizes(512, 64, 1024), usual, kv, 300);
        }
    }
    check(&gpu, sizes(256, 16, 1280), mix, f16, 3);
    check(&gpu, sizes(512, 32, 768), other_mix, f16, 3);
    check(&gpu, sizes(512, 32, 768), &blocks(), f16, 3);
    for kv in [f16, int8] {
        let biased = |heads, len| Case::biased(heads, KV_HEADS, kv, len);
        check_case(&gpu, sizes(256, 16, 1280), usual, biased(16, 140));
        check_case(&gpu, sizes(512, 40, 768), usual, biased(40, 5));
    }
    for zeros in [Zeros::None, Zeros::Integer, Zeros::Offset] {
        for group in [Group::Size(64), Group::Size(128), Group::Channel] {
            check(&gpu, sizes(256, 16, 1280), &[scheme(zeros, group)], f16, 3);
            check(&gpu, sizes(512, 32, 768), &[scheme(zeros, group)], int8, 3);
        }
    }
}

#[test]
fn all_layers_of_trellis_codes_at_once() {
    let Some(gpu) = gpu() else { return };
    let sizes = |hidden, heads, mlp| LayersShape {
        hidden,
        heads,
        mlp,
        delta: None,
        experts: None,
    };
    let octagon = |bits| TrellisScheme::of_bits(Code::Octagon, bits).unwrap();
    let sum = TrellisScheme::of_bits(Code::Sum, 6.0).unwrap();
    let all = [3.5, 2.0, 5.0, 2.5, 4.0, 3.0].map(octagon);
    // Five products, so that each place gets each of them.
    let mix = [octagon(4.0), sum, octagon(3.0), octagon(3.5), octagon(2.5)];
    if !is_sanitizing() {
        // As in 0.6B, 4B and 8B, except for the number of layers.
        check(&gpu, sizes(1024, 16, 3072), &all, KvType::F16, 3);
        check(&gpu, sizes(2560, 32, 9728), &mix, KvType::F16, 3);
        check(
            &gpu,
            sizes(4096, 32, 12288),
            &[octagon(4.0)],
            KvType::F16,
            3,
        );
        check(&gpu, sizes(1280, 40, 4352), &mix, KvType::Int8, 200);
    }
    check(&gpu, sizes(1024, 16, 1280), &mix, KvType::F16, 140);
}

#[test]
fn all_layers_of_hybrids_at_once() {
    let Some(gpu) = gpu() else { return };
    let usual = [AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer)];
    let mix = two_level(&[Group::Size(32), Group::Size(64)]);
    let check = |hidden, (heads, kv_heads), (key_heads, value_heads), mlp, schemes: &[_], len| {
        let case = Case::of(WIDE_HEAD_DIM, heads, kv_heads, KvType::F16, len);
        let mut delta = hybrid_shape(key_heads, value_heads);
        delta.tiled = mlp == 1280;
        let shape = LayersShape {
            hidden,
            heads,
            mlp,
            delta: Some(delta),
            experts: None,
        };
        check_case(&gpu, shape, schemes, case);
    };
    if !is_sanitizing() {
        // As in 0.8B, 9B and 27B, except for the number of layers.
        check(1024, (8, 2), (16, 16), 3584, &usual, 9);
        check(4096, (16, 4), (16, 32), 12288, &usual, 9);
        check(5120, (24, 4), (16, 48), 17408, &usual, 9);
        // Up to contexts of which each source has several pages.
        check(512, (8, 1), (4, 16), 1024, &usual, 2200);
        check(1024, (8, 2), (16, 16), 3584, &mix, 140);
    }
    check(512, (4, 2), (2, 8), 1280, &usual, 140);
    check(256, (4, 1), (8, 8), 1024, &mix, 12);
    check(256, (4, 1), (8, 8), 1024, &blocks(), 12);
}

#[test]
fn all_layers_of_mixtures_at_once() {
    let Some(gpu) = gpu() else { return };
    let usual = [AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer)];
    let mix = two_level(&[Group::Size(32), Group::Size(64)]);
    // Experts of (all but the shared one, of a row, width, that of the shared one).
    let experts = |count, per_token, width, shared| Experts {
        count,
        per_token,
        width,
        normalized: shared == 0,
        shared,
    };
    let check = |hidden, heads, routed: Experts, hybrid: bool, schemes: &[_], len| {
        let case = match hybrid {
            true => Case::of(WIDE_HEAD_DIM, heads, 2, KvType::F16, len),
            false => Case::new(heads, 4, KvType::F16, len),
        };
        let shape = LayersShape {
            hidden,
            heads,
            mlp: routed.width,
            delta: hybrid.then(|| hybrid_shape(heads, 2 * heads)),
            experts: Some(routed),
        };
        check_case(&gpu, shape, schemes, case);
    };
    if !is_sanitizing() {
        // As in 30B-A3B and 35B-A3B, except for the number of layers; most experts that a stack has.
        check(2048, 32, experts(128, 8, 768, 0), false, &usual, 40);
        check(2048, 16, experts(256, 8, 512, 512), true, &usual, 20);
        check(512, 4, experts(511, 10, 256, 256), true, &usual, 6);
        check(2048, 32, experts(128, 8, 768, 0), false, &mix, 6);
    }
    check(512, 16, experts(9, 2, 512, 0), false, &usual, 12);
    check(512, 4, experts(70, 3, 256, 256), true, &mix, 12);
}

#[test]
fn layers_that_do_not_run_at_once() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    let shape = LayersShape {
        hidden: 256,
        heads: 16,
        mlp: 1024,
        delta: None,
        experts: None,
    };
    let case = Case::new(shape.heads, KV_HEADS, KvType::F16, 8);
    let on_device = Uploaded::new(&gpu, &case);
    let kept = Kept::new(&gpu, &stream, shape, &case);
    let planned = |schemes| {
        let w = LayerWeights::new(&gpu, (shape, &case), schemes, 1);
        let layer = w.layer(0, &on_device, &kept);
        LayersPlan::new(&gpu, &[layer], None).unwrap().is_some()
    };
    let affine = |bits, group| AffineScheme::new(bits, Group::Size(group), Zeros::Integer);
    let scheme = |bits, group| Scheme::from(affine(bits, group));
    let two_level = Scheme::from(affine(Bits::B5, 32).two_level(Bits::B8));
    let usual = scheme(Bits::B4, 64);
    assert!(planned([usual; 4]));
    assert!(planned([two_level; 4]));
    assert!(!planned([scheme(Bits::B8, 64); 4]));
    assert!(!planned([scheme(Bits::B4, 32); 4]));
    assert!(!planned([usual, usual, usual, two_level]));
    // Wide heads with keys and values in int8.
    let case = Case::of(WIDE_HEAD_DIM, 4, 2, KvType::Int8, 8);
    let shape = LayersShape {
        heads: 4,
        delta: Some(hybrid_shape(2, 8)),
        ..shape
    };
    let on_device = Uploaded::new(&gpu, &case);
    let kept = Kept::new(&gpu, &stream, shape, &case);
    let w = [0, 1].map(|i| LayerWeights::new(&gpu, (shape, &case), [usual; 4], i));
    let layers = [0, 1].map(|i| w[i].layer(i, &on_device, &kept));
    assert!(LayersPlan::new(&gpu, &layers, None).unwrap().is_none());
}
