//! In tests, an imagined device writes down what it is asked to launch.

use super::info::GpuInfo;
use super::info::Version;
use super::launch::LaunchShape;
use crate::kernel::Instance;
use std::cell::{Cell, RefCell};
use std::{ptr, slice};

/// The name of imagined devices.
pub(super) const NAME: &str = "imagined";

thread_local! {
    static LAUNCHES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

/// True for devices that [`Gpu::imagined`](super::Gpu::imagined) has made.
pub(super) fn is_imagined(info: &GpuInfo) -> bool {
    info.name == NAME
}

/// The launches of this thread since the last call: kernel, shape, and the words of its argument.
pub(crate) fn launches() -> Vec<String> {
    LAUNCHES.take()
}

/// An address that no other memory has.
pub(super) fn address() -> u64 {
    ALLOCATED.set(ALLOCATED.get() + (1 << 40));
    ALLOCATED.get()
}

/// True if the build for this device has the kernel: it follows from conditions in the sources.
pub(super) fn has_kernel(name: &str, capability: Version) -> bool {
    match name {
        "gemv_rows" => capability.major >= 9,
        "gemm_wgmma" | "gemm_step" | "norm_step" => capability == Version::new(9, 0),
        _ => true,
    }
}

pub(super) fn record<A: Copy>(kernel: &Instance<A>, shape: LaunchShape, args: &A) {
    // SAFETY: arguments are structures of integers, floats and addresses without padding.
    let words =
        unsafe { slice::from_raw_parts(ptr::from_ref(args).cast::<u32>(), size_of::<A>() / 4) };
    let line = format!("{} {shape:?} {words:x?}", kernel.name());
    LAUNCHES.with_borrow_mut(|all| all.push(line));
}
