//! Drafting on a device that draws tokens itself: all steps are queued before the host waits for the first
//! token.

use super::{Active, DraftModel};
use crate::error::{Error, Result};
use crate::interface::{Chunk, Draft, LogitsWanted, StepsAhead};
use crate::sampler::{Sampler, SamplingParams};

/// From this number on, tokens of a text are computed together like a prompt; fewer get a step each.
const FEW: usize = 3;

/// Steps that are queued and not yet received.
#[derive(Default)]
struct Queued {
    /// Steps that feed tokens of texts; the tokens that they draw are not used.
    feeding: usize,
    /// Steps that draft.
    drafting: usize,
    /// True if there is no free page for another step.
    full: bool,
}

impl DraftModel {
    /// Drafts for `active`: draft `i` uses row `i` of the device.
    pub(super) fn draft_ahead(
        &mut self,
        drafts: &mut [Draft<'_>],
        mut active: Vec<Active>,
    ) -> Result<()> {
        if active.is_empty() {
            return Ok(());
        }
        let mut queued = Queued::default();
        let outcome = self.queue(&mut active, &mut queued);
        let received = self.receive(drafts, &active, &queued);
        outcome.and(received)?;
        let slots: Vec<usize> = active.iter().map(|g| g.slot).collect();
        if queued.full && queued.drafting == 0 && self.forget_others(&slots) {
            return self.draft_ahead(drafts, active);
        }
        Ok(())
    }

    /// Queues all steps for which there are pages. Tokens that are still to be fed, at least a text's last one,
    /// stay in `active`.
    fn queue(&mut self, active: &mut [Active], queued: &mut Queued) -> Result<()> {
        let best = Sampler::new(SamplingParams::greedy(), 0)?;
        let Some(device) = self.session.ahead() else {
            return Ok(());
        };
        let mut prompts = 0;
        for (row, active) in active.iter_mut().enumerate() {
            let held = &mut self.held[active.slot];
            let early = active.feed.len() - 1;
            if early >= FEW {
                let chunk = Chunk {
                    slot: active.slot,
                    tokens: &active.feed[..early],
                    logits: LogitsWanted::None,
                };
                if no_page(device.queue_prompts(&[chunk]))? {
                    queued.full = true;
                    break;
                }
                prompts += 1;
                held.extend(active.feed.drain(..early));
            }
            while active.feed.len() > 1 && !queued.full {
                device.seat(row, active.slot, active.feed[0], &best)?;
                match no_page(device.queue())? {
                    true => queued.full = true,
                    false => {
                        queued.feeding += 1;
                        held.push(active.feed.remove(0));
                    }
                }
                device.vacate(row)?;
            }
        }
        if !queued.full {
            queue_drafts(device, active, &best, queued)?;
        }
        for _ in 0..prompts {
            device.finish_prompts()?;
        }
        Ok(())
    }

    /// Waits for all queued steps and appends the tokens that they drew to `drafts`.
    fn receive(
        &mut self,
        drafts: &mut [Draft<'_>],
        active: &[Active],
        queued: &Queued,
    ) -> Result<()> {
        let Some(device) = self.session.ahead() else {
            return Ok(());
        };
        let mut failed = None;
        for _ in 0..queued.feeding {
            device.receive(&mut |_, _| {})?;
        }
        for step in 0..queued.drafting {
            device.receive(&mut |row, token| {
                let Some(active) = active.get(row).filter(|g| step < g.most) else {
                    return;
                };
                let tokens = &mut drafts[active.at].tokens;
                let fed = tokens.last().or(active.feed.last());
                self.held[active.slot].extend(fed);
                match token {
                    Ok(drawn) => tokens.push(drawn.token),
                    Err(e) => {
                        tokens.push(0);
                        failed.get_or_insert(e);
                    }
                }
            })?;
        }
        for active in active {
            let tokens = &mut drafts[active.at].tokens;
            let known = tokens.iter().take_while(|&&t| (t as usize) < self.vocab);
            let known = known.count();
            tokens.truncate(known);
        }
        failed.map_or(Ok(()), Err)
    }
}

/// Assigns rows to all active drafts and queues steps until each has its number of tokens.
fn queue_drafts(
    device: &mut dyn StepsAhead,
    active: &[Active],
    best: &Sampler,
    queued: &mut Queued,
) -> Result<()> {
    for (row, active) in active.iter().enumerate() {
        device.seat(row, active.slot, active.feed[0], best)?;
    }
    let longest = active.iter().map(|g| g.most).max().unwrap_or(0);
    while queued.drafting < longest && !queued.full {
        match no_page(device.queue())? {
            true => queued.full = true,
            false => queued.drafting += 1,
        }
        for (row, active) in active.iter().enumerate() {
            if active.most == queued.drafting || active.most > queued.drafting && queued.full {
                device.vacate(row)?;
            }
        }
    }
    Ok(())
}

/// True if queueing failed because there was no free page.
fn no_page(queued: Result<()>) -> Result<bool> {
    match queued {
        Ok(()) => Ok(false),
        Err(Error::PagesFull { .. }) => Ok(true),
        Err(e) => Err(e),
    }
}
