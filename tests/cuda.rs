//! The GPU engine's quality: the demo model, quantized, compared with the CPU with unrounded
//! activations. Without a GPU the tests print that they are skipped; `NQ_REQUIRE_CUDA=1` makes that
//! a failure.
#![cfg(feature = "cuda")]
#![allow(
    clippy::print_stdout,
    reason = "figures and skipped tests are worth showing"
)]

use nq_evals::{EvalSpec, Protocol, compare, kld_rows};
use nq_formats::{Bits, Checkpoint, synth};
use nq_load::load;
use nq_model::{DType, ModelConfig, find};
use nq_quantize::{CalibrationSource, Job, QuantizeOptions, Recipe, Schemes, quantize_at_load};
use nq_runtime::{
    ActivationChoice, Chunk, DeviceChoice, Engine, KvType, LoadOptions, LogitsWanted, Session,
    Tokenizer,
};
use nq_testkit::models::{delta, experts, rope, tiny};
use nq_testkit::sessions::{chunk, session_spec};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets")
}

/// Both engines over the demo model at `bits`, and the evaluation text.
struct Pair {
    gpu: Arc<dyn Engine>,
    cpu: Arc<dyn Engine>,
    tokens: Vec<u32>,
}

/// False, said in print, where there is no GPU and none is required.
fn has_gpu() -> bool {
    nq_testkit::on_gpu(nq_cuda::device_count()).is_some()
}

fn pair(bits: Bits) -> Option<Pair> {
    if !has_gpu() {
        return None;
    }
    let demo = || Checkpoint::open(&nq_testkit::demo()).expect("it is part of the sources");
    let engine = |device, activations| {
        let checkpoint =
            quantize_at_load(demo(), Schemes::defaults(bits)).expect("the schemes fit");
        let options = LoadOptions {
            device,
            activations,
            ..LoadOptions::default()
        };
        load(checkpoint.config(), checkpoint.store(), &options, &()).expect("it loads")
    };
    let tokenizer = Tokenizer::from_files(demo().files()).expect("a tokenizer");
    let text = std::fs::read_to_string(assets().join("demo-eval.txt")).expect("the text");
    Some(Pair {
        gpu: engine(DeviceChoice::Cuda(0), ActivationChoice::Auto),
        cpu: engine(DeviceChoice::Cpu, ActivationChoice::F32),
        tokens: tokenizer.encode(&text).expect("it can be encoded"),
    })
}

fn session(engine: &dyn Engine, kv: KvType) -> Box<dyn Session> {
    engine
        .session(session_spec(3, 256, kv, 256))
        .expect("it fits")
}

/// Logits for one chunk in each of some slots.
fn forward(session: &mut dyn Session, chunks: &[(usize, &[u32])]) -> Vec<f32> {
    let chunks: Vec<Chunk<'_>> = (chunks.iter())
        .map(|&(slot, tokens)| chunk(slot, tokens, LogitsWanted::All))
        .collect();
    session
        .forward(&chunks, None)
        .expect("it runs")
        .data
        .to_vec()
}

/// The greatest difference of logits; and in rows with different best tokens, the gap between the two.
fn differences(ours: &[f32], theirs: &[f32], vocab: usize) -> (f32, f32) {
    let best = |row: &[f32]| -> usize {
        let better = |best: usize, i: usize| if row[i] > row[best] { i } else { best };
        (0..row.len()).fold(0, better)
    };
    let (mut most, mut gap) = (0f32, 0f32);
    for (a, b) in ours.chunks(vocab).zip(theirs.chunks(vocab)) {
        most = a.iter().zip(b).fold(most, |m, (x, y)| m.max((x - y).abs()));
        gap = gap.max(b[best(b)] - b[best(a)]);
    }
    (most, gap)
}

/// Mean KL divergence of `ours` from `theirs`.
fn mean_kld(ours: &[f32], theirs: &[f32], vocab: usize) -> f64 {
    let rows = kld_rows(ours, theirs, vocab).expect("finite");
    rows.iter().sum::<f64>() / rows.len() as f64
}

/// Windows of the text, fed as in real use: most of a window at once, then one token at a
/// time, then one token of each of three windows at a time.
fn feed(engine: &dyn Engine, kv: KvType, tokens: &[u32]) -> Vec<f32> {
    let mut session = session(engine, kv);
    let text = |slot: usize| &tokens[slot * 300..][..240];
    let mut logits = Vec::new();
    for slot in 0..3 {
        logits.extend(forward(&mut *session, &[(slot, &text(slot)[..160])]));
    }
    for i in 160..200 {
        logits.extend(forward(&mut *session, &[(0, &text(0)[i..=i])]));
    }
    for i in 160..200 {
        let each = [
            (0, &text(0)[i + 40..=i + 40]),
            (1, &text(1)[i..=i]),
            (2, &text(2)[i..=i]),
        ];
        logits.extend(forward(&mut *session, &each));
    }
    logits
}

#[test]
fn the_demo_model_is_what_it_is_on_the_cpu() {
    for bits in [Bits::B4, Bits::B8] {
        let Some(pair) = pair(bits) else { return };
        let vocab = pair.cpu.config().vocab_size;
        let spec = EvalSpec {
            max_windows: Some(8),
            ..EvalSpec::new(Protocol::Hf, 256, "demo-eval")
        };
        let found = compare(&*pair.gpu, &*pair.cpu, &pair.tokens, &spec, &()).expect("it runs");
        let kld = found.report.against.expect("compared").kld;
        println!(
            "{bits:?}: mean KLD {:.2e}, greatest {:.2e}",
            kld.mean, kld.max
        );
        assert!(kld.mean <= 1e-5, "{bits:?}: mean KLD {:e}", kld.mean);

        let ours = feed(&*pair.gpu, KvType::F16, &pair.tokens);
        let theirs = feed(&*pair.cpu, KvType::F16, &pair.tokens);
        let mean = mean_kld(&ours, &theirs, vocab);
        let (most, gap) = differences(&ours, &theirs, vocab);
        println!(
            "{bits:?}, steps included: mean KLD {mean:.2e}, logits differ by {most:.4} at most, \
             best tokens by {gap:.4}"
        );
        assert!(mean <= 1e-5, "{bits:?}, steps included: mean KLD {mean:e}");
        assert!(most <= 0.05, "{bits:?}: logits differ by {most}");
        assert!(gap <= 0.05, "{bits:?}: best tokens lie {gap} apart");
    }
}

/// The loss from FP16 attention and int8 keys and values on the GPU, compared with the CPU without any
/// rounding.
#[test]
fn an_int8_cache_costs_little() {
    let Some(pair) = pair(Bits::B4) else { return };
    let vocab = pair.cpu.config().vocab_size;
    let exact = feed(&*pair.cpu, KvType::F32, &pair.tokens);
    let [half, int8] = [KvType::F16, KvType::Int8]
        .map(|kv| mean_kld(&feed(&*pair.gpu, kv, &pair.tokens), &exact, vocab));
    println!("mean KLD of an FP16 cache {half:.2e}, of an INT8 cache {int8:.2e}");
    assert!(half <= 1e-5, "FP16: {half:e}");
    assert!(int8 <= 5e-4, "INT8: {int8:e}");
}

/// A small hybrid whose widths the GPU serves: a layer with a recurrence and one with gated attention.
fn hybrid(gguf: &str) -> ModelConfig {
    let architecture = find(|a| a.gguf, gguf).expect("an architecture");
    let experts = architecture.router().map(|_| experts(4, 256, 256));
    ModelConfig {
        hidden_size: 256,
        intermediate_size: 512,
        experts,
        delta: Some(delta(4, 128, 2)),
        num_hidden_layers: 4,
        head_dim: 256,
        vocab_size: 512,
        max_position_embeddings: 1024,
        rope: rope(1e7, Some(64)),
        mtp_layers: 1,
        eos_token_ids: vec![300],
        dtype: Some(DType::BF16),
        ..tiny(gguf)
    }
}

/// Share of the weights in layers that differ between two models of one shape.
fn differing(a: &Checkpoint, b: &Checkpoint) -> f64 {
    let (config, mut differ, mut all) = (a.config(), 0, 0);
    for (index, layer) in config.layers().enumerate() {
        for linear in layer.linears() {
            let (name, dims) = (linear.name(index), linear.dims(config));
            let [a, b] = [a, b].map(|c| {
                let weight = c.store().matrix(&name, dims).expect("a weight");
                let mut values = vec![0.0; dims.rows * dims.cols];
                for (row, values) in values.chunks_exact_mut(dims.cols).enumerate() {
                    weight.dequantize_row(row, values).expect("a row");
                }
                values
            });
            let far = |(a, b): &(&f32, &f32)| (*a - *b).abs() > 1e-3 * a.abs();
            differ += a.iter().zip(&b).filter(far).count();
            all += a.len();
        }
    }
    f64::from(differ as u32) / f64::from(all as u32)
}

/// Hybrids, dense and as mixtures with a shared expert, quantized on the GPU: nearly the codes, the errors and the
/// divergence of the CPU, which rounds what it multiplies to bf16 while it gathers statistics.
#[test]
fn hybrids_are_quantized_as_on_the_cpu() {
    if !has_gpu() {
        return;
    }
    let text = assets().join("demo-eval.txt");
    for (family, methods) in [("qwen35", &["awq", "gptq"][..]), ("qwen35moe", &["gptq"])] {
        let config = hybrid(family);
        let home = tempfile::tempdir().expect("a folder");
        let source = home.path().join("source");
        synth::write(&source, &config, 5, &()).expect("it is written");
        let source = Checkpoint::open(&source).expect("it is read");
        for &method in methods {
            let run = |device: DeviceChoice| {
                let out = home.path().join(format!("{method} {device:?}"));
                let recipe = Recipe {
                    simple: true,
                    ..Bits::B4.into()
                };
                let options = QuantizeOptions {
                    method: method.into(),
                    calibration: CalibrationSource::File(text.clone()),
                    calib_tokens: Some(2048),
                    eval_text: Some(text.clone()),
                    eval_tokens: Some(1024),
                    load: LoadOptions {
                        device,
                        activations: ActivationChoice::F32,
                        ..LoadOptions::default()
                    },
                    ..QuantizeOptions::new(&config, recipe, &out).expect("options")
                };
                let job = Job::new(&source, &options, &()).expect("it is possible");
                let report = job.run().expect("it is quantized");
                (report, Checkpoint::open(&out).expect("it was written"))
            };
            let (on_gpu, gpu) = run(DeviceChoice::Cuda(0));
            let (on_cpu, cpu) = run(DeviceChoice::Cpu);
            for (a, b) in on_gpu.layers.iter().zip(&on_cpu.layers) {
                assert_eq!(a.name, b.name);
                let errors = [a, b].map(|l| l.output_error.unwrap_or(l.rel_error));
                let what = format!("{family} by {method}, {}: {errors:?}", a.name);
                // An expert may have no inputs, and so no errors.
                let near = (errors[0] - errors[1]).abs() <= 0.05 * errors[1];
                assert!(near, "{what}");
            }
            let share = differing(&gpu, &cpu);
            let [ours, theirs] = [on_gpu, on_cpu].map(|report| {
                let measured = report.quality.expect("it was measured");
                measured.against.expect("against the source").kld.mean
            });
            println!(
                "{family} by {method}: {share:.4} of weights differ, KLD {ours:.2e}, {theirs:.2e}"
            );
            // Of two scales that awq's search finds as good as each other it may choose the other one.
            assert!(
                share < 0.5,
                "{family} by {method}: {share} of weights differ"
            );
            assert!(
                (ours / theirs - 1.0).abs() < 0.1,
                "{family}: {ours:e}, {theirs:e}"
            );
        }
    }
}
