//! The formats of pictures.

use std::fmt;

/// The formats that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PictureFormat {
    /// Also animated ones, whose first picture counts.
    Png,
    /// With any subsampling, progressive ones, in gray and in CMYK.
    Jpeg,
    /// Lossy and lossless; the first picture counts.
    WebP,
    /// The first picture counts.
    Gif,
    /// Windows bitmaps.
    Bmp,
}

impl PictureFormat {
    /// Its name on the web.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::WebP => "image/webp",
            Self::Gif => "image/gif",
            Self::Bmp => "image/bmp",
        }
    }
}

impl fmt::Display for PictureFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
            Self::Bmp => "BMP",
        })
    }
}
