//! One file per subcommand, with its flags and its code.

pub mod bench;
pub mod chat;
pub mod convert;
pub mod doctor;
pub mod embed;
pub mod eval;
pub mod inspect;
pub mod models;
pub mod quantize;
pub mod reading;
pub mod rerank;
pub mod serve;
pub mod synth;

use crate::cli::{Cli, Command};
use crate::terminal::{leave_on_signals, print_line};
use clap::CommandFactory;
use std::process::ExitCode;

/// Runs the chosen subcommand.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let Cli { command, global } = cli;
    global.note_threads();
    match &command {
        Command::Chat(args) if args.server.is_some() => {}
        Command::Quantize(_)
        | Command::Chat(_)
        | Command::Serve(_)
        | Command::Embed(_)
        | Command::Rerank(_)
        | Command::Eval(_)
        | Command::Bench(_) => global.note_gpu(),
        _ => {}
    }
    // The other subcommands handle signals themselves.
    if !matches!(
        command,
        Command::Quantize(_) | Command::Chat(_) | Command::Serve(_)
    ) {
        leave_on_signals()?;
    }
    match command {
        Command::Quantize(args) => quantize::run(&args, &global),
        Command::Chat(args) => chat::run(&args, &global),
        Command::Serve(args) => serve::run(&args, &global),
        Command::Embed(args) => embed::run(&args, &global),
        Command::Rerank(args) => rerank::run(&args, &global),
        Command::Eval(args) => eval::run(&args, &global),
        Command::Bench(args) => bench::run(&args, &global),
        Command::Convert(args) => convert::run(&args, &global),
        Command::Inspect(args) => inspect::run(&args, &global),
        Command::List => models::list(&global),
        Command::Pull(args) => models::pull(&args, &global),
        Command::Rm(args) => models::remove(&args),
        Command::Doctor => doctor::run(&global),
        Command::Synth(args) => synth::run(&args, &global),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "nq", &mut script);
            print_line(String::from_utf8(script)?.trim_end())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
