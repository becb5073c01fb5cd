//! The GPU memory that a model and its sessions will take, before any of it is allocated: their constructors are run
//! on a device that only counts. [`super::weights`] counts weights.

use super::adapters::AdapterWidths;
use super::division::shards;
use super::experts_at::{ExpertsAt, PlacedExperts, wide};
use super::held::largest_mixture;
use super::part::GpuPart;
use super::pass::few_rows;
use super::request::MemoryRequest;
use super::served::served;
use super::session::memory::SessionMemory;
use super::weights::{
    self, BankSizes, TrellisCodes, WeightBytes, bank_sizes, has_sorted_inputs, layer_bytes,
    weight_bytes,
};
use crate::bank::StageSizes;
use crate::mixture::chosen;
use crate::{Gpu, GpuInfo, MOST_WIDE_SEQUENCES, Rank, stacked};
use nq_formats::human_bytes;
use nq_kernels::pages::KvType;
use nq_kernels::{Account, KernelSet};
use nq_model::{Experts, ModelConfig, in_layer, names};
use nq_runtime::interface::{DeviceMemory, DraftedBy, Placed, SessionSpec, Split};
use nq_runtime::weights::Kinds;
use nq_runtime::{Error, Result};

/// The part of the free memory that experts leave to sessions that may grow, or are not asked for yet: a quarter.
const UNASKED: usize = 4;
const FOR_WIDE: usize = 4;
/// Suggested contexts are multiples of this.
const CTX_STEP: usize = 256;
/// Most bits per weight, scales included, of a model of 4-bit weights; for suggestions.
const INT4_BITS: usize = 5;

/// Asks for a session of a model of shape `c`, or of a part of one, on a GPU whose steps take the most sequences. Its
/// weights are not counted yet.
fn request<T>(
    c: &ModelConfig,
    kinds: Kinds<'_>,
    part: Option<GpuPart>,
    spec: &SessionSpec,
    ask: impl FnOnce(MemoryRequest<'_>) -> Result<T>,
) -> Result<T> {
    let info = &GpuInfo {
        multiprocessors: 132,
        shared_memory: 227 << 10,
        ..GpuInfo::default()
    };
    ask(MemoryRequest {
        info,
        together: MOST_WIDE_SEQUENCES,
        config: c,
        kernels: KernelSet::Fused,
        head: &weights::head(&Gpu::dry(info.clone(), Account::gpu()), c, kinds, part)?,
        trellis: TrellisCodes::of_model(c, kinds),
        sorted: has_sorted_inputs(c, kinds, c.num_hidden_layers),
        few_rows: few_rows(c, kinds, c.num_hidden_layers, MOST_WIDE_SEQUENCES),
        part,
        adapters: AdapterWidths::default(),
        stage: None,
        weights: 0,
        session: Some(spec),
        grows: false,
    })
}

/// The [`Planner`](nq_runtime::interface::Planner) of GPUs whose steps take the most sequences.
///
/// # Errors
/// A weight that no kernel serves; a type of keys and values that the device does not support.
pub fn planned(c: &ModelConfig, kinds: Kinds<'_>, spec: &SessionSpec) -> Result<DeviceMemory> {
    let c = &served(c).config(c)?;
    let weights = weight_bytes(c, kinds, None, ExpertsAt::Gpu, None)?.held;
    request(c, kinds, None, spec, |r| {
        MemoryRequest { weights, ..r }.plan()
    })
}

/// Places a model whose matrices are of these kinds, and a session of it, as loading does: on one GPU with as
/// many experts there as its `free` bytes require, and the others in the `host` bytes of the computer's memory if they are
/// quantized, else those of some layers on the CPU; on several GPUs with some of the layers each.
///
/// # Errors
/// [`Error::DeviceMemory`] if it does not fit; [`Error::Unsupported`] for fewer layers than GPUs; errors of
/// [`planned`].
pub fn placed(
    c: &ModelConfig,
    kinds: Kinds<'_>,
    spec: &SessionSpec,
    free: &[usize],
    host: usize,
) -> Result<Placed> {
    let host = host / free.len().max(1);
    let whole = &served(c).config(c)?;
    let all = weight_bytes(whole, kinds, None, ExpertsAt::Gpu, None)?;
    if let [free] = *free {
        let gpu = Gpu::dry(GpuInfo::default(), Account::gpu());
        let experts = |layer| -> Result<usize> {
            let bytes = |at| layer_bytes(&gpu, whole, kinds, layer, at, None);
            Ok(bytes(ExpertsAt::Gpu)?.held - bytes(ExpertsAt::Cpu(layer + 1))?.held)
        };
        // The bytes that go with the experts of the first layers.
        let mut moved = vec![0];
        for layer in (0..c.num_hidden_layers).filter(|_| c.experts.is_some()) {
            moved.push(moved[layer] + experts(layer)?);
        }
        let bank = bank_sizes(whole, kinds)?;
        let bank = bank.as_ref();
        return request(whole, kinds, None, spec, |r| {
            let weights = |at| match at {
                ExpertsAt::Gpu => Ok(all.held),
                ExpertsAt::Cpu(layers) => Ok(all.held - moved[layers]),
                ExpertsAt::Bank { .. } => Ok(weight_bytes(whole, kinds, None, at, None)?.held),
            };
            let split = r.split(None, free, bank, host, weights)?;
            let here = weight_bytes(whole, kinds, None, split.at, None)?;
            let wide = wide(spec).filter(|_| split.is_wide);
            let memory = MemoryRequest {
                weights: split.weights,
                stage: split.stage,
                session: wide.as_ref().or(r.session),
                ..r
            };
            let rooms = split.at.rooms();
            let (host_bytes, host_read) = match (split.at, bank) {
                (ExpertsAt::Bank { whole: layers, .. }, Some(bank)) => {
                    let chosen = chosen_bytes(whole, kinds, all)?;
                    let banks = c.num_hidden_layers - layers;
                    (bank.bytes(layers), chosen / c.num_hidden_layers * banks)
                }
                _ => (all.held - split.weights, all.read - here.read),
            };
            Ok(Placed {
                memory: DeviceMemory {
                    free,
                    ..memory.plan()?
                },
                on_host: split.at.cpu_layers(),
                rooms,
                host_bytes,
                read: all.read - host_read,
                host_read,
            })
        });
    }
    let mut placed = Placed {
        memory: DeviceMemory::default(),
        on_host: 0,
        rooms: None,
        host_bytes: 0,
        read: all.read,
        host_read: 0,
    };
    for (shard, &free) in shards(Split::Layers, c, free)?.iter().zip(free) {
        let first = shard.layers.as_ref().map_or(0, |layers| layers.start);
        let kinds = |name: &str| match names::split_layer(name) {
            Some((layer, rest)) => kinds(&in_layer(first + layer, rest)),
            None => kinds(name),
        };
        let part = Some(GpuPart {
            rank: Rank {
                rank: shard.rank,
                ranks: shard.ranks,
                through_host: false,
                beside: false,
            },
            split: Split::Layers,
        });
        let shape = &shard.config(c)?;
        let bytes = |at| weight_bytes(shape, &kinds, None, at, part);
        let bank = bank_sizes(shape, &kinds)?;
        let (at, memory) = request(shape, &kinds, part, spec, |r| {
            let held = |at| Ok(bytes(at)?.held);
            let PlacedExperts {
                at, weights, stage, ..
            } = r.split(Some(0), free, bank.as_ref(), host, held)?;
            let request = MemoryRequest {
                weights,
                stage,
                ..r
            };
            Ok((at, request.plan()?))
        })?;
        if memory.total() > placed.memory.total() {
            placed.memory = DeviceMemory { free, ..memory };
        }
        if let (ExpertsAt::Bank { rooms, whole }, Some(bank)) = (at, &bank) {
            let chosen = chosen_bytes(shape, &kinds, bytes(ExpertsAt::Gpu)?)?;
            let layers = shape.num_hidden_layers;
            let chosen = chosen / layers * (layers - whole);
            placed.rooms = Some(placed.rooms.map_or(rooms, |fewest| fewest.min(rooms)));
            placed.host_bytes += bank.bytes(whole);
            placed.host_read += chosen;
            placed.read -= chosen;
        }
    }
    Ok(placed)
}

/// Bytes of the experts that a router chooses for a token, of a model of which a token reads `all`.
fn chosen_bytes(c: &ModelConfig, kinds: Kinds<'_>, all: WeightBytes) -> Result<usize> {
    let without = ExpertsAt::Cpu(c.num_hidden_layers);
    let experts = all.read - weight_bytes(c, kinds, None, without, None)?.read;
    // A shared expert is one more, and keeps its room.
    let each = c.experts.map_or(1, |e| chosen(&largest_mixture(&e)));
    Ok(experts / each * c.experts.map_or(0, |e| e.per_token))
}

impl MemoryRequest<'_> {
    /// The memory that the request takes.
    ///
    /// # Errors
    /// A type of keys and values that the device does not support.
    pub(super) fn plan(&self) -> Result<DeviceMemory> {
        let mut plan = DeviceMemory {
            weights: self.weights,
            ..DeviceMemory::default()
        };
        if let Some(spec) = self.session {
            let gpu = Gpu::dry(self.info.clone(), Account::gpu());
            let session = SessionMemory::new(&gpu, self, spec)?;
            plan.kv = session.kv_bytes();
            plan.scratch = gpu.account().held() - plan.kv;
        }
        Ok(plan)
    }

    /// Chooses where experts are. On the GPU, if `free` bytes are enough for all; otherwise in banks with as many
    /// rooms as there is memory for, if the model may have `bank`s, of as many layers as have room in the `host` bytes of
    /// the computer's memory; otherwise those of as few layers as possible run on the CPU, or of as many as are `wanted`.
    /// `weights` tells the bytes of all weights on the device.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if the request does not fit; errors of `weights`.
    pub(super) fn split(
        &self,
        wanted: Option<usize>,
        free: usize,
        bank: Option<&BankSizes>,
        host: usize,
        weights: impl Fn(ExpertsAt) -> Result<usize>,
    ) -> Result<PlacedExperts> {
        // Experts of rows of several streams are on the GPU, all of them.
        let (wanted, bank) = match self.config.hyper {
            Some(_) => (Some(0), None),
            None => (wanted, bank),
        };
        if let (None | Some(0), Some(experts), Some(bank)) = (wanted, self.config.experts, bank) {
            let all = weights(ExpertsAt::Gpu)?;
            let request = MemoryRequest {
                weights: all,
                ..*self
            };
            if request.fits(free) {
                return Ok(PlacedExperts::on_gpu(all));
            }
            // A session that may grow, or that is not asked for yet, takes what is left.
            let least = match self.session {
                Some(_) if !self.grows => 0,
                _ => free / UNASKED,
            };
            let whole = bank.whole(host);
            let bytes = |rooms| weights(ExpertsAt::Bank { rooms, whole });
            let stage = Some(bank.stage);
            let most = |request: &MemoryRequest<'_>| {
                request.most_rooms(&experts, free, least, stage, bytes)
            };
            // What stages of layers hand on has the usual rows.
            let wide = self
                .session
                .and_then(wide)
                .filter(|_| !self.grows && self.part.is_none());
            let rooms = most(self)?;
            let session = wide.as_ref().or(self.session);
            let fewer = match wide {
                Some(_) => most(&MemoryRequest { session, ..*self })?,
                None => 0,
            };
            let is_wide = fewer > 0 && fewer >= rooms - rooms / FOR_WIDE;
            let rooms = if is_wide { fewer } else { rooms };
            if rooms > 0 && whole < bank.layers.len() {
                return Ok(PlacedExperts {
                    at: ExpertsAt::Bank { rooms, whole },
                    weights: bytes(rooms)?,
                    stage,
                    is_wide,
                });
            }
        }
        let least = wanted.unwrap_or(0);
        let most = match (wanted, self.config.experts) {
            (None, Some(_)) => self.config.num_hidden_layers,
            _ => least,
        };
        for on_host in least..=most {
            let at = match on_host {
                0 => ExpertsAt::Gpu,
                layers => ExpertsAt::Cpu(layers),
            };
            let request = MemoryRequest {
                weights: weights(at)?,
                ..*self
            };
            if request.fits(free) {
                return Ok(PlacedExperts {
                    at,
                    ..PlacedExperts::on_gpu(request.weights)
                });
            }
            if on_host == most {
                request.check(free)?;
            }
        }
        unreachable!("the last request either fits or is refused")
    }

    /// The most rooms of each layer that fit `free` bytes beside the session and its stages, which get `least` bytes or more;
    /// or 0. `weights` tells the bytes of all weights with so many.
    fn most_rooms(
        &self,
        experts: &Experts,
        free: usize,
        least: usize,
        stage: Option<StageSizes>,
        weights: impl Fn(usize) -> Result<usize>,
    ) -> Result<usize> {
        // `low` do or are none, `high` do not.
        let (mut low, mut high) = (0, stacked(experts));
        while high - low > 1 {
            let rooms = low.midpoint(high);
            let request = MemoryRequest {
                weights: weights(rooms)?,
                stage,
                ..*self
            };
            let fits = request.plan()?.total().max(request.weights + least) <= free;
            match fits {
                true => low = rooms,
                false => high = rooms,
            }
        }
        Ok(low)
    }

    fn fits(&self, free: usize) -> bool {
        self.plan().is_ok_and(|plan| plan.total() <= free)
    }

    /// Refuses a request that does not fit `free` bytes; the error says what it takes, what is free
    /// and what would fit.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`]; errors of [`MemoryRequest::plan`].
    pub(super) fn check(&self, free: usize) -> Result<()> {
        let plan = self.plan()?;
        if plan.total() <= free {
            return Ok(());
        }
        let human = |bytes: usize| human_bytes(bytes as u64);
        let mut parts = Vec::new();
        if plan.weights > 0 {
            parts.push(format!("{} of weights", human(plan.weights)));
        }
        if let Some(spec) = self.session {
            let sequences = match spec.slots {
                1 => String::new(),
                n => format!(" of {n} sequences"),
            };
            parts.push(format!(
                "{} for a context of {} tokens{sequences}",
                human(plan.kv),
                spec.ctx
            ));
            parts.push(format!("{} of activations", human(plan.scratch)));
        }
        Err(Error::DeviceMemory {
            needed: plan.total() as u64,
            parts: parts.join(", "),
            free: free as u64,
            help: self.help(free),
        })
    }

    /// Requests that would fit `free` bytes.
    fn help(&self, free: usize) -> String {
        let mut ways = Vec::new();
        if let Some(spec) = self.session {
            let longest = self.longest(spec, spec.kv, free);
            ways.extend(longest.map(|ctx| format!("a context of {ctx} tokens (--ctx)")));
            let narrow = (spec.kv != KvType::Int8).then(|| self.longest(spec, KvType::Int8, free));
            match narrow.flatten() {
                Some(ctx) if ctx == spec.ctx => ways.push("INT8 keys and values (--kv 8)".into()),
                Some(ctx) if Some(ctx) > longest => ways.push(format!(
                    "INT8 keys and values and a context of {ctx} tokens (--kv 8 --ctx)"
                )),
                _ => {}
            }
            let without = SessionSpec {
                drafts: DraftedBy::Nothing,
                ..*spec
            };
            let without = MemoryRequest {
                session: Some(&without),
                ..*self
            };
            if spec.drafts != DraftedBy::Nothing && without.fits(free) {
                ways.push("no drafts (--draft none)".into());
            }
        }
        let four = MemoryRequest {
            weights: self.config.parameters() / 8 * INT4_BITS,
            ..*self
        };
        if four.weights < self.weights && four.fits(free) {
            ways.push("4-bit weights (`nq quantize`, or --bits 4)".into());
        }
        ways.push("the CPU (--device cpu)".into());
        ways.join(", or ")
    }

    /// The longest context, up to the one requested, that fits `free` bytes with keys and values of
    /// type `kv`; `None` if not even a short one does.
    fn longest(&self, spec: &SessionSpec, kv: KvType, free: usize) -> Option<usize> {
        let fits = |ctx: usize| {
            let spec = SessionSpec {
                ctx,
                kv,
                max_rows: spec.max_rows.min(ctx),
                ..*spec
            };
            let shorter = MemoryRequest {
                session: Some(&spec),
                ..*self
            };
            shorter.fits(free)
        };
        if fits(spec.ctx) {
            return Some(spec.ctx);
        }
        // In units of `CTX_STEP`: `low` fits or is 0; `high` does not fit.
        let (mut low, mut high) = (0, spec.ctx.div_ceil(CTX_STEP));
        while high - low > 1 {
            let middle = low.midpoint(high);
            if fits(middle * CTX_STEP) {
                low = middle
            } else {
                high = middle
            }
        }
        (low > 0).then_some(low * CTX_STEP)
    }
}

#[cfg(test)]
mod tests;
