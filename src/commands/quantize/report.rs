//! What `nq quantize` made, told.

use crate::cli::Global;
use crate::terminal::human_bytes;
use nq_evals::EvalReport;
use nq_formats::Group;
use nq_quantize::QuantizeReport;

/// Weights that the report shows; --json has them all.
const WORST_LAYERS: usize = 8;

/// Prints the report: JSON if `global` asks for it.
pub(super) fn show(report: &QuantizeReport, global: &Global) -> anyhow::Result<()> {
    if global.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    print_file(report);
    if let Some(quality) = &report.quality {
        print_quality(quality);
    }
    print_cost(report);
    print_allocation(report);
    print_worst_layers(report);
    print_worst_tokens(report);
    Ok(())
}

/// A line of the report.
pub(super) fn row(name: &str, value: String) {
    println!("{name:<16} {value}");
}

fn print_file(report: &QuantizeReport) {
    row("out", report.out.display().to_string());
    let group = match report.group_size {
        Group::Size(n) => format!("group {n}"),
        Group::Channel => "per channel".into(),
    };
    row(
        "scheme",
        format!("{}, {} bits, {group}", report.method, report.bits),
    );
    if report.file_bytes > 0 {
        let times = report.source_bytes as f64 / report.file_bytes.max(1) as f64;
        row(
            "size",
            format!(
                "{} in tensors, {} in files ({:.3} bits per weight, {times:.1} times smaller)",
                human_bytes(report.tensor_bytes),
                human_bytes(report.file_bytes),
                report.bits_per_weight,
            ),
        );
    }
}

fn print_quality(q: &EvalReport) {
    row(
        "measured on",
        format!(
            "{} tokens, {} ({:?} protocol, ctx {})",
            q.tokens, q.text, q.protocol, q.ctx
        )
        .to_lowercase(),
    );
    let Some(a) = &q.against else { return };
    let k = &a.kld;
    row(
        "KL divergence",
        format!(
            "mean {:.5}, median {:.5}, 90 % {:.4}, 99 % {:.4}, 99.9 % {:.3}, max {:.3}",
            k.mean, k.median, k.p90, k.p99, k.p999, k.max
        ),
    );
    row("same best token", format!("{:.2} %", 100.0 * a.same_top1));
    row(
        "perplexity",
        format!(
            "{:.3} (source {:.3}, {:+.2} %)",
            q.ppl,
            a.ppl_ref,
            100.0 * (a.ln_ppl_ratio.exp() - 1.0)
        ),
    );
}

fn print_cost(report: &QuantizeReport) {
    if let Some(noise) = &report.self_noise {
        row(
            "noise floor",
            format!("{:.1e}: the source against itself in FP16", noise.mean),
        );
    }
    row("fallbacks", report.fallbacks.len().to_string());
    if report.seconds > 0.0 {
        row(
            "took",
            format!(
                "{:.1} s, {} of memory at the peak",
                report.seconds,
                human_bytes(report.peak_rss_bytes)
            ),
        );
    }
    if report.peak_device_bytes > 0 {
        row(
            "GPU memory",
            format!(
                "{} at the peak, {} estimated",
                human_bytes(report.peak_device_bytes),
                human_bytes(report.estimated_device_bytes)
            ),
        );
    }
    // Parts of stages, and what takes no time to speak of, are left to --json.
    let stages = report.stages.iter();
    let slow: Vec<String> = stages
        .filter(|s| !s.name.contains(':') && s.seconds >= 0.05 * report.seconds)
        .map(|s| format!("{} {:.1} s", s.name, s.seconds))
        .collect();
    if !slow.is_empty() {
        row("of it", slow.join(", "));
    }
}

fn print_allocation(report: &QuantizeReport) {
    if report.allocation.is_empty() {
        return;
    }
    println!("\nChosen by sensitivity:");
    println!(
        "  {:<28} {:<24} {:>12} {:>10}",
        "weights", "scheme", "bytes", "KLD"
    );
    for c in &report.allocation {
        println!(
            "  {:<28} {:<24} {:>12} {:>10.6}",
            c.group, c.scheme, c.bytes, c.loss
        );
    }
}

fn print_worst_layers(report: &QuantizeReport) {
    if report.layers.is_empty() {
        return;
    }
    println!("\nThe worst of {} weights:", report.layers.len());
    println!(
        "  {:<40} {:>4} {:>9} {:>9}",
        "weight", "bits", "error", "at output"
    );
    for l in report.worst(WORST_LAYERS) {
        let output = match l.output_error {
            Some(e) => format!("{:.2} %", 100.0 * e),
            None => "-".into(),
        };
        let error = format!("{:.2} %", 100.0 * l.rel_error);
        println!("  {:<40} {:>4} {error:>9} {output:>9}", l.name, l.bits);
    }
}

fn print_worst_tokens(report: &QuantizeReport) {
    if report.worst_tokens.is_empty() {
        return;
    }
    println!("\nWhere it strays most:");
    for w in &report.worst_tokens {
        let context: String = w.context.escape_debug().collect();
        println!(
            "  KLD {:.2}  ...{context} -> {:?} (source {:?}, text {:?})",
            w.kld, w.model_top, w.reference_top, w.target
        );
    }
}
