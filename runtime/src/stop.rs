//! Stop texts, which end an answer.

use crate::thinking::overlap;

/// Passes an answer on up to the first stop text; neither that text nor anything after it is
/// passed on. Of several texts, the first to be complete counts, however the answer is cut into pieces.
#[derive(Debug, Default)]
pub struct StopTexts {
    texts: Vec<String>,
    /// Text that may begin a stop text; after a stop text, everything from its start on.
    held: String,
    /// Index of the stop text that was found.
    found: Option<usize>,
}

impl StopTexts {
    /// Takes the stop texts; empty ones are ignored.
    pub fn new(texts: &[String]) -> Self {
        StopTexts {
            texts: texts.iter().filter(|t| !t.is_empty()).cloned().collect(),
            ..Self::default()
        }
    }

    /// Takes the next piece of the answer and returns the text that is certain to be part of it; nothing once
    /// the answer has ended.
    pub fn push(&mut self, text: &str) -> String {
        if self.has_ended() {
            return String::new();
        }
        self.held.push_str(text);
        let found = self.texts.iter().enumerate().filter_map(|(i, t)| {
            let at = self.held.find(t.as_str())?;
            Some((at + t.len(), at, i))
        });
        let certain = match found.min() {
            Some((_, at, i)) => {
                self.found = Some(i);
                at
            }
            None => {
                let open = self.texts.iter().map(|t| overlap(&self.held, t));
                self.held.len() - open.max().unwrap_or(0)
            }
        };
        self.held.drain(..certain).collect()
    }

    /// Returns the text held back, at the answer's end; nothing if a stop text ended it.
    pub fn finish(&mut self) -> String {
        if self.has_ended() {
            String::new()
        } else {
            std::mem::take(&mut self.held)
        }
    }

    /// True once a stop text was found.
    pub fn has_ended(&self) -> bool {
        self.found.is_some()
    }

    /// The stop text that ended the answer.
    pub fn ended_by(&self) -> Option<&str> {
        self.found.map(|i| self.texts[i].as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops(texts: &[&str]) -> StopTexts {
        let texts: Vec<String> = texts.iter().map(|t| (*t).to_owned()).collect();
        StopTexts::new(&texts)
    }

    #[test]
    fn an_answer_ends_before_the_first_text_whatever_the_pieces() {
        let check = |texts: &[&str], answer: &str, expected: &str, by: Option<&str>| {
            let chars: Vec<char> = answer.chars().collect();
            for size in 1..=chars.len() {
                let mut stops = stops(texts);
                let (mut out, mut pushed) = (String::new(), 0);
                for piece in chars.chunks(size) {
                    let piece: String = piece.iter().collect();
                    if !stops.has_ended() {
                        pushed += piece.len();
                    }
                    out += &stops.push(&piece);
                }
                out += &stops.finish();
                assert_eq!(
                    (out.as_str(), stops.ended_by()),
                    (expected, by),
                    "by {size}"
                );
                let cut = if stops.has_ended() {
                    stops.held.len()
                } else {
                    0
                };
                assert_eq!(out.len() + cut, pushed, "by {size}");
            }
        };
        check(&["END"], "one END two", "one ", Some("END"));
        check(&["END"], "ENENEND", "ENEN", Some("END"));
        check(&["END"], "to the EN", "to the EN", None);
        check(&["aab"], "aaaab", "aa", Some("aab"));
        check(&["b\n", "ab"], "xxab\n", "xx", Some("ab"));
        check(&["\n\n", "é!"], "caf é é!\n\n", "caf é ", Some("é!"));
        check(&["b", "abc"], "xabc", "xa", Some("b"));
        check(&["", "END"], "all of it", "all of it", None);
        check(&[], "all of it", "all of it", None);
    }

    #[test]
    fn text_that_begins_none_does_not_wait() {
        let mut stops = stops(&["END"]);
        assert_eq!(stops.push("one E"), "one ");
        assert_eq!(stops.push("x"), "Ex");
    }
}
