//! Perplexity and KL divergence on texts with images, each of which is fed whole.

use crate::error::{Error, Result};
use crate::evaluate::{
    Evaluation, figures, peak, row_nll, same_vocabulary, score_pair, score_rows,
};
use crate::softmax;
use crate::windows::{EvalSpec, LogitsRow, StageGuard, logit_rows};
use nq_formats::{Progress, Unit};
use nq_model::vision::ImageTokens;
use nq_runtime::{Chunk, Engine, ImagePrompt, KvType, LogitsWanted, Session, SessionSpec};

/// A model, and texts with images as it sees them.
#[derive(Clone, Copy)]
pub struct SeeingModel<'a> {
    /// What runs it.
    pub engine: &'a dyn Engine,
    /// The text of this index. Its tokens are the same for all models, its images are what each model's tower makes.
    pub prompt: &'a dyn Fn(usize) -> Result<ImagePrompt>,
    /// Type that keys and values are rounded to.
    pub kv: KvType,
}

impl SeeingModel<'_> {
    fn session(&self, spec: &EvalSpec) -> Result<Box<dyn Session>> {
        Ok(self.engine.session(SessionSpec {
            slots: 1,
            ctx: spec.ctx,
            kv: self.kv,
            max_rows: spec.rows,
            ..SessionSpec::default()
        })?)
    }
}

/// What was measured on texts with images.
pub struct SeenEvaluation {
    /// The figures. All texts are one window, of the tokens that were scored.
    pub evaluation: Evaluation,
    /// The tokens of that window, for [`Evaluation::worst`].
    pub tokens: Vec<u32>,
}

/// Measures `model` on so many `texts` of at most `spec.ctx` tokens, in lockstep with `reference` if there is one. Every
/// token behind a text's first is scored that is none of the `images` tokens.
///
/// # Errors
/// Those of [`crate::compare`]; those of the texts; [`Error::Spec`] for a text that is too long, or whose tokens differ
/// between the models, and for texts without a token to score.
pub fn evaluate_seen(
    model: SeeingModel<'_>,
    reference: Option<SeeingModel<'_>>,
    texts: usize,
    images: Option<ImageTokens>,
    spec: &EvalSpec,
    progress: &dyn Progress,
) -> Result<SeenEvaluation> {
    let config = model.engine.config();
    let (vocab, positions) = (config.vocab_size, config.max_position_embeddings);
    if spec.ctx > positions {
        let most = format!("at most the model's {positions}");
        return Err(wrong("ctx", most, spec.ctx.to_string()));
    }
    if let Some(reference) = reference {
        same_vocabulary(vocab, reference.engine.config().vocab_size)?;
    }
    let sides: Vec<SeeingModel<'_>> = [Some(model), reference].into_iter().flatten().collect();
    let mut sessions = Vec::new();
    for side in &sides {
        sessions.push(side.session(spec)?);
    }
    let most = spec.rows.min(logit_rows(vocab)).max(1);
    let of_image = |id: u32| images.is_some_and(|t| [t.pad, t.start, t.end].contains(&id));
    let (mut nll, mut pairs, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
    let _stage = StageGuard::begin(progress, "texts with images", texts as u64, Unit::Items);
    for window in 0..texts {
        let prompts = sides
            .iter()
            .map(|side| (side.prompt)(window))
            .collect::<Result<Vec<_>>>()?;
        check(&prompts, vocab, window, spec)?;
        let ids = prompts[0].ids();
        tokens.extend(tokens.is_empty().then(|| ids[0]));
        for (session, prompt) in sessions.iter_mut().zip(&prompts) {
            session.truncate(0, 0);
            session.show(0, prompt.images())?;
        }
        let fed = &ids[..ids.len() - 1]; // the last predicts nothing
        for (n, piece) in fed.chunks(most).enumerate() {
            let start = n * most;
            let place = |position: usize| LogitsRow {
                window,
                position,
                target: ids[position + 1],
            };
            let places = (start..start + piece.len()).map(place);
            let places: Vec<LogitsRow> = places.filter(|p| !of_image(p.target)).collect();
            let chunk = Chunk {
                slot: 0,
                tokens: piece,
                logits: match places.is_empty() {
                    true => LogitsWanted::None,
                    false => LogitsWanted::All,
                },
            };
            let chunk = [chunk];
            let mut logits = Vec::new();
            for session in &mut sessions {
                logits.push(session.forward(&chunk, None)?);
            }
            let rows = score_rows(&places, |_, place| {
                let row = |side: usize| logits[side].row(place.position - start);
                let y = row(0);
                if logits.len() == 1 {
                    return Ok((row_nll("model", y, place)?.nll, None));
                }
                let x = row(1);
                let (reference_top, x_max) = peak("reference", x, place)?;
                let (model_top, y_max) = peak("model", y, place)?;
                let d = softmax::divergence(y, y_max, x, x_max);
                let reference_nll = d.reference_lse - f64::from(x[place.target as usize]);
                let (nll, pair) =
                    score_pair(y, x, &d, place, model_top, reference_top, reference_nll);
                Ok((nll, Some(pair)))
            })?;
            for (row_nll, pair) in rows {
                nll.push(row_nll);
                pairs.extend(pair);
            }
            tokens.extend(places.iter().map(|place| place.target));
        }
        progress.advance(1);
    }
    if nll.is_empty() {
        return Err(wrong(
            "texts with images",
            "a token to score".into(),
            "none".into(),
        ));
    }
    let scored = 0..nll.len();
    let evaluation = figures(model.engine, spec, texts, scored, nll, pairs, |_| Ok(None))?;
    Ok(SeenEvaluation { evaluation, tokens })
}

fn wrong(what: &'static str, expected: String, found: String) -> Error {
    Error::Spec {
        what,
        expected,
        found,
    }
}

/// Refuses a text, of which the models have these `prompts`, that cannot be measured.
fn check(prompts: &[ImagePrompt], vocab: usize, text: usize, spec: &EvalSpec) -> Result<()> {
    let ids = prompts[0].ids();
    if !(2..=spec.ctx).contains(&ids.len()) {
        let found = format!("{} in text {text}", ids.len());
        return Err(wrong(
            "tokens of a text",
            format!("2 to {}", spec.ctx),
            found,
        ));
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
        let found = format!("{id} in text {text}");
        return Err(wrong(
            "token ids",
            format!("below the vocabulary of {vocab}"),
            found,
        ));
    }
    match prompts.iter().all(|other| other.ids() == ids) {
        true => Ok(()),
        false => {
            let found = format!("others in text {text}");
            Err(wrong(
                "tokens of a text",
                "the same for both models".into(),
                found,
            ))
        }
    }
}
