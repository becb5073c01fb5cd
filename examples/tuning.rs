//! Measures settings of tuning: one CSV row for each variant, all from the same quantized
//! weights.
//!
//! `cargo run --release --example tuning -- SOURCE QUANTIZED TEXT[:BYTES],... VARIANT...`, where
//! QUANTIZED is a folder that nq made from SOURCE and a variant is
//! `NAME:steps=300,batch=32,codes=0.00185,...`; other settings are the product's defaults, with 200
//! steps. `NQ_DEVICE=cpu` runs on the CPU.
//! Divergences of texts are measured on the second halves of windows of 512 tokens, in f32.

#![allow(clippy::print_stdout, reason = "its output is its purpose")]
#![allow(clippy::result_large_err, reason = "the library's error, in a closure")]

use anyhow::{Context, bail};
use nq_formats::Checkpoint;
use nq_formats::trellis::BLOCK;
use nq_kernels::grad::GradOps;
use nq_quantize::calibration::Prompter;
use nq_quantize::linalg::Matrix;
use nq_quantize::train::graph::Graph;
use nq_quantize::train::params::{Canonical, Model};
use nq_quantize::train::plan::rate_codes;
use nq_quantize::train::trainer::{Settings, Trainer};
use nq_quantize::trellis::{alike, nearest};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Tokens in a window, and in a sequence of training text.
const LENGTH: usize = 512;
/// Windows per pass.
const WINDOWS: usize = 32;

struct Variant {
    name: String,
    settings: Settings,
    tf32: bool,
}

fn variant(spec: &str) -> anyhow::Result<Variant> {
    let (name, rest) = spec.split_once(':').unwrap_or((spec, ""));
    let mut v = Variant {
        name: name.into(),
        tf32: true,
        settings: Settings {
            steps: 200,
            seed: 0x7475_6E69_6E67_0001,
            // If no rate is given, it follows from the steps and the batch.
            rate_codes: f32::NAN,
            ..Settings::default()
        },
    };
    for pair in rest.split(',').filter(|p| !p.is_empty()) {
        let (key, value) = pair.split_once('=').context("expected KEY=VALUE")?;
        let s = &mut v.settings;
        match key {
            "steps" => s.steps = value.parse()?,
            "batch" => s.batch = value.parse()?,
            "slots" => s.slots = value.parse()?,
            "codes" => s.rate_codes = value.parse()?,
            "scales" => s.rate_scales = value.parse()?,
            "gains" => s.rate_gains = value.parse()?,
            "warmup" => s.warmup = value.parse()?,
            "visits" => s.visits = value.parse()?,
            "sequences" => s.strays.sequences = value.parse()?,
            "pass" => s.pass = value.parse()?,
            "held_out" => s.held_out = value.parse()?,
            "search" => s.search = value.parse()?,
            "checks" => s.checks = value.parse()?,
            "tokens" => s.strays.tokens = value.parse()?,
            "tf32" => v.tf32 = value.parse()?,
            "seed" => s.seed = value.parse()?,
            other => bail!("no setting {other}"),
        }
    }
    let s = &mut v.settings;
    s.pass = s.pass.min(s.batch);
    if s.rate_codes.is_nan() {
        s.rate_codes = rate_codes(s.steps, s.batch);
    }
    Ok(v)
}

/// The whole windows of a text.
struct ModelText {
    name: String,
    ids: Vec<u32>,
}

fn text(spec: &str, prompter: &Prompter) -> anyhow::Result<ModelText> {
    let (path, bytes) = match spec.split_once(':') {
        Some((path, n)) => (Path::new(path), n.parse()?),
        None => (Path::new(spec), usize::MAX),
    };
    let all = std::fs::read(path).with_context(|| path.display().to_string())?;
    let part = String::from_utf8_lossy(&all[..all.len().min(bytes)]);
    let mut ids = prompter.tokenizer().encode(&part)?;
    ids.truncate(ids.len() / LENGTH * LENGTH);
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    Ok(ModelText {
        name: name.into_owned(),
        ids,
    })
}

/// Mean and 99th percentile of the divergence of `student` on each text.
fn measure<O: GradOps>(
    ops: &O,
    (teacher, student): (&Model<O>, &Model<O>),
    texts: &[ModelText],
) -> anyhow::Result<String> {
    let mut graph = Graph::new(ops, &teacher.config, WINDOWS, LENGTH)?;
    let mut row = String::new();
    for text in texts {
        let mut scored = Vec::new();
        for windows in text.ids.chunks(WINDOWS * LENGTH) {
            let all = graph.divergences(ops, teacher, student, windows)?;
            let second = all.chunks(LENGTH).map(|w| &w[LENGTH / 2..LENGTH - 1]);
            scored.extend(second.flatten().copied());
        }
        scored.sort_by(f32::total_cmp);
        let mean = scored.iter().map(|&d| f64::from(d)).sum::<f64>() / scored.len() as f64;
        let high = scored[scored.len() * 99 / 100];
        row += &format!(",{mean:.5},{high:.4}");
    }
    Ok(row)
}

/// The models and texts that all variants share.
struct Setup {
    checkpoint: Checkpoint,
    prompter: Prompter,
    source: Canonical,
    quantized: Canonical,
    texts: Vec<ModelText>,
}

/// Runs a variant with `ops`, the operations of the CPU or of `gpu`.
fn run<O: GradOps>(ops: &O, gpu: Option<usize>, setup: &Setup, v: &Variant) -> anyhow::Result<()> {
    let config = setup.checkpoint.config();
    let seed = v.settings.seed;
    let beginnings = |first: u64, n: usize| setup.prompter.beginnings(n, seed.wrapping_add(first));
    let alike = gpu.map(|gpu| alike(gpu, BLOCK)).transpose()?;
    let nearest = |weight: &Matrix, scheme| nearest(weight, scheme, alike.as_ref());
    let weights = (&setup.source, &setup.quantized);
    let mut trainer = Trainer::new(
        ops,
        config,
        weights,
        v.settings.clone(),
        (&beginnings, &nearest),
        &(),
    )?;
    let start = Instant::now();
    trainer.run(None, &())?;
    let seconds = start.elapsed().as_secs_f64();
    let tuned = trainer.best(&setup.quantized)?;
    let checks = trainer.checks().to_vec();
    drop(trainer);
    let best = checks
        .iter()
        .map(|c| c.held_out)
        .fold(f64::INFINITY, f64::min);
    let student = Model::teacher(ops, config, tuned.as_ref().unwrap_or(&setup.quantized))?;
    let teacher = Model::teacher(ops, config, &setup.source)?;
    let texts = measure(ops, (&teacher, &student), &setup.texts)?;
    println!("{},{seconds:.1},{best:.5}{texts}", v.name);
    Ok(())
}

fn run_on_gpu(setup: &Setup, v: &Variant) -> anyhow::Result<()> {
    use nq_cuda::{CudaOps, GemmPrecision, Gpu};
    let precision = if v.tf32 {
        GemmPrecision::Tf32
    } else {
        GemmPrecision::Full
    };
    run(&CudaOps::new(&Gpu::open(0)?, precision)?, Some(0), setup, v)
}

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [source, quantized, texts, variants @ ..] = &args[..] else {
        bail!("expected SOURCE QUANTIZED TEXT[:BYTES],... VARIANT...");
    };
    let checkpoint = Checkpoint::open(&PathBuf::from(source))?;
    let eos = checkpoint.eos_token_ids();
    let vocab = checkpoint.config().vocab_size;
    let prompter = Prompter::new(checkpoint.files(), vocab, eos, &())?;
    let made = Checkpoint::open(&PathBuf::from(quantized))?;
    let setup = Setup {
        source: Canonical::read(checkpoint.store(), checkpoint.config())?,
        quantized: Canonical::read(made.store(), made.config())?,
        texts: texts
            .split(',')
            .map(|spec| text(spec, &prompter))
            .collect::<anyhow::Result<_>>()?,
        prompter,
        checkpoint,
    };
    let columns: Vec<String> = (setup.texts.iter())
        .map(|t| format!(",{0}_kld,{0}_p99", t.name))
        .collect();
    println!("variant,seconds,held_out{}", columns.concat());
    let on_cpu = std::env::var("NQ_DEVICE").is_ok_and(|d| d == "cpu");
    for spec in variants {
        let v = variant(spec)?;
        if on_cpu {
            run(&nq_f32::CpuOps, None, &setup, &v)?
        } else {
            run_on_gpu(&setup, &v)?
        }
    }
    Ok(())
}
