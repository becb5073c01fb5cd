//! Plain Rust, always available; the compiler may use whatever the target's baseline has.

use super::{LANES, Simd};
use half::{bf16, f16};
use std::array::from_fn;

/// No instruction set beyond the target's baseline.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

type F = [f32; LANES];
type I = [u32; LANES];

impl Simd for Scalar {
    type F = F;
    type I = I;
    const NIBBLE_START: i32 = -8;
    const BYTE_START: i32 = -128;

    #[inline(always)]
    unsafe fn new() -> Self {
        Scalar
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        // SAFETY: by contract.
        unsafe { p.cast::<F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F) {
        // SAFETY: by contract.
        unsafe { p.cast::<F>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> F {
        // SAFETY: by contract.
        let v = unsafe { p.cast::<[f16; LANES]>().read_unaligned() };
        v.map(f16::to_f32)
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> F {
        // SAFETY: by contract.
        let v = unsafe { p.cast::<[i8; LANES]>().read_unaligned() };
        v.map(f32::from)
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: F) {
        let v = v.map(|v| v.round_ties_even() as i8);
        // SAFETY: by contract.
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> F {
        // SAFETY: by contract.
        let v = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        v.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_u4(self, p: *const u8) -> F {
        // SAFETY: by contract.
        let v = unsafe { p.cast::<[u8; LANES / 2]>().read_unaligned() };
        from_fn(|i| f32::from((v[i / 2] >> (4 * (i & 1))) & 15))
    }
    #[inline(always)]
    unsafe fn load_bits(self, p: *const u32) -> I {
        // SAFETY: by contract.
        unsafe { p.cast::<I>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_bits(self, p: *mut u32, v: I) {
        // SAFETY: by contract.
        unsafe { p.cast::<I>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_fours(self, p: *const i8) -> I {
        // SAFETY: by contract.
        let four = unsafe { p.cast::<[u32; 4]>().read_unaligned() };
        from_fn(|i| four[i % 4])
    }
    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; LANES]
    }
    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn abs(self, a: F) -> F {
        a.map(f32::abs)
    }
    #[inline(always)]
    fn round(self, a: F) -> F {
        // Adding and subtracting 1.5 * 2^23 rounds |a| < 2^22 to an integer; larger
        // values do not occur here (exponents and 8-bit codes).
        const MAGIC: f32 = 12_582_912.0;
        a.map(|a| (a + MAGIC) - MAGIC)
    }
    #[inline(always)]
    fn scale2(self, v: F, n: F) -> F {
        from_fn(|i| v[i] * f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn sum(self, v: F) -> f32 {
        let eight: [f32; 8] = from_fn(|i| v[i] + v[i + 8]);
        let four: [f32; 4] = from_fn(|i| eight[i] + eight[i + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }
    #[inline(always)]
    fn swap_lanes(self, v: F, stride: usize) -> F {
        from_fn(|i| v[i ^ stride])
    }
    #[inline(always)]
    fn max_lane(self, v: F) -> f32 {
        v.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    fn f32_units(self, v: I) -> [F; 1] {
        [v.map(f32::from_bits)]
    }
    #[inline(always)]
    fn bf16_units(self, v: I) -> [F; 2] {
        let bf16 = |bits: u32| bf16::from_bits(bits as u16).to_f32();
        [v.map(bf16), v.map(|v| bf16(v >> 16))]
    }
    #[inline(always)]
    fn f16_units(self, v: I) -> [F; 2] {
        let f16 = |bits: u32| f16::from_bits(bits as u16).to_f32();
        [v.map(f16), v.map(|v| f16(v >> 16))]
    }
    #[inline(always)]
    fn byte_units(self, v: I) -> [F; 4] {
        from_fn(|n| v.map(|v| ((v >> (8 * n)) & 255) as f32 - 128.0))
    }
    #[inline(always)]
    fn nibble_units(self, v: I) -> [F; 8] {
        from_fn(|n| v.map(|v| ((v >> (4 * n)) & 15) as f32 - 8.0))
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> I {
        [x as u32; LANES]
    }
    #[inline(always)]
    fn to_f32(self, v: I) -> F {
        v.map(|v| v as i32 as f32)
    }
    #[inline(always)]
    fn split_nibbles(self, v: I) -> [I; 2] {
        [
            v.map(|v| v & 0x0f0f_0f0f),
            v.map(|v| (v >> 4) & 0x0f0f_0f0f),
        ]
    }
    #[inline(always)]
    fn with_high(self, low: I, high: I, shift: i32, mask: i32) -> I {
        from_fn(|i| low[i] | ((high[i] >> shift) & mask as u32) << 4)
    }
    #[inline(always)]
    fn lookup(self, levels: I, codes: I) -> I {
        from_fn(|i| {
            let level =
                |code: u8| levels[usize::from(code / 4)].to_le_bytes()[usize::from(code % 4)];
            u32::from_le_bytes(codes[i].to_le_bytes().map(level))
        })
    }
    #[inline(always)]
    fn dot4_nibbles(self, acc: I, w: I, x: i32) -> I {
        self.dot4_bytes(acc, w, x)
    }
    #[inline(always)]
    fn dot4_lanes(self, acc: I, w: I, x: I) -> I {
        from_fn(|i| {
            let (w, x) = (w[i].to_le_bytes(), x[i].to_le_bytes());
            let dot: i32 = (0..4)
                .map(|j| i32::from(w[j]) * i32::from(x[j] as i8))
                .sum();
            (acc[i] as i32 + dot) as u32
        })
    }

    #[inline(always)]
    fn state(self, before: I, word: I, end: usize) -> I {
        let past = (32 - end % 32) % 32;
        from_fn(|i| {
            let both = u64::from(before[i]) << 32 | u64::from(word[i]);
            (both >> past) as u32 & 0xffff
        })
    }
    #[inline(always)]
    fn add_i(self, a: I, b: I) -> I {
        from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    fn mask_and_flip(self, v: I, mask: i32, flip: i32) -> I {
        v.map(|v| v & mask as u32 ^ flip as u32)
    }
    #[inline(always)]
    fn round_f16(self, v: F) -> F {
        v.map(|v| f16::from_f32(v).to_f32())
    }
    #[inline(always)]
    fn mul_i(self, a: I, b: I) -> I {
        from_fn(|i| a[i].wrapping_mul(b[i]))
    }
    #[inline(always)]
    fn sum_fours(self, v: [I; 4]) -> I {
        from_fn(|i| (0..4).fold(0, |sum: u32, k| sum.wrapping_add(v[i % 4][i / 4 * 4 + k])))
    }
    #[inline(always)]
    fn transpose_fours(self, v: [I; 4]) -> [I; 4] {
        from_fn(|k| from_fn(|i| v[i % 4][i / 4 * 4 + k]))
    }
}
