//! What a run holds of a GPU's memory, and what it does where the source does not fit.

use super::job::Job;
use super::state::State;
use crate::device_memory::{DeviceEstimate, SampledFrom};
use crate::error::Result;
use crate::quality::Judge;
use crate::second_order::InputStats;
#[cfg(feature = "cuda")]
use nq_formats::Progress;
use nq_kernels::Account;
use nq_runtime::Engine;
use nq_runtime::device::Device;
use std::sync::Arc;

/// The peak is that of the run that begins.
pub(super) fn begin_memory() {
    Account::of_all_gpus().begin();
}

/// Bytes of GPUs' memory that were held at most since [`begin_memory`].
pub(super) fn peak_memory() -> u64 {
    Account::of_all_gpus().peak() as u64
}

/// What the record says of text that was not sampled from the source as it is.
pub(super) fn sampling_fallback(from: SampledFrom) -> Option<String> {
    (from != SampledFrom::Source).then(|| {
        format!("text was sampled from {from}, which the GPU's memory does not hold as it is")
    })
}

impl Job<'_> {
    /// What the run takes of the GPU's memory, tuning apart, and how it keeps within what may be
    /// used; `None` on the CPU. Found out once.
    ///
    /// # Errors
    /// An absent device; less memory than the smallest way of doing a stage takes.
    pub fn device_estimate(&self) -> Result<Option<DeviceEstimate>> {
        if let Some(known) = self.device.get() {
            return Ok(*known);
        }
        let found = match self.options.load.device.resolve()? {
            Device::Cpu => None,
            #[cfg(feature = "cuda")]
            Device::Cuda(n) => Some(self.fit_device(n)?),
        };
        Ok(*self.device.get_or_init(|| found))
    }

    #[cfg(feature = "cuda")]
    fn fit_device(&self, ordinal: usize) -> Result<DeviceEstimate> {
        use crate::device_memory::gpu::{Work, ways};
        let gpu = nq_kernels::cuda::Gpu::open(ordinal)?;
        let free = gpu.free_memory()? as u64;
        let limit = self.options.device_memory.unwrap_or(free).min(free);
        // Schemes that are chosen may be of 8 bits throughout.
        let most = crate::Schemes::defaults(nq_formats::Bits::B8);
        let chosen = self.options.target.is_some() || self.may_raise();
        let work = Work {
            schemes: if chosen { &most } else { &self.options.schemes },
            needs: self.method.needs(),
            sampled: self.sampled(),
        };
        ways(gpu.info(), self.config(), &work)?.choose(limit)
    }

    /// What was announced of the device's memory, tuning included.
    pub(super) fn announced_device_bytes(&self, state: &State) -> u64 {
        let run = self.device.get().copied().flatten().map_or(0, |d| d.peak);
        let tuning = state.tuning.as_ref().map_or(0, |t| t.device_bytes);
        match run {
            0 => 0,
            run => run.max(tuning),
        }
    }

    /// The engine that text is sampled from; what it holds is kept in `state`.
    pub(super) fn sampling_engine(&self, state: &mut State) -> Result<Arc<dyn Engine>> {
        let estimate = self.device_estimate()?;
        let from = estimate.map_or(SampledFrom::Source, |d| d.sampled_from);
        state.sampled_from = from;
        #[cfg(feature = "cuda")]
        if let (Some(schemes), Some(estimate)) =
            (crate::device_memory::gpu::copy_schemes(from), estimate)
        {
            self.progress.note(&format!(
                "text is sampled from {from}, rounded as it is loaded: the source does not fit \
                 the {} bytes of the GPU's memory that may be used",
                estimate.limit
            ));
            let store = crate::rounded_weights(self.checkpoint, schemes)?;
            let options = &self.options.load;
            let engine = nq_runtime::load(self.config(), &store, options, &self.progress)?;
            return Ok(engine);
        }
        self.source_engine()
    }

    /// Statistics whose second moments are on the device that rounds by them.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn on_device(&self, inputs: InputStats) -> Result<InputStats> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(n) = self.options.load.device.resolve()?
            && let Some(moments) = inputs.hessian.as_ref().and_then(|h| h.host())
        {
            use nq_kernels::cuda::{CudaOps, GemmPrecision, Gpu};
            let gpu = Gpu::open(n)?;
            let buffer = gpu.upload("moments of the head's inputs", &moments.data)?;
            let ops = Arc::new(CudaOps::new(&gpu, GemmPrecision::Full)?);
            return crate::second_order::device::input_stats(&ops, buffer, moments.cols);
        }
        Ok(inputs)
    }

    /// True if the source is measured against layer by layer.
    pub(super) fn is_streamed(&self) -> Result<bool> {
        Ok(self.device_estimate()?.is_some_and(|d| d.streamed))
    }

    /// The source over the text of `judge`, if the device has no room for the whole of it.
    pub(super) fn streamed_source(&self, judge: &Judge) -> Result<Option<Arc<dyn Engine>>> {
        if !self.is_streamed()? {
            return Ok(None);
        }
        #[cfg(feature = "cuda")]
        if let crate::stepper::Stepper::Gpu(stepper) = self.stepper()? {
            self.progress.note(
                "quality is measured against the source layer by layer: source and result do \
                 not fit the GPU's memory together",
            );
            let store = self.checkpoint.store();
            let windows = judge.windows()?;
            let source = crate::streamed::Streamed::new(*stepper, store, &windows, &self.progress)?;
            return Ok(Some(Arc::new(source)));
        }
        let _ = judge;
        Ok(None)
    }
}
