//! Pieces of an answer.

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Thinking.
    Reasoning(String),
    /// Text of the answer.
    Text(String),
    /// A tool call begins.
    CallStart {
        /// Index of the call in the answer, from 0.
        index: usize,
        /// Name of the tool.
        name: String,
    },
    /// More of a call's arguments, which are JSON text.
    CallArguments {
        /// Index of the call.
        index: usize,
        /// The text.
        text: String,
    },
}

/// Makes one text of an answer's pieces: thinking stands between `<think>` and `</think>`, calls are left out.
#[derive(Debug, Default)]
pub struct Tagged {
    thinks: bool,
}

impl Tagged {
    /// The text of the next piece, with the tag before it.
    pub fn text(&mut self, piece: &Piece) -> String {
        let (thinks, text) = match piece {
            Piece::Reasoning(text) => (true, text.as_str()),
            Piece::Text(text) => (false, text.as_str()),
            Piece::CallStart { .. } | Piece::CallArguments { .. } => (false, ""),
        };
        let tag = match (std::mem::replace(&mut self.thinks, thinks), thinks) {
            (false, true) => "<think>\n",
            (true, false) => "\n</think>\n\n",
            _ => "",
        };
        format!("{tag}{text}")
    }
}

/// Appends a piece, or extends the last one if it is of the same kind; ignores empty text.
pub(super) fn join(out: &mut Vec<Piece>, piece: Piece) {
    match (out.last_mut(), piece) {
        (_, Piece::Text(text)) if text.is_empty() => {}
        (Some(Piece::Text(last)), Piece::Text(text))
        | (Some(Piece::Reasoning(last)), Piece::Reasoning(text)) => last.push_str(&text),
        (
            Some(Piece::CallArguments { index, text: last }),
            Piece::CallArguments {
                index: continued,
                text,
            },
        ) if *index == continued => last.push_str(&text),
        (_, piece) => out.push(piece),
    }
}
