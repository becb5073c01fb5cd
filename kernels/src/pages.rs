//! What pages of keys and values are, on any device.

use std::fmt;

/// The type that keys and values are rounded to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Not rounded, for comparison with f32 references.
    F32,
    /// IEEE binary16.
    #[default]
    F16,
    /// Signed 8-bit codes, one f16 scale (absmax / 127) per head and position.
    Int8,
}

impl KvType {
    /// The type of so many bits a value; `None` if there is none.
    pub const fn of_bits(bits: u32) -> Option<Self> {
        match bits {
            8 => Some(KvType::Int8),
            16 => Some(KvType::F16),
            32 => Some(KvType::F32),
            _ => None,
        }
    }

    /// Bytes of one head's key (or value) at one position.
    pub const fn bytes(self, head_dim: usize) -> usize {
        match self {
            KvType::F32 => 4 * head_dim,
            KvType::F16 => 2 * head_dim,
            KvType::Int8 => head_dim + 2,
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Int8 => "int8",
        })
    }
}

/// Positions in a page: as many as one pass of a GPU's decode attention covers. A sequence leaves
/// half a page unused on average.
pub const PAGE: usize = 128;

/// Rows of a step whose sequences begin with the same pages, or that belong to one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedPrefix {
    /// One of the sequences.
    pub slot: usize,
    /// Number of full pages that they share, all before the positions of the rows.
    pub pages: usize,
    /// The rows, two or more.
    pub rows: Vec<usize>,
}
