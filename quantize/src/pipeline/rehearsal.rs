//! What a run on a CPU does most, done for a moment before it begins, so that the run's time can be estimated.
//!
//! A random model of one layer stands in for the source. It is as wide as the source up to a bound, from where on products
//! take their time by the multiplication, and goes through the code of the run itself: text is sampled, a layer runs over
//! text, statistics of inputs are gathered, a weight is rounded, two models are compared. So the estimate follows
//! whatever this CPU, its threads and other programs make of each of these.

use super::job::Job;
use super::pass_pace::{FITTED, PassPace, TextPass};
use crate::error::Result;
use crate::grid::Grid;
use crate::layers;
use crate::linalg::Matrix;
use crate::memory;
use crate::methods::{Needs, Problem};
use nq_evals::{EvalSpec, Protocol, compare, kld_rows};
use nq_formats::{AffineScheme, Bits, Checkpoint, Group, Zeros, mapping, synth};
use nq_load::load;
use nq_model::{DType, ModelConfig, Preset};
use nq_runtime::batch::{BatchRequest, sample_sequences};
use nq_runtime::{
    ActivationChoice, DraftedBy, Engine, Hidden, KvType, LayerStepper, LayerWeights, LoadOptions,
    Sampler, SamplingParams, SessionSpec, models,
};
use rayon::prelude::*;
use std::sync::Arc;
use std::time::Instant;

/// Seconds that work took, by the unit of each kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rehearsal {
    /// A multiplication of products while many sequences are sampled together.
    pub(super) sampled: f64,
    /// A logit of the distribution that a token is drawn from.
    pub(super) drawn: f64,
    /// Layers that run over calibration text.
    pub(super) run: PassPace,
    /// The same where statistics of inputs are gathered.
    pub(super) gathered: PassPace,
    /// A multiplication of the source with inputs in f32.
    pub(super) exact: f64,
    /// A multiplication of a model in a comparison, on average of the source and the result.
    pub(super) compared: f64,
    /// A logit of the source and one of the result that are compared.
    pub(super) scored: f64,
    /// A column that is corrected for a weight's error while weights are rounded.
    pub(super) column: f64,
    /// For how long each was done.
    pub(super) moment: Moment,
}

/// A source of so many weights or more is rehearsed in full. A smaller one is quantized in less time than that would
/// take, so less is done, in proportion to its weights.
const WHOLE_FROM: f64 = 1e7;
/// Widths from which on a product's speed does not depend on them.
const WIDEST: usize = 1024;
const WIDEST_MLP: usize = 3072;
const HEAD: usize = 128;
const VOCABULARY: usize = 2048;
/// The length of a sequence, in tokens. There are as many sequences as make about `ENOUGH` multiplications. A layer also runs
/// over one in `SHORTER` of them: the difference tells the time that grows with the text from the time that does not, to pack
/// weights and to add up statistics. `STEPS` are those of sampling.
const TOKENS: usize = 512;
const ENOUGH: usize = 8_000_000_000;
const MOST_SEQUENCES: usize = 16;
const SHORTER: usize = 3;
const STEPS: usize = 16;
/// Rows of logits that are compared at once.
const ROWS: usize = 64;
/// What a weight is rounded to.
const SCHEME: AffineScheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);

/// For how long work is done at least to learn what it takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    seconds: f64,
}

impl Moment {
    /// Long enough for any source.
    pub(super) const WHOLE: Moment = Moment { seconds: 0.1 };

    /// This share of the whole moment, at most 1.
    fn of_share(share: f64) -> Self {
        Moment {
            seconds: share * Self::WHOLE.seconds,
        }
    }

    /// Seconds of `work`, on average over the moment, after it was done once: threads start and pages are mapped then.
    pub(super) fn seconds(self, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
        work()?;
        self.seconds_at_once(work)
    }

    /// Seconds of `work`, on average over the moment. Other programs may take a part of the machine, as they will while the
    /// run takes place.
    pub(super) fn seconds_at_once(self, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
        let (begin, mut times) = (Instant::now(), 0);
        while times == 0 || begin.elapsed().as_secs_f64() < self.seconds {
            work()?;
            times += 1;
        }
        Ok(begin.elapsed().as_secs_f64().max(1e-9) / f64::from(times))
    }
}

/// The shape of a model of one layer, about as wide as `source`.
fn shape(source: &ModelConfig) -> ModelConfig {
    let wide = |n: usize, most: usize| n.min(most).next_multiple_of(HEAD);
    let mlp = match &source.experts {
        Some(experts) => experts.per_token * experts.width,
        None => source.intermediate_size,
    };
    let heads = wide(source.q_dim(), 2 * WIDEST) / HEAD;
    ModelConfig {
        hidden_size: wide(source.hidden_size, WIDEST),
        intermediate_size: wide(mlp, WIDEST_MLP),
        num_hidden_layers: 1,
        num_attention_heads: heads,
        num_key_value_heads: if heads.is_multiple_of(2) {
            heads / 2
        } else {
            1
        },
        head_dim: HEAD,
        vocab_size: VOCABULARY,
        eos_token_ids: vec![VOCABULARY as u32 - 1],
        ..Preset::find("qwen3-0.6b").expect("a preset").config()
    }
}

/// The model that stands in for a source.
struct StandIn<'a> {
    job: &'a Job<'a>,
    config: ModelConfig,
    source: Checkpoint,
    /// Weights of the layer.
    weights: f64,
    /// Sequences of tokens, all of one length.
    text: Vec<Vec<u32>>,
    /// How inputs of the source's weights are rounded, but where it is measured.
    rounded: ActivationChoice,
    moment: Moment,
}

/// Times of work on logits, by the logit.
struct LogitTimes {
    drawn: f64,
    scored: f64,
}

/// Times of work on a layer, and of rounding, by the column that is corrected.
struct LayerTimes {
    run: PassPace,
    gathered: PassPace,
    /// By the multiplication.
    exact: f64,
    column: f64,
}

impl<'a> StandIn<'a> {
    fn new(job: &'a Job<'a>) -> Result<Self> {
        let config = shape(job.config());
        let linears = config.layer(0).linears().into_iter();
        let weights: usize = linears.map(|l| l.elements(&config)).sum();
        let share = (job.config().parameters() as f64 / WHOLE_FROM).min(1.0);
        let enough = (share * ENOUGH as f64) as usize;
        let sequences = (enough / (weights * TOKENS)).clamp(SHORTER, MOST_SEQUENCES);
        let sequence = |i| {
            (0..TOKENS)
                .map(|j| ((i + j * 37) % VOCABULARY) as u32)
                .collect()
        };
        Ok(StandIn {
            source: synth::checkpoint("a model of one layer", &config, 0)?,
            weights: weights as f64,
            text: (0..sequences).map(sequence).collect(),
            rounded: match memory::dense_type(job.checkpoint) {
                DType::BF16 => ActivationChoice::AutoBf16,
                _ => ActivationChoice::F32,
            },
            config,
            job,
            moment: Moment::of_share(share),
        })
    }

    fn options(&self, activations: ActivationChoice) -> LoadOptions {
        LoadOptions {
            activations,
            ..self.job.options.load
        }
    }

    fn loaded(&self, activations: ActivationChoice) -> Result<Arc<dyn Engine>> {
        let options = self.options(activations);
        Ok(load(&self.config, self.source.store(), &options, &())?)
    }

    fn tokens(&self) -> f64 {
        (self.text.len() * TOKENS) as f64
    }

    /// Multiplications of the layer and of the head for the text.
    fn of_layer(&self) -> f64 {
        self.tokens() * (self.weights + (TOKENS * self.config.q_dim()) as f64)
    }

    fn of_head(&self) -> f64 {
        self.tokens() * (VOCABULARY * self.config.hidden_size) as f64
    }

    fn logits(&self) -> Result<LogitTimes> {
        let logit = |i: usize| (i as f32).sin();
        let values: Vec<f32> = (0..ROWS * VOCABULARY).map(logit).collect();
        let other: Vec<f32> = (0..ROWS * VOCABULARY).map(|i| 0.9 * logit(i)).collect();
        let sampler = Sampler::new(SamplingParams::default(), 0)?;
        let drawn = self.moment.seconds(|| {
            let rows = values.par_chunks(VOCABULARY);
            Ok(rows.try_for_each(|row| sampler.clone().sample(row).map(drop))?)
        })?;
        let scored =
            (self.moment).seconds(|| Ok(kld_rows(&other, &values, VOCABULARY).map(drop)?))?;
        Ok(LogitTimes {
            drawn: drawn / values.len() as f64,
            scored: scored / values.len() as f64,
        })
    }

    /// Seconds of a multiplication while `together` sequences are sampled.
    fn sampling(&self, together: usize, logits: &LogitTimes) -> Result<f64> {
        let engine = self.loaded(self.rounded)?;
        let products = self.weights + (VOCABULARY * self.config.hidden_size) as f64;
        let of_token = step(engine.as_ref(), together, self.moment)? / together as f64;
        Ok(without(of_token, logits.drawn * VOCABULARY as f64) / products)
    }

    fn layer(&self) -> Result<LayerTimes> {
        let (config, method) = (&self.config, self.job.method.as_ref());
        let weights = LayerWeights::read(self.source.store(), config, 0)?;
        let embedding = models::embedding(self.source.store(), config)?;
        let embedded = |text: &[Vec<u32>]| Hidden::embed(&embedding, text, config.streams());
        let hidden = embedded(&self.text)?;
        let shorter = embedded(&self.text[..self.text.len() / SHORTER])?;
        let stepper = |activations| -> Result<Box<dyn LayerStepper>> {
            let options = self.options(activations);
            Ok(nq_load::stepper(config, &options, KvType::F16, usize::MAX)?)
        };
        let over = |stepper: &mut dyn LayerStepper, text: &Hidden| {
            self.moment
                .seconds(|| Ok(stepper.layer(0, &weights, &mut text.clone(), &mut ())?))
        };
        let mut rounding = stepper(self.rounded)?;
        let mut known = None;
        let mut gather = |text: &Hidden| -> Result<f64> {
            self.moment.seconds(|| {
                let needs = method.needs();
                let found = layers::gather(rounding.as_mut(), 0, &weights, text, needs, &())?;
                known = Some(found.0);
                Ok(())
            })
        };
        let gathered = match method.needs() {
            Needs::Nothing => PassPace::default(),
            _ => self.pace(&mut gather, [&shorter, &hidden])?,
        };

        let linear = &weights.spec.products()[0].linears[0];
        let name = linear.name(0);
        let weight = Matrix::from_weight(&name, weights.linear(linear.kind))?;
        let problem = Problem {
            name: &name,
            weight: &weight,
            inputs: known.as_ref().map(|known| &known[0][0]),
            grid: Grid::new(SCHEME)?,
        };
        let columns = FITTED
            + if method.corrects() {
                weight.cols as f64
            } else {
                0.0
            };
        let rounded = self.moment.seconds(|| method.round(&problem).map(drop))?;
        let column = rounded / (columns * (weight.rows * weight.cols) as f64);
        // What the next ones do not need would add to what they take.
        drop((known, weight));
        let run = self.pace(|text| over(rounding.as_mut(), text), [&shorter, &hidden])?;
        drop(rounding);
        Ok(LayerTimes {
            run,
            gathered,
            exact: over(stepper(ActivationChoice::F32)?.as_mut(), &hidden)? / self.of_layer(),
            column,
        })
    }

    /// The pace of `work`, which tells its seconds over a shorter text and over the whole one.
    fn pace(
        &self,
        mut work: impl FnMut(&Hidden) -> Result<f64>,
        [shorter, whole]: [&Hidden; 2],
    ) -> Result<PassPace> {
        let (short, long) = (work(shorter)?, work(whole)?);
        let share = (self.text.len() / SHORTER) as f64 / self.text.len() as f64;
        let pass = TextPass {
            weights: self.weights,
            multiplications: self.of_layer(),
        };
        Ok(PassPace::between(short, long, share, pass))
    }

    /// Seconds of a multiplication while the source and its result are compared, on average of both.
    fn comparison(&self, logits: &LogitTimes) -> Result<f64> {
        let schemes = self.job.options.schemes.clone();
        let scheme = move |name: &str| schemes.of(name);
        let result = synth::quantized_checkpoint("its result", &self.config, 0, scheme)?;
        let (config, options) = (&self.config, &self.job.options.load);
        let result = load(config, result.store(), options, &())?;
        let source = self.loaded(ActivationChoice::F32)?;
        let spec = EvalSpec::new(Protocol::Llama, TOKENS, "");
        let text = self.text.concat();
        let compare = || compare(result.as_ref(), source.as_ref(), &text, &spec, &());
        let all = self.moment.seconds(|| Ok(compare().map(drop)?))?;
        let scored = logits.scored * self.tokens() / 2.0 * VOCABULARY as f64;
        Ok(without(all, scored) / (2.0 * (self.of_layer() + self.of_head())))
    }
}

/// Seconds of a step of `engine` that samples so many sequences together.
pub(super) fn step(engine: &dyn Engine, together: usize, moment: Moment) -> Result<f64> {
    let mut session = engine.session(SessionSpec {
        slots: together,
        ctx: STEPS + 1,
        pages: None,
        kv: KvType::F16,
        max_rows: together,
        snapshots: None,
        drafts: DraftedBy::Nothing,
    })?;
    let prompts: Vec<Vec<u32>> = (0..together).map(|i| vec![i as u32]).collect();
    let request = BatchRequest {
        prompts: &prompts,
        length: STEPS + 1,
        stop: &[],
        sampling: SamplingParams::default(),
    };
    let steps =
        moment.seconds(|| Ok(sample_sequences(session.as_mut(), &request, &()).map(drop)?))?;
    Ok(steps / STEPS as f64)
}

/// What is left of `seconds` without `part` of it, which was measured by itself.
fn without(seconds: f64, part: f64) -> f64 {
    (seconds - part).max(0.1 * seconds)
}

impl Job<'_> {
    /// Does each kind of work for a moment; `together` sequences are sampled at once.
    ///
    /// # Errors
    /// Errors of loading and running models.
    pub(super) fn rehearse(&self, together: usize) -> Result<Rehearsal> {
        let model = StandIn::new(self)?;
        let logits = model.logits()?;
        let layer = model.layer()?;
        let rehearsal = Rehearsal {
            sampled: model.sampling(together, &logits)?,
            drawn: logits.drawn,
            run: layer.run,
            gathered: layer.gathered,
            exact: layer.exact,
            compared: model.comparison(&logits)?,
            scored: logits.scored,
            column: layer.column,
            moment: model.moment,
        };
        drop(model);
        // What it took is no part of the memory that the run is said to take.
        mapping::trim_heap();
        Ok(rehearsal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever a source's shape is, the model that stands in for it can be quantized in every group size.
    #[test]
    fn any_source_has_a_stand_in() {
        let narrow = ModelConfig {
            hidden_size: 48,
            intermediate_size: 80,
            num_attention_heads: 3,
            head_dim: 16,
            ..Preset::find("qwen3-0.6b").unwrap().config()
        };
        let presets = Preset::all().map(|preset| preset.config());
        for source in presets.chain([narrow]) {
            let found = shape(&source);
            assert!((HEAD..=WIDEST).contains(&found.hidden_size));
            assert!((HEAD..=WIDEST_MLP).contains(&found.intermediate_size));
            assert!((HEAD..=2 * WIDEST).contains(&found.q_dim()));
            for width in [found.hidden_size, found.intermediate_size, found.q_dim()] {
                assert_eq!(width % HEAD, 0, "{found:?}");
            }
            assert_eq!(found.num_attention_heads % found.num_key_value_heads, 0);
        }
    }
}
