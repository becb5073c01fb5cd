//! The kernels of the Linear operation on the CPU, as rows of the registry.
//!
//! A row's `run` multiplies some panels of a packed weight with all prepared columns. Rows
//! of all instruction sets share the drivers here and differ only in their
//! `Table`. The first row whose predicates hold is chosen.

use super::exl3;
use super::float::{Byte, Five, Levels, Nibble, Six, Units};
use super::float::{GEMV_COLUMNS, GEMV_TOGETHER};
use super::input::Prepared;
use super::kernel::{LinearKernel, PanelProduct, share};
use super::pack::{PanelWeight, UnitCodes, has_table};
use super::trellis;
use crate::memory::Buffer;
use crate::simd::{LANES, Simd};
use crate::table::{Dot, Dots, KernelTable, PANELS};
use crate::{simd, with_scratch};
use nq_formats::{AffineScheme, Bits, Group};
use nq_kernels::isa::Isa;
use nq_kernels::registry::{Activations, KernelInfo, WeightKind};
use nq_model::DType;
use std::ops::Range;

impl LinearKernel {
    /// The first kernel for these weights, activations and rows of x on `isa`.
    pub(crate) fn select(
        isa: Isa,
        weights: WeightKind,
        activations: Activations,
        rows: usize,
    ) -> Option<&'static LinearKernel> {
        KERNELS
            .iter()
            .flat_map(|k| k.iter())
            .find(|k| k.isa == isa && k.info.serves(weights, activations, rows))
    }
}

/// A weight's inputs must be padded to a multiple of this.
pub(crate) fn align(weights: WeightKind, activations: Activations) -> usize {
    match (activations, weights) {
        (
            Activations::Int8 { group } | Activations::Int16 { group },
            WeightKind::Affine { scheme, .. },
        ) => match scheme.group {
            Group::Size(g) => share(g as usize, group),
            Group::Channel => group,
        },
        _ => 1,
    }
}

/// Number of panels that many-column kernels are best called with: they share each read of a block
/// of activations.
pub(crate) const GEMM_PANELS: usize = 8;

/// Inputs in a tile that is dequantized at once: 128 KiB of floats for 8 panels, which the
/// second-level cache holds while all columns are multiplied.
const TILE_INPUTS: usize = 256;

/// Few columns: every panel is read once, several at a time, and codes become floats in registers.
unsafe fn gemv_f32(p: &PanelProduct<'_>, out: &mut [f32]) {
    let (table, w, x, panels) = (p.table, p.w, p.x, &p.panels);
    let [one, several] = table.gemv[w.codes as usize][x.width - 1];
    let together = GEMV_TOGETHER[x.width - 1];
    let mut at = panels.start;
    while at < panels.end {
        let whole = at + together <= panels.end;
        let (kernel, count) = if whole { (several, together) } else { (one, 1) };
        let out = &mut out[(at - panels.start) * x.width * LANES..];
        // SAFETY: by contract, with room checked by the caller.
        unsafe { kernel(w, x, at, out.as_mut_ptr()) };
        at += count;
    }
}

/// Many columns: codes become floats in a tile that is multiplied with all columns.
unsafe fn gemm_f32(p: &PanelProduct<'_>, out: &mut [f32]) {
    let (table, w, x, panels) = (p.table, p.w, p.x, &p.panels);
    let columns = x.columns();
    for first in panels.clone().step_by(GEMM_PANELS) {
        let group = first..(first + GEMM_PANELS).min(panels.end);
        let out = &mut out[(first - panels.start) * columns * LANES..];
        // SAFETY: by contract, with room checked by the caller.
        unsafe { gemm_f32_group(table, w, x, group, out) };
    }
}

/// [`gemm_f32`] for at most [`GEMM_PANELS`] panels.
///
/// # Safety
/// Like [`RunPanels`].
unsafe fn gemm_f32_group(
    table: &KernelTable,
    w: &PanelWeight,
    x: &Prepared,
    panels: Range<usize>,
    out: &mut [f32],
) {
    let columns = x.columns();
    let per_unit = w.codes.inputs();
    let step = TILE_INPUTS / per_unit;
    with_scratch!(Buffer<f32>, |tile| {
        let tile = tile.reserve(GEMM_PANELS * TILE_INPUTS * LANES);
        for from in (0..w.units).step_by(step) {
            let to = (from + step).min(w.units);
            let k = (to - from) * per_unit;
            for (tile, panel) in tile.chunks_mut(TILE_INPUTS * LANES).zip(panels.clone()) {
                // SAFETY: panel and units are inside the weight; the tile has room for
                // TILE_INPUTS inputs of each panel.
                unsafe {
                    (table.dequantize[w.codes as usize])(w, panel, from..to, tile.as_mut_ptr());
                }
            }
            for b in 0..x.blocks() {
                let x_at = (b * w.inputs + from * per_unit) * x.width;
                let mut p = 0;
                while p < panels.len() {
                    let count = table.panels.min(panels.len() - p);
                    let kernel = table.tile[usize::from(count > 1)][x.width - 1];
                    // SAFETY: block `b` holds `inputs * width` values, of which `k * width`
                    // from `from` on are used; outputs of block `b` start at its columns.
                    unsafe {
                        kernel(
                            k,
                            tile.as_ptr().add(p * TILE_INPUTS * LANES),
                            TILE_INPUTS * LANES,
                            x.floats.as_ptr().add(x_at),
                            out.as_mut_ptr().add((p * columns + b * x.width) * LANES),
                            columns * LANES,
                            LANES,
                            from > 0,
                        );
                    }
                    p += count;
                }
            }
        }
    });
}

/// Integer dot products for few columns, one panel at a time.
unsafe fn gemv_codes(p: &PanelProduct<'_>, out: &mut [f32]) {
    let (kernel, table, w, x, panels) = (p.kernel, p.table, p.w, p.x, &p.panels);
    let (dots, wide) = (&table.dots, kernel.planes > 1);
    let dot = match kernel.codes {
        UnitCodes::Five if wide => dots.fives_wide,
        UnitCodes::Five => dots.fives,
        UnitCodes::Six if wide => dots.sixes_wide,
        UnitCodes::Six => dots.sixes,
        UnitCodes::Levels if wide => dots.levels_wide,
        UnitCodes::Levels => dots.levels,
        codes => many(dots, codes, wide)[0],
    }[x.width - 1];
    for (i, panel) in panels.clone().enumerate() {
        let out = &mut out[i * x.width * LANES..];
        // SAFETY: by contract, with room checked by the caller.
        unsafe { dot(w, x, w.panel(panel).as_ptr(), panel, 0, out.as_mut_ptr(), 0) };
    }
}

/// Integer dot products for many columns, with as many panels at a time as registers allow.
unsafe fn gemm_codes(p: &PanelProduct<'_>, out: &mut [f32]) {
    let (kernel, table, w, x, panels) = (p.kernel, p.table, p.w, p.x, &p.panels);
    let columns = x.columns();
    let wide = kernel.planes > 1;
    let code = (kernel.codes as usize).wrapping_sub(UnitCodes::Byte as usize);
    let dots = &table.dots;
    let spread = table.spread.get(code).copied();
    let (kernels, spread, words) = match (kernel.codes, &table.pairs, dots.nibble_quads) {
        (_, Some(pairs), _) if kernel.pairs => (pairs.dot, Some(pairs.spread[code]), 2),
        (UnitCodes::Nibble, _, Some(quads)) if !wide => (quads, spread, 1),
        (UnitCodes::Five | UnitCodes::Six, ..) if wide => ([dots.quads_wide; PANELS], spread, 1),
        (UnitCodes::Five | UnitCodes::Six, ..) => (dots.quads, spread, 1),
        (UnitCodes::Levels, ..) => (many(dots, UnitCodes::Byte, wide), spread, 1),
        (codes, ..) => (many(dots, codes, wide), None, 1),
    };
    // Kernels of codes in two pieces take one panel.
    let together = if wide && !kernel.pairs {
        1
    } else {
        table.panels
    };
    with_scratch!(Buffer<u32>, |tile| {
        let mut at = panels.start;
        while at < panels.end {
            let whole = at + together <= panels.end;
            let count = if whole { together } else { 1 };
            let dot = kernels[usize::from(count > 1)][x.width - 1];
            let data = match spread {
                None => w.panel(at).as_ptr(),
                Some(spread) => {
                    let stride = w.inputs / 4 * words * LANES;
                    let tile = tile.reserve(count * stride);
                    for (p, tile) in tile.chunks_exact_mut(stride).enumerate() {
                        // SAFETY: by contract; the tile has room for a panel's inputs.
                        unsafe { spread(w, at + p, tile.as_mut_ptr()) };
                    }
                    tile.as_ptr()
                }
            };
            let out = &mut out[(at - panels.start) * columns * LANES..];
            for b in 0..x.blocks() {
                // SAFETY: by contract; outputs of block `b` start at its columns.
                unsafe {
                    let out = out.as_mut_ptr().add(b * x.width * LANES);
                    dot(w, x, data, at, b, out, columns * LANES);
                }
            }
            at += count;
        }
    });
}

/// Products of one panel and of several with many columns.
fn many(dots: &Dots, codes: UnitCodes, wide: bool) -> [&'static [Dot]; PANELS] {
    match (codes, wide) {
        (UnitCodes::Nibble, false) => dots.nibbles,
        (UnitCodes::Nibble, true) => [dots.nibbles_wide; PANELS],
        (UnitCodes::Bf16, _) => dots.bf16,
        (UnitCodes::Trellis | UnitCodes::Exl3, _) => unreachable!("has kernels of its own"),
        (_, false) => dots.bytes,
        (_, true) => [dots.bytes_wide; PANELS],
    }
}

/// True if every group starts on a unit of codes, so that f32 kernels can use
/// it. Activation-order weights are regrouped to whole units.
fn whole_units(
    weights: WeightKind,
    of_codes: impl Fn(&AffineScheme) -> bool,
    per_unit: u32,
) -> bool {
    match weights {
        WeightKind::Affine { scheme, act_order } if of_codes(&scheme) => match scheme.group {
            Group::Size(g) => act_order || g % per_unit == 0,
            Group::Channel => true,
        },
        _ => false,
    }
}

/// True if groups nest with activation groups of any power of two.
fn nests(weights: WeightKind, of_codes: impl Fn(&AffineScheme) -> bool) -> bool {
    match weights {
        WeightKind::Affine { scheme, .. } if of_codes(&scheme) => match scheme.group {
            Group::Size(g) => g >= 16 && g.is_power_of_two(),
            Group::Channel => true,
        },
        _ => false,
    }
}

/// True for schemes of so many bits in even steps.
fn even(bits: Bits) -> impl Fn(&AffineScheme) -> bool {
    move |scheme| *scheme == AffineScheme::new(bits, scheme.group, scheme.zeros)
}

/// True for schemes of f16 scales and a table of levels.
fn table(scheme: &AffineScheme) -> bool {
    has_table(scheme) && scheme.scales.is_half()
}

/// True if groups are whole units of 32 inputs.
fn units_of_32(weights: WeightKind) -> bool {
    matches!(weights, WeightKind::Affine { scheme, .. } if scheme.group != Group::Size(16))
}

/// True for int8 activations whose scales do not change within 32 inputs.
fn int8_in_32(activations: Activations) -> bool {
    int8_activations(activations) && activations != Activations::Int8 { group: 16 }
}

/// True for int16 activations whose scales do not change within 32 inputs.
fn int16_in_32(activations: Activations) -> bool {
    int16_activations(activations) && activations != Activations::Int16 { group: 16 }
}

/// True for trellis codes with one sum of integers over the inputs of a scale.
fn trellis_weights(weights: WeightKind) -> bool {
    matches!(weights, WeightKind::Trellis(_))
}

fn exl3_weights(weights: WeightKind) -> bool {
    matches!(weights, WeightKind::Exl3(scheme) if scheme.whole_bits().is_some())
}

fn f32_activations(activations: Activations) -> bool {
    activations == Activations::F32
}

fn bf16_activations(activations: Activations) -> bool {
    activations == Activations::Bf16
}

fn int8_activations(activations: Activations) -> bool {
    matches!(
        activations,
        Activations::Int8 {
            group: 16 | 32 | 64 | 128
        }
    )
}

fn int16_activations(activations: Activations) -> bool {
    matches!(
        activations,
        Activations::Int16 {
            group: 16 | 32 | 64 | 128
        }
    )
}

/// The rows of one instruction set: a GEMV and a GEMM kernel per scheme and activations.
macro_rules! rows {
    (
        $isa:expr, $requires:literal, $simd:ty,
        f32: $f32:literal, bf16: $bf16:literal, int8: $int8:literal, int16: $int16:literal,
        pairs: $pairs8:literal $pairs16:literal, trellis: $trellis:literal $few:tt $few16:tt $(,)?
    ) => {
        rows!(@list $isa, $requires,
            ("trellis_int8", UnitCodes::Trellis, trellis_weights, int8_activations,
                $trellis, 0, <$simd as Simd>::BYTE_START, 1, trellis::gemv, trellis::gemm, $few),
            ("trellis_int16", UnitCodes::Trellis, trellis_weights, int16_activations,
                $int16, 0, <$simd as Simd>::BYTE_START, 2, trellis::gemv, trellis::gemm, $few16),
            ("trellis_f32", UnitCodes::Trellis, trellis_weights, f32_activations,
                $f32, 0, 0, 1, trellis::gemm_f32, trellis::gemm_f32),
            ("exl3_f32", UnitCodes::Exl3, exl3_weights, f32_activations,
                $f32, 0, 0, 1, exl3::gemm, exl3::gemm),
            ("int4_int8", Nibble::CODES, |w| nests(w, even(Bits::B4)), int8_activations,
                $int8, 0, <$simd as Simd>::NIBBLE_START, 1, gemv_codes, gemm_codes),
            ("levels_int8", Levels::CODES, |w| nests(w, table), int8_activations,
                $int8, $pairs8, <$simd as Simd>::BYTE_START, 1, gemv_codes, gemm_codes),
            ("int8_int8", Byte::CODES, |w| nests(w, even(Bits::B8)), int8_activations,
                $int8, $pairs8, <$simd as Simd>::BYTE_START, 1, gemv_codes, gemm_codes),
            ("int5_int8", Five::CODES, |w| nests(w, even(Bits::B5)) && units_of_32(w), int8_in_32,
                $int8, 0, -16, 1, gemv_codes, gemm_codes),
            ("int6_int8", Six::CODES, |w| nests(w, even(Bits::B6)), int8_activations,
                $int8, $pairs8, -32, 1, gemv_codes, gemm_codes),
            ("int5_int16", Five::CODES, |w| nests(w, even(Bits::B5)) && units_of_32(w), int16_in_32,
                $int16, $pairs16, -16, 2, gemv_codes, gemm_codes),
            ("int6_int16", Six::CODES, |w| nests(w, even(Bits::B6)), int16_activations,
                $int16, $pairs16, -32, 2, gemv_codes, gemm_codes),
            ("int5_f32", Five::CODES, |w| whole_units(w, even(Bits::B5), 32), f32_activations,
                $f32, 0, 0, 1, gemv_f32, gemm_f32),
            ("int6_f32", Six::CODES, |w| whole_units(w, even(Bits::B6), 16), f32_activations,
                $f32, 0, 0, 1, gemv_f32, gemm_f32),
            ("int4_int16", Nibble::CODES, |w| nests(w, even(Bits::B4)), int16_activations,
                $int16, $pairs16, <$simd as Simd>::NIBBLE_START, 2, gemv_codes, gemm_codes),
            ("levels_int16", Levels::CODES, |w| nests(w, table), int16_activations,
                $int16, $pairs16, <$simd as Simd>::BYTE_START, 2, gemv_codes, gemm_codes),
            ("int8_int16", Byte::CODES, |w| nests(w, even(Bits::B8)), int16_activations,
                $int16, $pairs16, <$simd as Simd>::BYTE_START, 2, gemv_codes, gemm_codes),
            ("bf16_bf16", UnitCodes::Bf16, |w| w == WeightKind::Dense(DType::BF16), bf16_activations,
                $bf16, 0, 0, 1, gemm_codes, gemm_codes),
            ("int4_f32", Nibble::CODES, |w| whole_units(w, even(Bits::B4), 8), f32_activations,
                $f32, 0, 0, 1, gemv_f32, gemm_f32),
            ("levels_f32", Levels::CODES, |w| whole_units(w, table, 8), f32_activations,
                $f32, 0, 0, 1, gemv_f32, gemm_f32),
            ("int8_f32", Byte::CODES, |w| whole_units(w, even(Bits::B8), 4), f32_activations,
                $f32, 0, 0, 1, gemv_f32, gemm_f32),
            ("bf16_f32", UnitCodes::Bf16, |w| w == WeightKind::Dense(DType::BF16), f32_activations,
                $f32, 0, 0, 1, gemv_f32, gemm_f32),
            ("f16_f32", UnitCodes::F16, |w| w == WeightKind::Dense(DType::F16), f32_activations,
                $f32, 0, 0, 1, gemv_f32, gemm_f32),
            ("f32_f32", UnitCodes::F32, |w| w == WeightKind::Dense(DType::F32), f32_activations,
                $f32, 0, 0, 1, gemv_f32, gemm_f32))
    };
    (@rows) => { GEMV_COLUMNS };
    (@rows ($rows:literal in $columns:literal)) => { $rows };
    (@columns) => { GEMV_COLUMNS };
    (@columns ($rows:literal in $columns:literal)) => { $columns };
    (@list $isa:expr, $requires:literal,
        $(($name:literal, $codes:expr, $weights:expr, $activations:expr,
            $columns:literal, $pairs:literal, $start:expr, $planes:literal, $gemv:expr, $gemm:expr $(, $few:tt)?)),*) => {
        &[
            $(
                LinearKernel {
                    info: KernelInfo {
                        name: concat!($name, "_gemv_", $requires),
                        requires: $requires,
                        weights: $weights,
                        activations: $activations,
                        rows: 1..=rows!(@rows $($few)?),
                    },
                    isa: $isa, codes: $codes, columns: rows!(@columns $($few)?), pairs: false,
                    start: $start, planes: $planes, run: $gemv,
                },
                LinearKernel {
                    info: KernelInfo {
                        name: concat!($name, "_gemm_", $requires),
                        requires: $requires,
                        weights: $weights,
                        activations: $activations,
                        rows: rows!(@rows $($few)?) + 1..=usize::MAX,
                    },
                    isa: $isa, codes: $codes, columns: if $pairs > 0 { $pairs } else { $columns },
                    pairs: $pairs > 0, start: $start, planes: $planes, run: $gemm,
                },
            )*
        ]
    };
}

/// Every Linear kernel of the CPU, by instruction set. Column counts are those
/// instantiated in `table.rs`.
pub static KERNELS: &[&[LinearKernel]] = &[
    #[cfg(target_arch = "x86_64")]
    rows!(Isa::Avx512Bf16, "avx512bf16", simd::avx512::Avx512<true>, f32: 12, bf16: 12, int8: 6, int16: 4, pairs: 0 6, trellis: 6 (4 in 2) (2 in 1)),
    #[cfg(target_arch = "x86_64")]
    rows!(Isa::Avx512, "avx512", simd::avx512::Avx512<false>, f32: 12, bf16: 12, int8: 6, int16: 4, pairs: 0 6, trellis: 6 (4 in 2) (2 in 1)),
    #[cfg(target_arch = "x86_64")]
    rows!(Isa::AvxVnni, "avxvnni", simd::avx2::Avx2<{ simd::avx2::EVEX }>, f32: 6, bf16: 4, int8: 4, int16: 2, pairs: 0 4, trellis: 4 (1 in 1) (1 in 1)),
    #[cfg(target_arch = "x86_64")]
    rows!(Isa::Avx2, "avx2", simd::avx2::Avx2<{ simd::avx2::WITHOUT }>, f32: 6, bf16: 4, int8: 6, int16: 2, pairs: 6 6, trellis: 4 (1 in 1) (1 in 1)),
    #[cfg(target_arch = "aarch64")]
    rows!(Isa::Neon, "neon", simd::neon::Neon, f32: 6, bf16: 4, int8: 4, int16: 2, pairs: 0 0, trellis: 4 (1 in 1) (1 in 1)),
    rows!(Isa::Scalar, "scalar", simd::scalar::Scalar, f32: 4, bf16: 4, int8: 4, int16: 4, pairs: 0 0, trellis: 4 (1 in 1) (1 in 1)),
];
