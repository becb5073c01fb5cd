//! The conversation in a terminal: reads entries, runs commands, prints answers.

use super::conversation::{ChatEvent, Conversation, End, Turn};
use super::input::{Command, Entry, EntryReader, help, parse};
use super::interrupt::Answering;
use super::printer::{Printer, Thinking};
use super::{Overflow, editor, report, saved};
use crate::terminal::{INTERRUPTED, Notes, filled, has_colours, print_line, printable, say, width};
use crate::texts::read_bounded;
use anyhow::{Context, bail};
use nq_pictures::Limits;
use nq_runtime::{Engine, Error as RuntimeError, Stats, StopReason};
use rustyline::error::ReadlineError;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The file with the last chat, next to the history of entries.
const LAST_CHAT: &str = "last_chat.json";

/// A conversation and its display settings.
pub(crate) struct Repl<'m> {
    /// The conversation.
    pub conversation: Conversation<'m>,
    /// The engine, if the model runs in this process.
    pub engine: Option<&'m dyn Engine>,
    /// The model's name, for saved chats.
    pub model: String,
    /// How thinking is shown when it is not hidden.
    pub shown: Thinking,
    /// True if thinking is hidden.
    pub hide_thinking: bool,
    /// Which figures follow an answer.
    pub figures: Figures,
    /// Sums over all answers.
    pub totals: Totals,
    /// Folder for the history and the last chat, if any.
    pub folder: Option<PathBuf>,
}

/// Which figures follow an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Figures {
    /// None.
    Quiet,
    /// The number of tokens and their rate.
    Brief,
    /// All.
    All,
}

/// Sums over all answers of a process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// The last answer.
    last: Option<(Stats, End)>,
    /// Read bandwidth of the memory with the weights, in bytes per second, measured once: on a busy machine
    /// it would be another one after each answer.
    bandwidth: Option<f64>,
    answers: usize,
    prompt_tokens: usize,
    reused_tokens: usize,
    tokens: usize,
    time: Duration,
}

impl Totals {
    fn add(&mut self, s: &Stats, end: End) {
        self.last = Some((*s, end));
        self.answers += 1;
        self.prompt_tokens += s.prompt_tokens;
        self.reused_tokens += s.reused_tokens;
        self.tokens += s.tokens;
        self.time += s.first_token + s.decode;
    }
}

/// Writes a note of nq, in lines as wide as the terminal. In one piece, so that it may have a colour of its own.
fn note(err: &mut dyn Write, text: &str) -> io::Result<()> {
    let text = filled(&format!("nq: {}", printable(text)), width(), 4);
    err.write_all(format!("{text}\n").as_bytes())
}

/// What to do after an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Read the next entry.
    Continue,
    /// Quit.
    Exit,
}

impl Repl<'_> {
    /// Answers one message and prints the answer; the message may switch thinking on or off. With
    /// `json`, stdout gets one object at the end instead of the text.
    pub(crate) fn answer_once(
        &mut self,
        text: &str,
        switch: Option<bool>,
        json: bool,
    ) -> anyhow::Result<ExitCode> {
        if switch.is_some() {
            self.switch_thinking(switch, &mut Notes::new())?;
        }
        let turn = if json {
            let mut nothing = io::sink();
            let turn = self.turn(
                Some(text),
                &mut nothing,
                &mut Notes::new(),
                Thinking::Hidden,
            )?;
            let json = self.json(&turn);
            print_line(&json.to_string())?;
            turn
        } else {
            let thinking = self.thinking();
            self.turn(Some(text), &mut io::stdout(), &mut Notes::new(), thinking)?
        };
        Ok(match turn.end {
            End::Generated(StopReason::Interrupted) => ExitCode::from(INTERRUPTED),
            _ => ExitCode::SUCCESS,
        })
    }

    /// Reads and handles entries until the user quits.
    pub fn run(&mut self) -> anyhow::Result<ExitCode> {
        let mut editor = editor::new(has_colours(&io::stdout()))?;
        let history = self.folder.as_ref().map(|dir| dir.join("chat_history"));
        if let Some(path) = history.as_deref().filter(|p| p.exists())
            && let Err(e) = editor.load_history(path)
        {
            say(&format!(
                "nq: {}: the history cannot be read: {e}",
                path.display()
            ));
        }
        let mut lines = EntryReader::default();
        let mut interrupted = false;
        let code = loop {
            let prompt = if lines.is_open() { "... " } else { ">>> " };
            match editor.readline(prompt) {
                Ok(line) => {
                    interrupted = false;
                    let Some(entry) = lines.push(&line) else {
                        continue;
                    };
                    if !entry.trim().is_empty() {
                        editor.add_history_entry(entry.as_str())?;
                    }
                    match self.handle(&entry, &mut io::stdout(), &mut Notes::new()) {
                        Ok(Flow::Continue) => {}
                        Ok(Flow::Exit) => break ExitCode::SUCCESS,
                        Err(e) if crate::terminal::is_broken_pipe(&e) => return Err(e),
                        Err(e) => say(&format!("nq: {e:#}")),
                    }
                }
                Err(ReadlineError::Interrupted) if lines.is_open() => lines.clear(),
                Err(ReadlineError::Interrupted) if !interrupted => {
                    interrupted = true;
                    say("nq: Ctrl-C again, Ctrl-D or /exit leaves");
                }
                Err(ReadlineError::Interrupted) => break ExitCode::from(INTERRUPTED),
                Err(ReadlineError::Eof) => break ExitCode::SUCCESS,
                Err(e) => return Err(e.into()),
            }
        };
        if let Some(path) = history {
            let saved = match path.parent() {
                Some(dir) => std::fs::create_dir_all(dir).map_err(ReadlineError::from),
                None => Ok(()),
            };
            if let Err(e) = saved.and_then(|()| editor.save_history(&path)) {
                say(&format!(
                    "nq: {}: the history cannot be written: {e}",
                    path.display()
                ));
            }
        }
        if let Some(path) = self
            .last_chat()
            .filter(|p| self.totals.answers > 0 && p.exists())
        {
            say(&format!(
                "nq: this chat is kept in {} until the next one: /load continues it",
                path.display()
            ));
        }
        Ok(code)
    }

    /// Path of the file with the last chat.
    fn last_chat(&self) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(LAST_CHAT))
    }

    /// Saves the chat, so that nothing is lost however the program ends.
    fn keep(&mut self) {
        let (Some(folder), Some(path)) = (&self.folder, self.last_chat()) else {
            return;
        };
        let made = std::fs::create_dir_all(folder).with_context(|| folder.display().to_string());
        let messages = self.conversation.chat.messages();
        let kept = made.and_then(|()| saved::save(&path, true, &self.model, &messages));
        if let Err(e) = kept {
            say(&format!("nq: the chat is not kept: {e:#}"));
            self.folder = None;
        }
    }

    /// Executes an entry. Answers go to `out`, everything else to `err`.
    pub(crate) fn handle(
        &mut self,
        entry: &str,
        out: &mut dyn Write,
        err: &mut dyn Write,
    ) -> anyhow::Result<Flow> {
        let thinking = self.thinking();
        match self.parse(entry) {
            Entry::Empty => {}
            Entry::Wrong(why) => bail!(why),
            Entry::Message(text, switch) => {
                if switch.is_some() {
                    self.switch_thinking(switch, err)?;
                }
                if text.is_empty() {
                    return Ok(Flow::Continue);
                }
                self.turn(Some(&text), out, err, thinking)?;
                self.keep();
            }
            Entry::Command(Command::Regen) => {
                self.turn(None, out, err, thinking)?;
                self.keep();
            }
            Entry::Command(Command::Exit) => return Ok(Flow::Exit),
            Entry::Command(Command::Help(about)) => {
                writeln!(err, "{}", help(about.as_deref(), width()))?;
            }
            Entry::Command(Command::Clear) => {
                self.conversation.chat.clear();
                note(err, "all messages are forgotten")?;
            }
            Entry::Command(Command::Save { path, force }) => {
                let path = saved::at_home(&path);
                let messages = self.conversation.chat.messages();
                saved::save(&path, force, &self.model, &messages)?;
                note(err, &format!("saved to {}", path.display()))?;
            }
            Entry::Command(Command::Load(path)) => {
                let path = match path {
                    Some(path) => saved::at_home(&path),
                    None => self.last_chat().context("/load needs a file")?,
                };
                let n = self.load(&path)?;
                self.show_messages(err)?;
                note(err, &format!("{n} messages from {}", path.display()))?;
            }
            Entry::Command(Command::Image(path)) => {
                let path = saved::at_home(&path);
                self.attach(&path)?;
                note(
                    err,
                    &format!("{} goes with the next message", path.display()),
                )?;
            }
            Entry::Command(Command::System(None)) => match self.conversation.chat.system() {
                Some(text) => writeln!(err, "{text}")?,
                None => note(err, "there is no system prompt")?,
            },
            Entry::Command(Command::System(_)) if self.conversation.is_raw() => {
                bail!("--raw has no system prompt: write it where the model expects it")
            }
            Entry::Command(Command::System(text)) => {
                self.conversation.chat.set_system(text);
                note(err, "the system prompt is set")?;
            }
            Entry::Command(Command::Think(on, budget)) => {
                self.conversation.chat.settings.thinking_budget = budget;
                self.switch_thinking(Some(on), err)?;
            }
            Entry::Command(Command::Set(None)) => self.show_settings(err)?,
            Entry::Command(Command::Set(Some((name, value)))) => {
                self.set(&name, &value)?;
                self.show_settings(err)?;
            }
            Entry::Command(Command::Stats) => self.show_stats(err)?,
        }
        Ok(Flow::Continue)
    }

    /// Has the image in a file go with the next message.
    ///
    /// # Errors
    /// A file that cannot be read, is no image or exceeds the limits; `--raw`.
    pub(crate) fn attach(&mut self, path: &Path) -> anyhow::Result<()> {
        if self.conversation.is_raw() {
            bail!("--raw reads no images");
        }
        let limits = Limits::default();
        let file = File::open(path).and_then(|file| read_bounded(file, limits.bytes as u64));
        let bytes = file.with_context(|| path.display().to_string())?;
        nq_pictures::header(&bytes, &limits).with_context(|| path.display().to_string())?;
        self.conversation.chat.attach(bytes);
        Ok(())
    }

    /// Interprets an entry: for a model without a template, everything but commands is text.
    fn parse(&self, entry: &str) -> Entry {
        match parse(entry) {
            Entry::Message(..) if self.conversation.is_raw() => {
                Entry::Message(entry.to_owned(), None)
            }
            parsed => parsed,
        }
    }

    /// Generates one answer, to a new message or again to the last one.
    fn turn(
        &mut self,
        text: Option<&str>,
        out: &mut dyn Write,
        err: &mut dyn Write,
        thinking: Thinking,
    ) -> anyhow::Result<Turn> {
        let answering = Answering::begin();
        let mut notes = Notes::new();
        let turn = {
            let raw = self.shown == Thinking::Aside; // stdout is no terminal
            let width = width().filter(|_| !raw);
            let mut printer = Printer::new(out, err, thinking, raw, width);
            let mut on_event = |event: ChatEvent<'_>| -> anyhow::Result<()> {
                match event {
                    ChatEvent::Piece(part, text) => printer.piece(part, text)?,
                    ChatEvent::Note(note) => {
                        printer.before_note()?;
                        self::note(&mut notes, &note)?;
                    }
                }
                Ok(())
            };
            let turn = match text {
                Some(text) => self.conversation.ask(text, answering.flag(), &mut on_event),
                None => self
                    .conversation
                    .regenerate(answering.flag(), &mut on_event),
            };
            printer.finish()?;
            turn.map_err(|e| match e.downcast_ref() {
                // These errors name a place in a model, but not the model.
                Some(RuntimeError::NotFinite { .. } | RuntimeError::LogitsNotFinite) => {
                    e.context(self.model.clone())
                }
                _ => e,
            })?
        };
        drop(answering);
        self.totals.add(&turn.stats, turn.end);
        match self.figures {
            Figures::Quiet => {}
            Figures::Brief => {
                let (used, capacity) = self.conversation.context();
                let line = report::brief(&turn.stats, turn.end, used, capacity);
                note(err, &line)?;
            }
            Figures::All => {
                let line = self.all_figures(&turn.stats, turn.end);
                note(err, &line)?;
            }
        }
        Ok(turn)
    }

    /// All figures of an answer.
    fn all_figures(&mut self, stats: &Stats, end: End) -> String {
        let bandwidth = self.bandwidth();
        report::line(
            stats,
            end,
            self.engine.map(Engine::bytes_per_token),
            bandwidth,
        )
    }

    fn bandwidth(&mut self) -> Option<f64> {
        let measured = self.totals.bandwidth;
        self.totals.bandwidth = measured.or_else(|| self.engine?.memory_bandwidth());
        self.totals.bandwidth
    }

    /// Shows the messages as they would stand in the terminal.
    fn show_messages(&self, err: &mut dyn Write) -> io::Result<()> {
        for message in self.conversation.chat.messages() {
            let text = message.text();
            match message.role.as_str() {
                "user" => {
                    let images = message
                        .content
                        .as_array()
                        .map_or(0, |parts| parts.len() - 1);
                    let images = "[image] ".repeat(images);
                    writeln!(err, ">>> {images}{text}")?;
                }
                "assistant" => {
                    // As a template does, which strips the thinking.
                    let answer = text.rsplit("</think>").next().unwrap_or(text).trim();
                    let lines = answer.lines().map(|line| filled(line, width(), 0));
                    writeln!(err, "{}", lines.collect::<Vec<_>>().join("\n"))?;
                }
                role => writeln!(err, "{role}: {text}")?,
            }
        }
        Ok(())
    }

    fn thinking(&self) -> Thinking {
        if self.hide_thinking {
            Thinking::Hidden
        } else {
            self.shown
        }
    }

    fn json(&mut self, turn: &Turn) -> serde_json::Value {
        let s = &turn.stats;
        let per_token = self.engine.map(Engine::bytes_per_token);
        let bytes = per_token.and_then(|b| s.bytes_per_second(b));
        let share = match (bytes, self.bandwidth()) {
            (Some(b), Some(limit)) => Some(b / limit),
            _ => None,
        };
        serde_json::json!({
            "model": self.model,
            "answer": turn.answer,
            "thinking": turn.thinking,
            "stop": turn.end.name(),
            "prompt_tokens": s.prompt_tokens,
            "reused_tokens": s.reused_tokens,
            "tokens": s.tokens,
            "drafted": s.drafted,
            "accepted": s.accepted,
            "accepted_per_step": s.accepted_per_step(),
            "first_token_s": s.first_token.as_secs_f64(),
            "tok_s": s.tokens_per_second(),
            "gb_s": bytes.map(|b| b / 1e9),
            "bandwidth_share": share,
            "seed": self.conversation.chat.settings.sampling.seed,
        })
    }

    fn switch_thinking(&mut self, to: Option<bool>, err: &mut dyn Write) -> io::Result<()> {
        if let Some(why) = self.conversation.refuses("thinking") {
            return note(err, why);
        }
        self.conversation.chat.settings.thinking = to;
        let state = match (to, self.conversation.chat.settings.thinking_budget) {
            (Some(true), Some(tokens)) => &format!("on, of at most {tokens} tokens"),
            (Some(true), None) => "on",
            (Some(false), _) => "off",
            (None, _) => "as the template has it",
        };
        note(err, &format!("thinking is {state}"))
    }

    fn load(&mut self, path: &Path) -> anyhow::Result<usize> {
        let messages = saved::load(path)?;
        let count = messages.len();
        self.conversation.chat.replace(messages);
        Ok(count)
    }

    fn set(&mut self, name: &str, value: &str) -> anyhow::Result<()> {
        fn read<T: std::str::FromStr>(name: &str, value: &str) -> anyhow::Result<T> {
            let parsed = value.parse().ok();
            parsed.with_context(|| format!("{name}: {value:?} is not a valid value"))
        }
        let on_off = || match value {
            "on" | "true" => Ok(true),
            "off" | "false" => Ok(false),
            _ => bail!("{name}: expected on or off, found {value:?}"),
        };
        if let Some(why) = self.conversation.refuses(name) {
            bail!("{name}: {why}");
        }
        let mut settings = self.conversation.chat.settings.clone();
        match name {
            "max_tokens" if value == "none" => settings.max_tokens = None,
            "max_tokens" => settings.max_tokens = Some(read(name, value)?),
            "thinking" if value == "auto" => settings.thinking = None,
            "thinking" => settings.thinking = Some(on_off()?),
            "thinking_budget" if value == "none" => settings.thinking_budget = None,
            "thinking_budget" => {
                let tokens: std::num::NonZeroUsize = read(name, value)?;
                settings.thinking_budget = Some(tokens.get());
            }
            "hide_thinking" => self.hide_thinking = on_off()?,
            "on_overflow" => {
                settings.overflow = match value {
                    "stop" => Overflow::Stop,
                    "drop-oldest" => Overflow::DropOldest,
                    _ => bail!("{name}: expected stop or drop-oldest, found {value:?}"),
                }
            }
            _ => match settings.sampling.read(name, value) {
                Some(true) => {}
                Some(false) => bail!("{name}: {value:?} is not a valid value"),
                None => bail!("no setting {name}: /set lists them"),
            },
        }
        settings.sampling.validate()?;
        self.conversation.chat.settings = settings;
        Ok(())
    }

    fn show_settings(&self, err: &mut dyn Write) -> io::Result<()> {
        let s = &self.conversation.chat.settings;
        let sampling = s
            .sampling
            .texts()
            .map(|(name, text)| format!("{name} {text}"));
        let sampling: Vec<String> = sampling.collect();
        let (first, second) = sampling.split_at(4);
        let number = |n: Option<usize>| n.map_or("none".to_owned(), |n| n.to_string());
        let (max_tokens, budget) = (number(s.max_tokens), number(s.thinking_budget));
        let on_off = |on: bool| if on { "on" } else { "off" };
        writeln!(
            err,
            "{}\n{}  seed {}\n\
             max_tokens {max_tokens}  thinking {}  thinking_budget {budget}  hide_thinking {}{}",
            first.join("  "),
            second.join("  "),
            s.sampling.seed,
            s.thinking.map_or("auto", on_off),
            on_off(self.hide_thinking),
            match (self.conversation.refuses("on_overflow"), s.overflow) {
                (Some(_), _) => "",
                (None, Overflow::Stop) => "  on_overflow stop",
                (None, Overflow::DropOldest) => "  on_overflow drop-oldest",
            },
        )
    }

    fn show_stats(&mut self, err: &mut dyn Write) -> io::Result<()> {
        if let Some((stats, end)) = self.totals.last {
            let line = self.all_figures(&stats, end);
            writeln!(
                err,
                "{}",
                filled(&format!("last answer: {line}"), width(), 2)
            )?;
        }
        let t = &self.totals;
        let (used, capacity) = self.conversation.context();
        let runs = match self.engine {
            Some(engine) => engine.description().to_string(),
            None => "behind a server".into(),
        };
        writeln!(
            err,
            "{} answers, {} tokens in {:.1} s; prompts {} tokens, {} of them cached\n\
             context {used} of {capacity} tokens, {} messages\n\
             {}: {runs}",
            t.answers,
            t.tokens,
            t.time.as_secs_f64(),
            t.prompt_tokens,
            t.reused_tokens,
            self.conversation.chat.messages().len(),
            self.model,
        )
    }
}
