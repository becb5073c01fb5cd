//! The forward of a layer, written once: its blocks' operations in their order. Each device
//! runs them its own way, over its own buffers, and may queue or record them.

use nq_formats::ModelConfig;
use nq_formats::models::{AttentionSpec, LayerSpec, LinearSpec, Mixer, NormSpec, Product};

/// A layer's weights as a device holds them: matrices as `L`, vectors (gains of norms, biases) as `N`.
pub struct Layer<L, N> {
    /// Its number, from 0.
    pub index: usize,
    /// Its blocks, in running order.
    pub blocks: Vec<Block<L, N>>,
}

/// A step of a layer: `x += mixer(norm(x))`.
pub struct Block<L, N> {
    /// Gains of the norm, `[hidden]`.
    pub norm: N,
    /// What is added.
    pub mixer: Mix<L, N>,
}

/// The weights of a block's [`Mixer`].
pub enum Mix<L, N> {
    /// See [`Mixer::Attention`].
    Attention(Attention<L, N>),
    /// See [`Mixer::Mlp`].
    Mlp(Mlp<L>),
    /// See [`Mixer::Experts`].
    Experts(Experts<L>),
}

/// Attention.
pub struct Attention<L, N> {
    /// `[q_dim + 2 kv_dim, hidden]`
    pub qkv: Packed<L>,
    /// What happens to queries, keys and values before they are attended to.
    pub heads: HeadVectors<N>,
    /// `[hidden, q_dim]`
    pub o: Packed<L>,
}

/// The vectors that prepare queries, keys and values: biases are added, then heads are normalized.
pub struct HeadVectors<N> {
    /// Biases of the queries `[q_dim]`, the keys and the values `[kv_dim]`; empty if they have none.
    pub biases: Vec<N>,
    /// Gains of the norms of a head of the queries and of the keys, `[head_dim]`, if they are normalized.
    pub norms: Option<[N; 2]>,
}

/// A SwiGLU.
pub struct Mlp<L> {
    /// `[2 intermediate, hidden]`
    pub gate_up: Packed<L>,
    /// `[hidden, intermediate]`
    pub down: Packed<L>,
}

/// A mixture of experts.
pub struct Experts<L> {
    /// `[experts, hidden]`
    pub router: Packed<L>,
    /// `[2 width, hidden]` for every expert.
    pub gate_up: Packed<L>,
    /// `[hidden, width]` for every expert.
    pub down: Packed<L>,
}

/// A product from the architecture's table, and its weight on a device.
pub struct Packed<L> {
    /// Row of the table.
    pub spec: &'static Product,
    /// Its weight.
    pub linear: L,
}

/// A vector of a layer.
#[derive(Clone, Copy, Debug)]
pub enum VectorSpec {
    /// The gains of a norm.
    Norm(&'static NormSpec),
    /// The bias of a Linear.
    Bias(&'static LinearSpec),
}

impl VectorSpec {
    /// Number of its values in a model of shape `c`.
    pub fn len(&self, c: &ModelConfig) -> usize {
        match self {
            VectorSpec::Norm(norm) => norm.len.of(c),
            VectorSpec::Bias(linear) => linear.dims(c).0,
        }
    }

    /// Its name in layer `layer`.
    pub fn name(&self, layer: usize) -> String {
        match self {
            VectorSpec::Norm(norm) => norm.name(layer),
            VectorSpec::Bias(linear) => linear.bias_name(layer),
        }
    }
}

/// Destination of [`Ops::project`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    /// Queries, keys and values, the input of [`Ops::attend`].
    Qkv,
    /// `silu(gate) * up`, later used as [`Operand::Gated`].
    Gated,
}

/// Left operand of [`Ops::add`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// The output of attention.
    Attended,
    /// The output of [`Projection::Gated`].
    Gated,
}

/// The operations of a layer over the rows of a pass, which holds their residual stream `x`.
///
/// # Errors
/// Every operation returns errors of the device.
pub trait Ops {
    /// Type of a product's weight.
    type Linear;
    /// Type of a vector: a norm's gains, a bias.
    type Vector;
    /// Type of the device's errors.
    type Error;

    /// Computes `norm(x) w^T`.
    fn project(
        &mut self,
        layer: usize,
        norm: &Self::Vector,
        w: &Packed<Self::Linear>,
        to: Projection,
    ) -> Result<(), Self::Error>;

    /// Prepares queries, keys and values as `heads` says, rotates queries and keys, appends keys and
    /// values to the rows' sequences, and lets each row attend to the positions up to its own.
    fn attend(
        &mut self,
        layer: usize,
        heads: &HeadVectors<Self::Vector>,
        o: &Packed<Self::Linear>,
    ) -> Result<(), Self::Error>;

    /// Computes `x += operand w^T`.
    fn add(
        &mut self,
        layer: usize,
        operand: Operand,
        w: &Packed<Self::Linear>,
    ) -> Result<(), Self::Error>;

    /// Adds the mixture of `experts` of `norm(x)` to `x`.
    fn add_experts(
        &mut self,
        layer: usize,
        norm: &Self::Vector,
        experts: &Experts<Self::Linear>,
    ) -> Result<(), Self::Error>;

    /// Called when `x` is the layer's output.
    fn end_layer(&mut self, layer: usize) -> Result<(), Self::Error> {
        let _ = layer;
        Ok(())
    }
}

impl<N> HeadVectors<N> {
    fn new<E>(
        spec: &'static AttentionSpec,
        mut vector: impl FnMut(VectorSpec) -> Result<N, E>,
    ) -> Result<Self, E> {
        let biased = spec.qkv.linears.iter().filter(|l| l.bias);
        let biases = biased.map(|l| vector(VectorSpec::Bias(l)));
        let biases = biases.collect::<Result<_, E>>()?;
        let mut norm = |norm| vector(VectorSpec::Norm(norm));
        Ok(HeadVectors {
            biases,
            norms: match &spec.head_norms {
                Some(norms) => Some([norm(&norms.q)?, norm(&norms.k)?]),
                None => None,
            },
        })
    }
}

impl<L, N> Mix<L, N> {
    /// Its weights in the order they run, without a router's.
    fn linears(&self) -> [&L; 2] {
        let [first, last] = match self {
            Mix::Attention(a) => [&a.qkv, &a.o],
            Mix::Mlp(m) => [&m.gate_up, &m.down],
            Mix::Experts(e) => [&e.gate_up, &e.down],
        };
        [&first.linear, &last.linear]
    }

    fn linears_mut(&mut self) -> [&mut L; 2] {
        let [first, last] = match self {
            Mix::Attention(a) => [&mut a.qkv, &mut a.o],
            Mix::Mlp(m) => [&mut m.gate_up, &mut m.down],
            Mix::Experts(e) => [&mut e.gate_up, &mut e.down],
        };
        [&mut first.linear, &mut last.linear]
    }
}

impl<L, N> Layer<L, N> {
    /// Builds layer `index` as described by `spec`: weights from `linear`, vectors from `vector`.
    ///
    /// # Errors
    /// The first error that either returns.
    pub fn new<E>(
        index: usize,
        spec: &'static LayerSpec,
        mut linear: impl FnMut(&'static Product) -> Result<L, E>,
        mut vector: impl FnMut(VectorSpec) -> Result<N, E>,
    ) -> Result<Self, E> {
        let mut pack = |spec: &'static Product| -> Result<Packed<L>, E> {
            let linear = linear(spec)?;
            Ok(Packed { spec, linear })
        };
        let mut block = |spec: &'static nq_formats::models::Block| -> Result<_, E> {
            let norm = vector(VectorSpec::Norm(&spec.norm))?;
            let mixer = match &spec.mixer {
                Mixer::Attention(a) => Mix::Attention(Attention {
                    qkv: pack(&a.qkv)?,
                    heads: HeadVectors::new(a, &mut vector)?,
                    o: pack(&a.o)?,
                }),
                Mixer::Mlp(m) => Mix::Mlp(Mlp {
                    gate_up: pack(&m.gate_up)?,
                    down: pack(&m.down)?,
                }),
                Mixer::Experts(e) => Mix::Experts(Experts {
                    router: pack(&e.router)?,
                    gate_up: pack(&e.gate_up)?,
                    down: pack(&e.down)?,
                }),
            };
            Ok(Block { norm, mixer })
        };
        let blocks = spec
            .blocks
            .iter()
            .map(&mut block)
            .collect::<Result<_, E>>()?;
        Ok(Layer { index, blocks })
    }

    /// Bytes of its weights that one token reads, `bytes` of each weight: of experts, only the
    /// chosen ones.
    pub fn bytes_per_token(&self, c: &ModelConfig, bytes: impl Fn(&L) -> usize) -> usize {
        let (count, routed) = c.experts.map_or((1, 1), |e| (e.count, e.per_token));
        let of = |block: &Block<L, N>| -> usize {
            let all: usize = block.mixer.linears().into_iter().map(&bytes).sum();
            match &block.mixer {
                Mix::Experts(e) => bytes(&e.router.linear) + all / count * routed,
                Mix::Attention(_) | Mix::Mlp(_) => all,
            }
        };
        self.blocks.iter().map(of).sum()
    }

    /// Its weights in the order they run, without the router's.
    pub fn linears(&self) -> impl Iterator<Item = &L> {
        self.blocks.iter().flat_map(|b| b.mixer.linears())
    }

    /// The weight that scores its experts, if it has any.
    pub fn router(&self) -> Option<&L> {
        self.blocks.iter().find_map(|b| match &b.mixer {
            Mix::Experts(experts) => Some(&experts.router.linear),
            Mix::Attention(_) | Mix::Mlp(_) => None,
        })
    }

    /// Its vectors: the gains of the residual stream's norms, then those of heads and biases.
    pub fn vectors(&self) -> impl Iterator<Item = &N> {
        let stream = self.blocks.iter().map(|b| &b.norm);
        let within = self.blocks.iter().filter_map(|b| match &b.mixer {
            Mix::Attention(a) => Some(&a.heads),
            Mix::Mlp(_) | Mix::Experts(_) => None,
        });
        stream.chain(within.flat_map(|h| h.norms.iter().flatten().chain(&h.biases)))
    }

    /// [`Layer::linears`] and [`Layer::vectors`], mutable.
    pub fn parts_mut(&mut self) -> (Vec<&mut L>, Vec<&mut N>) {
        let (mut linears, mut stream, mut within) = (Vec::new(), Vec::new(), Vec::new());
        for Block { norm, mixer } in &mut self.blocks {
            stream.push(norm);
            if let Mix::Attention(a) = mixer {
                // Its vectors and its weights are borrowed apart.
                let HeadVectors { biases, norms } = &mut a.heads;
                within.extend(norms.iter_mut().flatten().chain(biases));
                linears.extend([&mut a.qkv.linear, &mut a.o.linear]);
            } else {
                linears.extend(mixer.linears_mut());
            }
        }
        stream.extend(within);
        (linears, stream)
    }

    /// Runs the layer over the rows of a pass.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn run<O: Ops<Linear = L, Vector = N>>(&self, ops: &mut O) -> Result<(), O::Error> {
        let layer = self.index;
        for Block { norm, mixer } in &self.blocks {
            match mixer {
                Mix::Attention(a) => {
                    ops.project(layer, norm, &a.qkv, Projection::Qkv)?;
                    ops.attend(layer, &a.heads, &a.o)?;
                    ops.add(layer, Operand::Attended, &a.o)?;
                }
                Mix::Mlp(m) => {
                    ops.project(layer, norm, &m.gate_up, Projection::Gated)?;
                    ops.add(layer, Operand::Gated, &m.down)?;
                }
                Mix::Experts(experts) => ops.add_experts(layer, norm, experts)?,
            }
        }
        ops.end_layer(layer)
    }
}
