//! Stray tokens in training text, which the teacher would not have written.
//!
//! A student that only sees the teacher's own text learns to follow it there and nowhere else: in
//! text of another kind, an unusual token leads it further astray than the method's weights would go.
//! So some sequences get tokens drawn at random, one to three in a row. The teacher continues
//! from them as from its own, and its logits there are the target.

use nq_kernels::grad::UNKNOWN;
use nq_kernels::rng::Philox;
use serde::{Deserialize, Serialize};

/// How many tokens of the training text are stray.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Strays {
    /// Share of sequences that contain stray tokens.
    pub sequences: f32,
    /// Approximate share of stray tokens in those sequences.
    pub tokens: f32,
}

/// Most stray tokens in a row.
const LONGEST: u32 = 3;

impl Strays {
    /// The given tokens of a sequence of `length` tokens: `begin`, then stray
    /// tokens below `vocab`, and [`UNKNOWN`] wherever the teacher chooses.
    pub(crate) fn scatter(
        &self,
        begin: &[u32],
        length: usize,
        vocab: u32,
        mut rng: Philox,
    ) -> Vec<u32> {
        let mut ids = vec![UNKNOWN; length];
        let known = begin.len().min(length);
        ids[..known].copy_from_slice(&begin[..known]);
        if rng.uniform() >= self.sequences {
            return ids;
        }
        // A run has `(1 + LONGEST) / 2` tokens on average.
        let chance = 2.0 * self.tokens / (1 + LONGEST) as f32;
        let mut at = known;
        while at < length {
            if rng.uniform() >= chance {
                at += 1;
                continue;
            }
            let run = 1 + (rng.next_u32() % LONGEST) as usize;
            for id in ids[at..].iter_mut().take(run) {
                *id = rng.next_u32() % vocab;
            }
            at += run;
        }
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRAYS: Strays = Strays {
        sequences: 0.5,
        tokens: 0.1,
    };

    fn many(strays: Strays) -> Vec<Vec<u32>> {
        let one = |i| strays.scatter(&[7, 8, 9], 200, 1000, Philox::new(3, i));
        (0..400).map(one).collect()
    }

    fn given(ids: &[u32]) -> Vec<u32> {
        let given = |id: &&u32| **id != UNKNOWN;
        ids[3..].iter().filter(given).copied().collect()
    }

    #[test]
    fn shares_are_as_asked_for() {
        let all = many(STRAYS);
        assert!(
            all.iter()
                .all(|ids| ids.len() == 200 && ids[..3] == [7, 8, 9])
        );
        let strayed: Vec<usize> = all.iter().map(|ids| given(ids).len()).collect();
        let with = strayed.iter().filter(|&&n| n > 0).count();
        assert!((150..250).contains(&with), "{with} of 400");
        let share = strayed.iter().sum::<usize>() as f64 / (with * 197) as f64;
        assert!((0.08..0.12).contains(&share), "{share}");
        assert!(all.iter().all(|ids| given(ids).iter().all(|&t| t < 1000)));
        // The same seed and stream give the same tokens.
        assert_eq!(all, many(STRAYS));
    }

    #[test]
    fn none_is_none_and_long_beginnings_are_cut() {
        let none = Strays::default();
        assert!(many(none).iter().all(|ids| given(ids).is_empty()));
        let ids = STRAYS.scatter(&[1; 20], 10, 1000, Philox::new(0, 0));
        assert_eq!(ids, [1; 10]);
    }
}
