//! What is decided about a model before it is loaded: the bits that it is quantized to, and its context.

use crate::library::Result;
use nq_answers::images::{Sight, SightOptions};
use nq_cpu::plan::{Running, running};
use nq_formats::{Bits, Checkpoint, Progress};
use nq_quantize::quantize_at_load;
use nq_quantize::schemes::Schemes;
use nq_runtime::{LoadOptions, SessionSpec};
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

/// How the model of a checkpoint sees, if it does; its tower is loaded for the first image.
pub(crate) fn sight(
    checkpoint: &Arc<Checkpoint>,
    load: &LoadOptions,
    options: SightOptions,
) -> Option<Sight> {
    let vision = checkpoint.vision()?.clone();
    let (checkpoint, load) = (Arc::clone(checkpoint), *load);
    let open = move || {
        let tower = nq_load::tower(&checkpoint, &load, options.tokens, &())?;
        tower.ok_or_else(|| nq_runtime::Error::Request {
            what: "tower",
            expected: "the weights that its configuration describes".into(),
            found: "none".into(),
        })
    };
    Some(Sight::new(vision, options, open))
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
