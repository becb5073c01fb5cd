//! In tests, an imagined device writes down what it is asked to launch.

use super::gpu::Gpu;
use super::info::GpuInfo;
use super::info::Version;
use super::launch::LaunchShape;
use super::tensor_map::BoxedMatrix;
use crate::cuda::wgmma::TensorMap;
use crate::kernel::Instance;
use nq_kernels::account::Account;
use std::cell::{Cell, RefCell};
use std::{ptr, slice};

const NAME: &str = "imagined";

thread_local! {
    static LAUNCHES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

/// A dry device of this compute capability, number of multiprocessors and shared memory of a block, in KiB.
pub(crate) fn imagined(capability: Version, multiprocessors: usize, shared_kib: usize) -> Gpu {
    let info = GpuInfo {
        name: NAME.into(),
        capability,
        multiprocessors,
        shared_memory: shared_kib << 10,
        ..GpuInfo::default()
    };
    Gpu::dry(info, Account::gpu())
}

/// True for devices that [`imagined`] has made.
pub(super) fn is_imagined(gpu: &Gpu) -> bool {
    gpu.info().name == NAME
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

pub(super) fn tensor_map(m: &BoxedMatrix) -> TensorMap {
    let mut words = [0; 16];
    let sizes = [
        m.element,
        m.rows,
        m.width,
        m.tile.0,
        m.tile.1,
        usize::from(m.swizzled),
    ];
    words[0] = m.address.0;
    for (word, size) in words[1..].iter_mut().zip(sizes) {
        *word = size as u64;
    }
    TensorMap { words }
}
