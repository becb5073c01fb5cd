//! What is decided about a model before it is loaded: the bits that it is quantized to, and its context.

use crate::library::Result;
use crate::terminal::human_bytes;
use nq_answers::images::{Sight, SightOptions};
use nq_cpu::plan::{Running, TowerBytes, running, tower};
use nq_formats::{Bits, Checkpoint, Progress};
use nq_load::device::Device;
use nq_quantize::quantize_at_load;
use nq_quantize::schemes::Schemes;
use nq_runtime::{LoadOptions, SessionSpec};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;

/// The checkpoint, quantized at load if 4 or 8 bits are requested and it is unquantized, and the
/// schemes that it then gets.
pub(crate) fn at_load(
    checkpoint: Checkpoint,
    bits: Option<u32>,
    progress: &dyn Progress,
) -> Result<(Checkpoint, Option<Schemes>)> {
    let Some(bits) = bits.filter(|n| *n != 16) else {
        return Ok((checkpoint, None));
    };
    if checkpoint.store().quantization().is_some() {
        progress.note("--bits is ignored: the model is quantized already");
        return Ok((checkpoint, None));
    }
    progress.note("quantizing at load by rounding; `nq quantize` gives better quality");
    let schemes = Schemes::defaults(Bits::try_from(bits)?);
    let checkpoint = quantize_at_load(checkpoint, schemes.clone())?;
    Ok((checkpoint, Some(schemes)))
}

/// How the model of a checkpoint sees, if it does and runs on a CPU, where images are read; its tower is loaded for the
/// first image.
pub(crate) fn sight(
    checkpoint: &Arc<Checkpoint>,
    load: &LoadOptions,
    options: SightOptions,
) -> Option<Sight> {
    let vision = checkpoint.vision()?.clone();
    if !matches!(Device::choose(load.device), Ok(Device::Cpu)) {
        return None;
    }
    let (checkpoint, load) = (Arc::clone(checkpoint), *load);
    let open = move || {
        let tower = nq_load::tower(&checkpoint, &load, &())?;
        tower.ok_or_else(|| nq_runtime::Error::Request {
            what: "tower",
            expected: "the weights that its configuration describes".into(),
            found: "none".into(),
        })
    };
    Some(Sight::new(vision, options, open))
}

/// What seeing images takes of memory beside a text model, in bytes.
#[derive(Serialize)]
pub(crate) struct SightBytes {
    /// The tower's weights.
    weights_bytes: u64,
    /// An image of as many tokens as are allowed, while it is encoded.
    largest_image_bytes: u64,
    /// The rows of images that were seen lately.
    kept_bytes: u64,
}

impl SightBytes {
    /// All of it.
    pub(crate) fn total(&self) -> u64 {
        self.weights_bytes + self.largest_image_bytes + self.kept_bytes
    }

    /// What the model of `checkpoint` takes, if it sees.
    ///
    /// # Errors
    /// A missing or misshapen tensor.
    pub(crate) fn plan(
        checkpoint: &Checkpoint,
        options: &SightOptions,
    ) -> nq_runtime::Result<Option<Self>> {
        let bytes = |TowerBytes { weights, encoding }| SightBytes {
            weights_bytes: weights,
            largest_image_bytes: encoding,
            kept_bytes: options.kept as u64,
        };
        Ok(tower(checkpoint, options.tokens)?.map(bytes))
    }
}

impl fmt::Display for SightBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} for images: {} of weights, {} for the largest one, {} for those seen lately",
            human_bytes(self.total()),
            human_bytes(self.weights_bytes),
            human_bytes(self.largest_image_bytes),
            human_bytes(self.kept_bytes)
        )
    }
}

/// Memory of a process that loads `checkpoint`, quantized at load by `schemes` if they are given, and runs it on the
/// CPU in sessions of `spec`.
pub(crate) fn memory(
    checkpoint: &Checkpoint,
    schemes: Option<&Schemes>,
    spec: &SessionSpec,
) -> nq_runtime::Result<Running> {
    let Some(schemes) = schemes else {
        return running(checkpoint, None, spec);
    };
    let dense = nq_quantize::memory::dense_type(checkpoint);
    running(checkpoint, Some(&|name| schemes.kind(name, dense)), spec)
}
