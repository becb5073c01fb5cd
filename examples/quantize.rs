//! Quantizes a model and prints the loss of quality: `cargo run --release --example quantize -- FOLDER
//! OUT`, where FOLDER holds an unquantized checkpoint, such as `assets/demo`.

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use nq_formats::{Bits, Checkpoint};
use nq_quantize::{Job, QuantizeOptions};
use std::path::Path;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, out] = &args[..] else {
        anyhow::bail!("expected FOLDER OUT");
    };
    let checkpoint = Checkpoint::open(Path::new(folder))?;
    let options = QuantizeOptions {
        method: "rtn".into(), // "gptq" takes longer and gives better quality
        eval_tokens: Some(2048),
        ..QuantizeOptions::new(checkpoint.config(), Bits::B4, out)?
    };
    let report = Job::new(&checkpoint, &options, &())?.run()?;
    println!("{} bytes of tensors", report.tensor_bytes);
    if let Some(against) = report.quality.and_then(|q| q.against) {
        println!("mean KL divergence {:.4} nats", against.kld.mean);
        println!("same best token {:.1} %", 100.0 * against.same_top1);
    }
    Ok(())
}
