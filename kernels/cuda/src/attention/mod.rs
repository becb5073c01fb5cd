//! Attention on the device, for the rows of a step: its inputs, outputs and launchers.

pub(super) mod cascade;
mod heads;
pub(super) mod pages;

use super::batch::columns::Columns;
use super::driver::{
    Address, Buffer, Checked, Gpu, LaunchShape, Operands, Stream, has_small_blocks,
};
use super::kernel::kernels;
use super::linear::DeviceLinear;
use super::pack::SPAN;
use super::rows::{MOST_RUN, Row, Step, shape};
use crate::cuda::append::AppendArgs;
use crate::cuda::attention_decode::{AttentionArgs, LEAST_SPLIT, MOST_SPLITS};
use crate::cuda::reference::AttendArgs;
use crate::cuda::rows::HeadVectors;
pub use cascade::{Cascade, CascadeShape};
pub(super) use heads::row_heads;
pub use heads::{HEAD_DIM, WIDE_HEAD_DIM, WIDE_ROTARY_DIMS, rotary_dims};
use nq_kernels::Result;
use nq_kernels::pages::PAGE;
pub use pages::{DevicePages, LayerPages, PageEntry, PageStaging, PagesShape};

/// Parameters of a layer's attention.
pub struct Heads<'a> {
    /// Query heads.
    pub heads: usize,
    /// Gains `[width]` of the norms of queries and of keys, if they are normalized.
    pub gains: Option<[&'a Buffer<f32>; 2]>,
    /// Biases of queries `[heads * width]`, keys and values `[kv_heads * width]`; empty if there are none.
    pub biases: &'a [Buffer<f32>],
    /// `[positions, 64]` of (cos, sin), or `[positions, 32]` for wide heads.
    pub cos_sin: &'a Buffer<[f32; 2]>,
    /// Epsilon of RMSNorm.
    pub eps: f32,
}

/// [`Heads`] as a kernel argument.
pub(super) struct HeadArgs {
    pub(super) vectors: HeadVectors,
    pub(super) cos_sin: Address,
}

impl Heads<'_> {
    /// The argument, checked as operands of `o`, over `cache`, of kernels for up to 8 query heads of a key head.
    pub(super) fn args(&self, o: &Operands<'_>, cache: LayerPages<'_>) -> Result<HeadArgs> {
        let kv_heads = cache.kv_heads();
        let group = self.heads / kv_heads.max(1);
        if group > 8 {
            let expected = format!("1 to 8 for each of {kv_heads} key heads");
            return o.refuse("query heads", expected, self.heads);
        }
        self.of_any(o, cache)
    }

    /// As [`Heads::args`], of kernels for any number of query heads of a key head.
    fn of_any(&self, o: &Operands<'_>, cache: LayerPages<'_>) -> Result<HeadArgs> {
        let kv_heads = cache.kv_heads();
        if kv_heads == 0 || self.heads == 0 || !self.heads.is_multiple_of(kv_heads) {
            let expected = format!("as many for each of {kv_heads} key heads");
            return o.refuse("query heads", expected, self.heads);
        }
        let (positions, width) = (cache.places().positions, cache.head_dim());
        let mut vectors = HeadVectors::NONE;
        for (to, gain) in vectors.gains.iter_mut().zip(self.gains.iter().flatten()) {
            *to = o.of("gain of heads", gain, &[width])?;
        }
        if !matches!(self.biases.len(), 0 | 3) {
            return o.refuse("biases", "none, or those of q, k and v", self.biases.len());
        }
        let counts = [self.heads, kv_heads, kv_heads];
        for ((to, bias), count) in vectors.biases.iter_mut().zip(self.biases).zip(counts) {
            *to = o.of("bias of heads", bias, &[count, width])?;
        }
        Ok(HeadArgs {
            vectors,
            cos_sin: o.of(
                "rotary table",
                self.cos_sin,
                &[positions, rotary_dims(width) / 2],
            )?,
        })
    }
}

/// Launch settings of a step's attention.
#[derive(Clone, Copy)]
pub struct AttentionShape<'a> {
    /// Number of rows.
    pub m: usize,
    /// [`AttentionScratch::splits`] for the longest sequence; fewer are made where parts of shared pages leave no
    /// room for more.
    pub splits: usize,
    /// Keeps the next kernel (a programmatic dependent launch) from starting before the previous one has ended, so that
    /// its early requests do not delay this kernel's operands.
    pub holds_dependents: bool,
    /// True if consecutive rows may belong to one sequence: up to [`MOST_RUN`], at consecutive
    /// positions. If false, each row is a sequence of its own.
    pub runs: bool,
    /// If set, pages that rows share are read once for all of them.
    pub shared: Option<(&'a Cascade, CascadeShape)>,
}

/// Output of a step's attention, or of its recurrence: of `width` values a row.
pub enum AttentionOutput<'a> {
    /// `[m, width]`.
    Full(&'a mut Buffer<f32>),
    /// `[m, width padded to 256]` in FP16, in operand order
    /// ([`operand_index`](super::pack::operand_index)); values past `width` are not changed.
    Half(&'a mut Buffer<u16>),
    /// Prepared for [`Stream::multiply_columns`] by this weight, if [`Columns::suit`] it.
    Columns(&'a mut Columns, &'a DeviceLinear),
}

/// Where an [`AttentionOutput`] goes.
pub(super) struct OutputArgs {
    pub(super) full: Address,
    pub(super) half: Address,
    pub(super) columns: Address,
    pub(super) padded: i32,
    pub(super) column_rows: i32,
    pub(super) nibbles: i32,
}

impl AttentionOutput<'_> {
    /// The arguments for `m` rows of `width` values, checked as operands of `o`.
    pub(super) fn args(self, o: &Operands<'_>, m: usize, width: usize) -> Result<OutputArgs> {
        let padded = width.next_multiple_of(SPAN);
        let mut args = OutputArgs {
            full: Address::NULL,
            half: Address::NULL,
            columns: Address::NULL,
            padded: padded as i32,
            column_rows: 0,
            nibbles: 0,
        };
        match self {
            AttentionOutput::Full(out) => args.full = o.of("out", out, &[m, width])?,
            AttentionOutput::Half(out) => args.half = o.of("FP16 output", out, &[m, padded])?,
            AttentionOutput::Columns(out, w) => {
                if w.inputs() != width {
                    return o.refuse("inputs of the weight", width, w.inputs());
                }
                let target = out.target(o, w, m)?;
                (args.columns, args.column_rows, args.nibbles) =
                    (target.words, target.rows, target.nibbles);
            }
        }
        Ok(args)
    }
}

/// Scratch memory in which the splits of long contexts are combined.
pub struct AttentionScratch {
    partial: Buffer<[f32; HEAD_DIM]>, // [m, heads, splits, and those of shared pages]
    tops: Buffer<[f32; 2]>,           // the same
    arrived: Buffer<i32>,             // [m, kv_heads]
}

impl AttentionScratch {
    /// `sizeof(AttentionShared)` of `cuda/attention_decode.cuh`: with more, a block would not
    /// share a multiprocessor with the products of the largest models.
    const SHARED_FP16: usize = 2 * 4 * 16 * 512 + 4 * 1024 + 4096 + 2832;
    const SHARED_INT8: usize = 2 * 4 * 16 * 512 + 4 * 1024 + 4096 + 3600;
    /// Additional bytes for a run: its new keys and values, and their scales.
    const RUN_FP16: usize = 2 * (MOST_RUN - 1) * 2 * HEAD_DIM + 64;
    const RUN_INT8: usize = 2 * (MOST_RUN - 1) * HEAD_DIM + 64;
    /// And for their inputs, unless blocks have little shared memory (`SMALL_BLOCKS` of `cuda/common.cuh`).
    const JOBS: usize = (8 + 2 * MOST_RUN) * 4 * HEAD_DIM;
    /// Of wide heads.
    const WIDE: usize = 78_992;
    /// `LEAST_PART` of `cuda/attention_decode.cuh`.
    const LEAST_PART: usize = PAGE;

    /// Allocates it for steps of up to `sequences` rows, with `heads` query heads, of which wide ones count
    /// twice, and `kv_heads` key heads.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](nq_kernels::Error::DeviceMemory).
    pub fn new(gpu: &Gpu, heads: usize, kv_heads: usize, sequences: usize) -> Result<Self> {
        let shared = |m| {
            if m > 1 {
                Cascade::most_splits(gpu, kv_heads)
            } else {
                0
            }
        };
        let parts = (1..=sequences).map(|m| m * (Self::most_splits(gpu, kv_heads, m) + shared(m)));
        let parts = heads * parts.max().unwrap_or(0);
        let what = "attention scratch";
        Ok(AttentionScratch {
            partial: gpu.zeros(what, parts)?,
            tops: gpu.zeros(what, parts)?,
            arrived: gpu.zeros(what, sequences * kv_heads)?,
        })
    }

    /// Most parts of a context: as many as two blocks per multiprocessor can take.
    fn most_splits(gpu: &Gpu, kv_heads: usize, m: usize) -> usize {
        let blocks = 2 * gpu.info().multiprocessors;
        (blocks / (kv_heads * m).max(1)).clamp(1, MOST_SPLITS)
    }

    /// Number of parts of a context for which a step of `m` sequences starts blocks, if the longest has
    /// `positions`, including new ones. A power of two or the maximum, so that few recorded steps
    /// serve a growing sequence.
    pub fn splits(gpu: &Gpu, kv_heads: usize, m: usize, positions: usize) -> usize {
        let wanted = match positions {
            ..=LEAST_SPLIT => 1,
            _ => positions.div_ceil(Self::LEAST_PART).next_power_of_two(),
        };
        wanted.min(Self::most_splits(gpu, kv_heads, m))
    }
}

kernels! {
    APPEND: AppendArgs = "append" in "reference.cu",
        test "kernels/cuda/tests/cuda/attention.rs::attention", bench "attention_prefill",
        instances &["append_fp16", "append_int8", "append_wide_fp16", "append_wide_int8"];
    ATTENTION_REFERENCE: AttendArgs = "attention_reference" in "reference.cu",
        test "kernels/cuda/tests/cuda/attention.rs::attention", bench "attention_prefill";
    ATTENTION_DECODE: AttentionArgs = "attention_decode" in "attention_decode.cu",
        test "kernels/cuda/tests/cuda/attention.rs::attention", bench "attention_decode",
        instances &["attention_decode_fp16", "attention_decode_int8",
                    "attention_decode_wide_fp16", "attention_decode_wide_int8"];
    ATTENTION_RUN: AttentionArgs = "attention_run" in "attention_decode.cu",
        test "kernels/cuda/tests/cuda/attention.rs::attention", bench "attention_run",
        instances &["attention_run_fp16", "attention_run_int8"];
    ATTENTION_REST: AttentionArgs = "attention_rest" in "attention_decode.cu",
        test "kernels/cuda/tests/cuda/cascade.rs::shared_pages", bench "attention_shared",
        instances &["attention_rest_fp16", "attention_rest_int8"];
    ATTENTION_RUN_REST: AttentionArgs = "attention_run_rest" in "attention_decode.cu",
        test "kernels/cuda/tests/cuda/attention.rs::attention", bench "attention_run",
        instances &["attention_run_rest_fp16", "attention_run_rest_int8"];
}

impl Stream {
    /// Normalizes and rotates queries (in place) and keys of `qkv` `[m, (heads + 2 kv_heads) *
    /// width]` (with gates, if heads are wide), and appends keys and values to the cache at `rows`.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn append(
        &self,
        qkv: &mut Buffer<f32>,
        rows: &Checked<Row>,
        heads: &Heads<'_>,
        cache: LayerPages<'_>,
        m: usize,
    ) -> Result<()> {
        let o = self.operands("append");
        rows.bounds().check(&o, cache.places())?;
        let HeadArgs { vectors, cos_sin } = heads.of_any(&o, cache)?;
        let turns = cache.places().positions + rows.bounds().images;
        let turns = [turns, rotary_dims(cache.head_dim()) / 2];
        o.of("rotary table", heads.cos_sin, &turns)?;
        let (dim, kv_heads) = (cache.head_dim(), cache.kv_heads());
        let args = AppendArgs {
            qkv: o.of("qkv", qkv, &[m, row_heads(dim, heads.heads, kv_heads), dim])?,
            rows: o.of("rows", rows.values(), &[m])?,
            step: Address::NULL,
            vectors,
            cos_sin,
            cache: cache.args(&o)?,
            m: m as i32,
            heads: heads.heads as i32,
            eps: heads.eps,
            first: 0,
        };
        let kernel = APPEND.instance(cache.instance());
        let grid = [m.div_ceil(8), heads.heads + 2 * kv_heads];
        // SAFETY: the operands were checked, and that the rows are in the cache.
        unsafe { self.launch(kernel, shape(grid, 256), &args) }
    }

    /// `out` `[m, heads * 128]`: attention of each row over its sequence up to itself, by the
    /// reference kernel.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn attention_reference(
        &self,
        qkv: &Buffer<f32>,
        rows: &Checked<Row>,
        heads: usize,
        cache: LayerPages<'_>,
        out: &mut Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        let o = self.operands("attention_reference");
        o.at_most("width of a head", HEAD_DIM, cache.head_dim())?;
        rows.bounds().check(&o, cache.places())?;
        o.multiple("query heads", cache.kv_heads(), heads)?;
        let width = heads + 2 * cache.kv_heads();
        let args = AttendArgs {
            qkv: o.of("qkv", qkv, &[m, width, HEAD_DIM])?,
            rows: o.of("rows", rows.values(), &[m])?,
            cache: cache.args(&o)?,
            out: o.of("out", out, &[m, heads, HEAD_DIM])?,
            heads: heads as i32,
            padding: [0; 1],
        };
        // SAFETY: see `append`.
        unsafe { self.launch(&ATTENTION_REFERENCE, shape([m, heads], HEAD_DIM), &args) }
    }

    /// Attention of the step's `m` tokens. `qkv` are their products `[m, (heads + 2 kv_heads) *
    /// width]`, with gates if heads are wide; their keys and values are appended to the cache, and the results go to `out`.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub fn attention_decode(
        &self,
        qkv: &Buffer<f32>,
        step: &Checked<Step>,
        heads: &Heads<'_>,
        cache: LayerPages<'_>,
        scratch: &mut AttentionScratch,
        out: AttentionOutput<'_>,
        shape: AttentionShape<'_>,
    ) -> Result<()> {
        let o = self.operands("attention_decode");
        let AttentionShape {
            m,
            splits,
            holds_dependents,
            runs,
            shared,
        } = shape;
        let (count, kv_heads) = (heads.heads, cache.kv_heads());
        step.bounds().places.check(&o, cache.places())?;
        let HeadArgs { vectors, cos_sin } = heads.args(&o, cache)?;
        let dim = cache.head_dim();
        let out = out.args(&o, m, count * dim)?;
        if shared.is_some() {
            o.at_most("width of a head that shares pages", HEAD_DIM, dim)?;
        }
        o.at_least("splits", 1, splits)?;
        let shared_splits = shared.map_or(0, |(_, cut)| cut.splits());
        let splits = splits.min(MOST_SPLITS - shared_splits);
        let parts = splits + shared_splits;
        let shared_pages = match shared {
            Some((cascade, _)) => cascade.row_pages(&o, m)?,
            None => Address::NULL,
        };
        let args = AttentionArgs {
            qkv: o.of("qkv", qkv, &[m, row_heads(dim, count, kv_heads), dim])?,
            vectors,
            cos_sin,
            cache: cache.args(&o)?,
            step: o.of("step", step.values(), &[m])?,
            out: out.full,
            half: out.half,
            columns: out.columns,
            partial: o.of(
                "scratch",
                &scratch.partial,
                &[m, count * dim / HEAD_DIM, parts],
            )?,
            tops: o.of("scratch", &scratch.tops, &[m, count, parts])?,
            arrived: o.of("scratch", &scratch.arrived, &[m, kv_heads])?,
            shared: shared_pages,
            parts: parts as i32,
            shared_splits: shared_splits as i32,
            heads: count as i32,
            padded: out.padded,
            column_rows: out.column_rows,
            nibbles: out.nibbles,
            eps: heads.eps,
            holds_dependents: i32::from(holds_dependents),
            appended: i32::from(runs && dim != HEAD_DIM),
            padding: [0; 1],
        };
        if args.appended != 0 {
            self.append_step(&args, m, cache)?;
        }
        let int8 = cache.is_int8();
        if let Some((cascade, cut)) = shared {
            self.attention_shared(cascade, cut, m, splits, &args, cache)?;
        }
        let jobs = match has_small_blocks(self.gpu().info().shared_memory) {
            true => 0,
            false => AttentionScratch::JOBS,
        };
        let (kernel, more) = match (runs, shared, int8) {
            (false, None, _) => (&ATTENTION_DECODE, 0),
            (false, Some(_), _) => (&ATTENTION_REST, 0),
            (true, None, _) if dim != HEAD_DIM => (&ATTENTION_DECODE, 0),
            (true, None, false) => (&ATTENTION_RUN, AttentionScratch::RUN_FP16 + jobs),
            (true, None, true) => (&ATTENTION_RUN, AttentionScratch::RUN_INT8 + jobs),
            (true, Some(_), false) => (&ATTENTION_RUN_REST, AttentionScratch::RUN_FP16 + jobs),
            (true, Some(_), true) => (&ATTENTION_RUN_REST, AttentionScratch::RUN_INT8 + jobs),
        };
        let (threads, shared_memory) = match (dim, int8) {
            (HEAD_DIM, true) => (128, AttentionScratch::SHARED_INT8 + more),
            (HEAD_DIM, false) => (128, AttentionScratch::SHARED_FP16 + more),
            _ => (64, AttentionScratch::WIDE),
        };
        let shape = LaunchShape::new([kv_heads, splits, m], threads)
            .shared(shared_memory)
            .overlapping();
        // SAFETY: the operands were checked, and that the steps are in the cache.
        unsafe { self.launch(kernel.instance(cache.instance()), shape, &args) }
    }

    /// Appends the keys and values of a step's `m` rows to the cache, with the operands of its attention.
    fn append_step(
        &self,
        attention: &AttentionArgs,
        m: usize,
        cache: LayerPages<'_>,
    ) -> Result<()> {
        let args = AppendArgs {
            qkv: attention.qkv,
            rows: Address::NULL,
            step: attention.step,
            vectors: attention.vectors,
            cos_sin: attention.cos_sin,
            cache: attention.cache,
            m: m as i32,
            heads: attention.heads,
            eps: attention.eps,
            first: attention.heads,
        };
        let shape = shape([m.div_ceil(8), 2 * cache.kv_heads()], 256).overlapping();
        // SAFETY: `attention` holds operands that were checked, and steps that are in the cache.
        unsafe { self.launch(APPEND.instance(cache.instance()), shape, &args) }
    }
}
