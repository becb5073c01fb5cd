//! What the terminal gets: progress bars, notes and the handling of closed pipes.

use indicatif::{ProgressBar, ProgressStyle};
pub use nq_formats::human_bytes;
use nq_formats::{Progress, Unit};
use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{self, Write};
use std::sync::Mutex;
use std::time::Duration;

/// Exit code after an interrupt.
pub const INTERRUPTED: u8 = 130;

/// Draws stages on stderr; each note is printed once.
#[derive(Default)]
pub struct Terminal {
    bar: Mutex<Option<ProgressBar>>,
    said: Mutex<HashSet<String>>,
}

impl Terminal {
    /// A fresh terminal.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Progress for Terminal {
    fn begin(&self, stage: &str, total: u64, unit: Unit) {
        let counts = match unit {
            Unit::Bytes => "{bytes}/{total_bytes} {bytes_per_sec}",
            Unit::Tokens => "{human_pos}/{human_len} tokens",
            Unit::Items => "{human_pos}/{human_len}",
        };
        let template = format!("{{msg:28}} {{bar:24}} {counts}  {{elapsed}} (ETA {{eta}})");
        let style = ProgressStyle::with_template(&template)
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::new(total)
            .with_style(style)
            .with_message(stage.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        *self.bar.lock().unwrap_or_else(|e| e.into_inner()) = Some(bar);
    }

    fn advance(&self, n: u64) {
        if let Some(bar) = &*self.bar.lock().unwrap_or_else(|e| e.into_inner()) {
            bar.inc(n);
        }
    }

    fn end(&self) {
        if let Some(bar) = self.bar.lock().unwrap_or_else(|e| e.into_inner()).take() {
            bar.finish_and_clear();
        }
    }

    fn note(&self, message: &str) {
        if !self
            .said
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .insert(message.to_owned())
        {
            return;
        }
        let print = || say(&format!("nq: {message}"));
        match &*self.bar.lock().unwrap_or_else(|e| e.into_inner()) {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }
}

/// True if `error` comes of the reader of our output having gone away.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|e| e.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Prints text and a line break on stdout. Unlike `println!`, a reader that went away is an error
/// to return, not a panic.
pub fn print_line(text: &str) -> io::Result<()> {
    let print = || -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}")?;
        out.flush()
    };
    print().map_err(|e| match e.kind() {
        io::ErrorKind::BrokenPipe => e, // as `is_broken_pipe` looks for it
        kind => io::Error::new(kind, format!("standard output: {e}")),
    })
}

/// Prints text and a line break on stderr. Unlike with `eprintln!`, a reader that went away is no
/// panic: it must not cost the work that a note is about.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// `text` as a word that a shell takes as it is: quoted where it must be.
pub fn shell_word(text: &str) -> Cow<'_, str> {
    let plain = |c: char| c.is_alphanumeric() || "._-/+=:,@%".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.into(),
        false => format!("'{}'", text.replace('\'', r"'\''")).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::shell_word;

    #[test]
    fn a_command_to_copy_is_quoted_where_it_must_be() {
        assert_eq!(shell_word("a/Qwen3-0.6B-int4"), "a/Qwen3-0.6B-int4");
        assert_eq!(shell_word("my models/d é"), "'my models/d é'");
        assert_eq!(shell_word("it's"), r"'it'\''s'");
        assert_eq!(shell_word(""), "''");
    }
}
