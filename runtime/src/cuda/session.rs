//! [`Session`] on a GPU.

use super::model::CudaModel;
use crate::engine::{
    Chunk, LinearKind, Logits, LogitsWanted, Observer, Session, SessionSpec, check_chunks,
};
use crate::error::{Error, Result};
use nq_kernels::KernelSet;
use nq_kernels::cuda::{
    AttentionScratch, Buffer, DeviceCache, GemmOutput, GemvOutput, Graph, HEAD_DIM, Pinned, Row,
    RowsOut, SequenceRows, Split, Step, Stream, best_len,
};
use std::sync::Arc;

/// Rows of logits computed and copied at a time.
const LOGIT_ROWS: usize = 64;

/// Sequences in progress over a [`CudaModel`].
pub(super) struct CudaSession {
    // Fields are dropped in order: the stream waits for its work before memory goes.
    stream: Stream,
    step_graph: Option<Graph>,
    model: Arc<CudaModel>,
    spec: SessionSpec,
    lengths: Vec<usize>,       // [slots]
    cache: Vec<DeviceCache>,   // [layers]
    cos_sin: Buffer<[f32; 2]>, // [ctx padded, head_dim / 2]
    one: OneRow,
    many: ManyRows,
    logits: Vec<f32>, // [rows wanted, vocab]
}

/// Buffers of the fused step.
struct OneRow {
    step: Buffer<Step>,
    step_host: Pinned<Step>,
    x: Buffer<f32>,   // [hidden], the residual
    x_split: Split,   // [hidden]
    qkv: Buffer<f32>, // [q_dim + 2 kv_dim]
    attended: Split,  // [q_dim]
    mlp: Split,       // [intermediate]
    attention: AttentionScratch,
    logits: Buffer<f32>, // [vocab]
    best: Buffer<[f32; 2]>,
    logits_host: Pinned<f32>, // [LOGIT_ROWS, vocab]
}

/// Buffers of a forward over many rows.
struct ManyRows {
    tokens: Buffer<u32>,
    rows: Buffer<Row>,
    wanted: Buffer<i32>,
    x: Buffer<f32>,        // [rows, hidden], the residual
    normed: Buffer<u16>,   // [rows, hidden padded]
    qkv: Buffer<f32>,      // [rows, q_dim + 2 kv_dim]
    attended: Buffer<u16>, // [rows, q_dim padded]
    mlp: Buffer<u16>,      // [rows, intermediate padded]
    head_in: Buffer<u16>,  // [LOGIT_ROWS, hidden padded]
    logits: Buffer<f32>,   // [LOGIT_ROWS, vocab]
    full: Option<FullRows>,
}

/// f32 activations, for the plain kernels and for observers.
struct FullRows {
    normed: Buffer<f32>,   // [rows, hidden]
    attended: Buffer<f32>, // [rows, q_dim]
    gate_up: Buffer<f32>,  // [rows, 2 intermediate]
    mlp: Buffer<f32>,      // [rows, intermediate]
}

/// Sizes that buffers are cut by.
struct Widths {
    hidden: usize,
    qkv: usize,
    q: usize,
    mlp: usize,
    vocab: usize,
}

impl Widths {
    fn of(model: &CudaModel) -> Self {
        let c = &model.config;
        Widths {
            hidden: c.hidden_size,
            qkv: c.q_dim() + 2 * c.kv_dim(),
            q: c.q_dim(),
            mlp: c.intermediate_size,
            vocab: c.vocab_size,
        }
    }
}

fn padded(width: usize) -> usize {
    width.next_multiple_of(256)
}

impl FullRows {
    fn new(model: &CudaModel, rows: usize) -> Result<Self> {
        let w = Widths::of(model);
        let zeros = |n: usize| model.gpu.zeros("activations", rows * n);
        Ok(FullRows {
            normed: zeros(w.hidden)?,
            attended: zeros(w.q)?,
            gate_up: zeros(2 * w.mlp)?,
            mlp: zeros(w.mlp)?,
        })
    }
}

impl CudaSession {
    pub(super) fn new(model: Arc<CudaModel>, spec: SessionSpec) -> Result<Self> {
        let gpu = &model.gpu;
        let c = &model.config;
        let w = Widths::of(&model);
        let m = spec.max_rows.max(1);
        let kv_heads = c.num_key_value_heads;
        let mut cache = Vec::with_capacity(c.num_hidden_layers);
        for _ in 0..c.num_hidden_layers {
            cache.push(DeviceCache::new(
                gpu, spec.kv, spec.slots, kv_heads, spec.ctx,
            )?);
        }
        let capacity = spec.ctx.next_multiple_of(32);
        let mut table = vec![(0f32, 0f32); capacity * HEAD_DIM / 2];
        for (position, row) in table.chunks_exact_mut(HEAD_DIM / 2).enumerate() {
            model.rotary.row(position, row);
        }
        let table: Vec<[f32; 2]> = table.into_iter().map(|(c, s)| [c, s]).collect();
        let f32s = |n: usize| gpu.zeros::<f32>("activations", n);
        let halves = |n: usize| gpu.zeros::<u16>("activations", n);
        let full = match model.kernels {
            KernelSet::Reference => Some(FullRows::new(&model, m)?),
            KernelSet::Fused => None,
        };
        Ok(CudaSession {
            stream: gpu.stream()?,
            step_graph: None,
            lengths: vec![0; spec.slots],
            cache,
            cos_sin: gpu.upload("the rotary table", &table)?,
            one: OneRow {
                step: gpu.zeros("activations", 1)?,
                step_host: gpu.pinned("activations", 1)?,
                x: f32s(w.hidden)?,
                x_split: Split::new(gpu, w.hidden)?,
                qkv: f32s(w.qkv)?,
                attended: Split::new(gpu, w.q)?,
                mlp: Split::new(gpu, w.mlp)?,
                attention: AttentionScratch::new(gpu, c.num_attention_heads, kv_heads)?,
                logits: f32s(w.vocab)?,
                best: gpu.zeros("activations", best_len(gpu, &model.head))?,
                logits_host: gpu.pinned("logits", LOGIT_ROWS * w.vocab)?,
            },
            many: ManyRows {
                tokens: gpu.zeros("activations", m)?,
                rows: gpu.zeros("activations", m)?,
                wanted: gpu.zeros("activations", m)?,
                x: f32s(m * w.hidden)?,
                normed: halves(m * padded(w.hidden))?,
                qkv: f32s(m * w.qkv)?,
                attended: halves(m * padded(w.q))?,
                mlp: halves(m * padded(w.mlp))?,
                head_in: halves(LOGIT_ROWS * padded(w.hidden))?,
                logits: f32s(LOGIT_ROWS * w.vocab)?,
                full,
            },
            logits: Vec::new(),
            model,
            spec,
        })
    }

    /// Device bytes that a session reserves.
    pub(super) fn device_bytes(model: &CudaModel, spec: &SessionSpec) -> usize {
        let c = &model.config;
        let w = Widths::of(model);
        let m = spec.max_rows.max(1);
        let cache = DeviceCache::device_bytes(spec.kv, spec.slots, c.num_key_value_heads, spec.ctx);
        let row = 4 * (w.hidden + w.qkv) + 2 * (padded(w.hidden) + padded(w.q) + padded(w.mlp));
        let full = match model.kernels {
            KernelSet::Reference => 4 * (w.hidden + w.q + 3 * w.mlp),
            KernelSet::Fused => 0,
        };
        c.num_hidden_layers * cache
            + spec.ctx.next_multiple_of(32) * HEAD_DIM * 4
            + m * (row + full)
            + LOGIT_ROWS * (4 * w.vocab + 2 * padded(w.hidden))
            + 4 * (w.vocab + w.qkv + 3 * (w.hidden + w.q + w.mlp))
    }

    /// Queues one token's step through the layers and the head.
    fn queue_step(&mut self) -> nq_kernels::Result<()> {
        let Self {
            stream,
            model,
            cache,
            cos_sin,
            one,
            ..
        } = self;
        let eps = model.config.rms_norm_eps;
        let first = &model.layers[0].input_norm;
        stream.embed_step(
            model.embedding(),
            &one.step,
            first,
            &mut one.x,
            &mut one.x_split,
        )?;
        for (index, layer) in model.layers.iter().enumerate() {
            // The first product of a step lets nothing overtake the sampler of the last one,
            // which the attention kernel's early reads depend on.
            let late = index == 0;
            let out = GemvOutput::Store(&mut one.qkv);
            stream.gemv(&layer.qkv, &one.x_split, out, eps, late)?;
            stream.attention_decode(
                &one.qkv,
                &one.step,
                &model.heads(index, cos_sin),
                &mut cache[index],
                &mut one.attention,
                &mut one.attended,
            )?;
            let out = GemvOutput::Add {
                residual: &mut one.x,
                gain: &layer.post_attention_norm,
                next: &mut one.x_split,
            };
            stream.gemv(&layer.o, &one.attended, out, eps, false)?;
            let out = GemvOutput::Silu(&mut one.mlp);
            stream.gemv(&layer.gate_up, &one.x_split, out, eps, false)?;
            let next = model.layers.get(index + 1);
            let out = GemvOutput::Add {
                residual: &mut one.x,
                gain: next.map_or(&model.norm, |l| &l.input_norm),
                next: &mut one.x_split,
            };
            stream.gemv(&layer.down, &one.mlp, out, eps, false)?;
        }
        let out = GemvOutput::Head {
            logits: &mut one.logits,
            best: &mut one.best,
        };
        stream.gemv(&model.head, &one.x_split, out, eps, false)?;
        Ok(())
    }

    /// The logits of one token, by the fused step.
    fn forward_one(&mut self, slot: usize, token: u32) -> Result<()> {
        if self.step_graph.is_none() {
            // Kernels are loaded and their shared memory is reserved outside the recording.
            self.queue_step()?;
            self.stream.synchronize()?;
            let stream = self.stream.clone();
            let graph = stream.record(|| self.queue_step());
            self.step_graph = Some(graph?);
        }
        let step = Step {
            position: self.lengths[slot] as i32,
            slot: slot as i32,
            token,
            drawn: 0,
        };
        let vocab = self.model.config.vocab_size;
        let one = &mut self.one;
        one.step_host.values_mut()[0] = step;
        self.stream.write(&mut one.step, 0, &one.step_host, 0..1)?;
        if let Some(graph) = &self.step_graph {
            self.stream.run(graph)?;
        }
        self.stream
            .read(&one.logits, 0, &mut one.logits_host, vocab)?;
        self.stream.synchronize()?;
        self.logits
            .extend_from_slice(&one.logits_host.values()[..vocab]);
        Ok(())
    }

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
                stream.rms_norm(&many.x, None, gain, &out, m, eps)
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
                _ => stream.gemm(
                    &layer.qkv,
                    &many.normed,
                    GemmOutput::Store(&mut many.qkv),
                    m,
                )?,
            }
            stream.append(&mut many.qkv, &many.rows, &settings, cache, m)?;
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
                    for &s in sequences {
                        stream.attention_prefill(&many.qkv, s, heads, cache, &mut many.attended)?;
                    }
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
                _ => stream.gemm(&layer.o, &many.attended, GemmOutput::Add(&mut many.x), m)?,
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
                None => stream.gemm(
                    &layer.gate_up,
                    &many.normed,
                    GemmOutput::Silu(&mut many.mlp),
                    m,
                )?,
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
                _ => stream.gemm(&layer.down, &many.mlp, GemmOutput::Add(&mut many.x), m)?,
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
            one,
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
                _ => stream.gemm(
                    &model.head,
                    &many.head_in,
                    GemmOutput::Store(&mut many.logits),
                    m,
                )?,
            }
            stream.read(&many.logits, 0, &mut one.logits_host, m * vocab)?;
            stream.synchronize()?;
            logits.extend_from_slice(&one.logits_host.values()[..m * vocab]);
        }
        if let Some(observer) = observer {
            observer.head_input(&seen);
        }
        Ok(())
    }

    /// The logits of all chunks, over rows.
    fn forward_many(
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

/// As [`show`], of FP16 rows `[m, width padded]`: what the attention kernel yields.
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
        .flat_map(|r| r[..width].iter().map(|&h| half::f16::from_bits(h).to_f32()))
        .collect();
    observer.linear_input(layer, kinds, &values);
    Ok(())
}

impl Session for CudaSession {
    fn spec(&self) -> SessionSpec {
        self.spec
    }

    fn len(&self, slot: usize) -> usize {
        self.lengths[slot]
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.lengths[slot] = self.lengths[slot].min(len);
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        let vocab = self.model.config.vocab_size;
        check_chunks(chunks, &self.spec, vocab, |slot| self.lengths[slot])?;
        self.logits.clear();
        let fused = self.model.kernels == KernelSet::Fused && observer.is_none();
        match chunks {
            [chunk] if fused && chunk.tokens.len() == 1 && chunk.logits != LogitsWanted::None => {
                let wanted = !chunk.logits.rows(1).is_empty();
                self.forward_one(chunk.slot, chunk.tokens[0])?;
                if !wanted {
                    self.logits.clear();
                }
            }
            [] => {}
            chunks => self.forward_many(chunks, observer)?,
        }
        if self.logits.iter().any(|v| !v.is_finite()) {
            return Err(Error::LogitsNotFinite);
        }
        for chunk in chunks {
            self.lengths[chunk.slot] += chunk.tokens.len();
        }
        Ok(Logits {
            data: &self.logits,
            vocab,
        })
    }
}
