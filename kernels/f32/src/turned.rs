//! The order of a head's values in which rotation turns halves of the whole head.
//!
//! Where only a head's first values are turned, in halves of their own, queries and keys are computed in another
//! order: behind each half of those turned stands a half of the others, which are turned by nothing. Products of queries
//! and keys, and norms of heads, do not depend on the order.

use nq_model::ModelConfig;
use nq_runtime::images::SequenceImages;
use nq_runtime::rope::Rotary;

/// The order of the values of a head.
#[derive(Clone, Copy)]
pub struct Turned {
    dim: usize,
    rotary_dims: usize,
}

impl Turned {
    /// That of the heads of a model of shape `c`.
    pub fn new(c: &ModelConfig) -> Self {
        Turned {
            dim: c.head_dim,
            rotary_dims: c.rotary_dims(),
        }
    }

    /// Where value `i` of a head stands in weights.
    pub fn source(self, i: usize) -> usize {
        let (half, turned) = (self.dim / 2, self.rotary_dims / 2);
        let (upper, i) = (i / half, i % half);
        match i < turned {
            true => upper * turned + i,
            false => 2 * turned + upper * (half - turned) + i - turned,
        }
    }

    /// The values of whole heads in this order.
    pub fn apply(self, values: &[f32]) -> Vec<f32> {
        let heads = values.chunks_exact(self.dim);
        heads
            .flat_map(|head| (0..self.dim).map(move |i| head[self.source(i)]))
            .collect()
    }

    /// The values of whole heads in the order of weights, from those in this order.
    pub fn restore(self, values: &[f32]) -> Vec<f32> {
        let mut restored = vec![0.0; values.len()];
        let heads = restored.chunks_exact_mut(self.dim);
        for (to, from) in heads.zip(values.chunks_exact(self.dim)) {
            for (i, &value) in from.iter().enumerate() {
                to[self.source(i)] = value;
            }
        }
        restored
    }

    /// True if it is that of weights.
    pub(crate) fn is_weights(self) -> bool {
        (0..self.dim).all(|i| self.source(i) == i)
    }

    /// Pairs of cosine and sine for the first `positions` positions, `[positions, dim / 2]`.
    pub fn pairs(self, c: &ModelConfig, positions: usize) -> Vec<[f32; 2]> {
        self.still(&Rotary::new(c).pairs(positions))
    }

    /// Those for the first `tokens` tokens of a sequence with `images`.
    pub(crate) fn pairs_among(
        self,
        c: &ModelConfig,
        images: &SequenceImages,
        tokens: usize,
    ) -> Vec<[f32; 2]> {
        let rotary = Rotary::new(c);
        let mut row = vec![(0.0, 0.0); self.rotary_dims / 2];
        let mut table = Vec::with_capacity(tokens * row.len());
        for token in 0..tokens {
            rotary.row_at(images.coordinates(token), &mut row);
            table.extend(row.iter().map(|&pair| <[f32; 2]>::from(pair)));
        }
        self.still(&table)
    }

    /// The pairs of a rotary table `[.., rotary_dims / 2]`, and for what it leaves as it is such as turn nothing.
    fn still(self, table: &[[f32; 2]]) -> Vec<[f32; 2]> {
        let (half, turned) = (self.dim / 2, self.rotary_dims / 2);
        let rows = table.chunks_exact(turned.max(1));
        rows.flat_map(|row| {
            let still = std::iter::repeat_n([1.0, 0.0], half - turned);
            row.iter().copied().chain(still)
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Turned;

    #[test]
    fn halves_of_turned_values_face_each_other() {
        let order = |dim, rotary_dims| {
            let order = Turned { dim, rotary_dims };
            (0..dim).map(|i| order.source(i)).collect::<Vec<_>>()
        };
        assert_eq!(order(8, 8), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(order(8, 4), [0, 1, 4, 5, 2, 3, 6, 7]);
        let values: Vec<f32> = (0..16).map(|i| i as f32).collect();
        let order = Turned {
            dim: 8,
            rotary_dims: 4,
        };
        let expected = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15];
        assert_eq!(order.apply(&values), expected.map(|i| i as f32));
        assert_eq!(order.restore(&order.apply(&values)), values);
        assert!(!order.is_weights());
    }
}
