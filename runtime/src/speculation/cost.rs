//! How many tokens to draft: as many as give most tokens a second.

/// Gain below which drafting is left alone.
const LEAST_GAIN: f64 = 1.05;
/// What a row costs more, in steps of one row, until it has been measured.
const ROW: f64 = 0.25;
/// What drafting a token costs, in steps of one row, until it has been measured.
const DRAFT: f64 = 0.25;
/// What one measurement says at most, as a multiple of what was known, and at least: a step that another
/// program held up must not count for long, nor a first one, which prepares those after it.
const CLIP: f64 = 1.25;
const LEAST: f64 = 0.25;
/// Weight of a new measurement that is above what was known, and of one below.
const MORE: f64 = 0.3;
const LESS: f64 = 0.5;
/// One in so many steps goes without drafts, until such a step has been measured, and one has a row more
/// than has been: what steps are guessed to take must not decide for good.
const PLAIN: usize = 4;
const WIDER: usize = 32;

/// What steps and drafts take.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// Seconds of a step of `i + 1` rows, where known.
    steps: Vec<Option<f64>>,
    /// Rows that the device computes for so many.
    pub(super) rounded: fn(usize) -> usize,
    /// Seconds of drafting a token for all sequences of a step; none known of a free drafter.
    draft: Option<f64>,
    /// Drafting has been measured once: that prepared what comes after, and computed the text before.
    begun: bool,
    /// Drafts take time.
    dear: bool,
    /// Steps with drafts beside which something is yet to be measured.
    unknown: usize,
}

/// Tokens that a sequence would have drafted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wish {
    /// Share of them that is right.
    pub right: f64,
    /// At most so many.
    pub most: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            steps: Vec::new(),
            rounded: |rows| rows,
            draft: None,
            begun: false,
            dear: false,
            unknown: 0,
        }
    }
}

impl Pace {
    /// A drafter that takes time.
    pub(super) fn dear() -> Self {
        Pace {
            dear: true,
            ..Pace::default()
        }
    }

    /// Tokens to draft for each of `wishes`, in a step of `rows` rows without them, at most `room`
    /// together: rows go where they are most likely to be right, as long as that pays.
    pub(super) fn plan(&self, rows: usize, room: usize, wishes: &[Wish]) -> Vec<usize> {
        let mut lengths = vec![0; wishes.len()];
        let mut best = (LEAST_GAIN * rows as f64 / self.step(rows), lengths.clone());
        let mut tokens = rows as f64;
        for drafted in 1..=room {
            let Some((i, chance)) = likeliest(wishes, &lengths) else {
                break;
            };
            tokens += chance;
            lengths[i] += 1;
            let longest = lengths.iter().max().copied().unwrap_or(0);
            let seconds = self.step(rows + drafted) + self.draft() * longest as f64;
            if tokens / seconds > best.0 {
                best = (tokens / seconds, lengths.clone());
            }
        }
        best.1
    }

    /// Changes a plan with drafts, now and then, to measure what has not been: steps without drafts, which
    /// tell what drafts gain, and steps of a row more.
    pub(super) fn explore(
        &mut self,
        rows: usize,
        room: usize,
        wishes: &[Wish],
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
        } else if wider && self.unknown.is_multiple_of(WIDER) {
            if let Some((i, _)) = likeliest(wishes, lengths) {
                lengths[i] += 1;
            }
        }
    }

    /// Seconds of a step; in steps of one row where nothing has been measured.
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
        // Rows beyond those measured cost what rows have cost so far.
        let first = (0..measured).find_map(|i| Some((i + 1, known(i)?)));
        let row = match first {
            Some((rows, first)) if rows < measured => (seconds - first) / (measured - rows) as f64,
            _ => ROW * one,
        };
        seconds + row.max(0.0) * (rows - measured) as f64
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
        match self.dear {
            true => self.draft.unwrap_or(DRAFT * self.step(1)),
            false => 0.0,
        }
    }

    /// A step of `rows` rows took so long.
    pub(super) fn stepped(&mut self, rows: usize, seconds: f64) {
        let rows = (self.rounded)(rows);
        // More rows than drafts ever make.
        if rows == 0 || rows > 64 {
            return;
        }
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

    /// Drafting took so long for each token.
    pub(super) fn drafted(&mut self, seconds: f64) {
        let first = !std::mem::replace(&mut self.begun, true);
        self.draft = match self.draft {
            None if first => None,
            None => Some(seconds.min(self.step(1))),
            Some(known) => Some(learned(known, seconds)),
        };
    }
}

/// The sequence whose next token is likeliest to be right, after drafts of `lengths`, and the chance of it.
fn likeliest(wishes: &[Wish], lengths: &[usize]) -> Option<(usize, f64)> {
    let chance = |(i, (wish, &length)): (usize, (&Wish, &usize))| match length < wish.most {
        true => (i, wish.right.powi(length as i32 + 1)),
        false => (i, 0.0),
    };
    let chances = wishes.iter().zip(lengths).enumerate().map(chance);
    let likeliest = chances.max_by(|a, b| a.1.total_cmp(&b.1));
    likeliest.filter(|(_, chance)| *chance > 0.0)
}

/// What is expected after a measurement. Nothing takes less time than it needs: that is believed sooner.
fn learned(known: f64, measured: f64) -> f64 {
    match measured < known {
        true => known + LESS * (measured.max(known * LEAST) - known),
        false => known + MORE * (measured.min(known * CLIP) - known),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(seconds: impl Fn(usize) -> f64, mut pace: Pace) -> Pace {
        for _ in 0..200 {
            (1..=8).for_each(|rows| pace.stepped(rows, seconds(rows)));
        }
        pace
    }

    fn alone(pace: &Pace, right: f64, most: usize) -> usize {
        pace.plan(1, 7, &[Wish { right, most }])[0]
    }

    #[test]
    fn lengths_follow_costs_and_luck() {
        let pace = measured(|rows| 1.0 + 0.1 * (rows - 1) as f64, Pace::default());
        assert_eq!(alone(&pace, 0.97, 20), 7);
        assert_eq!(alone(&pace, 0.97, 3), 3);
        assert_eq!(alone(&pace, 0.97, 0), 0);
        assert!((1..4).contains(&alone(&pace, 0.4, 20)));
        // Always wrong.
        assert_eq!(alone(&pace, 0.1, 20), 0);
        // Rows that cost as much as steps never pay.
        let dear = measured(|rows| rows as f64, Pace::default());
        assert_eq!(alone(&dear, 0.97, 20), 0);
    }

    #[test]
    fn a_dear_drafter_must_earn_its_time() {
        let mut pace = measured(|rows| 1.0 + 0.05 * (rows - 1) as f64, Pace::dear());
        (0..100).for_each(|_| pace.drafted(0.15));
        assert!((2..6).contains(&alone(&pace, 0.8, 20)));
        assert_eq!(alone(&pace, 0.15, 20), 0);
        (0..100).for_each(|_| pace.drafted(0.9));
        assert_eq!(alone(&pace, 0.8, 20), 0);
    }

    #[test]
    fn rows_go_where_they_are_likeliest_right() {
        let pace = measured(|rows| 1.0 + 0.02 * (rows - 1) as f64, Pace::default());
        let wish = |right| Wish { right, most: 5 };
        let planned = pace.plan(3, 5, &[wish(0.2), wish(0.9), wish(0.7)]);
        assert_eq!(planned.iter().sum::<usize>(), 5);
        assert!(
            planned[1] > planned[2] && planned[2] > planned[0],
            "{planned:?}"
        );
    }

    /// What prepares a drafter, and what its first drafts still lack, is not held against it for long.
    #[test]
    fn a_slow_start_is_soon_forgotten() {
        let mut pace = measured(|rows| 1.0 + 0.05 * (rows - 1) as f64, Pace::dear());
        pace.drafted(50.0);
        assert!(!pace.knows_drafts() && alone(&pace, 0.8, 20) > 0);
        pace.drafted(1.5);
        assert_eq!(alone(&pace, 0.8, 20), 0);
        (0..4).for_each(|_| pace.drafted(0.08));
        assert!(alone(&pace, 0.7, 20) >= 3);
        // The first step of a device, likewise.
        let mut pace = Pace::default();
        pace.stepped(1, 80.0);
        (0..10).for_each(|_| pace.stepped(1, 1.0));
        (0..3).for_each(|_| pace.stepped(8, 2.0));
        assert!(pace.step(1) < 1.5 && pace.step(8) > 1.5);
    }

    /// Rows that cost nothing are found, though they were guessed to cost too much.
    #[test]
    fn more_rows_are_tried_now_and_then() {
        let mut pace = Pace::default();
        let wishes = [Wish {
            right: 0.7,
            most: 8,
        }];
        let mut drafted = Vec::new();
        for _ in 0..400 {
            let mut planned = pace.plan(1, 8, &wishes);
            pace.explore(1, 8, &wishes, &mut planned);
            pace.stepped(1 + planned[0], 1.25);
            drafted.push(planned[0]);
        }
        assert!(drafted[0] < 4 && drafted[399] == 8, "{drafted:?}");
        // What is dear is tried, and left alone.
        let mut pace = measured(
            |rows| if rows < 4 { 1.25 } else { rows as f64 },
            Pace::default(),
        );
        pace.steps.truncate(3);
        let mut wide = 0;
        for _ in 0..400 {
            let mut planned = pace.plan(1, 8, &wishes);
            pace.explore(1, 8, &wishes, &mut planned);
            wide += usize::from(planned[0] > 2);
            let rows = 1 + planned[0];
            pace.stepped(rows, if rows < 4 { 1.25 } else { rows as f64 });
        }
        assert!((1..20).contains(&wide), "{wide}");
    }

    /// Steps of 5 to 8 rows take the same time: one that has been measured tells of all.
    #[test]
    fn rows_are_counted_as_the_device_rounds_them() {
        let seconds = |rows: usize| if rows == 1 { 1.0 } else { 1.5 };
        let mut pace = Pace {
            rounded: |rows| rows.next_power_of_two(),
            ..Pace::default()
        };
        for _ in 0..20 {
            pace.stepped(1, seconds(1));
            pace.stepped(6, seconds(6));
        }
        assert_eq!(alone(&pace, 0.9, 7), 7);
        assert_eq!(alone(&pace, 0.9, 5), 5);
    }

    #[test]
    fn one_slow_step_does_not_count_for_long() {
        let mut pace = measured(|rows| 1.0 + 0.1 * (rows - 1) as f64, Pace::default());
        pace.stepped(8, 50.0);
        assert!(alone(&pace, 0.97, 20) >= 6);
        (0..5).for_each(|_| pace.stepped(8, 1.7));
        assert_eq!(alone(&pace, 0.97, 20), 7);
    }
}
