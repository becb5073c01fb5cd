//! The task of a model: generating text or, according to the files of sentence-transformers beside it, embedding
//! texts or scoring documents.

use crate::error::{Error, Result};
use crate::files::{CONFIG, Files};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// The file in which sentence-transformers lists the modules of a model.
pub const MODULES: &str = "modules.json";
/// The file with the prompts that it puts before texts.
pub const PROMPTS: &str = "config_sentence_transformers.json";
/// The file that says how it pools token vectors to one vector.
pub const POOLING: &str = "1_Pooling/config.json";
/// The file that names the tokens whose logits it compares.
pub(crate) const LOGIT_SCORE: &str = "1_LogitScore/config.json";

/// The task of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// Generating text.
    Generate,
    /// Embedding texts: a vector is the hidden state of the last token after the final norm.
    Embed(Prompts),
    /// Scoring how well documents answer a query, by the probability of `yes` against `no` as the next token.
    Rerank,
}

/// The prompts that an embedding model's makers specify as prefixes of texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompts {
    /// For queries.
    pub query: Option<String>,
    /// For documents.
    pub document: Option<String>,
}

#[derive(Deserialize)]
struct Module {
    #[serde(rename = "type")]
    class: String,
    path: String,
}

/// `pooling_mode` since sentence-transformers 5.4, a switch for each mode before.
#[derive(Deserialize)]
struct Pooling {
    pooling_mode: Option<String>,
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

impl Pooling {
    fn modes(&self) -> Vec<&str> {
        let switches = self.others.iter().filter(|(_, on)| **on == true);
        let switches = switches.filter_map(|(key, _)| key.strip_prefix("pooling_mode_"));
        switches.chain(self.pooling_mode.as_deref()).collect()
    }
}

impl Task {
    /// The task of a model with these files; `bare` says that its weights are named as those of a
    /// model with nothing on top of it.
    ///
    /// # Errors
    /// [`Error::Malformed`] for files that are not what sentence-transformers writes;
    /// [`Error::Unsupported`] for any pooling except that of the last token.
    pub fn of(files: &Files, bare: bool) -> Result<Task> {
        #[derive(Deserialize)]
        struct Config {
            #[serde(default)]
            architectures: Option<Vec<String>>,
        }
        let Some(modules) = read::<Vec<Module>>(files, MODULES)? else {
            let config: Option<Config> = read(files, CONFIG)?;
            let classes = config.and_then(|c| c.architectures).unwrap_or_default();
            let base = classes.iter().any(|class| class.ends_with("Model"));
            return Ok(match bare || base {
                true => Task::Embed(prompts(files)?),
                false => Task::Generate,
            });
        };
        let kind = |m: &Module| m.class.rsplit('.').next().unwrap_or_default().to_owned();
        let kinds: Vec<String> = modules.iter().map(kind).collect();
        if kinds.iter().any(|k| k == "LogitScore") {
            return Ok(Task::Rerank);
        }
        let unsupported = |name: &str, what: String| Error::Unsupported {
            path: files.path(name),
            what,
            why: "nq makes embeddings of the last token's hidden state".into(),
        };
        let known = ["Transformer", "Pooling", "Normalize"];
        if let Some(other) = kinds.iter().find(|k| !known.contains(&k.as_str())) {
            return Err(unsupported(MODULES, format!("the module {other}")));
        }
        let Some(pooling) = modules.iter().find(|m| kind(m) == "Pooling") else {
            return Ok(Task::Generate);
        };
        let place = format!("{}/config.json", pooling.path);
        if place != POOLING {
            return Err(unsupported(MODULES, format!("pooling in {place:?}")));
        }
        let pooling: Pooling = read(files, POOLING)?.ok_or_else(|| Error::Missing {
            path: files.root(),
            what: format!("{POOLING}, which {MODULES} names"),
        })?;
        match pooling.modes()[..] {
            ["lasttoken"] => Ok(Task::Embed(prompts(files)?)),
            ref modes => {
                let what = format!("pooling of {}", modes.join(" and "));
                Err(unsupported(POOLING, what))
            }
        }
    }

    /// Its name in reports: `generate`, `embed` or `rerank`.
    pub fn name(&self) -> &'static str {
        match self {
            Task::Generate => "generate",
            Task::Embed(_) => "embed",
            Task::Rerank => "rerank",
        }
    }

    /// The task of a model that is called `name`. Rerankers that were published before sentence-transformers
    /// supported them differ from other causal models only in their name.
    #[must_use]
    pub fn of_name(self, name: &str) -> Task {
        match self {
            Task::Generate if name.to_ascii_lowercase().contains("reranker") => Task::Rerank,
            task => task,
        }
    }
}

fn prompts(files: &Files) -> Result<Prompts> {
    #[derive(Default, Deserialize)]
    struct Config {
        #[serde(default)]
        prompts: BTreeMap<String, String>,
    }
    let mut config: Config = read(files, PROMPTS)?.unwrap_or_default();
    Ok(Prompts {
        query: config.prompts.remove("query"),
        document: config.prompts.remove("document"),
    })
}

/// The JSON file `name`, if there is one.
fn read<T: DeserializeOwned>(files: &Files, name: &str) -> Result<Option<T>> {
    let Some(bytes) = files.get(name)? else {
        return Ok(None);
    };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|e| Error::Malformed {
        path: files.path(name),
        what: "contents".into(),
        expected: "what sentence-transformers writes".into(),
        found: e.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(files: &[(&str, &str)], bare: bool) -> Result<Task> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        Task::of(&Files::Folder(folder.path().into()), bare)
    }

    /// Modules of these classes, each in a folder named after its number.
    fn modules(classes: &[&str]) -> String {
        let module = |(i, class): (usize, &&str)| {
            format!(r#"{{"idx": {i}, "path": "{i}_{class}", "type": "some.where.{class}"}}"#)
        };
        let all: Vec<String> = classes.iter().enumerate().map(module).collect();
        format!("[{}]", all.join(","))
    }

    #[test]
    fn files_say_what_a_model_is_for() {
        let embeds = Task::Embed(Prompts::default());
        let causal = (CONFIG, r#"{"architectures": ["Qwen3ForCausalLM"]}"#);
        let base = (CONFIG, r#"{"architectures": ["Qwen3Model"]}"#);
        assert_eq!(task(&[], false).unwrap(), Task::Generate);
        assert_eq!(task(&[causal], false).unwrap(), Task::Generate);
        assert_eq!(task(&[causal], true).unwrap(), embeds);
        assert_eq!(task(&[base], false).unwrap(), embeds);
        let all = modules(&["Transformer", "Pooling", "Normalize"]);
        let score = modules(&["Transformer", "LogitScore"]);
        assert_eq!(
            task(&[causal, (MODULES, &*score)], true).unwrap(),
            Task::Rerank
        );
        for pooling in [
            r#"{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false, "include_prompt": true}"#,
            r#"{"embedding_dimension": 8, "pooling_mode": "lasttoken", "include_prompt": true}"#,
        ] {
            let files = [causal, (MODULES, &*all), (POOLING, pooling)];
            assert_eq!(task(&files, false).unwrap(), embeds);
            let prompts =
                r#"{"prompts": {"query": "Q: ", "other": "O"}, "default_prompt_name": null}"#;
            let files = [&files[..], &[(PROMPTS, prompts)]].concat();
            let query = Some("Q: ".to_owned());
            let found = task(&files, false).unwrap();
            assert_eq!(
                found,
                Task::Embed(Prompts {
                    query,
                    document: None
                })
            );
        }
        assert_eq!(
            Task::Generate.of_name("Qwen3-Reranker-0.6B-int4"),
            Task::Rerank
        );
        assert_eq!(Task::Generate.of_name("Qwen3-0.6B"), Task::Generate);
        assert_eq!(embeds.clone().of_name("a-reranker"), embeds);
    }

    #[test]
    fn other_embeddings_are_refused_by_name() {
        let all = modules(&["Transformer", "Pooling"]);
        let dense = modules(&["Transformer", "Pooling", "Dense"]);
        let mean = r#"{"pooling_mode_mean_tokens": true}"#;
        let two = r#"{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": true}"#;
        let last = r#"{"pooling_mode": "lasttoken"}"#;
        let elsewhere = all.replace("1_Pooling", "../Pooling");
        for (files, name) in [
            (vec![(MODULES, &*all), (POOLING, mean)], "mean_tokens"),
            (
                vec![(MODULES, &*all), (POOLING, two)],
                "lasttoken and mean_tokens",
            ),
            (vec![(MODULES, &*all), (POOLING, "{}")], "pooling of"),
            (vec![(MODULES, &*dense), (POOLING, last)], "Dense"),
            (vec![(MODULES, &*elsewhere), (POOLING, last)], "../Pooling"),
            (vec![(MODULES, &*all)], POOLING),
            (vec![(MODULES, "{}")], MODULES),
            (vec![(MODULES, &*all), (POOLING, "[]")], POOLING),
            (
                vec![
                    (MODULES, &*all),
                    (POOLING, last),
                    (PROMPTS, "{\"prompts\": 1}"),
                ],
                PROMPTS,
            ),
        ] {
            let e = task(&files, false).unwrap_err().to_string();
            assert!(e.contains(name), "{name}: {e}");
        }
    }
}
