//! Changes of logits before a token is drawn (biases, masks and penalties), and rewinding over
//! tokens that penalties have counted.

use super::{Random, params};
use nq_runtime::sampler::{SeenToken, uniform};
use nq_runtime::{Error, LogitBias, Sampler, SamplingParams, TokenLogprobs};
use std::collections::HashMap;

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
    // A negative penalty asks for more of the same.
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
    // The model excludes all tokens that the mask allows.
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

/// Any combination of bias, mask, penalties and filters gives the same token as the documented
/// steps.
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
            // Low ids are likely, so that tokens repeat and penalties matter.
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

/// After accepting and rewinding at random, the state is that of a fresh sampler given the same tokens.
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
