//! Weights in a trellis code: a run of weights is a path through a graph of states, after QTIP (arXiv 2406.11235).
//!
//! A weight `[out, in]` is `diag(row scales) T H diag(input scales)`. `H` is the orthonormal Hadamard transform of each
//! 128 inputs ([`transform`]), after which a row's values are close to Gaussian; the values of `T` are those of the
//! code's states. A state is the last 16 bits of a stream: a step shifts new bits in and gives one or two values. The
//! stream of a sequence of 128 values is cyclic, the bits before its first step being its last, so a sequence is
//! decoded without its neighbours and costs no bit more than its values.
//!
//! Sequences lie as the tensor cores of GPUs read them ([`place`]): a strip has 128 rows, a tile of it 32 columns, and
//! a tile 32 sequences, one of each lane of a warp.

use crate::error::{Error, Result};
use bytes::Bytes;
use half::f16;
use nq_model::Dims;
use serde::{Deserialize, Serialize};
use std::f32::consts::FRAC_1_SQRT_2;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Values of a sequence.
pub const SEQUENCE: usize = 128;
/// Rows of a strip.
pub const STRIP: usize = 128;
/// Columns of a tile.
pub const TILE: usize = 32;
/// Sequences of a tile.
pub const LANES: usize = 32;
/// Inputs that are transformed together.
pub const BLOCK: usize = 128;

/// How values follow from the four bytes of a state's product with [`Code::multiplier`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Code {
    /// One value a step: `b0 + b1 + b2 + b3`, less its mean.
    Sum,
    /// Two values a step: `b0 + (b1 - b3) / sqrt 2` and `b2 + (b1 + b3) / sqrt 2`, less their means.
    Octagon,
}

impl Code {
    /// Every code.
    pub const ALL: [Code; 2] = [Code::Sum, Code::Octagon];

    /// Values of a step.
    pub const fn width(self) -> usize {
        match self {
            Code::Sum => 1,
            Code::Octagon => 2,
        }
    }

    /// The constant that states are multiplied by, modulo 2^32.
    pub const fn multiplier(self) -> u32 {
        match self {
            Code::Sum => 0xD17F_17D3,
            Code::Octagon => 0xAD1B_72DB,
        }
    }

    /// The bits that a step may read.
    pub const fn steps(self) -> &'static [u32] {
        match self {
            Code::Sum => &[2, 3, 4, 5, 6],
            Code::Octagon => &[4, 5, 6, 7, 8, 10],
        }
    }

    /// The values of a state, 1/128 of the sums of bytes; the second is 0 if a step has one.
    #[inline]
    pub fn values(self, state: u16) -> [f32; 2] {
        let [b0, b1, b2, b3] = u32::from(state)
            .wrapping_mul(self.multiplier())
            .to_le_bytes()
            .map(|b| (f32::from(b) - 127.5) / 128.0);
        match self {
            Code::Sum => [b0 + b1 + b2 + b3, 0.0],
            Code::Octagon => [
                b0 + FRAC_1_SQRT_2 * (b1 - b3),
                b2 + FRAC_1_SQRT_2 * (b1 + b3),
            ],
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Code::Sum => "sum",
            Code::Octagon => "octagon",
        }
    }
}

/// A trellis code at a number of bits a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "Record", try_from = "Record")]
pub struct TrellisScheme {
    code: Code,
    step_bits: u32,
}

/// A scheme as files name it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    trellis: Code,
    bits: f32,
}

impl From<TrellisScheme> for Record {
    fn from(scheme: TrellisScheme) -> Self {
        Record {
            trellis: scheme.code,
            bits: scheme.bits(),
        }
    }
}

impl TryFrom<Record> for TrellisScheme {
    type Error = Error;
    fn try_from(record: Record) -> Result<Self> {
        TrellisScheme::of_bits(record.trellis, record.bits)
    }
}

impl TrellisScheme {
    /// The code `code` whose steps read `step_bits` bits.
    ///
    /// # Errors
    /// [`Error::Scheme`] if the code has no such steps.
    pub fn new(code: Code, step_bits: u32) -> Result<Self> {
        let scheme = TrellisScheme { code, step_bits };
        match code.steps().contains(&step_bits) {
            true => Ok(scheme),
            false => Err(Self::no_such(code, scheme.bits())),
        }
    }

    /// The code `code` with `bits` bits a weight.
    pub fn of_bits(code: Code, bits: f32) -> Result<Self> {
        let found = Self::all().find(|s| s.code == code && s.bits() == bits);
        found.ok_or_else(|| Self::no_such(code, bits))
    }

    fn no_such(code: Code, bits: f32) -> Error {
        let all = Self::all().filter(|s| s.code == code);
        let known: Vec<String> = all.map(|s| s.bits().to_string()).collect();
        Error::Scheme {
            expected: format!("a trellis code {code} of {} bits", known.join(", ")),
            found: format!("{bits} bits"),
        }
    }

    /// Every scheme, by code and bits.
    pub fn all() -> impl Iterator<Item = TrellisScheme> {
        let widths = |code: Code| {
            let steps = code.steps().iter();
            steps.map(move |&step_bits| TrellisScheme { code, step_bits })
        };
        Code::ALL.into_iter().flat_map(widths)
    }

    /// The code.
    pub const fn code(self) -> Code {
        self.code
    }

    /// Bits that a step reads.
    pub const fn step_bits(self) -> u32 {
        self.step_bits
    }

    /// Bits of a weight.
    pub const fn bits(self) -> f32 {
        self.step_bits as f32 / self.code.width() as f32
    }

    /// Mean squared error on values that are normally distributed, of variance 1 (docs/lab/trellis.md).
    pub const fn squared_error(self) -> f64 {
        match (self.code, self.step_bits) {
            (Code::Sum, 2) => 0.0696,
            (Code::Sum, 3) => 0.0177,
            (Code::Sum, 4) => 0.00448,
            (Code::Sum, 5) => 0.00115,
            (Code::Sum, _) => 0.000305,
            (Code::Octagon, 4) => 0.0711,
            (Code::Octagon, 5) => 0.0364,
            (Code::Octagon, 6) => 0.0187,
            (Code::Octagon, 7) => 0.00959,
            (Code::Octagon, 8) => 0.00507,
            (Code::Octagon, _) => 0.00146,
        }
    }

    /// Steps of a sequence.
    pub const fn steps(self) -> usize {
        SEQUENCE / self.code.width()
    }

    /// u32 words of a sequence.
    pub const fn words(self) -> usize {
        self.steps() * self.step_bits as usize / 32
    }

    /// Bytes of a strip of `in_features` columns.
    pub const fn strip_bytes(self, in_features: usize) -> usize {
        in_features / TILE * LANES * self.words() * 4
    }

    /// Bytes that a `[out_features, in_features]` weight takes in nq's own files: whole strips, and the scales of rows
    /// and inputs.
    pub const fn bytes(self, out_features: usize, in_features: usize) -> usize {
        out_features.div_ceil(STRIP) * self.strip_bytes(in_features)
            + 2 * (out_features + in_features)
    }

    /// Refuses dimensions that the code cannot hold.
    ///
    /// # Errors
    /// [`Error::Weight`] unless `in_features` is a multiple of [`BLOCK`] above 0.
    pub fn check(
        self,
        Dims {
            cols: in_features, ..
        }: Dims,
    ) -> Result<()> {
        if in_features > 0 && in_features.is_multiple_of(BLOCK) {
            return Ok(());
        }
        Err(Error::Weight {
            what: "codes",
            expected: format!("a multiple of {BLOCK} inputs for {self}"),
            found: in_features.to_string(),
        })
    }
}

impl FromStr for Code {
    type Err = Error;

    /// Parses a displayed code.
    fn from_str(name: &str) -> Result<Self> {
        let found = Code::ALL.into_iter().find(|c| c.name() == name);
        found.ok_or_else(|| Error::Scheme {
            expected: "octagon or sum".into(),
            found: name.into(),
        })
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for TrellisScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "trellis{} {}", self.bits(), self.code)
    }
}

impl FromStr for TrellisScheme {
    type Err = Error;

    /// Parses a displayed scheme, such as `trellis3.5 octagon`.
    fn from_str(name: &str) -> Result<Self> {
        let found = Self::all().find(|s| s.to_string() == name);
        found.ok_or_else(|| Error::Scheme {
            expected: "a scheme such as \"trellis3.5 octagon\"".into(),
            found: format!("{name:?}"),
        })
    }
}

/// Where step `step` of lane `lane` puts its values: the row in the strip and the first column in the tile.
#[inline]
pub const fn place(code: Code, lane: usize, step: usize) -> (usize, usize) {
    let (part, m, i) = (step / 32, step / 4 % 8, step % 4);
    let row = 16 * m + lane / 4 + 8 * (i % 2);
    let width = code.width();
    (row, width * (8 * part + 4 * (i / 2) + lane % 4))
}

/// Index of word `word` of lane `lane` among those of a tile, `words` each: runs of four words of each lane, then one
/// of the two that are left.
#[inline]
pub const fn word_place(words: usize, lane: usize, word: usize) -> usize {
    let run = if word < words / 4 * 4 { 4 } else { words % 4 };
    word / 4 * 4 * LANES + lane * run + word % 4
}

/// The 16 bits that end before bit `end` of a cyclic sequence, whose first bit is the highest of its first word.
///
/// # Panics
/// If `end` is 0 or beyond the sequence.
#[inline]
pub fn state(words: &[u32], end: usize) -> u16 {
    let word = (end - 1) / 32;
    let before = words[(word + words.len() - 1) % words.len()];
    let both = u64::from(before) << 32 | u64::from(words[word]);
    (both >> (32 * (word + 1) - end)) as u16
}

/// The orthonormal Hadamard transform of each [`BLOCK`] of `x`, in Sylvester's order; its own inverse.
///
/// # Panics
/// If `x` is not whole blocks.
pub fn transform(x: &mut [f32]) {
    assert!(x.len().is_multiple_of(BLOCK), "{} inputs", x.len());
    for block in x.chunks_exact_mut(BLOCK) {
        let mut half = 1;
        while half < BLOCK {
            for pair in block.chunks_exact_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        block.iter_mut().for_each(|v| *v *= NORM);
    }
}

/// 1 / sqrt 128.
const NORM: f32 = FRAC_1_SQRT_2 / 8.0;

/// A weight `[out, in]` in a trellis code. Parts are checked on construction.
#[derive(Clone, Debug)]
pub struct TrellisWeight {
    scheme: TrellisScheme,
    out_features: usize,
    in_features: usize,
    words: Bytes,             // [strips, tiles, 32 * words] u32, little-endian
    row_scales: Arc<[f16]>,   // [out]
    input_scales: Arc<[f16]>, // [in]
}

impl TrellisWeight {
    /// Assembles a weight of dimensions `(out, in)`: `words` `[strips, tiles, 32 * words of a sequence]` little-endian
    /// u32 ([`word_place`]), the last strip filled up; `row_scales` `[out]`, `input_scales` `[in]`.
    ///
    /// # Errors
    /// [`Error::Weight`], naming the part that has another length or a scale that is not finite, or if `in` is not a
    /// multiple of [`BLOCK`].
    pub fn new(
        scheme: TrellisScheme,
        dims: Dims,
        words: Bytes,
        row_scales: Arc<[f16]>,
        input_scales: Arc<[f16]>,
    ) -> Result<Self> {
        let (out_features, in_features) = dims.pair();
        scheme.check(Dims::new(out_features, in_features))?;
        let strips = out_features.div_ceil(STRIP);
        let bytes = strips.checked_mul(scheme.strip_bytes(in_features));
        let lengths = [
            ("codes", bytes, words.len()),
            ("scales", Some(out_features), row_scales.len()),
            ("input scales", Some(in_features), input_scales.len()),
        ];
        for (what, expected, found) in lengths {
            if expected != Some(found) {
                let expected = expected.map_or("a size in range".into(), |n| n.to_string());
                return Err(Error::Weight {
                    what,
                    expected: format!("{expected} for [{out_features}, {in_features}] {scheme}"),
                    found: found.to_string(),
                });
            }
        }
        for (what, scales) in [("scales", &row_scales), ("input scales", &input_scales)] {
            if let Some(i) = scales.iter().position(|s| !s.is_finite()) {
                return Err(Error::Weight {
                    what,
                    expected: "finite values".into(),
                    found: format!("{} at {i}", scales[i]),
                });
            }
        }
        Ok(TrellisWeight {
            scheme,
            out_features,
            in_features,
            words,
            row_scales,
            input_scales,
        })
    }

    /// Code and bits.
    pub fn scheme(&self) -> TrellisScheme {
        self.scheme
    }

    /// Number of rows.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Number of columns.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// The sequences, `[strips, tiles, 32 * words]` little-endian u32.
    pub fn words(&self) -> &Bytes {
        &self.words
    }

    /// Scales of rows, `[out]`.
    pub fn row_scales(&self) -> &[f16] {
        &self.row_scales
    }

    /// Signed scales of inputs, `[in]`.
    pub fn input_scales(&self) -> &[f16] {
        &self.input_scales
    }

    /// Bytes of the weight in nq's own format.
    pub fn bytes(&self) -> usize {
        self.scheme.bytes(self.out_features, self.in_features)
    }

    /// Writes row `row` as f32 to `out` (`in_features` long).
    ///
    /// # Panics
    /// If there is no such row, or `out` has another length.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.out_features && out.len() == self.in_features);
        let (code, words) = (self.scheme.code, self.scheme.words());
        let bits = self.scheme.step_bits as usize;
        let scale = self.row_scales[row].to_f32();
        let strip = self.scheme.strip_bytes(self.in_features);
        let strip = &self.words[row / STRIP * strip..][..strip];
        let (m, half, first) = (row % STRIP / 16, row / 8 % 2, row % 8 * 4);
        let mut sequence = [0u32; SEQUENCE * 8 / 32];
        let tiles = strip.chunks_exact(LANES * words * 4);
        for (tile, out) in tiles.zip(out.chunks_exact_mut(TILE)) {
            for lane in first..first + 4 {
                for (word, to) in sequence[..words].iter_mut().enumerate() {
                    let at = 4 * word_place(words, lane, word);
                    *to = u32::from_le_bytes([tile[at], tile[at + 1], tile[at + 2], tile[at + 3]]);
                }
                for step in (0..self.scheme.steps() / 16).map(|i| {
                    let (part, k) = (i / 2, i % 2);
                    (part * 8 + m) * 4 + half + 2 * k
                }) {
                    let (_, column) = place(code, lane, step);
                    let values = code.values(state(&sequence[..words], (step + 1) * bits));
                    for (to, v) in out[column..column + code.width()].iter_mut().zip(values) {
                        *to = scale * v;
                    }
                }
            }
        }
        transform(out);
        for (v, s) in out.iter_mut().zip(&*self.input_scales) {
            *v *= s.to_f32();
        }
    }

    /// The rows `ranges`, one range after another, as a weight of its own, which shares the sequences of a single range;
    /// `None` unless they are whole strips (the last of all rows may be short, if no range follows it).
    pub fn rows(&self, ranges: &[std::ops::Range<usize>]) -> Option<TrellisWeight> {
        let strip = self.scheme.strip_bytes(self.in_features);
        let (mut words, mut row_scales) = (Vec::with_capacity(ranges.len()), Vec::new());
        for (place, rows) in ranges.iter().enumerate() {
            let last = rows.end == self.out_features && place + 1 == ranges.len();
            let whole =
                rows.start.is_multiple_of(STRIP) && (rows.end.is_multiple_of(STRIP) || last);
            if !whole || rows.end > self.out_features {
                return None;
            }
            let strips = rows.start / STRIP..rows.end.div_ceil(STRIP);
            words.push(self.words.slice(strips.start * strip..strips.end * strip));
            row_scales.extend_from_slice(&self.row_scales[rows.clone()]);
        }
        let words = match <[Bytes; 1]>::try_from(words) {
            Ok([words]) => words,
            Err(words) => words.concat().into(),
        };
        Some(TrellisWeight {
            out_features: row_scales.len(),
            words,
            row_scales: row_scales.into(),
            ..self.clone()
        })
    }
}
