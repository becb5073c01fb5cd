//! Quantization: methods, calibration, the layer-streamed pipeline and the guard.
//!
//! A method turns a matrix and statistics of its inputs into codes and scales on a grid. It
//! does not know how they are laid out in a file or on a device.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.
//!
//! ```no_run
//! use nq_formats::{Bits, Checkpoint};
//! use nq_quantize::{Job, QuantizeOptions};
//! use std::path::Path;
//!
//! let checkpoint = Checkpoint::open(Path::new("../assets/demo"))?;
//! let options = QuantizeOptions::new(checkpoint.config(), Bits::B4, "demo-int4")?;
//! let report = Job::new(&checkpoint, &options, &())?.run()?;
//! let against = report.quality.and_then(|q| q.against).ok_or("every run is measured")?;
//! println!("mean KL divergence {}", against.kld.mean);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod allocation;
pub mod calibration;
pub mod device_memory;
pub mod error;
pub mod fit;
pub mod grid;
mod groups;
mod layers;
pub mod linalg;
pub mod memory;
pub mod methods;
mod mix;
mod on_the_fly;
pub(crate) mod packer;
pub mod pipeline;
mod quality;
mod recipe;
pub mod report;
mod rounding;
pub mod schemes;
pub mod second_order;
mod sensitivity;
mod stages;
mod streamed;
mod tables;
mod tower;
pub mod train;
pub mod trellis;

pub use calibration::{CALIBRATION_TOKENS, CalibrationSource, SEQUENCE, holds_image};
pub use device_memory::DeviceEstimate;
pub use error::{Error, Result};
pub use fit::Fit;
pub use grid::{Grid, GroupParams, Rounded};
pub use memory::Estimate;
pub use on_the_fly::{OnTheFly, draft_head, draft_head_bytes, quantize_at_load, requantize};
pub use pipeline::{Job, QuantizeOptions};
pub use quality::QualityLimits;
pub use recipe::{Recipe, TargetSize};
pub use report::{Choice, LayerReport, QuantizeReport, TableLoss, TuningReport, WorstToken};
pub use schemes::{Codes, Schemes, group_named};
pub use stages::Stage;
pub use streamed::Streamed;
pub use train::{Effort, TuneOptions, Tuning};
