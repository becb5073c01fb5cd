//! Which tokens an answer's text consists of: those of white space around thinking, of tool calls and of stop texts
//! are not part of it, and clients look for a token's place in the text.

use super::piece::Piece;
use nq_runtime::{Detokenizer, TokenLogprobs, Tokenizer};
use std::collections::VecDeque;

/// A token whose text may still become part of the answer's text.
struct Waiting {
    logprobs: TokenLogprobs,
    /// Where its text begins and ends in [`ContentTokens::text`]. A token within a character has none: the last one of
    /// the character has all of it.
    begin: usize,
    end: usize,
}

/// Finds the tokens of an answer's text among all its tokens.
pub struct ContentTokens {
    detokenizer: Detokenizer,
    text: String,
    waiting: VecDeque<Waiting>,
    /// True if calls followed the last text: theirs may hold the same words as the text behind them.
    behind_calls: bool,
}

impl ContentTokens {
    /// For an answer in the tokens of `tokenizer`.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        ContentTokens {
            detokenizer: Detokenizer::new(tokenizer, true),
            text: String::new(),
            waiting: VecDeque::new(),
            behind_calls: false,
        }
    }

    /// Takes the next token that is no part of the thinking.
    pub fn push(&mut self, logprobs: TokenLogprobs) {
        let begin = self.text.len();
        self.text
            .extend(self.detokenizer.push(logprobs.token).as_deref());
        let end = self.text.len();
        self.waiting.push_back(Waiting {
            logprobs,
            begin,
            end,
        });
    }

    /// Ends the tokens.
    pub fn finish(&mut self) {
        self.text.extend(self.detokenizer.flush().as_deref());
        if let Some(last) = self.waiting.back_mut() {
            last.end = self.text.len();
        }
    }

    /// The tokens of the text in `pieces`, which are the answer's next ones.
    pub fn of_text(&mut self, pieces: &[Piece]) -> Vec<TokenLogprobs> {
        let mut found = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Text(text) => self.take(text, &mut found),
                Piece::CallStart { .. } | Piece::CallArguments { .. } => self.behind_calls = true,
                Piece::Reasoning(_) => {}
            }
        }
        found
    }

    fn take(&mut self, text: &str, found: &mut Vec<TokenLogprobs>) {
        let at = match std::mem::take(&mut self.behind_calls) {
            true => self.text.rfind(text),
            false => self.text.find(text),
        };
        let Some(begin) = at else {
            return;
        };
        let end = begin + text.len();
        while let Some(next) = self.waiting.front().filter(|next| next.begin < end) {
            let within_character = next.begin == next.end && next.begin >= begin;
            let is_part = next.end > begin || within_character;
            let next = self.waiting.pop_front().filter(|_| is_part);
            found.extend(next.map(|next| next.logprobs));
        }
        self.text.drain(..end);
        for next in &mut self.waiting {
            next.begin -= end;
            next.end -= end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_formats::Checkpoint;

    /// The texts of the tokens of `told`, a text of the answer `raw` whose calls are `calls`.
    fn joined(raw: &[&str], told: &[Piece]) -> Vec<String> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/demo");
        let checkpoint = Checkpoint::open(folder.as_ref()).unwrap();
        let tokenizer = Tokenizer::from_files(checkpoint.files()).unwrap();
        let mut content = ContentTokens::new(&tokenizer);
        for text in raw {
            for token in tokenizer.encode(text).unwrap() {
                content.push(TokenLogprobs {
                    position: 0,
                    token,
                    logprob: 0.0,
                    top: Vec::new(),
                });
            }
        }
        content.finish();
        let tokens = content.of_text(told);
        let texts = told.iter().filter_map(|piece| match piece {
            Piece::Text(text) => Some(text.as_str()),
            _ => None,
        });
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|t| tokenizer.token_bytes().get(t.token))
            .copied()
            .collect();
        vec![
            String::from_utf8_lossy(&bytes).into_owned(),
            texts.collect(),
        ]
    }

    #[test]
    fn tokens_join_to_the_text() {
        let text = |text: &str| Piece::Text(text.into());
        let call = || Piece::CallStart {
            index: 0,
            name: "f".into(),
        };
        for (raw, told) in [
            (&["\n\n", "Hello", " there"][..], vec![text("Hello there")]),
            (&["Hello", " there"], vec![text("Hello"), text(" there")]),
            (&["One 日本🎉 é"], vec![text("One 日本🎉 é")]),
            (&["<tool_call>", "\n{}", "</tool_call>"], vec![call()]),
            (
                &["See", "\n", "<tool_call>", " See", "</tool_call>", " See"],
                vec![text("See"), call(), text(" See")],
            ),
            (&["a", " stop", " more"], vec![text("a")]),
        ] {
            let found = joined(raw, &told);
            assert_eq!(found[0], found[1], "{raw:?}");
        }
    }
}
