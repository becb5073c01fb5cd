//! Heads, and attention.

use super::{gpu, read, run, words};
use crate::gpu::Grid;
use crate::kernels::{
    ATTENTION, ATTENTION_ROW, COMBINE, HEADS, Heads, attention, attention_row, combine,
    prepare_heads,
};
use crate::source::KernelSource;
use half::f16;
use nq_kernels::pages::PAGE;
use nq_kernels::reference;
use nq_testkit::compare::nmse;
use nq_testkit::weights::normal;

/// A sequence whose pages lie in another order, the last `rows` of whose `len` positions are computed.
struct CachedSequence {
    heads: Heads,
    len: usize,
    rows: usize,
    table: Vec<u32>,
}

impl CachedSequence {
    fn first(&self) -> usize {
        self.len - self.rows
    }

    fn row(&self) -> usize {
        self.heads.row()
    }

    /// Sizes and words of a pass with tiles of `tile` rows, whose keys are read in parts of `split_pages` pages, and
    /// whose heads turn by these cosines and sines.
    fn batch(&self, tile: usize, split_pages: usize, turns: &[(f32, f32)]) -> ([u32; 8], Vec<u32>) {
        let mut words: Vec<u32> = (self.first()..self.len)
            .flat_map(|p| [p as u32, 0, 0, 0])
            .collect();
        let tiles_at = words.len();
        for first in (0..self.rows).step_by(tile) {
            let count = tile.min(self.rows - first);
            words.extend([first, count, self.first() + first, 0].map(|n| n as u32));
        }
        let tiles = (words.len() - tiles_at) / 4;
        let tables_at = words.len();
        words.extend(&self.table);
        let turns_at = words.len();
        words.extend(turns.iter().flat_map(|&(c, s)| [c.to_bits(), s.to_bits()]));
        let splits = self.table.len().div_ceil(split_pages);
        let step = [
            self.rows,
            tiles,
            splits,
            split_pages,
            tiles_at,
            0,
            tables_at,
            turns_at,
        ];
        (step.map(|n| n as u32), words)
    }

    /// Where a head's values at `position` are among pairs.
    fn place(&self, head: usize, position: usize) -> usize {
        let page = self.table[position / PAGE] as usize;
        ((page * self.heads.kv + head) * PAGE + position % PAGE) * self.heads.dim / 2
    }
}

fn pairs(values: &[f32]) -> Vec<u32> {
    let bits = |v: f32| u32::from(f16::from_f32(v).to_bits());
    let pair = |p: &[f32; 2]| bits(p[0]) | bits(p[1]) << 16;
    values.as_chunks::<2>().0.iter().map(pair).collect()
}

#[test]
fn heads_are_normalized_turned_and_kept() {
    let Some(gpu) = gpu() else { return };
    let eps = 1e-6;
    for (biased, normed, turned) in [(true, false, 64), (false, true, 32), (false, false, 64)] {
        let heads = Heads {
            count: 4,
            kv: 2,
            dim: 64,
            turned,
            gated: false,
        };
        let s = CachedSequence {
            heads,
            len: 131,
            rows: 5,
            table: vec![1, 0],
        };
        let (all, dim, row) = (heads.count + 2 * heads.kv, heads.dim, s.row());
        let qkv = normal(s.rows * row, 1);
        let (biases, gains) = (normal(row, 2), normal(2 * dim, 3));
        let turns: Vec<(f32, f32)> = (normal(s.rows * turned / 2, 4).iter())
            .map(|a| (a.cos(), a.sin()))
            .collect();
        let mut vectors = Vec::new();
        if biased {
            vectors.extend(&biases);
        }
        let source = prepare_heads(heads, eps)
            .with("NORMS_AT", vectors.len())
            .flag("BIASES", biased)
            .flag("NORMS", normed);
        vectors.extend(&gains);
        let (step, batch) = s.batch(1, 8, &turns);
        let (step, batch) = (gpu.uniform(&step).unwrap(), words(&gpu, &batch));
        let vectors = gpu.upload("vectors", &vectors).unwrap();
        let buffer = gpu.upload("qkv", &qkv).unwrap();
        let bytes = 2 * heads.kv * PAGE * dim * 2;
        let keys = gpu.buffer("keys", bytes).unwrap();
        let values = gpu.buffer("values", bytes).unwrap();
        let buffers = [&step, &batch, &vectors, &buffer, &keys, &values];
        run(&gpu, &source, &HEADS, &buffers, Grid::new(s.rows, all));
        let found = read(&gpu, &buffer, qkv.len());
        let kept = [read(&gpu, &keys, bytes / 4), read(&gpu, &values, bytes / 4)];
        for (r, row_values) in qkv.chunks_exact(row).enumerate() {
            for (head, values) in row_values.chunks_exact(dim).enumerate() {
                let mut expected = values.to_vec();
                if biased {
                    let biases = biases[head * dim..].iter();
                    expected.iter_mut().zip(biases).for_each(|(v, b)| *v += b);
                }
                let is_value = head >= heads.count + heads.kv;
                if normed && !is_value {
                    let gains = &gains[usize::from(head >= heads.count) * dim..][..dim];
                    let x = expected.clone();
                    reference::rms_norm(&x, gains, eps, &mut expected);
                }
                if !is_value {
                    let turns = &turns[r * turned / 2..][..turned / 2];
                    reference::rope(&mut expected[..turned], turns);
                }
                if head < heads.count {
                    let found = &found[r * row + head * dim..][..dim];
                    assert!(nmse(found, &expected) < 1e-11, "head {head} of row {r}");
                    continue;
                }
                let head = (head - heads.count) % heads.kv;
                let at = s.place(head, s.first() + r);
                let found: Vec<f32> = kept[usize::from(is_value)][at..][..dim / 2]
                    .iter()
                    .flat_map(|w| [w.to_bits() as u16, (w.to_bits() >> 16) as u16])
                    .map(|bits| f16::from_bits(bits).to_f32())
                    .collect();
                assert!(
                    nmse(&found, &expected) < 1e-6,
                    "kept head {head} of row {r}"
                );
            }
        }
    }
}

/// Steps whose kernel prepares a row's heads itself give what preparing them and attending give.
#[test]
fn a_row_prepares_its_heads_and_attends() {
    let Some(gpu) = gpu() else { return };
    let eps = 1e-6;
    let shapes = [(4, 2, 64), (7, 1, 32), (2, 2, 128), (8, 1, 256), (3, 1, 80)];
    for ((count, kv, dim), normed) in shapes.into_iter().zip([true, false].into_iter().cycle()) {
        let heads = Heads {
            count,
            kv,
            dim,
            turned: dim / 2,
            gated: false,
        };
        for len in [1, 65, 300] {
            let s = CachedSequence {
                heads,
                len,
                rows: 1,
                table: vec![2, 0, 1][..len.div_ceil(PAGE)].to_vec(),
            };
            let turns: Vec<(f32, f32)> = (normal(dim / 4, 4).iter())
                .map(|a| (a.cos(), a.sin()))
                .collect();
            let (qkv, biases, gains) = (normal(s.row(), 7), normal(s.row(), 2), normal(2 * dim, 3));
            let vectors = gpu
                .upload("vectors", &[biases.clone(), gains.clone()].concat())
                .unwrap();
            let prepares = |source: KernelSource| {
                let source = source.with("NORMS_AT", biases.len()).flag("BIASES", true);
                source.flag("NORMS", normed)
            };
            let before = normal(3 * kv * PAGE * dim, 8);
            let before = [pairs(&before), pairs(&before[1..])];
            for split_pages in [3, 1] {
                let (step, batch) = s.batch(1, split_pages, &turns);
                let splits = step[2] as usize;
                let (step, batch) = (gpu.uniform(&step).unwrap(), words(&gpu, &batch));
                let of_splits = Grid {
                    x: splits,
                    y: kv,
                    z: 1,
                };
                let all: Vec<[Vec<f32>; 3]> = [false, true]
                    .into_iter()
                    .map(|together| {
                        let qkv = gpu.upload("qkv", &qkv).unwrap();
                        let [keys, values] = [&before[0], &before[1]].map(|b| words(&gpu, b));
                        let attended = gpu.buffer("attended", 4 * count * dim).unwrap();
                        let parts = 4 * count * (dim + 2) * splits;
                        let parts = gpu.buffer("parts", parts).unwrap();
                        let first = [&step, &batch, &attended, &parts, &qkv];
                        if together {
                            let source = prepares(attention_row(heads, eps));
                            let buffers = [&first[..], &[&vectors, &keys, &values]].concat();
                            let mut grid = of_splits;
                            grid.y *= heads.shares();
                            run(&gpu, &source, &ATTENTION_ROW, &buffers, grid);
                        } else {
                            let source = prepares(prepare_heads(heads, eps));
                            let buffers = [&step, &batch, &vectors, &qkv, &keys, &values];
                            let grid = Grid::new(1, count + 2 * kv);
                            run(&gpu, &source, &HEADS, &buffers, grid);
                            let buffers = [&first[..], &[&keys, &values]].concat();
                            run(&gpu, &attention(heads, 1), &ATTENTION, &buffers, of_splits);
                        }
                        if splits > 1 {
                            let grid = Grid::new(1, count);
                            run(&gpu, &combine(heads), &COMBINE, &first[..5], grid);
                        }
                        [
                            read(&gpu, &attended, count * dim),
                            read(&gpu, &keys, before[0].len()),
                            read(&gpu, &values, before[1].len()),
                        ]
                    })
                    .collect();
                let case = format!("{heads:?}, {len} tokens, {splits} parts");
                let error = nmse(&all[1][0], &all[0][0]);
                assert!(error < 1e-8, "{case}: {error:e}");
                for (apart, together) in all[0].iter().zip(&all[1]).skip(1) {
                    let halves = |words: &[f32]| -> Vec<f32> {
                        let halves = words.iter().flat_map(|w| [w.to_bits(), w.to_bits() >> 16]);
                        halves
                            .map(|bits| f16::from_bits(bits as u16).to_f32())
                            .collect()
                    };
                    let error = nmse(&halves(together), &halves(apart));
                    assert!(error < 1e-9, "{case}: kept {error:e}");
                }
            }
        }
    }
}

#[test]
fn rows_attend_to_what_is_before_them() {
    let Some(gpu) = gpu() else { return };
    let shapes = [(4, 2, 64), (7, 1, 32), (2, 2, 128), (8, 1, 256), (3, 1, 80)];
    for (count, kv, dim) in shapes {
        let heads = Heads {
            count,
            kv,
            dim,
            turned: dim,
            gated: false,
        };
        for (len, rows) in [(1, 1), (300, 3), (150, 37)] {
            let s = CachedSequence {
                heads,
                len,
                rows,
                table: vec![2, 0, 1][..len.div_ceil(PAGE)].to_vec(),
            };
            let qkv = normal(rows * s.row(), 7);
            let round = |v: f32| f16::from_f32(v).to_f32();
            let rounded = |seed| {
                normal(len * kv * dim, seed)
                    .into_iter()
                    .map(round)
                    .collect()
            };
            let (keys, values): (Vec<f32>, Vec<f32>) = (rounded(8), rounded(9));
            // [position, head, dim] to pages.
            let paged = |values: &[f32]| {
                let mut all = vec![0; 3 * kv * PAGE * dim / 2];
                for (i, head) in values.chunks_exact(dim).enumerate() {
                    let at = s.place(i % kv, i / kv);
                    all[at..at + dim / 2].copy_from_slice(&pairs(head));
                }
                words(&gpu, &all)
            };
            let (key_pages, value_pages) = (paged(&keys), paged(&values));
            let qkv_buffer = gpu.upload("qkv", &qkv).unwrap();
            for (tile, split_pages) in [(1, 3), (1, 1), (heads.tile(), 3)] {
                let (step, batch) = s.batch(tile, split_pages, &[]);
                let (tiles, splits) = (step[1] as usize, step[2] as usize);
                let (step, batch) = (gpu.uniform(&step).unwrap(), words(&gpu, &batch));
                let attended = gpu.buffer("attended", 4 * rows * count * dim).unwrap();
                let parts = gpu
                    .buffer("parts", 4 * rows * count * (dim + 2) * splits)
                    .unwrap();
                let buffers = [
                    &step,
                    &batch,
                    &attended,
                    &parts,
                    &qkv_buffer,
                    &key_pages,
                    &value_pages,
                ];
                let grid = Grid {
                    x: splits,
                    y: kv,
                    z: tiles,
                };
                run(&gpu, &attention(heads, tile), &ATTENTION, &buffers, grid);
                if splits > 1 {
                    let grid = Grid::new(rows, count);
                    run(&gpu, &combine(heads), &COMBINE, &buffers[..5], grid);
                }
                let found = read(&gpu, &attended, rows * count * dim);
                for (i, found) in found.chunks_exact(dim).enumerate() {
                    let (row, head) = (i / count, i % count);
                    let q = &qkv[row * s.row() + head * dim..][..dim];
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
                    assert!(
                        error < 1e-10,
                        "{case}, tiles of {tile}, {splits} parts: {error:e}"
                    );
                }
            }
        }
    }
}
