//! Exports checkpoints in formats that other engines load: one source file per format.
//!
//! An export preserves every weight's numbers if the format can hold them. If only scales
//! must be rounded to the format's type, the report says so; if new codes would have to be
//! chosen, the export fails unless [`ExportOptions::requantize`] is set.

mod awq;
mod compressed_tensors;
mod engines;
mod fit;
mod folder;
mod format;
pub mod gguf;
mod gptq;
mod hybrid;
mod mix;
mod mmproj;
pub mod nq;
mod options;
mod packing;
mod report;
mod verify;

pub use fit::requantization;
pub use format::ExportFormat;
pub use mix::Mix;
pub use options::ExportOptions;
pub use report::{Change, ExportReport, Exported};
pub use verify::{Difference, compare};

use crate::checkpoint::Checkpoint;
use crate::durable::{check_destination, parent};
use crate::error::{Error, Result};
use crate::hyper;
use crate::progress::Progress;
use std::path::Path;

/// Writes `checkpoint` to `out` in `format`: whole or not at all.
///
/// # Errors
/// [`Error::Exists`] if `out` exists and `force` is not set, if it must not be replaced
/// ([`check_destination`]), or if it is the source; [`Error::Unsupported`], naming it, for a weight
/// that the format cannot hold; errors of reading the source or writing the files.
pub fn export(
    checkpoint: &Checkpoint,
    format: ExportFormat,
    out: &Path,
    options: &ExportOptions,
    progress: &dyn Progress,
) -> Result<ExportReport> {
    if format.packing().is_some() {
        hyper::refuse_export(checkpoint.config(), out)?;
    }
    check_destination(out, format.form(), options.force)?;
    checkpoint.files().check_apart(out)?;
    let folder = parent(out);
    std::fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, "create", e))?;
    let mut report = match (format.packing(), format) {
        (Some(packing), _) => folder::export(checkpoint, out, packing, progress)?,
        (None, ExportFormat::Gguf) => gguf::export(checkpoint, out, options, progress)?,
        (None, _) => return nq::export(checkpoint, out, options, progress),
    };
    if let (Some(vision), ExportFormat::Gguf) = (checkpoint.vision(), format) {
        let note = mmproj::export(checkpoint, vision, out, options.force, progress)?;
        report.notes.push(note);
    }
    Ok(report)
}
