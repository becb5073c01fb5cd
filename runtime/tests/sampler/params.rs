//! Settings by their names.

use nq_runtime::{SamplingChoices, SamplingParams};
use serde_json::{Value, json};

#[test]
fn settings_are_read_told_and_refused_by_their_names() {
    let mut params = SamplingParams::default();
    for (name, value) in [("temperature", "0.7"), ("top_k", "40"), ("seed", "9")] {
        assert_eq!(params.read(name, value), Some(true), "{name}");
    }
    assert_eq!(params.read("top_k", "1.5"), Some(false));
    assert_eq!(params.read("warmth", "1"), None);
    assert_eq!(
        (params.temperature, params.top_k, params.seed),
        (0.7, 40, 9)
    );
    let values: Value = params.values().collect();
    let expected = json!({
        "temperature": 0.7, "top_k": 40, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0,
    });
    assert_eq!(values, expected);
    assert_eq!(params.words(), ["temperature 0.7", "top-k 40"]);
    assert!(
        params
            .texts()
            .map(|(name, _)| name)
            .eq(SamplingParams::NAMES.iter().copied())
    );
    // What was chosen counts, all else is the model's.
    let choices = SamplingChoices {
        top_p: Some(0.9),
        ..SamplingChoices::default()
    };
    let over = choices.over(params);
    assert_eq!(
        over,
        SamplingParams {
            top_p: 0.9,
            ..params
        }
    );
    let wrong = SamplingParams {
        top_p: 0.0,
        ..params
    };
    let error = wrong.validate().unwrap_err().to_string();
    assert_eq!(error, "top_p: expected above 0, up to 1, found 0");
}
