//! A batch over a fake device that is steps ahead of the host: its steps are computed at once and
//! handed out later, and idle rows draw nonsense.

use nq_kernels::rng::Philox;
use nq_runtime::batch::Drawn;
use nq_runtime::{
    Batch, Chunk, Continuation, Error, KvType, Logits, LogitsWanted, Observer, Piece, Result,
    Sampler, SamplingParams, Session, SessionSpec, StepsAhead,
};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::time::Duration;

const VOCAB: usize = 40;
const DEPTH: usize = 5;

/// Logits that change with any change of `tokens`.
fn logits_after(tokens: &[u32]) -> Vec<f32> {
    let mix = |h: u64, x: u64| (h ^ x).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    let hash = tokens.iter().fold(1, |h, &t| mix(h, u64::from(t) + 1));
    (0..VOCAB as u64)
        .map(|i| (mix(hash, i + 7) >> 40) as f32 / (1 << 22) as f32)
        .collect()
}

struct Seat {
    slot: usize,
    token: u32,
    sampler: Sampler,
}

/// A fake session: sequences are their tokens, and a page is one position.
struct Device {
    spec: SessionSpec,
    positions: usize,
    sequences: Vec<Vec<u32>>,
    seats: Vec<Option<Seat>>,
    queued: VecDeque<Vec<u32>>,
    /// Number of rows of every queued step.
    rows: Vec<usize>,
    /// Rows of all queued prompts, and of those not waited for.
    prompts: (usize, VecDeque<usize>),
    logits: Vec<f32>,
}

impl Device {
    fn new(slots: usize, rows: usize, positions: usize) -> Self {
        Device {
            spec: SessionSpec {
                slots,
                ctx: 60,
                pages: None,
                kv: KvType::F16,
                max_rows: 100,
            },
            positions,
            sequences: vec![Vec::new(); slots],
            seats: (0..rows).map(|_| None).collect(),
            queued: VecDeque::new(),
            rows: Vec::new(),
            prompts: (0, VecDeque::new()),
            logits: Vec::new(),
        }
    }

    fn room(&self, more: usize) -> Result<()> {
        let used: usize = self.sequences.iter().map(Vec::len).sum();
        if used + more <= self.positions {
            Ok(())
        } else {
            Err(Error::PagesFull {
                needed: more,
                free: self.positions - used,
                pages: self.positions,
            })
        }
    }
}

impl Session for Device {
    fn spec(&self) -> SessionSpec {
        self.spec
    }

    fn len(&self, slot: usize) -> usize {
        self.sequences[slot].len()
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.sequences[slot].truncate(len);
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        _: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        self.room(chunks.iter().map(|c| c.tokens.len()).sum())?;
        self.logits.clear();
        for c in chunks {
            self.sequences[c.slot].extend_from_slice(c.tokens);
            if c.logits == LogitsWanted::Last {
                self.logits.extend(logits_after(&self.sequences[c.slot]));
            }
        }
        Ok(Logits {
            data: &self.logits,
            vocab: VOCAB,
        })
    }

    fn steps_ahead(&mut self) -> Option<&mut dyn StepsAhead> {
        Some(self)
    }
}

impl StepsAhead for Device {
    fn rows(&self) -> usize {
        self.seats.len()
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn check(&self, tokens: &[u32], _: Option<&Sampler>) -> Result<()> {
        match tokens.iter().find(|&&t| t as usize >= VOCAB) {
            None => Ok(()),
            Some(token) => Err(Error::Request {
                what: "token id",
                expected: format!("below {VOCAB}"),
                found: token.to_string(),
            }),
        }
    }

    fn queue_prompts(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        assert!(chunks.iter().all(|c| c.logits == LogitsWanted::None));
        self.forward(chunks, None)?;
        let rows = chunks.iter().map(|c| c.tokens.len()).sum();
        self.prompts.0 += rows;
        self.prompts.1.push_back(rows);
        Ok(())
    }

    fn finish_prompts(&mut self) -> Result<Duration> {
        let rows = self.prompts.1.pop_front().expect("prompts are queued");
        Ok(Duration::from_secs(rows as u64))
    }

    fn seat(&mut self, row: usize, slot: usize, token: u32, sampler: &Sampler) -> Result<()> {
        assert!(self.seats[row].is_none(), "row {row} is taken");
        self.seats[row] = Some(Seat {
            slot,
            token,
            sampler: sampler.clone(),
        });
        Ok(())
    }

    fn vacate(&mut self, row: usize) -> Result<()> {
        self.seats[row] = None;
        Ok(())
    }

    fn queue(&mut self) -> Result<()> {
        self.room(self.seats.iter().flatten().count())?;
        let last = self.seats.iter().rposition(Option::is_some);
        let rows = last.expect("somebody is seated") + 1;
        let mut drawn = Vec::with_capacity(rows);
        for seat in &mut self.seats[..rows] {
            let Some(seat) = seat else {
                drawn.push(VOCAB as u32 + 1);
                continue;
            };
            let sequence = &mut self.sequences[seat.slot];
            sequence.push(seat.token);
            assert!(sequence.len() <= self.spec.ctx, "beyond the context");
            seat.token = seat.sampler.sample(&logits_after(sequence))?;
            drawn.push(seat.token);
        }
        self.rows.push(rows);
        self.queued.push_back(drawn);
        Ok(())
    }

    fn receive(&mut self, each: &mut dyn FnMut(usize, Result<Drawn>)) -> Result<()> {
        let drawn = self.queued.pop_front().expect("a step is queued");
        for (row, token) in drawn.into_iter().enumerate() {
            let logprobs = None;
            each(row, Ok(Drawn { token, logprobs }));
        }
        Ok(())
    }
}

fn sampler(stream: u64) -> Sampler {
    let params = SamplingParams {
        seed: 4,
        ..SamplingParams::default()
    };
    Sampler::new(params, stream).expect("valid")
}

/// The tokens that a sequence beginning with `prompt` draws alone.
fn alone(stream: u64, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut sampler = sampler(stream);
    sampler.begin(prompt);
    let mut tokens = prompt.to_vec();
    for _ in 0..n {
        tokens.push(sampler.sample(&logits_after(&tokens)).expect("finite"));
    }
    tokens[prompt.len()..].to_vec()
}

fn piece(slot: usize, prompt: &[u32], stream: u64, tokens: usize) -> Piece<'_> {
    let mut sampler = sampler(stream);
    sampler.begin(prompt);
    Piece {
        slot,
        tokens: prompt,
        then: Some(Continuation { sampler, tokens }),
    }
}

/// Each sequence receives its own tokens, in order, whoever joins and leaves, whichever rows
/// are reused, and on the host if there are more sequences than rows.
#[test]
fn sequences_get_their_own_tokens() {
    const SLOTS: usize = 8;
    for rows in [8, 5] {
        let mut device = Device::new(SLOTS, rows, 400);
        let mut batch = Batch::new(&mut device);
        // For each slot: the sampler's stream, the prompt, and the tokens drawn.
        type Known = Option<(u64, Vec<u32>, Vec<u32>)>;
        let mut known: Vec<Known> = (0..SLOTS).map(|_| None).collect();
        let (mut ended, mut errors) = (0, 0);
        for step in 0..5000u64 {
            let [a, b, c, _] = Philox::block([1, 2], 0, step).map(|w| w as usize);
            let slot = a % SLOTS;
            let prompt: Vec<u32> = (0..1 + c % 9)
                .map(|i| ((step as usize + i) % VOCAB) as u32)
                .collect();
            let mut pieces = Vec::new();
            match (batch.is_running(slot), b % 8) {
                (true, 0) => drop(batch.leave(slot).expect("it runs")),
                (false, 0..4) => {
                    batch.session().truncate(slot, 0);
                    known[slot] = Some((step, prompt.clone(), Vec::new()));
                    pieces.push(piece(slot, &prompt, step, 1 + c / 16 % 70));
                }
                _ => {}
            }
            let mut gone = Vec::new();
            let result = batch.step(pieces, &mut |slot, token| {
                match token {
                    Ok(token) => known[slot].as_mut().expect("it runs").2.push(token),
                    Err(Error::PagesFull { .. } | Error::ContextFull { .. }) => gone.push(slot),
                    Err(e) => panic!("{e}"),
                }
                ControlFlow::Continue(())
            });
            errors += gone.len();
            match result {
                Ok(()) => {}
                Err(Error::PagesFull { .. }) => known[slot] = None,
                Err(e) => panic!("{e}"),
            }
            for (slot, known) in known.iter_mut().enumerate() {
                if batch.is_running(slot) {
                    continue;
                }
                if let Some((stream, prompt, drawn)) = known.take() {
                    ended += 1;
                    assert_eq!(drawn, alone(stream, &prompt, drawn.len()), "step {step}");
                    let fed = (prompt.len() + drawn.len()).saturating_sub(1);
                    assert_eq!(batch.session().len(slot), fed, "step {step}");
                    batch.session().truncate(slot, 0);
                }
            }
        }
        assert!(
            ended > 500 && errors > 0,
            "{rows} rows: {ended} ended, {errors} errors"
        );
    }
}

/// A sequence that gets no page reports it at once, not when the others have ended.
#[test]
fn a_sequence_without_a_page_is_told_while_others_run() {
    let mut device = Device::new(2, 2, 60);
    let mut batch = Batch::new(&mut device);
    let go = |_: usize, token: Result<u32>| {
        token.expect("there is room");
        ControlFlow::Continue(())
    };
    batch
        .step(vec![piece(0, &[1], 0, 40)], &mut { go })
        .unwrap();
    batch.session().truncate(1, 0);
    // There is room for the first sequence and its 40 tokens, but not for the 50 of the second as well.
    let mut told = None;
    let mut drawn = [1, 0];
    let mut pieces = vec![piece(1, &[2], 1, 50)];
    for step in 1..100 {
        batch
            .step(std::mem::take(&mut pieces), &mut |slot, token| {
                match token {
                    Ok(_) => drawn[slot] += 1,
                    Err(e) => {
                        assert!(matches!(e, Error::PagesFull { .. }), "{e}");
                        told = Some((slot, step, drawn[0]));
                    }
                }
                ControlFlow::Continue(())
            })
            .unwrap();
        if told.is_some() {
            batch.session().truncate(1, 0);
        }
        if batch.running() == 0 {
            break;
        }
    }
    let (slot, _, first) = told.expect("there is no room for both");
    assert_eq!((slot, drawn[0]), (1, 40));
    assert!(first < 40, "told when the first had ended");
}

/// Prompts are queued before earlier ones are done, but only one ahead; the work done is reported,
/// and the prompts' last tokens go through the steps.
#[test]
fn prompts_run_ahead_too() {
    let mut device = Device::new(2, 2, 1000);
    let mut batch = Batch::new(&mut device);
    let prompt: Vec<u32> = (0..32).collect();
    let mut ran = Vec::new();
    let mut drawn = Vec::new();
    for (at, tokens) in prompt.chunks(8).enumerate() {
        let mut piece = piece(0, tokens, 5, 3);
        let then = piece.then.as_mut().expect("it goes on");
        then.sampler.begin(&prompt);
        if at < 3 {
            piece.then = None;
        }
        let mut each = |_: usize, token: Result<u32>| {
            drawn.push(token.expect("there is room"));
            ControlFlow::Continue(())
        };
        batch.step(vec![piece], &mut each).unwrap();
        ran.push(
            batch
                .ran()
                .iter()
                .map(|r| r.prompt_rows)
                .collect::<Vec<_>>(),
        );
    }
    assert_eq!(ran, [vec![], vec![8], vec![8], vec![8, 7, 0]]);
    let last = batch.ran()[1];
    assert_eq!((last.took, last.decoding), (Duration::from_secs(7), 0));
    assert_eq!(batch.ran()[2].decoding, 1);
    while batch.running() > 0 {
        batch
            .step(Vec::new(), &mut |_, token| {
                drawn.push(token.expect("there is room"));
                ControlFlow::Continue(())
            })
            .unwrap();
    }
    // Without other work, a prompt without a continuation is done at the next call.
    let half = Piece {
        slot: 1,
        tokens: &[1, 2],
        then: None,
    };
    let mut nothing = |_: usize, _: Result<u32>| panic!("nothing is drawn");
    batch.step(vec![half], &mut nothing).unwrap();
    assert!(batch.ran().is_empty());
    batch.step(Vec::new(), &mut nothing).unwrap();
    assert_eq!(batch.ran().len(), 1);
    drop(batch);
    assert_eq!(drawn, alone(5, &prompt, 3));
    assert_eq!(device.prompts.0, 33);
}

/// Rows that are no longer needed are not run forever.
#[test]
fn those_who_stay_sit_down_closer_together() {
    let mut device = Device::new(8, 8, 1000);
    let mut batch = Batch::new(&mut device);
    let prompts: Vec<[u32; 1]> = (0..8).map(|i| [i]).collect();
    let limits = [3, 3, 3, 3, 3, 3, 3, 50];
    let pieces = (0..8)
        .map(|i| piece(i, &prompts[i], i as u64, limits[i]))
        .collect();
    let mut last = Vec::new();
    let mut each = |slot: usize, token: Result<u32>| {
        if slot == 7 {
            last.push(token.expect("there is room"));
        }
        ControlFlow::Continue(())
    };
    batch.step(pieces, &mut each).unwrap();
    while batch.running() > 0 {
        batch.step(Vec::new(), &mut each).unwrap();
    }
    drop(batch);
    assert_eq!(last, alone(7, &[7], 50));
    assert_eq!(device.rows.len(), 50);
    assert!(device.rows[..3].iter().all(|&m| m == 8));
    assert!(
        device.rows[3 + DEPTH..].iter().all(|&m| m == 1),
        "{:?}",
        device.rows
    );
}

#[test]
fn what_does_not_fit_is_refused_before_anything_runs() {
    let mut device = Device::new(2, 2, 100);
    let mut batch = Batch::new(&mut device);
    let none = &mut |_: usize, _: Result<u32>| panic!("nothing runs");
    let long = [1; 61];
    for pieces in [
        vec![piece(0, &[1], 0, 3), piece(0, &[2], 0, 3)],
        vec![piece(2, &[1], 0, 3)],
        vec![piece(0, &[], 0, 3)],
        vec![piece(0, &[1], 0, 0)],
        vec![piece(0, &[99], 0, 3)],
    ] {
        let e = batch.step(pieces, none).unwrap_err();
        assert!(matches!(e, Error::Request { .. }), "{e}");
    }
    let e = batch.step(vec![piece(0, &long, 0, 3)], none).unwrap_err();
    assert!(
        matches!(
            e,
            Error::ContextFull {
                capacity: 60,
                needed: 61
            }
        ),
        "{e}"
    );
    assert_eq!(batch.running(), 0);
    let mut go = |_: usize, _: Result<u32>| ControlFlow::Continue(());
    batch.step(vec![piece(0, &[1], 0, 9)], &mut go).unwrap();
    let e = batch.step(vec![piece(0, &[1], 0, 3)], &mut go).unwrap_err();
    assert!(e.to_string().contains("which is in it"), "{e}");
}
