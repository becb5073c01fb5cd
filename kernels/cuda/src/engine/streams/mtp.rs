//! A model's MTP layer on a GPU ([`nq_model::mtp`]).

use super::{GpuHead, On, full, halves, multiply, norm_rows};
use crate::engine::layer::CudaLayer;
use crate::engine::model::{CudaModel, Slower, pack_layer};
use crate::{Buffer, Checked, DeviceLinear, GemmOutput, GemvOutput, Gpu, Norm, Stack, Uploader};
use nq_formats::mtp::LayerStore;
use nq_formats::{Tensor, Weight, WeightStore};
use nq_model::ModelConfig;
use nq_model::mtp::{EMBEDDING_NORM, FC, HIDDEN_NORM, NORM};
use nq_runtime::interface::DraftLayer;
use nq_runtime::models::LayerWeights;
use nq_runtime::rope::Rotary;
use nq_runtime::speculation::head::MTP_NOT_FINITE;
use nq_runtime::{Error, Result};
use std::ops::Range;

/// The layer, packed for a GPU.
pub struct CudaMtp {
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
    pub fn load(
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
            (&mut uploader, &config),
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

    /// The first Linear of `n` rows, `few.embedded` and the hidden states `few.normed`.
    fn products(&self, on: &mut On<'_>, drawn: bool, n: usize) -> Result<()> {
        let (few, stream) = (&mut *on.few, on.stream);
        let x = if drawn { &mut few.last.x } else { &mut few.x };
        let (eps, columns) = (self.config.rms_norm_eps, &mut few.columns);
        let norm = Norm {
            gain: &self.hidden_norm,
            eps,
        };
        let out = GemvOutput::Store(norm, x);
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
        multiply(stream, &self.fc[0], &few.normed, out, columns, n)
    }
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

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn weights(&self) -> &CudaLayer {
        &self.layer
    }

    fn rotary(&self) -> &Rotary {
        &self.rotary
    }

    fn embedding(&self) -> Option<&DeviceLinear> {
        None
    }

    fn norm(&self) -> &Buffer<f32> {
        &self.norm
    }

    fn head<'a>(&'a self, target: &'a CudaModel) -> &'a DeviceLinear {
        self.head.as_ref().unwrap_or(&target.head)
    }

    fn ids(&self) -> Option<&Checked<u32>> {
        None
    }

    fn not_finite(&self) -> Error {
        MTP_NOT_FINITE
    }

    const MAKES_QKV: bool = false;

    fn many_input(&self, on: &mut On<'_>, n: usize) -> Result<()> {
        let (stream, many) = (on.stream, &mut *on.many);
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
        Ok(())
    }

    fn few_input(&self, on: &mut On<'_>, held: &Buffer<f32>, n: usize) -> Result<()> {
        let eps = self.config.rms_norm_eps;
        let hidden = full(&mut on.few.normed);
        norm_rows(on.stream, held, &on.target.norm, hidden, (n, eps))?;
        self.products(on, false, n)
    }

    fn drawn_input(&self, on: &mut On<'_>) -> Result<()> {
        // Of drafted tokens the layer reads its own output.
        let (few, eps) = (&mut *on.few, self.config.rms_norm_eps);
        let hidden = full(&mut few.normed);
        norm_rows(on.stream, &few.last.x, &self.norm, hidden, (1, eps))?;
        self.products(on, true, 1)
    }
}
