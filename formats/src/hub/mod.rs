//! Models from the Hugging Face hub, in its standard cache.
//!
//! The cache's layout is that of the hf-hub crate. The requests are nq's own: that crate has no
//! time-outs, appends whatever a server sends to an interrupted download, gets stuck on a download
//! that was complete, and does not compare the result with the hub's hash.

mod client;
mod dataset;
mod options;

pub use options::HubOptions;

use crate::durable::{COPIED_BELOW, is_copied};
use crate::durable::{check_space, parent, sync_folder, write_bytes};
use crate::error::{Error, HubProblem, Result};
use crate::gguf::mmproj::{choose, is_mmproj};
use crate::progress::{Progress, Unit};
use crate::shards::{INDEX, SINGLE};
use client::{Client, Remote};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// A hub id: `OWNER/NAME`, with an optional `@REVISION`, file (`OWNER/NAME/FILE.gguf`) or kind of GGUF
/// file (`OWNER/NAME:Q4_K_M`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubId {
    /// `OWNER/NAME`.
    pub repo: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// The weight file to use; `None`: the safetensors files, or the only GGUF file.
    pub file: Option<String>,
    /// The kind of GGUF file to use, as its name has it.
    pub kind: Option<String>,
}

/// Beginnings of addresses of the hub's pages.
const PAGES: [&str; 2] = ["huggingface.co/", "hf.co/"];

impl HubId {
    /// Parses an id, or the address of a page of a model or of one of its files; `None` if `text` does not
    /// have the form of one.
    pub fn parse(text: &str) -> Option<Self> {
        let bare = text.strip_prefix("https://").unwrap_or(text);
        if let Some(page) = PAGES.iter().find_map(|host| bare.strip_prefix(host)) {
            let page = page.split(['?', '#']).next().unwrap_or(page);
            let parts: Vec<&str> = page.trim_end_matches('/').split('/').collect();
            return match parts[..] {
                [owner, name, "tree", revision] => Self::of(&format!("{owner}/{name}@{revision}")),
                [owner, name, "blob" | "resolve", revision, file] => {
                    Self::of(&format!("{owner}/{name}/{file}@{revision}"))
                }
                _ => Self::of(page.trim_end_matches('/')),
            };
        }
        Self::of(text)
    }

    fn of(text: &str) -> Option<Self> {
        let plain = |p: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !p.is_empty() && !p.starts_with('.') && p.chars().all(known)
        };
        let (text, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (text, kind) = match text.split_once(':') {
            Some((text, kind)) => (text, Some(kind)),
            None => (text, None),
        };
        let parts: Vec<&str> = text.split('/').collect();
        let (repo, file) = match parts[..] {
            [owner, name] => ([owner, name], None),
            [owner, name, file] if file.ends_with(".gguf") && kind.is_none() => {
                ([owner, name], Some(file))
            }
            _ => return None,
        };
        let good = repo.iter().chain(&file).chain(&kind).all(|p| plain(p));
        let revision_good = revision.split('/').all(plain);
        (good && revision_good).then(|| HubId {
            repo: repo.join("/"),
            revision: revision.into(),
            file: file.map(String::from),
            kind: kind.map(String::from),
        })
    }

    /// A short name, usable for a folder: that of the repository or the file, without the owner.
    pub fn name(&self) -> String {
        let repo = self.repo.rsplit('/').next().unwrap_or(&self.repo);
        match (&self.file, &self.kind) {
            (Some(file), _) => file.trim_end_matches(".gguf").into(),
            (None, Some(kind)) => format!("{}-{kind}", repo.trim_end_matches("-GGUF")),
            (None, None) => repo.trim_end_matches(".gguf").into(),
        }
    }
}

/// True if `file` is a GGUF file of a kind such as `Q4_K_M`, whole or the first of several.
fn is_kind(file: &str, kind: &str) -> bool {
    let lower = file.to_ascii_lowercase();
    let Some(stem) = lower.strip_suffix(".gguf") else {
        return false;
    };
    let stem = match stem.rsplit_once("-of-") {
        Some((before, count)) if count.chars().all(|c| c.is_ascii_digit()) => {
            match before.strip_suffix("-00001") {
                Some(first) => first,
                None => return false,
            }
        }
        _ => stem,
    };
    let before = stem.strip_suffix(&kind.to_ascii_lowercase());
    before.is_some_and(|b| b.ends_with(['-', '.', '_']))
}

/// The hub and its cache.
pub struct Hub {
    options: HubOptions,
}

#[derive(Deserialize)]
struct RepoInfo {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Hub {
    /// A hub with these options. Nothing is contacted yet.
    pub fn new(options: HubOptions) -> Self {
        Hub { options }
    }

    /// Returns the folder of the model `id` (see [`HubId`]), or its file if `id` names one: from
    /// the cache if it is complete there, otherwise downloaded. Interrupted downloads continue
    /// where they stopped.
    ///
    /// # Errors
    /// [`Error::Hub`], which says what failed and what to do: offline, unreachable, denied, not found,
    /// nothing nq can run, a broken download; [`Error::Space`] if the disk is too small; [`Error::Io`].
    pub fn fetch_model(&self, id: &str, progress: &dyn Progress) -> Result<PathBuf> {
        let parsed = parse(id)?;
        if let Some(path) = self.cached(id)? {
            return Ok(path);
        }
        if self.options.offline {
            return Err(Error::Hub {
                what: id.into(),
                problem: HubProblem::Offline,
                detail: format!(
                    "not complete in the cache {} and the hub must not be asked (--offline or \
                     HF_HUB_OFFLINE); run once online, or give a folder",
                    self.options.cache.display()
                ),
            });
        }
        self.download(&parsed, progress)
    }

    /// Returns the model `id` if the cache has all of it. Does not use the network.
    ///
    /// # Errors
    /// [`Error::Hub`] if `id` does not have the form of an id; [`Error::Io`].
    pub fn cached(&self, id: &str) -> Result<Option<PathBuf>> {
        let id = parse(id)?;
        let repo = self.repo(&id);
        let reference = self.root(&id).join("refs").join(&id.revision);
        // For a revision that is a commit, there is no reference file.
        let commit = fs::read_to_string(reference).unwrap_or_else(|_| id.revision.clone());
        let snapshot = repo.pointer_path(commit.trim());
        Ok(complete(&snapshot, &id))
    }

    fn repo(&self, id: &HubId) -> CacheRepo {
        let repo = Repo::with_revision(id.repo.clone(), RepoType::Model, id.revision.clone());
        Cache::new(self.options.cache.clone()).repo(repo)
    }

    /// The folder of a model in the cache.
    fn root(&self, id: &HubId) -> PathBuf {
        let repo = Repo::new(id.repo.clone(), RepoType::Model);
        self.options.cache.join(repo.folder_name())
    }

    fn download(&self, id: &HubId, progress: &dyn Progress) -> Result<PathBuf> {
        let client = Client::new(&self.options, &id.repo);
        let revision = id.revision.replace('/', "%2F");
        let info: RepoInfo =
            client.json(&format!("/api/models/{}/revision/{revision}", id.repo))?;
        if info.sha.is_empty() || !info.sha.chars().all(|c| c.is_ascii_alphanumeric()) {
            let detail = format!("expected a commit, found {:?}", info.sha);
            return Err(client.error(HubProblem::Broken, detail));
        }
        // Other files in folders are other formats' copies, and no name may lead out of the cache.
        let mut names: Vec<&str> = info.siblings.iter().map(|s| s.rfilename.as_str()).collect();
        let below = |n: &&str| COPIED_BELOW.contains(n);
        names.retain(|n| below(n) || !(n.contains(['/', '\\']) || n.starts_with('.')));
        let root = self.root(id);
        let snapshot = self.repo(id).pointer_path(&info.sha);
        create(&snapshot)?;
        let fetch = |wanted: Vec<String>| -> Result<()> {
            let mut remotes = Vec::new();
            let mut total = 0;
            let mut missing = 0;
            for name in wanted.iter().filter(|n| !snapshot.join(n).exists()) {
                let remote = client.head(&info.sha, name)?;
                let have = fs::metadata(partial(&root, &remote)).map_or(0, |m| m.len());
                total += remote.size;
                missing += remote.size.saturating_sub(have);
                remotes.push(remote);
            }
            check_space(&snapshot, missing)?;
            progress.begin(&format!("download {}", id.repo), total, Unit::Bytes);
            for remote in &remotes {
                self.fetch_file(&client, &root, &info.sha, remote, progress)?;
            }
            progress.end();
            Ok(())
        };
        // Small files first: the index among them lists the weights that are needed.
        let weights = weight_files(id, &names);
        fetch(side_files(&names, &weights))?;
        let weights = match weights {
            Weights::Indexed => shards(&snapshot.join(INDEX))?,
            Weights::Files(files) => files,
            Weights::None(detail) => {
                return Err(client.error(HubProblem::NotFound, detail));
            }
        };
        let model = weights
            .first()
            .filter(|name| name.ends_with(".gguf"))
            .cloned();
        fetch(weights)?;
        if let Some(model) = model {
            let mut towers = Vec::new();
            for name in names.iter().filter(|name| is_mmproj(name)) {
                towers.push((*name, client.head(&info.sha, name)?.size));
            }
            if let Some(tower) = choose(&model, &towers) {
                progress.note(&format!("{tower}: with the tower that sees images"));
                fetch(vec![tower.into()])?;
            }
        }
        sync_folder(&snapshot)?;
        let reference = self.root(id).join("refs").join(&id.revision);
        create(&parent(&reference))?;
        write_bytes(&reference, info.sha.as_bytes())?;
        complete(&snapshot, id).ok_or_else(|| {
            let detail = "the files it lists are not a complete model".into();
            client.error(HubProblem::NotFound, detail)
        })
    }

    /// Downloads one file into a repository's folder `root` in the cache: its contents under
    /// their hash, and a link to them in the snapshot.
    fn fetch_file(
        &self,
        client: &Client<'_>,
        root: &Path,
        commit: &str,
        remote: &Remote,
        progress: &dyn Progress,
    ) -> Result<()> {
        let blobs = root.join("blobs");
        let locks = self.options.cache.join(".locks");
        create(&blobs)?;
        create(&locks)?;
        let lock_path = locks.join(format!("{}.lock", remote.etag));
        let lock = File::create(&lock_path).map_err(|e| Error::io(&lock_path, "create", e))?;
        if lock.try_lock().is_err() {
            progress.note(&format!(
                "{}: waiting for another download of it",
                remote.name
            ));
            lock.lock().map_err(|e| Error::io(&lock_path, "lock", e))?;
        }
        let blob = blobs.join(&remote.etag);
        if blob.exists() {
            progress.advance(remote.size);
        } else {
            let partial = partial(root, remote);
            client.download(commit, remote, &partial, progress)?;
            fs::rename(&partial, &blob).map_err(|e| Error::io(&blob, "rename into place", e))?;
            sync_folder(&blobs)?;
        }
        let link = root.join("snapshots").join(commit).join(&remote.name);
        create(&parent(&link))?;
        // Up from the file's folder to the repository's.
        let up = "../".repeat(2 + remote.name.matches('/').count());
        link_file(&blob, &link, &format!("{up}blobs/{}", remote.etag))
    }
}

/// Path of the incomplete file.
fn partial(root: &Path, remote: &Remote) -> PathBuf {
    root.join("blobs")
        .join(format!("{}.incomplete", remote.etag))
}

/// Links `link`, in a snapshot, to the contents `blob`, whose path from there is `relative`.
fn link_file(blob: &Path, link: &Path, relative: &str) -> Result<()> {
    #[cfg(unix)]
    let linked = {
        let _ = blob;
        std::os::unix::fs::symlink(relative, link)
    };
    #[cfg(not(unix))]
    let linked = {
        let _ = relative;
        fs::copy(blob, link).map(drop)
    };
    match linked {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        other => other.map_err(|e| Error::io(link, "link", e)),
    }
}

fn create(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| Error::io(folder, "create", e))
}

fn parse(id: &str) -> Result<HubId> {
    HubId::parse(id).ok_or_else(|| Error::Hub {
        what: id.into(),
        problem: HubProblem::NotFound,
        detail: "a hub id is OWNER/NAME, as in Qwen/Qwen3-0.6B".into(),
    })
}

/// The weight files of a repository, from its list of files.
enum Weights {
    /// The files that the index lists.
    Indexed,
    /// These files.
    Files(Vec<String>),
    /// No weights that nq can run; with a description of what there is instead.
    None(String),
}

fn weight_files(id: &HubId, names: &[&str]) -> Weights {
    let has = |name: &str| names.contains(&name);
    let ending = |suffix: &str| -> Vec<&str> {
        let models = names.iter().copied().filter(|n| !is_mmproj(n));
        models.filter(|n| n.ends_with(suffix)).collect()
    };
    if let Some(file) = &id.file {
        return if has(file) {
            Weights::Files(vec![file.clone()])
        } else {
            Weights::None(format!("it has no file {file}"))
        };
    }
    if let Some(kind) = &id.kind {
        let all = ending(".gguf");
        let fitting: Vec<&str> = all.iter().copied().filter(|n| is_kind(n, kind)).collect();
        return match fitting[..] {
            [one] => Weights::Files(split_set(one)),
            [] => Weights::None(format!(
                "it has no GGUF file of {kind}; it has {}",
                all.join(", ")
            )),
            _ => Weights::None(format!(
                "name one of its files of {kind}, as {}/FILE: {}",
                id.repo,
                fitting.join(", ")
            )),
        };
    }
    if has(SINGLE) {
        return Weights::Files(vec![SINGLE.into()]);
    }
    if has(INDEX) {
        return Weights::Indexed;
    }
    let single = match (
        ending(".safetensors").as_slice(),
        ending(".gguf").as_slice(),
    ) {
        ([one], _) => Some((*one).to_owned()),
        ([], [one]) => Some((*one).to_owned()),
        ([], [_, ..]) => {
            let list = ending(".gguf").join(", ");
            return Weights::None(format!(
                "name one of its files, as {0}/FILE, or its kind, as {0}:Q4_K_M: {list}",
                id.repo
            ));
        }
        _ => None,
    };
    match single {
        Some(one) => Weights::Files(vec![one]),
        None => Weights::None("it has neither safetensors nor GGUF weights".into()),
    }
}

/// A GGUF file, and those that follow it if it is the first of several.
fn split_set(first: &str) -> Vec<String> {
    let numbered = first
        .strip_suffix(".gguf")
        .and_then(|stem| stem.rsplit_once("-00001-of-"));
    match numbered.and_then(|(stem, digits)| Some((stem, digits, digits.parse::<u32>().ok()?))) {
        Some((stem, digits, count)) if count <= 1000 => (1..=count)
            .map(|i| format!("{stem}-{i:05}-of-{digits}.gguf"))
            .collect(),
        _ => vec![first.into()],
    }
}

/// Configuration and tokenizer files; none for a GGUF file, which contains them.
fn side_files(names: &[&str], weights: &Weights) -> Vec<String> {
    if matches!(weights, Weights::Files(f) if f.iter().all(|n| n.ends_with(".gguf"))) {
        return Vec::new();
    }
    let wanted = |name: &str| {
        matches!(name, "config.json" | "quantize_config.json" | INDEX) || is_copied(name)
    };
    names
        .iter()
        .filter(|n| wanted(n))
        .map(|n| (*n).to_owned())
        .collect()
}

/// The shards that an index lists.
fn shards(index: &Path) -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = fs::read(index).map_err(|e| Error::io(index, "read", e))?;
    let parsed: Index = serde_json::from_slice(&text).map_err(|e| Error::Malformed {
        path: index.into(),
        what: "contents".into(),
        expected: "an object with weight_map".into(),
        found: e.to_string(),
    })?;
    let shards: BTreeSet<String> = parsed.weight_map.into_values().collect();
    match shards
        .iter()
        .find(|s| s.contains(['/', '\\']) || s.starts_with('.'))
    {
        Some(bad) => Err(Error::Malformed {
            path: index.into(),
            what: "weight_map".into(),
            expected: "plain file names".into(),
            found: bad.clone(),
        }),
        None => Ok(shards.into_iter().collect()),
    }
}

/// The model in a snapshot folder, if it is complete.
fn complete(snapshot: &Path, id: &HubId) -> Option<PathBuf> {
    let has = |name: &str| snapshot.join(name).exists();
    if let Some(file) = &id.file {
        return has(file).then(|| snapshot.join(file));
    }
    let listed: Vec<String> = fs::read_dir(snapshot)
        .ok()?
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .collect();
    let names: Vec<&str> = listed.iter().map(String::as_str).collect();
    match weight_files(id, &names) {
        Weights::Files(files) if files.iter().all(|f| f.ends_with(".gguf") && has(f)) => {
            Some(snapshot.join(&files[0]))
        }
        Weights::Files(files) => {
            (has("config.json") && has("tokenizer.json") && files.iter().all(|f| has(f)))
                .then(|| snapshot.into())
        }
        Weights::Indexed => {
            let all = shards(&snapshot.join(INDEX)).ok()?.iter().all(|f| has(f));
            (all && has("config.json") && has("tokenizer.json")).then(|| snapshot.into())
        }
        Weights::None(_) => None,
    }
}
