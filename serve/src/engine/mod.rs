//! Serves one model to many requests at once: a thread that owns a session and continuously runs a
//! batch over it.
//!
//! [`Engine::submit`] sends requests to the thread and returns [`Answers`], a stream of their
//! tokens. Requests join and leave between two steps; dropping the [`Answers`] removes them at
//! any stage: in the queue, during the prompt or during the answer.

mod drafts;
mod job;
mod keep;
mod saved;
mod seats;
mod slots;
mod step;
mod worker;

pub use drafts::OpenDrafts;

use crate::disk::ModelPages;
use crate::metrics::Metrics;
use nq_answers::{Constraint, ThinkingBudget};
use nq_runtime::{
    AppliedAdapter, LogitBias, PlacedImage, Row, SamplingParams, Session, SessionSpec,
    TokenLogprobs,
};
use sha2::{Digest, Sha256};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Options of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Most requests in progress at once. The session's other slots keep sequences that ended.
    pub parallel: usize,
    /// Most requests in the queue; more are refused.
    pub queue: usize,
    /// Longest time that a request may wait in the queue.
    pub queue_time: Duration,
    /// Longest time that decoding requests wait for a prompt to be computed whole; one that takes longer
    /// is cut into pieces that take less than two of their steps.
    pub prompt_time: Duration,
    /// Longest time that decoding requests are to wait for prompts in a step, as far as past steps tell, whether prompts
    /// are computed whole or in pieces of at least [`EngineOptions::least_rows`]; `None`: as
    /// [`EngineOptions::prompt_time`] and their own steps say.
    pub max_pause: Option<Duration>,
    /// Longest step of prompts while nothing decodes.
    pub prompt_time_alone: Duration,
    /// Least rows of prompts in a step, if prompts have that many.
    pub least_rows: usize,
    /// False: keeps nothing for later prompts.
    pub prefix_cache: bool,
    /// Pages on disk, which survive the engine; `None`: nothing is kept on disk.
    pub disk: Option<ModelPages>,
    /// The drafter, used if the session can check drafts.
    pub drafts: Option<OpenDrafts>,
    /// For each adapter of the session, a number that stands for its contents. What was computed with one is of no use
    /// to requests with another.
    pub adapters: Vec<u64>,
}

impl EngineOptions {
    /// Those for a GPU, which computes more rows of a prompt in the time of a few, or for a CPU.
    pub fn of_device(on_gpu: bool) -> Self {
        EngineOptions {
            least_rows: if on_gpu { 64 } else { 16 },
            ..EngineOptions::default()
        }
    }
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            parallel: 16,
            queue: 256,
            queue_time: Duration::from_secs(600),
            prompt_time: Duration::from_millis(20),
            max_pause: None,
            prompt_time_alone: Duration::from_millis(400),
            least_rows: 16,
            prefix_cache: true,
            disk: None,
            drafts: None,
            adapters: Vec::new(),
        }
    }
}

/// The sender of a request. Clients take turns; prompts of the same salt share their common prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Client {
    /// Identifies the client.
    pub id: u64,
    /// Prompts may be reused only for prompts with the same salt.
    pub salt: u64,
}

/// A prompt to continue.
pub struct Request {
    /// Token ids, at least one and fewer than the context.
    pub prompt: Vec<u32>,
    /// The images that take the places of tokens in it, in order.
    pub images: Vec<PlacedImage>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Selects one of the seed's independent streams of random numbers.
    pub stream: u64,
    /// Added to the logits.
    pub bias: LogitBias,
    /// Alternatives to report with log-probabilities; `None`: none are computed.
    pub logprobs: Option<usize>,
    /// Most tokens to draw; the context may allow fewer.
    pub max_tokens: usize,
    /// Tokens that end the answer; they are not part of it.
    pub stop: Vec<u32>,
    /// The row to compute from the prompt, which is then not continued; `None`: tokens are drawn.
    pub row: Option<Row>,
    /// The constraint on the answer.
    pub constraint: Option<Box<dyn Constraint>>,
    /// The most that is thought; `None`: no limit.
    pub thinking: Option<ThinkingBudget>,
    /// What is added to the model's products.
    pub adapters: Vec<AppliedAdapter>,
    /// The sender.
    pub client: Client,
    /// When the request ends with [`Failure::Timeout`], finished or not.
    pub deadline: Option<Instant>,
}

impl Request {
    /// A request for greedy decoding, with no other options.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Request {
            prompt,
            images: Vec::new(),
            sampling: SamplingParams::greedy(),
            stream: 0,
            bias: LogitBias::default(),
            logprobs: None,
            max_tokens,
            stop: Vec::new(),
            row: None,
            constraint: None,
            thinking: None,
            adapters: Vec::new(),
            client: Client::default(),
            deadline: None,
        }
    }
}

/// An event of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Its prompt is being computed; this many of its tokens were cached.
    Started {
        /// Prompt tokens that need not be computed again.
        cached: usize,
    },
    /// A token.
    Token {
        /// Its id.
        id: u32,
        /// Its log-probability and alternatives, if they were asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// The row computed from the prompt ([`Request::row`]).
    Row(Vec<f32>),
    /// The end: nothing comes after it.
    Finished(Finish),
}

/// How an answer ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Finish {
    /// With this token of [`Request::stop`].
    Stop(u32),
    /// With the most tokens requested, or that the context holds.
    Length,
    /// The prompt was to be read, and has been.
    Read,
    /// It was given up by who asked for it.
    Cancelled,
    /// It failed.
    Failed(Failure),
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// Its deadline passed.
    Timeout,
    /// It waited longer in the queue than [`EngineOptions::queue_time`].
    QueueTimeout,
    /// The engine ended.
    Closing,
    /// Its constraint failed.
    Constraint(String),
    /// The model or the device failed.
    Model(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Timeout => f.write_str("the request took longer than allowed"),
            Failure::QueueTimeout => f.write_str("the request waited too long in the queue"),
            Failure::Closing => f.write_str("the server is shutting down"),
            Failure::Constraint(why) => write!(f, "the response format: {why}"),
            Failure::Model(why) => f.write_str(why),
        }
    }
}

/// Why requests were refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refused {
    /// The queue is full.
    #[error("the queue is full: {waiting} of {room} requests are waiting")]
    QueueFull {
        /// Number of waiting requests.
        waiting: usize,
        /// Most requests that may wait.
        room: usize,
        /// Suggested time until the next attempt.
        retry_after: Duration,
    },
    /// The engine accepts no more requests.
    #[error("the server is shutting down")]
    Closing,
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {prompt} tokens, and the context holds {ctx}, at least one of them for the \
         answer"
    )]
    ContextFull {
        /// Tokens in the prompt.
        prompt: usize,
        /// Positions of a sequence.
        ctx: usize,
    },
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
}

/// A message to the thread.
enum EngineCommand {
    Submit(Box<job::Job>),
    Close(Instant),
}

/// State that the thread and handles share.
struct EngineShared {
    waiting: AtomicUsize,
    closing: AtomicBool,
    failed: AtomicBool,
    /// Estimated milliseconds that a request beginning now will take.
    turnover: AtomicUsize,
    metrics: Metrics,
}

/// A handle to the thread; when it is dropped, the thread ends once its requests have.
pub struct Engine {
    commands: Mutex<mpsc::Sender<EngineCommand>>,
    shared: Arc<EngineShared>,
    spec: SessionSpec,
    vocab: usize,
    options: EngineOptions,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Opens the session of an engine: once, and again after a panic in it.
pub(crate) type OpenSession = Box<dyn FnMut() -> nq_runtime::Result<Box<dyn Session>> + Send>;

impl Engine {
    /// Starts the thread over the session that `open` returns, for a model with `vocab` tokens. Slots
    /// beyond [`EngineOptions::parallel`] keep sequences for later prompts.
    ///
    /// # Errors
    /// Errors of `open`; a session with fewer slots than requests in progress, or too few rows per step.
    pub fn start(
        mut open: OpenSession,
        vocab: usize,
        options: EngineOptions,
    ) -> nq_runtime::Result<Self> {
        let mut session = open()?;
        let drafter = options.drafts.as_ref();
        let drafts = drafter.map(|d| d.open(session.as_mut())).transpose()?;
        let spec = session.spec();
        for (what, least, found) in [
            ("requests at once", 1, options.parallel),
            ("slots of a session", options.parallel, spec.slots),
            ("rows of a step", options.parallel + 1, spec.max_rows),
        ] {
            if found < least {
                return Err(nq_runtime::Error::Request {
                    what,
                    expected: format!("at least {least}"),
                    found: found.to_string(),
                });
            }
        }
        let stored = session.pages().and_then(|pages| pages.state_bytes());
        if options.disk.is_some() && stored.is_none() {
            return Err(nq_runtime::Error::Request {
                what: "pages on disk",
                expected: "an engine that reads and writes all that a sequence is made of".into(),
                found: "another, as is a GPU's where a model has recurrences".into(),
            });
        }
        let (commands, received) = mpsc::channel();
        let shared = Arc::new(EngineShared {
            waiting: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            turnover: AtomicUsize::new(0),
            metrics: Metrics::default(),
        });
        let (of_thread, its_options) = (Arc::clone(&shared), options.clone());
        let thread = std::thread::Builder::new()
            .name("nq-engine".into())
            .spawn(move || worker::run(session, drafts, open, &received, &of_thread, its_options))
            .map_err(|e| nq_runtime::Error::Device {
                device: "engine thread".into(),
                why: e.to_string(),
            })?;
        Ok(Engine {
            commands: Mutex::new(commands),
            shared,
            spec,
            vocab,
            options,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The sizes of the session.
    pub fn spec(&self) -> SessionSpec {
        self.spec
    }

    /// The engine's options.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Counters and timings.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// False once requests are no longer accepted, or the device has stopped responding.
    pub fn is_healthy(&self) -> bool {
        !self.shared.closing.load(Ordering::Relaxed) && !self.shared.failed.load(Ordering::Relaxed)
    }

    /// Accepts requests, all or none of them: several answers to one prompt come in one stream.
    ///
    /// # Errors
    /// [`Refused`], before anything is computed.
    pub fn submit(&self, requests: Vec<Request>) -> Result<Answers, Refused> {
        let refused = self.admit(&requests);
        if let Err(refused) = refused {
            self.metrics().refuse(match refused {
                Refused::QueueFull { .. } => "queue_full",
                Refused::Closing => "closing",
                Refused::ContextFull { .. } => "context_full",
                Refused::Invalid(_) => "invalid",
            });
            return Err(refused);
        }
        let (sender, events) = unbounded_channel();
        let mut cancels = Vec::with_capacity(requests.len());
        let open = requests.len();
        for (index, mut request) in requests.into_iter().enumerate() {
            request.client.salt = self.salt(&request);
            let cancelled = Arc::new(AtomicBool::new(false));
            cancels.push(Arc::clone(&cancelled));
            let job = job::Job::new(request, index, sender.clone(), cancelled);
            let job = job.map_err(|e| {
                self.shared
                    .waiting
                    .fetch_sub(open - index, Ordering::Relaxed);
                Refused::Invalid(e.to_string())
            })?;
            self.send(EngineCommand::Submit(Box::new(job)))
                .map_err(|()| {
                    self.shared
                        .waiting
                        .fetch_sub(open - index, Ordering::Relaxed);
                    Refused::Closing
                })?;
        }
        Ok(Answers {
            events,
            cancels,
            open,
        })
    }

    /// The salt of the prompt of an admitted request, with what its adapters make of it.
    fn salt(&self, request: &Request) -> u64 {
        let salt = request.client.salt;
        if request.adapters.is_empty() {
            return salt;
        }
        let mut hash = Sha256::new().chain_update(salt.to_le_bytes());
        for applied in &request.adapters {
            hash.update(self.options.adapters[applied.adapter].to_le_bytes());
            hash.update(applied.scale.to_le_bytes());
        }
        let bytes = hash.finalize();
        bytes[..8]
            .iter()
            .fold(0, |salt, &byte| salt << 8 | u64::from(byte))
    }

    fn send(&self, command: EngineCommand) -> Result<(), ()> {
        let commands = self.commands.lock().map_err(|_| ())?;
        commands.send(command).map_err(|_| ())
    }

    /// Checks requests and reserves places in the queue for all of them.
    fn admit(&self, requests: &[Request]) -> Result<(), Refused> {
        if !self.is_healthy() {
            return Err(Refused::Closing);
        }
        for request in requests {
            let (prompt, ctx) = (request.prompt.len(), self.spec.ctx);
            if prompt >= ctx {
                return Err(Refused::ContextFull { prompt, ctx });
            }
            let past = |t: &&u32| **t as usize >= self.vocab;
            if let Some(token) = request.prompt.iter().find(past) {
                return Err(Refused::Invalid(format!(
                    "prompt: expected token ids below {}, found {token}",
                    self.vocab
                )));
            }
            let adapters = self.options.adapters.len();
            if let Some(other) = request.adapters.iter().find(|a| a.adapter >= adapters) {
                return Err(Refused::Invalid(format!(
                    "expected adapters below {adapters}, found {}",
                    other.adapter
                )));
            }
            if prompt == 0 || request.max_tokens == 0 {
                let what = "expected a prompt and an answer of at least one token each";
                return Err(Refused::Invalid(what.into()));
            }
        }
        let room = self.options.queue;
        let take = |waiting: usize| {
            let more = waiting + requests.len();
            (more <= room).then_some(more)
        };
        let waiting = &self.shared.waiting;
        match waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => Ok(()),
            Err(waiting) => {
                let turnover = self.shared.turnover.load(Ordering::Relaxed) as u64;
                Err(Refused::QueueFull {
                    waiting,
                    room,
                    retry_after: Duration::from_millis(turnover).max(Duration::from_secs(1)),
                })
            }
        }
    }

    /// Accepts no more requests. Those in progress may continue for `grace`, and then end with
    /// [`Failure::Closing`]. Returns once the thread has ended.
    pub fn close(&self, grace: Duration) {
        self.shared.closing.store(true, Ordering::Relaxed);
        let _ = self.send(EngineCommand::Close(Instant::now() + grace));
        let thread = self.thread.lock().ok().and_then(|mut t| t.take());
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// The tokens of requests as they come. Dropping it cancels the requests.
#[derive(Debug)]
pub struct Answers {
    events: UnboundedReceiver<(usize, Event)>,
    cancels: Vec<Arc<AtomicBool>>,
    /// Number of requests that have not ended.
    open: usize,
}

impl Answers {
    /// The next event, with the index of its request; `None` once all have ended.
    pub async fn next(&mut self) -> Option<(usize, Event)> {
        if self.open == 0 {
            return None;
        }
        let next = self.events.recv().await;
        self.count(next)
    }

    /// Like [`Answers::next`], for a thread that may block.
    pub fn next_blocking(&mut self) -> Option<(usize, Event)> {
        if self.open == 0 {
            return None;
        }
        let next = self.events.blocking_recv();
        self.count(next)
    }

    fn count(&mut self, next: Option<(usize, Event)>) -> Option<(usize, Event)> {
        // If the thread is gone, all requests end.
        let next = next.unwrap_or((0, Event::Finished(Finish::Failed(Failure::Closing))));
        if let Event::Finished(_) = next.1 {
            self.open -= 1;
        }
        Some(next)
    }

    /// Cancels one of the requests; the others continue.
    pub fn cancel(&self, index: usize) {
        if let Some(cancel) = self.cancels.get(index) {
            cancel.store(true, Ordering::Relaxed);
        }
    }
}
