//! [`Session`] on an adapter: rows of chunks go through the layers in passes, whose commands are submitted together.

use crate::ahead::Seats;
use crate::buffers::Buffers;
use crate::gpu::LaunchPass;
use crate::kernels::DRAW_PARTS;
use crate::model::WgpuModel;
use crate::product::STEP_ROWS;
use crate::program::{Attended, Program};
use crate::rows::{Batch, Mark, RowsLayout, Span, StepShape, passes};
use crate::sizes::{Part, Sizes};
use crate::timer::Timer;
use nq_runtime::checks::{all_finite, check_chunks, check_states};
use nq_runtime::interface::{
    Chunk, Logits, Observer, Pages, PlacedImage, Session, SessionSpec, StepsAhead,
};
use nq_runtime::kv::PageTables;
use nq_runtime::states::Snapshots;
use nq_runtime::{Error, Result};
use std::sync::Arc;
use wgpu::CommandBuffer;

/// Sequences in progress over a [`WgpuModel`].
pub(crate) struct WgpuSession {
    pub(crate) model: Arc<WgpuModel>,
    pub(crate) spec: SessionSpec,
    pub(crate) sizes: Sizes,
    pub(crate) tables: PageTables,
    pub(crate) snapshots: Snapshots,
    pub(crate) stateless: Vec<bool>, // [slots]: pages were appended, whose states are missing
    pub(crate) buffers: Buffers,
    program: Program,
    batch: Batch,
    /// Commands of the step that follows the last one, if nothing else does.
    prepared: Option<(StepShape, CommandBuffer)>,
    drawing: Option<Drawing>,
    pub(crate) seats: Seats,
    logits: Vec<f32>, // [rows wanted, vocab], or [rows wanted, hidden]
}

/// Layers of prompts whose commands are submitted together: the device computes them while the host writes those of the
/// next.
const SUBMITTED: usize = 6;

/// A step whose tokens the device draws.
struct Drawing {
    rows: usize,
    timer: Option<Timer>,
}

/// What is made of the rows that want logits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Logits,
    Hidden,
}

impl WgpuSession {
    /// Allocates it and compiles the kernels of passes that all sessions run.
    ///
    /// # Errors
    /// [`Error::Device`] if memory is short.
    pub(crate) fn new(model: Arc<WgpuModel>, spec: SessionSpec) -> Result<Self> {
        let sizes = Sizes::new(&model, &spec);
        let buffers = Buffers::new(&model.gpu, &sizes, &model.config)?;
        let program = Program::new(&model, &buffers, spec.kv)?;
        model.gpu.finish()?;
        Ok(WgpuSession {
            tables: PageTables::new(&spec),
            snapshots: Snapshots::new(spec.slots, spec.snapshot_count(), spec.slots),
            stateless: vec![false; spec.slots],
            batch: Batch::default(),
            prepared: None,
            drawing: None,
            seats: Seats::new(spec.slots.min(sizes.rows).min(STEP_ROWS)),
            logits: Vec::new(),
            model,
            spec,
            sizes,
            buffers,
            program,
        })
    }

    /// Runs chunks: `logits` gets what is wanted. The sequences' lengths stay the old ones.
    fn run(&mut self, chunks: &[Chunk<'_>], wanted: Wanted) -> Result<()> {
        let marks = self.reserve(chunks)?;
        self.logits.clear();
        for spans in passes(chunks, &marks, self.sizes.rows) {
            let computed = self.pass(chunks, &spans, wanted);
            computed.inspect_err(|_| self.lose(chunks))?;
            for span in &spans {
                let slot = chunks[span.chunk].slot;
                let ends = |mark: &Mark| mark.rows == span.tokens.end;
                if let Some(mark) = marks[span.chunk].filter(ends) {
                    self.copy_states(slot, mark.place);
                }
            }
        }
        Ok(())
    }

    /// Makes room for the rows of chunks. Returns where the states of each are to be kept.
    fn reserve(&mut self, chunks: &[Chunk<'_>]) -> Result<Vec<Option<Mark>>> {
        let vocab = self.vocab();
        check_chunks(chunks, &self.spec, vocab, |slot| self.tables.len(slot))?;
        check_states(chunks, &self.stateless)?;
        let growth = chunks.iter().map(|c| (c.slot, c.tokens.len()));
        let copies = self.tables.reserve(growth)?;
        let moves = copies.iter().map(|c| (c.from as usize, c.to as usize));
        // Whole pages: what is behind the rows in common is written before it is read.
        let moves: Vec<_> = moves.collect();
        self.copy_parts(&self.buffers.pages(&self.sizes), &moves);
        let due = chunks.iter().map(|c| {
            let (position, rows) = (self.tables.len(c.slot), c.tokens.len());
            let due = self.snapshots.due(c.slot, position, rows, 1);
            due.map(|(rows, place)| Mark { rows, place })
        });
        Ok(due.collect())
    }

    /// Writes what `spans` feed to the device.
    fn write(&mut self, chunks: &[Chunk<'_>], spans: &[Span]) -> Result<RowsLayout> {
        let (model, b, heads) = (&self.model, &self.buffers, &self.program.heads);
        let layout = (self.batch).fill(model, chunks, spans, &self.tables, heads)?;
        let gpu = &model.gpu;
        gpu.write(&b[Part::Batch], 0, bytemuck::cast_slice(&self.batch.words));
        gpu.write(
            &b[Part::Stream],
            0,
            bytemuck::cast_slice(&self.batch.stream),
        );
        gpu.write(&b.step, 0, bytemuck::cast_slice(&layout.step));
        Ok(layout)
    }

    /// Computes rows, and appends what is wanted of them to `logits`.
    fn pass(&mut self, chunks: &[Chunk<'_>], spans: &[Span], wanted: Wanted) -> Result<()> {
        let layout = self.write(chunks, spans)?;
        if let (Some(shape), Wanted::Logits) = (layout.shape(false), wanted) {
            let timer = self.submit_step(shape, &layout)?;
            let (gpu, vocab) = (&self.model.gpu, self.model.config.vocab_size);
            let bytes = 4 * shape.rows * vocab;
            gpu.read(&self.buffers.results, bytes, &mut self.logits)?;
            return timer.map_or(Ok(()), |timer| timer.count(gpu));
        }
        let model = Arc::clone(&self.model);
        let (gpu, c, b) = (&model.gpu, &model.config, &self.buffers);
        let (rows, mut step) = (layout.attended.rows, layout.step);
        let width = match wanted {
            Wanted::Logits => c.vocab_size,
            Wanted::Hidden => c.hidden_size,
        };
        let mut timer = gpu.timer()?;
        let mut encoder = gpu.encoder();
        let count = model.layers.len();
        for first in (0..count).step_by(SUBMITTED) {
            let last = count.min(first + SUBMITTED);
            {
                let mut pass = LaunchPass::new(&mut encoder, timer.as_mut());
                self.program
                    .layers(gpu, &mut pass, first..last, layout.attended)?;
            }
            // The first rows of the head are submitted with the last layers.
            if last < count {
                gpu.submit(std::mem::replace(&mut encoder, gpu.encoder()));
            }
        }
        let mut done = 0;
        loop {
            let together = (layout.wanted - done).min(self.sizes.head_rows);
            if together > 0 {
                step[0] = together as u32;
                step[5] = (layout.wanted_at + done) as u32;
                gpu.write(&b.head_step, 0, bytemuck::cast_slice(&step));
                let mut pass = LaunchPass::new(&mut encoder, timer.as_mut());
                let logits = wanted == Wanted::Logits;
                self.program
                    .head(gpu, &mut pass, together, rows == 1, logits)?;
            }
            let bytes = 4 * together * width;
            let from = match wanted {
                Wanted::Logits => &b[Part::Logits],
                Wanted::Hidden => &b[Part::HeadIn],
            };
            if bytes > 0 {
                encoder.copy_buffer_to_buffer(from, 0, &b.results, 0, bytes as u64);
            }
            // Further rows of the head are not timed.
            if let Some(timer) = &timer {
                timer.resolve(&mut encoder);
            }
            gpu.submit(encoder);
            match bytes {
                0 => gpu.finish()?,
                _ => gpu.read(&b.results, bytes, &mut self.logits)?,
            }
            if let Some(timer) = timer.take() {
                timer.count(gpu)?;
            }
            done += together;
            if done == layout.wanted {
                return Ok(());
            }
            encoder = gpu.encoder();
        }
    }

    /// Submits a step whose rows are written, and prepares the commands of the next one while the device computes.
    /// Returns what times it, if that is wanted.
    fn submit_step(&mut self, shape: StepShape, layout: &RowsLayout) -> Result<Option<Timer>> {
        let model = Arc::clone(&self.model);
        let gpu = &model.gpu;
        let mut timer = gpu.timer()?;
        let prepared = self.prepared.take();
        let prepared = prepared.filter(|(known, _)| *known == shape && timer.is_none());
        let commands = match prepared {
            Some((_, commands)) => commands,
            None => self.encode_step(shape, layout.attended.bytes, timer.as_mut())?,
        };
        // All rows go through the head.
        let step = bytemuck::cast_slice(&layout.step);
        gpu.write(&self.buffers.head_step, 0, step);
        gpu.submit_finished(commands);
        if timer.is_none() {
            let next = StepShape {
                splits: layout.next_splits,
                ..shape
            };
            self.prepared = Some((next, self.encode_step(next, 0, None)?));
        }
        Ok(timer)
    }

    /// The commands of a step, whose attention reads `bytes` bytes of a layer.
    fn encode_step(
        &mut self,
        shape: StepShape,
        bytes: usize,
        mut timer: Option<&mut Timer>,
    ) -> Result<CommandBuffer> {
        let model = Arc::clone(&self.model);
        let (gpu, b, rows) = (&model.gpu, &self.buffers, shape.rows);
        let mut encoder = gpu.encoder();
        {
            let mut pass = LaunchPass::new(&mut encoder, timer.as_deref_mut());
            let attended = Attended {
                rows,
                tiles: rows,
                sequences: rows,
                splits: shape.splits,
                alone: true,
                bytes,
            };
            let layers = 0..model.layers.len();
            self.program.layers(gpu, &mut pass, layers, attended)?;
            self.program.head(gpu, &mut pass, rows, rows == 1, true)?;
            if shape.draws {
                self.program.draw(&mut pass, rows);
            }
        }
        let (from, to, each) = match shape.draws {
            true => (&b[Part::Best], &b.drawn, 8 * DRAW_PARTS),
            false => (&b[Part::Logits], &b.results, 4 * model.config.vocab_size),
        };
        encoder.copy_buffer_to_buffer(from, 0, to, 0, (rows * each) as u64);
        if let Some(timer) = timer {
            timer.resolve(&mut encoder);
        }
        Ok(encoder.finish())
    }

    /// Queues a step of one row of each of these sequences, whose tokens the device draws.
    ///
    /// # Errors
    /// As [`Session::forward`].
    pub(crate) fn queue_step(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        let marks = self.reserve(chunks)?;
        // States are kept behind the one row of a chunk, if at all.
        for spans in passes(chunks, &[], self.sizes.rows) {
            let layout = self.write(chunks, &spans)?;
            let shape = layout.shape(true);
            let shape = shape.expect("sequences of a step have one row, whose token is drawn");
            self.drawing = Some(Drawing {
                rows: shape.rows,
                timer: self.submit_step(shape, &layout)?,
            });
        }
        for (chunk, mark) in chunks.iter().zip(marks) {
            if let Some(mark) = mark {
                self.copy_states(chunk.slot, mark.place);
            }
        }
        self.advance(chunks);
        Ok(())
    }

    /// Waits for the step of [`WgpuSession::queue_step`]: the best token of each of its rows, or that a logit is not
    /// finite.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(crate) fn drawn_tokens(&mut self) -> Result<Vec<Result<u32>>> {
        let Some(Drawing { rows, timer }) = self.drawing.take() else {
            return Ok(Vec::new());
        };
        let (gpu, mut words) = (&self.model.gpu, Vec::new());
        gpu.read(&self.buffers.drawn, 8 * DRAW_PARTS * rows, &mut words)?;
        if let Some(timer) = timer {
            timer.count(gpu)?;
        }
        Ok(words.chunks_exact(2 * DRAW_PARTS).map(best_token).collect())
    }

    /// Runs chunks without logits, and waits for them.
    ///
    /// # Errors
    /// As [`Session::forward`].
    pub(crate) fn run_prompts(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        self.run(chunks, Wanted::Logits)?;
        self.advance(chunks);
        Ok(())
    }

    pub(crate) fn vocab(&self) -> usize {
        self.model.config.vocab_size
    }

    fn advance(&mut self, chunks: &[Chunk<'_>]) {
        for chunk in chunks {
            self.tables.advance(chunk.slot, chunk.tokens.len());
        }
    }
}

/// The best of a row's tokens: `parts` are the best logits of parts of the vocabulary, in order, each with the bits of
/// its token.
pub(crate) fn best_token(parts: &[f32]) -> Result<u32> {
    let mut best = (f32::NEG_INFINITY, 0);
    for &[logit, token] in parts.as_chunks::<2>().0 {
        match token.to_bits() {
            u32::MAX => return Err(Error::LogitsNotFinite),
            token if logit > best.0 => best = (logit, token),
            _ => (),
        }
    }
    Ok(best.1)
}

impl Session for WgpuSession {
    fn spec(&self) -> SessionSpec {
        self.spec
    }

    fn len(&self, slot: usize) -> usize {
        self.tables.len(slot)
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        let mut len = len;
        if !self.ends_whole(slot, len) {
            len = self.resume(slot, slot, len);
            self.stateless[slot] = false;
        }
        self.snapshots.cut(slot, len);
        self.tables.truncate(slot, len);
        self.tables.len(slot)
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        self.tables.fork(from, to, len)?;
        if !self.recurrent() {
            return Ok(len);
        }
        self.snapshots.cut(to, 0);
        self.stateless[to] = false;
        let reached = if self.ends_whole(from, len) {
            self.copy_states(from, to);
            // The sequences part here: others may, too.
            if let Some(place) = self.snapshots.take(from, len) {
                self.copy_states(from, place);
            }
            len
        } else {
            self.resume(from, to, len)
        };
        self.snapshots.share(from, to, reached);
        self.tables.truncate(to, reached);
        Ok(reached)
    }

    fn reach(&self, slot: usize, len: usize) -> usize {
        match self.ends_whole(slot, len) {
            true => len.min(self.tables.len(slot)),
            false => self.snapshots.reach(slot, len),
        }
    }

    fn keep_at(&mut self, slot: usize, len: usize) {
        if self.recurrent() {
            self.snapshots.want(slot, len);
        }
    }

    fn snapshots(&self) -> (usize, usize) {
        match self.recurrent() {
            true => self.snapshots.count(),
            false => (0, 0),
        }
    }

    fn show(&mut self, _slot: usize, images: &[PlacedImage]) -> Result<()> {
        match images.len() {
            0 => Ok(()),
            n => Err(Error::Unsupported {
                engine: "nq over wgpu",
                what: "images",
                expected: "text, or --device cpu or cuda".into(),
                found: n.to_string(),
            }),
        }
    }

    fn pages(&mut self) -> Option<&mut dyn Pages> {
        Some(self)
    }

    fn ahead(&mut self) -> Option<&mut dyn StepsAhead> {
        Some(self)
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        if observer.is_some() {
            return Err(Error::Unsupported {
                engine: "nq over wgpu",
                what: "an observer of activations",
                expected: "--device cpu or cuda".into(),
                found: self.model.gpu.description.clone(),
            });
        }
        self.run(chunks, Wanted::Logits)?;
        if !all_finite(&self.logits) {
            self.lose(chunks);
            return Err(Error::LogitsNotFinite);
        }
        self.advance(chunks);
        Ok(Logits {
            data: &self.logits,
            vocab: self.model.config.vocab_size,
        })
    }

    fn hidden(&mut self, chunks: &[Chunk<'_>], out: &mut Vec<f32>) -> Result<()> {
        self.run(chunks, Wanted::Hidden)?;
        if !all_finite(&self.logits) {
            self.lose(chunks);
            return Err(Error::NotFinite {
                what: "the final norm behind the output",
                layer: self.model.layers.len() - 1,
            });
        }
        out.append(&mut self.logits);
        self.advance(chunks);
        Ok(())
    }
}
