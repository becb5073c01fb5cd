//! Decoding real text with drafts and without, in turns.

mod replay;

use super::{Machine, Sample};
use crate::error::Result;
use crate::report::{BenchRow, DraftRow};
use crate::stats;
use crate::windows::StageGuard;
use nq_formats::{Progress, Unit};
use nq_runtime::generate::generate;
use nq_runtime::interface::Drafter;
use nq_runtime::{
    DraftLayer, DraftModel, DraftedBy, Engine, Generated, GenerationLimits, KvType, Sampler,
    SamplingParams, Sequence, Session, SessionSpec, Speculation,
};
use replay::{Replay, Told};
use std::ops::ControlFlow;

/// The text that a measurement decodes.
pub enum BenchAnswer<'a> {
    /// The model's own answers to each prompt.
    Own {
        /// Prompts, as tokens.
        prompts: &'a [Vec<u32>],
        /// Tokens of each answer.
        tokens: usize,
        /// How they are drawn.
        sampling: SamplingParams,
    },
    /// A known answer to a prompt, which replaces the tokens that the model would draw.
    Replayed {
        /// The prompt, as tokens.
        prompt: &'a [u32],
        /// The answer.
        answer: &'a [u32],
        /// Acceptance rate to give a drafter with weights, by replacing its tokens with right and wrong ones at random.
        /// `None`: its tokens are its own.
        right: Option<f64>,
    },
}

/// Makes a drafter for a session.
pub type OpenDrafter<'a> = Box<dyn Fn(&mut dyn Session) -> Result<Box<dyn Drafter>> + 'a>;

/// A drafter.
pub enum DraftBy<'a> {
    /// Prompt lookup.
    Ngram,
    /// A draft model.
    Model {
        /// The model.
        engine: &'a dyn Engine,
        /// Number of tokens that both models have.
        vocab: usize,
    },
    /// A layer that reads the model's residual streams: an EAGLE-3 head, or the model's own MTP layer.
    Head {
        /// Makes a drafter for a session.
        open: OpenDrafter<'a>,
        /// Its sizes.
        layer: DraftLayer,
        /// Number of tokens of the model.
        vocab: usize,
    },
}

/// A measurement of speculative decoding.
pub struct TextSpec<'a> {
    /// The text to decode.
    pub answer: BenchAnswer<'a>,
    /// The drafter and its name.
    pub drafts: (DraftBy<'a>, &'a str),
    /// Tokens to draft in each step, whether that pays or not; `None`: as many as pay.
    pub draft_tokens: Option<usize>,
    /// Measured repeats, after a warm-up.
    pub repeats: usize,
    /// Type that keys and values are rounded to.
    pub kv: KvType,
}

impl TextSpec<'_> {
    /// Each prompt with the tokens of its answer.
    fn answers(&self) -> Vec<(&[u32], usize)> {
        match &self.answer {
            BenchAnswer::Own {
                prompts, tokens, ..
            } => prompts.iter().map(|p| (&p[..], *tokens)).collect(),
            BenchAnswer::Replayed { prompt, answer, .. } => vec![(*prompt, answer.len())],
        }
    }

    /// The session that it needs.
    pub(crate) fn session_spec(&self, prompt_rows: usize) -> SessionSpec {
        let longest = self.answers().into_iter().map(|(p, n)| p.len() + n).max();
        SessionSpec {
            slots: 2,
            ctx: longest.unwrap_or(0),
            pages: None,
            kv: self.kv,
            max_rows: prompt_rows,
            snapshots: None,
            drafts: match self.drafts.0 {
                DraftBy::Head { layer, .. } => DraftedBy::Layer(layer),
                DraftBy::Ngram | DraftBy::Model { .. } => DraftedBy::Tokens,
            },
        }
    }

    /// A session, which draws the known answer if there is one.
    fn session(&self, engine: &dyn Engine, right: Option<f64>) -> Result<Box<dyn Session>> {
        let session = engine.session(self.session_spec(engine.description().prompt_rows()))?;
        let (BenchAnswer::Replayed { prompt, answer, .. }, Some(right)) = (&self.answer, right)
        else {
            return Ok(session);
        };
        let text = [*prompt, *answer].concat();
        let vocab = engine.config().vocab_size;
        Ok(Box::new(Replay::new(session, text, right, vocab)))
    }

    fn speculation(&self, session: &mut dyn Session) -> Result<Speculation> {
        let speculation = match &self.drafts.0 {
            DraftBy::Ngram => Speculation::ngram(),
            DraftBy::Head { open, vocab, .. } => {
                let drafter = open(session)?;
                Speculation::new(match self.answer {
                    BenchAnswer::Replayed {
                        prompt,
                        answer,
                        right: Some(right),
                    } => Box::new(Told {
                        drafter,
                        text: [prompt, answer].concat(),
                        right,
                        vocab: *vocab,
                    }),
                    _ => drafter,
                })
            }
            DraftBy::Model { engine, vocab } => {
                let right = match self.answer {
                    BenchAnswer::Replayed { right, .. } => right,
                    BenchAnswer::Own { .. } => None,
                };
                let session = self.session(*engine, right)?;
                Speculation::new(Box::new(DraftModel::new(session, *vocab)))
            }
        };
        Ok(match self.draft_tokens {
            None => speculation,
            Some(n) => speculation.always().at_most(n),
        })
    }
}

/// Decodes the answers without drafts and with them, in turns. The second row has the result of the drafts.
///
/// # Errors
/// Errors of the engines; a device that cannot check drafts.
pub fn text(
    engine: &dyn Engine,
    spec: &TextSpec<'_>,
    machine: Machine<'_>,
    progress: &dyn Progress,
) -> Result<[BenchRow; 2]> {
    let mut session = spec.session(engine, Some(1.0))?;
    let device = &engine.description().device;
    let inexact = nq_runtime::speculation::check_drafts(session.as_ref(), device)?;
    inexact.iter().for_each(|note| progress.note(note));
    let mut plain = Sequence::new(session.as_mut(), 0);
    let drafts = Some(spec.speculation(session.as_mut())?);
    let mut drafted = Sequence::new(session.as_mut(), 1).with_drafts(drafts);
    let answers = spec.answers();
    let tokens: usize = answers.iter().map(|a| a.1 - 1).sum();
    let test = format!("text{tokens}");
    let rounds = (spec.repeats as u64 + 1) * answers.len() as u64;
    let _stage = StageGuard::begin(progress, &test, rounds, Unit::Items);
    let mut row = DraftRow {
        from: spec.drafts.1.to_owned(),
        replayed: matches!(spec.answer, BenchAnswer::Replayed { .. }),
        exact: inexact.is_none(),
        ..DraftRow::default()
    };
    let (mut seconds, mut steps, mut right) = ([Vec::new(), Vec::new()], 0, 0);
    let mut read_gb_s = vec![(machine.read_gb_s)()?];
    for repeat in 0..=spec.repeats {
        let mut took = [0.0; 2];
        for (stream, &(prompt, n)) in answers.iter().enumerate() {
            let mut run = |sequence: &mut Sequence| {
                decode(session.as_mut(), sequence, spec, prompt, n, stream as u64)
            };
            let (without, with) = (run(&mut plain)?, run(&mut drafted)?);
            took[0] += without.stats.decode.as_secs_f64();
            took[1] += with.stats.decode.as_secs_f64();
            if repeat > 0 {
                row.drafted += with.stats.drafted;
                right += with.stats.accepted;
                steps += with.stats.draft_steps;
            }
            row.same &= without.tokens == with.tokens;
            progress.advance(1);
        }
        if repeat > 0 {
            seconds[0].push(took[0]);
            seconds[1].push(took[1]);
            read_gb_s.push((machine.read_gb_s)()?);
        }
    }
    let ratios: Vec<f64> = seconds[0]
        .iter()
        .zip(&seconds[1])
        .map(|(a, b)| a / b)
        .collect();
    row.speed_up = stats::quantile(&stats::sorted(ratios.iter().copied()), 0.5);
    row.speed_up_std = stats::std_dev(&ratios);
    row.right = right as f64 / row.drafted.max(1) as f64;
    row.accepted_per_step = right as f64 / steps.max(1) as f64;
    if let Some(speculation) = drafted.speculation() {
        let steps = speculation.step_seconds().into_iter();
        row.step_ms = steps.map(|(rows, seconds)| (rows, 1e3 * seconds)).collect();
        row.off = speculation.take_note();
    }
    let passes = [tokens, tokens - right / spec.repeats.max(1)];
    let mut rows = seconds.into_iter().zip(passes).map(|(seconds, passes)| {
        let per_token = seconds.iter().map(|s| 1e3 * s / tokens as f64);
        let sample = Sample {
            test: test.clone(),
            tokens,
            passes,
            step_ms: per_token.collect(),
            seconds,
            read_gb_s: read_gb_s.clone(),
            choices: None,
        };
        let bench = super::BenchSpec {
            prompt_tokens: 0,
            gen_tokens: tokens,
            depth: answers.first().map_or(0, |a| a.0.len()),
            batch: 1,
            repeats: spec.repeats,
            kv: spec.kv,
            prompt_rows: engine.description().prompt_rows(),
            draws: false,
        };
        sample.row(engine, &bench, machine)
    });
    let (Some(without), Some(mut with)) = (rows.next(), rows.next()) else {
        unreachable!("there are two samples");
    };
    with.drafts = Some(row);
    Ok([without, with])
}

/// One answer of exactly `n` tokens.
fn decode(
    session: &mut dyn Session,
    sequence: &mut Sequence,
    spec: &TextSpec<'_>,
    prompt: &[u32],
    n: usize,
    stream: u64,
) -> Result<Generated> {
    let sampling = match spec.answer {
        BenchAnswer::Own { sampling, .. } => sampling,
        BenchAnswer::Replayed { .. } => SamplingParams::greedy(),
    };
    let limits = GenerationLimits {
        stop: &[],
        max_tokens: n,
        interrupt: None,
    };
    let mut sampler = Sampler::new(sampling, stream)?;
    let each = &mut |_| ControlFlow::Continue(());
    Ok(generate(
        session,
        sequence,
        prompt,
        &mut sampler,
        &limits,
        each,
    )?)
}
