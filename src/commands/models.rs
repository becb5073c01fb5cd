//! `nq list` and `nq rm`: nq's own model folder; `nq pull`: the hub's cache.

use crate::flags::Global;
use crate::model::{self, Stored};
use crate::terminal::{Terminal, human_bytes, print_line, printable, say, shortened};
use anyhow::{Context, bail};
use clap::Args;
use nq_evals::render::kld_cell;
use nq_formats::Checkpoint;
use nq_formats::hub::{HubId, HubOptions};
use nq_formats::nq::{at_work, record};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Where a model is.
#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum StoredIn {
    /// nq's own folder.
    Nq,
    /// The hub's cache.
    Hub,
    /// A folder that the command line names.
    Folder,
}

/// Flags of `nq list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// A folder whose models to list, by the names that `nq serve --models-dir` gives them [default: nq's own, and
    /// the hub's cache]
    pub folder: Option<PathBuf>,
}

/// Flags of `nq rm`.
#[derive(Args, Debug)]
pub(crate) struct RmArgs {
    /// A name from `nq list`; OWNER/NAME is a download
    pub name: String,
    /// Do not ask for confirmation
    #[arg(short, long)]
    pub yes: bool,
}

/// Flags of `nq pull`.
#[derive(Args, Debug)]
pub(crate) struct PullArgs {
    /// A hub id: OWNER/NAME, OWNER/NAME@REVISION, or OWNER/NAME/FILE.gguf for one of its files
    pub id: String,
}

/// Runs `nq pull`.
pub(crate) fn pull(args: &PullArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let path = model::fetch(&args.id, global.offline, &Terminal::new())?;
    // Reports a model that nq cannot read now, not when it is first used.
    let file_bytes = Checkpoint::open(&path)?.store().file_bytes();
    if global.json {
        let json = serde_json::json!({ "id": args.id, "path": path, "file_bytes": file_bytes });
        print_line(&format!("{json:#}"))?;
    } else {
        print_line(&path.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Most characters in the reason why a model cannot be read.
const LONGEST_REASON: usize = 300;

/// One model of a folder or of the hub's cache.
#[derive(Serialize)]
struct ModelRow {
    /// Its name, or its hub id.
    name: String,
    place: StoredIn,
    path: PathBuf,
    format: String,
    /// What its codes are called, such as `4-bit mix`; null for formats of other programs.
    codes: Option<String>,
    file_bytes: u64,
    /// Bits per parameter.
    bits_per_weight: Option<f64>,
    /// Mean KL divergence from the source, measured when the model was made.
    kld: Option<f64>,
    /// Why a folder is not a complete model: an interrupted run or a broken file.
    problem: Option<String>,
}

/// Runs `nq list`.
pub(crate) fn list(args: &ListArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let (rows, places, none) = match &args.folder {
        Some(folder) => {
            let rows = rows(model::stored_in(folder)?, StoredIn::Folder);
            let place = folder.display();
            (rows, format!("in {place}"), format!("no models in {place}"))
        }
        None => {
            let dir = model::models_dir()?;
            let cache = HubOptions::from_env().cache;
            let mut rows = rows(own(&dir)?, StoredIn::Nq);
            rows.extend(downloads(&cache)?);
            let (dir, cache) = (dir.display(), cache.display());
            (
                rows,
                format!("in {dir}; downloads, by OWNER/NAME, in {cache}"),
                format!(
                    "no models in {dir}, where `nq quantize` writes, and no downloads in {cache}"
                ),
            )
        }
    };
    if global.json {
        print_line(&serde_json::to_string_pretty(&rows)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if rows.is_empty() {
        say(&format!("nq: {none}"));
        return Ok(ExitCode::SUCCESS);
    }
    let width = rows
        .iter()
        .map(|r| r.name.chars().count())
        .max()
        .unwrap_or(0)
        .max(4);
    let mut table = format!(
        "{:width$}  {:>10}  {:>5}  {:>7}  FORMAT",
        "NAME", "SIZE", "BITS", "KLD"
    );
    for r in &rows {
        let what = match (&r.problem, &r.codes) {
            (Some(problem), _) => problem.clone(),
            (None, Some(codes)) => format!("{}, {codes}", r.format),
            (None, None) => r.format.clone(),
        };
        let size = human_bytes(r.file_bytes);
        let bits = r.bits_per_weight.map(|b| format!("{b:.2}"));
        let kld = r.kld.map(kld_cell);
        table += &format!(
            "\n{:width$}  {size:>10}  {:>5}  {:>7}  {what}",
            r.name,
            bits.unwrap_or_default(),
            kld.unwrap_or_default(),
        );
    }
    print_line(&table)?;
    say(&places);
    Ok(ExitCode::SUCCESS)
}

/// What lies in nq's own folder, unfinished models too.
fn own(dir: &Path) -> anyhow::Result<Vec<Stored>> {
    let named = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        Some(Stored { name, path })
    };
    let mut own: Vec<Stored> = children(dir)?.into_iter().filter_map(named).collect();
    own.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(own)
}

/// What each model's files say.
fn rows(models: Vec<Stored>, place: StoredIn) -> Vec<ModelRow> {
    let mut rows = Vec::new();
    for Stored { name, path } in models {
        let opened = Checkpoint::open(&path);
        let record = opened.as_ref().ok().and_then(|c| record(c).ok()?);
        let kld = record
            .as_ref()
            .and_then(|r| r.quality.as_ref()?.pointer("/kld/mean")?.as_f64());
        let bits_per_weight = opened.as_ref().ok().map(Checkpoint::bits_per_weight);
        let (format, problem) = match opened {
            Ok(c) => (c.store().format().to_owned(), None),
            Err(_) if name.ends_with(".partial") => {
                let why = if at_work(&path) {
                    "being written"
                } else {
                    "interrupted; `nq quantize --resume` continues it, `nq rm` removes it"
                };
                (String::new(), Some(why.to_owned()))
            }
            Err(e) => {
                let why = e.to_string();
                let why = shortened(&why, LONGEST_REASON);
                (String::new(), Some(format!("unreadable: {why}")))
            }
        };
        rows.push(ModelRow {
            name,
            place,
            format,
            codes: record.map(|r| r.codes()),
            // A link to a model is as large as the model.
            file_bytes: size_of_tree(&path.canonicalize().unwrap_or_else(|_| path.clone())),
            bits_per_weight,
            kld,
            path,
            problem,
        });
    }
    rows
}

/// How the hub's cache names the folders of models: `models--OWNER--NAME`.
const CACHED: &str = "models--";

/// The models in the hub's cache that have weights of a kind that nq reads.
fn downloads(cache: &Path) -> anyhow::Result<Vec<ModelRow>> {
    let mut rows = Vec::new();
    for path in children(cache)? {
        let folder = path.file_name().and_then(|n| n.to_str());
        let Some((owner, name)) = folder.and_then(|n| n.strip_prefix(CACHED)?.split_once("--"))
        else {
            continue;
        };
        let files: Vec<PathBuf> = children(&path.join("snapshots"))?
            .iter()
            .map(|revision| children(revision))
            .collect::<anyhow::Result<Vec<_>>>()?
            .concat();
        let has = |end: &str| {
            files
                .iter()
                .any(|f| f.extension().is_some_and(|e| e == end))
        };
        let Some(format) = ["safetensors", "gguf"].into_iter().find(|end| has(end)) else {
            continue;
        };
        rows.push(ModelRow {
            name: format!("{owner}/{name}"),
            place: StoredIn::Hub,
            format: format.into(),
            codes: None,
            file_bytes: size_of_tree(&path),
            bits_per_weight: None,
            kld: None,
            path,
            problem: None,
        });
    }
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(rows)
}

/// What a folder holds; nothing if it is not there.
fn children(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let list = || format!("{}: list", dir.display());
    match std::fs::read_dir(dir) {
        Ok(entries) => entries.map(|e| Ok(e.with_context(list)?.path())).collect(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e).with_context(list),
    }
}

/// The folder of a download that goes by its hub id, of a whole repository; `None` for other names.
fn download(name: &str, cache: &Path) -> Option<PathBuf> {
    let id = HubId::parse(name).filter(|id| id.repo == name)?;
    Some(cache.join(format!("{CACHED}{}", id.repo.replace('/', "--"))))
}

/// Bytes of a file, or of all files below a folder.
fn size_of_tree(path: &Path) -> u64 {
    match std::fs::symlink_metadata(path) {
        Ok(m) if m.is_dir() => std::fs::read_dir(path)
            .map(|d| d.flatten().map(|e| size_of_tree(&e.path())).sum())
            .unwrap_or(0),
        Ok(m) => m.len(),
        Err(_) => 0,
    }
}

/// Runs `nq rm`.
pub fn remove(args: &RmArgs) -> anyhow::Result<ExitCode> {
    let dir = model::models_dir()?;
    let cache = HubOptions::from_env().cache;
    let downloaded = download(&args.name, &cache);
    let place = if downloaded.is_some() { &cache } else { &dir };
    let path = match downloaded {
        Some(path) => path,
        // Only direct children of the folder are accepted: a name, never a path.
        None if args.name.is_empty()
            || args.name.contains(['/', '\\'])
            || args.name.starts_with('.') =>
        {
            bail!(
                "{:?} is not a valid model name; `nq list` shows the names",
                args.name
            )
        }
        None => dir.join(&args.name),
    };
    let meta = std::fs::symlink_metadata(&path).map_err(|_| {
        anyhow::anyhow!(
            "no model {:?} in {}; `nq list` shows them",
            args.name,
            place.display()
        )
    })?;
    if at_work(&path) {
        bail!("{}: another process is at work here", path.display());
    }
    if !args.yes {
        if !std::io::stdin().is_terminal() {
            bail!(
                "removing {} needs --yes where nobody can be asked",
                path.display()
            );
        }
        write!(
            std::io::stderr(),
            "remove {} ({})? [y/N] ",
            printable(&path.display().to_string()),
            human_bytes(size_of_tree(&path))
        )?;
        let mut answer = String::new();
        std::io::stdin().read_line(&mut answer)?;
        if !matches!(answer.trim(), "y" | "Y" | "yes") {
            say("kept");
            return Ok(ExitCode::from(1));
        }
    }
    let removed = if meta.is_dir() {
        std::fs::remove_dir_all(&path)
    } else {
        std::fs::remove_file(&path)
    };
    removed.with_context(|| format!("{}: remove", path.display()))?;
    say(&format!("removed {}", path.display()));
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::{StoredIn, download, downloads};
    use std::fs;

    #[test]
    fn downloads_are_listed_by_their_ids_and_removed_by_them_alone() {
        let cache = tempfile::tempdir().expect("a folder");
        for (repo, file) in [
            ("models--Some--Model-1B", "model.safetensors"),
            ("models--Other--Model-GGUF", "model-Q4_K_M.gguf"),
            ("models--Other--Speech", "weights.pt"),
            ("datasets--Some--Text", "text.safetensors"),
        ] {
            let snapshot = cache.path().join(repo).join("snapshots/abc");
            fs::create_dir_all(&snapshot).expect("a folder");
            fs::write(snapshot.join(file), [0; 100]).expect("a file");
        }
        let rows = downloads(cache.path()).expect("a list");
        let found: Vec<_> = rows
            .iter()
            .map(|r| (&*r.name, &*r.format, r.file_bytes))
            .collect();
        let expected = [
            ("Other/Model-GGUF", "gguf", 100),
            ("Some/Model-1B", "safetensors", 100),
        ];
        assert_eq!(found, expected);
        assert!(rows.iter().all(|r| r.place == StoredIn::Hub));
        let whole = download("Some/Model-1B", cache.path());
        assert_eq!(whole, Some(cache.path().join("models--Some--Model-1B")));
        for name in [
            "model",
            "Some/Model-1B@main",
            "a/b/c.gguf",
            "../x",
            "/etc",
            "Other/Model-GGUF:Q4_K_M",
        ] {
            assert_eq!(download(name, cache.path()), None, "{name}");
        }
        assert!(
            downloads(&cache.path().join("none"))
                .expect("a list")
                .is_empty()
        );
    }
}
