//! The sampler against exact distributions and hand-computed cases.

mod adjust;
mod logprobs;
mod params;

use nq_formats::GenerationDefaults;
use nq_runtime::sampler::uniform;
use nq_runtime::{Sampler, SamplingParams};

fn params() -> SamplingParams {
    SamplingParams {
        seed: 7,
        ..SamplingParams::default()
    }
}

/// Logits whose softmax is `probabilities`.
fn logits(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() as f32).collect()
}

/// How often each token is drawn in `draws` draws, each at the start of its own sequence.
fn counts(params: SamplingParams, prompt: &[u32], logits: &[f32], draws: u64) -> Vec<u64> {
    let mut counts = vec![0; logits.len()];
    for stream in 0..draws {
        let mut sampler = Sampler::new(params, stream).unwrap();
        sampler.begin(prompt);
        counts[sampler.sample(logits).unwrap() as usize] += 1;
    }
    counts
}

/// Pearson's chi-square of `counts` against `expected` probabilities, standardized: about
/// normal with mean 0 and deviation 1 if they agree. Tokens of probability 0 must not occur.
fn chi_square(counts: &[u64], expected: &[f64]) -> f64 {
    let n = counts.iter().sum::<u64>() as f64;
    let mut statistic = 0.0;
    let mut cells = 0.0;
    for (&found, &p) in counts.iter().zip(expected) {
        if p == 0.0 {
            assert_eq!(found, 0, "an excluded token was drawn");
        } else {
            statistic += (found as f64 - n * p).powi(2) / (n * p);
            cells += 1.0;
        }
    }
    let freedom: f64 = cells - 1.0;
    if freedom == 0.0 {
        return 0.0;
    }
    (statistic - freedom) / (2.0 * freedom).sqrt()
}

fn check(what: &str, params: SamplingParams, logits: &[f32], expected: &[f64]) {
    let total: f64 = expected.iter().sum();
    let expected: Vec<f64> = expected.iter().map(|p| p / total).collect();
    let z = chi_square(&counts(params, &[], logits, 20_000), &expected);
    assert!(z.abs() < 4.0, "{what}: {z}");
}

/// A source of random parameters for tests that try many cases.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 += 1;
        uniform(99, 0, self.0)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }
    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
    /// A random combination of settings that change and filter logits.
    fn params(&mut self) -> SamplingParams {
        SamplingParams {
            temperature: self.of(&[0.0, 0.3, 1.0, 1.7]),
            top_k: self.of(&[0, 0, 1, 5, 60]),
            top_p: self.of(&[1.0, 0.5, 0.9]),
            min_p: self.of(&[0.0, 0.0, 0.05, 0.4]),
            repetition_penalty: self.of(&[1.0, 1.3, 0.7]),
            frequency_penalty: self.of(&[0.0, 0.4, -0.2]),
            presence_penalty: self.of(&[0.0, 0.6, -0.3]),
            seed: 31,
        }
    }
}

#[test]
fn distributions_are_exact() {
    let p = [0.4, 0.05, 0.3, 0.2, 0.05];
    let x = logits(&p);
    check("temperature 1", params(), &x, &p);
    let half = SamplingParams {
        temperature: 0.5,
        ..params()
    };
    check("temperature 0.5", half, &x, &p.map(|p| p * p));
    let hot = SamplingParams {
        temperature: 2.0,
        ..params()
    };
    check("temperature 2", hot, &x, &p.map(f64::sqrt));
    let k = SamplingParams {
        top_k: 3,
        ..params()
    };
    check("top-k 3", k, &x, &[0.4, 0.0, 0.3, 0.2, 0.0]);
    // 0.4 < 0.65 <= 0.4 + 0.3
    let p65 = SamplingParams {
        top_p: 0.65,
        ..params()
    };
    check("top-p 0.65", p65, &x, &[0.4, 0.0, 0.3, 0.0, 0.0]);
    // 0.4 * 0.45 = 0.18 keeps 0.2 and drops 0.05
    let min = SamplingParams {
        min_p: 0.45,
        ..params()
    };
    check("min-p 0.45", min, &x, &[0.4, 0.0, 0.3, 0.2, 0.0]);
    // Top-k leaves 0.4 0.3 0.2, renormalized 0.44 0.33 0.22: 0.75 takes two of them;
    // of the unfiltered distribution it would take three.
    let both = SamplingParams {
        top_k: 3,
        top_p: 0.75,
        ..params()
    };
    check("top-k 3, top-p 0.75", both, &x, &[0.4, 0.0, 0.3, 0.0, 0.0]);
    // Top-p counts before min-p removes: 0.85 takes 0.4 0.3 0.2, min-p then drops 0.2.
    let all = SamplingParams {
        top_k: 4,
        top_p: 0.85,
        min_p: 0.6,
        ..params()
    };
    check("all three", all, &x, &[0.4, 0.0, 0.3, 0.0, 0.0]);
    // Temperature comes first: at 0.5 the best token alone has 0.16 / 0.295 = 0.54.
    let cold = SamplingParams {
        temperature: 0.5,
        top_p: 0.5,
        ..params()
    };
    check("temperature, top-p", cold, &x, &[1.0, 0.0, 0.0, 0.0, 0.0]);
}

/// A vocabulary of Qwen's size, where sums run over blocks and sorting is avoided.
#[test]
fn large_vocabulary_follows_the_distribution() {
    const VOCAB: usize = 151_936;
    // A Zipf-like distribution whose ids are scattered.
    let weight = |rank: usize| 1.0 / (rank as f64 + 2.0);
    let id = |rank: usize| rank * 77_777 % VOCAB; // 77,777 and the vocabulary are coprime
    let mut x = vec![0.0f32; VOCAB];
    for rank in 0..VOCAB {
        x[id(rank)] = weight(rank).ln() as f32;
    }
    let ranks: Vec<usize> = {
        let mut of_id = vec![0; VOCAB];
        (0..VOCAB).for_each(|r| of_id[id(r)] = r);
        of_id
    };
    // Cells of ranks: [0, 1), [1, 2), [2, 4), [4, 8), ...
    let cell = |rank: usize| (usize::BITS - rank.leading_zeros()) as usize;
    let run = |p: SamplingParams, keep: usize| {
        let mut expected = vec![0.0; cell(VOCAB) + 1];
        let total: f64 = (0..keep).map(weight).sum();
        (0..keep).for_each(|r| expected[cell(r)] += weight(r) / total);
        let mut counts = vec![0; expected.len()];
        let mut sampler = Sampler::new(p, 3).unwrap();
        for _ in 0..500 {
            counts[cell(ranks[sampler.sample(&x).unwrap() as usize])] += 1;
        }
        let z = chi_square(&counts, &expected);
        assert!(z.abs() < 4.0, "{p:?}: {z}");
    };
    run(params(), VOCAB);
    run(
        SamplingParams {
            top_k: 1000,
            ..params()
        },
        1000,
    );
    let total: f64 = (0..VOCAB).map(weight).sum();
    for top_p in [0.2f32, 0.6, 0.95] {
        let mut sum = 0.0;
        let keep = (0..VOCAB)
            .take_while(|&r| {
                let below = sum < f64::from(top_p) * total;
                sum += weight(r);
                below
            })
            .count();
        run(SamplingParams { top_p, ..params() }, keep);
    }
    // 2 / (rank + 2) >= 0.01 up to rank 198
    run(
        SamplingParams {
            min_p: 0.009_99,
            ..params()
        },
        199,
    );
}

#[test]
fn greedy_takes_the_lowest_of_the_best_ids() {
    let x = [1.0, 3.0, -2.0, 3.0, 3.0];
    let one = |p: SamplingParams| Sampler::new(p, 0).unwrap().sample(&x).unwrap();
    assert_eq!(one(SamplingParams::greedy()), 1);
    assert_eq!(
        one(SamplingParams {
            top_k: 1,
            ..params()
        }),
        1
    );
    // Exactly k tokens stay; of equal ones the lowest ids.
    let k = SamplingParams {
        top_k: 2,
        ..params()
    };
    let found = counts(k, &[], &x, 2000);
    assert_eq!([found[0], found[2], found[4]], [0; 3]);
    assert!(found[1] > 800 && found[3] > 800, "{found:?}");
}

#[test]
fn penalties_come_before_temperature_and_filters() {
    let p = SamplingParams {
        repetition_penalty: 10.0,
        top_k: 1,
        ..params()
    };
    let mut sampler = Sampler::new(p, 0).unwrap();
    sampler.begin(&[0]);
    assert_eq!(sampler.sample(&[5.0, 1.0]).unwrap(), 1);
}

#[test]
fn seeds_streams_and_positions_decide() {
    let x = vec![0.0; 1000];
    let run = |seed, stream, prompt: &[u32]| {
        let p = SamplingParams { seed, ..params() };
        let mut sampler = Sampler::new(p, stream).unwrap();
        sampler.begin(prompt);
        (0..50)
            .map(|_| sampler.sample(&x).unwrap())
            .collect::<Vec<_>>()
    };
    let first = run(1, 0, &[]);
    assert_eq!(first, run(1, 0, &[]));
    assert_ne!(first, run(2, 0, &[]));
    assert_ne!(first, run(1, 1, &[]));
    // The position counts from the sequence's start: after a prompt of ten tokens the
    // numbers are those of positions ten onwards.
    assert_eq!(run(1, 0, &[5; 10])[..40], first[10..]);
    // The published rule: id order, u from the block's first two words.
    for (position, &id) in first.iter().enumerate() {
        let u = uniform(1, 0, position as u64);
        assert_eq!(id, (u * 1000.0) as u32);
    }
}

#[test]
fn uniform_numbers_are_uniform() {
    let n = 100_000;
    let mut cells = vec![0u64; 100];
    for position in 0..n {
        let u = uniform(11, 5, position);
        assert!((0.0..1.0).contains(&u));
        cells[(u * 100.0) as usize] += 1;
    }
    let z = chi_square(&cells, &[0.01; 100]);
    assert!(z.abs() < 4.0, "{z}");
}

#[test]
fn excluded_tokens_are_never_drawn() {
    let none = f32::NEG_INFINITY;
    let mut x = vec![none; 2000];
    x[1234] = -80.0;
    for p in [
        params(),
        SamplingParams {
            top_k: 5,
            ..params()
        },
        SamplingParams {
            top_p: 0.5,
            ..params()
        },
        SamplingParams {
            min_p: 0.1,
            ..params()
        },
        SamplingParams::greedy(),
    ] {
        assert_eq!(
            Sampler::new(p, 9).unwrap().sample(&x).unwrap(),
            1234,
            "{p:?}"
        );
    }
}

#[test]
fn broken_logits_are_errors() {
    let mut good = vec![0.0f32; 40];
    for p in [
        params(),
        SamplingParams::greedy(),
        SamplingParams {
            top_k: 3,
            ..params()
        },
    ] {
        let mut sampler = Sampler::new(p, 0).unwrap();
        for (at, value) in [(33, f32::NAN), (2, f32::NAN), (39, f32::INFINITY)] {
            good[at] = value;
            let message = sampler.sample(&good).unwrap_err().to_string();
            assert!(message.contains(&format!("token {at}")), "{message}");
            good[at] = 0.0;
        }
        let e = sampler
            .sample(&[f32::NEG_INFINITY; 3])
            .unwrap_err()
            .to_string();
        assert!(e.contains("none among 3"), "{e}");
        assert!(sampler.sample(&[]).is_err());
        assert_eq!(sampler.position(), 0, "a failed step records nothing");
        sampler.sample(&good).unwrap();
    }
}

#[test]
fn parameters_without_meaning_are_refused() {
    let check = |p: SamplingParams, name: &str| {
        let e = Sampler::new(p, 0).expect_err(name).to_string();
        assert!(e.contains(name), "{e}");
    };
    let p = params();
    check(
        SamplingParams {
            temperature: -0.1,
            ..p
        },
        "temperature",
    );
    check(
        SamplingParams {
            temperature: f32::NAN,
            ..p
        },
        "temperature",
    );
    check(SamplingParams { top_p: 0.0, ..p }, "top_p");
    check(SamplingParams { top_p: 1.1, ..p }, "top_p");
    check(SamplingParams { min_p: -0.1, ..p }, "min_p");
    check(
        SamplingParams {
            repetition_penalty: 0.0,
            ..p
        },
        "repetition_penalty",
    );
    check(
        SamplingParams {
            presence_penalty: f32::INFINITY,
            ..p
        },
        "presence_penalty",
    );
    check(
        SamplingParams {
            frequency_penalty: f32::NAN,
            ..p
        },
        "frequency_penalty",
    );
}

#[test]
fn defaults_come_from_the_generation_config() {
    let mut d = GenerationDefaults {
        do_sample: Some(true),
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.95),
        ..GenerationDefaults::default()
    };
    let p = SamplingParams::from_defaults(&d);
    assert_eq!(
        (p.temperature, p.top_k, p.top_p, p.min_p),
        (0.6, 20, 0.95, 0.0)
    );
    assert_eq!(
        (
            p.repetition_penalty,
            p.frequency_penalty,
            p.presence_penalty
        ),
        (1.0, 0.0, 0.0)
    );
    d.do_sample = Some(false);
    assert!(SamplingParams::from_defaults(&d).is_greedy());
    assert!(SamplingParams::from_defaults(&GenerationDefaults::default()).is_greedy());
}
