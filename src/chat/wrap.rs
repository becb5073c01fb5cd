//! Wraps lines between words at a terminal's width, while text streams.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// With fewer columns, wrapping is left to the terminal.
const LEAST: usize = 20;
/// Columns between tab stops.
const TAB: usize = 8;
/// Begins and ends a block of code, which is not wrapped.
const FENCE: &str = "```";

/// Wraps lines. Every character is shown at once: if the word that it belongs to turns out to be too long for
/// its line, the word is taken back and begins the next line.
pub(crate) struct Wrap {
    /// Columns per line; `None` does not wrap.
    width: Option<usize>,
    /// Columns before the word.
    column: usize,
    /// Spaces after the last word, which are shown with the next.
    spaces: String,
    /// The word so far.
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

    /// Takes more text and returns what to print.
    pub fn push(&mut self, text: &str) -> String {
        let Some(width) = self.width else {
            return text.into();
        };
        let mut out = String::new();
        for c in text.chars() {
            match c {
                '\n' => {
                    self.end_word();
                    self.code ^= std::mem::take(&mut self.fence);
                    out.push('\n');
                    self.spaces.clear();
                    self.column = 0;
                }
                ' ' | '\t' => {
                    self.end_word();
                    self.spaces.push(c);
                }
                _ => self.character(c, width, &mut out),
            }
        }
        out
    }

    /// Returns the rest, at the end of the text.
    pub(crate) fn finish(&mut self) -> String {
        self.word.clear();
        self.column = 0;
        self.fence = false;
        self.code = false;
        std::mem::take(&mut self.spaces)
    }

    fn character(&mut self, c: char, width: usize, out: &mut String) {
        // Scripts with wide characters break between any two of them.
        if c.width() == Some(2) {
            self.end_word();
        }
        if !self.spaces.is_empty() {
            let after = self.spaces.chars().fold(self.column, |at, c| match c {
                '\t' => (at / TAB + 1) * TAB,
                _ => at + 1,
            });
            if after + c.width().unwrap_or(0) <= width || self.code || self.column == 0 {
                out.push_str(&self.spaces);
                self.column = after;
            } else {
                out.push('\n');
                self.column = 0;
            }
            self.spaces.clear();
        }
        let before = self.word.width();
        self.word.push(c);
        let fits = self.column + self.word.width() <= width;
        if fits || self.column == 0 || self.code {
            out.push(c);
            return;
        }
        // In the last column, the cursor stays on the character just printed.
        let full = self.column + before == width;
        let back = before - usize::from(full && before > 0);
        if back > 0 {
            out.push_str(&format!("\x1b[{back}D"));
        }
        if before > 0 {
            out.push_str("\x1b[K");
        }
        out.push('\n');
        out.push_str(&self.word);
        self.column = 0;
    }

    fn end_word(&mut self) {
        self.fence |= self.column == 0 && self.word.starts_with(FENCE);
        self.column += self.word.width();
        self.word.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::Wrap;
    use unicode_width::UnicodeWidthChar;

    const WIDTH: usize = 20;

    /// What a terminal shows of `text`: it goes on in the next line at its edge, and knows the two codes that
    /// take a word back. Spaces at the ends of lines are not seen.
    fn shown(text: &str) -> String {
        // The cells of each line, with the characters that have no width of their own.
        let mut lines: Vec<Vec<String>> = vec![Vec::new()];
        let mut column = 0;
        let mut rest = text.chars();
        while let Some(c) = rest.next() {
            let width = c.width().unwrap_or(0);
            let line = lines.last_mut().unwrap();
            match c {
                '\x1b' => {
                    let code: String = rest
                        .by_ref()
                        .take_while(|c| !c.is_ascii_alphabetic())
                        .collect();
                    // `take_while` has taken the letter: only a move has a number.
                    match code[1..].parse::<usize>() {
                        Ok(n) => column = column.min(WIDTH - 1) - n,
                        Err(_) => line.truncate(column.min(WIDTH - 1)),
                    }
                }
                '\n' => {
                    lines.push(Vec::new());
                    column = 0;
                }
                c if width == 0 => line.last_mut().unwrap().push(c),
                c => {
                    if column + width > WIDTH {
                        lines.push(Vec::new());
                        column = 0;
                    }
                    let line = lines.last_mut().unwrap();
                    line.resize(column, " ".into());
                    line.push(c.into());
                    line.extend((1..width).map(|_| String::new()));
                    column += width;
                }
            }
        }
        let lines: Vec<String> = lines
            .iter()
            .map(|l| l.concat().trim_end().to_owned())
            .collect();
        lines.join("\n")
    }

    /// The lines must be the same however the text is cut into pieces.
    fn check(text: &str, expected: &str) {
        for size in [1, 2, 3, 7, 1000] {
            let mut wrap = Wrap::new(Some(WIDTH));
            let chars: Vec<char> = text.chars().collect();
            let mut out = String::new();
            for piece in chars.chunks(size) {
                out += &wrap.push(&piece.iter().collect::<String>());
            }
            out += &wrap.finish();
            assert_eq!(shown(&out), expected, "by {size}: {out:?}");
        }
    }

    /// Base64, minified JSON and scripts without spaces are words that hardly end.
    #[test]
    fn no_character_waits_for_the_next() {
        let mut wrap = Wrap::new(Some(WIDTH));
        let text = "key: QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo= and สวัสดีชาวโลกทุกคนที่นี่";
        let mut out = String::new();
        for (i, c) in text.char_indices() {
            out += &wrap.push(&c.to_string());
            let so_far = text[..i + c.len_utf8()].chars();
            let so_far: String = so_far.filter(|c| !c.is_whitespace()).collect();
            let seen: String = shown(&out).chars().filter(|c| !c.is_whitespace()).collect();
            assert_eq!(seen, so_far);
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
            "see\nhttps://example.org/\na/very/long/address\nthere",
        );
        check("a\n\nb\n", "a\n\nb\n");
        check("日本語日本語日本語日本語", "日本語日本語日本語日\n本語");
    }

    #[test]
    fn code_is_left_as_it_is() {
        let code = "```text\nlet value = compute(first, second);\n```\n";
        // Cut by the terminal, not between words.
        let cut = "```text\nlet value = compute(\nfirst, second);\n```\n";
        check(code, cut);
        check(
            &format!("{code}and then words again, broken"),
            &format!("{cut}and then words\nagain, broken"),
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
