//! The training loop: fresh text, gradients, Adam, held-out checks, checkpoints.

use super::graph::Graph;
use super::params::{Canonical, Model, rounded};
use super::plan::{CHECKS, RATE_CODES, SEARCH, Schedule, TuningTimes, rate_codes};
use super::sample::Sampler;
use super::strays::Strays;
use super::trellis::Nearest;
use super::values::{Kind, Values};
use crate::error::{Error, Result};
use nq_f32::Turned;
use nq_formats::safetensors::SafetensorsFile;
use nq_formats::serialize::write_tensors;
use nq_formats::{Progress, Tensor, Unit, files};
use nq_kernels::grad::{Adam, GradOps};
use nq_kernels::rng::Philox;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::path::Path;
use std::time::{Duration, Instant};

/// Settings that determine the result of tuning, for the record and for resuming.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Number of steps.
    pub steps: usize,
    /// Sequences per step.
    pub batch: usize,
    /// Sequences per pass: the gradients of `batch / pass` passes are added.
    pub pass: usize,
    /// Sequences sampled together.
    pub slots: usize,
    /// Tokens per sequence.
    pub length: usize,
    /// Number of held-out sequences.
    pub held_out: usize,
    /// Number of checks on them along the schedule, besides the one before it.
    pub checks: usize,
    /// True if latent weights, and with them the codes, are tuned, not only scales and gains.
    pub codes: bool,
    /// Steps after which the codes of trellises are found again.
    #[serde(default)]
    pub search: usize,
    /// Learning rate of latent weights, relative to the mean step of their weight's grid.
    pub rate_codes: f32,
    /// Learning rate of scales, relative to the mean scale of their weight.
    pub rate_scales: f32,
    /// Learning rate of gains of norms, relative to their mean.
    pub rate_gains: f32,
    /// Number of steps in which the rates rise from 0.
    pub warmup: usize,
    /// Number of times that a sequence is trained on.
    pub visits: usize,
    /// Tokens of the training text that the teacher does not choose.
    pub strays: Strays,
    /// Seed of the text.
    pub seed: u64,
}

/// The rates and text used when variants were measured, with batches of 32 sequences of 512 tokens.
impl Default for Settings {
    fn default() -> Self {
        Settings {
            steps: 0,
            batch: 32,
            pass: 32,
            slots: 4096,
            length: 512,
            held_out: 64,
            checks: CHECKS,
            codes: true,
            search: SEARCH,
            rate_codes: RATE_CODES,
            rate_scales: 3e-4,
            rate_gains: 1e-3,
            warmup: 20,
            // Using text twice halves the cost of sampling and teaches as much as using it once;
            // using it four times taught less.
            visits: 2,
            // In every sequence: if only half of them had any, long schedules drifted away
            // from the teacher on text of another kind.
            strays: Strays {
                sequences: 1.0,
                tokens: 0.1,
            },
            seed: 0,
        }
    }
}

/// Adam's decays. The second is short: a schedule may be a few hundred steps.
const BETA1: f32 = 0.95;
const BETA2: f32 = 0.99;
/// Far below the root of any squared gradient that matters.
const EPSILON: f32 = 1e-12;
/// A divergence this many times the initial one ends the schedule.
const ASTRAY: f64 = 3.0;
/// A checkpoint is written at a check, at most this often, and not so often that it takes
/// more than a share of the time: that of a large model holds many gigabytes.
const CHECKPOINT_EVERY: Duration = Duration::from_secs(45);
const CHECKPOINT_SHARE: f64 = 0.05;
/// Assumed speed of writing the first checkpoint, in bytes per second.
const CHECKPOINT_RATE: f64 = 1e9;
/// First random stream of held-out text; those of training text start at 0.
const HELD_OUT_STREAM: u64 = 1 << 48;
/// XORed into the seed of the text to get that of stray tokens.
const STRAYS: u64 = 0x7374_7261_7973_0001;

/// A check on held-out text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Steps done.
    pub step: usize,
    /// Mean KL divergence on held-out text, in nats.
    pub held_out: f64,
    /// Mean training loss since the previous check.
    pub training: f64,
}

/// Returns beginnings of sequences: `n` of them, from number `first` of an endless list.
pub(crate) type Beginnings<'a> = dyn Fn(u64, usize) -> Result<Vec<Vec<u32>>> + 'a;

/// Tuning on one device.
pub struct Trainer<'a, O: GradOps> {
    ops: &'a O,
    teacher: Model<O>,
    student: Model<O>,
    graph: Graph<O>,
    sampler: Sampler<O>,
    settings: Settings,
    beginnings: &'a Beginnings<'a>,
    nearest: &'a Nearest<'a>,
    text: Vec<u32>,
    text_first: u64,
    held_out: Vec<u32>,
    step: usize,
    checks: Vec<Check>,
    losses: (f64, usize),
    done: bool,
    best: BTreeMap<String, Vec<f32>>,
}

/// When checkpoints were written, and the cost of one.
struct Saves {
    last: Instant,
    seconds: f64,
}

impl Saves {
    /// No checkpoint yet; each will have this many bytes.
    fn new(bytes: usize) -> Self {
        Saves {
            last: Instant::now(),
            seconds: bytes as f64 / CHECKPOINT_RATE,
        }
    }

    /// True if the last one is at least this old, and another is worth its time.
    fn due(&self, every: Duration) -> bool {
        let since = self.last.elapsed();
        since >= every && self.seconds <= CHECKPOINT_SHARE * since.as_secs_f64().max(1.0)
    }

    fn time(&mut self, save: impl FnOnce() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        save()?;
        self.last = Instant::now();
        self.seconds = start.elapsed().as_secs_f64();
        Ok(())
    }
}

/// The header of a checkpoint, besides its tensors.
#[derive(Serialize, Deserialize)]
struct TrainingState {
    settings: Settings,
    step: usize,
    checks: Vec<Check>,
    losses: (f64, usize),
    done: bool,
}

const HEADER: &str = "nq_tuning";

impl<'a, O: GradOps> Trainer<'a, O> {
    /// Loads both models onto the device and samples held-out text. `settings.steps` and
    /// `settings.batch` may be set later ([`Trainer::plan`]).
    ///
    /// # Errors
    /// If the device does not have enough memory; errors of sampling.
    pub fn new(
        ops: &'a O,
        config: &nq_model::ModelConfig,
        (source, quantized): (&Canonical, &Canonical),
        settings: Settings,
        (beginnings, nearest): (&'a Beginnings<'a>, &'a Nearest<'a>),
        progress: &dyn Progress,
    ) -> Result<Self> {
        let s = &settings;
        progress.begin("moving both models to the device", 2, Unit::Items);
        let student = Model::student(ops, config, quantized, source, s.codes)?;
        progress.advance(1);
        let teacher = Model::teacher(ops, config, source)?;
        progress.end();
        let mut trainer = Trainer {
            ops,
            teacher,
            student,
            graph: Graph::new(ops, config, s.pass, s.length)?,
            sampler: Sampler::new(ops, config, s.slots, s.length)?,
            beginnings,
            nearest,
            text: Vec::new(),
            text_first: 0,
            held_out: Vec::new(),
            step: 0,
            checks: Vec::new(),
            losses: (0.0, 0),
            done: false,
            best: BTreeMap::new(),
            settings,
        };
        let wanted = trainer.settings.held_out;
        let tokens = (wanted * trainer.settings.length) as u64;
        progress.begin(
            "sampling text that tuning is checked on",
            tokens,
            Unit::Tokens,
        );
        while trainer.held_out.len() < wanted * trainer.settings.length {
            let done = trainer.held_out.len() / trainer.settings.length;
            let n = (wanted - done).min(trainer.sampler.slots());
            let first = HELD_OUT_STREAM + done as u64;
            let text = trainer.sample(first, n)?;
            progress.advance(text.len() as u64);
            trainer.held_out.extend(text);
        }
        progress.end();
        Ok(trainer)
    }

    fn sample(&mut self, first: u64, n: usize) -> Result<Vec<u32>> {
        let s = &self.settings;
        let mut beginnings = (self.beginnings)(first, n)?;
        if first < HELD_OUT_STREAM {
            let vocab = self.teacher.config.vocab_size as u32;
            for (begin, i) in beginnings.iter_mut().zip(first..) {
                let rng = Philox::new(s.seed ^ STRAYS, i);
                *begin = s.strays.scatter(begin, s.length, vocab, rng);
            }
        }
        self.sampler
            .sample(self.ops, &self.teacher, &beginnings, s.seed, first)
    }

    /// The sequences of a pass, from `index` on of the endless training text, and in the graph the
    /// teacher's outputs for them; a new part is sampled once the current one has been used as often as it
    /// should be.
    fn text(&mut self, index: u64) -> Result<Vec<u32>> {
        let n = self.graph.batch();
        let length = self.settings.length;
        let slots = self.sampler.slots() as u64;
        let visits = self.settings.visits.max(1) as u64;
        let mut out = Vec::with_capacity(n * length);
        for (row, i) in (0..).step_by(length).zip(index..index + n as u64) {
            let chunk = i / (slots * visits) * slots;
            if self.text.is_empty() || self.text_first != chunk {
                self.text = self.sample(chunk, slots as usize)?;
                self.text_first = chunk;
            }
            let at = (i % slots) as usize * length;
            out.extend_from_slice(&self.text[at..at + length]);
            let outputs = self.sampler.outputs();
            self.graph
                .take_outputs(self.ops, outputs, at, row, length)?;
        }
        Ok(out)
    }

    /// Measures how long the parts of a tuning take. Tuned values do not change.
    pub(crate) fn pace(&mut self) -> Result<TuningTimes> {
        let (pass, slots) = (self.graph.batch(), self.sampler.slots());
        let start = Instant::now();
        let tokens = self.text(0)?;
        let visits = self.settings.visits.max(1);
        let sampling = start.elapsed().as_secs_f64() / (slots * visits) as f64;
        // The first round includes one-time costs; the second is timed.
        let mut pace = TuningTimes::default();
        for _ in 0..2 {
            let ops = self.ops;
            let start = Instant::now();
            let (student, teacher) = (&mut self.student, &self.teacher);
            self.graph.divergence(ops, teacher, student, &tokens)?;
            let forward = start.elapsed().as_secs_f64();
            self.graph
                .gradient_towards(ops, teacher, student, &tokens, 1.0)?;
            let gradient = start.elapsed().as_secs_f64() - forward;
            for v in student.values_mut() {
                if let Some(state) = &mut v.state {
                    ops.clear(&mut state.grad, v.len)?;
                }
                v.step(ops, Adam::default())?;
            }
            // Waits for queued work.
            self.graph.divergence(ops, teacher, student, &tokens)?;
            let all = start.elapsed().as_secs_f64();
            pace = TuningTimes {
                sequence: sampling + gradient / pass as f64,
                step: (all - 2.0 * forward - gradient).max(0.0),
                search: 0.0,
                check: forward * self.settings.held_out.div_ceil(pass) as f64,
            };
        }
        let start = Instant::now();
        self.search(false)?;
        pace.search = start.elapsed().as_secs_f64();
        pace.check += pace.search;
        Ok(pace)
    }

    /// Finds the codes that are nearest to the latent weights of trellises, and takes their values if `take`.
    fn search(&mut self, take: bool) -> Result<()> {
        for trellis in self.student.trellises_mut() {
            if let Some(found) = trellis.search(self.ops, self.nearest)?.filter(|_| take) {
                trellis.set(self.ops, &found)?;
            }
        }
        Ok(())
    }

    /// Sets the schedule and its learning rate. The batch must be a multiple of the sequences in a
    /// pass.
    pub fn plan(&mut self, schedule: Schedule) {
        let s = &mut self.settings;
        (s.steps, s.batch) = (schedule.steps, schedule.batch);
        (s.search, s.checks) = (schedule.search, schedule.checks);
        s.rate_codes = rate_codes(s.steps, s.batch);
    }

    /// The settings that determine the result.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// All checks so far; the first was made before any step.
    pub fn checks(&self) -> &[Check] {
        &self.checks
    }

    /// Tunes to the end of the schedule, starting from the checkpoint at `path` if that fits.
    ///
    /// # Errors
    /// Errors of the device; a checkpoint that cannot be written.
    pub fn run(&mut self, path: Option<&Path>, progress: &dyn Progress) -> Result<()> {
        let s = self.settings.clone();
        let tokens = |steps: usize| (steps * s.batch * s.length) as u64;
        progress.begin("tuning", tokens(s.steps), Unit::Tokens);
        progress.advance(tokens(self.step));
        if self.checks.is_empty() {
            self.check(progress)?;
        }
        let every = s.steps.div_ceil(s.checks.max(1)).max(1);
        let mut saves = Saves::new(self.checkpoint_bytes());
        while !self.done && self.step < s.steps && !self.is_over() {
            let loss = self.step(every)?;
            progress.advance(tokens(1));
            if !loss.is_finite() {
                progress.note(&format!(
                    "tuning: the loss of step {} is {loss}; the best state before it is kept",
                    self.step
                ));
                break;
            }
            if self.step.is_multiple_of(every) || self.step == s.steps {
                self.check(progress)?;
                if let Some(path) = path.filter(|_| saves.due(CHECKPOINT_EVERY)) {
                    saves.time(|| self.save(path))?;
                }
            }
        }
        progress.end();
        // The final state is saved too, if that costs little: the run may be killed later as well.
        let due = !self.done && saves.due(Duration::ZERO);
        self.done = true;
        path.filter(|_| due).map_or(Ok(()), |path| self.save(path))
    }

    /// Bytes of a checkpoint: values, their moments, and the best values so far.
    fn checkpoint_bytes(&self) -> usize {
        let values = self.student.values();
        16 * values.iter().map(|v| v.len).sum::<usize>()
    }

    /// Runs the first `steps` steps and writes a checkpoint, as if the run had been killed there.
    #[cfg(test)]
    pub(crate) fn run_to(&mut self, steps: usize, path: Option<&Path>) -> Result<()> {
        self.check(&())?;
        let every = self.settings.steps.div_ceil(self.settings.checks).max(1);
        while self.step < steps {
            self.step(every)?;
            if self.step.is_multiple_of(every) {
                self.check(&())?;
            }
        }
        path.map_or(Ok(()), |path| self.save(path))
    }

    /// True once the held-out divergence shows that the student went astray. A schedule improves most
    /// at its end, so nothing less is a reason to stop it.
    fn is_over(&self) -> bool {
        match (self.checks.first(), self.checks.last()) {
            (Some(first), Some(last)) => last.held_out > ASTRAY * first.held_out,
            _ => false,
        }
    }

    /// One step, and its loss; `every` so many steps, a check follows.
    fn step(&mut self, every: usize) -> Result<f64> {
        let s = self.settings.clone();
        let passes = s.batch / s.pass;
        let mut loss = 0.0;
        for pass in 0..passes {
            let tokens = self.text((self.step * s.batch + pass * s.pass) as u64)?;
            let share = 1.0 / passes as f32;
            let (graph, student, teacher) = (&mut self.graph, &mut self.student, &self.teacher);
            let l = graph.gradient_towards(self.ops, teacher, student, &tokens, share)?;
            loss += l / passes as f64;
        }
        let t = (self.step + 1) as f64;
        let rise = (t / s.warmup.max(1) as f64).min(1.0);
        let fall = 0.5 * (1.0 + (PI * self.step as f64 / s.steps as f64).cos());
        for v in self.student.values_mut() {
            let rate = match v.kind {
                Kind::Latent => s.rate_codes * v.magnitude,
                Kind::Scale => s.rate_scales * v.magnitude,
                Kind::Gain => s.rate_gains * v.magnitude,
            };
            let adam = Adam {
                rate: (f64::from(rate) * rise * fall) as f32,
                beta1: BETA1,
                beta2: BETA2,
                correction1: (1.0 - f64::from(BETA1).powf(t)) as f32,
                correction2: (1.0 - f64::from(BETA2).powf(t)) as f32,
                epsilon: EPSILON,
            };
            v.step(self.ops, adam)?;
        }
        self.losses.0 += loss;
        self.losses.1 += 1;
        self.step += 1;
        let at = |every: usize| self.step.is_multiple_of(every.max(1));
        if loss.is_finite() && (at(s.search) || at(every) || self.step == s.steps) {
            self.search(true)?;
        }
        Ok(loss)
    }

    /// Measures the divergence on held-out text; keeps the state if it is the best so far.
    fn check(&mut self, progress: &dyn Progress) -> Result<()> {
        let length = self.settings.length;
        let (mut sum, mut n) = (0.0, 0);
        let held_out = std::mem::take(&mut self.held_out);
        for part in held_out.chunks(self.graph.batch() * length) {
            let (ops, teacher, student) = (self.ops, &self.teacher, &self.student);
            sum += self.graph.divergence(ops, teacher, student, part)? * part.len() as f64;
            n += part.len();
        }
        self.held_out = held_out;
        let check = Check {
            step: self.step,
            held_out: sum / n as f64,
            training: self.losses.0 / self.losses.1.max(1) as f64,
        };
        self.losses = (0.0, 0);
        let before = self.checks.iter().map(|c| c.held_out);
        let improved = before.fold(f64::INFINITY, f64::min) > check.held_out;
        self.checks.push(check);
        progress.note(&format!(
            "tuning: step {} of {}: KL divergence {:.5} on held-out text",
            check.step, self.settings.steps, check.held_out
        ));
        // Before the first step there is nothing to keep: the state is the quantized weights.
        if improved && self.step > 0 {
            for v in self.student.values() {
                let values = v.to_host(self.ops)?;
                self.best.insert(v.name.clone(), values);
            }
        }
        Ok(())
    }

    /// The quantized model with the tuned values of the best state; `None` if no step improved
    /// on the start.
    ///
    /// # Errors
    /// A tuned value that a file cannot hold.
    pub fn best(&self, quantized: &Canonical) -> Result<Option<Canonical>> {
        if self.best.is_empty() {
            return Ok(None);
        }
        let lookup = |name: &str| self.best.get(name).map(Vec::as_slice);
        let order = Turned::new(&self.teacher.config);
        rounded(quantized, order, lookup, self.nearest).map(Some)
    }

    /// Writes the complete state of the run, whole or not at all.
    fn save(&self, path: &Path) -> Result<()> {
        let mut tensors = Vec::new();
        let mut put = |name: String, values: Vec<f32>| -> Result<()> {
            tensors.push((name, Tensor::from_f32(vec![values.len()], values)?));
            Ok(())
        };
        for v in self.student.values() {
            put(format!("{}/value", v.name), v.to_host(self.ops)?)?;
            if let Some(state) = &v.state {
                for (part, floats) in [("mean", &state.mean), ("square", &state.square)] {
                    let mut values = vec![0.0; v.len];
                    self.ops.read(floats, &mut values)?;
                    put(format!("{}/{part}", v.name), values)?;
                }
            }
        }
        for (name, values) in &self.best {
            put(format!("{name}/best"), values.clone())?;
        }
        let header = TrainingState {
            settings: self.settings.clone(),
            step: self.step,
            checks: self.checks.clone(),
            losses: self.losses,
            done: self.done,
        };
        let header = serde_json::to_string(&header).expect("string keys and finite numbers");
        let metadata = BTreeMap::from([(HEADER.to_owned(), header)]);
        Ok(write_tensors(path, &tensors, &metadata)?)
    }

    /// Continues from the checkpoint at `path`, if there is one with the same settings. Returns true if
    /// there was.
    ///
    /// # Errors
    /// A checkpoint that is damaged; errors of the device.
    pub(crate) fn take_up(&mut self, path: &Path) -> Result<bool> {
        if !path.exists() {
            return Ok(false);
        }
        let bytes = files::map_file(path).map_err(|e| nq_formats::Error::io(path, "open", e))?;
        let file = SafetensorsFile::parse(path, bytes)?;
        let header = file.metadata().get(HEADER).map_or("", String::as_str);
        let Ok(header) = serde_json::from_str::<TrainingState>(header) else {
            return Ok(false);
        };
        if header.settings != self.settings {
            return Ok(false);
        }
        let read = |name: String, len: usize| -> Result<Vec<f32>> {
            match file.get(&name) {
                Some(t) if t.len() == len => Ok(t.to_f32()?),
                found => Err(Error::Text {
                    path: path.into(),
                    why: format!(
                        "{name}: expected {len} values, found {}",
                        found.map_or("no such tensor".into(), |t| t.len().to_string())
                    ),
                }),
            }
        };
        let ops = self.ops;
        let mut best = BTreeMap::new();
        let has_best = header.checks.len() > 1 && best_of(&header.checks) > 0;
        for v in self.student.values_mut() {
            let Values {
                name, len, value, ..
            } = v;
            ops.write(value, &read(format!("{name}/value"), *len)?)?;
            if let Some(state) = &mut v.state {
                ops.write(&mut state.mean, &read(format!("{name}/mean"), *len)?)?;
                ops.write(&mut state.square, &read(format!("{name}/square"), *len)?)?;
            }
            if has_best {
                best.insert(name.clone(), read(format!("{name}/best"), *len)?);
            }
        }
        // A checkpoint follows a search.
        self.search(true)?;
        self.best = best;
        (self.step, self.checks) = (header.step, header.checks);
        (self.losses, self.done) = (header.losses, header.done);
        Ok(true)
    }
}

/// The settings of the checkpoint at `path`, if there is a readable one.
pub(crate) fn settings_of(path: &Path) -> Option<Settings> {
    let bytes = files::map_file(path).ok()?;
    let file = SafetensorsFile::parse(path, bytes).ok()?;
    let header: TrainingState = serde_json::from_str(file.metadata().get(HEADER)?).ok()?;
    Some(header.settings)
}

/// The step with the best check; 0 if there are no checks.
fn best_of(checks: &[Check]) -> usize {
    let best = checks
        .iter()
        .min_by(|a, b| a.held_out.total_cmp(&b.held_out));
    best.map_or(0, |c| c.step)
}
