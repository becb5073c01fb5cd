//! Where a long text may be cut, so that its pieces have the ids of the whole.

/// The pre-tokenizers' patterns for which [`next_boundary`] is proven: that of Qwen2, 2.5 and 3; that of Qwen3.5
/// and later, whose words hold combining marks too; and that of Llama 3, which differs from the first in the digits
/// that it keeps together.
const PATTERNS: [&str; 3] = [
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
];

/// Characters outside ASCII before which a text may be cut behind a Chinese character.
const STOPS: [&str; 3] = ["\u{3001}", "\u{3002}", "\u{ff0c}"];

/// A part of the tokenizer as written in `tokenizer.json`; null if absent.
fn part<T: serde::Serialize>(part: Option<&T>) -> serde_json::Value {
    serde_json::to_value(part).unwrap_or_default()
}

/// True if a text may be cut at [`next_boundary`] without changing its ids: the tokenizer has one of
/// [`PATTERNS`], NFC or no normalization, and no added token that could span such a place or strip the white
/// space beside it.
pub(super) fn is_cuttable(tokenizer: &tokenizers::Tokenizer) -> bool {
    let pre = part(tokenizer.get_pre_tokenizer());
    let byte_level = |v: &serde_json::Value| {
        v["type"] == "ByteLevel" && v["add_prefix_space"] == false && v["use_regex"] == false
    };
    let pattern = match pre["pretokenizers"].as_array().map(Vec::as_slice) {
        Some([split, last]) if byte_level(last) => {
            split["type"] == "Split"
                && split["pattern"]["Regex"]
                    .as_str()
                    .is_some_and(|p| PATTERNS.contains(&p))
                && split["behavior"] == "Isolated"
                && split["invert"] == false
        }
        _ => false,
    };
    let normalizer = part(tokenizer.get_normalizer());
    let added = tokenizer.get_added_tokens_decoder();
    let spans = |text: &str| {
        text.contains([' ', '\n', '\r']) || STOPS.iter().any(|stop| text.contains(stop))
    };
    pattern
        && (normalizer.is_null() || normalizer["type"] == "NFC")
        && added
            .values()
            .all(|t| !(t.lstrip || t.rstrip || t.single_word || spans(&t.content)))
}

/// Cuts `text` into pieces of at least `size` bytes (except the last), whose ids, concatenated,
/// are the ids of `text`.
pub(super) fn cut(text: &str, size: usize) -> Vec<&str> {
    let mut pieces = Vec::with_capacity(text.len() / size + 1);
    let mut start = 0;
    while text.len() - start > size {
        match next_boundary(text.as_bytes(), start + size) {
            Some(end) => pieces.push(&text[start..end]),
            None => break,
        }
        start += pieces.last().map_or(0, |p| p.len());
    }
    pieces.push(&text[start..]);
    pieces
}

/// The first position from `from` on that may be cut: between a word and a blank, or behind a line feed and before
/// spaces or tabs (or none) and then a printable ASCII character.
///
/// [`PATTERNS`] always end a match there. Before a blank or one of [`STOPS`], a letter ends a match of
/// `[^\r\n\p{L}\p{N}]?\p{L}+` or of a contraction, and a digit one of `\p{N}`: nothing that matches goes on from
/// either to what is no letter and no digit. A match that contains the line feed comes from
/// ` ?[^\s\p{L}\p{N}]+[\r\n]*` or `\s*[\r\n]+`: the first can take no blank after it, the
/// second takes a run of white space up to its last line end, which this is. `\s+(?!\S)` and
/// `\s+` come later in the alternation and see the line feed only where `\s*[\r\n]+` does
/// not match. No alternative looks behind, so what follows is matched as if it stood alone.
/// NFC never joins a line feed with a neighbour, nor a blank or a stop with what is before it.
pub(super) fn next_boundary(text: &[u8], from: usize) -> Option<usize> {
    (from..text.len()).find(|&at| {
        let (before, rest) = text.split_at(at);
        let stop = |stop: &&str| rest.starts_with(stop.as_bytes());
        match (before.last(), rest[0]) {
            (Some(b'\n'), _) => begins_a_line(rest),
            (Some(last), b' ') => last.is_ascii_alphanumeric() || ends_in_han(before),
            (Some(_), 0xe3 | 0xef) => STOPS.iter().any(stop) && ends_in_han(before),
            _ => false,
        }
    })
}

/// True for spaces or tabs (or none) and then a printable ASCII character.
fn begins_a_line(rest: &[u8]) -> bool {
    let blank = rest.iter().position(|&b| b != b' ' && b != b'\t');
    blank.is_some_and(|n| rest[n].is_ascii_graphic())
}

/// True if the last character is a CJK ideograph, U+4E00 to U+9FFF, which all versions of Unicode call letters.
fn ends_in_han(before: &[u8]) -> bool {
    matches!(
        before,
        [.., 0xe4, 0xb8..=0xbf, 0x80..=0xbf] | [.., 0xe5..=0xe9, 0x80..=0xbf, 0x80..=0xbf]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boundaries_follow_the_last_line_end_of_white_space() {
        let check = |text: &str, expected| {
            assert_eq!(next_boundary(text.as_bytes(), 0), expected, "{text:?}");
        };
        check("ab\ncd", Some(3));
        check("ab\n  cd", Some(3));
        check("ab\n \t\n cd", Some(6));
        check("ab\n\n\ncd", Some(5));
        check("ab\n", None);
        check("ab\n  ", None);
        check("noline", None);
        // A letter outside ASCII may be white space or a combining character: not cut there.
        check("ab\n\u{2003}cd\nef", Some(9));
        check("ab\n\u{301}x", None);
        check("ab\n\rcd", None);
        check("one two", Some(3));
        check("1  2", Some(1));
        check("a| b", None);
        check("漢 a", Some(3));
        check("漢字。字", Some(6));
        check("か。字", None);
    }

    #[test]
    fn pieces_join_to_the_text() {
        let text = "one\ntwo\n three\n\nfour\n";
        for size in 1..text.len() + 2 {
            assert_eq!(cut(text, size).concat(), text);
        }
        assert_eq!(cut(text, 1), ["one\n", "two\n", " three\n\n", "four\n"]);
        assert_eq!(cut("", 4), [""]);
    }
}
