//! The functions of a build without CUDA.
#![allow(
    missing_docs,
    reason = "documented where they do something: `present.rs`"
)]

use super::{GpuFound, GpuMemory, GpuSizes};
use nq_cpu::plan::TowerBytes;
use nq_formats::eagle::EagleHead;
use nq_formats::{Progress, Weight, WeightStore};
use nq_kernels::grad::GradWork;
use nq_kernels::second_order::DeviceMoments;
use nq_model::ModelConfig;
use nq_model::vision::VisionConfig;
use nq_runtime::interface::{Engine, LoadOptions, Ordinals, Placed, SessionSpec, Tower};
use nq_runtime::stepper::LayerStepper;
use nq_runtime::weights::Kinds;
use nq_runtime::{Error, Result};
use std::sync::Arc;

const WHY: &str = "this nq was built without the feature `cuda`";

fn absent<T>(ordinal: usize) -> Result<T> {
    Err(Error::Device {
        device: format!("cuda:{ordinal}"),
        why: WHY.into(),
    })
}

pub(crate) fn count() -> Result<usize, String> {
    Err(WHY.into())
}

pub(crate) fn first() -> Result<usize, String> {
    count()
}

pub fn multiprocessors(ordinal: usize) -> Result<usize> {
    absent(ordinal)
}

pub fn check(_: &ModelConfig) -> Result<()> {
    absent(0)
}

pub(crate) fn load_eagle(_: &EagleHead, _: &ModelConfig, ordinal: usize) -> Result<()> {
    absent(ordinal)
}

pub(crate) fn load_mtp(
    _: ModelConfig,
    _: &dyn WeightStore,
    _: Option<&Weight>,
    ordinal: usize,
) -> Result<()> {
    absent(ordinal)
}

pub(crate) fn load_tower(
    _: &VisionConfig,
    _: &dyn WeightStore,
    _tokens: u64,
    ordinal: usize,
    _: &dyn Progress,
) -> Result<Arc<dyn Tower>> {
    absent(ordinal)
}

pub(crate) fn planned_tower(
    _: &VisionConfig,
    _: &dyn WeightStore,
    _tokens: u64,
) -> Result<TowerBytes> {
    absent(0)
}

pub(crate) fn unserved_tower(_: &VisionConfig) -> Option<String> {
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

pub(crate) fn load_parallel(
    _: &ModelConfig,
    _: &dyn WeightStore,
    _: &LoadOptions,
    several: Ordinals,
    _: &dyn Progress,
) -> Result<Arc<dyn Engine>> {
    absent(several.as_slice()[0])
}

pub(crate) fn stepper(
    _: &ModelConfig,
    ordinal: usize,
    _rows: usize,
) -> Result<Box<dyn LayerStepper>> {
    absent(ordinal)
}

pub fn memory(ordinal: usize) -> Result<GpuMemory> {
    absent(ordinal)
}

pub fn sizes() -> Result<GpuSizes> {
    absent(0)
}

pub fn place(
    _: &ModelConfig,
    _: Kinds<'_>,
    _: &SessionSpec,
    _: &[usize],
    _: usize,
) -> Result<Placed> {
    absent(0)
}

pub(crate) fn run<W: GradWork>(ordinal: usize, _: W) -> Result<W::Output> {
    absent(ordinal)
}

pub fn moments(ordinal: usize, _: &[f32], _: usize) -> Result<Arc<dyn DeviceMoments>> {
    absent(ordinal)
}

pub fn found() -> Result<Vec<GpuFound>> {
    Ok(Vec::new())
}

/// Of which there is none.
pub enum GpuMeter {}

impl GpuMeter {
    pub fn open(ordinal: usize) -> Result<Self> {
        absent(ordinal)
    }

    pub fn read_bandwidth(&self) -> Result<f64> {
        match *self {}
    }

    pub fn cache_bytes(&self) -> u64 {
        match *self {}
    }
}

pub fn products(ordinal: usize) -> Result<String> {
    absent(ordinal)
}

pub fn driver_needed() -> Option<u32> {
    None
}
