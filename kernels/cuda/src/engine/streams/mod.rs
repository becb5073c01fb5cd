//! Layers that draft from residual streams, on a GPU: EAGLE-3 heads and MTP layers. They read the streams of their
//! target's steps where they are, in the device's memory: the session hands over every row that it computes
//! ([`StreamRun::take`]), in order with its own work.
//!
//! Row `i` of a sequence is the token at `first + i + 1` with the streams of the token before it. A row's keys and
//! values can be computed as soon as its token is known: those of prompts at once, those of a step that checks
//! drafts when the next draft is asked for, since only then is it known which of its rows stay. Drafting reads only
//! the stream behind the last row, so the others go no further than their keys and values.

pub(super) mod buffers;
mod eagle;
mod mtp;

pub use eagle::CudaEagle;
pub use mtp::CudaMtp;

use super::layer::CudaLayers;
use super::model::CudaModel;
use super::page_tables::reserve_pages;
use super::pass::{Context, Drafting, Fused, Inputs, LastRow, Pass, PassState, Rows, Sequences};
use crate::{
    Advance, AttentionScratch, Buffer, Checked, Columns, CopiedRows, DeviceLinear, DevicePages,
    GemvOutput, Gpu, MOST_RUN, MOST_SEQUENCES, NOT_FINITE as NO_NUMBER, Norm, Row, Step, Stream,
    Strided, best_len,
};
use buffers::{DraftMemory, Few, Many, RING, ROWS};
use nq_kernels::KernelSet;
use nq_model::ModelConfig;
use nq_runtime::interface::{Draft, DraftLayer, Drafter, SessionSpec, StreamHead};
use nq_runtime::kv::PageTables;
use nq_runtime::rope::Rotary;
use nq_runtime::speculation::head::frequent_tokens;
use nq_runtime::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a layer's operations work on.
struct On<'a> {
    stream: &'a Stream,
    target: &'a CudaModel,
    pages: &'a DevicePages,
    cos_sin: &'a Buffer<[f32; 2]>,
    few: &'a mut Few,
    many: &'a mut Many,
    slots: &'a [Slot],
}

impl<'a> On<'a> {
    fn context(&self, model: &'a DraftModel) -> Context<'a> {
        Context {
            stream: self.stream,
            config: &model.config,
            layers: &model.layers,
            kernels: KernelSet::Fused,
            pages: self.pages,
            states: None,
            cos_sin: self.cos_sin,
            host: None,
        }
    }

    /// A pass over `m` rows of a sequence that then has `positions`: several, `few.x`, behind attention only the last,
    /// with the step `last`; or that of a token that was drawn, `few.last.x`. It is left in `few.last.x`.
    fn few<H: GpuHead>(
        self,
        head: &'a H,
        m: usize,
        positions: usize,
        last: Option<Step>,
    ) -> Pass<'a> {
        let model = head.model();
        let (on, kv_heads) = (self.context(model), model.config.num_key_value_heads);
        let own = &mut self.few.last;
        let (x, attended, last) = match last {
            None => (&mut own.x, &mut own.attended, None),
            Some(step) => {
                let (x, attended) = (&mut own.x, &mut own.attended);
                let last = LastRow { x, attended, step };
                (&mut self.few.x, &mut self.few.attended, Some(last))
            }
        };
        Pass {
            on,
            m,
            fused: Fused::in_step(m, MOST_SEQUENCES),
            rows: Rows {
                x,
                qkv: &mut self.few.qkv,
                rates: None,
                experts: own.experts.as_mut(),
                taps: None,
            },
            inputs: Inputs::Full {
                attended,
                gated: &mut own.gated,
                columns: &mut self.few.columns,
                prepares: true,
            },
            sequences: Sequences::Step {
                step: &mut self.few.step,
                scratch: &mut self.few.attention,
                shared: None,
                splits: AttentionScratch::splits(&model.gpu, kv_heads, m, positions),
                runs: true,
            },
            streams: None,
            ranks: None,
            observer: None,
            drafting: Some(Drafting {
                has_qkv: H::MAKES_QKV,
                last,
            }),
            adapted: None,
            state: PassState::default(),
        }
    }

    /// A pass over `m` rows, `many.x`, which only become keys and values.
    fn many<H: GpuHead>(self, head: &'a H, m: usize) -> Pass<'a> {
        let on = self.context(head.model());
        let many = self.many;
        Pass {
            on,
            m,
            fused: Fused::IN_PROMPTS,
            rows: Rows {
                x: &mut many.x,
                qkv: &mut many.qkv,
                rates: None,
                experts: None,
                taps: None,
            },
            inputs: Inputs::Half {
                halves: &mut many.halves,
                full: None,
                sums: None,
            },
            sequences: Sequences::Prompts {
                rows: &many.rows,
                spans: &[],
                recurrent: None,
            },
            streams: None,
            ranks: None,
            observer: None,
            drafting: Some(Drafting {
                has_qkv: H::MAKES_QKV,
                last: None,
            }),
            adapted: None,
            state: PassState::default(),
        }
    }
}

/// A model of one layer, which drafts for another model, on that model's GPU.
struct DraftModel {
    gpu: Gpu,
    sizes: DraftLayer,
    config: ModelConfig,
    rotary: Rotary,
    /// The layer, which begins with attention.
    layers: CudaLayers,
    /// Gains of the norm before the head.
    norm: Buffer<f32>, // [hidden]
    /// The matrix that gives logits `[drafted, hidden]`, if it is not the other model's.
    head: Option<DeviceLinear>,
    /// The matrix of tokens `[vocab, hidden]`, if it is not the other model's.
    embedding: Option<DeviceLinear>,
    /// The other model's token for each that is drafted, if they differ.
    ids: Option<Checked<u32>>,
}

impl DraftModel {
    fn head<'a>(&'a self, target: &'a CudaModel) -> &'a DeviceLinear {
        self.head.as_ref().unwrap_or(&target.head)
    }

    fn embedding<'a>(&'a self, target: &'a CudaModel) -> &'a DeviceLinear {
        self.embedding.as_ref().unwrap_or(target.embedding())
    }
}

/// A layer that drafts: how its input is made.
trait GpuHead: Send + Sync + 'static {
    /// The error of values that overflow or are no numbers.
    const NOT_FINITE: Error;

    /// True if queries, keys and values are part of its input, as they are made of more than the residual stream.
    const MAKES_QKV: bool;

    fn model(&self) -> &DraftModel;

    /// Computes the layer's input `many.x` of `n` rows, `many.embedded` and `many.streams`.
    fn many_input(&self, on: &mut On<'_>, n: usize) -> Result<()>;

    /// Computes the layer's input `few.x` of `n` rows, `few.embedded` and the streams `held`.
    fn few_input(&self, on: &mut On<'_>, held: &Buffer<f32>, n: usize) -> Result<()>;

    /// Makes the layer's output `few.last.x` its input of the token that was drawn behind it, `few.embedded`.
    fn drawn_input(&self, on: &mut On<'_>) -> Result<()>;
}

/// The drafter of a layer; its target's session holds the other reference.
#[derive(Clone)]
pub(super) struct StreamRun(Arc<Mutex<dyn Run>>);

/// A [`DraftState`] of any layer.
trait Run: Send {
    fn take(
        &mut self,
        slot: usize,
        position: usize,
        tokens: &[u32],
        streams: &Buffer<f32>,
        row: usize,
    ) -> Result<()>;

    fn truncate(&mut self, slot: usize, len: usize);

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<()>;

    fn draft(&mut self, draft: &mut Draft<'_>) -> Result<()>;
}

impl StreamRun {
    /// Drafts with `head` in `memory` for a session of `spec` of `target`, in whose `stream` all work is queued. Returns also
    /// the buffers for the streams of the session's rows.
    ///
    /// # Errors
    /// A head on another device; errors of the device.
    pub(super) fn new(
        head: &StreamHead,
        target: &Arc<CudaModel>,
        stream: &Stream,
        spec: &SessionSpec,
        memory: DraftMemory,
    ) -> Result<(Self, [Buffer<f32>; 2])> {
        match (head.weights::<CudaMtp>(), head.weights::<CudaEagle>()) {
            (Some(layer), _) => DraftState::open(&layer, target, stream, spec, memory),
            (None, Some(eagle)) => DraftState::open(&eagle, target, stream, spec, memory),
            (None, None) => unreachable!("a layer that drafts is an MTP layer or an EAGLE-3 head"),
        }
    }

    fn state(&self) -> MutexGuard<'_, dyn Run + 'static> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over the streams of `tokens`, which stand at `position` of the sequence in `slot`: rows of `streams`
    /// `[., streams of a row]` from `row` on.
    pub(super) fn take(
        &self,
        slot: usize,
        position: usize,
        tokens: &[u32],
        streams: &Buffer<f32>,
        row: usize,
    ) -> Result<()> {
        self.state().take(slot, position, tokens, streams, row)
    }

    /// Knows of the sequence in `to` what it knows of the first `len` tokens of that in `from`.
    pub(super) fn fork(&self, from: usize, to: usize, len: usize) -> Result<()> {
        self.state().fork(from, to, len)
    }

    /// Forgets what is past the first `len` tokens of the sequence in `slot`.
    pub(super) fn truncate(&self, slot: usize, len: usize) {
        self.state().truncate(slot, len);
    }
}

impl Drafter for StreamRun {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        let mut state = self.state();
        drafts.iter_mut().try_for_each(|draft| state.draft(draft))
    }

    fn reads_streams(&self) -> bool {
        true
    }
}

/// What the layer knows of a sequence. The number of its rows that have keys and values is its length in the page
/// tables.
struct Slot {
    /// Position of the first token whose streams are known.
    first: usize,
    /// Tokens from there on whose streams are known.
    tokens: Vec<u32>,
    /// Streams of the last tokens, which have no keys and values yet: `[MOST_RUN, streams of a row]`.
    held: Buffer<f32>,
}

struct DraftState<H> {
    // Buffers go before the stream that works on them.
    few: Few,
    many: Many,
    pages: DevicePages,
    cos_sin: Buffer<[f32; 2]>, // [ctx padded, rotary_dims / 2]
    tables: PageTables,
    placed: Vec<Vec<u32>>,
    slots: Vec<Slot>,
    ctx: usize,
    stream: Stream,
    target: Arc<CudaModel>,
    head: Arc<H>,
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
    let holds_dependents = true;
    match columns {
        Some(columns) if m > 1 => stream.gemv_batch(w, x, out, columns, m, holds_dependents)?,
        _ => stream.gemv(w, x, out, holds_dependents)?,
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

impl<H: GpuHead> Run for DraftState<H> {
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

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<()> {
        let width = self.head.model().sizes.streams();
        let Ok([source, known]) = self.slots.get_disjoint_mut([from, to]) else {
            return Ok(());
        };
        let all = (source.tokens.len()).min(len.saturating_sub(source.first));
        // The last row's next token may be another one now: see `truncate`.
        let rows = self.tables.len(from).min(all);
        self.tables.fork(from, to, rows)?;
        known.first = source.first;
        known.tokens = source.tokens[..all].to_vec();
        if all > rows {
            self.stream.copy_rows(CopiedRows {
                from: &source.held,
                begin: rows_at(0, width),
                to: &mut known.held,
                end: rows_at(0, width),
                rows: all - rows,
                width,
            })?;
        }
        Ok(())
    }

    fn take(
        &mut self,
        slot: usize,
        position: usize,
        tokens: &[u32],
        streams: &Buffer<f32>,
        row: usize,
    ) -> Result<()> {
        self.truncate(slot, position);
        let width = self.head.model().sizes.streams();
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
        let all = waiting + tokens.len();
        if all <= MOST_RUN {
            return Ok(self.stream.copy_rows(CopiedRows {
                from: streams,
                begin: rows_at(row, width),
                to: &mut known.held,
                end: rows_at(waiting, width),
                rows: tokens.len(),
                width,
            })?);
        }
        // The next token is known of all rows but the last.
        if no_page(self.reserve(slot, all - 1))? {
            self.forget(slot);
            return Ok(());
        }
        for at in (0..all - 1).step_by(ROWS) {
            let n = ROWS.min(all - 1 - at);
            let waited = waiting.saturating_sub(at).min(n);
            if waited > 0 {
                self.stream.copy_rows(CopiedRows {
                    from: &self.slots[slot].held,
                    begin: rows_at(at, width),
                    to: &mut self.many.streams,
                    end: rows_at(0, width),
                    rows: waited,
                    width,
                })?;
            }
            self.stream.copy_rows(CopiedRows {
                from: streams,
                begin: rows_at(row + at + waited - waiting, width),
                to: &mut self.many.streams,
                end: rows_at(waited, width),
                rows: n - waited,
                width,
            })?;
            self.feed_many(slot, n)?;
        }
        Ok(self.stream.copy_rows(CopiedRows {
            from: streams,
            begin: rows_at(row + tokens.len() - 1, width),
            to: &mut self.slots[slot].held,
            end: rows_at(0, width),
            rows: 1,
            width,
        })?)
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
        let vocab = self.head.model().sizes.vocab;
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
        let part = self.head_part(text);
        for i in 0..most {
            self.draw(part.as_ref())?;
            if i + 1 < most {
                self.feed_drawn(done + n + i + 1)?;
            }
        }
        self.stream.synchronize()?;
        for i in 0..most {
            match self.few.last.ring.load(i) {
                token if (token as usize) < vocab => draft.tokens.push(token),
                NO_NUMBER => return Err(H::NOT_FINITE),
                _ => break,
            }
        }
        Ok(())
    }
}

impl<H: GpuHead> DraftState<H> {
    /// See [`StreamRun::new`].
    fn open(
        head: &Arc<H>,
        target: &Arc<CudaModel>,
        stream: &Stream,
        spec: &SessionSpec,
        memory: DraftMemory,
    ) -> Result<(StreamRun, [Buffer<f32>; 2])> {
        let (gpu, model) = (&target.gpu, head.model());
        if model.gpu.info().ordinal != gpu.info().ordinal {
            return Err(Error::Unsupported {
                engine: "nq",
                what: "a layer that drafts on another device than its model",
                expected: gpu.info().to_string(),
                found: model.gpu.info().to_string(),
            });
        }
        let mut cos_sin = memory.cos_sin;
        let positions = memory.pages.places().positions;
        cos_sin.write(0, &model.rotary.pairs(positions))?;
        let slot = |held| Slot {
            first: 0,
            tokens: Vec::new(),
            held,
        };
        let state = DraftState {
            few: memory.few,
            many: memory.many,
            tables: PageTables::new(spec),
            placed: vec![Vec::new(); spec.slots],
            slots: memory.held.into_iter().map(slot).collect(),
            ctx: spec.ctx,
            stream: stream.clone(),
            target: Arc::clone(target),
            head: Arc::clone(head),
            cos_sin,
            pages: memory.pages,
        };
        Ok((StreamRun(Arc::new(Mutex::new(state))), memory.tapped))
    }

    /// The layer, and what its operations work on.
    fn on(&mut self) -> (&H, On<'_>) {
        let on = On {
            stream: &self.stream,
            target: &self.target,
            pages: &self.pages,
            cos_sin: &self.cos_sin,
            few: &mut self.few,
            many: &mut self.many,
            slots: &self.slots,
        };
        (&self.head, on)
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
            &mut self.tables,
            &mut self.placed[..],
            &mut self.pages,
            [(slot, rows)].into_iter(),
        )
    }

    /// Computes keys and values of the next `n` rows of the sequence in `slot`, whose streams are in `many.streams`.
    fn feed_many(&mut self, slot: usize, n: usize) -> Result<()> {
        let done = self.tables.len(slot);
        let (head, mut on) = self.on();
        let (stream, many) = (on.stream, &mut *on.many);
        let row = |i: usize| Row {
            position: (done + i) as i32,
            slot: slot as i32,
            ..Row::default()
        };
        let rows: Vec<Row> = (0..n).map(row).collect();
        stream.write_checked(&mut many.rows, &rows)?;
        let tokens = &on.slots[slot].tokens[done + 1..][..n];
        stream.write_checked(&mut many.tokens, tokens)?;
        let embedding = head.model().embedding(on.target);
        stream.embed(embedding, &many.tokens, &mut many.embedded, n)?;
        head.many_input(&mut on, n)?;
        on.many(head, n).fill(&head.model().layers.all[0])?;
        self.tables.advance(slot, n);
        Ok(())
    }

    /// Runs the layer over the next rows of the sequence in `slot`: those of `tokens`, with the streams that are
    /// held. Leaves the last row in `few.last.x`.
    fn feed_few(&mut self, slot: usize, tokens: &[u32]) -> Result<()> {
        let (n, done) = (tokens.len(), self.tables.len(slot));
        let (head, mut on) = self.on();
        let (stream, few) = (on.stream, &mut *on.few);
        let step = |i: usize| Step {
            position: (done + i) as i32,
            slot: slot as i32,
            ..Step::default()
        };
        let steps: Vec<Step> = (0..n).map(step).collect();
        stream.put_checked(&mut few.step, 0, &steps)?;
        stream.put_checked(&mut few.tokens, 0, tokens)?;
        let embedding = head.model().embedding(on.target);
        stream.embed(embedding, &few.tokens, &mut few.embedded, n)?;
        let held = &on.slots[slot].held;
        head.few_input(&mut on, held, n)?;
        let mut pass = on.few(head, n, done + n, Some(steps[n - 1]));
        Ok(head.model().layers.all[0].run(&mut pass)?)
    }

    /// Runs the layer over the token that was drawn last, whose embedding is in `few.embedded`. The sequence then
    /// has `positions` rows.
    fn feed_drawn(&mut self, positions: usize) -> Result<()> {
        let (head, mut on) = self.on();
        head.drawn_input(&mut on)?;
        let mut pass = on.few(head, 1, positions, None);
        Ok(head.model().layers.all[0].run(&mut pass)?)
    }

    /// The rows of the head of the tokens that the next ones of `text` probably are; `None` if all may be.
    fn head_part(&self, text: &[u32]) -> Option<DeviceLinear> {
        let model = self.head.model();
        let head = model.head(&self.target);
        match model.ids {
            None => head.first_rows(frequent_tokens(text, head.rows())),
            Some(_) => None,
        }
    }

    /// Draws the likeliest token after `few.last.x` to the ring, of the whole head or of a `part` of it, advances the step and
    /// looks the token up.
    fn draw(&mut self, part: Option<&DeviceLinear>) -> Result<()> {
        let (head, on) = self.on();
        let (target, model, last) = (on.target, head.model(), &mut on.few.last);
        let drawn = part.unwrap_or(model.head(target));
        let norm = Norm {
            gain: &model.norm,
            eps: model.config.rms_norm_eps,
        };
        let out = GemvOutput::Head(Some(norm), &mut last.logits, &mut last.best);
        (on.stream).gemv(drawn, &last.x, out, true)?;
        (on.stream).advance(Advance {
            m: 1,
            candidates: None,
            logits: &last.logits,
            best: &last.best,
            blocks: best_len(&target.gpu, drawn, 1)?,
            sampling: &last.sampling,
            adjust: &mut last.adjust,
            step: &mut on.few.step,
            ring: &mut last.ring,
            logprobs: &mut last.logprobs,
            ring_len: RING,
            ids: model.ids.as_ref(),
            embedding: model.embedding(target),
            x: &mut on.few.embedded,
            idle: on.pages.idle_slot(),
        })?;
        Ok(())
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
