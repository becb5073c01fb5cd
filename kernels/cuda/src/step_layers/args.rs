//! The arguments of the kernel of all layers.

use super::layer::{StepLayer, StepMixer};
use super::sizes::LayersSizes;
use crate::cuda::layers::{LayerArgs, LayerArgsUnion, LayerAttention, RecordKind};
use crate::cuda::places::ExpertPlaces;
use crate::cuda::rows::HeadVectors;
use crate::driver::{Address, Operands};
use crate::kernel::{TWO_LEVEL, kind_index};
use crate::pack::PackedKind;
use crate::rows::Places;
use crate::trellis;
use nq_kernels::Result;

impl RecordKind {
    pub(super) fn of(kind: PackedKind) -> Self {
        let (meta_bytes, codes_bytes) = (kind.meta_bytes(), kind.codes_bytes());
        RecordKind {
            // Those of blocks follow one another.
            scheme: (kind_index(kind) + kind.block_scheme().unwrap_or_default())
                .saturating_sub(TWO_LEVEL) as u8,
            groups: kind.groups() as u8,
            meta_bytes: meta_bytes as u16,
            codes_bytes: codes_bytes as u32,
        }
    }
}

impl LayerArgs {
    pub(super) fn none() -> Self {
        LayerArgs {
            codes: [Address::NULL; 4],
            meta: [Address::NULL; 4],
            gains: [Address::NULL; 2],
            kind: [RecordKind::default(); 4],
            recurrent: 0,
            router_scale: 1.0,
            router: Address::NULL,
            places: ExpertPlaces::default(),
            union: LayerArgsUnion {
                attention: LayerAttention {
                    vectors: HeadVectors::NONE,
                    keys: Address::NULL,
                    values: Address::NULL,
                    key_scales: Address::NULL,
                    value_scales: Address::NULL,
                },
            },
        }
    }

    /// Of a row within `places`.
    pub(super) fn of(
        o: &Operands<'_>,
        layer: &StepLayer<'_>,
        sizes: LayersSizes,
        places: &Places,
    ) -> Result<Self> {
        let hidden = sizes.hidden;
        let mut args = LayerArgs {
            gains: [
                o.of("gain", layer.norm, &[hidden])?,
                o.of("gain", layer.mlp_norm, &[hidden])?,
            ],
            ..Self::none()
        };
        match &layer.mixer {
            StepMixer::Attention { heads, cache, .. } => {
                places.check(o, cache.places())?;
                let kept = cache.args(o)?;
                args.union.attention = LayerAttention {
                    vectors: heads.args(o, *cache)?.vectors,
                    keys: kept.keys,
                    values: kept.values,
                    key_scales: kept.key_scales,
                    value_scales: kept.value_scales,
                };
            }
            StepMixer::Recurrence {
                rates,
                vectors,
                states,
                ..
            } => {
                args.recurrent = 1;
                let slots = places.slots;
                args.union.recurrence = states.recurrence(o, vectors, rates, slots, hidden)?;
            }
        }
        if let Some(router) = layer.router {
            (args.router, args.router_scale) = router.args(o, sizes.stacked(), hidden)?;
        }
        for (i, w) in layer.weights().into_iter().enumerate() {
            if let Some(code) = trellis::layer_code(w.kind()) {
                (args.codes[i], args.meta[i]) = w.trellis_args(o)?;
                args.kind[i] = RecordKind {
                    scheme: code.number,
                    codes_bytes: code.unit as u32,
                    ..RecordKind::default()
                };
                continue;
            }
            // Both halves of a mixture are in one bank, or neither is (`StepLayer::is_of`).
            let from = w.expert_operands(o)?;
            (args.codes[i], args.meta[i]) = (from.codes, from.meta);
            if w.bank().is_some() {
                args.places = from.places;
            }
            args.kind[i] = RecordKind::of(w.kind());
        }
        Ok(args)
    }
}
