//! Trellis codes: a sequence of weights is a path through a graph of states, and rounding it is the search for the path
//! whose values are nearest (QTIP, arXiv 2406.11235). This is the reference on the host; `docs/trellis.md` has the
//! measurements behind its choices.
//!
//! A state is the last 16 bits of a stream. A step shifts new bits in and gives one or two values, which are linear in
//! the four bytes of the state times a constant. The stream of a sequence is cyclic: the bits before its first step are
//! its last, so a sequence is decoded without its neighbours and costs no bit more than its weights'.

use crate::error::{Error, Result};
use rayon::prelude::*;
use std::f32::consts::FRAC_1_SQRT_2;

/// Weights of a sequence.
pub(crate) const SEQUENCE: usize = 128;
const STATE_BITS: u32 = 16;
const STATES: usize = 1 << STATE_BITS;

/// How a state's values follow from the four bytes `b` of its product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// One value a step: `b0 + b1 + b2 + b3`, less its mean.
    Sum,
    /// Two values a step: `b0 + (b1 - b3) / sqrt 2` and `b2 + (b1 + b3) / sqrt 2`, less their means.
    Octagon,
}

impl Code {
    /// Values of a step.
    pub fn width(self) -> usize {
        match self {
            Code::Sum => 1,
            Code::Octagon => 2,
        }
    }

    /// The constant that states are multiplied by, modulo 2^32.
    pub fn multiplier(self) -> u32 {
        match self {
            Code::Sum => 0xD17F_17D3,
            Code::Octagon => 0xAD1B_72DB,
        }
    }

    /// The values of a state; the second is 0 if a step has one.
    pub fn values(self, state: u16) -> [f32; 2] {
        let [b0, b1, b2, b3] = u32::from(state)
            .wrapping_mul(self.multiplier())
            .to_le_bytes()
            .map(|b| f32::from(b) - 127.5);
        match self {
            Code::Sum => [b0 + b1 + b2 + b3, 0.0],
            Code::Octagon => [
                b0 + FRAC_1_SQRT_2 * (b1 - b3),
                b2 + FRAC_1_SQRT_2 * (b1 + b3),
            ],
        }
    }

    /// Bits that a step can read, with the standard deviation of the values that rounds Gaussians of variance 1 with
    /// the least error.
    fn steps(self) -> &'static [(u32, f32)] {
        match self {
            Code::Sum => &[(2, 0.98), (3, 1.08), (4, 1.08), (5, 1.13), (6, 1.13)],
            Code::Octagon => &[
                (4, 1.02),
                (5, 1.09),
                (6, 1.09),
                (7, 1.16),
                (8, 1.16),
                (10, 1.23),
            ],
        }
    }
}

/// A code at a number of bits a step, with the values of all its states.
#[derive(Clone, Debug)]
pub struct Trellis {
    code: Code,
    step_bits: u32,
    /// The values of each place in a step, by state.
    values: Vec<Vec<f32>>,
    unit: f32,
}

impl Trellis {
    /// The trellis of `code` whose steps read `step_bits` bits.
    ///
    /// # Errors
    /// [`Error::Request`] if the code has no such steps.
    pub fn new(code: Code, step_bits: u32) -> Result<Self> {
        let steps = code.steps();
        let &(_, deviation) =
            (steps.iter().find(|s| s.0 == step_bits)).ok_or_else(|| Error::Request {
                what: "bits of a trellis code's step",
                expected: format!("one of {:?}", steps.iter().map(|s| s.0).collect::<Vec<_>>()),
                found: step_bits.to_string(),
            })?;
        let states = 0..=u16::MAX;
        let place = |k: usize| states.clone().map(|s| code.values(s)[k]).collect();
        let values: Vec<Vec<f32>> = (0..code.width()).map(place).collect();
        let squares = values.iter().flatten().map(|&v| f64::from(v).powi(2));
        let variance = squares.sum::<f64>() / (STATES * code.width()) as f64;
        Ok(Trellis {
            code,
            step_bits,
            values,
            unit: (f64::from(deviation) / variance.sqrt()) as f32,
        })
    }

    /// Bits of a weight.
    pub fn bits(&self) -> f32 {
        self.step_bits as f32 / self.code.width() as f32
    }

    /// Words of a sequence.
    pub fn words(&self) -> usize {
        self.steps() * self.step_bits as usize / 32
    }

    /// The scale for Gaussian weights of variance 1.
    pub fn unit(&self) -> f32 {
        self.unit
    }

    fn steps(&self) -> usize {
        SEQUENCE / self.code.width()
    }

    /// States with the same low bits, a tail, have the same successors.
    fn tails(&self) -> usize {
        STATES >> self.step_bits
    }

    /// Writes the weights of whole sequences, `scale` times the values of their states. The first bit of a sequence is
    /// the highest of its first word.
    ///
    /// # Panics
    /// If `words` and `weights` are not those of the same number of sequences.
    pub fn decode(&self, words: &[u32], scale: f32, weights: &mut [f32]) {
        self.assert_sequences(weights.len(), words.len());
        let sequences = weights.chunks_exact_mut(SEQUENCE);
        for (words, weights) in words.chunks_exact(self.words()).zip(sequences) {
            let steps = weights.chunks_exact_mut(self.code.width());
            for (step, out) in steps.enumerate() {
                let state = state(words, (step + 1) * self.step_bits as usize);
                for (out, v) in out.iter_mut().zip(self.code.values(state)) {
                    *out = scale * v;
                }
            }
        }
    }

    /// Rounds whole sequences: writes the words whose weights, at `scale`, have about the least squared error.
    ///
    /// # Panics
    /// If `words` and `weights` are not those of the same number of sequences, or `scale` is not positive.
    pub fn encode(&self, weights: &[f32], scale: f32, words: &mut [u32]) {
        self.assert_sequences(weights.len(), words.len());
        assert!(scale > 0.0, "scale {scale} of a trellis code");
        let sequences = weights.par_chunks_exact(SEQUENCE);
        let words = words.par_chunks_exact_mut(self.words());
        sequences
            .zip(words)
            .for_each_init(Search::default, |search, (weights, words)| {
                let targets: Vec<f32> = weights.iter().map(|w| w / scale).collect();
                let states = search.cyclic(self, &targets);
                words.fill(0);
                for (step, state) in states.iter().enumerate() {
                    put(words, step, self.step_bits, *state);
                }
            });
    }

    fn assert_sequences(&self, weights: usize, words: usize) {
        assert!(
            weights.is_multiple_of(SEQUENCE) && weights / SEQUENCE * self.words() == words,
            "{words} words of {weights} weights, expected {} for each {SEQUENCE}",
            self.words()
        );
    }
}

/// The 16 bits that end before bit `end` of a cyclic stream.
fn state(words: &[u32], end: usize) -> u16 {
    let word = (end - 1) / 32;
    let before = words[(word + words.len() - 1) % words.len()];
    let both = u64::from(before) << 32 | u64::from(words[word]);
    (both >> (32 * (word + 1) - end)) as u16
}

/// Writes the newest bits of `state`, those of step `step`, into words that are zero there.
fn put(words: &mut [u32], step: usize, step_bits: u32, state: u16) {
    let bits = u64::from(state) & ((1 << step_bits) - 1);
    let at = step * step_bits as usize;
    let both = bits << (64 - at % 32 - step_bits as usize);
    words[at / 32] |= (both >> 32) as u32;
    if let Some(next) = words.get_mut(at / 32 + 1) {
        *next |= both as u32;
    }
}

/// The search for the nearest path (Viterbi's), and its memory.
#[derive(Default)]
struct Search {
    /// The least cost of a path that ends in each tail, before and after a step.
    costs: Vec<f32>,
    next: Vec<f32>,
    /// The high bits of the best state with each tail, while a step is looked at.
    best: Vec<u32>,
    /// Those of all steps.
    back: Vec<u16>,
    states: Vec<u16>,
}

impl Search {
    /// The states of a cyclic path near `targets`, in units of the values. A first pass begins and ends in the middle
    /// of the sequence and settles its seam, a second one keeps to that.
    fn cyclic(&mut self, trellis: &Trellis, targets: &[f32]) -> &[u16] {
        let steps = trellis.steps();
        self.pass(trellis, targets, steps / 2, None);
        // The last step is where the first half of this pass ends.
        let seam = usize::from(self.states[steps - steps / 2 - 1]) & (trellis.tails() - 1);
        self.pass(trellis, targets, 0, Some(seam));
        &self.states
    }

    /// The best states of all steps from step `first` on, around the cycle; with a seam, of the paths from that tail to
    /// that tail.
    fn pass(&mut self, trellis: &Trellis, targets: &[f32], first: usize, seam: Option<usize>) {
        let (steps, tails, bits) = (trellis.steps(), trellis.tails(), trellis.step_bits);
        let width = trellis.code.width();
        self.costs.clear();
        let cost = |tail| match seam {
            Some(seam) if tail != seam => f32::INFINITY,
            _ => 0.0,
        };
        self.costs.extend((0..tails).map(cost));
        self.back.clear();
        for step in (first..steps).chain(0..first) {
            let target = &targets[step * width..(step + 1) * width];
            self.next.clear();
            self.next.resize(tails, f32::INFINITY);
            self.best.clear();
            self.best.resize(tails, 0);
            // States in a run come from the same tail.
            let run = tails.min(1 << bits);
            for high in 0..1 << bits {
                let runs = self
                    .next
                    .chunks_exact_mut(run)
                    .zip(self.best.chunks_exact_mut(run));
                for (i, (next, best)) in runs.enumerate() {
                    let from = high * tails + i * run;
                    let before = self.costs[from >> bits];
                    let values = |k: usize| &trellis.values[k][from..from + run];
                    match *target {
                        [x] => {
                            let error = values(0).iter().map(|v| (x - v) * (x - v));
                            keep(next, best, high as u32, error.map(|e| before + e));
                        }
                        _ => {
                            let (x, y) = (target[0], target[1]);
                            let both = values(0).iter().zip(values(1));
                            let error = both.map(|(v, w)| (x - v) * (x - v) + (y - w) * (y - w));
                            keep(next, best, high as u32, error.map(|e| before + e));
                        }
                    }
                }
            }
            self.back.extend(self.best.iter().map(|&h| h as u16));
            std::mem::swap(&mut self.costs, &mut self.next);
        }
        let least = |costs: &[f32]| {
            let order = costs.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1));
            order.map_or(0, |(tail, _)| tail)
        };
        let mut tail = seam.unwrap_or_else(|| least(&self.costs));
        self.states.clear();
        for back in self.back.chunks_exact(tails).rev() {
            let state = usize::from(back[tail]) * tails + tail;
            self.states.push(state as u16);
            tail = state >> bits;
        }
        self.states.reverse();
    }
}

/// Keeps the costs that are less than those of `next`, and where they come from. Without a branch, so that compilers
/// make vectors of it.
#[inline(always)]
fn keep(next: &mut [f32], best: &mut [u32], high: u32, costs: impl Iterator<Item = f32>) {
    for ((next, best), cost) in next.iter_mut().zip(best).zip(costs) {
        let less = cost < *next;
        *next = if less { cost } else { *next };
        *best = if less { high } else { *best };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Trellis> {
        let codes = [Code::Sum, Code::Octagon].into_iter();
        codes.flat_map(|code| {
            let steps = code.steps().iter();
            steps.map(move |&(bits, _)| Trellis::new(code, bits).unwrap())
        })
    }

    /// Uniform random words.
    fn random(n: usize, seed: u64) -> Vec<u32> {
        let mut state = seed;
        let next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 32) as u32
        };
        std::iter::repeat_with(next).take(n).collect()
    }

    fn gaussians(n: usize, seed: u64) -> Vec<f32> {
        let unit = |w: u32| (f64::from(w) + 0.5) / 4_294_967_296.0;
        let pair = |w: &[u32]| {
            let (radius, angle) = (
                (-2.0 * unit(w[0]).ln()).sqrt(),
                std::f64::consts::TAU * unit(w[1]),
            );
            [(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]
        };
        random(n, seed).chunks_exact(2).flat_map(pair).collect()
    }

    #[test]
    fn values_by_hand() {
        // 1 * 0xD17F17D3: bytes D3, 17, 7F, D1.
        assert_eq!(
            Code::Sum.values(1),
            [f32::from(0xD3u16 + 0x17 + 0x7F + 0xD1) - 510.0, 0.0]
        );
        assert_eq!(Code::Sum.values(0), [-510.0, 0.0]);
        // 1 * 0xAD1B72DB: bytes DB, 72, 1B, AD.
        let [a, b] = Code::Octagon.values(1);
        let (root, middle) = (0.5f32.sqrt(), 127.5);
        assert!((a - (219.0 - middle + root * (114.0 - 173.0))).abs() < 1e-4);
        assert!((b - (27.0 - middle + root * (114.0 + 173.0 - 255.0))).abs() < 1e-4);
    }

    #[test]
    fn streams_are_cyclic() {
        let trellis = Trellis::new(Code::Sum, 3).unwrap();
        assert_eq!((trellis.words(), trellis.bits()), (12, 3.0));
        let mut words = vec![0; 12];
        words[11] = 0xABCD;
        words[0] = 0b101 << 29;
        let mut weights = vec![0.0; SEQUENCE];
        trellis.decode(&words, 2.0, &mut weights);
        // The first state has the last 13 bits of the stream, then its own three.
        let first = (0xABCDu32 << 3 | 0b101) as u16;
        assert_eq!(weights[0], 2.0 * Code::Sum.values(first)[0]);
        assert_eq!(weights[1], 2.0 * Code::Sum.values(first << 3)[0]);
        assert_eq!(weights[127], 2.0 * Code::Sum.values(0xABCD)[0]);
    }

    /// Weights that a stream stands for are found again.
    #[test]
    fn round_trips() {
        for trellis in all() {
            let words = random(2 * trellis.words(), 7);
            let mut weights = vec![0.0; 2 * SEQUENCE];
            trellis.decode(&words, 0.25, &mut weights);
            let mut found = vec![u32::MAX; words.len()];
            trellis.encode(&weights, 0.25, &mut found);
            let mut again = vec![0.0; weights.len()];
            trellis.decode(&found, 0.25, &mut again);
            assert_eq!(
                weights,
                again,
                "{:?}, {} bits",
                trellis.code,
                trellis.bits()
            );
        }
    }

    /// The errors that docs/trellis.md states, and what a grid of as many levels has at 4 bits.
    #[test]
    fn squared_errors_of_gaussians() {
        let expected = [
            0.0696, 0.0177, 0.00448, 0.00115, 0.000305, // sums of 2 to 6 bits
            0.0711, 0.0364, 0.0187, 0.00959, 0.00507, 0.00146, // pairs of 4 to 8 and of 10
        ];
        let weights = gaussians(16 * SEQUENCE, 3);
        let variance = weights.iter().map(|w| w * w).sum::<f32>() / weights.len() as f32;
        assert!((variance - 1.0).abs() < 0.05);
        for (trellis, expected) in all().zip(expected) {
            let mut words = vec![0; 16 * trellis.words()];
            trellis.encode(&weights, trellis.unit(), &mut words);
            let mut rounded = vec![0.0; weights.len()];
            trellis.decode(&words, trellis.unit(), &mut rounded);
            let error = weights.iter().zip(&rounded).map(|(a, b)| (a - b) * (a - b));
            let error = error.sum::<f32>() / weights.len() as f32;
            let what = format!("{:?}, {} bits: {error}", trellis.code, trellis.bits());
            assert!(
                (error / expected - 1.0).abs() < 0.1,
                "{what}, expected {expected}"
            );
            // No code does better than this.
            assert!(error > 0.95 * 4f32.powf(-trellis.bits()), "{what}");
        }
    }

    #[test]
    fn refuses_other_steps() {
        let error = Trellis::new(Code::Octagon, 9).unwrap_err().to_string();
        assert!(
            error.contains("[4, 5, 6, 7, 8, 10]") && error.contains('9'),
            "{error}"
        );
    }

    #[test]
    #[should_panic(expected = "expected 16 for each 128")]
    fn refuses_parts_of_sequences() {
        let trellis = Trellis::new(Code::Sum, 4).unwrap();
        trellis.encode(&[0.0; SEQUENCE + 8], 1.0, &mut [0; 17]);
    }
}
