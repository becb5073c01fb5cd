//! Windows, scoring and statistics, on an engine whose every logit is known.

use crate::common::FakeEngine;
use nq_evals::{Error, EvalReport, EvalSpec, Evaluation, Precision, Protocol, ReferenceLogits};
use nq_evals::{SeeingModel, compare, evaluate, evaluate_seen, self_noise};
use nq_formats::tokenizer::Around;
use nq_model::vision::ImageTokens;
use nq_runtime::{Engine, ImagePrompt, KvType};

const VOCAB: usize = 50;

fn text(n: usize) -> Vec<u32> {
    (0..n as u32)
        .map(|i| (i * i * 7 + i * 3) % VOCAB as u32)
        .collect()
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = row.iter().fold(f64::MIN, |m, &v| m.max(f64::from(v)));
    let sum: f64 = row.iter().map(|&v| (f64::from(v) - max).exp()).sum();
    row.iter().map(|&v| f64::from(v) - max - sum.ln()).collect()
}

/// The positions that a protocol scores, spelled out.
fn scored(protocol: Protocol, ctx: usize) -> Vec<usize> {
    match protocol {
        Protocol::Hf | Protocol::Texts => (0..ctx - 1).collect(),
        Protocol::Llama => (ctx / 2..ctx - 1).collect(),
    }
}

#[test]
fn perplexity_is_the_definition_whatever_the_portions() {
    let engine = FakeEngine::new(VOCAB, 0.0);
    let tokens = text(77);
    for protocol in [Protocol::Hf, Protocol::Llama] {
        for ctx in [4usize, 7, 16, 64] {
            let mut nll = Vec::new();
            for window in tokens.chunks_exact(ctx) {
                for p in scored(protocol, ctx) {
                    let q = log_softmax(&engine.row(&window[..=p]));
                    nll.push(-q[window[p + 1] as usize]);
                }
            }
            let n = nll.len() as f64;
            let mean = nll.iter().sum::<f64>() / n;
            let var = nll.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
            for rows in [1, 3, 16, 40, 512] {
                let spec = EvalSpec {
                    rows,
                    ..EvalSpec::new(protocol, ctx, "squares")
                };
                let e = evaluate(&engine, &tokens, &spec, &()).unwrap();
                let r = &e.report;
                let case = format!("{protocol}, ctx {ctx}, rows {rows}");
                assert_eq!(r.tokens, nll.len(), "{case}");
                assert_eq!(r.windows, 77 / ctx, "{case}");
                assert!((r.ppl / mean.exp() - 1.0).abs() < 1e-12, "{case}");
                let se = (var / n).sqrt() * r.ppl;
                assert!(
                    (r.ppl_se / se - 1.0).abs() < 1e-9,
                    "{case}: {} {se}",
                    r.ppl_se
                );
                for (a, b) in e.nll.iter().zip(&nll) {
                    assert!((a - b).abs() < 1e-12, "{case}");
                }
                assert_eq!(e.window_ppl().len(), r.windows);
                assert!(e.pairs.is_empty() && r.against.is_none());
            }
        }
    }
}

/// Finite logits may give figures that are not finite: those are not reported.
#[test]
fn figures_that_are_not_finite_are_refused() {
    let engine = FakeEngine::new(VOCAB, 1e6);
    let spec = EvalSpec::new(Protocol::Hf, 16, "squares");
    let error = evaluate(&engine, &text(77), &spec, &()).expect_err("e^1000000");
    assert!(
        matches!(
            error,
            Error::ResultNotFinite {
                what: "perplexity",
                layer: None,
                ..
            }
        ),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("expected a finite number, found inf")
    );
}

fn close(a: f64, b: f64, tolerance: f64, what: &str) {
    assert!(
        (a - b).abs() <= tolerance * b.abs().max(1.0),
        "{what}: {a}, expected {b}"
    );
}

#[test]
fn comparison_is_the_definition() {
    let (engine, reference) = (FakeEngine::new(VOCAB, 0.4), FakeEngine::new(VOCAB, 0.0));
    let tokens = text(200);
    let spec = EvalSpec {
        rows: 40,
        ..EvalSpec::new(Protocol::Llama, 16, "squares")
    };
    let e = compare(&engine, &reference, &tokens, &spec, &()).unwrap();
    let c = e.report.against.as_ref().unwrap();

    let mut klds = Vec::new();
    let (mut same, mut dp2, mut nll, mut nll_ref) = (0, 0.0, Vec::new(), Vec::new());
    let top = |l: &[f64]| (0..l.len()).max_by(|&a, &b| l[a].total_cmp(&l[b]));
    for window in tokens.chunks_exact(16) {
        for p in scored(Protocol::Llama, 16) {
            let q = log_softmax(&engine.row(&window[..=p]));
            let r = log_softmax(&reference.row(&window[..=p]));
            let t = window[p + 1] as usize;
            klds.push(
                r.iter()
                    .zip(&q)
                    .map(|(r, q)| r.exp() * (r - q))
                    .sum::<f64>(),
            );
            same += usize::from(top(&q) == top(&r));
            dp2 += (q[t].exp() - r[t].exp()).powi(2);
            let pair = e.pairs[klds.len() - 1];
            for (token, found) in [(top(&q), pair.model_top_p), (top(&r), pair.reference_top_p)] {
                let token = token.unwrap();
                close(
                    f64::from(found.model),
                    q[token].exp(),
                    1e-6,
                    "the model's probability",
                );
                close(
                    f64::from(found.reference),
                    r[token].exp(),
                    1e-6,
                    "the reference's",
                );
            }
            nll.push(-q[t]);
            nll_ref.push(-r[t]);
        }
    }
    let n = klds.len() as f64;
    let close = |a: f64, b: f64, what: &str| close(a, b, 1e-11, what);
    close(c.kld.mean, klds.iter().sum::<f64>() / n, "mean");
    close(c.rms_dp, (dp2 / n).sqrt(), "rms_dp");
    close(c.same_top1, same as f64 / n, "same_top1");
    assert!(same > 0 && same < klds.len(), "both cases occur");
    close(
        c.ppl_ref,
        (nll_ref.iter().sum::<f64>() / n).exp(),
        "ppl_ref",
    );
    close(c.ln_ppl_ratio, (e.report.ppl / c.ppl_ref).ln(), "ln ratio");
    let d: Vec<f64> = nll.iter().zip(&nll_ref).map(|(a, b)| a - b).collect();
    let m = d.iter().sum::<f64>() / n;
    let se = (d.iter().map(|v| (v - m).powi(2)).sum::<f64>() / (n - 1.0) / n).sqrt();
    close(c.ln_ppl_ratio_se, se, "its error");

    let worst = e.worst(&tokens, 10);
    assert_eq!(worst.len(), 10);
    klds.sort_by(f64::total_cmp);
    close(c.kld.max, klds[klds.len() - 1], "max");
    close(worst[0].kld, klds[klds.len() - 1], "worst");
    close(worst[9].kld, klds[klds.len() - 10], "tenth worst");
    close(
        c.kld.median,
        nq_evals::stats::quantile(&klds, 0.5),
        "median",
    );
    close(c.kld.p99, nq_evals::stats::quantile(&klds, 0.99), "p99");
    let w = &worst[0];
    let window = &tokens[w.window * 16..(w.window + 1) * 16];
    assert_eq!(
        w.context,
        window[w.position + 1 - w.context.len()..=w.position]
    );
    assert_eq!(w.target, window[w.position + 1]);
    let mean_of_means = e.window_kld().iter().sum::<f64>() / e.report.windows as f64;
    close(mean_of_means, c.kld.mean, "windows are of one length");

    // A report is unchanged after JSON.
    let json = serde_json::to_string(&e.report).unwrap();
    let back: EvalReport = serde_json::from_str(&json).unwrap();
    assert_eq!(back, e.report);
    for key in [
        "ppl",
        "ppl_se",
        "tokens",
        "windows",
        "ctx",
        "protocol",
        "text",
        "kld",
        "same_top1",
        "rms_dp",
        "ppl_ref",
        "ln_ppl_ratio",
        "ln_ppl_ratio_se",
    ] {
        assert!(json.contains(&format!("\"{key}\":")), "{key} in {json}");
    }
}

/// Buckets hold the tokens of all windows at their positions, and all buckets together hold all tokens.
#[test]
fn depth_is_the_position_in_a_window() {
    let (mut engine, mut reference) = (FakeEngine::new(VOCAB, 0.4), FakeEngine::new(VOCAB, 0.0));
    for engine in [&mut engine, &mut reference] {
        engine.config.max_position_embeddings = 512;
    }
    let tokens = text(2 * 300 + 5);
    let spec = EvalSpec::new(Protocol::Hf, 300, "squares");
    let e = compare(&engine, &reference, &tokens, &spec, &()).unwrap();
    let buckets = e.by_depth();
    let ranges = [0..=127, 128..=255, 256..=298];
    assert_eq!(buckets.len(), ranges.len());
    for (bucket, range) in buckets.iter().zip(ranges) {
        assert_eq!((bucket.from, bucket.to), (*range.start(), *range.end()));
        let (mut nll, mut nll_ref, mut kld) = (Vec::new(), Vec::new(), Vec::new());
        for window in tokens.chunks_exact(300) {
            for p in range.clone() {
                let q = log_softmax(&engine.row(&window[..=p]));
                let r = log_softmax(&reference.row(&window[..=p]));
                nll.push(-q[window[p + 1] as usize]);
                nll_ref.push(-r[window[p + 1] as usize]);
                kld.push(
                    r.iter()
                        .zip(&q)
                        .map(|(r, q)| r.exp() * (r - q))
                        .sum::<f64>(),
                );
            }
        }
        assert_eq!(bucket.tokens, nll.len());
        let n = nll.len() as f64;
        let mean = |v: &[f64]| v.iter().sum::<f64>() / n;
        let se = |v: &[f64]| {
            let squares = v.iter().map(|x| (x - mean(v)).powi(2)).sum::<f64>();
            (squares / (n - 1.0) / n).sqrt()
        };
        let against = bucket.against.unwrap();
        for (found, expected) in [
            (bucket.ppl, mean(&nll).exp()),
            (bucket.ppl_se, mean(&nll).exp() * se(&nll)),
            (against.ppl_ref, mean(&nll_ref).exp()),
            (against.kld, mean(&kld)),
            (against.kld_se, se(&kld)),
        ] {
            assert!(
                (found - expected).abs() < 1e-10 * expected,
                "{found}, expected {expected}"
            );
        }
    }
    let all: f64 = buckets
        .iter()
        .map(|b| b.against.unwrap().kld * b.tokens as f64)
        .sum();
    let mean = e.report.against.as_ref().unwrap().kld.mean;
    assert!((all / e.report.tokens as f64 - mean).abs() < 1e-12);

    // Without a reference there is perplexity alone; where half a window is scored, buckets begin there.
    let alone = evaluate(&engine, &tokens, &spec, &()).unwrap().by_depth();
    assert!(alone.iter().all(|b| b.against.is_none()));
    assert_eq!(alone[2].ppl, buckets[2].ppl);
    let half = EvalSpec::new(Protocol::Llama, 300, "squares");
    let half = evaluate(&engine, &tokens, &half, &()).unwrap().by_depth();
    let ranges: Vec<_> = half.iter().map(|b| (b.from, b.to, b.tokens)).collect();
    assert_eq!(ranges, [(150, 255, 212), (256, 298, 86)]);
}

#[test]
fn a_model_does_not_stray_from_itself() {
    let engine = FakeEngine::new(VOCAB, 0.4);
    let spec = EvalSpec::new(Protocol::Hf, 16, "squares");
    let e = compare(&engine, &engine, &text(100), &spec, &()).unwrap();
    let c = e.report.against.unwrap();
    assert!(c.kld.max.abs() <= 1e-9, "{:?}", c.kld);
    assert_eq!(c.same_top1, 1.0);
    assert_eq!(c.rms_dp, 0.0);
    assert_eq!(c.ln_ppl_ratio, 0.0);
    let noise = self_noise(&engine, &text(100), &spec, &()).unwrap();
    assert!(
        noise.max.abs() < 1e-9,
        "the fake has no rounding: {noise:?}"
    );
}

#[test]
fn a_recorded_reference_gives_the_lockstep_figures() {
    let (engine, reference) = (FakeEngine::new(VOCAB, 0.4), FakeEngine::new(VOCAB, 0.0));
    let tokens = text(330);
    let spec = EvalSpec {
        rows: 40,
        ..EvalSpec::new(Protocol::Llama, 16, "squares")
    };
    let exact = compare(&engine, &reference, &tokens, &spec, &()).unwrap();
    let x = exact.report.against.as_ref().unwrap();
    let rows = exact.report.tokens as u64;
    let wide = 4 * rows * VOCAB as u64;
    for (limit, precision, tolerance) in [
        (wide, Precision::F32, 1e-7),
        (wide - 1, Precision::F16, 1e-5),
    ] {
        let r = ReferenceLogits::record(&reference, &tokens, &spec, limit, &()).unwrap();
        assert_eq!(r.precision(), precision);
        assert!(r.bytes() <= limit);
        let found = r.compare(&engine, &()).unwrap();
        assert_eq!(found.nll, exact.nll);
        let c = found.report.against.as_ref().unwrap();
        for (a, b) in found.pairs.iter().zip(&exact.pairs) {
            assert!(
                (a.kld - b.kld).abs() < 100.0 * tolerance,
                "{precision}: {a:?} {b:?}"
            );
            assert_eq!(a.reference_top, b.reference_top);
            assert_eq!(a.model_top, b.model_top);
        }
        assert!((c.kld.mean - x.kld.mean).abs() < tolerance, "{precision}");
        assert!((c.ppl_ref - x.ppl_ref).abs() < 1e-12);
        let itself = r.compare(&reference, &()).unwrap();
        let floor = itself.report.against.unwrap().kld;
        assert!(floor.mean.abs() < tolerance, "{precision}: {floor:?}");
    }
    let fit = ReferenceLogits::fitting_windows(VOCAB, &spec, wide / 4);
    match ReferenceLogits::record(&reference, &tokens, &spec, wide / 4, &()) {
        Err(Error::CacheTooLarge { fit: f, needed, .. }) => {
            assert_eq!(f, fit);
            assert_eq!(needed, wide / 2);
        }
        other => panic!("{:?}", other.map(|r| r.bytes())),
    }
    let fewer = EvalSpec {
        max_windows: Some(fit),
        ..spec
    };
    let r = ReferenceLogits::record(&reference, &tokens, &fewer, wide / 4, &()).unwrap();
    assert_eq!(r.compare(&engine, &()).unwrap().report.windows, fit);
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let (engine, reference) = (FakeEngine::new(VOCAB, 0.4), FakeEngine::new(VOCAB, 0.0));
    let spec = EvalSpec::new(Protocol::Hf, 16, "squares");
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.unwrap()
            .install(|| compare(&engine, &reference, &text(500), &spec, &()).unwrap())
    };
    let (one, three) = (run(1), run(3));
    assert_eq!(one.report, three.report);
    assert_eq!(one.pairs, three.pairs);
}

#[test]
fn what_cannot_be_measured_is_refused_by_name() {
    let engine = FakeEngine::new(VOCAB, 0.0);
    let check = |tokens: &[u32], spec: EvalSpec, expected: &str| {
        let message = evaluate(&engine, tokens, &spec, &())
            .unwrap_err()
            .to_string();
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    };
    let spec = |ctx| EvalSpec::new(Protocol::Hf, ctx, "squares");
    check(
        &text(15),
        spec(16),
        "text squares: expected at least one window of 16",
    );
    check(
        &text(500),
        spec(65),
        "ctx: expected at most the model's 64, found 65",
    );
    check(
        &text(500),
        spec(1),
        "ctx: expected a window with tokens to score",
    );
    let mut bad = text(40);
    bad[20] = VOCAB as u32;
    check(
        &bad,
        spec(16),
        "below the model's vocabulary of 50, found 50 at token 20",
    );
    bad[20] = 0;
    bad[35] = VOCAB as u32; // past the last whole window
    evaluate(&engine, &bad, &spec(16), &()).unwrap();

    let mut poisoned = FakeEngine::new(VOCAB, 0.0);
    poisoned.poison = Some(6);
    let message = evaluate(&poisoned, &text(40), &spec(16), &())
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("the model's logits at position 5 of window"),
        "{message}"
    );
    let message = compare(&engine, &poisoned, &text(40), &spec(16), &())
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("the reference's logits at position 5"),
        "{message}"
    );

    let other = FakeEngine::new(VOCAB + 1, 0.0);
    assert_eq!(other.config().vocab_size, VOCAB + 1);
    let message = compare(&engine, &other, &text(40), &spec(16), &())
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("expected the reference's 51 tokens, found 50"),
        "{message}"
    );
}

/// As llama-perplexity does where the tokenizer adds a begin token. (A Llama with random weights in float64: 4761.1286 over
/// two windows of 512, 4749.3725 without.)
#[test]
fn windows_of_the_llama_protocol_begin_with_the_begin_token() {
    let around = |before: Vec<u32>| Around {
        before,
        after: Vec::new(),
    };
    let begun = |protocol, before| {
        EvalSpec::new(protocol, 3, "text").begun(vec![9, 1, 2, 3, 4, 5, 6], &around(before))
    };
    assert_eq!(begun(Protocol::Llama, vec![9]), [9, 1, 2, 9, 4, 5, 9]);
    assert_eq!(begun(Protocol::Hf, vec![9]), [9, 1, 2, 3, 4, 5, 6]);
    assert_eq!(begun(Protocol::Llama, vec![]), [9, 1, 2, 3, 4, 5, 6]);
}

/// Log-probabilities in a file compare as those in memory, and a file that is not what it should be is refused.
#[test]
fn log_probabilities_are_kept_in_files() {
    let (reference, model) = (FakeEngine::new(VOCAB, 0.0), FakeEngine::new(VOCAB, 0.3));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kept");
    let tokens = text(77);
    let spec = EvalSpec::new(Protocol::Hf, 16, "squares");
    ReferenceLogits::record_to(&path, "key", &reference, &tokens, &spec, &()).unwrap();
    let open =
        |key: &str, spec: &EvalSpec, vocab| ReferenceLogits::open(&path, key, &tokens, spec, vocab);
    let kept = open("key", &spec, VOCAB).unwrap();
    assert_eq!(kept.precision(), Precision::F16);
    // 16 bits a number, as much memory as that allows.
    let limit = 2 * (4 * 15 * VOCAB) as u64;
    let recorded = ReferenceLogits::record(&reference, &tokens, &spec, limit, &()).unwrap();
    let [found, expected] = [&kept, &recorded].map(|r| r.compare(&model, &()).unwrap());
    assert_eq!(found.nll, expected.nll);
    assert_eq!(found.pairs, expected.pairs);
    let exact = compare(&model, &reference, &tokens, &spec, &()).unwrap();
    // Rounding shifts a token's divergence with either sign, and the mean hardly.
    for (a, b) in found.pairs.iter().zip(&exact.pairs) {
        assert!((a.kld - b.kld).abs() < 1e-5 + 5e-3 * b.kld);
        assert_eq!(a.reference_nll, b.reference_nll);
    }
    let mean = |e: &Evaluation| e.report.against.as_ref().map_or(0.0, |c| c.kld.mean);
    let shift = mean(&found) / mean(&exact) - 1.0;
    assert!(shift.abs() < 1e-3, "{shift}");

    let short = EvalSpec {
        max_windows: Some(3),
        ..spec.clone()
    };
    for (key, spec, vocab) in [
        ("other", &spec, VOCAB),
        ("key", &short, VOCAB),
        ("key", &spec, 49),
    ] {
        let error = open(key, spec, vocab).err().unwrap();
        assert!(matches!(error, Error::Kept { .. }), "{error}");
    }
    let whole = std::fs::read(&path).unwrap();
    for at in [0, whole.len() / 3, whole.len() - 12, whole.len() - 1] {
        let mut changed = whole.clone();
        changed[at] ^= 64;
        std::fs::write(&path, &changed).unwrap();
        assert!(open("key", &spec, VOCAB).is_err(), "byte {at}");
        std::fs::write(&path, &whole[..at]).unwrap();
        assert!(open("key", &spec, VOCAB).is_err(), "{at} bytes");
    }
}

/// Whole texts have the figures of windows of the same tokens, without those that stand for images.
#[test]
fn texts_are_scored_as_windows_without_images() {
    let (engine, reference) = (FakeEngine::new(VOCAB, 0.1), FakeEngine::new(VOCAB, 0.0));
    let images = ImageTokens {
        pad: 7,
        start: 3,
        end: 11,
    };
    let texts = [text(9), text(30), [text(4), vec![3, 7, 7, 11, 5]].concat()];
    let (mut nll, mut pairs, mut targets) = (Vec::new(), Vec::new(), vec![texts[0][0]]);
    for ids in &texts {
        let spec = EvalSpec::new(Protocol::Hf, ids.len(), "squares");
        let whole = compare(&engine, &reference, ids, &spec, &()).unwrap();
        for (i, target) in ids[1..].iter().enumerate() {
            if ![7, 3, 11].contains(target) {
                nll.push(whole.nll[i]);
                pairs.push(whole.pairs[i]);
                targets.push(*target);
            }
        }
    }
    assert!(nll.len() < texts.concat().len() - texts.len());
    let prompt = |i: usize| Ok(ImagePrompt::text(texts[i].clone()));
    let side = |engine| SeeingModel {
        engine,
        prompt: &prompt,
        kv: KvType::F16,
    };
    for rows in [1, 4, 512] {
        let spec = EvalSpec {
            rows,
            ..EvalSpec::new(Protocol::Texts, 30, "squares")
        };
        let measure = |reference: Option<SeeingModel<'_>>, spec: &EvalSpec| {
            evaluate_seen(side(&engine), reference, 3, Some(images), spec, &())
        };
        let found = measure(Some(side(&reference)), &spec).unwrap();
        assert_eq!(found.evaluation.nll, nll);
        assert_eq!(found.evaluation.pairs, pairs);
        assert_eq!(found.tokens, targets);
        assert_eq!(
            (
                found.evaluation.report.tokens,
                found.evaluation.report.windows
            ),
            (nll.len(), 3)
        );
        let worst = &found.evaluation.worst(&found.tokens, 1)[0];
        let at = pairs.iter().position(|pair| pair.kld == worst.kld).unwrap();
        assert_eq!(worst.target, targets[at + 1]);
        let alone = measure(None, &spec).unwrap().evaluation;
        assert_eq!((alone.nll, alone.pairs.len()), (nll.clone(), 0));
        let short = EvalSpec { ctx: 29, ..spec };
        let error = measure(None, &short).err().unwrap().to_string();
        assert_eq!(
            error,
            "tokens of a text: expected 2 to 29, found 30 in text 1"
        );
    }
}
