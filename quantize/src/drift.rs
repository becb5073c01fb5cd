//! Corrections for what the rounded layers before a Linear have changed in its inputs.
//!
//! A Linear is calibrated on the inputs `x` that the rounded layers make, but in the source it sees `x'`. What its
//! output lacks, `W (x' - x)`, can partly be told from `x` itself: with `D = E[(x' - x) x^T]` and `H = E[x x^T]`, the weight
//! `W (I + D H^-1)` comes closest to the source's output (GPTAQ, arXiv 2504.02692). Part of `D` is chance, so the
//! moments are damped more than for rounding, and only a share of the way is gone.

use crate::error::Result;
use crate::layers::{Gather, Hits};
use crate::linalg::{Matrix, inverse_factor, product};
use crate::methods::Needs;
use crate::second_order::LayerStats;
use nq_formats::Progress;
use nq_kernels::Routes;
use nq_kernels::matrix::{ProductTarget, Threads, View, multiply};
use nq_model::{ModelConfig, Product};
use nq_runtime::{Hidden, LayerStepper, LayerWeights, Observer};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// The share of the way to the best weight, and what is added to the diagonal of the moments, as a share of its mean: on
/// the demo model better than all of the way and than less or more damping (docs/lab/trellis.md).
pub(crate) const SHARE: f32 = 0.5;
const DAMPING: f64 = 0.2;

/// Most values of a layer's inputs in the source that are held at once.
const HELD: usize = 1 << 26;
/// Rows of a sum that a thread computes together.
const ROWS: usize = 128;

/// Tokens of sequences whose inputs in the source are held together.
fn held_tokens(config: &ModelConfig, layer: usize) -> usize {
    let products = config.layer(layer).products().into_iter();
    let each: usize = products.map(|p| p.inputs(config)).sum();
    (HELD / each.max(1)).max(1)
}

/// Bytes of a run beside those of rounding: the source's stream, and for the largest layer the sums, the corrections
/// and the inputs that are held.
pub(crate) fn bytes(config: &ModelConfig, tokens: usize) -> usize {
    let products = config.largest_layer().products().into_iter();
    let (squares, each) = products.fold((0, 0), |(squares, each), p| {
        let n = p.inputs(config);
        (squares + n * n, each + n)
    });
    let stream = tokens * config.stream_width();
    4 * (stream + 2 * squares + (tokens * each).min(HELD.max(each)))
}

/// The inputs of a layer's products in the source.
struct SourceInputs<'a> {
    products: &'a [&'static Product],
    inputs: Vec<Vec<f32>>, // of each product, [rows, in]
    width: usize,
    progress: &'a dyn Progress,
}

impl Observer for SourceInputs<'_> {
    fn linear_input(&mut self, _layer: usize, product: &Product, x: &[f32]) {
        if let Some(place) = self.products.iter().position(|&p| p == product) {
            self.inputs[place].extend_from_slice(x);
        }
    }

    fn layer_output(&mut self, _layer: usize, x: &[f32]) {
        self.progress.advance((x.len() / self.width) as u64);
    }
}

/// `(x' - x) x^T`, summed over rows.
struct Drift {
    n: usize,
    sum: Vec<f32>, // [n, n]
    rows: usize,
}

impl Drift {
    fn new(n: usize) -> Self {
        Drift {
            n,
            sum: vec![0.0; n * n],
            rows: 0,
        }
    }

    /// Adds rows of inputs, `[rows, n]` each: the source's, and these.
    fn add(&mut self, source: &[f32], x: &[f32]) {
        let (n, rows) = (self.n, x.len() / self.n);
        self.rows += rows;
        let change: Vec<f32> = source.iter().zip(x).map(|(s, x)| s - x).collect();
        let (change, x) = (View::new(&change, rows, n), View::new(x, rows, n));
        let pieces = self.sum.par_chunks_mut(ROWS * n).enumerate();
        pieces.for_each(|(i, sum)| {
            let (start, end) = (i * ROWS, i * ROWS + sum.len() / n);
            let left = change.part(0..rows, start..end).transposed();
            multiply(ProductTarget::new(sum, n), true, 1.0, left, x, Threads::One);
        });
    }

    /// [`SHARE`] of `D H^-1`, `[n, n]`; none if nothing has changed, or if the moments cannot be inverted, for which
    /// rounding goes without them too.
    fn correction(&self, moments: &Matrix) -> Option<Matrix> {
        let n = self.n;
        if self.sum.iter().all(|&v| v == 0.0) {
            return None;
        }
        let diagonal = moments.data.iter().step_by(n + 1);
        let mean = diagonal.map(|&v| f64::from(v)).sum::<f64>() / n as f64;
        let order: Vec<usize> = (0..n).collect();
        let u = inverse_factor(moments, &order, DAMPING * mean, 0.0)?;
        let mut left = Matrix::zeros(n, n); // D U^T
        let (d, of_u) = (View::new(&self.sum, n, n), View::new(&u.data, n, n));
        let share = SHARE / self.rows.max(1) as f32;
        let to = ProductTarget::new(&mut left.data, n);
        multiply(to, false, share, d, of_u.transposed(), Threads::All);
        let mut all = Matrix::zeros(n, n);
        let (left, to) = (
            View::new(&left.data, n, n),
            ProductTarget::new(&mut all.data, n),
        );
        multiply(to, false, 1.0, left, of_u, Threads::All);
        all.data.par_iter().all(|v| v.is_finite()).then_some(all)
    }
}

/// `weight` `[out, in]` corrected by `correction` `[in, in]`.
pub(crate) fn corrected(weight: &Matrix, correction: &Matrix) -> Matrix {
    let mut all = weight.clone();
    let n = weight.cols;
    (all.data.par_chunks_mut(ROWS * n).enumerate()).for_each(|(i, rows)| {
        let own = weight.part(i * ROWS..i * ROWS + rows.len() / n);
        let change = product(&own, correction);
        rows.iter_mut().zip(&change.data).for_each(|(w, c)| *w += c);
    });
    all
}

/// What a rounded layer's inputs are compared with.
struct Compared<'c, 'g> {
    gather: &'c mut Gather<'g>,
    source: &'c SourceInputs<'c>,
    drifts: &'c mut [Drift],
    at: Vec<usize>, // values of each product that were compared
}

impl Observer for Compared<'_, '_> {
    fn wants_output(&self) -> bool {
        false
    }

    fn linear_input(&mut self, layer: usize, product: &Product, x: &[f32]) {
        self.gather.linear_input(layer, product, x);
        let place = self.source.products.iter().position(|&p| p == product);
        if let Some(place) = place {
            let range = self.at[place]..self.at[place] + x.len();
            self.at[place] = range.end;
            self.drifts[place].add(&self.source.inputs[place][range], x);
        }
    }

    fn routed(&mut self, layer: usize, routes: &Routes) {
        self.gather.routed(layer, routes);
    }
}

/// The sequences `range` of `hidden`, of rows of `width` values, and the values of those.
fn part(hidden: &Hidden, range: Range<usize>, width: usize) -> (Hidden, Range<usize>) {
    let rows = |until: usize| hidden.lengths[..until].iter().sum::<usize>();
    let (start, end) = (rows(range.start), rows(range.end));
    let values = start * width..end * width;
    let images = hidden.images.get(range.clone()).unwrap_or_default();
    let part = Hidden {
        data: hidden.data[values.clone()].to_vec(),
        lengths: hidden.lengths[range].to_vec(),
        tokens: hidden.tokens[start..end].to_vec(),
        images: images.to_vec(),
    };
    (part, values)
}

/// Runs layer `index` as it is in the source over the source's stream `source`, and over `hidden`, which is not
/// changed. Gathers the statistics of the inputs of its products over `hidden`, with their corrections.
///
/// # Errors
/// Errors of the stepper, e.g. for activations that overflow.
pub(crate) fn gather(
    stepper: &mut dyn LayerStepper,
    index: usize,
    weights: &LayerWeights,
    streams: (&Hidden, &mut Hidden),
    progress: &dyn Progress,
) -> Result<(LayerStats, Hits)> {
    let (hidden, source) = streams;
    let config = stepper.config().clone();
    let (width, most) = (config.stream_width(), held_tokens(&config, index));
    let products = config.layer(index).products();
    let mut all = Gather::new(&config, index, Needs::Hessian, progress);
    let new = |p: &&Product| Drift::new(p.inputs(&config));
    let mut drifts: Vec<Drift> = products.iter().map(new).collect();
    let mut start = 0;
    while start < hidden.lengths.len() {
        let mut tokens = 0;
        let fits = hidden.lengths[start..].iter().take_while(|&&length| {
            tokens += length;
            tokens <= most
        });
        let range = start..start + fits.count().max(1);
        start = range.end;
        let mut held = SourceInputs {
            products: &products,
            inputs: vec![Vec::new(); products.len()],
            width,
            progress,
        };
        let (mut of_source, values) = part(source, range.clone(), width);
        stepper.layer(index, weights, &mut of_source, &mut held)?;
        source.data[values].copy_from_slice(&of_source.data);
        let mut compared = Compared {
            gather: &mut all,
            source: &held,
            drifts: &mut drifts,
            at: vec![0; products.len()],
        };
        let (part, _) = part(hidden, range, width);
        stepper.observe(index, weights, &part, &mut compared)?;
    }
    let (mut stats, hits) = all.finish();
    for (stats, drift) in stats.iter_mut().flatten().zip(&drifts) {
        let moments = stats.hessian.as_ref().and_then(|h| h.host());
        let correction = moments.and_then(|moments| drift.correction(moments));
        stats.correction = correction.map(Arc::new);
    }
    Ok((stats, hits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers;
    use crate::linalg::Moments;
    use nq_formats::Checkpoint;
    use nq_kernels::rng::Philox;
    use nq_runtime::{ActivationChoice, DeviceChoice, KvType, LoadOptions, models};
    use std::path::Path;

    fn gaussians(n: usize, seed: u64) -> Vec<f32> {
        let mut rng = Philox::new(seed, 0);
        (0..n).map(|_| rng.normal()).collect()
    }

    /// The mean square of `W' x' - W x`, `weight` being `W`, `of_source` `W'`, over rows of inputs.
    fn lost(of_source: &Matrix, source: &[f32], weight: &Matrix, x: &[f32]) -> f64 {
        let n = weight.cols;
        let rows = source.chunks_exact(n).zip(x.chunks_exact(n));
        let dot = |w: &[f32], x: &[f32]| -> f64 {
            let products = w.iter().zip(x);
            products.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
        };
        let of_row = |(s, x): (&[f32], &[f32])| -> f64 {
            let weights = of_source.iter_rows().zip(weight.iter_rows());
            weights
                .map(|(a, b)| (dot(a, s) - dot(b, x)).powi(2))
                .sum::<f64>()
        };
        rows.map(of_row).sum()
    }

    /// `C (H + d I) = share D`, and outputs are nearer to the source's, by what the share and the damping leave.
    #[test]
    fn corrections_follow_from_the_moments() {
        let (n, rows) = (96, 1500);
        let x = gaussians(n * rows, 1);
        // Inputs that rounding made smaller by a fifth, and chance.
        let chance = gaussians(n * rows, 2);
        let source: Vec<f32> = (x.iter().zip(&chance))
            .map(|(x, c)| 1.25 * x + 0.01 * c)
            .collect();
        let (mut drift, mut moments) = (Drift::new(n), Moments::new(n, true));
        // In two parts, as runs of sequences come.
        let half = n * rows / 2;
        for part in [0..half, half..n * rows] {
            drift.add(&source[part.clone()], &x[part.clone()]);
            moments.add(&x[part]);
        }
        let moments = moments.matrix();
        let found = drift.correction(&moments).unwrap();

        let diagonal = moments.data.iter().step_by(n + 1).sum::<f32>() / n as f32;
        let mut damped = moments.clone();
        let of_diagonal = damped.data.iter_mut().step_by(n + 1);
        of_diagonal.for_each(|v| *v += DAMPING as f32 * diagonal);
        let left = product(&found, &damped);
        for (i, (found, sum)) in left.data.iter().zip(&drift.sum).enumerate() {
            let expected = SHARE * sum / rows as f32;
            assert!((found - expected).abs() < 1e-4, "{i}: {found} {expected}");
        }

        let mut weight = Matrix::zeros(200, n);
        weight.data = gaussians(200 * n, 3);
        let better = corrected(&weight, &found);
        let before = lost(&weight, &source, &weight, &x);
        let after = lost(&weight, &source, &better, &x);
        let rest = (1.0 - f64::from(SHARE) / (1.0 + DAMPING)).powi(2);
        assert!((after / before - rest).abs() < 0.02, "{after} of {before}");
    }

    struct Inputs(Vec<f32>);

    impl Observer for Inputs {
        fn linear_input(&mut self, _layer: usize, product: &Product, x: &[f32]) {
            if product.linears.len() == 3 {
                self.0.extend_from_slice(x);
            }
        }
    }

    /// Statistics are those of the rounded stream, the source's stream goes on as in the source, and only where the two
    /// differ are weights corrected, which brings outputs nearer to the source's.
    #[test]
    fn the_source_runs_beside() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
        let checkpoint = Checkpoint::open(&root).unwrap();
        let (config, store) = (checkpoint.config(), checkpoint.store());
        let options = LoadOptions {
            device: DeviceChoice::Cpu,
            activations: ActivationChoice::F32,
            ..LoadOptions::default()
        };
        let mut stepper = nq_load::stepper(config, &options, KvType::F32, usize::MAX).unwrap();
        let stepper = stepper.as_mut();
        let weights = LayerWeights::read(store, config, 1).unwrap();
        let embedding = models::embedding(store, config).unwrap();
        let ids: Vec<u32> = (0..240).map(|i| (i * 37 + 11) % 4000).collect();
        let texts: Vec<Vec<u32>> = ids.chunks(48).map(<[u32]>::to_vec).collect();
        let embedded = Hidden::embed(&embedding, &texts, 1).unwrap();
        let mut after = embedded.clone();
        stepper.layer(1, &weights, &mut after, &mut ()).unwrap();

        let mut source = embedded.clone();
        let streams = (&embedded, &mut source);
        let (same, _) = gather(stepper, 1, &weights, streams, &()).unwrap();
        assert!(same.iter().flatten().all(|s| s.correction.is_none()));
        let far = |a: &[f32], b: &[f32]| {
            let pairs = a.iter().zip(b);
            pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
        };
        assert!(far(&source.data, &after.data) < 1e-5);

        let mut changed = embedded.clone();
        let chance = gaussians(changed.data.len(), 5);
        let size = embedded.data.iter().map(|v| v.abs()).sum::<f32>() / chance.len() as f32;
        let values = changed.data.iter_mut().zip(&chance);
        values.for_each(|(v, c)| *v += 0.3 * size * c);
        let mut source = embedded.clone();
        let streams = (&changed, &mut source);
        let (stats, _) = gather(stepper, 1, &weights, streams, &()).unwrap();
        assert!(far(&source.data, &after.data) < 1e-5);
        let needs = Needs::Hessian;
        let (alone, _) = layers::gather(stepper, 1, &weights, &changed, needs, &()).unwrap();
        for (a, b) in stats.iter().flatten().zip(alone.iter().flatten()) {
            let most = b.mean_square.iter().copied().fold(0.0, f32::max);
            assert!(far(&a.mean_square, &b.mean_square) < 1e-4 * most);
            assert_eq!((a.rows, a.correction.is_some()), (240, true));
        }

        let mut inputs = [&embedded, &changed].map(|hidden| {
            let mut inputs = Inputs(Vec::new());
            stepper.observe(1, &weights, hidden, &mut inputs).unwrap();
            inputs.0
        });
        let [source, x] = inputs.each_mut();
        let spec = weights.spec.products()[0].linears[0];
        let name = spec.name(1);
        let weight = Matrix::from_weight(&name, weights.linear(spec.kind)).unwrap();
        let better = corrected(&weight, stats[0][0].correction.as_deref().unwrap());
        let (before, now) = (
            lost(&weight, source, &weight, x),
            lost(&weight, source, &better, x),
        );
        assert!(now < 0.98 * before, "{now} of {before}");
    }

    /// Sequences are held as far as they fit, one at least, and parts are put back where they were.
    #[test]
    fn parts_are_whole_sequences() {
        let hidden = Hidden {
            data: (0..12).map(|v| v as f32).collect(),
            lengths: vec![1, 3, 2],
            tokens: vec![5, 6, 7, 8, 9, 10],
            images: Vec::new(),
        };
        let (found, values) = part(&hidden, 1..3, 2);
        assert_eq!(values, 2..12);
        assert_eq!(found.data, hidden.data[2..12]);
        assert_eq!(
            (found.lengths, found.tokens),
            (vec![3, 2], vec![6, 7, 8, 9, 10])
        );
    }
}
