//! Builds a GGUF file's metadata from a checkpoint's configuration, tokenizer and chat template.

use super::architecture::LAST_TOKEN;
use super::hyper;
use super::tokenizer::{ADD_END, CHAT_TEMPLATE, DEFAULT, Pre, TokenKind};
use super::value::{Array, Value};
use super::writer::GgufPlan;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::files::Files;
use crate::keys::CONFIG;
use crate::task::Task;
use crate::tokenizer::{Around, applied, around};
use nq_model::RopeScaling;
use serde::Deserialize;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::Path;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Names of templates, and the files that hold them.
const TEMPLATES: [(&str, &str); 3] = [
    (DEFAULT, "chat_template.jinja"),
    ("tool_use", "additional_chat_templates/tool_use.jinja"),
    ("rag", "additional_chat_templates/rag.jinja"),
];

/// Layers of the text model to whose output a tower adds rows.
pub(super) const DEEPSTACK_LAYERS: &str = "n_deepstack_layers";

/// Version of the block layouts, the value of `general.quantization_version`.
const QUANTIZATION_VERSION: u32 = 2;

/// Adds `general.*` and the architecture's keys to `plan`.
pub fn describe_model(plan: &mut GgufPlan, checkpoint: &Checkpoint, name: &str, file_type: u32) {
    let c = checkpoint.config();
    let architecture = c.architecture.gguf;
    plan.set("general.architecture", architecture);
    plan.set("general.type", "model");
    plan.set("general.name", name);
    plan.set("general.file_type", file_type);
    plan.set("general.quantization_version", QUANTIZATION_VERSION);
    let g = checkpoint.generation();
    // GGUF expresses greedy decoding as temperature 0.
    let temperature = match g.do_sample {
        Some(false) => Some(0.0),
        _ => g.temperature,
    };
    if let Some(k) = g.top_k.and_then(|k| i32::try_from(k).ok()) {
        plan.set("general.sampling.top_k", Value::I32(k));
    }
    for (key, value) in [
        ("temp", temperature),
        ("top_p", g.top_p),
        ("min_p", g.min_p),
        ("penalty_repeat", g.repetition_penalty),
    ] {
        if let Some(v) = value {
            plan.set(format!("general.sampling.{key}"), v);
        }
    }
    let key = |name: &str| format!("{architecture}.{name}");
    for entry in CONFIG.iter().filter(|k| (k.models)(c.architecture)) {
        let value = (entry.value)(c).and_then(|v| v.as_u64());
        // Where nothing is said, readers take 0.
        if let (Some(name), Some(n @ 1..)) = (entry.gguf.name(), value) {
            plan.set(key(name), n as u32); // dimensions are below 2^28
        }
    }
    hyper::describe(plan, c);
    if matches!(checkpoint.task(), Task::Embed(_)) {
        plan.set(key("pooling_type"), LAST_TOKEN as u32);
    }
    if !c.architecture.also.is_empty() {
        // Shares of the three coordinates of a position, which are equal in text.
        let [time, row, column] = c.rope.sections(c.rotary_dims() / 2);
        let sections = [time, row, column, 0].map(|n| n as i32); // below 2^28
        plan.set(key("rope.dimension_sections"), Array::of_i32s(&sections));
    }
    if let Some(vision) = checkpoint.vision().filter(|v| !v.deepstack.is_empty()) {
        plan.set(key(DEEPSTACK_LAYERS), vision.deepstack.len() as u32);
    }
    plan.set(key("attention.layer_norm_rms_epsilon"), c.rms_norm_eps);
    plan.set(key("rope.freq_base"), c.rope.theta as f32);
    if let RopeScaling::Yarn {
        factor,
        original_max_position_embeddings,
        beta_fast,
        beta_slow,
        truncate: _, // the writer refuses false
        attention_factor,
    } = c.rope.scaling
    {
        let mut set = |part: &str, v: Value| plan.set(key(&format!("rope.scaling.{part}")), v);
        set("type", "yarn".into());
        set("factor", (factor as f32).into());
        set(
            "original_context_length",
            (original_max_position_embeddings as u32).into(),
        );
        set("yarn_beta_fast", (beta_fast as f32).into());
        set("yarn_beta_slow", (beta_slow as f32).into());
        // Files give a multiplier of the usual 0.1 ln(factor) + 1.
        let usual = 0.1 * factor.ln() + 1.0;
        set("attn_factor", ((attention_factor / usual) as f32).into());
    }
}

/// The parts of a `tokenizer.json` that nq needs.
#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Option<Json>,
    pre_tokenizer: Option<Json>,
    model: VocabularyModel,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    special: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    single_word: bool,
}

#[derive(Deserialize)]
struct VocabularyModel {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    ignore_merges: bool,
    vocab: BTreeMap<String, u32>,
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Joined(String),
}

/// Adds `tokenizer.*` to `plan`. Ids without a token, up to the embedding's last row, become
/// unused tokens, as readers expect as many tokens as rows.
///
/// # Errors
/// [`Error::Missing`] without a tokenizer.json; [`Error::Unsupported`] for one that is not
/// byte-level BPE with a pre-tokenizer that GGUF has a name for; [`Error::Malformed`] for ids past the
/// embedding or given twice.
pub fn describe_tokenizer(plan: &mut GgufPlan, checkpoint: &Checkpoint) -> Result<()> {
    let files = checkpoint.files();
    let path = files.path(TOKENIZER);
    let malformed = |what: &str, expected: String, found: String| Error::Malformed {
        path: path.clone(),
        what: what.into(),
        expected,
        found,
    };
    let json = applied(files)?;
    let tokenizer: TokenizerFile = serde_json::from_slice(&json)
        .map_err(|e| malformed("contents", "a tokenizer".into(), e.to_string()))?;
    let pre = pre_of(&path, &tokenizer)?;
    let rows = checkpoint.config().vocab_size;
    let mut tokens: Vec<Option<(&str, TokenKind)>> = vec![None; rows];
    let mut put = |id: u32, text, kind| match tokens.get_mut(id as usize) {
        Some(slot @ None) => {
            *slot = Some((text, kind));
            Ok(())
        }
        // Older files also list added tokens in the vocabulary.
        Some(Some((other, slot))) if *other == text => {
            *slot = kind;
            Ok(())
        }
        Some(Some((other, _))) => {
            let found = format!("{other:?} and {text:?}");
            Err(malformed(&format!("token {id}"), "one text".into(), found))
        }
        None => {
            let expected = format!("ids below {rows}, the rows of the embedding");
            Err(malformed("tokens", expected, format!("{id} for {text:?}")))
        }
    };
    for (text, &id) in &tokenizer.model.vocab {
        put(id, text, TokenKind::Normal)?;
    }
    for token in &tokenizer.added_tokens {
        let takes = [
            ("lstrip", token.lstrip),
            ("rstrip", token.rstrip),
            ("single_word", token.single_word),
        ];
        if let Some((flag, _)) = takes.iter().find(|(_, set)| *set) {
            return Err(Error::Unsupported {
                path,
                what: format!("{flag} of the added token {:?} in GGUF", token.content),
                why: "its readers would read other tokens in the same text".into(),
            });
        }
        let kind = if token.special || looks_special(&token.content) {
            TokenKind::Control
        } else {
            TokenKind::UserDefined
        };
        put(token.id, &token.content, kind)?;
    }
    let unused: Vec<String> = (0..rows).map(|i| format!("[PAD{i}]")).collect();
    let text = |(i, t): (usize, &Option<(&'_ str, _)>)| t.map_or(unused[i].clone(), |t| t.0.into());
    let texts: Vec<String> = tokens.iter().enumerate().map(text).collect();
    let mut first = BTreeMap::new();
    for (id, text) in texts.iter().enumerate() {
        if let Some(other) = first.insert(text, id) {
            let found = format!("{text:?} as {other} and {id}");
            return Err(malformed("tokens", "each token once".into(), found));
        }
    }
    let kind = |t: &Option<(_, TokenKind)>| t.map_or(TokenKind::Unused, |t| t.1).id();
    let kinds: Vec<i32> = tokens.iter().map(kind).collect();
    let merges = tokenizer.model.merges.into_iter().map(|m| match m {
        Merge::Pair(a, b) => format!("{a} {b}"),
        Merge::Joined(s) => s,
    });
    let merges: Vec<String> = merges.collect();
    plan.set("tokenizer.ggml.model", "gpt2");
    plan.set("tokenizer.ggml.pre", pre.name);
    plan.set("tokenizer.ggml.tokens", Array::of_strings(&texts));
    plan.set("tokenizer.ggml.token_type", Array::of_i32s(&kinds));
    plan.set("tokenizer.ggml.merges", Array::of_strings(&merges));
    describe_special_tokens(plan, checkpoint, &texts)?;
    plan.set("tokenizer.ggml.add_bos_token", pre.adds_bos);
    if matches!(checkpoint.task(), Task::Embed(_)) {
        let Around { before, after } = around(&path, &json)?;
        let eos = checkpoint.eos_token_ids().first().copied();
        // What GGUF can say.
        let sayable = before.is_empty()
            && (after.is_empty() || (after.len() == 1 && after.first() == eos.as_ref()));
        if !sayable {
            let expected = "nothing but the model's end token around a text";
            let found = format!("{before:?} before it and {after:?} behind it");
            return Err(malformed("post_processor", expected.into(), found));
        }
        plan.set(ADD_END, !after.is_empty());
    }
    let mut others = Vec::new();
    for (name, template) in chat_templates(files)? {
        if name == DEFAULT {
            plan.set(CHAT_TEMPLATE, template.as_str());
        } else {
            plan.set(format!("{CHAT_TEMPLATE}.{name}"), template.as_str());
            others.push(name);
        }
    }
    if !others.is_empty() {
        plan.set("tokenizer.chat_templates", Array::of_strings(&others));
    }
    Ok(())
}

/// Tokens in angle brackets and bars (`<|fim_prefix|>`) structure a text whether or not they are
/// marked special; readers of GGUF expect them to be control tokens.
fn looks_special(text: &str) -> bool {
    text.len() > 4 && text.starts_with("<|") && text.ends_with("|>")
}

/// GGUF's name for what a tokenizer does before BPE.
fn pre_of(path: &Path, tokenizer: &TokenizerFile) -> Result<&'static Pre> {
    let unsupported = |what: String| Error::Unsupported {
        path: path.into(),
        what,
        why: format!("GGUF has names for byte-level BPE as in {}", Pre::known()),
    };
    if tokenizer.model.kind != "BPE" {
        return Err(unsupported(format!("a {} tokenizer", tokenizer.model.kind)));
    }
    let at = |json: &Option<Json>, pointer: &str| {
        json.as_ref()?.pointer(pointer)?.as_str().map(String::from)
    };
    let pattern = at(&tokenizer.pre_tokenizer, "/pretokenizers/0/pattern/Regex");
    let Some(pre) = Pre::find(|pre| Some(pre.pattern) == pattern.as_deref()) else {
        return Err(unsupported(format!(
            "the pre-tokenizer pattern {pattern:?}"
        )));
    };
    let normalizer = at(&tokenizer.normalizer, "/type");
    if normalizer.as_deref() != pre.normalizer {
        return Err(unsupported(format!("the normalizer {normalizer:?}")));
    }
    let second = at(&tokenizer.pre_tokenizer, "/pretokenizers/1/type");
    if second.as_deref() != Some("ByteLevel") {
        return Err(unsupported(format!("the second pre-tokenizer {second:?}")));
    }
    if tokenizer.model.ignore_merges != pre.ignore_merges {
        let what = format!("ignore_merges {}", tokenizer.model.ignore_merges);
        return Err(unsupported(what));
    }
    Ok(pre)
}

/// Adds the ids of the special tokens: end of text from the configuration, the others by their names
/// in tokenizer_config.json.
fn describe_special_tokens(
    plan: &mut GgufPlan,
    checkpoint: &Checkpoint,
    texts: &[String],
) -> Result<()> {
    let named = tokenizer_config(checkpoint.files())?;
    let named = |key: &str| {
        let token = named.as_ref()?.get(key)?;
        let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
        texts.iter().position(|t| t == text).map(|i| i as u32)
    };
    let eos = checkpoint.eos_token_ids();
    let pad = named("pad_token").or(eos.get(1).copied());
    for (key, id) in [
        ("eos", eos.first().copied().or_else(|| named("eos_token"))),
        // Qwen has no start token; readers expect one and are told not to add it.
        ("bos", named("bos_token").or(pad)),
        ("padding", pad),
    ] {
        if let Some(id) = id {
            plan.set(format!("tokenizer.ggml.{key}_token_id"), id);
        }
    }
    // A second end of text has no other key; end tokens that readers know by text need none.
    let other = eos.iter().skip(1).find(|&&id| {
        let text = texts.get(id as usize).map(String::as_str);
        !text.is_some_and(|t| super::tokenizer::END_TOKENS.contains(&t))
    });
    if let Some(&id) = other {
        plan.set("tokenizer.ggml.eot_token_id", id);
    }
    Ok(())
}

fn tokenizer_config(files: &Files) -> Result<Option<Json>> {
    let Some(bytes) = files.get(TOKENIZER_CONFIG)? else {
        return Ok(None);
    };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|e| Error::Malformed {
        path: files.path(TOKENIZER_CONFIG),
        what: "contents".into(),
        expected: "a JSON object".into(),
        found: e.to_string(),
    })
}

/// The chat templates by name: from their own files, or those in tokenizer_config.json.
fn chat_templates(files: &Files) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for (name, file) in TEMPLATES {
        if let Some(bytes) = files.get(file)? {
            let text = std::str::from_utf8(&bytes).map_err(|e| Error::Malformed {
                path: files.path(file),
                what: "contents".into(),
                expected: "UTF-8".into(),
                found: e.to_string(),
            })?;
            found.push((name.to_owned(), text.to_owned()));
        }
    }
    if found.iter().any(|(name, _)| name == DEFAULT) {
        return Ok(found);
    }
    let config = tokenizer_config(files)?;
    Ok(match config.as_ref().and_then(|c| c.get("chat_template")) {
        Some(Json::String(text)) => vec![(DEFAULT.into(), text.clone())],
        Some(Json::Array(named)) => {
            let pair =
                |t: &Json| Some((t["name"].as_str()?.into(), t["template"].as_str()?.into()));
            named.iter().filter_map(pair).collect()
        }
        _ => Vec::new(),
    })
}
