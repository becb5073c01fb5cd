//! The forward one layer at a time, on any device: cutting a residual stream into pieces, and the
//! interface of a device that runs one.

use crate::checks::{check_finite, check_tokens};
use crate::error::{Error, Result};
use crate::images::SequenceImages;
use crate::interface::Observer;
use crate::models::{Ending, LayerWeights};
use nq_formats::Weight;
use nq_kernels::second_order::DeviceMoments;
use nq_model::ModelConfig;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// The residual stream of a set of whole sequences, kept between layers.
#[derive(Clone, Debug, Default)]
pub struct Hidden {
    /// `[rows, hidden]`: one sequence after another; with several streams `[rows, streams, hidden]`.
    pub data: Vec<f32>,
    /// Tokens of each sequence, in order.
    pub lengths: Vec<usize>,
    /// The tokens of all rows, for layers with a table of n-grams.
    pub tokens: Vec<u32>,
    /// The images of each sequence; empty if none has any.
    pub images: Vec<SequenceImages>,
}

impl Hidden {
    /// Looks up `sequences` of token ids in the embedding `[vocab, hidden]`, which each of so many streams begins with.
    ///
    /// # Errors
    /// [`Error::Request`] for a token id past the vocabulary.
    pub fn embed(embedding: &Weight, sequences: &[Vec<u32>], streams: usize) -> Result<Self> {
        let (vocab, width) = embedding.dims().pair();
        let tokens = sequences.concat();
        check_tokens(&tokens, vocab)?;
        let mut data = vec![0.0; tokens.len() * streams * width];
        data.par_chunks_mut(streams * width)
            .zip(&tokens)
            .try_for_each(|(row, &token)| {
                let (first, others) = row.split_at_mut(width);
                embedding.dequantize_row(token as usize, first)?;
                let others = others.chunks_exact_mut(width);
                others.for_each(|other| other.copy_from_slice(first));
                Ok::<_, Error>(())
            })?;
        Ok(Hidden {
            data,
            lengths: sequences.iter().map(Vec::len).collect(),
            tokens,
            images: Vec::new(),
        })
    }

    /// Puts the rows of `images` of each sequence in the places of its tokens; those of further levels are added behind
    /// the first layers ([`Stepper`]).
    ///
    /// # Errors
    /// [`Error::Request`] unless there are images for each sequence, of the width of its one stream.
    pub fn showing(mut self, images: Vec<SequenceImages>) -> Result<Self> {
        let rows = self.lengths.iter().sum::<usize>().max(1);
        let width = self.data.len() / rows;
        let fits = |images: &SequenceImages| images.is_empty() || images.hidden() == width;
        if images.len() != self.lengths.len() || !images.iter().all(fits) {
            return Err(Error::Request {
                what: "images of sequences",
                expected: format!("{} of rows of {width} values", self.lengths.len()),
                found: images.len().to_string(),
            });
        }
        self.images = images;
        self.add_images(0);
        Ok(self)
    }

    /// Puts rows of images at `level` in their places, or from the first level on adds them to what is there.
    fn add_images(&mut self, level: usize) {
        let mut row = 0;
        for (images, &len) in self.images.iter().zip(&self.lengths) {
            for (index, values) in images.rows(0..len, level) {
                let at = (row + index) * images.hidden();
                let to = &mut self.data[at..at + values.len()];
                match level {
                    0 => to.copy_from_slice(values),
                    _ => to.iter_mut().zip(values).for_each(|(x, v)| *x += v),
                }
            }
            row += len;
        }
    }

    /// Checks that the stream has the number of rows given by its lengths, each of a token and `width` values.
    ///
    /// # Errors
    /// [`Error::Request`] if it does not.
    pub fn check(&self, width: usize) -> Result<()> {
        let rows: usize = self.lengths.iter().sum();
        if self.data.len() == rows * width && self.tokens.len() == rows {
            return Ok(());
        }
        Err(Error::Request {
            what: "residual stream",
            expected: format!("[{rows}, {width}]"),
            found: format!("{} values", self.data.len()),
        })
    }

    /// Like [`Hidden::check`], and checks that `rows` are among its rows.
    ///
    /// # Errors
    /// [`Error::Request`] if they are not.
    pub(crate) fn check_rows(&self, width: usize, rows: &Range<usize>) -> Result<()> {
        self.check(width)?;
        let all: usize = self.lengths.iter().sum();
        if rows.start <= rows.end && rows.end <= all {
            return Ok(());
        }
        Err(Error::Request {
            what: "rows of the head",
            expected: format!("within 0..{all}"),
            found: format!("{rows:?}"),
        })
    }
}

/// Second moments of the inputs of each of a layer's products, in their order; for each expert where
/// experts have inputs of their own ([`Product::shares`](nq_model::Product::shares)).
pub type ProductMoments = Vec<Vec<Arc<dyn DeviceMoments>>>;

/// The forward pass one layer at a time over whole sequences from position 0, so that a model
/// larger than memory can be calibrated and quantized layer by layer.
pub trait LayerStepper: Send {
    /// Shape of the model.
    fn config(&self) -> &ModelConfig;

    /// The device that it runs on, for reports.
    fn device(&self) -> String;

    /// Runs layer `index` with `weights` over `hidden`, in place.
    ///
    /// # Errors
    /// A weight no kernel serves; [`Error::NotFinite`].
    fn layer(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &mut Hidden,
        observer: &mut dyn Observer,
    ) -> Result<()>;

    /// Shows `observer` the inputs and the output of the layer over `hidden`, which is not changed.
    fn observe(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &Hidden,
        observer: &mut dyn Observer,
    ) -> Result<()>;

    /// Runs the layer over `hidden`, which is not changed, and sums the second moments of each product's
    /// input, on a device that quantizes from them; `observer` receives rows and routes. `None`, with
    /// nothing run, if the device leaves that to an observer.
    fn moments(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &Hidden,
        observer: &mut dyn Observer,
    ) -> Result<Option<ProductMoments>>;

    /// Loads the final norm and the head, for up to `rows` rows at a time, after giving back the memory
    /// of layers.
    ///
    /// # Errors
    /// A weight no kernel serves; too little memory.
    fn open_head(&mut self, ending: &Ending, head: &Weight, rows: usize) -> Result<Box<dyn Head>>;

    /// Applies the final norm and the head to rows `rows` of `hidden`: logits `[rows, vocab]`.
    fn head(
        &mut self,
        ending: &Ending,
        head: &Weight,
        hidden: &Hidden,
        rows: Range<usize>,
    ) -> Result<Vec<f32>> {
        let h = self.config().stream_width();
        hidden.check_rows(h, &rows)?;
        let mut head = self.open_head(ending, head, rows.len())?;
        Ok(head
            .logits(&hidden.data[rows.start * h..rows.end * h])?
            .to_vec())
    }
}

/// The final norm and the head of a model on a device.
pub trait Head: Send {
    /// Logits `[rows, vocab]` of rows `x` `[rows, hidden]` of the last layer's output.
    ///
    /// # Errors
    /// Errors of the device; more rows than there is room for.
    fn logits(&mut self, x: &[f32]) -> Result<&[f32]>;
}

/// A device as a [`Stepper`] uses it.
pub trait LayerDevice: Send {
    /// A layer's weights on the device.
    type Layer;

    /// Shape of the model.
    fn config(&self) -> &ModelConfig;

    /// The device, for reports.
    fn name(&self) -> String;

    /// How it wants streams cut.
    fn cut(&self) -> Cut;

    /// Makes room for each of `pieces`.
    ///
    /// # Errors
    /// If the device has not enough memory.
    fn reserve(&mut self, pieces: &[LayerPiece]) -> Result<()>;

    /// Packs the weights of layer `index`.
    ///
    /// # Errors
    /// A weight that no kernel serves; no memory for it.
    fn pack(&self, index: usize, weights: &LayerWeights) -> Result<Self::Layer>;

    /// Runs `layer` over `x`, the rows of `piece` with these `tokens`, in place.
    fn run(
        &mut self,
        layer: &Self::Layer,
        piece: (&LayerPiece, &[u32]),
        x: &mut [f32],
        observer: &mut dyn Observer,
    ) -> Result<()>;

    /// See [`LayerStepper::moments`]; the stream is cut into `pieces`.
    fn moments(
        &mut self,
        _layer: (usize, &LayerWeights),
        _hidden: &Hidden,
        _pieces: &[LayerPiece],
        _observer: &mut dyn Observer,
    ) -> Result<Option<ProductMoments>> {
        Ok(None)
    }

    /// Packs the final norm and the head `[vocab, hidden]`, for up to `rows` rows at once.
    fn head(&mut self, ending: &Ending, head: &Weight, rows: usize) -> Result<Box<dyn Head>>;
}

/// Rules for cutting the rows of a stream into pieces.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Most rows in a piece.
    pub rows: usize,
    /// True: a piece holds whole sequences of one length; one longer than `rows` is a piece of its own.
    /// False: any whole sequences that fit; a longer one is cut into parts.
    pub alike: bool,
}

/// Rows that go through a layer together.
#[derive(Debug, PartialEq)]
pub struct LayerPiece {
    /// First row in the residual stream.
    row: usize,
    /// `(position, rows)` of consecutive sequences, or of a part of a long one.
    pub chunks: Vec<(usize, usize)>,
    /// The images of its sequence, which is then the only one.
    pub images: SequenceImages,
}

impl LayerPiece {
    /// Number of its rows.
    pub fn rows(&self) -> usize {
        self.chunks.iter().map(|c| c.1).sum()
    }

    /// The range of its values in a stream of this width.
    pub fn values(&self, width: usize) -> Range<usize> {
        self.row * width..(self.row + self.rows()) * width
    }
}

/// Cuts sequences, with these images if they have any, into pieces.
pub fn plan(lengths: &[usize], images: &[SequenceImages], cut: Cut) -> Vec<LayerPiece> {
    let mut pieces: Vec<LayerPiece> = Vec::new();
    let (mut row, mut room) = (0, 0);
    for (i, &len) in lengths.iter().enumerate().filter(|(_, len)| **len > 0) {
        let images = images.get(i).filter(|images| !images.is_empty());
        if images.is_some() {
            room = 0;
        }
        match pieces.last_mut() {
            Some(p) if len <= room && !(cut.alike && p.chunks[0].1 != len) => {
                p.chunks.push((0, len));
                room -= len;
            }
            _ => {
                let part = if cut.alike { len } else { cut.rows };
                pieces.extend((0..len).step_by(part).map(|start| LayerPiece {
                    row: row + start,
                    chunks: vec![(start, part.min(len - start))],
                    images: images.cloned().unwrap_or_default(),
                }));
                room = match images {
                    Some(_) => 0,
                    None => cut.rows.saturating_sub(len),
                };
            }
        }
        row += len;
    }
    pieces
}

/// [`LayerStepper`] on a device.
pub struct Stepper<D>(pub D);

impl<D: LayerDevice> Stepper<D> {
    /// Cuts the stream into pieces and makes room for each.
    fn pieces(&mut self, hidden: &Hidden) -> Result<Vec<LayerPiece>> {
        hidden.check(self.0.config().stream_width())?;
        let pieces = plan(&hidden.lengths, &hidden.images, self.0.cut());
        self.0.reserve(&pieces)?;
        Ok(pieces)
    }

    fn run(
        &mut self,
        (index, layer): (usize, &D::Layer),
        piece: (&LayerPiece, &[u32]),
        x: &mut [f32],
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.0.run(layer, piece, x, observer)?;
        check_finite(index, x)
    }
}

impl<D: LayerDevice> LayerStepper for Stepper<D> {
    fn config(&self) -> &ModelConfig {
        self.0.config()
    }

    fn device(&self) -> String {
        self.0.name()
    }

    fn layer(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &mut Hidden,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (h, pieces) = (self.config().stream_width(), self.pieces(hidden)?);
        let layer = self.0.pack(index, weights)?;
        pieces.iter().try_for_each(|piece| {
            let x = &mut hidden.data[piece.values(h)];
            let piece = (piece, &hidden.tokens[piece.values(1)]);
            self.run((index, &layer), piece, x, observer)
        })?;
        hidden.add_images(index + 1);
        Ok(())
    }

    fn observe(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &Hidden,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (h, pieces) = (self.config().stream_width(), self.pieces(hidden)?);
        let layer = self.0.pack(index, weights)?;
        let mut copy = Vec::new();
        pieces.iter().try_for_each(|piece| {
            copy.clear();
            copy.extend_from_slice(&hidden.data[piece.values(h)]);
            let piece = (piece, &hidden.tokens[piece.values(1)]);
            self.run((index, &layer), piece, &mut copy, observer)
        })
    }

    fn moments(
        &mut self,
        index: usize,
        weights: &LayerWeights,
        hidden: &Hidden,
        observer: &mut dyn Observer,
    ) -> Result<Option<ProductMoments>> {
        let pieces = self.pieces(hidden)?;
        self.0.moments((index, weights), hidden, &pieces, observer)
    }

    fn open_head(&mut self, ending: &Ending, head: &Weight, rows: usize) -> Result<Box<dyn Head>> {
        self.0.head(ending, head, rows)
    }
}

#[cfg(test)]
mod tests {
    use super::{Cut, Hidden, plan};
    use crate::images::SequenceImages;
    use crate::interface::{ImageRows, PlacedImage};
    use std::sync::Arc;

    const ROWS: usize = 512;

    #[test]
    fn pieces_cover_every_row_once_and_keep_sequences_whole_where_they_fit() {
        for lengths in [
            vec![],
            vec![1],
            vec![0, 3, 0],
            vec![4, 4, 4, 4, 3, 3, 4, 0, 4],
            vec![ROWS; 3],
            vec![ROWS - 1, 1, 1],
            vec![7, 2 * ROWS + 5, 5, 9, ROWS / 2, ROWS / 2 + 1],
        ] {
            for alike in [false, true] {
                let pieces = plan(&lengths, &[], Cut { rows: ROWS, alike });
                let mut next = 0;
                for p in &pieces {
                    assert_eq!(p.row, next, "{lengths:?}");
                    let rows = p.rows();
                    assert!(rows >= 1, "{lengths:?}");
                    assert!(p.chunks.len() == 1 || p.chunks.iter().all(|c| c.0 == 0));
                    if alike {
                        let first = p.chunks[0];
                        assert!(p.chunks.iter().all(|&c| c == first), "{p:?}");
                        assert!(rows <= ROWS || p.chunks == [(0, rows)], "{p:?}");
                    } else {
                        assert!(rows <= ROWS, "{lengths:?}: {rows} rows");
                    }
                    next += rows;
                }
                assert_eq!(next, lengths.iter().sum::<usize>(), "{lengths:?}");
            }
        }
    }

    /// Sequences with images are pieces of their own; rows of the first level take places, others are added.
    #[test]
    fn images_keep_their_sequences_apart() {
        let image = |rows: Vec<f32>| {
            let image = ImageRows {
                rows,
                height: 1,
                width: 2,
                digest: [0; 32],
            };
            let placed = PlacedImage {
                at: 1,
                image: Arc::new(image),
            };
            SequenceImages::new(&[placed], 2).unwrap()
        };
        let none = SequenceImages::default;
        let seen = image((1..=8).map(|v| v as f32).collect());
        let images = vec![none(), seen.clone(), none(), none()];
        for alike in [false, true] {
            let pieces = plan(&[4, 4, 4, 4], &images, Cut { rows: 16, alike });
            let chunks: Vec<usize> = pieces.iter().map(|p| p.chunks.len()).collect();
            assert_eq!(chunks, [1, 1, 2]);
            let with: Vec<bool> = pieces.iter().map(|p| !p.images.is_empty()).collect();
            assert_eq!(with, [false, true, false]);
        }
        let text = Hidden {
            data: vec![10.0; 16],
            lengths: vec![4, 4],
            tokens: vec![0; 8],
            images: Vec::new(),
        };
        let mut hidden = text.clone().showing(vec![none(), seen]).unwrap();
        assert_eq!(
            hidden.data[8..],
            [10.0, 10.0, 1.0, 2.0, 3.0, 4.0, 10.0, 10.0]
        );
        hidden.add_images(1);
        assert_eq!(
            hidden.data[8..],
            [10.0, 10.0, 6.0, 8.0, 10.0, 12.0, 10.0, 10.0]
        );
        hidden.add_images(2);
        assert_eq!(hidden.data[..8], [10.0; 8]);
        let error = text.showing(vec![none()]).unwrap_err();
        assert!(error.to_string().contains("images of sequences"), "{error}");
    }
}
