//! Heads, and attention.

use super::{gpu, read, run, words};
use crate::gpu::Grid;
use crate::kernels::{Heads, attention, attention_row, combine, prepare_heads};
use crate::source::KernelSource;
use half::f16;
use nq_kernels::pages::{KvType, PAGE};
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

/// `values` as pages hold them, with a scale for each head of them, and what they are then.
fn kept(values: &[f32], heads: &Heads) -> (Vec<u32>, Vec<f32>, Vec<f32>) {
    let round = |v: &f32| f16::from_f32(*v).to_f32();
    if heads.kv_type == KvType::F16 {
        return (
            pairs(values),
            Vec::new(),
            values.iter().map(round).collect(),
        );
    }
    let (mut words, mut scales, mut rounded) = (Vec::new(), Vec::new(), Vec::new());
    for head in values.chunks_exact(heads.dim) {
        let most = head.iter().fold(0f32, |m, v| m.max(v.abs()));
        let scale = round(&(most / 127.0));
        let codes = head
            .iter()
            .map(|v| (v / scale).round().clamp(-127.0, 127.0));
        let codes: Vec<f32> = codes.collect();
        let bytes: Vec<u8> = codes.iter().map(|c| *c as i8 as u8).collect();
        words.extend(
            bytes
                .as_chunks::<4>()
                .0
                .iter()
                .map(|w| u32::from_le_bytes(*w)),
        );
        rounded.extend(codes.iter().map(|c| c * scale));
        scales.push(scale);
    }
    (words, scales, rounded)
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
            kv_type: KvType::F16,
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
        let scales = gpu.buffer("scales", 16).unwrap();
        let buffers = [&step, &batch, &vectors, &buffer, &keys, &values, &scales];
        run(&gpu, &source, &buffers, Grid::new(s.rows, all));
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
    let kinds = [(true, false, KvType::F16), (false, true, KvType::Int8)];
    let kinds = [
        kinds,
        [(true, true, KvType::F16), (true, false, KvType::Int8)],
    ]
    .concat();
    for ((count, kv, dim), kind) in shapes.into_iter().zip(kinds.into_iter().cycle()) {
        let (normed, gated, kv_type) = kind;
        let heads = Heads {
            count,
            kv,
            dim,
            turned: dim / 2,
            gated,
            kv_type,
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
            let before = [kept(&before, &heads).0, kept(&before, &heads).0];
            let scales_before: Vec<f32> = normal(6 * kv * PAGE, 9);
            let scales_before: Vec<f32> = scales_before.iter().map(|s| s.abs() / 99.0).collect();
            for split_pages in [3, 1] {
                let (step, batch) = s.batch(1, split_pages, &turns);
                let splits = step[2] as usize;
                let (step, batch) = (gpu.uniform(&step).unwrap(), words(&gpu, &batch));
                let of_splits = Grid {
                    x: splits,
                    y: kv,
                    z: 1,
                };
                let all: Vec<[Vec<f32>; 4]> = [false, true]
                    .into_iter()
                    .map(|together| {
                        let qkv = gpu.upload("qkv", &qkv).unwrap();
                        let [keys, values] = [&before[0], &before[1]].map(|b| words(&gpu, b));
                        let attended = gpu.buffer("attended", 4 * count * dim).unwrap();
                        let parts = 4 * count * (dim + 2) * splits;
                        let parts = gpu.buffer("parts", parts).unwrap();
                        let scales = gpu.upload("scales", &scales_before).unwrap();
                        let first = [&step, &batch, &attended, &parts, &qkv];
                        if together {
                            let source = prepares(attention_row(heads, eps));
                            let buffers =
                                [&first[..], &[&vectors, &keys, &values, &scales]].concat();
                            let mut grid = of_splits;
                            grid.y *= heads.shares();
                            run(&gpu, &source, &buffers, grid);
                        } else {
                            let source = prepares(prepare_heads(heads, eps));
                            let buffers = [&step, &batch, &vectors, &qkv, &keys, &values, &scales];
                            let grid = Grid::new(1, count + 2 * kv);
                            run(&gpu, &source, &buffers, grid);
                            let buffers = [&first[..], &[&keys, &values, &scales]].concat();
                            run(&gpu, &attention(heads, 1), &buffers, of_splits);
                        }
                        if splits > 1 {
                            let grid = Grid::new(1, count);
                            run(&gpu, &combine(heads), &first[..5], grid);
                        }
                        [
                            read(&gpu, &attended, count * dim),
                            read(&gpu, &keys, before[0].len()),
                            read(&gpu, &values, before[1].len()),
                            read(&gpu, &scales, scales_before.len()),
                        ]
                    })
                    .collect();
                let case = format!("{heads:?}, {len} tokens, {splits} parts");
                let error = nmse(&all[1][0], &all[0][0]);
                // Where a value is halfway between two bytes, the order of sums decides.
                let most = if kv_type == KvType::Int8 { 1e-5 } else { 1e-8 };
                assert!(error < most, "{case}: {error:e}");
                for (apart, together) in all[0].iter().zip(&all[1]).skip(1).take(2) {
                    let values = |words: &[f32]| -> Vec<f32> {
                        let bytes = words.iter().flat_map(|w| w.to_bits().to_le_bytes());
                        let bytes: Vec<u8> = bytes.collect();
                        match kv_type {
                            KvType::Int8 => bytes.iter().map(|b| f32::from(*b as i8)).collect(),
                            _ => (bytes.as_chunks::<2>().0.iter())
                                .map(|half| f16::from_le_bytes(*half).to_f32())
                                .collect(),
                        }
                    };
                    let error = nmse(&values(together), &values(apart));
                    assert!(error < most, "{case}: kept {error:e}");
                }
                assert!(nmse(&all[1][3], &all[0][3]) < 1e-9, "{case}: scales");
            }
        }
    }
}

#[test]
fn rows_attend_to_what_is_before_them() {
    let Some(gpu) = gpu() else { return };
    let shapes = [(4, 2, 64), (7, 1, 32), (2, 2, 128), (8, 1, 256), (3, 1, 80)];
    let kinds = [KvType::F16, KvType::Int8];
    for ((count, kv, dim), kv_type) in (shapes.into_iter()).flat_map(|s| kinds.map(|k| (s, k))) {
        let heads = Heads {
            count,
            kv,
            dim,
            turned: dim,
            gated: false,
            kv_type,
        };
        for (len, rows) in [(1, 1), (300, 3), (150, 37)] {
            let s = CachedSequence {
                heads,
                len,
                rows,
                table: vec![2, 0, 1][..len.div_ceil(PAGE)].to_vec(),
            };
            let qkv = normal(rows * s.row(), 7);
            let vectors = [8, 9].map(|seed| normal(len * kv * dim, seed));
            let mut scales = vec![0.0; 6 * kv * PAGE];
            // [position, head, dim] to pages.
            let mut paged = |which: usize| {
                let mut all = vec![0; 3 * kv * PAGE * dim / 2];
                for (i, head) in vectors[which].chunks_exact(dim).enumerate() {
                    let place = s.place(i % kv, i / kv) / (dim / 2);
                    let (words, scale, _) = kept(head, &heads);
                    all[place * words.len()..][..words.len()].copy_from_slice(&words);
                    scales[2 * place + which] = scale.first().copied().unwrap_or_default();
                }
                words(&gpu, &all)
            };
            let (key_pages, value_pages) = (paged(0), paged(1));
            let scales = gpu.upload("scales", &scales).unwrap();
            let [keys, values] = vectors.map(|v| kept(&v, &heads).2);
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
                    &scales,
                ];
                let grid = Grid {
                    x: splits,
                    y: kv,
                    z: tiles,
                };
                run(&gpu, &attention(heads, tile), &buffers, grid);
                if splits > 1 {
                    let grid = Grid::new(rows, count);
                    run(&gpu, &combine(heads), &buffers[..5], grid);
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
