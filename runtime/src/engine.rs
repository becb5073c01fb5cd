//! The interfaces of the runtime: what a device offers, whatever it is.
//!
//! One forward serves chat, evaluation, calibration and sensitivity: [`Session::forward`]
//! takes a batch of token chunks, a KV cache that the session owns, the logits wanted and an
//! observer. [`LayerStepper`](crate::LayerStepper) runs the same forward one layer at a time, for
//! quantizing models larger than memory.

use crate::batch::StepsAhead;
use crate::error::{Error, Result};
use crate::speculation::{Drafter, Eagle, Tapped};
use nq_formats::models::Product;
use nq_formats::{ModelConfig, Weight};
use nq_kernels::Routes;
use nq_kernels::cpu::{KvType, OpTiming, PAGE};
use rayon::prelude::*;
use std::fmt;
use std::ops::Range;

/// A model on a device, ready to run. Weights are shared by all its sessions.
pub trait Engine: Send + Sync {
    /// Shape of the model.
    fn config(&self) -> &ModelConfig;

    /// The device, engine, kernels and activations that run it.
    fn description(&self) -> &EngineDescription;

    /// Bytes of weights read to decode one token: all layers and the head, but of the embedding
    /// only rows that are looked up.
    fn bytes_per_token(&self) -> usize;

    /// Measured read bandwidth, in bytes per second, of the memory that holds the weights, for
    /// comparing rates with their limit. Measured on the first call (a fraction of a second)
    /// and kept; `None` if the engine cannot measure it.
    fn memory_bandwidth(&self) -> Option<f64> {
        None
    }

    /// Memory that weights and a session take on a device with its own memory; `None` on others.
    fn device_memory(&self, _spec: &SessionSpec) -> Option<DeviceMemory> {
        None
    }

    /// Most sequences whose next tokens one step of a [`Batch`](crate::batch::Batch) can draw without
    /// copying logits to the host; `None` if logits are always copied.
    fn sampled_together(&self) -> Option<usize> {
        None
    }

    /// Tokens from which on a prefix that `sequences` of a session have in common is read once for
    /// all of them in a step; `None` if each reads it for itself.
    fn read_once_from(&self, _spec: &SessionSpec, _sequences: usize) -> Option<usize> {
        None
    }

    /// Allocates a KV cache and scratch.
    ///
    /// # Errors
    /// If the device does not have enough memory; the error says what did not fit.
    fn session(&self, spec: SessionSpec) -> Result<Box<dyn Session>>;

    /// Starts profiling the cost of each operation, from zero, over all sessions; false if this
    /// engine cannot.
    fn start_profile(&self) -> bool {
        false
    }

    /// Stops profiling and returns the counts, the most expensive operation first. Work that a forward
    /// does between operations is not included.
    fn stop_profile(&self) -> Vec<OpTiming> {
        Vec::new()
    }
}

/// The device, engine, kernels and activations of a model, for reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineDescription {
    /// `nq` or `candle`.
    pub engine: String,
    /// Device and instruction set or compute capability, e.g. `cpu (avx512)`.
    pub device: String,
    /// `fused` or `reference`.
    pub kernels: String,
    /// `f32`, `int8 g32`, ...
    pub activations: String,
    /// Bits of most weights, e.g. 4, 8 or 16.
    pub bits: usize,
    /// Number of CPU threads; 0 on a GPU.
    pub threads: usize,
}

impl fmt::Display for EngineDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} on {}, {} kernels, activations {}, {} threads",
            self.engine, self.device, self.kernels, self.activations, self.threads
        )
    }
}

/// Use of a device's own memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Weights.
    pub weights: usize,
    /// Keys and values of a session.
    pub kv: usize,
    /// Activations and tables of that session.
    pub scratch: usize,
    /// Free memory at the time of asking.
    pub free: usize,
}

impl DeviceMemory {
    /// Sum of weights, keys and values, and scratch.
    pub fn total(&self) -> usize {
        self.weights + self.kv + self.scratch
    }
}

/// Size of a session.
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionSpec {
    /// Most sequences held at once.
    pub slots: usize,
    /// Most positions per sequence.
    pub ctx: usize,
    /// Pages of [`PAGE`] positions for all sequences together; `None`: enough to fill every
    /// slot.
    pub pages: Option<usize>,
    /// Type that keys and values are rounded to.
    pub kv: KvType,
    /// Most tokens of one `forward` (all chunks together); longer inputs must be fed in parts.
    pub max_rows: usize,
}

impl SessionSpec {
    /// Number of pages for keys and values.
    pub fn page_count(&self) -> usize {
        let all = self.slots * self.ctx.div_ceil(PAGE);
        self.pages.unwrap_or(all)
    }
}

/// New tokens of one sequence, at positions `len(slot) ..` of it.
#[derive(Clone, Debug)]
pub struct Chunk<'a> {
    /// The sequence.
    pub slot: usize,
    /// Token ids, at least one.
    pub tokens: &'a [u32],
    /// Rows whose logits are wanted.
    pub logits: LogitsWanted,
}

/// Which rows of a chunk get logits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogitsWanted {
    /// None: the head is not run.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
    /// These rows of the chunk.
    Window(Range<usize>),
}

impl LogitsWanted {
    /// The rows of a chunk of `len` tokens that get logits.
    pub fn rows(&self, len: usize) -> Range<usize> {
        match self {
            LogitsWanted::None => 0..0,
            LogitsWanted::Last => len.saturating_sub(1)..len,
            LogitsWanted::All => 0..len,
            LogitsWanted::Window(r) => r.clone(),
        }
    }
}

/// Logits of one forward: the wanted rows of all chunks, in chunk order.
#[derive(Clone, Copy, Debug)]
pub struct Logits<'a> {
    /// `[rows, vocab]`, row-major.
    pub data: &'a [f32],
    /// Tokens in the vocabulary, the length of a row.
    pub vocab: usize,
}

impl<'a> Logits<'a> {
    /// Logits of row `i`.
    pub fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.vocab..(i + 1) * self.vocab]
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.data.len() / self.vocab.max(1)
    }
}

/// Sequences in progress: a KV cache and the scratch of a forward.
pub trait Session: Send {
    /// The size it was made with.
    fn spec(&self) -> SessionSpec;

    /// Tokens held by a sequence.
    fn len(&self, slot: usize) -> usize;

    /// Forgets all but the first `len` tokens of a sequence.
    fn truncate(&mut self, slot: usize, len: usize);

    /// Makes the sequence in slot `to` the first `len` tokens of the sequence in `from`; `to`'s previous
    /// tokens are dropped. Keys and values are shared, not copied, and take memory once.
    ///
    /// # Errors
    /// [`Error::Request`] if a slot does not exist, if `from` has fewer tokens, or if the engine cannot
    /// share keys and values.
    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<()> {
        Err(Error::Request {
            what: "fork",
            expected: "an engine whose sequences share keys and values".into(),
            found: format!("slot {from} to {to}, {len} tokens"),
        })
    }

    /// Pages for keys and values that no sequence uses; `None` if the engine has no pages.
    fn free_pages(&self) -> Option<usize> {
        None
    }

    /// Bytes of a page of keys and values of all layers, as returned by [`Session::read_page`]; `None`
    /// if the engine does not support that.
    fn page_bytes(&self) -> Option<usize> {
        None
    }

    /// Appends to `out` the keys and values of all layers at positions `index * PAGE` to
    /// `(index + 1) * PAGE` of a sequence, in their layout in memory.
    ///
    /// # Errors
    /// [`Error::Request`] if the sequence has fewer positions, or if the engine does not support this.
    fn read_page(&mut self, slot: usize, index: usize, out: &mut Vec<u8>) -> Result<()> {
        let _ = (slot, index, out);
        Err(no_pages())
    }

    /// Appends [`PAGE`] positions to a sequence whose length is a multiple of [`PAGE`]: bytes that
    /// [`Session::read_page`] returned for a sequence with the same tokens up to there, in a session of
    /// the same model and [`SessionSpec::kv`].
    ///
    /// # Errors
    /// [`Error::PagesFull`], [`Error::ContextFull`]; [`Error::Request`] if the sequence ends within
    /// a page, if `page` has not [`Session::page_bytes`] bytes, or if the engine does not support this.
    /// The sequence is then unchanged.
    fn append_page(&mut self, slot: usize, page: &[u8]) -> Result<()> {
        let _ = (slot, page);
        Err(no_pages())
    }

    /// Runs the chunks through the model and appends them to their sequences. Several
    /// chunks must name different slots.
    ///
    /// # Errors
    /// [`crate::Error::ContextFull`], [`crate::Error::PagesFull`] or [`crate::Error::Request`]
    /// before anything is computed; the sequences are then unchanged.
    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>>;

    /// As [`Session::forward`], but for the rows that want logits appends the head's inputs to `out` instead:
    /// their hidden states after the final norm, `[rows, hidden]`.
    ///
    /// # Errors
    /// As [`Session::forward`]; [`Error::Unsupported`] if the engine does not pass hidden states to observers.
    fn forward_hidden(&mut self, chunks: &[Chunk<'_>], out: &mut Vec<f32>) -> Result<()> {
        struct HeadInput<'a>(&'a mut Vec<f32>);
        impl Observer for HeadInput<'_> {
            fn wants_inputs(&self) -> bool {
                false
            }
            fn head_input(&mut self, x: &[f32]) {
                self.0.extend_from_slice(x);
            }
        }
        self.forward(chunks, Some(&mut HeadInput(out))).map(drop)
    }

    /// Rows of one sequence up to which a step gives the logits, bit for bit, that as many steps of one
    /// row give: an answer with drafts is then the answer without.
    fn exact_rows(&self) -> usize {
        1
    }

    /// Rows up to which a step of a [`Batch`](crate::Batch) checks drafted tokens. Where that is more than
    /// [`Session::exact_rows`], an answer with drafts may differ from one without where two tokens are
    /// nearly as likely.
    fn draft_rows(&self) -> usize {
        self.exact_rows()
    }

    /// The drafter of an EAGLE-3 head for this session, which gives it its residual streams from now on.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the engine cannot, or if the head is on another device; errors of the device.
    fn eagle_drafts(&mut self, head: &Eagle) -> Result<Box<dyn Drafter>> {
        let _ = head;
        Err(Error::Unsupported {
            engine: "nq",
            what: "drafts from residual streams (EAGLE-3)",
            expected: "a model that runs on nq's fused kernels".into(),
            found: "one that does not".into(),
        })
    }

    /// The streams of the sequence in `slot` that were kept for a drafter since the last call; `None` if there are
    /// none, or if the drafter has read them already.
    fn take_tapped(&mut self, slot: usize) -> Option<Tapped> {
        let _ = slot;
        None
    }

    /// Steps ahead of the host, whose tokens the device draws; `None` if the device cannot.
    fn steps_ahead(&mut self) -> Option<&mut dyn StepsAhead> {
        None
    }
}

/// The error of an engine without access to pages of keys and values.
fn no_pages() -> Error {
    Error::Request {
        what: "pages of keys and values",
        expected: "an engine that reads and writes them".into(),
        found: "one that cannot".into(),
    }
}

/// Refuses a page of keys and values that has not `expected` bytes.
pub(crate) fn check_page(page: &[u8], expected: usize) -> Result<()> {
    if page.len() == expected {
        return Ok(());
    }
    Err(Error::Request {
        what: "a page of keys and values",
        expected: format!("{expected} bytes"),
        found: page.len().to_string(),
    })
}

/// True if `x` contains neither NaN nor infinity.
pub(crate) fn all_finite(x: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    // Without an early exit inside a block, the compiler can vectorize the loop.
    let block_finite = |b: &[f32]| {
        b.iter()
            .fold(true, |ok, v| ok & (v.to_bits() & EXPONENT != EXPONENT))
    };
    x.chunks(4096).all(block_finite)
}

/// An error if `x`, the output of layer `layer`, holds a NaN or an infinity.
pub(crate) fn check_finite(layer: usize, x: &[f32]) -> Result<()> {
    if all_finite(x) {
        Ok(())
    } else {
        Err(Error::NotFinite {
            what: "the output",
            layer,
        })
    }
}

/// Refuses chunks that do not fit a session, before anything is computed. `len` returns the
/// number of tokens in a slot.
pub(crate) fn check_chunks(
    chunks: &[Chunk<'_>],
    spec: &SessionSpec,
    vocab: usize,
    len: impl Fn(usize) -> usize,
) -> Result<()> {
    let refuse = |what, expected: String, found: String| {
        Err(Error::Request {
            what,
            expected,
            found,
        })
    };
    let rows: usize = chunks.iter().map(|c| c.tokens.len()).sum();
    if rows > spec.max_rows {
        let most = format!("at most {}", spec.max_rows);
        return refuse("tokens of one forward", most, rows.to_string());
    }
    for (i, chunk) in chunks.iter().enumerate() {
        let (slot, n) = (chunk.slot, chunk.tokens.len());
        if slot >= spec.slots {
            let slots = format!("a slot below {}", spec.slots);
            return refuse("chunk", slots, slot.to_string());
        }
        if chunks[..i].iter().any(|c| c.slot == slot) {
            let found = format!("slot {slot} twice");
            return refuse("chunks", "different slots".into(), found);
        }
        if n == 0 {
            return refuse("chunk", "at least one token".into(), "none".into());
        }
        let wanted = chunk.logits.rows(n);
        if wanted.start > wanted.end || wanted.end > n {
            let rows = format!("rows within 0..{n}");
            return refuse("logits window", rows, format!("{wanted:?}"));
        }
        check_tokens(chunk.tokens, vocab)?;
        let needed = len(slot) + n;
        if needed > spec.ctx {
            return Err(Error::ContextFull {
                capacity: spec.ctx,
                needed,
            });
        }
    }
    Ok(())
}

/// An error if a token id is past the vocabulary.
pub(crate) fn check_tokens(tokens: &[u32], vocab: usize) -> Result<()> {
    match tokens.iter().find(|&&t| t as usize >= vocab) {
        None => Ok(()),
        Some(token) => Err(Error::Request {
            what: "token id",
            expected: format!("below the vocabulary's {vocab}"),
            found: token.to_string(),
        }),
    }
}

/// Receives activations as a forward computes them. All methods do nothing by default.
pub trait Observer {
    /// False if [`Observer::linear_input`] and [`Observer::expert_input`] do nothing: the device then
    /// need not copy inputs to the host, nor compute the inputs of experts that rows are not routed
    /// to.
    fn wants_inputs(&self) -> bool {
        true
    }

    /// The input `x` `[rows, in]` that the Linears of `product` in `layer` share, before any rounding
    /// of activations.
    fn linear_input(&mut self, layer: usize, product: &Product, x: &[f32]) {
        let _ = (layer, product, x);
    }

    /// The input `x` `[rows, in]` of the Linears of `product` of one expert in `layer`, for every row,
    /// whether it is routed to this expert or not.
    fn expert_input(&mut self, layer: usize, product: &Product, expert: usize, x: &[f32]) {
        let _ = (layer, product, expert, x);
    }

    /// The experts of `layer` that each row is routed to.
    fn routed(&mut self, layer: usize, routes: &Routes) {
        let _ = (layer, routes);
    }

    /// Another `rows` rows have gone through a layer whose input statistics the device sums itself
    /// ([`LayerStepper::moments`](crate::LayerStepper::moments)).
    fn rows(&mut self, rows: usize) {
        let _ = rows;
    }

    /// The residual stream `x` `[rows, hidden]` after `layer`.
    fn layer_output(&mut self, layer: usize, x: &[f32]) {
        let _ = (layer, x);
    }

    /// The normalized input `x` `[rows, hidden]` of the head, for the rows whose logits are
    /// wanted.
    fn head_input(&mut self, x: &[f32]) {
        let _ = x;
    }
}

/// Ignores everything.
impl Observer for () {
    fn wants_inputs(&self) -> bool {
        false
    }
}

/// The residual stream of a set of whole sequences, kept between layers.
#[derive(Clone, Debug, Default)]
pub struct Hidden {
    /// `[rows, hidden]`: one sequence after another.
    pub data: Vec<f32>,
    /// Tokens of each sequence, in order.
    pub lengths: Vec<usize>,
}

impl Hidden {
    /// Looks up `sequences` of token ids in the embedding `[vocab, hidden]`.
    ///
    /// # Errors
    /// [`Error::Request`] for a token id past the vocabulary.
    pub fn embed(embedding: &Weight, sequences: &[Vec<u32>]) -> Result<Self> {
        let (vocab, width) = embedding.dims();
        let tokens = sequences.concat();
        check_tokens(&tokens, vocab)?;
        let mut data = vec![0.0; tokens.len() * width];
        data.par_chunks_mut(width)
            .zip(&tokens)
            .try_for_each(|(row, &token)| embedding.dequantize_row(token as usize, row))?;
        Ok(Hidden {
            data,
            lengths: sequences.iter().map(Vec::len).collect(),
        })
    }

    /// Checks that the stream has the number of rows given by its lengths, each of `width` values.
    ///
    /// # Errors
    /// [`Error::Request`] if it does not.
    pub fn check(&self, width: usize) -> Result<()> {
        let rows: usize = self.lengths.iter().sum();
        if self.data.len() == rows * width {
            return Ok(());
        }
        Err(Error::Request {
            what: "residual stream",
            expected: format!("[{rows}, {width}]"),
            found: format!("{} values", self.data.len()),
        })
    }

    /// Like [`Hidden::check`], and checks that `rows` are among its rows.
    ///
    /// # Errors
    /// [`Error::Request`] if they are not.
    pub fn check_rows(&self, width: usize, rows: &Range<usize>) -> Result<()> {
        self.check(width)?;
        let all: usize = self.lengths.iter().sum();
        if rows.start <= rows.end && rows.end <= all {
            return Ok(());
        }
        Err(Error::Request {
            what: "rows of the head",
            expected: format!("within 0..{all}"),
            found: format!("{rows:?}"),
        })
    }
}
