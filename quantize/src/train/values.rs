//! Vectors of parameters on a device, with what Adam keeps of those that are tuned.

use crate::error::Result;
use nq_formats::Tensor;
use nq_kernels::grad::{Adam, Allocate, GradOps};

/// Kind of a parameter vector: each kind has its own learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Latent weights, which codes are rounded from.
    Latent,
    /// Scales of groups.
    Scale,
    /// Gains of norms.
    Gain,
}

/// Values on the device, and Adam's state for them if they are tuned.
pub struct Values<O: Allocate> {
    /// Name of the parameter: `<weight name>.<part>`.
    pub name: String,
    /// Its kind.
    pub kind: Kind,
    /// Number of values.
    pub len: usize,
    /// The values.
    pub value: O::Floats,
    /// Gradient and moments; `None` if the values are not tuned.
    pub state: Option<State<O>>,
    /// What rates are relative to: the mean of absolute values at the start; of latent weights, the mean
    /// step of the grid. A rate that moves a 4-bit code by a cell would move a 6-bit code by four.
    pub magnitude: f32,
}

/// Gradient and Adam's moments.
pub struct State<O: Allocate> {
    /// Gradient, summed since the last step.
    pub grad: O::Floats,
    /// Running mean of gradients.
    pub mean: O::Floats,
    /// Running mean of squared gradients.
    pub square: O::Floats,
}

impl<O: Allocate> AsRef<O::Floats> for Values<O> {
    fn as_ref(&self) -> &O::Floats {
        &self.value
    }
}

impl<O: Allocate> Values<O> {
    /// Allocates `len` values, and Adam's state for them if they are tuned.
    pub(super) fn zeros(
        ops: &O,
        name: String,
        kind: Kind,
        len: usize,
        tuned: bool,
    ) -> Result<Self> {
        let zeros = || ops.floats("parameters to be tuned", len);
        let state = || -> Result<State<O>> {
            Ok(State {
                grad: zeros()?,
                mean: zeros()?,
                square: zeros()?,
            })
        };
        Ok(Values {
            name,
            kind,
            len,
            value: zeros()?,
            state: tuned.then(state).transpose()?,
            magnitude: 0.0,
        })
    }

    /// Sets the values they start from.
    pub(super) fn start(&mut self, ops: &O, values: &[f32]) -> Result<()> {
        ops.write(&mut self.value, values)?;
        let sum: f64 = values.iter().map(|v| f64::from(v.abs())).sum();
        self.magnitude = (sum / self.len.max(1) as f64) as f32;
        Ok(())
    }

    /// Gains of a norm.
    pub(super) fn gains(ops: &O, name: String, gains: &Tensor, tuned: bool) -> Result<Self> {
        Self::vector(ops, name, &gains.to_f32()?, tuned)
    }

    /// A vector of a layer.
    pub(super) fn vector(ops: &O, name: String, from: &[f32], tuned: bool) -> Result<Self> {
        let mut values = Self::zeros(ops, name, Kind::Gain, from.len(), tuned)?;
        values.start(ops, from)?;
        Ok(values)
    }
}

impl<O: GradOps> Values<O> {
    /// Takes one step of Adam, if it is tuned.
    pub(crate) fn step(&mut self, ops: &O, adam: Adam) -> Result<()> {
        if let Some(s) = &mut self.state {
            let n = self.len;
            ops.adam(
                adam,
                &mut self.value,
                &mut s.mean,
                &mut s.square,
                &mut s.grad,
                n,
            )?;
        }
        Ok(())
    }

    /// Copies the values to the host.
    pub(crate) fn to_host(&self, ops: &O) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.len];
        ops.read(&self.value, &mut values)?;
        Ok(values)
    }
}

/// Refuses values of the parameter `name` `[rows, cols]` that no file can hold.
pub(super) fn check_finite(name: &str, values: &[f32], cols: usize) -> Result<()> {
    // A value beyond f16 cannot be a scale; gains and latent weights are far below that.
    let bad = |v: &f32| !v.is_finite() || v.abs() > 65504.0;
    match values.iter().position(bad) {
        None => Ok(()),
        Some(i) => Err(crate::Error::NotFinite {
            tensor: format!("{name} (tuned)"),
            found: values[i],
            row: i / cols.max(1),
            column: i % cols.max(1),
        }),
    }
}
