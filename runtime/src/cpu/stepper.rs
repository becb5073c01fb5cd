//! [`LayerStepper`] on the CPU.

use super::layer::{Batch, Layer, Pass, Scratch, check_finite, pack, pack_layer};
use crate::engine::{Hidden, LayerStepper, Observer};
use crate::error::Result;
use crate::load::LoadOptions;
use crate::models::LayerWeights;
use crate::rope::Rotary;
use crate::weights::Census;
use nq_formats::{ModelConfig, Tensor, Weight};
use nq_kernels::cpu::{Cpu, Epilogue, KvPages, KvType, PAGE};
use std::ops::Range;

/// Rows that run through a layer at once: enough to keep the products efficient, few enough
/// that their activations take little memory.
const ROWS: usize = 512;

/// The forward one layer at a time.
pub(crate) struct CpuStepper {
    config: ModelConfig,
    options: LoadOptions,
    cpu: Cpu,
    rotary: Rotary,
    kv_type: KvType,
    kv: KvPages,
    tables: Vec<Vec<u32>>, // of each sequence of a piece
    batch: Batch,
    scratch: Scratch,
}

/// Bytes that the CPU's stepper takes for pieces of whole pages, beside the layer that it runs: what
/// [`CpuStepper::new`] and the pieces reserve, and a copy of a piece of the stream.
pub fn stepper_bytes(c: &ModelConfig, kv: KvType) -> usize {
    let page = KvPages::page_bytes(kv, c.num_key_value_heads, c.head_dim);
    Scratch::bytes(c, ROWS) + size_of::<f32>() * ROWS * c.hidden_size + ROWS.div_ceil(PAGE) * page
}

impl CpuStepper {
    /// A stepper for models of this shape; keys and values are rounded to `kv_type`.
    pub(crate) fn new(
        config: &ModelConfig,
        options: &LoadOptions,
        kv_type: KvType,
    ) -> Result<Self> {
        Ok(CpuStepper {
            cpu: options.cpu()?,
            rotary: Rotary::new(config),
            kv_type,
            kv: KvPages::new(kv_type, 0, config.num_key_value_heads, config.head_dim),
            tables: Vec::new(),
            batch: Batch::with_capacity(config, ROWS, 0),
            scratch: Scratch::new(config, ROWS),
            options: *options,
            config: config.clone(),
        })
    }

    fn pack_layer(&self, index: usize, weights: &LayerWeights) -> Result<Layer> {
        let census = &mut Census::default();
        pack_layer(&self.cpu, &self.options, index, weights, census)
    }

    /// The stream in pieces, with room made for the sequences of each.
    fn pieces(&mut self, hidden: &Hidden) -> Vec<Piece> {
        let pieces = plan(&hidden.lengths);
        self.reserve(&pieces);
        pieces
    }

    /// Runs `layer` over `x`, the rows of `piece`, in place.
    fn run(
        &mut self,
        layer: &Layer,
        piece: &Piece,
        x: &mut [f32],
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.batch.clear();
        for (slot, &(position, len)) in piece.chunks.iter().enumerate() {
            self.batch.push(&self.rotary, slot, position, len);
        }
        let mut pass = Pass {
            cpu: &self.cpu,
            config: &self.config,
            batch: &self.batch,
            kv: &mut self.kv,
            tables: &self.tables,
            scratch: &mut self.scratch,
            x,
            observer,
        };
        layer.run(&mut pass)?;
        check_finite(layer.index, x)
    }

    /// Makes room for the sequences of any piece of `plan`.
    fn reserve(&mut self, plan: &[Piece]) {
        let slots = plan.iter().map(|p| p.chunks.len()).max().unwrap_or(0);
        let ends = plan.iter().flat_map(|p| &p.chunks).map(|c| c.0 + c.1);
        let pages = ends.max().unwrap_or(0).div_ceil(PAGE);
        if self.tables.len() < slots || self.tables.first().is_some_and(|t| t.len() < pages) {
            let (heads, d) = (self.config.num_key_value_heads, self.config.head_dim);
            self.kv = KvPages::new(self.kv_type, slots * pages, heads, d);
            let table = |slot: usize| {
                (slot * pages..(slot + 1) * pages)
                    .map(|p| p as u32)
                    .collect()
            };
            self.tables = (0..slots).map(table).collect();
        }
    }
}

/// Rows that go through a layer together.
#[derive(Debug, PartialEq, Eq)]
struct Piece {
    /// First row in the residual stream.
    row: usize,
    /// `(position, rows)` of consecutive sequences, or of a part of a long one.
    chunks: Vec<(usize, usize)>,
}

impl Piece {
    fn rows(&self) -> usize {
        self.chunks.iter().map(|c| c.1).sum()
    }
}

/// Cuts sequences into pieces of at most `ROWS` rows: whole sequences together, a longer one
/// alone, its parts one after another.
fn plan(lengths: &[usize]) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let (mut row, mut room) = (0, 0);
    for &len in lengths.iter().filter(|&&len| len > 0) {
        match pieces.last_mut() {
            Some(piece) if len <= room => {
                piece.chunks.push((0, len));
                room -= len;
            }
            _ => {
                for start in (0..len).step_by(ROWS) {
                    pieces.push(Piece {
                        row: row + start,
                        chunks: vec![(start, ROWS.min(len - start))],
                    });
                }
                room = ROWS.saturating_sub(len);
            }
        }
        row += len;
    }
    pieces
}

impl LayerStepper for CpuStepper {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn layer(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &mut Hidden,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let h = self.config.hidden_size;
        hidden.check(h)?;
        let layer = self.pack_layer(index, weights)?;
        for piece in self.pieces(hidden) {
            let x = &mut hidden.data[piece.row * h..(piece.row + piece.rows()) * h];
            self.run(&layer, &piece, x, observer)?;
        }
        Ok(())
    }

    fn observe(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &Hidden,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let h = self.config.hidden_size;
        hidden.check(h)?;
        let layer = self.pack_layer(index, weights)?;
        let mut copy = Vec::with_capacity(ROWS * h);
        for piece in self.pieces(hidden) {
            copy.clear();
            copy.extend_from_slice(&hidden.data[piece.row * h..(piece.row + piece.rows()) * h]);
            self.run(&layer, &piece, &mut copy, observer)?;
        }
        Ok(())
    }

    fn heads(
        &mut self,
        norm: &Tensor,
        head: &Weight,
        hidden: &Hidden,
        ranges: &[Range<usize>],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        let h = self.config.hidden_size;
        hidden.check_rows(h, ranges)?;
        let census = &mut Census::default();
        let head = pack(&self.cpu, &self.options, "head", &[head], census)?;
        let (norm, eps) = (norm.to_f32()?, self.config.rms_norm_eps);
        let (mut normed, mut logits) = (Vec::new(), Vec::new());
        for (i, rows) in ranges.iter().enumerate() {
            let x = &hidden.data[rows.start * h..rows.end * h];
            normed.resize(x.len(), 0.0);
            logits.resize(rows.len() * head.out_features(), 0.0);
            if !rows.is_empty() {
                self.cpu.rms_norm(x, &norm, eps, &mut normed);
                self.cpu
                    .linear(&head, &normed, &mut logits, Epilogue::Store)?;
            }
            each(i, &logits);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{ROWS, plan};

    #[test]
    fn pieces_cover_every_row_once_and_keep_sequences_whole_where_they_fit() {
        for lengths in [
            vec![],
            vec![1],
            vec![0, 3, 0],
            vec![ROWS; 3],
            vec![ROWS - 1, 1, 1],
            vec![7, 2 * ROWS + 5, 9, ROWS / 2, ROWS / 2 + 1],
        ] {
            let pieces = plan(&lengths);
            let mut next = 0;
            for p in &pieces {
                assert_eq!(p.row, next, "{lengths:?}");
                let rows = p.rows();
                assert!((1..=ROWS).contains(&rows), "{lengths:?}: {rows} rows");
                assert!(p.chunks.len() == 1 || p.chunks.iter().all(|c| c.0 == 0));
                next += rows;
            }
            assert_eq!(next, lengths.iter().sum::<usize>(), "{lengths:?}");
        }
    }
}
