//! The time of each stage of a run, for its report.

use nq_formats::{Progress, Unit};
use serde::{Deserialize, Serialize};
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

/// A [`Progress`] that passes everything on and measures the time of stages.
pub(crate) struct Stages<'a> {
    progress: &'a dyn Progress,
    state: Mutex<StageState>,
}

#[derive(Default)]
struct StageState {
    current: Option<(String, Instant)>,
    done: Vec<Stage>,
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
        if let Some((name, start)) = self.current.take() {
            self.add(&name, start.elapsed().as_secs_f64());
        }
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
        state.current = Some((stage.into(), Instant::now()));
        drop(state);
        self.progress.begin(stage, total, unit);
    }

    fn advance(&self, n: u64) {
        self.progress.advance(n);
    }

    fn kept(&self, n: u64) {
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
    }
}
