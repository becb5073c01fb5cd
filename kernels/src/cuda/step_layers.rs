//! Runs all layers of a decode step of one row with one kernel.

use super::attention::{HeadVectors, Heads, LayerPages};
use super::driver::{
    Address, Buffer, Checked, Gpu, GpuInfo, LaunchShape, Mapped, Operands, Stream,
};
use super::kernel::{Instance, TWO_LEVEL, UNIFORM, kernels, kind_index};
use super::linear::DeviceLinear;
use super::pack::PackedKind;
use super::rows::Step;
use crate::error::Result;
use crate::pages::PAGE;
use std::sync::Arc;
use std::time::Duration;

/// A layer in the form that [`Stream::step_layers`] runs.
pub struct StepLayer<'a> {
    /// Gain of the first norm, `[hidden]`.
    pub attention_norm: &'a Buffer<f32>,
    /// `[(heads + 2 kv_heads) * 128, hidden]`
    pub qkv: &'a DeviceLinear,
    /// Other parameters of attention.
    pub heads: Heads<'a>,
    /// Cache of keys and values.
    pub cache: LayerPages<'a>,
    /// `[hidden, heads * 128]`
    pub o: &'a DeviceLinear,
    /// Gain of the second norm, `[hidden]`.
    pub mlp_norm: &'a Buffer<f32>,
    /// Gate and up `[2 intermediate, hidden]`, interleaved.
    pub gate_up: &'a DeviceLinear,
    /// `[hidden, intermediate]`
    pub down: &'a DeviceLinear,
}

/// Most positions of a sequence that [`Stream::step_layers`] attends to: the longest context that Qwen3 models
/// are trained for without scaling. Steps beyond need a kernel for each operation.
pub const MOST_POSITIONS_AT_ONCE: usize = 40_960;

/// `LAYERS_WARPS` of `cuda/layers.cuh`.
const WARPS: usize = 12;
/// `TEAM` of `cuda/layers.cuh`.
const TEAM: usize = 4;
/// `MOST_SOURCES` of `cuda/layers.cuh`.
const MOST_SOURCES: usize = 16;
/// `MOST_PAGES` of `cuda/layers.cuh`.
const MOST_PAGES: usize = 32;
/// `MOST_PARTS` of `cuda/layers.cuh`.
const MOST_PARTS: usize = 4;
/// `MOST_RING` of `cuda/layers.cuh`.
const MOST_RING: usize = 32;
/// `LEAST_AHEAD` of `cuda/layers.cuh`.
const LEAST_AHEAD: usize = 4;
/// `MOST_LAYERS` of `cuda/layers.cuh`.
const MOST_LAYERS: usize = 64;
/// `CLUSTER` of `cuda/layers.cuh`.
const CLUSTER: usize = 8;
/// Size of `SpanDigits` of `cuda/products.cuh`.
const DIGITS_BYTES: usize = 576;
/// Most bytes that a stage of the ring has of keys and values: those of `cuda/layers_attention.cuh` in int8.
const PAGE_STAGE: usize = 8320;
/// Bytes of shared memory in front of the numbers of parts: `COUNTS` of `cuda/step_layers.cuh`.
const HEAD_BYTES: usize = 1024;
/// `PHASES` of `cuda/layers.cuh`.
const PHASES: usize = 5;
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
/// `MOST_GROUP` of `cuda/layers.cuh`.
const MOST_GROUP: usize = 8;

kernels! {
    STEP_LAYERS: LayersArgs = "step_layers" in "step_layers.cu",
        test "kernels/tests/cuda/layers.rs::all_layers_at_once", bench "step_layers",
        instances &[
            "step_layers_int4_sym_64",
            "step_layers_int4_int_64",
            "step_layers_int4_offset_64",
            "step_layers_mix",
            "step_layers_int4_sym_64_timed",
            "step_layers_int4_int_64_timed",
            "step_layers_int4_offset_64_timed",
            "step_layers_mix_timed",
        ];
}

/// Memory in which the blocks of [`Stream::step_layers`] leave values for each other: words with a value,
/// and above it a stamp.
pub struct LayersScratch {
    qkv: Buffer<u64>,        // [(heads + 2 kv_heads) * 128]
    attended: Buffer<u64>,   // [MOST_SOURCES, heads * 128 + heads * 2]
    gated: Buffer<u64>,      // [intermediate]
    parts: [Buffer<u64>; 2], // [MOST_PARTS, hidden]
    epoch: Buffer<u32>,      // counts steps
    times: Arc<Mapped<u64>>, // [PHASES, 2]: nanoseconds that timed kernels took
}

/// Sizes of a model whose layers run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayersSizes {
    /// Values per token.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Inputs of the last product.
    pub intermediate: usize,
}

impl LayersSizes {
    /// Rows and inputs of the four products.
    fn shapes(self) -> [(usize, usize); 4] {
        let q = self.heads * 128;
        [
            (q + 2 * self.kv_heads * 128, self.hidden),
            (self.hidden, q),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]
    }

    /// Their tiles and spans.
    fn products(self) -> [ProductShape; 4] {
        self.shapes().map(|(rows, inputs)| ProductShape {
            tiles: (rows / 16) as i32,
            spans: (inputs / 256) as i32,
        })
    }

    /// Query heads of a key head.
    fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    /// True if the products can be dealt to this many blocks.
    fn fit(self, blocks: usize) -> bool {
        let [_, o, _, down] = self.products();
        // Each block gathers some of the inputs of `o`.
        let gathers = self.heads * 128 / 64 >= CLUSTER;
        let heads = self.group() <= MOST_GROUP && self.heads.is_multiple_of(self.kv_heads);
        heads && blocks >= self.kv_heads && gathers && o.fits(blocks) && down.fits(blocks)
    }
}

impl LayersScratch {
    /// Allocates it for a model of these sizes.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](crate::Error::DeviceMemory).
    pub fn new(gpu: &Gpu, sizes: LayersSizes) -> Result<Self> {
        let words = |n| gpu.zeros("activations", n);
        let heads = sizes.heads;
        let parts = || words(MOST_PARTS * sizes.hidden);
        Ok(LayersScratch {
            qkv: words((heads + 2 * sizes.kv_heads) * 128)?,
            attended: words(MOST_SOURCES * heads * 130)?,
            gated: words(sizes.intermediate)?,
            parts: [parts()?, parts()?],
            epoch: gpu.upload("activations", &[1])?,
            times: Arc::new(gpu.mapped("times", 2 * PHASES, 0)?),
        })
    }
}

/// `LayerArgs` of `cuda/layers.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct LayerArgs {
    codes: [Address; 4],
    meta: [Address; 4],
    gains: [Address; 2],
    vectors: HeadVectors,
    keys: Address,
    values: Address,
    key_scales: Address,
    value_scales: Address,
    kind: [RecordKind; 4],
}

/// `RecordKind` of `cuda/layers.cuh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
struct RecordKind {
    scheme: u8,
    groups: u8,
    meta_bytes: u16,
    codes_bytes: u32,
}

/// `ProductShape` of `cuda/layers.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct ProductShape {
    tiles: i32,
    spans: i32,
}

/// `LayersRoom` of `cuda/layers.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Room {
    digits: [i32; 2],
    x: i32,
    sums: i32,
    queries: i32,
    ring: i32,
}

/// `LayersArgs` of `cuda/layers.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct LayersArgs {
    x: Address,
    qkv: Address,
    attended: Address,
    gated: Address,
    parts: [Address; 2],
    epoch: Address,
    cos_sin: Address,
    tables: Address,
    step: Address,
    times: Address,
    at: Room,
    shape: [ProductShape; 4],
    table_len: i32,
    layers: i32,
    hidden: i32,
    heads: i32,
    kv_heads: i32,
    group: i32,
    stage: i32,
    depth: i32,
    window: i32,
    eps: f32,
    layer: [LayerArgs; MOST_LAYERS],
}

/// Launch settings for the layers of a step, for [`Stream::step_layers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayersPlan {
    sizes: LayersSizes,
    weights: Weights,
    /// Bytes of a stage of the ring.
    stage: usize,
    layers: usize,
    blocks: usize,
    /// Stages of the ring.
    depth: usize,
    room: Room,
    shared: usize,
}

/// The weights for which there are instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weights {
    /// All of one kind: INT4 with a scale for 64 inputs or more.
    Uniform(PackedKind),
    /// Each of its own kind, with codes of 4 to 6 bits and scales in two levels.
    Mix,
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
        if kinds().all(PackedKind::is_two_level) {
            return Some(Weights::Mix);
        }
        // The first kinds are those of INT4 with a scale for 64 inputs or more.
        let uniform = kind_index(first) < UNIFORM && kinds().all(|k| k == first);
        uniform.then_some(Weights::Uniform(first))
    }

    /// The kernel, or the one that takes the time of its parts.
    fn kernel(self, timed: bool) -> Instance<LayersArgs> {
        let instance = match self {
            Weights::Uniform(kind) => kind_index(kind),
            Weights::Mix => UNIFORM,
        };
        STEP_LAYERS.instance(usize::from(timed) * (UNIFORM + 1) + instance)
    }

    fn name(self) -> &'static str {
        match self {
            Weights::Uniform(kind) => kind.name(),
            Weights::Mix => "mix",
        }
    }
}

impl RecordKind {
    fn of(kind: PackedKind) -> Self {
        let (meta_bytes, codes_bytes) = (kind.meta_bytes(), kind.codes_bytes());
        RecordKind {
            scheme: kind_index(kind).saturating_sub(TWO_LEVEL) as u8,
            groups: kind.groups() as u8,
            meta_bytes: meta_bytes as u16,
            codes_bytes: codes_bytes as u32,
        }
    }
}

impl StepLayer<'_> {
    fn weights(&self) -> [&DeviceLinear; 4] {
        [self.qkv, self.o, self.gate_up, self.down]
    }

    /// The model's sizes; `None` if the kernel does not support them.
    fn sizes(&self) -> Option<LayersSizes> {
        let sizes = LayersSizes {
            hidden: self.qkv.inputs(),
            heads: self.heads.heads,
            kv_heads: self.cache.kv_heads(),
            intermediate: self.down.inputs(),
        };
        let serves = |(w, (rows, inputs)): (&DeviceLinear, (usize, usize))| {
            (w.rows(), w.inputs()) == (rows, inputs) && inputs.is_multiple_of(256)
        };
        let mut all = self.weights().into_iter().zip(sizes.shapes());
        all.all(serves).then_some(sizes)
    }
}

/// What a model's layers have in common; `None` if the kernel does not support them.
fn common(layers: &[StepLayer<'_>]) -> Option<(LayersSizes, Weights)> {
    let sizes = layers.first()?.sizes()?;
    let same = layers.iter().all(|l| l.sizes() == Some(sizes));
    Some((sizes, Weights::of(layers).filter(|_| same)?))
}

impl LayersPlan {
    /// The plan for a model's layers; `None` if the kernel does not support their shapes, their kinds or
    /// the device.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(gpu: &Gpu, layers: &[StepLayer<'_>]) -> Result<Option<Self>> {
        let info = gpu.info();
        let Some((sizes, weights)) = common(layers) else {
            return Ok(None);
        };
        // Of kernels of two processes, each could have only a part of its blocks running.
        if info.capability != (9, 0) || info.multi_process || layers.len() > MOST_LAYERS {
            return Ok(None);
        }
        let kinds = layers
            .iter()
            .flat_map(|l| l.weights().map(DeviceLinear::kind));
        let records = kinds.map(|k| TEAM * (k.codes_bytes() + k.meta_bytes()));
        let stage = records.max().unwrap_or_default().max(PAGE_STAGE);
        let Some((room, depth, shared)) = Self::room(info, sizes, stage) else {
            return Ok(None);
        };
        let plan = LayersPlan {
            sizes,
            weights,
            stage,
            layers: layers.len(),
            blocks: CLUSTER,
            depth,
            room,
            shared,
        };
        let kernel = plan.weights.kernel(false);
        if !gpu.has_kernel(&kernel) {
            return Ok(None);
        }
        let most = gpu.clusters_at_once(&kernel, plan.shape())?;
        let mut blocks = (1..=most).rev().map(|clusters| clusters * CLUSTER);
        let positions = layers[0].cache.places().positions;
        let pages = positions.min(MOST_POSITIONS_AT_ONCE).div_ceil(PAGE);
        let fits = |blocks| sizes.fit(blocks) && pages <= MOST_PAGES * sources(blocks, sizes);
        let blocks = blocks.find(|&blocks| fits(blocks));
        Ok(blocks.map(|blocks| LayersPlan { blocks, ..plan }))
    }

    /// The layout of shared memory, the stages of the ring, and the bytes in all.
    fn room(info: &GpuInfo, sizes: LayersSizes, stage: usize) -> Option<(Room, usize, usize)> {
        let mut end = (HEAD_BYTES + sizes.hidden / 8).next_multiple_of(128);
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(128);
            at as i32
        };
        let digits = |inputs: usize| inputs / 256 * DIGITS_BYTES;
        let room = Room {
            digits: [
                take(digits(sizes.hidden)),
                take(digits((sizes.heads * 128).max(sizes.intermediate))),
            ],
            x: take((sizes.hidden / 64).div_ceil(CLUSTER) * 64 * 4),
            sums: take(2 * WARPS * WARPS * 16 * 4),
            queries: take((sizes.group() + 1) * 512),
            ring: take(0),
        };
        let depth = (info.shared_memory.checked_sub(end)? / stage).min(MOST_RING);
        (depth >= window(sizes.hidden) + LEAST_AHEAD).then_some((room, depth, end + depth * stage))
    }

    fn shape(&self) -> LaunchShape {
        LaunchShape::new((self.blocks, 1, 1), (WARPS + 1) * 32)
            .shared(self.shared)
            .overlapping()
            .clusters_of(CLUSTER)
    }
}

impl ProductShape {
    /// True if the records can be dealt to `blocks` blocks: each has some, or there would be parts that nobody
    /// writes, and no tile has too many parts.
    fn fits(self, blocks: usize) -> bool {
        let (tiles, spans) = (self.tiles as usize, self.spans as usize);
        let owner = |record: usize| ((record + 1) * blocks - 1) / (tiles * spans);
        let parts = |t: usize| owner((t + 1) * spans - 1) - owner(t * spans) + 1;
        tiles * spans >= blocks && (0..tiles).all(|t| parts(t) <= MOST_PARTS)
    }
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
    /// streams they are.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if an operand does not fit; errors of the driver.
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
            intermediate,
        } = plan.sizes;
        let fits =
            layers.len() == plan.layers && common(layers) == Some((plan.sizes, plan.weights));
        let Some(first) = layers.first().filter(|_| fits) else {
            return o.refuse("layers", "those of the plan", layers.len());
        };
        let mut all = [LayerArgs::none(); MOST_LAYERS];
        for (to, layer) in all.iter_mut().zip(layers) {
            step.bounds().places.check(&o, layer.cache.places())?;
            *to = LayerArgs::of(&o, layer, hidden)?;
        }
        let cache = first.cache.args(&o)?;
        let args = LayersArgs {
            x: o.of("x", x, &[hidden])?,
            qkv: o.of("qkv", &scratch.qkv, &[heads + 2 * kv_heads, 128])?,
            attended: o.of("attended", &scratch.attended, &[MOST_SOURCES, heads, 130])?,
            gated: o.of("gated", &scratch.gated, &[intermediate])?,
            parts: [
                o.of("parts", &scratch.parts[0], &[MOST_PARTS, hidden])?,
                o.of("parts", &scratch.parts[1], &[MOST_PARTS, hidden])?,
            ],
            epoch: o.of("epoch", &scratch.epoch, &[1])?,
            cos_sin: first.heads.args(&o, first.cache)?.cos_sin,
            tables: cache.tables,
            step: o.of("step", step.values(), &[1])?,
            times: o.mapped("times", &scratch.times, &[PHASES, 2])?,
            at: plan.room,
            shape: plan.sizes.products(),
            table_len: cache.table_len,
            layers: layers.len() as i32,
            hidden: hidden as i32,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            group: plan.sizes.group() as i32,
            stage: plan.stage as i32,
            depth: plan.depth as i32,
            window: window(hidden) as i32,
            eps: first.heads.eps,
            layer: all,
        };
        let [qkv, o, gate_up, down] = plan.sizes.shapes();
        let shapes = [qkv, (heads, 128), o, gate_up, down];
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
        let key = ("start and end of layers", "fused", (layers.len(), hidden));
        self.timed_in_parts(key, 0, Some(Box::new(parts)), || {
            // SAFETY: the operands were checked, and that the step is in the cache; all blocks fit on the
            // device, where no other such kernel runs.
            self.alone(|| unsafe { self.launch(plan.weights.kernel(timed), plan.shape(), &args) })
        })
    }
}

impl LayerArgs {
    fn none() -> Self {
        LayerArgs {
            codes: [Address::NULL; 4],
            meta: [Address::NULL; 4],
            gains: [Address::NULL; 2],
            vectors: HeadVectors::NONE,
            keys: Address::NULL,
            values: Address::NULL,
            key_scales: Address::NULL,
            value_scales: Address::NULL,
            kind: [RecordKind::default(); 4],
        }
    }

    fn of(o: &Operands<'_>, layer: &StepLayer<'_>, hidden: usize) -> Result<Self> {
        let heads = layer.heads.args(o, layer.cache)?;
        let cache = layer.cache.args(o)?;
        let mut args = LayerArgs {
            gains: [
                o.of("gain", layer.attention_norm, &[hidden])?,
                o.of("gain", layer.mlp_norm, &[hidden])?,
            ],
            vectors: heads.vectors,
            keys: cache.keys,
            values: cache.values,
            key_scales: cache.key_scales,
            value_scales: cache.value_scales,
            ..Self::none()
        };
        for (i, w) in layer.weights().into_iter().enumerate() {
            let p = w.args(o)?;
            (args.codes[i], args.meta[i]) = (p.codes, p.meta);
            args.kind[i] = RecordKind::of(w.kind());
        }
        Ok(args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published dense models.
    const MODELS: [LayersSizes; 6] = [
        sizes(1024, 16, 3072),
        sizes(2048, 16, 6144),
        sizes(2560, 32, 9728),
        sizes(4096, 32, 12288),
        sizes(5120, 40, 17408),
        sizes(5120, 64, 25600),
    ];

    const fn sizes(hidden: usize, heads: usize, intermediate: usize) -> LayersSizes {
        LayersSizes {
            hidden,
            heads,
            kv_heads: 8,
            intermediate,
        }
    }

    #[test]
    fn published_models_fit() {
        let info = GpuInfo {
            shared_memory: 227 << 10,
            ..GpuInfo::default()
        };
        for sizes in MODELS {
            // As many blocks as clusters take on an H200, and on devices with fewer multiprocessors.
            for blocks in [120, 104, 72] {
                assert!(sizes.fit(blocks), "{sizes:?} {blocks}");
            }
            // INT4; 6 bits in groups of 32, the longest records of a mix.
            for record in [2048 + 160, 3072 + 160] {
                let (_, depth, shared) = LayersPlan::room(&info, sizes, TEAM * record)
                    .expect("it fits in shared memory");
                let least = window(sizes.hidden) + LEAST_AHEAD;
                assert!(depth >= least, "{sizes:?}: {depth}");
                assert!(shared <= info.shared_memory, "{sizes:?}: {shared}");
            }
        }
    }

    #[test]
    fn each_block_has_records_to_add_up() {
        // 32 records of `down`.
        let small = sizes(256, 16, 512);
        assert!(small.fit(32) && !small.fit(40));
        // A tile of `down` with more parts than are read.
        let narrow = sizes(256, 16, 8192);
        assert!(narrow.fit(32) && !narrow.fit(120));
    }
}
