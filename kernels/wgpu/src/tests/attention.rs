//! Heads, and attention.

use super::{gpu, read, run, words};
use crate::gpu::{Gpu, Grid};
use crate::kernels::{HeadKinds, Heads, attention, combine, prepare_heads};
use half::f16;
use nq_kernels::pages::{KvType, PAGE};
use nq_kernels::reference;
use nq_testkit::compare::nmse;
use nq_testkit::weights::normal;
use wgpu::Buffer;

const EPS: f32 = 1e-6;

/// Heads without gates, all of whose values turn.
fn heads([count, kv, dim]: [usize; 3], kv_type: KvType) -> Heads {
    Heads {
        count,
        kv,
        dim,
        turned: dim,
        gated: false,
        kv_type,
        queries: (512 / dim).clamp(1, 4),
    }
}

/// Heads that share keys and values or do not, of all sizes.
const SHAPES: [[usize; 3]; 5] = [[4, 2, 64], [7, 1, 32], [2, 2, 128], [8, 1, 256], [3, 1, 80]];

/// A sequence whose three pages lie in another order, the last `rows` of whose `len` positions are computed.
struct CachedSequence {
    heads: Heads,
    len: usize,
    rows: usize,
    /// Biases of all heads, if there are some, and gains.
    vectors: Vec<f32>,
    kinds: HeadKinds,
    qkv: Vec<f32>,
    /// Words of pages of keys and of values, and their scales.
    kept: [Vec<u32>; 2],
    scales: Vec<f32>,
}

const TABLE: [u32; 3] = [2, 0, 1];

impl CachedSequence {
    fn new(heads: Heads, len: usize, rows: usize) -> Self {
        let values = PAGE * heads.kv * heads.dim * TABLE.len();
        let words = values / if heads.kv_type == KvType::Int8 { 4 } else { 2 };
        CachedSequence {
            qkv: normal(rows * heads.row(), 7),
            kept: [vec![0; words], vec![0; words]],
            scales: vec![0.0; 2 * PAGE * heads.kv * TABLE.len()],
            vectors: vec![0.0],
            kinds: HeadKinds::default(),
            heads,
            len,
            rows,
        }
    }

    /// Gives heads vectors.
    fn prepared(&mut self, biased: bool, normed: bool) {
        let biases = if biased { self.heads.row() } else { 0 };
        self.kinds = HeadKinds {
            norms_at: biases,
            normed,
            eps: EPS,
        };
        self.vectors = [normal(biases, 2), normal(2 * self.heads.dim, 3)].concat();
    }

    fn first(&self) -> usize {
        self.len - self.rows
    }

    /// Cosines and sines of a row.
    fn turns(&self, row: usize) -> Vec<(f32, f32)> {
        let angles = normal(self.heads.turned / 2, 4 + row as u64);
        angles.iter().map(|a| (a.cos(), a.sin())).collect()
    }

    /// The number of a head's values at `position`, of keys or values.
    fn place(&self, head: usize, position: usize) -> usize {
        let page = TABLE[position / PAGE] as usize;
        (page * self.heads.kv + head) * PAGE + position % PAGE
    }

    /// Puts it on the adapter, for passes that read keys in parts of `split_pages` pages.
    fn on<'a>(&self, gpu: &'a Gpu, split_pages: usize) -> OnAdapter<'a> {
        let (heads, pages) = (self.heads, self.len.div_ceil(PAGE));
        let rows = (self.first()..self.len).flat_map(|p| [p as u32, 0, 0, 0]);
        let mut batch: Vec<u32> = rows.collect();
        let tiles_at = batch.len();
        for first in (0..self.rows).step_by(heads.tile()) {
            let count = heads.tile().min(self.rows - first);
            batch.extend([first, count, self.first() + first, 0].map(|n| n as u32));
        }
        let (tiles, tables_at) = ((batch.len() - tiles_at) / 4, batch.len());
        batch.extend(TABLE);
        let turns_at = batch.len();
        let turns = (0..self.rows).flat_map(|row| self.turns(row));
        batch.extend(turns.flat_map(|(c, s)| [c.to_bits(), s.to_bits()]));
        let splits = pages.div_ceil(split_pages);
        let at = [tiles_at, 0, tables_at, turns_at];
        let step = [&[self.rows, tiles, splits, split_pages][..], &at].concat();
        let step: [u32; 8] = std::array::from_fn(|i| step[i] as u32);
        let out = self.rows * heads.count * heads.dim;
        let parts = self.rows * heads.count * (heads.dim + 2) * splits;
        OnAdapter {
            gpu,
            heads,
            kinds: self.kinds,
            rows: self.rows,
            tiles,
            splits,
            buffers: [
                gpu.uniform(&step).unwrap(),
                words(gpu, &batch),
                gpu.upload("qkv", &self.qkv).unwrap(),
                gpu.upload("vectors", &self.vectors).unwrap(),
                words(gpu, &self.kept[0]),
                words(gpu, &self.kept[1]),
                gpu.upload("scales", &self.scales).unwrap(),
                gpu.buffer("attended", 4 * out).unwrap(),
                gpu.buffer("parts", 4 * parts).unwrap(),
            ],
        }
    }
}

/// A [`CachedSequence`] in the memory of an adapter.
struct OnAdapter<'a> {
    gpu: &'a Gpu,
    heads: Heads,
    kinds: HeadKinds,
    rows: usize,
    tiles: usize,
    splits: usize,
    /// What kernels are bound to: sizes, words of the batch, rows, vectors, keys, values, scales, outputs and parts.
    buffers: [Buffer; 9],
}

impl OnAdapter<'_> {
    fn prepare(&self) {
        let all = self.buffers.each_ref();
        let grid = Grid::new(self.rows, self.heads.kv * self.heads.shares());
        run(
            self.gpu,
            &prepare_heads(self.heads, self.kinds),
            &all[..7],
            grid,
        );
    }

    /// What rows attend to: of prepared heads, or `alone`.
    fn attended(&self, alone: bool) -> Vec<f32> {
        let (gpu, heads, all) = (self.gpu, self.heads, self.buffers.each_ref());
        let grid = Grid {
            x: self.splits,
            y: heads.kv * heads.shares(),
            z: self.tiles,
        };
        run(
            gpu,
            &attention(heads, alone.then_some(self.kinds)),
            &all,
            grid,
        );
        if self.splits > 1 {
            let buffers = [all[0], all[2], all[7], all[8]];
            run(
                gpu,
                &combine(heads),
                &buffers,
                Grid::new(self.rows, heads.count),
            );
        }
        read(gpu, all[7], self.rows * heads.count * heads.dim)
    }

    /// Keys and values of all pages.
    fn kept(&self) -> [Vec<f32>; 2] {
        [4, 5].map(|at| {
            let buffer = &self.buffers[at];
            let words = read(self.gpu, buffer, buffer.size() as usize / 4);
            let bytes: &[u8] = bytemuck::cast_slice(&words);
            match self.heads.kv_type {
                KvType::Int8 => bytes.iter().map(|b| f32::from(*b as i8)).collect(),
                _ => (bytes.as_chunks::<2>().0.iter())
                    .map(|half| f16::from_le_bytes(*half).to_f32())
                    .collect(),
            }
        })
    }

    fn scales(&self) -> Vec<f32> {
        let buffer = &self.buffers[6];
        read(self.gpu, buffer, buffer.size() as usize / 4)
    }
}

/// A head's values as pages hold them, their scale, and what they are then.
fn kept(head: &[f32], kv_type: KvType) -> (Vec<u32>, f32, Vec<f32>) {
    let round = |v: f32| f16::from_f32(v).to_f32();
    if kv_type == KvType::F16 {
        let bits = |v: f32| u32::from(f16::from_f32(v).to_bits());
        let pairs = head.as_chunks::<2>().0.iter();
        let words = pairs.map(|p| bits(p[0]) | bits(p[1]) << 16).collect();
        return (words, 0.0, head.iter().map(|v| round(*v)).collect());
    }
    let most = head.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = round(most / 127.0);
    let code = |v: &f32| (v / scale).round().clamp(-127.0, 127.0);
    let codes: Vec<f32> = head.iter().map(code).collect();
    let words = codes.as_chunks::<4>().0.iter();
    let words = words.map(|w| u32::from_le_bytes(w.map(|c| c as i8 as u8)));
    let words = words.collect();
    (words, scale, codes.iter().map(|c| c * scale).collect())
}

#[test]
fn heads_are_normalized_turned_and_kept() {
    let Some(gpu) = gpu() else { return };
    for (biased, normed, turned) in [(true, false, 64), (false, true, 32), (false, false, 64)] {
        let heads = Heads {
            turned,
            ..heads([4, 2, 64], KvType::F16)
        };
        let mut s = CachedSequence::new(heads, 131, 5);
        s.prepared(biased, normed);
        let (dim, row) = (heads.dim, heads.row());
        let (biases, gains) = s.vectors.split_at(s.kinds.norms_at);
        let on = s.on(&gpu, 8);
        on.prepare();
        let (found, kept) = (read(&gpu, &on.buffers[2], s.qkv.len()), on.kept());
        for (r, row_values) in s.qkv.chunks_exact(row).enumerate() {
            for (head, values) in row_values.chunks_exact(dim).enumerate() {
                let mut expected = values.to_vec();
                let biases = biases.iter().skip(head * dim);
                expected.iter_mut().zip(biases).for_each(|(v, b)| *v += b);
                let is_value = head >= heads.count + heads.kv;
                if normed && !is_value {
                    let gains = &gains[usize::from(head >= heads.count) * dim..][..dim];
                    let x = expected.clone();
                    reference::rms_norm(&x, gains, EPS, &mut expected);
                }
                if !is_value {
                    reference::rope(&mut expected[..turned], &s.turns(r));
                }
                let case = format!("head {head} of row {r}");
                if head < heads.count {
                    let found = &found[r * row + head * dim..][..dim];
                    assert!(nmse(found, &expected) < 1e-11, "{case}");
                    continue;
                }
                let at = s.place((head - heads.count) % heads.kv, s.first() + r);
                let found = &kept[usize::from(is_value)][at * dim..][..dim];
                assert!(nmse(found, &expected) < 1e-6, "kept {case}");
            }
        }
    }
}

/// Steps whose kernel prepares a row's heads itself give what preparing them and attending give.
#[test]
fn a_row_prepares_its_heads_and_attends() {
    let Some(gpu) = gpu() else { return };
    let kinds = [
        (true, false, KvType::F16),
        (false, true, KvType::Int8),
        (true, true, KvType::F16),
        (true, false, KvType::Int8),
    ];
    for (shape, kind) in SHAPES.into_iter().zip(kinds.into_iter().cycle()) {
        let (normed, gated, kv_type) = kind;
        let heads = Heads {
            turned: shape[2] / 2,
            gated,
            ..heads(shape, kv_type)
        };
        // As many queries to a workgroup as fit, and one.
        let cases = [1, 65, 300]
            .into_iter()
            .flat_map(|len| [(len, 3), (len, 1)]);
        for ((len, split_pages), heads) in cases.flat_map(|c| [(c, heads), (c, heads.apart())]) {
            let mut s = CachedSequence::new(heads, len, 1);
            s.prepared(true, normed);
            s.kept = [8, 9].map(|seed| {
                let before = normal(TABLE.len() * PAGE * heads.kv * heads.dim, seed);
                kept(&before, kv_type).0
            });
            let scales = normal(s.scales.len(), 9);
            s.scales = scales.iter().map(|s| s.abs() / 99.0).collect();
            let [apart, alone] = [s.on(&gpu, split_pages), s.on(&gpu, split_pages)];
            apart.prepare();
            let case = format!("{heads:?}, {len} tokens, parts of {split_pages}");
            let error = nmse(&alone.attended(true), &apart.attended(false));
            // Where a value is halfway between two bytes, the order of sums decides.
            let most = if kv_type == KvType::Int8 { 1e-5 } else { 1e-8 };
            assert!(error < most, "{case}: {error:e}");
            for (alone, apart) in alone.kept().iter().zip(&apart.kept()) {
                let error = nmse(alone, apart);
                assert!(error < most, "{case}: kept {error:e}");
            }
            assert!(
                nmse(&alone.scales(), &apart.scales()) < 1e-9,
                "{case}: scales"
            );
        }
    }
}

#[test]
fn rows_attend_to_what_is_before_them() {
    let Some(gpu) = gpu() else { return };
    let kinds = [KvType::F16, KvType::Int8];
    for (shape, kv_type) in (SHAPES.into_iter()).flat_map(|s| kinds.map(|k| (s, k))) {
        let heads = heads(shape, kv_type);
        let [count, kv, dim] = shape;
        for (len, rows) in [(1, 1), (300, 3), (150, 37)] {
            let mut s = CachedSequence::new(heads, len, rows);
            // [position, head, dim] to pages.
            let [keys, values] = [0, 1].map(|which| {
                let mut rounded = Vec::new();
                let all = normal(len * kv * dim, 8 + which as u64);
                for (i, head) in all.chunks_exact(dim).enumerate() {
                    let place = s.place(i % kv, i / kv);
                    let (words, scale, values) = kept(head, kv_type);
                    s.kept[which][place * words.len()..][..words.len()].copy_from_slice(&words);
                    s.scales[2 * place + which] = scale;
                    rounded.extend(values);
                }
                rounded
            });
            for split_pages in [3, 1] {
                let found = s.on(&gpu, split_pages).attended(false);
                for (i, found) in found.chunks_exact(dim).enumerate() {
                    let (row, head) = (i / count, i % count);
                    let q = &s.qkv[row * heads.row() + head * dim..][..dim];
                    let seen = s.first() + row + 1;
                    let of_head = |values: &[f32]| -> Vec<f32> {
                        let all = values.chunks_exact(kv * dim).take(seen);
                        let head = head / (count / kv) * dim;
                        all.flat_map(|p| p[head..head + dim].to_vec()).collect()
                    };
                    let mut expected = vec![0.0; dim];
                    reference::attend(q, &of_head(&keys), &of_head(&values), &mut expected);
                    let error = nmse(found, &expected);
                    let case = format!("{heads:?}, {len} tokens, row {row}, head {head}");
                    assert!(error < 1e-10, "{case}, parts of {split_pages}: {error:e}");
                }
            }
        }
    }
}
