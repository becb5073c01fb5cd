//! `nq convert`: a checkpoint in another format, with the same numbers if that can hold them.

use crate::flags::{Global, conflict};
use crate::model;
use crate::terminal::{Terminal, human_bytes, print_line};
use crate::written;
use anyhow::bail;
use clap::{Args, ValueEnum};
use nq_formats::durable::Unchecked;
use nq_formats::export::Mix;
use nq_formats::export::{
    Change, Difference, ExportFormat, ExportOptions, ExportReport, compare, export, requantization,
};
use nq_formats::gguf::BlockType;
use nq_formats::{Checkpoint, Exactness, nq};
use nq_model::Dims;
use nq_model::names::{Shape, parameters};
use nq_quantize::requantize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Flags of `nq convert`.
#[derive(Args, Debug)]
pub(crate) struct ConvertArgs {
    /// demo, a folder, a file, a hub id or a name from `nq list`
    #[arg(value_name = "IN")]
    pub model: OsString,
    /// File (gguf) or folder to write
    pub out: PathBuf,
    /// Format to write
    #[arg(long, value_enum)]
    pub format: FormatArg,
    /// Tensor types of a GGUF file [default: those that hold the numbers exactly]
    #[arg(long = "type", value_enum, value_name = "TYPE")]
    pub kind: Option<TypeArg>,
    /// Round quantized weights again if the format cannot hold them
    #[arg(long)]
    pub requantize: bool,
    /// Read the result back and compare every number
    #[arg(long)]
    pub verify: bool,
    /// Replace an existing output
    #[arg(long)]
    pub force: bool,
}

/// Formats by their command-line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// nq's own folder
    Nq,
    /// One GGUF file, for llama.cpp
    Gguf,
    /// pack-quantized, for vLLM, SGLang and transformers
    CompressedTensors,
    /// Version 1, for every loader of GPTQ
    Gptq,
    /// AutoAWQ's gemm version
    Awq,
}

impl FormatArg {
    /// The library's format.
    pub fn format(self) -> ExportFormat {
        match self {
            FormatArg::Nq => ExportFormat::Nq,
            FormatArg::Gguf => ExportFormat::Gguf,
            FormatArg::CompressedTensors => ExportFormat::CompressedTensors,
            FormatArg::Gptq => ExportFormat::Gptq,
            FormatArg::Awq => ExportFormat::Awq,
        }
    }
}

/// GGUF tensor types by their command-line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum TypeArg {
    /// 32-bit floats
    F32,
    /// 16-bit floats
    F16,
    /// bfloat16
    Bf16,
    /// 8 bits, a scale per 32
    #[value(name = "q8_0")]
    Q8,
    /// 6 bits, a scale per 16
    #[value(name = "q6_k")]
    Q6K,
    /// 4 bits, a scale per 32
    #[value(name = "q4_0")]
    Q4,
    /// 4 bits, a scale and an offset per 32
    #[value(name = "q4_1")]
    Q41,
    /// 4 bits, 6 for the weights that matter most
    #[value(name = "q4_k_m")]
    Q4KM,
}

impl TypeArg {
    fn mix(self) -> Mix {
        match self {
            TypeArg::F32 => Mix::All(BlockType::F32),
            TypeArg::F16 => Mix::All(BlockType::F16),
            TypeArg::Bf16 => Mix::All(BlockType::BF16),
            TypeArg::Q8 => Mix::All(BlockType::Q8_0),
            TypeArg::Q6K => Mix::All(BlockType::Q6_K),
            TypeArg::Q4 => Mix::All(BlockType::Q4_0),
            TypeArg::Q41 => Mix::All(BlockType::Q4_1),
            TypeArg::Q4KM => Mix::Q4KM,
        }
    }
}

/// Runs `nq convert`.
pub fn run(args: &ConvertArgs, global: &Global) -> anyhow::Result<ExitCode> {
    if args.kind.is_some() && args.format != FormatArg::Gguf {
        return Err(conflict(
            "convert",
            "--type chooses the tensor types of --format gguf; other formats have one each",
        ));
    }
    let terminal = Terminal::new();
    let source = model::open(Some(&args.model), global, &terminal)?;
    let options = ExportOptions {
        requantize: args.requantize,
        mix: args.kind.map_or(Mix::Keep, TypeArg::mix),
        force: args.force,
    };
    let format = args.format.format();
    let checkpoint = &source.checkpoint;
    let unchecked = Unchecked::new(&args.out, format.form(), args.force)?;
    checkpoint.files().check_apart(&args.out)?;
    nq::verify_values(checkpoint)?;
    let out = unchecked.path();
    let again = if args.requantize {
        requantization(checkpoint, format)?
    } else {
        BTreeMap::new()
    };
    let report = if again.is_empty() {
        export(checkpoint, format, &out, &options, &terminal)?
    } else {
        let opened = model::open(Some(&args.model), global, &terminal)?.checkpoint;
        let rounded = requantize(opened, again.clone());
        let mut report = export(&rounded, format, &out, &options, &terminal)?;
        for w in report
            .weights
            .iter_mut()
            .filter(|w| again.contains_key(&w.name))
        {
            w.from = stored_scheme(checkpoint, &w.name)?;
            w.change = Change::Requantized;
        }
        report
    };
    let written = written::check(checkpoint, &out, &args.out, &terminal)?;
    let differences = match args.verify {
        true => Some(compare(checkpoint, &written, &terminal)?),
        false => None,
    };
    let unlike = (differences.as_deref()).and_then(|all| unannounced(&report, all));
    if unlike.is_none() {
        unchecked.put()?;
    }
    if global.json {
        let json = report_json(args, checkpoint, &report, differences.as_deref());
        print_line(&format!("{json:#}"))?;
    } else {
        let lines = report_lines(args, checkpoint, &report, differences.as_deref());
        print_line(&lines.join("\n"))?;
    }
    if let Some(name) = unlike {
        bail!(
            "{}: not written, as {name} differs from the source, which the report above does not say",
            args.out.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// A weight that was to be the same and is not.
fn unannounced(report: &ExportReport, differences: &[Difference]) -> Option<String> {
    let same = report
        .weights
        .iter()
        .filter(|w| w.change == Change::Kept(Exactness::Exact));
    let same: BTreeSet<&str> = same.map(|w| w.name.as_str()).collect();
    let differs = |d: &&Difference| d.changed > 0 && same.contains(d.name.as_str());
    differences.iter().find(differs).map(|d| d.name.clone())
}

/// The scheme of a matrix in its file.
fn stored_scheme(checkpoint: &Checkpoint, name: &str) -> nq_formats::Result<String> {
    let all = parameters(checkpoint.config());
    let dims = all.into_iter().find_map(|(n, shape)| match shape {
        Shape::Matrix(rows, cols) if n == name => Some(Dims { rows, cols }),
        _ => None,
    });
    let stored = checkpoint.store().stored(name, dims.unwrap_or_default())?;
    Ok(stored.scheme_name())
}

/// A description of the change to a weight.
fn words(change: Change) -> String {
    match change {
        Change::Kept(Exactness::Exact) => "the same numbers".into(),
        Change::Kept(Exactness::ScalesRounded(t)) => format!("codes kept, scales rounded to {t}"),
        Change::Kept(Exactness::ValuesRounded(t)) => format!("values rounded to {t}"),
        Change::Quantized => "quantized".into(),
        Change::Requantized => "quantized a second time".into(),
    }
}

/// `(from, to, change, weights, bytes)`, in the order of first occurrence.
fn summary(report: &ExportReport) -> Vec<(String, String, String, usize, u64)> {
    let mut rows: Vec<(String, String, String, usize, u64)> = Vec::new();
    for w in &report.weights {
        let key = (&w.from, &w.to, words(w.change));
        match rows
            .iter_mut()
            .find(|r| (&r.0, &r.1, &r.2) == (key.0, key.1, &key.2))
        {
            Some(row) => {
                row.3 += 1;
                row.4 += w.bytes;
            }
            None => rows.push((w.from.clone(), w.to.clone(), key.2, 1, w.bytes)),
        }
    }
    rows
}

/// Lines about the output and how it differs from the source.
pub(super) fn summary_lines(report: &ExportReport) -> Vec<String> {
    let line = |(from, to, change, count, bytes): (String, String, String, usize, u64)| {
        let size = human_bytes(bytes);
        format!("{count:>4}  {from} -> {to}: {change}  ({size})")
    };
    let lines = summary(report).into_iter().map(line);
    lines.chain(report.notes.iter().cloned()).collect()
}

/// The report for people.
fn report_lines(
    args: &ConvertArgs,
    source: &Checkpoint,
    report: &ExportReport,
    differences: Option<&[Difference]>,
) -> Vec<String> {
    let bits = 8.0 * report.tensor_bytes as f64 / source.config().parameters() as f64;
    let mut lines = vec![args.out.display().to_string()];
    lines.extend(summary_lines(report).iter().map(|line| format!("  {line}")));
    lines.push(format!(
        "  {} of files, {bits:.3} bits per weight; the source has {}",
        human_bytes(report.file_bytes),
        human_bytes(source.store().file_bytes()),
    ));
    lines.extend(differences.map(verification_line));
    lines
}

/// A line about the result of reading the output back.
fn verification_line(differences: &[Difference]) -> String {
    let changed: Vec<_> = differences.iter().filter(|d| d.changed > 0).collect();
    let values: u64 = differences.iter().map(|d| d.values).sum();
    match changed
        .iter()
        .max_by(|a, b| a.relative.total_cmp(&b.relative))
    {
        None => format!("  verified: all {values} numbers are equal"),
        Some(worst) => format!(
            "  verified: {} of {} parameters differ, as said above; most {} ({} -> {}): relative rms {:.3e}, \
             largest {:.3e}",
            changed.len(),
            differences.len(),
            worst.name,
            worst.from,
            worst.to,
            worst.relative,
            worst.max,
        ),
    }
}

fn report_json(
    args: &ConvertArgs,
    source: &Checkpoint,
    report: &ExportReport,
    differences: Option<&[Difference]>,
) -> Value {
    let weights: Vec<Value> = report
        .weights
        .iter()
        .map(|w| {
            json!({
                "name": w.name, "from": w.from, "to": w.to,
                "change": words(w.change), "tensor_bytes": w.bytes,
            })
        })
        .collect();
    let verify = differences.map(|all| {
        let worst = all.iter().map(|d| d.relative).fold(0.0, f64::max);
        let changed = all.iter().filter(|d| d.changed > 0).map(|d| {
            json!({
                "name": d.name, "from": d.from, "to": d.to, "values": d.values,
                "changed": d.changed, "max": d.max, "relative_rms": d.relative,
            })
        });
        json!({
            "identical": all.iter().all(|d| d.changed == 0),
            "worst_relative_rms": worst,
            "changed": changed.collect::<Vec<_>>(),
        })
    });
    json!({
        "out": args.out,
        "format": args.format.format().word(),
        "bits_per_weight": 8.0 * report.tensor_bytes as f64 / source.config().parameters() as f64,
        "tensor_bytes": report.tensor_bytes,
        "file_bytes": report.file_bytes,
        "source_bytes": source.store().file_bytes(),
        "weights": weights,
        "notes": report.notes,
        "verify": verify,
    })
}
