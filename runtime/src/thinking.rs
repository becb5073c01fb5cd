//! Separates thinking from the answer in text that comes in pieces.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// A piece of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text between `<think>` and `</think>`.
    Thinking,
    /// All other text.
    Answer,
}

/// Splits streamed text. The tags and the white space around them are dropped; thinking that
/// is only white space is dropped too. A `<think>` counts only at the start, and text is held back
/// until it is certain whether it begins with one.
pub struct Splitter {
    state: ThinkingState,
    held: String,
}

#[derive(Clone, Copy, PartialEq)]
enum ThinkingState {
    /// Nothing but white space so far.
    Start,
    /// After `<think>`, nothing but white space so far.
    ThinkingStart,
    Thinking,
    /// After `</think>`, nothing but white space so far.
    AnswerStart,
    Answer,
}

impl Splitter {
    /// A splitter for the continuation of `prompt`, which may have opened the thinking.
    pub fn after(prompt: &str) -> Self {
        let state = if prompt.trim_end().ends_with(OPEN) {
            ThinkingState::ThinkingStart
        } else {
            ThinkingState::Start
        };
        Splitter {
            state,
            held: String::new(),
        }
    }

    /// A splitter that treats all text as the answer.
    pub fn none() -> Self {
        Splitter {
            state: ThinkingState::Answer,
            held: String::new(),
        }
    }

    /// True while inside the tags.
    pub fn is_thinking(&self) -> bool {
        matches!(
            self.state,
            ThinkingState::Thinking | ThinkingState::ThinkingStart
        )
    }

    /// Takes an end of thinking where none has begun. It is no text; white space around it at the start of an answer
    /// is none either.
    pub fn end_unbegun(&mut self) {
        if self.state == ThinkingState::Start && self.held.trim().is_empty() {
            self.held.clear();
            self.state = ThinkingState::AnswerStart;
        }
    }

    /// Takes more text and calls `emit` with the parts that are certain.
    pub fn push(&mut self, text: &str, emit: &mut dyn FnMut(Part, &str)) {
        self.held.push_str(text);
        while self.advance(emit) {}
    }

    /// Ends the text and emits what was held back.
    pub fn finish(&mut self, emit: &mut dyn FnMut(Part, &str)) {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            ThinkingState::Start | ThinkingState::AnswerStart | ThinkingState::Answer
                if !rest.is_empty() =>
            {
                emit(Part::Answer, &rest);
            }
            ThinkingState::Thinking if !rest.trim_end().is_empty() => {
                emit(Part::Thinking, rest.trim_end());
            }
            _ => {}
        }
    }

    /// Makes one step; false if more text is needed.
    fn advance(&mut self, emit: &mut dyn FnMut(Part, &str)) -> bool {
        match self.state {
            ThinkingState::Start => {
                let text = self.held.trim_start();
                if let Some(rest) = text.strip_prefix(OPEN) {
                    self.held = rest.to_owned();
                    self.state = ThinkingState::ThinkingStart;
                    return true;
                }
                if OPEN.starts_with(text) {
                    return false;
                }
                self.state = ThinkingState::Answer;
                true
            }
            ThinkingState::ThinkingStart | ThinkingState::AnswerStart => {
                self.held = self.held.trim_start().to_owned();
                if self.held.is_empty() {
                    return false;
                }
                self.state = match self.state {
                    ThinkingState::ThinkingStart => ThinkingState::Thinking,
                    _ => ThinkingState::Answer,
                };
                true
            }
            ThinkingState::Thinking => {
                if let Some(at) = self.held.find(CLOSE) {
                    let thinking = self.held[..at].trim_end();
                    if !thinking.is_empty() {
                        emit(Part::Thinking, thinking);
                    }
                    self.held.drain(..at + CLOSE.len());
                    self.state = ThinkingState::AnswerStart;
                    return true;
                }
                // White space before the closing tag is dropped, so it is held back too.
                let certain = self.held.len() - overlap(&self.held, CLOSE);
                let certain = self.held[..certain].trim_end().len();
                if certain > 0 {
                    emit(Part::Thinking, &self.held[..certain]);
                    self.held.drain(..certain);
                }
                false
            }
            ThinkingState::Answer => {
                if !self.held.is_empty() {
                    emit(Part::Answer, &self.held);
                    self.held.clear();
                }
                false
            }
        }
    }
}

/// Bytes of the longest end of `text` that is a beginning of `word`, but not all of it.
pub fn overlap(text: &str, word: &str) -> usize {
    let ends = word.char_indices().map(|(i, _)| i).rev();
    ends.filter(|&n| n > 0)
        .find(|&n| text.ends_with(&word[..n]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(prompt: &str, text: &str, size: usize) -> (String, String) {
        let mut found = (String::new(), String::new());
        let mut emit = |part, text: &str| match part {
            Part::Thinking => found.0.push_str(text),
            Part::Answer => found.1.push_str(text),
        };
        let mut splitter = Splitter::after(prompt);
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(size) {
            splitter.push(&piece.iter().collect::<String>(), &mut emit);
        }
        splitter.finish(&mut emit);
        found
    }

    #[test]
    fn splits_the_same_whatever_the_pieces() {
        let check = |prompt: &str, text: &str, thinking: &str, answer: &str| {
            for size in 1..text.chars().count().max(1) + 1 {
                let expected = (thinking.to_owned(), answer.to_owned());
                assert_eq!(split(prompt, text, size), expected, "{text:?} by {size}");
            }
        };
        let opened = "<|im_start|>assistant\n<think>\n";
        let closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
        let plain = "<|im_start|>assistant\n";
        check(
            plain,
            "<think>\nwhy é\n\nso\n</think>\n\nBecause.",
            "why é\n\nso",
            "Because.",
        );
        check(opened, "why\n</think>\n\nBecause.", "why", "Because.");
        check(plain, "<think>\n\n</think>\n\nHello\n", "", "Hello\n");
        check(closed, "Hello <think> there", "", "Hello <think> there");
        check(plain, "a < b </think>", "", "a < b </think>");
        check(plain, "<thin", "", "<thin");
        check(plain, "<think>a <b> </thin c", "a <b> </thin c", "");
        check(plain, "<think>cut off  \n", "cut off", "");
        check(plain, "", "", "");
        check(plain, "  indented", "", "  indented");
    }

    #[test]
    fn an_end_without_a_beginning_is_no_text() {
        for (before, expected) in [("", "Hi"), ("\n", "Hi"), ("So", "So\n\nHi")] {
            let mut found = String::new();
            let mut splitter = Splitter::after("");
            let mut emit = |_, text: &str| found.push_str(text);
            splitter.push(before, &mut emit);
            splitter.end_unbegun();
            splitter.push("\n\nHi", &mut emit);
            assert_eq!(found, expected, "{before:?}");
        }
    }

    /// Nothing certain is held back: an answer streams.
    #[test]
    fn answers_are_not_held_back() {
        let mut pieces = Vec::new();
        let mut splitter = Splitter::after("");
        for piece in [
            "<think>", "\n", "a", " b", "\n", "</think>", "\n\n", "c", " d",
        ] {
            splitter.push(piece, &mut |part, text| {
                pieces.push((part, text.to_owned()))
            });
        }
        let expected = [
            (Part::Thinking, "a"),
            (Part::Thinking, " b"),
            (Part::Answer, "c"),
            (Part::Answer, " d"),
        ];
        assert_eq!(pieces, expected.map(|(p, t)| (p, t.to_owned())));
    }
}
