//! Texts that end an answer.

use nq_runtime::thinking::overlap;

/// Passes an answer on up to the first of some texts, which and after which nothing is passed on.
#[derive(Debug, Default)]
pub struct StopTexts {
    texts: Vec<String>,
    held: String,
}

/// What became certain of an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Passed {
    /// This text of it.
    More(String),
    /// Its last text, and so many bytes of what was pushed behind that.
    Ended(String, usize),
}

impl StopTexts {
    /// None of `texts` is empty.
    pub fn new(texts: &[String]) -> Self {
        StopTexts {
            texts: texts.to_vec(),
            held: String::new(),
        }
    }

    /// Takes more of the answer; an end that may be the start of a stop text waits.
    pub fn push(&mut self, text: &str) -> Passed {
        self.held.push_str(text);
        // Of several the one that is whole first, however the text comes.
        let found = self.texts.iter().filter_map(|t| {
            let at = self.held.find(t.as_str())?;
            Some((at + t.len(), at))
        });
        if let Some((_, at)) = found.min() {
            let behind = self.held.len() - at;
            self.held.truncate(at);
            return Passed::Ended(std::mem::take(&mut self.held), behind);
        }
        let waiting = self.texts.iter().map(|t| overlap(&self.held, t)).max();
        let certain = self.held.len() - waiting.unwrap_or(0);
        Passed::More(self.held.drain(..certain).collect())
    }

    /// What waited, at the answer's end.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_before_the_first_stop_text_whatever_the_pieces() {
        let check = |stop: &[&str], text: &str, expected: &str, behind: usize| {
            let stop: Vec<String> = stop.iter().map(|s| (*s).to_owned()).collect();
            let chars: Vec<char> = text.chars().collect();
            for size in 1..=chars.len() {
                let mut stops = StopTexts::new(&stop);
                let (mut out, mut pushed, mut ended) = (String::new(), 0, false);
                for piece in chars.chunks(size) {
                    let piece: String = piece.iter().collect();
                    pushed += piece.len();
                    match stops.push(&piece) {
                        Passed::More(text) => out += &text,
                        Passed::Ended(text, n) => {
                            out += &text;
                            assert_eq!(out.len(), pushed - n, "{text:?}");
                            ended = true;
                            break;
                        }
                    }
                }
                out += &stops.finish();
                assert_eq!((out.as_str(), ended), (expected, behind > 0), "by {size}");
            }
        };
        check(&["END"], "one END two", "one ", 7);
        check(&["END"], "ENENEND", "ENEN", 3);
        check(&["END"], "to the EN", "to the EN", 0);
        check(&["\n\n", "é!"], "caf é é!\n\n", "caf é ", 5);
        check(&["b", "abc"], "xabc", "xa", 2);
        check(&[], "all of it", "all of it", 0);
    }
}
