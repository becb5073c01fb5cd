//! Benches of single CUDA kernels, in the shapes of Qwen3 0.6B and 8B, compared with the device's
//! memory bandwidth.
//!
//! `cargo bench -p nq-cuda --bench cuda [-- NAME ...]` prints a line per
//! operation: microseconds, bytes that it must read and write, and the share of the device's memory
//! bandwidth that this reaches. Operations of a decode step are also timed as a step runs
//! them, in a recorded graph where one may begin before the previous has ended ("chained"). Weights
//! and pages come out of memory: copies larger than the cache are used in turn. Names are those of
//! `BENCHES`; the kernels' rows in the table say which of them times which kernel.
#![allow(missing_docs, reason = "a benchmark's main")]
#![allow(clippy::print_stdout, reason = "a benchmark prints what it finds")]

mod attention;
mod coded_experts;
mod delta;
mod products;
mod ranks;
mod rows;
mod streams;
mod timing;
mod tower;
mod training;
mod trellis;

type Bench = (
    &'static str,
    fn(&mut timing::Timing) -> nq_kernels::Result<()>,
);

const BENCHES: [Bench; 25] = [
    ("read_all", rows::read_all),
    ("gemv", products::gemv),
    ("gemv_batch", products::gemv_batch),
    ("experts", products::experts),
    ("coded_experts", coded_experts::coded_experts),
    ("grouped", products::grouped),
    ("gemm_step", products::gemm_step),
    ("gemm", products::gemm),
    ("linear_reference", products::linear_reference),
    ("attention_decode", attention::attention_decode),
    ("attention_run", attention::attention_run),
    ("attention_shared", attention::attention_shared),
    ("attention_prefill", attention::attention_prefill),
    ("step_layers", attention::step_layers),
    ("pages", attention::pages),
    ("delta", delta::delta),
    ("hyper", streams::hyper),
    ("indexer", streams::indexer),
    ("rows", rows::rows),
    ("ranks", ranks::ranks),
    ("sampling", rows::sampling),
    ("training", training::training),
    ("second_order", training::second_order),
    ("tower", tower::tower),
    ("trellis", trellis::trellis),
];

fn main() {
    let mut timing = match timing::Timing::new() {
        Ok(timing) => timing,
        Err(e) => {
            println!("skipped: {e}");
            return;
        }
    };
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    for (name, bench) in BENCHES {
        if wanted.is_empty() || wanted.iter().any(|w| w == name) {
            timing.begin(name);
            if let Err(e) = bench(&mut timing) {
                println!("  {name}: {e}");
                std::process::exit(1);
            }
        }
    }
}
