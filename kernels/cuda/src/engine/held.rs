//! Which weights of a layer are on a GPU, and in which matrices.

use super::host_experts::is_of_experts;
use crate::pack::SPAN;
use crate::{Buffer, DeviceLinear, MOST_EXPERTS, Stack};
use nq_kernels::registry::WeightKind;
use nq_model::forward::Layer;
use nq_model::{Experts, LayerSpec, LinearKind, ModelConfig, Product};
use nq_runtime::stacks::{self, StackedLinear, Stacks};

/// Most experts in a stack: the shared one stands behind those that are chosen among.
const MOST_STACKED: usize = MOST_EXPERTS + 1;

/// The weights of a layer; gate and up are interleaved.
pub(super) type CudaLayer = Layer<DeviceLinear, Buffer<f32>>;

/// Which weights of a layer are on the device, and in which matrices.
pub(super) struct HeldLayer {
    spec: &'static LayerSpec,
    stacks: Stacks,
    /// The experts are in the computer's memory.
    experts_on_host: bool,
    /// Experts in trellis codes, or in those of EXL3, are held as FP16.
    plain_experts: bool,
}

impl HeldLayer {
    /// It follows from the shape `c` and the kinds of the layer's weights, so that plans and models decide alike.
    pub(super) fn new(
        c: &ModelConfig,
        spec: &'static LayerSpec,
        experts_on_host: bool,
        kind: impl Fn(LinearKind) -> WeightKind,
    ) -> Self {
        // They are read in whole strips and spans.
        let whole = |e: Experts| {
            [e.width, c.hidden_size]
                .iter()
                .all(|n| n.is_multiple_of(SPAN))
        };
        HeldLayer {
            plain_experts: !c.experts.is_some_and(whole),
            spec,
            stacks: match experts_on_host {
                true => Stacks::apart(spec),
                false => Stacks::with_shared(c, spec, MOST_STACKED, kind),
            },
            experts_on_host,
        }
    }

    /// The parts of the matrix of `product`; none if it has none here.
    pub(super) fn parts(&self, product: &'static Product) -> Vec<StackedLinear> {
        match self.experts_on_host && is_of_experts(self.spec, product) {
            true => Vec::new(),
            false => self.stacks.of_product(product),
        }
    }

    /// True for products whose kernels do not read the trellis codes that their weights are in.
    pub(super) fn is_plain(&self, product: &Product) -> bool {
        self.plain_experts && is_of_experts(self.spec, product)
    }

    /// True if the shared expert stands behind the others.
    pub(super) fn has_shared(&self) -> bool {
        self.stacks.have_shared()
    }

    /// True if a shared expert has products of its own beside experts on the device.
    pub(super) fn runs_shared_apart(&self) -> bool {
        let shared = self.spec.experts().and_then(|(_, e)| e.shared.as_ref());
        shared.is_some() && !self.experts_on_host && !self.has_shared()
    }

    /// The Linears that score the experts, if these and the shared expert, if there is one, are one mixture here.
    pub(super) fn router(&self) -> Option<StackedLinear> {
        let (_, experts) = self.spec.experts()?;
        let whole = !self.experts_on_host && !self.runs_shared_apart();
        let stack = whole.then(|| self.stacks.of_product(&experts.router));
        stack?.into_iter().next()
    }
}

/// How the outputs of a product's Linears are laid out: interleaved if an epilogue takes them in
/// pairs.
pub(super) fn stack(product: &Product) -> Stack {
    match product.linears[0].kind {
        LinearKind::Gate | LinearKind::SharedGate => Stack::Interleave,
        _ => Stack::Concat,
    }
}

/// The largest mixture that [`mixture`] gives.
pub(super) fn largest_mixture(shape: &Experts) -> Experts {
    stacks::largest_mixture(shape, MOST_STACKED)
}
