//! What the host writes for a pass: where its rows stand.

use crate::kernels::{Heads, SPLITS};
use crate::model::WgpuModel;
use crate::product::STEP_ROWS;
use crate::program::Attended;
use crate::sizes::{ROW_WORDS, page_parts};
use nq_kernels::pages::PAGE;
use nq_runtime::Result;
use nq_runtime::interface::Chunk;
use nq_runtime::kv::PageTables;
use std::ops::Range;

/// Pages whose keys a workgroup reads in about as long as a launch takes that joins parts.
const UNSPLIT: usize = 3;

/// What the commands of a step depend on, in which every sequence has one row that wants logits: they are written while
/// the step before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepShape {
    pub(crate) rows: usize,
    /// Parts in which keys are read.
    pub(crate) splits: usize,
    /// True if the device draws tokens, instead of copying logits to the host.
    pub(crate) draws: bool,
}

/// Consecutive rows of a chunk in a pass.
pub(crate) struct Span {
    pub(crate) chunk: usize,
    /// Of the chunk's tokens.
    pub(crate) tokens: Range<usize>,
}

/// What the host writes for a pass.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) words: Vec<u32>,
    pub(crate) stream: Vec<f32>,
    pub(crate) turns: Vec<(f32, f32)>,
}

/// Where the states of a chunk's sequence are kept on the way.
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    /// Rows of the chunk before it.
    pub(crate) rows: usize,
    /// Where to.
    pub(crate) place: usize,
}

/// The rows of chunks, in passes of up to `most`, which end where a mark is within a chunk.
pub(crate) fn passes(chunks: &[Chunk<'_>], marks: &[Option<Mark>], most: usize) -> Vec<Vec<Span>> {
    let (mut all, mut spans, mut room) = (Vec::new(), Vec::new(), most);
    for (chunk, Chunk { tokens, .. }) in chunks.iter().enumerate() {
        let mark = marks.get(chunk).copied().flatten();
        let mark = mark.map_or(tokens.len(), |mark| mark.rows);
        let mut at = 0;
        while at < tokens.len() {
            let part = if at < mark { mark } else { tokens.len() };
            let end = part.min(at + room);
            spans.push(Span {
                chunk,
                tokens: at..end,
            });
            room -= end - at;
            at = end;
            if room == 0 || at == mark && mark < tokens.len() {
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
pub(crate) struct RowsLayout {
    /// `Step` of the kernels.
    pub(crate) step: [u32; 8],
    pub(crate) attended: Attended,
    pub(crate) wanted_at: usize,
    pub(crate) wanted: usize,
    /// Parts in which the next step reads keys.
    pub(crate) next_splits: usize,
}

impl RowsLayout {
    /// The shape of the step, if it is one.
    pub(crate) fn shape(&self, draws: bool) -> Option<StepShape> {
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
    /// Fills in the rows of `spans`: positions and page tables, tiles of rows that attend together, wanted rows.
    pub(crate) fn fill(
        &mut self,
        model: &WgpuModel,
        chunks: &[Chunk<'_>],
        spans: &[Span],
        tables: &PageTables,
        heads: &Heads,
    ) -> Result<RowsLayout> {
        let (h, half) = (model.config.hidden_size, model.config.rotary_dims() / 2);
        let rows: usize = spans.iter().map(|s| s.tokens.len()).sum();
        let tile = heads.tile();
        self.words.clear();
        self.stream.resize(rows * h, 0.0);
        self.turns.resize(half, (0.0, 0.0));
        let (mut tiles, mut wanted, mut pages) = (Vec::new(), Vec::new(), Vec::new());
        let mut sequences = Vec::with_capacity(2 * spans.len());
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
            sequences.extend([row, span.tokens.len()].map(|n| n as u32));
            pages.extend_from_slice(&tables.all()[chunk.slot][..used]);
            for first in (0..span.tokens.len()).step_by(tile) {
                let count = tile.min(span.tokens.len() - first);
                tiles.extend([row + first, count, position + first, table].map(|n| n as u32));
            }
            let asked = chunk.logits.rows(chunk.tokens.len());
            for token in span.tokens.clone() {
                let at = row + token - span.tokens.start;
                let position = tables.len(chunk.slot) + token;
                let words: [usize; ROW_WORDS] = [position, table, row, chunk.slot];
                self.words.extend(words.map(|n| n as u32));
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
            sequences: spans.len(),
            tiles: tiles.len() / 4,
            splits,
            alone: spans.iter().all(|s| s.tokens.len() == 1),
            bytes: seen
                * page_parts(&model.config, heads.kv_type)
                    .iter()
                    .sum::<usize>()
                / PAGE,
        };
        // Kernels of recurrences find them behind the rows.
        self.words.extend(sequences);
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
