//! What an adapter holds, as a store of weights of its own kind of file, and as parameters of a model.

use crate::error::{Error, Result};
use crate::experts::Gathered;
use crate::gguf::order::{Heads, apart, pairs_of};
use crate::left_over::LeftOver;
use crate::published::{Form, Published};
use crate::store::{TensorEntry, WeightStore};
use crate::tensor::Tensor;
use crate::weight::Weight;
use nq_model::names::{EMBEDDING, HEAD, Shape, parameters};
use nq_model::{Architecture, Dims, ModelConfig, parameter_of};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One adapter.
pub struct Adapter {
    pub(super) path: PathBuf,
    pub(super) form: Form,
    /// The architecture that a GGUF adapter names.
    pub(super) architecture: Option<&'static Architecture>,
    /// `scale B A`, by the names of its kind of file.
    pub(super) sums: Parts,
    /// What takes the place of the model's own values; NaN where nothing does.
    pub(super) whole: Parts,
    /// Rows of the embedding in place of the model's, which are the head's too if that is the embedding; NaN for others.
    pub(super) tokens: Parts,
    /// Lengths of rows; NaN for rows that keep theirs.
    pub(super) magnitudes: Parts,
    /// True if a head that is the embedding remains it when the adapter changes the embedding.
    pub(super) keeps_tied: bool,
    pub(super) left_over: Vec<LeftOver>,
}

impl Adapter {
    pub(super) fn is_dora(&self) -> bool {
        self.magnitudes.names().next().is_some()
    }

    pub(super) fn unsupported(&self, what: String, why: &str) -> Error {
        Error::Unsupported {
            path: self.path.clone(),
            what,
            why: why.into(),
        }
    }

    pub(super) fn parts(&self) -> [&Parts; 4] {
        [&self.whole, &self.tokens, &self.sums, &self.magnitudes]
    }

    /// True if a head that is the embedding no longer is it with the adapter.
    pub(super) fn sets_apart(&self) -> bool {
        let of_both = [&self.whole, &self.sums, &self.magnitudes];
        let mut names = of_both.iter().flat_map(|parts| parts.names());
        names.any(|name| name == HEAD || (name == EMBEDDING && !self.keeps_tied))
    }

    /// Checks that every part is of a parameter of the model, and of its shape.
    pub(super) fn check(&self, config: &ModelConfig) -> Result<()> {
        if let Some(other) = self.architecture.filter(|a| *a != config.architecture) {
            let what = format!("an adapter of {} models", other.title);
            let why = format!("the model is {}", config.architecture.title);
            return Err(self.unsupported(what, &why));
        }
        let all = parameters_with_head(config);
        for parts in self.parts() {
            let view = View::new(parts, self.form, config);
            let used: BTreeSet<String> = (all.iter())
                .flat_map(|(name, _)| view.sources(name))
                .collect();
            if let Some(name) = parts.names().find(|name| !used.contains(*name)) {
                let expected = format!("a parameter of a {} model", config.architecture.title);
                return Err(parts.error(name, expected, "another name".into()));
            }
            all.iter()
                .try_for_each(|(name, shape)| view.check(name, *shape))?;
        }
        Ok(())
    }
}

/// The parameters of a model, and its head where that is the embedding: an adapter sets them apart.
pub(super) fn parameters_with_head(c: &ModelConfig) -> Vec<(String, Shape)> {
    let mut all = parameters(c);
    if c.tie_word_embeddings {
        all.push((HEAD.into(), Shape::Matrix(c.vocab_size, c.hidden_size)));
    }
    all
}

/// What an adapter adds to one Linear: `B A`.
#[derive(Clone, Debug)]
pub struct LoraFactors {
    /// `A`, `[rank, in]`
    pub a: Vec<f32>,
    /// `B`, `[out, rank]`, times the adapter's scale.
    pub b: Vec<f32>,
    /// Columns of `B`, rows of `A`.
    pub rank: usize,
}

/// `scale B A` of a matrix, or of each matrix of a stack.
pub(super) struct LoraProduct {
    /// `[experts, rank, in]`
    pub(super) a: Vec<f32>,
    /// `[experts, out, rank]`
    pub(super) b: Vec<f32>,
    pub(super) experts: usize,
    pub(super) rank: usize,
    pub(super) scale: f64,
}

/// A part of an adapter.
pub(super) enum AdapterPart {
    Product(LoraProduct),
    Whole(Tensor),
    /// Some rows of a matrix.
    Rows(Vec<usize>, Tensor),
}

/// Parts of one meaning, by the names that weights have in files of the adapter's kind, without `.weight`.
#[derive(Clone)]
pub(super) struct Parts {
    path: PathBuf,
    all: Arc<BTreeMap<String, AdapterPart>>,
    /// The value where an adapter says nothing.
    blank: f32,
    /// True for one value for each row.
    by_row: bool,
    /// Of products.
    weight: f64,
}

impl Parts {
    /// What is added to a model's values.
    pub(super) fn sums(path: &Path, all: BTreeMap<String, AdapterPart>) -> Self {
        Parts {
            path: path.into(),
            all: Arc::new(all),
            blank: 0.0,
            by_row: false,
            weight: 1.0,
        }
    }

    /// What takes the place of a model's values.
    pub(super) fn replacing(path: &Path, all: BTreeMap<String, AdapterPart>) -> Self {
        Parts {
            blank: f32::NAN,
            ..Self::sums(path, all)
        }
    }

    /// Lengths that rows get.
    pub(super) fn lengths(path: &Path, all: BTreeMap<String, AdapterPart>) -> Self {
        Parts {
            by_row: true,
            ..Self::replacing(path, all)
        }
    }

    /// Multiplies what products add.
    pub(super) fn multiply(&mut self, weight: f64) {
        self.weight *= weight;
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.all.keys().map(String::as_str)
    }

    pub(super) fn error(&self, tensor: &str, expected: String, found: String) -> Error {
        Error::Tensor {
            path: self.path.clone(),
            tensor: tensor.into(),
            expected,
            found,
        }
    }
}

impl LoraProduct {
    /// Rows and columns, of all experts.
    fn dims(&self) -> Dims {
        let columns = self.a.len() / (self.experts * self.rank);
        Dims::new(self.b.len() / self.rank, columns)
    }

    /// `[experts * out, in]`, summed in f64.
    fn values(&self, weight: f64) -> Vec<f32> {
        let Dims { rows, cols } = self.dims();
        let out = rows / self.experts;
        let mut values = vec![0.0; rows * cols];
        let each = values
            .par_chunks_mut(cols)
            .zip(self.b.par_chunks(self.rank));
        each.enumerate().for_each(|(row, (values, b))| {
            let mut sums = vec![0.0; cols];
            let a = &self.a[row / out * self.rank * cols..][..self.rank * cols];
            for (b, a) in b.iter().zip(a.chunks(cols)) {
                let factor = self.scale * weight * f64::from(*b);
                let each = sums.iter_mut().zip(a);
                each.for_each(|(sum, a)| *sum += factor * f64::from(*a));
            }
            let each = values.iter_mut().zip(sums);
            each.for_each(|(value, sum)| *value = sum as f32);
        });
        values
    }
}

/// Parts as parameters of a model.
pub(super) struct View {
    store: Box<dyn WeightStore>,
    /// The same without columns, which tells shapes from each other at no cost.
    shapes: Box<dyn WeightStore>,
    parts: Parts,
    form: Form,
    config: ModelConfig,
    /// The order of value heads, if it is another than the model's.
    order: Option<Order>,
}

/// What becomes of the order of value heads ([`nq_model::Delta::tiled`]).
#[derive(Clone, Copy)]
enum Order {
    Tiled,
    Grouped,
}

impl View {
    /// `parts` of an adapter of this form, read as weights of a model of this shape are.
    pub(super) fn new(parts: &Parts, form: Form, config: &ModelConfig) -> Self {
        let over = |shapes_only: bool| -> Box<dyn WeightStore> {
            let raw: Box<dyn WeightStore> = Box::new(AdapterStore {
                parts: parts.clone(),
                shapes_only,
                pairs: (form == Form::Gguf).then_some((config.architecture, config.head_dim)),
            });
            let root = parts.path.clone();
            let gathered: Box<dyn WeightStore> = match config.experts {
                Some(e) => Box::new(Gathered::of(raw, e, root.clone(), parts.names())),
                None => raw,
            };
            Published::over(gathered, config, form, root)
        };
        let tiled = form == Form::Gguf && config.architecture.gguf_tiled;
        let order = match config.delta.map(|d| d.tiled) {
            Some(true) if !tiled => Some(Order::Tiled),
            Some(false) if tiled => Some(Order::Grouped),
            _ => None,
        };
        View {
            store: over(false),
            shapes: over(true),
            parts: parts.clone(),
            form,
            config: config.clone(),
            order,
        }
    }

    /// The parts that the parameter `name` is made of, if there are any.
    pub(super) fn sources(&self, name: &str) -> Vec<String> {
        self.store.sources(name)
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        let sources = self.sources(name);
        sources.iter().any(|s| self.parts.all.contains_key(s))
    }

    /// Refuses parts of another shape than the parameter's.
    pub(super) fn check(&self, name: &str, shape: Shape) -> Result<()> {
        match shape {
            _ if !self.contains(name) => Ok(()),
            Shape::Matrix(rows, _) if self.parts.by_row => {
                self.shapes.matrix(name, Dims::new(rows, 1)).map(drop)
            }
            Shape::Matrix(rows, cols) => self.shapes.matrix(name, Dims::new(rows, cols)).map(drop),
            Shape::Vector(len) => self.shapes.vector(name, len).map(drop),
        }
    }

    /// The values for a matrix, if there are any: one for each element, or one for each row.
    pub(super) fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Option<Vec<f32>>> {
        if !self.contains(name) {
            return Ok(None);
        }
        if self.parts.by_row {
            return self.rows(name, rows, 1).map(Some);
        }
        let values = self.rows(name, rows, cols)?;
        Ok(Some(self.columns(name, values, cols)))
    }

    /// The values for a matrix with its rows, but not its columns, in the model's order.
    fn rows(&self, name: &str, rows: usize, cols: usize) -> Result<Vec<f32>> {
        let Weight::Dense(tensor) = self.store.matrix(name, Dims::new(rows, cols))? else {
            return Err(self.parts.error(name, "floats".into(), "codes".into()));
        };
        let heads = Heads::of_rows(&self.config, name);
        Ok(self.in_order(heads, tensor.to_f32()?, cols))
    }

    /// `values` `[.., cols]` with the columns of the matrix `name` in the model's order.
    fn columns(&self, name: &str, values: Vec<f32>, cols: usize) -> Vec<f32> {
        let columns = Heads::of_columns(&self.config, name);
        if columns.is_none() || self.order.is_none() {
            return values;
        }
        let row = |row: &[f32]| self.in_order(columns.clone(), row.into(), 1);
        values.par_chunks(cols).flat_map_iter(row).collect()
    }

    /// The products added to the matrix `name` `[rows, cols]`, each as the two matrices that it is made of.
    pub(super) fn factors(&self, name: &str, rows: usize, cols: usize) -> Result<Vec<LoraFactors>> {
        let mut all = Vec::new();
        for source in self.sources(name) {
            let Some(AdapterPart::Product(product)) = self.parts.all.get(&source) else {
                continue;
            };
            // The rows of `B` are the matrix's, and go wherever those go.
            let scale = product.scale * self.parts.weight;
            let scaled = product.b.iter().map(|b| (scale * f64::from(*b)) as f32);
            let shape = vec![product.dims().rows, product.rank];
            let b = AdapterPart::Whole(Tensor::from_f32(shape, scaled.collect())?);
            let parts = Parts::sums(&self.parts.path, BTreeMap::from([(source, b)]));
            let view = View::new(&parts, self.form, &self.config);
            all.push(LoraFactors {
                a: self.columns(name, product.a.clone(), cols),
                b: view.rows(name, rows, product.rank)?,
                rank: product.rank,
            });
        }
        Ok(all)
    }

    /// The values for a vector, if there are any.
    pub(super) fn vector(&self, name: &str, len: usize) -> Result<Option<Vec<f32>>> {
        if !self.contains(name) {
            return Ok(None);
        }
        let values = self.store.vector(name, len)?.to_f32()?;
        let heads = Heads::of_rows(&self.config, name);
        Ok(Some(self.in_order(heads, values, 1)))
    }

    /// Values in the model's order of value heads, `unit` of them for one that the heads count.
    fn in_order(&self, heads: Option<Heads>, values: Vec<f32>, unit: usize) -> Vec<f32> {
        match (heads, self.order) {
            (Some(heads), Some(Order::Tiled)) => heads.tiled(&values, unit),
            (Some(heads), Some(Order::Grouped)) => heads.grouped(&values, unit),
            _ => values,
        }
    }
}

/// Parts as weights of a file.
struct AdapterStore {
    parts: Parts,
    /// Gives matrices without columns.
    shapes_only: bool,
    /// For the order of rows in GGUF files: architecture and values of a head.
    pairs: Option<(&'static Architecture, usize)>,
}

impl AdapterStore {
    /// The values of `name` as a matrix of these dimensions, blank where the adapter says nothing.
    fn values(&self, name: &str, rows: usize, cols: usize) -> Result<Vec<f32>> {
        let found = self.parts.all.get(name);
        let dims = match found {
            None => Dims::new(rows, cols),
            Some(AdapterPart::Product(product)) => product.dims(),
            Some(AdapterPart::Rows(places, t)) => {
                if let Some(place) = places.iter().find(|p| **p >= rows) {
                    let expected = format!("tokens below {rows}");
                    return Err(self.parts.error(name, expected, place.to_string()));
                }
                Dims::new(rows, t.shape().get(1).copied().unwrap_or(1))
            }
            Some(AdapterPart::Whole(t)) => match *t.shape() {
                [rows] => Dims::new(rows, 1),
                [rows, cols] => Dims::new(rows, cols),
                _ => Dims::new(t.len(), 1),
            },
        };
        if dims != Dims::new(rows, cols) {
            let (expected, found) = (format!("{:?}", (rows, cols)), format!("{dims:?}"));
            return Err(self.parts.error(name, expected, found));
        }
        if self.shapes_only {
            return Ok(Vec::new());
        }
        Ok(match found {
            None => vec![self.parts.blank; rows * cols],
            Some(AdapterPart::Product(product)) => product.values(self.parts.weight),
            Some(AdapterPart::Whole(t)) => t.to_f32()?,
            Some(AdapterPart::Rows(places, t)) => {
                let mut values = vec![self.parts.blank; rows * cols];
                for (&place, row) in places.iter().zip(t.to_f32()?.chunks(cols.max(1))) {
                    values[place * cols..][..cols].copy_from_slice(row);
                }
                values
            }
        })
    }
}

impl WeightStore for AdapterStore {
    fn format(&self) -> &'static str {
        "adapter"
    }

    fn contains(&self, name: &str) -> bool {
        self.parts.all.contains_key(name)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        let found = match self.parts.all.get(name) {
            Some(AdapterPart::Whole(t)) if t.len() == len => return Ok(t.clone()),
            Some(AdapterPart::Whole(t)) => format!("{:?}", t.shape()),
            Some(AdapterPart::Product(_) | AdapterPart::Rows(..)) => "a change of a matrix".into(),
            None => "none".into(),
        };
        Err(self.parts.error(name, format!("[{len}]"), found))
    }

    fn matrix(&self, name: &str, Dims { rows, cols }: Dims) -> Result<Weight> {
        let values = self.values(name, rows, cols)?;
        let tensor = Tensor::from_f32(vec![rows, values.len() / rows.max(1)], values)?;
        let pairs = self.pairs.filter(|(a, _)| pairs_of(a, name));
        let Some((_, head_dim)) = pairs else {
            return Ok(Weight::Dense(tensor));
        };
        let bytes = apart(tensor.data(), rows, head_dim);
        Tensor::new(tensor.dtype(), tensor.shape().into(), bytes.into()).map(Weight::Dense)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Option<Tensor>> {
        let name = parameter_of(name).unwrap_or(name);
        match (self.parts.all.get(name), shape) {
            (Some(AdapterPart::Product(p)), &[experts, out, cols]) => {
                if p.experts != experts {
                    let expected = format!("{experts} experts");
                    return Err(self.parts.error(name, expected, p.experts.to_string()));
                }
                let values = self.values(name, experts * out, cols)?;
                let cols = values.len() / (experts * out).max(1);
                Tensor::from_f32(vec![experts, out, cols], values).map(Some)
            }
            (Some(AdapterPart::Whole(t)), shape) if t.shape() == shape => Ok(Some(t.clone())),
            (Some(AdapterPart::Whole(t)), shape) => {
                let (expected, found) = (format!("{shape:?}"), format!("{:?}", t.shape()));
                Err(self.parts.error(name, expected, found))
            }
            _ => Ok(None),
        }
    }

    fn entries(&self) -> Vec<TensorEntry> {
        Vec::new()
    }

    fn file_bytes(&self) -> u64 {
        0
    }
}
