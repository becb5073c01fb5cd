//! Eight prompts answered at once: `cargo run --example eight_prompts -- FOLDER`, where FOLDER
//! holds a checkpoint, such as `assets/demo`.

use nq_formats::Checkpoint;
use nq_runtime::{Detokenizer, DraftedBy, KvType, LoadOptions, SessionSpec, Tokenizer};
use nq_serve::{Engine, EngineOptions, Event, Request};

#[allow(clippy::print_stdout, reason = "an example prints")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).ok_or("expected a folder")?;
    let checkpoint = Checkpoint::open(folder.as_ref())?;
    let tokenizer = Tokenizer::from_files(checkpoint.files())?;
    let options = LoadOptions::default();
    let model = nq_load::load(checkpoint.config(), checkpoint.store(), &options, &())?;
    let spec = SessionSpec {
        slots: 16,
        ctx: 512,
        pages: None,
        kv: KvType::F16,
        max_rows: 256,
        snapshots: None,
        drafts: DraftedBy::Nothing,
    };
    let vocab = checkpoint.config().vocab_size;
    let options = EngineOptions {
        parallel: 8,
        ..EngineOptions::default()
    };
    let engine = Engine::start(Box::new(move || model.session(spec)), vocab, options)?;

    let mut requests = Vec::new();
    for name in [
        "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry",
    ] {
        let prompt = tokenizer.encode(&format!("Once upon a time there was one called {name},"))?;
        requests.push(Request::new(prompt, 24));
    }
    let mut answers = engine.submit(requests)?;
    let mut texts = vec![String::new(); 8];
    let mut readers: Vec<Detokenizer> =
        (0..8).map(|_| Detokenizer::new(&tokenizer, true)).collect();
    while let Some((which, event)) = answers.next_blocking() {
        match event {
            Event::Token { id, .. } => texts[which].extend(readers[which].push(id)),
            Event::Finished(finish) => println!("{which} ({finish:?}):{}", texts[which]),
            Event::Started { .. } | Event::Row(_) => {}
        }
    }
    Ok(())
}
