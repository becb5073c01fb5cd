//! Models on NVIDIA GPUs: packed weights, kernels and their launchers, and the [`engine`] over them.
//!
//! [`Gpu`] is the device and [`Stream`] runs work on it: every operation is a method of the stream,
//! checks its operands and queues one kernel. Weights are packed once
//! ([`DeviceLinear`]); `weights.cuh` describes the layout that all kernels read.
//!
//! [`table`] lists all kernels; each row is in the file of its launcher. The memory that a queued
//! kernel uses may be dropped at any time: freeing it waits, which is slow but correct.

mod advance;
mod attention;
mod bandwidth;
pub mod bank;
mod batch;
mod collectives;
/// What the CUDA sources declare, a module for each of them, which `build.rs` writes. Some of it only kernels use.
#[allow(dead_code, unreachable_pub, clippy::empty_docs)]
mod cuda {
    include!(concat!(env!("OUT_DIR"), "/declared.rs"));
}
#[cfg(test)]
#[path = "../build/declarations.rs"]
mod declarations;
mod delta;
mod driver;
#[forbid(unsafe_code)]
pub mod engine;
mod exl3;
mod experts;
mod gather;
mod gemm;
mod gemm_step;
mod gemv;
mod grad;
mod grouped;
mod half_rows;
mod hyper;
mod indexer;
mod kernel;
#[cfg(test)]
mod launches;
mod linear;
mod mixture;
pub mod pack;
mod partial_sums;
mod plan;
mod prefill;
mod product;
mod rows;
mod second_order;
mod step_layers;
mod table;
mod tower;
mod trellis;

pub use advance::{
    Adjustments, Advance, Candidates, Logprobs, MOST_LOGPROBS, NONE_ALLOWED, NOT_FINITE, Sampling,
};
pub use attention::{
    AttentionOutput, AttentionScratch, AttentionShape, Cascade, CascadeShape, DevicePages,
    HEAD_DIM, Heads, LayerPages, PageEntry, PageStaging, PagesShape, WIDE_HEAD_DIM,
    WIDE_ROTARY_DIMS, rotary_dims,
};
pub use batch::best_len;
pub use batch::columns::{Columns, MOST_SEQUENCES};
pub use collectives::{Collectives, Gathered, Inbox, MOST_RANKS, Rank, Share, gathered_best_len};
pub use delta::{
    CONV, DELTA_DIM, DeltaRows, DeltaSpan, DeltaVectors, DeviceStates, LayerStates,
    MOST_RATE_INPUTS, Rates, StatesShape,
};
pub use driver::{
    Buffer, Checked, CopiedRows, Followed, Gpu, GpuInfo, Graph, HostStage, HostWork, Mapped, Mark,
    Pinned, Stream, StreamOptions, Strided, Version, check_device, device_count, driver_needed,
};
pub use engine::{
    CudaEagle, CudaEngine, CudaMtp, CudaTower, ParallelEngine, check_shape, placed, planned,
    planned_tower, served, unserved_tower,
};
pub use gather::room::{GatheredRows, GatheredSizes};
pub use gemm::GemmOutput;
pub use gemm_step::{MOST_WIDE_SEQUENCES, StepOutput, wide_best_len};
pub use gemv::GemvOutput;
pub use grad::{CudaOps, GemmPrecision, LowRank};
pub use grouped::GroupedRows;
pub use half_rows::HalfRows;
pub use hyper::few::{BlockAdds, FewStreams, JoinedStreams, StreamMixing};
pub use hyper::{
    ConvolvedRows, KeptRows, LayerRows, StreamDims, StreamNorm, StreamSpans, StreamWeights, SumsOf,
};
pub use indexer::{ChosenBlocks, INDEX_DIM, IndexSizes, IndexVectors, ScoredRows};
pub use kernel::KernelRow;
pub use linear::{DeviceLinear, Uploader};
pub use mixture::{MOST_CHOSEN, MOST_EXPERTS, chosen, gated_width, stacked};
pub use pack::{PackedKind, Stack, StackKind, operand_index};
pub use partial_sums::PartialSums;
pub use prefill::SequenceRows;
pub use product::Norm;
pub use rows::{MOST_RUN, Places, Row, RowsOut, Step, StepBounds};
pub use second_order::{CodeColumns, Groups, Permutation};
pub use step_layers::{
    BlockLimit, LayersInbox, LayersPlan, LayersScratch, LayersSizes, MOST_POSITIONS_AT_ONCE,
    StepLayer, StepMixer,
};
pub use table::table;
pub use tower::{ImageGrid, ImageHeads, LayerNorm};
pub use trellis::MOST_ROWS as MOST_TRELLIS_ROWS;
pub use trellis::room::{TrellisRoom, TrellisSizes};
pub use trellis::sizes::{CodedExperts, packed_weights};
