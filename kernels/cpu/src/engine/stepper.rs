//! The CPU as a device of the layer stepper.

use super::cache::LayerCache;
use super::layer::{Batch, Pass, Scratch, pack, pack_layer};
use super::weights::CpuLayer;
use crate::{Cpu, Epilogue, KvPages, Linear, state_len};
use nq_formats::{Tensor, Weight};
use nq_kernels::pages::{KvType, PAGE};
use nq_model::ModelConfig;
use nq_runtime::Result;
use nq_runtime::interface::{LoadOptions, Observer};
use nq_runtime::models::LayerWeights;
use nq_runtime::rope::Rotary;
use nq_runtime::states::{delta_shape, is_recurrent};
use nq_runtime::stepper::{Cut, Head, LayerDevice, LayerPiece};
use nq_runtime::weights::Census;
use std::sync::Arc;

/// Rows that run through a layer at once: enough to keep the products efficient, few enough
/// that their activations take little memory.
const ROWS: usize = 512;

/// The CPU as a [`LayerDevice`].
pub struct CpuLayers {
    config: ModelConfig,
    options: LoadOptions,
    cpu: Arc<Cpu>,
    rotary: Rotary,
    kv_type: KvType,
    cache: [LayerCache; 2], // of layers with attention, and of those with recurrences
    tables: Vec<Vec<u32>>,  // of each sequence of a piece
    batch: Batch,
    scratch: Scratch,
}

/// Bytes that the CPU's stepper takes for pieces of whole pages, besides the layer that it runs:
/// the buffers of `CpuLayers::new` and of the pieces, and a copy of a piece of the stream.
pub fn stepper_bytes(c: &ModelConfig, kv: KvType) -> usize {
    let page = KvPages::page_bytes(kv, c.num_key_value_heads, c.head_dim);
    let state = match c.delta {
        None => 0,
        Some(_) => size_of::<f32>() * state_len(&delta_shape(c)),
    };
    let stream = size_of::<f32>() * ROWS * c.hidden_size;
    Scratch::bytes(c, ROWS) + stream + ROWS.div_ceil(PAGE) * page + state
}

impl CpuLayers {
    /// Makes a stepper for models of this shape; keys and values are rounded to `kv_type`.
    pub fn new(config: &ModelConfig, options: &LoadOptions, kv_type: KvType) -> Result<Self> {
        Ok(CpuLayers {
            cpu: Arc::new(super::open(options)?),
            rotary: Rotary::new(config),
            kv_type,
            cache: caches(config, kv_type, 0, 0),
            tables: Vec::new(),
            batch: Batch::with_capacity(config, ROWS, 0),
            scratch: Scratch::new(config, ROWS),
            options: *options,
            config: config.clone(),
        })
    }
}

impl LayerDevice for CpuLayers {
    type Layer = CpuLayer;

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn name(&self) -> String {
        format!("cpu ({})", self.cpu.isa())
    }

    fn cut(&self) -> Cut {
        Cut {
            rows: ROWS,
            alike: false,
        }
    }

    fn reserve(&mut self, pieces: &[LayerPiece]) -> Result<()> {
        let slots = pieces.iter().map(|p| p.chunks.len()).max().unwrap_or(0);
        let ends = pieces.iter().flat_map(|p| &p.chunks).map(|c| c.0 + c.1);
        let pages = ends.max().unwrap_or(0).div_ceil(PAGE);
        if self.tables.len() < slots || self.tables.first().is_some_and(|t| t.len() < pages) {
            self.cache = caches(&self.config, self.kv_type, slots, slots * pages);
            let table = |slot: usize| {
                (slot * pages..(slot + 1) * pages)
                    .map(|p| p as u32)
                    .collect()
            };
            self.tables = (0..slots).map(table).collect();
        }
        Ok(())
    }

    fn pack(&self, index: usize, weights: &LayerWeights) -> Result<CpuLayer> {
        let census = &mut Census::default();
        pack_layer(
            &self.cpu,
            &self.config,
            &self.options,
            index,
            weights,
            census,
        )
    }

    fn run(
        &mut self,
        layer: &CpuLayer,
        piece: &LayerPiece,
        x: &mut [f32],
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.batch.clear();
        for (slot, &(position, len)) in piece.chunks.iter().enumerate() {
            self.batch
                .push(&self.rotary, slot, position..position + len, |i| [i; 3]);
            if position == 0 {
                self.cache.iter_mut().for_each(|cache| cache.clear(slot));
            }
        }
        let recurrent = is_recurrent(self.config.layer(layer.index));
        layer.run(&mut Pass {
            cpu: &self.cpu,
            config: &self.config,
            batch: &self.batch,
            cache: &mut self.cache[usize::from(recurrent)],
            tables: &self.tables,
            scratch: &mut self.scratch,
            x,
            qkv: None,
            observer,
            kept: None,
        })
    }

    fn head(&mut self, norm: &Tensor, head: &Weight, _rows: usize) -> Result<Box<dyn Head>> {
        let census = &mut Census::default();
        Ok(Box::new(CpuHead {
            cpu: Arc::clone(&self.cpu),
            head: pack(&self.cpu, &self.options, "head", 1, &[head], census)?,
            norm: norm.to_f32()?,
            eps: self.config.rms_norm_eps,
            normed: Vec::new(),
            logits: Vec::new(),
        }))
    }
}

/// A cache for layers with attention, of `pages` pages, and one for those with recurrences, of `states` states.
fn caches(c: &ModelConfig, kv: KvType, states: usize, pages: usize) -> [LayerCache; 2] {
    let kinds = c.architecture.kinds.iter();
    let cache = |recurrent: bool| {
        let found = kinds.clone().find(|k| is_recurrent(k) == recurrent);
        // The other is never used.
        LayerCache::new(
            c,
            found.unwrap_or(&c.architecture.kinds[0]),
            kv,
            states,
            pages,
        )
    };
    [cache(false), cache(true)]
}

struct CpuHead {
    cpu: Arc<Cpu>,
    head: Linear,   // [vocab, hidden]
    norm: Vec<f32>, // [hidden]
    eps: f32,
    normed: Vec<f32>, // [rows, hidden]
    logits: Vec<f32>, // [rows, vocab]
}

impl Head for CpuHead {
    fn logits(&mut self, x: &[f32]) -> Result<&[f32]> {
        let rows = x.len() / self.norm.len().max(1);
        self.normed.resize(x.len(), 0.0);
        self.logits.resize(rows * self.head.out_features(), 0.0);
        if rows > 0 {
            let (cpu, normed) = (&self.cpu, &mut self.normed);
            cpu.rms_norm(x, &self.norm, self.eps, normed);
            cpu.linear(&self.head, normed, &mut self.logits, Epilogue::Store)?;
        }
        Ok(&self.logits)
    }
}
