//! SHA-256 of files, for records of where a model comes from.

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::files::{Files, map_file};
use crate::mapping;
use crate::progress::{Progress, Unit};
use bytes::Bytes;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::path::Path;

/// Bytes of a file that are hashed before their memory is given back.
const PIECE: usize = 1 << 24;

/// SHA-256 of `bytes` in lower-case hexadecimal.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// A weight file and its hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashedFile {
    /// Its name in the model's folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of its contents, in lower-case hexadecimal.
    pub sha256: String,
}

/// A hash of a model's weights: SHA-256 over the lines `SHA256  NAME\n` of its weight files in
/// name order, as printed by `sha256sum *.safetensors | sha256sum` (`*.gguf` likewise).
///
/// # Errors
/// [`crate::Error::Io`] if a file cannot be read.
pub fn weights_sha256(checkpoint: &Checkpoint, progress: &dyn Progress) -> Result<String> {
    Ok(combined_sha256(&hashed(checkpoint, |_| None, progress)?))
}

/// The hash of [`weights_sha256`] of weight files in name order.
pub fn combined_sha256(files: &[HashedFile]) -> String {
    let line = |file: &HashedFile| format!("{}  {}\n", file.sha256, file.name);
    let lines: String = files.iter().map(line).collect();
    sha256_hex(lines.as_bytes())
}

/// The weight files in name order. The hub's cache names large files by their hashes, which were compared when they were
/// downloaded; others are read.
///
/// # Errors
/// [`crate::Error::Io`] if a file cannot be read.
pub fn hashed_files(checkpoint: &Checkpoint, progress: &dyn Progress) -> Result<Vec<HashedFile>> {
    let kept = |path: &Path| {
        let contents = std::fs::read_link(path).ok()?;
        let hash = contents.file_name()?.to_str()?.to_owned();
        let is_hash = hash.len() == 64 && hash.chars().all(|c| c.is_ascii_hexdigit());
        (is_hash && contents.parent()?.ends_with("blobs")).then_some(hash)
    };
    hashed(checkpoint, kept, progress)
}

/// The weight files in name order, with the hashes that `kept` knows.
fn hashed(
    checkpoint: &Checkpoint,
    kept: impl Fn(&Path) -> Option<String>,
    progress: &dyn Progress,
) -> Result<Vec<HashedFile>> {
    let files = checkpoint.files();
    let mut contents = Vec::new();
    if let Files::Virtual(_) = files {
        // The other files are made from the weight files, which are not among them.
        let entries = checkpoint.store().entries().into_iter();
        let mut names: BTreeSet<String> = entries.map(|e| e.file).collect();
        // Random weights are in no file.
        names.remove("");
        for name in names {
            let path = files.root().with_file_name(&name);
            let bytes = map_file(&path).map_err(|e| Error::io(&path, "read", e))?;
            contents.push((bytes, kept(&path), name));
        }
    } else {
        let mut names = files.names()?;
        names.retain(|n| n.ends_with(".safetensors") || n.ends_with(".gguf"));
        for name in names {
            contents.push((files.require(&name)?, kept(&files.path(&name)), name));
        }
    }
    let unknown = contents.iter().filter(|c| c.1.is_none());
    let total: usize = unknown.map(|(bytes, ..)| bytes.len()).sum();
    progress.begin("hash source", total as u64, Unit::Bytes);
    // A core hashes about a gigabyte a second: large models have many files.
    let file = |(bytes, kept, name): (Bytes, Option<String>, String)| HashedFile {
        bytes: bytes.len() as u64,
        sha256: kept.unwrap_or_else(|| read(&bytes, progress)),
        name,
    };
    let hashed = contents.into_par_iter().map(file).collect();
    progress.end();
    Ok(hashed)
}

/// The hash of a mapped file.
fn read(bytes: &Bytes, progress: &dyn Progress) -> String {
    let mut hasher = Sha256::new();
    for start in (0..bytes.len()).step_by(PIECE) {
        let piece = bytes.slice(start..(start + PIECE).min(bytes.len()));
        hasher.update(&piece);
        mapping::release(&piece);
        progress.advance(piece.len() as u64);
    }
    hex(&hasher.finalize())
}
