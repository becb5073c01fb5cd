//! Reads block-wise FP8 as in the official Qwen3-FP8 checkpoints: `w = fp8 * scale_inv` per
//! block of `weight_block_size`, read as BF16, the type in which these models compute. Without blocks, as AutoFP8 and
//! vLLM write it, it is the FP8 of `super::floats`.
//!
//! | tensor | shape |
//! |---|---|
//! | `X.weight` | F8_E4M3 `[out, in]` |
//! | `X.weight_scale_inv` | F32 or BF16 `[ceil(out / 128), ceil(in / 128)]` |
//!
//! transformers keeps the experts of a layer in one tensor, which has no `.weight` in its name:
//!
//! | tensor | shape |
//! |---|---|
//! | `X` | F8_E4M3 `[experts, out, in]` |
//! | `X_scale_inv` | F32 or BF16 `[experts, ceil(out / 128), ceil(in / 128)]` |

use super::expanded::{ExpandedType, Expansion, open_with};
use super::floats::ScaledFp8;
use super::modelopt::small_floats;
use super::quantization::QuantizationConfig;
use crate::checkpoint::{Checkpoint, Source};
pub use crate::e4m3::e4m3;
use crate::error::Result;
use crate::shards::Shards;
use crate::tensor::Tensor;
use nq_model::{DType, Dims, FLOATS, tensor_name};

/// The `quant_method` of this format.
pub const METHOD: &str = "fp8";

/// The suffix of the tensor that holds a weight's scales.
const SCALES: &str = ".weight_scale_inv";

/// The same for a tensor of all experts.
const STACK_SCALES: &str = "_scale_inv";

struct Fp8 {
    /// Rows and columns of a block.
    block: (usize, usize),
}

/// Opens a checkpoint whose `quant_method` is `fp8`.
///
/// # Errors
/// [`crate::Error::Unsupported`] for another float format;
/// otherwise errors of [`Shards::open`].
pub fn open(mut source: Source) -> Result<Checkpoint> {
    let settings = QuantizationConfig::new(&source);
    if let Some(other) = settings.str("fmt")?.filter(|f| *f != "e4m3") {
        return Err(settings.unsupported(format!("FP8 format {other}"), "nq reads e4m3"));
    }
    const RECORDS: [&str; 4] = [
        "activation_scheme",
        "ignored_layers",
        "modules_to_not_convert",
        "scale_fmt",
    ];
    let Some(block) = settings.get("weight_block_size") else {
        source.left_over = settings.left_over(&RECORDS);
        return small_floats(source, METHOD);
    };
    let side = |i: usize| block.get(i)?.as_u64().filter(|n| (1..1 << 28).contains(n));
    let (Some(rows), Some(cols), None) = (side(0), side(1), block.get(2)) else {
        return Err(settings.malformed("weight_block_size", "two sizes above 0"));
    };
    source.left_over = settings.left_over(&RECORDS);
    let block = (rows as usize, cols as usize);
    open_with(source, Fp8 { block })
}

impl Expansion for Fp8 {
    const FORMAT: &'static str = METHOD;
    const HELD: ExpandedType = ExpandedType::Bf16;

    fn is_expanded(&self, shards: &Shards, name: &str) -> bool {
        self.is_stack(shards, &tensor_name(name))
    }

    fn is_stack(&self, shards: &Shards, name: &str) -> bool {
        let tensor = shards.get(name);
        tensor.is_some_and(|t| t.dtype() == DType::F8E4M3)
    }

    fn sources(&self, name: &str) -> Vec<String> {
        // A name stands for one weight or for those of all experts.
        let of_weight = [tensor_name(name), format!("{name}{SCALES}")];
        let of_stack = [name.to_owned(), format!("{name}{STACK_SCALES}")];
        of_weight.into_iter().chain(of_stack).collect()
    }

    fn expand<const N: usize>(
        &self,
        shards: &Shards,
        name: &str,
        Dims { rows, cols }: Dims,
        dtype: DType,
        encode: impl Fn(f32) -> [u8; N] + Sync,
    ) -> Result<Tensor> {
        let (down, across) = (rows.div_ceil(self.block.0), cols.div_ceil(self.block.1));
        let scale = format!("{name}{SCALES}");
        let scales = shards.require(&scale, &FLOATS, &[down, across])?;
        let scaled = ScaledFp8 {
            shards,
            codes: &tensor_name(name),
            scale: &scale,
            shape: &[rows, cols],
            rows: self.block.0,
            cols: self.block.1,
            scales: scales.to_f32()?,
        };
        scaled.expand(dtype, encode)
    }

    fn stack(
        &self,
        shards: &Shards,
        name: &str,
        shape: [usize; 3],
        exactly: bool,
    ) -> Result<Option<Tensor>> {
        if !self.is_stack(shards, name) {
            return Ok(None);
        }
        let [experts, rows, cols] = shape;
        let blocks = [
            experts,
            rows.div_ceil(self.block.0),
            cols.div_ceil(self.block.1),
        ];
        let scale = format!("{name}{STACK_SCALES}");
        let scales = shards.require(&scale, &FLOATS, &blocks)?.to_f32()?;
        let scaled = ScaledFp8 {
            shards,
            codes: name,
            scale: &scale,
            shape: &shape,
            rows: self.block.0,
            cols: self.block.1,
            scales,
        };
        scaled.held(exactly).map(Some)
    }
}
