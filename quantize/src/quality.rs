//! Measured quality of a quantization against its source, and limits on it.

use crate::calibration::{self, SEQUENCE, Sequences};
use crate::error::{Error, Result};
use crate::report::WorstToken;
use crate::train::record::Tuning;
use nq_evals::{
    EvalReport, EvalSpec, Evaluation, KldStats, Protocol, ReferenceLogits, compare, self_noise,
};
use nq_formats::{Files, Progress};
use nq_model::ModelConfig;
use nq_runtime::{Engine, Tokenizer};
use std::path::Path;

/// Limits on the measured quality.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QualityLimits {
    /// Largest mean KL divergence, in nats.
    pub max_kld: Option<f64>,
    /// Smallest share of positions at which the best token is the same, 0 to 1.
    pub min_top1: Option<f64>,
}

impl QualityLimits {
    /// True if there is one.
    pub(crate) fn any(&self) -> bool {
        *self != QualityLimits::default()
    }

    /// The limits that `report` misses, in words.
    pub fn broken(&self, report: &EvalReport) -> Vec<String> {
        let mut broken = Vec::new();
        let Some(found) = &report.against else {
            return broken;
        };
        // NaN keeps no limit: hence "held", not "exceeded".
        let held = |limit| found.kld.mean <= limit;
        if let Some(limit) = self.max_kld.filter(|&limit| !held(limit)) {
            broken.push(format!(
                "mean KL divergence {} is above {limit}",
                nats(found.kld.mean)
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

/// A divergence for people to read: at most four significant digits, no exponent.
pub(crate) fn nats(x: f64) -> String {
    let places = match x.abs() {
        a if a > 0.0 && a.is_finite() => (3 - a.log10().floor() as i32).clamp(0, 12),
        _ => 0,
    };
    let text = format!("{x:.*}", places as usize);
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Text for measuring quality.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Text<'a> {
    /// Sampled from the source, other than the calibration text.
    HeldOut(&'a Sequences),
    /// A file.
    File(&'a Path),
}

/// A measurement with its worst positions as text.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    /// The figures.
    pub evaluation: Evaluation,
    /// The worst positions.
    pub worst: Vec<WorstToken>,
}

/// Number of worst positions shown in reports.
const WORST: usize = 10;

/// (number, length) of held-out sequences with `tokens` tokens in all.
pub(crate) fn held_out_shape(config: &ModelConfig, tokens: usize) -> (usize, usize) {
    let length = SEQUENCE.min(config.max_position_embeddings);
    (tokens.div_ceil(length).max(1), length)
}

/// Most windows on which the source is measured against itself.
pub(crate) const NOISE_WINDOWS: usize = 2;

/// A text on which results are measured against their source, by llama.cpp's protocol:
/// windows of 512 tokens whose second half is scored.
pub(crate) struct Judge {
    tokenizer: Tokenizer,
    ids: Vec<u32>,
    spec: EvalSpec,
}

impl Judge {
    /// Uses at most `tokens` tokens of `text`. `files` hold the tokenizer.
    ///
    /// # Errors
    /// A text or tokenizer that cannot be read.
    pub(crate) fn new(
        config: &ModelConfig,
        files: &Files,
        text: Text<'_>,
        tokens: usize,
    ) -> Result<Self> {
        let tokenizer = Tokenizer::from_files(files)?;
        let (windows, ctx) = held_out_shape(config, tokens);
        let (ids, name) = match text {
            Text::HeldOut(sequences) => {
                let ids: Vec<u32> = sequences.ids.concat();
                (ids, "held-out, sampled from the source".to_owned())
            }
            Text::File(path) => {
                let text = calibration::text(path)?;
                let name = path.file_name().unwrap_or(path.as_os_str());
                let name = name.to_string_lossy().into_owned();
                (tokenizer.encode(&text)?, name)
            }
        };
        let mut spec = EvalSpec::new(Protocol::Llama, ctx, name);
        spec.max_windows = Some(windows);
        Ok(Judge {
            tokenizer,
            ids,
            spec,
        })
    }

    /// The windows used for measuring.
    ///
    /// # Errors
    /// A text shorter than a window.
    pub(crate) fn windows(&self) -> Result<Vec<Vec<u32>>> {
        let n = self.spec.windows(self.ids.len())?;
        let windows = self.ids.chunks_exact(self.spec.ctx).take(n);
        Ok(windows.map(<[u32]>::to_vec).collect())
    }

    /// Measures the source against itself, with keys and values rounded to FP16 and unrounded, and tokens
    /// fed in other portions: the floor below which a divergence is meaningless.
    ///
    /// # Errors
    /// A text shorter than a window; errors of evaluation.
    pub(crate) fn noise(&self, source: &dyn Engine, progress: &dyn Progress) -> Result<KldStats> {
        let mut spec = self.spec.clone();
        spec.max_windows = spec.max_windows.map(|n| n.min(NOISE_WINDOWS));
        Ok(self_noise(source, &self.ids, &spec, progress)?)
    }

    /// The source's logits, to be compared with when it is no longer loaded.
    pub(crate) fn record(
        &self,
        source: &dyn Engine,
        progress: &dyn Progress,
    ) -> Result<ReferenceLogits> {
        Ok(ReferenceLogits::record(
            source,
            &self.ids,
            &self.spec,
            u64::MAX,
            progress,
        )?)
    }

    /// Measures `engine` against the source.
    ///
    /// # Errors
    /// A text shorter than a window; errors of evaluation.
    pub(crate) fn measure(
        &self,
        engine: &dyn Engine,
        source: &dyn Engine,
        progress: &dyn Progress,
    ) -> Result<Measured> {
        let evaluation = compare(engine, source, &self.ids, &self.spec, progress)?;
        let token = |id: u32| self.tokenizer.decode(&[id], false);
        let worst = evaluation
            .worst(&self.ids, WORST)
            .into_iter()
            .map(|w| WorstToken {
                kld: w.kld,
                context: self.tokenizer.decode(&w.context, false),
                target: token(w.target),
                model_top: token(w.model_top),
                reference_top: token(w.reference_top),
            })
            .collect();
        Ok(Measured { evaluation, worst })
    }
}

/// The report of a folder that an earlier run finished, from its record and files.
///
/// # Errors
/// If the folder cannot be opened or has no record.
pub(crate) fn report_of(checkpoint: &nq_formats::Checkpoint) -> Result<crate::QuantizeReport> {
    let root = checkpoint.files().root();
    let record = nq_formats::nq::record(checkpoint)?.ok_or_else(|| Error::Text {
        path: root.clone(),
        why: "expected a folder quantized by nq, found another format".into(),
    })?;
    let store = checkpoint.store();
    let tensor_bytes: u64 = store.entries().iter().map(|e| e.bytes).sum();
    let linears = record.linears;
    let tuning = record.settings.get("tuning").cloned();
    let tuning: Option<Tuning> = tuning.and_then(|t| serde_json::from_value(t).ok());
    Ok(crate::QuantizeReport {
        out: root,
        format: store.format().into(),
        codes: record.codes(),
        method: record.method,
        bits: linears.map_or(16, |l| l.scheme.bits().ceil() as u32),
        group_size: linears.map_or(nq_formats::Group::Channel, |l| l.scheme.group()),
        bits_per_weight: 8.0 * tensor_bytes as f64 / checkpoint.config().parameters() as f64,
        tensor_bytes,
        file_bytes: store.file_bytes(),
        source_bytes: 0,
        seconds: 0.0,
        peak_rss_bytes: crate::memory::peak_rss(),
        peak_device_bytes: 0,
        estimated_device_bytes: 0,
        fallbacks: record.fallbacks,
        layers: Vec::new(),
        quality: record.quality.and_then(|q| serde_json::from_value(q).ok()),
        estimated_peak_bytes: 0,
        stages: Vec::new(),
        worst_tokens: Vec::new(),
        allocation: Vec::new(),
        tuning: tuning.as_ref().and_then(Tuning::report),
        self_noise: None,
        table_loss: None,
    })
}

#[cfg(test)]
mod tests {
    use super::nats;

    #[test]
    fn divergences_of_any_size_show_four_digits() {
        for (x, expected) in [
            (0.035_534, "0.03553"),
            (0.000_001, "0.000001"),
            (1.5, "1.5"),
            (1234.4, "1234"),
            (1200.0, "1200"),
            (0.0, "0"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "inf"),
            (1e-300, "0"),
        ] {
            assert_eq!(nats(x), expected);
        }
    }
}
