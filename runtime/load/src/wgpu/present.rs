//! The functions of a build with `wgpu`.

use super::AdapterFound;
use nq_formats::{Progress, WeightStore};
use nq_model::ModelConfig;
use nq_runtime::Result;
use nq_runtime::interface::{Engine, LoadOptions};
pub use nq_wgpu::AdapterMeter;
use nq_wgpu::WgpuEngine;
pub(crate) use nq_wgpu::unserved;
use std::sync::{Arc, OnceLock};

/// All adapters, in the order of their numbers: GPUs first, software last.
pub fn adapters() -> Vec<AdapterFound> {
    let found = nq_wgpu::adapters().into_iter().enumerate();
    let adapter = |(ordinal, a): (usize, nq_wgpu::FoundAdapter)| AdapterFound {
        ordinal,
        name: a.name,
        backend: a.backend,
        driver: a.driver,
        kind: a.kind,
        hardware: a.hardware,
        lacks: a.lacks,
    };
    found.map(adapter).collect()
}

/// The adapter of number `ordinal`, or the first that is a GPU; otherwise the reason why there is none.
pub(crate) fn choose(ordinal: Option<usize>) -> Result<usize, String> {
    // Drivers take a while to look, and a process asks often.
    static FOUND: OnceLock<Vec<nq_wgpu::FoundAdapter>> = OnceLock::new();
    let found = FOUND.get_or_init(nq_wgpu::adapters);
    match (ordinal, found.len()) {
        (_, 0) => Err("no driver for Vulkan, Metal or Direct3D 12 was found".into()),
        (Some(n), count) if n < count => Ok(n),
        (Some(_), count) => Err(format!(
            "expected a number below {count}, the number of adapters found"
        )),
        (None, _) => found
            .iter()
            .position(|a| a.hardware)
            .ok_or_else(|| format!("expected a GPU, found {} (--device wgpu:0)", found[0])),
    }
}

/// Loads the engine of adapter `ordinal`.
pub(crate) fn load(
    config: &ModelConfig,
    store: &dyn WeightStore,
    options: &LoadOptions,
    ordinal: usize,
    progress: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    let engine = WgpuEngine::load(config, store, options, ordinal, progress)?;
    Ok(Arc::new(engine))
}
