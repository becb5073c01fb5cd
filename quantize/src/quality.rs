//! What a quantization cost, measured against the source; and the limits it must keep.

use crate::calibration::Sequences;
use crate::error::{Error, Result};
use crate::pipeline::SEQUENCE;
use crate::report::WorstToken;
use nq_evals::{EvalReport, EvalSpec, Evaluation, Protocol, compare};
use nq_formats::{Files, ModelConfig, Progress};
use nq_runtime::{Engine, Tokenizer};
use std::path::Path;

/// Limits of the measured quality.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Greatest mean KL divergence, in nats.
    pub max_kld: Option<f64>,
    /// Least share of positions whose best token is the same, 0 to 1.
    pub min_top1: Option<f64>,
}

impl Limits {
    /// What of `report` breaks a limit, in words.
    pub fn broken(&self, report: &EvalReport) -> Vec<String> {
        let mut broken = Vec::new();
        let Some(found) = &report.against else {
            return broken;
        };
        // A figure that is no number holds no limit: hence "held", not "exceeded".
        let held = |limit| found.kld.mean <= limit;
        if let Some(limit) = self.max_kld.filter(|&limit| !held(limit)) {
            broken.push(format!(
                "mean KL divergence {:.4} is above {limit}",
                found.kld.mean
            ));
        }
        let held = |limit| found.same_top1 >= limit;
        if let Some(limit) = self.min_top1.filter(|&limit| !held(limit)) {
            broken.push(format!(
                "the best token agrees at {:.2} % of positions, below {:.2} %",
                100.0 * found.same_top1,
                100.0 * limit
            ));
        }
        broken
    }
}

/// Text that quality is measured on.
#[derive(Clone, Copy, Debug)]
pub enum Text<'a> {
    /// Sampled from the source, apart from the calibration text.
    HeldOut(&'a Sequences),
    /// A file.
    File(&'a Path),
}

/// A measurement with its worst positions as text.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The figures.
    pub evaluation: Evaluation,
    /// The worst positions.
    pub worst: Vec<WorstToken>,
}

/// Worst positions that reports show.
const WORST: usize = 10;

/// (number, length) of held-out sequences of `tokens` in all.
pub fn held_out_shape(config: &ModelConfig, tokens: usize) -> (usize, usize) {
    let length = SEQUENCE.min(config.max_position_embeddings);
    (tokens.div_ceil(length).max(1), length)
}

/// Measures `engine` against `source` by the llama protocol (windows of 512 tokens, the
/// second half scored), on at most `tokens` tokens.
///
/// # Errors
/// A text that cannot be read or is shorter than a window; what evaluation reports.
pub fn measure(
    engine: &dyn Engine,
    source: &dyn Engine,
    files: &Files,
    text: Text<'_>,
    tokens: usize,
    progress: &dyn Progress,
) -> Result<Measured> {
    let tokenizer = Tokenizer::from_files(files)?;
    let (windows, ctx) = held_out_shape(source.config(), tokens);
    let (ids, name) = match text {
        Text::HeldOut(sequences) => {
            let ids: Vec<u32> = sequences.ids.concat();
            (ids, "held-out, sampled from the source".to_owned())
        }
        Text::File(path) => {
            let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, "read", e))?;
            let name = path.file_name().unwrap_or(path.as_os_str());
            (
                tokenizer.encode(&text)?,
                name.to_string_lossy().into_owned(),
            )
        }
    };
    let mut spec = EvalSpec::new(Protocol::Llama, ctx, name);
    spec.max_windows = Some(windows);
    let evaluation = compare(engine, source, &ids, &spec, progress)?;
    let token = |id: u32| tokenizer.decode(&[id], false);
    let worst = evaluation
        .worst(&ids, WORST)
        .into_iter()
        .map(|w| WorstToken {
            kld: w.kld,
            context: tokenizer.decode(&w.context, false),
            target: token(w.target),
            model_top: token(w.model_top),
            reference_top: token(w.reference_top),
        })
        .collect();
    Ok(Measured { evaluation, worst })
}

/// The report of a folder that an earlier run finished: what its record and files say.
///
/// # Errors
/// If the folder cannot be opened or has no record.
pub fn report_of(checkpoint: &nq_formats::Checkpoint) -> Result<crate::QuantizeReport> {
    let root = checkpoint.files().root();
    let record = nq_formats::nq::record(checkpoint)?.ok_or_else(|| Error::Text {
        path: root.clone(),
        why: "expected a folder quantized by nq, found another format".into(),
    })?;
    let store = checkpoint.store();
    let tensor_bytes: u64 = store.entries().iter().map(|e| e.bytes).sum();
    let linears = record.linears;
    Ok(crate::QuantizeReport {
        out: root,
        format: store.format().into(),
        method: record.method,
        bits: linears.map_or(16, |l| l.bits.into()),
        group_size: linears.map_or(nq_formats::Group::Channel, |l| l.group),
        bits_per_weight: 8.0 * tensor_bytes as f64 / checkpoint.config().parameters() as f64,
        tensor_bytes,
        file_bytes: store.file_bytes(),
        source_bytes: 0,
        seconds: 0.0,
        peak_rss_bytes: crate::memory::peak_rss(),
        fallbacks: record.fallbacks,
        layers: Vec::new(),
        quality: record.quality.and_then(|q| serde_json::from_value(q).ok()),
        estimated_peak_bytes: 0,
        worst_tokens: Vec::new(),
    })
}
