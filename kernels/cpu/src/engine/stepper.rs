//! The CPU as a device of the layer stepper.

use super::cache::{LayerCache, kind_bytes};
use super::layer::{Batch, Pass, Scratch, pack, pack_layer};
use super::model::CpuEnding;
use super::stream_states::StreamInputs;
use super::weights::CpuLayer;
use crate::{Cpu, Epilogue, Linear};
use nq_formats::Weight;
use nq_kernels::pages::{KvType, PAGE};
use nq_model::ModelConfig;
use nq_runtime::Result;
use nq_runtime::interface::{LoadOptions, Observer};
use nq_runtime::models::{Ending, LayerWeights};
use nq_runtime::ngrams::NgramRows;
use nq_runtime::rope::Rotary;
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
    caches: Vec<LayerCache>, // of each kind of layer
    tables: Vec<Vec<u32>>,   // of each sequence of a piece
    batch: Batch,
    scratch: Scratch,
}

/// Bytes that the CPU's stepper takes for pieces of whole pages, besides the layer that it runs:
/// the buffers of `CpuLayers::new` and of the pieces, and a copy of a piece of the stream.
pub fn stepper_bytes(c: &ModelConfig, kv: KvType) -> usize {
    let stream = size_of::<f32>() * ROWS * c.stream_width();
    Scratch::bytes(c, ROWS) + stream + kind_bytes(c, kv, ROWS.div_ceil(PAGE))
}

impl CpuLayers {
    /// Makes a stepper for models of this shape; keys and values are rounded to `kv_type`.
    pub fn new(config: &ModelConfig, options: &LoadOptions, kv_type: KvType) -> Result<Self> {
        Ok(CpuLayers {
            cpu: Arc::new(super::open::open(options)?),
            rotary: Rotary::new(config),
            kv_type,
            caches: caches(config, kv_type, 0, 0),
            tables: Vec::new(),
            batch: Batch::with_capacity(config, ROWS, 0),
            scratch: Scratch::new(config, ROWS),
            options: *options,
            config: config.clone(),
        })
    }
}

impl LayerDevice for CpuLayers {
    type Layer = (CpuLayer, Option<NgramRows>);

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
            self.caches = caches(&self.config, self.kv_type, slots, slots * pages);
            let table = |slot: usize| {
                (slot * pages..(slot + 1) * pages)
                    .map(|p| p as u32)
                    .collect()
            };
            self.tables = (0..slots).map(table).collect();
        }
        Ok(())
    }

    fn pack(&self, index: usize, weights: &LayerWeights) -> Result<Self::Layer> {
        let census = &mut Census::default();
        let layer = pack_layer(
            &self.cpu,
            &self.config,
            &self.options,
            index,
            weights,
            census,
        )?;
        Ok((layer, weights.table.clone()))
    }

    fn run(
        &mut self,
        (layer, table): &Self::Layer,
        (piece, tokens): (&LayerPiece, &[u32]),
        x: &mut [f32],
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.batch.clear();
        for (slot, &(position, len)) in piece.chunks.iter().enumerate() {
            let coordinates = |index| piece.images.coordinates(index);
            let positions = position..position + len;
            self.batch.push(&self.rotary, slot, positions, coordinates);
            if position == 0 {
                self.caches.iter_mut().for_each(|cache| cache.clear(slot));
            }
        }
        let kind = self.config.kind(layer.index);
        layer.run(&mut Pass {
            cpu: &self.cpu,
            config: &self.config,
            batch: &self.batch,
            cache: &mut self.caches[kind],
            tables: &self.tables,
            scratch: &mut self.scratch,
            x,
            inputs: Some(StreamInputs {
                tokens,
                table: table.as_ref(),
                rotary: &self.rotary,
            }),
            qkv: None,
            observer,
            kept: None,
        })
    }

    fn head(&mut self, ending: &Ending, head: &Weight, _rows: usize) -> Result<Box<dyn Head>> {
        let census = &mut Census::default();
        Ok(Box::new(CpuHead {
            cpu: Arc::clone(&self.cpu),
            head: pack(&self.cpu, &self.options, "head", 1, &[head], census)?,
            ending: CpuEnding::pack(&self.cpu, &self.options, ending)?,
            config: self.config.clone(),
            normed: Vec::new(),
            logits: Vec::new(),
        }))
    }
}

/// A cache for layers of each kind, of `pages` pages or `states` states.
fn caches(c: &ModelConfig, kv: KvType, states: usize, pages: usize) -> Vec<LayerCache> {
    let kinds = c.architecture.kinds.iter();
    let cache = |kind| LayerCache::new(c, kind, kv, states, pages);
    kinds.map(cache).collect()
}

struct CpuHead {
    cpu: Arc<Cpu>,
    head: Linear, // [vocab, hidden]
    ending: CpuEnding,
    config: ModelConfig,
    normed: Vec<f32>, // [rows, hidden]
    logits: Vec<f32>, // [rows, vocab]
}

impl Head for CpuHead {
    fn logits(&mut self, x: &[f32]) -> Result<&[f32]> {
        let c = &self.config;
        let rows = x.len() / c.stream_width();
        self.normed.resize(rows * c.hidden_size, 0.0);
        self.logits.resize(rows * self.head.out_features(), 0.0);
        if rows > 0 {
            let (cpu, normed) = (&self.cpu, &mut self.normed);
            self.ending.run((cpu, c), x, normed)?;
            cpu.linear(&self.head, normed, &mut self.logits, Epilogue::Store)?;
        }
        Ok(&self.logits)
    }
}
