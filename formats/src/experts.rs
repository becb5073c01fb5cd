//! Stacks of experts: the weights of all experts of a layer as one matrix, beginning with the rows of
//! expert 0. nq's own folders and GGUF files store stacks; other files store experts separately, or
//! gate and up of all experts in one tensor, and [`Gathered`] builds stacks from them.

use crate::error::{Error, Result};
use crate::exactness::Exactness;
use crate::exl3::{Exl3Scheme, Exl3Weight};
use crate::files::{CONFIG, Files};
use crate::mapping;
use crate::pack::pack_rows;
use crate::scheme::{AffineScheme, Scales, Scheme, Zeros};
use crate::store::{Overlay, TensorEntry, WeightStore};
use crate::stored::StoredWeight;
use crate::tensor::{Tensor, rows_of};
use crate::weight::{AffineWeight, GroupValues, Parts, QuantizedWeight, Weight, ZeroPoints};
use bytes::Bytes;
use half::f16;
use nq_model::names::{expert_name, in_experts, stack};
use nq_model::{DType, Dims, Experts, LinearKind, LinearSpec, ModelConfig};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

impl Weight {
    /// Rows `rows` as a separate weight. Values and codes are shared, not copied; only rows of a trellis that are
    /// not whole strips, or of EXL3 that are not whole blocks, become f32 values.
    ///
    /// # Panics
    /// If the weight does not have these rows.
    pub fn rows(&self, rows: Range<usize>) -> Weight {
        match self {
            Weight::Dense(t) => {
                let stride = t.shape()[1] * t.dtype().size();
                let data = t.data().slice(rows.start * stride..rows.end * stride);
                let shape = vec![rows.len(), t.shape()[1]];
                let part = Tensor::new(t.dtype(), shape, data);
                Weight::Dense(part.expect("whole rows of a matrix are one"))
            }
            Weight::Quantized(QuantizedWeight::Affine(a)) => {
                Weight::Quantized(QuantizedWeight::Affine(affine_rows(a, rows)))
            }
            Weight::Quantized(_) => self.row_ranges(&[rows]),
        }
    }

    /// The rows `ranges` of a weight that is not dense, one range after another: as [`Weight::rows`] those of one.
    ///
    /// # Panics
    /// If the weight does not have these rows, or is dense or of integers.
    pub(crate) fn row_ranges(&self, ranges: &[Range<usize>]) -> Weight {
        let cols = self.dims().cols;
        let values = match self {
            Weight::Quantized(QuantizedWeight::Exl3(w)) => match w.rows(ranges) {
                Some(part) => return Weight::Quantized(QuantizedWeight::Exl3(part)),
                None => {
                    let all = w.to_f32().expect("a checked weight has values");
                    rows_of(all.data(), 4 * cols, ranges)
                }
            },
            Weight::Quantized(QuantizedWeight::Trellis(t)) => match t.rows(ranges) {
                Some(part) => return Weight::Quantized(QuantizedWeight::Trellis(part)),
                None => {
                    let mut row = vec![0.0; cols];
                    let mut values = Vec::new();
                    for place in ranges.iter().cloned().flatten() {
                        t.dequantize_row(place, &mut row);
                        values.extend(row.iter().flat_map(|v: &f32| v.to_le_bytes()));
                    }
                    values.into()
                }
            },
            _ => panic!("rows of {}", self.scheme_name()),
        };
        let shape = vec![values.len() / (4 * cols), cols];
        let part = Tensor::new(DType::F32, shape, values);
        Weight::Dense(part.expect("whole rows of a matrix are one"))
    }

    /// The weights of this stack, one for each of `experts`.
    ///
    /// # Panics
    /// If the number of rows is not a multiple of `experts`.
    pub fn unstack(&self, experts: usize) -> impl Iterator<Item = Weight> {
        let rows = self.dims().rows / experts.max(1);
        assert_eq!(
            rows * experts,
            self.dims().rows,
            "rows of {experts} experts"
        );
        (0..experts).map(move |e| self.rows(e * rows..(e + 1) * rows))
    }

    /// Stacks `parts`, which have the same number of inputs, into one weight: the rows of the first, then
    /// those of the next. Symmetric parts, next to parts with zero-points, get equivalent zero-points.
    ///
    /// # Errors
    /// [`Error::Weight`], naming the index of the first part whose type, scheme or list of groups
    /// differs from that of the first.
    pub fn stack(parts: &[Weight]) -> Result<Weight> {
        let unlike = |place: usize, found: String| Error::Weight {
            what: "a stack of weights",
            expected: format!("{}, as the first", parts[0].scheme_name()),
            found: format!("{found} at place {place}"),
        };
        let differ = |place: usize| Err(unlike(place, parts[place].scheme_name()));
        let rows = parts.iter().map(|p| p.dims().rows).sum();
        match parts.first() {
            None => Err(Error::Weight {
                what: "a stack of weights",
                expected: "at least one".into(),
                found: "none".into(),
            }),
            Some(Weight::Dense(first)) => {
                let mut data = Vec::with_capacity(rows * first.shape()[1] * first.dtype().size());
                for (place, part) in parts.iter().enumerate() {
                    match part {
                        Weight::Dense(t)
                            if t.dtype() == first.dtype() && t.shape()[1] == first.shape()[1] =>
                        {
                            data.extend_from_slice(t.data());
                            mapping::release(t.data());
                        }
                        _ => return differ(place),
                    }
                }
                let shape = vec![rows, first.shape()[1]];
                Tensor::new(first.dtype(), shape, data.into()).map(Weight::Dense)
            }
            Some(Weight::Quantized(QuantizedWeight::Affine(first))) => {
                let mut all = Vec::with_capacity(parts.len());
                for (place, part) in parts.iter().enumerate() {
                    match part {
                        Weight::Quantized(QuantizedWeight::Affine(a)) if alike(a, first) => {
                            all.push(a);
                        }
                        _ => return differ(place),
                    }
                    if all[place].g_idx() != first.g_idx() {
                        let found = "groups of inputs in another order".into();
                        return Err(unlike(place, found));
                    }
                }
                let stacked = stack_affine(&all)?;
                Ok(Weight::Quantized(QuantizedWeight::Affine(stacked)))
            }
            Some(Weight::Quantized(QuantizedWeight::Exl3(first))) => {
                let alike = parts.iter().map_while(|part| match part {
                    Weight::Quantized(QuantizedWeight::Exl3(w)) if w.is_like(first) => Some(w),
                    _ => None,
                });
                let all: Vec<&Exl3Weight> = alike.collect();
                let whole = all.len() == parts.len();
                match whole.then(|| Exl3Weight::stack(&all)).flatten() {
                    Some(stacked) => Ok(Weight::Quantized(QuantizedWeight::Exl3(stacked))),
                    None => differ(all.len()),
                }
            }
            // Only nq's own files hold trellises, and they hold stacks.
            Some(Weight::Quantized(first @ QuantizedWeight::Trellis(_))) => Err(Error::Weight {
                what: "a stack of weights",
                expected: "dense or affine weights, or those of EXL3".into(),
                found: first.scheme().to_string(),
            }),
        }
    }
}

fn affine_rows(a: &AffineWeight, rows: Range<usize>) -> AffineWeight {
    let (scheme, cols, groups) = (a.scheme(), a.in_features(), a.groups());
    let part = |width: usize| rows.start * width..rows.end * width;
    let values = |kept: GroupValues| match (kept, scheme.scales) {
        (GroupValues::TwoLevel { small, of_spans }, Scales::TwoLevel(two)) => {
            GroupValues::TwoLevel {
                small: small.slice(part(two.bits.bytes(groups))),
                of_spans: of_spans[part(two.span.count(cols))].into(),
            }
        }
        (GroupValues::Half(values), _) => GroupValues::Half(values[part(groups)].into()),
        (kept, _) => kept,
    };
    let whole = a.parts();
    let zeros = |z: Bytes| z.slice(part(scheme.value_bits().bytes(groups)));
    let parts = Parts {
        codes: whole.codes.slice(part(scheme.bits.bytes(cols))),
        scales: values(whole.scales),
        zeros: whole.zeros.map(zeros),
        offsets: whole.offsets.map(values),
        levels: whole.levels,
        g_idx: whole.g_idx,
    };
    let part = AffineWeight::assemble(scheme, Dims::new(rows.len(), cols), parts);
    part.expect("whole rows of a weight are one")
}

/// True if the rows of two weights can be stacked.
fn alike(a: &AffineWeight, b: &AffineWeight) -> bool {
    a.in_features() == b.in_features() && a.scheme().stacked(&b.scheme()).is_some()
}

fn stack_affine(parts: &[&AffineWeight]) -> Result<AffineWeight> {
    let first = parts[0];
    let schemes = parts.iter().map(|p| p.scheme());
    let scheme = schemes.fold(first.scheme(), |all, s| all.stacked(&s).unwrap_or(all));
    let kept = scheme.zeros;
    let (bits, groups) = (scheme.bits, first.groups());
    let (mut rows, mut codes) = (0, Vec::new());
    let (mut scales, mut zeros, mut offsets) = (Vec::<f16>::new(), Vec::new(), Vec::new());
    for part in parts {
        rows += part.out_features();
        codes.extend_from_slice(part.codes());
        mapping::release(part.codes());
        scales.extend_from_slice(part.scales());
        match part.zeros() {
            ZeroPoints::Integer(z) => zeros.extend_from_slice(z),
            ZeroPoints::Offset(o) => offsets.extend_from_slice(o),
            ZeroPoints::None if kept == Zeros::Integer => {
                let middle = vec![bits.midpoint(); part.out_features() * groups];
                zeros.extend(pack_rows(bits, &middle, groups));
            }
            ZeroPoints::None => {}
        }
    }
    let zeros = match kept {
        Zeros::None => ZeroPoints::None,
        Zeros::Integer => ZeroPoints::Integer(zeros.into()),
        Zeros::Offset => ZeroPoints::Offset(offsets.into()),
    };
    let order = first.g_idx().map(Into::into);
    let dims = Dims::new(rows, first.in_features());
    AffineWeight::new(scheme, dims, codes.into(), scales.into(), zeros, order)
}

/// A store that builds stacks of experts from the weights of another store.
pub(crate) struct Gathered {
    inner: Box<dyn WeightStore>,
    experts: Experts,
    root: PathBuf,
    /// Names under which the weights of all experts of a layer are kept in one tensor.
    fused_tensors: BTreeSet<String>,
    /// The experts that are kept apart, by the name of a layer's: how many tensors they have.
    apart: BTreeMap<String, usize>,
}

/// Tensors that hold gate and up, or down, of all experts of a layer, within the layer's experts.
const FUSED: [&str; 2] = ["gate_up_proj", "down_proj"];

/// What follows such a tensor's name where its codes are packed.
pub(crate) const PACKED_STACK: &str = "_packed";

/// The tensor that holds the stack `name`, with another one if gate and up are one.
fn fused_name(name: &str, kind: LinearKind) -> String {
    let tensor = match kind {
        LinearKind::Gate | LinearKind::Up => FUSED[0],
        _ => FUSED[1],
    };
    format!("{}.{tensor}", experts_of(name))
}

/// The name of the experts that a stack is of.
fn experts_of(stack: &str) -> &str {
    stack.rsplit_once('.').map_or(stack, |(experts, _)| experts)
}

impl Gathered {
    /// Wraps `store` to provide the stacks of a model of shape `config`; returns it as is if it has none.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it has more experts than the configuration says: another model would
    /// run. (Missing experts are found by name.)
    pub(crate) fn over(
        store: Box<dyn WeightStore>,
        config: &ModelConfig,
        files: &Files,
    ) -> Result<Box<dyn WeightStore>> {
        let Some(experts) = config.experts else {
            return Ok(store);
        };
        let entries = store.entries();
        check_count(&entries, experts.count, &files.path(CONFIG))?;
        let names = entries.iter().map(|e| e.name.as_str());
        let gathered = Self::of(store, experts, files.root(), names);
        // Each has tensors of its own: fewer tensors than experts are not all of them.
        let mut apart = gathered.apart.iter();
        if let Some((layer, tensors)) = apart.find(|(_, n)| **n < experts.count) {
            return Err(Error::Malformed {
                path: files.path(CONFIG),
                what: "num_experts".into(),
                expected: format!("at most the {tensors} tensors of {layer}"),
                found: experts.count.to_string(),
            });
        }
        Ok(Box::new(gathered))
    }

    /// Wraps `inner`, whose tensors are called `names`.
    pub(crate) fn of<'a>(
        inner: Box<dyn WeightStore>,
        experts: Experts,
        root: PathBuf,
        names: impl Iterator<Item = &'a str>,
    ) -> Self {
        let mut fused_tensors = BTreeSet::new();
        let mut apart: BTreeMap<String, usize> = BTreeMap::new();
        for name in names {
            let fused = name.strip_suffix(PACKED_STACK).unwrap_or(name);
            if in_experts(fused).is_some_and(|(_, rest)| FUSED.contains(&rest)) {
                fused_tensors.insert(fused.into());
            } else if let Some((layer, _)) = expert_of(name) {
                *apart.entry(layer.into()).or_default() += 1;
            }
        }
        Gathered {
            inner,
            experts,
            root,
            fused_tensors,
            apart,
        }
    }

    /// The stack with this name, unless the files store it as one.
    fn stack(&self, name: &str) -> Option<&'static LinearSpec> {
        stack(name).filter(|_| !self.inner.contains(name))
    }

    /// The weights of the experts of a layer, if a file keeps them with inputs before outputs, `[experts, in, out]`, as
    /// those of Qwen3-VL do.
    fn turned(&self, name: &str, [count, out, inputs]: [usize; 3]) -> Result<Option<Weight>> {
        let shape = [count, inputs, out];
        let there = |e: &TensorEntry| e.name == name && e.shape == shape;
        if !self.inner.entries().iter().any(there) {
            return Ok(None);
        }
        let Some(tensor) = self.inner.tensor(name, &shape)? else {
            return Ok(None);
        };
        let size = tensor.dtype().size();
        let mut data = Vec::with_capacity(tensor.data().len());
        for expert in tensor.data().chunks_exact(out * inputs * size) {
            for row in 0..out {
                let column = expert.chunks_exact(out * size);
                column.for_each(|values| data.extend_from_slice(&values[row * size..][..size]));
            }
        }
        let dims = vec![count * out, inputs];
        Tensor::new(tensor.dtype(), dims, data.into()).map(|t| Some(Weight::Dense(t)))
    }

    /// Builds a stack from a file that stores the experts' weights in tensors `[experts, out, in]`, with
    /// gate above up.
    fn fused(
        &self,
        name: &str,
        linear: &LinearSpec,
        Dims { rows, cols }: Dims,
        exactly: bool,
    ) -> Result<Option<Weight>> {
        let out = rows / self.experts.count;
        let (height, first) = match linear.kind {
            LinearKind::Gate => (2 * out, 0),
            LinearKind::Up => (2 * out, out),
            _ => (out, 0),
        };
        let tensor = fused_name(name, linear.kind);
        let shape = [self.experts.count, height, cols];
        let stack = match self.inner.experts(&tensor, shape, exactly) {
            Err(e) => self.turned(&tensor, shape)?.ok_or(e)?,
            Ok(Some(stack)) => stack,
            Ok(None) => return Ok(None),
        };
        if height == out {
            return Ok(Some(stack));
        }
        let part = |e: usize| stack.rows(e * height + first..e * height + first + out);
        let parts: Vec<Weight> = (0..self.experts.count).map(part).collect();
        Weight::stack(&parts).map(Some)
    }

    /// The code of EXL3 in which devices have all experts of the stack `name`; `None` if they are in others, or in several.
    fn exl3(&self, name: &str) -> Option<Exl3Scheme> {
        let scheme = |e| match self.inner.scheme_in_levels(&expert_name(name, e)) {
            Some(Scheme::Exl3(scheme)) => Some(scheme),
            _ => None,
        };
        let first = scheme(0)?;
        let alike = (1..self.experts.count).all(|e| scheme(e) == Some(first));
        alike.then_some(first)
    }

    /// Stacks the weights that `read` returns for each expert.
    fn gather(
        &self,
        name: &str,
        Dims { rows, cols }: Dims,
        read: impl Fn(&str, Dims) -> Result<Weight>,
    ) -> Result<Weight> {
        let count = self.experts.count;
        let each = Dims::new(rows / count, cols);
        let one = |e: usize| read(&expert_name(name, e), each);
        let parts = (0..count).map(one).collect::<Result<Vec<_>>>()?;
        Weight::stack(&parts).map_err(|e| match e {
            Error::Weight {
                expected, found, ..
            } => Error::Tensor {
                path: self.root.clone(),
                tensor: name.into(),
                expected: format!("experts of a layer kept alike: {expected}"),
                found: found.replace("place", "expert"),
            },
            other => other,
        })
    }
}

/// The experts of a layer that a tensor of one of them belongs to, and that one's number.
fn expert_of(tensor: &str) -> Option<(&str, usize)> {
    let (experts, rest) = in_experts(tensor)?;
    Some((experts, rest.split('.').next()?.parse().ok()?))
}

/// Refuses experts with an index of `count` or more.
fn check_count(entries: &[TensorEntry], count: usize, config: &Path) -> Result<()> {
    let beyond = |entry: &&TensorEntry| expert_of(&entry.name).is_some_and(|(_, e)| e >= count);
    match entries.iter().find(beyond) {
        None => Ok(()),
        Some(entry) => Err(Error::Malformed {
            path: config.into(),
            what: "num_experts".into(),
            expected: format!("an expert for {} in {}", entry.name, entry.file),
            found: count.to_string(),
        }),
    }
}

impl Overlay for Gathered {
    fn inner(&self) -> &dyn WeightStore {
        self.inner.as_ref()
    }

    fn contains(&self, name: &str) -> bool {
        match self.stack(name) {
            None => self.inner.contains(name),
            Some(linear) => {
                self.fused_tensors.contains(&fused_name(name, linear.kind))
                    || self.inner.contains(&expert_name(name, 0))
            }
        }
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        let Some(stack) = self.stack(name) else {
            return self.inner.matrix(name, dims);
        };
        match self.fused(name, stack, dims, false)? {
            Some(weight) => Ok(weight),
            None => self.gather(name, dims, |name, dims| self.inner.matrix(name, dims)),
        }
    }

    fn scheme(&self, name: &str) -> Option<Scheme> {
        let Some(linear) = self.stack(name) else {
            return self.inner.scheme(name);
        };
        let fused = fused_name(name, linear.kind);
        if self.fused_tensors.contains(&fused) {
            return self.inner.scheme(&fused);
        }
        let one = |all: Option<AffineScheme>, scheme| match (all, scheme?) {
            (None, Scheme::Affine(first)) => Some(Some(first)),
            (Some(all), Scheme::Affine(next)) => all.stacked(&next).map(Some),
            _ => None,
        };
        let mut schemes = (0..self.experts.count).map(|e| self.inner.scheme(&expert_name(name, e)));
        schemes.try_fold(None, one)?.map(Scheme::Affine)
    }

    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        match self.stack(name) {
            None => self.inner.scheme_in_levels(name),
            Some(_) => match self.exl3(name) {
                Some(scheme) => Some(Scheme::Exl3(scheme)),
                None => Overlay::scheme(self, name),
            },
        }
    }

    fn is_float(&self, name: &str) -> bool {
        let Some(linear) = self.stack(name) else {
            return self.inner.is_float(name);
        };
        let fused = fused_name(name, linear.kind);
        match self.fused_tensors.contains(&fused) {
            true => self.inner.is_float(&fused),
            false => (0..self.experts.count).all(|e| self.inner.is_float(&expert_name(name, e))),
        }
    }

    fn matrix_in_codes(&self, name: &str, dims: Dims) -> Result<Weight> {
        match self.stack(name) {
            None => self.inner.matrix_in_codes(name, dims),
            Some(_) if self.exl3(name).is_some() => self.gather(name, dims, |name, dims| {
                self.inner.matrix_in_codes(name, dims)
            }),
            Some(_) => Overlay::matrix(self, name, dims),
        }
    }

    fn stored(&self, name: &str, dims: Dims) -> Result<StoredWeight> {
        let Some(stack) = self.stack(name) else {
            return self.inner.stored(name, dims);
        };
        if let Some(weight) = self.fused(name, stack, dims, true)? {
            return Ok(StoredWeight::Canonical(weight));
        }
        // If any expert's numbers do not fit a scheme of nq, all are compared as floats.
        let exact = |e: usize| self.inner.exactness(&expert_name(name, e));
        let all_exact = (0..self.experts.count).all(|e| exact(e) == Exactness::Exact);
        let read = |name: &str, dims| match self.inner.stored(name, dims)? {
            StoredWeight::Canonical(weight) if all_exact => Ok(weight),
            other => floats(&other),
        };
        self.gather(name, dims, read).map(StoredWeight::Canonical)
    }

    fn exactness(&self, name: &str) -> Exactness {
        let Some(linear) = self.stack(name) else {
            return self.inner.exactness(name);
        };
        let fused = fused_name(name, linear.kind);
        if self.fused_tensors.contains(&fused) {
            return self.inner.exactness(&fused);
        }
        let names = (0..self.experts.count).map(|e| expert_name(name, e));
        let mut rounded = names
            .map(|n| self.inner.exactness(&n))
            .filter(|e| *e != Exactness::Exact);
        rounded.next().unwrap_or(Exactness::Exact)
    }

    fn sources(&self, name: &str) -> Vec<String> {
        let Some(linear) = self.stack(name) else {
            return self.inner.sources(name);
        };
        let fused = fused_name(name, linear.kind);
        match self.fused_tensors.contains(&fused) {
            true => self.inner.sources(&fused),
            false if !self.apart.contains_key(experts_of(name)) => Vec::new(),
            false => (0..self.experts.count)
                .flat_map(|e| self.inner.sources(&expert_name(name, e)))
                .collect(),
        }
    }
}

/// A weight's values in f32.
fn floats(weight: &StoredWeight) -> Result<Weight> {
    let Dims { rows, cols } = weight.dims();
    let mut values = vec![0.0; rows * cols];
    for (row, values) in values.chunks_mut(cols.max(1)).enumerate() {
        weight.dequantize_row(row, values)?;
    }
    Tensor::from_f32(vec![rows, cols], values).map(Weight::Dense)
}

/// A cache of the last few stacks: when experts are written one by one, each is a part of one of
/// them.
pub(crate) struct Recent<T>(Vec<(String, T)>);

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Recent(Vec::new())
    }
}

impl<T> Recent<T> {
    /// Number of stacks of a layer whose experts are written in turn: gate, up and down.
    const MOST: usize = 3;

    /// The value for `name`, cached or from `read`.
    pub(crate) fn get(&mut self, name: &str, read: impl FnOnce() -> Result<T>) -> Result<&T> {
        let at = match self.0.iter().position(|(n, _)| n == name) {
            Some(at) => at,
            None => {
                self.0.truncate(Self::MOST - 1);
                self.0.insert(0, (name.into(), read()?));
                0
            }
        };
        Ok(&self.0[at].1)
    }
}
