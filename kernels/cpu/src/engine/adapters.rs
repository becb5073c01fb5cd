//! LoRA adapters beside a model's weights: `y += scale B (A x)` for those rows of a forward whose sequences have one. A
//! forward may have rows with different adapters and without; those with the same one are multiplied together (as in
//! S-LoRA: Sheng and others, arXiv 2311.03285). Every other row is computed as without adapters, bit for bit.

use crate::{Cpu, Epilogue, Linear};
use nq_formats::Weight;
use nq_formats::adapter::{Lora, LoraProduct, LoraRows, ProductKey};
use nq_kernels::registry::WeightKind;
use nq_kernels::{Activations, KernelSet};
use nq_model::{Dims, LinearKind, ModelConfig};
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

/// What is added to a product.
pub(crate) struct Addition {
    /// `[ranks, in]`
    a: Linear,
    /// Of its Linears to which something is added.
    parts: Vec<AddedLinear>,
    /// Outputs of the product.
    out: usize,
}

/// What is added to a Linear of a product.
struct AddedLinear {
    /// `[out, rank]`
    b: Linear,
    /// The first of the rows of `A` that it is multiplied by.
    low: usize,
    /// Its first output among those of the product.
    start: usize,
}

/// Bytes that `loras` take beside a model: packed, and in a session whose forwards have up to `rows` rows.
///
/// # Errors
/// None for adapters of a model of this shape.
pub fn adapter_bytes(config: &ModelConfig, loras: &[Lora], rows: usize) -> Result<usize> {
    let (mut packed, mut widths) = (0, Widths::default());
    for lora in loras {
        lora.each_product(config, |key, LoraProduct { a, b }| -> Result<()> {
            let bytes = |w: &Weight| Linear::bytes_of(WeightKind::of(w), w.dims());
            let parts = b.iter().map(|part| &part.b);
            let added = parts.clone().filter(|b| b.dims().cols > 0);
            packed += bytes(&a) + added.map(bytes).sum::<usize>();
            widths.include(key, a.dims(), parts.map(|b| b.dims().rows).sum());
            Ok(())
        })?;
    }
    Ok(packed + widths.bytes(rows))
}

impl CpuAdapters {
    /// The largest sizes of their products.
    pub(super) fn widths(&self) -> Widths {
        let mut widths = Widths::default();
        for (&key, Addition { a, out, .. }) in self.packed.iter().flat_map(|own| &own.products) {
            widths.include(key, Dims::new(a.out_features(), a.in_features()), *out);
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
        lora.each_product(config, |key, LoraProduct { a, b }| -> Result<()> {
            let pack = |weight: &Weight| -> Result<Linear> {
                let linear = Linear::new(cpu, &[weight], Activations::F32, kernels)?;
                Ok(linear.named("adapter"))
            };
            let (mut parts, mut out) = (Vec::new(), 0);
            for LoraRows { b, first } in &b {
                if b.dims().cols > 0 {
                    parts.push(AddedLinear {
                        b: pack(b)?,
                        low: *first,
                        start: out,
                    });
                }
                out += b.dims().rows;
            }
            let a = pack(&a)?;
            products.insert(key, Addition { a, parts, out });
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
        for (Addition { a, parts, out }, rows) in self.additions(key) {
            let (input, ranks) = (a.in_features(), a.out_features());
            for rows in rows.chunks(TOGETHER) {
                let gathered = &mut scratch.gathered[..rows.len() * input];
                for (place, row) in rows.iter().zip(gathered.chunks_exact_mut(input)) {
                    row.copy_from_slice(&x[place.row * input..][..input]);
                }
                let low = &mut scratch.low[..rows.len() * ranks];
                cpu.linear(a, gathered, low, Epilogue::Store)?;
                for (place, low) in rows.iter().zip(low.chunks_exact_mut(ranks)) {
                    low.iter_mut().for_each(|v| *v *= place.scale);
                }
                for AddedLinear {
                    b,
                    low: first,
                    start,
                } in parts
                {
                    let (rank, n) = (b.in_features(), b.out_features());
                    let at = |place: &AdaptedRow| place.row * out + start;
                    if let [place] = rows {
                        let y = &mut y[at(place)..][..n];
                        cpu.linear(b, &low[*first..][..rank], y, Epilogue::Add)?;
                        continue;
                    }
                    let own = &mut scratch.own[..rows.len() * rank];
                    let sums = &mut scratch.sums[..rows.len() * n];
                    for (own, low) in own.chunks_exact_mut(rank).zip(low.chunks_exact(ranks)) {
                        own.copy_from_slice(&low[*first..][..rank]);
                    }
                    cpu.linear(b, own, sums, Epilogue::Store)?;
                    for (place, sums) in rows.iter().zip(sums.chunks_exact(n)) {
                        let y = y[at(place)..][..n].iter_mut();
                        y.zip(sums).for_each(|(y, sum)| *y += sum);
                    }
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
    own: Vec<f32>,      // [TOGETHER, ranks], of a Linear
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
    fn include(&mut self, key: ProductKey, a: Dims, out: usize) {
        if matches!(key.first, LinearKind::Gate | LinearKind::SharedGate) {
            self.gate_up = self.gate_up.max(out);
        }
        self.input = self.input.max(a.cols);
        self.ranks = self.ranks.max(a.rows);
        self.out = self.out.max(out);
    }

    /// Bytes of an [`AdapterScratch`] for up to `rows` rows.
    pub(super) fn bytes(&self, rows: usize) -> usize {
        let each = TOGETHER * (self.input + 2 * self.ranks + self.out);
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
            own: zeros(TOGETHER * widths.ranks),
            sums: zeros(TOGETHER * widths.out),
        }
    }
}
