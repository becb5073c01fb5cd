//! Texts that are read: their last tokens' hidden states against candle, whatever goes through
//! together, and what embeddings and scores make of them.

use crate::common::{self, Store, distance, feed, nq, session, small_config, tokens};
use nq_formats::{Tensor, Weight};
use nq_model::ModelConfig;
use nq_model::names::HEAD;
use nq_runtime::embedding::unit;
use nq_runtime::rerank::shared_beginning;
use nq_runtime::{Encoder, Error, KvType, Row, SessionSpec};
use nq_testkit::sessions::session_spec;

/// A model whose logits are what its head reads: the head is the identity.
fn transparent(seed: u64) -> (ModelConfig, Store) {
    let config = ModelConfig {
        hidden_size: 101,
        ..small_config()
    };
    let n = config.vocab_size;
    assert_eq!(n, config.hidden_size);
    let mut store = Store::random(&config, seed);
    let identity = (0..n * n).map(|i| f32::from(i / n == i % n)).collect();
    let identity = Tensor::from_f32(vec![n, n], identity).unwrap();
    store.matrices.insert(HEAD.into(), Weight::Dense(identity));
    (config, store)
}

fn texts() -> Vec<Vec<u32>> {
    let lengths = [5, 1, 40, 64, 2, 17, 33, 9, 60, 3];
    (lengths.iter().zip(1..))
        .map(|(&n, seed)| tokens(n, seed))
        .collect()
}

fn encode(encoder: &mut Encoder, shared: usize, texts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    let mut each = |i: usize, row: &[f32]| {
        assert_eq!(i, rows.len());
        rows.push(row.to_vec());
        Ok(())
    };
    encoder.encode(shared, texts, &mut each).unwrap();
    rows
}

#[test]
fn hidden_states_are_candles() {
    let (config, store) = transparent(3);
    let candle = common::candle(&config, &store);
    let engine = nq(&config, &store);
    let mut encoder = Encoder::new(session(engine.as_ref(), 4), Row::Hidden);
    let found = encode(&mut encoder, 0, &texts());
    for (text, found) in texts().iter().zip(&found) {
        let all = feed(session(candle.as_ref(), 1).as_mut(), 0, text);
        let last = &all[all.len() - config.vocab_size..];
        assert!(distance(found, last) < 2e-4, "{}", distance(found, last));
    }
}

/// Slots, rows and pages decide what runs together, not what comes out; a second run gives the same
/// bits.
#[test]
fn what_runs_together_makes_no_difference() {
    let (config, store) = transparent(4);
    let engine = nq(&config, &store);
    let expected: Vec<Vec<f32>> = (texts().iter())
        .map(|text| {
            let all = feed(session(engine.as_ref(), 1).as_mut(), 0, text);
            all[all.len() - config.vocab_size..].to_vec()
        })
        .collect();
    for (slots, max_rows, pages) in [
        (1, 64, None),
        (3, 7, None),
        (16, 500, Some(2)),
        (5, 64, Some(9)),
    ] {
        let spec = SessionSpec {
            pages,
            ..session_spec(slots, 64, KvType::F32, max_rows)
        };
        let mut encoder = Encoder::new(engine.session(spec).unwrap(), Row::Hidden);
        let found = encode(&mut encoder, 0, &texts());
        assert_eq!(found, encode(&mut encoder, 0, &texts()));
        for (found, expected) in found.iter().zip(&expected) {
            let distance = distance(found, expected);
            assert!(
                distance < 1e-4,
                "{slots} slots, {max_rows} rows: {distance}"
            );
        }
        // Of tokens as the next one.
        let wanted = vec![7, 3];
        let mut encoder = Encoder::new(engine.session(spec).unwrap(), Row::Logits(wanted));
        let begin = tokens(30, 9);
        let texts: Vec<Vec<u32>> = texts()
            .iter()
            .map(|t| [&begin[..], &t[..t.len().min(34)]].concat())
            .collect();
        let shared = shared_beginning(&texts);
        assert_eq!(shared, 30);
        let (apart, together) = (
            encode(&mut encoder, 0, &texts),
            encode(&mut encoder, shared, &texts),
        );
        for ((text, apart), together) in texts.iter().zip(&apart).zip(&together) {
            let all = feed(session(engine.as_ref(), 1).as_mut(), 0, text);
            let last = &all[all.len() - config.vocab_size..];
            assert!(distance(apart, &[last[7], last[3]]) < 1e-4);
            assert!(distance(together, &[last[7], last[3]]) < 1e-4);
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let (config, store) = transparent(5);
    let engine = nq(&config, &store);
    let mut encoder = Encoder::new(session(engine.as_ref(), 2), Row::Hidden);
    let mut refused = |texts: &[Vec<u32>]| {
        let mut never = |_: usize, _: &[f32]| -> nq_runtime::Result<()> {
            panic!("nothing was to be computed")
        };
        encoder.encode(0, texts, &mut never).unwrap_err()
    };
    let long = refused(&[tokens(5, 1), tokens(65, 1)]);
    assert!(
        matches!(
            long,
            Error::ContextFull {
                capacity: 64,
                needed: 65
            }
        ),
        "{long}"
    );
    assert!(
        refused(&[tokens(5, 1), vec![]])
            .to_string()
            .contains("0 tokens")
    );
    let past = refused(&[vec![101]]);
    assert!(past.to_string().contains("101"), "{past}");
    let spec = session(engine.as_ref(), 1);
    let mut encoder = Encoder::new(spec, Row::Logits(vec![101]));
    assert!(
        encoder
            .encode(0, &[tokens(5, 1)], &mut |_, _| Ok(()))
            .is_err()
    );
    // What has failed leaves nothing behind.
    let mut encoder = Encoder::new(session(engine.as_ref(), 2), Row::Hidden);
    let interrupted = encoder.encode(0, &texts(), &mut |_, _| Err(Error::Interrupted));
    assert!(matches!(interrupted, Err(Error::Interrupted)));
    assert_eq!(encode(&mut encoder, 0, &texts()).len(), texts().len());

    let e = unit(&[1.0, 0.0], 3).unwrap_err().to_string();
    assert!(e.contains("1 to 2") && unit(&[1.0], 0).is_err(), "{e}");
    assert!(unit(&[0.0, 0.0], 2).is_err() && unit(&[f32::NAN], 1).is_err());
    assert_eq!(unit(&[3.0, 4.0, 12.0], 2).unwrap(), [0.6, 0.8]);
}
