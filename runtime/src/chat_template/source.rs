//! What is done to a template's source before it is compiled.

use super::percent::filtered;
use super::python::LOOPED;
use super::tags::{end_of, statements, string};
use std::ops::Range;

/// The source with line feeds alone at its lines' ends, as Jinja2 reads it, with the statements
/// `generation` and `endgeneration`, which mark what a training is about, as a scope of their own, which is
/// what they are when a prompt is rendered, and with [`LOOPED`] behind what loops are over.
pub(super) fn prepared(source: &str) -> String {
    let mut source = filtered(&source.replace("\r\n", "\n").replace('\r', "\n"));
    let names: Vec<Range<usize>> = statements(&source)
        .filter(|name| ["generation", "endgeneration", "for"].contains(&&source[name.clone()]))
        .collect();
    for name in names.into_iter().rev() {
        match &source[name.clone()] {
            "generation" => source.replace_range(name, "with"),
            "endgeneration" => source.replace_range(name, "endwith"),
            _ => {
                if let Some(over) = iterated(&source, name.end) {
                    let through = format!("({}) | {LOOPED}", &source[over.clone()]);
                    source.replace_range(over, &through);
                }
            }
        }
    }
    source
}

/// What the loop is over whose targets begin at `from`: between the words `in` and `if`, `recursive` or the tag's
/// end, none of them in brackets or strings. `None` if it is no loop.
fn iterated(source: &str, from: usize) -> Option<Range<usize>> {
    let tag = &source[from..end_of(source, from, "%}")? - 2];
    let tag = tag.strip_suffix(['-', '+']).unwrap_or(tag);
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut begin, mut end) = (None, tag.len());
    let (mut depth, mut at) = (0usize, 0);
    while let Some(c) = tag[at..].chars().next() {
        let rest = &tag[at..];
        let length = match c {
            '"' | '\'' => string(rest),
            '(' | '[' | '{' => {
                depth += 1;
                1
            }
            ')' | ']' | '}' => {
                depth = depth.checked_sub(1)?;
                1
            }
            c if is_word(c) => {
                let word = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
                match (word, begin) {
                    ("in", None) if depth == 0 => begin = Some(at + word.len()),
                    ("if" | "recursive", Some(_)) if depth == 0 => {
                        end = at;
                        break;
                    }
                    _ => {}
                }
                word.len()
            }
            c => c.len_utf8(),
        };
        at += length;
    }
    let begin = begin?;
    let over = tag[begin..end].trim();
    let start = from + begin + tag[begin..end].find(over)?;
    (!over.is_empty()).then_some(start..start + over.len())
}

#[cfg(test)]
mod tests {
    use super::prepared;

    #[test]
    fn line_ends_are_line_feeds() {
        assert_eq!(prepared("a\r\nb\rc\n{{ 'x\r\n' }}"), "a\nb\nc\n{{ 'x\n' }}");
    }

    #[test]
    fn loops_are_over_what_a_filter_lets_through() {
        let check = |source: &str, expected: &str| assert_eq!(prepared(source), expected);
        check(
            "{%- for a, b in x.items() -%}",
            "{%- for a, b in (x.items()) | looped_over -%}",
        );
        check(
            "{% for a in [x if y else z, ' if '] if a in b recursive %}",
            "{% for a in ([x if y else z, ' if ']) | looped_over if a in b recursive %}",
        );
        check(
            "{% for é in\n'\\' in', 2 %}",
            "{% for é in\n('\\' in', 2) | looped_over %}",
        );
        for same in [
            "{% for a in %}",
            "{% for a %}",
            "{% for a in x) %}",
            "{% for a in x",
            "{# {% for a in x %} #}",
        ] {
            check(same, same);
        }
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
