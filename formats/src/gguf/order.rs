//! The order of rows and columns in GGUF files, where it is not that of other files.
//!
//! The value heads of recurrences are tiled over the key heads, where other files have the value heads of a key head
//! side by side ([`Delta::tiled`]). Rows of queries and keys are in pairs ([`Architecture::gguf_pairs`]).

use nq_model::names::{layer_linear, layer_matrix, layer_vector};
use nq_model::{Architecture, Delta, LinearKind, ModelConfig, VectorKind};

/// True if files of the architecture keep the rows of `name` as [`Architecture::gguf_pairs`] says: those of queries
/// and keys, whose heads are rotated.
pub(crate) fn pairs_of(architecture: &Architecture, name: &str) -> bool {
    let kind = layer_linear(name).map(|linear| linear.kind);
    architecture.gguf_pairs && matches!(kind, Some(LinearKind::Q | LinearKind::K))
}

/// The rows of a matrix whose heads of `head_dim` rows are kept in pairs
/// ([`Architecture::gguf_pairs`]), with the rows of a pair half a head apart.
pub(crate) fn apart(bytes: &[u8], rows: usize, head_dim: usize) -> Vec<u8> {
    reorder(bytes, rows, |row| {
        let (head, place) = (row / head_dim, row % head_dim);
        head * head_dim + place % (head_dim / 2) * 2 + place / (head_dim / 2)
    })
}

/// The inverse of [`apart`].
pub(crate) fn paired(bytes: &[u8], rows: usize, head_dim: usize) -> Vec<u8> {
    reorder(bytes, rows, |row| {
        let (head, place) = (row / head_dim, row % head_dim);
        head * head_dim + place % 2 * (head_dim / 2) + place / 2
    })
}

/// The rows of a matrix in another order: row `i` of the result is row `from(i)`.
fn reorder(bytes: &[u8], rows: usize, from: impl Fn(usize) -> usize) -> Vec<u8> {
    let width = bytes.len() / rows.max(1);
    let row = |i| &bytes[from(i) * width..][..width];
    (0..rows).flat_map(row).copied().collect()
}

/// Values in blocks of one value head each, behind some that stay where they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    /// Values before the first head.
    fixed: usize,
    /// Values of a head.
    each: usize,
    /// For each place of a tiled file, the head that is there.
    heads: Vec<usize>,
}

impl Heads {
    fn new(delta: Delta, fixed: usize, each: usize) -> Option<Self> {
        let shared = delta.value_heads / delta.key_heads;
        let head = |place: usize| place % delta.key_heads * shared + place / delta.key_heads;
        (shared > 1).then(|| Heads {
            fixed,
            each,
            heads: (0..delta.value_heads).map(head).collect(),
        })
    }

    /// The heads in the rows of the matrix `name`, or in the values of the vector; `None` if their order is
    /// the same in all files.
    pub(crate) fn of_rows(c: &ModelConfig, name: &str) -> Option<Self> {
        let d = c.delta?;
        let keys = 2 * d.keys();
        if let Some(vector) = layer_vector(name) {
            return match vector.kind {
                VectorKind::Conv => Self::new(d, keys * d.conv, d.value_dim * d.conv),
                VectorKind::Decay | VectorKind::TimeStep => Self::new(d, 0, 1),
                VectorKind::NgramConv => None,
            };
        }
        match layer_matrix(name)?.kind {
            LinearKind::DeltaQkv => Self::new(d, keys, d.value_dim),
            LinearKind::DeltaZ => Self::new(d, 0, d.value_dim),
            LinearKind::DeltaB | LinearKind::DeltaA => Self::new(d, 0, 1),
            _ => None,
        }
    }

    /// The heads in the columns of the matrix `name`.
    pub(crate) fn of_columns(c: &ModelConfig, name: &str) -> Option<Self> {
        let d = c.delta?;
        match layer_matrix(name)?.kind {
            LinearKind::DeltaOut => Self::new(d, 0, d.value_dim),
            _ => None,
        }
    }

    /// Values of a head.
    pub(crate) fn each(&self) -> usize {
        self.each
    }

    /// The value that is at place `i` of a tiled file.
    pub(crate) fn at(&self, i: usize) -> usize {
        match i.checked_sub(self.fixed) {
            None => i,
            Some(i) => self.fixed + self.heads[i / self.each] * self.each + i % self.each,
        }
    }

    /// For each of `n` values in the other order, its place in a tiled file: the inverse of [`Heads::at`].
    pub(crate) fn grouped_from(&self, n: usize) -> Vec<usize> {
        let mut from = vec![0; n];
        (0..n).for_each(|i| from[self.at(i)] = i);
        from
    }

    /// The values of a tiled file in the other order, `unit` of them for one that the heads count: the inverse of
    /// [`Heads::tiled`].
    ///
    /// # Panics
    /// If there are fewer values.
    pub(crate) fn grouped<T: Copy>(&self, values: &[T], unit: usize) -> Vec<T> {
        let from = self.grouped_from(values.len() / unit.max(1));
        let value = |&i: &usize| &values[i * unit..][..unit];
        from.iter().flat_map(value).copied().collect()
    }

    /// The values in the order of a tiled file, `unit` of them for one that the heads count.
    ///
    /// # Panics
    /// If there are fewer values.
    pub(crate) fn tiled<T: Copy>(&self, values: &[T], unit: usize) -> Vec<T> {
        let (fixed, heads) = values.split_at(self.fixed * unit);
        let width = self.each * unit;
        let head = |&h: &usize| &heads[h * width..(h + 1) * width];
        let heads = self.heads.iter().flat_map(head);
        fixed.iter().chain(heads).copied().collect()
    }
}

impl Heads {
    /// The bytes of a row of `cols` values, in blocks that lie within heads, in the order of a tiled file.
    pub(crate) fn tiled_bytes(&self, row: &[u8], cols: usize) -> Vec<u8> {
        // Bytes of a head, as if each had one value.
        let heads = Heads {
            fixed: 0,
            each: row.len() * self.each / cols.max(1),
            heads: self.heads.clone(),
        };
        heads.tiled(row, 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_tiled_over_key_heads() {
        let delta = Delta {
            key_heads: 2,
            value_heads: 6,
            key_dim: 4,
            value_dim: 2,
            conv: 4,
            interval: 4,
            tiled: false,
            gate: nq_model::OutputGate::Silu,
        };
        let heads = Heads::new(delta, 1, 2).unwrap();
        // Of key head 0, of key head 1, of key head 0, ...
        let values: Vec<u32> = (0..13).collect();
        let tiled = [0, 1, 2, 7, 8, 3, 4, 9, 10, 5, 6, 11, 12];
        assert_eq!(heads.tiled(&values, 1), tiled);
        assert_eq!(heads.grouped(&tiled, 1), values);
        let at: Vec<u32> = (0..13).map(|i| heads.at(i) as u32).collect();
        assert_eq!(at, tiled);
        let back: Vec<u32> = (heads.grouped_from(13).into_iter())
            .map(|i| tiled[i])
            .collect();
        assert_eq!(back, values);
        let same = Delta {
            key_heads: 6,
            ..delta
        };
        assert_eq!(Heads::new(same, 1, 2), None);
    }
}
