//! Drafts by the layer with which a model predicts the token after the next (multi-token prediction;
//! [`nq_model::mtp`]).

use super::device::Device;
use super::gpu;
use nq_cpu::engine::mtp::MtpModel;
use nq_formats::{Weight, WeightStore};
use nq_model::{ModelConfig, mtp};
use nq_runtime::interface::{DraftLayer, Drafter, LoadOptions, Session, StreamHead};
use nq_runtime::speculation::head::drafter;
use nq_runtime::{Error, Result};
use std::sync::Arc;

/// A model's MTP layer, loaded.
#[derive(Clone)]
pub struct Mtp(StreamHead);

impl Mtp {
    /// Packs the layer of the model of `config` and `store`, on the device of `options`. It drafts with `head`, which may be
    /// the model's in fewer bits, or with the model's own.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a model without such a layer; a missing or misshapen tensor; on a GPU, [`Error::Kernel`] if there is no memory for it.
    pub fn load(
        (config, store): (&ModelConfig, &dyn WeightStore),
        head: Option<&Weight>,
        options: &LoadOptions,
    ) -> Result<Self> {
        let (Some(layer), Some(sizes)) = (mtp::config(config), DraftLayer::mtp(config)) else {
            return Err(Error::Unsupported {
                engine: "nq",
                what: "drafts by an MTP layer",
                expected: "a model whose files have one (mtp_num_hidden_layers 1)".into(),
                found: format!("{} without one", config.architecture.title),
            });
        };
        // It reads what the final norm and the head of the model do.
        let (what, taps) = ("an MTP layer", vec![config.num_hidden_layers]);
        Ok(Mtp(
            match Device::choose(options.device)?.single("drafts of an MTP layer")? {
                None => StreamHead {
                    what,
                    taps,
                    layer: sizes,
                    device: "the CPU",
                    weights: Arc::new(MtpModel::load(layer, store, head, options)?),
                },
                Some(ordinal) => StreamHead {
                    what,
                    taps,
                    layer: sizes,
                    device: "a GPU",
                    weights: Arc::new(gpu::load_mtp(layer, store, head, ordinal)?),
                },
            },
        ))
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
