//! `nq embed` and `nq rerank` as their users run them, on the demo model with its head taken away.
#![cfg(feature = "demo")]

use crate::common::{command, nq, stderr, stdout};
use nq_llm::{DEFAULT_TASK, DeviceChoice, OpenOptions, Purpose};
use nq_testkit::compare::cosine;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::Ordering;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo");

/// A safetensors file with its tensors' names without `model.`.
fn bare(file: &[u8]) -> Vec<u8> {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> =
        serde_json::from_slice(&file[8..8 + length]).unwrap();
    let renamed = header
        .into_iter()
        .map(|(name, value)| (name.replacen("model.", "", 1), value));
    let mut header = Value::Object(renamed.collect()).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header);
    out.extend(&file[8 + length..]);
    out
}

fn json_of(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(Path::new(DEMO).join(name)).unwrap()).unwrap()
}

/// The demo model as Qwen3-Embedding is published: names without `model.`, an end token added by the
/// tokenizer, the files of sentence-transformers; untied, with no head anywhere.
fn embedder(home: &Path) -> PathBuf {
    let folder = home.join("embedder");
    std::fs::create_dir_all(folder.join("1_Pooling")).unwrap();
    let put = |name: &str, bytes: &[u8]| std::fs::write(folder.join(name), bytes).unwrap();
    for name in [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ] {
        put(
            name,
            &bare(&std::fs::read(Path::new(DEMO).join(name)).unwrap()),
        );
    }
    let mut index = json_of("model.safetensors.index.json");
    let map = index["weight_map"].as_object().unwrap().clone();
    let map = map
        .into_iter()
        .map(|(name, file)| (name.replacen("model.", "", 1), file));
    index["weight_map"] = Value::Object(map.collect());
    put("model.safetensors.index.json", index.to_string().as_bytes());
    let mut config = json_of("config.json");
    config["tie_word_embeddings"] = false.into();
    config["eos_token_id"] = config["bos_token_id"].clone();
    put("config.json", config.to_string().as_bytes());
    let mut tokenizer = json_of("tokenizer.json");
    let (end, id) = ("<|endoftext|>", config["eos_token_id"].clone());
    tokenizer["post_processor"] = json!({"type": "Sequence", "processors": [
        tokenizer["post_processor"],
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end, "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {end: {"id": end, "ids": [id], "tokens": [end]}},
        },
    ]});
    put("tokenizer.json", tokenizer.to_string().as_bytes());
    let modules = json!([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]);
    put("modules.json", modules.to_string().as_bytes());
    pooling(&folder, "lasttoken");
    let prompts = json!({"prompts": {"query": "Find: ", "document": ""}});
    put(
        "config_sentence_transformers.json",
        prompts.to_string().as_bytes(),
    );
    folder
}

fn pooling(folder: &Path, mode: &str) {
    let config = json!({format!("pooling_mode_{mode}"): true, "pooling_mode_cls_token": false});
    std::fs::write(folder.join("1_Pooling/config.json"), config.to_string()).unwrap();
}

fn vectors(lines: &str) -> Vec<Vec<f64>> {
    let vector = |(i, line): (usize, &str)| {
        let object: Value = serde_json::from_str(line).unwrap();
        assert_eq!(object["index"], i);
        serde_json::from_value(object["embedding"].clone()).unwrap()
    };
    lines.lines().enumerate().map(vector).collect()
}

/// The model as a program loads it.
fn library(folder: &Path) -> nq_llm::Model {
    let mut options = OpenOptions::default();
    options.load.device = DeviceChoice::Cpu;
    nq_llm::Model::open_with(folder, &options, &()).unwrap()
}

const TEXTS: [&str; 3] = [
    "The capital of France is Paris.",
    "A cat sleeps.",
    "rain and wind",
];

#[test]
fn vectors_come_line_by_line_and_as_an_array() {
    let home = tempfile::tempdir().unwrap();
    let (home, folder) = (home.path(), embedder(home.path()));
    let model = folder.to_str().unwrap();
    let run = |args: &[&str]| {
        let out = nq(
            home,
            &[&["embed", model, "--device", "cpu"][..], args].concat(),
        );
        assert!(out.status.success(), "{}", stderr(&out));
        stdout(&out)
    };
    let all = vectors(&run(&TEXTS));
    assert_eq!((all.len(), all[0].len()), (3, 512));
    for vector in &all {
        let length: f64 = vector.iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5);
    }
    assert!(cosine(&all[0], &all[1]) < 0.99);

    // A program gets the same, and zeros where there is nothing to read.
    let mut embedder = library(&folder).embedder().unwrap();
    let made = embedder.embed(&TEXTS, &Purpose::Document).unwrap();
    let numbers = |v: &Vec<f32>| v.iter().map(|&x| f64::from(x)).collect();
    let made: Vec<Vec<f64>> = made.iter().map(numbers).collect();
    assert_eq!(made, all);
    embedder.interrupt.store(true, Ordering::Relaxed);
    assert!(embedder.embed(&TEXTS, &Purpose::Query).is_err());
    assert!(library(&folder).chat().is_err());

    // From standard input, and from JSON with names; in NumPy's format.
    let mut child = command(home, &["embed", model, "--device", "cpu"]);
    let child = child
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let lines = TEXTS.join("\r\n");
    child
        .stdin
        .take()
        .unwrap()
        .write_all(lines.as_bytes())
        .unwrap();
    let piped = vectors(&stdout(&child.wait_with_output().unwrap()));
    assert_eq!(piped, all);
    let file = home.join("texts.jsonl");
    let objects = TEXTS.map(|t| json!({"id": format!("n-{t}"), "text": t}).to_string());
    std::fs::write(&file, objects.join("\n") + "\n").unwrap();
    let file = file.to_str().unwrap();
    let named = run(&["-f", file]);
    assert!(named.contains(r#""id":"n-A cat sleeps.""#), "{named}");
    assert_eq!(vectors(&named), all);
    let npy = home.join("v.npy");
    run(&[
        "-f",
        file,
        "--dimensions",
        "64",
        "--out",
        npy.to_str().unwrap(),
    ]);
    let bytes = std::fs::read(&npy).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let header = String::from_utf8_lossy(&bytes[10..128]).into_owned();
    assert!(header.contains("'<f4'") && header.contains("(3, 64)") && header.ends_with('\n'));
    let numbers = bytes[128..]
        .chunks_exact(4)
        .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())));
    let numbers: Vec<f64> = numbers.collect();
    assert_eq!(numbers.len(), 3 * 64);
    for (short, whole) in numbers.chunks_exact(64).zip(&all) {
        assert!(cosine(short, &whole[..64]) > 0.99999);
        assert!((short.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5);
    }
    // What is there is not written over.
    let again = nq(home, &["embed", model, "a", "--out", npy.to_str().unwrap()]);
    assert!(!again.status.success() && stderr(&again).contains("v.npy"));
    assert_eq!(std::fs::read(&npy).unwrap(), bytes);

    // Prompts: the model's own, and an instruction.
    let query = vectors(&run(&["--query", TEXTS[1]]));
    assert_eq!(query, vectors(&run(&["Find: A cat sleeps."])));
    let instructed = vectors(&run(&["--instruct", "Name it", TEXTS[1]]));
    assert_eq!(
        instructed,
        vectors(&run(&["Instruct: Name it\nQuery:A cat sleeps."]))
    );
    // Rounded at load, it is about the same.
    let rounded = vectors(&run(&["--bits", "8", TEXTS[1]]));
    assert!(cosine(&rounded[0], &all[1]) > 0.999);
}

/// A blank line keeps its place, and a run that fails at once leaves no file.
#[test]
fn a_line_without_tokens_has_zeros() {
    let home = tempfile::tempdir().unwrap();
    let (home, folder) = (home.path(), embedder(home.path()));
    // Without the end token that its makers would add.
    std::fs::copy(
        Path::new(DEMO).join("tokenizer.json"),
        folder.join("tokenizer.json"),
    )
    .unwrap();
    let (texts, npy) = (home.join("texts.txt"), home.join("v.npy"));
    let run = |lines: &str, more: &[&str]| {
        std::fs::write(&texts, lines).unwrap();
        let words = ["embed", folder.to_str().unwrap(), "--device", "cpu", "-f"];
        let words = [&words[..], &[texts.to_str().unwrap()], more].concat();
        nq(home, &words)
    };
    let out = run("\none\n\n\ntwo\n\n", &[]);
    assert!(out.status.success(), "{}", stderr(&out));
    let all = vectors(&stdout(&out));
    let full: Vec<usize> = (0..all.len())
        .filter(|&i| all[i].iter().any(|x| *x != 0.0))
        .collect();
    assert_eq!((all.len(), full), (6, vec![1, 4]));
    assert!(stderr(&out).contains("line 3: no text: its vector is zeros"));
    let to_file = ["--out", npy.to_str().unwrap(), "--ctx", "4"];
    let out = run("one\n\ntwo three four five six seven", &to_file);
    assert!(!out.status.success() && stderr(&out).contains("line 3"));
    assert!(!npy.exists(), "{}", stderr(&out));
    assert!(run("one\n\n", &to_file).status.success());
    let header = std::fs::read(&npy).unwrap();
    assert!(String::from_utf8_lossy(&header[10..128]).contains("(2, 512)"));
}

/// The request that the server suggests is one that it answers.
#[test]
fn a_server_suggests_what_its_model_can_do() {
    let home = tempfile::tempdir().unwrap();
    let folder = embedder(home.path());
    let args = [
        "serve",
        folder.to_str().unwrap(),
        "--device",
        "cpu",
        "--port",
        "0",
    ];
    let mut child = command(home.path(), &args)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = Vec::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        said.push(line.unwrap());
        if said.last().unwrap().contains("listening on") {
            break;
        }
    }
    let said = said.join("\n");
    let (_, call) = said.split_once("try: curl http://").unwrap();
    let (address, rest) = call.split_once('/').unwrap();
    let path = rest.split(' ').next().unwrap();
    let body = rest
        .split_once("-d '")
        .unwrap()
        .1
        .split('\'')
        .next()
        .unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    write!(
        stream,
        "POST /{path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    let read = stream.read_to_string(&mut answer);
    child.kill().unwrap();
    child.wait().unwrap();
    read.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("embedding"),
        "{said}\n{answer}"
    );
}

/// What says that a model is for embeddings goes with it into other formats.
#[test]
fn conversions_stay_embedding_models() {
    let home = tempfile::tempdir().unwrap();
    let (home, folder) = (home.path(), embedder(home.path()));
    let embed = |model: &Path| {
        let out = nq(
            home,
            &[
                "embed",
                model.to_str().unwrap(),
                "--device",
                "cpu",
                TEXTS[0],
            ],
        );
        assert!(out.status.success(), "{}", stderr(&out));
        vectors(&stdout(&out)).remove(0)
    };
    let source = embed(&folder);
    let (gguf, rounded) = (home.join("model.gguf"), home.join("rounded.gguf"));
    let ours = home.join("ours");
    let steps: [(&Path, &Path, &[&str]); 4] = [
        (&folder, &gguf, &["gguf"]),
        (
            &folder,
            &rounded,
            &["gguf", "--type", "q8_0", "--requantize"],
        ),
        (&rounded, &ours, &["nq"]),
        // A folder of ours, with the folder in it, may be replaced.
        (&rounded, &ours, &["nq", "--force"]),
    ];
    for (from, to, format) in steps {
        let words = [
            "convert",
            from.to_str().unwrap(),
            to.to_str().unwrap(),
            "--format",
        ];
        let out = nq(home, &[&words[..], format].concat());
        assert!(out.status.success(), "{format:?}: {}", stderr(&out));
        let cosine = cosine(&embed(to), &source);
        assert!(cosine > 0.999, "{format:?}: {cosine}");
    }
    assert!(ours.join("1_Pooling/config.json").exists());
}

#[test]
fn what_is_no_embedding_model_is_named() {
    let home = tempfile::tempdir().unwrap();
    let (home, folder) = (home.path(), embedder(home.path()));
    let model = folder.to_str().unwrap();
    let refused = |args: &[&str], parts: &[&str]| {
        let out = nq(home, args);
        let said = stderr(&out);
        assert!(
            !out.status.success() && out.stdout.is_empty(),
            "{args:?}: {said}"
        );
        for part in parts {
            assert!(said.contains(part), "{part}: {said}");
        }
    };
    let text = home.join("text.txt");
    std::fs::write(&text, "Some text to evaluate on, if it were to be.").unwrap();
    refused(
        &["embed", "demo", "a"],
        &["embedding model", "modules.json"],
    );
    for more in [
        &["chat", model, "-p", "Hi"][..],
        &["eval", model, "--text", text.to_str().unwrap()],
        &["quantize", model, "--bits", "4"],
    ] {
        refused(more, &["an embedding model"]);
    }
    refused(&["rerank", model, "-q", "a", "b"], &["an embedding model"]);
    refused(&["rerank", "demo", "-q", "a", "b"], &["\"yes\""]);
    refused(
        &["embed", model, "a", "--dimensions", "513"],
        &["1 to 512", "513"],
    );
    let long = "word ".repeat(600);
    refused(
        &["embed", model, "a", &long, "--ctx", "512"],
        &["text 2", "512", "--truncate"],
    );
    let out = nq(home, &["embed", model, &long, "--ctx", "512", "--truncate"]);
    assert!(out.status.success(), "{}", stderr(&out));
    let file = home.join("bad.jsonl");
    std::fs::write(&file, "{\"text\": \"a\"}\n{\"txt\": \"b\"}\n").unwrap();
    refused(
        &["embed", model, "-f", file.to_str().unwrap()],
        &["line 2", "\"text\""],
    );
    pooling(&folder, "mean_tokens");
    refused(&["embed", model, "a"], &["mean_tokens", "1_Pooling"]);
    std::fs::write(folder.join("modules.json"), "{}").unwrap();
    refused(&["embed", model, "a"], &["modules.json"]);
}

#[test]
fn documents_are_ranked() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let folder = home.join("tiny-reranker");
    std::fs::create_dir(&folder).unwrap();
    for entry in std::fs::read_dir(DEMO).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    // A token that the model never uses is called yes.
    let tokenizer = std::fs::read_to_string(folder.join("tokenizer.json")).unwrap();
    let tokenizer = tokenizer.replace("\"<|video_pad|>\"", "\"yes\"");
    std::fs::write(folder.join("tokenizer.json"), tokenizer).unwrap();
    let run = |args: &[&str]| {
        let words = [
            "rerank",
            folder.to_str().unwrap(),
            "--device",
            "cpu",
            "-q",
            "What is it?",
        ];
        let out = nq(home, &[&words[..], args].concat());
        assert!(out.status.success(), "{}", stderr(&out));
        assert!(!stderr(&out).contains("nothing marks this model as a reranker"));
        stdout(&out)
    };
    let report: Value = serde_json::from_str(&run(&[&["--json"][..], &TEXTS].concat())).unwrap();
    let results = report["results"].as_array().unwrap();
    let score = |r: &Value| r["relevance_score"].as_f64().unwrap();
    assert!(results.len() == 3 && results.is_sorted_by(|a, b| score(a) >= score(b)));
    assert!(results.iter().all(|r| (0.0..=1.0).contains(&score(r))));
    // A program gets the same scores.
    let mut reranker = library(&folder).reranker().unwrap();
    let scores = reranker.score(DEFAULT_TASK, "What is it?", &TEXTS).unwrap();
    for r in results {
        let made = f64::from(scores[r["index"].as_u64().unwrap() as usize]);
        assert!((made - score(r)).abs() < 1e-6);
    }
    let lines = run(&[&["--top", "2", "--in-order"][..], &TEXTS].concat());
    let best: Vec<u64> = results[..2]
        .iter()
        .map(|r| r["index"].as_u64().unwrap())
        .collect();
    let printed: Vec<u64> = lines
        .lines()
        .map(|l| l.split('\t').nth(1).unwrap().parse().unwrap())
        .collect();
    assert_eq!(printed, [best[0].min(best[1]), best[0].max(best[1])]);
}
