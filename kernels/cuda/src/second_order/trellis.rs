//! Rounding to trellis codes (`cuda/trellis_search.cu`): the search for the sequences of a tile, errors that are fed to
//! later columns, and scales.

use super::{BENCH, MOST_ROWS, THREADS};
use crate::cuda::trellis_search::{
    SEARCH_THREADS, STATES, TrellisDotsArgs, TrellisErrorsArgs, TrellisSearchArgs,
    TrellisTransformArgs,
};
use crate::driver::{Address, Buffer, Operands, Side};
use crate::grad::CudaOps;
use crate::kernel::{Instance, kernels};
use half::f16;
use nq_formats::TrellisScheme;
use nq_formats::trellis::{BLOCK, Code, LANES, SEQUENCE, STRIP, TILE};
use nq_kernels::Result;
use nq_kernels::grad::{Gemm, LayerOps};
use nq_kernels::second_order::{TrellisRounded, TrellisRows};
use nq_model::Dims;

/// Blocks that a multiprocessor runs at once, where shared memory allows it.
const RESIDENT: usize = 2;
/// Most multiprocessors that are used, which bounds the memory for costs.
const MOST_MULTIPROCESSORS: usize = 192;
/// Most shared memory of a block on any device.
const MOST_ROOM: usize = 227 << 10;
/// Shared memory that a multiprocessor keeps for each block, in bytes.
const RESERVED: usize = 1 << 10;

const TEST: &str = "quantize/tests/cuda/second_order.rs::the_gpu_rounds_to_trellises_as_the_host";

kernels! {
    SEARCH: TrellisSearchArgs = "trellis_search" in "trellis_search.cu", test TEST, bench BENCH,
        instances &["trellis_search_sum_1", "trellis_search_sum_2", "trellis_search_sum_4",
            "trellis_search_octagon_2", "trellis_search_octagon_4"];
    ERRORS: TrellisErrorsArgs = "trellis_errors" in "trellis_search.cu", test TEST, bench BENCH;
    TRANSFORM: TrellisTransformArgs = "trellis_transform" in "trellis_search.cu", test TEST, bench BENCH;
    DOTS: TrellisDotsArgs = "trellis_dots" in "trellis_search.cu", test TEST, bench BENCH;
}

/// Sequences that a block searches side by side, with the index of the instance that does and the time that it takes
/// while as many blocks run as fit: a tile of 4,096 rows of 8 (octagon) or 6 bits a step on an H200, in 100 us.
const SUMS: &[(usize, usize, usize)] = &[(4, 2, 33), (2, 1, 29), (1, 0, 27)];
const OCTAGONS: &[(usize, usize, usize)] = &[(4, 4, 24), (2, 3, 18)];

/// How a weight's sequences are spread over blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Spread {
    instance: usize,
    side: usize,
    blocks: usize,
}

/// Shared memory of a block that searches `side` sequences.
const fn shared(scheme: TrellisScheme, side: usize) -> usize {
    side * (8 * tails(scheme) + 6 * SEQUENCE + 16)
}

const fn tails(scheme: TrellisScheme) -> usize {
    STATES >> scheme.step_bits()
}

/// The ways to search the sequences of `rows` rows that fit in `room` bytes of shared memory for a block, each with a
/// measure of its time.
fn ways(
    scheme: TrellisScheme,
    rows: usize,
    multiprocessors: usize,
    room: usize,
) -> impl Iterator<Item = (usize, Spread)> {
    let ways = match scheme.code() {
        Code::Sum => SUMS,
        Code::Octagon => OCTAGONS,
    };
    let multiprocessors = multiprocessors.clamp(1, MOST_MULTIPROCESSORS);
    let fit = move |&&(side, ..): &&(usize, usize, usize)| shared(scheme, side) <= room;
    ways.iter().filter(fit).map(move |&(side, instance, time)| {
        let groups = rows.div_ceil(STRIP) * LANES / side;
        let fitting = (room + RESERVED) / (shared(scheme, side) + RESERVED);
        let at_once = fitting.min(RESIDENT) * multiprocessors;
        let spread = Spread {
            instance,
            side,
            blocks: groups.min(at_once),
        };
        (groups.div_ceil(at_once) * time, spread)
    })
}

/// The quickest of the [`ways`]; `None` if there is none.
fn spread(
    scheme: TrellisScheme,
    rows: usize,
    multiprocessors: usize,
    room: usize,
) -> Option<Spread> {
    let best = ways(scheme, rows, multiprocessors, room).min_by_key(|(time, _)| *time);
    best.map(|(_, spread)| spread)
}

impl Spread {
    /// Costs that are kept: before each step of a sequence, for each tail.
    fn history(&self, scheme: TrellisScheme) -> usize {
        self.blocks * self.side * scheme.steps() * tails(scheme)
    }
}

/// A weight that is being rounded.
struct TrellisRounding<'a> {
    ops: &'a CudaOps,
    scheme: TrellisScheme,
    window: usize,
    rows: usize,
    n: usize,
    spread: Spread,
    table: Buffer<f16>,
    history: Buffer<f16>,
    scales: Buffer<f32>,
    /// Targets of columns to come, and the values of those that are rounded, `[rows, n]`.
    columns: Buffer<f32>,
    words: Buffer<u32>,
    errors: Buffer<f32>, // [rows, TILE]
}

impl CudaOps {
    /// Most bytes of device memory that [`CudaOps::round_to_trellis`] takes for a weight `[rows, n]`.
    pub fn trellis_bytes(scheme: TrellisScheme, Dims { rows, cols: n }: Dims) -> usize {
        let ways = ways(scheme, rows, MOST_MULTIPROCESSORS, MOST_ROOM);
        let history = ways.map(|(_, s)| s.history(scheme));
        let search = 2 * (STATES * scheme.code().width() + history.max().unwrap_or(0));
        // The values chosen, and then, beside the weight, their products with the moments.
        let words = rows.div_ceil(STRIP) * scheme.strip_bytes(n);
        12 * rows * n + words + search + (4 * TILE + 20) * rows
    }

    /// The moments `h` `[n, n]`, with another diagonal, of inputs that are multiplied by `signs` and transformed.
    ///
    /// # Errors
    /// Too little memory; operands that are too short; widths that are not whole blocks.
    pub fn transform_moments(
        &self,
        h: &Buffer<f32>,
        signs: &[f32],
        diagonal: &[f32],
    ) -> Result<Buffer<f32>> {
        let o = self.operands("trellis_transform");
        let n = signs.len();
        o.multiple("inputs", BLOCK, n)?;
        o.at_most("inputs", MOST_ROWS, n)?;
        let signs = self.gpu().upload("signs of inputs", signs)?;
        let diagonal = self.gpu().upload("a diagonal", diagonal)?;
        let to = self.gpu().zeros("second moments", n * n)?;
        let args = TrellisTransformArgs {
            from: o.of("moments", h, &[n, n])?,
            to: o.of("transformed moments", &to, &[n, n])?,
            signs: o.of("signs", &signs, &[n])?,
            diagonal: o.of("diagonal", &diagonal, &[n])?,
            n: n as i32,
            columns: 0,
        };
        let rest = TrellisTransformArgs {
            from: args.to,
            diagonal: Address::NULL,
            columns: 1,
            ..args
        };
        let grid = [n / BLOCK, n, 1];
        // SAFETY: the operands were checked, and lines are whole blocks.
        unsafe {
            self.launch_shared(&TRANSFORM, grid, BLOCK, 0, &args)?;
            self.launch_shared(&TRANSFORM, grid, BLOCK, 0, &rest)?;
        }
        self.synchronize()?;
        Ok(to)
    }

    /// Rounds a weight of transformed inputs, whose moments are `h` and their factor `u` (from
    /// [`CudaOps::inverse_factor`] in the order of inputs), both `[n, n]`.
    ///
    /// # Errors
    /// Too little memory, also of a block; operands that are too short; a weight whose rows are not whole blocks.
    pub fn round_to_trellis(
        &self,
        h: &Buffer<f32>,
        u: &Buffer<f32>,
        weight: &TrellisRows<'_>,
    ) -> Result<TrellisRounded> {
        let o = self.operands("trellis_search");
        let (scheme, rows) = (weight.scheme, weight.scales.len());
        let n = weight.weight.len() / rows.max(1);
        o.multiple("inputs", BLOCK, n)?;
        o.at_most("window", scheme.steps() / 2, weight.window)?;
        let info = self.gpu().info();
        let (multiprocessors, room) = (info.multiprocessors, info.shared_memory);
        let Some(spread) = spread(scheme, rows, multiprocessors, room) else {
            let expected = format!("{} bytes for {scheme}", shared(scheme, 1));
            return o.refuse("shared memory of a block", expected, room);
        };
        let values = (0..=u16::MAX).flat_map(|state| {
            let values = scheme.code().values(state);
            values.into_iter().take(scheme.code().width())
        });
        let values: Vec<f16> = values.map(f16::from_f32).collect();
        let gpu = self.gpu();
        let words = rows.div_ceil(STRIP) * scheme.strip_bytes(n) / 4;
        let work = TrellisRounding {
            ops: self,
            scheme,
            window: weight.window,
            rows,
            n,
            spread,
            table: gpu.upload("values of states", &values)?,
            history: gpu.zeros("costs of paths", spread.history(scheme))?,
            scales: gpu.upload("scales", weight.scales)?,
            columns: gpu.upload("a weight to be rounded", weight.weight)?,
            words: gpu.zeros("codes", words)?,
            errors: gpu.zeros("errors of rounding", rows * TILE)?,
        };
        for start in (0..n).step_by(TILE) {
            work.search(&o, start)?;
            work.feed(&o, u, start)?;
        }
        self.synchronize()?;
        let mut found = vec![0; words];
        work.words.read(0, &mut found)?;
        Ok(TrellisRounded {
            words: found,
            scales: work.best_scales(&o, h, weight.weight)?,
        })
    }
}

impl TrellisRounding<'_> {
    /// Rounds the tile from column `start` on, and leaves its values and errors.
    fn search(&self, o: &Operands<'_>, start: usize) -> Result<()> {
        let (scheme, spread) = (self.scheme, self.spread);
        let kernel: Instance<TrellisSearchArgs> = SEARCH.instance(spread.instance);
        let width = scheme.code().width();
        let args = TrellisSearchArgs {
            values: o.of("values", &self.table, &[STATES, width])?,
            scales: o.of("scales", &self.scales, &[self.rows])?,
            columns: o.of("weights", &self.columns, &[self.rows, self.n])?,
            words: o.of("codes", &self.words, &[self.words.len()])?,
            errors: o.of("errors", &self.errors, &[self.rows, TILE])?,
            history: o.of("costs", &self.history, &[spread.history(scheme)])?,
            rows: self.rows as i32,
            n: self.n as i32,
            start: start as i32,
            step_bits: scheme.step_bits() as i32,
            window: self.window as i32,
            groups: (self.rows.div_ceil(STRIP) * LANES / spread.side) as i32,
        };
        let (grid, shared) = ([spread.blocks, 1, 1], shared(scheme, spread.side));
        // SAFETY: the operands were checked; words are those of whole strips, and each block has its costs.
        unsafe { (self.ops).launch_shared(kernel, grid, SEARCH_THREADS, shared, &args) }
    }

    /// Subtracts from later columns what the errors of the tile from `start` on contribute to them.
    fn feed(&self, o: &Operands<'_>, u: &Buffer<f32>, start: usize) -> Result<()> {
        let (n, end) = (self.n, start + TILE);
        if end == n {
            return Ok(());
        }
        let args = TrellisErrorsArgs {
            errors: o.of("errors", &self.errors, &[self.rows, TILE])?,
            u: o.of("factor", u, &[n, n])?,
            rows: self.rows as i32,
            n: n as i32,
            start: start as i32,
            pad: 0,
        };
        let grid = [self.rows.div_ceil(THREADS / 32), 1, 1];
        // SAFETY: the operands were checked.
        unsafe { (self.ops).launch_shared(&ERRORS, grid, THREADS, 0, &args)? };
        let product = Gemm {
            m: self.rows,
            n: n - end,
            k: TILE,
            batch: 1,
            ta: false,
            tb: false,
            alpha: -1.0,
            accumulate: true,
        };
        let errors = Side {
            at: args.errors,
            ld: TILE,
        };
        let of_tile = args.u.plus(4 * (start * n + end));
        let columns = o.of("weights", &self.columns, &[self.rows, n])?;
        let side = |at| Side { at, ld: n };
        // SAFETY: the operands were checked: the tile's rows of U and all rows of the weight, in columns from `end` on.
        unsafe {
            let later = columns.plus(4 * end);
            self.ops
                .product(product, errors, side(of_tile), side(later))
        }
    }

    /// The scale of each row with which its values are nearest to `weight`, weighted by the moments `h`.
    fn best_scales(&self, o: &Operands<'_>, h: &Buffer<f32>, weight: &[f32]) -> Result<Vec<f64>> {
        let (ops, rows, n) = (self.ops, self.rows, self.n);
        let mut weighted = ops.gpu().zeros("weighted values", rows * n)?;
        // H is symmetric: used as the weight of a Linear, it is its own transpose.
        ops.gemm(Gemm::linear(rows, n, n), &self.columns, h, &mut weighted)?;
        let weight = ops.gpu().upload("a weight", weight)?;
        let dots: Buffer<f64> = ops.gpu().zeros("sums of rows", 2 * rows)?;
        let args = TrellisDotsArgs {
            weighted: o.of("weighted values", &weighted, &[rows, n])?,
            w: o.of("weights", &weight, &[rows, n])?,
            values: o.of("values", &self.columns, &[rows, n])?,
            dots: o.of("sums", &dots, &[rows, 2])?,
            n: n as i32,
            pad: 0,
        };
        // SAFETY: the operands were checked.
        unsafe { ops.launch_shared(&DOTS, [rows, 1, 1], THREADS, 0, &args)? };
        ops.synchronize()?;
        let mut sums = vec![0.0; 2 * rows];
        dots.read(0, &mut sums)?;
        Ok(sums.chunks_exact(2).map(|s| s[0] / s[1]).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few sequences are spread over more blocks, many costs leave room for fewer.
    #[test]
    fn sequences_fill_multiprocessors() {
        let octagon = |bits| TrellisScheme::new(Code::Octagon, bits).unwrap();
        let sum = |bits| TrellisScheme::new(Code::Sum, bits).unwrap();
        let h100 = (132, 227 << 10);
        for (scheme, rows, device, side) in [
            (octagon(8), 4096, h100, 4),
            (octagon(8), 1024, h100, 2),
            (octagon(4), 4096, h100, 2),
            (octagon(4), 4096, (128, 99 << 10), 2),
            (sum(6), 4096, h100, 4),
            (sum(2), 4096, h100, 1),
        ] {
            let (multiprocessors, room) = device;
            let found = spread(scheme, rows, multiprocessors, room).unwrap();
            assert_eq!(found.side, side, "{scheme} {rows} {device:?}");
            let groups = rows / STRIP * LANES / side;
            assert!(shared(scheme, side) <= room, "{scheme}");
            let fitting = device.1 / shared(scheme, side);
            assert_eq!(
                found.blocks,
                groups.min(fitting.min(2) * device.0),
                "{scheme} {rows}"
            );
            assert!(SEARCH.row.instances[found.instance].ends_with(&side.to_string()));
        }
        assert_eq!(spread(sum(2), 4096, 128, 99 << 10), None);
    }
}
