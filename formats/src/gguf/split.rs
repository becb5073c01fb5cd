//! Sets of GGUF files that hold one model together.

use super::file::GgufFile;
use super::value::malformed;
use crate::error::{Error, Result};
use crate::files::Files;

/// The end of the names of GGUF files.
pub(super) const SUFFIX: &str = ".gguf";

/// The name of one file of a split set: `STEM-00001-of-00003.gguf`.
pub(super) struct Split {
    pub(super) stem: String,
    number: u64, // from 0
    pub(super) count: u64,
}

impl Split {
    pub(super) fn parse(name: &str) -> Option<Split> {
        let (rest, count) = name.strip_suffix(SUFFIX)?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let split = Split {
            stem: stem.into(),
            number: number.parse::<u64>().ok()?.checked_sub(1)?,
            count: count.parse().ok()?,
        };
        (split.number < split.count && split.name(split.number) == name).then_some(split)
    }

    fn name(&self, number: u64) -> String {
        format!(
            "{}-{:05}-of-{:05}{SUFFIX}",
            self.stem,
            number + 1,
            self.count
        )
    }
}

/// Opens the file `name` and, if it is one of several, the others in order.
pub(super) fn open_set(folder: &Files, name: &str) -> Result<Vec<GgufFile>> {
    const COUNT: &str = "split.count";
    const NUMBER: &str = "split.no";
    const TENSORS: &str = "split.tensors.count";
    let parse = |name: &str| GgufFile::parse(&folder.path(name), folder.require(name)?);
    let given = parse(name)?;
    let count = given.u64(COUNT)?.unwrap_or(1);
    if count <= 1 {
        return Ok(vec![given]);
    }
    let named = Split::parse(name).filter(|s| s.count == count);
    let Some(split) = named else {
        let expected = format!("a name ending in -00001-of-{count:05}{SUFFIX}, as {COUNT} says");
        return Err(malformed(given.path(), "file name", expected, name.into()));
    };
    let mut files = Vec::new();
    for i in 0..count {
        let shard = split.name(i);
        let file = if i == split.number {
            given.clone()
        } else {
            match folder.get(&shard)? {
                Some(bytes) => GgufFile::parse(&folder.path(&shard), bytes)?,
                None => {
                    return Err(Error::Missing {
                        path: folder.root(),
                        what: format!("{shard}, of the set of {name}"),
                    });
                }
            }
        };
        for (key, expected) in [(COUNT, count), (NUMBER, i)] {
            let found = file.required(key, file.u64(key)?)?;
            if found != expected {
                let (expected, found) = (expected.to_string(), found.to_string());
                return Err(malformed(file.path(), key, expected, found));
            }
        }
        files.push(file);
    }
    let total: usize = files.iter().map(|f| f.tensors().len()).sum();
    let first = &files[0];
    match first.u64(TENSORS)? {
        Some(said) if said != total as u64 => {
            let found = format!("{total} in the {count} files");
            Err(malformed(first.path(), TENSORS, said.to_string(), found))
        }
        _ => Ok(files),
    }
}
