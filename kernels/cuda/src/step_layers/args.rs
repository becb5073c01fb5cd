//! The arguments of the kernel of all layers.

use super::layer::{StepLayer, StepMixer};
use super::limits::{MOST_LAYERS, PRODUCTS};
use super::sizes::{LayersSizes, ProductShape};
use crate::attention::HeadVectors;
use crate::collectives::MOST_RANKS;
use crate::delta::RecurrenceArgs;
use crate::driver::{Address, Operands};
use crate::kernel::{TWO_LEVEL, kind_index};
use crate::pack::PackedKind;
use crate::rows::Places;
use crate::trellis;
use nq_kernels::Result;

/// `LayerAttention` of `cuda/layers.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AttentionArgs {
    pub(super) vectors: HeadVectors,
    pub(super) keys: Address,
    pub(super) values: Address,
    pub(super) key_scales: Address,
    pub(super) value_scales: Address,
}

/// The union of `LayerArgs` of `cuda/layers.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union MixerArgs {
    pub(super) attention: AttentionArgs,
    pub(super) recurrence: RecurrenceArgs,
}

/// `RecordKind` of `cuda/layers.cuh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct RecordKind {
    pub(super) scheme: u8,
    pub(super) groups: u8,
    pub(super) meta_bytes: u16,
    pub(super) codes_bytes: u32,
}

impl RecordKind {
    pub(super) fn of(kind: PackedKind) -> Self {
        let (meta_bytes, codes_bytes) = (kind.meta_bytes(), kind.codes_bytes());
        RecordKind {
            scheme: kind_index(kind).saturating_sub(TWO_LEVEL) as u8,
            groups: kind.groups() as u8,
            meta_bytes: meta_bytes as u16,
            codes_bytes: codes_bytes as u32,
        }
    }
}

/// `LayerArgs` of `cuda/layers.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct LayerArgs {
    pub(super) codes: [Address; 4],
    pub(super) meta: [Address; 4],
    pub(super) gains: [Address; 2],
    pub(super) kind: [RecordKind; 4],
    pub(super) recurrent: i32,
    pub(super) router_scale: f32,
    pub(super) router: Address,
    pub(super) mixer: MixerArgs,
}

/// `LayersRoom` of `cuda/layers.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct LayersRoom {
    pub(super) digits: [i32; 2],
    pub(super) x: i32,
    pub(super) sums: i32,
    pub(super) queries: i32,
    pub(super) ring: i32,
}

/// `LayersArgs` of `cuda/layers.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct LayersArgs {
    pub(super) x: Address,
    pub(super) qkv: Address,
    pub(super) attended: Address,
    pub(super) gated: Address,
    pub(super) scores: Address,
    pub(super) parts: [Address; 2],
    pub(super) digits: [Address; 2],
    pub(super) epoch: Address,
    pub(super) cos_sin: Address,
    pub(super) tables: Address,
    pub(super) step: Address,
    pub(super) peers: [Address; MOST_RANKS],
    pub(super) lost: Address,
    pub(super) times: Address,
    pub(super) at: LayersRoom,
    pub(super) shape: [ProductShape; PRODUCTS],
    pub(super) rank: i32,
    pub(super) ranks: i32,
    pub(super) table_len: i32,
    pub(super) layers: i32,
    pub(super) hidden: i32,
    pub(super) heads: i32,
    pub(super) kv_heads: i32,
    pub(super) group: i32,
    pub(super) key_heads: i32,
    pub(super) value_heads: i32,
    pub(super) tiled: i32,
    pub(super) experts: i32,
    pub(super) chosen: i32,
    pub(super) shared_expert: i32,
    pub(super) normalized: i32,
    pub(super) up_tiles: i32,
    pub(super) down_spans: i32,
    pub(super) stage: i32,
    pub(super) depth: i32,
    pub(super) window: i32,
    pub(super) eps: f32,
    pub(super) layer: [LayerArgs; MOST_LAYERS],
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
            mixer: MixerArgs {
                attention: AttentionArgs {
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
                args.mixer.attention = AttentionArgs {
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
                let sizes = (places.slots, hidden);
                args.mixer.recurrence = states.recurrence(o, vectors, rates, sizes)?;
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
            let p = w.args(o)?;
            (args.codes[i], args.meta[i]) = (p.codes, p.meta);
            args.kind[i] = RecordKind::of(w.kind());
        }
        Ok(args)
    }
}
