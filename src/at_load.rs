//! What is decided about a model before it is loaded: the bits that it is quantized to, and its context.

use crate::library::Result;
use nq_cpu::plan::{Running, running};
use nq_formats::{Bits, Checkpoint, Progress};
use nq_model::{ModelConfig, RopeScaling};
use nq_quantize::quantize_at_load;
use nq_quantize::schemes::Schemes;
use nq_runtime::SessionSpec;

/// The checkpoint, quantized at load if 4 or 8 bits are requested and it is unquantized, and the
/// schemes that it then gets.
pub fn at_load(
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

/// Number of positions that the model was trained for.
pub fn longest_context(config: &ModelConfig) -> usize {
    match config.rope.scaling {
        RopeScaling::None | RopeScaling::Llama3 { .. } => config.max_position_embeddings,
        RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: original,
            ..
        } => config
            .max_position_embeddings
            .max((factor * original as f64) as usize),
    }
}

/// Memory of a process that loads `checkpoint`, quantized at load by `schemes` if they are given, and runs it on the
/// CPU in sessions of `spec`.
pub fn memory(
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
