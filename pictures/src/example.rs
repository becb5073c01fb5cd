//! A picture to measure with.

use crate::error::{Error, Result};
use crate::format::PictureFormat;
use image::codecs::png::PngEncoder;
use image::{ExtendedColorType, ImageEncoder};

/// A PNG file of `width` by `height` pixels, of gradients with some noise, as photographs have them.
pub fn example(width: u32, height: u32) -> Result<Vec<u8>> {
    let mut noise = 1u32;
    let mut levels = Vec::with_capacity(3 * width as usize * height as usize);
    for (y, x) in (0..height).flat_map(|y| (0..width).map(move |x| (y, x))) {
        noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let level = |slope: u32| (slope / 8 % 248 + (noise >> 29)) as u8;
        levels.extend([level(x), level(y), level(x + y)]);
    }
    let mut file = Vec::new();
    let encoder = PngEncoder::new(&mut file);
    let written = encoder.write_image(&levels, width, height, ExtendedColorType::Rgb8);
    match written {
        Ok(()) => Ok(file),
        Err(e) => Err(Error::Decoding {
            format: PictureFormat::Png,
            reason: e.to_string(),
        }),
    }
}
