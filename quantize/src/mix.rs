//! The default mix of schemes, chosen before anything of a model was measured: more bits where models
//! of this kind usually need them, in the bytes of one uniform scheme.
//!
//! The expected loss of a group of weights is the importance of a group of its kind and place, times
//! its number of elements, times the scheme's error on normally distributed values.
//! [`crate::sensitivity`] measures all this for a given model, which takes longer than quantizing a
//! large one.

use crate::allocation::{self, Candidate, Menu};
use crate::error::Result;
use crate::fit::Fit;
use crate::grid::Grid;
use crate::groups::{self, GroupPlace, WeightGroup};
use crate::linalg::Matrix;
use crate::methods::rtn;
use crate::schemes::{Schemes, not_made};
use nq_formats::{Bits, Scheme};
use nq_kernels::rng::Philox;
use nq_model::{LinearKind, ModelConfig};

/// `base` with those of `candidates` that are expected to lose least in the bytes that `base` takes for
/// what it quantizes. Weights that none of them fits keep their schemes.
///
/// # Errors
/// None for schemes that can be made.
pub(crate) fn mixed(
    config: &ModelConfig,
    base: &Schemes,
    candidates: &[Scheme],
) -> Result<Schemes> {
    let errors: Vec<f64> = candidates
        .iter()
        .map(|s| error(*s))
        .collect::<Result<_>>()?;
    let (mut menus, mut budget) = (Vec::new(), 0);
    for group in groups::groups(config) {
        let known = group.weights.first().and_then(|w| base.of(&w.0));
        let weight = importance(config, &group) * elements(&group) as f64;
        let candidate = |(&scheme, &error): (&Scheme, &f64)| Candidate {
            scheme,
            bytes: group.bytes(scheme),
            loss: weight * error,
        };
        let all = candidates.iter().zip(&errors);
        let fitting: Vec<_> = all
            .filter(|(s, _)| group.fits(**s))
            .map(candidate)
            .collect();
        let Some(known) = known.filter(|_| !fitting.is_empty()) else {
            continue;
        };
        budget += group.bytes(known);
        menus.push(Menu {
            weights: group.weights.iter().map(|w| w.0.clone()).collect(),
            group: group.name,
            candidates: fitting,
        });
    }
    Ok(match allocation::within_bytes(&menus, budget) {
        Ok(chosen) => allocation::apply(base, &menus, &chosen),
        Err(_) => base.clone(), // no choice fits the bytes of `base`
    })
}

/// The fewest bits in a mix at the size of `bits`: at 4 bits and more, nothing gets fewer than 4.
pub(crate) fn least(bits: Bits) -> Bits {
    bits.min(Bits::B4)
}

/// The schemes that a run begins with: `base`, or a mix of the schemes `mixing` at its size; schemes that do
/// not fit a weight's rows give way to those of `others`.
pub(crate) fn initial(
    config: &ModelConfig,
    base: Schemes,
    mixing: Option<&[Scheme]>,
    others: &[Scheme],
) -> Result<Schemes> {
    let schemes = match mixing {
        Some(candidates) => mixed(config, &base, candidates)?,
        None => base,
    };
    Ok(schemes.fitted(config, others))
}

fn elements(group: &WeightGroup) -> usize {
    group.weights.iter().map(|w| w.1.rows * w.1.cols).sum()
}

/// How much an error in a group's values matters, relative to an error in a gate in the middle of
/// the model, as measured on models of this kind: errors of the first layer affect everything after
/// it, and nothing after the head compensates for its errors.
fn importance(config: &ModelConfig, group: &WeightGroup) -> f64 {
    let GroupPlace::Layer { index, product } = group.place else {
        return 2.0;
    };
    let kind = config.layer(index).products()[product].linears[0].kind;
    match (index, kind) {
        (0, LinearKind::Q | LinearKind::O) => 4.0,
        (0, LinearKind::Down) => 3.0,
        (_, LinearKind::Down) => 1.3,
        _ => 1.0,
    }
}

/// Mean squared error of a scheme on normally distributed values.
fn error(scheme: Scheme) -> Result<f64> {
    let scheme = match scheme {
        Scheme::Affine(scheme) => scheme,
        Scheme::Trellis(scheme) => return Ok(scheme.squared_error()),
        Scheme::Exl3(scheme) => return Err(not_made(scheme)),
    };
    let mut rng = Philox::new(0, 0);
    let mut values = Matrix::zeros(32, 1024);
    values.data.iter_mut().for_each(|v| *v = rng.normal());
    let rounded = rtn::round(&values, Grid::new(scheme)?, Fit::clip(), &[]);
    Ok(rounded.change(&values).square_norm() / values.data.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_model::Preset;
    use nq_model::names::EMBEDDING;

    #[test]
    fn a_mix_takes_no_more_bytes_and_gives_bits_where_they_matter() {
        for preset in ["qwen3-0.6b", "qwen3-8b"] {
            let config = Preset::find(preset).unwrap().config();
            let base = Schemes::defaults(Bits::B4);
            let mix = mixed(&config, &base, &allocation::candidates(Bits::B4)).unwrap();
            let bytes = |schemes: &Schemes| -> u64 {
                let groups = groups::groups(&config).into_iter();
                groups
                    .map(|g| g.bytes(schemes.of(&g.weights[0].0).unwrap()))
                    .sum()
            };
            assert!(bytes(&mix) <= bytes(&base) && 100 * bytes(&mix) > 99 * bytes(&base));
            let bits = |name: &str| mix.of(name).unwrap().bits();
            let o = |layer: usize| bits(&format!("model.layers.{layer}.self_attn.o_proj"));
            assert!(o(0) > 4.0 && o(0) >= o(9));
            assert!(bits(EMBEDDING) < 8.0);
            // Weights that a kernel reads as one matrix have one scheme.
            let scheme = |part: &str| mix.of(&format!("model.layers.5.self_attn.{part}_proj"));
            assert!(scheme("q") == scheme("k") && scheme("k") == scheme("v"));
            mix.check(&config).unwrap();
        }
    }

    #[test]
    fn errors_fall_by_four_a_bit() {
        let error_at = |bits| error(crate::schemes::default_scheme(bits).into()).unwrap();
        let errors: Vec<f64> = [Bits::B3, Bits::B4, Bits::B5, Bits::B6]
            .map(error_at)
            .into();
        assert!(errors.windows(2).all(|e| e[1] < 0.45 * e[0]), "{errors:?}");
    }
}
