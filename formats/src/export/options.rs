//! Settings of an export.

use super::mix::Mix;

/// Options of an export.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExportOptions {
    /// Rounds weights again that the format cannot hold as they are.
    pub requantize: bool,
    /// Types of a GGUF file's tensors.
    pub mix: Mix,
    /// Replaces an existing destination.
    pub force: bool,
}

/// The alternatives for a weight whose numbers a format cannot hold.
pub(super) const OTHERWISE: &str =
    "--requantize rounds them again, and nq quantize --format rounds the source for the format";
