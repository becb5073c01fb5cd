//! The experts that rows are routed to.

use super::{GUARD, INT4, INT8, finish, gpu, guarded, is_sanitizing, kinds, pack, scheme};
use nq_cuda::{
    CodedExperts, Gpu, GroupedRows, MOST_TRELLIS_ROWS, Norm, RowsOut, Stack, Stream, StreamOptions,
    TrellisRoom, TrellisSizes, chosen, gated_width, stacked,
};
use nq_formats::trellis::{Code, TrellisScheme};
use nq_formats::{Bits, Exl3Scheme, QuantizedWeight, Weight, Zeros};
use nq_kernels::{Routes, reference};
use nq_model::{DType, Dims, Experts};
use nq_testkit::compare::nmse;
use nq_testkit::weights::{affine, dense, exl3, exl3_schemes, normal, trellis};

/// Numbers of rows that kernels are tested with.
const ROWS: [usize; 5] = [1, 2, 3, 16, 33];

/// Gate, up and down of all experts, of one packed kind.
struct Stacks {
    gate: Weight,
    up: Weight,
    down: Weight,
}

/// The values of a weight in EXL3's codes, a row of which is decoded with the 127 beside it: all of them at once take a
/// hundredth of the time. Another weight as it is.
pub(super) fn decoded(w: &Weight) -> Weight {
    match w {
        Weight::Quantized(QuantizedWeight::Exl3(w)) => Weight::Dense(w.to_f32().unwrap()),
        other => other.clone(),
    }
}

impl Stacks {
    fn new(hidden: usize, e: &Experts, make: impl Fn(usize, usize, u64) -> Weight) -> Self {
        Stacks {
            gate: make(stacked(e) * e.width, hidden, 1),
            up: make(stacked(e) * e.width, hidden, 2),
            down: make(stacked(e) * hidden, e.width, 3),
        }
    }

    /// The mixture's contribution to each row of `x`.
    fn expected(&self, x: &[f32], gain: &[f32], scores: &[f32], e: &Experts) -> Vec<f32> {
        let hidden = gain.len();
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(decoded);
        // Behind the others' score stands that of the shared expert, if there is one.
        let rows = scores.chunks(stacked(e));
        let routed: Vec<f32> = rows.clone().flat_map(|s| s[..e.count].to_vec()).collect();
        let routes = Routes::new(&routed, e);
        let shared: Vec<Option<f32>> = rows.map(|s| s.get(e.count).copied()).collect();
        let mut y = vec![0f32; x.len()];
        let (mut n, mut one) = (vec![0f32; hidden], vec![0f32; hidden]);
        let (mut g, mut u) = (vec![0f32; e.width], vec![0f32; e.width]);
        for (row, (x, y)) in x.chunks(hidden).zip(y.chunks_mut(hidden)).enumerate() {
            reference::rms_norm(x, gain, 1e-6, &mut n);
            let own = shared[row].map(|s| (e.count as u32, 1.0 / (1.0 + (-s).exp())));
            for (expert, weight) in routes.of(row).iter().copied().chain(own) {
                let part = |w: &Weight, rows: usize| {
                    let first = expert as usize * rows;
                    w.rows(first..first + rows)
                };
                reference::linear(&n, &part(&gate, e.width), &mut g).unwrap();
                reference::linear(&n, &part(&up, e.width), &mut u).unwrap();
                g.iter_mut()
                    .zip(&u)
                    .for_each(|(g, u)| *g = reference::silu(*g) * u);
                reference::linear(&g, &part(&down, hidden), &mut one).unwrap();
                y.iter_mut().zip(&one).for_each(|(y, v)| *y += weight * v);
            }
        }
        y
    }
}

fn check(gpu: &Gpu, stream: &Stream, stacks: &Stacks, hidden: usize, e: &Experts) {
    let name = format!("{} [{hidden}] {e:?}", stacks.gate.scheme_name());
    let gate_up = pack(gpu, &[&stacks.gate, &stacks.up], Stack::Interleave);
    let down = pack(gpu, &[&stacks.down], Stack::Concat);
    let most = ROWS[ROWS.len() - 1];
    let x = normal(most * hidden, 5);
    let gain: Vec<f32> = normal(hidden, 6).iter().map(|v| 1.0 + 0.2 * v).collect();
    let scores = normal(most * stacked(e), 7);
    let added = stacks.expected(&x, &gain, &scores, e);
    let gains = gpu.upload("a test", &gain).unwrap();
    let norm = Norm {
        gain: &gains,
        eps: 1e-6,
    };
    let on_device = gpu.upload("a test", &scores).unwrap();
    for m in ROWS {
        let mut last: Option<Vec<f32>> = None;
        for _ in 0..2 {
            let mut y = guarded(gpu, &x[..m * hidden]);
            let padded = e.width.next_multiple_of(256);
            let gated: Vec<f32> = (0..m * gated_width(e))
                .map(|i| if i % padded < e.width { GUARD } else { 0.0 })
                .collect();
            let mut gated = guarded(gpu, &gated);
            let on = (&y, Some(norm));
            stream
                .experts_up(&gate_up, on, &on_device, &mut gated, e, m)
                .unwrap();
            stream
                .experts_down(&down, &gated, &on_device, &mut y, e, m)
                .unwrap();
            finish(stream, &gated);
            let found = finish(stream, &y);
            let change: Vec<f32> = found.iter().zip(&x).map(|(y, x)| y - x).collect();
            let error = nmse(&change, &added[..m * hidden]);
            assert!(error < 1e-7, "{name} m {m}: {error:e}");
            assert!(
                last.is_none_or(|l| l == found),
                "{name} m {m}: not the same again"
            );
            last = Some(found);
        }
    }
}

/// Rows that are sorted by expert, in numbers for which blocks take 8, 16, 64 and 128 of them. Products of
/// FP16 with weights rounded to FP16, the first rounded once more: `products_of_many_rows` has the errors
/// of one.
fn check_many(gpu: &Gpu, stream: &Stream, stacks: &Stacks, hidden: usize, e: &Experts) {
    let name = format!("{} [{hidden}] {e:?}", stacks.gate.scheme_name());
    let gate_up = pack(gpu, &[&stacks.gate, &stacks.up], Stack::Interleave);
    let down = pack(gpu, &[&stacks.down], Stack::Concat);
    let mean = |rows: usize| rows * e.count / e.per_token;
    let most = mean(36);
    let x = normal(most * hidden, 5);
    let gain: Vec<f32> = normal(hidden, 6).iter().map(|v| 1.0 + 0.2 * v).collect();
    // Some experts are liked by all, some by nobody.
    let liking = |i: usize| (i % stacked(e)) as f32 / 4.0;
    let scores: Vec<f32> = (normal(most * stacked(e), 7).iter().enumerate())
        .map(|(i, v)| v + liking(i))
        .collect();
    let added = stacks.expected(&x, &gain, &scores, e);
    let gains = gpu.upload("a test", &gain).unwrap();
    let scores = gpu.upload("a test", &scores).unwrap();
    let mut rows = GroupedRows::new(gpu, *e, hidden, most).unwrap();
    let mut normed = gpu
        .zeros("a test", most * hidden.next_multiple_of(256))
        .unwrap();
    for m in [1, mean(4), mean(8), mean(20), most] {
        let mut last: Option<Vec<f32>> = None;
        for _ in 0..2 {
            let mut y = guarded(gpu, &x[..m * hidden]);
            let out = RowsOut {
                half: Some(&mut normed),
                ..RowsOut::default()
            };
            stream.rms_norm(&y, None, &gains, &out, m, 1e-6).unwrap();
            stream
                .group_rows(&normed, &scores, &mut rows, e, m, [&gate_up, &down])
                .unwrap();
            stream.grouped_up(&gate_up, &mut rows).unwrap();
            stream.grouped_down(&down, &mut rows, &mut y).unwrap();
            let found = finish(stream, &y);
            let change: Vec<f32> = found.iter().zip(&x).map(|(y, x)| y - x).collect();
            let error = nmse(&change, &added[..m * hidden]);
            // One row is a small sample; offsets are rounded too.
            let most = if name.contains("offset") { 3e-6 } else { 1e-6 };
            assert!(error < most, "{name} m {m}: {error:e}");
            assert!(
                last.is_none_or(|l| l == found),
                "{name} m {m}: not the same again"
            );
            last = Some(found);
        }
    }
}

fn experts(count: usize, per_token: usize, width: usize, normalized: bool) -> Experts {
    Experts {
        count,
        per_token,
        width,
        normalized,
        shared: 0,
    }
}

/// The same with an expert that all rows go through.
fn sharing(e: Experts) -> Experts {
    Experts {
        shared: e.width,
        ..e
    }
}

/// Runs a check on experts of every kind of weight.
fn with_every_kind(check: fn(&Gpu, &Stream, &Stacks, usize, &Experts)) {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    for (i, scheme) in kinds().into_iter().enumerate() {
        let e = experts(5, 1 + i % 3, 256, i % 2 == 0);
        let hidden = 320 + 16 * (i % 4);
        let make = |out, inp, seed| affine(scheme, out, inp, None, seed);
        for e in [e, sharing(e)]
            .into_iter()
            .take(1 + usize::from(i % 4 == 3))
        {
            check(&gpu, &stream, &Stacks::new(hidden, &e, make), hidden, &e);
        }
    }
    // Widths that are no whole spans of 256.
    for e in [experts(6, 3, 640, true), sharing(experts(4, 2, 192, true))] {
        let make = |out, inp, seed| affine(INT4, out, inp, None, seed);
        check(&gpu, &stream, &Stacks::new(336, &e, make), 336, &e);
    }
    for dtype in [DType::F16, DType::BF16] {
        let make = |out, inp, seed| dense(dtype, out, inp, seed);
        for e in [experts(3, 2, 512, true), sharing(experts(4, 2, 256, true))] {
            check(&gpu, &stream, &Stacks::new(272, &e, make), 272, &e);
        }
    }
}

#[test]
fn experts_of_rows() {
    with_every_kind(check);
}

#[test]
fn experts_of_many_rows() {
    with_every_kind(check_many);
}

/// Experts in trellis codes: of steps and of units that do not fill words, in blocks of several strips or with several for a
/// strip, and with an expert that all rows go through.
#[test]
fn experts_in_trellis_codes() {
    let Some(gpu) = gpu() else { return };
    for (code, bits, hidden, e) in [
        (Code::Octagon, 3.0, 512, experts(5, 2, 256, true)),
        (Code::Octagon, 2.5, 256, sharing(experts(5, 3, 256, false))),
        (Code::Octagon, 4.0, 768, sharing(experts(9, 1, 512, true))),
        (Code::Sum, 3.0, 256, experts(4, 4, 768, true)),
        (Code::Sum, 6.0, 512, experts(40, 10, 256, true)),
        (Code::Octagon, 3.0, 2048, experts(12, 8, 768, true)),
    ] {
        if is_sanitizing() && hidden == 2048 {
            continue;
        }
        let scheme = TrellisScheme::of_bits(code, bits).unwrap();
        // Gate and up have the same scales of inputs.
        let make = |out, inputs, seed| trellis(scheme, Dims::new(out, inputs), seed, inputs as u64);
        check_coded(&gpu, &Stacks::new(hidden, &e, make), hidden, &e);
    }
}

/// Experts in EXL3's codes, each with scales of inputs of its own: gate, up and down of other codes and bits.
#[test]
fn experts_in_exl3() {
    let Some(gpu) = gpu() else { return };
    let schemes: Vec<Exl3Scheme> = exl3_schemes().collect();
    let of_all = (0..schemes.len()).map(|nth| (nth, 256, experts(3, 2, 256, nth % 2 == 0)));
    for (nth, hidden, e) in of_all.chain([
        (2, 512, sharing(experts(5, 3, 256, false))),
        (9, 768, sharing(experts(9, 1, 512, true))),
        (16, 256, experts(4, 4, 768, true)),
        (4, 512, experts(40, 10, 256, true)),
        (9, 2048, experts(12, 8, 768, true)),
    ]) {
        if is_sanitizing() && (hidden > 512 || nth % 5 > 0) {
            continue;
        }
        let make = |out: usize, inputs, seed: u64| {
            let scheme = schemes[(nth + 5 * seed as usize) % schemes.len()];
            let dims = Dims::new(out / stacked(&e), inputs);
            let one = |i: usize| exl3(scheme, dims, seed + 10 * i as u64, seed + 10 * i as u64);
            Weight::stack(&(0..stacked(&e)).map(one).collect::<Vec<_>>()).unwrap()
        };
        check_coded(&gpu, &Stacks::new(hidden, &e, make), hidden, &e);
    }
}

/// Experts in codes for whose products a stream has memory: of few rows and of many.
fn check_coded(gpu: &Gpu, stacks: &Stacks, hidden: usize, e: &Experts) {
    let most = 36 * e.count / e.per_token;
    let sizes = TrellisSizes {
        rows: MOST_TRELLIS_ROWS,
        many: MOST_TRELLIS_ROWS,
        inputs: hidden,
        weights: 0,
        gate: 0,
        experts: CodedExperts {
            few: ROWS[ROWS.len() - 1] * chosen(e),
            sorted: most * chosen(e),
            experts: stacked(e),
            hidden,
            width: e.width,
            exl3: stacks.gate.scheme_name().starts_with("exl3"),
        },
    };
    let options = StreamOptions {
        room: Some(TrellisRoom::new(gpu, sizes).unwrap()),
        ..StreamOptions::default()
    };
    let stream = gpu.stream_with(options).unwrap();
    check(gpu, &stream, stacks, hidden, e);
    check_many(gpu, &stream, stacks, hidden, e);
}

/// Widths of Qwen3-30B-A3B and of 480B, with fewer experts.
#[test]
fn experts_in_real_shapes() {
    let Some(gpu) = gpu() else { return };
    if is_sanitizing() {
        return;
    }
    let stream = gpu.stream().unwrap();
    for (hidden, e, scheme) in [
        (2048, experts(12, 8, 768, true), INT4),
        (2048, experts(12, 8, 768, true), INT8),
        (
            6144,
            experts(3, 2, 2560, true),
            scheme(Bits::B4, 128, Zeros::None),
        ),
    ] {
        let make = |out, inp, seed| affine(scheme, out, inp, None, seed);
        let stacks = Stacks::new(hidden, &e, make);
        check(&gpu, &stream, &stacks, hidden, &e);
        // The reference takes long for more.
        if hidden == 2048 && scheme.bits == Bits::B4 {
            check_many(&gpu, &stream, &stacks, hidden, &e);
        }
    }
}

/// Of equal scores, those with lower numbers are chosen; NaN scores make NaN outputs.
#[test]
fn ties_and_scores_that_are_no_numbers() {
    let Some(gpu) = gpu() else { return };
    let stream = gpu.stream().unwrap();
    for e in [experts(40, 3, 256, true), experts(500, 10, 32, true)] {
        check_ties(&gpu, &stream, &e);
    }
}

fn check_ties(gpu: &Gpu, stream: &Stream, e: &Experts) {
    let hidden = 64;
    let make = |out, inp, seed| dense(DType::F16, out, inp, seed);
    let stacks = Stacks::new(hidden, e, make);
    let gate_up = pack(gpu, &[&stacks.gate, &stacks.up], Stack::Interleave);
    let down = pack(gpu, &[&stacks.down], Stack::Concat);
    let (x, gain) = (normal(hidden, 5), vec![1.0; hidden]);
    let gains = gpu.upload("a test", &gain).unwrap();
    let mut rows = GroupedRows::new(gpu, *e, hidden, 1).unwrap();
    let mut normed = gpu.zeros("a test", 256).unwrap();
    let mut run = |scores: &[f32], grouped: bool| {
        let norm = Norm {
            gain: &gains,
            eps: 1e-6,
        };
        let scores = gpu.upload("a test", scores).unwrap();
        let mut y = guarded(gpu, &x);
        if grouped {
            let out = RowsOut {
                half: Some(&mut normed),
                ..RowsOut::default()
            };
            stream.rms_norm(&y, None, &gains, &out, 1, 1e-6).unwrap();
            stream
                .group_rows(&normed, &scores, &mut rows, e, 1, [&gate_up, &down])
                .unwrap();
            stream.grouped_up(&gate_up, &mut rows).unwrap();
            stream.grouped_down(&down, &mut rows, &mut y).unwrap();
            return finish(stream, &y);
        }
        let mut gated = guarded(gpu, &vec![0.0; gated_width(e)]);
        stream
            .experts_up(&gate_up, (&y, Some(norm)), &scores, &mut gated, e, 1)
            .unwrap();
        stream
            .experts_down(&down, &gated, &scores, &mut y, e, 1)
            .unwrap();
        finish(stream, &y)
    };
    let mut scores = vec![-1.0; e.count];
    // One more than are chosen, in several warps.
    for equal in (0..=e.per_token).map(|i| e.count - 1 - i * 3) {
        scores[equal] = 0.5;
    }
    let added = stacks.expected(&x, &gain, &scores, e);
    for (grouped, most) in [(false, 1e-7), (true, 1e-6)] {
        let found = run(&scores, grouped);
        let change: Vec<f32> = found.iter().zip(&x).map(|(y, x)| y - x).collect();
        let error = nmse(&change, &added);
        assert!(error < most, "grouped {grouped}: {error:e}");
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut scores = normal(e.count, 3);
        scores[11] = bad;
        assert!(run(&scores, false).iter().all(|v| v.is_nan()), "{bad}");
    }
}
