//! Dimensions that only some models have: of experts, of recurrences, of residuals of several streams, of sparse
//! attention, of stretched rotary embeddings.

/// The experts of each layer of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts in a layer (`num_experts`).
    pub count: usize,
    /// Experts that each token is routed to (`num_experts_per_tok`).
    pub per_token: usize,
    /// Width of each expert (`moe_intermediate_size`).
    pub width: usize,
    /// True if the weights of a token's experts are divided by their sum (`norm_topk_prob`).
    pub normalized: bool,
    /// Width of the expert that all tokens go through (`shared_expert_intermediate_size`); 0 without one.
    pub shared: usize,
}

/// The gated DeltaNets of a model, and which of its layers have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delta {
    /// Heads of queries and keys (`linear_num_key_heads`).
    pub key_heads: usize,
    /// Heads of values (`linear_num_value_heads`), a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a head of keys (`linear_key_head_dim`).
    pub key_dim: usize,
    /// Width of a head of values (`linear_value_head_dim`).
    pub value_dim: usize,
    /// Inputs that the convolution sees: a row's own and those before it (`linear_conv_kernel_dim`).
    pub conv: usize,
    /// Every so many layers, the last has attention instead (`full_attention_interval`).
    pub interval: usize,
    /// True if value head `h` has key head `h % key_heads`, as in GGUF files; otherwise the value heads of
    /// a key head are neighbours.
    pub tiled: bool,
    /// By what a head's output is gated (`output_gate_type`).
    pub gate: OutputGate,
}

/// The function of `z` that a recurrence's output is multiplied by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputGate {
    /// `z sigmoid(z)`, the usual one.
    #[default]
    Silu,
    /// `sigmoid(z)`.
    Sigmoid,
}

/// Hyper-connections (Zhu et al., arXiv 2409.19606): a residual of several streams, each as wide as the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HyperShape {
    /// Streams of the residual (`hc_count`).
    pub streams: usize,
    /// Width between the two matrices by which a block weighs what it reads (`hc_lowrank`).
    pub rank: usize,
}

/// Sparse attention: an indexer chooses for each row the blocks of positions that it attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexerShape {
    /// Heads of its queries (`indexer_n_heads`); there is one head of keys.
    pub heads: usize,
    /// Width of a head (`indexer_head_dim`).
    pub head_dim: usize,
    /// Positions of the blocks that a row attends to, at most (`indexer_budget`), a multiple of `block`.
    pub budget: usize,
    /// Positions of a block (`indexer_compress_ratio`), which share a key.
    pub block: usize,
}

impl IndexerShape {
    /// Blocks that a row attends to, at most.
    pub fn blocks(&self) -> usize {
        self.budget / self.block
    }

    /// Most positions that a row attends to: those of the chosen blocks, and those behind the last whole block.
    pub fn most_positions(&self) -> usize {
        self.budget + self.block - 1
    }
}

impl Delta {
    /// Width of all queries, or of all keys.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Width of all values.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Values of a head that are rotated, the first ones; `None`: all.
    pub dims: Option<usize>,
    /// Extension beyond the trained length.
    pub scaling: RopeScaling,
    /// How many frequencies follow time, row and column of a token of an image (`mrope_section`); `None`: a third
    /// each. Rows and columns have every third frequency, from the second and the third on, until they have as many.
    pub sections: Option<[usize; 3]>,
}

impl Rope {
    /// [`Rope::sections`] of `pairs` frequencies.
    pub fn sections(&self, pairs: usize) -> [usize; 3] {
        let thirds = [pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3];
        self.sections.unwrap_or(thirds)
    }
}

/// How rotary frequencies are stretched for longer contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// Not stretched.
    #[default]
    None,
    /// YaRN (arXiv 2309.00071), as Qwen3 documents it.
    Yarn {
        /// Stretch of the context.
        factor: f64,
        /// Length before stretching.
        original_max_position_embeddings: usize,
        /// Rotations above which a dimension is not changed.
        beta_fast: f64,
        /// Rotations below which a dimension is fully interpolated.
        beta_slow: f64,
        /// True if the dimensions between which the stretch grows are rounded outwards to whole ones.
        truncate: bool,
        /// Scale of queries and keys; `0.1 ln(factor) + 1` if the config does not give it.
        attention_factor: f64,
    },
    /// Llama 3.1's, whose low frequencies are divided by a factor and whose high ones are kept
    /// (arXiv 2407.21783; transformers' `rope_type` `llama3`).
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// A wave of more than the original length divided by this is a low frequency.
        low_freq_factor: f64,
        /// A wave of less than the original length divided by this is a high frequency.
        high_freq_factor: f64,
        /// Length before stretching.
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    /// The divisor of the rotary frequency `frequency`, in radians a position, where scaling divides each
    /// frequency by a number of its own: 1 without scaling, `None` for YaRN.
    pub fn divisor(&self, frequency: f64) -> Option<f64> {
        match *self {
            RopeScaling::None => Some(1.0),
            RopeScaling::Yarn { .. } => None,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let length = original_max_position_embeddings as f64;
                let waves = length * frequency / std::f64::consts::TAU; // within the original length
                let kept = (waves - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let kept = kept.clamp(0.0, 1.0);
                Some(1.0 / ((1.0 - kept) / factor + kept))
            }
        }
    }
}
