//! The search for the path nearest to a sequence (Viterbi's), for a few sequences side by side.
//!
//! States with the same low bits, a tail, have the same successors, so a step keeps the least cost of a path to each
//! tail. It looks at all 65,536 states, 16 in a vector; sequences side by side share the loads of the states' values.
//! Which state was the best is not noted but found again on the way back, from the costs before each step.

use multiversion::target::selected_target;
use nq_formats::trellis::{Code, TrellisScheme};
use std::array::from_fn;

/// States in a vector.
const LANES: usize = 16;
const STATES: usize = 1 << 16;

/// Functions that are compiled for each of these sets besides the baseline. What they call must be
/// `#[inline(always)]`, as only code within them is compiled so.
macro_rules! vectorized {
    ($($function:item)*) => {$(
        #[multiversion::multiversion(targets(
            "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma",
            "x86_64+avx2+fma",
        ))]
        $function
    )*};
}

/// The values of all states, in the order in which a step reads them.
#[derive(Clone, Debug)]
pub(super) struct Table {
    scheme: TrellisScheme,
    /// For each 16 tails, for each value of the high bits: the values of the 16 states, one place in the step after
    /// the other.
    values: Vec<[f32; LANES]>,
}

impl Table {
    pub(super) fn new(scheme: TrellisScheme) -> Self {
        let (code, tails) = (scheme.code(), STATES >> scheme.step_bits());
        let mut values = Vec::with_capacity(STATES / LANES * code.width());
        for tail in (0..tails).step_by(LANES) {
            for first in (tail..STATES).step_by(tails) {
                let of_states: [_; LANES] = from_fn(|lane| code.values((first + lane) as u16));
                values.extend((0..code.width()).map(|place| of_states.map(|v| v[place])));
            }
        }
        Table { scheme, values }
    }

    pub(super) fn scheme(&self) -> TrellisScheme {
        self.scheme
    }

    fn tails(&self) -> usize {
        STATES >> self.scheme.step_bits()
    }

    /// Sequences that are best searched side by side: fewer where the costs of all steps would not fit a core's
    /// cache.
    pub(super) fn side(&self) -> usize {
        // Of one sequence.
        let bytes = 2 * self.scheme.steps() * self.tails();
        let fit = |bytes| bytes <= 1 << 20;
        if fit(4 * bytes) {
            4
        } else if fit(bytes) {
            2
        } else {
            1
        }
    }

    /// Steps on each side of the seam that settle it: enough that looking at all of them would have less than 0.5 %
    /// less error.
    pub(super) fn window(&self) -> usize {
        let bits = match self.scheme.code() {
            Code::Sum => 264,
            Code::Octagon => 176,
        };
        (bits / self.scheme.step_bits() as usize).min(self.scheme.steps() / 2)
    }
}

/// The search's memory for `S` sequences side by side.
#[derive(Default)]
pub(super) struct Search<const S: usize> {
    /// The least costs of paths that end in each tail, of one sequence after the other, before and after a step.
    costs: Vec<f32>,
    next: Vec<f32>,
    /// Those before all steps, less the least of them: the high halves of f32.
    history: Vec<u16>,
    /// `[sequence, step]`
    states: Vec<u16>,
}

impl<const S: usize> Search<S> {
    /// States of cyclic paths near `targets` (in units of the values), of one sequence after the other. A first search
    /// over the steps around the seam settles its tail, a second one over all steps keeps to that.
    pub(super) fn cyclic(&mut self, table: &Table, targets: [&[f32]; S]) -> &[u16] {
        let (steps, window) = (table.scheme.steps(), table.window());
        let around = (steps - window..steps).chain(0..window);
        self.pass(table, &targets, around, None);
        let seam =
            from_fn(|s| usize::from(self.states[s * steps + steps - 1]) & (table.tails() - 1));
        self.pass(table, &targets, 0..steps, Some(seam));
        &self.states
    }

    /// Finds the best states of consecutive steps; with a seam, of the paths from that tail to that tail.
    fn pass(
        &mut self,
        table: &Table,
        targets: &[&[f32]; S],
        steps: impl DoubleEndedIterator<Item = usize> + Clone,
        seam: Option<[usize; S]>,
    ) {
        let (tails, width) = (table.tails(), table.scheme.code().width());
        let target = |s: usize, step: usize| -> [f32; 2] {
            let x = &targets[s][step * width..][..width];
            [x[0], *x.get(1).unwrap_or(&0.0)]
        };
        self.costs.clear();
        self.costs
            .resize(S * tails, if seam.is_some() { f32::INFINITY } else { 0.0 });
        for (costs, seam) in self
            .costs
            .chunks_exact_mut(tails)
            .zip(seam.iter().flatten())
        {
            costs[*seam] = 0.0;
        }
        self.next.resize(S * tails, 0.0);
        self.states.resize(S * table.scheme.steps(), 0);
        self.history.clear();
        for step in steps.clone() {
            let x: [_; S] = from_fn(|s| target(s, step));
            for (costs, [x, y]) in self.costs.chunks_exact_mut(tails).zip(x) {
                remember(costs, x * x + y * y, &mut self.history);
            }
            let (costs, next) = (&self.costs, &mut self.next);
            match (table.scheme.code(), table.scheme.step_bits()) {
                (Code::Octagon, _) => pairs(table, x, costs, next),
                (Code::Sum, 2) => singles_of_2_bits(table, x, costs, next),
                (Code::Sum, 3) => singles_of_3_bits(table, x, costs, next),
                (Code::Sum, _) => singles(table, x, costs, next),
            }
            std::mem::swap(&mut self.costs, &mut self.next);
        }
        let mut tail =
            seam.unwrap_or_else(|| from_fn(|s| least(&self.costs[s * tails..][..tails])));
        for (step, before) in steps.rev().zip(self.history.rchunks_exact(S * tails)) {
            for (s, before) in before.chunks_exact(tails).enumerate() {
                let state = best(table.scheme, target(s, step), before, tail[s]);
                self.states[s * table.scheme.steps() + step] = state as u16;
                tail[s] = state >> table.scheme.step_bits();
            }
        }
    }
}

/// The place of the least cost.
fn least(costs: &[f32]) -> usize {
    let order = costs.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1));
    order.map_or(0, |(tail, _)| tail)
}

vectorized! {
    /// Subtracts the least cost from all, so that they stay small, and keeps their high halves; then adds `square`.
    fn remember(costs: &mut [f32], square: f32, history: &mut Vec<u16>) {
        let mut least = [f32::INFINITY; LANES];
        for costs in costs.as_chunks::<LANES>().0 {
            least = from_fn(|i| if costs[i] < least[i] { costs[i] } else { least[i] });
        }
        let least = least.iter().fold(f32::INFINITY, |a, &b| a.min(b));
        history.extend(costs.iter().map(|&c| ((c - least).max(0.0).to_bits() >> 16) as u16));
        costs.iter_mut().for_each(|c| *c = *c - least + square);
    }

    /// The best state with this tail, by the costs of paths to the tails before.
    fn best(scheme: TrellisScheme, x: [f32; 2], before: &[u16], tail: usize) -> usize {
        match scheme.code() {
            Code::Octagon => best_state(Code::Octagon, scheme.step_bits(), x, before, tail),
            Code::Sum => best_state(Code::Sum, scheme.step_bits(), x, before, tail),
        }
    }

    fn pairs<const S: usize>(t: &Table, x: [[f32; 2]; S], costs: &[f32], next: &mut [f32]) {
        const FUSED: bool = selected_target!().supports_feature_str("fma");
        step::<2, S, LANES, FUSED>(t, x, costs, next);
    }

    fn singles<const S: usize>(t: &Table, x: [[f32; 2]; S], costs: &[f32], next: &mut [f32]) {
        const FUSED: bool = selected_target!().supports_feature_str("fma");
        step::<1, S, LANES, FUSED>(t, x, costs, next);
    }

    fn singles_of_3_bits<const S: usize>(t: &Table, x: [[f32; 2]; S], costs: &[f32], next: &mut [f32]) {
        const FUSED: bool = selected_target!().supports_feature_str("fma");
        step::<1, S, 8, FUSED>(t, x, costs, next);
    }

    fn singles_of_2_bits<const S: usize>(t: &Table, x: [[f32; 2]; S], costs: &[f32], next: &mut [f32]) {
        const FUSED: bool = selected_target!().supports_feature_str("fma");
        step::<1, S, 4, FUSED>(t, x, costs, next);
    }
}

/// [`best`], for a code that the compiler knows.
#[inline(always)]
fn best_state(code: Code, bits: u32, x: [f32; 2], before: &[u16], tail: usize) -> usize {
    let tails = before.len();
    let side = LANES.min(1 << bits);
    let mut least = [f32::INFINITY; LANES];
    let mut states = [tail as u32; LANES];
    for first in (tail..STATES).step_by(side * tails) {
        let mut costs = [0.0; LANES];
        for (i, cost) in costs[..side].iter_mut().enumerate() {
            *cost = f32::from_bits(u32::from(before[(first + i * tails) >> bits]) << 16);
        }
        for i in 0..side {
            let state = (first + i * tails) as u32;
            let [v, w] = code.values(state as u16);
            let cost = costs[i] + (x[0] - v) * (x[0] - v) + (x[1] - w) * (x[1] - w);
            let less = cost < least[i];
            least[i] = if less { cost } else { least[i] };
            states[i] = if less { state } else { states[i] };
        }
    }
    states[self::least(&least)] as usize
}

/// One step of `S` sequences, of `W` values: the least `before + |v|^2 - 2 x v` for each tail, where `RUN` states of a
/// vector come from the same tail.
#[inline(always)]
fn step<const W: usize, const S: usize, const RUN: usize, const FUSED: bool>(
    table: &Table,
    x: [[f32; 2]; S],
    costs: &[f32],
    next: &mut [f32],
) {
    let (bits, tails) = (table.scheme.step_bits(), table.tails());
    let twice = x.map(|x| x.map(|x| -2.0 * x));
    let costs: [&[f32]; S] = from_fn(|s| &costs[s * tails..(s + 1) * tails]);
    let vectors = table.values.as_chunks::<W>().0;
    for (block, vectors) in vectors.chunks_exact(1 << bits).enumerate() {
        let mut least = [[f32::INFINITY; LANES]; S];
        let mut first = block * LANES;
        for values in vectors {
            let values = *values;
            let from = first >> bits;
            first += tails;
            let mut square = [0.0; LANES];
            for i in 0..LANES {
                square[i] = values[0][i] * values[0][i];
                for v in &values[1..] {
                    square[i] = multiply_add::<FUSED>(v[i], v[i], square[i]);
                }
            }
            for s in 0..S {
                let before = spread::<RUN>(&costs[s][from..]);
                for i in 0..LANES {
                    let mut cost = before[i] + square[i];
                    for place in 0..W {
                        cost = multiply_add::<FUSED>(values[place][i], twice[s][place], cost);
                    }
                    least[s][i] = if cost < least[s][i] {
                        cost
                    } else {
                        least[s][i]
                    };
                }
            }
        }
        for (s, least) in least.iter().enumerate() {
            next[s * tails + block * LANES..][..LANES].copy_from_slice(least);
        }
    }
}

/// `a b + c`, rounded once where that is one instruction.
#[inline(always)]
fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// The first costs, each for `RUN` lanes.
#[inline(always)]
fn spread<const RUN: usize>(costs: &[f32]) -> [f32; LANES] {
    match RUN {
        4 => {
            let [a, b, c, d] = [costs[0], costs[1], costs[2], costs[3]];
            [a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d]
        }
        8 => {
            let [a, b] = [costs[0], costs[1]];
            [a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b]
        }
        _ => [costs[0]; LANES],
    }
}
