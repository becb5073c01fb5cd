//! Files and folders that appear whole or not at all, and outlast a crash.

use crate::error::{Error, Result};
use crate::files::CONFIG;
use rustix::fs::{Access, CWD, RenameFlags, access, renameat_with, statvfs};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Writes `path` through a temporary file beside it: synced, then renamed over any old one.
///
/// # Errors
/// [`Error::Space`] if the disk is full, other [`Error::Io`], or what `fill` returns; the
/// temporary file is then removed and an old file is untouched.
pub fn write_file(path: &Path, fill: impl FnOnce(&mut Sink) -> Result<()>) -> Result<()> {
    let folder = parent(path);
    let temporary = tempfile::Builder::new()
        .prefix(".nq-")
        .suffix(".tmp")
        .permissions(permissions(0o666))
        .tempfile_in(&folder)
        .map_err(|e| Error::io(path, "create", e))?;
    let mut sink = Sink::new(temporary.as_file().try_clone(), path)?;
    fill(&mut sink)?;
    sink.finish()?;
    let renamed = temporary.persist(path);
    renamed.map_err(|e| Error::io(path, "rename into place", e.error))?;
    sync_folder(&folder)
}

/// As [`write_file`], with the contents at hand.
///
/// # Errors
/// As [`write_file`].
pub fn write_bytes(path: &Path, contents: &[u8]) -> Result<()> {
    write_file(path, |sink| sink.write(contents))
}

/// What other users may read is the umask's matter, not the temporary file's.
fn permissions(mode: u32) -> fs::Permissions {
    use std::os::unix::fs::PermissionsExt;
    fs::Permissions::from_mode(mode)
}

/// A folder in `parent` to be renamed into place; removed when dropped before that.
pub(crate) fn temporary_folder(parent: &Path) -> Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix(".nq-")
        .suffix(".tmp")
        .permissions(permissions(0o777))
        .tempdir_in(parent)
        .map_err(|e| Error::io(parent, "create a folder in", e))
}

/// A file being written, whose errors name it.
pub struct Sink {
    path: PathBuf,
    file: BufWriter<File>,
    written: u64,
}

impl Sink {
    fn new(file: io::Result<File>, path: &Path) -> Result<Self> {
        let file = file.map_err(|e| Error::io(path, "create", e))?;
        Ok(Sink {
            path: path.into(),
            file: BufWriter::with_capacity(1 << 20, file),
            written: 0,
        })
    }

    /// Appends `bytes`.
    ///
    /// # Errors
    /// [`Error::Space`] if the disk is full, or [`Error::Io`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.written += bytes.len() as u64;
        self.file
            .write_all(bytes)
            .map_err(|e| self.error("write", e))
    }

    /// Bytes written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    fn finish(mut self) -> Result<()> {
        self.file.flush().map_err(|e| self.error("write", e))?;
        let synced = self.file.get_ref().sync_all();
        synced.map_err(|e| self.error("sync", e))
    }

    fn error(&self, action: &'static str, e: io::Error) -> Error {
        match e.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Error::Space {
                path: self.path.clone(),
                needed: self.written,
                available: available(&parent(&self.path)).unwrap_or(0),
            },
            _ => Error::io(&self.path, action, e),
        }
    }
}

/// The folder that holds `path`.
pub(crate) fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(p) if p != Path::new("") => p.into(),
        _ => ".".into(),
    }
}

/// Makes the renames and new files of a folder outlast a crash.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    let synced = File::open(folder).and_then(|f| f.sync_all());
    synced.map_err(|e| Error::io(folder, "sync", e))
}

/// What is to be written to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// One file.
    File,
    /// A model's folder.
    Folder,
}

/// Refuses a destination that something stands at. With `force` it may be replaced, but only by
/// its like: a file by a file; by a folder an empty one, or one that holds a model (a config.json)
/// and no other folders. So a mistyped destination costs nobody a folder of other things.
///
/// # Errors
/// [`Error::Exists`], or [`Error::Io`] for a folder that cannot be listed.
pub fn check_destination(path: &Path, form: Form, force: bool) -> Result<()> {
    if fs::symlink_metadata(path).is_err() {
        return Ok(());
    }
    let refused = |what: String| {
        let path = path.into();
        Err(Error::Exists { path, what })
    };
    if !force {
        return refused("already there; --force replaces it once the new one is whole".into());
    }
    match (form, path.is_dir()) {
        (Form::File, false) => Ok(()),
        (Form::File, true) => refused("expected a file to replace, found a folder".into()),
        (Form::Folder, false) if path.exists() => {
            refused("expected a model's folder to replace, found a file".into())
        }
        // A link to nowhere.
        (Form::Folder, false) => Ok(()),
        (Form::Folder, true) => match foreign_entry(path)? {
            None => Ok(()),
            Some(found) => refused(format!(
                "expected a model's folder to replace (a config.json, no folders within) or an \
                 empty one, found {found}"
            )),
        },
    }
}

/// What shows that a folder is not just a model's; `None` if nothing does.
fn foreign_entry(folder: &Path) -> Result<Option<String>> {
    let list = || -> io::Result<Option<String>> {
        let (mut model, mut first) = (false, None);
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() {
                return Ok(Some(format!("the folder {name}")));
            }
            model |= name == CONFIG;
            first.get_or_insert(name);
        }
        Ok(first.filter(|_| !model))
    };
    list().map_err(|e| Error::io(folder, "list", e))
}

/// Bytes that may still be written to the file system of `folder`, or, if that does not exist
/// yet, of the folder it would be in.
///
/// # Errors
/// [`Error::Io`] if the system does not say.
pub fn available(folder: &Path) -> Result<u64> {
    let stat =
        statvfs(existing(folder)).map_err(|e| Error::io(folder, "ask for free space", e.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// `folder`, or the nearest folder above it that exists.
fn existing(folder: &Path) -> PathBuf {
    let mut existing = folder.to_owned();
    while !existing.exists() && existing != parent(&existing) {
        existing = parent(&existing);
    }
    existing
}

/// Checks that files can be made in `folder`, or, if that does not exist yet, folders in the nearest
/// one above it that does: by permissions and by how the file system is mounted.
///
/// # Errors
/// [`Error::Io`] naming the folder that exists.
pub fn check_writable(folder: &Path) -> Result<()> {
    let existing = existing(folder);
    let failed = |e: io::Error| Error::io(&existing, "write to", e);
    if !existing.is_dir() {
        return Err(failed(io::ErrorKind::NotADirectory.into()));
    }
    access(&existing, Access::WRITE_OK | Access::EXEC_OK).map_err(|e| failed(e.into()))
}

/// Checks that `needed` bytes fit on the file system of `folder`.
///
/// # Errors
/// [`Error::Space`] if not.
pub fn check_space(folder: &Path, needed: u64) -> Result<()> {
    let available = available(folder)?;
    if available < needed {
        return Err(Error::Space {
            path: folder.into(),
            needed,
            available,
        });
    }
    Ok(())
}

/// Renames the folder `new` to `dest`. A folder already at `dest` is exchanged with it in
/// one step where the system can, and is afterwards at `new`.
///
/// # Errors
/// [`Error::Io`]; `dest` is then as it was.
pub(crate) fn rename_folder(new: &Path, dest: &Path) -> Result<()> {
    let failed = |e: io::Error| Error::io(dest, "rename into place", e);
    if fs::symlink_metadata(dest).is_err() {
        fs::rename(new, dest).map_err(failed)?;
    } else if renameat_with(CWD, new, CWD, dest, RenameFlags::EXCHANGE).is_err() {
        // File systems without an exchange: two renames, undone if the second fails.
        let mut aside = new.as_os_str().to_owned();
        aside.push(".old");
        let aside = PathBuf::from(aside);
        fs::rename(dest, &aside).map_err(failed)?;
        if let Err(e) = fs::rename(new, dest) {
            let undone = fs::rename(&aside, dest);
            return Err(failed(undone.err().unwrap_or(e)));
        }
        fs::rename(&aside, new).map_err(failed)?;
    }
    sync_folder(&parent(dest))
}
