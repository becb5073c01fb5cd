//! Kinds of packed weights, and which of them holds what.

use super::layout::{SPAN, TILE};
use crate::driver::GpuInfo;
use nq_formats::trellis::TrellisScheme;
use nq_formats::{Bits, Group, Levels, Scales, TwoLevel, Weight, Zeros};
use nq_kernels::registry::WeightKind;
use nq_kernels::{Error, Result};

/// Most parts of a product that EXL3's kernels multiply.
pub(crate) const MOST_PARTS: usize = 4;

/// Bits of the parts of a product in EXL3's codes, in order; 0: there is no such part.
pub(crate) type PartBits = [u8; MOST_PARTS];

/// The properties of a packed weight that select its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackedKind {
    /// FP16 times a power of two.
    Fp16,
    /// Integer codes.
    Affine {
        /// Width of the codes.
        bits: Bits,
        /// Kind of zero-points.
        zeros: Zeros,
        /// Scale groups per span: 16, 8, 4, 2, or 1 for wider groups.
        groups: usize,
        /// True if scales are bytes times an f16 of the row.
        two_level: bool,
        /// True if codes index a table of levels, signed bytes.
        table: bool,
    },
    /// A trellis code, as files have it.
    Trellis(TrellisScheme),
    /// EXL3's codes, of each part in bits of its own.
    Exl3(PartBits),
}

/// The bits of the parts of a stack, if all are in EXL3's codes and not too many.
fn part_bits(parts: &[PackedKind]) -> Option<PartBits> {
    let mut bits = PartBits::default();
    if parts.is_empty() || parts.len() > MOST_PARTS {
        return None;
    }
    for (to, part) in bits.iter_mut().zip(parts) {
        let PackedKind::Exl3([own, ..]) = part else {
            return None;
        };
        *to = *own;
    }
    Some(bits)
}

impl PackedKind {
    /// The kind that `weight` packs to.
    ///
    /// # Errors
    /// [`Error::NoKernel`] for a dense weight that is not of a float type.
    pub fn of(weight: &Weight) -> Result<Self> {
        Self::new(WeightKind::of(weight), weight.dims().cols)
    }

    /// The kind that weights with this many inputs pack to: as [`PackedKind::of_stack`] of one.
    ///
    /// # Errors
    /// As [`PackedKind::of`].
    pub fn new(kind: WeightKind, inputs: usize) -> Result<Self> {
        Self::of_stack([kind], inputs)
    }

    /// The kind that a stack of weights with this many inputs packs to: their own where kernels read it; else, of those
    /// that have the values of all parts, the one of the fewest bytes; FP16 if there is none. Codes in activation
    /// order are sorted before ([`StackKind`](super::StackKind)); otherwise they are FP16.
    ///
    /// # Errors
    /// As [`PackedKind::of`].
    pub fn of_stack(kinds: impl IntoIterator<Item = WeightKind>, inputs: usize) -> Result<Self> {
        let parts = kinds.into_iter().map(|kind| Self::own(kind, inputs));
        let parts: Vec<Self> = parts.collect::<Result<_>>()?;
        let Some(&first) = parts.first() else {
            return Ok(PackedKind::Fp16);
        };
        let is_read = match first {
            PackedKind::Affine { .. } => Self::read().any(|kind| kind == first),
            PackedKind::Fp16 | PackedKind::Trellis(_) | PackedKind::Exl3(_) => true,
        };
        if let Some(bits) = part_bits(&parts) {
            return Ok(PackedKind::Exl3(bits));
        }
        if is_read && parts.iter().all(|part| *part == first) {
            return Ok(first);
        }
        let fitting = Self::read().filter(|kind| parts.iter().all(|part| kind.holds(*part)));
        let bytes = |kind: &Self| kind.code_bytes() + kind.meta_bytes();
        Ok(fitting.min_by_key(bytes).unwrap_or(PackedKind::Fp16))
    }

    /// What tells which kinds have the values of a weight: codes as wide as their values, which may be narrower than
    /// any kernel reads, in groups and with scales as they are.
    fn own(kind: WeightKind, inputs: usize) -> Result<Self> {
        let scheme = match kind {
            WeightKind::Dense(dtype) if !dtype.is_float() => {
                return Err(Error::NoKernel {
                    op: "linear",
                    scheme: kind.to_string(),
                    activations: "f32".into(),
                    device: "cuda".into(),
                });
            }
            WeightKind::Affine { scheme, act_order } if !act_order => scheme,
            WeightKind::Trellis(scheme) => return Ok(PackedKind::Trellis(scheme)),
            WeightKind::Exl3(scheme) => {
                let bits = scheme.whole_bits().map(|bits| [bits as u8, 0, 0, 0]);
                return Ok(bits.map_or(PackedKind::Fp16, PackedKind::Exl3));
            }
            _ => return Ok(PackedKind::Fp16),
        };
        let groups = match scheme.group {
            Group::Channel => 1,
            Group::Size(n) if n as usize >= inputs => 1,
            Group::Size(n @ (16 | 32 | 64 | 128)) => SPAN / n as usize,
            Group::Size(n) if (n as usize).is_multiple_of(SPAN) => 1,
            Group::Size(_) => return Ok(PackedKind::Fp16),
        };
        // Kernels have an f16 of each row for a span, and offsets within seven bits.
        let in_levels = matches!(scheme.scales, Scales::TwoLevel(TwoLevel { bits, span })
            if span.size(inputs).is_multiple_of(SPAN) | (span.count(inputs) == 1)
                && (bits < Bits::B8 || scheme.zeros != Zeros::Offset));
        let table = scheme.levels == Levels::Table;
        Ok(PackedKind::Affine {
            bits: scheme.bits,
            zeros: scheme.zeros,
            groups,
            two_level: in_levels,
            table,
        })
    }

    /// The kinds of integer codes that kernels read.
    fn read() -> impl Iterator<Item = Self> {
        // Bits, zero-points, scales in two levels, a table, groups of a span.
        const GROUPS: &[usize] = &[1, 2, 4, 8];
        const KINDS: [(Bits, Zeros, bool, bool, &[usize]); 18] = [
            (Bits::B4, Zeros::None, false, false, GROUPS),
            (Bits::B4, Zeros::Integer, false, false, GROUPS),
            (Bits::B4, Zeros::Offset, false, false, GROUPS),
            (Bits::B8, Zeros::None, false, false, GROUPS),
            (Bits::B8, Zeros::Integer, false, false, GROUPS),
            (Bits::B8, Zeros::Offset, false, false, &[8]),
            (Bits::B4, Zeros::Integer, true, false, GROUPS),
            (Bits::B5, Zeros::Integer, true, false, GROUPS),
            (Bits::B6, Zeros::None, true, false, GROUPS),
            (Bits::B4, Zeros::Offset, true, false, &[8]),
            (Bits::B5, Zeros::Offset, true, false, &[8]),
            (Bits::B3, Zeros::None, true, true, &[16]),
            (Bits::B6, Zeros::None, true, false, &[16]),
            (Bits::B6, Zeros::Offset, true, false, &[16]),
            (Bits::B4, Zeros::None, true, true, &[8]),
            (Bits::B4, Zeros::None, false, true, &[16]),
            (Bits::B2, Zeros::Offset, true, false, &[16]),
            (Bits::B8, Zeros::Offset, true, false, &[16]),
        ];
        (KINDS.into_iter()).flat_map(|(bits, zeros, two_level, table, groups)| {
            groups.iter().map(move |&groups| PackedKind::Affine {
                bits,
                zeros,
                groups,
                two_level,
                table,
            })
        })
    }

    /// Number of a kind in `with_block_scheme` of `cuda/weights.cuh`, if it is one of these.
    pub(crate) fn block_scheme(self) -> Option<usize> {
        let PackedKind::Affine {
            bits,
            zeros,
            groups,
            two_level,
            table,
        } = self
        else {
            return None;
        };
        match (bits, zeros, groups) {
            (Bits::B4, Zeros::None, 8) if two_level && table => Some(5),
            (Bits::B4, Zeros::None, 16) if table => Some(6),
            _ if !two_level => None,
            (Bits::B4, Zeros::Offset, 8) => Some(0),
            (Bits::B5, Zeros::Offset, 8) => Some(1),
            (Bits::B3, Zeros::None, 16) => Some(2),
            (Bits::B6, Zeros::None, 16) => Some(3),
            (Bits::B6, Zeros::Offset, 16) => Some(4),
            (Bits::B2, Zeros::Offset, 16) => Some(7),
            (Bits::B8, Zeros::Offset, 16) => Some(8),
            _ => None,
        }
    }

    /// True if codes count from the midpoint: where there are no zero-points, and in groups of 16, not of 2 bits.
    pub(super) fn is_centred(self) -> bool {
        match self {
            PackedKind::Affine {
                zeros: Zeros::None, ..
            } => true,
            PackedKind::Affine { bits, groups, .. } => groups == 16 && bits > Bits::B2,
            _ => false,
        }
    }

    /// Groups of scales that share an offset or zero-point: two of 16 inputs where codes have 6 bits.
    pub(super) fn groups_of_point(self) -> usize {
        let halves = PackedKind::Affine {
            bits: Bits::B6,
            zeros: Zeros::Offset,
            groups: 16,
            two_level: true,
            table: false,
        };
        1 + usize::from(self == halves)
    }

    /// True if this kind has room for the values of a weight whose own kind is `part`. Scales in two levels are those of
    /// groups too; weights without zero-points have them at the midpoint, and a table of even levels; levels are codes of
    /// 8 bits.
    fn holds(self, part: Self) -> bool {
        let (
            PackedKind::Affine {
                bits,
                zeros,
                groups,
                two_level,
                table,
            },
            PackedKind::Affine {
                bits: own_bits,
                zeros: own_zeros,
                groups: own_groups,
                two_level: own_two_level,
                table: own_table,
            },
        ) = (self, part)
        else {
            return false;
        };
        let midpoints =
            own_zeros == Zeros::None && (zeros != Zeros::None && !two_level || self.is_centred());
        let points = zeros == own_zeros || midpoints;
        // Codes that count from zero may begin at the midpoint, and offsets may be those of fewer groups.
        let above = own_zeros == Zeros::Offset && self.is_centred();
        let points = points && (!above || own_groups <= groups / self.groups_of_point());
        let own_bits = if own_table && !table {
            Bits::B8
        } else {
            own_bits
        };
        bits.width() >= own_bits.width() + usize::from(above)
            && points
            && groups >= own_groups
            && two_level <= own_two_level
    }

    /// What kernels that read neither trellis codes nor EXL3's read instead.
    pub(crate) fn without_trellis(self) -> Self {
        match self {
            PackedKind::Trellis(_) | PackedKind::Exl3(_) => PackedKind::Fp16,
            kind => kind,
        }
    }

    /// Its name in breakdowns.
    pub fn name(self) -> &'static str {
        match self {
            PackedKind::Fp16 => "fp16",
            PackedKind::Trellis(_) => "trellis",
            PackedKind::Exl3(_) => "exl3",
            PackedKind::Affine { bits, .. } => match bits {
                Bits::B2 => "int2",
                Bits::B3 => "int3",
                Bits::B4 => "int4",
                Bits::B5 => "int5",
                Bits::B6 => "int6",
                _ => "int8",
            },
        }
    }

    /// Bits per code: 2 to 6, 8 or 16; 16 for trellis codes, which have no packed layout.
    pub fn bits(self) -> usize {
        match self {
            PackedKind::Fp16 | PackedKind::Trellis(_) | PackedKind::Exl3(_) => 16,
            PackedKind::Affine { bits, .. } => bits.width(),
        }
    }

    /// `ORDER` of `cuda/weights.cuh`: 4, 8 or 16 bits, whose codes lie in the same order.
    pub(crate) fn order(self) -> usize {
        match self.bits() {
            bits @ (8 | 16) if self.groups() < 16 => bits,
            _ => 4,
        }
    }

    /// Number of stages in which kernels stream the codes of a record.
    pub(crate) fn stages(self) -> usize {
        self.order() / 4
    }

    /// Bytes of codes in one of them.
    pub(crate) fn stage_bytes(self) -> usize {
        self.code_bytes() / self.stages()
    }

    /// Bytes of codes in one record.
    pub(crate) fn code_bytes(self) -> usize {
        TILE * SPAN * self.bits() / 8
    }

    /// Bytes of scales and zero-points in one record.
    pub(crate) fn meta_bytes(self) -> usize {
        match self {
            PackedKind::Fp16 | PackedKind::Trellis(_) | PackedKind::Exl3(_) => 0,
            PackedKind::Affine {
                bits,
                zeros,
                groups,
                two_level,
                ..
            } => {
                let scale = if two_level { 16 } else { 32 };
                let zero = match (zeros, bits) {
                    (Zeros::None, _) => 0,
                    (Zeros::Integer, Bits::B4) => 8,
                    (Zeros::Integer, _) => 16,
                    (Zeros::Offset, _) => scale / self.groups_of_point(),
                };
                (self.rows_bytes() + groups * (scale + zero)).next_multiple_of(16)
            }
        }
    }

    /// Bytes in one record of what is of rows: their scales and offsets, where these are in two levels, and tables.
    pub(super) fn rows_bytes(self) -> usize {
        let PackedKind::Affine {
            bits, zeros, table, ..
        } = self
        else {
            return 0;
        };
        let levels = match (self.is_two_level(), zeros) {
            (false, _) => 0,
            (true, Zeros::Offset) => 64,
            (true, _) => 32,
        };
        levels + if table { 2 << bits.width() } else { 0 }
    }

    /// Bytes of a stage in the rings of `cuda/ring.cuh`: codes, and scales and zero-points of a record.
    pub(crate) fn ring_bytes(self, info: &GpuInfo) -> usize {
        let align = if info.has_large_blocks() { 128 } else { 16 };
        self.stage_bytes() + self.meta_room().next_multiple_of(align)
    }

    /// `META` of `cuda/weights.cuh`, padded to 16 bytes.
    pub(crate) fn meta_room(self) -> usize {
        match self {
            PackedKind::Fp16 | PackedKind::Trellis(_) | PackedKind::Exl3(_) => 0,
            PackedKind::Affine {
                bits,
                zeros,
                groups,
                two_level,
                table,
            } => PackedKind::Affine {
                bits,
                zeros,
                groups: groups.max(4),
                two_level,
                table,
            }
            .meta_bytes(),
        }
    }

    /// True if scales are in two levels.
    pub(crate) fn is_two_level(self) -> bool {
        matches!(
            self,
            PackedKind::Affine {
                two_level: true,
                ..
            }
        )
    }

    /// True if codes index a table of levels.
    pub(crate) fn has_table(self) -> bool {
        matches!(self, PackedKind::Affine { table: true, .. })
    }

    /// Scale groups per span; 1 without scales.
    pub fn groups(self) -> usize {
        match self {
            PackedKind::Fp16 | PackedKind::Trellis(_) | PackedKind::Exl3(_) => 1,
            PackedKind::Affine { groups, .. } => groups,
        }
    }

    /// Bytes of a record's codes.
    pub(crate) fn codes_bytes(self) -> usize {
        TILE * SPAN * self.bits() / 8
    }

    /// Number of the kind of zero-points in `cuda/weights.cuh`.
    pub(crate) fn zero_code(self) -> usize {
        match self {
            PackedKind::Affine {
                zeros: Zeros::Integer,
                ..
            } => 1,
            PackedKind::Affine {
                zeros: Zeros::Offset,
                ..
            } => 2,
            _ => 0,
        }
    }
}
