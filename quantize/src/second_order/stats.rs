//! Calibration statistics, whatever holds the second moments.

use super::Hessian;
use super::device::DeviceHessian;
use crate::error::Result;
use crate::linalg::{Matrix, Moments};
use std::sync::Arc;

/// Calibration statistics of a Linear's inputs.
#[derive(Clone, Debug, Default)]
pub struct InputStats {
    /// `E[x_i^2]`, `[in]`.
    pub mean_square: Vec<f32>,
    /// `E[x x^T]`, `[in, in]`.
    pub hessian: Option<Arc<dyn Hessian>>,
    /// Number of inputs that these are means of; 0 if that is not known.
    pub rows: usize,
}

impl InputStats {
    /// Statistics from these second moments.
    pub fn of(moments: Matrix) -> Self {
        InputStats {
            mean_square: (0..moments.cols).map(|i| moments.row(i)[i]).collect(),
            hessian: Some(Arc::new(moments)),
            rows: 0,
        }
    }

    /// Statistics from second moments that a device keeps.
    pub fn on_device(moments: Arc<dyn nq_kernels::second_order::DeviceMoments>) -> Self {
        InputStats {
            mean_square: moments.diagonal().to_vec(),
            hessian: Some(Arc::new(DeviceHessian(moments))),
            rows: 0,
        }
    }

    /// The same statistics, with second moments on the GPU of this ordinal, if there are any.
    pub(crate) fn moved_to(self, gpu: usize) -> Result<Self> {
        let Some(moments) = self.hessian.as_ref().and_then(|h| h.host()) else {
            return Ok(self);
        };
        let moments = nq_load::gpu::moments(gpu, &moments.data, moments.cols)?;
        Ok(InputStats {
            rows: self.rows,
            ..InputStats::on_device(moments)
        })
    }

    /// The statistics of `x_i / s_i`.
    ///
    /// # Errors
    /// Errors of the device, if the moments are on one.
    pub fn divide(&mut self, s: &[f32]) -> Result<()> {
        for (m, &s) in self.mean_square.iter_mut().zip(s) {
            *m /= s * s;
        }
        if let Some(h) = &mut self.hessian {
            *h = h.divided(s)?;
        }
        Ok(())
    }
}

impl From<Moments> for InputStats {
    fn from(moments: Moments) -> Self {
        let rows = moments.rows();
        let stats = if moments.is_full() {
            InputStats::of(moments.matrix())
        } else {
            InputStats {
                mean_square: moments.mean_squares(),
                ..InputStats::default()
            }
        };
        InputStats { rows, ..stats }
    }
}

/// Calibration statistics of the inputs of each of a layer's products, in their order; one entry
/// per expert if experts have inputs of their own ([`Product::shares`](nq_model::Product::shares)).
pub type LayerStats = Vec<Vec<InputStats>>;
