//! A forward over the rows of many tokens.

use super::super::model::CudaModel;
use super::{CudaSession, FullRows, LOGIT_ROWS, ManyRows, padded, product};
use crate::engine::{Chunk, Observer};
use crate::error::Result;
use nq_formats::models::{MlpSpec, Product};
use nq_kernels::KernelSet;
use nq_kernels::cuda::{
    Buffer, DeviceLinear, GemmOutput, HEAD_DIM, Heads, LayerPages, Row, RowsOut, SequenceRows,
    Stream, operand_index,
};

/// What every operation on `m` rows needs.
struct Pass<'a> {
    stream: &'a Stream,
    model: &'a CudaModel,
    m: usize,
}

impl Pass<'_> {
    /// True for the kernels that are checked against.
    fn is_plain(&self) -> bool {
        self.model.kernels == KernelSet::Reference
    }

    /// Rows times `w`, stored in `out` or added to it: the f32 rows `full` by plain kernels, else
    /// the FP16 rows `half`.
    fn linear(
        &self,
        (name, w): (&'static str, &DeviceLinear),
        full: Option<&Buffer<f32>>,
        half: &Buffer<u16>,
        out: GemmOutput<'_>,
    ) -> Result<()> {
        let (stream, m) = (self.stream, self.m);
        match (full.filter(|_| self.is_plain()), out) {
            (Some(x), GemmOutput::Store(out)) => stream.linear_reference(w, x, out, m, false)?,
            (Some(x), GemmOutput::Add(out)) => stream.linear_reference(w, x, out, m, true)?,
            (_, out) => product(stream, name, w, || stream.gemm(w, half, out, m))?,
        }
        Ok(())
    }

    /// `many.x`, normalized, to `many.normed`.
    fn norm(&self, gain: &Buffer<f32>, many: &mut ManyRows) -> Result<()> {
        let c = &self.model.config;
        let out = RowsOut {
            full: many.full.as_mut().map(|f| &mut f.normed),
            half: Some(&mut many.normed),
        };
        let key = ("norm", "fused", (self.m, c.hidden_size));
        Ok(self.stream.timed(key, 0, || {
            self.stream
                .rms_norm(&many.x, None, gain, &out, self.m, c.rms_norm_eps)
        })?)
    }

    /// The new keys and values to `cache`, and what attention makes of them to `many.attended`.
    fn attend(
        &self,
        many: &mut ManyRows,
        cache: LayerPages<'_>,
        settings: &Heads<'_>,
        sequences: &[SequenceRows],
    ) -> Result<()> {
        let (stream, m, heads) = (self.stream, self.m, settings.heads);
        let shape = (heads, HEAD_DIM);
        stream.timed(("append", "fused", shape), 0, || {
            stream.append(&mut many.qkv, &many.rows, settings, cache, m)
        })?;
        match &mut many.full {
            Some(full) if self.is_plain() => {
                let out = &mut full.attended;
                stream.attention_reference(&many.qkv, &many.rows, heads, cache, out, m)?;
            }
            _ => stream.timed(("attention", "fused", shape), 0, || {
                sequences.iter().try_for_each(|&s| {
                    stream.attention_prefill(&many.qkv, s, heads, cache, &mut many.attended)
                })
            })?,
        }
        Ok(())
    }

    /// `many.normed` times gate and up, through SwiGLU, to `many.mlp`.
    fn gate_up(&self, w: &DeviceLinear, many: &mut ManyRows) -> Result<()> {
        let (stream, m) = (self.stream, self.m);
        let Some(full) = &mut many.full else {
            let out = GemmOutput::Silu(&mut many.mlp);
            return self.linear(("gate_up", w), None, &many.normed, out);
        };
        let both = &mut full.gate_up;
        match self.is_plain() {
            true => stream.linear_reference(w, &full.normed, both, m, false)?,
            false => stream.gemm(w, &many.normed, GemmOutput::Store(both), m)?,
        }
        let out = RowsOut {
            full: Some(&mut full.mlp),
            half: Some(&mut many.mlp),
        };
        Ok(stream.silu_mul(&full.gate_up, &out, m, self.model.config.intermediate_size)?)
    }

    /// Shows an observer rows of `width` inputs of a Linear, if there are any in f32.
    fn show(
        &self,
        observer: &mut Option<&mut dyn Observer>,
        (layer, product): (usize, &Product),
        x: Option<&Buffer<f32>>,
        width: usize,
    ) -> Result<()> {
        if let (Some(observer), Some(x)) = (observer, x) {
            let values = fetch(self.stream, x, self.m * width)?;
            observer.linear_input(layer, product, &values);
        }
        Ok(())
    }

    /// Shows an observer what attention yields: rows in f32, or FP16 rows `[m, width padded]` in
    /// operand order.
    fn show_attended(
        &self,
        observer: &mut Option<&mut dyn Observer>,
        (layer, product): (usize, &Product),
        many: &ManyRows,
    ) -> Result<()> {
        let width = self.model.config.q_dim();
        if self.is_plain() {
            let full = many.full.as_ref();
            return self.show(observer, (layer, product), full.map(|f| &f.attended), width);
        }
        let Some(observer) = observer else {
            return Ok(());
        };
        self.stream.synchronize()?;
        let mut halves = vec![0u16; self.m * padded(width)];
        many.attended.read(0, &mut halves)?;
        let rows = halves.chunks_exact(padded(width));
        let values: Vec<f32> = rows
            .flat_map(|r| (0..width).map(|k| half::f16::from_bits(r[operand_index(k)]).to_f32()))
            .collect();
        observer.linear_input(layer, product, &values);
        Ok(())
    }
}

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
            pages,
            cos_sin,
            many,
            ..
        } = self;
        let (stream, model): (&Stream, &CudaModel) = (stream, model);
        let c = &model.config;
        let pass = Pass { stream, model, m };
        stream.embed(model.embedding(), &many.tokens, &mut many.x, m)?;
        let attention = &c.layer().attention;
        let MlpSpec::SwiGlu { gate_up, down, .. } = &c.layer().mlp;
        for (index, layer) in model.layers.iter().enumerate() {
            pass.norm(&layer.input_norm, many)?;
            let normed = many.full.as_ref().map(|f| &f.normed);
            pass.show(observer, (index, &attention.qkv), normed, c.hidden_size)?;
            let out = GemmOutput::Store(&mut many.qkv);
            pass.linear(("qkv", &layer.qkv), normed, &many.normed, out)?;
            let settings = model.heads(index, cos_sin);
            pass.attend(many, pages.layer(index), &settings, sequences)?;
            pass.show_attended(observer, (index, &attention.o), many)?;
            let attended = many.full.as_ref().map(|f| &f.attended);
            let out = GemmOutput::Add(&mut many.x);
            pass.linear(("o", &layer.o), attended, &many.attended, out)?;

            pass.norm(&layer.post_attention_norm, many)?;
            let normed = many.full.as_ref().map(|f| &f.normed);
            pass.show(observer, (index, gate_up), normed, c.hidden_size)?;
            pass.gate_up(&layer.gate_up, many)?;
            let mlp = many.full.as_ref().map(|f| &f.mlp);
            pass.show(observer, (index, down), mlp, c.intermediate_size)?;
            let out = GemmOutput::Add(&mut many.x);
            pass.linear(("down", &layer.down), mlp, &many.mlp, out)?;
            if let Some(observer) = observer {
                observer.layer_output(index, &fetch(stream, &many.x, m * c.hidden_size)?);
            }
        }
        Ok(())
    }

    /// Final norm and head over the listed rows of `many.x`.
    fn run_head(&mut self, rows: &[u32], observer: &mut Option<&mut dyn Observer>) -> Result<()> {
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
            let normed = many.full.as_ref().map(|f| &f.normed);
            let out = GemmOutput::Store(&mut many.logits);
            let pass = Pass { stream, model, m };
            pass.linear(("head", &model.head), normed, &many.head_in, out)?;
            stream.read(&many.logits, 0, logits_host, m * vocab)?;
            stream.synchronize()?;
            logits.extend_from_slice(&logits_host.values()?[..m * vocab]);
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
            let (row, position) = (tokens.len(), self.tables.len(chunk.slot));
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
            wanted.extend(chunk.logits.rows(count).map(|i| (row + i) as u32));
        }
        self.reserve(chunks.iter().map(|c| (c.slot, c.tokens.len())))?;
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
