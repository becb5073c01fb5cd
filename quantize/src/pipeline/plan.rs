//! The stages of a run, with an estimate of the time that each will take on a CPU.
//!
//! The work of a stage is counted in multiplications of its products and of attention. Its time follows from the
//! speed of a product on this machine, measured in a moment, and from the share of that speed that such a stage
//! is estimated to reach.

use super::job::Job;
use super::state::State;
use crate::calibration::CalibrationSource;
use crate::groups::{self, Place};
use crate::memory;
use crate::methods::Needs;
use crate::quality;
use crate::sensitivity;
use nq_formats::trellis::Code;
use nq_formats::{Scheme, TrellisScheme};
use nq_kernels::Isa;
use nq_kernels::matrix::{Target, Threads, View, multiply};
use nq_load::device::Device;
use nq_model::DType;
use serde::Serialize;
use std::time::Instant;

/// A stage of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PlannedStage {
    /// Its name, as its progress is shown.
    pub name: &'static str,
    /// Estimated seconds; 0 on a GPU, whose speed is known only once it runs.
    pub seconds: f64,
}

/// Stages that a resumed run may not need.
const SAMPLING_CALIBRATION: &str = "sampling calibration text";
const SAMPLING_HELD_OUT: &str = "sampling held-out text";
const MEASURING_SENSITIVITY: &str = "measuring sensitivity";

/// Shares of a product's speed that stages reach, estimated from the times of runs of Qwen3-0.6B on two cores: of those
/// that multiply bf16 weights, on a CPU that has such products first.
const SAMPLING: [f64; 2] = [1.1, 0.6];
const LAYERS: [f64; 2] = [1.05, 0.7];
const ROUNDING: f64 = 0.1;
const MEASURING: f64 = 2.0; // of three passes in 8-bit products
const SENSITIVITY: f64 = 0.7;

/// Multiplications in whose time a weight is searched in a trellis, by code and bits: two cores that multiply 95 * 10^9
/// numbers a second search 650,000 weights in 4 bits (`2026-11-26-trellis-encoding-cpu.csv`).
fn search(scheme: TrellisScheme) -> f64 {
    let thousands = match (scheme.code(), scheme.bits()) {
        (Code::Octagon, b) if b < 2.5 => 209.0,
        (Code::Octagon, b) if b < 3.0 => 275.0,
        (Code::Octagon, _) => 320.0,
        (Code::Sum, b) if b < 3.0 => 61.0,
        (Code::Sum, b) if b < 4.0 => 85.0,
        (Code::Sum, b) if b < 5.0 => 157.0,
        (Code::Sum, _) => 218.0,
    };
    146_000.0 * 338.0 / thousands
}

/// Side of the product whose speed is measured.
const SIDE: usize = 1024;

/// Multiplications of the products of a model.
struct ProductWork {
    /// In the layers, for a token, attention included.
    layers: f64,
    /// In the head, for a token.
    head: f64,
    /// Of the method, which goes through the columns of every weight once for each of them, and of searching trellises.
    rounding: f64,
    /// The same for embedding and head.
    rounding_ends: f64,
}

impl Job<'_> {
    /// The stages that the run goes through, if no limit on the quality makes it begin again.
    pub fn stages(&self) -> Vec<PlannedStage> {
        let o = self.options;
        let on_cpu = matches!(Device::choose(o.load.device), Ok(Device::Cpu));
        let speed = if on_cpu { speed() } else { f64::INFINITY };
        let bf16 = memory::dense_type(self.checkpoint) == DType::BF16;
        let slower = usize::from(!(bf16 && Isa::Avx512Bf16.available()));
        let (sampling, layers) = (SAMPLING[slower], LAYERS[slower]);
        let work = self.work();
        let (n, length) = self.shape();
        let calibration = (n * length) as f64;
        let (n, length) = quality::held_out_shape(self.config(), self.eval_tokens());
        let held_out = (n * length) as f64;
        let all = work.layers + work.head;
        let stage = |name, multiplications: f64, share: f64| PlannedStage {
            name,
            seconds: 2.0 * multiplications / (share * speed),
        };
        let mut stages = Vec::new();
        if calibration > 0.0 && o.calibration == CalibrationSource::SelfSampled {
            stages.push(stage(SAMPLING_CALIBRATION, calibration * all, sampling));
        }
        if self.samples_held_out() {
            stages.push(stage(SAMPLING_HELD_OUT, held_out * all, sampling));
        }
        let mut layers = stage("quantizing layers", 2.0 * calibration * work.layers, layers);
        layers.seconds += stage("", work.rounding, ROUNDING).seconds;
        if o.target.is_some() {
            let groups = groups::groups(self.config()).len();
            let (n, length) = sensitivity::shape(self.config(), groups, self.eval_tokens());
            let rows = sensitivity::rows(self.config(), n * length, calibration as usize);
            let of_layer = work.layers / self.config().num_hidden_layers as f64;
            stages.push(stage(
                MEASURING_SENSITIVITY,
                rows as f64 * of_layer,
                SENSITIVITY,
            ));
        }
        stages.push(layers);
        stages.push(stage(
            "quantizing embedding and head",
            work.rounding_ends,
            ROUNDING,
        ));
        if o.tuning.is_some() {
            stages.push(PlannedStage {
                name: "tuning",
                seconds: self.tuning_seconds(on_cpu),
            });
        }
        if o.measure {
            stages.push(stage("KL divergence", 3.0 * held_out * all, MEASURING));
        }
        stages
    }

    /// The stages that are left of a run whose texts and sensitivity `state` may hold.
    pub(super) fn stages_after(&self, state: &State) -> Vec<PlannedStage> {
        let there = |name: &str| match name {
            SAMPLING_CALIBRATION => state.calibration.is_some(),
            SAMPLING_HELD_OUT => state.held_out.is_some(),
            MEASURING_SENSITIVITY => state.menus.is_some(),
            _ => false,
        };
        let mut stages = self.stages();
        stages.retain(|s| !there(s.name));
        stages
    }

    fn work(&self) -> ProductWork {
        let config = self.config();
        let attention = 2 * config.num_attention_heads * config.head_dim * self.shape().1 / 2;
        let mut work = ProductWork {
            layers: (config.num_hidden_layers * attention) as f64,
            head: (config.vocab_size * config.hidden_size) as f64,
            rounding: 0.0,
            rounding_ends: 0.0,
        };
        let by_columns = self.method.needs() != Needs::Nothing;
        for group in groups::groups(config) {
            let in_layer = matches!(group.place, Place::Layer { .. });
            for (name, (rows, cols)) in &group.weights {
                // A token goes through a few of a layer's experts.
                let used = match &config.experts {
                    Some(e) if name.contains("experts") => e.per_token as f64 / e.count as f64,
                    _ => 1.0,
                };
                let elements = (rows * cols) as f64;
                let columns = (*cols).min(4 * config.hidden_size) as f64;
                let trellis = self.options.schemes.of(name).and_then(Scheme::trellis);
                // As shares of the speed that rounding reaches.
                let searched = trellis.map_or(0.0, |scheme| ROUNDING * search(scheme));
                let rounding = elements * (if by_columns { columns } else { 0.0 } + searched);
                match in_layer {
                    true => {
                        work.layers += used * elements;
                        work.rounding += rounding;
                    }
                    false => work.rounding_ends += rounding,
                }
            }
        }
        work
    }
}

/// Multiplications and additions per second of a product of f32 on all threads: the best of a few.
fn speed() -> f64 {
    let (a, b) = (vec![1.0f32; SIDE * SIDE], vec![0.5f32; SIDE * SIDE]);
    let mut c = vec![0.0f32; SIDE * SIDE];
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let begin = Instant::now();
        multiply(
            Target::new(&mut c, SIDE),
            false,
            1.0,
            View::new(&a, SIDE, SIDE),
            View::new(&b, SIDE, SIDE),
            Threads::All,
        );
        best = best.min(begin.elapsed().as_secs_f64());
    }
    2.0 * (SIDE * SIDE * SIDE) as f64 / best.max(1e-9)
}
