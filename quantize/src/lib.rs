//! Quantization: methods, calibration, the layer-streamed pipeline and the guard.
//!
//! A method turns a matrix and statistics of its inputs into codes and scales on a grid; it
//! never knows how they are laid out in a file or on a device.

#![forbid(unsafe_code)]

pub mod report;

pub use report::{LayerReport, QuantizeReport};
