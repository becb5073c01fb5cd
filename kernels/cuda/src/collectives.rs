//! Collective operations of the ranks of a model, GPUs that each have a part of every layer or some of the layers, as
//! `cuda/collectives.cu` computes them.

use super::driver::{Address, Buffer, Common, Gpu, LaunchShape, Mapped, Operands, Stream};
use super::kernel::kernels;
use super::partial_sums::PartialSums;
use crate::cuda::collectives::{
    self, AllGatherArgs, AllReduceArgs, BLOCKS_EACH, RankArgs, RankTurn, THREADS,
};
use nq_kernels::{Error, Result};
use nq_model::Dims;
use std::ops::Range;

kernels! {
    ALL_REDUCE: AllReduceArgs = "all_reduce" in "collectives.cu",
        test "kernels/cuda/tests/cuda/ranks.rs::sums_over_ranks", bench "ranks";
    ALL_GATHER: AllGatherArgs = "all_gather" in "collectives.cu",
        test "kernels/cuda/tests/cuda/ranks.rs::columns_of_ranks", bench "ranks";
}

/// Most ranks of a model: `MOST_RANKS` of `cuda/collectives.cu`.
pub const MOST_RANKS: usize = collectives::MOST_RANKS;
/// Values of a vector.
const VECTOR: usize = 4;
/// Most blocks of a rank that shares its GPU with others, whose kernels need room beside it.
const BLOCKS_BESIDE: usize = 8;
/// Vectors of a row that a block takes at a time, of which [`Stream::all_gather`] finds the greatest value.
const SEGMENT: usize = 2 * THREADS;

/// Which part of a model a GPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Its number.
    pub rank: usize,
    /// The number of parts, at most [`MOST_RANKS`].
    pub ranks: usize,
    /// True if the ranks write to each other through memory of the host, because a GPU does not reach the memory of
    /// another.
    pub through_host: bool,
    /// True if other ranks run on the same GPU, one of which stands in for several.
    pub beside: bool,
}

/// Where the other ranks write their values for a rank. Cloning shares it.
#[derive(Clone)]
pub struct Inbox {
    rings: Common<f32>, // [ranks, ring]
    place: Rank,
    most: usize,
}

impl Inbox {
    /// Allocates the inbox of `rank` for calls in which a rank sends up to `most` values.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::Shape`] for a rank that does not exist.
    pub fn new(gpu: &Gpu, place: Rank, most: usize) -> Result<Self> {
        if place.ranks > MOST_RANKS || place.rank >= place.ranks {
            return Err(Error::Shape {
                op: "collectives",
                what: "rank",
                expected: format!("one of at most {MOST_RANKS}"),
                found: format!("{} of {}", place.rank, place.ranks),
            });
        }
        let most = most.max(1).next_multiple_of(VECTOR);
        let values = place.ranks * ring(most);
        Ok(Inbox {
            rings: Common::new(gpu, "values of other GPUs", values, place.through_host)?,
            place,
            most,
        })
    }
}

/// Values of the ring of a rank that sends up to `most` in a call: room for two.
fn ring(most: usize) -> usize {
    2 * most
}

/// What a rank needs for collective operations: its inbox, and those of the others.
pub struct Collectives {
    place: Rank,
    most: usize,
    inboxes: Vec<Inbox>,
    turn: Buffer<u32>, // `RankTurn`
    lost: Mapped<u32>,
}

/// Words of `RankTurn` of `cuda/collectives.cu`.
const TURN: usize = size_of::<RankTurn>() / 4;

impl Collectives {
    /// Those of the rank that `inboxes[rank]` belongs to.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::Shape`] if these are not the inboxes of all ranks in order, of one size.
    pub fn new(gpu: &Gpu, rank: usize, inboxes: Vec<Inbox>) -> Result<Self> {
        let own = inboxes.get(rank).map(|own| (own.place, own.most));
        let fits = |(r, inbox): (usize, &Inbox)| {
            let place = Rank {
                rank: r,
                ..inbox.place
            };
            own.is_some_and(|(own, most)| {
                let alike = (own.ranks, own.through_host) == (place.ranks, place.through_host);
                alike && inbox.place == place && inbox.most == most
            })
        };
        match own {
            Some((place, most))
                if inboxes.len() == place.ranks && inboxes.iter().enumerate().all(fits) =>
            {
                Ok(Collectives {
                    place,
                    most,
                    inboxes,
                    turn: gpu.zeros("activations", TURN)?,
                    lost: gpu.mapped("ranks that are lost", 1, 0)?,
                })
            }
            _ => Err(Error::Shape {
                op: "collectives",
                what: "inboxes",
                expected: "one of each rank, in order".into(),
                found: format!("{} for rank {rank}", inboxes.len()),
            }),
        }
    }

    /// True once it has waited in vain for another rank: results since then are wrong.
    pub fn is_lost(&self) -> bool {
        !self.lost.is_empty() && self.lost.load(0) != 0
    }

    fn args(&self, o: &Operands<'_>) -> Result<RankArgs> {
        let mut args = RankArgs {
            inbox: Address::NULL,
            out: [Address::NULL; MOST_RANKS],
            turn: o.of("turn", &self.turn, &[TURN])?,
            lost: o.mapped("lost", &self.lost, &[1])?,
            ring: (ring(self.most) / VECTOR) as i32,
            rank: self.place.rank as i32,
            ranks: self.place.ranks as i32,
            padding: [0; 1],
        };
        for (out, inbox) in args.out.iter_mut().zip(&self.inboxes) {
            let shape = [self.place.ranks, ring(self.most)];
            *out = o.common("values of ranks", &inbox.rings, 0, &shape)?;
        }
        args.inbox = args.out[self.place.rank];
        Ok(args)
    }

    /// Blocks of a call for `wanted`: all are on the device at once, as they wait for blocks of other ranks.
    fn blocks(&self, gpu: &Gpu, wanted: usize) -> usize {
        let most = match self.place.beside {
            true => BLOCKS_BESIDE,
            false => BLOCKS_EACH * gpu.info().multiprocessors,
        };
        wanted.clamp(1, most)
    }
}

/// A rank's share of a sum.
pub enum Share<'a> {
    /// Rows `[m, width]`.
    Rows(&'a Buffer<f32>),
    /// Rows `[m, width]`, which are set to zero.
    Cleared(&'a mut Buffer<f32>),
    /// The parts that a product of `m` rows left.
    Parts(&'a PartialSums),
}

/// What ranks have of rows.
pub struct Gathered<'a> {
    /// This rank's columns, `[m, columns]`; `None` if `to` has them.
    pub from: Option<&'a Buffer<f32>>,
    /// All columns, `[m, width]`; those of no rank stay as they are.
    pub to: &'a mut Buffer<f32>,
    /// The columns of each rank, disjoint, from a multiple of 4 to one.
    pub columns: &'a [Range<usize>],
    /// Where to write [`gathered_best_len`] greatest values a row, with their columns as bits.
    pub best: Option<&'a mut Buffer<[f32; 2]>>,
}

/// Values a row that [`Stream::all_gather`] finds to be the greatest of their part of a row of `width`.
pub fn gathered_best_len(width: usize) -> usize {
    width.div_ceil(VECTOR * SEGMENT)
}

impl Stream {
    /// Adds to the rows `x` `[m, width]` the shares of all ranks, in their order; the last bit of a share's values is
    /// dropped. Each rank must make the same calls.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn all_reduce(
        &self,
        x: &mut Buffer<f32>,
        share: Share<'_>,
        to: &Collectives,
        dims: Dims,
    ) -> Result<()> {
        let (m, width) = dims.pair();
        let o = self.operands("all_reduce");
        let n = m * width;
        o.at_most("values", to.most, n)?;
        o.multiple("width", VECTOR, width)?;
        let clear = matches!(share, Share::Cleared(_));
        let (parts, count) = match share {
            Share::Rows(buffer) => (o.of("share", buffer, &[m, width])?, 1),
            Share::Cleared(buffer) => (o.of("share", buffer, &[m, width])?, 1),
            Share::Parts(sums) => {
                let count = sums.parts();
                (o.of("share", sums.values(), &[count, m, width])?, count)
            }
        };
        let args = AllReduceArgs {
            ranks: to.args(&o)?,
            x: o.of("x", x, &[m, width])?,
            parts,
            n: n as i32,
            count: count as i32,
            clear: i32::from(clear),
            padding: [0; 1],
        };
        let blocks = to.blocks(self.gpu(), n.div_ceil(VECTOR * THREADS));
        let shape = LaunchShape::new([blocks, 1, 1], THREADS).overlapping();
        // SAFETY: the operands were checked. Blocks of a launch do not wait for each other.
        unsafe { self.launch(&ALL_REDUCE, shape, &args) }
    }

    /// Gives all ranks the columns of each of rows `[m, width]`; the last bit of values is dropped. Each rank must make
    /// the same calls.
    pub fn all_gather(&self, rows: Gathered<'_>, to: &Collectives, dims: Dims) -> Result<()> {
        let (m, width) = dims.pair();
        let o = self.operands("all_gather");
        let Gathered {
            from,
            to: all,
            columns,
            best,
        } = rows;
        let (own, segments) = (to.place.rank, gathered_best_len(width));
        if columns.len() != to.place.ranks {
            return o.refuse("ranks", to.place.ranks, columns.len());
        }
        o.multiple("width", VECTOR, width)?;
        let (mut first, mut count) = ([0; MOST_RANKS], [0; MOST_RANKS]);
        for (r, columns) in columns.iter().enumerate() {
            o.at_most("columns", width, columns.end)?;
            o.at_most("values", to.most, m * columns.len())?;
            if [columns.start, columns.end].iter().any(|c| c % VECTOR > 0) {
                let expected = format!("from a multiple of {VECTOR} to one");
                return o.refuse("columns", expected, format!("{columns:?}"));
            }
            (first[r], count[r]) = (columns.start as i32, columns.len() as i32);
        }
        let all = o.of("rows", all, &[m, width])?;
        let args = AllGatherArgs {
            ranks: to.args(&o)?,
            from: match from {
                Some(from) => o.of("columns", from, &[m, columns[own].len()])?,
                None if [0, width].contains(&columns[own].len()) => all,
                None => return o.refuse("columns", "all or none", columns[own].len()),
            },
            to: all,
            best: match best {
                Some(best) => o.of("best", best, &[m, segments])?,
                None => Address::NULL,
            },
            rows: m as i32,
            width: width as i32,
            segments: segments as i32,
            first,
            columns: count,
            padding: [0; 1],
        };
        let blocks = to.blocks(self.gpu(), m * segments);
        let shape = LaunchShape::new([blocks, 1, 1], THREADS).overlapping();
        // SAFETY: the operands were checked. Blocks of a launch do not wait for each other.
        unsafe { self.launch(&ALL_GATHER, shape, &args) }
    }
}
