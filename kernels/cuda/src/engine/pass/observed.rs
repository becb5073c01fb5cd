//! What observers of a pass over prompts see.

use super::{Inputs, Pass};
use crate::engine::session::buffers::{FullRows, padded};
use crate::{Buffer, Stream, operand_index};
use nq_kernels::{KernelSet, Result};
use nq_model::Product;

impl Pass<'_> {
    /// Shows the observer the input rows of a product, if they exist in f32.
    pub(super) fn show(
        &mut self,
        layer: usize,
        product: &Product,
        rows: impl Fn(&FullRows) -> &Buffer<f32>,
    ) -> Result<()> {
        if let (
            Some(observer),
            Inputs::Half {
                full: Some(full), ..
            },
        ) = (&mut self.observer, &self.inputs)
            && observer.wants_inputs()
        {
            let n = self.m * product.inputs(self.on.config);
            observer.linear_input(layer, product, &fetch(self.on.stream, rows(full), n)?);
        }
        Ok(())
    }

    /// Shows the observer the output of attention: rows in f32, or FP16 rows `[m, width padded]` in
    /// operand order.
    pub(super) fn show_attended(&mut self, layer: usize, product: &Product) -> Result<()> {
        if self.on.kernels == KernelSet::Reference {
            return self.show(layer, product, |f| &f.attended);
        }
        let observer = self.observer.as_mut().filter(|o| o.wants_inputs());
        let (Some(observer), Inputs::Half { halves, .. }) = (observer, &self.inputs) else {
            return Ok(());
        };
        let width = product.inputs(self.on.config);
        self.on.stream.synchronize()?;
        let mut values = vec![0u16; self.m * padded(width)];
        halves.attended.read(0, &mut values)?;
        let rows = values.chunks_exact(padded(width));
        let values: Vec<f32> = rows
            .flat_map(|r| (0..width).map(|k| half::f16::from_bits(r[operand_index(k)]).to_f32()))
            .collect();
        observer.linear_input(layer, product, &values);
        Ok(())
    }

    /// Shows the observer the residual stream behind a layer.
    pub(super) fn show_output(&mut self, layer: usize) -> Result<()> {
        if let Some(observer) = &mut self.observer {
            let n = self.m * self.on.config.stream_width();
            let x = self.streams.as_ref().map_or(&*self.rows.x, |s| &s.rows.x);
            observer.layer_output(layer, &fetch(self.on.stream, x, n)?);
        }
        Ok(())
    }
}

/// Copies the first `n` values of `from` to the host, once the stream's work is done.
pub(in crate::engine) fn fetch(stream: &Stream, from: &Buffer<f32>, n: usize) -> Result<Vec<f32>> {
    stream.synchronize()?;
    let mut values = vec![0f32; n];
    from.read(0, &mut values)?;
    Ok(values)
}
