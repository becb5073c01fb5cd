//! Many sequences sampled at once, for calibration on a model's own text.

use super::{Batch, Continuation, Piece};
use crate::error::{Error, Result};
use crate::interface::Session;
use crate::sampler::{Sampler, SamplingParams};
use nq_formats::Progress;
use std::ops::ControlFlow;

/// Sequences to sample.
#[derive(Clone, Copy, Debug)]
pub struct BatchRequest<'a> {
    /// The beginning of each sequence: at least one token.
    pub prompts: &'a [Vec<u32>],
    /// Final length of each sequence in tokens, including its prompt.
    pub length: usize,
    /// Tokens after which a sequence ends early; if empty, each reaches the full length.
    pub stop: &'a [u32],
    /// How tokens are chosen. Sequence `i` draws from stream `i`.
    pub sampling: SamplingParams,
}

/// A sequence that is being sampled.
struct Growing {
    /// Its index in the request.
    index: usize,
    /// Tokens of its prompt fed so far.
    fed: usize,
}

/// Continues every prompt to the wanted length; a prompt already that long is cut. All slots
/// of the session work at once, and a slot that is done takes the next sequence. A sequence
/// depends on its index, prompt and seed, not on the slots, within the limits that [`Batch`] states.
///
/// `progress` is advanced by each token sampled.
///
/// # Errors
/// [`Error::Request`] for an empty prompt; [`Error::ContextFull`] if the length exceeds the
/// session's context; errors of the session and the sampler.
pub fn sample_sequences(
    session: &mut dyn Session,
    request: &BatchRequest<'_>,
    progress: &dyn Progress,
) -> Result<Vec<Vec<u32>>> {
    let spec = session.spec();
    // The last token of a sequence is not fed.
    if request.length > spec.ctx + 1 {
        return Err(Error::ContextFull {
            capacity: spec.ctx,
            needed: request.length - 1,
        });
    }
    if let Some(index) = request.prompts.iter().position(Vec::is_empty) {
        return Err(Error::Request {
            what: "prompt",
            expected: "at least one token".into(),
            found: format!("none in sequence {index}"),
        });
    }
    let cut = |p: &Vec<u32>| p[..p.len().min(request.length)].to_vec();
    let mut sequences: Vec<Vec<u32>> = request.prompts.iter().map(cut).collect();
    let mut waiting = (0..sequences.len()).filter(|&i| request.prompts[i].len() < request.length);
    let mut slots: Vec<Option<Growing>> = (0..spec.slots).map(|_| None).collect();
    let mut batch = Batch::new(session);
    loop {
        for (i, slot) in slots.iter_mut().enumerate().filter(|(_, s)| s.is_none()) {
            let Some(index) = waiting.next() else { break };
            batch.session().truncate(i, 0);
            *slot = Some(Growing { index, fed: 0 });
        }
        let mut pieces = Vec::new();
        let mut rows = spec.max_rows.max(1).saturating_sub(batch.running());
        for (i, growing) in slots.iter_mut().enumerate() {
            let Some(growing) = growing else { continue };
            let rest = &request.prompts[growing.index][growing.fed..];
            let tokens = &rest[..rest.len().min(rows)];
            if tokens.is_empty() {
                continue;
            }
            (growing.fed, rows) = (growing.fed + tokens.len(), rows - tokens.len());
            let then = if tokens.len() == rest.len() {
                Some(Continuation {
                    sampler: sampler(request, growing.index)?,
                    tokens: request.length - growing.fed,
                })
            } else {
                None
            };
            pieces.push(Piece {
                slot: i,
                tokens,
                then,
            });
        }
        if pieces.is_empty() && batch.running() == 0 {
            drop(batch);
            return Ok(sequences);
        }
        let mut failed = None;
        batch.step(pieces, &mut |slot, token| {
            let Some(growing) = &slots[slot] else {
                return ControlFlow::Break(());
            };
            let sequence = &mut sequences[growing.index];
            let done = match token {
                Ok(token) => {
                    progress.advance(1);
                    sequence.push(token);
                    sequence.len() == request.length || request.stop.contains(&token)
                }
                Err(e) => {
                    failed.get_or_insert(e);
                    true
                }
            };
            if done {
                slots[slot] = None;
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        if let Some(e) = failed {
            return Err(e);
        }
    }
}

fn sampler(request: &BatchRequest<'_>, index: usize) -> Result<Sampler> {
    let mut sampler = Sampler::new(request.sampling, index as u64)?;
    sampler.begin(&request.prompts[index]);
    Ok(sampler)
}
