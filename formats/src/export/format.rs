//! The formats that nq exports to.

use super::packing::Packing;
use super::{awq, compressed_tensors, gptq};
use crate::durable::Form;
use crate::error::{Error, Result};
use std::str::FromStr;

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

impl FromStr for ExportFormat {
    type Err = Error;

    /// Parses [`ExportFormat::word`].
    fn from_str(word: &str) -> Result<Self> {
        let all = [
            Self::Nq,
            Self::Gguf,
            Self::CompressedTensors,
            Self::Gptq,
            Self::Awq,
        ];
        let found = all.into_iter().find(|format| format.word() == word);
        found.ok_or_else(|| Error::Scheme {
            expected: all.map(Self::word).join(", "),
            found: word.to_owned(),
        })
    }
}

impl ExportFormat {
    /// The packing of a folder format; `None` for nq's own and GGUF.
    pub(super) fn packing(self) -> Option<&'static Packing> {
        match self {
            ExportFormat::Nq | ExportFormat::Gguf => None,
            ExportFormat::CompressedTensors => Some(&compressed_tensors::PACKING),
            ExportFormat::Gptq => Some(&gptq::PACKING),
            ExportFormat::Awq => Some(&awq::PACKING),
        }
    }

    /// Its name in commands and reports.
    pub fn word(self) -> &'static str {
        match self {
            ExportFormat::Nq => "nq",
            ExportFormat::Gguf => "gguf",
            ExportFormat::CompressedTensors => "compressed-tensors",
            ExportFormat::Gptq => "gptq",
            ExportFormat::Awq => "awq",
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
