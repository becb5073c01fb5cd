//! The scheme of each weight of a model.

use crate::allocation;
use crate::error::{Error, Result};
use crate::grid::{Grid, Grids};
use nq_formats::names::{EMBEDDING, HEAD, Shape, is_kept, parameters};
use nq_formats::{AffineScheme, Bits, DType, Group, ModelConfig, Zeros};
use nq_kernels::registry::WeightKind;
use std::collections::BTreeMap;

/// Schemes by weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Schemes {
    /// Scheme of the layers' Linears.
    pub linears: AffineScheme,
    /// Scheme of the embedding and the head; `None` keeps them as they are.
    pub head: Option<AffineScheme>,
    /// Schemes of single weights, by name.
    pub overrides: BTreeMap<String, AffineScheme>,
}

/// The scheme that `nq quantize` uses for Linears by default.
pub const fn default_scheme(bits: Bits) -> AffineScheme {
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

impl Schemes {
    /// The defaults for Linears with `bits`-bit codes, with an 8-bit head.
    pub fn defaults(bits: Bits) -> Self {
        Schemes {
            linears: default_scheme(bits),
            head: Some(head_scheme(Bits::B8)),
            overrides: BTreeMap::new(),
        }
    }

    /// The scheme of the weight `name`; `None` if it is not quantized, as routers never are.
    pub fn of(&self, name: &str) -> Option<AffineScheme> {
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
        let all = self.head.iter().chain([&self.linears]);
        let mut groups = all.chain(self.overrides.values()).map(|s| s.group);
        groups.any(|group| matches!(group, Group::Size(n) if n < 32))
    }

    /// The schemes with those of `others` where scales of a span of inputs do not fill the rows of a
    /// weight: of those that do, the one of the fewest bytes that has as many bits, or more.
    pub fn fitted(mut self, config: &ModelConfig, others: &[AffineScheme]) -> Self {
        let all = allocation::groups(config).into_iter();
        for group in all.chain(allocation::mtp_groups(config)) {
            let Some(scheme) = group.weights.first().and_then(|w| self.of(&w.0)) else {
                continue;
            };
            let enough = |s: &&AffineScheme| s.bits >= scheme.bits && group.fits(**s);
            let order = |s: &&AffineScheme| (s.bits, s.zeros != scheme.zeros, group.bytes(**s));
            let best = others.iter().filter(enough).min_by_key(order);
            let spans = matches!(scheme.scales.span(), Some(Group::Size(_)));
            if let (Some(best), true) = (best, spans && !group.fits(scheme)) {
                let names = group.weights.iter().map(|w| w.0.clone());
                self.overrides.extend(names.map(|name| (name, *best)));
            }
        }
        self
    }

    /// What the weight `name` becomes, `dense` where it is kept.
    pub fn kind(&self, name: &str, dense: DType) -> WeightKind {
        match self.of(name) {
            Some(scheme) => WeightKind::Affine {
                scheme,
                act_order: false,
            },
            None => WeightKind::Dense(dense),
        }
    }

    /// The grids of a layer's Linears.
    ///
    /// # Errors
    /// Errors of [`Grid::new`].
    pub fn grids(&self, config: &ModelConfig, layer: usize) -> Result<Grids> {
        let linears = config.layer(layer).linears().into_iter();
        let grids = linears.map(|linear| {
            let scheme = self.of(&linear.name(layer)).unwrap_or(self.linears);
            Ok((linear.kind, Grid::new(scheme)?))
        });
        grids.collect()
    }

    /// Checks that the group size divides the rows: kernels do not support ragged groups, and no
    /// published model needs them.
    ///
    /// # Errors
    /// [`Error::Request`] with the first weight whose inputs are not a multiple of the group size.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        for (name, shape) in parameters(config) {
            let (Shape::Matrix(_, cols), Some(scheme)) = (shape, self.of(&name)) else {
                continue;
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
                            "a divisor of the {cols} inputs of {name}{}",
                            match [EMBEDDING, HEAD].contains(&name.as_str()) {
                                true => ", or --head-bits 16",
                                false => "",
                            }
                        ),
                        found: size.to_string(),
                    });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_formats::models::{LinearKind, Preset};

    #[test]
    fn overrides_come_first_and_the_head_has_its_own() {
        let mut schemes = Schemes::defaults(Bits::B4);
        assert_eq!(
            schemes.of("model.layers.0.mlp.up_proj").unwrap().bits,
            Bits::B4
        );
        assert_eq!(schemes.of(EMBEDDING).unwrap().bits, Bits::B8);
        schemes.head = None;
        assert_eq!(schemes.of(HEAD), None);
        let name = "model.layers.3.mlp.down_proj";
        schemes
            .overrides
            .insert(name.into(), default_scheme(Bits::B8));
        assert_eq!(schemes.of(name).unwrap().bits, Bits::B8);
        let config = Preset::find("qwen3-0.6b").unwrap().config();
        let grids = schemes.grids(&config, 3).unwrap();
        assert_eq!(grids[&LinearKind::Down].bits(), Bits::B8);
        assert_eq!(grids[&LinearKind::Up].bits(), Bits::B4);
    }
}
