//! Benches of products with packed weights.

use super::timing::{MODELS, SCHEMES, Scheme, Timing, VOCAB};
use nq_cuda::{
    Buffer, Columns, DeviceLinear, GemmOutput, GemvOutput, GroupedRows, Norm, PartialSums,
    StepOutput, best_len, gated_width,
};
use nq_kernels::Result;
use nq_model::Experts;

/// Buffers of a product of `m` rows.
struct Operands {
    x: Buffer<f32>,
    half: Buffer<u16>,
    gain: Buffer<f32>,
    y: Buffer<f32>,
    half_out: Buffer<u16>,
}

impl Operands {
    fn new(t: &Timing, m: usize, out: usize, inp: usize) -> Result<Self> {
        let what = "a benchmark";
        Ok(Operands {
            x: t.gpu.upload(what, &vec![0.5; m * inp])?,
            half: t
                .gpu
                .upload(what, &vec![0x3800; m * inp.next_multiple_of(256)])?,
            gain: t.gpu.upload(what, &vec![1.0; inp])?,
            y: t.gpu.zeros(what, m * out)?,
            half_out: t.gpu.zeros(what, m * out.next_multiple_of(256))?,
        })
    }
}

/// Runs `each` for every product of a layer, in every model and scheme.
fn of_layers(
    t: &Timing,
    schemes: &[(Scheme, &str)],
    mut each: impl FnMut(&Timing, &str, &str, &[DeviceLinear]) -> Result<()>,
) -> Result<()> {
    for model in MODELS {
        for &(scheme, name) in schemes {
            for (product, out, inp) in model.products() {
                let weights = t.weights(scheme, out, inp)?;
                let what = format!("{} {product} {out} x {inp} {name}", model.name);
                each(t, &what, product, &weights)?;
            }
        }
    }
    Ok(())
}

/// The output of a product in a step, with a normalized input if the step has one.
fn step_output<'a>(product: &str, gain: &'a Buffer<f32>, y: &'a mut Buffer<f32>) -> GemvOutput<'a> {
    let norm = Norm { gain, eps: 1e-6 };
    match product {
        "qkv" => GemvOutput::Store(Some(norm), y),
        "gate_up" => GemvOutput::Silu(Some(norm), y),
        _ => GemvOutput::Add(y),
    }
}

/// Of Qwen3-30B-A3B.
pub(crate) const EXPERTS: Experts = Experts {
    count: 128,
    per_token: 8,
    width: 768,
    normalized: true,
    shared: 0,
};

/// Scores of `m` rows that choose different experts.
fn scores(t: &Timing, m: usize) -> Result<Buffer<f32>> {
    scores_from(t, 0, m)
}

/// Those of rows that choose others than the rows before `first`.
pub(crate) fn scores_from(t: &Timing, first: usize, m: usize) -> Result<Buffer<f32>> {
    let scores: Vec<f32> = (first * EXPERTS.count..(first + m) * EXPERTS.count)
        .map(|i| (i * 7919 % 1009) as f32 / 500.0)
        .collect();
    t.gpu.upload("a benchmark", &scores)
}

/// The experts of many rows, grouped: sorting the rows, gate and up, down.
pub(crate) fn grouped(t: &mut Timing) -> Result<()> {
    let (e, hidden) = (EXPERTS, 2048);
    for (scheme, name) in SCHEMES {
        let up = t.weights(scheme, 2 * e.count * e.width, hidden)?;
        let down = t.weights(scheme, e.count * hidden, e.width)?;
        for m in [16, 32, 64, 128, 512] {
            let mut b = Operands::new(t, m, hidden, hidden)?;
            let scores = scores(t, m)?;
            let mut rows = GroupedRows::new(&t.gpu, e, hidden, m)?;
            let read = |w: &DeviceLinear| w.bytes() / e.count * e.count.min(m * e.per_token);
            let moved = 2 * m * (1 + e.per_token) * hidden;
            t.alone(&format!("group {m} rows {name}"), moved, |_| {
                t.stream
                    .group_rows(&b.half, &scores, &mut rows, &e, m, [&up[0], &down[0]])
            })?;
            t.alone(&format!("up of {m} rows {name}"), read(&up[0]), |turn| {
                t.stream.grouped_up(&up[turn % up.len()], &mut rows)
            })?;
            t.alone(
                &format!("down of {m} rows {name}"),
                read(&down[0]),
                |turn| {
                    let w = &down[turn % down.len()];
                    t.stream.grouped_down(w, &mut rows, &mut b.y)
                },
            )?;
        }
    }
    Ok(())
}

/// The experts of few rows: gate and up, then down, of 8 in 128 experts.
pub(crate) fn experts(t: &mut Timing) -> Result<()> {
    let (e, hidden) = (EXPERTS, 2048);
    for (scheme, name) in SCHEMES {
        let up = t.weights(scheme, 2 * e.count * e.width, hidden)?;
        let down = t.weights(scheme, e.count * hidden, e.width)?;
        for m in [1, 4, 16, 32, 64] {
            let mut b = Operands::new(t, m, hidden, hidden)?;
            let scores = scores(t, m)?;
            let mut gated = t.gpu.zeros("a benchmark", m * gated_width(&e))?;
            let read = |w: &DeviceLinear| m * w.bytes() / e.count * e.per_token;
            t.chained(&format!("up of {m} rows {name}"), read(&up[0]), |turn| {
                let norm = Norm {
                    gain: &b.gain,
                    eps: 1e-6,
                };
                let w = &up[turn % up.len()];
                t.stream
                    .experts_up(w, (&b.x, Some(norm)), &scores, &mut gated, &e, m)
            })?;
            t.chained(
                &format!("down of {m} rows {name}"),
                read(&down[0]),
                |turn| {
                    let w = &down[turn % down.len()];
                    t.stream.experts_down(w, &gated, &scores, &mut b.y, &e, m)
                },
            )?;
        }
    }
    Ok(())
}

pub(crate) fn gemv(t: &mut Timing) -> Result<()> {
    of_layers(t, &SCHEMES, |t, what, product, weights| {
        let (out, inp) = (weights[0].rows(), weights[0].inputs());
        let mut b = Operands::new(t, 1, out, inp)?;
        t.chained(what, weights[0].bytes(), |turn| {
            let w = &weights[turn % weights.len()];
            t.stream
                .gemv(w, &b.x, step_output(product, &b.gain, &mut b.y), false)
        })
    })?;
    for model in MODELS {
        let weights = t.weights(Scheme::Int8, VOCAB, model.hidden)?;
        let w = &weights[0];
        let mut b = Operands::new(t, 1, VOCAB, model.hidden)?;
        let blocks = best_len(&t.gpu, w, 1)?;
        let mut best = t.gpu.zeros("a benchmark", blocks)?;
        let what = format!("{} head {VOCAB} x {} int8", model.name, model.hidden);
        t.chained(&what, w.bytes(), |_| {
            let norm = Norm {
                gain: &b.gain,
                eps: 1e-6,
            };
            t.stream.gemv(
                w,
                &b.x,
                GemvOutput::Head(Some(norm), &mut b.y, &mut best),
                false,
            )
        })?;
    }
    Ok(())
}

pub(crate) fn gemv_batch(t: &mut Timing) -> Result<()> {
    of_layers(t, &SCHEMES, |t, what, product, weights| {
        for m in [2, 4, 8, 16] {
            let (out, inp) = (weights[0].rows(), weights[0].inputs());
            let mut b = Operands::new(t, m, out, inp)?;
            let mut columns = Columns::new(&t.gpu, m, inp)?;
            t.chained(&format!("{what}, {m} rows"), weights[0].bytes(), |turn| {
                let w = &weights[turn % weights.len()];
                let output = step_output(product, &b.gain, &mut b.y);
                t.stream.gemv_batch(w, &b.x, output, &mut columns, m, false)
            })?;
        }
        Ok(())
    })
}

/// Products and norms of wide steps.
pub(crate) fn gemm_step(t: &mut Timing) -> Result<()> {
    if !t.gpu.takes_wide_steps() {
        println!("  skipped: not on {}", t.gpu.info());
        return Ok(());
    }
    of_layers(t, &SCHEMES, |t, what, product, weights| {
        for m in [32, 64] {
            let (out, inp) = (weights[0].rows(), weights[0].inputs());
            let mut b = Operands::new(t, m, out, inp)?;
            let mut sums = PartialSums::new(&t.gpu, m, out)?;
            t.chained(&format!("{what}, {m} rows"), weights[0].bytes(), |turn| {
                let w = &weights[turn % weights.len()];
                let output = match product {
                    "qkv" => StepOutput::Store(&mut b.y),
                    "gate_up" => StepOutput::Silu(&mut b.half_out),
                    _ => StepOutput::Parts(&mut sums),
                };
                t.stream.gemm_step(w, &b.half, output, m)
            })?;
            if product != "down" {
                continue;
            }
            let mut x = t.gpu.zeros("a benchmark", m * out)?;
            let gain = t.gpu.upload("a benchmark", &vec![1.0; out])?;
            let bytes = 4 * m * out * (sums.parts() + 2) + 2 * m * out;
            t.chained(&format!("norm behind {what}, {m} rows"), bytes, |_| {
                let norm = Norm {
                    gain: &gain,
                    eps: 1e-6,
                };
                let half = &mut b.half_out;
                t.stream
                    .norm_step(&mut x, Some(&sums), norm, half, m, false)
            })?;
        }
        Ok(())
    })
}

pub(crate) fn gemm(t: &mut Timing) -> Result<()> {
    of_layers(t, &SCHEMES, |t, what, product, weights| {
        for m in [16, 64, 512] {
            let (out, inp) = (weights[0].rows(), weights[0].inputs());
            let mut b = Operands::new(t, m, out, inp)?;
            let bytes = weights[0].bytes() + 2 * m * inp + 4 * m * out;
            t.alone(&format!("{what}, {m} rows"), bytes, |turn| {
                let w = &weights[turn % weights.len()];
                let output = match product {
                    "qkv" => GemmOutput::Store(&mut b.y),
                    "gate_up" => GemmOutput::Silu(&mut b.half_out),
                    _ => GemmOutput::Add(&mut b.y),
                };
                t.stream.gemm(w, &b.half, output, m)
            })?;
        }
        Ok(())
    })
}

pub(crate) fn linear_reference(t: &mut Timing) -> Result<()> {
    of_layers(t, &SCHEMES[..1], |t, what, _, weights| {
        let w = &weights[0];
        let mut b = Operands::new(t, 8, w.rows(), w.inputs())?;
        t.alone(&format!("{what}, 8 rows"), w.bytes(), |_| {
            t.stream.linear_reference(w, &b.x, &mut b.y, 8, false)
        })
    })
}
