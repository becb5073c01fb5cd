//! Drafts by an EAGLE-3 head (arXiv 2503.01840): one layer that reads the target's residual streams, and from its
//! second token on its own.

use super::device::Device;
use super::gpu;
use nq_cpu::engine::eagle::EagleModel;
use nq_formats::WeightStore;
use nq_formats::eagle::EagleHead;
use nq_model::ModelConfig;
use nq_runtime::Result;
use nq_runtime::interface::{DraftLayer, Drafter, LoadOptions, Session, StreamHead};
use nq_runtime::speculation::head::drafter;
use std::sync::Arc;

/// A loaded head.
#[derive(Clone)]
pub struct Eagle(StreamHead);

impl Eagle {
    /// Packs `head` for the model of `target`, on the device of `options`.
    ///
    /// # Errors
    /// A missing or misshapen tensor; a model that the head was not made for; on a GPU, a shape that its kernels do
    /// not serve, and [`Error::Kernel`](nq_runtime::Error::Kernel) if there is no memory for it.
    pub fn load(
        head: &EagleHead,
        target: (&ModelConfig, &dyn WeightStore),
        options: &LoadOptions,
    ) -> Result<Self> {
        head.check_model(target.0)?;
        let taps = head.config.taps_of(target.0.num_hidden_layers).to_vec();
        let (what, layer) = ("an EAGLE-3 head", DraftLayer::eagle3(&head.config));
        Ok(Eagle(
            match Device::choose(options.device)?.single("drafts of an EAGLE-3 head")? {
                None => StreamHead {
                    what,
                    taps,
                    layer,
                    device: "the CPU",
                    weights: Arc::new(EagleModel::load(head, target, options)?),
                },
                Some(ordinal) => StreamHead {
                    what,
                    taps,
                    layer,
                    device: "a GPU",
                    weights: Arc::new(gpu::load_eagle(head, target.0, ordinal)?),
                },
            },
        ))
    }

    /// Its sizes, which sessions that it drafts for have in their [`SessionSpec`](nq_runtime::SessionSpec).
    pub fn layer(&self) -> DraftLayer {
        self.0.layer
    }

    /// Drafts for `session`, whose residual streams the head reads from now on.
    ///
    /// # Errors
    /// [`Error::Unsupported`](nq_runtime::Error::Unsupported) for sessions that do not give them to it;
    /// [`Error::Request`](nq_runtime::Error::Request) for those that were not made for such a head.
    pub fn drafter(&self, session: &mut dyn Session) -> Result<Box<dyn Drafter>> {
        drafter(&self.0, session)
    }
}
