//! `--engine candle` in a build without it.

use nq_formats::{Progress, WeightStore};
use nq_model::ModelConfig;
use nq_runtime::interface::{Engine, LoadOptions};
use nq_runtime::{Error, Result};
use std::sync::Arc;

/// # Errors
/// Always; the message says how to build nq with candle.
pub(crate) fn load(
    _: &ModelConfig,
    _: &dyn WeightStore,
    _: &LoadOptions,
    _: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    Err(Error::Candle {
        why: "this nq was built without the feature `candle`; build with `--features candle`"
            .into(),
    })
}
