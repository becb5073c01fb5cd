//! AVX-512 F, BW, VL, DQ and VNNI, with or without BF16.

use super::{Simd, SimdPairs, instructions, memory};
use half::f16;
use std::arch::x86_64::*;

/// Proof that the CPU has AVX-512 F, BW, VL, DQ and VNNI, and AVX2, FMA and F16C; also BF16
/// if `BF16`.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const BF16: bool>(());

impl<const BF16: bool> Simd for Avx512<BF16> {
    type F = __m512;
    type I = __m512i;
    // vpdpbusd takes unsigned weights, so the centre is subtracted through the start value.
    const NIBBLE_START: i32 = -8;
    const BYTE_START: i32 = -128;

    #[inline(always)]
    unsafe fn new() -> Self {
        Avx512(())
    }

    memory! {
        fn load(self, p: *const f32) -> __m512 { _mm512_loadu_ps(p) }
        fn store(self, p: *mut f32, v: __m512) { _mm512_storeu_ps(p, v) }
        fn load_f16(self, p: *const f16) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
        fn load_i8(self, p: *const i8) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))
        }
        fn store_i8(self, p: *mut i8, v: __m512) {
            _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)))
        }
        fn load_u8(self, p: *const u8) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())))
        }
        fn load_u4(self, p: *const u8) -> __m512 {
            let bytes = _mm_loadl_epi64(p.cast());
            let low = _mm_and_si128(bytes, _mm_set1_epi8(15));
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15));
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)))
        }
        fn load_bits(self, p: *const u32) -> __m512i { _mm512_loadu_si512(p.cast()) }
        fn store_bits(self, p: *mut u32, v: __m512i) { _mm512_storeu_si512(p.cast(), v) }
        fn load_fours(self, p: *const i8) -> __m512i {
            _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast()))
        }
    }

    instructions! {
        fn splat(self, x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn add(self, a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(self, a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(self, a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn div(self, a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn max(self, a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn abs(self, a: __m512) -> __m512 { _mm512_abs_ps(a) }
        fn round(self, a: __m512) -> __m512 { _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(a) }
        fn scale2(self, v: __m512, n: __m512) -> __m512 { _mm512_scalef_ps(v, n) }
        fn sum(self, v: __m512) -> f32 { _mm512_reduce_add_ps(v) }
        fn swap_lanes(self, v: __m512, stride: usize) -> __m512 {
            match stride {
                1 => _mm512_permute_ps::<0b10_11_00_01>(v),
                2 => _mm512_permute_ps::<0b01_00_11_10>(v),
                4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v),
                _ => _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v),
            }
        }
        fn max_lane(self, v: __m512) -> f32 { _mm512_reduce_max_ps(v) }

        fn f32_units(self, v: __m512i) -> [__m512; 1] { [_mm512_castsi512_ps(v)] }
        fn bf16_units(self, v: __m512i) -> [__m512; 2] {
            [
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v)),
                _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(!0xffff))),
            ]
        }
        fn f16_units(self, v: __m512i) -> [__m512; 2] {
            [
                _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)),
                _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(v))),
            ]
        }
        fn byte_units(self, v: __m512i) -> [__m512; 4] {
            // Flipping the top bit turns code - 128 into a signed byte.
            let v = _mm512_xor_si512(v, _mm512_set1_epi8(-128));
            [
                _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(v))),
                _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<16>(v))),
                _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<8>(v))),
                _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(v)),
            ]
        }
        fn nibble_units(self, v: __m512i) -> [__m512; 8] {
            // vpermps uses only the low 4 bits of each index: no masking is needed.
            let values = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0,
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
            );
            [
                _mm512_permutexvar_ps(v, values),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(v), values),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<8>(v), values),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<12>(v), values),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<16>(v), values),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<20>(v), values),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<24>(v), values),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<28>(v), values),
            ]
        }

        fn dot2_bf16(self, acc: __m512, w: __m512i, x: u32) -> __m512 {
            if BF16 {
                let x = _mm512_set1_epi32(x as i32);
                // SAFETY: both types are 512 bits of plain data.
                let [w, x]: [__m512bh; 2] = std::mem::transmute([w, x]);
                _mm512_dpbf16_ps(acc, w, x)
            } else {
                let [low, high] = self.bf16_units(w);
                let acc = self.fma(low, self.splat(f32::from_bits(x << 16)), acc);
                self.fma(high, self.splat(f32::from_bits(x & 0xffff_0000)), acc)
            }
        }

        fn splat_i(self, x: i32) -> __m512i { _mm512_set1_epi32(x) }
        fn to_f32(self, v: __m512i) -> __m512 { _mm512_cvtepi32_ps(v) }
        fn split_nibbles(self, v: __m512i) -> [__m512i; 2] {
            let mask = _mm512_set1_epi8(15);
            [
                _mm512_and_si512(v, mask),
                _mm512_and_si512(_mm512_srli_epi32::<4>(v), mask),
            ]
        }
        fn with_high(self, low: __m512i, high: __m512i, shift: i32, mask: i32) -> __m512i {
            let high = _mm512_srl_epi32(high, _mm_cvtsi32_si128(shift));
            let high = _mm512_and_si512(high, _mm512_set1_epi32(mask));
            _mm512_or_si512(low, _mm512_slli_epi32::<4>(high))
        }
        fn lookup(self, levels: __m512i, codes: __m512i) -> __m512i { _mm512_shuffle_epi8(levels, codes) }
        fn dot4_nibbles(self, acc: __m512i, w: __m512i, x: i32) -> __m512i {
            _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x))
        }
        fn dot4_lanes(self, acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
            _mm512_dpbusd_epi32(acc, w, x)
        }

        fn state(self, before: __m512i, word: __m512i, end: usize) -> __m512i {
            let left = (end as i32 + 31) % 32 + 1;
            let right = _mm512_srl_epi32(word, _mm_cvtsi32_si128(32 - left));
            let left = _mm512_sll_epi32(before, _mm_cvtsi32_si128(left));
            _mm512_and_si512(_mm512_or_si512(left, right), _mm512_set1_epi32(0xffff))
        }
        fn add_i(self, a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn mul_i(self, a: __m512i, b: __m512i) -> __m512i { _mm512_mullo_epi32(a, b) }
        fn mask_and_flip(self, v: __m512i, mask: i32, flip: i32) -> __m512i {
            _mm512_xor_si512(_mm512_and_si512(v, _mm512_set1_epi32(mask)), _mm512_set1_epi32(flip))
        }
        fn round_f16(self, v: __m512) -> __m512 {
            _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v))
        }
        fn sum_fours(self, v: [__m512i; 4]) -> __m512i {
            let [a, b, c, d] = v;
            let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
        }
        fn transpose_fours(self, v: [__m512i; 4]) -> [__m512i; 4] {
            let [a, b, c, d] = v;
            let low = [_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d)];
            let high = [_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d)];
            [
                _mm512_unpacklo_epi64(low[0], low[1]), _mm512_unpackhi_epi64(low[0], low[1]),
                _mm512_unpacklo_epi64(high[0], high[1]), _mm512_unpackhi_epi64(high[0], high[1]),
            ]
        }
    }
}

impl<const BF16: bool> SimdPairs for Avx512<BF16> {
    instructions! {
        fn pairs(self, quads: __m512i, centre: i16) -> [__m512i; 2] {
            let (low, centre) = (_mm512_set1_epi16(0xff), _mm512_set1_epi16(centre));
            [
                _mm512_sub_epi16(_mm512_and_si512(quads, low), centre),
                _mm512_sub_epi16(_mm512_srli_epi16::<8>(quads), centre),
            ]
        }
        fn dot2(self, acc: __m512i, w: __m512i, x: i32) -> __m512i {
            _mm512_dpwssd_epi32(acc, w, _mm512_set1_epi32(x))
        }
    }
}
