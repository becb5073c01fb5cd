//! AWQ's scales, then GPTQ: inputs that matter are scaled up in the weight and down before it,
//! and what is left of the error is made up for by other columns.

use super::awq::Awq;
use super::gptq::{Gptq, Order};
use super::{Layer, Method, Needs, Outcome, Problem};
use crate::error::Result;
use crate::grid::Grids;
use crate::layers::LayerStats;
use serde_json::{Map, Value};

/// The settings of both.
#[derive(Clone, Copy, Debug)]
pub struct AwqGptq {
    /// Of the scales.
    pub awq: Awq,
    /// Of the rounding.
    pub gptq: Gptq,
}

impl Default for AwqGptq {
    /// Group by group, which after these scales is measurably better than all columns at once.
    fn default() -> Self {
        AwqGptq {
            awq: Awq::default(),
            gptq: Gptq {
                order: Order::Groups,
                ..Gptq::default()
            },
        }
    }
}

impl Method for AwqGptq {
    fn name(&self) -> &'static str {
        "awq-gptq"
    }

    fn settings(&self) -> Map<String, Value> {
        let mut settings = self.gptq.settings();
        settings.insert("scales".into(), self.awq.settings().into());
        settings
    }

    fn needs(&self) -> Needs {
        Needs::Hessian
    }

    fn transform(&self, layer: &mut Layer, inputs: &mut LayerStats, grids: &Grids) -> Result<bool> {
        self.awq.transform(layer, inputs, grids)
    }

    fn round(&self, problem: &Problem<'_>) -> Result<Outcome> {
        self.gptq.round(problem)
    }
}
