//! A loaded model.

use crate::error::{Error, to_python};
use crate::stream::Stream;
use crate::watch::{Reporter, watched};
use nq_llm::{
    Bits, Chat, DEFAULT_TASK, Embedder, EvalSpec, LoadOptions, Message, Protocol, Purpose, Reranker,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

/// Tokens of a window of an evaluation, at most, if no one says how many: those of the protocols.
const WINDOWS: [(&str, Protocol, usize); 2] =
    [("hf", Protocol::Hf, 2048), ("llama", Protocol::Llama, 512)];

/// A loaded model, and what of its memory the next call may use again.
#[pyclass(frozen, name = "Model", module = "nq._nq")]
pub(crate) struct PyModel {
    model: nq_llm::Model,
    ctx: Option<usize>,
    /// The chat of the last answer, whose cache holds what was said. An answer takes it, and another that comes
    /// meanwhile makes one of its own.
    chat: Arc<Mutex<Option<Chat>>>,
    embedder: Mutex<Option<Embedder>>,
    reranker: Mutex<Option<Reranker>>,
    /// The process that loaded it: threads are not there in a fork of it.
    process: u32,
}

/// How a model is loaded: the arguments of `nq.Model`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Loading {
    device: String,
    threads: Option<usize>,
    ctx: Option<usize>,
    bits: Option<u32>,
    activations: String,
}

/// How a model is measured: the arguments of `nq.Model.eval`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Measuring {
    text_name: String,
    protocol: String,
    ctx: Option<usize>,
    windows: Option<usize>,
}

/// How an answer is made: the arguments of `nq.Model.chat`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    seed: u64,
    stop: Vec<String>,
    thinking: Option<bool>,
}

impl Settings {
    fn apply(self, chat: &mut Chat, own: nq_llm::SamplingParams) -> PyResult<()> {
        let sampling = nq_llm::SamplingParams {
            temperature: self.temperature.unwrap_or(own.temperature),
            top_k: self.top_k.unwrap_or(own.top_k),
            top_p: self.top_p.unwrap_or(own.top_p),
            min_p: self.min_p.unwrap_or(own.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(own.repetition_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(own.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(own.presence_penalty),
            seed: self.seed,
        };
        sampling
            .validate()
            .map_err(|e| PyValueError::new_err(e.to_string()))?;
        chat.sampling = sampling;
        chat.max_tokens = self.max_tokens.unwrap_or(usize::MAX);
        chat.stop = self.stop;
        chat.thinking = self.thinking;
        Ok(())
    }
}

impl PyModel {
    fn check_process(&self) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(Error::new_err(
            "the model was loaded by another process, whose threads are not here: load it in this one \
             (multiprocessing: use the start method \"spawn\")",
        ))
    }

    /// The chat of the last answer or a new one, ready for the next.
    fn take_chat(&self, py: Python<'_>, settings: Settings) -> PyResult<Chat> {
        self.check_process()?;
        let kept = lock(&self.chat).take();
        let make = || match self.ctx {
            Some(ctx) => self.model.chat_within(ctx),
            None => self.model.chat(),
        };
        let mut chat = match kept {
            Some(chat) => chat,
            None => py.detach(make).map_err(to_python)?,
        };
        settings.apply(&mut chat, self.model.sampling())?;
        chat.interrupt = Arc::default();
        Ok(chat)
    }
}

fn lock<T>(kept: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

fn messages(json: &str) -> PyResult<Vec<Message>> {
    let wrong = |e| PyValueError::new_err(format!("messages: {e}"));
    serde_json::from_str(json).map_err(wrong)
}

#[pymethods]
impl PyModel {
    #[new]
    fn new(
        py: Python<'_>,
        name: PathBuf,
        how: Loading,
        report: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let options = LoadOptions {
            device: how.device.parse().map_err(PyValueError::new_err)?,
            activations: how.activations.parse().map_err(PyValueError::new_err)?,
            threads: how.threads,
            ..LoadOptions::default()
        };
        let bits = how.bits.map(Bits::try_from).transpose();
        let bits = bits.map_err(|e| PyValueError::new_err(e.to_string()))?;
        let interrupt = AtomicBool::new(false);
        let load = |progress: &Reporter<'_>| match bits {
            Some(bits) => nq_llm::Model::open_quantized(name, bits, &options, progress),
            None => nq_llm::Model::open_with(name, &options, progress),
        };
        Ok(PyModel {
            model: watched(py, &interrupt, report, load)?,
            ctx: how.ctx,
            chat: Arc::default(),
            embedder: Mutex::default(),
            reranker: Mutex::default(),
            process: std::process::id(),
        })
    }

    #[getter]
    fn name(&self) -> &str {
        self.model.name()
    }

    #[getter]
    fn device(&self) -> &str {
        self.model.device()
    }

    fn chat(
        &self,
        py: Python<'_>,
        messages_json: &str,
        settings: Settings,
        report: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        let messages = messages(messages_json)?;
        let mut chat = self.take_chat(py, settings)?;
        let interrupt = Arc::clone(&chat.interrupt);
        watched(py, &interrupt, report, |_| {
            let answer = chat.answer(&messages, |_| {});
            *lock(&self.chat) = Some(chat);
            Ok(answer?.text)
        })
    }

    fn stream(&self, py: Python<'_>, messages_json: &str, settings: Settings) -> PyResult<Stream> {
        let messages = messages(messages_json)?;
        let chat = self.take_chat(py, settings)?;
        let kept = Arc::clone(&self.chat);
        Stream::new(chat, messages, move |chat| *lock(&kept) = Some(chat))
    }

    fn embed(
        &self,
        py: Python<'_>,
        texts: Vec<String>,
        query: bool,
        instruction: Option<String>,
        dimensions: Option<usize>,
        report: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<Vec<f32>>> {
        self.check_process()?;
        let purpose = match instruction {
            Some(task) => Purpose::Instructed(task),
            None if query => Purpose::Query,
            None => Purpose::Document,
        };
        let interrupt = Arc::new(AtomicBool::new(false));
        watched(py, &interrupt, report, |_| {
            let mut kept = lock(&self.embedder);
            let mut embedder = match kept.take() {
                Some(embedder) => embedder,
                None => self.model.embedder()?,
            };
            embedder.interrupt = Arc::clone(&interrupt);
            embedder.dimensions = dimensions;
            let vectors = embedder.embed(&texts, &purpose);
            *kept = Some(embedder);
            vectors
        })
    }

    fn rerank(
        &self,
        py: Python<'_>,
        query: &str,
        documents: Vec<String>,
        instruction: Option<&str>,
        report: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<f32>> {
        self.check_process()?;
        let instruction = instruction.unwrap_or(DEFAULT_TASK);
        let interrupt = Arc::new(AtomicBool::new(false));
        watched(py, &interrupt, report, |_| {
            let mut kept = lock(&self.reranker);
            let mut reranker = match kept.take() {
                Some(reranker) => reranker,
                None => self.model.reranker()?,
            };
            reranker.interrupt = Arc::clone(&interrupt);
            let scores = reranker.score(instruction, query, &documents);
            *kept = Some(reranker);
            scores
        })
    }

    /// The report of an evaluation as JSON.
    fn eval(
        &self,
        py: Python<'_>,
        text: &str,
        how: Measuring,
        reference: Option<&PyModel>,
        report: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        self.check_process()?;
        let Some(&(_, protocol, usual)) = WINDOWS.iter().find(|w| w.0 == how.protocol) else {
            let why = format!("protocol: expected hf or llama, found {}", how.protocol);
            return Err(PyValueError::new_err(why));
        };
        let of_reference = reference.map_or(usize::MAX, |r| r.model.positions());
        let most = self.model.positions().min(of_reference);
        let spec = EvalSpec {
            max_windows: how.windows,
            ..EvalSpec::new(protocol, how.ctx.unwrap_or(usual.min(most)), how.text_name)
        };
        let reference = reference.map(|r| &r.model);
        let interrupt = AtomicBool::new(false);
        let measured = watched(py, &interrupt, report, |progress| {
            self.model.measure(reference, text, &spec, progress)
        })?;
        serde_json::to_string(&measured).map_err(|e| PyValueError::new_err(e.to_string()))
    }
}
