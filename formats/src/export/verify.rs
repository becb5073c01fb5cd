//! Compares two checkpoints number by number.

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::gguf::order::Heads;
use crate::progress::{Progress, Unit};
use nq_model::Dims;
use nq_model::names::{Shape, parameters};
use rayon::prelude::*;
use std::borrow::Cow;

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
/// ([`crate::WeightStore::stored`]), without rounding scales. Value heads of recurrences may be in different
/// orders ([`Delta::tiled`](nq_model::Delta::tiled)).
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
                let sums = Sums::of(&tiled(a, &name, x.to_f32()?), &tiled(b, &name, y.to_f32()?));
                (x.dtype().to_string(), y.dtype().to_string(), sums)
            }
            Shape::Matrix(rows, cols) => {
                let x = a.store().stored(&name, Dims::new(rows, cols))?;
                let y = b.store().stored(&name, Dims::new(rows, cols))?;
                let part = |start: usize| -> Result<Sums> {
                    let (mut p, mut q) = (vec![0f32; cols], vec![0f32; cols]);
                    let mut sums = Sums::default();
                    for row in start..(start + ROWS).min(rows) {
                        x.dequantize_row(row_of(a, &name, row), &mut p)?;
                        y.dequantize_row(row_of(b, &name, row), &mut q)?;
                        let (p, q) = (columns(a, &name, &p), columns(b, &name, &q));
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

/// True if the value heads of the checkpoint's recurrences, if it has any, are not tiled.
fn grouped(checkpoint: &Checkpoint) -> bool {
    checkpoint.config().delta.is_some_and(|d| !d.tiled)
}

/// The values of a vector, value heads tiled.
fn tiled(checkpoint: &Checkpoint, name: &str, values: Vec<f32>) -> Vec<f32> {
    match Heads::of_rows(checkpoint.config(), name).filter(|_| grouped(checkpoint)) {
        None => values,
        Some(heads) => heads.tiled(&values, 1),
    }
}

/// The row of a matrix that would be row `row` if value heads were tiled.
fn row_of(checkpoint: &Checkpoint, name: &str, row: usize) -> usize {
    let heads = Heads::of_rows(checkpoint.config(), name).filter(|_| grouped(checkpoint));
    heads.map_or(row, |heads| heads.at(row))
}

/// The values of a row of a matrix, value heads tiled.
fn columns<'a>(checkpoint: &Checkpoint, name: &str, row: &'a [f32]) -> Cow<'a, [f32]> {
    match Heads::of_columns(checkpoint.config(), name).filter(|_| grouped(checkpoint)) {
        None => row.into(),
        Some(heads) => heads.tiled(row, 1).into(),
    }
}
