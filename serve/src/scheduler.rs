//! Decides which request is served next, and how much of a step prompts may take: policy alone, without
//! a session, a thread or a clock of its own.
//!
//! Requests wait in a queue per client. Clients take turns, so that a client with a hundred
//! requests delays others by one. Of a step's rows for prompts, half go to the prompt that came
//! first, so that none starves, and the others to those with the fewest rows left, so that short prompts
//! do not wait for long ones. The number of rows follows from time: what prompts may add to a step is
//! limited, since all decoding requests wait for it (chunked prefill: Sarathi-Serve, arXiv
//! 2403.02310).

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Whether a request may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It may begin now.
    Now,
    /// It must wait for a reason of its own: others may begin before it.
    Later,
    /// There is no room for any request.
    Full,
}

/// Waiting requests, by client. `K` identifies a client, `R` a request.
#[derive(Debug)]
pub(crate) struct Queue<K, R> {
    waiting: HashMap<K, VecDeque<R>>,
    /// Clients with waiting requests, the next one first.
    turns: VecDeque<K>,
}

impl<K, R> Default for Queue<K, R> {
    fn default() -> Self {
        Queue {
            waiting: HashMap::new(),
            turns: VecDeque::new(),
        }
    }
}

impl<K: Copy + Eq + std::hash::Hash, R: Copy + Eq> Queue<K, R> {
    /// Appends a request to its client's queue.
    pub(crate) fn push(&mut self, client: K, request: R) {
        self.of(client).push_back(request);
    }

    /// Puts a request that had begun, and gave way, in front of all others.
    pub(crate) fn push_front(&mut self, client: K, request: R) {
        self.of(client).push_front(request);
        self.turns.retain(|c| *c != client);
        self.turns.push_front(client);
    }

    fn of(&mut self, client: K) -> &mut VecDeque<R> {
        let queue = self.waiting.entry(client).or_default();
        if queue.is_empty() && !self.turns.contains(&client) {
            self.turns.push_back(client);
        }
        queue
    }

    /// Removes a request that no longer waits; false if it was not in the queue.
    pub(crate) fn remove(&mut self, client: K, request: R) -> bool {
        let Some(queue) = self.waiting.get_mut(&client) else {
            return false;
        };
        let before = queue.len();
        queue.retain(|r| *r != request);
        let found = queue.len() < before;
        if queue.is_empty() {
            self.waiting.remove(&client);
            self.turns.retain(|c| *c != client);
        }
        found
    }

    /// The next request that `admit` lets begin: the first admitted one of the client whose turn it is,
    /// otherwise of the next client. The client is then the last in turn.
    pub(crate) fn next(&mut self, mut admit: impl FnMut(R) -> Admission) -> Option<R> {
        for turn in 0..self.turns.len() {
            let client = self.turns[turn];
            let waiting = self.waiting.get(&client).into_iter().flatten();
            for &request in waiting {
                match admit(request) {
                    Admission::Later => {}
                    Admission::Full => return None,
                    Admission::Now => {
                        self.turns.remove(turn);
                        self.turns.push_back(client);
                        self.remove(client, request);
                        return Some(request);
                    }
                }
            }
        }
        None
    }

    /// Number of waiting requests.
    pub(crate) fn len(&self) -> usize {
        self.waiting.values().map(VecDeque::len).sum()
    }
}

/// Rows of prompts in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Rows for prompts that must be cut.
    pub some: usize,
    /// Most rows for a prompt that fits whole, which then gets all of them.
    pub whole: usize,
}

/// Divides rows among prompts with `wanted` rows left each, in the order they came: half of `some`
/// for the first, the others for the shortest, which gets all its rows if that finishes it.
pub(crate) fn share(rows: Rows, wanted: &[usize]) -> Vec<usize> {
    let mut shares = vec![0; wanted.len()];
    let mut shortest: Vec<usize> = (0..wanted.len()).collect();
    shortest.sort_by_key(|&i| wanted[i]);
    let (Some(first), Some(&next)) = (shares.first_mut(), shortest.first()) else {
        return shares;
    };
    *first = wanted[0].min(rows.some.div_ceil(2));
    let mut left = rows.some - *first;
    let lacks = wanted[next] - shares[next];
    if lacks <= rows.whole {
        left = left.max(lacks);
    }
    for i in shortest {
        let more = (wanted[i] - shares[i]).min(left);
        shares[i] += more;
        left -= more;
    }
    shares
}

/// Estimates how many rows of prompts fit a time, learned from past steps.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    /// Seconds for rows of prompts.
    prompts: FittedLine,
    /// Seconds for a step without prompts.
    decode: Option<f64>,
    limits: PaceLimits,
}

/// How long prompts may delay others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PaceLimits {
    /// Longest time that decoding requests wait for a prompt to be computed whole.
    pub to_finish: Duration,
    /// Longest time that decoding requests wait for prompts of any length in a step, if there is such a limit.
    pub max_pause: Option<Duration>,
    /// Longest step of prompts alone: new and cancelled requests are not noticed for as long.
    pub alone: Duration,
    /// Rows before anything was learned, and the least number at any time.
    pub least: usize,
}

/// Weight of earlier steps in the average.
const KEPT: f64 = 0.8;
/// Time, in steps of decoding requests, that they may wait after each of their own for a prompt that
/// is cut into pieces: no stream then pauses for as long as three steps.
const STEPS: f64 = 1.8;

impl Pace {
    /// An estimate before any step.
    pub(crate) fn new(limits: PaceLimits) -> Self {
        Pace {
            prompts: FittedLine::default(),
            decode: None,
            limits,
        }
    }

    /// Learns from a step that took `took`, with `decoding` sequences and `rows` rows of prompts.
    pub(crate) fn learn(&mut self, took: Duration, decoding: usize, rows: usize) {
        let took = took.as_secs_f64();
        let decode = self.decode.unwrap_or(0.0);
        match (decoding, rows) {
            (0, 0) => {}
            (_, 0) => {
                let before = self.decode.unwrap_or(took);
                self.decode = Some(KEPT * before + (1.0 - KEPT) * took);
            }
            (0, rows) => self.prompts.learn(rows as f64, took),
            (_, rows) => self
                .prompts
                .learn(rows as f64, (took - decode).max(took / 4.0)),
        }
    }

    /// Rows of prompts for the next step beside `decoding` sequences: those that take less than two of
    /// their steps, and those that finish within [`PaceLimits::to_finish`]; cutting so short a
    /// prompt would delay others for longer. Neither takes longer than [`PaceLimits::max_pause`].
    pub(crate) fn rows(&self, decoding: usize) -> Rows {
        let within = |seconds: f64| self.prompts.within(seconds).unwrap_or(0);
        let PaceLimits {
            to_finish,
            max_pause,
            alone,
            least,
        } = self.limits;
        let pause = max_pause
            .filter(|_| decoding > 0)
            .map_or(f64::INFINITY, |p| p.as_secs_f64());
        let some = match decoding {
            0 => within(alone.as_secs_f64()),
            _ => within(pause.min(STEPS * self.decode.unwrap_or(0.0))),
        };
        Rows {
            some: some.max(least),
            whole: within(pause.min(to_finish.as_secs_f64())),
        }
    }

    /// Estimated time until a request of `rows` rows and `tokens` tokens would finish:
    /// for telling a client when to try again.
    pub(crate) fn estimate(&self, rows: usize, tokens: usize) -> Duration {
        let rows = self.prompts.at(rows as f64).unwrap_or(0.0);
        let decode = self.decode.unwrap_or(0.0) * tokens as f64;
        Duration::from_secs_f64((rows + decode).clamp(0.0, 3600.0))
    }
}

/// A line fitted to points by least squares; later points weigh more.
#[derive(Clone, Copy, Debug, Default)]
struct FittedLine {
    points: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl FittedLine {
    fn learn(&mut self, x: f64, y: f64) {
        let sums = [
            (&mut self.points, 1.0),
            (&mut self.x, x),
            (&mut self.y, y),
            (&mut self.xx, x * x),
            (&mut self.xy, x * y),
        ];
        for (sum, new) in sums {
            *sum = KEPT * *sum + new;
        }
    }

    /// Its intercept, at least zero, and its slope, above zero; through the origin if
    /// the points are too close together to tell.
    fn coefficients(&self) -> Option<(f64, f64)> {
        if self.points == 0.0 {
            return None;
        }
        let (x, y) = (self.x / self.points, self.y / self.points);
        let variance = self.xx / self.points - x * x;
        let slope = (self.xy / self.points - x * y) / variance;
        let at_zero = y - slope * x;
        let tells = variance > 0.01 * x * x && slope > 0.0 && at_zero >= 0.0;
        Some(if tells {
            (at_zero, slope)
        } else {
            (0.0, (y / x).max(1e-9))
        })
    }

    fn at(&self, x: f64) -> Option<f64> {
        self.coefficients().map(|(zero, slope)| zero + slope * x)
    }

    /// The largest integer `x` whose `y` is at most `most`.
    fn within(&self, most: f64) -> Option<usize> {
        self.coefficients()
            .map(|(zero, slope)| ((most - zero) / slope).max(0.0) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_take_turns_whatever_they_send() {
        let mut queue = Queue::default();
        for request in 0..5 {
            queue.push('a', request);
        }
        queue.push('b', 10);
        queue.push('c', 20);
        queue.push('b', 11);
        let mut order = Vec::new();
        while let Some(next) = queue.next(|_| Admission::Now) {
            order.push(next);
        }
        assert_eq!(order, [0, 10, 20, 1, 11, 2, 3, 4]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn one_that_must_wait_lets_others_go_and_a_full_house_lets_nobody() {
        let mut queue = Queue::default();
        queue.push('a', 0);
        queue.push('a', 1);
        queue.push('b', 2);
        let later = |r| match r {
            0 => Admission::Later,
            _ => Admission::Now,
        };
        assert_eq!(queue.next(later), Some(1));
        assert_eq!(queue.next(|_| Admission::Full), None);
        assert_eq!(queue.len(), 2);
        // A request that gave way comes first again.
        queue.push_front('a', 1);
        assert_eq!(queue.next(|_| Admission::Now), Some(1));
        assert!(queue.remove('b', 2) && !queue.remove('b', 2));
        assert_eq!(queue.next(|_| Admission::Now), Some(0));
        assert_eq!(queue.next(|_| Admission::Now), None);
    }

    #[test]
    fn the_first_prompt_gets_half_and_short_ones_do_not_wait() {
        let share = |some, wanted: &[usize]| super::share(Rows { some, whole: 0 }, wanted);
        assert_eq!(share(100, &[1000, 1000]), [100, 0]);
        assert_eq!(share(100, &[1000, 900, 20]), [50, 30, 20]);
        assert_eq!(share(100, &[10, 1000, 70]), [10, 20, 70]);
        assert_eq!(share(100, &[10, 20]), [10, 20]);
        assert_eq!(share(3, &[5, 5, 5]), [3, 0, 0]);
        assert_eq!(share(0, &[5]), [0]);
        assert!(share(7, &[]).is_empty());
    }

    #[test]
    fn a_prompt_that_is_done_soon_is_not_cut() {
        let share = |wanted: &[usize]| {
            super::share(
                Rows {
                    some: 100,
                    whole: 500,
                },
                wanted,
            )
        };
        assert_eq!(share(&[500]), [500]);
        assert_eq!(share(&[700]), [100]);
        assert_eq!(share(&[8000, 600, 480]), [50, 0, 480]);
        assert_eq!(share(&[500, 500]), [500, 0]);
    }

    /// 10 ms plus 1 ms per row, whatever else runs.
    fn learned(max_pause: Option<Duration>) -> Pace {
        let ms = Duration::from_millis;
        let mut pace = Pace::new(PaceLimits {
            to_finish: ms(90),
            max_pause,
            alone: ms(500),
            least: 16,
        });
        assert_eq!((pace.rows(3).some, pace.rows(0).some), (16, 16));
        for rows in (20..60).chain(20..60) {
            pace.learn(ms(30), 4, 0);
            pace.learn(ms(40 + rows), 4, rows as usize);
            pace.learn(ms(10 + 2 * rows), 0, 2 * rows as usize);
        }
        pace
    }

    #[test]
    fn a_long_prompt_takes_less_than_two_steps_of_those_who_decode() {
        let mut pace = learned(None);
        assert!((42..=45).contains(&pace.rows(4).some));
        assert!((480..=491).contains(&pace.rows(0).some));
        assert!((78..=81).contains(&pace.rows(4).whole));
        assert!((2.9..3.1).contains(&pace.estimate(100, 97).as_secs_f64()));
        // One slow step does not change everything.
        pace.learn(Duration::from_millis(300), 4, 0);
        assert!(pace.rows(4).some < 160);
    }

    #[test]
    fn a_limit_on_pauses_holds_for_short_and_long_prompts() {
        let pace = learned(Some(Duration::from_millis(40)));
        let rows = pace.rows(4);
        assert!(
            (28..=31).contains(&rows.some) && rows.some == rows.whole,
            "{rows:?}"
        );
        // Nobody waits while nothing decodes.
        assert!((480..=491).contains(&pace.rows(0).some));
        let pace = learned(Some(Duration::from_millis(1)));
        assert_eq!(pace.rows(4).some, 16, "prompts end all the same");
    }

    /// If all pieces have the same size, the line passes through the origin.
    #[test]
    fn pieces_that_are_all_alike_give_a_rate() {
        let mut line = FittedLine::default();
        for _ in 0..10 {
            line.learn(100.0, 5.0);
        }
        assert_eq!(line.within(2.5), Some(50));
        assert_eq!(line.at(200.0), Some(10.0));
    }
}
