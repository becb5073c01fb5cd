//! The one error type of this crate.

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a kernel, its preparation or a device can refuse.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The registry has no kernel for this request. Never answered by a slower path.
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
        /// Which operand.
        what: &'static str,
        /// What fits.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A requested instruction set is absent on this machine.
    #[error("instruction set {requested} is not available here; this CPU has: {available}")]
    Isa {
        /// What was asked for.
        requested: &'static str,
        /// What there is.
        available: String,
    },
    /// The CUDA driver refused, or is absent.
    #[error("{what}: {why}")]
    Cuda {
        /// What was attempted.
        what: &'static str,
        /// The driver's answer, or what is missing.
        why: String,
    },
    /// The device has no memory left.
    #[error("the GPU's memory has no room for {what}")]
    DeviceMemory {
        /// What was to be allocated.
        what: &'static str,
    },
    /// A weight could not be read.
    #[error(transparent)]
    Weight(#[from] nq_formats::Error),
}
