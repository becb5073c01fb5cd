//! Requests for weights that are read soon. Hardware prefetchers stop at the end of a page, so kernels that multiply
//! one panel at a time request what they read one page later themselves.

use super::pack::{PackedZeros, PanelWeight};
use crate::simd::{LANES, Simd};

/// Bytes that codes are requested before they are read: a page. On an Intel Xeon (Emerald Rapids) decoding is a
/// third faster with it, and 5 to 15 % on an AMD EPYC (Zen 5); 2 and 8 KiB are no better
/// (`benches/records/2026-11-23-cpu-prefetch.csv`).
pub(super) const AHEAD: usize = 4096;

/// Requests the codes that are read [`AHEAD`] bytes after the `lines` lines of 64 bytes at `codes`.
#[inline(always)]
pub(super) fn fetch_ahead<S: Simd>(s: S, codes: *const u32, lines: usize) {
    for line in 0..lines {
        s.prefetch(codes.wrapping_add(line * LANES).wrapping_byte_add(AHEAD));
    }
}

/// Number of groups whose codes take [`AHEAD`] bytes.
pub(super) fn groups_ahead(w: &PanelWeight) -> usize {
    let group = w.group * w.codes.words() * LANES * size_of::<u32>() / w.codes.inputs();
    AHEAD.div_ceil(group.max(1))
}

/// Requests the scales and zero-points of a group of `w`, which need not exist.
#[inline(always)]
pub(super) fn fetch_group<S: Simd>(s: S, w: &PanelWeight, group: usize) {
    s.prefetch(w.scales.as_ptr().wrapping_add(group * LANES));
    match &w.zeros {
        PackedZeros::None => {}
        PackedZeros::Nibbles(z) => s.prefetch(z.as_ptr().wrapping_add(group * LANES / 2)),
        PackedZeros::Bytes(z) => s.prefetch(z.as_ptr().wrapping_add(group * LANES)),
        PackedZeros::Offsets(o) => s.prefetch(o.as_ptr().wrapping_add(group * LANES)),
    }
}
