//! Greedy answers of a source, and how far a file's answers are the same.

use crate::error::{Error, Result};
use crate::softmax;
use crate::stats;
use crate::windows::{LOGIT_BYTES, StageGuard};
use nq_formats::{Progress, Unit};
use nq_runtime::batch::{BatchRequest, sample_sequences};
use nq_runtime::{Chunk, Engine, LogitsWanted, SamplingParams, Session, SessionSpec};
use serde::{Deserialize, Serialize};

/// Most tokens of an answer.
pub(super) const LONGEST: usize = 300;

/// Tokens of a short answer.
const SHORT: usize = 32;

/// Most tokens of one forward.
const ROWS: usize = 512;

/// A prompt and the source's greedy answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GreedyAnswer {
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Tokens of the answer, with the token that ends it unless it was cut.
    pub tokens: Vec<u32>,
}

/// How far a file answers as its source does. Tokens count with the one that ends an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answers {
    /// Tokens of each of the source's answers, at most 300.
    pub source_tokens: Vec<usize>,
    /// Tokens of each until the file's best token is another.
    pub equal_tokens: Vec<usize>,
    /// Share of answers that are the same in their first 32 tokens.
    pub same_32: f64,
    /// Share of answers that are the same in all of up to 300 tokens.
    pub same_300: f64,
    /// Mean of `equal_tokens`.
    pub mean_equal: f64,
    /// Its standard error over the answers.
    pub mean_equal_se: f64,
}

impl Answers {
    /// Compares the source's answers with the tokens of each that are the same.
    pub fn new(answers: &[GreedyAnswer], equal_tokens: Vec<usize>) -> Self {
        let source_tokens: Vec<usize> = answers.iter().map(|a| a.tokens.len()).collect();
        let same = |most: usize| {
            let pairs = source_tokens.iter().zip(&equal_tokens);
            stats::mean(pairs.map(|(&all, &same)| f64::from(u8::from(same >= all.min(most)))))
        };
        let lengths = equal_tokens.iter().map(|&n| n as f64);
        let (mean_equal, mean_equal_se) = stats::mean_and_se(lengths);
        Answers {
            same_32: same(SHORT),
            same_300: same(LONGEST),
            mean_equal,
            mean_equal_se,
            source_tokens,
            equal_tokens,
        }
    }
}

fn session(engine: &dyn Engine, slots: usize, ctx: usize) -> Result<Box<dyn Session>> {
    let one = SessionSpec::of_one(ctx, ROWS);
    Ok(engine.session(SessionSpec { slots, ..one })?)
}

/// A part of the one sequence of a session.
fn chunk(tokens: &[u32], logits: LogitsWanted) -> Chunk<'_> {
    Chunk {
        slot: 0,
        tokens,
        logits,
    }
}

/// Answers `prompts` greedily with up to 300 tokens, or as many as the model has positions; `stop` are the tokens that
/// end an answer.
///
/// # Errors
/// [`Error::Spec`] for a prompt that leaves no room for an answer; errors of the engine.
pub fn greedy_answers(
    engine: &dyn Engine,
    prompts: &[Vec<u32>],
    stop: &[u32],
    progress: &dyn Progress,
) -> Result<Vec<GreedyAnswer>> {
    let positions = engine.config().max_position_embeddings;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    if longest >= positions {
        return Err(Error::Spec {
            what: "tokens of a prompt",
            expected: format!("fewer than the model's {positions} positions"),
            found: longest.to_string(),
        });
    }
    let length = positions.min(longest + LONGEST);
    let mut session = session(engine, prompts.len(), length)?;
    let all = prompts.iter().map(|p| length - p.len()).sum::<usize>() as u64;
    let _stage = StageGuard::begin(progress, "answers of the source", all, Unit::Tokens);
    let request = BatchRequest {
        prompts,
        length,
        stop,
        sampling: SamplingParams::greedy(),
    };
    let sequences = sample_sequences(session.as_mut(), &request, progress)?;
    let answer = |(prompt, mut sequence): (&Vec<u32>, Vec<u32>)| {
        let mut tokens = sequence.split_off(prompt.len());
        tokens.truncate(LONGEST);
        let prompt = sequence;
        GreedyAnswer { prompt, tokens }
    };
    Ok(prompts.iter().zip(sequences).map(answer).collect())
}

/// The number of tokens of each answer that `engine` would choose too, up to the first that it would not: it reads them
/// instead of writing them, which is many tokens in a forward. Where two tokens are as likely as each other but for
/// rounding, a model that writes may choose the other one.
///
/// # Errors
/// [`Error::NotFinite`], with the answer as the window; errors of the engine.
pub fn equal_tokens(
    engine: &dyn Engine,
    answers: &[GreedyAnswer],
    progress: &dyn Progress,
) -> Result<Vec<usize>> {
    let longest = answers.iter().map(|a| a.prompt.len() + a.tokens.len());
    let mut session = session(engine, 1, longest.max().unwrap_or(1))?;
    let rows = ROWS.min((LOGIT_BYTES / (4 * engine.config().vocab_size)).max(1));
    let _stage = StageGuard::begin(progress, "answers", answers.len() as u64, Unit::Items);
    let mut found = Vec::with_capacity(answers.len());
    for (window, answer) in answers.iter().enumerate() {
        let Some((last, before)) = answer.prompt.split_last() else {
            found.push(0);
            continue;
        };
        for tokens in before.chunks(ROWS) {
            session.forward(&[chunk(tokens, LogitsWanted::None)], None)?;
        }
        // The row after each of these tokens chooses the next of the answer, which has as many.
        let read = std::iter::once(last).chain(&answer.tokens);
        let read: Vec<u32> = read.copied().take(answer.tokens.len()).collect();
        let mut same = 0;
        'answer: for (tokens, next) in read.chunks(rows).zip(answer.tokens.chunks(rows)) {
            let logits = session.forward(&[chunk(tokens, LogitsWanted::All)], None)?;
            for (i, &next) in next.iter().enumerate() {
                let (top, _) = softmax::peak(logits.row(i)).ok_or(Error::NotFinite {
                    role: "model",
                    window,
                    position: before.len() + same,
                })?;
                if top != next as usize {
                    break 'answer;
                }
                same += 1;
            }
        }
        session.truncate(0, 0);
        found.push(same);
        progress.advance(1);
    }
    Ok(found)
}
