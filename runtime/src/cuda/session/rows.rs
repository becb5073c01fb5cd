//! A forward over the rows of many tokens.

use super::{CudaSession, FullRows, LOGIT_ROWS, ManyRows, padded, product};
use crate::engine::{Chunk, LinearKind, Observer};
use crate::error::Result;
use nq_kernels::KernelSet;
use nq_kernels::cuda::{
    Buffer, GemmOutput, HEAD_DIM, Row, RowsOut, SequenceRows, Stream, operand_index,
};

impl CudaSession {
    /// Runs the layers over the chunks' rows: `many.x` becomes the residual stream.
    fn run_layers(
        &mut self,
        sequences: &[SequenceRows],
        m: usize,
        observer: &mut Option<&mut dyn Observer>,
    ) -> Result<()> {
        let Self {
            stream,
            model,
            cache,
            cos_sin,
            many,
            ..
        } = self;
        let c = &model.config;
        let eps = c.rms_norm_eps;
        let heads = c.num_attention_heads;
        let plain = model.kernels == KernelSet::Reference;
        stream.embed(model.embedding(), &many.tokens, &mut many.x, m)?;
        let [qkv_in, o_in, mlp_in, down_in] = LinearKind::INPUTS;
        for (index, layer) in model.layers.iter().enumerate() {
            let settings = model.heads(index, cos_sin);
            let cache = &mut cache[index];
            let norm = |gain, many: &mut ManyRows| {
                let out = RowsOut {
                    full: many.full.as_mut().map(|f| &mut f.normed),
                    half: Some(&mut many.normed),
                };
                let key = ("norm", "fused", (m, c.hidden_size));
                stream.timed(key, 0, || {
                    stream.rms_norm(&many.x, None, gain, &out, m, eps)
                })
            };
            norm(&layer.input_norm, many)?;
            show(
                stream,
                observer,
                index,
                qkv_in,
                many.full.as_ref().map(|f| &f.normed),
                m * c.hidden_size,
            )?;
            match &many.full {
                Some(full) if plain => {
                    stream.linear_reference(&layer.qkv, &full.normed, &mut many.qkv, m, false)?;
                }
                _ => product(stream, "qkv", &layer.qkv, || {
                    let out = GemmOutput::Store(&mut many.qkv);
                    stream.gemm(&layer.qkv, &many.normed, out, m)
                })?,
            }
            stream.timed(("append", "fused", (heads, HEAD_DIM)), 0, || {
                stream.append(&mut many.qkv, &many.rows, &settings, cache, m)
            })?;
            match &mut many.full {
                Some(full) if plain => {
                    stream.attention_reference(
                        &many.qkv,
                        &many.rows,
                        heads,
                        cache,
                        &mut full.attended,
                        m,
                    )?;
                }
                _ => {
                    let key = ("attention", "fused", (heads, HEAD_DIM));
                    stream.timed(key, 0, || {
                        sequences.iter().try_for_each(|&s| {
                            stream.attention_prefill(&many.qkv, s, heads, cache, &mut many.attended)
                        })
                    })?;
                }
            }
            match plain {
                true => {
                    let full = many.full.as_ref();
                    show(
                        stream,
                        observer,
                        index,
                        o_in,
                        full.map(|f| &f.attended),
                        m * c.q_dim(),
                    )?;
                }
                false => show_half(stream, observer, index, o_in, &many.attended, m, c.q_dim())?,
            }
            match &many.full {
                Some(full) if plain => {
                    stream.linear_reference(&layer.o, &full.attended, &mut many.x, m, true)?;
                }
                _ => product(stream, "o", &layer.o, || {
                    stream.gemm(&layer.o, &many.attended, GemmOutput::Add(&mut many.x), m)
                })?,
            }

            norm(&layer.post_attention_norm, many)?;
            show(
                stream,
                observer,
                index,
                mlp_in,
                many.full.as_ref().map(|f| &f.normed),
                m * c.hidden_size,
            )?;
            match &mut many.full {
                None => product(stream, "gate_up", &layer.gate_up, || {
                    let out = GemmOutput::Silu(&mut many.mlp);
                    stream.gemm(&layer.gate_up, &many.normed, out, m)
                })?,
                Some(full) => {
                    match plain {
                        true => stream.linear_reference(
                            &layer.gate_up,
                            &full.normed,
                            &mut full.gate_up,
                            m,
                            false,
                        )?,
                        false => stream.gemm(
                            &layer.gate_up,
                            &many.normed,
                            GemmOutput::Store(&mut full.gate_up),
                            m,
                        )?,
                    }
                    let out = RowsOut {
                        full: Some(&mut full.mlp),
                        half: Some(&mut many.mlp),
                    };
                    stream.silu_mul(&full.gate_up, &out, m, c.intermediate_size)?;
                }
            }
            show(
                stream,
                observer,
                index,
                down_in,
                many.full.as_ref().map(|f| &f.mlp),
                m * c.intermediate_size,
            )?;
            match &many.full {
                Some(full) if plain => {
                    stream.linear_reference(&layer.down, &full.mlp, &mut many.x, m, true)?;
                }
                _ => product(stream, "down", &layer.down, || {
                    stream.gemm(&layer.down, &many.mlp, GemmOutput::Add(&mut many.x), m)
                })?,
            }
            if let Some(observer) = observer {
                observer.layer_output(index, &fetch(stream, &many.x, m * c.hidden_size)?);
            }
        }
        Ok(())
    }

    /// Final norm and head over the listed rows of `many.x`.
    fn run_head(&mut self, rows: &[i32], observer: &mut Option<&mut dyn Observer>) -> Result<()> {
        let Self {
            stream,
            model,
            many,
            logits_host,
            logits,
            ..
        } = self;
        let c = &model.config;
        let (h, vocab, eps) = (c.hidden_size, c.vocab_size, c.rms_norm_eps);
        let plain = model.kernels == KernelSet::Reference;
        let mut seen = Vec::new();
        for rows in rows.chunks(LOGIT_ROWS) {
            let m = rows.len();
            many.wanted.write(0, rows)?;
            let out = RowsOut {
                full: many.full.as_mut().map(|f| &mut f.normed),
                half: Some(&mut many.head_in),
            };
            stream.rms_norm(&many.x, Some(&many.wanted), &model.norm, &out, m, eps)?;
            if let (Some(_), Some(full)) = (&observer, &many.full) {
                seen.extend(fetch(stream, &full.normed, m * h)?);
            }
            match &many.full {
                Some(full) if plain => {
                    stream.linear_reference(
                        &model.head,
                        &full.normed,
                        &mut many.logits,
                        m,
                        false,
                    )?;
                }
                _ => product(stream, "head", &model.head, || {
                    let out = GemmOutput::Store(&mut many.logits);
                    stream.gemm(&model.head, &many.head_in, out, m)
                })?,
            }
            stream.read(&many.logits, 0, logits_host, m * vocab)?;
            stream.synchronize()?;
            logits.extend_from_slice(&logits_host.values()[..m * vocab]);
        }
        if let Some(observer) = observer {
            observer.head_input(&seen);
        }
        Ok(())
    }

    /// The logits of all chunks, over rows.
    pub(super) fn forward_many(
        &mut self,
        chunks: &[Chunk<'_>],
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<()> {
        if observer.is_some() && self.many.full.is_none() {
            self.many.full = Some(FullRows::new(&self.model, self.spec.max_rows.max(1))?);
        }
        let mut sequences = Vec::with_capacity(chunks.len());
        let (mut tokens, mut rows, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in chunks {
            let (row, position) = (tokens.len(), self.lengths[chunk.slot]);
            let count = chunk.tokens.len();
            sequences.push(SequenceRows {
                row,
                count,
                position,
                slot: chunk.slot,
            });
            tokens.extend_from_slice(chunk.tokens);
            rows.extend((0..count).map(|i| Row {
                position: (position + i) as i32,
                slot: chunk.slot as i32,
            }));
            wanted.extend(chunk.logits.rows(count).map(|i| (row + i) as i32));
        }
        self.many.tokens.write(0, &tokens)?;
        self.many.rows.write(0, &rows)?;
        self.run_layers(&sequences, tokens.len(), &mut observer)?;
        self.run_head(&wanted, &mut observer)?;
        self.stream.synchronize()?;
        if self.model.gpu.is_profiling() {
            self.model.gpu.settle_profile()?;
        }
        // The f32 copies that an observer needed would slow later forwards down.
        if self.model.kernels == KernelSet::Fused {
            self.many.full = None;
        }
        Ok(())
    }
}

/// `n` values of `from` on the host, when the stream's work is done.
fn fetch(stream: &Stream, from: &Buffer<f32>, n: usize) -> Result<Vec<f32>> {
    stream.synchronize()?;
    let mut values = vec![0f32; n];
    from.read(0, &mut values)?;
    Ok(values)
}

/// Shows an observer the input of a Linear.
fn show(
    stream: &Stream,
    observer: &mut Option<&mut dyn Observer>,
    layer: usize,
    kinds: &[LinearKind],
    x: Option<&Buffer<f32>>,
    n: usize,
) -> Result<()> {
    if let (Some(observer), Some(x)) = (observer, x) {
        observer.linear_input(layer, kinds, &fetch(stream, x, n)?);
    }
    Ok(())
}

/// As [`show`], of FP16 rows `[m, width padded]` in operand order: what the attention kernel
/// yields.
fn show_half(
    stream: &Stream,
    observer: &mut Option<&mut dyn Observer>,
    layer: usize,
    kinds: &[LinearKind],
    x: &Buffer<u16>,
    m: usize,
    width: usize,
) -> Result<()> {
    let Some(observer) = observer else {
        return Ok(());
    };
    stream.synchronize()?;
    let mut halves = vec![0u16; m * padded(width)];
    x.read(0, &mut halves)?;
    let rows = halves.chunks_exact(padded(width));
    let values: Vec<f32> = rows
        .flat_map(|r| (0..width).map(|k| half::f16::from_bits(r[operand_index(k)]).to_f32()))
        .collect();
    observer.linear_input(layer, kinds, &values);
    Ok(())
}
