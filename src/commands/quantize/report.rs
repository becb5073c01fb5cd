//! The report that `nq quantize` prints.

use crate::flags::Global;
use crate::terminal::{human_bytes, print_line};
use nq_evals::{EvalReport, KldStats};
use nq_quantize::QuantizeReport;
use std::collections::BTreeSet;
use std::fmt::Display;

/// Number of weights shown in the report; --json has all.
const WORST_LAYERS: usize = 8;

/// Prints the report: JSON if `global` says so, otherwise lines for people, `closing` last.
pub(super) fn show(
    report: &QuantizeReport,
    closing: &[String],
    global: &Global,
) -> anyhow::Result<()> {
    if global.json {
        return Ok(print_line(&serde_json::to_string_pretty(&report)?)?);
    }
    let mut lines = file_lines(report);
    match &report.quality {
        Some(quality) => lines.extend(quality_lines(quality)),
        None => lines.push(row("quality", "not measured, and the file says so")),
    }
    lines.extend(cost_lines(report));
    lines.extend(allocation_lines(report));
    if global.verbose {
        lines.extend(worst_layer_lines(report));
        lines.extend(worst_token_lines(report));
    }
    lines.extend_from_slice(closing);
    Ok(print_line(&lines.join("\n"))?)
}

/// A line of the report.
pub(super) fn row(name: &str, value: impl Display) -> String {
    format!("{name:<16} {value}")
}

fn file_lines(report: &QuantizeReport) -> Vec<String> {
    let layers = report
        .layers
        .iter()
        .filter(|l| l.name.starts_with("model.layers."));
    let bits: BTreeSet<u32> = layers.map(|l| l.bits).collect();
    let layers = match (bits.first(), bits.last()) {
        (Some(least), Some(most)) if least < most => {
            format!(", {least} to {most} bits in the layers")
        }
        _ => String::new(),
    };
    let chosen = match report.allocation.is_empty() {
        true => "",
        false => ", chosen by sensitivity (below)",
    };
    let scheme = format!("{}{layers}{chosen}, method {}", report.codes, report.method);
    let mut lines = vec![row("out", report.out.display()), row("scheme", scheme)];
    if report.file_bytes > 0 {
        let times = report.source_bytes as f64 / report.file_bytes as f64;
        let size = format!(
            "{} in tensors, {} in files ({:.1} bits per weight, {times:.1} times smaller)",
            human_bytes(report.tensor_bytes),
            human_bytes(report.file_bytes),
            report.bits_per_weight,
        );
        lines.push(row("size", size));
    }
    lines
}

fn quality_lines(q: &EvalReport) -> Vec<String> {
    let measured = format!(
        "{} tokens, {} ({:?} protocol, ctx {})",
        q.tokens, q.text, q.protocol, q.ctx
    );
    let mut lines = vec![row("measured on", measured.to_lowercase())];
    let Some(a) = &q.against else { return lines };
    let k = &a.kld;
    let divergence = format!(
        "mean {:.5}, median {:.5}, 90 % {:.4}, 99 % {:.4}, 99.9 % {:.3}, max {:.3}",
        k.mean, k.median, k.p90, k.p99, k.p999, k.max
    );
    let perplexity = format!(
        "{:.3} (source {:.3}, {:+.2} %)",
        q.ppl,
        a.ppl_ref,
        100.0 * (a.ln_ppl_ratio.exp() - 1.0)
    );
    lines.extend([
        row("KL divergence", divergence),
        row("same best token", format!("{:.2} %", 100.0 * a.same_top1)),
        row("perplexity", perplexity),
    ]);
    lines
}

fn cost_lines(report: &QuantizeReport) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(t) = &report.tuning {
        let what = if t.codes { "codes, scales" } else { "scales" };
        let tuned = format!(
            "{what} and norms, {} steps of {} x {} tokens: KL divergence {:.5} -> {:.5} on text \
             that no step saw",
            t.steps, t.batch, t.length, t.held_out_before, t.held_out_after
        );
        lines.push(row("tuned", tuned));
    }
    if let Some(noise) = &report.self_noise {
        let floor = format!("{:.1e}: the source against itself in FP16", noise.mean);
        lines.push(row("noise floor", floor));
    }
    if let Some(loss) = &report.table_loss {
        let mean = |part: Option<KldStats>| match part {
            Some(kld) => format!("{:.1e}", kld.mean),
            None => "not measured".into(),
        };
        let (tables, body) = (mean(loss.tables), mean(loss.body));
        let parts = format!("KL divergence by the table alone {tables}, by the rest alone {body}");
        lines.push(row("n-grams", parts));
    }
    match &report.fallbacks[..] {
        [] => lines.push(row("fallbacks", "none")),
        all => lines.extend(all.iter().map(|why| row("fallback", why))),
    }
    if report.seconds > 0.0 {
        let took = format!(
            "{:.1} s, {} of memory at the peak",
            report.seconds,
            human_bytes(report.peak_rss_bytes)
        );
        lines.push(row("took", took));
    }
    if report.peak_device_bytes > 0 {
        let memory = format!(
            "{} at the peak, {} estimated",
            human_bytes(report.peak_device_bytes),
            human_bytes(report.estimated_device_bytes)
        );
        lines.push(row("GPU memory", memory));
    }
    // Parts of stages, and very short stages, are only in --json.
    let stages = report.stages.iter();
    let slow: Vec<String> = stages
        .filter(|s| !s.name.contains(':') && s.seconds >= 0.05 * report.seconds)
        .map(|s| format!("{} {:.1} s", s.name, s.seconds))
        .collect();
    if !slow.is_empty() {
        lines.push(row("mostly", slow.join(", ")));
    }
    lines
}

fn allocation_lines(report: &QuantizeReport) -> Vec<String> {
    if report.allocation.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![
        "\nChosen by sensitivity:".to_owned(),
        format!(
            "  {:<28} {:<24} {:>12} {:>10}",
            "weights", "scheme", "bytes", "KLD"
        ),
    ];
    lines.extend(report.allocation.iter().map(|c| {
        format!(
            "  {:<28} {:<24} {:>12} {:>10.6}",
            c.group, c.scheme, c.bytes, c.loss
        )
    }));
    lines
}

fn worst_layer_lines(report: &QuantizeReport) -> Vec<String> {
    if report.layers.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![
        format!("\nThe worst of {} weights:", report.layers.len()),
        format!(
            "  {:<40} {:>4} {:>12} {:>12}",
            "name", "bits", "weight error", "output error"
        ),
    ];
    lines.extend(report.worst(WORST_LAYERS).into_iter().map(|l| {
        let output = match l.output_error {
            Some(e) => format!("{:.2} %", 100.0 * e),
            None => "-".into(),
        };
        let error = format!("{:.2} %", 100.0 * l.rel_error);
        format!("  {:<40} {:>4} {error:>12} {output:>12}", l.name, l.bits)
    }));
    lines
}

fn worst_token_lines(report: &QuantizeReport) -> Vec<String> {
    if report.worst_tokens.is_empty() {
        return Vec::new();
    }
    let mut lines = vec!["\nWhere it strays most:".to_owned()];
    lines.extend(report.worst_tokens.iter().map(|w| {
        let context: String = w.context.escape_debug().collect();
        format!(
            "  KLD {:.2}  ...{context} -> {:?} (source {:?}, text {:?})",
            w.kld, w.model_top, w.reference_top, w.target
        )
    }));
    lines
}
