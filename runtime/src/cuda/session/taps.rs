//! Residual streams of a pass that a drafter reads.

use nq_formats::eagle::TAPS;
use nq_kernels::Result;
use nq_kernels::cuda::{Buffer, Gpu, Stream, Strided};

/// The streams of the latest pass after some of its layers.
pub(in crate::cuda) struct Taps {
    /// The numbers of layers after which they are kept.
    after: [usize; TAPS],
    hidden: usize,
    streams: Buffer<f32>, // [rows, TAPS, hidden]
}

impl Taps {
    /// Allocates them for passes of up to `rows` rows.
    pub(super) fn new(gpu: &Gpu, after: [usize; TAPS], rows: usize, hidden: usize) -> Result<Self> {
        Ok(Taps {
            after,
            hidden,
            streams: gpu.zeros("residual streams", rows * TAPS * hidden)?,
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
        let (hidden, after) = (self.hidden, self.after);
        for tap in (0..TAPS).filter(|&tap| after[tap] == layer + 1) {
            let from = Strided {
                at: 0,
                stride: hidden,
            };
            let to = Strided {
                at: tap * hidden,
                stride: TAPS * hidden,
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
