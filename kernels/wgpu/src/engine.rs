//! [`Engine`] on an adapter.

use crate::gpu::Gpu;
use crate::linear::{Linear, Purpose};
use crate::model::WgpuModel;
use crate::pack::held_size;
use crate::program::{Program, unserved};
use crate::session::WgpuSession;
use crate::sizes::Sizes;
use crate::timer::MOST_TIMED;
use nq_formats::{Progress, WeightStore};
use nq_kernels::KernelSet;
use nq_kernels::pages::KvType;
use nq_kernels::profile::OpTiming;
use nq_model::forward::Layer;
use nq_model::{LinearKind, ModelConfig, Product};
use nq_runtime::host::available_memory;
use nq_runtime::interface::{
    ActivationChoice, DeviceMemory, Engine, EngineDescription, LoadOptions, Session, SessionSpec,
};
use nq_runtime::models::{self, LayerWeights};
use nq_runtime::rope::Rotary;
use nq_runtime::weights::{Census, LoadProgress, note_held};
use nq_runtime::{Error, Result};
use std::sync::{Arc, OnceLock};

/// [`Engine`] over `wgpu`.
pub struct WgpuEngine {
    model: Arc<WgpuModel>,
    description: EngineDescription,
    /// Measured at most once.
    free: OnceLock<usize>,
}

impl WgpuEngine {
    /// Reads a model layer by layer and repacks it for the adapter of number `ordinal` ([`crate::adapters`]).
    ///
    /// # Errors
    /// An absent adapter, memory that is short, and what no kernel serves, each by name.
    pub fn load(
        config: &ModelConfig,
        store: &dyn WeightStore,
        options: &LoadOptions,
        ordinal: usize,
        progress: &dyn Progress,
    ) -> Result<Self> {
        if let Some(e) = unserved(config) {
            return Err(e);
        }
        if options.kernels == KernelSet::Reference {
            return Err(Error::Unsupported {
                engine: "nq over wgpu",
                what: "reference kernels",
                expected: "--kernels fused, or --device cpu".into(),
                found: "--kernels reference".into(),
            });
        }
        options.session.as_ref().map_or(Ok(()), check_spec)?;
        let gpu = Gpu::open(ordinal)?;
        let mut done = LoadProgress::begin(config, store, progress);
        let (mut census, choice) = (Census::default(), options.activations);
        let head_weight = models::head(store, config)?;
        let purpose = Purpose {
            name: "head",
            gated: false,
            experts: 1,
            choice,
        };
        let head = Linear::new(&gpu, purpose, &[&head_weight], &mut census)?;
        done.add(&head_weight);
        drop(head_weight);
        let embedding = models::embedding(store, config)?;
        if !config.tie_word_embeddings {
            done.add(&embedding);
        }
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for index in 0..config.num_hidden_layers {
            let weights = LayerWeights::read(store, config, index)?;
            let linear = |product: &'static Product| {
                let gates = [LinearKind::Gate, LinearKind::SharedGate];
                let first = &product.linears[0];
                let mut purpose = Purpose {
                    name: product.name,
                    gated: gates.contains(&first.kind),
                    experts: first.copies(config),
                    choice,
                };
                let parts = weights.product(product);
                if weights.spec.kept_products().contains(&product) {
                    // What chooses experts, and the like, is neither rounded nor counted.
                    purpose.choice = ActivationChoice::F32;
                    return Linear::new(&gpu, purpose, &parts, &mut Census::default());
                }
                Linear::new(&gpu, purpose, &parts, &mut census)
            };
            let vector = |vector| weights.values(vector);
            layers.push(Layer::new(index, weights.spec, linear, vector)?);
            weights.linears.values().for_each(|w| done.add(w));
        }
        let norm = models::final_norm(store, config)?.to_f32()?;
        done.end();
        note_held(config, store, held_size, progress);
        if choice.is_forced() && !census.rounds() {
            return Err(Error::Unsupported {
                engine: "nq over wgpu",
                what: "rounded activations",
                expected: "quantized weights for int8".into(),
                found: format!("{}-bit floats", census.bits()),
            });
        }
        let description = EngineDescription {
            engine: "nq".into(),
            device: gpu.description.clone(),
            kernels: options.kernels.to_string(),
            activations: census.activations(),
            bits: census.bits(),
            threads: 0,
        };
        let model = WgpuModel {
            rotary: Rotary::new(config),
            config: config.clone(),
            gpu,
            embedding,
            layers,
            norm,
            head,
        };
        Ok(WgpuEngine {
            model: Arc::new(model),
            description,
            free: OnceLock::new(),
        })
    }
}

/// Refuses sessions that no kernel serves.
fn check_spec(spec: &SessionSpec) -> Result<()> {
    if matches!(spec.kv, KvType::F16 | KvType::Int8) {
        return Ok(());
    }
    Err(Error::Unsupported {
        engine: "nq over wgpu",
        what: "keys and values",
        expected: "f16 or int8 (--kv 16, --kv 8), or --device cpu".into(),
        found: spec.kv.to_string(),
    })
}

impl Engine for WgpuEngine {
    fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    fn description(&self) -> &EngineDescription {
        &self.description
    }

    fn bytes_per_token(&self) -> usize {
        let (model, c) = (&self.model, &self.model.config);
        let layers = model.layers.iter();
        let layers = layers.map(|layer| layer.bytes_per_token(c, Linear::bytes));
        layers.sum::<usize>() + model.head.bytes() + 4 * model.vector_values()
    }

    fn device_memory(&self, spec: &SessionSpec) -> Option<DeviceMemory> {
        let (model, sizes) = (&*self.model, Sizes::new(&self.model, spec));
        let free = match model.gpu.on_host {
            true => available_memory().map_or(usize::MAX, |bytes| bytes as usize),
            false => *self.free.get_or_init(|| model.gpu.free_memory()),
        };
        Some(DeviceMemory {
            weights: model.linears().map(Linear::bytes).sum(),
            kv: sizes.kv(),
            scratch: sizes.scratch(),
            free,
            on_host: model.gpu.on_host,
        })
    }

    fn start_profile(&self) -> bool {
        let gpu = &self.model.gpu;
        let times = gpu.times && Program::most_ops(&self.model) <= MOST_TIMED;
        if times {
            gpu.profile.start();
        }
        times
    }

    fn stop_profile(&self) -> Vec<OpTiming> {
        self.model.gpu.profile.stop()
    }

    fn session(&self, spec: SessionSpec) -> Result<Box<dyn Session>> {
        check_spec(&spec)?;
        let session = WgpuSession::new(Arc::clone(&self.model), spec)?;
        Ok(Box::new(session))
    }
}
