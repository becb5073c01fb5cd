//! What a run is asked for, before the model is known.

use crate::allocation;
use crate::error::{Error, Result};
use crate::groups;
use crate::mix;
use crate::schemes::{Codes, Schemes, default_scheme, head_scheme, table_scheme};
use crate::train::TuneOptions;
use nq_formats::export::ExportFormat;
use nq_formats::trellis::Code;
use nq_formats::{AffineScheme, Bits, Group, Scheme, TrellisScheme, Zeros};
use nq_model::ModelConfig;

/// A size that the result must not exceed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TargetSize {
    /// Bytes of all tensors.
    Bytes(u64),
    /// Bits per weight, counting all tensors.
    BitsPerWeight(f64),
}

/// The codes that are asked for, the format they are written in, and what differs from the defaults of both.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Codes of the layers' Linears. Below 8 bits they are a mix of schemes at the size of these, unless one of the
    /// fields below asks for one scheme.
    pub codes: Codes,
    /// Format of the result.
    pub format: ExportFormat,
    /// Tuning end to end against the source's logits, after the method.
    pub tuning: Option<TuneOptions>,
    /// One scheme for all layers, with an 8-bit embedding and head.
    pub simple: bool,
    /// Inputs that share a scale, in all layers.
    pub group: Option<Group>,
    /// Zero-points, in all layers.
    pub zeros: Option<Zeros>,
    /// Bits of the embedding and head, in one scheme; 16: unquantized.
    pub head_bits: Option<u32>,
    /// 8-bit codes in the Linears of the tower that sees images.
    pub vision_8: bool,
    /// Bits of tables of n-grams, 8 or 4; `None`: as they are.
    pub table_bits: Option<Bits>,
    /// A size for which the schemes of all weights are chosen by measured sensitivity.
    pub target: Option<TargetSize>,
}

impl From<Codes> for Recipe {
    fn from(codes: Codes) -> Self {
        Recipe {
            codes,
            format: ExportFormat::Nq,
            tuning: None,
            simple: false,
            group: None,
            zeros: None,
            head_bits: None,
            vision_8: false,
            table_bits: None,
            target: None,
        }
    }
}

impl From<Bits> for Recipe {
    fn from(bits: Bits) -> Self {
        Codes::from(bits).into()
    }
}

impl From<TrellisScheme> for Recipe {
    fn from(scheme: TrellisScheme) -> Self {
        Codes::Trellis(scheme).into()
    }
}

fn refused<T>(
    what: &'static str,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> Result<T> {
    let (expected, found) = (expected.into(), found.into());
    Err(Error::Request {
        what,
        expected,
        found,
    })
}

impl Recipe {
    /// Refuses what no model could be given.
    ///
    /// # Errors
    /// [`Error::Request`] for what contradicts each other, [`Error::Format`] for bits that the format does not have.
    pub fn check(&self) -> Result<()> {
        if matches!(self.codes, Codes::Trellis(_)) {
            if self.format != ExportFormat::Nq {
                return refused(
                    "trellis",
                    "the format nq, which alone has trellis codes",
                    self.format.name(),
                );
            }
            if self.group.is_some() || self.zeros.is_some() {
                return refused("trellis", "neither groups nor zero-points", "them");
            }
        }
        if self.vision_8 && !matches!(self.format, ExportFormat::Nq | ExportFormat::Gguf) {
            return refused(
                "vision-bits",
                "nq or gguf, as other formats hold towers in 16 bits",
                self.format.name(),
            );
        }
        if let Some(bits) = self
            .table_bits
            .filter(|b| ![Bits::B4, Bits::B8].contains(b))
        {
            return refused(
                "table-bits",
                "4 or 8, or 16 for none",
                bits.width().to_string(),
            );
        }
        if self.table_bits.is_some() && self.format != ExportFormat::Nq {
            let expected = "nq, the format in which tables of n-grams are rounded";
            return refused("table-bits", expected, self.format.name());
        }
        if let Some(target) = self.target {
            let what = match target {
                TargetSize::Bytes(_) => "target-size",
                TargetSize::BitsPerWeight(_) => "target-bpw",
            };
            if !self.chooses() {
                return refused(
                    what,
                    "a format in which weights have schemes of their own: nq, or gguf without tuning",
                    self.format.name(),
                );
            }
            if self.simple || self.group.is_some() || self.zeros.is_some() {
                return refused(what, "schemes that it can choose", "one for all layers");
            }
        }
        self.base().map(|_| ())
    }

    /// The schemes that a run for this model begins with, and those among which weights can choose if these do not do:
    /// none if the recipe leaves no choice.
    ///
    /// # Errors
    /// Those of [`Recipe::check`].
    pub fn schemes(&self, config: &ModelConfig) -> Result<(Schemes, Vec<Scheme>)> {
        let tables = match (self.table_bits, &config.ngrams) {
            (None, _) => None,
            (Some(bits), Some(table)) => Some(table_scheme(bits, table.row_width()).into()),
            (Some(_), None) => {
                return refused(
                    "table-bits",
                    "a model with a table of n-grams",
                    "one without",
                );
            }
        };
        let base = Schemes {
            tables,
            ..self.base()?
        };
        match self.codes {
            Codes::Trellis(linears) => {
                let among = |least| allocation::trellis_candidates(linears.code(), least);
                // In a mix at the size of these, no weight gets more than a bit less.
                let mixing = self.mixes().then(|| among(linears.bits() - 1.0));
                let schemes = match mixing {
                    Some(mixing) => mix::initial(config, base, Some(&mixing), &[])?,
                    None => base,
                };
                Ok((schemes, among(linears.bits())))
            }
            Codes::Integer(bits) => {
                let mixing = self
                    .mixes()
                    .then(|| self.candidates(config, mix::least(bits)));
                let candidates = self.candidates(config, bits);
                let schemes = mix::initial(config, base, mixing.as_deref(), &candidates)?;
                Ok((schemes, candidates))
            }
        }
    }

    /// One scheme for all layers and one for embedding and head, of which a mix has the size.
    ///
    /// # Errors
    /// [`Error::Request`] for bits of the head that there are not, [`Error::Format`] for bits that the format does not
    /// have.
    pub fn base(&self) -> Result<Schemes> {
        match self.codes {
            Codes::Integer(bits) => self.integers(bits),
            Codes::Trellis(linears) => {
                let usual = Schemes::trellis(linears);
                let head = match self.head_bits {
                    None => usual.head,
                    Some(16) => None,
                    Some(8) => Some(head_scheme(Bits::B8).into()),
                    Some(bits) => match Codes::of_bits(bits as f32, Some(linears.code()))? {
                        Codes::Trellis(scheme) => Some(scheme.into()),
                        Codes::Integer(_) => None,
                    },
                };
                Ok(Schemes { head, ..usual })
            }
        }
    }

    fn integers(&self, bits: Bits) -> Result<Schemes> {
        let own = default_scheme(bits);
        let fitting = self.format.scheme(bits, own)?;
        // Tuning knows integer zero-points, which fit blocks without super-blocks.
        let default = match self.format == ExportFormat::Gguf && self.tuning.is_some() {
            true => AffineScheme {
                group: Group::Size(32),
                ..own
            },
            false => fitting,
        };
        let zeros = self.zeros.unwrap_or(default.zeros);
        let group = self.group.unwrap_or(default.group);
        let super_blocks = self.format == ExportFormat::Gguf && !default.scales.is_half();
        let linears = match (zeros, group) == (default.zeros, default.group) {
            true => default,
            // Super-blocks have groups and offsets of their own; the other blocks take these.
            false if super_blocks => AffineScheme::new(bits, group, zeros),
            false => AffineScheme {
                group,
                zeros,
                ..default
            },
        };
        Ok(Schemes {
            linears: linears.into(),
            head: self.head()?.map(Scheme::from),
            ..Schemes::defaults(bits)
        })
    }

    /// The scheme of embedding and head beside integers.
    fn head(&self) -> Result<Option<AffineScheme>> {
        let bits = match self.head_bits {
            // As other makers of such files have it; what a mix gives is chosen in these bytes.
            None if self.format == ExportFormat::Gguf && self.mixes() => 6,
            None if self.format.dense_ends() => 16,
            Some(bits) if bits != 16 && self.format.dense_ends() => {
                let expected = format!("16, which loaders of {} need, or none", self.format.name());
                return refused("head-bits", expected, bits.to_string());
            }
            bits => bits.unwrap_or(8),
        };
        Ok(match bits {
            16 => None,
            bits => {
                let own = head_scheme(Bits::try_from(bits)?);
                Some(self.format.scheme(own.bits, own)?)
            }
        })
    }

    /// True if each weight may have a scheme of its own.
    fn chooses(&self) -> bool {
        match self.format {
            ExportFormat::Nq => true,
            ExportFormat::Gguf => self.tuning.is_none(),
            _ => false,
        }
    }

    /// True if layers, embedding and head get a mix of schemes, that is, if nothing asks for one scheme.
    pub fn mixes(&self) -> bool {
        let one =
            self.simple || self.zeros.is_some() || self.group.is_some() || self.head_bits.is_some();
        self.chooses() && !one && self.target.is_none() && self.codes.bits() < 8.0
    }

    /// The schemes of at least `least` bits among which weights can choose.
    fn candidates(&self, config: &ModelConfig, least: Bits) -> Vec<Scheme> {
        match self.format {
            _ if !self.chooses() => Vec::new(),
            ExportFormat::Nq => allocation::candidates(least),
            format => {
                let groups = groups::groups(config);
                let widths = groups
                    .iter()
                    .flat_map(|g| g.weights.iter().map(|w| w.1.cols));
                let candidates = format.candidates(least, widths).unwrap_or_default();
                candidates.into_iter().map(Scheme::from).collect()
            }
        }
    }

    /// What the codes and their differences from the format's defaults are called in names of models, such as
    /// `int4-g128` or `trellis4-head8`.
    ///
    /// # Errors
    /// Those of [`Recipe::base`].
    pub fn label(&self) -> Result<String> {
        let bits = self.codes.bits();
        let mut label = match self.codes {
            Codes::Integer(_) => format!("int{bits}"),
            Codes::Trellis(scheme) => match scheme.code() {
                Code::Octagon => format!("trellis{bits}"),
                Code::Sum => format!("trellis{bits}-sum"),
            },
        };
        if self.simple {
            label += "-simple";
        }
        Ok(label)
    }

    /// What differs from the format's defaults, as names of models say it: `-g128-sym-head8`.
    ///
    /// # Errors
    /// Those of [`Recipe::base`].
    pub fn differences(&self) -> Result<String> {
        let usual = Recipe {
            group: None,
            zeros: None,
            head_bits: None,
            simple: !self.mixes(),
            ..self.clone()
        };
        let (asked, usual) = (self.base()?, usual.base()?);
        let mut said = String::new();
        if asked.linears.group() != usual.linears.group() {
            said += &format!("-{}", asked.linears.group());
        }
        let zeros = |s: Scheme| s.affine().map(|s| s.zeros);
        if zeros(asked.linears) != zeros(usual.linears) {
            said += match zeros(asked.linears) {
                Some(Zeros::None) => "-sym",
                _ => "-asym",
            };
        }
        if asked.head != usual.head {
            let bits = asked.head.map_or(16.0, Scheme::bits);
            said += &format!("-head{bits}");
        }
        if self.vision_8 {
            said += "-vision8";
        }
        if let Some(bits) = self.table_bits {
            said += &format!("-table{}", bits.width());
        }
        match self.target {
            Some(TargetSize::Bytes(n)) => said += &format!("-{n}bytes"),
            Some(TargetSize::BitsPerWeight(x)) => said += &format!("-{x}bpw"),
            None => {}
        }
        Ok(said)
    }
}
