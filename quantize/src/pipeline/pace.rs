//! How long work takes on a device: seconds of a unit of each kind of work, until a run has shown its own pace.
//!
//! A CPU's follow from the speed of a product, measured for a moment, and from the cost of each other kind of work in such
//! products, estimated from runs of Qwen3-0.6B and the demo model on two cores (`2026-11-26-cpu-quantize.csv`). The search
//! of trellises, whose speed in products differs between CPUs, is measured itself. A GPU's are
//! those of runs on an H200 (`2026-11-23-gpu-quantize.csv`, `2026-11-26-trellis-gptq-8b.csv`,
//! `2026-11-26-gpu-gptq-27b.csv`), by the number of its multiprocessors.

use crate::error::Result;
use crate::memory;
use crate::trellis::Trellis;
use nq_formats::trellis::{Code, SEQUENCE};
use nq_formats::{Checkpoint, TrellisScheme};
use nq_kernels::Isa;
use nq_kernels::matrix::{ProductTarget, Threads, View, multiply};
use nq_load::gpu;
use nq_model::DType;
use std::time::Instant;

/// Seconds of a unit of work.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagePace {
    /// Most sequences that are sampled together, where the device bounds them.
    pub(super) together: Option<usize>,
    pub(super) on_cpu: bool,
    /// A byte of the source that is hashed, of weights that are loaded, of a file that is written.
    pub(super) hashed: f64,
    pub(super) loaded: f64,
    pub(super) written: f64,
    /// A step of sampling, for each byte of the weights that it reads, and for each multiplication.
    step: f64,
    step_byte: f64,
    sampled: f64,
    /// A layer that runs over calibration text, for each of its weights, and for each multiplication.
    layer: f64,
    weight: f64,
    run: f64,
    /// How many times as long as a run it takes to gather the statistics of inputs.
    gathering: f64,
    /// A multiplication while variants of a model run, and while a result and its source do; a logit that is compared.
    pub(super) probed: f64,
    measured: f64,
    logit: f64,
    /// Rounding: a weight whose range is searched; each column that its error goes to; the best path of a weight in a
    /// trellis of 4 bits.
    fitted: f64,
    column: f64,
    path: f64,
}

/// A pass over text through the layers of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct TextPass {
    pub(super) layers: f64,
    pub(super) weights: f64,
    pub(super) multiplications: f64,
}

/// The work of rounding weights.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundingWork {
    /// Weights whose ranges are searched, counted once for each search.
    pub(super) fitted: f64,
    /// Columns that errors go to, over all weights.
    pub(super) columns: f64,
    /// Weights in trellises, in searches for the path of one of 4 bits.
    pub(super) paths: f64,
}

/// Multiplications in whose time a CPU does other work: hashes and loads a byte; searches the range of a weight; corrects a
/// column for its error.
const HASHED: f64 = 30.0;
const LOADED: f64 = 150.0;
const FITTED: f64 = 3500.0;
const COLUMN: f64 = 4.7;

/// Shares of a product's speed that stages reach, estimated from the times of runs of Qwen3-0.6B on two cores: of those
/// that multiply bf16 weights, on a CPU that has such products first.
const SAMPLING: [f64; 2] = [1.1, 0.6];
const LAYERS: [f64; 2] = [1.05, 0.7];
const MEASURING: f64 = 2.0; // in 8-bit products
const SENSITIVITY: f64 = 0.7;
/// Gathering statistics, and running a layer: multiplications of each that the layer counts.
const GATHERED: f64 = 1.35;
const RUN: f64 = 0.65;

/// The time of a search for a weight's path, in times of one in 4 bits by the code octagon, by code and bits
/// (`2026-11-26-trellis-encoding-cpu.csv`).
pub(super) fn paths(scheme: TrellisScheme) -> f64 {
    let thousands = match (scheme.code(), scheme.bits()) {
        (Code::Octagon, b) if b < 2.5 => 209.0,
        (Code::Octagon, b) if b < 3.0 => 275.0,
        (Code::Octagon, _) => 320.0,
        (Code::Sum, b) if b < 3.0 => 61.0,
        (Code::Sum, b) if b < 4.0 => 85.0,
        (Code::Sum, b) if b < 5.0 => 157.0,
        (Code::Sum, _) => 218.0,
    };
    320.0 / thousands
}

/// Multiprocessors of an H200.
const H200: f64 = 132.0;

impl StagePace {
    /// That of a GPU by its ordinal, or of the CPU; with `trellises` of one that searches them.
    ///
    /// # Errors
    /// An absent GPU.
    pub(super) fn new(
        gpu: Option<usize>,
        checkpoint: &Checkpoint,
        trellises: bool,
    ) -> Result<Self> {
        if let Some(gpu) = gpu {
            return Ok(StagePace::of_gpu(gpu::multiprocessors(gpu)?, checkpoint));
        }
        let path = if trellises { path()? } else { 0.0 };
        Ok(StagePace {
            path,
            ..StagePace::of_cpu(speed(), checkpoint)
        })
    }

    /// The pace of a CPU whose products do `speed` multiplications per second, and that searches no trellises.
    fn of_cpu(speed: f64, checkpoint: &Checkpoint) -> Self {
        let bf16 = memory::dense_type(checkpoint) == DType::BF16;
        let slower = usize::from(!(bf16 && Isa::Avx512Bf16.available()));
        let one = 1.0 / speed;
        StagePace {
            together: None,
            on_cpu: true,
            hashed: HASHED * one,
            loaded: LOADED * one,
            written: 1e-9,
            step: 0.0,
            step_byte: 0.0,
            sampled: one / SAMPLING[slower],
            layer: 0.0,
            weight: 0.0,
            run: RUN * one / LAYERS[slower],
            gathering: GATHERED / RUN,
            probed: one / SENSITIVITY,
            measured: one / MEASURING,
            logit: 0.0,
            fitted: FITTED * one,
            column: COLUMN * one,
            path: 0.0,
        }
    }

    /// The pace of a GPU with so many multiprocessors.
    pub(super) fn of_gpu(multiprocessors: usize, checkpoint: &Checkpoint) -> Self {
        let slower = H200 / multiprocessors.max(1) as f64;
        // Experts are unpacked one by one.
        let mixture = checkpoint.config().experts.is_some();
        StagePace {
            together: gpu::sizes().ok().map(|sizes| sizes.together),
            on_cpu: false,
            hashed: 0.4e-9,
            loaded: if mixture { 0.9e-9 } else { 0.25e-9 },
            written: 1.1e-9,
            step: 0.7e-3 * slower,
            step_byte: 0.23e-12 * slower,
            sampled: 0.0,
            layer: 0.04,
            weight: 2e-9 * slower,
            run: 2e-14 * slower,
            gathering: 1.2,
            probed: 5e-14 * slower,
            measured: 5e-15 * slower,
            logit: 1.8e-9,
            fitted: 11e-9 * slower,
            column: 0.0,
            path: 32e-9 * slower,
        }
    }

    /// Seconds of sampling in so many steps, each of which reads `bytes` of weights.
    pub(super) fn sample(&self, steps: f64, bytes: f64, multiplications: f64) -> f64 {
        steps * (self.step + self.step_byte * bytes) + self.sampled * multiplications
    }

    /// Seconds of a pass.
    pub(super) fn run(&self, pass: TextPass) -> f64 {
        self.layer * pass.layers + self.weight * pass.weights + self.run * pass.multiplications
    }

    /// Seconds of gathering statistics of inputs in a pass.
    pub(super) fn gather(&self, pass: TextPass) -> f64 {
        self.gathering * self.run(pass)
    }

    /// Seconds of running a model over text to compare so many logits.
    pub(super) fn measure(&self, multiplications: f64, logits: f64) -> f64 {
        self.measured * multiplications + self.logit * logits
    }

    /// Seconds of rounding.
    pub(super) fn round(&self, work: RoundingWork) -> f64 {
        self.fitted * work.fitted + self.column * work.columns + self.path * work.paths
    }
}

/// Side of the product whose speed is measured, and seconds for which it is.
const SIDE: usize = 1024;
const MOMENT: f64 = 0.2;

/// Seconds of `work`, on average over a moment: other programs may take a part of the machine, as they will while the run
/// takes place.
fn seconds(mut work: impl FnMut()) -> f64 {
    work(); // Threads start and pages are mapped.
    let (begin, mut times) = (Instant::now(), 0);
    while times == 0 || begin.elapsed().as_secs_f64() < MOMENT {
        work();
        times += 1;
    }
    begin.elapsed().as_secs_f64().max(1e-9) / f64::from(times)
}

/// Seconds in which all threads find the path of a weight in 4 bits by the code octagon.
fn path() -> Result<f64> {
    let trellis = Trellis::new(TrellisScheme::of_bits(Code::Octagon, 4.0)?);
    let sequences = 4 * rayon::current_num_threads();
    let weights: Vec<f32> = (0..sequences * SEQUENCE)
        .map(|i| (i as f32).sin())
        .collect();
    let mut words = vec![0; sequences * trellis.scheme().words()];
    let search = || trellis.encode(&mut weights.clone(), &mut words);
    Ok(seconds(search) / weights.len() as f64)
}

/// Multiplications per second of a product of f32 on all threads.
fn speed() -> f64 {
    let (a, b) = (vec![1.0f32; SIDE * SIDE], vec![0.5f32; SIDE * SIDE]);
    let mut c = vec![0.0f32; SIDE * SIDE];
    let product = || {
        multiply(
            ProductTarget::new(&mut c, SIDE),
            false,
            1.0,
            View::new(&a, SIDE, SIDE),
            View::new(&b, SIDE, SIDE),
            Threads::All,
        );
    };
    SIDE.pow(3) as f64 / seconds(product)
}
