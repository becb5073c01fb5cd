//! The end of a decode step on the device: sampling, and the next token's embedding.

use super::driver::{
    Address, Buffer, Checked, Gpu, LaunchShape, Mapped, Operands, Staging, Stream,
};
use super::kernel::kernels;
use super::linear::DeviceLinear;
use super::rows::Step;
use crate::cuda::advance::AdvanceArgs;
use crate::cuda::candidates::CandidateArgs;
use crate::cuda::sampling::{self, RANGE_PER_THREAD, RANGE_THREADS, RANGES};
use crate::cuda::weights::PackedWeight;
use bytemuck::{Pod, Zeroable};
use nq_kernels::{Error, Result};

pub use crate::cuda::sampling::{Logprobs, Sampling};

/// Written instead of a token if the logits are not finite.
pub const NOT_FINITE: u32 = crate::cuda::advance::NOT_FINITE;
/// Written instead of a token if mask and biases leave none.
pub const NONE_ALLOWED: u32 = crate::cuda::advance::NONE_ALLOWED;

impl Sampling {
    /// The row's biases are added to its logits.
    pub const BIASED: i32 = sampling::BIASED as i32;
    /// Tokens seen before are penalized, and counted.
    pub const PENALIZED: i32 = sampling::PENALIZED as i32;
    /// Tokens that the row's mask does not allow are excluded.
    pub const MASKED: i32 = sampling::MASKED as i32;
}

/// Most tokens whose log-probabilities are given besides that of the chosen one.
pub const MOST_LOGPROBS: usize = sampling::MOST_LOGPROBS;
/// Largest vocabulary for which [`Stream::advance`] finds the [`MOST_LOGPROBS`] best tokens: that
/// many of its 2,048 groups hold no more tokens than its list.
const MOST_RANKED: usize = 4096 / MOST_LOGPROBS * 2048;

/// Settings that change logits before a token is chosen, one row per sequence; read if the row's
/// [`Sampling`] says so. Rows are written in order with a stream's other work.
pub struct Adjustments {
    vocab: usize,
    bias: StagedRows<f32>, // [rows, vocab]
    mask: StagedRows<u32>, // [rows, vocab / 32, rounded up]
    seen: StagedRows<u16>, // [rows, vocab]: IN_PROMPT, and how often the answer has a token
}

/// Rows on the device, and the staging memory for copying them.
struct StagedRows<T> {
    values: Buffer<T>,
    staging: Option<Staging<T>>,
}

impl<T: Pod> StagedRows<T> {
    fn new(gpu: &Gpu, what: &'static str, len: usize) -> Result<Self> {
        Ok(StagedRows {
            values: gpu.zeros(what, len)?,
            staging: None,
        })
    }

    /// Replaces row `row` with `values`.
    fn write(&mut self, stream: &Stream, row: usize, values: &[T]) -> Result<()> {
        let at = row * values.len();
        stream.write_staged(&mut self.values, at, &mut self.staging, values)
    }
}

impl Adjustments {
    /// Set in the state of a token that occurs in the prompt; the lower bits count occurrences in the
    /// answer.
    const IN_PROMPT: u16 = sampling::IN_PROMPT as u16;

    /// Allocates rows for `rows` sequences, all empty.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, vocab: usize, rows: usize) -> Result<Self> {
        Ok(Adjustments {
            vocab,
            bias: StagedRows::new(gpu, "logit biases", rows * vocab)?,
            mask: StagedRows::new(gpu, "token masks", rows * vocab.div_ceil(32))?,
            seen: StagedRows::new(gpu, "tokens seen", rows * vocab)?,
        })
    }

    /// Replaces the biases of a row, given as (token, bias).
    ///
    /// # Errors
    /// [`Error::Shape`] for a token past the vocabulary or a row that does not exist; errors of the
    /// driver.
    pub fn write_bias(&mut self, stream: &Stream, row: usize, biases: &[(u32, f32)]) -> Result<()> {
        let all = self.by_token(biases.iter().copied())?;
        self.bias.write(stream, row, &all)
    }

    /// Replaces the mask of a row: bit `i % 32` of word `i / 32` allows token `i`.
    ///
    /// # Errors
    /// [`Error::Shape`] for a number of words that does not fit the vocabulary or a row that does not
    /// exist; errors of the driver.
    pub fn write_mask(&mut self, stream: &Stream, row: usize, mask: &[u32]) -> Result<()> {
        let words = self.vocab.div_ceil(32);
        if mask.len() != words {
            return Err(Error::Shape {
                op: "sampling",
                what: "mask",
                expected: format!("{words} words for {} tokens", self.vocab),
                found: format!("{} words", mask.len()),
            });
        }
        self.mask.write(stream, row, mask)
    }

    /// Replaces the tokens seen of a row, given as (token, whether the prompt has it, occurrences in the
    /// answer); counts above 32,767 are limited to that.
    ///
    /// # Errors
    /// [`Error::Shape`] for a token past the vocabulary or a row that does not exist; errors of the
    /// driver.
    pub fn write_seen(
        &mut self,
        stream: &Stream,
        row: usize,
        tokens: impl Iterator<Item = (u32, bool, u32)>,
    ) -> Result<()> {
        let most = u32::from(Self::IN_PROMPT - 1);
        let all = self.by_token(tokens.map(|(id, in_prompt, count)| {
            let prompt = if in_prompt { Self::IN_PROMPT } else { 0 };
            (id, prompt | count.min(most) as u16)
        }))?;
        self.seen.write(stream, row, &all)
    }

    /// A full row from the values of some tokens.
    fn by_token<T: Pod>(&self, some: impl Iterator<Item = (u32, T)>) -> Result<Vec<T>> {
        let mut all = vec![T::zeroed(); self.vocab];
        for (id, value) in some {
            match all.get_mut(id as usize) {
                Some(place) => *place = value,
                None => {
                    return Err(Error::Shape {
                        op: "sampling",
                        what: "token",
                        expected: format!("below {}", self.vocab),
                        found: id.to_string(),
                    });
                }
            }
        }
        Ok(all)
    }

    /// The arguments for `rows` rows, checked as operands of `o`.
    fn args(&self, o: &Operands<'_>, vocab: usize, rows: usize) -> Result<sampling::Adjustments> {
        if self.vocab != vocab {
            return o.refuse("tokens of adjustments", vocab, self.vocab);
        }
        Ok(sampling::Adjustments {
            bias: o.of("biases", &self.bias.values, &[rows, vocab])?,
            mask: o.of("masks", &self.mask.values, &[rows, vocab.div_ceil(32)])?,
            seen: o.of("tokens seen", &self.seen.values, &[rows, vocab])?,
        })
    }
}

/// Largest vocabulary that [`Stream::candidates`] supports.
const MOST_LISTED: usize = RANGES * RANGE_THREADS * RANGE_PER_THREAD;

/// Size of the lists in 8-byte words.
const RANGE_WORDS: usize = size_of::<sampling::Range>() / 8;
const SHORT_WORDS: usize = size_of::<sampling::Shortlist>() / 8;

/// The lists that [`Stream::candidates`] writes.
pub struct Candidates {
    vocab: usize,
    ranges: Buffer<u64>,
    shortlists: Buffer<u64>,
}

impl Candidates {
    /// Allocates lists for `rows` sequences; `None` if the vocabulary is too large for
    /// them.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, vocab: usize, rows: usize) -> Result<Option<Self>> {
        if vocab <= MOST_LISTED {
            Ok(Some(Candidates {
                vocab,
                ranges: gpu.zeros("candidates", rows * RANGES * RANGE_WORDS)?,
                shortlists: gpu.zeros("candidates", rows * SHORT_WORDS)?,
            }))
        } else {
            Ok(None)
        }
    }

    /// The lists of ranges and the short lists of `rows` rows, checked as operands of `o`.
    fn args(&self, o: &Operands<'_>, vocab: usize, rows: usize) -> Result<(Address, Address)> {
        if self.vocab != vocab {
            return o.refuse("tokens of candidates", vocab, self.vocab);
        }
        Ok((
            o.of("ranges", &self.ranges, &[rows, RANGES, RANGE_WORDS])?,
            o.of("short lists", &self.shortlists, &[rows, SHORT_WORDS])?,
        ))
    }
}

/// The inputs and outputs of a step's end.
pub struct Advance<'a> {
    /// Number of sequences.
    pub m: usize,
    /// `[m, vocab]`
    pub logits: &'a Buffer<f32>,
    /// `[m, blocks]`, from [`super::GemvOutput::Head`].
    pub best: &'a Buffer<[f32; 2]>,
    /// Number of blocks of the head's product: [`super::best_len`].
    pub blocks: usize,
    /// From [`Stream::candidates`]; `None` to take the best tokens, or to consider all tokens.
    pub candidates: Option<&'a Candidates>,
    /// `[m]`
    pub sampling: &'a Buffer<Sampling>,
    /// Its counts of tokens seen are updated.
    pub adjust: &'a mut Adjustments,
    /// `[m]`
    pub step: &'a mut Checked<Step>,
    /// `[m, ring_len]`: receives each sequence's token at index `drawn % ring_len`.
    pub ring: &'a mut Mapped<u32>,
    /// `[m, ring_len]`: receives the log-probabilities that `sampling` asks for, before the token.
    pub logprobs: &'a mut Mapped<Logprobs>,
    /// Length of a ring; a power of two.
    pub ring_len: usize,
    /// `[vocab]`: the token that each logit of a row stands for, also where log-probabilities give indices of logits;
    /// `None` if the indices are the tokens.
    pub ids: Option<&'a Checked<u32>>,
    /// `[tokens, hidden]`; without `ids`, `vocab` tokens.
    pub embedding: &'a DeviceLinear,
    /// `[m, hidden]`: receives the next residuals.
    pub x: &'a mut Buffer<f32>,
    /// Slot of idle rows, whose positions do not advance.
    pub idle: usize,
}

kernels! {
    CANDIDATES: CandidateArgs = "candidates" in "candidates.cu",
        test "kernels/cuda/tests/cuda/sampling.rs::tokens_follow_the_documented_steps",
        bench "sampling";
    ADVANCE: AdvanceArgs = "advance" in "advance.cu",
        test "kernels/cuda/tests/cuda/sampling.rs::tokens_follow_the_documented_steps",
        bench "sampling";
}

impl Stream {
    /// Lists the tokens that sampling may choose from, for `m` sequences: few of all, or the best
    /// of each range of the vocabulary. `logits` are `[m, vocab]`, `best` is `[m, blocks]` as in
    /// [`Advance`].
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub fn candidates(
        &self,
        logits: &Buffer<f32>,
        best: &Buffer<[f32; 2]>,
        blocks: usize,
        sampling: &Buffer<Sampling>,
        adjust: &Adjustments,
        to: &mut Candidates,
        vocab: usize,
        m: usize,
    ) -> Result<()> {
        let o = self.operands("candidates");
        o.at_most("vocabulary", MOST_LISTED, vocab)?;
        let (ranges, shortlists) = to.args(&o, vocab, m)?;
        let args = CandidateArgs {
            logits: o.of("logits", logits, &[m, vocab])?,
            best: o.of("best", best, &[m, blocks])?,
            sampling: o.of("sampling", sampling, &[m])?,
            adjust: adjust.args(&o, vocab, m)?,
            ranges,
            shortlists,
            vocab: vocab as i32,
            blocks: blocks as i32,
        };
        let shape = LaunchShape::new([RANGES, m, 1], RANGE_THREADS).overlapping();
        // SAFETY: the operands were checked.
        unsafe { self.launch(&CANDIDATES, shape, &args) }
    }

    /// Chooses each sequence's token after a step, writes it to the ring and to the step, and
    /// looks up its embedding. Positions stop at the last one that the steps have room for.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn advance(&self, a: Advance<'_>) -> Result<()> {
        let o = self.operands("advance");
        let (m, width) = (a.m, a.embedding.inputs());
        let vocab = a.ids.map_or(a.embedding.rows(), |ids| ids.values().len());
        let tokens = a.ids.map_or(vocab, |ids| *ids.bounds());
        let bounds = *a.step.bounds();
        o.at_least("blocks", 1, a.blocks)?;
        o.at_most("vocabulary", MOST_RANKED, vocab)?;
        o.at_most("tokens", bounds.tokens.min(a.embedding.rows()), tokens)?;
        if !a.ring_len.is_power_of_two() {
            return o.refuse("ring", "a power of two", a.ring_len);
        }
        let lists = a.candidates.map(|c| c.args(&o, vocab, m)).transpose()?;
        let (ranges, shortlists) = lists.unwrap_or((Address::NULL, Address::NULL));
        // Of trellis codes another kernel looks up the rows.
        let embedding = match a.embedding.is_trellis() {
            true => PackedWeight::zeroed(),
            false => a.embedding.args(&o)?,
        };
        let args = AdvanceArgs {
            logits: o.of("logits", a.logits, &[m, vocab])?,
            best: o.of("best", a.best, &[m, a.blocks])?,
            sampling: o.of("sampling", a.sampling, &[m])?,
            adjust: a.adjust.args(&o, vocab, m)?,
            step: o.of("step", a.step.values(), &[m])?,
            ring: o.mapped("ring", a.ring, &[m, a.ring_len])?,
            logprobs: o.mapped("log-probabilities", a.logprobs, &[m, a.ring_len])?,
            ranges,
            shortlists,
            embedding,
            x: o.of("x", a.x, &[m, width])?,
            ids: o.optional("ids", a.ids.map(Checked::values), &[vocab])?,
            blocks: a.blocks as i32,
            vocab: vocab as i32,
            ring_size: a.ring_len as i32,
            idle: a.idle as i32,
            positions: bounds.places.positions as i32,
            padding: [0; 1],
        };
        let shape = LaunchShape::new([m, 1, 1], 1024)
            // `Shared` of the kernel: list, histogram, partial sums.
            .shared(8 * (4096 + 256 + 32 + 32) + 64)
            .overlapping();
        // SAFETY: the operands were checked. The kernel uses no token past the vocabulary, and no
        // position past those of the steps.
        unsafe { self.launch(&ADVANCE, shape, &args)? };
        if a.embedding.is_trellis() {
            let tokens = a.step.values();
            return self.trellis_embed(a.embedding, tokens, Step::TOKEN, a.x, m);
        }
        Ok(())
    }
}
