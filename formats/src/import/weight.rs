//! A quantized weight as tools store it.

use crate::error::Result;
use crate::pack;
use crate::scheme::{AffineScheme, Bits, Group, Zeros};
use crate::tensor::Tensor;
use crate::weight::{AffineWeight, ZeroPoints};
use bytes::Bytes;
use half::f16;
use nq_model::Dims;
use rayon::prelude::*;
use std::sync::Arc;

/// A quantized weight in a tool's own representation, in canonical order.
pub(crate) struct ImportedWeight {
    pub(crate) bits: Bits,
    pub(crate) group: Group,
    /// `[out, bits.bytes(in)]`, canonical packing.
    pub(crate) codes: Bytes,
    /// `[out, groups]`, exactly as stored.
    pub(crate) scales: Vec<f32>,
    /// `[out, groups]`, not packed; `None` if symmetric.
    pub(crate) zeros: Option<Vec<u8>>,
    /// `[in]`; `None` if input `i` is in group `i / group size`.
    pub(crate) g_idx: Option<Arc<[u32]>>,
}

/// The scheme of codes in such groups with these zero-points. If all are at the midpoint it is symmetric: the same
/// numbers in fewer bytes.
pub(super) fn scheme(bits: Bits, group: Group, zeros: Option<&[u8]>) -> AffineScheme {
    let middle = bits.midpoint();
    let zeros = match zeros {
        Some(zeros) if zeros.iter().any(|&z| z != middle) => Zeros::Integer,
        _ => Zeros::None,
    };
    AffineScheme::new(bits, group, zeros)
}

impl ImportedWeight {
    pub(super) fn into_affine(self, Dims { rows, cols }: Dims) -> Result<AffineWeight> {
        let groups = self.group.count(cols);
        let scheme = scheme(self.bits, self.group, self.zeros.as_deref());
        let zeros = match self.zeros {
            Some(z) if scheme.zeros == Zeros::Integer => {
                ZeroPoints::Integer(pack::pack_rows(self.bits, &z, groups).into())
            }
            _ => ZeroPoints::None,
        };
        let scales = self.scales.iter().map(|&s| f16::from_f32(s)).collect();
        AffineWeight::new(
            scheme,
            Dims::new(rows, cols),
            self.codes,
            scales,
            zeros,
            self.g_idx,
        )
    }

    /// `s * (q - z)` in f32, with the scales' full precision.
    pub(super) fn into_dense(self, Dims { rows, cols }: Dims) -> Result<Tensor> {
        let groups = self.group.count(cols);
        let size = self.group.size(cols).max(1);
        let stride = self.bits.bytes(cols);
        let middle = self.bits.midpoint();
        let mut values = vec![0.0; rows * cols];
        values
            .par_chunks_mut(cols.max(1))
            .enumerate()
            .for_each(|(r, row)| {
                let packed = &self.codes[r * stride..(r + 1) * stride];
                let mut codes = vec![0; cols];
                pack::unpack_row(self.bits, packed, &mut codes);
                for (i, w) in row.iter_mut().enumerate() {
                    let g = self.g_idx.as_ref().map_or(i / size, |g| g[i] as usize);
                    let z = self.zeros.as_ref().map_or(middle, |z| z[r * groups + g]);
                    let q = i16::from(codes[i]) - i16::from(z);
                    *w = self.scales[r * groups + g] * f32::from(q);
                }
            });
        Tensor::from_f32(vec![rows, cols], values)
    }
}
