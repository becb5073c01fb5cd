//! A kernel for the Linear operation, and what it makes of weights and activations.

use super::input::{ActivationType, Layout, Prepared};
use super::pack::{PackedZeros, PanelWeight, UnitCodes};
use super::trellis::pack::PANELS;
use crate::simd::LANES;
use crate::table::KernelTable;
use nq_kernels::isa::Isa;
use nq_kernels::registry::{Activations, KernelInfo};
use std::ops::Range;

/// Some panels of a product.
pub(super) struct PanelProduct<'a> {
    pub(super) kernel: &'a LinearKernel,
    pub(super) table: &'a KernelTable,
    pub(super) w: &'a PanelWeight,
    /// All columns.
    pub(super) x: &'a Prepared,
    /// Which of the weight's panels.
    pub(super) panels: Range<usize>,
}

/// Writes `[panels, columns, 16]`.
///
/// # Safety
/// The panels are inside the weight; the activations were prepared for it with the row's
/// layout; the output is large enough; the table's instruction set is available.
pub(super) type RunPanels = unsafe fn(&PanelProduct<'_>, &mut [f32]);

/// A kernel for the Linear operation on the CPU.
pub struct LinearKernel {
    /// Name, and the requests that it serves.
    pub info: KernelInfo,
    /// The instruction set it is compiled for.
    pub isa: Isa,
    pub(super) codes: UnitCodes,
    /// Most columns in a block of activations.
    pub(super) columns: usize,
    /// True if it multiplies integers of 16 bits: [`Pairs`](super::int8::Pairs).
    pub(super) pairs: bool,
    /// The start value of integer dot products, per unit of the codes' sum.
    pub(super) start: i32,
    /// Bytes per activation code.
    pub(super) planes: usize,
    pub(super) run: RunPanels,
}

impl LinearKernel {
    /// The codes of weights packed for this kernel.
    pub(crate) fn codes(&self) -> UnitCodes {
        self.codes
    }

    /// The layout of activations for weight `w`.
    pub(crate) fn layout(&self, w: &PanelWeight, activations: Activations) -> Layout {
        let asymmetric = !matches!(w.zeros, PackedZeros::None);
        Layout {
            inputs: w.inputs,
            order: w.order.clone(),
            sums: asymmetric.then_some(w.group),
            columns: self.columns,
            input_scales: w.input_scales().cloned(),
            values: match activations {
                Activations::F32 => ActivationType::F32,
                Activations::Bf16 => ActivationType::Bf16,
                Activations::Int8 { group } | Activations::Int16 { group }
                    if w.trellis.is_some() =>
                {
                    ActivationType::Quads {
                        planes: planes(activations),
                        group,
                        // Bytes are centred by 127.5; a kernel may see them less 128.
                        start: self.start as f32 + 0.5,
                        code: w.trellis().code(),
                    }
                }
                Activations::Int8 { group } | Activations::Int16 { group } => {
                    ActivationType::Codes {
                        planes: planes(activations),
                        group,
                        share: share(w.group, group),
                        pairs: self.pairs,
                        start: self.start,
                        against: w.codes,
                    }
                }
            },
        }
    }

    /// Bytes per activation code.
    pub(super) fn planes(&self) -> usize {
        self.planes
    }

    /// Panels that it must be called with: a multiple of this, or up to the last.
    pub(crate) fn step(&self) -> usize {
        match self.codes {
            UnitCodes::Trellis | UnitCodes::Exl3 => PANELS,
            _ => 1,
        }
    }

    /// See [`RunPanels`].
    ///
    /// # Safety
    /// Like [`RunPanels`].
    pub(crate) unsafe fn run(
        &self,
        table: &KernelTable,
        w: &PanelWeight,
        x: &Prepared,
        panels: Range<usize>,
        out: &mut [f32],
    ) {
        assert!(w.codes == self.codes && panels.end <= w.panels());
        assert!(out.len() >= panels.len() * x.columns() * LANES);
        let p = PanelProduct {
            kernel: self,
            table,
            w,
            x,
            panels,
        };
        // SAFETY: passed on.
        unsafe { (self.run)(&p, out) }
    }
}

/// Inputs that share both the weight's and the activations' scale. Both group sizes are powers of
/// two, or the weight's group is a whole row, which is padded to whole activation groups.
pub(crate) fn share(weight_group: usize, activation_group: usize) -> usize {
    if weight_group.is_multiple_of(activation_group) {
        activation_group
    } else {
        weight_group
    }
}

/// Bytes per code of integer activations.
pub(super) fn planes(activations: Activations) -> usize {
    match activations {
        Activations::Int16 { .. } => 2,
        _ => 1,
    }
}
