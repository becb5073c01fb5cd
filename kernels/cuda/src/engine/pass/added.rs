//! What adapters add to the products of a pass.

use super::{Context, Inputs, Product};
use crate::engine::adapters::{Adapted, AdapterRows, Addition};
use crate::engine::pass::products::AddedInput;
use crate::{Buffer, LowRank};
use nq_formats::adapter::ProductKey;
use nq_model::Dims;

impl Adapted<'_> {
    /// Adds to the outputs `y` `[m, out]` of a product what the adapters make of its inputs.
    pub(super) fn add(
        &mut self,
        on: &Context<'_>,
        m: usize,
        key: ProductKey,
        inputs: &mut Inputs<'_>,
        x: AddedInput<'_>,
        y: &mut Buffer<f32>,
    ) -> nq_kernels::Result<()> {
        let AdapterRows { low, zeros, .. } = &mut *self.rows;
        for runs in self.runs.chunk_by(|a, b| a.adapter == b.adapter) {
            let adapter = &self.adapters.packed[runs[0].adapter];
            let Some(Addition { a, b }) = adapter.products.get(&key) else {
                continue;
            };
            let product = Product {
                stream: on.stream,
                kernels: on.kernels,
                name: "adapter",
                w: a,
                m,
                holds_dependents: false,
            };
            inputs.low(product, x, low, zeros)?;
            for run in runs {
                let ranks = a.rows();
                let added = LowRank {
                    low,
                    b,
                    ranks,
                    rows: run.rows.clone(),
                    scale: run.scale,
                };
                let key = ("adapter", "f32", Dims::new(b.len() / ranks, ranks));
                (on.stream).timed(key, b.bytes(), || on.stream.add_low_rank(&added, y))?;
            }
        }
        Ok(())
    }
}
