//! The added tokens of a tokenizer.json and the tokenizer_config.json beside it: what nq reads of both, which of their
//! tokens end an answer, and what is left over.
//!
//! Both files describe the added tokens. Where they differ, transformers takes the flags (`special`, `lstrip`, ...)
//! of tokenizer_config.json and the ids of tokenizer.json, and so does nq.

use super::{TOKENIZER, around};
use crate::error::{Error, Result};
use crate::files::Files;
use crate::keys;
use crate::left_over::LeftOver;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The name of the file beside tokenizer.json.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Control tokens by which chat templates end a turn.
#[rustfmt::skip]
const TURN_ENDS: [&str; 8] = [
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<|end_of_text|>",
    "<|endoftext|>",
];

/// The templates that nq chooses from, if there are several.
const TEMPLATES: [&str; 2] = ["default", "tool_use"];

/// The folder of further templates.
const TEMPLATES_BESIDE: &str = "additional_chat_templates/";

/// An added token, in either file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
struct Added {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    /// If absent, true of tokens that are not special.
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

impl Added {
    fn whole(mut self) -> Self {
        self.normalized.get_or_insert(!self.special);
        self
    }
}

#[derive(Deserialize)]
struct Numbered {
    id: u32,
    #[serde(flatten)]
    token: Added,
}

/// What both files say.
pub(crate) struct Described {
    /// `tokenizer_config.json`; empty where there is none, or none that can be read, which opening the chat template
    /// reports.
    config: Map<String, Value>,
    /// The added tokens; `None` without a tokenizer.json that can be read, which opening the tokenizer reports.
    added: Option<Vec<Numbered>>,
    /// True if tokenizer_config.json has changed some.
    changed: bool,
    /// What it says of added tokens that are not those of tokenizer.json.
    left: Vec<LeftOver>,
}

const ABSENT: &str = "tokenizer.json has no such added token, and it stays text";

/// The text of a token: a string, or an object that has it as `content`.
fn text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

impl Described {
    /// Reads both files.
    ///
    /// # Errors
    /// [`Error::Malformed`] for an added token that is none; [`Error::Unsupported`] if that file asks for control tokens to be text; [`Error::Io`] for files that cannot be
    /// opened.
    pub(crate) fn read(files: &Files) -> Result<Self> {
        #[derive(Deserialize)]
        struct ConfigFile {
            #[serde(default)]
            added_tokens: Vec<Numbered>,
        }
        let config = files.get(TOKENIZER_CONFIG)?;
        let config = config.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let json = files.get(TOKENIZER)?;
        let file = json.and_then(|bytes| serde_json::from_slice::<ConfigFile>(&bytes).ok());
        let mut described = Described {
            config: config.unwrap_or_default(),
            added: file.map(|file| file.added_tokens),
            changed: false,
            left: Vec::new(),
        };
        if described.config.get("split_special_tokens") == Some(&Value::Bool(true)) {
            return Err(Error::Unsupported {
                path: files.path(TOKENIZER_CONFIG),
                what: "split_special_tokens true".into(),
                why: "control tokens would be text".into(),
            });
        }
        described.apply(files)?;
        Ok(described)
    }

    /// Gives the added tokens the flags of `added_tokens_decoder`.
    fn apply(&mut self, files: &Files) -> Result<()> {
        let said = self.config.get("added_tokens_decoder");
        let said = said.and_then(Value::as_object).into_iter().flatten();
        let Some(added) = &mut self.added else {
            return Ok(());
        };
        let texts = added.iter().map(|a| a.token.content.clone());
        let places: BTreeMap<String, usize> = texts.zip(0..).collect();
        for (id, token) in said {
            let token = Added::deserialize(token).map_err(|e| Error::Malformed {
                path: files.path(TOKENIZER_CONFIG),
                what: format!("added_tokens_decoder {id}"),
                expected: "an added token".into(),
                found: e.to_string(),
            })?;
            let token = token.whole();
            let Some(own) = places.get(&token.content).map(|&place| &mut added[place]) else {
                let name = format!(
                    "{TOKENIZER_CONFIG}: added_tokens_decoder {id} {:?}",
                    token.content
                );
                self.left.push(LeftOver::new(name, ABSENT));
                continue;
            };
            if own.id.to_string() != *id {
                let name = format!("{TOKENIZER_CONFIG}: added_tokens_decoder {id}");
                let why = format!("{TOKENIZER} has {:?} as {}", token.content, own.id);
                self.left.push(LeftOver::new(name, why));
            }
            if own.token.clone().whole() != token {
                own.token = token;
                self.changed = true;
            }
        }
        Ok(())
    }

    /// Ids of the tokens that end an answer: the `eos_token` of tokenizer_config.json, and those of [`TURN_ENDS`]
    /// that the chat template writes.
    ///
    /// # Errors
    /// [`Error::Io`] for files that cannot be opened.
    pub(crate) fn ends(&self, files: &Files, vocab_size: usize) -> Result<Vec<u32>> {
        let named = self.config.get("eos_token").and_then(text);
        // Of several templates, all.
        let beside = files.get("chat_template.jinja")?;
        let template = match &beside {
            Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            None => match self.config.get("chat_template") {
                Some(Value::String(text)) => text.clone(),
                templates => templates
                    .and_then(Value::as_array)
                    .into_iter()
                    .flatten()
                    .filter_map(|t| t["template"].as_str())
                    .collect(),
            },
        };
        let ends = |added: &&Numbered| {
            let text = added.token.content.as_str();
            let by_template =
                added.token.special && TURN_ENDS.contains(&text) && template.contains(text);
            (added.id as usize) < vocab_size && (by_template || named == Some(text))
        };
        let added = self.added.iter().flatten();
        Ok(added.filter(ends).map(|added| added.id).collect())
    }

    /// What is left over of tokenizer_config.json and of the templates beside it.
    ///
    /// # Errors
    /// [`Error::Io`] for files that cannot be opened.
    pub(crate) fn left_over(&self, files: &Files) -> Result<Vec<LeftOver>> {
        let name = |key: &str| format!("{TOKENIZER_CONFIG}: {key}");
        let read = |key: &str| {
            key.ends_with("_token") || keys::TOKENIZER.iter().any(|(known, _)| *known == key)
        };
        let entries = self.config.iter().filter(|(key, _)| !read(key));
        let mut left = keys::unknown(TOKENIZER_CONFIG, keys::TOKENIZER_UNUSED, entries);
        let texts = self.added.iter().flatten();
        let texts: BTreeSet<&str> = texts.map(|a| a.token.content.as_str()).collect();
        for (key, token) in self.named() {
            let absent = |text: &&str| self.added.is_some() && !texts.contains(text);
            if let Some(text) = text(token).filter(absent) {
                left.push(LeftOver::new(name(&format!("{key} {text:?}")), ABSENT));
            }
        }
        left.extend(self.left.iter().cloned());
        left.extend(self.not_added(files)?);
        let templates = self.config.get("chat_template").and_then(Value::as_array);
        let others = templates.into_iter().flatten();
        let others = others
            .filter_map(|t| t["name"].as_str())
            .filter(|template| !TEMPLATES.contains(template))
            .map(|template| name(&format!("chat_template {template}")));
        let chosen = TEMPLATES.map(|template| format!("{TEMPLATES_BESIDE}{template}.jinja"));
        let beside = beside(files)?.into_iter();
        let why = "chats have the template default, or tool_use where they have tools";
        let others = others.chain(beside.filter(|file| !chosen.contains(file)));
        left.extend(others.map(|name| LeftOver::new(name, why)));
        Ok(left)
    }

    /// The tokens that tokenizer_config.json names by what they are for.
    fn named(&self) -> Vec<(String, &Value)> {
        let named = self
            .config
            .iter()
            .filter(|(key, _)| key.ends_with("_token"));
        let mut named: Vec<(String, &Value)> = named.map(|(k, v)| (k.clone(), v)).collect();
        for key in ["additional_special_tokens", "extra_special_tokens"] {
            match self.config.get(key) {
                Some(Value::Array(all)) => named.extend(all.iter().map(|v| (key.into(), v))),
                Some(Value::Object(all)) => {
                    named.extend(all.iter().map(|(k, v)| (format!("{key} {k}"), v)));
                }
                _ => {}
            }
        }
        named
    }

    /// Tokens that tokenizer_config.json wants around texts and the post-processor does not add.
    fn not_added(&self, files: &Files) -> Result<Vec<LeftOver>> {
        let asked = ["add_bos_token", "add_eos_token"].into_iter();
        let asked = asked.filter(|key| self.config.get(*key) == Some(&Value::Bool(true)));
        let mut asked = asked.peekable();
        let (Some(_), Some(json)) = (asked.peek(), files.get(TOKENIZER)?) else {
            return Ok(Vec::new());
        };
        let Ok(around) = around(&files.path(TOKENIZER), &json) else {
            return Ok(Vec::new());
        };
        let added = |key: &&str| match *key {
            "add_bos_token" => !around.before.is_empty(),
            _ => !around.after.is_empty(),
        };
        let why = "the post-processor of tokenizer.json adds none, and neither does nq";
        let absent = asked.filter(|key| !added(key));
        let left = absent.map(|key| LeftOver::new(format!("{TOKENIZER_CONFIG}: {key} true"), why));
        Ok(left.collect())
    }
}

/// The contents of `tokenizer.json`, its added tokens with the flags that `tokenizer_config.json` gives them.
///
/// # Errors
/// [`Error::Missing`] without the file; [`Error::Malformed`] for an added token of `tokenizer_config.json` that is
/// none; [`Error::Unsupported`] if that file asks for control tokens to be text.
pub fn applied(files: &Files) -> Result<Bytes> {
    let contents = files.require(TOKENIZER)?;
    let described = Described::read(files)?;
    let whole = serde_json::from_slice::<Value>;
    let (Some(added), true) = (described.added, described.changed) else {
        return Ok(contents);
    };
    let Ok(mut whole) = whole(&contents) else {
        return Ok(contents);
    };
    let tokens = added.into_iter().map(|Numbered { id, token }| {
        let mut token = json!(token);
        token["id"] = id.into();
        token
    });
    whole["added_tokens"] = tokens.collect();
    Ok(whole.to_string().into())
}

/// The templates in the folder of further ones.
fn beside(files: &Files) -> Result<Vec<String>> {
    let names = match files {
        Files::Folder(dir) if dir.join(TEMPLATES_BESIDE).is_dir() => {
            let names = Files::Folder(dir.join(TEMPLATES_BESIDE)).names()?;
            let named = names.iter().map(|name| format!("{TEMPLATES_BESIDE}{name}"));
            named.collect()
        }
        Files::Folder(_) => Vec::new(),
        files => files.names()?,
    };
    let template = |name: &String| name.starts_with(TEMPLATES_BESIDE) && name.ends_with(".jinja");
    Ok(names.into_iter().filter(template).collect())
}
