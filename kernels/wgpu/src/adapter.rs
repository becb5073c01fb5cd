//! Adapters: GPUs as Vulkan, Metal or Direct3D 12 present them.

use nq_runtime::{Error, Result};
use std::fmt;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use wgpu::{Backend, Backends, DeviceType, Features, InstanceDescriptor, InstanceFlags};

/// An adapter of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundAdapter {
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// `Vulkan`, `Metal` or `Direct3D 12`.
    pub backend: &'static str,
    /// Its driver and the driver's version.
    pub driver: String,
    /// `a GPU`, `a GPU with the computer's memory`, `a virtual GPU`, or `software on the CPU`.
    pub kind: &'static str,
    /// True if it computes on a GPU, not in software.
    pub hardware: bool,
    /// What it lacks, and what that costs.
    pub lacks: Vec<String>,
}

impl fmt::Display for FoundAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {})", self.name, self.backend, self.driver)
    }
}

/// All adapters, in the order of their numbers: GPUs with memory of their own first, software last. None where the
/// machine has no such driver.
pub fn adapters() -> Vec<FoundAdapter> {
    all().iter().map(describe).collect()
}

/// Lanes of the adapter's subgroups, through whose registers sums go; `None` without subgroups, and where a kernel
/// cannot know how many lanes they have.
pub(crate) fn subgroup_lanes(adapter: &wgpu::Adapter) -> Option<usize> {
    let info = adapter.get_info();
    let (lanes, most) = (info.subgroup_min_size, info.subgroup_max_size);
    let known = adapter.features().contains(Features::SUBGROUP) && lanes == most;
    (known && matches!(lanes, 8 | 16 | 32 | 64)).then_some(lanes as usize)
}

/// The adapter of number `ordinal`.
///
/// # Errors
/// [`Error::Device`] if there are not as many.
pub(crate) fn adapter(ordinal: usize) -> Result<wgpu::Adapter> {
    let mut found = all();
    let count = found.len();
    if ordinal < count {
        return Ok(found.swap_remove(ordinal));
    }
    Err(Error::Device {
        device: format!("wgpu:{ordinal}"),
        why: match count {
            0 => "no driver for Vulkan, Metal or Direct3D 12 was found".into(),
            _ => format!("expected a number below {count}, that of the adapters found"),
        },
    })
}

fn all() -> Vec<wgpu::Adapter> {
    let instance = wgpu::Instance::new(InstanceDescriptor {
        backends: Backends::VULKAN | Backends::METAL | Backends::DX12,
        flags: InstanceFlags::empty(),
        ..InstanceDescriptor::new_without_display_handle()
    });
    let mut found = ready(instance.enumerate_adapters(Backends::all()));
    // Stable: adapters of one kind stay in the driver's order.
    found.sort_by_key(|adapter| rank(adapter.get_info().device_type));
    found
}

fn rank(kind: DeviceType) -> usize {
    match kind {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu | DeviceType::Other => 2,
        DeviceType::Cpu => 3,
    }
}

fn describe(adapter: &wgpu::Adapter) -> FoundAdapter {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let mut lacks = Vec::new();
    if subgroup_lanes(adapter).is_none() {
        let why =
            "subgroups of one known size: sums of steps' products go through workgroup memory";
        lacks.push(why.into());
    }
    let binding = limits.max_storage_buffer_binding_size;
    if binding < 1 << 30 {
        let size = nq_formats::human_bytes(binding);
        lacks.push(format!(
            "bindings of 1 GB: weights are cut into parts of {size}, a kernel each"
        ));
    }
    FoundAdapter {
        driver: [&*info.driver, &*info.driver_info]
            .join(" ")
            .trim()
            .to_string(),
        name: info.name,
        backend: match info.backend {
            Backend::Vulkan => "Vulkan",
            Backend::Metal => "Metal",
            Backend::Dx12 => "Direct3D 12",
            Backend::Noop | Backend::Gl | Backend::BrowserWebGpu => "another interface",
        },
        kind: match info.device_type {
            DeviceType::DiscreteGpu => "a GPU",
            DeviceType::IntegratedGpu => "a GPU with the computer's memory",
            DeviceType::VirtualGpu => "a virtual GPU",
            DeviceType::Cpu => "software on the CPU",
            DeviceType::Other => "a device of an unknown kind",
        },
        hardware: info.device_type != DeviceType::Cpu,
        lacks,
    }
}

/// The result of `future`. Those of drivers are ready when they are made, or soon.
pub(crate) fn ready<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}
