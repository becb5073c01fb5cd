//! GPUs over Vulkan, Metal and Direct3D 12. A build without the feature `wgpu` has the same functions, which report
//! that there is none.

#[cfg(not(feature = "wgpu"))]
#[path = "absent.rs"]
mod here;
#[cfg(feature = "wgpu")]
#[path = "present.rs"]
mod here;

pub use here::{AdapterMeter, adapters};
pub(crate) use here::{choose, load, unserved};

/// True if this build has kernels for them.
pub const BUILT_IN: bool = cfg!(feature = "wgpu");

/// An adapter: a GPU as one of its drivers presents it, or software that does as one would.
#[derive(Clone, Debug)]
pub struct AdapterFound {
    /// Its number, for `--device wgpu:N`.
    pub ordinal: usize,
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// `Vulkan`, `Metal` or `Direct3D 12`.
    pub backend: &'static str,
    /// Its driver and the driver's version.
    pub driver: String,
    /// What it is, in words.
    pub kind: &'static str,
    /// True if it computes on a GPU.
    pub hardware: bool,
    /// What it lacks, and what that costs.
    pub lacks: Vec<String>,
}
