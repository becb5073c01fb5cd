//! Sizes of what products in trellis codes need memory for.

use crate::pack::{SPAN, TILE};
use nq_formats::trellis::{Code, LANES, TILE as COLUMNS};

/// Rows of x that a block multiplies at once: few, or many.
pub(crate) const GROUPS: [usize; 2] = [4, 16];

/// Groups of rows, and rows of a group: the index in [`GROUPS`].
pub(crate) fn grouped(m: usize) -> (usize, usize) {
    let which = usize::from(m > GROUPS[0]);
    (m.div_ceil(GROUPS[which]), which)
}

/// Bytes of the digits of a group: of each four rows 8 a lane for 16 inputs, or for 32 of sums.
pub(super) fn digit_bytes(code: Code, group: usize, inputs: usize) -> usize {
    inputs / COLUMNS * code.width() * group / 4 * LANES * 8
}

/// Weights of a product `[rows, inputs]` as packed FP16 values: rows padded to whole tiles, inputs to whole spans.
pub fn packed_weights(rows: usize, inputs: usize) -> usize {
    rows.next_multiple_of(TILE) * inputs.next_multiple_of(SPAN)
}

/// Rows of x that a block multiplies at once, of rows that are sorted by expert.
pub(crate) const SORTED_ROWS: usize = GROUPS[1];

/// Most groups of sorted rows that are multiplied at once: digits of so many lie in memory.
pub(super) const MOST_GROUPS: usize = 256;

/// From so many rows of an expert on, in the mean, experts become FP16 first, in so many pieces of a layer.
pub(crate) const EXPANDED_ROWS: usize = 48;
/// See [`EXPANDED_ROWS`].
pub(crate) const PIECES: usize = 8;

/// Mixtures in trellis codes that sessions need memory for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodedExperts {
    /// Most routes of rows that go through their experts one by one: rows times the experts of each.
    pub few: usize,
    /// Most routes of rows that are sorted by expert.
    pub sorted: usize,
    /// Number of experts.
    pub experts: usize,
    /// Inputs of gate and up, outputs of down.
    pub hidden: usize,
    /// Inputs of down.
    pub width: usize,
    /// Some are in EXL3's codes: each has scales of inputs, and so digits, of its own.
    pub exl3: bool,
}

impl CodedExperts {
    /// Groups of sorted rows at once.
    pub(super) fn groups(&self) -> usize {
        let used = self.experts.min(self.sorted);
        (self.sorted / SORTED_ROWS + used).min(MOST_GROUPS)
    }

    /// Bytes of digits.
    pub(super) fn digit_bytes(&self) -> usize {
        let widest = self.hidden.max(self.width);
        let inputs = if self.exl3 { widest } else { self.width };
        let few = self.few.div_ceil(GROUPS[0]) * digit_bytes(Code::Octagon, GROUPS[0], inputs);
        few.max(self.groups() * digit_bytes(Code::Octagon, SORTED_ROWS, widest))
    }

    /// Rows that have digits.
    pub(super) fn digit_rows(&self) -> usize {
        self.few
            .next_multiple_of(GROUPS[0])
            .max(self.groups() * SORTED_ROWS)
    }

    /// Most weights that are expanded at once.
    pub fn expanded(&self) -> usize {
        let used = self.experts.min(self.sorted).max(1);
        let (hidden, width) = (self.hidden, self.width);
        match self.sorted / used >= EXPANDED_ROWS {
            true => {
                let most = packed_weights(2 * width, hidden).max(packed_weights(hidden, width));
                self.experts.div_ceil(PIECES) * most
            }
            false => 0,
        }
    }

    /// Products of the gates of few rows.
    pub(super) fn gates(&self) -> usize {
        if self.exl3 { self.few * self.width } else { 0 }
    }

    /// Values of the products of down that wait for the others of their row.
    pub(super) fn parts(&self) -> usize {
        self.few * self.hidden
    }
}
