//! Keys and values on the device, and attention over them.

use super::driver::{Address, Buffer, Gpu, LaunchShape, Stream};
use super::rows::{Row, Step, at_least, shape};
use crate::cpu::KvType;
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};

/// Width of a head that the attention kernels serve.
pub const HEAD_DIM: usize = 128;

/// Keys and values of one layer, of all sequences.
pub struct DeviceCache {
    keys: Buffer<u8>,
    values: Buffer<u8>,
    scales: Option<(Buffer<u16>, Buffer<u16>)>,
    kv_heads: usize,
    capacity: usize,
    slots: usize,
}

/// `Cache` of `cuda/rows.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct CacheArgs {
    keys: Address,
    values: Address,
    key_scales: Address,
    value_scales: Address,
    kv_heads: i32,
    capacity: i32,
}

impl DeviceCache {
    /// Bytes of one layer's cache.
    pub fn device_bytes(kv: KvType, slots: usize, kv_heads: usize, ctx: usize) -> usize {
        2 * slots * kv_heads * ctx.next_multiple_of(32) * kv.bytes(HEAD_DIM)
    }

    /// Room for `ctx` positions of `slots` sequences.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::NoKernel`] for f32, which the device does not keep.
    pub fn new(gpu: &Gpu, kv: KvType, slots: usize, kv_heads: usize, ctx: usize) -> Result<Self> {
        let capacity = ctx.next_multiple_of(32);
        let rows = slots * kv_heads * capacity;
        let what = "the KV cache";
        let (bytes, int8) = match kv {
            KvType::F16 => (2, false),
            KvType::Int8 => (1, true),
            KvType::F32 => {
                return Err(Error::NoKernel {
                    op: "attention",
                    scheme: "f32 keys and values".into(),
                    activations: "f32".into(),
                    device: gpu.info().to_string(),
                });
            }
        };
        let scales = match int8 {
            true => Some((gpu.zeros(what, rows)?, gpu.zeros(what, rows)?)),
            false => None,
        };
        Ok(DeviceCache {
            keys: gpu.zeros(what, rows * HEAD_DIM * bytes)?,
            values: gpu.zeros(what, rows * HEAD_DIM * bytes)?,
            scales,
            kv_heads,
            capacity,
            slots,
        })
    }

    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Key and value heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Sequences.
    pub fn slots(&self) -> usize {
        self.slots
    }

    pub(crate) fn suffix(&self) -> &'static str {
        match self.scales {
            Some(_) => "int8",
            None => "fp16",
        }
    }

    pub(crate) fn args(&self) -> CacheArgs {
        let (k, v) = match &self.scales {
            Some((k, v)) => (k.at(0), v.at(0)),
            None => (Address::NULL, Address::NULL),
        };
        CacheArgs {
            keys: self.keys.at(0),
            values: self.values.at(0),
            key_scales: k,
            value_scales: v,
            kv_heads: self.kv_heads as i32,
            capacity: self.capacity as i32,
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
    pub(crate) fn check(&self, op: &'static str, cache: &DeviceCache) -> Result<()> {
        let group = self.heads / cache.kv_heads.max(1);
        if !self.heads.is_multiple_of(cache.kv_heads) || !(1..=8).contains(&group) {
            return Err(Error::Shape {
                op,
                what: "query heads",
                expected: format!("1 to 8 for each of {} key heads", cache.kv_heads),
                found: self.heads.to_string(),
            });
        }
        let enough = self.cos_sin.len() >= cache.capacity * HEAD_DIM / 2;
        if self.q_gain.len() != HEAD_DIM || self.k_gain.len() != HEAD_DIM || !enough {
            return Err(Error::Shape {
                op,
                what: "gains and rotary table",
                expected: format!("{HEAD_DIM}, and {} positions", cache.capacity),
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
    /// Sequences.
    pub m: usize,
    /// [`AttentionScratch::splits`] of the longest.
    pub splits: usize,
    /// Keeps the next kernel from starting before the one in front has ended: what it requests
    /// early then does not hold up this one's operands.
    pub late: bool,
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
    /// `LEAST_SPLIT` of `cuda/attention_decode.cuh`.
    const LEAST_SPLIT: usize = 256;
    /// `MOST_SPLITS` of `cuda/attention_decode.cuh`.
    const MOST_SPLITS: usize = 64;

    /// For steps of up to `sequences` tokens, with `heads` query and `kv_heads` key heads.
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
        cache: &mut DeviceCache,
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
        let width = heads.heads + 2 * cache.kv_heads;
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
        cache: &DeviceCache,
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
        let width = (heads + 2 * cache.kv_heads) * HEAD_DIM;
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
    /// 128]`; keys and values are appended; the results are `out` `[m, heads * 128]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    pub fn attention_decode(
        &self,
        qkv: &Buffer<f32>,
        step: &Buffer<Step>,
        heads: &Heads<'_>,
        cache: &mut DeviceCache,
        scratch: &mut AttentionScratch,
        out: &mut Buffer<f32>,
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
            partial: Address,
            tops: Address,
            arrived: Address,
            heads: i32,
            eps: f32,
            late: i32,
        }
        let op = "attention_decode";
        let AttentionShape { m, splits, late } = shape;
        heads.check(op, cache)?;
        let width = (heads.heads + 2 * cache.kv_heads) * HEAD_DIM;
        at_least(op, "qkv", m * width, qkv.len())?;
        at_least(op, "out", m * heads.heads * HEAD_DIM, out.len())?;
        at_least(op, "step", m, step.len())?;
        at_least(op, "splits", 1, splits)?;
        at_least(op, "room for splits", splits, AttentionScratch::MOST_SPLITS)?;
        at_least(op, "scratch", m * heads.heads * splits, scratch.tops.len())?;
        at_least(op, "scratch", m * cache.kv_heads, scratch.arrived.len())?;
        let args = Args {
            qkv: qkv.at(0),
            q_gain: heads.q_gain.at(0),
            k_gain: heads.k_gain.at(0),
            cos_sin: heads.cos_sin.at(0),
            cache: cache.args(),
            step: step.at(0),
            out: out.at(0),
            partial: scratch.partial.at(0),
            tops: scratch.tops.at(0),
            arrived: scratch.arrived.at(0),
            heads: heads.heads as i32,
            eps: heads.eps,
            late: i32::from(late),
        };
        let shape = LaunchShape {
            grid: (cache.kv_heads, splits, m),
            threads: 128,
            shared: match cache.scales {
                Some(_) => AttentionScratch::SHARED_INT8,
                None => AttentionScratch::SHARED_FP16,
            },
            overlap: true,
        };
        let name = format!("{op}_{}", cache.suffix());
        // SAFETY: the arguments are the kernel's; sizes were checked. The steps' positions and
        // slots are within the cache: the engine checks before it queues steps.
        unsafe { self.launch(&name, shape, &args) }
    }
}
