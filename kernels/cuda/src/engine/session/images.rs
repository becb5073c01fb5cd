//! The images of sequences: their rows, in the stream, and where tokens stand in the rotary table.

use super::CudaSession;
use crate::driver::Staging;
use crate::{Buffer, DeltaSpan, Row, SequenceRows, Stream};
use nq_runtime::images::SequenceImages;
use nq_runtime::{Error, Result};
use std::ops::Range;

/// Values of images that are copied to the device at a time.
const PIECE: usize = 1 << 20;

/// The images of each slot's sequence, and page-locked memory from which they are copied.
#[derive(Default)]
pub(super) struct SessionImages {
    pub(super) shown: Vec<SequenceImages>, // [slots]
    values: Option<Staging<f32>>,
    turns: Option<Staging<[f32; 2]>>,
}

impl SessionImages {
    pub(super) fn new(slots: usize) -> Self {
        SessionImages {
            shown: vec![SequenceImages::default(); slots],
            ..SessionImages::default()
        }
    }

    /// True if tokens `range` of the sequence in `slot` are of an image.
    pub(super) fn among(&self, slot: usize, range: Range<usize>) -> bool {
        self.shown[slot].rows(range, 0).next().is_some()
    }

    /// The row of the rotary table of a text's token `index`, less the index.
    pub(super) fn shift(&self, slot: usize, index: usize) -> i32 {
        self.shown[slot].coordinates(index)[0] as i32 - index as i32
    }

    /// Refuses tokens of images in a step, whose rows are of text.
    pub(super) fn check_text(&self, slot: usize, range: Range<usize>) -> Result<()> {
        match self.among(slot, range.clone()) {
            false => Ok(()),
            true => Err(Error::Request {
                what: "tokens of a step",
                expected: "text".into(),
                found: format!("an image of slot {slot}, among tokens {range:?}"),
            }),
        }
    }

    /// Copies the rows of images at `level` in the places of the pass's rows: to `to` `[rows, hidden]`, or through
    /// `beside`, from which they are added to it.
    pub(super) fn show(
        &mut self,
        stream: &Stream,
        spans: &[DeltaSpan],
        level: usize,
        to: &mut Buffer<f32>,
        mut beside: Option<&mut Buffer<f32>>,
    ) -> nq_kernels::Result<()> {
        let most = beside.as_ref().map_or(PIECE, |b| PIECE.min(b.len()));
        for SequenceRows {
            row,
            count,
            position,
            slot,
        } in spans.iter().map(|span| span.rows)
        {
            let images = &self.shown[slot];
            for (index, values) in images.rows(position..position + count, level) {
                let mut at = (row + index - position) * images.hidden();
                for piece in values.chunks(most) {
                    match &mut beside {
                        None => stream.write_staged(to, at, &mut self.values, piece)?,
                        Some(beside) => {
                            stream.write_staged(beside, 0, &mut self.values, piece)?;
                            stream.add(beside, to, at, piece.len())?;
                        }
                    }
                    at += piece.len();
                }
            }
        }
        Ok(())
    }
}

impl CudaSession {
    /// The rows of these tokens of a pass, and behind the `turns` of other images' rows those of this one's.
    pub(super) fn placed_rows(&self, rows: SequenceRows, turns: &mut Vec<[f32; 2]>) -> Vec<Row> {
        let images = &self.images.shown[rows.slot];
        let half = self.model.rotary.inv_freq().len();
        let positions = self.pages.places().positions;
        let row = |index: usize| {
            let at = images.coordinates(index);
            let mut turn = at[0];
            if self.images.among(rows.slot, index..index + 1) {
                turn = positions + turns.len() / half;
                let mut pairs = vec![(0.0, 0.0); half];
                self.model.rotary.row_at(at, &mut pairs);
                turns.extend(pairs.into_iter().map(<[f32; 2]>::from));
            }
            Row {
                position: index as i32,
                slot: rows.slot as i32,
                shift: turn as i32 - index as i32,
            }
        };
        (rows.position..rows.position + rows.count)
            .map(row)
            .collect()
    }

    /// Puts `turns` behind the positions of the rotary table.
    pub(super) fn write_turns(&mut self, turns: &[[f32; 2]]) -> nq_kernels::Result<()> {
        if turns.is_empty() {
            return Ok(());
        }
        let half = self.model.rotary.inv_freq().len();
        let at = self.pages.places().positions * half;
        let staging = &mut self.images.turns;
        self.stream
            .write_staged(&mut self.cos_sin, at, staging, turns)
    }
}
