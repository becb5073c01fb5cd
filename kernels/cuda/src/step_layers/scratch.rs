//! The memory through which the blocks of the kernel of all layers send each other values, also to those of other ranks.

use super::LayersPlan;
use super::limits::{MOST_SOURCES, PHASES};
use super::sizes::LayersSizes;
use crate::collectives::{MOST_RANKS, Rank};
use crate::driver::{Address, Buffer, Common, Gpu, Mapped, Operands};
use nq_kernels::{Error, Result};
use std::sync::Arc;

/// Memory in which the blocks of [`Stream::step_layers`](crate::Stream::step_layers) leave values for each other:
/// words with a value, and above it a stamp.
pub struct LayersScratch {
    pub(super) qkv: Buffer<u64>, // as many as the first products have rows; of trellis codes parts of them
    pub(super) attended: Buffer<u64>, // [MOST_SOURCES, heads * (head_dim + 2)]; a recurrence has fewer values
    pub(super) gated: Buffer<u64>, // [intermediate], of each chosen expert; of trellis codes parts of gate and up
    pub(super) scores: Buffer<u64>, // [experts]
    pub(super) digits: [Buffer<u64>; 2], // SpanDigits of inputs, where blocks are in no clusters
    pub(super) epoch: Buffer<u32>, // counts steps
    pub(super) times: Arc<Mapped<u64>>, // [PHASES, 2]: nanoseconds that timed kernels took
    inbox: LayersInbox,
    lost: Mapped<u32>,
    /// The inboxes of all ranks in order, and the blocks of each rank's kernel; none of one alone.
    ranks: Vec<LayersInbox>,
    blocks: usize,
}

/// Where the blocks of all ranks leave a rank the parts of its residual stream. Cloning shares it.
#[derive(Clone)]
pub struct LayersInbox {
    parts: Common<u64>, // [2, ranks * most, hidden]
    /// Parts of a value, at most.
    most: usize,
    rank: usize,
    ranks: usize,
    hidden: usize,
}

/// What the kernel is told of ranks.
pub(super) struct RankArgs {
    pub(super) parts: [Address; 2],
    pub(super) peers: [Address; MOST_RANKS],
    pub(super) lost: Address,
    pub(super) rank: i32,
    pub(super) ranks: i32,
}

impl LayersInbox {
    /// Of the parts of o (0), behind which those of down are, or of down (1).
    fn address(&self, o: &Operands<'_>, which: usize, hidden: usize) -> Result<Address> {
        let count = self.ranks * self.most;
        let dims = [2 - which, count, hidden];
        o.common("parts", &self.parts, which * count * hidden, &dims)
    }
}

fn refuse<T>(what: &'static str, expected: String, found: String) -> Result<T> {
    Err(Error::Shape {
        op: "step_layers",
        what,
        expected,
        found,
    })
}

impl LayersScratch {
    /// Allocates it for a model of these sizes.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, sizes: LayersSizes) -> Result<Self> {
        let alone = Rank {
            rank: 0,
            ranks: 1,
            through_host: false,
            beside: false,
        };
        Self::of_rank(gpu, sizes, alone)
    }

    /// Allocates it for a rank whose part of the model has these sizes. Before its first step it must join the others.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::Shape`] for a rank that does not exist.
    pub(crate) fn of_rank(gpu: &Gpu, sizes: LayersSizes, member: Rank) -> Result<Self> {
        let Rank { rank, ranks, .. } = member;
        if ranks > MOST_RANKS || rank >= ranks {
            let expected = format!("one of at most {MOST_RANKS}");
            return refuse("rank", expected, format!("{rank} of {ranks}"));
        }
        let words = |n| gpu.zeros("activations", n);
        let [(qkv, _), .., (inputs, _)] = sizes.shapes();
        let digits = |inputs| words(sizes.digits_bytes(inputs) / 4);
        let (hidden, most) = (sizes.hidden, sizes.parts());
        let parts = 2 * ranks * most * hidden;
        Ok(LayersScratch {
            qkv: words(sizes.row_parts() * qkv.max(inputs))?,
            attended: words(MOST_SOURCES * sizes.heads * (sizes.head_dim + 2))?,
            gated: words(sizes.gated_words())?,
            scores: words(sizes.stacked())?,
            digits: [digits(hidden)?, digits(sizes.inner())?],
            epoch: gpu.upload("activations", &[1])?,
            times: Arc::new(gpu.mapped("times", 2 * PHASES, 0)?),
            inbox: LayersInbox {
                parts: Common::new(gpu, "activations", parts, member.through_host)?,
                most,
                rank,
                ranks,
                hidden,
            },
            lost: gpu.mapped("ranks that are lost", 1, 0)?,
            ranks: Vec::new(),
            blocks: 0,
        })
    }

    /// Where other ranks leave their parts for this one.
    pub fn inbox(&self) -> LayersInbox {
        self.inbox.clone()
    }

    /// Joins the ranks with these inboxes, which all run steps by plans of so many blocks: the
    /// [fewest](crate::LayersPlan::blocks) of all ranks' plans.
    ///
    /// # Errors
    /// [`Error::Shape`] if these are not the inboxes of all ranks in order, of one size.
    pub fn join(&mut self, inboxes: Vec<LayersInbox>, blocks: usize) -> Result<()> {
        let own = &self.inbox;
        let alike = |(rank, i): (usize, &LayersInbox)| {
            (i.rank, i.ranks, i.hidden, i.most) == (rank, own.ranks, own.hidden, own.most)
        };
        let all = inboxes.len() == own.ranks && inboxes.iter().enumerate().all(alike);
        if !all || !inboxes[own.rank].parts.is(&own.parts) {
            let found = format!("{} for rank {}", inboxes.len(), own.rank);
            return refuse("inboxes", "one of each rank, in order".into(), found);
        }
        (self.ranks, self.blocks) = (inboxes, blocks);
        Ok(())
    }

    /// True once a step has waited in vain for another rank: what it and those after it gave is wrong.
    pub fn is_lost(&self) -> bool {
        !self.lost.is_empty() && self.lost.load(0) != 0
    }

    /// For steps of a plan.
    pub(super) fn rank_args(&self, o: &Operands<'_>, plan: &LayersPlan) -> Result<RankArgs> {
        let (blocks, hidden) = (plan.blocks, plan.sizes.hidden);
        let LayersInbox { rank, ranks, .. } = self.inbox;
        if ranks > 1 && self.blocks != blocks {
            let joined = format!("{} of a rank that has joined the others", self.blocks);
            return refuse("blocks", joined, blocks.to_string());
        }
        let mut peers = [Address::NULL; MOST_RANKS];
        for (to, inbox) in peers.iter_mut().zip(&self.ranks) {
            *to = inbox.address(o, 0, hidden)?;
        }
        Ok(RankArgs {
            parts: [
                self.inbox.address(o, 0, hidden)?,
                self.inbox.address(o, 1, hidden)?,
            ],
            peers,
            lost: o.mapped("lost", &self.lost, &[1])?,
            rank: rank as i32,
            ranks: ranks as i32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GpuInfo;
    use nq_kernels::Account;

    fn scratch(gpu: &Gpu, hidden: usize, rank: usize, ranks: usize) -> Result<LayersScratch> {
        let sizes = LayersSizes {
            hidden,
            heads: 4,
            kv_heads: 2,
            head_dim: 128,
            delta: None,
            experts: None,
            intermediate: 512,
            trellis: false,
        };
        let member = Rank {
            rank,
            ranks,
            through_host: false,
            beside: true,
        };
        LayersScratch::of_rank(gpu, sizes, member)
    }

    #[test]
    fn ranks_join_those_of_their_model() {
        let gpu = Gpu::dry(GpuInfo::default(), Account::gpu());
        assert!(scratch(&gpu, 256, 2, 2).is_err());
        assert!(scratch(&gpu, 256, 0, MOST_RANKS + 1).is_err());
        let [mut first, second] = [0, 1].map(|rank| scratch(&gpu, 256, rank, 2).unwrap());
        let inbox = |hidden, rank, ranks| scratch(&gpu, hidden, rank, ranks).unwrap().inbox();
        for others in [
            vec![first.inbox()],
            vec![second.inbox(), first.inbox()],
            vec![first.inbox(), inbox(512, 1, 2)],
            vec![first.inbox(), inbox(256, 1, 3)],
            vec![inbox(256, 0, 2), second.inbox()],
            vec![first.inbox(), second.inbox(), inbox(256, 2, 3)],
        ] {
            assert!(first.join(others, 8).is_err());
        }
        first.join(vec![first.inbox(), second.inbox()], 8).unwrap();
        assert!(!first.is_lost());
    }
}
