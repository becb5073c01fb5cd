//! Drafts on a device that draws tokens itself. A step that checks drafts is queued only after the host has
//! received all tokens drawn so far, and the host waits for that step.

use super::{Batch, Each, Member, Ran, record};
use crate::error::{Error, Result};
use crate::interface::{Drawn, Run};
use std::time::Instant;

/// With more sequences than this, nothing is drafted: steps would have to stop running ahead for all of them.
const MOST_SEQUENCES: usize = 4;

/// The drafts for the sequences of a batch.
pub(super) enum Drafts {
    /// None: steps run ahead.
    None,
    /// There will be drafts once the queued steps have been received.
    Coming,
    /// The drafted tokens of each member; there may be none, if the drafter reads every step.
    Here(Vec<Vec<u32>>),
}

impl Batch<'_> {
    /// True if drafts may be found for a member: steps that run far ahead would be late for them.
    pub(super) fn is_drafting(&self) -> bool {
        self.members.len() <= MOST_SEQUENCES
            && self.speculation.as_ref().is_some_and(|speculation| {
                let mut slots = self.members.iter().map(|m| m.slot);
                slots.any(|slot| speculation.follows(slot))
            })
    }

    /// True if a drafter reads the streams of every step: those of steps that run ahead would be missing.
    pub(super) fn reads_every_step(&self) -> bool {
        self.is_drafting() && (self.speculation.as_ref()).is_some_and(|s| s.reads_streams())
    }

    /// The drafts after the text that the host knows.
    pub(super) fn drafts_ahead(&mut self) -> Drafts {
        let (ctx, most_rows) = (self.session.spec().ctx, self.session.draft_rows());
        let (queued, reads) = (self.queue.steps(), self.reads_every_step());
        let (Some(speculation), false) = (&mut self.speculation, self.queue.has_prompts()) else {
            return Drafts::None;
        };
        for member in self.members.iter().filter(|m| m.sampler.adjusts()) {
            speculation.refuse(
                member.slot,
                "nothing is drafted for answers with penalties, biases or a mask: this device keeps \
                 them for one token of a sequence at a time",
            );
        }
        let can_draft = |m: &Member| {
            m.blocked.is_none() && !m.sampler.adjusts() && m.text_len() + m.queued < ctx
        };
        let few = (1..=MOST_SEQUENCES).contains(&self.members.len());
        if !few || !self.members.iter().all(can_draft) {
            return Drafts::None;
        }
        let members = self.members.iter();
        let wanted: Vec<(usize, usize)> = members.map(|m| (m.slot, m.most_drafts(ctx))).collect();
        if queued > 0 {
            return match speculation.would_draft(&wanted, wanted.len(), most_rows) {
                true => Drafts::Coming,
                false => Drafts::None,
            };
        }
        let drafts = speculation.draft(&wanted, wanted.len(), most_rows);
        match reads || drafts.iter().any(|d| !d.is_empty()) {
            true => Drafts::Here(drafts),
            false => Drafts::None,
        }
    }

    /// Runs a step over every member's next token and draft, and passes on the tokens drawn up to the first one
    /// that differs from the draft. Returns false, with nothing done, if there are no pages for the drafts.
    pub(super) fn check_drafts(
        &mut self,
        drafts: &[Vec<u32>],
        each: &mut Each<'_>,
    ) -> Result<bool> {
        self.queue_lost()?;
        if self.members.iter().any(|m| m.blocked.is_some()) {
            return Ok(false);
        }
        let Some(device) = self.session.ahead() else {
            return Ok(false);
        };
        for member in &mut self.members {
            if let Some(row) = member.row.take() {
                device.vacate(row)?;
            }
        }
        let members = self.members.iter().zip(drafts);
        let fed: Vec<Vec<u32>> = members.map(|(m, d)| [&m.feed[..], d].concat()).collect();
        let members = self.members.iter().zip(&fed);
        let runs: Vec<Run<'_>> = members
            .map(|(m, tokens)| Run {
                slot: m.slot,
                tokens,
                sampler: &m.sampler,
            })
            .collect();
        let begun = Instant::now();
        match device.queue_runs(&runs) {
            Err(Error::PagesFull { .. }) => return Ok(false),
            queued => queued?,
        }
        while self.queue.has_prompts() {
            self.finish_prompts()?;
        }
        let mut drawn = Vec::new();
        if let Some(device) = self.session.ahead() {
            device.receive(&mut |_, token| drawn.push(token))?;
        }
        let took = begun.elapsed();
        self.ran.push(Ran {
            took,
            decoding: fed.len(),
            prompt_rows: 0,
        });
        if let Some(speculation) = self.speculation() {
            let rows = fed.iter().map(Vec::len).sum();
            speculation.measured(rows, took.as_secs_f64());
        }
        let slots: Vec<usize> = self.members.iter().map(|m| m.slot).collect();
        let mut drawn = drawn.into_iter();
        for (slot, draft) in slots.into_iter().zip(drafts) {
            let own = drawn.by_ref().take(draft.len() + 1).collect();
            self.accept(slot, draft, own, each);
        }
        Ok(true)
    }

    /// Gives out what the sequence in `slot`, whose cache also holds `draft`, drew behind each of its
    /// tokens, as far as the draft was right and until it leaves; the rest is forgotten.
    fn accept(
        &mut self,
        slot: usize,
        draft: &[u32],
        drawn: Vec<Result<Drawn>>,
        each: &mut Each<'_>,
    ) {
        let pairs = drawn.iter().zip(draft);
        let right = pairs.take_while(|(a, b)| a.as_ref().is_ok_and(|a| a.token == **b));
        let right = right.count();
        if let (Some(speculation), Some(Ok(_))) = (self.speculation(), drawn.first()) {
            speculation.checked(slot, draft.len(), right);
        }
        for token in drawn.into_iter().take(right + 1) {
            let Some(at) = self.members.iter().position(|m| m.slot == slot) else {
                return;
            };
            let member = &mut self.members[at];
            let token = token.map(|drawn| record(&mut member.sampler, drawn));
            member.left -= usize::from(token.is_ok());
            self.deliver(at, token, true, each);
        }
        self.forget_drafts(slot);
    }
}
