//! The functions of a build without `wgpu`.
#![allow(
    missing_docs,
    reason = "documented where they do something: `present.rs`"
)]

use super::AdapterFound;
use nq_formats::{Progress, WeightStore};
use nq_model::ModelConfig;
use nq_runtime::interface::{Engine, LoadOptions};
use nq_runtime::{Error, Result};
use std::sync::Arc;

const WHY: &str = "this nq was built without the feature `wgpu`";

fn absent<T>(ordinal: usize) -> Result<T> {
    Err(Error::Device {
        device: format!("wgpu:{ordinal}"),
        why: WHY.into(),
    })
}

pub fn adapters() -> Vec<AdapterFound> {
    Vec::new()
}

pub(crate) fn choose(_: Option<usize>) -> Result<usize, String> {
    Err(WHY.into())
}

pub(crate) fn unserved(_: &ModelConfig) -> Option<Error> {
    None
}

pub(crate) fn load(
    _: &ModelConfig,
    _: &dyn WeightStore,
    _: &LoadOptions,
    ordinal: usize,
    _: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    absent(ordinal)
}

/// Of which there is none.
pub enum AdapterMeter {}

impl AdapterMeter {
    pub fn open(ordinal: usize) -> Result<Self> {
        absent(ordinal)
    }

    pub fn read_bandwidth(&self) -> Result<f64> {
        match *self {}
    }
}
