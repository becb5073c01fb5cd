//! The shape of a model, and the table's dimensions in a model of that shape.

use super::architecture::{Architecture, Preset};
use super::dimensions::{Delta, Experts, HyperShape, IndexerShape, Rope, RopeScaling};
use super::kind::{LinearKind, Width};
use super::layer::{InputSource, LayerSpec, LinearSpec, Parameter, Product};
use super::ngrams::NgramTable;
use crate::dtype::DType;
use crate::names;

/// The shape of a model. Dimensions are in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Its architecture.
    pub architecture: &'static Architecture,
    /// Width of the residual stream, or of each if there are several.
    pub hidden_size: usize,
    /// Width of the MLP. Layers with experts use [`Experts::width`] instead.
    pub intermediate_size: usize,
    /// The experts of its layers; `None` if the architecture has none.
    pub experts: Option<Experts>,
    /// The recurrences of its layers; `None` if the architecture has none.
    pub delta: Option<Delta>,
    /// The streams of its residual; `None` if there is one.
    pub hyper: Option<HyperShape>,
    /// What chooses the positions that rows attend to; `None` if they attend to all.
    pub indexer: Option<IndexerShape>,
    /// The tables of n-grams of some of its layers.
    pub ngrams: Option<NgramTable>,
    /// Number of transformer layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head. A separate key: several sizes differ from `hidden_size / heads`.
    pub head_dim: usize,
    /// Rows of the embedding (the tokenizer may have fewer tokens).
    pub vocab_size: usize,
    /// Number of positions that the model was trained for.
    pub max_position_embeddings: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// True if the head is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// Layers that predict the token after the next ([`crate::mtp`]): 1 or 0.
    pub mtp_layers: usize,
    /// Tokens that end a text; `generation_config.json` may add to them.
    pub eos_token_ids: Vec<u32>,
    /// The type of the weights according to the config.
    pub dtype: Option<DType>,
}

/// The dimensions of a matrix `[rows, cols]`. A Linear's are `[out_features, in_features]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dims {
    /// Rows: outputs of a Linear.
    pub rows: usize,
    /// Columns: inputs of a Linear.
    pub cols: usize,
}

impl Dims {
    /// `[rows, cols]`.
    pub const fn new(rows: usize, cols: usize) -> Self {
        Dims { rows, cols }
    }

    /// Rows and columns, for code that has other names for them.
    pub const fn pair(self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Number of elements.
    pub const fn elements(self) -> usize {
        self.rows * self.cols
    }
}

/// A parameter's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// `[len]`: a norm or a bias.
    Vector(usize),
    /// `[out_features, in_features]`: a Linear or the embedding.
    Matrix(usize, usize),
}

impl Shape {
    /// Number of elements.
    pub fn elements(self) -> usize {
        match self {
            Shape::Vector(n) => n,
            Shape::Matrix(rows, cols) => rows * cols,
        }
    }

    /// Dimensions, outermost first.
    pub fn dims(self) -> Vec<usize> {
        match self {
            Shape::Vector(n) => vec![n],
            Shape::Matrix(rows, cols) => vec![rows, cols],
        }
    }
}

impl ModelConfig {
    /// Streams of the residual.
    pub fn streams(&self) -> usize {
        self.hyper.map_or(1, |h| h.streams)
    }

    /// Width of the residual: of all its streams together.
    pub fn stream_width(&self) -> usize {
        self.streams() * self.hidden_size
    }

    /// Width of all query heads together.
    pub fn q_dim(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_dim(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Width of the gates of all heads together; 0 if heads have none.
    pub fn gate_dim(&self) -> usize {
        match self.architecture.has_gates() {
            true => self.q_dim(),
            false => 0,
        }
    }

    /// Number of positions that the model was trained for, with the scaling of its rotary embedding.
    pub fn longest_context(&self) -> usize {
        let trained = self.max_position_embeddings;
        match self.rope.scaling {
            RopeScaling::None | RopeScaling::Llama3 { .. } => trained,
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                ..
            } => trained.max((factor * original as f64) as usize),
        }
    }

    /// Values of a head that are rotated.
    pub fn rotary_dims(&self) -> usize {
        self.rope.dims.unwrap_or(self.head_dim)
    }

    /// Number of parameters of the model without an MTP layer, which are run for every token; a tied head counts once.
    pub fn trunk_parameters(&self) -> usize {
        let h = self.hidden_size;
        let layer = |spec: &LayerSpec| -> usize {
            let parameters = spec.parameters().into_iter();
            parameters.map(|p| p.shape(self).elements()).sum()
        };
        let heads = if self.tie_word_embeddings { 1 } else { 2 };
        let end = names::end_parameters(self).map(|(_, shape)| shape.elements());
        let tables = self.ngrams.iter().flat_map(|n| n.parameters());
        let tables: usize = tables.map(|(_, shape)| shape.elements()).sum();
        self.over_layers(layer) + end.sum::<usize>() + heads * self.vocab_size * h + tables
    }

    /// The greatest width of the MLP of a layer, or of one of its experts.
    pub fn mlp_width(&self) -> usize {
        match self.experts {
            None => self.intermediate_size,
            Some(experts) => experts.width,
        }
    }

    /// Number of parameters used for one token, with all of the embedding; all of the model's if there are no experts. Of
    /// a table of n-grams those count that one token reads.
    pub fn active_parameters(&self) -> usize {
        let Some(experts) = self.experts else {
            return self.trunk_parameters();
        };
        let expert = |spec: &LayerSpec| -> usize {
            let stacks = spec.linears().into_iter().filter(|l| l.stacked);
            stacks.map(|l| l.elements(self) / experts.count).sum()
        };
        let unused = self.ngrams.as_ref().map_or(0, NgramTable::unread);
        let unrouted = self.over_layers(expert) * (experts.count - experts.per_token);
        self.trunk_parameters() - unrouted - unused
    }

    /// Which of the kinds of its architecture layer `index` is.
    pub fn kind(&self, index: usize) -> usize {
        (self.architecture.kind_of)(self, index)
    }

    /// The specification of layer `index`.
    pub fn layer(&self, index: usize) -> &'static LayerSpec {
        &self.architecture.kinds[self.kind(index)]
    }

    /// The specification of the layer with the most parameters, for plans of memory that layers use in
    /// turn.
    pub fn largest_layer(&self) -> &'static LayerSpec {
        let size = |spec: &&'static LayerSpec| -> usize {
            let parameters = spec.parameters().into_iter();
            parameters.map(|p| p.shape(self).elements()).sum()
        };
        let largest = self.architecture.kinds.iter().max_by_key(size);
        largest.unwrap_or_else(|| panic!("{:?} without layers", self.architecture))
    }

    /// The specifications of its layers, in running order.
    pub fn layers(&self) -> impl Iterator<Item = &'static LayerSpec> {
        (0..self.num_hidden_layers).map(|index| self.layer(index))
    }

    /// The sum over its layers of what `value` returns for a layer.
    pub(crate) fn over_layers(&self, value: impl Fn(&LayerSpec) -> usize) -> usize {
        let kinds: Vec<usize> = self.architecture.kinds.iter().map(value).collect();
        let kind_of = self.architecture.kind_of;
        let layers = 0..self.num_hidden_layers;
        layers.map(|index| kinds[kind_of(self, index)]).sum()
    }
}

impl Preset {
    /// Its published shape.
    pub fn config(&self) -> ModelConfig {
        ModelConfig {
            architecture: self.architecture,
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            experts: self.experts,
            delta: self.delta,
            hyper: self.streams.map(|s| s.hyper),
            indexer: self.streams.map(|s| s.indexer),
            ngrams: (self.streams).map(|s| NgramTable::published(s.table, self.hidden, s.end)),
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            head_dim: self.head_dim,
            vocab_size: self.vocab,
            max_position_embeddings: self.positions,
            rms_norm_eps: self.eps,
            rope: Rope {
                theta: self.theta,
                dims: match self.architecture.rotary_parts {
                    1 => None,
                    parts => Some(self.head_dim / parts),
                },
                scaling: self.scaling,
                sections: None,
            },
            tie_word_embeddings: self.tied,
            // nq does not draft with a layer that reads several streams.
            mtp_layers: usize::from(self.delta.is_some() && self.streams.is_none()),
            eos_token_ids: self.eos.to_vec(),
            dtype: Some(DType::BF16),
        }
    }
}

impl Width {
    /// This width in a model of shape `c`.
    pub fn of(self, c: &ModelConfig) -> usize {
        match self {
            Width::Hidden => c.hidden_size,
            Width::Heads => c.q_dim(),
            Width::KvHeads => c.kv_dim(),
            Width::Head => c.head_dim,
            Width::Mlp => c.intermediate_size,
            Width::Expert => c.experts.map_or(0, |e| e.width),
            Width::Experts => c.experts.map_or(0, |e| e.count),
            Width::GatedHeads => 2 * c.q_dim(),
            Width::DeltaChannels => c.delta.map_or(0, |d| d.channels()),
            Width::DeltaValues => c.delta.map_or(0, |d| d.values()),
            Width::DeltaHeads => c.delta.map_or(0, |d| d.value_heads),
            Width::DeltaHead => c.delta.map_or(0, |d| d.value_dim),
            Width::DeltaTaps => c.delta.map_or(0, |d| d.channels() * d.conv),
            Width::SharedExpert => c.experts.map_or(0, |e| e.shared),
            Width::Stream => c.stream_width(),
            Width::Streams => c.streams(),
            Width::MixRank => c.hyper.map_or(0, |h| h.rank),
            Width::IndexHeads => c.indexer.map_or(0, |i| (i.heads + 1) * i.head_dim),
            Width::IndexHead => c.indexer.map_or(0, |i| i.head_dim),
            Width::Ngrams => c.ngrams.as_ref().map_or(0, |n| n.width),
            Width::NgramTaps => c.stream_width() * c.ngrams.as_ref().map_or(0, |n| n.taps),
            Width::One => 1,
        }
    }
}

impl LinearSpec {
    /// `(out_features, in_features)` in a model of shape `c`; for a stack, those of all experts.
    pub fn dims(&self, c: &ModelConfig) -> Dims {
        Dims::new(self.copies(c) * self.out.of(c), self.inputs.of(c))
    }

    /// Number of weights that it stacks: the experts, or 1.
    pub fn copies(&self, c: &ModelConfig) -> usize {
        if self.stacked {
            Width::Experts.of(c)
        } else {
            1
        }
    }

    /// Number of elements of its weight.
    pub fn elements(&self, c: &ModelConfig) -> usize {
        self.dims(c).elements()
    }
}

impl LinearKind {
    /// `(out_features, in_features)` in a model of shape `c`.
    ///
    /// # Panics
    /// If no kind of its layers has such a Linear.
    pub fn dims(self, c: &ModelConfig) -> Dims {
        let mut all = c.architecture.matrices();
        let spec = all.find(|l| l.kind == self);
        spec.unwrap_or_else(|| panic!("layers without {self}"))
            .dims(c)
    }
}

impl Product {
    /// Number of its inputs: each expert has its own activations between up and down.
    pub fn shares(&self, c: &ModelConfig) -> usize {
        match self.source {
            InputSource::Rows(_) => self.linears[0].copies(c),
            InputSource::Norm(_) | InputSource::Heads(_) | InputSource::Fixed => 1,
        }
    }

    /// Width of its input in a model of shape `c`.
    pub fn inputs(&self, c: &ModelConfig) -> usize {
        self.linears[0].inputs.of(c)
    }
}

impl Parameter {
    /// Its shape in a model of shape `c`.
    pub fn shape(&self, c: &ModelConfig) -> Shape {
        match self {
            Parameter::Norm(n) => Shape::Vector(n.len.of(c)),
            Parameter::Vector(v) => Shape::Vector(v.len.of(c)),
            Parameter::Linear(l) => {
                let Dims { rows, cols } = l.dims(c);
                Shape::Matrix(rows, cols)
            }
            Parameter::Bias(l) => Shape::Vector(l.dims(c).rows),
        }
    }
}
