//! The time of each stage of a run, for its report.

use nq_formats::{Progress, Unit};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

/// A stage of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Its name as shown by the progress; `<stage>: <part>` is a part of that stage.
    pub name: String,
    /// Wall time in seconds, all its occurrences together.
    pub seconds: f64,
}

/// How long a part of a stage took, by which a resumed run estimates the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Took {
    pub(crate) seconds: f64,
    /// The share of the stage that was done in that time; 2 of a stage that occurred twice.
    pub(crate) share: f64,
}

/// A [`Progress`] that passes everything on and measures the time of stages.
pub(crate) struct Stages<'a> {
    progress: &'a dyn Progress,
    state: Mutex<StageState>,
}

#[derive(Default)]
struct StageState {
    current: Option<Current>,
    done: Vec<Stage>,
    /// Stages of this run and of those that it resumes.
    took: BTreeMap<String, Took>,
}

/// The stage under way.
struct Current {
    name: String,
    begun: Instant,
    /// Units of its work: all, those done by now, and those that `took` counts or that were there before.
    total: u64,
    at: u64,
    counted: u64,
    /// When they were counted.
    counted_at: Instant,
}

impl StageState {
    fn add(&mut self, name: &str, seconds: f64) {
        match self.done.iter_mut().find(|s| s.name == name) {
            Some(stage) => stage.seconds += seconds,
            None => self.done.push(Stage {
                name: name.into(),
                seconds,
            }),
        }
    }

    fn finish(&mut self) {
        if let Some(current) = &mut self.current {
            current.at = current.total;
        }
        self.count();
        if let Some(current) = self.current.take() {
            self.add(&current.name, current.begun.elapsed().as_secs_f64());
        }
    }

    /// Counts what was done of the stage under way since it was last counted.
    fn count(&mut self) {
        let Some(c) = &mut self.current else { return };
        let new = c.at.saturating_sub(c.counted) as f64 / c.total.max(1) as f64;
        let took = self.took.entry(c.name.clone()).or_default();
        took.share += if c.total == 0 { 1.0 } else { new };
        took.seconds += c.counted_at.elapsed().as_secs_f64();
        (c.counted, c.counted_at) = (c.at, Instant::now());
    }
}

impl<'a> Stages<'a> {
    /// No stages yet.
    pub(crate) fn new(progress: &'a dyn Progress) -> Self {
        Stages {
            progress,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, StageState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Times `work`, a part of a stage or something for which no progress is shown.
    pub(crate) fn time<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.state().add(name, start.elapsed().as_secs_f64());
        result
    }

    /// What stages took, with what they `took` in runs before.
    pub(crate) fn resume(&self, took: BTreeMap<String, Took>) {
        self.state().took = took;
    }

    /// What stages took, in this run and in those that it resumes.
    pub(crate) fn took(&self) -> BTreeMap<String, Took> {
        let mut state = self.state();
        state.count();
        state.took.clone()
    }

    /// The stages so far, in the order of first occurrence.
    pub(crate) fn done(&self) -> Vec<Stage> {
        self.state().done.clone()
    }
}

impl Progress for Stages<'_> {
    fn plan(&self, stages: &[(&str, f64)]) {
        self.progress.plan(stages);
    }

    fn begin(&self, stage: &str, total: u64, unit: Unit) {
        let mut state = self.state();
        state.finish();
        let now = Instant::now();
        state.current = Some(Current {
            name: stage.into(),
            begun: now,
            total,
            at: 0,
            counted: 0,
            counted_at: now,
        });
        drop(state);
        self.progress.begin(stage, total, unit);
    }

    fn advance(&self, n: u64) {
        if let Some(current) = &mut self.state().current {
            current.at += n;
        }
        self.progress.advance(n);
    }

    fn kept(&self, n: u64) {
        if let Some(current) = &mut self.state().current {
            current.at += n;
            current.counted += n;
            current.counted_at = Instant::now();
        }
        self.progress.kept(n);
    }

    fn end(&self) {
        self.state().finish();
        self.progress.end();
    }

    fn note(&self, message: &str) {
        self.progress.note(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn occurrences_add_up_and_parts_are_kept_apart() {
        let stages = Stages::new(&());
        for _ in 0..2 {
            stages.begin("a", 1, Unit::Items);
            stages.time("a: part", || {
                std::thread::sleep(std::time::Duration::from_millis(2))
            });
            stages.end();
        }
        stages.begin("b", 1, Unit::Items);
        stages.end();
        let done = stages.done();
        let names: Vec<&str> = done.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["a: part", "a", "b"]);
        assert!(done[0].seconds >= 0.004 && done[1].seconds >= done[0].seconds);
        let took = stages.took();
        assert_eq!((took["a"].share, took["b"].share), (2.0, 1.0));
    }

    /// A run that is killed in a stage knows how long the part took that it did, without what was there before.
    #[test]
    fn parts_of_a_stage_are_known_before_it_ends() {
        let earlier = Took {
            seconds: 8.0,
            share: 0.25,
        };
        let stages = Stages::new(&());
        stages.resume(BTreeMap::from([("layers".into(), earlier)]));
        stages.begin("layers", 40, Unit::Items);
        stages.kept(10);
        stages.advance(4);
        assert_eq!(stages.took()["layers"].share, 0.35);
        stages.advance(6);
        let took = stages.took()["layers"];
        assert!(
            (took.share - 0.5).abs() < 1e-9 && took.seconds >= 8.0,
            "{took:?}"
        );
    }
}
