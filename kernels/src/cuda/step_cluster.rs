//! Runs the layers of a decode step of one row by clusters of blocks, with two kernels per layer.

use super::attention::{CacheArgs, Heads, LayerPages};
use super::driver::{Address, Buffer, Checked, Gpu, LaunchShape, Operands, Stream};
use super::kernel::{Instance, kernels, kind_index};
use super::linear::DeviceLinear;
use super::rows::Step;
use crate::error::Result;

/// A layer in the form that [`Stream::cluster_layers`] runs.
pub struct ClusterLayer<'a> {
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

/// Blocks per cluster.
const BLOCKS: usize = 8;
/// Threads per block in `cuda/step_cluster.cu`.
const THREADS: usize = 256;
const WARPS: usize = THREADS / 32;
/// `STEP_CHUNK` of `cuda/step_cluster.cuh`: records of a stage of a ring.
const STAGE_RECORDS: usize = 2;
/// Most clusters of a kernel.
const MOST_CLUSTERS: usize = 16;
/// `MOST_SOURCES` of `cuda/step_cluster.cuh`.
const MOST_SOURCES: usize = 8;
/// Most kernels of a step: the limit of a stamp.
const MOST_KERNELS: usize = 255;
/// Most values per token for which blocks poll all parts until they are there: with more,
/// polling would slow down other reads.
const MOST_POLLED: usize = 2048;
/// `ClusterDigits` of `cuda/step_cluster.cuh`.
const DIGITS_BYTES: usize = 576;

/// Memory through which the kernels of a step pass values on.
pub struct ClusterParts {
    words: [Buffer<u64>; 2], // [clusters + 1, hidden]: a value, and above it a stamp
    epoch: Buffer<u32>,      // counts steps
    hidden: usize,
}

impl ClusterParts {
    /// Allocates it for a model with `hidden` values per token.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](crate::Error::DeviceMemory).
    pub fn new(gpu: &Gpu, hidden: usize) -> Result<Self> {
        let words = || gpu.zeros("activations", (MOST_CLUSTERS + 1) * hidden);
        Ok(ClusterParts {
            words: [words()?, words()?],
            epoch: gpu.upload("activations", &[1])?,
            hidden,
        })
    }
}

kernels! {
    STEP_ATTEND: ClusterArgs = "step_attend" in "step_cluster.cu",
        test "kernels/tests/cuda/cluster.rs::layers_by_clusters", bench "step_cluster",
        instances &[
            "step_attend_int4_sym_64_2", "step_attend_int4_int_64_2",
            "step_attend_int4_offset_64_2", "step_attend_int4_sym_64_4",
            "step_attend_int4_int_64_4", "step_attend_int4_offset_64_4",
        ];
    STEP_GATED: ClusterArgs = "step_gated" in "step_cluster.cu",
        test "kernels/tests/cuda/cluster.rs::layers_by_clusters", bench "step_cluster",
        instances &[
            "step_gated_int4_sym_64", "step_gated_int4_int_64", "step_gated_int4_offset_64",
        ];
    STEP_COLLECT: CollectArgs = "step_collect" in "step_cluster.cu",
        test "kernels/tests/cuda/cluster.rs::layers_by_clusters", bench "step_cluster";
}

/// `ClusterWeight` of `cuda/step_cluster.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct ClusterWeight {
    codes: Address,
    meta: Address,
    spans: i32,
    groups: i32,
    meta_bytes: i32,
}

/// `ClusterRoom` of `cuda/step_cluster.cuh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
struct Room {
    digits: i32,
    digits2: i32,
    values: i32,
    sums: i32,
    rings: i32,
    queries: i32,
    sources: i32,
    scratch: i32,
}

/// `ClusterArgs` of `cuda/step_cluster.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct ClusterArgs {
    first: ClusterWeight,
    second: ClusterWeight,
    x: Address,
    from: Address,
    to: Address,
    epoch: Address,
    gain: Address,
    eps: f32,
    hidden: i32,
    index: i32,
    log_blocks: i32,
    clusters: i32,
    clusters_in: i32,
    slots2: i32,
    depth: i32,
    sample: i32,
    at: Room,
    q_gain: Address,
    k_gain: Address,
    cos_sin: Address,
    cache: CacheArgs,
    step: Address,
    heads: i32,
}

/// `CollectArgs` of `cuda/step_cluster.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct CollectArgs {
    from: Address,
    x: Address,
    epoch: Address,
    hidden: i32,
    index: i32,
    clusters_in: i32,
}

/// Half a layer, run by one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    /// Norm; queries, keys and values; attention of this many heads per key head; its output product.
    Attend(usize),
    /// Norm, gate and up, down.
    Gated,
}

/// Launch settings of half a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HalfPlan {
    half: Half,
    /// Kind of zero-points of both weights.
    zeros: usize,
    clusters: usize,
    /// Number of stages in a warp's ring.
    depth: usize,
    room: Room,
    shared: usize,
}

/// Sizes of half a layer.
#[derive(Clone, Copy)]
struct HalfSizes {
    half: Half,
    hidden: usize,
    /// Number of parts of 64 among the second product's inputs.
    slots: usize,
    clusters: usize,
    /// Bytes of a stage in a ring.
    stage: usize,
}

impl HalfSizes {
    /// The layout of shared memory, and its end.
    fn room(&self, depth: usize) -> (Room, usize) {
        let mut end = 1024;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(128);
            at as i32
        };
        let slots = self.slots.div_ceil(self.clusters);
        let (tiles, outputs) = self.first(slots);
        let mut room = Room {
            digits: take(self.hidden / 256 * DIGITS_BYTES),
            digits2: take((slots + 6) / 4 * DIGITS_BYTES),
            values: take(outputs * 4),
            sums: take(self.most_sums(tiles, slots) * 64),
            ..Room::default()
        };
        if let Half::Attend(group) = self.half {
            room.queries = take((group + 2) * 512);
            room.sources = take(MOST_SOURCES * (group * 128 + 8) * 4);
            room.scratch = take((4 * 128 + 32) * group * 4 + 1536);
        }
        room.rings = take(WARPS * depth * self.stage);
        (room, end)
    }

    /// Tiles and outputs of the first product in a cluster with this many slots.
    fn first(&self, slots: usize) -> (usize, usize) {
        match self.half {
            Half::Attend(group) => (8 * (group + 2), 128 * (group + 2)),
            Half::Gated => (8 * slots, 64 * slots),
        }
    }

    /// Most sums of 16 rows that the warps of a block leave.
    fn most_sums(&self, tiles: usize, slots: usize) -> usize {
        let of = |tiles: usize, spans: usize| {
            if tiles * spans <= WARPS {
                tiles * spans
            } else {
                tiles * (WARPS / tiles + 2)
            }
        };
        // For any number of tiles that a block may have, in products with this many spans of inputs.
        let first = (1..=tiles.div_ceil(BLOCKS)).map(|t| of(t, self.hidden / 256));
        let tiles = (self.hidden / 16).div_ceil(BLOCKS);
        let spans = 1..=(slots + 6) / 4;
        let second = spans.flat_map(|s| (1..=tiles).map(move |t| of(t, s)));
        first.chain(second).max().unwrap_or(0)
    }
}

/// Stages of a warp's ring in each half and number of clusters, as measured on an H200.
struct Choice {
    attend: usize,
    gated: usize,
    clusters: usize,
}

/// The choice for models with `hidden` values per token; `None`: do not run by clusters.
fn choice(hidden: usize) -> Option<Choice> {
    let choice = |attend, gated, clusters| {
        Some(Choice {
            attend,
            gated,
            clusters,
        })
    };
    match hidden {
        ..=1024 => choice(2, 3, 8),
        1025..=2048 => choice(2, 3, 15),
        _ => None,
    }
}

impl HalfPlan {
    /// `None` if the kernels do not support the weights.
    fn new(
        half: Half,
        clusters: usize,
        depth: usize,
        first: &DeviceLinear,
        second: &DeviceLinear,
    ) -> Option<Self> {
        let hidden = first.inputs();
        let zeros = kind_index(first.kind());
        let sizes = HalfSizes {
            half,
            hidden,
            slots: second.inputs() / 64,
            clusters,
            stage: STAGE_RECORDS * (2048 + first.kind().meta_room()),
        };
        let rows = match half {
            Half::Attend(group) => (group + 2) * 128 * clusters,
            Half::Gated => 2 * second.inputs(),
        };
        // The first kinds are those of INT4 with a scale for 64 inputs or more. Each thread finishes
        // one output.
        let serves = zeros < 3
            && kind_index(second.kind()) == zeros
            && hidden.is_multiple_of(256)
            && hidden / BLOCKS <= THREADS
            && second.inputs().is_multiple_of(64)
            && (first.rows(), second.rows()) == (rows, hidden)
            && sizes.slots >= clusters;
        let (room, shared) = sizes.room(depth);
        serves.then_some(HalfPlan {
            half,
            zeros,
            clusters,
            depth,
            room,
            shared,
        })
    }

    fn kernel(&self) -> Instance<ClusterArgs> {
        match self.half {
            Half::Attend(group) => STEP_ATTEND.instance(usize::from(group == 4) * 3 + self.zeros),
            Half::Gated => STEP_GATED.instance(self.zeros),
        }
    }

    fn shape(&self) -> LaunchShape {
        LaunchShape::new((self.clusters * BLOCKS, 1, 1), THREADS)
            .shared(self.shared)
            .overlapping()
            .clusters_of(BLOCKS)
    }

    /// True if all clusters fit on the device at once.
    fn fits(&self, gpu: &Gpu) -> Result<bool> {
        let kernel = self.kernel();
        Ok(gpu.has_kernel(&kernel)
            && self.shared <= gpu.info().shared_memory
            && gpu.clusters_at_once(&kernel, self.shape())? >= self.clusters)
    }
}

/// Launch settings for the layers of a step, for [`Stream::cluster_layers`].
pub struct ClusterPlan(Vec<[HalfPlan; 2]>);

impl ClusterLayer<'_> {
    fn plan(&self) -> Option<[HalfPlan; 2]> {
        let choice = choice(self.qkv.inputs())?;
        let (heads, kv_heads) = (self.heads.heads, self.cache.kv_heads());
        let group = heads / kv_heads;
        let serves = matches!(group, 2 | 4)
            && kv_heads <= MOST_CLUSTERS
            && heads == group * kv_heads
            && !self.cache.is_int8()
            && self.o.inputs() == heads * 128;
        let attend = HalfPlan::new(
            Half::Attend(group),
            kv_heads,
            choice.attend,
            self.qkv,
            self.o,
        )?;
        let gated = HalfPlan::new(
            Half::Gated,
            choice.clusters,
            choice.gated,
            self.gate_up,
            self.down,
        )?;
        serves.then_some([attend, gated])
    }
}

impl ClusterPlan {
    /// The plan for a model's layers; `None` if these kernels do not support their shapes, their kinds or
    /// the device, or are not the fastest.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(gpu: &Gpu, layers: &[ClusterLayer<'_>]) -> Result<Option<Self>> {
        if gpu.info().capability != (9, 0) || 2 * layers.len() + 1 > MOST_KERNELS {
            return Ok(None);
        }
        let Some(plans) = layers
            .iter()
            .map(ClusterLayer::plan)
            .collect::<Option<Vec<_>>>()
        else {
            return Ok(None);
        };
        let mut asked: Vec<HalfPlan> = Vec::new();
        for plan in plans.iter().flatten() {
            if !asked.contains(plan) {
                if !plan.fits(gpu)? {
                    return Ok(None);
                }
                asked.push(*plan);
            }
        }
        Ok(Some(ClusterPlan(plans)))
    }
}

/// Arguments shared by all kernels of a step.
struct StepOf<'a> {
    o: Operands<'a>,
    parts: &'a ClusterParts,
    x: &'a Buffer<f32>,
    step: Address,
}

impl StepOf<'_> {
    /// The address of the parts that kernel `index` of a step writes, counted from 1.
    fn parts(&self, index: usize) -> Result<Address> {
        let dims = [MOST_CLUSTERS + 1, self.parts.hidden];
        self.o.of("parts", &self.parts.words[index % 2], &dims)
    }

    fn weight(&self, w: &DeviceLinear) -> Result<ClusterWeight> {
        let p = w.args(&self.o)?;
        Ok(ClusterWeight {
            codes: p.codes,
            meta: p.meta,
            spans: p.spans,
            groups: p.groups,
            meta_bytes: p.meta_bytes,
        })
    }

    /// The arguments of kernel `index` of the step, after one with this many clusters.
    fn args(
        &self,
        layer: &ClusterLayer<'_>,
        plan: &HalfPlan,
        index: usize,
        clusters_in: usize,
    ) -> Result<ClusterArgs> {
        let (o, hidden) = (&self.o, self.parts.hidden);
        let (first, second, gain) = match plan.half {
            Half::Attend(_) => (layer.qkv, layer.o, layer.attention_norm),
            Half::Gated => (layer.gate_up, layer.down, layer.mlp_norm),
        };
        if first.inputs() != hidden {
            return o.refuse("inputs", hidden, first.inputs());
        }
        let heads = layer.heads.args(o, layer.cache)?;
        Ok(ClusterArgs {
            first: self.weight(first)?,
            second: self.weight(second)?,
            x: match index {
                1 => o.of("x", self.x, &[hidden])?,
                _ => Address::NULL,
            },
            from: self.parts(index - 1)?,
            to: self.parts(index)?,
            epoch: o.of("epoch", &self.parts.epoch, &[1])?,
            gain: o.of("gain", gain, &[hidden])?,
            eps: layer.heads.eps,
            hidden: hidden as i32,
            index: index as i32,
            log_blocks: BLOCKS.ilog2() as i32,
            clusters: plan.clusters as i32,
            clusters_in: clusters_in as i32,
            slots2: (second.inputs() / 64) as i32,
            depth: plan.depth as i32,
            sample: i32::from(hidden > MOST_POLLED),
            at: plan.room,
            q_gain: heads.q_gain,
            k_gain: heads.k_gain,
            cos_sin: heads.cos_sin,
            cache: layer.cache.args(o)?,
            step: self.step,
            heads: layer.heads.heads as i32,
        })
    }
}

impl Stream {
    /// Runs the layers of a step of one row: `x` `[hidden]` becomes their output, and the row's keys and
    /// values are appended. `plan` must be that of these layers.
    ///
    /// All kernels are queued by one call: each but the first waits for values that the previous one
    /// writes, and relies on that one being queued.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn cluster_layers(
        &self,
        plan: &ClusterPlan,
        layers: &[ClusterLayer<'_>],
        x: &mut Buffer<f32>,
        step: &Checked<Step>,
        parts: &mut ClusterParts,
    ) -> Result<()> {
        let o = self.operands("cluster_layers");
        if plan.0.len() != layers.len()
            || layers
                .iter()
                .zip(&plan.0)
                .any(|(l, p)| l.plan() != Some(*p))
        {
            return o.refuse("layers", "those of the plan", layers.len());
        }
        let hidden = parts.hidden;
        let kernels = StepOf {
            o,
            parts,
            x,
            step: o.of("step", step.values(), &[1])?,
        };
        let mut all = Vec::with_capacity(2 * layers.len());
        let mut clusters = 0;
        for (layer, plans) in layers.iter().zip(&plan.0) {
            step.bounds().places.check(&o, layer.cache.places())?;
            for plan in plans {
                let args = kernels.args(layer, plan, all.len() + 1, clusters)?;
                all.push((layer, plan, args));
                clusters = plan.clusters;
            }
        }
        let collect = CollectArgs {
            from: kernels.parts(all.len())?,
            x: o.of("x", x, &[hidden])?,
            epoch: o.of("epoch", &parts.epoch, &[1])?,
            hidden: hidden as i32,
            index: all.len() as i32 + 1,
            clusters_in: clusters as i32,
        };
        for (layer, plan, args) in &all {
            let (name, weights) = match plan.half {
                Half::Attend(_) => ("qkv, attention, o", [layer.qkv, layer.o]),
                Half::Gated => ("gate_up, down", [layer.gate_up, layer.down]),
            };
            let bytes = weights.map(DeviceLinear::bytes).iter().sum();
            let key = (name, weights[0].kind().name(), (weights[0].rows(), hidden));
            // SAFETY: the operands were checked, and that the step is in the cache; all clusters run at
            // once, and the previous kernel writes the values that this one waits for.
            self.timed(key, bytes, || unsafe {
                self.launch(plan.kernel(), plan.shape(), args)
            })?;
        }
        let shape = LaunchShape::new((1, 1, 1), 1024).overlapping();
        self.timed(("sum", "fused", (1, hidden)), 0, || {
            // SAFETY: as above.
            unsafe { self.launch(&STEP_COLLECT, shape, &collect) }
        })
    }
}
