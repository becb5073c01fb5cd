//! Functions that compile to vector instructions in a loop: no calls, no branches.

/// 1.5 * 2^23: adding it to a value below 2^22 leaves no bits for fractions.
const INTEGERS: f32 = 12_582_912.0;

/// The nearest integer, ties to even, for magnitudes below 2^22.
#[inline(always)]
pub fn nearest(x: f32) -> f32 {
    (x + INTEGERS) - INTEGERS
}

/// Factors of the powers of x in the series of e^x, from the sixth to the first, and its 1; before them comes 1 / 7!.
#[rustfmt::skip]
pub const EXP_TERMS: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// `e^x` within 2 units in the last place for x between -87 and 88; zero below, `e^88` above.
///
/// Range reduction to `|r| <= ln(2) / 2` and the Taylor series to degree 7.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // ln 2 in two parts, the first short enough for its products with small integers to be exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = clamped * std::f32::consts::LOG2_E + INTEGERS;
    let n = shifted - INTEGERS;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    for c in EXP_TERMS {
        p = p * r + c;
    }
    let exponent = shifted
        .to_bits()
        .wrapping_sub(INTEGERS.to_bits())
        .wrapping_add(127);
    let scaled = p * f32::from_bits(exponent << 23);
    if x < -87.0 { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate() {
        let mut worst = 0.0f64;
        for i in -870_000..=880_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / exact - 1.0).abs());
        }
        assert!(worst < 2.5e-7, "{worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-87.5), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), exp(88.0));
    }

    #[test]
    fn nearest_rounds_ties_to_even() {
        for x in [-2.5f32, -1.5, -0.5, 0.5, 1.5, 2.5, 3.49, -127.51, 255.0] {
            assert_eq!(nearest(x), x.round_ties_even());
        }
    }
}
