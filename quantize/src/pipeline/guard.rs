//! Chooses the schemes to try: those requested, those that fit a target size, and, if a quality
//! limit is missed, the smallest that are predicted to keep it.

use super::job::Job;
use super::search::{Tried, aim};
use super::state::{Attempt, State, save};
use crate::allocation::{self, Menu};
use crate::calibration::{PROMPTS, Sequences};
use crate::error::{Error, Result};
use crate::groups::{self, WeightGroup};
use crate::memory;
use crate::on_the_fly::rounded_weights;
use crate::quality::{Judge, QualityLimits, Text, nats};
use crate::recipe::TargetSize;
use crate::schemes::Schemes;
use crate::sensitivity;
use crate::tower::tower_bytes;
use nq_evals::Comparison;
use nq_formats::nq::Writer;
use nq_formats::{Progress, WeightStore, human_bytes, mapping};
use nq_load::load;
use nq_model::names::{EMBEDDING, HEAD};
use nq_runtime::ActivationChoice;

/// Most whole models made in search of one that keeps the limits.
const ATTEMPTS: usize = 6;

/// Saving in percent that is worth another run; and one worth another tuning, which takes long.
const WORTH: u64 = 1;
const WORTH_TUNING: u64 = 3;

/// Assumed share of the divergence that tuning leaves, until a tuning has shown it: small enough that
/// nothing is ruled out wrongly.
const LEFT_BY_TUNING: f64 = 0.6;

/// Try schemes only if their predicted divergence is at most this many times the limit.
const MOST_OVER_LIMIT: f64 = 1.3;

/// Tokens on which limits are looked at, and how many times as large as a limit their divergence is that nothing else
/// will bring there: methods halve it, and texts differ by less than that.
pub(super) const GLANCE: usize = 1024;
const FAR: f64 = 10.0;

/// What to do after a measurement.
pub(super) enum Next {
    /// Stop: the measured model is the result.
    Done,
    /// Try these schemes.
    Schemes(Schemes),
    /// Give up: no choice is good enough; with the reason, if there is more to say.
    Hopeless(Option<String>),
}

impl Attempt {
    pub(super) fn holds(&self, limits: &QualityLimits) -> bool {
        // A figure of NaN keeps no limit.
        limits.max_kld.is_none_or(|x| self.kld <= x)
            && limits.min_top1.is_none_or(|y| self.same_top1 >= y)
    }

    /// The share of the divergence that tuning left, if that was measured.
    fn left(&self) -> Option<f64> {
        let before = self.untuned.filter(|&before| before > 0.0)?;
        Some((self.kld / before).min(1.0))
    }

    /// The divergence at which all limits are kept, given that disagreement of best tokens grows with
    /// the size of changes, and divergence with its square.
    fn limit(&self, limits: &QualityLimits) -> f64 {
        let by_top1 = limits.min_top1.map(|y| {
            let found = (1.0 - self.same_top1).max(f64::MIN_POSITIVE);
            self.kld * ((1.0 - y) / found).powi(2)
        });
        let limits = [limits.max_kld, by_top1];
        limits.into_iter().flatten().fold(f64::INFINITY, f64::min)
    }
}

/// The first of the limits that 8-bit weights are far away from, as `found` on a short text of `positions`. As disagreement of best
/// tokens grows with the size of changes and divergence with its square, it is far at the root of what divergences may
/// be; and as it is counted on few positions, it is taken two standard errors lower than found (those of the root of a
/// count are one half).
fn far(limits: &QualityLimits, found: &Comparison, positions: usize) -> Option<Error> {
    const ON: &str = "which 8-bit weights have on a short text";
    let (kld, same, positions) = (found.kld.mean, found.same_top1, positions as f64);
    let count = (((1.0 - same) * positions).sqrt() - 1.0).max(0.0).powi(2);
    // NaN is near to no limit.
    let near = |limit: &f64| kld <= FAR * limit;
    if let Some(limit) = limits.max_kld.filter(|limit| !near(limit)) {
        return Some(Error::Request {
            what: "limit on the KL divergence",
            expected: format!("{} or more, {ON}", nats(kld)),
            found: nats(limit),
        });
    }
    let near = |limit: &f64| count <= FAR.sqrt() * (1.0 - limit) * positions;
    let limit = limits.min_top1.filter(|limit| !near(limit))?;
    Some(Error::Request {
        what: "limit on the share of same best tokens",
        expected: format!("{same:.4} or less, {ON}"),
        // 99.99% is .9998999999999999.
        found: ((limit * 1e6).round() / 1e6).to_string(),
    })
}

impl Job<'_> {
    /// True if limits are looked at before the work begins: if there are any, and the device holds whole models.
    pub(super) fn looks_ahead(&self, streamed: bool) -> bool {
        self.options.limits.any() && !self.options.resume && !streamed
    }

    /// Refuses limits from which 8 bits by rounding to nearest are far away, on a short text: so many bits and no better
    /// method, or fewer, do not reach them either.
    ///
    /// # Errors
    /// [`Error::Request`] with what was found; errors of loading and measuring.
    pub(super) fn check_reach(&self) -> Result<()> {
        if !self.looks_ahead(self.is_streamed()?) {
            return Ok(());
        }
        let ids = self.prompter()?.tokenizer().encode(PROMPTS)?;
        let text = Sequences {
            name: "prompts".into(),
            ids: vec![ids],
            ..Sequences::default()
        };
        let (config, files) = (self.config(), self.checkpoint.files());
        let judge = Judge::new(config, files, Text::HeldOut(&text), GLANCE)?;
        let rounded = rounded_weights(self.checkpoint, Schemes::of_8_bits(config))?;
        let load = |store: &dyn WeightStore| -> Result<_> {
            Ok(load(config, store, &self.options.load, &self.progress)?)
        };
        let source = judge.record(load(self.checkpoint.store())?.as_ref(), &self.progress)?;
        mapping::trim_heap();
        let found = source.compare(load(&rounded)?.as_ref(), &self.progress)?;
        mapping::trim_heap();
        let report = found.report;
        let far = |found| far(&self.options.limits, found, report.tokens);
        report.against.as_ref().and_then(far).map_or(Ok(()), Err)
    }

    /// The schemes to begin with, or to continue with after a run that was killed or failed.
    pub(super) fn first_schemes(
        &self,
        writer: &Writer,
        state: &mut State,
        calibration: Option<&Sequences>,
    ) -> Result<Schemes> {
        if let Some(held) = self.holding(state) {
            // A run that was killed while it tried a smaller choice continues with that.
            let begun = |next: &Schemes| state.overrides.as_ref() == Some(&next.overrides);
            let next = self.smaller_schemes(state, &held).filter(begun);
            return Ok(next.unwrap_or(held));
        }
        if !state.attempts.is_empty() {
            return Ok(match self.next_schemes(writer, state, calibration)? {
                Next::Schemes(schemes) => schemes,
                // Measure again, for the report: the staged model, if it was an attempt.
                Next::Done | Next::Hopeless(_) => {
                    let staged = state.overrides.as_ref().and_then(|o| state.attempt(o));
                    self.schemes_of(staged.unwrap_or(&state.attempts[0]))
                }
            });
        }
        let Some(target) = self.options.target else {
            return Ok(self.options.schemes.clone());
        };
        let budget = self.budget(target);
        let menus = self.menus(writer, state, calibration)?;
        let chosen = allocation::chosen_by(&self.options.schemes, menus);
        let of_menus = |chosen: &[usize]| -> u64 {
            let rows = allocation::choices(menus, chosen);
            rows.iter().map(|c| c.bytes).sum()
        };
        // Norms, and weights that no menu offers.
        let schemes = allocation::apply(&self.options.schemes, menus, &chosen);
        let fixed = self.bytes(&schemes) - of_menus(&chosen);
        let chosen = allocation::within_bytes(menus, budget.saturating_sub(fixed))?;
        Ok(allocation::apply(&self.options.schemes, menus, &chosen))
    }

    /// Decides what to do after `schemes` were measured; `broken` describes the limits they missed.
    pub(super) fn decide(
        &self,
        writer: &Writer,
        state: &mut State,
        schemes: &Schemes,
        broken: &[String],
        calibration: Option<&Sequences>,
    ) -> Result<Next> {
        let size = |schemes: &Schemes| human_bytes(self.bytes(schemes));
        let why = match broken {
            [] => "the limits hold".into(),
            broken => broken.join("; "),
        };
        let to = |verb: &str, next: Schemes| {
            let (from, to) = (size(schemes), size(&next));
            self.progress.note(&format!("{why} in {from}: {verb} {to}"));
            Ok(Next::Schemes(next))
        };
        if broken.is_empty() {
            return match self.smaller_schemes(state, schemes) {
                Some(next) => to("trying", next),
                None => Ok(Next::Done),
            };
        }
        let held = self.holding(state);
        if let Some(held) = held.filter(|held| held.overrides != schemes.overrides) {
            return match self.smaller_schemes(state, &held) {
                Some(next) => to("trying", next),
                None => to("going back to", held),
            };
        }
        match self.next_schemes(writer, state, calibration)? {
            Next::Schemes(next) => to("bits chosen by sensitivity, trying", next),
            done => Ok(done),
        }
    }

    /// The schemes of the smallest attempt that keeps all limits.
    pub(super) fn holding(&self, state: &State) -> Option<Schemes> {
        let limits = &self.options.limits;
        let holding = state.attempts.iter().filter(|a| a.holds(limits));
        Some(self.schemes_of(holding.min_by_key(|a| a.bytes)?))
    }

    /// Smaller schemes that are predicted to keep the limits too, if bits were raised to `schemes`
    /// and the result is better than needed.
    pub(super) fn smaller_schemes(&self, state: &State, schemes: &Schemes) -> Option<Schemes> {
        let limits = &self.options.limits;
        let menus = state.menus.as_deref()?;
        let held = state.attempt(&schemes.overrides)?;
        let raised = schemes.overrides != self.options.schemes.overrides;
        if !raised || !self.may_raise() || state.attempts.len() >= ATTEMPTS {
            return None;
        }
        let chosen = allocation::within_loss(menus, aim(&self.tried(state, menus))?)?;
        let next = allocation::apply(&self.options.schemes, menus, &chosen);
        let bytes = self.bytes(&next);
        let less = match self.options.tuning {
            Some(_) => WORTH_TUNING,
            None => WORTH,
        };
        // Worth it, unless an attempt of this size has failed before.
        let failed = |a: &Attempt| !a.holds(limits) && a.bytes >= bytes;
        let worth = 100 * bytes < (100 - less) * held.bytes && !state.attempts.iter().any(failed);
        (worth && state.attempt(&next.overrides).is_none()).then_some(next)
    }

    /// All attempts so far, as predictions from `menus` and shares of the limits.
    fn tried(&self, state: &State, menus: &[Menu]) -> Vec<Tried> {
        let attempts = state.attempts.iter().map(|a| Tried {
            predicted: self.predicted(menus, a),
            measured: self.expected(state, a) / a.limit(&self.options.limits),
            aimed: !a.out_of_reach && a.overrides != self.options.schemes.overrides,
        });
        attempts.collect()
    }

    /// The sum of the losses of an attempt's groups.
    fn predicted(&self, menus: &[Menu], attempt: &Attempt) -> f64 {
        let chosen = allocation::chosen_by(&self.schemes_of(attempt), menus);
        allocation::loss(menus, &chosen)
    }

    /// The share of a divergence that tuning leaves: as measured last, otherwise as assumed.
    fn left_by_tuning(&self, state: &State) -> f64 {
        let known = state.attempts.iter().rev().find_map(Attempt::left);
        known.unwrap_or(LEFT_BY_TUNING)
    }

    /// The divergence of an attempt, or an estimate of it after tuning if it was not tuned.
    fn expected(&self, state: &State, attempt: &Attempt) -> f64 {
        if attempt.out_of_reach {
            attempt.kld * self.left_by_tuning(state)
        } else {
            attempt.kld
        }
    }

    /// True if the method's result must be measured before tuning, which takes long: there are
    /// limits that other schemes may keep, and it is not known yet whether these do.
    pub(super) fn checks_before_tuning(&self, state: &State, schemes: &Schemes) -> Result<bool> {
        let known = state.attempt(&schemes.overrides);
        Ok(self.options.tuning.is_some()
            && self.may_raise()
            && !self.is_tuned(state, schemes)?
            && known.is_none_or(|a| !a.holds(&self.options.limits)))
    }

    /// True if tuning may bring the method's measured result within the limits.
    pub(super) fn is_within_reach(&self, state: &State, found: &Attempt) -> bool {
        let limit = found.limit(&self.options.limits);
        let expected = found.kld * self.left_by_tuning(state);
        if expected > limit {
            self.progress.note(&format!(
                "mean KL divergence {}, which tuning would reduce to about {}: not tuned, as {} is \
                 wanted",
                nats(found.kld),
                nats(expected),
                nats(limit)
            ));
        }
        expected <= limit
    }

    /// The schemes to try after several attempts, none of which keeps the limits.
    pub(super) fn next_schemes(
        &self,
        writer: &Writer,
        state: &mut State,
        calibration: Option<&Sequences>,
    ) -> Result<Next> {
        if !self.may_raise() {
            let target = self
                .options
                .target
                .map(|_| "the target size leaves no room to raise bits");
            return Ok(Next::Hopeless(target.map(str::to_owned)));
        }
        let Some(last) = state.attempts.last().cloned() else {
            return Ok(Next::Schemes(self.options.schemes.clone()));
        };
        self.menus(writer, state, calibration)?;
        let menus = state.menus.as_deref().unwrap_or_default();
        // The ratio of the measured divergence to the sum of all groups' losses, which includes the
        // method and its compensation of errors.
        let predicted = self.predicted(menus, &last).max(f64::MIN_POSITIVE);
        let scale = self.expected(state, &last) / predicted;
        let best = allocation::best(menus);
        let least = scale * allocation::loss(menus, &best);
        let reach = format!(
            "the best choice of bits is predicted to reach {}",
            nats(least)
        );
        if least.is_nan() || least > MOST_OVER_LIMIT * last.limit(&self.options.limits) {
            return Ok(Next::Hopeless(Some(reach)));
        }
        if state.attempts.len() >= ATTEMPTS {
            let tried = format!("{reach}, but {ATTEMPTS} attempts were not enough");
            return Ok(Next::Hopeless(Some(tried)));
        }
        let Some(mut loss) = aim(&self.tried(state, menus)) else {
            return Ok(Next::Hopeless(Some(reach)));
        };
        for _ in 0..32 {
            let chosen = allocation::within_loss(menus, loss).unwrap_or_else(|| best.clone());
            let schemes = allocation::apply(&self.options.schemes, menus, &chosen);
            if state.attempt(&schemes.overrides).is_none() {
                return Ok(Next::Schemes(schemes));
            }
            if chosen == best {
                break;
            }
            loss *= 0.9;
        }
        Ok(Next::Hopeless(Some(reach)))
    }

    /// The menus; measured on the first call.
    pub(super) fn menus<'s>(
        &self,
        writer: &Writer,
        state: &'s mut State,
        calibration: Option<&Sequences>,
    ) -> Result<&'s [Menu]> {
        if state.menus.is_none() {
            state.menus = Some(self.measure_menus(state, calibration)?);
            save(writer, state)?;
            mapping::trim_heap();
        }
        Ok(state.menus.as_deref().unwrap_or_default())
    }

    /// The groups of weights whose schemes are chosen.
    fn chosen_groups(&self) -> Vec<WeightGroup> {
        let mut groups = groups::groups(self.config());
        if self.options.head_fixed || self.options.schemes.head.is_none() {
            groups.retain(|g| !g.weights.iter().any(|w| w.0 == EMBEDDING || w.0 == HEAD));
        }
        groups
    }

    /// Bytes of all tensors of the text model that `target` allows.
    fn budget(&self, target: TargetSize) -> u64 {
        match target {
            TargetSize::Bytes(n) => {
                n.saturating_sub(tower_bytes(self.checkpoint, self.options.vision_8))
            }
            TargetSize::BitsPerWeight(x) => (x * self.config().parameters() as f64 / 8.0) as u64,
        }
    }

    /// Refuses a target size that no choice of schemes reaches, before anything is measured for it.
    pub(super) fn check_target(&self) -> Result<()> {
        let Some(target) = self.options.target else {
            return Ok(());
        };
        let (groups, candidates) = (self.chosen_groups(), &self.options.candidates);
        let smallest = allocation::smallest(&self.options.schemes, &groups, candidates);
        let (least, budget) = (self.bytes(&smallest), self.budget(target));
        if budget >= least {
            return Ok(());
        }
        let words = |bytes: u64| {
            let bits = 8.0 * bytes as f64 / self.config().parameters() as f64;
            format!("{bytes} bytes of tensors ({bits:.3} bits per weight)")
        };
        Err(Error::Request {
            what: "target size",
            expected: format!("at least {}", words(least)),
            found: words(budget),
        })
    }

    fn measure_menus(
        &self,
        state: &mut State,
        calibration: Option<&Sequences>,
    ) -> Result<Vec<Menu>> {
        let config = self.config();
        let groups = self.chosen_groups();
        let prompter = self.prompter()?;
        let (n, length) = sensitivity::shape(config, groups.len(), self.eval_tokens());
        let text = self.probe_text(&prompter, n, length, state)?;
        mapping::trim_heap();
        let mut stepper = self.stepper(ActivationChoice::F32)?;
        sensitivity::Probe {
            store: self.checkpoint.store(),
            text: &text.ids,
            groups: &groups,
            candidates: &self.options.candidates,
            method: self.method.as_ref(),
            calibration: calibration.map(|text| &text.ids[..]),
            progress: &self.progress,
        }
        .menus(stepper.as_mut())
    }

    /// The schemes of an attempt.
    fn schemes_of(&self, attempt: &Attempt) -> Schemes {
        Schemes {
            overrides: attempt.overrides.clone(),
            ..self.options.schemes.clone()
        }
    }

    /// Bytes of all tensors of the text model under `schemes`.
    pub(super) fn bytes(&self, schemes: &Schemes) -> u64 {
        memory::file_bytes(self.checkpoint, schemes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_evals::KldStats;

    #[test]
    fn limits_far_from_8_bit_weights_are_named() {
        let found = |mean, same_top1| Comparison {
            kld: KldStats {
                mean,
                ..KldStats::default()
            },
            same_top1,
            rms_dp: 0.0,
            ppl_ref: 1.0,
            ln_ppl_ratio: 0.0,
            ln_ppl_ratio_se: 0.0,
        };
        let named = |max_kld, min_top1, found: Comparison| {
            let limits = QualityLimits { max_kld, min_top1 };
            far(&limits, &found, 512).map(|e| e.to_string())
        };
        let usual = || found(0.000_37, 0.9873);
        assert_eq!(named(Some(0.000_04), Some(0.998), usual()), None);
        let kld = named(Some(0.000_03), Some(0.9999), usual()).unwrap();
        assert!(kld.contains("expected 0.00037 or more") && kld.ends_with("found 0.00003"));
        let top1 = named(Some(0.02), Some(0.9999), usual()).unwrap();
        assert!(top1.contains("expected 0.9873 or less") && top1.ends_with("found 0.9999"));
        assert!(named(None, Some(1.0), usual()).is_some());
        // One of 512 positions may be chance; all the same are no obstacle to the highest share.
        assert_eq!(named(None, Some(1.0), found(0.000_37, 511.0 / 512.0)), None);
        assert_eq!(named(None, Some(1.0), found(0.0, 1.0)), None);
        assert!(named(Some(1.0), None, found(f64::NAN, 1.0)).is_some());
    }
}
