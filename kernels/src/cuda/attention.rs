//! Keys and values on the device, and attention over them.

use super::driver::{Address, Buffer, Gpu, LaunchShape, Stream};
use super::pack::SPAN;
use super::rows::{Row, Step, at_least, shape};
use crate::cpu::{KvType, PAGE};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};

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

    /// Device bytes of keys, of values, of the scales of each, and of the tables: one allocation
    /// each.
    pub fn allocations(&self) -> [usize; 5] {
        let codes = match self.kv {
            KvType::Int8 => HEAD_DIM,
            KvType::F16 | KvType::F32 => self.kv.bytes(HEAD_DIM),
        };
        let scale = self.kv.bytes(HEAD_DIM) - codes;
        let (codes, scale) = (self.rows() * codes, self.rows() * scale);
        let tables = 4 * (self.slots + 1) * self.ctx.div_ceil(PAGE);
        [codes, codes, scale, scale, tables]
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
#[derive(Clone, Copy, Pod, Zeroable)]
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
        let [codes, _, scales, _, _] = shape.allocations();
        let scales = match scales {
            0 => None,
            n => Some((gpu.zeros(what, n / 2)?, gpu.zeros(what, n / 2)?)),
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

    /// A slot of nobody's, for rows at position 0 whose results nobody reads.
    pub fn idle_slot(&self) -> usize {
        self.shape.slots
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
    /// Positions of a sequence that its table has room for.
    pub(crate) fn capacity(&self) -> usize {
        self.pages.table_len * PAGE
    }

    /// Key and value heads.
    pub(crate) fn kv_heads(&self) -> usize {
        self.pages.shape.kv_heads
    }

    /// Sequences, nobody's included.
    pub(crate) fn slots(&self) -> usize {
        self.pages.shape.slots + 1
    }

    pub(crate) fn suffix(&self) -> &'static str {
        match self.pages.scales {
            Some(_) => "int8",
            None => "fp16",
        }
    }

    pub(crate) fn args(&self) -> CacheArgs {
        let pages = self.pages;
        let rows = (pages.shape.pages + 1) * pages.shape.page_rows();
        let row = self.layer * rows;
        let bytes = pages.keys.len() / pages.shape.rows();
        let (k, v) = match &pages.scales {
            Some((k, v)) => (k.at(row), v.at(row)),
            None => (Address::NULL, Address::NULL),
        };
        CacheArgs {
            keys: pages.keys.at(row * bytes),
            values: pages.values.at(row * bytes),
            key_scales: k,
            value_scales: v,
            tables: pages.tables.at(0),
            kv_heads: pages.shape.kv_heads as i32,
            table_len: pages.table_len as i32,
        }
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

impl Heads<'_> {
    pub(crate) fn check(&self, op: &'static str, cache: LayerPages<'_>) -> Result<()> {
        let kv_heads = cache.kv_heads();
        let group = self.heads / kv_heads.max(1);
        if !self.heads.is_multiple_of(kv_heads) || !(1..=8).contains(&group) {
            return Err(Error::Shape {
                op,
                what: "query heads",
                expected: format!("1 to 8 for each of {kv_heads} key heads"),
                found: self.heads.to_string(),
            });
        }
        let enough = self.cos_sin.len() >= cache.capacity() * HEAD_DIM / 2;
        if self.q_gain.len() != HEAD_DIM || self.k_gain.len() != HEAD_DIM || !enough {
            return Err(Error::Shape {
                op,
                what: "gains and rotary table",
                expected: format!("{HEAD_DIM}, and {} positions", cache.capacity()),
                found: format!(
                    "{} and {}",
                    self.q_gain.len(),
                    self.cos_sin.len() * 2 / HEAD_DIM
                ),
            });
        }
        Ok(())
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

impl Stream {
    /// Writes entries of the page tables, in order with the stream's other work.
    ///
    /// # Errors
    /// [`Error::Shape`] for a slot, index or page that there is not; the driver's.
    pub fn set_pages(&self, pages: &mut DevicePages, entries: &[PageEntry]) -> Result<()> {
        /// `MOST_ENTRIES` of `cuda/pages.cu`.
        const MOST: usize = 256;
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            tables: Address,
            count: i32,
            entries: [[u32; 2]; MOST],
        }
        let of = pages.shape;
        let there = |e: &PageEntry| {
            e.slot < of.slots && e.index < pages.table_len && (e.page as usize) < of.pages
        };
        if let Some(entry) = entries.iter().find(|e| !there(e)) {
            return Err(Error::Shape {
                op: "set_pages",
                what: "entry",
                expected: format!(
                    "{} slots of {} of {} pages",
                    of.slots, pages.table_len, of.pages
                ),
                found: format!("{entry:?}"),
            });
        }
        for some in entries.chunks(MOST) {
            let mut args = Args {
                tables: pages.tables.at(0),
                count: some.len() as i32,
                entries: [[0; 2]; MOST],
            };
            for (to, e) in args.entries.iter_mut().zip(some) {
                *to = [(e.slot * pages.table_len + e.index) as u32, e.page];
            }
            // SAFETY: the arguments are `SetPagesArgs` of the kernel, copied at the launch; the
            // entries lie in the tables.
            unsafe { self.launch("set_pages", shape((1, 1), MOST), &args)? };
        }
        Ok(())
    }

    /// Copies page `from` to page `to`, in all layers.
    ///
    /// # Errors
    /// [`Error::Shape`] for a page that there is not; the driver's.
    pub fn copy_page(&self, pages: &mut DevicePages, from: u32, to: u32) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            parts: [Address; 4],
            words: [i32; 4],
            pages: i32,
            from: u32,
            to: u32,
        }
        let of = pages.shape;
        at_least("copy_page", "pages", from.max(to) as usize + 1, of.pages)?;
        let bytes = pages.keys.len() / of.rows() * of.page_rows();
        let (k, v) = match &pages.scales {
            Some((k, v)) => (k.at(0), v.at(0)),
            None => (Address::NULL, Address::NULL),
        };
        let scales = (2 * of.page_rows() / 16) as i32;
        let args = Args {
            parts: [pages.keys.at(0), pages.values.at(0), k, v],
            words: [(bytes / 16) as i32, (bytes / 16) as i32, scales, scales],
            pages: of.pages as i32 + 1,
            from,
            to,
        };
        // SAFETY: the arguments are `CopyPageArgs` of the kernel; both pages lie in the pool.
        unsafe { self.launch("copy_page", shape((16, of.layers), 256), &args) }
    }

    /// Normalizes and rotates queries (in place) and keys of `qkv` `[m, (heads + 2 kv_heads) *
    /// 128]`, and appends keys and values to the cache at `rows`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn append(
        &self,
        qkv: &mut Buffer<f32>,
        rows: &Buffer<Row>,
        heads: &Heads<'_>,
        cache: LayerPages<'_>,
        m: usize,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
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
        heads.check("append", cache)?;
        let width = heads.heads + 2 * cache.kv_heads();
        at_least("append", "qkv", m * width * HEAD_DIM, qkv.len())?;
        at_least("append", "rows", m, rows.len())?;
        let args = Args {
            qkv: qkv.at(0),
            rows: rows.at(0),
            q_gain: heads.q_gain.at(0),
            k_gain: heads.k_gain.at(0),
            cos_sin: heads.cos_sin.at(0),
            cache: cache.args(),
            m: m as i32,
            heads: heads.heads as i32,
            eps: heads.eps,
        };
        let name = format!("append_{}", cache.suffix());
        // SAFETY: the arguments are the kernel's; sizes were checked. Rows hold positions and
        // slots within the cache: the engine checks requests before it queues them.
        unsafe { self.launch(&name, shape((m.div_ceil(8), width), 256), &args) }
    }

    /// `out` `[m, heads * 128]`: attention of each row over its sequence up to itself, by the
    /// plain kernel.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn attention_reference(
        &self,
        qkv: &Buffer<f32>,
        rows: &Buffer<Row>,
        heads: usize,
        cache: LayerPages<'_>,
        out: &mut Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            qkv: Address,
            rows: Address,
            cache: CacheArgs,
            out: Address,
            heads: i32,
        }
        let op = "attention_reference";
        let width = (heads + 2 * cache.kv_heads()) * HEAD_DIM;
        at_least(op, "qkv", m * width, qkv.len())?;
        at_least(op, "rows", m, rows.len())?;
        at_least(op, "out", m * heads * HEAD_DIM, out.len())?;
        let args = Args {
            qkv: qkv.at(0),
            rows: rows.at(0),
            cache: cache.args(),
            out: out.at(0),
            heads: heads as i32,
        };
        // SAFETY: as for `append`.
        unsafe { self.launch(op, shape((m, heads), HEAD_DIM), &args) }
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
        step: &Buffer<Step>,
        heads: &Heads<'_>,
        cache: LayerPages<'_>,
        scratch: &mut AttentionScratch,
        out: AttentionOutput<'_>,
        shape: AttentionShape,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
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
        let op = "attention_decode";
        let AttentionShape {
            m,
            splits,
            late,
            runs,
        } = shape;
        heads.check(op, cache)?;
        let width = (heads.heads + 2 * cache.kv_heads()) * HEAD_DIM;
        at_least(op, "qkv", m * width, qkv.len())?;
        let outputs = heads.heads * HEAD_DIM;
        let padded = outputs.next_multiple_of(SPAN);
        let (out, half) = match out {
            AttentionOutput::Full(out) => {
                at_least(op, "out", m * outputs, out.len())?;
                (out.at(0), Address::NULL)
            }
            AttentionOutput::Half(out) => {
                at_least(op, "FP16 output", m * padded, out.len())?;
                (Address::NULL, out.at(0))
            }
        };
        at_least(op, "step", m, step.len())?;
        at_least(op, "splits", 1, splits)?;
        at_least(op, "room for splits", splits, AttentionScratch::MOST_SPLITS)?;
        at_least(op, "scratch", m * heads.heads * splits, scratch.tops.len())?;
        at_least(op, "scratch", m * cache.kv_heads(), scratch.arrived.len())?;
        let args = Args {
            qkv: qkv.at(0),
            q_gain: heads.q_gain.at(0),
            k_gain: heads.k_gain.at(0),
            cos_sin: heads.cos_sin.at(0),
            cache: cache.args(),
            step: step.at(0),
            out,
            half,
            partial: scratch.partial.at(0),
            tops: scratch.tops.at(0),
            arrived: scratch.arrived.at(0),
            heads: heads.heads as i32,
            padded: padded as i32,
            eps: heads.eps,
            late: i32::from(late),
        };
        let shape = LaunchShape {
            grid: (cache.kv_heads(), splits, m),
            threads: 128,
            shared: match (&cache.pages.scales, runs) {
                (Some(_), false) => AttentionScratch::SHARED_INT8,
                (None, false) => AttentionScratch::SHARED_FP16,
                (Some(_), true) => AttentionScratch::SHARED_INT8 + AttentionScratch::RUN_INT8,
                (None, true) => AttentionScratch::SHARED_FP16 + AttentionScratch::RUN_FP16,
            },
            overlap: true,
        };
        let kernel = match runs {
            true => "attention_run",
            false => op,
        };
        let name = format!("{kernel}_{}", cache.suffix());
        // SAFETY: the arguments are the kernel's; sizes were checked. The steps' positions and
        // slots are within the cache: the engine checks before it queues steps.
        unsafe { self.launch(&name, shape, &args) }
    }
}
