//! Sums over the ranks of a model, GPUs that each have a part of every layer, as `cuda/all_reduce.cu` computes them.

use super::driver::{Address, Buffer, Common, Gpu, LaunchShape, Mapped, Stream};
use super::kernel::kernels;
use super::partial_sums::PartialSums;
use crate::error::{Error, Result};

kernels! {
    ALL_REDUCE_WORDS: AllReduceArgs = "all_reduce_words" in "all_reduce.cu",
        test "kernels/tests/cuda/ranks.rs::sums_over_ranks", bench "ranks";
    ALL_REDUCE_ROWS: AllReduceArgs = "all_reduce_rows" in "all_reduce.cu",
        test "kernels/tests/cuda/ranks.rs::sums_over_ranks", bench "ranks";
}

/// Most ranks of a model: `MOST_RANKS` of `cuda/all_reduce.cu`.
pub const MOST_RANKS: usize = 8;
/// `THREADS` and `CHUNK` of `cuda/all_reduce.cu`.
const THREADS: usize = 256;
const CHUNK: usize = 4096;
/// Rows up to which values are sent as words, in which each says itself that it has come: twice the bytes, and a way
/// less to wait for.
const WORD_ROWS: usize = 64;
/// Most blocks on a multiprocessor.
const BLOCKS_EACH: usize = 4;
/// Most blocks of a rank that shares its GPU with others, whose kernels need room beside it.
const BLOCKS_BESIDE: usize = 8;

/// `AllReduceArgs` of `cuda/all_reduce.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct AllReduceArgs {
    x: Address,
    parts: Address,
    inbox: Address,
    flags: Address,
    out: [Address; MOST_RANKS],
    told: [Address; MOST_RANKS],
    turn: Address,
    lost: Address,
    n: i32,
    count: i32,
    most: i32,
    rank: i32,
    ranks: i32,
    clear: i32,
}

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
    words: Common<u64>,  // [2, ranks, word rows, width]
    values: Common<f32>, // [2, ranks, rows, width]
    flags: Common<u32>,  // [2, ranks, chunks of rows]
    of: Rank,
    sizes: (usize, usize),
}

impl Inbox {
    /// Allocates the inbox of `rank` for sums of up to `rows` rows of `width` values.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::Shape`] for a rank that does not exist.
    pub fn new(gpu: &Gpu, of: Rank, (rows, width): (usize, usize)) -> Result<Self> {
        if of.ranks > MOST_RANKS || of.rank >= of.ranks {
            return Err(Error::Shape {
                op: "all_reduce",
                what: "rank",
                expected: format!("one of at most {MOST_RANKS}"),
                found: format!("{} of {}", of.rank, of.ranks),
            });
        }
        let (what, places) = ("values of other GPUs", 2 * of.ranks);
        let common = of.through_host;
        Ok(Inbox {
            words: Common::new(gpu, what, places * WORD_ROWS.min(rows) * width, common)?,
            values: Common::new(gpu, what, places * rows * width, common)?,
            flags: Common::new(gpu, what, places * (rows * width).div_ceil(CHUNK), common)?,
            of,
            sizes: (rows, width),
        })
    }
}

/// What a rank needs for sums over all ranks: its inbox, and those of the others.
pub struct AllReduce {
    of: Rank,
    sizes: (usize, usize),
    inboxes: Vec<Inbox>,
    turn: Buffer<u32>, // `AllReduceTurn`
    lost: Mapped<u32>,
}

impl AllReduce {
    /// Sums of the rank that `inboxes[rank]` belongs to.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::Shape`] if these are not the inboxes of all ranks in order, of one size.
    pub fn new(gpu: &Gpu, rank: usize, inboxes: Vec<Inbox>) -> Result<Self> {
        let own = inboxes.get(rank).map(|own| (own.of, own.sizes));
        let fits = |(r, inbox): (usize, &Inbox)| {
            let of = Rank {
                rank: r,
                ..inbox.of
            };
            own.is_some_and(|(own, sizes)| {
                let alike = (own.ranks, own.through_host) == (of.ranks, of.through_host);
                alike && inbox.of == of && inbox.sizes == sizes
            })
        };
        match own {
            Some((of, sizes))
                if inboxes.len() == of.ranks && inboxes.iter().enumerate().all(fits) =>
            {
                Ok(AllReduce {
                    of,
                    sizes,
                    inboxes,
                    turn: gpu.zeros("activations", 3)?,
                    lost: gpu.mapped("ranks that are lost", 1, 0)?,
                })
            }
            _ => Err(Error::Shape {
                op: "all_reduce",
                what: "inboxes",
                expected: "one of each rank, in order".into(),
                found: format!("{} for rank {rank}", inboxes.len()),
            }),
        }
    }

    /// True once it has waited in vain for another rank: sums since then are wrong.
    pub fn is_lost(&self) -> bool {
        !self.lost.is_empty() && self.lost.load(0) != 0
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

impl Stream {
    /// Adds to the rows `x` `[m, width]` the shares of all ranks, in their order. Each rank must make the same calls.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand does not fit; errors of the driver.
    pub fn all_reduce(
        &self,
        x: &mut Buffer<f32>,
        share: Share<'_>,
        to: &AllReduce,
        m: usize,
    ) -> Result<()> {
        let o = self.operands("all_reduce");
        let ((rows, width), of) = (to.sizes, to.of);
        o.at_most("rows", rows, m)?;
        o.multiple("width", 4, width)?;
        let (n, half, clear) = (m * width, of.ranks, matches!(share, Share::Cleared(_)));
        let (parts, count) = match share {
            Share::Rows(buffer) => (o.of("share", buffer, &[m, width])?, 1),
            Share::Cleared(buffer) => (o.of("share", buffer, &[m, width])?, 1),
            Share::Parts(sums) => {
                let count = sums.parts();
                (o.of("share", sums.values(), &[count, m, width])?, count)
            }
        };
        let words = m <= WORD_ROWS;
        let most = width * if words { WORD_ROWS.min(rows) } else { rows };
        let mut args = AllReduceArgs {
            x: o.of("x", x, &[m, width])?,
            parts,
            inbox: Address::NULL,
            flags: Address::NULL,
            out: [Address::NULL; MOST_RANKS],
            told: [Address::NULL; MOST_RANKS],
            turn: o.of("turn", &to.turn, &[3])?,
            lost: o.mapped("lost", &to.lost, &[1])?,
            n: n as i32,
            count: count as i32,
            most: most as i32,
            rank: of.rank as i32,
            ranks: of.ranks as i32,
            clear: i32::from(clear),
        };
        for (r, inbox) in to.inboxes.iter().enumerate() {
            (args.out[r], args.told[r]) = if words {
                let words = o.common("words of ranks", &inbox.words, 0, &[2, half, most])?;
                (words, Address::NULL)
            } else {
                let chunks = most.div_ceil(CHUNK);
                let flags = o.common("flags of ranks", &inbox.flags, 0, &[2, half, chunks])?;
                let values = o.common("values of ranks", &inbox.values, 0, &[2, half, most])?;
                (values, flags)
            };
        }
        (args.inbox, args.flags) = (args.out[of.rank], args.told[of.rank]);
        let (kernel, blocks) = match words {
            true => (&ALL_REDUCE_WORDS, n.div_ceil(2 * THREADS)),
            false => (&ALL_REDUCE_ROWS, n.div_ceil(CHUNK)),
        };
        let most_blocks = match of.beside {
            true => BLOCKS_BESIDE,
            false => BLOCKS_EACH * self.gpu().info().multiprocessors,
        };
        let shape = LaunchShape::new((blocks.clamp(1, most_blocks), 1, 1), THREADS).overlapping();
        // SAFETY: the operands were checked. Blocks of a launch do not wait for each other.
        unsafe { self.launch(kernel, shape, &args) }
    }
}
