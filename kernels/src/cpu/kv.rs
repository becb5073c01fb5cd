//! Keys and values of one layer and one sequence, as attention reads them.

use super::memory::Buffer;
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::fmt;

/// What keys and values are rounded to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Not rounded: for comparison with f32 references.
    F32,
    /// IEEE binary16.
    #[default]
    F16,
    /// Signed 8-bit codes, one f16 scale (absmax / 127) per head and position.
    Int8,
}

impl KvType {
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

/// Keys or values of one layer of one sequence: `[kv_heads, capacity, head_dim]`.
#[derive(Clone, Debug)]
pub struct KvBlock {
    kv_heads: usize,
    capacity: usize,
    head_dim: usize,
    data: KvData,
}

#[derive(Clone, Debug)]
enum KvData {
    F32(Buffer<f32>),
    F16(Buffer<f16>),
    Int8 {
        codes: Buffer<i8>,
        scales: Buffer<f16>,
    },
}

/// One head of a [`KvBlock`].
#[derive(Clone, Copy)]
pub(crate) struct KvView<'a> {
    pub(crate) data: HeadData<'a>,
    pub(crate) head_dim: usize,
}

/// Values `[capacity, head_dim]`.
#[derive(Clone, Copy)]
pub(crate) enum HeadData<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    /// Scales are `[capacity]`.
    Int8 {
        codes: &'a [i8],
        scales: &'a [f16],
    },
}

impl KvBlock {
    /// Room for `capacity` positions, zeroed.
    pub fn new(kind: KvType, kv_heads: usize, capacity: usize, head_dim: usize) -> Self {
        let n = kv_heads * capacity * head_dim;
        let data = match kind {
            KvType::F32 => KvData::F32(Buffer::sparse(n)),
            KvType::F16 => KvData::F16(Buffer::sparse(n)),
            KvType::Int8 => KvData::Int8 {
                codes: Buffer::sparse(n),
                scales: Buffer::sparse(kv_heads * capacity),
            },
        };
        KvBlock {
            kv_heads,
            capacity,
            head_dim,
            data,
        }
    }

    /// What values are rounded to.
    pub fn kind(&self) -> KvType {
        match self.data {
            KvData::F32(_) => KvType::F32,
            KvData::F16(_) => KvType::F16,
            KvData::Int8 { .. } => KvType::Int8,
        }
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// All positions of one head.
    pub(crate) fn head(&self, head: usize) -> KvView<'_> {
        let rows = head * self.capacity..(head + 1) * self.capacity;
        let values = rows.start * self.head_dim..rows.end * self.head_dim;
        let data = match &self.data {
            KvData::F32(d) => HeadData::F32(&d[values]),
            KvData::F16(d) => HeadData::F16(&d[values]),
            KvData::Int8 { codes, scales } => HeadData::Int8 {
                codes: &codes[values],
                scales: &scales[rows],
            },
        };
        KvView {
            data,
            head_dim: self.head_dim,
        }
    }

    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Rounds and stores one head's vector (`head_dim` long) at `position`.
    pub fn store(&mut self, head: usize, position: usize, x: &[f32]) {
        let row = head * self.capacity + position;
        let span = row * self.head_dim..(row + 1) * self.head_dim;
        match &mut self.data {
            KvData::F32(d) => d[span].copy_from_slice(x),
            KvData::F16(d) => d[span].convert_from_f32_slice(x),
            KvData::Int8 { codes, scales } => {
                let absmax = x.iter().fold(0f32, |m, v| m.max(v.abs()));
                let scale = f16::from_f32(absmax / 127.0);
                scales[row] = scale;
                let inv = if scale.to_f32() > 0.0 {
                    1.0 / scale.to_f32()
                } else {
                    0.0
                };
                for (c, &x) in codes[span].iter_mut().zip(x) {
                    *c = (x * inv).round().clamp(-127.0, 127.0) as i8;
                }
            }
        }
    }

    /// Reads one head's vector at `position` back as f32.
    pub fn load(&self, head: usize, position: usize, out: &mut [f32]) {
        let row = head * self.capacity + position;
        let span = row * self.head_dim..(row + 1) * self.head_dim;
        match &self.data {
            KvData::F32(d) => out.copy_from_slice(&d[span]),
            KvData::F16(d) => d[span].convert_to_f32_slice(out),
            KvData::Int8 { codes, scales } => {
                let s = scales[row].to_f32();
                for (o, &c) in out.iter_mut().zip(&codes[span]) {
                    *o = s * f32::from(c);
                }
            }
        }
    }
}
