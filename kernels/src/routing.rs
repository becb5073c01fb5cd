//! The experts of a mixture that each row is routed to.

use nq_model::Experts;

/// The experts of each row of a forward, and the factors of their outputs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    per_token: usize,
    /// `[rows, per_token]`: expert and weight, each row's in ascending order of experts.
    chosen: Vec<(u32, f32)>,
}

impl Routes {
    /// Chooses experts from the router's scores `logits` `[rows, experts.count]`: for each row the
    /// `experts.per_token` greatest, of equal ones those with lower numbers. Weights are the softmax over
    /// all experts, in f32, divided by the sum of the chosen ones if `experts.normalized`.
    pub fn new(logits: &[f32], experts: &Experts) -> Self {
        let k = experts.per_token;
        let mut chosen = Vec::with_capacity(logits.len() / experts.count.max(1) * k);
        let mut order: Vec<u32> = Vec::new();
        for row in logits.chunks_exact(experts.count.max(1)) {
            order.clear();
            order.extend(0..row.len() as u32);
            // A stable sort, so that equal scores stay in order.
            order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
            let best = &mut order[..k];
            let max = row[best[0] as usize];
            let weight = |e: u32| (row[e as usize] - max).exp();
            let sum: f32 = if experts.normalized {
                best.iter().map(|&e| weight(e)).sum()
            } else {
                row.iter().map(|&score| (score - max).exp()).sum()
            };
            best.sort_unstable();
            chosen.extend(best.iter().map(|&e| (e, weight(e) / sum)));
        }
        Routes {
            per_token: k,
            chosen,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.chosen.len() / self.per_token.max(1)
    }

    /// The experts of row `row` and their weights, in ascending order.
    pub fn of(&self, row: usize) -> &[(u32, f32)] {
        &self.chosen[row * self.per_token..][..self.per_token]
    }

    /// For each expert with rows, in ascending order: its rows and their weights.
    pub fn by_expert(&self) -> Vec<(usize, Vec<(usize, f32)>)> {
        let mut all: Vec<(u32, usize, f32)> = Vec::with_capacity(self.chosen.len());
        for row in 0..self.rows() {
            all.extend(
                self.of(row)
                    .iter()
                    .map(|&(expert, weight)| (expert, row, weight)),
            );
        }
        all.sort_unstable_by_key(|&(expert, row, _)| (expert, row));
        let groups = all.chunk_by(|a, b| a.0 == b.0);
        let group = |g: &[(u32, usize, f32)]| {
            let rows = g.iter().map(|&(_, row, weight)| (row, weight)).collect();
            (g[0].0 as usize, rows)
        };
        groups.map(group).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experts(count: usize, per_token: usize, normalized: bool) -> Experts {
        Experts {
            count,
            per_token,
            width: 8,
            normalized,
            shared: 0,
        }
    }

    #[test]
    fn weights_are_a_softmax_over_all_or_over_those_chosen() {
        let logits = [0.0, 3f32.ln(), 2f32.ln(), 2f32.ln()];
        let close = |found: &[(u32, f32)], expected: &[(u32, f32)]| {
            assert_eq!(found.len(), expected.len());
            for (f, e) in found.iter().zip(expected) {
                assert!(f.0 == e.0 && (f.1 - e.1).abs() < 1e-6, "{found:?}");
            }
        };
        let routes = |k, normalized| Routes::new(&logits, &experts(4, k, normalized));
        close(routes(1, true).of(0), &[(1, 1.0)]);
        close(routes(1, false).of(0), &[(1, 3.0 / 8.0)]);
        // Of two equal ones, the lower.
        close(routes(2, true).of(0), &[(1, 0.6), (2, 0.4)]);
        close(routes(2, false).of(0), &[(1, 3.0 / 8.0), (2, 2.0 / 8.0)]);
        let all: f32 = routes(4, false).of(0).iter().map(|r| r.1).sum();
        assert!((all - 1.0).abs() < 1e-6);
    }

    #[test]
    fn rows_are_grouped_by_expert() {
        let logits = [5.0, 1.0, 3.0, 0.0, 7.0, 6.0, 9.0, 2.0, 8.0];
        let routes = Routes::new(&logits, &experts(3, 2, true));
        assert_eq!(routes.rows(), 3);
        let groups: Vec<(usize, Vec<usize>)> = (routes.by_expert().into_iter())
            .map(|(e, rows)| (e, rows.into_iter().map(|r| r.0).collect()))
            .collect();
        assert_eq!(groups, [(0, vec![0, 2]), (1, vec![1]), (2, vec![0, 1, 2])]);
    }

    /// The output is NaN too, which the forward reports.
    #[test]
    fn scores_that_are_no_numbers_choose_some_expert() {
        for bad in [f32::NAN, f32::INFINITY] {
            let routes = Routes::new(&[0.0, bad, 1.0], &experts(3, 2, true));
            assert!(routes.of(0).iter().any(|r| !r.1.is_finite()));
        }
    }
}
