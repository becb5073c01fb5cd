//! Properties of this machine: processor, caches, memory.

use nq_formats::human_bytes;
use std::fs;
use std::path::Path;

pub use nq_runtime::host::{available_memory, total_memory};

/// The processor's name, if the system tells it.
pub(crate) fn cpu_name() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let keys = ["model name", "Model", "CPU part"];
    keys.iter().find_map(|key| {
        let line = info.lines().find(|l| {
            let name = l.split(':').next().unwrap_or("");
            name.trim() == *key
        })?;
        Some(line.split_once(':')?.1.trim().to_owned())
    })
}

/// Refuses work that needs more memory than the machine has free; `help` says what needs less.
///
/// # Errors
/// A message with both figures.
pub(crate) fn check_memory(needed: u64, help: &str) -> anyhow::Result<()> {
    match available_memory() {
        Some(available) if needed > available => anyhow::bail!(
            "this needs {} of memory, and {} are free: {help}",
            human_bytes(needed),
            human_bytes(available)
        ),
        _ => Ok(()),
    }
}

/// Bytes of last-level cache: the sum over the caches of the highest level among the
/// machine's CPUs. 0 if the system does not say.
pub(crate) fn last_level_cache() -> u64 {
    let Ok(cpus) = fs::read_dir("/sys/devices/system/cpu") else {
        return 0;
    };
    let mut caches: Vec<(u32, String, u64)> = cpus
        .flatten()
        .filter(|e| {
            let name = e.file_name();
            let digits = name.to_str().and_then(|n| n.strip_prefix("cpu"));
            digits.is_some_and(|d| d.parse::<u32>().is_ok())
        })
        .filter_map(|e| fs::read_dir(e.path().join("cache")).ok())
        .flat_map(|indices| indices.flatten().filter_map(|i| cache(&i.path())))
        .collect();
    caches.sort();
    caches.dedup(); // CPUs that share a cache list it once each
    let top = caches.iter().map(|c| c.0).max().unwrap_or(0);
    caches.iter().filter(|c| c.0 == top).map(|c| c.2).sum()
}

/// Level, the CPUs that share it, and bytes of a cache that holds data.
fn cache(index: &Path) -> Option<(u32, String, u64)> {
    let read = |name: &str| fs::read_to_string(index.join(name)).ok();
    if read("type")?.trim() == "Instruction" {
        return None;
    }
    let size = read("size")?;
    let kib: u64 = size.trim().strip_suffix('K')?.parse().ok()?;
    let level = read("level")?.trim().parse().ok()?;
    Some((
        level,
        read("shared_cpu_list")?.trim().to_owned(),
        kib * 1024,
    ))
}
