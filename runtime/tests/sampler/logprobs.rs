//! The model's own log-probabilities.

use super::{Random, logits, params};
use nq_runtime::sampler::MOST_LOGPROBS;
use nq_runtime::{LogitBias, Sampler, SamplingParams, TokenLogprobs};

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
    // Only token 3 is left; its log-probability is still the one that the model gives it.
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
