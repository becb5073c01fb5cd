//! Attention: of one token a sequence, of many, and against the plain kernel.

use super::common::{nmse, normal};
use super::{GUARD, finish, gpu, guarded, is_sanitizing};
use half::f16;
use nq_kernels::cpu::{KvBlock, KvType};
use nq_kernels::cuda::{
    AttentionScratch, AttentionShape, DeviceCache, Gpu, HEAD_DIM, Heads, Row, SequenceRows, Step,
    operand_index,
};
use nq_kernels::reference;

/// One layer's heads, and sequences of random queries, keys and values.
pub(super) struct Case {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) kv: KvType,
    pub(super) gains: [Vec<f32>; 2],
    pub(super) table: Vec<(f32, f32)>,
    pub(super) qkv: Vec<f32>,
    pub(super) len: usize,
}

impl Case {
    pub(super) fn new(heads: usize, kv_heads: usize, kv: KvType, len: usize) -> Self {
        let gain = |seed| -> Vec<f32> {
            normal(HEAD_DIM, seed)
                .iter()
                .map(|v| 1.0 + 0.3 * v)
                .collect()
        };
        let angle = |p: usize, i: usize| p as f64 * 1e6f64.powf(-(i as f64) / 64.0);
        let capacity = len.next_multiple_of(32);
        let table = (0..capacity * HEAD_DIM / 2)
            .map(|k| angle(k / 64, k % 64))
            .map(|a| (a.cos() as f32, a.sin() as f32))
            .collect();
        Case {
            heads,
            kv_heads,
            kv,
            gains: [gain(61), gain(62)],
            table,
            qkv: normal(len * (heads + 2 * kv_heads) * HEAD_DIM, 63),
            len,
        }
    }

    pub(super) fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * HEAD_DIM
    }

    /// Attention of every row over the rows up to it: `[len, heads * 128]`, of the rows listed.
    pub(super) fn expected(&self, rows: &[usize]) -> Vec<f32> {
        let d = HEAD_DIM;
        let group = self.heads / self.kv_heads;
        let mut keys = KvBlock::new(self.kv, self.kv_heads, self.len, d);
        let mut values = keys.clone();
        let rotated = |x: &[f32], gain: &[f32], position: usize| {
            let mut v = vec![0f32; d];
            reference::rms_norm(x, gain, 1e-6, &mut v);
            reference::rope(
                &mut v,
                &self.table[position * d / 2..(position + 1) * d / 2],
            );
            v
        };
        for (position, row) in self.qkv.chunks(self.width()).enumerate() {
            let (k, v) = row[self.heads * d..].split_at(self.kv_heads * d);
            for h in 0..self.kv_heads {
                let head = h * d..(h + 1) * d;
                keys.store(
                    h,
                    position,
                    &rotated(&k[head.clone()], &self.gains[1], position),
                );
                values.store(h, position, &v[head]);
            }
        }
        let mut out = Vec::new();
        for &r in rows {
            for h in 0..self.heads {
                let q = &self.qkv[r * self.width() + h * d..][..d];
                let q = rotated(q, &self.gains[0], r);
                let (mut k, mut v) = (vec![0f32; (r + 1) * d], vec![0f32; (r + 1) * d]);
                for position in 0..=r {
                    keys.load(
                        h / group,
                        position,
                        &mut k[position * d..(position + 1) * d],
                    );
                    values.load(
                        h / group,
                        position,
                        &mut v[position * d..(position + 1) * d],
                    );
                }
                let mut y = vec![0f32; d];
                reference::attend(&q, &k, &v, &mut y);
                out.extend(y);
            }
        }
        out
    }
}

fn check_attention(gpu: &Gpu, case: &Case) {
    let stream = gpu.stream().unwrap();
    let (heads, len, width) = (case.heads, case.len, case.width());
    let name = format!("{} heads {heads}/{} len {len}", case.kv, case.kv_heads);
    let q_gain = gpu.upload("a test", &case.gains[0]).unwrap();
    let k_gain = gpu.upload("a test", &case.gains[1]).unwrap();
    let table: Vec<[f32; 2]> = case.table.iter().map(|&(c, s)| [c, s]).collect();
    let table = gpu.upload("a test", &table).unwrap();
    let settings = Heads {
        heads,
        q_gain: &q_gain,
        k_gain: &k_gain,
        cos_sin: &table,
        eps: 1e-6,
    };
    // Codes may differ by one where rounding is a close call; keys and values then differ by
    // half a step of 1/127 of their greatest.
    let tolerance = if case.kv == KvType::Int8 { 2e-5 } else { 1e-6 };
    const SLOTS: usize = 2;
    let slot = 1;
    let rows: Vec<usize> = (0..len).filter(|r| r % 61 == 0 || r + 3 > len).collect();
    let expected = case.expected(&rows);
    let pick = |all: &[f32], stride: usize| -> Vec<f32> {
        let of = |&r: &usize| all[r * stride..][..heads * HEAD_DIM].to_vec();
        rows.iter().flat_map(of).collect()
    };
    let new_cache = || DeviceCache::new(gpu, case.kv, SLOTS, case.kv_heads, len).unwrap();

    // In two parts, the second at an offset.
    let mut cache = new_cache();
    let mut full = guarded(gpu, &vec![GUARD; len * heads * HEAD_DIM]);
    let padded = (heads * HEAD_DIM).next_multiple_of(256);
    let mut half = gpu.zeros::<u16>("a test", len * padded).unwrap();
    let places: Vec<Row> = (0..len)
        .map(|p| Row {
            position: p as i32,
            slot: slot as i32,
        })
        .collect();
    let cut = len / 3;
    for part in [0..cut, cut..len] {
        if !part.is_empty() {
            let places = gpu.upload("a test", &places[part.clone()]).unwrap();
            let part = part.start * width..part.end * width;
            let mut qkv = gpu.upload("a test", &case.qkv[part.clone()]).unwrap();
            stream
                .append(&mut qkv, &places, &settings, &mut cache, part.len() / width)
                .unwrap();
            stream.synchronize().unwrap();
        }
    }
    // At once: positions that are whole groups of eight take another path.
    let places = gpu.upload("a test", &places).unwrap();
    let mut qkv = gpu.upload("a test", &case.qkv).unwrap();
    let mut at_once = new_cache();
    stream
        .append(&mut qkv, &places, &settings, &mut at_once, len)
        .unwrap();
    stream
        .attention_reference(&qkv, &places, heads, &at_once, &mut full, len)
        .unwrap();
    for (row, count) in [(0, cut), (cut, len - cut)] {
        if count > 0 {
            let sequence = SequenceRows {
                row,
                count,
                position: row,
                slot,
            };
            stream
                .attention_prefill(&qkv, sequence, heads, &cache, &mut half)
                .unwrap();
        }
    }
    let found = finish(&stream, &full);
    let error = nmse(&pick(&found, heads * HEAD_DIM), &expected);
    assert!(error < tolerance, "attention_reference {name}: {error:e}");
    let mut halves = vec![0u16; len * padded];
    half.read(0, &mut halves).unwrap();
    let in_order = |i: usize| f16::from_bits(halves[operand_index(i)]).to_f32();
    let halves: Vec<f32> = (0..halves.len()).map(in_order).collect();
    let error = nmse(&pick(&halves, padded), &expected);
    assert!(
        error < 2.0 * tolerance,
        "attention_prefill {name}: {error:e}"
    );

    // One token after another.
    let mut cache = new_cache();
    let mut scratch = AttentionScratch::new(gpu, heads, case.kv_heads, 1).unwrap();
    let mut out = guarded(gpu, &vec![GUARD; heads * HEAD_DIM]);
    let mut step = gpu.zeros::<Step>("a test", 1).unwrap();
    let mut found = Vec::new();
    for r in 0..len {
        let shape = AttentionShape {
            m: 1,
            splits: AttentionScratch::splits(gpu, case.kv_heads, 1, r + 1),
            late: r % 2 == 0,
        };
        let at = Step {
            position: r as i32,
            slot: slot as i32,
            ..Step::default()
        };
        step.write(0, &[at]).unwrap();
        let row = gpu
            .upload("a test", &case.qkv[r * width..(r + 1) * width])
            .unwrap();
        stream
            .attention_decode(
                &row,
                &step,
                &settings,
                &mut cache,
                &mut scratch,
                &mut out,
                shape,
            )
            .unwrap();
        if rows.contains(&r) {
            let values = finish(&stream, &out);
            found.extend_from_slice(&values);
            // The token that is there already is written again: the same result.
            stream
                .attention_decode(
                    &row,
                    &step,
                    &settings,
                    &mut cache,
                    &mut scratch,
                    &mut out,
                    shape,
                )
                .unwrap();
            assert!(
                values == finish(&stream, &out),
                "attention_decode {name}: not the same again"
            );
        }
    }
    let error = nmse(&found, &expected);
    assert!(error < tolerance, "attention_decode {name}: {error:e}");
}

#[test]
fn attention() {
    let Some(gpu) = gpu() else { return };
    for kv in [KvType::F16, KvType::Int8] {
        for (heads, kv_heads, len) in [
            (2, 2, 5),
            (4, 2, 70),
            (16, 8, 300),
            (5, 1, 130),
            (8, 1, 700),
        ] {
            if len > 130 && is_sanitizing() {
                continue;
            }
            check_attention(&gpu, &Case::new(heads, kv_heads, kv, len));
        }
    }
}
