//! Templates in a process of their own, so that a hostile template harms no other process.
//!
//! The process runs this program, started so that it calls [`serve`]. It reads a line of JSON
//! with the templates, then one for each rendering, and answers each with a line. It lives as
//! long as the [`ChatTemplate`](super::ChatTemplate), or until a template kills it; the next
//! rendering starts a new one.

use super::integers;
use super::jinja::Templates;
use super::memory::{MAX_MEMORY, MEMORY, STACK, allowed, limit_note};
use crate::error::Error;
use nq_formats::human_bytes;
use rlimit::Resource;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Most time that an answer may take.
const MAX_TIME: Duration = Duration::from_secs(10);

/// How often to check for an interrupt while waiting for an answer.
const TICK: Duration = Duration::from_millis(10);

/// How this program renders templates in a process of its own.
#[derive(Debug)]
pub struct Isolation {
    /// A command that starts this program so that it calls [`serve`].
    pub command: fn() -> io::Result<Command>,
    /// True once nobody waits for the current rendering.
    pub interrupted: fn() -> bool,
}

static ISOLATION: OnceLock<Isolation> = OnceLock::new();

/// From now on, compiles and renders all templates of this process in processes of their own.
/// This is decided once per program: the first call counts.
pub fn isolate(isolation: Isolation) {
    let _ = ISOLATION.set(isolation);
}

pub(super) fn isolation() -> Option<&'static Isolation> {
    ISOLATION.get()
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    Interrupted,
    Template(String),
}

impl Failure {
    /// Converts it to an error about the template at `path`.
    pub(super) fn at(self, path: &Path) -> Error {
        match self {
            Failure::Interrupted => Error::Interrupted,
            Failure::Template(why) => super::text_error(path, why),
        }
    }
}

/// A rendering request, as it is written.
#[derive(Serialize)]
struct RenderRequest<'a, C> {
    tools: bool,
    context: &'a C,
}

/// A rendering request, as it is read.
#[derive(Deserialize)]
struct Received {
    tools: bool,
    context: Value,
}

/// The process, seen from this side.
pub(super) struct Worker {
    isolation: &'static Isolation,
    /// The first line it is sent: the templates.
    templates: Vec<u8>,
    process: Mutex<Option<Process>>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

impl Worker {
    /// Starts the process and compiles `templates` in it.
    pub(super) fn start(
        isolation: &'static Isolation,
        templates: &[(String, String)],
    ) -> Result<Self, Failure> {
        let mut worker = Worker {
            isolation,
            templates: line(&templates)?,
            process: Mutex::new(None),
        };
        worker.process = Mutex::new(Some(worker.process()?));
        Ok(worker)
    }

    /// Renders in the process; see [`Templates::render`].
    pub(super) fn render(&self, tools: bool, context: &impl Serialize) -> Result<String, Failure> {
        let request = line(&RenderRequest { tools, context })?;
        let mut slot = self.process.lock().unwrap_or_else(|e| e.into_inner());
        let mut process = match slot.take() {
            Some(process) => process,
            None => self.process()?,
        };
        let answer = process.ask(&request, self.isolation)?;
        *slot = Some(process); // a process that gave no answer is killed instead
        answer.map_err(Failure::Template)
    }

    fn process(&self) -> Result<Process, Failure> {
        let started = Process::start(self.isolation)
            .map_err(|e| Failure::Template(format!("a process to render in cannot start: {e}")));
        let mut process = started?;
        let compiled = process.ask(&self.templates, self.isolation)?;
        compiled.map_err(Failure::Template)?;
        Ok(process)
    }
}

/// A value as a line of JSON.
fn line(value: &impl Serialize) -> Result<Vec<u8>, Failure> {
    let json = serde_json::to_vec(value);
    let mut json = json.map_err(|e| Failure::Template(e.to_string()))?;
    json.push(b'\n');
    Ok(json)
}

/// The running process; killed when dropped.
struct Process {
    child: Child,
    requests: ChildStdin,
    answers: Receiver<String>,
}

impl Process {
    fn start(isolation: &Isolation) -> io::Result<Self> {
        let mut child = (isolation.command)()?
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // An interrupt from the terminal reaches only the main program, which may end this process.
            .process_group(0)
            .spawn()?;
        let closed = || io::Error::from(io::ErrorKind::BrokenPipe);
        let requests = child.stdin.take().ok_or_else(closed)?;
        let output = child.stdout.take().ok_or_else(closed)?;
        let (send, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Process {
            child,
            requests,
            answers,
        })
    }

    /// The process's answer, which may be an error of the template. Fails if there is none.
    fn ask(
        &mut self,
        request: &[u8],
        isolation: &Isolation,
    ) -> Result<Result<String, String>, Failure> {
        // If the process has stopped reading, its exit status explains why below.
        let _ = self.requests.write_all(request);
        let deadline = Instant::now() + MAX_TIME;
        loop {
            match self.answers.recv_timeout(TICK) {
                Ok(answer) => {
                    return serde_json::from_str(&answer)
                        .map_err(|e| Failure::Template(format!("its process answered {e}")));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.end()),
                Err(RecvTimeoutError::Timeout) if (isolation.interrupted)() => {
                    return Err(Failure::Interrupted);
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() > deadline => {
                    return Err(Failure::Template(format!(
                        "rendering took more than {} s",
                        MAX_TIME.as_secs()
                    )));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Determines why the process ended.
    fn end(&mut self) -> Failure {
        let mut said = String::new();
        if let Some(stderr) = self.child.stderr.take() {
            let _ = stderr.take(4096).read_to_string(&mut said);
        }
        let allowed = allowed();
        let why = match self.child.wait() {
            _ if said.contains("overflowed its stack") => format!(
                "a value or an expression nests too deeply for a stack of {}",
                human_bytes(STACK as u64)
            ),
            _ if said.contains("memory allocation of") => {
                format!(
                    "rendering takes more than {} of memory",
                    human_bytes(MAX_MEMORY.min(allowed))
                )
            }
            Ok(status) => match status.signal() {
                Some(signal) => format!("its process was ended by signal {signal}"),
                None => format!("its process ended early ({status})"),
            },
            Err(e) => format!("its process was lost: {e}"),
        };
        Failure::Template(why + &limit_note())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls fail only for a process that has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The worker's side: reads requests from `input` until its end and answers on `output`.
/// Returns at the end of `input` even while a template runs, so that the process can end.
///
/// # Errors
/// If the process cannot limit its own memory, or reading fails.
pub fn serve(input: impl BufRead, mut output: impl Write + Send + 'static) -> io::Result<()> {
    Resource::CORE.set(0, 0)?;
    if cfg!(target_os = "linux") {
        let most = MEMORY.min(allowed());
        Resource::AS.set(most, most)?;
    }
    // A panic becomes an answer with its message.
    std::panic::set_hook(Box::new(|_| {}));
    let (send, requests) = channel::<String>();
    std::thread::spawn(move || -> io::Result<()> {
        let mut templates: Option<Templates> = None;
        for request in requests {
            let answer = answer(&mut templates, &request);
            serde_json::to_writer(&mut output, &answer)?;
            output.write_all(b"\n")?;
            output.flush()?;
        }
        Ok(())
    });
    for line in input.lines() {
        if send.send(line?).is_err() {
            break;
        }
    }
    Ok(())
}

/// The answer to a line. The first line holds the templates; its answer is empty if they compile.
fn answer(templates: &mut Option<Templates>, request: &str) -> Result<String, String> {
    let bad = |e: serde_json::Error| e.to_string();
    match templates {
        None => {
            let sources: Vec<(String, String)> = serde_json::from_str(request).map_err(bad)?;
            *templates = Some(Templates::compile(&sources)?);
            Ok(String::new())
        }
        Some(templates) => {
            let request = integers::marked(request.as_bytes());
            let request: Received = serde_json::from_slice(&request).map_err(bad)?;
            templates.render(request.tools, &request.context)
        }
    }
}
