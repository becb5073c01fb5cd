//! Python's `%`, which formats if there is a string on its left. The engine computes with numbers alone there, so
//! that a template's `a % b` becomes `a | percent_of_python(b)` before it is compiled.

use super::python::{MAX_PADDED, text};
use super::source::{expressions, string};
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, context};

const FILTER: &str = "percent_of_python";

/// Words that end an operand, as operators that bind less do.
const WORDS: [&str; 8] = ["and", "or", "not", "in", "if", "else", "elif", "recursive"];

/// Most `%` of a template that are more than the engine's own.
const MAX_OPERATORS: usize = 1000;

pub(super) fn install(env: &mut Environment<'static>) {
    env.add_filter(FILTER, percent);
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

/// The pattern with values in its fields. The engine formats each of them.
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
        for number in style[..end].split(|c: char| !c.is_ascii_digit()) {
            let number = number.trim_start_matches('0');
            let wide = if number.is_empty() {
                Ok(0)
            } else {
                number.parse()
            };
            widths = wide.unwrap_or(usize::MAX).saturating_add(widths);
        }
        if widths > MAX_PADDED {
            let what = format!("%: expected widths up to {MAX_PADDED} together, found {widths}");
            return Err(invalid(what));
        }
        let whole = |x: f64| Value::from(x.trunc() as i128);
        let (letter, value) = match (letter, value.kind()) {
            ("d" | "i" | "u", ValueKind::Number) if !value.is_integer() => {
                ("d", f64::try_from(value).map(whole)?)
            }
            ("u", _) => ("d", value),
            // Lists and the like are shown as Python shows them.
            ("s", ValueKind::Number | ValueKind::Bool | ValueKind::String) => ("s", value),
            ("s", _) => ("s", Value::from(text(&value)?)),
            (letter, _) => (letter, value),
        };
        let single = format!("%{}{letter}", &style[..end]);
        out += &format(FormatStyle::Printf, &single, &[value])?;
        rest = behind;
    }
    // A mapping may have more.
    if values.next().is_some() && !named && right.kind() != ValueKind::Map {
        return Err(invalid("%: more values than fields"));
    }
    Ok(out + rest)
}
