//! Who is served next, and how much of a step prompts may take: policy alone, with no session, no
//! thread and no clock of its own.
//!
//! Requests wait in a queue per client. Clients take turns, so that one who sends a hundred
//! requests delays another by one. Of the rows that a step has for prompts, half go to the one that came
//! first, so that none starves, and the others to those that lack least, so that a short one does not
//! wait for long ones. How many rows there are follows from time: what prompts may add to a step is
//! bounded, since everybody who decodes waits for it (chunked prefill: Sarathi-Serve, arXiv
//! 2403.02310).

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Whether a request may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Now.
    Now,
    /// Not yet, for a reason of its own: others may go first.
    Later,
    /// Nothing more fits.
    Full,
}

/// Requests that wait, by client. `K` names a client, `R` a request.
#[derive(Debug)]
pub struct Queue<K, R> {
    waiting: HashMap<K, VecDeque<R>>,
    /// Clients that have requests waiting, the next one first.
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
    /// Puts a request behind its client's others.
    pub fn push(&mut self, client: K, request: R) {
        self.of(client).push_back(request);
    }

    /// Puts a request that had begun, and had to give way, before all others.
    pub fn push_front(&mut self, client: K, request: R) {
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

    /// Takes a request out that no longer waits; false if it did not.
    pub fn remove(&mut self, client: K, request: R) -> bool {
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

    /// The next request that `admit` lets begin: of the client whose turn it is the first one that
    /// may, then of the next client. The client then goes behind the others.
    pub fn next(&mut self, mut admit: impl FnMut(R) -> Admission) -> Option<R> {
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

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.waiting.values().map(VecDeque::len).sum()
    }

    /// True if none waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// Splits `rows` among prompts, of which `wanted` rows each are left, in the order they came: half for
/// the first, the rest for the shortest.
pub fn share(rows: usize, wanted: &[usize]) -> Vec<usize> {
    let mut shares = vec![0; wanted.len()];
    let mut left = rows;
    let mut shortest: Vec<usize> = (0..wanted.len()).collect();
    shortest.sort_by_key(|&i| wanted[i]);
    let first = wanted.first().map(|_| (0, rows.div_ceil(2)));
    for (i, most) in first
        .into_iter()
        .chain(shortest.into_iter().map(|i| (i, rows)))
    {
        let more = (wanted[i] - shares[i]).min(most).min(left);
        shares[i] += more;
        left -= more;
    }
    shares
}

/// How many rows of prompts fit a stretch of time, learned from the steps that ran.
#[derive(Clone, Debug)]
pub struct Pace {
    /// Seconds a row of a prompt takes.
    row: Option<f64>,
    /// Seconds a step without prompts takes.
    decode: Option<f64>,
    /// What prompts may add to a step for those who decode, at least.
    floor: Duration,
    /// The longest step of prompts alone: so long may an arrival or a cancellation go unseen.
    alone: Duration,
    /// Rows before anything is known, and the fewest ever: fewer take as long.
    least: usize,
}

/// Weight of the latest step in what is learned.
const LATEST: f64 = 0.2;
/// Steps that those who decode may wait for prompts after each of their own: a stream then never
/// stops for as long as three.
const STEPS: f64 = 1.5;

impl Pace {
    /// With what prompts may add to others' steps at least, the longest step of prompts alone, and
    /// the fewest rows that are worth a step.
    pub fn new(floor: Duration, alone: Duration, least: usize) -> Self {
        Pace {
            row: None,
            decode: None,
            floor,
            alone,
            least,
        }
    }

    /// Learns from a step that took `took`: with `decoding` sequences and `rows` of prompts.
    pub fn learn(&mut self, took: Duration, decoding: usize, rows: usize) {
        let blend = |old: &mut Option<f64>, new: f64| {
            *old = Some(old.map_or(new, |old| old + LATEST * (new - old)));
        };
        let took = took.as_secs_f64();
        match (decoding, rows) {
            (0, 0) => {}
            (_, 0) => blend(&mut self.decode, took),
            // Of so few rows the step's fixed cost is most.
            (_, rows) if rows < self.least && self.row.is_some() => {}
            (0, rows) => blend(&mut self.row, took / rows as f64),
            (_, rows) => {
                let own = (took - self.decode.unwrap_or(0.0)).max(took / 4.0);
                blend(&mut self.row, own / rows as f64);
            }
        }
    }

    /// Rows of prompts for the next step beside `decoding` sequences: so many that those wait for
    /// [`STEPS`] times as long as their own step takes.
    pub fn rows(&self, decoding: usize) -> usize {
        let Some(row) = self.row else {
            return self.least;
        };
        let time = match decoding {
            0 => self.alone.as_secs_f64(),
            _ => (STEPS * self.decode.unwrap_or(0.0)).max(self.floor.as_secs_f64()),
        };
        ((time / row.max(1e-9)) as usize).max(self.least)
    }

    /// Seconds until a request of `rows` rows and `tokens` tokens might be through, as far as is
    /// known: for a client that is told to come again.
    pub fn estimate(&self, rows: usize, tokens: usize) -> Duration {
        let row = self.row.unwrap_or(0.0) * rows as f64;
        let decode = self.decode.unwrap_or(0.0) * tokens as f64;
        Duration::from_secs_f64((row + decode).clamp(0.0, 3600.0))
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
        assert!(queue.is_empty());
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
        // One that gave way comes first again.
        queue.push_front('a', 1);
        assert_eq!(queue.next(|_| Admission::Now), Some(1));
        assert!(queue.remove('b', 2) && !queue.remove('b', 2));
        assert_eq!(queue.next(|_| Admission::Now), Some(0));
        assert_eq!(queue.next(|_| Admission::Now), None);
    }

    #[test]
    fn the_first_prompt_gets_half_and_short_ones_do_not_wait() {
        assert_eq!(share(100, &[1000, 1000]), [100, 0]);
        assert_eq!(share(100, &[1000, 900, 20]), [50, 30, 20]);
        assert_eq!(share(100, &[10, 1000, 70]), [10, 20, 70]);
        assert_eq!(share(100, &[10, 20]), [10, 20]);
        assert_eq!(share(3, &[5, 5, 5]), [3, 0, 0]);
        assert_eq!(share(0, &[5]), [0]);
        assert!(share(7, &[]).is_empty());
    }

    #[test]
    fn prompts_take_half_as_long_again_as_a_step_of_those_who_decode() {
        const LEAST: usize = 16;
        let ms = Duration::from_millis;
        let mut pace = Pace::new(ms(5), ms(500), LEAST);
        assert_eq!(pace.rows(3), LEAST);
        for _ in 0..50 {
            pace.learn(ms(20), 4, 0);
            pace.learn(ms(120), 4, 100); // 1 ms a row
        }
        assert!((25..=35).contains(&pace.rows(4)), "{}", pace.rows(4));
        assert!((400..=600).contains(&pace.rows(0)), "{}", pace.rows(0));
        assert!(pace.estimate(1000, 100) > ms(2000));
        // A step of a few rows says nothing about a row.
        let before = pace.rows(0);
        pace.learn(ms(50), 0, 1);
        assert_eq!(pace.rows(0), before);
    }
}
