//! Which experts of a mixture texts chose, kept between runs: a model whose experts do not all have room on the GPU begins
//! with those there that were chosen most (`nq_runtime::interface::HeatKeeper`).
//!
//! A file for each model in the cache folder, named by a hash of what tells its weights from others; it appears whole or not
//! at all, and is used only if its size and digest are right. It says nothing of a text but which experts it used, and
//! nobody but its owner may read it.

use crate::names::cache_dir;
use crate::terminal::Terminal;
use nq_formats::durable;
use nq_formats::hash::sha256_hex;
use nq_formats::{Checkpoint, Progress};
use nq_runtime::Engine;
use nq_runtime::interface::HeatKeeper;
use nq_serve::about;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Begins each file; the last digit is the version of the format. Behind it stands the SHA-256 of the model's identity and
/// of the values, in hexadecimal digits, then the values, f32 with the lowest byte first.
const MAGIC: &[u8; 8] = b"nq-heat1";
const DIGEST: usize = 64;
/// More heat than any number of choices gives an expert (`residency/policy.rs`).
const MOST: f32 = 1e4;
/// Files that are kept; the oldest go.
const MOST_FILES: usize = 64;

/// Lets `engine` begin with the experts that texts chose in earlier runs of the model, and keep what they choose now.
///
/// # Errors
/// Errors of the device.
pub(crate) fn keep(
    checkpoint: &Checkpoint,
    engine: &dyn Engine,
    progress: &dyn Progress,
) -> nq_runtime::Result<()> {
    if engine.expert_choices().is_none() {
        return Ok(());
    }
    let file = || -> anyhow::Result<HeatFile> {
        let (folder, identity) = (cache_dir()?, about::identity(checkpoint)?);
        Ok(HeatFile::new(&folder.join("experts"), &identity))
    };
    match file() {
        Ok(file) => engine.keep_heat(Box::new(file)),
        Err(why) => {
            progress.note(&format!(
                "which experts texts use is not kept for the next run: {why:#}"
            ));
            Ok(())
        }
    }
}

/// The file of a model.
struct HeatFile {
    path: PathBuf,
    identity: String,
}

impl HeatFile {
    /// That of the model with this identity, in `folder`.
    fn new(folder: &Path, identity: &str) -> Self {
        let identity = sha256_hex(identity.as_bytes());
        HeatFile {
            path: folder.join(format!("{identity}.heat")),
            identity,
        }
    }

    fn digest(&self, values: &[u8]) -> String {
        sha256_hex(&[self.identity.as_bytes(), values].concat())
    }

    /// The values of the file, if there is one.
    fn read(&self, experts: usize) -> io::Result<Option<Vec<f32>>> {
        let mut file = match File::open(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let (expected, found) = (MAGIC.len() + DIGEST + 4 * experts, file.metadata()?.len());
        let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        if found != expected as u64 {
            return Err(wrong(format!("expected {expected} bytes, found {found}")));
        }
        let mut bytes = vec![0; expected];
        file.read_exact(&mut bytes)?;
        let (magic, rest) = bytes.split_at(MAGIC.len());
        let (digest, values) = rest.split_at(DIGEST);
        if magic != MAGIC || digest != self.digest(values).as_bytes() {
            return Err(wrong(
                "expected version 1 with a digest of its values".into(),
            ));
        }
        let (values, _) = values.as_chunks();
        let values: Vec<f32> = values.iter().map(|&v| f32::from_le_bytes(v)).collect();
        match values.iter().find(|v| !(0.0..=MOST).contains(*v)) {
            None => Ok(Some(values)),
            Some(v) => Err(wrong(format!("expected heat of 0 to {MOST}, found {v}"))),
        }
    }

    fn write(&self, heat: &[f32]) -> nq_formats::Result<()> {
        let values: Vec<u8> = heat.iter().flat_map(|v| v.to_le_bytes()).collect();
        let digest = self.digest(&values);
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let made = fs::create_dir_all(folder);
        made.map_err(|e| nq_formats::Error::io(folder, "create", e))?;
        durable::write_private(&self.path, |sink| {
            sink.write(MAGIC)?;
            sink.write(digest.as_bytes())?;
            sink.write(&values)
        })?;
        self.forget_oldest(folder);
        Ok(())
    }

    /// Removes the oldest files of `folder`, if there are too many; what cannot be removed may stay.
    fn forget_oldest(&self, folder: &Path) {
        let of_heat = |path: &PathBuf| path.extension().is_some_and(|e| e == "heat");
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path()).filter(of_heat);
        let dated = |path: PathBuf| Some((path.metadata().ok()?.modified().ok()?, path));
        let mut files: Vec<_> = paths.filter_map(dated).collect();
        files.sort();
        let many = files.len().saturating_sub(MOST_FILES);
        for (_, path) in files.iter().filter(|f| f.1 != self.path).take(many) {
            let _ = fs::remove_file(path);
        }
    }
}

impl HeatKeeper for HeatFile {
    fn kept(&self, experts: usize) -> Option<Vec<f32>> {
        let read = self.read(experts);
        read.unwrap_or_else(|why| {
            Terminal::new().note(&format!("{}: not used: {why}", self.path.display()));
            None
        })
    }

    fn keep(&self, heat: &[f32]) {
        if let Err(why) = self.write(heat) {
            Terminal::new().note(&format!("which experts texts use is not kept: {why}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_comes_back_and_what_is_not_whole_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("experts");
        let file = HeatFile::new(&folder, "a model");
        assert!(file.read(4).unwrap().is_none());
        let heat = [0.0, 1.5, MOST, 3.25];
        file.keep(&heat);
        assert_eq!(file.kept(4).as_deref(), Some(&heat[..]));
        // Of a model of another shape, or another model in its place.
        assert!(file.read(5).is_err());
        let other = HeatFile::new(&folder, "another model");
        assert!(other.read(4).unwrap().is_none());
        fs::copy(&file.path, &other.path).unwrap();
        assert!(other.read(4).is_err());
        // Each byte counts, and so does each bit of what is written over.
        let whole = fs::read(&file.path).unwrap();
        for at in [0, 7, 8, 71, 72, whole.len() - 1] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&file.path, bytes).unwrap();
            assert!(file.read(4).is_err(), "{at}");
        }
        fs::write(&file.path, &whole[..whole.len() - 1]).unwrap();
        assert!(file.read(4).is_err() && file.kept(4).is_none());
        // Values that no choices give are not taken, whoever wrote them.
        for heat in [f32::NAN, -1.0, 2.0 * MOST, f32::INFINITY] {
            file.keep(&[heat; 4]);
            assert!(file.read(4).is_err(), "{heat}");
        }
    }

    #[test]
    fn old_files_go() {
        let folder = tempfile::tempdir().unwrap();
        let file = |n: usize| HeatFile::new(folder.path(), &n.to_string());
        for n in 0..MOST_FILES + 3 {
            file(n).keep(&[1.0]);
        }
        let left = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, MOST_FILES);
        assert!(file(MOST_FILES + 2).kept(1).is_some());
    }
}
