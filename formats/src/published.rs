//! Parameters of hybrids as files of other programs hold them: gains of norms less 1, rates of decay as they
//! are multiplied by, and Linears of a recurrence in one matrix. [`Published`] shows them as the rest of nq
//! has them.

use crate::error::{Error, Result};
use crate::scheme::Scheme;
use crate::store::{OWN_FORMAT, Overlay, WeightStore};
use crate::stored::{Fp8Rows, StoredWeight};
use crate::tensor::Tensor;
use crate::weight::Weight;
use nq_model::names::{is_less_one, layer_matrix, layer_vector, split_layer};
use nq_model::{
    Architecture, Delta, Dims, LinearKind, ModelConfig, NgramTable, VectorKind, tensor_name,
};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// Whose files they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    HuggingFace,
    Gguf,
}

/// A store whose parameters are changed while they are read.
pub(crate) struct Published {
    inner: Box<dyn WeightStore>,
    architecture: &'static Architecture,
    delta: Delta,
    ngram_taps: usize,
    form: Form,
    root: PathBuf,
}

/// A part of a fused matrix: its name, its number of rows, and its rows in the order wanted, as ranges of
/// (first row, number of rows).
struct FusedPart {
    fused: String,
    rows: usize,
    pieces: Vec<(usize, usize)>,
}

impl Published {
    /// Wraps the store of a model whose files hold its parameters otherwise than nq does.
    pub(crate) fn over(
        inner: Box<dyn WeightStore>,
        config: &ModelConfig,
        form: Form,
        root: PathBuf,
    ) -> Box<dyn WeightStore> {
        match config.delta {
            Some(delta) if inner.format() != OWN_FORMAT => Box::new(Published {
                architecture: config.architecture,
                inner,
                delta,
                ngram_taps: config.ngrams.as_ref().map_or(1, |n| n.taps),
                form,
                root,
            }),
            _ => inner,
        }
    }

    /// The fused matrix that the Linear `name` is a part of, if the files have one: for each key head its
    /// rows of queries, keys, values and gates, or those of `b` and `a`.
    fn part(&self, name: &str) -> Option<FusedPart> {
        let linear = layer_matrix(name)?;
        let Delta {
            key_heads,
            key_dim,
            value_dim,
            ..
        } = self.delta;
        let shared = self.delta.value_heads / key_heads; // value heads of a key head
        let values = shared * value_dim;
        let (to, head, within): (&str, usize, Vec<(usize, usize)>) = match linear.kind {
            LinearKind::DeltaQkv => (
                "qkvz",
                2 * key_dim + 2 * values,
                vec![(0, key_dim), (key_dim, key_dim), (2 * key_dim, values)],
            ),
            LinearKind::DeltaZ => (
                "qkvz",
                2 * key_dim + 2 * values,
                vec![(2 * key_dim + values, values)],
            ),
            LinearKind::DeltaB => ("ba", 2 * shared, vec![(0, shared)]),
            LinearKind::DeltaA => ("ba", 2 * shared, vec![(shared, shared)]),
            _ => return None,
        };
        let fused = format!("{}in_proj_{to}", name.rsplit_once("in_proj_")?.0);
        if !self.inner.contains(&fused) {
            return None;
        }
        let heads =
            |&(first, rows): &(usize, usize)| (0..key_heads).map(move |h| (h * head + first, rows));
        Some(FusedPart {
            fused,
            rows: key_heads * head,
            pieces: within.iter().flat_map(heads).collect(),
        })
    }

    /// The part `name` of a table of n-grams, if files have it in FP8.
    fn fp8_table(&self, name: &str, Dims { rows, cols }: Dims) -> Result<Option<Fp8Rows>> {
        let of_table = split_layer(name).filter(|_| NgramTable::part_of(name).is_some());
        let Some((layer, _)) = of_table else {
            return Ok(None);
        };
        let Some(codes) = self.inner.fp8(&tensor_name(name), &[rows, cols])? else {
            return Ok(None);
        };
        let scale_name = NgramTable::scale_name(layer);
        let scale = self.inner.tensor(&scale_name, &[1])?;
        let error = |found: String| Error::Tensor {
            path: self.root.clone(),
            tensor: scale_name.clone(),
            expected: "the scale of a table in FP8, a finite number".into(),
            found,
        };
        let scale = scale.ok_or_else(|| error("no such tensor".into()))?;
        match scale.to_f32()?[0] {
            scale if scale.is_finite() => Ok(Some(Fp8Rows::new(codes, scale))),
            scale => Err(error(scale.to_string())),
        }
    }

    fn matrix_part(&self, part: &FusedPart, cols: usize) -> Result<Weight> {
        let whole = self.inner.matrix(&part.fused, Dims::new(part.rows, cols))?;
        let piece = |&(first, rows): &(usize, usize)| whole.rows(first..first + rows);
        let pieces: Vec<Weight> = part.pieces.iter().map(piece).collect();
        Weight::stack(&pieces)
    }

    /// A vector with each value changed.
    fn changed(
        &self,
        name: &str,
        len: usize,
        change: impl Fn(f32) -> Option<f32>,
    ) -> Result<Tensor> {
        let values = self.inner.vector(name, len)?.to_f32()?;
        let changed = values.iter().map(|&v| {
            change(v).ok_or_else(|| Error::Tensor {
                path: self.root.clone(),
                tensor: name.into(),
                expected: "negative rates of decay".into(),
                found: v.to_string(),
            })
        });
        Tensor::from_f32(vec![len], changed.collect::<Result<_>>()?)
    }
}

impl Overlay for Published {
    fn inner(&self) -> &dyn WeightStore {
        self.inner.as_ref()
    }

    fn inner_name<'n>(&self, name: &'n str) -> Cow<'n, str> {
        match self.part(name) {
            None => name.into(),
            Some(part) => part.fused.into(),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        let kind = layer_vector(name).map(|v| v.kind);
        match self.form {
            Form::HuggingFace if is_less_one(self.architecture, name) => {
                self.changed(name, len, |v| Some(1.0 + v))
            }
            Form::HuggingFace if matches!(kind, Some(VectorKind::Conv | VectorKind::NgramConv)) => {
                // A convolution over channels apart: one input channel for each output channel.
                let taps = match kind {
                    Some(VectorKind::NgramConv) => self.ngram_taps,
                    _ => self.delta.conv,
                };
                let shape = [len / taps, 1, taps];
                match self.inner.tensor(&tensor_name(name), &shape)? {
                    None => self.inner.vector(name, len), // says that there is none
                    Some(t) => Tensor::new(t.dtype(), vec![len], t.data().clone()),
                }
            }
            Form::Gguf if kind == Some(VectorKind::Decay) => {
                self.changed(name, len, |v| (v < 0.0).then(|| (-v).ln()))
            }
            _ => self.inner.vector(name, len),
        }
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        match (self.part(name), self.fp8_table(name, dims)?) {
            (Some(part), _) => self.matrix_part(&part, dims.cols),
            (None, Some(table)) => table.to_bf16(),
            (None, None) => self.inner.matrix(name, dims),
        }
    }

    fn rows(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        match self.fp8_table(name, dims)? {
            Some(table) => Ok(StoredWeight::Fp8(table)),
            None => self.inner.rows(name, dims),
        }
    }

    fn sources(&self, name: &str) -> Vec<String> {
        let of_table = split_layer(name).filter(|_| NgramTable::part_of(name).is_some());
        // Of no shape: an error says that there is such a tensor of another.
        let is_fp8 =
            |_: &(usize, &str)| !matches!(self.inner.fp8(&tensor_name(name), &[]), Ok(None));
        let scale = of_table
            .filter(is_fp8)
            .map(|(layer, _)| NgramTable::scale_name(layer));
        let of_files = self.inner.sources(&self.inner_name(name)).into_iter();
        of_files.chain(scale).collect()
    }

    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        match self.part(name) {
            None => self.inner.scheme_in_levels(name),
            Some(_) => None,
        }
    }

    fn matrix_in_codes(&self, name: &str, dims: Dims) -> Result<Weight> {
        match (self.part(name), self.fp8_table(name, dims)?) {
            (Some(part), _) => self.matrix_part(&part, dims.cols),
            (None, Some(table)) => table.to_bf16(),
            (None, None) => self.inner.matrix_in_codes(name, dims),
        }
    }

    fn matrix_in_levels(&self, name: &str, dims: Dims) -> Result<Weight> {
        match (self.part(name), self.fp8_table(name, dims)?) {
            (Some(part), _) => self.matrix_part(&part, dims.cols),
            (None, Some(table)) => table.to_bf16(),
            (None, None) => self.inner.matrix_in_levels(name, dims),
        }
    }

    fn stored(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        match (self.part(name), self.fp8_table(name, dims)?) {
            (Some(part), _) => (self.matrix_part(&part, dims.cols)).map(StoredWeight::Canonical),
            (None, Some(table)) => Ok(StoredWeight::Fp8(table)),
            (None, None) => self.inner.stored(name, dims),
        }
    }

    fn gguf_file(&self) -> Option<&Path> {
        self.inner.gguf_file()
    }
}
