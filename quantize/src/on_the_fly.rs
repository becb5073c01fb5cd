//! An unquantized checkpoint quantized while it is loaded: rounding to nearest with a search
//! for each group's range, no calibration, seconds instead of minutes. `nq quantize` gives
//! better quality in the same bytes.

use crate::error::Result;
use crate::fit::Fit;
use crate::grid::Grid;
use crate::methods::rtn;
use crate::schemes::Schemes;
use nq_formats::{Checkpoint, Tensor, TensorEntry, Weight, WeightStore};

/// Quantizes what another store yields. Weights that are quantized already pass unchanged.
pub struct OnTheFly {
    source: Box<dyn WeightStore>,
    schemes: Schemes,
}

impl OnTheFly {
    /// Yields the weights of `source` under `schemes`.
    pub fn new(source: Box<dyn WeightStore>, schemes: Schemes) -> Self {
        OnTheFly { source, schemes }
    }
}

/// `checkpoint`, its weights quantized under `schemes` as they are read.
///
/// # Errors
/// As [`Schemes::check`].
pub fn quantize_at_load(checkpoint: Checkpoint, schemes: Schemes) -> Result<Checkpoint> {
    schemes.check(checkpoint.config())?;
    let (files, config) = (checkpoint.files().clone(), checkpoint.config().clone());
    let generation = checkpoint.generation().clone();
    let store = OnTheFly::new(Box::new(Whole(checkpoint)), schemes);
    Ok(Checkpoint::new(files, config, generation, Box::new(store)))
}

/// A checkpoint as the store it holds.
struct Whole(Checkpoint);

impl WeightStore for Whole {
    fn format(&self) -> &'static str {
        self.0.store().format()
    }

    fn contains(&self, name: &str) -> bool {
        self.0.store().contains(name)
    }

    fn vector(&self, name: &str, len: usize) -> nq_formats::Result<Tensor> {
        self.0.store().vector(name, len)
    }

    fn matrix(&self, name: &str, dims: (usize, usize)) -> nq_formats::Result<Weight> {
        self.0.store().matrix(name, dims)
    }

    fn entries(&self) -> Vec<TensorEntry> {
        self.0.store().entries()
    }

    fn quantization(&self) -> Option<&serde_json::Value> {
        self.0.store().quantization()
    }

    fn file_bytes(&self) -> u64 {
        self.0.store().file_bytes()
    }
}

impl WeightStore for OnTheFly {
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
        let weight = self.source.matrix(name, dims)?;
        let (Weight::Dense(_), Some(scheme)) = (&weight, self.schemes.of(name)) else {
            return Ok(weight);
        };
        // The store's trait speaks the formats' error; what can be wrong here is a weight
        // that is not finite, which is a tensor's fault.
        let tensor = |e: crate::Error| match e {
            crate::Error::Format(e) => e,
            other => nq_formats::Error::Weight {
                what: "values to quantize",
                expected: "finite values".into(),
                found: other.to_string(),
            },
        };
        let grid = Grid::new(scheme).map_err(tensor)?;
        let rounded = rtn::round_rows(name, &weight, grid, Fit::clip(), &[]).map_err(tensor)?;
        weight.release();
        Ok(rounded.0)
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
