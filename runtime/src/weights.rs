//! Loading on any device: counting weights and reporting progress.

use nq_formats::{
    Held, ModelConfig, Progress, Scheme, Unit, Weight, WeightStore, human_bytes, names,
};
use nq_kernels::Activations;
use std::collections::BTreeMap;

/// Bits of one code, or of one value of an unquantized weight; those of a trellis rounded up.
pub(crate) fn bits(weight: &Weight) -> usize {
    match weight {
        Weight::Dense(t) => 8 * t.dtype().size(),
        Weight::Quantized(q) => q.scheme().bits().ceil() as usize,
    }
}

/// Statistics of a model's weights, for [`crate::EngineDescription`].
#[derive(Debug, Default)]
pub(crate) struct Census {
    parameters: BTreeMap<usize, usize>,     // by bits
    activations: Vec<(Activations, usize)>, // parameters by what their input is rounded to
}

impl Census {
    /// Counts one product of stacked `weights` whose input is rounded to `activations`.
    pub(crate) fn add(&mut self, weights: &[&Weight], activations: Activations) {
        let mut all = 0;
        for w in weights {
            let (out, inputs) = w.dims();
            *self.parameters.entry(bits(w)).or_default() += out * inputs;
            all += out * inputs;
        }
        match self.activations.iter_mut().find(|(a, _)| *a == activations) {
            Some((_, n)) => *n += all,
            None => self.activations.push((activations, all)),
        }
    }

    /// The width in bits that most parameters have.
    pub(crate) fn bits(&self) -> usize {
        let most = self.parameters.iter().max_by_key(|&(_, n)| n);
        most.map_or(0, |(&bits, _)| bits)
    }

    /// True if any input is rounded.
    pub(crate) fn rounds(&self) -> bool {
        self.activations.iter().any(|a| a.0 != Activations::F32)
    }

    /// Names of all activation types in use, the one with most parameters first, joined by ` + `.
    pub(crate) fn activations(&self) -> String {
        let mut all = self.activations.clone();
        all.sort_by_key(|&(_, n)| std::cmp::Reverse(n));
        let names: Vec<String> = all.iter().map(|(a, _)| a.to_string()).collect();
        names.join(" + ")
    }
}

/// Reports codes that the device holds in more bits than the file, and their size in both. `held` says what
/// the device holds of a weight.
pub(crate) fn note_held(
    config: &ModelConfig,
    store: &dyn WeightStore,
    held: fn(Scheme, (usize, usize)) -> Held,
    progress: &dyn Progress,
) {
    let (mut file, mut memory, mut widths) = (0, 0, Vec::new());
    for (name, shape) in names::parameters(config) {
        let (names::Shape::Matrix(rows, cols), Some(scheme)) = (shape, store.scheme(&name)) else {
            continue;
        };
        let as_held = held(scheme, (rows, cols));
        file += scheme.bytes(rows, cols) as u64;
        memory += as_held.bytes as u64;
        let width = (scheme.bits(), as_held.bits);
        if width.0 != width.1 && !widths.contains(&width) {
            widths.push(width);
        }
    }
    widths.sort_by(|a, b| a.0.total_cmp(&b.0));
    if widths.is_empty() {
        return;
    }
    let words = widths
        .iter()
        .map(|(file, held)| format!("{file} bits held as {held}"));
    let words: Vec<String> = words.collect();
    progress.note(&format!(
        "on this device {}: {} of weights as {}",
        words.join(", "),
        human_bytes(file),
        human_bytes(memory)
    ));
}

/// Reports loading in bytes of the file. The weights may differ from the file's bytes (a store may
/// quantize while loading), so each weight counts for its share of the parameters.
pub(crate) struct LoadProgress<'a> {
    progress: &'a dyn Progress,
    bytes: u64,
    parameters: u64,
    done: u64,     // parameters
    reported: u64, // bytes
}

impl<'a> LoadProgress<'a> {
    /// Begins the stage.
    pub(crate) fn begin(
        config: &ModelConfig,
        store: &dyn WeightStore,
        progress: &'a dyn Progress,
    ) -> Self {
        let bytes = store.entries().iter().map(|e| e.bytes).sum();
        progress.begin("loading weights", bytes, Unit::Bytes);
        LoadProgress {
            progress,
            bytes,
            parameters: config.parameters() as u64,
            done: 0,
            reported: 0,
        }
    }

    /// Counts `weight`, now on the device, and releases its source, which is not needed again.
    pub(crate) fn add(&mut self, weight: &Weight) {
        weight.release();
        let (out, inputs) = weight.dims();
        self.done = (self.done + (out * inputs) as u64).min(self.parameters);
        let share = u128::from(self.bytes) * u128::from(self.done);
        let at = (share / u128::from(self.parameters.max(1))) as u64;
        self.progress.advance(at - self.reported);
        self.reported = at;
    }

    /// Ends the stage: all weights are on the device.
    pub(crate) fn end(self) {
        self.progress.advance(self.bytes - self.reported);
        self.progress.end();
    }
}
