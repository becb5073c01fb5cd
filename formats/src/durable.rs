//! Files and folders that appear whole or not at all, and survive a crash.

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
/// [`Error::Space`] if the disk is full, other [`Error::Io`], or an error of `fill`; the
/// temporary file is then removed and an old file is untouched.
pub(crate) fn write_file(path: &Path, fill: impl FnOnce(&mut Sink) -> Result<()>) -> Result<()> {
    write_mode(path, 0o666, fill)
}

/// Like `write_file`, for a file that nobody but its owner may read.
pub fn write_private(path: &Path, fill: impl FnOnce(&mut Sink) -> Result<()>) -> Result<()> {
    write_mode(path, 0o600, fill)
}

fn write_mode(path: &Path, mode: u32, fill: impl FnOnce(&mut Sink) -> Result<()>) -> Result<()> {
    let beside = Beside::with_mode(path, mode)?;
    let mut sink = Sink::new(beside.file().try_clone(), path)?;
    fill(&mut sink)?;
    sink.finish()?;
    beside.put()
}

/// A file that is written beside its place, in any order, and put there once it is whole; dropped before that, it is
/// removed.
pub struct Beside {
    place: PathBuf,
    temporary: tempfile::NamedTempFile,
    _live: Live,
}

impl Beside {
    /// An empty one for `place`, whose folder must be there.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be created.
    pub fn new(place: &Path) -> Result<Self> {
        Beside::with_mode(place, 0o666)
    }

    fn with_mode(place: &Path, mode: u32) -> Result<Self> {
        let folder = parent(place);
        sweep(&folder);
        let temporary = tempfile::Builder::new()
            .prefix(PREFIX)
            .suffix(SUFFIX)
            .permissions(permissions(mode))
            .tempfile_in(&folder)
            .map_err(|e| Error::io(place, "create", e))?;
        Ok(Beside {
            place: place.into(),
            _live: Live::begin(temporary.path(), temporary.as_file()),
            temporary,
        })
    }

    /// What is written so far.
    pub fn file(&self) -> &File {
        self.temporary.as_file()
    }

    /// Puts it into its place, over any old one.
    ///
    /// # Errors
    /// [`Error::Space`] if the disk is full, other [`Error::Io`]; an old file is then untouched.
    pub fn put(self) -> Result<()> {
        let synced = self.file().sync_all();
        synced.map_err(|e| Error::io(&self.place, "sync", e))?;
        let renamed = self.temporary.persist(&self.place);
        renamed.map_err(|e| Error::io(&self.place, "rename into place", e.error))?;
        sync_folder(&parent(&self.place))
    }
}

/// Like `write_file`, with the complete contents.
pub fn write_bytes(path: &Path, contents: &[u8]) -> Result<()> {
    write_file(path, |sink| sink.write(contents))
}

/// The umask decides who may read the file, not the mode of temporary files.
fn permissions(mode: u32) -> fs::Permissions {
    use std::os::unix::fs::PermissionsExt;
    fs::Permissions::from_mode(mode)
}

/// A folder to be renamed into place; removed if dropped before that.
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

/// A file or folder that is written beside its place and put there once it has been checked. Until then an older one stays;
/// dropped, it is removed.
pub struct Unchecked {
    place: PathBuf,
    form: Form,
    force: bool,
    folder: TemporaryFolder,
}

impl Unchecked {
    /// One for `place`, which [`check_destination`] lets be written or, with `force`, replaced.
    pub fn new(place: &Path, form: Form, force: bool) -> Result<Self> {
        check_destination(place, form, force)?;
        let parent = parent(place);
        fs::create_dir_all(&parent).map_err(|e| Error::io(&parent, "create", e))?;
        Ok(Unchecked {
            place: place.into(),
            form,
            force,
            folder: temporary_folder(&parent)?,
        })
    }

    /// Where to write it.
    pub fn path(&self) -> PathBuf {
        let name = self.place.file_name();
        self.folder.path().join(name.unwrap_or("out".as_ref()))
    }

    /// Puts what was written into its place, instead of what is there; beside a file those that were written beside it.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Exists`] for a file beside it that must not be replaced. What is there stays.
    pub fn put(self) -> Result<()> {
        match self.form {
            Form::Folder => rename_folder(&self.path(), &self.place),
            Form::File => {
                let folder = parent(&self.place);
                let mut places = Vec::new();
                for file in list(self.folder.path())? {
                    let place = folder.join(file.file_name());
                    check_destination(&place, Form::File, self.force)?;
                    places.push((file.path(), place));
                }
                // The file itself last: it is complete with what is beside it.
                places.sort_by_key(|(_, place)| *place == self.place);
                for (from, place) in places {
                    let renamed = fs::rename(from, &place);
                    renamed.map_err(|e| Error::io(&place, "rename into place", e))?;
                }
                sync_folder(&folder)
            }
        }
    }
}

/// Prefix of temporary files' and folders' names.
const PREFIX: &str = ".nq-";
const SUFFIX: &str = ".tmp";

/// The age from which [`sweep`] considers a temporary file left over by a killed run: long after its
/// creator has locked it.
const STALE: Duration = Duration::from_secs(60);

/// Temporary files and folders that this process is writing.
static LIVE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Keeps a path in [`LIVE`] as long as it lives.
struct Live(PathBuf);

impl Live {
    /// Also locks the file, which tells other processes that it is in use.
    fn begin(path: &Path, file: &File) -> Self {
        let _ = file.try_lock(); // without locks on this system, `sweep` gets none either
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

/// Removes the temporary files and folders that this process is writing; for a program that is
/// about to end by a signal.
pub fn remove_temporaries() {
    let live = LIVE.lock().unwrap_or_else(|e| e.into_inner());
    for path in live.iter().rev() {
        // Another thread may still be writing into a folder, so that removing it fails for a moment.
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

/// Removes what killed runs left in `folder`: temporary files and folders that are at least a minute
/// old and not locked by any process. Failures are ignored.
fn sweep(folder: &Path) {
    let stale = |path: &Path| -> io::Result<bool> {
        let file = File::open(path)?;
        // A time to come is as old as it is far away: the clock was wrong then or is now.
        let age = file.metadata()?.modified()?.elapsed();
        let age = age.unwrap_or_else(|e| e.duration());
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
    if fs::symlink_metadata(path)?.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
}

/// A file being written; its errors name it.
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

/// Makes renames and new files in a folder survive a crash.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    let synced = File::open(folder).and_then(|f| f.sync_all());
    synced.map_err(|e| Error::io(folder, "sync", e))
}

/// Form of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// One file.
    File,
    /// A model's folder.
    Folder,
}

/// What lies in a folder.
pub(crate) fn list(folder: &Path) -> Result<Vec<fs::DirEntry>> {
    fs::read_dir(folder)
        .and_then(Iterator::collect)
        .map_err(|e| Error::io(folder, "list", e))
}

/// Refuses a destination that exists. With `force` it may be replaced, but only by the same kind: a
/// GGUF file (or an empty file) by a file; a folder, by a folder, if it is empty or holds a model (a
/// config.json) and nothing but files that nq writes into such a folder. So a mistyped destination
/// destroys nothing else.
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
        // A dangling link.
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
    if !path.is_file() {
        return Ok(false); // opening a pipe would block until someone writes
    }
    let mut start = Vec::new();
    let read = |start: &mut Vec<u8>| File::open(path)?.take(4).read_to_end(start);
    read(&mut start).map_err(|e| Error::io(path, "read", e))?;
    Ok(start.is_empty() || start == *b"GGUF")
}

/// An entry that shows that a folder holds more than a model; `None` if there is none.
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

/// True for the folder `name` if it holds one of [`COPIED_BELOW`] and nothing else.
fn is_below(folder: &Path, name: &str) -> io::Result<bool> {
    let mut found = false;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let place = format!("{name}/{}", entry.file_name().to_string_lossy());
        if !entry.file_type()?.is_file() || !COPIED_BELOW.contains(&place.as_str()) {
            return Ok(false);
        }
        found = true;
    }
    Ok(found)
}

/// Files in folders of their own that [`is_copied`] too.
pub(crate) const COPIED_BELOW: [&str; 4] = [
    task::POOLING,
    task::LOGIT_SCORE,
    "additional_chat_templates/tool_use.jinja",
    "additional_chat_templates/rag.jinja",
];

/// True for the name of a file that goes with a model's weights and config.json into a folder that nq
/// writes: of its tokenizer, its templates, its images, its embeddings and its licence.
pub(crate) fn is_copied(name: &str) -> bool {
    const NAMES: [&str; 14] = [
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        task::PROMPTS,
        GENERATION_CONFIG,
        "merges.txt",
        crate::vision::PREPROCESSOR,
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

/// Bytes available on the file system of `folder` or, if the folder does not exist yet, of the
/// nearest existing folder above it.
///
/// # Errors
/// [`Error::Io`] if the system call fails.
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

/// Checks that files can be created in `folder` or, if it does not exist yet, folders in the nearest
/// existing one above it: by permissions and mount options.
///
/// # Errors
/// [`Error::Io`], which names the existing folder.
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
/// [`Error::Space`] if they do not.
pub(crate) fn check_space(folder: &Path, needed: u64) -> Result<()> {
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

/// Renames the folder `new` to `dest`. If there is a folder at `dest`, the two are exchanged, in
/// one step if the system can do that, and the old one is then at `new`.
///
/// # Errors
/// [`Error::Io`]; `dest` is then unchanged.
pub(crate) fn rename_folder(new: &Path, dest: &Path) -> Result<()> {
    let failed = |e: io::Error| Error::io(dest, "rename into place", e);
    if fs::symlink_metadata(dest).is_err() {
        fs::rename(new, dest).map_err(failed)?;
    } else if renameat_with(CWD, new, CWD, dest, RenameFlags::EXCHANGE).is_err() {
        // On file systems without an exchange: two renames, undone if the second fails.
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
