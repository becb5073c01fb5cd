//! What rounding each group of weights costs, measured: the KL divergence of the model with
//! that group alone rounded from the model as it is.
//!
//! All variants run side by side through one pass over the layers: a group's variant branches
//! off the source's stream at its layer and goes on through the layers after it, unrounded.
//! So each layer is read once, half of the work of whole runs falls away, and no more than one
//! layer is held. Each group is rounded to one scheme, the probe; the cost of its other
//! schemes is in proportion to their output errors, `sum(E[x_j^2] (w_ij - q_ij)^2)`, since a
//! divergence is quadratic in small changes.
//!
//! The probe is rounded to nearest, and alone; a run rounds by its method, and all layers
//! together. So losses are scaled by what the method leaves of the probe's output error,
//! `tr(E H E^T)` on some of its rows, and those of layers also by what rounding all of them
//! costs against the sum over the groups alone. The method goes by the calibration text, as it
//! will, and its error is taken on the text to measure on: on its own text it would look better
//! than it is.

use crate::allocation::{Candidate, Menu, Place, WeightGroup};
use crate::error::Result;
use crate::fit::Fit;
use crate::grid::{Grid, Rounded};
use crate::layers::{self, Pass, head_inputs};
use crate::linalg::{InputStats, Matrix, read_row};
use crate::methods::{Method, Needs, Problem, rtn};
use crate::pipeline::LOOKED_UP;
use crate::stepper::Stepper;
use nq_evals::kld_rows;
use nq_formats::{
    AffineScheme, Bits, Group, ModelConfig, Progress, Unit, Weight, WeightStore, Zeros,
};
use nq_runtime::models::qwen3::{self, EMBEDDING, FINAL_NORM, HEAD};
use nq_runtime::{Hidden, LayerWeights, LinearId, LinearKind};
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
    /// What layers will be rounded by.
    pub method: &'a dyn Method,
    /// Text that it will go by; none if it needs nothing to go by.
    pub calibration: Option<&'a [Vec<u32>]>,
    /// Told of rows that went through a layer.
    pub progress: &'a dyn Progress,
}

/// What is known of a group: the probe's divergence, output errors of the probe and of each
/// candidate, and those of the probe's scheme rounded to nearest and by the method.
#[derive(Clone, Debug, Default)]
struct Found {
    kld: f64,
    probe: f64,
    candidates: Vec<f64>,
    nearest: f64,
    by_method: f64,
    layers: bool,
}

impl Found {
    /// The divergence of candidate errors' unit, in a run: `together` is what rounding all
    /// layers at once makes of their sum.
    fn unit(&self, together: f64) -> f64 {
        let method = match self.nearest > 0.0 {
            true => self.by_method / self.nearest,
            false => 1.0,
        };
        let together = if self.layers { together } else { 1.0 };
        self.kld.max(0.0) * method * together / self.probe.max(f64::MIN_POSITIVE)
    }
}

/// A stream that runs along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// Nothing rounded: what the others are held against.
    Source,
    /// One group rounded.
    Group(usize),
    /// All layers rounded.
    Layers,
}

impl Probe<'_> {
    /// Rows that the progress will count.
    fn work(&self, layers: usize) -> u64 {
        let tokens: usize = self.text.iter().map(Vec::len).sum();
        let per_layer = LinearKind::INPUTS.len();
        let begin = 3; // the source, the embedding's variant and that of all layers
        // Each layer runs what branched off before it, then its own groups.
        let runs: usize = (0..layers).map(|l| begin + per_layer * l + per_layer).sum();
        let calibration = self.calibration.unwrap_or_default();
        let calibration: usize = calibration.iter().map(Vec::len).sum();
        (tokens * runs + calibration * layers) as u64
    }

    /// Measures every group. Candidates whose groups do not fill a weight's rows are left out.
    ///
    /// # Errors
    /// What reading and running the model report; logits that are no numbers.
    pub fn menus(&self, stepper: &mut Stepper) -> Result<Vec<Menu>> {
        let config = stepper.as_mut().config().clone();
        let layers = config.num_hidden_layers;
        self.progress
            .begin("measuring sensitivity", self.work(layers), Unit::Tokens);
        let run = self.run(stepper, &config);
        self.progress.end();
        let (found, together) = run?;
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
                    loss: found.unit(together) * error,
                })
                .collect(),
        };
        Ok(self.groups.iter().zip(found).map(menu).collect())
    }

    /// What is known of every group, and what rounding all layers together costs as a share
    /// of the sum over their groups.
    fn run(&self, stepper: &mut Stepper, config: &ModelConfig) -> Result<(Vec<Found>, f64)> {
        let grid = Grid::new(PROBE)?;
        let embedding = qwen3::embedding(self.store, config)?;
        let mut found = vec![Found::default(); self.groups.len()];
        // What runs along; the source itself comes first.
        let mut variants = vec![Variant::Source];
        let mut stream = Hidden::embed(&embedding, self.text)?;
        let lengths = stream.lengths.clone();
        let rows = stream.data.len();
        // Growing would hold all streams twice.
        stream.data.reserve_exact(rows * (self.groups.len() + 1));
        let mut together = Hidden {
            data: stream.data.clone(),
            lengths: lengths.clone(),
        };
        let mut calibration = match self.calibration {
            Some(text) => Some(Hidden::embed(&embedding, text)?),
            None => None,
        };
        for (g, group) in self.groups.iter().enumerate() {
            if group.place == Place::Embedding {
                let (rounded, _) = rtn::round_rows(EMBEDDING, &embedding, grid, Fit::clip(), &[])?;
                let variant = Hidden::embed(&rounded, self.text)?;
                join(&mut stream, variant);
                variants.push(Variant::Group(g));
            }
        }
        for index in 0..config.num_hidden_layers {
            let source = LayerWeights::read(self.store, config, index)?;
            let before = Hidden {
                data: stream.data[..rows].to_vec(),
                lengths: lengths.clone(),
            };
            // Before the other statistics are gathered: a device holds one set of them.
            let tried = match &mut calibration {
                Some(text) => {
                    let tried = self.by_method(stepper, index, &source, text)?;
                    self.layer(stepper, index, &source, text)?;
                    Some(tried)
                }
                None => None,
            };
            let needs = self.method.needs().max(Needs::Squares);
            let stats = layers::gather(stepper, index, &source, &before, needs, &())?;
            self.layer(stepper, index, &source, &mut stream)?;
            let mut all = source.clone();
            for (g, group) in self.groups.iter().enumerate() {
                let Place::Layer { index: at, input } = group.place else {
                    continue;
                };
                if at != index {
                    continue;
                }
                found[g].layers = true;
                let stats = &stats[input];
                let mut rounded = source.clone();
                for (i, &kind) in LinearKind::INPUTS[input].iter().enumerate() {
                    let (weight, name) = (source.linear(kind), &group.weights[i].0);
                    let fit = Fit::clip();
                    let (w, _) = rtn::round_rows(name, weight, grid, fit, &stats.mean_square)?;
                    rounded.linears[kind as usize] = w.clone();
                    all.linears[kind as usize] = w;
                    let rows = sample(name, weight)?;
                    self.add_errors(&mut found[g], weight, &rows, &stats.mean_square)?;
                    if let (0, Some(tried)) = (i, &tried) {
                        self.add_method(&mut found[g], &rows, &tried[input], stats)?;
                    }
                }
                let mut variant = before.clone();
                self.layer(stepper, index, &rounded, &mut variant)?;
                join(&mut stream, variant);
                variants.push(Variant::Group(g));
            }
            self.layer(stepper, index, &all, &mut together)?;
            source.linears.iter().for_each(Weight::release);
        }
        join(&mut stream, together);
        variants.push(Variant::Layers);
        let together = self.heads(
            stepper,
            &embedding,
            &stream,
            &variants,
            calibration.as_ref(),
            &mut found,
        )?;
        Ok((found, together))
    }

    fn layer(
        &self,
        stepper: &mut Stepper,
        index: usize,
        weights: &LayerWeights,
        stream: &mut Hidden,
    ) -> Result<()> {
        let mut pass = Pass {
            width: stepper.as_mut().config().hidden_size,
            progress: self.progress,
        };
        Ok(stepper.as_mut().layer(index, weights, stream, &mut pass)?)
    }

    /// The divergence of every variant, and that of the head, from the final streams. Returns
    /// that of all layers as a share of the sum over their groups.
    fn heads(
        &self,
        stepper: &mut Stepper,
        embedding: &Weight,
        stream: &Hidden,
        variants: &[Variant],
        calibration: Option<&Hidden>,
        found: &mut [Found],
    ) -> Result<f64> {
        let config = stepper.as_mut().config().clone();
        let norm = self.store.vector(FINAL_NORM, config.hidden_size)?;
        let tied = config.tie_word_embeddings;
        let head = if tied {
            embedding.clone()
        } else {
            qwen3::head(self.store, &config)?
        };
        let inputs = |x: &[f32]| -> Result<InputStats> {
            let (norm, eps) = (norm.to_f32()?, config.rms_norm_eps);
            let looked_up = if tied { LOOKED_UP } else { 0.0 };
            Ok(head_inputs(x, &norm, eps, self.method.needs(), looked_up))
        };
        let stats = inputs(&stream.data[..stream.data.len() / variants.len()])?;

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
        stepper
            .as_mut()
            .heads(&norm, &head, stream, &ranges, &mut |i, logits| {
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
        let (mut apart, mut together) = (0f64, 0f64);
        for (variant, sum) in variants.iter().zip(&sums) {
            let kld = sum.0 / sum.1.max(1) as f64;
            match *variant {
                Variant::Source => {}
                Variant::Layers => together = kld,
                Variant::Group(g) => {
                    found[g].kld += kld;
                    if matches!(self.groups[g].place, Place::Layer { .. }) {
                        apart += kld;
                    }
                }
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
            let importance = &stats.mean_square;
            let (rounded, _) = rtn::round_rows(name, &head, grid, Fit::clip(), importance)?;
            let logits = stepper
                .as_mut()
                .head(&norm, &rounded, stream, tile.clone())?;
            let rows = kld_rows(&logits, &first, vocab)?;
            found[g].kld += rows.iter().sum::<f64>() / rows.len().max(1) as f64;
            let rows = sample(name, &head)?;
            self.add_errors(&mut found[g], &head, &rows, importance)?;
            if let Some(text) = calibration {
                let tried = self.round(name, &rows, &inputs(&text.data)?)?;
                self.add_method(&mut found[g], &rows, &tried, &stats)?;
            }
        }
        if !tied && let Some(g) = self.groups.iter().position(|g| g.place == Place::Embedding) {
            let rows = sample(EMBEDDING, embedding)?;
            self.add_errors(&mut found[g], embedding, &rows, &[])?;
        }
        embedding.release();
        head.release();
        let share = together / apart;
        // Layers that cost nothing say nothing of each other.
        Ok(if share.is_finite() && share > 0.0 {
            share
        } else {
            1.0
        })
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

    /// Adds what `weight` errs by under the probe and every candidate, of which `rows` are a
    /// sample.
    fn add_errors(
        &self,
        found: &mut Found,
        weight: &Weight,
        rows: &Matrix,
        importance: &[f32],
    ) -> Result<()> {
        let scale = weight.dims().0 as f64 / rows.rows.max(1) as f64;
        let error = |scheme: AffineScheme| -> Result<f64> {
            let rounded = rtn::round(rows, Grid::new(scheme)?, Fit::clip(), importance);
            Ok(scale * weighted(&rounded.change(rows), importance))
        };
        found.probe += error(PROBE)?;
        found.candidates.resize(self.candidates.len(), 0.0);
        for (sum, &scheme) in found.candidates.iter_mut().zip(self.candidates) {
            *sum += error(scheme)?;
        }
        Ok(())
    }

    /// What the method makes of rows of a layer's weights in the probe's scheme, going by the
    /// layer's inputs on `text`: one of the weights that share an input stands for them.
    fn by_method(
        &self,
        stepper: &mut Stepper,
        index: usize,
        source: &LayerWeights,
        text: &Hidden,
    ) -> Result<Vec<Rounded>> {
        let needs = self.method.needs();
        let known = layers::gather(stepper, index, source, text, needs, &())?;
        let round = |(kinds, known): (&&[LinearKind], &InputStats)| {
            let kind = kinds[0];
            let name = LinearId { layer: index, kind }.to_string();
            self.round(&name, &sample(&name, source.linear(kind))?, known)
        };
        LinearKind::INPUTS.iter().zip(&known).map(round).collect()
    }

    /// `rows` in the probe's scheme, by the method that goes by `known`.
    fn round(&self, name: &str, rows: &Matrix, known: &InputStats) -> Result<Rounded> {
        let problem = Problem {
            name,
            weight: rows,
            inputs: Some(known),
            grid: Grid::new(PROBE)?,
        };
        Ok(self.method.round(&problem)?.rounded)
    }

    /// Adds the output errors of `rows` of a weight in the probe's scheme, on inputs of which
    /// `stats` are known: rounded to nearest, and as `tried` by the method.
    fn add_method(
        &self,
        found: &mut Found,
        rows: &Matrix,
        tried: &Rounded,
        stats: &InputStats,
    ) -> Result<()> {
        let output = |rounded: &Rounded| match &stats.hessian {
            Some(h) => h.quadratic_error(&rounded.change(rows)),
            None => Ok(weighted(&rounded.change(rows), &stats.mean_square)),
        };
        let nearest = rtn::round(rows, tried.grid, Fit::clip(), &stats.mean_square);
        found.nearest += output(&nearest)?;
        found.by_method += output(tried)?;
        Ok(())
    }
}

/// Rows of the weight `name`, evenly spread, [`SAMPLE`] at most.
fn sample(name: &str, weight: &Weight) -> Result<Matrix> {
    let (out, cols) = weight.dims();
    let n = out.min(SAMPLE);
    let mut rows = Matrix::zeros(n, cols);
    for i in 0..n {
        read_row(name, weight, i * out / n, rows.row_mut(i))?;
    }
    Ok(rows)
}

/// `sum(h_j e_ij^2)`; an empty `h` counts as ones.
fn weighted(e: &Matrix, h: &[f32]) -> f64 {
    let of_row = |row: &[f32]| -> f64 {
        let h = h.iter().copied().chain(std::iter::repeat(1.0));
        let terms = row.iter().zip(h);
        terms
            .map(|(&e, h)| f64::from(h) * f64::from(e).powi(2))
            .sum()
    };
    e.iter_rows().map(of_row).sum()
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
    let streams = (groups + 5) * stream; // with the source's own, all layers' and copies
    // The reference's logits, those of its first tile and a variant's.
    let logits = 3 * LOGITS.min(4 * config.vocab_size * length.div_ceil(2));
    let head = logits + 2 * config.vocab_size * config.hidden_size;
    streams + head
}
