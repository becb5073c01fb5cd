//! A weight in GGUF blocks: its exact numbers, and its conversion to a canonical weight.

use super::types::BlockType;
use super::{BlockBuffers, BlockLayout, NarrowCodes};
use crate::error::{Error, Result};
use crate::exactness::Exactness;
use crate::pack;
use crate::scheme::{AffineScheme, Bits, Levels, Scales};
use crate::weight::{AffineWeight, GroupValues, Parts};
use bytes::Bytes;
use half::f16;
use nq_model::{DType, Dims};
use rayon::prelude::*;
use std::sync::Arc;

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
        self.with_codes(None)
    }

    /// As [`BlockWeight::to_affine`], the same values, but with a table of levels for the codes of types that have few uneven
    /// ones.
    ///
    /// # Errors
    /// As [`BlockWeight::to_affine`].
    pub fn to_table(&self) -> Result<AffineWeight> {
        let layout = self.kind.layout().expect("checked by new");
        self.with_codes(layout.narrow.filter(|narrow| !narrow.values.is_empty()))
    }

    /// The weight with an f16 scale (and offset) for each group: in canonical codes, or in those of `table`.
    fn with_codes(&self, table: Option<NarrowCodes>) -> Result<AffineWeight> {
        let layout = self.kind.layout().expect("checked by new");
        let (rows, cols) = (self.out_features, self.in_features);
        let (block, group) = (self.kind.elements(), layout.group as usize);
        let groups = cols / group;
        let width = table.map_or(layout.bits, |table| table.width);
        let index = table.map(|table| table.indices(layout));
        let stride = width.bytes(cols);
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
                let mut codes = vec![0u8; cols];
                let mut s = vec![0f32; block / group];
                let mut o = vec![0f32; block / group];
                let blocks = self.row(row).chunks_exact(self.kind.bytes());
                for (b, (bytes, codes)) in blocks.zip(codes.chunks_exact_mut(block)).enumerate() {
                    (layout.unpack)(bytes, codes, &mut s, &mut o);
                    let at = b * s.len();
                    for (i, (&s, &o)) in s.iter().zip(&o).enumerate() {
                        scales[at + i] = f16::from_f32(s);
                        if layout.offsets {
                            offsets[at + i] = f16::from_f32(o);
                        }
                    }
                }
                if let Some(index) = &index {
                    codes.iter_mut().for_each(|q| *q = index[usize::from(*q)]);
                }
                pack::pack_row(width, &codes, packed);
            });
        let halves = |values: Vec<f16>| GroupValues::Half(values.into());
        let levels = table.and_then(|table| table.table_of_codes());
        let scheme = AffineScheme {
            bits: width,
            levels: match levels {
                None => Levels::Even,
                Some(_) => Levels::Table,
            },
            ..layout.scheme()
        };
        let parts = Parts {
            codes: packed.into(),
            scales: halves(scales),
            zeros: None,
            offsets: layout.offsets.then(|| halves(offsets)),
            levels,
            g_idx: None,
        };
        AffineWeight::assemble(scheme, Dims::new(rows, cols), parts)
    }

    /// As [`BlockWeight::to_affine`], in fewer bits: codes as wide as their values need, with a table of these where they
    /// are few and uneven, and scales (and offsets) in two levels where a small integer is multiplied by an f16 of the
    /// block. Values are the same, if that f16 times the type's power of two is not below the normal numbers of f16.
    ///
    /// # Errors
    /// As [`BlockWeight::to_affine`].
    pub fn to_levels(&self) -> Result<AffineWeight> {
        let layout = self.kind.layout().expect("checked by new");
        let Some(narrow) = layout.narrow else {
            return self.to_affine();
        };
        let width = narrow.width;
        let (rows, cols) = (self.out_features, self.in_features);
        let (block, group) = (self.kind.elements(), layout.group as usize);
        let (groups, blocks, per_block) = (cols / group, cols / block, block / group);
        let scheme = layout.narrow_scheme(block);
        let bits = match scheme.scales {
            Scales::TwoLevel(two) => two.bits,
            Scales::Half => Bits::B8,
        };
        // Scales without offsets are signed, and kept with the midpoint added.
        let middle = if layout.offsets { 0.0 } else { 128.0 };
        let index = narrow.indices(layout);
        let step = narrow.factors.map_or(1.0, |f| f.step);
        let small = || vec![0u8; rows * bits.bytes(groups)];
        let factors = || vec![f16::ZERO; rows * blocks];
        let mut packed = vec![0u8; rows * width.bytes(cols)];
        let mut halves = vec![f16::ZERO; rows * groups];
        let (mut scales, mut of_scales) = (small(), factors());
        let (mut offsets, mut of_offsets) = (small(), factors());
        (packed.par_chunks_mut(width.bytes(cols)))
            .zip(halves.par_chunks_mut(groups))
            .zip(scales.par_chunks_mut(bits.bytes(groups)))
            .zip(offsets.par_chunks_mut(bits.bytes(groups)))
            .zip(of_scales.par_chunks_mut(blocks))
            .zip(of_offsets.par_chunks_mut(blocks))
            .enumerate()
            .for_each(
                |(row, (((((packed, halves), scales), offsets), of_scales), of_offsets))| {
                    let mut codes = vec![0u8; cols];
                    let (mut s, mut o) = (vec![0f32; groups], vec![0f32; groups]);
                    for (b, bytes) in self.row(row).chunks_exact(self.kind.bytes()).enumerate() {
                        let of_block = b * per_block..(b + 1) * per_block;
                        let codes = &mut codes[b * block..(b + 1) * block];
                        let (s, o) = (&mut s[of_block.clone()], &mut o[of_block]);
                        (layout.unpack)(bytes, codes, s, o);
                        let Some(factors) = narrow.factors else {
                            continue;
                        };
                        // Products of an f16 and a small integer are exact in f32, and so are these quotients; those
                        // of zero are not numbers, for which any integer does.
                        let [d, minimum] = (factors.of_block)(bytes);
                        s.iter_mut().for_each(|s| *s /= d.to_f32() * step);
                        o.iter_mut().for_each(|o| *o /= -minimum.to_f32());
                        of_scales[b] = f16::from_f32(d.to_f32() * step);
                        of_offsets[b] = -minimum;
                    }
                    codes.iter_mut().for_each(|q| *q = index[usize::from(*q)]);
                    pack::pack_row(width, &codes, packed);
                    if narrow.factors.is_none() {
                        halves
                            .iter_mut()
                            .zip(s)
                            .for_each(|(to, s)| *to = f16::from_f32(s));
                        return;
                    }
                    let integers: Vec<u8> = s.iter().map(|s| (s + middle) as u8).collect();
                    pack::pack_row(bits, &integers, scales);
                    let integers: Vec<u8> = o.iter().map(|o| *o as u8).collect();
                    pack::pack_row(bits, &integers, offsets);
                },
            );
        let two_level = |small: Vec<u8>, factors: Vec<f16>| GroupValues::TwoLevel {
            small: small.into(),
            of_spans: factors.into(),
        };
        let scales = match narrow.factors {
            Some(_) => two_level(scales, of_scales),
            None => GroupValues::Half(halves.into()),
        };
        let parts = Parts {
            codes: packed.into(),
            scales,
            zeros: None,
            offsets: layout.offsets.then(|| two_level(offsets, of_offsets)),
            levels: narrow.table_of_codes(),
            g_idx: None,
        };
        AffineWeight::assemble(scheme, Dims::new(rows, cols), parts)
    }
}

impl NarrowCodes {
    /// The narrow code of each canonical one.
    fn indices(&self, layout: &BlockLayout) -> [u8; 256] {
        let shift = match layout.offsets {
            true => 0,
            false => layout.bits.midpoint() - self.width.midpoint(),
        };
        std::array::from_fn(|code| match self.values {
            [] => (code as u8).wrapping_sub(shift) & self.width.max_code(),
            values => {
                let found = values.iter().position(|v| *v as u8 ^ 0x80 == code as u8);
                found.unwrap_or_default() as u8
            }
        })
    }

    /// The canonical code of each narrow one, if that is a table.
    fn table_of_codes(&self) -> Option<Arc<[u8]>> {
        let last = *self.values.last()?;
        let codes = 0..=self.width.max_code();
        Some(
            codes
                .map(|i| self.values.get(usize::from(i)).unwrap_or(&last).to_owned() as u8 ^ 0x80)
                .collect(),
        )
    }
}

// Blocks with an even number of codes start on a byte boundary when packed to 4 bits.
const _: () = assert!(Bits::B4.bytes(32) == 16);

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights in fewer bits have the values of those with canonical codes and scales, bit for bit.
    #[test]
    fn narrow_codes_have_the_values_of_canonical_ones() {
        for (kind, bits, places) in [
            (BlockType::Q2_K, 2, &[80, 82][..]),
            (BlockType::Q3_K, 3, &[108]),
            (BlockType::Q4_K, 4, &[0, 2]),
            (BlockType::Q5_K, 5, &[0, 2]),
            (BlockType::Q6_K, 6, &[208]),
            (BlockType::IQ4_NL, 4, &[0]),
            (BlockType::IQ4_XS, 4, &[0]),
            (BlockType::IQ3_XXS, 4, &[0]),
            (BlockType::IQ3_S, 4, &[0]),
            (BlockType::IQ2_XXS, 3, &[0]),
            (BlockType::IQ2_XS, 3, &[0]),
            (BlockType::IQ2_S, 3, &[0]),
            (BlockType::IQ1_S, 3, &[0]),
            (BlockType::IQ1_M, 3, &[]),
            (BlockType::MXFP4, 4, &[]),
            (BlockType::NVFP4, 4, &[]),
        ] {
            let (rows, blocks) = (3, 2);
            let dims = Dims::new(rows, blocks * kind.elements());
            let mut data: Vec<u8> = (0..rows * blocks * kind.bytes())
                .map(|i| (i * 7919 / 13 % 251) as u8)
                .collect();
            for (b, block) in data.chunks_mut(kind.bytes()).enumerate() {
                for (i, &at) in places.iter().enumerate() {
                    let factor = f16::from_f32((b + i + 1) as f32 * 3.1e-3);
                    block[at..at + 2].copy_from_slice(&factor.to_le_bytes());
                }
                match kind {
                    BlockType::MXFP4 => block[0] = 118 + b as u8,
                    // 2^-9 in the highest nibbles of four words.
                    BlockType::IQ1_M => {
                        for (at, nibble) in [(49, 1), (51, 0), (53, 8), (55, 1)] {
                            block[at] = block[at] & 15 | nibble << 4;
                        }
                    }
                    _ => {}
                }
            }
            let weight = BlockWeight::new(kind, dims, data.into()).unwrap();
            let (canonical, narrow) = (weight.to_affine().unwrap(), weight.to_levels().unwrap());
            assert_eq!(narrow.scheme().bits.width(), bits, "{kind}");
            let table = weight.to_table().unwrap();
            let most = if narrow.levels().is_some() { bits } else { 8 };
            assert!(table.scheme().bits.width() <= most, "{kind}");
            let (mut a, mut b) = (vec![0.0; dims.cols], vec![0.0; dims.cols]);
            for row in 0..rows {
                canonical.dequantize_row(row, &mut a);
                assert!(a.iter().any(|v| *v != 0.0));
                for other in [&narrow, &table] {
                    other.dequantize_row(row, &mut b);
                    assert_eq!(a, b, "{kind} row {row}");
                }
            }
        }
    }
}
