//! What a session of a rank, a GPU with a part of every layer, has beside what that of a whole model has: its share of
//! what blocks add to the residual stream, and the way to the shares of the other ranks.

use super::CudaSession;
use super::graphs::StepEnd;
use super::rank_rows::RankInbox;
use crate::error::{Error, Result};
use nq_kernels::cuda::AllReduce;

impl CudaSession {
    /// Where other ranks write to this one; `None` for a whole model.
    pub(in crate::cuda) fn inbox(&self) -> Option<RankInbox> {
        self.ranks.as_ref().map(|ranks| RankInbox {
            sums: ranks.inbox.clone(),
            layers: self.step.layers.inbox(),
        })
    }

    /// Blocks of the kernel of all layers that this device runs at once; 0 if it runs the layers otherwise.
    pub(in crate::cuda) fn blocks_at_once(&self) -> Result<usize> {
        let device = self.device(self.kind(1, 1, StepEnd::Logits, false));
        let plan = device.plan_at_once(usize::MAX)?;
        Ok(plan.map_or(0, |(plan, _)| plan.blocks()))
    }

    /// Joins the ranks with these inboxes, which are all of the model's; all run the kernel of all layers with so
    /// many blocks, or none does.
    pub(in crate::cuda) fn join(&mut self, inboxes: &[RankInbox], blocks: usize) -> Result<()> {
        if let (Some(ranks), Some(rank)) = (&mut self.ranks, self.model.rank) {
            let sums = inboxes.iter().map(|i| i.sums.clone()).collect();
            let layers = inboxes.iter().map(|i| i.layers.clone()).collect();
            ranks.sums = Some(AllReduce::new(&self.model.gpu, rank.rank, sums)?);
            ranks.blocks = blocks;
            self.step.layers.join(layers, blocks)?;
        }
        Ok(())
    }

    /// Refuses results of a rank that waited in vain for another.
    pub(in crate::cuda) fn check_ranks(&self) -> Result<()> {
        let sums = self.ranks.as_ref().and_then(|ranks| ranks.sums.as_ref());
        match sums.is_some_and(AllReduce::is_lost) || self.step.layers.is_lost() {
            false => Ok(()),
            true => Err(Error::Kernel(nq_kernels::Error::Cuda {
                what: "summing over GPUs",
                why: format!("{} waited in vain for another", self.model.gpu.info()),
            })),
        }
    }
}
