//! Keys and values on disk: pages of prompts that survive a restart.
//!
//! A file holds a page: keys and values of all layers at [`PAGE`] positions; or, for a model with recurrences, the
//! states of all layers at the end of a page. Its name is a hash of
//! everything that they depend on: the model and how it runs, the salt of the prompt, and every token up
//! to the page's end, chained from page to page (as vLLM names blocks). So prompts with the same
//! beginning share files, a file is found without an index, and its name reveals nothing of the prompt.
//!
//! A file appears whole or not at all, and is used only if its digest is correct.

use nq_formats::{Progress, durable};
use nq_kernels::pages::PAGE;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Begins each file; the last digit is the version of the format.
const MAGIC: &[u8; 8] = b"nq-kv  3";
/// The part of the magic number that all versions share.
const OURS: usize = 5;
/// Size of [`MAGIC`], the name and the digest of name and contents.
const HEADER: usize = 8 + 32 + 32;
const SUFFIX: &str = ".kv";

/// Name of a page.
pub(crate) type PageKey = [u8; 32];

/// The name of the states at the end of a page.
pub(crate) fn state_key(page: &PageKey) -> PageKey {
    Sha256::new()
        .chain_update(page)
        .chain_update("state")
        .finalize()
        .into()
}

/// A folder of pages, for all models of a server.
pub struct PageStore {
    folder: PathBuf,
    limit: u64,
    index: Mutex<PageIndex>,
    progress: Arc<dyn Progress>,
}

#[derive(Default)]
struct PageIndex {
    files: HashMap<PageKey, HeldPage>,
    bytes: u64,
    clock: u64,
    /// True after an error: nothing is written any more.
    broken: bool,
}

struct HeldPage {
    bytes: u64,
    used: u64,
}

/// The part of a [`PageStore`] that belongs to one model.
#[derive(Clone)]
pub struct ModelPages {
    store: Arc<PageStore>,
    identity: PageKey,
}

impl std::fmt::Debug for ModelPages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pages in {}", self.store.folder.display())
    }
}

impl PageStore {
    /// Opens a folder, creating it if needed, for at most `limit` bytes of files. Files that
    /// are not valid pages are reported to `progress`, and removed if nq wrote them.
    ///
    /// # Errors
    /// A folder that cannot be created or read.
    pub fn open(folder: &Path, limit: u64, progress: Arc<dyn Progress>) -> io::Result<Arc<Self>> {
        make_private(folder)?;
        let store = PageStore {
            folder: folder.to_owned(),
            limit,
            index: Mutex::default(),
            progress,
        };
        let mut found = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            match look(&path) {
                Ok(Some((key, bytes, used))) => found.push((used, key, bytes)),
                Ok(None) => {}
                Err(why) => store.discard(&path, &why),
            }
        }
        found.sort_unstable();
        let mut index = store.index();
        for (_, key, bytes) in found {
            index.add(key, bytes);
        }
        drop(index);
        store.shrink();
        Ok(Arc::new(store))
    }

    /// The part for the model that `identity` describes: everything that its keys and values
    /// depend on, including weights, rounding and program.
    pub fn of_model(self: &Arc<Self>, identity: &[u8]) -> ModelPages {
        ModelPages {
            store: Arc::clone(self),
            identity: Sha256::digest(identity).into(),
        }
    }

    fn index(&self) -> MutexGuard<'_, PageIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, key: &PageKey) -> PathBuf {
        let name: String = key.iter().map(|b| format!("{b:02x}")).collect();
        self.folder.join(name + SUFFIX)
    }

    /// Reports a problem with a file, and removes the file if nq wrote it.
    fn discard(&self, path: &Path, why: &str) {
        let removed = if is_ours(path) && fs::remove_file(path).is_ok() {
            "removed"
        } else {
            "ignored"
        };
        let path = path.display();
        self.progress.note(&format!("{path}: {why}: {removed}"));
    }

    /// Removes the least recently used pages until the others are within the limit.
    fn shrink(&self) {
        let mut index = self.index();
        while index.bytes > self.limit {
            let oldest = index.files.iter().min_by_key(|(_, held)| held.used);
            let Some(key) = oldest.map(|(key, _)| *key) else {
                return;
            };
            index.remove(&key);
            let _ = fs::remove_file(self.path(&key));
        }
    }
}

impl PageIndex {
    fn add(&mut self, key: PageKey, bytes: u64) {
        self.remove(&key);
        self.clock += 1;
        self.bytes += bytes;
        let used = self.clock;
        self.files.insert(key, HeldPage { bytes, used });
    }

    fn remove(&mut self, key: &PageKey) {
        if let Some(held) = self.files.remove(key) {
            self.bytes -= held.bytes;
        }
    }
}

impl ModelPages {
    /// Reports something about the folder.
    pub(crate) fn note(&self, what: &str) {
        let folder = self.store.folder.display();
        self.store.progress.note(&format!("{folder}: {what}"));
    }

    /// The names of all whole pages of a sequence.
    pub fn keys(&self, salt: u64, tokens: &[u32]) -> Vec<PageKey> {
        let begin = Sha256::new()
            .chain_update(self.identity)
            .chain_update(salt.to_le_bytes());
        let mut last: PageKey = begin.finalize().into();
        let pages = tokens.chunks_exact(PAGE).map(|page| {
            let mut hash = Sha256::new().chain_update(last);
            for token in page {
                hash.update(token.to_le_bytes());
            }
            last = hash.finalize().into();
            last
        });
        pages.collect()
    }

    /// Counts how many of the first pages exist, and marks them as just used.
    pub fn beginning(&self, keys: &[PageKey]) -> usize {
        let mut index = self.store.index();
        let there = |key: &&PageKey| index.files.contains_key(*key);
        let found = keys.iter().take_while(there).count();
        // In reverse order: pages are useless without the pages before them.
        for key in keys[..found].iter().rev() {
            index.clock += 1;
            let clock = index.clock;
            if let Some(held) = index.files.get_mut(key) {
                held.used = clock;
            }
        }
        found
    }

    /// Reads the page with this name, of `bytes` bytes; `None` if it does not exist or is damaged.
    pub fn read(&self, key: &PageKey, bytes: usize) -> Option<Vec<u8>> {
        let path = self.store.path(key);
        let why = match read(&path, key, bytes) {
            Ok(page) => return Some(page),
            Err(Wrong::Gone) => None,
            Err(Wrong::Io(e)) => Some(e.to_string()),
            Err(Wrong::Content(why)) => Some(why),
        };
        self.store.index().remove(key);
        if let Some(why) = why {
            self.store.discard(&path, &why);
        }
        None
    }

    /// Writes a page, whole or not at all. After an error, nothing is written any more.
    pub fn write(&self, key: &PageKey, page: &[u8]) {
        let store = &*self.store;
        if store.index().broken {
            return;
        }
        let path = store.path(key);
        let digest = digest(key, page);
        let written = durable::write_private(&path, |sink| {
            for part in [&MAGIC[..], key, &digest, page] {
                sink.write(part)?;
            }
            Ok(())
        });
        match written {
            Ok(()) => store.index().add(*key, (HEADER + page.len()) as u64),
            Err(e) => {
                store.index().broken = true;
                let what = format!("{e}: prompts are kept on disk no more");
                store.progress.note(&what);
            }
        }
        store.shrink();
    }
}

/// Makes a folder that only its owner can open, as its contents reveal prompts. One that exists keeps its mode, since
/// it may have other contents; its pages are their owner's alone.
fn make_private(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent)?;
    }
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => Ok(()),
        made => made,
    }
}

/// The name, size and last use of a page; `None` for a file being written or already removed.
fn look(path: &Path) -> Result<Option<(PageKey, u64, SystemTime)>, String> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if name.starts_with(".nq-") {
        return Ok(None);
    }
    let Ok(metadata) = path.symlink_metadata() else {
        return Ok(None);
    };
    let key = name.strip_suffix(SUFFIX).and_then(parse);
    let key = key
        .filter(|_| metadata.is_file())
        .ok_or("no page of keys and values")?;
    let mut header = [0; HEADER];
    let begun = File::open(path).and_then(|mut f| f.read_exact(&mut header));
    begun.map_err(|e| e.to_string())?;
    check_header(&header, &key)?;
    let mut mode = metadata.permissions();
    if mode.mode() & 0o77 != 0 {
        // Written by an earlier version, for others to read.
        mode.set_mode(0o600);
        fs::set_permissions(path, mode).map_err(|e| e.to_string())?;
    }
    Ok(Some((
        key,
        metadata.len(),
        metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
    )))
}

/// The 32 bytes of a name.
fn parse(name: &str) -> Option<PageKey> {
    let mut key = [0; 32];
    let digits = name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if name.len() != 64 || !digits {
        return None;
    }
    for (i, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&name[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(key)
}

fn check_header(header: &[u8], key: &PageKey) -> Result<(), String> {
    if header[..8] != *MAGIC {
        return Err("of no version that this nq reads".into());
    }
    if header[8..40] == *key {
        Ok(())
    } else {
        Err("its name is not that of its contents".into())
    }
}

/// The digest in a page's header, by which its contents belong to its name.
fn digest(key: &PageKey, page: &[u8]) -> PageKey {
    let hash = Sha256::new().chain_update(key).chain_update(page);
    hash.finalize().into()
}

/// True if the file begins like those of nq.
fn is_ours(path: &Path) -> bool {
    let mut begin = [0; OURS];
    let is_file = path.symlink_metadata().is_ok_and(|m| m.is_file());
    let mut read = || File::open(path).and_then(|mut f| f.read_exact(&mut begin));
    is_file && read().is_ok() && begin == MAGIC[..OURS]
}

/// Why a page was not read.
enum Wrong {
    Gone,
    Io(io::Error),
    Content(String),
}

impl From<io::Error> for Wrong {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            io::ErrorKind::NotFound => Wrong::Gone,
            _ => Wrong::Io(e),
        }
    }
}

fn read(path: &Path, key: &PageKey, bytes: usize) -> Result<Vec<u8>, Wrong> {
    // A pipe that was put there would block whoever opens it.
    if !path.symlink_metadata()?.is_file() {
        return Err(Wrong::Content("no file".into()));
    }
    let mut file = File::open(path)?;
    let (expected, found) = ((HEADER + bytes) as u64, file.metadata()?.len());
    if found != expected {
        let why = format!("expected {expected} bytes, found {found}");
        return Err(Wrong::Content(why));
    }
    let mut header = [0; HEADER];
    file.read_exact(&mut header)?;
    check_header(&header, key).map_err(Wrong::Content)?;
    let mut page = vec![0; bytes];
    file.read_exact(&mut page)?;
    if header[40..] != digest(key, &page) {
        return Err(Wrong::Content(
            "its digest is not that of its name and contents".into(),
        ));
    }
    // Records the last use for the next start; without such times on a file system, little is lost.
    let _ = file.set_modified(SystemTime::now());
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps the notes that it receives.
    #[derive(Default)]
    struct Notes(Mutex<Vec<String>>);

    impl Progress for Notes {
        fn note(&self, message: &str) {
            self.0.lock().unwrap().push(message.to_owned());
        }
    }

    const BYTES: usize = 1000;

    fn tokens(n: u32) -> Vec<u32> {
        (0..n).collect()
    }

    fn open(folder: &Path, limit: u64) -> (ModelPages, Arc<Notes>) {
        let notes = Arc::new(Notes::default());
        let store = PageStore::open(folder, limit, notes.clone()).unwrap();
        (store.of_model(b"a model"), notes)
    }

    #[test]
    fn pages_are_found_again_by_model_salt_and_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("of/pages");
        let (pages, _) = open(&folder, 1 << 20);
        let long = tokens(3 * PAGE as u32 + 5);
        let keys = pages.keys(7, &long);
        assert_eq!(keys.len(), 3);
        for (i, key) in keys.iter().enumerate() {
            pages.write(key, &[i as u8; BYTES]);
        }
        assert_eq!(
            fs::metadata(&folder).unwrap().permissions().mode() & 0o77,
            0
        );

        let (pages, notes) = open(&folder, 1 << 20);
        assert_eq!(pages.beginning(&keys), 3);
        assert_eq!(pages.read(&keys[1], BYTES), Some(vec![1; BYTES]));
        // The same tokens at the beginning lead to the same files; other tokens, another salt or model
        // do not.
        let mut other = long.clone();
        other[2 * PAGE] = 0;
        assert_eq!(pages.beginning(&pages.keys(7, &other)), 2);
        other[0] = 1;
        assert_eq!(pages.beginning(&pages.keys(7, &other)), 0);
        assert_eq!(pages.beginning(&pages.keys(8, &long)), 0);
        let another = pages.store.of_model(b"another model");
        assert_eq!(another.beginning(&another.keys(7, &long)), 0);
        assert!(notes.0.lock().unwrap().is_empty());
    }

    #[test]
    fn what_is_damaged_goes_and_what_is_foreign_stays() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let (pages, _) = open(folder, 1 << 20);
        let keys = pages.keys(0, &tokens(5 * PAGE as u32));
        for key in &keys {
            pages.write(key, &[9; BYTES]);
        }
        let path = |i: usize| pages.store.path(&keys[i]);
        let change = |i: usize, f: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = fs::read(path(i)).unwrap();
            f(&mut bytes);
            fs::write(path(i), bytes).unwrap();
        };
        change(0, &|b| b.truncate(500));
        change(1, &|b| b[HEADER + 10] ^= 1);
        change(2, &|b| b[7] = b'0');
        change(3, &|b| b[0] = b'x');
        fs::write(folder.join("notes.txt"), "mine").unwrap();
        let (pages, notes) = open(folder, 1 << 20);
        assert_eq!(pages.read(&keys[0], BYTES), None);
        assert_eq!(pages.read(&keys[1], BYTES), None);
        assert_eq!(pages.beginning(&keys[2..]), 0);
        assert_eq!(pages.read(&keys[4], BYTES), Some(vec![9; BYTES]));
        assert_eq!(pages.read(&keys[4], BYTES + 1), None, "of another shape");
        let left = [3].map(|i| path(i).exists());
        assert_eq!(left, [true]);
        assert!([0, 1, 2, 4].iter().all(|&i| !path(i).exists()));
        assert_eq!(fs::read(folder.join("notes.txt")).unwrap(), b"mine");
        let notes = notes.0.lock().unwrap();
        assert_eq!(notes.len(), 6, "{notes:?}");
        assert_eq!(notes.iter().filter(|n| n.ends_with("ignored")).count(), 2);
    }

    /// Nobody but the owner reads pages, whatever the folder's mode and that of older files.
    #[test]
    fn pages_are_their_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
        let (pages, _) = open(folder, 1 << 20);
        let keys = pages.keys(0, &tokens(PAGE as u32));
        pages.write(&keys[0], &[9; BYTES]);
        let path = pages.store.path(&keys[0]);
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let (pages, _) = open(folder, 1 << 20);
        assert_eq!(mode(), 0o600);
        assert_eq!(pages.read(&keys[0], BYTES), Some(vec![9; BYTES]));
    }

    /// What is put there while the server runs: pipes, folders, links, and one page under another's name.
    #[test]
    fn what_is_no_page_of_that_name_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let (pages, notes) = open(folder.path(), 1 << 20);
        let keys = pages.keys(0, &tokens(5 * PAGE as u32));
        for (i, key) in keys.iter().enumerate() {
            pages.write(key, &[i as u8; BYTES]);
        }
        let path = |i: usize| pages.store.path(&keys[i]);
        let bytes = [3, 4].map(|i| fs::read(path(i)).unwrap());
        for i in 0..3 {
            fs::remove_file(path(i)).unwrap();
        }
        let made = std::process::Command::new("mkfifo").arg(path(0)).status();
        assert!(made.unwrap().success());
        fs::create_dir(path(1)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path(2)).unwrap();
        // Digest and contents of the other, behind the name.
        for (i, other) in [(3, 1), (4, 0)] {
            let swapped = [&bytes[1 - other][..40], &bytes[other][40..]].concat();
            fs::write(path(i), swapped).unwrap();
        }
        for key in &keys {
            assert_eq!(pages.read(key, BYTES), None);
        }
        assert_eq!(notes.0.lock().unwrap().len(), 5);
    }

    #[test]
    fn what_is_unused_for_longest_makes_room() {
        let folder = tempfile::tempdir().unwrap();
        let file = (HEADER + BYTES) as u64;
        let (pages, _) = open(folder.path(), 4 * file);
        let first = pages.keys(0, &tokens(2 * PAGE as u32));
        let second = pages.keys(1, &tokens(2 * PAGE as u32));
        for key in first.iter().chain(&second) {
            pages.write(key, &[1; BYTES]);
        }
        assert_eq!(pages.beginning(&first), 2);
        pages.write(&pages.keys(2, &tokens(PAGE as u32))[0], &[1; BYTES]);
        assert_eq!((pages.beginning(&first), pages.beginning(&second)), (2, 0));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
        drop(open(folder.path(), 2 * file));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_folder_that_cannot_be_written_to_is_said_once() {
        let folder = tempfile::tempdir().unwrap();
        let (pages, notes) = open(folder.path(), 1 << 20);
        let keys = pages.keys(0, &tokens(2 * PAGE as u32));
        fs::remove_dir(folder.path()).unwrap();
        for key in &keys {
            pages.write(key, &[1; BYTES]);
        }
        let notes = notes.0.lock().unwrap();
        assert!(
            notes.len() == 1 && notes[0].contains("no more"),
            "{notes:?}"
        );
    }
}
