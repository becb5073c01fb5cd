//! Adapters with random values.

use super::Store;
use nq_formats::adapter::{Adapter, Lora};
use nq_formats::serialize::write_tensors;
use nq_formats::{Tensor, Weight};
use nq_kernels::rng::Philox;
use nq_model::{Dims, ModelConfig};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;

const RANK: usize = 4;
const ALPHA: usize = 8;

impl Store {
    /// The same weights in f32, each one unit of its last place away.
    pub(crate) fn nudged(&self) -> Store {
        let mut nudged = self.dequantized();
        for (i, weight) in nudged.matrices.values_mut().enumerate() {
            let Weight::Dense(t) = weight else {
                unreachable!("dequantized")
            };
            let values = t.to_f32().unwrap().into_iter().enumerate();
            let away = values.map(|(j, v)| match (i + j) % 3 {
                0 => v.next_up(),
                1 => v.next_down(),
                _ => v,
            });
            let shape = t.shape().to_vec();
            *weight = Weight::Dense(Tensor::from_f32(shape, away.collect()).unwrap());
        }
        nudged
    }
}

/// A random adapter of those Linears of a model that `chosen` takes, by their names, as read from PEFT's folder; and the
/// weights with it merged in f32.
pub(crate) struct Made {
    pub(crate) lora: Lora,
    pub(crate) merged: Store,
}

pub(crate) fn made(
    c: &ModelConfig,
    base: &Store,
    seed: u64,
    chosen: impl Fn(&str) -> bool,
) -> Made {
    let mut merged = base.dequantized();
    let (mut tensors, mut rng) = (Vec::new(), Philox::new(seed, 9));
    let mut random = |n: usize| (0..n).map(|_| 0.1 * rng.normal()).collect::<Vec<f32>>();
    for layer in 0..c.num_hidden_layers {
        let own = c.layer(layer).matrices().filter(|l| !l.stacked);
        for linear in own.filter(|l| chosen(l.suffix)) {
            let (name, Dims { rows, cols }) = (linear.name(layer), linear.dims(c));
            let (a, b) = (random(RANK * cols), random(rows * RANK));
            let Weight::Dense(t) = &merged.matrices[&name] else {
                unreachable!("dequantized")
            };
            let mut values = t.to_f32().unwrap();
            for (i, value) in values.iter_mut().enumerate() {
                let (row, col) = (i / cols, i % cols);
                let term = |k: usize| f64::from(b[row * RANK + k]) * f64::from(a[k * cols + col]);
                let sum = (0..RANK).map(term).sum::<f64>();
                *value = (f64::from(*value) + ALPHA as f64 / RANK as f64 * sum) as f32;
            }
            let t = Tensor::from_f32(vec![rows, cols], values).unwrap();
            merged.matrices.insert(name.clone(), Weight::Dense(t));
            for (part, values, shape) in [("A", a, [RANK, cols]), ("B", b, [rows, RANK])] {
                let full = format!("base_model.model.{name}.lora_{part}.weight");
                tensors.push((full, Tensor::from_f32(shape.to_vec(), values).unwrap()));
            }
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA});
    fs::write(
        folder.path().join("adapter_config.json"),
        config.to_string(),
    )
    .unwrap();
    let file = folder.path().join("adapter_model.safetensors");
    write_tensors(&file, &tensors, &BTreeMap::new()).unwrap();
    let lora = Adapter::open(folder.path(), 1.0).unwrap().lora(c).unwrap();
    Made { lora, merged }
}
