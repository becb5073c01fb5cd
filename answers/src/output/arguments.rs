//! Passes on a call's arguments as valid JSON, piece by piece.
//!
//! Models slip: a line feed inside a string, a comma too many or too few, `True`, single quotes, `\d`. What a reader of
//! JSON would refuse is written as JSON means it; everything else is passed on as it came, numbers of any length
//! included.

use serde_json::Value;
use std::collections::HashSet;

/// How far a piece of text went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// All of it belongs to the object, which goes on.
    More,
    /// The object ended behind this many bytes.
    End(usize),
    /// What is there after this many bytes cannot be read as part of the object.
    Broken(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArgumentPlace {
    /// Before a key, or before the end of an object.
    Key,
    /// Behind a key.
    Colon,
    /// Before a value, or before the end of a list.
    Value,
    /// Behind a value.
    After,
    /// In a string that is a key or a value, within these quotes.
    Text { key: bool, quote: char },
    /// In a word without quotes.
    Word { key: bool },
}

/// Reads one object.
#[derive(Clone, Debug)]
pub(super) struct Arguments {
    /// Open brackets.
    open: Vec<char>,
    place: ArgumentPlace,
    /// White space, and the comma, before what comes next.
    gap: String,
    /// A word, or a backslash and what belongs to it.
    held: String,
    /// The last key.
    key: String,
    /// The names of what is open inside the first bracket.
    path: Vec<String>,
    /// The places of integers, as [`Tools::integers`](super::signature::Tools::integers) writes them.
    integers: HashSet<String>,
}

impl Default for Arguments {
    fn default() -> Self {
        Arguments {
            open: Vec::new(),
            place: ArgumentPlace::Value,
            gap: String::new(),
            held: String::new(),
            key: String::new(),
            path: Vec::new(),
            integers: HashSet::new(),
        }
    }
}

impl Arguments {
    /// Arguments with integers at these places: models write 5.0 for 5, which readers of integers refuse.
    pub(super) fn with_integers(integers: HashSet<String>) -> Self {
        Arguments {
            integers,
            ..Arguments::default()
        }
    }

    /// Takes text, and appends what is certain as JSON to `out`. The first text begins with `{`.
    pub(super) fn push(&mut self, text: &str, out: &mut String) -> Progress {
        for (at, c) in text.char_indices() {
            if !self.take(c, out) {
                return Progress::Broken(at);
            }
            if self.open.is_empty() {
                return Progress::End(at + c.len_utf8());
            }
        }
        Progress::More
    }

    /// Writes what is missing to end the object.
    pub(super) fn close(&mut self, out: &mut String) {
        match self.place {
            ArgumentPlace::Text { key, .. } => {
                self.end_escape(out);
                out.push('"');
                self.place = if key {
                    ArgumentPlace::Colon
                } else {
                    ArgumentPlace::After
                };
            }
            ArgumentPlace::Word { key } => self.end_word(key, out),
            _ => {}
        }
        match self.place {
            ArgumentPlace::Colon => out.push_str(": null"),
            ArgumentPlace::Value if self.open.last() == Some(&'{') => out.push_str("null"),
            _ => {}
        }
        while let Some(open) = self.open.pop() {
            out.push(if open == '{' { '}' } else { ']' });
        }
    }

    /// Takes a character; false if it cannot be read.
    fn take(&mut self, c: char, out: &mut String) -> bool {
        match self.place {
            ArgumentPlace::Text { key, quote } => {
                self.in_text(c, key, quote, out);
                return true;
            }
            ArgumentPlace::Word { key } => {
                if c.is_alphanumeric() || "+-._".contains(c) {
                    self.held.push(c);
                    return true;
                }
                self.end_word(key, out);
            }
            _ => {}
        }
        if c.is_whitespace() {
            self.gap.push(c);
            return true;
        }
        let object = self.open.last() == Some(&'{');
        match (self.place, c) {
            (ArgumentPlace::Colon, ':') => {
                self.flush(out);
                out.push(c);
                self.place = ArgumentPlace::Value;
                true
            }
            (ArgumentPlace::After, ',') if !self.gap.contains(',') => {
                self.gap.push(c);
                true
            }
            (ArgumentPlace::Key | ArgumentPlace::After, '}') if object => self.end(out),
            (ArgumentPlace::Value | ArgumentPlace::After, ']')
                if !object && !self.open.is_empty() =>
            {
                self.end(out)
            }
            (ArgumentPlace::Value, '}') if object => {
                out.push_str("null");
                self.end(out)
            }
            (ArgumentPlace::Key, _) => self.begin(c, true, out),
            (ArgumentPlace::Value, _) => self.begin(c, false, out),
            (ArgumentPlace::After, _) => {
                if !self.gap.contains(',') {
                    self.gap.insert(0, ',');
                }
                self.begin(c, object, out)
            }
            _ => false,
        }
    }

    /// Begins a key or a value.
    fn begin(&mut self, c: char, key: bool, out: &mut String) -> bool {
        if key {
            self.key.clear();
        }
        match c {
            '"' | '\'' => {
                self.flush(out);
                out.push('"');
                self.place = ArgumentPlace::Text { key, quote: c };
            }
            '{' | '[' if !key => {
                self.flush(out);
                out.push(c);
                if !self.open.is_empty() {
                    self.path.push(self.name().to_owned());
                }
                self.open.push(c);
                self.place = if c == '{' {
                    ArgumentPlace::Key
                } else {
                    ArgumentPlace::Value
                };
            }
            c if c.is_alphanumeric() || "+-._".contains(c) => {
                self.flush(out);
                self.held.push(c);
                self.place = ArgumentPlace::Word { key };
            }
            _ => return false,
        }
        true
    }

    /// Ends an object or a list; a comma before its end is left out.
    fn end(&mut self, out: &mut String) -> bool {
        self.gap.retain(|c| c != ',');
        self.flush(out);
        let open = self.open.pop();
        self.path.pop();
        out.push(if open == Some('{') { '}' } else { ']' });
        self.place = ArgumentPlace::After;
        true
    }

    /// The name of a value that comes now: its key, or `*` in a list.
    fn name(&self) -> &str {
        match self.open.last() {
            Some('[') => "*",
            _ => &self.key,
        }
    }

    /// True if that value is an integer.
    fn is_integer(&self) -> bool {
        let names = self.path.iter().map(String::as_str);
        let names: Vec<&str> = names.chain([self.name()]).collect();
        !self.integers.is_empty() && self.integers.contains(&names.join("/"))
    }

    /// Writes the gap. JSON knows four kinds of white space.
    fn flush(&mut self, out: &mut String) {
        let known = |c| if ", \n\r\t".contains(c) { c } else { ' ' };
        out.extend(self.gap.drain(..).map(known));
    }

    fn end_word(&mut self, key: bool, out: &mut String) {
        let word = std::mem::take(&mut self.held);
        let literal = match word.as_str() {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            word => word,
        };
        if key {
            self.key.push_str(&word);
        }
        if !key && serde_json::from_str::<Value>(literal).is_ok() {
            out.push_str(match self.is_integer() {
                true => whole(literal),
                false => literal,
            });
        } else {
            out.push_str(&quoted(&word));
        }
        self.place = if key {
            ArgumentPlace::Colon
        } else {
            ArgumentPlace::After
        };
    }

    fn in_text(&mut self, c: char, key: bool, quote: char, out: &mut String) {
        if self.held.is_empty() {
            match c {
                '\\' => self.held.push(c),
                c if c == quote => {
                    out.push('"');
                    self.place = if key {
                        ArgumentPlace::Colon
                    } else {
                        ArgumentPlace::After
                    };
                }
                c => {
                    out.push_str(&escaped(c));
                    if key {
                        self.key.push(c);
                    }
                }
            }
            return;
        }
        self.held.push(c);
        let code = self.held.strip_prefix("\\u");
        match (self.held.as_str(), code) {
            (_, Some(code)) if code.len() < 4 && code.chars().all(|c| c.is_ascii_hexdigit()) => {}
            (_, Some(code)) if code.chars().all(|c| c.is_ascii_hexdigit()) => {
                out.push_str(&self.held);
                self.held.clear();
            }
            // The last character is no part of the code: it may end the string.
            (_, Some(_)) => {
                self.held.pop();
                self.end_escape(out);
                self.in_text(c, key, quote, out);
            }
            ("\\'", _) => {
                out.push('\'');
                self.held.clear();
            }
            _ if "\"\\/bfnrt".contains(c) => {
                out.push_str(&self.held);
                self.held.clear();
            }
            // A backslash that escapes nothing stands for itself.
            _ => {
                self.held.pop();
                self.end_escape(out);
                self.in_text(c, key, quote, out);
            }
        }
    }

    /// Writes an escape that is none.
    fn end_escape(&mut self, out: &mut String) {
        out.extend(self.held.drain(..).map(escaped));
    }
}

/// A number without zeros behind its point, if nothing else is there.
pub(super) fn whole(number: &str) -> &str {
    match number.split_once('.') {
        Some((whole, zeros)) if zeros.bytes().all(|b| b == b'0') => whole,
        _ => number,
    }
}

/// A character in a JSON string.
fn escaped(c: char) -> String {
    let text = quoted(c.encode_utf8(&mut [0; 4]));
    text[1..text.len() - 1].to_owned()
}

/// A text as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The beginning of an object as a whole one; empty if there is nothing of it.
pub fn completed(begun: &str) -> String {
    let (mut arguments, mut out) = (Arguments::default(), String::new());
    arguments.push(begun, &mut out);
    arguments.close(&mut out);
    out
}

/// An object or a list as valid JSON, with integers at these places; `None` if it cannot be read as a whole.
pub(super) fn mended(object: &str, integers: &HashSet<String>) -> Option<String> {
    let (mut arguments, mut out) = (Arguments::with_integers(integers.clone()), String::new());
    if !object.starts_with(['{', '[']) {
        return None;
    }
    match arguments.push(object, &mut out) {
        Progress::End(at) if object[at..].trim().is_empty() => Some(out),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes out, by pieces of one character and as a whole.
    fn check(text: &str, expected: &str) {
        let by_character: Vec<String> = text.chars().map(String::from).collect();
        for pieces in [by_character, vec![text.to_owned()]] {
            let (mut arguments, mut out) = (Arguments::default(), String::new());
            let mut progress = Progress::More;
            for piece in &pieces {
                if progress == Progress::More {
                    progress = arguments.push(piece, &mut out);
                }
            }
            arguments.close(&mut out);
            assert_eq!(out, expected, "{text}");
            serde_json::from_str::<Value>(&out).unwrap_or_else(|e| panic!("{e}: {out}"));
        }
    }

    #[test]
    fn json_stays_as_it_is() {
        for text in [
            "{}",
            "{ \"a\" : [ 1 , -2.50e3,{} , [] ] ,\n\t\"b\": {\"c\": null, \"d\": true}}",
            "{\"n\": 12345678901234567890123, \"m\": 1.50}",
            "{\"a\": \"x} \\\" \\\\ \\u00e9 \\n \u{e9} [\", \"\": false}",
        ] {
            check(text, text);
        }
    }

    #[test]
    fn slips_become_json() {
        for (text, expected) in [
            ("{\"a\": \"x\ny\tz\u{1}\"}", r#"{"a": "x\ny\tz\u0001"}"#),
            ("{\"a\": [1, 2,], \"b\": 1,}", r#"{"a": [1, 2], "b": 1}"#),
            ("{\"a\": 1 \"b\": [1 2]}", r#"{"a": 1, "b": [1, 2]}"#),
            ("{'a': 'it\\'s \"b\"'}", r#"{"a": "it's \"b\""}"#),
            (
                "{\"a\": True, \"b\": [None, False]}",
                r#"{"a": true, "b": [null, false]}"#,
            ),
            ("{a: 1, b: x}", r#"{"a": 1, "b": "x"}"#),
            (
                r#"{"a": "\d\.\u12\u00e9\'"}"#,
                r#"{"a": "\\d\\.\\u12\u00e9'"}"#,
            ),
            ("{\"a\": 007, \"b\": +1}", r#"{"a": "007", "b": "+1"}"#),
        ] {
            check(text, expected);
        }
    }

    #[test]
    fn integers_have_no_point() {
        let integers = ["n", "o/m", "l/*", "l/*/n"].map(str::to_owned).into();
        let text = r#"{"n": 5.0, "m": 5.0, "o": {"n": 5.0, "m": 5.0, "l": [5.0]}, "l": [5.0, {"n": 5.0, "m": 5.0}, 6.0], n: -12.00}"#;
        let (mut arguments, mut out) = (Arguments::with_integers(integers), String::new());
        assert_eq!(arguments.push(text, &mut out), Progress::End(text.len()));
        assert_eq!(
            out,
            r#"{"n": 5, "m": 5.0, "o": {"n": 5.0, "m": 5, "l": [5.0]}, "l": [5, {"n": 5, "m": 5.0}, 6], "n": -12}"#
        );
        for (number, expected) in [
            ("5.5", "5.5"),
            ("1e2", "1e2"),
            ("5.0e1", "5.0e1"),
            ("7", "7"),
        ] {
            assert_eq!(whole(number), expected);
        }
    }

    #[test]
    fn an_end_that_is_missing_is_added() {
        for (text, expected) in [
            ("{", "{}"),
            ("{\"a", "{\"a\": null}"),
            ("{\"a\":", "{\"a\":null}"),
            (
                "{\"a\": [1, {\"b\": \"x\\",
                "{\"a\": [1, {\"b\": \"x\\\\\"}]}",
            ),
            ("{\"a\": 1,", "{\"a\": 1}"),
            ("{\"a\": tr", "{\"a\": \"tr\"}"),
            ("{\"a\": \"\\u00", "{\"a\": \"\\\\u00\"}"),
        ] {
            check(text, expected);
        }
    }

    #[test]
    fn what_is_no_json_ends_it() {
        for (text, at) in [
            ("{\"a\": 1</x>", 7),
            ("{\"a\" 1}", 5),
            ("{\"a\": 1]", 7),
            ("{:", 1),
        ] {
            let progress = Arguments::default().push(text, &mut String::new());
            assert_eq!(progress, Progress::Broken(at), "{text}");
        }
        assert_eq!(
            mended("{\"a\": 1,} ", &HashSet::new()),
            Some("{\"a\": 1}".into())
        );
        assert_eq!(mended("{\"a\": 1} x", &HashSet::new()), None);
    }
}
