//! Weights in the layout that kernels stream: panels of 16 rows, interleaved in units of 4 bytes.
//!
//! ```text
//! canonical rows           panel p (rows 16p .. 16p + 16), contiguous
//! row 0: u0 u1 u2 ...      u0 of rows 0..16 | u1 of rows 0..16 | u2 ...
//! row 1: u0 u1 u2 ...      <-- 64 bytes --->
//! ```
//!
//! A unit is 4 consecutive bytes of a canonical row: 8 inputs of 4 bits, 4 of 8 bits, 2 of
//! bf16 or f16, 1 of f32. One 64-byte load thus gives every row of the panel its next inputs,
//! in the lane that accumulates that row, on any instruction set. Codes of 5 and 6 bits have units of
//! several words: words of their low 4 bits, 8 inputs each as above, followed by one of their
//! high bits, arranged in each byte to match the inputs of the low nibbles. Scales and zero-points
//! are stored per group in the same order of rows. Rows past the last one are zeros.

use super::exl3::pack::{self as exl3, PackedExl3};
use super::trellis::pack::{
    InputScales, PackedTrellis, SEQUENCES, pack as pack_trellis, words as trellis_words,
};
use crate::memory::{Buffer, WeightFile};
use crate::simd::LANES;
use crate::team::{Team, spread};
use half::f16;
use nq_formats::pack::{pack_row, unpack_row};
use nq_formats::trellis::{self, STRIP, TILE};
use nq_formats::{
    AffineScheme, AffineWeight, Bits, Exl3Weight, Group, Levels, QuantizedWeight, Tensor,
    TrellisWeight, Weight, ZeroPoints, Zeros,
};
use nq_kernels::registry::WeightKind;
use nq_kernels::{Error, Result};
use nq_model::{DType, Dims};
use std::sync::Arc;

/// The content of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum UnitCodes {
    /// One f32.
    F32,
    /// Two f16.
    F16,
    /// Two bf16.
    Bf16,
    /// Four 8-bit codes.
    Byte,
    /// Eight 4-bit codes.
    Nibble,
    /// 32 codes of 5 bits, in five words.
    Five,
    /// 16 codes of 6 bits, in three words.
    Six,
    /// Eight 4-bit codes that number the levels of a table ([`PanelWeight::levels`]): 8-bit codes.
    Levels,
    /// A trellis code, which has no units: see [`trellis`](super::trellis).
    Trellis,
    /// A code of EXL3, likewise: see [`super::exl3`].
    Exl3,
}

impl UnitCodes {
    /// Number of inputs in a unit.
    pub(crate) const fn inputs(self) -> usize {
        match self {
            UnitCodes::F32 | UnitCodes::Trellis | UnitCodes::Exl3 => 1,
            UnitCodes::F16 | UnitCodes::Bf16 => 2,
            UnitCodes::Byte => 4,
            UnitCodes::Nibble | UnitCodes::Levels => 8,
            UnitCodes::Five => 32,
            UnitCodes::Six => 16,
        }
    }

    /// Number of 4-byte words in a unit.
    pub(crate) const fn words(self) -> usize {
        match self {
            UnitCodes::Five => 5,
            UnitCodes::Six => 3,
            _ => 1,
        }
    }

    /// Width of the values of integer codes, which gives the midpoint of symmetric ones.
    fn bits(self) -> Bits {
        match self {
            UnitCodes::Nibble => Bits::B4,
            UnitCodes::Five => Bits::B5,
            UnitCodes::Six => Bits::B6,
            _ => Bits::B8,
        }
    }

    /// The value subtracted from integer codes to centre them.
    pub(crate) fn centre(self) -> f32 {
        f32::from(self.bits().midpoint())
    }

    /// The codes that `weight` can be packed to.
    fn of(weight: &Weight) -> Vec<Self> {
        match weight {
            Weight::Dense(t) => match t.dtype() {
                DType::F32 => vec![UnitCodes::F32],
                DType::F16 => vec![UnitCodes::F16],
                DType::BF16 => vec![UnitCodes::Bf16],
                _ => Vec::new(),
            },
            Weight::Quantized(QuantizedWeight::Affine(a)) => match a.scheme().value_bits() {
                Bits::B8 if has_table(&a.scheme()) => vec![UnitCodes::Levels, UnitCodes::Byte],
                Bits::B5 => vec![UnitCodes::Five, UnitCodes::Byte],
                Bits::B6 => vec![UnitCodes::Six, UnitCodes::Byte],
                Bits::B8 => vec![UnitCodes::Byte],
                _ => vec![UnitCodes::Nibble],
            },
            Weight::Quantized(QuantizedWeight::Trellis(_)) => vec![UnitCodes::Trellis],
            Weight::Quantized(QuantizedWeight::Exl3(_)) => vec![UnitCodes::Exl3],
            Weight::Quantized(_) => Vec::new(),
        }
    }
}

/// True for codes that kernels find in a table of 16 levels.
pub(super) const fn has_table(scheme: &AffineScheme) -> bool {
    scheme.bits.width() <= 4 && matches!(scheme.levels, Levels::Table)
}

/// The width in which the CPU holds a scheme's codes. It holds 5-bit codes as 8 bits if activations
/// have a scale per 16 inputs.
pub fn held_bits(scheme: &AffineScheme) -> Bits {
    match scheme.value_bits() {
        Bits::B8 if has_table(scheme) => Bits::B4,
        Bits::B3 => Bits::B4,
        bits => bits,
    }
}

/// Zero-points of a packed weight: 16 values per panel and group.
pub(crate) enum PackedZeros {
    /// Symmetric, or dense.
    None,
    /// 4-bit zero-points, 8 bytes a panel and group, low nibble first.
    Nibbles(Buffer<u8>),
    /// 8-bit zero-points.
    Bytes(Buffer<u8>),
    /// Float offsets.
    Offsets(Buffer<f16>),
}

/// A weight in panels.
pub(crate) struct PanelWeight {
    /// The content of a unit.
    pub(crate) codes: UnitCodes,
    /// Number of output rows.
    pub(crate) rows: usize,
    /// Number of inputs after permuting and padding: whole units, and a multiple of `align`.
    pub(crate) inputs: usize,
    /// Units per row.
    pub(crate) units: usize,
    /// Inputs per group (all of them for one scale per channel or a dense weight).
    pub(crate) group: usize,
    /// Groups per row.
    pub(crate) groups: usize,
    /// `[panels, units, 16]`
    pub(crate) data: Buffer<u32>,
    /// `[panels, groups, 16]`; empty for a dense weight.
    pub(crate) scales: Buffer<f16>,
    /// `[panels, groups, 16]`
    pub(crate) zeros: PackedZeros,
    /// The 8-bit code of each level that codes number.
    pub(crate) levels: [u8; LANES],
    /// Original index of each packed input ([`HOLE`]: none), if they are permuted.
    pub(crate) order: Option<Arc<[u32]>>,
    /// Of a trellis weight, what it has beside its words, which are `data`.
    pub(crate) trellis: Option<PackedTrellis>,
    /// Likewise of an EXL3 weight.
    pub(crate) exl3: Option<PackedExl3>,
}

/// Marks a packed input that has no original input.
pub(crate) const HOLE: u32 = u32::MAX;

impl PanelWeight {
    /// Moves its codes, scales and zero-points to `file`.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn move_to(&mut self, file: &mut WeightFile) -> std::io::Result<()> {
        file.take(&mut self.data)?;
        file.take(&mut self.scales)?;
        match &mut self.zeros {
            PackedZeros::None => Ok(()),
            PackedZeros::Nibbles(zeros) | PackedZeros::Bytes(zeros) => file.take(zeros),
            PackedZeros::Offsets(offsets) => file.take(offsets),
        }
    }

    /// Packs `weight` to `codes`, with inputs padded to a multiple of `align`.
    ///
    /// # Errors
    /// [`Error::NoKernel`] for element types that cannot be packed in this way.
    pub(crate) fn new(
        team: &Team,
        weight: &Weight,
        codes: UnitCodes,
        align: usize,
    ) -> Result<Self> {
        if !UnitCodes::of(weight).contains(&codes) {
            return Err(Error::NoKernel {
                op: "linear",
                scheme: weight.scheme_name(),
                activations: "any".into(),
                device: "cpu".into(),
            });
        }
        Ok(match weight {
            Weight::Quantized(QuantizedWeight::Affine(a)) => Self::affine(team, a, codes, align),
            Weight::Quantized(QuantizedWeight::Trellis(t)) => Self::of_trellis(team, t),
            Weight::Quantized(QuantizedWeight::Exl3(w)) => Self::of_exl3(team, w),
            Weight::Dense(t) => Self::dense(team, t, codes, align),
            Weight::Quantized(_) => unreachable!("`Codes::of` knows it"),
        })
    }

    fn dense(team: &Team, t: &Tensor, codes: UnitCodes, align: usize) -> Self {
        let (rows, k) = (t.shape()[0], t.shape()[1]);
        let inputs = k.next_multiple_of(align.max(codes.inputs()));
        let units = inputs / codes.inputs();
        let stride = k * t.dtype().size();
        let data = t.data();
        PanelWeight {
            codes,
            rows,
            inputs,
            units,
            group: inputs,
            groups: 1,
            data: interleave(team, rows, units, &RowSource::Dense { data, stride }),
            scales: Buffer::default(),
            zeros: PackedZeros::None,
            levels: [0; LANES],
            order: None,
            trellis: None,
            exl3: None,
        }
    }

    fn of_exl3(team: &Team, w: &Exl3Weight) -> Self {
        let Dims { rows, cols: inputs } = w.dims();
        PanelWeight {
            codes: UnitCodes::Exl3,
            rows,
            inputs,
            units: inputs,
            group: inputs,
            groups: 1,
            data: exl3::pack(team, w),
            scales: panels_of(team, rows, 1, &[0], w.output_scales()),
            zeros: PackedZeros::None,
            levels: [0; LANES],
            order: None,
            trellis: None,
            exl3: PackedExl3::of(w),
        }
    }

    fn of_trellis(team: &Team, w: &TrellisWeight) -> Self {
        let (rows, inputs) = (w.out_features(), w.in_features());
        PanelWeight {
            codes: UnitCodes::Trellis,
            rows,
            inputs,
            units: inputs,
            group: inputs,
            groups: 1,
            data: pack_trellis(team, w),
            scales: panels_of(team, rows, 1, &[0], w.row_scales()),
            zeros: PackedZeros::None,
            levels: [0; LANES],
            order: None,
            trellis: Some(PackedTrellis {
                scheme: w.scheme(),
                input_scales: InputScales(w.input_scales().into()),
            }),
            exl3: None,
        }
    }

    /// What an EXL3 weight has beside its words.
    ///
    /// # Panics
    /// If it is another weight.
    pub(crate) fn exl3(&self) -> &PackedExl3 {
        self.exl3.as_ref().expect("an EXL3 weight")
    }

    /// Factors of inputs that are then transformed.
    pub(crate) fn input_scales(&self) -> Option<&InputScales> {
        let trellis = self.trellis.as_ref().map(|t| &t.input_scales);
        trellis.or(self.exl3.as_ref().map(|e| &e.input_scales))
    }

    /// Likewise.
    pub(crate) fn input_scales_mut(&mut self) -> Option<&mut InputScales> {
        let trellis = self.trellis.as_mut().map(|t| &mut t.input_scales);
        trellis.or(self.exl3.as_mut().map(|e| &mut e.input_scales))
    }

    /// What a trellis weight has beside its words.
    ///
    /// # Panics
    /// If it is another weight.
    pub(crate) fn trellis(&self) -> &PackedTrellis {
        self.trellis.as_ref().expect("a trellis weight")
    }

    fn affine(team: &Team, a: &AffineWeight, codes: UnitCodes, align: usize) -> Self {
        let (rows, k) = (a.out_features(), a.in_features());
        let align = align.max(codes.inputs());
        // Packed groups: the index of each one's original group, and the order of its inputs.
        let (group, source, order) = match (a.g_idx(), a.scheme().group) {
            (None, Group::Channel) => (k.next_multiple_of(align), vec![0], None),
            (None, Group::Size(g)) => {
                let source = (0..a.groups()).collect();
                (g as usize, source, None)
            }
            (Some(g_idx), _) => {
                let group = a.scheme().group.size(k).next_multiple_of(align);
                let (source, order) = gather_groups(g_idx, a.groups(), group);
                (group, source, Some(order))
            }
        };
        let inputs = match &order {
            Some(order) => order.len(),
            None => k,
        }
        .next_multiple_of(align);
        let (units, groups) = (inputs / codes.inputs(), source.len());
        let from = RowSource::Affine {
            weight: a,
            codes,
            inputs,
            order: order.as_deref(),
        };
        let data = interleave(team, rows, units * codes.words(), &from);
        let scales = panels_of(team, rows, a.groups(), &source, a.scales());
        let zeros = match a.zeros() {
            ZeroPoints::None => PackedZeros::None,
            ZeroPoints::Offset(o) => {
                PackedZeros::Offsets(panels_of(team, rows, a.groups(), &source, o))
            }
            ZeroPoints::Integer(_) => pack_zeros(team, a, &source),
        };
        let mut levels = [0; LANES];
        if let (UnitCodes::Levels, Some(table)) = (codes, a.levels()) {
            levels[..table.len()].copy_from_slice(table);
        }
        PanelWeight {
            codes,
            rows,
            inputs,
            units,
            group,
            groups,
            data,
            scales,
            zeros,
            levels,
            order: order.map(Into::into),
            trellis: None,
            exl3: None,
        }
    }

    /// Bytes that a weight `[rows, inputs]` of this kind takes in panels, including its order of inputs;
    /// without the padding of inputs that some kernels need.
    pub(crate) fn bytes_of(kind: WeightKind, Dims { rows, cols: inputs }: Dims) -> usize {
        let dims = Dims::new(rows, inputs);
        let rows = rows.next_multiple_of(LANES);
        match kind {
            WeightKind::Trellis(scheme) => 4 * trellis_words(scheme, dims) + 2 * (rows + inputs),
            WeightKind::Exl3(scheme) => 4 * exl3::words(scheme, dims) + 2 * (rows + inputs),
            WeightKind::Dense(dtype) => rows * inputs * dtype.size(),
            WeightKind::Affine { scheme, act_order } => {
                let (held, groups) = (scheme.held(), scheme.group.count(inputs));
                let zeros = match scheme.zeros {
                    Zeros::None => 0,
                    Zeros::Integer => held.bits.bytes(rows * groups),
                    Zeros::Offset => 2 * rows * groups,
                };
                let order = if act_order { 4 * inputs } else { 0 };
                rows * (held_bits(&scheme).bytes(inputs) + 2 * groups) + zeros + order
            }
        }
    }

    /// The codes of panel `panel`; those of the next one follow.
    pub(crate) fn panel(&self, panel: usize) -> &[u32] {
        &self.data[panel * self.units * self.codes.words() * LANES..]
    }

    /// Number of panels.
    pub(crate) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Bytes held, which are also the bytes that a pass over the weight reads.
    pub(crate) fn bytes(&self) -> usize {
        let zeros = match &self.zeros {
            PackedZeros::None => 0,
            PackedZeros::Nibbles(b) | PackedZeros::Bytes(b) => b.len(),
            PackedZeros::Offsets(o) => 2 * o.len(),
        };
        let inputs = self.input_scales().map_or(0, |scales| 2 * scales.0.len());
        4 * self.data.len() + 2 * self.scales.len() + zeros + inputs
    }

    /// `(s, o)` of `w = s * q + o` for one row and packed group.
    fn affine_of(&self, row: usize, group: usize) -> (f32, f32) {
        let at = (row / LANES * self.groups + group) * LANES + row % LANES;
        let s = self.scales[at].to_f32();
        let o = match &self.zeros {
            PackedZeros::None => -s * f32::from(self.codes.bits().midpoint()),
            PackedZeros::Nibbles(z) => -s * f32::from((z[at / 2] >> (4 * (at & 1))) & 15),
            PackedZeros::Bytes(z) => -s * f32::from(z[at]),
            PackedZeros::Offsets(o) => o[at].to_f32(),
        };
        (s, o)
    }

    /// Writes row `row` as f32 to `out`, in the original order of inputs, with the same values
    /// as the canonical weight has.
    pub(crate) fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        if self.trellis.is_some() {
            dequantize_trellis_row(self, row, out);
            return;
        }
        if let Some(exl3) = &self.exl3 {
            exl3.dequantize_row(&self.data, row, self.scales[row].to_f32(), out);
            return;
        }
        let words = self.units * self.codes.words();
        let panel = &self.data[row / LANES * words * LANES..];
        let unit = |u: usize| panel[u * LANES + row % LANES];
        let value = |i: usize| match self.codes {
            UnitCodes::F32 => f32::from_bits(unit(i)),
            UnitCodes::F16 => f16::from_bits((unit(i / 2) >> (16 * (i & 1))) as u16).to_f32(),
            UnitCodes::Bf16 => f32::from_bits((unit(i / 2) >> (16 * (i & 1))) << 16),
            UnitCodes::Byte
            | UnitCodes::Nibble
            | UnitCodes::Five
            | UnitCodes::Six
            | UnitCodes::Levels => {
                let (s, o) = self.affine_of(row, i / self.group);
                let q = match self.codes {
                    UnitCodes::Levels => {
                        self.levels[(unit(i / 8) >> (4 * (i & 7))) as usize & 15].into()
                    }
                    UnitCodes::Byte => (unit(i / 4) >> (8 * (i & 3))) & 255,
                    UnitCodes::Nibble => (unit(i / 8) >> (4 * (i & 7))) & 15,
                    codes => code_of_planes(codes, i, unit),
                };
                s.mul_add(q as f32, o)
            }
            UnitCodes::Trellis | UnitCodes::Exl3 => unreachable!("has no units"),
        };
        match &self.order {
            None => out.iter_mut().enumerate().for_each(|(i, o)| *o = value(i)),
            Some(order) => {
                for (i, &to) in order.iter().enumerate().filter(|(_, to)| **to != HOLE) {
                    out[to as usize] = value(i);
                }
            }
        }
    }
}

/// The canonical weight's values `[rows, groups]` in panels `[packed groups, LANES]`; packed group
/// `g` is the original group `source[g]`.
fn panels_of(
    team: &Team,
    rows: usize,
    groups: usize,
    source: &[usize],
    values: &[f16],
) -> Buffer<f16> {
    let panel = source.len() * LANES;
    let mut packed = Buffer::weights(rows.div_ceil(LANES) * panel);
    spread(team, &mut packed, panel, |index, packed| {
        for (i, p) in packed.iter_mut().enumerate() {
            let row = index * LANES + i % LANES;
            if row < rows {
                *p = values[row * groups + source[i / LANES]];
            }
        }
    });
    packed
}

/// Integer zero-points in the same kind of panels, packed like codes.
fn pack_zeros(team: &Team, a: &AffineWeight, source: &[usize]) -> PackedZeros {
    let (rows, bits) = (a.out_features(), a.scheme().held().bits);
    let panel = bits.bytes(source.len() * LANES);
    let mut packed = Buffer::weights(rows.div_ceil(LANES) * panel);
    spread(team, &mut packed, panel, |index, packed| {
        let mut zeros = vec![0u8; source.len() * LANES];
        for lane in 0..LANES.min(rows - index * LANES) {
            for (group, &from) in source.iter().enumerate() {
                let zero = a.zero_point(index * LANES + lane, from);
                zeros[group * LANES + lane] = zero.unwrap_or_default();
            }
        }
        pack_row(bits, &zeros, packed);
    });
    match bits {
        Bits::B4 => PackedZeros::Nibbles(packed),
        _ => PackedZeros::Bytes(packed),
    }
}

/// Sorts inputs by group for activation-order weights. Every packed group has exactly
/// `size` places; a group with fewer inputs leaves holes, one with more takes several packed
/// groups. Returns the original group of each packed group, and the order of inputs.
fn gather_groups(g_idx: &[u32], groups: usize, size: usize) -> (Vec<usize>, Vec<u32>) {
    let mut members = vec![Vec::new(); groups];
    for (input, &group) in g_idx.iter().enumerate() {
        members[group as usize].push(input as u32);
    }
    let (mut source, mut order) = (Vec::new(), Vec::new());
    for (group, members) in members.iter().enumerate() {
        for part in members.chunks(size) {
            source.push(group);
            order.extend_from_slice(part);
            order.resize(source.len() * size, HOLE);
        }
    }
    (source, order)
}

/// The source of the rows to be packed.
enum RowSource<'a> {
    Dense {
        data: &'a [u8],
        stride: usize,
    },
    Affine {
        weight: &'a AffineWeight,
        codes: UnitCodes,
        /// Number of inputs, padded.
        inputs: usize,
        /// The input at each place, or [`HOLE`].
        order: Option<&'a [u32]>,
    },
}

impl RowSource<'_> {
    /// The bytes of one row: the original ones, or converted ones in `scratch`.
    fn row<'a>(&'a self, row: usize, scratch: &'a mut Vec<u8>) -> &'a [u8] {
        match self {
            RowSource::Dense { data, stride } => &data[row * stride..(row + 1) * stride],
            RowSource::Affine {
                weight,
                codes,
                order: None,
                ..
            } if codes.words() == 1 && *codes != UnitCodes::Levels => weight.held_row(row, scratch),
            RowSource::Affine {
                weight,
                codes,
                inputs,
                order,
            } => {
                let mut values = vec![0; weight.in_features()];
                let bits = match codes {
                    UnitCodes::Levels => Bits::B4,
                    codes => codes.bits(),
                };
                match (codes, codes.words()) {
                    (UnitCodes::Levels, _) => {
                        unpack_row(weight.scheme().bits, weight.row_codes(row), &mut values);
                    }
                    (_, 1) => unpack_row(bits, weight.held_row(row, scratch), &mut values),
                    _ => unpack_row(bits, weight.row_codes(row), &mut values),
                }
                if let Some(order) = order {
                    let at = |&from: &u32| values.get(from as usize).copied().unwrap_or(0);
                    values = order.iter().map(at).collect();
                }
                values.resize(*inputs, 0);
                scratch.clear();
                match codes.words() {
                    1 => {
                        scratch.resize(bits.bytes(values.len()), 0);
                        pack_row(bits, &values, scratch);
                    }
                    _ => pack_planes(*codes, &values, scratch),
                }
                scratch
            }
        }
    }
}

/// Position, in a unit's high word, of the bits of input `i` of the unit.
fn high_place(codes: UnitCodes, i: usize) -> usize {
    let (quad, byte) = (i / 8 * 2 + i % 2, i % 8 / 2);
    8 * byte + quad * (codes.bits().width() - 4)
}

/// Appends units of codes in two planes.
fn pack_planes(codes: UnitCodes, values: &[u8], out: &mut Vec<u8>) {
    let last = codes.words() - 1;
    for unit in values.chunks(codes.inputs()) {
        let mut words = [0u32; 5];
        for (i, &q) in unit.iter().enumerate() {
            words[i / 8] |= u32::from(q & 15) << (4 * (i % 8));
            words[last] |= u32::from(q >> 4) << high_place(codes, i);
        }
        out.extend(words[..=last].iter().flat_map(|w| w.to_le_bytes()));
    }
}

/// Code `i` of a row in units of two planes; `word` returns the words.
fn code_of_planes(codes: UnitCodes, i: usize, word: impl Fn(usize) -> u32) -> u32 {
    let (first, i) = (i / codes.inputs() * codes.words(), i % codes.inputs());
    let low = word(first + i / 8) >> (4 * (i % 8)) & 15;
    let high = word(first + codes.words() - 1) >> high_place(codes, i);
    low | (high & ((1 << (codes.bits().width() - 4)) - 1)) << 4
}

/// Transposes rows into panels of 4-byte units, in parallel.
fn interleave(team: &Team, rows: usize, units: usize, source: &RowSource<'_>) -> Buffer<u32> {
    let mut data = Buffer::weights(rows.div_ceil(LANES) * units * LANES);
    spread(team, &mut data, units * LANES, |panel, data| {
        let mut scratch = Vec::new();
        for lane in 0..LANES.min(rows - panel * LANES) {
            let bytes = source.row(panel * LANES + lane, &mut scratch);
            let (whole, rest) = bytes.as_chunks::<4>();
            for (to, unit) in data[lane..].iter_mut().step_by(LANES).zip(whole) {
                *to = u32::from_le_bytes(*unit);
            }
            if !rest.is_empty() {
                let mut unit = [0; 4];
                unit[..rest.len()].copy_from_slice(rest);
                data[whole.len() * LANES + lane] = u32::from_le_bytes(unit);
            }
        }
    });
    data
}

/// Writes row `row` of a packed weight, with the values of [`TrellisWeight::dequantize_row`].
fn dequantize_trellis_row(w: &PanelWeight, row: usize, out: &mut [f32]) {
    let t = w.trellis();
    let (code, bits, words) = (t.code(), t.scheme.step_bits() as usize, t.scheme.words());
    let tiles = w.inputs / TILE;
    let first = row % STRIP / LANES * 4 + row % LANES / 8;
    let scale = w.scales[row].to_f32();
    for (tile, out) in out.chunks_exact_mut(TILE).enumerate() {
        let from = (row / STRIP * tiles + tile) * SEQUENCES * words;
        let from = &w.data[from..][..SEQUENCES * words];
        // The four sequences that have the row.
        for lane in row % 8 * 4..row % 8 * 4 + 4 {
            for step in (0..t.parts()).flat_map(|part| [0, 2].map(|i| 32 * part + first + i)) {
                let end = (step + 1) * bits;
                let word = (end - 1) / 32;
                let [before, word] =
                    [(word + words - 1) % words, word].map(|i| from[i * SEQUENCES + lane]);
                let values = code.values(trellis::state(
                    &[before, word],
                    64 - (end.wrapping_neg() % 32),
                ));
                let (_, column) = trellis::place(code, lane, step);
                let to = &mut out[column..column + code.width()];
                to.iter_mut()
                    .zip(values)
                    .for_each(|(to, v)| *to = scale * v);
            }
        }
    }
    trellis::transform(out);
    out.iter_mut()
        .zip(&*t.input_scales.0)
        .for_each(|(v, s)| *v *= s.to_f32());
}
