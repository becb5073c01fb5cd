//! The choice of a drafter for speculative decoding: `--draft`.

use crate::at_load::{self, at_load};
use crate::library::{Error, Result};
use crate::names;
use nq_formats::eagle::EagleHead;
use nq_formats::{Bits, Checkpoint, Progress, human_bytes};
use nq_load::{Drafts, StreamDrafts};
use nq_model::names::HEAD;
use nq_model::{ModelConfig, mtp};
use nq_quantize::schemes::Schemes;
use nq_quantize::{OnTheFly, draft_head, draft_head_bytes};
use nq_runtime::speculation::check_drafts;
use nq_runtime::{DraftLayer, DraftedBy, LoadOptions, Session, SessionSpec, Tokenizer};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where drafts come from: what `--draft` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraftFrom {
    /// No drafts.
    None,
    /// Prompt lookup.
    Ngram,
    /// A smaller model, by name.
    Model(OsString),
    /// An EAGLE-3 head, by its folder.
    Eagle3(PathBuf),
    /// The model's own MTP layer.
    Mtp,
}

impl DraftFrom {
    /// True if the drafter has weights of its own.
    pub fn has_weights(&self) -> bool {
        !matches!(self, DraftFrom::None | DraftFrom::Ngram)
    }
}

/// The schemes of an EAGLE-3 head: its drafts are checked, and speed is all that they are for.
fn eagle_schemes() -> Schemes {
    let mut schemes = Schemes::defaults(Bits::B4);
    schemes.overrides.insert(HEAD.into(), schemes.linears);
    schemes
}

/// What drafts for sessions whose drafter is `from`, or `weights` if it has any.
pub(crate) fn drafted_by(from: Option<&DraftFrom>, weights: Option<&DraftWeights>) -> DraftedBy {
    match (from, weights) {
        (_, Some(weights)) => weights.drafted_by(),
        (None | Some(DraftFrom::None), None) => DraftedBy::Nothing,
        (Some(_), None) => DraftedBy::Tokens,
    }
}

/// What errors call an EAGLE-3 head.
fn eagle(folder: &Path) -> String {
    format!("--draft eagle3:{}", folder.display())
}

impl FromStr for DraftFrom {
    type Err = String;

    /// Parses `none`, `ngram`, `mtp`, a model or `eagle3:FOLDER`.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "" => Err("expected none, ngram, mtp, a model or eagle3:FOLDER".into()),
            "none" => Ok(DraftFrom::None),
            "ngram" => Ok(DraftFrom::Ngram),
            "mtp" => Ok(DraftFrom::Mtp),
            "eagle3:" => Err("expected a folder behind eagle3:".into()),
            other => Ok(match other.strip_prefix("eagle3:") {
                Some(folder) => DraftFrom::Eagle3(folder.into()),
                None => DraftFrom::Model(other.into()),
            }),
        }
    }
}

/// The drafter with weights that `checkpoint` has of its own and is used unless something else is asked for.
///
/// # Errors
/// An absent device.
pub(crate) fn by_default(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
) -> Result<Option<DraftWeights>> {
    Ok(match Drafts::by_own_layer(checkpoint, options)? {
        true => DraftWeights::mtp(checkpoint),
        false => None,
    })
}

/// A draft model that is not loaded yet.
pub(crate) struct DraftCheckpoint {
    pub name: String,
    pub checkpoint: Checkpoint,
    pub schemes: Option<Schemes>,
}

impl DraftCheckpoint {
    /// Opens the draft model for `target`. If it is unquantized, `bits` apply to it as to the target.
    ///
    /// # Errors
    /// If the model cannot be opened, or its tokenizer differs from the target's.
    pub fn open(
        name: &OsString,
        target: &Checkpoint,
        bits: Option<u32>,
        offline: bool,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let model = names::find(name, offline, progress)?;
        names::note_left_over(&model, progress);
        let (checkpoint, schemes) = at_load(model.checkpoint, bits, progress)?;
        let tokenizer = Tokenizer::from_files(checkpoint.files())?;
        tokenizer.check_vocab(checkpoint.config().vocab_size)?;
        Tokenizer::from_files(target.files())?
            .check_same(&tokenizer)
            .map_err(|e| {
                Error::from(e).within(format!("--draft {}: its vocabulary differs", model.name))
            })?;
        Ok(DraftCheckpoint {
            name: model.name,
            checkpoint,
            schemes,
        })
    }

    /// Loads it on the device of its target.
    pub fn load(
        &self,
        options: &LoadOptions,
        target_vocab: usize,
        progress: &dyn Progress,
    ) -> Result<Drafts> {
        let (config, store) = (self.checkpoint.config(), self.checkpoint.store());
        let options = LoadOptions {
            session: None,
            ..*options
        };
        let engine = nq_load::load(config, store, &options, progress)
            .map_err(|e| Error::from(e).within(format!("--draft {}", self.name)))?;
        Ok(Drafts::Model {
            vocab: target_vocab.min(config.vocab_size),
            ctx: config.longest_context(),
            engine,
        })
    }
}

/// A drafter with weights of its own that is not loaded yet.
pub(crate) enum DraftWeights {
    /// A draft model.
    Model(Box<DraftCheckpoint>),
    /// An EAGLE-3 head.
    Eagle3 {
        folder: PathBuf,
        head: Box<EagleHead>,
    },
    /// The target's own MTP layer.
    Mtp {
        layer: DraftLayer,
        /// Bytes of its weights in the files.
        stored: u64,
    },
}

impl DraftWeights {
    /// Opens it for `target`; `None` if `from` has no weights. If a draft model is unquantized, `bits` apply to it
    /// as to the target; a head is rounded to 4 bits.
    ///
    /// # Errors
    /// If it cannot be opened, or was not made for such a target.
    pub fn open(
        from: &DraftFrom,
        target: &Checkpoint,
        bits: Option<u32>,
        offline: bool,
        progress: &dyn Progress,
    ) -> Result<Option<Self>> {
        Ok(match from {
            DraftFrom::None | DraftFrom::Ngram => None,
            DraftFrom::Mtp => {
                let own = DraftWeights::mtp(target).ok_or_else(|| {
                    let title = target.config().architecture.title;
                    Error::unsuited(format!(
                        "--draft mtp: expected a model with an MTP layer, found {title} without one"
                    ))
                })?;
                Some(own)
            }
            DraftFrom::Model(name) => {
                let draft = DraftCheckpoint::open(name, target, bits, offline, progress)?;
                Some(DraftWeights::Model(Box::new(draft)))
            }
            DraftFrom::Eagle3(folder) => {
                let open = || {
                    let head = EagleHead::open(folder)?;
                    head.check_model(target.config())?;
                    Ok::<_, nq_formats::Error>(head)
                };
                let head = open().map_err(|e| Error::from(e).within(eagle(folder)))?;
                let head = head.wrapped(|store| Box::new(OnTheFly::new(store, eagle_schemes())));
                Some(DraftWeights::Eagle3 {
                    head: Box::new(head),
                    folder: folder.clone(),
                })
            }
        })
    }

    /// The MTP layer of `target`; `None` without one.
    fn mtp(target: &Checkpoint) -> Option<Self> {
        let entries = target.store().entries().into_iter();
        let own = entries.filter(|e| mtp::is_of_layer(&e.name, target.config()));
        DraftLayer::mtp(target.config()).map(|layer| DraftWeights::Mtp {
            stored: own.map(|e| e.bytes).sum(),
            layer,
        })
    }

    /// Its name on the command line.
    pub fn named(&self) -> DraftFrom {
        match self {
            DraftWeights::Model(draft) => DraftFrom::Model(draft.name.clone().into()),
            DraftWeights::Eagle3 { folder, .. } => DraftFrom::Eagle3(folder.clone()),
            DraftWeights::Mtp { .. } => DraftFrom::Mtp,
        }
    }

    /// What drafts for sessions of its target.
    pub(crate) fn drafted_by(&self) -> DraftedBy {
        match self {
            DraftWeights::Model(_) => DraftedBy::Tokens,
            DraftWeights::Eagle3 { head, .. } => DraftedBy::Layer(DraftLayer::eagle3(&head.config)),
            DraftWeights::Mtp { layer, .. } => DraftedBy::Layer(*layer),
        }
    }

    /// Loads it on the device of its target.
    pub fn load(
        &self,
        options: &LoadOptions,
        target: &Checkpoint,
        progress: &dyn Progress,
    ) -> Result<Drafts> {
        let (config, store) = (target.config(), target.store());
        match self {
            DraftWeights::Model(draft) => draft.load(options, config.vocab_size, progress),
            DraftWeights::Eagle3 { folder, head } => {
                let loaded = StreamDrafts::eagle(head, config, store, options);
                let named = |e| Error::from(e).within(eagle(folder));
                Ok(Drafts::Layer(loaded.map_err(named)?))
            }
            DraftWeights::Mtp { .. } => {
                let load = || {
                    let head = draft_head(target)?;
                    Ok(StreamDrafts::mtp(config, store, head.as_ref(), options)?)
                };
                let loaded = load().map_err(|e: Error| e.within("--draft mtp"))?;
                Ok(Drafts::Layer(loaded))
            }
        }
    }

    /// The CPU memory that it needs in addition to its `target` and a session of that, which is of `spec`, as text and in
    /// bytes.
    pub(crate) fn memory(&self, target: &ModelConfig, spec: &SessionSpec) -> Result<(String, u64)> {
        let (what, bytes) = match self {
            DraftWeights::Model(draft) => return memory_of(draft, spec),
            // Codes of 4 bits, and for each 64 of them a scale of 16 and a zero point of 4.
            DraftWeights::Eagle3 { folder, head } => (
                format!("EAGLE-3 head {}", folder.display()),
                head.config.elements() / 128 * 69,
            ),
            DraftWeights::Mtp { stored, .. } => {
                let head = draft_head_bytes(target) as u64;
                (
                    "MTP layer and the head that it drafts with".into(),
                    stored + head,
                )
            }
        };
        Ok((format!("{} for the {what}", human_bytes(bytes)), bytes))
    }
}

/// The drafter for a model's sessions: `loaded`, if it has weights, or prompt lookup. Unless one is requested by `from`, there is
/// one only if answers with drafts are the same as without. If a drafter was requested and answers may differ, `progress` gets
/// a note.
///
/// # Errors
/// If a drafter was requested and the device cannot check drafts.
pub(crate) fn drafts(
    from: Option<&DraftFrom>,
    session: &dyn Session,
    device: &str,
    progress: &dyn Progress,
    loaded: Option<Drafts>,
) -> Result<Option<Drafts>> {
    Ok(match from {
        None => Drafts::unasked(session, loaded),
        Some(DraftFrom::None) => None,
        Some(_) => {
            let inexact = check_drafts(session, device);
            let inexact = inexact.map_err(|e| Error::from(e).within("--draft"))?;
            inexact.iter().for_each(|note| progress.note(note));
            Some(loaded.unwrap_or(Drafts::Ngram))
        }
    })
}

/// The CPU memory that a draft model needs in addition to its target's, as text and in bytes.
fn memory_of(draft: &DraftCheckpoint, spec: &SessionSpec) -> Result<(String, u64)> {
    let spec = spec.of_draft_model(draft.checkpoint.config().longest_context());
    let memory = at_load::memory(&draft.checkpoint, draft.schemes.as_ref(), &spec)?;
    let words = format!(
        "{} for the draft model {}, {} of which are for its context",
        human_bytes(memory.peak),
        draft.name,
        human_bytes(memory.kv)
    );
    Ok((words, memory.peak))
}
