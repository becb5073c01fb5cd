//! Weights as kernels read them: units of 32 inputs (`wgsl/unit.wgsl` says how they lie in words), in exactly the
//! values of their file.

use half::f16;
use nq_formats::{
    AffineScheme, AffineWeight, Bits, Group, HeldSize, Levels, QuantizedWeight, Scheme, Weight,
    ZeroPoints, Zeros, pack,
};
use nq_model::{DType, Dims};
use nq_runtime::{Error, Result};

/// Inputs of a unit.
pub(crate) const UNIT: usize = 32;

/// What a unit's words hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Codes {
    /// Integers of 4, 5, 6 or 8 bits with scales and zero-points.
    Integers(Bits),
    /// Floats.
    Floats(DType),
}

/// How the rows of a weight lie in buffers: rows of weights of one form may stand in one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    pub(crate) codes: Codes,
    /// The logarithm of the inputs that share a scale; 31 if all do.
    pub(crate) shift: u32,
    /// True if groups have an offset, false if they have a zero-point.
    pub(crate) offsets: bool,
    /// Inputs of a row, in units.
    pub(crate) units: usize,
}

/// The shift of a group that is the whole row.
const CHANNEL: u32 = 31;

impl Form {
    /// The form of `weight`, which is part of `product`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for what no kernel reads: trellis codes, groups in activation order, groups and rows of
    /// other sizes.
    pub(crate) fn of(product: &'static str, weight: &Weight) -> Result<Self> {
        let inputs = weight.dims().cols;
        let refuse = |expected: &str, found: String| Error::Unsupported {
            engine: "nq over wgpu",
            what: product,
            expected: format!("{expected}, or --device cpu"),
            found,
        };
        if inputs == 0 || !inputs.is_multiple_of(UNIT) {
            let expected = "inputs in multiples of 32";
            return Err(refuse(expected, format!("{inputs} inputs")));
        }
        let units = inputs / UNIT;
        let floats = |dtype| Form {
            codes: Codes::Floats(dtype),
            shift: CHANNEL,
            offsets: false,
            units,
        };
        let affine = match weight {
            Weight::Dense(tensor) => {
                return match tensor.dtype() {
                    dtype @ (DType::F32 | DType::F16 | DType::BF16) => Ok(floats(dtype)),
                    dtype => Err(refuse("F32, F16 or BF16", dtype.to_string())),
                };
            }
            Weight::Quantized(QuantizedWeight::Affine(affine)) => affine,
            Weight::Quantized(_) => {
                return Err(refuse("integer codes", weight.scheme_name()));
            }
        };
        let scheme = affine.scheme();
        if affine.g_idx().is_some() {
            let found = "groups in activation order (g_idx)".into();
            return Err(refuse("groups of consecutive inputs", found));
        }
        let shift = match scheme.group {
            Group::Size(n) if (n as usize) < inputs => {
                if n < 16 || !n.is_power_of_two() {
                    let expected =
                        "groups of 16 inputs, of another greater power of two, or of whole rows";
                    return Err(refuse(expected, scheme.to_string()));
                }
                n.trailing_zeros()
            }
            _ => CHANNEL,
        };
        Ok(Form {
            codes: Codes::Integers(held(&scheme)),
            shift,
            offsets: scheme.zeros == Zeros::Offset,
            units,
        })
    }

    /// Vectors of four words in a unit, without high bits.
    pub(crate) fn words4(&self) -> usize {
        match self.codes {
            Codes::Integers(Bits::B8) => 2,
            Codes::Integers(_) => 1,
            Codes::Floats(DType::F32) => 8,
            Codes::Floats(_) => 4,
        }
    }

    /// Words of high bits in a unit.
    pub(crate) fn high_words(&self) -> usize {
        match self.codes {
            Codes::Integers(Bits::B5) => 1,
            Codes::Integers(Bits::B6) => 2,
            _ => 0,
        }
    }

    /// Groups of a row that have a scale.
    pub(crate) fn groups(&self) -> usize {
        match self.codes {
            Codes::Floats(_) => 0,
            Codes::Integers(_) => (self.units * UNIT).div_ceil(1 << self.shift),
        }
    }

    /// Bytes of a row: of codes, of high bits, and of scales.
    pub(crate) fn row_bytes(&self) -> [usize; 3] {
        let words = self.units * self.high_words();
        [
            16 * self.units * self.words4(),
            4 * words,
            4 * self.groups(),
        ]
    }
}

/// The width in which codes are held: their own, but 4 bits for fewer, and 8 for those of a table.
fn held(scheme: &AffineScheme) -> Bits {
    match scheme.levels {
        Levels::Table => Bits::B8,
        Levels::Even if scheme.bits < Bits::B4 => Bits::B4,
        Levels::Even => scheme.bits,
    }
}

/// How much of a weight of such a scheme is held.
pub(crate) fn held_size(scheme: Scheme, dims: Dims) -> HeldSize {
    let held = |s: AffineScheme| AffineScheme::new(held(&s), s.group, s.zeros).into();
    scheme.affine().map_or(scheme, held).stored(dims)
}

/// Some rows of a matrix, packed: words of codes, of high bits and of scales.
#[derive(Default)]
pub(crate) struct PackedRows {
    pub(crate) codes: Vec<u32>,
    pub(crate) high: Vec<u32>,
    pub(crate) affine: Vec<u32>,
}

impl PackedRows {
    /// Appends row `row` of `weight`, which is of form `form`.
    pub(crate) fn push(&mut self, form: &Form, weight: &Weight, row: usize) {
        let inputs = form.units * UNIT;
        match weight {
            Weight::Dense(tensor) => {
                let bytes = tensor.data().len() / weight.dims().rows;
                let words = tensor.data()[row * bytes..][..bytes].chunks_exact(4);
                self.codes
                    .extend(words.map(bytemuck::pod_read_unaligned::<u32>));
            }
            Weight::Quantized(QuantizedWeight::Affine(affine)) => {
                let mut codes = vec![0; inputs];
                pack::unpack_row(affine.scheme().bits, affine.row_codes(row), &mut codes);
                if let Some(levels) = affine.levels() {
                    codes.iter_mut().for_each(|c| *c = levels[usize::from(*c)]);
                }
                for unit in codes.as_chunks::<UNIT>().0 {
                    self.push_unit(form, unit);
                }
                self.push_scales(affine, row);
            }
            Weight::Quantized(_) => unreachable!("`Form::of` has refused it"),
        }
    }

    fn push_unit(&mut self, form: &Form, unit: &[u8; UNIT]) {
        if form.codes == Codes::Integers(Bits::B8) {
            let words = unit.as_chunks::<4>().0;
            self.codes
                .extend(words.iter().map(|w| u32::from_le_bytes(*w)));
            return;
        }
        let byte = |at: usize| u32::from(unit[at] & 15) | u32::from(unit[at + 4] & 15) << 4;
        for word in (0..UNIT).step_by(8) {
            let bytes = (0..4).map(|b| byte(word + b) << (8 * b));
            self.codes.push(bytes.fold(0, |all, b| all | b));
        }
        let bits = match form.high_words() {
            0 => return,
            words => words,
        };
        // A word has the high bits of `32 / bits` codes.
        for part in unit.chunks_exact(UNIT / bits) {
            let place =
                |(i, code): (usize, &u8)| u32::from(code >> 4) << (8 * (i % 4) + bits * (i / 4));
            self.high
                .push(part.iter().enumerate().map(place).fold(0, |all, b| all | b));
        }
    }

    fn push_scales(&mut self, weight: &AffineWeight, row: usize) {
        let groups = weight.groups();
        for group in 0..groups {
            let at = row * groups + group;
            let above = match weight.zeros() {
                ZeroPoints::Offset(offsets) => offsets[at],
                ZeroPoints::Integer(_) => {
                    f16::from_f32(weight.zero_point(row, group).unwrap_or_default().into())
                }
                ZeroPoints::None => f16::from_f32(weight.scheme().value_bits().midpoint().into()),
            };
            let scale = weight.scales()[at];
            self.affine
                .push(u32::from(scale.to_bits()) | u32::from(above.to_bits()) << 16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads units back as `unit.wgsl` does.
    fn unpacked(form: &Form, rows: &PackedRows) -> Vec<u8> {
        let mut codes = Vec::new();
        for unit in 0..rows.codes.len() / (4 * form.words4()) {
            for i in 0..UNIT {
                let (quad, byte) = (i / 4, i % 4);
                let word = match form.codes {
                    Codes::Integers(Bits::B8) => rows.codes[8 * unit + quad],
                    _ => rows.codes[4 * unit + quad / 2] >> (4 * (quad % 2)) & 0x0f0f_0f0f,
                };
                let upper = match form.high_words() {
                    0 => 0,
                    1 => (rows.high[unit] >> quad & 0x0101_0101) << 4,
                    _ => (rows.high[2 * unit + quad / 4] >> (2 * (quad % 4)) & 0x0303_0303) << 4,
                };
                codes.push(((word | upper) >> (8 * byte)) as u8);
            }
        }
        codes
    }

    #[test]
    fn codes_of_every_width_come_back() {
        for bits in [Bits::B4, Bits::B5, Bits::B6, Bits::B8] {
            let form = Form {
                codes: Codes::Integers(bits),
                shift: 5,
                offsets: false,
                units: 2,
            };
            let codes: Vec<u8> = (0..64u32)
                .map(|i| (i * 37 + 11) as u8 & bits.max_code())
                .collect();
            let mut rows = PackedRows::default();
            for unit in codes.as_chunks::<UNIT>().0 {
                rows.push_unit(&form, unit);
            }
            assert_eq!(unpacked(&form, &rows), codes, "{bits:?}");
            let [low, high, _] = form.row_bytes();
            assert_eq!((4 * rows.codes.len(), 4 * rows.high.len()), (low, high));
        }
    }
}
