//! The size that a model takes a picture in, and the patches that it is cut into.

use crate::decode::check;
use crate::resize::resize;
use crate::{Header, Limits, Pixels, Result, decode};
use nq_model::vision::{CHANNELS, Grid, Patches, VisionConfig};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// What a digest begins with; it changes with the values that are made of a file.
const VERSION: &[u8] = b"nq-pictures 1";

/// The patches that the picture with `header` becomes: its size rounded to whole squares of patches, within the least
/// and most pixels of `model`, and of `most_tokens` rows for the text model at most. Transformers' `smart_resize`.
pub fn grid(header: &Header, model: &VisionConfig, most_tokens: u64) -> Grid {
    let side = (model.patch_size * model.spatial_merge_size) as f64;
    let most = model
        .pixels
        .most
        .min(most_tokens.saturating_mul(side as u64 * side as u64)) as f64;
    let least = (model.pixels.least as f64).min(most);
    let (height, width) = (f64::from(header.height), f64::from(header.width));
    // Python rounds halves to the even neighbour.
    let squares = |pixels: f64| (pixels / side).round_ties_even();
    let (mut h, mut w) = (squares(height), squares(width));
    if h * w * side * side > most {
        let times = (height * width / most).sqrt();
        h = (height / times / side).floor().max(1.0);
        w = (width / times / side).floor().max(1.0);
    } else if h * w * side * side < least {
        let times = (least / (height * width)).sqrt();
        h = (height * times / side).ceil();
        w = (width * times / side).ceil();
    }
    Grid {
        t: 1,
        h: h as usize * model.spatial_merge_size,
        w: w as usize * model.spatial_merge_size,
    }
}

/// Decodes the picture in `bytes` and cuts it into the patches that the tower of `model` takes, as many as [`grid`]
/// says. `stop` is asked now and then and ends the work.
pub fn patches(
    bytes: &[u8],
    model: &VisionConfig,
    most_tokens: u64,
    limits: &Limits,
    stop: &dyn Fn() -> bool,
) -> Result<Patches> {
    let grid = grid(&crate::header(bytes, limits)?, model, most_tokens);
    let patch = model.patch_size;
    let picture = decode(bytes, limits, stop)?;
    let picture = resize(picture, grid.w * patch, grid.h * patch, stop)?;
    check(stop)?;
    let (digest, rows) = rayon::join(|| digest(&picture, model), || rows(&picture, grid, model));
    Ok(Patches { grid, digest, rows })
}

/// Tells files and the sizes in which they are seen apart, before anything is decoded.
pub fn key(bytes: &[u8], grid: Grid) -> [u8; 32] {
    let mut digest = Sha256::new_with_prefix(VERSION);
    [grid.h, grid.w]
        .iter()
        .for_each(|n| digest.update((*n as u64).to_le_bytes()));
    digest.update(bytes);
    digest.finalize().into()
}

fn rows(picture: &Pixels, grid: Grid, model: &VisionConfig) -> Vec<f32> {
    let (patch, of_channel) = (model.patch_size, model.patch_values() / CHANNELS);
    let values: [Vec<f32>; CHANNELS] = std::array::from_fn(|c| {
        let (mean, std) = (model.pixels.mean[c] * 255.0, model.pixels.std[c] * 255.0);
        (0..=255u8)
            .map(|level| (f32::from(level) - mean) / std)
            .collect()
    });
    let places: Vec<(usize, usize)> = grid.places(model.spatial_merge_size).collect();
    let mut rows = vec![0.0; grid.patches() * model.patch_values()];
    let each = rows.par_chunks_exact_mut(model.patch_values());
    each.zip(places).for_each(|(row, (y, x))| {
        for (c, (row, values)) in row.chunks_exact_mut(of_channel).zip(&values).enumerate() {
            let (first, others) = row.split_at_mut(patch * patch);
            for (line, to) in first.chunks_exact_mut(patch).enumerate() {
                let at = ((y * patch + line) * picture.width + x * patch) * CHANNELS;
                let levels = picture.levels[at..at + patch * CHANNELS].as_chunks::<CHANNELS>();
                for (to, level) in to.iter_mut().zip(levels.0) {
                    *to = values[usize::from(level[c])];
                }
            }
            // A picture that does not move: every frame is the first.
            let others = others.chunks_exact_mut(patch * patch);
            others.for_each(|other| other.copy_from_slice(first));
        }
    });
    rows
}

fn digest(picture: &Pixels, model: &VisionConfig) -> [u8; 32] {
    let mut digest = Sha256::new_with_prefix(VERSION);
    let sizes = [
        picture.width,
        picture.height,
        model.patch_size,
        model.spatial_merge_size,
    ];
    sizes
        .iter()
        .for_each(|s| digest.update((*s as u64).to_le_bytes()));
    let values = model.pixels.mean.iter().chain(&model.pixels.std);
    values.for_each(|v| digest.update(v.to_bits().to_le_bytes()));
    digest.update(&picture.levels);
    digest.finalize().into()
}
