//! `nq serve` as its users run it: the real binary on the demo model.
#![cfg(all(feature = "demo", target_os = "linux"))]

#[allow(dead_code, reason = "other tests use the rest")]
mod pty;

use pty::Pty;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

fn nq(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nq"));
    command
        .env_remove("NQ_API_KEY")
        .args(["serve", "demo", "--device", "cpu", "--port", "0"])
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A server that ends with its test, whatever that comes to.
struct Served {
    child: Child,
    /// Kept open, so that the server can write on.
    stderr: BufReader<ChildStderr>,
    /// What it said before it listened.
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
        let mut child = nq(args).spawn().unwrap();
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

    /// Interrupts it; it ends in good order.
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
    assert!(said.contains("curl http://127.0.0.1:"), "{said}");
    let response = ask(&address, "/v1/chat/completions", "", CHAT);
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    assert!(response.contains("\"model\":\"demo\""), "{response}");
    let begun = Instant::now();
    served.stop();
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert!(TcpStream::connect(&address).is_err());
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
    refused(&["--api-key-file", path], "a key a line");
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
        let mut command = Command::new(env!("CARGO_BIN_EXE_nq"));
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
    let (ok, answer, said) = talk(&["-p", "Hello!", "--no-think"], Some(key));
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

    let mut command = Command::new(env!("CARGO_BIN_EXE_nq"));
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
