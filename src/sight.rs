//! Memory for images, as plans and reports show it.

use nq_answers::images::SightOptions;
use nq_cpu::plan::TowerBytes;
use nq_formats::{Checkpoint, human_bytes};
use nq_runtime::LoadOptions;
use serde::Serialize;
use std::fmt;

/// What seeing images takes of memory beside a text model, in bytes.
#[derive(Serialize)]
pub(crate) struct SightBytes {
    /// The tower's weights.
    weights_bytes: u64,
    /// An image of as many tokens as are allowed, while it is encoded.
    largest_image_bytes: u64,
    /// The rows of images that were seen lately.
    kept_bytes: u64,
}

impl SightBytes {
    /// All of it.
    pub(crate) fn total(&self) -> u64 {
        self.weights_bytes + self.largest_image_bytes + self.kept_bytes
    }

    /// What the model of `checkpoint` takes, if it sees.
    ///
    /// # Errors
    /// A missing or misshapen tensor.
    pub(crate) fn plan(
        checkpoint: &Checkpoint,
        load: &LoadOptions,
        options: &SightOptions,
    ) -> nq_runtime::Result<Option<Self>> {
        let bytes = |TowerBytes { weights, encoding }| SightBytes {
            weights_bytes: weights,
            largest_image_bytes: encoding,
            kept_bytes: options.kept as u64,
        };
        Ok(nq_load::tower_bytes(checkpoint, load, options.tokens)?.map(bytes))
    }
}

impl fmt::Display for SightBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} for images: {} of weights, {} for the largest one, {} for those seen lately",
            human_bytes(self.total()),
            human_bytes(self.weights_bytes),
            human_bytes(self.largest_image_bytes),
            human_bytes(self.kept_bytes)
        )
    }
}
