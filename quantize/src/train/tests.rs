use super::graph::Graph;
use super::params::{Canonical, Model, rounded};
use super::plan::Schedule;
use super::sample::Sampler;
use super::strays::Strays;
use super::trainer::{Settings, Trainer};
use super::trellis::Nearest;
use crate::fit::Fit;
use crate::grid::Grid;
use crate::linalg;
use crate::methods::rtn;
use crate::trellis;
use nq_f32::{CpuOps, Load, Turned};
use nq_formats::trellis::Code;
use nq_formats::{
    AffineScheme, Bits, Group, QuantizedWeight, Tensor, TrellisScheme, Weight, Zeros,
};
use nq_kernels::grad::UNKNOWN;
use nq_kernels::rng::Philox;
use nq_model::forward::Mix;
use nq_model::{Dims, LinearKind, ModelConfig, VectorKind, find};
use nq_runtime::LayerWeights;
use nq_testkit::models::tiny;
use std::collections::BTreeMap;

fn config(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 40,
        max_position_embeddings: 64,
        tie_word_embeddings: tied,
        eos_token_ids: vec![39],
        ..tiny("qwen3")
    }
}

/// Random weights of a size at which every part of the model matters.
fn random(c: &ModelConfig, seed: u64) -> Canonical {
    let mut stream = 0;
    let mut normal = |n: usize, mean: f32, std: f32| -> Vec<f32> {
        stream += 1;
        let mut rng = Philox::new(seed, stream);
        (0..n).map(|_| mean + std * rng.normal()).collect()
    };
    let mut matrix = |dims: Dims, gain: f32| {
        let (out, inp) = dims.pair();
        let values = normal(out * inp, 0.0, gain / (inp as f32).sqrt());
        Weight::Dense(Tensor::from_f32(vec![out, inp], values).unwrap())
    };
    let layers: Vec<BTreeMap<LinearKind, Weight>> = (0..c.num_hidden_layers)
        .map(|layer| {
            let linears = c.layer(layer).matrices();
            linears.map(|l| (l.kind, matrix(l.dims(c), 1.0))).collect()
        })
        .collect();
    let embedding = matrix(Dims::new(c.vocab_size, c.hidden_size), 2.0);
    let head =
        (!c.tie_word_embeddings).then(|| matrix(Dims::new(c.vocab_size, c.hidden_size), 2.0));
    let mut vector = |n: usize, mean: f32| Tensor::from_f32(vec![n], normal(n, mean, 0.2)).unwrap();
    Canonical {
        layers: layers
            .into_iter()
            .enumerate()
            .map(|(layer, linears)| (c.layer(layer), linears))
            .map(|(spec, linears)| LayerWeights {
                spec,
                linears,
                norms: (spec.norms().into_iter())
                    .map(|n| (n.kind, vector(n.len.of(c), 1.0)))
                    .collect(),
                biases: (spec.biased())
                    .map(|l| (l.kind, vector(l.dims(c).rows, 0.0)))
                    .collect(),
                vectors: (spec.vectors().into_iter())
                    .map(|row| {
                        let values = vector(row.len.of(c), 0.0).to_f32().unwrap();
                        // Taps of a convolution that mixes tokens.
                        let by = match row.kind {
                            VectorKind::Conv | VectorKind::NgramConv => 3.0,
                            VectorKind::Decay | VectorKind::TimeStep => 1.0,
                        };
                        let values: Vec<f32> = values.iter().map(|v| by * v).collect();
                        (
                            row.kind,
                            Tensor::from_f32(vec![values.len()], values).unwrap(),
                        )
                    })
                    .collect(),
                table: None,
            })
            .collect(),
        final_norm: vector(c.hidden_size, 1.0),
        embedding,
        head,
    }
}

/// A model with recurrences, and with attention whose heads have gates and are turned in part.
fn hybrid() -> ModelConfig {
    ModelConfig {
        vocab_size: 40,
        max_position_embeddings: 64,
        eos_token_ids: vec![39],
        ..tiny("qwen35")
    }
}

fn quantized(w: &Canonical, bits: Bits) -> Canonical {
    let grid = Grid::new(AffineScheme::new(bits, Group::Size(16), Zeros::Integer)).unwrap();
    let round = |w: &Weight| {
        let m = linalg::Matrix::from_weight("w", w).unwrap();
        rtn::round(&m, grid, Fit::absmax(), &[])
            .to_weight()
            .unwrap()
    };
    rounded_by(w, round)
}

fn rounded_by(w: &Canonical, round: impl Fn(&Weight) -> Weight) -> Canonical {
    Canonical {
        layers: w
            .layers
            .iter()
            .map(|l| LayerWeights {
                linears: (l.linears.iter()).map(|(&k, w)| (k, round(w))).collect(),
                ..l.clone()
            })
            .collect(),
        final_norm: w.final_norm.clone(),
        embedding: round(&w.embedding),
        head: w.head.as_ref().map(&round),
    }
}

const NEAREST: &Nearest<'_> = &|weight, scheme| trellis::nearest(weight, scheme, None);

/// Whose inputs are whole blocks of a trellis.
fn wide(tied: bool) -> ModelConfig {
    ModelConfig {
        hidden_size: 128,
        intermediate_size: 128,
        head_dim: 32,
        num_hidden_layers: 1,
        ..config(tied)
    }
}

fn in_integers(w: &Canonical) -> Canonical {
    quantized(w, Bits::B8)
}

fn in_trellis(w: &Canonical, bits: f32) -> Canonical {
    let scheme = TrellisScheme::of_bits(Code::Octagon, bits).unwrap();
    rounded_by(w, |w| {
        let m = linalg::Matrix::from_weight("w", w).unwrap();
        let (weight, _) = trellis::round("w", &m, None, scheme).unwrap();
        Weight::Quantized(QuantizedWeight::Trellis(weight))
    })
}

fn tokens(c: &ModelConfig, n: usize) -> Vec<u32> {
    let mut rng = Philox::new(7, 7);
    (0..n)
        .map(|_| rng.next_u32() % c.vocab_size as u32)
        .collect()
}

/// Compares the gradient of every tuned tensor along a random direction with the difference of
/// losses. The direction moves latent weights by a whole step of their grid, so that their
/// codes really change.
fn check_gradients(c: ModelConfig, round: impl Fn(&Canonical) -> Canonical) {
    let (ops, codes) = (CpuOps, false);
    let (batch, seq) = (3, 8);
    let source = random(&c, 1);
    // An unrelated model: the loss is then far from its minimum, where it would be flat.
    let student = round(&random(&c, 2));
    let teacher = Model::teacher(&ops, &c, &source).unwrap();
    let mut model = Model::student(&ops, &c, &student, &random(&c, 2), codes).unwrap();
    let mut graph = Graph::new(&ops, &c, batch, seq).unwrap();
    let tokens = tokens(&c, batch * seq);
    let loss = graph
        .gradient(&ops, &teacher, &mut model, &tokens, 1.0)
        .unwrap();
    let again = graph.divergence(&ops, &teacher, &model, &tokens).unwrap();
    assert_eq!(loss, again);
    assert!(loss > 0.3, "{loss}");
    let names: Vec<String> = model.values().iter().map(|v| v.name.clone()).collect();
    assert!(names.iter().any(|n| n.ends_with(".scales")));
    assert!(!names.iter().any(|n| n.ends_with(".latent")));
    for (i, name) in names.iter().enumerate() {
        let mut rng = Philox::new(5, i as u64);
        let values = model.values()[i].value.clone();
        let grad = model.values()[i].state.as_ref().unwrap().grad.clone();
        let steps = step_sizes(&model, i);
        // Partly along the signs of the gradient, so that the sum does not cancel.
        let direction: Vec<f32> = grad
            .iter()
            .zip(&steps)
            .map(|(g, s)| {
                s * if rng.uniform() < 0.8 {
                    g.signum()
                } else {
                    -g.signum()
                }
            })
            .collect();
        let is_scale = name.ends_with(".scales");
        // Scales as stored, so that the actual move is the intended one.
        let stored = |v: f32| {
            if is_scale {
                half::f16::from_f32(v).to_f32()
            } else {
                v
            }
        };
        let mut side = |sign: f32| {
            let moved = values.iter().zip(&direction);
            let moved: Vec<f32> = moved.map(|(v, d)| stored(v + sign * d)).collect();
            model.values_mut()[i].value = moved.clone();
            let loss = graph.divergence(&ops, &teacher, &model, &tokens).unwrap();
            (loss, moved)
        };
        let ((up, above), (down, below)) = (side(1.0), side(-1.0));
        model.values_mut()[i].value = values;
        let measured = up - down;
        let moves = grad.iter().zip(above.iter().zip(&below));
        let expected: f64 = moves.map(|(g, (a, b))| f64::from(g * (a - b))).sum();
        let error = (measured - expected).abs() / expected.abs().max(1e-4);
        assert!(
            error < 0.03,
            "{name}: measured {measured:.6}, computed {expected:.6}"
        );
    }
}

/// The step for each value of tensor `i`.
fn step_sizes(model: &Model<CpuOps>, i: usize) -> Vec<f32> {
    let values = model.values();
    let v = values[i];
    if let Some(weight) = v.name.strip_suffix(".latent") {
        let scales = values
            .iter()
            .find(|s| s.name == format!("{weight}.scales"))
            .unwrap();
        return (0..v.len).map(|at| scales.value[at / 16].abs()).collect();
    }
    // Scales are rounded to f16: a step is many times its spacing. Gains are not, and recurrences bend within such a step.
    let share = if v.name.ends_with(".scales") {
        256.0
    } else {
        2048.0
    };
    v.value.iter().map(|x| (x / share).abs()).collect()
}

#[test]
fn gradients_of_scales_and_gains_with_fixed_codes() {
    check_gradients(config(true), in_integers);
}

#[test]
fn gradients_of_an_untied_head_with_fixed_codes() {
    check_gradients(config(false), in_integers);
}

/// A model whose queries, keys and values have biases and no norms.
fn biased() -> ModelConfig {
    ModelConfig {
        architecture: find(|a| a.gguf, "qwen2").unwrap(),
        ..config(false)
    }
}

#[test]
fn gradients_of_a_model_with_biases() {
    check_gradients(biased(), in_integers);
}

#[test]
fn gradients_of_a_hybrid() {
    check_gradients(hybrid(), in_integers);
}

#[test]
fn gradients_of_scales_of_trellises() {
    check_gradients(wide(false), |w| in_trellis(w, 3.0));
}

/// A latent weight's gradient is that of its weight wherever its code is free to move.
#[test]
fn gradients_of_latent_weights() {
    let (ops, c) = (CpuOps, config(true));
    let (batch, seq) = (3, 8);
    let source = random(&c, 1);
    let other = random(&c, 2);
    let teacher = Model::teacher(&ops, &c, &source).unwrap();
    let mut model = Model::student(&ops, &c, &quantized(&other, Bits::B8), &other, true).unwrap();
    let mut graph = Graph::new(&ops, &c, batch, seq).unwrap();
    let tokens = tokens(&c, batch * seq);
    graph
        .gradient(&ops, &teacher, &mut model, &tokens, 1.0)
        .unwrap();
    let latent: Vec<usize> = (0..model.values().len())
        .filter(|&i| model.values()[i].name.ends_with(".latent"))
        .collect();
    assert_eq!(latent.len(), 15);
    for i in latent {
        let name = model.values()[i].name.clone();
        let values = model.values()[i].value.clone();
        let grad = model.values()[i].state.as_ref().unwrap().grad.clone();
        let steps = step_sizes(&model, i);
        let mut side = |sign: f32| {
            let moved = |((v, g), s): ((&f32, &f32), &f32)| v + sign * s * g.signum();
            let moved: Vec<f32> = values.iter().zip(&grad).zip(&steps).map(moved).collect();
            model.values_mut()[i].value = moved;
            graph.divergence(&ops, &teacher, &model, &tokens).unwrap()
        };
        let measured = (side(1.0) - side(-1.0)) / 2.0;
        model.values_mut()[i].value = values;
        let expected: f64 = grad
            .iter()
            .zip(&steps)
            .map(|(g, s)| f64::from(g.abs() * s))
            .sum();
        // Codes at the ends of the range can move one way only: hence the wider margin.
        let error = (measured - expected).abs() / expected;
        assert!(
            error < 0.12,
            "{name}: measured {measured:.6}, computed {expected:.6}"
        );
    }
}

/// The gradients of passes add up to the gradient of the batch.
#[test]
fn gradients_of_passes_add_up() {
    let (ops, c) = (CpuOps, config(true));
    let source = random(&c, 1);
    let quantized = quantized(&source, Bits::B4);
    let teacher = Model::teacher(&ops, &c, &source).unwrap();
    let tokens = tokens(&c, 4 * 8);
    let gradient = |pass: usize| {
        let mut model = Model::student(&ops, &c, &quantized, &source, true).unwrap();
        let mut graph = Graph::new(&ops, &c, pass, 8).unwrap();
        for part in tokens.chunks(pass * 8) {
            let share = pass as f32 / 4.0;
            graph
                .gradient(&ops, &teacher, &mut model, part, share)
                .unwrap();
        }
        let values = model.values();
        values
            .iter()
            .flat_map(|v| v.state.as_ref().unwrap().grad.clone())
            .collect::<Vec<f32>>()
    };
    let (whole, parts) = (gradient(4), gradient(2));
    let norm: f32 = whole.iter().map(|g| g * g).sum::<f32>().sqrt();
    let error: f32 = whole
        .iter()
        .zip(&parts)
        .map(|(a, b)| (a - b).powi(2))
        .sum::<f32>()
        .sqrt();
    assert!(norm > 0.0 && error < 1e-4 * norm, "{error} of {norm}");
}

/// Text comes with the teacher's outputs: gradients are those of running it again.
#[test]
fn sampling_leaves_the_outputs_of_the_teacher() {
    check_outputs_of_sampling(config(false));
    check_outputs_of_sampling(biased());
    check_outputs_of_sampling(hybrid());
}

fn check_outputs_of_sampling(c: ModelConfig) {
    let ops = CpuOps;
    let source = random(&c, 1);
    let quantized = quantized(&source, Bits::B4);
    let teacher = Model::teacher(&ops, &c, &source).unwrap();
    let mut sampler = Sampler::new(&ops, &c, 3, 8).unwrap();
    let begin = vec![vec![1], vec![2, 3, 4], vec![5; 9]];
    let text = sampler.sample(&ops, &teacher, &begin, 9, 0).unwrap();
    let gradient = |known: bool| {
        let mut model = Model::student(&ops, &c, &quantized, &source, true).unwrap();
        let mut graph = Graph::new(&ops, &c, 2, 8).unwrap();
        // The last two sequences, in the other order.
        let tokens = [&text[16..], &text[8..16]].concat();
        let loss = if known {
            for (row, first) in [(0, 16), (8, 8)] {
                let outputs = sampler.outputs();
                graph.take_outputs(&ops, outputs, first, row, 8).unwrap();
            }
            graph.gradient_towards(&ops, &teacher, &mut model, &tokens, 1.0)
        } else {
            graph.gradient(&ops, &teacher, &mut model, &tokens, 1.0)
        };
        let values = model.values().into_iter();
        let grads = values.flat_map(|v| v.state.as_ref().unwrap().grad.clone());
        (loss.unwrap(), grads.collect::<Vec<f32>>())
    };
    let ((loss, grads), (known_loss, known_grads)) = (gradient(false), gradient(true));
    assert!(
        (loss - known_loss).abs() < 1e-5 * loss,
        "{loss} {known_loss}"
    );
    let norm: f32 = grads.iter().map(|g| g * g).sum::<f32>().sqrt();
    let off = grads.iter().zip(&known_grads).map(|(a, b)| (a - b).powi(2));
    assert!(norm > 0.0 && off.sum::<f32>().sqrt() < 1e-4 * norm);
}

/// The student starts from the quantized weights, and reading it back before any step returns them.
#[test]
fn nothing_tuned_is_nothing_changed() {
    let (ops, c) = (CpuOps, config(false));
    let source = random(&c, 1);
    let quantized = quantized(&source, Bits::B4);
    let model = Model::student(&ops, &c, &quantized, &source, true).unwrap();
    let mut scratch = vec![0.0; c.q_dim() * c.hidden_size];
    let Mix::Attention(attention) = &model.layers[0].blocks[0].mixer else {
        panic!("a layer begins with attention");
    };
    let query = &attention.qkv.linear[0];
    assert!(query.is_tuned());
    let w = query.load(&ops, &mut scratch).unwrap();
    let expected =
        linalg::Matrix::from_weight("q", quantized.layers[0].linear(LinearKind::Q)).unwrap();
    assert_eq!(w[..expected.data.len()], expected.data);

    check_nothing_changed(&c, &quantized, &model);
    let c = hybrid();
    let source = random(&c, 1);
    let quantized = self::quantized(&source, Bits::B4);
    let model = Model::student(&ops, &c, &quantized, &source, true).unwrap();
    check_nothing_changed(&c, &quantized, &model);
}

fn check_nothing_changed(c: &ModelConfig, quantized: &Canonical, model: &Model<CpuOps>) {
    let values: Vec<(String, Vec<f32>)> = model
        .values()
        .iter()
        .map(|v| (v.name.clone(), v.value.clone()))
        .collect();
    let lookup = |name: &str| {
        values
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_slice())
    };
    let back = rounded(quantized, Turned::new(c), lookup, NEAREST).unwrap();
    for (a, b) in back.layers.iter().zip(&quantized.layers) {
        for (a, b) in a.linears.values().zip(b.linears.values()) {
            let a = linalg::Matrix::from_weight("a", a).unwrap();
            assert_eq!(a, linalg::Matrix::from_weight("b", b).unwrap());
        }
        for (kind, norm) in &b.norms {
            assert_eq!(
                a.norm(*kind).to_f32().unwrap(),
                norm.to_f32().unwrap(),
                "{kind:?}"
            );
        }
    }
    let a = linalg::Matrix::from_weight("a", back.head.as_ref().unwrap()).unwrap();
    let b = linalg::Matrix::from_weight("b", quantized.head.as_ref().unwrap()).unwrap();
    assert_eq!(a, b);
}

/// Sampling token by token agrees with running whole sequences: the most likely next token after
/// a beginning is the same.
#[test]
fn sampled_text_follows_the_model() {
    let (ops, c) = (CpuOps, config(true));
    let mut source = random(&c, 3);
    // Logits so far apart that drawing always gives the best token.
    let sharp: Vec<f32> = source
        .final_norm
        .to_f32()
        .unwrap()
        .iter()
        .map(|g| g * 60.0)
        .collect();
    source.final_norm = Tensor::from_f32(vec![32], sharp).unwrap();
    let teacher = Model::teacher(&ops, &c, &source).unwrap();
    let mut sampler = Sampler::new(&ops, &c, 4, 12).unwrap();
    let begin = vec![vec![1], vec![2, 3, 4], vec![5; 20], vec![6, UNKNOWN, 7]];
    let text = sampler.sample(&ops, &teacher, &begin, 9, 0).unwrap();
    assert_eq!(text.len(), 4 * 12);
    assert_eq!(text[12..15], [2, 3, 4]);
    assert_eq!(text[24..36], [5; 12]);
    assert_eq!((text[36], text[38]), (6, 7));
    assert_eq!(text, sampler.sample(&ops, &teacher, &begin, 9, 0).unwrap());
    let mut graph = Graph::new(&ops, &c, 4, 12).unwrap();
    let logits = graph.all_logits(&ops, &teacher, &text).unwrap();
    let mut followed = 0;
    for (b, begin) in begin.iter().enumerate() {
        let drawn = |t: &usize| begin.get(*t).is_none_or(|&id| id == UNKNOWN);
        for t in (1..12).filter(drawn) {
            let row = &logits[(b * 12 + t - 1) * 40..][..40];
            let best = (0..40).max_by(|&i, &j| row[i].total_cmp(&row[j])).unwrap();
            followed += usize::from(text[b * 12 + t] == best as u32);
        }
    }
    assert!(followed >= 27, "{followed} of 30 tokens were the best ones");
}

fn settings() -> Settings {
    Settings {
        steps: 40,
        batch: 16,
        pass: 8,
        slots: 32,
        length: 12,
        held_out: 32,
        checks: 8,
        codes: true,
        search: 4,
        rate_codes: 0.01,
        rate_scales: 0.001,
        rate_gains: 0.0005,
        warmup: 2,
        visits: 2,
        strays: Strays {
            sequences: 0.5,
            tokens: 0.1,
        },
        seed: 1,
    }
}

/// Measuring the pace of a schedule does not change the run.
#[test]
fn measuring_the_pace_changes_nothing() {
    let (ops, c) = (CpuOps, config(true));
    let source = random(&c, 4);
    let quantized = quantized(&source, Bits::B4);
    let run = |measure: bool| {
        let weights = (&source, &quantized);
        let mut trainer =
            Trainer::new(&ops, &c, weights, settings(), (&begin, NEAREST), &()).unwrap();
        if measure {
            let pace = trainer.pace().unwrap();
            assert!(pace.sequence > 0.0 && pace.check > 0.0, "{pace:?}");
        }
        trainer.run_to(6, None).unwrap();
        trainer.checks().to_vec()
    };
    assert_eq!(run(true), run(false));
}

fn begin(first: u64, n: usize) -> crate::Result<Vec<Vec<u32>>> {
    Ok((0..n as u64)
        .map(|i| vec![((first + i) % 40) as u32])
        .collect())
}

/// A few steps lower the divergence on text not trained on; their result can be written;
/// and a run that stopped halfway continues to the same bits.
#[test]
fn tuning_helps_and_resumes_to_the_same_bits() {
    check_tuning(config(true), settings(), |w| quantized(w, Bits::B4));
}

#[test]
fn trellises_are_tuned_too() {
    let slower = Settings {
        rate_codes: 0.005,
        ..settings()
    };
    check_tuning(wide(true), slower, |w| in_trellis(w, 2.0));
}

fn check_tuning(c: ModelConfig, settings: Settings, round: impl Fn(&Canonical) -> Canonical) {
    let ops = CpuOps;
    let source = random(&c, 4);
    let quantized = round(&source);
    let dir = tempfile::tempdir().unwrap();
    let trainer = || {
        Trainer::new(
            &ops,
            &c,
            (&source, &quantized),
            settings.clone(),
            (&begin, NEAREST),
            &(),
        )
        .unwrap()
    };
    let mut whole = trainer();
    let path = dir.path().join("whole");
    whole.run(Some(&path), &()).unwrap();
    let checks = whole.checks();
    let (first, last) = (checks[0].held_out, checks[checks.len() - 1].held_out);
    assert!(last < 0.9 * first, "{first} -> {last}");
    let tuned = whole.best(&quantized).unwrap().unwrap();
    let teacher = Model::teacher(&ops, &c, &source).unwrap();
    let student = Model::teacher(&ops, &c, &tuned).unwrap();
    let mut graph = Graph::new(&ops, &c, 4, 12).unwrap();
    let fresh = tokens(&c, 48);
    let written = graph.divergence(&ops, &teacher, &student, &fresh).unwrap();
    let base = Model::teacher(&ops, &c, &quantized).unwrap();
    let before = graph.divergence(&ops, &teacher, &base, &fresh).unwrap();
    assert!(written < before, "as written: {before} -> {written}");

    let mut half = trainer();
    let path = dir.path().join("half");
    half.run_to(20, Some(&path)).unwrap();
    let mut rest = trainer();
    assert!(rest.take_up(&path).unwrap());
    rest.run(None, &()).unwrap();
    assert_eq!(rest.checks(), whole.checks());
    let resumed = rest.best(&quantized).unwrap().unwrap();
    for (a, b) in resumed.layers.iter().zip(&tuned.layers) {
        for (a, b) in a.linears.values().zip(b.linears.values()) {
            let a = linalg::Matrix::from_weight("a", a).unwrap();
            assert_eq!(a, linalg::Matrix::from_weight("b", b).unwrap());
        }
    }
    // Other settings make it another run.
    let mut other = trainer();
    let schedule = Schedule {
        steps: 41,
        batch: 16,
        search: 5,
        checks: 8,
    };
    other.plan(schedule);
    assert!(!other.take_up(&path).unwrap());
}
