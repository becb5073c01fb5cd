//! Products with int8 and int16 activations: integer dot products within a block of inputs
//! that share both scales, f32 across blocks.
//!
//! With `w = s_w (q - centre) + o'` and `x = s_x a`, a block contributes
//! `s_w s_x (sum (q - centre) a) + o' s_x (sum a)`. The integer sum is exact; the second
//! term is added once per weight group and only if there are zero-points.
//!
//! An int16 code is `255 h + l` with signed bytes `h` and `l`: two integer sums that are combined
//! in f32, which holds `255 (sum q h)` to within its last bit but one. Weights are read once for both,
//! so that if memory is the limit, int16 costs no more than int8.

use super::fetch::{fetch_ahead, fetch_group, groups_ahead};
use super::float::{Units, offset};
use super::input::Prepared;
use super::pack::{PanelWeight, UnitCodes};
use crate::simd::{LANES, Simd};
use nq_kernels::reference::INT16_BASE;

/// `P` panels from panel `panel` on times block `block` of `C` columns of x, each code of `N` bytes:
/// `out` is `[C][16]` for each panel, `out_stride` floats apart.
///
/// # Safety
/// The panels lie inside `w`; their codes, integers in units of `U`, are at `data`; `x` was prepared
/// for `w` as codes of `N` bytes in blocks of `C` columns; `out` has room.
#[inline(always)]
#[allow(
    clippy::needless_range_loop,
    reason = "registers indexed by panel and column"
)]
#[allow(
    clippy::too_many_arguments,
    reason = "the table's type of dot products"
)]
pub(crate) unsafe fn dot<S: Simd, U: Units, const P: usize, const C: usize, const N: usize>(
    s: S,
    w: &PanelWeight,
    x: &Prepared,
    mut data: *const u32,
    panel: usize,
    block: usize,
    out: *mut f32,
    out_stride: usize,
) {
    let bytes = matches!(U::CODES, UnitCodes::Byte);
    let per_unit = U::INPUTS / 4; // dwords of x
    // Two at a time, those of one word: compilers unroll that, and longer loops not always.
    let together = per_unit.min(2);
    let (share, centre) = (x.share, w.codes.centre());
    let units = share / U::INPUTS;
    // SAFETY: by contract.
    unsafe {
        let stride = w.inputs / U::INPUTS * U::WORDS * LANES;
        let mut xs = x
            .codes
            .as_ptr()
            .cast::<i32>()
            .add(block * (w.inputs / 4) * C * N);
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
            if P == 1 {
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
                for _ in 0..units {
                    if P == 1 {
                        fetch_ahead(s, data, U::WORDS);
                    }
                    for word in 0..per_unit / together {
                        for half in 0..together {
                            let i = word * together + half;
                            for c in 0..C {
                                for n in 0..N {
                                    let a = xs.add((half * C + c) * N + n).read_unaligned();
                                    for p in 0..P {
                                        let v = U::quad(s, data.add(p * stride), i);
                                        acc[p][c][n] = if bytes {
                                            s.dot4_bytes(acc[p][c][n], v, a)
                                        } else {
                                            s.dot4_nibbles(acc[p][c][n], v, a)
                                        };
                                    }
                                }
                            }
                        }
                        xs = xs.add(together * C * N);
                    }
                    data = data.add(U::WORDS * LANES);
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
    let quads = U::INPUTS / 4;
    // SAFETY: by contract.
    unsafe {
        let data = w.data.as_ptr().add(panel * w.units * U::WORDS * LANES);
        for unit in 0..w.units {
            let from = data.add(unit * U::WORDS * LANES);
            for i in 0..quads {
                let to = out.add((unit * quads + i) * LANES);
                s.store_bits(to, U::quad(s, from, i));
            }
        }
    }
}
