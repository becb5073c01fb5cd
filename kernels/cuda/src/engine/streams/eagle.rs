//! An EAGLE-3 head on a GPU.

use super::buffers::WHAT;
use super::{DraftModel, GpuHead, On, multiply, rows_at};
use crate::engine::layer::CudaLayers;
use crate::engine::served::refuse;
use crate::{
    Buffer, Checked, CopiedRows, DeviceLinear, GemmOutput, GemvOutput, Gpu, HEAD_DIM, Norm,
    RowsOut, Stack, Uploader,
};
use nq_formats::Weight;
use nq_formats::eagle::{EagleConfig, EagleHead, TAPS};
use nq_model::{Dims, ModelConfig};
use nq_runtime::interface::DraftLayer;
use nq_runtime::rope::Rotary;
use nq_runtime::speculation::head::{EAGLE_NOT_FINITE, HeadWeights};
use nq_runtime::{Error, Result};

/// The product whose outputs an epilogue takes in pairs.
const GATE_UP: &str = "gate_up";

/// A head packed for a GPU.
pub struct CudaEagle {
    model: DraftModel,
    norm_before_residual: bool,
    /// `[hidden, TAPS * hidden]`
    fc: DeviceLinear,
    embedding_norm: Buffer<f32>,
    /// The part of queries, keys and values that reads the embedding.
    qkv_of_embedding: DeviceLinear,
}

impl CudaEagle {
    /// Packs `head` for `model`.
    ///
    /// # Errors
    /// A missing or misshapen tensor; a shape that the kernels do not serve; no memory for it.
    pub fn load(gpu: &Gpu, head: &EagleHead, model: &ModelConfig) -> Result<Self> {
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
        let config = c.layer(model);
        let HeadWeights {
            fc,
            embedding_norm,
            qkv_of_embedding,
            layer,
            norm,
            head: draft_head,
        } = HeadWeights::read(head, &config, linear, norm)?;
        let embedding = match head.has_embedding {
            true => {
                let embedding = nq_runtime::models::embedding(head.store.as_ref(), model)?;
                Some(uploader.pack(&[&embedding], Stack::Concat, true)?)
            }
            false => None,
        };
        uploader.finish()?;
        let mut layers = CudaLayers::new(&config);
        layers.all.push(layer);
        Ok(CudaEagle {
            model: DraftModel {
                gpu: gpu.clone(),
                sizes: DraftLayer::eagle3(c),
                rotary: Rotary::new(&config),
                layers,
                norm,
                head: Some(draft_head),
                embedding,
                ids: Some(Checked::upload(gpu, WHAT, &head.tokens, c.vocab_size)?),
                config,
            },
            norm_before_residual: c.norm_before_residual,
            fc,
            embedding_norm,
            qkv_of_embedding,
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
    /// Computes queries, keys and values of `n` rows, `few.embedded` and the streams `x`, which become the residual.
    fn products(&self, on: &mut On<'_>, drawn: bool, n: usize) -> Result<()> {
        let (c, stream, few) = (&self.model.config, on.stream, &mut *on.few);
        let x = if drawn { &mut few.last.x } else { &mut few.x };
        let (eps, width, columns) = (c.rms_norm_eps, c.hidden_size, &mut few.columns);
        let (stream_norm, attention) = self.model.layers.all[0].attention();
        let norm = Norm {
            gain: &self.embedding_norm,
            eps,
        };
        let out = GemvOutput::Store(Some(norm), &mut few.qkv);
        multiply(
            stream,
            &self.qkv_of_embedding,
            &few.embedded,
            out,
            columns,
            n,
        )?;
        stream.rms_norm(
            x,
            None,
            stream_norm,
            &RowsOut::full(&mut few.normed),
            n,
            eps,
        )?;
        if self.norm_before_residual {
            stream.copy_rows(CopiedRows {
                from: &few.normed,
                begin: rows_at(0, width),
                to: x,
                end: rows_at(0, width),
                rows: n,
                width,
            })?;
        }
        let out = GemvOutput::Add(&mut few.qkv);
        multiply(stream, &attention.qkv.linear, &few.normed, out, columns, n)
    }
}

impl GpuHead for CudaEagle {
    const NOT_FINITE: Error = EAGLE_NOT_FINITE;
    const MAKES_QKV: bool = true;

    fn model(&self) -> &DraftModel {
        &self.model
    }

    fn many_input(&self, on: &mut On<'_>, n: usize) -> Result<()> {
        let (c, stream, many) = (&self.model.config, on.stream, &mut *on.many);
        let taps = Dims::new(n, TAPS * c.hidden_size);
        stream.convert_rows(&many.streams, &RowsOut::half(&mut many.half), taps)?;
        stream.gemm(&self.fc, &many.half, GemmOutput::Store(&mut many.x), n)?;
        let (stream_norm, attention) = self.model.layers.all[0].attention();
        let halves_of = [
            (
                &many.embedded,
                &self.embedding_norm,
                &self.qkv_of_embedding,
                false,
            ),
            (&many.x, stream_norm, &attention.qkv.linear, true),
        ];
        for (x, gain, product, adds) in halves_of {
            let normed = RowsOut::half(&mut many.halves.normed);
            stream.rms_norm(x, None, gain, &normed, n, c.rms_norm_eps)?;
            let out = match adds {
                false => GemmOutput::Store(&mut many.qkv),
                true => GemmOutput::Add(&mut many.qkv),
            };
            stream.gemm(product, &many.halves.normed, out, n)?;
        }
        Ok(())
    }

    fn few_input(&self, on: &mut On<'_>, held: &Buffer<f32>, n: usize) -> Result<()> {
        let (few, stream, width) = (&mut *on.few, on.stream, self.model.config.hidden_size);
        stream.copy_rows(CopiedRows {
            from: &few.zeros,
            begin: rows_at(0, width),
            to: &mut few.x,
            end: rows_at(0, width),
            rows: n,
            width,
        })?;
        let out = GemvOutput::Add(&mut few.x);
        multiply(stream, &self.fc, held, out, &mut few.columns, n)?;
        self.products(on, false, n)
    }

    fn drawn_input(&self, on: &mut On<'_>) -> Result<()> {
        self.products(on, true, 1)
    }
}
