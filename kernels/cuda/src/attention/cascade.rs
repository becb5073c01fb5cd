//! Attention over pages with which several sequences of a step begin: the pages are read once for all
//! of them, as in cascade attention (FlashInfer, arXiv 2501.01005, section 3.1.2).

use super::heads::HEAD_DIM;
use super::pages::LayerPages;
use crate::cuda::attention_decode::AttentionArgs;
use crate::cuda::attention_shared::{MOST_GROUP, RowGroup, SHARED_WARPS as WARPS, SharedArgs};
use crate::driver::{Address, Buffer, Checked, Followed, Gpu, LaunchShape, Operands, Stream};
use crate::kernel::kernels;
use crate::rows::Places;
use nq_kernels::Result;
use nq_kernels::pages::{KvType, PAGE, SharedPrefix};

/// Most query heads in a group, for one key head.
const MOST_QUERIES: usize = 8 * WARPS;
/// Most parts that shared pages are split into.
const MOST_SHARED_SPLITS: usize = 16;

/// The groups of rows that share pages, on the device.
pub struct Cascade {
    groups: Checked<RowGroup>, // [rows / 2, and those that large groups are cut into]
    pages: Buffer<i32>,        // [rows]
}

/// Launch shape of attention over shared pages, which a recorded step keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CascadeShape {
    groups: usize,
    splits: usize,
}

impl CascadeShape {
    /// Number of parts of the shared pages.
    pub(super) fn splits(self) -> usize {
        self.splits
    }
}

/// The kernel skips rows that a step does not have.
impl Followed for RowGroup {
    type Bounds = Places;

    fn is_within(&self, places: &Places) -> bool {
        let up_to = |v: i32, most: usize| usize::try_from(v).is_ok_and(|v| v <= most);
        up_to(self.slot, places.slots.saturating_sub(1))
            && up_to(self.pages, places.positions / PAGE)
            && up_to(self.count, MOST_GROUP)
            && self.rows.iter().all(|&row| row >= 0)
    }
}

impl Cascade {
    /// Allocates groups for steps of up to `rows` rows, which stand in `places`; none share pages yet.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](nq_kernels::Error::DeviceMemory)
    pub fn new(gpu: &Gpu, rows: usize, places: Places) -> Result<Self> {
        let what = "groups of rows";
        Ok(Cascade {
            groups: Checked::new(gpu, what, rows.max(1), RowGroup::default(), places)?,
            pages: gpu.zeros(what, rows)?,
        })
    }

    /// True if a block on `gpu` has enough shared memory for pages of `kv`.
    pub fn fits(gpu: &Gpu, kv: KvType) -> bool {
        Self::shared_memory(kv == KvType::Int8) <= gpu.info().shared_memory
    }

    /// `sizeof(GroupShared)` of `cuda/attention_shared.cu`: keys, values and scales of two pages, and
    /// queries in two parts.
    const fn shared_memory(int8: bool) -> usize {
        let (bytes, scales) = if int8 { (1, 4 * PAGE) } else { (2, 32) };
        2 * (2 * PAGE * HEAD_DIM * bytes + scales) + 2 * MOST_QUERIES * 2 * HEAD_DIM
    }

    /// Most parts of shared pages: as many as one block per multiprocessor can take.
    pub(super) fn most_splits(gpu: &Gpu, kv_heads: usize) -> usize {
        (gpu.info().multiprocessors / kv_heads.max(1)).clamp(1, MOST_SHARED_SPLITS)
    }

    /// Writes which rows share pages, in order with the stream's other work: each row is in at most one
    /// of `prefixes`. The model has `heads` query heads per key head and `kv_heads`
    /// key heads. Returns the launch shape for the following steps; `None` without prefixes.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) for a row, sequence or page that does not exist, and for
    /// more query heads than a block supports; errors of the driver.
    pub fn write(
        &mut self,
        stream: &Stream,
        prefixes: &[SharedPrefix],
        heads: usize,
        kv_heads: usize,
    ) -> Result<Option<CascadeShape>> {
        let o = stream.operands("attention_shared");
        o.at_most("query heads of a key head", 8, heads)?;
        let each = (MOST_QUERIES / heads.max(1)).min(MOST_GROUP);
        let rows = self.pages.len();
        let mut pages = vec![0i32; rows];
        let mut groups = Vec::new();
        for prefix in prefixes {
            for some in prefix.rows.chunks(each) {
                let mut group = RowGroup {
                    slot: prefix.slot as i32,
                    pages: prefix.pages as i32,
                    count: some.len() as i32,
                    rows: [0; MOST_GROUP],
                };
                for (to, &row) in group.rows.iter_mut().zip(some) {
                    o.at_least("rows", row + 1, rows)?;
                    (*to, pages[row]) = (row as i32, prefix.pages as i32);
                }
                groups.push(group);
            }
        }
        if groups.is_empty() {
            return Ok(None);
        }
        // Rounded up to sizes for which steps are recorded.
        let used = groups
            .len()
            .next_power_of_two()
            .min(self.groups.values().len());
        o.at_least("groups", groups.len(), used)?;
        groups.resize(used, RowGroup::default());
        stream.write_checked(&mut self.groups, &groups)?;
        stream.put(&mut self.pages, 0, &pages)?;
        let longest = prefixes.iter().map(|p| p.pages).max().unwrap_or(1);
        let most = Self::most_splits(stream.gpu(), kv_heads * used);
        Ok(Some(CascadeShape {
            groups: used,
            splits: longest.next_power_of_two().min(most),
        }))
    }

    /// The number of shared pages for each of `m` rows.
    pub(super) fn row_pages(&self, o: &Operands<'_>, m: usize) -> Result<Address> {
        o.of("pages in common", &self.pages, &[m])
    }
}

kernels! {
    ATTENTION_SHARED: SharedArgs = "attention_shared" in "attention_shared.cu",
        test "kernels/cuda/tests/cuda/cascade.rs::shared_pages", bench "attention_shared",
        instances &["attention_shared_fp16", "attention_shared_int8"];
}

impl Stream {
    /// The part of attention over shared pages. Its results go behind the first
    /// `splits` parts in the scratch memory attention `attention`, whose operands were checked.
    pub(super) fn attention_shared(
        &self,
        cascade: &Cascade,
        shape: CascadeShape,
        m: usize,
        splits: usize,
        attention: &AttentionArgs,
        cache: LayerPages<'_>,
    ) -> Result<()> {
        let o = self.operands("attention_shared");
        cascade.groups.bounds().check(&o, cache.places())?;
        let int8 = cache.is_int8();
        let args = SharedArgs {
            qkv: attention.qkv,
            vectors: attention.vectors,
            cos_sin: attention.cos_sin,
            cache: attention.cache,
            step: attention.step,
            groups: o.of("groups of rows", cascade.groups.values(), &[shape.groups])?,
            partial: attention.partial,
            tops: attention.tops,
            m: m as i32,
            heads: attention.heads,
            parts: attention.parts,
            first: splits as i32,
            eps: attention.eps,
            padding: [0; 1],
        };
        let grid = [cache.kv_heads(), shape.splits, shape.groups];
        let launch = LaunchShape::new(grid, 32 * WARPS)
            .shared(Cascade::shared_memory(int8))
            .overlapping();
        // SAFETY: the operands were checked, and that the groups' pages are in the cache; the kernel
        // skips rows past `m`.
        unsafe { self.launch(ATTENTION_SHARED.instance(usize::from(int8)), launch, &args) }
    }
}
