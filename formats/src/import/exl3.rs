//! Reads EXL3, the format of exllamav3: Linears in codes of its own ([`crate::exl3`]), between Hadamard transforms of their
//! inputs and outputs.
//!
//! | tensor | shape |
//! |---|---|
//! | `X.trellis` | I16 `[in / 16, out / 16, 16 K]`, `K` bits a weight: 1 to 8, and 1.5, 2.5, 3.5 with `mul1` |
//! | `X.suh`, `X.svh` | F16 `[in]`, `[out]`: signed scales of inputs and outputs |
//! | `X.su`, `X.sv` | I16 `[in / 16]`, `[out / 16]`: in older files signs alone, a bit each, set where negative |
//! | `X.mcg`, `X.mul1` | I32, one element: says which code, by its multiplier; neither: the first one |
//!
//! Devices have kernels for 2, 3, 4, 5, 6, 7 and 8 bits. Other weights, and experts of a layer that differ in code or bits, are
//! held as FP16.

use super::expanded::{ExpandedType, Expansion, open_with};
use super::quantization::QuantizationConfig;
use crate::checkpoint::{Checkpoint, Source};
use crate::error::Result;
use crate::exl3::{Exl3Code, Exl3Scheme, Exl3Weight, TILE};
use crate::scheme::Scheme;
use crate::shards::Shards;
use crate::tensor::Tensor;
use crate::trellis::BLOCK;
use crate::weight::{QuantizedWeight, Weight};
use half::f16;
use nq_model::names::EMBEDDING;
use nq_model::{DType, Dims};
use std::sync::Arc;

/// The `quant_method` of this format.
pub const METHOD: &str = "exl3";

/// The suffix of the tensor that has a weight's codes.
pub const TRELLIS: &str = ".trellis";
/// Those of all of a weight's tensors.
const PARTS: [&str; 7] = [TRELLIS, ".suh", ".svh", ".su", ".sv", ".mcg", ".mul1"];

struct Exl3;

/// Opens a checkpoint whose `quant_method` is `exl3`.
pub fn open(mut source: Source) -> Result<Checkpoint> {
    let settings = QuantizationConfig::new(&source);
    source.left_over = settings.left_over(&[
        "bits",
        "calibration",
        "codebook",
        "head_bits",
        "mtp_bits",
        "original_quantization_config",
        "out_scales",
        "tensor_storage",
        "version",
        "vision_bits",
    ]);
    open_with(source, Exl3)
}

/// The tensors of the weight `name`.
struct Exl3Tensors<'a> {
    shards: &'a Shards,
    name: &'a str,
}

impl Exl3Tensors<'_> {
    /// The code that the scalar tensors of a weight name.
    fn code(&self) -> Result<Exl3Code> {
        let name = self.name;
        let named = |suffix: &str, code: Exl3Code| -> Result<bool> {
            let (tensor, known) = (format!("{name}{suffix}"), code.multiplier());
            let Some(found) = self.shards.get(&tensor) else {
                return Ok(false);
            };
            let found = match (found.dtype(), found.data().first_chunk::<4>()) {
                (DType::I32 | DType::U32, Some(bytes)) => u32::from_le_bytes(*bytes),
                (other, _) => {
                    let expected = "one 32-bit integer".into();
                    return Err(self.shards.error(&tensor, expected, other.to_string()));
                }
            };
            match found == known {
                true => Ok(true),
                false => Err(self.shards.error(
                    &tensor,
                    format!("the multiplier {known:#X}"),
                    format!("{found:#X}"),
                )),
            }
        };
        Ok(if named(".mul1", Exl3Code::Mul1)? {
            Exl3Code::Mul1
        } else if named(".mcg", Exl3Code::Mcg)? {
            Exl3Code::Mcg
        } else {
            Exl3Code::ThreeInst
        })
    }

    /// The scales of inputs or outputs: values, or signs alone.
    fn scales(&self, values: &str, signs: &str, n: usize) -> Result<Arc<[f16]>> {
        let name = self.name;
        let values = format!("{name}{values}");
        let signs = format!("{name}{signs}");
        let scales: Arc<[f16]> = if self.shards.contains(&values) || !self.shards.contains(&signs) {
            let tensor = self.shards.require(&values, &[DType::F16], &[n])?;
            let (values, _) = tensor.data().as_chunks::<2>();
            values.iter().map(|v| f16::from_le_bytes(*v)).collect()
        } else {
            let tensor = self.shards.require(&signs, &[DType::I16], &[n / 16])?;
            let bit = |i: usize| tensor.data()[i / 8] >> (i % 8) & 1;
            let sign = |i: usize| if bit(i) == 0 { f16::ONE } else { f16::NEG_ONE };
            (0..n).map(sign).collect()
        };
        match scales.iter().position(|s| !s.is_finite()) {
            None => Ok(scales),
            Some(i) => {
                let found = format!("{} at {i}", scales[i]);
                Err(self.shards.error(&values, "finite values".into(), found))
            }
        }
    }

    /// Code and bits of a weight, and the shape of its trellis, as far as they are known without its dimensions.
    fn scheme(&self) -> Result<Option<Exl3Scheme>> {
        let found = self.shards.get(&format!("{}{TRELLIS}", self.name));
        let width = found.and_then(|t| t.shape().get(2).copied()).unwrap_or(0);
        let whole = width.is_multiple_of(8);
        Ok(Exl3Scheme::new(self.code()?, width / 8).filter(|_| whole))
    }

    /// The weight, checked against the shape of its trellis.
    fn read(&self, dims: Dims) -> Result<Exl3Weight> {
        let Dims { rows, cols } = dims;
        let tensor = format!("{}{TRELLIS}", self.name);
        let found = self.shards.get(&tensor);
        let width = found.and_then(|t| t.shape().get(2).copied()).unwrap_or(0);
        let fits = |n: usize| n > 0 && n.is_multiple_of(BLOCK);
        let scheme = self.scheme()?.filter(|_| fits(rows) && fits(cols));
        let Some(scheme) = scheme else {
            let expected = format!(
                "16 values for each of 1 to 8 bits, or 1.5, 2.5 or 3.5 with mul1, and [{rows}, {cols}] of \
                 multiples of {BLOCK}"
            );
            let found = format!("{width} values");
            return Err(self.shards.error(&tensor, expected, found));
        };
        let shape = [cols / TILE, rows / TILE, width];
        let tiles = self.shards.require(&tensor, &[DType::I16], &shape)?;
        let of_inputs = self.scales(".suh", ".su", cols)?;
        let of_outputs = self.scales(".svh", ".sv", rows)?;
        Exl3Weight::new(scheme, dims, tiles.data().clone(), of_inputs, of_outputs)
    }
}

/// True if devices hold the weight in its own codes, whose scheme is `scheme`. Rows of embeddings are looked up one by one.
fn is_kept(name: &str, scheme: Exl3Scheme) -> bool {
    scheme.whole_bits().is_some() && name != EMBEDDING
}

impl Expansion for Exl3 {
    const FORMAT: &'static str = METHOD;
    const HELD: ExpandedType = ExpandedType::F16;

    fn is_expanded(&self, shards: &Shards, name: &str) -> bool {
        shards.contains(&format!("{name}{TRELLIS}"))
    }

    fn sources(&self, name: &str) -> Vec<String> {
        PARTS.map(|suffix| format!("{name}{suffix}")).into()
    }

    fn expand<const N: usize>(
        &self,
        shards: &Shards,
        name: &str,
        dims: Dims,
        dtype: DType,
        encode: impl Fn(f32) -> [u8; N] + Sync,
    ) -> Result<Tensor> {
        let weight = Exl3Tensors { shards, name }.read(dims)?;
        weight.expand(dtype, encode)
    }

    fn in_codes(&self, shards: &Shards, name: &str, dims: Dims) -> Result<Option<Weight>> {
        let weight = Exl3Tensors { shards, name }.read(dims)?;
        let kept = is_kept(name, weight.scheme());
        Ok(kept.then_some(Weight::Quantized(QuantizedWeight::Exl3(weight))))
    }

    fn scheme(&self, shards: &Shards, name: &str) -> Option<Scheme> {
        let scheme = Exl3Tensors { shards, name }.scheme().ok()??;
        is_kept(name, scheme).then_some(Scheme::Exl3(scheme))
    }
}
