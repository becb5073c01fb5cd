//! The scheme of each weight of a model.

use crate::error::{Error, Result};
use crate::grid::Grid;
use crate::groups;
use nq_formats::trellis::{BLOCK, Code};
use nq_formats::{AffineScheme, Bits, Exl3Scheme, Group, Scheme, TrellisScheme, Zeros, nq};
use nq_kernels::registry::WeightKind;
use nq_model::names::{EMBEDDING, HEAD, Shape, is_kept, is_layer_linear, parameters};
use nq_model::{DType, Dims, LinearKind, LinearSpec, ModelConfig, NgramTable};
use std::collections::BTreeMap;

/// The schemes of a layer's Linears.
pub(crate) type LayerSchemes = BTreeMap<LinearKind, Scheme>;

/// Schemes by weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Schemes {
    /// Scheme of the layers' Linears.
    pub linears: Scheme,
    /// Scheme of the embedding and the head; `None` keeps them as they are.
    pub head: Option<Scheme>,
    /// Scheme of tables of n-grams; `None` keeps them as they are.
    pub tables: Option<Scheme>,
    /// Schemes of single weights, by name.
    pub overrides: BTreeMap<String, Scheme>,
}

/// The sizes of groups that nq makes, besides whole rows.
pub(crate) const GROUP_SIZES: [u32; 3] = [32, 64, 128];

/// The group that commands call 32, 64, 128 or channel; `None` for other words.
pub fn group_named(word: &str) -> Option<Group> {
    match word {
        "channel" => Some(Group::Channel),
        size => {
            let size = size.parse().ok().filter(|size| GROUP_SIZES.contains(size));
            size.map(Group::Size)
        }
    }
}

/// The scheme that `nq quantize` uses for Linears by default.
pub(crate) const fn default_scheme(bits: Bits) -> AffineScheme {
    match bits {
        Bits::B4 => AffineScheme::new(bits, Group::Size(64), Zeros::Integer),
        Bits::B8 => AffineScheme::new(bits, Group::Size(128), Zeros::None),
        Bits::B6 => AffineScheme::new(bits, Group::Size(64), Zeros::None).two_level(Bits::B8),
        _ => AffineScheme::new(bits, Group::Size(32), Zeros::Integer).two_level(Bits::B8),
    }
}

/// The scheme of an embedding or head with `bits`-bit codes. At 4 bits, its groups are half as long
/// as those of Linears: nothing after the head compensates for its errors.
pub const fn head_scheme(bits: Bits) -> AffineScheme {
    match bits {
        Bits::B4 => AffineScheme::new(bits, Group::Size(32), Zeros::Integer),
        _ => default_scheme(bits),
    }
}

/// The scheme of a table of n-grams with `bits`-bit codes, whose rows are `width` wide: in groups of 32, or of whole rows
/// where these do not fill them.
pub(crate) fn table_scheme(bits: Bits, width: usize) -> AffineScheme {
    let group = match width.is_multiple_of(32) {
        true => Group::Size(32),
        false => Group::Channel,
    };
    let zeros = match bits {
        Bits::B4 => Zeros::Integer,
        _ => Zeros::None,
    };
    AffineScheme::new(bits, group, zeros)
}

impl Schemes {
    /// The defaults for Linears with `bits`-bit codes, with an 8-bit head.
    pub fn defaults(bits: Bits) -> Self {
        Schemes {
            linears: default_scheme(bits).into(),
            head: Some(head_scheme(Bits::B8).into()),
            tables: None,
            overrides: BTreeMap::new(),
        }
    }

    /// 8-bit codes in the longest groups that fill every weight of the model.
    pub(crate) fn of_8_bits(config: &ModelConfig) -> Self {
        let in_groups = |group| {
            let scheme = AffineScheme::new(Bits::B8, group, Zeros::None).into();
            Schemes {
                linears: scheme,
                head: Some(scheme),
                tables: None,
                overrides: BTreeMap::new(),
            }
        };
        let sizes = GROUP_SIZES.into_iter().rev().map(Group::Size);
        let mut all = sizes.map(in_groups);
        let fits = all.find(|schemes| schemes.check(config).is_ok());
        fits.unwrap_or_else(|| in_groups(Group::Channel))
    }

    /// Trellises: `linears` for Linears, and two bits more, at most 6, for the head.
    pub fn trellis(linears: TrellisScheme) -> Self {
        let least = linears.bits() + 2.0;
        let wide = trellises(linears.code()).filter(|s| s.bits() <= least);
        let head = wide.max_by(|a, b| a.bits().total_cmp(&b.bits()));
        Schemes {
            linears: linears.into(),
            head: head.map(Scheme::from),
            tables: None,
            overrides: BTreeMap::new(),
        }
    }

    /// Every scheme in it.
    pub(crate) fn all(&self) -> impl Iterator<Item = Scheme> {
        let own = (self.head.iter())
            .chain(&self.tables)
            .chain([&self.linears]);
        own.chain(self.overrides.values()).copied()
    }

    /// What the codes of the layers are called; `asked` has the bits that chose the mix of schemes, if they did.
    pub fn called(&self, asked: Option<f32>) -> String {
        let trellis = match self.linears.trellis() {
            Some(_) => "trellis ",
            None => "",
        };
        let layers = self.overrides.iter();
        let layers = layers.filter(|(name, _)| is_layer_linear(name));
        match asked {
            _ if self.overrides.is_empty() => nq::called([self.linears].into_iter()),
            Some(bits) => format!("{bits}-bit {trellis}mix"),
            None => nq::called(layers.map(|(_, s)| *s)),
        }
    }

    /// True if any weight is in a trellis.
    pub(crate) fn have_trellis(&self) -> bool {
        self.all().any(|s| s.trellis().is_some())
    }

    /// The scheme of the weight `name`; `None` if it is not quantized, as routers never are.
    pub fn of(&self, name: &str) -> Option<Scheme> {
        if NgramTable::part_of(name).is_some() {
            return self.tables;
        }
        if is_kept(name) {
            return None;
        }
        if let Some(scheme) = self.overrides.get(name) {
            return Some(*scheme);
        }
        if name == EMBEDDING || name == HEAD {
            return self.head;
        }
        Some(self.linears)
    }

    /// True if some groups are so short that no GPU has kernels for them.
    pub(crate) fn need_cpu(&self) -> bool {
        let mut groups = self.all().map(Scheme::group);
        groups.any(|group| matches!(group, Group::Size(n) if n < 32))
    }

    /// The schemes with those of `others` where scales of a span of inputs do not fill the rows of a
    /// weight: of those that do, the one of the fewest bytes that has as many bits, or more.
    pub(crate) fn fitted(mut self, config: &ModelConfig, others: &[Scheme]) -> Self {
        let all = groups::groups(config).into_iter();
        for group in all.chain(groups::mtp_groups(config)) {
            let known = group.weights.first().and_then(|w| self.of(&w.0));
            let Some(scheme) = known.and_then(Scheme::affine) else {
                continue;
            };
            let affine = others.iter().filter_map(|s| s.affine());
            let enough = |s: &AffineScheme| s.bits >= scheme.bits && group.fits((*s).into());
            let order = |s: &AffineScheme| {
                let bytes = group.bytes((*s).into());
                (s.bits, s.zeros != scheme.zeros, bytes)
            };
            let best = affine.filter(enough).min_by_key(order);
            let spans = matches!(scheme.scales.span(), Some(Group::Size(_)));
            if let (Some(best), true) = (best, spans && !group.fits(scheme.into())) {
                let names = group.weights.iter().map(|w| w.0.clone());
                (self.overrides).extend(names.map(|name| (name, best.into())));
            }
        }
        self
    }

    /// What the weight `name` becomes, `dense` where it is kept.
    pub fn kind(&self, name: &str, dense: DType) -> WeightKind {
        match self.of(name) {
            Some(scheme) => WeightKind::in_scheme(scheme, false),
            None => WeightKind::Dense(dense),
        }
    }

    /// The schemes of a layer's Linears.
    pub(crate) fn of_layer(&self, config: &ModelConfig, layer: usize) -> LayerSchemes {
        let linears = config.layer(layer).linears().into_iter();
        let scheme = |linear: &LinearSpec| self.of(&linear.name(layer)).unwrap_or(self.linears);
        linears
            .map(|linear| (linear.kind, scheme(linear)))
            .collect()
    }

    /// The sizes of groups that divide the inputs of every weight that is quantized, in words.
    fn fitting(&self, config: &ModelConfig) -> String {
        let inputs = |(name, shape): (String, Shape)| match shape {
            Shape::Matrix(_, cols) if self.of(&name).is_some() => Some(cols),
            _ => None,
        };
        let inputs: Vec<usize> = parameters(config).into_iter().filter_map(inputs).collect();
        let sizes = GROUP_SIZES.into_iter();
        let fitting = sizes.filter(|size| {
            inputs
                .iter()
                .all(|cols| cols.is_multiple_of(*size as usize))
        });
        let words: Vec<String> = fitting.map(|size| format!("{size} or ")).collect();
        words.concat() + "channel"
    }

    /// Checks that groups, or the blocks of a trellis, fill the rows: kernels do not support ragged groups, and no
    /// published model needs them.
    ///
    /// # Errors
    /// [`Error::Request`] with the first weight that they do not fill.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        for (name, shape) in parameters(config) {
            let (Shape::Matrix(_, cols), Some(scheme)) = (shape, self.of(&name)) else {
                continue;
            };
            let scheme = match scheme {
                Scheme::Affine(scheme) => scheme,
                Scheme::Exl3(scheme) => return Err(not_made(scheme)),
                Scheme::Trellis(scheme) => {
                    let Err(_) = scheme.check(Dims::new(0, cols)) else {
                        continue;
                    };
                    return Err(Error::Request {
                        what: "trellis",
                        expected: format!("a multiple of {BLOCK} inputs of {name}"),
                        found: cols.to_string(),
                    });
                }
            };
            Grid::new(scheme)?;
            let sizes = [
                ("group size", Some(scheme.group)),
                ("span of scales", scheme.scales.span()),
            ];
            for (what, size) in sizes {
                if let Some(Group::Size(size)) = size
                    && !cols.is_multiple_of(size as usize)
                {
                    return Err(Error::Request {
                        what,
                        expected: format!(
                            "a divisor of the {cols} inputs of {name}{} ({} would fit every weight)",
                            match [EMBEDDING, HEAD].contains(&name.as_str()) {
                                true => ", or --head-bits 16",
                                false => "",
                            },
                            self.fitting(config)
                        ),
                        found: size.to_string(),
                    });
                }
            }
        }
        Ok(())
    }
}

/// The codes of the layers' Linears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Integers of this width.
    Integer(Bits),
    /// Paths through a trellis.
    Trellis(TrellisScheme),
}

impl Codes {
    /// Codes of so many bits: 3, 4, 5, 6 or 8 of integers; of a trellis 2, 2.5, 3, 3.5, 4, 5 by the code octagon, 2, 3, 4
    /// and 5 by the code sum, and 6 by the code sum for either.
    ///
    /// # Errors
    /// [`Error::Request`] for other bits.
    pub fn of_bits(bits: f32, trellis: Option<Code>) -> Result<Self> {
        let known: Vec<Codes> = match trellis {
            None => Bits::ALL.into_iter().map(Codes::Integer).collect(),
            Some(code) => trellises(code).map(Codes::Trellis).collect(),
        };
        let found = known.iter().find(|codes| codes.bits() == bits);
        found.copied().ok_or_else(|| {
            let mut bits_known: Vec<f32> = known.iter().map(|codes| codes.bits()).collect();
            bits_known.sort_by(f32::total_cmp);
            let names: Vec<String> = bits_known.iter().map(f32::to_string).collect();
            let code = trellis.map_or(String::new(), |code| format!(" of the trellis code {code}"));
            Error::Request {
                what: "bits",
                expected: format!("{}{code}", names.join(", ")),
                found: bits.to_string(),
            }
        })
    }

    /// [`Codes::of_bits`] with the trellis code by its name, octagon or sum; `None`: integers.
    ///
    /// # Errors
    /// Those of [`Codes::of_bits`]; [`Error::Format`] for another name.
    pub fn of_names(bits: f32, trellis: Option<&str>) -> Result<Self> {
        Codes::of_bits(bits, trellis.map(str::parse).transpose()?)
    }

    /// Bits of a weight.
    pub fn bits(self) -> f32 {
        match self {
            Codes::Integer(bits) => bits.width() as f32,
            Codes::Trellis(scheme) => scheme.bits(),
        }
    }
}

impl From<Bits> for Codes {
    fn from(bits: Bits) -> Self {
        Codes::Integer(bits)
    }
}

/// The trellises that nq chooses among where it uses `code`: octagon's pairs do not reach 6 bits.
pub(crate) fn trellises(code: Code) -> impl Iterator<Item = TrellisScheme> {
    TrellisScheme::all().filter(move |s| s.code() == code || s.bits() > 5.0)
}

/// EXL3 is read, and never what a weight is quantized to.
pub(crate) fn not_made(scheme: Exl3Scheme) -> Error {
    Error::Request {
        what: "scheme",
        expected: "one that nq makes".into(),
        found: scheme.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_model::Preset;

    #[test]
    fn overrides_come_first_and_the_head_has_its_own() {
        let mut schemes = Schemes::defaults(Bits::B4);
        assert_eq!(
            schemes.of("model.layers.0.mlp.up_proj").unwrap().bits(),
            4.0
        );
        assert_eq!(schemes.of(EMBEDDING).unwrap().bits(), 8.0);
        schemes.head = None;
        assert_eq!(schemes.of(HEAD), None);
        let name = "model.layers.3.mlp.down_proj";
        schemes
            .overrides
            .insert(name.into(), default_scheme(Bits::B8).into());
        assert_eq!(schemes.of(name).unwrap().bits(), 8.0);
        let config = Preset::find("qwen3-0.6b").unwrap().config();
        let layer = schemes.of_layer(&config, 3);
        assert_eq!(layer[&LinearKind::Down].bits(), 8.0);
        assert_eq!(layer[&LinearKind::Up].bits(), 4.0);
    }

    #[test]
    fn trellises_fill_blocks() {
        let trellis = |code, bits| TrellisScheme::of_bits(code, bits).unwrap();
        let schemes = Schemes::trellis(trellis(Code::Octagon, 3.0));
        assert_eq!(schemes.head, Some(trellis(Code::Octagon, 5.0).into()));
        let four = Schemes::trellis(trellis(Code::Octagon, 4.0));
        assert_eq!(four.head, Some(trellis(Code::Sum, 6.0).into()));
        for preset in ["qwen3-0.6b", "qwen3-30b-a3b"] {
            let config = Preset::find(preset).unwrap().config();
            schemes.check(&config).unwrap();
        }
        let mut config = Preset::find("qwen3-30b-a3b").unwrap().config();
        let mut experts = config.experts.unwrap();
        experts.width = 320;
        config.experts = Some(experts);
        let error = schemes.check(&config).unwrap_err().to_string();
        assert!(
            error.contains("down_proj") && error.contains("320"),
            "{error}"
        );
        config = Preset::find("qwen3-0.6b").unwrap().config();
        config.intermediate_size = 3000;
        let error = schemes.check(&config).unwrap_err().to_string();
        assert!(
            error.contains("down_proj") && error.contains("3000"),
            "{error}"
        );
    }

    #[test]
    fn groups_that_do_not_divide_are_told_which_would() {
        let mut config = Preset::find("qwen3-0.6b").unwrap().config();
        let refused = |config: &ModelConfig| {
            Schemes::defaults(Bits::B8)
                .check(config)
                .unwrap_err()
                .to_string()
        };
        let fine = |config: &ModelConfig| Schemes::of_8_bits(config).linears.group();
        assert_eq!(fine(&config), Group::Size(128));
        config.intermediate_size = 3008;
        assert_eq!(
            refused(&config),
            "group size: expected a divisor of the 3008 inputs of model.layers.0.mlp.down_proj \
             (32 or 64 or channel would fit every weight), found 128"
        );
        assert_eq!(fine(&config), Group::Size(64));
        config.intermediate_size = 3000;
        assert_eq!(fine(&config), Group::Channel);
        assert!(refused(&config).contains("(channel would fit every weight)"));
    }
}
