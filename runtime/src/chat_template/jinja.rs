//! The template engine within bounds on the length of the source, the instructions of a rendering
//! and the size of its output, on a stack large enough for any nesting that the source can hold.

use super::integers::Unmarked;
use super::memory::{STACK, limit_note};
use super::{filters, json, percent, python, source};
use jiff::tz::TimeZone;
use minijinja::value::{Serde, Value as Jinja};
use minijinja::{Environment, ErrorKind};
use nq_formats::human_bytes;
use serde_json::Value;
use std::io::{self, Write};
use std::time::SystemTime;

/// Most bytes of a model's templates together. The longest published ones have tens of thousands.
const MAX_SOURCE: usize = 256 << 10;

/// Most instructions of one rendering: about a second. Qwen3's template takes some 50 per message.
const MAX_INSTRUCTIONS: u64 = 10_000_000;

/// Most bytes that one rendering may write.
const MAX_OUTPUT: usize = 64 << 20;

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
            for (name, text) in sources {
                env.add_template_owned(name.clone(), source::prepared(text))
                    .map_err(|e| describe(&e))?;
            }
            Ok(Templates(env))
        })
    }

    /// Renders the template for chats with or without tools; `context` holds its variables, with
    /// [marked](super::integers) integers.
    ///
    /// # Errors
    /// The error that the template raised, with its line, or the limit that it exceeded.
    pub(super) fn render(&self, tools: bool, context: &Value) -> Result<String, String> {
        on_large_stack(|| {
            let named = |name| self.0.get_template(name);
            let template = if tools {
                named(super::TOOL_USE).or_else(|_| named(super::DEFAULT))
            } else {
                named(super::DEFAULT)
            };
            let mut out = Bounded(Vec::new());
            template
                .and_then(|t| t.render_captured_to(Jinja::from(Serde(Unmarked(context))), &mut out))
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
        let thread = thread.map_err(|e| {
            let stack = human_bytes(STACK as u64);
            format!("a thread with a stack of {stack}: {e}{}", limit_note())
        })?;
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
    env.set_unknown_method_callback(|state, value, name, args| match (value.as_str(), name) {
        (Some(pattern), "format") => percent::format_method(pattern, args).map(Jinja::from),
        _ => python::method(state, value, name, args),
    });
    python::install(&mut env);
    percent::install(&mut env);
    filters::install(&mut env);
    env.add_filter("tojson", json::tojson);
    env.add_function("raise_exception", |message: String| -> Result<Jinja, _> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", |format: String| {
        // A clock past the year 9999 has no date.
        jiff::Timestamp::try_from(SystemTime::now())
            .map(|now| now.to_zoned(TimeZone::system()))
            .and_then(|now| jiff::fmt::strtime::format(&format, &now))
            .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))
    });
    Ok(env)
}
