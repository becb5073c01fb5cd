//! What a model and its sessions will take of a GPU's memory, before any of it is allocated.

use super::model::CudaLayer;
use super::session::{LOGIT_ROWS, Widths, padded, step_bytes};
use crate::engine::{LayerWeights, SessionSpec};
use crate::error::{Error, Result};
use nq_formats::{ModelConfig, Weight};
use nq_kernels::KernelSet;
use nq_kernels::cpu::KvType;
pub(super) use nq_kernels::cuda::taken;
use nq_kernels::cuda::{DeviceCache, DeviceLinear, HEAD_DIM, Stack};

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Packed weights.
    pub(super) weights: usize,
    /// Keys and values of a session's sequences.
    pub(super) kv: usize,
    /// Its activations and tables.
    pub(super) scratch: usize,
}

impl Plan {
    /// Of a model whose layers are all taken to be as large as `first`.
    pub(super) fn of_weights(
        config: &ModelConfig,
        first: &LayerWeights,
        head: &Weight,
        embedding: Option<&Weight>,
    ) -> Result<Self> {
        let mut weights = config.num_hidden_layers * CudaLayer::device_bytes(first)?;
        for w in [Some(head), embedding].into_iter().flatten() {
            let (codes, meta) = DeviceLinear::device_bytes(&[w], Stack::Concat)?;
            weights += taken(codes) + taken(meta);
        }
        Ok(Plan {
            weights,
            ..Plan::default()
        })
    }

    /// With a session besides.
    pub(super) fn with_session(
        self,
        config: &ModelConfig,
        kernels: KernelSet,
        spec: &SessionSpec,
    ) -> Self {
        let w = Widths::of(config);
        let m = spec.max_rows.max(1);
        // Keys and values of a layer are two allocations, and their scales two more.
        let half =
            DeviceCache::device_bytes(spec.kv, spec.slots, config.num_key_value_heads, spec.ctx)
                / 2;
        let codes = match spec.kv {
            KvType::Int8 => half / spec.kv.bytes(HEAD_DIM) * HEAD_DIM,
            KvType::F16 | KvType::F32 => half,
        };
        let full = match kernels {
            KernelSet::Reference => 4 * (w.hidden + w.q + 3 * w.mlp),
            KernelSet::Fused => 0,
        };
        let rows = [
            4 * w.hidden,
            4 * w.qkv,
            2 * padded(w.hidden),
            2 * padded(w.q),
            2 * padded(w.mlp),
            full,
        ];
        let rows: usize = rows.iter().map(|bytes| taken(m * bytes)).sum();
        let logits = LOGIT_ROWS * (4 * w.vocab + 2 * padded(w.hidden));
        let table = spec.ctx.next_multiple_of(32) * HEAD_DIM * 4;
        let step = step_bytes(config, spec.slots);
        Plan {
            kv: config.num_hidden_layers * 2 * (taken(codes) + taken(half - codes)),
            scratch: rows + taken(logits) + taken(table) + step,
            ..self
        }
    }

    /// Refuses what does not fit `available` bytes, naming what that is and what helps.
    ///
    /// # Errors
    /// [`Error::Memory`]
    pub(super) fn check(&self, available: usize) -> Result<()> {
        let parts = [
            (
                self.weights,
                "the model's weights on the GPU (fewer --bits, or --device cpu, help)",
            ),
            (
                self.kv,
                "the KV cache, beside the weights on the GPU (a smaller --ctx or --kv 8 helps)",
            ),
            (
                self.scratch,
                "activations, beside weights and KV cache on the GPU (a smaller --ctx, --kv 8 or \
                 fewer --bits help)",
            ),
        ];
        let mut left = available;
        for (needed, what) in parts {
            if needed > left {
                return Err(Error::Memory {
                    what,
                    needed: needed as u64,
                    available: left as u64,
                });
            }
            left -= needed;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Plan;
    use crate::engine::SessionSpec;
    use nq_kernels::KernelSet;
    use nq_kernels::cpu::KvType;

    /// Qwen3-8B's shape.
    fn config() -> nq_formats::ModelConfig {
        nq_formats::synth::Preset::find("qwen3-8b")
            .expect("a published shape")
            .config()
    }

    fn spec(ctx: usize, kv: KvType) -> SessionSpec {
        SessionSpec {
            slots: 1,
            ctx,
            kv,
            max_rows: 512,
        }
    }

    #[test]
    fn what_does_not_fit_is_named_with_what_helps() {
        let plan = Plan {
            weights: 100,
            kv: 50,
            scratch: 10,
        };
        let refusal = |available| plan.check(available).unwrap_err().to_string();
        assert!(plan.check(160).is_ok());
        assert!(refusal(99).contains("--bits") && refusal(99).contains("100 bytes"));
        let kv = refusal(149);
        assert!(kv.contains("--ctx") && kv.contains("--kv 8"), "{kv}");
        assert!(kv.contains("needs 50 bytes; 49 are available"), "{kv}");
        assert!(refusal(159).contains("activations"), "{}", refusal(159));
    }

    #[test]
    fn a_session_counts_keys_and_values_and_rows() {
        let config = config();
        let with =
            |spec: &SessionSpec| Plan::default().with_session(&config, KernelSet::Fused, spec);
        let plan = with(&spec(8192, KvType::F16));
        // 36 layers, 8 heads of 128, two of two bytes each.
        assert_eq!(plan.kv, 36 * 8192 * 8 * 128 * 2 * 2);
        assert!(with(&spec(8192, KvType::Int8)).kv < plan.kv * 9 / 16);
        assert_eq!(with(&spec(16384, KvType::F16)).kv, 2 * plan.kv);
        // 512 rows of 4096 + 6144 f32 and 4096 + 4096 + 12288 FP16, logits of 64 rows.
        let rows = 512 * (4 * 10240 + 2 * 20480);
        assert!(
            (rows..2 * rows + 64 * 4 * 151_936).contains(&plan.scratch),
            "{plan:?}"
        );
    }
}
