//! The forward of a layer, written once: which operations it is made of, in their order. A device
//! runs them its own way, over its own buffers, and may queue or record them.

use crate::error::Result;
use nq_formats::models::{LayerSpec, MlpSpec, NormKind, Product};

/// A layer's weights as a device keeps them: products as `L`, gains of norms as `N`.
pub(crate) struct Layer<L, N> {
    pub(crate) index: usize,
    pub(crate) attention: Attention<L, N>,
    pub(crate) mlp: Mlp<L, N>,
}

pub(crate) struct Attention<L, N> {
    pub(crate) norm: N,        // [hidden]
    pub(crate) qkv: Packed<L>, // [q_dim + 2 kv_dim, hidden]
    pub(crate) q_norm: N,      // [head_dim]
    pub(crate) k_norm: N,      // [head_dim]
    pub(crate) o: Packed<L>,   // [hidden, q_dim]
}

/// What follows attention.
pub(crate) enum Mlp<L, N> {
    SwiGlu {
        norm: N,            // [hidden]
        gate_up: Packed<L>, // [2 intermediate, hidden]
        down: Packed<L>,    // [hidden, intermediate]
    },
}

/// A product of the architecture's table, and its weight on a device.
pub(crate) struct Packed<L> {
    pub(crate) spec: &'static Product,
    pub(crate) linear: L,
}

/// Where [`Ops::project`] puts a product of the normalized residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Projection {
    /// Queries, keys and values, which [`Ops::attend`] takes.
    Qkv,
    /// `silu(gate) * up`, which is [`Operand::Gated`].
    Gated,
}

/// What [`Ops::add`] multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    /// What attention yields.
    Attended,
    /// What [`Projection::Gated`] left.
    Gated,
}

/// The operations of a layer over the rows of a pass, which has their residual stream `x`.
pub(crate) trait Ops {
    type Linear;
    type Gains;
    type Error;

    /// `norm(x) w^T`.
    fn project(
        &mut self,
        layer: usize,
        norm: &Self::Gains,
        w: &Packed<Self::Linear>,
        to: Projection,
    ) -> Result<(), Self::Error>;

    /// Normalizes and rotates queries and keys, appends keys and values to the rows' sequences, and
    /// attends, each row to the positions up to its own.
    fn attend(
        &mut self,
        layer: usize,
        attention: &Attention<Self::Linear, Self::Gains>,
    ) -> Result<(), Self::Error>;

    /// `x += operand w^T`.
    fn add(
        &mut self,
        layer: usize,
        operand: Operand,
        w: &Packed<Self::Linear>,
    ) -> Result<(), Self::Error>;

    /// Hears that `x` is the layer's output.
    fn end_layer(&mut self, layer: usize) -> Result<(), Self::Error> {
        let _ = layer;
        Ok(())
    }
}

impl<L, N> Layer<L, N> {
    /// Layer `index`, as `spec` says: its products are `linear`'s, its norms `norm`'s.
    pub(crate) fn new(
        index: usize,
        spec: &'static LayerSpec,
        mut linear: impl FnMut(&'static Product) -> Result<L>,
        mut norm: impl FnMut(NormKind) -> Result<N>,
    ) -> Result<Self> {
        let mut pack = |spec: &'static Product| -> Result<Packed<L>> {
            let linear = linear(spec)?;
            Ok(Packed { spec, linear })
        };
        let attention = Attention {
            norm: norm(NormKind::Attention)?,
            qkv: pack(&spec.attention.qkv)?,
            q_norm: norm(NormKind::Q)?,
            k_norm: norm(NormKind::K)?,
            o: pack(&spec.attention.o)?,
        };
        let mlp = match &spec.mlp {
            MlpSpec::SwiGlu { gate_up, down, .. } => Mlp::SwiGlu {
                norm: norm(NormKind::Mlp)?,
                gate_up: pack(gate_up)?,
                down: pack(down)?,
            },
        };
        Ok(Layer {
            index,
            attention,
            mlp,
        })
    }

    /// Its products.
    pub(crate) fn linears(&self) -> impl Iterator<Item = &L> {
        let Mlp::SwiGlu { gate_up, down, .. } = &self.mlp;
        let a = &self.attention;
        [&a.qkv, &a.o, gate_up, down].into_iter().map(|p| &p.linear)
    }

    /// Gains of its norms.
    pub(crate) fn norms(&self) -> impl Iterator<Item = &N> {
        let Mlp::SwiGlu { norm, .. } = &self.mlp;
        let a = &self.attention;
        [&a.norm, &a.q_norm, &a.k_norm, norm].into_iter()
    }

    /// Runs the layer over the rows of a pass.
    pub(crate) fn run<O: Ops<Linear = L, Gains = N>>(&self, ops: &mut O) -> Result<(), O::Error> {
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
        }
        ops.end_layer(layer)
    }
}
