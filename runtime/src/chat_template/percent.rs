//! How Python formats: `pattern % values`, the filter `format`, which is the same, and `pattern.format(values)`.
//!
//! The engine computes with numbers alone on both sides of a `%`, so that a template's `a % b` becomes
//! `a | percent_of_python(b)` before it is compiled. And where it pads a text it counts bytes, not characters, so that
//! texts are padded here.

use super::python::{Align, MAX_PADDED, aligned, repr, text};
use super::tags::{expressions, string};
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, context};

const FILTER: &str = "percent_of_python";

/// Words that end an operand, as operators that bind less do.
const WORDS: [&str; 8] = ["and", "or", "not", "in", "if", "else", "elif", "recursive"];

/// Most `%` of a template that are more than the engine's own.
const MAX_OPERATORS: usize = 1000;

pub(super) fn install(env: &mut Environment<'static>) {
    env.add_filter(FILTER, percent);
    env.add_filter("format", format_filter);
}

/// The source with the filter in place of each `%`.
pub(super) fn filtered(source: &str) -> String {
    let (mut out, mut copied, mut most) = (String::with_capacity(source.len()), 0, MAX_OPERATORS);
    for range in expressions(source) {
        if source[range.clone()].contains('%') {
            out += &source[copied..range.start];
            out += &expression(&source[range.clone()], &mut most);
            copied = range.end;
        }
    }
    out + &source[copied..]
}

/// Operands that products bind, at one depth of brackets.
#[derive(Default)]
struct Chain {
    /// Where it begins in the output.
    start: Option<usize>,
    /// The expression is more than a single operand, so that a filter behind it needs brackets around it.
    compound: bool,
    /// The right side of a `%` has begun, whose bracket is to be closed.
    right: bool,
}

impl Chain {
    /// Ends the right side of a `%`.
    fn close(&mut self, out: &mut String) {
        if std::mem::take(&mut self.right) {
            let end = out.trim_end().len();
            out.insert(end, ')');
            self.compound = false;
        }
    }
}

/// One expression, or what a statement has between its signs.
fn expression(source: &str, most: &mut usize) -> String {
    let mut out = String::with_capacity(source.len());
    let mut chains = vec![Chain::default()];
    let (mut at, mut behind_operand) = (0, false);
    let mut is_test = false;
    while let Some(c) = source[at..].chars().next() {
        let rest = &source[at..];
        let Some(chain) = chains.last_mut() else {
            return source.to_owned(); // a bracket closes that never opened, which the engine says
        };
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let mut length = c.len_utf8();
        match c {
            '"' | '\'' => length = string(rest),
            c if is_word(c) => length = rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            '*' | '/' if rest[1..].starts_with(c) => length = 2,
            _ => {}
        }
        let token = &rest[..length];
        at += length;
        if c.is_whitespace() {
            out += token;
            continue;
        }
        let names_test = is_test;
        is_test = token == "is" || names_test && token == "not";
        match c {
            '%' if behind_operand && *most > 0 => {
                *most -= 1;
                chain.close(&mut out);
                let end = out.trim_end().len();
                out.truncate(end);
                if let Some(start) = chain.start.filter(|_| chain.compound) {
                    out.insert(start, '(');
                    out.push(')');
                }
                out += " | ";
                out += FILTER;
                out.push('(');
                chain.right = true;
                behind_operand = false;
                continue;
            }
            ')' | ']' | '}' => {
                chain.close(&mut out);
                chains.pop();
                behind_operand = true;
            }
            '(' | '[' | '{' => {
                chain.start.get_or_insert(out.len());
                chains.push(Chain::default());
                behind_operand = false;
            }
            '.' | '|' => behind_operand = false,
            '-' | '+' if !behind_operand => {
                chain.start.get_or_insert(out.len());
                chain.compound = true;
            }
            '*' | '/' if behind_operand => {
                // A power belongs to the right side of a `%`, a product does not.
                if token != "**" {
                    chain.close(&mut out);
                }
                chain.compound |= !chain.right;
                behind_operand = false;
            }
            '"' | '\'' => {
                chain.start.get_or_insert(out.len());
                behind_operand = true;
            }
            c if is_word(c) && (names_test || !WORDS.contains(&token)) => {
                chain.start.get_or_insert(out.len());
                behind_operand = true;
            }
            _ => {
                chain.close(&mut out);
                *chain = Chain::default();
                behind_operand = false;
            }
        }
        out += token;
    }
    match chains.as_mut_slice() {
        [chain] => {
            chain.close(&mut out);
            out
        }
        _ => source.to_owned(), // a bracket never closes
    }
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// Python's `left % right`.
fn percent(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<Value, Error> {
    match left.as_str() {
        Some(pattern) => formatted(pattern, right).map(Value::from),
        None => {
            let rest = state.env().compile_expression("left % right")?;
            rest.eval(context! { left, right })
        }
    }
}

/// Jinja2's `pattern | format(values)`.
fn format_filter(pattern: &Value, values: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let is_named = named.args().next().is_some();
    let right = match is_named {
        true if !values.is_empty() => return Err(invalid("format: values with and without names")),
        true => Value::from(named),
        false => Value::from(Tuple::from(values.0)),
    };
    formatted(&text(pattern)?, &right)
}

/// Adds widths to those of a pattern so far.
fn widen(all: &mut usize, width: usize) -> Result<(), Error> {
    *all = all.saturating_add(width);
    match *all <= MAX_PADDED {
        true => Ok(()),
        false => Err(invalid(format!(
            "expected widths up to {MAX_PADDED} together, found {all}"
        ))),
    }
}

/// The number that a text of digits is: 0 if it is empty.
fn number(digits: &str) -> usize {
    match digits.trim_start_matches('0') {
        "" => 0,
        digits => digits.parse().unwrap_or(usize::MAX),
    }
}

/// The pattern with values in its fields. The engine formats those that are numbers.
fn formatted(pattern: &str, right: &Value) -> Result<String, Error> {
    let mut values = match right.downcast_object_ref::<Tuple>() {
        Some(_) => right.try_iter()?.collect(),
        None => vec![right.clone()],
    }
    .into_iter();
    let (mut out, mut rest, mut widths, mut named) = (String::new(), pattern, 0, false);
    while let Some(at) = rest.find('%') {
        out += &rest[..at];
        let field = &rest[at + 1..];
        if let Some(behind) = field.strip_prefix('%') {
            out.push('%');
            rest = behind;
            continue;
        }
        let key = field.strip_prefix('(').and_then(|f| f.split_once(')'));
        let (value, style) = match key {
            Some((key, style)) => {
                named = true;
                (right.get_item(&Value::from(key))?, style)
            }
            None => {
                let value = values.next();
                (value.ok_or_else(|| invalid("%: not enough values"))?, field)
            }
        };
        let end = style.find(|c: char| !c.is_ascii_digit() && !"#- +.hlL".contains(c));
        let end = end.ok_or_else(|| invalid("%: a field without its letter"))?;
        let length = style[end..].chars().next().map_or(0, char::len_utf8);
        let (letter, behind) = style[end..].split_at(length);
        for digits in style[..end].split(|c: char| !c.is_ascii_digit()) {
            widen(&mut widths, number(digits))?;
        }
        rest = behind;
        if let "s" | "r" = letter {
            let shown = if letter == "s" { text } else { repr };
            out += &text_field(&style[..end], &shown(&value)?)?;
            continue;
        }
        let whole = |x: f64| Value::from(x.trunc() as i128);
        let (letter, value) = match (letter, value.kind()) {
            ("d" | "i" | "u", ValueKind::Number) if !value.is_integer() => {
                ("d", f64::try_from(value).map(whole)?)
            }
            ("u", _) => ("d", value),
            (letter, _) => (letter, value),
        };
        let single = format!("%{}{letter}", &style[..end]);
        out += &format(FormatStyle::Printf, &single, &[value])?;
    }
    // A mapping may have more.
    if values.next().is_some() && !named && right.kind() != ValueKind::Map {
        return Err(invalid("%: more values than fields"));
    }
    Ok(out + rest)
}

/// A field for a text: what stands between `%` and its letter is flags, a width, and most characters behind a dot.
fn text_field(style: &str, shown: &str) -> Result<String, Error> {
    let style = style.trim_end_matches(['h', 'l', 'L']);
    let numbers = style.trim_start_matches(['#', '0', '-', ' ', '+']);
    let flags = &style[..style.len() - numbers.len()];
    let (width, most) = match numbers.split_once('.') {
        Some((width, most)) => (width, Some(most)),
        None => (numbers, None),
    };
    let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    if !digits(width) || !most.is_none_or(digits) {
        return Err(invalid(format!("%: a field that is not one, %{style}")));
    }
    let end = most.and_then(|most| shown.char_indices().nth(number(most)));
    let cut = end.map_or(shown, |(at, _)| &shown[..at]);
    let side = match flags.contains('-') {
        true => Align::Left,
        false => Align::Right,
    };
    Ok(aligned(cut, number(width), side, ' '))
}

/// Python's `pattern.format(values)`: the engine formats each field, and what it leaves too narrow is padded again.
pub(super) fn format_method(pattern: &str, values: &[Value]) -> Result<String, Error> {
    let (mut out, mut rest, mut widths, mut next) = (String::new(), pattern, 0, 0);
    while let Some(at) = rest.find(['{', '}']) {
        out += &rest[..at];
        let field = &rest[at..];
        if field.starts_with("{{") || field.starts_with("}}") {
            out += &field[..1];
            rest = &field[2..];
            continue;
        }
        let (inner, behind) = match field[1..].split_once('}') {
            Some((inner, behind)) if field.starts_with('{') && !inner.contains('{') => {
                (inner, behind)
            }
            _ => return Err(invalid("format: expected fields in single braces")),
        };
        rest = behind;
        let (name, spec) = inner.split_once(':').unwrap_or((inner, ""));
        let has_name = name.starts_with(|c: char| !".[!".contains(c));
        let name = match has_name {
            true => name.to_owned(),
            false => format!("{next}{name}"),
        };
        next += usize::from(!has_name);
        let one = |spec: &str| {
            format(
                FormatStyle::StrFormat,
                &format!("{{{name}:{spec}}}"),
                values,
            )
        };
        let layout = FieldSpec::read(spec);
        widen(&mut widths, layout.width)?;
        let found = one(spec)?;
        out += &match found.chars().count() < layout.width {
            true => aligned(&one(layout.rest)?, layout.width, layout.side, layout.fill),
            false => found,
        };
    }
    Ok(out + rest)
}

/// How a field of `str.format` is padded.
struct FieldSpec<'a> {
    fill: char,
    side: Align,
    width: usize,
    /// What is behind the width.
    rest: &'a str,
}

impl<'a> FieldSpec<'a> {
    fn read(spec: &'a str) -> Self {
        let side = |c: char| match c {
            '<' => Some(Align::Left),
            '>' | '=' => Some(Align::Right),
            '^' => Some(Align::Both),
            _ => None,
        };
        let mut chars = spec.chars();
        let (first, second) = (chars.next(), chars.next());
        let (fill, given, behind) = match (first, first.and_then(side), second.and_then(side)) {
            (Some(fill), _, Some(side)) => (fill, Some(side), &spec[fill.len_utf8() + 1..]),
            (_, Some(side), _) => (' ', Some(side), &spec[1..]),
            _ => (' ', None, spec),
        };
        let behind = behind.trim_start_matches(['+', '-', ' ', 'z', '#']);
        let end = behind.find(|c: char| !c.is_ascii_digit());
        let (digits, rest) = behind.split_at(end.unwrap_or(behind.len()));
        FieldSpec {
            fill: match given {
                None if digits.starts_with('0') => '0',
                _ => fill,
            },
            side: given.unwrap_or(Align::Left),
            width: number(digits),
            rest,
        }
    }
}
