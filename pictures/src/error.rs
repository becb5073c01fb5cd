//! The one error type of this crate.

use crate::format::PictureFormat;

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a picture is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The content is of none of the formats that are read.
    #[error("no picture: expected PNG, JPEG, WebP, GIF or BMP, found {0}")]
    Format(String),
    /// A file longer than the limit.
    #[error("a picture of {found} bytes; the limit is {limit}")]
    Bytes {
        /// Bytes of the file.
        found: usize,
        /// Bytes at most.
        limit: usize,
    },
    /// More pixels than the limit, by the file's header.
    #[error("a picture of {width} x {height} pixels; the limit is {limit} pixels")]
    Pixels {
        /// Pixels of a row.
        width: u32,
        /// Number of rows.
        height: u32,
        /// Pixels at most.
        limit: u64,
    },
    /// More memory than a picture may take while it is decoded, by the file's header.
    #[error("a picture that takes {found} bytes while it is decoded; the limit is {limit}")]
    Memory {
        /// Bytes that the decoder would fill.
        found: u64,
        /// Bytes at most.
        limit: u64,
    },
    /// Sides that differ too much.
    #[error("a picture of {width} x {height} pixels: one side may be {limit} times the other")]
    Ratio {
        /// Pixels of a row.
        width: u32,
        /// Number of rows.
        height: u32,
        /// Times at most.
        limit: u32,
    },
    /// A file that the decoder refuses.
    #[error("{format} picture: {reason}")]
    Decoding {
        /// Its format, by its content.
        format: PictureFormat,
        /// What the decoder says.
        reason: String,
    },
    /// A JPEG file without its end: the decoder would fill up what is missing.
    #[error("JPEG picture: the file ends before the picture does")]
    Truncated,
    /// Whoever asked wants it no longer, or its time is over.
    #[error("the picture was not decoded in time")]
    Stopped,
}
