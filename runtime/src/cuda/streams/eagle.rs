//! An EAGLE-3 head on a GPU.

use super::buffers::WHAT;
use super::{GpuHead, On, full, halves, multiply, norm_rows, rows_at};
use crate::cuda::model::{CudaModel, refuse};
use crate::error::{Error, Result};
use crate::interface::DraftLayer;
use crate::rope::Rotary;
use crate::speculation::head::{EAGLE_NOT_FINITE, GATE_UP, HeadWeights, rotary};
use nq_formats::eagle::{EagleConfig, EagleHead, TAPS};
use nq_formats::{ModelConfig, Weight};
use nq_kernels::cuda::{
    Buffer, Checked, DeviceLinear, GemmOutput, GemvOutput, Gpu, HEAD_DIM, Heads, Norm, Stack,
    Uploader,
};

/// A head packed for a GPU.
pub(crate) struct CudaEagle {
    config: EagleConfig,
    gpu: Gpu,
    rotary: Rotary,
    weights: HeadWeights<DeviceLinear, Buffer<f32>>,
    /// `[vocab, hidden]`; `None`: the model's.
    embedding: Option<DeviceLinear>,
    /// The model's token for each of the head's.
    tokens: Checked<u32>,
}

impl CudaEagle {
    /// Packs `head` for `model`.
    ///
    /// # Errors
    /// A missing or misshapen tensor; a shape that the kernels do not serve; no memory for it.
    pub(crate) fn load(gpu: &Gpu, head: &EagleHead, model: &ModelConfig) -> Result<Self> {
        let c = &head.config;
        check_shape(c)?;
        let mut uploader = Uploader::new(gpu)?;
        let linear = |product: &str, parts: &[&Weight]| {
            let stack = match product == GATE_UP {
                true => Stack::Interleave,
                false => Stack::Concat,
            };
            Ok(uploader.pack(parts, stack, true)?)
        };
        let norm = |gains: Vec<f32>| Ok(gpu.upload("a norm", &gains)?);
        let weights = HeadWeights::read(head, linear, norm)?;
        let embedding = match head.has_embedding {
            true => {
                let embedding = crate::models::embedding(head.store.as_ref(), model)?;
                Some(uploader.pack(&[&embedding], Stack::Concat, true)?)
            }
            false => None,
        };
        uploader.finish()?;
        Ok(CudaEagle {
            rotary: rotary(head, model),
            tokens: Checked::upload(gpu, WHAT, &head.tokens, c.vocab_size)?,
            config: c.clone(),
            gpu: gpu.clone(),
            weights,
            embedding,
        })
    }
}

/// Refuses shapes that the kernels do not serve.
fn check_shape(c: &EagleConfig) -> Result<()> {
    if c.head_dim != HEAD_DIM {
        return refuse("head_dim of an EAGLE-3 head", "128", c.head_dim);
    }
    let group = c.num_attention_heads / c.num_key_value_heads;
    if group > 8 {
        return refuse(
            "query heads per key head of an EAGLE-3 head",
            "at most 8",
            group,
        );
    }
    for (what, size) in [
        ("hidden_size of an EAGLE-3 head", c.hidden_size),
        ("intermediate_size of an EAGLE-3 head", c.intermediate_size),
    ] {
        if !size.is_multiple_of(8) {
            return refuse(what, "a multiple of 8", size);
        }
    }
    Ok(())
}

impl CudaEagle {
    /// The products of `n` rows: `few.embedded` and the streams `x`, which become the residual.
    fn products(&self, on: On<'_>, drawn: bool, n: usize) -> Result<()> {
        let (c, w, few, stream) = (&self.config, &self.weights, on.few, on.stream);
        let x = if drawn { &mut few.last.x } else { &mut few.x };
        let (eps, width, columns) = (c.rms_norm_eps, c.hidden_size, &mut few.columns);
        let norm = Norm {
            gain: &w.embedding_norm,
            eps,
        };
        let out = GemvOutput::Store(norm, &mut few.qkv);
        multiply(stream, &w.qkv_of_embedding, &few.embedded, out, columns, n)?;
        norm_rows(stream, x, &w.stream_norm, full(&mut few.normed), (n, eps))?;
        if c.norm_before_residual {
            let to = (x, rows_at(0, width));
            stream.copy_rows((&few.normed, rows_at(0, width)), to, (n, width))?;
        }
        let out = GemvOutput::Add(&mut few.qkv);
        multiply(stream, &w.qkv_of_stream, &few.normed, out, columns, n)
    }
}

impl GpuHead for CudaEagle {
    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn layer(&self) -> DraftLayer {
        DraftLayer::eagle3(&self.config)
    }

    fn rotary(&self) -> &Rotary {
        &self.rotary
    }

    fn embedding(&self) -> Option<&DeviceLinear> {
        self.embedding.as_ref()
    }

    fn head<'a>(&'a self, _target: &'a CudaModel) -> &'a DeviceLinear {
        &self.weights.head
    }

    fn ids(&self) -> Option<&Checked<u32>> {
        Some(&self.tokens)
    }

    fn heads<'a>(&'a self, cos_sin: &'a Buffer<[f32; 2]>) -> Heads<'a> {
        Heads {
            heads: self.config.num_attention_heads,
            gains: None,
            biases: &[],
            cos_sin,
            eps: self.config.rms_norm_eps,
        }
    }

    fn not_finite(&self) -> Error {
        EAGLE_NOT_FINITE
    }

    fn fill(&self, on: On<'_>, n: usize) -> Result<()> {
        let (c, w, stream, many) = (&self.config, &self.weights, on.stream, on.many);
        let taps = (n, TAPS * c.hidden_size);
        stream.convert_rows(&many.streams, &halves(&mut many.half), taps)?;
        stream.gemm(&w.fc, &many.half, GemmOutput::Store(&mut many.x), n)?;
        let halves_of = [
            (
                &many.embedded,
                &w.embedding_norm,
                &w.qkv_of_embedding,
                false,
            ),
            (&many.x, &w.stream_norm, &w.qkv_of_stream, true),
        ];
        for (x, gain, product, adds) in halves_of {
            let normed = halves(&mut many.normed);
            norm_rows(stream, x, gain, normed, (n, c.rms_norm_eps))?;
            let out = match adds {
                false => GemmOutput::Store(&mut many.qkv),
                true => GemmOutput::Add(&mut many.qkv),
            };
            stream.gemm(product, &many.normed, out, n)?;
        }
        let (heads, cache) = (self.heads(on.cos_sin), on.pages.layer(0));
        Ok(stream.append(&mut many.qkv, &many.rows, &heads, cache, n)?)
    }

    fn begin(&self, on: On<'_>, held: &Buffer<f32>, n: usize) -> Result<()> {
        let (few, stream, width) = (&mut *on.few, on.stream, self.config.hidden_size);
        let (zeros, x) = (
            (&few.zeros, rows_at(0, width)),
            (&mut few.x, rows_at(0, width)),
        );
        stream.copy_rows(zeros, x, (n, width))?;
        let out = GemvOutput::Add(&mut few.x);
        multiply(stream, &self.weights.fc, held, out, &mut few.columns, n)?;
        self.products(on, false, n)
    }

    fn begin_drawn(&self, on: On<'_>) -> Result<()> {
        self.products(on, true, 1)
    }

    fn finish(&self, on: On<'_>) -> Result<()> {
        let (w, last, stream) = (&self.weights, &mut on.few.last, on.stream);
        let norm = Norm {
            gain: &w.mlp_norm,
            eps: self.config.rms_norm_eps,
        };
        let multiply = |w, x: &Buffer<f32>, out: GemvOutput<'_>| stream.gemv(w, x, out, true);
        multiply(&w.o, &last.attended, GemvOutput::Add(&mut last.x))?;
        let out = GemvOutput::Silu(norm, &mut last.gated);
        multiply(&w.gate_up, &last.x, out)?;
        multiply(&w.down, &last.gated, GemvOutput::Add(&mut last.x))?;
        Ok(())
    }

    fn logits(&self, on: On<'_>) -> Result<()> {
        let (w, last) = (&self.weights, &mut on.few.last);
        let norm = Norm {
            gain: &w.norm,
            eps: self.config.rms_norm_eps,
        };
        let out = GemvOutput::Head(norm, &mut last.logits, &mut last.best);
        Ok(on.stream.gemv(&w.head, &last.x, out, true)?)
    }
}
