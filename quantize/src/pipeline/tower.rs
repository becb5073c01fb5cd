//! The tower that sees images, in 8-bit codes.

use super::job::Job;
use crate::error::Result;
use crate::rounding;
use nq_formats::nq::{Param, Writer};
use nq_formats::{AffineScheme, Bits, Checkpoint, Group, Scheme, Zeros};
use nq_model::Dims;
use nq_model::names::Shape;
use nq_model::vision::{PATCH_EMBED, POSITIONS, TowerParameter};

/// Inputs that share a scale, as in the blocks of GGUF files, which so hold the same numbers.
const GROUP: usize = 32;

/// The step that stages the tower, as the writer calls it.
const TOWER: &str = "tower";

const CODES: Scheme = Scheme::Affine(AffineScheme::new(
    Bits::B8,
    Group::Size(GROUP as u32),
    Zeros::None,
));

/// True for the weight `name` of a tower of which `dims` has 8-bit codes: a Linear of a block or a merger, if its rows are
/// whole groups.
fn is_rounded(name: &str, dims: Dims) -> bool {
    name != PATCH_EMBED && name != POSITIONS && dims.cols.is_multiple_of(GROUP)
}

/// Bytes of the tower of `checkpoint`, with 8-bit codes if they are `asked` for.
pub(crate) fn tower_bytes(checkpoint: &Checkpoint, asked: bool) -> u64 {
    let parameters = checkpoint.vision().into_iter().flat_map(|v| v.parameters());
    let saved = parameters.filter_map(|p| match p.shape {
        Shape::Matrix(rows, cols) if asked && is_rounded(&p.name, Dims::new(rows, cols)) => {
            let weight = checkpoint.store().matrix(&p.name, Dims::new(rows, cols));
            let bytes = weight.map_or(0, |weight| weight.bytes());
            Some(bytes.saturating_sub(CODES.bytes(rows, cols)) as u64)
        }
        _ => None,
    });
    checkpoint.tower_bytes() - saved.sum::<u64>()
}

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
