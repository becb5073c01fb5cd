//! Keys and values on the device, and attention over them.

use super::driver::{Address, Buffer, Checked, Gpu, LaunchShape, Operands, Stream};
use super::kernel::kernels;
use super::pack::SPAN;
use super::rows::{Places, Row, Step, shape};
use crate::cpu::{KvType, PAGE};
use crate::error::{Error, Result};

/// Width of a head that the attention kernels serve.
pub const HEAD_DIM: usize = 128;

/// Keys and values of all layers and sequences, in pages of [`PAGE`] positions.
///
/// A sequence is a row of the page tables: its position `p` is row `p % PAGE` of page
/// `tables[slot][p / PAGE]`. One page more than asked for, and one slot that has it as its first,
/// belong to nobody: rows that fill a step up are computed there ([`DevicePages::idle_slot`]).
pub struct DevicePages {
    keys: Buffer<u8>,   // [layers, pages + 1, kv_heads, PAGE, 128]
    values: Buffer<u8>, // [layers, pages + 1, kv_heads, 128, PAGE]
    scales: Option<(Buffer<u16>, Buffer<u16>)>, // [layers, pages + 1, kv_heads, PAGE]
    tables: Buffer<u32>, // [slots + 1, table_len]
    shape: PagesShape,
    table_len: usize,
}

/// Sizes of [`DevicePages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagesShape {
    /// What keys and values are rounded to.
    pub kv: KvType,
    /// Layers.
    pub layers: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Pages of each layer.
    pub pages: usize,
    /// Sequences at most.
    pub slots: usize,
    /// Positions of a sequence at most.
    pub ctx: usize,
}

impl PagesShape {
    /// Rows of keys (and of values) of one page.
    fn page_rows(&self) -> usize {
        self.kv_heads * PAGE
    }

    fn rows(&self) -> usize {
        self.layers * (self.pages + 1) * self.page_rows()
    }
}

/// Where [`DevicePages::set_pages`] puts a page: `slot`'s positions from `PAGE * index` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageEntry {
    /// The sequence.
    pub slot: usize,
    /// Which of its pages.
    pub index: usize,
    /// The page.
    pub page: u32,
}

/// One layer of [`DevicePages`].
#[derive(Clone, Copy)]
pub struct LayerPages<'a> {
    pages: &'a DevicePages,
    layer: usize,
}

/// `Cache` of `cuda/rows.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct CacheArgs {
    keys: Address,
    values: Address,
    key_scales: Address,
    value_scales: Address,
    tables: Address,
    kv_heads: i32,
    table_len: i32,
}

impl DevicePages {
    /// Zeroed pages; every table's entries name the page that belongs to nobody.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::NoKernel`] for f32, which the device does not keep.
    pub fn new(gpu: &Gpu, shape: PagesShape) -> Result<Self> {
        let what = "the KV cache";
        if shape.kv == KvType::F32 {
            return Err(Error::NoKernel {
                op: "attention",
                scheme: "f32 keys and values".into(),
                activations: "f32".into(),
                device: gpu.info().to_string(),
            });
        }
        let codes = shape.rows() * HEAD_DIM * if shape.kv == KvType::Int8 { 1 } else { 2 };
        let scales = || gpu.zeros(what, shape.rows());
        let scales = match shape.kv {
            KvType::Int8 => Some((scales()?, scales()?)),
            _ => None,
        };
        let table_len = shape.ctx.div_ceil(PAGE);
        let nobodys = vec![shape.pages as u32; (shape.slots + 1) * table_len];
        Ok(DevicePages {
            keys: gpu.zeros(what, codes)?,
            values: gpu.zeros(what, codes)?,
            scales,
            tables: gpu.upload(what, &nobodys)?,
            shape,
            table_len,
        })
    }

    /// Sizes.
    pub fn shape(&self) -> &PagesShape {
        &self.shape
    }

    /// Bytes of keys, values, scales and tables.
    pub fn bytes(&self) -> usize {
        let scales = self
            .scales
            .as_ref()
            .map_or(0, |(k, v)| k.bytes() + v.bytes());
        self.keys.bytes() + self.values.bytes() + scales + self.tables.bytes()
    }

    /// A slot of nobody's, for rows at position 0 whose results nobody reads.
    pub fn idle_slot(&self) -> usize {
        self.shape.slots
    }

    /// Where rows may stand: in nobody's slot, too.
    pub fn places(&self) -> Places {
        Places {
            positions: self.table_len * PAGE,
            slots: self.shape.slots + 1,
        }
    }

    /// One layer's keys and values.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> LayerPages<'_> {
        assert!(
            layer < self.shape.layers,
            "layer {layer} of {}",
            self.shape.layers
        );
        LayerPages { pages: self, layer }
    }
}

impl LayerPages<'_> {
    /// Where rows may stand.
    pub(crate) fn places(&self) -> Places {
        self.pages.places()
    }

    /// Key and value heads.
    pub(crate) fn kv_heads(&self) -> usize {
        self.pages.shape.kv_heads
    }

    pub(crate) fn is_int8(&self) -> bool {
        self.pages.scales.is_some()
    }

    /// As operands of `o`.
    pub(crate) fn args(&self, o: &Operands<'_>) -> Result<CacheArgs> {
        let pages = self.pages;
        let rows = (pages.shape.pages + 1) * pages.shape.page_rows();
        let row = self.layer * rows;
        let bytes = pages.keys.len() / pages.shape.rows();
        let codes = |all| o.part("cache", all, row * bytes, &[rows, bytes]);
        let (k, v) = match &pages.scales {
            Some((k, v)) => (
                o.part("scales of the cache", k, row, &[rows])?,
                o.part("scales of the cache", v, row, &[rows])?,
            ),
            None => (Address::NULL, Address::NULL),
        };
        Ok(CacheArgs {
            keys: codes(&pages.keys)?,
            values: codes(&pages.values)?,
            key_scales: k,
            value_scales: v,
            tables: o.of("page tables", &pages.tables, &[pages.tables.len()])?,
            kv_heads: pages.shape.kv_heads as i32,
            table_len: pages.table_len as i32,
        })
    }
}

/// What attention needs of a layer besides its input.
pub struct Heads<'a> {
    /// Query heads.
    pub heads: usize,
    /// `[128]`
    pub q_gain: &'a Buffer<f32>,
    /// `[128]`
    pub k_gain: &'a Buffer<f32>,
    /// `[positions, 64]` of (cos, sin).
    pub cos_sin: &'a Buffer<[f32; 2]>,
    /// RMSNorm's.
    pub eps: f32,
}

/// [`Heads`] as kernels take them.
pub(super) struct HeadArgs {
    pub(super) q_gain: Address,
    pub(super) k_gain: Address,
    pub(super) cos_sin: Address,
}

impl Heads<'_> {
    /// As operands of `o`, over `cache`.
    pub(super) fn args(&self, o: &Operands<'_>, cache: LayerPages<'_>) -> Result<HeadArgs> {
        let kv_heads = cache.kv_heads();
        let group = self.heads / kv_heads.max(1);
        if !self.heads.is_multiple_of(kv_heads) || !(1..=8).contains(&group) {
            let expected = format!("1 to 8 for each of {kv_heads} key heads");
            return o.refuse("query heads", expected, self.heads);
        }
        let positions = cache.places().positions;
        Ok(HeadArgs {
            q_gain: o.of("gain of queries", self.q_gain, &[HEAD_DIM])?,
            k_gain: o.of("gain of keys", self.k_gain, &[HEAD_DIM])?,
            cos_sin: o.of("rotary table", self.cos_sin, &[positions, HEAD_DIM / 2])?,
        })
    }
}

/// How a step's attention is launched.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Rows.
    pub m: usize,
    /// [`AttentionScratch::splits`] of the longest.
    pub splits: usize,
    /// Keeps the next kernel from starting before the one in front has ended: what it requests
    /// early then does not hold up this one's operands.
    pub late: bool,
    /// Rows that follow one another may be of one sequence: up to [`MOST_RUN`] at consecutive
    /// positions. Without, each row is a sequence of its own.
    pub runs: bool,
}

/// Rows of one sequence in a step, at most (`cuda/attention_decode.cuh`).
pub const MOST_RUN: usize = 16;

/// Where a step's attention goes.
pub enum AttentionOutput<'a> {
    /// `[m, heads * 128]`.
    Full(&'a mut Buffer<f32>),
    /// `[m, heads * 128 padded to 256]` in FP16, in operand order
    /// ([`operand_index`](super::pack::operand_index)); what lies past `heads * 128` stays.
    Half(&'a mut Buffer<u16>),
}

/// Where the splits of long contexts meet.
pub struct AttentionScratch {
    partial: Buffer<[f32; HEAD_DIM]>, // [m, heads, splits]
    tops: Buffer<[f32; 2]>,           // [m, heads, splits]
    arrived: Buffer<i32>,             // [m, kv_heads]
}

impl AttentionScratch {
    /// `sizeof(AttentionShared)` of `cuda/attention_decode.cuh`: with more, a block would not
    /// share a multiprocessor with the products of the largest models.
    const SHARED_FP16: usize = 2 * 4 * 16 * 512 + 4 * 1024 + 4096 + 2832;
    const SHARED_INT8: usize = 2 * 4 * 16 * 512 + 4 * 1024 + 4096 + 3600;
    /// What the new keys and values of a run take more, their scales, and what they are made of.
    const RUN_FP16: usize = 2 * (MOST_RUN - 1) * 2 * HEAD_DIM + 64 + Self::JOBS;
    const RUN_INT8: usize = 2 * (MOST_RUN - 1) * HEAD_DIM + 64 + Self::JOBS;
    const JOBS: usize = (8 + 2 * MOST_RUN) * 4 * HEAD_DIM;
    /// `LEAST_SPLIT` of `cuda/attention_decode.cuh`.
    const LEAST_SPLIT: usize = 256;
    /// `MOST_SPLITS` of `cuda/attention_decode.cuh`.
    const MOST_SPLITS: usize = 64;

    /// For steps of up to `sequences` rows, with `heads` query and `kv_heads` key heads.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, heads: usize, kv_heads: usize, sequences: usize) -> Result<Self> {
        let parts = (1..=sequences).map(|m| m * Self::most_splits(gpu, kv_heads, m));
        let parts = heads * parts.max().unwrap_or(0);
        let what = "attention scratch";
        Ok(AttentionScratch {
            partial: gpu.zeros(what, parts)?,
            tops: gpu.zeros(what, parts)?,
            arrived: gpu.zeros(what, sequences * kv_heads)?,
        })
    }

    /// Parts of a context, at most: as many as two blocks on every multiprocessor take.
    fn most_splits(gpu: &Gpu, kv_heads: usize, m: usize) -> usize {
        let blocks = 2 * gpu.info().multiprocessors;
        (blocks / (kv_heads * m).max(1)).clamp(1, Self::MOST_SPLITS)
    }

    /// Parts of a context that a step of `m` sequences starts blocks for, the longest of them of
    /// `positions`, new ones included. A power of two or the most, so that few recorded steps
    /// serve a growing sequence.
    pub fn splits(gpu: &Gpu, kv_heads: usize, m: usize, positions: usize) -> usize {
        let wanted = positions.div_ceil(Self::LEAST_SPLIT).next_power_of_two();
        wanted.min(Self::most_splits(gpu, kv_heads, m))
    }
}

kernels! {
    SET_PAGES: SetPagesArgs = "set_pages" in "pages.cu",
        test "kernels/tests/cuda/attention.rs::copied_pages", bench "pages";
    COPY_PAGE: CopyPageArgs = "copy_page" in "pages.cu",
        test "kernels/tests/cuda/attention.rs::copied_pages", bench "pages";
    APPEND: AppendArgs = "append" in "reference.cu",
        test "kernels/tests/cuda/attention.rs::attention", bench "attention_prefill",
        instances &["append_fp16", "append_int8"];
    ATTENTION_REFERENCE: AttendArgs = "attention_reference" in "reference.cu",
        test "kernels/tests/cuda/attention.rs::attention", bench "attention_prefill";
    ATTENTION_DECODE: AttentionArgs = "attention_decode" in "attention_decode.cu",
        test "kernels/tests/cuda/attention.rs::attention", bench "attention_decode",
        instances &["attention_decode_fp16", "attention_decode_int8"];
    ATTENTION_RUN: AttentionArgs = "attention_run" in "attention_decode.cu",
        test "kernels/tests/cuda/attention.rs::attention", bench "attention_run",
        instances &["attention_run_fp16", "attention_run_int8"];
}

/// `MOST_ENTRIES` of `cuda/pages.cu`.
const MOST_ENTRIES: usize = 256;

/// `SetPagesArgs` of `cuda/pages.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct SetPagesArgs {
    tables: Address,
    count: i32,
    entries: [[u32; 2]; MOST_ENTRIES],
}

/// `CopyPageArgs` of `cuda/pages.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct CopyPageArgs {
    parts: [Address; 4],
    words: [i32; 4],
    pages: i32,
    from: u32,
    to: u32,
}

/// `AppendArgs` of `cuda/reference.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct AppendArgs {
    qkv: Address,
    rows: Address,
    q_gain: Address,
    k_gain: Address,
    cos_sin: Address,
    cache: CacheArgs,
    m: i32,
    heads: i32,
    eps: f32,
}

/// `AttendArgs` of `cuda/reference.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct AttendArgs {
    qkv: Address,
    rows: Address,
    cache: CacheArgs,
    out: Address,
    heads: i32,
}

/// `AttentionArgs` of `cuda/attention_decode.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct AttentionArgs {
    qkv: Address,
    q_gain: Address,
    k_gain: Address,
    cos_sin: Address,
    cache: CacheArgs,
    step: Address,
    out: Address,
    half: Address,
    partial: Address,
    tops: Address,
    arrived: Address,
    heads: i32,
    padded: i32,
    eps: f32,
    late: i32,
}

impl Stream {
    /// Writes entries of the page tables, in order with the stream's other work.
    ///
    /// # Errors
    /// [`Error::Shape`] for a slot, index or page that there is not; the driver's.
    pub fn set_pages(&self, pages: &mut DevicePages, entries: &[PageEntry]) -> Result<()> {
        let o = self.operands("set_pages");
        let of = pages.shape;
        let there = |e: &PageEntry| {
            e.slot < of.slots && e.index < pages.table_len && (e.page as usize) < of.pages
        };
        if let Some(entry) = entries.iter().find(|e| !there(e)) {
            let (slots, len, pages) = (of.slots, pages.table_len, of.pages);
            let expected = format!("{slots} slots of {len} of {pages} pages");
            return o.refuse("entry", expected, format!("{entry:?}"));
        }
        for some in entries.chunks(MOST_ENTRIES) {
            let mut args = SetPagesArgs {
                tables: o.of("page tables", &pages.tables, &[pages.tables.len()])?,
                count: some.len() as i32,
                entries: [[0; 2]; MOST_ENTRIES],
            };
            for (to, e) in args.entries.iter_mut().zip(some) {
                *to = [(e.slot * pages.table_len + e.index) as u32, e.page];
            }
            // SAFETY: the entries lie in the tables.
            unsafe { self.launch(&SET_PAGES, shape((1, 1), MOST_ENTRIES), &args)? };
        }
        Ok(())
    }

    /// Copies page `from` to page `to`, in all layers.
    ///
    /// # Errors
    /// [`Error::Shape`] for a page that there is not; the driver's.
    pub fn copy_page(&self, pages: &mut DevicePages, from: u32, to: u32) -> Result<()> {
        let o = self.operands("copy_page");
        let of = pages.shape;
        o.at_least("pages", from.max(to) as usize + 1, of.pages)?;
        let bytes = pages.keys.len() / of.rows() * of.page_rows();
        let whole = |all: &Buffer<u8>| o.of("cache", all, &[all.len()]);
        let scales = |all: &Buffer<u16>| o.of("scales of the cache", all, &[all.len()]);
        let (k, v) = match &pages.scales {
            Some((k, v)) => (scales(k)?, scales(v)?),
            None => (Address::NULL, Address::NULL),
        };
        let (words, scale_words) = ((bytes / 16) as i32, (2 * of.page_rows() / 16) as i32);
        let args = CopyPageArgs {
            parts: [whole(&pages.keys)?, whole(&pages.values)?, k, v],
            words: [words, words, scale_words, scale_words],
            pages: of.pages as i32 + 1,
            from,
            to,
        };
        // SAFETY: both pages lie in the pool.
        unsafe { self.launch(&COPY_PAGE, shape((16, of.layers), 256), &args) }
    }

    /// Normalizes and rotates queries (in place) and keys of `qkv` `[m, (heads + 2 kv_heads) *
    /// 128]`, and appends keys and values to the cache at `rows`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
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
        let HeadArgs {
            q_gain,
            k_gain,
            cos_sin,
        } = heads.args(&o, cache)?;
        let width = heads.heads + 2 * cache.kv_heads();
        let args = AppendArgs {
            qkv: o.of("qkv", qkv, &[m, width, HEAD_DIM])?,
            rows: o.of("rows", rows.values(), &[m])?,
            q_gain,
            k_gain,
            cos_sin,
            cache: cache.args(&o)?,
            m: m as i32,
            heads: heads.heads as i32,
            eps: heads.eps,
        };
        let kernel = APPEND.instance(usize::from(cache.is_int8()));
        // SAFETY: the operands were checked, and that the rows lie in the cache.
        unsafe { self.launch(kernel, shape((m.div_ceil(8), width), 256), &args) }
    }

    /// `out` `[m, heads * 128]`: attention of each row over its sequence up to itself, by the
    /// plain kernel.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
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
        rows.bounds().check(&o, cache.places())?;
        o.multiple("query heads", cache.kv_heads(), heads)?;
        let width = heads + 2 * cache.kv_heads();
        let args = AttendArgs {
            qkv: o.of("qkv", qkv, &[m, width, HEAD_DIM])?,
            rows: o.of("rows", rows.values(), &[m])?,
            cache: cache.args(&o)?,
            out: o.of("out", out, &[m, heads, HEAD_DIM])?,
            heads: heads as i32,
        };
        // SAFETY: as for `append`.
        unsafe { self.launch(&ATTENTION_REFERENCE, shape((m, heads), HEAD_DIM), &args) }
    }

    /// Attention of the step's `m` tokens: `qkv` are their products `[m, (heads + 2 kv_heads) *
    /// 128]`; keys and values are appended; the results go to `out`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub fn attention_decode(
        &self,
        qkv: &Buffer<f32>,
        step: &Checked<Step>,
        heads: &Heads<'_>,
        cache: LayerPages<'_>,
        scratch: &mut AttentionScratch,
        out: AttentionOutput<'_>,
        shape: AttentionShape,
    ) -> Result<()> {
        let o = self.operands("attention_decode");
        let AttentionShape {
            m,
            splits,
            late,
            runs,
        } = shape;
        let (count, kv_heads) = (heads.heads, cache.kv_heads());
        step.bounds().places.check(&o, cache.places())?;
        let HeadArgs {
            q_gain,
            k_gain,
            cos_sin,
        } = heads.args(&o, cache)?;
        let padded = (count * HEAD_DIM).next_multiple_of(SPAN);
        let (out, half) = match out {
            AttentionOutput::Full(out) => (o.of("out", out, &[m, count, HEAD_DIM])?, Address::NULL),
            AttentionOutput::Half(out) => (Address::NULL, o.of("FP16 output", out, &[m, padded])?),
        };
        o.at_least("splits", 1, splits)?;
        o.at_most("splits", AttentionScratch::MOST_SPLITS, splits)?;
        let args = AttentionArgs {
            qkv: o.of("qkv", qkv, &[m, count + 2 * kv_heads, HEAD_DIM])?,
            q_gain,
            k_gain,
            cos_sin,
            cache: cache.args(&o)?,
            step: o.of("step", step.values(), &[m])?,
            out,
            half,
            partial: o.of("scratch", &scratch.partial, &[m, count, splits])?,
            tops: o.of("scratch", &scratch.tops, &[m, count, splits])?,
            arrived: o.of("scratch", &scratch.arrived, &[m, kv_heads])?,
            heads: count as i32,
            padded: padded as i32,
            eps: heads.eps,
            late: i32::from(late),
        };
        let int8 = cache.is_int8();
        let (kernel, more) = match (runs, int8) {
            (false, _) => (&ATTENTION_DECODE, 0),
            (true, false) => (&ATTENTION_RUN, AttentionScratch::RUN_FP16),
            (true, true) => (&ATTENTION_RUN, AttentionScratch::RUN_INT8),
        };
        let shared = match int8 {
            true => AttentionScratch::SHARED_INT8,
            false => AttentionScratch::SHARED_FP16,
        };
        let shape = LaunchShape::new((kv_heads, splits, m), 128)
            .shared(shared + more)
            .overlapping();
        // SAFETY: the operands were checked, and that the steps lie in the cache.
        unsafe { self.launch(kernel.instance(usize::from(int8)), shape, &args) }
    }
}
