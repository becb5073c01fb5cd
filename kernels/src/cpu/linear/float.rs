//! Products with f32 activations: codes become floats in registers (for few rows of x) or in a
//! tile that stays in the cache (for many).

#![allow(
    clippy::needless_range_loop,
    reason = "registers are indexed by panel and column"
)]

use super::fetch::fetch_ahead;
use super::input::Prepared;
use super::pack::{PackedZeros, PanelWeight, UnitCodes};
use crate::cpu::simd::{LANES, Simd};
use std::ops::Range;

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

    /// Inputs `8 piece ..` of the unit at `p`, in order; a unit with fewer inputs fills the first places.
    ///
    /// # Safety
    /// A unit of `CODES` is at `p`.
    unsafe fn expand<S: Simd>(s: S, p: *const u32, piece: usize) -> [S::F; 8];

    /// Four codes per lane for integer products: those that correspond to the `i`-th four bytes of
    /// interleaved activations.
    ///
    /// # Safety
    /// A unit of `CODES`, which must be integers, is at `p`.
    unsafe fn quad<S: Simd>(s: S, p: *const u32, i: usize) -> S::I {
        let _ = i;
        // SAFETY: by contract.
        unsafe { s.load_bits(p) }
    }
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
            unsafe fn expand<S: Simd>(s: S, p: *const u32, _: usize) -> [S::F; 8] {
                // SAFETY: by contract.
                let u = s.$method(unsafe { s.load_bits(p) });
                [$(u[$i]),*]
            }
        }
    };
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
            unsafe fn expand<S: Simd>(s: S, p: *const u32, piece: usize) -> [S::F; 8] {
                // SAFETY: by contract.
                let quads = unsafe { [0, 1].map(|half| Self::quad(s, p, 2 * piece + half)) };
                let centred = s.splat(128.0 - $centre);
                let [even, odd] = quads.map(|q| s.byte_units(q).map(|v| s.add(v, centred)));
                [
                    even[0], odd[0], even[1], odd[1], even[2], odd[2], even[3], odd[3],
                ]
            }
            #[inline(always)]
            unsafe fn quad<S: Simd>(s: S, p: *const u32, i: usize) -> S::I {
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
/// 64 each, in the order and with the centre that those have.
pub(crate) struct Quads;
impl Units for Quads {
    const CODES: UnitCodes = UnitCodes::Nibble; // multiplied as nibbles are
    const CENTRE: f32 = 0.0;
    const INPUTS: usize = 4;
    const WORDS: usize = 1;

    #[inline(always)]
    unsafe fn expand<S: Simd>(_: S, _: *const u32, _: usize) -> [S::F; 8] {
        unreachable!("integer products alone take them")
    }
}

/// Marker for [`Units`].
pub(crate) struct Nibble;
impl Units for Nibble {
    const CODES: UnitCodes = UnitCodes::Nibble;
    const CENTRE: f32 = 8.0;
    #[inline(always)]
    unsafe fn expand<S: Simd>(s: S, p: *const u32, _: usize) -> [S::F; 8] {
        // SAFETY: by contract.
        s.nibble_units(unsafe { s.load_bits(p) })
    }
    #[inline(always)]
    unsafe fn quad<S: Simd>(s: S, p: *const u32, i: usize) -> S::I {
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
    // SAFETY: by contract.
    unsafe {
        let data = w.data.as_ptr().add(panel * w.units * words * LANES);
        let mut out = out;
        let mut u = units.start;
        while u < units.end {
            // Consecutive units that share a group.
            let group = u * n / w.group;
            let end = ((group + 1) * w.group / n).min(units.end);
            let affine = !w.scales.is_empty();
            let at = panel * w.groups + group;
            let scale = if affine {
                s.load_f16(w.scales.as_ptr().add(at * LANES))
            } else {
                s.splat(1.0)
            };
            let shift = if affine {
                offset(s, w, at, scale, U::CENTRE)
            } else {
                None
            };
            let shift = shift.unwrap_or(s.splat(0.0));
            while u < end {
                for piece in 0..pieces {
                    let v = U::expand(s, data.add(u * words * LANES), piece);
                    for (i, &v) in v.iter().enumerate() {
                        if i < of_piece {
                            let v = if U::CENTRE == 0.0 {
                                v
                            } else {
                                s.fma(v, scale, shift)
                            };
                            s.store(out.add(i * LANES), v);
                        }
                    }
                    out = out.add(of_piece * LANES);
                }
                u += 1;
            }
        }
    }
}

/// One panel times `C` rows of x: `out` is `[C][16]`.
///
/// # Safety
/// `panel` lies inside `w`, which holds `U::CODES`; `x` was prepared for `w` as f32 with one
/// block of `C` columns; `out` has room for `16 C` floats.
#[inline(always)]
pub(crate) unsafe fn gemv<S: Simd, U: Units, const C: usize>(
    s: S,
    w: &PanelWeight,
    x: &Prepared,
    panel: usize,
    out: *mut f32,
) {
    let (n, words) = (U::CODES.inputs(), U::CODES.words());
    let (pieces, of_piece) = (n.div_ceil(8), n.min(8));
    // Chains of additions per column: enough to hide their latency, few enough to fit the
    // registers.
    let chains = if C <= 2 { 4 } else { 2 };
    // SAFETY: by contract.
    unsafe {
        let data = w.data.as_ptr().add(panel * w.units * words * LANES);
        let xs = x.floats.as_ptr();
        let mut y = [s.splat(0.0); C];
        let mut u = 0;
        for group in 0..w.groups {
            let end = ((group + 1) * w.group / n).min(w.units);
            let mut acc = [[s.splat(0.0); 4]; C];
            while u < end {
                let p = data.add(u * words * LANES);
                fetch_ahead(s, p, words);
                for piece in 0..pieces {
                    let v = U::expand(s, p, piece);
                    for (i, &v) in v.iter().enumerate() {
                        if i < of_piece {
                            // Dense units hold fewer inputs than there are chains: alternate
                            // by unit as well.
                            for c in 0..C {
                                let x = s.splat(*xs.add((u * n + piece * 8 + i) * C + c));
                                let chain = i % chains;
                                acc[c][chain] = s.fma(v, x, acc[c][chain]);
                            }
                        }
                    }
                }
                u += 1;
            }
            let at = panel * w.groups + group;
            for c in 0..C {
                let mut total = acc[c][0];
                for chain in 1..chains {
                    total = s.add(total, acc[c][chain]);
                }
                if U::CENTRE == 0.0 {
                    y[c] = s.add(y[c], total);
                } else {
                    let scale = s.load_f16(w.scales.as_ptr().add(at * LANES));
                    y[c] = s.fma(scale, total, y[c]);
                    if let Some(shift) = offset(s, w, at, scale, U::CENTRE) {
                        let sum = s.splat(*x.sums.as_ptr().add(group * C + c));
                        y[c] = s.fma(shift, sum, y[c]);
                    }
                }
            }
        }
        for (c, &y) in y.iter().enumerate() {
            s.store(out.add(c * LANES), y);
        }
    }
}

/// `P` panels of bf16, from `data` on, times block `block` of `C` columns of x in pairs of bf16: `out`
/// is `[C][16]` for each panel, `out_stride` floats apart.
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
    // Several chains of additions: a single one would wait for its own last step.
    let chains = match P * C {
        1 | 2 => 4,
        3 | 4 => 2,
        _ => 1,
    };
    // SAFETY: by contract.
    unsafe {
        let stride = w.units * LANES;
        let xs = x.pairs.as_ptr().add(block * w.units * C);
        let mut acc = [[[s.splat(0.0); 4]; C]; P];
        let mut u = 0;
        while u < w.units {
            if P == 1 {
                fetch_ahead(s, data.add(u * LANES), chains);
            }
            for chain in 0..chains {
                if u + chain < w.units {
                    for c in 0..C {
                        let pair = *xs.add((u + chain) * C + c);
                        for p in 0..P {
                            let v = s.load_bits(data.add(p * stride + (u + chain) * LANES));
                            acc[p][c][chain] = s.dot2_bf16(acc[p][c][chain], v, pair);
                        }
                    }
                }
            }
            u += chains;
        }
        for p in 0..P {
            for c in 0..C {
                let mut y = acc[p][c][0];
                for chain in 1..chains {
                    y = s.add(y, acc[p][c][chain]);
                }
                s.store(out.add(p * out_stride + c * LANES), y);
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
