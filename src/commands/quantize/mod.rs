//! `nq quantize`: makes a quantized file of known quality from a checkpoint.

mod args;
mod report;

use crate::adapters;
use crate::commands::convert::summary_lines;
use crate::commands::eval::images::SeenTexts;
use crate::flags::Global;
use crate::library::{Error as ProgramError, QuantizeTarget, check_quantizable, place};
use crate::model;
use crate::terminal::{
    Terminal, human_bytes, leave_interrupted, on_signals, print_line, say, shell_word, time_plan,
};
use anyhow::Context;
pub use args::QuantizeArgs;
use nq_formats::Progress;
use nq_formats::nq::staging;
use nq_formats::trellis::Code;
use nq_model::DType;
use nq_quantize::pipeline::{Job, PlannedStage, QuantizeOptions};
use nq_quantize::train::untrainable;
use nq_quantize::{
    CALIBRATION_TOKENS, CalibrationSource, DeviceEstimate, Error, Estimate, TargetSize,
};
use std::path::Path;
use std::process::ExitCode;

/// Runs `nq quantize`.
pub fn run(args: &QuantizeArgs, global: &Global) -> anyhow::Result<ExitCode> {
    args.check()?;
    let terminal = Terminal::new();
    let model = model::open(args.model.as_deref(), global, &terminal)?;
    check_quantizable(&model)?;
    let (out, call) = match &args.out {
        Some(out) => (out.clone(), out.display().to_string()),
        None => {
            let name = match &args.name {
                Some(name) => name.clone(),
                None => args.default_name(&model.name)?,
            };
            (model::models_dir()?.join(&name), name)
        }
    };
    let target = QuantizeTarget {
        format: args.format.format(),
        out,
        force: args.force,
    };
    let source = adapters::record(&model, &global.adapter_files()?)?;
    let mut options = args.options(global, model.checkpoint.config(), target.folder(), source)?;
    let cost = target.check(&model.checkpoint, &options.schemes);
    if let Some(cost) = cost.map_err(ProgramError::untyped)? {
        terminal.note(&cost);
    }
    let untrainable = untrainable(model.checkpoint.config()).filter(|_| options.tuning.is_some());
    if let Some(found) = untrainable {
        terminal.note(&format!("{found} is not tuned: --method auto is gptq here"));
        options.tuning = None;
    }
    place(model.checkpoint.config(), &mut options.load, &terminal)?;
    if let CalibrationSource::File(path) = &options.calibration
        && let Some(chats) = SeenTexts::with_images(path)?
    {
        let tokens = options.calib_tokens.unwrap_or(CALIBRATION_TOKENS);
        let (checkpoint, load) = (&model.checkpoint, &options.load);
        options.calibration = chats.calibration(checkpoint, load, tokens, &terminal)?;
    }
    let job =
        Job::new(&model.checkpoint, &options, &terminal).with_context(|| model.source.clone())?;
    let estimate = job.estimate();
    let parameters = model.checkpoint.config().parameters();
    let mut lines = plan(&model.name, parameters, &options, &estimate);
    // Which schemes a size leads to is not known before the run.
    let schemes = Some(&options.schemes).filter(|_| options.target.is_none());
    let on_gpu = schemes.and_then(|schemes| {
        let config = model.checkpoint.config();
        model::bytes_on_gpu(config, &|name| schemes.kind(name, DType::BF16))
    });
    lines.extend(on_gpu.map(|bytes| format!("on a GPU: {} of weights", human_bytes(bytes))));
    // A run says it itself: what is left of an interrupted one is known once its work was read.
    let stages = args.dry_run.then(|| job.stages()).transpose()?;
    if let Some(stages) = &stages {
        let named: Vec<_> = stages.iter().map(|s| (s.name, s.seconds)).collect();
        lines.extend(time_plan(&named));
    }
    match job.device_estimate()? {
        Some(device) => lines.push(device_plan(&device)),
        None if args.device_memory.is_some() => {
            terminal.note("--device-memory is ignored: no GPU is used");
        }
        None => {}
    }
    if let Some(stages) = stages {
        dry_run(&job, &target, lines, &stages, global)?;
        return Ok(ExitCode::SUCCESS);
    }
    lines.iter().for_each(|line| terminal.note(line));
    if let Some(parent) = options.out.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("{}: create", parent.display()))?;
    }
    say_how_to_resume(&options.out);
    let mut report = match job.run() {
        Ok(report) => report,
        Err(Error::Guard {
            broken,
            worst,
            report,
            ..
        }) => {
            report::show(&report, &[], global)?;
            say(&format!(
                "nq: not written: {broken}\n\
                 nq: the worst layers: {worst}\n\
                 nq: the work is kept: --resume with other limits continues from it"
            ));
            return Ok(ExitCode::from(1));
        }
        Err(e) => return Err(e.into()),
    };
    let own = format!(
        "in nq's own format: {} in files",
        human_bytes(report.file_bytes)
    );
    let written = target.write(&mut report, &terminal);
    let mut closing = Vec::new();
    if let Some(written) = written.map_err(ProgramError::untyped)? {
        let lines = summary_lines(&written).into_iter().chain([own]);
        closing.extend(lines.map(|line| report::row("written", &line)));
    }
    closing.push(format!("\nTalk to it:  nq chat {}", shell_word(&call)));
    report::show(&report, &closing, global)?;
    Ok(ExitCode::SUCCESS)
}

/// Makes an interrupt print that finished work is kept.
fn say_how_to_resume(out: &Path) {
    let staging = staging(out);
    on_signals(move || {
        if staging.exists() {
            say(&format!(
                "nq: interrupted; finished work is kept in {}: the same command with --resume \
                 continues it",
                staging.display()
            ));
        }
        leave_interrupted();
    });
}

/// Prints the plan, `lines` and more, or all of it as JSON.
fn dry_run(
    job: &Job<'_>,
    target: &QuantizeTarget,
    mut lines: Vec<String>,
    stages: &[PlannedStage],
    global: &Global,
) -> anyhow::Result<()> {
    let tuning = job.tuning_estimate()?;
    if global.json {
        let mut json = serde_json::to_value(job.estimate())?;
        json["stages"] = serde_json::to_value(stages)?;
        json["tuning"] = serde_json::to_value(tuning)?;
        json["device"] = serde_json::to_value(job.device_estimate()?)?;
        json["out"] = target.out.display().to_string().into();
        return Ok(print_line(&serde_json::to_string_pretty(&json)?)?);
    }
    lines.extend(tuning.map(|tuning| tuning.describe()));
    let there = match (target.out.exists(), target.force) {
        (true, false) => " (already there: the run needs --force)",
        (true, true) => " (already there: replaced once the new one is whole)",
        (false, _) => "",
    };
    lines.push(format!("out: {}{there}", target.out.display()));
    Ok(print_line(&lines.join("\n"))?)
}

/// A line about the GPU memory that a run takes.
fn device_plan(device: &DeviceEstimate) -> String {
    let mut line = format!(
        "GPU memory: {} at its peak ({}), {} may be used; text sampled from {}",
        human_bytes(device.peak),
        device.stage,
        human_bytes(device.limit),
        device.sampled_from,
    );
    if device.streamed {
        line += ", quality measured against the source layer by layer";
    }
    line
}

/// Lines about the plan of a model of `parameters` and the memory it takes.
fn plan(
    name: &str,
    parameters: usize,
    options: &QuantizeOptions,
    estimate: &Estimate,
) -> Vec<String> {
    let (least, method) = (options.bits, &options.method);
    let made = match options.target {
        Some(target) => {
            let size = match target {
                TargetSize::Bytes(n) => human_bytes(n),
                TargetSize::BitsPerWeight(x) => format!("{x} bits per weight"),
            };
            format!("at most {size}, {least} bits and more where sensitivity asks for them")
        }
        None => format!(
            "{}, {} ({:.1} bits per weight)",
            options.called(&options.schemes),
            human_bytes(estimate.file_bytes),
            8.0 * estimate.file_bytes as f64 / parameters as f64,
        ),
    };
    let mut lines = vec![
        format!("{name}: {made}, method {method}"),
        format!(
            "memory: {} at the peak ({}), {} of which are the memory-mapped source",
            human_bytes(estimate.peak),
            estimate.stage,
            human_bytes(estimate.mapped),
        ),
    ];
    lines.extend(options.schemes.linears.trellis().map(|s| trade(s.code())));
    lines
}

/// A line about what trellis codes cost in speed beside integers of 4 bits, as docs/lab/trellis.md has measured it: of the code sum
/// single products alone.
fn trade(code: Code) -> String {
    let speeds = match code {
        Code::Octagon => {
            "CPUs with AVX-512 decode at about the same speed and read prompts at 0.6, those with AVX2 at 0.3 and \
             0.45; GPUs decode at 0.55 to 0.7 and read prompts of 512 tokens at 0.65, of 2,048 at 0.9"
        }
        Code::Sum => {
            "products take CPUs with AVX-512 twice the time, of prompts three times, those with AVX2 seven times; \
             GPUs twice"
        }
    };
    format!("speed, compared with 4-bit integers: {speeds}")
}
