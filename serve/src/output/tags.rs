//! The tags of calls, and what they begin.

/// Begins a call.
pub(super) const OPEN: &str = "<tool_call>";
/// Ends it.
pub(super) const CLOSE: &str = "</tool_call>";
pub(super) const FUNCTION: &str = "<function=";
pub(super) const END_FUNCTION: &str = "</function>";
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const END_PARAMETER: &str = "</parameter>";
/// What models write in place of [`CLOSE`] too.
pub(super) const CLOSES: [&str; 3] = [CLOSE, "</tool_calls>", END_FUNCTION];
/// What may follow the end of a parameter.
pub(super) const AFTER_PARAMETER: [&str; 7] = [
    PARAMETER,
    END_PARAMETER,
    END_FUNCTION,
    FUNCTION,
    OPEN,
    CLOSE,
    "</tool_calls>",
];
/// Marks between calls of a block that say nothing.
pub(super) const BETWEEN: [&str; 4] = [FENCE, "[", "]", ","];
/// Begins and ends a block of code, with a language behind it.
pub(super) const FENCE: &str = "```";
/// Most bytes of a name in a tag.
pub(super) const MOST_NAME: usize = 256;

/// What a tag begins.
pub(super) enum Found {
    /// Not known yet.
    Unknown,
    /// Nothing.
    Nothing,
    /// A JSON object that begins after this many bytes.
    Json(usize),
    /// An XML call of this name, whose tag ends after this many bytes.
    Xml(String, usize),
}

/// True if `text` begins with one of `tags`; `None` if it may once there is more of it.
pub(super) fn begins_with(text: &str, tags: &[&str], last: bool) -> Option<bool> {
    if tags.iter().any(|tag| text.starts_with(tag)) {
        return Some(true);
    }
    let may = !last && tags.iter().any(|tag| tag.starts_with(text));
    (!may).then_some(false)
}

/// What follows marks and white space.
pub(super) fn behind_marks(mut text: &str) -> &str {
    loop {
        text = text.trim_start();
        match BETWEEN.iter().find_map(|mark| text.strip_prefix(mark)) {
            Some(rest) if text.starts_with(FENCE) => {
                text = rest.trim_start_matches(|c: char| c.is_ascii_alphabetic());
            }
            Some(rest) => text = rest,
            None => return text,
        }
    }
}

/// The name in a tag that ends with `>`, and what follows; `None` if there is none.
pub(super) fn named(text: &str) -> Option<(&str, &str)> {
    let (name, rest) = text.split_once('>')?;
    let name = name.trim().trim_matches('"');
    let fits = name.len() <= MOST_NAME && !name.is_empty() && !name.contains(['<', '\n']);
    fits.then_some((name, rest))
}

/// What the text behind an opening tag, or one that begins with `<function=`, is.
pub(super) fn call_in(text: &str, last: bool) -> Found {
    let rest = behind_marks(text);
    let at = text.len() - rest.len();
    if rest.starts_with('{') {
        return Found::Json(at);
    }
    match begins_with(rest, &[FUNCTION, FENCE], last) {
        None => return Found::Unknown,
        Some(false) => return Found::Nothing,
        Some(true) => {}
    }
    let tag = &rest[FUNCTION.len()..];
    let Some((name, inner)) = named(tag) else {
        let whole = tag.contains('>') || tag.len() > MOST_NAME || last;
        return if whole {
            Found::Nothing
        } else {
            Found::Unknown
        };
    };
    let follows = [PARAMETER, END_FUNCTION, CLOSE, "{"];
    match begins_with(inner.trim_start(), &follows, last) {
        None => Found::Unknown,
        Some(false) => Found::Nothing,
        Some(true) => Found::Xml(name.to_owned(), text.len() - inner.len()),
    }
}

/// True if the text ends with a tag that begins a call, and a call may follow.
pub(super) fn is_begun(text: &str) -> bool {
    let at = text.find(OPEN);
    at.is_some_and(|at| {
        let inner = &text[at + OPEN.len()..];
        matches!(call_in(inner, false), Found::Unknown)
    })
}
