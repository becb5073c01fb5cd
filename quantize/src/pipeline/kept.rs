//! Whole models that stay staged while others are made, so that a search for schemes that returns
//! to one neither rounds nor tunes it again. Each has a set of steps of its own.

use super::ends::table_step;
use super::job::Job;
use super::state::{Attempt, ENDS, Kept, MTP, Overrides, State, StepReport, key, save, step_name};
use crate::error::Result;
use crate::schemes::Schemes;
use nq_formats::nq::Writer;
use nq_formats::{Progress, human_bytes};
use nq_model::ModelConfig;
use std::cmp::Reverse;
use std::collections::BTreeMap;

impl State {
    /// Forgets kept models whose sets no longer exist.
    pub(super) fn forget_missing(&mut self, there: &[usize]) {
        self.kept.retain(|k| there.contains(&k.set));
    }

    /// The attempt with these overrides, if it was measured.
    pub(super) fn attempt(&self, overrides: &Overrides) -> Option<&Attempt> {
        self.attempts.iter().find(|a| a.overrides == *overrides)
    }

    /// The numbers of all sets of steps in use.
    fn sets(&self) -> Vec<usize> {
        let kept = self.kept.iter().map(|k| k.set);
        kept.chain([self.set]).collect()
    }

    /// Keeps the staged model, to be returned to, and switches to an unused set of steps.
    fn put_aside(&mut self, overrides: Overrides) {
        let unused = (0..).find(|n| !self.sets().contains(n));
        self.kept.push(Kept {
            set: self.set,
            overrides,
            steps: std::mem::take(&mut self.steps),
            // The schedule is the same for all.
            tuning: self.tuning.clone(),
        });
        self.set = unused.expect("there are more numbers than sets");
    }

    /// Replaces the staged model with the one kept for `overrides`. Returns false if
    /// none is kept.
    fn take_up(&mut self, overrides: &Overrides) -> bool {
        let Some(i) = self.kept.iter().position(|k| k.overrides == *overrides) else {
            return false;
        };
        let kept = self.kept.remove(i);
        self.set = kept.set;
        self.steps = kept.steps;
        self.tuning = kept.tuning;
        true
    }
}

/// True if another attempt keeps the same limits as `attempt` or more, in no more bytes.
fn is_dominated(attempt: &Attempt, all: &[Attempt]) -> bool {
    all.iter().any(|a| {
        let as_good =
            a.bytes <= attempt.bytes && a.kld <= attempt.kld && a.same_top1 >= attempt.same_top1;
        as_good && a.overrides != attempt.overrides
    })
}

/// Steps of a whole model.
pub(super) fn steps(c: &ModelConfig) -> usize {
    c.num_hidden_layers + 1 + c.mtp_layers + nq_runtime::ngrams::parts(c).count()
}

impl Job<'_> {
    /// Switches to the set of steps for `schemes`: the one kept for them, if any, or else a new
    /// one. The model staged for other schemes is kept if the search may return to it: if it was
    /// tuned, which takes long, or is the smallest that keeps the limits.
    ///
    /// # Errors
    /// If the state or the sets cannot be written.
    pub(super) fn enter(
        &self,
        writer: &mut Writer,
        state: &mut State,
        schemes: &Schemes,
    ) -> Result<()> {
        let present = state.overrides.replace(schemes.overrides.clone());
        let present = present.filter(|p| *p != schemes.overrides);
        let Some(present) = present else {
            writer.enter(state.set)?;
            return save(writer, state);
        };
        let from = state.set;
        let tuned = state.tuning.as_ref().is_some_and(|t| t.done);
        let keeps = self.is_worth_keeping(state, &present, tuned);
        let adopted = match keeps {
            true if state.tuning.is_none() => self.valid_steps(state, schemes),
            _ => BTreeMap::new(),
        };
        if keeps {
            state.put_aside(present);
        }
        let returns = state.take_up(&schemes.overrides);
        self.drop_useless(state);
        save(writer, state)?;
        writer.enter(state.set)?;
        writer.retain_sets(&state.sets())?;
        if !returns {
            self.make_room(writer, state, 2 * self.bytes(schemes))?;
        }
        if keeps && !returns {
            for step in adopted.keys() {
                writer.adopt(from, step)?;
            }
            state.steps = adopted;
            save(writer, state)?;
        }
        Ok(())
    }

    /// True if all steps under `schemes` are staged.
    ///
    /// # Errors
    /// A step that cannot be read.
    pub(super) fn is_staged(
        &self,
        writer: &Writer,
        state: &State,
        schemes: &Schemes,
    ) -> Result<bool> {
        let valid = self.valid_steps(state, schemes);
        if valid.len() < steps(self.config()) {
            return Ok(false);
        }
        for step in valid.keys() {
            if writer.staged(step)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The reports of the staged steps that are valid for `schemes`.
    fn valid_steps(&self, state: &State, schemes: &Schemes) -> BTreeMap<String, StepReport> {
        let config = self.config();
        let layers = config.num_hidden_layers;
        let mut valid = BTreeMap::new();
        let names = (0..layers).map(|i| (step_name(i), key(config, schemes, i + 1)));
        let ends = (ENDS.to_owned(), self.ends_key(schemes));
        let mtp = self.mtp_key(schemes).map(|key| (MTP.to_owned(), key));
        let parts = nq_runtime::ngrams::parts(config);
        let tables = parts.map(|(part, _)| table_step(schemes, &part));
        for (name, key) in names.chain([ends]).chain(mtp).chain(tables) {
            let step = state.steps.get(&name).filter(|s| s.key == key);
            valid.extend(step.map(|s| (name, s.clone())));
        }
        valid
    }

    fn is_worth_keeping(&self, state: &State, overrides: &Overrides, tuned: bool) -> bool {
        let Some(attempt) = state.attempt(overrides) else {
            return false;
        };
        let smallest = self
            .holding(state)
            .is_some_and(|s| s.overrides == *overrides);
        smallest || tuned && !is_dominated(attempt, &state.attempts)
    }

    fn drop_useless(&self, state: &mut State) {
        let kept = std::mem::take(&mut state.kept);
        let useful = |k: &Kept| {
            let tuned = k.tuning.as_ref().is_some_and(|t| t.done);
            self.is_worth_keeping(state, &k.overrides, tuned)
        };
        state.kept = kept.into_iter().filter(useful).collect();
    }

    /// Removes kept models until `needed` bytes can be written.
    fn make_room(&self, writer: &Writer, state: &mut State, needed: u64) -> Result<()> {
        while !writer.has_room(needed)? {
            let Some(i) = self.least_useful(state) else {
                // If it still does not fit, writing it will fail with an error.
                break;
            };
            let bytes = state
                .attempt(&state.kept[i].overrides)
                .map_or(0, |a| a.bytes);
            self.progress.note(&format!(
                "the disk has no room to keep the model made in {}",
                human_bytes(bytes)
            ));
            state.kept.remove(i);
            save(writer, state)?;
            writer.retain_sets(&state.sets())?;
        }
        Ok(())
    }

    /// The kept model that the search is least likely to return to: those that miss the limits
    /// before those that keep them, larger before smaller.
    fn least_useful(&self, state: &State) -> Option<usize> {
        let use_of = |k: &Kept| {
            let attempt = state.attempt(&k.overrides);
            let holds = attempt.is_some_and(|a| a.holds(&self.options.limits));
            (holds, Reverse(attempt.map_or(0, |a| a.bytes)))
        };
        (0..state.kept.len()).min_by_key(|&i| use_of(&state.kept[i]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::Tuning;
    use nq_formats::{AffineScheme, Bits, Group, Zeros};

    fn overrides(bits: Bits) -> Overrides {
        let scheme = AffineScheme::new(bits, Group::Size(32), Zeros::None);
        Overrides::from([("a".into(), scheme.into())])
    }

    fn attempt(overrides: &Overrides, bytes: u64, kld: f64) -> Attempt {
        Attempt {
            overrides: overrides.clone(),
            bytes,
            kld,
            same_top1: 1.0 - kld,
            untuned: None,
            out_of_reach: false,
        }
    }

    #[test]
    fn what_is_put_aside_is_taken_up_as_it_was() {
        let (none, four, eight) = (Overrides::new(), overrides(Bits::B4), overrides(Bits::B8));
        let step = |key: &str| StepReport {
            key: key.into(),
            ..StepReport::default()
        };
        let mut state = State::default();
        state.steps.insert("ends".into(), step("first"));
        state.put_aside(none.clone());
        assert_eq!((state.set, state.steps.len()), (1, 0));
        state.steps.insert("ends".into(), step("second"));
        state.tuning = Some(Tuning {
            done: true,
            ..Tuning::default()
        });
        state.put_aside(four.clone());
        assert_eq!((state.set, state.sets()), (2, vec![0, 1, 2]));
        assert!(!state.take_up(&eight));

        // As a run that continues after a kill reads it.
        let value = serde_json::to_value(&state).unwrap();
        let mut state: State = serde_json::from_value(value).unwrap();
        assert!(state.take_up(&four));
        assert_eq!((state.set, &*state.steps["ends"].key), (1, "second"));
        assert!(state.tuning.as_ref().unwrap().done);
        assert!(!state.take_up(&four));
        state.forget_missing(&[1]);
        assert!(!state.take_up(&none));
    }

    #[test]
    fn what_another_is_better_than_in_every_way_is_of_no_use() {
        let (none, four, eight) = (Overrides::new(), overrides(Bits::B4), overrides(Bits::B8));
        let all = [
            attempt(&none, 90, 0.03),
            attempt(&four, 80, 0.02),
            attempt(&eight, 100, 0.01),
        ];
        let dominated = all.each_ref().map(|a| is_dominated(a, &all));
        assert_eq!(dominated, [true, false, false]);
    }
}
