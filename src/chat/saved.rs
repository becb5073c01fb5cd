//! Chats in files: written whole or not at all, read within a limit.

use crate::texts::read_bounded;
use anyhow::{Context, bail};
use nq_runtime::Message;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Most bytes of a saved chat.
const MOST: u64 = 64_000_000;

/// `path` with a `~` at its start replaced by the user's home, as a shell does.
pub(crate) fn at_home(path: &str) -> PathBuf {
    let home = std::env::var_os("HOME").filter(|h| !h.is_empty());
    match (path.strip_prefix('~'), home) {
        (Some(rest), Some(home)) if rest.is_empty() || rest.starts_with('/') => {
            Path::new(&home).join(rest.trim_start_matches('/'))
        }
        _ => path.into(),
    }
}

/// Writes a chat as JSON that only the user may read.
///
/// # Errors
/// A file that exists already, unless forced; errors of writing.
pub(crate) fn save(
    path: &Path,
    force: bool,
    model: &str,
    messages: &[Message],
) -> anyhow::Result<()> {
    if path.exists() && !force {
        bail!("{} exists: /save --force overwrites it", path.display());
    }
    let chat = serde_json::json!({ "model": model, "messages": messages });
    let mut name = path
        .file_name()
        .with_context(|| format!("{}: a file name is needed", path.display()))?
        .to_owned();
    name.push(".partial");
    let partial = path.with_file_name(name);
    let write = || -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&partial)?;
        serde_json::to_writer_pretty(&mut file, &chat)?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        std::fs::rename(&partial, path)
    };
    write().with_context(|| format!("{}: cannot be written", path.display()))
}

/// Reads the messages of a chat.
///
/// # Errors
/// A file that cannot be read, is longer than 64 MB or does not hold a list of messages.
pub fn load(path: &Path) -> anyhow::Result<Vec<Message>> {
    let place = || path.display().to_string();
    let file = File::open(path);
    let bytes = file
        .and_then(|f| read_bounded(f, MOST))
        .with_context(place)?;
    let json: serde_json::Value = serde_json::from_slice(&bytes).with_context(place)?;
    let messages = json.get("messages").unwrap_or(&json).clone();
    serde_json::from_value(messages)
        .with_context(|| format!("{}: expected a list of messages", path.display()))
}

#[cfg(test)]
mod tests {
    use super::at_home;
    use std::path::Path;

    #[test]
    fn a_tilde_is_the_users_home() {
        let home = std::env::var_os("HOME").expect("a home");
        assert_eq!(at_home("~/a b.json"), Path::new(&home).join("a b.json"));
        assert_eq!(at_home("~"), Path::new(&home));
        for same in ["~other/x", "a/~/b", "/tmp/x", "x~"] {
            assert_eq!(at_home(same), Path::new(same));
        }
    }
}
