//! A layer on the CPU, for sessions and for the layer stepper.

use crate::error::{Error, Result};
use crate::forward::{self, Experts, HeadVectors, Operand, Ops, Packed, Projection, VectorSpec};
use crate::interface::{LoadOptions, Observer};
use crate::models::LayerWeights;
use crate::rope::Rotary;
use crate::weights::Census;
use nq_formats::models::{LinearKind, Product};
use nq_formats::{ModelConfig, Weight};
use nq_kernels::cpu::{Cpu, Epilogue, FEW_ROWS, KvPages, KvSequence, Linear, Span};
use nq_kernels::pages::PAGE;
use nq_kernels::{Activations, Routes};

/// The weights of a layer, repacked for this CPU.
pub(crate) type Layer = forward::Layer<Linear, Vec<f32>>;

/// Repacks `weights` as layer `index`, counting them in `census`.
pub(crate) fn pack_layer(
    (cpu, config): (&Cpu, &ModelConfig),
    options: &LoadOptions,
    index: usize,
    weights: &LayerWeights,
    census: &mut Census,
) -> Result<Layer> {
    let linear = |product: &'static Product| {
        let parts = weights.product(product);
        let spec = &product.linears[0];
        if spec.kind == LinearKind::Router {
            // The weights that choose experts are neither rounded, whatever the options say, nor counted.
            let linear = Linear::new(cpu, &parts, Activations::F32, options.kernels)?;
            return Ok(linear.named(product.name));
        }
        pack(
            cpu,
            options,
            (product.name, spec.copies(config)),
            &parts,
            census,
        )
    };
    let vector = |vector: VectorSpec| Ok(weights.vector(vector).to_f32()?);
    Layer::new(index, weights.spec, linear, vector)
}

/// Bytes of a layer that one token reads.
pub(crate) fn layer_bytes(config: &ModelConfig, layer: &Layer) -> usize {
    let vectors = layer.vectors().map(|v| 4 * v.len()).sum::<usize>();
    vectors + layer.bytes_per_token(config, Linear::bytes)
}

/// Repacks weights that share an input, rounded as `options` say, and counts them in `census`.
/// Profiles list the product under `name`. Each part is a stack of `experts` weights, or one
/// weight.
pub(crate) fn pack(
    cpu: &Cpu,
    options: &LoadOptions,
    (name, experts): (&'static str, usize),
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
    /// The layer's keys and values.
    pub(crate) kv: &'a mut KvPages,
    /// The page table of each slot's sequence.
    pub(crate) tables: &'a [Vec<u32>],
    pub(crate) scratch: &'a mut Scratch,
    /// The residual stream `[m, hidden]`.
    pub(crate) x: &'a mut [f32],
    pub(crate) observer: &'a mut dyn Observer,
}

impl Ops for Pass<'_> {
    type Linear = Linear;
    type Vector = Vec<f32>;
    type Error = Error;

    fn project(
        &mut self,
        layer: usize,
        norm: &Vec<f32>,
        w: &Packed<Linear>,
        to: Projection,
    ) -> Result<()> {
        let (c, m) = (self.config, self.batch.rows());
        let normed = &mut self.scratch.normed[..m * c.hidden_size];
        self.cpu.rms_norm(self.x, norm, c.rms_norm_eps, normed);
        self.observer.linear_input(layer, w.spec, normed);
        let (out, epilogue) = match to {
            Projection::Qkv => {
                let width = c.q_dim() + 2 * c.kv_dim();
                (&mut self.scratch.qkv[..m * width], Epilogue::Store)
            }
            Projection::Gated => {
                let width = c.intermediate_size;
                (&mut self.scratch.gated[..m * width], Epilogue::SiluMul)
            }
        };
        Ok(self.cpu.linear(&w.linear, normed, out, epilogue)?)
    }

    fn attend(
        &mut self,
        _layer: usize,
        vectors: &HeadVectors<Vec<f32>>,
        _o: &Packed<Linear>,
    ) -> Result<()> {
        let (cpu, c, batch) = (self.cpu, self.config, self.batch);
        let (heads, kv_heads, d) = (c.num_attention_heads, c.num_key_value_heads, c.head_dim);
        let (q_dim, kv_dim, eps) = (c.q_dim(), c.kv_dim(), c.rms_norm_eps);
        let (m, stride) = (batch.rows(), q_dim + 2 * kv_dim);
        let qkv = &mut self.scratch.qkv[..m * stride];
        let (table, rows) = (&batch.cos_sin, &batch.row_ids);
        for row in qkv
            .chunks_exact_mut(stride)
            .filter(|_| !vectors.biases.is_empty())
        {
            let bias = vectors.biases.iter().flatten();
            row.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
        }
        let norms = vectors.norms.as_ref();
        for (start, heads, norm) in [
            (0, heads, norms.map(|[q, _]| &q[..])),
            (q_dim, kv_heads, norms.map(|[_, k]| &k[..])),
        ] {
            cpu.turn_heads(qkv, stride, (start, heads, d), (norm, eps), table, rows);
        }
        let tables = self.tables;
        for (span, &slot) in batch.spans.iter().zip(&batch.slots) {
            for r in 0..span.len {
                let row = &qkv[(span.row + r) * stride + q_dim..][..2 * kv_dim];
                let (keys, values) = row.split_at(kv_dim);
                let position = span.position + r;
                let page = tables[slot][position / PAGE];
                self.kv.store(page, position % PAGE, keys, values);
            }
        }
        let kv = &*self.kv;
        let sequence = |i: usize| KvSequence::new(kv, &tables[batch.slots[i]]);
        let attended = &mut self.scratch.attended[..m * q_dim];
        cpu.attention_batch(qkv, stride, &batch.spans, heads, d, sequence, attended);
        Ok(())
    }

    fn add(&mut self, layer: usize, operand: Operand, w: &Packed<Linear>) -> Result<()> {
        let (c, m) = (self.config, self.batch.rows());
        let operand = match operand {
            Operand::Attended => &self.scratch.attended[..m * c.q_dim()],
            Operand::Gated => &self.scratch.gated[..m * c.intermediate_size],
        };
        self.observer.linear_input(layer, w.spec, operand);
        Ok(self.cpu.linear(&w.linear, operand, self.x, Epilogue::Add)?)
    }

    fn add_experts(
        &mut self,
        layer: usize,
        norm: &Vec<f32>,
        experts: &Experts<Linear>,
    ) -> Result<()> {
        let (cpu, c, m) = (self.cpu, self.config, self.batch.rows());
        let Some(shape) = &c.experts else {
            unreachable!("layers with experts have an expert shape");
        };
        let normed = &mut self.scratch.normed[..m * c.hidden_size];
        let scores = &mut self.scratch.scores[..m * shape.count];
        cpu.rms_norm(self.x, norm, c.rms_norm_eps, normed);
        // Few rows go one by one: float sums depend on how many rows go together, and the choice of
        // experts depends on those sums.
        let rows = if m <= FEW_ROWS { 1 } else { m };
        let (x, y) = (rows * c.hidden_size, rows * shape.count);
        for (x, y) in normed.chunks(x).zip(scores.chunks_mut(y)) {
            cpu.linear(&experts.router.linear, x, y, Epilogue::Store)?;
        }
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
        let routes = Routes::new(scores, shape);
        self.observer.routed(layer, &routes);
        Ok(cpu.experts(&gate_up.linear, &down.linear, &routes, normed, self.x)?)
    }

    fn end_layer(&mut self, layer: usize) -> Result<()> {
        self.observer.layer_output(layer, self.x);
        Ok(())
    }
}

/// The sequence and position of each row of a forward.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    spans: Vec<Span>,
    slots: Vec<usize>,        // [spans]: whose page tables
    cos_sin: Vec<(f32, f32)>, // [rows, head_dim / 2]
    row_ids: Vec<usize>,      // 0 .. rows: each row has a table row of its own
}

impl Batch {
    /// Room for `rows` rows, so that filling it does not allocate.
    pub(crate) fn with_capacity(config: &ModelConfig, rows: usize, slots: usize) -> Self {
        Batch {
            spans: Vec::with_capacity(slots),
            slots: Vec::with_capacity(slots),
            cos_sin: Vec::with_capacity(rows * config.head_dim / 2),
            row_ids: Vec::with_capacity(rows),
        }
    }

    /// Removes all rows.
    pub(crate) fn clear(&mut self) {
        self.spans.clear();
        self.slots.clear();
        self.cos_sin.clear();
        self.row_ids.clear();
    }

    /// Adds `len` rows of the sequence in `slot`, from `position` on.
    pub(crate) fn push(&mut self, rotary: &Rotary, slot: usize, position: usize, len: usize) {
        let (row, half) = (self.rows(), rotary.inv_freq().len());
        self.spans.push(Span { row, len, position });
        self.slots.push(slot);
        self.row_ids.extend(row..row + len);
        self.cos_sin.resize((row + len) * half, (0.0, 0.0));
        let table = self.cos_sin[row * half..].chunks_exact_mut(half.max(1));
        for (i, out) in table.enumerate() {
            rotary.row(position + i, out);
        }
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.row_ids.len()
    }

    /// The rows of each sequence, in the order they were pushed.
    pub(crate) fn spans(&self) -> &[Span] {
        &self.spans
    }
}

/// Intermediate results of a layer, for up to the given number of rows.
#[derive(Debug)]
pub(crate) struct Scratch {
    normed: Vec<f32>,   // [rows, hidden]
    qkv: Vec<f32>,      // [rows, q_dim + 2 kv_dim]
    attended: Vec<f32>, // [rows, q_dim]
    gated: Vec<f32>,    // [rows, intermediate]; none where there are experts
    scores: Vec<f32>,   // [rows, experts]
}

impl Scratch {
    /// Values per row of each buffer.
    fn widths(c: &ModelConfig) -> [usize; 5] {
        let qkv = c.q_dim() + 2 * c.kv_dim();
        let (gated, scores) = match c.experts {
            None => (c.intermediate_size, 0),
            Some(experts) => (0, experts.count),
        };
        [c.hidden_size, qkv, c.q_dim(), gated, scores]
    }

    /// Allocates buffers for `rows` rows.
    pub(crate) fn new(c: &ModelConfig, rows: usize) -> Self {
        let [normed, qkv, attended, gated, scores] =
            Self::widths(c).map(|width| vec![0.0; rows * width]);
        Scratch {
            normed,
            qkv,
            attended,
            gated,
            scores,
        }
    }

    /// Bytes that [`Scratch::new`] reserves.
    pub(crate) fn bytes(c: &ModelConfig, rows: usize) -> usize {
        let row: usize = Self::widths(c).iter().sum();
        size_of::<f32>() * rows * row
    }
}
