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
pub mod gguf;
mod gptq;
mod hybrid;
pub mod nq;
mod verify;

pub use fit::requantization;
pub use verify::{Difference, compare};

use crate::checkpoint::Checkpoint;
use crate::durable::{Form, check_destination, parent};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::store::Exactness;
use std::path::Path;

/// The alternatives for a weight whose numbers a format cannot hold.
const OTHERWISE: &str =
    "--requantize rounds them again, and nq quantize --format rounds the source for the format";

/// Options of an export.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExportOptions {
    /// Rounds weights again that the format cannot hold as they are.
    pub requantize: bool,
    /// Types of a GGUF file's tensors.
    pub mix: gguf::Mix,
    /// Replaces an existing destination.
    pub force: bool,
}

/// A weight as written.
#[derive(Clone, Debug, PartialEq)]
pub struct Exported {
    /// Its Hugging Face name, without `.weight`.
    pub name: String,
    /// Its scheme in the source.
    pub from: String,
    /// Its type or scheme in the file.
    pub to: String,
    /// How its numbers in the file relate to those in the source.
    pub change: Change,
    /// Bytes written.
    pub bytes: u64,
}

/// How an export changes a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Changed as much as this [`Exactness`] says.
    Kept(Exactness),
    /// Rounded for the first time: it was unquantized in the source.
    Quantized,
    /// Rounded again: it was quantized in the source.
    Requantized,
}

/// Result of an export.
#[derive(Clone, Debug, Default)]
pub struct ExportReport {
    /// Every matrix, in the order of the model.
    pub weights: Vec<Exported>,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of the weight files, headers included.
    pub file_bytes: u64,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// A format that nq exports to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    /// nq's own folder.
    Nq,
    /// One GGUF file (llama.cpp).
    Gguf,
    /// A folder in compressed-tensors' `pack-quantized` (vLLM, SGLang, transformers).
    CompressedTensors,
    /// A folder in GPTQ version 1.
    Gptq,
    /// A folder in AWQ's `gemm` version.
    Awq,
}

impl ExportFormat {
    /// The packing of a folder format; `None` for nq's own and GGUF.
    fn packing(self) -> Option<&'static folder::Packing> {
        match self {
            ExportFormat::Nq | ExportFormat::Gguf => None,
            ExportFormat::CompressedTensors => Some(&compressed_tensors::PACKING),
            ExportFormat::Gptq => Some(&gptq::PACKING),
            ExportFormat::Awq => Some(&awq::PACKING),
        }
    }

    /// The form of an export in this format: file or folder.
    pub fn form(self) -> Form {
        match self {
            ExportFormat::Gguf => Form::File,
            _ => Form::Folder,
        }
    }

    /// True if its loaders need embedding and head unquantized.
    pub fn dense_ends(self) -> bool {
        self.packing().is_some()
    }
}

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
    check_destination(out, format.form(), options.force)?;
    checkpoint.files().check_apart(out)?;
    let folder = parent(out);
    std::fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, "create", e))?;
    match (format.packing(), format) {
        (Some(packing), _) => folder::export(checkpoint, out, packing, progress),
        (None, ExportFormat::Gguf) => gguf::export(checkpoint, out, options, progress),
        (None, _) => nq::export(checkpoint, out, options, progress),
    }
}
