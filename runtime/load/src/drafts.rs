//! What drafts for a session, and what does unless something is asked for.
//!
//! A layer that drafts reads the residual streams of its target: the model's own with which it predicts the token after the
//! next ([`nq_model::mtp`]), or an EAGLE-3 head (arXiv 2503.01840), which from its second token on reads its own.

use super::device::Device;
use super::gpu;
use nq_cpu::engine::eagle::EagleModel;
use nq_cpu::engine::mtp::MtpModel;
use nq_formats::eagle::EagleHead;
use nq_formats::{Checkpoint, Task, Weight, WeightStore};
use nq_model::{ModelConfig, mtp};
use nq_runtime::interface::{
    ActivationChoice, DeviceMemory, DraftLayer, Drafter, Engine, LoadOptions, Session, SessionSpec,
    StreamHead,
};
use nq_runtime::speculation::head::drafter;
use nq_runtime::{DraftModel, Error, Result, Speculation};
use std::any::Any;
use std::sync::Arc;

/// A loaded layer that drafts.
#[derive(Clone)]
pub struct StreamDrafts(StreamHead);

type Weights = Arc<dyn Any + Send + Sync>;

impl StreamDrafts {
    /// Packs `head` for the model of `model` and `store`, on the device of `options`.
    ///
    /// # Errors
    /// A missing or misshapen tensor; a model that the head was not made for; on a GPU, a shape that its kernels do
    /// not serve, and [`Error::Kernel`] if there is no memory for it.
    pub fn eagle(
        head: &EagleHead,
        model: &ModelConfig,
        store: &dyn WeightStore,
        options: &LoadOptions,
    ) -> Result<Self> {
        head.check_model(model)?;
        if model.hyper.is_some() {
            return Err(Error::Unsupported {
                engine: "nq",
                what: "drafts of an EAGLE-3 head",
                expected: "a model with one residual stream".into(),
                found: format!("{} with {}", model.architecture.title, model.streams()),
            });
        }
        let (device, weights): (_, Weights) =
            match Device::choose(options.device)?.single("drafts of an EAGLE-3 head")? {
                None => (
                    "the CPU",
                    Arc::new(EagleModel::load(head, model, store, options)?),
                ),
                Some(gpu) => ("a GPU", Arc::new(gpu::load_eagle(head, model, gpu)?)),
            };
        Ok(StreamDrafts(StreamHead {
            what: "an EAGLE-3 head",
            taps: head.config.taps_of(model.num_hidden_layers).to_vec(),
            layer: DraftLayer::eagle3(&head.config),
            device,
            weights,
        }))
    }

    /// Packs the MTP layer of the model of `config` and `store`, on the device of `options`. It drafts with `head`, which may
    /// be the model's in fewer bits, or with the model's own.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a model without such a layer; a missing or misshapen tensor; on a GPU, [`Error::Kernel`] if
    /// there is no memory for it.
    pub fn mtp(
        config: &ModelConfig,
        store: &dyn WeightStore,
        head: Option<&Weight>,
        options: &LoadOptions,
    ) -> Result<Self> {
        let (Some(own), Some(layer)) = (mtp::config(config), DraftLayer::mtp(config)) else {
            return Err(Error::Unsupported {
                engine: "nq",
                what: "drafts by an MTP layer",
                expected: "a model whose files have one (mtp_num_hidden_layers 1)".into(),
                found: format!("{} without one", config.architecture.title),
            });
        };
        let (device, weights): (_, Weights) =
            match Device::choose(options.device)?.single("drafts of an MTP layer")? {
                None => (
                    "the CPU",
                    Arc::new(MtpModel::load(own, store, head, options)?),
                ),
                Some(gpu) => ("a GPU", Arc::new(gpu::load_mtp(own, store, head, gpu)?)),
            };
        Ok(StreamDrafts(StreamHead {
            what: "an MTP layer",
            // It reads what the final norm and the head of the model do.
            taps: vec![config.num_hidden_layers],
            layer,
            device,
            weights,
        }))
    }

    /// Its sizes, which sessions that it drafts for have in their [`SessionSpec`](nq_runtime::SessionSpec).
    pub fn layer(&self) -> DraftLayer {
        self.0.layer
    }

    /// Drafts for `session`, whose residual streams the layer reads from now on.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for sessions that do not give them to it; [`Error::Request`] for those that were not made for
    /// such a layer.
    pub fn drafter(&self, session: &mut dyn Session) -> Result<Box<dyn Drafter>> {
        drafter(&self.0, session)
    }
}

/// A loaded drafter.
#[derive(Clone)]
pub enum Drafts {
    /// Prompt lookup.
    Ngram,
    /// A draft model.
    Model {
        /// It, loaded.
        engine: Arc<dyn Engine>,
        /// Number of tokens that it shares with its target.
        vocab: usize,
        /// The longest context that it was trained for.
        ctx: usize,
    },
    /// An MTP layer or an EAGLE-3 head.
    Layer(StreamDrafts),
}

impl Drafts {
    /// True if the MTP layer of `checkpoint` drafts unless something else is asked for: where answers with drafts are
    /// those without, which a CPU with quantized weights gives. Not of mixtures, of which each row of a step reads other
    /// experts, nor where weights are quantized at load, which reads the head twice then.
    ///
    /// # Errors
    /// An absent device.
    pub fn by_own_layer(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<bool> {
        let quantized = checkpoint.store().quantization().is_some();
        let rounds = options.activations == ActivationChoice::Auto;
        let on_cpu = Device::choose(options.device)? == Device::Cpu;
        let writes = *checkpoint.task() == Task::Generate;
        let dense = checkpoint.config().experts.is_none();
        Ok(writes && dense && quantized && rounds && on_cpu)
    }

    /// What drafts for `session` if nothing was asked for: `loaded`, if it has weights, or prompt lookup, where answers
    /// with drafts are the same as without.
    pub fn unasked(session: &dyn Session, loaded: Option<Drafts>) -> Option<Self> {
        let exact = session.exact_rows() > 1 && session.exact_rows() >= session.draft_rows();
        exact.then(|| loaded.unwrap_or(Drafts::Ngram))
    }

    /// Drafts for `session`. Unless they were `asked` for, nothing is said where they do not pay.
    ///
    /// # Errors
    /// If there is no room for a session of a draft model.
    pub fn speculation(&self, session: &mut dyn Session, asked: bool) -> Result<Speculation> {
        let speculation = match self {
            Drafts::Ngram => Speculation::ngram(),
            Drafts::Layer(layer) => Speculation::new(layer.drafter(session)?).with_copies(),
            Drafts::Model { engine, vocab, ctx } => {
                let own = engine.session(session.spec().of_draft_model(*ctx))?;
                Speculation::new(Box::new(DraftModel::new(own, *vocab))).with_copies()
            }
        };
        Ok(match asked {
            true => speculation,
            false => speculation.quietly(),
        })
    }

    /// What a session of its own takes of the device's memory beside a target's session of `spec`: a draft model has one.
    pub fn device_memory(&self, spec: &SessionSpec) -> DeviceMemory {
        let own = match self {
            Drafts::Model { engine, ctx, .. } => engine.device_memory(&spec.of_draft_model(*ctx)),
            Drafts::Ngram | Drafts::Layer(_) => None,
        };
        own.unwrap_or_default()
    }
}
