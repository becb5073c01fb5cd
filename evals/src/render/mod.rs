//! Renders evaluation reports as documents: Markdown, or self-contained HTML.

mod html;
mod markdown;
mod plots;

pub use html::html;
pub use markdown::markdown;

use crate::depth::{DepthBucket, DepthComparison};
use crate::error::{Error, Result};
use crate::evaluate::Evaluation;
use crate::report::KldStats;
use std::path::Path;

/// The content of a document.
pub struct Document<'a> {
    /// Name and version of the program that measured.
    pub program: String,
    /// The command that measured, quoted for a shell.
    pub command: String,
    /// Date in words.
    pub date: String,
    /// Description of the text.
    pub text: String,
    /// Name of the reference, if any.
    pub reference: Option<String>,
    /// The models, in the order given.
    pub models: Vec<Section<'a>>,
    /// True if it shows quality by depth.
    pub by_depth: bool,
}

/// One model of a document.
pub struct Section<'a> {
    /// Its name.
    pub name: String,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// Bytes of its tensors over its parameters, times 8.
    pub bits_per_weight: f64,
    /// Description of the engine and device.
    pub engine: String,
    /// The measurement.
    pub evaluation: &'a Evaluation,
    /// The positions at which it differs most from the reference.
    pub worst: Vec<WorstLine>,
    /// KL divergence of the reference from itself with other rounding, and in pieces of other sizes.
    pub self_noise: Option<KldStats>,
}

/// Header of the table of worst positions.
const WORST_HEAD: [&str; 6] = [
    "KLD",
    "window:position",
    "after",
    "text has",
    "reference's best",
    "model's best",
];

/// A worst position, as text.
#[derive(Clone, Debug)]
pub struct WorstLine {
    /// KL divergence in nats.
    pub kld: f64,
    /// Window, counted from 0.
    pub window: usize,
    /// Position in the window, counted from 0.
    pub position: usize,
    /// The text up to the position.
    pub context: String,
    /// The next token of the text.
    pub target: String,
    /// The reference's best token.
    pub reference_top: String,
    /// The model's best token.
    pub model_top: String,
}

/// Writes a document to `path` in the form given by its extension: `.md`, `.html` or `.htm`. The
/// file is written beside its place and renamed into it.
///
/// # Errors
/// [`Error::Spec`] for another extension, [`Error::Write`], [`Error::Plot`].
pub fn write(path: &Path, document: &Document<'_>) -> Result<()> {
    let contents = match Kind::of(path)? {
        Kind::Markdown => markdown(document),
        Kind::Html => html(document)?,
    };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".tmp{}", std::process::id()));
    let temporary = path.with_file_name(name);
    std::fs::write(&temporary, contents)
        .and_then(|()| std::fs::rename(&temporary, path))
        .map_err(|cause| {
            let _ = std::fs::remove_file(&temporary); // the first error is the one to report
            Error::Write {
                path: path.into(),
                cause,
            }
        })
}

/// Forms of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `.md`
    Markdown,
    /// `.html`, `.htm`
    Html,
}

impl Kind {
    /// The form for a path's extension.
    ///
    /// # Errors
    /// [`Error::Spec`] for any other extension.
    pub fn of(path: &Path) -> Result<Self> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("md") => Ok(Kind::Markdown),
            Some("html" | "htm") => Ok(Kind::Html),
            _ => Err(Error::Spec {
                what: "report",
                expected: "a file that ends in .md or .html".into(),
                found: path.display().to_string(),
            }),
        }
    }
}

/// The title: the models, and what they are compared with.
fn title(document: &Document<'_>) -> String {
    let names: Vec<&str> = document.models.iter().map(|m| m.name.as_str()).collect();
    match &document.reference {
        Some(reference) => format!("{} against {reference}", names.join(", ")),
        None => format!("Evaluation of {}", names.join(", ")),
    }
}

/// The figures as head and rows: a row for each of several models; of one model a row for each figure, as one line
/// would be too wide.
fn table(document: &Document<'_>) -> (Vec<String>, Vec<Vec<String>>) {
    let (head, rows) = by_model(document);
    let mut head: Vec<String> = head.into_iter().map(str::to_owned).collect();
    match &rows[..] {
        [one] => {
            let figures = head.drain(1..).zip(&one[1..]);
            let rows = figures
                .map(|(name, cell)| vec![name, cell.clone()])
                .collect();
            (vec!["figure".into(), one[0].clone()], rows)
        }
        _ => (head, rows),
    }
}

fn by_model(document: &Document<'_>) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let mut head = vec!["model", "MB", "bits/weight", "perplexity"];
    if document.reference.is_some() {
        head.extend([
            "mean KLD",
            "median",
            "p90",
            "p99",
            "p99.9",
            "max",
            "same best token",
            "RMS dp",
            "ln(ppl/ppl_ref)",
        ]);
    }
    let rows = document.models.iter().map(|m| {
        let r = &m.evaluation.report;
        let mut cells = vec![
            m.name.clone(),
            format!("{:.2}", m.bytes as f64 / 1e6),
            format!("{:.2}", m.bits_per_weight),
            format!("{:.4} ± {:.4}", r.ppl, r.ppl_se),
        ];
        if let Some(c) = &r.against {
            let k = &c.kld;
            cells.extend([k.mean, k.median, k.p90, k.p99, k.p999, k.max].map(kld_cell));
            cells.push(format!("{:.2} %", 100.0 * c.same_top1));
            cells.push(format!("{:.2} %", 100.0 * c.rms_dp));
            cells.push(format!("{:+.5} ± {:.5}", c.ln_ppl_ratio, c.ln_ppl_ratio_se));
        }
        cells
    });
    (head, rows.collect())
}

/// A model's figures by depth, as head and rows.
fn depth_table(section: &Section<'_>) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let mut head = vec!["position", "tokens", "perplexity"];
    if !section.evaluation.pairs.is_empty() {
        head.extend(["reference's", "mean KLD"]);
    }
    let row = |b: DepthBucket| {
        let ppl = format!("{:.4} ± {:.4}", b.ppl, b.ppl_se);
        let mut cells = vec![b.name(), b.tokens.to_string(), ppl];
        if let Some(c) = b.against {
            cells.push(format!("{:.4}", c.ppl_ref));
            cells.push(depth_kld_cell(&c));
        }
        cells
    };
    let rows = section.evaluation.by_depth().into_iter().map(row);
    (head, rows.collect())
}

/// A bucket's mean divergence and its standard error.
pub fn depth_kld_cell(c: &DepthComparison) -> String {
    format!("{} ± {}", kld_cell(c.kld), kld_cell(c.kld_se))
}

/// A divergence with a suitable number of digits.
pub fn kld_cell(v: f64) -> String {
    if v.abs() >= 1e-5 {
        format!("{v:.5}")
    } else if v.abs() < 1e-12 {
        "0".into()
    } else {
        format!("{v:.1e}")
    }
}

/// A sentence on how the text was cut and scored.
pub fn protocol_line(e: &Evaluation) -> String {
    let r = &e.report;
    let scored = match r.protocol {
        crate::Protocol::Hf => "every token but the first of a window",
        crate::Protocol::Llama => "the second half of a window",
    };
    let windows = if r.windows == 1 { "window" } else { "windows" };
    format!(
        "{} protocol: {} {windows} of {} tokens, {} tokens scored ({scored}); KV cache {}",
        r.protocol, r.windows, r.ctx, r.tokens, r.kv
    )
}

/// Sentences on the reference's perplexity and the floor of the measurement.
fn reference_lines(document: &Document<'_>) -> Vec<String> {
    let mut lines = Vec::new();
    let first = document.models.first();
    let against = first.and_then(|m| m.evaluation.report.against.as_ref());
    if let (Some(name), Some(c)) = (&document.reference, against) {
        lines.push(format!(
            "Reference: {name}, perplexity {:.4}. KL divergence is KL(reference || model) in \
             nats per token.",
            c.ppl_ref
        ));
    }
    if let Some(noise) = first.and_then(|m| m.self_noise) {
        lines.push(format!(
            "Floor: the reference strays {} (mean; max {}) from itself when its KV cache is \
             kept in f32 and the text is processed in pieces of other sizes.",
            kld_cell(noise.mean),
            kld_cell(noise.max)
        ));
    }
    lines
}
