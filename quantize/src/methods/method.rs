//! What a method is: what it needs, is given and gives.

use crate::error::Result;
use crate::grid::{Grid, Grids, Rounded};
use crate::linalg::Matrix;
use crate::second_order::{InputStats, LayerStats};
use nq_model::{LayerSpec, LinearKind, NormKind};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// One weight to be rounded.
#[derive(Clone, Copy, Debug)]
pub struct Problem<'a> {
    /// Its name, for messages.
    pub name: &'a str,
    /// The weight, `[out, in]`, finite.
    pub weight: &'a Matrix,
    /// Statistics of its inputs, at least those that [`Method::needs`] asks for.
    pub inputs: Option<&'a InputStats>,
    /// The grid to round to.
    pub grid: Grid,
}

/// A rounded weight and how it was made.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The codes and scales.
    pub rounded: Rounded,
    /// The method that was used in the end.
    pub method: &'static str,
    /// Deviations from the request, with their reasons; normally empty.
    pub fallbacks: Vec<String>,
}

/// Statistics of a Linear's inputs that a method needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Needs {
    /// None: the method needs no calibration.
    Nothing,
    /// `E[x_i^2]`.
    Squares,
    /// `E[x x^T]`.
    Hessian,
}

/// The weights of one layer while it is quantized, in f32.
#[derive(Clone, Debug)]
pub struct FloatLayer {
    /// Layer, counted from 0.
    pub index: usize,
    /// Its row of the architecture's table.
    pub spec: &'static LayerSpec,
    /// `[out, in]`; includes the router, which is not rounded.
    pub linears: BTreeMap<LinearKind, Matrix>,
    /// Gains of the norms whose outputs are inputs of Linears.
    pub norms: BTreeMap<NormKind, Vec<f32>>,
    /// Biases of those Linears that have one.
    pub biases: BTreeMap<LinearKind, Vec<f32>>,
    /// Width of an attention head.
    pub head_dim: usize,
}

impl FloatLayer {
    /// The weight of one Linear.
    pub fn linear(&self, kind: LinearKind) -> &Matrix {
        &self.linears[&kind]
    }

    /// The weight of one Linear, mutable.
    ///
    /// # Panics
    /// If the layer has no such Linear.
    pub(crate) fn linear_mut(&mut self, kind: LinearKind) -> &mut Matrix {
        (self.linears.get_mut(&kind)).unwrap_or_else(|| panic!("a layer without {kind}"))
    }
}

/// Most rows of a weight on which scales of its inputs are tried.
pub(crate) const TRIED_ROWS: usize = 512;

/// A quantization method: chooses the codes of a weight.
pub trait Method: Send + Sync {
    /// Its name in reports.
    fn name(&self) -> &'static str;

    /// The statistics that it needs.
    fn needs(&self) -> Needs;

    /// Its settings by name, for the record.
    fn settings(&self) -> Map<String, Value>;

    /// Changes a layer into one of the same function that can be rounded better. `inputs` are the
    /// statistics of each product's input, in order, and are changed to match. Returns true if
    /// anything changed.
    ///
    /// # Errors
    /// None from the methods here; a method of your own may refuse a layer.
    fn transform(
        &self,
        layer: &mut FloatLayer,
        inputs: &mut LayerStats,
        grids: &Grids,
    ) -> Result<bool> {
        let _ = (layer, inputs, grids);
        Ok(false)
    }

    /// True if [`Method::transform`] scales inputs for the groups of a grid: trellises, which transform inputs
    /// themselves, are refused then.
    fn scales_inputs(&self) -> bool {
        false
    }

    /// How many scales of inputs it tries, each on `TRIED_ROWS` rows of a weight at most; for estimates of time.
    fn trials(&self) -> usize {
        0
    }

    /// True if it corrects later columns for the errors of earlier ones; for estimates of time.
    fn corrects(&self) -> bool {
        false
    }

    /// Rounds one weight.
    ///
    /// # Errors
    /// If the statistics do not fit the weight.
    fn round(&self, problem: &Problem<'_>) -> Result<Outcome>;
}
