//! Calibration texts: sampled from the model itself, or read from a file.
//!
//! A model's own text, drawn at temperature 1, follows its distribution by definition,
//! needs no data set and never runs out. Half of the sequences begin a document, the other half
//! answer a prompt from a list of short ones in many fields and languages.

use crate::error::{Error, Result};
use nq_formats::nq::CalibrationRecord;
use nq_formats::{Files, Progress, Unit, hash, human_bytes};
use nq_kernels::rng::Philox;
use nq_model::ModelConfig;
use nq_runtime::batch::{BatchRequest, sample_sequences};
use nq_runtime::images::SequenceImages;
use nq_runtime::{
    ChatTemplate, Engine, Hidden, ImagePrompt, Message, PlacedImage, SamplingParams, SessionSpec,
    Tokenizer,
};
use serde::Deserialize;
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Most tokens of a calibration sequence.
pub const SEQUENCE: usize = 512;

/// Calibration tokens of a model that is quantized fast: a small one, or on a GPU.
pub const CALIBRATION_TOKENS: usize = 32_768;
/// Least calibration tokens by default, if no input is wider.
const LEAST_TOKENS: usize = 8192;
/// Tokens times parameters that larger models are calibrated on by default.
const WORK: f64 = 7.5e12;
/// Most tokens that quality is measured on by default.
pub(crate) const EVAL_TOKENS: usize = 8192;

/// Calibration tokens by default on a CPU, where the time grows with tokens and parameters: fewer for larger models,
/// but at least as many as their widest input has elements.
pub(crate) fn default_tokens(config: &ModelConfig) -> usize {
    let products = config.layers().flat_map(|layer| layer.products());
    let widest = products.map(|p| p.inputs(config)).max().unwrap_or(0);
    let affordable = (WORK / config.parameters().max(1) as f64) as usize;
    let tokens = affordable
        .clamp(LEAST_TOKENS, CALIBRATION_TOKENS)
        .max(widest);
    tokens / SEQUENCE * SEQUENCE
}

/// Source of calibration text.
#[derive(Clone, Debug, PartialEq)]
pub enum CalibrationSource {
    /// Sampled from the model.
    SelfSampled,
    /// A .txt file, or a .jsonl file of objects with `text` or `messages`.
    File(PathBuf),
    /// Chats with images as the model reads them: each is a sequence.
    Prompts {
        /// The name of their file.
        name: String,
        /// Their tokens, and rows of images as the model's own tower makes them.
        prompts: Vec<ImagePrompt>,
    },
}

/// Sequences of token ids: of one length if they are text, and of up to this length if they hold images.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sequences {
    /// `self` or a file name.
    pub name: String,
    /// The ids.
    pub ids: Vec<Vec<u32>>,
    /// The images of each sequence; empty if none has any.
    pub images: Vec<Vec<PlacedImage>>,
}

impl Sequences {
    /// Number of tokens of all sequences.
    pub(crate) fn tokens(&self) -> usize {
        self.ids.iter().map(Vec::len).sum()
    }

    /// SHA-256 over all ids as little-endian u32, and digests of images.
    pub(crate) fn sha256(&self) -> String {
        let ids = self.ids.iter().flatten().flat_map(|i| i.to_le_bytes());
        let seen = self.images.iter().flatten();
        let bytes: Vec<u8> = ids.chain(seen.flat_map(|p| p.image.digest)).collect();
        hash::sha256_hex(&bytes)
    }

    /// Puts the rows of images in the places of their tokens in `hidden`, the embeddings of all ids.
    ///
    /// # Errors
    /// Rows of another width.
    pub(crate) fn show(&self, hidden: Hidden) -> Result<Hidden> {
        if self.images.is_empty() {
            return Ok(hidden);
        }
        let width = hidden.data.len() / self.tokens().max(1);
        let placed = self.images.iter().map(|p| SequenceImages::new(p, width));
        Ok(hidden.showing(placed.collect::<nq_runtime::Result<_>>()?)?)
    }

    /// Their description for a file's record.
    pub(crate) fn record(&self) -> CalibrationRecord {
        CalibrationRecord {
            name: self.name.clone(),
            sha256: self.sha256(),
            tokens: self.tokens() as u64,
        }
    }
}

/// The token that begins a document.
const DOCUMENT: &str = "<|endoftext|>";

/// Prompts that half of the self-sampled sequences answer, one per line.
pub(crate) const PROMPTS: &str = include_str!("prompts.txt");

/// Most sequences in one forward while sampling, and the most bytes of their KV cache.
const SLOTS: usize = 64;
const KV_BYTES: usize = 1 << 30;

/// Least rows of one forward while sampling: prompts are fed in parts of this size.
pub(crate) const SAMPLING_ROWS: usize = 256;

/// A model's tokenizer and chat template, for making prompts.
pub struct Prompter {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    document: u32,
}

impl Prompter {
    /// Reads them from a checkpoint's files. `eos` is used if the tokenizer has no
    /// `<|endoftext|>`.
    ///
    /// # Errors
    /// Errors of [`Tokenizer::from_files`]; a tokenizer with another vocabulary; no token to begin a
    /// document with.
    pub fn new(files: &Files, vocab: usize, eos: &[u32], progress: &dyn Progress) -> Result<Self> {
        let tokenizer = Tokenizer::from_files(files)?;
        tokenizer.check_vocab(vocab)?;
        let document = tokenizer.token_id(DOCUMENT).or(eos.first().copied());
        let document = document.ok_or_else(|| Error::Text {
            path: files.root(),
            why: format!("expected a token {DOCUMENT} or an eos_token_id, found neither"),
        })?;
        let template = ChatTemplate::from_files(files)
            .map_err(|e| {
                progress.note(&format!(
                    "{e}: calibration samples documents only, no answers"
                ));
            })
            .ok();
        Ok(Prompter {
            tokenizer,
            template,
            document,
        })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// `n` beginnings: documents alternate with prompts from the list, in an order determined
    /// by `seed`.
    ///
    /// # Errors
    /// If the template or the tokenizer fails.
    pub fn beginnings(&self, n: usize, seed: u64) -> Result<Vec<Vec<u32>>> {
        let mut prompts: Vec<&str> = PROMPTS.lines().filter(|l| !l.is_empty()).collect();
        let mut rng = Philox::new(seed, u64::MAX);
        for i in (1..prompts.len()).rev() {
            prompts.swap(i, rng.next_u32() as usize % (i + 1));
        }
        (0..n)
            .map(|i| match &self.template {
                Some(template) if i % 2 == 1 => {
                    let prompt = prompts[i / 2 % prompts.len()];
                    let chat = [Message::new("user", prompt)];
                    let text = template.render(&chat, None, true, None)?;
                    Ok(self.tokenizer.encode(&text)?)
                }
                _ => Ok(vec![self.document]),
            })
            .collect()
    }
}

/// Number of sequences to sample together: as many as fit `KV_BYTES`, and as the engine can sample
/// in one step, if it has such a limit ([`Engine::sampled_together`]).
pub(crate) fn sampling_slots(
    config: &ModelConfig,
    n: usize,
    length: usize,
    together: Option<usize>,
) -> usize {
    let position = 4 * config.num_hidden_layers * config.kv_dim(); // keys and values, f16
    n.min(together.unwrap_or(SLOTS))
        .min(KV_BYTES / (position * length).max(1))
        .max(1)
}

/// Samples `n` sequences of `length` tokens from `engine` at temperature 1.
///
/// # Errors
/// Errors of the engine, the template or the tokenizer.
pub(crate) fn sample(
    engine: &dyn Engine,
    prompter: &Prompter,
    stage: &str,
    n: usize,
    length: usize,
    seed: u64,
    progress: &dyn Progress,
) -> Result<Sequences> {
    let prompts = prompter.beginnings(n, seed)?;
    let slots = sampling_slots(engine.config(), n, length, engine.sampled_together());
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
    let mut session = engine.session(SessionSpec {
        slots,
        ctx: length,
        max_rows: slots.max(longest).max(SAMPLING_ROWS),
        ..SessionSpec::default()
    })?;
    let prompted: usize = prompts.iter().map(|p| p.len().min(length)).sum();
    progress.begin(stage, (n * length - prompted) as u64, Unit::Tokens);
    let ids = sample_sequences(
        session.as_mut(),
        &BatchRequest {
            prompts: &prompts,
            length,
            stop: &[],
            sampling: SamplingParams {
                seed,
                ..SamplingParams::default()
            },
        },
        progress,
    );
    progress.end();
    Ok(Sequences {
        name: "self".into(),
        ids: ids?,
        images: Vec::new(),
    })
}

/// Reads sequences of `length` tokens from a text: all of them if there are at most `n`,
/// otherwise `n` of them spread evenly.
///
/// # Errors
/// [`Error::Format`] or [`Error::Text`] if the file cannot be read, is too long, is not UTF-8, has a line
/// without `text` or `messages`, or is shorter than one sequence; errors of the model's template.
pub fn read(path: &Path, prompter: &Prompter, n: usize, length: usize) -> Result<Sequences> {
    let text = text(path)?;
    let fail = |why: String| Error::Text {
        path: path.into(),
        why,
    };
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("");
    let tokens = match extension {
        "jsonl" => {
            let mut tokens = Vec::new();
            for (i, line) in text.lines().enumerate() {
                if line.trim().is_empty() {
                    continue;
                }
                let line = serde_json::from_str::<TextLine>(line);
                let line = line.map_err(|e| fail(format!("line {}: {e}", i + 1)))?;
                match line {
                    TextLine::Text { text } => {
                        tokens.push(prompter.document);
                        tokens.extend(prompter.tokenizer.encode(&text)?);
                    }
                    TextLine::Chat { messages, .. } if messages.iter().any(holds_image) => {
                        let why = "an image: only `nq quantize --calib` reads those";
                        return Err(fail(format!("line {}: {why}", i + 1)));
                    }
                    TextLine::Chat { messages, tools } => {
                        let template = prompter.template.as_ref().ok_or_else(|| {
                            fail(format!(
                                "line {}: messages need a chat template, which the model has not",
                                i + 1
                            ))
                        })?;
                        let control = prompter.tokenizer.control_tokens();
                        let tools = tools.as_deref();
                        let chat = template.prompt(control, &messages, tools, false, None);
                        let chat = chat.map_err(|e| fail(format!("line {}: {e}", i + 1)))?;
                        tokens.extend(prompter.tokenizer.encode_prompt(&chat)?);
                    }
                }
            }
            tokens
        }
        "txt" => prompter.tokenizer.encode(&text)?,
        other => {
            return Err(fail(format!(
                "expected a .txt or .jsonl file, found {other:?}"
            )));
        }
    };
    let whole = tokens.len() / length;
    if whole == 0 {
        return Err(fail(format!(
            "expected at least one sequence of {length} tokens, found {}",
            tokens.len()
        )));
    }
    let n = n.min(whole);
    let ids = (0..n)
        .map(|i| {
            let at = i * whole / n * length;
            tokens[at..at + length].to_vec()
        })
        .collect();
    let name = path.file_name().unwrap_or(path.as_os_str());
    Ok(Sequences {
        name: name.to_string_lossy().into_owned(),
        ids,
        images: Vec::new(),
    })
}

/// A sequence of each prompt, of its first `length` tokens at most, and of as many prompts as have `tokens` tokens
/// together. An image that would be cut is left out with what stands behind it.
///
/// # Errors
/// [`Error::Text`] if no image is whole in its sequence.
pub(crate) fn seen(
    name: &str,
    prompts: &[ImagePrompt],
    tokens: usize,
    length: usize,
) -> Result<Sequences> {
    let mut found = Sequences {
        name: name.into(),
        ..Sequences::default()
    };
    for prompt in prompts {
        if found.tokens() >= tokens {
            break;
        }
        let room = length.min(prompt.ids().len());
        let cut = prompt.images().iter().find(|image| image.end() > room);
        let end = cut.map_or(room, |image| image.at.min(room));
        if end > 0 {
            let whole = prompt.images().iter().filter(|image| image.end() <= end);
            found.images.push(whole.cloned().collect());
            found.ids.push(prompt.ids()[..end].to_vec());
        }
    }
    if found.images.iter().all(Vec::is_empty) {
        return Err(Error::Text {
            path: name.into(),
            why: format!(
                "expected an image within the first {length} tokens of a chat, found none"
            ),
        });
    }
    Ok(found)
}

/// True if one of the parts of a message is an image.
pub fn holds_image(message: &Message) -> bool {
    let parts = message.content.as_array().into_iter().flatten();
    let mut kinds = parts.filter_map(|part| part["type"].as_str());
    kinds.any(|kind| ["image", "image_url"].contains(&kind))
}

/// A line of a .jsonl file.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "an object with a string \"text\", or with \"messages\""
)]
enum TextLine {
    Text {
        text: String,
    },
    Chat {
        messages: Vec<Message>,
        #[serde(default)]
        tools: Option<Vec<Value>>,
    },
}

/// Most bytes of a text.
const MOST: u64 = 1_000_000_000;

/// A whole text of at most 1 GB.
///
/// # Errors
/// [`Error::Format`] if it cannot be read; [`Error::Text`] if it is longer or not UTF-8.
pub(crate) fn text(path: &Path) -> Result<String> {
    let fail = |why: String| Error::Text {
        path: path.into(),
        why,
    };
    let failed = |e| nq_formats::Error::io(path, "read", e);
    let file = File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    // A length that is known is compared before it is read.
    let mut length = file.metadata().map_err(failed)?.len();
    if length <= MOST {
        let read = file.take(MOST + 1).read_to_end(&mut bytes);
        length = read.map_err(failed)? as u64;
    }
    if length > MOST {
        let most = human_bytes(MOST);
        return Err(fail(format!("expected at most {most}, found more")));
    }
    String::from_utf8(bytes).map_err(|e| fail(format!("expected UTF-8, found {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_formats::Checkpoint;
    use nq_model::Preset;
    use nq_model::vision::ImageTokens;
    use nq_runtime::ImageRows;
    use std::sync::Arc;

    fn demo() -> Files {
        let root = nq_testkit::demo();
        Files::Folder(root)
    }

    fn prompter() -> Prompter {
        Prompter::new(&demo(), 4096, &[], &()).unwrap()
    }

    #[test]
    fn larger_models_are_calibrated_on_fewer_tokens() {
        let tokens = |name: &str| default_tokens(&Preset::find(name).unwrap().config());
        let expected = [12_288, 8192, 12_288];
        let found = ["qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"].map(tokens);
        assert_eq!(found, expected);
        let demo = Checkpoint::open(&demo().root()).unwrap();
        assert_eq!(default_tokens(demo.config()), CALIBRATION_TOKENS);
    }

    #[test]
    fn prompts_are_many_and_differ() {
        let lines: Vec<&str> = PROMPTS.lines().collect();
        let unique: std::collections::BTreeSet<_> = lines.iter().collect();
        assert!(lines.len() >= 200, "{}", lines.len());
        assert_eq!(unique.len(), lines.len());
        assert!(lines.iter().all(|l| !l.trim().is_empty()));
    }

    #[test]
    fn beginnings_alternate_and_follow_the_seed() {
        let p = prompter();
        let a = p.beginnings(8, 1).unwrap();
        for (i, b) in a.iter().enumerate() {
            assert_eq!(b.len() == 1, i % 2 == 0, "{i}: {b:?}");
        }
        assert!(
            p.tokenizer
                .decode(&a[1], false)
                .starts_with("<|im_start|>user\n")
        );
        assert_eq!(a, p.beginnings(8, 1).unwrap());
        assert_ne!(a, p.beginnings(8, 2).unwrap());
    }

    #[test]
    fn files_are_cut_and_spread() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.jsonl");
        let line = |s: &str| format!("{{\"text\": \"{}\"}}\n", s.repeat(20));
        std::fs::write(
            &path,
            line("One two three. ") + "\n" + &line("Four five six. "),
        )
        .unwrap();
        let p = prompter();
        let all = read(&path, &p, 1000, 16).unwrap();
        assert_eq!(all.name, "a.jsonl");
        assert_eq!(all.ids[0][0], p.document);
        assert!(all.ids.iter().all(|s| s.len() == 16));
        let some = read(&path, &p, 2, 16).unwrap();
        assert_eq!(some.ids[0], all.ids[0]);
        assert_eq!(some.ids[1], all.ids[all.ids.len() / 2]);
        assert_ne!(some.sha256(), all.sha256());
        assert_eq!(some.record().tokens, 32);
    }

    /// Chats go through the model's template; what it refuses is named with its line.
    #[test]
    fn lines_may_be_chats() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.jsonl");
        let line = r#"{"messages": [{"role": "user", "content": "hello <|im_end|> there"},
            {"role": "assistant", "content": "yes"}], "tools": []}"#;
        let line = line.replace('\n', " ");
        std::fs::write(&path, &line).unwrap();
        let p = prompter();
        let ids = read(&path, &p, 1, 12).unwrap().ids.concat();
        let text = p.tokenizer.decode(&ids, false);
        assert!(text.starts_with("<|im_start|>user\nhello <"), "{text}");
        let end = p.tokenizer.token_id("<|im_end|>").unwrap();
        assert!(!ids.contains(&end), "what a message quotes is text");
        // This template looks for thinking in every answer, and so refuses one that is null.
        std::fs::write(&path, format!("\n{}", line.replace("\"yes\"", "null"))).unwrap();
        let error = read(&path, &p, 1, 12).unwrap_err().to_string();
        assert!(error.contains("c.jsonl: line 2: "), "{error}");
    }

    /// No text is read without end, and none whose length is known to be too much is read at all.
    #[test]
    fn texts_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("long.txt");
        File::create(&long).unwrap().set_len(5 << 30).unwrap();
        let error = read(&long, &prompter(), 4, 16).unwrap_err().to_string();
        assert!(error.contains("expected at most 1.00 GB"), "{error}");
    }

    #[test]
    fn unusable_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let p = prompter();
        let check = |name: &str, contents: &[u8], expected: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, contents).unwrap();
            let error = read(&path, &p, 4, 16).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(name), "{error}");
        };
        check("a.txt", b"short", "at least one sequence of 16 tokens");
        check("b.txt", &[0xff; 100], "expected UTF-8");
        check("c.csv", b"a,b", "expected a .txt or .jsonl file");
        check("d.jsonl", b"{\"text\": \"a\"}\n{\"txt\": 1}\n", "line 2");
        let seen =
            r#"{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}"#;
        check("e.jsonl", seen.as_bytes(), "line 1: an image");
        let missing = read(&dir.path().join("no.txt"), &p, 4, 16).unwrap_err();
        assert!(missing.to_string().contains("no.txt"));
    }

    /// Chats are cut to the length of a sequence, and an image that would be cut goes with what is behind it.
    #[test]
    fn chats_with_images_are_sequences_of_their_own() {
        let tokens = ImageTokens {
            pad: 1,
            start: 2,
            end: 3,
        };
        let image = |digest| ImageRows {
            rows: vec![0.5; 4 * 8],
            height: 2,
            width: 2,
            digest: [digest; 32],
        };
        let prompt = |before: usize, digest| {
            let ids = [&vec![7; before][..], &[2, 1, 1, 1, 1, 3], &[8; 4]].concat();
            let image = Arc::new(image(digest));
            let at = before + 1;
            ImagePrompt::new(ids, vec![PlacedImage { at, image }], tokens).unwrap()
        };
        let all = [prompt(3, 1), prompt(11, 2), prompt(2, 3)];
        let found = seen("c.jsonl", &all, 100, 10).unwrap();
        let lengths: Vec<usize> = found.ids.iter().map(Vec::len).collect();
        assert_eq!(lengths, [10, 10, 10]);
        let images: Vec<usize> = found.images.iter().map(Vec::len).collect();
        assert_eq!(images, [1, 0, 1]);
        let found = seen("c.jsonl", &all, 14, 14).unwrap();
        assert_eq!(found.ids, [all[0].ids(), &all[1].ids()[..12]]);
        assert_eq!(found.images[1], []);
        let other = seen("c.jsonl", &[prompt(3, 9)], 11, 14).unwrap();
        let first = seen("c.jsonl", &all[..1], 11, 14).unwrap();
        assert_eq!(other.ids, first.ids);
        assert_ne!(other.sha256(), first.sha256());
        let error = seen("c.jsonl", &all[1..2], 11, 14).unwrap_err().to_string();
        assert!(
            error.contains("c.jsonl: expected an image within"),
            "{error}"
        );
    }
}
