//! The cost model of speculative decoding: chooses the number of tokens to draft that gives the most tokens
//! per second, from measured times of steps and drafts and from acceptance rates.

/// Expected gain in speed below which nothing is drafted.
const LEAST_GAIN: f64 = 1.05;
/// Assumed cost of a further row, in steps of one row, until it has been measured.
const ROW: f64 = 0.25;
/// Assumed cost of drafting a token, in steps of one row, until it has been measured.
const DRAFT: f64 = 0.25;
/// Bounds of a new measurement, as multiples of the known value: a step that another program delayed must
/// not count for long, nor a first step, which includes setup.
const CLIP: f64 = 1.25;
const LEAST: f64 = 0.25;
/// Weight of a new measurement that is above the known value, and of one below it.
const MORE: f64 = 0.3;
const LESS: f64 = 0.5;
/// Until a step without drafts has been measured, every `PLAIN`th step is one; likewise every `WIDER`th step
/// has one row more than any measured step. Otherwise an assumed cost could exclude a step forever.
const PLAIN: usize = 4;
const WIDER: usize = 32;

/// Times that are known beforehand, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// A step of one row.
    pub step: f64,
    /// Each further row of a step.
    pub row: f64,
    /// Drafting one token.
    pub draft: f64,
}

/// Measured times of steps and drafts.
#[derive(Clone, Debug)]
pub(super) struct CostModel {
    /// Counts instead of what is measured.
    pub(super) given: Option<Costs>,
    /// Seconds of a step of `i + 1` rows, where measured.
    steps: Vec<Option<f64>>,
    /// The number of rows that the device computes when it is given this many.
    pub(super) rounded: fn(usize) -> usize,
    /// Seconds of drafting one token for all sequences of a step; `None` until measured.
    draft: Option<f64>,
    /// Drafting has been measured once. That first time does not count: it includes setup and the prompt.
    warmed_up: bool,
    /// Drafting takes time.
    expensive: bool,
    /// Steps with drafts so far for which an alternative had not been measured.
    unknown: usize,
}

/// A sequence's demand for drafted tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Demand {
    /// Expected acceptance rate, 0 to 1.
    pub acceptance: f64,
    /// Tokens at most.
    pub most: usize,
    /// The tokens are there already.
    pub free: bool,
}

impl Default for CostModel {
    fn default() -> Self {
        CostModel {
            given: None,
            steps: Vec::new(),
            rounded: |rows| rows,
            draft: None,
            warmed_up: false,
            expensive: false,
            unknown: 0,
        }
    }
}

impl CostModel {
    /// For a drafter that takes time.
    pub(super) fn expensive() -> Self {
        CostModel {
            expensive: true,
            ..CostModel::default()
        }
    }

    /// Tokens to draft for each of `demands`, at most `room` together, in a step that has `rows` rows without
    /// drafts. Rows go to the tokens that are most likely to be accepted, as long as that raises tokens per
    /// second.
    pub(super) fn plan(&self, rows: usize, room: usize, demands: &[Demand]) -> Vec<usize> {
        let mut lengths = vec![0; demands.len()];
        let mut best = (LEAST_GAIN * rows as f64 / self.step(rows), lengths.clone());
        let mut tokens = rows as f64;
        for drafted in 1..=room {
            let Some((i, chance)) = likeliest(demands, &lengths) else {
                break;
            };
            tokens += chance;
            lengths[i] += 1;
            let made = lengths.iter().zip(demands).filter(|(_, d)| !d.free);
            let longest = made.map(|(n, _)| *n).max().unwrap_or(0);
            let seconds = self.step(rows + drafted) + self.draft() * longest as f64;
            if tokens / seconds > best.0 {
                best = (tokens / seconds, lengths.clone());
            }
        }
        best.1
    }

    /// Changes a plan with drafts now and then, to measure steps that have not been measured: those without
    /// drafts, the baseline of the gain, and those with one row more.
    pub(super) fn explore(
        &mut self,
        rows: usize,
        room: usize,
        demands: &[Demand],
        lengths: &mut [usize],
    ) {
        let drafted: usize = lengths.iter().sum();
        let unknown = |rows| !matches!(self.steps.get((self.rounded)(rows) - 1), Some(Some(_)));
        let (without, wider) = (unknown(rows), drafted < room && unknown(rows + drafted + 1));
        if drafted == 0 || !(without || wider) {
            return;
        }
        self.unknown += 1;
        if without && self.unknown.is_multiple_of(PLAIN) {
            lengths.fill(0);
        } else if wider
            && self.unknown.is_multiple_of(WIDER)
            && let Some((i, _)) = likeliest(demands, lengths)
        {
            lengths[i] += 1;
        }
    }

    /// Expected seconds of a step; in units of a step of one row while nothing has been measured.
    fn step(&self, rows: usize) -> f64 {
        let rows = (self.rounded)(rows);
        let known = |i: usize| self.steps.get(i).copied().flatten();
        let below = (0..rows).rev().find_map(|i| Some((i + 1, known(i)?)));
        let Some(one) = (0..self.steps.len()).find_map(known) else {
            return 1.0 + ROW * (rows - 1) as f64;
        };
        let Some((measured, seconds)) = below else {
            return one;
        };
        // Beyond the measured steps, a row costs as much as measured rows do on average, but no more than was
        // assumed at first: where steps of two rows have other kernels than steps of one, the second row may
        // cost more than all further ones.
        let first = (0..measured).find_map(|i| Some((i + 1, known(i)?)));
        let row = match first {
            Some((rows, first)) if rows < measured => (seconds - first) / (measured - rows) as f64,
            _ => ROW * one,
        };
        seconds + row.clamp(0.0, ROW * one) * (rows - measured) as f64
    }

    /// Rows and seconds of the steps that were measured.
    pub(super) fn known(&self) -> Vec<(usize, f64)> {
        let steps = self.steps.iter().enumerate();
        steps
            .filter_map(|(i, seconds)| Some((i + 1, (*seconds)?)))
            .collect()
    }

    /// True once drafting has been measured.
    pub(super) fn knows_drafts(&self) -> bool {
        self.draft.is_some()
    }

    fn draft(&self) -> f64 {
        match self.expensive {
            true => self.draft.unwrap_or(DRAFT * self.step(1)),
            false => 0.0,
        }
    }

    /// Records that a step of `rows` rows took `seconds`.
    pub(super) fn stepped(&mut self, rows: usize, seconds: f64) {
        let rows = (self.rounded)(rows);
        // Steps with drafts never have more rows.
        if rows == 0 || rows > 64 {
            return;
        }
        let given = |costs: Costs| costs.step + costs.row * (rows - 1) as f64;
        let seconds = self.given.map_or(seconds, given);
        let anything = self.steps.iter().any(Option::is_some);
        let expected = self.step(rows);
        if self.steps.len() < rows {
            self.steps.resize(rows, None);
        }
        let known = &mut self.steps[rows - 1];
        *known = Some(match (anything, *known) {
            (false, _) => seconds,
            (true, None) => seconds.min(CLIP * expected),
            (true, Some(known)) => learned(known, seconds),
        });
    }

    /// Records that drafting took `seconds` per token.
    pub(super) fn drafted(&mut self, seconds: f64) {
        let seconds = self.given.map_or(seconds, |costs| costs.draft);
        let first = !std::mem::replace(&mut self.warmed_up, true);
        self.draft = match self.draft {
            None if first => None,
            None => Some(seconds.min(self.step(1))),
            Some(known) => Some(learned(known, seconds)),
        };
    }
}

/// The sequence whose next drafted token, after drafts of `lengths`, is most likely to be accepted, and its
/// probability.
fn likeliest(demands: &[Demand], lengths: &[usize]) -> Option<(usize, f64)> {
    let chance = |(i, (demand, &length)): (usize, (&Demand, &usize))| match length < demand.most {
        true => (i, demand.acceptance.powi(length as i32 + 1)),
        false => (i, 0.0),
    };
    let chances = demands.iter().zip(lengths).enumerate().map(chance);
    let likeliest = chances.max_by(|a, b| a.1.total_cmp(&b.1));
    likeliest.filter(|(_, chance)| *chance > 0.0)
}

/// The value expected after a measurement. A lower time weighs more than a higher one: disturbances only make
/// steps slower.
fn learned(known: f64, measured: f64) -> f64 {
    match measured < known {
        true => known + LESS * (measured.max(known * LEAST) - known),
        false => known + MORE * (measured.min(known * CLIP) - known),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(seconds: impl Fn(usize) -> f64, mut costs: CostModel) -> CostModel {
        for _ in 0..200 {
            (1..=8).for_each(|rows| costs.stepped(rows, seconds(rows)));
        }
        costs
    }

    fn alone(costs: &CostModel, acceptance: f64, most: usize) -> usize {
        let demand = Demand {
            acceptance,
            most,
            free: false,
        };
        costs.plan(1, 7, &[demand])[0]
    }

    #[test]
    fn lengths_follow_costs_and_acceptance() {
        let costs = measured(|rows| 1.0 + 0.1 * (rows - 1) as f64, CostModel::default());
        assert_eq!(alone(&costs, 0.97, 20), 7);
        assert_eq!(alone(&costs, 0.97, 3), 3);
        assert_eq!(alone(&costs, 0.97, 0), 0);
        assert!((1..4).contains(&alone(&costs, 0.4, 20)));
        // Almost always wrong.
        assert_eq!(alone(&costs, 0.1, 20), 0);
        // Rows that cost as much as steps never pay.
        let linear = measured(|rows| rows as f64, CostModel::default());
        assert_eq!(alone(&linear, 0.97, 20), 0);
    }

    #[test]
    fn an_expensive_drafter_must_save_more_than_it_costs() {
        let mut costs = measured(
            |rows| 1.0 + 0.05 * (rows - 1) as f64,
            CostModel::expensive(),
        );
        (0..100).for_each(|_| costs.drafted(0.15));
        assert!((2..6).contains(&alone(&costs, 0.8, 20)));
        assert_eq!(alone(&costs, 0.15, 20), 0);
        (0..100).for_each(|_| costs.drafted(0.9));
        assert_eq!(alone(&costs, 0.8, 20), 0);
    }

    #[test]
    fn rows_go_to_the_likeliest_tokens() {
        let costs = measured(|rows| 1.0 + 0.02 * (rows - 1) as f64, CostModel::default());
        let demand = |acceptance| Demand {
            acceptance,
            most: 5,
            free: false,
        };
        let planned = costs.plan(3, 5, &[demand(0.2), demand(0.9), demand(0.7)]);
        assert_eq!(planned.iter().sum::<usize>(), 5);
        assert!(
            planned[1] > planned[2] && planned[2] > planned[0],
            "{planned:?}"
        );
    }

    /// Setup in the first drafts and steps does not count for long.
    #[test]
    fn a_slow_start_is_soon_forgotten() {
        let mut costs = measured(
            |rows| 1.0 + 0.05 * (rows - 1) as f64,
            CostModel::expensive(),
        );
        costs.drafted(50.0);
        assert!(!costs.knows_drafts() && alone(&costs, 0.8, 20) > 0);
        costs.drafted(1.5);
        assert_eq!(alone(&costs, 0.8, 20), 0);
        (0..4).for_each(|_| costs.drafted(0.08));
        assert!(alone(&costs, 0.7, 20) >= 3);
        // Likewise the first step of a device.
        let mut costs = CostModel::default();
        costs.stepped(1, 80.0);
        (0..10).for_each(|_| costs.stepped(1, 1.0));
        (0..3).for_each(|_| costs.stepped(8, 2.0));
        assert!(costs.step(1) < 1.5 && costs.step(8) > 1.5);
    }

    /// Rows that cost nothing are found, although they were assumed to cost too much.
    #[test]
    fn more_rows_are_tried_now_and_then() {
        let mut costs = CostModel::default();
        let demands = [Demand {
            acceptance: 0.7,
            most: 8,
            free: false,
        }];
        let mut drafted = Vec::new();
        for _ in 0..400 {
            let mut planned = costs.plan(1, 8, &demands);
            costs.explore(1, 8, &demands, &mut planned);
            costs.stepped(1 + planned[0], 1.25);
            drafted.push(planned[0]);
        }
        assert!(drafted[0] < 4 && drafted[399] == 8, "{drafted:?}");
        // Expensive rows are tried, and then avoided.
        let mut costs = measured(
            |rows| if rows < 4 { 1.25 } else { rows as f64 },
            CostModel::default(),
        );
        costs.steps.truncate(3);
        let mut wide = 0;
        for _ in 0..400 {
            let mut planned = costs.plan(1, 8, &demands);
            costs.explore(1, 8, &demands, &mut planned);
            wide += usize::from(planned[0] > 2);
            let rows = 1 + planned[0];
            costs.stepped(rows, if rows < 4 { 1.25 } else { rows as f64 });
        }
        assert!((1..20).contains(&wide), "{wide}");
    }

    /// The second row of a step may cost more than all further ones, as with Qwen3-32B on an H200.
    #[test]
    fn a_dear_second_row_does_not_end_drafts() {
        let milliseconds = |rows: usize| match rows {
            1 => 4.85,
            2 => 7.66,
            ..=8 => 8.26,
            _ => 11.0,
        };
        let mut costs = CostModel {
            rounded: |rows| rows.next_power_of_two(),
            ..CostModel::expensive()
        };
        let demands = [Demand {
            acceptance: 0.7,
            most: 15,
            free: false,
        }];
        costs.stepped(1, milliseconds(1));
        costs.stepped(2, milliseconds(2));
        (0..3).for_each(|_| costs.drafted(0.36));
        for _ in 0..100 {
            let mut planned = costs.plan(1, 15, &demands);
            assert!(planned[0] > 0);
            costs.explore(1, 15, &demands, &mut planned);
            costs.stepped(1 + planned[0], milliseconds(1 + planned[0]));
            costs.drafted(0.36);
        }
        assert!((3..8).contains(&alone(&costs, 0.7, 15)));
    }

    /// Steps of 5 to 8 rows take the same time: one measurement covers them all.
    #[test]
    fn rows_are_counted_as_the_device_rounds_them() {
        let seconds = |rows: usize| if rows == 1 { 1.0 } else { 1.5 };
        let mut costs = CostModel {
            rounded: |rows| rows.next_power_of_two(),
            ..CostModel::default()
        };
        for _ in 0..20 {
            costs.stepped(1, seconds(1));
            costs.stepped(6, seconds(6));
        }
        assert_eq!(alone(&costs, 0.9, 7), 7);
        assert_eq!(alone(&costs, 0.9, 5), 5);
    }

    #[test]
    fn one_slow_step_does_not_count_for_long() {
        let mut costs = measured(|rows| 1.0 + 0.1 * (rows - 1) as f64, CostModel::default());
        costs.stepped(8, 50.0);
        assert!(alone(&costs, 0.97, 20) >= 6);
        (0..5).for_each(|_| costs.stepped(8, 1.7));
        assert_eq!(alone(&costs, 0.97, 20), 7);
    }
}
