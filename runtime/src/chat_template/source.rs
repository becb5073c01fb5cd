//! What is done to a template's source before it is compiled.

use std::ops::Range;

/// The source with line feeds alone at its lines' ends, as Jinja2 reads it, and with the statements
/// `generation` and `endgeneration`, which mark what a training is about, as a scope of their own, which is
/// what they are when a prompt is rendered.
pub(super) fn prepared(source: &str) -> String {
    let mut source = source.replace("\r\n", "\n").replace('\r', "\n");
    let names: Vec<Range<usize>> = statements(&source)
        .filter(|name| ["generation", "endgeneration"].contains(&&source[name.clone()]))
        .collect();
    for name in names.into_iter().rev() {
        let scope = match &source[name.clone()] {
            "generation" => "with",
            _ => "endwith",
        };
        source.replace_range(name, scope);
    }
    source
}

/// The places of the names of all statements, `if` in `{%- if x %}`.
fn statements(source: &str) -> impl Iterator<Item = Range<usize>> {
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
            at = match &source[open..inside] {
                "{#" => inside + source[inside..].find("#}")? + 2,
                "{{" => end_of(source, inside, "}}")?,
                _ => {
                    let start = inside + source[inside..].find(|c| c != '-' && c != '+')?;
                    let start = start + source[start..].find(|c: char| !c.is_whitespace())?;
                    let rest = &source[start..];
                    let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
                    let name = start..start + length?;
                    at = end_of(source, name.end, "%}")?;
                    if &source[name.clone()] == "raw" {
                        at += source[at..].find("endraw")?;
                    }
                    return Some(name);
                }
            };
        }
    })
}

/// The end of the tag that `close` ends, outside of the strings in it.
fn end_of(source: &str, from: usize, close: &str) -> Option<usize> {
    let bytes = source.as_bytes();
    let mut at = from;
    while at < bytes.len() {
        match bytes[at] {
            quote @ (b'"' | b'\'') => {
                at += 1;
                while at < bytes.len() && bytes[at] != quote {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at += 1;
            }
            _ if bytes[at..].starts_with(close.as_bytes()) => return Some(at + close.len()),
            _ => at += 1,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::prepared;

    #[test]
    fn line_ends_are_line_feeds() {
        assert_eq!(prepared("a\r\nb\rc\n{{ 'x\r\n' }}"), "a\nb\nc\n{{ 'x\n' }}");
    }

    #[test]
    fn generation_is_a_scope() {
        let check = |source: &str, expected: &str| assert_eq!(prepared(source), expected);
        check(
            "{% generation %}a{%- endgeneration -%}",
            "{% with %}a{%- endwith -%}",
        );
        check(
            "{%-generation+%}a{%endgeneration%}",
            "{%-with+%}a{%endwith%}",
        );
        for same in [
            "{# {% generation %} #}{{ '{% generation %}' }}",
            "{% if x == '%} {% generation %}' %}{% endif %}",
            "{% raw %}{{ ' }}{% generation %}{% endraw %}",
            "{% set generation = 1 %}{{ generation }}",
            "{% generation",
            "{{ '",
            "{% 'é",
        ] {
            check(same, same);
        }
    }
}
