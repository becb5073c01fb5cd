//! The template engine within bounds on the length of the source, the instructions of a rendering
//! and the size of its output, on a stack large enough for any nesting that the source can hold.

use minijinja::value::{Kwargs, Serde, Value as Jinja};
use minijinja::{Environment, ErrorKind};
use serde_json::Value;
use std::io::{self, Write};

/// Most bytes of a model's templates together. The longest published ones have tens of thousands.
const MAX_SOURCE: usize = 256 << 10;

/// Most instructions of one rendering: about a second. Qwen3's template takes some 50 per message.
const MAX_INSTRUCTIONS: u64 = 10_000_000;

/// Most bytes that one rendering may write.
const MAX_OUTPUT: usize = 64 << 20;

/// The widest indentation of `tojson`.
const MAX_INDENT: usize = 64;

/// Stack for parsing and rendering. The parser and the compiler recurse over chains of operators
/// without a limit of their own; the deepest chain that fits [`MAX_SOURCE`] bytes takes half of this
/// (a test checks that). Memory that is not touched is not taken.
pub(super) const STACK: usize = 512 << 20;

/// The templates of a model, compiled.
#[derive(Debug)]
pub(super) struct Templates(Environment<'static>);

impl Templates {
    /// Compiles (name, source) pairs.
    ///
    /// # Errors
    /// A template that does not compile, or sources longer than [`MAX_SOURCE`].
    pub(super) fn compile(sources: &[(String, String)]) -> Result<Self, String> {
        let bytes: usize = sources
            .iter()
            .map(|(name, source)| name.len() + source.len())
            .sum();
        if bytes > MAX_SOURCE {
            return Err(format!(
                "expected at most {MAX_SOURCE} bytes of templates, found {bytes}"
            ));
        }
        on_large_stack(|| {
            let mut env = environment().map_err(|e| describe(&e))?;
            for (name, source) in sources {
                env.add_template_owned(name.clone(), source.clone())
                    .map_err(|e| describe(&e))?;
            }
            Ok(Templates(env))
        })
    }

    /// Renders the template for chats with or without tools; `context` holds its variables.
    ///
    /// # Errors
    /// The error that the template raised, with its line, or the limit that it exceeded.
    pub(super) fn render(
        &self,
        tools: bool,
        context: &(impl serde::Serialize + Sync),
    ) -> Result<String, String> {
        on_large_stack(|| {
            let named = |name| self.0.get_template(name);
            let template = if tools {
                named(super::TOOL_USE).or_else(|_| named(super::DEFAULT))
            } else {
                named(super::DEFAULT)
            };
            let mut out = Bounded(Vec::new());
            template
                .and_then(|t| t.render_captured_to(Jinja::from(Serde(context)), &mut out))
                .map_err(|e| describe(&e))?;
            String::from_utf8(out.0).map_err(|e| e.to_string())
        })
    }
}

/// Runs `f` on a thread with a stack of [`STACK`] bytes; a panic of the template engine is an error.
fn on_large_stack<T: Send>(f: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .stack_size(STACK)
            .spawn_scoped(scope, f);
        let thread = thread.map_err(|e| format!("a thread to render on: {e}"))?;
        thread.join().unwrap_or_else(|panic| {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!(
                "the template engine failed: {}",
                said.unwrap_or("it panicked")
            ))
        })
    })
}

/// The output of a rendering, up to [`MAX_OUTPUT`] bytes.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            let message = format!("expected at most {MAX_OUTPUT} bytes of output, found more");
            return Err(io::Error::other(message));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The error with its line, and its chain of causes on one line.
fn describe(e: &minijinja::Error) -> String {
    let mut text = e.to_string();
    let mut source = std::error::Error::source(e);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut env = Environment::new();
    let mut syntax = env.syntax().to_builder();
    env.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_fuel(Some(MAX_INSTRUCTIONS));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_filter("tojson", tojson);
    env.add_function("raise_exception", |message: String| -> Result<Jinja, _> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", |format: String| {
        jiff::fmt::strtime::format(&format, &jiff::Zoned::now())
            .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))
    });
    Ok(env)
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn tojson(
    value: &Jinja,
    indent: Option<usize>,
    options: Kwargs,
) -> Result<Jinja, minijinja::Error> {
    let indent = match indent {
        Some(n) => Some(n),
        None => options.get::<Option<usize>>("indent")?,
    };
    // Some templates pass `ensure_ascii`; the filter of transformers accepts it too.
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    if let Some(width) = indent.filter(|&width| width > MAX_INDENT) {
        return Err(minijinja::Error::new(
            ErrorKind::InvalidOperation,
            format!("tojson: expected an indent up to {MAX_INDENT}, found {width}"),
        ));
    }
    if value.is_undefined() || ascii == Some(true) {
        let what = if value.is_undefined() {
            "tojson of an undefined value"
        } else {
            "tojson with ensure_ascii is not supported"
        };
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, what));
    }
    let json = serde_json::to_value(value)
        .map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    let mut out = String::new();
    dump(&json, indent, 0, &mut out);
    Ok(Jinja::from(out))
}

fn dump(value: &Value, indent: Option<usize>, depth: usize, out: &mut String) {
    let new_line = |depth: usize, out: &mut String| {
        if let Some(width) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    };
    let comma = if indent.is_some() { "," } else { ", " };
    match value {
        Value::Array(items) if !items.is_empty() => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { comma } else { "" });
                new_line(depth + 1, out);
                dump(item, indent, depth + 1, out);
            }
            new_line(depth, out);
            out.push(']');
        }
        Value::Object(map) if !map.is_empty() => {
            out.push('{');
            for (i, (key, item)) in map.iter().enumerate() {
                out.push_str(if i > 0 { comma } else { "" });
                new_line(depth + 1, out);
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push_str(": ");
                dump(item, indent, depth + 1, out);
            }
            new_line(depth, out);
            out.push('}');
        }
        Value::Number(n) if n.is_f64() => out.push_str(&python_float(n.as_f64().unwrap_or(0.0))),
        // serde_json escapes strings as Python does: quotes, backslashes and controls only.
        other => out.push_str(&other.to_string()),
    }
}

/// Python's `repr` of a finite float: the shortest digits that read back, with an exponent
/// below 1e-4 and from 1e16 on.
fn python_float(x: f64) -> String {
    let scientific = format!("{x:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{x:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_pythons() {
        let check = |x: f64, expected: &str| assert_eq!(python_float(x), expected);
        check(2.5, "2.5");
        check(3.0, "3.0");
        check(-0.0, "-0.0");
        check(1e15, "1000000000000000.0");
        check(1e16, "1e+16");
        check(1.5e300, "1.5e+300");
        check(0.0001, "0.0001");
        check(0.00001, "1e-05");
        check(-1.25e-7, "-1.25e-07");
    }
}
