//! From weights to a running engine: the choice of a device. No other crate knows which devices a build has.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.
//!
//! ```
//! use nq_formats::Checkpoint;
//! use nq_load::load;
//! use nq_runtime::{Chunk, KvType, LoadOptions, LogitsWanted, DraftedBy, SessionSpec, Tokenizer};
//! use std::path::Path;
//!
//! let checkpoint = Checkpoint::open(Path::new("../../assets/demo"))?;
//! let tokenizer = Tokenizer::from_files(checkpoint.files())?;
//! let engine = load(checkpoint.config(), checkpoint.store(), &LoadOptions::default(), &())?;
//! let mut session = engine.session(SessionSpec {
//!     slots: 1,
//!     ctx: 128,
//!     pages: None,
//!     kv: KvType::F16,
//!     max_rows: 64,
//!     snapshots: None,
//!     drafts: DraftedBy::Nothing,
//! })?;
//! let tokens = tokenizer.encode("The capital of France is")?;
//! let chunk = Chunk { slot: 0, tokens: &tokens, logits: LogitsWanted::Last };
//! let logits = session.forward(&[chunk], None)?;
//! assert_eq!(logits.row(0).len(), checkpoint.config().vocab_size);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The same for texts that are embedded ([`Encoder`](nq_runtime::Encoder)):
//!
//! ```
//! use nq_formats::Checkpoint;
//! use nq_runtime::embedding::unit;
//! use nq_load::load;
//! use nq_runtime::{Encoder, KvType, LoadOptions, Row, DraftedBy, SessionSpec, Tokenizer};
//! use std::path::Path;
//!
//! let checkpoint = Checkpoint::open(Path::new("../../assets/demo"))?;
//! let tokenizer = Tokenizer::from_files(checkpoint.files())?;
//! let engine = load(checkpoint.config(), checkpoint.store(), &LoadOptions::default(), &())?;
//! let session = engine.session(SessionSpec {
//!     slots: 4,
//!     ctx: 128,
//!     pages: None,
//!     kv: KvType::F16,
//!     max_rows: 64,
//!     snapshots: None,
//!     drafts: DraftedBy::Nothing,
//! })?;
//! let texts = [tokenizer.encode("a cat")?, tokenizer.encode("two dogs")?];
//! let mut vectors = Vec::new();
//! Encoder::new(session, Row::Hidden).encode(0, &texts, &mut |_, row| {
//!     vectors.push(unit(row, row.len())?);
//!     Ok(())
//! })?;
//! assert_eq!(vectors[1].len(), checkpoint.config().hidden_size);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

#[cfg_attr(not(feature = "candle"), path = "candle_absent.rs")]
mod candle;
pub mod device;
mod drafts;
pub mod gpu;
mod tower;
pub mod wgpu;

pub use drafts::{Drafts, StreamDrafts};
pub use tower::{tower, tower_bytes, tower_device};

use device::Device;
use nq_cpu::{CpuEngine, CpuLayers};
use nq_formats::{Progress, WeightStore};
use nq_kernels::KernelSet;
use nq_kernels::pages::KvType;
use nq_model::ModelConfig;
use nq_runtime::interface::{DeviceChoice, Engine, EngineKind, LoadOptions, Ordinals, Planner};
use nq_runtime::stepper::{LayerStepper, Stepper};
use nq_runtime::{Error, Result};
use std::sync::Arc;

/// Loads a model: reads every weight from `store`, repacks it for the device and reports
/// progress in bytes. `store` may be a checkpoint or any other source of weights.
///
/// # Errors
/// A missing or misshapen tensor, a weight that no kernel supports, an absent device or
/// instruction set; each error names it.
pub fn load(
    config: &ModelConfig,
    store: &dyn WeightStore,
    options: &LoadOptions,
    progress: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    if options.engine == EngineKind::Candle {
        if config.delta.is_some() {
            return Err(Error::no_recurrences("candle"));
        }
        return candle::load(config, store, options, progress);
    }
    if let DeviceChoice::WgpuOrCpu(_) = options.device {
        if let Some(engine) = load_on_adapter(config, store, options, progress)? {
            return Ok(engine);
        }
        let device = DeviceChoice::Cpu;
        return load(config, store, &LoadOptions { device, ..*options }, progress);
    }
    let device = Device::choose(options.device)?;
    if options.split.is_some() && !matches!(device, Device::Gpus(_)) {
        return Err(Error::Unsupported {
            engine: "nq",
            what: "a model divided among GPUs (--split)",
            expected: "several GPUs, such as --device cuda:0,1".into(),
            found: device.to_string(),
        });
    }
    if config.hyper.is_some() && !matches!(device, Device::Cpu | Device::Cuda(_)) {
        return Err(Error::no_streams("nq"));
    }
    match device {
        Device::Cpu => Ok(Arc::new(CpuEngine::load(config, store, options, progress)?)),
        Device::Cuda(n) => gpu::load(config, store, options, n, progress),
        Device::Wgpu(n) => wgpu::load(config, store, options, n, progress),
        Device::Gpus(several) => {
            check_parallel(options, several)?;
            gpu::load_parallel(config, store, options, several, progress)
        }
    }
}

/// Loads a model on the adapter that [`DeviceChoice::WgpuOrCpu`] names. `None` where something else is chosen, and where
/// the adapter refuses the model or has no room for it, which is said: the CPU is to run it then.
///
/// # Errors
/// Errors of reading the model.
pub fn load_on_adapter(
    config: &ModelConfig,
    store: &dyn WeightStore,
    options: &LoadOptions,
    progress: &dyn Progress,
) -> Result<Option<Arc<dyn Engine>>> {
    let DeviceChoice::WgpuOrCpu(number) = options.device else {
        return Ok(None);
    };
    match wgpu::load(config, store, options, number, progress) {
        Err(why @ (Error::Unsupported { .. } | Error::Device { .. })) => {
            progress.note(&format!(
                "wgpu:{number} is left alone, the CPU runs this model: {why}"
            ));
            Ok(None)
        }
        loaded => loaded.map(Some),
    }
}

/// What plans memory on GPUs or on the CPU.
///
/// # Errors
/// In a build without GPUs.
pub fn planner(on_gpu: bool) -> Result<Planner> {
    match on_gpu {
        true => Ok(gpu::sizes()?.engine),
        false => Ok(nq_cpu::plan::planned),
    }
}

/// Refuses options that several GPUs do not serve.
fn check_parallel(options: &LoadOptions, several: Ordinals) -> Result<()> {
    if options.cpu_experts.is_some_and(|layers| layers > 0) {
        Device::Gpus(several).single("experts on the CPU (--cpu-experts)")?;
    }
    if options.gpu_memory.is_some() {
        Device::Gpus(several).single("a limit of the GPU's memory (--gpu-memory)")?;
    }
    if options.kernels == KernelSet::Reference {
        Device::Gpus(several).single("reference kernels")?;
    }
    Ok(())
}

/// The forward one layer at a time, for weights that arrive layer by layer. On the CPU, keys and
/// values are rounded to `kv`. A GPU computes in f32 and passes up to `rows` rows through a layer at
/// once, and at least one whole sequence.
///
/// # Errors
/// An absent device or instruction set; several GPUs.
pub fn stepper(
    config: &ModelConfig,
    options: &LoadOptions,
    kv: KvType,
    rows: usize,
) -> Result<Box<dyn LayerStepper>> {
    let device = Device::choose(options.device)?;
    match device.single("a forward one layer at a time")? {
        None => Ok(Box::new(Stepper(CpuLayers::new(config, options, kv)?))),
        Some(_) if config.hyper.is_some() => Err(Error::no_streams("nq")),
        Some(n) => gpu::stepper(config, n, rows),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an adapter refuses, and one that is not there, is said in a line, and the CPU runs the model.
    #[test]
    fn what_an_adapter_refuses_runs_on_the_cpu() {
        struct Notes(std::sync::Mutex<Vec<String>>);
        impl Progress for Notes {
            fn note(&self, message: &str) {
                self.0.lock().unwrap().push(message.to_owned());
            }
        }
        let demo = std::path::Path::new("../../assets/demo");
        let demo = nq_formats::Checkpoint::open(demo).unwrap();
        for number in [0, 999] {
            let options = LoadOptions {
                device: DeviceChoice::WgpuOrCpu(number),
                kernels: KernelSet::Reference,
                ..LoadOptions::default()
            };
            let notes = Notes(std::sync::Mutex::default());
            let engine = load(demo.config(), demo.store(), &options, &notes).unwrap();
            assert!(
                engine.description().device.contains("cpu"),
                "{}",
                engine.description().device
            );
            let notes = notes.0.into_inner().unwrap();
            let left = format!("wgpu:{number} is left alone, the CPU runs this model");
            assert_eq!(
                notes.iter().filter(|n| n.contains(&left)).count(),
                1,
                "{notes:?}"
            );
        }
    }

    #[test]
    fn several_gpus_refuse_reference_kernels_and_experts_on_the_cpu() {
        let several = Ordinals::new(&[0, 1]).unwrap();
        let refused = |options: LoadOptions| check_parallel(&options, several).unwrap_err();
        let reference = refused(LoadOptions {
            kernels: KernelSet::Reference,
            ..LoadOptions::default()
        });
        assert!(
            reference.to_string().contains("reference kernels"),
            "{reference}"
        );
        let experts = refused(LoadOptions {
            cpu_experts: Some(1),
            ..LoadOptions::default()
        });
        assert!(experts.to_string().contains("--cpu-experts"), "{experts}");
        let limited = refused(LoadOptions {
            gpu_memory: Some(1 << 30),
            ..LoadOptions::default()
        });
        assert!(limited.to_string().contains("--gpu-memory"), "{limited}");
        let none = LoadOptions {
            cpu_experts: Some(0),
            ..LoadOptions::default()
        };
        check_parallel(&none, several).unwrap();
    }
}
