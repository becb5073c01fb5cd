//! A weight in GGUF blocks: its exact numbers, and its conversion to a canonical weight.

use super::BlockBuffers;
use super::types::BlockType;
use crate::error::{Error, Result};
use crate::exactness::Exactness;
use crate::pack;
use crate::scheme::Bits;
use crate::weight::{AffineWeight, ZeroPoints};
use bytes::Bytes;
use half::f16;
use nq_model::{DType, Dims};
use rayon::prelude::*;

/// A quantized weight `[out, in]` in GGUF blocks of an integer type, as stored in a file.
#[derive(Clone, Debug)]
pub struct BlockWeight {
    kind: BlockType,
    out_features: usize,
    in_features: usize,
    data: Bytes, // [out, in / block] blocks
}

impl BlockWeight {
    /// A weight with the blocks `data`.
    ///
    /// # Errors
    /// [`Error::Weight`] for a type without integer blocks, rows that are not a whole number of
    /// blocks, or data of another length.
    pub fn new(kind: BlockType, dims: Dims, data: Bytes) -> Result<Self> {
        let (out_features, in_features) = dims.pair();
        if kind.layout().is_none() {
            let readable = BlockType::all().filter(|t| t.layout().is_some());
            let names: Vec<_> = readable.map(BlockType::name).collect();
            return Err(Error::Weight {
                what: "block type",
                expected: format!("one of {}", names.join(", ")),
                found: kind.name().into(),
            });
        }
        let row = kind.row_bytes(in_features as u64);
        let bytes = row.and_then(|n| n.checked_mul(out_features as u64));
        if bytes != Some(data.len() as u64) {
            return Err(Error::Weight {
                what: "blocks",
                expected: format!(
                    "{} of {kind} [{out_features}, {in_features}]",
                    bytes.map_or("whole rows".into(), |n| format!("{n} bytes")),
                ),
                found: format!("{} bytes", data.len()),
            });
        }
        Ok(BlockWeight {
            kind,
            out_features,
            in_features,
            data,
        })
    }

    /// Block type.
    pub fn kind(&self) -> BlockType {
        self.kind
    }

    /// Number of rows.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Number of columns: the reduction dimension.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// The blocks of all rows.
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    fn row(&self, row: usize) -> &[u8] {
        let bytes = self.in_features / self.kind.elements() * self.kind.bytes();
        &self.data[row * bytes..][..bytes]
    }

    /// Writes row `row` as f32 to `out` (`in_features` long), with the format's own
    /// arithmetic: no scale is rounded.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let layout = self.kind.layout().expect("checked by new");
        let mut scratch = BlockBuffers::default();
        let blocks = self.row(row).chunks_exact(self.kind.bytes());
        for (block, out) in blocks.zip(out.chunks_exact_mut(self.kind.elements())) {
            layout.dequantize(block, &mut scratch, out);
        }
    }

    /// How [`BlockWeight::to_affine`] changes the numbers of a type.
    pub fn exactness(kind: BlockType) -> Exactness {
        match kind.layout() {
            Some(l) if !l.plain_scales => Exactness::ScalesRounded(DType::F16),
            _ => Exactness::Exact,
        }
    }

    /// The weight in canonical form: codes are kept, scales (and offsets) become f16, which rounds
    /// those that are products.
    ///
    /// # Errors
    /// [`Error::Weight`], naming row and group of a scale that does not fit a finite f16.
    pub fn to_affine(&self) -> Result<AffineWeight> {
        let layout = self.kind.layout().expect("checked by new");
        let (rows, cols) = (self.out_features, self.in_features);
        let (block, group) = (self.kind.elements(), layout.group as usize);
        let groups = cols / group;
        let stride = layout.bits.bytes(cols);
        let mut packed = vec![0u8; rows * stride];
        let mut scales = vec![f16::ZERO; rows * groups];
        // One entry per row if there are no offsets, so that zipping still yields every row.
        let offsets_per_row = if layout.offsets { groups } else { 1 };
        let mut offsets = vec![f16::ZERO; rows * offsets_per_row];
        packed
            .par_chunks_mut(stride)
            .zip(scales.par_chunks_mut(groups))
            .zip(offsets.par_chunks_mut(offsets_per_row))
            .enumerate()
            .for_each(|(row, ((packed, scales), offsets))| {
                let mut codes = vec![0u8; block];
                let mut s = vec![0f32; block / group];
                let mut o = vec![0f32; block / group];
                let blocks = self.row(row).chunks_exact(self.kind.bytes());
                for (b, bytes) in blocks.enumerate() {
                    (layout.unpack)(bytes, &mut codes, &mut s, &mut o);
                    let n = layout.bits.bytes(block);
                    pack::pack_row(layout.bits, &codes, &mut packed[b * n..][..n]);
                    let at = b * s.len();
                    for (i, (&s, &o)) in s.iter().zip(&o).enumerate() {
                        scales[at + i] = f16::from_f32(s);
                        if layout.offsets {
                            offsets[at + i] = f16::from_f32(o);
                        }
                    }
                }
            });
        let zeros = if layout.offsets {
            ZeroPoints::Offset(offsets.into())
        } else {
            ZeroPoints::None
        };
        AffineWeight::new(
            layout.scheme(),
            Dims::new(rows, cols),
            packed.into(),
            scales.into(),
            zeros,
            None,
        )
    }
}

// Blocks with an even number of codes start on a byte boundary when packed to 4 bits.
const _: () = assert!(Bits::B4.bytes(32) == 16);
