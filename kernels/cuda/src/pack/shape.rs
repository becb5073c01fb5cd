//! The sizes of packed weights.

use super::kind::PackedKind;
use super::layout::{SPAN, TILE};
use nq_formats::trellis::STRIP;

/// The sizes of a packed weight, or of the part of one that a launch reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedShape {
    pub(crate) kind: PackedKind,
    /// Tiles of 16 outputs.
    pub(crate) tiles: usize,
    /// Spans of 256 inputs.
    pub(crate) spans: usize,
}

impl PackedShape {
    pub(crate) fn new(kind: PackedKind, rows: usize, inputs: usize) -> Self {
        PackedShape {
            kind,
            tiles: rows.div_ceil(TILE),
            spans: inputs.div_ceil(SPAN),
        }
    }

    /// Bytes of codes, in a trellis code of whole strips and spans; a size that no memory has is refused later, not wrapped
    /// to a small one.
    pub(crate) fn codes_bytes(self) -> usize {
        if let PackedKind::Trellis(scheme) = self.kind {
            let strips = (self.tiles * TILE).div_ceil(STRIP);
            return strips.saturating_mul(scheme.strip_bytes(self.spans * SPAN));
        }
        let records = self.tiles.saturating_mul(self.spans);
        records.saturating_mul(self.kind.code_bytes())
    }

    /// Bytes of scales and zero-points; in a trellis code those of rows.
    pub(crate) fn meta_bytes(self) -> usize {
        if let PackedKind::Trellis(_) = self.kind {
            return self.tiles * TILE * size_of::<u16>();
        }
        let records = self.tiles.saturating_mul(self.spans);
        records.saturating_mul(self.kind.meta_bytes())
    }
}
