//! Activations in the form that kernels read: permuted and padded like the weight's inputs, in
//! blocks of columns (rows of x), rounded if the kernel takes bf16 or integer codes.

use super::pack::UnitCodes;
use super::trellis::pack::InputScales;
use crate::memory::Buffer;
use nq_formats::trellis::Code;
use std::sync::Arc;

/// The layout of activations that a kernel needs.
#[derive(Clone, PartialEq)]
pub(crate) struct Layout {
    /// Number of inputs after permuting and padding.
    pub(crate) inputs: usize,
    /// Original index of each input, if they are permuted.
    pub(crate) order: Option<Arc<[u32]>>,
    /// Inputs per weight group, if the weight has zero-points and so needs sums of activations.
    pub(crate) sums: Option<usize>,
    /// Most columns in a block.
    pub(crate) columns: usize,
    /// Factors of the inputs of a trellis weight, which are then transformed.
    pub(crate) input_scales: Option<InputScales>,
    /// Type of the values.
    pub(crate) values: ActivationType,
}

/// Type of a kernel's activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ActivationType {
    /// Not rounded.
    F32,
    /// Pairs of bf16.
    Bf16,
    /// Codes of one or two signed bytes.
    Codes {
        /// Bytes per code: one for int8, two for int16.
        planes: usize,
        /// Inputs that share an activation scale.
        group: usize,
        /// Inputs that share both an activation and a weight scale.
        share: usize,
        /// True for codes in one piece of 16 bits, which start from 0.
        pairs: bool,
        /// The start value of the kernel's dot products, per unit of the codes' sum.
        start: i32,
        /// The codes of the weights, which determine the order within 8 activation codes.
        against: UnitCodes,
    },
    /// Quads of such codes, for trellis weights.
    Quads {
        /// Bytes per code.
        planes: usize,
        /// Inputs that share a scale.
        group: usize,
        /// What a product lacks, per unit of the codes' sum, before its weights are centred.
        start: f32,
        /// The weight's code.
        code: Code,
    },
}

/// Activations prepared for one pass; the buffers are kept for the next.
#[derive(Default)]
pub(crate) struct Prepared {
    /// Number of rows of x.
    pub(crate) rows: usize,
    /// Columns in a block; blocks past the last row are filled with zeros.
    pub(crate) width: usize,
    /// Inputs that share both scales (codes).
    pub(crate) share: usize,
    /// Quads of a row, and groups that share a scale (quads).
    pub(crate) quads: usize,
    pub(crate) groups: usize,
    /// f32: `[blocks, inputs, width]`.
    pub(crate) floats: Buffer<f32>,
    /// bf16: `[blocks, inputs / 2, width]`, two values each, the first in the low half.
    pub(crate) pairs: Buffer<u32>,
    /// Codes: `[blocks, inputs / 4, width, planes, 4]`, high bytes before low ones; in one piece of 16 bits: `[blocks,
    /// inputs / 4, 2, width, 2]`, of four codes the first and third, then the others. Quads: `[blocks, quads / 4, width,
    /// planes, 16]`.
    pub(crate) codes: Buffer<i8>,
    /// Codes: `[blocks, inputs / share, width]`; quads: times a value of the weight's code.
    pub(crate) scales: Buffer<f32>,
    /// Codes: `[blocks, inputs / share, width, planes]`, the start values of dot products.
    pub(crate) starts: Buffer<i32>,
    /// Sum of the values in each weight group: `[blocks, groups, width]`.
    pub(crate) sums: Buffer<f32>,
}

impl Prepared {
    /// Number of blocks of columns.
    pub(crate) fn blocks(&self) -> usize {
        self.rows.div_ceil(self.width)
    }

    /// Number of columns, including fill.
    pub(crate) fn columns(&self) -> usize {
        self.blocks() * self.width
    }
}
