//! The end of a step: tokens compared with the documented steps over all logits, in f64, and
//! log-probabilities compared with a softmax in f64.

use super::{gpu, is_sanitizing, pack};
use nq_cuda::{
    Adjustments, Advance, Buffer, Candidates, Checked, DeviceLinear, Gpu, Logprobs, MOST_LOGPROBS,
    Mapped, NONE_ALLOWED, NOT_FINITE, Places, Sampling, Stack, Step, StepBounds, Stream,
};
use nq_kernels::rng::Philox;
use nq_model::DType;
use nq_testkit::weights::{dense, normal};

/// Number of sequences in a step.
const M: usize = 3;
/// Number of tokens that the host may be behind.
const RING: usize = 4;
/// Number of logits of which the head's product gives the best.
const HEAD_BLOCK: usize = 100;
const HIDDEN: usize = 16;
/// Number of positions of a sequence.
const POSITIONS: usize = 100;

/// A sequence's settings.
#[derive(Clone)]
struct Asked {
    how: Sampling,
    bias: Vec<(u32, f32)>,
    mask: Option<Vec<u32>>,
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

/// Inputs and outputs of a step's end.
struct Bench {
    stream: Stream,
    vocab: usize,
    logits: Buffer<f32>,
    best: Buffer<[f32; 2]>,
    blocks: usize,
    candidates: Candidates,
    sampling: Buffer<Sampling>,
    adjust: Adjustments,
    step: Checked<Step>,
    ring: Mapped<u32>,
    logprobs: Mapped<Logprobs>,
    embedding: DeviceLinear,
    x: Buffer<f32>,
}

/// Bounds for sequences of up to [`POSITIONS`], and an idle slot.
fn bounds(vocab: usize) -> StepBounds {
    let places = Places {
        positions: POSITIONS,
        slots: M + 1,
        images: 0,
    };
    StepBounds {
        places,
        tokens: vocab,
    }
}

impl Bench {
    fn new(gpu: &Gpu, vocab: usize) -> Self {
        let blocks = vocab.div_ceil(HEAD_BLOCK);
        Bench {
            stream: gpu.stream().unwrap(),
            vocab,
            logits: gpu.zeros("a test", M * vocab).unwrap(),
            best: gpu.zeros("a test", M * blocks).unwrap(),
            blocks,
            candidates: Candidates::new(gpu, vocab, M).unwrap().unwrap(),
            sampling: gpu.zeros("a test", M).unwrap(),
            adjust: Adjustments::new(gpu, vocab, M).unwrap(),
            step: Checked::new(gpu, "a test", M, Step::default(), bounds(vocab)).unwrap(),
            ring: gpu.mapped("a test", M * RING, 0).unwrap(),
            logprobs: gpu.mapped("a test", M * RING, Logprobs::default()).unwrap(),
            embedding: pack(gpu, &[&dense(DType::F16, vocab, HIDDEN, 5)], Stack::Concat),
            x: gpu.zeros("a test", M * HIDDEN).unwrap(),
        }
    }

    fn write_logits(&mut self, logits: &[f32]) {
        self.logits.write(0, logits).unwrap();
        let best_of = |(b, block): (usize, &[f32])| {
            let mut best = (f32::NEG_INFINITY, 0);
            for (i, &x) in block.iter().enumerate() {
                if x > best.0 {
                    best = (x, b * HEAD_BLOCK + i);
                }
            }
            [best.0, f32::from_bits(best.1 as u32)]
        };
        for (row, logits) in logits.chunks(self.vocab).enumerate() {
            let blocks = logits.chunks(HEAD_BLOCK).enumerate();
            let best: Vec<[f32; 2]> = blocks.map(best_of).collect();
            self.best.write(row * self.blocks, &best).unwrap();
        }
    }

    fn write_rows(&mut self, rows: &[Asked]) {
        for (row, asked) in rows.iter().enumerate() {
            self.sampling.write(row, &[asked.how]).unwrap();
            self.step.write(row, &[Step::default()]).unwrap();
            if !asked.bias.is_empty() {
                self.adjust
                    .write_bias(&self.stream, row, &asked.bias)
                    .unwrap();
            }
            if let Some(mask) = &asked.mask {
                self.adjust.write_mask(&self.stream, row, mask).unwrap();
            }
            let count = |id: u32| asked.answer.iter().filter(|&&t| t == id).count() as u32;
            let ids = asked.prompt.iter().chain(&asked.answer);
            let seen: Vec<(u32, bool, u32)> = ids
                .map(|&id| (id, asked.prompt.contains(&id), count(id)))
                .collect();
            let adjust = &mut self.adjust;
            adjust
                .write_seen(&self.stream, row, seen.into_iter())
                .unwrap();
        }
    }

    /// Runs a step's end: the tokens and their log-probabilities.
    fn run(&mut self, lists: bool) -> Vec<(u32, Logprobs)> {
        let mut steps = [Step::default(); M];
        self.step.values().read(0, &mut steps).unwrap();
        if lists {
            self.stream
                .candidates(
                    &self.logits,
                    &self.best,
                    self.blocks,
                    &self.sampling,
                    &self.adjust,
                    &mut self.candidates,
                    self.vocab,
                    M,
                )
                .unwrap();
        }
        let advance = Advance {
            m: M,
            logits: &self.logits,
            best: &self.best,
            blocks: self.blocks,
            candidates: lists.then_some(&self.candidates),
            sampling: &self.sampling,
            adjust: &mut self.adjust,
            step: &mut self.step,
            ring: &mut self.ring,
            logprobs: &mut self.logprobs,
            ring_len: RING,
            ids: None,
            embedding: &self.embedding,
            x: &mut self.x,
            idle: M,
        };
        self.stream.advance(advance).unwrap();
        self.stream.synchronize().unwrap();
        let place = |row: usize| row * RING + steps[row].drawn as usize % RING;
        let found = |row| (self.ring.load(place(row)), self.logprobs.load(place(row)));
        (0..M).map(found).collect()
    }
}

/// The logits from which a token is chosen, without excluded ones, best first.
fn adjusted(logits: &[f32], asked: &Asked) -> Vec<(f32, u32)> {
    let mut x = logits.to_vec();
    for &(id, bias) in &asked.bias {
        x[id as usize] += bias;
    }
    let h = &asked.how;
    for (id, x) in (0..).zip(&mut x) {
        let count = asked.answer.iter().filter(|&&t| t == id).count();
        if h.adjusts & Sampling::PENALIZED != 0 && (count > 0 || asked.prompt.contains(&id)) {
            *x = if *x > 0.0 {
                *x / h.repetition
            } else {
                *x * h.repetition
            };
        }
        if h.adjusts & Sampling::PENALIZED != 0 && count > 0 {
            *x -= h.frequency * count as f32;
            *x -= h.presence;
        }
    }
    let allowed = |id: u32| {
        let bit = |m: &Vec<u32>| m[id as usize / 32] >> (id % 32) & 1 == 1;
        asked.mask.as_ref().is_none_or(bit)
    };
    let mut kept: Vec<(f32, u32)> = (x.into_iter().zip(0..))
        .filter(|c| c.0 > f32::NEG_INFINITY && allowed(c.1))
        .collect();
    kept.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    kept
}

/// The tokens that may be drawn at `u`: the device's exponentials are off by some 1e-7, so bounds
/// within `1e-5` of a decision allow either side.
fn drawable(sorted: &[(f32, u32)], how: &Sampling, u: f64) -> Vec<u32> {
    if how.temperature == 0.0 || how.top_k == 1 {
        return vec![sorted[0].1];
    }
    let weigh = |c: &(f32, u32)| (f64::from(c.0 - sorted[0].0) / f64::from(how.temperature)).exp();
    let mut all = Vec::new();
    for nudge in [-1e-5, 0.0, 1e-5] {
        let mut kept = sorted.to_vec();
        if how.top_k > 0 {
            kept.truncate(how.top_k as usize);
        }
        if how.top_p < 1.0 {
            let target = f64::from(how.top_p) + nudge;
            let target = target * kept.iter().map(weigh).sum::<f64>();
            let mut sum = 0.0;
            let below = |c: &(f32, u32)| {
                let below = sum < target;
                sum += weigh(c);
                below
            };
            let n = kept.iter().map(below).filter(|&b| b).count();
            kept.truncate(n.max(1));
        }
        let floor = f64::from(how.min_p) * (1.0 + nudge);
        kept.retain(|c| weigh(c) >= floor);
        kept.sort_by_key(|c| c.1);
        let total: f64 = kept.iter().map(weigh).sum();
        let mut sum = 0.0;
        for c in &kept {
            let before = sum;
            sum += weigh(c);
            if before < (u + 1e-5) * total && sum > (u - 1e-5) * total {
                all.push(c.1);
            }
        }
    }
    all
}

/// The number in [0, 1) that decides a draw, by the documented rule.
fn uniform(how: &Sampling, drawn: u64) -> f64 {
    let word = |w: [u32; 2]| u64::from(w[1]) << 32 | u64::from(w[0]);
    let position = word(how.position) + drawn;
    let [w0, w1, ..] = Philox::block(how.seed, word(how.stream), position);
    (u64::from(w0) << 21 | u64::from(w1) >> 11) as f64 / (1u64 << 53) as f64
}

fn check_logprobs(said: &Logprobs, logits: &[f32], token: u32, top: usize, what: &str) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weigh = |&x: &f32| (f64::from(x) - f64::from(max)).exp();
    let total = logits.iter().map(weigh).sum::<f64>().ln();
    let close = |found: f32, id: u32| {
        let exact = f64::from(logits[id as usize]) - f64::from(max) - total;
        assert!(
            (f64::from(found) - exact).abs() < 1e-5,
            "{what}: {found}, not {exact}"
        );
    };
    close(said.chosen, token);
    let mut sorted: Vec<(f32, u32)> = (logits.iter().copied().zip(0..))
        .filter(|c| c.0 > f32::NEG_INFINITY)
        .collect();
    sorted.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    sorted.truncate(top);
    let n = said.count as usize;
    let expected: Vec<u32> = sorted.iter().map(|c| c.1).collect();
    let ids: Vec<u32> = said.ids[..n].iter().map(|&id| id as u32).collect();
    assert_eq!(ids, expected, "{what}: the best");
    (said.values.iter().zip(&expected)).for_each(|(&value, &id)| close(value, id));
}

struct Random(Philox);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0.next_u32() as usize % n
    }
    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// A random combination of settings.
    fn asked(&mut self, vocab: usize) -> Asked {
        let penalties = self.below(2) == 0;
        let (biased, masked) = (self.below(3) == 0, self.below(3) == 0);
        let mut bias = Vec::new();
        if biased {
            for id in (0..vocab as u32).step_by(1 + self.below(70)) {
                bias.push((id, self.of(&[-100.0, f32::NEG_INFINITY, -0.7, 0.5, 2.5])));
            }
        }
        // From nearly all tokens to a handful.
        let ands = self.below(9);
        let words = vocab.div_ceil(32);
        let mask = masked.then(|| {
            let mut mask: Vec<u32> = (0..words)
                .map(|_| (0..ands).fold(u32::MAX, |w, _| w & self.0.next_u32()))
                .collect();
            mask[self.below(vocab / 32)] |= 1 << self.below(32);
            mask
        });
        let flag = |bit, set| if set { bit } else { 0 };
        let how = Sampling {
            temperature: self.of(&[0.0, 0.3, 1.0, 1.7]),
            top_p: self.of(&[1.0, 1.0, 0.5, 0.95]),
            min_p: self.of(&[0.0, 0.0, 0.02, 0.3]),
            repetition: if penalties {
                self.of(&[1.0, 1.3, 0.8])
            } else {
                1.0
            },
            frequency: if penalties {
                self.of(&[0.0, 0.7, -0.3])
            } else {
                0.0
            },
            presence: if penalties {
                self.of(&[0.0, 0.6, -0.2])
            } else {
                0.0
            },
            top_k: self.of(&[0, 0, 1, 20, 64, 65, 200, 3000]),
            adjusts: flag(Sampling::PENALIZED, penalties)
                + flag(Sampling::BIASED, biased)
                + flag(Sampling::MASKED, masked),
            logprobs: self.of(&[0, 0, 1, 6, 1 + MOST_LOGPROBS as i32]),
            seed: [self.0.next_u32(), 7],
            stream: [self.0.next_u32(), self.0.next_u32()],
            position: [self.0.next_u32(), 1],
        };
        let mut few = |n| (0..n).map(|_| self.below(80.min(vocab)) as u32).collect();
        Asked {
            how,
            bias,
            mask,
            prompt: few(8),
            answer: few(6),
        }
    }

    /// Logits that are greater for low ids: a few tokens matter, or thousands.
    fn logits(&mut self, vocab: usize) -> Vec<f32> {
        let slope = self.of(&[0.0, 0.05, 0.3]);
        let grid = self.of(&[None, Some(8.0f32)]); // many are equal
        let excluded = self.of(&[0, 0, 40]);
        let one = |i: usize| {
            let x = self.0.normal() * 1.5 - slope * i.min(60) as f32;
            let x = grid.map_or(x, |g| (x * g).round() / g);
            if excluded > 0 && i % 100 < excluded {
                f32::NEG_INFINITY
            } else {
                x
            }
        };
        (0..vocab).map(one).collect()
    }
}

/// Any combination of mask, biases, penalties, filters and log-probabilities, with and without the
/// lists of `candidates`.
#[test]
fn tokens_follow_the_documented_steps() {
    let Some(gpu) = gpu() else { return };
    let sizes: &[(usize, usize)] = if is_sanitizing() {
        &[(300, 6)]
    } else {
        &[(300, 120), (5000, 120), (40_007, 40), (151_936, 16)]
    };
    for &(vocab, cases) in sizes {
        let mut random = Random(Philox::new(vocab as u64, 3));
        let mut bench = Bench::new(&gpu, vocab);
        for case in 0..cases {
            let logits: Vec<f32> = (0..M).flat_map(|_| random.logits(vocab)).collect();
            bench.write_logits(&logits);
            let mut rows: Vec<Asked> = (0..M).map(|_| random.asked(vocab)).collect();
            bench.write_rows(&rows);
            for drawn in 0..RING + 1 {
                let lists = case % 3 != 0;
                let found = bench.run(lists);
                for (row, (asked, (token, said))) in rows.iter_mut().zip(found).enumerate() {
                    let logits = &logits[row * vocab..][..vocab];
                    let what = format!(
                        "vocabulary {vocab}, case {case}, row {row}, draw {drawn}, lists {lists}, \
                         {:?}",
                        asked.how
                    );
                    let sorted = adjusted(logits, asked);
                    if sorted.is_empty() {
                        assert_eq!(token, NONE_ALLOWED, "{what}");
                        continue;
                    }
                    let u = uniform(&asked.how, drawn as u64);
                    let expected = drawable(&sorted, &asked.how, u);
                    assert!(
                        expected.contains(&token),
                        "{what}: {token}, not {expected:?}"
                    );
                    if asked.how.logprobs > 0 {
                        let top = asked.how.logprobs as usize - 1;
                        check_logprobs(&said, logits, token, top, &what);
                    }
                    asked.answer.push(token);
                }
            }
        }
    }
}

/// Plain logits of three rows, all with the settings `how`.
fn plain(bench: &mut Bench, how: Sampling) -> (Vec<f32>, Vec<Asked>) {
    let logits = normal(M * bench.vocab, 61);
    bench.write_logits(&logits);
    let asked = Asked {
        how,
        bias: Vec::new(),
        mask: None,
        prompt: Vec::new(),
        answer: Vec::new(),
    };
    (logits, vec![asked; M])
}

#[test]
fn steps_without_a_token_say_why() {
    let Some(gpu) = gpu() else { return };
    let mut bench = Bench::new(&gpu, 3000);
    for temperature in [0.0, 1.0] {
        let how = Sampling {
            temperature,
            top_p: 1.0,
            repetition: 1.0,
            ..Sampling::default()
        };
        for lists in [false, true] {
            let (mut logits, mut rows) = plain(&mut bench, how);
            // Nothing is allowed; the model excludes the only token allowed; one token is allowed.
            for (row, bit) in rows.iter_mut().zip([None, Some(5), Some(6)]) {
                let mut mask = vec![0; 3000usize.div_ceil(32)];
                mask[0] = bit.map_or(0, |b| 1 << b);
                row.mask = Some(mask);
                row.how.adjusts = Sampling::MASKED;
            }
            logits[3000 + 5] = f32::NEG_INFINITY;
            logits[2 * 3000 + 7] = f32::NAN; // excluded: not looked at
            bench.write_logits(&logits);
            bench.write_rows(&rows);
            let tokens: Vec<u32> = bench.run(lists).iter().map(|f| f.0).collect();
            assert_eq!(tokens, [NONE_ALLOWED, NONE_ALLOWED, 6], "lists {lists}");
            // NaN in the model's own distribution.
            rows[2].how.logprobs = 1;
            bench.write_rows(&rows);
            assert_eq!(bench.run(lists)[2].0, NOT_FINITE, "lists {lists}");
        }
    }
}

/// Rows are written one by one, and settings that a row no longer uses are ignored.
#[test]
fn rows_change_hands() {
    let Some(gpu) = gpu() else { return };
    let mut bench = Bench::new(&gpu, 3000);
    let greedy = Sampling {
        top_p: 1.0,
        repetition: 1.0,
        ..Sampling::default()
    };
    let (logits, mut rows) = plain(&mut bench, greedy);
    let best = |row: usize, asked: &Asked| adjusted(&logits[row * 3000..][..3000], asked)[0].1;
    rows[1].bias = vec![(17, 50.0)];
    rows[1].how.adjusts = Sampling::BIASED;
    bench.write_rows(&rows);
    let found: Vec<u32> = bench.run(true).iter().map(|f| f.0).collect();
    assert_eq!(found, [best(0, &rows[0]), 17, best(2, &rows[2])]);
    // The row's next sequence has no biases; another has them instead.
    rows[1].how.adjusts = 0;
    rows[1].bias.clear();
    rows[2].bias = vec![(18, 50.0)];
    rows[2].how.adjusts = Sampling::BIASED;
    bench.write_rows(&rows);
    let found: Vec<u32> = bench.run(true).iter().map(|f| f.0).collect();
    assert_eq!(found, [best(0, &rows[0]), best(1, &rows[1]), 18]);
    // The next sequence's biases replace all biases of the row.
    rows[2].bias = vec![(19, 50.0)];
    bench.write_rows(&rows);
    assert_eq!(bench.run(true)[2].0, 19);
}

/// Where logits have numbers of their own, tokens and embeddings are those that the numbers stand for.
#[test]
fn numbers_of_logits_stand_for_tokens() {
    let Some(gpu) = gpu() else { return };
    const TOKENS: usize = 3000;
    let mut bench = Bench::new(&gpu, 700);
    let (logits, _) = plain(&mut bench, Sampling::default());
    let embedding = dense(DType::F16, TOKENS, HIDDEN, 6);
    bench.embedding = pack(&gpu, &[&embedding], Stack::Concat);
    bench.step = Checked::new(&gpu, "a test", M, Step::default(), bounds(TOKENS)).unwrap();
    let tokens: Vec<u32> = (0..700).map(|number| 4 * number + 5).collect();
    let ids = Checked::upload(&gpu, "a test", &tokens, TOKENS).unwrap();
    let mut advance = |ids: &Checked<u32>| {
        bench.stream.advance(Advance {
            m: M,
            logits: &bench.logits,
            best: &bench.best,
            blocks: bench.blocks,
            candidates: None,
            sampling: &bench.sampling,
            adjust: &mut bench.adjust,
            step: &mut bench.step,
            ring: &mut bench.ring,
            logprobs: &mut bench.logprobs,
            ring_len: RING,
            ids: Some(ids),
            embedding: &bench.embedding,
            x: &mut bench.x,
            idle: M,
        })
    };
    // Ids that the embedding may not have are refused.
    let wide = Checked::upload(&gpu, "a test", &tokens, TOKENS + 1).unwrap();
    advance(&wide).unwrap_err();
    advance(&ids).unwrap();
    bench.stream.synchronize().unwrap();
    let mut steps = [Step::default(); M];
    bench.step.values().read(0, &mut steps).unwrap();
    for (row, (step, logits)) in steps.iter().zip(logits.chunks(700)).enumerate() {
        let best = (0..700).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        let token = tokens[best.unwrap()];
        assert_eq!((step.token, bench.ring.load(row * RING)), (token, token));
        let (mut x, mut expected) = (vec![0f32; HIDDEN], vec![0f32; HIDDEN]);
        bench.x.read(row * HIDDEN, &mut x).unwrap();
        embedding
            .dequantize_row(token as usize, &mut expected)
            .unwrap();
        assert_eq!(x, expected);
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let Some(gpu) = gpu() else { return };
    let mut bench = Bench::new(&gpu, 3000);
    let (stream, adjust) = (&bench.stream, &mut bench.adjust);
    for e in [
        adjust.write_mask(stream, 0, &[0; 93]).unwrap_err(),
        adjust.write_mask(stream, M, &[0; 94]).unwrap_err(),
        adjust.write_bias(stream, 0, &[(3000, 1.0)]).unwrap_err(),
        adjust.write_bias(stream, M, &[]).unwrap_err(),
        adjust
            .write_seen(stream, 0, [(3000, true, 0)].into_iter())
            .unwrap_err(),
        adjust
            .write_seen(stream, M, std::iter::empty())
            .unwrap_err(),
    ] {
        assert!(e.to_string().contains("expected"), "{e}");
    }
    let mut advance = |adjust: &mut Adjustments, logprobs: &mut Mapped<Logprobs>| {
        bench.stream.advance(Advance {
            m: M,
            logits: &bench.logits,
            best: &bench.best,
            blocks: bench.blocks,
            candidates: None,
            sampling: &bench.sampling,
            adjust,
            step: &mut bench.step,
            ring: &mut bench.ring,
            logprobs,
            ring_len: RING,
            ids: None,
            embedding: &bench.embedding,
            x: &mut bench.x,
            idle: M,
        })
    };
    let said = Logprobs::default();
    let mut short = gpu.mapped("a test", M * RING - 1, said).unwrap();
    advance(&mut bench.adjust, &mut short).unwrap_err();
    for (vocab, rows) in [(3000, M - 1), (2999, M)] {
        let mut other = Adjustments::new(&gpu, vocab, rows).unwrap();
        advance(&mut other, &mut bench.logprobs).unwrap_err();
        let lists = bench.stream.candidates(
            &bench.logits,
            &bench.best,
            bench.blocks,
            &bench.sampling,
            &other,
            &mut bench.candidates,
            3000,
            M,
        );
        lists.unwrap_err();
    }
}

/// Indices from the head that name no token are not used, and a sequence whose context is
/// full stays at its last position.
#[test]
fn what_is_followed_to_memory_stays_within_bounds() {
    let Some(gpu) = gpu() else { return };
    let mut bench = Bench::new(&gpu, 3000);
    let greedy = Sampling {
        top_p: 1.0,
        repetition: 1.0,
        ..Sampling::default()
    };
    let (_, rows) = plain(&mut bench, greedy);
    bench.write_rows(&rows);
    let wild = [f32::MAX, f32::from_bits(1 << 30)];
    bench.best.write(bench.blocks, &[wild]).unwrap();
    let last = |slot: i32, position: usize| Step {
        position: position as i32,
        slot,
        ..Step::default()
    };
    let places = [
        last(0, POSITIONS - 1),
        last(1, POSITIONS - 2),
        last(M as i32, 0),
    ];
    bench.step.write(0, &places).unwrap();
    let tokens: Vec<u32> = bench.run(false).iter().map(|f| f.0).collect();
    assert_eq!(tokens[1], NOT_FINITE);
    assert!(tokens[0] < 3000 && tokens[2] < 3000, "{tokens:?}");
    let mut steps = [Step::default(); M];
    bench.step.values().read(0, &mut steps).unwrap();
    let positions = steps.map(|s| s.position as usize);
    assert_eq!(positions, [POSITIONS - 1, POSITIONS - 1, 0]);
    for outside in [last(0, POSITIONS), last(-1, 0), last(M as i32 + 1, 0)] {
        let put = bench.stream.put_checked(&mut bench.step, 0, &[outside]);
        assert!(put.unwrap_err().to_string().contains("within"));
    }
    let token = Step {
        token: 3000,
        ..Step::default()
    };
    assert!(bench.step.write(0, &[token]).is_err());
}
