//! A part of a model that is divided among several devices, its ranks: by tensors (tensor parallelism: Shoeybi et al.,
//! Megatron-LM, arXiv 1909.08053), or by layers (pipeline parallelism: Huang et al., GPipe, arXiv 1811.06965).
//!
//! By layers, a rank has some layers, whole, one after the other: a model of fewer layers.
//!
//! By tensors, each rank has some heads of attention and of recurrences and some rows of MLPs and of every expert: the
//! outputs of the Linears that a block begins with, and the inputs of the one that it ends with, whose products the ranks
//! add up. Embedding, norms and routers are whole on every rank, and a head that is not the embedding is divided by tokens.
//! So a rank is a model of fewer heads and narrower MLPs, whose weights [`ShardStore`] cuts out of those of the whole.

use crate::error::{Error, Result};
use crate::pack::{pack_row, unpack_row};
use crate::scheme::{Bits, Group, Scales, Scheme};
use crate::store::{Overlay, TensorEntry, WeightStore};
use crate::tensor::{Tensor, rows_of};
use crate::trellis;
use crate::weight::{AffineWeight, GroupValues, Parts, QuantizedWeight, Weight};
use bytes::Bytes;
use half::f16;
use nq_model::{Dims, ModelConfig, Parameter, Width, in_layer, names};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

/// Part `rank` of `ranks`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its number, from 0.
    pub rank: usize,
    /// The number of parts.
    pub ranks: usize,
    /// The layers that it has, whole; `None`: a part of every layer.
    pub layers: Option<Range<usize>>,
    /// Copies of each of its key heads, for devices whose kernels take fewer query heads of one: the model is the same, with
    /// as many times the keys and values.
    pub key_copies: usize,
}

/// What a shard has of a dimension: ranges, one after the other.
type Ranges = Vec<Range<usize>>;

impl Shard {
    /// Part `rank` of `ranks` of every layer.
    pub fn tensors(rank: usize, ranks: usize) -> Self {
        Shard {
            rank,
            ranks,
            layers: None,
            key_copies: 1,
        }
    }

    /// The copies of key heads with which a model of shape `c` has at most `most` query heads of each, which is at least 1.
    pub fn copies_for(c: &ModelConfig, most: usize) -> usize {
        let group = c.num_attention_heads / c.num_key_value_heads.max(1);
        let fits = |copies: &usize| group.is_multiple_of(*copies) && group / copies <= most;
        (1..=group).find(fits).unwrap_or(1)
    }

    /// The shape of this part of a model of shape `c`.
    ///
    /// # Errors
    /// [`Error::Weight`], naming the size that the number of parts does not divide, or a part that does not exist.
    pub fn config(&self, c: &ModelConfig) -> Result<ModelConfig> {
        if self.rank >= self.ranks {
            return Err(Error::Weight {
                what: "part of a model",
                expected: format!("one below {}", self.ranks),
                found: self.rank.to_string(),
            });
        }
        let whole = self.ranks == 1 && self.key_copies == 1 && self.layers.is_none();
        if c.hyper.is_some() && !whole {
            return Err(Error::Weight {
                what: "part of a model",
                expected: "a residual of one stream".into(),
                found: format!("{} of {}", c.streams(), c.architecture.family),
            });
        }
        if let Some(layers) = &self.layers {
            return self.stage(layers, c);
        }
        let part = |what: &'static str, n: usize| match n.is_multiple_of(self.ranks) {
            true => Ok(n / self.ranks),
            false => Err(Error::Weight {
                what,
                expected: format!("a multiple of {}, the number of devices", self.ranks),
                found: n.to_string(),
            }),
        };
        let mut shard = c.clone();
        shard.num_attention_heads = part("num_attention_heads", c.num_attention_heads)?;
        shard.num_key_value_heads =
            part("num_key_value_heads", c.num_key_value_heads)? * self.key_copies;
        let mlps = || c.layers().flat_map(|l| l.linears());
        if mlps().any(|l| l.out == Width::Mlp) {
            shard.intermediate_size = part("intermediate_size", c.intermediate_size)?;
        }
        if let Some(experts) = &mut shard.experts {
            experts.width = part("moe_intermediate_size", experts.width)?;
            experts.shared = part("shared_expert_intermediate_size", experts.shared)?;
        }
        if let Some(delta) = &mut shard.delta {
            delta.key_heads = part("linear_num_key_heads", delta.key_heads)?;
            delta.value_heads = part("linear_num_value_heads", delta.value_heads)?;
        }
        Ok(shard)
    }

    /// The shape of the model of `layers` alone.
    fn stage(&self, layers: &Range<usize>, c: &ModelConfig) -> Result<ModelConfig> {
        let all = c.num_hidden_layers;
        let stage = ModelConfig {
            num_hidden_layers: layers.len(),
            num_key_value_heads: c.num_key_value_heads * self.key_copies,
            ..c.clone()
        };
        let alike = || {
            (layers.clone().enumerate())
                .all(|(i, layer)| std::ptr::eq(stage.layer(i), c.layer(layer)))
        };
        if layers.is_empty() || layers.end > all || !alike() {
            return Err(Error::Weight {
                what: "layers of a part of a model",
                expected: format!("some of {all}, from a layer of the kind of the first one on"),
                found: format!("{layers:?}"),
            });
        }
        Ok(stage)
    }

    /// The weights of this part of a model of shape `c`, whose own are in `store`.
    pub fn store<'a>(
        &self,
        store: &'a dyn WeightStore,
        c: &'a ModelConfig,
    ) -> Result<ShardStore<'a>> {
        let shape = self.config(c)?;
        let mut cuts = BTreeMap::new();
        let divided = match self.layers {
            Some(_) if self.key_copies == 1 => 0,
            _ => shape.num_hidden_layers,
        };
        for index in 0..divided {
            for parameter in shape.layer(index).parameters() {
                let (name, cut) = match parameter {
                    Parameter::Norm(norm) => (norm.name(index), self.vector(norm.len, c)),
                    Parameter::Bias(linear) => {
                        (linear.bias_name(index), self.vector(linear.out, c))
                    }
                    Parameter::Vector(row) => (row.name(index), self.vector(row.len, c)),
                    Parameter::Linear(linear) => {
                        let (copies, out) = (linear.copies(c), linear.out.of(c));
                        let of_one = self.ranges(linear.out, c);
                        let rows = (0..copies).flat_map(|copy| {
                            let moved = |r: &Range<usize>| copy * out + r.start..copy * out + r.end;
                            of_one.iter().map(moved).collect::<Ranges>()
                        });
                        let cut = Cut {
                            rows: rows.collect(),
                            cols: self.ranges(linear.inputs, c),
                            dims: linear.dims(c),
                        };
                        (linear.name(index), cut)
                    }
                };
                if !(cut.has_all_rows() && cut.has_all_cols()) {
                    cuts.insert(name, cut);
                }
            }
        }
        if !c.tie_word_embeddings {
            let cut = Cut {
                rows: std::iter::once(self.head_rows(c)).collect(),
                cols: all_of(c.hidden_size),
                dims: Dims::new(c.vocab_size, c.hidden_size),
            };
            cuts.insert(names::head(c).into(), cut);
        }
        Ok(ShardStore {
            inner: store,
            shard: self.clone(),
            cuts,
        })
    }

    /// The rows of the head that this part has: an equal part where parts of whole tiles of 16 rows can be had, else all
    /// of them, as of a head that is the embedding too.
    pub fn head_rows(&self, c: &ModelConfig) -> Range<usize> {
        let divided = !c.tie_word_embeddings && c.vocab_size.is_multiple_of(16 * self.ranks);
        let each = c.vocab_size / self.ranks.max(1);
        if divided {
            self.rank * each..(self.rank + 1) * each
        } else {
            0..c.vocab_size
        }
    }

    fn vector(&self, len: Width, c: &ModelConfig) -> Cut {
        Cut {
            rows: self.ranges(len, c),
            cols: all_of(1),
            dims: Dims::new(len.of(c), 1),
        }
    }

    /// This part of `n`, which the number of parts divides: all of it of a whole layer.
    fn share(&self, n: usize) -> Range<usize> {
        if self.layers.is_some() {
            return 0..n;
        }
        let each = n / self.ranks;
        self.rank * each..(self.rank + 1) * each
    }

    /// What this part has of a dimension.
    fn ranges(&self, width: Width, c: &ModelConfig) -> Ranges {
        let all = width.of(c);
        if width == Width::KvHeads && self.key_copies > 1 {
            let heads = self.share(c.num_key_value_heads);
            let copies = |h: usize| {
                std::iter::repeat_n(h * c.head_dim..(h + 1) * c.head_dim, self.key_copies)
            };
            return heads.flat_map(copies).collect();
        }
        let Some(d) = c.delta else {
            return match width {
                Width::Hidden | Width::Head | Width::Experts | Width::One => all_of(all),
                _ => vec![self.share(all)],
            };
        };
        let keys = self.share(d.key_heads);
        // Value heads, which go with the key head that they belong to.
        let values: Ranges = match d.tiled {
            false => vec![self.share(d.value_heads)],
            true => (0..d.value_heads / d.key_heads)
                .map(|tile| tile * d.key_heads + keys.start..tile * d.key_heads + keys.end)
                .collect(),
        };
        let scaled = |ranges: &[Range<usize>], by: usize, first: usize| -> Ranges {
            let moved = |r: &Range<usize>| first + r.start * by..first + r.end * by;
            ranges.iter().map(moved).collect()
        };
        let channels = || -> Ranges {
            let of_keys = |first| scaled(std::slice::from_ref(&keys), d.key_dim, first);
            let values = scaled(&values, d.value_dim, 2 * d.keys());
            [of_keys(0), of_keys(d.keys()), values].concat()
        };
        match width {
            Width::Hidden
            | Width::Head
            | Width::Experts
            | Width::One
            | Width::DeltaHead
            | Width::Stream
            | Width::Streams
            | Width::MixRank
            | Width::IndexHeads
            | Width::IndexHead
            | Width::Ngrams
            | Width::NgramTaps => all_of(all),
            Width::Heads
            | Width::KvHeads
            | Width::GatedHeads
            | Width::Mlp
            | Width::Expert
            | Width::SharedExpert => vec![self.share(all)],
            Width::DeltaHeads => values,
            Width::DeltaValues => scaled(&values, d.value_dim, 0),
            Width::DeltaChannels => channels(),
            Width::DeltaTaps => scaled(&channels(), d.conv, 0),
        }
    }
}

/// What a shard has of a parameter.
struct Cut {
    rows: Ranges,
    cols: Ranges,
    /// Of the whole parameter.
    dims: Dims,
}

/// All of `n`.
fn all_of(n: usize) -> Ranges {
    std::iter::once(0..n).collect()
}

/// True if `ranges` are all of `n`.
fn is_all(ranges: &[Range<usize>], n: usize) -> bool {
    let end = ranges
        .iter()
        .try_fold(0, |end, r| (r.start == end).then_some(r.end));
    end == Some(n)
}

/// The parameters of a [`Shard`]: those that are divided are read whole, and cut; layers are counted from its first one.
pub struct ShardStore<'a> {
    inner: &'a dyn WeightStore,
    shard: Shard,
    /// By parameter; others are whole.
    cuts: BTreeMap<String, Cut>,
}

impl Overlay for ShardStore<'_> {
    fn inner(&self) -> &dyn WeightStore {
        self.inner
    }

    fn inner_name<'n>(&self, name: &'n str) -> Cow<'n, str> {
        match (&self.shard.layers, names::split_layer(name)) {
            (Some(layers), Some((layer, suffix))) => {
                Cow::Owned(in_layer(layers.start + layer, suffix))
            }
            _ => Cow::Borrowed(name),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        let Some(cut) = self.cuts.get(name) else {
            return self.inner.vector(&self.inner_name(name), len);
        };
        let whole = self.inner.vector(&self.inner_name(name), cut.dims.rows)?;
        let size = whole.dtype().size();
        let data = rows_of(whole.data(), size, &cut.rows);
        Tensor::new(whole.dtype(), vec![data.len() / size], data)
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        let Some(cut) = self.cuts.get(name) else {
            return self.inner.matrix(&self.inner_name(name), dims);
        };
        let whole = self.inner.matrix(&self.inner_name(name), cut.dims)?;
        let place = format!("part {} of {}", self.shard.rank, self.shard.ranks);
        let part = cut.of(&whole).map_err(|e| e.in_tensor(place, name))?;
        whole.release();
        Ok(part)
    }

    fn matrix_in_levels(&self, name: &str, dims: Dims) -> Result<Weight> {
        let inner = self.inner_name(name);
        let Some(cut) = self.cuts.get(name) else {
            return self.inner.matrix_in_levels(&inner, dims);
        };
        let whole = self.inner.matrix_in_levels(&inner, cut.dims)?;
        // A cut may go through a span of scales in two levels.
        match cut.of(&whole) {
            Ok(part) => {
                whole.release();
                Ok(part)
            }
            Err(_) if !cut.has_all_cols() => Overlay::matrix(self, name, dims),
            Err(e) => Err(e),
        }
    }

    /// Not that in levels of parts of rows, which may be cut through a span of scales.
    fn scheme_in_levels(&self, name: &str) -> Option<Scheme> {
        match self.cuts.get(name) {
            Some(cut) if !cut.has_all_cols() => Overlay::scheme(self, name),
            Some(cut) => {
                let scheme = self.inner.scheme_in_levels(&self.inner_name(name))?;
                cut.keeps(scheme).then_some(scheme)
            }
            None => self.inner.scheme_in_levels(&self.inner_name(name)),
        }
    }

    /// Those of the whole model, or of its layers, whose sizes tell how much larger one layer is than another.
    fn entries(&self) -> Vec<TensorEntry> {
        let entries = self.inner.entries().into_iter();
        let Some(layers) = &self.shard.layers else {
            return entries.collect();
        };
        let own = |entry: TensorEntry| match names::split_layer(&entry.name) {
            None => Some(entry),
            Some((layer, suffix)) if layers.contains(&layer) => Some(TensorEntry {
                name: in_layer(layer - layers.start, suffix),
                ..entry
            }),
            Some(_) => None,
        };
        entries.filter_map(own).collect()
    }
}

/// The values `cols` of every row of `per_row` values.
fn cols_of<T: Copy>(values: &[T], per_row: usize, cols: &[Range<usize>]) -> Vec<T> {
    let count: usize = cols.iter().map(Range::len).sum();
    let mut part = Vec::with_capacity(values.len() / per_row.max(1) * count);
    for row in values.chunks_exact(per_row.max(1)) {
        cols.iter()
            .for_each(|c| part.extend_from_slice(&row[c.clone()]));
    }
    part
}

/// The codes `cols` of every packed row of `n` codes.
fn packed_cols(packed: &Bytes, bits: Bits, n: usize, cols: &[Range<usize>]) -> Bytes {
    if is_all(cols, n) {
        return packed.clone();
    }
    let per_byte = match bits {
        Bits::B8 => 1,
        Bits::B4 => 2,
        _ => 0,
    };
    let on_bytes = |c: &Range<usize>| {
        per_byte > 0 && c.start.is_multiple_of(per_byte) && c.end.is_multiple_of(per_byte)
    };
    if cols.iter().all(on_bytes) {
        let cols: Ranges = (cols.iter().map(|c| c.start / per_byte..c.end / per_byte)).collect();
        return cols_of(packed, bits.bytes(n), &cols).into();
    }
    let count = cols.iter().map(Range::len).sum();
    let (mut codes, mut row) = (vec![0; n], vec![0; bits.bytes(count)]);
    let mut all = Vec::new();
    for packed in packed.chunks_exact(bits.bytes(n).max(1)) {
        unpack_row(bits, packed, &mut codes);
        pack_row(bits, &cols_of(&codes, n, cols), &mut row);
        all.extend_from_slice(&row);
    }
    all.into()
}

impl Weight {
    /// The inputs `cols` of every row, in its scheme.
    ///
    /// # Errors
    /// [`Error::Weight`] if they begin or end within a group, if groups are in activation order, or for a trellis; for columns
    /// that it does not have.
    pub fn columns(&self, cols: Range<usize>) -> Result<Weight> {
        let dims = self.dims();
        if cols.end > dims.cols || cols.is_empty() {
            return Err(Error::Weight {
                what: "columns of a weight",
                expected: format!("some of {}", dims.cols),
                found: format!("{} to {}", cols.start, cols.end),
            });
        }
        let cut = Cut {
            rows: all_of(dims.rows),
            cols: std::iter::once(cols).collect(),
            dims,
        };
        cut.of(self)
    }
}

impl Cut {
    fn has_all_rows(&self) -> bool {
        is_all(&self.rows, self.dims.rows)
    }

    fn has_all_cols(&self) -> bool {
        is_all(&self.cols, self.dims.cols)
    }

    /// True if its rows keep their codes in `scheme`, whose rows may lie in strips or blocks that have codes in common.
    fn keeps(&self, scheme: Scheme) -> bool {
        let together = match scheme {
            Scheme::Affine(_) => 1,
            Scheme::Trellis(_) => trellis::STRIP,
            Scheme::Exl3(_) => trellis::BLOCK,
        };
        let whole = |n: usize| n.is_multiple_of(together);
        self.rows.iter().all(|r| whole(r.start) && whole(r.end))
    }

    /// This part of `whole`.
    ///
    /// # Errors
    /// [`Error::Weight`] if it cuts through what inputs have in common.
    fn of(&self, whole: &Weight) -> Result<Weight> {
        let all_cols = self.has_all_cols();
        match whole {
            Weight::Dense(t) => {
                let size = t.dtype().size();
                let data = rows_of(t.data(), self.dims.cols * size, &self.rows);
                let data = match all_cols {
                    true => data,
                    false => {
                        let cols: Ranges =
                            (self.cols.iter().map(|c| c.start * size..c.end * size)).collect();
                        cols_of(&data, self.dims.cols * size, &cols).into()
                    }
                };
                let count = |ranges: &[Range<usize>]| ranges.iter().map(Range::len).sum();
                let shape = vec![count(&self.rows), count(&self.cols)];
                Tensor::new(t.dtype(), shape, data).map(Weight::Dense)
            }
            Weight::Quantized(QuantizedWeight::Affine(a)) => {
                let part = self.affine(a)?;
                Ok(Weight::Quantized(QuantizedWeight::Affine(part)))
            }
            Weight::Quantized(_) if all_cols => Ok(whole.row_ranges(&self.rows)),
            Weight::Quantized(trellis) => Err(Error::Weight {
                what: "inputs of several devices",
                expected: "integers or floats".into(),
                found: trellis.scheme().to_string(),
            }),
        }
    }

    /// The columns as groups of `group` inputs.
    fn groups(&self, what: &'static str, group: Group) -> Result<Ranges> {
        let n = self.dims.cols;
        let (size, count) = (group.size(n).max(1), group.count(n));
        if is_all(&self.cols, n) || group == Group::Channel {
            return Ok(all_of(count));
        }
        let within = |c: &&Range<usize>| {
            !(c.start.is_multiple_of(size) && (c.end.is_multiple_of(size) || c.end == n))
        };
        match self.cols.iter().find(within) {
            None => Ok(self
                .cols
                .iter()
                .map(|c| c.start / size..c.end.div_ceil(size))
                .collect()),
            Some(c) => Err(Error::Weight {
                what,
                expected: format!("inputs of a device that end with groups of {size}"),
                found: format!("inputs {} to {}", c.start, c.end),
            }),
        }
    }

    fn affine(&self, a: &AffineWeight) -> Result<AffineWeight> {
        let (scheme, n) = (a.scheme(), self.dims.cols);
        if a.g_idx().is_some() && !is_all(&self.cols, n) {
            return Err(Error::Weight {
                what: "inputs of several devices",
                expected: "groups of neighbours".into(),
                found: "activation order".into(),
            });
        }
        let all_groups = a.groups();
        let groups = self.groups("groups", scheme.group)?;
        let cut_values = |values: &[f16], per_row: usize, cols: &[Range<usize>]| -> Vec<f16> {
            let rows = self.rows.iter();
            let rows = rows.map(|r| &values[r.start * per_row..r.end * per_row]);
            let values = rows.collect::<Vec<_>>().concat();
            match is_all(cols, per_row) {
                true => values,
                false => cols_of(&values, per_row, cols),
            }
        };
        let of_groups = |values: GroupValues| -> Result<GroupValues> {
            Ok(match (values, scheme.scales) {
                (GroupValues::TwoLevel { small, of_spans }, Scales::TwoLevel(two)) => {
                    let rows = rows_of(&small, two.bits.bytes(all_groups), &self.rows);
                    let spans = self.groups("spans of groups", two.span)?;
                    GroupValues::TwoLevel {
                        small: packed_cols(&rows, two.bits, all_groups, &groups),
                        of_spans: cut_values(&of_spans, two.span.count(n), &spans).into(),
                    }
                }
                (GroupValues::Half(values), _) => {
                    GroupValues::Half(cut_values(&values, all_groups, &groups).into())
                }
                (kept, _) => kept,
            })
        };
        let whole = a.parts();
        let bits = scheme.value_bits();
        let zeros = |z: Bytes| {
            let rows = rows_of(&z, bits.bytes(all_groups), &self.rows);
            packed_cols(&rows, bits, all_groups, &groups)
        };
        let codes = rows_of(&whole.codes, scheme.bits.bytes(n), &self.rows);
        let parts = Parts {
            codes: packed_cols(&codes, scheme.bits, n, &self.cols),
            scales: of_groups(whole.scales)?,
            zeros: whole.zeros.map(zeros),
            offsets: whole.offsets.map(of_groups).transpose()?,
            levels: whole.levels,
            g_idx: whole.g_idx,
        };
        let count = |ranges: &[Range<usize>]| ranges.iter().map(Range::len).sum();
        AffineWeight::assemble(
            scheme,
            Dims::new(count(&self.rows), count(&self.cols)),
            parts,
        )
    }
}
