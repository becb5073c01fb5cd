//! Bicubic resizing with antialias, as torchvision does it for 8-bit pictures: rows of pixels are made wide first,
//! then columns high, with 8 bits between and weights in fixed point. Pillow's differ by their 22 bits of weights.

use crate::decode::check;
use crate::{Pixels, Result};
use nq_model::vision::CHANNELS;

/// The cubic's sharpness, as Pillow and torch have it for pictures.
const A: f64 = -0.5;

/// What one output pixel takes of one line of pixels.
struct Taps {
    /// The first input pixel.
    first: usize,
    /// Weights of that and the following ones.
    weights: Vec<i16>,
}

/// `picture` in `width` by `height` pixels, whatever its proportions. `stop` is asked row by row.
pub(crate) fn resize(
    picture: Pixels,
    width: usize,
    height: usize,
    stop: &dyn Fn() -> bool,
) -> Result<Pixels> {
    let wide = if width == picture.width {
        picture
    } else {
        across(&picture, width, stop)?
    };
    if height == wide.height {
        return Ok(wide);
    }
    down(&wide, height, stop)
}

/// Every row in `width` pixels.
fn across(picture: &Pixels, width: usize, stop: &dyn Fn() -> bool) -> Result<Pixels> {
    let (taps, bits) = taps(picture.width, width);
    let mut levels = Vec::with_capacity(picture.height * width * CHANNELS);
    for row in picture.levels.chunks_exact(picture.width * CHANNELS) {
        check(stop)?;
        for Taps { first, weights } in &taps {
            let mut sums = [1 << (bits - 1); CHANNELS];
            for (pixel, &weight) in row[first * CHANNELS..].chunks_exact(CHANNELS).zip(weights) {
                for (sum, &level) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(level) * i32::from(weight);
                }
            }
            levels.extend(sums.map(|sum| (sum >> bits).clamp(0, 255) as u8));
        }
    }
    Ok(Pixels {
        width,
        height: picture.height,
        levels,
    })
}

/// Every column in `height` pixels.
fn down(picture: &Pixels, height: usize, stop: &dyn Fn() -> bool) -> Result<Pixels> {
    let (taps, bits) = taps(picture.height, height);
    let row = picture.width * CHANNELS;
    let mut levels = Vec::with_capacity(row * height);
    let mut sums = vec![0i32; row];
    for Taps { first, weights } in &taps {
        check(stop)?;
        sums.fill(1 << (bits - 1));
        for (line, &weight) in picture.levels[first * row..].chunks_exact(row).zip(weights) {
            for (sum, &level) in sums.iter_mut().zip(line) {
                *sum += i32::from(level) * i32::from(weight);
            }
        }
        levels.extend(sums.iter().map(|sum| (sum >> bits).clamp(0, 255) as u8));
    }
    Ok(Pixels {
        width: picture.width,
        height,
        levels,
    })
}

/// Weights for `to` pixels out of `from`, and the number of bits that they are scaled by: as many as the largest
/// weight leaves of 16.
fn taps(from: usize, to: usize) -> (Vec<Taps>, u32) {
    let scale = from as f64 / to as f64;
    let stretch = scale.max(1.0);
    let support = 2.0 * stretch;
    let lines = (0..to).map(|at| {
        let centre = scale * (at as f64 + 0.5);
        let first = (centre - support + 0.5).max(0.0) as usize;
        let end = ((centre + support + 0.5) as usize).min(from);
        let weight = |pixel| cubic((pixel as f64 - centre + 0.5) / stretch);
        let weights: Vec<f64> = (first..end).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        (first, weights.into_iter().map(|w| w / sum).collect())
    });
    let lines: Vec<(usize, Vec<f64>)> = lines.collect();
    let largest = lines.iter().flat_map(|(_, weights)| weights);
    let largest = largest.copied().fold(0.0, f64::max);
    let fits = |bits: &u32| (0.5 + largest * f64::from(1 << (bits + 1))) as i32 >= 1 << 15;
    let bits = (0..22).find(fits).unwrap_or(22);
    let one = f64::from(1 << bits);
    let taps = lines.into_iter().map(|(first, weights)| Taps {
        first,
        weights: weights.iter().map(|w| (w * one).round() as i16).collect(),
    });
    (taps.collect(), bits)
}

/// The cubic of Keys (1981) with [`A`].
fn cubic(x: f64) -> f64 {
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}
