//! `nq list` and `nq rm`: nq's own model folder; `nq pull`: the hub's cache.

use crate::flags::Global;
use crate::model;
use crate::terminal::{Terminal, human_bytes, print_line, printable, say, shortened};
use anyhow::{Context, bail};
use clap::Args;
use nq_evals::render::kld_cell;
use nq_formats::Checkpoint;
use nq_formats::nq::{at_work, record};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Flags of `nq rm`.
#[derive(Args, Debug)]
pub struct RmArgs {
    /// A name from `nq list`
    pub name: String,
    /// Do not ask for confirmation
    #[arg(short, long)]
    pub yes: bool,
}

/// Flags of `nq pull`.
#[derive(Args, Debug)]
pub struct PullArgs {
    /// A hub id: OWNER/NAME, OWNER/NAME@REVISION, or OWNER/NAME/FILE.gguf for one of its files
    pub id: String,
}

/// Runs `nq pull`.
pub fn pull(args: &PullArgs, global: &Global) -> anyhow::Result<ExitCode> {
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

/// One model of the folder.
#[derive(Serialize)]
struct ModelRow {
    name: String,
    path: PathBuf,
    format: String,
    file_bytes: u64,
    /// Bits per parameter.
    bits_per_weight: Option<f64>,
    /// Mean KL divergence from the source, measured when the model was made.
    kld: Option<f64>,
    /// Why a folder is not a complete model: an interrupted run or a broken file.
    problem: Option<String>,
}

/// Runs `nq list`.
pub fn list(global: &Global) -> anyhow::Result<ExitCode> {
    let dir = model::models_dir()?;
    let rows = rows(&dir)?;
    if global.json {
        print_line(&serde_json::to_string_pretty(&rows)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if rows.is_empty() {
        say(&format!(
            "nq: no models in {}; `nq quantize` writes there",
            dir.display()
        ));
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
        let what = r.problem.as_deref().unwrap_or(&r.format);
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
    say(&format!("in {}", dir.display()));
    Ok(ExitCode::SUCCESS)
}

fn rows(dir: &Path) -> anyhow::Result<Vec<ModelRow>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e).with_context(|| format!("{}: list", dir.display())),
    };
    let mut rows = Vec::new();
    for entry in entries {
        let path = entry
            .with_context(|| format!("{}: list", dir.display()))?
            .path();
        let Some(name) = path.file_name().and_then(|n| n.to_str()).map(String::from) else {
            continue;
        };
        let opened = Checkpoint::open(&path);
        let kld = |c: &Checkpoint| {
            let quality = record(c).ok()??.quality?;
            quality.pointer("/kld/mean")?.as_f64()
        };
        let (bits_per_weight, kld) = match &opened {
            Ok(c) => (Some(c.bits_per_weight()), kld(c)),
            Err(_) => (None, None),
        };
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
            format,
            file_bytes: size_of_tree(&path),
            bits_per_weight,
            kld,
            path,
            problem,
        });
    }
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(rows)
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
    // Only direct children of the folder are accepted: a name, never a path.
    if args.name.is_empty() || args.name.contains(['/', '\\']) || args.name.starts_with('.') {
        bail!(
            "{:?} is not a valid model name; `nq list` shows the names",
            args.name
        );
    }
    let path = dir.join(&args.name);
    let meta = std::fs::symlink_metadata(&path).map_err(|_| {
        anyhow::anyhow!(
            "no model {:?} in {}; `nq list` shows them",
            args.name,
            dir.display()
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
