//! Which weights of a tower that sees images get 8-bit codes, and their size.

use nq_formats::{AffineScheme, Bits, Checkpoint, Group, Scheme, Zeros};
use nq_model::Dims;
use nq_model::names::Shape;
use nq_model::vision::{PATCH_EMBED, POSITIONS};

/// Inputs that share a scale, as in the blocks of GGUF files, which so hold the same numbers.
const GROUP: usize = 32;

/// The codes.
pub(crate) const CODES: Scheme = Scheme::Affine(AffineScheme::new(
    Bits::B8,
    Group::Size(GROUP as u32),
    Zeros::None,
));

/// True for the weight `name` of a tower of which `dims` has 8-bit codes: a Linear of a block or a merger, if its rows are
/// whole groups.
pub(crate) fn is_rounded(name: &str, dims: Dims) -> bool {
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
