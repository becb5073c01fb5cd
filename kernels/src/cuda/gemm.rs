//! Products of many rows at once.

use super::driver::{
    Address, Buffer, Gpu, LaunchShape, Matrix, Operands, Stream, TensorMap, has_small_blocks,
};
use super::gemm_step::Written;
use super::kernel::{kernels, names};
use super::linear::DeviceLinear;
use super::pack::{PackedKind, SPAN, TILE};
use crate::error::Result;
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

impl GemmOutput<'_> {
    /// Its addresses for `m` rows of a product with a weight of `rows` outputs.
    pub(super) fn written(self, o: &Operands<'_>, m: usize, rows: usize) -> Result<Written> {
        let padded = (rows / 2).next_multiple_of(SPAN);
        // `Epilogue` of `cuda/weights.cuh`.
        let (y, half, epilogue) = match self {
            GemmOutput::Store(y) => (o.of("y", y, &[m, rows])?, Address::NULL, 0),
            GemmOutput::Add(y) => (o.of("y", y, &[m, rows])?, Address::NULL, 1),
            GemmOutput::Silu(half) => (Address::NULL, o.of("FP16 output", half, &[m, padded])?, 2),
        };
        Ok(Written {
            y,
            half,
            best: Address::NULL,
            epilogue,
        })
    }
}

kernels! {
    GEMM: GemmArgs = "gemm" in "gemm.cu",
        test "kernels/tests/cuda/main.rs::products_of_many_rows", bench "gemm",
        instances names!(kinds "gemm"; "_8", "_16", "_64", "_128");
    GEMM_WGMMA: WgmmaArgs = "gemm_wgmma" in "gemm_wgmma.cu",
        test "kernels/tests/cuda/main.rs::products_of_many_rows_in_real_shapes", bench "gemm",
        instances names!(kinds "gemm"; "_64x64", "_64x128", "_192x128");
}

/// `GemmArgs` of `cuda/gemm.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct GemmArgs {
    codes: Address,
    meta: Address,
    x: Address,
    y: Address,
    half: Address,
    of_experts: Address,
    m: i32,
    rows: i32,
    tiles: i32,
    spans: i32,
    groups: i32,
    meta_bytes: i32,
    padded: i32,
    epilogue: i32,
    scale: f32,
    parts: i32,
}

impl GemmArgs {
    /// The product of `m` rows of `x` with `rows` rows of `w`, in so many tiles: all of them, or an expert's.
    fn new(
        o: &Operands<'_>,
        w: &DeviceLinear,
        (rows, tiles): (usize, usize),
        x: &Buffer<u16>,
        output: GemmOutput<'_>,
        m: usize,
    ) -> Result<Self> {
        let packed = w.args(o)?;
        let padded = (rows / 2).next_multiple_of(SPAN);
        let Written {
            y, half, epilogue, ..
        } = output.written(o, m, rows)?;
        Ok(GemmArgs {
            codes: packed.codes,
            meta: packed.meta,
            x: o.of("x", x, &[m, w.spans(), SPAN])?,
            y,
            half,
            of_experts: Address::NULL,
            m: m as i32,
            rows: rows as i32,
            tiles: tiles as i32,
            spans: packed.spans,
            groups: packed.groups,
            meta_bytes: packed.meta_bytes,
            padded: padded as i32,
            epilogue,
            scale: packed.scale,
            parts: 1,
        })
    }
}

/// `WgmmaArgs` of `cuda/gemm_wgmma.cuh`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct WgmmaArgs {
    x: TensorMap,
    codes: TensorMap,
    meta: TensorMap,
    p: GemmArgs,
    pad: [i32; 10],
}

/// An instance of `cuda/gemm.cu`, in the order of [`GEMM`]'s names: each warp multiplies tiles of weights by all
/// rows of x. Times are in microseconds, measured on an H200 without its warpgroup products; only their ratios
/// matter.
struct Instance {
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
const INSTANCES: [Instance; 4] = [
    Instance {
        rows: 8,
        tiles: 4,
        teams: 4,
        work: 0.10,
        step: 0.40,
    },
    Instance {
        rows: 16,
        tiles: 4,
        teams: 4,
        work: 0.12,
        step: 0.40,
    },
    Instance {
        rows: 64,
        tiles: 4,
        teams: 4,
        work: 0.17,
        step: 1.05,
    },
    Instance {
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
const SMALL_ROOM: usize = 98_304;
const LARGE_ROOM: usize = 163_840;
/// More rows of x than this are multiplied by weights that were rounded to FP16.
const EXACT_ROWS: usize = 16;
/// Microseconds until the sums of one more team are added up.
const JOINING: f64 = 0.5;

/// How `cuda/gemm.cu` computes a product: by which instance, with how many teams and bytes of shared memory per
/// block.
#[derive(Clone, Copy, Debug, PartialEq)]
struct GemmPlan {
    instance: usize,
    teams: usize,
    shared: usize,
    /// Estimated microseconds.
    time: f64,
}

impl GemmPlan {
    /// A product of `tiles` tiles of weights of `kind`, over `spans` spans, in `columns` blocks of rows of x, on
    /// `multiprocessors` with `room` bytes of shared memory per block. None without room.
    fn new(
        (instance, teams): (usize, usize),
        (multiprocessors, room): (usize, usize),
        (columns, tiles, spans): (usize, usize, usize),
        kind: PackedKind,
    ) -> Option<Self> {
        let of = &INSTANCES[instance];
        // `STAGE` and `STAGES` of `Gemm`; afterwards, the sums of all teams but one.
        let stage = of.rows * 128 + of.tiles * kind.bits() * 128;
        let all = if has_small_blocks(room) {
            SMALL_ROOM
        } else {
            LARGE_ROOM
        };
        let stages = (all / of.teams / stage).clamp(2, 4);
        let sums = (teams - 1) * of.tiles * TILE * of.rows * size_of::<f32>();
        let shared = (teams * stages * stage).max(sums);
        let resident = (all / shared).min(of.teams / teams) * teams;
        if shared > room {
            return None;
        }
        // Of the multiprocessor that has most to do.
        let blocks = (columns * tiles.div_ceil(of.tiles)).div_ceil(multiprocessors.max(1));
        let turns = (blocks * teams).div_ceil(resident.max(teams));
        let busy = ((blocks * teams) as f64 * of.work).max(turns as f64 * of.step);
        let steps = 4.0 * spans as f64 / teams as f64;
        let time = busy * steps + (teams - 1) as f64 * JOINING;
        Some(GemmPlan {
            instance,
            teams,
            shared,
            time,
        })
    }

    /// The fastest among `instances`, for `columns(rows)` blocks of so many rows of x.
    fn choose(
        instances: Range<usize>,
        place: (usize, usize),
        columns: impl Fn(usize) -> usize,
        (tiles, spans, kind): (usize, usize, PackedKind),
    ) -> Option<Self> {
        instances
            .flat_map(|i| [1, 2, 4].map(|teams| (i, teams)))
            .filter(|&(i, teams)| teams <= INSTANCES[i].teams.min(spans.max(1)))
            .filter_map(|of| {
                let columns = columns(INSTANCES[of.0].rows);
                GemmPlan::new(of, place, (columns, tiles, spans), kind)
            })
            .min_by(|a, b| a.time.total_cmp(&b.time))
    }

    /// The instances for `m` rows of x: the smallest that takes them and does not round weights, or else those
    /// that do.
    fn instances(m: usize) -> Range<usize> {
        let exact = INSTANCES.partition_point(|i| i.rows <= EXACT_ROWS);
        match INSTANCES[..exact].iter().position(|i| m <= i.rows) {
            Some(i) => i..i + 1,
            None => exact..INSTANCES.len(),
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
    /// Estimated microseconds for `columns` blocks of rows of x and `tiles` tiles of weights over `spans`
    /// spans, in `parts`.
    fn time(
        &self,
        multiprocessors: usize,
        (columns, tiles, spans): (usize, usize, usize),
        parts: usize,
    ) -> f64 {
        let blocks = parts * columns * tiles.div_ceil(self.groups * 4);
        let turns = blocks.div_ceil(multiprocessors.max(1)) as f64;
        let steps = (4 * spans) as f64 / parts as f64;
        let busy = turns * (self.work.0 * steps + self.work.1);
        let alone = self.step * steps + self.work.1;
        let adding = if parts > 1 { ADDING } else { 0.0 };
        busy.max(alone) + adding
    }

    /// The fastest instance for `m` rows of x and `tiles` tiles of weights over `spans` spans, and
    /// its number of parts.
    fn choose(multiprocessors: usize, shape: (usize, usize, usize)) -> (usize, usize) {
        let parts = |i: usize| {
            let most = (4 * shape.2 / LEAST_STEPS).max(1);
            let most = most.min(WGMMA_INSTANCES[i].most_parts);
            PARTS.into_iter().filter(move |&p| p <= most)
        };
        let all = (0..WGMMA_INSTANCES.len()).flat_map(|i| parts(i).map(move |p| (i, p)));
        let time = |(i, p): (usize, usize)| {
            let of = &WGMMA_INSTANCES[i];
            let columns = shape.0.div_ceil(of.rows);
            of.time(multiprocessors, (columns, shape.1, shape.2), p)
        };
        all.min_by(|&a, &b| time(a).total_cmp(&time(b)))
            .unwrap_or((0, 1))
    }

    /// `STAGE`, `OUT_BYTES` and the alignment of `WgmmaGemm`.
    fn shared(&self, kind: PackedKind) -> usize {
        let stage = self.rows * 128 + self.groups * 4 * (kind.bits() * 128 + kind.meta_room());
        1024 + STAGES * stage.next_multiple_of(1024) + self.groups * self.rows * 80
    }
}

/// Rows that a block of [`Stream::gemm_experts`] takes if experts have `mean` rows on average: rows are dealt
/// unevenly, and few experts should need a second block.
pub(super) fn rows_of_experts(gpu: &Gpu, mean: usize) -> usize {
    let most = match gpu.info().capability {
        (9, 0) => 128,
        // Blocks of 128 are faster by a fifth, if they are full.
        _ if mean >= 128 => 128,
        _ => 64,
    };
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
    /// [`Error::Shape`](crate::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn gemm(
        &self,
        w: &DeviceLinear,
        x: &Buffer<u16>,
        output: GemmOutput<'_>,
        m: usize,
    ) -> Result<()> {
        if w.is_trellis() {
            return self.trellis_gemm(w, x, output, m);
        }
        let o = self.operands("gemm");
        let (spans, kind) = (w.spans(), w.kind());
        let args = GemmArgs::new(&o, w, (w.rows(), w.tiles()), x, output, m)?;
        let info = self.gpu().info();
        // With fewer rows, half of a warpgroup's product would be wasted.
        if m > EXACT_ROWS && info.capability == (9, 0) {
            let (instance, parts) =
                WgmmaInstance::choose(info.multiprocessors, (m, w.tiles(), spans));
            // Absent in a build without sm_90a.
            if self.gpu().has_kernel(&GEMM_WGMMA.of_kind(instance, kind)) {
                let parts = parts as i32;
                let columns = m.div_ceil(WGMMA_INSTANCES[instance].rows);
                let args = GemmArgs { parts, ..args };
                // SAFETY: the operands were checked.
                return unsafe { self.gemm_wgmma(w, instance, args, columns) };
            }
        }
        let columns = |rows| m.div_ceil(rows);
        let shape = (w.tiles(), spans, kind);
        let plan = self.gemm_plan(&o, GemmPlan::instances(m), columns, shape)?;
        // SAFETY: the operands were checked.
        unsafe { self.gemm_mma(w, plan, args, columns(INSTANCES[plan.instance].rows)) }
    }

    /// Multiplies rows that are sorted by expert, each by its expert's part of the stack `w`: `x`
    /// `[routes, inputs padded to 256]` as in [`Stream::gemm`]. `blocks` says which rows each of `columns`
    /// blocks of [`rows_of_experts`] takes.
    ///
    /// # Safety
    /// On the device, each of `blocks` has an expert below `experts` and rows within `routes`.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if an operand does not fit; errors of the driver.
    pub(super) unsafe fn gemm_experts(
        &self,
        (w, experts): (&DeviceLinear, usize),
        x: &Buffer<u16>,
        output: GemmOutput<'_>,
        routes: usize,
        blocks: &Buffer<[i32; 4]>,
        (columns, block_rows): (usize, usize),
    ) -> Result<()> {
        let o = self.operands("gemm_experts");
        let (spans, kind) = (w.spans(), w.kind());
        o.multiple("rows of the stack", experts * TILE, w.rows())?;
        let (rows, tiles) = (w.rows() / experts, w.tiles() / experts);
        let args = GemmArgs {
            of_experts: o.of("blocks", blocks, &[columns])?,
            ..GemmArgs::new(&o, w, (rows, tiles), x, output, routes)?
        };
        let info = self.gpu().info();
        if info.capability == (9, 0) {
            let shape = (columns, tiles, spans);
            let fitting =
                (0..WGMMA_INSTANCES.len()).filter(|&i| WGMMA_INSTANCES[i].rows == block_rows);
            let time = |i: usize| WGMMA_INSTANCES[i].time(info.multiprocessors, shape, 1);
            let best = fitting.min_by(|&a, &b| time(a).total_cmp(&time(b)));
            if let Some(i) = best
                && self.gpu().has_kernel(&GEMM_WGMMA.of_kind(i, kind))
            {
                // SAFETY: the operands were checked; the caller answers for the blocks.
                return unsafe { self.gemm_wgmma(w, i, args, columns) };
            }
        }
        let Some(i) = INSTANCES.iter().position(|i| i.rows == block_rows) else {
            return o.refuse("rows of a block", "those of an instance", block_rows);
        };
        let plan = self.gemm_plan(&o, i..i + 1, |_| columns, (tiles, spans, kind))?;
        // SAFETY: the operands were checked; the caller answers for the blocks.
        unsafe { self.gemm_mma(w, plan, args, columns) }
    }

    /// [`GemmPlan::choose`] for this device.
    fn gemm_plan(
        &self,
        o: &Operands<'_>,
        instances: Range<usize>,
        columns: impl Fn(usize) -> usize,
        shape: (usize, usize, PackedKind),
    ) -> Result<GemmPlan> {
        let info = self.gpu().info();
        let place = (info.multiprocessors, info.shared_memory);
        match GemmPlan::choose(instances, place, columns, shape) {
            Some(plan) => Ok(plan),
            None => o.refuse("shared memory of a block", "enough for stages", place.1),
        }
    }

    /// Launches a kernel of `cuda/gemm.cu` over `columns` blocks of rows of x.
    ///
    /// # Safety
    /// `p` holds checked operands.
    unsafe fn gemm_mma(
        &self,
        w: &DeviceLinear,
        plan: GemmPlan,
        p: GemmArgs,
        columns: usize,
    ) -> Result<()> {
        let tiles = (p.tiles as usize).div_ceil(INSTANCES[plan.instance].tiles);
        let shape = LaunchShape::new((columns, tiles, 1), plan.teams * TEAM).shared(plan.shared);
        // SAFETY: by the caller.
        unsafe { self.launch(GEMM.of_kind(plan.instance, w.kind()), shape, &p) }
    }

    /// Launches a kernel of `cuda/gemm_wgmma.cu` over `columns` blocks of rows of x.
    ///
    /// # Safety
    /// `p` holds checked operands.
    unsafe fn gemm_wgmma(
        &self,
        w: &DeviceLinear,
        instance: usize,
        p: GemmArgs,
        columns: usize,
    ) -> Result<()> {
        let (gpu, kind) = (self.gpu(), w.kind());
        let of = &WGMMA_INSTANCES[instance];
        let (m, spans) = (p.m as usize, p.spans as usize);
        let block = of.groups * 4;
        let x = gpu.tensor_map(Matrix {
            address: p.x,
            element: 2,
            rows: m,
            width: spans * SPAN,
            tile: (of.rows, 64),
            swizzled: true,
        })?;
        // A box has at most 256 elements; with 16-bit weights, a step takes 2,048 bytes of a tile.
        let element = if kind.bits() == 16 { 8 } else { 4 };
        let step = TILE * 64 * kind.bits() / 8 / element;
        let codes = gpu.tensor_map(Matrix {
            address: p.codes,
            element,
            rows: w.tiles(),
            width: spans * 4 * step,
            tile: (block, step),
            swizzled: false,
        })?;
        let words = p.meta_bytes as usize / 4;
        let meta = match words {
            0 => TensorMap::NONE,
            _ => gpu.tensor_map(Matrix {
                address: p.meta,
                element: 4,
                rows: w.tiles(),
                width: spans * words,
                tile: (block, words),
                swizzled: false,
            })?,
        };
        let pad = [0; 10];
        let args = WgmmaArgs {
            x,
            codes,
            meta,
            p,
            pad,
        };
        let parts = p.parts as usize;
        let tiles = p.tiles as usize;
        let grid = (parts * columns, tiles.div_ceil(block), 1);
        let shape = LaunchShape::new(grid, of.groups * 128 + 32)
            .shared(of.shared(kind))
            .clusters_of(parts);
        // SAFETY: by the caller; the boxes are those of the kernel.
        unsafe { self.launch(GEMM_WGMMA.of_kind(instance, kind), shape, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::{GemmPlan, INSTANCES, WgmmaInstance};
    use crate::cuda::PackedKind;
    use nq_formats::{Bits, Zeros};

    #[test]
    fn blocks_fit_shared_memory() {
        let affine = |bits| PackedKind::Affine {
            bits,
            zeros: Zeros::Integer,
            groups: 8,
            two_level: false,
        };
        let kinds = [affine(Bits::B4), affine(Bits::B8), PackedKind::Fp16];
        // Compute capability 8.6, 8.9 and 12.0; 8.0; 9.0.
        for room in [99 << 10, 163 << 10, 227 << 10] {
            let all = kinds.iter().flat_map(|&k| (1..300).map(move |m| (k, m)));
            for (kind, m) in all {
                let columns = |rows: usize| usize::div_ceil(m, rows);
                let instances = GemmPlan::instances(m);
                let plan =
                    GemmPlan::choose(instances, (100, room), columns, (64, 16, kind)).unwrap();
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
        let kind = PackedKind::Affine {
            bits: Bits::B4,
            zeros: Zeros::Integer,
            groups: 2,
            two_level: false,
        };
        let chosen = |m: usize, rows: usize, inputs: usize| {
            let shape = (rows.div_ceil(16), inputs.div_ceil(256), kind);
            let columns = |of| m.div_ceil(of);
            let plan =
                GemmPlan::choose(GemmPlan::instances(m), (132, 163 << 10), columns, shape).unwrap();
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
            let shape = (m, rows.div_ceil(16), inputs.div_ceil(256));
            let (i, parts) = WgmmaInstance::choose(132, shape);
            let i = &super::WGMMA_INSTANCES[i];
            (i.groups * 64, i.rows, parts)
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
