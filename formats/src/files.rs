//! Where a checkpoint's files are: a folder, the program itself, or a format's own metadata.

use crate::error::{Error, Result};
use bytes::Bytes;
use memmap2::Mmap;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The model's shape and quantization.
pub const CONFIG: &str = "config.json";
/// Sampling defaults.
pub const GENERATION_CONFIG: &str = "generation_config.json";

/// Where a checkpoint's files come from.
#[derive(Clone, Debug)]
pub enum Files {
    /// A folder on disk; files are memory-mapped.
    Folder(PathBuf),
    /// Files built into the program: (name, contents), under a label for messages.
    Embedded {
        /// Stands for the folder in messages.
        label: &'static str,
        /// File names and contents.
        files: &'static [(&'static str, &'static [u8])],
    },
    /// Files that a checkpoint format makes from its own metadata.
    Virtual(Arc<dyn VirtualFiles>),
}

/// Files that are nowhere on disk: those of a format that keeps everything in its weight file.
pub trait VirtualFiles: fmt::Debug + Send + Sync {
    /// Stands for the folder in messages.
    fn root(&self) -> PathBuf;

    /// Names of all files.
    fn names(&self) -> Vec<String>;

    /// The contents of `name`, or `None` if there is no such file.
    ///
    /// # Errors
    /// What is wrong with the metadata that it is made from.
    fn get(&self, name: &str) -> Result<Option<Bytes>>;
}

impl Files {
    /// The path of `name`, for messages and, in a folder, for opening. Of virtual files, that of the
    /// file that they are made from.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            Files::Folder(dir) => dir.join(name),
            Files::Embedded { label, .. } => Path::new(label).join(name),
            Files::Virtual(files) => files.root(),
        }
    }

    /// The folder or label itself.
    pub fn root(&self) -> PathBuf {
        match self {
            Files::Folder(dir) => dir.clone(),
            Files::Embedded { label, .. } => label.into(),
            Files::Virtual(files) => files.root(),
        }
    }

    /// Refuses to write to `dest` what is read from there: the source would be lost.
    ///
    /// # Errors
    /// [`Error::Exists`].
    pub fn check_apart(&self, dest: &Path) -> Result<()> {
        let root = match self {
            Files::Embedded { .. } => return Ok(()),
            Files::Folder(_) | Files::Virtual(_) => self.root(),
        };
        match (root.canonicalize(), dest.canonicalize()) {
            (Ok(a), Ok(b)) if a == b => Err(Error::Exists {
                path: dest.into(),
                what: "expected another place than the source's, found the source itself".into(),
            }),
            _ => Ok(()),
        }
    }

    /// The contents of `name`, or `None` if there is no such file. Disk files are
    /// mapped, not read.
    ///
    /// # Errors
    /// [`Error::Io`] if the file exists but cannot be opened or mapped; what is wrong with
    /// the metadata that a virtual file is made from.
    pub fn get(&self, name: &str) -> Result<Option<Bytes>> {
        match self {
            Files::Embedded { files, .. } => Ok(files
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, b)| Bytes::from_static(b))),
            Files::Virtual(files) => files.get(name),
            Files::Folder(dir) => {
                let path = dir.join(name);
                match map_file(&path) {
                    Ok(bytes) => Ok(Some(bytes)),
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
                    Err(e) => Err(Error::io(path, "open", e)),
                }
            }
        }
    }

    /// As [`Files::get`], with an error where the file is absent.
    ///
    /// # Errors
    /// [`Error::Missing`] naming the file.
    pub fn require(&self, name: &str) -> Result<Bytes> {
        self.get(name)?.ok_or_else(|| Error::Missing {
            path: self.root(),
            what: name.into(),
        })
    }

    /// Names of all files, sorted.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder cannot be listed.
    pub fn names(&self) -> Result<Vec<String>> {
        let mut names: Vec<String> = match self {
            Files::Embedded { files, .. } => files.iter().map(|(n, _)| (*n).into()).collect(),
            Files::Virtual(files) => files.names(),
            Files::Folder(dir) => std::fs::read_dir(dir)
                .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
                .map_err(|e| Error::io(dir, "list", e))?
                .into_iter()
                .filter_map(|e| e.file_name().into_string().ok())
                .collect(),
        };
        names.sort();
        Ok(names)
    }
}

/// Maps a whole file read-only.
///
/// # Errors
/// If it is no regular file or cannot be opened.
pub fn map_file(path: &Path) -> std::io::Result<Bytes> {
    // Before opening: opening a pipe would wait for a writer.
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        let message = "not a regular file";
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            message,
        ));
    }
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::new()); // an empty map is an error on some systems
    }
    // SAFETY: the map is read-only and private to this process's view. As with every
    // memory-mapped checkpoint, a file truncated by another process while it is in use
    // raises a signal; nq never writes into an existing file, it renames whole new ones.
    let map = unsafe { Mmap::map(&file)? };
    Ok(crate::mapping::share(map))
}
