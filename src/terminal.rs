//! Output to the terminal: progress bars, notes and the handling of closed pipes.
//!
//! A terminal executes escape codes in its input: they move its cursor, set its title and fill its
//! clipboard. Names, errors and answers may come from other people's files, so everything that nq prints
//! goes through this module, which escapes control characters as `\u001b`. Output to a stdout that
//! is not a terminal is data: an answer is written exactly as the model gave it, and reports with
//! control characters escaped, which in JSON means the same.

use indicatif::{ProgressBar, ProgressState, ProgressStyle};
pub use nq_formats::human_bytes;
use nq_formats::{Progress, Unit};
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use unicode_width::UnicodeWidthStr;

/// Exit code after an interrupt.
pub(crate) const INTERRUPTED: u8 = 130;

/// Exits as an interrupt does, without leaving temporary files.
pub(crate) fn leave_interrupted() -> ! {
    nq_formats::durable::remove_temporaries();
    std::process::exit(INTERRUPTED.into());
}

/// What a signal does instead, once there is work that it concerns.
static ON_SIGNAL: Mutex<Option<Box<dyn Fn() + Send>>> = Mutex::new(None);

/// From now on, SIGINT, SIGTERM and SIGHUP end the program that way, or do what [`on_signals`] was given.
///
/// # Errors
/// If the system refuses a handler.
pub(crate) fn leave_on_signals() -> anyhow::Result<()> {
    ctrlc::set_handler(
        || match &*ON_SIGNAL.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(action) => action(),
            None => leave_interrupted(),
        },
    )?;
    Ok(())
}

/// Lets signals do this from now on.
pub(crate) fn on_signals(action: impl Fn() + Send + 'static) {
    *ON_SIGNAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(action));
}

/// Seconds between two lines about a stage where no bar can be drawn.
const SILENCE: f64 = 30.0;

/// Draws stages on stderr, or prints a line about them now and then if that is no terminal; each note is
/// printed once.
#[derive(Default)]
pub(crate) struct Terminal {
    stage: Mutex<Option<RunningStage>>,
    plan: Mutex<StagePlan>,
    said: Mutex<HashSet<String>>,
}

/// A stage under way.
struct RunningStage {
    bar: ProgressBar,
    name: String,
    begun: Instant,
    /// Units that were there from an earlier run.
    kept: u64,
    /// When the last line was printed.
    said: Instant,
}

impl RunningStage {
    fn work(&self) -> Progressed {
        let total = self.bar.length().unwrap_or(0);
        let (new, all) = (
            self.bar.position().saturating_sub(self.kept),
            total.saturating_sub(self.kept),
        );
        Progressed {
            done: (new as f64 / all.max(1) as f64).min(1.0),
            seconds: self.begun.elapsed().as_secs_f64(),
        }
    }
}

/// How far a stage is, without what was there from an earlier run.
#[derive(Clone, Copy)]
struct Progressed {
    /// The share that is done.
    done: f64,
    /// Seconds that it took.
    seconds: f64,
}

/// The stages of a run, and how long they take.
#[derive(Default)]
struct StagePlan {
    stages: Vec<Planned>,
    /// The stage under way.
    at: Option<usize>,
    /// The first of those that have not begun.
    next: usize,
}

struct Planned {
    name: String,
    /// Estimated seconds of what is not there yet.
    estimate: f64,
    /// Seconds that it took, all its occurrences together; 0 before it ended.
    took: f64,
}

/// The share of a stage from which on its pace tells more than the estimate: its first steps tell little.
const TELLING: f64 = 0.02;

/// The share of a plan's time that counts as gone by as estimated, where a run's pace so far tells that of other stages: they do
/// work of other kinds, whose pace differs in its own way.
const EXPECTED: f64 = 0.25;

impl StagePlan {
    /// A stage that occurs several times is the next of its name. If none is to come, a limit on the quality made the run
    /// begin again.
    fn begin(&mut self, stage: &str) {
        let named = |from: usize| (from..self.stages.len()).find(|&i| self.stages[i].name == stage);
        self.at = named(self.next).or_else(|| named(0));
        self.next = self.at.map_or(self.next, |at| at + 1);
    }

    fn end(&mut self, work: Progressed) {
        if let Some(at) = self.at.take() {
            self.stages[at].took = work.seconds;
        }
    }

    /// Seconds left of all stages; `None` where nothing is known. What took longer than estimated lets the rest take
    /// longer too.
    fn left(&self, work: Progressed) -> Option<f64> {
        let at = self.at?;
        let now = self.stages[at].estimate;
        let tells = work.done > TELLING;
        let here = tells.then_some((work.done * now, work.seconds));
        let before = self.stages[..at].iter().filter(|s| s.took > 0.0);
        let (estimated, took) = before
            .map(|s| (s.estimate, s.took))
            .chain(here)
            .fold((0.0, 0.0), |sum, stage| (sum.0 + stage.0, sum.1 + stage.1));
        let rest: f64 = self.stages[at + 1..].iter().map(|s| s.estimate).sum();
        if now <= 0.0 {
            return None;
        }
        let all: f64 = self.stages.iter().map(|s| s.estimate).sum();
        let slower = (took + EXPECTED * all) / (estimated + EXPECTED * all);
        let of_this = match tells {
            true => work.seconds * (1.0 - work.done) / work.done,
            false => slower * now * (1.0 - work.done),
        };
        Some(of_this + slower * rest)
    }

    /// `step 2 of 5`, if the stage under way is one of several.
    fn step(&self) -> Option<String> {
        let at = self.at?;
        Some(format!("step {} of {}", at + 1, self.stages.len()))
    }
}

/// A time for people, as nobody knows it exactly: `about 6 minutes`.
pub fn about(seconds: f64) -> String {
    let (n, unit) = match seconds {
        s if s < 90.0 => ((s / 5.0).round().max(1.0) * 5.0, "second"),
        s if s < 90.0 * 60.0 => ((s / 60.0).round(), "minute"),
        s => ((s / 3600.0).round(), "hour"),
    };
    let plural = if n == 1.0 { "" } else { "s" };
    format!("about {n:.0} {unit}{plural}")
}

/// A line about the time of stages, if it can be estimated.
pub(crate) fn time_plan(stages: &[(&str, f64)]) -> Option<String> {
    let total: f64 = stages.iter().map(|s| s.1).sum();
    // Less than a tenth is not worth a mention.
    let long = stages.iter().filter(|s| s.1 >= 0.1 * total);
    let long: Vec<String> = long
        .map(|(name, seconds)| format!("{name} {:.0} %", 100.0 * seconds / total))
        .collect();
    let long = long.join(", ");
    (total > 0.0).then(|| format!("time: {} ({long})", about(total)))
}

impl Terminal {
    /// A new terminal.
    pub fn new() -> Self {
        Self::default()
    }

    fn stage(&self) -> MutexGuard<'_, Option<RunningStage>> {
        self.stage.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn planned(&self) -> MutexGuard<'_, StagePlan> {
        self.plan.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Progress for Terminal {
    fn plan(&self, stages: &[(&str, f64)]) {
        if let Some(line) = time_plan(stages) {
            self.note(&line);
        }
        let planned = stages.iter().map(|&(name, estimate)| Planned {
            name: name.into(),
            estimate,
            took: 0.0,
        });
        *self.planned() = StagePlan {
            stages: planned.collect(),
            ..StagePlan::default()
        };
    }

    fn begin(&self, stage: &str, total: u64, unit: Unit) {
        let counts = match unit {
            Unit::Bytes => "{decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec}",
            Unit::Tokens => "{human_pos}/{human_len} tokens",
            Unit::Items => "{human_pos}/{human_len}",
            Unit::Layers(_) => "{layers} layers",
        };
        let mut plan = self.planned();
        plan.begin(stage);
        let (message, end) = match plan.step() {
            Some(step) => (format!("{step}: {stage}"), "{prefix}"),
            None => (stage.to_owned(), "{elapsed} (ETA {eta})"),
        };
        let template = format!("{{msg:28}} {{wide_bar}} {counts}  {end}");
        let style = ProgressStyle::with_template(&template)
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let parts = match unit {
            Unit::Layers(parts) => parts.max(1),
            _ => 1,
        };
        let style = style.with_key(
            "layers",
            move |bar: &ProgressState, out: &mut dyn fmt::Write| {
                let all = bar.len().unwrap_or(0) / parts;
                // What cannot be written has no reader.
                let _ = write!(out, "{}/{all}", bar.pos() / parts);
            },
        );
        let bar = ProgressBar::new(total)
            .with_style(style)
            .with_message(printable(&message).into_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        let now = Instant::now();
        *self.stage() = Some(RunningStage {
            bar,
            name: message,
            begun: now,
            kept: 0,
            said: now,
        });
    }

    fn advance(&self, n: u64) {
        let mut stage = self.stage();
        let Some(stage) = &mut *stage else {
            return;
        };
        stage.bar.inc(n);
        let work = stage.work();
        let left = self.planned().left(work);
        if let Some(left) = left {
            stage.bar.set_prefix(format!("{} left", about(left)));
        }
        if stage.bar.is_hidden() && stage.said.elapsed().as_secs_f64() >= SILENCE {
            stage.said = Instant::now();
            let left = match left {
                Some(left) => format!("{} left", about(left)),
                None => format!("{} gone", about(work.seconds)),
            };
            say(&format!(
                "nq: {}: {:.0} %, {left}",
                stage.name,
                100.0 * stage.bar.position() as f64 / stage.bar.length().unwrap_or(0).max(1) as f64
            ));
        }
    }

    fn kept(&self, n: u64) {
        if let Some(stage) = &mut *self.stage() {
            stage.bar.inc(n);
            stage.kept += n;
            stage.begun = Instant::now();
        }
    }

    fn end(&self) {
        if let Some(stage) = self.stage().take() {
            self.planned().end(stage.work());
            stage.bar.finish_and_clear();
        }
    }

    fn note(&self, message: &str) {
        if !self
            .said
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .insert(message.to_owned())
        {
            return;
        }
        let print = || say(&format!("nq: {message}"));
        match &*self.stage() {
            Some(stage) => stage.bar.suspend(print),
            None => print(),
        }
    }
}

/// True if `error` means that the reader of our output is gone.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|e| e.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Prints text and a line break on stdout. Unlike with `println!`, a reader that is gone is an error
/// to return, not a panic.
pub(crate) fn print_line(text: &str) -> io::Result<()> {
    let print = || -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "{}", printable(text))?;
        out.flush()
    };
    print().map_err(|e| match e.kind() {
        io::ErrorKind::BrokenPipe => e, // as `is_broken_pipe` looks for it
        kind => io::Error::new(kind, format!("standard output: {e}")),
    })
}

/// Prints text and a line break on stderr, with the middle of long lines left out. Unlike with
/// `eprintln!`, a reader that is gone causes no panic: it must not cost the work that a note is about.
pub(crate) fn say(text: &str) {
    let text = printable(text);
    let _ = writeln!(io::stderr().lock(), "{}", few_lines(&text));
}

/// Most lines of a note on stderr, and how many of its last ones are shown if it has more.
const MOST_LINES: usize = 100;
const LAST_LINES: usize = 10;

/// `text` with its long lines shortened, and without those in the middle if it has too many; says how many.
fn few_lines(text: &str) -> String {
    let count = text.split('\n').count();
    let left_out = match count > MOST_LINES {
        true => MOST_LINES - LAST_LINES..count - LAST_LINES,
        false => count..count,
    };
    let mut out = String::new();
    for (i, line) in text.split('\n').enumerate() {
        if left_out.contains(&i) {
            if i == left_out.start {
                out += &format!("\n[{} lines]", left_out.len());
            }
            continue;
        }
        if i > 0 {
            out.push('\n');
        }
        out += &shortened(line, LONGEST);
    }
    out
}

/// Most characters of a line on stderr. A line that quotes a file could have any length.
const LONGEST: usize = 1000;

/// `text` without its middle if it has more than `most` characters; says how much was left out.
pub(crate) fn shortened(text: &str, most: usize) -> Cow<'_, str> {
    let count = text.chars().count();
    if count <= most {
        return text.into();
    }
    let at = |n| text.char_indices().nth(n).map_or(text.len(), |(i, _)| i);
    // An error begins with its subject and ends with what was expected and found.
    let (head, tail) = (most * 3 / 5, most * 3 / 10);
    let left_out = count - head - tail;
    let (head, tail) = (&text[..at(head)], &text[at(count - tail)..]);
    format!("{head}[{left_out} characters]{tail}").into()
}

/// `text` with control characters, except line feed and tab, escaped as `\u001b`.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let harms = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(harms) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if harms(c) {
            out.push_str(&format!("\\u{:04x}", u32::from(c)))
        } else {
            out.push(c)
        }
    }
    out.into()
}

/// Columns of the terminal on stdout; `None` if stdout is not a terminal or its width is unknown.
pub(crate) fn width() -> Option<usize> {
    let dumb = std::env::var_os("TERM").is_some_and(|v| v == "dumb");
    let (width, _) = terminal_size::terminal_size_of(io::stdout()).filter(|_| !dumb)?;
    Some(usize::from(width.0))
}

/// True if text on this stream may have colours: a terminal that has them, of a user who wants them.
pub(crate) fn has_colours(stream: &impl IsTerminal) -> bool {
    let off = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
        || std::env::var_os("TERM").is_some_and(|v| v == "dumb");
    stream.is_terminal() && !off
}

/// `text` with lines broken between words at `width` columns, if there is a width; all but its first line begin
/// with `indent` spaces.
pub(crate) fn filled(text: &str, width: Option<usize>, indent: usize) -> String {
    let Some(width) = width.filter(|w| *w > 2 * indent) else {
        return text.into();
    };
    let (mut out, mut column) = (String::new(), 0);
    for (i, word) in text.split(' ').enumerate() {
        let wide = word.width();
        if i > 0 && column + 1 + wide > width {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            column = indent;
        } else if i > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += wide;
    }
    out
}

/// The stream for notes: stderr with control characters escaped, and notes of nq in grey where colours are.
pub(crate) struct Notes {
    colours: bool,
}

impl Notes {
    /// Over this process's stderr.
    pub fn new() -> Self {
        let colours = has_colours(&io::stderr());
        Notes { colours }
    }
}

impl Write for Notes {
    /// Each write must be whole characters.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let text = printable(&text);
        let mut out = io::stderr().lock();
        match text.strip_suffix('\n') {
            Some(line) if self.colours && line.starts_with("nq: ") => {
                writeln!(out, "\x1b[90m{line}\x1b[0m")?;
            }
            _ => out.write_all(text.as_bytes())?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// `text` as a word for a shell: quoted if necessary.
pub(crate) fn shell_word(text: &str) -> Cow<'_, str> {
    let plain = |c: char| c.is_alphanumeric() || "._-/+=:,@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.into()
    } else {
        format!("'{}'", text.replace('\'', r"'\''")).into()
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Planned, Progress, Progressed, StagePlan, Terminal, Unit, about, filled, printable,
        shell_word, shortened,
    };

    #[test]
    fn control_characters_are_written_out() {
        for (text, expected) in [
            ("plain\ttext\nof é and 日本", "plain\ttext\nof é and 日本"),
            ("\x1b]52;c;aGk=\x07", r"\u001b]52;c;aGk=\u0007"),
            ("a\rb\x08\x7f", r"a\u000db\u0008\u007f"),
            // The single-character forms of escape sequences.
            ("\u{9b}31m\u{90}", r"\u009b31m\u0090"),
        ] {
            assert_eq!(printable(text), expected);
        }
        // Escaped JSON has the same value.
        let json = serde_json::to_string("\u{9b}\u{7f}").unwrap();
        let read: String = serde_json::from_str(&printable(&json)).unwrap();
        assert_eq!(read, "\u{9b}\u{7f}");
    }

    /// What is done of a stage in a run that began it.
    fn done(done: f64, seconds: f64) -> Progressed {
        Progressed { done, seconds }
    }

    fn plan_of(estimates: [(&str, f64); 3]) -> StagePlan {
        let stage = |(name, estimate): (&str, f64)| Planned {
            name: name.into(),
            estimate,
            took: 0.0,
        };
        StagePlan {
            stages: estimates.map(stage).into(),
            ..StagePlan::default()
        }
    }

    #[test]
    fn what_is_left_follows_from_what_was_done() {
        let mut plan = plan_of([("a", 100.0), ("b", 200.0), ("c", 50.0)]);
        assert_eq!((plan.left(done(0.5, 1.0)), plan.step()), (None, None));
        plan.begin("a");
        assert_eq!(plan.step().as_deref(), Some("step 1 of 3"));
        assert_eq!(plan.left(done(0.5, 50.0)), Some(300.0));
        // Half as fast as estimated, which says more of this stage than of the others.
        let slower = (100.0 + 87.5) / (50.0 + 87.5);
        assert_eq!(plan.left(done(0.5, 100.0)), Some(100.0 + slower * 250.0));
        plan.end(done(1.0, 200.0));
        plan.begin("loading weights");
        assert_eq!(plan.left(done(0.5, 1.0)), None);
        plan.end(done(1.0, 1.0));
        plan.begin("c");
        assert_eq!(plan.left(done(0.25, 25.0)), Some(75.0));
        // Of stages without an estimate nothing is known.
        let mut plan = plan_of([("a", 0.0), ("b", 0.0), ("c", 0.0)]);
        plan.begin("a");
        assert_eq!(plan.left(done(0.5, 50.0)), None);
    }

    #[test]
    fn times_are_rounded_as_people_say_them() {
        for (seconds, words) in [
            (1.0, "about 5 seconds"),
            (61.0, "about 60 seconds"),
            (360.0, "about 6 minutes"),
            (7200.0, "about 2 hours"),
        ] {
            assert_eq!(about(seconds), words);
        }
    }

    /// Estimates are of what is left; what was there counts neither as done nor as time.
    #[test]
    fn what_an_earlier_run_left_takes_no_time() {
        let terminal = Terminal::new();
        terminal.plan(&[("layers", 300.0), ("c", 50.0)]);
        terminal.begin("layers", 40, Unit::Items);
        terminal.kept(10);
        let work = || terminal.stage().as_ref().map(|s| s.work().done);
        assert_eq!(work(), Some(0.0));
        terminal.advance(15);
        assert_eq!(work(), Some(0.5));
        terminal.end();
    }

    /// A model is loaded several times, each time in its own place.
    #[test]
    fn stages_of_one_name_follow_each_other() {
        let mut plan = plan_of([("load", 10.0), ("a", 20.0), ("load", 30.0)]);
        let begun: Vec<Option<String>> = ["load", "a", "load", "a"]
            .map(|name| {
                plan.begin(name);
                let step = plan.step();
                plan.end(done(1.0, 1.0));
                step
            })
            .into();
        let steps = ["1 of 3", "2 of 3", "3 of 3", "2 of 3"];
        assert_eq!(begun, steps.map(|n| Some(format!("step {n}"))));
    }

    #[test]
    fn lines_are_filled_to_the_width() {
        let text = "one two three four";
        assert_eq!(filled(text, None, 2), text);
        assert_eq!(filled(text, Some(9), 2), "one two\n  three\n  four");
        assert_eq!(filled("日本 日本", Some(8), 0), "日本\n日本");
        assert_eq!(filled("a  b", Some(80), 0), "a  b");
    }

    #[test]
    fn many_lines_keep_their_ends() {
        assert_eq!(super::few_lines("a\nb\n"), "a\nb\n");
        let many: Vec<String> = (0..5_000_000).map(|i| i.to_string()).collect();
        let few = super::few_lines(&many.join("\n"));
        assert_eq!(few.lines().count(), 101);
        assert!(
            few.starts_with("0\n1\n") && few.ends_with("\n4999999"),
            "{few}"
        );
        assert!(few.contains("\n[4999900 lines]\n"), "{few}");
    }

    #[test]
    fn long_lines_keep_their_ends() {
        assert_eq!(shortened("abc", 3), "abc");
        let line = format!("file: {}: expected 1, found 2", "é".repeat(5000));
        let short = shortened(&line, 1000);
        assert!(short.starts_with("file: éé") && short.ends_with("é: expected 1, found 2"));
        assert!(short.contains("[4127 characters]"), "{short}");
        assert!(short.chars().count() < 1000);
    }

    #[test]
    fn a_command_to_copy_is_quoted_where_it_must_be() {
        assert_eq!(shell_word("a/Qwen3-0.6B-int4"), "a/Qwen3-0.6B-int4");
        assert_eq!(shell_word("my models/d é"), "'my models/d é'");
        assert_eq!(shell_word("it's"), r"'it'\''s'");
        assert_eq!(shell_word(""), "''");
    }
}
