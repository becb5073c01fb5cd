//! Without CUDA.

use super::{GpuMemory, GpuSizes};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::load::LoadOptions;
use crate::stepper::LayerStepper;
use nq_formats::{ModelConfig, Progress, WeightStore};
use nq_kernels::grad::GradWork;
use nq_kernels::second_order::Moments;
use std::sync::Arc;

const WHY: &str = "this nq was built without the feature `cuda`";

fn absent<T>(ordinal: usize) -> Result<T> {
    Err(Error::Device {
        device: format!("cuda:{ordinal}"),
        why: WHY.into(),
    })
}

pub(super) fn count() -> Result<usize, String> {
    Err(WHY.into())
}

pub(super) fn load(
    _: &ModelConfig,
    _: &dyn WeightStore,
    _: &LoadOptions,
    ordinal: usize,
    _: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    absent(ordinal)
}

pub(super) fn stepper(
    _: &ModelConfig,
    ordinal: usize,
    _rows: usize,
) -> Result<Box<dyn LayerStepper>> {
    absent(ordinal)
}

pub(super) fn memory(ordinal: usize) -> Result<GpuMemory> {
    absent(ordinal)
}

pub(super) fn sizes() -> Result<GpuSizes> {
    absent(0)
}

pub(super) fn run<W: GradWork>(ordinal: usize, _: W) -> Result<W::Output> {
    absent(ordinal)
}

pub(super) fn moments(ordinal: usize, _: &[f32], _: usize) -> Result<Arc<dyn Moments>> {
    absent(ordinal)
}

pub(super) fn begin_use() {}

pub(super) fn peak_use() -> u64 {
    0
}
