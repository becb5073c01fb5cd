//! LoRA and DoRA adapters (Hu et al., arXiv 2106.09685; Liu et al., arXiv 2402.09353) in PEFT's folders and in
//! GGUF files, merged into a model's weights as they are read, or beside them ([`Lora`]).
//!
//! An adapter holds, for some matrices `W`, `A` `[rank, in]` and `B` `[out, rank]`. The merged weight is
//! `W + scale B A`; with a magnitude `m` `[out]` (DoRA) its rows are brought to the lengths `m`. It may also hold
//! whole parameters, or some rows of the embedding, which take the place of the model's.
//!
//! What an adapter holds is named, divided and ordered as the weights of its own kind of file are. It goes
//! through the stores through which weights of such files go (`parts`), and is merged in the order that the rest
//! of nq knows (`merged`), whatever kind of file the model is in.

mod gguf;
mod lora;
mod merged;
mod parts;
mod peft;

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::files::Files;
use crate::hash::sha256_hex;
pub use lora::{Lora, LoraProduct, LoraRows, ProductKey};
use merged::Adapted;
pub use parts::{Adapter, LoraFactors};
pub(crate) use peft::CONFIG;
use std::collections::BTreeSet;
use std::path::Path;

impl Adapter {
    /// Opens PEFT's folder or a GGUF file. `weight` multiplies what it adds.
    ///
    /// # Errors
    /// [`Error::Unsupported`], naming what nq cannot merge; [`Error::Missing`], [`Error::Malformed`] or
    /// [`Error::Tensor`] for a file that is no such adapter.
    pub fn open(path: &Path, weight: f64) -> Result<Self> {
        let mut adapter = match path.is_dir() {
            true => peft::open(path)?,
            false => gguf::open(path)?,
        };
        let whole = [&adapter.whole, &adapter.tokens];
        let replaced = whole.iter().find_map(|parts| parts.names().next());
        let fixed = match (adapter.is_dora(), replaced) {
            (true, _) => Some((
                "a DoRA adapter".into(),
                "its magnitudes are those of the whole adapter",
            )),
            (_, Some(name)) => Some((
                format!("an adapter with {name}"),
                "what takes the place of the model's values cannot be multiplied",
            )),
            _ => None,
        };
        if let Some((what, why)) = fixed.filter(|_| weight != 1.0) {
            let what = format!("{what} with a weight of {weight}");
            return Err(adapter.unsupported(what, why));
        }
        adapter.sums.multiply(weight);
        Ok(adapter)
    }

    /// SHA-256 of the files of the adapter at `path`, for records of what a model was made from.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Missing`] for files that cannot be read.
    pub fn sha256(path: &Path) -> Result<String> {
        let (files, names) = match path.is_dir() {
            true => (
                Files::Folder(path.into()),
                vec![CONFIG.into(), peft::WEIGHTS.into()],
            ),
            false => {
                let folder = path.parent().map(Path::to_owned).unwrap_or_default();
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                (Files::Folder(folder), vec![name.into_owned()])
            }
        };
        let lines = names.iter().map(|name| {
            let bytes = files.require(name)?;
            let digest = sha256_hex(&bytes);
            crate::mapping::release(&bytes);
            Ok(digest + "\n")
        });
        Ok(sha256_hex(lines.collect::<Result<String>>()?.as_bytes()))
    }
}

impl Checkpoint {
    /// This model with `adapters` merged into its weights, which must not be quantized. A head that is the
    /// embedding becomes a matrix of its own if an adapter changes one of them.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a quantized model, for DoRA together with another adapter, and for two adapters
    /// that replace the same values; [`Error::Tensor`] for an adapter of another model.
    pub fn with_adapters(self, adapters: Vec<Adapter>) -> Result<Checkpoint> {
        if adapters.is_empty() {
            return Ok(self);
        }
        if self.store().quantization().is_some() {
            return Err(Error::Unsupported {
                path: self.files().root(),
                what: "an adapter for a quantized model".into(),
                why: "merging rounds its weights again; give the model that it was made from, \
                      with --bits or to nq quantize --adapter"
                    .into(),
            });
        }
        for adapter in &adapters {
            adapter.check(self.config())?;
        }
        let several = adapters.len() > 1;
        if let Some(dora) = adapters.iter().find(|a| several && a.is_dora()) {
            let why = "its magnitudes are those of the model with it alone";
            return Err(dora.unsupported("a DoRA adapter beside another".into(), why));
        }
        let mut replaced = BTreeSet::new();
        for adapter in &adapters {
            let mut names = adapter.whole.names().chain(adapter.tokens.names());
            if let Some(name) = names.find(|n| !replaced.insert((*n).to_owned())) {
                let why = "another adapter replaces the same values";
                return Err(adapter.unsupported(format!("{name} beside it in another"), why));
            }
        }
        Ok(self.adapted(adapters))
    }

    fn adapted(self, adapters: Vec<Adapter>) -> Checkpoint {
        let config = self.config().clone();
        let apart = config.tie_word_embeddings && adapters.iter().any(Adapter::sets_apart);
        let left = adapters.iter().flat_map(|a| a.left_over.clone()).collect();
        let mut adapted = self.over(|store| Box::new(Adapted::new(store, &adapters, &config)));
        adapted.leave_over(left);
        if apart {
            adapted.untie();
        }
        adapted
    }
}
