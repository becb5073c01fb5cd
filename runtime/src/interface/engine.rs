//! A model on a device.

use super::adapters::AppliedAdapter;
use super::session::{Session, SessionSpec};
use crate::error::{Error, Result};
use crate::weights::Kinds;
use nq_formats::adapter::Lora;
use nq_kernels::profile::OpTiming;
use nq_model::ModelConfig;
use std::fmt;
use std::sync::Arc;

/// A model on a device, ready to run. Weights are shared by all its sessions.
pub trait Engine: Send + Sync {
    /// Shape of the model.
    fn config(&self) -> &ModelConfig;

    /// The device, engine, kernels and activations that run it.
    fn description(&self) -> &EngineDescription;

    /// Bytes of weights read to decode one token: all layers and the head, but of the embedding
    /// only rows that are looked up.
    fn bytes_per_token(&self) -> usize;

    /// Measured read bandwidth, in bytes per second, of the memory that holds the weights, for
    /// comparing rates with their limit. Measured on the first call (a fraction of a second)
    /// and kept; `None` if the engine cannot measure it.
    fn memory_bandwidth(&self) -> Option<f64> {
        None
    }

    /// Memory that weights and a session take on the device; `None` if the engine does not say.
    fn device_memory(&self, _spec: &SessionSpec) -> Option<DeviceMemory> {
        None
    }

    /// Where rows found the experts that routers chose so far, of a mixture whose experts do not all have room on the
    /// device; `None` for others.
    fn expert_choices(&self) -> Option<ExpertChoices> {
        None
    }

    /// Gives room on the device to the experts that texts chose in earlier runs, as `keeper` says, and lets it keep what
    /// they have chosen when the model is dropped. To be called before the first session; without effect unless there are
    /// [`Engine::expert_choices`].
    ///
    /// # Errors
    /// Errors of the device.
    fn keep_heat(&self, _keeper: Box<dyn HeatKeeper>) -> Result<()> {
        Ok(())
    }

    /// Most sequences whose next tokens one step of a [`Batch`](crate::batch::Batch) can draw without
    /// copying logits to the host; `None` if logits are always copied.
    fn sampled_together(&self) -> Option<usize> {
        None
    }

    /// Tokens from which on a prefix that `sequences` of a session have in common is read once for
    /// all of them in a step; `None` if each reads it for itself.
    fn read_once_from(&self, _spec: &SessionSpec, _sequences: usize) -> Option<usize> {
        None
    }

    /// Allocates a KV cache and scratch.
    ///
    /// # Errors
    /// If the device does not have enough memory; the error says what did not fit.
    fn session(&self, spec: SessionSpec) -> Result<Box<dyn Session>>;

    /// The same model, whose weights it shares, with adapters beside it. Sequences of its sessions have `applied`
    /// added to what they compute, unless [`Session::adapt`] says otherwise.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the engine computes merged models only; [`Error::Request`] for one in `applied` that
    /// is not in `adapters`.
    fn with_adapters(
        &self,
        adapters: &[Lora],
        applied: &[AppliedAdapter],
    ) -> Result<Arc<dyn Engine>> {
        let _ = (adapters, applied);
        Err(Error::no_adapters(&self.description().device))
    }

    /// Starts profiling the cost of each operation, from zero, over all sessions; false if this
    /// engine cannot.
    fn start_profile(&self) -> bool {
        false
    }

    /// Stops profiling and returns the counts, the most expensive operation first. Work that a forward
    /// does between operations is not included.
    fn stop_profile(&self) -> Vec<OpTiming> {
        Vec::new()
    }
}

/// The device, engine, kernels and activations of a model, for reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineDescription {
    /// `nq` or `candle`.
    pub engine: String,
    /// Device and instruction set or compute capability, e.g. `cpu (avx512)`.
    pub device: String,
    /// `fused` or `reference`.
    pub kernels: String,
    /// `f32`, `int8 g32`, ...
    pub activations: String,
    /// Bits of most weights, e.g. 4, 8 or 16.
    pub bits: usize,
    /// Number of CPU threads; 0 on a GPU.
    pub threads: usize,
}

impl EngineDescription {
    /// [`SessionSpec::prompt_rows`] on its device.
    pub fn prompt_rows(&self) -> usize {
        SessionSpec::prompt_rows(self.threads > 0)
    }
}

impl fmt::Display for EngineDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} on {}, {} kernels, activations {}, {} threads",
            self.engine, self.device, self.kernels, self.activations, self.threads
        )
    }
}

/// Use of a device's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Weights.
    pub weights: usize,
    /// Keys and values of a session.
    pub kv: usize,
    /// Activations and tables of that session.
    pub scratch: usize,
    /// Free memory at the time of asking.
    pub free: usize,
    /// True if it is the computer's memory, which has other uses too.
    pub on_host: bool,
}

/// Plans the memory that a model whose matrices are of these kinds and a session of it will take on a kind of device, which
/// need not be there.
///
/// # Errors
/// Weights that no kernel serves; a type of keys and values that the device does not support.
pub type Planner = fn(&ModelConfig, Kinds<'_>, &SessionSpec) -> Result<DeviceMemory>;

/// Choices of experts by the rows of all sessions, of a mixture whose experts do not all have room on the device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpertChoices {
    /// Of each layer with such experts, the first layer first.
    pub layers: Vec<LayerChoices>,
    /// The rate at which experts without room come to the device, in bytes per second.
    pub bus: f64,
}

/// Choices of a layer's experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerChoices {
    /// Those that found the expert in the device's memory.
    pub in_room: u64,
    /// All.
    pub all: u64,
    /// How many experts came to rooms of others.
    pub moved: u64,
    /// Bytes of an expert.
    pub expert_bytes: usize,
}

impl ExpertChoices {
    /// What was chosen since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let layers = self.layers.iter().zip(&before.layers);
        let layers = layers.map(|(now, before)| LayerChoices {
            in_room: now.in_room - before.in_room,
            all: now.all - before.all,
            moved: now.moved - before.moved,
            ..*now
        });
        ExpertChoices {
            layers: layers.collect(),
            bus: self.bus,
        }
    }

    /// The share of the choices that found their expert; `None` without any.
    pub fn found(&self) -> Option<f64> {
        let sum = |part: fn(&LayerChoices) -> u64| self.layers.iter().map(part).sum::<u64>();
        let all = sum(|l| l.all);
        (all > 0).then(|| sum(|l| l.in_room) as f64 / all as f64)
    }
}

/// Keeps between runs how often texts chose each expert of a model, lately more than long ago.
pub trait HeatKeeper: Send + Sync {
    /// What was kept of so many experts in all, each finite and not negative; `None` if there is nothing.
    fn kept(&self, experts: usize) -> Option<Vec<f32>>;

    /// Keeps this. Whoever cannot says so.
    fn keep(&self, heat: &[f32]);
}

/// Where a model's weights will be on GPUs of which so much is free.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// Memory on the GPU of which most is taken.
    pub memory: DeviceMemory,
    /// The first layers whose experts are on the CPU.
    pub on_host: usize,
    /// Of a mixture with experts in the computer's memory, which the GPU reads there: how many of each layer with such experts
    /// have room on the GPU, too.
    pub rooms: Option<usize>,
    /// Bytes of experts in the computer's memory.
    pub host_bytes: usize,
    /// Bytes of weights that one token reads on GPUs.
    pub read: usize,
    /// Bytes of weights that one token reads on the CPU; with rooms, of all experts that a router chooses for it, some of
    /// which a GPU finds in rooms.
    pub host_read: usize,
}

impl DeviceMemory {
    /// Sum of weights, keys and values, and scratch.
    pub fn total(&self) -> usize {
        self.weights + self.kv + self.scratch
    }
}
