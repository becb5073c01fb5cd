//! What a pass launches: recorded once for a session, by the verbs of a layer, and replayed with the kernels that serve
//! its number of rows.

use crate::buffers::{Buffers, Kept};
use crate::experts::{ExpertsOp, MOST_EXPERTS, MOST_ROUTES, weigh};
use crate::gpu::{BoundKernel, Gpu, Grid, LaunchPass};
use crate::kernels::{
    DRAW_PARTS, HeadKinds, Heads, attention, combine, draw, norm, prepare_heads, round, silu,
};
use crate::linear::Linear;
use crate::model::WgpuModel;
use crate::product::{BoundProduct, Operands, Outputs, ProductKernels, RowProduct, STEP_ROWS};
use crate::recurrence::{Recurrence, RecurrenceOp, WIDEST, vectors};
use crate::sizes::Part;
use crate::source::KernelSource;
use nq_kernels::pages::KvType;
use nq_model::forward::{
    Delta, Experts, HeadVectors, Operand, Packed, Projection, Shared, StreamVerbs, Verbs,
};
use nq_model::{Dims, Mixer, ModelConfig};
use nq_runtime::states::delta_shape;
use nq_runtime::{Error, Result};
use std::ops::Range;
use wgpu::Buffer;

/// A kernel over rows: a workgroup for each of them, or as many as `heads` says.
struct RowsOp {
    kernel: BoundKernel,
    heads: usize,
}

impl RowsOp {
    fn new(gpu: &Gpu, source: &KernelSource, heads: usize, buffers: &[&Buffer]) -> Result<Self> {
        let kernel = gpu.bound(source, buffers)?;
        Ok(RowsOp { kernel, heads })
    }

    fn launch(&self, pass: &mut LaunchPass<'_>, rows: usize) {
        self.kernel.launch(pass, Grid::new(rows, self.heads));
    }
}

/// A product, and what prepares its inputs.
struct ProductOp {
    name: &'static str,
    shape: Dims,
    /// Bytes of its weight.
    bytes: usize,
    inputs: Option<RowsOp>,
    /// False if another product of the same norm has prepared them in passes of several rows.
    first: bool,
    product: BoundProduct,
    /// What serves passes of one row in place of both.
    row: Option<RowProduct>,
}

impl ProductOp {
    /// Adds the product of `rows` rows. `alone` is the one row of a pass.
    fn launch(
        &self,
        gpu: &Gpu,
        pass: &mut LaunchPass<'_>,
        rows: usize,
        alone: bool,
        known: &mut ProductKernels,
    ) -> Result<()> {
        let kernel = match &self.row {
            Some(row) if alone => {
                row.launch(pass, 1);
                "gemv_row"
            }
            _ => {
                if let Some(inputs) = self.inputs.as_ref().filter(|_| self.first || alone) {
                    inputs.launch(pass, rows);
                    pass.ends(("inputs", "rows", Dims::new(1, self.shape.cols)), 0);
                }
                self.product.launch(gpu, pass, rows, known)?;
                if rows <= STEP_ROWS { "gemv" } else { "gemm" }
            }
        };
        pass.ends((self.name, kernel, self.shape), self.bytes);
        Ok(())
    }
}

/// Workgroups of a step's attention up to which each has one query: about as many as a large GPU runs at once.
const APART: usize = 256;

/// Attention of a layer.
struct AttentionOp {
    shape: Heads,
    /// Serve steps in which every sequence has one row: short ones a query at a time.
    alone: BoundKernel,
    apart: BoundKernel,
    /// Prepares heads where sequences have several rows.
    heads: RowsOp,
    tiles: BoundKernel,
    /// Adds up parts of the keys.
    combine: RowsOp,
}

impl AttentionOp {
    fn launch(&self, pass: &mut LaunchPass<'_>, attended: Attended) {
        let dims = Dims::new(self.shape.count, self.shape.dim);
        let grid = |shape: Heads| Grid {
            x: attended.splits,
            y: shape.kv * shape.shares(),
            z: attended.tiles,
        };
        let queries = self.shape.count * attended.splits * attended.tiles;
        if attended.alone && queries <= APART {
            self.apart.launch(pass, grid(self.shape.apart()));
        } else if attended.alone {
            self.alone.launch(pass, grid(self.shape));
        } else {
            self.heads.launch(pass, attended.rows);
            pass.ends(("heads", "heads", dims), 0);
            self.tiles.launch(pass, grid(self.shape));
        }
        pass.ends(("attention", "attention", dims), attended.bytes);
        if attended.splits > 1 {
            self.combine.launch(pass, attended.rows);
            pass.ends(("attention", "combine", dims), 0);
        }
    }
}

/// An operation of a layer.
enum Op {
    Rows(&'static str, RowsOp),
    Product(ProductOp),
    Attention(AttentionOp),
    Recurrence(RecurrenceOp),
    /// Experts, and what prepares their inputs in prompts.
    Experts(Option<RowsOp>, Box<ExpertsOp>),
}

/// What the layers, and behind them the head, launch.
pub(crate) struct Program {
    /// By layer.
    layers: Vec<Vec<Op>>,
    /// The final norm of wanted rows.
    norm: RowsOp,
    head: ProductOp,
    /// Finds the best token of each row in parts of the vocabulary.
    draw: RowsOp,
    pub(crate) heads: Heads,
    known: ProductKernels,
}

/// What a pass attends to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attended {
    pub(crate) rows: usize,
    /// Sequences that they belong to.
    pub(crate) sequences: usize,
    pub(crate) tiles: usize,
    pub(crate) splits: usize,
    /// True for a step in which every sequence has one row.
    pub(crate) alone: bool,
    /// Bytes of keys and values of a layer that it reads.
    pub(crate) bytes: usize,
}

impl Program {
    /// Records the passes of `model` over `buffers`.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses a kernel.
    pub(crate) fn new(model: &WgpuModel, buffers: &Buffers, kv: KvType) -> Result<Self> {
        let (gpu, c, b) = (&model.gpu, &model.config, buffers);
        let heads = Heads::of(c, kv);
        let mut recorder = Recorder {
            gpu,
            config: c,
            heads,
            buffers,
            gains: None,
            prepared: [false; 2],
            ops: Vec::new(),
        };
        let mut layers = Vec::with_capacity(model.layers.len());
        for layer in &model.layers {
            layer.run(&mut recorder)?;
            layers.push(std::mem::take(&mut recorder.ops));
        }
        let gains = gpu.upload("gains of a norm", &model.norm)?;
        let source = recorder.norm_source().flag("GATHER", true);
        let [stream, head_in, logits] = [Part::Stream, Part::HeadIn, Part::Logits].map(|p| &b[p]);
        let gathered = [&b.head_step, stream, &b[Part::Batch], &gains, head_in];
        let norm = RowsOp::new(gpu, &source, 1, &gathered)?;
        let (input, step) = (Input::Rows(head_in), &b.head_step);
        let mut head = recorder.product_op(&model.head, step, input, logits, Outputs::Stored)?;
        // A pass of one row wants that one. Where inputs are not rounded, every workgroup would multiply them by gains
        // for itself, which takes longer than a launch with so many outputs.
        if model.head.rounds {
            let operands = Operands {
                step,
                x: stream,
                beside: &gains,
                y: logits,
            };
            let eps = Some(c.rms_norm_eps);
            head.row = RowProduct::new(gpu, &model.head, operands, Outputs::Stored, eps, None)?;
        }
        Ok(Program {
            layers,
            norm,
            head,
            draw: RowsOp::new(
                gpu,
                &draw(c.vocab_size),
                DRAW_PARTS,
                &[logits, &b[Part::Best]],
            )?,
            heads,
            known: ProductKernels::new(),
        })
    }

    /// Operations of a pass of `model` at most: three of each product, and of attention.
    pub(crate) fn most_ops(model: &WgpuModel) -> usize {
        let layers = model.layers.iter();
        let products: usize = layers.map(|layer| layer.linears().count() + 1).sum();
        3 * (products + 1)
    }

    /// Adds the launches of these layers to `pass`.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses a kernel for as many rows.
    pub(crate) fn layers(
        &mut self,
        gpu: &Gpu,
        pass: &mut LaunchPass<'_>,
        layers: Range<usize>,
        attended: Attended,
    ) -> Result<()> {
        let rows = attended.rows;
        for op in self.layers[layers].iter().flatten() {
            match op {
                Op::Rows(name, op) => {
                    op.launch(pass, rows);
                    pass.ends((name, "rows", Dims::new(1, op.heads)), 0);
                }
                Op::Product(op) => op.launch(gpu, pass, rows, rows == 1, &mut self.known)?,
                Op::Attention(op) => op.launch(pass, attended),
                Op::Recurrence(op) => op.launch(pass, rows, attended.sequences),
                Op::Experts(inputs, op) => {
                    let inputs = inputs.iter().filter(|_| rows > STEP_ROWS);
                    inputs.for_each(|inputs| inputs.launch(pass, rows));
                    op.launch(pass, rows);
                }
            }
        }
        Ok(())
    }

    /// Adds what finds the best tokens of `rows` rows of logits.
    pub(crate) fn draw(&self, pass: &mut LaunchPass<'_>, rows: usize) {
        self.draw.launch(pass, rows);
        pass.ends(("draw", "rows", Dims::new(1, self.head.shape.rows)), 0);
    }

    /// Adds the final norm of `rows` wanted rows, and the head if logits are asked for. `alone` is the one row of a
    /// pass.
    ///
    /// # Errors
    /// As [`Program::layers`].
    pub(crate) fn head(
        &mut self,
        gpu: &Gpu,
        pass: &mut LaunchPass<'_>,
        rows: usize,
        alone: bool,
        logits: bool,
    ) -> Result<()> {
        if !(alone && logits && self.head.row.is_some()) {
            self.norm.launch(pass, rows);
            pass.ends(("norm", "rows", Dims::new(1, self.head.shape.cols)), 0);
        }
        match logits {
            true => self.head.launch(gpu, pass, rows, alone, &mut self.known),
            false => Ok(()),
        }
    }
}

/// What a product multiplies.
#[derive(Clone, Copy)]
enum Input<'a> {
    /// The stream, normalized.
    Normed,
    /// These rows.
    Rows(&'a Buffer),
}

/// Records what the verbs of a layer launch.
struct Recorder<'a> {
    gpu: &'a Gpu,
    config: &'a ModelConfig,
    heads: Heads,
    buffers: &'a Buffers,
    /// Gains of the block's norm.
    gains: Option<Buffer>,
    /// Whether a product of the block has normalized rows prepared: as they are, and rounded.
    prepared: [bool; 2],
    ops: Vec<Op>,
}

impl Recorder<'_> {
    fn norm_source(&self) -> KernelSource {
        norm(self.config.hidden_size, self.config.rms_norm_eps)
    }

    /// `x` times the weight, to `y`; behind the norm of the stream or the rounding that its kernel reads.
    fn product_op(
        &mut self,
        linear: &Linear,
        step: &Buffer,
        input: Input<'_>,
        y: &Buffer,
        outputs: Outputs,
    ) -> Result<ProductOp> {
        let b = self.buffers;
        let (x, gains) = match input {
            Input::Normed => (&b[Part::Normed], self.gains.clone()),
            Input::Rows(x) => (x, None),
        };
        let prepared = &mut self.prepared[usize::from(linear.rounds)];
        let first = gains.is_none() || !std::mem::replace(prepared, true);
        let rounded = (&b[Part::Rounded], &b[Part::RoundedScales]);
        let inputs = match (&gains, linear.rounds) {
            (None, false) => None,
            (None, true) => {
                let buffers = [step, x, rounded.0, rounded.1];
                Some(RowsOp::new(self.gpu, &round(linear.inputs), 1, &buffers)?)
            }
            (Some(gains), rounds) => Some(self.norm_op(step, gains, rounds)?),
        };
        let operands = |(x, beside)| Operands { step, x, beside, y };
        let (of_row, eps) = match &gains {
            Some(gains) => ((&b[Part::Stream], gains), Some(self.config.rms_norm_eps)),
            None => ((x, x), None),
        };
        let row = RowProduct::new(self.gpu, linear, operands(of_row), outputs, eps, None)?;
        let operands = operands(if linear.rounds { rounded } else { (x, x) });
        Ok(ProductOp {
            name: linear.name,
            shape: Dims::new(linear.outputs, linear.inputs),
            bytes: linear.bytes(),
            inputs,
            first,
            product: BoundProduct::new(self.gpu, linear, operands, outputs)?,
            row,
        })
    }

    /// What normalizes the stream with these gains, and rounds it if it `rounds`.
    fn norm_op(&self, step: &Buffer, gains: &Buffer, rounds: bool) -> Result<RowsOp> {
        let b = self.buffers;
        let mut buffers = vec![step, &b[Part::Stream], &b[Part::Batch], gains];
        match rounds {
            true => buffers.extend([&b[Part::Rounded], &b[Part::RoundedScales]]),
            false => buffers.push(&b[Part::Normed]),
        }
        let source = self.norm_source().flag("ROUND", rounds);
        RowsOp::new(self.gpu, &source, 1, &buffers)
    }

    /// Records the product of the layers' step.
    fn product(
        &mut self,
        linear: &Linear,
        input: Input<'_>,
        y: &Buffer,
        outputs: Outputs,
    ) -> Result<()> {
        let step = &self.buffers.step;
        let op = self.product_op(linear, step, input, y, outputs)?;
        self.ops.push(Op::Product(op));
        Ok(())
    }

    fn unserved<T>(&self, what: &'static str) -> Result<T> {
        Err(Error::Unsupported {
            engine: "nq over wgpu",
            what,
            expected: "blocks that its kernels run, or --device cpu".into(),
            found: "another block".into(),
        })
    }
}

/// Why no kernel here serves a model of this shape; `None` if they do.
pub fn unserved(config: &ModelConfig) -> Option<Error> {
    let refuse = |what, expected: &str, found: String| {
        Some(Error::Unsupported {
            engine: "nq over wgpu",
            what,
            expected: format!("{expected}, or --device cpu"),
            found,
        })
    };
    for block in config.layers().flat_map(|layer| layer.blocks) {
        if block.hyper.is_some() {
            return refuse("the residual", "one stream", "several streams".into());
        }
        match &block.mixer {
            Mixer::Attention(attention) if attention.indexer.is_some() => {
                let found = "positions that an indexer chooses";
                return refuse("attention", "all positions", found.into());
            }
            Mixer::Attention(_) | Mixer::Mlp(_) | Mixer::Delta(_) | Mixer::Experts(_) => (),
            Mixer::Ngrams(_) => {
                return refuse("layers", "attention and MLPs", "a table of n-grams".into());
            }
        }
    }
    let served = |width: usize| width.is_multiple_of(4) && (4..=WIDEST).contains(&width);
    if let Some(d) = config.delta
        && !(served(d.key_dim) && served(d.value_dim) && d.conv > 0)
    {
        let expected = "heads of up to 256 values, in multiples of 4";
        let found = format!("keys of {} and values of {}", d.key_dim, d.value_dim);
        return refuse("recurrences", expected, found);
    }
    if let Some(e) = config.experts
        && !((2..=MOST_EXPERTS).contains(&e.count) && e.per_token <= MOST_ROUTES.min(e.count))
    {
        let expected = "2 to 1024 experts, of which a token takes up to 64";
        let found = format!("{} of {}", e.per_token, e.count);
        return refuse("experts", expected, found);
    }
    let dim = config.head_dim;
    if !dim.is_multiple_of(8) || !(8..=256).contains(&dim) {
        let expected = "heads of up to 256 values, in multiples of 8";
        return refuse("attention", expected, format!("heads of {dim}"));
    }
    let group = config.num_attention_heads / config.num_key_value_heads.max(1);
    if group > 16 {
        let found = format!("{group} heads of queries for one of keys");
        return refuse(
            "attention",
            "at most 16 heads of queries for one of keys",
            found,
        );
    }
    None
}

impl Verbs for Recorder<'_> {
    type Linear = Linear;
    type Vector = Vec<f32>;
    type Error = Error;

    fn norm(&mut self, norm: &Vec<f32>) -> Result<()> {
        self.gains = Some(self.gpu.upload("gains of a norm", norm)?);
        self.prepared = [false; 2];
        Ok(())
    }

    fn streams(&mut self) -> Result<&mut dyn StreamVerbs<Linear, Vec<f32>, Error>> {
        self.unserved("streams of the residual")
    }

    fn project(
        &mut self,
        _layer: usize,
        _norm: &Vec<f32>,
        w: &Packed<Linear>,
        to: Projection,
    ) -> Result<()> {
        let (b, linear) = (self.buffers, &w.linear);
        let outputs = match to {
            Projection::Gated if linear.interleaved => Outputs::Gated,
            _ => Outputs::Stored,
        };
        let part = match to {
            Projection::Mixer => Part::Qkv,
            Projection::Gated if linear.interleaved => Part::Gated,
            Projection::Gated => Part::GateUp,
            Projection::Rates => Part::Rates,
            Projection::Scores => Part::Scores,
            Projection::SharedScore => Part::SharedScores,
        };
        self.product(linear, Input::Normed, &b[part], outputs)?;
        if part == Part::GateUp {
            let buffers = [&b.step, &b[Part::GateUp], &b[Part::Gated]];
            let op = RowsOp::new(self.gpu, &silu(linear.outputs / 2), 1, &buffers)?;
            self.ops.push(Op::Rows("silu", op));
        }
        Ok(())
    }

    fn attend(
        &mut self,
        layer: usize,
        heads: &HeadVectors<Vec<f32>>,
        _o: &Packed<Linear>,
    ) -> Result<()> {
        let b = self.buffers;
        let Kept::Pages([keys, values, scales]) = &b.kept[layer] else {
            unreachable!("a layer with attention has pages");
        };
        if heads.gated && !heads.biases.is_empty() {
            return self.unserved("biases of heads with gates");
        }
        let mut vectors = heads.biases.concat();
        let norms_at = vectors.len();
        vectors.extend(heads.norms.iter().flatten().flatten());
        let kinds = HeadKinds {
            norms_at,
            normed: heads.norms.is_some(),
            eps: self.config.rms_norm_eps,
        };
        let (gpu, shape) = (self.gpu, self.heads);
        let vectors = gpu.upload("vectors of heads", &vectors)?;
        let (step, qkv) = (&b.step, &b[Part::Qkv]);
        let [batch, attended, parts] = [Part::Batch, Part::Attended, Part::Parts].map(|p| &b[p]);
        let all = [
            step, batch, qkv, &vectors, keys, values, scales, attended, parts,
        ];
        let (prepares, combines) = (prepare_heads(shape, kinds), combine(shape));
        let combined = [step, qkv, attended, parts];
        self.ops.push(Op::Attention(AttentionOp {
            shape,
            alone: gpu.bound(&attention(shape, Some(kinds)), &all)?,
            apart: gpu.bound(&attention(shape.apart(), Some(kinds)), &all)?,
            heads: RowsOp::new(gpu, &prepares, shape.kv * shape.shares(), &all[..7])?,
            tiles: gpu.bound(&attention(shape, None), &all)?,
            combine: RowsOp::new(gpu, &combines, shape.count, &combined)?,
        }));
        Ok(())
    }

    fn recur(
        &mut self,
        layer: usize,
        _norm: &Vec<f32>,
        delta: &Delta<Linear, Vec<f32>>,
    ) -> Result<()> {
        let (b, v) = (self.buffers, &delta.vectors);
        let Kept::States(states) = &b.kept[layer] else {
            unreachable!("a layer with a recurrence has states");
        };
        let parts = [&v.conv[..], &v.norm, &v.decay, &v.dt_bias];
        let Some(spec) = self.config.delta else {
            unreachable!("layers with recurrences have a shape for them");
        };
        let recurrence = Recurrence {
            shape: delta_shape(self.config),
            gate: spec.gate,
            eps: self.config.rms_norm_eps,
        };
        let vectors = vectors(&recurrence.shape, parts);
        let vectors = self.gpu.upload("vectors of a recurrence", &vectors)?;
        let parts = [
            Part::Batch,
            Part::Qkv,
            Part::Rates,
            Part::Mixed,
            Part::Attended,
        ];
        let [batch, qkvz, ba, mixed, out] = parts.map(|part| &b[part]);
        let buffers = [&b.step, batch, &vectors, qkvz, ba, states, mixed, out];
        let op = RecurrenceOp::new(self.gpu, recurrence, buffers)?;
        self.ops.push(Op::Recurrence(op));
        Ok(())
    }

    fn mix(&mut self, _layer: usize, _norm: &Vec<f32>, experts: &Experts<Linear>) -> Result<()> {
        let (c, b) = (self.config, self.buffers);
        let (Some(shape), Some(gains)) = (&c.experts, self.gains.clone()) else {
            unreachable!("layers with experts have a shape for them, and a norm");
        };
        let stacks = [&experts.gate_up.linear, &experts.down.linear];
        let rounds = stacks[0].rounds;
        let inputs = match std::mem::replace(&mut self.prepared[usize::from(rounds)], true) {
            true => None,
            false => Some(self.norm_op(&b.step, &gains, rounds)?),
        };
        let op = ExpertsOp::new(self.gpu, shape, stacks, (&gains, c.rms_norm_eps), b)?;
        self.ops.push(Op::Experts(inputs, Box::new(op)));
        Ok(())
    }

    fn weigh(&mut self, shared: &Shared<Linear>) -> Result<()> {
        let b = self.buffers;
        let source = weigh(shared.mlp.down.linear.inputs);
        let buffers = [&b[Part::SharedScores], &b[Part::Gated]];
        let op = RowsOp::new(self.gpu, &source, 1, &buffers)?;
        self.ops.push(Op::Rows("weigh", op));
        Ok(())
    }

    fn add(&mut self, _layer: usize, operand: Operand, w: &Packed<Linear>) -> Result<()> {
        let b = self.buffers;
        let x = match operand {
            Operand::Attended => &b[Part::Attended],
            Operand::Gated => &b[Part::Gated],
        };
        self.product(&w.linear, Input::Rows(x), &b[Part::Stream], Outputs::Added)
    }
}
