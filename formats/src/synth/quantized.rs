//! Random quantized weights.

use super::{GOLDEN, WEIGHT_STD, key, mix};
use crate::error::Result;
use crate::pack;
use crate::scheme::{AffineScheme, Levels, Scales, Zeros};
use crate::trellis::{STRIP, TrellisScheme, TrellisWeight};
use crate::weight::{AffineWeight, GroupValues, Parts};
use bytes::Bytes;
use half::f16;
use nq_model::Dims;
use rayon::prelude::*;
use std::sync::Arc;

/// Random bytes that follow from the seed and a name.
fn random_bytes(seed: u64, name: &str, n: usize) -> Vec<u8> {
    let key = key(seed, name);
    let mut out = vec![0u8; n];
    const CHUNK: usize = 1 << 18;
    let chunks = out.par_chunks_mut(CHUNK).enumerate();
    chunks.for_each(|(i, chunk)| {
        for (counter, eight) in ((i * CHUNK / 8) as u64..).zip(chunk.chunks_mut(8)) {
            let random = mix(key.wrapping_add(counter.wrapping_mul(GOLDEN)));
            eight.copy_from_slice(&random.to_le_bytes()[..eight.len()]);
        }
    });
    out
}

/// A random trellis weight of the parameter `name`, drawn with a seed: any words are a path, whose values are close to
/// Gaussian.
///
/// # Errors
/// [`crate::Error::Weight`] for dimensions that the code cannot hold.
pub fn random_trellis(
    seed: u64,
    name: &str,
    Dims { rows, cols }: Dims,
    scheme: TrellisScheme,
) -> Result<TrellisWeight> {
    scheme.check(Dims::new(rows, cols))?;
    let bytes = |what: &str, n: usize| random_bytes(seed, &format!("{name} {what}"), n);
    // The deviation of a sum of four uniform bytes, of a pair's first too: 1 + 1/2 + 1/2 of a byte's variance.
    let bytes_of_value = if scheme.code().width() == 1 { 4.0 } else { 2.0 };
    let deviation = f64::sqrt(bytes_of_value * (256.0 * 256.0 - 1.0) / 12.0) / 128.0;
    let near = |byte: u8| {
        let scale = WEIGHT_STD / deviation * (0.75 + f64::from(byte) / 512.0);
        f16::from_f64(scale)
    };
    let sign = |byte: u8| f16::from_f32(if byte & 1 == 0 { 1.0 } else { -1.0 });
    let words = rows.div_ceil(STRIP) * scheme.strip_bytes(cols);
    TrellisWeight::new(
        scheme,
        Dims::new(rows, cols),
        bytes("codes", words).into(),
        bytes("scales", rows).into_iter().map(near).collect(),
        // Weights of the same inputs share their signs, as those that nq makes.
        random_bytes(seed, "input scales", cols)
            .into_iter()
            .map(sign)
            .collect(),
    )
}

/// The random parameter `name` `[rows, cols]` of a model drawn with `seed`, quantized.
///
/// # Errors
/// [`crate::Error::Scheme`] for empty groups.
pub fn random_quantized(
    seed: u64,
    name: &str,
    Dims { rows, cols }: Dims,
    scheme: AffineScheme,
) -> Result<AffineWeight> {
    scheme.check()?;
    let groups = scheme.group.count(cols);
    let bytes = |what: &str, n: usize| random_bytes(seed, &format!("{name} {what}"), n);
    // The deviation of uniform codes; the scale turns it into that of weights.
    let values = scheme.value_bits();
    let codes = 1u32 << values.width();
    let scale = WEIGHT_STD / ((f64::from(codes) * f64::from(codes) - 1.0) / 12.0).sqrt();
    let mid = values.midpoint();
    let (scales, of_offset) = match scheme.scales {
        Scales::Half => {
            let near = |byte: u8| f16::from_f64(scale * (0.75 + f64::from(byte) / 512.0));
            let scales: Arc<[f16]> = (bytes("scales", rows * groups).into_iter())
                .map(near)
                .collect();
            let offset = |s: &f16| f16::from_f32(-s.to_f32() * f32::from(mid));
            let offsets = scales.iter().map(offset).collect();
            (GroupValues::Half(scales), GroupValues::Half(offsets))
        }
        Scales::TwoLevel(two) => {
            // Integers in the upper quarter of their range, for scales of either kind.
            let (bits, least) = (two.bits, two.bits.max_code() - two.bits.max_code() / 4);
            let mut small = bytes("scales", rows * groups);
            let spread = bits.max_code() - least + 1;
            small.iter_mut().for_each(|b| *b = least + *b % spread);
            let small = Bytes::from(pack::pack_rows(bits, &small, groups));
            let signed = scheme.zeros == Zeros::None;
            let middle = if signed { bits.midpoint() } else { 0 };
            let of_span = scale / f64::from(least + spread / 2 - middle);
            let spans = rows * two.span.count(cols);
            let kept = |of_span: f64| GroupValues::TwoLevel {
                small: small.clone(),
                of_spans: vec![f16::from_f64(of_span); spans].into(),
            };
            (kept(of_span), kept(-of_span * f64::from(mid)))
        }
    };
    let zeros = (scheme.zeros == Zeros::Integer).then(|| {
        let mut z = bytes("zeros", rows * groups);
        z.iter_mut().for_each(|b| *b = mid - 2 + *b % 4);
        pack::pack_rows(values, &z, groups).into()
    });
    // Levels across the whole range.
    let most = u32::from(scheme.bits.max_code());
    let level = |i: u32| (i * u32::from(values.max_code()) / most) as u8;
    let parts = Parts {
        codes: bytes("codes", rows * scheme.bits.bytes(cols)).into(),
        scales,
        zeros,
        offsets: (scheme.zeros == Zeros::Offset).then_some(of_offset),
        levels: (scheme.levels == Levels::Table).then(|| (0..=most).map(level).collect()),
        g_idx: None,
    };
    AffineWeight::assemble(scheme, Dims::new(rows, cols), parts)
}
