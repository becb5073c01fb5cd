//! Benches of operations on rows of activations, of the end of a step, and of memory.

use super::timing::{MODELS, Scheme, Timing, VOCAB};
use nq_cuda::{
    Adjustments, Advance, Candidates, Checked, Logprobs, Places, RowsOut, Sampling, Step,
    StepBounds,
};
use nq_kernels::Result;

/// The memory bandwidth with which all others are compared.
pub(crate) fn read_all(t: &mut Timing) -> Result<()> {
    for bytes in [1usize << 30, 1 << 32] {
        let rate = t.gpu.read_bandwidth(bytes)?;
        println!("  {:.1} GB: {:.3} TB/s", bytes as f64 / 1e9, rate / 1e12);
    }
    Ok(())
}

fn bounds(slots: usize) -> StepBounds {
    let places = Places {
        positions: 4096,
        slots,
        images: 0,
    };
    StepBounds {
        places,
        tokens: VOCAB,
    }
}

pub(crate) fn rows(t: &mut Timing) -> Result<()> {
    const M: usize = 512;
    let mut value = t.gpu.zeros::<Step>("a benchmark", 4)?;
    t.chained("put, a step", 16, |turn| {
        t.stream.put(&mut value, turn % 4, &[Step::default()])
    })?;
    for model in MODELS {
        let h = model.hidden;
        let embedding = &t.weights(Scheme::Int8, VOCAB, h)?[0];
        let mut x = t.gpu.zeros("a benchmark", M * h)?;
        let ids: Vec<u32> = (0..M as u32).map(|i| i * 293 % VOCAB as u32).collect();
        let ids = Checked::upload(&t.gpu, "a benchmark", &ids, VOCAB)?;
        let what = |op: &str, m: usize| format!("{} {op} {m} rows", model.name);
        t.alone(&what("embed", M), 5 * M * h, |_| {
            t.stream.embed(embedding, &ids, &mut x, M)
        })?;
        let steps = Checked::new(&t.gpu, "a benchmark", 64, Step::default(), bounds(1))?;
        for m in [1, 64] {
            t.chained(&what("embed_step", m), 5 * m * h, |_| {
                t.stream.embed_step(embedding, &steps, &mut x, m)
            })?;
        }
        let gain = t.gpu.upload("a benchmark", &vec![1.0; h])?;
        let mut half = t.gpu.zeros("a benchmark", M * h)?;
        t.alone(&what("rms_norm", M), 6 * M * h, |_| {
            let half = Some(&mut half);
            let out = RowsOut { full: None, half };
            t.stream.rms_norm(&x, None, &gain, &out, M, 1e-6)
        })?;
        let both = t.gpu.zeros("a benchmark", 2 * M * model.mlp)?;
        let mut half = t.gpu.zeros("a benchmark", M * model.mlp)?;
        t.alone(&what("silu_mul", M), 10 * M * model.mlp, |_| {
            let half = Some(&mut half);
            let out = RowsOut { full: None, half };
            t.stream.silu_mul(&both, &out, M, model.mlp)
        })?;
    }
    Ok(())
}

/// The end of a step of 1 to 64 sequences: the best token, and a token drawn from lists.
pub(crate) fn sampling(t: &mut Timing) -> Result<()> {
    const RING: usize = 64;
    const BLOCKS: usize = 128;
    let h = MODELS[1].hidden;
    let embedding = &t.weights(Scheme::Int8, VOCAB, h)?[0];
    for m in [1, 16, 64] {
        let logits: Vec<f32> = (0..m * VOCAB)
            .map(|i| (i * 7919 % 10_007) as f32 / 1000.0)
            .collect();
        let best_of = |i: usize| {
            let (row, block) = (i / BLOCKS, i % BLOCKS);
            let range = block * VOCAB / BLOCKS..(block + 1) * VOCAB / BLOCKS;
            let logit = |&id: &usize| logits[row * VOCAB + id];
            let id = range
                .max_by(|a, b| logit(a).total_cmp(&logit(b)))
                .unwrap_or(0);
            [logit(&id), f32::from_bits(id as u32)]
        };
        let best: Vec<[f32; 2]> = (0..m * BLOCKS).map(best_of).collect();
        let best = t.gpu.upload("a benchmark", &best)?;
        let logits = t.gpu.upload("a benchmark", &logits)?;
        let mut adjust = Adjustments::new(&t.gpu, VOCAB, m)?;
        let mut step = Checked::new(&t.gpu, "a benchmark", m, Step::default(), bounds(2))?;
        let mut ring = t.gpu.mapped("a benchmark", m * RING, 0)?;
        let mut logprobs = t.gpu.mapped("a benchmark", m * RING, Logprobs::default())?;
        let mut x = t.gpu.zeros("a benchmark", m * h)?;
        for (name, temperature) in [("best", 0.0), ("nucleus", 0.7)] {
            let how = Sampling {
                temperature,
                top_p: 0.8,
                top_k: 20,
                repetition: 1.0,
                ..Sampling::default()
            };
            let sampling = t.gpu.upload("a benchmark", &vec![how; m])?;
            let Some(mut lists) = Candidates::new(&t.gpu, VOCAB, m)? else {
                return Ok(());
            };
            let all = 4 * m * VOCAB;
            if temperature > 0.0 {
                t.chained(&format!("candidates {m} rows"), all, |_| {
                    let to = &mut lists;
                    (t.stream).candidates(&logits, &best, BLOCKS, &sampling, &adjust, to, VOCAB, m)
                })?;
            }
            t.alone(&format!("{name}: lists and advance, {m} rows"), 0, |_| {
                if temperature > 0.0 {
                    let to = &mut lists;
                    (t.stream)
                        .candidates(&logits, &best, BLOCKS, &sampling, &adjust, to, VOCAB, m)?;
                }
                t.stream.advance(Advance {
                    m,
                    logits: &logits,
                    best: &best,
                    blocks: BLOCKS,
                    candidates: (temperature > 0.0).then_some(&lists),
                    sampling: &sampling,
                    adjust: &mut adjust,
                    step: &mut step,
                    ring: &mut ring,
                    logprobs: &mut logprobs,
                    ring_len: RING,
                    ids: None,
                    embedding,
                    x: &mut x,
                    idle: 1,
                })
            })?;
        }
    }
    Ok(())
}
