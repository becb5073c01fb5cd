//! Tuning of the method's result: reads the staged weights, tunes them and stages them again.

use super::job::Job;
use super::layers::{params, staged_layer};
use super::state::{ENDS, State, save, step_name};
use crate::calibration::{self, CalibrationSource, Prompter, SEQUENCE, Sequences};
use crate::error::{Error, Result};
use crate::linalg::{Matrix, read_row};
use crate::report::LayerReport;
use crate::schemes::Schemes;
use crate::train::params::Canonical;
use crate::train::plan::{
    CHECKS, Effort, MemoryPlan, SEARCH, Schedule, StudentCodes, TuneOptions, default_seconds,
    schedule,
};
use crate::train::record::Tuning;
use crate::train::trainer::{Beginnings, Settings, Trainer, settings_of};
use crate::trellis::{alike, nearest, nearest_rows};
use nq_formats::nq::{Param, Writer};
use nq_formats::trellis::BLOCK;
use nq_formats::{Group, Progress, TrellisScheme, Unit, Weight, human_bytes};
use nq_kernels::grad::{GradOps, GradWork};
use nq_kernels::rng::Philox;
use nq_load::device::Device;
use nq_model::Dims;
use nq_model::names::{EMBEDDING, HEAD, NORM};
use nq_runtime::host::total_memory;
use rayon::prelude::*;
use serde::Serialize;
use std::time::Instant;

/// Device memory that tuning takes, estimated beforehand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TuningEstimate {
    /// True if it is the CPU's memory.
    pub on_cpu: bool,
    /// Bytes that may be used.
    #[serde(rename = "limit_bytes")]
    pub limit: u64,
    /// The plan that fits; `None` if none does, and the method's weights stay.
    pub plan: Option<MemoryPlan>,
    /// Bytes that the smallest plan would take, if it does not fit.
    #[serde(rename = "least_bytes")]
    pub least: u64,
}

impl TuningEstimate {
    /// A one-line description.
    pub fn describe(&self) -> String {
        let device = if self.on_cpu { "the CPU" } else { "the GPU" };
        match self.plan {
            Some(plan) => format!(
                "tuning {}: {} of {device}'s memory, {} may be used",
                plan.what(),
                human_bytes(plan.bytes),
                human_bytes(self.limit)
            ),
            None => format!(
                "no tuning: it takes {} of {device}'s memory at least, {} may be used",
                human_bytes(self.least),
                human_bytes(self.limit)
            ),
        }
    }
}

/// Most work that a device takes at once.
#[derive(Clone, Copy)]
struct Most {
    on_cpu: bool,
    /// Sequences in a pass.
    pass: usize,
    /// Sequences sampled together.
    slots: usize,
    /// Held-out sequences for checks.
    held_out: usize,
}

const CPU: Most = Most {
    on_cpu: true,
    pass: 8,
    slots: 64,
    held_out: 16,
};
/// For a GPU: passes just large enough to fill it, so that the schedule of a larger model still has
/// enough steps, and as much text as is used up.
fn gpu(parameters: usize) -> Most {
    let (pass, slots, held_out) = match parameters {
        ..=200_000_000 => (32, 4096, 64),
        200_000_001..=2_000_000_000 => (8, 256, 32),
        _ => (4, 128, 16),
    };
    Most {
        on_cpu: false,
        pass,
        slots,
        held_out,
    }
}

/// Seed of the training text, which differs from those of calibration and held-out text.
const TEXT: u64 = 0x7475_6E69_6E67_0001;
/// Most sequences of a calibration file that training texts may begin with.
const FILE_SEQUENCES: usize = 4096;
/// Share of the budget that is planned: the rest is for checkpoints and for parts not measured.
const SHARE: f64 = 0.95;

/// A tuning to be run on some device.
struct TuningWork<'a> {
    job: &'a Job<'a>,
    limit: u64,
    most: Most,
    options: TuneOptions,
    staged: Canonical,
    writer: &'a Writer,
    state: &'a mut State,
    key: String,
}

impl GradWork for TuningWork<'_> {
    type Output = Result<()>;

    fn run<O: GradOps>(self, ops: &O) -> Result<()> {
        self.job.tune_on(ops, self)
    }
}

impl Job<'_> {
    /// The seconds that tuning may take; 0 if they follow from a number of steps.
    pub(super) fn tuning_seconds(&self, on_cpu: bool) -> f64 {
        match self.options.tuning.as_ref().map(|t| t.effort) {
            Some(Effort::Budget(time)) => time.as_secs_f64(),
            Some(Effort::Default) => default_seconds(self.config().parameters(), on_cpu),
            Some(Effort::Steps { .. }) | None => 0.0,
        }
    }

    /// Makes sure that tuning under `schemes` depends on them alone: weights that were tuned under
    /// others are rounded again. The schedule stays as it was chosen.
    ///
    /// # Errors
    /// If the state cannot be saved.
    pub(super) fn prepare_tuning(
        &self,
        writer: &Writer,
        state: &mut State,
        schemes: &Schemes,
    ) -> Result<()> {
        let key = self.ends_key(schemes);
        let Some(tuning) = state.tuning.as_mut().filter(|t| t.key != key) else {
            return Ok(());
        };
        *tuning = Tuning {
            key,
            device: tuning.device.clone(),
            settings: tuning.settings.clone(),
            ..Tuning::default()
        };
        state.steps.values_mut().for_each(|s| s.key.clear());
        save(writer, state)?;
        remove_checkpoint(writer)
    }

    /// True if the staged weights are the result of tuning under `schemes`.
    ///
    /// # Errors
    /// Schemes that do not fit the model.
    pub(super) fn is_tuned(&self, state: &State, schemes: &Schemes) -> Result<bool> {
        let key = self.ends_key(schemes);
        Ok((state.tuning.as_ref()).is_some_and(|t| t.key == key && t.done))
    }

    /// Tunes the staged weights as requested, once for their schemes.
    ///
    /// # Errors
    /// An absent device; errors of training, reading or writing.
    pub(super) fn tune(&self, writer: &Writer, state: &mut State, schemes: &Schemes) -> Result<()> {
        let Some(options) = self.options.tuning else {
            return Ok(());
        };
        if self.is_tuned(state, schemes)? {
            return Ok(());
        }
        let key = self.ends_key(schemes);
        let staged = self.staged(writer)?;
        let limit = self.tuning_limit()?;
        let device = Device::choose(self.options.load.device)?;
        let work = TuningWork {
            job: self,
            limit,
            most: self.most(self.gpu()?),
            options,
            staged,
            writer,
            state,
            key,
        };
        // TF32's rounding errors are far below the student's error.
        device.run(work)?
    }

    fn most(&self, on: Option<usize>) -> Most {
        match on {
            None => CPU,
            Some(_) => gpu(self.config().parameters()),
        }
    }

    /// Bytes of the device's memory that tuning may use.
    fn tuning_limit(&self) -> Result<u64> {
        match self.gpu()? {
            // If the system does not say, assume 8 GiB.
            None => Ok(total_memory().unwrap_or(8 << 30) / 2),
            Some(n) => {
                let most = nq_load::gpu::memory(n)?.total / 10 * 8;
                Ok(self.options.device_memory.unwrap_or(most).min(most))
            }
        }
    }

    /// The device memory that tuning will take, if it is requested.
    ///
    /// # Errors
    /// An absent device.
    pub fn tuning_estimate(&self) -> Result<Option<TuningEstimate>> {
        if self.options.tuning.is_none() {
            return Ok(None);
        }
        let most = self.most(self.gpu()?);
        let config = self.checkpoint.config();
        let schemes = &self.options.schemes;
        // If schemes are chosen, the smallest groups may occur.
        let group = match self.options.target {
            Some(_) => 32,
            None => schemes.linears.group().size(config.hidden_size),
        };
        let limit = self.tuning_limit()?;
        let length = SEQUENCE.min(config.max_position_embeddings);
        let (pass, slots) = (most.pass, most.slots);
        let codes = self.codes(group)?;
        let plan = MemoryPlan::new(most.on_cpu, config, length, codes, limit, pass, slots)?;
        let fits = plan.bytes <= limit;
        Ok(Some(TuningEstimate {
            on_cpu: most.on_cpu,
            limit,
            least: if fits { 0 } else { plan.bytes },
            plan: fits.then_some(plan),
        }))
    }

    fn tune_on<O: GradOps>(&self, ops: &O, work: TuningWork<'_>) -> Result<()> {
        let start = Instant::now();
        let TuningWork {
            limit,
            most,
            options,
            staged,
            writer,
            state,
            key,
            ..
        } = work;
        let config = self.checkpoint.config();
        let length = SEQUENCE.min(config.max_position_embeddings);
        let mut tuning = Tuning {
            key,
            device: ops.device(),
            ..Tuning::default()
        };
        let codes = self.codes(least_group(&staged))?;
        let (pass, slots) = (most.pass, most.slots);
        let plan = MemoryPlan::new(most.on_cpu, config, length, codes, limit, pass, slots)?;
        if plan.bytes > limit {
            let why = format!(
                "not tuned: that takes {} bytes on {}, of which {limit} may be used",
                plan.bytes, tuning.device
            );
            return self.leave(writer, state, tuning, why);
        }
        tuning.device_bytes = plan.bytes;
        self.progress.note(&format!(
            "tuning on {}: {}, {} of its memory, passes of {} x {length} tokens",
            tuning.device,
            plan.what(),
            human_bytes(plan.bytes),
            plan.pass,
        ));
        let known = state.tuning.take().filter(|t| t.key == tuning.key);
        let known = known.and_then(|t| t.settings);
        let settings = (known.clone())
            .unwrap_or_else(|| self.first_settings(plan, most, options.effort, length));
        let source = Canonical::read(self.checkpoint.store(), config)?;
        let texts = self.beginnings(length, settings.seed)?;
        let alike = match codes {
            StudentCodes::Trellis { .. } => self.gpu()?.map(|gpu| alike(gpu, BLOCK)).transpose()?,
            StudentCodes::Groups(_) => None,
        };
        let nearest = |weight: &Matrix, scheme| nearest(weight, scheme, alike.as_ref());
        let mut trainer = Trainer::new(
            ops,
            config,
            (&source, &staged),
            settings,
            (texts.as_ref(), &nearest),
            &self.progress,
        )?;
        if known.is_none() {
            if !self.choose_schedule(&mut trainer, options.effort, most, start)? {
                let why = "not tuned: the budget is too short for a schedule worth its time";
                return self.leave(writer, state, tuning, why.into());
            }
            // A choice made by the clock is saved, so that a resumed run makes the same choice.
            tuning.settings = Some(trainer.settings().clone());
            state.tuning = Some(tuning.clone());
            save(writer, state)?;
        }
        let path = writer.scratch_path(CHECKPOINT);
        if settings_of(&path).as_ref() == Some(trainer.settings()) {
            trainer.take_up(&path)?;
        }
        trainer.run(Some(&path), &self.progress)?;
        tuning.settings = Some(trainer.settings().clone());
        tuning.checks = trainer.checks().to_vec();
        let steps = config.num_hidden_layers as u64 + 1;
        (self.progress).begin("rounding the tuned weights", steps, Unit::Items);
        let best = trainer.best(&staged)?;
        drop(trainer);
        match best {
            Some(best) => {
                self.restage(writer, state, &best, &source)?;
                self.progress.end();
            }
            None => {
                let why = "tuning did not lower the KL divergence on held-out text; the weights \
                           stay as the method made them";
                tuning.fallback = Some(why.into());
                self.progress.end();
                self.progress.note(why);
            }
        }
        tuning.done = true;
        let seconds = start.elapsed().as_secs_f64();
        self.progress.note(&format!("tuning took {seconds:.1} s"));
        state.tuning = Some(tuning);
        save(writer, state)?;
        remove_checkpoint(writer)
    }

    /// What a student is rounded to: trellises, or integers in groups of `group`.
    fn codes(&self, group: usize) -> Result<StudentCodes> {
        if !self.options.schemes.have_trellis() {
            return Ok(StudentCodes::Groups(group));
        }
        let (most, cols) = nearest_rows();
        let rows = most.min(self.config().parameters().div_ceil(cols));
        let search = match self.gpu()? {
            // The weights, their blocks, and these with the values of codes.
            None => Some(24 * rows * cols),
            Some(_) => {
                let bytes = nq_load::gpu::sizes()?.trellis;
                TrellisScheme::all()
                    .map(|s| bytes(s, Dims { rows, cols }))
                    .max()
            }
        };
        let search = search.unwrap_or(0);
        Ok(StudentCodes::Trellis { search })
    }

    /// The settings known before the number of steps is.
    fn first_settings(
        &self,
        plan: MemoryPlan,
        most: Most,
        effort: Effort,
        length: usize,
    ) -> Settings {
        let batch = match effort {
            Effort::Steps { batch, .. } => batch,
            Effort::Default | Effort::Budget(_) => plan.pass,
        };
        let pass = plan.pass.min(batch);
        Settings {
            steps: 0,
            batch: batch.next_multiple_of(pass),
            pass,
            slots: plan.slots,
            length,
            held_out: most.held_out,
            codes: plan.codes,
            seed: self.options.seed ^ TEXT,
            ..Settings::default()
        }
    }

    /// Gives the trainer the requested steps, or as many as fit the time from `start` on, estimated
    /// from a measurement. False if those are too few.
    fn choose_schedule<O: GradOps>(
        &self,
        trainer: &mut Trainer<'_, O>,
        effort: Effort,
        most: Most,
        start: Instant,
    ) -> Result<bool> {
        let pass = trainer.settings().pass;
        let chosen = match effort {
            Effort::Steps { steps, batch } => Some(Schedule {
                steps,
                batch,
                search: SEARCH,
                checks: CHECKS,
            }),
            Effort::Default | Effort::Budget(_) => {
                let budget = match effort {
                    Effort::Budget(time) => time.as_secs_f64(),
                    _ => default_seconds(self.config().parameters(), most.on_cpu),
                };
                // Rounding and staging the tuned weights takes about as long as reading them did.
                let staging = start.elapsed().as_secs_f64();
                let pace = trainer.pace()?;
                let seconds = budget * SHARE - start.elapsed().as_secs_f64() - staging;
                schedule(seconds, pace, pass)
            }
        };
        let Some(mut chosen) = chosen else {
            return Ok(false);
        };
        chosen.batch = chosen.batch.next_multiple_of(pass);
        trainer.plan(chosen);
        Ok(true)
    }

    /// Keeps the method's weights and reports why.
    fn leave(
        &self,
        writer: &Writer,
        state: &mut State,
        mut tuning: Tuning,
        why: String,
    ) -> Result<()> {
        self.progress.note(&why);
        tuning.fallback = Some(why);
        tuning.done = true;
        state.tuning = Some(tuning);
        save(writer, state)
    }

    /// Reads the whole staged model.
    fn staged(&self, writer: &Writer) -> Result<Canonical> {
        let config = self.checkpoint.config();
        let open = |step: &str| {
            writer.staged(step)?.ok_or_else(|| Error::Text {
                path: self.options.out.clone(),
                why: format!("expected the step {step} to be staged before tuning, found none"),
            })
        };
        let layers = (0..config.num_hidden_layers)
            .map(|index| staged_layer(&open(&step_name(index))?, config, index))
            .collect::<Result<_>>()?;
        let ends = open(ENDS)?;
        let dims = Dims::new(config.vocab_size, config.hidden_size);
        Ok(Canonical {
            layers,
            final_norm: ends.vector(NORM, config.hidden_size)?,
            embedding: ends.matrix(EMBEDDING, dims)?,
            head: if config.tie_word_embeddings {
                None
            } else {
                Some(ends.matrix(HEAD, dims)?)
            },
        })
    }

    /// Beginnings of training texts: documents and answers in turn, as for calibration; with a
    /// calibration file, every other text begins with a part of it.
    fn beginnings(&self, length: usize, seed: u64) -> Result<Box<Beginnings<'_>>> {
        let (config, files) = (self.checkpoint.config(), self.checkpoint.files());
        let eos = self.checkpoint.eos_token_ids();
        let prompter = Prompter::new(files, config.vocab_size, eos, &self.progress)?;
        let file = match &self.options.calibration {
            // Chats with images are for the method: what is trained on is text.
            CalibrationSource::SelfSampled | CalibrationSource::Prompts { .. } => None,
            CalibrationSource::File(path) => {
                Some(calibration::read(path, &prompter, FILE_SEQUENCES, length)?)
            }
        };
        Ok(Box::new(move |first, n| {
            let mut all = prompter.beginnings(n, seed.wrapping_add(first))?;
            if let Some(file) = &file {
                for (i, begin) in all.iter_mut().enumerate().step_by(2) {
                    *begin = part_of(file, seed, first + i as u64);
                }
            }
            Ok(all)
        }))
    }

    /// Stages the tuned weights in place of the method's.
    fn restage(
        &self,
        writer: &Writer,
        state: &mut State,
        tuned: &Canonical,
        source: &Canonical,
    ) -> Result<()> {
        for (index, (weights, source)) in tuned.layers.iter().zip(&source.layers).enumerate() {
            let step = step_name(index);
            for linear in weights.spec.linears() {
                let (name, kind) = (linear.name(index), linear.kind);
                let rows = state.steps.get_mut(&step).map(|s| &mut s.rows);
                note_tuned(rows, &name, weights.linear(kind), source.linear(kind))?;
            }
            writer.put(&step, &params(index, weights))?;
            self.progress.advance(1);
        }
        let mut ends = vec![
            (NORM.to_owned(), Param::Vector(&tuned.final_norm)),
            (EMBEDDING.to_owned(), Param::Matrix(&tuned.embedding)),
        ];
        let rows = state.steps.get_mut(ENDS).map(|s| &mut s.rows);
        note_tuned(rows, EMBEDDING, &tuned.embedding, &source.embedding)?;
        if let (Some(head), Some(source)) = (&tuned.head, &source.head) {
            let rows = state.steps.get_mut(ENDS).map(|s| &mut s.rows);
            note_tuned(rows, HEAD, head, source)?;
            ends.push((HEAD.to_owned(), Param::Matrix(head)));
        }
        Ok(writer.put(ENDS, &ends)?)
    }
}

/// The file of the trainer's checkpoint, beside the staged steps.
const CHECKPOINT: &str = "tuning.checkpoint";

/// A beginning from the calibration file: a part of a sequence, up to three quarters of it.
fn part_of(file: &Sequences, seed: u64, index: u64) -> Vec<u32> {
    let mut rng = Philox::new(seed, index);
    let sequence = &file.ids[rng.next_u32() as usize % file.ids.len()];
    let most = (sequence.len() * 3 / 4).max(1);
    sequence[..1 + rng.next_u32() as usize % most].to_vec()
}

/// Records a tuned weight's error in its row of the report. The output error, measured layer by
/// layer, means nothing once the layers are tuned together, so it is removed.
fn note_tuned(
    rows: Option<&mut Vec<LayerReport>>,
    name: &str,
    tuned: &Weight,
    source: &Weight,
) -> Result<()> {
    let row = rows.and_then(|rows| rows.iter_mut().find(|r| r.name == name));
    let (Some(row), Weight::Quantized(_)) = (row, tuned) else {
        return Ok(());
    };
    let Dims { rows: n, cols } = source.dims();
    // Each thread keeps a buffer for rows: one allocated per row would be mapped anew every
    // time.
    let room = || (vec![0.0; cols], vec![0.0; cols]);
    let rows = (0..n).into_par_iter().map_init(room, |(a, b), r| {
        read_row(name, source, r, a)?;
        read_row(name, tuned, r, b)?;
        let square = |v: f32| f64::from(v).powi(2);
        let error: f64 = a.iter().zip(b.iter()).map(|(a, b)| square(a - b)).sum();
        Ok((error, a.iter().map(|&a| square(a)).sum::<f64>()))
    });
    // Summed in order, so that the result does not depend on the number of threads.
    let rows = rows.collect::<Result<Vec<(f64, f64)>>>()?;
    let (error, norm) = (rows.iter()).fold((0.0, 0.0), |sum, r| (sum.0 + r.0, sum.1 + r.1));
    row.rel_error = (error / norm.max(f64::MIN_POSITIVE)).sqrt();
    row.output_error = None;
    if !row.method.ends_with(TUNED) {
        row.method += TUNED;
    }
    Ok(())
}

/// The method's name in files and reports.
pub(super) fn method_name(method: &str, tuning: Option<&Tuning>) -> String {
    match tuning {
        Some(t) if t.fallback.is_none() => format!("{method}{TUNED}"),
        _ => method.into(),
    }
}

const TUNED: &str = "+tuned";

/// Removes the trainer's checkpoint, if there is one.
fn remove_checkpoint(writer: &Writer) -> Result<()> {
    let path = writer.scratch_path(CHECKPOINT);
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(nq_formats::Error::io(&path, "remove", e).into())
        }
        _ => Ok(()),
    }
}

/// The smallest group size of any weight; 64 if none is quantized.
fn least_group(w: &Canonical) -> usize {
    let layers = w.layers.iter().flat_map(|l| l.linears.values());
    let all = layers.chain([&w.embedding]).chain(&w.head);
    let group = |w: &Weight| match w {
        Weight::Quantized(nq_formats::QuantizedWeight::Affine(a)) => match a.scheme().group {
            Group::Size(n) => Some(n as usize),
            Group::Channel => Some(a.in_features()),
        },
        _ => None,
    };
    all.filter_map(group).min().unwrap_or(64)
}
