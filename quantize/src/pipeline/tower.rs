//! The tower that sees images, in 8-bit codes.

use super::job::Job;
use crate::error::Result;
use crate::rounding;
use crate::tower::{CODES, is_rounded};
use nq_formats::nq::{Param, Writer};
use nq_model::Dims;
use nq_model::names::Shape;
use nq_model::vision::TowerParameter;

/// The step that stages the tower, as the writer calls it.
const TOWER: &str = "tower";

impl Job<'_> {
    /// Stages the tower, rounded to nearest if that is asked for.
    pub(super) fn stage_tower(&self, writer: &Writer) -> Result<()> {
        let Some(vision) = (self.checkpoint.vision()).filter(|_| self.options.vision_8) else {
            return Ok(writer.put_tower(self.checkpoint)?);
        };
        if writer.staged(TOWER)?.is_some() {
            return Ok(());
        }
        let (store, mut vectors, mut matrices) = (self.checkpoint.store(), vec![], vec![]);
        for TowerParameter { name, shape } in vision.parameters() {
            match shape {
                Shape::Vector(len) => vectors.push((name.clone(), store.vector(&name, len)?)),
                Shape::Matrix(rows, cols) => {
                    let mut weight = store.matrix(&name, Dims::new(rows, cols))?;
                    if is_rounded(&name, weight.dims()) {
                        let (rounded, _) = rounding::to_nearest(&name, &weight, &[], CODES)?;
                        weight.release();
                        weight = rounded;
                    }
                    matrices.push((name, weight));
                }
            }
        }
        let vectors = vectors.iter().map(|(n, t)| (n.clone(), Param::Vector(t)));
        let matrices = matrices.iter().map(|(n, w)| (n.clone(), Param::Matrix(w)));
        Ok(writer.put(TOWER, &vectors.chain(matrices).collect::<Vec<_>>())?)
    }
}
