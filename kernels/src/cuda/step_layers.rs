//! Runs all layers of a decode step of one row with one kernel.

use super::attention::{Heads, LayerPages};
use super::driver::{
    Address, Buffer, Checked, Gpu, GpuInfo, LaunchShape, Mapped, Operands, Stream,
};
use super::kernel::{Instance, kernels, kind_index};
use super::linear::DeviceLinear;
use super::pack::PackedKind;
use super::rows::Step;
use crate::error::Result;
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

/// `LAYERS_WARPS` of `cuda/step_layers.cuh`.
const WARPS: usize = 12;
/// `TEAM` of `cuda/step_layers.cuh`.
const TEAM: usize = 4;
/// `ATTEND_WARPS` of `cuda/step_layers.cuh`.
const ATTEND_WARPS: usize = 8;
/// `MOST_SOURCES` of `cuda/step_layers.cuh`.
const MOST_SOURCES: usize = 8;
/// `MOST_PARTS` of `cuda/step_layers.cuh`.
const MOST_PARTS: usize = 4;
/// `MOST_RING` of `cuda/step_layers.cuh`.
const MOST_RING: usize = 32;
/// `MOST_LAYERS` of `cuda/step_layers.cuh`.
const MOST_LAYERS: usize = 64;
/// `CLUSTER` of `cuda/step_layers.cuh`.
const CLUSTER: usize = 8;
/// Size of `PairedDigits` of `cuda/products.cuh`.
const DIGITS_BYTES: usize = 576;
/// Size of a record's codes.
const CODES_BYTES: usize = 2048;
/// Bytes of shared memory in front of the numbers of parts: `COUNTS` of `cuda/step_layers.cuh`.
const HEAD_BYTES: usize = 1024;
/// `PHASES` of `cuda/step_layers.cuh`.
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
/// Query heads of a key head for which there are instances.
const GROUPS: [usize; 4] = [2, 4, 5, 8];

kernels! {
    STEP_LAYERS: LayersArgs = "step_layers" in "step_layers.cu",
        test "kernels/tests/cuda/layers.rs::all_layers_at_once", bench "step_layers",
        instances &[
            "step_layers_int4_sym_64_2",
            "step_layers_int4_int_64_2",
            "step_layers_int4_offset_64_2",
            "step_layers_int4_sym_64_4",
            "step_layers_int4_int_64_4",
            "step_layers_int4_offset_64_4",
            "step_layers_int4_sym_64_5",
            "step_layers_int4_int_64_5",
            "step_layers_int4_offset_64_5",
            "step_layers_int4_sym_64_8",
            "step_layers_int4_int_64_8",
            "step_layers_int4_offset_64_8",
            "step_layers_int4_sym_64_2_timed",
            "step_layers_int4_int_64_2_timed",
            "step_layers_int4_offset_64_2_timed",
            "step_layers_int4_sym_64_4_timed",
            "step_layers_int4_int_64_4_timed",
            "step_layers_int4_offset_64_4_timed",
            "step_layers_int4_sym_64_5_timed",
            "step_layers_int4_int_64_5_timed",
            "step_layers_int4_offset_64_5_timed",
            "step_layers_int4_sym_64_8_timed",
            "step_layers_int4_int_64_8_timed",
            "step_layers_int4_offset_64_8_timed",
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

    /// True if the products can be dealt to this many blocks.
    fn fit(self, blocks: usize) -> bool {
        let [_, o, _, down] = self.products();
        // Each block gathers some of the inputs of `o`.
        let gathers = self.heads * 128 / 64 >= CLUSTER;
        blocks >= self.kv_heads && gathers && o.fits(blocks) && down.fits(blocks)
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

/// `LayerArgs` of `cuda/step_layers.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct LayerArgs {
    codes: [Address; 4],
    meta: [Address; 4],
    gains: [Address; 2],
    q_gain: Address,
    k_gain: Address,
    keys: Address,
    values: Address,
}

/// `ProductShape` of `cuda/step_layers.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct ProductShape {
    tiles: i32,
    spans: i32,
}

/// `LayersRoom` of `cuda/step_layers.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Room {
    digits: [i32; 2],
    x: i32,
    sums: i32,
    queries: i32,
    ring: i32,
}

/// `LayersArgs` of `cuda/step_layers.cuh`.
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
    groups: i32,
    meta_bytes: i32,
    depth: i32,
    window: i32,
    eps: f32,
    layer: [LayerArgs; MOST_LAYERS],
}

/// Launch settings for the layers of a step, for [`Stream::step_layers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayersPlan {
    sizes: LayersSizes,
    /// Of all weights.
    kind: PackedKind,
    /// Index in [`GROUPS`].
    group: usize,
    layers: usize,
    blocks: usize,
    /// Stages of the ring.
    depth: usize,
    room: Room,
    shared: usize,
}

impl StepLayer<'_> {
    /// The model's sizes and the kind of its weights; `None` if the kernel does not support them.
    fn of(&self) -> Option<(LayersSizes, PackedKind)> {
        let sizes = LayersSizes {
            hidden: self.qkv.inputs(),
            heads: self.heads.heads,
            kv_heads: self.cache.kv_heads(),
            intermediate: self.down.inputs(),
        };
        let kind = self.qkv.kind();
        let all = [self.qkv, self.o, self.gate_up, self.down];
        let matches = |(w, (rows, inputs)): (&&DeviceLinear, (usize, usize))| {
            w.kind() == kind
                && (w.rows(), w.inputs()) == (rows, inputs)
                && inputs.is_multiple_of(256)
        };
        // The first kinds are those of INT4 with a scale for 64 inputs or more.
        let serves = kind_index(kind) < 3
            && !self.cache.is_int8()
            && all.iter().zip(sizes.shapes()).all(matches);
        serves.then_some((sizes, kind))
    }
}

impl LayersPlan {
    /// The plan for a model's layers; `None` if the kernel does not support their shapes, their kinds or
    /// the device, or is not the fastest.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(gpu: &Gpu, layers: &[StepLayer<'_>]) -> Result<Option<Self>> {
        let info = gpu.info();
        let Some(first) = layers.first().and_then(StepLayer::of) else {
            return Ok(None);
        };
        // Of kernels of two processes, each could have only a part of its blocks running.
        if info.capability != (9, 0)
            || info.multi_process
            || layers.len() > MOST_LAYERS
            || layers.iter().any(|l| l.of() != Some(first))
        {
            return Ok(None);
        }
        let (sizes, kind) = first;
        let heads = sizes.heads / sizes.kv_heads.max(1);
        let Some(group) = GROUPS.iter().position(|g| *g == heads) else {
            return Ok(None);
        };
        let stage = TEAM * (CODES_BYTES + kind.meta_room());
        let Some((room, depth, shared)) = Self::room(info, sizes, heads, stage) else {
            return Ok(None);
        };
        let plan = LayersPlan {
            sizes,
            kind,
            group,
            layers: layers.len(),
            blocks: CLUSTER,
            depth,
            room,
            shared,
        };
        let kernel = plan.kernel(false);
        if !gpu.has_kernel(&kernel) {
            return Ok(None);
        }
        let most = gpu.clusters_at_once(&kernel, plan.shape())?;
        let mut blocks = (1..=most).rev().map(|clusters| clusters * CLUSTER);
        let blocks = blocks.find(|&blocks| sizes.fit(blocks));
        Ok(blocks.map(|blocks| LayersPlan { blocks, ..plan }))
    }

    /// The layout of shared memory, the stages of the ring, and the bytes in all.
    fn room(
        info: &GpuInfo,
        sizes: LayersSizes,
        group: usize,
        stage: usize,
    ) -> Option<(Room, usize, usize)> {
        let mut end = (HEAD_BYTES + sizes.hidden / 8).next_multiple_of(128);
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(128);
            at as i32
        };
        let digits = |inputs: usize| inputs / 256 * DIGITS_BYTES;
        let attention = (ATTEND_WARPS / 4 * 128 + 32) * group * 4;
        let room = Room {
            digits: [
                take(digits(sizes.hidden)),
                take(digits((sizes.heads * 128).max(sizes.intermediate))),
            ],
            x: take((sizes.hidden / 64).div_ceil(CLUSTER) * 64 * 4),
            sums: take((2 * WARPS * WARPS * 16 * 4).max(attention)),
            queries: take((group + 2) * 512),
            ring: take(0),
        };
        let depth = (info.shared_memory.checked_sub(end)? / stage).min(MOST_RING);
        // Enough for a window, and for each team to have a stage.
        (depth > window(sizes.hidden)).then_some((room, depth, end + depth * stage))
    }

    /// The kernel, or the one that takes the time of its parts.
    fn kernel(&self, timed: bool) -> Instance<LayersArgs> {
        let groups = self.group + usize::from(timed) * GROUPS.len();
        STEP_LAYERS.instance(groups * 3 + kind_index(self.kind))
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

/// Most stages that are requested and not there yet, as measured on an H200: the more there are, the longer the
/// values of `x` take from block to block.
fn window(hidden: usize) -> usize {
    match hidden {
        ..=3072 => 3,
        3073..=4096 => 4,
        _ => 5,
    }
}

impl Stream {
    /// Runs the layers of a step of one row: `x` `[hidden]` becomes their output, and the row's keys and
    /// values are appended. `plan` must be that of these layers.
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
        let fits = layers.len() == plan.layers
            && layers
                .iter()
                .all(|l| l.of() == Some((plan.sizes, plan.kind)));
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
            groups: plan.kind.groups() as i32,
            meta_bytes: plan.kind.meta_bytes() as i32,
            depth: plan.depth as i32,
            window: window(hidden) as i32,
            eps: first.heads.eps,
            layer: all,
        };
        let [qkv, o, gate_up, down] = plan.sizes.shapes();
        let shapes = [qkv, (heads, 128), o, gate_up, down];
        let timed = self.gpu().is_profiling();
        let times = Arc::clone(&scratch.times);
        let kind = plan.kind.name();
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
            self.alone(|| unsafe { self.launch(plan.kernel(timed), plan.shape(), &args) })
        })
    }
}

impl LayerArgs {
    fn none() -> Self {
        LayerArgs {
            codes: [Address::NULL; 4],
            meta: [Address::NULL; 4],
            gains: [Address::NULL; 2],
            q_gain: Address::NULL,
            k_gain: Address::NULL,
            keys: Address::NULL,
            values: Address::NULL,
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
            q_gain: heads.q_gain,
            k_gain: heads.k_gain,
            keys: cache.keys,
            values: cache.values,
            ..Self::none()
        };
        let weights = [layer.qkv, layer.o, layer.gate_up, layer.down];
        for (i, w) in weights.into_iter().enumerate() {
            let p = w.args(o)?;
            (args.codes[i], args.meta[i]) = (p.codes, p.meta);
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
            let group = sizes.heads / sizes.kv_heads;
            assert!(GROUPS.contains(&group), "{sizes:?}");
            let stage = TEAM * (CODES_BYTES + 160);
            let (_, depth, shared) =
                LayersPlan::room(&info, sizes, group, stage).expect("it fits in shared memory");
            assert!(depth > WARPS / TEAM, "{sizes:?}: {depth}");
            assert!(shared <= info.shared_memory, "{sizes:?}: {shared}");
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
