//! One layer's work: gather what its Linears see, transform it, round it.

use crate::error::Result;
use crate::grid::{Grid, Rounded};
use crate::linalg::{InputStats, Matrix, Moments};
use crate::methods::{Layer, Method, Needs, Problem};
use crate::report::LayerReport;
use crate::second_order::Errors;
use crate::stepper::Stepper;
use nq_formats::{ModelConfig, Progress, Tensor, Weight};
use nq_kernels::reference;
use nq_runtime::{Hidden, LayerWeights, LinearId, LinearKind, Observer};

/// Gathers the second moments of a layer's four inputs.
pub struct Gather<'a> {
    moments: [Moments; 4],
    progress: &'a dyn Progress,
}

impl<'a> Gather<'a> {
    /// For a model of this shape; `progress` is advanced by rows.
    pub fn new(config: &ModelConfig, needs: Needs, progress: &'a dyn Progress) -> Self {
        let moments = LinearKind::INPUTS
            .map(|kinds| Moments::new(kinds[0].dims(config).1, needs == Needs::Hessian));
        Gather { moments, progress }
    }

    /// The second moments, in the order of [`LinearKind::INPUTS`].
    #[cfg(test)]
    pub(crate) fn matrices(self) -> [Matrix; 4] {
        self.moments.map(Moments::matrix)
    }

    /// The statistics, in the order of [`LinearKind::INPUTS`].
    pub fn finish(self) -> [InputStats; 4] {
        self.moments.map(Moments::finish)
    }
}

impl Observer for Gather<'_> {
    fn linear_input(&mut self, _layer: usize, kinds: &[LinearKind], x: &[f32]) {
        let Some(kind) = kinds.first() else { return };
        let input = LinearKind::INPUTS.iter().position(|k| k.contains(kind));
        if let Some(input) = input {
            self.moments[input].add(x);
        }
        if *kind == LinearKind::Q {
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
    let linear = |kind: LinearKind| {
        let name = LinearId { layer: index, kind }.to_string();
        Matrix::from_weight(&name, weights.linear(kind))
    };
    let [q, k, v, o, gate, up, down] = LinearKind::ALL.map(linear);
    Ok(Layer {
        index,
        linears: [q?, k?, v?, o?, gate?, up?, down?],
        input_norm: weights.input_norm.to_f32()?,
        post_attention_norm: weights.post_attention_norm.to_f32()?,
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

/// Quantizes one layer. `stats` are those of [`LinearKind::INPUTS`], unless the method needs
/// none; `grids` are by [`LinearKind`].
///
/// # Errors
/// As [`read`]; what the method refuses.
pub fn quantize(
    method: &dyn Method,
    index: usize,
    source: &LayerWeights,
    mut stats: Option<[InputStats; 4]>,
    grids: &[Grid; 7],
    config: &ModelConfig,
    mut done: impl FnMut(LinearKind),
) -> Result<Quantized> {
    let mut layer = read(index, source, config)?;
    let mut weights = source.clone();
    if let Some(stats) = &mut stats
        && method.transform(&mut layer, stats, grids)?
    {
        let norm = |n: &[f32]| Tensor::from_f32(vec![n.len()], n.to_vec());
        weights.input_norm = norm(&layer.input_norm)?;
        weights.post_attention_norm = norm(&layer.post_attention_norm)?;
    }
    let (mut rows, mut fallbacks) = (Vec::new(), Vec::new());
    for (input, kinds) in LinearKind::INPUTS.iter().enumerate() {
        for &kind in *kinds {
            let name = LinearId { layer: index, kind }.to_string();
            let problem = Problem {
                name: &name,
                weight: layer.linear(kind),
                inputs: stats.as_ref().map(|s| &s[input]),
                grid: grids[kind as usize],
            };
            let outcome = method.round(&problem)?;
            let errors = errors(&problem, &outcome.rounded)?;
            rows.push(errors.report(&name, problem.grid, outcome.method));
            fallbacks.extend(outcome.fallbacks);
            weights.linears[kind as usize] = outcome.rounded.to_weight()?;
            done(kind);
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
    moments.finish()
}

/// Runs `weights` over `hidden`, which stays as it is, and gathers what its Linears see.
///
/// # Errors
/// What the stepper reports, e.g. activations that overflow.
pub fn gather(
    stepper: &mut Stepper,
    index: usize,
    weights: &LayerWeights,
    hidden: &Hidden,
    needs: Needs,
    progress: &dyn Progress,
) -> Result<[InputStats; 4]> {
    if needs == Needs::Hessian {
        let mut done = |rows: usize| progress.advance(rows as u64);
        if let Some(stats) = stepper.moments(index, weights, hidden, &mut done)? {
            return Ok(stats);
        }
    }
    let mut gather = Gather::new(stepper.as_mut().config(), needs, progress);
    (stepper.as_mut()).observe(index, weights, hidden, &mut gather)?;
    Ok(gather.finish())
}

/// True if every Linear of the layer is unquantized.
pub fn is_dense(weights: &LayerWeights) -> bool {
    weights
        .linears
        .iter()
        .all(|w| matches!(w, Weight::Dense(_)))
}
