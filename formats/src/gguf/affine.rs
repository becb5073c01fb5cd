//! Affine weights as blocks: which type keeps a scheme's parts as they are, and its blocks written.

use crate::blocks::BlockType;
use crate::pack;
use crate::scheme::{AffineScheme, Bits, Group, Scales, TwoLevel, Zeros};
use crate::weight::{AffineWeight, GroupValues, Parts};
use half::f16;

/// Elements of a block of the types without super-blocks.
const BLOCK: usize = 32;

const fn plain(bits: Bits, zeros: Zeros) -> AffineScheme {
    AffineScheme::new(bits, Group::Size(32), zeros)
}

const fn super_block(bits: Bits, group: u32, zeros: Zeros, scales: Bits) -> AffineScheme {
    let span = Group::Size(256);
    AffineScheme {
        scales: Scales::TwoLevel(TwoLevel { bits: scales, span }),
        ..AffineScheme::new(bits, Group::Size(group), zeros)
    }
}

/// Block types and the schemes of whose parts they are another arrangement, in as many bytes; the
/// fewest come first.
pub const SCHEMES: [(BlockType, AffineScheme); 8] = [
    (
        BlockType::Q4_K,
        super_block(Bits::B4, 32, Zeros::Offset, Bits::B6),
    ),
    (BlockType::Q4_0, plain(Bits::B4, Zeros::None)),
    (BlockType::Q4_1, plain(Bits::B4, Zeros::Offset)),
    (
        BlockType::Q5_K,
        super_block(Bits::B5, 32, Zeros::Offset, Bits::B6),
    ),
    (BlockType::Q5_0, plain(Bits::B5, Zeros::None)),
    (BlockType::Q5_1, plain(Bits::B5, Zeros::Offset)),
    (
        BlockType::Q6_K,
        super_block(Bits::B6, 16, Zeros::None, Bits::B8),
    ),
    (BlockType::Q8_0, plain(Bits::B8, Zeros::None)),
];

/// The type that is `scheme` in another arrangement.
pub(crate) fn kind_of(scheme: AffineScheme) -> Option<BlockType> {
    let row = SCHEMES.iter().find(|row| row.1 == scheme);
    row.map(|row| row.0)
}

/// The scheme that is `kind` in another arrangement.
pub fn scheme_of(kind: BlockType) -> Option<AffineScheme> {
    let row = SCHEMES.iter().find(|row| row.0 == kind);
    row.map(|row| row.1)
}

/// The schemes of at least `least` bits for models whose rows are as long as `widths`: those of
/// super-blocks and 8 bits, and the others if some row is no whole number of super-blocks.
pub fn candidates(least: Bits, widths: impl IntoIterator<Item = usize>) -> Vec<AffineScheme> {
    let whole = widths.into_iter().all(|n| n.is_multiple_of(256));
    let kinds = SCHEMES.into_iter().filter(|(kind, scheme)| {
        let usual = kind.elements() > BLOCK || scheme.bits == Bits::B8;
        scheme.bits >= least && (usual || !whole)
    });
    kinds.map(|(_, scheme)| scheme).collect()
}

/// A weight to be written as blocks of a type that holds its numbers.
pub(crate) struct Blocks<'a> {
    weight: &'a AffineWeight,
    kind: BlockType,
    parts: Parts,
}

impl<'a> Blocks<'a> {
    /// `weight` as `kind`: its own (`kind_of`), or one without super-blocks whose blocks its groups
    /// are made of.
    pub(crate) fn new(weight: &'a AffineWeight, kind: BlockType) -> Self {
        Blocks {
            weight,
            kind,
            parts: weight.parts(),
        }
    }

    /// Writes the blocks of row `row` into `out`.
    pub(crate) fn row(&self, row: usize, out: &mut [u8]) {
        let mut codes = vec![0u8; self.weight.in_features()];
        let bits = self.weight.scheme().bits;
        pack::unpack_row(bits, self.weight.row_codes(row), &mut codes);
        let blocks = codes
            .chunks_exact(self.kind.elements())
            .zip(out.chunks_exact_mut(self.kind.bytes()));
        for (b, (codes, out)) in blocks.enumerate() {
            match self.kind {
                BlockType::Q4_K | BlockType::Q5_K => self.minima(row, b, codes, out),
                BlockType::Q6_K => self.centred(row, b, codes, out),
                _ => self.plain(row, b, codes, out),
            }
        }
    }

    /// f16 scale (and offset), fifth bits if there are any, nibbles or bytes.
    fn plain(&self, row: usize, block: usize, codes: &[u8], out: &mut [u8]) {
        let group = self.weight.group_of(block * BLOCK);
        let (scale, offset) = self.weight.affine(row, group);
        let (d, mut rest) = out.split_at_mut(2);
        d.copy_from_slice(&f16::from_f32(scale).to_le_bytes()); // it was an f16
        if self.kind == BlockType::Q8_0 {
            let codes = rest.iter_mut().zip(codes);
            codes.for_each(|(o, q)| *o = q ^ 0x80); // offset by 128 to signed
            return;
        }
        if matches!(self.kind, BlockType::Q4_1 | BlockType::Q5_1) {
            let (m, after) = rest.split_at_mut(2);
            m.copy_from_slice(&f16::from_f32(offset).to_le_bytes());
            rest = after;
        }
        if matches!(self.kind, BlockType::Q5_0 | BlockType::Q5_1) {
            let (high, after) = rest.split_at_mut(4);
            let bits = codes.iter().enumerate();
            let bits = bits.fold(0u32, |h, (i, q)| h | u32::from(q >> 4) << i);
            high.copy_from_slice(&bits.to_le_bytes());
            rest = after;
        }
        nibbles(codes, rest);
    }

    /// Q4_K and Q5_K: f16 d and dmin, 12 bytes of 6-bit scales and minima, fifth bits if there are
    /// any (bit `g` of byte `l` for element `l` of group `g`), nibbles of 64 elements at a time.
    fn minima(&self, row: usize, block: usize, codes: &[u8], out: &mut [u8]) {
        let (d, scales) = self.small::<8>(&self.parts.scales, row, block);
        let (offset, minima) = match &self.parts.offsets {
            Some(offsets) => self.small::<8>(offsets, row, block),
            None => (f16::ZERO, [0; 8]),
        };
        out[..2].copy_from_slice(&d.to_le_bytes());
        out[2..4].copy_from_slice(&(-offset).to_le_bytes()); // minima are taken off
        let (packed, mut rest) = out[4..].split_at_mut(12);
        packed.copy_from_slice(&scales_and_minima(scales, minima));
        if self.kind == BlockType::Q5_K {
            let (high, after) = rest.split_at_mut(32);
            for (l, high) in high.iter_mut().enumerate() {
                *high = (0..8).fold(0, |b, g| b | codes[32 * g + l] >> 4 << g);
            }
            rest = after;
        }
        let pairs = codes.chunks_exact(64).zip(rest.chunks_exact_mut(32));
        pairs.for_each(|(codes, out)| nibbles(codes, out));
    }

    /// Q6_K: nibbles and crumbs by halves of 128, 16 signed scales, f16 d.
    fn centred(&self, row: usize, block: usize, codes: &[u8], out: &mut [u8]) {
        let (d, scales) = self.small::<16>(&self.parts.scales, row, block);
        let halves = codes.chunks_exact(128).enumerate();
        for (h, half) in halves {
            nibbles(half, &mut out[64 * h..64 * (h + 1)]);
            let crumbs = &mut out[128 + 32 * h..128 + 32 * (h + 1)];
            for (l, byte) in crumbs.iter_mut().enumerate() {
                *byte = (0..4).fold(0, |b, k| b | half[l + 32 * k] >> 4 << (2 * k));
            }
        }
        for (o, s) in out[192..208].iter_mut().zip(scales) {
            *o = s ^ 0x80; // offset by 128 to signed
        }
        out[208..].copy_from_slice(&d.to_le_bytes());
    }

    /// The f16 of a super-block and the small integers of its `N` groups, as they are kept.
    fn small<const N: usize>(
        &self,
        values: &GroupValues,
        row: usize,
        block: usize,
    ) -> (f16, [u8; N]) {
        let (GroupValues::TwoLevel { small, of_spans }, Scales::TwoLevel(two)) =
            (values, self.weight.scheme().scales)
        else {
            unreachable!("super-blocks are of schemes in two levels");
        };
        let (groups, cols) = (self.weight.groups(), self.weight.in_features());
        let stride = two.bits.bytes(groups);
        let of_row = &small[row * stride..(row + 1) * stride];
        let at = |i| pack::code_at(two.bits, of_row, groups, block * N + i);
        let spans = two.span.count(cols);
        (of_spans[row * spans + block], std::array::from_fn(at))
    }
}

/// Codes of the first half beside those of the second, four bits of each.
fn nibbles(codes: &[u8], out: &mut [u8]) {
    let (low, high) = codes.split_at(codes.len() / 2);
    for ((o, l), h) in out.iter_mut().zip(low).zip(high) {
        *o = l & 15 | h << 4;
    }
}

/// Eight 6-bit scales and minima in 12 bytes: the upper two bits of the last four are in the top bits of the
/// first eight bytes.
pub(super) fn scales_and_minima(scales: [u8; 8], minima: [u8; 8]) -> [u8; 12] {
    let mut packed = [0u8; 12];
    for (j, (s, m)) in scales.into_iter().zip(minima).enumerate() {
        match j {
            0..4 => {
                packed[j] |= s;
                packed[j + 4] |= m;
            }
            _ => {
                packed[j + 4] |= s & 15 | m << 4;
                packed[j - 4] |= s >> 4 << 6;
                packed[j] |= m >> 4 << 6;
            }
        }
    }
    packed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::BlockWeight;
    use nq_model::Dims;
    use proptest::prelude::*;

    /// A weight `[rows, cols]` of `scheme`, all parts made of `seed`.
    fn weight(scheme: AffineScheme, Dims { rows, cols }: Dims, seed: u64) -> AffineWeight {
        let mut state = seed;
        let mut next = move || {
            state = (state.wrapping_mul(6_364_136_223_846_793_005)).wrapping_add(1);
            (state >> 33) as u32
        };
        let half = |v: u32, sign: f32| f16::from_f32(sign * (1.0 + (v % 1000) as f32) / 8192.0);
        let mut packed = |bits: Bits, n: usize| {
            let values: Vec<u8> = (0..rows * n)
                .map(|_| next() as u8 & bits.max_code())
                .collect();
            pack::pack_rows(bits, &values, n)
        };
        let groups = scheme.group.count(cols);
        let mut values = |sign: f32| match scheme.scales {
            Scales::Half => {
                let all = (0..rows * groups).map(|i| half(i as u32 * 37 + seed as u32 % 997, sign));
                GroupValues::Half(all.collect())
            }
            Scales::TwoLevel(two) => GroupValues::TwoLevel {
                small: packed(two.bits, groups).into(),
                of_spans: (0..rows * two.span.count(cols))
                    .map(|i| half(i as u32 * 37 + seed as u32 % 997, sign))
                    .collect(),
            },
        };
        let scales = values(1.0);
        let offsets = (scheme.zeros == Zeros::Offset).then(|| values(-1.0));
        let parts = Parts {
            codes: packed(scheme.bits, cols).into(),
            scales,
            zeros: None,
            offsets,
            levels: None,
            g_idx: None,
        };
        AffineWeight::assemble(scheme, Dims::new(rows, cols), parts).unwrap()
    }

    proptest! {
        /// A weight that is written as blocks and read again is the same, in the same number of bytes.
        #[test]
        fn blocks_keep_every_part(seed in any::<u64>(), rows in 1usize..4, blocks in 1usize..4) {
            for (kind, scheme) in SCHEMES {
                let dims = Dims::new(rows, blocks * kind.elements());
                let weight = weight(scheme, dims, seed);
                let row_bytes = blocks * kind.bytes();
                let mut data = vec![0; rows * row_bytes];
                let written = Blocks::new(&weight, kind);
                for (row, out) in data.chunks_mut(row_bytes).enumerate() {
                    written.row(row, out);
                }
                prop_assert_eq!(data.len(), scheme.bytes(dims.rows, dims.cols));
                let read = BlockWeight::new(kind, dims, data.into()).unwrap();
                let read = read.to_affine().unwrap();
                let (mut a, mut b) = (vec![0.0; dims.cols], vec![0.0; dims.cols]);
                for row in 0..rows {
                    weight.dequantize_row(row, &mut a);
                    read.dequantize_row(row, &mut b);
                    prop_assert_eq!(&a, &b, "{} row {}", kind, row);
                }
            }
        }
    }

    #[test]
    fn schemes_and_types_name_each_other() {
        for (kind, scheme) in SCHEMES {
            assert_eq!(kind_of(scheme), Some(kind));
            assert_eq!(scheme_of(kind), Some(scheme));
            scheme.check().unwrap();
        }
        assert_eq!(scheme_of(BlockType::Q2_K), None);
        // Rows of whole super-blocks are served by these; 32 inputs more want the others too.
        assert_eq!(candidates(Bits::B4, [512, 1024]).len(), 4);
        assert_eq!(candidates(Bits::B4, [512, 544]).len(), 8);
        assert_eq!(candidates(Bits::B5, [512]).len(), 3);
    }
}
