//! Products with f32 activations: codes become floats in registers (for few rows of x) or in a
//! tile that stays in the cache (for many).

#![allow(
    clippy::needless_range_loop,
    reason = "registers are indexed by panel and column"
)]

use super::fetch::fetch_ahead;
use super::input::Prepared;
use super::pack::{PackedZeros, PanelWeight, UnitCodes};
use crate::simd::{LANES, Simd};
use std::ops::Range;

/// Most columns of an f32 GEMV kernel.
pub(crate) const GEMV_COLUMNS: usize = 4;

/// Panels that an f32 GEMV kernel takes at a time, by columns - 1: with three sums or more that do not wait for each other.
pub(crate) const GEMV_TOGETHER: [usize; GEMV_COLUMNS] = [4, 2, 1, 1];

/// Conversion of a unit of 4 bytes to floats.
pub(crate) trait Units {
    /// The codes that this converts.
    const CODES: UnitCodes;
    /// Subtracted from codes to centre them; 0 for dense weights.
    const CENTRE: f32;
    /// Number of inputs in a unit.
    const INPUTS: usize = Self::CODES.inputs();
    /// Number of 4-byte words in a unit.
    const WORDS: usize = Self::CODES.words();

    /// Inputs `8 piece ..` of the unit at `p`, in order; a unit with fewer inputs fills the first places. `levels` are
    /// those of [`levels`].
    ///
    /// # Safety
    /// A unit of `CODES` is at `p`.
    unsafe fn expand<S: Simd>(s: S, levels: S::I, p: *const u32, piece: usize) -> [S::F; 8];

    /// Four codes per lane for integer products: those that correspond to the `i`-th four bytes of
    /// interleaved activations.
    ///
    /// # Safety
    /// A unit of `CODES`, which must be integers, is at `p`.
    unsafe fn quad<S: Simd>(s: S, levels: S::I, p: *const u32, i: usize) -> S::I {
        let _ = (levels, i);
        // SAFETY: by contract.
        unsafe { s.load_bits(p) }
    }
}

/// The levels of a weight's codes, for [`Simd::lookup`].
#[inline(always)]
pub(super) fn levels<S: Simd>(s: S, w: &PanelWeight) -> S::I {
    // SAFETY: an array of 16.
    unsafe { s.load_fours(w.levels.as_ptr().cast()) }
}

/// Repeats the first entries of a unit to fill 8 places; only the first `inputs()` are used.
macro_rules! units {
    ($name:ident, $codes:expr, $centre:expr, $method:ident, [$($i:literal),*]) => {
        /// Marker for [`Units`].
        pub(crate) struct $name;
        impl Units for $name {
            const CODES: UnitCodes = $codes;
            const CENTRE: f32 = $centre;
            #[inline(always)]
            unsafe fn expand<S: Simd>(s: S, _: S::I, p: *const u32, _: usize) -> [S::F; 8] {
                // SAFETY: by contract.
                let u = s.$method(unsafe { s.load_bits(p) });
                [$(u[$i]),*]
            }
        }
    };
}

/// The eight inputs whose even ones are in the bytes of the first of `quads` and odd ones in those of the second, less
/// `centre`.
#[inline(always)]
fn merged<S: Simd>(s: S, quads: [S::I; 2], centre: f32) -> [S::F; 8] {
    let centred = s.splat(128.0 - centre);
    let [even, odd] = quads.map(|q| s.byte_units(q).map(|v| s.add(v, centred)));
    [
        even[0], odd[0], even[1], odd[1], even[2], odd[2], even[3], odd[3],
    ]
}

/// [`Units`] of codes in two planes: words of low nibbles of 8 inputs each, then one of high bits.
macro_rules! planes {
    ($name:ident, $codes:expr, $centre:literal, high: $bits:literal) => {
        /// Marker for [`Units`].
        pub(crate) struct $name;
        impl Units for $name {
            const CODES: UnitCodes = $codes;
            const CENTRE: f32 = $centre;
            #[inline(always)]
            unsafe fn expand<S: Simd>(
                s: S,
                levels: S::I,
                p: *const u32,
                piece: usize,
            ) -> [S::F; 8] {
                let quad = |half| {
                    // SAFETY: by contract.
                    unsafe { Self::quad(s, levels, p, 2 * piece + half) }
                };
                merged(s, [quad(0), quad(1)], $centre)
            }
            #[inline(always)]
            unsafe fn quad<S: Simd>(s: S, _: S::I, p: *const u32, i: usize) -> S::I {
                let last = $codes.words() - 1;
                // SAFETY: by contract.
                let (low, high) = unsafe {
                    (
                        s.load_bits(p.add(i / 2 * LANES)),
                        s.load_bits(p.add(last * LANES)),
                    )
                };
                let mask = 0x0101_0101 * ((1 << $bits) - 1);
                s.with_high(s.split_nibbles(low)[i % 2], high, (i * $bits) as i32, mask)
            }
        }
    };
}
units!(
    F32,
    UnitCodes::F32,
    0.0,
    f32_units,
    [0, 0, 0, 0, 0, 0, 0, 0]
);
units!(
    F16,
    UnitCodes::F16,
    0.0,
    f16_units,
    [0, 1, 0, 1, 0, 1, 0, 1]
);
units!(
    Bf16,
    UnitCodes::Bf16,
    0.0,
    bf16_units,
    [0, 1, 0, 1, 0, 1, 0, 1]
);
units!(
    Byte,
    UnitCodes::Byte,
    128.0,
    byte_units,
    [0, 1, 2, 3, 0, 1, 2, 3]
);
planes!(Five, UnitCodes::Five, 16.0, high: 1);
planes!(Six, UnitCodes::Six, 32.0, high: 2);

/// Marker for [`Units`] that [`int8::spread`](super::int8::spread) made of others: four codes below
/// 64 each, in the order and with the centre that those have; `SHORT` of their products fit [`Simd::SHORT_SUMS`].
pub(crate) struct Quads<const SHORT: usize>;
impl<const SHORT: usize> Units for Quads<SHORT> {
    const CODES: UnitCodes = UnitCodes::Nibble; // multiplied as nibbles are
    const CENTRE: f32 = 0.0;
    const INPUTS: usize = 4;
    const WORDS: usize = 1;

    #[inline(always)]
    unsafe fn expand<S: Simd>(_: S, _: S::I, _: *const u32, _: usize) -> [S::F; 8] {
        unreachable!("integer products alone take them")
    }
}

/// Marker for [`Units`]: 4-bit codes that number the levels of a table.
pub(crate) struct Levels;
impl Units for Levels {
    const CODES: UnitCodes = UnitCodes::Levels;
    const CENTRE: f32 = 128.0;
    #[inline(always)]
    unsafe fn expand<S: Simd>(s: S, levels: S::I, p: *const u32, _: usize) -> [S::F; 8] {
        // SAFETY: by contract.
        let quads = unsafe { [Self::quad(s, levels, p, 0), Self::quad(s, levels, p, 1)] };
        merged(s, quads, Self::CENTRE)
    }
    #[inline(always)]
    unsafe fn quad<S: Simd>(s: S, levels: S::I, p: *const u32, i: usize) -> S::I {
        // SAFETY: by contract.
        s.lookup(levels, s.split_nibbles(unsafe { s.load_bits(p) })[i])
    }
}

/// Marker for [`Units`].
pub(crate) struct Nibble;
impl Units for Nibble {
    const CODES: UnitCodes = UnitCodes::Nibble;
    const CENTRE: f32 = 8.0;
    #[inline(always)]
    unsafe fn expand<S: Simd>(s: S, _: S::I, p: *const u32, _: usize) -> [S::F; 8] {
        // SAFETY: by contract.
        s.nibble_units(unsafe { s.load_bits(p) })
    }
    #[inline(always)]
    unsafe fn quad<S: Simd>(s: S, _: S::I, p: *const u32, i: usize) -> S::I {
        // SAFETY: by contract.
        s.split_nibbles(unsafe { s.load_bits(p) })[i]
    }
}

/// The offset per centred code, `o + centre * s`, of the 16 rows of a panel in group `at =
/// panel * groups + group`; `None` if it is zero.
///
/// # Safety
/// `at` is a group of `w`.
#[inline(always)]
pub(crate) unsafe fn offset<S: Simd>(
    s: S,
    w: &PanelWeight,
    at: usize,
    scale: S::F,
    centre: f32,
) -> Option<S::F> {
    // SAFETY: every array holds 16 values for `at`.
    unsafe {
        let integer = |z: S::F| s.mul(scale, s.sub(s.splat(centre), z));
        match &w.zeros {
            PackedZeros::None => None,
            PackedZeros::Nibbles(z) => Some(integer(s.load_u4(z.as_ptr().add(at * LANES / 2)))),
            PackedZeros::Bytes(z) => Some(integer(s.load_u8(z.as_ptr().add(at * LANES)))),
            PackedZeros::Offsets(o) => {
                let o = s.load_f16(o.as_ptr().add(at * LANES));
                Some(s.fma(scale, s.splat(centre), o))
            }
        }
    }
}

/// Writes units `units` of one panel as floats `[input][16]`.
///
/// # Safety
/// `panel` and `units` lie inside `w`, which holds `U::CODES`; `out` has room for 16 floats
/// for each of the units' inputs.
#[inline(always)]
pub(crate) unsafe fn dequantize<S: Simd, U: Units>(
    s: S,
    w: &PanelWeight,
    panel: usize,
    units: Range<usize>,
    out: *mut f32,
) {
    let (n, words) = (U::CODES.inputs(), U::CODES.words());
    let (pieces, of_piece) = (n.div_ceil(8), n.min(8));
    let levels = levels(s, w);
    // SAFETY: by contract.
    unsafe {
        let data = w.data.as_ptr().add(panel * w.units * words * LANES);
        let mut out = out;
        let mut u = units.start;
        while u < units.end {
            // Consecutive units that share a group.
            let group = u * n / w.group;
            let end = ((group + 1) * w.group / n).min(units.end);
            let by = factors::<S, U>(s, w, panel * w.groups + group);
            while u < end {
                for piece in 0..pieces {
                    let v = U::expand(s, levels, data.add(u * words * LANES), piece);
                    for (i, &v) in v.iter().enumerate() {
                        if i < of_piece {
                            s.store(out.add(i * LANES), weight::<S, U>(s, v, by));
                        }
                    }
                    out = out.add(of_piece * LANES);
                }
                u += 1;
            }
        }
    }
}

/// Panels from `panel` on, `P` of them, times `C` rows of x: `out` is `[P][C][16]`.
///
/// A weight becomes a float as in [`dequantize`], and the products are added in the order of the inputs, one after
/// another, as in [`tile`]: a row has the same bits however many rows are multiplied with it. Several panels
/// at a time hide how long an addition takes.
///
/// # Safety
/// The panels lie inside `w`, which holds `U::CODES`; `x` was prepared for `w` as f32 with one
/// block of `C` columns; `out` has room for `16 P C` floats.
#[inline(always)]
pub(crate) unsafe fn gemv<S: Simd, U: Units, const P: usize, const C: usize>(
    s: S,
    w: &PanelWeight,
    x: &Prepared,
    panel: usize,
    out: *mut f32,
) {
    let (n, words) = (U::CODES.inputs(), U::CODES.words());
    let (pieces, of_piece) = (n.div_ceil(8), n.min(8));
    let levels = levels(s, w);
    // SAFETY: by contract.
    unsafe {
        let stride = w.units * words * LANES;
        let data = w.data.as_ptr().add(panel * stride);
        let xs = x.floats.as_ptr();
        let mut acc = [[s.splat(0.0); C]; P];
        let mut u = 0;
        for group in 0..w.groups {
            let end = ((group + 1) * w.group / n).min(w.units);
            let mut by = [[s.splat(0.0); 2]; P];
            for p in 0..P {
                by[p] = factors::<S, U>(s, w, (panel + p) * w.groups + group);
            }
            while u < end {
                for p in 0..P {
                    let codes = data.add(p * stride + u * words * LANES);
                    fetch_ahead(s, codes, words);
                    for piece in 0..pieces {
                        let v = U::expand(s, levels, codes, piece);
                        for (i, &v) in v.iter().enumerate() {
                            if i < of_piece {
                                let v = weight::<S, U>(s, v, by[p]);
                                for c in 0..C {
                                    let x = s.splat(*xs.add((u * n + piece * 8 + i) * C + c));
                                    acc[p][c] = s.fma(v, x, acc[p][c]);
                                }
                            }
                        }
                    }
                }
                u += 1;
            }
        }
        for p in 0..P {
            for c in 0..C {
                s.store(out.add((p * C + c) * LANES), acc[p][c]);
            }
        }
    }
}

/// Scale and offset of centred codes in group `at = panel * groups + group`; not used for weights that are not
/// codes.
///
/// # Safety
/// `at` is a group of `w`.
#[inline(always)]
unsafe fn factors<S: Simd, U: Units>(s: S, w: &PanelWeight, at: usize) -> [S::F; 2] {
    if U::CENTRE == 0.0 {
        return [s.splat(1.0), s.splat(0.0)];
    }
    // SAFETY: by contract.
    unsafe {
        let scale = s.load_f16(w.scales.as_ptr().add(at * LANES));
        let shift = offset(s, w, at, scale, U::CENTRE);
        [scale, shift.unwrap_or(s.splat(0.0))]
    }
}

/// The weight of a centred code, given its [`factors`].
#[inline(always)]
fn weight<S: Simd, U: Units>(s: S, code: S::F, [scale, shift]: [S::F; 2]) -> S::F {
    match U::CENTRE == 0.0 {
        true => code,
        false => s.fma(code, scale, shift),
    }
}

/// `P` panels of bf16, from `data` on, times block `block` of `C` columns of x in pairs of bf16: `out`
/// is `[C][16]` for each panel, `out_stride` floats apart. Pairs are added in their order, for any `P` and `C`.
///
/// # Safety
/// The panels are those of `w`, which holds bf16; `x` was prepared for `w` as bf16 in blocks of
/// `C` columns; `out` has room.
#[inline(always)]
#[allow(
    clippy::too_many_arguments,
    reason = "the table's type of dot products"
)]
pub(crate) unsafe fn dot_bf16<S: Simd, const P: usize, const C: usize>(
    s: S,
    w: &PanelWeight,
    x: &Prepared,
    data: *const u32,
    _: usize,
    block: usize,
    out: *mut f32,
    out_stride: usize,
) {
    // SAFETY: by contract.
    unsafe {
        let stride = w.units * LANES;
        let xs = x.pairs.as_ptr().add(block * w.units * C);
        let mut acc = [[s.splat(0.0); C]; P];
        for u in 0..w.units {
            let mut v = [s.splat_i(0); P];
            for p in 0..P {
                let codes = data.add(p * stride + u * LANES);
                if C <= GEMV_COLUMNS {
                    fetch_ahead(s, codes, 1);
                }
                v[p] = s.load_bits(codes);
            }
            for c in 0..C {
                let pair = *xs.add(u * C + c);
                for p in 0..P {
                    acc[p][c] = s.dot2_bf16(acc[p][c], v[p], pair);
                }
            }
        }
        for p in 0..P {
            for c in 0..C {
                s.store(out.add(p * out_stride + c * LANES), acc[p][c]);
            }
        }
    }
}

/// A block of a matrix product: `P` panels of floats `[k][16]`, `stride` floats apart, times
/// `C` columns, element `(i, c)` at `x[i * SK + c * SC]`. Results are 16 floats per panel
/// and column, `out_stride` and `column_stride` apart; with `accumulate` they are added.
///
/// # Safety
/// The pointers are valid for these shapes.
#[inline(always)]
#[allow(
    clippy::too_many_arguments,
    reason = "a matrix product's operands and strides"
)]
pub(crate) unsafe fn tile<
    S: Simd,
    const P: usize,
    const C: usize,
    const SK: usize,
    const SC: usize,
>(
    s: S,
    k: usize,
    w: *const f32,
    stride: usize,
    x: *const f32,
    out: *mut f32,
    out_stride: usize,
    column_stride: usize,
    accumulate: bool,
) {
    // SAFETY: by contract.
    unsafe {
        let mut acc = [[s.splat(0.0); C]; P];
        if accumulate {
            for p in 0..P {
                for c in 0..C {
                    acc[p][c] = s.load(out.add(p * out_stride + c * column_stride));
                }
            }
        }
        for i in 0..k {
            let mut v = [s.splat(0.0); P];
            for p in 0..P {
                v[p] = s.load(w.add(p * stride + i * LANES));
            }
            for c in 0..C {
                let x = s.splat(*x.add(i * SK + c * SC));
                for p in 0..P {
                    acc[p][c] = s.fma(v[p], x, acc[p][c]);
                }
            }
        }
        for p in 0..P {
            for c in 0..C {
                s.store(out.add(p * out_stride + c * column_stride), acc[p][c]);
            }
        }
    }
}
