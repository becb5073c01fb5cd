//! [`Session`] on an adapter: rows of chunks go through the layers in passes, whose commands are submitted together.

use crate::engine::WgpuModel;
use crate::gpu::Pass;
use crate::product::STEP_ROWS;
use crate::program::{Attended, Buffers, Program};
use crate::sizes::{SPLITS, Sizes};
use crate::timer::Timer;
use nq_kernels::pages::PAGE;
use nq_runtime::checks::{all_finite, check_bytes, check_chunks};
use nq_runtime::interface::{Chunk, Logits, Observer, Pages, PlacedImage, Session, SessionSpec};
use nq_runtime::kv::{PageCopy, PageTables};
use nq_runtime::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// Sequences in progress over a [`WgpuModel`].
pub(crate) struct WgpuSession {
    model: Arc<WgpuModel>,
    spec: SessionSpec,
    sizes: Sizes,
    tables: PageTables,
    buffers: Buffers,
    program: Program,
    batch: Batch,
    logits: Vec<f32>, // [rows wanted, vocab], or [rows wanted, hidden]
}

/// Layers whose commands are submitted first, and how many times more the next ones are: the device computes a layer in
/// several times as long as the host takes to write its commands, and begins early.
const SUBMITTED: usize = 2;
const GROWTH: usize = 3;

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
        let vocab = self.model.config.vocab_size;
        check_chunks(chunks, &self.spec, vocab, |slot| self.tables.len(slot))?;
        let growth = chunks.iter().map(|c| (c.slot, c.tokens.len()));
        let copies = self.tables.reserve(growth)?;
        self.copy_pages(&copies);
        self.logits.clear();
        for spans in passes(chunks, self.sizes.rows) {
            self.pass(chunks, &spans, wanted)?;
        }
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

    fn pass(&mut self, chunks: &[Chunk<'_>], spans: &[Span], wanted: Wanted) -> Result<()> {
        let model = Arc::clone(&self.model);
        let (gpu, c) = (&model.gpu, &model.config);
        let rows: usize = spans.iter().map(|s| s.tokens.len()).sum();
        let tile = match rows <= STEP_ROWS {
            true => 1,
            false => self.program.heads.tile(),
        };
        let layout = self.batch.fill(&model, chunks, spans, &self.tables, tile)?;
        let mut step = layout.step;
        let b = &self.buffers;
        gpu.write(&b.batch, 0, bytemuck::cast_slice(&self.batch.words));
        gpu.write(&b.stream, 0, bytemuck::cast_slice(&self.batch.stream));
        gpu.write(&b.step, 0, bytemuck::cast_slice(&step));
        let width = match wanted {
            Wanted::Logits => c.vocab_size,
            Wanted::Hidden => c.hidden_size,
        };
        let mut timer = match gpu.profile.is_on() {
            true => Some(Timer::new(gpu)?),
            false => None,
        };
        let mut encoder = gpu.encoder();
        let count = model.layers.len();
        let (mut first, mut together) = (0, SUBMITTED);
        while first < count {
            let layers = first..count.min(first + together);
            (first, together) = (layers.end, together * GROWTH);
            {
                let mut pass = Pass::new(&mut encoder, timer.as_mut());
                self.program
                    .layers(gpu, &mut pass, layers, layout.attended)?;
            }
            // The first rows of the head are submitted with the last layers.
            if first < count {
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
                let mut pass = Pass::new(&mut encoder, timer.as_mut());
                let logits = wanted == Wanted::Logits;
                self.program
                    .head(gpu, &mut pass, together, rows == 1, logits)?;
            }
            if let Some(timer) = &timer {
                timer.resolve(&mut encoder);
            }
            let bytes = 4 * together * width;
            let from = match wanted {
                Wanted::Logits => &b.logits,
                Wanted::Hidden => &b.head_in,
            };
            if bytes > 0 {
                encoder.copy_buffer_to_buffer(from, 0, &b.results, 0, bytes as u64);
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

    fn advance(&mut self, chunks: &[Chunk<'_>]) {
        for chunk in chunks {
            self.tables.advance(chunk.slot, chunk.tokens.len());
        }
    }
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
        let (mut row, mut most_pages, mut seen) = (0, 1, 0);
        for span in spans {
            let chunk = &chunks[span.chunk];
            let table = pages.len();
            let position = tables.len(chunk.slot) + span.tokens.start;
            let end = position + span.tokens.len();
            let used = end.div_ceil(PAGE);
            most_pages = most_pages.max(used);
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
        let splits = match rows <= STEP_ROWS {
            true => most_pages.min(SPLITS),
            false => 1,
        };
        let split_pages = most_pages.div_ceil(splits);
        let attended = Attended {
            rows,
            tiles: tiles.len() / 4,
            // Fewer, if the pages of each are rounded up.
            splits: most_pages.div_ceil(split_pages),
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
