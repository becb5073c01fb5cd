//! Quantization methods. A method rounds weights to a [`Grid`](crate::grid::Grid), knowing nothing of files and
//! devices. A new method is a file here and a line in [`METHODS`].

pub mod awq;
pub mod awq_gptq;
pub mod gptq;
mod method;
pub mod rtn;
#[cfg(test)]
mod tests;

pub(crate) use method::TRIED_ROWS;
pub use method::{FloatLayer, Method, Needs, Outcome, Problem};

use crate::fit::Fit;

/// A method in the table of methods.
pub struct Entry {
    /// Its name on the command line.
    pub name: &'static str,
    /// One line of help.
    pub about: &'static str,
    /// The name of the same method with a searched range for each group, if that is another method.
    pub clip: Option<&'static str>,
    /// Makes it with its default settings.
    pub make: fn() -> Box<dyn Method>,
}

/// Every method.
pub const METHODS: &[Entry] = &[
    Entry {
        name: "gptq",
        about: "Second-order rounding with error feedback (arXiv 2210.17323)",
        clip: None,
        make: || Box::new(gptq::Gptq::default()),
    },
    Entry {
        name: "awq",
        about: "Activation-aware scaling (arXiv 2306.00978)",
        clip: None,
        make: || Box::new(awq::Awq::default()),
    },
    Entry {
        name: "awq-gptq",
        about: "AWQ's scales, then GPTQ",
        clip: None,
        make: || Box::new(awq_gptq::AwqGptq::default()),
    },
    Entry {
        name: "rtn",
        about: "Round to nearest",
        clip: Some("rtn-clip"),
        make: || Box::new(rtn::Rtn::new(Fit::absmax())),
    },
    Entry {
        name: "rtn-clip",
        about: "Round to nearest, the range of each group searched",
        clip: None,
        make: || Box::new(rtn::Rtn::new(Fit::clip())),
    },
];

/// Finds the table's entry for the method `name`.
pub fn find(name: &str) -> Option<&'static Entry> {
    METHODS.iter().find(|m| m.name == name)
}

/// Makes the method `name` with its default settings.
pub fn by_name(name: &str) -> Option<Box<dyn Method>> {
    find(name).map(|m| (m.make)())
}
