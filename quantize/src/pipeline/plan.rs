//! The stages of a run, with an estimate of the time that each will take.
//!
//! What a stage does is counted: bytes that it reads, multiplications of its products, weights that it rounds. Its time
//! follows from the [`StagePace`] of the device. A resumed run goes by the times of the one before.

use super::guard::GLANCE;
use super::job::Job;
use super::pace::{GpuPace, RoundingWork, SamplingWork, StagePace, paths};
use super::pass_pace::TextPass;
use super::state::{self, State};
use crate::calibration::{CalibrationSource, sampling_slots};
use crate::error::Result;
use crate::groups::{self, GroupPlace};
use crate::methods::{Needs, TRIED_ROWS};
use crate::quality::{self, NOISE_WINDOWS};
use crate::sensitivity;
use nq_formats::Scheme;
use nq_load::gpu;
use nq_model::Dims;
use serde::Serialize;

/// A stage of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PlannedStage {
    /// Its name, as its progress is shown. Stages that occur several times are listed as often.
    pub name: &'static str,
    /// Estimated seconds.
    pub seconds: f64,
}

/// Stages, as their progress is shown.
pub(super) const HASHING: &str = "hash source";
const LOADING: &str = "loading weights";
pub(super) const SAMPLING_CALIBRATION: &str = "sampling calibration text";
pub(super) const SAMPLING_HELD_OUT: &str = "sampling held-out text";
pub(super) const SAMPLING_PROBE: &str = "sampling text to probe with";
const MEASURING_SENSITIVITY: &str = "measuring sensitivity";
pub(super) const FINISHED_LAYERS: &str = "running finished layers";
pub(super) const LAYERS: &str = "quantizing layers";
pub(super) const ENDS: &str = "quantizing embedding and head";
const STREAMING: &str = "running the source layer by layer";
const REFERENCE: &str = "reference";
const DIVERGENCE: &str = "KL divergence";
const WRITING: &str = "write";
/// The stages of tuning, with the share of its time that each takes.
const TUNING: [(&str, f64); 4] = [
    ("moving both models to the device", 0.02),
    ("sampling text that tuning is checked on", 0.03),
    ("tuning", 0.9),
    ("rounding the tuned weights", 0.05),
];

/// The time of a multiplication of attention, in times of one of a product, where text is sampled token by token: each token
/// reads the keys and values of its own sequence from memory. Found on two cores with the demo model.
const READ_AGAIN: f64 = 11.0;

/// The share of a layer's time for which it runs as rounded, which a resumed run does again.
const FINISHED: f64 = 0.25;

/// Work on the weights of a model.
#[derive(Default)]
struct WeightWork {
    /// Multiplications in the layers, for a token, attention included; of attention alone; and in the head.
    layers: f64,
    attention: f64,
    head: f64,
    /// Weights of the layers.
    weights: f64,
    /// Rounding the layers; and the embedding and the head.
    rounding: RoundingWork,
    ends: RoundingWork,
    /// Rounding the layers and samples of them to measure sensitivity.
    probing: RoundingWork,
}

impl WeightWork {
    /// A pass of so many tokens through the layers.
    fn pass(&self, tokens: f64) -> TextPass {
        TextPass {
            weights: self.weights,
            multiplications: tokens * self.layers,
        }
    }
}

impl Job<'_> {
    /// The stages that the run goes through, if no limit on the quality makes it begin again.
    ///
    /// # Errors
    /// An absent device.
    pub fn stages(&self) -> Result<Vec<PlannedStage>> {
        let pace = self.pace()?;
        Ok(self.stages_at(&pace, self.is_streamed()?))
    }

    fn pace(&self) -> Result<StagePace> {
        let (n, length) = quality::held_out_shape(self.config(), self.eval_tokens());
        let n = n.max(self.shape().0);
        if let Some(gpu) = self.gpu()? {
            let sizes = gpu::sizes()?;
            let together = sampling_slots(self.config(), n, length, Some(sizes.together));
            let (tokens, work) = (self.shape().0 * self.shape().1, self.work(1));
            let gpu = GpuPace {
                multiprocessors: gpu::multiprocessors(gpu)?,
                together: sizes.together,
                source_bytes: self.checkpoint.store().file_bytes() as f64,
            };
            let first = self.first_layers(together, work.pass(tokens as f64))?;
            return Ok(StagePace::of_gpu(&first, gpu, work.rounding));
        }
        let together = sampling_slots(self.config(), n, length, None);
        StagePace::of_cpu(
            &self.rehearse(together)?,
            self.options.schemes.have_trellis(),
        )
    }

    /// The same at a known pace; `streamed`: the source is run layer by layer where the result is measured.
    fn stages_at(&self, pace: &StagePace, streamed: bool) -> Vec<PlannedStage> {
        let (o, config) = (self.options, self.config());
        let work = self.work(config.num_hidden_layers);
        let all = work.layers + work.head;
        let pass = |tokens: f64| work.pass(tokens);
        let source = self.checkpoint.store().file_bytes() as f64;
        let result = self.estimate().file_bytes as f64;
        let calibration = self.shape();
        let held_out = quality::held_out_shape(config, self.eval_tokens());
        let tokens = |(n, length): (usize, usize)| (n * length) as f64;
        let sample = |shape: (usize, usize)| {
            let slots = sampling_slots(config, shape.0, shape.1, pace.together);
            pace.sample(SamplingWork {
                steps: (shape.0.div_ceil(slots) * shape.1) as f64,
                multiplications: tokens(shape) * (all + (READ_AGAIN - 1.0) * work.attention),
                logits: tokens(shape) * config.vocab_size as f64,
            })
        };
        let measure = |tokens: f64| {
            let logits = tokens / 2.0 * config.vocab_size as f64;
            pace.measure(tokens * all, logits)
        };
        let from_source = o.calibration == CalibrationSource::SelfSampled && calibration.0 > 0;
        let load = (LOADING, pace.loaded * source);

        let mut stages = Vec::new();
        if self.looks_ahead(streamed) {
            let glance = GLANCE as f64;
            stages.extend([load, (REFERENCE, measure(2.0 * glance))]);
            stages.extend([load, (DIVERGENCE, measure(glance))]);
        }
        if o.source.sha256.is_empty() {
            stages.push((HASHING, pace.hashed * source));
        }
        if from_source || self.samples_held_out() {
            stages.push(load);
        }
        if from_source {
            stages.push((SAMPLING_CALIBRATION, sample(calibration)));
        }
        if self.samples_held_out() {
            stages.push((SAMPLING_HELD_OUT, sample(held_out)));
        }
        if o.target.is_some() {
            let groups = groups::groups(config).len();
            let shape = sensitivity::shape(config, groups, self.eval_tokens());
            let rows = sensitivity::rows(config, shape.0 * shape.1, calibration.0 * calibration.1);
            let of_layer = work.layers / config.num_hidden_layers as f64;
            stages.extend([load, (SAMPLING_PROBE, sample(shape))]);
            let run = pace.probed * rows as f64 * of_layer;
            stages.push((MEASURING_SENSITIVITY, run + pace.round(work.probing)));
        }
        let calibrated = match self.method.needs() {
            Needs::Nothing => 0.0,
            _ => pace.gather(pass(tokens(calibration))) + pace.run(pass(tokens(calibration))),
        };
        stages.push((LAYERS, calibrated + pace.round(work.rounding)));
        stages.push((ENDS, pace.round(work.ends)));
        if o.tuning.is_some() {
            let seconds = self.tuning_seconds(pace.on_cpu);
            stages.extend(TUNING.map(|(name, share)| (name, share * seconds)));
        }
        if o.measure {
            if streamed {
                stages.push((STREAMING, pace.run(pass(tokens(held_out)))));
            } else {
                let noise = tokens((held_out.0.min(NOISE_WINDOWS), held_out.1));
                stages.extend([
                    load,
                    (REFERENCE, 2.0 * measure(noise)),
                    (DIVERGENCE, measure(noise)),
                ]);
            }
            stages.push((LOADING, pace.loaded * result));
            stages.push((DIVERGENCE, 2.0 * measure(tokens(held_out))));
        }
        stages.push((WRITING, pace.written * result));
        let planned = |(name, seconds)| PlannedStage { name, seconds };
        stages.into_iter().map(planned).collect()
    }

    /// The stages that are left of a run that `state` is from, `finished` of whose layers are staged, at the pace that it
    /// had.
    ///
    /// # Errors
    /// An absent device.
    pub(super) fn stages_after(&self, state: &State, finished: usize) -> Result<Vec<PlannedStage>> {
        let pace = self.pace()?;
        Ok(self.stages_left(&pace, self.is_streamed()?, state, finished))
    }

    fn stages_left(
        &self,
        pace: &StagePace,
        streamed: bool,
        state: &State,
        finished: usize,
    ) -> Vec<PlannedStage> {
        let mut stages = self.stages_at(pace, streamed);
        let layers = self.config().num_hidden_layers;
        let share = finished as f64 / layers as f64;
        let took = |name: &str| state.took.get(name).filter(|t| t.share > 0.0);
        // What took longer than estimated lets the others take longer too.
        let (mut estimated, mut taken) = (0.0, 0.0);
        for (name, took) in &state.took {
            let named = stages.iter().filter(|s| s.name == name);
            let occurrences = named.clone().count() as f64;
            if occurrences > 0.0 {
                let seconds: f64 = named.map(|s| s.seconds).sum();
                estimated += seconds / occurrences * took.share;
                taken += took.seconds;
            }
        }
        let slower = if estimated > 0.0 {
            taken / estimated
        } else {
            1.0
        };
        for stage in &mut stages {
            stage.seconds = match took(stage.name) {
                Some(took) if stage.name == LAYERS => took.seconds / took.share,
                _ => slower * stage.seconds,
            };
        }
        let ended = state.steps.contains_key(state::ENDS);
        let there = |name: &str| match name {
            HASHING => true,
            SAMPLING_CALIBRATION => state.calibration.is_some(),
            SAMPLING_HELD_OUT => state.held_out.is_some(),
            SAMPLING_PROBE | MEASURING_SENSITIVITY => state.menus.is_some(),
            REFERENCE => state.noise.is_some(),
            LAYERS => ended && finished == layers,
            ENDS => ended,
            _ => false,
        };
        let mut left: Vec<PlannedStage> = Vec::new();
        for mut stage in stages.into_iter().filter(|s| !there(s.name)) {
            // A model that was loaded for texts that are there.
            let idle = left.last().is_some_and(|s| s.name == LOADING);
            if idle && matches!(stage.name, LOADING | LAYERS) {
                left.pop();
            }
            if stage.name == LAYERS {
                let again = FINISHED * share * stage.seconds;
                stage.seconds *= 1.0 - share;
                if again > 0.0 && self.shape().0 > 0 {
                    left.push(PlannedStage {
                        name: FINISHED_LAYERS,
                        seconds: again,
                    });
                }
            }
            left.push(stage);
        }
        left
    }

    /// The work on the first `layers`, on the embedding and on the head.
    fn work(&self, layers: usize) -> WeightWork {
        let config = self.config();
        let attention = 2 * config.num_attention_heads * config.head_dim * self.shape().1 / 2;
        let attention = (layers * attention) as f64;
        let mut work = WeightWork {
            layers: attention,
            attention,
            head: (config.vocab_size * config.hidden_size) as f64,
            ..WeightWork::default()
        };
        let candidates = self.options.candidates.iter();
        let candidates = candidates.filter(|s| s.affine().is_some()).count();
        for group in groups::groups(config) {
            let in_layer = match group.place {
                GroupPlace::Layer { index, .. } if index >= layers => continue,
                GroupPlace::Layer { .. } => true,
                _ => false,
            };
            for (name, Dims { rows, cols }) in &group.weights {
                // A token goes through a few of a layer's experts.
                let used = match &config.experts {
                    Some(e) if name.contains("experts") => e.per_token as f64 / e.count as f64,
                    _ => 1.0,
                };
                let elements = (rows * cols) as f64;
                let rounding = match in_layer {
                    true => {
                        work.layers += used * elements;
                        work.weights += elements;
                        let tried = self.method.trials() * (*rows).min(TRIED_ROWS) * cols;
                        work.rounding.fitted += tried as f64;
                        let probed = sensitivity::fitted(*rows, *cols, candidates);
                        work.probing.fitted += probed as f64;
                        &mut work.rounding
                    }
                    false => &mut work.ends,
                };
                match self.options.schemes.of(name).and_then(Scheme::trellis) {
                    Some(scheme) => rounding.paths += elements * paths(scheme),
                    None => rounding.fitted += elements,
                }
                if self.method.corrects() {
                    let columns = (*cols).min(4 * config.hidden_size);
                    rounding.columns += elements * columns as f64;
                }
            }
        }
        work
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibration::Sequences;
    use crate::methods;
    use crate::pipeline::QuantizeOptions;
    use crate::pipeline::first_layers::FirstLayers;
    use crate::pipeline::pass_pace::PassPace;
    use crate::pipeline::state::StoredText;
    use crate::schemes::Codes;
    use crate::stages::{Stages, Took};
    use nq_formats::synth;
    use nq_formats::{Bits, Checkpoint};
    use nq_model::Preset;
    use std::sync::OnceLock;

    /// Runs `test` with a run of a published shape with the tokens that a GPU calibrates on.
    fn with_job(name: &str, codes: Codes, test: impl FnOnce(&Job<'_>, &Checkpoint)) {
        let config = Preset::find(name).unwrap().config();
        let checkpoint = synth::checkpoint(name, &config, 0).unwrap();
        let options = QuantizeOptions {
            calib_tokens: Some(32_768),
            eval_tokens: Some(8192),
            ..QuantizeOptions::new(&config, codes, "out").unwrap()
        };
        let job = Job {
            checkpoint: &checkpoint,
            options: &options,
            method: methods::by_name("gptq").unwrap(),
            progress: Stages::new(&()),
            device: OnceLock::new(),
        };
        test(&job, &checkpoint);
    }

    /// The pace of an H200 whose first layer took so long, as records have it.
    fn pace(job: &Job<'_>, first: &FirstLayers) -> StagePace {
        let gpu = GpuPace {
            multiprocessors: 132,
            together: 64,
            source_bytes: job.checkpoint.store().file_bytes() as f64,
        };
        StagePace::of_gpu(first, gpu, job.work(1).rounding)
    }

    /// Times of the first layer of 28 of 0.6B: parts of the second run of 2026-11-23-gpu-quantize.csv.
    fn first_of_06b(job: &Job<'_>) -> FirstLayers {
        let pass = job.work(1).pass(32_768.0);
        FirstLayers {
            gathered: PassPace::between(0.07, 2.32 / 28.0, 0.25, pass),
            run: PassPace::between(0.07, 2.36 / 28.0, 0.25, pass),
            rounded: 5.55 / 28.0,
            loaded: 0.45,
            step: 0.86e-3,
            logit: 1.8e-9,
        }
    }

    /// What the first layer took makes about the time of a whole run: seconds of the record, but for those of no stage.
    #[test]
    fn a_run_on_a_gpu_takes_what_its_first_layer_did_as_often_as_there_are_layers() {
        with_job("qwen3-0.6b", Codes::Integer(Bits::B4), |job, _| {
            let stages = job.stages_at(&pace(job, &first_of_06b(job)), false);
            let seconds = |name: &str| -> f64 {
                let named = stages.iter().filter(|s| s.name == name);
                named.map(|s| s.seconds).sum()
            };
            for (name, recorded) in [(LAYERS, 10.78), (ENDS, 2.31), (LOADING, 1.27)] {
                let ratio = seconds(name) / recorded;
                assert!((0.75..1.25).contains(&ratio), "{name}: {ratio}: {stages:?}");
            }
            let total: f64 = stages.iter().map(|s| s.seconds).sum();
            assert!(
                (0.85..1.15).contains(&(total / 20.5)),
                "{total}: {stages:?}"
            );
        });
    }

    /// A run that went at half the speed goes on so, without what is there.
    #[test]
    fn a_resumed_run_goes_by_the_pace_that_it_had() {
        with_job("qwen3-0.6b", Codes::Integer(Bits::B4), |job, _| {
            let pace = pace(job, &first_of_06b(job));
            let all = job.stages_at(&pace, false);
            let seconds = |stages: &[PlannedStage], name: &str| -> f64 {
                let named = stages.iter().filter(|s| s.name == name);
                named.map(|s| s.seconds).sum()
            };
            let took = |name: &str, share: f64| {
                let seconds = 2.0 * share * seconds(&all, name);
                (name.to_owned(), Took { seconds, share })
            };
            let state = State {
                calibration: Some(StoredText::new(&Sequences {
                    name: "self".into(),
                    ids: vec![vec![1]],
                    ..Sequences::default()
                })),
                took: [took(SAMPLING_CALIBRATION, 1.0), took(LAYERS, 0.25)].into(),
                ..State::default()
            };
            let left = job.stages_left(&pace, false, &state, 7);
            let names: Vec<&str> = left.iter().map(|s| s.name).collect();
            let begin = [LOADING, SAMPLING_HELD_OUT, FINISHED_LAYERS, LAYERS, ENDS];
            assert_eq!(names[..5], begin);
            let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-6, "{a}, expected {b}");
            near(seconds(&left, LAYERS), 1.5 * seconds(&all, LAYERS));
            near(seconds(&left, ENDS), 2.0 * seconds(&all, ENDS));
            near(seconds(&left, DIVERGENCE), 2.0 * seconds(&all, DIVERGENCE));
        });
    }
}
