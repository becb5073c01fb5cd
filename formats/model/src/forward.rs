//! The forward of a layer, written once: its blocks' operations in their order. Each device
//! runs them its own way, over its own buffers, and may queue or record them.

use crate::{AttentionSpec, BlockSpec, DeltaSpec, LayerSpec, Mixer, MlpSpec, ModelConfig, Product};

pub use crate::packed::{Packed, VectorSpec};
pub use crate::streams::{Hyper, Indexer, Ngrams, StreamVerbs};

/// A layer's weights as a device holds them: matrices as `L`, vectors (gains of norms, biases) as `N`.
pub struct Layer<L, N> {
    /// Its number, from 0.
    pub index: usize,
    /// Its blocks, in running order.
    pub blocks: Vec<Block<L, N>>,
}

/// A step of a layer: `x += mixer(norm(x))`.
pub struct Block<L, N> {
    /// Gains of the norm, `[hidden]`; in a residual of several streams `[streams, hidden]`.
    pub norm: N,
    /// How it reads and adds to several streams; `None` if there is one, or if the mixer sees all.
    pub hyper: Option<Hyper<L>>,
    /// What is added.
    pub mixer: Mix<L, N>,
}

/// The weights of a block's [`Mixer`].
pub enum Mix<L, N> {
    /// See [`Mixer::Attention`].
    Attention(Attention<L, N>),
    /// See [`Mixer::Delta`].
    Delta(Delta<L, N>),
    /// See [`Mixer::Mlp`].
    Mlp(Mlp<L>),
    /// See [`Mixer::Experts`].
    Experts(Experts<L>),
    /// See [`Mixer::Ngrams`].
    Ngrams(Ngrams<L, N>),
}

/// Attention.
pub struct Attention<L, N> {
    /// `[q_dim + 2 kv_dim, hidden]`, or with gates `[2 q_dim + 2 kv_dim, hidden]`.
    pub qkv: Packed<L>,
    /// What happens to queries, keys and values before they are attended to.
    pub heads: HeadVectors<N>,
    /// What chooses the positions that are attended to; `None`: all are.
    pub indexer: Option<Indexer<L, N>>,
    /// `[hidden, q_dim]`
    pub o: Packed<L>,
}

/// The vectors that prepare queries, keys and values: biases are added, then heads are normalized.
pub struct HeadVectors<N> {
    /// Biases of the queries `[q_dim]`, the keys and the values `[kv_dim]`; empty if they have none.
    pub biases: Vec<N>,
    /// Gains of the norms of a head of the queries and of the keys, `[head_dim]`, if they are normalized.
    pub norms: Option<[N; 2]>,
    /// True if gates stand behind each head's queries: what a head attended to is multiplied by their
    /// sigmoid.
    pub gated: bool,
}

/// A gated DeltaNet.
pub struct Delta<L, N> {
    /// Queries, keys, values and gates: `[channels + values, hidden]`.
    pub inputs: Packed<L>,
    /// `b` and `a`: `[2 value_heads, hidden]`.
    pub rates: Packed<L>,
    /// Its vectors.
    pub vectors: DeltaParameters<N>,
    /// `[hidden, values]`
    pub out: Packed<L>,
}

/// The vectors of a [`Delta`].
pub struct DeltaParameters<N> {
    /// The convolution's weights, `[channels, width]`.
    pub conv: N,
    /// Logarithms of rates of decay, `[value_heads]`.
    pub decay: N,
    /// Biases of `a`, `[value_heads]`.
    pub dt_bias: N,
    /// Gains of the norm of a head's output, `[value_dim]`.
    pub norm: N,
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
    /// The expert of all rows, if there is one.
    pub shared: Option<Shared<L>>,
}

/// An expert that every row goes through.
pub struct Shared<L> {
    /// `[1, hidden]`
    pub score: Packed<L>,
    /// The expert.
    pub mlp: Mlp<L>,
}

/// Destination of [`Verbs::project`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    /// Queries, keys and values, the input of [`Verbs::attend`]; or what [`Verbs::recur`] mixes.
    Mixer,
    /// `b` and `a` of a recurrence.
    Rates,
    /// Scores of experts.
    Scores,
    /// The score of the expert of all rows.
    SharedScore,
    /// `silu(gate) * up`, later used as [`Operand::Gated`].
    Gated,
}

/// Left operand of [`Verbs::add`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// The output of attention, or of a recurrence.
    Attended,
    /// The output of [`Projection::Gated`].
    Gated,
}

/// The operations of which a layer's blocks are made, over the rows of a pass, which holds their residual stream `x`.
///
/// # Errors
/// Every operation returns errors of the device.
pub trait Verbs {
    /// Type of a product's weight.
    type Linear;
    /// Type of a vector: a norm's gains, a bias.
    type Vector;
    /// Type of the device's errors.
    type Error;

    /// Begins a block, which adds to `x`: normalizes `x` with gains `norm` for the projections that follow, unless they
    /// do so themselves.
    fn norm(&mut self, norm: &Self::Vector) -> Result<(), Self::Error>;

    /// The operations of a residual of several streams.
    #[expect(clippy::type_complexity, reason = "the types of these operations")]
    fn streams(
        &mut self,
    ) -> Result<&mut dyn StreamVerbs<Self::Linear, Self::Vector, Self::Error>, Self::Error>;

    /// Computes `norm(x) w^T`, behind [`Verbs::norm`] with the same gains.
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

    /// Brings the states of the rows' sequences forward, and reads them.
    fn recur(
        &mut self,
        layer: usize,
        norm: &Self::Vector,
        delta: &Delta<Self::Linear, Self::Vector>,
    ) -> Result<(), Self::Error>;

    /// Adds the experts that the scores choose to `x`.
    fn mix(
        &mut self,
        layer: usize,
        norm: &Self::Vector,
        experts: &Experts<Self::Linear>,
    ) -> Result<(), Self::Error>;

    /// Multiplies what the expert of all rows has gated by the sigmoid of its score.
    fn weigh(&mut self, shared: &Shared<Self::Linear>) -> Result<(), Self::Error>;

    /// Computes `x += operand w^T`.
    fn add(
        &mut self,
        layer: usize,
        operand: Operand,
        w: &Packed<Self::Linear>,
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
            gated: spec.gated,
        })
    }
}

impl<N> DeltaParameters<N> {
    fn new<E>(
        spec: &'static DeltaSpec,
        mut vector: impl FnMut(VectorSpec) -> Result<N, E>,
    ) -> Result<Self, E> {
        Ok(DeltaParameters {
            conv: vector(VectorSpec::Row(&spec.conv))?,
            decay: vector(VectorSpec::Row(&spec.decay))?,
            dt_bias: vector(VectorSpec::Row(&spec.dt_bias))?,
            norm: vector(VectorSpec::Norm(&spec.norm))?,
        })
    }

    fn all(&self) -> [&N; 4] {
        [&self.conv, &self.decay, &self.dt_bias, &self.norm]
    }
}

impl<L> Mlp<L> {
    fn new<E>(
        spec: &'static MlpSpec,
        mut pack: impl FnMut(&'static Product) -> Result<Packed<L>, E>,
    ) -> Result<Self, E> {
        Ok(Mlp {
            gate_up: pack(&spec.gate_up)?,
            down: pack(&spec.down)?,
        })
    }
}

impl<L, N> Mix<L, N> {
    /// Its weights that can be quantized, in the order they run.
    fn linears(&self) -> Vec<&L> {
        let packed = match self {
            Mix::Attention(a) => vec![&a.qkv, &a.o],
            Mix::Delta(d) => vec![&d.inputs, &d.out],
            Mix::Mlp(m) => vec![&m.gate_up, &m.down],
            Mix::Experts(e) => {
                let shared = e.shared.iter().flat_map(|s| [&s.mlp.gate_up, &s.mlp.down]);
                [&e.gate_up, &e.down].into_iter().chain(shared).collect()
            }
            Mix::Ngrams(_) => Vec::new(),
        };
        packed.into_iter().map(|p| &p.linear).collect()
    }

    /// Its other weights.
    fn kept(&self) -> Vec<&L> {
        let packed = match self {
            Mix::Delta(d) => vec![&d.rates],
            Mix::Experts(e) => {
                let shared = e.shared.iter().map(|s| &s.score);
                [&e.router].into_iter().chain(shared).collect()
            }
            Mix::Attention(a) => a.indexer.iter().map(|i| &i.qk).collect(),
            Mix::Ngrams(n) => vec![&n.key, &n.value],
            Mix::Mlp(_) => Vec::new(),
        };
        packed.into_iter().map(|p| &p.linear).collect()
    }

    /// Its vectors.
    fn vectors(&self) -> Vec<&N> {
        match self {
            Mix::Attention(a) => a
                .heads
                .norms
                .iter()
                .flatten()
                .chain(&a.heads.biases)
                .chain(a.indexer.iter().flat_map(|i| &i.norms))
                .collect(),
            Mix::Ngrams(n) => vec![&n.key_norm, &n.conv_norm, &n.conv],
            Mix::Delta(d) => d.vectors.all().to_vec(),
            Mix::Mlp(_) | Mix::Experts(_) => Vec::new(),
        }
    }

    /// [`Mix::linears`] and [`Mix::vectors`], mutable.
    fn parts_mut(&mut self) -> (Vec<&mut L>, Vec<&mut N>) {
        match self {
            Mix::Attention(a) => (
                vec![&mut a.qkv.linear, &mut a.o.linear],
                (a.heads.norms.iter_mut().flatten())
                    .chain(&mut a.heads.biases)
                    .chain(a.indexer.iter_mut().flat_map(|i| &mut i.norms))
                    .collect(),
            ),
            Mix::Delta(d) => {
                let v = &mut d.vectors;
                (
                    vec![&mut d.inputs.linear, &mut d.out.linear],
                    vec![&mut v.conv, &mut v.decay, &mut v.dt_bias, &mut v.norm],
                )
            }
            Mix::Mlp(m) => (vec![&mut m.gate_up.linear, &mut m.down.linear], Vec::new()),
            Mix::Experts(e) => {
                let mut linears = vec![&mut e.gate_up.linear, &mut e.down.linear];
                if let Some(shared) = &mut e.shared {
                    linears.extend([&mut shared.mlp.gate_up.linear, &mut shared.mlp.down.linear]);
                }
                (linears, Vec::new())
            }
            Mix::Ngrams(n) => (
                Vec::new(),
                vec![&mut n.key_norm, &mut n.conv_norm, &mut n.conv],
            ),
        }
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
        let mut block = |spec: &'static BlockSpec| -> Result<_, E> {
            let norm = vector(VectorSpec::Norm(&spec.norm))?;
            let hyper = match &spec.hyper {
                None => None,
                Some(hyper) => Some(Hyper::new(hyper, &mut pack)?),
            };
            let mixer = match &spec.mixer {
                Mixer::Attention(a) => Mix::Attention(Attention {
                    qkv: pack(&a.qkv)?,
                    heads: HeadVectors::new(a, &mut vector)?,
                    indexer: match &a.indexer {
                        None => None,
                        Some(indexer) => Some(Indexer::new(indexer, &mut pack, &mut vector)?),
                    },
                    o: pack(&a.o)?,
                }),
                Mixer::Delta(d) => Mix::Delta(Delta {
                    inputs: pack(&d.inputs)?,
                    rates: pack(&d.rates)?,
                    vectors: DeltaParameters::new(d, &mut vector)?,
                    out: pack(&d.out)?,
                }),
                Mixer::Mlp(m) => Mix::Mlp(Mlp::new(m, &mut pack)?),
                Mixer::Experts(e) => Mix::Experts(Experts {
                    router: pack(&e.router)?,
                    gate_up: pack(&e.gate_up)?,
                    down: pack(&e.down)?,
                    shared: match &e.shared {
                        None => None,
                        Some(shared) => Some(Shared {
                            score: pack(&shared.score)?,
                            mlp: Mlp::new(&shared.mlp, &mut pack)?,
                        }),
                    },
                }),
                Mixer::Ngrams(n) => Mix::Ngrams(Ngrams::new(n, &mut pack, &mut vector)?),
            };
            Ok(Block { norm, hyper, mixer })
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
        let shares = c.experts.is_some_and(|e| e.shared > 0);
        let block_bytes = |block: &Block<L, N>| -> usize {
            let sum = |linears: Vec<&L>| linears.into_iter().map(&bytes).sum::<usize>();
            let hyper = block.hyper.iter().flat_map(Hyper::linears).collect();
            let all = sum(hyper) + sum(block.mixer.linears()) + sum(block.mixer.kept());
            match &block.mixer {
                Mix::Experts(e) => {
                    let stacks = bytes(&e.gate_up.linear) + bytes(&e.down.linear);
                    // A device may have the shared expert behind the others.
                    let own = usize::from(shares && e.shared.is_none());
                    all - stacks + stacks / (count + own) * (routed + own)
                }
                Mix::Attention(_) | Mix::Delta(_) | Mix::Mlp(_) | Mix::Ngrams(_) => all,
            }
        };
        self.blocks.iter().map(block_bytes).sum()
    }

    /// Its weights that can be quantized, in the order they run.
    pub fn linears(&self) -> impl Iterator<Item = &L> {
        self.blocks.iter().flat_map(|b| b.mixer.linears())
    }

    /// Its other weights: those that score experts, and the like.
    pub fn kept(&self) -> impl Iterator<Item = &L> {
        self.blocks.iter().flat_map(|b| {
            let hyper = b.hyper.iter().flat_map(Hyper::linears);
            hyper.chain(b.mixer.kept())
        })
    }

    /// Its vectors: the gains of the residual stream's norms, then those within mixers.
    pub fn vectors(&self) -> impl Iterator<Item = &N> {
        let stream = self.blocks.iter().map(|b| &b.norm);
        stream.chain(self.blocks.iter().flat_map(|b| b.mixer.vectors()))
    }

    /// [`Layer::linears`] and [`Layer::vectors`], mutable.
    pub fn parts_mut(&mut self) -> (Vec<&mut L>, Vec<&mut N>) {
        let (mut linears, mut stream, mut within) = (Vec::new(), Vec::new(), Vec::new());
        for Block { norm, mixer, .. } in &mut self.blocks {
            stream.push(norm);
            let (weights, vectors) = mixer.parts_mut();
            linears.extend(weights);
            within.extend(vectors);
        }
        stream.extend(within);
        (linears, stream)
    }

    /// Its attention, with the norm before it.
    ///
    /// # Panics
    /// For a layer that does not begin with attention.
    pub fn attention(&self) -> (&N, &Attention<L, N>) {
        match &self.blocks[0] {
            Block {
                norm,
                mixer: Mix::Attention(attention),
                ..
            } => (norm, attention),
            Block {
                mixer: Mix::Delta(_) | Mix::Mlp(_) | Mix::Experts(_) | Mix::Ngrams(_),
                ..
            } => unreachable!("layers that draft begin with attention"),
        }
    }

    /// Its recurrence, if it has one.
    pub fn recurrence(&self) -> Option<&Delta<L, N>> {
        self.blocks.iter().find_map(|b| match &b.mixer {
            Mix::Delta(delta) => Some(delta),
            Mix::Attention(_) | Mix::Mlp(_) | Mix::Experts(_) | Mix::Ngrams(_) => None,
        })
    }

    /// Its experts, if it has some.
    pub fn experts(&self) -> Option<&Experts<L>> {
        self.blocks.iter().find_map(|b| match &b.mixer {
            Mix::Experts(experts) => Some(experts),
            Mix::Attention(_) | Mix::Delta(_) | Mix::Mlp(_) | Mix::Ngrams(_) => None,
        })
    }

    /// What it makes of a table of n-grams, if it has one.
    pub fn ngrams(&self) -> Option<&Ngrams<L, N>> {
        self.blocks.iter().find_map(|b| match &b.mixer {
            Mix::Ngrams(ngrams) => Some(ngrams),
            Mix::Attention(_) | Mix::Delta(_) | Mix::Mlp(_) | Mix::Experts(_) => None,
        })
    }

    /// Drops the shared expert, which a device has behind the others.
    pub fn drop_shared_expert(&mut self) {
        for block in &mut self.blocks {
            match &mut block.mixer {
                Mix::Experts(experts) => experts.shared = None,
                Mix::Attention(_) | Mix::Delta(_) | Mix::Mlp(_) | Mix::Ngrams(_) => {}
            }
        }
    }

    /// Runs the layer over the rows of a pass.
    pub fn run<V: Verbs<Linear = L, Vector = N>>(&self, pass: &mut V) -> Result<(), V::Error> {
        let layer = self.index;
        for Block { norm, hyper, mixer } in &self.blocks {
            match hyper {
                None => pass.norm(norm)?,
                Some(hyper) => pass.streams()?.contract(layer, norm, hyper)?,
            }
            match mixer {
                Mix::Attention(attention) => {
                    pass.project(layer, norm, &attention.qkv, Projection::Mixer)?;
                    if let Some(indexer) = &attention.indexer {
                        pass.streams()?.select(layer, indexer)?;
                    }
                    pass.attend(layer, &attention.heads, &attention.o)?;
                    pass.add(layer, Operand::Attended, &attention.o)?;
                }
                Mix::Delta(delta) => {
                    pass.project(layer, norm, &delta.rates, Projection::Rates)?;
                    pass.project(layer, norm, &delta.inputs, Projection::Mixer)?;
                    pass.recur(layer, norm, delta)?;
                    pass.add(layer, Operand::Attended, &delta.out)?;
                }
                Mix::Mlp(mlp) => {
                    pass.project(layer, norm, &mlp.gate_up, Projection::Gated)?;
                    pass.add(layer, Operand::Gated, &mlp.down)?;
                }
                Mix::Experts(experts) => mix_experts(layer, norm, experts, pass)?,
                Mix::Ngrams(ngrams) => pass.streams()?.recall(layer, ngrams)?,
            }
            if hyper.is_some() {
                pass.streams()?.inject()?;
            }
        }
        pass.end_layer(layer)
    }
}

/// Runs a mixture of experts.
fn mix_experts<V: Verbs>(
    layer: usize,
    norm: &V::Vector,
    experts: &Experts<V::Linear>,
    pass: &mut V,
) -> Result<(), V::Error> {
    pass.project(layer, norm, &experts.router, Projection::Scores)?;
    // The shared expert reads the residual stream before the others add to it.
    if let Some(shared) = &experts.shared {
        pass.project(layer, norm, &shared.score, Projection::SharedScore)?;
        pass.project(layer, norm, &shared.mlp.gate_up, Projection::Gated)?;
        pass.weigh(shared)?;
    }
    pass.mix(layer, norm, experts)?;
    match &experts.shared {
        Some(shared) => pass.add(layer, Operand::Gated, &shared.mlp.down),
        None => Ok(()),
    }
}
