//! Where statements, expressions and strings stand in a template's source.

use std::ops::Range;

/// Bytes of the string that a text begins with, with its quotes; all if it does not end.
pub(super) fn string(text: &str) -> usize {
    let quote = text.as_bytes()[0];
    let mut escaped = false;
    let end = text.bytes().skip(1).position(|byte| {
        let ends = byte == quote && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 2)
}

/// The places of the names of all statements, `if` in `{%- if x %}`.
pub(super) fn statements(source: &str) -> impl Iterator<Item = Range<usize>> {
    tags(source).filter_map(|tag| tag.name)
}

/// The places of all that is computed: what expressions have between their signs, and statements behind their names.
pub(super) fn expressions(source: &str) -> impl Iterator<Item = Range<usize>> {
    tags(source).map(|tag| tag.inside)
}

/// A statement or an expression.
struct Tag {
    /// Where the statement's name stands.
    name: Option<Range<usize>>,
    /// What follows the name, up to the signs that end the tag.
    inside: Range<usize>,
}

fn tags(source: &str) -> impl Iterator<Item = Tag> {
    let mut at = 0;
    std::iter::from_fn(move || {
        loop {
            let open = at
                + source[at..]
                    .find("{{")
                    .into_iter()
                    .chain(source[at..].find("{%"))
                    .chain(source[at..].find("{#"))
                    .min()?;
            let inside = open + 2;
            match &source[open..inside] {
                "{#" => at = inside + source[inside..].find("#}")? + 2,
                "{{" => {
                    at = end_of(source, inside, "}}")?;
                    let signs = source[inside..].find(|c| c != '-' && c != '+')?;
                    return Some(Tag {
                        name: None,
                        inside: (inside + signs.min(1)).min(at - 2)..at - 2,
                    });
                }
                _ => {
                    let start = inside + source[inside..].find(|c| c != '-' && c != '+')?;
                    let start = start + source[start..].find(|c: char| !c.is_whitespace())?;
                    let rest = &source[start..];
                    let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
                    let name = start..start + length?;
                    at = end_of(source, name.end, "%}")?;
                    let inside = name.end..at - 2;
                    if &source[name.clone()] == "raw" {
                        at += source[at..].find("endraw")?;
                    }
                    return Some(Tag {
                        name: Some(name),
                        inside,
                    });
                }
            }
        }
    })
}

/// The end of the tag that `close` ends, outside of the strings and the braces in it.
pub(super) fn end_of(source: &str, from: usize, close: &str) -> Option<usize> {
    let bytes = source.as_bytes();
    let (mut at, mut depth) = (from, 0usize);
    while at < bytes.len() {
        match bytes[at] {
            b'"' | b'\'' => at += string(&source[at..]),
            _ if depth == 0 && bytes[at..].starts_with(close.as_bytes()) => {
                return Some(at + close.len());
            }
            byte => {
                match byte {
                    b'{' => depth += 1,
                    b'}' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                at += 1;
            }
        }
    }
    None
}
