//! The KV cache of a session: preallocated blocks per layer and sequence.

use nq_formats::ModelConfig;
use nq_kernels::cpu::{KvBlock, KvType};

/// Keys and values of one layer of one sequence.
#[derive(Clone, Debug)]
pub(crate) struct KvPair {
    /// `[kv_heads, ctx, head_dim]`
    pub(crate) keys: KvBlock,
    /// `[kv_heads, ctx, head_dim]`
    pub(crate) values: KvBlock,
}

impl KvPair {
    /// Room for `ctx` positions.
    pub(crate) fn new(config: &ModelConfig, kv: KvType, ctx: usize) -> Self {
        let block = || KvBlock::new(kv, config.num_key_value_heads, ctx, config.head_dim);
        KvPair {
            keys: block(),
            values: block(),
        }
    }
}

/// Keys and values of all layers and sequences, and how much of them is filled.
#[derive(Debug)]
pub(crate) struct KvCache {
    layers: Vec<Vec<KvPair>>, // [layers][slots]
    lengths: Vec<usize>,      // [slots]
}

impl KvCache {
    /// Room for `slots` sequences of `ctx` positions.
    pub(crate) fn new(config: &ModelConfig, kv: KvType, slots: usize, ctx: usize) -> Self {
        let layer = || (0..slots).map(|_| KvPair::new(config, kv, ctx)).collect();
        KvCache {
            layers: (0..config.num_hidden_layers).map(|_| layer()).collect(),
            lengths: vec![0; slots],
        }
    }

    /// Bytes that [`KvCache::new`] reserves.
    pub(crate) fn bytes(config: &ModelConfig, kv: KvType, slots: usize, ctx: usize) -> usize {
        let position = 2 * config.num_key_value_heads * kv.bytes(config.head_dim);
        config.num_hidden_layers * slots * ctx * position
    }

    /// The sequences' blocks of one layer, by slot.
    pub(crate) fn layer(&mut self, layer: usize) -> &mut [KvPair] {
        &mut self.layers[layer]
    }

    /// Filled positions of a sequence.
    pub(crate) fn len(&self, slot: usize) -> usize {
        self.lengths[slot]
    }

    /// Sets the number of filled positions of a sequence.
    pub(crate) fn set_len(&mut self, slot: usize, len: usize) {
        self.lengths[slot] = len;
    }
}
