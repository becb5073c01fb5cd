//! One layer's work: gather what its Linears see, transform it, round it.

use crate::error::Result;
use crate::grid::{Grids, Rounded};
use crate::linalg::{Matrix, Moments};
use crate::methods::{Layer, Method, Needs, Problem};
use crate::report::LayerReport;
use crate::second_order::{Errors, InputStats};
use nq_formats::models::{LinearSpec, Product, Source};
use nq_formats::{ModelConfig, Progress, Tensor, Weight};
use nq_kernels::reference;
use nq_runtime::{Hidden, LayerStepper, LayerWeights, Observer};

/// Elements of a large weight that are held in f32 at once.
pub(crate) const PIECE: usize = 1 << 26;

/// What being looked up too adds to the moments of a tied head's inputs: there all elements
/// matter alike. Of 0, .1, 1, 3 and 10, 1 gave the least divergence on the demo model.
pub(crate) const LOOKED_UP: f32 = 1.0;

/// Gathers the second moments of what each of a layer's products sees.
pub struct Gather<'a> {
    products: Vec<&'static Product>,
    moments: Vec<Moments>, // of each product's input
    progress: &'a dyn Progress,
}

impl<'a> Gather<'a> {
    /// For a model of this shape; `progress` is advanced by rows.
    pub fn new(config: &ModelConfig, needs: Needs, progress: &'a dyn Progress) -> Self {
        let products = config.layer().products();
        let moments = |p: &&Product| Moments::new(p.inputs(config), needs == Needs::Hessian);
        Gather {
            moments: products.iter().map(moments).collect(),
            products,
            progress,
        }
    }

    /// The statistics, by product.
    pub fn finish(self) -> Vec<InputStats> {
        self.moments.into_iter().map(InputStats::from).collect()
    }
}

impl Observer for Gather<'_> {
    fn linear_input(&mut self, _layer: usize, product: &Product, x: &[f32]) {
        let Some(place) = self.products.iter().position(|&p| p == product) else {
            return;
        };
        self.moments[place].add(x);
        if place == 0 {
            let rows = x.len() / self.moments[0].width();
            self.progress.advance(rows as u64);
        }
    }
}

/// Advances the progress by rows and looks at nothing.
pub struct Pass<'a> {
    /// Elements of a row of the residual stream.
    pub width: usize,
    /// Told of rows.
    pub progress: &'a dyn Progress,
}

impl Observer for Pass<'_> {
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
/// [`crate::Error::NotFinite`] naming a weight with a NaN or infinity.
pub fn read(index: usize, weights: &LayerWeights, config: &ModelConfig) -> Result<Layer> {
    let spec = weights.spec;
    let linears = spec.linears().into_iter().map(|linear| {
        let weight = weights.linear(linear.kind);
        Ok((
            linear.kind,
            Matrix::from_weight(&linear.name(index), weight)?,
        ))
    });
    let linears = linears.collect::<Result<_>>()?;
    let norms = spec.products().into_iter().filter_map(|p| match p.source {
        Source::Norm(kind) => Some(kind),
        Source::Heads(_) | Source::Rows(_) => None,
    });
    let norms = norms.map(|kind| Ok((kind, weights.norm(kind).to_f32()?)));
    Ok(Layer {
        index,
        spec,
        linears,
        norms: norms.collect::<Result<_>>()?,
        head_dim: config.head_dim,
    })
}

/// A quantized layer and how it came about.
pub struct Quantized {
    /// What to write and to run.
    pub weights: LayerWeights,
    /// One row for each Linear.
    pub rows: Vec<LayerReport>,
    /// What was not done as asked.
    pub fallbacks: Vec<String>,
}

/// Quantizes one layer. `stats` are by product, unless the method needs none.
///
/// # Errors
/// As [`read`]; what the method refuses.
pub fn quantize(
    method: &dyn Method,
    index: usize,
    source: &LayerWeights,
    mut stats: Option<Vec<InputStats>>,
    grids: &Grids,
    config: &ModelConfig,
    mut done: impl FnMut(&LinearSpec),
) -> Result<Quantized> {
    let mut layer = read(index, source, config)?;
    let mut weights = source.clone();
    if let Some(stats) = &mut stats
        && method.transform(&mut layer, stats, grids)?
    {
        for (&kind, gains) in &layer.norms {
            let gains = Tensor::from_f32(vec![gains.len()], gains.clone())?;
            weights.norms.insert(kind, gains);
        }
    }
    let (mut rows, mut fallbacks) = (Vec::new(), Vec::new());
    for (place, product) in source.spec.products().into_iter().enumerate() {
        for linear in product.linears {
            let name = linear.name(index);
            let problem = Problem {
                name: &name,
                weight: layer.linear(linear.kind),
                inputs: stats.as_ref().map(|s| &s[place]),
                grid: grids[&linear.kind],
            };
            let outcome = method.round(&problem)?;
            let errors = errors(&problem, &outcome.rounded)?;
            rows.push(errors.report(&name, problem.grid, outcome.method));
            fallbacks.extend(outcome.fallbacks);
            let rounded = outcome.rounded.to_weight()?;
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

/// What rounding made of `problem`.
pub(crate) fn errors(problem: &Problem<'_>, rounded: &Rounded) -> Result<Errors> {
    let w = problem.weight;
    match problem.inputs.and_then(|i| i.hessian.as_ref()) {
        Some(hessian) => hessian.errors(w, rounded),
        None => Ok(Errors {
            weight: w.square_norm(),
            change: rounded.change(w).square_norm(),
            ..Errors::default()
        }),
    }
}

/// What is known of the head's inputs: of the final norm's output over the residual stream
/// `x` `[rows, hidden]`. `looked_up` is the share of the mean that is added to the diagonal.
pub(crate) fn head_inputs(
    x: &[f32],
    norm: &[f32],
    eps: f32,
    needs: Needs,
    looked_up: f32,
) -> InputStats {
    const ROWS: usize = 256;
    let n = norm.len();
    let mut moments = Moments::new(n, needs == Needs::Hessian);
    let mut normed = vec![0.0; ROWS * n];
    for x in x.chunks(ROWS * n) {
        let y = &mut normed[..x.len()];
        reference::rms_norm(x, norm, eps, y);
        moments.add(y);
    }
    moments.raise(looked_up);
    moments.into()
}

/// Runs `weights` over `hidden`, which stays as it is, and gathers what each product sees.
///
/// # Errors
/// What the stepper reports, e.g. activations that overflow.
pub fn gather(
    stepper: &mut dyn LayerStepper,
    index: usize,
    weights: &LayerWeights,
    hidden: &Hidden,
    needs: Needs,
    progress: &dyn Progress,
) -> Result<Vec<InputStats>> {
    if needs == Needs::Hessian {
        let mut done = |rows: usize| progress.advance(rows as u64);
        if let Some(moments) = stepper.moments(index, weights, hidden, &mut done)? {
            return Ok(moments.into_iter().map(InputStats::on_device).collect());
        }
    }
    let mut gather = Gather::new(stepper.config(), needs, progress);
    stepper.observe(index, weights, hidden, &mut gather)?;
    Ok(gather.finish())
}

/// The first Linear of the layer that is quantized, if any is.
pub fn quantized(weights: &LayerWeights) -> Option<&Weight> {
    let mut linears = weights.linears.values();
    linears.find(|w| !matches!(w, Weight::Dense(_)))
}
