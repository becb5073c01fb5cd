//! The table of kernels: all rows of all files with launchers.

use super::kernel::KernelRow;
use super::{
    advance, attention, bandwidth, batch, collectives, delta, experts, gather, gemm, gemm_step,
    gemv, grad, grouped, hyper, indexer, linear,
};
use super::{exl3, prefill, rows, second_order, step_layers, tower, trellis};

/// The rows of each file.
static TABLE: [&[&KernelRow]; 34] = [
    advance::ROWS,
    attention::ROWS,
    attention::cascade::ROWS,
    attention::pages::ROWS,
    bandwidth::ROWS,
    batch::ROWS,
    batch::groups::ROWS,
    batch::rows::ROWS,
    collectives::ROWS,
    delta::ROWS,
    exl3::ROWS,
    experts::ROWS,
    gather::ROWS,
    gemm::ROWS,
    gemm_step::ROWS,
    gemv::ROWS,
    grad::ROWS,
    grad::delta::ROWS,
    grad::gemm::ROWS,
    grad::layer::ROWS,
    grad::train::ROWS,
    grouped::ROWS,
    hyper::ROWS,
    hyper::few::ROWS,
    indexer::ROWS,
    linear::ROWS,
    prefill::ROWS,
    rows::ROWS,
    second_order::columns::ROWS,
    second_order::factor::ROWS,
    second_order::trellis::ROWS,
    step_layers::ROWS,
    tower::ROWS,
    trellis::ROWS,
];

/// All kernels of `kernels/cuda`.
pub fn table() -> impl Iterator<Item = &'static KernelRow> {
    TABLE.iter().flat_map(|rows| rows.iter().copied())
}

#[cfg(test)]
mod tests;
