//! What the user types: messages over several lines, and commands.

/// Marks the first and last line of a message of several lines.
const BLOCK: &str = "\"\"\"";

/// Joins lines to entries: a line that ends in a backslash goes on in the next one, and
/// between two `"""` every line break is kept.
#[derive(Debug, Default)]
pub struct Lines {
    text: String,
    in_block: bool,
    open: bool,
}

impl Lines {
    /// True in the middle of an entry.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Takes a line without its line end; the entry, if it is complete.
    pub fn push(&mut self, line: &str) -> Option<String> {
        let mut line = line;
        if !self.open
            && let Some(rest) = line.trim_start().strip_prefix(BLOCK)
        {
            line = rest;
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

    /// Forgets what was begun.
    pub fn clear(&mut self) {
        self.take();
    }

    fn take(&mut self) -> String {
        self.open = false;
        self.in_block = false;
        std::mem::take(&mut self.text)
    }
}

/// What an entry asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing was typed.
    Empty,
    /// A message, and the thinking that it asks for with `/think` or `/no_think`.
    Message(String, Option<bool>),
    /// A command.
    Command(Command),
    /// Something that looks like a command; why it is none.
    Wrong(String),
}

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// List the commands.
    Help,
    /// Forget all messages but the system prompt.
    Clear,
    /// Answer the last message again.
    Regen,
    /// Write the chat to a file, over an existing one if forced.
    Save {
        /// The file.
        path: String,
        /// Overwrite.
        force: bool,
    },
    /// Read a chat from a file.
    Load(String),
    /// Show or set the system prompt.
    System(Option<String>),
    /// Show all settings, or set one.
    Set(Option<(String, String)>),
    /// Show counts and rates.
    Stats,
    /// Turn thinking on or off.
    Think(bool),
    /// Leave.
    Exit,
}

/// The commands, for `/help`.
pub const HELP: &str = "\
/help                  this list
/clear                 forget all messages but the system prompt
/regen                 answer the last message again
/save [--force] FILE   write the chat to FILE (JSON)
/load FILE             go on with a saved chat
/system [TEXT]         show or set the system prompt
/set [NAME VALUE]      show all settings or set one
/stats                 tokens, context and rates
/think, /no_think      thinking on or off; also as the last word of a message
/exit                  leave (also Ctrl-D)
Several lines: end a line with \\, or put the text between two \"\"\".
Ctrl-C stops an answer; at the prompt it leaves.";

/// What an entry means.
pub fn parse(text: &str) -> Entry {
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Entry::Empty;
    }
    // Paths and formulas begin with a slash too: a command is a slash and a word.
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

/// A message without the `/think` or `/no_think` that may end it, and what that asks for. One that
/// neither ends is as it was given.
pub fn thinking_switch(text: &str) -> (&str, Option<bool>) {
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
    match word {
        "/help" => bare(Command::Help),
        "/clear" => bare(Command::Clear),
        "/regen" => bare(Command::Regen),
        "/stats" => bare(Command::Stats),
        "/exit" | "/quit" => bare(Command::Exit),
        "/think" => bare(Command::Think(true)),
        "/no_think" => bare(Command::Think(false)),
        "/load" => file(rest).map(Command::Load),
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
        let mut reader = Lines::default();
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
        assert_eq!(entries(&["say \"\"\" twice"]), ["say \"\"\" twice"]);
        let mut reader = Lines::default();
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
        check("/help", Command::Help);
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
            "/help me",
            "/save",
            "/load",
            "/save --force",
            "/set seed",
        ] {
            assert!(matches!(parse(wrong), Entry::Wrong(_)), "{wrong}");
        }
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
        assert_eq!(parse("/no_think"), Entry::Command(Command::Think(false)));
        let inside = "What does /no_think do?";
        assert_eq!(parse(inside), Entry::Message(inside.into(), None));
    }
}
