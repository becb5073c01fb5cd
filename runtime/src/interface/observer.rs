//! Looking on while a forward computes.

use nq_kernels::Routes;
use nq_model::Product;

/// Receives activations as a forward computes them. All methods do nothing by default.
pub trait Observer {
    /// False if [`Observer::linear_input`] and [`Observer::expert_input`] do nothing: the device then
    /// need not copy inputs to the host, nor compute the inputs of experts that rows are not routed
    /// to.
    fn wants_inputs(&self) -> bool {
        true
    }

    /// False if nobody reads what a layer makes of the stream that
    /// [`LayerStepper::observe`](crate::LayerStepper::observe) shows: the device may then leave out the layer's last
    /// product.
    fn wants_output(&self) -> bool {
        true
    }

    /// The input `x` `[rows, in]` that the Linears of `product` in `layer` share, before any rounding
    /// of activations.
    fn linear_input(&mut self, layer: usize, product: &Product, x: &[f32]) {
        let _ = (layer, product, x);
    }

    /// The input `x` `[rows, in]` of the Linears of `product` of one expert in `layer`, for every row,
    /// whether it is routed to this expert or not.
    fn expert_input(&mut self, layer: usize, product: &Product, expert: usize, x: &[f32]) {
        let _ = (layer, product, expert, x);
    }

    /// The experts of `layer` that each row is routed to.
    fn routed(&mut self, layer: usize, routes: &Routes) {
        let _ = (layer, routes);
    }

    /// Another `rows` rows have gone through a layer whose input statistics the device sums itself
    /// ([`LayerStepper::moments`](crate::LayerStepper::moments)).
    fn rows(&mut self, rows: usize) {
        let _ = rows;
    }

    /// The residual stream `x` `[rows, hidden]` after `layer`.
    fn layer_output(&mut self, layer: usize, x: &[f32]) {
        let _ = (layer, x);
    }

    /// The normalized input `x` `[rows, hidden]` of the head, for the rows whose logits are
    /// wanted.
    fn head_input(&mut self, x: &[f32]) {
        let _ = x;
    }
}

/// Ignores everything.
impl Observer for () {
    fn wants_inputs(&self) -> bool {
        false
    }
}
