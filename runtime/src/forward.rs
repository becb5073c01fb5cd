//! The forward of a layer, written once: its operations in their order. Each device
//! runs them its own way, over its own buffers, and may queue or record them.

use nq_formats::ModelConfig;
use nq_formats::models::{LayerSpec, MlpSpec, NormSpec, Product};

/// A layer's weights as a device holds them: matrices as `L`, gains of norms as `N`.
pub struct Layer<L, N> {
    /// Its number, from 0.
    pub index: usize,
    /// The first half: attention.
    pub attention: Attention<L, N>,
    /// The second half: the MLP or the experts.
    pub mlp: Mlp<L, N>,
}

/// A layer's first half.
pub struct Attention<L, N> {
    /// `[hidden]`
    pub norm: N,
    /// `[q_dim + 2 kv_dim, hidden]`
    pub qkv: Packed<L>,
    /// `[head_dim]`
    pub q_norm: N,
    /// `[head_dim]`
    pub k_norm: N,
    /// `[hidden, q_dim]`
    pub o: Packed<L>,
}

/// A layer's second half.
pub enum Mlp<L, N> {
    /// See [`MlpSpec::SwiGlu`].
    SwiGlu {
        /// `[hidden]`
        norm: N,
        /// `[2 intermediate, hidden]`
        gate_up: Packed<L>,
        /// `[hidden, intermediate]`
        down: Packed<L>,
    },
    /// See [`MlpSpec::Experts`].
    Experts(Experts<L, N>),
}

/// A mixture of experts.
pub struct Experts<L, N> {
    /// `[hidden]`
    pub norm: N,
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
    /// Type of a norm's gains.
    type Gains;
    /// Type of the device's errors.
    type Error;

    /// Computes `norm(x) w^T`.
    fn project(
        &mut self,
        layer: usize,
        norm: &Self::Gains,
        w: &Packed<Self::Linear>,
        to: Projection,
    ) -> Result<(), Self::Error>;

    /// Normalizes and rotates queries and keys, appends keys and values to the rows' sequences, and
    /// lets each row attend to the positions up to its own.
    fn attend(
        &mut self,
        layer: usize,
        attention: &Attention<Self::Linear, Self::Gains>,
    ) -> Result<(), Self::Error>;

    /// Computes `x += operand w^T`.
    fn add(
        &mut self,
        layer: usize,
        operand: Operand,
        w: &Packed<Self::Linear>,
    ) -> Result<(), Self::Error>;

    /// Adds the mixture of `experts` to `x`.
    fn add_experts(
        &mut self,
        layer: usize,
        experts: &Experts<Self::Linear, Self::Gains>,
    ) -> Result<(), Self::Error>;

    /// Called when `x` is the layer's output.
    fn end_layer(&mut self, layer: usize) -> Result<(), Self::Error> {
        let _ = layer;
        Ok(())
    }
}

impl<L, N> Layer<L, N> {
    /// Builds layer `index` as described by `spec`: weights from `linear`, gains from `norm`.
    ///
    /// # Errors
    /// The first error that either returns.
    pub fn new<E>(
        index: usize,
        spec: &'static LayerSpec,
        mut linear: impl FnMut(&'static Product) -> Result<L, E>,
        mut norm: impl FnMut(&'static NormSpec) -> Result<N, E>,
    ) -> Result<Self, E> {
        let mut pack = |spec: &'static Product| -> Result<Packed<L>, E> {
            let linear = linear(spec)?;
            Ok(Packed { spec, linear })
        };
        let a = &spec.attention;
        let attention = Attention {
            norm: norm(&a.norm)?,
            qkv: pack(&a.qkv)?,
            q_norm: norm(&a.q_norm)?,
            k_norm: norm(&a.k_norm)?,
            o: pack(&a.o)?,
        };
        let mlp = match &spec.mlp {
            MlpSpec::SwiGlu {
                norm: gains,
                gate_up,
                down,
            } => Mlp::SwiGlu {
                norm: norm(gains)?,
                gate_up: pack(gate_up)?,
                down: pack(down)?,
            },
            MlpSpec::Experts {
                norm: gains,
                router,
                gate_up,
                down,
            } => Mlp::Experts(Experts {
                norm: norm(gains)?,
                router: pack(router)?,
                gate_up: pack(gate_up)?,
                down: pack(down)?,
            }),
        };
        Ok(Layer {
            index,
            attention,
            mlp,
        })
    }

    /// Bytes of its weights that one token reads, `bytes` of each weight: of experts, only the
    /// chosen ones.
    pub fn bytes_per_token(&self, c: &ModelConfig, bytes: impl Fn(&L) -> usize) -> usize {
        let all: usize = self.linears().chain(self.router()).map(&bytes).sum();
        let Mlp::Experts(Experts { gate_up, down, .. }) = &self.mlp else {
            return all;
        };
        let stacks = bytes(&gate_up.linear) + bytes(&down.linear);
        let (count, routed) = c.experts.map_or((1, 1), |e| (e.count, e.per_token));
        all - stacks + stacks / count * routed
    }

    /// Its weights in the order they run, without the router's.
    pub fn linears(&self) -> impl Iterator<Item = &L> {
        let (Mlp::SwiGlu { gate_up, down, .. } | Mlp::Experts(Experts { gate_up, down, .. })) =
            &self.mlp;
        let a = &self.attention;
        [&a.qkv, &a.o, gate_up, down].into_iter().map(|p| &p.linear)
    }

    /// The weight that scores its experts, if it has any.
    pub fn router(&self) -> Option<&L> {
        match &self.mlp {
            Mlp::SwiGlu { .. } => None,
            Mlp::Experts(experts) => Some(&experts.router.linear),
        }
    }

    /// Gains of its norms, in the order of the architecture's table.
    pub fn norms(&self) -> impl Iterator<Item = &N> {
        let (Mlp::SwiGlu { norm, .. } | Mlp::Experts(Experts { norm, .. })) = &self.mlp;
        let a = &self.attention;
        [&a.norm, norm, &a.q_norm, &a.k_norm].into_iter()
    }

    /// [`Layer::linears`] and [`Layer::norms`], mutable.
    pub fn parts_mut(&mut self) -> (impl Iterator<Item = &mut L>, impl Iterator<Item = &mut N>) {
        let (Mlp::SwiGlu {
            norm,
            gate_up,
            down,
        }
        | Mlp::Experts(Experts {
            norm,
            gate_up,
            down,
            ..
        })) = &mut self.mlp;
        let a = &mut self.attention;
        let linears = [&mut a.qkv, &mut a.o, gate_up, down].into_iter();
        let norms = [&mut a.norm, norm, &mut a.q_norm, &mut a.k_norm];
        (linears.map(|p| &mut p.linear), norms.into_iter())
    }

    /// Runs the layer over the rows of a pass.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn run<O: Ops<Linear = L, Gains = N>>(&self, ops: &mut O) -> Result<(), O::Error> {
        let (layer, attention) = (self.index, &self.attention);
        ops.project(layer, &attention.norm, &attention.qkv, Projection::Qkv)?;
        ops.attend(layer, attention)?;
        ops.add(layer, Operand::Attended, &attention.o)?;
        match &self.mlp {
            Mlp::SwiGlu {
                norm,
                gate_up,
                down,
            } => {
                ops.project(layer, norm, gate_up, Projection::Gated)?;
                ops.add(layer, Operand::Gated, down)?;
            }
            Mlp::Experts(experts) => ops.add_experts(layer, experts)?,
        }
        ops.end_layer(layer)
    }
}
