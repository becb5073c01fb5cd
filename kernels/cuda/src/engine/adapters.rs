//! LoRA adapters beside a model's weights: `y += scale B (A x)` for those rows of a pass whose sequences have one. `A` is
//! packed as weights are, and all rows of a pass are multiplied by it with the kernels that they have anyway; the short rows
//! of `B` stay in f32, and their products are added to the rows of a sequence alone.

use crate::{Buffer, DeviceLinear, Gpu, GpuInfo, MOST_SEQUENCES, Stack, Uploader};
use nq_formats::adapter::{Lora, LoraProduct, ProductKey};
use nq_kernels::Account;
use nq_model::{Dims, LinearKind, ModelConfig};
use nq_runtime::interface::AppliedAdapter;
use nq_runtime::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// An adapter on a GPU.
pub(super) struct CudaAdapter {
    pub(super) products: BTreeMap<ProductKey, Addition>,
}

/// What is added to a product.
pub(super) struct Addition {
    pub(super) a: DeviceLinear, // [ranks, in]
    /// `[out, ranks]`, in the order of the product's outputs.
    pub(super) b: Buffer<f32>,
}

/// The adapters of an engine.
#[derive(Clone, Default)]
pub(super) struct CudaAdapters {
    pub(super) packed: Vec<Arc<CudaAdapter>>,
    /// What is added to sequences that nothing else is said of.
    pub(super) applied: Vec<AppliedAdapter>,
    pub(super) widths: AdapterWidths,
    /// Device memory that they take.
    pub(super) bytes: usize,
}

/// The largest sizes of the products that adapters add to.
#[derive(Clone, Copy, Default)]
pub(super) struct AdapterWidths {
    ranks: usize,
    /// Of gate and up together.
    gate_up: usize,
}

impl CudaAdapters {
    /// Packs `loras`, adapters of a model of this shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for mixtures; too little memory.
    pub(super) fn new(
        gpu: &Gpu,
        config: &ModelConfig,
        loras: &[Lora],
        applied: &[AppliedAdapter],
    ) -> Result<Self> {
        AppliedAdapter::check(applied, loras.len())?;
        if config.experts.is_some() && !loras.is_empty() {
            return Err(merged_only("one of a mixture".into()));
        }
        let mut all = CudaAdapters {
            applied: applied.to_vec(),
            ..CudaAdapters::default()
        };
        let mut uploader = Uploader::new(gpu)?;
        for lora in loras {
            let mut products = BTreeMap::new();
            lora.each_product(config, |key, product| -> Result<()> {
                let added = Addition::new(&mut uploader, key, &product)?;
                all.count(key, &added)?;
                products.insert(key, added);
                Ok(())
            })?;
            all.packed.push(Arc::new(CudaAdapter { products }));
        }
        uploader.finish()?;
        Ok(all)
    }

    fn count(&mut self, key: ProductKey, added: &Addition) -> nq_kernels::Result<()> {
        let (widths, ranks) = (&mut self.widths, added.a.rows());
        // As it is allocated: memory of no bytes takes some, too.
        let account = Account::gpu();
        let dry = Gpu::dry(GpuInfo::default(), account.clone());
        let _a = DeviceLinear::zeros(&dry, added.a.kind(), &[ranks], added.a.inputs())?;
        let _b = dry.zeros::<f32>("an adapter", added.b.len())?;
        self.bytes += account.held();
        widths.ranks = widths.ranks.max(ranks);
        if key.first == LinearKind::Gate {
            widths.gate_up = widths.gate_up.max(added.b.len() / ranks);
        }
        Ok(())
    }

    /// Number of adapters.
    pub(super) fn len(&self) -> usize {
        self.packed.len()
    }
}

/// The error for adapters that GPUs compute merged only.
pub(super) fn merged_only(found: String) -> Error {
    Error::Unsupported {
        engine: "nq on a GPU",
        what: "adapters beside a model's weights",
        expected: "adapters of models without experts, the CPU (--device cpu), or the unquantized model, which \
                   --adapter FOLDER is merged into"
            .into(),
        found,
    }
}

impl Addition {
    fn new(uploader: &mut Uploader, key: ProductKey, product: &LoraProduct) -> Result<Self> {
        let stack = match key.first {
            LinearKind::Gate => Stack::Interleave,
            _ => Stack::Concat,
        };
        let (LoraProduct { a, b }, ranks) = (product, product.a.dims().rows);
        let outputs = b.iter().map(|part| part.b.dims().rows).sum::<usize>();
        let (mut values, mut first) = (vec![0.0; outputs * ranks], 0);
        for (place, part) in b.iter().enumerate() {
            let Dims { rows, cols } = part.b.dims();
            for row in 0..if cols > 0 { rows } else { 0 } {
                let at = match stack {
                    Stack::Interleave => row / 8 * 16 + place * 8 + row % 8,
                    Stack::Concat => first + row,
                };
                let values = &mut values[at * ranks + part.first..][..cols];
                part.b.dequantize_row(row, values)?;
            }
            first += rows;
        }
        Ok(Addition {
            b: uploader.gpu().upload("an adapter", &values)?,
            a: uploader.pack(&[a], Stack::Concat, true)?,
        })
    }
}

/// Rows of a pass that follow one another and have an adapter, and what that is multiplied by.
pub(super) struct AdaptedRun {
    pub(super) adapter: usize,
    pub(super) scale: f32,
    pub(super) rows: Range<usize>,
}

/// The adapters of a session's sequences.
pub(super) struct AdaptedSequences {
    pub(super) applied: Vec<Vec<AppliedAdapter>>, // [slots]
    /// Those of the rows of the pass that is being queued, ordered by adapter.
    pub(super) runs: Vec<AdaptedRun>,
}

impl AdaptedSequences {
    /// Those of `slots` sequences, to which `applied` are added.
    pub(super) fn new(applied: &[AppliedAdapter], slots: usize) -> Self {
        AdaptedSequences {
            applied: vec![applied.to_vec(); slots],
            runs: Vec::new(),
        }
    }

    /// Notes the adapters of a pass over rows of the sequences in these slots, given in the order of rows.
    pub(super) fn begin(&mut self, sequences: impl Iterator<Item = (usize, Range<usize>)>) {
        let AdaptedSequences { applied, runs } = self;
        runs.clear();
        for (slot, rows) in sequences {
            runs.extend(applied[slot].iter().map(|a| AdaptedRun {
                adapter: a.adapter,
                scale: a.scale,
                rows: rows.clone(),
            }));
        }
        runs.sort_by_key(|run| (run.adapter, run.rows.start));
        runs.dedup_by(|next, run| {
            let follows = run.adapter == next.adapter
                && run.scale.to_bits() == next.scale.to_bits()
                && run.rows.end == next.rows.start;
            if follows {
                run.rows.end = next.rows.end;
            }
            follows
        });
    }
}

/// The rows of a step, each with the slot of its sequence if it has one.
pub(super) fn by_row(
    slots: impl Iterator<Item = Option<usize>>,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let rows = slots.enumerate();
    rows.filter_map(|(row, slot)| Some((slot?, row..row + 1)))
}

/// Memory of a session for what adapters compute.
pub(super) struct AdapterRows {
    pub(super) low: Buffer<f32>,     // [rows, ranks]
    pub(super) zeros: Buffer<f32>,   // [MOST_SEQUENCES, ranks], which are never written
    pub(super) gate_up: Buffer<f32>, // [rows, outputs of gate and up]
}

impl AdapterRows {
    /// Allocates it for passes over up to `rows` rows; `None` without adapters.
    pub(super) fn new(
        gpu: &Gpu,
        widths: AdapterWidths,
        rows: usize,
    ) -> nq_kernels::Result<Option<Self>> {
        let zeros = |n: usize| gpu.zeros::<f32>("activations", n);
        let AdapterWidths { ranks, gate_up } = widths;
        if ranks == 0 {
            return Ok(None);
        }
        Ok(Some(AdapterRows {
            low: zeros(rows * ranks)?,
            zeros: zeros(MOST_SEQUENCES * ranks)?,
            gate_up: zeros(rows * gate_up)?,
        }))
    }
}

/// The adapters of a pass.
pub(super) struct Adapted<'a> {
    pub(super) adapters: &'a CudaAdapters,
    pub(super) runs: &'a [AdaptedRun],
    pub(super) rows: &'a mut AdapterRows,
}

impl<'a> Adapted<'a> {
    /// The adapters of a pass whose rows have some.
    pub(super) fn of_pass(
        adapters: &'a CudaAdapters,
        runs: &'a [AdaptedRun],
        rows: &'a mut Option<AdapterRows>,
    ) -> Option<Self> {
        let rows = rows.as_mut().filter(|_| !runs.is_empty())?;
        Some(Adapted {
            adapters,
            runs,
            rows,
        })
    }

    /// True if anything is added to a product.
    pub(super) fn changes(&self, key: ProductKey) -> bool {
        let adapters = self.runs.iter().map(|run| run.adapter);
        adapters
            .into_iter()
            .any(|a| self.adapters.packed[a].products.contains_key(&key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PackedKind;

    impl CudaAdapters {
        /// Adapters of all Linears of a dense model, without values.
        pub(in crate::engine) fn imagined(gpu: &Gpu, c: &ModelConfig, n: usize) -> Result<Self> {
            let mut all = CudaAdapters::default();
            for _ in 0..n {
                let mut adapter = BTreeMap::new();
                for layer in 0..c.num_hidden_layers {
                    let spec = c.layer(layer);
                    for product in spec.products().into_iter().chain(spec.kept_products()) {
                        let ranks = 16 * product.linears.len();
                        let out: usize = product.linears.iter().map(|l| l.dims(c).rows).sum();
                        let inputs = product.inputs(c);
                        let added = Addition {
                            a: DeviceLinear::zeros(gpu, PackedKind::Fp16, &[ranks], inputs)?,
                            b: gpu.zeros("an adapter", out * ranks)?,
                        };
                        all.count(ProductKey::new(layer, product), &added)?;
                        adapter.insert(ProductKey::new(layer, product), added);
                    }
                }
                all.packed.push(Arc::new(CudaAdapter { products: adapter }));
            }
            Ok(all)
        }
    }

    #[test]
    fn rows_that_follow_one_another_with_one_adapter_are_one_run() {
        let applied = |adapter, scale| AppliedAdapter { adapter, scale };
        let mut all = AdaptedSequences::new(&[applied(1, 1.0)], 3);
        all.applied[0] = vec![applied(1, 1.0), applied(0, 0.5)];
        all.applied[2].clear();
        for _ in 0..2 {
            all.begin([(0, 0..3), (1, 3..4), (2, 4..5), (1, 5..6), (0, 6..9)].into_iter());
            let found = all
                .runs
                .iter()
                .map(|r| (r.adapter, r.scale, r.rows.clone()));
            let expected = [
                (0, 0.5, 0..3),
                (0, 0.5, 6..9),
                (1, 1.0, 0..4),
                (1, 1.0, 5..9),
            ];
            assert_eq!(found.collect::<Vec<_>>(), expected);
        }
    }
}
