//! `nq rerank`: how well documents answer a query.

use crate::cli::{Global, parse_load_bits};
use crate::commands::chat::at_load;
use crate::commands::embed::{Line, Lines, Session, check_length};
use crate::model;
use crate::terminal::{Terminal, print_line};
use clap::Args;
use nq_formats::{Progress, Task};
use nq_runtime::Tokenizer;
use nq_runtime::embedding::DEFAULT_TASK;
use nq_runtime::rerank::{Reranker, shared_beginning};
use serde_json::json;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Flags of `nq rerank`.
#[derive(Args, Debug)]
pub struct RerankArgs {
    /// A reranker: a folder, a hub id such as Qwen/Qwen3-Reranker-0.6B or a name from `nq list`
    pub model: OsString,
    /// Documents [default: lines of standard input]
    pub documents: Vec<String>,
    /// What the documents are to answer
    #[arg(short, long, value_name = "TEXT")]
    pub query: String,
    /// Read documents from this file, one a line; - is standard input
    #[arg(short, long, value_name = "FILE", conflicts_with = "documents")]
    pub file: Option<PathBuf>,
    /// What makes a document an answer
    #[arg(long, value_name = "TEXT", default_value = DEFAULT_TASK)]
    pub instruct: String,
    /// Print the best N alone
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
    /// Print documents in their own order, not the best first
    #[arg(long)]
    pub in_order: bool,
    /// Longest prompt in tokens, query and document [default: the model's, at most 8192]
    #[arg(long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Cut longer documents
    #[arg(long)]
    pub truncate: bool,
    /// Quantize an unquantized model at load: 4, 8 or 16 (keep it)
    #[arg(long, value_parser = parse_load_bits)]
    pub bits: Option<u32>,
}

/// Runs `nq rerank`.
pub fn run(args: &RerankArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let terminal = Terminal::new();
    let opened = model::open(Some(&args.model), global, &terminal)?;
    model::check_writes(&opened)?;
    if opened.checkpoint.task().clone().of_name(&opened.name) != Task::Rerank {
        terminal.note("this model is not known as a reranker: its scores may mean little");
    }
    let (checkpoint, _) = at_load(opened.checkpoint, args.bits, &terminal)?;
    // Before the model is loaded: what is wrong with the tokenizer or the texts need not wait.
    let reranker = Reranker::new(&Tokenizer::from_files(checkpoint.files())?)?;
    let documents = Lines::open(&args.documents, args.file.as_deref(), "text")?.take(usize::MAX)?;
    let mut session = Session::new(&checkpoint, reranker.row(), args.ctx, global, &terminal)?;
    let mut prompts = Vec::with_capacity(documents.len());
    for line in &documents {
        let (tokenizer, query) = (&session.tokenizer, &args.query);
        let mut ids = reranker.encode(tokenizer, &args.instruct, query, &line.text)?;
        if args.truncate {
            reranker.truncate(&mut ids, session.ctx);
        }
        check_length(line, &ids, session.ctx)?;
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
