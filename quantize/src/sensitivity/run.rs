//! A measurement in progress: the streams of all variants, taken from layer to layer.

use super::errors::{Found, SAMPLE, sample, sample_of};
use super::probe::{LOGITS, PROBE, Probe};
use crate::error::Result;
use crate::fit::Fit;
use crate::grid::{Grid, Rounded};
use crate::groups::{GroupPlace, WeightGroup};
use crate::layers::{self, LOOKED_UP, RowProgress, head_inputs};
use crate::linalg::Matrix;
use crate::methods::{Needs, Problem, rtn};
use crate::second_order::InputStats;
use nq_evals::kld_rows;
use nq_formats::Weight;
use nq_model::names::{EMBEDDING, HEAD};
use nq_model::{ModelConfig, Product};
use nq_runtime::models::{self, Ending};
use nq_runtime::{Hidden, LayerStepper, LayerWeights};
use std::ops::Range;

/// A variant of the model, which has a stream of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    /// Nothing rounded: the reference of all others.
    Source,
    /// One group rounded.
    Group(usize),
    /// All layers rounded.
    Layers,
}

/// A measurement in progress.
pub(super) struct SensitivityRun<'r> {
    probe: &'r Probe<'r>,
    stepper: &'r mut dyn LayerStepper,
    config: &'r ModelConfig,
    grid: Grid,
    /// The streams of `variants`, the source's first.
    stream: Hidden,
    variants: Vec<Variant>,
    /// The stream with every layer rounded; becomes the last variant at the end.
    rounded: Hidden,
    calibration: Option<Hidden>,
    found: Vec<Found>,
}

/// The final norm and the head.
struct ModelEnd {
    ending: Ending,
    head: Weight,
    /// The head's group and name, if it is measured.
    group: Option<(usize, &'static str)>,
}

impl<'r> SensitivityRun<'r> {
    /// Streams of the embedded text, with the embedding rounded and unrounded.
    pub(super) fn new(
        probe: &'r Probe<'r>,
        stepper: &'r mut dyn LayerStepper,
        config: &'r ModelConfig,
        embedding: &Weight,
    ) -> Result<Self> {
        let grid = Grid::new(PROBE)?;
        let streams = config.streams();
        let mut stream = Hidden::embed(embedding, probe.text, streams)?;
        let rounded = stream.clone();
        let calibration = match probe.calibration {
            Some(text) => Some(Hidden::embed(embedding, text, streams)?),
            None => None,
        };
        let mut variants = vec![Variant::Source];
        // Reserved at once, as growing would hold all streams twice.
        (stream.data).reserve_exact(stream.data.len() * (probe.groups.len() + 1));
        if let Some(g) = group_at(probe.groups, GroupPlace::Embedding) {
            let (weight, _) = rtn::round_rows(EMBEDDING, embedding, grid, Fit::clip(), &[])?;
            join(&mut stream, Hidden::embed(&weight, probe.text, streams)?);
            variants.push(Variant::Group(g));
        }
        Ok(SensitivityRun {
            probe,
            stepper,
            config,
            grid,
            stream,
            variants,
            rounded,
            calibration,
            found: vec![Found::default(); probe.groups.len()],
        })
    }

    /// Takes all streams through a layer; each of its groups begins a new one.
    pub(super) fn layer(&mut self, index: usize) -> Result<()> {
        let source = LayerWeights::read(self.probe.store, self.config, index)?;
        let before = Hidden {
            data: self.source_stream().to_vec(),
            lengths: self.probe.text.iter().map(Vec::len).collect(),
            tokens: self.probe.text.concat(),
            images: Vec::new(),
        };
        // Done before the other statistics are gathered: a device holds only one set of them.
        let tried = self.try_method(index, &source)?;
        let needs = self.probe.method.needs().max(Needs::Squares);
        let (stats, _) = layers::gather(self.stepper, index, &source, &before, needs, &())?;
        pass(self.stepper, self.probe, index, &source, &mut self.stream)?;
        let mut all = source.clone();
        for (product, linears) in source.spec.products().into_iter().enumerate() {
            let Some(g) = group_at(self.probe.groups, GroupPlace::Layer { index, product }) else {
                continue;
            };
            let tried = tried.as_ref().map(|t| &t[product]);
            let weights = self.round_group(g, &source, linears, &stats[product], tried)?;
            for linear in linears.linears {
                let rounded = weights.linear(linear.kind).clone();
                all.linears.insert(linear.kind, rounded);
            }
            let mut variant = before.clone();
            pass(self.stepper, self.probe, index, &weights, &mut variant)?;
            join(&mut self.stream, variant);
            self.variants.push(Variant::Group(g));
        }
        pass(self.stepper, self.probe, index, &all, &mut self.rounded)?;
        source.linears.values().for_each(Weight::release);
        Ok(())
    }

    /// The source's own stream.
    fn source_stream(&self) -> &[f32] {
        &self.stream.data[..self.stream.data.len() / self.variants.len()]
    }

    /// The layer with group `g` rounded; `stats` are the inputs' statistics of its Linears, by
    /// expert if there are experts. Adds up the errors of rounding.
    fn round_group(
        &mut self,
        g: usize,
        source: &LayerWeights,
        product: &Product,
        stats: &[InputStats],
        tried: Option<&Rounded>,
    ) -> Result<LayerWeights> {
        let found = &mut self.found[g];
        found.in_layer = true;
        let (mut weights, all) = (source.clone(), stats.len());
        for (i, linear) in product.linears.iter().enumerate() {
            let kind = linear.kind;
            let (weight, name) = (source.linear(kind), &self.probe.groups[g].weights[i].0);
            let mut parts = Vec::new();
            for (part, stats) in weight.unstack(stats.len()).zip(stats) {
                let importance = &stats.mean_square;
                let rounded = rtn::round_rows(name, &part, self.grid, Fit::clip(), importance)?;
                parts.push(rounded.0);
                let rows = sample_of(name, &part, SAMPLE.div_ceil(all))?;
                found.add_weight(&part, &rows, importance, self.probe.candidates)?;
            }
            weights.linears.insert(kind, Weight::stack(&parts)?);
            if let (0, Some(tried)) = (i, tried) {
                let first = weight.rows(0..weight.dims().rows / all);
                found.add_method(&sample(name, &first)?, tried, &stats[0])?;
            }
        }
        Ok(weights)
    }

    /// Rounds rows of a layer's weights by the method, in the probe's scheme, with the inputs'
    /// statistics on the calibration text. One of the weights that share an input represents all of
    /// them, and the first expert represents all experts. Takes that text through the layer.
    fn try_method(&mut self, index: usize, source: &LayerWeights) -> Result<Option<Vec<Rounded>>> {
        let Some(text) = &mut self.calibration else {
            return Ok(None);
        };
        let needs = self.probe.method.needs();
        let (known, _) = layers::gather(self.stepper, index, source, text, needs, &())?;
        pass(self.stepper, self.probe, index, source, text)?;
        let round = |(product, known): (&Product, &Vec<InputStats>)| {
            let linear = &product.linears[0];
            let (name, weight) = (linear.name(index), source.linear(linear.kind));
            let first = weight.rows(0..weight.dims().rows / known.len());
            by_method(self.probe, &name, &sample(&name, &first)?, &known[0])
        };
        let products = source.spec.products().into_iter();
        let tried: Result<Vec<Rounded>> = products.zip(&known).map(round).collect();
        Ok(Some(tried?))
    }

    /// Measurements of every group, and the ratio of the cost of rounding all layers together to
    /// the sum over their groups.
    pub(super) fn finish(mut self, embedding: &Weight) -> Result<(Vec<Found>, f64)> {
        let rounded = std::mem::take(&mut self.rounded);
        join(&mut self.stream, rounded);
        self.variants.push(Variant::Layers);
        let end = self.end(embedding)?;
        let (together, first) = self.score(&end)?;
        self.score_head(&end, &first)?;
        let place = group_at(self.probe.groups, GroupPlace::Embedding);
        if let (Some(g), false) = (place, self.config.tie_word_embeddings) {
            let rows = sample(EMBEDDING, embedding)?;
            self.found[g].add_weight(embedding, &rows, &[], self.probe.candidates)?;
        }
        end.head.release();
        let apart: f64 = (self.found.iter().filter(|f| f.in_layer))
            .map(|f| f.kld)
            .sum();
        let share = together / apart;
        // If no layer costs anything, the ratio is meaningless.
        let sane = share.is_finite() && share > 0.0;
        Ok((self.found, if sane { share } else { 1.0 }))
    }

    fn end(&self, embedding: &Weight) -> Result<ModelEnd> {
        let (store, groups) = (self.probe.store, self.probe.groups);
        let ending = Ending::read(store, self.config)?;
        Ok(if self.config.tie_word_embeddings {
            ModelEnd {
                ending,
                head: embedding.clone(),
                group: group_at(groups, GroupPlace::Embedding).map(|g| (g, EMBEDDING)),
            }
        } else {
            ModelEnd {
                ending,
                head: models::head(store, self.config)?,
                group: group_at(groups, GroupPlace::Head).map(|g| (g, HEAD)),
            }
        })
    }

    /// Records the divergence of every group's stream. Returns that of all layers together, and the
    /// source's logits on the first tile.
    fn score(&mut self, end: &ModelEnd) -> Result<(f64, Vec<f32>)> {
        let (vocab, variants) = (self.config.vocab_size, self.variants.len());
        let (tiles, h) = (self.tiles(), self.config.stream_width());
        let most = tiles.iter().map(Range::len).max().unwrap_or(0);
        let mut head = self.stepper.open_head(&end.ending, &end.head, most)?;
        let mut sums = vec![(0f64, 0usize); variants];
        let mut first = Vec::new();
        for tile in tiles {
            let mut reference = Vec::new();
            let streams = self.stream.data.chunks(self.stream.data.len() / variants);
            for (stream, sum) in streams.zip(&mut sums) {
                let logits = head.logits(&stream[tile.start * h..tile.end * h])?;
                if reference.is_empty() {
                    reference = logits.to_vec(); // the source's stream is the first
                    continue;
                }
                let rows = kld_rows(logits, &reference, vocab)?;
                sum.0 += rows.iter().sum::<f64>();
                sum.1 += rows.len();
            }
            if first.is_empty() {
                first = reference;
            }
        }
        let mut together = 0.0;
        for (variant, sum) in self.variants.iter().zip(&sums) {
            let kld = sum.0 / sum.1.max(1) as f64;
            match *variant {
                Variant::Source => {}
                Variant::Layers => together = kld,
                Variant::Group(g) => self.found[g].kld += kld,
            }
        }
        Ok((together, first))
    }

    /// Records the cost of rounding the head, over the first tile of the source's stream, which is
    /// enough; `first` are its unrounded logits.
    fn score_head(&mut self, end: &ModelEnd, first: &[f32]) -> Result<()> {
        let (Some((g, name)), Some(tile)) = (end.group, self.tiles().into_iter().next()) else {
            return Ok(());
        };
        let stats = self.head_inputs(end, self.source_stream())?;
        let importance = &stats.mean_square;
        let (rounded, _) = rtn::round_rows(name, &end.head, self.grid, Fit::clip(), importance)?;
        let logits = (self.stepper).head(&end.ending, &rounded, &self.stream, tile)?;
        let divergences = kld_rows(&logits, first, self.config.vocab_size)?;
        let rows = sample(name, &end.head)?;
        let tried = match &self.calibration {
            Some(text) => {
                let known = self.head_inputs(end, &text.data)?;
                Some(by_method(self.probe, name, &rows, &known)?)
            }
            None => None,
        };
        let found = &mut self.found[g];
        found.kld += divergences.iter().sum::<f64>() / divergences.len().max(1) as f64;
        found.add_weight(&end.head, &rows, importance, self.probe.candidates)?;
        match tried {
            Some(tried) => found.add_method(&rows, &tried, &stats),
            None => Ok(()),
        }
    }

    fn head_inputs(&self, end: &ModelEnd, x: &[f32]) -> Result<InputStats> {
        let looked_up = if self.config.tie_word_embeddings {
            LOOKED_UP
        } else {
            0.0
        };
        let needs = self.probe.method.needs();
        head_inputs(self.config, &end.ending, x, needs, looked_up)
    }

    /// Rows of the source's stream that are scored, the second half of each window, cut into tiles
    /// whose logits fit `LOGITS`.
    fn tiles(&self) -> Vec<Range<usize>> {
        let most = (LOGITS / (4 * self.config.vocab_size)).max(1);
        let mut tiles = Vec::new();
        let mut start = 0;
        for sequence in self.probe.text {
            let scored = start + sequence.len() / 2..start + sequence.len();
            for at in scored.clone().step_by(most) {
                tiles.push(at..(at + most).min(scored.end));
            }
            start += sequence.len();
        }
        tiles
    }
}

/// Index in the list of the group at this place.
fn group_at(groups: &[WeightGroup], place: GroupPlace) -> Option<usize> {
    groups.iter().position(|g| g.place == place)
}

/// Runs a layer over `stream`, in place.
fn pass(
    stepper: &mut dyn LayerStepper,
    probe: &Probe<'_>,
    index: usize,
    weights: &LayerWeights,
    stream: &mut Hidden,
) -> Result<()> {
    let mut observer = RowProgress {
        width: stepper.config().stream_width(),
        progress: probe.progress,
    };
    Ok(stepper.layer(index, weights, stream, &mut observer)?)
}

/// Rounds `rows` of a weight to the probe's scheme by the method, given statistics `known`.
fn by_method(probe: &Probe<'_>, name: &str, rows: &Matrix, known: &InputStats) -> Result<Rounded> {
    let problem = Problem {
        name,
        weight: rows,
        inputs: Some(known),
        grid: Grid::new(PROBE)?,
    };
    Ok(probe.method.round(&problem)?.rounded)
}

/// Appends the sequences of `more`.
fn join(stream: &mut Hidden, more: Hidden) {
    stream.data.extend_from_slice(&more.data);
    stream.lengths.extend_from_slice(&more.lengths);
    stream.tokens.extend_from_slice(&more.tokens);
}
