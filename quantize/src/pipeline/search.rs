//! Estimates how large a predicted loss may be for a limit to be kept, from earlier attempts.

/// The share of the limit to aim at: predictions are off by a few percent.
const AIM: f64 = 0.97;

/// A choice of schemes that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tried {
    /// The sum of its groups' predicted losses.
    pub(super) predicted: f64,
    /// Its measured divergence as a share of the limit: up to 1 it keeps the limit.
    pub(super) measured: f64,
    /// True if it was chosen in order to keep the limit.
    pub(super) aimed: bool,
}

/// The predicted loss at which the limit is expected to be just kept. Each choice that was meant to
/// keep it and did not adds to the margin. Between a choice that keeps the limit and one that does
/// not, the measured divergence is modelled as a power of the predicted loss; outside that range, as
/// proportional to it. `None` without a choice whose figures are finite.
pub(super) fn aim(tried: &[Tried]) -> Option<f64> {
    let usable = |t: &&Tried| t.predicted.is_finite() && t.measured.is_finite();
    let those = |holds: bool| {
        let alike = tried.iter().filter(usable);
        alike.filter(move |t| (t.measured <= 1.0) == holds)
    };
    // Compare predictions, which do not scatter as measurements do.
    let holding = those(true).max_by(|a, b| a.predicted.total_cmp(&b.predicted));
    let broken = those(false).min_by(|a, b| a.predicted.total_cmp(&b.predicted));
    let nearest = holding.or(broken)?;
    let missed = those(false).filter(|t| t.aimed).count();
    let share = AIM.powi(1 + missed as i32);
    let Some((a, b)) = holding
        .zip(broken)
        .filter(|(a, b)| a.predicted < b.predicted)
    else {
        return Some(nearest.predicted * share / nearest.measured.max(f64::MIN_POSITIVE));
    };
    let (from, to) = (a.measured.max(f64::MIN_POSITIVE).ln(), b.measured.ln());
    let part = ((share.ln() - from) / (to - from)).clamp(0.0, 1.0);
    let predicted = |t: &Tried| t.predicted.max(f64::MIN_POSITIVE).ln();
    Some((predicted(a) + part * (predicted(b) - predicted(a))).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(points: &[(f64, f64)]) -> Vec<Tried> {
        let tried = |&(predicted, measured)| Tried {
            predicted,
            measured,
            aimed: false,
        };
        points.iter().map(tried).collect()
    }

    #[test]
    fn one_choice_scales_the_prediction() {
        assert_eq!(aim(&[]), None);
        assert_eq!(aim(&tried(&[(0.02, f64::NAN)])), None);
        let aimed = aim(&tried(&[(0.03, 2.0)])).unwrap();
        assert!((aimed - 0.015 * AIM).abs() < 1e-12, "{aimed}");
        let aimed = aim(&tried(&[(0.01, 0.5)])).unwrap();
        assert!((aimed - 0.02 * AIM).abs() < 1e-12, "{aimed}");
        // Of choices that miss the limit, the nearest counts; one that aimed at it adds to the margin.
        let mut points = tried(&[(0.03, 2.0), (0.02, 1.1), (0.05, 3.0)]);
        let aimed = aim(&points).unwrap();
        assert!((aimed - 0.02 * AIM / 1.1).abs() < 1e-12, "{aimed}");
        points[1].aimed = true;
        let aimed = aim(&points).unwrap();
        assert!((aimed - 0.02 * AIM.powi(2) / 1.1).abs() < 1e-12, "{aimed}");
        assert!(aim(&tried(&[(0.03, 0.0)])).unwrap() > 1.0);
    }

    #[test]
    fn two_choices_bound_it() {
        let points = tried(&[(0.01, 0.8), (0.012, 1.1), (0.03, 2.0)]);
        let aimed = aim(&points).unwrap();
        assert!(aimed > 0.01 && aimed < 0.012, "{aimed}");
        // If measurements are a power of predictions, the aim is exact.
        let law = |p: f64| 40.0 * p.powf(0.8);
        let points = tried(&[(0.0065, law(0.0065)), (0.011, law(0.011))]);
        assert!((law(aim(&points).unwrap()) - AIM).abs() < 1e-9);
        // There is nothing to gain between them.
        assert!((aim(&tried(&[(0.01, 0.99), (0.012, 1.1)])).unwrap() - 0.01).abs() < 1e-12);
        // A measurement that scatters does not widen the bounds again.
        let points = tried(&[(0.01, 0.8), (0.011, 1.2), (0.012, 1.1), (0.03, 2.0)]);
        let aimed = aim(&points).unwrap();
        assert!(aimed > 0.01 && aimed < 0.011, "{aimed}");
        // If they are out of order, one choice says nothing about the other.
        let aimed = aim(&tried(&[(0.02, 0.5), (0.01, 1.1)])).unwrap();
        assert!((aimed - 0.04 * AIM).abs() < 1e-12, "{aimed}");
    }

    /// Runs the search like the pipeline, with measurements that differ from predictions by a fifth.
    #[test]
    fn a_search_ends_close_to_the_limit_in_few_attempts() {
        for (factor, power) in [(1.2, 1.0), (0.8, 1.0), (3.0, 1.2), (0.5, 0.85)] {
            let measure = |p: f64| factor * p.powf(power);
            let mut points = tried(&[(3.0, measure(3.0))]);
            for _ in 0..4 {
                let predicted = aim(&points).unwrap();
                let measured = measure(predicted);
                points.push(Tried {
                    predicted,
                    measured,
                    aimed: true,
                });
            }
            let held = points.iter().map(|t| t.measured).filter(|m| *m <= 1.0);
            let best = held.fold(0.0, f64::max);
            assert!(best > 0.93, "{factor} {power}: {points:?}");
        }
    }
}
