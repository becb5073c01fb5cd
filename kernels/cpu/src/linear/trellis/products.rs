//! Products of trellis codes and the preparation of their inputs, generic over the instruction set.
//!
//! A part of a tile is 32 steps of its 32 sequences: 128 rows by 8 quads of inputs. Step `4 m + i` of sequence
//! `4 g + t` is quad `4 (i / 2) + t` of row `16 m + 8 (i % 2) + g`. A vector holds one step of 16 sequences, four
//! rows by four quads, so that its x is 16 bytes, repeated; the four sums of a row are added at the end.
//! The vectors of a panel (16 rows) are in the order of their first row, and what is made of them has row
//! `4 v + i` of the panel in lane `4 i + v`.

#![allow(
    clippy::needless_range_loop,
    reason = "registers are indexed by panel, column and byte"
)]

use super::super::fetch::AHEAD;
use super::super::input::Prepared;
use super::super::pack::PanelWeight;
use super::pack::{PANELS, PackedTrellis, QUADS, SEQUENCES};
use crate::simd::{LANES, Simd};
use half::f16;
use nq_formats::trellis::{BLOCK, Code};
use nq_kernels::reference::INT16_BASE;
use std::f32::consts::FRAC_1_SQRT_2;
use std::ops::Range;

/// Repeats a block with a constant of each of some values.
macro_rules! each {
    ($name:ident in [$($value:literal)*] $body:block) => {{
        $({
            const $name: usize = $value;
            $body
        })*
    }};
}

/// Where the parts of a strip are.
#[derive(Clone, Copy)]
struct StripParts {
    strip: *const u32,
    /// Parts of a tile, as a power of two.
    shift: u32,
    words: usize,
}

impl StripParts {
    #[inline(always)]
    fn new(w: &PanelWeight, trellis: &PackedTrellis, bits: usize, strip: usize) -> Self {
        let parts = trellis.parts_of_row(w.inputs);
        StripParts {
            strip: w.data[strip * parts * bits * SEQUENCES..].as_ptr(),
            shift: trellis.parts().ilog2(),
            words: bits * SEQUENCES,
        }
    }

    /// The words of part `part`.
    ///
    /// # Safety
    /// The strip has the part.
    #[inline(always)]
    unsafe fn at(self, part: usize) -> PartWords {
        let first = part >> self.shift << self.shift;
        let last = (1 << self.shift) - 1;
        let before = if part == first {
            first + last
        } else {
            part - 1
        };
        // SAFETY: by contract; a sequence is cyclic within its tile.
        unsafe {
            PartWords {
                own: self.strip.add(part * self.words),
                before: self.strip.add((before + 1) * self.words - SEQUENCES),
            }
        }
    }
}

/// Where the words of a part are.
#[derive(Clone, Copy)]
struct PartWords {
    own: *const u32,
    /// Those before its first.
    before: *const u32,
}

/// One step of 16 sequences (half `half` of 32), as the four bytes of each state: the step of a part that ends
/// before bit `end`.
///
/// # Safety
/// `words` are those of a part.
#[inline(always)]
unsafe fn quads<S: Simd>(
    s: S,
    words: PartWords,
    end: usize,
    half: usize,
    multiplier: S::I,
) -> S::I {
    let word = (end - 1) / 32;
    // SAFETY: by contract. Where the second load is not used, none is made.
    let state = unsafe {
        let previous = if word == 0 {
            words.before
        } else {
            words.own.add((word - 1) * SEQUENCES)
        };
        let now = s.load_bits(words.own.add(word * SEQUENCES + half * LANES));
        s.state(s.load_bits(previous.add(half * LANES)), now, end)
    };
    s.mul_i(state, multiplier)
}

/// Strip `strip` times block `block` of `C` columns, each code of `N` bytes, with `M` panels at a time in registers: `out`
/// is `[C][16]` for each of the first `panels` panels of the strip, `stride` floats apart. Steps have `B` bits, or, if it is 0, any number.
///
/// # Safety
/// The strip lies inside `w`; `x` was prepared for `w` as codes of `N` bytes in blocks of `C` columns; `out` has room.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the table's type of products")]
pub(crate) unsafe fn gemv<
    S: Simd,
    const B: usize,
    const C: usize,
    const N: usize,
    const M: usize,
>(
    s: S,
    w: &PanelWeight,
    x: &Prepared,
    strip: usize,
    block: usize,
    panels: usize,
    out: *mut f32,
    stride: usize,
) {
    let trellis = w.trellis();
    let bits = trellis.scheme.step_bits() as usize;
    let multiplier = s.splat_i(trellis.code().multiplier() as i32);
    let parts = trellis.parts_of_row(x.share);
    let mut y = [[[0f32; LANES]; C]; PANELS];
    // SAFETY: by contract.
    let codes = unsafe { x.codes.as_ptr().add(block * x.quads * 4 * C * N) };
    let strip = Strip {
        parts: StripParts::new(w, trellis, bits, strip),
        multiplier,
        codes,
        ahead: (parts * bits * SEQUENCES).max(AHEAD / 4),
    };
    for group in 0..x.groups {
        let own = group * parts..(group + 1) * parts;
        if B == 0 {
            for piece in 0..PANELS / M {
                // SAFETY: by contract.
                unsafe {
                    let sums = strip.piece::<C, N, M>(s, bits, piece, own.clone());
                    add_piece(s, x, block, group, sums, &mut y[piece * M..]);
                }
            }
        }
        each!(PIECE in [0 1 2 3] { if B > 0 && PIECE < PANELS / M {
            // SAFETY: by contract.
            unsafe {
                let sums = strip.piece::<C, N, M>(s, B, PIECE, own.clone());
                add_piece(s, x, block, group, sums, &mut y[PIECE * M..]);
            }
        } });
    }
    for (panel, y) in y[..panels].iter().enumerate() {
        for (c, y) in y.iter().enumerate() {
            // SAFETY: by contract.
            unsafe { s.store(out.add(panel * stride + c * LANES), s.load(y.as_ptr())) };
        }
    }
}

/// A strip that is multiplied with a block of columns.
struct Strip<I> {
    parts: StripParts,
    multiplier: I,
    /// Codes of the block.
    codes: *const i8,
    /// Words that are requested before they are read.
    ahead: usize,
}

impl<I: Copy> Strip<I> {
    /// Integer sums of panels `M piece ..` over `parts`: for each panel, column and byte, a vector of each four rows.
    ///
    /// # Safety
    /// That of [`gemv`].
    #[inline(always)]
    unsafe fn piece<const C: usize, const N: usize, const M: usize>(
        &self,
        s: impl Simd<I = I>,
        bits: usize,
        piece: usize,
        parts: Range<usize>,
    ) -> [[[[I; 4]; N]; C]; M] {
        let mut acc = [[[[s.splat_i(0); 4]; N]; C]; M];
        for part in parts {
            // SAFETY: by contract.
            unsafe {
                let words = self.parts.at(part);
                // The next group's words, a share of them with each piece of this one.
                let lines = |piece: usize| 2 * bits * piece * M / PANELS;
                for line in lines(piece)..lines(piece + 1) {
                    s.prefetch(words.own.wrapping_add(self.ahead + line * LANES));
                }
                let codes = self.codes.add(part * QUADS * 4 * C * N);
                let mut xs = [[[s.splat_i(0); N]; C]; 2];
                for four in 0..2 {
                    for c in 0..C {
                        for n in 0..N {
                            let place = (four * C + c) * N + n;
                            xs[four][c][n] = s.load_fours(codes.add(place * 16));
                        }
                    }
                }
                each!(PANEL in [0 1 2 3] { if PANEL < M {
                    each!(HALF in [0 1] { each!(I in [0 1 2 3] {
                        let end = bits * (4 * (piece * M + PANEL) + I + 1);
                        let w = quads(s, words, end, HALF, self.multiplier);
                        for c in 0..C {
                            for n in 0..N {
                                let acc = &mut acc[PANEL][c][n][2 * (I % 2) + HALF];
                                *acc = s.dot4_lanes(*acc, w, xs[I / 2][c][n]);
                            }
                        }
                    }) });
                } });
            }
        }
        acc
    }
}

/// Adds the sums of [`Strip::piece`] over group `group` to the panels' results.
///
/// # Safety
/// `x` has the block and group, in blocks of `C` columns of `N` bytes.
#[inline(always)]
unsafe fn add_piece<S: Simd, const C: usize, const N: usize, const M: usize>(
    s: S,
    x: &Prepared,
    block: usize,
    group: usize,
    acc: [[[[S::I; 4]; N]; C]; M],
    y: &mut [[[f32; LANES]; C]],
) {
    for panel in 0..M {
        for c in 0..C {
            let mut sums = [s.splat_i(0); N];
            for n in 0..N {
                sums[n] = s.sum_fours(acc[panel][c][n]);
            }
            let y = &mut y[panel][c];
            // SAFETY: by contract.
            unsafe {
                let sum = add_group::<S, C, N>(s, s.load(y.as_ptr()), sums, x, block, group, c);
                s.store(y.as_mut_ptr(), sum);
            }
        }
    }
}

/// `y` and the product of a group: the integers `sums`, less those of the constant that bytes are centred by, times
/// the group's scale.
///
/// # Safety
/// `x` has the group and column, in blocks of `C` columns of `N` bytes.
#[inline(always)]
unsafe fn add_group<S: Simd, const C: usize, const N: usize>(
    s: S,
    y: S::F,
    sums: [S::I; N],
    x: &Prepared,
    block: usize,
    group: usize,
    c: usize,
) -> S::F {
    let groups = x.groups;
    let at = (block * groups + group) * C + c;
    // SAFETY: by contract.
    unsafe {
        let mut centred = [s.splat(0.0); N];
        for n in 0..N {
            let start = s.splat(*x.sums.as_ptr().add(at * N + n));
            centred[n] = s.add(s.to_f32(sums[n]), start);
        }
        let mut dot = centred[0];
        for &low in &centred[1..] {
            dot = s.fma(dot, s.splat(INT16_BASE), low);
        }
        s.fma(dot, s.splat(*x.scales.as_ptr().add(at)), y)
    }
}

/// Writes the bytes of the states of panels `panels` and parts `parts` of a strip, `[panels][quads][16 rows]`.
///
/// # Safety
/// The strip lies inside `w` and has these parts; `out` has room.
#[inline(always)]
pub(crate) unsafe fn spread<S: Simd>(
    s: S,
    w: &PanelWeight,
    strip: usize,
    panels: Range<usize>,
    parts: Range<usize>,
    mut out: *mut u32,
) {
    let trellis = w.trellis();
    let bits = trellis.scheme.step_bits() as usize;
    let at = StripParts::new(w, trellis, bits, strip);
    let multiplier = s.splat_i(trellis.code().multiplier() as i32);
    // SAFETY: by contract.
    unsafe {
        for panel in panels {
            for part in parts.clone() {
                let words = at.at(part);
                for four in 0..2 {
                    let first = bits * (4 * panel + 2 * four + 1);
                    let fours = [
                        quads(s, words, first, 0, multiplier),
                        quads(s, words, first, 1, multiplier),
                        quads(s, words, first + bits, 0, multiplier),
                        quads(s, words, first + bits, 1, multiplier),
                    ];
                    for quad in s.transpose_fours(fours) {
                        s.store_bits(out, quad);
                        out = out.add(LANES);
                    }
                }
            }
        }
    }
}

/// Groups `groups` of `P` panels times block `block` of `C` columns, each code of `N` bytes; `out` is `[C][16]` for
/// each panel, `out_stride` floats apart. Later groups add to what is there.
///
/// # Safety
/// `data` holds the bytes of the groups from [`spread`], `stride` words a panel; `x` has the block, in blocks of `C`
/// columns of `N` bytes; `out` has room.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the table's type of products")]
pub(crate) unsafe fn dot<S: Simd, const P: usize, const C: usize, const N: usize>(
    s: S,
    mut data: *const u32,
    stride: usize,
    x: &Prepared,
    block: usize,
    groups: Range<usize>,
    out: *mut f32,
    out_stride: usize,
) {
    let fours = x.quads / x.groups / 4;
    // SAFETY: by contract.
    unsafe {
        let first = block * x.quads + groups.start * fours * 4;
        let mut codes = x.codes.as_ptr().add(first * 4 * C * N);
        let mut y = [[s.splat(0.0); C]; P];
        if groups.start > 0 {
            for (p, y) in y.iter_mut().enumerate() {
                for (c, y) in y.iter_mut().enumerate() {
                    *y = s.load(out.add(p * out_stride + c * LANES));
                }
            }
        }
        for group in groups {
            // Sums that wait for each other are added to in turns, if there are few.
            let turns = if P * C * N < 4 { 3 } else { 0 };
            let mut acc = [[[[s.splat_i(0); N]; C]; P]; 4];
            for _ in 0..fours {
                for t in 0..4 {
                    let acc = &mut acc[t & turns];
                    let mut w = [s.splat_i(0); P];
                    for (p, w) in w.iter_mut().enumerate() {
                        *w = s.load_bits(data.add(p * stride));
                    }
                    for c in 0..C {
                        for n in 0..N {
                            let place = (c * N + n) * 16 + 4 * t;
                            let x = codes.add(place).cast::<i32>().read_unaligned();
                            for p in 0..P {
                                acc[p][c][n] = s.dot4_bytes(acc[p][c][n], w[p], x);
                            }
                        }
                    }
                    data = data.add(LANES);
                }
                codes = codes.add(C * N * 16);
            }
            let [mut acc, others @ ..] = acc;
            if turns > 0 {
                for p in 0..P {
                    for c in 0..C {
                        for n in 0..N {
                            for other in &others {
                                acc[p][c][n] = s.add_i(acc[p][c][n], other[p][c][n]);
                            }
                        }
                    }
                }
            }
            for p in 0..P {
                for c in 0..C {
                    let sums = acc[p][c];
                    y[p][c] = add_group::<S, C, N>(s, y[p][c], sums, x, block, group, c);
                }
            }
        }
        for (p, y) in y.iter().enumerate() {
            for (c, &y) in y.iter().enumerate() {
                s.store(out.add(p * out_stride + c * LANES), y);
            }
        }
    }
}

/// The values of the states whose bytes are `quads`, `[quads][16 rows]`, as `[inputs][16 rows]`.
#[inline(always)]
pub(crate) fn values<S: Simd>(s: S, code: Code, quads: &[u32], out: &mut [f32]) {
    let (quads, _) = quads.as_chunks::<LANES>();
    let scale = s.splat(1.0 / 128.0);
    let width = code.width();
    for (quad, out) in quads.iter().zip(out.chunks_exact_mut(width * LANES)) {
        // SAFETY: an array of 16; `out` has room for each input's 16 rows.
        unsafe {
            // Bytes less 128; their mean is 127.5.
            let mut bytes = s.byte_units(s.load_bits(quad.as_ptr()));
            for byte in &mut bytes {
                *byte = s.add(*byte, s.splat(0.5));
            }
            let [a, b, c, d] = bytes;
            match code {
                Code::Sum => {
                    let sum = s.add(s.add(a, b), s.add(c, d));
                    s.store(out.as_mut_ptr(), s.mul(sum, scale));
                }
                Code::Octagon => {
                    let root = s.splat(FRAC_1_SQRT_2);
                    let first = s.fma(root, s.sub(b, d), a);
                    let second = s.fma(root, s.add(b, d), c);
                    s.store(out.as_mut_ptr(), s.mul(first, scale));
                    s.store(out.as_mut_ptr().add(LANES), s.mul(second, scale));
                }
            }
        }
    }
}

/// Multiplies `x` with `scales`, and each 128 of the products with the Hadamard matrix.
#[inline(always)]
pub(crate) fn transform<S: Simd>(s: S, x: &mut [f32], scales: &[f16]) {
    const VECTORS: usize = BLOCK / LANES;
    let (blocks, _) = x.as_chunks_mut::<BLOCK>();
    let (scales, _) = scales.as_chunks::<BLOCK>();
    // Lanes without the bit of a stride keep their sign, those with it change it.
    let mut signs = [s.splat(0.0); 4];
    for (i, sign) in signs.iter_mut().enumerate() {
        let lanes: [f32; LANES] =
            std::array::from_fn(|lane| if lane >> i & 1 == 0 { 1.0 } else { -1.0 });
        // SAFETY: an array of 16.
        *sign = unsafe { s.load(lanes.as_ptr()) };
    }
    let unit = s.splat(FRAC_1_SQRT_2 / 8.0); // 1 / sqrt 128
    for (x, scales) in blocks.iter_mut().zip(scales) {
        let mut v = [s.splat(0.0); VECTORS];
        for (i, v) in v.iter_mut().enumerate() {
            // SAFETY: 16 values of 128.
            *v = unsafe {
                let scale = s.load_f16(scales.as_ptr().add(i * LANES));
                s.mul(s.load(x.as_ptr().add(i * LANES)), scale)
            };
        }
        for v in &mut v {
            for (i, &sign) in signs.iter().enumerate() {
                *v = s.fma(*v, sign, s.swap_lanes(*v, 1 << i));
            }
        }
        for stride in [1, 2, 4] {
            for i in 0..VECTORS {
                if i & stride == 0 {
                    let (a, b) = (v[i], v[i + stride]);
                    (v[i], v[i + stride]) = (s.add(a, b), s.sub(a, b));
                }
            }
        }
        for (i, &v) in v.iter().enumerate() {
            // SAFETY: as above.
            unsafe { s.store(x.as_mut_ptr().add(i * LANES), s.mul(v, unit)) };
        }
    }
}

/// For each pair `a, b` of `x`, `(a + b) / sqrt 2` and `(b - a) / sqrt 2`. Of each `group` values (a multiple of 16),
/// writes those, then these.
#[inline(always)]
pub(crate) fn turn<S: Simd>(s: S, x: &[f32], group: usize, out: &mut [f32]) {
    let signs: [f32; LANES] = std::array::from_fn(|i| if i % 2 == 0 { 1.0 } else { -1.0 });
    let factors = signs.map(|sign| sign * FRAC_1_SQRT_2);
    // SAFETY: arrays of 16.
    let (signs, factors) = unsafe { (s.load(signs.as_ptr()), s.load(factors.as_ptr())) };
    for (x, out) in x.chunks_exact(group).zip(out.chunks_exact_mut(2 * group)) {
        let (plain, turned) = out.split_at_mut(group);
        plain.copy_from_slice(x);
        let (x, _) = x.as_chunks::<LANES>();
        let (turned, _) = turned.as_chunks_mut::<LANES>();
        for (x, to) in x.iter().zip(turned) {
            // SAFETY: arrays of 16.
            unsafe {
                let v = s.load(x.as_ptr());
                // a + b in even lanes, a - b in odd ones.
                let both = s.fma(v, signs, s.swap_lanes(v, 1));
                s.store(to.as_mut_ptr(), s.mul(both, factors));
            }
        }
    }
}

/// Writes a row's codes as quads to column `c` of a block of `width` columns: four quads go to place `i * width + c`.
/// A quad has the four values of a pair, whose codes are those of [`turn`] in groups of `group`, or, without a group,
/// a code four times.
#[inline(always)]
pub(crate) fn interleave<S: Simd>(
    _: S,
    codes: &[i8],
    group: Option<usize>,
    to: &mut [i8],
    c: usize,
    width: usize,
) {
    let (to, _) = to.as_chunks_mut::<16>();
    let mut to = to[c..].iter_mut().step_by(width);
    let Some(group) = group else {
        let (fours, _) = codes.as_chunks::<4>();
        for (four, to) in fours.iter().zip(to) {
            *to = std::array::from_fn(|i| four[i / 4]);
        }
        return;
    };
    for codes in codes.chunks_exact(2 * group) {
        let (plain, turned) = codes.split_at(group);
        let (plain, _) = plain.as_chunks::<8>();
        let (turned, _) = turned.as_chunks::<8>();
        for ((plain, turned), to) in plain.iter().zip(turned).zip(&mut to) {
            *to = std::array::from_fn(|i| {
                if i % 2 == 0 {
                    plain[i / 2]
                } else {
                    turned[i / 2]
                }
            });
        }
    }
}
