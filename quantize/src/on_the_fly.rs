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
    AffineScheme, Bits, Checkpoint, Exactness, Overlay, Scheme, StoredWeight, Weight, WeightStore,
};
use nq_model::{Dims, ModelConfig, names};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Quantizes the weights of another store.
pub struct OnTheFly<'a> {
    source: Origin<'a>,
    rule: Rule,
}

enum Origin<'a> {
    Own(Box<dyn WeightStore>),
    Lent(&'a dyn WeightStore),
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

impl OnTheFly<'_> {
    /// Reads the weights of `source` under `schemes`. Weights that are already quantized pass
    /// unchanged.
    pub fn new(source: Box<dyn WeightStore>, schemes: Schemes) -> Self {
        OnTheFly {
            source: Origin::Own(source),
            rule: Rule::Unquantized(schemes),
        }
    }

    /// Reads the weight `name` and rounds it if the rule says so.
    fn round(&self, name: &str, dims: Dims) -> nq_formats::Result<Weight> {
        let weight = self.inner().matrix(name, dims)?;
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
        .matrix(name, Dims::new(c.vocab_size, c.hidden_size))?;
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
    let dims = Dims::new(c.vocab_size, c.hidden_size);
    Scheme::from(DRAFT_HEAD).stored(dims).bytes
}

/// `checkpoint` with the weights that `schemes` names rounded as they are read, quantized before
/// or not.
pub fn requantize(checkpoint: Checkpoint, schemes: BTreeMap<String, AffineScheme>) -> Checkpoint {
    rounded(checkpoint, Rule::Named(schemes, Mutex::default()))
}

fn rounded(checkpoint: Checkpoint, rule: Rule) -> Checkpoint {
    checkpoint.over(|store| {
        let source = Origin::Own(store);
        Box::new(OnTheFly { source, rule })
    })
}

/// The weights of `checkpoint` under `schemes`, as they are read.
pub(crate) fn rounded_weights(checkpoint: &Checkpoint, schemes: Schemes) -> Result<OnTheFly<'_>> {
    schemes.check(checkpoint.config())?;
    Ok(OnTheFly {
        source: Origin::Lent(checkpoint.store()),
        rule: Rule::Unquantized(schemes),
    })
}

impl Overlay for OnTheFly<'_> {
    fn inner(&self) -> &dyn WeightStore {
        match &self.source {
            Origin::Own(store) => store.as_ref(),
            Origin::Lent(store) => *store,
        }
    }

    fn matrix(&self, name: &str, dims: Dims) -> nq_formats::Result<Weight> {
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

    fn stored(&self, name: &str, dims: Dims) -> nq_formats::Result<StoredWeight> {
        match &self.rule {
            Rule::Named(schemes, _) if !schemes.contains_key(name) => {
                self.inner().stored(name, dims)
            }
            _ => Overlay::matrix(self, name, dims).map(StoredWeight::Canonical),
        }
    }

    fn scheme(&self, _: &str) -> Option<Scheme> {
        None // told by each weight once it is rounded
    }

    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        match &self.rule {
            // All weights are as the rule expects them.
            Rule::Unquantized(schemes) if self.inner().quantization().is_none() => schemes.of(name),
            _ => None,
        }
    }

    fn is_float(&self, name: &str) -> bool {
        match &self.rule {
            Rule::Unquantized(schemes) if self.inner().quantization().is_none() => {
                schemes.of(name).is_none() && self.inner().is_float(name)
            }
            _ => false,
        }
    }

    fn exactness(&self, name: &str) -> Exactness {
        match &self.rule {
            Rule::Named(schemes, _) if schemes.contains_key(name) => Exactness::Exact,
            _ => self.inner().exactness(name),
        }
    }
}
