//! Downloads from a server that speaks the hub's protocol: the cache's layout, resumed
//! downloads, and an error that says what to do for each way a download can fail.

use crate::common::{self, names, tiny_config};
use nq_formats::hash::sha256_hex;
use nq_formats::hub::{Hub, HubId, HubOptions};
use nq_formats::{Checkpoint, Error, HubProblem, Progress, Task, Unit};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const REPO: &str = "Some/Model-1B";

/// Deviations of the test server from normal behaviour.
#[derive(Clone, Default)]
struct Behaviour {
    /// The token that the server requires.
    token: Option<&'static str>,
    /// Bytes after which each connection for a large file is dropped.
    drop_after: Option<usize>,
    /// Sends the whole file, whatever range is requested.
    no_ranges: bool,
    /// Sends other bytes than announced.
    corrupt: bool,
    /// Answers large files with this status.
    status: Option<u16>,
}

struct Server {
    endpoint: String,
    log: Arc<Mutex<Vec<String>>>,
    behaviour: Arc<Mutex<Behaviour>>,
}

impl Server {
    fn start(files: BTreeMap<&'static str, Vec<u8>>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Server {
            endpoint: format!("http://{}", listener.local_addr().unwrap()),
            log: Arc::default(),
            behaviour: Arc::default(),
        };
        let (log, behaviour) = (server.log.clone(), server.behaviour.clone());
        let files = Arc::new(files);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, behaviour, files) = (log.clone(), behaviour.clone(), files.clone());
                std::thread::spawn(move || {
                    let _ = serve(&stream, &files, &log, &behaviour);
                });
            }
        });
        server
    }

    fn set(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.behaviour.lock().unwrap());
    }

    /// The requests since the last call, as `METHOD PATH RANGE`.
    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

/// Answers one request and closes the connection.
fn serve(
    mut stream: &TcpStream,
    files: &BTreeMap<&'static str, Vec<u8>>,
    log: &Mutex<Vec<String>>,
    behaviour: &Mutex<Behaviour>,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut headers = HashMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else {
            break;
        };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let mut parts = request.split(' ');
    let method = parts.next().unwrap_or_default();
    let path = parts.next().unwrap_or_default();
    let range = headers.get("range").cloned().unwrap_or_default();
    log.lock()
        .unwrap()
        .push(format!("{method} {path} {range}").trim_end().to_owned());
    let behaviour = behaviour.lock().unwrap().clone();
    let mut answer = |status: &str, headers: &str, body: &[u8]| {
        write!(
            stream,
            "HTTP/1.1 {status}\r\nconnection: close\r\n{headers}\r\n"
        )?;
        if method != "HEAD" {
            stream.write_all(body)?;
        }
        stream.flush()
    };
    let authorized = behaviour
        .token
        .is_none_or(|t| headers.get("authorization") == Some(&format!("Bearer {t}")));
    let api = format!("/api/models/{REPO}/revision/main");
    let resolve = format!("/{REPO}/resolve/{COMMIT}/");
    if !authorized {
        return answer("401 Unauthorized", "content-length: 0\r\n", &[]);
    }
    if path == api {
        let siblings: Vec<String> = files
            .keys()
            .map(|n| format!(r#"{{"rfilename":"{n}"}}"#))
            .collect();
        let body = format!(
            r#"{{"sha":"{COMMIT}","siblings":[{}]}}"#,
            siblings.join(",")
        );
        return answer(
            "200 OK",
            &format!("content-length: {}\r\n", body.len()),
            body.as_bytes(),
        );
    }
    // Large files are stored elsewhere, behind a redirect that has their hash.
    if let Some(name) = path.strip_prefix("/cdn/") {
        let data = &files[name];
        if let Some(status) = behaviour.status {
            return answer(&format!("{status} No"), "content-length: 0\r\n", &[]);
        }
        assert!(!headers.contains_key("authorization") || behaviour.token.is_some());
        let from: usize = match range.strip_prefix("bytes=") {
            Some(r) if !behaviour.no_ranges => r.trim_end_matches('-').parse().unwrap(),
            _ => 0,
        };
        let mut body = data[from..].to_vec();
        if behaviour.corrupt {
            body[0] ^= 1;
        }
        let status = if from > 0 {
            "206 Partial Content"
        } else {
            "200 OK"
        };
        let length = format!("content-length: {}\r\n", body.len());
        body.truncate(behaviour.drop_after.unwrap_or(usize::MAX));
        return answer(status, &length, &body);
    }
    let Some(name) = path.strip_prefix(&resolve) else {
        return answer("404 Not Found", "content-length: 0\r\n", &[]);
    };
    let Some(data) = files.get(name) else {
        return answer("404 Not Found", "content-length: 0\r\n", &[]);
    };
    if name.ends_with(".safetensors") || name.ends_with(".gguf") {
        let headers = format!(
            "location: /cdn/{name}\r\nx-repo-commit: {COMMIT}\r\nx-linked-size: {}\r\n\
             x-linked-etag: \"{}\"\r\ncontent-length: 0\r\n",
            data.len(),
            sha256_hex(data)
        );
        return answer("302 Found", &headers, &[]);
    }
    let headers = format!(
        "x-repo-commit: {COMMIT}\r\netag: W/\"{}\"\r\ncontent-length: {}\r\n",
        &sha256_hex(data)[..40],
        data.len()
    );
    answer("200 OK", &headers, data)
}

/// A tiny model in two shards, the second of 300,001 bytes.
fn model() -> BTreeMap<&'static str, Vec<u8>> {
    let shard = |name: &str, bytes: usize| {
        let header = format!(
            r#"{{"{name}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#
        );
        let data: Vec<u8> = (0..bytes).map(|i| (i * 7 % 251) as u8).collect();
        common::safetensors(&header, &data)
    };
    let index = r#"{"weight_map":{
        "model.layers.0.input_layernorm.weight":"model-00001-of-00002.safetensors",
        "model.embed_tokens.weight":"model-00002-of-00002.safetensors"}}"#;
    BTreeMap::from([
        (".gitattributes", b"x".to_vec()),
        ("README.md", b"# A model".to_vec()),
        ("LICENSE", b"Apache".to_vec()),
        ("config.json", tiny_config("").into_bytes()),
        ("tokenizer.json", b"{}".to_vec()),
        ("model.safetensors.index.json", index.into()),
        (
            "model-00001-of-00002.safetensors",
            shard("model.layers.0.input_layernorm.weight", 10),
        ),
        (
            "model-00002-of-00002.safetensors",
            shard("model.embed_tokens.weight", 300_001),
        ),
        ("onnx/model.safetensors", b"other".to_vec()),
        ("consolidated.safetensors", b"unlisted".to_vec()),
    ])
}

fn options(endpoint: &str, cache: &Path) -> HubOptions {
    HubOptions {
        endpoint: endpoint.into(),
        cache: cache.into(),
        token: None,
        offline: false,
        connect_timeout: Duration::from_secs(2),
        read_timeout: Duration::from_secs(5),
        retries: 1,
    }
}

#[derive(Default)]
struct Counter {
    total: AtomicU64,
    done: AtomicU64,
}

impl Progress for Counter {
    fn begin(&self, stage: &str, total: u64, unit: Unit) {
        assert_eq!((stage, unit), ("download Some/Model-1B", Unit::Bytes));
        self.total.fetch_add(total, Ordering::Relaxed);
    }

    fn advance(&self, n: u64) {
        self.done.fetch_add(n, Ordering::Relaxed);
    }
}

#[track_caller]
fn fails(result: Result<PathBuf, Error>, problem: HubProblem, parts: &[&str]) {
    match &result {
        Err(Error::Hub { problem: found, .. }) => assert_eq!(*found, problem),
        other => panic!("expected {problem:?}, found {other:?}"),
    }
    names(result, parts);
}

#[test]
fn a_model_is_fetched_once_into_the_standard_cache() {
    let server = Server::start(model());
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(options(&server.endpoint, cache.path()));
    assert_eq!(hub.cached(REPO).unwrap(), None);
    let counter = Counter::default();
    let folder = hub.fetch_model(REPO, &counter).unwrap();
    let root = cache.path().join("models--Some--Model-1B");
    assert_eq!(folder, root.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    let wanted = [
        "LICENSE",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    let mut bytes = 0;
    for name in wanted {
        assert_eq!(
            fs::read(folder.join(name)).unwrap(),
            model()[name],
            "{name}"
        );
        let link = fs::read_link(folder.join(name)).unwrap();
        assert!(link.starts_with("../../blobs"), "{}", link.display());
        bytes += model()[name].len() as u64;
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), wanted.len());
    assert_eq!(counter.total.load(Ordering::Relaxed), bytes);
    assert_eq!(counter.done.load(Ordering::Relaxed), bytes);
    assert_eq!(
        Checkpoint::open(&folder).unwrap().store().entries().len(),
        2
    );
    // From now on, the network is not used.
    assert!(!server.requests().is_empty());
    assert_eq!(hub.fetch_model(REPO, &()).unwrap(), folder);
    assert_eq!(hub.cached(REPO).unwrap(), Some(folder.clone()));
    assert_eq!(server.requests(), [""; 0]);
    let offline = HubOptions {
        offline: true,
        ..options("http://127.0.0.1:1", cache.path())
    };
    assert_eq!(Hub::new(offline).fetch_model(REPO, &()).unwrap(), folder);
}

/// A shape is told by its file alone; the model is no more there than before.
#[test]
fn a_shape_is_fetched_without_weights() {
    let server = Server::start(model());
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(options(&server.endpoint, cache.path()));
    let config = hub.fetch_config(REPO, &()).unwrap();
    assert_eq!(fs::read(&config).unwrap(), model()["config.json"]);
    let asked = server.requests();
    let of_weights = |r: &String| r.contains("safetensors");
    assert!(
        !asked.is_empty() && !asked.iter().any(of_weights),
        "{asked:?}"
    );
    assert_eq!(hub.fetch_config(REPO, &()).unwrap(), config);
    assert_eq!(server.requests(), [""; 0]);
    assert_eq!(hub.cached(REPO).unwrap(), None);
    let folder = hub.fetch_model(REPO, &()).unwrap();
    assert_eq!(config, folder.join("config.json"));

    let elsewhere = tempfile::tempdir().unwrap();
    let offline = HubOptions {
        offline: true,
        ..options("http://127.0.0.1:1", elsewhere.path())
    };
    let refused = Hub::new(offline).fetch_config(REPO, &());
    fails(
        refused,
        HubProblem::Offline,
        &["config.json is not in the cache"],
    );
}

/// What says how an embedding is made lies in a folder of its own.
#[test]
fn the_files_of_an_embedding_model_come_along() {
    let mut files = model();
    let modules =
        r#"[{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]"#;
    files.insert("modules.json", modules.into());
    files.insert(
        "1_Pooling/config.json",
        br#"{"pooling_mode_lasttoken": true}"#.to_vec(),
    );
    files.insert("2_Other/config.json", b"{}".to_vec());
    let server = Server::start(files);
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(options(&server.endpoint, cache.path()));
    let folder = hub.fetch_model(REPO, &()).unwrap();
    assert!(!folder.join("2_Other").exists());
    let checkpoint = Checkpoint::open(&folder).unwrap();
    assert!(matches!(checkpoint.task(), Task::Embed(_)));
}

#[test]
fn a_dropped_connection_is_resumed() {
    let server = Server::start(model());
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(options(&server.endpoint, cache.path()));
    // Every connection drops after 100,000 bytes: each attempt makes progress, so the download succeeds.
    server.set(|b| b.drop_after = Some(100_000));
    let folder = hub.fetch_model(REPO, &()).unwrap();
    let name = "model-00002-of-00002.safetensors";
    assert_eq!(fs::read(folder.join(name)).unwrap(), model()[name]);
    let ranges: Vec<String> = server
        .requests()
        .into_iter()
        .filter(|r| r.starts_with(&format!("GET /cdn/{name} bytes=")))
        .collect();
    assert!(ranges.len() >= 3, "{ranges:?}");
}

#[test]
fn an_interrupted_download_goes_on_in_another_run() {
    let name = "model-00002-of-00002.safetensors";
    let data = model().remove(name).unwrap();
    // Left by an earlier run: a part of the file, all of it, or (by another tool) too much.
    for (left, from) in [
        (123_456, Some(123_456)),
        (data.len(), None),
        (data.len() + 5, Some(0)),
    ] {
        let server = Server::start(model());
        let cache = tempfile::tempdir().unwrap();
        let hub = Hub::new(options(&server.endpoint, cache.path()));
        let blobs = cache.path().join("models--Some--Model-1B/blobs");
        fs::create_dir_all(&blobs).unwrap();
        let mut part = data.clone();
        part.resize(left, 0);
        let partial = blobs.join(format!("{}.incomplete", sha256_hex(&data)));
        fs::write(&partial, &part).unwrap();
        let folder = hub.fetch_model(REPO, &()).unwrap();
        assert_eq!(fs::read(folder.join(name)).unwrap(), data);
        assert!(!partial.exists());
        let asked = server.requests();
        let asked: Vec<_> = asked
            .iter()
            .filter(|r| r.contains(&format!("/cdn/{name}")))
            .collect();
        match from {
            None => assert!(asked.is_empty(), "{asked:?}"),
            Some(0) => assert_eq!(asked, [&format!("GET /cdn/{name}")]),
            Some(n) => assert_eq!(asked, [&format!("GET /cdn/{name} bytes={n}-")]),
        }
    }
    // A server without ranges: bytes already downloaded are skipped, not appended again.
    let server = Server::start(model());
    server.set(|b| {
        b.no_ranges = true;
        b.drop_after = Some(200_000);
    });
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(options(&server.endpoint, cache.path()));
    fails(hub.fetch_model(REPO, &()), HubProblem::Unreachable, &[]);
    server.set(|b| b.drop_after = None);
    let folder = hub.fetch_model(REPO, &()).unwrap();
    assert_eq!(fs::read(folder.join(name)).unwrap(), data);
}

#[test]
fn what_is_not_what_was_announced_is_not_kept() {
    let server = Server::start(model());
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(options(&server.endpoint, cache.path()));
    server.set(|b| b.corrupt = true);
    fails(
        hub.fetch_model(REPO, &()),
        HubProblem::Broken,
        &[
            REPO,
            "model-00001-of-00002.safetensors",
            "expected SHA-256",
            "try again",
        ],
    );
    assert_eq!(hub.cached(REPO).unwrap(), None);
    server.set(|b| b.corrupt = false);
    hub.fetch_model(REPO, &()).unwrap();
}

#[test]
fn refusals_say_what_to_do() {
    let server = Server::start(model());
    let cache = tempfile::tempdir().unwrap();
    let with_token = |token: Option<&str>| {
        Hub::new(HubOptions {
            token: token.map(String::from),
            ..options(&server.endpoint, cache.path())
        })
    };
    server.set(|b| b.token = Some("hf_secret"));
    fails(
        with_token(None).fetch_model(REPO, &()),
        HubProblem::Denied,
        &[REPO, "401", "HF_TOKEN", "terms"],
    );
    fails(
        with_token(Some("hf_wrong")).fetch_model(REPO, &()),
        HubProblem::Denied,
        &[REPO, "401", "gives no access"],
    );
    with_token(Some("hf_secret"))
        .fetch_model(REPO, &())
        .unwrap();
    server.set(|b| b.token = None);
    for other in ["Some/Other", "Some/Model-1B@v2"] {
        fails(
            with_token(None).fetch_model(other, &()),
            HubProblem::NotFound,
            &["Some/", &server.endpoint, "check the name"],
        );
    }
    fails(
        with_token(None).fetch_model("../x/y", &()),
        HubProblem::NotFound,
        &["OWNER/NAME"],
    );

    let fresh = tempfile::tempdir().unwrap();
    let hub = Hub::new(options(&server.endpoint, fresh.path()));
    server.set(|b| b.status = Some(500));
    fails(
        hub.fetch_model(REPO, &()),
        HubProblem::Broken,
        &["500", ".safetensors"],
    );
}

#[test]
fn no_hub_is_noticed_fast() {
    let cache = tempfile::tempdir().unwrap();
    let start = Instant::now();
    // A port that nobody listens on.
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let down = options(&format!("http://{port}"), cache.path());
    let result = Hub::new(down.clone()).fetch_model(REPO, &());
    assert!(result.as_ref().is_err_and(Error::is_unreachable));
    fails(
        result,
        HubProblem::Unreachable,
        &[
            REPO,
            &port.to_string(),
            "does not answer",
            "HF_ENDPOINT",
            "--offline",
        ],
    );
    // A server that accepts connections but does not answer.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mute = HubOptions {
        read_timeout: Duration::from_millis(300),
        ..options(
            &format!("http://{}", silent.local_addr().unwrap()),
            cache.path(),
        )
    };
    fails(
        Hub::new(mute).fetch_model(REPO, &()),
        HubProblem::Unreachable,
        &["timeout"],
    );
    let offline = HubOptions {
        offline: true,
        ..down
    };
    fails(
        Hub::new(offline).fetch_model(REPO, &()),
        HubProblem::Offline,
        &[REPO, "offline", "cache", "run once online"],
    );
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn gguf_repositories_give_a_file() {
    let gguf = |names: &[&'static str]| {
        let mut files = BTreeMap::from([("README.md", b"x".to_vec())]);
        files.extend(names.iter().map(|n| (*n, format!("GGUF {n}").into_bytes())));
        Server::start(files)
    };
    let cache = tempfile::tempdir().unwrap();
    let one = gguf(&["m-Q8_0.gguf"]);
    let hub = Hub::new(options(&one.endpoint, cache.path()));
    let path = hub.fetch_model(REPO, &()).unwrap();
    assert!(path.ends_with("m-Q8_0.gguf"));
    assert_eq!(fs::read(&path).unwrap(), b"GGUF m-Q8_0.gguf");
    assert_eq!(hub.cached(REPO).unwrap(), Some(path));

    let cache = tempfile::tempdir().unwrap();
    let two = gguf(&["m-Q4_0.gguf", "m-Q8_0.gguf"]);
    let hub = Hub::new(options(&two.endpoint, cache.path()));
    fails(
        hub.fetch_model(REPO, &()),
        HubProblem::NotFound,
        &["Some/Model-1B/FILE", "m-Q4_0.gguf, m-Q8_0.gguf"],
    );
    let path = hub.fetch_model("Some/Model-1B/m-Q4_0.gguf", &()).unwrap();
    assert_eq!(fs::read(path).unwrap(), b"GGUF m-Q4_0.gguf");
    fails(
        hub.fetch_model("Some/Model-1B/m-Q5_0.gguf", &()),
        HubProblem::NotFound,
        &["no file m-Q5_0.gguf"],
    );
    // By its kind, as other programs name it.
    let path = hub.fetch_model("hf.co/Some/Model-1B:q4_0", &()).unwrap();
    assert_eq!(fs::read(path).unwrap(), b"GGUF m-Q4_0.gguf");
    names(
        hub.fetch_model("Some/Model-1B:Q4_K_M", &()),
        &["no GGUF file of Q4_K_M", "m-Q4_0.gguf, m-Q8_0.gguf"],
    );
    let dir = tempfile::tempdir().unwrap();
    let split = gguf(&[
        "m-IQ4_XS-00001-of-00002.gguf",
        "m-IQ4_XS-00002-of-00002.gguf",
        "m-Q8_0.gguf",
    ]);
    let hub = Hub::new(options(&split.endpoint, dir.path()));
    let path = hub.fetch_model("Some/Model-1B:IQ4_XS", &()).unwrap();
    assert!(path.ends_with("m-IQ4_XS-00001-of-00002.gguf"));
    assert!(path.with_file_name("m-IQ4_XS-00002-of-00002.gguf").exists());
}

/// The tower that sees images comes along with its text model: the smallest file of 16 bits.
#[test]
fn a_gguf_model_brings_its_tower() {
    let towers = ["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"];
    let mut files = BTreeMap::from(towers.map(|name| (name, name.into())));
    files.insert("m-Q4_0.gguf", b"GGUF".to_vec());
    let server = Server::start(files);
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(options(&server.endpoint, cache.path()));
    let path = hub.fetch_model(REPO, &()).unwrap();
    assert!(path.ends_with("m-Q4_0.gguf"));
    let there = towers.map(|name| path.with_file_name(name).exists());
    assert_eq!(there, [false, true, false]);
    assert_eq!(hub.cached("Some/Model-1B:Q4_0").unwrap(), Some(path));
    names(
        hub.fetch_model("Some/Model-1B:F16", &()),
        &["no GGUF file of F16", "m-Q4_0.gguf"],
    );
}

#[test]
fn the_environment_is_honoured() {
    let vars = |pairs: &[(&'static str, &'static str)]| {
        let map: HashMap<&str, &str> = pairs.iter().copied().collect();
        HubOptions::from_vars(&move |name| map.get(name).map(|v| (*v).to_owned()))
    };
    let plain = vars(&[("HOME", "/home/u")]);
    assert_eq!(plain.cache, Path::new("/home/u/.cache/huggingface/hub"));
    assert_eq!(plain.endpoint, "https://huggingface.co");
    assert_eq!((plain.token, plain.offline), (None, false));
    assert_eq!(plain.connect_timeout, Duration::from_secs(5));
    let xdg = vars(&[("HOME", "/home/u"), ("XDG_CACHE_HOME", "/c")]);
    assert_eq!(xdg.cache, Path::new("/c/huggingface/hub"));
    let home = vars(&[("HOME", "/home/u"), ("HF_HOME", "/hf")]);
    assert_eq!(home.cache, Path::new("/hf/hub"));
    let all = vars(&[
        ("HF_HOME", "/hf"),
        ("HF_HUB_CACHE", "/elsewhere"),
        ("HF_ENDPOINT", "http://mirror/"),
        ("HF_TOKEN", " hf_x\n"),
        ("HF_HUB_OFFLINE", "TRUE"),
    ]);
    assert_eq!(all.cache, Path::new("/elsewhere"));
    assert_eq!(all.endpoint, "http://mirror");
    assert_eq!((all.token.as_deref(), all.offline), (Some("hf_x"), true));
    let empty = vars(&[("HF_HUB_OFFLINE", "0"), ("HF_ENDPOINT", ""), ("HOME", "/h")]);
    assert!(!empty.offline);
    assert_eq!(empty.endpoint, "https://huggingface.co");

    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("token"), "hf_file\n").unwrap();
    let root = dir.path().to_str().unwrap().to_owned();
    let options = HubOptions::from_vars(&|n| (n == "HF_HOME").then(|| root.clone()));
    assert_eq!(options.token.as_deref(), Some("hf_file"));

    let parse = |s| HubId::parse(s).map(|id| (id.repo, id.revision, id.file));
    let id = |r: &str, v: &str, f: Option<&str>| Some((r.into(), v.into(), f.map(String::from)));
    assert_eq!(
        parse("Qwen/Qwen3-0.6B"),
        id("Qwen/Qwen3-0.6B", "main", None)
    );
    assert_eq!(parse("a/b@refs/pr/1"), id("a/b", "refs/pr/1", None));
    assert_eq!(parse("a/b/c.gguf"), id("a/b", "main", Some("c.gguf")));
    for page in [
        "hf.co/a/b",
        "https://huggingface.co/a/b",
        "https://hf.co/a/b/?x=1",
    ] {
        assert_eq!(parse(page), id("a/b", "main", None), "{page}");
    }
    assert_eq!(
        parse("https://huggingface.co/a/b/tree/v2"),
        id("a/b", "v2", None)
    );
    let file = "https://huggingface.co/a/b/resolve/main/c.gguf?download=true";
    assert_eq!(parse(file), id("a/b", "main", Some("c.gguf")));
    let parsed = |text| HubId::parse(text).map(|id| (id.name(), id.kind));
    let name = |name: &str, kind: Option<&str>| Some((name.to_owned(), kind.map(String::from)));
    assert_eq!(parsed("a/B-GGUF:Q4_K_M"), name("B-Q4_K_M", Some("Q4_K_M")));
    assert_eq!(parsed("a/b/c.gguf@v2"), name("c", None));
    for bad in [
        "a",
        "a/",
        "/a",
        "a/b/c",
        "../a",
        "a/..",
        "a/b@",
        "a/b@../c",
        "a b/c",
        "a/b/../c.gguf",
        "a/b:../c",
        "a/b/c.gguf:Q8_0",
        "https://example.org/a/b",
        "https://huggingface.co/a",
    ] {
        assert_eq!(parse(bad), None, "{bad}");
    }
}
