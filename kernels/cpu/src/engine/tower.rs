//! The tower of a model that sees, on the CPU ([`nq_model::vision`]), in f32 with weights of any float type.

use super::open::open;
use crate::ops::Visible;
use crate::{Cpu, Epilogue, KvPages, KvSequence, Linear, Span};
use nq_formats::{Progress, Weight, WeightStore};
use nq_kernels::pages::{KvType, PAGE};
use nq_kernels::{Activations, KernelSet};
use nq_model::Dims;
use nq_model::vision::{Grid, POSITIONS, Patches, VisionConfig};
use nq_runtime::checks::all_finite;
use nq_runtime::host::available_memory;
use nq_runtime::interface::{ImageRows, LoadOptions, Tower, check_patches};
use nq_runtime::tower_parts::{
    BiasedLinear, LayerNormParts, TowerBlock, TowerMerger, TowerParts, TowerReader,
};
use nq_runtime::{Error, Result};

/// Epsilon of every LayerNorm of a tower.
const EPS: f32 = 1e-6;

/// Base of the frequencies by which heads turn.
const THETA: f64 = 10_000.0;

/// Patches that go through an MLP together.
const MLP_ROWS: usize = 1024;

/// [`Tower`] on the CPU.
pub struct CpuTower {
    config: VisionConfig,
    cpu: Cpu,
    positions: Weight, // [side * side, hidden]
    parts: TowerParts<Linear, Vec<f32>>,
}

type Biased = BiasedLinear<Linear, Vec<f32>>;
type LayerNorm = LayerNormParts<Vec<f32>>;
type Merger = TowerMerger<Linear, Vec<f32>>;
type Block = TowerBlock<Linear, Vec<f32>>;

/// Packs parameters of a tower.
struct TowerPacker<'a> {
    cpu: &'a Cpu,
    store: &'a dyn WeightStore,
    kernels: KernelSet,
}

impl TowerReader for TowerPacker<'_> {
    type Linear = Linear;
    type Vector = Vec<f32>;

    fn linear(&mut self, name: &str, dims: Dims, listed: &'static str) -> Result<Linear> {
        let weight = self.store.matrix(name, dims)?;
        let linear = Linear::new(self.cpu, &[&weight], Activations::F32, self.kernels)?;
        weight.release();
        Ok(linear.named(listed))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        Ok(self.store.vector(name, len)?.to_f32()?)
    }
}

impl CpuTower {
    /// Reads and packs the tower of shape `config`.
    ///
    /// # Errors
    /// A missing or misshapen tensor; an instruction set that this CPU lacks.
    pub fn load(
        config: &VisionConfig,
        store: &dyn WeightStore,
        options: &LoadOptions,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let (c, cpu) = (config, open(options)?);
        let mut reader = TowerPacker {
            cpu: &cpu,
            store,
            kernels: options.kernels,
        };
        Ok(CpuTower {
            parts: TowerParts::read(c, &mut reader, progress)?,
            positions: store.matrix(POSITIONS, Dims::new(c.position_side.pow(2), c.hidden_size))?,
            config: c.clone(),
            cpu,
        })
    }

    /// `y = x w^T + bias`, or with [`Epilogue::Add`] `y += x w^T + bias`.
    fn product(&self, w: &Biased, x: &[f32], y: &mut [f32], epilogue: Epilogue) -> Result<()> {
        self.cpu.linear(&w.linear, x, y, epilogue)?;
        let width = w.bias.len();
        self.cpu.team().run_chunks(y, ROWS * width, |_, rows| {
            for row in rows.chunks_exact_mut(width) {
                row.iter_mut().zip(&w.bias).for_each(|(y, b)| *y += b);
            }
        });
        Ok(())
    }

    /// LayerNorm of the rows of `x` into `y`.
    fn norm(&self, norm: &LayerNorm, x: &[f32], y: &mut [f32]) {
        let width = norm.gains.len();
        self.cpu.team().run_chunks(y, ROWS * width, |i, rows| {
            let x = x[i * ROWS * width..].chunks_exact(width);
            for (y, x) in rows.chunks_exact_mut(width).zip(x) {
                layer_norm(norm, x, y);
            }
        });
    }

    /// Adds to the rows `x` `[h w, hidden]` the position of each: the table's four nearest entries, weighed, with the
    /// table's corners at the image's.
    fn add_positions(&self, grid: &Grid, x: &mut [f32]) -> Result<()> {
        let (side, width) = (self.config.position_side, self.config.hidden_size);
        // As transformers rounds it.
        let place = |i: usize, n: usize| i as f32 * (side - 1) as f32 / (n.max(2) - 1) as f32;
        let mut entry = vec![0.0; width];
        let mut sum = vec![0.0; width];
        let places = grid.places(self.config.spatial_merge_size);
        for ((row, column), x) in places.zip(x.chunks_exact_mut(width)) {
            let (y, z) = (place(row, grid.h), place(column, grid.w));
            sum.fill(0.0);
            for (i, weight_y) in taps(y) {
                for (j, weight_z) in taps(z) {
                    let weight = weight_y * weight_z;
                    if weight > 0.0 {
                        let at = i.min(side - 1) * side + j.min(side - 1);
                        self.positions.dequantize_row(at, &mut entry)?;
                        sum.iter_mut()
                            .zip(&entry)
                            .for_each(|(s, e)| *s += weight * e);
                    }
                }
            }
            x.iter_mut().zip(&sum).for_each(|(x, s)| *x += s);
        }
        Ok(())
    }

    /// Cosines and sines `[patches, head_dim / 2]` by which heads turn: the first half by the row, the second by the
    /// column of a patch.
    fn turns(&self, grid: &Grid) -> Vec<(f32, f32)> {
        let quarter = self.config.head_dim() / 4;
        let frequency = |j: usize| THETA.powf(-(j as f64) / quarter as f64) as f32;
        let frequencies: Vec<f32> = (0..quarter).map(frequency).collect();
        let turn = |place: usize, f: &f32| {
            let (sin, cos) = f64::from(place as f32 * f).sin_cos();
            (cos as f32, sin as f32)
        };
        let places = grid.places(self.config.spatial_merge_size);
        let mut turns = Vec::with_capacity(grid.patches() * 2 * quarter);
        for (row, column) in places {
            turns.extend(frequencies.iter().map(|f| turn(row, f)));
            turns.extend(frequencies.iter().map(|f| turn(column, f)));
        }
        turns
    }

    /// Adds to the rows `x` what block `block` makes of them.
    fn block(&self, block: &Block, turns: &[(f32, f32)], s: &mut Scratch) -> Result<()> {
        let (c, cpu) = (&self.config, &self.cpu);
        let (h, d, heads) = (c.hidden_size, c.head_dim(), c.num_heads);
        let n = s.x.len() / h;
        self.norm(&block.attention_norm, &s.x, &mut s.normed);
        self.product(&block.qkv, &s.normed, &mut s.wide, Epilogue::Store)?;
        for start in [0, h] {
            let (table, none) = ((turns, d / 2), (None, EPS));
            cpu.turn_heads(&mut s.wide, 3 * h, (start, heads, d), none, table, &s.rows);
        }
        for (i, row) in s.wide.chunks_exact(3 * h).enumerate() {
            let (keys, values) = row[h..].split_at(h);
            s.kv.store((i / PAGE) as u32, i % PAGE, keys, values);
        }
        let span = Span {
            row: 0,
            len: n,
            position: 0,
        };
        let kv = KvSequence::new(&s.kv, &s.table);
        cpu.attend(
            &s.wide,
            3 * h,
            span,
            heads,
            kv,
            Visible::Whole,
            &mut s.normed,
        );
        self.product(&block.out, &s.normed, &mut s.x, Epilogue::Add)?;
        self.norm(&block.mlp_norm, &s.x, &mut s.normed);
        let pieces =
            s.x.chunks_mut(MLP_ROWS * h)
                .zip(s.normed.chunks(MLP_ROWS * h));
        for (x, normed) in pieces {
            let mlp = &mut s.mlp[..normed.len() / h * c.intermediate_size];
            self.product(&block.up, normed, mlp, Epilogue::Store)?;
            cpu.gelu_tanh(mlp);
            self.product(&block.down, mlp, x, Epilogue::Add)?;
        }
        Ok(())
    }
}

impl CpuTower {
    /// The `rows` `[tokens, out_hidden]` that `merger` makes of the stream.
    fn merge(&self, merger: &Merger, s: &mut Scratch, rows: &mut [f32]) -> Result<()> {
        self.norm(&merger.norm, &s.x, &mut s.normed);
        let merged = &mut s.wide[..s.normed.len()];
        self.product(&merger.up, &s.normed, merged, Epilogue::Store)?;
        let width = ROWS * self.config.hidden_size;
        self.cpu.team().run_chunks(merged, width, |_, values| {
            values.iter_mut().for_each(|v| *v = gelu(*v));
        });
        self.product(&merger.down, merged, rows, Epilogue::Store)
    }
}

impl Tower for CpuTower {
    fn config(&self) -> &VisionConfig {
        &self.config
    }

    fn encode_bytes(&self, patches: usize) -> usize {
        Scratch::bytes(&self.config, patches)
    }

    fn encode_until(&self, patches: &Patches, stop: &dyn Fn() -> bool) -> Result<ImageRows> {
        let (c, grid) = (&self.config, patches.grid);
        check_patches(c, patches)?;
        let needed = self.encode_bytes(grid.patches()) as u64;
        if let Some(available) = available_memory().filter(|free| needed > *free) {
            return Err(Error::Memory {
                what: "encoding an image",
                needed,
                available,
            });
        }
        let mut s = Scratch::new(c, grid.patches());
        self.product(
            &self.parts.patch_embed,
            &patches.rows,
            &mut s.x,
            Epilogue::Store,
        )?;
        self.add_positions(&grid, &mut s.x)?;
        let turns = self.turns(&grid);
        let level = grid.tokens(c.spatial_merge_size) * c.out_hidden_size;
        let mut rows = vec![0.0; level * (1 + c.deepstack.len())];
        let (first, mut others) = rows.split_at_mut(level);
        let mut mergers = c.deepstack.iter().zip(&self.parts.deepstack).peekable();
        for (layer, block) in self.parts.blocks.iter().enumerate() {
            if stop() {
                return Err(Error::Interrupted);
            }
            self.block(block, &turns, &mut s)?;
            if !all_finite(&s.x) {
                let what = "the output of a tower's block";
                return Err(Error::NotFinite { what, layer });
            }
            if let Some((_, merger)) = mergers.next_if(|(behind, _)| **behind == layer) {
                let (rows, rest) = others.split_at_mut(level);
                self.merge(merger, &mut s, rows)?;
                others = rest;
            }
        }
        self.merge(&self.parts.merger, &mut s, first)?;
        if !all_finite(&rows) {
            let (what, layer) = ("the rows of a tower's merger", c.depth - 1);
            return Err(Error::NotFinite { what, layer });
        }
        Ok(ImageRows {
            rows,
            height: grid.h / c.spatial_merge_size,
            width: grid.w / c.spatial_merge_size,
            digest: patches.digest,
        })
    }
}

/// Rows that a thread takes at a time.
const ROWS: usize = 16;

/// What an image's patches go through.
pub(super) struct Scratch {
    x: Vec<f32>,      // [patches, hidden], the residual stream
    normed: Vec<f32>, // [patches, hidden], and what attention makes
    wide: Vec<f32>,   // [patches, 3 hidden]: queries, keys and values
    mlp: Vec<f32>,    // [up to MLP_ROWS patches, intermediate]
    kv: KvPages,      // of one block at a time
    table: Vec<u32>,  // the pages of the image
    rows: Vec<usize>, // 0 .. patches: each has turns of its own
}

impl Scratch {
    fn new(c: &VisionConfig, patches: usize) -> Self {
        let pages = patches.div_ceil(PAGE);
        Scratch {
            x: vec![0.0; patches * c.hidden_size],
            normed: vec![0.0; patches * c.hidden_size],
            wide: vec![0.0; 3 * patches * c.hidden_size],
            mlp: vec![0.0; patches.min(MLP_ROWS) * c.intermediate_size],
            kv: KvPages::new(KvType::F32, pages, c.num_heads, c.head_dim()),
            table: (0..pages as u32).collect(),
            rows: (0..patches).collect(),
        }
    }

    /// Bytes of [`Scratch::new`], and of the turns of heads.
    pub(super) fn bytes(c: &VisionConfig, patches: usize) -> usize {
        let values = 5 * patches * c.hidden_size + patches.min(MLP_ROWS) * c.intermediate_size;
        let pages = patches.div_ceil(PAGE);
        let kv = pages * KvPages::page_bytes(KvType::F32, c.num_heads, c.head_dim());
        let turns = patches * c.head_dim() * size_of::<f32>();
        size_of::<f32>() * (values + pages) + kv + turns + size_of::<usize>() * patches
    }
}

/// The entries of a table next to the place `at`, and their weights.
fn taps(at: f32) -> [(usize, f32); 2] {
    let floor = at.floor();
    [
        (floor as usize, 1.0 - (at - floor)),
        (floor as usize + 1, at - floor),
    ]
}

fn layer_norm(norm: &LayerNorm, x: &[f32], y: &mut [f32]) {
    let n = x.len() as f64;
    let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
    let square = |v: &f32| (f64::from(*v) - mean).powi(2);
    let variance = x.iter().map(square).sum::<f64>() / n;
    let (mean, scale) = (
        mean as f32,
        (1.0 / (variance + f64::from(EPS)).sqrt()) as f32,
    );
    let parameters = norm.gains.iter().zip(&norm.bias);
    for ((y, x), (gain, bias)) in y.iter_mut().zip(x).zip(parameters) {
        *y = (x - mean) * scale * gain + bias;
    }
}

/// GELU as the merger has it, by the error function; the blocks' GELU is made of tanh.
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
}
