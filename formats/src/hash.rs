//! SHA-256 of files, for records of where a model comes from.

use crate::error::Result;
use crate::files::Files;
use crate::mapping;
use crate::progress::{Progress, Unit};
use bytes::Bytes;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// Bytes of a file that are hashed before their memory is given back.
const PIECE: usize = 1 << 24;

/// SHA-256 of `bytes` in lower-case hexadecimal.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// A hash of a model's weights: SHA-256 over the lines `SHA256  NAME\n` of its weight files in
/// name order, as printed by `sha256sum *.safetensors | sha256sum` (`*.gguf` likewise).
///
/// # Errors
/// [`crate::Error::Io`] if a file cannot be read.
pub fn weights_sha256(files: &Files, progress: &dyn Progress) -> Result<String> {
    let mut names = files.names()?;
    names.retain(|n| n.ends_with(".safetensors") || n.ends_with(".gguf"));
    let mut contents = Vec::new();
    for name in names {
        contents.push((files.require(&name)?, name));
    }
    let total: usize = contents.iter().map(|(b, _)| b.len()).sum();
    progress.begin("hash source", total as u64, Unit::Bytes);
    // A core hashes about a gigabyte a second: large models have many files.
    let line = |(bytes, name): &(Bytes, String)| {
        let mut hasher = Sha256::new();
        for start in (0..bytes.len()).step_by(PIECE) {
            let piece = bytes.slice(start..(start + PIECE).min(bytes.len()));
            hasher.update(&piece);
            mapping::release(&piece);
            progress.advance(piece.len() as u64);
        }
        format!("{}  {name}\n", hex(&hasher.finalize()))
    };
    let lines: Vec<String> = contents.par_iter().map(line).collect();
    progress.end();
    Ok(sha256_hex(lines.concat().as_bytes()))
}
