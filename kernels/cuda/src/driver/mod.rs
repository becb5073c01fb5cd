//! The CUDA driver: a device, its memory, streams, graphs and launches.
//!
//! The driver library is loaded when a device is opened, so one binary runs with or without
//! it. The build embeds the kernels' code for several architectures; that of the device is
//! unpacked, and each kernel is looked up once ([`super::table`]).
//!
//! Invariants that operations may rely on, whatever safe code does with the types here:
//! - Memory outlives the work that uses it. Freeing device memory waits for the device; host memory
//!   that a device uses is waited for before it is freed ([`Pinned`], [`Mapped`]); a [`Graph`] keeps
//!   the memory of the operations recorded in it.
//! - Host memory is not read while it is being copied to: [`Pinned`] waits for its copies first, and
//!   [`Mapped`], which kernels may write at any time, is read value by value, as volatile memory.
//! - Addresses belong to the stream's own device and have the size that an operation states ([`Operands`]).
//! - Numbers that kernels use as indices into memory are checked when they are written ([`Checked`]).

mod blas;
mod call;
mod checked;
mod code;
mod copy;
mod errors;
mod found;
mod gpu;
mod host;
#[cfg(feature = "imitate")]
mod imitate;
mod info;
mod launch;
mod locked;
mod memory;
mod operands;
mod peers;
mod pinned;
mod staging;
mod stream;
mod tensor_map;
#[cfg(test)]
pub(crate) mod trace;

pub(crate) use blas::{Blas, Side};
pub use call::HostWork;
pub use checked::{Checked, Followed};
pub use code::driver_needed;
#[cfg(test)]
pub(crate) use code::targets;
pub use copy::{CopiedRows, Strided};
pub use found::{check_device, device_count};
pub use gpu::Gpu;
pub(crate) use gpu::PartTimes;
pub use host::HostStage;
pub(crate) use info::has_small_blocks;
pub use info::{GpuInfo, Version};
pub(crate) use launch::LaunchShape;
pub(crate) use locked::Locked;
pub(crate) use memory::Address;
pub use memory::{Buffer, Mapped};
pub(crate) use operands::Operands;
pub(crate) use peers::Common;
pub use pinned::Pinned;
pub(crate) use staging::Staging;
pub use stream::{Graph, Mark, Stream, StreamOptions};
pub(crate) use tensor_map::BoxedMatrix;
