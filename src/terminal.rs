//! Output to the terminal: progress bars, notes and the handling of closed pipes.
//!
//! A terminal executes escape codes in its input: they move its cursor, set its title and fill its
//! clipboard. Names, errors and answers may come from other people's files, so everything that nq prints
//! goes through this module, which escapes control characters as `\u001b`. Output to a stdout that
//! is not a terminal is data: an answer is written exactly as the model gave it, and reports with
//! control characters escaped, which in JSON means the same.

use indicatif::{ProgressBar, ProgressStyle};
pub use nq_formats::human_bytes;
use nq_formats::{Progress, Unit};
use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::time::Duration;
use unicode_width::UnicodeWidthStr;

/// Exit code after an interrupt.
pub const INTERRUPTED: u8 = 130;

/// Exits as an interrupt does, without leaving temporary files.
pub fn leave_interrupted() -> ! {
    nq_formats::durable::remove_temporaries();
    std::process::exit(INTERRUPTED.into());
}

/// Makes SIGINT, SIGTERM and SIGHUP end the program that way.
///
/// # Errors
/// If the system refuses a handler.
pub fn leave_on_signals() -> anyhow::Result<()> {
    ctrlc::set_handler(|| leave_interrupted())?;
    Ok(())
}

/// Draws stages on stderr; each note is printed once.
#[derive(Default)]
pub struct Terminal {
    bar: Mutex<Option<ProgressBar>>,
    said: Mutex<HashSet<String>>,
}

impl Terminal {
    /// A new terminal.
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
            .with_message(printable(stage).into_owned());
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

/// True if `error` means that the reader of our output is gone.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|e| e.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Prints text and a line break on stdout. Unlike with `println!`, a reader that is gone is an error
/// to return, not a panic.
pub fn print_line(text: &str) -> io::Result<()> {
    let print = || -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", printable(text))?;
        out.flush()
    };
    print().map_err(|e| match e.kind() {
        io::ErrorKind::BrokenPipe => e, // as `is_broken_pipe` looks for it
        kind => io::Error::new(kind, format!("standard output: {e}")),
    })
}

/// Prints text and a line break on stderr, with the middle of long lines left out. Unlike with
/// `eprintln!`, a reader that is gone causes no panic: it must not cost the work that a note is about.
pub fn say(text: &str) {
    let text = printable(text);
    let lines: Vec<Cow<'_, str>> = text.split('\n').map(|l| shortened(l, LONGEST)).collect();
    let _ = writeln!(io::stderr().lock(), "{}", lines.join("\n"));
}

/// Most characters of a line on stderr. A line that quotes a file could have any length.
const LONGEST: usize = 1000;

/// `text` without its middle if it has more than `most` characters; says how much was left out.
pub fn shortened(text: &str, most: usize) -> Cow<'_, str> {
    let count = text.chars().count();
    if count <= most {
        return text.into();
    }
    let at = |n| text.char_indices().nth(n).map_or(text.len(), |(i, _)| i);
    // An error begins with its subject and ends with what was expected and found.
    let (head, tail) = (most * 3 / 5, most * 3 / 10);
    let left_out = count - head - tail;
    let (head, tail) = (&text[..at(head)], &text[at(count - tail)..]);
    format!("{head}[{left_out} characters]{tail}").into()
}

/// `text` with control characters, except line feed and tab, escaped as `\u001b`.
pub fn printable(text: &str) -> Cow<'_, str> {
    let harms = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(harms) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if harms(c) {
            out.push_str(&format!("\\u{:04x}", u32::from(c)))
        } else {
            out.push(c)
        }
    }
    out.into()
}

/// Columns of the terminal on stdout; `None` if stdout is not a terminal or its width is unknown.
pub fn width() -> Option<usize> {
    let dumb = std::env::var_os("TERM").is_some_and(|v| v == "dumb");
    let (width, _) = terminal_size::terminal_size_of(io::stdout()).filter(|_| !dumb)?;
    Some(usize::from(width.0))
}

/// True if text on this stream may have colours: a terminal that has them, of a user who wants them.
pub fn has_colours(stream: &impl IsTerminal) -> bool {
    let off = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
        || std::env::var_os("TERM").is_some_and(|v| v == "dumb");
    stream.is_terminal() && !off
}

/// `text` with lines broken between words at `width` columns, if there is a width; all but its first line begin
/// with `indent` spaces.
pub fn filled(text: &str, width: Option<usize>, indent: usize) -> String {
    let Some(width) = width.filter(|w| *w > 2 * indent) else {
        return text.into();
    };
    let (mut out, mut column) = (String::new(), 0);
    for (i, word) in text.split(' ').enumerate() {
        let wide = word.width();
        if i > 0 && column + 1 + wide > width {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            column = indent;
        } else if i > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += wide;
    }
    out
}

/// The stream for notes: stderr with control characters escaped, and notes of nq in grey where colours are.
pub struct Notes {
    colours: bool,
}

impl Notes {
    /// Over this process's stderr.
    pub fn new() -> Self {
        let colours = has_colours(&io::stderr());
        Notes { colours }
    }
}

impl Write for Notes {
    /// Each write must be whole characters.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let text = printable(&text);
        let mut out = io::stderr().lock();
        match text.strip_suffix('\n') {
            Some(line) if self.colours && line.starts_with("nq: ") => {
                writeln!(out, "\x1b[90m{line}\x1b[0m")?;
            }
            _ => out.write_all(text.as_bytes())?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// `text` as a word for a shell: quoted if necessary.
pub fn shell_word(text: &str) -> Cow<'_, str> {
    let plain = |c: char| c.is_alphanumeric() || "._-/+=:,@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.into()
    } else {
        format!("'{}'", text.replace('\'', r"'\''")).into()
    }
}

#[cfg(test)]
mod tests {
    use super::{filled, printable, shell_word, shortened};

    #[test]
    fn control_characters_are_written_out() {
        for (text, expected) in [
            ("plain\ttext\nof é and 日本", "plain\ttext\nof é and 日本"),
            ("\x1b]52;c;aGk=\x07", r"\u001b]52;c;aGk=\u0007"),
            ("a\rb\x08\x7f", r"a\u000db\u0008\u007f"),
            // The single-character forms of escape sequences.
            ("\u{9b}31m\u{90}", r"\u009b31m\u0090"),
        ] {
            assert_eq!(printable(text), expected);
        }
        // Escaped JSON has the same value.
        let json = serde_json::to_string("\u{9b}\u{7f}").unwrap();
        let read: String = serde_json::from_str(&printable(&json)).unwrap();
        assert_eq!(read, "\u{9b}\u{7f}");
    }

    #[test]
    fn lines_are_filled_to_the_width() {
        let text = "one two three four";
        assert_eq!(filled(text, None, 2), text);
        assert_eq!(filled(text, Some(9), 2), "one two\n  three\n  four");
        assert_eq!(filled("日本 日本", Some(8), 0), "日本\n日本");
        assert_eq!(filled("a  b", Some(80), 0), "a  b");
    }

    #[test]
    fn long_lines_keep_their_ends() {
        assert_eq!(shortened("abc", 3), "abc");
        let line = format!("file: {}: expected 1, found 2", "é".repeat(5000));
        let short = shortened(&line, 1000);
        assert!(short.starts_with("file: éé") && short.ends_with("é: expected 1, found 2"));
        assert!(short.contains("[4127 characters]"), "{short}");
        assert!(short.chars().count() < 1000);
    }

    #[test]
    fn a_command_to_copy_is_quoted_where_it_must_be() {
        assert_eq!(shell_word("a/Qwen3-0.6B-int4"), "a/Qwen3-0.6B-int4");
        assert_eq!(shell_word("my models/d é"), "'my models/d é'");
        assert_eq!(shell_word("it's"), r"'it'\''s'");
        assert_eq!(shell_word(""), "''");
    }
}
