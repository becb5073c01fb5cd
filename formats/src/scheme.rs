//! Affine quantization schemes: which integers stand for which real values.
//!
//! Every scheme reads `w = s * q + o` within a group of consecutive inputs of one
//! output row. `q` is the *unsigned* code `0 ..= 2^bits - 1`; how `o` arises is
//! [`Zeros`]. Kernels need only `s` and `o`, so all affine formats share them.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Bits of one code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "u32", try_from = "u32")]
pub enum Bits {
    /// Codes 0 to 15, two in a byte.
    B4,
    /// Codes 0 to 255.
    B8,
}

impl Bits {
    /// 4 or 8.
    pub const fn width(self) -> usize {
        match self {
            Bits::B4 => 4,
            Bits::B8 => 8,
        }
    }

    /// The greatest code: 15 or 255.
    pub const fn max_code(self) -> u8 {
        match self {
            Bits::B4 => 15,
            Bits::B8 => 255,
        }
    }

    /// The zero-point of a symmetric scheme: 8 or 128.
    pub const fn midpoint(self) -> u8 {
        match self {
            Bits::B4 => 8,
            Bits::B8 => 128,
        }
    }

    /// Bytes that `n` codes of one row take; a row starts on a byte of its own.
    pub const fn bytes(self, n: usize) -> usize {
        (n * self.width()).div_ceil(8)
    }
}

impl From<Bits> for u32 {
    fn from(b: Bits) -> u32 {
        b.width() as u32
    }
}

impl TryFrom<u32> for Bits {
    type Error = Error;
    fn try_from(n: u32) -> Result<Self> {
        match n {
            4 => Ok(Bits::B4),
            8 => Ok(Bits::B8),
            _ => Err(Error::Scheme {
                expected: "4 or 8 bits".into(),
                found: n.to_string(),
            }),
        }
    }
}

/// How many consecutive inputs of a row share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "GroupRepr", try_from = "GroupRepr")]
pub enum Group {
    /// This many inputs, at least 1; the last group of a row may be shorter.
    Size(u32),
    /// The whole row: one scale per output channel.
    Channel,
}

impl Group {
    /// Inputs in one full group of a row of `in_features`.
    pub const fn size(self, in_features: usize) -> usize {
        match self {
            Group::Size(n) => n as usize,
            Group::Channel => in_features,
        }
    }

    /// Groups in a row of `in_features`.
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

/// Where the offset `o` of `w = s * q + o` comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Zeros {
    /// Symmetric: `o = -s * 2^(bits-1)`; nothing is stored.
    None,
    /// An integer zero-point `z` per group, of the codes' width: `o = -s * z`.
    Integer,
    /// A float offset per group, stored as it is (GGUF minima).
    Offset,
}

/// An affine scheme: bits, grouping and zero-points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AffineScheme {
    /// Width of a code.
    pub bits: Bits,
    /// Inputs that share a scale.
    pub group: Group,
    /// How zero-points are kept.
    pub zeros: Zeros,
}

impl AffineScheme {
    /// Bytes that a `[out_features, in_features]` weight takes in nq's own files:
    /// packed codes, f16 scales, and packed zero-points or f16 offsets.
    pub const fn bytes(&self, out_features: usize, in_features: usize) -> usize {
        let groups = self.group.count(in_features);
        let zeros = match self.zeros {
            Zeros::None => 0,
            Zeros::Integer => self.bits.bytes(groups),
            Zeros::Offset => 2 * groups,
        };
        out_features * (self.bits.bytes(in_features) + 2 * groups + zeros)
    }
}

impl fmt::Display for AffineScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let zeros = match self.zeros {
            Zeros::None => "symmetric",
            Zeros::Integer => "asymmetric",
            Zeros::Offset => "offset",
        };
        write!(f, "int{} {} {zeros}", self.bits.width(), self.group)
    }
}
