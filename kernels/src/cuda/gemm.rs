//! Products and attention of many rows at once.

use super::driver::{Address, Buffer, LaunchShape, Stream};
use super::linear::DeviceLinear;
use super::pack::SPAN;
use super::rows::{CacheArgs, DeviceCache, HEAD_DIM};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};

/// What a product of many rows becomes.
pub enum GemmOutput<'a> {
    /// `y` `[m, rows]`
    Store(&'a mut Buffer<f32>),
    /// Added to `y` `[m, rows]`.
    Add(&'a mut Buffer<f32>),
    /// An interleaved gate and up: `silu(gate) * up` `[m, rows / 2 padded to 256]` in FP16.
    Silu(&'a mut Buffer<u16>),
}

/// New tokens of one sequence among the rows of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceRows {
    /// First row.
    pub row: usize,
    /// Rows.
    pub count: usize,
    /// Position of the first.
    pub position: usize,
    /// The sequence.
    pub slot: usize,
}

/// `GemmArgs` of `cuda/gemm.cuh`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct GemmArgs {
    codes: Address,
    meta: Address,
    x: Address,
    y: Address,
    half: Address,
    m: i32,
    rows: i32,
    tiles: i32,
    spans: i32,
    groups: i32,
    meta_bytes: i32,
    padded: i32,
    epilogue: i32,
    scale: f32,
    pad: i32,
}

/// An instance of `cuda/gemm.cu`: rows of x and tiles of weights that a block takes.
struct Instance {
    rows: usize,
    tiles: usize,
    threads: usize,
}

/// By rising rows of x.
const INSTANCES: [Instance; 4] = [
    Instance {
        rows: 8,
        tiles: 4,
        threads: 128,
    },
    Instance {
        rows: 16,
        tiles: 4,
        threads: 128,
    },
    Instance {
        rows: 64,
        tiles: 4,
        threads: 128,
    },
    Instance {
        rows: 128,
        tiles: 8,
        threads: 256,
    },
];

/// Stages of `cuda/gemm.cu`.
const STAGES: usize = 4;

impl Stream {
    /// `m` rows of FP16 activations `x` `[m, inputs padded to 256]` times `w`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn gemm(
        &self,
        w: &DeviceLinear,
        x: &Buffer<u16>,
        output: GemmOutput<'_>,
        m: usize,
    ) -> Result<()> {
        let spans = w.inputs().div_ceil(SPAN);
        let fits = |what, expected: usize, found: usize| match found >= expected {
            true => Ok(()),
            false => Err(Error::Shape {
                op: "gemm",
                what,
                expected: format!("at least {expected} values"),
                found: found.to_string(),
            }),
        };
        fits("x", m * spans * SPAN, x.len())?;
        let packed = w.args();
        let mut args = GemmArgs {
            codes: packed.codes,
            meta: packed.meta,
            x: x.at(0),
            m: m as i32,
            rows: packed.rows,
            tiles: w.rows().div_ceil(super::pack::TILE) as i32,
            spans: packed.spans,
            groups: packed.groups,
            meta_bytes: packed.meta_bytes,
            scale: packed.scale,
            ..GemmArgs::zeroed()
        };
        match output {
            GemmOutput::Store(y) => {
                fits("y", m * w.rows(), y.len())?;
                args.y = y.at(0);
            }
            GemmOutput::Add(y) => {
                fits("y", m * w.rows(), y.len())?;
                args.y = y.at(0);
                args.epilogue = 1;
            }
            GemmOutput::Silu(half) => {
                let padded = (w.rows() / 2).next_multiple_of(SPAN);
                fits("FP16 output", m * padded, half.len())?;
                args.half = half.at(0);
                args.padded = padded as i32;
                args.epilogue = 2;
            }
        }
        let last = &INSTANCES[INSTANCES.len() - 1];
        let instance = INSTANCES.iter().find(|i| m <= i.rows).unwrap_or(last);
        let weights = instance.tiles * w.kind().bits() * 128;
        let shape = LaunchShape {
            grid: (
                (args.tiles as usize).div_ceil(instance.tiles),
                m.div_ceil(instance.rows),
                1,
            ),
            threads: instance.threads,
            shared: STAGES * (instance.rows * 128 + weights),
            overlap: false,
        };
        let name = format!("gemm_{}_{}", w.kind().kernel_part(), instance.rows);
        // SAFETY: the arguments are `GemmArgs` of the kernel; sizes were checked.
        unsafe { self.launch(&name, shape, &args) }
    }

    /// `out` `[rows, heads * 128 padded to 256]` in FP16: attention of one sequence's new rows
    /// over its cache, which holds their keys and values already.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn attention_prefill(
        &self,
        qkv: &Buffer<f32>,
        sequence: SequenceRows,
        heads: usize,
        cache: &DeviceCache,
        out: &mut Buffer<u16>,
    ) -> Result<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            qkv: Address,
            cache: CacheArgs,
            out: Address,
            row0: i32,
            count: i32,
            position0: i32,
            slot: i32,
            heads: i32,
            padded: i32,
        }
        let SequenceRows {
            row,
            count,
            position,
            slot,
        } = sequence;
        let end = row + count;
        let width = (heads + 2 * cache.kv_heads()) * HEAD_DIM;
        let padded = (heads * HEAD_DIM).next_multiple_of(SPAN);
        let fits = qkv.len() >= end * width
            && out.len() >= end * padded
            && position + count <= cache.capacity()
            && slot < cache.slots()
            && heads.is_multiple_of(cache.kv_heads())
            && count > 0;
        if !fits {
            return Err(Error::Shape {
                op: "attention_prefill",
                what: "rows",
                expected: format!(
                    "rows of {width} and {padded} values, in a cache of {} x {}",
                    cache.slots(),
                    cache.capacity()
                ),
                found: format!("{sequence:?} in {} and {} values", qkv.len(), out.len()),
            });
        }
        let args = Args {
            qkv: qkv.at(0),
            cache: cache.args(),
            out: out.at(0),
            row0: row as i32,
            count: count as i32,
            position0: position as i32,
            slot: slot as i32,
            heads: heads as i32,
            padded: padded as i32,
        };
        let name = format!("attention_prefill_{}", cache.suffix());
        let tile = 64 * HEAD_DIM;
        let shape = LaunchShape {
            grid: (count.div_ceil(64), heads, 1),
            threads: 128,
            // `PrefillShared`: two buffers of keys and values, and of scales.
            shared: match cache.suffix() {
                "int8" => 4 * tile + 8 * 64,
                _ => 8 * tile + 8 * 64,
            },
            overlap: false,
        };
        // SAFETY: the arguments are the kernel's; sizes were checked.
        unsafe { self.launch(&name, shape, &args) }
    }
}
