//! What a session of a rank, one of several GPUs, has beside what that of a whole model has: the ways to the other ranks.

use super::CudaSession;
use super::rank_rows::RankInbox;
use crate::Collectives;
use nq_runtime::interface::Split;
use nq_runtime::{Error, Result};

impl CudaSession {
    /// Where other ranks write to this one; `None` for a whole model.
    pub(in crate::engine) fn inbox(&self) -> Option<RankInbox> {
        self.ranks.as_ref().map(|ranks| RankInbox {
            rows: ranks.inbox.clone(),
            layers: self.step.layers.inbox(),
        })
    }

    /// Joins the ranks with these inboxes, which are all of the model's. Those of parts of every layer all run the kernel of
    /// all layers with so many blocks, or none does.
    pub(in crate::engine) fn join(&mut self, inboxes: &[RankInbox], blocks: usize) -> Result<()> {
        if let (Some(ranks), Some(part)) = (&mut self.ranks, self.model.part) {
            let rows = inboxes.iter().map(|i| i.rows.clone()).collect();
            ranks.collectives = Some(Collectives::new(&self.model.gpu, part.rank.rank, rows)?);
            ranks.blocks = usize::MAX;
            if part.split == Split::Tensors {
                let layers = inboxes.iter().map(|i| i.layers.clone()).collect();
                ranks.blocks = blocks;
                self.step.layers.join(layers, blocks)?;
            }
        }
        Ok(())
    }

    /// Refuses results of a rank that waited in vain for another.
    pub(in crate::engine) fn check_ranks(&self) -> Result<()> {
        let rows = (self.ranks.as_ref()).and_then(|ranks| ranks.collectives.as_ref());
        match rows.is_some_and(Collectives::is_lost) || self.step.layers.is_lost() {
            false => Ok(()),
            true => Err(Error::Kernel(nq_kernels::Error::Cuda {
                what: "exchanging values between GPUs",
                why: format!("{} waited in vain for another", self.model.gpu.info()),
            })),
        }
    }
}
