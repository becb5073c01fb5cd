//! The tower of a model that sees, on a GPU ([`nq_model::vision`]): inputs of products are FP16, the stream and sums f32.

use super::session::buffers::padded;
use super::session::step::steps_queued;
use crate::driver::Staging;
use crate::{
    Buffer, DeviceLinear, GemmOutput, Gpu, GpuInfo, ImageGrid, ImageHeads, LayerNorm, Mark,
    PackedKind, Stack, Stream, StreamOptions, Uploader, operand_index,
};
use bytemuck::Pod;
use half::f16;
use half::slice::HalfFloatSliceExt;
use nq_cpu::plan::TowerBytes;
use nq_formats::{Progress, WeightStore};
use nq_kernels::Account;
use nq_model::Dims;
use nq_model::vision::{POSITIONS, Patches, VisionConfig};
use nq_runtime::checks::all_finite;
use nq_runtime::interface::{ImageRows, Tower, check_patches};
use nq_runtime::tower_parts::{LayerNormParts, TowerMerger, TowerParts, TowerReader};
use nq_runtime::{Error, Result};
use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Epsilon of every LayerNorm of a tower.
const EPS: f32 = 1e-6;

/// Values that are copied at a time.
const STAGED: usize = 1 << 20;

/// Pairs of values of a row that change places among each other in operand order ([`operand_index`]).
const PAIRS: usize = 16;

/// Queries of an image's attention at a time: of more patches, the blocks of a layer take long enough to hold up others.
const QUERIES: usize = 4096;

/// Base of the frequencies by which heads turn.
const THETA: f64 = 10_000.0;

/// [`Tower`] on a GPU.
pub struct CudaTower {
    config: VisionConfig,
    // Dropped first: it waits for its work.
    stream: Stream,
    parts: Parts,
    positions: Buffer<f32>, // [side side, hidden]
    most: usize,            // patches of an image
    rows: Mutex<TowerRows>,
}

type Parts = TowerParts<DeviceLinear, Buffer<f32>>;

fn heads(c: &VisionConfig) -> ImageHeads {
    ImageHeads {
        count: c.num_heads,
        dim: c.head_dim(),
    }
}

/// Buffers that an image goes through.
struct TowerRows {
    x: Buffer<f32>,               // [patches, hidden], the stream
    wide: Buffer<f32>, // [patches, 3 hidden or intermediate], what products of a block or a merger make
    half: Buffer<u16>, // [patches, patch values or hidden] in operand order; of a merger [tokens, merged hidden]
    beside: Buffer<u16>, // heads; [patches, intermediate] in operand order; of a merger [tokens, merged hidden]
    turns: Buffer<[f32; 2]>, // [rows or columns, head_dim / 4]
    pixels: Option<Staging<u16>>, // on the host, what patches and rows go through
    made: Option<Staging<f32>>,
}

impl TowerRows {
    /// Allocates them for up to `patches`.
    fn new(gpu: &Gpu, c: &VisionConfig, patches: usize) -> nq_kernels::Result<Self> {
        let (n, h, wide) = (patches, c.hidden_size, c.intermediate_size);
        let (tokens, merged) = (n / c.merged(), c.merged() * h);
        let of_merger = tokens * padded(merged);
        let widest = (n * wide.max(3 * h)).max(tokens * merged.max(c.out_hidden_size));
        let operands = (n * padded(wide)).max(of_merger);
        Ok(TowerRows {
            x: gpu.zeros("an image", n * h)?,
            wide: gpu.zeros("an image", widest)?,
            half: gpu.zeros(
                "an image",
                (n * padded(h.max(c.patch_values()))).max(of_merger),
            )?,
            beside: gpu.zeros("an image", operands.max(heads(c).values(n)))?,
            turns: gpu.zeros("an image", n * c.head_dim() / 4)?,
            pixels: None,
            made: None,
        })
    }
}

/// Packs parameters of a tower, or reserves them on a device that only counts.
struct TowerPacker<'a> {
    gpu: &'a Gpu,
    store: &'a dyn WeightStore,
    uploader: Option<Uploader>,
}

impl TowerReader for TowerPacker<'_> {
    type Linear = DeviceLinear;
    type Vector = Buffer<f32>;

    fn linear(&mut self, name: &str, dims: Dims, _listed: &'static str) -> Result<DeviceLinear> {
        let weight = self.store.matrix(name, dims)?;
        let Some(uploader) = &mut self.uploader else {
            let kind = PackedKind::of(&weight)?.without_trellis();
            return Ok(DeviceLinear::zeros(
                self.gpu,
                kind,
                &[dims.rows],
                dims.cols,
            )?);
        };
        let linear = uploader.pack(&[&weight], Stack::Concat, true)?;
        weight.release();
        Ok(linear)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Buffer<f32>> {
        let what = "a tower";
        Ok(match self.uploader {
            Some(_) => (self.gpu).upload(what, &self.store.vector(name, len)?.to_f32()?)?,
            None => self.gpu.zeros(what, len)?,
        })
    }
}

/// Bytes of GPU memory of a tower of shape `c`, and of the largest image, of as many as `tokens` tokens.
///
/// # Errors
/// A missing or misshapen tensor; a weight that no kernel serves.
pub fn planned_tower(c: &VisionConfig, store: &dyn WeightStore, tokens: u64) -> Result<TowerBytes> {
    let account = Account::gpu();
    let gpu = &Gpu::dry(GpuInfo::default(), account.clone());
    let mut reader = TowerPacker {
        gpu,
        store,
        uploader: None,
    };
    let parts = Parts::read(c, &mut reader, &())?;
    let positions = gpu.zeros::<f32>("a tower", c.position_side.pow(2) * c.hidden_size)?;
    let weights = account.held() as u64;
    let rows = TowerRows::new(gpu, c, most_patches(c, tokens))?;
    let encoding = account.held() as u64 - weights;
    drop((parts, positions, rows));
    Ok(TowerBytes { weights, encoding })
}

/// Patches of an image of as many as `tokens` tokens.
fn most_patches(c: &VisionConfig, tokens: u64) -> usize {
    tokens.min(c.most_tokens()) as usize * c.merged()
}

/// Why kernels do not serve towers of shape `c`, if they do not.
pub fn unserved_tower(c: &VisionConfig) -> Option<String> {
    let widths = [c.hidden_size, c.intermediate_size];
    if !heads(c).are_served() {
        return Some(format!("heads of {} values", c.head_dim()));
    }
    let odd = widths.into_iter().find(|n| !n.is_multiple_of(4))?;
    Some(format!("rows of {odd} values"))
}

impl CudaTower {
    /// Reads and packs the tower of shape `c` for device `ordinal`, with memory for images of as many as `tokens` tokens.
    ///
    /// # Errors
    /// A missing or misshapen tensor; too little memory; errors of the driver.
    pub fn load(
        c: &VisionConfig,
        store: &dyn WeightStore,
        tokens: u64,
        ordinal: usize,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let (gpu, width) = (&Gpu::open(ordinal)?, c.hidden_size);
        let mut reader = TowerPacker {
            gpu,
            store,
            uploader: Some(Uploader::new(gpu)?),
        };
        let parts = Parts::read(c, &mut reader, progress)?;
        reader.uploader.map(Uploader::finish).transpose()?;
        let places = c.position_side.pow(2);
        let table = store.matrix(POSITIONS, Dims::new(places, width))?;
        let mut values = vec![0.0; places * width];
        for (i, row) in values.chunks_exact_mut(width).enumerate() {
            table.dequantize_row(i, row)?;
        }
        let most = most_patches(c, tokens);
        Ok(CudaTower {
            stream: gpu.stream_with(StreamOptions {
                last: true,
                ..StreamOptions::default()
            })?,
            parts,
            positions: gpu.upload("a tower", &values)?,
            rows: Mutex::new(TowerRows::new(gpu, c, most)?),
            config: c.clone(),
            most,
        })
    }

    /// Writes to `made` `[tokens, out hidden]` what `merger` makes of the stream of `m` patches, to which it adds `pending`.
    fn merge(
        &self,
        merger: &TowerMerger<DeviceLinear, Buffer<f32>>,
        pending: Option<&Buffer<f32>>,
        rows: &mut TowerRows,
        m: usize,
        made: &mut [f32],
    ) -> Result<()> {
        let (c, stream) = (&self.config, &self.stream);
        let TowerRows {
            x,
            wide,
            half,
            beside,
            made: staging,
            ..
        } = rows;
        // A norm of one patch, or of those that become one row.
        let of_norm = merger.norm.gains.len() / c.hidden_size;
        let tokens = m / c.merged();
        let norm = &layer_norm(&merger.norm);
        stream.tower_norm(x, pending, norm, half, m / of_norm, c.merged() / of_norm)?;
        stream.gemm(&merger.up.linear, half, GemmOutput::Store(wide), tokens)?;
        stream.tower_gelu(wide, &merger.up.bias, beside, tokens, true)?;
        stream.gemm(&merger.down.linear, beside, GemmOutput::Store(wide), tokens)?;
        let width = c.out_hidden_size;
        let mut bias = vec![0.0; width];
        merger.down.bias.read(0, &mut bias)?;
        let staging = whole_rows(staging, stream.gpu(), width)?;
        let mut finite = true;
        stream.read_staged(wide, made.len(), staging, |at, rows| {
            let both = (made[at..].par_chunks_exact_mut(width)).zip(rows.par_chunks_exact(width));
            finite &= both.all(|(to, row)| {
                for ((y, x), b) in to.iter_mut().zip(row).zip(&bias) {
                    *y = x + b;
                }
                all_finite(to)
            });
        })?;
        match finite {
            true => Ok(()),
            false => {
                let (what, layer) = ("the rows of a tower's merger", c.depth - 1);
                Err(Error::NotFinite { what, layer })
            }
        }
    }

    /// Copies an image's patches to the device, in FP16 and operand order.
    fn upload(&self, patches: &Patches, rows: &mut TowerRows) -> Result<()> {
        let width = self.config.patch_values();
        let across = padded(width);
        let staging = whole_rows(&mut rows.pixels, self.stream.gpu(), across)?;
        let at_once = staging.len() / across;
        for (i, part) in patches.rows.chunks(at_once * width).enumerate() {
            let (from, n) = (staging.turn(), part.len() / width * across);
            operands(part, width, &mut from.values_mut()?[..n]);
            (self.stream).write(&mut rows.half, i * at_once * across, from, 0..n)?;
        }
        Ok(())
    }

    /// Waits for all pieces of an image's work but the latest. If steps of sequences were queued meanwhile, the tower leaves
    /// the GPU to them for as long as its own pieces took.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if nobody waits for the image any more; errors of the driver.
    fn give_way(&self, pace: &mut EncodingProgress<'_>) -> Result<()> {
        if (pace.stop)() {
            return Err(Error::Interrupted);
        }
        if let Some(before) = pace.piece.replace(self.stream.mark()?) {
            before.wait()?;
        }
        if steps_queued() != pace.steps {
            self.stream.synchronize()?;
            std::thread::sleep(pace.since.elapsed());
            pace.steps = steps_queued();
        }
        pace.since = Instant::now();
        Ok(())
    }
}

/// Memory for the rows of an image, which a thread makes.
struct NewRows(Option<JoinHandle<Vec<f32>>>);

impl NewRows {
    /// Puts it to `made`, once.
    fn take(&mut self, made: &mut Vec<f32>) {
        if let Some(thread) = self.0.take() {
            *made = thread.join().expect("memory was written to");
        }
    }
}

/// How far the work of an image is: pieces, which are blocks or parts of them.
struct EncodingProgress<'a> {
    piece: Option<Mark>,
    steps: usize,
    since: Instant,
    stop: &'a dyn Fn() -> bool,
}

fn layer_norm(norm: &LayerNormParts<Buffer<f32>>) -> LayerNorm<'_> {
    LayerNorm {
        gain: &norm.gains,
        bias: &norm.bias,
        eps: EPS,
    }
}

/// Memory for [`STAGED`] values in whole rows, which is allocated when it is first needed.
fn whole_rows<'a, T: Pod>(
    staging: &'a mut Option<Staging<T>>,
    gpu: &Gpu,
    width: usize,
) -> nq_kernels::Result<&'a mut Staging<T>> {
    Ok(match staging {
        Some(staging) => staging,
        none => none.insert(Staging::new(gpu, (STAGED / width).max(1) * width)?),
    })
}

/// Makes `to` rows `[.., width]` in FP16 and operand order, zero past their values.
fn operands(rows: &[f32], width: usize, to: &mut [u16]) {
    let both = to
        .par_chunks_exact_mut(padded(width))
        .zip(rows.par_chunks_exact(width));
    let halves = || vec![f16::ZERO; padded(width)];
    both.for_each_init(halves, |halves, (to, row)| {
        halves[..width].convert_from_f32_slice(row);
        let pairs = halves.reinterpret_cast().as_chunks::<2>().0;
        let groups = pairs.as_chunks::<PAIRS>().0.iter();
        let to = to.as_chunks_mut::<2>().0.as_chunks_mut::<PAIRS>().0;
        for (to, from) in to.iter_mut().zip(groups) {
            for (i, pair) in from.iter().enumerate() {
                to[operand_index(2 * i) / 2] = *pair;
            }
        }
    });
}

/// Cosines and sines `[positions, head_dim / 4]`.
fn turns(positions: usize, head_dim: usize) -> Vec<[f32; 2]> {
    let quarter = head_dim / 4;
    let turn = |i: usize| {
        let frequency = THETA.powf(-((i % quarter) as f64) / quarter as f64) as f32;
        let (sin, cos) = f64::from((i / quarter) as f32 * frequency).sin_cos();
        [cos as f32, sin as f32]
    };
    (0..positions * quarter).map(turn).collect()
}

impl Tower for CudaTower {
    fn config(&self) -> &VisionConfig {
        &self.config
    }

    /// Memory is allocated for the largest image when the tower is loaded.
    fn encode_bytes(&self, _patches: usize) -> usize {
        0
    }

    fn encode_until(&self, patches: &Patches, stop: &dyn Fn() -> bool) -> Result<ImageRows> {
        let (c, grid, stream) = (&self.config, patches.grid, &self.stream);
        check_patches(c, patches)?;
        let m = grid.patches();
        if m > self.most {
            return Err(Error::Request {
                what: "patches of an image",
                expected: format!("at most {}, for which there is memory", self.most),
                found: m.to_string(),
            });
        }
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let rows = &mut *rows;
        let (heads, merge) = (heads(c), c.spatial_merge_size);
        let image = ImageGrid { grid, merge };
        self.upload(patches, rows)?;
        (rows.turns).write(0, &turns(grid.h.max(grid.w), heads.dim))?;
        let embed = &self.parts.patch_embed;
        stream.gemm(&embed.linear, &rows.half, GemmOutput::Store(&mut rows.x), m)?;
        stream.tower_positions(&mut rows.x, &embed.bias, &self.positions, image)?;
        let mut pace = EncodingProgress {
            piece: None,
            steps: steps_queued(),
            since: Instant::now(),
            stop,
        };
        // The pages of new memory come when they are first written to, which takes long: while the GPU works.
        let level = grid.tokens(merge) * c.out_hidden_size;
        let values = level * (1 + c.deepstack.len());
        let mut room = NewRows(Some(std::thread::spawn(move || vec![f32::NAN; values])));
        let (mut made, mut levels) = (Vec::new(), level);
        let mut pending = None;
        let mut mergers = c.deepstack.iter().zip(&self.parts.deepstack).peekable();
        for (layer, block) in self.parts.blocks.iter().enumerate() {
            let TowerRows {
                x,
                wide,
                half,
                beside,
                turns,
                ..
            } = rows;
            stream.tower_norm(x, pending, &layer_norm(&block.attention_norm), half, m, 1)?;
            stream.gemm(&block.qkv.linear, half, GemmOutput::Store(wide), m)?;
            stream.tower_heads(wide, &block.qkv.bias, turns, beside, heads, image)?;
            for first in (0..m).step_by(QUERIES) {
                stream.tower_attention(beside, half, heads, m, first..m.min(first + QUERIES))?;
                if m > QUERIES {
                    self.give_way(&mut pace)?;
                }
            }
            stream.gemm(&block.out.linear, half, GemmOutput::Add(x), m)?;
            let added = Some(&block.out.bias);
            stream.tower_norm(x, added, &layer_norm(&block.mlp_norm), half, m, 1)?;
            stream.gemm(&block.up.linear, half, GemmOutput::Store(wide), m)?;
            stream.tower_gelu(wide, &block.up.bias, beside, m, false)?;
            stream.gemm(&block.down.linear, beside, GemmOutput::Add(x), m)?;
            pending = Some(&block.down.bias);
            if let Some((_, merger)) = mergers.next_if(|(behind, _)| **behind == layer) {
                room.take(&mut made);
                let to = &mut made[levels..levels + level];
                self.merge(merger, pending.take(), rows, m, to)?;
                levels += level;
            }
            self.give_way(&mut pace)?;
        }
        room.take(&mut made);
        self.merge(&self.parts.merger, pending, rows, m, &mut made[..level])?;
        Ok(ImageRows {
            rows: made,
            height: grid.h / merge,
            width: grid.w / merge,
            digest: patches.digest,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_stand_in_their_order_with_zeros_behind_them() {
        let width = 300;
        let rows: Vec<f32> = (0..3 * width).map(|v| v as f32 / 8.0).collect();
        let mut found = vec![7; 3 * padded(width)];
        operands(&rows, width, &mut found);
        for (row, to) in rows.chunks(width).zip(found.chunks(padded(width))) {
            for k in 0..padded(width) {
                let wanted = row.get(k).copied().unwrap_or(0.0);
                assert_eq!(to[operand_index(k)], f16::from_f32(wanted).to_bits(), "{k}");
            }
        }
    }
}
