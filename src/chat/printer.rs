//! Prints an answer: text to stdout as it comes; thinking dimmed on a terminal, otherwise to
//! stderr, or nowhere.

use super::wrap::Wrap;
use crate::terminal::printable;
use indicatif::{ProgressBar, ProgressStyle};
use nq_runtime::thinking::Part;
use std::io::{self, Write};
use std::time::Duration;

const DIM: &str = "\x1b[2m";
const RESET: &str = "\x1b[0m";

/// How thinking is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Thinking {
    /// Not shown.
    Hidden,
    /// Dimmed, before the answer.
    Dimmed,
    /// Between `<think>` and `</think>`, before the answer: for a terminal without colours.
    Tagged,
    /// On stderr, so that stdout has only the answer.
    Aside,
}

/// Writes one answer.
pub(crate) struct Printer<'a> {
    out: &'a mut dyn Write,
    err: &'a mut dyn Write,
    thinking: Thinking,
    raw: bool,
    last: Option<Part>,
    ends_line: bool,
    wrap: Wrap,
    /// A spinner on stderr, if that is a terminal, while thinking is hidden.
    sign: Option<ProgressBar>,
}

impl<'a> Printer<'a> {
    /// A printer to stdout and stderr, or replacements for them. `raw`: stdout is data and gets
    /// the exact output of the model; otherwise control characters are escaped. Lines for people are
    /// wrapped at `width` columns.
    pub fn new(
        out: &'a mut dyn Write,
        err: &'a mut dyn Write,
        thinking: Thinking,
        raw: bool,
        width: Option<usize>,
    ) -> Self {
        Printer {
            out,
            err,
            thinking,
            raw,
            last: None,
            ends_line: true,
            wrap: Wrap::new(width.filter(|_| !raw)),
            sign: None,
        }
    }

    /// Writes a piece at once.
    ///
    /// # Errors
    /// Errors of writing, including a closed pipe.
    pub fn piece(&mut self, part: Part, text: &str) -> io::Result<()> {
        if part == Part::Thinking && self.thinking == Thinking::Hidden {
            self.sign.get_or_insert_with(sign);
            return Ok(());
        }
        self.end_sign();
        if self.last != Some(part) {
            self.leave()?;
            if part == Part::Thinking {
                let opening = match self.thinking {
                    Thinking::Dimmed => DIM,
                    _ => "<think>\n",
                };
                self.target(part).write_all(opening.as_bytes())?;
            }
            self.last = Some(part);
        }
        self.ends_line = text.ends_with('\n');
        let text = if self.raw && part == Part::Answer {
            text.to_owned()
        } else {
            self.wrap.push(&printable(text))
        };
        let target = self.target(part);
        target.write_all(text.as_bytes())?;
        target.flush()
    }

    /// Ends the answer's last line, if it has one.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        self.end_sign();
        self.leave()?;
        if self.last == Some(Part::Answer) {
            let rest = self.wrap.finish();
            self.out.write_all(rest.as_bytes())?;
        }
        if self.last == Some(Part::Answer) && !self.ends_line {
            self.out.write_all(b"\n")?;
            self.ends_line = true;
        }
        self.out.flush()
    }

    /// Makes room for a note on stderr: ends the line that a person reads. An answer that is data stays as it is.
    pub(crate) fn before_note(&mut self) -> io::Result<()> {
        match (self.raw, self.last) {
            (true, Some(Part::Answer)) => self.out.flush(),
            _ => self.finish(),
        }
    }

    /// Closes the thinking, if it came last.
    fn leave(&mut self) -> io::Result<()> {
        if self.last != Some(Part::Thinking) {
            return Ok(());
        }
        let closing = match self.thinking {
            Thinking::Dimmed => RESET,
            _ => "\n</think>",
        };
        self.last = None;
        let rest = self.wrap.finish();
        let target = self.target(Part::Thinking);
        write!(target, "{rest}{closing}\n\n")?;
        target.flush()
    }

    fn end_sign(&mut self) {
        if let Some(sign) = self.sign.take() {
            sign.finish_and_clear();
        }
    }

    fn target(&mut self, part: Part) -> &mut dyn Write {
        match (part, self.thinking) {
            (Part::Thinking, Thinking::Aside) => self.err,
            _ => self.out,
        }
    }
}

/// A spinner on stderr, if that is a terminal, that shows how long the model has been thinking.
fn sign() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} thinking {elapsed}");
    let sign = ProgressBar::new_spinner();
    sign.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    sign.enable_steady_tick(Duration::from_millis(150));
    sign
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(thinking: Thinking, pieces: &[(Part, &str)]) -> (String, String) {
        print_at(80, thinking, pieces)
    }

    fn print_at(width: usize, thinking: Thinking, pieces: &[(Part, &str)]) -> (String, String) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let raw = thinking == Thinking::Aside;
        let mut printer = Printer::new(&mut out, &mut err, thinking, raw, Some(width));
        for (part, text) in pieces {
            printer.piece(*part, text).unwrap();
        }
        printer.finish().unwrap();
        let text = |v| String::from_utf8(v).unwrap();
        (text(out), text(err))
    }

    #[test]
    fn thinking_is_shown_as_asked() {
        let pieces = [
            (Part::Thinking, "a"),
            (Part::Thinking, " b"),
            (Part::Answer, "c"),
            (Part::Answer, " d"),
        ];
        let check = |thinking, out: &str, err: &str| {
            assert_eq!(print(thinking, &pieces), (out.into(), err.into()));
        };
        check(Thinking::Hidden, "c d\n", "");
        check(Thinking::Dimmed, "\x1b[2ma b\x1b[0m\n\nc d\n", "");
        check(Thinking::Tagged, "<think>\na b\n</think>\n\nc d\n", "");
        check(Thinking::Aside, "c d\n", "<think>\na b\n</think>\n\n");
    }

    /// A note within an answer or behind it adds no line to what stdout is given.
    #[test]
    fn notes_leave_data_alone() {
        for (raw, expected) in [(true, "ab\n"), (false, "a\nb\n")] {
            let (mut out, mut err) = (Vec::new(), Vec::new());
            let mut printer = Printer::new(&mut out, &mut err, Thinking::Aside, raw, None);
            for piece in ["a", "b"] {
                printer.piece(Part::Answer, piece).unwrap();
                printer.before_note().unwrap();
            }
            printer.finish().unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    /// A model may write anything, including the escape code for the clipboard (OSC 52).
    #[test]
    fn escape_codes_do_not_reach_a_terminal() {
        let code = "\x1b]52;c;cm0gLXJm\x07\tx\n";
        let pieces = [(Part::Thinking, code), (Part::Answer, code)];
        let written_out = r"\u001b]52;c;cm0gLXJm\u0007";
        let (out, _) = print(Thinking::Tagged, &pieces);
        assert_eq!(out.matches(written_out).count(), 2, "{out:?}");
        assert!(!out.contains(['\x1b', '\x07']) && out.ends_with("\tx\n"));
        // In a pipe, an answer is data; stderr may still be a terminal.
        let (out, err) = print(Thinking::Aside, &pieces);
        assert_eq!(out, code);
        assert!(err.contains(written_out) && !err.contains('\x1b'));
    }

    #[test]
    fn lines_are_broken_for_people_only() {
        let words = "one two three four five six seven";
        let pieces = [(Part::Thinking, words), (Part::Answer, words)];
        let broken = "one two three four f\x1b[K\nfive six seven"; // taken back
        let check = |thinking, out: &str, err: &str| {
            assert_eq!(print_at(20, thinking, &pieces), (out.into(), err.into()));
        };
        let both = format!("<think>\n{broken}\n</think>\n\n{broken}\n");
        check(Thinking::Tagged, &both, "");
        let aside = format!("<think>\n{words}\n</think>\n\n");
        check(Thinking::Aside, &format!("{words}\n"), &aside);
    }

    #[test]
    fn the_last_line_is_ended_once() {
        assert_eq!(print(Thinking::Hidden, &[(Part::Answer, "a\n")]).0, "a\n");
        assert_eq!(print(Thinking::Hidden, &[]).0, "");
        // Cut off while thinking: colours are reset.
        let cut = print(Thinking::Dimmed, &[(Part::Thinking, "a")]).0;
        assert_eq!(cut, "\x1b[2ma\x1b[0m\n\n");
    }
}
