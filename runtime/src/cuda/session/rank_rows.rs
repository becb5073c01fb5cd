//! Buffers of a rank, a GPU with a part of every layer, and sums over ranks.

use super::buffers::Widths;
use crate::error::Result;
use nq_kernels::cuda::{
    AllReduce, Buffer, Gpu, Inbox, LayersInbox, PartialSums, Rank, Share, Stream,
};

/// Buffers of a rank.
pub(super) struct RankRows {
    /// What products of this rank add, `[rows, hidden]`: zero until they do.
    pub(super) share: Buffer<f32>,
    /// What one product of many rows alone is, `[rows, hidden]`: written whole each time.
    pub(super) written: Buffer<f32>,
    pub(super) inbox: Inbox,
    /// `None` until the rank has joined the others.
    pub(super) sums: Option<AllReduce>,
    /// Of the kernel of all layers, on every rank; 0 if not all of them run it.
    pub(super) blocks: usize,
}

/// Where other ranks write what they add to a rank's residual stream: by kernels for it, and by the kernel of all
/// layers. Cloning shares it.
#[derive(Clone)]
pub(in crate::cuda) struct RankInbox {
    pub(super) sums: Inbox,
    pub(super) layers: LayersInbox,
}

impl RankRows {
    /// Allocates them for steps of up to `rows` rows, and for passes of up to `many`.
    pub(super) fn new(
        gpu: &Gpu,
        w: &Widths,
        rank: Rank,
        (rows, many): (usize, usize),
    ) -> Result<Self> {
        let most = rows.max(many);
        // Of many rows, only the sums of experts are added to something.
        let added = if w.experts.is_some() { most } else { rows };
        Ok(RankRows {
            share: gpu.zeros("activations", added * w.hidden)?,
            written: gpu.zeros("activations", many * w.hidden)?,
            inbox: Inbox::new(gpu, rank, (most, w.hidden))?,
            sums: None,
            blocks: 0,
        })
    }

    /// Where a product of many rows writes the share, if nothing else is part of it.
    pub(super) fn written(&mut self) -> &mut Buffer<f32> {
        &mut self.written
    }

    /// Blocks of the kernel of all layers; 0 if ranks do not run it.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    fn sums(&self) -> nq_kernels::Result<&AllReduce> {
        self.sums.as_ref().ok_or_else(|| nq_kernels::Error::Shape {
            op: "all_reduce",
            what: "rank",
            expected: "one that has joined the others".into(),
            found: "one alone".into(),
        })
    }
}

/// Where products add their outputs: to the residual stream `x`, or to a rank's share.
pub(super) fn added_to<'a>(
    x: &'a mut Buffer<f32>,
    ranks: &'a mut Option<&mut RankRows>,
) -> &'a mut Buffer<f32> {
    match ranks {
        Some(ranks) => &mut ranks.share,
        None => x,
    }
}

/// Adds the shares of all ranks to `x` `[m, hidden]`, if there are several.
pub(super) fn reduce(
    stream: &Stream,
    x: &mut Buffer<f32>,
    ranks: &mut Option<&mut RankRows>,
    (m, hidden): (usize, usize),
) -> nq_kernels::Result<()> {
    let Some(ranks) = ranks else { return Ok(()) };
    ranks.sums()?;
    let RankRows { share, sums, .. } = &mut **ranks;
    let Some(sums) = sums else { return Ok(()) };
    stream.timed(("all-reduce", "fused", (m, hidden)), 0, || {
        stream.all_reduce(x, Share::Cleared(share), sums, m)
    })
}

/// As [`reduce`], for a share that a product wrote to [`RankRows::written`].
pub(super) fn reduce_written(
    stream: &Stream,
    x: &mut Buffer<f32>,
    ranks: &RankRows,
    (m, hidden): (usize, usize),
) -> nq_kernels::Result<()> {
    let sums = ranks.sums()?;
    stream.timed(("all-reduce", "fused", (m, hidden)), 0, || {
        stream.all_reduce(x, Share::Rows(&ranks.written), sums, m)
    })
}

/// As [`reduce`], for a share that a product left in parts; false if there are no ranks.
pub(super) fn reduce_parts(
    stream: &Stream,
    x: &mut Buffer<f32>,
    parts: &PartialSums,
    ranks: &Option<&mut RankRows>,
    (m, hidden): (usize, usize),
) -> nq_kernels::Result<bool> {
    let Some(ranks) = ranks else { return Ok(false) };
    let sums = ranks.sums()?;
    stream.timed(("all-reduce", "fused", (m, hidden)), 0, || {
        stream.all_reduce(x, Share::Parts(parts), sums, m)
    })?;
    Ok(true)
}
