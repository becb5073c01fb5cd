//! LoRA adapters beside a model's weights: `y += scale B (A x)` for those rows of a forward whose sequences have one. A
//! forward may have rows with different adapters and without; those with the same one are multiplied together (as in
//! S-LoRA: Sheng and others, arXiv 2311.03285). Every other row is computed as without adapters, bit for bit.

use crate::{Cpu, Epilogue, Linear};
use nq_formats::Weight;
use nq_formats::adapter::{Lora, LoraProduct};
use nq_kernels::registry::WeightKind;
use nq_kernels::{Activations, KernelSet};
use nq_model::{LinearKind, ModelConfig, Product};
use nq_runtime::Result;
use nq_runtime::interface::AppliedAdapter;
use std::collections::BTreeMap;
use std::sync::Arc;

/// An adapter, packed for this CPU.
pub(crate) struct CpuAdapter {
    products: BTreeMap<ProductKey, Addition>,
}

/// The adapters of an engine.
#[derive(Clone, Default)]
pub(super) struct CpuAdapters {
    pub(super) packed: Vec<Arc<CpuAdapter>>,
    /// What is added to sequences that nothing else is said of.
    pub(super) applied: Vec<AppliedAdapter>,
}

/// Which product of a model is meant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ProductKey {
    layer: usize,
    /// Kind of its first Linear.
    first: LinearKind,
}

impl ProductKey {
    /// The key of `product` in layer `layer`.
    pub(super) fn new(layer: usize, product: &Product) -> Self {
        let first = product.linears[0].kind;
        ProductKey { layer, first }
    }
}

/// What is added to a product.
pub(crate) struct Addition {
    /// `[ranks, in]`
    a: Linear,
    /// `[out, ranks]`
    b: Linear,
}

/// Calls `each` with everything that `lora` adds to the model's products, and where.
fn each_product(
    config: &ModelConfig,
    lora: &Lora,
    mut each: impl FnMut(ProductKey, LoraProduct) -> Result<()>,
) -> Result<()> {
    for layer in 0..config.num_hidden_layers {
        let spec = config.layer(layer);
        for product in spec.products().into_iter().chain(spec.kept_products()) {
            if let Some(found) = lora.product(config, layer, product)? {
                each(ProductKey::new(layer, product), found)?;
            }
        }
    }
    Ok(())
}

/// Bytes that `loras` take beside a model: packed, and in a session whose forwards have up to `rows` rows.
///
/// # Errors
/// None for adapters of a model of this shape.
pub fn adapter_bytes(config: &ModelConfig, loras: &[Lora], rows: usize) -> Result<usize> {
    let (mut packed, mut widths) = (0, Widths::default());
    for lora in loras {
        each_product(config, lora, |key, LoraProduct { a, b }| {
            let bytes = |w: &Weight| Linear::bytes_of(WeightKind::of(w), w.dims());
            packed += bytes(&a) + b.iter().map(bytes).sum::<usize>();
            let (ranks, input) = a.dims();
            widths.include(key, ranks, input, b.iter().map(|b| b.dims().0).sum());
            Ok(())
        })?;
    }
    Ok(packed + widths.bytes(rows))
}

impl CpuAdapters {
    /// The largest sizes of their products.
    pub(super) fn widths(&self) -> Widths {
        let mut widths = Widths::default();
        for (&key, Addition { a, b }) in self.packed.iter().flat_map(|adapter| &adapter.products) {
            widths.include(key, b.in_features(), a.in_features(), b.out_features());
        }
        widths
    }
}

impl CpuAdapter {
    /// Packs `lora`, an adapter of a model of this shape.
    pub(super) fn new(
        cpu: &Cpu,
        config: &ModelConfig,
        kernels: KernelSet,
        lora: &Lora,
    ) -> Result<Self> {
        let mut products = BTreeMap::new();
        each_product(config, lora, |key, LoraProduct { a, b }| {
            let b: Vec<&Weight> = b.iter().collect();
            let pack = |parts: &[&Weight]| -> Result<Linear> {
                let linear = Linear::new(cpu, parts, Activations::F32, kernels)?;
                Ok(linear.named("adapter"))
            };
            let (a, b) = (pack(&[&a])?, pack(&b)?);
            products.insert(key, Addition { a, b });
            Ok(())
        })?;
        Ok(CpuAdapter { products })
    }
}

/// Rows of a forward that have the same adapter.
pub(crate) struct AdaptedRows {
    adapter: Arc<CpuAdapter>,
    rows: Vec<AdaptedRow>,
}

/// A row of a forward, and what its adapter is multiplied by.
#[derive(Clone, Copy)]
struct AdaptedRow {
    row: usize,
    scale: f32,
}

/// The rows of a forward that have adapters.
#[derive(Default)]
pub(crate) struct AdaptedBatch {
    /// By the adapter's place among the engine's: a row with several has them added in one order, whatever others have.
    groups: BTreeMap<usize, AdaptedRows>,
}

impl AdaptedBatch {
    /// Removes all rows.
    pub(super) fn clear(&mut self) {
        self.groups.clear();
    }

    /// Adds `applied`, which is one of `adapters`, to `rows`.
    pub(super) fn push(
        &mut self,
        adapters: &CpuAdapters,
        applied: &AppliedAdapter,
        rows: std::ops::Range<usize>,
    ) {
        let group = self.groups.entry(applied.adapter);
        let group = group.or_insert_with(|| AdaptedRows {
            adapter: Arc::clone(&adapters.packed[applied.adapter]),
            rows: Vec::new(),
        });
        let scale = applied.scale;
        group.rows.extend(rows.map(|row| AdaptedRow { row, scale }));
    }

    /// What is added to a product, and to which rows.
    fn additions(&self, key: ProductKey) -> impl Iterator<Item = (&Addition, &[AdaptedRow])> {
        let groups = self.groups.values();
        groups.filter_map(move |g| Some((g.adapter.products.get(&key)?, &g.rows[..])))
    }

    /// True if anything is added to a product.
    pub(super) fn changes(&self, key: ProductKey) -> bool {
        self.additions(key).next().is_some()
    }

    /// Adds to the rows `y` `[rows, out]` of a product what their adapters make of its inputs `x` `[rows, in]`.
    ///
    /// # Errors
    /// Errors of kernels.
    pub(super) fn add(
        &self,
        cpu: &Cpu,
        key: ProductKey,
        x: &[f32],
        y: &mut [f32],
        scratch: &mut AdapterScratch,
    ) -> Result<()> {
        for (Addition { a, b }, rows) in self.additions(key) {
            let (input, ranks, out) = (a.in_features(), b.in_features(), b.out_features());
            for rows in rows.chunks(TOGETHER) {
                let gathered = &mut scratch.gathered[..rows.len() * input];
                let low = &mut scratch.low[..rows.len() * ranks];
                let sums = &mut scratch.sums[..rows.len() * out];
                for (place, row) in rows.iter().zip(gathered.chunks_exact_mut(input)) {
                    row.copy_from_slice(&x[place.row * input..][..input]);
                }
                cpu.linear(a, gathered, low, Epilogue::Store)?;
                cpu.linear(b, low, sums, Epilogue::Store)?;
                for (place, sums) in rows.iter().zip(sums.chunks_exact(out)) {
                    let y = y[place.row * out..][..out].iter_mut();
                    y.zip(sums).for_each(|(y, sum)| *y += place.scale * sum);
                }
            }
        }
        Ok(())
    }
}

/// Rows of an adapter that are multiplied together.
const TOGETHER: usize = 64;

/// Intermediate results of adapters.
#[derive(Debug, Default)]
pub(crate) struct AdapterScratch {
    /// `[rows, 2 intermediate]`: gate and up, while they are not multiplied yet.
    pub(super) gate_up: Vec<f32>,
    gathered: Vec<f32>, // [TOGETHER, inputs]
    low: Vec<f32>,      // [TOGETHER, ranks]
    sums: Vec<f32>,     // [TOGETHER, outputs]
}

/// The largest sizes of the products that adapters add to.
#[derive(Clone, Copy, Default)]
pub(super) struct Widths {
    gate_up: usize,
    input: usize,
    ranks: usize,
    out: usize,
}

impl Widths {
    /// Makes room for a product.
    fn include(&mut self, key: ProductKey, ranks: usize, input: usize, out: usize) {
        if matches!(key.first, LinearKind::Gate | LinearKind::SharedGate) {
            self.gate_up = self.gate_up.max(out);
        }
        self.input = self.input.max(input);
        self.ranks = self.ranks.max(ranks);
        self.out = self.out.max(out);
    }

    /// Bytes of an [`AdapterScratch`] for up to `rows` rows.
    pub(super) fn bytes(&self, rows: usize) -> usize {
        let each = TOGETHER * (self.input + self.ranks + self.out);
        size_of::<f32>() * (rows * self.gate_up + each)
    }
}

impl AdapterScratch {
    /// Room for forwards of up to `rows` rows.
    pub(super) fn new(widths: &Widths, rows: usize) -> Self {
        let zeros = |n: usize| vec![0.0; n];
        AdapterScratch {
            gate_up: zeros(rows * widths.gate_up),
            gathered: zeros(TOGETHER * widths.input),
            low: zeros(TOGETHER * widths.ranks),
            sums: zeros(TOGETHER * widths.out),
        }
    }
}
