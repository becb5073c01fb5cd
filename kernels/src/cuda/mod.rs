//! NVIDIA GPUs: packed weights, kernels and their launchers.
//!
//! [`Gpu`] is the device and [`Stream`] runs on it: every operation is a method of the stream,
//! checks the shapes it is given and queues one kernel. Weights are packed once
//! ([`DeviceLinear`]); `cuda/weights.cuh` describes the layout that all kernels read.
//!
//! Memory that a queued kernel uses must stay until the stream has been waited for; freeing
//! device memory waits, so dropping buffers early is slow but not wrong.

mod advance;
mod attention;
mod bandwidth;
mod batch;
mod driver;
mod gemm;
mod gemm_step;
mod gemv;
mod grad;
mod linear;
pub mod pack;
mod rows;
mod second_order;

pub use advance::{
    Adjustments, Advance, Candidates, Logprobs, MOST_LOGPROBS, NONE_ALLOWED, NOT_FINITE, Sampling,
};
pub use attention::{
    AttentionOutput, AttentionScratch, AttentionShape, DevicePages, HEAD_DIM, Heads, LayerPages,
    MOST_RUN, PageEntry, PagesShape,
};
pub use batch::{Columns, MOST_SEQUENCES};
pub use driver::{
    Address, Buffer, Gpu, GpuInfo, Graph, Mark, MemoryUse, Pinned, Stream, device_count, taken,
};
pub use gemm::{GemmOutput, SequenceRows};
pub use gemm_step::{MOST_WIDE_SEQUENCES, PartialSums, StepOutput, wide_best_len};
pub use gemv::{GemvOutput, Norm, best_len};
pub use grad::{CudaOps, GemmPrecision};
pub use linear::{DeviceLinear, Uploader};
pub use pack::{PackedKind, Stack, operand_index};
pub use rows::{Row, RowsOut, Step};
pub use second_order::{Codes, ColumnBlock, Damped, FitShape, Groups, Order};
