//! What earlier runs of `nq rank` measured, in a folder whose size is bounded.

use anyhow::{Context, bail};
use nq_formats::Progress;
use nq_formats::durable::write_bytes;
use nq_formats::hash::sha256_hex;
use nq_formats::human_bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Most bytes of a figure's file.
const MOST: u64 = 16 << 20;

/// A folder of figures and log-probabilities, under names made of the keys of what they depend on.
pub(super) struct RankCache {
    folder: PathBuf,
    /// Most bytes of all files.
    limit: u64,
    /// When this run began: what it has used since stays.
    begun: SystemTime,
}

/// A value with its whole key, as JSON.
#[derive(Serialize, Deserialize)]
struct Entry<T> {
    key: String,
    value: T,
}

impl RankCache {
    /// The folder, which is made if it is not there.
    pub(super) fn open(folder: PathBuf, limit: u64) -> anyhow::Result<Self> {
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let begun = SystemTime::now();
        Ok(RankCache {
            folder,
            limit,
            begun,
        })
    }

    /// The file for what depends on `key`.
    pub(super) fn path(&self, key: &str, extension: &str) -> PathBuf {
        let hash = &sha256_hex(key.as_bytes())[..32];
        self.folder.join(format!("{hash}.{extension}"))
    }

    /// The value that was kept for `key`. One that cannot be used is noted, and will be measured again.
    pub(super) fn read<T: DeserializeOwned>(
        &self,
        key: &str,
        progress: &dyn Progress,
    ) -> Option<T> {
        let path = self.path(key, "json");
        if !path.exists() {
            return None;
        }
        match read(&path, key) {
            Ok(value) => {
                self.used(&path);
                Some(value)
            }
            Err(e) => {
                progress.note(&format!("{}: {e:#}; measuring again", path.display()));
                None
            }
        }
    }

    /// Keeps a value, whole or not at all, and returns it.
    pub(super) fn keep<T: Serialize>(&self, key: &str, value: T) -> anyhow::Result<T> {
        let path = self.path(key, "json");
        let (key, kept) = (key.to_owned(), &value);
        let json = serde_json::to_string(&Entry { key, value: kept })?;
        let sum = sha256_hex(json.as_bytes());
        write_bytes(&path, format!("{sum}\n{json}").as_bytes())?;
        Ok(value)
    }

    /// Marks a file as used now, so that others are removed before it.
    pub(super) fn used(&self, path: &Path) {
        // Where this fails, it may be removed too early and is then measured again.
        let _ = File::open(path).and_then(|f| f.set_modified(SystemTime::now()));
    }

    /// Makes room for `needed` bytes by removing what was not used for longest, nothing that this run has used.
    ///
    /// # Errors
    /// If they do not fit beside what this run uses.
    pub(super) fn make_room(&self, needed: u64) -> anyhow::Result<()> {
        let mut files = Vec::new();
        for entry in
            fs::read_dir(&self.folder).with_context(|| self.folder.display().to_string())?
        {
            let (path, metadata) = entry.and_then(|e| Ok((e.path(), e.metadata()?)))?;
            if metadata.is_file() {
                files.push((metadata.modified()?, metadata.len(), path));
            }
        }
        files.sort();
        let mut total: u64 = files.iter().map(|f| f.1).sum();
        for (_, bytes, path) in files.iter().filter(|f| f.0 < self.begun) {
            if total + needed <= self.limit {
                break;
            }
            fs::remove_file(path).with_context(|| path.display().to_string())?;
            total -= bytes;
        }
        if total + needed > self.limit {
            bail!(
                "the source's log-probabilities: expected at most {} in {} (--keep), found {} for this text: \
                 a smaller --windows needs less",
                human_bytes(self.limit),
                self.folder.display(),
                human_bytes(total + needed)
            );
        }
        Ok(())
    }
}

fn read<T: DeserializeOwned>(path: &Path, key: &str) -> anyhow::Result<T> {
    let bytes = crate::texts::read_bounded(File::open(path)?, MOST)?;
    let text = String::from_utf8(bytes)?;
    let (sum, json) = text.split_once('\n').context("expected a hash and JSON")?;
    if sha256_hex(json.as_bytes()) != sum {
        bail!("expected JSON of the hash before it, found other JSON");
    }
    let entry: Entry<T> = serde_json::from_str(json)?;
    if entry.key != key {
        bail!(
            "expected figures of {key:?}, found those of {:?}",
            entry.key
        );
    }
    Ok(entry.value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn figures_are_read_as_they_were_written_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let kept = RankCache::open(folder.path().join("rank"), 1000).unwrap();
        assert_eq!(kept.read::<Vec<f64>>("a", &()), None);
        let value = vec![0.1, 1e-300, 3.0];
        kept.keep("a", value.clone()).unwrap();
        assert_eq!(kept.read("a", &()), Some(value.clone()));
        assert_eq!(kept.read::<Vec<f64>>("b", &()), None);
        // Another key's figures, changed figures, and the beginning of a file.
        fs::copy(kept.path("a", "json"), kept.path("b", "json")).unwrap();
        assert_eq!(kept.read::<Vec<f64>>("b", &()), None);
        let text = fs::read_to_string(kept.path("a", "json")).unwrap();
        for other in [
            text.replace("0.1", "0.2"),
            text[..text.len() - 3].into(),
            String::new(),
        ] {
            fs::write(kept.path("a", "json"), other).unwrap();
            assert_eq!(kept.read::<Vec<f64>>("a", &()), None);
        }
    }

    #[test]
    fn room_is_made_by_removing_what_was_used_longest_ago() {
        let folder = tempfile::tempdir().unwrap();
        let kept = RankCache::open(folder.path().to_owned(), 1000).unwrap();
        for (name, age) in [("old", 300), ("older", 500), ("used", 400)] {
            let path = folder.path().join(name);
            fs::write(&path, [0; 300]).unwrap();
            let then = kept.begun - Duration::from_secs(age);
            File::open(&path).unwrap().set_modified(then).unwrap();
        }
        kept.used(&folder.path().join("used"));
        let there = |name: &str| folder.path().join(name).exists();
        kept.make_room(100).unwrap();
        assert!(there("old") && there("older"));
        kept.make_room(400).unwrap();
        assert!(there("old") && !there("older") && there("used"));
        kept.make_room(700).unwrap();
        assert!(!there("old") && there("used"));
        let error = kept.make_room(701).unwrap_err().to_string();
        assert!(error.contains("--windows"), "{error}");
    }
}
