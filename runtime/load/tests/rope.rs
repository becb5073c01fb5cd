//! Rotary embedding compared with values worked out by hand from the published formulas.

use crate::common::small_config;
use nq_model::{ModelConfig, Rope, RopeScaling};
use nq_runtime::rope::Rotary;

/// Qwen3's heads, with the scaling that its model cards give for 131,072 positions.
fn qwen3(scaling: RopeScaling) -> Rotary {
    Rotary::new(&ModelConfig {
        head_dim: 128,
        rope: Rope {
            theta: 1e6,
            dims: None,
            scaling,
            sections: None,
        },
        ..small_config()
    })
}

fn yarn(factor: f64, attention_factor: f64) -> RopeScaling {
    RopeScaling::Yarn {
        factor,
        original_max_position_embeddings: 32_768,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor,
    }
}

#[test]
fn frequencies_fall_from_1_by_equal_factors() {
    let rotary = qwen3(RopeScaling::None);
    let f = rotary.inv_freq();
    assert_eq!(f.len(), 64);
    assert_eq!(f[0], 1.0);
    // 1e6^(-1/2), 1e6^(-1/64)
    assert!((f[32] - 1e-3).abs() < 1e-9);
    assert!((f[1] / f[0] - 0.805_842_2).abs() < 1e-6);
    let mut row = vec![(0.0, 0.0); 64];
    rotary.row(0, &mut row);
    assert!(row.iter().all(|&r| r == (1.0, 0.0)));
    rotary.row(2, &mut row);
    // cos 2, sin 2
    assert!((row[0].0 + 0.416_146_84).abs() < 1e-7 && (row[0].1 - 0.909_297_4).abs() < 1e-7);
}

#[test]
fn yarn_stretches_slow_dimensions_and_blends_between() {
    // Dimension 128 ln(32768 / (2 pi r)) / (2 ln 1e6) turns r times within 32,768 positions:
    // 23.6 turns 32 times, 39.7 once. So up to pair 23 nothing changes, from pair 40 on
    // frequencies are a quarter, and pair 30 is (30 - 23) / (40 - 23) of the way.
    let plain = qwen3(RopeScaling::None);
    let stretched = qwen3(yarn(4.0, 1.138_629_4));
    let ratio = |i: usize| stretched.inv_freq()[i] / plain.inv_freq()[i];
    for i in 0..=23 {
        assert_eq!(ratio(i), 1.0, "pair {i}");
    }
    for i in 40..64 {
        assert!((ratio(i) - 0.25).abs() < 1e-6, "pair {i}");
    }
    assert!((ratio(30) - 0.691_176_5).abs() < 1e-6, "{}", ratio(30));
    assert!((ratio(24) - 0.955_882_4).abs() < 1e-6, "{}", ratio(24));
    assert!((ratio(39) - 0.294_117_6).abs() < 1e-6, "{}", ratio(39));
    let mut row = vec![(0.0, 0.0); 64];
    stretched.row(0, &mut row);
    assert!(
        row.iter()
            .all(|r| (r.0 - 1.138_629_4).abs() < 1e-6 && r.1 == 0.0)
    );
}

#[test]
fn yarn_by_1_changes_nothing() {
    let (plain, same) = (qwen3(RopeScaling::None), qwen3(yarn(1.0, 1.0)));
    assert_eq!(plain, same);
}

/// If no dimension turns even once, both ends of the blend are 0, and everything behind the
/// first dimension is stretched.
#[test]
fn yarn_survives_an_empty_range() {
    let config = |scaling| ModelConfig {
        head_dim: 8,
        rope: Rope {
            theta: 1e6,
            dims: None,
            scaling,
            sections: None,
        },
        ..small_config()
    };
    let stretched = Rotary::new(&config(RopeScaling::Yarn {
        factor: 2.0,
        original_max_position_embeddings: 6,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: 1.0,
    }));
    let plain = Rotary::new(&config(RopeScaling::None));
    let ratio = |i: usize| stretched.inv_freq()[i] / plain.inv_freq()[i];
    assert_eq!([0, 1, 2, 3].map(ratio), [1.0, 0.5, 0.5, 0.5]);
}
