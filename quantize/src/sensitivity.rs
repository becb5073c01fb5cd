//! What rounding each group of weights costs, measured: the KL divergence of the model with
//! that group alone rounded from the model as it is.
//!
//! All variants run side by side through one pass over the layers: a group's variant branches
//! off the source's stream at its layer and goes on through the layers after it, unrounded.
//! So each layer is read once, half of the work of whole runs falls away, and no more than one
//! layer is held. Each group is rounded to one scheme, the probe; the cost of its other
//! schemes is in proportion to their output errors, `sum(E[x_j^2] (w_ij - q_ij)^2)`, since a
//! divergence is quadratic in small changes.

use crate::allocation::{Candidate, Menu, Place, WeightGroup};
use crate::error::Result;
use crate::fit::Fit;
use crate::grid::Grid;
use crate::layers::{Gather, Pass};
use crate::linalg::{Moments, read_row};
use crate::methods::{Needs, rtn};
use nq_evals::kld_rows;
use nq_formats::{
    AffineScheme, Bits, Group, ModelConfig, Progress, Unit, Weight, WeightStore, Zeros,
};
use nq_kernels::reference;
use nq_runtime::models::qwen3::{self, EMBEDDING, FINAL_NORM, HEAD};
use nq_runtime::{Hidden, LayerStepper, LayerWeights, LinearKind};
use std::ops::Range;

/// What groups are rounded to, to see what it costs.
const PROBE: AffineScheme = AffineScheme {
    bits: Bits::B4,
    group: Group::Size(32),
    zeros: Zeros::Integer,
};

/// Rows of a weight that its output errors are sampled on, at most.
const SAMPLE: usize = 256;

/// Tokens of a window, at most. The second half is scored.
const WINDOW: usize = 256;

/// Multiplications that a measurement may take: the forwards of all variants.
const WORK: u64 = 40_000_000_000_000;

/// Bytes of logits that are held at once.
const LOGITS: usize = 64 << 20;

/// (number, length) of the windows to measure on: of `tokens` in all, if `WORK` allows as
/// many, and from 2 to 16.
pub fn shape(config: &ModelConfig, groups: usize, tokens: usize) -> (usize, usize) {
    let length = WINDOW.min(config.max_position_embeddings);
    let window = config.parameters() as u64 / 2 * groups as u64 * length as u64;
    let n = (WORK / window.max(1)).min((tokens / length) as u64);
    let n = n.clamp(2, 16) as usize;
    (n, length)
}

/// A measurement to be made.
pub struct Probe<'a> {
    /// The source's weights.
    pub store: &'a dyn WeightStore,
    /// Sequences to measure on, all of one length.
    pub text: &'a [Vec<u32>],
    /// The groups, as [`crate::allocation::groups`] lists them.
    pub groups: &'a [WeightGroup],
    /// The schemes to choose from.
    pub candidates: &'a [AffineScheme],
    /// Told of rows that went through a layer.
    pub progress: &'a dyn Progress,
}

/// What is known of a group: the probe's divergence, and output errors of the probe and of
/// each candidate.
#[derive(Clone, Debug, Default)]
struct Found {
    kld: f64,
    probe: f64,
    candidates: Vec<f64>,
}

impl Probe<'_> {
    /// Rows that the progress will count.
    fn work(&self, layers: usize) -> u64 {
        let tokens: usize = self.text.iter().map(Vec::len).sum();
        let per_layer = LinearKind::INPUTS.len();
        let begin = 2; // the source and the embedding's variant
        // Each layer runs what branched off before it, then its own groups.
        let runs: usize = (0..layers).map(|l| begin + per_layer * l + per_layer).sum();
        (tokens * runs) as u64
    }

    /// Measures every group. Candidates whose groups do not fill a weight's rows are left out.
    ///
    /// # Errors
    /// What reading and running the model report; logits that are no numbers.
    pub fn menus(&self, stepper: &mut dyn LayerStepper) -> Result<Vec<Menu>> {
        let config = stepper.config().clone();
        let layers = config.num_hidden_layers;
        self.progress
            .begin("measuring sensitivity", self.work(layers), Unit::Tokens);
        let found = self.run(stepper, &config);
        self.progress.end();
        let menu = |(group, found): (&WeightGroup, Found)| Menu {
            group: group.name.clone(),
            weights: group.weights.iter().map(|w| w.0.clone()).collect(),
            candidates: self
                .candidates
                .iter()
                .zip(&found.candidates)
                .filter(|(scheme, _)| group.fits(**scheme))
                .map(|(&scheme, error)| Candidate {
                    scheme,
                    bytes: group.bytes(scheme),
                    loss: found.kld.max(0.0) * error / found.probe.max(f64::MIN_POSITIVE),
                })
                .collect(),
        };
        Ok(self.groups.iter().zip(found?).map(menu).collect())
    }

    fn run(&self, stepper: &mut dyn LayerStepper, config: &ModelConfig) -> Result<Vec<Found>> {
        let grid = Grid::new(PROBE)?;
        let embedding = qwen3::embedding(self.store, config)?;
        let mut found = vec![Found::default(); self.groups.len()];
        // The group of each variant that runs along; the source itself comes first.
        let mut variants: Vec<Option<usize>> = vec![None];
        let mut stream = Hidden::embed(&embedding, self.text)?;
        let lengths = stream.lengths.clone();
        let rows = stream.data.len();
        // Growing would hold all streams twice.
        stream.data.reserve_exact(rows * self.groups.len());
        for (g, group) in self.groups.iter().enumerate() {
            if group.place == Place::Embedding {
                let (rounded, _) = rtn::round_rows(EMBEDDING, &embedding, grid, Fit::clip(), &[])?;
                let variant = Hidden::embed(&rounded, self.text)?;
                join(&mut stream, variant);
                variants.push(Some(g));
            }
        }
        for index in 0..config.num_hidden_layers {
            let source = LayerWeights::read(self.store, config, index)?;
            let before = Hidden {
                data: stream.data[..rows].to_vec(),
                lengths: lengths.clone(),
            };
            let mut gather = Gather::new(config, Needs::Squares, &());
            stepper.observe(index, &source, &before, &mut gather)?;
            let stats = gather.finish();
            self.layer(stepper, index, &source, &mut stream)?;
            for (g, group) in self.groups.iter().enumerate() {
                let Place::Layer { index: at, input } = group.place else {
                    continue;
                };
                if at != index {
                    continue;
                }
                let importance = &stats[input].mean_square;
                let mut rounded = source.clone();
                for (kind, (name, _)) in LinearKind::INPUTS[input].iter().zip(&group.weights) {
                    let weight = source.linear(*kind);
                    let fit = Fit::clip();
                    let (w, _) = rtn::round_rows(name, weight, grid, fit, importance)?;
                    rounded.linears[*kind as usize] = w;
                    self.add_errors(&mut found[g], name, weight, importance)?;
                }
                let mut variant = before.clone();
                self.layer(stepper, index, &rounded, &mut variant)?;
                join(&mut stream, variant);
                variants.push(Some(g));
            }
            source.linears.iter().for_each(Weight::release);
        }
        self.heads(stepper, &embedding, &stream, &variants, &mut found)?;
        Ok(found)
    }

    fn layer(
        &self,
        stepper: &mut dyn LayerStepper,
        index: usize,
        weights: &LayerWeights,
        stream: &mut Hidden,
    ) -> Result<()> {
        let mut pass = Pass {
            width: stepper.config().hidden_size,
            progress: self.progress,
        };
        Ok(stepper.layer(index, weights, stream, &mut pass)?)
    }

    /// The divergence of every variant, and that of the head, from the final streams.
    fn heads(
        &self,
        stepper: &mut dyn LayerStepper,
        embedding: &Weight,
        stream: &Hidden,
        variants: &[Option<usize>],
        found: &mut [Found],
    ) -> Result<()> {
        let config = stepper.config().clone();
        let norm = self.store.vector(FINAL_NORM, config.hidden_size)?;
        let tied = config.tie_word_embeddings;
        let head = if tied {
            embedding.clone()
        } else {
            qwen3::head(self.store, &config)?
        };
        let importance = self.head_importance(stream, variants.len(), &norm.to_f32()?, &config);

        let tiles = self.tiles(config.vocab_size);
        let (vocab, tokens) = (config.vocab_size, stream.lengths.iter().sum::<usize>());
        let of_variant = |v: usize, tile: &Range<usize>| {
            let start = v * (tokens / variants.len());
            start + tile.start..start + tile.end
        };
        let ranges: Vec<Range<usize>> = tiles
            .iter()
            .flat_map(|tile| (0..variants.len()).map(move |v| of_variant(v, tile)))
            .collect();
        let mut sums = vec![(0f64, 0usize); variants.len()];
        let (mut reference, mut first, mut failed) = (Vec::new(), Vec::new(), Ok(()));
        stepper.heads(&norm, &head, stream, &ranges, &mut |i, logits| {
            let variant = i % variants.len();
            if variant == 0 {
                reference.clear();
                reference.extend_from_slice(logits);
                if i == 0 {
                    first.extend_from_slice(logits);
                }
                return;
            }
            match kld_rows(logits, &reference, vocab) {
                Ok(rows) => {
                    sums[variant].0 += rows.iter().sum::<f64>();
                    sums[variant].1 += rows.len();
                }
                Err(e) => failed = Err(e),
            }
        })?;
        failed?;
        for (variant, sum) in variants.iter().zip(&sums) {
            if let Some(g) = variant {
                found[*g].kld += sum.0 / sum.1.max(1) as f64;
            }
        }
        drop(reference);

        // The head rounded, over the source's stream: the first tile says enough of it.
        let (g, name) = match self.groups.iter().position(|g| g.place == Place::Head) {
            Some(g) => (Some(g), HEAD),
            None => {
                let place = self.groups.iter().position(|g| g.place == Place::Embedding);
                (place.filter(|_| tied), EMBEDDING)
            }
        };
        if let (Some(g), Some(tile)) = (g, tiles.first()) {
            let grid = Grid::new(PROBE)?;
            let (rounded, _) = rtn::round_rows(name, &head, grid, Fit::clip(), &importance)?;
            let logits = stepper.head(&norm, &rounded, stream, tile.clone())?;
            let rows = kld_rows(&logits, &first, vocab)?;
            found[g].kld += rows.iter().sum::<f64>() / rows.len().max(1) as f64;
            self.add_errors(&mut found[g], name, &head, &importance)?;
        }
        if !tied && let Some(g) = self.groups.iter().position(|g| g.place == Place::Embedding) {
            self.add_errors(&mut found[g], EMBEDDING, embedding, &[])?;
        }
        embedding.release();
        head.release();
        Ok(())
    }

    /// Rows of the source's stream that are scored, the second half of each window, cut so
    /// that a tile's logits fit `LOGITS`.
    fn tiles(&self, vocab: usize) -> Vec<Range<usize>> {
        let most = (LOGITS / (4 * vocab)).max(1);
        let mut tiles = Vec::new();
        let mut start = 0;
        for sequence in self.text {
            let scored = start + sequence.len() / 2..start + sequence.len();
            for at in scored.clone().step_by(most) {
                tiles.push(at..(at + most).min(scored.end));
            }
            start += sequence.len();
        }
        tiles
    }

    /// `E[x^2]` of the head's inputs in the source.
    fn head_importance(
        &self,
        stream: &Hidden,
        variants: usize,
        norm: &[f32],
        config: &ModelConfig,
    ) -> Vec<f32> {
        let h = config.hidden_size;
        let mut moments = Moments::new(h, false);
        let mut normed = vec![0.0; h];
        for x in stream.data[..stream.data.len() / variants].chunks_exact(h) {
            reference::rms_norm(x, norm, config.rms_norm_eps, &mut normed);
            moments.add(&normed);
        }
        moments.finish().mean_square
    }

    /// Adds what `weight` errs by under the probe and every candidate.
    fn add_errors(
        &self,
        found: &mut Found,
        name: &str,
        weight: &Weight,
        importance: &[f32],
    ) -> Result<()> {
        let (out, cols) = weight.dims();
        let n = out.min(SAMPLE);
        let mut rows = crate::linalg::Matrix::zeros(n, cols);
        for i in 0..n {
            read_row(name, weight, i * out / n, rows.row_mut(i))?;
        }
        let error = |scheme: AffineScheme| -> Result<f64> {
            let rounded = rtn::round(&rows, Grid::new(scheme)?, Fit::clip(), importance);
            let mut q = vec![0.0; cols];
            let mut sum = 0f64;
            for i in 0..n {
                rounded.dequantize_row(i, &mut q);
                for (j, (w, q)) in rows.row(i).iter().zip(&q).enumerate() {
                    let h = importance.get(j).copied().unwrap_or(1.0);
                    sum += f64::from(h) * f64::from(w - q).powi(2);
                }
            }
            Ok(sum * out as f64 / n as f64)
        };
        found.probe += error(PROBE)?;
        found.candidates.resize(self.candidates.len(), 0.0);
        for (sum, &scheme) in found.candidates.iter_mut().zip(self.candidates) {
            *sum += error(scheme)?;
        }
        Ok(())
    }
}

/// Appends the sequences of `more`.
fn join(stream: &mut Hidden, more: Hidden) {
    stream.data.extend_from_slice(&more.data);
    stream.lengths.extend_from_slice(&more.lengths);
}

/// Bytes of the streams of all variants, and of what the layers and the head take beside.
pub fn bytes(config: &ModelConfig, groups: usize, tokens: usize) -> usize {
    let (n, length) = shape(config, groups, tokens);
    let stream = 4 * n * length * config.hidden_size;
    let streams = (groups + 3) * stream; // with the source's own and a variant's copies
    // The reference's logits, those of its first tile and a variant's.
    let logits = 3 * LOGITS.min(4 * config.vocab_size * length.div_ceil(2));
    let head = logits + 2 * config.vocab_size * config.hidden_size;
    streams + head
}
