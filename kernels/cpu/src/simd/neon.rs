//! NEON with the dot product extension: 16 lanes are four registers.

use super::{Simd, instructions};
use half::f16;
use std::arch::aarch64::*;

/// Proof that the CPU has NEON and the dot product extension.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

/// 16 floats.
pub(crate) type F = [float32x4_t; 4];
/// 16 times 4 bytes.
pub(crate) type I = [int32x4_t; 4];

/// One expression for each of the four registers.
macro_rules! four {
    ($i:ident => $e:expr) => {{
        let a = {
            let $i = 0;
            $e
        };
        let b = {
            let $i = 1;
            $e
        };
        let c = {
            let $i = 2;
            $e
        };
        let d = {
            let $i = 3;
            $e
        };
        [a, b, c, d]
    }};
}

impl Neon {
    instructions! {
        // Extracts a field of each lane: shifts it to the top by `left`, then sign-extends it down.
        fn field(self, v: I, left: i32, right: i32) -> F {
            let (left, right) = (vdupq_n_s32(left), vdupq_n_s32(-right));
            four!(i => vcvtq_f32_s32(vshlq_s32(vshlq_s32(v[i], left), right)))
        }
        fn widen_u8(self, v: uint8x16_t) -> F {
            let (low, high) = (vmovl_u8(vget_low_u8(v)), vmovl_u8(vget_high_u8(v)));
            [
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
                vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
                vcvtq_f32_u32(vmovl_u16(vget_high_u16(high))),
            ]
        }
        // Signed bytes times signed bytes, summed in fours into the lanes of `acc`.
        fn sdot(self, acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
            let mut out = acc;
            std::arch::asm!(
                "sdot {out:v}.4s, {w:v}.16b, {x:v}.16b",
                out = inout(vreg) out,
                w = in(vreg) w,
                x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags),
            );
            out
        }
    }
}

impl Simd for Neon {
    type F = F;
    type I = I;
    // Nibbles fit signed bytes; the centre is subtracted through the start value.
    const NIBBLE_START: i32 = -8;
    // 8-bit weights are made signed.
    const BYTE_START: i32 = 0;

    #[inline(always)]
    unsafe fn new() -> Self {
        Neon(())
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> F {
        // SAFETY: by contract.
        unsafe { four!(i => vld1q_f32(p.add(4 * i))) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: F) {
        for (i, v) in v.into_iter().enumerate() {
            // SAFETY: by contract.
            unsafe { vst1q_f32(p.add(4 * i), v) }
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> F {
        let mut out = [0f32; 16];
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: by contract.
            *out = unsafe { p.add(i).read_unaligned() }.to_f32();
        }
        // SAFETY: a local array of 16.
        unsafe { self.load(out.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> F {
        // SAFETY: by contract.
        unsafe {
            let v = vld1q_s8(p);
            let (low, high) = (vmovl_s8(vget_low_s8(v)), vmovl_s8(vget_high_s8(v)));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: F) {
        // SAFETY: by contract.
        unsafe {
            let low = vcombine_s16(
                vqmovn_s32(vcvtnq_s32_f32(v[0])),
                vqmovn_s32(vcvtnq_s32_f32(v[1])),
            );
            let high = vcombine_s16(
                vqmovn_s32(vcvtnq_s32_f32(v[2])),
                vqmovn_s32(vcvtnq_s32_f32(v[3])),
            );
            vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)))
        }
    }
    #[inline(always)]
    unsafe fn load_u8(self, p: *const u8) -> F {
        // SAFETY: by contract.
        self.widen_u8(unsafe { vld1q_u8(p) })
    }
    #[inline(always)]
    unsafe fn load_u4(self, p: *const u8) -> F {
        // SAFETY: by contract.
        unsafe {
            let bytes = vld1_u8(p);
            let low = vand_u8(bytes, vdup_n_u8(15));
            let high = vshr_n_u8::<4>(bytes);
            self.widen_u8(vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)))
        }
    }
    #[inline(always)]
    unsafe fn load_bits(self, p: *const u32) -> I {
        // SAFETY: by contract.
        unsafe { four!(i => vld1q_s32(p.add(4 * i).cast())) }
    }
    #[inline(always)]
    unsafe fn store_bits(self, p: *mut u32, v: I) {
        // SAFETY: by contract.
        unsafe {
            v.iter()
                .enumerate()
                .for_each(|(i, &v)| vst1q_s32(p.add(4 * i).cast(), v))
        }
    }
    #[inline(always)]
    unsafe fn load_fours(self, p: *const i8) -> I {
        // SAFETY: by contract.
        [unsafe { vreinterpretq_s32_s8(vld1q_s8(p)) }; 4]
    }
    instructions! {
        fn splat(self, x: f32) -> F { [vdupq_n_f32(x); 4] }
        fn add(self, a: F, b: F) -> F { four!(i => vaddq_f32(a[i], b[i])) }
        fn sub(self, a: F, b: F) -> F { four!(i => vsubq_f32(a[i], b[i])) }
        fn mul(self, a: F, b: F) -> F { four!(i => vmulq_f32(a[i], b[i])) }
        fn div(self, a: F, b: F) -> F { four!(i => vdivq_f32(a[i], b[i])) }
        fn max(self, a: F, b: F) -> F { four!(i => vmaxq_f32(a[i], b[i])) }
        fn fma(self, a: F, b: F, c: F) -> F { four!(i => vfmaq_f32(c[i], a[i], b[i])) }
        fn abs(self, a: F) -> F { four!(i => vabsq_f32(a[i])) }
        fn round(self, a: F) -> F { four!(i => vrndnq_f32(a[i])) }
        fn scale2(self, v: F, n: F) -> F {
            four!(i => {
                let e = vaddq_s32(vcvtnq_s32_f32(n[i]), vdupq_n_s32(127));
                vmulq_f32(v[i], vreinterpretq_f32_s32(vshlq_n_s32::<23>(e)))
            })
        }
        fn sum(self, v: F) -> f32 {
            vaddvq_f32(vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3])))
        }
        fn swap_lanes(self, v: F, stride: usize) -> F {
            match stride {
                1 => four!(i => vrev64q_f32(v[i])),
                2 => four!(i => vextq_f32::<2>(v[i], v[i])),
                4 => [v[1], v[0], v[3], v[2]],
                _ => [v[2], v[3], v[0], v[1]],
            }
        }
        fn max_lane(self, v: F) -> f32 {
            vmaxvq_f32(vmaxq_f32(vmaxq_f32(v[0], v[2]), vmaxq_f32(v[1], v[3])))
        }

        fn f32_units(self, v: I) -> [F; 1] { [four!(i => vreinterpretq_f32_s32(v[i]))] }
        fn bf16_units(self, v: I) -> [F; 2] {
            [
                four!(i => vreinterpretq_f32_s32(vshlq_n_s32::<16>(v[i]))),
                four!(i => vreinterpretq_f32_s32(vandq_s32(v[i], vdupq_n_s32(!0xffff)))),
            ]
        }
        fn f16_units(self, v: I) -> [F; 2] {
            let mut low = [f16::ZERO; 16];
            let mut high = [f16::ZERO; 16];
            let bits: [i32; 16] = std::mem::transmute(v);
            for i in 0..16 {
                low[i] = f16::from_bits(bits[i] as u16);
                high[i] = f16::from_bits((bits[i] >> 16) as u16);
            }
            [self.load_f16(low.as_ptr()), self.load_f16(high.as_ptr())]
        }
        fn byte_units(self, v: I) -> [F; 4] {
            // Flipping the top bit turns code - 128 into a signed byte.
            let v = four!(i => veorq_s32(v[i], vdupq_n_s32(0x8080_8080u32 as i32)));
            [
                self.field(v, 24, 24), self.field(v, 16, 24),
                self.field(v, 8, 24), self.field(v, 0, 24),
            ]
        }
        fn nibble_units(self, v: I) -> [F; 8] {
            let v = four!(i => veorq_s32(v[i], vdupq_n_s32(0x8888_8888u32 as i32)));
            [
                self.field(v, 28, 28), self.field(v, 24, 28),
                self.field(v, 20, 28), self.field(v, 16, 28),
                self.field(v, 12, 28), self.field(v, 8, 28),
                self.field(v, 4, 28), self.field(v, 0, 28),
            ]
        }

        fn splat_i(self, x: i32) -> I { [vdupq_n_s32(x); 4] }
        fn to_f32(self, v: I) -> F { four!(i => vcvtq_f32_s32(v[i])) }
        fn split_nibbles(self, v: I) -> [I; 2] {
            let mask = vdupq_n_u8(15);
            [
                four!(i => vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(v[i]), mask))),
                four!(i => vreinterpretq_s32_u8(vshrq_n_u8::<4>(vreinterpretq_u8_s32(v[i])))),
            ]
        }
        fn with_high(self, low: I, high: I, shift: i32, mask: i32) -> I {
            let (shift, mask) = (vdupq_n_s32(-shift), vdupq_n_s32(mask));
            let high = four!(i => vshlq_u32(vreinterpretq_u32_s32(high[i]), shift));
            let high = four!(i => vandq_s32(vreinterpretq_s32_u32(high[i]), mask));
            four!(i => vorrq_s32(low[i], vshlq_n_s32::<4>(high[i])))
        }
        fn lookup(self, levels: I, codes: I) -> I {
            let levels = vreinterpretq_u8_s32(levels[0]);
            four!(i => vreinterpretq_s32_u8(vqtbl1q_u8(levels, vreinterpretq_u8_s32(codes[i]))))
        }
        fn dot4_nibbles(self, acc: I, w: I, x: i32) -> I {
            let x = vreinterpretq_s8_s32(vdupq_n_s32(x));
            four!(i => self.sdot(acc[i], vreinterpretq_s8_s32(w[i]), x))
        }
        fn dot4_lanes(self, acc: I, w: I, x: I) -> I {
            let flip = vdupq_n_s32(0x8080_8080u32 as i32);
            four!(i => self.sdot(
                acc[i],
                vreinterpretq_s8_s32(veorq_s32(w[i], flip)),
                vreinterpretq_s8_s32(x[i]),
            ))
        }

        fn state(self, before: I, word: I, end: usize) -> I {
            // Shifts by 32 give 0.
            let left = (end as i32 + 31) % 32 + 1;
            let (left, right) = (vdupq_n_s32(left), vdupq_n_s32(left - 32));
            four!(i => {
                let left = vshlq_u32(vreinterpretq_u32_s32(before[i]), left);
                let right = vshlq_u32(vreinterpretq_u32_s32(word[i]), right);
                vreinterpretq_s32_u32(vandq_u32(vorrq_u32(left, right), vdupq_n_u32(0xffff)))
            })
        }
        fn add_i(self, a: I, b: I) -> I { four!(i => vaddq_s32(a[i], b[i])) }
        fn mul_i(self, a: I, b: I) -> I { four!(i => vmulq_s32(a[i], b[i])) }
        fn mask_and_flip(self, v: I, mask: i32, flip: i32) -> I {
            four!(i => veorq_s32(vandq_s32(v[i], vdupq_n_s32(mask)), vdupq_n_s32(flip)))
        }
        fn round_f16(self, v: F) -> F {
            // f16 lacks 13 bits of the mantissa.
            four!(i => {
                let bits = vreinterpretq_u32_f32(v[i]);
                let odd = vandq_u32(vshrq_n_u32::<13>(bits), vdupq_n_u32(1));
                let up = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0xfff));
                vreinterpretq_f32_u32(vandq_u32(up, vdupq_n_u32(!0x1fff)))
            })
        }
        fn sum_fours(self, v: [I; 4]) -> I {
            four!(i => vpaddq_s32(vpaddq_s32(v[0][i], v[1][i]), vpaddq_s32(v[2][i], v[3][i])))
        }
        fn transpose_fours(self, v: [I; 4]) -> [I; 4] {
            let mut out = v;
            for i in 0..4 {
                let even = [vtrn1q_s32(v[0][i], v[1][i]), vtrn1q_s32(v[2][i], v[3][i])];
                let odd = [vtrn2q_s32(v[0][i], v[1][i]), vtrn2q_s32(v[2][i], v[3][i])];
                // Of each pair of lanes 0 and 2, then 1 and 3, the low and the high halves.
                let [even, odd] = [even, odd].map(|pair| pair.map(|p| vreinterpretq_s64_s32(p)));
                out[0][i] = vreinterpretq_s32_s64(vtrn1q_s64(even[0], even[1]));
                out[1][i] = vreinterpretq_s32_s64(vtrn1q_s64(odd[0], odd[1]));
                out[2][i] = vreinterpretq_s32_s64(vtrn2q_s64(even[0], even[1]));
                out[3][i] = vreinterpretq_s32_s64(vtrn2q_s64(odd[0], odd[1]));
            }
            out
        }
    }
}
