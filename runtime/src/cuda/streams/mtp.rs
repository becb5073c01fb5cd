//! A model's MTP layer on a GPU ([`nq_formats::mtp`]).

use super::{GpuHead, On, full, halves, multiply, norm_rows};
use crate::cuda::layer::{CudaLayer, mixture};
use crate::cuda::model::{CudaModel, Slower, heads_of, pack_layer};
use crate::cuda::session::buffers::ExpertRows;
use crate::error::{Error, Result};
use crate::forward::{Attention, Block, Mix, Shared};
use crate::interface::DraftLayer;
use crate::models::LayerWeights;
use crate::rope::Rotary;
use crate::speculation::head::MTP_NOT_FINITE;
use nq_formats::mtp::{EMBEDDING_NORM, FC, HIDDEN_NORM, LayerStore, NORM};
use nq_formats::{ModelConfig, Tensor, Weight, WeightStore};
use nq_kernels::cuda::{
    Buffer, Checked, DeviceLinear, GemmOutput, GemvOutput, Gpu, Heads, Norm, Stack, Uploader,
};
use std::ops::Range;

/// The layer, packed for a GPU.
pub(crate) struct CudaMtp {
    /// The shape of a model of this layer alone.
    config: ModelConfig,
    gpu: Gpu,
    rotary: Rotary,
    /// The halves of the first Linear, `[hidden, hidden]`: of the embedding, and of the hidden state.
    fc: [DeviceLinear; 2],
    layer: CudaLayer,
    embedding_norm: Buffer<f32>,
    hidden_norm: Buffer<f32>,
    norm: Buffer<f32>,
    /// `[vocab, hidden]`; `None`: the model's.
    head: Option<DeviceLinear>,
}

impl CudaMtp {
    /// Packs the layer of the model of `store`, whose shape as a model of its own is `config`, and the head that it drafts
    /// with if that is not the model's.
    ///
    /// # Errors
    /// A missing or misshapen tensor; no memory for it.
    pub(crate) fn load(
        gpu: &Gpu,
        config: ModelConfig,
        store: &dyn WeightStore,
        head: Option<&Weight>,
    ) -> Result<Self> {
        let h = config.hidden_size;
        let mut uploader = Uploader::new(gpu)?;
        let gains = |name: &str| -> Result<Buffer<f32>> {
            Ok(gpu.upload("a norm", &store.vector(name, h)?.to_f32()?)?)
        };
        let fc = store.matrix(FC, (h, 2 * h))?;
        let mut half = |first: usize| -> Result<DeviceLinear> {
            let part = columns(&fc, first..first + h)?;
            Ok(uploader.pack(&[&part], Stack::Concat, true)?)
        };
        let fc = [half(0)?, half(h)?];
        let weights = LayerWeights::read(&LayerStore::new(store), &config, 0)?;
        let layer = pack_layer(
            &mut uploader,
            0,
            &weights,
            (false, true),
            &mut Slower::default(),
        )?;
        let head = head.map(|w| uploader.pack(&[w], Stack::Concat, true));
        let head = head.transpose()?;
        uploader.finish()?;
        Ok(CudaMtp {
            head,
            rotary: Rotary::new(&config),
            fc,
            layer,
            embedding_norm: gains(EMBEDDING_NORM)?,
            hidden_norm: gains(HIDDEN_NORM)?,
            norm: gains(NORM)?,
            gpu: gpu.clone(),
            config,
        })
    }

    fn parts(&self) -> MtpParts<'_> {
        let [attention, mlp] = &self.layer.blocks[..] else {
            unreachable!("the layer has two blocks");
        };
        match (attention, mlp) {
            (
                Block {
                    norm: attention_norm,
                    mixer: Mix::Attention(attention),
                },
                Block {
                    norm: mlp_norm,
                    mixer: mlp,
                },
            ) => MtpParts {
                attention_norm,
                attention,
                mlp_norm,
                mlp,
            },
            _ => unreachable!("the layer begins with attention"),
        }
    }

    fn norm<'a>(&self, gain: &'a Buffer<f32>) -> Norm<'a> {
        Norm {
            gain,
            eps: self.config.rms_norm_eps,
        }
    }

    /// The first Linear of `n` rows, `few.embedded` and the hidden states `few.normed`, and the products of
    /// attention.
    fn products(&self, on: On<'_>, drawn: bool, n: usize) -> Result<()> {
        let (parts, few, stream) = (self.parts(), on.few, on.stream);
        let x = if drawn { &mut few.last.x } else { &mut few.x };
        let (eps, columns) = (self.config.rms_norm_eps, &mut few.columns);
        let out = GemvOutput::Store(self.norm(&self.hidden_norm), x);
        multiply(stream, &self.fc[1], &few.normed, out, columns, n)?;
        let normed = full(&mut few.normed);
        norm_rows(
            stream,
            &few.embedded,
            &self.embedding_norm,
            normed,
            (n, eps),
        )?;
        let out = GemvOutput::Add(x);
        multiply(stream, &self.fc[0], &few.normed, out, columns, n)?;
        let out = GemvOutput::Store(self.norm(parts.attention_norm), &mut few.qkv);
        multiply(stream, &parts.attention.qkv.linear, x, out, columns, n)
    }
}

/// The blocks of the layer.
struct MtpParts<'a> {
    attention_norm: &'a Buffer<f32>,
    attention: &'a Attention<DeviceLinear, Buffer<f32>>,
    mlp_norm: &'a Buffer<f32>,
    /// An MLP or experts.
    mlp: &'a Mix<DeviceLinear, Buffer<f32>>,
}

/// The columns `cols` of `w`: in its scheme, or as floats if they end within a group.
fn columns(w: &Weight, cols: Range<usize>) -> Result<Weight> {
    if let Ok(part) = w.columns(cols.clone()) {
        return Ok(part);
    }
    let (rows, inputs) = w.dims();
    let (mut row, mut values) = (vec![0.0; inputs], Vec::with_capacity(rows * cols.len()));
    for index in 0..rows {
        w.dequantize_row(index, &mut row)?;
        values.extend_from_slice(&row[cols.clone()]);
    }
    Ok(Weight::Dense(Tensor::from_f32(
        vec![rows, cols.len()],
        values,
    )?))
}

impl GpuHead for CudaMtp {
    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn layer(&self) -> DraftLayer {
        DraftLayer::of(&self.config)
    }

    fn rotary(&self) -> &Rotary {
        &self.rotary
    }

    fn embedding(&self) -> Option<&DeviceLinear> {
        None
    }

    fn head<'a>(&'a self, target: &'a CudaModel) -> &'a DeviceLinear {
        self.head.as_ref().unwrap_or(&target.head)
    }

    fn ids(&self) -> Option<&Checked<u32>> {
        None
    }

    fn heads<'a>(&'a self, cos_sin: &'a Buffer<[f32; 2]>) -> Heads<'a> {
        heads_of(&self.config, &self.parts().attention.heads, cos_sin)
    }

    fn not_finite(&self) -> Error {
        MTP_NOT_FINITE
    }

    fn fill(&self, on: On<'_>, n: usize) -> Result<()> {
        let (parts, stream, many) = (self.parts(), on.stream, on.many);
        let size = (n, self.config.rms_norm_eps);
        // The layer reads what the head of the model does.
        let hidden = full(&mut many.x);
        norm_rows(stream, &many.streams, &on.target.norm, hidden, size)?;
        norm_rows(
            stream,
            &many.x,
            &self.hidden_norm,
            halves(&mut many.half),
            size,
        )?;
        let normed = halves(&mut many.normed);
        norm_rows(stream, &many.embedded, &self.embedding_norm, normed, size)?;
        let [of_embedding, of_hidden] = &self.fc;
        stream.gemm(of_hidden, &many.half, GemmOutput::Store(&mut many.x), n)?;
        stream.gemm(of_embedding, &many.normed, GemmOutput::Add(&mut many.x), n)?;
        let normed = halves(&mut many.normed);
        norm_rows(stream, &many.x, parts.attention_norm, normed, size)?;
        let out = GemmOutput::Store(&mut many.qkv);
        stream.gemm(&parts.attention.qkv.linear, &many.normed, out, n)?;
        let (heads, cache) = (self.heads(on.cos_sin), on.pages.layer(0));
        Ok(stream.append(&mut many.qkv, &many.rows, &heads, cache, n)?)
    }

    fn begin(&self, on: On<'_>, held: &Buffer<f32>, n: usize) -> Result<()> {
        let eps = self.config.rms_norm_eps;
        let hidden = full(&mut on.few.normed);
        norm_rows(on.stream, held, &on.target.norm, hidden, (n, eps))?;
        self.products(on, false, n)
    }

    fn begin_drawn(&self, on: On<'_>) -> Result<()> {
        // Of drafted tokens the layer reads its own output.
        let (few, eps) = (&mut *on.few, self.config.rms_norm_eps);
        let hidden = full(&mut few.normed);
        norm_rows(on.stream, &few.last.x, &self.norm, hidden, (1, eps))?;
        self.products(on, true, 1)
    }

    fn finish(&self, on: On<'_>) -> Result<()> {
        let (parts, last, stream) = (self.parts(), &mut on.few.last, on.stream);
        let multiply =
            |w: &DeviceLinear, x: &Buffer<f32>, out: GemvOutput<'_>| stream.gemv(w, x, out, true);
        let o = &parts.attention.o.linear;
        multiply(o, &last.attended, GemvOutput::Add(&mut last.x))?;
        let norm = self.norm(parts.mlp_norm);
        match (parts.mlp, &mut last.experts) {
            (Mix::Mlp(mlp), _) => {
                let out = GemvOutput::Silu(norm, &mut last.gated);
                multiply(&mlp.gate_up.linear, &last.x, out)?;
                let out = GemvOutput::Add(&mut last.x);
                Ok(multiply(&mlp.down.linear, &last.gated, out)?)
            }
            (Mix::Experts(experts), Some(rows)) => {
                let out = GemvOutput::Store(norm, &mut rows.scores);
                multiply(&experts.router.linear, &last.x, out)?;
                // The shared expert reads the residual stream before the others add to it.
                if let Some(Shared { score, mlp }) = &experts.shared {
                    let out = GemvOutput::Store(norm, &mut rows.shared);
                    multiply(&score.linear, &last.x, out)?;
                    let out = GemvOutput::Silu(norm, &mut last.gated);
                    multiply(&mlp.gate_up.linear, &last.x, out)?;
                    let size = (1, mlp.down.linear.inputs());
                    stream.scale_rows(&rows.shared, &full(&mut last.gated), size)?;
                }
                let shape = &mixture(&self.config, experts);
                let ExpertRows { scores, gated, .. } = rows;
                let (up, down) = (&experts.gate_up.linear, &experts.down.linear);
                stream.experts_up(up, (&last.x, norm), scores, gated, shape, 1)?;
                stream.experts_down(down, gated, scores, &mut last.x, shape, 1)?;
                if let Some(Shared { mlp, .. }) = &experts.shared {
                    let out = GemvOutput::Add(&mut last.x);
                    multiply(&mlp.down.linear, &last.gated, out)?;
                }
                Ok(())
            }
            _ => unreachable!("the layer ends with an MLP, or with experts that have buffers"),
        }
    }

    fn logits(&self, on: On<'_>) -> Result<()> {
        let last = &mut on.few.last;
        let out = GemvOutput::Head(self.norm(&self.norm), &mut last.logits, &mut last.best);
        Ok(on.stream.gemv(self.head(on.target), &last.x, out, true)?)
    }
}
