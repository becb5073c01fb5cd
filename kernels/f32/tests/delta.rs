//! Gated DeltaNet in full precision compared with its formulas in f64.

use crate::common::delta::{EPS, reference, rows, shapes, vectors};
use crate::common::nmse;
use nq_f32::CpuOps;
use nq_kernels::grad::{DeltaInputs, DeltaWork, LayerOps};

/// The operation over whole sequences in f32.
#[test]
fn whole_sequences_are_those_of_the_formulas() {
    for shape in shapes() {
        let (w, seq) = (vectors(&shape), 19);
        let sequences = [1, 2].map(|seed| rows(&shape, seq, seed));
        let both = |part: usize| [&sequences[0][part][..], &sequences[1][part][..]].concat();
        let mut out = vec![0.0; 2 * seq * shape.values()];
        let inputs = DeltaInputs {
            shape,
            batch: 2,
            seq,
            qkvz: &both(0),
            ba: &both(1),
            conv: &w.conv,
            decay: &w.decay,
            dt_bias: &w.dt_bias,
            norm: &w.norm,
            eps: EPS,
        };
        let mut work = DeltaWork::new(&CpuOps, &shape, (2, seq)).unwrap();
        CpuOps.delta(inputs, &mut work, &mut out).unwrap();
        let halves = out.chunks(seq * shape.values());
        for (found, sequence) in halves.zip(&sequences) {
            let e = nmse(found, &reference(&shape, &w, sequence));
            assert!(e < 1e-10, "{shape:?}: {e:e}");
        }
    }
}
