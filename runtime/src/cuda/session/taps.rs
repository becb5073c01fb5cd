//! Residual streams of a pass that a drafter reads.

use nq_kernels::Result;
use nq_kernels::cuda::{Buffer, Gpu, Stream, Strided};

/// The streams of the latest pass after some of its layers.
pub(in crate::cuda) struct Taps {
    /// The numbers of layers after which they are kept.
    after: Vec<usize>,
    hidden: usize,
    streams: Buffer<f32>, // [rows, taps, hidden]
}

impl Taps {
    /// Allocates them for passes of up to `rows` rows.
    pub(super) fn new(gpu: &Gpu, after: Vec<usize>, rows: usize, hidden: usize) -> Result<Self> {
        Ok(Taps {
            streams: gpu.zeros("residual streams", rows * after.len() * hidden)?,
            after,
            hidden,
        })
    }

    /// Copies the streams `x` `[m, hidden]` behind layer `layer`, if they are to be kept.
    pub(super) fn keep(
        &mut self,
        stream: &Stream,
        layer: usize,
        x: &Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        let (hidden, taps) = (self.hidden, self.after.len());
        for tap in (0..taps).filter(|&tap| self.after[tap] == layer + 1) {
            let from = Strided {
                at: 0,
                stride: hidden,
            };
            let to = Strided {
                at: tap * hidden,
                stride: taps * hidden,
            };
            stream.copy_rows((x, from), (&mut self.streams, to), (m, hidden))?;
        }
        Ok(())
    }

    /// The streams of each row, side by side.
    pub(super) fn streams(&self) -> &Buffer<f32> {
        &self.streams
    }
}
