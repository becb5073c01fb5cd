//! How long work takes on a device: seconds of a unit of each kind of work, until a run has shown its own pace.
//!
//! A CPU's are those of a [`Rehearsal`], in which each kind was done for a moment; the search of trellises is timed likewise.
//! A GPU's are those of the source's [`FirstLayers`], and where these do not tell, of runs on an H200
//! (`2026-11-23-gpu-quantize.csv`, `2026-11-26-gpu-gptq-27b.csv`), by the number of its multiprocessors.

use super::first_layers::FirstLayers;
use super::pass_pace::{FITTED, PassPace, TextPass};
use super::rehearsal::{Moment, Rehearsal};
use crate::error::Result;
use crate::trellis::Trellis;
use nq_formats::TrellisScheme;
use nq_formats::trellis::{Code, SEQUENCE};

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
    /// A step of sampling; each of its multiplications, and each logit that tokens are drawn from.
    step: f64,
    sampled: f64,
    drawn: f64,
    /// Running layers over calibration text, and gathering the statistics of inputs in them.
    run: PassPace,
    gathered: PassPace,
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

/// The work of sampling text.
#[derive(Clone, Copy, Debug)]
pub(super) struct SamplingWork {
    pub(super) steps: f64,
    pub(super) multiplications: f64,
    /// Logits that tokens are drawn from.
    pub(super) logits: f64,
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

/// Other work of a CPU, likewise: to hash and to load a byte.
const HASHED: f64 = 6.4;
const LOADED: f64 = 32.0;

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
/// The time in which a GPU finds a weight's path in 4 bits, in times of the search for a weight's range.
const PATH_ON_GPU: f64 = 3.0;

/// What the pace of a GPU depends on besides the time of the first layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct GpuPace {
    pub(super) multiprocessors: usize,
    /// Most sequences that it samples together.
    pub(super) together: usize,
    pub(super) source_bytes: f64,
}

impl StagePace {
    /// The pace of a CPU, with `trellises` of one that searches them.
    ///
    /// # Errors
    /// Errors of the search of trellises.
    pub(super) fn of_cpu(rehearsal: &Rehearsal, trellises: bool) -> Result<Self> {
        let column = rehearsal.column;
        Ok(StagePace {
            together: None,
            on_cpu: true,
            hashed: HASHED * column,
            loaded: LOADED * column,
            written: 1e-9,
            step: 0.0,
            sampled: rehearsal.sampled,
            drawn: rehearsal.drawn,
            run: rehearsal.run,
            gathered: rehearsal.gathered,
            probed: rehearsal.exact,
            measured: rehearsal.compared,
            logit: rehearsal.scored / 2.0,
            fitted: FITTED * column,
            column,
            path: if trellises {
                path(rehearsal.moment)?
            } else {
                0.0
            },
        })
    }

    /// The pace of a GPU with so many multiprocessors, which took these times for the first layers of a source of so many
    /// bytes, and for rounding the `work` of the first.
    pub(super) fn of_gpu(first: &FirstLayers, gpu: GpuPace, work: RoundingWork) -> Self {
        let slower = H200 / gpu.multiprocessors.max(1) as f64;
        // A layer has either kind of codes.
        let units = work.fitted + PATH_ON_GPU * work.paths;
        let fitted = first.rounded / units.max(1.0);
        StagePace {
            together: Some(gpu.together),
            on_cpu: false,
            hashed: 0.5e-9,
            loaded: first.loaded / gpu.source_bytes,
            written: 1.1e-9,
            step: first.step,
            sampled: 0.0,
            drawn: 0.0,
            run: first.run,
            gathered: first.gathered,
            probed: 5e-14 * slower,
            measured: 5e-15 * slower,
            logit: first.logit,
            fitted,
            column: 0.0,
            path: PATH_ON_GPU * fitted,
        }
    }

    /// Seconds of sampling.
    pub(super) fn sample(&self, work: SamplingWork) -> f64 {
        work.steps * self.step + self.sampled * work.multiplications + self.drawn * work.logits
    }

    /// Seconds of a pass.
    pub(super) fn run(&self, pass: TextPass) -> f64 {
        self.run.seconds(pass)
    }

    /// Seconds of gathering statistics of inputs in a pass.
    pub(super) fn gather(&self, pass: TextPass) -> f64 {
        self.gathered.seconds(pass)
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

/// Seconds in which all threads find the path of a weight in 4 bits by the code octagon.
fn path(moment: Moment) -> Result<f64> {
    let trellis = Trellis::new(TrellisScheme::of_bits(Code::Octagon, 4.0)?);
    let sequences = 4 * rayon::current_num_threads();
    let weights: Vec<f32> = (0..sequences * SEQUENCE)
        .map(|i| (i as f32).sin())
        .collect();
    let mut words = vec![0; sequences * trellis.scheme().words()];
    let search = || {
        trellis.encode(&mut weights.clone(), &mut words);
        Ok(())
    };
    Ok(moment.seconds(search)? / weights.len() as f64)
}
