//! Random weights whose tokens are alike, so that routers of a mixture choose the same experts again and again, as
//! those of trained models do for a text. Of independent embeddings, every token is routed anew.

use nq_formats::{Error, Overlay, Result, Scheme, Tensor, Weight, WeightStore};
use nq_model::Dims;
use nq_model::names::EMBEDDING;
use rayon::prelude::*;

/// How many times as long embeddings become. Layers with random weights add far longer vectors to the residual stream than
/// embeddings with random weights are, and attention adds the same to all tokens of a text, about the mean of its values:
/// every layer would choose by that alone.
const LONGER: f32 = 1000.0;

/// A store whose embeddings have a share in common: `sqrt(1 - share) e + sqrt(share) c` in the place of `e`, with
/// the first token's for `c`, and [`LONGER`].
pub(super) struct AlikeTokens {
    pub(super) store: Box<dyn WeightStore>,
    /// 0 to 1.
    pub(super) share: f64,
}

impl Overlay for AlikeTokens {
    fn inner(&self) -> &dyn WeightStore {
        self.store.as_ref()
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        let own = self.store.matrix(name, dims)?;
        if name != EMBEDDING {
            return Ok(own);
        }
        let [kept, common] = [1.0 - self.share, self.share].map(|part| LONGER * part.sqrt() as f32);
        let mut first = vec![0.0; dims.cols];
        own.dequantize_row(0, &mut first)?;
        let mut values = vec![0.0; dims.rows * dims.cols];
        let rows = values.par_chunks_mut(dims.cols.max(1)).enumerate();
        rows.try_for_each(|(index, row)| {
            own.dequantize_row(index, row)?;
            let both = row.iter_mut().zip(&first);
            both.for_each(|(e, c)| *e = kept * *e + common * c);
            Ok::<_, Error>(())
        })?;
        let shape = vec![dims.rows, dims.cols];
        Ok(Weight::Dense(Tensor::from_f32(shape, values)?))
    }

    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        match name {
            EMBEDDING => None,
            _ => self.store.scheme_in_levels(name),
        }
    }
}
