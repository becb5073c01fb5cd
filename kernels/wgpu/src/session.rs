//! [`Session`] on an adapter: rows of chunks go through the layers in passes, whose commands are submitted together.

use crate::ahead::Seats;
use crate::engine::WgpuModel;
use crate::gpu::LaunchPass;
use crate::product::STEP_ROWS;
use crate::program::{Attended, Buffers, Program};
use crate::sizes::{DRAW_PARTS, SPLITS, Sizes};
use crate::timer::Timer;
use nq_kernels::pages::PAGE;
use nq_runtime::checks::{all_finite, check_bytes, check_chunks};
use nq_runtime::interface::{
    Chunk, Logits, Observer, Pages, PlacedImage, Session, SessionSpec, StepsAhead,
};
use nq_runtime::kv::{PageCopy, PageTables};
use nq_runtime::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use wgpu::CommandBuffer;

/// Sequences in progress over a [`WgpuModel`].
pub(crate) struct WgpuSession {
    model: Arc<WgpuModel>,
    spec: SessionSpec,
    sizes: Sizes,
    tables: PageTables,
    buffers: Buffers,
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

/// Pages whose keys a workgroup reads in about as long as a launch takes that joins parts.
const UNSPLIT: usize = 3;

/// What the commands of a step depend on, in which every sequence has one row that wants logits: they are written while
/// the step before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StepShape {
    rows: usize,
    /// Parts in which keys are read.
    splits: usize,
    /// True if the device draws tokens, instead of copying logits to the host.
    draws: bool,
}

/// A step whose tokens the device draws.
struct Drawing {
    rows: usize,
    timer: Option<Timer>,
}

/// Consecutive rows of a chunk in a pass.
struct Span {
    chunk: usize,
    /// Of the chunk's tokens.
    tokens: Range<usize>,
}

/// What the host writes for a pass.
#[derive(Default)]
struct Batch {
    words: Vec<u32>,
    stream: Vec<f32>,
    turns: Vec<(f32, f32)>,
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
        let buffers = Buffers::new(&model.gpu, &sizes, model.config.num_hidden_layers)?;
        let program = Program::new(&model, &buffers)?;
        model.gpu.finish()?;
        Ok(WgpuSession {
            tables: PageTables::new(&spec),
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
        self.reserve(chunks)?;
        self.logits.clear();
        for spans in passes(chunks, self.sizes.rows) {
            self.pass(chunks, &spans, wanted)?;
        }
        Ok(())
    }

    /// Makes room for the rows of chunks.
    fn reserve(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        let vocab = self.vocab();
        check_chunks(chunks, &self.spec, vocab, |slot| self.tables.len(slot))?;
        let growth = chunks.iter().map(|c| (c.slot, c.tokens.len()));
        let copies = self.tables.reserve(growth)?;
        self.copy_pages(&copies);
        Ok(())
    }

    fn copy_pages(&self, copies: &[PageCopy]) {
        if copies.is_empty() {
            return;
        }
        let gpu = &self.model.gpu;
        let mut encoder = gpu.encoder();
        let (b, page) = (&self.buffers, self.sizes.page as u64);
        for copy in copies {
            let [from, to] = [copy.from, copy.to].map(|at| u64::from(at) * page);
            // Whole pages: what is behind the rows in common is written before it is read.
            for buffer in b.keys.iter().chain(&b.values) {
                encoder.copy_buffer_to_buffer(buffer, from, &b.page, 0, page);
                encoder.copy_buffer_to_buffer(&b.page, 0, buffer, to, page);
            }
        }
        gpu.submit(encoder);
    }

    /// Writes what `spans` feed to the device.
    fn write(&mut self, chunks: &[Chunk<'_>], spans: &[Span]) -> Result<RowsLayout> {
        let rows: usize = spans.iter().map(|s| s.tokens.len()).sum();
        let tile = match rows <= STEP_ROWS {
            true => 1,
            false => self.program.heads.tile(),
        };
        let (model, b) = (&self.model, &self.buffers);
        let layout = (self.batch).fill(model, chunks, spans, &self.tables, tile)?;
        let gpu = &model.gpu;
        gpu.write(&b.batch, 0, bytemuck::cast_slice(&self.batch.words));
        gpu.write(&b.stream, 0, bytemuck::cast_slice(&self.batch.stream));
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
                Wanted::Logits => &b.logits,
                Wanted::Hidden => &b.head_in,
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
            true => (&b.best, &b.drawn, 8 * DRAW_PARTS),
            false => (&b.logits, &b.results, 4 * model.config.vocab_size),
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
        self.reserve(chunks)?;
        for spans in passes(chunks, self.sizes.rows) {
            let layout = self.write(chunks, &spans)?;
            let shape = layout.shape(true);
            let shape = shape.expect("sequences of a step have one row, whose token is drawn");
            self.drawing = Some(Drawing {
                rows: shape.rows,
                timer: self.submit_step(shape, &layout)?,
            });
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

/// The rows of chunks, in passes of up to `most`.
fn passes(chunks: &[Chunk<'_>], most: usize) -> Vec<Vec<Span>> {
    let (mut all, mut spans, mut room) = (Vec::new(), Vec::new(), most);
    for (chunk, Chunk { tokens, .. }) in chunks.iter().enumerate() {
        let mut at = 0;
        while at < tokens.len() {
            let end = tokens.len().min(at + room);
            spans.push(Span {
                chunk,
                tokens: at..end,
            });
            room -= end - at;
            at = end;
            if room == 0 {
                all.push(std::mem::take(&mut spans));
                room = most;
            }
        }
    }
    if !spans.is_empty() {
        all.push(spans);
    }
    all
}

/// Where things are in [`Batch::words`], and what a pass computes.
struct RowsLayout {
    /// `Step` of the kernels.
    step: [u32; 8],
    attended: Attended,
    wanted_at: usize,
    wanted: usize,
    /// Parts in which the next step reads keys.
    next_splits: usize,
}

impl RowsLayout {
    /// The shape of the step, if it is one.
    fn shape(&self, draws: bool) -> Option<StepShape> {
        let a = self.attended;
        let is_step = a.alone && a.rows <= STEP_ROWS && self.wanted == a.rows;
        is_step.then_some(StepShape {
            rows: a.rows,
            splits: a.splits,
            draws,
        })
    }
}

/// Parts in which keys in up to `pages` pages are read by passes of `rows` rows, and the pages of each.
fn parts(pages: usize, rows: usize) -> (usize, usize) {
    let parts = match rows <= STEP_ROWS && pages > UNSPLIT {
        true => pages.min(SPLITS),
        false => 1,
    };
    let each = pages.div_ceil(parts);
    // Fewer, if the pages of each are rounded up.
    (pages.div_ceil(each), each)
}

impl Batch {
    /// Fills in the rows of `spans`: positions and page tables, tiles of up to `tile` rows, wanted rows.
    fn fill(
        &mut self,
        model: &WgpuModel,
        chunks: &[Chunk<'_>],
        spans: &[Span],
        tables: &PageTables,
        tile: usize,
    ) -> Result<RowsLayout> {
        let (h, half) = (model.config.hidden_size, model.config.rotary_dims() / 2);
        let rows: usize = spans.iter().map(|s| s.tokens.len()).sum();
        self.words.clear();
        self.stream.resize(rows * h, 0.0);
        self.turns.resize(half, (0.0, 0.0));
        let (mut tiles, mut wanted, mut pages) = (Vec::new(), Vec::new(), Vec::new());
        let mut turns: Vec<u32> = Vec::with_capacity(2 * rows * half);
        let (mut row, mut most_pages, mut next_pages, mut seen) = (0, 1, 1, 0);
        for span in spans {
            let chunk = &chunks[span.chunk];
            let table = pages.len();
            let position = tables.len(chunk.slot) + span.tokens.start;
            let end = position + span.tokens.len();
            let used = end.div_ceil(PAGE);
            most_pages = most_pages.max(used);
            next_pages = next_pages.max((end + 1).div_ceil(PAGE));
            seen += end;
            pages.extend_from_slice(&tables.all()[chunk.slot][..used]);
            for first in (0..span.tokens.len()).step_by(tile) {
                let count = tile.min(span.tokens.len() - first);
                tiles.extend([row + first, count, position + first, table].map(|n| n as u32));
            }
            let asked = chunk.logits.rows(chunk.tokens.len());
            for token in span.tokens.clone() {
                let at = row + token - span.tokens.start;
                let position = tables.len(chunk.slot) + token;
                self.words.extend([position as u32, table as u32]);
                model.rotary.row(position, &mut self.turns);
                let values = self.turns.iter().flat_map(|&(cos, sin)| [cos, sin]);
                turns.extend(values.map(f32::to_bits));
                let x = &mut self.stream[at * h..(at + 1) * h];
                model
                    .embedding
                    .dequantize_row(chunk.tokens[token] as usize, x)?;
                if asked.contains(&token) {
                    wanted.push(at as u32);
                }
            }
            row += span.tokens.len();
        }
        let (splits, split_pages) = parts(most_pages, rows);
        let attended = Attended {
            rows,
            tiles: tiles.len() / 4,
            splits,
            alone: spans.iter().all(|s| s.tokens.len() == 1),
            // Keys and values of two bytes.
            bytes: 4 * seen * model.config.kv_dim(),
        };
        let tiles_at = self.words.len();
        self.words.extend(tiles);
        let wanted_at = self.words.len();
        self.words.extend(&wanted);
        let tables_at = self.words.len();
        self.words.extend(pages);
        let turns_at = self.words.len();
        self.words.extend(turns);
        let step = [
            rows,
            attended.tiles,
            attended.splits,
            split_pages,
            tiles_at,
            wanted_at,
            tables_at,
            turns_at,
        ];
        Ok(RowsLayout {
            step: step.map(|n| n as u32),
            attended,
            wanted_at,
            wanted: wanted.len(),
            next_splits: parts(next_pages, rows).0,
        })
    }
}

impl Session for WgpuSession {
    fn spec(&self) -> SessionSpec {
        self.spec
    }

    fn len(&self, slot: usize) -> usize {
        self.tables.len(slot)
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        self.tables.truncate(slot, len);
        self.tables.len(slot)
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        self.tables.fork(from, to, len)?;
        Ok(len)
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

impl Pages for WgpuSession {
    fn free(&self) -> usize {
        self.tables.free_pages()
    }

    fn page_bytes(&self) -> usize {
        2 * self.model.config.num_hidden_layers * self.sizes.page
    }

    fn read(&mut self, slot: usize, index: usize, out: &mut Vec<u8>) -> Result<()> {
        let page = u64::from(self.tables.whole_page(slot, index)?);
        let (gpu, b, bytes) = (&self.model.gpu, &self.buffers, self.sizes.page);
        let mut values: Vec<f32> = Vec::new();
        for buffer in b.keys.iter().zip(&b.values).flat_map(|(k, v)| [k, v]) {
            let staging = gpu.staging(bytes)?;
            let mut encoder = gpu.encoder();
            encoder.copy_buffer_to_buffer(buffer, page * bytes as u64, &staging, 0, bytes as u64);
            gpu.submit(encoder);
            values.clear();
            gpu.read(&staging, bytes, &mut values)?;
            out.extend_from_slice(bytemuck::cast_slice(&values));
        }
        Ok(())
    }

    fn append(&mut self, slot: usize, page: &[u8]) -> Result<()> {
        check_bytes("a page of keys and values", page, self.page_bytes())?;
        let at = self.tables.append_page(slot, self.spec.ctx)? as usize;
        let (b, bytes) = (&self.buffers, self.sizes.page);
        let buffers = b.keys.iter().zip(&b.values).flat_map(|(k, v)| [k, v]);
        for (buffer, part) in buffers.zip(page.chunks_exact(bytes)) {
            self.model.gpu.write(buffer, at * bytes, part);
        }
        self.model.gpu.finish()
    }
}
