//! What this machine has, for `nq doctor`, `nq fit` and records of measurements.

use crate::system;
use crate::terminal::Terminal;
use anyhow::Context;
use nq_evals::{Record, RecordMachine, RecordModel};
use nq_formats::durable;
use nq_formats::{Checkpoint, Progress, Unit, hash};
use nq_runtime::LoadOptions;
use std::path::{Path, PathBuf};

/// Buffer size of the short measurement of the memory's bandwidth.
pub(crate) const BANDWIDTH_BYTES: u64 = 512 << 20;

/// Measures how fast this machine's memory is read by the threads of `options`, in 10^9 bytes a second; `None` if too
/// little of it is free.
pub(crate) fn read_gb_s(
    options: &LoadOptions,
    terminal: &Terminal,
) -> nq_runtime::Result<Option<f64>> {
    if system::available_memory().is_some_and(|free| free <= 2 * BANDWIDTH_BYTES) {
        return Ok(None);
    }
    terminal.begin("memory bandwidth", 1, Unit::Items);
    let cpu = nq_cpu::open(options)?;
    let measured = cpu.read_bandwidth(&cpu.bandwidth_buffer(BANDWIDTH_BYTES as usize));
    terminal.end();
    Ok(Some(measured.best / 1e9))
}

/// The NVIDIA driver's version, if one is loaded.
pub(crate) fn driver() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let line = text.lines().next()?;
    let version = line
        .split_whitespace()
        .find(|w| w.contains('.') && w.chars().all(|c| c.is_ascii_digit() || c == '.'))?;
    Some(version.to_owned())
}

/// Names of the GPUs that the driver lists.
pub(crate) fn devices() -> Vec<String> {
    let Ok(gpus) = std::fs::read_dir("/proc/driver/nvidia/gpus") else {
        return Vec::new();
    };
    let model = |path: PathBuf| {
        let text = std::fs::read_to_string(path.join("information")).ok()?;
        let line = text.lines().find_map(|l| l.strip_prefix("Model:"))?;
        Some(line.trim().to_owned())
    };
    gpus.flatten().filter_map(|g| model(g.path())).collect()
}

/// A record of this machine without figures; `protocol` says how they were measured.
pub(crate) fn record(protocol: String, models: Vec<RecordModel>) -> Record {
    Record {
        form: nq_evals::RECORD_FORM,
        nq: env!("CARGO_PKG_VERSION").into(),
        protocol,
        machine: RecordMachine {
            cpu: system::cpu_name(),
            logical_cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: system::total_memory(),
            gpus: devices(),
            driver: driver(),
        },
        models,
        speed: Vec::new(),
        quality: Vec::new(),
        more: serde_json::Map::new(),
    }
}

/// A model for a record: hashes its files, except those whose names in the hub's cache are their hashes.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn record_model(
    name: &str,
    codes: &str,
    checkpoint: &Checkpoint,
    progress: &dyn Progress,
) -> nq_formats::Result<RecordModel> {
    Ok(RecordModel {
        name: name.to_owned(),
        codes: codes.to_owned(),
        tensor_bytes: checkpoint.tensor_bytes(),
        files: hash::hashed_files(checkpoint, progress)?,
    })
}

/// Writes a record to a file, which appears whole.
///
/// # Errors
/// A file that cannot be written.
pub(crate) fn write_record(path: &Path, record: &Record) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(record)? + "\n";
    durable::write_bytes(path, json.as_bytes()).context("--record")
}
