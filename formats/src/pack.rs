//! Canonical packing of codes: row-major, low bits first, each row from a fresh byte.
//!
//! A row's codes are stored in planes ([`Bits::planes`]): 6-bit codes are a plane of their low 4 bits,
//! two codes per byte, followed by a plane of their high 2 bits, four per byte. Devices that hold codes
//! as bytes combine the planes; kernels for 4 bits read the low plane alone.

use crate::scheme::Bits;

/// Packs one row of codes, each below `2^bits`: for 4 bits, code `2i` is the low
/// nibble of byte `i` and `2i + 1` the high one. `out` is `bits.bytes(codes.len())` long.
pub fn pack_row(bits: Bits, codes: &[u8], out: &mut [u8]) {
    let (mut out, mut shift) = (out, 0);
    for &width in bits.planes() {
        let (plane, rest) = out.split_at_mut((codes.len() * width).div_ceil(8));
        // The width is a constant in each branch, so that the compiler can vectorize.
        match width {
            8 => plane.copy_from_slice(codes),
            4 => pack_plane::<4, 2>(codes, shift, plane),
            2 => pack_plane::<2, 4>(codes, shift, plane),
            _ => pack_plane::<1, 8>(codes, shift, plane),
        }
        (out, shift) = (rest, shift + width);
    }
}

/// Packs bits `shift .. shift + WIDTH` of all codes.
fn pack_plane<const WIDTH: usize, const PER_BYTE: usize>(
    codes: &[u8],
    shift: usize,
    plane: &mut [u8],
) {
    let part = |(i, c): (usize, &u8)| ((c >> shift) & mask(WIDTH)) << (i * WIDTH);
    let byte = |codes: &[u8]| codes.iter().enumerate().map(part).fold(0, |o, p| o | p);
    let (whole, last) = codes.as_chunks::<PER_BYTE>();
    for (o, codes) in plane.iter_mut().zip(whole) {
        *o = byte(codes);
    }
    if !last.is_empty() {
        plane[whole.len()] = byte(last);
    }
}

/// The inverse of [`pack_row`]: fills `codes` from a packed row.
pub fn unpack_row(bits: Bits, packed: &[u8], codes: &mut [u8]) {
    let (mut packed, mut shift) = (packed, 0);
    for &width in bits.planes() {
        let (plane, rest) = packed.split_at((codes.len() * width).div_ceil(8));
        match width {
            8 => codes.copy_from_slice(plane),
            4 => unpack_plane::<4, 2>(plane, shift, codes),
            2 => unpack_plane::<2, 4>(plane, shift, codes),
            _ => unpack_plane::<1, 8>(plane, shift, codes),
        }
        (packed, shift) = (rest, shift + width);
    }
}

/// Adds bits `shift ..` to codes whose lower bits are known.
fn unpack_plane<const WIDTH: usize, const PER_BYTE: usize>(
    plane: &[u8],
    shift: usize,
    codes: &mut [u8],
) {
    let (whole, last) = codes.as_chunks_mut::<PER_BYTE>();
    let part = |byte: u8, i: usize| ((byte >> (i * WIDTH)) & mask(WIDTH)) << shift;
    let below = mask(shift);
    for (codes, &byte) in whole.iter_mut().zip(plane) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code = *code & below | part(byte, i);
        }
    }
    for (i, code) in last.iter_mut().enumerate() {
        *code = *code & below | part(plane[whole.len()], i);
    }
}

/// A mask of the lowest `width` bits, for fewer than 8.
const fn mask(width: usize) -> u8 {
    ((1u16 << width) - 1) as u8
}

/// Code `i` of a packed row of `n` codes.
#[inline]
pub fn code_at(bits: Bits, packed: &[u8], n: usize, i: usize) -> u8 {
    let (mut code, mut start, mut shift) = (0, 0, 0);
    for &width in bits.planes() {
        let at = i * width;
        let byte = packed[start + at / 8] >> (at % 8);
        code |= (u16::from(byte) & ((1 << width) - 1)) << shift;
        start += (n * width).div_ceil(8);
        shift += width;
    }
    code as u8
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
