//! Keys and values on the device, in pages.

use super::heads::{HEAD_DIM, WIDE_HEAD_DIM};
use crate::cuda::indexer::{BlockKeys, INDEX_DIM};
use crate::cuda::pages::{self, CopyPageArgs, MOST_ENTRIES, SetPagesArgs};
use crate::cuda::rows::{self, Cache};
use crate::driver::{Address, Buffer, Gpu, Operands, Pinned, Stream};
use crate::kernel::kernels;
use crate::rows::{Places, shape};
use nq_kernels::pages::{KvType, PAGE};
use nq_kernels::{Error, Result};
use std::ops::Range;

const _: () = assert!(PAGE == rows::PAGE);

/// Keys and values of all layers and sequences, in pages of [`PAGE`] positions.
///
/// A sequence is a row of the page tables: its position `p` is row `p % PAGE` of page
/// `tables[slot][p / PAGE]`. There is one page more than requested, and one slot that begins with it:
/// they belong to no sequence, and idle rows of a step are computed there ([`DevicePages::idle_slot`]).
pub struct DevicePages {
    keys: Buffer<u8>,   // [layers, pages + 1, kv_heads, PAGE, head_dim]
    values: Buffer<u8>, // [layers, pages + 1, kv_heads, head_dim, PAGE]
    scales: Option<(Buffer<u16>, Buffer<u16>)>, // [layers, pages + 1, kv_heads, PAGE]
    /// Keys of an indexer's blocks, and the positions of one.
    blocks: Option<(Buffer<f32>, usize)>, // [layers, pages + 1, PAGE / block, INDEX_DIM]
    tables: Buffer<u32>, // [slots + 1, table_len]
    shape: PagesShape,
    table_len: usize,
}

/// Sizes of [`DevicePages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagesShape {
    /// Type that keys and values are rounded to.
    pub kv: KvType,
    /// Number of layers.
    pub layers: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Their width: [`HEAD_DIM`] or [`WIDE_HEAD_DIM`].
    pub head_dim: usize,
    /// Number of pages in each layer.
    pub pages: usize,
    /// Most sequences.
    pub slots: usize,
    /// Most positions of a sequence.
    pub ctx: usize,
}

impl PagesShape {
    /// Rows of keys (and of values) in one page.
    fn page_rows(&self) -> usize {
        self.kv_heads.saturating_mul(PAGE)
    }

    fn rows(&self) -> usize {
        // Sizes that no memory has are refused by whoever allocates them, not wrapped to small ones.
        let pages = self.layers.saturating_mul(self.pages.saturating_add(1));
        pages.saturating_mul(self.page_rows())
    }
}

/// An entry for [`Stream::set_pages`]: `page` holds `slot`'s positions from `PAGE * index` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageEntry {
    /// The sequence.
    pub slot: usize,
    /// Index in its page table.
    pub index: usize,
    /// The page.
    pub page: u32,
}

/// Page-locked host memory for one page of all layers, which [`Stream::read_page`] and
/// [`Stream::write_page`] copy through.
pub struct PageStaging {
    codes: Pinned<u8>,           // [layers, keys and values, page]
    scales: Option<Pinned<u16>>, // [layers, of keys and of values, page rows]
    blocks: Option<Pinned<f32>>, // [layers, keys of blocks of a page]
}

/// One layer of [`DevicePages`].
#[derive(Clone, Copy)]
pub struct LayerPages<'a> {
    pages: &'a DevicePages,
    layer: usize,
}

impl DevicePages {
    /// Allocates zeroed pages; all table entries name the page that belongs to no sequence.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::NoKernel`] for f32 and for heads of another width, which the device does
    /// not support.
    pub fn new(gpu: &Gpu, shape: PagesShape) -> Result<Self> {
        let what = "the KV cache";
        let serves = matches!(shape.head_dim, HEAD_DIM | WIDE_HEAD_DIM);
        if shape.kv == KvType::F32 || !serves {
            return Err(Error::NoKernel {
                op: "attention",
                scheme: format!("heads of {} in {}", shape.head_dim, shape.kv),
                activations: "f32".into(),
                device: gpu.info().to_string(),
            });
        }
        let width = shape.head_dim * if shape.kv == KvType::Int8 { 1 } else { 2 };
        let codes = shape.rows().saturating_mul(width);
        let scales = || gpu.zeros(what, shape.rows());
        let scales = match shape.kv {
            KvType::Int8 => Some((scales()?, scales()?)),
            _ => None,
        };
        let table_len = shape.ctx.div_ceil(PAGE);
        let entries = shape.slots.saturating_add(1).saturating_mul(table_len);
        // More pages than that have no numbers, but no memory has them either.
        let nobody = u32::try_from(shape.pages).unwrap_or(u32::MAX);
        Ok(DevicePages {
            keys: gpu.zeros(what, codes)?,
            values: gpu.zeros(what, codes)?,
            scales,
            blocks: None,
            tables: gpu.filled(what, entries, nobody)?,
            shape,
            table_len,
        })
    }

    /// As it is, with a key for each `block` positions of a page, for an indexer.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; [`Error::NoKernel`] for keys and values that attention to chosen positions does not serve,
    /// or blocks that are not whole in pages.
    pub fn with_block_keys(self, gpu: &Gpu, block: usize) -> Result<Self> {
        let PagesShape { kv, head_dim, .. } = self.shape;
        let whole = block > 0 && block.is_multiple_of(4) && PAGE.is_multiple_of(block);
        if kv != KvType::F16 || head_dim != WIDE_HEAD_DIM || !whole {
            return Err(Error::NoKernel {
                op: "attention to positions that an indexer chooses",
                scheme: format!("heads of {head_dim} in {kv}, blocks of {block}"),
                activations: "f32".into(),
                device: gpu.info().to_string(),
            });
        }
        let pages = (self.shape.layers).saturating_mul(self.shape.pages.saturating_add(1));
        let keys = gpu.zeros(
            "the KV cache",
            pages.saturating_mul(PAGE / block * INDEX_DIM),
        )?;
        Ok(DevicePages {
            blocks: Some((keys, block)),
            ..self
        })
    }

    /// Values of the keys of blocks in one page of one layer.
    fn block_values(&self) -> usize {
        let of_block = |(_, block): &(_, usize)| PAGE / block * INDEX_DIM;
        self.blocks.as_ref().map_or(0, of_block)
    }

    /// Sizes.
    pub fn shape(&self) -> &PagesShape {
        &self.shape
    }

    /// Bytes of keys, values, scales and tables.
    pub fn bytes(&self) -> usize {
        let scales = self
            .scales
            .as_ref()
            .map_or(0, |(k, v)| k.bytes() + v.bytes());
        let blocks = self.blocks.as_ref().map_or(0, |(keys, _)| keys.bytes());
        self.keys.bytes() + self.values.bytes() + scales + blocks + self.tables.bytes()
    }

    /// Bytes of keys (and of values) in one page of one layer.
    fn part_bytes(&self) -> usize {
        self.keys.len() / self.shape.rows() * self.shape.page_rows()
    }

    /// Bytes of a page of all layers: keys, values and their scales, and keys of blocks.
    pub fn page_bytes(&self) -> usize {
        let scales = self
            .scales
            .as_ref()
            .map_or(0, |_| 2 * self.shape.page_rows());
        let blocks = size_of::<f32>() * self.block_values();
        self.shape.layers * (2 * (self.part_bytes() + scales) + blocks)
    }

    /// Memory for copying pages to or from the host.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the host has not so much page-locked memory.
    pub fn staging(&self, gpu: &Gpu) -> Result<PageStaging> {
        let (what, parts) = ("a page of keys and values", 2 * self.shape.layers);
        let scales = |_: &_| gpu.pinned(what, parts * self.shape.page_rows());
        Ok(PageStaging {
            codes: gpu.pinned(what, parts * self.part_bytes())?,
            scales: self.scales.as_ref().map(scales).transpose()?,
            blocks: match self.block_values() {
                0 => None,
                n => Some(gpu.pinned(what, self.shape.layers * n)?),
            },
        })
    }

    /// Where the keys (of a page of one layer: `n` values, as many as values) lie on the device, and
    /// where in staging, in front of the values, layer by layer.
    fn parts(&self, page: u32, n: usize) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let pages = self.shape.pages + 1;
        (0..self.shape.layers).map(move |layer| {
            let to = 2 * layer * n;
            ((layer * pages + page as usize) * n, to..to + n)
        })
    }

    /// Bytes of the keys and number of their scales in a page of one layer, of a page that exists, for
    /// which `staging` was made.
    fn check_page(
        &self,
        o: &Operands<'_>,
        page: u32,
        staging: &PageStaging,
    ) -> Result<(usize, usize)> {
        o.at_most("page", self.shape.pages - 1, page as usize)?;
        let (codes, rows) = (self.part_bytes(), self.shape.page_rows());
        let bytes = |scales: &Pinned<u16>| scales.len() * 2;
        let blocks = staging.blocks.as_ref().map_or(0, |b| 4 * b.len());
        let staged = staging.codes.len() + staging.scales.as_ref().map_or(0, bytes) + blocks;
        o.at_least("bytes of staging", self.page_bytes(), staged)?;
        o.at_most("bytes of staging", self.page_bytes(), staged)?;
        Ok((codes, rows))
    }

    /// A slot that belongs to no sequence, for rows at position 0 whose results are not used.
    pub fn idle_slot(&self) -> usize {
        self.shape.slots
    }

    /// The places where rows may stand, including the idle slot.
    pub fn places(&self) -> Places {
        Places {
            positions: self.table_len * PAGE,
            slots: self.shape.slots + 1,
            images: 0,
        }
    }

    /// One layer's keys and values.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> LayerPages<'_> {
        assert!(
            layer < self.shape.layers,
            "layer {layer} of {}",
            self.shape.layers
        );
        LayerPages { pages: self, layer }
    }
}

impl LayerPages<'_> {
    /// The places where rows may stand.
    pub(crate) fn places(&self) -> Places {
        self.pages.places()
    }

    /// Number of key and value heads.
    pub(crate) fn kv_heads(&self) -> usize {
        self.pages.shape.kv_heads
    }

    /// Width of a head.
    pub(crate) fn head_dim(&self) -> usize {
        self.pages.shape.head_dim
    }

    pub(crate) fn is_int8(&self) -> bool {
        self.pages.scales.is_some()
    }

    /// Index of the instance of a kernel for FP16, int8, and wide heads of both.
    pub(crate) fn instance(&self) -> usize {
        usize::from(self.is_int8())
            + if self.head_dim() == WIDE_HEAD_DIM {
                2
            } else {
                0
            }
    }

    /// The keys of an indexer's blocks, checked as operands of `o`.
    pub(crate) fn block_keys(&self, o: &Operands<'_>) -> Result<BlockKeys> {
        let pages = self.pages;
        let Some((keys, block)) = &pages.blocks else {
            return o.refuse("pages", "with keys of blocks", "pages without");
        };
        let len = (pages.shape.pages + 1) * pages.block_values();
        Ok(BlockKeys {
            keys: o.part("keys of blocks", keys, self.layer * len, &[len])?,
            tables: o.of("page tables", &pages.tables, &[pages.tables.len()])?,
            table_len: pages.table_len as i32,
            block: *block as i32,
        })
    }

    /// The argument, checked as operands of `o`.
    pub(crate) fn args(&self, o: &Operands<'_>) -> Result<Cache> {
        let pages = self.pages;
        let rows = (pages.shape.pages + 1) * pages.shape.page_rows();
        let row = self.layer * rows;
        let bytes = pages.keys.len() / pages.shape.rows();
        let codes = |all| o.part("cache", all, row * bytes, &[rows, bytes]);
        let (k, v) = match &pages.scales {
            Some((k, v)) => (
                o.part("scales of the cache", k, row, &[rows])?,
                o.part("scales of the cache", v, row, &[rows])?,
            ),
            None => (Address::NULL, Address::NULL),
        };
        Ok(Cache {
            keys: codes(&pages.keys)?,
            values: codes(&pages.values)?,
            key_scales: k,
            value_scales: v,
            tables: o.of("page tables", &pages.tables, &[pages.tables.len()])?,
            kv_heads: pages.shape.kv_heads as i32,
            table_len: pages.table_len as i32,
        })
    }
}

kernels! {
    SET_PAGES: SetPagesArgs = "set_pages" in "pages.cu",
        test "kernels/cuda/tests/cuda/attention.rs::copied_pages", bench "pages";
    COPY_PAGE: CopyPageArgs = "copy_page" in "pages.cu",
        test "kernels/cuda/tests/cuda/attention.rs::copied_pages", bench "pages";
}

impl Stream {
    /// Writes entries of the page tables, in order with the stream's other work.
    ///
    /// # Errors
    /// [`Error::Shape`] for a slot, index or page that does not exist; errors of the driver.
    pub fn set_pages(&self, pages: &mut DevicePages, entries: &[PageEntry]) -> Result<()> {
        let o = self.operands("set_pages");
        let sizes = pages.shape;
        let there = |e: &PageEntry| {
            e.slot < sizes.slots && e.index < pages.table_len && (e.page as usize) < sizes.pages
        };
        if let Some(entry) = entries.iter().find(|e| !there(e)) {
            let (slots, len, pages) = (sizes.slots, pages.table_len, sizes.pages);
            let expected = format!("{slots} slots of {len} of {pages} pages");
            return o.refuse("entry", expected, format!("{entry:?}"));
        }
        for some in entries.chunks(MOST_ENTRIES) {
            let mut args = SetPagesArgs {
                tables: o.of("page tables", &pages.tables, &[pages.tables.len()])?,
                count: some.len() as i32,
                entries: [pages::PageEntry::default(); MOST_ENTRIES],
                padding: [0; 1],
            };
            for (to, e) in args.entries.iter_mut().zip(some) {
                to.at = (e.slot * pages.table_len + e.index) as u32;
                to.page = e.page;
            }
            // SAFETY: the entries are in the tables.
            unsafe { self.launch(&SET_PAGES, shape([1, 1], MOST_ENTRIES), &args)? };
        }
        Ok(())
    }

    /// Copies page `from` to page `to`, in all layers.
    ///
    /// # Errors
    /// [`Error::Shape`] for a page that does not exist; errors of the driver.
    pub fn copy_page(&self, pages: &mut DevicePages, from: u32, to: u32) -> Result<()> {
        let o = self.operands("copy_page");
        let sizes = pages.shape;
        o.at_least("pages", from.max(to) as usize + 1, sizes.pages)?;
        let bytes = pages.keys.len() / sizes.rows() * sizes.page_rows();
        let whole = |all: &Buffer<u8>| o.of("cache", all, &[all.len()]);
        let scales = |all: &Buffer<u16>| o.of("scales of the cache", all, &[all.len()]);
        let (k, v) = match &pages.scales {
            Some((k, v)) => (scales(k)?, scales(v)?),
            None => (Address::NULL, Address::NULL),
        };
        let blocks = match &pages.blocks {
            Some((keys, _)) => o.of("keys of blocks", keys, &[keys.len()])?,
            None => Address::NULL,
        };
        let [words, scale_words, block_words] =
            [bytes, 2 * sizes.page_rows(), 4 * pages.block_values()].map(|n| (n / 16) as i32);
        let args = CopyPageArgs {
            part: [whole(&pages.keys)?, whole(&pages.values)?, k, v, blocks],
            words: [words, words, scale_words, scale_words, block_words],
            pages: sizes.pages as i32 + 1,
            from,
            to,
        };
        // SAFETY: both pages are in the pool.
        unsafe { self.launch(&COPY_PAGE, shape([16, sizes.layers], 256), &args) }
    }

    /// Appends to `out` the keys, values and scales of `page` in all layers, [`DevicePages::page_bytes`]
    /// of them, once the stream's earlier work is done.
    ///
    /// # Errors
    /// [`Error::Shape`] for a page that does not exist, or staging of other pages; errors of the driver.
    pub fn read_page(
        &self,
        pages: &DevicePages,
        page: u32,
        through: &mut PageStaging,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let o = self.operands("read_page");
        let (codes, rows) = pages.check_page(&o, page, through)?;
        for (at, to) in pages.parts(page, codes) {
            self.read(&pages.keys, at, &mut through.codes, to.clone())?;
            let to = to.start + codes..to.end + codes;
            self.read(&pages.values, at, &mut through.codes, to)?;
        }
        out.extend_from_slice(through.codes.values()?);
        if let (Some((keys, values)), Some(host)) = (&pages.scales, &mut through.scales) {
            for (at, to) in pages.parts(page, rows) {
                self.read(keys, at, host, to.clone())?;
                self.read(values, at, host, to.start + rows..to.end + rows)?;
            }
            out.extend_from_slice(bytemuck::cast_slice(host.values()?));
        }
        if let (Some((keys, _)), Some(host)) = (&pages.blocks, &mut through.blocks) {
            let n = pages.block_values();
            for (layer, (at, _)) in pages.parts(page, n).enumerate() {
                self.read(keys, at, host, layer * n..(layer + 1) * n)?;
            }
            out.extend_from_slice(bytemuck::cast_slice(host.values()?));
        }
        Ok(())
    }

    /// Overwrites `page` in all layers with what [`Stream::read_page`] gave, in order with the stream's
    /// other work.
    ///
    /// # Errors
    /// [`Error::Shape`] for a page that does not exist, staging of other pages, or another number of
    /// bytes; errors of the driver.
    pub fn write_page(
        &self,
        pages: &mut DevicePages,
        page: u32,
        through: &mut PageStaging,
        bytes: &[u8],
    ) -> Result<()> {
        let o = self.operands("write_page");
        let (codes, rows) = pages.check_page(&o, page, through)?;
        o.at_least("bytes", pages.page_bytes(), bytes.len())?;
        o.at_most("bytes", pages.page_bytes(), bytes.len())?;
        let (of_codes, rest) = bytes.split_at(through.codes.len());
        let (of_scales, of_blocks) =
            rest.split_at(through.scales.as_ref().map_or(0, |s| 2 * s.len()));
        through.codes.values_mut()?.copy_from_slice(of_codes);
        for (at, from) in pages.parts(page, codes) {
            self.write(&mut pages.keys, at, &mut through.codes, from.clone())?;
            let from = from.start + codes..from.end + codes;
            self.write(&mut pages.values, at, &mut through.codes, from)?;
        }
        let places = pages.parts(page, rows);
        if let (Some((keys, values)), Some(host)) = (&mut pages.scales, &mut through.scales) {
            bytemuck::cast_slice_mut(host.values_mut()?).copy_from_slice(of_scales);
            for (at, from) in places {
                self.write(keys, at, host, from.clone())?;
                self.write(values, at, host, from.start + rows..from.end + rows)?;
            }
        }
        let n = pages.block_values();
        let places = pages.parts(page, n).enumerate();
        if let (Some((keys, _)), Some(host)) = (&mut pages.blocks, &mut through.blocks) {
            bytemuck::cast_slice_mut(host.values_mut()?).copy_from_slice(of_blocks);
            for (layer, (at, _)) in places {
                self.write(keys, at, host, layer * n..(layer + 1) * n)?;
            }
        }
        Ok(())
    }
}
