//! `nq rerank`: how well documents answer a query.

use crate::at_load::at_load;
use crate::commands::reading::{Line, Lines, ReadArgs, Session};
use crate::flags::Global;
use crate::model;
use crate::terminal::{Terminal, print_line};
use clap::Args;
use nq_formats::{Progress, Task};
use nq_runtime::Tokenizer;
use nq_runtime::embedding::DEFAULT_TASK;
use nq_runtime::rerank::{Reranker, shared_beginning};
use serde_json::json;
use std::ffi::OsString;
use std::process::ExitCode;

/// Largest number of documents, and of bytes in all of them: their tokens are kept until all are ranked.
const MOST: (usize, usize) = (1 << 20, 256 << 20);

/// Flags of `nq rerank`.
#[derive(Args, Debug)]
pub(crate) struct RerankArgs {
    /// A reranker: a folder, a hub id such as Qwen/Qwen3-Reranker-0.6B or a name from `nq list`
    pub model: OsString,
    /// Documents [default: lines of standard input]
    #[arg(value_name = "DOCUMENTS")]
    pub texts: Vec<String>,
    /// The query that documents should answer
    #[arg(short, long, value_name = "TEXT")]
    pub query: String,
    #[command(flatten)]
    pub read: ReadArgs,
    /// Instruction that says when a document answers the query
    #[arg(long, value_name = "TEXT", default_value = DEFAULT_TASK)]
    pub instruct: String,
    /// Print only the best N
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
    /// Print documents in their own order, not the best first
    #[arg(long)]
    pub in_order: bool,
}

/// Runs `nq rerank`.
pub fn run(args: &RerankArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let terminal = Terminal::new();
    let opened = model::open(Some(&args.model), global, &terminal)?;
    model::check_writes(&opened)?;
    if opened.checkpoint.task().clone().of_name(&opened.name) != Task::Rerank {
        terminal.note("nothing marks this model as a reranker: its scores may be meaningless");
    }
    let (checkpoint, _) = at_load(opened.checkpoint, args.read.bits, &terminal)?;
    // Before the model is loaded: what is wrong with the tokenizer or the texts need not wait.
    let reranker = Reranker::new(&Tokenizer::from_files(checkpoint.files())?)?;
    let documents = Lines::open(&args.texts, args.read.file.as_deref())?.all(MOST.0, MOST.1)?;
    let mut session = Session::new(&checkpoint, reranker.row(), &args.read, global, &terminal)?;
    let mut prompts = Vec::with_capacity(documents.len());
    for line in &documents {
        let (tokenizer, query) = (&session.tokenizer, &args.query);
        let mut ids = reranker.encode(tokenizer, &args.instruct, query, &line.text)?;
        if args.read.truncate {
            reranker.truncate(&mut ids, session.ctx);
        }
        session.check_length(line, &ids)?;
        prompts.push(ids);
    }
    let mut scored: Vec<(f32, &Line)> = Vec::with_capacity(documents.len());
    let shared = shared_beginning(&prompts);
    let mut each = |i: usize, logits: &[f32]| {
        scored.push((reranker.score(logits), &documents[i]));
        Ok(())
    };
    session.encoder.encode(shared, &prompts, &mut each)?;
    let mut ranked = scored.clone();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0)); // of equals, the earlier first
    ranked.truncate(args.top.unwrap_or(usize::MAX));
    if args.in_order {
        ranked.sort_by_key(|(_, line)| line.index);
    }
    if global.json {
        let results = ranked.iter().map(|(score, line)| {
            let mut result = json!({
                "index": line.index, "relevance_score": score, "document": line.text,
            });
            if let Some(id) = &line.id {
                result["id"] = id.clone();
            }
            result
        });
        let results: Vec<_> = results.collect();
        let tokens: usize = prompts.iter().map(Vec::len).sum();
        let report = json!({"query": args.query, "results": results, "tokens": tokens});
        print_line(&format!("{report:#}"))?;
    } else {
        for (score, line) in ranked {
            print_line(&format!("{score:.4}\t{}\t{}", line.index, line.text))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
