//! The drafter of an EAGLE-3 head on the CPU.

use super::eagle::EagleModel;
use crate::error::Result;
use crate::interface::{Draft, Drafter, SessionSpec, Tapped};
use nq_formats::eagle::TAPS;
use nq_kernels::cpu::KvPages;
use nq_kernels::pages::PAGE;
use std::sync::Arc;

/// Drafts with an [`EagleModel`].
pub(crate) struct EagleDrafts {
    model: Arc<EagleModel>,
    cache: KvPages,
    slots: Vec<Slot>,
    ctx: usize,
}

/// What the head knows of a sequence. Row `i` is the token at `first + i + 1` of the text with the residual streams of
/// the token before it.
#[derive(Default)]
struct Slot {
    table: Vec<u32>,
    /// Position of the first token whose streams are known.
    first: usize,
    /// Tokens of the rows that the cache holds.
    fed: Vec<u32>,
    /// Streams of the rows after those, `[rows, 3 hidden]`.
    streams: Vec<f32>,
    /// The head's own stream after the last row that was fed.
    last: Vec<f32>,
}

impl Slot {
    /// Number of rows whose streams were seen.
    fn seen(&self, width: usize) -> usize {
        self.fed.len() + self.streams.len() / width
    }

    /// Begins a sequence of its own with the streams that wait: the text has changed before them, and with it the
    /// token of a row whose streams are not kept.
    fn restart(&mut self) {
        self.first += self.fed.len();
        self.fed.clear();
        self.last.clear();
    }

    /// Forgets all but the first `rows` rows.
    fn truncate(&mut self, rows: usize, width: usize) {
        let waiting = rows.saturating_sub(self.fed.len());
        self.streams.truncate(waiting * width);
        if rows < self.fed.len() {
            self.fed.truncate(rows);
            self.last.clear();
        }
    }
}

impl EagleDrafts {
    /// Drafts with `model` for a session of `spec`.
    pub(crate) fn new(model: &Arc<EagleModel>, spec: &SessionSpec) -> Self {
        let pages = spec.ctx.div_ceil(PAGE);
        let slot = |slot: usize| Slot {
            table: (slot * pages..(slot + 1) * pages)
                .map(|p| p as u32)
                .collect(),
            ..Slot::default()
        };
        EagleDrafts {
            cache: model.cache(spec.slots * pages),
            slots: (0..spec.slots).map(slot).collect(),
            ctx: spec.ctx,
            model: Arc::clone(model),
        }
    }

    fn width(&self) -> usize {
        TAPS * self.model.config.hidden_size
    }

    /// Feeds the rows of the draft's text that are new. False if nothing can be drafted: the streams of its last
    /// tokens are unknown, or the text has tokens that the model does not know.
    fn catch_up(&mut self, draft: &Draft<'_>) -> Result<bool> {
        let (width, model) = (self.width(), &self.model);
        let Some(slot) = self.slots.get_mut(draft.slot) else {
            return Ok(false);
        };
        let text = draft.text;
        if text.len() > self.ctx {
            return Ok(false);
        }
        let same = |(fed, token): (&u32, &u32)| fed == token;
        if !slot
            .fed
            .iter()
            .zip(text.iter().skip(slot.first + 1))
            .all(same)
        {
            slot.restart();
        }
        let Some(tokens) = text.get(slot.first + 1..).filter(|t| !t.is_empty()) else {
            return Ok(false);
        };
        slot.truncate(tokens.len(), width);
        if slot.seen(width) < tokens.len() {
            return Ok(false);
        }
        let new = &tokens[slot.fed.len()..];
        let vocab = model.config.vocab_size;
        if new.iter().any(|&t| t as usize >= vocab) {
            return Ok(false);
        }
        if !new.is_empty() {
            let at = slot.fed.len();
            let cache = (&mut self.cache, &slot.table[..]);
            slot.last = model.feed(cache, at, new, &slot.streams)?;
            slot.fed.extend_from_slice(new);
            slot.streams.clear();
        }
        Ok(!slot.last.is_empty())
    }
}

impl Drafter for EagleDrafts {
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
        for draft in drafts {
            if !self.catch_up(draft)? {
                continue;
            }
            let (model, slot) = (&self.model, &mut self.slots[draft.slot]);
            let (mut x, mut at) = (slot.last.clone(), slot.fed.len());
            let capacity = slot.table.len() * PAGE;
            while draft.tokens.len() < draft.most {
                let token = model.draft(&x)?;
                draft.tokens.push(token);
                if draft.tokens.len() == draft.most || at == capacity {
                    break;
                }
                // The rows of drafted tokens are written over by those of the text.
                x = model.feed_draft((&mut self.cache, &slot.table), at, token, x)?;
                at += 1;
            }
        }
        Ok(())
    }

    fn reads_streams(&self) -> bool {
        true
    }

    fn see(&mut self, slot: usize, tapped: Tapped) {
        let width = self.width();
        let Some(slot) = self.slots.get_mut(slot) else {
            return;
        };
        let end = slot.first + slot.seen(width);
        if (slot.first..=end).contains(&tapped.position) {
            slot.truncate(tapped.position - slot.first, width);
        } else {
            // What is between is unknown: the head sees the text from here on.
            slot.truncate(0, width);
            slot.streams.clear();
            slot.first = tapped.position;
        }
        slot.streams.extend_from_slice(&tapped.rows);
    }
}
