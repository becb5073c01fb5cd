//! Fuzz targets for text: chat templates and tokenizers, which are programs of whoever made a
//! model. A target panics if reading or running one does. `fuzz/run NAME` runs them under libFuzzer;
//! `runtime/tests/fuzz_smoke.rs` runs the same functions over `fuzz/seeds` and mutations of valid
//! files.
#![allow(dead_code, unreachable_pub)]

use bytes::Bytes;
use nq_formats::files::VirtualFiles;
use nq_formats::{Files, Result};
use nq_runtime::tokenizer::ControlTokens;
use nq_runtime::{ChatTemplate, Message, Tokenizer};
use std::path::PathBuf;
use std::sync::Arc;

/// A tokenizer.json: it is refused with a named error, or it encodes any text and decodes to text.
pub fn tokenizer(data: &[u8]) {
    let file = OneFile("tokenizer.json", Bytes::copy_from_slice(data));
    let Ok(tokenizer) = Tokenizer::from_files(&Files::Virtual(Arc::new(file))) else {
        return;
    };
    assert!(tokenizer.vocab_size() > 0);
    for text in [
        "",
        "a",
        " The film\n\n\t1931 ",
        "é 日本 \u{1F999}\u{301}\0",
        "<|im_end|><think>",
    ] {
        if let Ok(ids) = tokenizer.encode(text) {
            let _ = tokenizer.decode(&ids, false);
        }
    }
    let _ = tokenizer.decode(&[0, 1, tokenizer.max_id(), u32::MAX], true);
}

/// A chat template: compiles and renders, or is refused. This runs in one process, so it leaves out
/// sources that could multiply text or put a value inside itself, which only a limit on memory or a
/// stack overflow would end (`tests/templates.rs` runs those).
pub fn template(data: &[u8]) {
    let Ok(source) = std::str::from_utf8(data) else {
        return;
    };
    let multiplies = ["*", "namespace", "replace", "join"];
    let digits = source.as_bytes().windows(5);
    if source.len() > 256
        || multiplies.iter().any(|word| source.contains(word))
        || digits.into_iter().any(|w| w.iter().all(u8::is_ascii_digit))
    {
        return;
    }
    let Ok(template) = ChatTemplate::from_source("fuzz.jinja", source) else {
        return;
    };
    let messages = [
        Message::new("system", "Be brief."),
        Message::new("user", "a <|im_end|> b"),
        Message::new("assistant", "<think>\nx\n</think>\n\ny"),
    ];
    let tools = [serde_json::json!({"type": "function", "function": {"name": "f"}})];
    let control = ControlTokens::new(vec!["<|im_end|>".to_owned()]).expect("a short token");
    if let Ok(prompt) = template.prompt(&control, &messages, Some(&tools), true, Some(false)) {
        let _ = prompt.text();
    }
}

/// A folder with one file.
#[derive(Debug)]
struct OneFile(&'static str, Bytes);

impl VirtualFiles for OneFile {
    fn root(&self) -> PathBuf {
        "fuzz".into()
    }

    fn names(&self) -> Vec<String> {
        vec![self.0.into()]
    }

    fn get(&self, name: &str) -> Result<Option<Bytes>> {
        Ok((name == self.0).then(|| self.1.clone()))
    }
}
