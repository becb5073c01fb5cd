//! `tokenizer.json` and `tokenizer_config.json` from GGUF metadata.
//!
//! GGUF stores a byte-level BPE as its tokens by id, their kinds and the merges, but the
//! pre-tokenizer only by name. This module knows the definition behind the name.

use super::architecture::{Pooling, architecture, pooling};
use super::file::GgufFile;
use super::value::malformed;
use crate::error::{Error, Result};
use serde::Serialize;
use serde::ser::{SerializeMap, SerializeSeq, Serializer};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// What a tokenizer does before BPE, which GGUF gives by a name.
pub(super) struct Pre {
    /// The name.
    pub(super) name: &'static str,
    /// Whose tokenizers do it, for messages.
    family: &'static str,
    /// The pattern by which it splits text.
    pub(super) pattern: &'static str,
    /// The Unicode normal form that text is brought into.
    pub(super) normalizer: Option<&'static str>,
    /// True if a word that is a token needs no merges.
    pub(super) ignore_merges: bool,
    /// True if readers put the start token in front of a text.
    pub(super) adds_bos: bool,
    /// The class that tokenizer_config.json names.
    class: &'static str,
}

/// Every pre-tokenizer that nq knows.
static PRES: [Pre; 3] = [
    Pre {
        name: "qwen2",
        family: "Qwen2 and Qwen3",
        pattern: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        normalizer: Some("NFC"),
        ignore_merges: false,
        adds_bos: false,
        class: "Qwen2Tokenizer",
    },
    Pre {
        name: "qwen35",
        family: "Qwen3.5 to 3.8",
        // Marks belong to the letters that they modify.
        pattern: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        normalizer: Some("NFC"),
        ignore_merges: false,
        adds_bos: false,
        class: "Qwen2Tokenizer",
    },
    Pre {
        name: "llama-bpe",
        family: "Llama 3",
        pattern: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        normalizer: None,
        ignore_merges: true,
        adds_bos: true,
        class: "PreTrainedTokenizerFast",
    },
];

/// Control tokens that end a turn in the vocabularies of these families; files name only some of them.
pub(super) const END_TOKENS: [&str; 4] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
];

impl Pre {
    /// The first that `is` holds for.
    pub(super) fn find(is: impl Fn(&Pre) -> bool) -> Option<&'static Pre> {
        PRES.iter().find(|pre| is(pre))
    }

    /// The known ones, for messages.
    pub(super) fn known() -> String {
        let named = |pre: &Pre| format!("{} ({})", pre.family, pre.name);
        PRES.each_ref().map(named).join(", ")
    }

    /// A pre-tokenizer of tokenizer.json that splits text by the pattern and writes bytes as characters.
    fn json(&self) -> Value {
        let split = json!({
            "type": "Split", "pattern": { "Regex": self.pattern }, "behavior": "Isolated",
            "invert": false
        });
        json!({ "type": "Sequence", "pretokenizers": [split, byte_level()] })
    }
}

/// A pre-tokenizer that splits text as Qwen's tokenizers do and writes bytes as characters.
pub(crate) fn pre_tokenizer() -> Value {
    PRES[0].json()
}

/// A pre-tokenizer or decoder that writes bytes as characters.
pub(crate) fn byte_level() -> Value {
    json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false
    })
}

/// The key of the chat template; further templates have their names behind it.
pub(super) const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
/// The name of the template without one.
pub(super) const DEFAULT: &str = "default";

const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// Kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// Text, in the alphabet of byte-level BPE.
    Normal,
    /// Structure (`<|im_start|>`), matched before BPE and not shown to users.
    Control,
    /// Plain text, matched before BPE.
    UserDefined,
    /// A row of the embedding that no token uses.
    Unused,
}

impl TokenKind {
    /// Its number in files.
    pub(crate) const fn id(self) -> i32 {
        match self {
            TokenKind::Normal => 1,
            TokenKind::Control => 3,
            TokenKind::UserDefined => 4,
            TokenKind::Unused => 5,
        }
    }

    fn from_id(id: i32) -> Option<Self> {
        [Self::Normal, Self::Control, Self::UserDefined, Self::Unused]
            .into_iter()
            .find(|k| k.id() == id)
    }
}

/// A file's tokens by id.
pub(crate) struct Vocabulary<'a> {
    pre: &'static Pre,
    tokens: Vec<&'a str>,
    kinds: Vec<TokenKind>,
}

impl<'a> Vocabulary<'a> {
    /// Reads tokens and kinds.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a tokenizer other than byte-level BPE with a known pre-tokenizer;
    /// [`Error::Malformed`] for keys that are absent, mistyped or of different lengths.
    pub(crate) fn read(file: &'a GgufFile) -> Result<Self> {
        let unsupported = |what: String, why: String| Error::Unsupported {
            path: file.path().into(),
            what,
            why,
        };
        let text = |key| file.required(key, file.str(key)?);
        let model = text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            let why = "nq runs byte-level BPE (gpt2)".into();
            return Err(unsupported(format!("tokenizer model {model}"), why));
        }
        let name = text("tokenizer.ggml.pre")?;
        let Some(pre) = Pre::find(|pre| pre.name == name) else {
            let why = format!("nq knows those of {}", Pre::known());
            return Err(unsupported(format!("pre-tokenizer {name}"), why));
        };
        if file.bool(ADD_BEGIN)? == Some(true) && !pre.adds_bos {
            let why = format!("{} add no token before a text", pre.family);
            return Err(unsupported(format!("{ADD_BEGIN} true"), why));
        }
        let pooled = || pooling(file, architecture(file)?);
        if file.bool(ADD_END)? == Some(true) && pooled()? == Pooling::None {
            let why = "nq adds a token to a text where a model embeds it alone".into();
            return Err(unsupported(format!("{ADD_END} true"), why));
        }
        let tokens = file.required(TOKENS, file.strings(TOKENS)?)?;
        let kinds = file.required(TOKEN_TYPE, file.array(TOKEN_TYPE)?)?;
        let bad =
            |expected: String, found: String| malformed(file.path(), TOKEN_TYPE, expected, found);
        if kinds.len() != tokens.len() as u64 {
            let expected = format!("{} types, one per token", tokens.len());
            return Err(bad(expected, kinds.len().to_string()));
        }
        let Some(ids) = kinds.i32s() else {
            return Err(bad("32-bit integers".into(), kinds.to_string()));
        };
        let kind = |(i, id)| {
            TokenKind::from_id(id).ok_or_else(|| {
                let expected = "1 (normal), 3 (control), 4 (user defined) or 5 (unused)".into();
                bad(expected, format!("{id} for token {i}"))
            })
        };
        if tokens.len() > u32::MAX as usize {
            let expected = "ids of 32 bits".into();
            return Err(malformed(
                file.path(),
                TOKENS,
                expected,
                format!("{} tokens", tokens.len()),
            ));
        }
        let kinds = ids.enumerate().map(kind).collect::<Result<_>>()?;
        Ok(Vocabulary { pre, tokens, kinds })
    }

    /// Number of ids.
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Id, text and kind of every token.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &'a str, TokenKind)> {
        let both = self.tokens.iter().zip(&self.kinds);
        both.enumerate().map(|(i, (t, k))| (i as u32, *t, *k))
    }
}

/// True for added tokens, which are matched in text before BPE.
fn is_added(kind: TokenKind) -> bool {
    matches!(kind, TokenKind::Control | TokenKind::UserDefined)
}

fn added_token(content: &str, kind: TokenKind) -> Map<String, Value> {
    let token = json!({
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": false,
        "special": kind == TokenKind::Control,
    });
    match token {
        Value::Object(map) => map,
        _ => unreachable!("the literal above is an object"),
    }
}

/// Builds the `tokenizer.json` of Hugging Face's tokenizers library.
///
/// # Errors
/// [`Error::Malformed`] for a token given twice, or a merge that does not join two known tokens
/// to a third.
pub fn tokenizer_json(file: &GgufFile) -> Result<Vec<u8>> {
    let vocabulary = Vocabulary::read(file)?;
    let bad =
        |key, expected: &str, found: String| malformed(file.path(), key, expected.into(), found);
    let mut ids = HashMap::with_capacity(vocabulary.len());
    for (id, token, kind) in vocabulary.iter() {
        if kind == TokenKind::Unused {
            continue;
        }
        if let Some(other) = ids.insert(token, id) {
            let found = format!("{token:?} as {other} and {id}");
            return Err(bad(TOKENS, "each token once", found));
        }
    }
    let merges = file.required(MERGES, file.strings(MERGES)?)?;
    let pair = |(i, merge): (usize, &&'_ str)| {
        let whole = |(a, b): &(&str, &str)| {
            let known = |t: &str| ids.contains_key(t);
            !b.contains(' ') && known(a) && known(b) && known(&format!("{a}{b}"))
        };
        merge
            .split_once(' ')
            .filter(whole)
            .map(|_| ())
            .ok_or_else(|| {
                let found = format!("{merge:?} as merge {i}");
                bad(MERGES, "two tokens that make up a third", found)
            })
    };
    merges.iter().enumerate().try_for_each(pair)?;
    let added: Vec<_> = vocabulary
        .iter()
        .filter(|t| is_added(t.2))
        .map(|(id, content, kind)| {
            let mut token = Map::from_iter([("id".into(), id.into())]);
            token.append(&mut added_token(content, kind));
            token
        })
        .collect();
    let bytes = byte_level();
    let post_processor = post_processor(file, &vocabulary)?;
    let tokenizer = Tokenizer {
        version: "1.0",
        truncation: (),
        padding: (),
        added_tokens: &added,
        normalizer: match vocabulary.pre.normalizer {
            Some(form) => json!({ "type": form }),
            None => Value::Null,
        },
        pre_tokenizer: vocabulary.pre.json(),
        post_processor,
        decoder: bytes,
        model: Bpe {
            kind: "BPE",
            dropout: (),
            unk_token: (),
            continuing_subword_prefix: "",
            end_of_word_suffix: "",
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: vocabulary.pre.ignore_merges,
            vocab: Vocab::new(&vocabulary),
            merges: Merges(&merges),
        },
    };
    Ok(serde_json::to_vec(&tokenizer).expect("strings and numbers are always JSON"))
}

/// Whether a begin token is added to a text.
const ADD_BEGIN: &str = "tokenizer.ggml.add_bos_token";

/// Whether a begin token is added: as the file says or, if it does not, as its pre-tokenizer's family does.
fn adds_bos(file: &GgufFile, pre: &Pre) -> Result<bool> {
    Ok(file.bool(ADD_BEGIN)?.unwrap_or(pre.adds_bos))
}

/// Whether a text's end token is added to it: embedding models do.
pub(super) const ADD_END: &str = "tokenizer.ggml.add_eos_token";

/// The post-processor, which adds the start token and the end token if the file says so.
fn post_processor(file: &GgufFile, vocabulary: &Vocabulary<'_>) -> Result<Value> {
    let text = |name: &str| json!({ "Sequence": { "id": name, "type_id": 0 } });
    let mut special = Map::new();
    let mut token = |adds: bool, key: &str| -> Result<Option<Value>> {
        if !adds {
            return Ok(None);
        }
        let id = file.required(key, file.u64(key)?)?;
        let found = usize::try_from(id)
            .ok()
            .and_then(|id| vocabulary.iter().nth(id));
        let Some((id, token, _)) = found else {
            let expected = format!("below {}, the number of tokens", vocabulary.len());
            return Err(malformed(file.path(), key, expected, id.to_string()));
        };
        special.insert(
            token.into(),
            json!({ "id": token, "ids": [id], "tokens": [token] }),
        );
        Ok(Some(
            json!({ "SpecialToken": { "id": token, "type_id": 0 } }),
        ))
    };
    // A reranker's prompt is complete.
    let ranks = || Ok(pooling(file, architecture(file)?)? == Pooling::Rank);
    let adds_end = file.bool(ADD_END)? == Some(true) && !ranks()?;
    let end = token(adds_end, "tokenizer.ggml.eos_token_id")?;
    let adds = adds_bos(file, vocabulary.pre)?;
    let start = token(adds, "tokenizer.ggml.bos_token_id")?;
    if start.is_none() && end.is_none() {
        return Ok(byte_level());
    }
    let around = |name: &str| [start.clone(), Some(text(name)), end.clone()];
    let single: Vec<Value> = around("A").into_iter().flatten().collect();
    let pair: Vec<Value> = around("A")
        .into_iter()
        .chain(around("B"))
        .flatten()
        .collect();
    let template = json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": special,
    });
    Ok(json!({ "type": "Sequence", "processors": [byte_level(), template] }))
}

/// `tokenizer_config.json`: special tokens and the chat template.
///
/// # Errors
/// [`Error::Malformed`] for a token id past the last, or a template that is not a string.
pub fn tokenizer_config_json(file: &GgufFile) -> Result<Vec<u8>> {
    let vocabulary = Vocabulary::read(file)?;
    let token = |name: &str| -> Result<Value> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match file.u64(&key)? {
            None => Ok(Value::Null),
            Some(id) => match vocabulary
                .iter()
                .nth(usize::try_from(id).unwrap_or(usize::MAX))
            {
                Some((_, text, _)) => Ok(text.into()),
                None => {
                    let expected = format!("below {}, the number of tokens", vocabulary.len());
                    Err(malformed(file.path(), &key, expected, id.to_string()))
                }
            },
        }
    };
    let added: Map<String, Value> = vocabulary
        .iter()
        .filter(|t| is_added(t.2))
        .map(|(id, content, kind)| (id.to_string(), added_token(content, kind).into()))
        .collect();
    let mut config = json!({
        "add_bos_token": adds_bos(file, vocabulary.pre)?,
        "add_prefix_space": false,
        "added_tokens_decoder": added,
        "bos_token": token("bos")?,
        "clean_up_tokenization_spaces": false,
        "eos_token": token("eos")?,
        "errors": "replace",
        "pad_token": token("padding")?,
        "split_special_tokens": false,
        "tokenizer_class": vocabulary.pre.class,
        "unk_token": null,
    });
    let mut templates = Vec::new();
    for key in file.metadata().keys() {
        let name = match key.strip_prefix(CHAT_TEMPLATE) {
            Some("") => DEFAULT,
            Some(rest) if rest.starts_with('.') => &rest[1..],
            _ => continue,
        };
        let template = file.required(key, file.str(key)?)?;
        templates.push(json!({ "name": name, "template": template }));
    }
    match templates.as_mut_slice() {
        [] => {}
        [one] if one["name"] == DEFAULT => config["chat_template"] = one["template"].take(),
        _ => config["chat_template"] = templates.into(),
    }
    Ok(serde_json::to_vec(&config).expect("strings and numbers are always JSON"))
}

#[derive(Serialize)]
struct Tokenizer<'a> {
    version: &'static str,
    truncation: (),
    padding: (),
    added_tokens: &'a [Map<String, Value>],
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Bpe<'a>,
}

#[derive(Serialize)]
struct Bpe<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: (),
    unk_token: (),
    continuing_subword_prefix: &'static str,
    end_of_word_suffix: &'static str,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Vocab<'a>,
    merges: Merges<'a>,
}

/// The tokens that have their ids from here. The tokenizers library numbers added tokens behind the others, so where
/// they stand elsewhere, `with_added` has them here too.
struct Vocab<'a> {
    all: &'a Vocabulary<'a>,
    with_added: bool,
}

impl<'a> Vocab<'a> {
    fn new(all: &'a Vocabulary<'a>) -> Self {
        let normal = all.iter().filter(|t| t.2 == TokenKind::Normal).count() as u32;
        let added = all.iter().filter(|t| is_added(t.2));
        let with_added = added.zip(normal..).any(|((id, ..), place)| id != place);
        Vocab { all, with_added }
    }
}

impl Serialize for Vocab<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (id, token, kind) in self.all.iter() {
            if kind == TokenKind::Normal || (self.with_added && is_added(kind)) {
                map.serialize_entry(token, &id)?;
            }
        }
        map.end()
    }
}

struct Merges<'a>(&'a [&'a str]);

impl Serialize for Merges<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.0.len()))?;
        for merge in self.0 {
            // Checked earlier: exactly one space.
            seq.serialize_element(&merge.split_once(' ').unwrap_or((merge, "")))?;
        }
        seq.end()
    }
}
