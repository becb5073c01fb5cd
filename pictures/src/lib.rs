//! Pictures for models that see: from the bytes of a file to the patches that a tower takes.
//!
//! [`header`] reads format and size, which is enough to say how many tokens a picture takes ([`grid`]); [`patches`]
//! decodes it, brings it to the model's size and cuts it. Every value is that of transformers' published processor
//! (`Qwen2VLImageProcessor`) for the same pixels. Pixels of JPEG files are within four levels of libjpeg's, next to sharp
//! edges of halved colours within forty.
//!
//! Files are hostile: formats are told by content, [`Limits`] are held against what a header says before memory
//! follows, and a file that ends early is an error, never half a picture.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.

#![forbid(unsafe_code)]

mod decode;
mod error;
mod example;
mod format;
mod patches;
mod resize;

pub use decode::{Header, Limits, Pixels, decode, header};
pub use error::{Error, Result};
pub use example::example;
pub use format::PictureFormat;
pub use patches::{grid, key, patches};
