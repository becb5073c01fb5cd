//! Rotary position embedding: frequencies, YaRN, and the table rows of a batch.

use crate::images::Coordinates;
use nq_model::{ModelConfig, RopeScaling};
use std::f64::consts::TAU;

/// The rotary frequencies of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    inv_freq: Vec<f32>, // [rotary_dims / 2]
    attention_factor: f32,
    sections: [usize; 3], // frequencies of time, row and column
}

impl Rotary {
    /// The frequencies of `config`: `theta^(-2i/d)`, stretched as it says.
    pub fn new(config: &ModelConfig) -> Self {
        let d = config.rotary_dims();
        let base: Vec<f64> = (0..d / 2)
            .map(|i| config.rope.theta.powf(-2.0 * i as f64 / d as f64))
            .collect();
        let scaling = config.rope.scaling;
        let sections = config.rope.sections(d / 2);
        match scaling {
            RopeScaling::None | RopeScaling::Llama3 { .. } => {
                let scaled = |&f: &f64| (f / scaling.divisor(f).unwrap_or(1.0)) as f32;
                Rotary {
                    inv_freq: base.iter().map(scaled).collect(),
                    attention_factor: 1.0,
                    sections,
                }
            }
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                truncate,
                attention_factor,
            } => {
                let length = original_max_position_embeddings as f64;
                let (low, high) = yarn_range(
                    config.rope.theta,
                    d,
                    length,
                    [beta_fast, beta_slow],
                    truncate,
                );
                let blend = |(i, &f): (usize, &f64)| {
                    let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    (f * (1.0 - interpolated) + f / factor * interpolated) as f32
                };
                Rotary {
                    inv_freq: base.iter().enumerate().map(blend).collect(),
                    attention_factor: attention_factor as f32,
                    sections,
                }
            }
        }
    }

    /// Angle per position of each pair of dimensions, `[rotary_dims / 2]`.
    pub fn inv_freq(&self) -> &[f32] {
        &self.inv_freq
    }

    /// YaRN's factor on cosines and sines; 1 without YaRN.
    pub fn attention_factor(&self) -> f32 {
        self.attention_factor
    }

    /// Writes `(cos, sin)` of one position, `[rotary_dims / 2]`.
    ///
    /// The angle is rounded to f32 before its cosine is taken, as in the implementations with which
    /// Qwen3 was trained and published.
    pub fn row(&self, position: usize, out: &mut [(f32, f32)]) {
        self.row_at([position; 3], out);
    }

    /// [`Rotary::row`] of a token of an image: frequencies follow time, row and column in turn, and time alone where
    /// row and column have had theirs (the interleaved M-RoPE of Qwen3-VL and Qwen3.5).
    pub fn row_at(&self, coordinates: Coordinates, out: &mut [(f32, f32)]) {
        for (i, (o, &f)) in out.iter_mut().zip(&self.inv_freq).enumerate() {
            let axis = if i / 3 < self.sections[i % 3] {
                i % 3
            } else {
                0
            };
            let position = coordinates[axis];
            let (sin, cos) = f64::from(position as f32 * f).sin_cos();
            let scale = f64::from(self.attention_factor);
            *o = ((cos * scale) as f32, (sin * scale) as f32);
        }
    }

    /// Cosines and sines of the first `positions` positions, `[positions, rotary_dims / 2]`.
    pub fn pairs(&self, positions: usize) -> Vec<[f32; 2]> {
        let mut row = vec![(0.0, 0.0); self.inv_freq.len()];
        let mut table = Vec::with_capacity(positions * row.len());
        for position in 0..positions {
            self.row(position, &mut row);
            table.extend(row.iter().map(|&(cos, sin)| [cos, sin]));
        }
        table
    }
}

/// The pair of dimensions between which YaRN blends (arXiv 2309.00071, section 3.2): below the first,
/// which turns `beta_fast` times within the original length, nothing is stretched; above the second,
/// which turns `beta_slow` times, everything is. Rounded outwards, unless `truncate` is false, and kept in
/// range as in the published implementations.
fn yarn_range(
    theta: f64,
    d: usize,
    length: f64,
    [beta_fast, beta_slow]: [f64; 2],
    truncate: bool,
) -> (f64, f64) {
    let dimension =
        |rotations: f64| d as f64 * (length / (rotations * TAU)).ln() / (2.0 * theta.ln());
    let (low, high) = (dimension(beta_fast), dimension(beta_slow));
    let (low, high) = match truncate {
        true => (low.floor(), high.ceil()),
        false => (low, high),
    };
    let (low, high) = (low.max(0.0), high.min(d as f64 - 1.0));
    // Equal ends would divide by zero.
    (low, if low == high { high + 0.001 } else { high })
}
