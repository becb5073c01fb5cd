//! The CPU memory that a model and its sessions will take, before any of it is allocated: the steps of
//! loading and running, on an account.

use super::session_bytes;
use super::tower::Scratch;
use crate::Linear;
use nq_formats::synth::LARGE;
use nq_formats::{Checkpoint, Files};
use nq_kernels::registry::WeightKind;
use nq_kernels::{Account, Held};
use nq_model::names::{self, EMBEDDING};
use nq_model::vision::POSITIONS;
use nq_model::{Dims, LinearSpec, ModelConfig, Shape};
use nq_runtime::Result;
use nq_runtime::interface::{DeviceMemory, SessionSpec};
use nq_runtime::stacks::Stacks;
use nq_runtime::weights::{Kinds, weight_kinds};
use std::collections::BTreeMap;

/// The smallest unit of memory that is mapped, in bytes.
const PAGE: usize = 4096;

/// Most distinct tokens of a text: longer texts repeat theirs.
const DISTINCT: usize = 8192;

/// The resident program, its threads, and a tokenizer of a few thousand tokens.
pub const BASE: u64 = 22 << 20;

/// Memory of a tokenizer, in bytes per byte of its file.
const TOKENIZER: u64 = 9;

/// Where weights come from when a model is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightSource {
    /// Views of mapped files: parts not read take no memory, parts read are given back.
    Mapped,
    /// Made in memory: quantized or drawn at random while loading.
    Made,
}

/// Counts on `account` the steps of loading a model, and returns the memory that stays held. A weight
/// is held as read while it is packed: the head first, then layer by layer. Texts of up to `tokens`
/// tokens will be looked up.
pub fn hold_model(
    account: &Account,
    c: &ModelConfig,
    kinds: Kinds<'_>,
    source: WeightSource,
    tokens: usize,
) -> Held {
    let (head, dims) = (
        kinds(names::head(c)),
        Dims::new(c.vocab_size, c.hidden_size),
    );
    let read = account.hold(head.bytes(dims));
    let mut held = account.hold(Linear::bytes_of(head, dims));
    drop(read);
    if !c.tie_word_embeddings {
        let embedding = kinds(EMBEDDING).bytes(dims);
        // Pages of rows that were looked up stay mapped.
        let row = (embedding / c.vocab_size).max(PAGE);
        held.add(match source {
            WeightSource::Made => embedding,
            WeightSource::Mapped => embedding.min(row * DISTINCT.min(tokens)),
        });
    }
    for (i, (name, dims)) in nq_runtime::ngrams::parts(c).enumerate() {
        let part = kinds(&name).bytes(dims);
        // Each token reads a row of the table for each of its n-grams, which lie anywhere among its parts.
        let (heads, parts) = c.ngrams.as_ref().map_or((0, 1), |n| (n.heads(), n.parts));
        held.add(match source {
            // Random ones are drawn once for all parts.
            WeightSource::Made if i > 0 && dims.elements() >= LARGE => 0,
            WeightSource::Made => part,
            WeightSource::Mapped => part.min((PAGE * heads * tokens).div_ceil(parts)),
        });
    }
    for layer in 0..c.num_hidden_layers {
        let spec = c.layer(layer);
        let kind = |l: &LinearSpec| kinds(&l.name(layer));
        let read = spec.matrices().map(|l| kind(l).bytes(l.dims(c))).sum();
        let _read = account.hold(read);
        held.add(packed_bytes(c, kinds, layer));
        let norms = spec.norms().into_iter().map(|n| n.len.of(c));
        let others = spec.vectors().into_iter().map(|v| v.len.of(c));
        let biases = spec.biased().map(|l| l.dims(c).rows);
        (norms.chain(biases).chain(others)).for_each(|n| held.add(size_of::<f32>() * n));
    }
    held.add(ending_bytes(c, kinds));
    held
}

/// Bytes of the packed weights of a layer.
fn packed_bytes(c: &ModelConfig, kinds: Kinds<'_>, layer: usize) -> usize {
    let spec = c.layer(layer);
    let products = spec.kept_products().into_iter().chain(spec.products());
    let stacks = products.flat_map(|product| Stacks::apart(spec).of_product(product));
    let bytes = stacks.map(|stack| {
        let kind = stack.kind(|l| kinds(&l.name(layer)));
        stack.copies(c) * Linear::bytes_of(kind, stack.copy_dims(c))
    });
    bytes.sum()
}

/// Bytes of what stands between the last layer and the head.
fn ending_bytes(c: &ModelConfig, kinds: Kinds<'_>) -> usize {
    let bytes = |(name, shape): (String, Shape)| match shape {
        Shape::Vector(len) => size_of::<f32>() * len,
        Shape::Matrix(rows, cols) => Linear::bytes_of(kinds(&name), Dims::new(rows, cols)),
    };
    names::end_parameters(c).map(bytes).sum()
}

/// Bytes of weights of these kinds that one token reads, as [`Engine::bytes_per_token`](nq_runtime::Engine::bytes_per_token)
/// of the loaded model: of experts, the chosen ones.
pub fn bytes_per_token(c: &ModelConfig, kinds: Kinds<'_>) -> usize {
    let chosen = c.experts.map_or(1, |e| e.per_token);
    let layer = |layer: usize| {
        let spec = c.layer(layer);
        let product = |product| -> usize {
            let stacks = Stacks::apart(spec).of_product(product).into_iter();
            let bytes = stacks.map(|stack| {
                let kind = stack.kind(|l| kinds(&l.name(layer)));
                let read = stack.copies(c).min(chosen);
                read * Linear::bytes_of(kind, stack.copy_dims(c))
            });
            bytes.sum()
        };
        let products = spec.kept_products().into_iter().chain(spec.products());
        let norms = spec.norms().into_iter().map(|n| n.len.of(c));
        let others = spec.vectors().into_iter().map(|v| v.len.of(c));
        let biases = spec.biased().map(|l| l.dims(c).rows);
        let values: usize = norms.chain(biases).chain(others).sum();
        products.map(product).sum::<usize>() + size_of::<f32>() * values
    };
    let dims = Dims::new(c.vocab_size, c.hidden_size);
    let head = Linear::bytes_of(kinds(names::head(c)), dims);
    let layers = (0..c.num_hidden_layers).map(layer);
    layers.sum::<usize>() + ending_bytes(c, kinds) + head
}

/// The [`Planner`](nq_runtime::interface::Planner) of CPUs, of weights in mapped files.
///
/// # Errors
/// None.
pub fn planned(c: &ModelConfig, kinds: Kinds<'_>, spec: &SessionSpec) -> Result<DeviceMemory> {
    let account = Account::host();
    let tokens = spec.slots * spec.ctx;
    let _model = hold_model(&account, c, kinds, WeightSource::Mapped, tokens);
    let (kv, scratch) = session_bytes(c, spec);
    Ok(DeviceMemory {
        weights: account.held(),
        kv,
        scratch,
        free: 0,
        on_host: true,
    })
}

/// Counts on `account` a session whose sequences are filled to the last position, and which
/// is asked for the logits of up to `logits_rows` rows at once.
pub fn hold_session(
    account: &Account,
    c: &ModelConfig,
    spec: &SessionSpec,
    logits_rows: usize,
) -> Held {
    let (kv, scratch) = session_bytes(c, spec);
    let logits = size_of::<f32>() * logits_rows * (c.vocab_size + c.hidden_size);
    account.hold(kv + scratch + logits)
}

/// Most bytes held while a model of shape `c`, whose weights are of these kinds, is loaded and run in sessions of `spec`, which
/// ask for the logits of one row at a time; besides the program.
pub fn peak(c: &ModelConfig, kinds: Kinds<'_>, source: WeightSource, spec: &SessionSpec) -> u64 {
    let account = Account::host();
    let _model = hold_model(&account, c, kinds, source, spec.slots * spec.ctx);
    let _session = hold_session(&account, c, spec, 1);
    account.peak() as u64
}

/// Memory for running a model, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running {
    /// Peak resident memory of the process, including loading, once the context is full.
    pub peak: u64,
    /// The part of it for keys and values. They take memory as the context fills.
    pub kv: u64,
    /// The part of it for weights of layers, which lie in a file if there is no room for them.
    pub layers: u64,
}

/// Memory of a process that loads `checkpoint`, whose weights are made of the kinds `at_load` if these are given, and
/// runs it on the CPU in sessions of `spec`, which ask for the logits of one row at a time.
/// Reads the kind of every weight, which means unpacking weights in other tools' formats.
///
/// # Errors
/// A missing or misshapen tensor.
pub fn running(
    checkpoint: &Checkpoint,
    at_load: Option<Kinds<'_>>,
    spec: &SessionSpec,
) -> Result<Running> {
    let c = checkpoint.config();
    let stored = match at_load {
        Some(_) => BTreeMap::new(),
        None => weight_kinds(c, checkpoint.store(), false)?,
    };
    let (kinds, source): (Kinds<'_>, _) = match at_load {
        Some(kinds) => (kinds, WeightSource::Made),
        None => (&|name| stored[name], WeightSource::Mapped),
    };
    let packed = (0..c.num_hidden_layers).map(|layer| packed_bytes(c, kinds, layer) as u64);
    let peak = peak(c, kinds, source, spec);
    let (program, mapped) = program_bytes(checkpoint);
    Ok(Running {
        peak: program + mapped + peak,
        kv: session_bytes(c, spec).0 as u64,
        layers: packed.sum(),
    })
}

/// Memory that every process using `checkpoint` takes: the program and the tokenizer; and the
/// files, if they are built into the program.
pub fn program_bytes(checkpoint: &Checkpoint) -> (u64, u64) {
    let mapped = match checkpoint.files() {
        Files::Embedded { files, .. } => files.iter().map(|f| f.1.len() as u64).sum(),
        _ => 0,
    };
    let tokenizer = match checkpoint
        .files()
        .get(nq_runtime::tokenizer::TOKENIZER_FILE)
    {
        Ok(Some(json)) => TOKENIZER * json.len() as u64,
        _ => 0,
    };
    (BASE + tokenizer, mapped)
}

/// Memory that seeing images takes beside a text model, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TowerBytes {
    /// The tower's weights.
    pub weights: u64,
    /// An image while it is encoded: its patches, what they go through, and the rows that become of them.
    pub encoding: u64,
}

/// Memory of the tower of `checkpoint`, if it has one, and of an image of as many as `tokens` tokens.
///
/// # Errors
/// A missing or misshapen tensor.
pub fn tower(checkpoint: &Checkpoint, tokens: u64) -> Result<Option<TowerBytes>> {
    let Some(c) = checkpoint.vision() else {
        return Ok(None);
    };
    let mut weights = 0;
    for parameter in c.parameters() {
        weights += match parameter.shape {
            Shape::Vector(n) => size_of::<f32>() * n,
            Shape::Matrix(out, inputs) => {
                let dims = Dims::new(out, inputs);
                let kind = WeightKind::of(&checkpoint.store().matrix(&parameter.name, dims)?);
                match parameter.name == POSITIONS {
                    true => kind.bytes(dims), // rows of it are read, as of an embedding
                    false => Linear::bytes_of(kind, dims),
                }
            }
        };
    }
    let tokens = tokens.min(c.most_tokens()) as usize;
    let patches = tokens * c.merged();
    let rows = tokens * (1 + c.deepstack.len());
    let values = patches * c.patch_values() + rows * c.out_hidden_size;
    let encoding = Scratch::bytes(c, patches) + size_of::<f32>() * values;
    Ok(Some(TowerBytes {
        weights: weights as u64,
        encoding: encoding as u64,
    }))
}

#[cfg(test)]
mod tests {
    use super::{PAGE, WeightSource, hold_model};
    use nq_kernels::Account;
    use nq_kernels::registry::WeightKind;
    use nq_model::{DType, Preset};

    /// A token adds a page for each of its n-grams, however many parts its table has, and a row of the embedding.
    #[test]
    fn a_token_reads_as_many_pages_of_a_table_as_it_has_n_grams() {
        let config = Preset::find("qwen3.8-flash-next").unwrap().config();
        let kinds = |_: &str| WeightKind::Dense(DType::BF16);
        let held = |tokens| {
            let account = Account::host();
            hold_model(&account, &config, &kinds, WeightSource::Mapped, tokens).bytes()
        };
        let row = 2 * config.hidden_size;
        let added = held(4096) - held(0);
        assert_eq!(added, 4096 * (16 * PAGE + row.max(PAGE)));
    }
}
