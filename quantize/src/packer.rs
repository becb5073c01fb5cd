//! A weight put together from rounded pieces of its rows, in canonical form.

use crate::error::Result;
use crate::grid::{Grid, GroupParams, Rounded, SpanFactors};
use half::f16;
use nq_formats::{AffineWeight, GroupValues, Parts, QuantizedWeight, Weight, Zeros, pack};
use nq_model::Dims;

/// A weight put together from rounded pieces of its rows, in canonical form.
#[derive(Clone, Debug)]
pub(crate) struct Packer {
    grid: Grid,
    cols: usize,
    rows: usize,
    codes: Vec<u8>,
    scales: PackedValues,
    offsets: PackedValues,
    zeros: Vec<u8>,
}

/// Scales or offsets: an f16 each, or small integers and the f16 of each span.
#[derive(Clone, Debug, Default)]
struct PackedValues {
    half: Vec<f16>,
    small: Vec<u8>,
}

impl PackedValues {
    fn append(&mut self, more: PackedValues) {
        self.half.extend(more.half);
        self.small.extend(more.small);
    }

    fn finish(self, grid: Grid) -> GroupValues {
        match grid.two_level() {
            None => GroupValues::Half(self.half.into()),
            Some(_) => GroupValues::TwoLevel {
                small: self.small.into(),
                of_spans: self.half.into(),
            },
        }
    }
}

impl Packer {
    /// No rows yet, of `cols` columns.
    pub(crate) fn new(grid: Grid, cols: usize) -> Self {
        Packer {
            grid,
            cols,
            rows: 0,
            codes: Vec::new(),
            scales: PackedValues::default(),
            offsets: PackedValues::default(),
            zeros: Vec::new(),
        }
    }

    /// Appends rows, of the same grid and columns.
    pub(crate) fn push(&mut self, rows: &Rounded) {
        debug_assert!(rows.grid == self.grid && rows.cols == self.cols);
        let scheme = self.grid.scheme();
        let codes = pack::pack_rows(scheme.bits, &rows.codes, self.cols);
        self.codes.extend_from_slice(&codes);
        self.scales
            .append(values(rows, |p, factors| (p.scale, factors.scale)));
        match scheme.zeros {
            Zeros::None => {}
            Zeros::Integer => {
                let zeros: Vec<u8> = rows.params.iter().map(|p| p.zero).collect();
                let packed = pack::pack_rows(scheme.bits, &zeros, rows.groups());
                self.zeros.extend_from_slice(&packed);
            }
            Zeros::Offset => {
                let offsets = values(rows, |p, factors| (p.offset, factors.offset));
                self.offsets.append(offsets);
            }
        }
        self.rows += rows.rows();
    }

    /// Appends what another of the same grid and columns has.
    pub(crate) fn append(&mut self, more: Packer) {
        debug_assert!(more.grid == self.grid && more.cols == self.cols);
        self.codes.extend(more.codes);
        self.scales.append(more.scales);
        self.offsets.append(more.offsets);
        self.zeros.extend(more.zeros);
        self.rows += more.rows;
    }

    /// The weight.
    pub(crate) fn finish(self) -> Result<Weight> {
        let (grid, scheme) = (self.grid, self.grid.scheme());
        let parts = Parts {
            codes: self.codes.into(),
            scales: self.scales.finish(grid),
            zeros: (scheme.zeros == Zeros::Integer).then(|| self.zeros.into()),
            offsets: grid.offsets().then(|| self.offsets.finish(grid)),
            levels: None,
            g_idx: None,
        };
        let weight = AffineWeight::assemble(scheme, Dims::new(self.rows, self.cols), parts)?;
        Ok(Weight::Quantized(QuantizedWeight::Affine(weight)))
    }
}

/// What `parts` names of a group and its span.
fn values(rows: &Rounded, parts: impl Fn(GroupParams, SpanFactors) -> (f32, f16)) -> PackedValues {
    let half = |p: &GroupParams| f16::from_f32(parts(*p, SpanFactors::default()).0);
    let factors = |s: &SpanFactors| parts(GroupParams::default(), *s).1;
    match rows.grid.two_level() {
        None => PackedValues {
            half: rows.params.iter().map(half).collect(),
            small: Vec::new(),
        },
        Some(two) => PackedValues {
            half: rows.spans.iter().map(factors).collect(),
            small: pack::pack_rows(two.bits, &rows.small(parts), rows.groups()),
        },
    }
}

impl Rounded {
    /// The weight in canonical form.
    ///
    /// # Errors
    /// Errors of [`nq_formats::AffineWeight::new`]; the methods of this crate cause none.
    pub(crate) fn to_weight(&self) -> Result<Weight> {
        let mut packer = Packer::new(self.grid, self.cols);
        packer.push(self);
        packer.finish()
    }
}
