//! Renders evaluation reports as documents: Markdown, or self-contained HTML.

mod document;
mod html;
mod markdown;
mod numbers;
mod plots;
mod ranking;
mod verdict;

pub use document::{Document, Reference, Section, WorstLine};
pub use html::html;
pub use markdown::markdown;
pub use ranking::{frontier_line, ranking_tables, write_ranking};
pub use verdict::verdicts;

use crate::depth::{DepthBucket, DepthComparison};
use crate::error::{Error, Result};
use crate::evaluate::Evaluation;
use crate::report::{Comparison, KldStats};
use crate::spread::Over;
pub use numbers::kld_cell;
use numbers::{percent_change, plus_minus};
use std::path::Path;

/// Header of the table of worst positions.
const WORST_HEAD: [&str; 6] = [
    "KLD",
    "window:position",
    "after",
    "text",
    "reference's best",
    "model's best",
];

/// Explains the probabilities in a table of worst positions.
const WORST_NOTE: &str =
    "After each token: its probability according to the reference → according to the model.";

/// Writes a document to `path` in the form given by its extension: `.md`, `.html` or `.htm`. The
/// file is written beside its place and renamed into it.
///
/// # Errors
/// [`Error::Spec`] for another extension, [`Error::Write`], [`Error::Plot`].
pub fn write(path: &Path, document: &Document<'_>) -> Result<()> {
    let contents = match DocumentForm::of(path)? {
        DocumentForm::Markdown => markdown(document),
        DocumentForm::Html => html(document)?,
    };
    put(path, &contents)
}

/// Writes a document beside its place and renames it into that.
fn put(path: &Path, contents: &str) -> Result<()> {
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
pub enum DocumentForm {
    /// `.md`
    Markdown,
    /// `.html`, `.htm`
    Html,
}

impl DocumentForm {
    /// The form for a path's extension.
    ///
    /// # Errors
    /// [`Error::Spec`] for any other extension.
    pub fn of(path: &Path) -> Result<Self> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("md") => Ok(DocumentForm::Markdown),
            Some("html" | "htm") => Ok(DocumentForm::Html),
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
        Some(r) => format!("{} against {}", names.join(", "), r.name),
        None => format!("Evaluation of {}", names.join(", ")),
    }
}

/// All figures as head and rows: a row for each figure, a column for each model and for the reference.
pub fn figures(document: &Document<'_>) -> (Vec<String>, Vec<Vec<String>>) {
    let reference = document.reference.as_ref();
    let mut head = vec![String::new()];
    head.extend(document.models.iter().map(|m| m.name.clone()));
    // A model that is compared with itself is there once.
    let beside = reference.filter(|r| document.models.iter().any(|m| m.name != r.name));
    head.extend(beside.map(|r| format!("{} (source)", r.name)));
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut push = |name: &str, cell: &Cell<'_>, of_reference: &str| {
        let cells: Vec<Option<String>> = document.models.iter().map(cell).collect();
        if cells.iter().any(Option::is_some) {
            let mut row = vec![name.to_owned()];
            row.extend(cells.into_iter().map(Option::unwrap_or_default));
            row.extend(beside.map(|_| of_reference.to_owned()));
            rows.push(row);
        }
    };
    let against = |m: &Section<'_>| m.evaluation.report.against.clone();
    let megabytes = |bytes: u64| format!("{:.2}", bytes as f64 / 1e6);
    push(
        "MB of tensors",
        &|m| Some(megabytes(m.bytes)),
        &reference.map_or_else(String::new, |r| megabytes(r.bytes)),
    );
    push(
        "bits per weight",
        &|m| Some(format!("{:.2}", m.bits_per_weight)),
        &reference.map_or_else(String::new, |r| format!("{:.2}", r.bits_per_weight)),
    );
    push("activations", &|m| Some(m.activations.clone()), "f32");
    let kld =
        |get: fn(&KldStats) -> f64| move |m: &Section<'_>| Some(kld_cell(get(&against(m)?.kld)));
    push("KLD mean", &|m| Some(mean_kld(m, &against(m)?)), "0");
    push("KLD median", &kld(|k| k.median), "");
    push("KLD 90 %", &kld(|k| k.p90), "");
    push("KLD 99 %", &kld(|k| k.p99), "");
    push("KLD 99.9 %", &kld(|k| k.p999), "");
    push("KLD max", &kld(|k| k.max), "");
    push("KLD floor", &|m| Some(kld_cell(m.self_noise?.mean)), "");
    push("same best token", &|m| Some(same_best(m, &against(m)?)), "");
    let first = document.models.first().and_then(against);
    push(
        "perplexity",
        &|m| Some(perplexity(m)),
        &first.map_or_else(String::new, |c| format!("{:.4}", c.ppl_ref)),
    );
    push("perplexity change", &|m| Some(change(m, &against(m)?)), "");
    push(
        "RMS dp",
        &|m| Some(format!("{:.2} %", 100.0 * against(m)?.rms_dp)),
        "",
    );
    (head, rows)
}

type Cell<'a> = dyn Fn(&Section<'_>) -> Option<String> + 'a;

/// The chief figures of several models, a row for each.
fn summary(document: &Document<'_>) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let mut head = vec!["model", "MB", "bits/weight"];
    if document.reference.is_some() {
        head.extend(["mean KLD", "99 %", "same best token"]);
    }
    head.push("perplexity");
    if document.reference.is_some() {
        head.push("its change");
    }
    let rows = document.models.iter().map(|m| {
        let mut cells = vec![
            m.name.clone(),
            format!("{:.2}", m.bytes as f64 / 1e6),
            format!("{:.2}", m.bits_per_weight),
        ];
        let against = m.evaluation.report.against.as_ref();
        if let Some(c) = against {
            cells.extend([mean_kld(m, c), kld_cell(c.kld.p99), same_best(m, c)]);
        }
        cells.push(perplexity(m));
        cells.extend(against.map(|c| change(m, c)));
        cells
    });
    (head, rows.collect())
}

fn mean_kld(m: &Section<'_>, c: &Comparison) -> String {
    plus_minus(c.kld.mean, m.evaluation.errors().kld)
}

fn same_best(m: &Section<'_>, c: &Comparison) -> String {
    let error = m.evaluation.errors().same_top1;
    format!("{:.2} ± {:.2} %", 100.0 * c.same_top1, 100.0 * error)
}

fn perplexity(m: &Section<'_>) -> String {
    let e = m.evaluation;
    format!("{:.4} ± {:.4}", e.report.ppl, e.errors().ppl)
}

fn change(m: &Section<'_>, c: &Comparison) -> String {
    percent_change(c.ln_ppl_ratio, m.evaluation.errors().ln_ppl_ratio)
}

/// A model's figures by depth, as head and rows.
fn depth_table(section: &Section<'_>) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let mut head = vec!["position", "tokens", "perplexity"];
    if !section.evaluation.pairs.is_empty() {
        head.extend(["its change", "mean KLD"]);
    }
    let row = |b: DepthBucket| {
        let ppl = format!("{:.4} ± {:.4}", b.ppl, b.ppl_se);
        let mut cells = vec![b.name(), b.tokens.to_string(), ppl];
        if let Some(c) = b.against {
            cells.push(percent_change(c.ln_ppl_ratio, c.ln_ppl_ratio_se));
            cells.push(depth_kld_cell(&c));
        }
        cells
    };
    let rows = section.evaluation.by_depth().into_iter().map(row);
    (head, rows.collect())
}

/// A bucket's mean divergence and its standard error.
pub fn depth_kld_cell(c: &DepthComparison) -> String {
    plus_minus(c.kld, c.kld_se)
}

/// A sentence on how the text was cut and scored.
pub fn protocol_line(e: &Evaluation) -> String {
    let r = &e.report;
    let scored = match r.protocol {
        crate::Protocol::Hf => "every token but the first of a window",
        crate::Protocol::Llama => "the second half of a window",
        crate::Protocol::Texts => {
            return format!(
                "{} whole {} of up to {} tokens, {} tokens scored (every one but a text's first and those of images); KV cache {}",
                r.windows,
                if r.windows == 1 { "text" } else { "texts" },
                r.ctx,
                r.tokens,
                r.kv
            );
        }
    };
    let windows = if r.windows == 1 { "window" } else { "windows" };
    format!(
        "{} protocol: {} {windows} of {} tokens, {} tokens scored ({scored}); KV cache {}",
        r.protocol, r.windows, r.ctx, r.tokens, r.kv
    )
}

/// What the errors of the figures are.
pub fn errors_line(document: &Document<'_>) -> Option<String> {
    let first = document.models.first()?.evaluation;
    let over = match first.errors().over {
        Over::Windows => format!("over the {} windows", first.report.windows),
        Over::Tokens => "over the tokens; as these are correlated, the true error is larger".into(),
    };
    Some(format!("±: one standard error, {over}"))
}

/// What the figures are, a sentence for each that does not explain itself.
fn notes(document: &Document<'_>) -> Vec<String> {
    let mut lines: Vec<String> = errors_line(document).map(|l| l + ".").into_iter().collect();
    if let Some(reference) = &document.reference {
        lines.push(format!(
            "KLD: KL(reference || model), how far the model's probabilities of the next token are from those of {}, in \
             nats per token. KLD 99 %: 99 % of tokens have less.",
            reference.name
        ));
    }
    if let Some(noise) = document.models.first().and_then(|m| m.self_noise) {
        lines.push(format!(
            "KLD floor: the reference's KLD from itself (mean {}, max {}) when its KV cache is kept in f32 and the text is \
             fed in pieces of other sizes. Less than this says nothing.",
            kld_cell(noise.mean),
            kld_cell(noise.max)
        ));
    }
    if document.reference.is_some() {
        lines.push(
            "RMS dp: root mean square of the change in the probability of the text's tokens."
                .into(),
        );
    }
    lines.extend(verdict::yardstick(document));
    lines
}
