//! Speculative decoding: a drafter guesses tokens, the model computes all of them in one step, and they
//! are kept as far as its sampler draws the same ones.
//!
//! A guess counts as right if the sampler, at its place, draws it: draws depend on seed, stream and
//! position alone, so that the text is what it is without drafts, whatever the sampler's settings,
//! where a device computes a few rows as it computes one ([`Session::exact_rows`](crate::Session)).
//! Elsewhere it may differ where two tokens are nearly as likely, as it may with the number of sequences
//! in a batch.
//!
//! [`Ngram`] guesses from the text itself, [`DraftModel`] by a smaller model. A
//! [`Batch`](crate::Batch) that has a [`Speculation`] asks it in each step how many rows to add for which
//! sequence: as many as give most tokens a second by what steps were measured to take and by how often
//! guesses were right.

mod model;
mod ngram;
mod pace;

pub use model::DraftModel;
pub use ngram::Ngram;

use crate::engine::Session;
use crate::error::{Error, Result};
use pace::{Pace, Wish};
use std::collections::BTreeMap;
use std::ops::Sub;
use std::time::Instant;

/// Guesses how texts go on.
pub trait Drafter: Send {
    /// Adds to each draft the tokens that are most likely to follow its text, at most as many as it
    /// asks for; none where nothing is likely. Of a sequence that grew, or forgot its end, since the last
    /// call only what is new need be computed.
    ///
    /// # Errors
    /// The drafter's own; nothing is then drafted any more.
    fn draft(&mut self, drafts: &mut [Draft<'_>]) -> Result<()>;

    /// True if guessing takes no time beside a model's step.
    fn is_free(&self) -> bool {
        false
    }
}

/// A guess asked of a [`Drafter`].
#[derive(Debug)]
pub struct Draft<'a> {
    /// The sequence.
    pub slot: usize,
    /// All its tokens, the one that is fed next included.
    pub text: &'a [u32],
    /// Tokens wanted at most.
    pub most: usize,
    /// The guess.
    pub tokens: Vec<u32>,
    /// What it rests on, below [`KINDS`]: guesses of one kind are right about as often. 0 is the least
    /// certain.
    pub kind: usize,
}

/// Kinds of guesses.
pub const KINDS: usize = 3;

/// What drafts have come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Steps in which a sequence was continued, with a draft or without.
    pub steps: usize,
    /// Tokens that were drafted and checked.
    pub drafted: usize,
    /// Those of them that were right.
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

/// A drafter, the sequences that it follows, and what is known of costs and luck.
pub struct Speculation {
    drafter: Box<dyn Drafter>,
    pace: Pace,
    /// By slot.
    followed: BTreeMap<usize, Followed>,
    /// Draft whether it pays or not.
    always: bool,
    counts: DraftCounts,
    /// Why nothing is drafted any more, until it is told.
    note: Option<String>,
    /// It has been told.
    told: bool,
    /// The drafter has failed.
    failed: bool,
}

/// A sequence whose tokens are drafted.
struct Followed {
    /// All its tokens, the one that is fed next included.
    text: Vec<u32>,
    /// Share of checked tokens that were right, by the kind of their guess: of the latest most.
    right: [f64; KINDS],
    /// Kind of the latest guess.
    kind: usize,
    /// Tokens checked, and those of them that were right.
    checked: (usize, usize),
    /// Of tokens checked, those that told something: what follows a wrong one does not.
    judged: usize,
    /// Drafts have not paid.
    off: bool,
}

impl Followed {
    /// Share of right tokens in guesses of the latest one's kind.
    fn expected(&self) -> f64 {
        self.right[self.kind]
    }
}

/// What is taken for the share of right tokens at first, by kind: of a drafter that is free, and of one that
/// was asked for.
const HOPE: ([f64; KINDS], [f64; KINDS]) = ([0.5, 0.8, 0.95], [0.8; KINDS]);
/// Weight of the latest checked token: of a drafter that is free, which matches of another kind may begin
/// to serve at any time, and of one that is dear, whose guesses are right about as often all along. The
/// chance of a few wrong ones must not end the latter's drafts.
const LATEST: (f64, f64) = (0.2, 0.01);
/// Judged tokens that the hope for a dear drafter weighs as much as.
const HOPED: usize = 4;
/// What that share comes back by while nothing is drafted, where drafts are free: a text may begin to
/// repeat.
const RECOVERY: f64 = 0.01;
/// Tokens of a dear drafter to judge before it is given up.
const TRIAL: usize = 16;

impl Speculation {
    /// Drafts by `drafter`, as many tokens as pay.
    pub fn new(drafter: Box<dyn Drafter>) -> Self {
        let pace = match drafter.is_free() {
            true => Pace::default(),
            false => Pace::dear(),
        };
        Speculation {
            drafter,
            pace,
            followed: BTreeMap::new(),
            always: false,
            counts: DraftCounts::default(),
            note: None,
            told: false,
            failed: false,
        }
    }

    /// Drafts from the text itself.
    pub fn ngram() -> Self {
        Speculation::new(Box::<Ngram>::default())
    }

    /// Drafts all that fits, whether it pays or not, e.g. to see what it costs.
    pub fn always(mut self) -> Self {
        self.always = true;
        self
    }

    /// Drafts for the sequence in `slot`, which will join a batch and be fed the last of `text` next or
    /// has just been; until it leaves.
    pub fn follow(&mut self, slot: usize, text: Vec<u32>) {
        let followed = Followed {
            text,
            right: match self.drafter.is_free() {
                true => HOPE.0,
                false => HOPE.1,
            },
            kind: 0,
            checked: (0, 0),
            judged: 0,
            off: false,
        };
        self.followed.insert(slot, followed);
    }

    /// A device computes as many rows as `rounded` makes of those that a step needs.
    pub(crate) fn rounds_rows(&mut self, rounded: fn(usize) -> usize) {
        self.pace.rounded = rounded;
    }

    /// True if tokens of the sequence in `slot` may be drafted.
    pub(crate) fn follows(&self, slot: usize) -> bool {
        !self.failed && self.followed.get(&slot).is_some_and(|f| !f.off)
    }

    /// Drafts nothing more for the sequence in `slot`, for this reason.
    pub(crate) fn refuse(&mut self, slot: usize, why: &str) {
        if let Some(followed) = self.followed.get_mut(&slot).filter(|f| !f.off) {
            followed.off = true;
            self.tell(why.to_owned());
        }
    }

    /// What drafts have come to, over all sequences.
    pub fn counts(&self) -> DraftCounts {
        self.counts
    }

    /// Seconds that steps of so many rows were measured to take, as far as there were any.
    pub fn step_seconds(&self) -> Vec<(usize, f64)> {
        self.pace.known()
    }

    /// Says, once, that and why nothing is drafted any more for a sequence.
    pub fn take_note(&mut self) -> Option<String> {
        self.note.take()
    }

    pub(crate) fn forget(&mut self, slot: usize) {
        self.followed.remove(&slot);
    }

    /// A sequence has drawn `token`, which is fed next.
    pub(crate) fn push(&mut self, slot: usize, token: u32) {
        if let Some(followed) = self.followed.get_mut(&slot) {
            followed.text.push(token);
        }
    }

    /// Guesses for the sequences of `wanted` (slot, tokens at most), in a step of `rows` rows without
    /// them and of `most_rows` with them at most. Sequences that are not followed get none.
    pub(crate) fn draft(
        &mut self,
        wanted: &[(usize, usize)],
        rows: usize,
        most_rows: usize,
    ) -> Vec<Vec<u32>> {
        let (mut wishes, room) = self.wishes(wanted, rows, most_rows);
        let drafted = match self.drafter.is_free() {
            // What is found at no cost is known before rows are shared out.
            true => self.ask(wanted, &wishes).map(|mut found| {
                for ((wish, found), (slot, _)) in wishes.iter_mut().zip(&found).zip(wanted) {
                    wish.most = found.len();
                    wish.right = self.followed.get(slot).map_or(0.0, Followed::expected);
                }
                let planned = self.plan(rows, room, &wishes);
                let cut = found.iter_mut().zip(planned);
                cut.for_each(|(found, n)| found.truncate(n));
                found
            }),
            false => {
                let planned = self.plan_dear(wanted, rows, room, &wishes);
                let planned = planned.into_iter().zip(&wishes);
                let wishes: Vec<Wish> = planned.map(|(most, w)| Wish { most, ..*w }).collect();
                self.ask(wanted, &wishes)
            }
        };
        drafted.unwrap_or_else(|e| {
            self.failed = true;
            self.tell(format!("nothing is drafted any more: {e}"));
            vec![Vec::new(); wanted.len()]
        })
    }

    /// True if [`Speculation::draft`] would be worth its while: a drafter that is dear is not asked.
    pub(crate) fn expects(
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
                let (wishes, room) = self.wishes(wanted, rows, most_rows);
                let planned = self.plan_dear(wanted, rows, room, &wishes);
                planned.into_iter().any(|n| n > 0)
            }
        }
    }

    /// What may be drafted for each of `wanted`, in how many rows together.
    fn wishes(
        &self,
        wanted: &[(usize, usize)],
        rows: usize,
        most_rows: usize,
    ) -> (Vec<Wish>, usize) {
        let room = match self.failed {
            true => 0,
            false => most_rows.saturating_sub(rows),
        };
        let wish = |&(slot, most): &(usize, usize)| match self.followed.get(&slot) {
            Some(f) if !f.off => Wish {
                right: f.expected(),
                most: most.min(room),
            },
            _ => Wish::default(),
        };
        (wanted.iter().map(wish).collect(), room)
    }

    /// Tokens to ask a dear drafter for.
    fn plan_dear(
        &mut self,
        wanted: &[(usize, usize)],
        rows: usize,
        room: usize,
        wishes: &[Wish],
    ) -> Vec<usize> {
        let mut planned = self.plan(rows, room, wishes);
        if !self.always {
            self.try_or_give_up(wanted, wishes, &mut planned);
        }
        planned
    }

    fn plan(&mut self, rows: usize, room: usize, wishes: &[Wish]) -> Vec<usize> {
        match self.always {
            false => {
                let mut planned = self.pace.plan(rows, room, wishes);
                self.pace.explore(rows, room, wishes, &mut planned);
                planned
            }
            true => {
                let mut room = room;
                let mut take = |w: &Wish| {
                    let n = w.most.min(room);
                    room -= n;
                    n
                };
                wishes.iter().map(&mut take).collect()
            }
        }
    }

    /// Asks the drafter for as many tokens as are wished for.
    fn ask(&mut self, wanted: &[(usize, usize)], wishes: &[Wish]) -> Result<Vec<Vec<u32>>> {
        let mut out = vec![Vec::new(); wanted.len()];
        let (mut of, mut drafts) = (Vec::new(), Vec::new());
        for (i, (&(slot, _), wish)) in wanted.iter().zip(wishes).enumerate() {
            if let (Some(followed), 1..) = (self.followed.get(&slot), wish.most) {
                of.push(i);
                drafts.push(Draft {
                    slot,
                    text: &followed.text,
                    most: wish.most,
                    tokens: Vec::new(),
                    kind: 0,
                });
            }
        }
        if drafts.is_empty() {
            return Ok(out);
        }
        let begun = Instant::now();
        self.drafter.draft(&mut drafts)?;
        let longest = drafts.iter().map(|d| d.tokens.len()).max().unwrap_or(0);
        if longest > 0 && !self.drafter.is_free() {
            let each = begun.elapsed().as_secs_f64() / longest as f64;
            self.pace.drafted(each);
        }
        let mut kinds = Vec::with_capacity(of.len());
        for (i, draft) in of.into_iter().zip(drafts) {
            kinds.push((draft.slot, draft.kind.min(KINDS - 1)));
            out[i] = draft.tokens;
            out[i].truncate(draft.most);
        }
        for (slot, kind) in kinds {
            self.followed.entry(slot).and_modify(|f| f.kind = kind);
        }
        Ok(out)
    }

    /// Drafts of a dear drafter that do not seem to pay are tried one token at a time, and left alone
    /// once enough have been checked or where costs alone speak against them.
    fn try_or_give_up(
        &mut self,
        wanted: &[(usize, usize)],
        wishes: &[Wish],
        planned: &mut [usize],
    ) {
        let mut given_up = None;
        for ((&(slot, _), wish), n) in wanted.iter().zip(wishes).zip(planned) {
            let Some(followed) = self.followed.get_mut(&slot) else {
                continue;
            };
            // Others in the step change what pays; alone it must.
            if wish.most == 0 || *n > 0 || self.pace.plan(1, wish.most, &[*wish])[0] > 0 {
                continue;
            }
            let too_dear = followed.checked.0 == 0 && self.pace.knows_drafts();
            if too_dear || followed.judged >= TRIAL {
                followed.off = true;
                given_up = Some(followed.checked);
            } else if wanted.len() == 1 {
                *n = 1;
            }
        }
        if let Some((checked, right)) = given_up {
            self.tell(match checked {
                0 => "drafts are off: they take longer here than they could save".to_owned(),
                _ => format!(
                    "drafts are off for the rest of an answer where they do not pay: {right} of \
                     {checked} drafted tokens were right"
                ),
            });
        }
    }

    fn tell(&mut self, note: String) {
        if !self.told {
            self.note = Some(note);
            self.told = true;
        }
    }

    /// A step of `rows` rows took so long.
    pub(crate) fn measured(&mut self, rows: usize, seconds: f64) {
        self.pace.stepped(rows, seconds);
    }

    /// Of `drafted` tokens of the sequence in `slot` the first `accepted` were right.
    pub(crate) fn checked(&mut self, slot: usize, drafted: usize, accepted: usize) {
        let Some(followed) = self.followed.get_mut(&slot) else {
            return;
        };
        self.counts.steps += 1;
        self.counts.drafted += drafted;
        self.counts.accepted += accepted;
        followed.checked.0 += drafted;
        followed.checked.1 += accepted;
        let free = self.drafter.is_free();
        let right = &mut followed.right[followed.kind];
        for i in 0..drafted.min(accepted + 1) {
            followed.judged += 1;
            let weight = match free {
                true => LATEST.0,
                false => LATEST.1.max(1.0 / (HOPED + followed.judged) as f64),
            };
            let was = if i < accepted { 1.0 } else { 0.0 };
            *right += weight * (was - *right);
        }
        if drafted == 0 && free {
            for (right, hope) in followed.right.iter_mut().zip(HOPE.0) {
                *right += RECOVERY * (hope - *right).max(0.0);
            }
        }
    }
}

/// Refuses a session that cannot check drafts. Returns what there is to say where answers with drafts may
/// differ from those without.
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
                "a device that checks several tokens in a step: a GPU with fused kernels, or a CPU \
                       with integer activations, the default for quantized models"
                    .into(),
            found: device.to_owned(),
        }),
    }
}

const INEXACT: &str = "this device rounds steps of several tokens otherwise than steps of one: with drafts \
                       an answer may turn elsewhere where two tokens are nearly as likely";

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

    /// What a drafter comes to whose tokens are right with a chance of `right`, over 2,000 steps, of which
    /// those of up to 9 rows take a quarter longer than those of one. Steps are said to take so long that
    /// a guess takes no time beside them, however busy the machine is.
    fn drafts_of(right: f32, seed: u64) -> (DraftCounts, bool) {
        let mut speculation = Speculation::new(Box::new(Guesser));
        speculation.follow(0, vec![1; 10]);
        let mut rng = Philox::new(seed, 0);
        for _ in 0..2000 {
            let drafted = speculation.draft(&[(0, 100)], 1, 9)[0].len();
            let accepted = (0..drafted).take_while(|_| rng.uniform() < right).count();
            speculation.measured(1 + drafted, if drafted == 0 { 1e6 } else { 1.25e6 });
            speculation.checked(0, drafted, accepted);
        }
        (speculation.counts(), speculation.follows(0))
    }

    #[test]
    fn a_dear_drafter_is_not_given_up_by_chance() {
        for seed in 0..40 {
            let (counts, goes_on) = drafts_of(0.7, seed);
            let accepted = counts.accepted as f64 / counts.steps as f64;
            assert!(goes_on && accepted > 1.5, "{seed}: {counts:?}");
            let (counts, goes_on) = drafts_of(0.02, seed);
            assert!(!goes_on && counts.drafted < 150, "{seed}: {counts:?}");
        }
    }
}
