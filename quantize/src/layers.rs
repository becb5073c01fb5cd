//! One layer's work: gather statistics of the inputs of its Linears, transform it, round it.

use crate::error::Result;
use crate::grid::{Grid, Grids};
use crate::linalg::{Matrix, Moments};
use crate::methods::{FloatLayer, Method, Needs};
use crate::report::LayerReport;
use crate::rounding::{self, Rounding};
use crate::schemes::LayerSchemes;
use crate::second_order::{InputStats, LayerStats};
use nq_formats::{Progress, Scheme, Tensor, Weight};
use nq_kernels::Routes;
use nq_model::{InputSource, LinearSpec, ModelConfig, Product};
use nq_runtime::models::Ending;
use nq_runtime::{Hidden, LayerStepper, LayerWeights, Observer};

/// Share of the diagonal's mean that is added to the moments of a tied head's inputs, since the
/// matrix is also looked up, where all elements matter alike. Of 0, .1, 1, 3 and 10, a share of 1 gave
/// the least divergence on the demo model.
pub(crate) const LOOKED_UP: f32 = 1.0;

/// Gathers the second moments of the inputs of each of a layer's products.
pub(crate) struct Gather<'a> {
    products: Vec<&'static Product>,
    moments: Vec<Vec<Moments>>, // of each product's inputs
    hits: Hits,
    progress: &'a dyn Progress,
}

/// How many rows were routed to each expert.
#[derive(Debug, Default)]
pub(crate) struct Hits {
    by_expert: Vec<usize>,
    rows: usize,
    per_token: usize,
}

impl Hits {
    fn new(config: &ModelConfig) -> Self {
        let (count, per_token) = config.experts.map_or((0, 0), |e| (e.count, e.per_token));
        Hits {
            by_expert: vec![0; count],
            rows: 0,
            per_token,
        }
    }

    fn add(&mut self, routes: &Routes) {
        self.rows += routes.rows();
        for row in 0..routes.rows() {
            for &(expert, _) in routes.of(row) {
                self.by_expert[expert as usize] += 1;
            }
        }
    }

    /// Describes experts that got less than a tenth of an equal share; `None` if there are none.
    pub(crate) fn rare(&self) -> Option<String> {
        let experts = self.by_expert.len();
        let few = self.rows * self.per_token / (10 * experts.max(1));
        let rare = self.by_expert.iter().filter(|&&n| n < few);
        let unused = self.by_expert.iter().filter(|&&n| n == 0).count();
        let rare = rare.count();
        (rare > 0).then(|| {
            format!(
                "{rare} of {experts} experts take fewer than {few} of {} calibration tokens, \
                 {unused} of them none: what the others take tells what these see",
                self.rows
            )
        })
    }
}

impl<'a> Gather<'a> {
    /// For layer `layer` of a model of this shape; `progress` advances by rows.
    pub(crate) fn new(
        config: &ModelConfig,
        layer: usize,
        needs: Needs,
        progress: &'a dyn Progress,
    ) -> Self {
        let products = config.layer(layer).products();
        let moments = |p: &&Product| {
            let one = |_| Moments::new(p.inputs(config), needs == Needs::Hessian);
            (0..p.shares(config)).map(one).collect()
        };
        Gather {
            hits: Hits::new(config),
            moments: products.iter().map(moments).collect(),
            products,
            progress,
        }
    }

    /// The statistics, and the rows that each expert got.
    pub(crate) fn finish(self) -> (LayerStats, Hits) {
        let stats = |own: Vec<Moments>| own.into_iter().map(InputStats::from).collect();
        (self.moments.into_iter().map(stats).collect(), self.hits)
    }

    fn add(&mut self, product: &Product, share: usize, x: &[f32]) {
        let Some(place) = self.products.iter().position(|&p| p == product) else {
            return;
        };
        self.moments[place][share].add(x);
        if place == 0 {
            let rows = x.len() / self.moments[0][0].width();
            self.progress.advance(rows as u64);
        }
    }
}

impl Observer for Gather<'_> {
    fn wants_output(&self) -> bool {
        false
    }

    fn linear_input(&mut self, _layer: usize, product: &Product, x: &[f32]) {
        self.add(product, 0, x);
    }

    fn expert_input(&mut self, _layer: usize, product: &Product, expert: usize, x: &[f32]) {
        self.add(product, expert, x);
    }

    fn routed(&mut self, _layer: usize, routes: &Routes) {
        self.hits.add(routes);
    }

    fn rows(&mut self, rows: usize) {
        self.progress.advance(rows as u64);
    }
}

/// An observer that only advances the progress by rows.
pub(crate) struct RowProgress<'a> {
    /// Width of the residual stream.
    pub width: usize,
    /// Receives the number of rows.
    pub progress: &'a dyn Progress,
}

impl Observer for RowProgress<'_> {
    fn wants_inputs(&self) -> bool {
        false
    }

    fn layer_output(&mut self, _layer: usize, x: &[f32]) {
        self.progress.advance((x.len() / self.width) as u64);
    }
}

/// Reads a layer's weights into f32.
///
/// # Errors
/// [`crate::Error::NotFinite`], which names the weight that contains NaN or infinity.
pub(crate) fn read(
    index: usize,
    weights: &LayerWeights,
    config: &ModelConfig,
) -> Result<FloatLayer> {
    let spec = weights.spec;
    let linears = spec.matrices().map(|linear| {
        let weight = weights.linear(linear.kind);
        Ok((
            linear.kind,
            Matrix::from_weight(&linear.name(index), weight)?,
        ))
    });
    let linears = linears.collect::<Result<_>>()?;
    let norms = spec.products().into_iter().filter_map(|p| match p.source {
        InputSource::Norm(kind) => Some(kind),
        InputSource::Heads(_) | InputSource::Rows(_) | InputSource::Fixed => None,
    });
    let norms = norms.map(|kind| Ok((kind, weights.norm(kind).to_f32()?)));
    Ok(FloatLayer {
        index,
        spec,
        linears,
        norms: norms.collect::<Result<_>>()?,
        biases: (weights.biases.iter())
            .map(|(&kind, bias)| Ok((kind, bias.to_f32()?)))
            .collect::<Result<_>>()?,
        head_dim: config.head_dim,
    })
}

/// A quantized layer and its report.
pub(crate) struct Quantized {
    /// The weights to write and to run.
    pub weights: LayerWeights,
    /// One row for each Linear.
    pub rows: Vec<LayerReport>,
    /// Deviations from the request.
    pub fallbacks: Vec<String>,
}

/// Quantizes one layer. `stats` are by product; `None` if the method needs none.
///
/// # Errors
/// Errors of [`read`] and of the method.
pub(crate) fn quantize(
    method: &dyn Method,
    index: usize,
    source: &LayerWeights,
    mut stats: Option<LayerStats>,
    schemes: &LayerSchemes,
    config: &ModelConfig,
    mut done: impl FnMut(&LinearSpec),
) -> Result<Quantized> {
    let mut layer = read(index, source, config)?;
    let mut weights = source.clone();
    // A job refuses methods that scale inputs for the groups of a grid where a weight is in a trellis.
    let all = schemes.iter();
    let affine: Option<Vec<_>> = all.map(|(&kind, s)| Some((kind, s.affine()?))).collect();
    let grid = |(kind, scheme)| Ok((kind, Grid::new(scheme)?));
    let grids = affine.map(|all| all.into_iter().map(grid).collect::<Result<Grids>>());
    let grids = grids.transpose()?;
    if let (Some(stats), Some(grids)) = (&mut stats, &grids)
        && method.transform(&mut layer, stats, grids)?
    {
        for (&kind, gains) in &layer.norms {
            let gains = Tensor::from_f32(vec![gains.len()], gains.clone())?;
            weights.norms.insert(kind, gains);
        }
        for (&kind, bias) in &layer.biases {
            let bias = Tensor::from_f32(vec![bias.len()], bias.clone())?;
            weights.biases.insert(kind, bias);
        }
        for kept in source.spec.kept() {
            let scaled = layer.linear(kept.kind);
            let tensor = Tensor::from_f32(vec![scaled.rows, scaled.cols], scaled.data.clone())?;
            weights.linears.insert(kept.kind, Weight::Dense(tensor));
        }
    }
    let (mut rows, mut fallbacks) = (Vec::new(), Vec::new());
    for (place, product) in source.spec.products().into_iter().enumerate() {
        for linear in product.linears {
            let name = linear.name(index);
            let stack = Stack {
                index,
                linear,
                weight: layer.linear(linear.kind),
                stats: stats.as_ref().map(|s| &s[place][..]),
                scheme: schemes[&linear.kind],
            };
            let rounded = stack.round(method)?;
            rows.push(rounded.report(&name));
            let (rounded, more) = rounded.finish()?;
            fallbacks.extend(more);
            weights.linears.insert(linear.kind, rounded);
            done(linear);
        }
    }
    Ok(Quantized {
        weights,
        rows,
        fallbacks,
    })
}

/// A Linear of a layer: one weight, or the weights of all experts.
struct Stack<'a> {
    index: usize,
    linear: &'a LinearSpec,
    weight: &'a Matrix,
    /// Statistics of its input, or of each expert's.
    stats: Option<&'a [InputStats]>,
    scheme: Scheme,
}

impl Stack<'_> {
    /// Rounds it: all at once if its rows share one input, otherwise expert by expert.
    fn round(&self, method: &dyn Method) -> Result<Rounding> {
        let shares = self.stats.map_or(1, <[InputStats]>::len);
        let stats = |share: usize| self.stats.map(|s| &s[share]);
        if shares == 1 {
            let name = self.linear.name(self.index);
            return rounding::round(method, &name, self.weight, stats(0), self.scheme);
        }
        let each = self.weight.rows / shares;
        let mut all: Option<Rounding> = None;
        for expert in 0..shares {
            let name = self.linear.expert_name(self.index, expert);
            let weight = self.weight.part(expert * each..(expert + 1) * each);
            let rounded = rounding::round(method, &name, &weight, stats(expert), self.scheme)?;
            match &mut all {
                None => all = Some(rounded),
                Some(all) => all.append(rounded),
            }
        }
        Ok(all.expect("a stack has an expert"))
    }
}

/// Statistics of the head's inputs: of the final norm's output over the residual stream
/// `x` `[rows, hidden]`. `looked_up` times the mean of the diagonal is added to it.
pub(crate) fn head_inputs(
    config: &ModelConfig,
    ending: &Ending,
    x: &[f32],
    needs: Needs,
    looked_up: f32,
) -> Result<InputStats> {
    const ROWS: usize = 256;
    let mut moments = Moments::new(config.hidden_size, needs == Needs::Hessian);
    for x in x.chunks(ROWS * config.stream_width()) {
        moments.add(&ending.apply(config, x)?);
    }
    moments.raise(looked_up);
    Ok(moments.into())
}

/// Runs `weights` over `hidden`, which is not changed, and gathers statistics of products' inputs.
///
/// # Errors
/// Errors of the stepper, e.g. for activations that overflow.
pub(crate) fn gather(
    stepper: &mut dyn LayerStepper,
    index: usize,
    weights: &LayerWeights,
    hidden: &Hidden,
    needs: Needs,
    progress: &dyn Progress,
) -> Result<(LayerStats, Hits)> {
    let mut gather = Gather::new(stepper.config(), index, needs, progress);
    if needs == Needs::Hessian
        && let Some(moments) = stepper.moments(index, weights, hidden, &mut gather)?
    {
        let rows = hidden.lengths.iter().sum();
        let one = |moments| InputStats {
            rows,
            ..InputStats::on_device(moments)
        };
        let stats = |own: Vec<_>| own.into_iter().map(one).collect();
        return Ok((moments.into_iter().map(stats).collect(), gather.hits));
    }
    stepper.observe(index, weights, hidden, &mut gather)?;
    Ok(gather.finish())
}

/// The layer's first quantized Linear, if any.
pub(crate) fn quantized(weights: &LayerWeights) -> Option<&Weight> {
    let mut linears = weights.linears.values();
    linears.find(|w| !matches!(w, Weight::Dense(_)))
}
