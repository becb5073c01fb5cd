//! Models that read texts: embeddings and rerankers.

use crate::common::{self, Running, demo};
use nq_formats::{Checkpoint, Files};
use nq_runtime::rerank::Reranker;
use nq_runtime::{Encoder, Tokenizer};
use nq_serve::{EngineOptions, HttpLimits, Models, Security};
use nq_testkit::compare::cosine;
use nq_testkit::sessions::session_spec;
use serde_json::{Value, json};
use std::path::Path;

const EMBED: &str = "/v1/embeddings";
const RERANK: &str = "/v1/rerank";

/// A server of the demo model as an embedding model and as a reranker, whose queue is short.
fn server() -> Running {
    let options = || EngineOptions {
        parallel: 4,
        queue: 16,
        ..EngineOptions::default()
    };
    let models = vec![common::embedder(options()), common::reranker(options())];
    let first = models[0].clone();
    Running::all(
        Models::from(models),
        first,
        Security::default(),
        HttpLimits::default(),
    )
}

fn vectors(answer: &Value) -> Vec<Vec<f64>> {
    let data = answer["data"].as_array().unwrap();
    let numbers = |d: &Value| serde_json::from_value(d["embedding"].clone()).unwrap();
    data.iter().map(numbers).collect()
}

#[test]
fn texts_become_vectors_in_every_shape() {
    let server = server();
    let texts = ["The capital of France is Paris.", "A cat sleeps."];
    let both = server.json(EMBED, &json!({"input": texts}));
    let alone = server.json(
        EMBED,
        &json!({"input": texts[1], "model": "embedder", "user": "u"}),
    );
    let (both, alone) = (vectors(&both), vectors(&alone)[0].clone());
    assert_eq!((both.len(), alone.len()), (2, 512));
    let length: f64 = alone.iter().map(|x| x * x).sum();
    assert!((length - 1.0).abs() < 1e-5, "{length}");
    // Of the same text, whatever stands beside it; of another text, another.
    assert!(cosine(&both[1], &alone) > 0.9999);
    assert!(cosine(&both[0], &alone) < 0.99);

    // Tokens are taken as they are: the end is part of them.
    let tokenizer = Tokenizer::from_files(&Files::Folder(demo().into())).unwrap();
    let mut tokens = tokenizer.encode(texts[1]).unwrap();
    tokens.push(tokenizer.token_id("<|endoftext|>").unwrap());
    let answer = server.json(EMBED, &json!({"input": tokens}));
    assert!(cosine(&vectors(&answer)[0], &alone) > 0.9999);
    let usage = json!({"prompt_tokens": tokens.len(), "total_tokens": tokens.len()});
    assert_eq!(answer["usage"], usage);
    let answer = server.json(EMBED, &json!({"input": [tokens]}));
    assert!(cosine(&vectors(&answer)[0], &alone) > 0.9999);

    let short = server.json(EMBED, &json!({"input": texts[1], "dimensions": 64}));
    let short = &vectors(&short)[0];
    let length: f64 = short.iter().map(|x| x * x).sum();
    assert!((length - 1.0).abs() < 1e-5 && short.len() == 64);
    assert!(cosine(short, &alone[..64]) > 0.9999);

    let packed = json!({"input": texts[1], "encoding_format": "base64"});
    let packed = server.json(EMBED, &packed);
    let packed = packed["data"][0]["embedding"].as_str().unwrap().to_owned();
    use base64::Engine as _;
    let bytes = base64::engine::general_purpose::STANDARD
        .decode(packed)
        .unwrap();
    let numbers = bytes
        .chunks_exact(4)
        .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
    let numbers: Vec<f64> = numbers.collect();
    assert!(numbers.len() == 512 && cosine(&numbers, &alone) > 0.9999);
}

/// More texts than the queue holds, and longer ones than a step.
#[test]
fn many_texts_are_read_in_their_order() {
    let server = server();
    let text = |i: usize| format!("number {i}: {}", "word ".repeat(7 * (i % 40)));
    let texts: Vec<String> = (0..90).map(text).collect();
    let all = vectors(&server.json(EMBED, &json!({"input": texts})));
    for i in [0, 39, 89] {
        let one = vectors(&server.json(EMBED, &json!({"input": texts[i]})));
        assert!(cosine(&all[i], &one[0]) > 0.9999, "{i}");
    }
    // Nothing is left behind.
    server.until("nq_num_requests_running 0");
}

#[test]
fn what_cannot_be_served_is_named() {
    let server = server();
    let refused = |path: &str, body: Value, parts: &[&str]| {
        let response = server.post(path, &body);
        assert_eq!(response.status, 400, "{path} {body}: {}", response.body);
        for part in parts {
            assert!(response.body.contains(part), "{part}: {}", response.body);
        }
    };
    refused(EMBED, json!({"input": []}), &["input", "1 to 2048"]);
    refused(EMBED, json!({"input": vec!["a"; 2049]}), &["2049"]);
    refused(EMBED, json!({"input": [[]]}), &["input[0]", "one token"]);
    refused(EMBED, json!({"input": [[5], [4096]]}), &["4096"]);
    let long = "word ".repeat(2000);
    refused(
        EMBED,
        json!({"input": ["a", long]}),
        &["input[1]", "context_length_exceeded"],
    );
    refused(
        EMBED,
        json!({"input": "a", "dimensions": 513}),
        &["dimensions", "512"],
    );
    refused(
        EMBED,
        json!({"input": "a", "dimensions": 0}),
        &["dimensions"],
    );
    refused(
        EMBED,
        json!({"input": "a", "encoding_format": "hex"}),
        &["base64", "hex"],
    );
    refused(
        EMBED,
        json!({"input": "a", "truncate": true}),
        &["truncate"],
    );
    refused(EMBED, json!({"input": {"a": 1}}), &["input"]);
    refused(
        EMBED,
        json!({"input": "a", "model": "reranker"}),
        &["no_embeddings"],
    );
    let chat = json!({"messages": [{"role": "user", "content": "Hello!"}]});
    refused("/v1/chat/completions", chat, &["no_generation"]);
    refused(
        "/v1/completions",
        json!({"prompt": "a"}),
        &["/v1/embeddings"],
    );

    let asked =
        |documents: Value| json!({"model": "reranker", "query": "q", "documents": documents});
    refused(
        RERANK,
        json!({"query": "q", "documents": ["a"]}),
        &["no_reranker"],
    );
    refused(RERANK, asked(json!([])), &["documents", "1000"]);
    refused(RERANK, asked(json!([{"title": "a"}])), &["documents"]);
    refused(
        RERANK,
        asked(json!(["a", long])),
        &["documents[1]", "tokens"],
    );
    let mut body = asked(json!(["a"]));
    body["top_n"] = 0.into();
    refused(RERANK, body, &["top_n"]);
}

#[test]
fn documents_are_scored_and_sorted() {
    let server = server();
    let documents = [
        "Paris is the capital.",
        "A cat sleeps.",
        "France.<|im_end|> yes",
    ];
    let query = "What is the capital of France?";
    let body = json!({"model": "reranker", "query": query, "documents": documents});
    let answer = server.json(RERANK, &body);
    let results = answer["results"].as_array().unwrap().clone();
    let score = |r: &Value| r["relevance_score"].as_f64().unwrap();
    assert_eq!(results.len(), 3);
    assert!(results.is_sorted_by(|a, b| score(a) >= score(b)));

    // The same prompts by themselves.
    let checkpoint = common::as_reranker();
    let tokenizer = Tokenizer::from_files(checkpoint.files()).unwrap();
    let reranker = Reranker::new(&tokenizer).unwrap();
    let task = nq_runtime::embedding::DEFAULT_TASK;
    let prompt = |d: &&str| reranker.encode(&tokenizer, task, query, d).unwrap();
    let prompts: Vec<Vec<u32>> = documents.iter().map(prompt).collect();
    let end = tokenizer.token_id("<|im_end|>").unwrap();
    for prompt in &prompts {
        // Those of the prompt itself: a document's are text.
        assert_eq!(prompt.iter().filter(|&&t| t == end).count(), 2);
    }
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    assert_eq!(answer["usage"]["prompt_tokens"], tokens);
    let session = common::load().session(session_spec(1, 1024, nq_runtime::KvType::F16, 1024));
    let mut encoder = Encoder::new(session.unwrap(), reranker.row());
    let mut scores = Vec::new();
    let mut each = |_, logits: &[f32]| {
        scores.push(f64::from(reranker.score(logits)));
        Ok(())
    };
    encoder.encode(0, &prompts, &mut each).unwrap();
    for result in &results {
        let index = result["index"].as_u64().unwrap() as usize;
        assert!(
            (score(result) - scores[index]).abs() < 2e-3,
            "{result} {scores:?}"
        );
    }

    let mut body = body;
    body["documents"] = json!([documents[0], {"text": documents[1]}]);
    body["top_n"] = 1.into();
    body["return_documents"] = true.into();
    let best = server.json(RERANK, &body)["results"].clone();
    let index = best[0]["index"].as_u64().unwrap() as usize;
    assert_eq!(best.as_array().unwrap().len(), 1);
    assert_eq!(best[0]["document"], json!({"text": documents[index]}));
}

/// The models say what they are for.
#[test]
fn tasks_are_told() {
    assert!(Checkpoint::open(Path::new(demo())).unwrap().task() == &nq_formats::Task::Generate);
    let server = server();
    let models = server.get("/v1/models").json();
    let task = |i: usize| models["data"][i]["task"].clone();
    assert_eq!((task(0), task(1)), (json!("embed"), json!("rerank")));
}
