//! The final norm, the embedding and the head of a run, and an MTP layer.

use super::job::Job;
use super::state::{ENDS, MTP, State, StepReport, key, save};
use crate::error::Result;
use crate::groups;
use crate::layers::{LOOKED_UP, head_inputs};
use crate::report::LayerReport;
use crate::rounding;
use crate::schemes::Schemes;
use crate::second_order::InputStats;
use crate::trellis;
use nq_formats::nq::{Param, Writer};
use nq_formats::{Progress, Scheme, Weight, hash};
use nq_model::names::{EMBEDDING, HEAD, Shape, end_parameters};
use nq_model::{Dims, ModelConfig, mtp};
use nq_runtime::Hidden;
use nq_runtime::models::{self, Ending};

impl Job<'_> {
    /// A hash of everything that this last step depends on besides the plan: all schemes.
    pub(super) fn ends_key(&self, schemes: &Schemes) -> String {
        let config = self.config();
        let layers = key(config, schemes, config.num_hidden_layers);
        format!("{layers} {:?}", schemes.of(HEAD))
    }

    /// Quantizes and stages the final norm, the embedding and the head.
    pub(super) fn quantize_ends(
        &self,
        writer: &Writer,
        state: &mut State,
        schemes: &Schemes,
        stream: Option<Hidden>,
    ) -> Result<()> {
        let key = self.ends_key(schemes);
        let valid = state.steps.get(ENDS).is_some_and(|s| s.key == key);
        if valid && writer.staged(ENDS)?.is_some() {
            return Ok(());
        }
        let (config, store) = (self.config(), self.checkpoint.store());
        let ending = Ending::read(store, config)?;
        let inputs = match stream {
            Some(stream) => {
                let needs = self.method.needs();
                let looked_up = if config.tie_word_embeddings {
                    LOOKED_UP
                } else {
                    0.0
                };
                let inputs = head_inputs(config, &ending, &stream.data, needs, looked_up)?;
                drop(stream);
                Some(self.on_device(inputs)?)
            }
            None => None,
        };
        let embedding = models::embedding(store, config)?;
        let mut names = vec![(EMBEDDING, embedding)];
        if !config.tie_word_embeddings {
            names.push((HEAD, models::head(store, config)?));
        }
        let mut report = StepReport {
            key,
            ..StepReport::default()
        };
        let mut weights = Vec::new();
        for (name, source) in names {
            // An embedding that is not the head is only looked up: all its columns matter alike.
            let looked_up = name == EMBEDDING && !config.tie_word_embeddings;
            let scheme = schemes.of(name);
            let alike = match scheme {
                Some(Scheme::Trellis(_)) if looked_up && inputs.is_some() => {
                    let on = |gpu| trellis::alike(gpu, config.hidden_size);
                    self.gpu()?.map(on).transpose()?
                }
                _ => None,
            };
            let inputs = match looked_up {
                true => alike.as_ref(),
                false => inputs.as_ref(),
            };
            let (weight, row) = match (scheme, inputs) {
                (Some(scheme), Some(inputs)) if inputs.hessian.is_some() => {
                    let method = self.method.as_ref();
                    let (weight, row, more) = rounding::by_pieces(
                        method,
                        name,
                        &source,
                        Some(inputs),
                        scheme,
                        &self.progress,
                    )?;
                    report.fallbacks.extend(more);
                    (weight, row)
                }
                _ => {
                    let ended = end(schemes, name, &source, inputs)?;
                    self.progress.advance(source.dims().rows as u64);
                    ended
                }
            };
            if matches!(weight, Weight::Quantized(_)) {
                source.release();
            }
            report.rows.push(row);
            weights.push((name, weight));
        }
        writer.remove_step(ENDS)?;
        state.steps.insert(ENDS.into(), report);
        save(writer, state)?;
        let mut params = ending_params(config, &ending);
        for (name, weight) in &weights {
            params.push(((*name).to_owned(), Param::Matrix(weight)));
        }
        Ok(writer.put(ENDS, &params)?)
    }

    /// Stages the tables of n-grams, if there are any, as they are or rounded to nearest: part by part, so that no more than
    /// a part is in memory.
    pub(super) fn stage_tables(
        &self,
        writer: &Writer,
        state: &mut State,
        schemes: &Schemes,
    ) -> Result<()> {
        for (name, dims) in nq_runtime::ngrams::parts(self.config()) {
            let (step, key) = table_step(schemes, &name);
            let valid = state.steps.get(&step).is_some_and(|s| s.key == key);
            if valid && writer.staged(&step)?.is_some() {
                continue;
            }
            let source = self.checkpoint.store().matrix(&name, dims)?;
            let (weight, row) = end(schemes, &name, &source, None)?;
            writer.remove_step(&step)?;
            let rounded = matches!(weight, Weight::Quantized(_));
            let report = StepReport {
                key,
                rows: rounded.then_some(row).into_iter().collect(),
                ..StepReport::default()
            };
            state.steps.insert(step.clone(), report);
            save(writer, state)?;
            writer.put(&step, &[(name, Param::Matrix(&weight))])?;
            source.release();
        }
        Ok(())
    }

    /// A hash of what the step of an MTP layer depends on besides the plan; `None` without one.
    pub(super) fn mtp_key(&self, schemes: &Schemes) -> Option<String> {
        let groups = groups::mtp_groups(self.config());
        let weights = groups.iter().flat_map(|g| &g.weights);
        let chosen: Vec<_> = weights.map(|(name, _)| schemes.of(name)).collect();
        (!chosen.is_empty()).then(|| hash::sha256_hex(format!("{chosen:?}").as_bytes()))
    }

    /// Rounds an MTP layer, if there is one, to nearest and stages it: calibration does not run it.
    pub(super) fn quantize_mtp(
        &self,
        writer: &Writer,
        state: &mut State,
        schemes: &Schemes,
    ) -> Result<()> {
        let Some(key) = self.mtp_key(schemes) else {
            return Ok(());
        };
        let valid = state.steps.get(MTP).is_some_and(|s| s.key == key);
        if valid && writer.staged(MTP)?.is_some() {
            return Ok(());
        }
        let store = self.checkpoint.store();
        let (mut vectors, mut matrices) = (Vec::new(), Vec::new());
        let mut report = StepReport {
            key,
            ..StepReport::default()
        };
        for (name, shape) in mtp::parameters(self.config()) {
            match shape {
                Shape::Vector(len) => vectors.push((name.clone(), store.vector(&name, len)?)),
                Shape::Matrix(rows, cols) => {
                    let source = store.matrix(&name, Dims::new(rows, cols))?;
                    let (weight, row) = end(schemes, &name, &source, None)?;
                    if matches!(weight, Weight::Quantized(_)) {
                        source.release();
                    }
                    report.rows.push(row);
                    matrices.push((name, weight));
                }
            }
        }
        self.progress.advance(self.config().mtp_layers as u64);
        writer.remove_step(MTP)?;
        state.steps.insert(MTP.into(), report);
        save(writer, state)?;
        let vectors = vectors
            .iter()
            .map(|(name, t)| (name.clone(), Param::Vector(t)));
        let matrices = matrices
            .iter()
            .map(|(name, w)| (name.clone(), Param::Matrix(w)));
        let params: Vec<_> = vectors.chain(matrices).collect();
        Ok(writer.put(MTP, &params)?)
    }
}

/// The step in which a part of a table of n-grams is staged, and what it depends on besides the plan.
pub(super) fn table_step(schemes: &Schemes, part: &str) -> (String, String) {
    (format!("table-{part}"), format!("{:?}", schemes.of(part)))
}

/// The parameters between the last layer and the head, by name. They are not quantized.
fn ending_params<'e>(config: &ModelConfig, ending: &'e Ending) -> Vec<(String, Param<'e>)> {
    let mut mix = ending.mix.iter().flatten();
    let param = |(name, shape)| match shape {
        Shape::Vector(_) => Some((name, Param::Vector(&ending.norm))),
        Shape::Matrix(..) => Some((name, Param::Matrix(mix.next()?))),
    };
    end_parameters(config).filter_map(param).collect()
}

/// The embedding, the head or a weight of an MTP layer in its final form, rounded to nearest.
pub(super) fn end(
    schemes: &Schemes,
    name: &str,
    source: &Weight,
    inputs: Option<&InputStats>,
) -> Result<(Weight, LayerReport)> {
    let mut row = LayerReport {
        name: name.into(),
        bits: 16,
        method: "kept".into(),
        rel_error: 0.0,
        output_error: None,
    };
    let Some(scheme) = schemes.of(name) else {
        return Ok((source.clone(), row));
    };
    let importance = inputs.map_or(&[][..], |i| &i.mean_square);
    let (weight, rel_error) = rounding::to_nearest(name, source, importance, scheme)?;
    row.bits = scheme.bits().ceil() as u32;
    (row.method, row.rel_error) = ("rtn-clip".into(), rel_error);
    Ok((weight, row))
}
