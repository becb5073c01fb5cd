//! Compares two checkpoints number by number.

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::names::{Shape, parameters};
use crate::progress::{Progress, Unit};
use rayon::prelude::*;

/// Number of rows compared at a time.
const ROWS: usize = 256;

/// How a parameter of one checkpoint differs from the same parameter of another.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Hugging Face name, without `.weight`.
    pub name: String,
    /// Its scheme in the first checkpoint, e.g. `BF16` or `Q4_K`.
    pub from: String,
    /// Its scheme in the second checkpoint.
    pub to: String,
    /// Number of values that differ.
    pub changed: u64,
    /// Number of values.
    pub values: u64,
    /// Largest absolute difference.
    pub max: f64,
    /// Root mean square of the difference, relative to that of the first checkpoint's values.
    pub relative: f64,
}

/// Sums over a part of the values.
#[derive(Clone, Copy, Default)]
struct Sums {
    changed: u64,
    max: f64,
    error: f64,
    power: f64,
}

impl Sums {
    fn of(a: &[f32], b: &[f32]) -> Sums {
        let mut sums = Sums::default();
        for (&a, &b) in a.iter().zip(b) {
            let d = f64::from(a) - f64::from(b);
            sums.changed += u64::from(a != b);
            sums.max = sums.max.max(d.abs());
            sums.error += d * d;
            sums.power += f64::from(a) * f64::from(a);
        }
        sums
    }

    fn plus(self, other: Sums) -> Sums {
        Sums {
            changed: self.changed + other.changed,
            max: self.max.max(other.max),
            error: self.error + other.error,
            power: self.power + other.power,
        }
    }
}

/// Compares every parameter of `a` with that of `b`, both exactly as stored in their files
/// ([`crate::WeightStore::stored`]), without rounding scales.
///
/// # Errors
/// [`Error::Malformed`] if the models have different shapes; errors of reading either.
pub fn compare(a: &Checkpoint, b: &Checkpoint, progress: &dyn Progress) -> Result<Vec<Difference>> {
    let all = parameters(a.config());
    if all != parameters(b.config()) {
        return Err(Error::Malformed {
            path: b.files().root(),
            what: "model".into(),
            expected: format!("the shape of {}", a.files().root().display()),
            found: "another".into(),
        });
    }
    let values: usize = all.iter().map(|(_, shape)| shape.elements()).sum();
    progress.begin("compare", 4 * values as u64, Unit::Bytes);
    let mut differences = Vec::new();
    for (name, shape) in all {
        let (from, to, sums) = match shape {
            Shape::Vector(len) => {
                let (x, y) = (a.store().vector(&name, len)?, b.store().vector(&name, len)?);
                let sums = Sums::of(&x.to_f32()?, &y.to_f32()?);
                (x.dtype().to_string(), y.dtype().to_string(), sums)
            }
            Shape::Matrix(rows, cols) => {
                let x = a.store().stored(&name, (rows, cols))?;
                let y = b.store().stored(&name, (rows, cols))?;
                let part = |start: usize| -> Result<Sums> {
                    let (mut p, mut q) = (vec![0f32; cols], vec![0f32; cols]);
                    let mut sums = Sums::default();
                    for row in start..(start + ROWS).min(rows) {
                        x.dequantize_row(row, &mut p)?;
                        y.dequantize_row(row, &mut q)?;
                        sums = sums.plus(Sums::of(&p, &q));
                    }
                    Ok(sums)
                };
                let starts: Vec<usize> = (0..rows).step_by(ROWS).collect();
                // Collected in order, so that sums do not depend on the number of threads.
                let parts: Result<Vec<Sums>> = starts.into_par_iter().map(part).collect();
                let sums = parts?.into_iter().fold(Sums::default(), Sums::plus);
                (x.scheme_name(), y.scheme_name(), sums)
            }
        };
        progress.advance(4 * shape.elements() as u64);
        differences.push(Difference {
            name,
            from,
            to,
            changed: sums.changed,
            values: shape.elements() as u64,
            max: sums.max,
            relative: match sums.error {
                0.0 => 0.0,
                error => (error / sums.power).sqrt(),
            },
        });
    }
    progress.end();
    Ok(differences)
}
