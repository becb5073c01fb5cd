//! What a model and its sessions will take of a GPU's memory, before any of it is allocated.

use super::model::layer_bytes;
use super::session::{LOGIT_ROWS, Widths, padded, pages_shape, step_bytes};
use crate::engine::SessionSpec;
use crate::error::{Error, Result};
use crate::models::LayerWeights;
use nq_formats::{ModelConfig, TensorEntry, Weight, WeightStore, human_bytes};
use nq_kernels::KernelSet;
use nq_kernels::cpu::{KvType, PAGE};
pub(super) use nq_kernels::cuda::taken;
use nq_kernels::cuda::{DeviceLinear, HEAD_DIM, Stack};

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

/// Bytes that a model's weights take, packed. One layer is read; the others are taken to be as large
/// beside it as `store` has them.
///
/// # Errors
/// A weight that no kernel serves.
pub(super) fn weight_bytes(
    config: &ModelConfig,
    store: &dyn WeightStore,
    first: &LayerWeights,
    head: &Weight,
    embedding: Option<&Weight>,
) -> Result<usize> {
    let layers = config.num_hidden_layers;
    let stored = stored_by_layer(&store.entries(), layers);
    let mut weights = all_layers(layer_bytes(first)?, layers, stored.as_deref());
    for w in [Some(head), embedding].into_iter().flatten() {
        let (codes, meta) = DeviceLinear::device_bytes(&[w], Stack::Concat)?;
        weights += taken(codes) + taken(meta);
    }
    Ok(weights)
}

impl Plan {
    /// With a session besides, whose steps take up to `together` sequences.
    pub(super) fn with_session(
        self,
        config: &ModelConfig,
        kernels: KernelSet,
        spec: &SessionSpec,
        together: usize,
    ) -> Self {
        let w = Widths::of(config);
        let m = spec.max_rows.max(1);
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
        let table = spec.ctx.next_multiple_of(PAGE) * HEAD_DIM * 4;
        let step = step_bytes(config, spec, together);
        Plan {
            kv: pages_shape(config, spec)
                .allocations()
                .map(taken)
                .iter()
                .sum(),
            scratch: rows + taken(logits) + taken(table) + step,
            ..self
        }
    }

    /// All of it.
    pub(super) fn total(&self) -> usize {
        self.weights + self.kv + self.scratch
    }
}

/// A model about to be loaded, a session about to be begun, or both, to be held against the memory
/// that the driver has free.
pub(super) struct Request<'a> {
    /// The model's shape.
    pub(super) config: &'a ModelConfig,
    /// Its kernels.
    pub(super) kernels: KernelSet,
    /// Bytes of weights that are still to be loaded.
    pub(super) weights: usize,
    /// The session.
    pub(super) session: Option<&'a SessionSpec>,
    /// Sequences that its steps take, at most.
    pub(super) together: usize,
}

/// Contexts are suggested in multiples of this.
const CTX_STEP: usize = 256;
/// Bits of a weight, all included, that a model of 4-bit weights has at most; for a suggestion.
const INT4_BITS: usize = 5;

impl Request<'_> {
    /// What it takes.
    pub(super) fn plan(&self) -> Plan {
        let weights = Plan {
            weights: self.weights,
            ..Plan::default()
        };
        match self.session {
            Some(spec) => weights.with_session(self.config, self.kernels, spec, self.together),
            None => weights,
        }
    }

    /// Refuses what does not fit `free` bytes, saying what it takes, what is free and what would
    /// fit.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]
    pub(super) fn check(&self, free: usize) -> Result<Plan> {
        let plan = self.plan();
        if plan.total() <= free {
            return Ok(plan);
        }
        let human = |bytes: usize| human_bytes(bytes as u64);
        let mut parts = Vec::new();
        if plan.weights > 0 {
            parts.push(format!("{} of weights", human(plan.weights)));
        }
        if let Some(spec) = self.session {
            let sequences = match spec.slots {
                1 => String::new(),
                n => format!(" of {n} sequences"),
            };
            parts.push(format!(
                "{} for a context of {} tokens{sequences}",
                human(plan.kv),
                spec.ctx
            ));
            parts.push(format!("{} of activations", human(plan.scratch)));
        }
        Err(Error::DeviceMemory {
            needed: plan.total() as u64,
            parts: parts.join(", "),
            free: free as u64,
            help: self.help(free),
        })
    }

    /// What fits `free` bytes instead.
    fn help(&self, free: usize) -> String {
        let mut ways = Vec::new();
        if let Some(spec) = self.session {
            let longest = self.longest(spec, spec.kv, free);
            ways.extend(longest.map(|ctx| format!("a context of {ctx} tokens (--ctx)")));
            let narrow = (spec.kv != KvType::Int8).then(|| self.longest(spec, KvType::Int8, free));
            match narrow.flatten() {
                Some(ctx) if ctx == spec.ctx => ways.push("INT8 keys and values (--kv 8)".into()),
                Some(ctx) if Some(ctx) > longest => ways.push(format!(
                    "INT8 keys and values and a context of {ctx} tokens (--kv 8 --ctx)"
                )),
                _ => {}
            }
        }
        let four = self.config.parameters() / 8 * INT4_BITS;
        let fewer = Request {
            weights: four,
            ..*self
        };
        if four < self.weights && fewer.plan().total() <= free {
            ways.push("4-bit weights (`nq quantize`, or --bits 4)".into());
        }
        ways.push("the CPU (--device cpu)".into());
        ways.join(", or ")
    }

    /// The longest context up to that asked for with which it fits `free` bytes, keys and values
    /// being `kv`; `None` if not even a short one does.
    fn longest(&self, spec: &SessionSpec, kv: KvType, free: usize) -> Option<usize> {
        let fits = |ctx: usize| {
            let spec = SessionSpec {
                ctx,
                kv,
                max_rows: spec.max_rows.min(ctx),
                ..*spec
            };
            let shorter = Request {
                session: Some(&spec),
                ..*self
            };
            shorter.plan().total() <= free
        };
        if fits(spec.ctx) {
            return Some(spec.ctx);
        }
        // In steps: `low` fits, or is none; `high` does not.
        let (mut low, mut high) = (0, spec.ctx.div_ceil(CTX_STEP));
        while high - low > 1 {
            let middle = low.midpoint(high);
            match fits(middle * CTX_STEP) {
                true => low = middle,
                false => high = middle,
            }
        }
        (low > 0).then_some(low * CTX_STEP)
    }
}

/// Stored bytes by layer; `None` if the file's names do not tell.
fn stored_by_layer(entries: &[TensorEntry], layers: usize) -> Option<Vec<u64>> {
    let mut bytes = vec![0; layers];
    for entry in entries {
        let mut words = entry.name.split('.');
        // As Hugging Face and GGUF call them.
        if words.by_ref().any(|w| w == "layers" || w == "blk") {
            let index: usize = words.next()?.parse().ok()?;
            *bytes.get_mut(index)? += entry.bytes;
        }
    }
    bytes.iter().all(|&b| b > 0).then_some(bytes)
}

/// Bytes of all layers, each as large beside the first as what is stored of it.
fn all_layers(first: usize, layers: usize, stored: Option<&[u64]>) -> usize {
    let Some(stored) = stored else {
        return layers * first;
    };
    let share = |&bytes: &u64| (first as u128 * u128::from(bytes)).div_ceil(stored[0].into());
    stored.iter().map(|bytes| share(bytes) as usize).sum()
}

#[cfg(test)]
mod tests {
    use super::{CTX_STEP, Plan, Request, all_layers, stored_by_layer};
    use crate::engine::SessionSpec;
    use nq_formats::TensorEntry;
    use nq_kernels::KernelSet;
    use nq_kernels::cpu::KvType;
    use nq_kernels::cuda::{MOST_SEQUENCES, MOST_WIDE_SEQUENCES};

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
            pages: None,
            kv,
            max_rows: 512,
        }
    }

    fn request<'a>(
        config: &'a nq_formats::ModelConfig,
        weights: usize,
        session: &'a SessionSpec,
    ) -> Request<'a> {
        Request {
            config,
            kernels: KernelSet::Fused,
            weights,
            session: Some(session),
            together: MOST_SEQUENCES,
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_figures() {
        let (config, spec) = (config(), spec(32_768, KvType::F16));
        let request = request(&config, 5_000_000_000, &spec);
        let plan = request.plan();
        assert_eq!(request.check(plan.total()).unwrap(), plan);
        let refused = request.check(plan.total() - 1).unwrap_err().to_string();
        let human = |bytes: usize| nq_formats::human_bytes(bytes as u64);
        for figure in [
            human(plan.total()),
            human(plan.total() - 1),
            "5.00 GB of weights".into(),
            format!("{} for a context of 32768 tokens", human(plan.kv)),
            format!("{} of activations", human(plan.scratch)),
            "a context of 32512 tokens (--ctx), or INT8 keys and values (--kv 8), or the CPU"
                .into(),
        ] {
            assert!(refused.contains(&figure), "{figure} in {refused}");
        }
    }

    /// The context that `help` speaks of.
    fn suggested(help: &str) -> usize {
        let (_, rest) = help.split_once("context of ").expect(help);
        rest.split(' ').next().unwrap().parse().expect(help)
    }

    #[test]
    fn what_is_suggested_fits_and_no_longer_context_does() {
        let config = config();
        for (ctx, free) in [
            (65_536, 8_000_000_000),
            (40_960, 7_500_000_000),
            (131_072, 9_123_456_789),
        ] {
            let asked = spec(ctx, KvType::F16);
            let help = request(&config, 5_000_000_000, &asked).help(free);
            let ways: Vec<&str> = help.split(", or ").collect();
            for (way, kv) in ways.iter().zip([KvType::F16, KvType::Int8]) {
                assert_eq!(way.contains("INT8"), kv == KvType::Int8, "{help}");
                let longest = suggested(way);
                let total = |ctx| {
                    let spec = spec(ctx, kv);
                    request(&config, 5_000_000_000, &spec).plan().total()
                };
                assert!(total(longest) <= free, "{help}");
                assert!(total(longest + CTX_STEP) > free, "{help}");
            }
        }
    }

    #[test]
    fn what_cannot_help_is_not_suggested() {
        let (config, spec) = (config(), spec(8192, KvType::Int8));
        // 16 bits of 8.2 billion parameters do not fit 12 GB, 4 bits do.
        let help = request(&config, 16_400_000_000, &spec).help(12_000_000_000);
        assert!(
            help.starts_with("4-bit weights") && !help.contains("--ctx"),
            "{help}"
        );
        let help = request(&config, 16_400_000_000, &spec).help(2_000_000_000);
        assert_eq!(help, "the CPU (--device cpu)");
        // Beside weights that are loaded already.
        let session = request(&config, 0, &spec);
        let refused = session.check(session.plan().total() - 1).unwrap_err();
        let refused = refused.to_string();
        assert!(!refused.contains("weights"), "{refused}");
        assert!(!refused.contains("--kv 8"), "{refused}");
    }

    #[test]
    fn layers_of_other_bits_are_counted_as_stored() {
        let entry = |name: &str, bytes| TensorEntry {
            name: name.into(),
            dtype: String::new(),
            shape: Vec::new(),
            bytes,
            file: String::new(),
        };
        let entries = [
            entry("model.layers.0.mlp.up_proj.codes", 60),
            entry("model.layers.0.mlp.up_proj.scales", 40),
            entry("model.layers.1.mlp.up_proj.codes", 200),
            entry("model.norm.weight", 7),
        ];
        let stored = stored_by_layer(&entries, 2).unwrap();
        assert_eq!(stored, [100, 200]);
        assert_eq!(all_layers(1000, 2, Some(&stored)), 3000);
        assert_eq!(all_layers(1000, 2, None), 2000);
        assert_eq!(stored_by_layer(&entries, 3), None);
        assert_eq!(stored_by_layer(&entries, 1), None);
        let gguf = [entry("blk.0.attn_q.weight", 5), entry("output.weight", 9)];
        assert_eq!(stored_by_layer(&gguf, 1), Some(vec![5]));
    }

    #[test]
    fn a_session_counts_keys_and_values_and_rows() {
        let config = config();
        let together = |spec: &SessionSpec, together| {
            Plan::default().with_session(&config, KernelSet::Fused, spec, together)
        };
        let with = |spec: &SessionSpec| together(spec, MOST_SEQUENCES);
        let plan = with(&spec(8192, KvType::F16));
        // 64 pages and nobody's: 36 layers, 8 heads of 128, two of two bytes each.
        let bytes = 36 * (8192 + 128) * 8 * 128 * 2 * 2;
        assert!((bytes..bytes + (6 << 20)).contains(&plan.kv), "{plan:?}");
        assert!(with(&spec(8192, KvType::Int8)).kv < plan.kv * 9 / 16);
        let twice = with(&spec(16384, KvType::F16)).kv;
        assert!(twice < 2 * plan.kv && twice > plan.kv * 19 / 10);
        // 512 rows of 4096 + 6144 f32 and 4096 + 4096 + 12288 FP16, logits of 64 rows.
        let rows = 512 * (4 * 10240 + 2 * 20480);
        assert!(
            (rows..2 * rows + 64 * 4 * 151_936).contains(&plan.scratch),
            "{plan:?}"
        );
        // Rows of a step are as many as slots, up to what a device takes: logits, biases and tokens
        // seen of each, and of wide steps their FP16 rows and partial sums.
        let many = SessionSpec {
            slots: 64,
            ..spec(8192, KvType::F16)
        };
        let narrow = together(&many, MOST_SEQUENCES).scratch;
        let wide = together(&many, MOST_WIDE_SEQUENCES).scratch;
        let more = 48 * (10 * 151_936 + 4 * 10240) + 64 * (2 * 20480 + 8 * 4 * 4096);
        assert!(
            (more..more + more / 20).contains(&(wide - narrow)),
            "{}",
            wide - narrow
        );
        let few = SessionSpec { slots: 16, ..many };
        assert_eq!(
            together(&few, MOST_WIDE_SEQUENCES),
            together(&few, MOST_SEQUENCES)
        );
    }
}
