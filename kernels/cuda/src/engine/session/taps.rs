//! Residual streams of a pass that a drafter reads.

use crate::{Buffer, CopiedRows, Stream, Strided};
use nq_kernels::Result;

/// The streams of the latest pass after some of its layers.
pub(in crate::engine) struct Taps {
    /// The numbers of layers after which they are kept.
    after: Vec<usize>,
    hidden: usize,
    streams: Buffer<f32>, // [rows, taps, hidden]
}

impl Taps {
    /// Keeps the streams of `hidden` values in `streams`.
    pub(super) fn new(after: Vec<usize>, hidden: usize, streams: Buffer<f32>) -> Self {
        Taps {
            after,
            hidden,
            streams,
        }
    }

    /// Copies the streams `x` `[m, hidden]` behind layer `layer`, if they are to be kept.
    pub(in crate::engine) fn keep(
        &mut self,
        stream: &Stream,
        layer: usize,
        x: &Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        let (hidden, taps) = (self.hidden, self.after.len());
        for tap in (0..taps).filter(|&tap| self.after[tap] == layer + 1) {
            let begin = Strided {
                at: 0,
                stride: hidden,
            };
            let end = Strided {
                at: tap * hidden,
                stride: taps * hidden,
            };
            stream.copy_rows(CopiedRows {
                from: x,
                begin,
                to: &mut self.streams,
                end,
                rows: m,
                width: hidden,
            })?;
        }
        Ok(())
    }

    /// The streams of each row, side by side.
    pub(super) fn streams(&self) -> &Buffer<f32> {
        &self.streams
    }
}
