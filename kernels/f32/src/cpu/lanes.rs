//! Sums in independent lanes, and functions without calls or branches: loops over them become vector
//! instructions.

use nq_kernels::math::exp;

/// Lanes of a sum.
const LANES: usize = 16;

/// The logistic function.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Values and zeros in the place of those that are missing, and how many there are.
#[inline(always)]
fn padded(rest: &[f32]) -> ([f32; LANES], usize) {
    let mut values = [0.0; LANES];
    values[..rest.len()].copy_from_slice(rest);
    (values, rest.len())
}

/// Sum of `f(x)`.
#[inline(always)]
pub(super) fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f64 {
    sum3(x, x, x, |x, _, _| f(x))
}

/// Sum of `f(x, y)` over pairs.
#[inline(always)]
pub(super) fn sum2(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> f64 {
    sum3(x, y, y, |x, y, _| f(x, y))
}

/// Sum of `f(x, y, z)` over triples.
#[inline(always)]
pub(super) fn sum3(x: &[f32], y: &[f32], z: &[f32], f: impl Fn(f32, f32, f32) -> f32) -> f64 {
    let mut lanes = [0f64; LANES];
    let ((xs, x), (ys, y)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let (zs, z) = z.as_chunks::<LANES>();
    for ((x, y), z) in xs.iter().zip(ys).zip(zs) {
        for l in 0..LANES {
            lanes[l] += f64::from(f(x[l], y[l], z[l]));
        }
    }
    let ((x, n), (y, _), (z, _)) = (padded(x), padded(y), padded(z));
    for l in 0..LANES {
        let value = f64::from(f(x[l], y[l], z[l]));
        lanes[l] += if l < n { value } else { 0.0 };
    }
    lanes.iter().sum()
}

/// Dot product.
#[inline(always)]
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let ((xs, x), (ys, y)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        for l in 0..LANES {
            lanes[l] += x[l] * y[l];
        }
    }
    let rest = x.iter().zip(y).map(|(x, y)| x * y);
    lanes.iter().sum::<f32>() + rest.sum::<f32>()
}

#[inline(always)]
fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The greatest value; negative infinity of none.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for x in whole {
        for l in 0..LANES {
            lanes[l] = greater(x[l], lanes[l]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = greater(x, *lane);
    }
    let mut most = f32::NEG_INFINITY;
    for lane in lanes {
        most = greater(lane, most);
    }
    most
}

/// `ln(sum(exp(x)))`.
#[inline(always)]
pub(super) fn log_sum_exp(x: &[f32]) -> f32 {
    let max = max(x);
    max + sum(x, |v| exp(v - max)).ln() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_maxima_are_those_of_loops() {
        let values: Vec<f32> = (0..77).map(|i| ((i * 37) % 29) as f32 - 11.5).collect();
        for n in [0, 1, 15, 16, 17, 64, 77] {
            let x = &values[..n];
            let (squares, last) = (sum2(x, x, |a, b| a * b), max(x));
            let expected: f32 = x.iter().map(|x| x * x).sum();
            assert!((squares - f64::from(expected)).abs() < 1e-3);
            let expected = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(last, expected);
        }
        assert_eq!(max(&[f32::NEG_INFINITY; 20]), f32::NEG_INFINITY);
    }
}
