//! Quantization schemes: the real values that a weight's codes represent.
//!
//! An affine scheme means `w = s * q + o` within a group of consecutive inputs of one
//! output row. `q` is the *unsigned* code `0 ..= 2^bits - 1`, or the level that a table gives
//! for it; [`Zeros`] defines `o`. A scheme is a row of parameters: whatever their
//! combination, a device without kernels for it holds the weight exactly in 4 or 8 bits
//! ([`AffineScheme::held`]).

use crate::error::{Error, Result};
use crate::exl3::Exl3Scheme;
use crate::trellis::TrellisScheme;
use nq_model::Dims;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Number of bits of a code, from which all of its packing follows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "u32", try_from = "u32")]
pub struct Bits(u8);

impl Bits {
    /// Codes 0 to 3, four in a byte: of devices, not of files.
    pub const B2: Bits = Bits(2);
    /// Codes 0 to 7.
    pub const B3: Bits = Bits(3);
    /// Codes 0 to 15, two in a byte.
    pub const B4: Bits = Bits(4);
    /// Codes 0 to 31.
    pub const B5: Bits = Bits(5);
    /// Codes 0 to 63.
    pub const B6: Bits = Bits(6);
    /// Codes 0 to 255, each a byte.
    pub const B8: Bits = Bits(8);
    /// Every width of files, in ascending order.
    pub const ALL: [Bits; 5] = [Bits::B3, Bits::B4, Bits::B5, Bits::B6, Bits::B8];

    /// The width: 2 to 6 or 8.
    pub const fn width(self) -> usize {
        self.0 as usize
    }

    /// The greatest code, `2^bits - 1`.
    pub const fn max_code(self) -> u8 {
        (u16::MAX >> (16 - self.0)) as u8
    }

    /// The zero-point of a symmetric scheme, `2^(bits-1)`.
    pub const fn midpoint(self) -> u8 {
        1 << (self.0 - 1)
    }

    /// Widths of the planes in which codes are stored, lowest bits first. A width divides 8, so that no
    /// part of a code crosses a byte boundary.
    pub const fn planes(self) -> &'static [usize] {
        match self.0 {
            2 => &[2],
            3 => &[2, 1],
            4 => &[4],
            5 => &[4, 1],
            6 => &[4, 2],
            _ => &[8],
        }
    }

    /// Bytes that `n` codes of one row take; each row, and each of its planes, starts on a byte
    /// boundary.
    pub const fn bytes(self, n: usize) -> usize {
        let (planes, mut i, mut bytes) = (self.planes(), 0, 0);
        while i < planes.len() {
            bytes += (n * planes[i]).div_ceil(8);
            i += 1;
        }
        bytes
    }

    /// The width in which devices hold such codes: 4 or 8.
    pub const fn held(self) -> Bits {
        if self.0 <= 4 { Bits::B4 } else { Bits::B8 }
    }
}

impl fmt::Debug for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "B{}", self.0)
    }
}

impl From<Bits> for u32 {
    fn from(b: Bits) -> u32 {
        b.0.into()
    }
}

impl TryFrom<u32> for Bits {
    type Error = Error;
    fn try_from(n: u32) -> Result<Self> {
        let known = Bits::ALL.into_iter().find(|b| u32::from(*b) == n);
        known.ok_or_else(|| Error::Scheme {
            expected: "3, 4, 5, 6 or 8 bits".into(),
            found: n.to_string(),
        })
    }
}

/// Number of consecutive inputs of a row that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "GroupRepr", try_from = "GroupRepr")]
pub enum Group {
    /// This many inputs, at least 1; the last group of a row may be shorter.
    Size(u32),
    /// The whole row: one scale per output channel.
    Channel,
}

impl Group {
    /// Number of inputs in one full group of a row of `in_features`.
    pub const fn size(self, in_features: usize) -> usize {
        match self {
            Group::Size(n) => n as usize,
            Group::Channel => in_features,
        }
    }

    /// Number of groups in a row of `in_features`.
    pub const fn count(self, in_features: usize) -> usize {
        match self {
            Group::Size(n) => in_features.div_ceil(n as usize),
            Group::Channel => 1,
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum GroupRepr {
    Size(u32),
    Name(String),
}

impl From<Group> for GroupRepr {
    fn from(g: Group) -> Self {
        match g {
            Group::Size(n) => GroupRepr::Size(n),
            Group::Channel => GroupRepr::Name("channel".into()),
        }
    }
}

impl TryFrom<GroupRepr> for Group {
    type Error = Error;
    fn try_from(r: GroupRepr) -> Result<Self> {
        match r {
            GroupRepr::Size(n) if n > 0 => Ok(Group::Size(n)),
            GroupRepr::Name(s) if s == "channel" => Ok(Group::Channel),
            GroupRepr::Size(n) => Err(Error::Scheme {
                expected: "a group size above 0".into(),
                found: n.to_string(),
            }),
            GroupRepr::Name(s) => Err(Error::Scheme {
                expected: "a group size or \"channel\"".into(),
                found: s,
            }),
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Group::Size(n) => write!(f, "g{n}"),
            Group::Channel => f.write_str("channel"),
        }
    }
}

/// Source of the offset `o` in `w = s * q + o`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Zeros {
    /// Symmetric: `o = -s * 2^(bits-1)`, or `-s * 128` with a table of levels; nothing is stored.
    None,
    /// An integer zero-point `z` per group, as wide as the values of codes: `o = -s * z`.
    Integer,
    /// A float offset per group, stored itself (GGUF minima).
    Offset,
}

/// How the scales of groups are stored (and, in the same way, the offsets of [`Zeros::Offset`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "Option<TwoLevel>", from = "Option<TwoLevel>")]
pub enum Scales {
    /// An f16 per group.
    #[default]
    Half,
    /// In two levels: a shared f16 times a small integer, rounded to f16.
    TwoLevel(TwoLevel),
}

/// Scales that are products of a small integer per group and an f16 that several groups share.
///
/// The integers are unsigned, except those of scales with [`Zeros::None`]: these are signed and
/// stored with `2^(bits-1)` added. Their sign tells which end of a group reaches one step further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TwoLevel {
    /// Width of the integers.
    pub bits: Bits,
    /// Number of inputs that share an f16: whole groups.
    pub span: Group,
}

/// Steps between the values of neighbouring codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Levels {
    /// Equal steps: the value of a code is the code itself.
    #[default]
    Even,
    /// The weight has a table with an 8-bit code for each code; everything else is as with 8-bit codes.
    Table,
}

/// An affine scheme: how a weight is stored and what its codes mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AffineScheme {
    /// Width of a code.
    pub bits: Bits,
    /// Inputs that share a scale.
    pub group: Group,
    /// How zero-points are stored.
    pub zeros: Zeros,
    /// How scales are stored.
    #[serde(default, skip_serializing_if = "Scales::is_half")]
    pub scales: Scales,
    /// Values of the codes.
    #[serde(default, skip_serializing_if = "Levels::is_even")]
    pub levels: Levels,
}

/// How a quantized weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Integer codes with scales of groups.
    Affine(AffineScheme),
    /// Paths through a trellis.
    Trellis(TrellisScheme),
    /// A code of EXL3, which nq reads and does not write.
    Exl3(Exl3Scheme),
}

impl Scheme {
    /// The affine scheme, if it is one.
    pub const fn affine(self) -> Option<AffineScheme> {
        match self {
            Scheme::Affine(scheme) => Some(scheme),
            Scheme::Trellis(_) | Scheme::Exl3(_) => None,
        }
    }

    /// The trellis scheme, if it is one.
    pub const fn trellis(self) -> Option<TrellisScheme> {
        match self {
            Scheme::Affine(_) | Scheme::Exl3(_) => None,
            Scheme::Trellis(scheme) => Some(scheme),
        }
    }

    /// Inputs that share a scale in each row: the whole row in a trellis.
    pub const fn group(self) -> Group {
        match self {
            Scheme::Affine(scheme) => scheme.group,
            Scheme::Trellis(_) | Scheme::Exl3(_) => Group::Channel,
        }
    }

    /// Bits of a weight's code, without scales.
    pub const fn bits(self) -> f32 {
        match self {
            Scheme::Affine(scheme) => scheme.bits.width() as f32,
            Scheme::Trellis(scheme) => scheme.bits(),
            Scheme::Exl3(scheme) => scheme.bits(),
        }
    }

    /// Bytes that a `[out_features, in_features]` weight takes in nq's own files; of EXL3 in its own.
    pub const fn bytes(self, out_features: usize, in_features: usize) -> usize {
        match self {
            Scheme::Affine(scheme) => scheme.bytes(out_features, in_features),
            Scheme::Trellis(scheme) => scheme.bytes(out_features, in_features),
            Scheme::Exl3(scheme) => scheme.bytes(out_features, in_features),
        }
    }
}

/// How much of a weight a device holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeldSize {
    /// Bits of a code, or of a value.
    pub bits: f32,
    /// Bytes of the weight.
    pub bytes: usize,
}

impl Scheme {
    /// What a weight `[out, in]` takes as it is stored.
    pub const fn stored(self, dims: Dims) -> HeldSize {
        let (out, inputs) = dims.pair();
        HeldSize {
            bits: self.bits(),
            bytes: self.bytes(out, inputs),
        }
    }

    /// What a weight `[out, in]` takes on a GPU: that of [`AffineScheme::held_on_gpu`]; of a trellis, and of EXL3, its own.
    pub fn held_on_gpu(self, dims: Dims) -> HeldSize {
        match self {
            Scheme::Affine(scheme) => Scheme::from(scheme.held_on_gpu()).stored(dims),
            Scheme::Trellis(_) | Scheme::Exl3(_) => self.stored(dims),
        }
    }
}

impl From<AffineScheme> for Scheme {
    fn from(scheme: AffineScheme) -> Self {
        Scheme::Affine(scheme)
    }
}

impl Serialize for Scheme {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Scheme::Affine(scheme) => scheme.serialize(to),
            Scheme::Trellis(scheme) => scheme.serialize(to),
            Scheme::Exl3(scheme) => scheme.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for Scheme {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let fields = serde_json::Map::deserialize(from)?;
        let trellis = fields.contains_key("trellis");
        let fields = serde_json::Value::Object(fields);
        let read = match trellis {
            true => TrellisScheme::deserialize(fields).map(Scheme::Trellis),
            false => AffineScheme::deserialize(fields).map(Scheme::Affine),
        };
        read.map_err(D::Error::custom)
    }
}

impl From<TrellisScheme> for Scheme {
    fn from(scheme: TrellisScheme) -> Self {
        Scheme::Trellis(scheme)
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scheme::Affine(scheme) => scheme.fmt(f),
            Scheme::Trellis(scheme) => scheme.fmt(f),
            Scheme::Exl3(scheme) => scheme.fmt(f),
        }
    }
}

impl FromStr for Scheme {
    type Err = Error;

    /// Parses a displayed scheme.
    fn from_str(name: &str) -> Result<Self> {
        match name.starts_with("trellis") {
            true => name.parse().map(Scheme::Trellis),
            false => name.parse().map(Scheme::Affine),
        }
    }
}

impl From<Option<TwoLevel>> for Scales {
    fn from(two: Option<TwoLevel>) -> Self {
        two.map_or(Scales::Half, Scales::TwoLevel)
    }
}

impl From<Scales> for Option<TwoLevel> {
    fn from(scales: Scales) -> Self {
        match scales {
            Scales::Half => None,
            Scales::TwoLevel(two) => Some(two),
        }
    }
}

impl Scales {
    /// True if every group has an f16.
    pub const fn is_half(&self) -> bool {
        matches!(self, Scales::Half)
    }

    /// Inputs that share an f16, where scales are in two levels.
    pub const fn span(&self) -> Option<Group> {
        match self {
            Scales::Half => None,
            Scales::TwoLevel(two) => Some(two.span),
        }
    }

    /// Bytes that the scales of a row take, in groups of `group`.
    const fn row_bytes(&self, group: Group, in_features: usize) -> usize {
        let groups = group.count(in_features);
        match self {
            Scales::Half => 2 * groups,
            Scales::TwoLevel(two) => two.bits.bytes(groups) + 2 * two.span.count(in_features),
        }
    }
}

impl TwoLevel {
    /// Two-level scales of `bits` with one f16 per row.
    pub const fn of_row(bits: Bits) -> Scales {
        let span = Group::Channel;
        Scales::TwoLevel(TwoLevel { bits, span })
    }
}

impl Levels {
    /// True for equal steps.
    pub(crate) const fn is_even(&self) -> bool {
        matches!(self, Levels::Even)
    }
}

impl AffineScheme {
    /// A scheme with equal steps and an f16 scale per group.
    pub const fn new(bits: Bits, group: Group, zeros: Zeros) -> Self {
        AffineScheme {
            bits,
            group,
            zeros,
            scales: Scales::Half,
            levels: Levels::Even,
        }
    }

    /// The same scheme with two-level scales, one f16 per row.
    pub const fn two_level(self, bits: Bits) -> Self {
        let scales = TwoLevel::of_row(bits);
        AffineScheme { scales, ..self }
    }

    /// The same scheme with a table of levels.
    pub const fn with_table(self) -> Self {
        let levels = Levels::Table;
        AffineScheme { levels, ..self }
    }

    /// Refuses parameters that do not fit together.
    ///
    /// # Errors
    /// [`Error::Scheme`] for empty groups, spans that are not whole groups, and tables of 256 levels.
    pub fn check(&self) -> Result<()> {
        let refuse = |expected: String, found: String| Err(Error::Scheme { expected, found });
        if self.group == Group::Size(0) {
            return refuse("a group size above 0".into(), "0".into());
        }
        if self.levels == Levels::Table && self.bits == Bits::B8 {
            let expected = "a table of levels for fewer than 8 bits";
            return refuse(expected.into(), "one for 8".into());
        }
        let Scales::TwoLevel(TwoLevel { span, .. }) = self.scales else {
            return Ok(());
        };
        match (span, self.group) {
            (Group::Channel, _) => Ok(()),
            (Group::Size(span), Group::Size(n)) if span > 0 && span.is_multiple_of(n) => Ok(()),
            _ => refuse(
                format!(
                    "scales in spans of a row or of whole groups ({})",
                    self.group
                ),
                span.to_string(),
            ),
        }
    }

    /// Width of the values of codes, and of integer zero-points: 8 with a table of levels.
    pub const fn value_bits(&self) -> Bits {
        match self.levels {
            Levels::Even => self.bits,
            Levels::Table => Bits::B8,
        }
    }

    /// The scheme with an f16 scale per group and equal steps that has the same values.
    pub const fn expanded(&self) -> Self {
        AffineScheme::new(self.value_bits(), self.group, self.zeros)
    }

    /// The scheme in which every device holds such weights, exactly: 4 or 8 bits, equal steps, an f16
    /// scale per group.
    pub const fn held(&self) -> Self {
        AffineScheme::new(self.value_bits().held(), self.group, self.zeros)
    }

    /// The scheme in which a GPU holds such weights, exactly: their own where its kernels read it, as they
    /// do those that nq mixes in files of 4 bits; with a table of levels for codes of 3 or 4 bits without zero-points that
    /// have one, or have scales in two levels; else that of [`AffineScheme::held`].
    pub fn held_on_gpu(&self) -> Self {
        let few = self.bits <= Bits::B4 && self.zeros == Zeros::None;
        if few && !(self.scales.is_half() && self.levels.is_even()) {
            let (bits, group) = match (self.scales, self.bits) {
                (Scales::Half, _) => (Bits::B4, 16),
                (_, Bits::B4) => (Bits::B4, 32),
                _ => (Bits::B3, 16),
            };
            return AffineScheme {
                bits,
                group: Group::Size(group),
                ..self.with_table()
            };
        }
        let read = match self.bits.0 {
            4 | 5 => self.zeros == Zeros::Integer,
            6 => self.zeros == Zeros::None,
            _ => false,
        };
        if read && self.scales == TwoLevel::of_row(Bits::B8) && self.levels.is_even() {
            *self
        } else {
            self.held()
        }
    }

    /// The scheme of a stack of rows in this scheme and rows in `other`, which have as many inputs; `None` if they cannot
    /// be one weight. Where some have zero-points, those of the others are at the midpoint. Other formats have f16
    /// scales and even steps.
    pub fn stacked(&self, other: &Self) -> Option<Self> {
        let alike = (self.bits, self.group) == (other.bits, other.group);
        let zeros = match (self.zeros, other.zeros) {
            (a, b) if a == b => a,
            (Zeros::Offset, _) | (_, Zeros::Offset) => return None,
            _ => Zeros::Integer,
        };
        let plain = self.is_plain() && other.is_plain();
        (plain && alike).then_some(AffineScheme { zeros, ..*self })
    }

    /// True for schemes that version 1 of nq's format supports: codes of 4 or 8 bits, f16 scales and even levels.
    pub fn is_plain(&self) -> bool {
        let known = [Bits::B4, Bits::B8].contains(&self.bits);
        known && self.scales.is_half() && self.levels.is_even()
    }

    /// Bytes that a `[out_features, in_features]` weight takes in nq's own files: packed codes, scales,
    /// packed zero-points or offsets, and a table of levels.
    pub const fn bytes(&self, out_features: usize, in_features: usize) -> usize {
        let groups = self.group.count(in_features);
        let scales = self.scales.row_bytes(self.group, in_features);
        let zeros = match self.zeros {
            Zeros::None => 0,
            Zeros::Integer => self.value_bits().bytes(groups),
            Zeros::Offset => scales,
        };
        let levels = match self.levels {
            Levels::Even => 0,
            Levels::Table => 1 << self.bits.width(),
        };
        out_features * (self.bits.bytes(in_features) + scales + zeros) + levels
    }
}

impl FromStr for AffineScheme {
    type Err = Error;

    /// Parses a displayed scheme, such as `int4 g32 asymmetric scales8`.
    fn from_str(name: &str) -> Result<Self> {
        let bits = Bits::ALL.into_iter();
        let groups = name.split_whitespace().nth(1).and_then(|group| {
            let size = group.strip_prefix('g')?.parse().ok().map(Group::Size);
            size.filter(|s| *s != Group::Size(0))
        });
        let group = groups.unwrap_or(Group::Channel);
        // There are few schemes: find the one that is displayed like this.
        let plain = bits.flat_map(|bits| {
            let zeros = [Zeros::None, Zeros::Integer, Zeros::Offset];
            zeros.map(|zeros| AffineScheme::new(bits, group, zeros))
        });
        let kept = |scheme: AffineScheme| {
            let spans = name.split_once('/').and_then(|(_, span)| {
                let digits = span.split_whitespace().next()?;
                digits.parse().ok().filter(|n| *n > 0).map(Group::Size)
            });
            let span = spans.unwrap_or(Group::Channel);
            let two = Bits::ALL.map(|bits| Scales::TwoLevel(TwoLevel { bits, span }));
            [Scales::Half]
                .into_iter()
                .chain(two)
                .map(move |scales| AffineScheme { scales, ..scheme })
        };
        let mut all = plain.flat_map(kept).flat_map(|s| [s, s.with_table()]);
        let found = all.find(|s| s.to_string() == name && s.check().is_ok());
        found.ok_or_else(|| Error::Scheme {
            expected: "a scheme such as \"int4 g64 asymmetric\"".into(),
            found: format!("{name:?}"),
        })
    }
}

impl fmt::Display for AffineScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let zeros = match self.zeros {
            Zeros::None => "symmetric",
            Zeros::Integer => "asymmetric",
            Zeros::Offset => "offset",
        };
        write!(f, "int{} {} {zeros}", self.bits.width(), self.group)?;
        if let Scales::TwoLevel(TwoLevel { bits, span }) = self.scales {
            write!(f, " scales{}", bits.width())?;
            if let Group::Size(n) = span {
                write!(f, "/{n}")?;
            }
        }
        match self.levels {
            Levels::Even => Ok(()),
            Levels::Table => f.write_str(" levels"),
        }
    }
}
