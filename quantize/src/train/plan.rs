//! The amount of work of a tuning, and the memory it takes.

use super::graph::Graph;
use super::params::both_models;
use super::sample::Sampler;
use crate::error::Result;
use nq_kernels::Account;
use nq_kernels::grad::SCRATCH;
use nq_model::ModelConfig;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How long to tune.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Effort {
    /// A budget that depends on the device and the model's size (`default_seconds`).
    Default,
    /// As many steps as fit this time, estimated from a measurement before the first; the record
    /// holds their number.
    Budget(Duration),
    /// A given number of steps.
    Steps {
        /// Steps of the schedule.
        steps: usize,
        /// Sequences per step.
        batch: usize,
    },
}

/// A user's options for tuning.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TuneOptions {
    /// How long to tune.
    pub effort: Effort,
}

/// With more parameters than this, codes are tuned only if all of them fit the device.
const LARGE: usize = 2_000_000_000;
/// Most sequences per step: more are not worth their time.
const BATCHES: [usize; 4] = [32, 16, 8, 4];
/// Most steps. With more, the demo model followed text that the source samples ever more closely, and
/// other text no longer (books: .0109 after 600 steps of 32 sequences, .0114 after 1,500 and 2,400).
const MOST_STEPS: usize = 600;
/// A larger batch is used if it still leaves this many steps.
const GOOD_STEPS: usize = 500;
/// Fewer steps do not make up for the disturbance they cause.
const LEAST_STEPS: usize = 32;
/// Most checks on held-out text; fewer if they would take more than a share of the time.
pub(crate) const CHECKS: usize = 8;
const LEAST_CHECKS: usize = 2;
const CHECKS_SHARE: f64 = 0.05;
/// Steps after which the codes of trellises are found again: the demo model in 7.58 MB has a divergence of .0137 with a
/// search every 10 steps of 600, .0134 with one every 5, and .0132 with one every 2, which doubles the time.
pub(crate) const SEARCH: usize = 5;
/// The same where searches would otherwise take more than a share of the steps' time.
const DEAR_SEARCH: usize = 10;
const SEARCH_SHARE: f64 = 0.5;

/// Most seconds that a tuning without a budget of its own takes.
pub(crate) fn default_seconds(parameters: usize, on_cpu: bool) -> f64 {
    if on_cpu {
        1800.0
    } else {
        90.0 + 25.0 * parameters as f64 / 1e9
    }
}

/// Measured times of the parts of a tuning, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TuningTimes {
    /// One training sequence, including its sampling.
    pub sequence: f64,
    /// One step, without its sequences and searches.
    pub step: f64,
    /// One search for the codes of trellises; 0: there are none.
    pub search: f64,
    /// One check on held-out text.
    pub check: f64,
}

/// Number and size of the steps of a tuning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Number of steps.
    pub steps: usize,
    /// Sequences per step.
    pub batch: usize,
    /// Steps after which the codes of trellises are found again.
    pub search: usize,
    /// Checks on held-out text, besides the one before the first step.
    pub checks: usize,
}

/// The learning rate of codes, in steps of their grid, for short schedules of 32 sequences per step.
pub(crate) const RATE_CODES: f32 = 4.8e-3;
/// Most steps for which that rate is used.
const RATE_STEPS: f32 = 200.0;
/// Least sequences per step for which that rate is used.
const RATE_BATCH: f32 = 32.0;

/// The learning rate of codes for a schedule: the more steps, the lower.
///
/// Measured on the demo model: at a high rate codes flicker and the loss stays constant until the
/// rate falls, and parameters that the training text does not determine drift, which shows on other
/// text. The best rates tried were in proportion to the steps to the power of -0.6, from 200 to 4,800.
pub fn rate_codes(steps: usize, batch: usize) -> f32 {
    let long = (RATE_STEPS / steps.max(1) as f32).min(1.0).powf(0.6);
    RATE_CODES * long * (batch as f32 / RATE_BATCH).sqrt().min(1.0)
}

/// The schedule that fits `seconds`; `None` if that allows too few steps.
///
/// Numbers of steps are spaced by ratios of about 1.2, so that small differences in measurements
/// give the same plan. A step has at least `pass` sequences.
pub(crate) fn schedule(seconds: f64, pace: TuningTimes, pass: usize) -> Option<Schedule> {
    let affordable = CHECKS_SHARE * seconds / pace.check.max(1e-9);
    let checks = (affordable as usize).clamp(LEAST_CHECKS, CHECKS);
    let left = seconds - (checks + 1) as f64 * pace.check;
    let step = |batch: usize| pace.sequence * batch as f64 + pace.step;
    let search = |batch: usize| match pace.search <= SEARCH_SHARE * SEARCH as f64 * step(batch) {
        true => SEARCH,
        false => DEAR_SEARCH,
    };
    let each = |batch: usize| step(batch) + pace.search / search(batch) as f64;
    let steps = |batch: usize| (left / each(batch).max(1e-9)) as usize;
    let fits = |&&batch: &&usize| batch >= pass && steps(batch) >= GOOD_STEPS;
    let smallest = BATCHES.iter().rev().find(|&&b| b >= pass).unwrap_or(&pass);
    let batch = *BATCHES.iter().find(fits).unwrap_or(smallest);
    let mut chosen = MOST_STEPS as f64;
    while chosen as usize > steps(batch) {
        chosen /= 1.2;
    }
    let steps = chosen as usize;
    (steps >= LEAST_STEPS).then_some(Schedule {
        steps,
        batch,
        search: search(batch),
        checks,
    })
}

/// What the weights of a student are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StudentCodes {
    /// Integers; the least size of a group of inputs.
    Groups(usize),
    /// Trellises, at least some.
    Trellis {
        /// Bytes that a search takes on the device.
        search: usize,
    },
}

/// A plan that fits a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// True if codes are tuned, not only scales and gains.
    pub codes: bool,
    /// Sequences in a pass.
    pub pass: usize,
    /// Sequences sampled together.
    pub slots: usize,
    /// Bytes of the device's memory.
    #[serde(rename = "device_bytes", alias = "bytes")]
    pub bytes: u64,
}

impl MemoryPlan {
    /// The tuned parameters, in words.
    pub(crate) fn what(&self) -> &'static str {
        if self.codes {
            "codes, scales and gains"
        } else {
            "scales and gains"
        }
    }

    /// The plan with the largest passes that holds at most `limit` bytes of the device's memory;
    /// if none fits, the one with the smallest.
    ///
    /// # Errors
    /// Never, as an account has no limit.
    pub(crate) fn new(
        on_cpu: bool,
        config: &ModelConfig,
        length: usize,
        codes: StudentCodes,
        limit: u64,
        most_pass: usize,
        most_slots: usize,
    ) -> Result<Self> {
        let halves = |most: usize| std::iter::successors(Some(most), |&n| (n > 1).then_some(n / 2));
        let small = config.parameters() <= LARGE;
        // The parts of a tuning are made on an account, which counts them.
        let account = if on_cpu {
            &Account::host()
        } else {
            &Account::gpu()
        };
        let (group, search) = match codes {
            StudentCodes::Groups(group) => (Some(group), 0),
            StudentCodes::Trellis { search } => (None, search),
        };
        let _scratch = account.hold(SCRATCH + search);
        let mut plan = MemoryPlan::default();
        for codes in [true, false] {
            let _models = both_models(account, config, group, codes)?;
            for pass in halves(most_pass) {
                // A large model tunes codes only if passes of a sensible size still fit.
                if codes && !small && pass < most_pass.min(8) {
                    break;
                }
                let _graph = Graph::new(account, config, pass, length)?;
                for slots in halves(most_slots).take_while(|&s| s >= most_slots.min(32)) {
                    let _sampler = Sampler::new(account, config, slots, length)?;
                    plan = MemoryPlan {
                        codes,
                        pass,
                        slots,
                        bytes: account.held() as u64,
                    };
                    if plan.bytes <= limit {
                        return Ok(plan);
                    }
                }
            }
        }
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_model::Preset;

    #[test]
    fn schedules_fill_the_budget_and_no_more() {
        for seconds in [60.0, 600.0, 3600.0, 36_000.0] {
            for sequence in [0.003, 0.1, 0.9] {
                let pace = TuningTimes {
                    sequence,
                    step: 3.0 * sequence,
                    search: 0.0,
                    check: 8.0 * sequence,
                };
                let time = |s: Schedule| {
                    s.steps as f64 * (s.batch as f64 * pace.sequence + pace.step)
                        + (s.checks + 1) as f64 * pace.check
                };
                let Some(s) = schedule(seconds, pace, 4) else {
                    assert!(seconds / sequence < LEAST_STEPS as f64 * 7.0 * 1.3 + 24.0);
                    continue;
                };
                assert!(time(s) <= seconds, "{s:?}");
                assert!((LEAST_STEPS..=MOST_STEPS).contains(&s.steps), "{s:?}");
                // Uses as many steps as allowed, or most of the time.
                assert!(s.steps == MOST_STEPS || time(s) > 0.75 * seconds, "{s:?}");
            }
        }
        let quick = TuningTimes {
            sequence: 0.003,
            ..TuningTimes::default()
        };
        let most = Schedule {
            steps: MOST_STEPS,
            batch: 32,
            search: SEARCH,
            checks: CHECKS,
        };
        assert_eq!(schedule(3600.0, quick, 8), Some(most));
        let slow = |sequence| TuningTimes {
            sequence,
            ..TuningTimes::default()
        };
        assert_eq!(schedule(1.0, slow(1.0), 1), None);
        // A step is never smaller than a pass.
        assert!(schedule(600.0, slow(0.5), 16).is_some_and(|s| s.batch == 16));
        // If checks are expensive, there are few.
        let dear = TuningTimes {
            sequence: 0.6,
            step: 0.1,
            check: 5.0,
            ..TuningTimes::default()
        };
        assert!(schedule(200.0, dear, 4).is_some_and(|s| s.checks == LEAST_CHECKS));
        // So are searches, and they count: with 4 sequences a step takes 2.5 s.
        for (search, every) in [(6.0, SEARCH), (7.0, DEAR_SEARCH)] {
            let check = 0.1;
            let searched = TuningTimes {
                search,
                check,
                ..dear
            };
            let s = schedule(200.0, searched, 4).unwrap();
            assert_eq!((s.batch, s.search), (4, every));
            let seconds = s.steps as f64 * (2.5 + search / every as f64);
            assert!((150.0..200.0).contains(&seconds), "{seconds}");
        }
    }

    #[test]
    fn rates_fall_with_steps_and_with_small_batches() {
        assert_eq!(rate_codes(100, 32), RATE_CODES);
        assert_eq!(rate_codes(200, 64), RATE_CODES);
        let off = |found: f32, expected: f32| (found / expected - 1.0).abs();
        assert!(off(rate_codes(2400, 32), 1.08e-3) < 0.02);
        assert!(off(rate_codes(200, 8), RATE_CODES / 2.0) < 1e-5);
    }

    #[test]
    fn large_models_tune_scales_alone_where_codes_do_not_fit() {
        let plan = |preset: &str, limit: u64| {
            let config = Preset::find(preset).unwrap().config();
            let codes = StudentCodes::Groups(64);
            let plan = MemoryPlan::new(false, &config, 512, codes, limit << 30, 32, 1024).unwrap();
            (plan.codes, plan.bytes <= limit << 30)
        };
        assert_eq!(plan("qwen3-0.6b", 100), (true, true));
        assert_eq!(plan("qwen3-8b", 130), (false, true));
        assert_eq!(plan("qwen3-32b", 20), (false, false));
    }
}
