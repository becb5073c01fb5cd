//! From a file's bytes to 8-bit red, green and blue, upright and without transparency.

use crate::error::{Error, Result};
use crate::format::PictureFormat;
use image::metadata::Orientation;
use image::{DynamicImage, ImageBuffer, ImageDecoder, ImageFormat, ImageReader, Luma, LumaA};
use image::{Pixel, Rgb, Rgba};
use std::io::{BufRead, Cursor, Read, Seek, SeekFrom};

/// Times that one side of a picture may be the other, as transformers has it.
const MOST_RATIO: u32 = 200;

/// Bytes that a decoder may fill for one picture: 2^26 pixels of 8 bytes.
const MOST_MEMORY: u64 = 512 << 20;

/// What a picture may take before it is decoded.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a file.
    pub bytes: usize,
    /// Pixels, by the file's header.
    pub pixels: u64,
}

impl Default for Limits {
    /// 20 MB, and 67 million pixels.
    fn default() -> Self {
        Self {
            bytes: 20_000_000,
            pixels: 1 << 26,
        }
    }
}

/// What a file says about its picture before it is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Its format, by its content.
    pub format: PictureFormat,
    /// Pixels of a row, once it is upright.
    pub width: u32,
    /// Number of rows, once it is upright.
    pub height: u32,
}

/// A decoded picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pixels {
    /// Pixels of a row.
    pub width: usize,
    /// Number of rows.
    pub height: usize,
    /// `[height width][red green blue]`.
    pub levels: Vec<u8>,
}

/// The format and the upright size of the picture in `bytes`, which are held against `limits`.
pub fn header(bytes: &[u8], limits: &Limits) -> Result<Header> {
    Ok(open(bytes, limits, &|| false)?.header)
}

/// Decodes the first picture in `bytes`: upright by its EXIF orientation, transparent pixels over white, of 16 bits
/// the upper 8, colours as they stand whatever their profile. `stop` is asked now and then and ends the work.
pub fn decode(bytes: &[u8], limits: &Limits, stop: &dyn Fn() -> bool) -> Result<Pixels> {
    let OpenedPicture {
        header,
        orientation,
        decoder,
    } = open(bytes, limits, stop)?;
    let format = header.format;
    if format == PictureFormat::Jpeg && !jpeg_ends(bytes) {
        return Err(Error::Truncated);
    }
    let found = decoder.total_bytes();
    if found > MOST_MEMORY {
        return Err(Error::Memory {
            found,
            limit: MOST_MEMORY,
        });
    }
    let picture = DynamicImage::from_decoder(decoder);
    check(stop)?;
    let picture = in_8_bits(picture.map_err(|e| refused(format, &e))?);
    check(stop)?;
    let mut picture = opaque(picture);
    check(stop)?;
    picture.apply_orientation(orientation);
    check(stop)?;
    let picture = picture.into_rgb8();
    Ok(Pixels {
        width: picture.width() as usize,
        height: picture.height() as usize,
        levels: picture.into_raw(),
    })
}

/// An error once `stop` says so: asked between steps that go over all pixels.
pub(crate) fn check(stop: &dyn Fn() -> bool) -> Result<()> {
    match stop() {
        true => Err(Error::Stopped),
        false => Ok(()),
    }
}

struct OpenedPicture<'a> {
    header: Header,
    orientation: Orientation,
    decoder: Box<dyn ImageDecoder + 'a>,
}

/// Reads the header of the picture in `bytes`.
fn open<'a>(
    bytes: &'a [u8],
    limits: &Limits,
    stop: &'a dyn Fn() -> bool,
) -> Result<OpenedPicture<'a>> {
    if bytes.len() > limits.bytes {
        return Err(Error::Bytes {
            found: bytes.len(),
            limit: limits.bytes,
        });
    }
    let found = image::guess_format(bytes);
    let format = match found {
        Ok(ImageFormat::Png) => PictureFormat::Png,
        Ok(ImageFormat::Jpeg) => PictureFormat::Jpeg,
        Ok(ImageFormat::WebP) => PictureFormat::WebP,
        Ok(ImageFormat::Gif) => PictureFormat::Gif,
        Ok(ImageFormat::Bmp) => PictureFormat::Bmp,
        Ok(other) => return Err(Error::Format(format!("{other:?}"))),
        Err(_) => return Err(Error::Format(beginning(bytes))),
    };
    let say = |e| refused(format, &e);
    let bytes = Cursor::new(bytes);
    let mut reader = ImageReader::new(Stoppable { bytes, stop });
    reader.set_format(found.map_err(say)?);
    let mut inner = image::Limits::default();
    inner.max_alloc = Some(MOST_MEMORY);
    reader.limits(inner);
    let mut decoder = reader.into_decoder().map_err(say)?;
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > limits.pixels {
        return Err(Error::Pixels {
            width,
            height,
            limit: limits.pixels,
        });
    }
    if width == 0 || height == 0 || width.max(height) > width.min(height).saturating_mul(MOST_RATIO)
    {
        return Err(Error::Ratio {
            width,
            height,
            limit: MOST_RATIO,
        });
    }
    let orientation = decoder.orientation().map_err(say)?;
    let turned = matches!(
        orientation,
        Orientation::Rotate90
            | Orientation::Rotate270
            | Orientation::Rotate90FlipH
            | Orientation::Rotate270FlipH
    );
    let (width, height) = if turned {
        (height, width)
    } else {
        (width, height)
    };
    Ok(OpenedPicture {
        header: Header {
            format,
            width,
            height,
        },
        orientation,
        decoder: Box::new(decoder),
    })
}

fn refused(format: PictureFormat, e: &image::ImageError) -> Error {
    match e {
        image::ImageError::IoError(e) if e.kind() == std::io::ErrorKind::TimedOut => Error::Stopped,
        other => Error::Decoding {
            format,
            reason: other.to_string(),
        },
    }
}

/// The first bytes of what is no picture, for an error.
fn beginning(bytes: &[u8]) -> String {
    match bytes {
        [] => "nothing".into(),
        _ => format!(
            "bytes that begin with {:02x?}",
            &bytes[..bytes.len().min(8)]
        ),
    }
}

/// A file in memory that ends with an error once `stop` says so: decoders ask for bytes all the time.
struct Stoppable<'a> {
    bytes: Cursor<&'a [u8]>,
    stop: &'a dyn Fn() -> bool,
}

impl Stoppable<'_> {
    fn check(&self) -> std::io::Result<()> {
        if (self.stop)() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        Ok(())
    }
}

impl Read for Stoppable<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.check()?;
        self.bytes.read(buffer)
    }
}

impl BufRead for Stoppable<'_> {
    fn fill_buf(&mut self) -> std::io::Result<&[u8]> {
        self.check()?;
        self.bytes.fill_buf()
    }

    fn consume(&mut self, amount: usize) {
        self.bytes.consume(amount);
    }
}

impl Seek for Stoppable<'_> {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.bytes.seek(to)
    }
}

/// Whether a JPEG file has the marker of its end behind its last scan. Decoders of JPEG take what is missing for gray.
fn jpeg_ends(bytes: &[u8]) -> bool {
    let mut at = 2;
    let mut scanned = false;
    while let Some(&[lead, marker]) = bytes.get(at..at + 2) {
        let stuffed = marker == 0x00 || (0xD0..=0xD7).contains(&marker);
        if lead != 0xFF || marker == 0xFF || stuffed {
            // Between segments only fill bytes are expected; in a scan everything else is its data.
            at += if stuffed && lead == 0xFF { 2 } else { 1 };
            continue;
        }
        if marker == 0xD9 {
            return scanned;
        }
        scanned |= marker == 0xDA;
        let Some(&[high, low]) = bytes.get(at + 2..at + 4) else {
            return false;
        };
        at += 2 + usize::from(u16::from_be_bytes([high, low]));
    }
    false
}

/// The upper 8 bits of pictures of 16.
fn in_8_bits(picture: DynamicImage) -> DynamicImage {
    fn upper<P, Q>(picture: &ImageBuffer<P, Vec<u16>>) -> ImageBuffer<Q, Vec<u8>>
    where
        P: Pixel<Subpixel = u16>,
        Q: Pixel<Subpixel = u8>,
    {
        ImageBuffer::from_fn(picture.width(), picture.height(), |x, y| {
            let levels = picture.get_pixel(x, y).channels();
            let upper: [u8; 4] =
                std::array::from_fn(|c| levels.get(c).map_or(0, |l| (l >> 8) as u8));
            *Q::from_slice(&upper[..levels.len()])
        })
    }
    match picture {
        DynamicImage::ImageLuma16(p) => upper::<Luma<u16>, Luma<u8>>(&p).into(),
        DynamicImage::ImageLumaA16(p) => upper::<LumaA<u16>, LumaA<u8>>(&p).into(),
        DynamicImage::ImageRgb16(p) => upper::<Rgb<u16>, Rgb<u8>>(&p).into(),
        DynamicImage::ImageRgba16(p) => upper::<Rgba<u16>, Rgba<u8>>(&p).into(),
        other => other,
    }
}

/// Transparent pixels over white, in Pillow's fixed point.
fn opaque(picture: DynamicImage) -> DynamicImage {
    if !picture.color().has_alpha() {
        return picture;
    }
    let picture = picture.into_rgba8();
    let over_white = |x, y| {
        let Rgba([red, green, blue, alpha]) = *picture.get_pixel(x, y);
        Rgb([red, green, blue].map(|level| {
            let share = u32::from(alpha) << 7;
            let sum = u32::from(level) * share + 255 * ((255 << 7) - share) + (0x80 << 7);
            ((((sum >> 8) + sum) >> 8) >> 7) as u8
        }))
    };
    ImageBuffer::from_fn(picture.width(), picture.height(), over_white).into()
}
