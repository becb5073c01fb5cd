//! The end of a decode step on the device: sampling, and the next token's embedding.

use super::driver::{Address, Buffer, Gpu, LaunchShape, Pinned, Stream};
use super::linear::{DeviceLinear, PackedArgs};
use super::rows::Step;
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};

/// What the device writes instead of a token whose logits are not finite.
pub const NOT_FINITE: u32 = 0xffff_fffe;

/// How tokens are chosen: `Sampling` of `cuda/sampling.cuh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Sampling {
    /// Divides the logits; 0: the best token.
    pub temperature: f32,
    /// Keeps the fewest best tokens that have this probability; 1: all.
    pub top_p: f32,
    /// Drops tokens below this share of the best one's probability.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen.
    pub repetition: f32,
    /// Subtracted from logits of tokens in the answer.
    pub presence: f32,
    /// Keeps this many best tokens; 0: all.
    pub top_k: i32,
    /// 1 if tokens seen change the logits.
    pub penalties: i32,
    /// Key of the random numbers, low word first.
    pub seed: [u32; 2],
    /// Their stream.
    pub stream: [u32; 2],
    /// Tokens before the first sampled one.
    pub position: [u32; 2],
}

/// Ranges that [`Stream::candidates`] cuts a vocabulary into.
const RANGES: usize = 128;
/// Most tokens of a vocabulary that it takes.
const MOST_LISTED: usize = RANGES * 256 * 8;

/// 8-byte words of the list of a range: `Range` of `cuda/sampling.cuh`.
const RANGE_WORDS: usize = 2 + 32;
/// 8-byte words of the short list of all tokens: `Shortlist` of `cuda/sampling.cuh`.
const SHORT_WORDS: usize = 2 + 128;

/// Where [`Stream::candidates`] lists tokens.
pub struct Candidates {
    ranges: Buffer<u64>,
    short: Buffer<u64>,
}

impl Candidates {
    /// Room for the lists of `rows` sequences; `None` if the vocabulary is too large to be
    /// listed.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, vocab: usize, rows: usize) -> Result<Option<Self>> {
        match vocab <= MOST_LISTED {
            true => Ok(Some(Candidates {
                ranges: gpu.zeros("candidates", rows * RANGES * RANGE_WORDS)?,
                short: gpu.zeros("candidates", rows * SHORT_WORDS)?,
            })),
            false => Ok(None),
        }
    }

    fn have(&self, rows: usize) -> bool {
        self.ranges.len() >= rows * RANGES * RANGE_WORDS && self.short.len() >= rows * SHORT_WORDS
    }
}

/// What a step's end reads and writes.
pub struct Advance<'a> {
    /// Sequences.
    pub m: usize,
    /// `[m, vocab]`
    pub logits: &'a Buffer<f32>,
    /// `[m, blocks]`, of [`super::GemvOutput::Head`].
    pub best: &'a Buffer<[f32; 2]>,
    /// Blocks of the head's product: [`super::best_len`].
    pub blocks: usize,
    /// Of [`Stream::candidates`]; `None` where the best tokens are wanted, or all are looked at.
    pub candidates: Option<&'a Candidates>,
    /// `[m]`
    pub sampling: &'a Buffer<Sampling>,
    /// `[m, vocab]`: 0 not seen, 1 in the prompt, 2 in the answer.
    pub seen: &'a mut Buffer<u8>,
    /// `[m]`
    pub step: &'a mut Buffer<Step>,
    /// `[m, ring_len]`: receives token `drawn % ring_len` of each.
    pub ring: &'a mut Pinned<u32>,
    /// A power of two.
    pub ring_len: usize,
    /// `[vocab, hidden]`
    pub embedding: &'a DeviceLinear,
    /// Receives the next residuals, `[m, hidden]`.
    pub x: &'a mut Buffer<f32>,
}

impl Stream {
    /// Lists the tokens that sampling may choose from, for `m` sequences: few of all, or the best
    /// of each range of the vocabulary. `logits` and `seen` are `[m, vocab]`, `best` `[m, blocks]`
    /// as in [`Advance`].
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub fn candidates(
        &self,
        logits: &Buffer<f32>,
        best: &Buffer<[f32; 2]>,
        blocks: usize,
        sampling: &Buffer<Sampling>,
        seen: &Buffer<u8>,
        to: &mut Candidates,
        vocab: usize,
        m: usize,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            logits: Address,
            best: Address,
            sampling: Address,
            seen: Address,
            ranges: Address,
            short: Address,
            vocab: i32,
            blocks: i32,
        }
        let fits = vocab <= MOST_LISTED
            && logits.len() >= m * vocab
            && seen.len() >= m * vocab
            && sampling.len() >= m
            && best.len() >= m * blocks
            && to.have(m);
        if !fits {
            return Err(Error::Shape {
                op: "candidates",
                what: "operands",
                expected: format!(
                    "buffers for {m} times a vocabulary of {vocab}, at most {MOST_LISTED}"
                ),
                found: format!("{} logits", logits.len()),
            });
        }
        let args = Args {
            logits: logits.at(0),
            best: best.at(0),
            sampling: sampling.at(0),
            seen: seen.at(0),
            ranges: to.ranges.at(0),
            short: to.short.at(0),
            vocab: vocab as i32,
            blocks: blocks as i32,
        };
        let shape = LaunchShape {
            grid: (RANGES, m, 1),
            threads: 256,
            shared: 0,
            overlap: true,
        };
        // SAFETY: the arguments are the kernel's; sizes were checked.
        unsafe { self.launch("candidates", shape, &args) }
    }

    /// Chooses each sequence's token after a step, writes it to the ring and to the step, and
    /// looks its embedding up.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn advance(&self, a: Advance<'_>) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            logits: Address,
            best: Address,
            sampling: Address,
            seen: Address,
            step: Address,
            ring: Address,
            ranges: Address,
            short: Address,
            embedding: PackedArgs,
            x: Address,
            blocks: i32,
            vocab: i32,
            ring_size: i32,
        }
        let vocab = a.embedding.rows();
        let width = a.embedding.inputs();
        let m = a.m;
        let fits = a.logits.len() >= m * vocab
            && a.best.len() >= m * a.blocks
            && a.blocks > 0
            && a.candidates.is_none_or(|c| c.have(m))
            && a.sampling.len() >= m
            && a.seen.len() >= m * vocab
            && a.step.len() >= m
            && a.ring_len.is_power_of_two()
            && a.ring.len() >= m * a.ring_len
            && a.x.len() >= m * width;
        if !fits {
            return Err(Error::Shape {
                op: "advance",
                what: "operands",
                expected: format!(
                    "buffers for {m} times a vocabulary of {vocab} and a width of {width}"
                ),
                found: format!("{} logits, a ring of {}", a.logits.len(), a.ring.len()),
            });
        }
        let args = Args {
            logits: a.logits.at(0),
            best: a.best.at(0),
            sampling: a.sampling.at(0),
            seen: a.seen.at(0),
            step: a.step.at(0),
            ring: a.ring.at(0),
            ranges: a.candidates.map_or(Address::NULL, |c| c.ranges.at(0)),
            short: a.candidates.map_or(Address::NULL, |c| c.short.at(0)),
            embedding: a.embedding.args(),
            x: a.x.at(0),
            blocks: a.blocks as i32,
            vocab: vocab as i32,
            ring_size: a.ring_len as i32,
        };
        let shape = LaunchShape {
            grid: (m, 1, 1),
            threads: 1024,
            // `Shared` of the kernel: list, histogram, partial sums.
            shared: 8 * (4096 + 256 + 32 + 32) + 64,
            overlap: true,
        };
        // SAFETY: the arguments are the kernel's; sizes were checked. Tokens it writes are
        // below the vocabulary.
        unsafe { self.launch("advance", shape, &args) }
    }
}
