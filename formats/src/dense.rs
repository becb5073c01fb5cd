//! Unquantized Hugging Face checkpoints: safetensors in bf16, f16 or f32.

use crate::checkpoint::{Checkpoint, Source};
use crate::error::Result;
use crate::shards::Shards;
use crate::store::{TensorEntry, WeightStore};
use crate::tensor::Tensor;
use crate::weight::Weight;
use nq_model::{DType, Dims, FLOATS, tensor_name};

/// The parameters of an unquantized checkpoint.
pub(crate) struct DenseStore {
    pub(crate) shards: Shards,
}

/// Opens a folder whose config.json names no quantization.
pub(crate) fn open(source: Source) -> Result<Checkpoint> {
    let shards = source.shards()?;
    source.into_checkpoint(Box::new(DenseStore { shards }))
}

impl WeightStore for DenseStore {
    fn format(&self) -> &'static str {
        "safetensors"
    }

    fn contains(&self, name: &str) -> bool {
        self.shards.contains(&tensor_name(name))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        self.shards.require(&tensor_name(name), &FLOATS, &[len])
    }

    fn matrix(&self, name: &str, Dims { rows, cols }: Dims) -> Result<Weight> {
        let tensor = self
            .shards
            .require(&tensor_name(name), &FLOATS, &[rows, cols])?;
        Ok(Weight::Dense(tensor))
    }

    fn is_float(&self, name: &str) -> bool {
        self.shards.contains(name) || self.contains(name)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        self.shards.floats(name, shape)
    }

    fn fp8(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        let is_fp8 = |t: Tensor| t.dtype() == DType::F8E4M3;
        match self.shards.get(name).is_some_and(is_fp8) {
            true => (self.shards.require(name, &[DType::F8E4M3], shape)).map(Some),
            false => Ok(None),
        }
    }

    fn integers(&self, name: &str, len: usize) -> Result<Option<Vec<i64>>> {
        self.shards.integers(name, len)
    }

    fn sources(&self, name: &str) -> Vec<String> {
        match self.shards.contains(name) {
            true => vec![name.into()], // the tensor of all experts of a layer
            false => vec![tensor_name(name)],
        }
    }

    fn is_bare(&self) -> bool {
        self.shards.is_bare()
    }

    fn entries(&self) -> Vec<TensorEntry> {
        self.shards.entries()
    }

    fn file_bytes(&self) -> u64 {
        self.shards.file_bytes()
    }
}
