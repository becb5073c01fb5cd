//! What an export did with each weight.

use crate::exactness::Exactness;

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
