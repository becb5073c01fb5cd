//! Files and folders that appear whole or not at all, and outlast a crash.

use crate::error::{Error, Result};
use crate::files::{CONFIG, GENERATION_CONFIG};
use crate::task;
use rustix::fs::{Access, CWD, RenameFlags, access, renameat_with, statvfs};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

/// Writes `path` through a temporary file beside it: synced, then renamed over any old one.
///
/// # Errors
/// [`Error::Space`] if the disk is full, other [`Error::Io`], or what `fill` returns; the
/// temporary file is then removed and an old file is untouched.
pub fn write_file(path: &Path, fill: impl FnOnce(&mut Sink) -> Result<()>) -> Result<()> {
    let folder = parent(path);
    sweep(&folder);
    let temporary = tempfile::Builder::new()
        .prefix(PREFIX)
        .suffix(SUFFIX)
        .permissions(permissions(0o666))
        .tempfile_in(&folder)
        .map_err(|e| Error::io(path, "create", e))?;
    let _live = Live::begin(temporary.path(), temporary.as_file());
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

/// A folder to be renamed into place; removed when dropped before that.
pub(crate) struct TemporaryFolder {
    folder: tempfile::TempDir,
    _live: Live,
    _lock: Option<File>,
}

impl TemporaryFolder {
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// A temporary folder in `parent`.
pub(crate) fn temporary_folder(parent: &Path) -> Result<TemporaryFolder> {
    sweep(parent);
    let folder = tempfile::Builder::new()
        .prefix(PREFIX)
        .suffix(SUFFIX)
        .permissions(permissions(0o777))
        .tempdir_in(parent)
        .map_err(|e| Error::io(parent, "create a folder in", e))?;
    let lock = File::open(folder.path()).ok();
    let live = match &lock {
        Some(lock) => Live::begin(folder.path(), lock),
        None => Live::new(folder.path()),
    };
    Ok(TemporaryFolder {
        folder,
        _live: live,
        _lock: lock,
    })
}

/// How temporary files and folders are called.
const PREFIX: &str = ".nq-";
const SUFFIX: &str = ".tmp";

/// How old a temporary file must be before [`sweep`] takes it for one that a killed run left:
/// long after its maker has locked it.
const STALE: Duration = Duration::from_secs(60);

/// Temporary files and folders that this process is at work on.
static LIVE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// While it lives, a path is in [`LIVE`].
struct Live(PathBuf);

impl Live {
    /// Also locks the file, which tells other processes that it is not left over.
    fn begin(path: &Path, file: &File) -> Self {
        let _ = file.try_lock(); // where there are no locks, `sweep` gets none either
        Live::new(path)
    }

    fn new(path: &Path) -> Self {
        LIVE.lock()
            .unwrap_or_else(|e| e.into_inner())
            .insert(path.into());
        Live(path.into())
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        LIVE.lock()
            .unwrap_or_else(|e| e.into_inner())
            .remove(&self.0);
    }
}

/// Removes the temporary files and folders that this process is at work on: for a program that is
/// about to end by a signal.
pub fn remove_temporaries() {
    let live = LIVE.lock().unwrap_or_else(|e| e.into_inner());
    for path in live.iter().rev() {
        // Another thread may still write into a folder: its new files are in the way for a moment.
        for _ in 0..10 {
            match remove_tree(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => break,
            }
        }
    }
}

/// Removes what killed runs left in `folder`: temporary files and folders that are a minute old
/// and that no process has locked. What cannot be removed stays.
fn sweep(folder: &Path) {
    let stale = |path: &Path| -> io::Result<bool> {
        let file = File::open(path)?;
        let age = file.metadata()?.modified()?.elapsed().unwrap_or_default();
        Ok(age > STALE && file.try_lock().is_ok())
    };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let middle = name
            .strip_prefix(PREFIX)
            .and_then(|n| n.strip_suffix(SUFFIX));
        let ours = middle.is_some_and(|m| m.len() == 6 && m.chars().all(char::is_alphanumeric));
        let kind = entry.file_type();
        if ours
            && kind.is_ok_and(|k| k.is_file() || k.is_dir())
            && stale(&entry.path()).unwrap_or(false)
        {
            let _ = remove_tree(&entry.path());
        }
    }
}

fn remove_tree(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path)?.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    }
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
/// its like: a GGUF file (or an empty file) by a file; by a folder an empty one, or one that holds
/// a model (a config.json) and nothing but files that nq writes into such a folder. So a mistyped
/// destination costs nobody anything else.
///
/// # Errors
/// [`Error::Exists`], or [`Error::Io`] for a folder or file that cannot be read.
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
        (Form::File, false) if !path.exists() || is_gguf(path)? => Ok(()),
        (Form::File, false) => refused("expected a GGUF file to replace, found another".into()),
        (Form::File, true) => refused("expected a file to replace, found a folder".into()),
        (Form::Folder, false) if path.exists() => {
            refused("expected a model's folder to replace, found a file".into())
        }
        // A link to nowhere.
        (Form::Folder, false) => Ok(()),
        (Form::Folder, true) => match foreign_entry(path)? {
            None => Ok(()),
            Some(found) => refused(format!(
                "expected a model's folder to replace (a config.json, and only files that nq \
                 writes beside it) or an empty one, found {found}"
            )),
        },
    }
}

/// True for a GGUF file and for an empty one.
fn is_gguf(path: &Path) -> Result<bool> {
    let mut start = Vec::new();
    let read = |start: &mut Vec<u8>| File::open(path)?.take(4).read_to_end(start);
    match path.is_file() {
        true => read(&mut start).map_err(|e| Error::io(path, "read", e))?,
        false => return Ok(false), // opening a pipe would wait for a writer
    };
    Ok(start.is_empty() || start == *b"GGUF")
}

/// What shows that a folder is not just a model's; `None` if nothing does.
fn foreign_entry(folder: &Path) -> Result<Option<String>> {
    let written = |name: &str| {
        const OTHERS: [&str; 3] = [
            CONFIG,
            "quantize_config.json",
            "model.safetensors.index.json",
        ];
        OTHERS.contains(&name) || name.ends_with(".safetensors") || is_copied(name)
    };
    let list = || -> io::Result<Option<String>> {
        let (mut model, mut first) = (false, None);
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() {
                if is_below(&entry.path(), &name)? {
                    continue;
                }
                return Ok(Some(format!("the folder {name}")));
            }
            if !written(&name) {
                return Ok(Some(name));
            }
            model |= name == CONFIG;
            first.get_or_insert(name);
        }
        Ok(first.filter(|_| !model))
    };
    list().map_err(|e| Error::io(folder, "list", e))
}

/// True for the folder `name` if it holds nothing but one of [`COPIED_BELOW`].
fn is_below(folder: &Path, name: &str) -> io::Result<bool> {
    for entry in fs::read_dir(folder)? {
        let inner = entry?.file_name();
        let place = format!("{name}/{}", inner.to_string_lossy());
        if !COPIED_BELOW.contains(&place.as_str()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Files in folders of their own that [`is_copied`] too.
pub(crate) const COPIED_BELOW: [&str; 2] = [task::POOLING, task::LOGIT_SCORE];

/// True for the name of a file that goes with a model's weights and config.json into a folder that nq
/// writes: of its tokenizer, its templates, its embeddings and its licence.
pub fn is_copied(name: &str) -> bool {
    const NAMES: [&str; 13] = [
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        task::PROMPTS,
        GENERATION_CONFIG,
        "merges.txt",
        task::MODULES,
        "sentence_bert_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "NOTICE",
    ];
    let whole = NAMES.contains(&name) || COPIED_BELOW.contains(&name);
    whole || (name.starts_with("LICENSE") && !name.contains('/'))
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
