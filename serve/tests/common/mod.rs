//! A server with the demo model on a free port of this machine, and a client that can misbehave.

#![allow(unreachable_pub, reason = "a module of tests")]

pub mod sees;

use bytes::Bytes;
use nq_formats::task::{MODULES, POOLING};
use nq_formats::{Checkpoint, Files, VirtualFiles};
use nq_runtime::{DeviceChoice, KvType, LoadOptions, SessionSpec};
use nq_serve::protocol::reading::Rules;
use nq_serve::{EngineOptions, HttpLimits, Models, Security, ServedModel, Server, Stopper};
use nq_testkit::sessions::session_spec;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

// The routes of the four protocols.
pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";
pub const RESPONSES: &str = "/v1/responses";
pub const MESSAGES: &str = "/v1/messages";

/// `a` with the fields of `b`.
pub fn with(mut a: Value, b: &Value) -> Value {
    for (key, value) in b.as_object().unwrap() {
        a[key] = value.clone();
    }
    a
}

/// A short request in a protocol.
pub fn base(path: &str) -> Value {
    let hello = json!([{"role": "user", "content": "Hello!"}]);
    match path {
        RESPONSES => json!({"input": "Hello!", "max_output_tokens": 4, "temperature": 0}),
        COMPLETIONS => json!({"prompt": "Once", "max_tokens": 4, "temperature": 0}),
        _ => json!({"messages": hello, "max_tokens": 4, "temperature": 0}),
    }
}

/// A message of the user.
pub fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// The demo model's folder.
pub fn demo() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/demo"))
}

fn checkpoint() -> &'static Checkpoint {
    static OPENED: OnceLock<Checkpoint> = OnceLock::new();
    OPENED.get_or_init(|| Checkpoint::open(demo()).unwrap())
}

/// The demo model's weights, loaded anew.
pub fn load() -> Arc<dyn nq_runtime::Engine> {
    let options = LoadOptions {
        device: DeviceChoice::Cpu,
        threads: Some(2),
        ..LoadOptions::default()
    };
    nq_load::load(checkpoint().config(), checkpoint().store(), &options, &()).unwrap()
}

/// The demo model for `options.parallel` requests at once.
pub fn model(pages: Option<usize>, options: EngineOptions) -> Arc<ServedModel> {
    static LOADED: OnceLock<Arc<dyn nq_runtime::Engine>> = OnceLock::new();
    let engine = Arc::clone(LOADED.get_or_init(load));
    Arc::new(named("demo", engine, pages, options))
}

/// Like [`model`], with a name and weights of its own.
pub fn named(
    name: &str,
    engine: Arc<dyn nq_runtime::Engine>,
    pages: Option<usize>,
    options: EngineOptions,
) -> ServedModel {
    let spec = SessionSpec {
        pages,
        ..session_spec(2 * options.parallel, 1024, KvType::F16, 256)
    };
    ServedModel::new(name, checkpoint(), engine, spec, options).unwrap()
}

/// The demo model's files, some of them others.
#[derive(Debug)]
struct Changed(BTreeMap<&'static str, Bytes>);

impl VirtualFiles for Changed {
    fn root(&self) -> PathBuf {
        demo().into()
    }

    fn names(&self) -> Vec<String> {
        let mut names = Files::Folder(demo().into()).names().unwrap();
        names.extend(self.0.keys().map(|n| (*n).to_owned()));
        names
    }

    fn get(&self, name: &str) -> nq_formats::Result<Option<Bytes>> {
        match self.0.get(name) {
            Some(bytes) => Ok(Some(bytes.clone())),
            None => Files::Folder(demo().into()).get(name),
        }
    }
}

fn changed(files: impl IntoIterator<Item = (&'static str, String)>) -> Checkpoint {
    let files = files.into_iter().map(|(name, text)| (name, text.into()));
    Checkpoint::open_files(Files::Virtual(Arc::new(Changed(files.collect())))).unwrap()
}

fn demo_tokenizer() -> String {
    std::fs::read_to_string(demo().join("tokenizer.json")).unwrap()
}

/// The demo model as an embedding model: its tokenizer adds an end token.
pub fn as_embedder() -> Checkpoint {
    let mut tokenizer: Value = serde_json::from_str(&demo_tokenizer()).unwrap();
    let added = tokenizer["added_tokens"].as_array().unwrap();
    let end = "<|endoftext|>";
    let id = added.iter().find(|t| t["content"] == end).unwrap()["id"].clone();
    tokenizer["post_processor"] = json!({"type": "Sequence", "processors": [
        tokenizer["post_processor"],
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end, "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {end: {"id": end, "ids": [id], "tokens": [end]}},
        },
    ]});
    let modules = json!([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]);
    let pooling = json!({"word_embedding_dimension": 512, "pooling_mode_mean_tokens": false,
        "pooling_mode_lasttoken": true, "include_prompt": true});
    changed([
        (MODULES, modules.to_string()),
        (POOLING, pooling.to_string()),
        ("tokenizer.json", tokenizer.to_string()),
    ])
}

/// The demo model with a tokenizer in the form of Llama 3's, which puts a begin token in front of a text.
pub fn beginning() -> Arc<ServedModel> {
    let mut tokenizer: Value = serde_json::from_str(&demo_tokenizer()).unwrap();
    let begin = tokenizer["added_tokens"][0].clone();
    let (name, id) = (begin["content"].as_str().unwrap(), &begin["id"]);
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]}},
    });
    let checkpoint = changed([("tokenizer.json", tokenizer.to_string())]);
    Arc::new(serving("demo", &checkpoint, EngineOptions::default()))
}

/// The demo model as a reranker: a token that it never uses is called `yes`.
pub fn as_reranker() -> Checkpoint {
    let tokenizer = demo_tokenizer().replace("\"<|video_pad|>\"", "\"yes\"");
    let modules = json!([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_LogitScore",
         "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"},
    ]);
    changed([
        (MODULES, modules.to_string()),
        ("tokenizer.json", tokenizer),
    ])
}

/// The demo model with another template.
pub fn templated(template: &str) -> Arc<ServedModel> {
    let checkpoint = changed([("chat_template.jinja", template.to_owned())]);
    Arc::new(serving("demo", &checkpoint, EngineOptions::default()))
}

/// [`as_embedder`], served.
pub fn embedder(options: EngineOptions) -> Arc<ServedModel> {
    Arc::new(serving("embedder", &as_embedder(), options))
}

/// [`as_reranker`], served.
pub fn reranker(options: EngineOptions) -> Arc<ServedModel> {
    Arc::new(serving("reranker", &as_reranker(), options))
}

fn serving(name: &str, checkpoint: &Checkpoint, options: EngineOptions) -> ServedModel {
    let spec = session_spec(2 * options.parallel, 1024, KvType::F16, 256);
    ServedModel::new(name, checkpoint, load(), spec, options).unwrap()
}

/// A server that runs until it is dropped.
pub struct Running {
    pub address: SocketAddr,
    pub model: Arc<ServedModel>,
    pub stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub fn start() -> Self {
        Running::with(
            EngineOptions::default(),
            Security::default(),
            HttpLimits::default(),
        )
    }

    pub fn with(options: EngineOptions, security: Security, limits: HttpLimits) -> Self {
        Running::over(model(None, options), security, limits)
    }

    pub fn over(model: Arc<ServedModel>, security: Security, limits: HttpLimits) -> Self {
        let models = vec![Arc::clone(&model)];
        Running::all(models.into(), model, security, limits)
    }

    /// Serves all models; [`Running::until`] looks at `model`.
    pub fn all(
        models: Models,
        model: Arc<ServedModel>,
        security: Security,
        limits: HttpLimits,
    ) -> Self {
        Running::set(models, model, security, limits, |server| server)
    }

    /// The demo model under these rules.
    pub fn ruled(rules: Rules) -> Self {
        Running::ruled_over(model(None, EngineOptions::default()), rules)
    }

    /// A model under these rules.
    pub fn ruled_over(model: Arc<ServedModel>, rules: Rules) -> Self {
        let models = vec![Arc::clone(&model)];
        let (security, limits) = (Security::default(), HttpLimits::default());
        Running::set(models.into(), model, security, limits, |server| {
            server.reading(rules, Box::new(|_| {}))
        })
    }

    fn set(
        models: Models,
        model: Arc<ServedModel>,
        security: Security,
        limits: HttpLimits,
        set: impl FnOnce(Server) -> Server,
    ) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = set(Server::bind(address, models, security, limits).unwrap());
        Running {
            address: server.address().unwrap(),
            model,
            stopper: server.stopper(),
            thread: Some(std::thread::spawn(move || server.run().unwrap())),
        }
    }

    /// Waits for the server to end.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        stream
    }

    /// Sends a request exactly as given and reads the response to its end.
    pub fn raw(&self, request: &str) -> Response {
        self.bytes(request.as_bytes())
    }

    /// Like [`Running::raw`], for a request that is not text.
    pub fn bytes(&self, request: &[u8]) -> Response {
        let mut stream = self.connect();
        stream.write_all(request).unwrap();
        Response::read(stream)
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Response {
        self.raw(&self.request(method, path, headers, body))
    }

    /// The text of a request; `headers` replace the usual ones.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> String {
        let has = |name| headers.iter().any(|h| h.0 == name);
        let mut text = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        if !has("host") {
            text += &format!("host: {}\r\n", self.address);
        }
        if !body.is_empty() {
            text += &format!("content-length: {}\r\n", body.len());
            if !has("content-type") {
                text += "content-type: application/json\r\n";
            }
        }
        for (name, value) in headers {
            text += &format!("{name}: {value}\r\n");
        }
        text + "\r\n" + body
    }

    pub fn get(&self, path: &str) -> Response {
        self.send("GET", path, &[], "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.send("POST", path, &[], &body.to_string())
    }

    /// The JSON answer of a request that must succeed.
    pub fn json(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body);
        assert_eq!(response.status, 200, "{}", response.body);
        response.json()
    }

    /// The data of a stream's events, with [DONE] as a string.
    pub fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let response = self.post(path, body);
        assert_eq!(response.status, 200, "{}", response.body);
        assert_eq!(response.header("content-type"), "text/event-stream");
        let datas = response
            .body
            .lines()
            .filter_map(|l| l.strip_prefix("data: "));
        let value = |data: &str| serde_json::from_str(data).unwrap_or_else(|_| data.into());
        datas.map(value).collect()
    }

    /// Waits for a line of the metrics.
    pub fn until(&self, line: &str) {
        for _ in 0..2000 {
            if self
                .model
                .engine()
                .metrics()
                .text()
                .lines()
                .any(|l| l == line)
            {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!(
            "{line} never came:\n{}",
            self.model.engine().metrics().text()
        );
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stopper.stop(Duration::ZERO);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

/// A response, read whole.
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Response {
    pub fn read(stream: TcpStream) -> Self {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).and_then(|s| s.parse().ok());
        let mut headers = Vec::new();
        loop {
            line.clear();
            reader.read_line(&mut line).unwrap();
            match line.trim_end().split_once(": ") {
                Some((name, value)) => headers.push((name.to_lowercase(), value.to_owned())),
                None => break,
            }
        }
        let mut response = Response {
            status: status.unwrap_or(0),
            headers,
            body: String::new(),
        };
        let mut bytes = Vec::new();
        if response.header("transfer-encoding") == "chunked" {
            loop {
                line.clear();
                if reader.read_line(&mut line).unwrap_or(0) == 0 {
                    break;
                }
                let size = usize::from_str_radix(line.trim_end(), 16).unwrap();
                let mut chunk = vec![0; size + 2];
                if reader.read_exact(&mut chunk).is_err() || size == 0 {
                    break;
                }
                bytes.extend_from_slice(&chunk[..size]);
            }
        } else {
            let _ = reader.read_to_end(&mut bytes);
        }
        response.body = String::from_utf8(bytes).unwrap();
        response
    }

    pub fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|h| h.0 == name);
        found.map_or("", |h| h.1.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The param, code and message of an error in OpenAI's format.
    pub fn error(&self) -> (String, String, String) {
        let json = self.json();
        let error = &json["error"];
        let word = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        assert!(
            !word("message").is_empty() && !word("type").is_empty(),
            "{}",
            self.body
        );
        (word("param"), word("code"), word("message"))
    }
}
