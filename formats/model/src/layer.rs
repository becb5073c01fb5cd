//! Specification of a layer: its parameters' names and shapes, and what it computes.

use super::kind::{LinearKind, NormKind, VectorKind, Width};
use std::borrow::Cow;

/// Prefix of the names of layers' parameters, before the layer's number.
pub const LAYERS: &str = "model.layers.";

/// End of the names of biases, whose tensors are called so too.
const BIAS: &str = ".bias";

/// Ends of the names of all parameters whose tensors are called so too, in Hugging Face and GGUF files.
const WHOLE_NAMES: [&str; 4] = [BIAS, ".A_log", ".dt_bias", ".ssm_a"];

fn is_whole(name: &str) -> bool {
    WHOLE_NAMES.iter().any(|end| name.ends_with(end))
}

/// The name of the tensor that holds the parameter `name`, in Hugging Face and GGUF files:
/// `model.norm.weight` for `model.norm`, and a bias's own name.
pub fn tensor_name(name: &str) -> String {
    if is_whole(name) {
        name.into()
    } else {
        format!("{name}.weight")
    }
}

/// The parameter that the tensor `name` holds, the inverse of [`tensor_name`]; `None` if it holds none.
pub fn parameter_of(name: &str) -> Option<&str> {
    name.strip_suffix(".weight")
        .or_else(|| is_whole(name).then_some(name))
}

/// The full name of a parameter of layer `layer`.
pub fn in_layer(layer: usize, suffix: &str) -> String {
    format!("{LAYERS}{layer}.{suffix}")
}

/// The name of one expert's weight in files that store experts separately: `mlp.experts.5.gate_proj` for the stack
/// `mlp.experts.gate_proj`.
pub fn expert_name(stack: &str, expert: usize) -> String {
    let (experts, linear) = stack.rsplit_once('.').unwrap_or(("", stack));
    format!("{experts}.{expert}.{linear}")
}

/// A kind of layer: its blocks in running order.
#[derive(Clone, Copy, Debug)]
pub struct LayerSpec {
    /// Its blocks.
    pub blocks: &'static [BlockSpec],
}

/// A step of a layer, which changes the residual stream: `x += mixer(norm(x))`.
#[derive(Clone, Copy, Debug)]
pub struct BlockSpec {
    /// The norm of the mixer's input. In a residual of several streams, each is normalized by itself.
    pub norm: NormSpec,
    /// How the block reads and adds to a residual of several streams; `None` if there is one, or if the mixer sees all.
    pub hyper: Option<HyperSpec>,
    /// What is added.
    pub mixer: Mixer,
}

/// A block's hyper-connections to the streams of the residual (Zhu et al., arXiv 2409.19606; with weights that depend on
/// the input, as transformers' `qwen4_exp`). Of the `n` streams `[streams, hidden]`, normalized, the mixer reads the mean
/// over the streams of `sigmoid(up(silu(down(n) / streams))) * n`. Each stream gets what the mixer returns, times its one
/// of `2 sigmoid(inject(n) / streams)`. None of these is ever quantized.
#[derive(Clone, Copy, Debug)]
pub struct HyperSpec {
    /// `[rank, streams hidden]`
    pub down: Product,
    /// `[streams hidden, rank]`
    pub up: Product,
    /// `[streams, streams hidden]`
    pub inject: Product,
}

/// What a block computes from its normalized input `n`.
#[derive(Clone, Copy, Debug)]
pub enum Mixer {
    /// Attention to the positions up to a row's own.
    Attention(AttentionSpec),
    /// A recurrence over a state of fixed size.
    Delta(DeltaSpec),
    /// A SwiGLU.
    Mlp(MlpSpec),
    /// A mixture of experts, each a SwiGLU.
    Experts(ExpertsSpec),
    /// What a table knows of the last tokens, for all streams of a residual.
    Ngrams(NgramsSpec),
}

/// `o(attention(q(n), k(n), v(n)))`, where every head of the queries and keys is rotated by its
/// position, and normalized before if there are norms for it. The Linears of `qkv` may have biases.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSpec {
    /// Queries, keys and values.
    pub qkv: Product,
    /// The norms of each head of the queries and of the keys.
    pub head_norms: Option<HeadNorms>,
    /// True if the first Linear of `qkv` has twice as many outputs: behind each head's queries stand as
    /// many gates, by whose sigmoid the head's output is multiplied before `o`.
    pub gated: bool,
    /// What chooses the positions that a row attends to; `None` if it attends to all.
    pub indexer: Option<IndexerSpec>,
    /// The output projection.
    pub o: Product,
}

/// Chooses blocks of positions by scores of its own (transformers' `qwen4_exp`). The first rows of `qk(n)` are queries,
/// which are normalized and rotated by head; behind them is a key. The key of a block is the mean of the keys of its
/// positions, normalized, and rotated by the first of them. A block's score is the sum over the heads of the greater of 0
/// and query times key. A row attends to the blocks with the greatest scores (of equal ones, the first) among those that
/// end at its position or before, and to the positions behind the last of these.
#[derive(Clone, Copy, Debug)]
pub struct IndexerSpec {
    /// Queries and key `[(heads + 1) head_dim, hidden]`. It is never quantized.
    pub qk: Product,
    /// The norm of a head of the queries.
    pub q_norm: NormSpec,
    /// The norm of a block's key.
    pub k_norm: NormSpec,
}

/// Adds to each stream of the residual what a table has for the n-grams that end with a row's token
/// ([`crate::NgramTable`]; transformers' `qwen4_exp`, similar to Engram, arXiv 2601.07372).
///
/// With `e` the table's rows for a token, one behind another, `k = key_norm(key(e))` `[streams, hidden]`,
/// `s[c] = k[c] n[c] / sqrt(hidden)` for the normalized streams `n`, and `g[c] = sigmoid(sign(s[c]) sqrt(|s[c]|))
/// value(e)`, where the magnitude is at least 1e-6, stream `c` gets `g[c]` and what a causal convolution of each channel
/// and SiLU make of `conv_norm(g)[c]`. The taps of the convolution are as many rows apart as the longest n-gram has tokens.
#[derive(Clone, Copy, Debug)]
pub struct NgramsSpec {
    /// `[streams hidden, width]`. It is never quantized.
    pub key: Product,
    /// `[hidden, width]`. It is never quantized.
    pub value: Product,
    /// The norm of each stream's key.
    pub key_norm: NormSpec,
    /// The norm of each stream's input of the convolution.
    pub conv_norm: NormSpec,
    /// The convolution's weights, `[streams hidden, taps]`.
    pub conv: VectorRow,
}

/// A gated DeltaNet (Yang, Kautz, Hatamizadeh, arXiv 2412.06464): `out(norm(o) * silu(z))`, or another
/// [gate](crate::OutputGate) of `z`.
///
/// `q`, `k` and `v` are the rows' own and last few inputs `qkv(n)` through a causal convolution of each
/// channel and SiLU; heads of `q` and `k` are divided by their lengths, `q` also by `sqrt(key_dim)`. With
/// `beta = sigmoid(b(n))` and `g = exp(-exp(decay) softplus(a(n) + dt_bias))`, each value head has a state
/// `S [key_dim, value_dim]`, zero before the first position, and computes
/// `S = g S`, `S = S + k beta (v - S^T k)^T`, `o = S^T q`.
#[derive(Clone, Copy, Debug)]
pub struct DeltaSpec {
    /// `qkv` and `z`.
    pub inputs: Product,
    /// `b` and `a`. They are never quantized.
    pub rates: Product,
    /// The convolution's weights, `[channels, width]`.
    pub conv: VectorRow,
    /// Logarithms of the heads' rates of decay.
    pub decay: VectorRow,
    /// Biases of `a`.
    pub dt_bias: VectorRow,
    /// The norm of a head's output.
    pub norm: NormSpec,
    /// The output projection.
    pub out: Product,
}

/// Norms of single heads.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms {
    /// Of the queries' heads.
    pub q: NormSpec,
    /// Of the keys' heads.
    pub k: NormSpec,
}

/// `down(silu(gate(n)) * up(n))` (Shazeer, arXiv 2002.05202).
#[derive(Clone, Copy, Debug)]
pub struct MlpSpec {
    /// Gate and up projections.
    pub gate_up: Product,
    /// Down projection.
    pub down: Product,
}

/// With `p = softmax(router(n))` in f32, the sum of `p_e expert_e(n)` over the experts with the
/// greatest `p`, divided by the sum of these `p` if the model's configuration says so (Fedus, Zoph,
/// Shazeer, arXiv 2101.03961; Qwen3, arXiv 2505.09388). Each expert is a SwiGLU. All rows go through a
/// shared expert besides, if there is one.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsSpec {
    /// Scores the experts. It is never quantized.
    pub router: Product,
    /// Gate and up projections of every expert.
    pub gate_up: Product,
    /// Down projection of every expert.
    pub down: Product,
    /// The expert of all rows.
    pub shared: Option<SharedSpec>,
}

/// An expert that every row goes through: `sigmoid(score(n)) down(silu(gate(n)) * up(n))` is added.
#[derive(Clone, Copy, Debug)]
pub struct SharedSpec {
    /// One output. It is never quantized.
    pub score: Product,
    /// The expert.
    pub mlp: MlpSpec,
}

/// Linears that share one input: kernels multiply the input by all of them at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Its name in profiles, e.g. `qkv`.
    pub name: &'static str,
    /// Its Linears, in the order of their outputs.
    pub linears: &'static [LinearSpec],
    /// The operation that produces its input.
    pub source: InputSource,
}

/// The operation that produces a product's input. A method can divide an element of that input by a
/// scale there and multiply the product's weights by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputSource {
    /// A norm, through its gains.
    Norm(NormKind),
    /// Attention over the heads of this Linear's outputs: query heads of a group share a head.
    Heads(LinearKind),
    /// The outputs of this Linear, each times another value.
    Rows(LinearKind),
    /// An operation that no scale can be moved into.
    Fixed,
}

/// A Linear of a layer, or the same Linear of all experts of a layer. In the latter case its weight is
/// a stack: the rows of expert 0, those of expert 1 and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearSpec {
    /// Its kind.
    pub kind: LinearKind,
    /// Its Hugging Face name within a layer, without `.weight`.
    pub suffix: &'static str,
    /// Its GGUF name within a block, without `.weight`.
    pub gguf: &'static str,
    /// Number of outputs, for one expert.
    pub out: Width,
    /// Number of inputs.
    pub inputs: Width,
    /// True if every expert has one.
    pub stacked: bool,
    /// True if a bias `[out]` is added to its outputs.
    pub bias: bool,
}

/// An RMSNorm of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormSpec {
    /// Its kind.
    pub kind: NormKind,
    /// See [`LinearSpec::suffix`].
    pub suffix: &'static str,
    /// See [`LinearSpec::gguf`].
    pub gguf: &'static str,
    /// Number of elements that are normalized together.
    pub len: Width,
    /// True if Hugging Face files hold the gains less 1. (GGUF files and nq's own hold the gains.)
    pub less_one: bool,
}

/// A vector of a layer that is neither the gains of a norm nor a bias of a Linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorRow {
    /// Its kind.
    pub kind: VectorKind,
    /// Its Hugging Face name within a layer: that of its tensor, without `.weight`.
    pub suffix: &'static str,
    /// Its GGUF name within a block, likewise.
    pub gguf: &'static str,
    /// Number of its values.
    pub len: Width,
}

/// A row of an architecture's table: its kind, its names in Hugging Face and GGUF files, and
/// its dimensions `(out, in)`.
pub(super) const fn linear(
    kind: LinearKind,
    suffix: &'static str,
    gguf: &'static str,
    out: Width,
    inputs: Width,
) -> LinearSpec {
    LinearSpec {
        kind,
        suffix,
        gguf,
        out,
        inputs,
        stacked: false,
        bias: false,
    }
}

/// Like [`linear`], for a norm.
pub(super) const fn norm(
    kind: NormKind,
    suffix: &'static str,
    gguf: &'static str,
    len: Width,
) -> NormSpec {
    NormSpec {
        kind,
        suffix,
        gguf,
        len,
        less_one: false,
    }
}

/// A parameter of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// The gains of an RMSNorm.
    Norm(NormSpec),
    /// The weight of a Linear.
    Linear(LinearSpec),
    /// The bias of a Linear.
    Bias(LinearSpec),
    /// Another vector.
    Vector(VectorRow),
}

impl Mixer {
    /// The products whose weights can be quantized, in running order.
    pub fn products(&self) -> Vec<&Product> {
        match self {
            Mixer::Attention(a) => vec![&a.qkv, &a.o],
            Mixer::Delta(d) => vec![&d.inputs, &d.out],
            Mixer::Mlp(m) => vec![&m.gate_up, &m.down],
            Mixer::Experts(e) => {
                let shared = e.shared.iter().flat_map(|s| [&s.mlp.gate_up, &s.mlp.down]);
                [&e.gate_up, &e.down].into_iter().chain(shared).collect()
            }
            Mixer::Ngrams(_) => Vec::new(),
        }
    }

    /// The products that are never quantized, small ones whose errors would cost more than their bytes.
    fn kept(&self) -> Vec<&Product> {
        match self {
            Mixer::Experts(e) => {
                let shared = e.shared.iter().map(|s| &s.score);
                [&e.router].into_iter().chain(shared).collect()
            }
            Mixer::Delta(d) => vec![&d.rates],
            Mixer::Attention(a) => a.indexer.iter().map(|i| &i.qk).collect(),
            Mixer::Ngrams(n) => vec![&n.key, &n.value],
            Mixer::Mlp(_) => Vec::new(),
        }
    }

    fn attention(&self) -> Option<&AttentionSpec> {
        match self {
            Mixer::Attention(a) => Some(a),
            Mixer::Delta(_) | Mixer::Mlp(_) | Mixer::Experts(_) | Mixer::Ngrams(_) => None,
        }
    }

    fn recurrence(&self) -> Option<&DeltaSpec> {
        match self {
            Mixer::Delta(d) => Some(d),
            Mixer::Attention(_) | Mixer::Mlp(_) | Mixer::Experts(_) | Mixer::Ngrams(_) => None,
        }
    }

    fn experts(&self) -> Option<&ExpertsSpec> {
        match self {
            Mixer::Experts(e) => Some(e),
            Mixer::Attention(_) | Mixer::Delta(_) | Mixer::Mlp(_) | Mixer::Ngrams(_) => None,
        }
    }

    fn ngrams(&self) -> Option<&NgramsSpec> {
        match self {
            Mixer::Ngrams(n) => Some(n),
            Mixer::Attention(_) | Mixer::Delta(_) | Mixer::Mlp(_) | Mixer::Experts(_) => None,
        }
    }

    /// The norms within it.
    fn norms(&self) -> Vec<&NormSpec> {
        match self {
            Mixer::Attention(a) => {
                let heads = a.head_norms.iter().flat_map(|h| [&h.q, &h.k]);
                let index = a.indexer.iter().flat_map(|i| [&i.q_norm, &i.k_norm]);
                heads.chain(index).collect()
            }
            Mixer::Delta(d) => vec![&d.norm],
            Mixer::Ngrams(n) => vec![&n.key_norm, &n.conv_norm],
            Mixer::Mlp(_) | Mixer::Experts(_) => Vec::new(),
        }
    }

    /// Its other vectors.
    fn vectors(&self) -> Vec<&VectorRow> {
        match self {
            Mixer::Delta(d) => vec![&d.conv, &d.decay, &d.dt_bias],
            Mixer::Ngrams(n) => vec![&n.conv],
            Mixer::Attention(_) | Mixer::Mlp(_) | Mixer::Experts(_) => Vec::new(),
        }
    }
}

impl BlockSpec {
    /// The products that are never quantized.
    fn kept(&self) -> Vec<&Product> {
        let hyper = self.hyper.iter().flat_map(HyperSpec::products);
        hyper.chain(self.mixer.kept()).collect()
    }
}

impl HyperSpec {
    /// Its products, in running order.
    fn products(&self) -> [&Product; 3] {
        [&self.down, &self.up, &self.inject]
    }
}

impl LayerSpec {
    /// The products whose weights can be quantized, in running order.
    pub fn products(&self) -> Vec<&'static Product> {
        let blocks = self.blocks.iter();
        blocks.flat_map(|b| b.mixer.products()).collect()
    }

    /// The Linears of [`LayerSpec::products`].
    pub fn linears(&self) -> Vec<&'static LinearSpec> {
        let products = self.products().into_iter();
        products.flat_map(|p| p.linears).collect()
    }

    /// The Linear that scores the experts, if there are any.
    pub fn router(&self) -> Option<&'static LinearSpec> {
        self.experts()
            .map(|(_, experts)| &experts.router.linears[0])
    }

    /// Its attention, if it has one.
    pub fn attention(&self) -> Option<&'static AttentionSpec> {
        self.blocks.iter().find_map(|b| b.mixer.attention())
    }

    /// Its recurrence, if it has one: its sequences then have a state of fixed size.
    pub fn recurrence(&self) -> Option<&'static DeltaSpec> {
        self.blocks.iter().find_map(|b| b.mixer.recurrence())
    }

    /// Its experts, if it has some, with the norm before them.
    pub fn experts(&self) -> Option<(&'static NormSpec, &'static ExpertsSpec)> {
        let with_norm = |b: &'static BlockSpec| Some((&b.norm, b.mixer.experts()?));
        self.blocks.iter().find_map(with_norm)
    }

    /// Its table of n-grams, if it has one.
    pub fn ngrams(&self) -> Option<&'static NgramsSpec> {
        self.blocks.iter().find_map(|b| b.mixer.ngrams())
    }

    /// What chooses the positions that its rows attend to, if something does.
    pub fn indexer(&self) -> Option<&'static IndexerSpec> {
        self.attention().and_then(|a| a.indexer.as_ref())
    }

    /// The products that are never quantized: routers and the like.
    pub fn kept_products(&self) -> Vec<&'static Product> {
        self.blocks.iter().flat_map(BlockSpec::kept).collect()
    }

    /// The Linears of [`LayerSpec::kept_products`].
    pub fn kept(&self) -> Vec<&'static LinearSpec> {
        let products = self.kept_products().into_iter();
        products.flat_map(|p| p.linears).collect()
    }

    /// All matrices of a layer: [`LayerSpec::kept`] and [`LayerSpec::linears`].
    pub fn matrices(&self) -> impl Iterator<Item = &'static LinearSpec> {
        self.kept().into_iter().chain(self.linears())
    }

    /// Its norms: those of the residual stream, then those within mixers.
    pub fn norms(&self) -> Vec<&'static NormSpec> {
        let stream = self.blocks.iter().map(|b| &b.norm);
        let within = self.blocks.iter().flat_map(|b| b.mixer.norms());
        stream.chain(within).collect()
    }

    /// Its other vectors but biases.
    pub fn vectors(&self) -> Vec<&'static VectorRow> {
        self.blocks.iter().flat_map(|b| b.mixer.vectors()).collect()
    }

    /// The Linears with a bias.
    pub fn biased(&self) -> impl Iterator<Item = &'static LinearSpec> {
        self.linears().into_iter().filter(|l| l.bias)
    }

    /// All parameters, in the order they are used.
    pub fn parameters(&self) -> Vec<Parameter> {
        fn linears(product: &Product) -> impl Iterator<Item = Parameter> {
            product.linears.iter().flat_map(|&l| {
                let bias = l.bias.then_some(Parameter::Bias(l));
                [Parameter::Linear(l)].into_iter().chain(bias)
            })
        }
        let mut all = Vec::new();
        for block in self.blocks {
            let mixer = &block.mixer;
            all.push(Parameter::Norm(block.norm));
            all.extend(block.kept().into_iter().flat_map(linears));
            let mut products = mixer.products().into_iter();
            all.extend(products.next().into_iter().flat_map(linears));
            all.extend(mixer.vectors().into_iter().map(|&v| Parameter::Vector(v)));
            all.extend(mixer.norms().into_iter().map(|&n| Parameter::Norm(n)));
            all.extend(products.flat_map(linears));
        }
        all
    }

    /// The Linear of this kind.
    ///
    /// # Panics
    /// If the layer has none.
    pub fn linear(&self, kind: LinearKind) -> &'static LinearSpec {
        self.matrices()
            .find(|l| l.kind == kind)
            .unwrap_or_else(|| panic!("a layer without {kind}"))
    }

    /// The norm of this kind.
    ///
    /// # Panics
    /// If the layer has none.
    pub fn norm(&self, kind: NormKind) -> &'static NormSpec {
        let mut all = self.norms().into_iter();
        all.find(|n| n.kind == kind)
            .unwrap_or_else(|| panic!("a layer without {kind:?}"))
    }
}

impl Product {
    /// The kinds of its Linears in words: `q k v`.
    pub fn words(&self) -> String {
        let words: Vec<String> = self.linears.iter().map(|l| l.kind.to_string()).collect();
        words.join(" ")
    }
}

impl LinearSpec {
    /// One whose outputs a bias is added to.
    pub(super) const fn with_bias(self) -> Self {
        LinearSpec { bias: true, ..self }
    }

    /// A stack over experts, each of these dimensions.
    pub(super) const fn of_experts(self) -> Self {
        LinearSpec {
            stacked: true,
            ..self
        }
    }

    /// The full name of its weight in layer `layer`, without `.weight`.
    pub fn name(&self, layer: usize) -> String {
        in_layer(layer, self.suffix)
    }

    /// The full name of its bias in layer `layer`.
    pub fn bias_name(&self, layer: usize) -> String {
        format!("{}{BIAS}", self.name(layer))
    }

    /// The name of one expert's weight in files that store experts separately.
    pub fn expert_name(&self, layer: usize, expert: usize) -> String {
        expert_name(&self.name(layer), expert)
    }
}

impl VectorRow {
    /// Its full name in layer `layer`.
    pub fn name(&self, layer: usize) -> String {
        in_layer(layer, self.suffix)
    }
}

impl NormSpec {
    /// One of whose gains files hold what they exceed 1 by.
    pub(super) const fn held_less_one(self) -> Self {
        NormSpec {
            less_one: true,
            ..self
        }
    }

    /// The full name of its gains in layer `layer`, without `.weight`.
    pub fn name(&self, layer: usize) -> String {
        in_layer(layer, self.suffix)
    }
}

impl Parameter {
    /// Its Hugging Face name within a layer: that of its tensor, without `.weight`.
    pub fn suffix(&self) -> Cow<'static, str> {
        match self {
            Parameter::Norm(n) => n.suffix.into(),
            Parameter::Linear(l) => l.suffix.into(),
            Parameter::Bias(l) => format!("{}{BIAS}", l.suffix).into(),
            Parameter::Vector(v) => v.suffix.into(),
        }
    }

    /// Its GGUF name within a block, without `.weight`.
    pub fn gguf(&self) -> Cow<'static, str> {
        match self {
            Parameter::Norm(n) => n.gguf.into(),
            Parameter::Linear(l) => l.gguf.into(),
            Parameter::Bias(l) => format!("{}{BIAS}", l.gguf).into(),
            Parameter::Vector(v) => v.gguf.into(),
        }
    }
}
