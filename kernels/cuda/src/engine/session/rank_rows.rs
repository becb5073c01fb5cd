//! Buffers of one of several GPUs, and what it exchanges with the others.

use super::buffers::{LOGIT_ROWS, Widths};
use crate::engine::part::GpuPart;
use crate::{Buffer, Collectives, Gathered, Gpu, Inbox, LayersInbox, PartialSums, Share, Stream};
use nq_model::{Dims, ModelConfig};
use nq_runtime::Result;
use nq_runtime::interface::Split;
use std::ops::Range;

/// Buffers of a rank.
pub(in crate::engine) struct RankRows {
    part: GpuPart,
    shares: Option<Shares>,
    head: Option<HeadRows>,
    pub(super) inbox: Inbox,
    /// `None` until the rank has joined the others.
    pub(super) collectives: Option<Collectives>,
    /// Of the kernel of all layers, on every rank; 0 if not all of them run it.
    pub(super) blocks: usize,
}

/// What products of a part of every layer add to the residual stream.
struct Shares {
    /// `[rows, hidden]`: zero until they do.
    added: Buffer<f32>,
    /// What one product of many rows alone is, `[rows, hidden]`: written whole each time.
    written: Buffer<f32>,
}

/// Of a head of which each rank has some rows.
struct HeadRows {
    /// The tokens of each rank.
    columns: Vec<Range<usize>>,
    /// Logits of this rank's tokens, `[rows, columns]`.
    logits: Buffer<f32>,
}

/// Where other ranks write what they have for a rank: by kernels for it, and by the kernel of all layers. Cloning shares it.
#[derive(Clone)]
pub(in crate::engine) struct RankInbox {
    pub(super) rows: Inbox,
    pub(super) layers: LayersInbox,
}

impl RankRows {
    /// Allocates them for steps of up to `rows` rows, and for passes of up to `many`.
    pub(super) fn new(
        gpu: &Gpu,
        c: &ModelConfig,
        part: GpuPart,
        rows: usize,
        many: usize,
    ) -> Result<Self> {
        let (w, most) = (Widths::of(c), rows.max(many));
        let f32s = |n: usize| gpu.zeros::<f32>("activations", n);
        let shares = match part.split {
            Split::Layers => None,
            Split::Tensors => Some(Shares {
                // Of many rows, only the sums of experts are added to something.
                added: f32s(w.hidden * if w.experts.is_some() { most } else { rows })?,
                written: f32s(w.hidden * many)?,
            }),
        };
        let head = part.divided_head(c).map(|columns| -> Result<_> {
            let own = columns[part.rank.rank].len();
            Ok(HeadRows {
                columns,
                logits: f32s(rows.max(LOGIT_ROWS) * own)?,
            })
        });
        let head = head.transpose()?;
        let sent = (most * w.hidden).max(head.as_ref().map_or(0, |h| h.logits.len()));
        Ok(RankRows {
            part,
            shares,
            head,
            inbox: Inbox::new(gpu, part.rank, sent)?,
            collectives: None,
            blocks: 0,
        })
    }

    /// True for a stage of layers, whose residual stream other ranks go on with.
    pub(in crate::engine) fn is_stage(&self) -> bool {
        self.part.split == Split::Layers
    }

    /// Where a product of many rows writes what it would add, if nothing else is part of that; `None` if it is to add to the
    /// residual stream itself.
    pub(in crate::engine) fn written(&mut self) -> Option<&mut Buffer<f32>> {
        self.shares.as_mut().map(|shares| &mut shares.written)
    }

    /// Where the head writes its logits; `None` if it has all tokens.
    pub(in crate::engine) fn head_logits(&mut self) -> Option<&mut Buffer<f32>> {
        self.head.as_mut().map(|head| &mut head.logits)
    }

    /// Most blocks of the kernel of all layers; 0 if ranks do not run it.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    fn collectives(&self) -> nq_kernels::Result<&Collectives> {
        let missing = || nq_kernels::Error::Shape {
            op: "collectives",
            what: "rank",
            expected: "one that has joined the others".into(),
            found: "one alone".into(),
        };
        self.collectives.as_ref().ok_or_else(missing)
    }

    /// Gives all ranks the rows `x` `[m, hidden]` of those of `ranks`, in their order.
    fn hand_on(
        &self,
        stream: &Stream,
        ranks: Range<usize>,
        x: &mut Buffer<f32>,
        dims: Dims,
    ) -> nq_kernels::Result<()> {
        let (m, hidden) = dims.pair();
        for rank in ranks {
            let columns_of = |r| if r == rank { 0..hidden } else { 0..0 };
            let columns: Vec<Range<usize>> = (0..self.part.rank.ranks).map(columns_of).collect();
            let rows = Gathered {
                from: None,
                to: &mut *x,
                columns: &columns,
                best: None,
            };
            stream.timed(("all-gather", "fused", Dims::new(m, hidden)), 0, || {
                stream.all_gather(rows, self.collectives()?, Dims::new(m, hidden))
            })?;
        }
        Ok(())
    }
}

/// What a stage of layers does with the residual stream of rows `[m, hidden]`; nothing on ranks of parts of every layer.
pub(in crate::engine) enum Handover {
    /// Takes what the stage before made of it.
    Begin,
    /// Passes on what it made of it, to all stages.
    End,
    /// Takes, on all stages, what the last one made of it.
    Last,
}

/// Does `what` with the residual stream, of one of several ranks.
pub(in crate::engine) fn hand_over(
    stream: &Stream,
    x: &mut Buffer<f32>,
    ranks: Option<&RankRows>,
    size: Dims,
    what: Handover,
) -> nq_kernels::Result<()> {
    let Some(ranks) = ranks.filter(|r| r.is_stage()) else {
        return Ok(());
    };
    let (rank, last) = (ranks.part.rank.rank, ranks.part.rank.ranks - 1);
    let from = match what {
        Handover::Begin => 0..rank,
        Handover::End => rank..last,
        Handover::Last => last..last + 1,
    };
    ranks.hand_on(stream, from, x, size)
}

/// Makes of the logits of each rank's tokens those of all, `[m, vocab]`, and finds the best of each part of a row, if there
/// are several ranks and each has some tokens.
pub(in crate::engine) fn gather_logits(
    stream: &Stream,
    ranks: Option<&RankRows>,
    logits: &mut Buffer<f32>,
    best: Option<&mut Buffer<[f32; 2]>>,
    size: Dims,
) -> nq_kernels::Result<()> {
    let Some((ranks, head)) = ranks.and_then(|r| Some((r, r.head.as_ref()?))) else {
        return Ok(());
    };
    let rows = Gathered {
        from: Some(&head.logits),
        to: logits,
        columns: &head.columns,
        best,
    };
    stream.timed(("all-gather", "fused", size), 0, || {
        stream.all_gather(rows, ranks.collectives()?, size)
    })
}

/// Where products add their outputs: to the residual stream `x`, or to a rank's share.
pub(in crate::engine) fn added_to<'a>(
    x: &'a mut Buffer<f32>,
    ranks: &'a mut Option<&mut RankRows>,
) -> &'a mut Buffer<f32> {
    match ranks.as_mut().and_then(|r| r.shares.as_mut()) {
        Some(shares) => &mut shares.added,
        None => x,
    }
}

/// Adds the shares of all ranks to `x` `[m, hidden]`, if there are shares.
pub(in crate::engine) fn reduce(
    stream: &Stream,
    x: &mut Buffer<f32>,
    ranks: &mut Option<&mut RankRows>,
    size: Dims,
) -> nq_kernels::Result<()> {
    let Some(RankRows {
        shares: Some(shares),
        collectives: Some(collectives),
        ..
    }) = ranks.as_deref_mut()
    else {
        return ranks.as_ref().map_or(Ok(()), |r| r.collectives().map(drop));
    };
    stream.timed(("all-reduce", "fused", size), 0, || {
        stream.all_reduce(x, Share::Cleared(&mut shares.added), collectives, size)
    })
}

/// As [`reduce`], for a share that a product wrote to [`RankRows::written`].
pub(in crate::engine) fn reduce_written(
    stream: &Stream,
    x: &mut Buffer<f32>,
    ranks: &RankRows,
    size: Dims,
) -> nq_kernels::Result<()> {
    let Some(shares) = &ranks.shares else {
        return Ok(());
    };
    stream.timed(("all-reduce", "fused", size), 0, || {
        stream.all_reduce(x, Share::Rows(&shares.written), ranks.collectives()?, size)
    })
}

/// As [`reduce`], for a share that a product left in parts; false if there are no shares.
pub(in crate::engine) fn reduce_parts(
    stream: &Stream,
    x: &mut Buffer<f32>,
    parts: &PartialSums,
    ranks: &Option<&mut RankRows>,
    size: Dims,
) -> nq_kernels::Result<bool> {
    let Some(ranks) = ranks.as_deref().filter(|r| r.shares.is_some()) else {
        return Ok(false);
    };
    stream.timed(("all-reduce", "fused", size), 0, || {
        stream.all_reduce(x, Share::Parts(parts), ranks.collectives()?, size)
    })?;
    Ok(true)
}
