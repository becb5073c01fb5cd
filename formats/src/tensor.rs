//! A dense tensor's bytes with their type and shape.

use crate::error::{Error, Result};
use bytes::Bytes;
use half::{bf16, f16};
use nq_model::DType;
use std::ops::Range;

/// A dense row-major tensor. Its bytes (little endian) may be a view of a memory-mapped file,
/// of any alignment; cloning shares them.
#[derive(Clone, Debug)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    data: Bytes,
}

impl Tensor {
    /// A tensor over `data`, whose length must match `shape` and `dtype`.
    ///
    /// # Errors
    /// [`Error::Weight`] if the length differs or overflows.
    pub fn new(dtype: DType, shape: Vec<usize>, data: Bytes) -> Result<Self> {
        let want = shape
            .iter()
            .try_fold(dtype.size(), |n, &d| n.checked_mul(d))
            .filter(|&n| n == data.len());
        if want.is_none() {
            return Err(Error::Weight {
                what: "data length",
                expected: format!("{dtype} of shape {shape:?}"),
                found: format!("{} bytes", data.len()),
            });
        }
        Ok(Tensor { dtype, shape, data })
    }

    /// A tensor of f32 values.
    pub fn from_f32(shape: Vec<usize>, values: Vec<f32>) -> Result<Self> {
        Self::new(DType::F32, shape, Bytes::from_owner(ByteVec(values)))
    }

    /// The matrices of a tensor `[n, rows, cols]`, each below the one before it; other tensors as they are.
    pub(crate) fn stacked(mut self) -> Self {
        if let [n, rows, cols] = self.shape[..] {
            self.shape = vec![n * rows, cols];
        }
        self
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The raw little-endian bytes.
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// All elements as f32 (exact for f16, bf16 and f32; rounded for f64).
    ///
    /// # Errors
    /// [`Error::Weight`] for element types that are not floats.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.len()];
        self.copy_f32(0, &mut out)?;
        Ok(out)
    }

    /// Elements `start .. start + out.len()` as f32, for reading a large tensor in parts.
    ///
    /// # Errors
    /// [`Error::Weight`] for element types that are not floats, or a range past the end.
    pub fn copy_f32(&self, start: usize, out: &mut [f32]) -> Result<()> {
        let size = self.dtype.size();
        let end = start.checked_add(out.len()).filter(|&e| e <= self.len());
        let Some(end) = end else {
            return Err(Error::Weight {
                what: "element range",
                expected: format!("within {} elements", self.len()),
                found: format!("{} elements from {start}", out.len()),
            });
        };
        let src = &self.data[start * size..end * size];
        match self.dtype {
            DType::F32 => {
                for (o, b) in out.iter_mut().zip(src.as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            DType::F16 => {
                for (o, b) in out.iter_mut().zip(src.as_chunks::<2>().0) {
                    *o = f16::from_le_bytes(*b).to_f32();
                }
            }
            DType::BF16 => {
                for (o, b) in out.iter_mut().zip(src.as_chunks::<2>().0) {
                    *o = bf16::from_le_bytes(*b).to_f32();
                }
            }
            DType::F64 => {
                for (o, b) in out.iter_mut().zip(src.as_chunks::<8>().0) {
                    *o = f64::from_le_bytes(*b) as f32;
                }
            }
            other => {
                return Err(Error::Weight {
                    what: "element type",
                    expected: "a float type".into(),
                    found: other.to_string(),
                });
            }
        }
        Ok(())
    }
}

/// Lets [`Bytes`] own a `Vec<f32>` without copying it.
struct ByteVec(Vec<f32>);

impl AsRef<[u8]> for ByteVec {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// The rows `rows` of `stride` bytes.
pub(crate) fn rows_of(data: &Bytes, stride: usize, rows: &[Range<usize>]) -> Bytes {
    let bytes = |r: &Range<usize>| r.start * stride..r.end * stride;
    match rows {
        [one] => data.slice(bytes(one)),
        rows => {
            let parts: Vec<&[u8]> = rows.iter().map(|r| &data[bytes(r)]).collect();
            parts.concat().into()
        }
    }
}
