//! Loading on any device: kinds of weights, counting them, and reporting progress.

use crate::error::Result;
use nq_formats::{
    HeldSize, Progress, Scheme, StoredWeight, Unit, Weight, WeightStore, human_bytes,
};
use nq_kernels::Activations;
use nq_kernels::registry::WeightKind;
use nq_model::{DType, Dims, ModelConfig, NgramTable, names};
use std::collections::BTreeMap;

/// Bits of one code, or of one value of an unquantized weight; those of a trellis rounded up.
pub fn bits(weight: &Weight) -> usize {
    match weight {
        Weight::Dense(t) => 8 * t.dtype().size(),
        Weight::Quantized(q) => q.scheme().bits().ceil() as usize,
    }
}

/// The kind of each matrix of a model, by name.
pub type Kinds<'a> = &'a dyn Fn(&str) -> WeightKind;

/// The kinds of all matrices in `store`, by name, as CPUs read them ([`WeightStore::matrix_in_codes`]); `in_levels`: as GPUs
/// do ([`WeightStore::matrix_in_levels`]).
/// A store that makes its weights has to make all of them for this; its owner knows the kinds already.
///
/// # Errors
/// A missing or misshapen tensor.
pub fn weight_kinds(
    config: &ModelConfig,
    store: &dyn WeightStore,
    in_levels: bool,
) -> Result<BTreeMap<String, WeightKind>> {
    let (mut kinds, mut ordered) = (BTreeMap::new(), None);
    for (name, shape) in names::parameters(config) {
        if let names::Shape::Matrix(out, inputs) = shape {
            let dims = Dims::new(out, inputs);
            // Tables are read by rows, in the bits of the file, and none of them for this.
            let table = NgramTable::part_of(&name).is_some();
            let told = store.scheme_in_levels(&name).filter(|_| in_levels || table);
            let kind = match (in_levels, told) {
                (_, Some(scheme)) => {
                    // A scheme that the file states apart from the weight does not say whether inputs have an order of their
                    // own: the first such weight does.
                    if ordered.is_none() && store.scheme(&name).is_some() {
                        let first = WeightKind::of(&store.matrix_in_levels(&name, dims)?);
                        ordered = Some(first.is_ordered());
                    }
                    WeightKind::in_scheme(scheme, ordered.unwrap_or(false))
                }
                (_, None) if table => match store.rows(&name, dims)? {
                    StoredWeight::Canonical(weight) => WeightKind::of(&weight),
                    _ => WeightKind::Dense(DType::F8E4M3),
                },
                (true, None) => WeightKind::of(&store.matrix_in_levels(&name, dims)?),
                (false, _) => WeightKind::of(&store.matrix_in_codes(&name, dims)?),
            };
            kinds.insert(name, kind);
        }
    }
    Ok(kinds)
}

/// Statistics of a model's weights, for [`crate::EngineDescription`].
#[derive(Debug, Default)]
pub struct Census {
    parameters: BTreeMap<usize, usize>,     // by bits
    activations: Vec<(Activations, usize)>, // parameters by what their input is rounded to
}

impl Census {
    /// Counts one product of stacked `weights` whose input is rounded to `activations`.
    pub fn add(&mut self, weights: &[&Weight], activations: Activations) {
        let mut all = 0;
        for w in weights {
            let (out, inputs) = w.dims().pair();
            *self.parameters.entry(bits(w)).or_default() += out * inputs;
            all += out * inputs;
        }
        match self.activations.iter_mut().find(|(a, _)| *a == activations) {
            Some((_, n)) => *n += all,
            None => self.activations.push((activations, all)),
        }
    }

    /// The width in bits that most parameters have.
    pub fn bits(&self) -> usize {
        let most = self.parameters.iter().max_by_key(|&(_, n)| n);
        most.map_or(0, |(&bits, _)| bits)
    }

    /// True if any input is rounded.
    pub fn rounds(&self) -> bool {
        self.activations.iter().any(|a| a.0 != Activations::F32)
    }

    /// Names of all activation types in use, the one with most parameters first, joined by ` + `.
    pub fn activations(&self) -> String {
        let mut all = self.activations.clone();
        all.sort_by_key(|&(_, n)| std::cmp::Reverse(n));
        let names: Vec<String> = all.iter().map(|(a, _)| a.to_string()).collect();
        names.join(" + ")
    }
}

/// In words, codes that a device holds in more bits than the file, and the size of all weights in both; `None` if it holds
/// all as they are. `held` says what it holds of a weight.
pub fn held_otherwise(
    config: &ModelConfig,
    store: &dyn WeightStore,
    held: fn(Scheme, Dims) -> HeldSize,
) -> Option<[String; 2]> {
    let (mut file, mut memory, mut widths) = (0, 0, Vec::new());
    for (name, shape) in names::parameters(config) {
        let (names::Shape::Matrix(rows, cols), Some(scheme)) = (shape, store.scheme(&name)) else {
            continue;
        };
        let as_held = held(scheme, Dims::new(rows, cols));
        file += scheme.bytes(rows, cols) as u64;
        memory += as_held.bytes as u64;
        let width = (scheme.bits(), as_held.bits);
        if width.0 != width.1 && !widths.contains(&width) {
            widths.push(width);
        }
    }
    widths.sort_by(|a, b| a.0.total_cmp(&b.0));
    let words = (widths.iter()).map(|(file, held)| format!("{file} bits held as {held}"));
    let words: Vec<String> = words.collect();
    let sizes = format!(
        "{} of weights as {}",
        human_bytes(file),
        human_bytes(memory)
    );
    (!words.is_empty()).then(|| [words.join(", "), sizes])
}

/// Reports what [`held_otherwise`] says.
pub fn note_held(
    config: &ModelConfig,
    store: &dyn WeightStore,
    held: fn(Scheme, Dims) -> HeldSize,
    progress: &dyn Progress,
) {
    if let Some([words, sizes]) = held_otherwise(config, store, held) {
        progress.note(&format!("on this device {words}: {sizes}"));
    }
}

/// Reports loading in bytes of the file. The weights may differ from the file's bytes (a store may
/// quantize while loading), so each weight counts for its share of the parameters.
pub struct LoadProgress<'a> {
    progress: &'a dyn Progress,
    bytes: u64,
    parameters: u64,
    done: u64,     // parameters
    reported: u64, // bytes
}

impl<'a> LoadProgress<'a> {
    /// Begins the stage.
    pub fn begin(
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
    pub fn add(&mut self, weight: &Weight) {
        weight.release();
        let (out, inputs) = weight.dims().pair();
        self.done = (self.done + (out * inputs) as u64).min(self.parameters);
        let share = u128::from(self.bytes) * u128::from(self.done);
        let at = (share / u128::from(self.parameters.max(1))) as u64;
        self.progress.advance(at - self.reported);
        self.reported = at;
    }

    /// Ends the stage: all weights are on the device.
    pub fn end(self) {
        self.progress.advance(self.bytes - self.reported);
        self.progress.end();
    }
}
