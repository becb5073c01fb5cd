//! A model with adapters beside its weights.

use super::{Model, Result};
use crate::adapters::{AdapterFile, beside};
use nq_formats::adapter::{Adapter, Lora};
use std::sync::Arc;

impl Model {
    /// The same model with adapters, whose products are added to what it computes: both share the weights, which may be
    /// quantized and stay as they are. On a CPU.
    ///
    /// # Errors
    /// An adapter of another model, or one that can only be merged into unquantized weights; a GPU.
    pub fn with_adapters(&self, adapters: &[AdapterFile]) -> Result<Model> {
        let read = |file: &AdapterFile| -> Result<Lora> {
            let adapter = Adapter::open(&file.path, file.weight)?;
            Ok(adapter.lora(self.checkpoint().config())?)
        };
        let loras = adapters.iter().map(read).collect::<Result<Vec<_>>>()?;
        let engine = beside(self.0.engine.as_ref(), &loras)?;
        Ok(Model(Arc::clone(&self.0), Some(engine)))
    }
}
