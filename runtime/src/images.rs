//! The images of a sequence: which rows take the place of embeddings, and where tokens then stand.

use crate::error::{Error, Result};
use crate::interface::PlacedImage;
use nq_model::vision::ImageTokens;
use std::ops::Range;

/// Time, row and column of a token: equal in text, where they count tokens.
pub type Coordinates = [usize; 3];

/// The images of a sequence, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequenceImages {
    placed: Vec<PlacedImage>,
    hidden: usize,
}

impl SequenceImages {
    /// Images for a model whose stream is `hidden` wide.
    ///
    /// # Errors
    /// [`Error::Request`] if they overlap, are out of order, or have rows of another width.
    pub fn new(placed: &[PlacedImage], hidden: usize) -> Result<Self> {
        let mut end = 0;
        for PlacedImage { at, image } in placed {
            let level = image.tokens() * hidden;
            let whole = !image.rows.is_empty() && image.rows.len().is_multiple_of(level);
            if *at < end || !whole {
                return Err(Error::Request {
                    what: "images of a sequence",
                    expected: format!("one from token {end} on, of {level} values or a multiple"),
                    found: format!("one at token {at}, of {} values", image.rows.len()),
                });
            }
            end = at + image.tokens();
        }
        Ok(SequenceImages {
            placed: placed.to_vec(),
            hidden,
        })
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.placed.is_empty()
    }

    /// Makes these the images of `slot` in `there`, which has those of each slot.
    ///
    /// # Errors
    /// [`Error::Request`] for another slot.
    pub fn show_in(self, there: &mut [Self], slot: usize) -> Result<()> {
        let slots = there.len();
        match there.get_mut(slot) {
            Some(images) => {
                *images = self;
                Ok(())
            }
            None => Err(Error::Request {
                what: "images of a sequence",
                expected: format!("a slot below {slots}"),
                found: format!("slot {slot}"),
            }),
        }
    }

    /// Forgets those of which the first `len` tokens of the sequence have none.
    pub fn truncate(&mut self, len: usize) {
        self.placed.retain(|image| image.at < len);
    }

    /// The greatest number of levels that an image has: one in place of embeddings, and those of the first layers.
    pub fn levels(&self) -> usize {
        let levels = |p: &PlacedImage| p.image.rows.len() / (p.image.tokens() * self.hidden);
        self.placed.iter().map(levels).max().unwrap_or(0)
    }

    /// Width of a row.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// The rows of images in the places of the sequence's tokens `range`, image by image, behind the index of the first
    /// of these tokens: at level 0 in place of embeddings, at level `n` what is added to the stream behind the first `n`
    /// layers. None of images that have no such level.
    pub fn rows(&self, range: Range<usize>, level: usize) -> impl Iterator<Item = (usize, &[f32])> {
        self.placed.iter().filter_map(move |placed| {
            let (start, end) = (range.start.max(placed.at), range.end.min(placed.end()));
            let first = level * placed.image.tokens() + start.saturating_sub(placed.at);
            let values = first * self.hidden..(first + end.saturating_sub(start)) * self.hidden;
            let rows = placed.image.rows.get(values)?;
            (!rows.is_empty()).then_some((start, rows))
        })
    }

    /// Where the sequence's token `index` stands, as transformers' `get_rope_index` counts: an image begins where the
    /// text before it ends, its rows and columns count on from there, and the text behind it follows the last of them.
    pub fn coordinates(&self, index: usize) -> Coordinates {
        let mut less = 0; // positions up to there, less than tokens
        for PlacedImage { at, image } in &self.placed {
            if index < *at {
                break;
            }
            let (start, within) = (at - less, index - at);
            if within < image.tokens() {
                return [0, within / image.width, within % image.width].map(|n| start + n);
            }
            less += image.tokens() - image.positions();
        }
        [index - less; 3]
    }
}

/// A prompt whose tokens may stand for images.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImagePrompt {
    ids: Vec<u32>,
    images: Vec<PlacedImage>,
}

impl ImagePrompt {
    /// A prompt of tokens `ids`, in which each image has a run of as many pads as it has rows.
    ///
    /// # Errors
    /// [`Error::Request`] if a pad belongs to no image, or an image's place holds something else.
    pub fn new(ids: Vec<u32>, images: Vec<PlacedImage>, tokens: ImageTokens) -> Result<Self> {
        let mut text = 0;
        let is_pad = |id: &u32| *id == tokens.pad;
        let wrong = |expected: String, at: usize| Error::Request {
            what: "pads of a prompt",
            expected,
            found: format!("token {:?} at {at}", ids.get(at)),
        };
        for image in &images {
            let place = ids.get(image.at..image.end());
            if image.at < text || !place.is_some_and(|place| place.iter().all(is_pad)) {
                let rows = image.image.tokens();
                let expected = format!("{rows} tokens {} in place of an image", tokens.pad);
                return Err(wrong(expected, image.at));
            }
            if let Some(stray) = ids[text..image.at].iter().position(is_pad) {
                return Err(wrong("no pad outside of images".into(), text + stray));
            }
            text = image.end();
        }
        match ids[text.min(ids.len())..].iter().position(is_pad) {
            None => Ok(ImagePrompt { ids, images }),
            Some(stray) => Err(wrong("no pad outside of images".into(), text + stray)),
        }
    }

    /// A prompt of text alone, whatever its tokens.
    pub fn text(ids: Vec<u32>) -> Self {
        let images = Vec::new();
        ImagePrompt { ids, images }
    }

    /// Its tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Its images, in order.
    pub fn images(&self) -> &[PlacedImage] {
        &self.images
    }
}
