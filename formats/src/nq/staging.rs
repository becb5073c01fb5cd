//! The folder of unfinished work, beside its destination:
//!
//! ```text
//! lock           held while a process works here
//! plan.json      what is being made; another plan cannot be resumed from this
//! state.json     the pipeline's own small state
//! steps/NAME.safetensors   finished steps, each written whole
//! steps-N/       the same of another version of the result, kept meanwhile
//! folder/        the result while it is assembled
//! finished       hash of the result's config.json, written just before the final rename
//! ```

use crate::durable::{list, parent};
use crate::error::{Error, Result};
use crate::files::CONFIG;
use crate::hash;
use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

pub(super) const FOLDER: &str = "folder";
pub(super) const PLAN: &str = "plan.json";
pub(super) const STATE: &str = "state.json";
pub(super) const FINISHED: &str = "finished";
pub(super) const STEP_SUFFIX: &str = ".safetensors";
const STEPS: &str = "steps";
const LOCK: &str = "lock";

/// The folder of unfinished work for `dest`.
pub fn staging(dest: &Path) -> PathBuf {
    let mut name = dest.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    parent(dest).join(name)
}

/// The folder of the set of steps with this number.
pub(super) fn set_folder(staging: &Path, set: usize) -> PathBuf {
    match set {
        0 => staging.join(STEPS),
        n => staging.join(format!("{STEPS}-{n}")),
    }
}

/// The folders of all sets of steps, by number.
pub(super) fn sets(staging: &Path) -> Result<Vec<(usize, PathBuf)>> {
    let mut sets = Vec::new();
    if !staging.exists() {
        return Ok(sets);
    }
    for entry in list(staging)? {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|n| n.strip_prefix(STEPS));
        let set = match rest {
            Some("") => Some(0),
            Some(rest) => rest.strip_prefix('-').and_then(|n| n.parse().ok()),
            None => None,
        };
        sets.extend(set.map(|n| (n, entry.path())));
    }
    sets.sort();
    Ok(sets)
}

/// Number of files that a resumed run would use, and bytes of the largest set of steps, from which
/// one result may be made.
pub(super) fn staged_work(staging: &Path) -> Result<(usize, u64)> {
    let mut count = usize::from(staging.join(STATE).exists());
    let mut most = 0;
    for (_, steps) in sets(staging)? {
        let mut bytes = 0;
        for entry in list(&steps)? {
            if entry.file_name().to_string_lossy().ends_with(STEP_SUFFIX) {
                let metadata = entry.metadata();
                bytes += metadata
                    .map_err(|e| Error::io(entry.path(), "read", e))?
                    .len();
                count += 1;
            }
        }
        most = most.max(bytes);
    }
    Ok((count, most))
}

/// True if the folder at `dest` is the result that the work in `staging` was about to put there.
pub(super) fn is_complete(dest: &Path, staging: &Path) -> Result<bool> {
    let read = |path: PathBuf| match fs::read(&path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(path, "read", e)),
    };
    let marker = read(staging.join(FINISHED))?;
    let config = read(dest.join(CONFIG))?;
    Ok(match (marker, config) {
        (Some(marker), Some(config)) => marker == hash::sha256_hex(&config).as_bytes(),
        _ => false,
    })
}

/// True if a process is working in the folder `staging`.
pub fn at_work(staging: &Path) -> bool {
    let lock = File::open(staging.join(LOCK));
    lock.is_ok_and(|f| matches!(f.try_lock_shared(), Err(fs::TryLockError::WouldBlock)))
}

pub(super) fn lock(staging: &Path) -> Result<File> {
    let path = staging.join(LOCK);
    let file = File::create(&path).map_err(|e| Error::io(&path, "create", e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(Error::Exists {
            path: staging.into(),
            what: "another process is at work here".into(),
        }),
        Err(fs::TryLockError::Error(e)) => Err(Error::io(path, "lock", e)),
    }
}

pub(super) fn read_json(path: &Path) -> Result<Option<Value>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(path, "read", e)),
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|e| Error::Malformed {
            path: path.into(),
            what: "contents".into(),
            expected: "JSON".into(),
            found: e.to_string(),
        })
}

pub(super) fn pretty(value: &Value) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(value).expect("string keys");
    text.push(b'\n');
    text
}

pub(super) fn create(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| Error::io(folder, "create", e))
}

/// Removes the staging folder of a finished run. The marker is removed last, so that a run killed
/// meanwhile is still known to be finished.
pub(super) fn discard(staging: &Path) -> Result<()> {
    remove(&staging.join(FOLDER))?;
    for (_, steps) in sets(staging)? {
        remove(&steps)?;
    }
    for name in [STATE, PLAN, LOCK, FINISHED] {
        remove_file(&staging.join(name))?;
    }
    remove(staging)
}

/// Removes a file, if it exists.
pub(super) fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path, "remove", e)),
        _ => Ok(()),
    }
}

/// Removes a folder and everything in it, if it exists.
pub(super) fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(folder, "remove", e)),
        _ => Ok(()),
    }
}
