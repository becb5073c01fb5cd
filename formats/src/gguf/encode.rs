//! Rounds rows of f32 to GGUF blocks.
//!
//! Scales are searched: for several candidate ranges the codes are rounded and the scale (and
//! minimum) refitted to them by least squares, and the pair with the least squared error is kept.
//! Scales are rounded to their stored form before codes are rounded for the last time.

use super::affine::scales_and_minima;
use crate::blocks::{BlockBuffers, BlockType};
use crate::error::{Error, Result};
use half::f16;

/// Block types that [`encode_row`] can write.
pub(crate) const ENCODED: [BlockType; 9] = [
    BlockType::F32,
    BlockType::F16,
    BlockType::BF16,
    BlockType::Q4_0,
    BlockType::Q4_1,
    BlockType::Q5_0,
    BlockType::Q8_0,
    BlockType::Q4_K,
    BlockType::Q6_K,
];

/// Appends the blocks of `row`, which must be a whole number of blocks, to `out`.
///
/// # Errors
/// [`Error::Weight`] for a type that is not among `ENCODED`, a value that is not finite, or one for which the type has no
/// scale.
pub fn encode_row(kind: BlockType, row: &[f32], out: &mut Vec<u8>) -> Result<()> {
    if let Some(i) = row.iter().position(|v| !v.is_finite()) {
        return Err(Error::Weight {
            what: "values",
            expected: "finite numbers".into(),
            found: format!("{} in column {i}", row[i]),
        });
    }
    let encode: fn(&[f32], &mut Vec<u8>) = match kind {
        BlockType::F32 => |x, out| x.iter().for_each(|v| out.extend(v.to_le_bytes())),
        BlockType::F16 => |x, out| x.iter().for_each(|v| put_f16(out, *v)),
        BlockType::BF16 => |x, out| {
            x.iter()
                .for_each(|v| out.extend(half::bf16::from_f32(*v).to_le_bytes()))
        },
        BlockType::Q4_0 => q4_0,
        BlockType::Q4_1 => q4_1,
        BlockType::Q5_0 => q5_0,
        BlockType::Q8_0 => q8_0,
        BlockType::Q4_K => q4_k,
        BlockType::Q6_K => q6_k,
        other => {
            return Err(Error::Weight {
                what: "block type",
                expected: format!("one of {}", ENCODED.map(BlockType::name).join(", ")),
                found: other.name().into(),
            });
        }
    };
    let start = out.len();
    row.chunks_exact(kind.elements())
        .for_each(|block| encode(block, out));
    let greatest = |a: &usize, b: &usize| row[*a].abs().total_cmp(&row[*b].abs());
    match (0..row.len()).max_by(greatest) {
        // An f16 that holds no such number, or no such scale, is infinite.
        Some(i) if row[i].abs() > f16::MAX.to_f32() && !is_finite(kind, &out[start..]) => {
            Err(Error::Weight {
                what: "values",
                expected: format!("numbers that {} can hold", kind.name()),
                found: format!("{:e} in column {i}", row[i]),
            })
        }
        _ => Ok(()),
    }
}

/// True if blocks hold finite values alone.
fn is_finite(kind: BlockType, blocks: &[u8]) -> bool {
    let Some(layout) = kind.layout() else {
        let halves = blocks.as_chunks::<2>().0.iter();
        return kind != BlockType::F16
            || halves.copied().all(|h| f16::from_le_bytes(h).is_finite());
    };
    let (mut scratch, mut values) = (BlockBuffers::default(), vec![0.0; kind.elements()]);
    blocks.chunks_exact(kind.bytes()).all(|block| {
        layout.dequantize(block, &mut scratch, &mut values);
        values.iter().all(|v| v.is_finite())
    })
}

fn put_f16(out: &mut Vec<u8>, v: f32) {
    out.extend(f16::from_f32(v).to_le_bytes());
}

/// The value rounded to f16.
fn as_f16(v: f32) -> f32 {
    f16::from_f32(v).to_f32()
}

/// `x / s` rounded to the nearest integer within `low ..= high`; `low.max(0)` if `s` is 0.
fn code(x: f32, s: f32, low: i32, high: i32) -> i32 {
    match s {
        0.0 => 0.clamp(low, high),
        s => nearest(x / s, low as f32, high as f32) as i32,
    }
}

/// The nearest integer to `v` within `low ..= high`, which are small; of two, the even one. Unlike
/// `round_ties_even`, this is no call on processors without an instruction for it.
fn nearest(v: f32, low: f32, high: f32) -> f32 {
    // From here on, neighbouring f32 values are 1 apart.
    const WHOLE: f32 = (3 << 22) as f32;
    (v.clamp(low, high) + WHOLE) - WHOLE
}

/// Values whose sums are taken side by side, which processors do at once; groups are multiples of it.
const LANES: usize = 8;

/// The sums over `x` of the `N` terms that `term` gives for a value.
fn sums<const N: usize>(x: &[f32], term: impl Fn(f32) -> [f32; N]) -> [f32; N] {
    let mut lanes = [[0f32; LANES]; N];
    for values in x.chunks_exact(LANES) {
        for (i, &v) in values.iter().enumerate() {
            let terms = term(v);
            for (lane, term) in lanes.iter_mut().zip(terms) {
                lane[i] += term;
            }
        }
    }
    lanes.map(|lane| lane.iter().sum())
}

/// Packs 32 codes: low nibbles hold the first half, high nibbles the second.
fn put_nibbles(out: &mut Vec<u8>, codes: &[u8]) {
    let (low, high) = codes.split_at(codes.len() / 2);
    out.extend(low.iter().zip(high).map(|(l, h)| l & 15 | h << 4));
}

fn q8_0(x: &[f32], out: &mut Vec<u8>) {
    let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let d = as_f16(largest / 127.0);
    put_f16(out, d);
    out.extend(x.iter().map(|&v| code(v, d, -127, 127) as i8 as u8));
}

fn q4_0(x: &[f32], out: &mut Vec<u8>) {
    let d = as_f16(symmetric_scale(x, 8));
    put_f16(out, d);
    let codes: Vec<u8> = x.iter().map(|&v| (code(v, d, -8, 7) + 8) as u8).collect();
    put_nibbles(out, &codes);
}

fn q5_0(x: &[f32], out: &mut Vec<u8>) {
    let d = as_f16(symmetric_scale(x, 16));
    put_f16(out, d);
    let codes: Vec<u8> = x
        .iter()
        .map(|&v| (code(v, d, -16, 15) + 16) as u8)
        .collect();
    let high = |bits, (i, q): (usize, &u8)| bits | u32::from(q >> 4) << i;
    out.extend(codes.iter().enumerate().fold(0, high).to_le_bytes());
    put_nibbles(out, &codes);
}

fn q4_1(x: &[f32], out: &mut Vec<u8>) {
    let (s, o) = affine_fit(x, false);
    let (d, m) = (as_f16(s), as_f16(o));
    put_f16(out, d);
    put_f16(out, m);
    let codes: Vec<u8> = x.iter().map(|&v| code(v - m, d, 0, 15) as u8).collect();
    put_nibbles(out, &codes);
}

/// The scale, of either sign, with the least squared error for codes `-half .. half`.
fn symmetric_scale(x: &[f32], half: i32) -> f32 {
    let extreme = x
        .iter()
        .fold(0f32, |m, &v| if v.abs() > m.abs() { v } else { m });
    if extreme == 0.0 {
        return 0.0;
    }
    let (mut best, mut gain) = (0.0, f32::NEG_INFINITY);
    for step in -9..=9 {
        // Maps the extreme value to -half, or up to 0.9 of a step to either side.
        let s = extreme / -(half as f32 + 0.1 * step as f32);
        let (low, high) = (-half as f32, (half - 1) as f32);
        let [xq, qq] = sums(x, |v| {
            let q = nearest(v / s, low, high);
            [v * q, q * q]
        });
        // After refitting the scale to these codes, the error is sum(x^2) - xq^2 / qq.
        if qq > 0.0 && xq * xq / qq > gain {
            gain = xq * xq / qq;
            best = xq / qq;
        }
    }
    best
}

/// Scale and offset of `s * q + o`, q in 0 to 15, with the least squared error found; with
/// `below_zero`, o is at most 0.
fn affine_fit(x: &[f32], below_zero: bool) -> (f32, f32) {
    let fold = |f: fn(f32, f32) -> f32| x.iter().copied().fold(x[0], f);
    let (mut low, high) = (fold(f32::min), fold(f32::max));
    if below_zero {
        low = low.min(0.0);
    }
    if high <= low {
        return (0.0, low);
    }
    let n = x.len() as f32;
    let (mut best, mut least) = ((0.0, low), f32::INFINITY);
    for step in 0..=20 {
        // Ranges from 1.07 times that of the values down to 0.83 of it: clipping pays.
        let s = (high - low) / (14.0 + 0.2 * step as f32);
        let [q1, q2, x1, xq] = sums(x, |v| {
            let q = nearest((v - low) / s, 0.0, 15.0);
            [q, q * q, v, v * q]
        });
        let determinant = n * q2 - q1 * q1;
        if determinant <= 0.0 {
            continue;
        }
        let mut s = (n * xq - q1 * x1) / determinant;
        let mut o = (x1 - s * q1) / n;
        if below_zero && o > 0.0 {
            (s, o) = (xq / q2, 0.0);
        }
        let error = error(x, s, o);
        if error < least {
            least = error;
            best = (s, o);
        }
    }
    best
}

/// Squared distance of `x` from the nearest values `s * q + o`, q in 0 to 15.
fn error(x: &[f32], s: f32, o: f32) -> f32 {
    let [error] = match s {
        0.0 => sums(x, |v| [(o - v) * (o - v)]),
        s => sums(x, |v| {
            let e = s * nearest((v - o) / s, 0.0, 15.0) + o - v;
            [e * e]
        }),
    };
    error
}

/// Candidates for a small integer near `v`: the nearest and its neighbours.
fn near(v: f32, low: i32, high: i32) -> impl Iterator<Item = i32> + Clone {
    let middle = (v.round_ties_even() as i32).clamp(low, high);
    (middle - 1..=middle + 1).filter(move |c| (low..=high).contains(c))
}

/// `a / b`, or 0 if `b` is 0.
fn ratio(a: f32, b: f32) -> f32 {
    if b == 0.0 { 0.0 } else { a / b }
}

fn q4_k(x: &[f32], out: &mut Vec<u8>) {
    let groups: Vec<&[f32]> = x.chunks_exact(32).collect();
    let fits: Vec<(f32, f32)> = groups.iter().map(|g| affine_fit(g, true)).collect();
    let largest = |f: fn(&(f32, f32)) -> f32| fits.iter().map(f).fold(0f32, f32::max);
    let d = as_f16(largest(|f| f.0) / 63.0);
    let dmin = as_f16(largest(|f| -f.1) / 63.0);
    let (mut scales, mut minimums) = ([0u8; 8], [0u8; 8]);
    let mut codes = Vec::with_capacity(256);
    for (j, (group, &(s, o))) in groups.iter().zip(&fits).enumerate() {
        let minima = near(ratio(-o, dmin), 0, 63);
        let (mut best, mut least) = ((0, 0), f32::INFINITY);
        for sc in near(ratio(s, d), 0, 63) {
            for m in minima.clone() {
                let (s, o) = (d * sc as f32, -(dmin * m as f32));
                let error = error(group, s, o);
                if error < least {
                    (best, least) = ((sc, m), error);
                }
            }
        }
        let (sc, m) = (best.0 as u8, best.1 as u8);
        (scales[j], minimums[j]) = (sc, m);
        let (s, o) = (d * f32::from(sc), -(dmin * f32::from(m)));
        codes.extend(group.iter().map(|&v| code(v - o, s, 0, 15) as u8));
    }
    put_f16(out, d);
    put_f16(out, dmin);
    out.extend(scales_and_minima(scales, minimums));
    codes.chunks_exact(64).for_each(|c| put_nibbles(out, c));
}

fn q6_k(x: &[f32], out: &mut Vec<u8>) {
    let groups: Vec<&[f32]> = x.chunks_exact(16).collect();
    let scales: Vec<f32> = groups.iter().map(|g| symmetric_scale(g, 32)).collect();
    let extreme = scales
        .iter()
        .fold(0f32, |m, &s| if s.abs() > m.abs() { s } else { m });
    let d = as_f16(extreme / -128.0);
    let mut bytes = [0u8; 16];
    let mut codes = Vec::with_capacity(256);
    for ((group, &s), byte) in groups.iter().zip(&scales).zip(&mut bytes) {
        let (mut best, mut least) = (0, f32::INFINITY);
        for sc in near(ratio(s, d), -128, 127) {
            let s = d * sc as f32;
            let [error] = sums(group, |v| {
                let e = s * code(v, s, -32, 31) as f32 - v;
                [e * e]
            });
            if error < least {
                (best, least) = (sc, error);
            }
        }
        *byte = best as i8 as u8;
        let s = d * best as f32;
        codes.extend(group.iter().map(|&v| (code(v, s, -32, 31) + 32) as u8));
    }
    // Per half of 128: nibbles of elements l and l + 64 share a byte, the high crumbs of
    // l, l + 32, l + 64 and l + 96 another.
    let halves = || codes.chunks_exact(128);
    halves().for_each(|half| put_nibbles(out, half));
    for half in halves() {
        out.extend((0..32).map(|l| (0..4).fold(0, |b, k| b | half[l + 32 * k] >> 4 << (2 * k))));
    }
    out.extend(bytes);
    put_f16(out, d);
}
