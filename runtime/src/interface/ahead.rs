//! Steps whose tokens the device draws.

use super::chunk::Chunk;
use crate::error::Result;
use crate::sampler::Sampler;
use std::time::Duration;

/// A device that runs steps and draws their tokens by itself, ahead of the host: the part of a
/// session that a [`Batch`](crate::Batch) drives. Each sequence sits in a row of the step; free rows run idle.
/// Queued work runs in order.
pub trait StepsAhead {
    /// Most rows of a step.
    fn rows(&self) -> usize;

    /// Most steps to queue ahead of the tokens that the host has received.
    fn depth(&self) -> usize;

    /// True if the device draws as `sampler` does. Where it does not for a sequence, the batch's steps are not queued here:
    /// their logits come to the host.
    fn draws(&mut self, sampler: &Sampler) -> bool {
        let _ = sampler;
        true
    }

    /// Refuses tokens and samplers that [`StepsAhead::queue_prompts`] and [`StepsAhead::seat`]
    /// cannot take.
    ///
    /// # Errors
    /// [`crate::Error::Request`] for a token past the vocabulary, or a sampler that names one.
    fn check(&self, tokens: &[u32], sampler: Option<&Sampler>) -> Result<()>;

    /// Queues the rows of prompts, without logits, behind the work queued so far. None of the
    /// sequences may be seated; their lengths include the new rows when this returns.
    ///
    /// # Errors
    /// [`crate::Error::PagesFull`] before anything is queued; errors of the device.
    fn queue_prompts(&mut self, chunks: &[Chunk<'_>]) -> Result<()>;

    /// Waits for the oldest queued prompts that have not been waited for; returns the time they took.
    fn finish_prompts(&mut self) -> Result<Duration>;

    /// Seats the sequence in `slot` in row `row`. The next step queued feeds it `token`.
    fn seat(&mut self, row: usize, slot: usize, token: u32, sampler: &Sampler) -> Result<()>;

    /// Frees a row: steps queued from here on leave its sequence alone.
    fn vacate(&mut self, row: usize) -> Result<()>;

    /// Queues a step of all seated sequences.
    ///
    /// # Errors
    /// [`crate::Error::PagesFull`] before anything is queued; errors of the device.
    fn queue(&mut self) -> Result<()>;

    /// Queues a step over these sequences only. It has a row for each of their tokens, in order, and draws a
    /// token in every row. No sequence may be seated, and no step queued. When this returns, the sequences'
    /// lengths include all rows.
    ///
    /// # Errors
    /// [`crate::Error::Request`] for more rows than [`Session::draft_rows`](crate::Session::draft_rows) and for
    /// samplers that [adjust](Sampler::adjusts) logits; [`crate::Error::ContextFull`] and [`crate::Error::PagesFull`]
    /// before anything is queued; errors of the device.
    fn queue_runs(&mut self, runs: &[Run<'_>]) -> Result<()>;

    /// Waits for the oldest queued step that has not been received, and passes each of its rows, in
    /// order, and the token drawn in it to `each`. There may be more rows than sequences sat in.
    fn receive(&mut self, each: &mut dyn FnMut(usize, Result<Drawn>)) -> Result<()>;
}

/// Tokens of one sequence in a step that draws a token after each of them.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// The sequence.
    pub slot: usize,
    /// Tokens to append to it: at least one.
    pub tokens: &'a [u32],
    /// The sampler in its state for the draw after the first token. It draws after the others as it would in
    /// later steps.
    pub sampler: &'a Sampler,
}

/// A token that a device drew.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// Its id.
    pub token: u32,
    /// Its log-probability and the best tokens with theirs, if the sampler asks for them.
    pub logprobs: Option<(f32, Vec<(u32, f32)>)>,
}

/// Rows that a device runs for this many sequences: a size for which steps are recorded.
pub fn bucket(rows: usize) -> usize {
    const SIZES: [usize; 10] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64];
    let fits = SIZES.into_iter().find(|&s| s >= rows);
    fits.unwrap_or(rows.next_multiple_of(64))
}
