//! Drafts on a device that draws tokens itself: all steps are queued before the first token is waited
//! for.

use super::{DraftModel, Going};
use crate::batch::StepsAhead;
use crate::engine::{Chunk, LogitsWanted};
use crate::error::{Error, Result};
use crate::sampler::{Sampler, SamplingParams};
use crate::speculation::Draft;

/// Tokens of a text that go through steps of their own: more are computed together, as a prompt is.
const FEW: usize = 3;

/// Steps that are queued and not received.
#[derive(Default)]
struct Queued {
    /// Steps that feed tokens of texts: what they draw is not used.
    feeding: usize,
    /// Steps that draft.
    drafting: usize,
    /// True if there is no page for more.
    full: bool,
}

impl DraftModel {
    /// Drafts for `going`, which sit in as many rows of the device.
    pub(super) fn draft_ahead(
        &mut self,
        drafts: &mut [Draft<'_>],
        mut going: Vec<Going>,
    ) -> Result<()> {
        if going.is_empty() {
            return Ok(());
        }
        let mut queued = Queued::default();
        let outcome = self.queue(&mut going, &mut queued);
        let received = self.receive(drafts, &going, &queued);
        outcome.and(received)?;
        let slots: Vec<usize> = going.iter().map(|g| g.slot).collect();
        if queued.full && queued.drafting == 0 && self.forget_others(&slots) {
            return self.draft_ahead(drafts, going);
        }
        Ok(())
    }

    /// Queues all steps, as far as there are pages: what is still to be fed of a text stays in `going`,
    /// its last token at least.
    fn queue(&mut self, going: &mut [Going], queued: &mut Queued) -> Result<()> {
        let best = Sampler::new(SamplingParams::greedy(), 0)?;
        let Some(device) = self.session.steps_ahead() else {
            return Ok(());
        };
        let mut prompts = 0;
        for (row, going) in going.iter_mut().enumerate() {
            let held = &mut self.held[going.slot];
            let early = going.feed.len() - 1;
            if early >= FEW {
                let chunk = Chunk {
                    slot: going.slot,
                    tokens: &going.feed[..early],
                    logits: LogitsWanted::None,
                };
                if no_page(device.queue_prompts(&[chunk]))? {
                    queued.full = true;
                    break;
                }
                prompts += 1;
                held.extend(going.feed.drain(..early));
            }
            while going.feed.len() > 1 && !queued.full {
                device.seat(row, going.slot, going.feed[0], &best)?;
                match no_page(device.queue())? {
                    true => queued.full = true,
                    false => {
                        queued.feeding += 1;
                        held.push(going.feed.remove(0));
                    }
                }
                device.vacate(row)?;
            }
        }
        if !queued.full {
            queue_drafts(device, going, &best, queued)?;
        }
        for _ in 0..prompts {
            device.finish_prompts()?;
        }
        Ok(())
    }

    /// Waits for all queued steps and takes what they drafted.
    fn receive(
        &mut self,
        drafts: &mut [Draft<'_>],
        going: &[Going],
        queued: &Queued,
    ) -> Result<()> {
        let Some(device) = self.session.steps_ahead() else {
            return Ok(());
        };
        let mut failed = None;
        for _ in 0..queued.feeding {
            device.receive(&mut |_, _| {})?;
        }
        for step in 0..queued.drafting {
            device.receive(&mut |row, token| {
                let Some(going) = going.get(row).filter(|g| step < g.most) else {
                    return;
                };
                let tokens = &mut drafts[going.at].tokens;
                let fed = tokens.last().or(going.feed.last());
                self.held[going.slot].extend(fed);
                match token {
                    Ok(drawn) => tokens.push(drawn.token),
                    Err(e) => {
                        tokens.push(0);
                        failed.get_or_insert(e);
                    }
                }
            })?;
        }
        for going in going {
            let tokens = &mut drafts[going.at].tokens;
            let known = tokens.iter().take_while(|&&t| (t as usize) < self.vocab);
            let known = known.count();
            tokens.truncate(known);
        }
        failed.map_or(Ok(()), Err)
    }
}

/// Seats all, and queues steps until each has drafted what it should.
fn queue_drafts(
    device: &mut dyn StepsAhead,
    going: &[Going],
    best: &Sampler,
    queued: &mut Queued,
) -> Result<()> {
    for (row, going) in going.iter().enumerate() {
        device.seat(row, going.slot, going.feed[0], best)?;
    }
    let longest = going.iter().map(|g| g.most).max().unwrap_or(0);
    while queued.drafting < longest && !queued.full {
        match no_page(device.queue())? {
            true => queued.full = true,
            false => queued.drafting += 1,
        }
        for (row, going) in going.iter().enumerate() {
            if going.most == queued.drafting || going.most > queued.drafting && queued.full {
                device.vacate(row)?;
            }
        }
    }
    Ok(())
}

/// True if what was queued found no page.
fn no_page(queued: Result<()>) -> Result<bool> {
    match queued {
        Ok(()) => Ok(false),
        Err(Error::PagesFull { .. }) => Ok(true),
        Err(e) => Err(e),
    }
}
