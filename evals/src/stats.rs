//! Summaries of samples. Sums run in the order of the samples.

/// Arithmetic mean; 0 for no samples.
pub fn mean(samples: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = samples.fold((0.0, 0usize), |(s, n), v| (s + v, n + 1));
    if n == 0 { 0.0 } else { sum / n as f64 }
}

/// Mean and its standard error: the sample standard deviation over the root of the count.
/// With fewer than two samples, the error is 0.
pub(crate) fn mean_and_se(samples: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let m = mean(samples.clone());
    let (squares, n) = samples.fold((0.0, 0usize), |(s, n), v| (s + (v - m) * (v - m), n + 1));
    if n < 2 {
        return (m, 0.0);
    }
    (m, (squares / (n - 1) as f64 / n as f64).sqrt())
}

/// Sample standard deviation; 0 for fewer than two samples.
pub(crate) fn std_dev(samples: &[f64]) -> f64 {
    let (_, se) = mean_and_se(samples.iter().copied());
    se * (samples.len() as f64).sqrt()
}

/// The `q` quantile (0 to 1) of ascending samples, linear between neighbours, as computed by
/// `llama-perplexity` and numpy; 0 for no samples.
pub fn quantile(ascending: &[f64], q: f64) -> f64 {
    let Some(last) = ascending.len().checked_sub(1) else {
        return 0.0;
    };
    let at = q.clamp(0.0, 1.0) * last as f64;
    let below = at.floor() as usize;
    let above = (below + 1).min(last);
    ascending[below] + (at - below as f64) * (ascending[above] - ascending[below])
}

/// Sorts a copy ascending, by total order.
pub(crate) fn sorted(samples: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut v: Vec<f64> = samples.collect();
    v.sort_unstable_by(f64::total_cmp);
    v
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_linear_between_neighbours() {
        let v = sorted([4.0, 1.0, 3.0, 2.0, 5.0].into_iter());
        assert_eq!(quantile(&v, 0.0), 1.0);
        assert_eq!(quantile(&v, 0.5), 3.0);
        assert_eq!(quantile(&v, 0.9), 4.6);
        assert_eq!(quantile(&v, 1.0), 5.0);
        assert_eq!(quantile(&[7.0], 0.99), 7.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
        let hundred: Vec<f64> = (0..=1000).map(f64::from).collect();
        assert_eq!(quantile(&hundred, 0.999), 999.0);
    }

    #[test]
    fn standard_error_is_of_the_sample() {
        // Deviations -1.5, -.5, .5, 1.5: variance 5/3, error sqrt(5/12).
        let (m, se) = mean_and_se([1.0, 2.0, 3.0, 4.0].into_iter());
        assert_eq!(m, 2.5);
        assert!((se - (5f64 / 12.0).sqrt()).abs() < 1e-15);
        assert!((std_dev(&[1.0, 2.0, 3.0, 4.0]) - (5f64 / 3.0).sqrt()).abs() < 1e-15);
        assert_eq!(mean_and_se([3.0].into_iter()), (3.0, 0.0));
    }
}
