//! What is asked of a measurement.

use crate::allocation::WeightGroup;
use crate::methods::Method;
use nq_formats::{AffineScheme, Bits, Group, Progress, WeightStore, Zeros};

/// What groups are rounded to, to see what it costs.
pub(super) const PROBE: AffineScheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);

/// Bytes of logits that are held at once.
pub(super) const LOGITS: usize = 64 << 20;

/// A measurement to be made.
pub struct Probe<'a> {
    /// The source's weights.
    pub store: &'a dyn WeightStore,
    /// Sequences to measure on, all of one length.
    pub text: &'a [Vec<u32>],
    /// The groups, as [`crate::allocation::groups`] lists them.
    pub groups: &'a [WeightGroup],
    /// The schemes to choose from.
    pub candidates: &'a [AffineScheme],
    /// What layers will be rounded by.
    pub method: &'a dyn Method,
    /// Text that it will go by; none if it needs nothing to go by.
    pub calibration: Option<&'a [Vec<u32>]>,
    /// Told of rows that went through a layer.
    pub progress: &'a dyn Progress,
}
