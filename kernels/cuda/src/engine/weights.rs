//! The GPU memory that a model's weights will take, before they are read: they are reserved on a device that only
//! counts.

use super::experts_at::ExpertsAt;
use super::held::{CudaLayer, HeldLayer, largest_mixture};
use super::part::GpuPart;
use crate::bank::{BankHalf, ExpertTable, Half, LayerBank, StageSizes, bank_bytes};
use crate::pack::PackedShape;
use crate::{Buffer, DeviceLinear, Gpu, GpuInfo, HalfRows, PackedKind, StackKind, stacked};
use nq_formats::{TensorEntry, WeightStore};
use nq_kernels::Account;
use nq_kernels::registry::WeightKind;
use nq_model::forward::{Layer, VectorSpec};
use nq_model::names::{self, EMBEDDING};
use nq_model::{DType, Dims, LayerSpec, ModelConfig, NgramTable, Product, Shape};
use nq_runtime::Result;
use nq_runtime::stacks::StackedLinear;
use nq_runtime::states::{is_recurrent, shape_of};
use nq_runtime::weights::Kinds;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Reserves the matrix `name` of a model, of shape `dims`.
fn matrix(gpu: &Gpu, kinds: Kinds<'_>, name: &str, dims: Dims) -> Result<DeviceLinear> {
    let kind = PackedKind::new(kinds(name), dims.cols)?;
    Ok(DeviceLinear::zeros(gpu, kind, &[dims.rows], dims.cols)?)
}

/// An empty weight, in the place of experts that are on the CPU.
pub(super) fn no_weight(gpu: &Gpu) -> nq_kernels::Result<DeviceLinear> {
    DeviceLinear::zeros(gpu, PackedKind::Fp16, &[], 0)
}

/// The trellis codes among a model's matrices, for which its sessions need memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TrellisCodes {
    #[default]
    None,
    /// nq's own.
    Own,
    /// EXL3's, also if there are others.
    Exl3,
}

impl TrellisCodes {
    /// Those of a matrix.
    pub(super) fn of_kind(kind: WeightKind) -> Self {
        match kind {
            WeightKind::Trellis(_) => TrellisCodes::Own,
            WeightKind::Exl3(_) => TrellisCodes::Exl3,
            _ => TrellisCodes::None,
        }
    }

    /// Those of a model whose matrices are of these kinds.
    pub(super) fn of_model(c: &ModelConfig, kinds: Kinds<'_>) -> Self {
        let layers = (0..c.num_hidden_layers).flat_map(|i| {
            let linears = c.layer(i).linears();
            linears.into_iter().map(move |l| l.name(i))
        });
        let others = [names::head(c), EMBEDDING].map(String::from);
        let codes = layers.chain(others).map(|name| Self::of_kind(kinds(&name)));
        codes.max().unwrap_or_default()
    }

    /// True unless there are none.
    pub(super) fn any(self) -> bool {
        self != TrellisCodes::None
    }
}

/// True if a Linear of the layers may have inputs sorted by group; `told` is how many layers, from the first on, `kinds`
/// knows: others are taken to be like these.
pub(super) fn has_sorted_inputs(c: &ModelConfig, kinds: Kinds<'_>, told: usize) -> bool {
    (0..told).any(|i| {
        let linears = c.layer(i).linears();
        linears.into_iter().any(|l| kinds(&l.name(i)).is_ordered())
    })
}

/// Reserves the head, or what a GPU of several has of it.
pub(super) fn head(
    gpu: &Gpu,
    c: &ModelConfig,
    kinds: Kinds<'_>,
    part: Option<GpuPart>,
) -> Result<DeviceLinear> {
    let rows = part.map_or(c.vocab_size, |part| part.head_rows(c).len());
    matrix(gpu, kinds, names::head(c), Dims::new(rows, c.hidden_size))
}

/// Bytes of packed weights.
#[derive(Clone, Copy, Default)]
pub(super) struct WeightBytes {
    /// All of them.
    pub(super) held: usize,
    /// Those that one token reads, of experts the chosen ones; 0 for layers that are scaled by their stored sizes.
    pub(super) read: usize,
}

/// A stack of a layer, before it is packed.
struct StackShape {
    kind: PackedKind,
    /// Its inputs are sorted by group.
    sorted: bool,
    /// Rows of its parts.
    heights: Vec<usize>,
    inputs: usize,
    /// Weights that each part is a stack of.
    experts: usize,
}

impl StackShape {
    /// That of `product` of layer `index`; `None` if nothing of it is held on the device.
    fn of(
        c: &ModelConfig,
        kinds: Kinds<'_>,
        index: usize,
        held: &HeldLayer,
        product: &'static Product,
    ) -> Result<Option<Self>> {
        let parts = held.parts(product);
        if parts.is_empty() {
            return Ok(None);
        }
        let inputs = product.inputs(c);
        let kind = |part: &StackedLinear| part.kind(|l| kinds(&l.name(index)));
        let plain = held.is_plain(product);
        let StackKind { kind, sorted } = StackKind::new(parts.iter().map(kind), inputs, plain)?;
        Ok(Some(StackShape {
            kind,
            sorted,
            heights: parts.iter().map(|part| part.rows(c)).collect(),
            inputs,
            experts: parts[0].weights(c),
        }))
    }
}

/// The shapes of an expert's halves in layer `index`, their inputs, and the number of experts; `None` for a layer
/// without experts on the device.
pub(super) struct BankShape {
    pub(super) shapes: [PackedShape; 2],
    pub(super) inputs: [usize; 2],
    pub(super) experts: usize,
}

impl BankShape {
    /// That of layer `index`, whose weights are `held`; `None` without experts on the device.
    ///
    /// # Errors
    /// A weight that no kernel serves.
    pub(super) fn of(
        c: &ModelConfig,
        kinds: Kinds<'_>,
        index: usize,
        held: &HeldLayer,
    ) -> Result<Option<Self>> {
        let (Some(shape), Some((_, spec))) = (c.experts, c.layer(index).experts()) else {
            return Ok(None);
        };
        let stack = |product| StackShape::of(c, kinds, index, held, product);
        let (Some(up), Some(down)) = (stack(&spec.gate_up)?, stack(&spec.down)?) else {
            return Ok(None);
        };
        let experts = up.heights.iter().sum::<usize>() / (2 * shape.width).max(1);
        let each = |stack: &StackShape| {
            let rows = stack.heights.iter().sum::<usize>() / experts.max(1);
            PackedShape::new(stack.kind, rows, stack.inputs)
        };
        Ok(Some(BankShape {
            shapes: [each(&up), each(&down)],
            inputs: [up.inputs, down.inputs],
            experts,
        }))
    }

    /// Bytes of all experts.
    pub(super) fn bytes(&self) -> usize {
        bank_bytes(self.shapes, self.experts)
    }

    /// The halves of a bank of this shape, whose weights have these scales.
    pub(super) fn halves(&self, layer: &Arc<LayerBank>, scales: [f32; 2]) -> [DeviceLinear; 2] {
        [Half::Up, Half::Down].map(|half| {
            DeviceLinear::of_bank(BankHalf {
                layer: Arc::clone(layer),
                half,
                scale: scales[half as usize],
                inputs: self.inputs[half as usize],
            })
        })
    }
}

/// The table for a model's experts, all of which are in banks.
pub(super) fn expert_table(gpu: &Gpu, c: &ModelConfig) -> nq_kernels::Result<ExpertTable> {
    let most = c.experts.map_or(0, |e| stacked(&largest_mixture(&e)));
    ExpertTable::new(gpu, c.num_hidden_layers, most)
}

/// What the banks of a model's experts would take.
#[derive(Clone, Debug, Default)]
pub(super) struct BankSizes {
    /// The stacks that prompts make of experts.
    pub(super) stage: StageSizes,
    /// Bytes of the computer's memory, by layer.
    pub(super) layers: Vec<usize>,
}

impl BankSizes {
    /// Bytes of the banks of all layers but the first `whole`.
    pub(super) fn bytes(&self, whole: usize) -> usize {
        self.layers.iter().skip(whole).sum()
    }

    /// The fewest layers, from the first on, without which the banks take at most `host` bytes.
    pub(super) fn whole(&self, host: usize) -> usize {
        let fits = |whole: &usize| self.bytes(*whole) <= host;
        (0..self.layers.len())
            .find(fits)
            .unwrap_or(self.layers.len())
    }
}

/// What banks of a model's experts would take; `None` without experts, and where some are not quantized, which take too
/// much of a bus, or in EXL3's codes, of which banks have no layout.
///
/// # Errors
/// A weight that no kernel serves.
pub(super) fn bank_sizes(c: &ModelConfig, kinds: Kinds<'_>) -> Result<Option<BankSizes>> {
    let mut sizes = BankSizes::default();
    for index in 0..c.num_hidden_layers {
        let experts = c.layer(index).experts();
        let mut linears = experts.into_iter().flat_map(|(_, experts)| {
            [&experts.gate_up, &experts.down]
                .into_iter()
                .flat_map(|product| product.linears.iter())
        });
        let has_none = |kind| matches!(kind, WeightKind::Dense(_) | WeightKind::Exl3(_));
        if linears.any(|l| has_none(kinds(&l.name(index)))) {
            return Ok(None);
        }
        let bank = BankShape::of(c, kinds, index, &held_by_plan(c, kinds, index, false))?;
        sizes.layers.push(bank.as_ref().map_or(0, BankShape::bytes));
        if let Some(bank) = bank {
            sizes.stage = sizes.stage.with(bank.shapes, bank.experts);
        }
    }
    Ok((sizes.bytes(0) > 0).then_some(sizes))
}

/// What of layer `index` is on the device, by the kinds of its weights.
fn held_by_plan(c: &ModelConfig, kinds: Kinds<'_>, index: usize, on_cpu: bool) -> HeldLayer {
    let spec = c.layer(index);
    HeldLayer::new(c, spec, on_cpu, |kind| {
        kinds(&spec.linear(kind).name(index))
    })
}

/// Bytes that layer `index` takes on `gpu`, which only counts, beside the `table` of experts that are in banks.
///
/// # Errors
/// A weight that no kernel serves.
pub(super) fn layer_bytes(
    gpu: &Gpu,
    c: &ModelConfig,
    kinds: Kinds<'_>,
    index: usize,
    at: ExpertsAt,
    table: Option<&ExpertTable>,
) -> Result<WeightBytes> {
    let before = gpu.account().held();
    let spec = c.layer(index);
    let held = held_by_plan(c, kinds, index, at.on_cpu(index));
    let mut banked = match (at, table) {
        (ExpertsAt::Bank { rooms, whole }, Some(table)) if index >= whole => {
            let shape = BankShape::of(c, kinds, index, &held)?;
            let halves = shape.map(|shape| -> Result<_> {
                let (experts, shapes) = (shape.experts, shape.shapes);
                let bank = LayerBank::new(gpu, table, index, experts, shapes, rooms)?;
                Ok(shape.halves(&Arc::new(bank), [1.0; 2]).map(Some))
            });
            halves.transpose()?.unwrap_or_default()
        }
        _ => [None, None],
    };
    let vector = |vector: VectorSpec| -> Result<_> { Ok(gpu.zeros("a norm", vector.len(c))?) };
    let pack = |product: &'static Product| {
        if let Some(half) = half_of_experts(spec, product).and_then(|i| banked[i as usize].take()) {
            return Ok(half);
        }
        let Some(stack) = StackShape::of(c, kinds, index, &held, product)? else {
            return Ok(no_weight(gpu)?);
        };
        let StackShape {
            kind,
            sorted,
            heights,
            inputs,
            experts,
        } = stack;
        let linear = DeviceLinear::zeros_of_experts(gpu, kind, &heights, inputs, experts)?;
        Ok(linear.with_order(gpu, sorted)?)
    };
    let mut layer: CudaLayer = Layer::new(index, spec, pack, vector)?;
    if held.has_shared() {
        layer.drop_shared_expert();
    }
    let delta = shape_of(c).filter(|_| is_recurrent(spec));
    let router = held.router().map_or(0, |router| router.rows(c));
    let rates = delta.map_or(0, |d| 2 * d.value_heads);
    // Memory of no bytes takes some too, so what does not exist is not reserved.
    let halves = |rows: usize| {
        let bytes = HalfRows::bytes(rows, c.hidden_size);
        let reserved = (rows > 0).then(|| gpu.zeros::<u8>("a weight", bytes));
        reserved.transpose()
    };
    let _halves = (halves(rates)?, halves(router)?);
    let vectors = layer.vectors().map(Buffer::bytes).sum::<usize>();
    Ok(WeightBytes {
        held: gpu.account().held() - before,
        read: vectors + layer.bytes_per_token(c, DeviceLinear::bytes),
    })
}

/// The half of a mixture that `product` of a layer is.
pub(super) fn half_of_experts(spec: &LayerSpec, product: &Product) -> Option<Half> {
    let (_, experts) = spec.experts()?;
    match product {
        up if *up == experts.gate_up => Some(Half::Up),
        down if *down == experts.down => Some(Half::Down),
        _ => None,
    }
}

/// Bytes that packed weights of these kinds take on the device, with experts where `at` says. If
/// `stored` gives the bytes of each layer in the file, only the first layer is packed, and the others are
/// scaled by their stored sizes; experts are then in no banks.
///
/// # Errors
/// A weight that no kernel serves.
pub(super) fn weight_bytes(
    c: &ModelConfig,
    kinds: Kinds<'_>,
    stored: Option<&[u64]>,
    at: ExpertsAt,
    part: Option<GpuPart>,
) -> Result<WeightBytes> {
    let account = Account::gpu();
    let gpu = &Gpu::dry(GpuInfo::default(), account.clone());
    let table = match at {
        ExpertsAt::Bank { .. } => Some(expert_table(gpu, c)?),
        ExpertsAt::Gpu | ExpertsAt::Cpu(_) => None,
    };
    let layer = |index: usize, at| layer_bytes(gpu, c, kinds, index, at, table.as_ref());
    let layers = match stored {
        Some(stored) => {
            let bytes = |at| -> Result<_> { Ok(layer(0, at)?.held as u128) };
            let (whole, bare) = (bytes(ExpertsAt::Gpu)?, bytes(ExpertsAt::Cpu(1))?);
            let sizes = stored.iter().enumerate();
            let all: u128 = sizes
                .map(|(i, &size)| if at.on_cpu(i) { bare } else { whole } * u128::from(size))
                .sum();
            WeightBytes {
                held: all.div_ceil(stored[0].into()) as usize,
                read: 0,
            }
        }
        None => {
            let mut all = WeightBytes::default();
            for index in 0..c.num_hidden_layers {
                let WeightBytes { held, read } = layer(index, at)?;
                (all.held, all.read) = (all.held + held, all.read + read);
            }
            all
        }
    };
    let norm = gpu.zeros::<f32>("a norm", c.stream_width())?;
    let mix = names::end_parameters(c).filter_map(|(name, shape)| match shape {
        Shape::Matrix(rows, cols) => Some(matrix(gpu, kinds, &name, Dims::new(rows, cols))),
        Shape::Vector(_) => None,
    });
    let mix: Vec<DeviceLinear> = mix.collect::<Result<_>>()?;
    let head = head(gpu, c, kinds, part)?;
    let _embedding = if c.tie_word_embeddings {
        None
    } else {
        Some(matrix(
            gpu,
            kinds,
            EMBEDDING,
            Dims::new(c.vocab_size, c.hidden_size),
        )?)
    };
    Ok(WeightBytes {
        held: layers.held + account.held(),
        read: layers.read
            + norm.bytes()
            + mix.iter().map(DeviceLinear::bytes).sum::<usize>()
            + head.bytes(),
    })
}

/// The kinds of all Linears of the layers, by name, if the store knows their schemes, or that they are floats, without
/// reading the weights; only these tell whether inputs are in activation order. A layer may hold its weights in
/// more bits than the first does.
pub(super) fn told_kinds(
    config: &ModelConfig,
    store: &dyn WeightStore,
    act_order: bool,
) -> Option<BTreeMap<String, WeightKind>> {
    let layers = 0..config.num_hidden_layers;
    let names = layers.flat_map(|layer| {
        let linears = config.layer(layer).linears().into_iter();
        linears.map(move |linear| linear.name(layer))
    });
    // Unquantized weights are held in one way, whatever their type.
    let kind = |name: &str| match store.scheme_in_levels(name) {
        Some(scheme) => Some(WeightKind::in_scheme(scheme, act_order)),
        None => (store.is_float(name)).then_some(WeightKind::Dense(DType::BF16)),
    };
    let told = names.map(|name| kind(&name).map(|kind| (name, kind)));
    let mut kinds: BTreeMap<String, WeightKind> = told.collect::<Option<_>>()?;
    // Those that nq never quantizes.
    for layer in 0..config.num_hidden_layers {
        for linear in config.layer(layer).kept() {
            let name = linear.name(layer);
            let kind = kind(&name).unwrap_or(WeightKind::Dense(DType::BF16));
            kinds.insert(name, kind);
        }
    }
    Some(kinds)
}

/// Stored bytes of each layer; `None` if the names in the file do not tell.
pub(super) fn stored_by_layer(entries: &[TensorEntry], layers: usize) -> Option<Vec<u64>> {
    let mut bytes = vec![0; layers];
    // MTP layers: apart in Hugging Face checkpoints, behind the others in GGUF.
    let behind: Vec<&str> = (entries.iter())
        .filter_map(|e| Some(e.name.split_once("nextn.")?.0))
        .chain(["mtp."])
        .collect();
    // Tables of n-grams stay on the host.
    let of_model = |e: &&TensorEntry| {
        !behind.iter().any(|start| e.name.starts_with(start))
            && NgramTable::part_of(&e.name).is_none()
    };
    for entry in entries.iter().filter(of_model) {
        let mut words = entry.name.split('.');
        // The names in Hugging Face checkpoints and in GGUF.
        if words.by_ref().any(|w| w == "layers" || w == "blk") {
            let index: usize = words.next()?.parse().ok()?;
            *bytes.get_mut(index)? += entry.bytes;
        }
    }
    bytes.iter().all(|&b| b > 0).then_some(bytes)
}
