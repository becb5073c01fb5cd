//! The CPU memory that a model and its sessions will take, before any of it is allocated: the steps of
//! loading and running, on an account.

use super::session_bytes;
use crate::Linear;
use nq_formats::{Checkpoint, Files};
use nq_kernels::{Account, Held};
use nq_model::ModelConfig;
use nq_model::names::{self, EMBEDDING};
use nq_runtime::Result;
use nq_runtime::interface::SessionSpec;
use nq_runtime::weights::{Kinds, weight_kinds};

/// The smallest unit of memory that is mapped, in bytes.
const PAGE: usize = 4096;

/// Most distinct tokens of a text: longer texts repeat theirs.
const DISTINCT: usize = 8192;

/// The resident program, its threads, and a tokenizer of a few thousand tokens.
const BASE: u64 = 22 << 20;

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
    let (head, dims) = (kinds(names::head(c)), (c.vocab_size, c.hidden_size));
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
    for layer in 0..c.num_hidden_layers {
        let spec = c.layer(layer);
        let linears = spec.matrices();
        let linears = linears.map(|l| (kinds(&l.name(layer)), l.dims(c)));
        let linears: Vec<_> = linears.collect();
        let read = linears.iter().map(|(kind, dims)| kind.bytes(*dims)).sum();
        let _read = account.hold(read);
        linears
            .into_iter()
            .for_each(|(kind, dims)| held.add(Linear::bytes_of(kind, dims)));
        let norms = spec.norms().into_iter().map(|n| n.len.of(c));
        let others = spec.vectors().into_iter().map(|v| v.len.of(c));
        let biases = spec.biased().map(|l| l.dims(c).0);
        (norms.chain(biases).chain(others)).for_each(|n| held.add(size_of::<f32>() * n));
    }
    held.add(size_of::<f32>() * c.hidden_size);
    held
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

/// Bytes of keys and values, and of the states of recurrences, of a session on the CPU.
pub fn kv_bytes(c: &ModelConfig, spec: &SessionSpec) -> usize {
    session_bytes(c, spec).0
}

/// Memory for running a model, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running {
    /// Peak resident memory of the process, including loading, once the context is full.
    pub peak: u64,
    /// The part of it for keys and values. They take memory as the context fills.
    pub kv: u64,
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
    let run = |kinds: Kinds<'_>, source| {
        let account = Account::host();
        let _model = hold_model(&account, c, kinds, source, spec.slots * spec.ctx);
        let _session = hold_session(&account, c, spec, 1);
        account.peak() as u64
    };
    let peak = match at_load {
        Some(kinds) => run(kinds, WeightSource::Made),
        None => {
            let kinds = weight_kinds(c, checkpoint.store())?;
            run(&|name| kinds[name], WeightSource::Mapped)
        }
    };
    let (program, mapped) = program_bytes(checkpoint);
    Ok(Running {
        peak: program + mapped + peak,
        kv: kv_bytes(c, spec) as u64,
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
