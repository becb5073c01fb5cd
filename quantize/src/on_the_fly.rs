//! An unquantized checkpoint quantized while it is loaded: rounding to nearest with a search
//! for each group's range, no calibration, seconds instead of minutes. `nq quantize` gives
//! better quality in the same bytes.

use crate::error::Result;
use crate::fit::Fit;
use crate::grid::Grid;
use crate::methods::rtn;
use crate::rounding;
use crate::schemes::{Schemes, default_scheme};
use nq_formats::{
    AffineScheme, Bits, Checkpoint, Exactness, Scheme, StoredWeight, Tensor, TensorEntry, Weight,
    WeightStore,
};
use nq_model::{ModelConfig, names};
use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Quantizes the weights of another store.
pub struct OnTheFly<'a> {
    source: Box<dyn WeightStore + 'a>,
    rule: Rule,
}

/// Rule for which weights are rounded.
enum Rule {
    /// Weights that are not quantized yet.
    Unquantized(Schemes),
    /// These weights, quantized before or not. Rounded weights are cached: writers ask for a weight
    /// once for every tensor that they make from it.
    Named(
        BTreeMap<String, AffineScheme>,
        Mutex<BTreeMap<String, Weight>>,
    ),
}

impl Rule {
    fn scheme(&self, name: &str, weight: &Weight) -> Option<Scheme> {
        match (self, weight) {
            (Rule::Unquantized(schemes), Weight::Dense(_)) => schemes.of(name),
            (Rule::Unquantized(_), _) => None,
            (Rule::Named(schemes, _), _) => schemes.get(name).map(|s| (*s).into()),
        }
    }
}

impl<'a> OnTheFly<'a> {
    /// Reads the weights of `source` under `schemes`. Weights that are already quantized pass
    /// unchanged.
    pub fn new(source: Box<dyn WeightStore + 'a>, schemes: Schemes) -> Self {
        let rule = Rule::Unquantized(schemes);
        OnTheFly { source, rule }
    }

    /// Reads the weight `name` and rounds it if the rule says so.
    fn round(&self, name: &str, dims: (usize, usize)) -> nq_formats::Result<Weight> {
        let weight = self.source.matrix(name, dims)?;
        let Some(scheme) = self.rule.scheme(name, &weight) else {
            return Ok(weight);
        };
        // The store's trait uses the formats crate's errors. The only error possible here is a weight
        // that is not finite, which is reported as an error of its tensor.
        let tensor = |e: crate::Error| match e {
            crate::Error::Format(e) => e,
            other => nq_formats::Error::Weight {
                what: "values to quantize",
                expected: "finite values".into(),
                found: other.to_string(),
            },
        };
        let rounded = rounding::to_nearest(name, &weight, &[], scheme).map_err(tensor)?;
        weight.release();
        Ok(rounded.0)
    }
}

/// `checkpoint` with its weights quantized under `schemes` as they are read.
///
/// # Errors
/// Errors of [`Schemes::check`].
pub fn quantize_at_load(checkpoint: Checkpoint, schemes: Schemes) -> Result<Checkpoint> {
    schemes.check(checkpoint.config())?;
    Ok(rounded(checkpoint, Rule::Unquantized(schemes)))
}

/// The head of `checkpoint` in 4 bits, for a layer that drafts with it: of what such a layer reads, the head is most, and
/// drafts are checked. Ranges of groups are not searched, which would take longer than loading does. `None` if the head has
/// no more bits already.
///
/// # Errors
/// A missing or misshapen tensor; a weight that is not finite.
pub fn draft_head(checkpoint: &Checkpoint) -> Result<Option<Weight>> {
    let (c, name) = (checkpoint.config(), names::head(checkpoint.config()));
    let head = checkpoint
        .store()
        .matrix(name, (c.vocab_size, c.hidden_size))?;
    match &head {
        Weight::Quantized(q) if q.scheme().bits() <= Scheme::from(DRAFT_HEAD).bits() => Ok(None),
        head => {
            let grid = Grid::new(DRAFT_HEAD)?;
            Ok(Some(
                rtn::round_rows(name, head, grid, Fit::absmax(), &[])?.0,
            ))
        }
    }
}

/// The scheme of [`draft_head`].
const DRAFT_HEAD: AffineScheme = default_scheme(Bits::B4);

/// Most bytes of [`draft_head`] of a model of this shape.
pub fn draft_head_bytes(c: &ModelConfig) -> usize {
    let dims = (c.vocab_size, c.hidden_size);
    Scheme::from(DRAFT_HEAD).stored(dims).bytes
}

/// `checkpoint` with the weights that `schemes` names rounded as they are read, quantized before
/// or not.
pub fn requantize(checkpoint: Checkpoint, schemes: BTreeMap<String, AffineScheme>) -> Checkpoint {
    rounded(checkpoint, Rule::Named(schemes, Mutex::default()))
}

fn rounded(checkpoint: Checkpoint, rule: Rule) -> Checkpoint {
    let (files, config) = (checkpoint.files().clone(), checkpoint.config().clone());
    let generation = checkpoint.generation().clone();
    let task = checkpoint.task().clone();
    let source = Box::new(Whole(checkpoint));
    Checkpoint::new(
        files,
        config,
        generation,
        task,
        Box::new(OnTheFly { source, rule }),
    )
}

/// The weights of `checkpoint` under `schemes`, as they are read.
///
/// # Errors
/// Errors of [`Schemes::check`].
pub(crate) fn rounded_weights(checkpoint: &Checkpoint, schemes: Schemes) -> Result<OnTheFly<'_>> {
    schemes.check(checkpoint.config())?;
    Ok(OnTheFly::new(Box::new(Whole(checkpoint)), schemes))
}

/// A checkpoint as a store.
struct Whole<C>(C);

impl<C: Borrow<Checkpoint>> Whole<C> {
    fn store(&self) -> &dyn WeightStore {
        self.0.borrow().store()
    }
}

impl<C: Borrow<Checkpoint> + Send + Sync> WeightStore for Whole<C> {
    fn format(&self) -> &'static str {
        self.store().format()
    }

    fn contains(&self, name: &str) -> bool {
        self.store().contains(name)
    }

    fn vector(&self, name: &str, len: usize) -> nq_formats::Result<Tensor> {
        self.store().vector(name, len)
    }

    fn matrix(&self, name: &str, dims: (usize, usize)) -> nq_formats::Result<Weight> {
        self.store().matrix(name, dims)
    }

    fn stored(&self, name: &str, dims: (usize, usize)) -> nq_formats::Result<StoredWeight> {
        self.store().stored(name, dims)
    }

    fn exactness(&self, name: &str) -> Exactness {
        self.store().exactness(name)
    }

    fn sources(&self, name: &str) -> Vec<String> {
        self.store().sources(name)
    }

    fn entries(&self) -> Vec<TensorEntry> {
        self.store().entries()
    }

    fn quantization(&self) -> Option<&serde_json::Value> {
        self.store().quantization()
    }

    fn file_bytes(&self) -> u64 {
        self.store().file_bytes()
    }
}

impl WeightStore for OnTheFly<'_> {
    fn format(&self) -> &'static str {
        self.source.format()
    }

    fn contains(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    fn vector(&self, name: &str, len: usize) -> nq_formats::Result<Tensor> {
        self.source.vector(name, len)
    }

    fn matrix(&self, name: &str, dims: (usize, usize)) -> nq_formats::Result<Weight> {
        let Rule::Named(_, kept) = &self.rule else {
            return self.round(name, dims);
        };
        let kept = || kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(weight) = kept().get(name) {
            return Ok(weight.clone());
        }
        let weight = self.round(name, dims)?;
        if self.rule.scheme(name, &weight).is_some() {
            kept().insert(name.into(), weight.clone());
        }
        Ok(weight)
    }

    fn stored(&self, name: &str, dims: (usize, usize)) -> nq_formats::Result<StoredWeight> {
        match &self.rule {
            Rule::Named(schemes, _) if !schemes.contains_key(name) => {
                self.source.stored(name, dims)
            }
            _ => self.matrix(name, dims).map(StoredWeight::Canonical),
        }
    }

    fn exactness(&self, name: &str) -> Exactness {
        match &self.rule {
            Rule::Named(schemes, _) if schemes.contains_key(name) => Exactness::Exact,
            _ => self.source.exactness(name),
        }
    }

    fn sources(&self, name: &str) -> Vec<String> {
        self.source.sources(name)
    }

    fn entries(&self) -> Vec<TensorEntry> {
        self.source.entries()
    }

    fn quantization(&self) -> Option<&serde_json::Value> {
        self.source.quantization()
    }

    fn file_bytes(&self) -> u64 {
        self.source.file_bytes()
    }
}
