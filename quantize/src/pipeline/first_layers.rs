//! What a run on a GPU does to each layer, done to the first ones of the source before it begins, so that the run's time can
//! be estimated: a GPU's speed follows from the shapes of a model, and much of a run is the work of its host.

use super::job::Job;
use super::pass_pace::{PassPace, TextPass};
use super::rehearsal::{Moment, step};
use crate::error::{Error, Result};
use crate::layers;
use crate::methods::Needs;
use nq_evals::{EvalSpec, Protocol, compare};
use nq_formats::mapping;
use nq_model::ModelConfig;
use nq_runtime::{ActivationChoice, Hidden, LayerWeights, models};
use std::time::Instant;

/// Seconds that the work took.
#[derive(Clone, Copy, Debug)]
pub(super) struct FirstLayers {
    /// A layer that runs over calibration text.
    pub(super) run: PassPace,
    /// The same where statistics of inputs are gathered.
    pub(super) gathered: PassPace,
    /// Rounding the first layer.
    pub(super) rounded: f64,
    /// Loading the whole source.
    pub(super) loaded: f64,
    /// A step of the whole source that samples as many sequences together as the run does.
    pub(super) step: f64,
    /// A logit of the source, or of the result, that is compared.
    pub(super) logit: f64,
}

/// The part of the calibration text that a layer also runs over: the difference tells the time that grows with the text from
/// the time that does not.
const SHORTER: usize = 4;
/// Bytes of the layers by which two models of the source's first layers differ, if there are so many.
const DIFFERENCE: u64 = 256 << 20;
/// Seconds that rounding takes at least to be done but once.
const BRIEF: f64 = 0.5;
/// The length of a text in tokens of which logits are compared, and the number of such texts.
const WINDOW: usize = 512;
const WINDOWS: usize = 2;

/// A time of the first layers, and what it grows by with each layer.
struct Growing {
    first: f64,
    each: f64,
}

impl Growing {
    /// From the times of one layer and of `more` layers besides.
    fn between(one: f64, several: f64, more: usize) -> Self {
        Growing {
            first: one,
            each: (several - one).max(0.0) / more.max(1) as f64,
        }
    }

    fn of(&self, layers: usize) -> f64 {
        self.first + (layers - 1) as f64 * self.each
    }
}

/// The first layers of a source with its embedding and its head.
fn cut(config: &ModelConfig, layers: usize) -> ModelConfig {
    ModelConfig {
        num_hidden_layers: layers,
        mtp_layers: 0,
        ..config.clone()
    }
}

impl Job<'_> {
    /// Does to the first layer what the run does to each, and loads and runs models of few layers; `together` sequences are
    /// sampled at once. `first` is a pass of the calibration text through that layer.
    ///
    /// # Errors
    /// Errors of loading, running and rounding.
    pub(super) fn first_layers(&self, together: usize, first: TextPass) -> Result<FirstLayers> {
        let config = self.config();
        let layer = self.first_layer(first)?;
        let all = config.num_hidden_layers;
        let bytes = self.checkpoint.store().file_bytes() / all as u64;
        let more = (DIFFERENCE.div_ceil(bytes.max(1)) as usize).min(all - 1);
        let one = self.few_layers(1, together)?;
        let several = match more {
            0 => one,
            more => self.few_layers(1 + more, together)?,
        };
        mapping::trim_heap();
        Ok(FirstLayers {
            run: layer.run,
            gathered: layer.gathered,
            rounded: layer.rounded,
            loaded: Growing::between(one.loaded, several.loaded, more).of(all),
            step: Growing::between(one.step, several.step, more).of(all),
            logit: one.logit,
        })
    }

    /// Gathers statistics in the first layer, rounds it and runs it as rounded.
    fn first_layer(&self, first: TextPass) -> Result<FirstLayer> {
        let (config, store) = (self.config(), self.checkpoint.store());
        let (method, needs) = (self.method.as_ref(), self.method.needs());
        let source = LayerWeights::read(store, config, 0)?;
        let schemes = self.options.schemes.of_layer(config, 0);
        let round = |known| {
            let begin = Instant::now();
            let made = layers::quantize(method, 0, &source, known, &schemes, config, |_| ())?;
            Ok::<_, Error>((begin.elapsed().as_secs_f64(), made.weights))
        };
        let (n, length) = self.shape();
        if needs == Needs::Nothing {
            round(None)?;
            return Ok(FirstLayer {
                rounded: round(None)?.0,
                ..FirstLayer::default()
            });
        }
        let mut stepper = self.stepper(ActivationChoice::AutoBf16)?;
        let embedding = models::embedding(store, config)?;
        let text = |n: usize| {
            let token = |i, j| ((i + j * 37) % config.vocab_size) as u32;
            let sequence = |i| (0..length).map(|j| token(i, j)).collect();
            let text: Vec<Vec<u32>> = (0..n).map(sequence).collect();
            Hidden::embed(&embedding, &text, config.streams())
        };
        let shorter = (n / SHORTER).max(1);
        let pace = |[short, long]: [f64; 2]| {
            PassPace::between(short, long, shorter as f64 / n as f64, first)
        };
        let (mut short, mut long) = (text(shorter)?, text(n)?);

        let mut known = None;
        let mut gather = |text: &Hidden| -> Result<()> {
            known = None; // A device holds the statistics of one layer.
            let (stats, _) = layers::gather(stepper.as_mut(), 0, &source, text, needs, &())?;
            known = Some(stats);
            Ok(())
        };
        let gathered = [
            Moment::WHOLE.seconds(|| gather(&short))?,
            Moment::WHOLE.seconds_at_once(|| gather(&long))?,
        ];
        let (mut rounded, mut result) = round(known.clone())?;
        if rounded < BRIEF {
            // The first time, kernels were loaded.
            (rounded, result) = round(known.take())?;
        }
        let mut run = |text: &mut Hidden| -> Result<f64> {
            let begin = Instant::now();
            stepper.layer(0, &result, text, &mut ())?;
            Ok(begin.elapsed().as_secs_f64())
        };
        run(&mut short)?;
        Ok(FirstLayer {
            rounded,
            gathered: pace(gathered),
            run: pace([run(&mut short)?, run(&mut long)?]),
        })
    }

    /// Loads the source's first `layers` and runs them.
    fn few_layers(&self, layers: usize, together: usize) -> Result<FewLayers> {
        let config = cut(self.config(), layers);
        let from = self
            .device_estimate()?
            .map(|d| d.sampled_from)
            .unwrap_or_default();
        let begin = Instant::now();
        let engine = self.sampled_model(&config, from, &())?;
        let loaded = begin.elapsed().as_secs_f64();
        let step = step(engine.as_ref(), together, Moment::WHOLE)?;
        let length = WINDOW.min(config.max_position_embeddings);
        let ids: Vec<u32> = (0..WINDOWS * length)
            .map(|i| (i % config.vocab_size) as u32)
            .collect();
        let spec = EvalSpec::new(Protocol::Llama, length, "");
        let compared = match layers {
            1 => Moment::WHOLE.seconds(|| {
                Ok(compare(engine.as_ref(), engine.as_ref(), &ids, &spec, &()).map(drop)?)
            })?,
            _ => 0.0,
        };
        // The second half of each text is scored, by both models.
        let logits = (WINDOWS * length * config.vocab_size) as f64;
        Ok(FewLayers {
            loaded,
            step,
            logit: compared / logits,
        })
    }
}

/// Times of the first layer.
#[derive(Default)]
struct FirstLayer {
    run: PassPace,
    gathered: PassPace,
    rounded: f64,
}

/// Times of a model of the source's first layers.
#[derive(Clone, Copy)]
struct FewLayers {
    loaded: f64,
    step: f64,
    logit: f64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::METHODS;
    use crate::pipeline::QuantizeOptions;
    use crate::schemes::Codes;
    use nq_formats::{Bits, synth};
    use nq_model::Preset;
    use nq_runtime::DeviceChoice;

    /// It runs whatever the method needs, and leaves the job as it was. A CPU does it, too.
    #[test]
    fn first_layers_take_time_by_every_method() {
        let config = ModelConfig {
            hidden_size: 128,
            intermediate_size: 256,
            num_hidden_layers: 3,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            head_dim: 64,
            vocab_size: 512,
            eos_token_ids: vec![511],
            ..Preset::find("qwen3-0.6b").unwrap().config()
        };
        let source = synth::checkpoint("a small model", &config, 0).unwrap();
        for method in METHODS {
            let mut options =
                QuantizeOptions::new(&config, Codes::Integer(Bits::B4), "out").unwrap();
            options.method = method.name.into();
            options.calib_tokens = Some(1024);
            options.load.device = DeviceChoice::Cpu;
            let job = Job::new(&source, &options, &()).unwrap();
            let pass = TextPass {
                weights: 1e5,
                multiplications: 1e8,
            };
            let found = job.first_layers(2, pass).unwrap();
            assert!(found.rounded > 0.0 && found.loaded > 0.0, "{found:?}");
            assert!(found.step > 0.0 && found.logit > 0.0, "{found:?}");
            let gathers = job.method.needs() != Needs::Nothing;
            assert_eq!(found.gathered.multiplication > 0.0, gathers, "{found:?}");
            assert_eq!(found.run.multiplication > 0.0, gathers, "{found:?}");
        }
    }

    #[test]
    fn times_grow_by_the_layer() {
        let growing = Growing::between(1.0, 1.5, 2);
        assert_eq!((growing.of(1), growing.of(5)), (1.0, 2.0));
        // A model of more layers that was faster says only that a layer takes little.
        assert_eq!(Growing::between(1.0, 0.9, 2).of(28), 1.0);
    }
}
