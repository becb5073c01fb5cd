//! What a layer is made of: its parameters by name and shape, and what it computes of them.

use std::fmt;

/// What the names of layers' parameters begin with, before the layer's number.
pub(crate) const LAYERS: &str = "model.layers.";

/// The full name of a parameter of layer `layer`.
pub fn in_layer(layer: usize, suffix: &str) -> String {
    format!("{LAYERS}{layer}.{suffix}")
}

/// A layer: its halves in order. Each adds what it computes to the residual stream.
#[derive(Clone, Copy, Debug)]
pub struct LayerSpec {
    /// The first half.
    pub attention: AttentionSpec,
    /// The second.
    pub mlp: MlpSpec,
}

/// `o(attention(q(n), k(n), v(n)))` of `n = norm(x)`. Every head of the queries and keys is
/// normalized and rotated by its position.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSpec {
    /// Before everything else.
    pub norm: NormSpec,
    /// Queries, keys and values.
    pub qkv: Product,
    /// Of each head of the queries.
    pub q_norm: NormSpec,
    /// Of each head of the keys.
    pub k_norm: NormSpec,
    /// The output projection.
    pub o: Product,
}

/// What follows attention.
#[derive(Clone, Copy, Debug)]
pub enum MlpSpec {
    /// `down(silu(gate(n)) * up(n))` of `n = norm(x)` (Shazeer, arXiv 2002.05202).
    SwiGlu {
        /// Before everything else.
        norm: NormSpec,
        /// Gate and up.
        gate_up: Product,
        /// Down.
        down: Product,
    },
    /// A mixture of experts, each a SwiGLU: with `p = softmax(router(n))` of `n = norm(x)` in f32,
    /// the sum of `p_e expert_e(n)` over the experts of the greatest `p`, divided by the sum of
    /// these `p` where the model's configuration says so (Fedus, Zoph, Shazeer, arXiv 2101.03961;
    /// Qwen3, arXiv 2505.09388).
    Experts {
        /// Before everything else.
        norm: NormSpec,
        /// What scores the experts. No scheme covers it: it stays as the source has it.
        router: Product,
        /// Gate and up of every expert.
        gate_up: Product,
        /// Down of every expert.
        down: Product,
    },
}

/// Linears that share one input: kernels multiply it by all of them at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// What profiles call it: `qkv`.
    pub name: &'static str,
    /// Its Linears, in the order their outputs stand.
    pub linears: &'static [LinearSpec],
    /// What makes its input.
    pub source: Source,
}

/// What makes a product's input, of which a method can divide an element by a scale that the
/// product's weights are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A norm, by its gains.
    Norm(NormKind),
    /// Attention over the heads of this Linear's outputs: query heads of a group share theirs.
    Heads(LinearKind),
    /// This Linear's outputs, each times something else.
    Rows(LinearKind),
}

/// A Linear of a layer, or the same Linear of all experts of one: then its weight is a stack, the
/// rows of expert 0, those of expert 1 and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearSpec {
    /// What it does.
    pub kind: LinearKind,
    /// Hugging Face's name within a layer, without `.weight`.
    pub suffix: &'static str,
    /// GGUF's name within a block, without `.weight`.
    pub gguf: &'static str,
    /// Its outputs, of one expert.
    pub out: Width,
    /// Its inputs.
    pub inputs: Width,
    /// Every expert has one.
    pub stacked: bool,
}

/// An RMSNorm of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormSpec {
    /// What it normalizes.
    pub kind: NormKind,
    /// As [`LinearSpec::suffix`].
    pub suffix: &'static str,
    /// As [`LinearSpec::gguf`].
    pub gguf: &'static str,
    /// Elements that are normalized together.
    pub len: Width,
}

/// A row of an architecture's table: its kind, its names as Hugging Face and GGUF have them, and
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

/// As [`linear`], of every expert; `dims` are those of one.
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

/// As [`linear`], of a norm.
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

/// What a Linear does. In the order they run.
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

/// What a norm normalizes. Those of the residual stream come first.
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

/// A dimension that a model's configuration gives.
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
    /// The norm before everything else.
    pub fn norm(&self) -> &NormSpec {
        match self {
            MlpSpec::SwiGlu { norm, .. } | MlpSpec::Experts { norm, .. } => norm,
        }
    }

    /// Gate and up.
    pub fn gate_up(&self) -> &Product {
        match self {
            MlpSpec::SwiGlu { gate_up, .. } | MlpSpec::Experts { gate_up, .. } => gate_up,
        }
    }

    /// Down.
    pub fn down(&self) -> &Product {
        match self {
            MlpSpec::SwiGlu { down, .. } | MlpSpec::Experts { down, .. } => down,
        }
    }

    /// What scores the experts, if there are any.
    pub fn router(&self) -> Option<&LinearSpec> {
        match self {
            MlpSpec::SwiGlu { .. } => None,
            MlpSpec::Experts { router, .. } => Some(&router.linears[0]),
        }
    }
}

impl LayerSpec {
    /// Its products whose weights schemes cover, in the order they run: all but the router.
    pub fn products(&self) -> Vec<&Product> {
        let (attention, mlp) = (&self.attention, &self.mlp);
        vec![&attention.qkv, &attention.o, mlp.gate_up(), mlp.down()]
    }

    /// The Linears of [`LayerSpec::products`].
    pub fn linears(&self) -> Vec<&'static LinearSpec> {
        let products = self.products().into_iter();
        products.flat_map(|p| p.linears).collect()
    }

    /// All that a layer multiplies by: the router and [`LayerSpec::linears`].
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
    /// Its Linears in words: `q k v`.
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

    /// What files that keep experts apart call that of one: `mlp.experts.5.gate_proj` of the stack
    /// `mlp.experts.gate_proj`.
    pub fn expert_name(&self, layer: usize, expert: usize) -> String {
        let (experts, linear) = self.suffix.rsplit_once('.').unwrap_or(("", self.suffix));
        in_layer(layer, &format!("{experts}.{expert}.{linear}"))
    }
}

impl NormSpec {
    /// As [`LinearSpec::name`].
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
    /// Hugging Face's name within a layer, without `.weight`.
    pub fn suffix(&self) -> &'static str {
        match self {
            Parameter::Norm(n) => n.suffix,
            Parameter::Linear(l) => l.suffix,
        }
    }

    /// GGUF's name within a block, without `.weight`.
    pub fn gguf(&self) -> &'static str {
        match self {
            Parameter::Norm(n) => n.gguf,
            Parameter::Linear(l) => l.gguf,
        }
    }
}
