//! A run's use of GPU memory, and its alternatives if the source does not fit.

use super::job::Job;
use super::state::State;
use crate::device_memory::{DeviceEstimate, DeviceWork, SampledFrom, copy_schemes, fit};
use crate::error::Result;
use crate::quality::Judge;
use crate::schemes::Schemes;
use crate::second_order::InputStats;
use crate::streamed::Streamed;
use nq_formats::{Progress, Scheme};
use nq_load::device::Device;
use nq_load::{gpu, load};
use nq_model::ModelConfig;
use nq_runtime::{ActivationChoice, DeviceChoice, Engine, LoadOptions};
use std::sync::Arc;

/// The note in the record if text was not sampled from the unrounded source.
pub(super) fn sampling_fallback(from: SampledFrom) -> Option<String> {
    (from != SampledFrom::Source).then(|| {
        format!("text was sampled from {from}, as the source does not fit the GPU's memory")
    })
}

impl Job<'_> {
    /// GPU memory that the run takes, without tuning, and how each stage keeps within the limit; `None`
    /// on the CPU. Computed once.
    ///
    /// # Errors
    /// An absent device; too little memory for the smallest way of doing a stage.
    pub fn device_estimate(&self) -> Result<Option<DeviceEstimate>> {
        if let Some(known) = self.device.get() {
            return Ok(*known);
        }
        let found = self.gpu()?.map(|n| self.fit_device(n)).transpose()?;
        Ok(*self.device.get_or_init(|| found))
    }

    fn fit_device(&self, ordinal: usize) -> Result<DeviceEstimate> {
        let free = gpu::memory(ordinal)?.free;
        let limit = self.options.device_memory.unwrap_or(free).min(free);
        // Schemes that are chosen may be of 8 bits throughout.
        let most = Schemes::defaults(nq_formats::Bits::B8);
        let chosen = self.options.target.is_some() || self.may_raise();
        let elsewhere = self.options.schemes.need_cpu();
        let more = self.options.candidates.iter().filter(|_| chosen);
        let all = self.options.schemes.all().chain(more.copied());
        let work = DeviceWork {
            trellises: all.filter_map(Scheme::trellis).collect(),
            schemes: if (chosen && !self.options.schemes.have_trellis()) || elsewhere {
                &most
            } else {
                &self.options.schemes
            },
            needs: self.method.needs(),
            sampled: self.sampled(),
            sizes: gpu::sizes()?,
        };
        fit(self.config(), &work, limit)
    }

    /// The estimate of the device's memory, including tuning.
    pub(super) fn announced_device_bytes(&self, state: &State) -> u64 {
        let run = self.device.get().copied().flatten().map_or(0, |d| d.peak);
        let tuning = state.tuning.as_ref().map_or(0, |t| t.device_bytes);
        match run {
            0 => 0,
            run => run.max(tuning),
        }
    }

    /// The engine that text is sampled from; its source is recorded in `state`.
    pub(super) fn sampling_engine(&self, state: &mut State) -> Result<Arc<dyn Engine>> {
        let estimate = self.device_estimate()?;
        let from = estimate.map_or(SampledFrom::Source, |d| d.sampled_from);
        state.sampled_from = from;
        if let (Some(_), Some(estimate)) = (copy_schemes(from), estimate) {
            self.progress.note(&format!(
                "text is sampled from {from}, rounded as it is loaded: the source does not fit \
                 the {} bytes of the GPU's memory that may be used",
                estimate.limit
            ));
        }
        self.sampled_model(self.config(), from, &self.progress)
    }

    /// The source, or its first layers if `config` has fewer, as text is sampled from it.
    pub(super) fn sampled_model(
        &self,
        config: &ModelConfig,
        from: SampledFrom,
        progress: &dyn Progress,
    ) -> Result<Arc<dyn Engine>> {
        if let Some(schemes) = copy_schemes(from) {
            let store = crate::on_the_fly::rounded_weights(self.checkpoint, schemes)?;
            return Ok(load(config, &store, &self.options.load, progress)?);
        }
        let options = LoadOptions {
            activations: match self.options.load.activations {
                ActivationChoice::Auto => ActivationChoice::AutoBf16,
                asked => asked,
            },
            ..self.options.load
        };
        Ok(load(config, self.checkpoint.store(), &options, progress)?)
    }

    /// Statistics whose second moments are on the device, if it rounds with them.
    pub(super) fn on_device(&self, inputs: InputStats) -> Result<InputStats> {
        match self.gpu()? {
            Some(gpu) => inputs.moved_to(gpu),
            None => Ok(inputs),
        }
    }

    /// Options for loading the staged model to measure it: on the CPU if the GPU has no kernels for it.
    pub(super) fn measuring_options(&self, state: &State) -> Result<LoadOptions> {
        let mut options = self.options.load;
        let staged = Schemes {
            overrides: state.overrides.clone().unwrap_or_default(),
            ..self.options.schemes.clone()
        };
        if staged.need_cpu() && Device::choose(options.device)? != Device::Cpu {
            options.device = DeviceChoice::Cpu;
            self.progress.note(
                "the result is measured on the CPU: no kernel of a GPU serves groups of 16 inputs",
            );
        }
        Ok(options)
    }

    /// True if the source is measured against layer by layer.
    pub(super) fn is_streamed(&self) -> Result<bool> {
        Ok(self.device_estimate()?.is_some_and(|d| d.streamed))
    }

    /// The source run over the text of `judge`, if the device has no room for the whole of it.
    pub(super) fn streamed_source(&self, judge: &Judge) -> Result<Option<Arc<dyn Engine>>> {
        if !self.is_streamed()? {
            return Ok(None);
        }
        self.progress.note(
            "quality is measured against the source layer by layer: source and result do not fit \
             the GPU's memory together",
        );
        let (store, windows) = (self.checkpoint.store(), judge.windows()?);
        let source = Streamed::new(
            self.stepper(ActivationChoice::F32)?,
            store,
            &windows,
            &self.progress,
        )?;
        Ok(Some(Arc::new(source)))
    }
}
