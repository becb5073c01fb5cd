//! Measures perplexity, and KL divergence from a reference that runs in lockstep.

use crate::error::{Error, Result};
use crate::report::{Comparison, EvalReport, KldStats};
use crate::softmax;
use crate::stats;
use crate::windows::{EvalSpec, LogitsRow, Plan};
use nq_formats::Progress;
use nq_model::Product;
use nq_runtime::{Chunk, Engine, Logits, LogitsWanted, Observer};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A measurement: its figures and the underlying data for every scored token.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// The figures.
    pub report: EvalReport,
    /// Cross-entropy of every scored token in nats, in text order.
    pub nll: Vec<f64>,
    /// Every scored token compared with the reference; empty without one.
    pub pairs: Vec<PairScore>,
    /// The positions of a window that are scored.
    pub scored: Range<usize>,
}

/// One scored token, compared with the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairScore {
    /// KL divergence of the reference's distribution from the model's, in nats.
    pub kld: f64,
    /// The reference's cross-entropy of the token, in nats.
    pub reference_nll: f64,
    /// The model's best token.
    pub model_top: u32,
    /// The reference's best token.
    pub reference_top: u32,
    /// Probability of the model's best token.
    pub model_top_p: Probability,
    /// Probability of the reference's best token.
    pub reference_top_p: Probability,
}

/// The probability of a token according to two models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Probability {
    /// According to the reference.
    pub reference: f32,
    /// According to the model.
    pub model: f32,
}

/// A position at which the model differs far from its reference.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorstToken {
    /// Window, counted from 0.
    pub window: usize,
    /// Position of the last token of `context` in the window.
    pub position: usize,
    /// KL divergence in nats.
    pub kld: f64,
    /// The tokens up to the position, at most [`WorstToken::CONTEXT`].
    pub context: Vec<u32>,
    /// The next token of the text.
    pub target: u32,
    /// The model's best token.
    pub model_top: u32,
    /// The reference's best token.
    pub reference_top: u32,
    /// Probability of `target`.
    pub target_p: Probability,
    /// Probability of `model_top`.
    pub model_top_p: Probability,
    /// Probability of `reference_top`.
    pub reference_top_p: Probability,
}

impl WorstToken {
    /// Number of context tokens kept.
    pub const CONTEXT: usize = 12;
}

impl Evaluation {
    /// Perplexity of each window.
    pub fn window_ppl(&self) -> Vec<f64> {
        self.nll
            .chunks(self.scored.len().max(1))
            .map(|w| stats::mean(w.iter().copied()).exp())
            .collect()
    }

    /// Mean KL divergence of each window; empty without a reference.
    pub fn window_kld(&self) -> Vec<f64> {
        self.pairs
            .chunks(self.scored.len().max(1))
            .map(|w| stats::mean(w.iter().map(|p| p.kld)))
            .collect()
    }

    /// The `n` positions with the greatest KL divergence, worst first. `tokens` is the evaluated
    /// text.
    pub fn worst(&self, tokens: &[u32], n: usize) -> Vec<WorstToken> {
        let mut order: Vec<usize> = (0..self.pairs.len()).collect();
        let n = n.min(order.len());
        let worse = |&a: &usize, &b: &usize| {
            let by_kld = self.pairs[b].kld.total_cmp(&self.pairs[a].kld);
            by_kld.then(a.cmp(&b))
        };
        if n < order.len() {
            order.select_nth_unstable_by(n, worse);
            order.truncate(n);
        }
        order.sort_unstable_by(worse);
        order
            .into_iter()
            .map(|i| {
                let window = i / self.scored.len();
                let position = self.scored.start + i % self.scored.len();
                let start = window * self.report.ctx;
                let first = (position + 1).saturating_sub(WorstToken::CONTEXT);
                let pair = self.pairs[i];
                WorstToken {
                    window,
                    position,
                    kld: pair.kld,
                    context: tokens[start + first..=start + position].to_vec(),
                    target: tokens[start + position + 1],
                    model_top: pair.model_top,
                    reference_top: pair.reference_top,
                    target_p: Probability {
                        reference: (-pair.reference_nll).exp() as f32,
                        model: (-self.nll[i]).exp() as f32,
                    },
                    model_top_p: pair.model_top_p,
                    reference_top_p: pair.reference_top_p,
                }
            })
            .collect()
    }
}

/// Measures the perplexity of `engine` on `tokens`.
///
/// Cross-entropies are computed in f64 from f32 logits and added in text order.
///
/// # Errors
/// Errors of [`EvalSpec::windows`]; [`Error::Spec`] if the context or a token does not fit the
/// model; [`Error::NotFinite`] for logits that are not finite; [`Error::ResultNotFinite`] for
/// figures that are not finite, with the first layer at fault; otherwise errors of the engine.
pub fn evaluate(
    engine: &dyn Engine,
    tokens: &[u32],
    spec: &EvalSpec,
    progress: &dyn Progress,
) -> Result<Evaluation> {
    let plan = Plan::new(tokens, spec, engine)?;
    let mut sessions = [plan.session(engine)?];
    let mut nll = vec![0f64; plan.total()];
    plan.run(&mut sessions, "perplexity", progress, |logits, places| {
        let rows: Vec<f64> = score_rows(places, |i, place| {
            Ok(row_nll("model", logits[0].row(i), place)?.nll)
        })?;
        scatter(&plan, places, &rows, &mut nll);
        Ok(())
    })?;
    finish(engine, spec, &plan, nll, Vec::new())
}

/// Compares `engine` with `reference` on the same tokens, both run window by window in
/// lockstep: the reference's distribution is neither rounded nor kept.
///
/// # Errors
/// Errors of [`evaluate`]; [`Error::Spec`] if the vocabularies differ.
pub fn compare(
    engine: &dyn Engine,
    reference: &dyn Engine,
    tokens: &[u32],
    spec: &EvalSpec,
    progress: &dyn Progress,
) -> Result<Evaluation> {
    same_vocabulary(engine.config().vocab_size, reference.config().vocab_size)?;
    let plan = Plan::new(tokens, spec, engine)?;
    Plan::new(tokens, spec, reference)?; // the context must fit it too
    let mut sessions = [plan.session(engine)?, plan.session(reference)?];
    let mut nll = vec![0f64; plan.total()];
    let mut pairs = vec![PairScore::ZERO; plan.total()];
    plan.run(
        &mut sessions,
        "KL divergence",
        progress,
        |logits, places| {
            let [model, reference]: [Logits<'_>; 2] = [logits[0], logits[1]];
            let rows = score_rows(places, |i, place| {
                let (x, y) = (reference.row(i), model.row(i));
                let (reference_top, x_max) = peak("reference", x, place)?;
                let (model_top, y_max) = peak("model", y, place)?;
                let d = softmax::divergence(y, y_max, x, x_max);
                let nll = d.reference_lse - f64::from(x[place.target as usize]);
                Ok(score_pair(y, x, &d, place, model_top, reference_top, nll))
            })?;
            for (&place, (row_nll, pair)) in places.iter().zip(rows) {
                nll[plan.index(place)] = row_nll;
                pairs[plan.index(place)] = pair;
            }
            Ok(())
        },
    )?;
    finish(engine, spec, &plan, nll, pairs)
}

impl PairScore {
    /// Placeholder until a row is scored.
    pub(crate) const ZERO: PairScore = PairScore {
        kld: 0.0,
        reference_nll: 0.0,
        model_top: 0,
        reference_top: 0,
        model_top_p: Probability {
            reference: 0.0,
            model: 0.0,
        },
        reference_top_p: Probability {
            reference: 0.0,
            model: 0.0,
        },
    };
}

/// The model's cross-entropy of a row's token and its comparison with the reference, whose best token and
/// cross-entropy are given.
pub(crate) fn score_pair(
    model: &[f32],
    reference: &[f32],
    d: &softmax::Divergence,
    place: LogitsRow,
    model_top: usize,
    reference_top: usize,
    reference_nll: f64,
) -> (f64, PairScore) {
    let probability = |token: usize| Probability {
        reference: (f64::from(reference[token]) - d.reference_lse).exp() as f32,
        model: (f64::from(model[token]) - d.model_lse).exp() as f32,
    };
    let pair = PairScore {
        kld: d.kld,
        reference_nll,
        model_top: model_top as u32,
        reference_top: reference_top as u32,
        model_top_p: probability(model_top),
        reference_top_p: probability(reference_top),
    };
    let nll = d.model_lse - f64::from(model[place.target as usize]);
    (nll, pair)
}

/// Refuses models whose distributions are over different tokens.
pub(crate) fn same_vocabulary(model: usize, reference: usize) -> Result<()> {
    if model == reference {
        return Ok(());
    }
    Err(Error::Spec {
        what: "vocabulary of the model",
        expected: format!("the reference's {reference} tokens"),
        found: model.to_string(),
    })
}

/// Cross-entropy of a row and its best token.
pub(crate) struct RowNll {
    pub(crate) nll: f64,
    pub(crate) lse: f64,
    pub(crate) top: usize,
}

/// Scores one row against the token that follows it.
pub(crate) fn row_nll(role: &'static str, row: &[f32], place: LogitsRow) -> Result<RowNll> {
    let (top, max) = peak(role, row, place)?;
    let lse = softmax::log_sum_exp(row, max);
    Ok(RowNll {
        nll: lse - f64::from(row[place.target as usize]),
        lse,
        top,
    })
}

/// The best token of a row and its logit.
pub(crate) fn peak(role: &'static str, row: &[f32], place: LogitsRow) -> Result<(usize, f32)> {
    softmax::peak(row).ok_or(Error::NotFinite {
        role,
        window: place.window,
        position: place.position,
    })
}

/// Scores rows in parallel; results are in the order of `places`, whatever the number of threads.
pub(crate) fn score_rows<T: Send>(
    places: &[LogitsRow],
    score: impl Fn(usize, LogitsRow) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    places
        .par_iter()
        .enumerate()
        .map(|(i, &place)| score(i, place))
        .collect()
}

/// Writes the rows' results to the places of their tokens in the text.
pub(crate) fn scatter<T: Copy>(plan: &Plan<'_>, places: &[LogitsRow], rows: &[T], all: &mut [T]) {
    for (&place, &row) in places.iter().zip(rows) {
        all[plan.index(place)] = row;
    }
}

/// Computes the report, and refuses figures that are not finite.
///
/// # Errors
/// [`Error::ResultNotFinite`] for such a figure.
pub(crate) fn finish(
    engine: &dyn Engine,
    spec: &EvalSpec,
    plan: &Plan<'_>,
    nll: Vec<f64>,
    pairs: Vec<PairScore>,
) -> Result<Evaluation> {
    let scored = spec.scored();
    let tokens = scored.len();
    let layer = |worst: usize| first_not_finite(engine, plan, worst / tokens);
    figures(engine, spec, plan.windows(), scored, nll, pairs, layer)
}

/// The same of `windows` windows, of which the positions `scored` are scored; `layer` finds the first layer at fault from
/// the index of the worst token.
pub(crate) fn figures(
    engine: &dyn Engine,
    spec: &EvalSpec,
    windows: usize,
    scored: Range<usize>,
    nll: Vec<f64>,
    pairs: Vec<PairScore>,
    layer: impl Fn(usize) -> Result<Option<usize>>,
) -> Result<Evaluation> {
    let (mean, se) = stats::mean_and_se(nll.iter().copied());
    let ppl = mean.exp();
    let description = engine.description();
    let report = EvalReport {
        ppl,
        ppl_se: ppl * se, // first order: d(e^m) = e^m dm
        tokens: nll.len(),
        windows,
        ctx: spec.ctx,
        protocol: spec.protocol,
        text: spec.text.clone(),
        kv: spec.kv.to_string(),
        activations: description.activations.clone(),
        device: description.device.clone(),
        against: (!pairs.is_empty()).then(|| comparison(&nll, &pairs)),
    };
    let against = report.against.as_ref();
    let figures = [
        ("perplexity", report.ppl),
        ("perplexity's standard error", report.ppl_se),
        ("KL divergence", against.map_or(0.0, |a| a.kld.max)),
        (
            "the reference's perplexity",
            against.map_or(0.0, |a| a.ppl_ref),
        ),
    ];
    if let Some((what, found)) = figures.into_iter().find(|(_, f)| !f.is_finite()) {
        let worst = (0..nll.len()).max_by(|&a, &b| nll[a].total_cmp(&nll[b]));
        let layer = layer(worst.unwrap_or(0))?;
        return Err(Error::ResultNotFinite { what, found, layer });
    }
    Ok(Evaluation {
        report,
        nll,
        pairs,
        scored,
    })
}

/// Finds the first layer of a window with NaN or infinity, by running it again.
fn first_not_finite(engine: &dyn Engine, plan: &Plan<'_>, window: usize) -> Result<Option<usize>> {
    #[derive(Default)]
    struct First(Option<usize>);
    impl First {
        fn look(&mut self, layer: usize, x: &[f32]) {
            if self.0.is_none() && x.iter().any(|v| !v.is_finite()) {
                self.0 = Some(layer);
            }
        }
    }
    impl Observer for First {
        fn linear_input(&mut self, layer: usize, _: &Product, x: &[f32]) {
            self.look(layer, x);
        }
        fn layer_output(&mut self, layer: usize, x: &[f32]) {
            self.look(layer, x);
        }
    }
    let mut first = First::default();
    let mut session = plan.session(engine)?;
    let rows = session.spec().max_rows.max(1);
    for tokens in plan.window(window).chunks(rows) {
        let logits = LogitsWanted::None;
        let chunk = Chunk {
            slot: 0,
            tokens,
            logits,
        };
        match session.forward(&[chunk], Some(&mut first)) {
            Ok(_) => {}
            // The engine found the layer itself.
            Err(nq_runtime::Error::NotFinite { layer, .. }) => return Ok(first.0.or(Some(layer))),
            Err(e) => return Err(e.into()),
        }
        if first.0.is_some() {
            break;
        }
    }
    Ok(first.0)
}

/// Statistics of a comparison.
fn comparison(nll: &[f64], pairs: &[PairScore]) -> Comparison {
    let klds = stats::sorted(pairs.iter().map(|p| p.kld));
    let agree = pairs.iter().filter(|p| p.model_top == p.reference_top);
    let dp = nll.iter().zip(pairs).map(|(nll, p)| {
        let change = (-nll).exp() - (-p.reference_nll).exp();
        change * change
    });
    let ratio = nll.iter().zip(pairs).map(|(nll, p)| nll - p.reference_nll);
    let (ln_ppl_ratio, ln_ppl_ratio_se) = stats::mean_and_se(ratio);
    Comparison {
        kld: KldStats {
            mean: stats::mean(pairs.iter().map(|p| p.kld)),
            median: stats::quantile(&klds, 0.5),
            p90: stats::quantile(&klds, 0.9),
            p99: stats::quantile(&klds, 0.99),
            p999: stats::quantile(&klds, 0.999),
            max: stats::quantile(&klds, 1.0),
        },
        same_top1: agree.count() as f64 / pairs.len() as f64,
        rms_dp: stats::mean(dp).sqrt(),
        ppl_ref: stats::mean(pairs.iter().map(|p| p.reference_nll)).exp(),
        ln_ppl_ratio,
        ln_ppl_ratio_se,
    }
}
