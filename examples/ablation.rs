//! Measures the gain of each quantization technique: one CSV row for each variant of the methods, all
//! on the same text, in the same bytes.
//!
//! `cargo run --release --example ablation -- MODEL CALIBRATION EVALUATION TOKENS SCHEME...`,
//! where CALIBRATION is `self` or a file and a scheme is `g128` (symmetric) or `g64`
//! (asymmetric), optionally followed by `:N` to run only variant number N. Divergences are
//! measured with unrounded activations.

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use nq_formats::nq::SourceRecord;
use nq_formats::{AffineScheme, Bits, Checkpoint, Group, Zeros};
use nq_quantize::fit::{Fit, Power};
use nq_quantize::methods::Method;
use nq_quantize::methods::awq::Awq;
use nq_quantize::methods::awq_gptq::AwqGptq;
use nq_quantize::methods::gptq::{ActOrder, Gptq, Importance};
use nq_quantize::methods::rtn::Rtn;
use nq_quantize::{CalibrationSource, Job, QualityLimits, QuantizeOptions, Schemes};
use nq_runtime::{ActivationChoice, DeviceChoice, LoadOptions};
use std::path::PathBuf;

fn variants() -> Vec<(&'static str, Box<dyn Method>)> {
    let gptq = Gptq {
        damping: 0.01,
        order: ActOrder::Columns,
        fit: Fit::clip(),
        importance: Importance::Squares,
    };
    let fit = Fit::clip();
    let damped = |damping| Box::new(Gptq { damping, ..gptq });
    let importance = Importance::Remaining;
    let cubes = Fit {
        power: Power::Three,
        ..fit
    };
    let groups = Gptq {
        order: ActOrder::Groups,
        ..gptq
    };
    let both = |gptq| {
        let awq = Awq::default();
        Box::new(AwqGptq { awq, gptq })
    };
    vec![
        ("rtn, whole range", Box::new(Rtn::new(Fit::absmax()))),
        ("rtn, clip search", Box::new(Rtn::new(fit))),
        ("awq", Box::new(Awq::default())),
        ("gptq", Box::new(gptq)),
        ("gptq, damping 0.001", damped(0.001)),
        ("gptq, damping 0.03", damped(0.03)),
        ("gptq, damping 0.1", damped(0.1)),
        (
            "gptq, group by group from compensated weights",
            Box::new(groups),
        ),
        (
            "gptq, clip weighted by the remaining loss",
            Box::new(Gptq { importance, ..gptq }),
        ),
        ("gptq, clip by cubes", Box::new(Gptq { fit: cubes, ..gptq })),
        (
            "gptq, whole range",
            Box::new(Gptq {
                fit: Fit::absmax(),
                ..gptq
            }),
        ),
        ("awq scales, then gptq", both(gptq)),
        (
            "gptq, group by group, clip weighted by the remaining loss",
            Box::new(Gptq {
                importance,
                ..groups
            }),
        ),
        (
            "gptq, group by group, clip by cubes",
            Box::new(Gptq {
                fit: cubes,
                ..groups
            }),
        ),
        ("awq scales, then gptq, group by group", both(groups)),
        (
            "awq scales, then gptq, group by group, clip weighted by the remaining loss",
            both(Gptq {
                importance,
                ..groups
            }),
        ),
        (
            "awq scales, then gptq, group by group, clip by cubes",
            both(Gptq {
                fit: cubes,
                ..groups
            }),
        ),
    ]
}

fn scheme(name: &str) -> anyhow::Result<AffineScheme> {
    let (size, zeros) = match name {
        "g128" => (128, Zeros::None),
        "g64" => (64, Zeros::Integer),
        other => anyhow::bail!("expected g128 or g64, found {other}"),
    };
    Ok(AffineScheme::new(Bits::B4, Group::Size(size), zeros))
}

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, calibration, text, tokens, schemes @ ..] = &args[..] else {
        anyhow::bail!("expected MODEL CALIBRATION EVALUATION TOKENS SCHEME...");
    };
    let checkpoint = Checkpoint::open(&PathBuf::from(model))?;
    let scratch = tempfile::tempdir()?;
    println!("scheme,technique,kld,ppl,same_top1,tensor_bytes,seconds");
    for wanted in schemes {
        let (name, only) = match wanted.split_once(':') {
            Some((name, n)) => (name, Some(n.parse::<usize>()?)),
            None => (wanted.as_str(), None),
        };
        for (i, (technique, method)) in variants().into_iter().enumerate() {
            if only.is_some_and(|n| n != i) {
                continue;
            }
            let options = QuantizeOptions {
                device_memory: None,
                bits: 4.0,
                schemes: Schemes {
                    linears: scheme(name)?.into(),
                    ..Schemes::defaults(Bits::B4)
                },
                target: None,
                head_fixed: true,
                vision_8: false,
                candidates: Vec::new(),
                method: method.name().into(),
                calibration: match calibration.as_str() {
                    "self" => CalibrationSource::SelfSampled,
                    file => CalibrationSource::File(file.into()),
                },
                calib_tokens: Some(32_768),
                tuning: None,
                seed: 0,
                limits: QualityLimits::default(),
                measure: true,
                eval_text: Some(text.into()),
                eval_tokens: Some(tokens.parse()?),
                out: scratch.path().join("made"),
                force: true,
                resume: false,
                source: SourceRecord::default(),
                load: LoadOptions {
                    device: DeviceChoice::Cpu,
                    activations: ActivationChoice::F32,
                    ..LoadOptions::default()
                },
            };
            let report = Job::with_method(&checkpoint, &options, method, &())?.run()?;
            let quality = report.quality.expect("every run is measured");
            let against = quality.against.expect("against the source");
            println!(
                "{name},\"{technique}\",{:.5},{:.3},{:.4},{},{:.1}",
                against.kld.mean,
                quality.ppl,
                against.same_top1,
                report.tensor_bytes,
                report.seconds
            );
        }
    }
    Ok(())
}
