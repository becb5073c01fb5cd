//! What a session of a rank, a GPU with a part of every layer, has beside what that of a whole model has: its share of
//! what blocks add to the residual stream, and the way to the shares of the other ranks.

use super::{CudaSession, Widths};
use crate::error::{Error, Result};
use nq_kernels::cuda::{AllReduce, Buffer, Gpu, Inbox, PartialSums, Rank, Share, Stream};

/// Buffers of a rank.
pub(super) struct RankRows {
    /// What products of this rank add, `[rows, hidden]`: zero until they do.
    share: Buffer<f32>,
    inbox: Inbox,
    /// `None` until the rank has joined the others.
    sums: Option<AllReduce>,
}

impl RankRows {
    /// Allocates them for passes of up to `rows` rows.
    pub(super) fn new(gpu: &Gpu, w: &Widths, rank: Rank, rows: usize) -> Result<Self> {
        Ok(RankRows {
            share: gpu.zeros("activations", rows * w.hidden)?,
            inbox: Inbox::new(gpu, rank, (rows, w.hidden))?,
            sums: None,
        })
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
        stream.all_reduce(x, Share::Rows(share), sums, m)
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

impl CudaSession {
    /// Where other ranks write their shares for this one; `None` for a whole model.
    pub(in crate::cuda) fn inbox(&self) -> Option<Inbox> {
        self.ranks.as_ref().map(|ranks| ranks.inbox.clone())
    }

    /// Joins the ranks with these inboxes, which are all of the model's.
    pub(in crate::cuda) fn join(&mut self, inboxes: Vec<Inbox>) -> Result<()> {
        if let (Some(ranks), Some(rank)) = (&mut self.ranks, self.model.rank) {
            ranks.sums = Some(AllReduce::new(&self.model.gpu, rank.rank, inboxes)?);
        }
        Ok(())
    }

    /// Refuses results of a rank that waited in vain for another.
    pub(in crate::cuda) fn check_ranks(&self) -> Result<()> {
        let sums = self.ranks.as_ref().and_then(|ranks| ranks.sums.as_ref());
        match sums.is_some_and(AllReduce::is_lost) {
            false => Ok(()),
            true => Err(Error::Kernel(nq_kernels::Error::Cuda {
                what: "summing over GPUs",
                why: format!("{} waited in vain for another", self.model.gpu.info()),
            })),
        }
    }
}
