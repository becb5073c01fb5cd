//! The line editor of a conversation: completion with Tab, and Ctrl-C at the prompt.

use super::input::{COMMANDS, settings};
use super::saved::at_home;
use rustyline::completion::{Completer, Pair};
use rustyline::config::Configurer;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::Validator;
use rustyline::{
    Cmd, CompletionType, ConditionalEventHandler, Context, Editor, Event, EventContext,
    EventHandler, Helper, KeyEvent, Movement, RepeatCount,
};
use std::borrow::Cow;
use std::path::Path;

/// Entries kept in the history file.
const HISTORY: usize = 1000;

/// A line editor that completes nq's commands, with a coloured prompt if there are colours.
///
/// # Errors
/// If the terminal cannot be used.
pub fn new(colours: bool) -> rustyline::Result<Editor<Commands, DefaultHistory>> {
    let mut editor = Editor::new()?;
    editor.set_max_history_size(HISTORY)?;
    editor.set_auto_add_history(false);
    editor.set_completion_type(CompletionType::List);
    editor.set_helper(Some(Commands { colours }));
    let clear = EventHandler::Conditional(Box::new(ClearFirst));
    editor.bind_sequence(KeyEvent::ctrl('C'), clear);
    Ok(editor)
}

/// Ctrl-C clears the line (Ctrl-Y brings it back); on an empty line it interrupts.
struct ClearFirst;

impl ConditionalEventHandler for ClearFirst {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, line: &EventContext<'_>) -> Option<Cmd> {
        (!line.line().is_empty()).then_some(Cmd::Kill(Movement::WholeBuffer))
    }
}

/// Completes commands, the settings of `/set` and the files of `/save` and `/load`.
pub(crate) struct Commands {
    colours: bool,
}

impl Completer for Commands {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        let (start, words) = candidates(&line[..pos]);
        let pair = |word: String| Pair {
            display: word.clone(),
            replacement: word,
        };
        Ok((start, words.into_iter().map(pair).collect()))
    }
}

impl Hinter for Commands {
    type Hint = String;
}
impl Highlighter for Commands {
    fn highlight_prompt<'b, 's: 'b, 'p: 'b>(&'s self, prompt: &'p str, _: bool) -> Cow<'b, str> {
        match self.colours {
            true => format!("\x1b[1;36m{prompt}\x1b[0m").into(),
            false => prompt.into(),
        }
    }
}
impl Validator for Commands {}
impl Helper for Commands {}

/// The start of the word in `typed` to complete, and its completions.
fn candidates(typed: &str) -> (usize, Vec<String>) {
    let beginning = |all: &mut dyn Iterator<Item = &str>, word: &str| {
        let fitting = all.filter(|w| w.starts_with(word));
        fitting.map(|w| format!("{w} ")).collect()
    };
    let Some((command, rest)) = typed.split_once(' ') else {
        let mut names = COMMANDS.iter().map(|c| c.name);
        let words = if typed.starts_with('/') {
            beginning(&mut names, typed)
        } else {
            Vec::new()
        };
        return (0, words);
    };
    let rest = rest.trim_start();
    let start = typed.len() - rest.len();
    match command {
        "/set" if !rest.contains(' ') => (start, beginning(&mut settings(), rest)),
        "/help" => {
            let mut names = COMMANDS.iter().map(|c| c.name);
            (start, beginning(&mut names, rest))
        }
        "/save" | "/load" | "/image" => {
            let path = rest.strip_prefix("--force ").unwrap_or(rest).trim_start();
            files(typed.len() - path.len(), path)
        }
        _ => (typed.len(), Vec::new()),
    }
}

/// Files and folders whose path begins with `path`, which starts at `start`.
fn files(start: usize, path: &str) -> (usize, Vec<String>) {
    let (folder, name) = match path.rfind('/') {
        Some(at) => path.split_at(at + 1),
        None => ("", path),
    };
    let place = match folder {
        "" => Path::new(".").to_owned(),
        _ => at_home(folder),
    };
    let mut words = Vec::new();
    for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
        let Ok(found) = entry.file_name().into_string() else {
            continue; // the typed line is text
        };
        let hidden = found.starts_with('.') && !name.starts_with('.');
        if found.starts_with(name) && !hidden && !found.contains(char::is_control) {
            let end = if entry.path().is_dir() { "/" } else { "" };
            words.push(format!("{found}{end}"));
        }
    }
    words.sort();
    (start + folder.len(), words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tab_completes_commands_settings_and_files() {
        let check = |typed: &str, start: usize, words: &[&str]| {
            let words = words.iter().map(|w| (*w).to_owned()).collect();
            assert_eq!(candidates(typed), (start, words), "{typed}");
        };
        check("/sa", 0, &["/save "]);
        check("/s", 0, &["/save ", "/system ", "/set ", "/stats "]);
        check("/set top", 5, &["top_k ", "top_p "]);
        check("/set top_p 0", 12, &[]);
        check("/help /lo", 6, &["/load "]);
        check("what is /s", 10, &[]);
        check("hello", 0, &[]);
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("chats")).unwrap();
        std::fs::write(dir.path().join("chat é.json"), "").unwrap();
        std::fs::write(dir.path().join(".hidden"), "").unwrap();
        let folder = format!("{}/", dir.path().display());
        for command in ["/load ", "/save --force "] {
            let typed = format!("{command}{folder}cha");
            let start = command.len() + folder.len();
            check(&typed, start, &["chat é.json", "chats/"]);
        }
        check(
            &format!("/load {folder}"),
            6 + folder.len(),
            &["chat é.json", "chats/"],
        );
        check("/load /no/such/folder/", 22, &[]);
    }
}
