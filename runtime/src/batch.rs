//! Many sequences sampled at once, for calibration on a model's own text.

use crate::engine::{Chunk, Decoding, LogitsWanted, Session};
use crate::error::{Error, Result};
use crate::sampler::{Sampler, SamplingParams};
use nq_formats::Progress;
use rayon::prelude::*;
use std::ops::ControlFlow;

/// What to sample.
#[derive(Clone, Copy, Debug)]
pub struct BatchRequest<'a> {
    /// How each sequence begins: at least one token.
    pub prompts: &'a [Vec<u32>],
    /// Tokens of each sequence in the end, its prompt included.
    pub length: usize,
    /// Tokens after which a sequence ends early; none: each reaches the length.
    pub stop: &'a [u32],
    /// How tokens are chosen. Sequence `i` draws from stream `i`.
    pub sampling: SamplingParams,
}

/// A sequence in the making.
struct Slot {
    /// Which of the request's sequences.
    index: usize,
    /// All its tokens.
    tokens: Vec<u32>,
    /// How many of them the session holds.
    fed: usize,
    /// Tokens fed in the step under way.
    feeding: usize,
    sampler: Sampler,
}

/// Continues every prompt to the wanted length; a prompt already that long is cut. All slots
/// of the session work at once, and a slot that is done takes the next sequence. A sequence
/// depends on its index, prompt and seed, not on the slots: the session's logits for a token
/// must not depend on what else is in the batch, or only as far as rounding goes.
///
/// `progress` is advanced by each token sampled.
///
/// # Errors
/// [`Error::Request`] for an empty prompt; [`Error::ContextFull`] if the length exceeds the
/// session's context; the session's and the sampler's.
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
    let mut done: Vec<Vec<u32>> = vec![Vec::new(); request.prompts.len()];
    let mut waiting = request.prompts.iter().enumerate();
    let mut slots: Vec<Option<Slot>> = (0..spec.slots).map(|_| None).collect();
    loop {
        for (i, slot) in slots.iter_mut().enumerate() {
            while slot.is_none() {
                let Some((index, prompt)) = waiting.next() else {
                    break;
                };
                if prompt.len() >= request.length {
                    done[index] = prompt[..request.length].to_vec();
                    continue;
                }
                session.truncate(i, 0);
                *slot = Some(Slot::new(index, prompt, request)?);
            }
        }
        if !decode(session, &mut slots, request, progress)?
            && !step(session, &mut slots, spec.max_rows.max(1), progress)?
        {
            return Ok(done);
        }
        for slot in &mut slots {
            if let Some(s) = slot.take_if(|s| s.is_done(request)) {
                done[s.index] = s.tokens;
            }
        }
    }
}

impl Slot {
    fn new(index: usize, prompt: &[u32], request: &BatchRequest<'_>) -> Result<Self> {
        if prompt.is_empty() {
            return Err(Error::Request {
                what: "prompt",
                expected: "at least one token".into(),
                found: format!("none in sequence {index}"),
            });
        }
        let mut sampler = Sampler::new(request.sampling, index as u64)?;
        sampler.begin(prompt);
        let mut tokens = Vec::with_capacity(request.length);
        tokens.extend_from_slice(prompt);
        Ok(Slot {
            index,
            tokens,
            fed: 0,
            feeding: 0,
            sampler,
        })
    }

    /// True if a token was sampled and it is the last. (A prompt may hold stop tokens.)
    fn is_done(&self, request: &BatchRequest<'_>) -> bool {
        let sampled = &self.tokens[request.prompts[self.index].len()..];
        match sampled.last() {
            None => false,
            Some(t) => self.tokens.len() >= request.length || request.stop.contains(t),
        }
    }
}

/// Where every slot lacks its last token alone: continues all until the first is done. False if
/// that is not so.
fn decode(
    session: &mut dyn Session,
    slots: &mut [Option<Slot>],
    request: &BatchRequest<'_>,
    progress: &dyn Progress,
) -> Result<bool> {
    let mut active: Vec<(usize, &mut Slot)> = (slots.iter_mut().enumerate())
        .filter_map(|(i, slot)| Some((i, slot.as_mut()?)))
        .collect();
    let steps = active.iter().map(|(_, s)| request.length - s.tokens.len());
    let Some(steps) = steps.min() else {
        return Ok(false);
    };
    if active.iter().any(|(_, s)| s.tokens.len() != s.fed + 1) {
        return Ok(false);
    }
    let mut sampled: Vec<Vec<u32>> = vec![Vec::new(); active.len()];
    let mut sequences: Vec<Decoding<'_>> = (active.iter_mut())
        .map(|(i, s)| Decoding {
            slot: *i,
            token: s.tokens[s.fed],
            sampler: &mut s.sampler,
        })
        .collect();
    session.decode_many(&mut sequences, steps, &mut |i, token| {
        sampled[i].push(token);
        progress.advance(1);
        match request.stop.contains(&token) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    for ((_, slot), tokens) in active.into_iter().zip(sampled) {
        slot.fed += tokens.len();
        slot.tokens.extend(tokens);
    }
    Ok(true)
}

/// Feeds every slot what it lacks, as far as rows allow, and samples where that was all.
/// False if there was nothing to feed.
fn step(
    session: &mut dyn Session,
    slots: &mut [Option<Slot>],
    max_rows: usize,
    progress: &dyn Progress,
) -> Result<bool> {
    let mut rows = max_rows;
    let mut chunks = Vec::with_capacity(slots.len());
    for (i, slot) in slots.iter_mut().enumerate() {
        let Some(slot) = slot else { continue };
        slot.feeding = (slot.tokens.len() - slot.fed).min(rows);
        rows -= slot.feeding;
        if slot.feeding == 0 {
            continue;
        }
        let end = slot.fed + slot.feeding;
        chunks.push(Chunk {
            slot: i,
            tokens: &slot.tokens[slot.fed..end],
            logits: match end == slot.tokens.len() {
                true => LogitsWanted::Last,
                false => LogitsWanted::None,
            },
        });
    }
    if chunks.is_empty() {
        return Ok(false);
    }
    let logits = session.forward(&chunks, None)?;
    drop(chunks);
    let mut ready: Vec<&mut Slot> = Vec::with_capacity(logits.rows());
    for slot in slots.iter_mut().flatten().filter(|s| s.feeding > 0) {
        slot.fed += slot.feeding;
        if slot.fed == slot.tokens.len() {
            ready.push(slot);
        }
    }
    // A large vocabulary's softmax takes a millisecond, as long as a device takes for the
    // whole forward: no sequence waits for another's.
    ready
        .par_iter_mut()
        .enumerate()
        .try_for_each(|(row, slot)| {
            let token = slot.sampler.sample(logits.row(row))?;
            slot.tokens.push(token);
            Ok::<_, Error>(())
        })?;
    progress.advance(ready.len() as u64);
    Ok(true)
}
