//! Which kernels of the registry serve a weight, for every number of rows of x.

use super::kernel::LinearKernel;
use crate::Cpu;
use nq_kernels::registry::{Activations, WeightKind};
use nq_kernels::{Error, Result};

/// True for groups without inputs, which are invalid.
pub(super) fn without_groups(activations: Activations) -> bool {
    matches!(
        activations,
        Activations::Int8 { group: 0 } | Activations::Int16 { group: 0 }
    )
}

/// Kernels that together serve every number of rows of x.
pub(super) fn choose(
    cpu: &Cpu,
    kind: WeightKind,
    activations: Activations,
) -> Result<Vec<&'static LinearKernel>> {
    // In the weight's own width if there are kernels, otherwise in the width in which devices hold it.
    let kinds = [kind.in_table(), kind.expanded(), kind.held()];
    let chosen = kinds
        .into_iter()
        .find_map(|kind| of_all_rows(cpu, kind, activations));
    chosen.ok_or_else(|| no_kernel(cpu, kind, activations))
}

/// Kernels for exactly this kind, which serve every number of rows.
fn of_all_rows(
    cpu: &Cpu,
    kind: WeightKind,
    activations: Activations,
) -> Option<Vec<&'static LinearKernel>> {
    let mut chosen = Vec::new();
    let mut rows = 1;
    loop {
        let kernel = LinearKernel::select(cpu.isa(), kind, activations, rows)?;
        chosen.push(kernel);
        match kernel.info.rows.end().checked_add(1) {
            Some(next) => rows = next,
            None => return Some(chosen),
        }
    }
}

/// The chosen kernel that serves `rows` rows.
pub(super) fn serving(kernels: &[&'static LinearKernel], rows: usize) -> &'static LinearKernel {
    kernels
        .iter()
        .find(|k| k.info.rows.contains(&rows))
        .expect("chosen for every number of rows")
}

pub(super) fn no_kernel(cpu: &Cpu, kind: WeightKind, activations: Activations) -> Error {
    Error::NoKernel {
        op: "linear",
        scheme: kind.to_string(),
        activations: activations.to_string(),
        device: format!("cpu ({})", cpu.isa()),
    }
}
