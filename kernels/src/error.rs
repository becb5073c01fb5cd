//! The one error type of this crate.

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of kernels, of preparing their operands and of devices.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The registry has no kernel for this request. No slower path is taken instead.
    #[error("no {op} kernel for {scheme} weights with {activations} activations on {device}")]
    NoKernel {
        /// The operation.
        op: &'static str,
        /// The weight scheme.
        scheme: String,
        /// The activation type.
        activations: String,
        /// Device and instruction set or compute capability.
        device: String,
    },
    /// Operands of an operation do not fit each other.
    #[error("{op}: {what}: expected {expected}, found {found}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The operand.
        what: &'static str,
        /// Sizes or values that fit.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A requested instruction set is not available on this machine.
    #[error("instruction set {requested} is not available here; this CPU has: {available}")]
    Isa {
        /// The requested instruction set.
        requested: &'static str,
        /// The instruction sets that this CPU has.
        available: String,
    },
    /// The CUDA driver returned an error, or is absent.
    #[error("{what}: {why}")]
    Cuda {
        /// The action that failed.
        what: &'static str,
        /// The driver's error, or what is missing.
        why: String,
    },
    /// The device does not have enough memory.
    #[error("the GPU's memory has no room for {what}")]
    DeviceMemory {
        /// Purpose of the allocation.
        what: &'static str,
    },
    /// A weight could not be read.
    #[error(transparent)]
    Weight(#[from] nq_formats::Error),
}
