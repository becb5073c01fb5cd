//! Weights in trellis codes while they are tuned.
//!
//! The search for the nearest path takes longer than a step. So latent weights get the gradient of the values at every
//! step, and codes and scales of rows are found again once in a while (`Nearest`): they follow from the latent weights
//! alone. Where these do not fit the device, scales of rows are tuned. Scales of inputs stay: gains of norms, and scales
//! of rows of the products before, do what they could.

use super::values::{Kind, Values, check_finite};
use crate::error::Result;
use crate::linalg::Matrix;
use half::f16;
use nq_formats::{QuantizedWeight, TrellisScheme, TrellisWeight, Weight};
use nq_kernels::grad::{Allocate, Gemm, GradOps};
use nq_model::Dims;

/// Finds the codes and scales of rows that are nearest to a weight.
pub(crate) type Nearest<'a> = dyn Fn(&Matrix, TrellisScheme) -> Result<TrellisWeight> + 'a;

/// How far latent weights start from the trellis's values towards the source's, as a share of the way.
const REACH: f32 = 0.5;
/// Steps of an even grid, in root mean squares of its error: what rates are relative to.
const STEP: f32 = 3.464;
/// Latent weights of trellises move so many times as fast as those of even grids. The demo model in 7.58 MB has a divergence
/// of .0144 after 600 steps at the rate of even grids, of .0137 at twice that, and gains nothing at four times.
const RATE: f32 = 2.0;
/// Most rows of a weight whose scales alone are tuned: GPUs take as many products at once.
pub(super) const MOST_ROWS: usize = 65_535;

/// A weight in a trellis code.
pub struct TunedTrellis<O: Allocate> {
    scheme: Option<TrellisScheme>, // none on an account of memory
    dims: Dims,
    values: O::Floats, // [rows, cols], without the scales of rows if these are tuned
    /// Latent weights `[rows, cols]` or scales of rows `[rows]`.
    pub(super) tuned: Values<O>,
}

impl<O: Allocate> TunedTrellis<O> {
    /// Allocates a weight; its codes are tuned if `codes`, else its scales.
    pub(super) fn zeros(ops: &O, name: &str, dims: Dims, codes: bool) -> Result<Self> {
        let (part, kind, n) = match codes {
            true => ("latent", Kind::Latent, dims.rows * dims.cols),
            false => ("scales", Kind::Scale, dims.rows),
        };
        Ok(TunedTrellis {
            scheme: None,
            dims,
            values: ops.floats("weights", dims.rows * dims.cols)?,
            tuned: Values::zeros(ops, format!("{name}.{part}"), kind, n, true)?,
        })
    }

    fn codes(&self) -> bool {
        self.tuned.kind == Kind::Latent
    }
}

impl<O: GradOps> TunedTrellis<O> {
    /// The weight `w`, rounded from `source`.
    ///
    /// # Errors
    /// A source that is not finite; errors of the device.
    pub(super) fn new(
        ops: &O,
        name: &str,
        w: &TrellisWeight,
        source: &Weight,
        codes: bool,
    ) -> Result<Self> {
        let dims = Dims::new(w.out_features(), w.in_features());
        let mut trellis = Self::zeros(ops, name, dims, codes)?;
        trellis.scheme = Some(w.scheme());
        if !codes {
            let units = with_scales(w, &vec![1.0; dims.rows])?;
            trellis.set(ops, &units)?;
            let scales: Vec<f32> = w.row_scales().iter().map(|s| s.to_f32()).collect();
            trellis.tuned.start(ops, &scales)?;
            return Ok(trellis);
        }
        let values = trellis.set(ops, w)?;
        let mut start = Matrix::from_weight(name, source)?;
        let mut square = 0.0;
        for (to, value) in start.data.iter_mut().zip(&values.data) {
            let error = *to - value;
            square += f64::from(error).powi(2);
            *to = value + REACH * error;
        }
        trellis.tuned.start(ops, &start.data)?;
        let mean = square / start.data.len().max(1) as f64;
        trellis.tuned.magnitude = RATE * STEP * mean.sqrt() as f32;
        Ok(trellis)
    }

    /// The weight nearest to the latent weights; `None` if codes are not tuned.
    pub(super) fn search(&self, ops: &O, nearest: &Nearest<'_>) -> Result<Option<TrellisWeight>> {
        let Some(scheme) = self.scheme.filter(|_| self.codes()) else {
            return Ok(None);
        };
        let data = self.tuned.to_host(ops)?;
        let Dims { rows, cols } = self.dims;
        nearest(&Matrix { rows, cols, data }, scheme).map(Some)
    }

    /// Takes, and returns, the values of `w`.
    pub(super) fn set(&mut self, ops: &O, w: &TrellisWeight) -> Result<Matrix> {
        let w = Weight::Quantized(QuantizedWeight::Trellis(w.clone()));
        let values = Matrix::from_weight("a tuned weight", &w)?;
        ops.write(&mut self.values, &values.data)?;
        Ok(values)
    }

    /// Where the gradient of the values is summed, if they are tuned themselves.
    pub(super) fn gradient(&mut self) -> Option<&mut O::Floats> {
        let codes = self.codes();
        let state = self.tuned.state.as_mut().filter(|_| codes);
        state.map(|s| &mut s.grad)
    }

    /// Adds the gradient of the values, `dw`, to that of scales, if these are tuned.
    pub(super) fn accumulate(&mut self, ops: &O, dw: &O::Floats) -> Result<()> {
        let Dims { rows, cols } = self.dims;
        let codes = self.codes();
        if let Some(state) = self.tuned.state.as_mut().filter(|_| !codes) {
            let mut dots = Gemm::linear(1, 1, cols).add();
            dots.batch = rows;
            ops.gemm(dots, dw, &self.values, &mut state.grad)?;
        }
        Ok(())
    }

    /// Its values.
    pub(super) fn load<'a>(
        &'a self,
        ops: &O,
        scratch: &'a mut O::Floats,
    ) -> nq_kernels::Result<&'a O::Floats> {
        if self.codes() {
            return Ok(&self.values);
        }
        let mut scaled = Gemm::input_grad(1, 1, self.dims.cols);
        scaled.batch = self.dims.rows;
        ops.gemm(scaled, &self.tuned.value, &self.values, scratch)?;
        Ok(scratch)
    }
}

/// The same codes with other scales of rows.
fn with_scales(w: &TrellisWeight, scales: &[f32]) -> Result<TrellisWeight> {
    let dims = Dims::new(w.out_features(), w.in_features());
    let scales = scales.iter().map(|&s| f16::from_f32(s)).collect();
    let (words, inputs) = (w.words().clone(), w.input_scales().into());
    Ok(TrellisWeight::new(w.scheme(), dims, words, scales, inputs)?)
}

/// `w` with the latent weights or scales that `lookup` returns by name.
pub(super) fn rounded<'a>(
    name: &str,
    w: &TrellisWeight,
    lookup: &impl Fn(&str) -> Option<&'a [f32]>,
    nearest: &Nearest<'_>,
) -> Result<TrellisWeight> {
    let (rows, cols) = (w.out_features(), w.in_features());
    if let Some(latent) = lookup(&format!("{name}.latent")) {
        check_finite(name, latent, cols)?;
        let data = latent.to_vec();
        return nearest(&Matrix { rows, cols, data }, w.scheme());
    }
    let Some(scales) = lookup(&format!("{name}.scales")) else {
        return Ok(w.clone());
    };
    check_finite(name, scales, 1)?;
    with_scales(w, scales)
}
