//! Rows of a model's tables of n-grams, looked up by tokens. A table may be larger than memory: of a mapped file, only the
//! rows that texts need are read.

use crate::error::Result;
use nq_formats::{StoredWeight, WeightStore};
use nq_model::{Dims, ModelConfig, NgramHash, NgramTable, Shape};

/// The table of one layer, in the bits of its files.
#[derive(Clone, Debug)]
pub struct NgramRows {
    hash: NgramHash,
    /// `[rows, row_width]` each, one behind another.
    parts: Vec<StoredWeight>,
}

impl NgramRows {
    /// The table of layer `layer`, if it has one. No row of it is read.
    ///
    /// # Errors
    /// A missing part, or one whose shape does not follow from the configuration.
    pub fn open(store: &dyn WeightStore, c: &ModelConfig, layer: usize) -> Result<Option<Self>> {
        let Some((table, place)) = (c.ngrams.as_ref()).and_then(|n| Some((n, n.place(layer)?)))
        else {
            return Ok(None);
        };
        let rows = table.table_rows(place) / table.parts;
        let dims = Dims::new(rows, table.row_width());
        let part = |part| Ok(store.rows(&NgramTable::part_name(layer, part), dims)?);
        Ok(Some(NgramRows {
            hash: table.hash(place, c.vocab_size),
            parts: (0..table.parts).map(part).collect::<Result<_>>()?,
        }))
    }

    /// Writes what the table has for each of `tokens` to `out` `[tokens, width]`: its rows, one head's behind another's.
    /// `before` are the tokens in front of them, as many as n-grams reach, or fewer where the text begins.
    ///
    /// # Errors
    /// A type of weight that has no values.
    pub fn look_up(&self, before: &[u32], tokens: &[u32], out: &mut [f32]) -> Result<()> {
        let mut rows = Vec::new();
        self.hash.rows(before, tokens, &mut rows);
        let Dims {
            rows: each,
            cols: width,
        } = self.parts[0].dims();
        // In the order of the file, which reads ahead.
        let mut places: Vec<(usize, &mut [f32])> =
            rows.into_iter().zip(out.chunks_exact_mut(width)).collect();
        places.sort_unstable_by_key(|place| place.0);
        for (row, to) in places {
            self.parts[row / each].dequantize_row(row % each, to)?;
        }
        Ok(())
    }
}

/// Elements of the tables of a model, and what files call their parts.
pub fn parts(c: &ModelConfig) -> impl Iterator<Item = (String, Dims)> {
    let all = c.ngrams.iter().flat_map(|n| n.parameters());
    all.filter_map(|(name, shape)| match shape {
        Shape::Matrix(rows, cols) => Some((name, Dims::new(rows, cols))),
        Shape::Vector(_) => None,
    })
}
