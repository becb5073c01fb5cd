//! The sampler against exact distributions and hand-computed cases.

use nq_formats::GenerationDefaults;
use nq_runtime::sampler::{MOST_LOGPROBS, SeenToken, uniform};
use nq_runtime::{Error, LogitBias, Sampler, SamplingParams, TokenLogprobs};
use std::collections::HashMap;

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

/// How often each token comes in `draws` draws, each at the start of a sequence of its own.
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
    // Exactly k tokens stay, the lowest ids of equals.
    let k = SamplingParams {
        top_k: 2,
        ..params()
    };
    let found = counts(k, &[], &x, 2000);
    assert_eq!([found[0], found[2], found[4]], [0; 3]);
    assert!(found[1] > 800 && found[3] > 800, "{found:?}");
}

#[test]
fn repetition_penalty_concerns_prompt_and_answer() {
    // Divided where positive, multiplied where negative.
    let p = SamplingParams {
        repetition_penalty: 2.0,
        ..SamplingParams::greedy()
    };
    let mut sampler = Sampler::new(p, 0).unwrap();
    sampler.begin(&[0]);
    assert_eq!(sampler.sample(&[3.0, 2.0, 1.0]).unwrap(), 1, "3 / 2 < 2");
    assert_eq!(sampler.sample(&[3.0, 2.0, 1.6]).unwrap(), 2, "1.5, 1, 1.6");
    sampler.begin(&[]);
    assert_eq!(sampler.sample(&[3.0, 2.0, 1.6]).unwrap(), 0, "forgotten");
    sampler.begin(&[1, 1, 1]);
    assert_eq!(
        sampler.sample(&[-2.5, -1.5, -9.0]).unwrap(),
        0,
        "-1.5 * 2, once"
    );
}

#[test]
fn presence_penalty_concerns_the_answer_only() {
    let p = SamplingParams {
        presence_penalty: 1.0,
        ..SamplingParams::greedy()
    };
    let mut sampler = Sampler::new(p, 0).unwrap();
    sampler.begin(&[0]);
    assert_eq!(
        sampler.sample(&[2.0, 1.5, 0.0]).unwrap(),
        0,
        "not the prompt"
    );
    assert_eq!(sampler.sample(&[2.0, 1.5, 0.0]).unwrap(), 1, "2 - 1 < 1.5");
    assert_eq!(
        sampler.sample(&[2.0, 1.5, 0.0]).unwrap(),
        0,
        "1 > 0.5, once only"
    );
    sampler.accept(2);
    assert_eq!(
        sampler.sample(&[2.0, 1.9, 1.8, 0.99]).unwrap(),
        0,
        "1, 0.9, 0.8, 0.99"
    );
}

#[test]
fn frequency_penalty_counts_the_answer_only() {
    let p = SamplingParams {
        frequency_penalty: 1.0,
        ..SamplingParams::greedy()
    };
    let mut sampler = Sampler::new(p, 0).unwrap();
    sampler.begin(&[0, 0, 0]);
    let x = [3.0, 1.5, 0.0];
    assert_eq!(sampler.sample(&x).unwrap(), 0, "not the prompt: 3 > 1.5");
    assert_eq!(sampler.sample(&x).unwrap(), 0, "3 - 1 > 1.5");
    assert_eq!(sampler.sample(&x).unwrap(), 1, "3 - 2 < 1.5");
    assert_eq!(sampler.sample(&x).unwrap(), 0, "3 - 2 > 1.5 - 1");
    // Both are subtracted: 3 - 3 * 1 - 0.75, 1.5 - 1 * 1 - 0.75, 0.
    let both = SamplingParams {
        presence_penalty: 0.75,
        ..p
    };
    let mut sampler = Sampler::new(both, 0).unwrap();
    [0, 1, 0, 0].iter().for_each(|&id| sampler.accept(id));
    assert_eq!(sampler.sample(&x).unwrap(), 2);
    // A negative one asks for more of the same.
    let fond = SamplingParams {
        frequency_penalty: -1.0,
        ..p
    };
    let mut sampler = Sampler::new(fond, 0).unwrap();
    [1, 1].iter().for_each(|&id| sampler.accept(id));
    assert_eq!(sampler.sample(&x).unwrap(), 1, "1.5 + 2 > 3");
}

#[test]
fn biases_come_before_penalties() {
    let bias = |b: &[(u32, f32)]| LogitBias::new(b.iter().copied()).unwrap();
    let p = SamplingParams {
        repetition_penalty: 2.0,
        ..SamplingParams::greedy()
    };
    let mut sampler = Sampler::new(p, 0).unwrap();
    sampler.set_bias(bias(&[(0, 4.0)]));
    sampler.begin(&[0]);
    // (-1 + 4) / 2 = 1.5; after the penalty it would be -1 * 2 + 4 = 2.
    assert_eq!(sampler.sample(&[-1.0, 1.75]).unwrap(), 1);
    assert_eq!(sampler.sample(&[-1.0, 2.75]).unwrap(), 0, "2.75 / 2 < 1.5");
    let mut plain = Sampler::new(SamplingParams::greedy(), 0).unwrap();
    let x = [0.0, 50.0, 0.5];
    plain.set_bias(bias(&[(1, -100.0)]));
    assert_eq!(plain.sample(&x).unwrap(), 2, "banned");
    plain.set_bias(bias(&[(1, f32::NEG_INFINITY), (2, -1.0)]));
    assert_eq!(plain.sample(&x).unwrap(), 0, "excluded");
    plain.begin(&[]);
    assert_eq!(plain.sample(&x).unwrap(), 0, "biases outlive a sequence");
    plain.set_bias(LogitBias::default());
    assert_eq!(plain.sample(&x).unwrap(), 1);
}

#[test]
fn biases_without_meaning_are_refused() {
    let refused = |b: &[(u32, f32)]| LogitBias::new(b.iter().copied()).unwrap_err().to_string();
    assert!(refused(&[(3, f32::NAN)]).contains("NaN for token 3"));
    assert!(refused(&[(3, 1.0), (4, f32::INFINITY)]).contains("inf for token 4"));
    assert!(refused(&[(9, 1.0), (3, 2.0), (9, 1.0)]).contains("token 9 twice"));
    let mut sampler = Sampler::new(params(), 0).unwrap();
    sampler.set_bias(LogitBias::new([(1, 0.5), (3, 1.0)]).unwrap());
    let e = sampler.sample(&[0.0; 3]).unwrap_err().to_string();
    assert!(e.contains("logit_bias") && e.contains("token 3"), "{e}");
    assert_eq!(sampler.position(), 0, "a failed step records nothing");
}

#[test]
fn masks_hold_until_they_are_set_anew() {
    let mut x = vec![0.0f32; 70];
    x[3] = 9.0;
    x[69] = f32::NAN; // of an excluded token
    let mut mask = [0u32; 3];
    mask[1] = 1 << 5;
    mask[2] = 1 << 4 | 1 << 30; // the last bit is of no token
    let mut sampler = Sampler::new(params(), 4).unwrap();
    sampler.set_mask(Some(&mask));
    let drawn: Vec<u32> = (0..40).map(|_| sampler.sample(&x).unwrap()).collect();
    assert!(drawn.iter().all(|t| [37, 68].contains(t)), "{drawn:?}");
    assert!(drawn.contains(&37) && drawn.contains(&68), "{drawn:?}");
    mask[2] = 0;
    sampler.set_mask(Some(&mask));
    assert_eq!(sampler.sample(&x).unwrap(), 37);
    x[69] = 0.0;
    for free in [
        |s: &mut Sampler| s.set_mask(None),
        |s: &mut Sampler| s.begin(&[]),
    ] {
        sampler.set_mask(Some(&mask));
        free(&mut sampler);
        assert_eq!(sampler.mask(), None);
        assert!((0..9).any(|_| sampler.sample(&x).unwrap() == 3));
    }
}

#[test]
fn nothing_allowed_is_an_error() {
    let refused = |sampler: &mut Sampler, x: &[f32]| {
        let before = sampler.position();
        let e = sampler.sample(x).unwrap_err();
        assert_eq!(sampler.position(), before, "a failed step records nothing");
        e
    };
    let mut sampler = Sampler::new(params(), 0).unwrap();
    sampler.set_mask(Some(&[0, 0]));
    let e = refused(&mut sampler, &[1.0; 40]);
    assert!(matches!(e, Error::NoTokenAllowed { vocab: 40 }), "{e}");
    // What is allowed the model excludes.
    let mut x = [1.0; 40];
    x[2] = f32::NEG_INFINITY;
    sampler.set_mask(Some(&[4, 0]));
    let e = refused(&mut sampler, &x);
    assert!(matches!(e, Error::NoTokenAllowed { vocab: 40 }), "{e}");
    sampler.set_mask(Some(&[4]));
    let e = refused(&mut sampler, &x).to_string();
    assert!(e.contains("2 words") && e.contains("1 words"), "{e}");
    let mut sampler = Sampler::new(SamplingParams::greedy(), 0).unwrap();
    sampler.set_bias(LogitBias::new([(0, f32::NEG_INFINITY)]).unwrap());
    let e = refused(&mut sampler, &[1.0]);
    assert!(matches!(e, Error::NoTokenAllowed { vocab: 1 }), "{e}");
}

/// The documented steps, one after the other over all tokens, in f64 from the logits on.
fn naive(
    logits: &[f32],
    p: &SamplingParams,
    bias: &[(u32, f32)],
    mask: Option<&[u32]>,
    prompt: &[u32],
    answer: &[u32],
    u: f64,
) -> u32 {
    let bias: HashMap<u32, f32> = bias.iter().copied().collect();
    let mut kept: Vec<(u32, f64)> = Vec::new();
    for (id, &logit) in (0..).zip(logits) {
        if mask.is_some_and(|m| m[id as usize / 32] >> (id % 32) & 1 == 0) {
            continue;
        }
        let mut x = f64::from(logit + bias.get(&id).unwrap_or(&0.0));
        let count = answer.iter().filter(|&&t| t == id).count();
        if count > 0 || prompt.contains(&id) {
            let r = f64::from(p.repetition_penalty);
            x = if x > 0.0 { x / r } else { x * r };
        }
        if count > 0 {
            x -= f64::from(p.frequency_penalty) * count as f64 + f64::from(p.presence_penalty);
        }
        kept.push((id, x));
    }
    kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let best = kept[0];
    if p.temperature == 0.0 {
        return best.0;
    }
    let weigh = |x: f64| ((x - best.1) / f64::from(p.temperature)).exp();
    if p.top_k > 0 {
        kept.truncate(p.top_k);
    }
    if p.top_p < 1.0 {
        let total: f64 = kept.iter().map(|c| weigh(c.1)).sum();
        let mut sum = 0.0;
        kept.retain(|c| {
            let below = sum < f64::from(p.top_p) * total;
            sum += weigh(c.1);
            below
        });
    }
    kept.retain(|c| weigh(c.1) >= f64::from(p.min_p));
    kept.sort_by_key(|c| c.0);
    let total: f64 = kept.iter().map(|c| weigh(c.1)).sum();
    let mut sum = 0.0;
    for c in &kept {
        sum += weigh(c.1);
        if sum > u * total {
            return c.0;
        }
    }
    kept[kept.len() - 1].0
}

/// Numbers for tests that try many cases.
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
    /// Any combination of what changes and filters logits.
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

/// Any combination of bias, mask, penalties and filters gives the token that the documented steps
/// give.
#[test]
fn every_combination_follows_the_documented_steps() {
    const VOCAB: usize = 300;
    let mut random = Random(0);
    for case in 0..600u64 {
        let p = random.params();
        let bias: Vec<(u32, f32)> = match random.below(2) {
            0 => Vec::new(),
            _ => {
                let values = [-100.0, f32::NEG_INFINITY, -0.7, 0.5, 2.5];
                let ids = (0..VOCAB as u32).filter(|_| random.below(20) == 0);
                let ids: Vec<u32> = ids.collect();
                ids.iter().map(|&id| (id, random.of(&values))).collect()
            }
        };
        let mask: Option<Vec<u32>> = (random.below(2) == 0).then(|| {
            let rare = random.below(2) == 0;
            let mut word = || {
                let w = (random.unit() * 2f64.powi(32)) as u32;
                if rare { w & (w >> 7) & (w << 9) } else { w }
            };
            (0..VOCAB.div_ceil(32)).map(|_| word()).collect()
        });
        let mut sampler = Sampler::new(p, case).unwrap();
        sampler.set_bias(LogitBias::new(bias.iter().copied()).unwrap());
        let prompt: Vec<u32> = (0..6).map(|_| random.below(40) as u32).collect();
        sampler.begin(&prompt);
        let mut answer = Vec::new();
        for _ in 0..6 {
            sampler.set_mask(mask.as_deref());
            // Low ids are likely, so that tokens come again and penalties matter.
            let logits: Vec<f32> = (0..VOCAB)
                .map(|i| (6.0 * random.unit() - i.min(60) as f64 / 12.0) as f32)
                .collect();
            let u = uniform(p.seed, case, sampler.position());
            let expected = naive(&logits, &p, &bias, mask.as_deref(), &prompt, &answer, u);
            let found = sampler.sample(&logits).unwrap();
            assert_eq!(found, expected, "case {case}, {p:?}, after {answer:?}");
            answer.push(found);
        }
    }
}

/// Tokens accepted and taken back at random leave what a fresh sampler has after those that stay.
#[test]
fn rewinding_leaves_no_trace() {
    let mut random = Random(1 << 32);
    for case in 0..60 {
        let p = random.params();
        let prompt: Vec<u32> = (0..random.below(5))
            .map(|_| random.below(12) as u32)
            .collect();
        let start = prompt.len() as u64;
        let mut sampler = Sampler::new(p, case).unwrap();
        sampler.begin(&prompt);
        sampler.set_logprobs(Some(2)).unwrap();
        let mut answer: Vec<u32> = Vec::new();
        for _ in 0..40 {
            let logits: Vec<f32> = (0..20).map(|_| (4.0 * random.unit()) as f32).collect();
            match random.below(4) {
                0 => {
                    answer.truncate(random.below(answer.len() + 1));
                    sampler.rewind(start + answer.len() as u64).unwrap();
                }
                1 => {
                    let id = random.below(20) as u32;
                    answer.push(id);
                    let logprobs = TokenLogprobs::of(&logits, sampler.position(), id, 2);
                    sampler.accept_with(logprobs.unwrap());
                }
                _ => answer.push(sampler.sample(&logits).unwrap()),
            }
            let mut fresh = Sampler::new(p, case).unwrap();
            fresh.begin(&prompt);
            answer.iter().for_each(|&id| fresh.accept(id));
            assert_eq!(sampler.position(), fresh.position());
            let seen = |s: &Sampler| s.seen().collect::<Vec<SeenToken>>();
            assert_eq!(seen(&sampler), seen(&fresh), "after {answer:?}");
            let logged: Vec<u32> = sampler.logprobs().iter().map(|l| l.token).collect();
            assert_eq!(logged, answer);
            let next = fresh.sample(&logits).unwrap();
            assert_eq!(sampler.sample(&logits).unwrap(), next);
            sampler.rewind(sampler.position() - 1).unwrap();
        }
    }
}

#[test]
fn rewinding_beyond_the_answer_is_refused() {
    let mut sampler = Sampler::new(params(), 0).unwrap();
    sampler.begin(&[1, 2, 3]);
    sampler.accept(4);
    for position in [2, 5] {
        let e = sampler.rewind(position).unwrap_err().to_string();
        assert!(e.contains("3 to 4"), "{e}");
        assert_eq!(sampler.position(), 4);
    }
    sampler.rewind(3).unwrap();
    assert_eq!(sampler.position(), 3);
}

#[test]
fn log_probabilities_are_the_model_s_own() {
    let p = SamplingParams {
        temperature: 0.2,
        frequency_penalty: 1.0,
        top_k: 2,
        ..params()
    };
    let mut sampler = Sampler::new(p, 0).unwrap();
    sampler.begin(&[0, 0]);
    let x = logits(&[0.5, 0.125, 0.25, 0.125]);
    sampler.sample(&x).unwrap();
    assert!(sampler.logprobs().is_empty(), "none were asked for");
    sampler.set_logprobs(Some(3)).unwrap();
    // Only token 3 is left, whose own probability stays what the model gives it.
    sampler.set_bias(LogitBias::new([(1, -100.0)]).unwrap());
    sampler.set_mask(Some(&[0b1010]));
    assert_eq!(sampler.sample(&x).unwrap(), 3);
    sampler.set_logprobs(Some(0)).unwrap();
    sampler.sample(&x).unwrap();
    let [full, bare] = sampler.logprobs() else {
        panic!("{:?}", sampler.logprobs())
    };
    let close = |a: f32, p: f64| assert!((f64::from(a) - p.ln()).abs() < 1e-6, "{a} {p}");
    assert_eq!((full.token, full.position), (3, 3));
    close(full.logprob, 0.125);
    let ids: Vec<u32> = full.top.iter().map(|t| t.0).collect();
    assert_eq!(ids, [0, 2, 1], "of equals the lowest id");
    for (top, p) in full.top.iter().zip([0.5, 0.25, 0.125]) {
        close(top.1, p);
    }
    assert_eq!((bare.position, bare.top.len()), (4, 0));
    let e = sampler.set_logprobs(Some(MOST_LOGPROBS + 1)).unwrap_err();
    assert!(e.to_string().contains("at most 20"), "{e}");
    sampler.begin(&[]);
    assert!(sampler.logprobs().is_empty());
}

/// A vocabulary of Qwen's size, against a softmax in f64.
#[test]
fn log_probabilities_are_accurate() {
    let mut random = Random(1 << 33);
    let x: Vec<f32> = (0..151_936)
        .map(|_| (-3.0 * random.unit().ln() - 20.0 * random.unit()) as f32)
        .collect();
    let max = x.iter().copied().fold(f32::MIN, f32::max);
    let below = |v: f32| f64::from(v) - f64::from(max);
    let total: f64 = x.iter().map(|&v| below(v).exp()).sum();
    let check = |id: u32, found: f32| {
        let exact = below(x[id as usize]) - total.ln();
        let error = (f64::from(found) - exact).abs();
        assert!(error < 5e-7 + 1e-7 * exact.abs(), "{found}, not {exact}");
    };
    for token in [0, 77, 151_935] {
        let found = TokenLogprobs::of(&x, 0, token, 20).unwrap();
        check(token, found.logprob);
        assert_eq!(found.top.len(), 20);
        for &(id, logprob) in &found.top {
            check(id, logprob);
        }
    }
    assert!(TokenLogprobs::of(&x, 0, 151_936, 0).is_err());
    assert!(TokenLogprobs::of(&[0.0, f32::NAN], 0, 0, 0).is_err());
    let excluded = TokenLogprobs::of(&[0.0, f32::NEG_INFINITY], 0, 1, 5).unwrap();
    assert_eq!(excluded.logprob, f32::NEG_INFINITY);
    assert_eq!(excluded.top, [(0, 0.0)]);
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
