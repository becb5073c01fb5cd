//! The tower of a model that sees: from patches of an image to rows for the text model.

use crate::error::{Error, Result};
use nq_model::vision::{Patches, VisionConfig};
use std::sync::Arc;

/// A tower on a device, ready to run. Its work is apart from a session's: callers choose when an image is encoded.
pub trait Tower: Send + Sync {
    /// Its shape.
    fn config(&self) -> &VisionConfig;

    /// Bytes that [`Tower::encode`] takes for an image of this many patches, beside what it is given and returns.
    fn encode_bytes(&self, patches: usize) -> usize;

    /// The rows that the text model reads in place of the image. `stop` is asked after each block at least, and ends the
    /// work.
    ///
    /// # Errors
    /// [`Error::Request`] for patches that do not fit the tower; [`Error::Interrupted`] once `stop` says so;
    /// [`Error::NotFinite`]; errors of kernels.
    fn encode_until(&self, patches: &Patches, stop: &dyn Fn() -> bool) -> Result<ImageRows>;

    /// [`Tower::encode_until`] the end.
    ///
    /// # Errors
    /// Its errors but [`Error::Interrupted`].
    fn encode(&self, patches: &Patches) -> Result<ImageRows> {
        self.encode_until(patches, &|| false)
    }
}

/// An image as the text model reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageRows {
    /// `[levels, height width, hidden]`, row by row: first what takes the place of embeddings, then what is added to the
    /// text model's stream behind its first layer, behind its second, and so on, as far as the tower makes such rows.
    pub rows: Vec<f32>,
    /// Rows of the image, in squares of patches that were merged.
    pub height: usize,
    /// Columns of the image.
    pub width: usize,
    /// [`Patches::digest`].
    pub digest: [u8; 32],
}

impl ImageRows {
    /// Tokens of a prompt that it takes the place of.
    pub fn tokens(&self) -> usize {
        self.height * self.width
    }

    /// Positions that it takes: fewer than tokens, since those of a row, and of a column, share one.
    pub fn positions(&self) -> usize {
        self.height.max(self.width)
    }
}

/// An image's place in a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedImage {
    /// Index of the first token that it takes the place of.
    pub at: usize,
    /// The image.
    pub image: Arc<ImageRows>,
}

impl PlacedImage {
    /// Index of the first token behind it.
    pub fn end(&self) -> usize {
        self.at + self.image.tokens()
    }
}

/// Refuses patches that a tower of shape `config` cannot have made rows of.
///
/// # Errors
/// [`Error::Request`].
pub fn check_patches(config: &VisionConfig, patches: &Patches) -> Result<()> {
    let (grid, merge) = (patches.grid, config.spatial_merge_size);
    let whole = |n: usize| n > 0 && n.is_multiple_of(merge);
    // Checked before they are multiplied.
    let small = [grid.h, grid.w].iter().all(|n| *n < 1 << 20);
    if grid.t != 1 || !small || !whole(grid.h) || !whole(grid.w) {
        return Err(Error::Request {
            what: "patches of an image",
            expected: format!("one frame, rows and columns in multiples of {merge}"),
            found: format!("{} frames of {} by {}", grid.t, grid.h, grid.w),
        });
    }
    let values = grid.patches() * config.patch_values();
    match patches.rows.len() {
        found if found == values => Ok(()),
        found => Err(Error::Request {
            what: "values of an image's patches",
            expected: format!("{values}, {} for each patch", config.patch_values()),
            found: found.to_string(),
        }),
    }
}
