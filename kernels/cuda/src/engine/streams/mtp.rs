//! A model's MTP layer on a GPU ([`nq_model::mtp`]).

use super::{DraftModel, GpuHead, On, multiply};
use crate::engine::layer::CudaLayers;
use crate::engine::model::{Slower, held_layer, pack_layer};
use crate::{Buffer, DeviceLinear, GemmOutput, GemvOutput, Gpu, Norm, RowsOut, Stack, Uploader};
use nq_formats::mtp::LayerStore;
use nq_formats::{Tensor, Weight, WeightStore};
use nq_model::mtp::{EMBEDDING_NORM, FC, HIDDEN_NORM, NORM};
use nq_model::{Dims, ModelConfig};
use nq_runtime::interface::DraftLayer;
use nq_runtime::models::LayerWeights;
use nq_runtime::rope::Rotary;
use nq_runtime::speculation::head::MTP_NOT_FINITE;
use nq_runtime::{Error, Result};
use std::ops::Range;

/// The layer, packed for a GPU.
pub struct CudaMtp {
    model: DraftModel,
    /// The halves of the first Linear, `[hidden, hidden]`: of the embedding, and of the hidden state.
    fc: [DeviceLinear; 2],
    embedding_norm: Buffer<f32>,
    hidden_norm: Buffer<f32>,
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
        let fc = store.matrix(FC, Dims::new(h, 2 * h))?;
        let mut half = |first: usize| -> Result<DeviceLinear> {
            let part = columns(&fc, first..first + h)?;
            Ok(uploader.pack(&[&part], Stack::Concat, true)?)
        };
        let fc = [half(0)?, half(h)?];
        let weights = LayerWeights::read_in_levels(&LayerStore::new(store), &config, 0)?;
        let mut layers = CudaLayers::new(&config);
        layers.all.push(pack_layer(
            &mut uploader,
            0,
            &weights,
            &held_layer(&config, &weights, false),
            None,
            true,
            &mut Slower::default(),
        )?);
        let head = head.map(|w| uploader.pack(&[w], Stack::Concat, true));
        let head = head.transpose()?;
        uploader.finish()?;
        Ok(CudaMtp {
            fc,
            embedding_norm: gains(EMBEDDING_NORM)?,
            hidden_norm: gains(HIDDEN_NORM)?,
            model: DraftModel {
                gpu: gpu.clone(),
                sizes: DraftLayer::of(&config),
                rotary: Rotary::new(&config),
                layers,
                norm: gains(NORM)?,
                head,
                embedding: None,
                ids: None,
                config,
            },
        })
    }

    /// The first Linear of `n` rows, `few.embedded` and the hidden states `few.normed`.
    fn products(&self, on: &mut On<'_>, drawn: bool, n: usize) -> Result<()> {
        let (few, stream) = (&mut *on.few, on.stream);
        let x = if drawn { &mut few.last.x } else { &mut few.x };
        let (eps, columns) = (self.model.config.rms_norm_eps, &mut few.columns);
        let norm = Norm {
            gain: &self.hidden_norm,
            eps,
        };
        let out = GemvOutput::Store(Some(norm), x);
        multiply(stream, &self.fc[1], &few.normed, out, columns, n)?;
        let normed = RowsOut::full(&mut few.normed);
        stream.rms_norm(&few.embedded, None, &self.embedding_norm, &normed, n, eps)?;
        let out = GemvOutput::Add(x);
        multiply(stream, &self.fc[0], &few.normed, out, columns, n)
    }
}

/// The columns `cols` of `w`: in its scheme, or as floats if they end within a group.
fn columns(w: &Weight, cols: Range<usize>) -> Result<Weight> {
    if let Ok(part) = w.columns(cols.clone()) {
        return Ok(part);
    }
    let Dims { rows, cols: inputs } = w.dims();
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
    const NOT_FINITE: Error = MTP_NOT_FINITE;
    const MAKES_QKV: bool = false;

    fn model(&self) -> &DraftModel {
        &self.model
    }

    fn many_input(&self, on: &mut On<'_>, n: usize) -> Result<()> {
        let (stream, many) = (on.stream, &mut *on.many);
        let eps = self.model.config.rms_norm_eps;
        // The layer reads what the head of the model does.
        let hidden = RowsOut::full(&mut many.x);
        stream.rms_norm(&many.streams, None, &on.target.norm, &hidden, n, eps)?;
        stream.rms_norm(
            &many.x,
            None,
            &self.hidden_norm,
            &RowsOut::half(&mut many.half),
            n,
            eps,
        )?;
        let normed = RowsOut::half(&mut many.halves.normed);
        stream.rms_norm(&many.embedded, None, &self.embedding_norm, &normed, n, eps)?;
        let [of_embedding, of_hidden] = &self.fc;
        stream.gemm(of_hidden, &many.half, GemmOutput::Store(&mut many.x), n)?;
        stream.gemm(
            of_embedding,
            &many.halves.normed,
            GemmOutput::Add(&mut many.x),
            n,
        )?;
        Ok(())
    }

    fn few_input(&self, on: &mut On<'_>, held: &Buffer<f32>, n: usize) -> Result<()> {
        let eps = self.model.config.rms_norm_eps;
        let hidden = RowsOut::full(&mut on.few.normed);
        on.stream
            .rms_norm(held, None, &on.target.norm, &hidden, n, eps)?;
        self.products(on, false, n)
    }

    fn drawn_input(&self, on: &mut On<'_>) -> Result<()> {
        // Of drafted tokens the layer reads its own output.
        let (few, eps) = (&mut *on.few, self.model.config.rms_norm_eps);
        let hidden = RowsOut::full(&mut few.normed);
        on.stream
            .rms_norm(&few.last.x, None, &self.model.norm, &hidden, 1, eps)?;
        self.products(on, true, 1)
    }
}
