//! Descriptions of matrices for the copy engine of compute capability 9.0 and newer.

use super::gpu::Gpu;
use super::memory::Address;
use crate::cuda::wgmma::TensorMap;
use cudarc::driver::sys::{self, CUtensorMapDataType as Type, CUtensorMapSwizzle as Swizzle};
use nq_kernels::{Error, Result};

/// A matrix in device memory that is copied to shared memory in boxes.
#[derive(Clone, Copy)]
pub(crate) struct BoxedMatrix {
    pub(crate) address: Address,
    /// Size of an element in bytes: 2, 4 or 8.
    pub(crate) element: usize,
    pub(crate) rows: usize,
    /// Elements per row. Rows follow each other without gaps.
    pub(crate) width: usize,
    /// Rows and elements of a box.
    pub(crate) tile: (usize, usize),
    /// Swaps the 16-byte words in each 128 bytes of a box, word u of row r with u ^ (r % 8),
    /// the order in which tensor cores read them.
    pub(crate) swizzled: bool,
}

impl TensorMap {
    /// The map of no matrix.
    pub(crate) const NONE: TensorMap = TensorMap { words: [0; 16] };
}

impl Gpu {
    /// Makes a description of `matrix` for the copy engine.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the copy engine cannot read it: rows that are not a multiple of 16 bytes,
    /// boxes of more than 256 elements.
    pub(crate) fn tensor_map(&self, matrix: BoxedMatrix) -> Result<TensorMap> {
        #[cfg(test)]
        if super::trace::is_imagined(self.info()) {
            return Ok(traced(&matrix));
        }
        let kind = match matrix.element {
            2 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            4 => Type::CU_TENSOR_MAP_DATA_TYPE_INT32,
            _ => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
        };
        let swizzle = if matrix.swizzled {
            Swizzle::CU_TENSOR_MAP_SWIZZLE_128B
        } else {
            Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE
        };
        let size = [matrix.width as u64, matrix.rows as u64];
        let stride = [(matrix.width * matrix.element) as u64];
        let tile = [matrix.tile.1 as u32, matrix.tile.0 as u32];
        let steps = [1u32, 1];
        // SAFETY: a structure of integers, for which zero is valid.
        let mut map: sys::CUtensorMap = unsafe { std::mem::zeroed() };
        self.0.bind()?;
        // SAFETY: the arrays have the two dimensions passed; only `map` is written.
        let outcome = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                kind,
                2,
                matrix.address.0 as *mut std::ffi::c_void,
                size.as_ptr(),
                stride.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        outcome.result().map_err(|e| Error::Cuda {
            what: "describing a matrix",
            why: format!("{} x {}: {e}", matrix.rows, matrix.width),
        })?;
        Ok(TensorMap { words: map.opaque })
    }
}

/// What launches on an imagined device write down of a map.
#[cfg(test)]
fn traced(m: &BoxedMatrix) -> TensorMap {
    let mut words = [0; 16];
    let sizes = [
        m.element,
        m.rows,
        m.width,
        m.tile.0,
        m.tile.1,
        usize::from(m.swizzled),
    ];
    words[0] = m.address.0;
    for (word, size) in words[1..].iter_mut().zip(sizes) {
        *word = size as u64;
    }
    TensorMap { words }
}
