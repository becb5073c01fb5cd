//! Rotations of compressed-tensors' `transform_config`: a Linear's inputs or outputs are multiplied by a
//! Hadamard matrix while the model runs. Multiplying the weight by it when it is read computes the same.

use super::quantization::QuantizationConfig;
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use crate::weight::Weight;
use nq_model::names::{EMBEDDING, HEAD};
use nq_model::{Dims, LAYERS};
use rayon::prelude::*;
use regex::Regex;
use serde_json::{Map, Value};

/// What a rotation is applied to, as a Linear's name, the class of all Linears, or a pattern of names.
struct Targets(Vec<RotationTarget>);

enum RotationTarget {
    Linears,
    Name(String),
    Pattern(Regex),
}

impl Targets {
    /// Reads a list under `key`, or one string.
    fn read(settings: &QuantizationConfig<'_>, key: &'static str) -> Result<Self> {
        let target = |v: &Value| {
            let text = v.as_str()?;
            Some(match text.strip_prefix("re:") {
                // As Python's re.match: from the name's start.
                Some(pattern) => {
                    RotationTarget::Pattern(Regex::new(&format!("^(?:{pattern})")).ok()?)
                }
                None if text == "Linear" => RotationTarget::Linears,
                None => RotationTarget::Name(text.into()),
            })
        };
        let list = match settings.get(key) {
            None => Vec::new(),
            Some(Value::Array(list)) => list.iter().collect(),
            Some(one) => vec![one],
        };
        let targets: Option<Vec<RotationTarget>> = list.into_iter().map(target).collect();
        let targets = targets.ok_or_else(|| settings.malformed(key, "names and patterns"))?;
        Ok(Targets(targets))
    }

    fn hold(&self, name: &str) -> bool {
        self.0.iter().any(|target| match target {
            RotationTarget::Linears => name != EMBEDDING,
            RotationTarget::Name(other) => other == name,
            RotationTarget::Pattern(pattern) => pattern.is_match(name),
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Inputs,
    Outputs,
}

/// One rotation at run time.
pub(crate) struct Rotation {
    targets: Targets,
    ignored: Targets,
    side: Side,
    /// Elements that are rotated together; `None`: all.
    width: Option<usize>,
}

impl Rotation {
    /// Reads the rotations of a `transform_config` that are applied while the model runs. Those of weights were
    /// applied when the file was made.
    ///
    /// # Errors
    /// [`Error::Unsupported`], naming it, for another kind of matrix or another place;
    /// [`Error::Malformed`] for mistyped keys.
    pub(crate) fn read_all(settings: &QuantizationConfig<'_>) -> Result<Vec<Rotation>> {
        let Some(config) = settings.get("transform_config") else {
            return Ok(Vec::new());
        };
        if config.as_object().is_some_and(Map::is_empty) {
            return Ok(Vec::new());
        }
        let config = settings.within(config);
        let Some(groups) = config.get("config_groups").and_then(Value::as_object) else {
            return Err(settings.malformed("transform_config", "an object with config_groups"));
        };
        let mut all = Vec::new();
        for group in groups.values() {
            let group = config.within(group);
            let width = group.get("head_dim").map(|v| {
                let width = v
                    .as_u64()
                    .and_then(|n| usize::try_from(n).ok())
                    .filter(|n| *n > 0);
                width.ok_or_else(|| group.malformed("head_dim", "a width above 0"))
            });
            let width = width.transpose()?;
            let (mut queries, mut keys) = (false, false);
            let Some(places) = group.get("apply").and_then(Value::as_array) else {
                return Err(group.malformed("apply", "a list of places"));
            };
            for place in places {
                let place = group.within(place);
                let side = match place.str("location")? {
                    Some("weight_input" | "weight_output") => continue,
                    Some("input") => Side::Inputs,
                    Some("output") => Side::Outputs,
                    Some("q_attn") => {
                        queries = true;
                        continue;
                    }
                    Some("k_cache") => {
                        keys = true;
                        continue;
                    }
                    _ => return Err(place.malformed("location", "a place of compressed-tensors")),
                };
                let kind = group.str("type")?.unwrap_or_default();
                let randomized = group.bool("randomize")?.unwrap_or(false);
                if kind != "hadamard" || randomized {
                    let how = if randomized { "randomized " } else { "" };
                    let what =
                        format!("transform_config of type {how}{kind}, applied to activations");
                    return Err(group.unsupported(what, "nq applies Hadamard matrices"));
                }
                let rotation = Rotation {
                    targets: Targets::read(&place, "targets")?,
                    ignored: Targets::read(&place, "ignore")?,
                    side,
                    width,
                };
                if let Some(name) = [EMBEDDING, HEAD].into_iter().find(|n| rotation.holds(n)) {
                    let what = format!("transform_config of {name}");
                    return Err(group.unsupported(what, "nq rotates the Linears of layers"));
                }
                all.push(rotation);
            }
            // Queries and keys rotated alike have the same products.
            if queries != keys {
                let what = "transform_config of queries or keys alone".to_owned();
                return Err(group.unsupported(what, "nq rotates the Linears of layers"));
            }
        }
        Ok(all)
    }

    /// True if the Linear `name` is rotated.
    pub(crate) fn holds(&self, name: &str) -> bool {
        let linear = name.starts_with(LAYERS) || [EMBEDDING, HEAD].contains(&name);
        linear && self.targets.hold(name) && !self.ignored.hold(name)
    }

    /// The weight `name` times the matrix, in f32.
    ///
    /// # Errors
    /// [`Error::Weight`] for a width that is no power of two or does not divide the weight's.
    pub(crate) fn apply(&self, weight: &Weight) -> Result<Weight> {
        let Dims { rows, cols } = weight.dims();
        let mut values = vec![0f32; rows * cols];
        let mut chunks = values.chunks_mut(cols.max(1)).enumerate();
        chunks.try_for_each(|(row, out)| weight.dequantize_row(row, out))?;
        let size = if self.side == Side::Inputs {
            cols
        } else {
            rows
        };
        let width = self.width.unwrap_or(size);
        if !width.is_power_of_two() || !size.is_multiple_of(width) {
            return Err(Error::Weight {
                what: "a rotation",
                expected: format!("a power of two that divides {size}"),
                found: width.to_string(),
            });
        }
        match self.side {
            Side::Inputs => values
                .par_chunks_mut(width)
                .for_each_init(Vec::new, |scratch, part| hadamard(part, 1, scratch)),
            Side::Outputs => values
                .par_chunks_mut(width * cols.max(1))
                .for_each_init(Vec::new, |scratch, part| {
                    hadamard(part, cols.max(1), scratch)
                }),
        }
        Tensor::from_f32(vec![rows, cols], values).map(Weight::Dense)
    }
}

/// Multiplies `values`, `[width, stride]`, by the Hadamard matrix of Sylvester's construction over the square
/// root of its width (which is its own inverse and transpose) along the first dimension, with sums in f64.
fn hadamard(values: &mut [f32], stride: usize, scratch: &mut Vec<f64>) {
    let width = values.len() / stride;
    scratch.clear();
    scratch.extend(values.iter().map(|&v| f64::from(v)));
    let mut half = 1;
    while half < width {
        for block in scratch.chunks_mut(2 * half * stride) {
            let (a, b) = block.split_at_mut(half * stride);
            for (x, y) in a.iter_mut().zip(b) {
                (*x, *y) = (*x + *y, *x - *y);
            }
        }
        half *= 2;
    }
    let scale = 1.0 / (width as f64).sqrt();
    for (v, s) in values.iter_mut().zip(scratch) {
        *v = (*s * scale) as f32;
    }
}
