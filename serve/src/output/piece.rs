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

/// Appends a piece, or extends the last one if it is of the same kind; ignores empty text.
pub(super) fn join(out: &mut Vec<Piece>, piece: Piece) {
    match (out.last_mut(), piece) {
        (_, Piece::Text(text)) if text.is_empty() => {}
        (Some(Piece::Text(last)), Piece::Text(text))
        | (Some(Piece::Reasoning(last)), Piece::Reasoning(text)) => last.push_str(&text),
        (
            Some(Piece::CallArguments { index, text: last }),
            Piece::CallArguments { index: of, text },
        ) if *index == of => last.push_str(&text),
        (_, piece) => out.push(piece),
    }
}
