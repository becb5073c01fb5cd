//! User input: messages of several lines, and commands.

use crate::terminal::filled;
use nq_runtime::SamplingParams;

/// Marks the first and the last line of a message of several lines.
const BLOCK: &str = "\"\"\"";

/// Joins lines to entries: a line that ends in a backslash continues in the next one, and
/// between two `"""` every line break is kept.
#[derive(Debug, Default)]
pub(crate) struct EntryReader {
    text: String,
    in_block: bool,
    open: bool,
}

impl EntryReader {
    /// True inside an unfinished entry.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Takes a line without its line end; returns the entry if it is complete.
    pub fn push(&mut self, line: &str) -> Option<String> {
        let mut line = line;
        if !self.open
            && let Some(rest) = line.trim_start().strip_prefix(BLOCK)
        {
            // A terminal may hand over a pasted block as one line.
            line = rest.strip_prefix('\n').unwrap_or(rest);
            self.open = true;
            self.in_block = true;
            if line.is_empty() {
                return None;
            }
        }
        if self.in_block {
            if let Some(last) = line.trim_end().strip_suffix(BLOCK) {
                self.text.push_str(last);
                let text = self.take();
                return Some(text.strip_suffix('\n').unwrap_or(&text).to_owned());
            }
            self.text.push_str(line);
            self.text.push('\n');
            return None;
        }
        match line.strip_suffix('\\') {
            Some(start) => {
                self.text.push_str(start);
                self.text.push('\n');
                self.open = true;
                None
            }
            None => {
                self.text.push_str(line);
                Some(self.take())
            }
        }
    }

    /// Discards an unfinished entry.
    pub fn clear(&mut self) {
        self.take();
    }

    fn take(&mut self) -> String {
        self.open = false;
        self.in_block = false;
        std::mem::take(&mut self.text)
    }
}

/// A parsed entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Nothing was typed.
    Empty,
    /// A message, and the thinking mode that it selects with `/think` or `/no_think`.
    Message(String, Option<bool>),
    /// A command.
    Command(Command),
    /// Looks like a command but is not one; with the reason.
    Wrong(String),
}

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// List the commands, or describe one.
    Help(Option<String>),
    /// Remove all messages but the system prompt.
    Clear,
    /// Answer the last message again.
    Regen,
    /// Write the chat to a file.
    Save {
        /// The file.
        path: String,
        /// Overwrite an existing file.
        force: bool,
    },
    /// Read a chat from a file, or the last one.
    Load(Option<String>),
    /// Have an image of this file go with the next message.
    Image(String),
    /// Show or set the system prompt.
    System(Option<String>),
    /// Show all settings, or set one.
    Set(Option<(String, String)>),
    /// Show counts and rates.
    Stats,
    /// Turn thinking on or off, and its most tokens; `None`: as many as it takes.
    Think(bool, Option<usize>),
    /// Quit.
    Exit,
}

/// A command in the list of `/help`.
pub(crate) struct Listed {
    /// Its word.
    pub name: &'static str,
    arguments: &'static str,
    does: &'static str,
    /// Further help, for `/help` with its name.
    more: &'static str,
}

const fn listed(
    name: &'static str,
    arguments: &'static str,
    does: &'static str,
    more: &'static str,
) -> Listed {
    Listed {
        name,
        arguments,
        does,
        more,
    }
}

/// All commands.
pub(crate) const COMMANDS: [Listed; 12] = [
    listed(
        "/help",
        "[COMMAND]",
        "this list, or more about one command",
        "",
    ),
    listed(
        "/clear",
        "",
        "forget all messages but the system prompt",
        "",
    ),
    listed(
        "/regen",
        "",
        "answer the last message again",
        "The former answer is forgotten.",
    ),
    listed(
        "/save",
        "[--force] FILE",
        "write the chat to FILE (JSON)",
        "~ is your home. A FILE that exists is replaced only with --force.",
    ),
    listed(
        "/load",
        "[FILE]",
        "continue a saved chat, or the last one",
        "Every chat in a terminal is kept after each answer, until the next chat's first.",
    ),
    listed(
        "/image",
        "FILE",
        "an image that goes with the next message",
        "PNG, JPEG, WebP, GIF or BMP; several commands for several images. /regen and saved chats have them too.",
    ),
    listed("/system", "[TEXT]", "show or set the system prompt", ""),
    listed(
        "/set",
        "[NAME VALUE]",
        "show all settings or set one",
        "E.g. /set temperature 0.7; max_tokens none, thinking_budget none and thinking auto undo what was set.",
    ),
    listed("/stats", "", "all figures: tokens, context and rates", ""),
    listed(
        "/think",
        "[N]",
        "thinking on, of at most N tokens; also as the last word of a message",
        "After N tokens the thinking is closed and the answer begins. /think alone takes the limit away.",
    ),
    listed(
        "/no_think",
        "",
        "thinking off; also as the last word of a message",
        "",
    ),
    listed("/exit", "", "leave (also /quit, /bye, Ctrl-D)", ""),
];

/// The settings that `/set` knows.
pub fn settings() -> impl Iterator<Item = &'static str> {
    let others = [
        "seed",
        "max_tokens",
        "thinking",
        "thinking_budget",
        "hide_thinking",
        "on_overflow",
    ];
    SamplingParams::NAMES.iter().copied().chain(others)
}

/// Help for all commands, or for one, in lines of `width` columns.
pub(crate) fn help(command: Option<&str>, width: Option<usize>) -> String {
    let line = |c: &Listed| {
        let call = format!("{} {}", c.name, c.arguments);
        filled(&format!("{call:<22} {}", c.does), width, 23)
    };
    let Some(name) = command else {
        let mut lines: Vec<String> = COMMANDS.iter().map(line).collect();
        lines.extend(
            [
                "Several lines: end a line with \\, or put the text between two \"\"\".",
                "Tab completes commands, settings and files.",
                "Ctrl-C stops an answer; at the prompt it clears what is typed, and on an empty line the \
                 second one leaves.",
            ]
            .map(|l| filled(l, width, 0)),
        );
        return lines.join("\n");
    };
    match COMMANDS.iter().find(|c| c.name == name) {
        Some(c) if c.more.is_empty() => line(c),
        Some(c) => format!("{}\n{}", line(c), filled(c.more, width, 0)),
        None => format!("no command {name}: /help lists them"),
    }
}

/// Parses an entry.
pub fn parse(text: &str) -> Entry {
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Entry::Empty;
    }
    // Paths and formulas begin with a slash too: a command is a slash followed by a single word.
    let word = trimmed.split_whitespace().next().unwrap_or_default();
    let rest = trimmed[word.len()..].trim();
    let is_command = word.len() > 1
        && word.starts_with('/')
        && word[1..]
            .chars()
            .all(|c| c.is_ascii_lowercase() || c == '_');
    if is_command {
        return match command(word, rest) {
            Ok(command) => Entry::Command(command),
            Err(why) => Entry::Wrong(why),
        };
    }
    let (message, thinking) = thinking_switch(text);
    Entry::Message(message.trim_end().into(), thinking)
}

/// A message without a final `/think` or `/no_think`, and what that selects. Other messages are
/// returned unchanged.
pub(crate) fn thinking_switch(text: &str) -> (&str, Option<bool>) {
    for (word, on) in [("/no_think", false), ("/think", true)] {
        match text.trim_end().strip_suffix(word) {
            Some(rest) if rest.is_empty() || rest.ends_with(char::is_whitespace) => {
                return (rest.trim_end(), Some(on));
            }
            _ => {}
        }
    }
    (text, None)
}

fn command(word: &str, rest: &str) -> Result<Command, String> {
    let bare = |command| match rest {
        "" => Ok(command),
        _ => Err(format!("{word} takes nothing, found {rest:?}")),
    };
    let file = |rest: &str| match rest {
        "" => Err(format!("{word} needs a file")),
        path => Ok(path.to_owned()),
    };
    if matches!(rest, "--help" | "-h") && COMMANDS.iter().any(|c| c.name == word) {
        return Ok(Command::Help(Some(word.to_owned())));
    }
    match word {
        "/help" => match rest {
            "" => Ok(Command::Help(None)),
            _ if rest.contains(' ') => Err(format!("/help takes one command, found {rest:?}")),
            // With or without the slash.
            _ => Ok(Command::Help(Some(format!(
                "/{}",
                rest.trim_start_matches('/')
            )))),
        },
        "/clear" => bare(Command::Clear),
        "/regen" => bare(Command::Regen),
        "/stats" => bare(Command::Stats),
        "/exit" | "/quit" | "/bye" => bare(Command::Exit),
        "/think" if rest.is_empty() => Ok(Command::Think(true, None)),
        "/think" => match rest.parse() {
            Ok(tokens) if tokens > 0 => Ok(Command::Think(true, Some(tokens))),
            _ => Err(format!("/think takes a number of tokens, found {rest:?}")),
        },
        "/no_think" => bare(Command::Think(false, None)),
        "/load" => Ok(Command::Load((!rest.is_empty()).then(|| rest.to_owned()))),
        "/image" => file(rest).map(Command::Image),
        "/save" => {
            let forced = rest.strip_prefix("--force");
            let path = file(forced.unwrap_or(rest).trim())?;
            Ok(Command::Save {
                path,
                force: forced.is_some(),
            })
        }
        "/system" => Ok(Command::System((!rest.is_empty()).then(|| rest.to_owned()))),
        "/set" if rest.is_empty() => Ok(Command::Set(None)),
        "/set" => match rest.split_once([' ', '=']) {
            Some((name, value)) if !value.trim().is_empty() => {
                let name = name.trim().replace('-', "_");
                Ok(Command::Set(Some((name, value.trim().to_owned()))))
            }
            _ => Err(format!("/set needs a name and a value, found {rest:?}")),
        },
        _ => Err(format!("no command {word}: /help lists them")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(lines: &[&str]) -> Vec<String> {
        let mut reader = EntryReader::default();
        lines.iter().filter_map(|l| reader.push(l)).collect()
    }

    #[test]
    fn lines_join_to_entries() {
        assert_eq!(entries(&["a", "b"]), ["a", "b"]);
        assert_eq!(entries(&["a\\", "b\\", "c", "d"]), ["a\nb\nc", "d"]);
        assert_eq!(
            entries(&["\"\"\"", "a", "", "b", "\"\"\"", "c"]),
            ["a\n\nb", "c"]
        );
        assert_eq!(entries(&["\"\"\"a", "b\"\"\""]), ["a\nb"]);
        assert_eq!(entries(&["\"\"\"a\"\"\"", "b"]), ["a", "b"]);
        assert_eq!(entries(&["\"\"\"", "a\\", "b", "\"\"\""]), ["a\\\nb"]);
        assert_eq!(entries(&["\"\"\"", "\"\"\""]), [""]);
        assert_eq!(entries(&["\"\"\"\na\nb\n\"\"\"", "c"]), ["a\nb", "c"]);
        assert_eq!(entries(&["say \"\"\" twice"]), ["say \"\"\" twice"]);
        let mut reader = EntryReader::default();
        assert_eq!(reader.push("a\\"), None);
        assert!(reader.is_open());
        reader.clear();
        assert_eq!(reader.push("b"), Some("b".into()));
    }

    #[test]
    fn commands_and_messages() {
        let message = |t: &str| Entry::Message(t.into(), None);
        assert_eq!(parse("  \n"), Entry::Empty);
        assert_eq!(parse("Hello\n"), message("Hello"));
        assert_eq!(
            parse("/etc/passwd is a file"),
            message("/etc/passwd is a file")
        );
        assert_eq!(parse("/ 2"), message("/ 2"));
        let check = |text, command| assert_eq!(parse(text), Entry::Command(command), "{text}");
        check("/help", Command::Help(None));
        let about = |word: &str| Command::Help(Some(word.into()));
        check("/image ~/a b.png", Command::Image("~/a b.png".into()));
        check("/help save", about("/save"));
        check("/set --help", about("/set"));
        check("/load", Command::Load(None));
        check(" /exit ", Command::Exit);
        check("/system", Command::System(None));
        check(
            "/system Be brief.\nBe kind.",
            Command::System(Some("Be brief.\nBe kind.".into())),
        );
        let save = |force| Command::Save {
            path: "my chat.json".into(),
            force,
        };
        check("/save my chat.json", save(false));
        check("/save --force my chat.json", save(true));
        check("/set", Command::Set(None));
        check(
            "/set top-p 0.9",
            Command::Set(Some(("top_p".into(), "0.9".into()))),
        );
        check(
            "/set seed=7",
            Command::Set(Some(("seed".into(), "7".into()))),
        );
        for wrong in [
            "/nonsense",
            "/help me now",
            "/save",
            "/save --force",
            "/set seed",
        ] {
            assert!(matches!(parse(wrong), Entry::Wrong(_)), "{wrong}");
        }
    }

    #[test]
    fn every_command_is_listed_and_known() {
        for c in &COMMANDS {
            assert!(help(None, None).contains(c.name), "{}", c.name);
            assert!(help(Some(c.name), None).starts_with(c.name));
            assert_eq!(
                command(c.name, "--help"),
                Ok(Command::Help(Some(c.name.to_owned())))
            );
        }
        assert!(
            help(Some("/save"), None).contains("--force")
                && help(Some("/x"), None).contains("no command")
        );
    }

    #[test]
    fn thinking_switches_end_a_message() {
        assert_eq!(thinking_switch(" a \n\n"), (" a \n\n", None));
        assert_eq!(thinking_switch("a  /think \n"), ("a", Some(true)));
        let on = Entry::Message("Why?".into(), Some(true));
        assert_eq!(parse("Why? /think"), on);
        assert_eq!(
            parse("Why?\n/no_think"),
            Entry::Message("Why?".into(), Some(false))
        );
        assert_eq!(
            parse("/no_think"),
            Entry::Command(Command::Think(false, None))
        );
        let some = Entry::Command(Command::Think(true, Some(64)));
        assert_eq!(parse("/think 64"), some);
        assert_eq!(parse("/think"), Entry::Command(Command::Think(true, None)));
        for wrong in ["/think 0", "/think -1", "/think much", "/no_think 5"] {
            assert!(matches!(parse(wrong), Entry::Wrong(_)), "{wrong}");
        }
        let inside = "What does /no_think do?";
        assert_eq!(parse(inside), Entry::Message(inside.into(), None));
    }
}
