//! Log-softmax statistics of a row of logits, in f64.
//!
//! The loops keep 8 independent accumulators and use an exponential made of plain
//! arithmetic, so that the compiler vectorizes them on every target. Lanes are added in a fixed
//! order, so that the result for a row depends on that row alone.

/// Number of independent accumulators in a loop.
const LANES: usize = 8;

/// `e^x` for `x <= 0`, within 2 units in the last place; below -700 it returns `e^-700`
/// (1e-304), which does not affect any sum of probabilities.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; `e^r` by its Taylor series to degree 12, whose
/// remainder is below 2e-16; `2^n` is added to the exponent's bits.
#[inline(always)]
fn exp_nonpositive(x: f64) -> f64 {
    // 1.5 * 2^52: adding it rounds to the nearest integer, left in the low mantissa bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    const LN2_HI: f64 = 6.931_471_803_691_238e-1; // low 32 bits are zero: n * LN2_HI is exact
    const LN2_LO: f64 = 1.908_214_929_270_587_7e-10;
    const C: [f64; 13] = [
        1.0,
        1.0,
        1.0 / 2.0,
        1.0 / 6.0,
        1.0 / 24.0,
        1.0 / 120.0,
        1.0 / 720.0,
        1.0 / 5_040.0,
        1.0 / 40_320.0,
        1.0 / 362_880.0,
        1.0 / 3_628_800.0,
        1.0 / 39_916_800.0,
        1.0 / 479_001_600.0,
    ];
    let x = if x > -700.0 { x } else { -700.0 };
    let t = x * std::f64::consts::LOG2_E + ROUND;
    let n = t - ROUND;
    let r = (x - n * LN2_HI) - n * LN2_LO;
    let mut p = C[12];
    for c in C[..12].iter().rev() {
        p = p * r + c;
    }
    f64::from_bits(p.to_bits().wrapping_add(t.to_bits() << 52))
}

/// Adds lanes in a fixed order.
fn total(lanes: [f64; LANES]) -> f64 {
    lanes.iter().sum()
}

/// The greatest logit and its index (the first of equal ones); `None` if a
/// logit is NaN or infinite.
pub(crate) fn peak(row: &[f32]) -> Option<(usize, f32)> {
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut bad = [0f32; LANES];
    let (body, tail) = row.as_chunks::<LANES>();
    for chunk in body {
        for l in 0..LANES {
            max[l] = if chunk[l] > max[l] { chunk[l] } else { max[l] };
            bad[l] += chunk[l] * 0.0; // 0, or NaN from NaN and infinities
        }
    }
    for &v in tail {
        max[0] = if v > max[0] { v } else { max[0] };
        bad[0] += v * 0.0;
    }
    if bad.iter().sum::<f32>() != 0.0 || row.is_empty() {
        return None;
    }
    let max = max.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
    Some((row.iter().position(|&v| v == max)?, max))
}

/// `ln(sum(e^row))` of a row whose greatest logit is `max`.
pub(crate) fn log_sum_exp(row: &[f32], max: f32) -> f64 {
    let max = f64::from(max);
    let mut sum = [0f64; LANES];
    let (body, tail) = row.as_chunks::<LANES>();
    for chunk in body {
        for l in 0..LANES {
            sum[l] += exp_nonpositive(f64::from(chunk[l]) - max);
        }
    }
    for &v in tail {
        sum[0] += exp_nonpositive(f64::from(v) - max);
    }
    max + total(sum).ln()
}

/// The result of [`divergence`] for a pair of rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Divergence {
    /// `KL(softmax(reference) || softmax(model))` in nats.
    pub kld: f64,
    /// `ln(sum(e^model))`.
    pub model_lse: f64,
    /// `ln(sum(e^reference))`.
    pub reference_lse: f64,
}

/// KL divergence of two rows of logits of the same length, given their greatest values:
/// `sum(p (x - y)) - lse(x) + lse(y)`, with `p = softmax(x)`, the reference's logits `x`
/// and the model's `y`.
///
/// # Panics
/// If the rows differ in length.
pub(crate) fn divergence(
    model: &[f32],
    model_max: f32,
    reference: &[f32],
    reference_max: f32,
) -> Divergence {
    assert_eq!(model.len(), reference.len());
    let (my, mx) = (f64::from(model_max), f64::from(reference_max));
    let mut sum_y = [0f64; LANES];
    let mut sum_x = [0f64; LANES];
    let mut cross = [0f64; LANES]; // e^(x - mx) * ((x - mx) - (y - my))
    let (ys, y_tail) = model.as_chunks::<LANES>();
    let (xs, x_tail) = reference.as_chunks::<LANES>();
    for (y, x) in ys.iter().zip(xs) {
        for l in 0..LANES {
            let (dy, dx) = (f64::from(y[l]) - my, f64::from(x[l]) - mx);
            let ex = exp_nonpositive(dx);
            sum_y[l] += exp_nonpositive(dy);
            sum_x[l] += ex;
            cross[l] += ex * (dx - dy);
        }
    }
    for (&y, &x) in y_tail.iter().zip(x_tail) {
        let (dy, dx) = (f64::from(y) - my, f64::from(x) - mx);
        let ex = exp_nonpositive(dx);
        sum_y[0] += exp_nonpositive(dy);
        sum_x[0] += ex;
        cross[0] += ex * (dx - dy);
    }
    let (sum_y, sum_x) = (total(sum_y), total(sum_x));
    Divergence {
        // Differences are taken relative to the maxima, so the cross term is small if the
        // distributions are close, and little is lost to cancellation.
        kld: total(cross) / sum_x - sum_x.ln() + sum_y.ln(),
        model_lse: my + sum_y.ln(),
        reference_lse: mx + sum_x.ln(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_kernels::rng::Philox;

    #[test]
    fn exponential_is_within_two_ulps() {
        let mut worst = 0f64;
        for i in 0..=700_000 {
            let x = -f64::from(i) / 1000.0;
            let exact = x.exp();
            worst = worst.max((exp_nonpositive(x) - exact).abs() / exact);
        }
        assert!(worst <= 2.0 * f64::EPSILON, "relative error {worst:e}");
        assert_eq!(exp_nonpositive(0.0), 1.0);
        assert!(exp_nonpositive(-1e9) < 1e-300);
    }

    fn random_row(n: usize, stream: u64, scale: f32) -> Vec<f32> {
        let mut rng = Philox::new(7, stream);
        (0..n).map(|_| scale * rng.normal()).collect()
    }

    #[test]
    fn peak_finds_the_first_of_equals_and_refuses_what_is_not_finite() {
        for n in [1, 7, 8, 9, 37] {
            let mut row = random_row(n, n as u64, 3.0);
            let at = n / 2;
            row[at] = 100.0;
            row[n - 1] = 100.0;
            assert_eq!(peak(&row), Some((at, 100.0)), "n {n}");
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut row = row.clone();
                row[n - 1] = bad;
                assert_eq!(peak(&row), None, "n {n}, {bad}");
            }
        }
        assert_eq!(peak(&[]), None);
    }

    /// Compared with the definition, term by term with the standard library.
    #[test]
    fn divergence_equals_the_definition() {
        for n in [2usize, 8, 13, 1000] {
            for scale in [0.01f32, 1.0, 8.0] {
                let x = random_row(n, 1, scale);
                let noise = random_row(n, 2, 0.3 * scale);
                let y: Vec<f32> = x.iter().zip(&noise).map(|(a, b)| a + b + 5.0).collect();
                let log_softmax = |row: &[f32]| -> Vec<f64> {
                    let max = row.iter().fold(f64::MIN, |m, &v| m.max(f64::from(v)));
                    let sum: f64 = row.iter().map(|&v| (f64::from(v) - max).exp()).sum();
                    row.iter().map(|&v| f64::from(v) - max - sum.ln()).collect()
                };
                let (p, q) = (log_softmax(&x), log_softmax(&y));
                let expected: f64 = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
                let (_, mx) = peak(&x).unwrap();
                let (_, my) = peak(&y).unwrap();
                let got = divergence(&y, my, &x, mx);
                assert!(
                    (got.kld - expected).abs() <= 1e-12,
                    "n {n}, scale {scale}: expected {expected}, found {}",
                    got.kld
                );
                assert!((got.reference_lse - log_sum_exp(&x, mx)).abs() < 1e-13);
                assert!((got.model_lse - log_sum_exp(&y, my)).abs() < 1e-13);
                assert!((f64::from(x[0]) - got.reference_lse - p[0]).abs() < 1e-12);
            }
        }
    }

    /// Two distributions small enough to work out by hand: p = (1/2, 1/2), q = (1/4, 3/4)
    /// give 1/2 ln 2 + 1/2 ln(2/3).
    #[test]
    fn divergence_by_hand() {
        let p = [0f32, 0.0];
        let q = [0f32, 3f32.ln()];
        let expected = 0.5 * 2f64.ln() + 0.5 * (2f64 / 3.0).ln();
        let d = divergence(&q, q[1], &p, 0.0);
        assert!((d.kld - expected).abs() < 1e-7, "{} {expected}", d.kld);
        assert_eq!(divergence(&p, 0.0, &p, 0.0).kld, 0.0);
    }
}
