//! Ranks quantized files of one model: which is closest to the source at its size.
//!
//! What is measured, and on what, is fixed by [`PROTOCOL`]. A pass over the texts' log-probabilities of the source, which
//! [`crate::ReferenceLogits::record_to`] keeps, and over the source's own answers measures a file.

mod answers;
mod tasks;

pub use answers::{Answers, GreedyAnswer, equal_tokens, greedy_answers};
pub use tasks::{RankTask, TaskAnswer, TaskAnswers, TaskFigures, TaskShares, TaskTool, tasks};

use crate::depth::DepthBucket;
use crate::evaluate::Evaluation;
use crate::report::{Comparison, EvalReport, KldStats, Protocol};
use crate::spread::{QuantileErrors, StandardErrors};
use crate::windows::EvalSpec;
use nq_formats::checkpoint::PartBytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The name and version of what is measured: figures of another version are not comparable.
pub const PROTOCOL: &str = "nq-rank 1";

/// Most windows of the text.
pub const WINDOWS: usize = 16;

/// Tokens of a window, if the model has as many positions.
const WINDOW: usize = 1024;

/// Texts of several kinds, by name.
pub const KINDS: [(&str, &str); 5] = [
    ("prose", include_str!("texts/prose.txt")),
    ("code", include_str!("texts/code.txt")),
    ("mathematics", include_str!("texts/mathematics.txt")),
    ("languages", include_str!("texts/languages.txt")),
    ("chat", include_str!("texts/chat.txt")),
];

/// The prompts whose answers are compared.
pub fn prompts() -> impl Iterator<Item = &'static str> {
    include_str!("prompts.txt").lines()
}

/// How a text of `tokens` tokens is measured on a model of `positions` positions: every token but the first of each of at
/// most `windows` windows.
pub fn text_spec(name: &str, tokens: usize, positions: usize, windows: usize) -> EvalSpec {
    EvalSpec {
        max_windows: Some(windows),
        ..EvalSpec::new(Protocol::Hf, WINDOW.min(tokens).min(positions), name)
    }
}

/// The figures of a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TextFigures {
    /// As `nq eval` reports them.
    #[serde(flatten)]
    pub report: EvalReport,
    /// Standard errors of means.
    pub errors: StandardErrors,
    /// Standard errors of the KL divergence's quantiles.
    pub kld_errors: QuantileErrors,
    /// By position.
    pub by_depth: Vec<DepthBucket>,
}

impl TextFigures {
    /// The mean KL divergence from the source.
    pub fn kld(&self) -> f64 {
        let against = self.report.against.as_ref();
        against.map_or(f64::INFINITY, |c| c.kld.mean)
    }
}

impl From<Evaluation> for TextFigures {
    fn from(e: Evaluation) -> Self {
        TextFigures {
            errors: e.errors(),
            kld_errors: e.quantile_errors(),
            by_depth: e.by_depth(),
            report: e.report,
        }
    }
}

/// A file's measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileFigures {
    /// The engine and its device.
    pub engine: String,
    /// Type that inputs of the Linears are rounded to.
    pub activations: String,
    /// On the text.
    pub text: TextFigures,
    /// On texts of several kinds, in the order of [`KINDS`].
    pub kinds: Vec<TextFigures>,
    /// Compared with the source's greedy answers; `None` if the source was run layer by layer, as it then writes none.
    pub answers: Option<Answers>,
    /// Calls of tools and JSON; `None` if the source has none.
    pub tasks: Option<TaskFigures>,
}

/// What a file is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileFacts {
    /// A short name.
    pub name: String,
    /// Where it is from.
    pub source: String,
    /// Hash of its weight files.
    pub sha256: String,
    /// The format's name.
    pub format: String,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// The same by part.
    pub parts: PartBytes,
    /// `8 * bytes / parameters` of the text model.
    pub bits_per_weight: f64,
}

/// A file and its measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankedFile {
    /// What it is.
    #[serde(flatten)]
    pub facts: FileFacts,
    /// True if no file of at most its size is closer to the source.
    pub frontier: bool,
    /// What was measured.
    #[serde(flatten)]
    pub figures: FileFigures,
}

impl RankedFile {
    /// Its comparison with the source on the text.
    pub fn comparison(&self) -> Option<&Comparison> {
        self.figures.text.report.against.as_ref()
    }

    /// Its mean KL divergence on the text.
    pub fn kld(&self) -> f64 {
        self.figures.text.kld()
    }
}

/// What a source is measured by itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceFigures {
    /// The engine and its device.
    pub engine: String,
    /// The largest of the KL divergences from itself, computed with other rounding, on the texts of [`KINDS`]: the floor
    /// of the measurement.
    pub floor: KldStats,
    /// Its greedy answers; none if it was run layer by layer.
    pub answers: Vec<GreedyAnswer>,
    /// Its calls of tools and JSON; `None` without a chat template, and where it writes no answers.
    pub tasks: Option<TaskAnswers>,
}

impl SourceFigures {
    /// True if these are answers to `prompts` as long as answers may be: figures from a file may be others.
    pub fn answer(&self, prompts: &[Vec<u32>]) -> bool {
        let short = |a: &GreedyAnswer| a.tokens.len() <= answers::LONGEST;
        self.answers.iter().map(|a| &a.prompt).eq(prompts) && self.answers.iter().all(short)
    }
}

/// Files of one model, compared with their source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ranking {
    /// [`PROTOCOL`].
    pub protocol: String,
    /// False if another text or number of windows was asked for than the protocol has.
    pub standard: bool,
    /// Name and version of the program.
    pub program: String,
    /// The command.
    pub command: String,
    /// Date in words.
    pub date: String,
    /// The source.
    pub source: FileFacts,
    /// The engine and its device that ran the source.
    pub source_engine: String,
    /// KL divergence of the source from itself.
    pub floor: KldStats,
    /// The files, in the order they are shown.
    pub files: Vec<RankedFile>,
}

impl Ranking {
    /// What a [`crate::Record`] has beside the reports of the text: the floor and, of each file, means by kind of text,
    /// answers and tasks.
    ///
    /// # Errors
    /// None for figures that were measured.
    pub fn more(&self) -> serde_json::Result<Map<String, Value>> {
        let mut files = Vec::new();
        for RankedFile { facts, figures, .. } in &self.files {
            let kld = |t: &TextFigures| json!({"kld": t.kld(), "kld_se": t.errors.kld});
            let kinds = figures.kinds.iter();
            let kinds: Map<String, Value> =
                kinds.map(|k| (k.report.text.clone(), kld(k))).collect();
            let mut answers = serde_json::to_value(&figures.answers)?;
            if let Some(answers) = answers.as_object_mut() {
                answers.retain(|_, figure| figure.is_number());
            }
            files.push(json!({
                "bits_per_weight": facts.bits_per_weight, "text": kld(&figures.text), "kinds": kinds,
                "answers": answers, "tasks": figures.tasks
            }));
        }
        let floor = serde_json::to_value(self.floor)?;
        Ok([("floor".into(), floor), ("files".into(), files.into())]
            .into_iter()
            .collect())
    }
}

/// Marks the files of which none of at most their size is closer to the source; of equals, all.
pub fn mark_frontier(files: &mut [RankedFile]) {
    let bytes: Vec<u64> = files.iter().map(|f| f.facts.bytes).collect();
    let klds: Vec<f64> = files.iter().map(RankedFile::kld).collect();
    for (i, file) in files.iter_mut().enumerate() {
        file.frontier = is_on_frontier(i, &bytes, &klds);
    }
}

/// True if no file is at least as good as file `i` in bytes and divergence, and better in one of them.
fn is_on_frontier(i: usize, bytes: &[u64], klds: &[f64]) -> bool {
    let better =
        |(&b, &k): (&u64, &f64)| b <= bytes[i] && k <= klds[i] && (b < bytes[i] || k < klds[i]);
    !bytes.iter().zip(klds).any(better)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frontier_is_what_nothing_else_beats() {
        let (bytes, klds) = ([10, 20, 30, 20, 40, 5], [5.0, 4.0, 4.5, 4.0, 4.0, 9.0]);
        let on: Vec<bool> = (0..6).map(|i| is_on_frontier(i, &bytes, &klds)).collect();
        assert_eq!(on, [true, true, false, true, false, true]);
    }

    #[test]
    fn texts_and_prompts_are_those_of_the_protocol() {
        assert_eq!(prompts().count(), 24);
        assert!(prompts().all(|p| !p.trim().is_empty()));
        // Changing a byte here changes what is measured: PROTOCOL then gets the next number.
        let all: String = KINDS.iter().map(|kind| kind.1).chain(prompts()).collect();
        let all = all + include_str!("tasks.json");
        let hash = nq_formats::hash::sha256_hex(all.as_bytes());
        assert_eq!((PROTOCOL, &hash[..16]), ("nq-rank 1", "7de2eb066060a134"));
    }
}
