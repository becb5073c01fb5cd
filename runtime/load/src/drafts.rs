//! Drafts by a layer that reads the residual streams of its target: the model's own with which it predicts the token after
//! the next ([`nq_model::mtp`]), or an EAGLE-3 head (arXiv 2503.01840), which from its second token on reads its own.

use super::device::Device;
use super::gpu;
use nq_cpu::engine::eagle::EagleModel;
use nq_cpu::engine::mtp::MtpModel;
use nq_formats::eagle::EagleHead;
use nq_formats::{Weight, WeightStore};
use nq_model::{ModelConfig, mtp};
use nq_runtime::interface::{DraftLayer, Drafter, LoadOptions, Session, StreamHead};
use nq_runtime::speculation::head::drafter;
use nq_runtime::{Error, Result};
use std::any::Any;
use std::sync::Arc;

/// A loaded layer that drafts.
#[derive(Clone)]
pub struct StreamDrafts(StreamHead);

type Weights = Arc<dyn Any + Send + Sync>;

impl StreamDrafts {
    /// Packs `head` for the model of `target`, on the device of `options`.
    ///
    /// # Errors
    /// A missing or misshapen tensor; a model that the head was not made for; on a GPU, a shape that its kernels do
    /// not serve, and [`Error::Kernel`] if there is no memory for it.
    pub fn eagle(
        head: &EagleHead,
        target: (&ModelConfig, &dyn WeightStore),
        options: &LoadOptions,
    ) -> Result<Self> {
        head.check_model(target.0)?;
        let (device, weights): (_, Weights) =
            match Device::choose(options.device)?.single("drafts of an EAGLE-3 head")? {
                None => (
                    "the CPU",
                    Arc::new(EagleModel::load(head, target, options)?),
                ),
                Some(gpu) => ("a GPU", Arc::new(gpu::load_eagle(head, target.0, gpu)?)),
            };
        Ok(StreamDrafts(StreamHead {
            what: "an EAGLE-3 head",
            taps: head.config.taps_of(target.0.num_hidden_layers).to_vec(),
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
        (config, store): (&ModelConfig, &dyn WeightStore),
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
