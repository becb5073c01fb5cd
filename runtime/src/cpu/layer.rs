//! One layer on the CPU: the function that sessions and the layer stepper share.

use crate::engine::Observer;
use crate::error::{Error, Result};
use crate::load::LoadOptions;
use crate::models::LayerWeights;
use crate::rope::Rotary;
use crate::weights::Census;
use nq_formats::models::{LayerSpec, MlpSpec, NormKind, Product};
use nq_formats::{ModelConfig, Weight};
use nq_kernels::cpu::{Cpu, Epilogue, KvPages, KvSequence, Linear, PAGE, Span};

/// The weights of a layer, repacked for this CPU.
pub(crate) struct Layer {
    index: usize,
    spec: &'static LayerSpec,
    input_norm: Vec<f32>,          // [hidden]
    qkv: Linear,                   // [q_dim + 2 kv_dim, hidden]
    q_norm: Vec<f32>,              // [head_dim]
    k_norm: Vec<f32>,              // [head_dim]
    o: Linear,                     // [hidden, q_dim]
    post_attention_norm: Vec<f32>, // [hidden]
    gate_up: Linear,               // [2 intermediate, hidden]
    down: Linear,                  // [hidden, intermediate]
}

impl Layer {
    /// Repacks `weights` as layer `index`, counting them in `census`.
    pub(crate) fn pack(
        cpu: &Cpu,
        options: &LoadOptions,
        index: usize,
        weights: &LayerWeights,
        census: &mut Census,
    ) -> Result<Self> {
        let spec = weights.spec;
        let MlpSpec::SwiGlu { gate_up, down, .. } = &spec.mlp;
        let norm = |kind| weights.norm(kind).to_f32();
        let mut pack = |product: &Product| {
            let parts = weights.product(product);
            pack(cpu, options, product.name, &parts, census)
        };
        Ok(Layer {
            index,
            spec,
            input_norm: norm(NormKind::Attention)?,
            qkv: pack(&spec.attention.qkv)?,
            q_norm: norm(NormKind::Q)?,
            k_norm: norm(NormKind::K)?,
            o: pack(&spec.attention.o)?,
            post_attention_norm: norm(NormKind::Mlp)?,
            gate_up: pack(gate_up)?,
            down: pack(down)?,
        })
    }

    /// Bytes that one token reads.
    pub(crate) fn bytes(&self) -> usize {
        let norms = [
            &self.input_norm,
            &self.post_attention_norm,
            &self.q_norm,
            &self.k_norm,
        ];
        norms.iter().map(|n| 4 * n.len()).sum::<usize>()
            + self.linears().map(Linear::bytes).sum::<usize>()
    }

    /// Its products.
    pub(crate) fn linears(&self) -> impl Iterator<Item = &Linear> {
        [&self.qkv, &self.o, &self.gate_up, &self.down].into_iter()
    }

    /// Runs the layer over the residual stream `x` `[m, hidden]`, in place, appending keys
    /// and values to `pass.kv`.
    pub(crate) fn forward(
        &self,
        pass: Pass<'_>,
        x: &mut [f32],
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Pass {
            cpu,
            config,
            batch,
            kv,
            tables,
            scratch,
        } = pass;
        let m = batch.rows();
        let (heads, kv_heads, d) = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        );
        let (q_dim, kv_dim, eps) = (config.q_dim(), config.kv_dim(), config.rms_norm_eps);
        let stride = q_dim + 2 * kv_dim;
        let normed = &mut scratch.normed[..m * config.hidden_size];
        let qkv = &mut scratch.qkv[..m * stride];
        let attended = &mut scratch.attended[..m * q_dim];
        let mlp = &mut scratch.mlp[..m * config.intermediate_size];
        let attention = &self.spec.attention;
        let MlpSpec::SwiGlu { gate_up, down, .. } = &self.spec.mlp;

        cpu.rms_norm(x, &self.input_norm, eps, normed);
        observer.linear_input(self.index, &attention.qkv, normed);
        cpu.linear(&self.qkv, normed, qkv, Epilogue::Store)?;

        let (table, rows) = (&batch.cos_sin, &batch.row_ids);
        cpu.qk_norm_rope(qkv, stride, 0, heads, &self.q_norm, eps, table, rows);
        cpu.qk_norm_rope(qkv, stride, q_dim, kv_heads, &self.k_norm, eps, table, rows);
        for (span, &slot) in batch.spans.iter().zip(&batch.slots) {
            for r in 0..span.len {
                let row = &qkv[(span.row + r) * stride + q_dim..][..2 * kv_dim];
                let (keys, values) = row.split_at(kv_dim);
                let position = span.position + r;
                kv.store(tables[slot][position / PAGE], position % PAGE, keys, values);
            }
        }
        let kv = &*kv;
        let sequence = |i: usize| KvSequence::new(kv, &tables[batch.slots[i]]);
        cpu.attention_batch(qkv, stride, &batch.spans, heads, d, sequence, attended);
        observer.linear_input(self.index, &attention.o, attended);
        cpu.linear(&self.o, attended, x, Epilogue::Add)?;

        cpu.rms_norm(x, &self.post_attention_norm, eps, normed);
        observer.linear_input(self.index, gate_up, normed);
        cpu.linear(&self.gate_up, normed, mlp, Epilogue::SiluMul)?;
        observer.linear_input(self.index, down, mlp);
        cpu.linear(&self.down, mlp, x, Epilogue::Add)?;
        observer.layer_output(self.index, x);
        Ok(())
    }

    /// An error if `x`, the layer's output, holds a NaN or an infinity.
    pub(crate) fn check_finite(&self, x: &[f32]) -> Result<()> {
        if all_finite(x) {
            return Ok(());
        }
        Err(Error::NotFinite {
            what: "the output",
            layer: self.index,
        })
    }
}

/// Repacks weights that share an input, rounded as `options` say, counting them in `census`.
/// Profiles count the product under `name`.
pub(crate) fn pack(
    cpu: &Cpu,
    options: &LoadOptions,
    name: &'static str,
    parts: &[&Weight],
    census: &mut Census,
) -> Result<Linear> {
    let kernels = options.kernels;
    let supports = |w: &Weight, a| Linear::supports(cpu, w, a, kernels);
    let activations = options.activations.resolve(parts, supports);
    census.add(parts, activations);
    Ok(Linear::new(cpu, parts, activations, kernels)?.named(name))
}

/// What a layer works with and on, besides its weights and the residual stream.
pub(crate) struct Pass<'a> {
    pub(crate) cpu: &'a Cpu,
    pub(crate) config: &'a ModelConfig,
    pub(crate) batch: &'a Batch,
    /// This layer's keys and values.
    pub(crate) kv: &'a mut KvPages,
    /// The pages of each slot's sequence.
    pub(crate) tables: &'a [Vec<u32>],
    pub(crate) scratch: &'a mut Scratch,
}

/// True if there is neither a NaN nor an infinity in `x`.
pub(crate) fn all_finite(x: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    // Without an early exit within a block the compiler can use vectors.
    let block_finite = |b: &[f32]| {
        b.iter()
            .fold(true, |ok, v| ok & (v.to_bits() & EXPONENT != EXPONENT))
    };
    x.chunks(4096).all(block_finite)
}

/// Which rows of a forward belong to which sequence and position.
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

    /// Starts over.
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

    /// All rows.
    pub(crate) fn rows(&self) -> usize {
        self.row_ids.len()
    }

    /// The sequences' rows, in the order they were pushed.
    pub(crate) fn spans(&self) -> &[Span] {
        &self.spans
    }
}

/// What a layer computes on its way, for up to the given number of rows.
#[derive(Debug)]
pub(crate) struct Scratch {
    normed: Vec<f32>,   // [rows, hidden]
    qkv: Vec<f32>,      // [rows, q_dim + 2 kv_dim]
    attended: Vec<f32>, // [rows, q_dim]
    mlp: Vec<f32>,      // [rows, intermediate]
}

impl Scratch {
    /// Room for `rows` rows.
    pub(crate) fn new(c: &ModelConfig, rows: usize) -> Self {
        Scratch {
            normed: vec![0.0; rows * c.hidden_size],
            qkv: vec![0.0; rows * (c.q_dim() + 2 * c.kv_dim())],
            attended: vec![0.0; rows * c.q_dim()],
            mlp: vec![0.0; rows * c.intermediate_size],
        }
    }

    /// Bytes that [`Scratch::new`] reserves.
    pub(crate) fn bytes(c: &ModelConfig, rows: usize) -> usize {
        4 * rows * (c.hidden_size + 2 * c.q_dim() + 2 * c.kv_dim() + c.intermediate_size)
    }
}
