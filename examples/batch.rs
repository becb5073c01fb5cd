//! Continues several texts together, one of which joins later: `cargo run --release --example batch --
//! FOLDER`, where FOLDER holds a checkpoint, such as `assets/demo`.

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use nq_formats::Checkpoint;
use nq_runtime::{
    Batch, Continuation, DraftedBy, KvType, LoadOptions, Piece, Sampler, SamplingParams,
    SessionSpec, Tokenizer,
};
use std::ops::ControlFlow;
use std::path::Path;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder] = &args[..] else {
        anyhow::bail!("expected FOLDER");
    };
    let checkpoint = Checkpoint::open(Path::new(folder))?;
    let tokenizer = Tokenizer::from_files(checkpoint.files())?;
    let options = LoadOptions::default();
    let engine = nq_load::load(checkpoint.config(), checkpoint.store(), &options, &())?;
    let mut session = engine.session(SessionSpec {
        slots: 3,
        ctx: 256,
        pages: None,
        kv: KvType::F16,
        max_rows: 256,
        snapshots: None,
        drafts: DraftedBy::Nothing,
    })?;

    let prompts = ["The river", "A mountain is", "Once upon a time"];
    let prompts = prompts.map(|p| tokenizer.encode(p));
    let mut answers = vec![Vec::new(); prompts.len()];
    let mut batch = Batch::new(session.as_mut());
    for step in 0..32 {
        // One text joins in each of the first steps; all that have joined are continued together.
        let mut pieces = Vec::new();
        if let Some(Ok(tokens)) = prompts.get(step) {
            pieces.push(Piece {
                slot: step,
                tokens,
                then: Some(Continuation {
                    sampler: Sampler::new(SamplingParams::default(), step as u64)?,
                    tokens: 24,
                }),
            });
        }
        if pieces.is_empty() && batch.running() == 0 {
            break;
        }
        let mut failed = None;
        batch.step(pieces, &mut |slot, token| match token {
            Ok(token) => {
                answers[slot].push(token);
                ControlFlow::Continue(())
            }
            Err(e) => {
                failed = Some(e);
                ControlFlow::Break(())
            }
        })?;
        if let Some(e) = failed {
            return Err(e.into());
        }
    }
    for (slot, answer) in answers.iter().enumerate() {
        println!("{slot}: {}", tokenizer.decode(answer, true));
    }
    Ok(())
}
