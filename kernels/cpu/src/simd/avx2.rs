//! AVX2 with FMA and F16C, with or without VNNI: 16 lanes are two registers.

use super::{Simd, SimdPairs, instructions, memory};
use half::f16;
use std::arch::x86_64::*;

/// How the CPU multiplies and sums bytes in fours (`vpdpbusd`): it cannot,
pub(crate) const WITHOUT: u8 = 0;
/// by the VEX encoding (AVX-VNNI),
pub(crate) const VEX: u8 = 1;
/// or by the EVEX encoding (AVX-512 VNNI and VL).
pub(crate) const EVEX: u8 = 2;

/// Proof that the CPU has AVX2, FMA and F16C, and the kind of `VNNI` given.
#[derive(Clone, Copy)]
pub(crate) struct Avx2<const VNNI: u8>(());

/// 16 floats.
#[derive(Clone, Copy)]
pub(crate) struct Floats(__m256, __m256);
/// 16 times 4 bytes.
#[derive(Clone, Copy)]
pub(crate) struct Integers(__m256i, __m256i);

/// One operation on both halves.
macro_rules! both {
    ($op:ident($a:expr)) => {
        Floats($op($a.0), $op($a.1))
    };
    ($op:ident($a:expr, $b:expr)) => {
        Floats($op($a.0, $b.0), $op($a.1, $b.1))
    };
    ($op:ident($a:expr, $b:expr, $c:expr)) => {
        Floats($op($a.0, $b.0, $c.0), $op($a.1, $b.1, $c.1))
    };
}

impl<const VNNI: u8> Avx2<VNNI> {
    instructions! {
        fn widen_i8(self, v: __m128i) -> Floats {
            Floats(
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(v))),
            )
        }
        fn widen_u8(self, v: __m128i) -> Floats {
            Floats(
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(v))),
            )
        }
        // Four i16 pair sums become two i32, then one per lane of 4 bytes.
        fn madd(self, acc: __m256i, pairs: __m256i) -> __m256i {
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
        fn dpbusd(self, acc: Integers, w: Integers, x: Integers) -> Integers {
            if VNNI == VEX {
                Integers(_mm256_dpbusd_avx_epi32(acc.0, w.0, x.0), _mm256_dpbusd_avx_epi32(acc.1, w.1, x.1))
            } else {
                Integers(_mm256_dpbusd_epi32(acc.0, w.0, x.0), _mm256_dpbusd_epi32(acc.1, w.1, x.1))
            }
        }
        // See `Simd::state`, for one register.
        fn state_of(self, before: __m256i, word: __m256i, end: i32) -> __m256i {
            let left = (end + 31) % 32 + 1;
            let right = _mm256_srl_epi32(word, _mm_cvtsi32_si128(32 - left));
            let left = _mm256_sll_epi32(before, _mm_cvtsi32_si128(left));
            _mm256_and_si256(_mm256_or_si256(left, right), _mm256_set1_epi32(0xffff))
        }
        // See `Simd::sum_fours`, for one register.
        fn sum_fours_of(self, a: __m256i, b: __m256i, c: __m256i, d: __m256i) -> __m256i {
            _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d))
        }
        // See `Simd::transpose_fours`, for one register.
        fn transpose_of(self, a: __m256i, b: __m256i, c: __m256i, d: __m256i) -> [__m256i; 4] {
            let low = [_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d)];
            let high = [_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d)];
            [
                _mm256_unpacklo_epi64(low[0], low[1]), _mm256_unpackhi_epi64(low[0], low[1]),
                _mm256_unpacklo_epi64(high[0], high[1]), _mm256_unpackhi_epi64(high[0], high[1]),
            ]
        }
        // Products of signed bytes: |w| is at most 128 and |x| at most 127, so a pair sums to
        // at most 32512 and `maddubs` cannot saturate.
        fn signed_pairs(self, w: __m256i, x: __m256i) -> __m256i {
            _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
        }
        // The low 16 bits of each lane, in order.
        fn low_halves(self, v: __m256i) -> __m128i {
            let packed = _mm256_packus_epi32(
                _mm256_and_si256(v, _mm256_set1_epi32(0xffff)),
                _mm256_setzero_si256(),
            );
            _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(packed))
        }
    }
}

/// A bit field of each lane, sign-extended, as floats: shifted to the top, then down.
macro_rules! field {
    ($v:expr, $left:literal, $right:literal) => {
        Floats(
            _mm256_cvtepi32_ps(_mm256_srai_epi32::<$right>(_mm256_slli_epi32::<$left>(
                $v.0,
            ))),
            _mm256_cvtepi32_ps(_mm256_srai_epi32::<$right>(_mm256_slli_epi32::<$left>(
                $v.1,
            ))),
        )
    };
}

impl<const VNNI: u8> Simd for Avx2<VNNI> {
    type F = Floats;
    type I = Integers;
    const NIBBLE_START: i32 = -8;
    // Without VNNI, which takes unsigned weights, 8-bit ones are made signed: see
    // `signed_pairs`.
    const BYTE_START: i32 = if VNNI == WITHOUT { 0 } else { -128 };
    const SHORT_SUMS: bool = VNNI == WITHOUT;

    #[inline(always)]
    unsafe fn new() -> Self {
        Avx2(())
    }

    memory! {
        fn load(self, p: *const f32) -> Floats { Floats(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
        fn store(self, p: *mut f32, v: Floats) {
            _mm256_storeu_ps(p, v.0);
            _mm256_storeu_ps(p.add(8), v.1)
        }
        fn load_f16(self, p: *const f16) -> Floats {
            Floats(
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
            )
        }
        fn load_i8(self, p: *const i8) -> Floats { self.widen_i8(_mm_loadu_si128(p.cast())) }
        fn store_i8(self, p: *mut i8, v: Floats) {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(v.0), _mm256_cvtps_epi32(v.1));
            // Packing works within 128-bit halves: put the quarters in order.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm256_packs_epi16(words, words);
            let bytes = _mm256_permute4x64_epi64::<0b10_00>(bytes);
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(bytes))
        }
        fn load_u8(self, p: *const u8) -> Floats { self.widen_u8(_mm_loadu_si128(p.cast())) }
        fn load_u4(self, p: *const u8) -> Floats {
            let bytes = _mm_loadl_epi64(p.cast());
            let low = _mm_and_si128(bytes, _mm_set1_epi8(15));
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15));
            self.widen_u8(_mm_unpacklo_epi8(low, high))
        }
        fn load_bits(self, p: *const u32) -> Integers {
            Integers(_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(8).cast()))
        }
        fn store_bits(self, p: *mut u32, v: Integers) {
            _mm256_storeu_si256(p.cast(), v.0);
            _mm256_storeu_si256(p.add(8).cast(), v.1)
        }
        fn load_fours(self, p: *const i8) -> Integers {
            let four = _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()));
            Integers(four, four)
        }
    }

    instructions! {
        fn splat(self, x: f32) -> Floats { Floats(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
        fn add(self, a: Floats, b: Floats) -> Floats { both!(_mm256_add_ps(a, b)) }
        fn sub(self, a: Floats, b: Floats) -> Floats { both!(_mm256_sub_ps(a, b)) }
        fn mul(self, a: Floats, b: Floats) -> Floats { both!(_mm256_mul_ps(a, b)) }
        fn div(self, a: Floats, b: Floats) -> Floats { both!(_mm256_div_ps(a, b)) }
        fn max(self, a: Floats, b: Floats) -> Floats { both!(_mm256_max_ps(a, b)) }
        fn fma(self, a: Floats, b: Floats, c: Floats) -> Floats { both!(_mm256_fmadd_ps(a, b, c)) }
        fn abs(self, a: Floats) -> Floats {
            let sign = _mm256_set1_ps(-0.0);
            Floats(_mm256_andnot_ps(sign, a.0), _mm256_andnot_ps(sign, a.1))
        }
        fn round(self, a: Floats) -> Floats {
            Floats(
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a.0),
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a.1),
            )
        }
        fn scale2(self, v: Floats, n: Floats) -> Floats {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n.0), bias));
            let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n.1), bias));
            Floats(
                _mm256_mul_ps(v.0, _mm256_castsi256_ps(low)),
                _mm256_mul_ps(v.1, _mm256_castsi256_ps(high)),
            )
        }
        fn sum(self, v: Floats) -> f32 {
            let eight = _mm256_add_ps(v.0, v.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
        fn swap_lanes(self, v: Floats, stride: usize) -> Floats {
            match stride {
                1 => Floats(_mm256_permute_ps::<0b10_11_00_01>(v.0), _mm256_permute_ps::<0b10_11_00_01>(v.1)),
                2 => Floats(_mm256_permute_ps::<0b01_00_11_10>(v.0), _mm256_permute_ps::<0b01_00_11_10>(v.1)),
                4 => Floats(_mm256_permute2f128_ps::<1>(v.0, v.0), _mm256_permute2f128_ps::<1>(v.1, v.1)),
                _ => Floats(v.1, v.0),
            }
        }
        fn max_lane(self, v: Floats) -> f32 {
            let eight = _mm256_max_ps(v.0, v.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }

        fn f32_units(self, v: Integers) -> [Floats; 1] {
            [Floats(_mm256_castsi256_ps(v.0), _mm256_castsi256_ps(v.1))]
        }
        fn bf16_units(self, v: Integers) -> [Floats; 2] {
            let mask = _mm256_set1_epi32(!0xffff);
            [
                Floats(
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v.0)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v.1)),
                ),
                Floats(
                    _mm256_castsi256_ps(_mm256_and_si256(v.0, mask)),
                    _mm256_castsi256_ps(_mm256_and_si256(v.1, mask)),
                ),
            ]
        }
        fn f16_units(self, v: Integers) -> [Floats; 2] {
            [
                Floats(
                    _mm256_cvtph_ps(self.low_halves(v.0)),
                    _mm256_cvtph_ps(self.low_halves(v.1)),
                ),
                Floats(
                    _mm256_cvtph_ps(self.low_halves(_mm256_srli_epi32::<16>(v.0))),
                    _mm256_cvtph_ps(self.low_halves(_mm256_srli_epi32::<16>(v.1))),
                ),
            ]
        }
        fn byte_units(self, v: Integers) -> [Floats; 4] {
            // Flipping the top bit turns code - 128 into a signed byte.
            let flip = _mm256_set1_epi8(-128);
            let v = Integers(_mm256_xor_si256(v.0, flip), _mm256_xor_si256(v.1, flip));
            [field!(v, 24, 24), field!(v, 16, 24), field!(v, 8, 24), field!(v, 0, 24)]
        }
        fn nibble_units(self, v: Integers) -> [Floats; 8] {
            // As for bytes: code - 8 as a signed nibble.
            let flip = _mm256_set1_epi8(0x88u8 as i8);
            let v = Integers(_mm256_xor_si256(v.0, flip), _mm256_xor_si256(v.1, flip));
            [
                field!(v, 28, 28), field!(v, 24, 28), field!(v, 20, 28), field!(v, 16, 28),
                field!(v, 12, 28), field!(v, 8, 28), field!(v, 4, 28), field!(v, 0, 28),
            ]
        }

        fn splat_i(self, x: i32) -> Integers { Integers(_mm256_set1_epi32(x), _mm256_set1_epi32(x)) }
        fn to_f32(self, v: Integers) -> Floats { Floats(_mm256_cvtepi32_ps(v.0), _mm256_cvtepi32_ps(v.1)) }
        fn split_nibbles(self, v: Integers) -> [Integers; 2] {
            let mask = _mm256_set1_epi8(15);
            [
                Integers(_mm256_and_si256(v.0, mask), _mm256_and_si256(v.1, mask)),
                Integers(
                    _mm256_and_si256(_mm256_srli_epi32::<4>(v.0), mask),
                    _mm256_and_si256(_mm256_srli_epi32::<4>(v.1), mask),
                ),
            ]
        }
        fn with_high(self, low: Integers, high: Integers, shift: i32, mask: i32) -> Integers {
            let (shift, mask) = (_mm_cvtsi32_si128(shift), _mm256_set1_epi32(mask));
            let high = Integers(_mm256_srl_epi32(high.0, shift), _mm256_srl_epi32(high.1, shift));
            let high = Integers(_mm256_and_si256(high.0, mask), _mm256_and_si256(high.1, mask));
            Integers(
                _mm256_or_si256(low.0, _mm256_slli_epi32::<4>(high.0)),
                _mm256_or_si256(low.1, _mm256_slli_epi32::<4>(high.1)),
            )
        }
        fn lookup(self, levels: Integers, codes: Integers) -> Integers {
            Integers(_mm256_shuffle_epi8(levels.0, codes.0), _mm256_shuffle_epi8(levels.1, codes.1))
        }
        fn long_sums(self, acc: Integers, sums: Integers) -> Integers {
            Integers(self.madd(acc.0, sums.0), self.madd(acc.1, sums.1))
        }
        fn dot4_nibbles(self, sums: Integers, w: Integers, x: i32) -> Integers {
            if VNNI != WITHOUT {
                return self.dpbusd(sums, w, self.splat_i(x));
            }
            // At most 2 * 63 * 127 per pair: no saturation.
            let x = _mm256_set1_epi32(x);
            Integers(
                _mm256_add_epi16(sums.0, _mm256_maddubs_epi16(w.0, x)),
                _mm256_add_epi16(sums.1, _mm256_maddubs_epi16(w.1, x)),
            )
        }
        fn dot4_lanes(self, acc: Integers, w: Integers, x: Integers) -> Integers {
            if VNNI != WITHOUT {
                return self.dpbusd(acc, w, x);
            }
            let flip = _mm256_set1_epi8(-128);
            let w = Integers(_mm256_xor_si256(w.0, flip), _mm256_xor_si256(w.1, flip));
            Integers(
                self.madd(acc.0, self.signed_pairs(w.0, x.0)),
                self.madd(acc.1, self.signed_pairs(w.1, x.1)),
            )
        }

        fn state(self, before: Integers, word: Integers, end: usize) -> Integers {
            let end = end as i32;
            Integers(self.state_of(before.0, word.0, end), self.state_of(before.1, word.1, end))
        }
        fn add_i(self, a: Integers, b: Integers) -> Integers { Integers(_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1)) }
        fn mul_i(self, a: Integers, b: Integers) -> Integers {
            Integers(_mm256_mullo_epi32(a.0, b.0), _mm256_mullo_epi32(a.1, b.1))
        }
        fn mask_and_flip(self, v: Integers, mask: i32, flip: i32) -> Integers {
            let (mask, flip) = (_mm256_set1_epi32(mask), _mm256_set1_epi32(flip));
            Integers(
                _mm256_xor_si256(_mm256_and_si256(v.0, mask), flip),
                _mm256_xor_si256(_mm256_and_si256(v.1, mask), flip),
            )
        }
        fn round_f16(self, v: Floats) -> Floats {
            Floats(
                _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.0)),
                _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.1)),
            )
        }
        fn sum_fours(self, v: [Integers; 4]) -> Integers {
            let [a, b, c, d] = v;
            Integers(self.sum_fours_of(a.0, b.0, c.0, d.0), self.sum_fours_of(a.1, b.1, c.1, d.1))
        }
        fn transpose_fours(self, v: [Integers; 4]) -> [Integers; 4] {
            let [a, b, c, d] = v;
            let first = self.transpose_of(a.0, b.0, c.0, d.0);
            let second = self.transpose_of(a.1, b.1, c.1, d.1);
            [
                Integers(first[0], second[0]), Integers(first[1], second[1]),
                Integers(first[2], second[2]), Integers(first[3], second[3]),
            ]
        }
    }
}

impl<const VNNI: u8> SimdPairs for Avx2<VNNI> {
    instructions! {
        fn pairs(self, quads: Integers, centre: i16) -> [Integers; 2] {
            let (low, centre) = (_mm256_set1_epi16(0xff), _mm256_set1_epi16(centre));
            let even = Integers(_mm256_and_si256(quads.0, low), _mm256_and_si256(quads.1, low));
            let odd = Integers(_mm256_srli_epi16::<8>(quads.0), _mm256_srli_epi16::<8>(quads.1));
            [
                Integers(_mm256_sub_epi16(even.0, centre), _mm256_sub_epi16(even.1, centre)),
                Integers(_mm256_sub_epi16(odd.0, centre), _mm256_sub_epi16(odd.1, centre)),
            ]
        }
        fn dot2(self, acc: Integers, w: Integers, x: i32) -> Integers {
            let x = _mm256_set1_epi32(x);
            match VNNI {
                WITHOUT => Integers(
                    _mm256_add_epi32(acc.0, _mm256_madd_epi16(w.0, x)),
                    _mm256_add_epi32(acc.1, _mm256_madd_epi16(w.1, x)),
                ),
                VEX => Integers(
                    _mm256_dpwssd_avx_epi32(acc.0, w.0, x),
                    _mm256_dpwssd_avx_epi32(acc.1, w.1, x),
                ),
                _ => Integers(
                    _mm256_dpwssd_epi32(acc.0, w.0, x),
                    _mm256_dpwssd_epi32(acc.1, w.1, x),
                ),
            }
        }
    }
}
