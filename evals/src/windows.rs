//! Cuts a text into windows and feeds them to a model.

use crate::error::{Error, Result};
use crate::report::Protocol;
use nq_formats::tokenizer::Around;
use nq_formats::{Progress, Unit};
use nq_runtime::{Chunk, Engine, KvType, Logits, LogitsWanted, Session, SessionSpec};
use std::ops::Range;

/// Most bytes of one forward's logits. This limits the rows requested at once: 220 for
/// Qwen3's vocabulary of 151,936.
pub(crate) const LOGIT_BYTES: usize = 128 << 20;

/// Rows of logits of `vocab` numbers that are requested at once.
pub(crate) fn logit_rows(vocab: usize) -> usize {
    (LOGIT_BYTES / (4 * vocab)).max(1)
}

/// The specification of a measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalSpec {
    /// How windows are cut and which tokens are scored.
    pub protocol: Protocol,
    /// Length of a window in tokens.
    pub ctx: usize,
    /// Type that keys and values are rounded to.
    pub kv: KvType,
    /// Most windows; `None`: all windows of the text.
    pub max_windows: Option<usize>,
    /// Name of the text, for the report.
    pub text: String,
    /// Most tokens of one forward. It affects the speed, not the result.
    pub rows: usize,
}

impl EvalSpec {
    /// All windows of `ctx` tokens, with the same KV cache as chat.
    pub fn new(protocol: Protocol, ctx: usize, text: impl Into<String>) -> Self {
        EvalSpec {
            protocol,
            ctx,
            kv: KvType::F16,
            max_windows: None,
            text: text.into(),
            rows: 512,
        }
    }

    /// Positions of a window whose logits are scored, each against the next token
    /// in the window: `ctx - 1` positions for hf; for llama those from the middle on, as in
    /// `llama-perplexity`.
    pub fn scored(&self) -> Range<usize> {
        let first = match self.protocol {
            Protocol::Hf | Protocol::Texts => 0,
            Protocol::Llama => self.ctx / 2,
        };
        first..self.ctx.saturating_sub(1)
    }

    /// The tokens of a text that are measured, of all that it has with those that the tokenizer adds `around` it. As in
    /// `llama-perplexity`, the begin token takes the place of the first one of each window of the llama protocol.
    pub fn begun(&self, mut tokens: Vec<u32>, around: &Around) -> Vec<u32> {
        if let (Protocol::Llama, Some(&begin)) = (self.protocol, around.before.first()) {
            let windows = tokens.chunks_mut(self.ctx.max(1));
            windows.for_each(|window| window[0] = begin);
        }
        tokens
    }

    /// Number of whole windows that will be scored in a text of `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Spec`] for a context without scored tokens or no rows;
    /// [`Error::TextTooShort`] if there is no whole window.
    pub fn windows(&self, tokens: usize) -> Result<usize> {
        if self.scored().is_empty() {
            return Err(Error::Spec {
                what: "ctx",
                expected: "a window with tokens to score (at least 2 for hf, 3 for llama)".into(),
                found: self.ctx.to_string(),
            });
        }
        if self.rows == 0 || self.max_windows == Some(0) {
            return Err(Error::Spec {
                what: "rows and windows",
                expected: "at least 1".into(),
                found: "0".into(),
            });
        }
        match tokens / self.ctx {
            0 => Err(Error::TextTooShort {
                text: self.text.clone(),
                tokens,
                ctx: self.ctx,
            }),
            n => Ok(n.min(self.max_windows.unwrap_or(n))),
        }
    }
}

/// The place of a row of logits in the text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogitsRow {
    /// Window, counted from 0.
    pub(crate) window: usize,
    /// Position of the token whose logits these are, in the window.
    pub(crate) position: usize,
    /// The next token.
    pub(crate) target: u32,
}

/// A text divided for feeding.
pub(crate) struct Plan<'a> {
    tokens: &'a [u32],
    ctx: usize,
    scored: Range<usize>,
    windows: usize,
    slots: usize,
    rows: usize,
    logit_rows: usize,
    kv: KvType,
}

impl<'a> Plan<'a> {
    /// Divides `tokens` for the model of `engine`.
    pub(crate) fn new(tokens: &'a [u32], spec: &EvalSpec, engine: &dyn Engine) -> Result<Self> {
        let windows = spec.windows(tokens.len())?;
        let config = engine.config();
        if spec.ctx > config.max_position_embeddings {
            return Err(Error::Spec {
                what: "ctx",
                expected: format!("at most the model's {}", config.max_position_embeddings),
                found: spec.ctx.to_string(),
            });
        }
        let vocab = config.vocab_size;
        let used = &tokens[..windows * spec.ctx];
        if let Some(i) = used.iter().position(|&t| t as usize >= vocab) {
            return Err(Error::Spec {
                what: "token ids",
                expected: format!("below the model's vocabulary of {vocab}"),
                found: format!("{} at token {i} of {}", used[i], spec.text),
            });
        }
        let logit_rows = logit_rows(vocab);
        let rows = spec.rows;
        Ok(Plan {
            tokens: used,
            ctx: spec.ctx,
            scored: spec.scored(),
            windows,
            // Several short windows share a forward; one longer than a forward is fed alone.
            slots: (rows.min(logit_rows) / spec.ctx).clamp(1, windows),
            rows,
            logit_rows: logit_rows.min(rows),
            kv: spec.kv,
        })
    }

    /// Number of windows.
    pub(crate) fn windows(&self) -> usize {
        self.windows
    }

    /// Total number of scored tokens.
    pub(crate) fn total(&self) -> usize {
        self.windows * self.scored.len()
    }

    /// Total number of tokens fed. The last token of a window predicts nothing and is not fed.
    fn fed(&self) -> usize {
        self.windows * self.scored.end
    }

    /// The tokens of one window.
    pub(crate) fn window(&self, window: usize) -> &'a [u32] {
        &self.tokens[window * self.ctx..(window + 1) * self.ctx]
    }

    /// A session of `engine` that can run this plan.
    pub(crate) fn session(&self, engine: &dyn Engine) -> Result<Box<dyn Session>> {
        Ok(engine.session(SessionSpec {
            slots: self.slots,
            ctx: self.ctx,
            kv: self.kv,
            max_rows: self.rows,
            ..SessionSpec::default()
        })?)
    }

    /// Index of a place in arrays over all scored tokens, in text order.
    pub(crate) fn index(&self, place: LogitsRow) -> usize {
        place.window * self.scored.len() + (place.position - self.scored.start)
    }

    /// Divides the positions `0..scored.end` of `slots` windows that are fed together: first those
    /// that need no logits, then those that do.
    fn pieces(&self, slots: usize) -> Vec<Range<usize>> {
        let mut pieces = Vec::new();
        let mut cut = |range: Range<usize>, limit: usize| {
            let piece = (limit / slots).max(1);
            for start in range.clone().step_by(piece) {
                pieces.push(start..(start + piece).min(range.end));
            }
        };
        cut(0..self.scored.start, self.rows);
        cut(self.scored.clone(), self.logit_rows);
        pieces
    }

    /// Feeds every window to all `sessions` in lockstep. `visit` gets the logits of each
    /// session for the same places.
    pub(crate) fn run(
        &self,
        sessions: &mut [Box<dyn Session>],
        stage: &str,
        progress: &dyn Progress,
        mut visit: impl FnMut(&[Logits<'_>], &[LogitsRow]) -> Result<()>,
    ) -> Result<()> {
        let _stage = StageGuard::begin(progress, stage, self.fed() as u64, Unit::Tokens);
        for first in (0..self.windows).step_by(self.slots) {
            let slots = self.slots.min(self.windows - first);
            for piece in self.pieces(slots) {
                let wanted = if piece.start < self.scored.start {
                    LogitsWanted::None
                } else {
                    LogitsWanted::All
                };
                let chunks: Vec<Chunk<'_>> = (0..slots)
                    .map(|slot| Chunk {
                        slot,
                        tokens: &self.window(first + slot)[piece.clone()],
                        logits: wanted.clone(),
                    })
                    .collect();
                let logits = sessions
                    .iter_mut()
                    .map(|s| s.forward(&chunks, None))
                    .collect::<Result<Vec<_>, _>>()?;
                if wanted == LogitsWanted::All {
                    let places: Vec<LogitsRow> = (first..first + slots)
                        .flat_map(|window| piece.clone().map(move |position| (window, position)))
                        .map(|(window, position)| LogitsRow {
                            window,
                            position,
                            target: self.window(window)[position + 1],
                        })
                        .collect();
                    visit(&logits, &places)?;
                }
                progress.advance((slots * piece.len()) as u64);
            }
            for session in sessions.iter_mut() {
                for slot in 0..slots {
                    session.truncate(slot, 0);
                }
            }
        }
        Ok(())
    }
}

/// Ends a stage of progress when dropped.
pub(crate) struct StageGuard<'a>(&'a dyn Progress);

impl<'a> StageGuard<'a> {
    pub(crate) fn begin(progress: &'a dyn Progress, name: &str, total: u64, unit: Unit) -> Self {
        progress.begin(name, total, unit);
        StageGuard(progress)
    }
}

impl Drop for StageGuard<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}
