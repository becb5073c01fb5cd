//! A layer on the CPU, for sessions and for the layer stepper.

use super::adapters::{AdaptedBatch, AdapterScratch, CpuAdapters};
use super::cache::{KeptInput, LayerCache, StateParts};
use super::kept::KeptRows;
use super::stream_states::{StreamInputs, StreamScratch};
use super::weights::{CpuLayer, delta_vectors};
use crate::{Cpu, DeltaRows, Epilogue, Linear, Span};
use nq_formats::Weight;
use nq_formats::adapter::ProductKey;
use nq_kernels::pages::PAGE;
use nq_kernels::{Activations, Routes};
use nq_model::forward::{
    self, Delta, Experts, HeadVectors, Operand, Packed, Projection, Shared, StreamVerbs,
    VectorSpec, Verbs,
};
use nq_model::{ModelConfig, Product};
use nq_runtime::images::Coordinates;
use nq_runtime::interface::{AppliedAdapter, LoadOptions, Observer};
use nq_runtime::models::LayerWeights;
use nq_runtime::rope::Rotary;
use nq_runtime::stacks::Stacks;
use nq_runtime::states::delta_shape;
use nq_runtime::weights::Census;
use nq_runtime::{Error, Result};
use std::ops::Range;

/// Repacks `weights` as layer `index`, counting them in `census`.
pub(crate) fn pack_layer(
    cpu: &Cpu,
    config: &ModelConfig,
    options: &LoadOptions,
    index: usize,
    weights: &LayerWeights,
    census: &mut Census,
) -> Result<CpuLayer> {
    let stacks = Stacks::apart(weights.spec);
    let linear = |product: &'static Product| {
        let parts = stacks.of_product(product);
        let copies = parts.first().map_or(1, |part| part.copies(config));
        let parts: Vec<_> = parts
            .iter()
            .map(|part| part.weight(weights))
            .collect::<Result<_>>()?;
        let parts: Vec<&Weight> = parts.iter().map(|part| &**part).collect();
        if weights.spec.kept_products().contains(&product) {
            // The weights that choose experts, and the like, are neither rounded, whatever the options say, nor
            // counted.
            let linear = Linear::new(cpu, &parts, Activations::F32, options.kernels)?;
            return Ok(linear.named(product.name));
        }
        pack(cpu, options, product.name, copies, &parts, census)
    };
    let vector = |vector: VectorSpec| weights.values(vector);
    CpuLayer::new(index, weights.spec, linear, vector)
}

/// Bytes of a layer that one token reads.
pub(crate) fn layer_bytes(config: &ModelConfig, layer: &CpuLayer) -> usize {
    let vectors = layer.vectors().map(|v| 4 * v.len()).sum::<usize>();
    vectors + layer.bytes_per_token(config, Linear::bytes)
}

/// Repacks weights that share an input, rounded as `options` say, and counts them in `census`.
/// Profiles list the product under `name`. Each part is a stack of `experts` weights, or one
/// weight.
pub fn pack(
    cpu: &Cpu,
    options: &LoadOptions,
    name: &'static str,
    experts: usize,
    parts: &[&Weight],
    census: &mut Census,
) -> Result<Linear> {
    let kernels = options.kernels;
    let supports = |w: &Weight, a| Linear::supports(cpu, w, a, kernels);
    let activations = options.activations.resolve(parts, supports);
    census.add(parts, activations);
    Ok(Linear::of_experts(cpu, parts, experts, activations, kernels)?.named(name))
}

/// The buffers that a layer works on, besides its weights.
pub(crate) struct Pass<'a> {
    pub(crate) cpu: &'a Cpu,
    pub(crate) config: &'a ModelConfig,
    pub(crate) batch: &'a Batch,
    /// What the layer keeps of its sequences.
    pub(crate) cache: &'a mut LayerCache,
    /// The page table of each slot's sequence.
    pub(crate) tables: &'a [Vec<u32>],
    pub(crate) scratch: &'a mut Scratch,
    /// The residual stream `[m, hidden]`, or `[m, streams, hidden]`.
    pub(crate) x: &'a mut [f32],
    /// What models with several streams read besides; `None` for a layer that drafts.
    pub(crate) inputs: Option<StreamInputs<'a>>,
    /// Queries, keys and values `[m, q_dim + 2 kv_dim]` of attention, if they were made of more than `x`.
    pub(crate) qkv: Option<&'a [f32]>,
    pub(crate) observer: &'a mut dyn Observer,
    /// Keeps the inputs of recurrences, for sequences that may be cut within their rows.
    pub(crate) kept: Option<&'a mut KeptRows>,
}

impl Verbs for Pass<'_> {
    type Linear = Linear;
    type Vector = Vec<f32>;
    type Error = Error;

    fn norm(&mut self, norm: &Vec<f32>) -> Result<()> {
        let (c, m) = (self.config, self.batch.rows());
        let normed = &mut self.scratch.normed[..m * c.stream_width()];
        match c.hyper {
            None => self.cpu.rms_norm(self.x, norm, c.rms_norm_eps, normed),
            Some(_) => {
                let (h, eps) = (c.hidden_size, c.rms_norm_eps);
                self.cpu.stream_norm(self.x, norm, h, eps, normed);
            }
        }
        Ok(())
    }

    fn streams(&mut self) -> Result<&mut dyn StreamVerbs<Linear, Vec<f32>, Error>> {
        Ok(self)
    }

    fn project(
        &mut self,
        layer: usize,
        _norm: &Vec<f32>,
        w: &Packed<Linear>,
        to: Projection,
    ) -> Result<()> {
        let (cpu, c, m) = (self.cpu, self.config, self.batch.rows());
        let (scratch, width) = (&mut *self.scratch, w.linear.out_features());
        let (adapted, key) = (&self.batch.adapted, ProductKey::new(layer, w.spec));
        if let (Projection::Mixer, Some(qkv)) = (to, self.qkv) {
            scratch.qkv[..m * width].copy_from_slice(qkv);
            return Ok(());
        }
        let normed = &scratch.normed[..m * c.hidden_size];
        let (out, epilogue, width) = match to {
            Projection::Mixer => (&mut scratch.qkv, Epilogue::Store, width),
            Projection::Gated => (&mut scratch.gated, Epilogue::SiluMul, width / 2),
            Projection::Rates => (&mut scratch.rates, Epilogue::Store, width),
            Projection::Scores => (&mut scratch.scores, Epilogue::Store, width),
            Projection::SharedScore => (&mut scratch.shared, Epilogue::Store, width),
        };
        if matches!(to, Projection::Mixer | Projection::Gated) {
            self.observer.linear_input(layer, w.spec, normed);
        }
        let out = &mut out[..m * width];
        if epilogue == Epilogue::SiluMul && adapted.changes(key) {
            // Adapters add to gate and up before these are multiplied.
            let mut gate_up = std::mem::take(&mut scratch.adapters.gate_up);
            let both = &mut gate_up[..2 * m * width];
            cpu.linear(&w.linear, normed, both, Epilogue::Store)?;
            adapted.add(cpu, key, normed, both, &mut scratch.adapters)?;
            cpu.silu_mul(&w.linear, both, out);
            scratch.adapters.gate_up = gate_up;
            return Ok(());
        }
        cpu.linear(&w.linear, normed, out, epilogue)?;
        adapted.add(cpu, key, normed, out, &mut scratch.adapters)
    }

    fn attend(
        &mut self,
        _layer: usize,
        vectors: &HeadVectors<Vec<f32>>,
        _o: &Packed<Linear>,
    ) -> Result<()> {
        let (first, stride) = self.append(vectors);
        self.attend_rows(first, stride);
        let (c, m) = (self.config, self.batch.rows());
        let attended = &mut self.scratch.attended[..m * c.q_dim()];
        // None without gates.
        let gates = &self.scratch.gates[..m * first];
        (attended.iter_mut().zip(gates)).for_each(|(y, g)| *y *= sigmoid(*g));
        Ok(())
    }

    fn recur(
        &mut self,
        layer: usize,
        _norm: &Vec<f32>,
        delta: &Delta<Linear, Vec<f32>>,
    ) -> Result<()> {
        let (cpu, c, m) = (self.cpu, self.config, self.batch.rows());
        let shape = delta_shape(c);
        let Scratch {
            qkv,
            attended,
            rates,
            ..
        } = &mut *self.scratch;
        let qkvz = &mut qkv[..m * delta.inputs.linear.out_features()];
        let ba = &mut rates[..m * delta.rates.linear.out_features()];
        let out = &mut attended[..m * shape.values()];
        if let Some(kept) = &mut self.kept {
            let spans = || self.batch.slot_spans();
            kept.keep(layer, spans(), (KeptInput::Qkvz, qkvz), m);
            kept.keep(layer, spans(), (KeptInput::Ba, ba), m);
        }
        let vectors = delta_vectors(delta, c.delta.map_or_else(Default::default, |d| d.gate));
        let parts = StateParts::of_layer(c, c.layer(layer));
        // In two parts where states are kept on the way, which changes no bit.
        for part in [MarkSide::First, MarkSide::Rest] {
            let spans = self.batch.part(part);
            if spans.iter().all(|span| span.len == 0) {
                continue;
            }
            let rows = DeltaRows {
                qkvz: &mut *qkvz,
                ba: &*ba,
            };
            let mut states = self.cache.states_mut(&self.batch.slots, &parts.delta);
            let eps = c.rms_norm_eps;
            cpu.delta(&shape, &vectors, rows, &spans, &mut states, eps, out);
            if part == MarkSide::First {
                for (slot, place) in self.batch.marked() {
                    self.cache.copy_part(slot, place, &parts.delta);
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, layer: usize, operand: Operand, w: &Packed<Linear>) -> Result<()> {
        let is_last = matches!(operand, Operand::Gated);
        let scratch = &mut *self.scratch;
        let operand = match operand {
            Operand::Attended => &scratch.attended,
            Operand::Gated => &scratch.gated,
        };
        let operand = &operand[..self.batch.rows() * w.linear.in_features()];
        self.observer.linear_input(layer, w.spec, operand);
        // An MLP, or the expert of all rows, is the last that a layer adds.
        if is_last && !self.observer.wants_output() {
            return Ok(());
        }
        // What several streams get is added to each at the end of the block.
        let to = match self.config.hyper {
            None => &mut *self.x,
            Some(_) => {
                &mut scratch.streams.added
                    [..operand.len() / w.linear.in_features() * w.linear.out_features()]
            }
        };
        (self.cpu).linear(&w.linear, operand, to, Epilogue::Add)?;
        let (adapted, key) = (&self.batch.adapted, ProductKey::new(layer, w.spec));
        adapted.add(self.cpu, key, operand, to, &mut scratch.adapters)
    }

    fn mix(&mut self, layer: usize, _norm: &Vec<f32>, experts: &Experts<Linear>) -> Result<()> {
        let (cpu, c, m) = (self.cpu, self.config, self.batch.rows());
        let Some(shape) = &c.experts else {
            unreachable!("layers with experts have an expert shape");
        };
        let normed = &self.scratch.normed[..m * c.hidden_size];
        let (gate_up, down) = (&experts.gate_up, &experts.down);
        if self.observer.wants_inputs() {
            self.observer.linear_input(layer, gate_up.spec, normed);
            // Sends every row through every expert, chosen or not.
            let mut gated = vec![0.0; m * shape.width];
            for expert in 0..shape.count {
                cpu.gated_by(&gate_up.linear, expert, normed, &mut gated)?;
                self.observer.expert_input(layer, down.spec, expert, &gated);
            }
        }
        let routes = Routes::new(&self.scratch.scores[..m * shape.count], shape);
        self.observer.routed(layer, &routes);
        let to = match c.hyper {
            None => &mut *self.x,
            Some(_) => &mut self.scratch.streams.added[..m * c.hidden_size],
        };
        Ok(cpu.experts(&gate_up.linear, &down.linear, &routes, normed, to)?)
    }

    fn weigh(&mut self, shared: &Shared<Linear>) -> Result<()> {
        let width = shared.mlp.down.linear.in_features();
        let Scratch { gated, shared, .. } = &mut *self.scratch;
        let rows = gated.chunks_exact_mut(width);
        for (row, score) in rows.zip(&shared[..self.batch.rows()]) {
            let score = sigmoid(*score);
            row.iter_mut().for_each(|v| *v *= score);
        }
        Ok(())
    }

    fn end_layer(&mut self, layer: usize) -> Result<()> {
        self.observer.layer_output(layer, self.x);
        Ok(())
    }
}

impl Pass<'_> {
    /// Prepares the queries, keys and values that a product left in the scratch, and appends keys and values to the
    /// rows' sequences. Returns where in a row the queries begin, and the width of a row.
    fn append(&mut self, vectors: &HeadVectors<Vec<f32>>) -> (usize, usize) {
        let (cpu, c, batch) = (self.cpu, self.config, self.batch);
        let (heads, kv_heads, d) = (c.num_attention_heads, c.num_key_value_heads, c.head_dim);
        let (q_dim, kv_dim, eps) = (c.q_dim(), c.kv_dim(), c.rms_norm_eps);
        // With gates, the queries become consecutive behind as many values that nobody reads.
        let first = if vectors.gated { q_dim } else { 0 };
        let (m, stride) = (batch.rows(), first + q_dim + 2 * kv_dim);
        let qkv = &mut self.scratch.qkv[..m * stride];
        let (table, rows) = ((&batch.cos_sin[..], c.rotary_dims() / 2), &batch.row_ids);
        for row in qkv
            .chunks_exact_mut(stride)
            .filter(|_| !vectors.biases.is_empty())
        {
            let bias = vectors.biases.iter().flatten();
            row.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
        }
        let gates = &mut self.scratch.gates[..m * first];
        for (row, gates) in (qkv.chunks_exact_mut(stride)).zip(gates.chunks_exact_mut(q_dim)) {
            part_gates(row, gates, d);
        }
        let norms = vectors.norms.as_ref();
        for (start, heads, norm) in [
            (first, heads, norms.map(|[q, _]| &q[..])),
            (first + q_dim, kv_heads, norms.map(|[_, k]| &k[..])),
        ] {
            cpu.turn_heads(qkv, stride, (start, heads, d), (norm, eps), table, rows);
        }
        let tables = self.tables;
        let pages = &mut self.cache.pages_mut().kv;
        for (span, &slot) in batch.spans.iter().zip(&batch.slots) {
            for r in 0..span.len {
                let row = &qkv[(span.row + r) * stride + first + q_dim..][..2 * kv_dim];
                let (keys, values) = row.split_at(kv_dim);
                let position = span.position + r;
                let page = tables[slot][position / PAGE];
                pages.store(page, position % PAGE, keys, values);
            }
        }
        (first, stride)
    }

    /// Behind the rows before marks, copies a part of the states of the sequences that have one to where marks say.
    pub(super) fn copy_marked(&mut self, part: MarkSide, range: &Range<usize>) {
        if part == MarkSide::First {
            for (slot, place) in self.batch.marked() {
                self.cache.copy_part(slot, place, range);
            }
        }
    }

    /// Appends keys and values of the rows `x` to their sequences, and leaves `x` as it is.
    pub(crate) fn fill(
        &mut self,
        norm: &Vec<f32>,
        attention: &forward::Attention<Linear, Vec<f32>>,
    ) -> Result<()> {
        self.norm(norm)?;
        self.project(0, norm, &attention.qkv, Projection::Mixer)?;
        self.append(&attention.heads);
        Ok(())
    }
}

/// Parts the queries of a row, which stand before each head's gates, from the gates: the gates go to `gates`
/// `[heads, d]`, the queries to the same place behind the first `heads d` values.
fn part_gates(row: &mut [f32], gates: &mut [f32], d: usize) {
    let heads = gates.len() / d;
    // From the last on, a head's place is behind whatever has not been moved.
    for head in (0..heads).rev() {
        let from = 2 * head * d;
        gates[head * d..][..d].copy_from_slice(&row[from + d..][..d]);
        row.copy_within(from..from + d, (heads + head) * d);
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The sequence and position of each row of a forward.
#[derive(Default)]
pub(crate) struct Batch {
    spans: Vec<Span>,
    slots: Vec<usize>,             // [spans]: whose page tables
    marks: Vec<Option<StateMark>>, // [spans]
    cos_sin: Vec<(f32, f32)>,      // [rows, half of the values of a head that are rotated]
    row_ids: Vec<usize>,           // 0 .. rows: each row has a table row of its own
    adapted: AdaptedBatch,
}

impl Batch {
    /// Room for `rows` rows, so that filling it does not allocate.
    pub(crate) fn with_capacity(config: &ModelConfig, rows: usize, slots: usize) -> Self {
        Batch {
            spans: Vec::with_capacity(slots),
            slots: Vec::with_capacity(slots),
            marks: Vec::with_capacity(slots),
            cos_sin: Vec::with_capacity(rows * config.rotary_dims() / 2),
            row_ids: Vec::with_capacity(rows),
            adapted: AdaptedBatch::default(),
        }
    }

    /// Removes all rows.
    pub(crate) fn clear(&mut self) {
        self.spans.clear();
        self.slots.clear();
        self.marks.clear();
        self.cos_sin.clear();
        self.row_ids.clear();
        self.adapted.clear();
    }

    /// Adds the rows of the sequence in `slot` at `positions`, each of which stands where `coordinates` say.
    pub(crate) fn push(
        &mut self,
        rotary: &Rotary,
        slot: usize,
        positions: Range<usize>,
        coordinates: impl Fn(usize) -> Coordinates,
    ) {
        let (position, len) = (positions.start, positions.len());
        let (row, half) = (self.rows(), rotary.inv_freq().len());
        self.spans.push(Span { row, len, position });
        self.slots.push(slot);
        self.marks.push(None);
        self.row_ids.extend(row..row + len);
        self.cos_sin.resize((row + len) * half, (0.0, 0.0));
        let table = self.cos_sin[row * half..].chunks_exact_mut(half.max(1));
        for (position, out) in positions.zip(table) {
            rotary.row_at(coordinates(position), out);
        }
    }

    /// Adds `applied`, which is one of `adapters`, to the rows of the last span.
    pub(super) fn adapt(&mut self, adapters: &CpuAdapters, applied: &AppliedAdapter) {
        if let Some(span) = self.spans.last() {
            let rows = span.row..span.row + span.len;
            self.adapted.push(adapters, applied, rows);
        }
    }

    /// Has the state that the last span's sequence has after `rows` of its rows copied to `place`.
    pub(crate) fn mark(&mut self, rows: usize, place: usize) {
        if let Some(last) = self.marks.last_mut() {
            *last = Some(StateMark { rows, place });
        }
    }

    /// The slots whose states are copied on the way, and where to.
    fn marked(&self) -> impl Iterator<Item = (usize, usize)> {
        let marks = self.slots.iter().zip(&self.marks);
        marks.filter_map(|(&slot, mark)| Some((slot, mark.as_ref()?.place)))
    }

    /// The rows of each sequence before its mark, or behind it. Without one, all are before it.
    pub(super) fn part(&self, part: MarkSide) -> Vec<Span> {
        let keep = |(span, mark): (&Span, &Option<StateMark>)| {
            let before = mark.as_ref().map_or(span.len, |m| m.rows);
            match part {
                MarkSide::First => Span {
                    len: before,
                    ..*span
                },
                MarkSide::Rest => Span {
                    row: span.row + before,
                    len: span.len - before,
                    position: span.position + before,
                },
            }
        };
        self.spans.iter().zip(&self.marks).map(keep).collect()
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.row_ids.len()
    }

    /// The rows of each sequence, in the order they were pushed.
    pub(crate) fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The slots of their sequences.
    pub(super) fn slots(&self) -> &[usize] {
        &self.slots
    }

    /// The rows of each sequence, with its slot.
    pub(super) fn slot_spans(&self) -> impl Iterator<Item = (usize, Span)> + use<'_> {
        self.slots.iter().copied().zip(self.spans.iter().copied())
    }

    /// Cosines and sines of the rows' positions, and the row of these of each row.
    pub(super) fn turns(&self) -> (&[(f32, f32)], &[usize]) {
        (&self.cos_sin, &self.row_ids)
    }

    /// The adapters of the rows.
    pub(super) fn adapted(&self) -> &AdaptedBatch {
        &self.adapted
    }
}

/// A place in a span at which its sequence's states are copied.
#[derive(Debug)]
struct StateMark {
    /// Rows of the span before it.
    rows: usize,
    /// Where to.
    place: usize,
}

/// The rows before marks, or those behind them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MarkSide {
    First,
    Rest,
}

/// Intermediate results of a layer, for up to the given number of rows.
#[derive(Debug)]
pub(crate) struct Scratch {
    pub(super) normed: Vec<f32>,   // [rows, hidden], or all streams
    pub(super) qkv: Vec<f32>, // [rows, q_dim + 2 kv_dim], with gates, or what a recurrence is made of
    pub(super) attended: Vec<f32>, // [rows, q_dim], or the values of a recurrence
    gates: Vec<f32>,          // [rows, q_dim]; none without gates
    rates: Vec<f32>,          // [rows, 2 value heads of a recurrence]
    gated: Vec<f32>,          // [rows, intermediate], or the width of the shared expert
    scores: Vec<f32>,         // [rows, experts]
    shared: Vec<f32>,         // [rows], scores of the shared expert
    pub(super) streams: StreamScratch,
    /// Without room, unless a session has adapters.
    pub(super) adapters: AdapterScratch,
}

impl Scratch {
    /// Values per row of each buffer.
    fn widths(c: &ModelConfig) -> [usize; 8] {
        let qkv = c.gate_dim() + c.q_dim() + 2 * c.kv_dim();
        let [inputs, values, rates] = match c.delta {
            None => [0; 3],
            Some(d) => [d.channels() + d.values(), d.values(), 2 * d.value_heads],
        };
        let (gated, scores, shared) = match c.experts {
            None => (c.intermediate_size, 0, 0),
            Some(experts) => (experts.shared, experts.count, 1),
        };
        [
            c.stream_width(),
            qkv.max(inputs),
            c.q_dim().max(values),
            c.gate_dim(),
            rates,
            gated,
            scores,
            shared,
        ]
    }

    /// Allocates buffers for `rows` rows.
    pub(crate) fn new(c: &ModelConfig, rows: usize) -> Self {
        let [normed, qkv, attended, gates, rates, gated, scores, shared] =
            Self::widths(c).map(|width| vec![0.0; rows * width]);
        Scratch {
            normed,
            qkv,
            attended,
            gates,
            rates,
            gated,
            scores,
            shared,
            streams: StreamScratch::new(c, rows),
            adapters: AdapterScratch::default(),
        }
    }

    /// Bytes that [`Scratch::new`] reserves.
    pub(crate) fn bytes(c: &ModelConfig, rows: usize) -> usize {
        let row: usize = Self::widths(c).iter().sum();
        size_of::<f32>() * rows * row + StreamScratch::bytes(c, rows)
    }
}
