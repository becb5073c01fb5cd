//! Products with int8 and int16 activations: integer dot products within a block of inputs
//! that share both scales, f32 across blocks.
//!
//! With `w = s_w (q - centre) + o'` and `x = s_x a`, a block contributes
//! `s_w s_x (sum (q - centre) a) + o' s_x (sum a)`. The integer sum is exact; the second
//! term is added once per weight group and only if there are zero-points.
//!
//! An int16 code is `255 h + l` with signed bytes `h` and `l`: two integer sums that are combined
//! in f32, which holds `255 (sum q h)` to within its last bit but one. Weights are read once for both,
//! so that if memory is the limit, int16 costs no more than int8. Where the instruction set multiplies integers of 16
//! bits, many columns have such codes in one piece ([`Pairs`]): the integer sum is then rounded once, to the same f32.

use super::fetch::{fetch_ahead, fetch_group, groups_ahead};
use super::float::{Byte, Five, GEMV_COLUMNS, Levels, Nibble, Quads, Six, Units, levels, offset};
use super::input::Prepared;
use super::pack::{PanelWeight, UnitCodes};
use crate::simd::{LANES, Simd, SimdPairs};
use nq_kernels::reference::INT16_BASE;

/// How the codes of [`Units`] are multiplied with four bytes of x, or a pair of integers of 16 bits.
pub(crate) trait Products<S: Simd>: Units {
    /// Dwords of x that a unit takes, of each of its planes.
    const DWORDS: usize = Self::INPUTS / 4;
    /// Most products that [`Simd::SHORT_SUMS`] hold; `None` for products that are not added to those.
    const SHORT: Option<usize>;

    /// Adds the products of one quad, or pair.
    fn add(s: S, sums: S::I, w: S::I, x: i32) -> S::I;
}

/// [`Products`] of bytes: unsigned ones below 64, of which so many fit short sums, or any.
macro_rules! products {
    ($name:ident, $short:expr, $method:ident) => {
        impl<S: Simd> Products<S> for $name {
            const SHORT: Option<usize> = $short;
            #[inline(always)]
            fn add(s: S, sums: S::I, w: S::I, x: i32) -> S::I {
                s.$method(sums, w, x)
            }
        }
    };
}
products!(Nibble, Some(8), dot4_nibbles);
products!(Five, Some(4), dot4_nibbles);
products!(Six, Some(2), dot4_nibbles);
products!(Byte, None, dot4_bytes);
products!(Levels, None, dot4_bytes);
impl<S: Simd, const SHORT: usize> Products<S> for Quads<SHORT> {
    const SHORT: Option<usize> = Some(SHORT);
    #[inline(always)]
    fn add(s: S, sums: S::I, w: S::I, x: i32) -> S::I {
        s.dot4_nibbles(sums, w, x)
    }
}

/// Marker for [`Units`] that [`spread_pairs`] made of others: codes less their centre as integers of 16 bits.
pub(crate) struct Pairs;
impl Units for Pairs {
    const CODES: UnitCodes = UnitCodes::Byte;
    const CENTRE: f32 = 0.0;
    const WORDS: usize = 2;

    #[inline(always)]
    unsafe fn expand<S: Simd>(_: S, _: S::I, _: *const u32, _: usize) -> [S::F; 8] {
        unreachable!("integer products alone take them")
    }
    #[inline(always)]
    unsafe fn quad<S: Simd>(s: S, _: S::I, p: *const u32, i: usize) -> S::I {
        // SAFETY: by contract.
        unsafe { s.load_bits(p.add(i * LANES)) }
    }
}
impl<S: SimdPairs> Products<S> for Pairs {
    const DWORDS: usize = 2;
    const SHORT: Option<usize> = None;
    #[inline(always)]
    fn add(s: S, sums: S::I, w: S::I, x: i32) -> S::I {
        s.dot2(sums, w, x)
    }
}

/// `P` panels from panel `panel` on times block `block` of `C` columns of x, each code of `N` planes:
/// `out` is `[C][16]` for each panel, `out_stride` floats apart.
///
/// # Safety
/// The panels lie inside `w`; their codes, integers in units of `U`, are at `data`; `x` was prepared
/// for `w` as codes of `N` planes in blocks of `C` columns; `out` has room.
#[inline(always)]
#[allow(
    clippy::needless_range_loop,
    reason = "registers indexed by panel and column"
)]
#[allow(
    clippy::too_many_arguments,
    reason = "the table's type of dot products"
)]
pub(crate) unsafe fn dot<
    S: Simd,
    U: Products<S>,
    const P: usize,
    const C: usize,
    const N: usize,
>(
    s: S,
    w: &PanelWeight,
    x: &Prepared,
    mut data: *const u32,
    panel: usize,
    block: usize,
    out: *mut f32,
    out_stride: usize,
) {
    let (share, centre) = (x.share, w.codes.centre());
    let units = share / U::INPUTS;
    let levels = levels(s, w);
    // Units, or parts of one, whose products are added up at a time.
    let short = U::SHORT.filter(|_| S::SHORT_SUMS);
    let (span, parts) = match short {
        Some(short) => ((short / U::DWORDS).max(1), (U::DWORDS / short).max(1)),
        None => (1, 1),
    };
    let of_part = U::DWORDS / parts;
    // Two at a time, those of one word: compilers unroll that, and longer loops not always.
    let together = of_part.min(2);
    // SAFETY: by contract.
    unsafe {
        let stride = w.inputs / U::INPUTS * U::WORDS * LANES;
        let mut xs = x
            .codes
            .as_ptr()
            .cast::<i32>()
            .add(block * (w.inputs / U::INPUTS * U::DWORDS) * C * N);
        let shares = w.inputs / share;
        let mut scales = x.scales.as_ptr().add(block * shares * C);
        let mut starts = x.starts.as_ptr().add(block * shares * C * N);
        let mut y = [[s.splat(0.0); C]; P];
        let mut done = 0;
        let groups_ahead = groups_ahead(w);
        for group in 0..w.groups {
            let end = ((group + 1) * w.group).min(w.inputs);
            let mut scale = [s.splat(0.0); P];
            for p in 0..P {
                let at = (panel + p) * w.groups + group;
                scale[p] = s.load_f16(w.scales.as_ptr().add(at * LANES));
            }
            if P == 1 && C <= GEMV_COLUMNS {
                fetch_group(s, w, panel * w.groups + group + groups_ahead);
            }
            while done < end {
                let mut acc = [[[s.splat_i(0); N]; C]; P];
                for c in 0..C {
                    for n in 0..N {
                        let start = s.splat_i(*starts.add(c * N + n));
                        for p in 0..P {
                            acc[p][c][n] = start;
                        }
                    }
                }
                // Adds the products of a part of the unit at `data`.
                macro_rules! add_part {
                    ($sums:ident, $data:expr, $part:expr) => {
                        for word in 0..of_part / together {
                            for half in 0..together {
                                let i = $part * of_part + word * together + half;
                                for c in 0..C {
                                    for n in 0..N {
                                        let a = xs.add((half * C + c) * N + n).read_unaligned();
                                        for p in 0..P {
                                            let v = U::quad(s, levels, $data.add(p * stride), i);
                                            $sums[p][c][n] = U::add(s, $sums[p][c][n], v, a);
                                        }
                                    }
                                }
                            }
                            xs = xs.add(together * C * N);
                        }
                    };
                }
                // Of its own, as compilers make worse code of the loops below where they are one.
                if short.is_none() {
                    for _ in 0..units {
                        if P == 1 && C <= GEMV_COLUMNS {
                            fetch_ahead(s, data, U::WORDS);
                        }
                        add_part!(acc, data, 0);
                        data = data.add(U::WORDS * LANES);
                    }
                }
                let mut left = if short.is_none() { 0 } else { units };
                while left > 0 {
                    let now = left.min(span);
                    left -= now;
                    for part in 0..parts {
                        let mut sums = [[[s.splat_i(0); N]; C]; P];
                        for unit in 0..now {
                            let data = data.add(unit * U::WORDS * LANES);
                            if P == 1 && C <= GEMV_COLUMNS && part == 0 {
                                fetch_ahead(s, data, U::WORDS);
                            }
                            add_part!(sums, data, part);
                        }
                        for p in 0..P {
                            for c in 0..C {
                                for n in 0..N {
                                    acc[p][c][n] = s.long_sums(acc[p][c][n], sums[p][c][n]);
                                }
                            }
                        }
                    }
                    data = data.add(now * U::WORDS * LANES);
                }
                for c in 0..C {
                    let sx = s.splat(*scales.add(c));
                    for p in 0..P {
                        let mut dot = s.to_f32(acc[p][c][0]);
                        for n in 1..N {
                            dot = s.fma(dot, s.splat(INT16_BASE), s.to_f32(acc[p][c][n]));
                        }
                        y[p][c] = s.fma(dot, s.mul(scale[p], sx), y[p][c]);
                    }
                }
                scales = scales.add(C);
                starts = starts.add(C * N);
                done += share;
            }
            for p in 0..P {
                let at = (panel + p) * w.groups + group;
                if let Some(shift) = offset(s, w, at, scale[p], centre) {
                    let sums = x.sums.as_ptr().add((block * w.groups + group) * C);
                    for c in 0..C {
                        y[p][c] = s.fma(shift, s.splat(*sums.add(c)), y[p][c]);
                    }
                }
            }
        }
        for p in 0..P {
            for c in 0..C {
                s.store(out.add(p * out_stride + c * LANES), y[p][c]);
            }
        }
    }
}

/// Writes the codes of panel `panel` as [`Quads`](super::float::Quads), `[inputs / 4][16]` words: put
/// together once for all columns of many, where that costs more than reading them.
///
/// # Safety
/// The panel lies inside `w`, which holds `U::CODES` (integers); `out` has room.
#[inline(always)]
pub(crate) unsafe fn spread<S: Simd, U: Units>(s: S, w: &PanelWeight, panel: usize, out: *mut u32) {
    let (quads, levels) = (U::INPUTS / 4, levels(s, w));
    // SAFETY: by contract.
    unsafe {
        let data = w.data.as_ptr().add(panel * w.units * U::WORDS * LANES);
        for unit in 0..w.units {
            let from = data.add(unit * U::WORDS * LANES);
            for i in 0..quads {
                let to = out.add((unit * quads + i) * LANES);
                s.store_bits(to, U::quad(s, levels, from, i));
            }
        }
    }
}

/// As [`spread`], as [`Pairs`], `[inputs / 4][2][16]` words.
///
/// # Safety
/// That of [`spread`].
#[inline(always)]
pub(crate) unsafe fn spread_pairs<S: SimdPairs, U: Units>(
    s: S,
    w: &PanelWeight,
    panel: usize,
    out: *mut u32,
) {
    let (quads, levels) = (U::INPUTS / 4, levels(s, w));
    // SAFETY: by contract.
    unsafe {
        let data = w.data.as_ptr().add(panel * w.units * U::WORDS * LANES);
        for unit in 0..w.units {
            let from = data.add(unit * U::WORDS * LANES);
            for i in 0..quads {
                let to = out.add((unit * quads + i) * 2 * LANES);
                let [first, second] = s.pairs(U::quad(s, levels, from, i), U::CENTRE as i16);
                s.store_bits(to, first);
                s.store_bits(to.add(LANES), second);
            }
        }
    }
}
