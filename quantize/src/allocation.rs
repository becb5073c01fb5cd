//! Allocation of bits: chooses the scheme of each group of weights under a budget of bytes or of
//! loss.
//!
//! Losses of groups are assumed to add up, which holds as long as each is small (a KL divergence
//! is quadratic in small changes of the weights, and the changes of different weights are not
//! correlated). The choice is then a multiple-choice knapsack, solved by dynamic
//! programming over bytes. The caller measures the actual loss of a choice.

use crate::error::{Error, Result};
use crate::groups::WeightGroup;
use crate::report::Choice;
use crate::schemes::{Schemes, trellises};
use nq_formats::trellis::Code;
use nq_formats::{AffineScheme, Bits, Group, Scheme, Zeros};
use serde::{Deserialize, Serialize};

/// The schemes that nq's own files are chosen from, of at least `least` bits. Every device runs them:
/// groups have 32 inputs or more.
pub(crate) fn candidates(least: Bits) -> Vec<Scheme> {
    let plain = |bits, group, zeros| AffineScheme::new(bits, Group::Size(group), zeros);
    let scheme = |bits, group, zeros| plain(bits, group, zeros).two_level(Bits::B8);
    let all = [
        scheme(Bits::B3, 64, Zeros::Integer),
        scheme(Bits::B3, 32, Zeros::Integer),
        plain(Bits::B4, 128, Zeros::None),
        scheme(Bits::B4, 64, Zeros::Integer),
        plain(Bits::B4, 64, Zeros::Integer),
        scheme(Bits::B4, 32, Zeros::Integer),
        scheme(Bits::B5, 64, Zeros::Integer),
        scheme(Bits::B5, 32, Zeros::Integer),
        scheme(Bits::B6, 64, Zeros::None),
        scheme(Bits::B6, 32, Zeros::None),
        plain(Bits::B8, 128, Zeros::None),
        scheme(Bits::B8, 64, Zeros::None),
        scheme(Bits::B8, 32, Zeros::None),
    ];
    let enough = all.into_iter().filter(|s| s.bits >= least);
    enough.map(Scheme::from).collect()
}

/// The trellises of `code` that weights are chosen from, of at least `least` bits, and 8-bit codes above them.
pub(crate) fn trellis_candidates(code: Code, least: f32) -> Vec<Scheme> {
    let trellis = trellises(code);
    let eight = AffineScheme::new(Bits::B8, Group::Size(128), Zeros::None);
    let all = trellis.map(Scheme::from).chain([eight.into()]);
    let mut all: Vec<Scheme> = all.filter(|s| s.bits() >= least).collect();
    all.sort_by(|a, b| a.bits().total_cmp(&b.bits()));
    all
}

/// A scheme that a group can have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Candidate {
    /// The scheme.
    pub scheme: Scheme,
    /// Bytes of the group under it.
    pub bytes: u64,
    /// Its predicted loss, in nats of KL divergence.
    pub loss: f64,
}

/// The candidates for one group, at least one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Menu {
    /// The group's name.
    pub group: String,
    /// Names of its weights.
    pub weights: Vec<String>,
    /// The candidates.
    pub candidates: Vec<Candidate>,
}

/// For each menu, the index of the chosen candidate.
pub(crate) type Chosen = Vec<usize>;

/// Most steps that the range from the smallest to the largest model is divided into.
const STEPS: u64 = 1 << 16;

/// The least total loss for every number of bytes.
struct LossTable {
    smallest: u64,
    unit: u64,
    /// By units above the smallest size.
    loss: Vec<f64>,
    /// By menu and units, as far as it and those before can use them: the index of the chosen candidate.
    chosen: Vec<Vec<u8>>,
    /// Size of each candidate in units, by menu.
    units: Vec<Vec<usize>>,
}

impl LossTable {
    fn new(menus: &[Menu]) -> Self {
        let least = |m: &Menu| m.candidates.iter().map(|c| c.bytes).min().unwrap_or(0);
        let most = |m: &Menu| m.candidates.iter().map(|c| c.bytes).max().unwrap_or(0);
        let smallest = menus.iter().map(least).sum();
        let range: u64 = menus.iter().map(|m| most(m) - least(m)).sum();
        let deltas = menus
            .iter()
            .flat_map(|m| m.candidates.iter().map(|c| c.bytes - least(m)));
        let exact = deltas.fold(0, gcd).max(1);
        // A coarser unit rounds a candidate's bytes up, so that a budget is never exceeded.
        let unit = exact * (range / exact).div_ceil(STEPS).max(1);
        let units: Vec<Vec<usize>> = menus
            .iter()
            .map(|m| {
                let units = |c: &Candidate| (c.bytes - least(m)).div_ceil(unit) as usize;
                m.candidates.iter().map(units).collect()
            })
            .collect();
        // For each number of units, as far as the menus so far can use them: more are of no use.
        let mut loss = vec![0f64];
        let mut chosen = Vec::with_capacity(menus.len());
        for (menu, units) in menus.iter().zip(&units) {
            let used = loss.len() + units.iter().max().unwrap_or(&0);
            loss.resize(used, loss[loss.len() - 1]);
            let mut next = vec![f64::INFINITY; used];
            let mut by = vec![0u8; used];
            for (i, (candidate, &cost)) in menu.candidates.iter().zip(units).enumerate() {
                let from = next[cost..].iter_mut().zip(&mut by[cost..]).zip(&loss);
                for ((next, by), before) in from {
                    let total = before + candidate.loss;
                    if total < *next {
                        (*next, *by) = (total, i as u8);
                    }
                }
            }
            loss = next;
            chosen.push(by);
        }
        LossTable {
            smallest,
            unit,
            loss,
            chosen,
            units,
        }
    }

    fn at(&self, mut units: usize) -> Chosen {
        let mut chosen = vec![0; self.chosen.len()];
        for (menu, by) in self.chosen.iter().enumerate().rev() {
            let i = usize::from(by[units.min(by.len() - 1)]);
            chosen[menu] = i;
            units -= self.units[menu][i];
        }
        chosen
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The candidates with the least total loss in at most `budget` bytes.
///
/// # Errors
/// [`Error::Request`] if not even the smallest candidates fit.
pub(crate) fn within_bytes(menus: &[Menu], budget: u64) -> Result<Chosen> {
    let table = LossTable::new(menus);
    if budget < table.smallest {
        return Err(Error::Request {
            what: "target size",
            expected: format!(
                "at least {} bytes for the quantized weights",
                table.smallest
            ),
            found: format!("{budget} bytes"),
        });
    }
    let units = ((budget - table.smallest) / table.unit) as usize;
    Ok(table.at(units.min(table.loss.len() - 1)))
}

/// The choice with the fewest bytes whose total loss is at most `limit`; `None` if no choice is
/// that good.
pub(crate) fn within_loss(menus: &[Menu], limit: f64) -> Option<Chosen> {
    let table = LossTable::new(menus);
    let units = table.loss.iter().position(|&l| l <= limit)?;
    Some(table.at(units))
}

/// The choice with the least total loss.
pub(crate) fn best(menus: &[Menu]) -> Chosen {
    let least = |m: &Menu| {
        let by_loss = |a: &&Candidate, b: &&Candidate| a.loss.total_cmp(&b.loss);
        let best = m.candidates.iter().min_by(by_loss);
        best.and_then(|b| m.candidates.iter().position(|c| c == b))
    };
    menus.iter().map(|m| least(m).unwrap_or(0)).collect()
}

/// Total loss of a choice.
pub(crate) fn loss(menus: &[Menu], chosen: &[usize]) -> f64 {
    let loss = |(m, &i): (&Menu, &usize)| m.candidates[i].loss;
    menus.iter().zip(chosen).map(loss).sum()
}

/// The report's rows for `chosen`.
pub(crate) fn choices(menus: &[Menu], chosen: &[usize]) -> Vec<Choice> {
    let row = |(m, &i): (&Menu, &usize)| Choice {
        group: m.group.clone(),
        scheme: m.candidates[i].scheme.to_string(),
        bytes: m.candidates[i].bytes,
        loss: m.candidates[i].loss,
    };
    menus.iter().zip(chosen).map(row).collect()
}

/// `base` with the smallest candidate for each of `groups`: no choice takes fewer bytes.
pub(crate) fn smallest(base: &Schemes, groups: &[WeightGroup], candidates: &[Scheme]) -> Schemes {
    let mut schemes = base.clone();
    for group in groups {
        let fitting = candidates.iter().filter(|s| group.fits(**s));
        let Some(&scheme) = fitting.min_by_key(|s| group.bytes(**s)) else {
            continue;
        };
        let names = group.weights.iter().map(|w| w.0.clone());
        schemes.overrides.extend(names.map(|name| (name, scheme)));
    }
    schemes
}

/// `base` with the chosen schemes.
pub(crate) fn apply(base: &Schemes, menus: &[Menu], chosen: &[usize]) -> Schemes {
    let mut schemes = base.clone();
    for (menu, &i) in menus.iter().zip(chosen) {
        for weight in &menu.weights {
            schemes
                .overrides
                .insert(weight.clone(), menu.candidates[i].scheme);
        }
    }
    schemes
}

/// The choice that corresponds to `schemes`, for predicting their loss. A scheme that is not a
/// candidate counts as the candidate of the same bits with the nearest number of
/// bytes.
pub(crate) fn chosen_by(schemes: &Schemes, menus: &[Menu]) -> Chosen {
    let find = |m: &Menu| {
        let scheme = m.weights.first().and_then(|w| schemes.of(w))?;
        let exact = m.candidates.iter().position(|c| c.scheme == scheme);
        let near = || {
            let alike = |c: &&Candidate| c.scheme.bits() == scheme.bits();
            let group = |s: Scheme| s.group().size(1 << 20);
            let distance = |c: &&Candidate| group(c.scheme).abs_diff(group(scheme));
            let best = m.candidates.iter().filter(alike).min_by_key(distance)?;
            m.candidates.iter().position(|c| c == best)
        };
        exact.or_else(near)
    };
    menus.iter().map(|m| find(m).unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::groups;

    fn menu(name: &str, options: &[(u64, f64)]) -> Menu {
        let schemes = candidates(Bits::B4);
        let candidate = |(i, &(bytes, loss)): (usize, &(u64, f64))| Candidate {
            scheme: schemes[i],
            bytes,
            loss,
        };
        Menu {
            group: name.into(),
            weights: vec![name.into()],
            candidates: options.iter().enumerate().map(candidate).collect(),
        }
    }

    fn menus() -> Vec<Menu> {
        vec![
            menu("a", &[(40, 9.0), (48, 5.0), (80, 0.1)]),
            menu("b", &[(100, 3.0), (120, 2.5), (200, 0.2)]),
            menu("c", &[(10, 4.0), (20, 0.5)]),
        ]
    }

    /// All possible choices.
    fn every(menus: &[Menu]) -> Vec<Chosen> {
        let mut all = vec![Vec::new()];
        for menu in menus {
            all = all
                .iter()
                .flat_map(|c: &Chosen| (0..menu.candidates.len()).map(|i| [&c[..], &[i]].concat()))
                .collect();
        }
        all
    }

    fn bytes(menus: &[Menu], chosen: &[usize]) -> u64 {
        choices(menus, chosen).iter().map(|c| c.bytes).sum()
    }

    /// Blocks of 256 inputs hold two heads of 128, and cannot be moved head by head.
    #[test]
    fn groups_end_within_heads_that_formats_move() {
        let super_blocks = AffineScheme::new(Bits::B6, Group::Size(256), Zeros::None);
        let fitting = |preset: &str| {
            let config = nq_model::Preset::find(preset).unwrap().config();
            let all = groups(&config);
            let fits = |part: &str| {
                let name = format!("model.layers.0.{part}");
                let group = all.iter().find(|g| g.weights.iter().any(|w| w.0 == name));
                let group = group.unwrap();
                assert!(candidates(Bits::B4).iter().all(|s| group.fits(*s)));
                group.fits(super_blocks.into())
            };
            ["linear_attn.out_proj", "mlp.up_proj"].map(fits)
        };
        assert_eq!(fitting("qwen3.5-4b"), [false, true]);
        // As many value heads as key heads: the order is the same everywhere.
        assert_eq!(fitting("qwen3.5-0.8b"), [true, true]);
    }

    #[test]
    fn both_searches_find_what_trying_everything_finds() {
        let menus = menus();
        let all = every(&menus);
        for budget in 150..310 {
            let found = within_bytes(&menus, budget).unwrap();
            assert!(bytes(&menus, &found) <= budget);
            let fits = all.iter().filter(|c| bytes(&menus, c) <= budget);
            let least = fits.map(|c| loss(&menus, c)).fold(f64::INFINITY, f64::min);
            assert!((loss(&menus, &found) - least).abs() < 1e-12, "{budget}");
        }
        for limit in [0.9, 1.0, 3.0, 4.2, 6.0, 8.5, 12.0, 16.5] {
            let found = within_loss(&menus, limit).unwrap();
            let holds = all.iter().filter(|c| loss(&menus, c) <= limit);
            let least = holds.map(|c| bytes(&menus, c)).min().unwrap();
            assert_eq!(bytes(&menus, &found), least, "{limit}");
        }
        assert!(within_loss(&menus, 0.7).is_none());
        assert_eq!(best(&menus), [2, 2, 1]);
        let error = within_bytes(&menus, 149).unwrap_err().to_string();
        assert!(error.contains("at least 150 bytes"), "{error}");
    }

    #[test]
    fn coarse_units_never_exceed_the_budget() {
        let scale = |m: &Menu| {
            let options: Vec<(u64, f64)> = m
                .candidates
                .iter()
                .map(|c| (c.bytes * 1_000_003 + u64::from(c.bytes > 45), c.loss))
                .collect();
            menu(&m.group, &options)
        };
        let menus: Vec<Menu> = menus().iter().map(scale).collect();
        for budget in (151_000_460..310_000_000).step_by(7_654_321) {
            let found = within_bytes(&menus, budget).unwrap();
            assert!(bytes(&menus, &found) <= budget);
        }
    }

    #[test]
    fn schemes_go_there_and_back() {
        let (menus, chosen) = (menus(), vec![1, 2, 0]);
        let schemes = apply(&Schemes::defaults(Bits::B4), &menus, &chosen);
        assert_eq!(chosen_by(&schemes, &menus), chosen);
        assert_eq!(schemes.of("a"), Some(menus[0].candidates[1].scheme));
    }
}
