//! Settings of a measurement.

use crate::groups::WeightGroup;
use crate::methods::Method;
use nq_formats::{AffineScheme, Bits, Group, Progress, Scheme, WeightStore, Zeros};

/// The scheme that groups are rounded to, to measure the cost.
pub(super) const PROBE: AffineScheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);

/// Most bytes of logits held at once.
pub(super) const LOGITS: usize = 64 << 20;

/// A measurement to be made.
pub(crate) struct Probe<'a> {
    /// The source's weights.
    pub store: &'a dyn WeightStore,
    /// Sequences to measure on, all of one length.
    pub text: &'a [Vec<u32>],
    /// The groups, as [`crate::groups::groups`] lists them.
    pub groups: &'a [WeightGroup],
    /// The schemes to choose from.
    pub candidates: &'a [Scheme],
    /// The method that layers will be rounded by.
    pub method: &'a dyn Method,
    /// Calibration text for the method; `None` if it needs none.
    pub calibration: Option<&'a [Vec<u32>]>,
    /// Receives the number of rows that went through a layer.
    pub progress: &'a dyn Progress,
}
