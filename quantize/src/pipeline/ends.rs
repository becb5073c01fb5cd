//! The final norm, the embedding and the head of a run.

use super::Job;
use super::layers::key;
use super::state::{State, Step, save};
use crate::error::Result;
use crate::fit::Fit;
use crate::grid::Grid;
use crate::linalg::Moments;
use crate::methods::rtn;
use crate::report::LayerReport;
use crate::schemes::Schemes;
use nq_formats::Weight;
use nq_formats::nq::{Param, Writer};
use nq_kernels::reference;
use nq_runtime::Hidden;
use nq_runtime::models::qwen3::{self, EMBEDDING, FINAL_NORM, HEAD};

/// The step that stages them.
pub(super) const STEP: &str = "ends";

impl Job<'_> {
    /// Quantizes and stages the final norm, the embedding and the head.
    pub(super) fn quantize_ends(
        &self,
        writer: &Writer,
        state: &mut State,
        schemes: &Schemes,
        stream: Option<Hidden>,
    ) -> Result<()> {
        let layers = self.config().num_hidden_layers;
        let key = format!("{} {:?}", key(schemes, layers)?, schemes.of(HEAD));
        let valid = state.steps.get(STEP).is_some_and(|s| s.key == key);
        if valid && writer.staged(STEP)?.is_some() {
            return Ok(());
        }
        let (config, store) = (self.config(), self.checkpoint.store());
        let norm = store.vector(FINAL_NORM, config.hidden_size)?;
        let importance = match stream {
            Some(stream) => head_squares(&stream, &norm.to_f32()?, config.rms_norm_eps),
            None => Vec::new(),
        };
        let embedding = qwen3::embedding(store, config)?;
        let mut names = vec![(EMBEDDING, embedding)];
        if !config.tie_word_embeddings {
            names.push((HEAD, qwen3::head(store, config)?));
        }
        let mut report = Step {
            key,
            ..Step::default()
        };
        let mut weights = Vec::new();
        for (name, source) in names {
            // An embedding that is no head is only looked up: all its columns are alike.
            let looked_up = name == EMBEDDING && !config.tie_word_embeddings;
            let importance = if looked_up { &[][..] } else { &importance };
            let (weight, row) = end(schemes, name, &source, importance)?;
            if matches!(weight, Weight::Quantized(_)) {
                source.release();
            }
            report.rows.push(row);
            weights.push((name, weight));
        }
        writer.remove_step(STEP)?;
        state.steps.insert(STEP.into(), report);
        save(writer, state)?;
        let mut params = vec![(FINAL_NORM.to_owned(), Param::Vector(&norm))];
        for (name, weight) in &weights {
            params.push(((*name).to_owned(), Param::Matrix(weight)));
        }
        Ok(writer.put(STEP, &params)?)
    }
}

/// The embedding or head as it will be written.
pub(super) fn end(
    schemes: &Schemes,
    name: &str,
    source: &Weight,
    importance: &[f32],
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
    let fit = Fit::clip();
    let (weight, rel_error) = rtn::round_rows(name, source, Grid::new(scheme)?, fit, importance)?;
    (row.bits, row.method, row.rel_error) = (scheme.bits.into(), "rtn-clip".into(), rel_error);
    Ok((weight, row))
}

/// `E[x^2]` of the head's inputs.
fn head_squares(stream: &Hidden, norm: &[f32], eps: f32) -> Vec<f32> {
    const ROWS: usize = 256;
    let n = norm.len();
    let mut moments = Moments::new(n, false);
    let mut normed = vec![0.0; ROWS * n];
    for x in stream.data.chunks(ROWS * n) {
        let y = &mut normed[..x.len()];
        reference::rms_norm(x, norm, eps, y);
        moments.add(y);
    }
    moments.finish().mean_square
}
