//! Wraps lines between words at a terminal's width, while text streams.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// With fewer columns, wrapping is left to the terminal.
const LEAST: usize = 20;
/// Columns between tab stops.
const TAB: usize = 8;
/// Begins and ends a block of code, which is not wrapped.
const FENCE: &str = "```";

/// Wraps lines. A word is held back until it is known to be complete, i.e. until the next one begins.
pub struct Wrap {
    /// Columns per line; `None` does not wrap.
    width: Option<usize>,
    column: usize,
    spaces: String,
    word: String,
    /// True if the line began with a fence.
    fence: bool,
    code: bool,
}

impl Wrap {
    /// Wraps lines at `width` columns, unless that is too few.
    pub fn new(width: Option<usize>) -> Self {
        Wrap {
            width: width.filter(|w| *w >= LEAST),
            column: 0,
            spaces: String::new(),
            word: String::new(),
            fence: false,
            code: false,
        }
    }

    /// Takes more text and returns the part that is certain.
    pub fn push(&mut self, text: &str) -> String {
        if self.width.is_none() {
            return text.into();
        }
        let mut out = String::new();
        for c in text.chars() {
            match c {
                '\n' => {
                    self.end_word(&mut out);
                    out.push('\n');
                    self.spaces.clear();
                    self.column = 0;
                    self.code ^= std::mem::take(&mut self.fence);
                }
                ' ' | '\t' => {
                    self.end_word(&mut out);
                    self.spaces.push(c);
                }
                // Scripts with wide characters break between any two of them.
                _ if c.width() == Some(2) => {
                    self.end_word(&mut out);
                    self.word.push(c);
                }
                _ => self.word.push(c),
            }
        }
        out
    }

    /// Returns the rest, at the end of the text.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.end_word(&mut out);
        out.push_str(&std::mem::take(&mut self.spaces));
        self.column = 0;
        self.code = false;
        self.fence = false;
        out
    }

    fn end_word(&mut self, out: &mut String) {
        if self.word.is_empty() {
            return;
        }
        if self.column == 0 && self.word.starts_with(FENCE) {
            self.fence = true;
        }
        let after_spaces = self.spaces.chars().fold(self.column, |at, c| match c {
            '\t' => (at / TAB + 1) * TAB,
            _ => at + 1,
        });
        let width = self.word.width();
        let fits = self.width.is_none_or(|w| after_spaces + width <= w);
        if fits || self.column == 0 || self.code {
            out.push_str(&self.spaces);
            self.column = after_spaces;
        } else {
            out.push('\n');
            self.column = 0;
        }
        out.push_str(&self.word);
        self.column += width;
        self.spaces.clear();
        self.word.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::Wrap;

    /// The lines must be the same however the text is cut into pieces.
    fn check(text: &str, expected: &str) {
        for size in [1, 2, 3, 7, 1000] {
            let mut wrap = Wrap::new(Some(20));
            let chars: Vec<char> = text.chars().collect();
            let mut out = String::new();
            for piece in chars.chunks(size) {
                out += &wrap.push(&piece.iter().collect::<String>());
            }
            out += &wrap.finish();
            assert_eq!(out, expected, "by {size}");
        }
    }

    #[test]
    fn lines_break_between_words() {
        check("short", "short");
        check(
            "twenty columns fit x and no more",
            "twenty columns fit x\nand no more",
        );
        check(
            "  indented by two, kept  \nnext",
            "  indented by two,\nkept\nnext",
        );
        check(
            "see https://example.org/a/very/long/address there",
            "see\nhttps://example.org/a/very/long/address\nthere",
        );
        check("a\n\nb\n", "a\n\nb\n");
        check("日本語日本語日本語日本語", "日本語日本語日本語日\n本語");
    }

    #[test]
    fn code_is_left_as_it_is() {
        let code = "```text\nlet value = compute(first, second);\n```\n";
        check(code, code);
        check(
            &format!("{code}and then words again, broken"),
            &format!("{code}and then words\nagain, broken"),
        );
    }

    #[test]
    fn without_a_width_text_passes_at_once() {
        for width in [None, Some(0), Some(19)] {
            let mut wrap = Wrap::new(width);
            assert_eq!(
                wrap.push("a long line of words that "),
                "a long line of words that "
            );
            assert_eq!(wrap.finish(), "");
        }
    }
}
