//! A loaded model.

use crate::error::{Error, to_python};
use crate::question::{PromptArgument, Question, messages, wrong};
use crate::stream::Stream;
use crate::watch::{Reporter, watched};
use nq_llm::{
    AdapterFile, Bits, Chat, DEFAULT_TASK, Embedder, EvalSpec, Format, KvType, LoadOptions,
    OpenOptions, Protocol, Purpose, Reranker, ToolChoice, integers,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

/// Tokens of a window of an evaluation, at most, if no one says how many: those of the protocols.
const WINDOWS: [(&str, Protocol, usize); 2] =
    [("hf", Protocol::Hf, 2048), ("llama", Protocol::Llama, 512)];

/// A loaded model, and what of its memory the next call may use again.
#[pyclass(frozen, name = "Model", module = "nq._nq")]
pub(crate) struct PyModel {
    held: Arc<HeldModel>,
    name: String,
    device: String,
    ctx: Option<usize>,
    embedder: Mutex<Option<Embedder>>,
    reranker: Mutex<Option<Reranker>>,
    /// The process that loaded it: threads are not there in a fork of it.
    process: u32,
}

/// What a model and its streams share.
struct HeldModel {
    /// The model, until it is closed.
    model: Mutex<Option<nq_llm::Model>>,
    /// The chat of the last answer, whose cache holds what was said. An answer takes it, and another that comes
    /// meanwhile makes one of its own.
    chat: Mutex<Option<Chat>>,
}

impl HeldModel {
    /// Keeps a chat for the next answer, unless the model was closed meanwhile.
    fn keep(&self, chat: Chat) {
        if lock(&self.model).is_some() {
            *lock(&self.chat) = Some(chat);
        }
    }
}

/// How a model is loaded: the arguments of `nq.Model`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Loading {
    device: String,
    threads: Option<usize>,
    ctx: Option<usize>,
    bits: Option<u32>,
    kv: u32,
    activations: String,
    cpu_experts: Option<usize>,
    draft: Option<String>,
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
    thinking_budget: Option<usize>,
    tools: Option<String>,
    tool_choice: String,
    schema: Option<String>,
    regex: Option<String>,
    grammar: Option<String>,
    logprobs: Option<usize>,
}

impl Settings {
    fn apply(self, chat: &mut Chat, own: nq_llm::SamplingParams) -> PyResult<()> {
        let choices = nq_llm::SamplingChoices {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
        };
        let sampling = choices.over(nq_llm::SamplingParams {
            seed: self.seed,
            ..own
        });
        sampling
            .validate()
            .map_err(|e| PyValueError::new_err(e.to_string()))?;
        let formats = [
            self.schema.as_deref().map(schema).transpose()?,
            self.regex.map(Format::Regex),
            self.grammar.map(Format::Lark),
        ];
        let mut formats = formats.into_iter().flatten();
        chat.sampling = sampling;
        chat.max_tokens = self.max_tokens.unwrap_or(usize::MAX);
        chat.stop = self.stop;
        chat.thinking = self.thinking;
        chat.thinking_budget = self.thinking_budget;
        chat.tools = tools(self.tools.as_deref())?;
        chat.tool_choice = match self.tool_choice.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" => ToolChoice::Required,
            name => ToolChoice::Named(name.to_owned()),
        };
        chat.format = formats.next();
        chat.logprobs = self.logprobs;
        match formats.next() {
            None => Ok(()),
            Some(_) => Err(PyValueError::new_err(
                "expected one of schema, regex and grammar, found several",
            )),
        }
    }
}

impl PyModel {
    /// A model that this process has loaded, and the context of its chats.
    fn of(model: nq_llm::Model, ctx: Option<usize>) -> Self {
        PyModel {
            name: model.name().to_owned(),
            device: model.device().to_owned(),
            held: Arc::new(HeldModel {
                model: Mutex::new(Some(model)),
                chat: Mutex::default(),
            }),
            ctx,
            embedder: Mutex::default(),
            reranker: Mutex::default(),
            process: std::process::id(),
        }
    }

    /// The model, in the process that loaded it and until it is closed.
    fn model(&self) -> PyResult<nq_llm::Model> {
        if self.process == std::process::id() {
            let model = lock(&self.held.model).clone();
            return model.ok_or_else(|| PyValueError::new_err("the model is closed"));
        }
        Err(Error::new_err(
            "the model was loaded by another process, whose threads are not here: load it in this one \
             (multiprocessing: use the start method \"spawn\")",
        ))
    }

    /// The chat of the last answer or a new one, ready for the next.
    fn take_chat(&self, py: Python<'_>, settings: Settings) -> PyResult<Chat> {
        let model = self.model()?;
        let kept = lock(&self.held.chat).take();
        let make = || match self.ctx {
            Some(ctx) => model.chat_within(ctx),
            None => model.chat(),
        };
        let mut chat = match kept {
            Some(chat) => chat,
            None => py.detach(make).map_err(to_python)?,
        };
        settings.apply(&mut chat, model.sampling())?;
        chat.interrupt = Arc::default();
        Ok(chat)
    }
}

fn lock<T>(kept: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tools in the format of OpenAI's chat.
fn tools(text: Option<&str>) -> PyResult<Vec<Value>> {
    let tools = text.map(|text| serde_json::from_slice(&integers::marked(text.as_bytes())));
    let tools = tools.transpose();
    Ok(tools.map_err(wrong("tools"))?.unwrap_or_default())
}

fn schema(text: &str) -> PyResult<Format> {
    Ok(match serde_json::from_str(text).map_err(wrong("schema"))? {
        Value::Bool(true) => Format::Object,
        schema => Format::Schema(schema),
    })
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
        let load = LoadOptions {
            device: how.device.parse().map_err(PyValueError::new_err)?,
            activations: how.activations.parse().map_err(PyValueError::new_err)?,
            threads: how.threads,
            cpu_experts: how.cpu_experts,
            ..LoadOptions::default()
        };
        let kv = KvType::of_bits(how.kv);
        let bits = how.bits.map(Bits::try_from).transpose();
        let draft = how.draft.map(|from| from.parse()).transpose();
        let wrong = |why: String| PyValueError::new_err(format!("draft: {why}"));
        let options = OpenOptions {
            load,
            bits: bits.map_err(|e| PyValueError::new_err(e.to_string()))?,
            draft: draft.map_err(wrong)?,
            kv: kv.ok_or_else(|| PyValueError::new_err("kv: expected 8, 16 or 32"))?,
        };
        let interrupt = AtomicBool::new(false);
        let load = |progress: &Reporter<'_>| nq_llm::Model::open_with(name, &options, progress);
        let model = watched(py, &interrupt, report, load)?;
        Ok(PyModel::of(model, how.ctx))
    }

    /// The same model with adapters beside its weights: folders or files, and what multiplies each.
    fn with_adapters(&self, py: Python<'_>, adapters: Vec<(PathBuf, f64)>) -> PyResult<Self> {
        let own = self.model()?;
        let file = |(path, weight)| AdapterFile { path, weight };
        let files: Vec<AdapterFile> = adapters.into_iter().map(file).collect();
        let made = py.detach(|| own.with_adapters(&files)).map_err(to_python)?;
        Ok(PyModel::of(made, self.ctx))
    }

    /// Frees the memory of the model, once what is being computed has ended.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            drop(lock(&self.held.model).take());
            drop(lock(&self.held.chat).take());
            drop(lock(&self.embedder).take());
            drop(lock(&self.reranker).take());
        });
    }

    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn device(&self) -> &str {
        &self.device
    }

    #[getter]
    fn vocab(&self) -> PyResult<usize> {
        Ok(self.model()?.vocab())
    }

    /// The answer as JSON.
    fn chat(
        &self,
        py: Python<'_>,
        request: PromptArgument,
        settings: Settings,
        report: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        let question = Question::read(request)?;
        let mut chat = self.take_chat(py, settings)?;
        let interrupt = Arc::clone(&chat.interrupt);
        watched(py, &interrupt, report, |_| {
            let answer = question.answer(&mut chat, |_| {});
            self.held.keep(chat);
            answer
        })
    }

    fn stream(
        &self,
        py: Python<'_>,
        request: PromptArgument,
        settings: Settings,
    ) -> PyResult<Stream> {
        let question = Question::read(request)?;
        let chat = self.take_chat(py, settings)?;
        let held = Arc::clone(&self.held);
        Stream::new(chat, question, move |chat| held.keep(chat))
    }

    fn encode(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
        let model = self.model()?;
        py.detach(|| model.encode(text)).map_err(to_python)
    }

    fn decode(&self, tokens: Vec<u32>) -> PyResult<String> {
        Ok(self.model()?.decode(&tokens))
    }

    /// The text and the tokens of a chat's prompt.
    fn prompt(
        &self,
        py: Python<'_>,
        messages_json: &str,
        tools_json: Option<&str>,
        thinking: Option<bool>,
    ) -> PyResult<(String, Vec<u32>)> {
        let (model, messages) = (self.model()?, messages(messages_json)?);
        let tools = tools(tools_json)?;
        let prompt = py.detach(|| model.prompt(&messages, &tools, thinking));
        let prompt = prompt.map_err(to_python)?;
        Ok((prompt.text, prompt.tokens))
    }

    /// The logits of each token, as the bytes of float32 numbers.
    fn logits<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
        report: &Bound<'_, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let model = self.model()?;
        let logits = watched(py, &AtomicBool::new(false), report, |_| {
            model.logits(&tokens)
        })?;
        PyBytes::new_with(py, 4 * logits.len(), |bytes| {
            for (to, logit) in bytes.chunks_exact_mut(4).zip(logits) {
                to.copy_from_slice(&logit.to_ne_bytes());
            }
            Ok(())
        })
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
        let model = self.model()?;
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
                None => model.embedder()?,
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
        let model = self.model()?;
        let instruction = instruction.unwrap_or(DEFAULT_TASK);
        let interrupt = Arc::new(AtomicBool::new(false));
        watched(py, &interrupt, report, |_| {
            let mut kept = lock(&self.reranker);
            let mut reranker = match kept.take() {
                Some(reranker) => reranker,
                None => model.reranker()?,
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
        let model = self.model()?;
        let Some(&(_, protocol, usual)) = WINDOWS.iter().find(|w| w.0 == how.protocol) else {
            let why = format!("protocol: expected hf or llama, found {}", how.protocol);
            return Err(PyValueError::new_err(why));
        };
        let reference = reference.map(PyModel::model).transpose()?;
        let of_reference = reference.as_ref().map_or(usize::MAX, |r| r.positions());
        let most = model.positions().min(of_reference);
        let spec = EvalSpec {
            max_windows: how.windows,
            ..EvalSpec::new(protocol, how.ctx.unwrap_or(usual.min(most)), how.text_name)
        };
        let interrupt = AtomicBool::new(false);
        let measured = watched(py, &interrupt, report, |progress| {
            model.measure(reference.as_ref(), text, &spec, progress)
        })?;
        serde_json::to_string(&measured).map_err(|e| PyValueError::new_err(e.to_string()))
    }
}
