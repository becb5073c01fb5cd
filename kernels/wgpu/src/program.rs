//! What a pass launches: recorded once for a session, by the verbs of a layer, and replayed with the kernels that serve
//! its number of rows.

use crate::engine::WgpuModel;
use crate::gpu::Binding::{self, Read, Uniform, Write};
use crate::gpu::{Gpu, Grid, Kernel, launch};
use crate::linear::{BoundProduct, Linear, Operands, Outputs, ProductKernels, STEP_ROWS};
use crate::pack::UNIT;
use crate::sizes::Sizes;
use crate::source::KernelSource;
use nq_kernels::pages::PAGE;
use nq_model::ModelConfig;
use nq_model::forward::{
    Delta, Experts, HeadVectors, Hyper, Indexer, Ngrams, Operand, Packed, Projection, Shared, Verbs,
};
use nq_runtime::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use wgpu::{BindGroup, Buffer, ComputePass};

/// The buffers of a session.
pub(crate) struct Buffers {
    /// Sizes of the pass, and of what goes through the head.
    pub(crate) step: Buffer,
    pub(crate) head_step: Buffer,
    pub(crate) stream: Buffer,
    normed: Buffer,
    qkv: Buffer,
    attended: Buffer,
    gated: Buffer,
    gate_up: Buffer,
    rounded: Buffer,
    rounded_scales: Buffer,
    /// `[rows, half of the values of a head that turn]`, cosines and sines.
    pub(crate) turns: Buffer,
    /// Positions and page tables, tiles of attention, and wanted rows.
    pub(crate) batch: Buffer,
    parts: Buffer,
    softmax: Buffer,
    /// `[head rows, hidden]`
    pub(crate) head_in: Buffer,
    /// `[head rows, vocab]`
    pub(crate) logits: Buffer,
    /// By layer.
    pub(crate) keys: Vec<Buffer>,
    pub(crate) values: Vec<Buffer>,
    /// A page on its way from one place to another.
    pub(crate) page: Buffer,
    /// From which the host reads results.
    pub(crate) results: Buffer,
}

impl Buffers {
    /// Allocates them.
    ///
    /// # Errors
    /// [`Error::Device`] if memory is short.
    pub(crate) fn new(gpu: &Gpu, sizes: &Sizes, layers: usize) -> Result<Self> {
        let make = |what, bytes| gpu.buffer(what, bytes);
        let layered = |what, bytes| {
            let all = (0..layers).map(|_| gpu.buffer(what, bytes));
            all.collect::<Result<Vec<Buffer>>>()
        };
        Ok(Buffers {
            step: gpu.uniform(&[0; 8])?,
            head_step: gpu.uniform(&[0; 8])?,
            stream: make("the residual stream", sizes.stream)?,
            normed: make("normalized rows", sizes.normed)?,
            qkv: make("queries, keys and values", sizes.qkv)?,
            attended: make("the output of attention", sizes.attended)?,
            gated: make("the gated rows", sizes.gated)?,
            gate_up: make("gates", sizes.gate_up)?,
            rounded: make("rounded inputs", sizes.rounded)?,
            rounded_scales: make("scales of rounded inputs", sizes.rounded_scales)?,
            turns: make("cosines and sines", sizes.turns)?,
            batch: make("page tables", sizes.batch)?,
            parts: make("parts of attention", sizes.parts)?,
            softmax: make("sums of attention", sizes.softmax)?,
            head_in: make("inputs of the head", sizes.head_in)?,
            logits: make("logits", sizes.logits)?,
            keys: layered("keys", sizes.keys)?,
            values: layered("values", sizes.keys)?,
            page: make("a page", sizes.page)?,
            results: gpu.staging(sizes.logits.max(sizes.head_in))?,
        })
    }
}

/// A launch of a pass.
enum Op {
    /// A workgroup for each row, or as many as `heads` says.
    Rows {
        kernel: Arc<Kernel>,
        bound: BindGroup,
        heads: usize,
    },
    Product(BoundProduct),
    Attention(BindGroup),
}

/// The kernels of attention.
struct AttentionKernels {
    step: Arc<Kernel>,
    combine: Arc<Kernel>,
    prompt: Arc<Kernel>,
}

/// What the layers, and behind them the head, launch.
pub(crate) struct Program {
    /// By layer.
    layers: Vec<Vec<Op>>,
    /// The final norm of wanted rows.
    norm: Vec<Op>,
    head: Vec<Op>,
    attention: AttentionKernels,
    pub(crate) heads: Heads,
    known: ProductKernels,
}

/// What a pass attends to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attended {
    pub(crate) rows: usize,
    pub(crate) tiles: usize,
    pub(crate) splits: usize,
}

/// What the kernels of attention, and of heads and other rows, are bound to.
pub(crate) const ATTENTION: [Binding; 8] = [Uniform, Read, Write, Write, Write, Read, Read, Read];
pub(crate) const HEADS: [Binding; 7] = [Uniform, Read, Read, Read, Write, Write, Write];
pub(crate) const NORM: [Binding; 5] = [Uniform, Read, Read, Read, Write];
pub(crate) const NORM_ROUND: [Binding; 6] = [Uniform, Read, Read, Read, Write, Write];
pub(crate) const ROUND: [Binding; 4] = [Uniform, Read, Write, Write];
pub(crate) const SILU: [Binding; 3] = [Uniform, Read, Write];

/// Values of queries that workgroups of attention hold at most: half of the 16 KB that every adapter has.
const HELD_QUERIES: usize = 2048;

impl Program {
    /// Records the passes of `model` over `buffers`.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses a kernel.
    pub(crate) fn new(model: &WgpuModel, buffers: &Buffers) -> Result<Self> {
        let (gpu, c) = (&model.gpu, &model.config);
        let heads = Heads::of(c);
        let kernel = |rows, combines| gpu.kernel(&attention(heads, rows, combines), &ATTENTION);
        let attention = AttentionKernels {
            step: kernel(1, false)?,
            combine: kernel(1, true)?,
            prompt: kernel(heads.tile(), false)?,
        };
        let mut recorder = Recorder {
            gpu,
            config: c,
            buffers,
            gains: None,
            ops: Vec::new(),
        };
        let mut layers = Vec::with_capacity(model.layers.len());
        for layer in &model.layers {
            layer.run(&mut recorder)?;
            layers.push(std::mem::take(&mut recorder.ops));
        }
        recorder.final_norm(&model.norm)?;
        let norm = std::mem::take(&mut recorder.ops);
        let b = buffers;
        recorder.product(
            &model.head,
            &b.head_step,
            &b.head_in,
            &b.logits,
            Outputs::Stored,
        )?;
        Ok(Program {
            layers,
            norm,
            head: recorder.ops,
            attention,
            heads,
            known: ProductKernels::new(),
        })
    }

    /// Adds the launches of these layers to `pass`.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver refuses a kernel for as many rows.
    pub(crate) fn layers(
        &mut self,
        gpu: &Gpu,
        pass: &mut ComputePass<'_>,
        layers: Range<usize>,
        attended: Attended,
    ) -> Result<()> {
        for op in self.layers[layers].iter().flatten() {
            match op {
                Op::Attention(bound) => {
                    let kernels = &self.attention;
                    let grid = Grid {
                        x: attended.splits,
                        y: self.heads.kv,
                        z: attended.tiles,
                    };
                    if attended.rows > STEP_ROWS {
                        launch(pass, &kernels.prompt, bound, grid);
                        continue;
                    }
                    launch(pass, &kernels.step, bound, grid);
                    if attended.splits > 1 {
                        let grid = Grid::new(attended.rows, self.heads.count);
                        launch(pass, &kernels.combine, bound, grid);
                    }
                }
                op => op.launch(gpu, pass, attended.rows, &mut self.known)?,
            }
        }
        Ok(())
    }

    /// Adds the final norm of `rows` wanted rows, and the head if it is asked for.
    ///
    /// # Errors
    /// As [`Program::layers`].
    pub(crate) fn head(
        &mut self,
        gpu: &Gpu,
        pass: &mut ComputePass<'_>,
        rows: usize,
        logits: bool,
    ) -> Result<()> {
        let head = self.head.iter().filter(|_| logits);
        for op in self.norm.iter().chain(head) {
            op.launch(gpu, pass, rows, &mut self.known)?;
        }
        Ok(())
    }
}

impl Op {
    fn launch(
        &self,
        gpu: &Gpu,
        pass: &mut ComputePass<'_>,
        rows: usize,
        known: &mut ProductKernels,
    ) -> Result<()> {
        match self {
            Op::Rows {
                kernel,
                bound,
                heads,
            } => launch(pass, kernel, bound, Grid::new(rows, *heads)),
            Op::Product(product) => {
                let kernels = product.kernels(gpu, rows, known)?;
                product.launch(pass, &kernels, rows);
            }
            Op::Attention(_) => unreachable!("layers launch it themselves"),
        }
        Ok(())
    }
}

/// Heads of attention.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) count: usize,
    pub(crate) kv: usize,
    pub(crate) dim: usize,
    /// Values of a head that turn with the position.
    pub(crate) turned: usize,
}

impl Heads {
    fn of(c: &ModelConfig) -> Self {
        Heads {
            count: c.num_attention_heads,
            kv: c.num_key_value_heads,
            dim: c.head_dim,
            turned: c.rotary_dims(),
        }
    }

    /// Heads that share one of keys and values.
    fn group(&self) -> usize {
        self.count / self.kv
    }

    /// Rows of a sequence that attend together in prompts.
    pub(crate) fn tile(&self) -> usize {
        ((HELD_QUERIES / self.dim).min(16) / self.group()).max(1)
    }
}

/// The kernel of attention for tiles of `rows` rows, or the one that `combines` parts.
pub(crate) fn attention(heads: Heads, rows: usize, combines: bool) -> KernelSource {
    let (queries, pairs) = (rows * heads.group(), heads.dim / 2);
    let value_parts = (128 / pairs).min(queries);
    KernelSource::new(&[include_str!("wgsl/attention.wgsl")])
        .with("HEADS", heads.count)
        .with("KV_HEADS", heads.kv)
        .with("GROUP", heads.group())
        .with("DIM", heads.dim)
        .with("PAGE", PAGE)
        .with("QUERIES", queries)
        .with("PER_HALF", queries.div_ceil(2))
        .with("PAIRS", pairs)
        .with("VALUE_PARTS", value_parts)
        .with("PER_VALUE_PART", queries.div_ceil(value_parts))
        .with_float("SCALE", 1.0 / (heads.dim as f32).sqrt())
        .with_float("NOTHING", -1e30)
        .flag("COMBINE", combines)
}

/// The kernel that prepares heads, without biases and norms.
pub(crate) fn prepare_heads(heads: Heads, eps: f32) -> KernelSource {
    KernelSource::new(&[include_str!("wgsl/heads.wgsl")])
        .with("HEADS", heads.count)
        .with("KV_HEADS", heads.kv)
        .with("DIM", heads.dim)
        .with("TURNED", heads.turned)
        .with("PAGE", PAGE)
        .with_float("EPS", eps)
}

/// The kernel of RMSNorm over rows of `hidden` values.
pub(crate) fn norm(hidden: usize, eps: f32) -> KernelSource {
    KernelSource::new(&[include_str!("wgsl/rows.wgsl")])
        .with("HIDDEN", hidden)
        .with_float("EPS", eps)
        .flag("NORM", true)
}

/// The kernel that rounds rows of `inputs` values to bytes.
pub(crate) fn round(inputs: usize) -> KernelSource {
    KernelSource::new(&[include_str!("wgsl/rows.wgsl")])
        .with("UNITS", inputs / UNIT)
        .flag("ROUND", true)
}

/// The kernel of SwiGLU over rows of `width` gates and as many that they multiply.
pub(crate) fn silu(width: usize) -> KernelSource {
    KernelSource::new(&[include_str!("wgsl/rows.wgsl")])
        .with("WIDTH", width)
        .flag("SILU", true)
}

/// Records what the verbs of a layer launch.
struct Recorder<'a> {
    gpu: &'a Gpu,
    config: &'a ModelConfig,
    buffers: &'a Buffers,
    /// Gains of a block's norm, until it is known whether its product rounds inputs.
    gains: Option<Buffer>,
    ops: Vec<Op>,
}

impl Recorder<'_> {
    fn rows(
        &mut self,
        source: KernelSource,
        heads: usize,
        bindings: &[Binding],
        buffers: &[&Buffer],
    ) -> Result<()> {
        self.ops.push(Op::Rows {
            kernel: self.gpu.kernel(&source, bindings)?,
            bound: self.gpu.bind(bindings, buffers)?,
            heads,
        });
        Ok(())
    }

    /// The final norm over the rows that the batch wants.
    fn final_norm(&mut self, gains: &[f32]) -> Result<()> {
        let b = self.buffers;
        let gains = self.gpu.upload("gains of a norm", gains)?;
        let source = self.norm_source().flag("GATHER", true);
        let buffers = [&b.head_step, &b.batch, &gains, &b.stream, &b.head_in];
        self.rows(source, 1, &NORM, &buffers)
    }

    fn norm_source(&self) -> KernelSource {
        norm(self.config.hidden_size, self.config.rms_norm_eps)
    }

    /// `x` times the weight, to `y`; behind the norm that makes `x`, if there is one, and its rounding, if the kernel
    /// reads bytes.
    fn product(
        &mut self,
        linear: &Linear,
        step: &Buffer,
        x: &Buffer,
        y: &Buffer,
        outputs: Outputs,
    ) -> Result<()> {
        let b = self.buffers;
        let rounded = (&b.rounded, &b.rounded_scales);
        let (x, x_scales) = match (self.gains.take(), linear.rounds) {
            (None, false) => (x, x),
            (None, true) => {
                let buffers = [step, x, rounded.0, rounded.1];
                self.rows(round(linear.inputs), 1, &ROUND, &buffers)?;
                rounded
            }
            (Some(gains), false) => {
                let buffers = [step, &b.batch, &gains, &b.stream, x];
                self.rows(self.norm_source(), 1, &NORM, &buffers)?;
                (x, x)
            }
            (Some(gains), true) => {
                let source = self.norm_source().flag("ROUND", true);
                let buffers = [step, &b.batch, &gains, &b.stream, rounded.0, rounded.1];
                self.rows(source, 1, &NORM_ROUND, &buffers)?;
                rounded
            }
        };
        let operands = Operands {
            step,
            x,
            x_scales,
            y,
        };
        let product = BoundProduct::new(self.gpu, linear, operands, outputs)?;
        self.ops.push(Op::Product(product));
        Ok(())
    }

    fn unserved<T>(&self, what: &'static str) -> Result<T> {
        Err(Error::Unsupported {
            engine: "nq over wgpu",
            what,
            expected: "attention and MLPs, or --device cpu".into(),
            found: "another mixer".into(),
        })
    }
}

impl Verbs for Recorder<'_> {
    type Linear = Linear;
    type Vector = Vec<f32>;
    type Error = Error;

    fn norm(&mut self, norm: &Vec<f32>) -> Result<()> {
        self.gains = Some(self.gpu.upload("gains of a norm", norm)?);
        Ok(())
    }

    fn contract(&mut self, _layer: usize, _norm: &Vec<f32>, _hyper: &Hyper<Linear>) -> Result<()> {
        self.unserved("streams of the residual")
    }

    fn inject(&mut self, _layer: usize) -> Result<()> {
        self.unserved("streams of the residual")
    }

    fn select(
        &mut self,
        _layer: usize,
        _norm: &Vec<f32>,
        _indexer: &Indexer<Linear, Vec<f32>>,
    ) -> Result<()> {
        self.unserved("an indexer")
    }

    fn recall(
        &mut self,
        _layer: usize,
        _norm: &Vec<f32>,
        _ngrams: &Ngrams<Linear, Vec<f32>>,
    ) -> Result<()> {
        self.unserved("a table of n-grams")
    }

    fn project(
        &mut self,
        _layer: usize,
        _norm: &Vec<f32>,
        w: &Packed<Linear>,
        to: Projection,
    ) -> Result<()> {
        let b = self.buffers;
        match to {
            Projection::Mixer => {
                self.product(&w.linear, &b.step, &b.normed, &b.qkv, Outputs::Stored)
            }
            Projection::Gated if w.linear.interleaved => {
                self.product(&w.linear, &b.step, &b.normed, &b.gated, Outputs::Gated)
            }
            Projection::Gated => {
                self.product(&w.linear, &b.step, &b.normed, &b.gate_up, Outputs::Stored)?;
                let source = silu(w.linear.outputs / 2);
                self.rows(source, 1, &SILU, &[&b.step, &b.gate_up, &b.gated])
            }
            Projection::Rates | Projection::Scores | Projection::SharedScore => {
                self.unserved(w.linear.name)
            }
        }
    }

    fn attend(
        &mut self,
        layer: usize,
        heads: &HeadVectors<Vec<f32>>,
        _o: &Packed<Linear>,
    ) -> Result<()> {
        let b = self.buffers;
        let mut vectors = heads.biases.concat();
        let norms_at = vectors.len();
        heads
            .norms
            .iter()
            .flatten()
            .for_each(|norm| vectors.extend(norm));
        let vectors = self.gpu.upload("vectors of heads", &vectors)?;
        let shape = Heads::of(self.config);
        let source = prepare_heads(shape, self.config.rms_norm_eps)
            .with("NORMS_AT", norms_at)
            .flag("BIASES", norms_at > 0)
            .flag("NORMS", heads.norms.is_some());
        let (keys, values) = (&b.keys[layer], &b.values[layer]);
        let buffers = [&b.step, &b.batch, &b.turns, &vectors, &b.qkv, keys, values];
        self.rows(source, shape.count + 2 * shape.kv, &HEADS, &buffers)?;
        let buffers = [
            &b.step,
            &b.batch,
            &b.attended,
            &b.parts,
            &b.softmax,
            &b.qkv,
            keys,
            values,
        ];
        let bound = self.gpu.bind(&ATTENTION, &buffers)?;
        self.ops.push(Op::Attention(bound));
        Ok(())
    }

    fn recur(
        &mut self,
        _layer: usize,
        _norm: &Vec<f32>,
        _delta: &Delta<Linear, Vec<f32>>,
    ) -> Result<()> {
        self.unserved("a recurrence")
    }

    fn mix(&mut self, _layer: usize, _norm: &Vec<f32>, _experts: &Experts<Linear>) -> Result<()> {
        self.unserved("experts")
    }

    fn weigh(&mut self, _shared: &Shared<Linear>) -> Result<()> {
        self.unserved("experts")
    }

    fn add(&mut self, _layer: usize, operand: Operand, w: &Packed<Linear>) -> Result<()> {
        let b = self.buffers;
        let x = match operand {
            Operand::Attended => &b.attended,
            Operand::Gated => &b.gated,
        };
        self.product(&w.linear, &b.step, x, &b.stream, Outputs::Added)
    }
}
