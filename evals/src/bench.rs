//! Tokens per second, beside what the machine's memory allows.

mod image;
mod text;

pub use image::{ImageSpec, image};
pub use text::{BenchAnswer, DraftBy, OpenDrafter, TextSpec, text};

use crate::error::{Error, Result};
use crate::report::{BenchRow, Breakdown, ExpertsRow, OpRow};
use crate::stats;
use crate::windows::StageGuard;
use nq_formats::{Progress, Unit, human_bytes};
use nq_kernels::rng::Philox;
use nq_runtime::generate::{generate, rewind};
use nq_runtime::interface::{ExpertChoices, LayerChoices};
use nq_runtime::{
    Batch, Chunk, Continuation, Detokenizer, Engine, Generated, GenerationLimits, KvType,
    LogitsWanted, Piece, Sampler, SamplingParams, Sequence, Session, SessionSpec, Tokenizer,
};
use std::io::Write;
use std::ops::ControlFlow;
use std::time::Instant;

/// Standard deviation of the repeats, as a share of their median, above which a row gets a caveat:
/// differences between builds and machines are often smaller than that.
const WIDEST_SPREAD: f64 = 0.1;

/// The caveat for a row whose repeats spread too widely; otherwise `None`.
fn spread_note(tok_s: f64, std: f64) -> Option<String> {
    (std > WIDEST_SPREAD * tok_s).then(|| {
        format!(
            "the repeats spread by ±{:.0} %: too wide to compare by; something else takes this \
             machine's time, or --repeats is too small",
            100.0 * std / tok_s
        )
    })
}

/// The specification of a benchmark.
#[derive(Clone, Copy, Debug)]
pub struct BenchSpec {
    /// Prompt tokens in the prefill test.
    pub prompt_tokens: usize,
    /// Decode steps of the decode test.
    pub gen_tokens: usize,
    /// Tokens in the context before a test.
    pub depth: usize,
    /// Number of sequences at once.
    pub batch: usize,
    /// Number of measured repeats, after one that is not measured.
    pub repeats: usize,
    /// Type that keys and values are rounded to.
    pub kv: KvType,
    /// Tokens in one forward of a prefill, all sequences together.
    pub prompt_rows: usize,
    /// True if decoding continues with drawn tokens, not with the likeliest.
    pub draws: bool,
}

/// The machine's limits, measured in the same run.
#[derive(Clone, Copy)]
pub struct Machine<'a> {
    /// Measures the read bandwidth of the memory that holds the weights, in 10^9 bytes per
    /// second. Called between repeats: on a shared machine, the available bandwidth changes while a
    /// test runs.
    pub read_gb_s: &'a dyn Fn() -> Result<f64>,
    /// Bytes of the last-level cache before that memory; 0 if unknown.
    pub cache_bytes: u64,
}

impl Machine<'_> {
    /// Greatest share of the bandwidth that reading `bytes` repeatedly can show: bytes in
    /// the cache need not be read again. Infinite if all of them fit.
    pub(crate) fn greatest_share(&self, bytes: usize) -> f64 {
        let (bytes, cache) = (bytes as f64, self.cache_bytes as f64);
        if bytes <= cache {
            f64::INFINITY
        } else {
            bytes / (bytes - cache)
        }
    }

    /// Judges a share of the bandwidth: adds a note if a cache explains it, an error if nothing
    /// does.
    fn judge(&self, row: &mut BenchRow) {
        let (share, bytes) = (row.bandwidth_share, row.bytes_per_token);
        if share <= 1.0 {
            return;
        }
        let (weights, cache) = (human_bytes(bytes as u64), human_bytes(self.cache_bytes));
        if share <= self.greatest_share(bytes) {
            row.note = Some(format!(
                "the share is of DRAM bandwidth; of the {weights} of weights the last-level \
                 cache of {cache} holds {}",
                if bytes as f64 <= self.cache_bytes as f64 {
                    "all"
                } else {
                    "a part"
                }
            ));
        } else {
            row.measurement_error = Some(format!(
                "reading {weights} of weights at {:.1} GB/s is {share:.2} times the bandwidth \
                 measured in the same run ({:.1} GB/s), more than a cache of {cache} explains: \
                 run again on a quiet machine with more --repeats",
                row.gb_s, row.machine_gb_s
            ));
        }
    }
}

impl BenchSpec {
    /// The largest session of any test, so that an engine can refuse it before it loads.
    pub fn largest_session(&self) -> SessionSpec {
        self.session_spec(self.prompt_tokens.max(self.gen_tokens))
    }

    fn session_spec(&self, tokens: usize) -> SessionSpec {
        let ctx = self.depth + tokens;
        SessionSpec {
            slots: self.batch,
            ctx,
            kv: self.kv,
            max_rows: self.prompt_rows.min(self.batch * ctx).max(self.batch),
            ..SessionSpec::default()
        }
    }

    /// How decoding continues in this repeat.
    fn sampling(&self, repeat: usize) -> SamplingParams {
        match self.draws {
            true => SamplingParams {
                temperature: 1.0,
                seed: repeat as u64,
                ..SamplingParams::greedy()
            },
            false => SamplingParams::greedy(),
        }
    }

    /// A session with room for `tokens` tokens after the depth, filled up to the depth with random
    /// tokens.
    fn session(
        &self,
        engine: &dyn Engine,
        tokens: usize,
        progress: &dyn Progress,
    ) -> Result<AtDepth> {
        let positions = engine.config().max_position_embeddings;
        let ctx = self.depth + tokens;
        let at_least_1 = |what, n: usize| match n {
            0 => Err(Error::Spec {
                what,
                expected: "at least 1".into(),
                found: "0".into(),
            }),
            _ => Ok(()),
        };
        at_least_1("batch", self.batch)?;
        at_least_1("repeats", self.repeats)?;
        at_least_1("tokens", tokens)?;
        if ctx > positions {
            return Err(Error::Spec {
                what: "depth and tokens of a test together",
                expected: format!("at most the model's {positions} positions"),
                found: format!("{} + {tokens}", self.depth),
            });
        }
        let mut session = engine.session(self.session_spec(tokens))?;
        let texts = RandomTokens::new(engine, 1).sequences(self.batch, self.depth);
        if self.depth > 0 {
            let stage = format!("filling {} tokens", self.depth);
            let _stage = StageGuard::begin(progress, &stage, 1, Unit::Items);
            feed(session.as_mut(), &texts)?;
        }
        Ok(AtDepth { session, texts })
    }
}

/// A session whose sequences were filled up to the depth of a test.
struct AtDepth {
    session: Box<dyn Session>,
    /// By slot.
    texts: Vec<Vec<u32>>,
}

impl AtDepth {
    /// Drops the tokens after the depth.
    fn rewind(&mut self) -> Result<()> {
        for (slot, text) in self.texts.iter().enumerate() {
            rewind(self.session.as_mut(), slot, text)?;
        }
        Ok(())
    }
}

/// Random token ids of a model's vocabulary.
struct RandomTokens {
    rng: Philox,
    vocab: u32,
}

impl RandomTokens {
    fn new(engine: &dyn Engine, stream: u64) -> Self {
        RandomTokens {
            rng: Philox::new(0, stream),
            vocab: engine.config().vocab_size as u32,
        }
    }

    fn next(&mut self) -> u32 {
        self.rng.next_u32() % self.vocab
    }

    /// `[batch][n]` tokens.
    fn sequences(&mut self, batch: usize, n: usize) -> Vec<Vec<u32>> {
        let mut sequence = || (0..n).map(|_| self.next()).collect();
        (0..batch).map(|_| sequence()).collect()
    }
}

/// Feeds one sequence per slot, all equally long, with logits for the last tokens; returns
/// the number of forwards.
fn feed(session: &mut dyn Session, sequences: &[Vec<u32>]) -> Result<usize> {
    let n = sequences.first().map_or(0, Vec::len);
    let piece = (session.spec().max_rows / sequences.len().max(1)).max(1);
    let mut forwards = 0;
    for start in (0..n).step_by(piece) {
        let end = (start + piece).min(n);
        let logits = if end == n {
            LogitsWanted::Last
        } else {
            LogitsWanted::None
        };
        let chunks: Vec<Chunk<'_>> = sequences
            .iter()
            .enumerate()
            .map(|(slot, s)| Chunk {
                slot,
                tokens: &s[start..end],
                logits: logits.clone(),
            })
            .collect();
        session.forward(&chunks, None)?;
        forwards += 1;
    }
    Ok(forwards)
}

/// The times of repeats, from which a row is made.
struct Sample {
    test: String,
    /// Tokens of all sequences in one repeat.
    tokens: usize,
    /// Passes over the weights in one repeat.
    passes: usize,
    /// Seconds of each repeat.
    seconds: Vec<f64>,
    /// Milliseconds of each step of every repeat.
    step_ms: Vec<f64>,
    /// Milliseconds of each step in every repeat.
    read_gb_s: Vec<f64>,
    /// Choices of experts before the repeats.
    choices: Option<ExpertChoices>,
}

impl Sample {
    fn row(self, engine: &dyn Engine, spec: &BenchSpec, machine: Machine<'_>) -> BenchRow {
        let d = engine.description();
        let rates: Vec<f64> = self
            .seconds
            .iter()
            .map(|s| self.tokens as f64 / s)
            .collect();
        let tok_s = stats::quantile(&stats::sorted(rates.iter().copied()), 0.5);
        let bytes = engine.bytes_per_token();
        let passes_s = tok_s * self.passes as f64 / self.tokens as f64;
        let gb_s = passes_s * bytes as f64 / 1e9;
        let steps = stats::sorted(self.step_ms.into_iter());
        let machine_gb_s = stats::quantile(&stats::sorted(self.read_gb_s.into_iter()), 0.5);
        let mut row = BenchRow {
            test: self.test,
            depth: spec.depth,
            batch: spec.batch,
            engine: d.engine.clone(),
            kernels: d.kernels.clone(),
            activations: d.activations.clone(),
            bits: d.bits,
            codes: String::new(),
            device: d.device.clone(),
            threads: d.threads,
            tok_s,
            tok_s_std: (rates.len() > 1).then(|| stats::std_dev(&rates)),
            gb_s,
            bandwidth_share: gb_s / machine_gb_s,
            ms_per_token_p50: stats::quantile(&steps, 0.5),
            ms_per_token_p99: stats::quantile(&steps, 0.99),
            repeats: spec.repeats,
            machine_gb_s,
            bytes_per_token: bytes,
            experts: None,
            streaming_overhead: None,
            bare_tok_s: None,
            note: None,
            measurement_error: None,
            drafts: None,
            image: None,
            breakdown: None,
        };
        let chosen = self.choices.zip(engine.expert_choices());
        row.experts = chosen.and_then(|(before, now)| {
            let tokens = self.tokens * self.seconds.len();
            experts_row(&now.since(&before), tokens, &row)
        });
        machine.judge(&mut row);
        if let Some(wide) = row.tok_s_std.and_then(|std| spread_note(row.tok_s, std)) {
            row.note = Some(row.note.map_or(wide.clone(), |n| format!("{wide}; {n}")));
        }
        row
    }
}

/// What `chosen` says of a test of so many tokens, all repeats together; `None` if nothing was chosen.
fn experts_row(chosen: &ExpertChoices, tokens: usize, row: &BenchRow) -> Option<ExpertsRow> {
    let found = chosen.found()?;
    let bytes = |count: fn(&LayerChoices) -> u64| {
        let of_layers = chosen.layers.iter();
        let all: f64 = of_layers
            .map(|l| count(l) as f64 * l.expert_bytes as f64)
            .sum();
        all / tokens as f64
    };
    let (all, missed) = (bytes(|l| l.all), bytes(|l| l.all - l.in_room));
    let (memory, bus) = (1e9 * row.machine_gb_s, chosen.bus);
    let dense = (row.bytes_per_token as f64 - all).max(0.0);
    let seconds = dense / memory + ((all - missed) / memory).max(missed / bus);
    let one = row.batch == 1 && row.test.starts_with("tg");
    let moved: u64 = chosen.layers.iter().map(|l| l.moved).sum();
    Some(ExpertsRow {
        found,
        found_by_layer: (chosen.layers.iter())
            .map(|l| l.in_room as f64 / l.all.max(1) as f64)
            .collect(),
        moved: moved as f64 / tokens as f64,
        bus_gb_s: bus / 1e9,
        bus_bytes_per_token: missed,
        limit_tok_s: one.then(|| 1.0 / seconds),
    })
}

/// `pp`: feeds `prompt_tokens` random tokens per sequence after the depth.
///
/// # Errors
/// [`Error::Spec`] if the test does not fit the model; errors of the engine.
pub fn prefill(
    engine: &dyn Engine,
    spec: &BenchSpec,
    machine: Machine<'_>,
    progress: &dyn Progress,
) -> Result<BenchRow> {
    let n = spec.prompt_tokens;
    let mut session = spec.session(engine, n, progress)?;
    let mut random = RandomTokens::new(engine, 2);
    let test = format!("pp{n}");
    let _stage = StageGuard::begin(progress, &test, spec.repeats as u64 + 1, Unit::Items);
    let (mut seconds, mut passes) = (Vec::new(), 0);
    let mut read_gb_s = vec![(machine.read_gb_s)()?];
    let mut choices = None;
    for repeat in 0..=spec.repeats {
        let sequences = random.sequences(spec.batch, n);
        let start = Instant::now();
        passes = feed(session.session.as_mut(), &sequences)?;
        if repeat > 0 {
            seconds.push(start.elapsed().as_secs_f64());
            read_gb_s.push((machine.read_gb_s)()?);
        } else {
            choices = engine.expert_choices();
        }
        session.rewind()?;
        progress.advance(1);
    }
    let tokens = n * spec.batch;
    let step_ms = seconds.iter().map(|s| 1e3 * s / tokens as f64).collect();
    let sample = Sample {
        test,
        tokens,
        passes,
        seconds,
        step_ms,
        read_gb_s,
        choices,
    };
    Ok(sample.row(engine, spec, machine))
}

/// `tg`: `gen_tokens` steps of one token per sequence after the depth, with the sequences' own
/// continuations.
pub fn decode(
    engine: &dyn Engine,
    spec: &BenchSpec,
    machine: Machine<'_>,
    progress: &dyn Progress,
) -> Result<BenchRow> {
    let n = spec.gen_tokens;
    let mut session = spec.session(engine, n, progress)?;
    let mut random = RandomTokens::new(engine, 3);
    let test = format!("tg{n}");
    let _stage = StageGuard::begin(progress, &test, spec.repeats as u64 + 1, Unit::Items);
    let (mut seconds, mut step_ms) = (Vec::new(), Vec::new());
    let mut read_gb_s = vec![(machine.read_gb_s)()?];
    let mut choices = None;
    for repeat in 0..=spec.repeats {
        let first: Vec<u32> = (0..spec.batch).map(|_| random.next()).collect();
        let steps = decode_on(session.session.as_mut(), &first, n, spec.sampling(repeat))?;
        if repeat > 0 {
            seconds.push(steps.iter().sum::<f64>() / 1e3);
            step_ms.extend(steps);
            read_gb_s.push((machine.read_gb_s)()?);
        } else {
            choices = engine.expert_choices();
        }
        session.rewind()?;
        progress.advance(1);
    }
    let sample = Sample {
        test,
        tokens: n * spec.batch,
        passes: n,
        seconds,
        step_ms,
        read_gb_s,
        choices,
    };
    Ok(sample.row(engine, spec, machine))
}

/// Continues sequences by `n` tokens each, as in chat; returns the milliseconds of each step.
fn decode_on(
    session: &mut dyn Session,
    first: &[u32],
    n: usize,
    sampling: SamplingParams,
) -> Result<Vec<f64>> {
    let mut pieces = Vec::with_capacity(first.len());
    for (slot, token) in first.iter().enumerate() {
        pieces.push(Piece {
            slot,
            tokens: std::slice::from_ref(token),
            then: Some(Continuation {
                sampler: Sampler::new(sampling, slot as u64)?,
                tokens: n,
            }),
        });
    }
    let mut batch = Batch::new(session);
    let mut times = Vec::with_capacity(n);
    let mut failed = None;
    let mut start = Instant::now();
    while times.len() < n && failed.is_none() {
        batch.step(std::mem::take(&mut pieces), &mut |_, token| match token {
            Ok(_) => ControlFlow::Continue(()),
            Err(e) => {
                failed.get_or_insert(e);
                ControlFlow::Break(())
            }
        })?;
        // One clock reading per step: no time between steps is left out.
        let now = Instant::now();
        times.push(1e3 * (now - start).as_secs_f64());
        start = now;
    }
    if let Some(e) = failed {
        return Err(e.into());
    }
    Ok(times)
}

/// `chat`: one sequence through the whole path of chat (sampler, detokenizer, writing to
/// `out` with a flush per piece), compared with the bare decode loop over the same tokens; the two
/// alternate.
///
/// # Errors
/// Errors of [`prefill`] and the sampler; errors of writing to `out`.
pub fn streaming(
    engine: &dyn Engine,
    tokenizer: &Tokenizer,
    sampling: &SamplingParams,
    out: &mut dyn Write,
    spec: &BenchSpec,
    machine: Machine<'_>,
    progress: &dyn Progress,
) -> Result<BenchRow> {
    let n = spec.gen_tokens;
    if n < 2 {
        return Err(Error::Spec {
            what: "tokens of the chat test",
            expected: "at least 2".into(),
            found: n.to_string(),
        });
    }
    let alone = BenchSpec {
        depth: 0, // the prompt is the depth
        batch: 1,
        ..*spec
    };
    let depth = spec.depth.max(1);
    let mut session = alone.session(engine, depth + n, &())?.session;
    let prompt = RandomTokens::new(engine, 4).sequences(1, depth).remove(0);
    let mut sequence = Sequence::new(session.as_mut(), 0);
    let test = format!("chat{n}");
    let _stage = StageGuard::begin(progress, &test, spec.repeats as u64 + 1, Unit::Items);
    let (mut seconds, mut bare_seconds) = (Vec::new(), Vec::new());
    let mut read_gb_s = vec![(machine.read_gb_s)()?];
    for repeat in 0..=spec.repeats {
        let mut sampler = Sampler::new(*sampling, repeat as u64)?;
        let answer = answer(
            session.as_mut(),
            &mut sequence,
            &prompt,
            n,
            &mut sampler,
            tokenizer,
            out,
        )?;
        rewind(session.as_mut(), 0, &prompt)?;
        let greedy = SamplingParams::greedy();
        let steps = decode_on(session.as_mut(), &answer.tokens[..1], n - 1, greedy)?;
        rewind(session.as_mut(), 0, &prompt)?;
        if repeat > 0 {
            seconds.push(answer.stats.decode.as_secs_f64());
            bare_seconds.push(steps.iter().sum::<f64>() / 1e3);
            read_gb_s.push((machine.read_gb_s)()?);
        }
        progress.advance(1);
    }
    let overhead = seconds.iter().zip(&bare_seconds).map(|(s, b)| s / b - 1.0);
    let overhead = stats::quantile(&stats::sorted(overhead), 0.5);
    let bare = stats::sorted(bare_seconds.iter().map(|s| (n - 1) as f64 / s));
    let step_ms = seconds.iter().map(|s| 1e3 * s / (n - 1) as f64).collect();
    let sample = Sample {
        test,
        tokens: n - 1,
        passes: n - 1,
        seconds,
        step_ms,
        read_gb_s,
        choices: None,
    };
    let mut row = sample.row(engine, &BenchSpec { batch: 1, ..*spec }, machine);
    row.streaming_overhead = Some(overhead);
    row.bare_tok_s = Some(stats::quantile(&bare, 0.5));
    Ok(row)
}

/// An answer of exactly `n` tokens, through the sampler and the detokenizer to `out`, with a flush
/// per piece.
fn answer(
    session: &mut dyn Session,
    sequence: &mut Sequence,
    prompt: &[u32],
    n: usize,
    sampler: &mut Sampler,
    tokenizer: &Tokenizer,
    out: &mut dyn Write,
) -> Result<Generated> {
    let limits = GenerationLimits {
        stop: &[],
        max_tokens: n,
        interrupt: None,
    };
    let mut detokenizer = Detokenizer::new(tokenizer, true);
    let mut failed = None;
    let mut write = |piece: String| match out.write_all(piece.as_bytes()).and_then(|()| out.flush())
    {
        Ok(()) => ControlFlow::Continue(()),
        Err(e) => {
            failed = Some(e);
            ControlFlow::Break(())
        }
    };
    let mut on_token = |token| match detokenizer.push(token) {
        Some(piece) => write(piece),
        None => ControlFlow::Continue(()),
    };
    let answer = generate(session, sequence, prompt, sampler, &limits, &mut on_token)?;
    match failed {
        None => Ok(answer),
        Some(cause) => Err(Error::Write {
            path: "the streamed answer".into(),
            cause,
        }),
    }
}

/// Breaks down the time of one token: repeats a prefill (`prompt_tokens`) or decode steps
/// (`gen_tokens`) with every operation timed. Timing takes some time itself, so
/// the rates of [`prefill`] and [`decode`] are measured without it. `None` if the engine
/// cannot do this.
pub fn breakdown(
    engine: &dyn Engine,
    spec: &BenchSpec,
    decoding: bool,
    progress: &dyn Progress,
) -> Result<Option<Breakdown>> {
    if !engine.start_profile() {
        return Ok(None);
    }
    engine.stop_profile();
    let n = if decoding {
        spec.gen_tokens
    } else {
        spec.prompt_tokens
    };
    let mut session = spec.session(engine, n, progress)?;
    let mut random = RandomTokens::new(engine, 5);
    let mut pass = |at: &mut AtDepth| -> Result<f64> {
        let sequences = random.sequences(spec.batch, n);
        let start = Instant::now();
        if decoding {
            let first: Vec<u32> = sequences.iter().map(|s| s[0]).collect();
            decode_on(at.session.as_mut(), &first, n, spec.sampling(0))?;
        } else {
            feed(at.session.as_mut(), &sequences)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        at.rewind()?;
        Ok(seconds)
    };
    pass(&mut session)?; // warm-up
    engine.start_profile();
    let seconds = pass(&mut session);
    let timings = engine.stop_profile();
    let seconds = seconds?;
    if timings.is_empty() {
        return Ok(None);
    }

    // Sums over kernels and shapes of one operation.
    let mut ops: Vec<(&str, f64, f64, f64)> = Vec::new(); // calls, seconds, bytes
    for t in &timings {
        let (calls, bytes) = (t.calls as f64, t.bytes as f64);
        match ops.iter_mut().find(|o| o.0 == t.op) {
            Some(o) => {
                o.1 += calls;
                o.2 += t.seconds;
                o.3 += bytes;
            }
            None => ops.push((t.op, calls, t.seconds, bytes)),
        }
    }
    ops.sort_by(|a, b| b.2.total_cmp(&a.2));
    let tokens = (n * spec.batch) as f64;
    let counted: f64 = ops.iter().map(|o| o.2).sum();
    // On a GPU, events time the kernels; setting them up would dominate the wall time.
    let on_gpu = engine.description().threads == 0;
    let seconds = if on_gpu { counted } else { seconds };
    Ok(Some(Breakdown {
        calls_per_token: ops.iter().map(|o| o.1).sum::<f64>() / tokens,
        us_per_token: 1e6 * seconds / tokens,
        other_us_per_token: 1e6 * (seconds - counted) / tokens,
        ops: ops
            .into_iter()
            .map(|(op, calls, op_seconds, bytes)| OpRow {
                op: op.to_owned(),
                calls_per_token: calls / tokens,
                us_per_token: 1e6 * op_seconds / tokens,
                gb_s: if op_seconds > 0.0 {
                    bytes / op_seconds / 1e9
                } else {
                    0.0
                },
                share: op_seconds / seconds,
            })
            .collect(),
    }))
}

#[cfg(test)]
mod tests {
    use super::spread_note;

    #[test]
    fn a_wide_spread_is_said() {
        let note = spread_note(80.0, 45.0).unwrap();
        assert!(note.contains("±56 %: too wide to compare by"), "{note}");
        assert_eq!(spread_note(80.0, 2.0), None);
        assert_eq!(spread_note(80.0, 0.0), None);
    }
}
