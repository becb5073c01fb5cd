//! The GPU memory that a model's weights will take, before they are read: they are reserved on a device that only counts.

use super::layer::{CudaLayer, HeldLayer};
use super::part::GpuPart;
use crate::{Buffer, DeviceLinear, Gpu, GpuInfo, HalfRows, PackedKind};
use nq_formats::{TensorEntry, WeightStore};
use nq_kernels::Account;
use nq_kernels::registry::WeightKind;
use nq_model::forward::{Layer, VectorSpec};
use nq_model::names::{self, EMBEDDING};
use nq_model::{DType, Dims, ModelConfig, Product};
use nq_runtime::Result;
use nq_runtime::stacks::StackedLinear;
use nq_runtime::states::{is_recurrent, shape_of};
use nq_runtime::weights::Kinds;
use std::collections::BTreeMap;

/// Reserves the matrix `name` of a model, of shape `dims`.
fn matrix(gpu: &Gpu, kinds: Kinds<'_>, name: &str, dims: Dims) -> Result<DeviceLinear> {
    let kind = PackedKind::new(kinds(name), dims.cols)?;
    Ok(DeviceLinear::zeros(gpu, kind, &[dims.rows], dims.cols)?)
}

/// An empty weight, in the place of experts that are on the CPU.
pub(super) fn no_weight(gpu: &Gpu) -> nq_kernels::Result<DeviceLinear> {
    DeviceLinear::zeros(gpu, PackedKind::Fp16, &[], 0)
}

/// True if matrices of the model are in trellis codes.
pub(super) fn has_trellis(c: &ModelConfig, kinds: Kinds<'_>) -> bool {
    let coded = |name: &str| matches!(kinds(name), WeightKind::Trellis(_));
    let layer = |i: usize| {
        let linears = c.layer(i).linears();
        linears.iter().any(|l| coded(&l.name(i)))
    };
    coded(names::head(c)) || coded(EMBEDDING) || (0..c.num_hidden_layers).any(layer)
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

/// Bytes that layer `index` takes on `gpu`, which only counts, with its experts or without.
///
/// # Errors
/// A weight that no kernel serves.
pub(super) fn layer_bytes(
    gpu: &Gpu,
    c: &ModelConfig,
    kinds: Kinds<'_>,
    index: usize,
    on_host: bool,
) -> Result<WeightBytes> {
    let before = gpu.account().held();
    let spec = c.layer(index);
    let held = HeldLayer::new(c, spec, on_host, |kind| {
        kinds(&spec.linear(kind).name(index))
    });
    let vector = |vector: VectorSpec| -> Result<_> { Ok(gpu.zeros("a norm", vector.len(c))?) };
    let pack = |product: &'static Product| {
        let parts = held.parts(product);
        if parts.is_empty() {
            return Ok(no_weight(gpu)?);
        }
        let heights: Vec<usize> = parts.iter().map(|part| part.rows(c)).collect();
        let inputs = product.inputs(c);
        let kind = |part: &StackedLinear| part.kind(|l| kinds(&l.name(index)));
        let kind = match PackedKind::of_stack(parts.iter().map(kind), inputs)? {
            kind if held.is_plain(product) => kind.without_trellis(),
            kind => kind,
        };
        Ok(DeviceLinear::zeros(gpu, kind, &heights, inputs)?)
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

/// Bytes that packed weights of these kinds take, without the experts of the first `on_host` layers. If
/// `stored` gives the bytes of each layer in the file, only the first layer is packed, and the others are
/// scaled by their stored sizes.
///
/// # Errors
/// A weight that no kernel serves.
pub(super) fn weight_bytes(
    c: &ModelConfig,
    kinds: Kinds<'_>,
    stored: Option<&[u64]>,
    on_host: usize,
    part: Option<GpuPart>,
) -> Result<WeightBytes> {
    let account = Account::gpu();
    let gpu = &Gpu::dry(GpuInfo::default(), account.clone());
    let layer = |index: usize, on_host: bool| layer_bytes(gpu, c, kinds, index, on_host);
    let layers = match stored {
        Some(stored) => {
            let (whole, bare) = (layer(0, false)?.held as u128, layer(0, true)?.held as u128);
            let sizes = stored.iter().enumerate();
            let all: u128 = sizes
                .map(|(i, &size)| if i < on_host { bare } else { whole } * u128::from(size))
                .sum();
            WeightBytes {
                held: all.div_ceil(stored[0].into()) as usize,
                read: 0,
            }
        }
        None => {
            let mut all = WeightBytes::default();
            for index in 0..c.num_hidden_layers {
                let WeightBytes { held, read } = layer(index, index < on_host)?;
                (all.held, all.read) = (all.held + held, all.read + read);
            }
            all
        }
    };
    let norm = gpu.zeros::<f32>("a norm", c.hidden_size)?;
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
        read: layers.read + norm.bytes() + head.bytes(),
    })
}

/// The kinds of all Linears of the layers, by name, if the store knows their schemes without reading
/// the weights; only these tell whether inputs are in activation order. A layer may hold its weights in
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
    let kind = |name: String| {
        let scheme = store.scheme_in_levels(&name)?;
        Some((name, WeightKind::in_scheme(scheme, act_order)))
    };
    let mut kinds: BTreeMap<String, WeightKind> = names.map(&kind).collect::<Option<_>>()?;
    // Those that nq never quantizes; unquantized weights are held in one way, whatever their type.
    for layer in 0..config.num_hidden_layers {
        for linear in config.layer(layer).kept() {
            let name = linear.name(layer);
            let kind = kind(name.clone()).map_or(WeightKind::Dense(DType::BF16), |k| k.1);
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
    let of_model = |e: &&TensorEntry| !behind.iter().any(|start| e.name.starts_with(start));
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
