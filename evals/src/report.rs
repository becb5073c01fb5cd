//! The figures of `eval` and `bench` as written in JSON. Fields may be added, but
//! never renamed.

use serde::{Deserialize, Serialize};
use std::fmt;

/// How windows are cut from a text and which tokens are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Non-overlapping windows of `ctx` tokens, all `ctx - 1` shifted labels scored:
    /// comparable with the GPTQ papers.
    Hf,
    /// Non-overlapping windows of `ctx` (512) tokens; the logits at positions `ctx / 2` to
    /// `ctx - 2` are each scored against the next token: comparable with
    /// `llama-perplexity`.
    Llama,
    /// Whole texts, of which every token behind the first is scored that stands for text and not for an image.
    Texts,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::Hf => "hf",
            Protocol::Llama => "llama",
            Protocol::Texts => "texts",
        })
    }
}

/// Perplexity of a model on a text and, with a reference, how far it differs from that.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalReport {
    /// Perplexity: `exp` of the mean cross-entropy in nats.
    pub ppl: f64,
    /// Standard error of `ppl` over tokens, as `llama-perplexity` computes it.
    pub ppl_se: f64,
    /// Number of tokens scored.
    pub tokens: usize,
    /// Number of windows.
    pub windows: usize,
    /// Length of a window in tokens.
    pub ctx: usize,
    /// How windows were cut and scored.
    pub protocol: Protocol,
    /// Name of the text.
    pub text: String,
    /// Type that keys and values were rounded to.
    #[serde(default)]
    pub kv: String,
    /// Type that inputs of the Linears were rounded to.
    #[serde(default)]
    pub activations: String,
    /// Device and instruction set.
    #[serde(default)]
    pub device: String,
    /// The comparison, if there was a reference.
    #[serde(flatten)]
    pub against: Option<Comparison>,
}

/// A model compared with its reference on the same tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// KL divergence of the reference's next-token distribution from the model's, in nats.
    pub kld: KldStats,
    /// Share of positions whose best token is the same, 0 to 1.
    pub same_top1: f64,
    /// Root mean square change in the probability of the text's token.
    pub rms_dp: f64,
    /// Perplexity of the reference.
    pub ppl_ref: f64,
    /// `ln(ppl / ppl_ref)`.
    pub ln_ppl_ratio: f64,
    /// Its standard error over tokens (the two perplexities are correlated).
    pub ln_ppl_ratio_se: f64,
}

/// Distribution of the KL divergence over positions, in nats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KldStats {
    /// Mean.
    pub mean: f64,
    /// 50th percentile.
    pub median: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Maximum.
    pub max: f64,
}

/// One row of `nq bench`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchRow {
    /// `pp512` (prefill of 512 tokens), `tg128` (128 decode steps), `chat128`, or `image1024x1024` (decode steps behind an image).
    pub test: String,
    /// Tokens in the context before the test.
    pub depth: usize,
    /// Number of sequences at once.
    pub batch: usize,
    /// `nq` or `candle`.
    pub engine: String,
    /// `fused` or `reference`.
    pub kernels: String,
    /// Type that inputs are rounded to.
    pub activations: String,
    /// Bits of most weights.
    pub bits: usize,
    /// What the codes of the layers are called: `4-bit mix`. A measurement knows the engine alone: whoever opened the
    /// model names them.
    #[serde(default)]
    pub codes: String,
    /// Device and instruction set.
    pub device: String,
    /// Number of CPU threads.
    pub threads: usize,
    /// Tokens per second of all sequences together, median over repeats.
    pub tok_s: f64,
    /// Standard deviation of `tok_s` over repeats, if there are several.
    pub tok_s_std: Option<f64>,
    /// Bytes of weights read per second, in 10^9 bytes.
    pub gb_s: f64,
    /// `gb_s` divided by the bandwidth measured in the same run.
    pub bandwidth_share: f64,
    /// Median milliseconds of a step.
    pub ms_per_token_p50: f64,
    /// 99th percentile of the milliseconds of a step.
    pub ms_per_token_p99: f64,
    /// Number of measured repeats.
    pub repeats: usize,
    /// Read bandwidth of the machine, measured in the same run, in 10^9 bytes per second.
    #[serde(default)]
    pub machine_gb_s: f64,
    /// Bytes of weights read per decoded token.
    #[serde(default)]
    pub bytes_per_token: usize,
    /// Of a mixture whose experts do not all have room on the device: where the measured repeats found them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertsRow>,
    /// In chat rows: the time that sampling, detokenizing and writing add to the bare decode loop, as a
    /// share of a token's time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streaming_overhead: Option<f64>,
    /// In chat rows: tokens per second of that bare loop, median over the repeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bare_tok_s: Option<f64>,
    /// A caveat about the row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Why this row is invalid: it exceeds what the machine can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measurement_error: Option<String>,
    /// The result of speculative decoding; the row before this one has the same test without drafts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafts: Option<DraftRow>,
    /// The time until the first token behind an image; `tok_s` is then that of decoding behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageTimes>,
    /// Time by operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub breakdown: Option<Breakdown>,
}

/// Where a test found the experts that it chose, of a mixture whose experts do not all have room on the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertsRow {
    /// The share of the choices that found the expert in the device's memory.
    pub found: f64,
    /// The same of each layer.
    pub found_by_layer: Vec<f64>,
    /// Experts of all layers that moved to the device's memory, per token.
    pub moved: f64,
    /// The rate at which the others come to the device, measured at load, in 10^9 bytes per second.
    pub bus_gb_s: f64,
    /// Bytes that the choices of a token without room bring over the bus, if each brings its own.
    pub bus_bytes_per_token: f64,
    /// Of decoding one sequence, the tokens per second were only memory and bus waited for, which are read at the same time:
    /// weights that every token reads, then the chosen experts, from where they were found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_tok_s: Option<f64>,
}

/// Medians over the repeats of the parts of the time until the first token of a prompt with an image, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImageTimes {
    /// Tokens of the image.
    pub tokens: usize,
    /// From a file to the tower's patches: decoding, resizing, cutting.
    pub pixels_ms: f64,
    /// What the tower does.
    pub encoding_ms: f64,
    /// What the text model does with the image's tokens, in a prompt of nothing else.
    pub prompt_ms: f64,
    /// All of it.
    pub first_token_ms: f64,
}

/// The result of a test with drafts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DraftRow {
    /// `ngram` or the model that drafted.
    pub from: String,
    /// True if the text was given: the model's tokens were replaced by it.
    pub replayed: bool,
    /// Tokens drafted and checked, in all repeats.
    pub drafted: usize,
    /// Acceptance rate: the accepted share of them.
    pub right: f64,
    /// Drafted tokens accepted per step.
    pub accepted_per_step: f64,
    /// Time without drafts over time with them: median over pairs of repeats.
    pub speed_up: f64,
    /// Its standard deviation.
    pub speed_up_std: f64,
    /// True if all tokens were those drawn without drafts.
    pub same: bool,
    /// True if the device computes several tokens together exactly as it computes one: then `same` must be true.
    #[serde(default = "yes")]
    pub exact: bool,
    /// Number of rows and milliseconds of each kind of step, as the cost model had them at the end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub step_ms: Vec<(usize, f64)>,
    /// The reason why drafting stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub off: Option<String>,
}

fn yes() -> bool {
    true
}

impl Default for DraftRow {
    fn default() -> Self {
        DraftRow {
            from: String::new(),
            replayed: false,
            drafted: 0,
            right: 0.0,
            accepted_per_step: 0.0,
            speed_up: 1.0,
            speed_up_std: 0.0,
            same: true,
            exact: true,
            step_ms: Vec::new(),
            off: None,
        }
    }
}

/// Where the time of a token goes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Breakdown {
    /// Operations, longest first.
    pub ops: Vec<OpRow>,
    /// Operations (on a GPU: launches) per token.
    pub calls_per_token: f64,
    /// Microseconds per token while measuring.
    pub us_per_token: f64,
    /// Microseconds per token outside any operation.
    pub other_us_per_token: f64,
}

/// One operation of a [`Breakdown`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpRow {
    /// Its name.
    pub op: String,
    /// Calls per token.
    pub calls_per_token: f64,
    /// Microseconds per token, all calls together.
    pub us_per_token: f64,
    /// Bytes read per second, in 10^9 bytes.
    pub gb_s: f64,
    /// Share of the token's time.
    pub share: f64,
}
