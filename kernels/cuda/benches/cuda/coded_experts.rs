//! The experts of a layer of Qwen3-30B-A3B in codes that kernels read as they are, beside INT4.

use super::products::{EXPERTS, scores_from};
use super::timing::{Scheme, Timing};
use super::trellis::{exl3_weight, weight};
use nq_cuda::{
    CodedExperts, DeviceLinear, GroupedRows, Norm, Stack, StreamOptions, TrellisRoom, TrellisSizes,
    Uploader, gated_width,
};
use nq_formats::trellis::{Code, TrellisScheme};
use nq_formats::{Exl3Code, Exl3Scheme, Weight};
use nq_kernels::Result;

const HIDDEN: usize = 2048;
/// Most rows.
const MANY: usize = 2048;
/// Turns after which the same experts are chosen again: by then the cache has lost them.
const TURNS: usize = 16;

/// Gate and up of all experts, and down, as `make` makes them of the number of experts, the outputs of one and the inputs.
fn halves(t: &Timing, make: impl Fn(usize, usize, usize) -> Weight) -> Result<[DeviceLinear; 2]> {
    let (count, width) = (EXPERTS.count, EXPERTS.width);
    let mut uploader = Uploader::new(&t.gpu)?;
    let half = make(count, width, HIDDEN);
    let up = uploader.pack(&[&half, &half], Stack::Interleave, false)?;
    let down = uploader.pack(&[&make(count, HIDDEN, width)], Stack::Concat, false)?;
    uploader.finish()?;
    Ok([up, down])
}

/// A stack of `count` times the same expert in EXL3's codes.
fn exl3_stack(scheme: Exl3Scheme, [count, out, inputs]: [usize; 3]) -> Weight {
    let one = exl3_weight(scheme, out, inputs);
    Weight::stack(&vec![one; count]).expect("experts of one shape")
}

/// Gate and up, then down, of few rows, each of which reads its experts, and of rows that are sorted by expert.
pub(crate) fn coded_experts(t: &mut Timing) -> Result<()> {
    let e = EXPERTS;
    let sizes = TrellisSizes {
        rows: 64,
        many: 64,
        inputs: HIDDEN,
        weights: 0,
        gate: 0,
        experts: CodedExperts {
            few: 64 * e.per_token,
            sorted: MANY * e.per_token,
            experts: e.count,
            hidden: HIDDEN,
            width: e.width,
            exl3: true,
        },
    };
    let options = StreamOptions {
        room: Some(TrellisRoom::new(&t.gpu, sizes)?),
        ..StreamOptions::default()
    };
    let stream = t.gpu.stream_with(options)?;
    let plain = std::mem::replace(&mut t.stream, stream);
    let octagon = TrellisScheme::of_bits(Code::Octagon, 4.0).expect("a scheme of this width");
    let exl3 = |code| Exl3Scheme::new(code, 8).expect("a scheme of this width");
    let all = [
        (
            "int4 g128".to_string(),
            halves(t, |n, out, inputs| Scheme::Int4.weight(n * out, inputs))?,
        ),
        (
            octagon.to_string(),
            halves(t, |n, out, inputs| weight(octagon, n * out, inputs))?,
        ),
        (
            exl3(Exl3Code::Mcg).to_string(),
            halves(t, |n, out, inputs| {
                exl3_stack(exl3(Exl3Code::Mcg), [n, out, inputs])
            })?,
        ),
        (
            exl3(Exl3Code::Mul1).to_string(),
            halves(t, |n, out, inputs| {
                exl3_stack(exl3(Exl3Code::Mul1), [n, out, inputs])
            })?,
        ),
    ];
    let gain = t.gpu.upload("a benchmark", &vec![1f32; HIDDEN])?;
    for (name, [up, down]) in &all {
        for m in [1, 2, 4, 16] {
            let x = t.gpu.upload("a benchmark", &vec![0.5f32; m * HIDDEN])?;
            let mut y = t.gpu.zeros("a benchmark", m * HIDDEN)?;
            let mut gated = t.gpu.zeros("a benchmark", m * gated_width(&e))?;
            let scores = (0..TURNS).map(|turn| scores_from(t, turn * m, m));
            let scores = scores.collect::<Result<Vec<_>>>()?;
            let read = |w: &DeviceLinear| m * w.bytes() / e.count * e.per_token;
            let bytes = read(up) + read(down);
            t.chained(&format!("{m} rows {name}"), bytes, |turn| {
                let norm = Norm {
                    gain: &gain,
                    eps: 1e-6,
                };
                let scores = &scores[turn % TURNS];
                t.stream
                    .experts_up(up, (&x, Some(norm)), scores, &mut gated, &e, m)?;
                t.stream.experts_down(down, &gated, scores, &mut y, &e, m)
            })?;
        }
        for m in [64, 512, MANY] {
            let half = t.gpu.upload("a benchmark", &vec![0x3800u16; m * HIDDEN])?;
            let mut y = t.gpu.zeros("a benchmark", m * HIDDEN)?;
            let scores = scores_from(t, 0, m)?;
            let mut rows = GroupedRows::new(&t.gpu, e, HIDDEN, m)?;
            let used = e.count.min(m * e.per_token);
            let bytes = (up.bytes() + down.bytes()) / e.count * used;
            t.alone(&format!("{m} rows {name}, sorted"), bytes, |_| {
                t.stream
                    .group_rows(&half, &scores, &mut rows, &e, m, [up, down])?;
                t.stream.grouped_up(up, &mut rows)?;
                t.stream.grouped_down(down, &mut rows, &mut y)
            })?;
        }
    }
    t.stream = plain;
    Ok(())
}
