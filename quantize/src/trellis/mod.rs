//! Rounding to trellis codes ([`nq_formats::trellis`]): a sequence of weights is a path through a graph of states, and
//! rounding it is the search for the path whose values are nearest. `docs/lab/trellis.md` has the measurements behind the
//! choices here.

mod round;
mod search;

pub use round::{alike, nearest, round};
pub(crate) use round::{nearest_rows, on_host, turned_moments};

use nq_formats::trellis::{Code, SEQUENCE, TrellisScheme};
use rayon::prelude::*;
use search::{Search, Table};
use std::array::from_fn;

/// The standard deviation of the code's values that rounds Gaussians of variance 1 with the least error.
fn deviation(scheme: TrellisScheme) -> f32 {
    match (scheme.code(), scheme.step_bits()) {
        (Code::Sum, ..=2) => 0.98,
        (Code::Sum, ..=4) => 1.08,
        (Code::Sum, _) => 1.13,
        (Code::Octagon, ..=4) => 1.02,
        (Code::Octagon, ..=6) => 1.09,
        (Code::Octagon, ..=8) => 1.16,
        (Code::Octagon, _) => 1.23,
    }
}

/// The encoder of a scheme, with the values of all states.
#[derive(Clone, Debug)]
pub struct Trellis {
    table: Table,
    unit: f32,
}

impl Trellis {
    /// The encoder of `scheme`.
    pub fn new(scheme: TrellisScheme) -> Self {
        let code = scheme.code();
        let values = (0..=u16::MAX).flat_map(|s| code.values(s).into_iter().take(code.width()));
        let (count, squares) =
            values.fold((0, 0.0), |(n, sum), v| (n + 1, sum + f64::from(v).powi(2)));
        Trellis {
            table: Table::new(scheme),
            unit: (f64::from(deviation(scheme)) / (squares / f64::from(count)).sqrt()) as f32,
        }
    }

    /// Code and bits.
    pub fn scheme(&self) -> TrellisScheme {
        self.table.scheme()
    }

    /// The scale for Gaussian weights of variance 1.
    pub fn unit(&self) -> f32 {
        self.unit
    }

    /// Steps on each side of a sequence's seam that settle it.
    pub(crate) fn window(&self) -> usize {
        self.table.window()
    }

    /// Rounds whole sequences of [`SEQUENCE`] values, in units of the code's: replaces them by values that the code
    /// has and whose squared distance is about the least, and writes their words. The result does not depend on the
    /// number of threads, nor on a sequence's neighbours.
    ///
    /// # Panics
    /// If `words` and `values` are not those of the same number of sequences.
    pub fn encode(&self, values: &mut [f32], words: &mut [u32]) {
        let each = self.scheme().words();
        assert!(
            values.len().is_multiple_of(SEQUENCE) && values.len() / SEQUENCE * each == words.len(),
            "{} words of {} values, expected {each} for each {SEQUENCE}",
            words.len(),
            values.len(),
        );
        match self.table.side() {
            4 => self.encode_side_by_side::<4>(values, words),
            2 => self.encode_side_by_side::<2>(values, words),
            _ => self.encode_side_by_side::<1>(values, words),
        }
    }

    fn encode_side_by_side<const S: usize>(&self, values: &mut [f32], words: &mut [u32]) {
        let each = self.scheme().words();
        values
            .par_chunks_mut(S * SEQUENCE)
            .zip(words.par_chunks_mut(S * each))
            .for_each_init(Search::<S>::default, |search, (values, words)| {
                // Where sequences are left over, some are searched twice.
                let last = values.len() / SEQUENCE - 1;
                let states = search.cyclic(
                    &self.table,
                    from_fn(|s| &values[s.min(last) * SEQUENCE..][..SEQUENCE]),
                );
                let sequences = values
                    .chunks_exact_mut(SEQUENCE)
                    .zip(words.chunks_exact_mut(each));
                for ((values, words), states) in
                    sequences.zip(states.chunks_exact(self.scheme().steps()))
                {
                    self.write(states, values, words);
                }
            });
    }

    /// The values and words of these states.
    fn write(&self, states: &[u16], values: &mut [f32], words: &mut [u32]) {
        let (code, bits) = (self.scheme().code(), self.scheme().step_bits());
        words.fill(0);
        let steps = values.chunks_exact_mut(code.width()).zip(states);
        for (step, (values, &state)) in steps.enumerate() {
            values.copy_from_slice(&code.values(state)[..code.width()]);
            put(words, step, bits, state);
        }
    }
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

#[cfg(test)]
mod tests;
