//! Specification of a layer: its parameters' names and shapes, and what it computes.

use std::fmt;

/// Prefix of the names of layers' parameters, before the layer's number.
pub(crate) const LAYERS: &str = "model.layers.";

/// The full name of a parameter of layer `layer`.
pub fn in_layer(layer: usize, suffix: &str) -> String {
    format!("{LAYERS}{layer}.{suffix}")
}

/// A layer: its two halves in order. Each adds its output to the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct LayerSpec {
    /// The first half.
    pub attention: AttentionSpec,
    /// The second half.
    pub mlp: MlpSpec,
}

/// `o(attention(q(n), k(n), v(n)))` with `n = norm(x)`. Every head of the queries and keys is
/// normalized and rotated by its position.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSpec {
    /// The norm of the input.
    pub norm: NormSpec,
    /// Queries, keys and values.
    pub qkv: Product,
    /// The norm of each head of the queries.
    pub q_norm: NormSpec,
    /// The norm of each head of the keys.
    pub k_norm: NormSpec,
    /// The output projection.
    pub o: Product,
}

/// A layer's second half.
#[derive(Clone, Copy, Debug)]
pub enum MlpSpec {
    /// `down(silu(gate(n)) * up(n))` with `n = norm(x)` (Shazeer, arXiv 2002.05202).
    SwiGlu {
        /// The norm of the input.
        norm: NormSpec,
        /// Gate and up projections.
        gate_up: Product,
        /// Down projection.
        down: Product,
    },
    /// A mixture of experts, each a SwiGLU: with `n = norm(x)` and `p = softmax(router(n))` in f32,
    /// the sum of `p_e expert_e(n)` over the experts with the greatest `p`, divided by the sum of
    /// these `p` if the model's configuration says so (Fedus, Zoph, Shazeer, arXiv 2101.03961;
    /// Qwen3, arXiv 2505.09388).
    Experts {
        /// The norm of the input.
        norm: NormSpec,
        /// Scores the experts. It is never quantized.
        router: Product,
        /// Gate and up projections of every expert.
        gate_up: Product,
        /// Down projection of every expert.
        down: Product,
    },
}

/// Linears that share one input: kernels multiply the input by all of them at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Its name in profiles, e.g. `qkv`.
    pub name: &'static str,
    /// Its Linears, in the order of their outputs.
    pub linears: &'static [LinearSpec],
    /// The operation that produces its input.
    pub source: Source,
}

/// The operation that produces a product's input. A method can divide an element of that input by a
/// scale there and multiply the product's weights by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A norm, through its gains.
    Norm(NormKind),
    /// Attention over the heads of this Linear's outputs: query heads of a group share a head.
    Heads(LinearKind),
    /// The outputs of this Linear, each times another value.
    Rows(LinearKind),
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
}

/// A row of an architecture's table: its kind, its names in Hugging Face and GGUF files, and
/// its dimensions `(out, in)`.
pub(super) const fn linear(
    kind: LinearKind,
    suffix: &'static str,
    gguf: &'static str,
    (out, inputs): (Width, Width),
) -> LinearSpec {
    LinearSpec {
        kind,
        suffix,
        gguf,
        out,
        inputs,
        stacked: false,
    }
}

/// Like [`linear`], for a stack over experts; `dims` are those of one expert.
pub(super) const fn stack(
    kind: LinearKind,
    suffix: &'static str,
    gguf: &'static str,
    dims: (Width, Width),
) -> LinearSpec {
    LinearSpec {
        stacked: true,
        ..linear(kind, suffix, gguf, dims)
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
    }
}

/// Kind of a Linear, in running order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinearKind {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Attention output.
    O,
    /// Scores of experts.
    Router,
    /// MLP gate.
    Gate,
    /// MLP up.
    Up,
    /// MLP down.
    Down,
}

/// Kind of a norm, by its input. Those of the residual stream come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NormKind {
    /// The residual stream before attention.
    Attention,
    /// The residual stream before the MLP.
    Mlp,
    /// A head of the queries.
    Q,
    /// A head of the keys.
    K,
}

/// A dimension given by a model's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// `hidden_size`
    Hidden,
    /// All query heads.
    Heads,
    /// All key heads, or all value heads.
    KvHeads,
    /// One head.
    Head,
    /// `intermediate_size`
    Mlp,
    /// `moe_intermediate_size`
    Expert,
    /// `num_experts`
    Experts,
}

/// A parameter of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// The gains of an RMSNorm.
    Norm(NormSpec),
    /// The weight of a Linear.
    Linear(LinearSpec),
}

impl MlpSpec {
    /// The norm of its input.
    pub fn norm(&self) -> &NormSpec {
        match self {
            MlpSpec::SwiGlu { norm, .. } | MlpSpec::Experts { norm, .. } => norm,
        }
    }

    /// Gate and up projections.
    pub fn gate_up(&self) -> &Product {
        match self {
            MlpSpec::SwiGlu { gate_up, .. } | MlpSpec::Experts { gate_up, .. } => gate_up,
        }
    }

    /// Down projection.
    pub fn down(&self) -> &Product {
        match self {
            MlpSpec::SwiGlu { down, .. } | MlpSpec::Experts { down, .. } => down,
        }
    }

    /// The Linear that scores the experts, if there are any.
    pub fn router(&self) -> Option<&LinearSpec> {
        match self {
            MlpSpec::SwiGlu { .. } => None,
            MlpSpec::Experts { router, .. } => Some(&router.linears[0]),
        }
    }
}

impl LayerSpec {
    /// The products whose weights can be quantized, in running order: all but the router.
    pub fn products(&self) -> Vec<&Product> {
        let (attention, mlp) = (&self.attention, &self.mlp);
        vec![&attention.qkv, &attention.o, mlp.gate_up(), mlp.down()]
    }

    /// The Linears of [`LayerSpec::products`].
    pub fn linears(&self) -> Vec<&'static LinearSpec> {
        let products = self.products().into_iter();
        products.flat_map(|p| p.linears).collect()
    }

    /// All matrices of a layer: the router and [`LayerSpec::linears`].
    pub fn matrices(&self) -> impl Iterator<Item = &LinearSpec> {
        self.mlp.router().into_iter().chain(self.linears())
    }

    /// Its norms, in the order of [`NormKind`].
    pub fn norms(&self) -> Vec<&NormSpec> {
        let a = &self.attention;
        vec![&a.norm, self.mlp.norm(), &a.q_norm, &a.k_norm]
    }

    /// All parameters, in the order they are used.
    pub fn parameters(&self) -> Vec<Parameter> {
        let product = |p: &Product| p.linears.iter().copied().map(Parameter::Linear);
        let AttentionSpec {
            norm,
            qkv,
            q_norm,
            k_norm,
            o,
        } = &self.attention;
        let mut all = vec![Parameter::Norm(*norm)];
        all.extend(product(qkv));
        all.extend([*q_norm, *k_norm].map(Parameter::Norm));
        all.extend(product(o));
        let mlp = &self.mlp;
        all.push(Parameter::Norm(*mlp.norm()));
        all.extend(mlp.router().copied().map(Parameter::Linear));
        all.extend(product(mlp.gate_up()).chain(product(mlp.down())));
        all
    }

    /// The Linear of this kind.
    ///
    /// # Panics
    /// If the layer has none.
    pub fn linear(&self, kind: LinearKind) -> &LinearSpec {
        self.matrices()
            .find(|l| l.kind == kind)
            .unwrap_or_else(|| panic!("a layer without {kind}"))
    }

    /// The norm of this kind.
    ///
    /// # Panics
    /// If the layer has none.
    pub fn norm(&self, kind: NormKind) -> &NormSpec {
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
    /// The full name of its weight in layer `layer`, without `.weight`.
    pub fn name(&self, layer: usize) -> String {
        in_layer(layer, self.suffix)
    }

    /// The name of one expert's weight in files that store experts separately:
    /// `mlp.experts.5.gate_proj` for the stack `mlp.experts.gate_proj`.
    pub fn expert_name(&self, layer: usize, expert: usize) -> String {
        let (experts, linear) = self.suffix.rsplit_once('.').unwrap_or(("", self.suffix));
        in_layer(layer, &format!("{experts}.{expert}.{linear}"))
    }
}

impl NormSpec {
    /// The full name of its gains in layer `layer`, without `.weight`.
    pub fn name(&self, layer: usize) -> String {
        in_layer(layer, self.suffix)
    }
}

impl fmt::Display for LinearKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LinearKind::Q => "q",
            LinearKind::K => "k",
            LinearKind::V => "v",
            LinearKind::O => "o",
            LinearKind::Router => "router",
            LinearKind::Gate => "gate",
            LinearKind::Up => "up",
            LinearKind::Down => "down",
        })
    }
}

impl Parameter {
    /// Its Hugging Face name within a layer, without `.weight`.
    pub fn suffix(&self) -> &'static str {
        match self {
            Parameter::Norm(n) => n.suffix,
            Parameter::Linear(l) => l.suffix,
        }
    }

    /// Its GGUF name within a block, without `.weight`.
    pub fn gguf(&self) -> &'static str {
        match self {
            Parameter::Norm(n) => n.gguf,
            Parameter::Linear(l) => l.gguf,
        }
    }
}
