//! Products of many rows at once.

use super::Version;
use super::driver::{Address, Buffer, Gpu, GpuInfo, LaunchShape, Stream, has_small_blocks};
use super::kernel::{kernels, names};
use super::linear::{DeviceLinear, WeightSizes};
use super::pack::{PackedKind, PackedShape, SPAN, TILE};
use super::product::{
    Boxes, Epilogue, Inputs, OutputAddresses, OutputMemory, PlannedRows, Product, ProductOutput,
    RowBlocks, boxes, cheapest,
};
use crate::cuda::gemm::{GemmArgs, LARGE_ROOM, SMALL_ROOM};
use crate::cuda::gemm_wgmma::WgmmaArgs;
use nq_kernels::Result;
use std::ops::Range;

/// Output of a product of many rows.
pub enum GemmOutput<'a> {
    /// `y` `[m, rows]`
    Store(&'a mut Buffer<f32>),
    /// Adds to `y` `[m, rows]`.
    Add(&'a mut Buffer<f32>),
    /// For interleaved gate and up: `silu(gate) * up` `[m, rows / 2 padded to 256]` in FP16, in
    /// operand order.
    Silu(&'a mut Buffer<u16>),
}

impl<'a> From<GemmOutput<'a>> for ProductOutput<'a> {
    fn from(output: GemmOutput<'a>) -> Self {
        let (epilogue, to) = match output {
            GemmOutput::Store(y) => (Epilogue::Store, OutputMemory::Full(y)),
            GemmOutput::Add(y) => (Epilogue::Add, OutputMemory::Full(y)),
            GemmOutput::Silu(half) => (Epilogue::Silu, OutputMemory::Half(half)),
        };
        let norm = None;
        ProductOutput { epilogue, norm, to }
    }
}

kernels! {
    GEMM: GemmArgs = "gemm" in "gemm.cu",
        test "kernels/cuda/tests/cuda/mod.rs::products_of_many_rows", bench "gemm",
        instances names!(kinds "gemm"; "_8", "_16", "_64", "_128");
    GEMM_WGMMA: WgmmaArgs = "gemm_wgmma" in "gemm_wgmma.cu",
        test "kernels/cuda/tests/cuda/mod.rs::products_of_many_rows_in_real_shapes", bench "gemm",
        instances names!(kinds "gemm"; "_64x64", "_64x128", "_192x128");
}

/// An instance of `cuda/gemm.cu`, in the order of [`GEMM`]'s names: each warp multiplies tiles of weights by all
/// rows of x. Times are in microseconds, measured on an H200 without its warpgroup products; only their ratios
/// matter.
struct MmaInstance {
    /// Rows of x and tiles of weights per block.
    rows: usize,
    tiles: usize,
    /// Teams that have room on a multiprocessor at once, in one block or several.
    teams: usize,
    /// Work that a team adds to its multiprocessor per step of 64 inputs, and the least time in which those that
    /// run at once make a step.
    work: f64,
    step: f64,
}

/// In ascending order of rows of x.
const INSTANCES: [MmaInstance; 4] = [
    MmaInstance {
        rows: 8,
        tiles: 4,
        teams: 4,
        work: 0.10,
        step: 0.40,
    },
    MmaInstance {
        rows: 16,
        tiles: 4,
        teams: 4,
        work: 0.12,
        step: 0.40,
    },
    MmaInstance {
        rows: 64,
        tiles: 4,
        teams: 4,
        work: 0.17,
        step: 1.05,
    },
    MmaInstance {
        rows: 128,
        tiles: 8,
        teams: 2,
        work: 0.78,
        step: 1.05,
    },
];

/// Threads of a team.
const TEAM: usize = 128;
/// Shared memory that teams have on a multiprocessor, where blocks have little ([`has_small_blocks`]) and elsewhere.
/// More rows of x than this are multiplied by weights that were rounded to FP16.
const EXACT_ROWS: usize = 16;
/// Microseconds until the sums of one more team are added up.
const JOINING: f64 = 0.5;

/// How `cuda/gemm.cu` computes a product: by which instance, with how many teams and bytes of shared memory per
/// block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GemmPlan {
    instance: usize,
    /// Blocks of rows of x.
    columns: usize,
    teams: usize,
    shared: usize,
    /// Estimated microseconds.
    time: f64,
}

impl GemmPlan {
    /// A product with `w` in `columns` blocks of rows of x. None without room.
    fn of(
        instance: usize,
        teams: usize,
        info: &GpuInfo,
        columns: usize,
        w: &PackedShape,
    ) -> Option<Self> {
        let room = info.shared_memory;
        let kernel = &INSTANCES[instance];
        // `STAGE` and `STAGES` of `Gemm`; afterwards, the sums of all teams but one.
        let stage = kernel.rows * 128 + kernel.tiles * w.kind.bits() * 128;
        let all = if has_small_blocks(room) {
            SMALL_ROOM
        } else {
            LARGE_ROOM
        };
        let stages = (all / kernel.teams / stage).clamp(2, 4);
        let sums = (teams - 1) * kernel.tiles * TILE * kernel.rows * size_of::<f32>();
        let shared = (teams * stages * stage).max(sums);
        let resident = (all / shared).min(kernel.teams / teams) * teams;
        if shared > room {
            return None;
        }
        // Of the multiprocessor that has most to do.
        let blocks =
            (columns * w.tiles.div_ceil(kernel.tiles)).div_ceil(info.multiprocessors.max(1));
        let turns = (blocks * teams).div_ceil(resident.max(teams));
        let busy = ((blocks * teams) as f64 * kernel.work).max(turns as f64 * kernel.step);
        let steps = 4.0 * w.spans as f64 / teams as f64;
        let time = busy * steps + (teams - 1) as f64 * JOINING;
        Some(GemmPlan {
            instance,
            columns,
            teams,
            shared,
            time,
        })
    }

    /// The fastest among the instances for these rows.
    pub(super) fn new(info: &GpuInfo, w: &PackedShape, blocks: RowBlocks) -> Option<Self> {
        let plans = Self::instances(blocks)
            .flat_map(|i| [1, 2, 4].map(|teams| (i, teams)))
            .filter(|&(i, teams)| teams <= INSTANCES[i].teams.min(w.spans.max(1)))
            .filter_map(|(i, teams)| {
                Self::of(i, teams, info, blocks.columns(INSTANCES[i].rows), w)
            });
        cheapest(plans.map(|plan| (plan.time, plan)))
    }

    /// The instances for rows of x: the smallest that takes them and does not round weights, or else those that do.
    fn instances(blocks: RowBlocks) -> Range<usize> {
        let exact = INSTANCES.partition_point(|i| i.rows <= EXACT_ROWS);
        let one = match blocks {
            RowBlocks::Of(m) => INSTANCES[..exact].iter().position(|i| m <= i.rows),
            RowBlocks::Sorted { rows, .. } => INSTANCES.iter().position(|i| i.rows == rows),
        };
        match (one, blocks) {
            (Some(i), _) => i..i + 1,
            (None, RowBlocks::Of(_)) => exact..INSTANCES.len(),
            (None, RowBlocks::Sorted { .. }) => 0..0,
        }
    }
}

/// Stages of `cuda/gemm_wgmma.cu`.
const STAGES: usize = 4;

/// An instance of `cuda/gemm_wgmma.cu`, in the order of [`GEMM_WGMMA`]'s names. Times are in
/// microseconds, measured on an H200.
struct WgmmaInstance {
    /// Warpgroups, each of four tiles of weights.
    groups: usize,
    /// Rows of x.
    rows: usize,
    /// Work that a block adds to its multiprocessor: per step of 64 inputs, and once.
    work: (f64, f64),
    /// Time of a step for a block that has a multiprocessor to itself.
    step: f64,
    /// Most blocks that share a tile, each with a part of the inputs: of four large blocks no
    /// two run on a multiprocessor at once.
    most_parts: usize,
}

const WGMMA_INSTANCES: [WgmmaInstance; 3] = [
    WgmmaInstance {
        groups: 1,
        rows: 64,
        work: (0.18, 1.0),
        step: 0.30,
        most_parts: 4,
    },
    WgmmaInstance {
        groups: 1,
        rows: 128,
        work: (0.23, 1.0),
        step: 0.33,
        most_parts: 2,
    },
    WgmmaInstance {
        groups: 3,
        rows: 128,
        work: (0.54, 5.0),
        step: 0.54,
        most_parts: 1,
    },
];

/// Numbers of blocks that may share a tile.
const PARTS: [usize; 3] = [1, 2, 4];
/// Microseconds until a cluster's blocks have added up their sums.
const ADDING: f64 = 5.0;
/// Least steps of 64 inputs that make a part.
const LEAST_STEPS: usize = 8;

impl WgmmaInstance {
    /// Estimated microseconds for a product with `w` in `columns` blocks of rows of x, in `parts`.
    fn time(&self, multiprocessors: usize, columns: usize, w: &PackedShape, parts: usize) -> f64 {
        let blocks = parts * columns * w.tiles.div_ceil(self.groups * 4);
        let turns = blocks.div_ceil(multiprocessors.max(1)) as f64;
        let steps = (4 * w.spans) as f64 / parts as f64;
        let busy = turns * (self.work.0 * steps + self.work.1);
        let alone = self.step * steps + self.work.1;
        let adding = if parts > 1 { ADDING } else { 0.0 };
        busy.max(alone) + adding
    }

    /// `STAGE`, `OUT_BYTES` and the alignment of `WgmmaGemm`.
    fn shared(&self, kind: PackedKind) -> usize {
        let stage = self.rows * 128 + self.groups * 4 * (kind.bits() * 128 + kind.meta_room());
        1024 + STAGES * stage.next_multiple_of(1024) + self.groups * self.rows * 80
    }
}

/// How `cuda/gemm_wgmma.cu` computes a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct WgmmaPlan {
    instance: usize,
    /// Blocks of rows of x.
    columns: usize,
    /// Blocks that share a tile.
    parts: usize,
}

impl WgmmaPlan {
    /// `None` for few rows, of which half of a warpgroup's product would be wasted, and on devices without this kernel.
    pub(super) fn new(gpu: &Gpu, w: &PackedShape, blocks: RowBlocks) -> Option<Self> {
        let info = gpu.info();
        let few = matches!(blocks, RowBlocks::Of(m) if m <= EXACT_ROWS);
        if few || info.capability != Version::new(9, 0) {
            return None;
        }
        let plan = Self::fastest(info.multiprocessors, w, blocks)?;
        // Absent in a build without sm_90a.
        let kernel = GEMM_WGMMA.of_kind(plan.instance, w.kind);
        gpu.has_kernel(&kernel).then_some(plan)
    }

    /// The fastest on so many multiprocessors.
    fn fastest(multiprocessors: usize, w: &PackedShape, blocks: RowBlocks) -> Option<Self> {
        let most = (4 * w.spans / LEAST_STEPS).max(1);
        cheapest(
            WGMMA_INSTANCES
                .iter()
                .enumerate()
                .flat_map(|(i, instance)| {
                    let most = match blocks {
                        RowBlocks::Of(_) => most.min(instance.most_parts),
                        RowBlocks::Sorted { rows, .. } => usize::from(rows == instance.rows),
                    };
                    let columns = blocks.columns(instance.rows);
                    let parts = PARTS.into_iter().filter(move |&p| p <= most);
                    parts.map(move |parts| {
                        let plan = WgmmaPlan {
                            instance: i,
                            columns,
                            parts,
                        };
                        (instance.time(multiprocessors, columns, w, parts), plan)
                    })
                }),
        )
    }
}

/// How a product of many rows is computed.
pub(super) enum ManyRowsPlan {
    /// `cuda/gemm_wgmma.cu`
    Warpgroups(WgmmaPlan),
    /// `cuda/gemm.cu`
    Warps(GemmPlan),
}

impl ManyRowsPlan {
    /// `None` if no kernel has room for the product.
    pub(super) fn new(gpu: &Gpu, w: &PackedShape, blocks: RowBlocks) -> Option<Self> {
        match WgmmaPlan::new(gpu, w, blocks) {
            Some(plan) => Some(ManyRowsPlan::Warpgroups(plan)),
            None => GemmPlan::new(gpu.info(), w, blocks).map(ManyRowsPlan::Warps),
        }
    }
}

/// Rows that a block of [`Stream::gemm_experts`] takes if experts have `mean` rows on average: rows are dealt
/// unevenly, and few experts should need a second block.
pub(super) fn rows_of_experts(gpu: &Gpu, mean: usize) -> usize {
    // Elsewhere blocks of 128 are faster by a fifth, if they are full.
    let large = gpu.info().capability == Version::new(9, 0) || mean >= 128;
    let most = if large { 128 } else { 64 };
    [8, 16, 64]
        .into_iter()
        .find(|&n| 2 * mean <= n)
        .unwrap_or(most)
}

impl Stream {
    /// Multiplies `m` rows of FP16 activations `x` `[m, inputs padded to 256]`, in operand order
    /// ([`operand_index`](super::pack::operand_index)), by `w`.
    ///
    /// Products of more than 16 rows round weights to FP16.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn gemm(
        &self,
        w: &DeviceLinear,
        x: &Buffer<u16>,
        output: GemmOutput<'_>,
        m: usize,
    ) -> Result<()> {
        let (o, asked) = (self.operands("gemm"), PlannedRows::Many(RowBlocks::Of(m)));
        let p = Product::new(o, w, Inputs::Half(x), m, asked);
        self.multiply(p, output.into())
    }

    /// Launches a kernel of `cuda/gemm.cu` or `cuda/gemm_wgmma.cu` over all of a weight, or with `of_experts`
    /// (`ExpertRows` of `cuda/gemm.cuh`) over experts of these sizes.
    ///
    /// # Safety
    /// `of_experts` is null, or on the device each of its blocks has an expert of the weight, and rows of x.
    pub(super) unsafe fn multiply_many(
        &self,
        p: &Product<'_>,
        plan: &ManyRowsPlan,
        to: &OutputAddresses<'_>,
        sizes: WeightSizes,
        of_experts: Address,
    ) -> Result<()> {
        let (kind, tiles) = (p.w.kind(), sizes.tiles as usize);
        let (codes, meta, scale) = p.w.operands(&p.o)?;
        let mut args = GemmArgs {
            codes,
            meta,
            x: p.x()?,
            y: to.y,
            half: to.half,
            of_experts,
            m: p.m as i32,
            rows: sizes.rows,
            tiles: sizes.tiles,
            spans: sizes.spans,
            groups: sizes.groups,
            meta_bytes: sizes.meta_bytes,
            padded: (sizes.rows as usize / 2).next_multiple_of(SPAN) as i32,
            epilogue: to.epilogue as i32,
            scale,
            parts: 1,
            scheme: sizes.scheme,
            padding: [0; 1],
        };
        match plan {
            ManyRowsPlan::Warpgroups(plan) => {
                let kernel = &WGMMA_INSTANCES[plan.instance];
                args.parts = plan.parts as i32;
                // A box has at most 256 elements; with 16-bit weights, a step takes 2,048 bytes of a tile.
                let element = if kind.bits() == 16 { 8 } else { 4 };
                let size = Boxes {
                    rows: kernel.rows,
                    tiles: kernel.groups * 4,
                    bytes: kind.code_bytes() / 4,
                    element,
                };
                let [x, codes, meta] = boxes(p, [args.x, codes, meta], size)?;
                let args = WgmmaArgs {
                    x,
                    codes,
                    meta,
                    p: args,
                    padding: [0; 8],
                };
                let grid = [plan.parts * plan.columns, tiles.div_ceil(size.tiles), 1];
                let shape = LaunchShape::new(grid, kernel.groups * 128 + 32)
                    .shared(kernel.shared(kind))
                    .clusters_of(plan.parts);
                // SAFETY: by the caller; the boxes are those of the kernel.
                unsafe { self.launch(GEMM_WGMMA.of_kind(plan.instance, kind), shape, &args) }
            }
            ManyRowsPlan::Warps(plan) => {
                let grid = [
                    plan.columns,
                    tiles.div_ceil(INSTANCES[plan.instance].tiles),
                    1,
                ];
                let shape = LaunchShape::new(grid, plan.teams * TEAM).shared(plan.shared);
                // SAFETY: by the caller.
                unsafe { self.launch(GEMM.of_kind(plan.instance, kind), shape, &args) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{GemmPlan, INSTANCES, PackedShape, RowBlocks, WgmmaPlan};
    use crate::{GpuInfo, PackedKind};
    use nq_formats::{Bits, Zeros};

    fn device(multiprocessors: usize, shared_memory: usize) -> GpuInfo {
        GpuInfo {
            multiprocessors,
            shared_memory,
            ..GpuInfo::default()
        }
    }

    fn shape(rows: usize, inputs: usize) -> PackedShape {
        let kind = PackedKind::Affine {
            bits: Bits::B4,
            zeros: Zeros::Integer,
            groups: 2,
            two_level: false,
            table: false,
        };
        PackedShape::new(kind, rows, inputs)
    }

    #[test]
    fn blocks_fit_shared_memory() {
        let affine = |bits| PackedKind::Affine {
            bits,
            zeros: Zeros::Integer,
            groups: 8,
            two_level: false,
            table: false,
        };
        let kinds = [affine(Bits::B4), affine(Bits::B8), PackedKind::Fp16];
        // Compute capability 8.6, 8.9 and 12.0; 8.0; 9.0.
        for room in [99 << 10, 163 << 10, 227 << 10] {
            let all = kinds.iter().flat_map(|&k| (1..300).map(move |m| (k, m)));
            for (kind, m) in all {
                let w = PackedShape::new(kind, 1024, 4096);
                let plan = GemmPlan::new(&device(100, room), &w, RowBlocks::Of(m)).unwrap();
                assert!(plan.shared <= room, "{room}, {kind:?}, {m} rows: {plan:?}");
                let rows = INSTANCES[plan.instance].rows;
                match m {
                    1..=8 => assert_eq!(rows, 8),
                    9..=16 => assert_eq!(rows, 16),
                    _ => assert!(rows > 16),
                }
            }
        }
        for i in &super::WGMMA_INSTANCES {
            assert!(kinds.iter().all(|&k| i.shared(k) <= 227 << 10));
        }
        assert!(INSTANCES.is_sorted_by_key(|i| i.rows));
    }

    /// On 132 multiprocessors without warpgroup products: the choices that measured fastest, or within 10 % of it.
    #[test]
    fn teams_suit_the_product() {
        let chosen = |m: usize, rows: usize, inputs: usize| {
            let (info, w) = (device(132, 163 << 10), shape(rows, inputs));
            let plan = GemmPlan::new(&info, &w, RowBlocks::Of(m)).unwrap();
            (INSTANCES[plan.instance].rows, plan.teams)
        };
        // 8B: qkv, o, gate_up, down.
        assert_eq!(chosen(512, 6144, 4096), (128, 1));
        assert_eq!(chosen(512, 4096, 4096), (128, 2));
        assert_eq!(chosen(512, 24576, 4096), (128, 1));
        assert_eq!(chosen(512, 4096, 12288), (128, 2));
        assert_eq!(chosen(128, 4096, 4096), (64, 4));
        assert_eq!(chosen(64, 4096, 12288), (64, 4));
        assert_eq!(chosen(16, 4096, 4096), (16, 4));
        assert_eq!(chosen(8, 4096, 12288), (8, 4));
        assert_eq!(chosen(1, 1, 1), (8, 1));
    }

    /// On 132 multiprocessors: the choices that measured fastest, which keep them all busy.
    #[test]
    fn blocks_suit_the_product() {
        let chosen = |m: usize, rows: usize, inputs: usize| {
            let plan = WgmmaPlan::fastest(132, &shape(rows, inputs), RowBlocks::Of(m)).unwrap();
            let i = &super::WGMMA_INSTANCES[plan.instance];
            (i.groups * 64, i.rows, plan.parts)
        };
        // 8B: qkv, o, gate_up, down.
        assert_eq!(chosen(512, 6144, 4096), (192, 128, 1));
        assert_eq!(chosen(512, 4096, 4096), (64, 128, 1));
        assert_eq!(chosen(512, 24576, 4096), (192, 128, 1));
        assert_eq!(chosen(512, 4096, 12288), (64, 128, 1));
        assert_eq!(chosen(128, 4096, 4096), (64, 128, 2));
        assert_eq!(chosen(128, 4096, 12288), (64, 128, 2));
        assert_eq!(chosen(64, 4096, 12288), (64, 64, 4));
        assert_eq!(chosen(17, 1, 1), (64, 64, 1));
        // `products_of_many_rows_in_real_shapes` relies on this.
        assert_eq!(chosen(333, 49_000, 1000), (192, 128, 1));
        assert_eq!(chosen(200, 4096, 1024), (64, 128, 1));
        assert_eq!(chosen(100, 1024, 3072), (64, 64, 4));
        assert_eq!(chosen(120, 4096, 2560), (64, 128, 2));
    }
}
