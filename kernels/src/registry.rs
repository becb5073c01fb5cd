//! The registry of kernels. Its key is (operation, weight scheme, activation
//! type, rows `m`, device capabilities); each device module contributes its rows, and
//! tests, benches and `--breakdown` iterate them.

use nq_formats::{
    AffineScheme, Exl3Scheme, QuantizedWeight, Scales, Scheme, TrellisScheme, Weight,
};
use nq_model::{DType, Dims};
use std::fmt;
use std::ops::RangeInclusive;

/// The type that a Linear's input is rounded to before the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activations {
    /// Not rounded: f32 values, f32 products and sums.
    F32,
    /// bf16; products of pairs, sums in f32. For bf16 weights.
    Bf16,
    /// Signed 8-bit codes with one f32 scale per `group` inputs (absmax / 127).
    Int8 {
        /// Inputs that share a scale.
        group: usize,
    },
    /// Signed codes of almost 16 bits with one f32 scale per `group` inputs (absmax /
    /// 32512): two signed bytes each, so that integer dot products are two of int8.
    Int16 {
        /// Inputs that share a scale.
        group: usize,
    },
}

impl fmt::Display for Activations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Activations::F32 => f.write_str("f32"),
            Activations::Bf16 => f.write_str("bf16"),
            Activations::Int8 { group } => write!(f, "int8 g{group}"),
            Activations::Int16 { group } => write!(f, "int16 g{group}"),
        }
    }
}

/// Family of kernels to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KernelSet {
    /// The fastest for the device.
    #[default]
    Fused,
    /// Plain, unfused kernels: the baseline and the oracle.
    Reference,
}

impl fmt::Display for KernelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KernelSet::Fused => "fused",
            KernelSet::Reference => "reference",
        })
    }
}

/// The properties of a weight that select a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightKind {
    /// Unquantized.
    Dense(DType),
    /// Affine; weights with `act_order` have a `g_idx`.
    Affine {
        /// Bits, group, zero-points.
        scheme: AffineScheme,
        /// True if inputs are assigned to groups by a `g_idx`.
        act_order: bool,
    },
    /// In a trellis code.
    Trellis(TrellisScheme),
    /// In a code of EXL3.
    Exl3(Exl3Scheme),
}

impl WeightKind {
    /// The kind of `weight`.
    pub fn of(weight: &Weight) -> Self {
        match weight {
            Weight::Dense(t) => WeightKind::Dense(t.dtype()),
            Weight::Quantized(QuantizedWeight::Affine(a)) => WeightKind::Affine {
                scheme: a.scheme(),
                act_order: a.g_idx().is_some(),
            },
            Weight::Quantized(QuantizedWeight::Trellis(t)) => WeightKind::Trellis(t.scheme()),
            Weight::Quantized(QuantizedWeight::Exl3(w)) => WeightKind::Exl3(w.scheme()),
            // `QuantizedWeight` is non-exhaustive only for users outside these crates.
            Weight::Quantized(_) => unreachable!("a scheme without a WeightKind"),
        }
    }

    /// True if its inputs are in groups of an order of their own.
    pub const fn is_ordered(self) -> bool {
        matches!(
            self,
            WeightKind::Affine {
                act_order: true,
                ..
            }
        )
    }

    /// The kind of weights in `scheme`, whose inputs are in groups of their own order if `act_order`.
    pub const fn in_scheme(scheme: Scheme, act_order: bool) -> Self {
        match scheme {
            Scheme::Affine(scheme) => WeightKind::Affine { scheme, act_order },
            Scheme::Trellis(scheme) => WeightKind::Trellis(scheme),
            Scheme::Exl3(scheme) => WeightKind::Exl3(scheme),
        }
    }

    /// The kind of a stack of weights of this kind and of `other`, which have as many inputs; `None` if they are not to be
    /// one. Unquantized weights always are, whatever their types; those of EXL3 in one code with one number of bits.
    pub fn stacked(self, other: Self) -> Option<Self> {
        match (self, other) {
            (WeightKind::Dense(_), WeightKind::Dense(_)) => Some(self),
            (
                WeightKind::Affine {
                    scheme,
                    act_order: false,
                },
                WeightKind::Affine {
                    scheme: other,
                    act_order: false,
                },
            ) => Some(WeightKind::Affine {
                scheme: scheme.stacked(&other)?,
                act_order: false,
            }),
            (WeightKind::Exl3(own), WeightKind::Exl3(other)) if own == other => Some(self),
            _ => None,
        }
    }

    /// The kind with the same values in a scheme that kernels support ([`AffineScheme::expanded`]).
    #[must_use]
    pub const fn expanded(self) -> Self {
        match self {
            WeightKind::Dense(_) | WeightKind::Trellis(_) | WeightKind::Exl3(_) => self,
            WeightKind::Affine { scheme, act_order } => WeightKind::Affine {
                scheme: scheme.expanded(),
                act_order,
            },
        }
    }

    /// The kind with f16 scales that has the same codes, which may number the levels of a table.
    #[must_use]
    pub const fn in_table(self) -> Self {
        match self {
            WeightKind::Dense(_) | WeightKind::Trellis(_) | WeightKind::Exl3(_) => self,
            WeightKind::Affine { scheme, act_order } => WeightKind::Affine {
                scheme: AffineScheme {
                    scales: Scales::Half,
                    ..scheme
                },
                act_order,
            },
        }
    }

    /// The kind in which every device can hold such weights exactly, with 4 or 8 bits
    /// ([`AffineScheme::held`]).
    #[must_use]
    pub const fn held(self) -> Self {
        match self {
            WeightKind::Dense(_) | WeightKind::Trellis(_) | WeightKind::Exl3(_) => self,
            WeightKind::Affine { scheme, act_order } => WeightKind::Affine {
                scheme: scheme.held(),
                act_order,
            },
        }
    }

    /// Bytes of a weight `[out, inputs]` of this kind in canonical form, as it is read.
    pub fn bytes(self, dims: Dims) -> usize {
        let (out, inputs) = dims.pair();
        match self {
            WeightKind::Dense(dtype) => out * inputs * dtype.size(),
            WeightKind::Affine { scheme, .. } => scheme.bytes(out, inputs),
            WeightKind::Trellis(scheme) => scheme.bytes(out, inputs),
            WeightKind::Exl3(scheme) => scheme.bytes(out, inputs),
        }
    }
}

impl fmt::Display for WeightKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightKind::Dense(d) => d.fmt(f),
            WeightKind::Affine { scheme, act_order } => {
                scheme.fmt(f)?;
                f.write_str(if *act_order { " act-order" } else { "" })
            }
            WeightKind::Trellis(scheme) => scheme.fmt(f),
            WeightKind::Exl3(scheme) => scheme.fmt(f),
        }
    }
}

/// Description of a kernel, for any device.
#[derive(Clone, Debug)]
pub struct KernelInfo {
    /// File name = registry name = test name = bench name.
    pub name: &'static str,
    /// The instruction set or compute capability that it needs, as displayed.
    pub requires: &'static str,
    /// True for the weights it serves.
    pub weights: fn(WeightKind) -> bool,
    /// True for the activation types it serves.
    pub activations: fn(Activations) -> bool,
    /// Row counts it serves.
    pub rows: RangeInclusive<usize>,
}

impl KernelInfo {
    /// True if the kernel serves this request.
    pub fn serves(&self, weights: WeightKind, activations: Activations, rows: usize) -> bool {
        (self.weights)(weights) && (self.activations)(activations) && self.rows.contains(&rows)
    }
}
