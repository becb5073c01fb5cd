//! Runs all layers of a decode step of one row with one kernel.

mod args;
mod layer;
mod limits;
mod scratch;
mod sizes;

use super::Version;
use super::attention::{HEAD_DIM, WIDE_HEAD_DIM};
use super::driver::{Buffer, Checked, Gpu, GpuInfo, LaunchShape, PartTimes, Stream};
use super::kernel::{Instance, UNIFORM, kernels, kind_index};
use super::linear::DeviceLinear;
use super::mixture::chosen;
use super::pack::PackedKind;
use super::rows::Step;
use super::trellis;
use crate::cuda::layers::{LayerArgs, LayersArgs, LayersRoom};
pub use layer::{StepLayer, StepMixer};
use limits::{
    CLUSTER, HEAD_BYTES, MOST_LAYERS, MOST_PAGES, MOST_RING, MOST_SOURCES, PAGE_STAGE, PHASES,
    TEAM, WARPS,
};
use nq_formats::trellis::STRIP;
use nq_kernels::Result;
use nq_kernels::pages::PAGE;
use nq_model::{Dims, Experts};
pub use scratch::{LayersInbox, LayersScratch};
pub use sizes::LayersSizes;
use std::sync::Arc;
use std::time::Duration;

/// Most positions of a sequence that [`Stream::step_layers`] attends to: the longest context that Qwen3 models
/// are trained for without scaling. Steps beyond need a kernel for each operation.
pub const MOST_POSITIONS_AT_ONCE: usize = 40_960;

/// Their names in a profile, while blocks wait for inputs.
const WAITS: [&str; PHASES] = [
    "wait for x of qkv",
    "wait for qkv",
    "wait for attention",
    "wait for x of gate, up",
    "wait for gate, up",
];
/// Their names, while blocks work.
const WORKS: [&str; PHASES] = ["qkv", "attention", "o", "gate_up", "down"];

kernels! {
    STEP_LAYERS: LayersArgs = "step_layers" in "step_layers.cu",
        test "kernels/cuda/tests/cuda/layers.rs::all_layers_at_once", bench "step_layers",
        instances &[
            "step_layers_int4_sym_64",
            "step_layers_int4_int_64",
            "step_layers_int4_offset_64",
            "step_layers_mix",
            "step_layers_hybrid_int4_sym_64",
            "step_layers_hybrid_int4_int_64",
            "step_layers_hybrid_int4_offset_64",
            "step_layers_hybrid_mix",
            "step_layers_experts_int4_sym_64",
            "step_layers_experts_int4_int_64",
            "step_layers_experts_int4_offset_64",
            "step_layers_experts_mix",
            "step_layers_hybrid_experts_int4_sym_64",
            "step_layers_hybrid_experts_int4_int_64",
            "step_layers_hybrid_experts_int4_offset_64",
            "step_layers_hybrid_experts_mix",
            "step_layers_int4_int_64_timed",
            "step_layers_mix_timed",
            "step_layers_hybrid_int4_int_64_timed",
            "step_layers_hybrid_mix_timed",
            "step_layers_experts_int4_int_64_timed",
            "step_layers_experts_mix_timed",
            "step_layers_hybrid_experts_int4_int_64_timed",
            "step_layers_hybrid_experts_mix_timed",
        ];
    STEP_LAYERS_TRELLIS: LayersArgs = "step_layers_trellis" in "step_layers_trellis.cu",
        test "kernels/cuda/tests/cuda/layers.rs::all_layers_of_trellis_codes_at_once", bench "step_layers";
}

/// Kinds of layers that have instances of their own: of hybrids or not, with mixtures or not.
const LAYER_KINDS: usize = 4;
/// Index among the first kinds of INT4 with integer zero-points.
const INTEGER_ZEROS: usize = 1;

/// Launch settings for the layers of a step, for [`Stream::step_layers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayersPlan {
    sizes: LayersSizes,
    weights: Weights,
    layers: usize,
    blocks: usize,
    /// Blocks of a cluster.
    cluster: usize,
    shared: SharedMemory,
}

/// How many blocks a plan may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLimit {
    /// At most so many.
    pub most: usize,
    /// So many kernels of one plan must be able to run side by side on the device: of ranks that share it.
    pub beside: usize,
}

impl Default for BlockLimit {
    /// All that the device takes.
    fn default() -> Self {
        BlockLimit {
            most: usize::MAX,
            beside: 1,
        }
    }
}

/// The layout of a block's shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SharedMemory {
    room: LayersRoom,
    /// Bytes of a stage of the ring.
    stage: usize,
    /// Stages of the ring.
    depth: usize,
    /// Stages that are requested and not there yet, at most.
    window: usize,
    /// Bytes of all.
    bytes: usize,
}

/// Blocks of a cluster on devices of this compute capability, as in `cuda/layers_cluster.cuh`.
fn cluster_of(capability: Version) -> usize {
    if capability == Version::new(9, 0) {
        CLUSTER
    } else {
        1
    }
}

/// The weights for which there are instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weights {
    /// All of one kind: INT4 with a scale for 64 inputs or more.
    Uniform(PackedKind),
    /// Each of its own kind, with codes of 4 to 6 bits and scales in two levels.
    Mix,
    /// Each in a trellis code of its own, of those that [`trellis::layer_code`] knows.
    Trellis,
}

impl Weights {
    /// `None` if there is no instance.
    fn of(layers: &[StepLayer<'_>]) -> Option<Self> {
        let kinds = || {
            layers
                .iter()
                .flat_map(|l| l.weights().map(DeviceLinear::kind))
        };
        let first = kinds().next()?;
        if kinds().all(|k| trellis::layer_code(k).is_some()) {
            return Some(Weights::Trellis);
        }
        if kinds().all(|k| k.is_two_level() || k.has_table()) {
            return Some(Weights::Mix);
        }
        // The first kinds are those of INT4 with a scale for 64 inputs or more.
        let uniform = kind_index(first) < UNIFORM && kinds().all(|k| k == first);
        uniform.then_some(Weights::Uniform(first))
    }

    /// The kernel, or the one that takes the time of its parts.
    fn kernel(self, hybrid: bool, experts: bool, timed: bool) -> Instance<LayersArgs> {
        let instance = match self {
            Weights::Uniform(kind) => kind_index(kind),
            Weights::Mix => UNIFORM,
            Weights::Trellis => return (&STEP_LAYERS_TRELLIS).into(),
        };
        let group = usize::from(hybrid) + 2 * usize::from(experts);
        STEP_LAYERS.instance(match timed && self.are_timed() {
            true => LAYER_KINDS * (UNIFORM + 1) + 2 * group + usize::from(self == Weights::Mix),
            false => group * (UNIFORM + 1) + instance,
        })
    }

    /// True if there is a kernel that takes the time of its parts: for what `nq quantize` makes of integers.
    fn are_timed(self) -> bool {
        match self {
            Weights::Uniform(kind) => kind_index(kind) == INTEGER_ZEROS,
            Weights::Mix => true,
            Weights::Trellis => false,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Weights::Uniform(kind) => kind.name(),
            Weights::Mix => "mix",
            Weights::Trellis => "trellis",
        }
    }
}

impl StepLayer<'_> {
    fn weights(&self) -> [&DeviceLinear; 4] {
        let first = match self.mixer {
            StepMixer::Attention { qkv, .. } => qkv,
            StepMixer::Recurrence { inputs, .. } => inputs,
        };
        [first, self.o, self.gate_up, self.down]
    }

    /// True if this is a layer of a model of these sizes.
    fn is_of(&self, sizes: LayersSizes) -> bool {
        let [qkv, o, _, _, inputs] = sizes.shapes();
        let stacks = sizes.stacked().max(1);
        let gate_up = (stacks * 2 * sizes.intermediate, sizes.hidden);
        let down = (stacks * sizes.hidden, sizes.intermediate);
        let (first, same) = match &self.mixer {
            StepMixer::Attention { heads, cache, .. } => {
                let found = (heads.heads, cache.kv_heads(), cache.head_dim());
                (qkv, found == (sizes.heads, sizes.kv_heads, sizes.head_dim))
            }
            StepMixer::Recurrence { states, .. } => (inputs, Some(*states.delta()) == sizes.delta),
        };
        let same = same && self.router.is_some() == sizes.experts.is_some();
        // Only experts are found by a table, and both halves by the same one.
        let bank = |w: &DeviceLinear| w.bank().map(|half| Arc::as_ptr(&half.layer));
        let [qkv_bank, o_bank, up_bank, down_bank] = self.weights().map(bank);
        let of_experts = up_bank.is_none() || self.router.is_some();
        let same = same && qkv_bank.or(o_bank).is_none() && up_bank == down_bank && of_experts;
        let shapes = [first, o, gate_up, down];
        let mut all = self.weights().into_iter().zip(shapes);
        same && all.all(|(w, (rows, inputs))| {
            let whole = !sizes.trellis || w.trellis_strips() == Some(rows / STRIP);
            let serves = inputs.is_multiple_of(256) && whole && w.order.is_none();
            (w.rows(), w.inputs()) == (rows, inputs) && serves
        })
    }
}

/// The model's sizes; `None` if the kernel does not support them.
fn sizes_of(layers: &[StepLayer<'_>], experts: Option<Experts>) -> Option<LayersSizes> {
    let attention = layers.iter().find_map(|l| match &l.mixer {
        StepMixer::Attention { heads, cache, .. } => Some((heads.heads, *cache)),
        StepMixer::Recurrence { .. } => None,
    });
    let delta = layers.iter().find_map(|l| match &l.mixer {
        StepMixer::Attention { .. } => None,
        StepMixer::Recurrence { states, .. } => Some(*states.delta()),
    });
    let (heads, cache) = attention?;
    let sizes = LayersSizes {
        hidden: layers.first()?.o.rows(),
        heads,
        kv_heads: cache.kv_heads(),
        head_dim: cache.head_dim(),
        delta,
        experts,
        intermediate: layers.first()?.down.inputs(),
        trellis: layers.first()?.o.trellis_strips().is_some(),
    };
    let serves = match sizes.head_dim {
        _ if sizes.trellis && experts.is_some() => false,
        HEAD_DIM => delta.is_none(),
        WIDE_HEAD_DIM => !cache.is_int8() && !sizes.trellis,
        _ => false,
    };
    (serves && layers.iter().all(|l| l.is_of(sizes))).then_some(sizes)
}

/// What a model's layers have in common; `None` if the kernel does not support them.
fn common(layers: &[StepLayer<'_>], experts: Option<Experts>) -> Option<(LayersSizes, Weights)> {
    Some((sizes_of(layers, experts)?, Weights::of(layers)?))
}

impl LayersPlan {
    /// The plan for a model's layers, which have mixtures of `experts`, or else MLPs; `None` if the kernel does not
    /// support their shapes, their kinds or the device.
    pub fn new(
        gpu: &Gpu,
        layers: &[StepLayer<'_>],
        experts: Option<Experts>,
    ) -> Result<Option<Self>> {
        Self::within(gpu, layers, experts, BlockLimit::default())
    }

    /// As [`LayersPlan::new`], with a limit to its blocks.
    pub fn within(
        gpu: &Gpu,
        layers: &[StepLayer<'_>],
        experts: Option<Experts>,
        limit: BlockLimit,
    ) -> Result<Option<Self>> {
        let info = gpu.info();
        let Some((sizes, weights)) = common(layers, experts) else {
            return Ok(None);
        };
        // Of kernels of two processes, each could have only a part of its blocks running.
        if info.multi_process || layers.len() > MOST_LAYERS {
            return Ok(None);
        }
        let kinds = layers
            .iter()
            .flat_map(|l| l.weights().map(DeviceLinear::kind));
        let records = kinds.map(|k| match trellis::layer_code(k) {
            Some(code) => TEAM * code.unit,
            None => TEAM * (k.codes_bytes() + k.meta_bytes()),
        });
        let stage = records.max().unwrap_or_default().max(PAGE_STAGE);
        let positions = layers.iter().find_map(|l| match &l.mixer {
            StepMixer::Attention { cache, .. } => Some(cache.places().positions),
            StepMixer::Recurrence { .. } => None,
        });
        let positions = positions.unwrap_or_default();
        let pages = positions.min(MOST_POSITIONS_AT_ONCE).div_ceil(PAGE);
        let cluster = cluster_of(info.capability);
        // Of clusters that the device runs at once.
        let fitting = |at_once: usize| {
            let clusters = (at_once / limit.beside.max(1)).min(limit.most / cluster);
            let mut all = (1..=clusters).rev().map(|clusters| clusters * cluster);
            all.find(|&blocks| {
                sizes.fit(blocks, cluster) && pages <= MOST_PAGES * sources(blocks, sizes)
            })
        };
        let Some(blocks) = fitting(info.multiprocessors / cluster) else {
            return Ok(None);
        };
        let Some(shared) = SharedMemory::of(info, sizes, stage, blocks) else {
            return Ok(None);
        };
        let plan = LayersPlan {
            sizes,
            weights,
            layers: layers.len(),
            blocks,
            cluster,
            shared,
        };
        let kernel = plan.kernel(false);
        if !gpu.has_kernel(&kernel) {
            return Ok(None);
        }
        if cluster == 1 {
            return Ok(Some(plan));
        }
        // Some multiprocessors are in no cluster.
        let most = gpu.clusters_at_once(&kernel, plan.shape())?;
        Ok(fitting(most).map(|blocks| LayersPlan { blocks, ..plan }))
    }

    /// Blocks of its kernel. Ranks of one model must have the same number.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    fn kernel(&self, timed: bool) -> Instance<LayersArgs> {
        let hybrid = self.sizes.head_dim == WIDE_HEAD_DIM;
        self.weights
            .kernel(hybrid, self.sizes.experts.is_some(), timed)
    }

    fn shape(&self) -> LaunchShape {
        // Those that multiply, and those that ask for copies: `Copies::WARPS` of `cuda/layers_cluster.cuh`.
        let warps = WARPS + if self.cluster == 1 { 4 } else { 1 };
        LaunchShape::new([self.blocks, 1, 1], warps * 32)
            .shared(self.shared.bytes)
            .overlapping()
            .clusters_of(self.cluster)
    }
}

impl SharedMemory {
    /// For one of so many blocks, with stages of so many bytes; `None` if it has too little on this device.
    fn of(info: &GpuInfo, sizes: LayersSizes, stage: usize, blocks: usize) -> Option<Self> {
        let mut end = (HEAD_BYTES + sizes.counts()).next_multiple_of(128);
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(128);
            at as i32
        };
        let (digits, inner) = (|inputs| sizes.digits_bytes(inputs), sizes.inner());
        let each = sizes.gathered();
        let alone = cluster_of(info.capability) == 1;
        let room = LayersRoom {
            digits: if alone {
                [take(digits(sizes.hidden.max(inner))); 2]
            } else {
                [take(digits(sizes.hidden)), take(digits(inner))]
            },
            x: take(
                (sizes.hidden / each).div_ceil(if alone { blocks } else { CLUSTER }) * each * 4,
            ),
            sums: take(2 * WARPS * WARPS * 16 * 4),
            queries: take((sizes.group() + 1) * 4 * sizes.head_dim),
            ring: take(0),
        };
        let depth = (info.shared_memory.checked_sub(end)? / stage).min(MOST_RING);
        let behind = depth.checked_sub(stages_ahead(sizes.head_dim))?;
        // Copies of 16 bytes end in order, bulk copies do not.
        let window = window(sizes.hidden).min(if alone { depth } else { behind });
        (window > 0).then_some(SharedMemory {
            room,
            stage,
            depth,
            window,
            bytes: end + depth * stage,
        })
    }
}

/// Stages between two that a warp waits for, at most: those of the keys of a page (`Ring::wait` of `cuda/layers.cuh`).
fn stages_ahead(head_dim: usize) -> usize {
    head_dim / 32
}

/// Blocks among which the pages of a key head are dealt.
fn sources(blocks: usize, sizes: LayersSizes) -> usize {
    MOST_SOURCES.min(blocks / sizes.kv_heads)
}

/// Most stages that are requested and not there yet, as measured on an H200: the more there are, the longer the
/// values of `x` take from block to block.
fn window(hidden: usize) -> usize {
    match hidden {
        ..=3072 => 3,
        _ => 5,
    }
}

impl Stream {
    /// Runs the layers of a step of one row: `x` `[hidden]` becomes their output, and the row's keys and
    /// values are appended. `plan` must be that of these layers, and the row's position below
    /// [`MOST_POSITIONS_AT_ONCE`].
    ///
    /// Its blocks wait for each other, so no two of these kernels run side by side on a device, in whatever
    /// streams they are, except for those of ranks that share it. Of ranks, each must run the same steps: the blocks wait
    /// for those of all.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn step_layers(
        &self,
        plan: &LayersPlan,
        layers: &[StepLayer<'_>],
        x: &mut Buffer<f32>,
        step: &Checked<Step>,
        scratch: &mut LayersScratch,
    ) -> Result<()> {
        let o = self.operands("step_layers");
        let LayersSizes {
            hidden,
            heads,
            kv_heads,
            head_dim,
            intermediate,
            experts,
            ..
        } = plan.sizes;
        let fits = layers.len() == plan.layers
            && common(layers, plan.sizes.experts) == Some((plan.sizes, plan.weights));
        let attention = layers.iter().find_map(|l| match &l.mixer {
            StepMixer::Attention { heads, cache, .. } => Some((heads, *cache)),
            StepMixer::Recurrence { .. } => None,
        });
        let Some((first, cache)) = attention.filter(|_| fits) else {
            return o.refuse("layers", "those of the plan", layers.len());
        };
        let places = step.bounds().places;
        places.check(&o, cache.places())?;
        let mut all = [LayerArgs::none(); MOST_LAYERS];
        for (to, layer) in all.iter_mut().zip(layers) {
            *to = LayerArgs::of(&o, layer, plan.sizes, &places)?;
        }
        let table = cache.args(&o)?;
        let [(qkv_rows, _), .., (inputs, _)] = plan.sizes.shapes();
        let rank = scratch.rank_args(&o, plan)?;
        let digits = |inputs| plan.sizes.digits_bytes(inputs) / 4;
        let args = LayersArgs {
            x: o.of("x", x, &[hidden])?,
            qkv: o.of(
                "qkv",
                &scratch.qkv,
                &[plan.sizes.row_parts(), qkv_rows.max(inputs)],
            )?,
            attended: o.of(
                "attended",
                &scratch.attended,
                &[MOST_SOURCES, heads, head_dim + 2],
            )?,
            gated: o.of("gated", &scratch.gated, &[plan.sizes.gated_words()])?,
            scores: o.of("scores", &scratch.scores, &[plan.sizes.stacked()])?,
            parts: rank.parts,
            digits: [
                o.of("digits", &scratch.digits[0], &[digits(hidden)])?,
                o.of("digits", &scratch.digits[1], &[digits(plan.sizes.inner())])?,
            ],
            epoch: o.of("epoch", &scratch.epoch, &[1])?,
            cos_sin: first.args(&o, cache)?.cos_sin,
            tables: table.tables,
            step: o.of("step", step.values(), &[1])?,
            peers: rank.peers,
            lost: rank.lost,
            times: o.mapped("times", &scratch.times, &[PHASES, 2])?,
            at: plan.shared.room,
            shape: plan.sizes.products(),
            rank: rank.rank,
            ranks: rank.ranks,
            table_len: table.table_len,
            layers: layers.len() as i32,
            hidden: hidden as i32,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            group: plan.sizes.group() as i32,
            key_heads: plan.sizes.delta.map_or(1, |d| d.key_heads) as i32,
            value_heads: plan.sizes.value_heads() as i32,
            tiled: i32::from(plan.sizes.delta.is_some_and(|d| d.tiled)),
            experts: plan.sizes.stacked() as i32,
            chosen: experts.map_or(1, |e| chosen(&e)) as i32,
            shared_expert: i32::from(experts.is_some_and(|e| e.shared > 0)),
            normalized: i32::from(experts.is_some_and(|e| e.normalized)),
            up_tiles: (intermediate / 8) as i32,
            down_spans: (intermediate / 256) as i32,
            stage: plan.shared.stage as i32,
            depth: plan.shared.depth as i32,
            window: plan.shared.window as i32,
            eps: first.eps,
            layer: all,
            before_layer: [0; 1],
        };
        let [qkv, o, gate_up, down, _] = plan.sizes.shapes();
        let shapes =
            [qkv, (heads, head_dim), o, gate_up, down].map(|(rows, cols)| Dims { rows, cols });
        let timed = self.gpu().is_profiling();
        let times = Arc::clone(&scratch.times);
        let kind = plan.weights.name();
        let parts = move || {
            let time = |i| Duration::from_nanos(times.load(i));
            let wait = |i: usize| ((WAITS[i], "between blocks", shapes[i]), time(2 * i));
            let work = |i: usize| ((WORKS[i], kind, shapes[i]), time(2 * i + 1));
            (0..PHASES).flat_map(|i| [wait(i), work(i)]).collect()
        };
        // Weights are read all the time: no part counts their bytes.
        let key = (
            "start and end of layers",
            "fused",
            Dims::new(layers.len(), hidden),
        );
        let parts = plan
            .weights
            .are_timed()
            .then(|| Box::new(parts) as PartTimes);
        self.timed_in_parts(key, 0, parts, || {
            // SAFETY: the operands were checked, and that the step is in the cache; all blocks fit on the
            // device, where no other such kernel runs.
            self.alone(|| unsafe { self.launch(plan.kernel(timed), plan.shape(), &args) })
        })
    }
}
