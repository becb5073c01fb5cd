//! The kernels of one instruction set as function pointers, so that the code that calls
//! them exists once.
//!
//! [`instantiate!`] compiles every generic kernel inside functions that enable the set's
//! instructions. [`KernelTable::of`] returns a [`KernelTable`] only for an instruction set that the CPU has,
//! which makes calling its functions sound.

#![allow(
    clippy::too_many_arguments,
    clippy::type_complexity,
    reason = "signatures repeat those of the kernels they point to"
)]

use super::kv::KvView;
use super::linear::exl3::values as exl3;
use super::linear::float::{self, GEMV_COLUMNS, GEMV_TOGETHER, Units};
use super::linear::input::Prepared;
use super::linear::int8::{self, Products};
use super::linear::pack::PanelWeight;
use super::linear::trellis::products;
use super::ops::attention::{self, Partial};
use super::ops::delta_kernels::{self, TileRows};
use super::ops::rows;
#[cfg(target_arch = "x86_64")]
use crate::simd::avx2::{EVEX, VEX, WITHOUT};
use crate::simd::{LANES, Simd};
use half::f16;
use nq_formats::trellis::Code;
use nq_kernels::isa::Isa;
use std::ops::Range;

/// Writes units of a panel as floats; see [`float::dequantize`].
pub(crate) type Dequantize = unsafe fn(&PanelWeight, usize, Range<usize>, *mut f32);
/// Panels times one block of columns; see [`float::gemv`].
pub(crate) type Gemv = unsafe fn(&PanelWeight, &Prepared, usize, *mut f32);
/// A block of f32 matrix product; see [`float::tile`].
pub(crate) type Tile =
    unsafe fn(usize, *const f32, usize, *const f32, *mut f32, usize, usize, bool);
/// Panels times a block of integer or bf16 columns; see [`int8::dot`] and
/// [`float::dot_bf16`].
pub(crate) type Dot = unsafe fn(&PanelWeight, &Prepared, *const u32, usize, usize, *mut f32, usize);
/// Writes a panel's codes four to a word; see [`int8::spread`].
pub(crate) type Spread = unsafe fn(&PanelWeight, usize, *mut u32);
/// Products of trellis codes; see [`products`].
pub(crate) type TrellisGemv =
    unsafe fn(&PanelWeight, &Prepared, usize, usize, usize, *mut f32, usize);
pub(crate) type TrellisSpread =
    unsafe fn(&PanelWeight, usize, Range<usize>, Range<usize>, *mut u32);
pub(crate) type TrellisDot =
    unsafe fn(*const u32, usize, &Prepared, usize, Range<usize>, *mut f32, usize);
/// See [`attention::decode`].
pub(crate) type Decode = unsafe fn(
    KvView<'_>,
    KvView<'_>,
    usize,
    usize,
    &[f32],
    f32,
    &mut [f32],
    &mut [f32],
    &mut [Partial],
);
/// See [`attention::prefill`].
pub(crate) type Prefill =
    unsafe fn(KvView<'_>, KvView<'_>, &[*const f32], &[usize], f32, &[*mut f32], &mut [f32]);

/// Most panels that matrix product kernels take at a time.
pub(crate) const PANELS: usize = 2;

/// Products whose columns are not f32, indexed by panels - 1, then columns - 1.
#[derive(Clone, Copy)]
pub(crate) struct Dots {
    /// 4-bit weights, int8 columns.
    pub(crate) nibbles: [&'static [Dot]; PANELS],
    /// 8-bit weights, int8 columns.
    pub(crate) bytes: [&'static [Dot]; PANELS],
    /// A panel of 4-bit weights, int16 columns.
    pub(crate) nibbles_wide: &'static [Dot],
    /// A panel of 8-bit weights, int16 columns.
    pub(crate) bytes_wide: &'static [Dot],
    /// A panel of 5-bit weights, int8 columns.
    pub(crate) fives: &'static [Dot],
    /// A panel of 6-bit weights, int8 columns.
    pub(crate) sixes: &'static [Dot],
    /// A panel of 5-bit weights, int16 columns.
    pub(crate) fives_wide: &'static [Dot],
    /// A panel of 6-bit weights, int16 columns.
    pub(crate) sixes_wide: &'static [Dot],
    /// A panel of 4-bit weights with a table of levels, int8 columns.
    pub(crate) levels: &'static [Dot],
    /// The same, int16 columns.
    pub(crate) levels_wide: &'static [Dot],
    /// 4-bit weights after [`KernelTable::spread`], int8 columns, where that is faster.
    pub(crate) nibble_quads: Option<[&'static [Dot]; PANELS]>,
    /// Weights of 5 bits, and of 6 where sums are not short, after [`KernelTable::spread`], int8 columns.
    pub(crate) quads: [&'static [Dot]; PANELS],
    /// A panel of weights of 5 and 6 bits, int16 columns.
    pub(crate) quads_wide: &'static [Dot],
    /// bf16 weights and columns.
    pub(crate) bf16: [&'static [Dot]; PANELS],
}

/// Products of integers of 16 bits: see [`int8::Pairs`].
#[derive(Clone, Copy)]
pub(crate) struct PairKernels {
    /// Indexed by panels - 1, then columns - 1.
    pub(crate) dot: [&'static [Dot]; PANELS],
    /// See [`int8::spread_pairs`]; indexed as [`KernelTable::spread`].
    pub(crate) spread: [Spread; SPREAD],
}

/// Kinds of integer codes.
const SPREAD: usize = 5;

/// Products of trellis codes.
#[derive(Clone, Copy)]
pub(crate) struct TrellisKernels {
    /// A strip and a block of columns, of int8 and of int16, by columns - 1, then by the bits of a step (`STEP_BITS` of [`trellis`](super::linear::trellis)), or
    /// one for all.
    pub(crate) gemv: [&'static [&'static [TrellisGemv]]; 2],
    pub(crate) spread: TrellisSpread,
    /// After [`TrellisKernels::spread`], int8 columns, by panels - 1, then columns - 1.
    pub(crate) dot: [&'static [TrellisDot]; PANELS],
    /// The same, int16 columns.
    pub(crate) dot_wide: [&'static [TrellisDot]; PANELS],
}

/// One instruction set's kernels.
pub(crate) struct KernelTable {
    /// Indexed by [`super::linear::pack::UnitCodes`].
    pub(crate) dequantize: [Dequantize; 8],
    /// Indexed by codes, then columns - 1: for one panel, and for as many as [`GEMV_TOGETHER`] says.
    pub(crate) gemv: [[[Gemv; 2]; GEMV_COLUMNS]; 8],
    /// Indexed by panels - 1, then columns - 1.
    pub(crate) tile: [&'static [Tile]; PANELS],
    pub(crate) dots: Dots,
    pub(crate) trellis: TrellisKernels,
    /// None if the set multiplies bytes alone.
    pub(crate) pairs: Option<PairKernels>,
    /// Indexed by [`super::linear::pack::UnitCodes`], from bytes on.
    pub(crate) spread: [Spread; SPREAD],
    /// Number of panels that makes the best use of this set's registers.
    pub(crate) panels: usize,
    /// Panels of queries in one tile of `prefill`.
    pub(crate) query_panels: usize,
    pub(crate) checksum: fn(&[u32]) -> f32,
    pub(crate) quantize: fn(&[f32], usize, &mut [i8], &mut [f32]),
    pub(crate) quantize_wide: fn(&[f32], usize, &mut [i8], &mut [i8], &mut [f32]),
    pub(crate) pair_bf16: fn(&[f32], &mut [u32], usize, usize),
    pub(crate) total: fn(&[i8], usize, &mut [i32]),
    pub(crate) interleave: fn(&[i8], bool, &mut [i8], usize, usize),
    pub(crate) interleave_pairs: fn(&[i8], Option<&[i8]>, bool, &mut [i8], usize, usize),
    pub(crate) interleave_quads: fn(&[i8], Option<usize>, &mut [i8], usize, usize),
    pub(crate) transform: fn(&mut [f32], &[f16]),
    pub(crate) turn: fn(&[f32], usize, &mut [f32]),
    pub(crate) trellis_values: fn(Code, &[u32], &mut [f32]),
    pub(crate) exl3_values: fn(&PanelWeight, usize, Range<usize>, &mut [f32]),
    pub(crate) silu_mul: fn(&mut [f32], &[f32]),
    pub(crate) rms_norm: fn(&[f32], &[f32], f32, &mut [f32]),
    pub(crate) norm_rope: fn(&mut [f32], &[f32], f32, &[(f32, f32)]),
    pub(crate) merge: fn(&[Partial], &[f32], &mut [f32]),
    pub(crate) delta_conv: fn(&[f32], &[f32], Option<f32>, &mut [f32]),
    pub(crate) delta_tile: fn(&mut [f32], &TileRows<'_>, &dyn Fn(usize, &[f32; LANES])),
    pub(crate) delta_gate: fn(&mut [f32], &[f32], &[f32], f32),
    pub(crate) decode: Decode,
    pub(crate) prefill: Prefill,
}

impl KernelTable {
    /// The kernels for `isa`, which must be available here.
    pub(crate) fn of(isa: Isa) -> &'static KernelTable {
        assert!(isa.available(), "{isa} kernels on a CPU without it");
        match isa {
            Isa::Scalar => const { &scalar::TABLE },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => const { &avx2::TABLE },
            // One instruction in two encodings; a CPU may have either or both.
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni if Isa::vex_vnni() => {
                const {
                    &KernelTable {
                        dots: avxvnni_vex::DOTS,
                        trellis: avxvnni_vex::TRELLIS,
                        pairs: avxvnni_vex::PAIRS,
                        ..avx2::TABLE
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => {
                const {
                    &KernelTable {
                        dots: avxvnni_evex::DOTS,
                        trellis: avxvnni_evex::TRELLIS,
                        pairs: avxvnni_evex::PAIRS,
                        ..avx2::TABLE
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                const {
                    &KernelTable {
                        trellis: AVX512_TRELLIS,
                        ..avx512::TABLE
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => {
                const DOTS: Dots = Dots {
                    bf16: avx512bf16::BF16,
                    ..avx512::DOTS
                };
                const {
                    &KernelTable {
                        dots: DOTS,
                        trellis: AVX512_TRELLIS,
                        ..avx512::TABLE
                    }
                }
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => const { &neon::TABLE },
            #[allow(unreachable_patterns, reason = "depends on the target")]
            other => unreachable!("{other} is available but not compiled"),
        }
    }
}

#[cfg(target_arch = "x86_64")]
const AVX512_TRELLIS: TrellisKernels = TrellisKernels {
    gemv: trellis_avx512::GEMV,
    ..avx512::TRELLIS
};

/// Safe functions on rows: generic code inside functions that enable the instructions.
macro_rules! row_operations {
    ($simd:ty, #[$enable:meta], $($name:ident = $path:path[$($arg:ident: $ty:ty),*] -> $ret:ty;)*) => {
        mod enabled {
            use super::*;
            $(
                #[$enable]
                pub(super) unsafe fn $name($($arg: $ty),*) -> $ret {
                    // SAFETY: the instructions are enabled here.
                    $path(unsafe { <$simd>::new() }, $($arg),*)
                }
            )*
        }
        $(
            fn $name($($arg: $ty),*) -> $ret {
                // SAFETY: a table is only handed out where its set is available.
                unsafe { enabled::$name($($arg),*) }
            }
        )*
    };
}

/// Defines the [`Dots`] of one instruction set: its [`Simd`] type, the attribute that enables
/// it, and for each number of panels the column counts of each product.
macro_rules! products {
    (
        $simd:ty, #[$enable:meta], panels: $panels:literal,
        bf16: [$($bc:literal)*], int8: [$($ic:literal)*], int16: [$($wc:literal)*],
        pairs: [$($pc:literal)*] $(,)?
    ) => {
        pairs! { $simd, #[$enable], panels: $panels, columns: [$($pc)*] }
        #[$enable]
        unsafe fn dot<U: Products<$simd>, const P: usize, const C: usize, const N: usize>(
            w: &PanelWeight, x: &Prepared, data: *const u32, panel: usize, block: usize, out: *mut f32,
            out_stride: usize,
        ) {
            // SAFETY: the instructions are enabled here; the rest is the caller's.
            unsafe { int8::dot::<_, U, P, C, N>(<$simd>::new(), w, x, data, panel, block, out, out_stride) }
        }
        #[$enable]
        unsafe fn dot_bf16<const P: usize, const C: usize>(
            w: &PanelWeight, x: &Prepared, data: *const u32, panel: usize, block: usize, out: *mut f32,
            out_stride: usize,
        ) {
            // SAFETY: as above.
            unsafe { float::dot_bf16::<_, P, C>(<$simd>::new(), w, x, data, panel, block, out, out_stride) }
        }
        #[$enable]
        unsafe fn trellis_gemv<const N: usize>(
            w: &PanelWeight, x: &Prepared, strip: usize, block: usize, panels: usize, out: *mut f32,
            stride: usize,
        ) {
            // SAFETY: as above.
            unsafe {
                products::gemv::<_, 0, 1, N, 1>(
                    <$simd>::new(), w, x, strip, block, panels, out, stride,
                )
            }
        }
        #[$enable]
        unsafe fn trellis_spread(
            w: &PanelWeight, strip: usize, panels: Range<usize>, parts: Range<usize>, out: *mut u32,
        ) {
            // SAFETY: as above.
            unsafe { products::spread(<$simd>::new(), w, strip, panels, parts, out) }
        }
        #[$enable]
        unsafe fn trellis_dot<const P: usize, const C: usize, const N: usize>(
            data: *const u32, stride: usize, x: &Prepared, block: usize, groups: Range<usize>,
            out: *mut f32, out_stride: usize,
        ) {
            // SAFETY: as above.
            unsafe {
                products::dot::<_, P, C, N>(
                    <$simd>::new(), data, stride, x, block, groups, out, out_stride,
                )
            }
        }
        pub(super) const TRELLIS: TrellisKernels = TrellisKernels {
            gemv: [&[&[trellis_gemv::<1>]], &[&[trellis_gemv::<2>]]],
            spread: trellis_spread,
            dot: [
                &[$(trellis_dot::<1, $ic, 1>),*],
                &[$(trellis_dot::<$panels, $ic, 1>),*],
            ],
            dot_wide: [
                &[$(trellis_dot::<1, $wc, 2>),*],
                &[$(trellis_dot::<$panels, $wc, 2>),*],
            ],
        };
        pub(super) const DOTS: Dots = Dots {
            nibbles: [
                &[$(dot::<float::Nibble, 1, $ic, 1>),*],
                &[$(dot::<float::Nibble, $panels, $ic, 1>),*],
            ],
            bytes: [
                &[$(dot::<float::Byte, 1, $ic, 1>),*],
                &[$(dot::<float::Byte, $panels, $ic, 1>),*],
            ],
            nibbles_wide: &[$(dot::<float::Nibble, 1, $wc, 2>),*],
            bytes_wide: &[$(dot::<float::Byte, 1, $wc, 2>),*],
            fives: &[$(dot::<float::Five, 1, $ic, 1>),*],
            sixes: &[$(dot::<float::Six, 1, $ic, 1>),*],
            fives_wide: &[$(dot::<float::Five, 1, $wc, 2>),*],
            sixes_wide: &[$(dot::<float::Six, 1, $wc, 2>),*],
            levels: &[$(dot::<float::Levels, 1, $ic, 1>),*],
            levels_wide: &[$(dot::<float::Levels, 1, $wc, 2>),*],
            // Registers that unpack nibbles are then free for sums.
            nibble_quads: match <$simd as Simd>::SHORT_SUMS {
                true => Some([
                    &[$(dot::<float::Quads<8>, 1, $ic, 1>),*],
                    &[$(dot::<float::Quads<8>, $panels, $ic, 1>),*],
                ]),
                false => None,
            },
            quads: [
                &[$(dot::<float::Quads<4>, 1, $ic, 1>),*],
                &[$(dot::<float::Quads<4>, $panels, $ic, 1>),*],
            ],
            quads_wide: &[$(dot::<float::Quads<4>, 1, $wc, 2>),*],
            bf16: [
                &[$(dot_bf16::<1, $bc>),*],
                &[$(dot_bf16::<$panels, $bc>),*],
            ],
        };
    };
}

/// Defines the [`PairKernels`] of one instruction set, `None` without counts of columns.
macro_rules! pairs {
    ($simd:ty, #[$enable:meta], panels: $panels:literal, columns: []) => {
        pub(super) const PAIRS: Option<PairKernels> = None;
    };
    ($simd:ty, #[$enable:meta], panels: $panels:literal, columns: [$($c:literal)*]) => {
        #[$enable]
        unsafe fn spread_pairs<U: Units>(w: &PanelWeight, panel: usize, out: *mut u32) {
            // SAFETY: the instructions are enabled here; the rest is the caller's.
            unsafe { int8::spread_pairs::<_, U>(<$simd>::new(), w, panel, out) }
        }
        pub(super) const PAIRS: Option<PairKernels> = Some(PairKernels {
            dot: [
                &[$(dot::<int8::Pairs, 1, $c, 1>),*],
                &[$(dot::<int8::Pairs, $panels, $c, 1>),*],
            ],
            spread: [
                spread_pairs::<float::Byte>,
                spread_pairs::<float::Nibble>,
                spread_pairs::<float::Five>,
                spread_pairs::<float::Six>,
                spread_pairs::<float::Levels>,
            ],
        });
    };
}

/// Defines a module with the [`KernelTable`] of one instruction set: its [`Simd`] type, the
/// attribute that enables it, the number of panels of queries and of columns in attention's
/// products, and for each number of panels the column counts of each product.
macro_rules! instantiate {
    (
        $module:ident, $simd:ty, #[$enable:meta],
        panels: $panels:literal,
        attention: $query_panels:literal x $query_columns:literal,
        f32: [$($fc:literal)*],
        bf16: $bf16:tt, int8: $int8:tt, int16: $int16:tt, pairs: $pairs:tt $(,)?
    ) => {
        mod $module {
            use super::*;

            products! {
                $simd, #[$enable], panels: $panels, bf16: $bf16, int8: $int8, int16: $int16,
                pairs: $pairs,
            }

            #[$enable]
            unsafe fn dequantize<U: Units>(w: &PanelWeight, panel: usize, units: Range<usize>, out: *mut f32) {
                // SAFETY: the instructions are enabled here; the rest is the caller's.
                unsafe { float::dequantize::<_, U>(<$simd>::new(), w, panel, units, out) }
            }
            #[$enable]
            unsafe fn gemv<U: Units, const P: usize, const C: usize>(
                w: &PanelWeight, x: &Prepared, panel: usize, out: *mut f32,
            ) {
                // SAFETY: as above.
                unsafe { float::gemv::<_, U, P, C>(<$simd>::new(), w, x, panel, out) }
            }
            const fn gemvs<U: Units>() -> [[Gemv; 2]; GEMV_COLUMNS] {
                [
                    [gemv::<U, 1, 1>, gemv::<U, { GEMV_TOGETHER[0] }, 1>],
                    [gemv::<U, 1, 2>, gemv::<U, { GEMV_TOGETHER[1] }, 2>],
                    [gemv::<U, 1, 3>, gemv::<U, { GEMV_TOGETHER[2] }, 3>],
                    [gemv::<U, 1, 4>, gemv::<U, { GEMV_TOGETHER[3] }, 4>],
                ]
            }
            #[$enable]
            unsafe fn spread<U: Units>(w: &PanelWeight, panel: usize, out: *mut u32) {
                // SAFETY: as above.
                unsafe { int8::spread::<_, U>(<$simd>::new(), w, panel, out) }
            }
            #[$enable]
            unsafe fn tile<const P: usize, const C: usize>(
                k: usize, w: *const f32, stride: usize, x: *const f32,
                out: *mut f32, out_stride: usize, column_stride: usize, accumulate: bool,
            ) {
                // SAFETY: as above.
                unsafe {
                    float::tile::<_, P, C, C, 1>(
                        <$simd>::new(), k, w, stride, x, out, out_stride, column_stride, accumulate,
                    )
                }
            }
            #[$enable]
            unsafe fn decode(
                keys: KvView<'_>, values: KvView<'_>, from: usize, to: usize, q: &[f32], scale: f32,
                scores: &mut [f32], out: &mut [f32], partials: &mut [Partial],
            ) {
                // SAFETY: as above.
                unsafe {
                    attention::decode(
                        <$simd>::new(), keys, values, from, to, q, scale, scores, out, partials,
                    )
                }
            }
            #[$enable]
            unsafe fn prefill(
                keys: KvView<'_>, values: KvView<'_>, q: &[*const f32], limits: &[usize], scale: f32,
                y: &[*mut f32], scratch: &mut [f32],
            ) {
                // SAFETY: as above.
                unsafe {
                    attention::prefill::<_, $query_panels, $query_columns>(
                        <$simd>::new(), keys, values, q, limits, scale, y, scratch,
                    )
                }
            }

            row_operations! {
                $simd, #[$enable],
                checksum = rows::checksum[words: &[u32]] -> f32;
                quantize = rows::quantize[x: &[f32], group: usize, codes: &mut [i8], scales: &mut [f32]] -> ();
                quantize_wide = rows::quantize_wide[x: &[f32], group: usize, high: &mut [i8], low: &mut [i8], scales: &mut [f32]] -> ();
                pair_bf16 = rows::pair_bf16[x: &[f32], to: &mut [u32], c: usize, width: usize] -> ();
                total = rows::total[codes: &[i8], share: usize, totals: &mut [i32]] -> ();
                interleave = rows::interleave[codes: &[i8], nibbles: bool, to: &mut [i8], c: usize, width: usize] -> ();
                interleave_pairs = rows::interleave_pairs[high: &[i8], low: Option<&[i8]>, nibbles: bool, to: &mut [i8], c: usize, width: usize] -> ();
                interleave_quads = products::interleave[codes: &[i8], group: Option<usize>, to: &mut [i8], c: usize, width: usize] -> ();
                transform = products::transform[x: &mut [f32], scales: &[f16]] -> ();
                turn = products::turn[x: &[f32], group: usize, out: &mut [f32]] -> ();
                exl3_values = exl3::values[w: &PanelWeight, strip: usize, spans: Range<usize>, out: &mut [f32]] -> ();
                trellis_values = products::values[code: Code, quads: &[u32], out: &mut [f32]] -> ();
                silu_mul = rows::silu_mul[gate: &mut [f32], up: &[f32]] -> ();
                rms_norm = rows::rms_norm[x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]] -> ();
                norm_rope = rows::norm_rope[head: &mut [f32], weight: &[f32], eps: f32, cos_sin: &[(f32, f32)]] -> ();
                merge = attention::merge[partials: &[Partial], outs: &[f32], y: &mut [f32]] -> ();
                delta_conv = delta_kernels::conv[window: &[f32], taps: &[f32], length: Option<f32>, y: &mut [f32]] -> ();
                delta_tile = delta_kernels::tile[tile: &mut [f32], rows: &TileRows<'_>, put: &dyn Fn(usize, &[f32; LANES])] -> ();
                delta_gate = delta_kernels::gate[y: &mut [f32], norm: &[f32], z: &[f32], eps: f32] -> ();
            }

            pub(super) const TABLE: KernelTable = KernelTable {
                dequantize: [
                    dequantize::<float::F32>,
                    dequantize::<float::F16>,
                    dequantize::<float::Bf16>,
                    dequantize::<float::Byte>,
                    dequantize::<float::Nibble>,
                    dequantize::<float::Five>,
                    dequantize::<float::Six>,
                    dequantize::<float::Levels>,
                ],
                gemv: [
                    gemvs::<float::F32>(),
                    gemvs::<float::F16>(),
                    gemvs::<float::Bf16>(),
                    gemvs::<float::Byte>(),
                    gemvs::<float::Nibble>(),
                    gemvs::<float::Five>(),
                    gemvs::<float::Six>(),
                    gemvs::<float::Levels>(),
                ],
                tile: [
                    &[$(tile::<1, $fc>),*],
                    &[$(tile::<$panels, $fc>),*],
                ],
                dots: DOTS,
                trellis: TRELLIS,
                pairs: PAIRS,
                spread: [
                    spread::<float::Byte>,
                    spread::<float::Nibble>,
                    spread::<float::Five>,
                    spread::<float::Six>,
                    spread::<float::Levels>,
                ],
                panels: $panels,
                query_panels: $query_panels,
                checksum,
                quantize,
                quantize_wide,
                pair_bf16,
                total,
                interleave,
                interleave_pairs,
                interleave_quads,
                transform,
                turn,
                trellis_values,
                exl3_values,
                silu_mul,
                rms_norm,
                norm_rope,
                merge,
                delta_conv,
                delta_tile,
                delta_gate,
                decode,
                prefill,
            };
        }
    };
}

instantiate! {
    scalar, crate::simd::scalar::Scalar, #[inline(never)],
    panels: 1,
    attention: 1 x 4,
    f32: [1 2 3 4],
    bf16: [1 2 3 4],
    int8: [1 2 3 4],
    int16: [1 2 3 4],
    pairs: [],
}

// 16 registers of 8 lanes: a panel is two of them.
#[cfg(target_arch = "x86_64")]
instantiate! {
    avx2, crate::simd::avx2::Avx2<{ WITHOUT }>, #[target_feature(enable = "avx2,fma,f16c")],
    panels: 1,
    attention: 1 x 4,
    f32: [1 2 3 4 5 6],
    bf16: [1 2 3 4],
    int8: [1 2 3 4 5 6],
    int16: [1 2 3 4],
    pairs: [1 2 3 4 5 6],
}

// Like AVX2, except for integer products.
#[cfg(target_arch = "x86_64")]
mod avxvnni_vex {
    use super::*;
    products! {
        crate::simd::avx2::Avx2<{ VEX }>,
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")],
        panels: 1, bf16: [1 2 3 4], int8: [1 2 3 4], int16: [1 2 3 4], pairs: [1 2 3 4],
    }
}
#[cfg(target_arch = "x86_64")]
mod avxvnni_evex {
    use super::*;
    products! {
        crate::simd::avx2::Avx2<{ EVEX }>,
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl,avx512vnni")],
        panels: 1, bf16: [1 2 3 4], int8: [1 2 3 4], int16: [1 2 3 4], pairs: [1 2 3 4],
    }
}

// 32 registers of 16 lanes: two panels by 12 columns leave 6 for operands; integer products
// need an integer and a float accumulator each, or two of the first.
#[cfg(target_arch = "x86_64")]
instantiate! {
    avx512, crate::simd::avx512::Avx512<false>,
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")],
    panels: 2,
    attention: 2 x 8,
    f32: [1 2 3 4 5 6 7 8 9 10 11 12],
    bf16: [1 2 3 4 5 6 7 8 9 10 11 12],
    int8: [1 2 3 4 5 6],
    int16: [1 2 3 4],
    pairs: [1 2 3 4 5 6],
}

// Products of trellis codes with few columns, for each number of bits of a step.
#[cfg(target_arch = "x86_64")]
mod trellis_avx512 {
    use super::*;
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn gemv<const B: usize, const C: usize, const N: usize, const M: usize>(
        w: &PanelWeight,
        x: &Prepared,
        strip: usize,
        block: usize,
        panels: usize,
        out: *mut f32,
        stride: usize,
    ) {
        // SAFETY: the instructions are enabled here; the rest is the caller's.
        unsafe {
            let s = crate::simd::avx512::Avx512::<false>::new();
            products::gemv::<_, B, C, N, M>(s, w, x, strip, block, panels, out, stride);
        }
    }
    macro_rules! steps {
        ($c:literal $n:literal $m:literal: $($b:literal)*) => { &[$(gemv::<$b, $c, $n, $m>),*] };
    }
    // Sixteen registers of sums.
    pub(super) const GEMV: [&[&[TrellisGemv]]; 2] = [
        &[
            steps!(1 1 4: 2 3 4 5 6 7 8 10),
            steps!(2 1 2: 2 3 4 5 6 7 8 10),
        ],
        &[steps!(1 2 2: 2 3 4 5 6 7 8 10)],
    ];
}

// Like AVX-512, except for bf16 products.
#[cfg(target_arch = "x86_64")]
mod avx512bf16 {
    use super::*;
    #[target_feature(
        enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16"
    )]
    unsafe fn dot_bf16<const P: usize, const C: usize>(
        w: &PanelWeight,
        x: &Prepared,
        data: *const u32,
        panel: usize,
        block: usize,
        out: *mut f32,
        out_stride: usize,
    ) {
        // SAFETY: the instructions are enabled here; the rest is the caller's.
        unsafe {
            let s = crate::simd::avx512::Avx512::<true>::new();
            float::dot_bf16::<_, P, C>(s, w, x, data, panel, block, out, out_stride);
        }
    }
    macro_rules! columns {
        ($panels:literal: $($c:literal)*) => { &[$(dot_bf16::<$panels, $c>),*] };
    }
    pub(super) const BF16: [&[Dot]; PANELS] = [
        columns!(1: 1 2 3 4 5 6 7 8 9 10 11 12),
        columns!(2: 1 2 3 4 5 6 7 8 9 10 11 12),
    ];
}

// 32 registers of 4 lanes: a panel is four of them.
#[cfg(target_arch = "aarch64")]
instantiate! {
    neon, crate::simd::neon::Neon, #[target_feature(enable = "neon,dotprod")],
    panels: 1,
    attention: 1 x 4,
    f32: [1 2 3 4 5 6],
    bf16: [1 2 3 4],
    int8: [1 2 3 4],
    int16: [1 2 3 4],
    pairs: [],
}
