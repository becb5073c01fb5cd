//! An EAGLE-3 head on a GPU. It reads the residual streams of its target's steps where they are, in the device's
//! memory: the session hands over every row that it computes ([`EagleRun::take`]), in order with its own work.
//!
//! Row `i` of a sequence is the token at `first + i + 1` with the streams of the token before it. A row's keys and
//! values can be computed as soon as its token is known: those of prompts at once, those of a step that checks
//! drafts when the next draft is asked for, since only then is it known which of its rows stay. Drafting reads only
//! the stream behind the last row, so the others go no further than their keys and values.

mod buffers;

use super::model::{CudaModel, refuse};
use super::session::reserve_pages;
use crate::error::{Error, Result};
use crate::interface::{Draft, Drafter, SessionSpec};
use crate::kv::PageTables;
use crate::rope::Rotary;
use crate::speculation::head::{GATE_UP, HeadWeights, NOT_FINITE, rotary};
use buffers::{Few, Many, Widths};
use nq_formats::eagle::{EagleConfig, EagleHead, TAPS};
use nq_formats::{ModelConfig, Weight};
use nq_kernels::cuda::{
    Advance, AttentionOutput, AttentionScratch, AttentionShape, Buffer, Checked, Columns,
    DeviceLinear, DevicePages, GemmOutput, GemvOutput, Gpu, HEAD_DIM, Heads, MOST_RUN,
    NOT_FINITE as NO_NUMBER, Norm, PagesShape, Row, RowsOut, Stack, Step, Stream, Strided,
    Uploader, best_len,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Rows of prompts computed together.
const ROWS: usize = 512;
/// Places for drafted tokens: more than a step can check, and a power of two.
const RING: usize = 2 * MOST_RUN;
const WHAT: &str = "the EAGLE-3 head";

/// A head packed for a GPU.
pub(crate) struct CudaEagle {
    config: EagleConfig,
    gpu: Gpu,
    rotary: Rotary,
    weights: HeadWeights<DeviceLinear, Buffer<f32>>,
    /// `[vocab, hidden]`; `None`: the model's.
    embedding: Option<DeviceLinear>,
    /// The model's token for each of the head's.
    tokens: Checked<u32>,
}

impl CudaEagle {
    /// Packs `head` for `model`.
    ///
    /// # Errors
    /// A missing or misshapen tensor; a shape that the kernels do not serve; no memory for it.
    pub(crate) fn load(gpu: &Gpu, head: &EagleHead, model: &ModelConfig) -> Result<Self> {
        let c = &head.config;
        check_shape(c)?;
        let mut uploader = Uploader::new(gpu)?;
        let linear = |product: &str, parts: &[&Weight]| {
            let stack = match product == GATE_UP {
                true => Stack::Interleave,
                false => Stack::Concat,
            };
            Ok(uploader.pack(parts, stack)?)
        };
        let norm = |gains: Vec<f32>| Ok(gpu.upload("a norm", &gains)?);
        let weights = HeadWeights::read(head, linear, norm)?;
        let embedding = match head.has_embedding {
            true => {
                let embedding = crate::models::embedding(head.store.as_ref(), model)?;
                Some(uploader.pack(&[&embedding], Stack::Concat)?)
            }
            false => None,
        };
        uploader.finish()?;
        Ok(CudaEagle {
            rotary: rotary(head, model),
            tokens: Checked::upload(gpu, WHAT, &head.tokens, c.vocab_size)?,
            config: c.clone(),
            gpu: gpu.clone(),
            weights,
            embedding,
        })
    }

    fn widths(&self) -> Widths {
        let c = &self.config;
        let q = c.num_attention_heads * HEAD_DIM;
        Widths {
            hidden: c.hidden_size,
            streams: TAPS * c.hidden_size,
            q,
            qkv: q + 2 * c.num_key_value_heads * HEAD_DIM,
            mlp: c.intermediate_size,
        }
    }
}

/// Refuses shapes that the kernels do not serve.
fn check_shape(c: &EagleConfig) -> Result<()> {
    if c.head_dim != HEAD_DIM {
        return refuse("head_dim of an EAGLE-3 head", "128", c.head_dim);
    }
    let group = c.num_attention_heads / c.num_key_value_heads;
    if group > 8 {
        return refuse(
            "query heads per key head of an EAGLE-3 head",
            "at most 8",
            group,
        );
    }
    for (what, size) in [
        ("hidden_size of an EAGLE-3 head", c.hidden_size),
        ("intermediate_size of an EAGLE-3 head", c.intermediate_size),
    ] {
        if !size.is_multiple_of(8) {
            return refuse(what, "a multiple of 8", size);
        }
    }
    Ok(())
}

/// The drafter of a [`CudaEagle`]; its target's session holds the other reference.
#[derive(Clone)]
pub(super) struct EagleRun(Arc<Mutex<State>>);

impl EagleRun {
    /// Drafts for a session of `target`, in whose `stream` all work is queued.
    ///
    /// # Errors
    /// A head on another device; no memory for its context.
    pub(super) fn new(
        eagle: &Arc<CudaEagle>,
        target: &Arc<CudaModel>,
        stream: &Stream,
        spec: &SessionSpec,
    ) -> Result<Self> {
        let (gpu, c, w) = (&target.gpu, &eagle.config, eagle.widths());
        if eagle.gpu.info().ordinal != gpu.info().ordinal {
            return Err(Error::Unsupported {
                engine: "nq",
                what: "an EAGLE-3 head on another device than its model",
                expected: gpu.info().to_string(),
                found: eagle.gpu.info().to_string(),
            });
        }
        let pages = DevicePages::new(
            gpu,
            PagesShape {
                kv: spec.kv,
                layers: 1,
                kv_heads: c.num_key_value_heads,
                head_dim: HEAD_DIM,
                pages: spec.page_count(),
                slots: spec.slots,
                ctx: spec.ctx,
            },
        )?;
        let places = pages.places();
        let positions = places.positions * HEAD_DIM / 2;
        let mut cos_sin = gpu.zeros("the rotary table", positions)?;
        cos_sin.write(0, &eagle.rotary.pairs(places.positions))?;
        Ok(EagleRun(Arc::new(Mutex::new(State {
            few: Few::new(gpu, eagle, places)?,
            many: Many::new(gpu, &w, places, c.vocab_size)?,
            tables: PageTables::new(spec),
            placed: vec![Vec::new(); spec.slots],
            slots: (0..spec.slots).map(|_| Slot::default()).collect(),
            ctx: spec.ctx,
            stream: stream.clone(),
            target: Arc::clone(target),
            eagle: Arc::clone(eagle),
            pages,
            cos_sin,
        }))))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over the streams of `tokens`, which stand at `position` of the sequence in `slot`: rows of `streams`
    /// `[., 3 hidden]` from `row` on.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn take(
        &self,
        slot: usize,
        position: usize,
        tokens: &[u32],
        streams: (&Buffer<f32>, usize),
    ) -> Result<()> {
        self.state().take(slot, position, tokens, streams)
    }

    /// Forgets what is past the first `len` tokens of the sequence in `slot`.
    pub(super) fn truncate(&self, slot: usize, len: usize) {
        self.state().truncate(slot, len);
    }
}

impl Drafter for EagleRun {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        let mut state = self.state();
        drafts.iter_mut().try_for_each(|draft| state.draft(draft))
    }

    fn reads_streams(&self) -> bool {
        true
    }
}

/// What the head knows of a sequence. The number of its rows that have keys and values is its length in the page
/// tables.
#[derive(Default)]
struct Slot {
    /// Position of the first token whose streams are known.
    first: usize,
    /// Tokens from there on whose streams are known.
    tokens: Vec<u32>,
    /// Streams of the last tokens, which have no keys and values yet: `[MOST_RUN, 3 hidden]`.
    held: Option<Buffer<f32>>,
}

struct State {
    // Buffers go before the stream that works on them.
    few: Few,
    many: Many,
    pages: DevicePages,
    cos_sin: Buffer<[f32; 2]>, // [ctx padded, 64]
    tables: PageTables,
    placed: Vec<Vec<u32>>,
    slots: Vec<Slot>,
    ctx: usize,
    stream: Stream,
    target: Arc<CudaModel>,
    eagle: Arc<CudaEagle>,
}

/// Queues the product of `m` rows `x` with `w`, of few rows.
fn multiply(
    stream: &Stream,
    w: &DeviceLinear,
    x: &Buffer<f32>,
    out: GemvOutput<'_>,
    columns: &mut Option<Columns>,
    m: usize,
) -> Result<()> {
    // No kernel overtakes the one before its predecessor, on whose tokens early reads of attention depend.
    let late = true;
    match columns {
        Some(columns) if m > 1 => stream.gemv_batch(w, x, out, columns, m, late)?,
        _ => stream.gemv(w, x, out, late)?,
    }
    Ok(())
}

/// Rows that follow one another, `width` values each, from row `at` on.
fn rows_at(at: usize, width: usize) -> Strided {
    Strided {
        at: at * width,
        stride: width,
    }
}

impl State {
    fn truncate(&mut self, slot: usize, len: usize) {
        let Some(known) = self.slots.get_mut(slot) else {
            return;
        };
        known.tokens.truncate(len.saturating_sub(known.first));
        // A row whose token has been replaced stays where its streams are not held any more: that of one position
        // differs a little from what it should be, and only drafts depend on it.
        let rows = self.tables.len(slot).min(known.tokens.len());
        self.tables.truncate(slot, rows);
    }

    fn take(
        &mut self,
        slot: usize,
        position: usize,
        tokens: &[u32],
        (streams, row): (&Buffer<f32>, usize),
    ) -> Result<()> {
        self.truncate(slot, position);
        let width = self.eagle.widths().streams;
        let Some(known) = self.slots.get_mut(slot) else {
            return Ok(());
        };
        if known.first + known.tokens.len() != position {
            // What is between is unknown: the head sees the text from here on.
            known.first = position;
            known.tokens.clear();
            self.tables.truncate(slot, 0);
        }
        let waiting = known.tokens.len() - self.tables.len(slot);
        known.tokens.extend_from_slice(tokens);
        let held = match &mut known.held {
            Some(held) => held,
            none => none.insert(self.eagle.gpu.zeros(WHAT, MOST_RUN * width)?),
        };
        let all = waiting + tokens.len();
        if all <= MOST_RUN {
            let to = (held, rows_at(waiting, width));
            let from = (streams, rows_at(row, width));
            return Ok(self.stream.copy_rows(from, to, (tokens.len(), width))?);
        }
        // The next token is known of all rows but the last.
        if no_page(self.reserve(slot, all - 1))? {
            self.forget(slot);
            return Ok(());
        }
        for at in (0..all - 1).step_by(ROWS) {
            let n = ROWS.min(all - 1 - at);
            let waited = waiting.saturating_sub(at).min(n);
            let known = &self.slots[slot];
            if let Some(held) = known.held.as_ref().filter(|_| waited > 0) {
                let to = (&mut self.many.streams, rows_at(0, width));
                self.stream
                    .copy_rows((held, rows_at(at, width)), to, (waited, width))?;
            }
            let from = (streams, rows_at(row + at + waited - waiting, width));
            let to = (&mut self.many.streams, rows_at(waited, width));
            self.stream.copy_rows(from, to, (n - waited, width))?;
            self.feed_many(slot, n)?;
        }
        if let Some(held) = &mut self.slots[slot].held {
            let from = (streams, rows_at(row + tokens.len() - 1, width));
            self.stream
                .copy_rows(from, (held, rows_at(0, width)), (1, width))?;
        }
        Ok(())
    }

    fn forget(&mut self, slot: usize) {
        let known = &mut self.slots[slot];
        known.first += known.tokens.len();
        known.tokens.clear();
        self.tables.truncate(slot, 0);
    }

    fn reserve(&mut self, slot: usize, rows: usize) -> Result<()> {
        reserve_pages(
            &self.stream,
            (&mut self.tables, &mut self.placed[..]),
            &mut self.pages,
            [(slot, rows)].into_iter(),
        )
    }

    /// Computes keys and values of the next `n` rows of the sequence in `slot`, whose streams are in `many.streams`.
    fn feed_many(&mut self, slot: usize, n: usize) -> Result<()> {
        let State {
            many,
            pages,
            cos_sin,
            tables,
            slots,
            stream,
            target,
            eagle,
            ..
        } = self;
        let (c, w, done) = (&eagle.config, &eagle.weights, tables.len(slot));
        let embedding = eagle.embedding.as_ref().unwrap_or(target.embedding());
        let row = |i: usize| Row {
            position: (done + i) as i32,
            slot: slot as i32,
        };
        let rows: Vec<Row> = (0..n).map(row).collect();
        stream.write_checked(&mut many.rows, &rows)?;
        let tokens = &slots[slot].tokens[done + 1..][..n];
        stream.write_checked(&mut many.tokens, tokens)?;
        let streams = halves(&mut many.half);
        let taps = (n, TAPS * c.hidden_size);
        stream.convert_rows(&many.streams, &streams, taps)?;
        stream.gemm(&w.fc, &many.half, GemmOutput::Store(&mut many.x), n)?;
        stream.embed(embedding, &many.tokens, &mut many.embedded, n)?;
        for (x, gain, product, adds) in [
            (
                &many.embedded,
                &w.embedding_norm,
                &w.qkv_of_embedding,
                false,
            ),
            (&many.x, &w.stream_norm, &w.qkv_of_stream, true),
        ] {
            let normed = halves(&mut many.normed);
            stream.rms_norm(x, None, gain, &normed, n, c.rms_norm_eps)?;
            let out = match adds {
                false => GemmOutput::Store(&mut many.qkv),
                true => GemmOutput::Add(&mut many.qkv),
            };
            stream.gemm(product, &many.normed, out, n)?;
        }
        let heads = heads(c, cos_sin);
        stream.append(&mut many.qkv, &many.rows, &heads, pages.layer(0), n)?;
        tables.advance(slot, n);
        Ok(())
    }

    /// Drafts after the text of `draft`; nothing if the streams of its last tokens are unknown, or if there is no
    /// room for them.
    fn draft(&mut self, draft: &mut Draft<'_>) -> Result<()> {
        let (slot, text) = (draft.slot, draft.text);
        let Some((&next, before)) = text.split_last() else {
            return Ok(());
        };
        self.truncate(slot, before.len());
        let Some(known) = self.slots.get(slot) else {
            return Ok(());
        };
        let done = self.tables.len(slot);
        let n = known.tokens.len() - done;
        let follows = before.get(known.first..) == Some(&known.tokens[..]);
        let vocab = self.eagle.config.vocab_size;
        if !follows || !(1..=MOST_RUN).contains(&n) || next as usize >= vocab {
            return Ok(());
        }
        // The last token drafted gets no row.
        let most = (draft.most.min(RING)).min((self.ctx + 1).saturating_sub(done + n));
        if most == 0 || no_page(self.reserve(slot, n + most - 1))? {
            return Ok(());
        }
        let mut tokens = self.slots[slot].tokens[done + 1..].to_vec();
        tokens.push(next);
        self.feed_few(slot, &tokens)?;
        self.tables.advance(slot, n);
        for i in 0..most {
            self.draw()?;
            if i + 1 < most {
                self.feed_drawn(done + n + i + 1)?;
            }
        }
        self.stream.synchronize()?;
        for i in 0..most {
            match self.few.last.ring.load(i) {
                token if (token as usize) < vocab => draft.tokens.push(token),
                NO_NUMBER => return Err(NOT_FINITE),
                _ => break,
            }
        }
        Ok(())
    }

    /// Runs the layer over the next rows of the sequence in `slot`: those of `tokens`, with the streams that are
    /// held. Leaves the last row in `few.last.x`.
    fn feed_few(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        let (n, done) = (tokens.len(), self.tables.len(slot));
        let State {
            few,
            stream,
            target,
            eagle,
            slots,
            ..
        } = self;
        let (w, width) = (&eagle.weights, eagle.config.hidden_size);
        let embedding = eagle.embedding.as_ref().unwrap_or(target.embedding());
        let Some(held) = &slots[slot].held else {
            return Ok(());
        };
        let step = |i: usize| Step {
            position: (done + i) as i32,
            slot: slot as i32,
            ..Step::default()
        };
        let steps: Vec<Step> = (0..n).map(step).collect();
        stream.put_checked(&mut few.step, 0, &steps)?;
        stream.put_checked(&mut few.tokens, 0, tokens)?;
        let (zeros, x) = (
            (&few.zeros, rows_at(0, width)),
            (&mut few.x, rows_at(0, width)),
        );
        stream.copy_rows(zeros, x, (n, width))?;
        let out = GemvOutput::Add(&mut few.x);
        multiply(stream, &w.fc, held, out, &mut few.columns, n)?;
        stream.embed(embedding, &few.tokens, &mut few.embedded, n)?;
        self.attend(n, done + n, false)?;
        let State { few, stream, .. } = self;
        let q = few.last.attended.len();
        let (from, to) = (rows_at(n - 1, q), (&mut few.last.attended, rows_at(0, q)));
        stream.copy_rows((&few.attended, from), to, (1, q))?;
        let (from, to) = (rows_at(n - 1, width), (&mut few.last.x, rows_at(0, width)));
        stream.copy_rows((&few.x, from), to, (1, width))?;
        // What `draw` continues from: its step stands at the last row.
        stream.put_checked(&mut few.step, 0, &steps[n - 1..])?;
        self.finish()
    }

    /// Runs the layer over the token that was drawn last, whose embedding is in `few.embedded`. The sequence then
    /// has `positions` rows.
    fn feed_drawn(&mut self, positions: usize) -> Result<()> {
        self.attend(1, positions, true)?;
        self.finish()
    }

    /// Attention of the `n` rows of `few.embedded` and `few.x`, or of the row `few.last.x` after a token that was
    /// drawn. The last of them is the sequence's `positions`th.
    fn attend(&mut self, n: usize, positions: usize, drawn: bool) -> Result<()> {
        let State {
            few,
            pages,
            cos_sin,
            stream,
            eagle,
            ..
        } = self;
        let Few {
            step,
            embedded,
            x,
            normed,
            qkv,
            attended,
            columns,
            attention,
            last,
            ..
        } = few;
        let (x, attended) = match drawn {
            true => (&mut last.x, &mut last.attended),
            false => (x, attended),
        };
        let (c, w) = (&eagle.config, &eagle.weights);
        let (eps, width) = (c.rms_norm_eps, c.hidden_size);
        let norm = Norm {
            gain: &w.embedding_norm,
            eps,
        };
        let out = GemvOutput::Store(norm, qkv);
        multiply(stream, &w.qkv_of_embedding, embedded, out, columns, n)?;
        let out = RowsOut {
            full: Some(normed),
            half: None,
        };
        stream.rms_norm(x, None, &w.stream_norm, &out, n, eps)?;
        if c.norm_before_residual {
            let to = (x, rows_at(0, width));
            stream.copy_rows((normed, rows_at(0, width)), to, (n, width))?;
        }
        let out = GemvOutput::Add(qkv);
        multiply(stream, &w.qkv_of_stream, normed, out, columns, n)?;
        let heads = heads(c, cos_sin);
        let shape = AttentionShape {
            m: n,
            splits: AttentionScratch::splits(&eagle.gpu, c.num_key_value_heads, n, positions),
            late: true,
            runs: n > 1,
            shared: None,
        };
        let out = AttentionOutput::Full(attended);
        stream.attention_decode(qkv, step, &heads, pages.layer(0), attention, out, shape)?;
        Ok(())
    }

    /// The rest of the layer, over the last row.
    fn finish(&mut self) -> Result<()> {
        let State {
            few, stream, eagle, ..
        } = self;
        let (w, last) = (&eagle.weights, &mut few.last);
        let norm = Norm {
            gain: &w.mlp_norm,
            eps: eagle.config.rms_norm_eps,
        };
        let multiply = |w, x: &Buffer<f32>, out: GemvOutput<'_>| stream.gemv(w, x, out, true);
        multiply(&w.o, &last.attended, GemvOutput::Add(&mut last.x))?;
        let out = GemvOutput::Silu(norm, &mut last.gated);
        multiply(&w.gate_up, &last.x, out)?;
        multiply(&w.down, &last.gated, GemvOutput::Add(&mut last.x))?;
        Ok(())
    }

    /// Draws the likeliest token after `few.last.x` to the ring, advances the step and looks the token up.
    fn draw(&mut self) -> Result<()> {
        let State {
            few,
            stream,
            target,
            eagle,
            pages,
            ..
        } = self;
        let (w, last) = (&eagle.weights, &mut few.last);
        let norm = Norm {
            gain: &w.norm,
            eps: eagle.config.rms_norm_eps,
        };
        let out = GemvOutput::Head(norm, &mut last.logits, &mut last.best);
        stream.gemv(&w.head, &last.x, out, true)?;
        stream.advance(Advance {
            m: 1,
            candidates: None,
            logits: &last.logits,
            best: &last.best,
            blocks: best_len(&eagle.gpu, &w.head, 1)?,
            sampling: &last.sampling,
            adjust: &mut last.adjust,
            step: &mut few.step,
            ring: &mut last.ring,
            logprobs: &mut last.logprobs,
            ring_len: RING,
            ids: Some(&eagle.tokens),
            embedding: eagle.embedding.as_ref().unwrap_or(target.embedding()),
            x: &mut few.embedded,
            idle: pages.idle_slot(),
        })?;
        Ok(())
    }
}

/// Rows in FP16.
fn halves(half: &mut Buffer<u16>) -> RowsOut<'_> {
    RowsOut {
        full: None,
        half: Some(half),
    }
}

/// The parameters of the head's attention, which has no norms.
fn heads<'a>(c: &EagleConfig, cos_sin: &'a Buffer<[f32; 2]>) -> Heads<'a> {
    Heads {
        heads: c.num_attention_heads,
        gains: None,
        biases: &[],
        cos_sin,
        eps: c.rms_norm_eps,
    }
}

/// True if there was no free page.
fn no_page(reserved: Result<()>) -> Result<bool> {
    match reserved {
        Ok(()) => Ok(false),
        Err(Error::PagesFull { .. }) => Ok(true),
        Err(e) => Err(e),
    }
}
