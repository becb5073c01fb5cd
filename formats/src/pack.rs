//! Canonical packing of codes: row-major, low bits first, each row from a fresh byte.

use crate::scheme::Bits;

/// Packs one row of codes, each below `2^bits`: for 4 bits, code `2i` is the low
/// nibble of byte `i` and `2i + 1` the high one. `out` is `bits.bytes(codes.len())` long.
pub fn pack_row(bits: Bits, codes: &[u8], out: &mut [u8]) {
    match bits {
        Bits::B8 => out.copy_from_slice(codes),
        Bits::B4 => {
            for (o, pair) in out.iter_mut().zip(codes.chunks(2)) {
                *o = (pair[0] & 15) | (pair.get(1).copied().unwrap_or(0) << 4);
            }
        }
    }
}

/// The inverse of [`pack_row`]: fills `codes` from a packed row.
pub fn unpack_row(bits: Bits, packed: &[u8], codes: &mut [u8]) {
    match bits {
        Bits::B8 => codes.copy_from_slice(&packed[..codes.len()]),
        Bits::B4 => {
            let (pairs, last) = codes.as_chunks_mut::<2>();
            for ([low, high], &b) in pairs.iter_mut().zip(packed) {
                (*low, *high) = (b & 15, b >> 4);
            }
            for c in last {
                *c = packed[pairs.len()] & 15;
            }
        }
    }
}

/// Code `i` of a packed row.
#[inline]
pub fn code_at(bits: Bits, packed: &[u8], i: usize) -> u8 {
    match bits {
        Bits::B8 => packed[i],
        Bits::B4 => (packed[i / 2] >> (4 * (i & 1))) & 15,
    }
}

/// Packs `rows` rows of `cols` codes each.
pub fn pack_rows(bits: Bits, codes: &[u8], cols: usize) -> Vec<u8> {
    let stride = bits.bytes(cols);
    let rows = codes.len().checked_div(cols).unwrap_or(0);
    let mut out = vec![0; rows * stride];
    for (o, c) in out.chunks_mut(stride.max(1)).zip(codes.chunks(cols.max(1))) {
        pack_row(bits, c, o);
    }
    out
}
