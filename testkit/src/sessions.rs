//! Sessions: their sizes, what is fed to them, and some without a model.

use nq_runtime::batch::decode;
use nq_runtime::generate::{Generated, generate};
use nq_runtime::{
    Chunk, Continuation, GenerationLimits, KvType, Logits, LogitsWanted, Observer, Pages, Piece,
    Result, Sampler, Sequence, Session, SessionSpec, StepsAhead, Streams,
};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The size of a session with pages for all its slots, whose steps check no drafts; the arguments in the order of the
/// fields.
pub fn session_spec(slots: usize, ctx: usize, kv: KvType, max_rows: usize) -> SessionSpec {
    SessionSpec {
        slots,
        ctx,
        kv,
        max_rows,
        ..SessionSpec::default()
    }
}

/// Tokens to append to the sequence in a slot.
pub fn chunk(slot: usize, tokens: &[u32], logits: LogitsWanted) -> Chunk<'_> {
    Chunk {
        slot,
        tokens,
        logits,
    }
}

/// Appends `tokens` to the sequence in `slot` in one forward: all logits `[tokens, vocab]`.
///
/// # Panics
/// If the session refuses them.
#[track_caller]
pub fn feed(session: &mut dyn Session, slot: usize, tokens: &[u32]) -> Vec<f32> {
    let all = chunk(slot, tokens, LogitsWanted::All);
    session.forward(&[all], None).unwrap().data.to_vec()
}

/// The end of an answer after so many tokens.
pub fn limits(max_tokens: usize) -> GenerationLimits<'static> {
    GenerationLimits {
        stop: &[],
        max_tokens,
        interrupt: None,
    }
}

/// The last tokens of a prompt, after which the sequence draws so many.
pub fn piece(slot: usize, prompt: &[u32], sampler: Sampler, tokens: usize) -> Piece<'_> {
    Piece {
        slot,
        tokens: prompt,
        then: Some(Continuation { sampler, tokens }),
    }
}

/// The answer to a prompt, as [`generate`] makes it.
///
/// # Errors
/// As [`generate`].
pub fn answer(
    session: &mut dyn Session,
    sequence: &mut Sequence,
    prompt: &[u32],
    sampler: &mut Sampler,
    limits: &GenerationLimits<'_>,
) -> Result<Generated> {
    let each = &mut |_| ControlFlow::Continue(());
    generate(session, sequence, prompt, sampler, limits, each)
}

/// The tokens that the sequence in `slot` draws in so many steps, of which the first appends `token`.
///
/// # Errors
/// As [`decode`].
pub fn drawn(
    session: &mut dyn Session,
    slot: usize,
    token: u32,
    steps: usize,
    sampler: &mut Sampler,
) -> Result<Vec<u32>> {
    let mut drawn = Vec::new();
    let each = &mut |token| {
        drawn.push(token);
        ControlFlow::Continue(())
    };
    decode(session, slot, token, steps, sampler, None, each)?;
    Ok(drawn)
}

/// `vocab` logits that change with any change of `tokens`.
pub fn logits_after(tokens: &[u32], vocab: usize) -> Vec<f32> {
    let mix = |h: u64, x: u64| (h ^ x).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    let hash = tokens.iter().fold(1, |h, &t| mix(h, u64::from(t) + 1));
    (0..vocab as u64)
        .map(|i| (mix(hash, i + 7) >> 40) as f32 / (1 << 22) as f32)
        .collect()
}

/// The token with the greatest logit.
pub fn best(logits: &[f32]) -> u32 {
    (0..logits.len()).fold(0, |b, i| if logits[i] > logits[b] { i } else { b }) as u32
}

/// The `n` best tokens after `prompt`, one after the other, where the logits of a sequence are `logits`.
pub fn greedy(prompt: &[u32], n: usize, logits: impl Fn(&[u32]) -> Vec<f32>) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..n {
        tokens.push(best(&logits(&tokens)));
    }
    tokens.split_off(prompt.len())
}

type LogitsOf = Box<dyn Fn(&[u32]) -> Vec<f32> + Send>;
type Before = Box<dyn FnMut(&[Chunk<'_>]) -> Result<()> + Send>;

/// A session without a model: its logits are a function of all that a sequence holds, so that a token fed twice, out of
/// place or not at all changes them.
pub struct FakeSession {
    /// Its size; more tokens than that are a panic.
    pub spec: SessionSpec,
    /// What each slot holds.
    pub sequences: Vec<Vec<u32>>,
    /// Sequences can be cut at multiples of this, and where they end.
    pub every: usize,
    /// What [`Session::exact_rows`] says.
    pub exact_rows: usize,
    /// The number of rows of every forward that did not fail.
    pub rows: Vec<usize>,
    /// Runs in front of every forward, which fails with its error.
    pub before: Before,
    vocab: usize,
    logits_of: LogitsOf,
    logits: Vec<f32>,
}

impl FakeSession {
    /// A session of this size, in which `logits_of` gives the `vocab` logits after a sequence.
    pub fn new(
        spec: SessionSpec,
        vocab: usize,
        logits_of: impl Fn(&[u32]) -> Vec<f32> + Send + 'static,
    ) -> Self {
        FakeSession {
            spec,
            sequences: vec![Vec::new(); spec.slots],
            every: 1,
            exact_rows: 1,
            rows: Vec::new(),
            before: Box::new(|_| Ok(())),
            vocab,
            logits_of: Box::new(logits_of),
            logits: Vec::new(),
        }
    }
}

impl Session for FakeSession {
    fn spec(&self) -> SessionSpec {
        self.spec
    }

    fn len(&self, slot: usize) -> usize {
        self.sequences[slot].len()
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        let len = self.reach(slot, len);
        self.sequences[slot].truncate(len);
        len
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        let len = self.reach(from, len);
        self.sequences[to] = self.sequences[from][..len].to_vec();
        Ok(len)
    }

    fn reach(&self, slot: usize, len: usize) -> usize {
        match len < self.len(slot) {
            true => len / self.every * self.every,
            false => self.len(slot),
        }
    }

    fn hidden(&mut self, _: &[Chunk<'_>], _: &mut Vec<f32>) -> Result<()> {
        unreachable!("only logits are asked for")
    }

    fn exact_rows(&self) -> usize {
        self.exact_rows
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        _: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        (self.before)(chunks)?;
        let rows: usize = chunks.iter().map(|c| c.tokens.len()).sum();
        assert!(rows <= self.spec.max_rows, "{rows} rows");
        self.rows.push(rows);
        self.logits.clear();
        for c in chunks {
            assert!(!c.tokens.is_empty(), "a chunk without tokens");
            let wanted = c.logits.rows(c.tokens.len());
            let sequence = &mut self.sequences[c.slot];
            for (row, &token) in c.tokens.iter().enumerate() {
                sequence.push(token);
                if wanted.contains(&row) {
                    self.logits.extend((self.logits_of)(sequence));
                }
            }
            assert!(sequence.len() <= self.spec.ctx, "beyond the context");
        }
        Ok(Logits {
            data: &self.logits,
            vocab: self.vocab,
        })
    }
}

/// A session whose sequences cannot be cut everywhere, as those with a recurrent state.
pub struct Cut {
    /// The session that computes.
    pub session: Box<dyn Session>,
    /// Sequences can be cut at multiples of this, and where they end.
    pub every: usize,
    /// How often less was reached than asked.
    pub short: Arc<AtomicUsize>,
    /// The rows that it takes for exact; `None`: those of the session that computes.
    pub exact_rows: Option<usize>,
}

impl Cut {
    /// The sequences of a session, which can be cut only at multiples of `every` tokens.
    pub fn new(session: Box<dyn Session>, every: usize) -> Self {
        Cut {
            session,
            every,
            short: Arc::default(),
            exact_rows: None,
        }
    }

    fn counted(&self, slot: usize, len: usize) -> usize {
        let reach = self.reach(slot, len);
        if reach < len.min(self.len(slot)) {
            self.short.fetch_add(1, Ordering::Relaxed);
        }
        reach
    }
}

impl Session for Cut {
    fn spec(&self) -> SessionSpec {
        self.session.spec()
    }

    fn len(&self, slot: usize) -> usize {
        self.session.len(slot)
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        let reach = self.counted(slot, len);
        self.session.truncate(slot, reach)
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        let reach = self.counted(from, len);
        self.session.fork(from, to, reach)
    }

    fn reach(&self, slot: usize, len: usize) -> usize {
        match len < self.session.len(slot) {
            true => len / self.every * self.every,
            false => self.session.len(slot),
        }
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        self.session.forward(chunks, observer)
    }

    fn hidden(&mut self, chunks: &[Chunk<'_>], out: &mut Vec<f32>) -> Result<()> {
        self.session.hidden(chunks, out)
    }

    fn exact_rows(&self) -> usize {
        self.exact_rows.unwrap_or_else(|| self.session.exact_rows())
    }

    fn draft_rows(&self) -> usize {
        self.exact_rows.unwrap_or_else(|| self.session.draft_rows())
    }

    fn pages(&mut self) -> Option<&mut dyn Pages> {
        self.session.pages()
    }

    fn ahead(&mut self) -> Option<&mut dyn StepsAhead> {
        self.session.ahead()
    }

    fn streams(&mut self) -> Option<&mut dyn Streams> {
        self.session.streams()
    }
}
