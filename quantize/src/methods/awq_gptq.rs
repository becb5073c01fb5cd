//! AWQ's scales, then GPTQ: columns of important inputs are scaled up in the weight and the inputs
//! down before it, and other columns compensate the remaining error.

use super::awq::Awq;
use super::gptq::{ActOrder, Gptq};
use super::method::{FloatLayer, Method, Needs, Outcome, Problem};
use crate::error::Result;
use crate::grid::Grids;
use crate::second_order::LayerStats;
use serde_json::{Map, Value};

/// The settings of both.
#[derive(Clone, Copy, Debug)]
pub struct AwqGptq {
    /// Settings of the scales.
    pub awq: Awq,
    /// Settings of the rounding.
    pub gptq: Gptq,
}

impl Default for AwqGptq {
    /// Rounds group by group, which after AWQ's scales is measurably better than all columns at once.
    fn default() -> Self {
        AwqGptq {
            awq: Awq::default(),
            gptq: Gptq {
                order: ActOrder::Groups,
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

    fn scales_inputs(&self) -> bool {
        true
    }

    fn trials(&self) -> usize {
        self.awq.trials()
    }

    fn corrects(&self) -> bool {
        true
    }

    fn transform(
        &self,
        layer: &mut FloatLayer,
        inputs: &mut LayerStats,
        grids: &Grids,
    ) -> Result<bool> {
        self.awq.transform(layer, inputs, grids)
    }

    fn round(&self, problem: &Problem<'_>) -> Result<Outcome> {
        self.gptq.round(problem)
    }
}
