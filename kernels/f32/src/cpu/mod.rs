//! Training operations on the CPU: products by [`nq_kernels::matrix`], everything else row by row. Work is
//! cut into pieces of fixed size, so results do not depend on the number of threads.

mod delta;
mod lanes;
mod layer;
mod rows;
#[cfg(test)]
mod tests;
mod train;

pub use delta::CpuStates;

use nq_kernels::Error;
use nq_kernels::Result;
use nq_kernels::delta::DeltaShape;
use nq_kernels::grad::{Allocate, Buffers, enough};
use nq_model::Dims;
use rayon::prelude::*;

/// The CPU, using rayon's threads.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOps;

/// Values per piece of elementwise work.
const VALUES: usize = 1 << 14;

impl Allocate for CpuOps {
    type Floats = Vec<f32>;
    type Ids = Vec<u32>;
    type Codes = Vec<u8>;
    type States = CpuStates;

    fn floats(&self, _what: &'static str, len: usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; len])
    }

    fn ids(&self, _what: &'static str, len: usize) -> Result<Vec<u32>> {
        Ok(vec![0; len])
    }

    fn codes(&self, _what: &'static str, len: usize) -> Result<Vec<u8>> {
        Ok(vec![0; len])
    }

    fn states(&self, shape: DeltaShape, layers: usize, slots: usize) -> Result<CpuStates> {
        Ok(CpuStates::new(shape, layers, slots))
    }

    fn write(&self, to: &mut Vec<f32>, from: &[f32]) -> Result<()> {
        enough("write", "buffer", from.len(), to.len())?;
        to[..from.len()].copy_from_slice(from);
        Ok(())
    }
}

impl Buffers for CpuOps {
    fn device(&self) -> String {
        format!("cpu ({} threads)", rayon::current_num_threads())
    }

    fn rows<E: From<Error> + Send>(
        &self,
        _what: &'static str,
        Dims { rows, cols }: Dims,
        fill: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Vec<f32>, E> {
        let mut values = vec![0.0; rows * cols];
        let by_row = values.par_chunks_mut(cols.max(1)).enumerate();
        by_row.try_for_each(|(row, values)| fill(row, values))?;
        Ok(values)
    }

    fn read(&self, from: &Vec<f32>, to: &mut [f32]) -> Result<()> {
        enough("read", "buffer", to.len(), from.len())?;
        to.copy_from_slice(&from[..to.len()]);
        Ok(())
    }

    fn write_codes(&self, to: &mut Vec<u8>, from: &[u8]) -> Result<()> {
        enough("write", "codes", from.len(), to.len())?;
        to[..from.len()].copy_from_slice(from);
        Ok(())
    }

    fn write_ids(&self, to: &mut Vec<u32>, from: &[u32]) -> Result<()> {
        enough("write", "ids", from.len(), to.len())?;
        to[..from.len()].copy_from_slice(from);
        Ok(())
    }

    fn read_ids(&self, from: &Vec<u32>, to: &mut [u32]) -> Result<()> {
        enough("read", "ids", to.len(), from.len())?;
        to.copy_from_slice(&from[..to.len()]);
        Ok(())
    }

    fn clear(&self, x: &mut Vec<f32>, n: usize) -> Result<()> {
        enough("clear", "buffer", n, x.len())?;
        x[..n].fill(0.0);
        Ok(())
    }

    fn copy(
        &self,
        (from, start): (&Vec<f32>, usize),
        (to, at): (&mut Vec<f32>, usize),
        n: usize,
    ) -> Result<()> {
        enough("copy", "source", start + n, from.len())?;
        enough("copy", "destination", at + n, to.len())?;
        to[at..at + n].copy_from_slice(&from[start..start + n]);
        Ok(())
    }
}
