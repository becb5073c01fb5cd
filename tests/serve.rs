//! `nq serve` as its users run it: the real binary on the demo model.
#![cfg(all(feature = "demo", target_os = "linux"))]

use crate::common::program;
use crate::pty::Pty;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

fn nq(args: &[&str]) -> Command {
    let mut command = program();
    command
        .env_remove("NQ_API_KEY")
        .args(["serve", "demo", "--device", "cpu", "--port", "0"])
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A server that ends with its test, even if that fails.
struct Served {
    child: Child,
    /// Kept open, so that the server can continue to write.
    stderr: BufReader<ChildStderr>,
    /// Its output before it listened.
    said: String,
    address: String,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Served {
    fn start(args: &[&str]) -> Self {
        Served::of(nq(args))
    }

    fn of(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let mut served = Served {
            child,
            stderr,
            said: String::new(),
            address: String::new(),
        };
        while served.address.is_empty() {
            let mut line = String::new();
            let read = served.stderr.read_line(&mut line).unwrap();
            assert!(read > 0, "{}", served.said);
            if let Some((_, address)) = line.trim_end().split_once("listening on http://") {
                served.address = address.to_owned();
            }
            served.said += &line;
        }
        served
    }

    /// Interrupts the server, which must shut down gracefully.
    fn stop(&mut self) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-INT", &pid]).status().unwrap();
        assert!(sent.success() && self.child.wait().unwrap().success());
    }
}

fn ask(address: &str, path: &str, headers: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let method = if body.is_empty() { "GET" } else { "POST" };
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{headers}\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

const CHAT: &str =
    r#"{"messages":[{"role":"user","content":"Hello!"}],"temperature":0,"max_tokens":8}"#;

#[test]
fn it_says_what_it_serves_answers_and_ends_in_good_order() {
    let mut served = Served::start(&["--parallel", "4", "--ctx", "512", "--bits", "8"]);
    let (said, address) = (served.said.clone(), served.address.clone());
    assert!(
        said.contains("4 requests at once, contexts of 512 tokens"),
        "{said}"
    );
    let once = "a beginning of 128 tokens or more that all 4 requests share is read once per step";
    assert!(said.contains(once), "{said}");
    assert!(said.contains("curl http://127.0.0.1:"), "{said}");
    let response = ask(&address, "/v1/chat/completions", "", CHAT);
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    assert!(response.contains("\"model\":\"demo\""), "{response}");
    let begun = Instant::now();
    served.stop();
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert!(TcpStream::connect(&address).is_err());
}

/// Drafts and the beginnings of prompts need states: none are kept for a hybrid only if that is asked for.
#[test]
fn memory_for_less_than_a_state_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let hybrid = folder.path().join("hybrid");
    let config = serde_json::json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 4096, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": true, "eos_token_id": 4072, "full_attention_interval": 2,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    });
    let config = config.to_string();
    let config = nq_formats::config::parse(std::path::Path::new("c"), config.as_bytes()).unwrap();
    nq_formats::synth::write(&hybrid, &config, 1, &()).unwrap();
    let demo = nq_testkit::demo();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(demo.join(name), hybrid.join(name)).unwrap();
    }
    let output = program()
        .arg("serve")
        .arg(&hybrid)
        .args(["--device", "cpu", "--port", "0", "--state-memory", "1KB"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("--state-memory: a state takes"), "{said}");
}

#[test]
fn keys_come_from_a_file_or_the_environment_and_are_needed_abroad() {
    let refused = |args: &[&str], why: &str| {
        let output = nq(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(why), "{said}");
        said
    };
    refused(&["--host", "0.0.0.0"], "needs a key");
    refused(&["--allow-origin", "*"], "origin");
    refused(&["--kv-memory", "1KB"], "--kv-memory helps");
    refused(&["--ctx", "5000"], "1024");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "# nobody\n").unwrap();
    refused(&["--api-key-file", path], "one key per line");
    std::fs::write(&file, "short-secret\n").unwrap();
    let said = refused(&["--api-key-file", path], "16 or more");
    assert!(!said.contains("secret"), "{said}");

    let key = "a-key-of-sixteen-or-more";
    std::fs::write(&file, format!("# ours\n{key}\n")).unwrap();
    let mut served = Served::start(&[
        "--host",
        "0.0.0.0",
        "--api-key-file",
        path,
        "--served-name",
        "tiny",
    ]);
    assert!(!served.said.contains(key));
    let address = served.address.replace("0.0.0.0", "127.0.0.1");
    assert!(ask(&address, "/v1/models", "", "").starts_with("HTTP/1.1 401"));
    let bearer = format!("authorization: Bearer {key}\r\n");
    let models = ask(&address, "/v1/models", &bearer, "");
    assert!(models.contains("\"id\":\"tiny\""), "{models}");
    served.stop();
}

#[test]
fn a_terminal_talks_to_a_server() {
    let key = "a-key-of-sixteen-or-more";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, key).unwrap();
    let mut served = Served::start(&["--api-key-file", file.to_str().unwrap()]);
    let url = format!("http://{}", served.address);
    let talk = |args: &[&str], key: Option<&str>| {
        let mut command = program();
        command
            .args(["chat", "--server", &url, "--temperature", "0"])
            .args(args);
        command
            .env_remove("NQ_API_KEY")
            .env("NQ_HOME", folder.path())
            .stdin(Stdio::null());
        if let Some(key) = key {
            command.env("NQ_API_KEY", key);
        }
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (
            output.status.success(),
            text(&output.stdout),
            text(&output.stderr),
        )
    };
    let (ok, answer, said) = talk(&["-v", "-p", "Hello!", "--no-think"], Some(key));
    assert!(ok && !answer.trim().is_empty(), "{said}");
    assert!(said.contains("tok/s") && said.contains("cached"), "{said}");
    let json = [
        "demo",
        "-p",
        "Hello!",
        "--no-think",
        "--json",
        "--max-tokens",
        "3",
    ];
    let (ok, json, said) = talk(&json, Some(key));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(
        ok && answer.starts_with(json["answer"].as_str().unwrap()),
        "{said}"
    );
    assert_eq!(
        (&json["stop"], &json["tokens"]),
        (&"max_tokens".into(), &3.into())
    );
    assert!(json["reused_tokens"].as_u64().unwrap() > 10, "{json}");
    let word = answer.split_whitespace().next_back().unwrap();
    let stop = format!("--stop={word}");
    let stopped = ["-p", "Hello!", "--no-think", "--json", &stop];
    let (ok, stopped, said) = talk(&stopped, Some(key));
    assert!(ok, "{said}");
    let stopped: serde_json::Value = serde_json::from_str(&stopped).unwrap();
    let before = &answer[..answer.find(word).unwrap()];
    assert_eq!(
        (&stopped["stop"], &stopped["answer"]),
        (&"stop_text".into(), &before.into())
    );
    for (args, key, why) in [
        (["--raw", "-p", "x"], Some(key), "--raw"),
        (["--draft=none", "-p", "x"], Some(key), "--draft"),
        (["--threads=1", "-p", "x"], Some(key), "--threads"),
        (["demo", "-p", "x"], None, "401"),
        (["other", "-p", "x"], Some(key), "demo, not other"),
    ] {
        let (ok, _, said) = talk(&args, key);
        assert!(!ok && said.contains(why), "{said}");
    }
    let (ok, _, said) = talk(&["-p", &"word ".repeat(3000)], Some(key));
    assert!(!ok && said.contains("1024"), "{said}");

    let mut command = program();
    command.args(["chat", "--server", &url]);
    command.env("NQ_API_KEY", key).env("NQ_HOME", folder.path());
    let mut pty = Pty::spawn(command);
    pty.answer(">>> ", "/set on_overflow drop-oldest");
    pty.wait_for("on_overflow: a server keeps all");
    pty.answer(">>> ", "/set top_k 3");
    let settings = pty.wait_for("hide_thinking off");
    assert!(settings.contains("top_k 3"), "{settings}");
    pty.answer(">>> ", "/exit");
    assert_eq!(pty.exit_code(), 0);
    served.stop();
}

/// A prompt of more than one page of keys and values.
fn long() -> String {
    let text = "Tell me about the film The Silent River. ".repeat(24);
    format!(
        r#"{{"messages":[{{"role":"user","content":"{text}"}}],"temperature":0,"max_tokens":40}}"#
    )
}

fn json(response: &str) -> serde_json::Value {
    let body = response.split_once("\r\n\r\n").unwrap().1;
    serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {response}"))
}

/// The answer to [`long`], and how many tokens of its prompt were cached.
fn answer(served: &Served) -> (String, u64) {
    let json = json(&ask(&served.address, "/v1/chat/completions", "", &long()));
    let text = json["choices"][0]["message"].to_string();
    let cached = &json["usage"]["prompt_tokens_details"]["cached_tokens"];
    (text, cached.as_u64().unwrap())
}

#[test]
fn other_models_are_found_at_once_and_loaded_when_they_are_asked_for() {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo");
    let other = format!("other={demo}");
    let flags = [
        "--model",
        &other,
        "--alias",
        "gpt-5=other",
        "--keep-loaded",
        "gpt-5",
    ];
    let mut served = Served::start(&flags);
    assert!(
        served.said.contains("loaded at first use: other"),
        "{}",
        served.said
    );
    let loaded = |served: &Served| {
        let models = json(&ask(&served.address, "/v1/models", "", ""))["data"].clone();
        [0, 1].map(|i| (models[i]["id"].clone(), models[i]["loaded"].clone()))
    };
    assert_eq!(
        loaded(&served),
        [("demo".into(), true.into()), ("other".into(), false.into())]
    );
    // What it is is known before it is loaded.
    let alias = json(&ask(&served.address, "/v1/models/gpt-5", "", ""));
    assert_eq!(
        (&alias["root"], &alias["pinned"]),
        (&"other".into(), &true.into())
    );
    assert!(
        alias["max_model_len"].as_u64().is_some_and(|n| n > 1),
        "{alias}"
    );
    assert_eq!(
        (&alias["task"], &alias["tools"]),
        (&"generate".into(), &false.into())
    );
    assert!(alias["quantization"]["format"].is_string(), "{alias}");
    let chat = CHAT.replacen('{', r#"{"model":"gpt-5","#, 1);
    let answer = json(&ask(&served.address, "/v1/chat/completions", "", &chat));
    assert_eq!(answer["model"], "other");
    assert_eq!(loaded(&served)[1].1, true);
    served.stop();

    for (flag, model, why) in [
        ("--model", "other=/nowhere/at/all", "/nowhere/at/all"),
        ("--model", "nothing", "NAME=MODEL"),
        ("--model", "demo=demo", "two models"),
        ("--alias", "demo=demo", "two models"),
        ("--alias", "a=b", "no model \"b\""),
        ("--keep-loaded", "b", "no model \"b\""),
    ] {
        let output = nq(&[flag, model]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{said}");
    }
}

/// A folder's models are offered by their places in it, each loaded when it is asked for; what cannot be opened is named.
#[test]
fn models_are_served_from_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let models = folder.path();
    let demo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    for place in ["small", "owner/other"] {
        let place = models.join(place);
        std::fs::create_dir_all(&place).unwrap();
        for file in std::fs::read_dir(&demo).unwrap() {
            let file = file.unwrap();
            std::os::unix::fs::symlink(file.path(), place.join(file.file_name())).unwrap();
        }
    }
    std::fs::create_dir(models.join("broken")).unwrap();
    std::fs::write(models.join("broken/config.json"), "{").unwrap();
    let program = |args: &[&str]| {
        let mut command = program();
        command.env_remove("NQ_API_KEY").args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(Stdio::piped());
        command
    };
    let path = models.to_str().unwrap();
    let serve = ["serve", "--device", "cpu", "--port", "0"];
    let flags = ["--models-dir", path, "--alias", "gpt-5=owner/other"];
    let mut served = Served::of(program(&[&serve[..], &flags].concat()));
    let said = served.said.clone();
    assert!(
        said.contains("loaded at first use: owner/other, small"),
        "{said}"
    );
    assert!(said.contains("broken is not served: "), "{said}");
    let loaded = || {
        let models = json(&ask(&served.address, "/v1/models", "", ""))["data"].clone();
        let of_one = |model: &serde_json::Value| {
            let id = model["id"].as_str().unwrap().to_owned();
            (id, model["loaded"].as_bool().unwrap())
        };
        models
            .as_array()
            .unwrap()
            .iter()
            .map(of_one)
            .collect::<Vec<_>>()
    };
    let all = |other: bool, small: bool| {
        let all = [("owner/other", other), ("gpt-5", other), ("small", small)];
        all.map(|(name, loaded)| (name.to_owned(), loaded)).to_vec()
    };
    assert_eq!(loaded(), all(false, false));
    let chat = CHAT.replacen('{', r#"{"model":"small","#, 1);
    let answer = json(&ask(&served.address, "/v1/chat/completions", "", &chat));
    assert_eq!(answer["model"], "small");
    assert_eq!(loaded(), all(false, true));
    // The first is for requests without a model.
    let answer = json(&ask(&served.address, "/v1/chat/completions", "", CHAT));
    assert_eq!(answer["model"], "owner/other");
    assert_eq!(loaded(), all(true, true));
    let one = json(&ask(&served.address, "/v1/models/owner/other", "", ""));
    assert_eq!(one["id"], "owner/other");
    served.stop();

    let listed = program(&["list", path, "--json"]).output().unwrap();
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let row = |i: usize| (&listed[i]["name"], listed[i]["problem"].is_string());
    assert_eq!(row(0), (&"broken".into(), true));
    assert_eq!(row(1), (&"owner/other".into(), false));
    assert_eq!(row(2), (&"small".into(), false));
    for (flags, why) in [
        (
            vec![path],
            "a folder of 3 models, which --models-dir serves",
        ),
        (vec!["--models-dir", "/nowhere/at/all"], "/nowhere/at/all"),
        (
            vec!["demo", "--served-name", "small", "--models-dir", path],
            "small is the name of two models",
        ),
    ] {
        let output = program(&[&serve[..], &flags].concat()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{said}");
    }
}

/// Prompts are found on disk after a graceful shutdown, and after the server was killed while
/// writing; damaged pages are not used.
#[test]
fn prompts_outlast_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let start = || Served::start(&["--cache-dir", cache.to_str().unwrap()]);
    let files = || {
        let found = std::fs::read_dir(&cache).into_iter().flatten();
        let pages = found.flatten().map(|e| e.path());
        let pages: Vec<_> = pages
            .filter(|p| p.extension().is_some_and(|e| e == "kv"))
            .collect();
        pages
    };
    let mut served = start();
    let (first, cached) = answer(&served);
    assert_eq!(cached, 0);
    served.stop();
    assert!(files().len() >= 2, "{:?}", files());

    // Killed at any time, it leaves only whole pages.
    for pause in [0, 5, 20, 80] {
        let mut served = start();
        let (again, cached) = answer(&served);
        assert_eq!(again, first);
        assert!(cached >= 128, "{cached}");
        let other = CHAT.replace(
            "Hello!",
            &format!("{pause} {}", "words to keep ".repeat(60)),
        );
        ask(&served.address, "/v1/chat/completions", "", &other);
        std::thread::sleep(Duration::from_millis(pause));
        served.child.kill().unwrap();
        served.child.wait().unwrap();
    }
    let served = start();
    assert!(!served.said.contains("removed"), "{}", served.said);
    assert_eq!(answer(&served).0, first);
    drop(served);

    for path in files() {
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    let served = start();
    assert_eq!(answer(&served), (first, 0));
    drop(served);

    let conflict = nq(&["--cache-dir", "x", "--no-prefix-cache"])
        .output()
        .unwrap();
    assert_eq!(conflict.status.code(), Some(2));
}
