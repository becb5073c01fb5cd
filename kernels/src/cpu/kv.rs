//! Keys and values of one layer, stored in pages.

use super::memory::Buffer;
use crate::pages::{KvType, PAGE};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Keys and values of one layer, in pages that belong to sequences through their page tables. Each
/// page has `[kv_heads, PAGE, head_dim]` keys and as many values.
#[derive(Clone, Debug)]
pub struct KvPages {
    kv_heads: usize,
    head_dim: usize,
    pages: usize,
    keys: KvData,
    values: KvData,
}

/// `[pages, kv_heads, PAGE, head_dim]`
#[derive(Clone, Debug)]
pub(crate) enum KvData {
    F32(Buffer<f32>),
    F16(Buffer<f16>),
    /// Scales are `[pages, kv_heads, PAGE]`.
    Int8 {
        codes: Buffer<i8>,
        scales: Buffer<f16>,
    },
}

impl KvData {
    fn new(kind: KvType, rows: usize, head_dim: usize) -> Self {
        let n = rows * head_dim;
        match kind {
            KvType::F32 => KvData::F32(Buffer::sparse(n)),
            KvType::F16 => KvData::F16(Buffer::sparse(n)),
            KvType::Int8 => KvData::Int8 {
                codes: Buffer::sparse(n),
                scales: Buffer::sparse(rows),
            },
        }
    }

    /// Stores `x`, rounded, as row `row`.
    fn store(&mut self, row: usize, x: &[f32]) {
        let span = row * x.len()..(row + 1) * x.len();
        match self {
            KvData::F32(d) => d[span].copy_from_slice(x),
            KvData::F16(d) => d[span].convert_from_f32_slice(x),
            KvData::Int8 { codes, scales } => {
                let absmax = x.iter().fold(0f32, |m, v| m.max(v.abs()));
                // A NaN is lost in the maximum and in codes, so it is put into the scale.
                let nan: f32 = x.iter().map(|v| v * 0.0).sum();
                let scale = f16::from_f32(absmax / 127.0 + nan);
                scales[row] = scale;
                let inv = if scale.to_f32() > 0.0 {
                    1.0 / scale.to_f32()
                } else {
                    0.0
                };
                for (c, &x) in codes[span].iter_mut().zip(x) {
                    *c = (x * inv).round().clamp(-127.0, 127.0) as i8;
                }
            }
        }
    }

    /// Reads row `row` back.
    fn load(&self, row: usize, out: &mut [f32]) {
        let span = row * out.len()..(row + 1) * out.len();
        match self {
            KvData::F32(d) => out.copy_from_slice(&d[span]),
            KvData::F16(d) => d[span].convert_to_f32_slice(out),
            KvData::Int8 { codes, scales } => {
                let s = scales[row].to_f32();
                for (o, &c) in out.iter_mut().zip(&codes[span]) {
                    *o = s * f32::from(c);
                }
            }
        }
    }

    /// Copies `n` rows of `width` values from row `from` to row `to`.
    fn copy(&mut self, from: usize, to: usize, n: usize, width: usize) {
        let span = from * width..(from + n) * width;
        match self {
            KvData::F32(d) => d.copy_within(span, to * width),
            KvData::F16(d) => d.copy_within(span, to * width),
            KvData::Int8 { codes, scales } => {
                codes.copy_within(span, to * width);
                scales.copy_within(from..from + n, to);
            }
        }
    }

    /// Appends the bytes of `rows` rows of `width` values from row `from` on.
    fn read(&self, from: usize, rows: usize, width: usize, out: &mut Vec<u8>) {
        let span = from * width..(from + rows) * width;
        match self {
            KvData::F32(d) => out.extend_from_slice(bytemuck::cast_slice(&d[span])),
            KvData::F16(d) => out.extend_from_slice(bytemuck::cast_slice(&d[span])),
            KvData::Int8 { codes, scales } => {
                out.extend_from_slice(bytemuck::cast_slice(&codes[span]));
                out.extend_from_slice(bytemuck::cast_slice(&scales[from..from + rows]));
            }
        }
    }

    /// Writes bytes that [`KvData::read`] returned.
    fn write(&mut self, from: usize, rows: usize, width: usize, bytes: &[u8]) {
        let span = from * width..(from + rows) * width;
        match self {
            KvData::F32(d) => bytemuck::cast_slice_mut(&mut d[span]).copy_from_slice(bytes),
            KvData::F16(d) => bytemuck::cast_slice_mut(&mut d[span]).copy_from_slice(bytes),
            KvData::Int8 { codes, scales } => {
                let (of_codes, of_scales) = bytes.split_at(rows * width);
                bytemuck::cast_slice_mut(&mut codes[span]).copy_from_slice(of_codes);
                let scales = &mut scales[from..from + rows];
                bytemuck::cast_slice_mut(scales).copy_from_slice(of_scales);
            }
        }
    }

    fn kind(&self) -> KvType {
        match self {
            KvData::F32(_) => KvType::F32,
            KvData::F16(_) => KvType::F16,
            KvData::Int8 { .. } => KvType::Int8,
        }
    }
}

impl KvPages {
    /// Allocates `pages` zeroed pages. Pages that are never written take no memory.
    ///
    /// # Panics
    /// If so many values have no address each.
    pub fn new(kind: KvType, pages: usize, kv_heads: usize, head_dim: usize) -> Self {
        // Everything that reads a row relies on there being as many as this says.
        let rows = pages
            .checked_mul(kv_heads)
            .and_then(|n| n.checked_mul(PAGE));
        let rows = rows.filter(|rows| rows.checked_mul(head_dim).is_some());
        let rows = rows.expect("pages of keys and values that fit the address space");
        let data = || KvData::new(kind, rows, head_dim);
        KvPages {
            kv_heads,
            head_dim,
            pages,
            keys: data(),
            values: data(),
        }
    }

    /// Bytes of a page: the keys and values of one layer.
    pub const fn page_bytes(kind: KvType, kv_heads: usize, head_dim: usize) -> usize {
        2 * kv_heads * PAGE * kind.bytes(head_dim)
    }

    /// The type that keys and values are rounded to.
    pub fn kind(&self) -> KvType {
        self.keys.kind()
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Number of heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    fn row(&self, page: u32, head: usize, at: usize) -> usize {
        assert!(at < PAGE, "row {at} of a page of {PAGE}");
        (page as usize * self.kv_heads + head) * PAGE + at
    }

    /// Rounds and stores the keys and values `[kv_heads, head_dim]` of one position as row `at` of
    /// `page`.
    pub fn store(&mut self, page: u32, at: usize, keys: &[f32], values: &[f32]) {
        let d = self.head_dim;
        let heads = keys.chunks_exact(d).zip(values.chunks_exact(d));
        for (head, (k, v)) in heads.enumerate() {
            let row = self.row(page, head, at);
            self.keys.store(row, k);
            self.values.store(row, v);
        }
    }

    /// Reads one head's key and value `[head_dim]` at row `at` of `page` back as f32.
    pub fn load(&self, page: u32, at: usize, head: usize, key: &mut [f32], value: &mut [f32]) {
        let row = self.row(page, head, at);
        self.keys.load(row, key);
        self.values.load(row, value);
    }

    /// Copies the first `rows` rows of page `from` to page `to`.
    pub fn copy_rows(&mut self, from: u32, to: u32, rows: usize) {
        assert!(rows <= PAGE, "{rows} rows of a page of {PAGE}");
        for head in 0..self.kv_heads {
            let (from, to) = (self.row(from, head, 0), self.row(to, head, 0));
            self.keys.copy(from, to, rows, self.head_dim);
            self.values.copy(from, to, rows, self.head_dim);
        }
    }

    /// Appends the [`KvPages::page_bytes`] bytes of `page` to `out`: its keys, then its
    /// values, in their layout in memory.
    pub fn read_page(&self, page: u32, out: &mut Vec<u8>) {
        let (from, rows) = (self.row(page, 0, 0), self.kv_heads * PAGE);
        self.keys.read(from, rows, self.head_dim, out);
        self.values.read(from, rows, self.head_dim, out);
    }

    /// Fills `page` with bytes that [`KvPages::read_page`] returned for pages of this shape.
    ///
    /// # Panics
    /// If `bytes` has not [`KvPages::page_bytes`] bytes.
    pub fn write_page(&mut self, page: u32, bytes: &[u8]) {
        let (from, rows) = (self.row(page, 0, 0), self.kv_heads * PAGE);
        let (keys, values) = bytes.split_at(bytes.len() / 2);
        self.keys.write(from, rows, self.head_dim, keys);
        self.values.write(from, rows, self.head_dim, values);
    }
}

/// Keys and values of one layer of one sequence: position `p` is row `p % PAGE` of page
/// `table[p / PAGE]`.
#[derive(Clone, Copy, Debug)]
pub struct KvSequence<'a> {
    pages: &'a KvPages,
    table: &'a [u32],
}

impl<'a> KvSequence<'a> {
    /// # Panics
    /// If the table names a page that does not exist.
    pub fn new(pages: &'a KvPages, table: &'a [u32]) -> Self {
        let there = |&page: &u32| (page as usize) < pages.pages;
        assert!(table.iter().all(there), "a page past the pool's");
        KvSequence { pages, table }
    }

    /// The pages that hold the sequence.
    pub fn pages(&self) -> &'a KvPages {
        self.pages
    }

    /// Number of positions in the table's pages.
    pub fn capacity(&self) -> usize {
        self.table.len() * PAGE
    }

    /// Keys and values of one head.
    pub(crate) fn head(&self, head: usize) -> [KvView<'a>; 2] {
        assert!(head < self.pages.kv_heads, "head {head}");
        [&self.pages.keys, &self.pages.values].map(|data| KvView {
            data,
            table: self.table,
            head_dim: self.pages.head_dim,
            kv_heads: self.pages.kv_heads,
            head,
        })
    }
}

/// Keys or values of one head of a sequence, whose pages all exist.
#[derive(Clone, Copy)]
pub(crate) struct KvView<'a> {
    pub(crate) data: &'a KvData,
    pub(crate) head_dim: usize,
    table: &'a [u32],
    kv_heads: usize,
    head: usize,
}

impl KvView<'_> {
    /// The first row of the sequence's page `i` among all rows of the pool.
    #[inline(always)]
    pub(crate) fn page_row(&self, i: usize) -> usize {
        (self.table[i] as usize * self.kv_heads + self.head) * PAGE
    }
}
