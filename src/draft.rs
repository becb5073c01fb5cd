//! `--draft`: where tokens come from that a model then checks several at a time.

use crate::cli::Global;
use crate::commands::chat::{at_load, longest_context};
use crate::model;
use crate::terminal::human_bytes;
use anyhow::Context;
use nq_formats::{Checkpoint, Progress};
use nq_quantize::schemes::Schemes;
use nq_runtime::speculation::check_drafts;
use nq_runtime::{DraftModel, Engine, LoadOptions, Session, SessionSpec, Speculation, Tokenizer};
use std::ffi::OsString;
use std::sync::Arc;

/// The value of `--draft`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraftFrom {
    /// Nowhere.
    None,
    /// The text so far.
    Ngram,
    /// A smaller model.
    Model(OsString),
}

/// Reads the value of `--draft`.
pub fn parse_draft(text: &str) -> Result<DraftFrom, String> {
    match text {
        "" => Err("expected none, ngram or a model".into()),
        "none" => Ok(DraftFrom::None),
        "ngram" => Ok(DraftFrom::Ngram),
        model => Ok(DraftFrom::Model(model.into())),
    }
}

/// A model that drafts, before it is loaded.
pub struct DraftCheckpoint {
    pub name: String,
    pub checkpoint: Checkpoint,
    pub schemes: Option<Schemes>,
}

impl DraftCheckpoint {
    /// Opens the model that drafts for `target`, quantized at load as that is.
    ///
    /// # Errors
    /// Its own; a tokenizer with other tokens than the target's.
    pub fn open(
        name: &OsString,
        target: &Checkpoint,
        bits: Option<u32>,
        global: &Global,
        progress: &dyn Progress,
    ) -> anyhow::Result<Self> {
        let model = model::open(Some(name), global, progress)?;
        let (checkpoint, schemes) = at_load(model.checkpoint, bits, progress)?;
        let tokenizer = Tokenizer::from_files(checkpoint.files())?;
        tokenizer.check_vocab(checkpoint.config().vocab_size)?;
        Tokenizer::from_files(target.files())?
            .check_same(&tokenizer)
            .with_context(|| format!("--draft {}: it has another vocabulary", model.name))?;
        Ok(DraftCheckpoint {
            name: model.name,
            checkpoint,
            schemes,
        })
    }

    /// The session that drafts for one of `spec`: as many slots and pages, and a context no longer than
    /// the model was trained for.
    pub fn spec(&self, spec: &SessionSpec) -> SessionSpec {
        SessionSpec {
            ctx: spec.ctx.min(longest_context(self.checkpoint.config())),
            ..*spec
        }
    }

    /// Bytes of keys and values of a session that drafts for one of `spec`, on a CPU.
    pub fn kv_bytes(&self, spec: &SessionSpec) -> u64 {
        nq_runtime::kv_bytes(self.checkpoint.config(), &self.spec(spec)) as u64
    }

    /// Loads it where its target runs.
    ///
    /// # Errors
    /// Those of loading.
    pub fn load(
        &self,
        options: &LoadOptions,
        target_vocab: usize,
        progress: &dyn Progress,
    ) -> anyhow::Result<Drafts> {
        let (config, store) = (self.checkpoint.config(), self.checkpoint.store());
        let options = LoadOptions {
            session: None,
            ..*options
        };
        let engine = nq_runtime::load(config, store, &options, progress)
            .with_context(|| format!("--draft {}", self.name))?;
        Ok(Drafts::Model {
            vocab: target_vocab.min(config.vocab_size),
            ctx: longest_context(config),
            engine,
        })
    }
}

/// What drafts, loaded.
#[derive(Clone)]
pub enum Drafts {
    /// The text itself.
    Ngram,
    /// A model.
    Model {
        engine: Arc<dyn Engine>,
        /// Tokens that it has in common with its target.
        vocab: usize,
        /// The longest context that it was trained for.
        ctx: usize,
    },
}

impl Drafts {
    /// Drafts for sessions of `spec`.
    ///
    /// # Errors
    /// If there is no room for a session.
    pub fn speculation(&self, spec: &SessionSpec) -> nq_runtime::Result<Speculation> {
        match self {
            Drafts::Ngram => Ok(Speculation::ngram()),
            Drafts::Model { engine, vocab, ctx } => {
                let spec = SessionSpec {
                    ctx: spec.ctx.min(*ctx),
                    ..*spec
                };
                let model = DraftModel::new(engine.session(spec)?, *vocab);
                Ok(Speculation::new(Box::new(model)))
            }
        }
    }
}

/// What drafts for the sessions of a model; by default the text itself, where answers with drafts are
/// those without. Elsewhere `progress` is told that they may differ. `open` makes the model of that name.
///
/// # Errors
/// If it is asked for where drafts cannot be checked; those of `open`.
pub fn drafts(
    from: Option<&DraftFrom>,
    session: &dyn Session,
    device: &str,
    progress: &dyn Progress,
    open: impl FnOnce(&OsString) -> anyhow::Result<Drafts>,
) -> anyhow::Result<Option<Drafts>> {
    let named = || {
        let inexact = check_drafts(session, device).context("--draft")?;
        inexact.iter().for_each(|note| progress.note(note));
        anyhow::Ok(())
    };
    Ok(match from {
        None => {
            let exact = session.exact_rows() > 1 && session.exact_rows() >= session.draft_rows();
            exact.then_some(Drafts::Ngram)
        }
        Some(DraftFrom::None) => None,
        Some(DraftFrom::Ngram) => {
            named()?;
            Some(Drafts::Ngram)
        }
        Some(DraftFrom::Model(name)) => {
            named()?;
            Some(open(name)?)
        }
    })
}

/// What a draft takes of the CPU's memory beside its target, in words and bytes.
///
/// # Errors
/// Those of its weights.
pub fn memory_of(draft: &DraftCheckpoint, spec: &SessionSpec) -> anyhow::Result<(String, u64)> {
    let spec = draft.spec(spec);
    let memory = nq_quantize::memory::running(&draft.checkpoint, draft.schemes.as_ref(), &spec)?;
    let words = format!(
        "{} for the draft {}, {} of it for its context",
        human_bytes(memory.peak),
        draft.name,
        human_bytes(memory.kv)
    );
    Ok((words, memory.peak))
}
