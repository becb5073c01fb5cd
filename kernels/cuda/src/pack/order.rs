//! Weights whose inputs are in groups of an order of their own (`g_idx`): they are packed with their inputs sorted by group.

use super::kind::PackedKind;
use nq_formats::{QuantizedWeight, Weight};
use nq_kernels::Result;
use nq_kernels::registry::WeightKind;

/// How a stack of weights is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackKind {
    /// The kind that it packs to.
    pub kind: PackedKind,
    /// True if its inputs are sorted by group, which those of its products must be, too.
    pub sorted: bool,
}

impl StackKind {
    /// That of weights of these kinds with this many inputs. For kernels that read neither trellis codes nor sorted
    /// inputs, if it is to be `plain`, these become FP16; so do sorted inputs of only some parts.
    ///
    /// # Errors
    /// As [`PackedKind::of`].
    pub fn new(
        kinds: impl IntoIterator<Item = WeightKind>,
        inputs: usize,
        plain: bool,
    ) -> Result<Self> {
        let kinds: Vec<WeightKind> = kinds.into_iter().collect();
        let ordered = kinds.iter().filter(|kind| kind.is_ordered()).count();
        let as_sorted = kinds.iter().map(|&kind| match kind {
            WeightKind::Affine { scheme, .. } => WeightKind::Affine {
                scheme,
                act_order: false,
            },
            other => other,
        });
        let kind = match PackedKind::of_stack(as_sorted, inputs)? {
            kind if plain => kind.without_trellis(),
            kind => kind,
        };
        let can_sort = !plain && ordered == kinds.len() && kind != PackedKind::Fp16;
        Ok(match ordered {
            0 => StackKind {
                kind,
                sorted: false,
            },
            _ if can_sort => StackKind { kind, sorted: true },
            _ => StackKind {
                kind: PackedKind::Fp16,
                sorted: false,
            },
        })
    }
}

/// The weights of a stack with their inputs sorted by group, and the input that each of these is; `None` unless all
/// have the same groups, as large as their schemes say.
pub(super) fn sorted(parts: &[&Weight]) -> Option<(Vec<Weight>, Vec<u32>)> {
    let affine = |part: &&Weight| match part {
        Weight::Quantized(QuantizedWeight::Affine(a)) => Some(a.clone()),
        _ => None,
    };
    let parts: Vec<_> = parts.iter().map(affine).collect::<Option<_>>()?;
    let first = parts.first()?.g_idx()?;
    if parts.iter().any(|part| part.g_idx() != Some(first)) {
        return None;
    }
    let mut order = Vec::new();
    let mut sorted = Vec::with_capacity(parts.len());
    for part in &parts {
        let (weight, inputs) = part.in_group_order()?;
        sorted.push(Weight::Quantized(QuantizedWeight::Affine(weight)));
        order = inputs;
    }
    Some((sorted, order))
}

#[cfg(test)]
mod tests {
    use super::super::{Packing, Stack};
    use super::*;
    use nq_formats::{AffineScheme, Bits, Group, Zeros};
    use nq_testkit::weights::{affine, shuffled_groups};

    fn ordered(bits: Bits, groups: Vec<u32>, seed: u64) -> Weight {
        let scheme = AffineScheme::new(bits, Group::Size(64), Zeros::Integer);
        affine(scheme, 24, groups.len(), Some(groups), seed)
    }

    fn packed(parts: &[&Weight], stack: Stack) -> (Vec<u8>, Vec<u8>) {
        let packing = Packing::new(parts, stack, false).unwrap();
        let (kind, records) = (packing.kind(), packing.tiles() * packing.spans());
        let mut codes = vec![0; records * kind.code_bytes()];
        let mut meta = vec![0; records * kind.meta_bytes()];
        packing.pack(0, &mut codes, &mut meta).unwrap();
        (codes, meta)
    }

    /// The last group may be smaller than the others.
    #[test]
    fn weights_of_one_order_are_sorted_and_keep_their_values() {
        for (bits, inputs) in [(Bits::B4, 512), (Bits::B4, 300), (Bits::B8, 300)] {
            let groups = shuffled_groups(inputs, 64, 3);
            let parts = [7, 8].map(|seed| ordered(bits, groups.clone(), seed));
            let parts = parts.each_ref();
            let (weights, order) = sorted(&parts).unwrap();
            let [mut found, mut expected] = [vec![0f32; inputs], vec![0f32; inputs]];
            for (sorted, weight) in weights.iter().zip(parts) {
                for row in 0..24 {
                    sorted.dequantize_row(row, &mut found).unwrap();
                    weight.dequantize_row(row, &mut expected).unwrap();
                    let expected = order.iter().map(|&i| expected[i as usize]);
                    assert!(found.iter().copied().eq(expected), "row {row} of {bits:?}");
                }
            }
            let weights: Vec<&Weight> = weights.iter().collect();
            for stack in [Stack::Concat, Stack::Interleave] {
                let packing = Packing::new(&parts, stack, false).unwrap();
                assert_eq!(packing.order(), Some(&order[..]));
                assert_eq!(packing.kind().bits(), bits.width());
                assert!(packed(&parts, stack) == packed(&weights, stack));
            }
        }
    }

    #[test]
    fn weights_without_one_order_become_halves() {
        let groups = shuffled_groups(256, 64, 3);
        let first = ordered(Bits::B4, groups.clone(), 7);
        let other = ordered(Bits::B4, shuffled_groups(256, 64, 4), 8);
        let mut uneven = groups;
        uneven[0] = (uneven[0] + 1) % 4;
        let uneven = ordered(Bits::B4, uneven, 9);
        for (parts, plain) in [
            (vec![&first, &other], false),
            (vec![&uneven], false),
            (vec![&first], true),
        ] {
            let packing = Packing::new(&parts, Stack::Concat, plain).unwrap();
            assert_eq!(packing.kind(), PackedKind::Fp16);
            assert_eq!(packing.order(), None);
        }
    }
}
