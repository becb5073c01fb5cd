//! Activations as kernels read them: permuted and padded like the weight's inputs, in
//! blocks of columns (rows of x), rounded if the kernel takes bf16 or integer codes.

use super::pack::Codes;
use crate::cpu::memory::Buffer;
use std::sync::Arc;

/// What a kernel wants its activations to look like.
#[derive(Clone, PartialEq)]
pub(crate) struct Layout {
    /// Inputs after permuting and padding.
    pub(crate) inputs: usize,
    /// Where each comes from, if not from the same index.
    pub(crate) order: Option<Arc<[u32]>>,
    /// Inputs per weight group, if the weight has zero-points and so needs sums.
    pub(crate) sums: Option<usize>,
    /// Most columns in a block.
    pub(crate) columns: usize,
    /// How values are kept.
    pub(crate) values: Values,
}

/// How a kernel takes its activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Values {
    /// As they are.
    F32,
    /// Pairs of bf16.
    Bf16,
    /// Codes of one or two signed bytes.
    Codes {
        /// Bytes of a code: one for int8, two for int16.
        planes: usize,
        /// Inputs that share an activation scale.
        group: usize,
        /// Inputs that share both an activation and a weight scale.
        share: usize,
        /// What the kernel's dot products start from, per unit of the codes' sum.
        start: i32,
        /// What the codes meet: decides the order within 8 of them.
        against: Codes,
    },
}

/// Activations prepared for one pass; the buffers are kept for the next.
#[derive(Default)]
pub(crate) struct Prepared {
    /// Rows of x.
    pub(crate) rows: usize,
    /// Columns in a block; blocks past the last row are filled with zeros.
    pub(crate) width: usize,
    /// Inputs that share both scales (codes).
    pub(crate) share: usize,
    /// f32: `[blocks, inputs, width]`.
    pub(crate) floats: Buffer<f32>,
    /// bf16: `[blocks, inputs / 2, width]`, two values each, the first in the low half.
    pub(crate) pairs: Buffer<u32>,
    /// Codes: `[blocks, inputs / 4, width, planes, 4]`, high bytes before low ones.
    pub(crate) codes: Buffer<i8>,
    /// Codes: `[blocks, inputs / share, width]`.
    pub(crate) scales: Buffer<f32>,
    /// Codes: `[blocks, inputs / share, width, planes]`, what the dot products start from.
    pub(crate) starts: Buffer<i32>,
    /// Sum of the values in each weight group: `[blocks, groups, width]`.
    pub(crate) sums: Buffer<f32>,
}

impl Prepared {
    /// Blocks of columns.
    pub(crate) fn blocks(&self) -> usize {
        self.rows.div_ceil(self.width)
    }

    /// Columns in all, filled ones included.
    pub(crate) fn columns(&self) -> usize {
        self.blocks() * self.width
    }
}
