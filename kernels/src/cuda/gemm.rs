//! Products and attention of many rows at once.

use super::attention::{CacheArgs, HEAD_DIM, LayerPages};
use super::driver::{Address, Buffer, LaunchShape, Matrix, Stream, TensorMap};
use super::linear::DeviceLinear;
use super::pack::{PackedKind, SPAN, TILE};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};

/// What a product of many rows becomes.
pub enum GemmOutput<'a> {
    /// `y` `[m, rows]`
    Store(&'a mut Buffer<f32>),
    /// Added to `y` `[m, rows]`.
    Add(&'a mut Buffer<f32>),
    /// An interleaved gate and up: `silu(gate) * up` `[m, rows / 2 padded to 256]` in FP16, in
    /// operand order.
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

impl Instance {
    /// The smallest that takes `m` rows of x at once, or the largest, of those whose stages a
    /// block's `room` of shared memory holds: with 99 KiB (compute capability 8.6, 8.9, 12.0)
    /// the largest for 16-bit weights does not fit.
    fn choose(room: usize, m: usize, kind: PackedKind) -> &'static Self {
        let (first, rest) = (&INSTANCES[0], &INSTANCES[1..]);
        let fitting = rest.iter().filter(|i| i.shared(kind) <= room);
        fitting.fold(first, |best, i| if best.rows < m { i } else { best })
    }

    fn shared(&self, kind: PackedKind) -> usize {
        STAGES * (self.rows * 128 + self.tiles * kind.bits() * 128)
    }
}

/// `WgmmaArgs` of `cuda/gemm_wgmma.cuh`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct WgmmaArgs {
    x: TensorMap,
    codes: TensorMap,
    meta: TensorMap,
    p: GemmArgs,
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

/// Stages of `cuda/gemm.cu` and of `cuda/gemm_wgmma.cu`.
const STAGES: usize = 4;

/// An instance of `cuda/gemm_wgmma.cu`.
struct WgmmaInstance {
    /// Warpgroups, each of four tiles of weights.
    groups: usize,
    /// Rows of x.
    rows: usize,
    /// Microseconds that a block adds to its multiprocessor's work, for a step of 64 inputs and
    /// besides: as measured on an H200.
    cost: (f64, f64),
}

const WGMMA_INSTANCES: [WgmmaInstance; 3] = [
    WgmmaInstance {
        groups: 1,
        rows: 64,
        cost: (0.18, 1.0),
    },
    WgmmaInstance {
        groups: 1,
        rows: 128,
        cost: (0.23, 1.0),
    },
    WgmmaInstance {
        groups: 3,
        rows: 128,
        cost: (0.54, 5.0),
    },
];

/// Fewer rows than this are for `cuda/gemm.cu`: half of a warpgroup's product would be wasted.
const WGMMA_ROWS: usize = 17;

impl WgmmaInstance {
    /// The cheapest for `m` rows of x and `tiles` tiles of weights, over `spans` spans.
    fn choose(multiprocessors: usize, m: usize, tiles: usize, spans: usize) -> &'static Self {
        let cost = |i: &Self| {
            let blocks = m.div_ceil(i.rows) * tiles.div_ceil(i.groups * 4);
            let turns = blocks.div_ceil(multiprocessors.max(1)) as f64;
            turns * (i.cost.0 * (4 * spans) as f64 + i.cost.1)
        };
        let (first, rest) = (&WGMMA_INSTANCES[0], &WGMMA_INSTANCES[1..]);
        rest.iter()
            .fold(first, |best, i| if cost(i) < cost(best) { i } else { best })
    }

    fn name(&self, kind: PackedKind) -> String {
        let (weights, x) = (self.groups * 64, self.rows);
        format!("gemm_{}_{weights}x{x}", kind.kernel_part())
    }

    /// `STAGE`, `OUT_BYTES` and the alignment of `WgmmaGemm`.
    fn shared(&self, kind: PackedKind) -> usize {
        let stage = self.rows * 128 + self.groups * 4 * (kind.bits() * 128 + kind.meta_room());
        1024 + STAGES * stage.next_multiple_of(1024) + self.groups * self.rows * 80
    }
}

impl Stream {
    /// `m` rows of FP16 activations `x` `[m, inputs padded to 256]`, in operand order
    /// ([`operand_index`](super::pack::operand_index)), times `w`.
    ///
    /// On compute capability 9.0, more than 16 rows meet weights rounded to FP16.
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
            tiles: w.rows().div_ceil(TILE) as i32,
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
        let gpu = self.gpu();
        let (kind, tiles) = (w.kind(), args.tiles as usize);
        if m >= WGMMA_ROWS && gpu.info().capability == (9, 0) {
            let of = gpu.info().multiprocessors;
            let instance = WgmmaInstance::choose(of, m, tiles, spans);
            // Absent from a build for other architectures than sm_90a.
            if gpu.has_kernel(&instance.name(kind)) {
                return self.gemm_wgmma(kind, instance, args);
            }
        }
        let instance = Instance::choose(gpu.info().shared_memory, m, kind);
        let shape = LaunchShape {
            grid: (tiles.div_ceil(instance.tiles), m.div_ceil(instance.rows), 1),
            threads: instance.threads,
            shared: instance.shared(kind),
            overlap: false,
        };
        let name = format!("gemm_{}_{}", kind.kernel_part(), instance.rows);
        // SAFETY: the arguments are `GemmArgs` of the kernel; sizes were checked.
        unsafe { self.launch(&name, shape, &args) }
    }

    /// The same by a kernel of `cuda/gemm_wgmma.cu`; `p`'s operands have been checked.
    fn gemm_wgmma(&self, kind: PackedKind, instance: &WgmmaInstance, p: GemmArgs) -> Result<()> {
        let gpu = self.gpu();
        let (m, tiles, spans) = (p.m as usize, p.tiles as usize, p.spans as usize);
        let block = instance.groups * 4;
        let x = gpu.tensor_map(Matrix {
            address: p.x,
            element: 2,
            rows: m,
            width: spans * SPAN,
            tile: (instance.rows, 64),
            swizzled: true,
        })?;
        // A box has 256 elements at most: of 16-bit weights a step's 2,048 bytes of a tile.
        let element = if kind.bits() == 16 { 8 } else { 4 };
        let step = TILE * 64 * kind.bits() / 8 / element;
        let codes = gpu.tensor_map(Matrix {
            address: p.codes,
            element,
            rows: tiles,
            width: spans * 4 * step,
            tile: (block, step),
            swizzled: false,
        })?;
        let words = p.meta_bytes as usize / 4;
        let meta = match words {
            0 => TensorMap::NONE,
            _ => gpu.tensor_map(Matrix {
                address: p.meta,
                element: 4,
                rows: tiles,
                width: spans * words,
                tile: (block, words),
                swizzled: false,
            })?,
        };
        let args = WgmmaArgs { x, codes, meta, p };
        let shape = LaunchShape {
            grid: (m.div_ceil(instance.rows), tiles.div_ceil(block), 1),
            threads: instance.groups * 128 + 32,
            shared: instance.shared(kind),
            overlap: false,
        };
        // SAFETY: the arguments are `WgmmaArgs` of the kernel, over the operands that were
        // checked; its boxes are the kernel's.
        unsafe { self.launch(&instance.name(kind), shape, &args) }
    }

    /// `out` `[rows, heads * 128 padded to 256]` in FP16, in operand order: attention of one sequence's new rows
    /// over its cache, which holds their keys and values already.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; the driver's.
    pub fn attention_prefill(
        &self,
        qkv: &Buffer<f32>,
        sequence: SequenceRows,
        heads: usize,
        cache: LayerPages<'_>,
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

#[cfg(test)]
mod tests {
    use super::{INSTANCES, Instance, WgmmaInstance};
    use crate::cuda::PackedKind;
    use nq_formats::{Bits, Zeros};

    #[test]
    fn blocks_fit_shared_memory() {
        let affine = |bits| PackedKind::Affine {
            bits,
            zeros: Zeros::Integer,
            groups: 8,
        };
        let kinds = [affine(Bits::B4), affine(Bits::B8), PackedKind::Fp16];
        // Compute capability 8.6, 8.9 and 12.0; 8.0; 9.0.
        for (room, largest) in [(99, [128, 128, 64]), (163, [128; 3]), (227, [128; 3])] {
            for (kind, largest) in kinds.into_iter().zip(largest) {
                let chosen = |m| Instance::choose(room << 10, m, kind).rows;
                assert_eq!([1, 8, 9, 17, 64].map(chosen), [8, 8, 16, 64, 64]);
                assert_eq!(
                    [65, 128, 1000].map(chosen),
                    [largest; 3],
                    "{room} KiB, {kind:?}"
                );
            }
        }
        for i in &super::WGMMA_INSTANCES {
            assert!(kinds.iter().all(|&k| i.shared(k) <= 227 << 10));
        }
        assert!(INSTANCES.is_sorted_by_key(|i| i.rows));
    }

    /// On 132 multiprocessors: what measured fastest, and what keeps them all busy.
    #[test]
    fn blocks_suit_the_product() {
        let chosen = |m: usize, rows: usize, inputs: usize| {
            let i = WgmmaInstance::choose(132, m, rows.div_ceil(16), inputs.div_ceil(256));
            (i.groups * 64, i.rows)
        };
        // 8B: qkv, o, gate_up, down.
        assert_eq!(chosen(512, 6144, 4096), (192, 128));
        assert_eq!(chosen(512, 4096, 4096), (64, 128));
        assert_eq!(chosen(512, 24576, 4096), (192, 128));
        assert_eq!(chosen(512, 4096, 12288), (64, 128));
        // 0.6B: o, down.
        assert_eq!(chosen(512, 1024, 2048), (64, 64));
        assert_eq!(chosen(512, 1024, 3072), (64, 64));
        assert_eq!(chosen(17, 1, 1), (64, 64));
        // What `products_of_many_rows_in_real_shapes` relies on.
        assert_eq!(chosen(333, 49_000, 1000), (192, 128));
        assert_eq!(chosen(200, 4096, 1024), (64, 128));
    }
}
