//! Checks of what a format can hold, before anything is rounded or written.

use super::folder::{affine, dense_type};
use super::format::ExportFormat;
use super::gguf;
use super::packing::Packing;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::gguf::affine as blocks;
use crate::scheme::{AffineScheme, Bits, Group, Zeros};
use nq_model::Dims;
use nq_model::names::{Shape, is_layer_linear, parameters};
use std::collections::BTreeMap;

/// Group sizes for which loaders have fast kernels, if they divide the rows.
const GROUPS: [u32; 3] = [128, 64, 32];

impl ExportFormat {
    /// Name of the format for messages.
    pub fn name(self) -> &'static str {
        match (self.packing(), self) {
            (Some(packing), _) => packing.format,
            (None, ExportFormat::Gguf) => "GGUF",
            (None, _) => "nq",
        }
    }

    /// The scheme of `bits`-bit Linears when quantizing for this format; `own` is the default scheme
    /// otherwise.
    ///
    /// # Errors
    /// [`Error::Scheme`] for a width that the format does not support.
    pub fn scheme(self, bits: Bits, own: AffineScheme) -> Result<AffineScheme> {
        Ok(match (self, bits) {
            (ExportFormat::Awq, Bits::B8) => {
                return Err(Error::Scheme {
                    expected: "4 bits, the only width of AWQ".into(),
                    found: "8".into(),
                });
            }
            // Super-blocks where there are any of these bits.
            (ExportFormat::Gguf, bits) => {
                let mut all = blocks::SCHEMES.iter().map(|row| row.1);
                let found = all.find(|s| s.bits == bits);
                found.ok_or_else(|| Error::Scheme {
                    expected: "4, 5, 6 or 8 bits, of which GGUF has blocks".into(),
                    found: bits.width().to_string(),
                })?
            }
            // Version 1 has no form for a zero-point of 0, and fast kernels want none at all.
            (ExportFormat::Gptq, _) => AffineScheme {
                zeros: Zeros::None,
                ..own
            },
            _ => own,
        })
    }

    /// The schemes of at least `least` bits among which each weight can choose, for models with rows of these
    /// `widths`. `None` if all weights have one scheme.
    pub fn candidates(
        self,
        least: Bits,
        widths: impl IntoIterator<Item = usize>,
    ) -> Option<Vec<AffineScheme>> {
        (self == ExportFormat::Gguf).then(|| blocks::candidates(least, widths))
    }

    /// Checks that Linears `(name, scheme, [out, in])` will fit whatever their codes.
    ///
    /// # Errors
    /// [`Error::Scheme`], naming the first that may not fit, with the reason.
    pub fn check<'a>(
        self,
        linears: impl IntoIterator<Item = (&'a str, AffineScheme, Dims)>,
    ) -> Result<()> {
        let holds = match (self.packing(), self) {
            (Some(packing), _) => packing.holds,
            (None, ExportFormat::Gguf) => gguf::holds,
            (None, _) => return Ok(()),
        };
        let uniform = self.packing().is_some_and(|p| p.uniform);
        let mut first: Option<(&str, AffineScheme)> = None;
        for (name, scheme, dims) in linears {
            let refuse = |why: String| {
                Err(Error::Scheme {
                    expected: format!("what {} holds ({why})", self.name()),
                    found: format!("{scheme} for {name}"),
                })
            };
            if let Err(why) = holds(scheme, dims, false) {
                return refuse(why);
            }
            if self == ExportFormat::Gptq && scheme.zeros == Zeros::Integer {
                return refuse(
                    "version 1 has no zero-point of 0; symmetric codes have none".into(),
                );
            }
            match first {
                Some((other, s)) if uniform && s != scheme => {
                    return refuse(format!("one scheme for all; {other} has {s}"));
                }
                _ => first = first.or(Some((name, scheme))),
            }
        }
        Ok(())
    }
}

/// The Linears of `checkpoint` that `format`, a folder format, would have to round again, with the
/// scheme that they then get: the same bits and group size as far as the format has those.
/// Empty if it holds all of them exactly. An unquantized model is not rounded *again*: the result
/// is empty for it.
///
/// # Errors
/// [`Error::Scheme`] for a model whose shape the format cannot hold at all; errors of
/// reading.
pub fn requantization(
    checkpoint: &Checkpoint,
    format: ExportFormat,
) -> Result<BTreeMap<String, AffineScheme>> {
    let (config, store) = (checkpoint.config(), checkpoint.store());
    let mut schemes = BTreeMap::new();
    let (Some(packing), Some(_)) = (format.packing(), store.quantization()) else {
        return Ok(schemes);
    };
    let dense = dense_type(checkpoint);
    let mut linears = Vec::new();
    for (name, shape) in parameters(config) {
        let Shape::Matrix(rows, cols) = shape else {
            continue;
        };
        if is_layer_linear(&name) {
            let weight = store.matrix(&name, Dims::new(rows, cols))?;
            let a = affine(&weight);
            linears.push(SourceLinear {
                name,
                dims: Dims::new(rows, cols),
                scheme: a.map(|a| a.scheme()),
                order: a.is_some_and(|a| a.g_idx().is_some()),
                fits: a.is_some_and(|a| packing.fits(a, dense).is_ok()),
            });
        }
    }
    // Unquantized weights may stay so beside quantized ones; but if none is quantized to codes
    // (FP8), all are rounded.
    if linears.iter().any(|l| l.scheme.is_some()) {
        linears.retain(|l| l.scheme.is_some());
    }
    let alike = |l: &SourceLinear| (l.scheme, l.order) == (linears[0].scheme, linears[0].order);
    if linears
        .iter()
        .all(|l| l.fits && (!packing.uniform || alike(l)))
    {
        return Ok(schemes);
    }
    let common = most_common(linears.iter().filter(|l| l.fits));
    let common = common.or_else(|| most_common(&linears));
    for l in &linears {
        let source = if packing.uniform { common } else { l.scheme };
        let target = nearest(format, packing, source, l.dims);
        // A single scheme for all implies a single order, and rounding again drops the order.
        if l.fits && (!packing.uniform || l.scheme == Some(target) && !l.order) {
            continue;
        }
        (packing.holds)(target, l.dims, false).map_err(|why| Error::Scheme {
            expected: format!("what {} holds ({why})", format.name()),
            found: format!("{target} for {}", l.name),
        })?;
        schemes.insert(l.name.clone(), target);
    }
    Ok(schemes)
}

/// A Linear of the source.
struct SourceLinear {
    name: String,
    dims: Dims,
    scheme: Option<AffineScheme>, // None: unquantized
    order: bool,                  // whether it has an activation order
    fits: bool,
}

/// The scheme of the most values.
fn most_common<'a>(linears: impl IntoIterator<Item = &'a SourceLinear>) -> Option<AffineScheme> {
    let mut counts: Vec<(AffineScheme, usize)> = Vec::new();
    for l in linears {
        let values = l.dims.rows * l.dims.cols;
        let scheme = l.scheme?;
        match counts.iter_mut().find(|(s, _)| *s == scheme) {
            Some((_, n)) => *n += values,
            None => counts.push((scheme, values)),
        }
    }
    counts.into_iter().max_by_key(|c| c.1).map(|c| c.0)
}

/// The scheme of `format` nearest to `source` for a weight `[out, in]`; 8 bits if there is no
/// `source`. A scheme that the format holds whatever the codes is its own nearest.
fn nearest(
    format: ExportFormat,
    packing: &Packing,
    source: Option<AffineScheme>,
    dims: Dims,
) -> AffineScheme {
    let zeros_fit = |s: &AffineScheme| format != ExportFormat::Gptq || s.zeros == Zeros::None;
    if let Some(s) = source.filter(|s| zeros_fit(s) && (packing.holds)(*s, dims, false).is_ok()) {
        return s;
    }
    let bits = match (format, source) {
        (ExportFormat::Awq, _) => Bits::B4,
        (_, None) => Bits::B8,
        (_, Some(s)) => s.held().bits,
    };
    let group = match source.map(|s| s.group) {
        Some(Group::Size(n)) => Group::Size(n.max(32)),
        Some(Group::Channel) => Group::Channel,
        None => {
            let whole = |n: &&u32| dims.cols.is_multiple_of(**n as usize);
            let size = GROUPS.iter().find(whole);
            size.map_or(Group::Channel, |&n| Group::Size(n))
        }
    };
    // Zero-points are kept; offsets become zero-points, and 4-bit codes get them.
    let zeros = match source.map(|s| s.zeros) {
        Some(Zeros::None) => Zeros::None,
        _ if format == ExportFormat::Gptq || bits == Bits::B8 => Zeros::None,
        _ => Zeros::Integer,
    };
    AffineScheme::new(bits, group, zeros)
}
