//! Measures mixes of schemes: one CSV row for each, all on the same text.
//!
//! `cargo run --release --example mixes -- MODEL CALIBRATION EVALUATION TOKENS MIX...`, where
//! CALIBRATION is `self` or a file and a mix is `METHOD; LINEARS; HEAD[; PART = SCHEME]...`. Schemes
//! have their displayed names (`int4 g32 asymmetric scales8`); weights whose names contain PART
//! (`down_proj`, `layers.0.`) get another one. Divergences are measured with unrounded activations.

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use anyhow::Context;
use nq_formats::nq::SourceRecord;
use nq_formats::{Bits, Checkpoint, Scheme};
use nq_model::names::{Shape, is_layer_linear, parameters};
use nq_quantize::methods::awq::Awq;
use nq_quantize::methods::awq_gptq::AwqGptq;
use nq_quantize::methods::gptq::{ActOrder, Gptq, Importance};
use nq_quantize::methods::{self, Method};
use nq_quantize::{CalibrationSource, Job, QualityLimits, QuantizeOptions, Schemes};
use nq_runtime::{ActivationChoice, DeviceChoice, LoadOptions};
use std::path::PathBuf;

/// The methods of the library, and variants of gptq without a name there.
fn method(name: &str) -> anyhow::Result<Box<dyn Method>> {
    let gptq = Gptq::default();
    let order = ActOrder::Groups;
    let importance = Importance::Remaining;
    Ok(match name {
        "groups" => Box::new(Gptq { order, ..gptq }),
        "remaining" => Box::new(Gptq { importance, ..gptq }),
        "groups-remaining" => Box::new(Gptq {
            order,
            importance,
            ..gptq
        }),
        "awq-groups" => Box::new(AwqGptq {
            awq: Awq::default(),
            gptq: Gptq { order, ..gptq },
        }),
        "awq-remaining" => Box::new(AwqGptq {
            awq: Awq::default(),
            gptq: Gptq { importance, ..gptq },
        }),
        name => methods::by_name(name).with_context(|| format!("no method {name}"))?,
    })
}

/// The method and the schemes of a mix.
fn parse(mix: &str, checkpoint: &Checkpoint) -> anyhow::Result<(Box<dyn Method>, Schemes)> {
    let mut words = mix.split(';').map(str::trim);
    let mut next = || words.next().context("expected METHOD; LINEARS; HEAD");
    let (method, linears, head) = (method(next()?)?, next()?, next()?);
    let mut schemes = Schemes {
        linears: linears.parse()?,
        head: Some(head.parse()?),
        ..Schemes::defaults(Bits::B4)
    };
    for rule in words {
        let (part, scheme) = rule.split_once('=').context("expected PART = SCHEME")?;
        let scheme: Scheme = scheme.trim().parse()?;
        for (name, shape) in parameters(checkpoint.config()) {
            let layer = is_layer_linear(&name) && matches!(shape, Shape::Matrix(..));
            if layer && name.contains(part.trim()) {
                schemes.overrides.insert(name, scheme);
            }
        }
    }
    Ok((method, schemes))
}

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, calibration, text, tokens, mixes @ ..] = &args[..] else {
        anyhow::bail!("expected MODEL CALIBRATION EVALUATION TOKENS MIX...");
    };
    let checkpoint = Checkpoint::open(&PathBuf::from(model))?;
    let scratch = tempfile::tempdir()?;
    println!("mix,kld,ppl,same_top1,tensor_bytes,seconds");
    for mix in mixes {
        let (method, schemes) = parse(mix, &checkpoint)?;
        let options = QuantizeOptions {
            device_memory: None,
            bits: 3.0,
            schemes,
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
        let quality = report.quality.context("every run is measured")?;
        let against = quality.against.context("against the source")?;
        println!(
            "\"{mix}\",{:.5},{:.3},{:.4},{},{:.1}",
            against.kld.mean, quality.ppl, against.same_top1, report.tensor_bytes, report.seconds
        );
    }
    Ok(())
}
