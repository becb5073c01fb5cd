//! Loads a model and answers a prompt: `cargo run --release --example generate -- FOLDER PROMPT`, where
//! FOLDER holds a checkpoint, such as `assets/demo`.

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use anyhow::Context;
use nq_formats::Checkpoint;
use nq_runtime::generate::generate;
use nq_runtime::{
    ChatTemplate, Detokenizer, DraftedBy, GenerationLimits, KvType, LoadOptions, Message, Sampler,
    SamplingParams, Sequence, SessionSpec, Speculation, Tokenizer,
};
use std::ops::ControlFlow;
use std::path::Path;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, prompt] = &args[..] else {
        anyhow::bail!("expected FOLDER PROMPT");
    };
    let checkpoint = Checkpoint::open(Path::new(folder))?;
    let tokenizer = Tokenizer::from_files(checkpoint.files())?;
    let template = ChatTemplate::from_files(checkpoint.files())?;

    // The first usable GPU, otherwise the CPU; `&()` ignores progress.
    let options = LoadOptions::default();
    let engine = nq_load::load(checkpoint.config(), checkpoint.store(), &options, &())?;
    let mut session = engine.session(SessionSpec {
        slots: 1,
        ctx: 1024,
        pages: None,
        kv: KvType::F16,
        max_rows: 256,
        snapshots: None,
        drafts: DraftedBy::Nothing,
    })?;

    let chat = template.render(&[Message::new("user", prompt)], None, true, None)?;
    let mut sampler = Sampler::new(
        SamplingParams {
            temperature: 0.7,
            seed: 1,
            ..SamplingParams::default()
        },
        0,
    )?;
    let limits = GenerationLimits {
        stop: checkpoint.eos_token_ids(),
        max_tokens: 200,
        interrupt: None,
    };
    // Tokens that repeat the text are checked several at once: the answer is the same.
    let drafts = Some(Speculation::ngram());
    let mut sequence = Sequence::new(session.as_mut(), 0).with_drafts(drafts);
    let mut detokenizer = Detokenizer::new(&tokenizer, true);
    let answer = generate(
        session.as_mut(),
        &mut sequence,
        &tokenizer.encode(&chat)?,
        &mut sampler,
        &limits,
        &mut |token| {
            print!("{}", detokenizer.push(token).unwrap_or_default());
            ControlFlow::Continue(())
        },
    )?;
    print!("{}", detokenizer.flush().unwrap_or_default());
    let rate = answer
        .stats
        .tokens_per_second()
        .context("one token has no rate")?;
    println!(
        "\n({} tokens, {rate:.0} a second, {})",
        answer.tokens.len(),
        engine.description()
    );
    Ok(())
}
