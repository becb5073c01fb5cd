//! Keys and values of one layer, stored in pages.

use super::memory::Buffer;
use super::simd::LANES;
use half::f16;
use half::slice::HalfFloatSliceExt;
use nq_kernels::pages::{KvType, PAGE};
use std::ops::Range;

/// Keys and values of one layer, in pages that belong to sequences through their page tables. Each
/// page has `[kv_heads]` blocks of `PAGE * head_dim` keys, in panels of 16 positions, and as many of values, in rows.
#[derive(Clone, Debug)]
pub struct KvPages {
    kv_heads: usize,
    head_dim: usize,
    pages: usize,
    keys: KvData,
    values: KvData,
}

/// The vectors of each page's heads, `[pages, kv_heads]` blocks of `PAGE * head_dim` values in a [`VectorLayout`].
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

/// How a head's vectors lie in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VectorLayout {
    /// Of keys: panels of 16 positions, `[PAGE / 16, head_dim, 16]`. The products of a query with 16 keys are then in the
    /// lanes of a vector, each added up dimension by dimension, the order in which the products of many queries with one key
    /// are added up.
    Panels,
    /// Of values: `[PAGE, head_dim]`.
    Rows,
}

/// The place of a head's vector in a pool.
#[derive(Clone, Copy)]
struct StridedVector {
    /// Its first value.
    first: usize,
    /// From one of its values to the next.
    stride: usize,
    /// Its number among the vectors of the pool.
    row: usize,
}

impl VectorLayout {
    /// The place of row `at` of block `block`, of vectors of `d` values.
    fn place(self, block: usize, at: usize, d: usize) -> StridedVector {
        let (within, stride) = match self {
            VectorLayout::Panels => (at / LANES * LANES * d + at % LANES, LANES),
            VectorLayout::Rows => (at * d, 1),
        };
        StridedVector {
            first: block * PAGE * d + within,
            stride,
            row: block * PAGE + at,
        }
    }

    /// Where in a block of vectors of `d` values the first `rows` rows are.
    fn runs(self, rows: usize, d: usize) -> impl Iterator<Item = Range<usize>> {
        let (whole, last) = match self {
            VectorLayout::Panels => (rows - rows % LANES, rows % LANES),
            VectorLayout::Rows => (rows, 0),
        };
        let lines = 0..if last > 0 { d } else { 0 };
        let lines = lines.map(move |i| whole * d + i * LANES);
        std::iter::once(0..whole * d).chain(lines.map(move |at| at..at + last))
    }
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

    /// Stores `x`, rounded, at `place`.
    fn store(&mut self, place: StridedVector, x: &[f32]) {
        let StridedVector { first, stride, row } = place;
        match self {
            KvData::F32(d) => {
                let to = d[first..].iter_mut().step_by(stride);
                to.zip(x).for_each(|(to, &x)| *to = x);
            }
            KvData::F16(d) => {
                for (i, x) in x.chunks(LANES).enumerate() {
                    let mut rounded = [f16::ZERO; LANES];
                    rounded[..x.len()].convert_from_f32_slice(x);
                    let to = d[first + i * LANES * stride..].iter_mut().step_by(stride);
                    to.zip(&rounded[..x.len()]).for_each(|(to, &x)| *to = x);
                }
            }
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
                let to = codes[first..].iter_mut().step_by(stride);
                for (c, &x) in to.zip(x) {
                    *c = (x * inv).round().clamp(-127.0, 127.0) as i8;
                }
            }
        }
    }

    /// Reads the vector at `place` back.
    fn load(&self, place: StridedVector, out: &mut [f32]) {
        let StridedVector { first, stride, row } = place;
        for (i, out) in out.iter_mut().enumerate() {
            let at = first + i * stride;
            *out = match self {
                KvData::F32(d) => d[at],
                KvData::F16(d) => d[at].to_f32(),
                KvData::Int8 { codes, scales } => scales[row].to_f32() * f32::from(codes[at]),
            };
        }
    }

    /// Copies the first `rows` rows, of `d` values in `order`, of block `from` to block `to`.
    fn copy(&mut self, from: usize, to: usize, order: VectorLayout, rows: usize, d: usize) {
        let (from, to) = (from * PAGE, to * PAGE);
        for run in order.runs(rows, d) {
            let span = from * d + run.start..from * d + run.end;
            let to = to * d + run.start;
            match self {
                KvData::F32(values) => values.copy_within(span, to),
                KvData::F16(values) => values.copy_within(span, to),
                KvData::Int8 { codes, .. } => codes.copy_within(span, to),
            }
        }
        if let KvData::Int8 { scales, .. } = self {
            scales.copy_within(from..from + rows, to);
        }
    }

    /// Appends the bytes of `rows` rows of `width` values from row `from` on, whole blocks.
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

    fn block(&self, page: u32, head: usize) -> usize {
        page as usize * self.kv_heads + head
    }

    /// The places of a head's key and value at row `at` of `page`.
    fn places(&self, page: u32, head: usize, at: usize) -> [StridedVector; 2] {
        assert!(at < PAGE, "row {at} of a page of {PAGE}");
        let block = self.block(page, head);
        [VectorLayout::Panels, VectorLayout::Rows]
            .map(|order| order.place(block, at, self.head_dim))
    }

    /// Rounds and stores the keys and values `[kv_heads, head_dim]` of one position as row `at` of
    /// `page`.
    pub fn store(&mut self, page: u32, at: usize, keys: &[f32], values: &[f32]) {
        let d = self.head_dim;
        let heads = keys.chunks_exact(d).zip(values.chunks_exact(d));
        for (head, (k, v)) in heads.enumerate() {
            let [key, value] = self.places(page, head, at);
            self.keys.store(key, k);
            self.values.store(value, v);
        }
    }

    /// Reads one head's key and value `[head_dim]` at row `at` of `page` back as f32.
    pub fn load(&self, page: u32, at: usize, head: usize, key: &mut [f32], value: &mut [f32]) {
        let places = self.places(page, head, at);
        self.keys.load(places[0], key);
        self.values.load(places[1], value);
    }

    /// Stores as row `at` of `page` the keys and values that `from` has at row `row` of page `source`, as f32 values.
    pub(crate) fn gather(
        &mut self,
        (page, at): (u32, usize),
        from: &KvPages,
        (source, row): (u32, usize),
    ) {
        let d = self.head_dim;
        let (mut key, mut value) = (vec![0.0; d], vec![0.0; d]);
        for head in 0..self.kv_heads {
            from.load(source, row, head, &mut key, &mut value);
            let [to_key, to_value] = self.places(page, head, at);
            self.keys.store(to_key, &key);
            self.values.store(to_value, &value);
        }
    }

    /// Copies the first `rows` rows of page `from` to page `to`.
    pub fn copy_rows(&mut self, from: u32, to: u32, rows: usize) {
        assert!(rows <= PAGE, "{rows} rows of a page of {PAGE}");
        for head in 0..self.kv_heads {
            let (from, to) = (self.block(from, head), self.block(to, head));
            let d = self.head_dim;
            self.keys.copy(from, to, VectorLayout::Panels, rows, d);
            self.values.copy(from, to, VectorLayout::Rows, rows, d);
        }
    }

    /// Appends the [`KvPages::page_bytes`] bytes of `page` to `out`: its keys, then its
    /// values, in their layout in memory.
    pub fn read_page(&self, page: u32, out: &mut Vec<u8>) {
        let (from, rows) = (self.block(page, 0) * PAGE, self.kv_heads * PAGE);
        self.keys.read(from, rows, self.head_dim, out);
        self.values.read(from, rows, self.head_dim, out);
    }

    /// Fills `page` with bytes that [`KvPages::read_page`] returned for pages of this shape.
    ///
    /// # Panics
    /// If `bytes` has not [`KvPages::page_bytes`] bytes.
    pub fn write_page(&mut self, page: u32, bytes: &[u8]) {
        let (from, rows) = (self.block(page, 0) * PAGE, self.kv_heads * PAGE);
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
