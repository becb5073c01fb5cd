//! Speculative decoding: a drafter guesses tokens, the model computes all of them in one step, and they
//! are kept as far as its sampler draws the same ones.
//!
//! A guess is accepted if the sampler draws the same token at that position. Draws depend only on seed, stream
//! and position. So, at any sampler settings, the text is the same as without drafts if the device computes a
//! few rows exactly as it computes one ([`Session::exact_rows`](crate::Session)). On other devices it may
//! differ where two tokens are almost equally likely, as it may with the number of sequences in a batch.
//!
//! [`Ngram`] guesses from the text itself (prompt lookup), also beside other drafters, [`DraftModel`] with a smaller
//! model, a [`StreamHead`](crate::interface::StreamHead) with a layer that reads what the model computes. A
//! [`Batch`](crate::Batch) that has a [`Speculation`] asks it in each step how many rows to add for each
//! sequence. The answer is the number that gives the most tokens per second, from the measured times of steps
//! and drafts and the acceptance rate.

mod cost;
pub mod head;
mod model;
mod ngram;

pub use cost::Costs;
pub use model::DraftModel;
pub use ngram::Ngram;

use crate::error::{Error, Result};
use crate::interface::{Draft, Drafter, KINDS, Session};
use cost::{CostModel, Demand};
use std::collections::BTreeMap;
use std::ops::Sub;
use std::time::Instant;

/// Counts of drafted and accepted tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Steps in which a sequence was continued, with a draft or without.
    pub steps: usize,
    /// Tokens that were drafted and checked.
    pub drafted: usize,
    /// Drafted tokens that were accepted.
    pub accepted: usize,
}

impl Sub for DraftCounts {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        DraftCounts {
            steps: self.steps - before.steps,
            drafted: self.drafted - before.drafted,
            accepted: self.accepted - before.accepted,
        }
    }
}

/// A drafter, the sequences that it follows, their acceptance rates, and the measured costs.
pub struct Speculation {
    drafter: Box<dyn Drafter>,
    /// Copies from the text, beside a drafter that takes time.
    copies: Option<Ngram>,
    /// Steps run ahead of the host while nothing is drafted.
    ahead: bool,
    costs: CostModel,
    /// By slot.
    followed: BTreeMap<usize, Followed>,
    /// Draft even if that does not raise the speed.
    always: bool,
    /// Tokens drafted for a sequence in a step, at most.
    most: usize,
    counts: DraftCounts,
    /// The reason why drafting stopped, until [`Speculation::take_note`] takes it.
    note: Option<String>,
    /// A reason has been noted; there is no second note.
    noted: bool,
    /// That drafting does not pay is not noted.
    quiet: bool,
    /// The drafter has failed.
    failed: bool,
}

/// A sequence whose tokens are drafted.
struct Followed {
    /// All its tokens, the one that is fed next included.
    text: Vec<u32>,
    /// Acceptance rate by kind of guess; recent tokens weigh most.
    acceptance: [f64; KINDS],
    /// Kind of the latest guess.
    kind: usize,
    /// Acceptance rate of copies from the text, by kind.
    copies: [f64; KINDS],
    /// Kind of the latest guess if it was such a copy.
    copied: Option<usize>,
    /// Tokens of the drafter checked, and the number of them that were accepted.
    checked: (usize, usize),
    /// Checked tokens that count for the acceptance rate: all up to the first rejected one of a draft. Those
    /// after it were drafted for another text.
    judged: usize,
    /// The drafter has stopped; the text is still copied from.
    only_copies: bool,
    /// Drafting has stopped.
    off: bool,
}

impl Followed {
    /// Acceptance rate of guesses of the latest kind.
    fn expected(&self) -> f64 {
        self.acceptance[self.kind]
    }
}

/// The least kind of a copy that is taken without asking a drafter that takes time.
const COPY_KIND: usize = 1;
/// Acceptance rates assumed at first, by kind, of a free drafter.
const PRIOR_FREE: [f64; KINDS] = [0.5, 0.8, 0.95];
/// The same of an expensive drafter.
const PRIOR_EXPENSIVE: [f64; KINDS] = [0.8; KINDS];
/// Weight of the latest token in the acceptance rate of a free drafter, whose matches may become better or
/// worse at any place in a text.
const WEIGHT_FREE: f64 = 0.2;
/// The least such weight of an expensive drafter. Its acceptance rate hardly changes within a text, so a few
/// rejected tokens must not stop it.
const WEIGHT_EXPENSIVE: f64 = 0.01;
/// Number of judged tokens that the prior of an expensive drafter weighs as much as.
const PRIOR_TOKENS: usize = 4;
/// Share of the distance to its prior that the acceptance rate of a free drafter regains in each step without
/// drafts: a text may begin to repeat itself.
const RECOVERY: f64 = 0.01;
/// Tokens of an expensive drafter to judge before its drafts are turned off.
const TRIAL: usize = 16;

impl Speculation {
    /// Drafts with `drafter`, as many tokens as make decoding fastest.
    pub fn new(drafter: Box<dyn Drafter>) -> Self {
        let costs = match drafter.is_free() {
            true => CostModel::default(),
            false => CostModel::expensive(),
        };
        Speculation {
            drafter,
            copies: None,
            ahead: false,
            costs,
            followed: BTreeMap::new(),
            always: false,
            most: usize::MAX,
            counts: DraftCounts::default(),
            note: None,
            noted: false,
            quiet: false,
            failed: false,
        }
    }

    /// Drafts from the text itself (prompt lookup).
    pub fn ngram() -> Self {
        Speculation::new(Box::<Ngram>::default())
    }

    /// Copies from the text what followed its last words there, and asks the drafter where these are new.
    pub fn with_copies(mut self) -> Self {
        self.copies = (!self.drafter.is_free()).then(Ngram::default);
        self
    }

    /// Notes no more that drafting stopped because it does not pay: nobody asked for it.
    pub fn quietly(mut self) -> Self {
        self.quiet = true;
        self
    }

    /// Always drafts as many tokens as fit, even if that is slower, e.g. to measure the cost.
    pub fn always(mut self) -> Self {
        self.always = true;
        self
    }

    /// Decides by these times instead of measured ones, so that the same drafts are made in every run.
    pub fn with_costs(mut self, costs: Costs) -> Self {
        self.costs.given = Some(costs);
        self
    }

    /// Drafts at most `tokens` tokens for a sequence in a step.
    pub fn at_most(mut self, tokens: usize) -> Self {
        self.most = tokens;
        self
    }

    /// Drafts for the sequence in `slot` until it leaves its batch. `text` is all its tokens; the last one is
    /// the next to be fed, or was just fed.
    pub fn follow(&mut self, slot: usize, text: Vec<u32>) {
        let followed = Followed {
            text,
            acceptance: match self.drafter.is_free() {
                true => PRIOR_FREE,
                false => PRIOR_EXPENSIVE,
            },
            kind: 0,
            copies: PRIOR_FREE,
            copied: None,
            checked: (0, 0),
            judged: 0,
            only_copies: false,
            off: false,
        };
        self.followed.insert(slot, followed);
    }

    /// Passes what the drafter reads of `session`'s latest work for these sequences to it.
    pub(crate) fn see(&mut self, session: &mut dyn Session, slots: impl Iterator<Item = usize>) {
        if !self.drafter.reads_streams() {
            return;
        }
        let Some(streams) = session.streams() else {
            return;
        };
        for slot in slots {
            let wants = |f: &Followed| !f.off && !f.only_copies;
            let wanted = !self.failed && self.followed.get(&slot).is_some_and(wants);
            let tapped = streams.take(slot).filter(|_| wanted);
            if let Some(tapped) = tapped {
                self.drafter.see(slot, tapped);
            }
        }
    }

    /// True if the drafter reads residual streams.
    pub(crate) fn reads_streams(&self) -> bool {
        self.drafter.reads_streams()
    }

    /// For a device whose steps run ahead of the host, and that computes `rounded(rows)` rows in a step that needs
    /// `rows`.
    pub(crate) fn runs_ahead(&mut self, rounded: fn(usize) -> usize) {
        self.ahead = true;
        self.costs.rounded = rounded;
    }

    /// All tokens of the sequence in `slot`, the one that is fed next included, if it is followed.
    pub(crate) fn text(&self, slot: usize) -> Option<&[u32]> {
        self.followed.get(&slot).map(|f| &f.text[..])
    }

    /// True if tokens of the sequence in `slot` may be drafted.
    pub(crate) fn follows(&self, slot: usize) -> bool {
        !self.failed && self.followed.get(&slot).is_some_and(|f| !f.off)
    }

    /// Stops drafting for the sequence in `slot`, for the reason `why`.
    pub(crate) fn refuse(&mut self, slot: usize, why: &str) {
        if let Some(followed) = self.followed.get_mut(&slot).filter(|f| !f.off) {
            followed.off = true;
            self.add_note(why.to_owned());
        }
    }

    /// Drafted and accepted tokens of all sequences.
    pub fn counts(&self) -> DraftCounts {
        self.counts
    }

    /// Number of rows and expected seconds of each kind of step that was measured.
    pub fn step_seconds(&self) -> Vec<(usize, f64)> {
        self.costs.known()
    }

    /// The reason why drafting stopped for a sequence; returned once.
    pub fn take_note(&mut self) -> Option<String> {
        self.note.take()
    }

    pub(crate) fn forget(&mut self, slot: usize) {
        self.followed.remove(&slot);
    }

    /// Appends `token` to the sequence in `slot`, which has drawn it and is fed it next.
    pub(crate) fn push(&mut self, slot: usize, token: u32) {
        if let Some(followed) = self.followed.get_mut(&slot) {
            followed.text.push(token);
        }
    }

    /// Drafts for the sequences of `wanted` (slot, tokens at most), in a step that has `rows` rows without drafts
    /// and at most `most_rows` with them. Sequences that are not followed get none.
    pub(crate) fn draft(
        &mut self,
        wanted: &[(usize, usize)],
        rows: usize,
        most_rows: usize,
    ) -> Vec<Vec<u32>> {
        let copied = self.copy(wanted, rows, most_rows);
        let rows = rows + copied.iter().map(Vec::len).sum::<usize>();
        let others = wanted.iter().zip(&copied);
        let others = others.map(|(&(slot, most), copy)| match copy.is_empty() {
            true => (slot, most),
            false => (slot, 0),
        });
        let mut drafts = self.draft_new(&others.collect::<Vec<_>>(), rows, most_rows);
        for (draft, copy) in drafts.iter_mut().zip(copied) {
            draft.extend(copy);
        }
        drafts
    }

    /// Copies from the text for those of `wanted` whose last tokens are there once more: see [`Speculation::draft`].
    fn copy(&mut self, wanted: &[(usize, usize)], rows: usize, most_rows: usize) -> Vec<Vec<u32>> {
        let none = vec![Vec::new(); wanted.len()];
        let (mut demands, room) = self.demands(wanted, rows, most_rows, true);
        let Some(mut copies) = self.copies.take() else {
            return none;
        };
        let found = ask(&mut copies, &self.followed, wanted, &demands);
        self.copies = Some(copies);
        let Ok(mut found) = found else {
            return none;
        };
        for ((demand, (tokens, kind)), (slot, _)) in demands.iter_mut().zip(&found).zip(wanted) {
            let Some(followed) = self.followed.get_mut(slot) else {
                continue;
            };
            let rate = followed.copies[*kind];
            let better = followed.only_copies || *kind >= COPY_KIND && rate >= followed.expected();
            followed.copied = (better && !tokens.is_empty()).then_some(*kind);
            *demand = Demand {
                acceptance: rate,
                most: if better { tokens.len() } else { 0 },
                free: true,
            };
        }
        let planned = self.plan(rows, room, &demands);
        for (((tokens, _), n), (slot, _)) in found.iter_mut().zip(planned).zip(wanted) {
            tokens.truncate(n);
            if n == 0 {
                self.followed.entry(*slot).and_modify(|f| f.copied = None);
            }
        }
        found.into_iter().map(|(tokens, _)| tokens).collect()
    }

    /// Drafts by the drafter: see [`Speculation::draft`].
    fn draft_new(
        &mut self,
        wanted: &[(usize, usize)],
        rows: usize,
        most_rows: usize,
    ) -> Vec<Vec<u32>> {
        let (mut demands, room) = self.demands(wanted, rows, most_rows, false);
        let drafted = match self.drafter.is_free() {
            // A free drafter is asked first, so that rows are divided among tokens that exist.
            true => self.ask(wanted, &demands).map(|mut found| {
                for ((demand, found), (slot, _)) in demands.iter_mut().zip(&found).zip(wanted) {
                    demand.most = found.len();
                    demand.acceptance = self.followed.get(slot).map_or(0.0, Followed::expected);
                }
                let planned = self.plan(rows, room, &demands);
                let cut = found.iter_mut().zip(planned);
                cut.for_each(|(found, n)| found.truncate(n));
                found
            }),
            false => {
                let planned = self.plan_expensive(wanted, rows, room, &demands);
                let planned = planned.into_iter().zip(&demands);
                let demands: Vec<Demand> = planned.map(|(most, d)| Demand { most, ..*d }).collect();
                self.ask(wanted, &demands)
            }
        };
        drafted.unwrap_or_else(|e| {
            self.failed = true;
            self.add_note(format!("nothing is drafted any more: {e}"));
            vec![Vec::new(); wanted.len()]
        })
    }

    /// True if [`Speculation::draft`] can be expected to draft something; an expensive drafter is not asked.
    pub(crate) fn would_draft(
        &mut self,
        wanted: &[(usize, usize)],
        rows: usize,
        most_rows: usize,
    ) -> bool {
        match self.drafter.is_free() {
            true => {
                let drafts = self.draft(wanted, rows, most_rows);
                drafts.iter().any(|d| !d.is_empty())
            }
            false => {
                if self
                    .copy(wanted, rows, most_rows)
                    .iter()
                    .any(|c| !c.is_empty())
                {
                    return true;
                }
                let (demands, room) = self.demands(wanted, rows, most_rows, false);
                let planned = self.plan_expensive(wanted, rows, room, &demands);
                planned.into_iter().any(|n| n > 0)
            }
        }
    }

    /// The demand of each of `wanted`, of the drafter or of copies, and the number of rows for all of them.
    fn demands(
        &self,
        wanted: &[(usize, usize)],
        rows: usize,
        most_rows: usize,
        copies: bool,
    ) -> (Vec<Demand>, usize) {
        let room = match self.failed {
            true => 0,
            false => most_rows.saturating_sub(rows),
        };
        let demand = |&(slot, most): &(usize, usize)| match self.followed.get(&slot) {
            Some(f) if !f.off && (copies || !f.only_copies) => Demand {
                acceptance: f.expected(),
                most: most.min(room).min(self.most),
                free: copies,
            },
            _ => Demand::default(),
        };
        (wanted.iter().map(demand).collect(), room)
    }

    /// Tokens to ask an expensive drafter for.
    fn plan_expensive(
        &mut self,
        wanted: &[(usize, usize)],
        rows: usize,
        room: usize,
        demands: &[Demand],
    ) -> Vec<usize> {
        let mut planned = self.plan(rows, room, demands);
        if !self.always {
            self.try_or_turn_off(wanted, demands, &mut planned);
        }
        planned
    }

    fn plan(&mut self, rows: usize, room: usize, demands: &[Demand]) -> Vec<usize> {
        match self.always {
            false => {
                let mut planned = self.costs.plan(rows, room, demands);
                self.costs.explore(rows, room, demands, &mut planned);
                planned
            }
            true => {
                let mut room = room;
                let mut take = |demand: &Demand| {
                    let n = demand.most.min(room);
                    room -= n;
                    n
                };
                demands.iter().map(&mut take).collect()
            }
        }
    }

    /// Asks the drafter for as many tokens as are demanded.
    fn ask(&mut self, wanted: &[(usize, usize)], demands: &[Demand]) -> Result<Vec<Vec<u32>>> {
        let begun = Instant::now();
        let found = ask(&mut *self.drafter, &self.followed, wanted, demands)?;
        let longest = found.iter().map(|(tokens, _)| tokens.len()).max();
        if let (Some(longest @ 1..), false) = (longest, self.drafter.is_free()) {
            let each = begun.elapsed().as_secs_f64() / longest as f64;
            self.costs.drafted(each);
        }
        let mut out = Vec::with_capacity(found.len());
        for (((tokens, kind), demand), (slot, _)) in found.into_iter().zip(demands).zip(wanted) {
            if demand.most > 0 {
                self.followed.entry(*slot).and_modify(|f| f.kind = kind);
            }
            out.push(tokens);
        }
        Ok(out)
    }

    /// While an expensive drafter does not seem to pay, it drafts one token at a time. It is turned off once
    /// enough tokens have been judged, or if its cost alone exceeds any gain.
    fn try_or_turn_off(
        &mut self,
        wanted: &[(usize, usize)],
        demands: &[Demand],
        planned: &mut [usize],
    ) {
        let mut turned_off = None;
        for ((&(slot, _), demand), n) in wanted.iter().zip(demands).zip(planned) {
            let Some(followed) = self.followed.get_mut(&slot) else {
                continue;
            };
            // Other sequences in the step change the result: the decision is made for this one alone.
            if demand.most == 0 || *n > 0 || self.costs.plan(1, demand.most, &[*demand])[0] > 0 {
                continue;
            }
            let too_expensive = followed.checked.0 == 0 && self.costs.knows_drafts();
            if too_expensive || followed.judged >= TRIAL {
                // A device that runs ahead would wait for the host in every step.
                followed.only_copies = self.copies.is_some() && !self.ahead;
                followed.off = !followed.only_copies;
                turned_off = Some(followed.checked);
            } else if wanted.len() == 1 {
                *n = 1;
            }
        }
        if let (Some((checked, accepted)), false) = (turned_off, self.quiet) {
            self.add_note(match checked {
                0 => "drafting is off: it takes longer than it could save".to_owned(),
                _ => format!(
                    "drafting is off for the rest of an answer because it does not pay: {accepted} of \
                     {checked} drafted tokens were accepted"
                ),
            });
        }
    }

    fn add_note(&mut self, note: String) {
        if !self.noted {
            self.note = Some(note);
            self.noted = true;
        }
    }

    /// Records that a step of `rows` rows took `seconds`.
    pub(crate) fn measured(&mut self, rows: usize, seconds: f64) {
        self.costs.stepped(rows, seconds);
    }

    /// Records that the first `accepted` of `drafted` tokens of the sequence in `slot` were accepted.
    pub(crate) fn checked(&mut self, slot: usize, drafted: usize, accepted: usize) {
        let Some(followed) = self.followed.get_mut(&slot) else {
            return;
        };
        self.counts.steps += 1;
        self.counts.drafted += drafted;
        self.counts.accepted += accepted;
        let (copied, free) = (followed.copied.take(), self.drafter.is_free());
        if copied.is_none() {
            followed.checked.0 += drafted;
            followed.checked.1 += accepted;
        }
        for i in 0..drafted.min(accepted + 1) {
            let outcome = if i < accepted { 1.0 } else { 0.0 };
            let (rate, weight) = match copied {
                Some(kind) => (&mut followed.copies[kind], WEIGHT_FREE),
                None => {
                    followed.judged += 1;
                    let own = 1.0 / (PRIOR_TOKENS + followed.judged) as f64;
                    let weight = if free {
                        WEIGHT_FREE
                    } else {
                        WEIGHT_EXPENSIVE.max(own)
                    };
                    (&mut followed.acceptance[followed.kind], weight)
                }
            };
            *rate += weight * (outcome - *rate);
        }
        let recovering = match (drafted, free) {
            (0, true) => Some(&mut followed.acceptance),
            _ if !free && copied.is_none() => Some(&mut followed.copies),
            _ => None,
        };
        for (rate, prior) in recovering.into_iter().flatten().zip(PRIOR_FREE) {
            *rate += RECOVERY * (prior - *rate).max(0.0);
        }
    }
}

/// What `drafter` guesses for each of `wanted`, as many tokens as are demanded at most, and of which kind that is.
fn ask(
    drafter: &mut dyn Drafter,
    followed: &BTreeMap<usize, Followed>,
    wanted: &[(usize, usize)],
    demands: &[Demand],
) -> Result<Vec<(Vec<u32>, usize)>> {
    let mut out = vec![(Vec::new(), 0); wanted.len()];
    let (mut asked, mut drafts) = (Vec::new(), Vec::new());
    for (i, (&(slot, _), demand)) in wanted.iter().zip(demands).enumerate() {
        if let (Some(followed), 1..) = (followed.get(&slot), demand.most) {
            asked.push(i);
            drafts.push(Draft {
                slot,
                text: &followed.text,
                most: demand.most,
                tokens: Vec::new(),
                kind: 0,
            });
        }
    }
    if !drafts.is_empty() {
        drafter.draft(&mut drafts)?;
    }
    for (i, mut draft) in asked.into_iter().zip(drafts) {
        draft.tokens.truncate(draft.most);
        out[i] = (draft.tokens, draft.kind.min(KINDS - 1));
    }
    Ok(out)
}

/// Refuses a session that cannot check drafts. Returns a note for the user if answers with drafts may differ
/// from those without.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn check_drafts(session: &dyn Session, device: &str) -> Result<Option<&'static str>> {
    let (rows, exact) = (session.draft_rows(), session.exact_rows());
    match rows {
        2.. => Ok((exact < rows).then_some(INEXACT)),
        _ => Err(Error::Unsupported {
            engine: "nq",
            what: "drafts",
            expected:
                "a session that checks several tokens in a step: on a GPU with fused kernels, \
                       or on a CPU, with room for a state to return to if the model has recurrences"
                    .into(),
            found: device.to_owned(),
        }),
    }
}

const INEXACT: &str = "this device rounds steps of several tokens differently from steps of one: with drafts \
                       an answer may change where two tokens are almost equally likely";

#[cfg(test)]
mod tests {
    use super::*;
    use nq_kernels::rng::Philox;

    /// Drafts anything.
    struct Guesser;

    impl Drafter for Guesser {
        fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()> {
            drafts.iter_mut().for_each(|d| d.tokens = vec![0; d.most]);
            Ok(())
        }
    }

    /// Runs 2,000 steps with a drafter of this acceptance rate; returns its counts, and whether it is still on.
    /// A step with drafts takes a quarter longer than one without. Steps are reported to take so long that a
    /// draft takes no time in comparison, however busy the machine is.
    fn drafts_of(acceptance: f32, seed: u64) -> (DraftCounts, bool) {
        let mut speculation = Speculation::new(Box::new(Guesser));
        speculation.follow(0, vec![1; 10]);
        let mut rng = Philox::new(seed, 0);
        for _ in 0..2000 {
            let drafted = speculation.draft(&[(0, 100)], 1, 9)[0].len();
            let accepted = (0..drafted)
                .take_while(|_| rng.uniform() < acceptance)
                .count();
            speculation.measured(1 + drafted, if drafted == 0 { 1e6 } else { 1.25e6 });
            speculation.checked(0, drafted, accepted);
        }
        (speculation.counts(), speculation.follows(0))
    }

    #[test]
    fn a_number_of_tokens_is_drafted_always() {
        let mut speculation = Speculation::new(Box::new(Guesser)).always().at_most(3);
        speculation.follow(0, vec![1; 10]);
        for room in [100, 2] {
            assert_eq!(speculation.draft(&[(0, room)], 1, 9)[0].len(), 3.min(room));
            // None is right, and steps with drafts are far slower.
            speculation.measured(4, 1e6);
            speculation.checked(0, 3.min(room), 0);
        }
    }

    #[test]
    fn what_the_text_repeats_is_copied_until_copies_are_wrong() {
        let mut speculation = Speculation::new(Box::new(Guesser)).with_copies();
        let words: Vec<u32> = (1..40).collect();
        let again = [&words[..], &words[..20]].concat();
        speculation.follow(0, again);
        speculation.follow(1, words.clone());
        assert_eq!(speculation.draft(&[(0, 3)], 1, 9), [[21, 22, 23]]);
        assert_eq!(speculation.draft(&[(1, 1)], 1, 9), [[0]]);
        // Right guesses of the drafter, wrong copies.
        let mut copied = 0;
        for _ in 0..20 {
            let drafted = speculation.draft(&[(0, 3)], 1, 9).concat();
            let right = drafted.first() == Some(&0);
            copied += usize::from(drafted.first() == Some(&21));
            speculation.measured(1 + drafted.len(), 1e6);
            speculation.checked(0, drafted.len(), if right { drafted.len() } else { 0 });
        }
        assert!((1..5).contains(&copied), "{copied} copies");
        assert_eq!(speculation.draft(&[(0, 3)], 1, 9)[0].first(), Some(&0));
    }

    #[test]
    fn an_expensive_drafter_is_not_turned_off_by_chance() {
        for seed in 0..40 {
            let (counts, on) = drafts_of(0.7, seed);
            let accepted = counts.accepted as f64 / counts.steps as f64;
            assert!(on && accepted > 1.5, "{seed}: {counts:?}");
            let (counts, on) = drafts_of(0.02, seed);
            assert!(!on && counts.drafted < 150, "{seed}: {counts:?}");
        }
    }
}
