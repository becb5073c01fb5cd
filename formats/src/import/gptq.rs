//! Reads GPTQ, versions 1 and 2, as AutoGPTQ and GPTQModel write it.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `X.qweight` | I32 `[in / pf, out]` | word r holds inputs `r * pf ..`, low bits first; `pf = 32 / bits` |
//! | `X.qzeros` | I32 `[groups, out / pf]` | along out; version 1 stores the zero-point less one |
//! | `X.scales` | F16 `[groups, out]` | |
//! | `X.g_idx` | I32 `[in]` | group of each input |

use super::quantization::QuantizationConfig;
use super::weight::{self, ImportedWeight};
use super::{Layout, check_dims, in_word, listed_groups, open_with, per_word, shape_of};
use super::{transpose, words};
use crate::checkpoint::{Checkpoint, Source};
use crate::error::Result;
use crate::scheme::{AffineScheme, Bits, Group};
use crate::shards::Shards;
use nq_model::{DType, Dims, FLOATS};
use rayon::prelude::*;
use serde_json::Value;

/// The `quant_method` of this format.
pub(crate) const METHOD: &str = "gptq";

struct Gptq {
    bits: Bits,
    group: Group,
    /// True if some modules have other settings (GPTQModel's `dynamic`); then shapes tell which.
    dynamic: bool,
    activation_order: bool,
    /// True if stored zero-points are one less than the true ones.
    zeros_less_one: bool,
    /// True if zero-points are at the midpoint in every module.
    symmetric: bool,
}

/// Keys of the settings that record how the file was made, or concern other programs.
#[rustfmt::skip]
const RECORDS: &[&str] = &[
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "disable_exllama", "exllama_config", "is_marlin_format",
    "lm_head", "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "mse", "pad_token_id", "static_groups",
    "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama",
];

/// Opens a checkpoint whose `quant_method` is `gptq`.
///
/// # Errors
/// [`crate::Error::Unsupported`], naming it, for a `checkpoint_format` or width that nq does not read;
/// [`crate::Error::Malformed`] for missing settings; otherwise errors of [`Shards::open`].
pub(crate) fn open(mut source: Source) -> Result<Checkpoint> {
    let settings = QuantizationConfig::new(&source);
    // Files beside config.json name it `format`.
    let format = settings.str("checkpoint_format")?;
    let zeros_less_one = match format.or(settings.str("format")?) {
        None | Some("gptq") => true,
        Some("gptq_v2") => false,
        Some(other) => {
            let what = format!("checkpoint_format {other}");
            return Err(settings.unsupported(what, "nq reads gptq and gptq_v2"));
        }
    };
    if let Some(other) = settings.str("pack_dtype")?.filter(|p| *p != "int32") {
        return Err(settings.unsupported(format!("pack_dtype {other}"), "nq reads int32"));
    }
    let dynamic = settings.get("dynamic").and_then(|d| d.as_object());
    let rules = || dynamic.into_iter().flat_map(|rules| rules.values());
    let asymmetric = |rule: &Value| rule.get("sym").and_then(Value::as_bool) == Some(false);
    let layout = Gptq {
        bits: settings.bits("bits")?,
        group: settings.group("group_size")?,
        dynamic: rules().next().is_some(),
        activation_order: settings.bool("desc_act")?.unwrap_or(false),
        zeros_less_one,
        symmetric: settings.bool("sym")?.unwrap_or(false) && !rules().any(asymmetric),
    };
    source.left_over = settings.left_over(RECORDS);
    open_with(source, layout)
}

impl Gptq {
    /// Bits and groups of the weight `name`: from the configuration or, if they vary by module, from
    /// the shapes.
    fn settings(&self, shards: &Shards, name: &str, cols: usize) -> Result<(Bits, Group)> {
        let rows = |suffix: &str| Some(*shards.get(&format!("{name}{suffix}"))?.shape().first()?);
        let (true, Some(packed), Some(groups)) = (self.dynamic, rows(".qweight"), rows(".scales"))
        else {
            return Ok((self.bits, self.group));
        };
        let bits = match packed {
            n if n == cols / 8 => Bits::B4,
            n if n == cols / 4 => Bits::B8,
            n => {
                let expected = format!("{} or {} rows: 4 or 8 bits", cols / 8, cols / 4);
                let tensor = format!("{name}.qweight");
                return Err(shards.error(&tensor, expected, format!("{n} rows")));
            }
        };
        let group = match groups {
            1 => Group::Channel,
            n => Group::Size(cols.div_ceil(n.max(1)) as u32),
        };
        Ok((bits, group))
    }

    /// The zero-points of a weight of such codes, `[out, groups]`.
    fn zeros(&self, shards: &Shards, name: &str, bits: Bits, shape: [usize; 2]) -> Result<Vec<u8>> {
        let [groups, rows] = shape;
        let (pf, tensor) = (per_word(bits), format!("{name}.qzeros"));
        let packed = shards.require(&tensor, &[DType::I32], &[groups, rows / pf])?;
        let mut zeros: Vec<u8> = words(&packed)
            .into_iter()
            .flat_map(|w| (0..pf).map(move |j| in_word(bits, w, j)))
            .collect();
        let middle = bits.midpoint();
        if self.symmetric {
            // Some files say the other version than the one that they were written in. As `sym` rules out other
            // zero-points than the midpoint, both ways to store it mean the same.
            let stored = [middle, middle - 1].into_iter();
            if !stored.into_iter().any(|s| zeros.iter().all(|&z| z == s)) {
                let expected = format!("zero-points of {middle}, as sym is true");
                let found = zeros.iter().find(|&&z| z != middle && z != middle - 1);
                let found = found.map_or("different ones".into(), |z| format!("{z} as stored"));
                return Err(shards.error(&tensor, expected, found));
            }
            zeros.fill(middle);
        } else if self.zeros_less_one {
            // A true zero-point of 0 was stored as -1 in the field's width.
            (zeros.iter_mut()).for_each(|z| *z = z.wrapping_add(1) & bits.max_code());
        }
        Ok(transpose(&zeros, rows))
    }
}

impl Layout for Gptq {
    fn format(&self) -> &'static str {
        METHOD
    }

    fn is_quantized(&self, shards: &Shards, name: &str) -> bool {
        shards.contains(&format!("{name}.qweight"))
    }

    fn parts(&self, _: &Shards, _: &str) -> &'static [&'static str] {
        &[".qweight", ".qzeros", ".scales", ".g_idx"]
    }

    fn scales(&self) -> &'static str {
        ".scales"
    }

    fn scheme(&self, shards: &Shards, name: &str) -> Option<AffineScheme> {
        let [packed, rows] = shape_of(shards, &format!("{name}.qweight"))?;
        let listed = shape_of(shards, &format!("{name}.g_idx")).map(|[inputs]| inputs);
        // Where widths vary, those of a weight without a list of groups are not known from its shapes alone.
        let cols = match self.dynamic {
            true => listed?,
            false => packed * per_word(self.bits),
        };
        let (bits, group) = self.settings(shards, name, cols).ok()?;
        let zeros = self.zeros(shards, name, bits, [group.count(cols), rows]);
        Some(weight::scheme(bits, group, Some(&zeros.ok()?)))
    }

    fn read(
        &self,
        shards: &Shards,
        name: &str,
        Dims { rows, cols }: Dims,
    ) -> Result<ImportedWeight> {
        let tensor = |suffix: &str| format!("{name}.{suffix}");
        let (bits, group) = self.settings(shards, name, cols)?;
        check_dims(shards, &tensor("qweight"), bits, group, cols)?;
        let pf = per_word(bits);
        let groups = group.count(cols);
        if !rows.is_multiple_of(pf) {
            let expected = format!("outputs that {pf} divides");
            return Err(shards.error(&tensor("qzeros"), expected, format!("{rows} outputs")));
        }
        let packed = shards.require(&tensor("qweight"), &[DType::I32], &[cols / pf, rows])?;
        let zeros = self.zeros(shards, name, bits, [groups, rows])?;
        let scales = shards.require(&tensor("scales"), &FLOATS, &[groups, rows])?;
        let g_idx = match shards.contains(&tensor("g_idx")) {
            true => listed_groups(shards, &tensor("g_idx"), cols, group)?,
            false if self.activation_order => {
                let expected = "the group of each input, as desc_act is true".into();
                return Err(shards.error(&tensor("g_idx"), expected, "no such tensor".into()));
            }
            false => None,
        };

        // A word's bytes are already canonical: only words need to be transposed.
        let (packed, _) = packed.data().as_chunks::<4>();
        let stride = bits.bytes(cols);
        let mut codes = vec![0; rows * stride];
        const BLOCK: usize = 16; // words of a cache line
        codes
            .par_chunks_mut(BLOCK * stride)
            .enumerate()
            .for_each(|(b, block)| {
                for r in 0..cols / pf {
                    for (o, row) in block.chunks_mut(stride).enumerate() {
                        row[4 * r..4 * r + 4].copy_from_slice(&packed[r * rows + b * BLOCK + o]);
                    }
                }
            });
        Ok(ImportedWeight {
            bits,
            group,
            codes: codes.into(),
            scales: transpose(&scales.to_f32()?, rows),
            zeros: Some(zeros),
            g_idx,
        })
    }
}
