//! What a run on a CPU does most, done for a moment before it begins, so that the run's time can be estimated.
//!
//! A random model of one layer stands in for the source. It is as wide as the source up to a bound, from where on products
//! take their time by the multiplication, and goes through the code of the run itself: text is sampled, a layer runs over
//! text, statistics of inputs are gathered, a weight is rounded, two models are compared. So the estimate follows
//! whatever this CPU, its threads and other programs make of each of these.

use super::job::Job;
use super::pace::FITTED;
use crate::error::Result;
use crate::grid::Grid;
use crate::layers;
use crate::linalg::Matrix;
use crate::memory;
use crate::methods::{Needs, Problem};
use crate::schemes::Schemes;
use nq_evals::{EvalSpec, Protocol, compare, kld_rows};
use nq_formats::{AffineScheme, Bits, Group, Zeros, synth};
use nq_load::load;
use nq_model::{DType, ModelConfig, Preset};
use nq_runtime::batch::{BatchRequest, sample_sequences};
use nq_runtime::{
    ActivationChoice, DraftedBy, Hidden, KvType, LayerStepper, LayerWeights, LoadOptions, Sampler,
    SamplingParams, SessionSpec, models,
};
use rayon::prelude::*;
use std::time::Instant;

/// Seconds that work took, by the unit of each kind.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rehearsal {
    /// A multiplication of products while many sequences are sampled together.
    pub(super) sampled: f64,
    /// A logit of the distribution that a token is drawn from.
    pub(super) drawn: f64,
    /// A multiplication of a layer that runs over calibration text.
    pub(super) run: f64,
    /// The same where statistics of inputs are gathered.
    pub(super) gathered: f64,
    /// A multiplication of the source with inputs in f32.
    pub(super) exact: f64,
    /// A multiplication of a model in a comparison, on average of the source and the result.
    pub(super) compared: f64,
    /// A logit of the source and one of the result that are compared.
    pub(super) scored: f64,
    /// A column that is corrected for a weight's error while weights are rounded.
    pub(super) column: f64,
}

/// Seconds for which each kind of work is done at least.
const MOMENT: f64 = 0.1;
/// Widths from which on a product's speed does not depend on them.
const WIDEST: usize = 1024;
const WIDEST_MLP: usize = 3072;
const HEAD: usize = 128;
const VOCABULARY: usize = 2048;
/// Tokens of a text that layers run over, and steps of sampling.
const TOKENS: usize = 512;
const STEPS: usize = 16;
/// Rows of logits that are compared at once.
const ROWS: usize = 64;
/// What a weight is rounded to.
const SCHEME: AffineScheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);

/// A model of one layer, about as wide as `source`.
fn stand_in(source: &ModelConfig) -> ModelConfig {
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
        ..Preset::find("qwen3-0.6b").expect("a preset").config()
    }
}

/// Seconds of `work`, on average over a moment. Other programs may take a part of the machine, as they will while the run
/// takes place.
pub(super) fn seconds(mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    work()?; // Threads start and pages are mapped.
    let (begin, mut times) = (Instant::now(), 0);
    while times == 0 || begin.elapsed().as_secs_f64() < MOMENT {
        work()?;
        times += 1;
    }
    Ok(begin.elapsed().as_secs_f64().max(1e-9) / f64::from(times))
}

impl Job<'_> {
    /// Does each kind of work for a moment.
    ///
    /// # Errors
    /// Errors of loading and running models.
    pub(super) fn rehearse(&self, sampled_together: usize) -> Result<Rehearsal> {
        let config = stand_in(self.config());
        let source = synth::checkpoint("a model of one layer", &config, 0)?;
        let store = source.store();
        let linears = config.layer(0).linears().into_iter();
        let layer: usize = linears.map(|l| l.elements(&config)).sum();
        let text: Vec<u32> = (0..TOKENS).map(|i| (i * 37 % VOCABULARY) as u32).collect();
        let over_text = (TOKENS * (layer + TOKENS / 2 * 2 * config.q_dim())) as f64;

        let mut values = vec![0.0; ROWS * VOCABULARY];
        let mut other = values.clone();
        for (i, (value, other)) in values.iter_mut().zip(&mut other).enumerate() {
            *value = (i as f32).sin();
            *other = *value + 0.01 * (i as f32 / 3.0).cos();
        }
        let sampler = Sampler::new(SamplingParams::default(), 0)?;
        let drawn = seconds(|| {
            let rows = values.par_chunks(VOCABULARY);
            let draw = |row| sampler.clone().sample(row).map(drop);
            Ok(rows.try_for_each(draw)?)
        })? / values.len() as f64;
        let score = || Ok(kld_rows(&other, &values, VOCABULARY).map(drop)?);
        let scored = seconds(score)? / values.len() as f64;

        // As the run rounds inputs of a source whose weights have this type.
        let rounded = match memory::dense_type(self.checkpoint) {
            DType::BF16 => ActivationChoice::AutoBf16,
            _ => ActivationChoice::F32,
        };
        let options = |activations| LoadOptions {
            activations,
            ..self.options.load
        };
        let engine = load(&config, store, &options(rounded), &())?;
        let mut session = engine.session(SessionSpec {
            slots: sampled_together,
            ctx: STEPS + 1,
            pages: None,
            kv: KvType::F16,
            max_rows: sampled_together,
            snapshots: None,
            drafts: DraftedBy::Nothing,
        })?;
        let prompts: Vec<Vec<u32>> = (0..sampled_together).map(|i| vec![i as u32]).collect();
        let request = BatchRequest {
            prompts: &prompts,
            length: STEPS + 1,
            stop: &[],
            sampling: SamplingParams::default(),
        };
        let steps = seconds(|| Ok(sample_sequences(session.as_mut(), &request, &()).map(drop)?))?;
        let products = (layer + VOCABULARY * config.hidden_size) as f64;
        let of_token = steps / (STEPS * sampled_together) as f64;
        let sampled = (of_token - drawn * VOCABULARY as f64).max(0.1 * of_token) / products;
        drop(session);

        let weights = LayerWeights::read(store, &config, 0)?;
        let embedding = models::embedding(store, &config)?;
        let hidden = Hidden::embed(&embedding, &[text.clone()], config.streams())?;
        let stepper = |activations| -> Result<Box<dyn LayerStepper>> {
            let options = options(activations);
            Ok(nq_load::stepper(
                &config,
                &options,
                KvType::F16,
                usize::MAX,
            )?)
        };
        let mut stepper_of_text = stepper(rounded)?;
        let needs = self.method.needs();
        let of_layer = |stepper: &mut dyn LayerStepper| -> Result<f64> {
            let mut run = || {
                stepper.layer(0, &weights, &mut hidden.clone(), &mut ())?;
                Ok(())
            };
            Ok(seconds(&mut run)? / over_text)
        };
        let run = of_layer(stepper_of_text.as_mut())?;
        let exact = of_layer(stepper(ActivationChoice::F32)?.as_mut())?;
        let mut gather =
            || layers::gather(stepper_of_text.as_mut(), 0, &weights, &hidden, needs, &());
        let (gathered, known) = match needs {
            Needs::Nothing => (0.0, None),
            _ => {
                let (known, _) = gather()?;
                let gathered = seconds(|| gather().map(drop))? / over_text;
                (gathered, Some(known))
            }
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
        let elements = (weight.rows * weight.cols) as f64;
        let columns = match self.method.corrects() {
            true => elements * weight.cols as f64,
            false => 0.0,
        };
        let rounding = seconds(|| self.method.round(&problem).map(drop))?;

        let schemes = self.options.schemes.clone();
        let result = synth::quantized_checkpoint("its result", &config, 0, move |name| {
            Schemes::of(&schemes, name)
        })?;
        let result = load(&config, result.store(), &self.options.load, &())?;
        let exactly = load(&config, store, &options(ActivationChoice::F32), &())?;
        let spec = EvalSpec::new(Protocol::Llama, TOKENS, "");
        let comparing = seconds(|| {
            Ok(compare(result.as_ref(), exactly.as_ref(), &text, &spec, &()).map(drop)?)
        })?;
        let all = over_text + (TOKENS * VOCABULARY * config.hidden_size) as f64;
        let logits = (TOKENS / 2 * VOCABULARY) as f64;
        Ok(Rehearsal {
            sampled,
            drawn,
            run,
            gathered,
            exact,
            compared: (comparing - scored * logits).max(0.1 * comparing) / (2.0 * all),
            scored,
            column: rounding / (FITTED * elements + columns),
        })
    }
}
