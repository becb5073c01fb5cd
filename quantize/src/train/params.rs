//! The parameters of a model on a device: the teacher's as they are, the student's with the state
//! needed to change them.

use super::trellis::{self, MOST_ROWS, Nearest, TunedTrellis};
use super::values::{Kind, Values, check_finite};
use crate::error::Result;
use crate::grid::{Grid, GroupParams, Rounded};
use crate::linalg::read_row;
use half::f16;
use nq_f32::{Load, Turned};
use nq_formats::{AffineWeight, QuantizedWeight, Tensor, Weight, WeightStore, Zeros, pack};
use nq_kernels::grad::{Allocate, GradOps, Rounding};
use nq_model::forward::{self, VectorSpec};
use nq_model::names::{self, EMBEDDING, HEAD, NORM, Shape};
use nq_model::{Dims, LinearKind, ModelConfig, NormKind, Product};
use nq_runtime::{LayerWeights, models};
use rayon::prelude::*;

/// A matrix on the device.
pub enum DeviceMatrix<O: Allocate> {
    /// Plain values, not tuned.
    Dense(O::Floats),
    /// Quantized, with tuned scales.
    Tuned(Tuned<O>),
    /// In a trellis code.
    Trellis(TunedTrellis<O>),
}

/// A quantized weight whose scales are tuned.
pub struct Tuned<O: Allocate> {
    shape: Rounding,
    codes: Codes<O>,
    scales: Values<O>, // [rows, groups]
    zeros: O::Floats,  // [rows, groups]
}

/// Codes `[rows, cols]`.
enum Codes<O: Allocate> {
    /// Rounded from latent weights, with a straight-through gradient.
    Latent(Values<O>),
    /// Codes that do not change.
    Fixed(O::Codes),
}

/// The unpacked parts of a quantized weight.
struct UnpackedParts {
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Vec<f32>,
    group: usize,
}

fn parts(w: &AffineWeight) -> UnpackedParts {
    let (rows, cols, groups) = (w.out_features(), w.in_features(), w.groups());
    let scheme = w.scheme();
    let mut codes = vec![0; rows * cols];
    let unpack = |(r, out): (usize, &mut [u8])| pack::unpack_row(scheme.bits, w.row_codes(r), out);
    codes.par_chunks_mut(cols).enumerate().for_each(unpack);
    let middle = scheme.bits.midpoint();
    let zero = |row, group| w.zero_point(row, group).unwrap_or(middle);
    let at = |i: usize| f32::from(zero(i / groups, i % groups));
    UnpackedParts {
        codes,
        scales: w.scales().iter().map(|s| s.to_f32()).collect(),
        zeros: (0..rows * groups).into_par_iter().map(at).collect(),
        group: w.scheme().group.size(cols),
    }
}

/// How far a latent weight starts from its rounded value towards the source's, in steps of the
/// grid: within the cell (half a step), so that the codes start as the method chose them.
const LATENT_REACH: f32 = 0.45;

/// Initial latent weights: in the cells that the method chose, towards `source`'s values.
fn latent_values(
    name: &str,
    source: &Weight,
    p: &UnpackedParts,
    shape: Rounding,
) -> Result<Vec<f32>> {
    let cols = shape.cols;
    let mut latent = vec![0.0; shape.elements()];
    let rows = latent.par_chunks_mut(cols).enumerate();
    rows.try_for_each(|(r, out)| {
        read_row(name, source, r, out)?;
        for (c, out) in out.iter_mut().enumerate() {
            let g = r * (cols / p.group) + c / p.group;
            let value = p.scales[g] * (f32::from(p.codes[r * cols + c]) - p.zeros[g]);
            let reach = LATENT_REACH * p.scales[g].abs();
            *out = value + (*out - value).clamp(-reach, reach);
        }
        Ok::<_, crate::Error>(())
    })?;
    Ok(latent)
}

impl<O: Allocate> Tuned<O> {
    /// Allocates a weight; its codes are tuned too if `codes`.
    fn zeros(ops: &O, name: &str, shape: Rounding, codes: bool) -> Result<Self> {
        let values =
            |part: &str, kind, n| Values::zeros(ops, format!("{name}.{part}"), kind, n, true);
        let n = shape.elements();
        Ok(Tuned {
            shape,
            codes: if codes {
                Codes::Latent(values("latent", Kind::Latent, n)?)
            } else {
                Codes::Fixed(ops.codes("codes", n)?)
            },
            scales: values("scales", Kind::Scale, shape.groups())?,
            zeros: ops.floats("zero-points", shape.groups())?,
        })
    }
}

impl<O: GradOps> DeviceMatrix<O> {
    /// A weight as plain values, not tuned.
    ///
    /// # Errors
    /// A weight that is not finite; errors of the device.
    fn dense(ops: &O, name: &str, weight: &Weight) -> Result<Self> {
        let row = |row: usize, values: &mut [f32]| read_row(name, weight, row, values);
        Ok(DeviceMatrix::Dense(ops.rows(
            "weights",
            weight.dims(),
            row,
        )?))
    }

    /// A student's weight: tuned if it is quantized in groups that fill its rows, without float
    /// offsets, else as it is. `source` is what it was rounded from.
    pub(crate) fn student(
        ops: &O,
        name: &str,
        weight: &Weight,
        source: &Weight,
        codes: bool,
    ) -> Result<Self> {
        let Dims { rows, cols } = weight.dims();
        let w = match weight {
            Weight::Quantized(QuantizedWeight::Affine(w)) => w,
            Weight::Quantized(QuantizedWeight::Trellis(w)) if codes || rows <= MOST_ROWS => {
                return Ok(DeviceMatrix::Trellis(TunedTrellis::new(
                    ops, name, w, source, codes,
                )?));
            }
            _ => return Self::dense(ops, name, weight),
        };
        let p = parts(w);
        let offsets = w.scheme().zeros == Zeros::Offset;
        if w.g_idx().is_some() || offsets || !cols.is_multiple_of(p.group) {
            return Self::dense(ops, name, weight);
        }
        let shape = Rounding {
            rows,
            cols,
            group: p.group,
            max_code: w.scheme().bits.max_code(),
        };
        let mut tuned = Tuned::zeros(ops, name, shape, codes)?;
        match &mut tuned.codes {
            Codes::Latent(latent) => latent.start(ops, &latent_values(name, source, &p, shape)?)?,
            Codes::Fixed(codes) => ops.write_codes(codes, &p.codes)?,
        }
        tuned.scales.start(ops, &p.scales)?;
        if let Codes::Latent(latent) = &mut tuned.codes {
            latent.magnitude = tuned.scales.magnitude;
        }
        ops.write(&mut tuned.zeros, &p.zeros)?;
        Ok(DeviceMatrix::Tuned(tuned))
    }

    /// [`DeviceMatrix::student`] if there is a `source`, otherwise [`DeviceMatrix::dense`].
    fn build(
        ops: &O,
        name: &str,
        weight: &Weight,
        source: Option<&Weight>,
        codes: bool,
    ) -> Result<Self> {
        match source {
            None => Self::dense(ops, name, weight),
            Some(source) => Self::student(ops, name, weight, source, codes),
        }
    }

    /// True if it has parameters to tune.
    pub(crate) fn is_tuned(&self) -> bool {
        !matches!(self, DeviceMatrix::Dense(_))
    }

    /// Where the gradient at the weight's values is summed, if that is all; otherwise [`DeviceMatrix::accumulate`] needs it.
    pub(crate) fn gradient(&mut self) -> Option<&mut O::Floats> {
        match self {
            DeviceMatrix::Trellis(t) => t.gradient(),
            DeviceMatrix::Dense(_) | DeviceMatrix::Tuned(_) => None,
        }
    }

    /// Adds the gradient at the weight's values to those of its other parameters.
    pub(crate) fn accumulate(&mut self, ops: &O, dw: &O::Floats) -> Result<()> {
        let t = match self {
            DeviceMatrix::Dense(_) => return Ok(()),
            DeviceMatrix::Trellis(t) => return t.accumulate(ops, dw),
            DeviceMatrix::Tuned(t) => t,
        };
        let (shape, zeros) = (t.shape, &t.zeros);
        match (&mut t.codes, &mut t.scales.state) {
            (Codes::Latent(l), Some(s)) => {
                let Some(latent) = &mut l.state else {
                    return Ok(());
                };
                let (grad, scales) = (&mut latent.grad, &t.scales.value);
                ops.round_grad(shape, &l.value, scales, zeros, dw, grad, &mut s.grad)?;
            }
            (Codes::Fixed(codes), Some(s)) => {
                ops.dequantize_grad(shape, codes, zeros, dw, &mut s.grad)?;
            }
            (_, None) => {}
        }
        Ok(())
    }

    fn values(&self) -> Vec<&Values<O>> {
        match self {
            DeviceMatrix::Dense(_) => Vec::new(),
            DeviceMatrix::Trellis(t) => vec![&t.tuned],
            DeviceMatrix::Tuned(t) => match &t.codes {
                Codes::Latent(latent) => vec![latent, &t.scales],
                Codes::Fixed(_) => vec![&t.scales],
            },
        }
    }

    fn values_mut(&mut self) -> Vec<&mut Values<O>> {
        match self {
            DeviceMatrix::Dense(_) => Vec::new(),
            DeviceMatrix::Trellis(t) => vec![&mut t.tuned],
            DeviceMatrix::Tuned(t) => match &mut t.codes {
                Codes::Latent(latent) => vec![latent, &mut t.scales],
                Codes::Fixed(_) => vec![&mut t.scales],
            },
        }
    }
}

impl<O: GradOps> Load<O> for DeviceMatrix<O> {
    fn load<'a>(
        &'a self,
        ops: &O,
        scratch: &'a mut O::Floats,
    ) -> nq_kernels::Result<&'a O::Floats> {
        let t = match self {
            DeviceMatrix::Dense(w) => return Ok(w),
            DeviceMatrix::Trellis(t) => return t.load(ops, scratch),
            DeviceMatrix::Tuned(t) => t,
        };
        let (scales, zeros) = (&t.scales.value, &t.zeros);
        match &t.codes {
            Codes::Latent(latent) => ops.round(t.shape, &latent.value, scales, zeros, scratch)?,
            Codes::Fixed(codes) => ops.dequantize(t.shape, codes, scales, zeros, scratch)?,
        }
        Ok(scratch)
    }
}

/// One layer.
pub type Layer<O> = forward::Layer<Vec<DeviceMatrix<O>>, Values<O>>;

/// The vectors of a layer of heads, which are computed in the order in which heads are turned.
fn is_of_heads(vector: VectorSpec) -> bool {
    match vector {
        VectorSpec::Norm(norm) => matches!(norm.kind, NormKind::Q | NormKind::K),
        VectorSpec::Bias(linear) => matches!(linear.kind, LinearKind::Q | LinearKind::K),
        VectorSpec::Row(_) => false,
    }
}

/// Layer `index`; if there is a `source`, it is tuned, with its codes too if `codes`.
fn layer<O: GradOps>(
    ops: &O,
    order: Turned,
    index: usize,
    w: &LayerWeights,
    source: Option<&LayerWeights>,
    codes: bool,
) -> Result<Layer<O>> {
    let product = |product: &Product| {
        let matrix = product.linears.iter().map(|linear| {
            let source = source.map(|s| s.linear(linear.kind));
            let weight = w.linear(linear.kind);
            DeviceMatrix::build(ops, &linear.name(index), weight, source, codes)
        });
        matrix.collect::<Result<_>>()
    };
    forward::Layer::new(index, w.spec, product, |vector| {
        // Biases stay as they are, and so do the vectors of recurrences.
        let norm = matches!(vector, VectorSpec::Norm(n) if n.kind != NormKind::Delta);
        let mut values = w.values(vector)?;
        if is_of_heads(vector) {
            values = order.apply(&values);
        }
        let tuned = source.is_some() && norm;
        Values::vector(ops, vector.name(index), &values, tuned)
    })
}

/// Canonical weights of a whole model, as read and written.
pub struct Canonical {
    /// The layers.
    pub layers: Vec<LayerWeights>,
    /// The norm before the head.
    pub final_norm: Tensor,
    /// The embedding.
    pub embedding: Weight,
    /// The head, if it is not tied.
    pub head: Option<Weight>,
}

impl Canonical {
    /// Reads all weights of `store`.
    ///
    /// # Errors
    /// A weight that is absent or has another shape.
    pub fn read(store: &dyn WeightStore, config: &ModelConfig) -> Result<Self> {
        let layers = (0..config.num_hidden_layers)
            .map(|index| Ok(LayerWeights::read(store, config, index)?))
            .collect::<Result<_>>()?;
        Ok(Canonical {
            layers,
            final_norm: models::final_norm(store, config)?,
            embedding: models::embedding(store, config)?,
            head: if config.tie_word_embeddings {
                None
            } else {
                Some(models::head(store, config)?)
            },
        })
    }
}

/// Allocates the parameters of a teacher and of a student, quantized in groups of `group` or, without, in trellises.
///
/// # Errors
/// If the device has not enough memory.
pub(crate) fn both_models<O: Allocate>(
    ops: &O,
    c: &ModelConfig,
    group: Option<usize>,
    codes: bool,
) -> Result<impl Sized> {
    let (mut teacher, mut matrices, mut norms) = (Vec::new(), Vec::new(), Vec::new());
    let mut trellises = Vec::new();
    for (name, shape) in names::parameters(c) {
        let n = match shape {
            Shape::Matrix(rows, cols) => {
                match group {
                    None => trellises.push(TunedTrellis::zeros(
                        ops,
                        &name,
                        Dims::new(rows, cols),
                        codes,
                    )?),
                    Some(group) => {
                        let shape = Rounding {
                            rows,
                            cols,
                            group: group.clamp(1, cols),
                            max_code: u8::MAX,
                        };
                        matrices.push(Tuned::zeros(ops, &name, shape, codes)?);
                    }
                }
                rows * cols
            }
            Shape::Vector(n) => {
                norms.push(Values::zeros(ops, name, Kind::Gain, n, true)?);
                n
            }
        };
        teacher.push(ops.floats("weights", n)?);
    }
    Ok((teacher, matrices, trellises, norms))
}

/// A model on a device.
pub struct Model<O: GradOps> {
    /// Shape of the model.
    pub config: ModelConfig,
    /// `[vocab, hidden]`
    pub embedding: DeviceMatrix<O>,
    /// `[vocab, hidden]`; `None` if the embedding is the head.
    pub head: Option<DeviceMatrix<O>>,
    /// The layers.
    pub layers: Vec<Layer<O>>,
    /// The norm before the head.
    pub final_norm: Values<O>,
}

impl<O: GradOps> Model<O> {
    /// Loads the source, which is run but not tuned.
    ///
    /// # Errors
    /// A weight that is not finite; errors of the device.
    pub fn teacher(ops: &O, config: &ModelConfig, w: &Canonical) -> Result<Self> {
        Self::build(ops, config, w, None, false)
    }

    /// Loads the quantized model for tuning, with its codes too if `codes`. `source` holds the weights
    /// it was quantized from.
    pub fn student(
        ops: &O,
        config: &ModelConfig,
        w: &Canonical,
        source: &Canonical,
        codes: bool,
    ) -> Result<Self> {
        Self::build(ops, config, w, Some(source), codes)
    }

    fn build(
        ops: &O,
        config: &ModelConfig,
        w: &Canonical,
        source: Option<&Canonical>,
        codes: bool,
    ) -> Result<Self> {
        let matrix =
            |name: &str, w: &Weight, source| DeviceMatrix::build(ops, name, w, source, codes);
        let layers = w.layers.iter().enumerate().map(|(index, w)| {
            let source = source.map(|s| &s.layers[index]);
            layer(ops, Turned::new(config), index, w, source, codes)
        });
        let layers = layers.collect::<Result<_>>()?;
        let head = match &w.head {
            Some(head) => {
                let source = source.and_then(|s| s.head.as_ref());
                Some(matrix(HEAD, head, source)?)
            }
            None => None,
        };
        Ok(Model {
            config: config.clone(),
            embedding: matrix(EMBEDDING, &w.embedding, source.map(|s| &s.embedding))?,
            head,
            layers,
            final_norm: Values::gains(ops, NORM.into(), &w.final_norm, source.is_some())?,
        })
    }

    /// The head: the embedding, if they are tied.
    pub fn head(&self) -> &DeviceMatrix<O> {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// The head, mutable.
    pub(crate) fn head_mut(&mut self) -> &mut DeviceMatrix<O> {
        self.head.as_mut().unwrap_or(&mut self.embedding)
    }

    /// The weights in trellis codes, in a fixed order.
    pub(super) fn trellises_mut<'a>(&'a mut self) -> Vec<&'a mut TunedTrellis<O>> {
        let mut all = vec![&mut self.embedding];
        all.extend(&mut self.head);
        for layer in &mut self.layers {
            all.extend(layer.parts_mut().0.into_iter().flatten());
        }
        let trellis = |m: &'a mut DeviceMatrix<O>| match m {
            DeviceMatrix::Trellis(t) => Some(t),
            _ => None,
        };
        all.into_iter().filter_map(trellis).collect()
    }

    /// All tuned values, in a fixed order.
    pub fn values(&self) -> Vec<&Values<O>> {
        let mut all = self.embedding.values();
        all.extend(self.head.iter().flat_map(DeviceMatrix::values));
        for layer in &self.layers {
            all.extend(layer.linears().flatten().flat_map(DeviceMatrix::values));
            all.extend(layer.vectors());
        }
        all.push(&self.final_norm);
        all.retain(|v| v.state.is_some());
        all
    }

    /// [`Model::values`], mutable.
    pub(crate) fn values_mut(&mut self) -> Vec<&mut Values<O>> {
        let mut all = self.embedding.values_mut();
        all.extend(self.head.iter_mut().flat_map(DeviceMatrix::values_mut));
        for layer in &mut self.layers {
            let (linears, vectors) = layer.parts_mut();
            all.extend(
                linears
                    .into_iter()
                    .flatten()
                    .flat_map(DeviceMatrix::values_mut),
            );
            all.extend(vectors);
        }
        all.push(&mut self.final_norm);
        all.retain(|v| v.state.is_some());
        all
    }
}

/// `base` with the tuned values that `lookup` returns by name, those of heads in `order`: codes are rounded anew, scales to
/// f16. Zero-points stay.
///
/// # Errors
/// [`crate::Error::NotFinite`] if a file cannot store a tuned value.
pub fn rounded<'a>(
    base: &Canonical,
    order: Turned,
    lookup: impl Fn(&str) -> Option<&'a [f32]>,
    nearest: &Nearest<'_>,
) -> Result<Canonical> {
    let weight = |name: &str, w: &Weight| -> Result<Weight> {
        let a = match w {
            Weight::Quantized(QuantizedWeight::Affine(a)) => a,
            Weight::Quantized(QuantizedWeight::Trellis(t)) => {
                let tuned = trellis::rounded(name, t, &lookup, nearest)?;
                return Ok(Weight::Quantized(QuantizedWeight::Trellis(tuned)));
            }
            _ => return Ok(w.clone()),
        };
        let Some(scales) = lookup(&format!("{name}.scales")) else {
            return Ok(w.clone());
        };
        check_finite(name, scales, a.groups())?;
        let p = parts(a);
        let mut out = Rounded::new(Grid::new(a.scheme())?, a.out_features(), a.in_features());
        out.codes = p.codes;
        for ((to, &scale), &zero) in out.params.iter_mut().zip(scales).zip(&p.zeros) {
            *to = GroupParams {
                scale: f16::from_f32(scale).to_f32(),
                zero: zero as u8,
                offset: 0.0,
            };
        }
        let grid = out.grid;
        (out.rows_mut(1).into_par_iter()).for_each(|row| grid.snap(row.params, row.spans));
        let Some(latent) = lookup(&format!("{name}.latent")) else {
            return out.to_weight(); // codes stay
        };
        check_finite(name, latent, a.in_features())?;
        let codes = out.codes.par_chunks_mut(p.group);
        let groups = codes.zip(latent.par_chunks(p.group));
        let groups = groups.zip(out.params.par_iter());
        groups.for_each(|((codes, latent), &params)| out.grid.round(params, latent, codes));
        out.to_weight()
    };
    let gain = |name: &str, t: &Tensor, values: &[f32]| -> Result<Tensor> {
        check_finite(name, values, values.len())?;
        gain_tensor(t, values)
    };
    let vector = |name: String, t: &Tensor| match lookup(&name) {
        None => Ok(t.clone()),
        Some(values) => gain(&name, t, values),
    };
    let mut layers = Vec::new();
    for (layer, w) in base.layers.iter().enumerate() {
        layers.push(LayerWeights::collect(
            w.spec,
            |l| weight(&l.name(layer), w.linear(l.kind)),
            |v| match lookup(&v.name(layer)) {
                Some(values) if is_of_heads(v) => {
                    gain(&v.name(layer), w.vector(v), &order.restore(values))
                }
                _ => vector(v.name(layer), w.vector(v)),
            },
        )?);
    }
    Ok(Canonical {
        layers,
        final_norm: vector(NORM.into(), &base.final_norm)?,
        embedding: weight(EMBEDDING, &base.embedding)?,
        head: match &base.head {
            Some(head) => Some(weight(HEAD, head)?),
            None => None,
        },
    })
}

/// Tuned gains take no more bytes than the source's: 16-bit ones become f16, the more precise
/// of the two 16-bit types.
fn gain_tensor(source: &Tensor, values: &[f32]) -> Result<Tensor> {
    let shape = vec![values.len()];
    if source.dtype().size() != 2 {
        return Ok(Tensor::from_f32(shape, values.to_vec())?);
    }
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|&v| f16::from_f32(v).to_le_bytes())
        .collect();
    Ok(Tensor::new(nq_model::DType::F16, shape, bytes.into())?)
}
