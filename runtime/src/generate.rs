//! The loop from a prompt to an answer, over any [`Session`].

use crate::batch::decode;
use crate::error::{Error, Result};
use crate::interface::{Chunk, Logits, LogitsWanted, PlacedImage, Session};
use crate::sampler::Sampler;
use crate::speculation::{DraftCounts, Speculation};
use crate::states::{pass_end, resting_points};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The token ids that one slot of a session holds, so that a prompt which begins with them
/// needs only its rest computed.
#[derive(Default)]
pub struct Sequence {
    slot: usize,
    tokens: Vec<u32>,
    /// The images among `tokens`.
    shown: Vec<PlacedImage>,
    /// Those of the prompts that follow.
    images: Vec<PlacedImage>,
    speculation: Option<Speculation>,
}

impl Sequence {
    /// An empty sequence in `slot`.
    pub fn new(session: &mut dyn Session, slot: usize) -> Self {
        session.truncate(slot, 0);
        Sequence {
            slot,
            ..Sequence::default()
        }
    }

    /// Drafts tokens of answers, where the session can check them ([`Session::draft_rows`]): answers come
    /// sooner where drafts are right, and are the same as far as the session computes a few rows as it
    /// computes one ([`Session::exact_rows`]).
    pub fn with_drafts(mut self, speculation: Option<Speculation>) -> Self {
        self.speculation = speculation;
        self
    }

    /// The speculation of [`Sequence::with_drafts`].
    pub fn speculation(&mut self) -> Option<&mut Speculation> {
        self.speculation.as_mut()
    }

    /// The slot.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// The tokens whose keys and values are cached.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Has these images, in order, in the prompts that follow, in place of the tokens there.
    pub fn show(&mut self, images: Vec<PlacedImage>) {
        self.images = images;
    }

    /// Keeps the part of the cache that `prompt` begins with, as far as the session can be cut there, and returns
    /// its length: less than the prompt's, as the last token must be fed for its logits.
    fn reuse(&mut self, session: &mut dyn Session, prompt: &[u32]) -> Result<usize> {
        let most = prompt.len().saturating_sub(1);
        let same = self.tokens.iter().zip(&prompt[..most]);
        let common = same.take_while(|(a, b)| a == b).count();
        let alike = |(a, b): &(&PlacedImage, &PlacedImage)| {
            a.at == b.at && a.image.digest == b.image.digest
        };
        let both = self.shown.iter().zip(&self.images);
        let seen = both.take_while(alike).count();
        let others = self
            .shown
            .get(seen)
            .into_iter()
            .chain(self.images.get(seen));
        let common = others.map(|image| image.at).fold(common, usize::min);
        let reached = session.truncate(self.slot, common);
        self.tokens.truncate(reached);
        session.show(self.slot, &self.images)?;
        self.shown.clone_from(&self.images);
        Ok(reached)
    }
}

/// Cuts the sequence in `slot` to `text`, with which it begins: feeds again what the session lost besides.
///
/// # Errors
/// Errors of the session.
pub fn rewind(session: &mut dyn Session, slot: usize, text: &[u32]) -> Result<()> {
    let reached = session.truncate(slot, text.len());
    let rows = session.spec().max_rows.max(1);
    for tokens in text[reached.min(text.len())..].chunks(rows) {
        let chunk = Chunk {
            slot,
            tokens,
            logits: LogitsWanted::None,
        };
        session.forward(&[chunk], None)?;
    }
    Ok(())
}

/// Conditions that end an answer.
#[derive(Clone, Copy, Debug)]
pub struct GenerationLimits<'a> {
    /// Tokens that end it; they are not part of the answer.
    pub stop: &'a [u32],
    /// Most tokens to sample.
    pub max_tokens: usize,
    /// If set by another thread or a signal handler, ends the answer at the next token or chunk of the
    /// prompt.
    pub interrupt: Option<&'a AtomicBool>,
}

impl GenerationLimits<'_> {
    fn interrupted(&self) -> bool {
        self.interrupt.is_some_and(|i| i.load(Ordering::Relaxed))
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model sampled this stop token.
    Eos(u32),
    /// [`GenerationLimits::max_tokens`] tokens were sampled.
    MaxTokens,
    /// The context has no position left.
    ContextFull,
    /// [`GenerationLimits::interrupt`] was set, or the receiver of the tokens stopped.
    Interrupted,
}

/// Counts and times of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens that the cache already held.
    pub reused_tokens: usize,
    /// Tokens sampled, the stop token included.
    pub tokens: usize,
    /// Steps in which tokens might have been drafted.
    pub draft_steps: usize,
    /// Tokens that were drafted and checked, and those of them that were right.
    pub drafted: usize,
    /// Drafted tokens that were right.
    pub accepted: usize,
    /// Time from the call to the first token.
    pub first_token: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
}

impl Stats {
    /// Tokens per second after the first one; `None` if there is no such token.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let steps = self.tokens.saturating_sub(1);
        let seconds = self.decode.as_secs_f64();
        (steps > 0 && seconds > 0.0).then(|| steps as f64 / seconds)
    }

    /// Drafted tokens accepted in a step; `None` if none were drafted.
    pub fn accepted_per_step(&self) -> Option<f64> {
        (self.drafted > 0).then(|| self.accepted as f64 / self.draft_steps.max(1) as f64)
    }

    /// Bytes of weights read per second of decoding, where each forward reads `bytes_per_token`
    /// ([`crate::Engine::bytes_per_token`]): one for each token that is not an accepted draft.
    pub fn bytes_per_second(&self, bytes_per_token: usize) -> Option<f64> {
        let steps = self.tokens.checked_sub(1)?;
        let forwards = steps.saturating_sub(self.accepted) as f64 / steps as f64;
        Some(self.tokens_per_second()? * forwards * bytes_per_token as f64)
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// Its tokens, without the stop token.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub stop: StopReason,
    /// Counts and times.
    pub stats: Stats,
}

/// Answers `prompt`: computes the part of it that the cache does not hold, then samples up to a
/// limit. Each token of the answer except stop tokens goes to `each` as it comes.
///
/// The sequence stays in step with the session even after an error, so that a next prompt that
/// continues this one is cheap.
///
/// # Errors
/// [`Error::Request`] for an empty prompt; [`Error::ContextFull`], before anything is computed, for
/// one that leaves no room for an answer; errors of the session and the sampler.
pub fn generate(
    session: &mut dyn Session,
    sequence: &mut Sequence,
    prompt: &[u32],
    sampler: &mut Sampler,
    limits: &GenerationLimits<'_>,
    each: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated> {
    sampler.begin(prompt);
    resume(session, sequence, prompt, sampler, limits, each)
}

/// Goes on with an answer as [`generate`] begins one: `prompt` ends with what there is of the answer, and `sampler` has
/// recorded all of it.
pub fn resume(
    session: &mut dyn Session,
    sequence: &mut Sequence,
    prompt: &[u32],
    sampler: &mut Sampler,
    limits: &GenerationLimits<'_>,
    each: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated> {
    let start = Instant::now();
    let capacity = session.spec().ctx;
    check_prompt(prompt, capacity)?;
    let mut answer = Generated {
        tokens: Vec::new(),
        stop: StopReason::MaxTokens,
        stats: Stats {
            prompt_tokens: prompt.len(),
            reused_tokens: sequence.reuse(session, prompt)?,
            ..Stats::default()
        },
    };
    if limits.max_tokens == 0 {
        return Ok(answer);
    }
    let Some(logits) = prefill(session, sequence, prompt, limits)? else {
        answer.stop = StopReason::Interrupted;
        return Ok(answer);
    };
    let first = sampler.sample(logits.row(0))?;
    answer.stats.first_token = start.elapsed();

    let room = capacity - prompt.len();
    if room < limits.max_tokens {
        answer.stop = StopReason::ContextFull;
    }
    let steps = room.min(limits.max_tokens) - 1;
    let slot = sequence.slot;
    let mut speculation = sequence.speculation.as_mut();
    let before = speculation
        .as_ref()
        .map_or_else(Default::default, |s| s.counts());
    let mut receive = |token: u32| {
        answer.stats.tokens += 1;
        if limits.stop.contains(&token) {
            answer.stop = StopReason::Eos(token);
            return ControlFlow::Break(());
        }
        answer.tokens.push(token);
        if each(token).is_break() || limits.interrupted() {
            answer.stop = StopReason::Interrupted;
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    };
    let result = match receive(first) {
        ControlFlow::Break(()) => Ok(()),
        ControlFlow::Continue(()) => {
            if let Some(speculation) = speculation.as_mut().filter(|_| steps > 0) {
                speculation.follow(slot, [prompt, &[first]].concat());
            }
            let drafts = speculation.as_deref_mut();
            decode(session, slot, first, steps, sampler, drafts, &mut receive)
        }
    };
    if let Some(speculation) = speculation {
        let DraftCounts {
            steps,
            drafted,
            accepted,
        } = speculation.counts() - before;
        let stats = &mut answer.stats;
        (stats.draft_steps, stats.drafted, stats.accepted) = (steps, drafted, accepted);
    }
    answer.stats.decode = start.elapsed() - answer.stats.first_token;
    sequence.tokens.extend_from_slice(&answer.tokens);
    sequence.tokens.truncate(session.len(sequence.slot));
    result.map(|()| answer)
}

fn check_prompt(prompt: &[u32], capacity: usize) -> Result<()> {
    if prompt.is_empty() {
        return Err(Error::Request {
            what: "prompt",
            expected: "at least one token".into(),
            found: "none".into(),
        });
    }
    if prompt.len() >= capacity {
        return Err(Error::ContextFull {
            capacity,
            needed: prompt.len() + 1,
        });
    }
    Ok(())
}

/// Feeds the part of `prompt` that the sequence lacks and returns the logits of its last token;
/// `None` if interrupted.
fn prefill<'s>(
    session: &'s mut dyn Session,
    sequence: &mut Sequence,
    prompt: &[u32],
    limits: &GenerationLimits<'_>,
) -> Result<Option<Logits<'s>>> {
    let slot = sequence.slot;
    let rows = session.spec().max_rows.max(1);
    let points = resting_points(prompt, limits.stop, sequence.tokens.len());
    points.iter().for_each(|&len| session.keep_at(slot, len));
    loop {
        let begin = sequence.tokens.len();
        let end = pass_end(&points, begin, prompt.len().min(begin + rows));
        let (tokens, last) = (&prompt[begin..end], end == prompt.len());
        if limits.interrupted() {
            return Ok(None);
        }
        let chunk = Chunk {
            slot,
            tokens,
            logits: if last {
                LogitsWanted::Last
            } else {
                LogitsWanted::None
            },
        };
        if last {
            let logits = session.forward(&[chunk], None)?;
            sequence.tokens.extend_from_slice(tokens);
            return Ok(Some(logits));
        }
        session.forward(&[chunk], None)?;
        sequence.tokens.extend_from_slice(tokens);
    }
}
