//! What was written, opened again: it must be read as its source is.

use crate::library::{Error, Result};
use nq_formats::{Checkpoint, Progress};
use nq_model::{Delta, ModelConfig};
use nq_runtime::tokenizer::TOKENIZER_FILE;
use nq_runtime::{ChatTemplate, Message, Tokenizer};
use std::path::Path;

/// Text whose tokens are compared, beside that of the last tokens of the vocabulary.
const PROBE: &str = "Don't I'LL stop? 3.14159 = 22/7;\n\n  \t(w\u{f6}rld)  \u{4f60}\u{597d}\u{ff01} \u{1f600}e\u{301}";
/// How many of the last tokens, among which are the added ones.
const LAST: u32 = 512;

/// Opens `path`, which was made from `source` and is to become `out`, and compares what both say of the model, its tokenizer
/// and its chat template. Weights are another matter.
///
/// # Errors
/// What differs; what was written cannot be opened.
pub(crate) fn check(
    source: &Checkpoint,
    path: &Path,
    out: &Path,
    progress: &dyn Progress,
) -> Result<Checkpoint> {
    let written = Checkpoint::open(path).map_err(|e| {
        Error::from(e).within(format!(
            "{}: what was written cannot be read",
            out.display()
        ))
    })?;
    let differs = |what: &str, wanted: String, found: String| {
        let (root, out) = (source.files().root(), out.display());
        Err(Error::differs(format!(
            "{out}: {what} is read otherwise than in {}: {wanted} there, {found} here",
            root.display()
        )))
    };
    let (ours, theirs) = (shape(source), shape(&written));
    if ours != theirs {
        return differs("the model", format!("{ours:?}"), format!("{theirs:?}"));
    }
    if source.files().get(TOKENIZER_FILE)?.is_none() {
        return Ok(written);
    }
    let (ours, theirs) = (tokenizer(source)?, tokenizer(&written)?);
    if let Some((wanted, found)) = other_token(&ours, &theirs) {
        return differs("a token", wanted, found);
    }
    let special: Vec<u32> = (0..=ours.max_id())
        .filter(|&id| ours.token_bytes().is_special(id) != theirs.token_bytes().is_special(id))
        .collect();
    if let [first, ..] = special[..] {
        let (out, token) = (out.display(), ours.decode(&[first], false));
        let more = special.len() - 1;
        progress.note(&format!(
            "{out}: this format does not say as the source does whether {token:?} is a control token, and of {more} \
             others"
        ));
    }
    for text in [PROBE.to_owned(), last_tokens(&ours)] {
        let (wanted, found) = (ours.encode(&text)?, theirs.encode(&text)?);
        if wanted != found {
            let at = wanted
                .iter()
                .zip(&found)
                .take_while(|(a, b)| a == b)
                .count();
            let some = |ids: &[u32]| {
                let ids = &ids[at.min(ids.len())..];
                format!("{:?} after {at} tokens", &ids[..ids.len().min(4)])
            };
            return differs("a text", some(&wanted), some(&found));
        }
    }
    let chat = [Message::new("user", "Name a river.")];
    let render = |checkpoint: &Checkpoint| -> Result<Option<String>> {
        let template = ChatTemplate::find(checkpoint.files())?;
        // A template may refuse this chat, in both.
        Ok(template.and_then(|t| t.render(&chat, None, true, None).ok()))
    };
    let (wanted, found) = (render(source)?, render(&written)?);
    if wanted != found {
        return differs("a chat", format!("{wanted:?}"), format!("{found:?}"));
    }
    let ends = written.eos_token_ids();
    for id in source.eos_token_ids() {
        if !ends.contains(id) {
            let (out, token) = (out.display(), ours.decode(&[*id], false));
            progress.note(&format!(
                "{out}: this format does not say that {token:?} ends answers, as in the source"
            ));
        }
    }
    Ok(written)
}

/// The shape of a model, without what formats may change: the order of recurrences' heads, the type of the weights and
/// the tokens that end a text.
fn shape(checkpoint: &Checkpoint) -> ModelConfig {
    let config = checkpoint.config().clone();
    ModelConfig {
        delta: config.delta.map(|d| Delta { tiled: false, ..d }),
        dtype: None,
        eos_token_ids: Vec::new(),
        ..config
    }
}

fn tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    Ok(Tokenizer::from_files(checkpoint.files())?)
}

/// The first token that is another one, in both.
fn other_token(ours: &Tokenizer, theirs: &Tokenizer) -> Option<(String, String)> {
    let last = ours.max_id().max(theirs.max_id());
    let (ours, theirs) = (ours.token_bytes(), theirs.token_bytes());
    let id = (0..=last).find(|&id| ours.get(id) != theirs.get(id))?;
    let text = |bytes: &[u8]| format!("{id} as {:?}", String::from_utf8_lossy(bytes));
    Some((text(ours.get(id)), text(theirs.get(id))))
}

/// The last tokens, each with a blank on both sides.
fn last_tokens(tokenizer: &Tokenizer) -> String {
    let last = tokenizer.max_id();
    let ids = last.saturating_sub(LAST)..=last;
    let texts = ids.map(|id| format!(" {} ", tokenizer.decode(&[id], false)));
    texts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn what_is_read_otherwise_is_named() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
        let source = Checkpoint::open(&demo).unwrap();
        let check = |name: &str, from: &str, to: &str| {
            let dir = tempfile::tempdir().unwrap();
            for entry in fs::read_dir(&demo).unwrap() {
                let path = entry.unwrap().path();
                fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
            }
            let text = fs::read_to_string(dir.path().join(name)).unwrap();
            assert!(text.contains(from), "{name}: {from}");
            fs::write(dir.path().join(name), text.replacen(from, to, 1)).unwrap();
            let checked = super::check(&source, dir.path(), dir.path(), &());
            checked.map_or_else(|e| format!("{e:#}"), |_| "the same".into())
        };
        let theta = check("config.json", "\"rms_norm_eps\": ", "\"rms_norm_eps\": 1");
        assert!(
            theta.contains("the model is read otherwise than in"),
            "{theta}"
        );
        let config = "tokenizer_config.json";
        assert_eq!(
            check(config, "\"errors\": \"replace\"", "\"errors\": \"x\""),
            "the same"
        );
        let stripped = check(config, "\"lstrip\": false", "\"lstrip\": true");
        assert!(
            stripped.contains("a text is read otherwise than in"),
            "{stripped}"
        );
        // A format may not say this.
        let special = check(config, "\"special\": true", "\"special\": false");
        assert_eq!(special, "the same");
        let token = check("tokenizer.json", "\"<|im_start|>\"", "\"<|im_stort|>\"");
        assert!(
            token.contains("a token is read otherwise than in"),
            "{token}"
        );
        let ends = "if add_generation_prompt";
        let chat = check(config, ends, "if not add_generation_prompt");
        assert!(chat.contains("a chat is read otherwise than in"), "{chat}");
    }
}
