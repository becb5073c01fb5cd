//! The demo model's logits after going through each format: bit for bit the same
//! if FORMAT.md says exact, otherwise as close as it says.

#![allow(clippy::print_stdout, reason = "the figures of FORMAT.md are these")]

use nq_formats::export::Mix;
use nq_formats::export::{ExportFormat, ExportOptions, export};
use nq_formats::gguf::BlockType;
use nq_formats::{AffineScheme, Bits, Checkpoint, Group, Zeros};
use nq_model::names::{is_layer_linear, parameters};
use nq_quantize::requantize;
use nq_runtime::{ActivationChoice, DeviceChoice, KvType, LoadOptions, LogitsWanted};
use nq_testkit::sessions::{chunk, session_spec};
use serde_json::Value;
use std::path::Path;

const ASSETS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets");

fn demo() -> Checkpoint {
    Checkpoint::open(&Path::new(ASSETS).join("demo")).unwrap()
}

/// Token ids of the first text of the golden file.
fn tokens() -> Vec<u32> {
    let golden = std::fs::read(Path::new(ASSETS).join("demo-golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    serde_json::from_value(golden["logits"][0]["ids"].clone()).unwrap()
}

/// Logits at every position of [`tokens`], activations unrounded.
fn logits(checkpoint: &Checkpoint) -> Vec<f32> {
    let options = LoadOptions {
        device: DeviceChoice::Cpu,
        activations: ActivationChoice::F32,
        ..LoadOptions::default()
    };
    let engine = nq_load::load(checkpoint.config(), checkpoint.store(), &options, &()).unwrap();
    let tokens = tokens();
    let mut session = engine
        .session(session_spec(1, tokens.len(), KvType::F32, tokens.len()))
        .unwrap();
    session
        .forward(&[chunk(0, &tokens, LogitsWanted::All)], None)
        .unwrap()
        .data
        .to_vec()
}

/// The demo model with all Linears in one scheme, embedding and head unquantized.
fn quantized(bits: Bits, group: u32, zeros: Zeros) -> Checkpoint {
    let scheme = AffineScheme::new(bits, Group::Size(group), zeros);
    let source = demo();
    let all = parameters(source.config()).into_iter();
    let linears = all.filter(|(name, _)| is_layer_linear(name));
    let schemes = linears.map(|(name, _)| (name, scheme)).collect();
    requantize(source, schemes)
}

/// Root mean square of the difference, relative to that of the first values.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let pairs = a.iter().zip(b).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let (error, power) = pairs.fold((0.0, 0.0), |(e, p), (a, b)| {
        (e + square(a - b), p + square(a))
    });
    (error / power).sqrt()
}

/// Writes `source`, reads it back and compares logits: equal bit for bit for a bound of 0, otherwise
/// different, by less than the bound.
#[track_caller]
fn check(source: &Checkpoint, want: &[f32], format: ExportFormat, mix: Mix, bound: f64) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let options = ExportOptions {
        mix,
        ..ExportOptions::default()
    };
    let report = export(source, format, &out, &options, &()).unwrap();
    let found = logits(&Checkpoint::open(&out).unwrap());
    let d = difference(want, &found);
    println!("{} ({}): {d:.3e}", format.name(), report.weights[1].to);
    if bound == 0.0 {
        assert!(want == found, "{}: {d}", format.name());
    } else {
        assert!(d > 0.0 && d < bound, "{}: {d}", format.name());
    }
}

#[test]
fn exact_formats_give_the_same_logits() {
    use ExportFormat::{Awq, Gguf, Gptq};
    for (bits, group, zeros, formats) in [
        (Bits::B4, 32, Zeros::None, &[Gptq, Awq, Gguf][..]),
        (Bits::B4, 64, Zeros::Integer, &[Awq]),
        (Bits::B8, 32, Zeros::None, &[Gptq, Gguf]),
    ] {
        let source = quantized(bits, group, zeros);
        let want = logits(&source);
        for &format in formats {
            check(&source, &want, format, Mix::Keep, 0.0);
        }
    }
    // nq's own folder, from that of another format.
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("awq");
    let source = quantized(Bits::B4, 64, Zeros::Integer);
    export(&source, Awq, &out, &ExportOptions::default(), &()).unwrap();
    let awq = Checkpoint::open(&out).unwrap();
    check(&awq, &logits(&source), ExportFormat::Nq, Mix::Keep, 0.0);
}

#[test]
fn unquantized_gguf_files_give_the_same_logits() {
    let source = demo();
    let want = logits(&source);
    for mix in [Mix::Keep, Mix::All(BlockType::F32)] {
        check(&source, &want, ExportFormat::Gguf, mix, 0.0);
    }
}

/// The figures of FORMAT.md.
#[test]
fn rounded_scales_move_the_logits_as_little_as_stated() {
    let symmetric = quantized(Bits::B4, 64, Zeros::None);
    let want = logits(&symmetric);
    let compressed = ExportFormat::CompressedTensors;
    check(&symmetric, &want, compressed, Mix::Keep, 0.01);
    let asymmetric = quantized(Bits::B4, 64, Zeros::Integer);
    let want = logits(&asymmetric);
    check(&asymmetric, &want, compressed, Mix::Keep, 0.01);
    check(&asymmetric, &want, ExportFormat::Gguf, Mix::Keep, 0.002);
    let eight = quantized(Bits::B8, 128, Zeros::None);
    let want = logits(&eight);
    check(&eight, &want, compressed, Mix::Keep, 0.01);
}
