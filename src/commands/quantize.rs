//! `nq quantize`: from a checkpoint to a quantized file of known quality.

use super::convert::FormatArg;
use super::quantize_to::Target;
use crate::cli::Global;
use crate::model;
use crate::terminal::{Terminal, human_bytes};
use anyhow::bail;
use clap::{Args, ValueEnum};
use nq_formats::nq::SourceRecord;
use nq_formats::{AffineScheme, Bits, Group, Progress, Zeros};
use nq_quantize::pipeline::{Job, QuantizeOptions};
use nq_quantize::schemes::default_scheme;
use nq_quantize::{
    CalibrationSource, Effort, Estimate, Limits, QuantizeReport, Schemes, TargetSize, TuneOptions,
};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Flags of `nq quantize`.
#[derive(Args, Debug)]
pub struct QuantizeArgs {
    /// demo, a folder, a hub id or a name from `nq list` [default: Qwen/Qwen3-0.6B]
    pub model: Option<String>,
    /// Bits of a weight: 4 or 8
    #[arg(long, default_value_t = 4, value_parser = parse_bits)]
    pub bits: u32,
    /// How codes are chosen
    #[arg(long, value_enum, default_value_t = MethodArg::Gptq)]
    pub method: MethodArg,
    /// Minutes that tuning may take (auto)
    #[arg(long, default_value_t = 30.0, value_name = "MIN", value_parser = parse_minutes)]
    pub budget: f64,
    /// Tuning steps, whatever time they take; the same steps give the same file (auto)
    #[arg(long, value_name = "N", conflicts_with = "budget", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub tune_steps: Option<u32>,
    /// Sequences of a tuning step
    #[arg(long, default_value_t = 32, value_name = "N", requires = "tune_steps", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub tune_batch: u32,
    /// Tune with products rounded to TF32 on a GPU: faster, coarser
    #[arg(long)]
    pub tune_tf32: bool,
    /// Inputs that share a scale: 32, 64, 128 or channel [default: 64 at 4 bits, 128 at 8]
    #[arg(long, value_name = "N", value_parser = parse_group)]
    pub group_size: Option<Group>,
    /// Store a zero-point per group [default: at 4 bits]
    #[arg(long, overrides_with = "sym")]
    pub asym: bool,
    /// No zero-points [default: at 8 bits]
    #[arg(long)]
    pub sym: bool,
    /// Bits of the embedding and head: 4, 8 or 16 [default: 8, or 16 where the format needs it;
    /// chosen with a target]
    #[arg(long, value_name = "N", value_parser = parse_head_bits)]
    pub head_bits: Option<u32>,
    /// Choose bits (of --bits and more) and groups of each weight by measured sensitivity, for
    /// this many bits per weight
    #[arg(long, value_name = "X", conflicts_with_all = ["group_size", "asym", "sym"])]
    pub target_bpw: Option<f64>,
    /// The same for a size of all tensors, e.g. 400MB
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          conflicts_with_all = ["target_bpw", "group_size", "asym", "sym"])]
    pub target_size: Option<u64>,
    /// Search the clipping range of each group (rtn; always on for awq and gptq)
    #[arg(long)]
    pub clip: bool,
    /// Folder to write [default: nq's own model folder]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// What to write; quality is measured before, on nq's own form of it
    #[arg(long, value_enum, default_value_t = FormatArg::Nq)]
    pub format: FormatArg,
    /// Replace an existing output
    #[arg(long)]
    pub force: bool,
    /// Calibration text: self (sampled from the model) or a .txt or .jsonl file
    #[arg(long, default_value = "self", value_name = "self|FILE")]
    pub calib: String,
    /// Calibration tokens
    #[arg(long, default_value_t = 32_768, value_name = "N", value_parser = parse_tokens)]
    pub calib_tokens: usize,
    /// Seed of everything random
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Raise bits until the mean KL divergence against the source is at most this, or fail
    #[arg(long, value_name = "X")]
    pub max_kld: Option<f64>,
    /// Raise bits until the best token agrees at this share of positions, or fail
    #[arg(long, value_name = "Y")]
    pub min_top1: Option<f64>,
    /// Text to measure quality on [default: held-out text sampled from the model]
    #[arg(long, value_name = "FILE")]
    pub eval_text: Option<PathBuf>,
    /// Tokens to measure quality on, at most
    #[arg(long, default_value_t = 8_192, value_name = "N", value_parser = parse_tokens)]
    pub eval_tokens: usize,
    /// Print the plan and the memory it needs, and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Go on with an interrupted run
    #[arg(long)]
    pub resume: bool,
}

/// Weights that the report shows; --json has them all.
const WORST_LAYERS: usize = 8;

/// Methods by their command-line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MethodArg {
    /// Second-order rounding with error feedback (arXiv 2210.17323)
    Gptq,
    /// Activation-aware scaling (arXiv 2306.00978)
    Awq,
    /// AWQ's scales, then GPTQ
    AwqGptq,
    /// Round to nearest
    Rtn,
    /// gptq, then tuned end to end against the source's logits while that helps
    Auto,
}

fn parse_bits(s: &str) -> Result<u32, String> {
    match s {
        "4" => Ok(4),
        "8" => Ok(8),
        _ => Err("expected 4 or 8".into()),
    }
}

fn parse_minutes(s: &str) -> Result<f64, String> {
    match s.parse() {
        Ok(m) if m > 0.0 && m <= 1e6 => Ok(m),
        _ => Err("expected minutes, more than 0".into()),
    }
}

fn parse_head_bits(s: &str) -> Result<u32, String> {
    match s {
        "4" => Ok(4),
        "8" => Ok(8),
        "16" => Ok(16),
        _ => Err("expected 4, 8 or 16".into()),
    }
}

fn parse_size(s: &str) -> Result<u64, String> {
    const UNITS: [(&str, f64); 7] = [
        ("KiB", 1024.0),
        ("MiB", 1_048_576.0),
        ("GiB", 1_073_741_824.0),
        ("KB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
        ("B", 1.0),
    ];
    let found = UNITS.iter().find_map(|&(unit, factor)| {
        let end = s.len().checked_sub(unit.len())?;
        let matches = s.is_char_boundary(end) && s[end..].eq_ignore_ascii_case(unit);
        matches.then(|| (&s[..end], factor))
    });
    let (number, factor) = found.unwrap_or((s, 1.0));
    match number.trim().replace('_', "").parse::<f64>() {
        Ok(x) if x > 0.0 && x * factor <= 1e15 => Ok((x * factor) as u64),
        _ => Err("expected a size such as 400MB, 1.5GB or 8580000".into()),
    }
}

fn parse_tokens(s: &str) -> Result<usize, String> {
    match s.replace('_', "").parse() {
        Ok(n @ 1..=1_000_000_000) => Ok(n),
        _ => Err("expected a number of tokens, at least 1".into()),
    }
}

fn parse_group(s: &str) -> Result<Group, String> {
    match s {
        "32" => Ok(Group::Size(32)),
        "64" => Ok(Group::Size(64)),
        "128" => Ok(Group::Size(128)),
        "channel" => Ok(Group::Channel),
        _ => Err("expected 32, 64, 128 or channel".into()),
    }
}

impl QuantizeArgs {
    fn method(&self) -> &'static str {
        match (self.method, self.clip) {
            (MethodArg::Gptq | MethodArg::Auto, _) => "gptq",
            (MethodArg::Awq, _) => "awq",
            (MethodArg::AwqGptq, _) => "awq-gptq",
            (MethodArg::Rtn, true) => "rtn-clip",
            (MethodArg::Rtn, false) => "rtn",
        }
    }

    fn target(&self) -> Option<TargetSize> {
        let bits = self.target_bpw.map(TargetSize::BitsPerWeight);
        self.target_size.map(TargetSize::Bytes).or(bits)
    }

    fn tuning(&self) -> Option<TuneOptions> {
        let effort = match self.tune_steps {
            Some(steps) => Effort::Steps {
                steps: steps as usize,
                batch: self.tune_batch as usize,
            },
            None => Effort::Budget(Duration::from_secs_f64(60.0 * self.budget)),
        };
        (self.method == MethodArg::Auto).then_some(TuneOptions {
            effort,
            tf32: self.tune_tf32,
        })
    }

    fn schemes(&self) -> anyhow::Result<Schemes> {
        let bits = if self.bits == 4 { Bits::B4 } else { Bits::B8 };
        let (default, head) = self.format.schemes(default_scheme(bits), self.head_bits)?;
        let zeros = match (self.asym, self.sym) {
            (true, _) => Zeros::Integer,
            (_, true) => Zeros::None,
            _ => default.zeros,
        };
        Ok(Schemes {
            linears: AffineScheme {
                group: self.group_size.unwrap_or(default.group),
                zeros,
                ..default
            },
            head,
            ..Schemes::defaults(default.bits)
        })
    }

    /// The folder's name in nq's own model folder: the model and what differs from defaults.
    fn default_name(&self, model: &str, schemes: &Schemes) -> String {
        let mut name = format!("{model}-int{}", self.bits);
        let default = Schemes::defaults(schemes.linears.bits);
        if self.method == MethodArg::Auto {
            name += "-auto";
        }
        if self.method() != "gptq" {
            name += &format!("-{}", self.method());
        }
        if schemes.linears.group != default.linears.group {
            name += &format!("-{}", schemes.linears.group);
        }
        if schemes.linears.zeros != default.linears.zeros {
            name += match schemes.linears.zeros {
                Zeros::None => "-sym",
                _ => "-asym",
            };
        }
        if schemes.head != default.head {
            let bits = schemes.head.map_or(16, |s| s.bits.width());
            name += &format!("-head{bits}");
        }
        match self.target() {
            Some(TargetSize::Bytes(n)) => name += &format!("-{n}bytes"),
            Some(TargetSize::BitsPerWeight(x)) => name += &format!("-{x}bpw"),
            None => {}
        }
        name + self.format.suffix()
    }
}

/// Runs `nq quantize`.
pub fn run(args: &QuantizeArgs, global: &Global) -> anyhow::Result<ExitCode> {
    if args.tune_steps.is_some() && args.method != MethodArg::Auto {
        use clap::CommandFactory;
        let mut command = crate::cli::Cli::command();
        let kind = clap::error::ErrorKind::ArgumentConflict;
        command
            .error(kind, "--tune-steps needs --method auto")
            .exit();
    }
    if args.min_top1.is_some_and(|y| !(0.0..=1.0).contains(&y)) {
        bail!("--min-top1 is a share: expected 0 to 1");
    }
    if args.target().is_some() && args.format != FormatArg::Nq {
        bail!(
            "--target-bpw and --target-size choose among schemes of nq's own format: expected --format nq"
        );
    }
    let terminal = Terminal::new();
    let model = model::open(args.model.as_deref(), global, &terminal)?;
    let schemes = args.schemes()?;
    let (out, call) = match &args.out {
        Some(out) => (out.clone(), out.display().to_string()),
        None => {
            let name = args.default_name(&model.name, &schemes);
            (model::models_dir()?.join(&name), name)
        }
    };
    let target = Target {
        format: args.format,
        out,
        force: args.force,
    };
    if let Some(cost) = target.check(model.checkpoint.config(), &schemes)? {
        terminal.note(&cost);
    }
    let options = QuantizeOptions {
        bits: schemes.linears.bits,
        schemes,
        target: args.target(),
        head_fixed: args.head_bits.is_some(),
        schemes_fixed: args.format != FormatArg::Nq,
        method: args.method().into(),
        tuning: args.tuning(),
        calibration: match args.calib.as_str() {
            "self" => CalibrationSource::SelfSampled,
            path => CalibrationSource::File(path.into()),
        },
        calib_tokens: args.calib_tokens,
        seed: args.seed,
        limits: Limits {
            max_kld: args.max_kld,
            min_top1: args.min_top1,
        },
        eval_text: args.eval_text.clone(),
        eval_tokens: args.eval_tokens,
        out: target.folder(),
        force: args.force,
        resume: args.resume,
        source: SourceRecord {
            name: model.source.clone(),
            ..SourceRecord::default()
        },
        load: global.load_options(),
    };
    let job = Job::new(&model.checkpoint, &options, &terminal)?;
    let estimate = job.estimate();
    for line in plan(&model.name, &options, &estimate) {
        terminal.note(&line);
    }
    if args.dry_run {
        let tuning = job.tuning_estimate()?;
        if let Some(tuning) = &tuning {
            terminal.note(&tuning.describe());
        }
        if global.json {
            let mut json = serde_json::to_value(estimate)?;
            json["tuning"] = serde_json::to_value(tuning)?;
            println!("{}", serde_json::to_string_pretty(&json)?);
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(parent) = options.out.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let mut report = match job.run() {
        Ok(report) => report,
        Err(nq_quantize::Error::Guard {
            broken,
            worst,
            report,
            ..
        }) => {
            if global.json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                print_report(&report);
            }
            eprintln!("nq: not written: {broken}");
            eprintln!("nq: the worst layers: {worst}");
            eprintln!("nq: the work is kept: --resume with other limits goes on from it");
            return Ok(ExitCode::from(1));
        }
        Err(e) => return Err(e.into()),
    };
    let lines = target.write(&mut report, &terminal)?;
    if global.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print_report(&report);
        for line in lines {
            row("written", line);
        }
        println!();
        println!("Talk to it:  nq chat {call}");
    }
    Ok(ExitCode::SUCCESS)
}

/// What will be done and what it takes, in lines.
fn plan(name: &str, options: &QuantizeOptions, estimate: &Estimate) -> Vec<String> {
    let head = match options.schemes.head {
        Some(head) => head.to_string(),
        None => "as it is".into(),
    };
    let least = u32::from(options.bits);
    let chosen = match options.target {
        None => None,
        Some(TargetSize::Bytes(n)) => Some(format!("at most {}", human_bytes(n))),
        Some(TargetSize::BitsPerWeight(x)) => Some(format!("at most {x} bits per weight")),
    };
    let mut lines = vec![match chosen {
        Some(size) => format!(
            "{name}: {least} bits and more with {}, chosen by measured sensitivity, {size}",
            options.method
        ),
        None => format!(
            "{name}: layers to {} with {}, embedding and head {head}, {} to write",
            options.schemes.linears,
            options.method,
            human_bytes(estimate.file_bytes),
        ),
    }];
    lines.push(format!(
        "memory: {} at its peak ({}), {} of it the memory-mapped source",
        human_bytes(estimate.peak),
        estimate.stage,
        human_bytes(estimate.mapped),
    ));
    lines
}

fn row(name: &str, value: String) {
    println!("{name:<16} {value}");
}

fn print_report(report: &QuantizeReport) {
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
    if let Some(q) = &report.quality {
        row(
            "measured on",
            format!(
                "{} tokens, {} ({:?} protocol, ctx {})",
                q.tokens, q.text, q.protocol, q.ctx
            )
            .to_lowercase(),
        );
        if let Some(a) = &q.against {
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
    }
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
    // Parts of stages, and what takes no time to speak of, are left to --json.
    let stages = report.stages.iter();
    let slow: Vec<String> = stages
        .filter(|s| !s.name.contains(':') && s.seconds >= 0.05 * report.seconds)
        .map(|s| format!("{} {:.1} s", s.name, s.seconds))
        .collect();
    if !slow.is_empty() {
        row("of it", slow.join(", "));
    }
    if !report.allocation.is_empty() {
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
    if !report.layers.is_empty() {
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
    if !report.worst_tokens.is_empty() {
        println!("\nWhere it strays most:");
        for w in &report.worst_tokens {
            let context: String = w.context.escape_debug().collect();
            println!(
                "  KLD {:.2}  ...{context} -> {:?} (source {:?}, text {:?})",
                w.kld, w.model_top, w.reference_top, w.target
            );
        }
    }
}
