//! The CPUs that kernels are tested on, and outputs with guards.
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

use nq_cpu::{Cpu, DeltaVectors};
use nq_kernels::{Isa, IsaChoice};
use nq_model::OutputGate;
use nq_testkit::delta::Vectors;
use std::collections::HashMap;
use std::sync::Mutex;

/// The vectors of a layer as the CPU's kernels take them.
pub(crate) fn view(w: &Vectors) -> DeltaVectors<'_> {
    DeltaVectors {
        conv: &w.conv,
        decay: &w.decay,
        dt_bias: &w.dt_bias,
        norm: &w.norm,
        gate: OutputGate::Silu,
    }
}

/// CPUs with one instruction set and number of threads, made once.
pub(crate) fn cpu(isa: Isa, threads: usize) -> &'static Cpu {
    static CPUS: Mutex<Option<HashMap<(Isa, usize), &'static Cpu>>> = Mutex::new(None);
    let mut cpus = CPUS.lock().unwrap();
    cpus.get_or_insert_with(HashMap::new)
        .entry((isa, threads))
        .or_insert_with(|| {
            let cpu = Cpu::new(Some(threads), IsaChoice::Force(isa));
            Box::leak(Box::new(cpu.expect("an available instruction set")))
        })
}

/// The instruction sets of this machine; prints which are skipped.
pub(crate) fn isas() -> Vec<Isa> {
    let (present, absent): (Vec<_>, Vec<_>) = Isa::ALL.into_iter().partition(|i| i.available());
    for isa in absent {
        println!("skipped: {isa} is not available on this CPU");
    }
    present
}

/// `n` values followed by guards.
pub(crate) struct Guarded {
    values: Vec<f32>,
    n: usize,
}

const GUARDS: usize = 64;
const GUARD: u32 = 0x7fc0_beef;

impl Guarded {
    pub(crate) fn new(values: &[f32]) -> Self {
        let n = values.len();
        let mut values = values.to_vec();
        values.resize(n + GUARDS, f32::from_bits(GUARD));
        Guarded { values, n }
    }

    pub(crate) fn values(&mut self) -> &mut [f32] {
        &mut self.values[..self.n]
    }

    /// The values, after checking that nothing was written past them.
    pub(crate) fn finish(self) -> Vec<f32> {
        let Guarded { mut values, n } = self;
        assert!(values[n..].iter().all(|v| v.to_bits() == GUARD));
        values.truncate(n);
        values
    }
}
