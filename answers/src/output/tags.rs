//! The tags of calls, and what they begin.

/// Begins a call.
pub(super) const OPEN: &str = "<tool_call>";
/// Ends it.
pub(super) const CLOSE: &str = "</tool_call>";
/// Begin a call in XML; the second way is that of XML's attributes.
pub(super) const FUNCTIONS: [&str; 2] = ["<function=", "<function name="];
pub(super) const END_FUNCTION: &str = "</function>";
/// Begin a parameter, in the same two ways.
pub(super) const PARAMETERS: [&str; 2] = ["<parameter=", "<parameter name="];
pub(super) const END_PARAMETER: &str = "</parameter>";
/// What models write in place of [`CLOSE`] too.
pub(super) const CLOSES: [&str; 3] = [CLOSE, "</tool_calls>", END_FUNCTION];
/// What may follow the end of a parameter.
pub(super) const AFTER_PARAMETER: [&str; 9] = [
    PARAMETERS[0],
    PARAMETERS[1],
    END_PARAMETER,
    END_FUNCTION,
    FUNCTIONS[0],
    FUNCTIONS[1],
    OPEN,
    CLOSE,
    "</tool_calls>",
];
/// Marks between calls of a block that say nothing. Models write a brace too many now and then.
pub(super) const BETWEEN: [&str; 5] = [FENCE, "[", "]", ",", "}"];
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

/// What follows the one of `tags` that `text` begins with.
pub(super) fn behind<'a>(text: &'a str, tags: &[&str]) -> Option<&'a str> {
    tags.iter().find_map(|tag| text.strip_prefix(tag))
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
    // What follows a name in quotes are other attributes.
    let name = name.trim();
    let quote = name.chars().next().filter(|c| matches!(c, '"' | '\''));
    let name = quote.map_or(name, |q| name[1..].split(q).next().unwrap_or_default());
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
    if begins_with(rest, &[FUNCTIONS[0], FUNCTIONS[1], FENCE], last).is_none() {
        return Found::Unknown;
    }
    let Some(tag) = behind(rest, &FUNCTIONS) else {
        return Found::Nothing;
    };
    let Some((name, inner)) = named(tag) else {
        let whole = tag.contains('>') || tag.len() > MOST_NAME || last;
        return if whole {
            Found::Nothing
        } else {
            Found::Unknown
        };
    };
    let follows = [PARAMETERS[0], PARAMETERS[1], END_FUNCTION, CLOSE, "{"];
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
