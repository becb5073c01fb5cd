//! Sizes of mixtures of experts, as kernels know them.

use super::driver::Operands;
use super::pack::SPAN;
use crate::cuda::choose;
use nq_kernels::Result;
use nq_model::Experts;

/// Most experts that a row chooses among (`cuda/choose.cuh`); a shared one may stand behind them.
pub const MOST_EXPERTS: usize = choose::MOST_EXPERTS;
/// Most experts per row.
pub const MOST_CHOSEN: usize = choose::MOST_CHOSEN;

/// Number of experts in a layer's stacks: where there is a shared one, which all rows go through, it is the last.
pub fn stacked(experts: &Experts) -> usize {
    experts.count + usize::from(experts.shared > 0)
}

/// Number of experts that a row goes through.
pub fn chosen(experts: &Experts) -> usize {
    experts.per_token + usize::from(experts.shared > 0)
}

/// Values per row between up and down: those of each chosen expert, padded to whole spans.
pub fn gated_width(experts: &Experts) -> usize {
    chosen(experts) * experts.width.next_multiple_of(SPAN)
}

/// Refuses sizes that the kernels do not support, and `rows` that are not `each` for every expert.
pub(super) fn check(
    o: &Operands<'_>,
    e: &Experts,
    rows: usize,
    each: usize,
    m: usize,
) -> Result<()> {
    o.at_least("rows", 1, m)?;
    o.at_most("rows", u16::MAX.into(), m)?;
    o.at_most("experts", MOST_EXPERTS, e.count)?;
    o.at_least("experts of a row", 1, e.per_token)?;
    o.at_most("experts of a row", e.count, e.per_token)?;
    o.at_most("experts of a row", MOST_CHOSEN, chosen(e))?;
    if e.shared > 0 && e.shared != e.width {
        return o.refuse("width of the shared expert", e.width, e.shared);
    }
    if rows == stacked(e) * each {
        Ok(())
    } else {
        o.refuse("rows of the stack", stacked(e) * each, rows)
    }
}
