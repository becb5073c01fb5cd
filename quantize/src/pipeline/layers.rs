//! The layers of a run, one after another: gathered, rounded, staged, and run again rounded.

use super::ends::end;
use super::job::Job;
use super::plan::{FINISHED_LAYERS, LAYERS};
use super::state::{State, StepReport, key, save, step_name};
use crate::calibration::Sequences;
use crate::error::Result;
use crate::layers::{self, RowProgress};
use crate::linalg::read_row;
use crate::schemes::{LayerSchemes, Schemes};
use nq_formats::nq::{Param, Staged, Writer};
use nq_formats::{Progress, Scheme, Tensor, Unit, Weight, mapping};
use nq_load::stepper;
use nq_model::names::EMBEDDING;
use nq_model::{LinearSpec, ModelConfig};
use nq_runtime::ngrams::NgramRows;
use nq_runtime::{
    ActivationChoice, Hidden, KvType, LayerStepper, LayerWeights, LoadOptions, models,
};
use std::collections::BTreeSet;

/// Parts of this stage, as named in reports.
const GATHERING: &str = "quantizing layers: statistics of inputs";
const ROUNDING: &str = "quantizing layers: rounding";
const STAGING: &str = "quantizing layers: writing";
const RUNNING: &str = "quantizing layers: running them as rounded";

impl Job<'_> {
    /// Quantizes and stages every layer that is not staged yet. Returns the residual stream
    /// after the last layer, if the method needs statistics of inputs.
    pub(super) fn quantize_layers(
        &self,
        writer: &Writer,
        state: &mut State,
        schemes: &Schemes,
        calibration: Option<&Sequences>,
    ) -> Result<Option<Hidden>> {
        let config = self.config();
        let layers = config.num_hidden_layers;
        let mut stepper = self.stepper(ActivationChoice::AutoBf16)?;
        let mut stream = match calibration {
            Some(text) => {
                let embed = || self.embed(schemes, text);
                Some(self.progress.time("embedding calibration text", embed)?)
            }
            None => None,
        };
        let tokens = calibration.map_or(0, Sequences::tokens) as u64;
        let finished = self.finished(writer, state, schemes)?;
        if let (Some(stream), 1..) = (&mut stream, finished) {
            // The layers that follow are calibrated on what these make of the text.
            (self.progress).begin(
                FINISHED_LAYERS,
                finished as u64 * tokens,
                Unit::Layers(tokens),
            );
            for index in 0..finished {
                let Some(staged) = writer.staged(&step_name(index))? else {
                    unreachable!("counted among the finished ones")
                };
                let mut weights = staged_layer(&staged, config, index)?;
                // Tables are staged as they are.
                weights.table = NgramRows::open(self.checkpoint.store(), config, index)?;
                let mut pass = RowProgress {
                    width: config.stream_width(),
                    progress: &self.progress,
                };
                stepper.layer(index, &weights, stream, &mut pass)?;
            }
            self.progress.end();
        }
        let linears = config.layers().map(|l| l.linears().len()).max();
        let share = tokens.max(linears.unwrap_or(0) as u64); // of a layer's rounding
        let parts = 2 * tokens + share;
        (self.progress).begin(LAYERS, layers as u64 * parts, Unit::Layers(parts));
        self.progress.kept(finished as u64 * parts);
        for index in finished..layers {
            let step = step_name(index);
            let of_layer = schemes.of_layer(config, index);
            let done =
                self.quantize_layer(index, stream.as_ref(), stepper.as_mut(), &of_layer, share)?;
            for f in &done.fallbacks {
                self.progress.note(f);
            }
            let report = StepReport {
                rows: done.rows,
                fallbacks: done.fallbacks,
                key: key(config, schemes, index + 1),
            };
            // Write the report before the weights, so that every staged step has one. A step staged under another key is
            // removed before that.
            writer.remove_step(&step)?;
            state.steps.insert(step.clone(), report);
            state.took = self.progress.took();
            save(writer, state)?;
            let params = params(index, &done.weights);
            (self.progress).time(STAGING, || writer.put(&step, &params))?;
            drop(params);
            if let Some(stream) = &mut stream {
                let mut pass = RowProgress {
                    width: config.stream_width(),
                    progress: &self.progress,
                };
                let run = || stepper.layer(index, &done.weights, stream, &mut pass);
                self.progress.time(RUNNING, run)?;
            }
        }
        self.progress.end();
        Ok(stream)
    }

    /// How many layers, from the first on, are staged under `schemes`.
    ///
    /// # Errors
    /// A step that cannot be read.
    pub(super) fn finished(
        &self,
        writer: &Writer,
        state: &State,
        schemes: &Schemes,
    ) -> Result<usize> {
        let config = self.config();
        for index in 0..config.num_hidden_layers {
            let step = step_name(index);
            let key = key(config, schemes, index + 1);
            let valid = state.steps.get(&step).is_some_and(|s| s.key == key);
            if !valid || writer.staged(&step)?.is_none() {
                return Ok(index);
            }
        }
        Ok(config.num_hidden_layers)
    }

    /// The calibration text looked up in the rounded embedding, with the rows of its images. Most rows of a large vocabulary
    /// do not occur, and only those that do are rounded. Rows of a trellis, which are rounded together, stay as they
    /// are.
    fn embed(&self, schemes: &Schemes, text: &Sequences) -> Result<Hidden> {
        text.show(self.embed_ids(schemes, text)?)
    }

    fn embed_ids(&self, schemes: &Schemes, text: &Sequences) -> Result<Hidden> {
        let embedding = models::embedding(self.checkpoint.store(), self.config())?;
        let (vocab, width) = embedding.dims().pair();
        let streams = self.config().streams();
        let ids: BTreeSet<u32> = text.ids.iter().flatten().copied().collect();
        if ids.last().is_some_and(|&id| id as usize >= vocab) {
            // `embed` refuses a token past the vocabulary with a named error.
            return Ok(Hidden::embed(&embedding, &text.ids, streams)?);
        }
        if schemes.of(EMBEDDING).and_then(Scheme::trellis).is_some() {
            return Ok(Hidden::embed(&embedding, &text.ids, streams)?);
        }
        let mut place = vec![0; vocab];
        let mut rows = vec![0.0; ids.len() * width];
        for (i, (&id, row)) in ids.iter().zip(rows.chunks_mut(width)).enumerate() {
            place[id as usize] = i as u32;
            read_row(EMBEDDING, &embedding, id as usize, row)?;
        }
        embedding.release();
        let rows = Weight::Dense(Tensor::from_f32(vec![ids.len(), width], rows)?);
        let (rounded, _) = end(schemes, EMBEDDING, &rows, None)?;
        let places = |ids: &Vec<u32>| ids.iter().map(|&id| place[id as usize]).collect();
        let places: Vec<Vec<u32>> = text.ids.iter().map(places).collect();
        Ok(Hidden {
            tokens: text.ids.concat(),
            ..Hidden::embed(&rounded, &places, streams)?
        })
    }

    /// The layer stepper on the requested device, whose Linears round their inputs as `activations` say.
    pub(super) fn stepper(&self, activations: ActivationChoice) -> Result<Box<dyn LayerStepper>> {
        let options = LoadOptions {
            activations,
            ..self.options.load
        };
        let rows = self.device_estimate()?.map_or(usize::MAX, |d| d.rows);
        Ok(stepper(self.config(), &options, KvType::F16, rows)?)
    }

    fn quantize_layer(
        &self,
        index: usize,
        stream: Option<&Hidden>,
        stepper: &mut dyn LayerStepper,
        schemes: &LayerSchemes,
        share: u64,
    ) -> Result<layers::Quantized> {
        let (config, store) = (self.config(), self.checkpoint.store());
        let source = LayerWeights::read(store, config, index)?;
        mapping::trim_heap();
        let mut rare = None;
        let stats = match stream {
            Some(hidden) => {
                let needs = self.method.needs();
                let progress = &self.progress;
                let gather = || layers::gather(stepper, index, &source, hidden, needs, progress);
                let (stats, hits) = progress.time(GATHERING, gather)?;
                rare = hits.rare();
                Some(stats)
            }
            None => None,
        };
        let linears = config.layer(index).linears().into_iter();
        let all: u64 = linears.map(|l| l.elements(config) as u64).sum();
        let (mut seen, mut reported) = (0, 0);
        let advance = |linear: &LinearSpec| {
            seen += linear.elements(config) as u64;
            let at = (u128::from(share) * u128::from(seen) / u128::from(all)) as u64;
            self.progress.advance(at - reported);
            reported = at;
        };
        let method = self.method.as_ref();
        let round = || layers::quantize(method, index, &source, stats, schemes, config, advance);
        let mut done = self.progress.time(ROUNDING, round)?;
        (done.fallbacks).extend(rare.map(|rare| format!("layer {index}: {rare}")));
        source.linears.values().for_each(Weight::release);
        mapping::trim_heap();
        Ok(done)
    }
}

/// A layer's parameters by name.
pub(super) fn params(index: usize, w: &LayerWeights) -> Vec<(String, Param<'_>)> {
    let norms = (w.norms.iter()).map(|(&k, t)| (w.spec.norm(k).name(index), Param::Vector(t)));
    let linears =
        (w.linears.iter()).map(|(&k, m)| (w.spec.linear(k).name(index), Param::Matrix(m)));
    let biases =
        (w.biases.iter()).map(|(&k, t)| (w.spec.linear(k).bias_name(index), Param::Vector(t)));
    let others =
        (w.spec.vectors().into_iter()).map(|v| (v.name(index), Param::Vector(&w.vectors[&v.kind])));
    norms.chain(linears).chain(biases).chain(others).collect()
}

/// Reads a staged layer.
pub(super) fn staged_layer(
    staged: &Staged,
    config: &ModelConfig,
    index: usize,
) -> Result<LayerWeights> {
    LayerWeights::collect(
        config.layer(index),
        |linear| Ok(staged.matrix(&linear.name(index), linear.dims(config))?),
        |vector| Ok(staged.vector(&vector.name(index), vector.len(config))?),
    )
}
