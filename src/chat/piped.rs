//! Text from standard input, as opposed to a typed prompt.

use crate::terminal::say;
use crate::texts::read_bounded;
use anyhow::{Context, bail};
use std::fs::File;
use std::io::{self, IsTerminal, Stdin};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Silence on an open standard input after which a note says that nq waits for it.
const PATIENCE: Duration = Duration::from_secs(2);

/// The kind of standard input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StandardInput {
    /// A user types.
    Terminal,
    /// A file, a pipe or a socket: input meant to be read.
    Text,
    /// Anything else, e.g. `/dev/null`.
    Nothing,
}

/// The kind of standard input.
pub fn kind(stdin: &Stdin) -> StandardInput {
    if stdin.is_terminal() {
        return StandardInput::Terminal;
    }
    let file = stdin.as_fd().try_clone_to_owned().map(File::from);
    match file.and_then(|f| f.metadata()).map(|m| m.file_type()) {
        Ok(t) if t.is_file() || t.is_fifo() || t.is_socket() => StandardInput::Text,
        _ => StandardInput::Nothing,
    }
}

/// Most bytes read from standard input: several times what the longest context holds.
const MOST: u64 = 16_000_000;

/// Reads all of standard input, without white space at its end. If it does not end within some
/// seconds, prints `waiting` once.
///
/// # Errors
/// Input that cannot be read, is longer than 16 MB or is not UTF-8.
pub fn read(waiting: &str) -> anyhow::Result<String> {
    let (done, result) = channel();
    std::thread::spawn(move || {
        let read = read_bounded(io::stdin(), MOST);
        let _ = done.send(read); // fails if nobody waits any more
    });
    let bytes = match result.recv_timeout(PATIENCE) {
        Err(RecvTimeoutError::Timeout) => {
            say(&format!("nq: {waiting}"));
            result.recv()?
        }
        early => early?,
    };
    let bytes = bytes.context("standard input")?;
    let mut text = String::from_utf8(bytes).context("standard input is not UTF-8")?;
    text.truncate(text.trim_end().len());
    Ok(text)
}

/// The text of a file, unchanged.
///
/// # Errors
/// Errors of [`read`], naming the file.
pub(crate) fn read_file(path: &Path) -> anyhow::Result<String> {
    let read = || -> anyhow::Result<String> {
        let bytes = read_bounded(File::open(path)?, MOST)?;
        String::from_utf8(bytes).context("it is not UTF-8")
    };
    read().with_context(|| path.display().to_string())
}

/// Joins a prompt and piped text to one message: the prompt, a blank line, the text.
/// Either may be missing.
///
/// # Errors
/// If both are missing.
pub fn join(prompt: Option<&str>, piped: &str) -> anyhow::Result<String> {
    let prompt = prompt.unwrap_or_default();
    let parts = [prompt, piped].map(|part| (!part.trim().is_empty()).then_some(part));
    match parts {
        [Some(prompt), Some(piped)] => Ok(format!("{}\n\n{piped}", prompt.trim_end())),
        [Some(one), None] | [None, Some(one)] => Ok(one.to_owned()),
        [None, None] => {
            bail!("no prompt: expected -p TEXT or text on standard input, found neither")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::join;

    #[test]
    fn a_prompt_goes_before_the_text() {
        for (prompt, piped, expected) in [
            (Some("Summarize:"), "a\nb", "Summarize:\n\na\nb"),
            (Some("Summarize:\n"), "  a", "Summarize:\n\n  a"),
            (Some("Hello "), "", "Hello "),
            (None, "a", "a"),
            (Some(" "), "a", "a"),
        ] {
            assert_eq!(join(prompt, piped).unwrap(), expected);
        }
        assert!(join(None, "\n").is_err() && join(Some(""), "").is_err());
    }
}
