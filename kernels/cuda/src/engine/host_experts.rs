//! Experts that stay in the computer's memory and run on the CPU, for GPUs too small for a whole mixture.
//!
//! Attention, routers and norms of every layer stay on the GPU. Where a layer's experts are on the CPU,
//! a step copies the residual stream and the router's scores to the host, adds the mixture there, and
//! copies the residual stream back; this is part of the recorded step.

use crate::HostWork;
use nq_cpu::Cpu;
use nq_cpu::engine::WeightPlaces;
use nq_cpu::engine::layer::pack;
use nq_formats::Progress;
use nq_kernels::Routes;
use nq_model::{Experts, ExpertsSpec, LayerSpec, ModelConfig, Product};
use nq_runtime::host::available_memory;
use nq_runtime::interface::LoadOptions;
use nq_runtime::models::LayerWeights;
use nq_runtime::weights::Census;
use nq_runtime::{Error, Result};
use std::sync::Arc;

/// The experts of a model's first layers, as far as they are on the CPU.
#[derive(Default)]
pub(super) struct HostExperts {
    cpu: Option<Arc<Cpu>>,
    layers: Vec<HostLayer>,
    places: Option<WeightPlaces>,
}

struct HostLayer {
    work: Arc<HostWork>,
    bytes: usize,
}

/// True for the products of `spec` that hold the weights of experts.
pub(super) fn is_of_experts(spec: &LayerSpec, product: &Product) -> bool {
    (spec.experts()).is_some_and(|(_, e)| e.gate_up == *product || e.down == *product)
}

impl HostExperts {
    /// The number of layers asked for, if any: `None` for a dense model, which has no experts.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for more layers than the model has.
    pub(super) fn wanted(
        config: &ModelConfig,
        layers: Option<usize>,
        progress: &dyn Progress,
    ) -> Result<Option<usize>> {
        match (layers, config.experts) {
            (Some(1..), None) => {
                progress.note("--cpu-experts has no effect: the model has no experts");
                Ok(None)
            }
            (Some(n), Some(_)) if n > config.num_hidden_layers => Err(Error::Unsupported {
                engine: "nq on a GPU",
                what: "layers whose experts run on the CPU (--cpu-experts)",
                expected: format!("at most {}", config.num_hidden_layers),
                found: n.to_string(),
            }),
            _ => Ok(layers),
        }
    }

    /// Bytes that may be page-locked for experts: `most`, or what the computer has free but for a sixteenth, as locked memory
    /// cannot be taken back from it.
    pub(super) fn memory_for_banks(most: Option<usize>) -> usize {
        let free = available_memory().map_or(usize::MAX, |bytes| (bytes - bytes / 16) as usize);
        most.map_or(free, |most| most.min(free))
    }

    /// Repacks the experts of the next of `left` layers for the CPU.
    pub(super) fn add(
        &mut self,
        config: &ModelConfig,
        options: &LoadOptions,
        weights: &LayerWeights,
        left: usize,
    ) -> Result<()> {
        let (Some(experts), Some((norm, ExpertsSpec { gate_up, down, .. }))) =
            (config.experts, weights.spec.experts())
        else {
            unreachable!("`wanted` lets no other model through");
        };
        let cpu = match &self.cpu {
            Some(cpu) => Arc::clone(cpu),
            None => Arc::clone(self.cpu.insert(Arc::new(nq_cpu::open(options)?))),
        };
        let packed = |product: &'static Product| {
            let parts = weights.product(product);
            pack(
                &cpu,
                options,
                product.name,
                experts.count,
                &parts,
                &mut Census::default(),
            )
        };
        let (mut gate_up, mut down) = (packed(gate_up)?, packed(down)?);
        let places = self
            .places
            .get_or_insert_with(|| WeightPlaces::new(options, 0));
        places.place(vec![&mut gate_up, &mut down], left)?;
        let gain = weights.norm(norm.kind).to_f32()?;
        let bytes = gate_up.bytes() + down.bytes();
        let eps = config.rms_norm_eps;
        let work = move |x: &mut [f32], scores: &[f32]| {
            let mut normed = vec![0.0; x.len()];
            cpu.rms_norm(x, &gain, eps, &mut normed);
            let routes = Routes::new(scores, &experts);
            // The shapes were checked when the weights were packed; were they wrong, NaN would be noticed.
            if cpu.experts(&gate_up, &down, &routes, &normed, x).is_err() {
                x.fill(f32::NAN);
            }
        };
        self.layers.push(HostLayer {
            work: Arc::new(work),
            bytes,
        });
        Ok(())
    }

    /// What the CPU does for a layer; `None` if its experts are on the GPU.
    pub(super) fn work(&self, layer: usize) -> Option<&Arc<HostWork>> {
        self.layers.get(layer).map(|l| &l.work)
    }

    /// Says what of it lies in a file.
    pub(super) fn note(&self, progress: &dyn Progress) {
        self.places.iter().for_each(|places| places.note(progress));
    }

    /// Number of layers.
    pub(super) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of all weights.
    pub(super) fn bytes(&self) -> usize {
        self.layers.iter().map(|l| l.bytes).sum()
    }

    /// Bytes that one token reads.
    pub(super) fn bytes_per_token(&self, experts: Option<&Experts>) -> usize {
        let share = |bytes: usize| experts.map_or(0, |e| bytes / e.count * e.per_token);
        self.layers.iter().map(|l| share(l.bytes)).sum()
    }
}
