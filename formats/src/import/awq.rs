//! Reads AWQ as AutoAWQ writes it, version `gemm`: 4 bits.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `X.qweight` | I32 `[in, out / 8]` | nibble i of word c is output `8c + ORDER[i]` |
//! | `X.qzeros` | I32 `[groups, out / 8]` | the same order; the true zero-point |
//! | `X.scales` | F16 `[groups, out]` | |

use super::quantization::QuantizationConfig;
use super::weight::{self, ImportedWeight};
use super::{Layout, check_dims, in_word, open_with, shape_of, transpose, words};
use crate::checkpoint::{Checkpoint, Source};
use crate::error::Result;
use crate::scheme::{AffineScheme, Bits, Group};
use crate::shards::Shards;
use nq_model::{DType, Dims, FLOATS};
use rayon::prelude::*;

/// The `quant_method` of this format.
pub(crate) const METHOD: &str = "awq";

/// For each nibble of a word, the output that it holds.
pub(crate) const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

const BITS: Bits = Bits::B4;

struct Awq {
    group: Group,
    /// True if zero-points are stored; otherwise all are at the midpoint.
    zero_point: bool,
}

/// Opens a checkpoint whose `quant_method` is `awq`.
///
/// # Errors
/// [`crate::Error::Unsupported`], naming it, for a version or width that nq does not read;
/// [`crate::Error::Malformed`] for missing settings; otherwise errors of [`Shards::open`].
pub(crate) fn open(mut source: Source) -> Result<Checkpoint> {
    let settings = QuantizationConfig::new(&source);
    let version = settings.str("version")?.unwrap_or("gemm");
    if !version.eq_ignore_ascii_case("gemm") {
        return Err(settings.unsupported(format!("AWQ version {version}"), "nq reads gemm"));
    }
    // Early files have the keys w_bit and q_group_size.
    let either = |a, b| if settings.get(a).is_some() { a } else { b };
    let bits = settings.bits(either("bits", "w_bit"))?;
    if bits != BITS {
        return Err(settings.unsupported(format!("AWQ with {} bits", bits.width()), "it has 4"));
    }
    let layout = Awq {
        group: settings.group(either("group_size", "q_group_size"))?,
        zero_point: settings.bool("zero_point")?.unwrap_or(true),
    };
    source.left_over = settings.left_over(&[
        "backend",
        "do_fuse",
        "exllama_config",
        "fuse_max_seq_len",
        "modules_to_fuse",
        "modules_to_not_convert",
    ]);
    open_with(source, layout)
}

impl Awq {
    /// The zero-points of a weight, `[out, groups]`; `None` if all are at the midpoint.
    fn zeros(
        &self,
        shards: &Shards,
        name: &str,
        Dims { rows, cols }: Dims,
    ) -> Result<Option<Vec<u8>>> {
        if !self.zero_point {
            return Ok(None);
        }
        let shape = [self.group.count(cols), rows / 8];
        let packed = words(&shards.require(&format!("{name}.qzeros"), &[DType::I32], &shape)?);
        let mut zeros = vec![0; 8 * packed.len()];
        for (word, eight) in packed.into_iter().zip(zeros.chunks_mut(8)) {
            for (i, &o) in ORDER.iter().enumerate() {
                eight[o] = in_word(BITS, word, i);
            }
        }
        Ok(Some(transpose(&zeros, rows)))
    }
}

impl Layout for Awq {
    fn format(&self) -> &'static str {
        METHOD
    }

    fn is_quantized(&self, shards: &Shards, name: &str) -> bool {
        shards.contains(&format!("{name}.qweight"))
    }

    fn parts(&self, _: &Shards, _: &str) -> &'static [&'static str] {
        match self.zero_point {
            true => &[".qweight", ".qzeros", ".scales"],
            false => &[".qweight", ".scales"],
        }
    }

    fn scales(&self) -> &'static str {
        ".scales"
    }

    fn scheme(&self, shards: &Shards, name: &str) -> Option<AffineScheme> {
        let [cols, words] = shape_of(shards, &format!("{name}.qweight"))?;
        let zeros = self.zeros(shards, name, Dims::new(8 * words, cols)).ok()?;
        Some(weight::scheme(BITS, self.group, zeros.as_deref()))
    }

    fn read(
        &self,
        shards: &Shards,
        name: &str,
        Dims { rows, cols }: Dims,
    ) -> Result<ImportedWeight> {
        let tensor = |suffix: &str| format!("{name}.{suffix}");
        check_dims(shards, &tensor("qweight"), BITS, self.group, cols)?;
        if !rows.is_multiple_of(8) {
            let expected = "outputs that 8 divides".into();
            return Err(shards.error(&tensor("qweight"), expected, format!("{rows} outputs")));
        }
        let groups = self.group.count(cols);
        let packed = shards.require(&tensor("qweight"), &[DType::I32], &[cols, rows / 8])?;
        let packed = words(&packed);
        let scales = shards.require(&tensor("scales"), &FLOATS, &[groups, rows])?;
        let zeros = self.zeros(shards, name, Dims::new(rows, cols))?;
        let stride = BITS.bytes(cols);
        let mut codes = vec![0; rows * stride];
        codes
            .par_chunks_mut(8 * stride)
            .enumerate()
            .for_each(|(c, eight)| {
                for i in 0..cols {
                    let word = packed[i * (rows / 8) + c];
                    for (nibble, &o) in ORDER.iter().enumerate() {
                        eight[o * stride + i / 2] |= in_word(BITS, word, nibble) << (4 * (i % 2));
                    }
                }
            });
        Ok(ImportedWeight {
            bits: BITS,
            group: self.group,
            codes: codes.into(),
            scales: transpose(&scales.to_f32()?, rows),
            zeros,
            g_idx: None,
        })
    }
}
