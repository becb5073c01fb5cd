//! Sixteen lanes of arithmetic, one implementation per instruction set.
//!
//! Kernels are written once, generic over [`Simd`], and instantiated per instruction set
//! inside functions that enable it (see `table.rs`). A value of the implementing type
//! proves that the CPU has the instruction set, which makes arithmetic safe and leaves
//! only memory access unsafe. All methods are inlined into those functions, where they
//! become single instructions.

use half::f16;
use nq_kernels::math::EXP_TERMS;

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod scalar;

/// Methods whose bodies are instructions of the set.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! instructions {
    ($(fn $name:ident($self:ident, $($arg:ident: $ty:ty),*) -> $ret:ty $body:block)*) => {$(
        #[inline(always)]
        #[allow(unused_unsafe, reason = "some are safe where they are the target's baseline")]
        fn $name($self, $($arg: $ty),*) -> $ret {
            // SAFETY: `self` proves that the CPU has these instructions.
            unsafe { $body }
        }
    )*};
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use instructions;

/// Methods whose bodies are instructions of the set that read or write memory.
#[cfg(target_arch = "x86_64")]
macro_rules! memory {
    ($(fn $name:ident($self:ident, $($arg:ident: $ty:ty),*) $(-> $ret:ty)? $body:block)*) => {$(
        #[inline(always)]
        unsafe fn $name($self, $($arg: $ty),*) $(-> $ret)? {
            // SAFETY: `self` proves that the CPU has these instructions; the pointer is
            // valid by the method's contract.
            unsafe { $body }
        }
    )*};
}
#[cfg(target_arch = "x86_64")]
use memory;

/// Lanes of [`Simd::F`] and [`Simd::I`]; also the rows of a weight panel.
pub(crate) const LANES: usize = 16;

/// An instruction set's operations on 16 lanes.
pub(crate) trait Simd: Copy {
    /// 16 f32.
    type F: Copy;
    /// 16 lanes of 32 bits, or of four bytes.
    type I: Copy;

    /// The start value of a 4-bit dot product, per unit of the activations' sum, with which
    /// it is one over codes minus 8 (see [`Simd::dot4_nibbles`]).
    const NIBBLE_START: i32;
    /// The start value for 8-bit codes minus 128.
    const BYTE_START: i32;
    /// True if [`Simd::dot4_nibbles`] adds to sums of 16 bits, so that only few may be added up.
    const SHORT_SUMS: bool = false;

    /// Creates the proof.
    ///
    /// # Safety
    /// The CPU has the instruction set.
    unsafe fn new() -> Self;

    // Memory.

    /// Reads 16 floats.
    ///
    /// # Safety
    /// `p` is valid for reading 16 values; any alignment. This applies to every `load`.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// Writes 16 floats.
    ///
    /// # Safety
    /// `p` is valid for writing 16 values; any alignment. This applies to every `store`.
    unsafe fn store(self, p: *mut f32, v: Self::F);
    /// # Safety
    /// See [`Simd::load`].
    unsafe fn load_f16(self, p: *const f16) -> Self::F;
    /// # Safety
    /// See [`Simd::load`].
    unsafe fn load_i8(self, p: *const i8) -> Self::F;
    /// Rounds to nearest, ties to even; values must be between -128 and 127.
    ///
    /// # Safety
    /// See [`Simd::store`].
    unsafe fn store_i8(self, p: *mut i8, v: Self::F);
    /// # Safety
    /// See [`Simd::load`].
    unsafe fn load_u8(self, p: *const u8) -> Self::F;
    /// Reads 16 values of 4 bits, low nibble of each byte first, from 8 bytes.
    ///
    /// # Safety
    /// `p` is valid for reading 8 bytes.
    unsafe fn load_u4(self, p: *const u8) -> Self::F;
    /// Reads 64 bytes.
    ///
    /// # Safety
    /// `p` is valid for reading 64 bytes.
    unsafe fn load_bits(self, p: *const u32) -> Self::I;
    /// Writes 64 bytes.
    ///
    /// # Safety
    /// `p` is valid for writing 64 bytes.
    unsafe fn store_bits(self, p: *mut u32, v: Self::I);
    /// Reads 16 bytes, repeated in every four lanes.
    ///
    /// # Safety
    /// `p` is valid for reading 16 bytes.
    unsafe fn load_fours(self, p: *const i8) -> Self::I;

    /// Requests the cache line of `p` for the second-level cache; any address will do. Does nothing on processors
    /// other than x86.
    #[inline(always)]
    fn prefetch<T>(self, p: *const T) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, which reads nothing. SSE is part of x86-64.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T1>(p.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = p;
    }

    // Floats.

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::F;
    /// `a + b`
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The greater of each lane.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`; with one rounding if the instruction set has it, otherwise two.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Clears the sign.
    fn abs(self, a: Self::F) -> Self::F;
    /// The nearest integers, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// `v * 2^n` for integers `-126 <= n <= 127`.
    fn scale2(self, v: Self::F, n: Self::F) -> Self::F;
    /// Sum of the lanes, in a fixed order.
    fn sum(self, v: Self::F) -> f32;
    /// Lane `i` gets lane `i ^ stride`, for a stride of 1, 2, 4 or 8.
    fn swap_lanes(self, v: Self::F, stride: usize) -> Self::F;
    /// Greatest lane.
    fn max_lane(self, v: Self::F) -> f32;

    // Packed weights: each lane of 4 bytes belongs to one row.

    /// The lanes' bits as f32.
    fn f32_units(self, v: Self::I) -> [Self::F; 1];
    /// The low, then the high halves, as bf16.
    fn bf16_units(self, v: Self::I) -> [Self::F; 2];
    /// The low, then the high halves, as f16.
    fn f16_units(self, v: Self::I) -> [Self::F; 2];
    /// The bytes, low first, minus 128.
    fn byte_units(self, v: Self::I) -> [Self::F; 4];
    /// The nibbles, low first, minus 8.
    fn nibble_units(self, v: Self::I) -> [Self::F; 8];

    /// `acc + w0 x0 + w1 x1` per lane, over the pairs of bf16 in the lanes of `w` and in `x`,
    /// low halves first; the products are exact, the sums rounded in any order.
    #[inline(always)]
    fn dot2_bf16(self, acc: Self::F, w: Self::I, x: u32) -> Self::F {
        let [low, high] = self.bf16_units(w);
        let acc = self.fma(low, self.splat(f32::from_bits(x << 16)), acc);
        self.fma(high, self.splat(f32::from_bits(x & 0xffff_0000)), acc)
    }

    // Integer dot products.

    /// All lanes `x`.
    fn splat_i(self, x: i32) -> Self::I;
    /// Lanes converted from i32.
    fn to_f32(self, v: Self::I) -> Self::F;
    /// The low nibbles of all bytes, then the high ones.
    fn split_nibbles(self, v: Self::I) -> [Self::I; 2];
    /// The bytes of `low`, all below 16, combined with the bits `mask` (in each byte, 1 or 3) of the
    /// bytes of `high`, shifted right by `shift`, as higher bits.
    fn with_high(self, low: Self::I, high: Self::I, shift: i32, mask: i32) -> Self::I;
    /// The bytes of `levels` (from [`Simd::load_fours`]) that the bytes of `codes`, all below 16, number.
    fn lookup(self, levels: Self::I, codes: Self::I) -> Self::I;
    /// `acc` and the sums of [`Simd::dot4_nibbles`], which start from 0 where they are short.
    #[inline(always)]
    fn long_sums(self, acc: Self::I, sums: Self::I) -> Self::I {
        self.add_i(acc, sums)
    }
    /// `sums + sum of 4 (w * x)` per lane, over the bytes `w`, all below 64, and the signed
    /// bytes of `x`, all above -128. Started from `-centre * (sum of x)`, it is the
    /// dot product of `w - centre`; for nibbles started with `NIBBLE_START`, of `w - 8`. With
    /// [`Simd::SHORT_SUMS`] these are two sums in a lane, and no more may be added up than keep the greatest `w`, times 254 for each, below 2^15.
    fn dot4_nibbles(self, sums: Self::I, w: Self::I, x: i32) -> Self::I;
    /// Like [`Simd::dot4_nibbles`] for bytes up to 255: started with `BYTE_START`, of `w - 128`.
    #[inline(always)]
    fn dot4_bytes(self, acc: Self::I, w: Self::I, x: i32) -> Self::I {
        self.dot4_lanes(acc, w, self.splat_i(x))
    }
    /// [`Simd::dot4_bytes`] with other bytes of x in each lane.
    fn dot4_lanes(self, acc: Self::I, w: Self::I, x: Self::I) -> Self::I;

    // Trellis codes: each lane is a sequence.

    /// The 16 bits before bit `end` of `word`, counted from the highest; those that it lacks are the lowest of
    /// `before`. An `end` of 0 modulo 32 is that of the word.
    fn state(self, before: Self::I, word: Self::I, end: usize) -> Self::I;
    /// The lanes' sums, modulo 2^32.
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// The low 32 bits of the lanes' products.
    fn mul_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// The lanes' bits that `mask` has, those of `flip` flipped.
    fn mask_and_flip(self, v: Self::I, mask: i32, flip: i32) -> Self::I;
    /// The nearest f16, ties to even, of values that are normal as f16 or have at most 11 significant bits.
    fn round_f16(self, v: Self::F) -> Self::F;
    /// The sum of lanes `4 i ..` of `v[j]` in lane `4 i + j`.
    fn sum_fours(self, v: [Self::I; 4]) -> Self::I;
    /// Lane `4 i + k` of `v[j]` goes to lane `4 i + j` of result `k`.
    fn transpose_fours(self, v: [Self::I; 4]) -> [Self::I; 4];

    /// `e^x` to about 2 units in the last place, for x between -87.3 and 88; outside, the
    /// value at the bound.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        // x = n ln 2 + r, |r| <= ln(2) / 2; e^r by its Taylor series: the first omitted
        // term, r^8 / 8!, is below 6e-9.
        let x = self.max(x, self.splat(-87.3));
        let x = self.neg(self.max(self.neg(x), self.splat(-88.0)));
        let n = self.round(self.mul(x, self.splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts, the first short enough for n * LN2_HIGH to be exact.
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = (std::f64::consts::LN_2 - LN2_HIGH as f64) as f32;
        let r = self.fma(n, self.splat(-LN2_HIGH), x);
        let r = self.fma(n, self.splat(-LN2_LOW), r);
        let mut p = self.splat(1.0 / 5040.0);
        for c in EXP_TERMS {
            p = self.fma(p, r, self.splat(c));
        }
        self.scale2(p, n)
    }

    /// `-a`
    #[inline(always)]
    fn neg(self, a: Self::F) -> Self::F {
        self.sub(self.splat(0.0), a)
    }

    /// `gate / (1 + e^-gate) * up`
    #[inline(always)]
    fn silu_mul(self, gate: Self::F, up: Self::F) -> Self::F {
        let e = self.exp(self.neg(gate));
        let s = self.div(gate, self.add(self.splat(1.0), e));
        self.mul(s, up)
    }
}

/// Products of integers of 16 bits.
pub(crate) trait SimdPairs: Simd {
    /// The bytes of `quads` less `centre`, as integers of 16 bits: bytes 0 and 2 of each lane, then 1 and 3.
    fn pairs(self, quads: Self::I, centre: i16) -> [Self::I; 2];
    /// `acc + w0 x0 + w1 x1` per lane, over the pairs of integers of 16 bits in the lanes of `w` and in `x`.
    fn dot2(self, acc: Self::I, w: Self::I, x: i32) -> Self::I;
}
