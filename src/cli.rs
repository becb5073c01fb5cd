//! The command line: subcommands and the flags that all of them share.
//! The flags of each subcommand are next to its code in [`crate::commands`].

use crate::commands;
use crate::flags::{Conflict, Global};
use crate::terminal::{leave_on_signals, print_line, say};
use anyhow::Context;
use clap::builder::styling::{AnsiColor, Styles};
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::LazyLock;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Quantizes Qwen and Llama language models to 2 to 8 bits with measured quality, and runs them fast.
#[derive(Parser)]
#[command(name = "nq", version = version(), styles = STYLES, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub global: Global,
}

#[derive(Subcommand)]
pub enum Command {
    /// Quantize a model to 2 to 8 bits and measure the loss in quality
    Quantize(commands::quantize::QuantizeArgs),
    /// Talk to a model
    #[command(visible_alias = "run")]
    Chat(commands::chat::ChatArgs),
    /// Serve models over HTTP, in OpenAI's, Anthropic's and Ollama's protocols
    Serve(commands::serve::ServeArgs),
    /// Compute embedding vectors of texts
    Embed(commands::embed::EmbedArgs),
    /// Score how well documents answer a query, with a reranker
    Rerank(commands::rerank::RerankArgs),
    /// Measure perplexity and, against a reference, KL divergence
    Eval(commands::eval::EvalArgs),
    /// Rank quantized files of a model: which is closest to the source at its size
    Rank(commands::rank::RankArgs),
    /// Measure tokens per second and compare them with the memory bandwidth
    Bench(commands::bench::BenchArgs),
    /// Write a checkpoint in another format, exactly where that can hold its values
    Convert(commands::convert::ConvertArgs),
    /// Say which files of a model fit this machine or a card, and what they reach there
    Fit(commands::fit::FitArgs),
    /// Show the contents of a checkpoint
    Inspect(commands::inspect::InspectArgs),
    /// Download a model from the hub into its cache
    Pull(commands::models::PullArgs),
    /// List models: nq's own and downloads, or those in a folder
    List(commands::models::ListArgs),
    /// Remove a model of nq's own folder or a download
    Rm(commands::models::RmArgs),
    /// Check this machine, and a model beside it, and say what to do about problems
    Doctor(commands::doctor::DoctorArgs),
    /// Write a checkpoint with random weights in a published shape, for scale tests
    Synth(commands::synth::SynthArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write manual pages into a folder, for packages
    #[command(hide = true)]
    Man {
        /// The folder, which must be there
        folder: PathBuf,
    },
}

/// Flags for how a model is run.
#[rustfmt::skip]
const RUNNING: [&str; 9] = [
    "device", "split", "threads", "pin", "cpu-experts", "gpu-memory", "activations", "kernels", "isa",
];

/// Flags of [`Global`] that make no difference to a subcommand: they are taken, but its help does
/// not name them.
#[rustfmt::skip]
const OF_NO_USE: [(&str, &[&[&str]]); 12] = [
    ("rank", &[&["adapter", "verbose"]]),
    ("embed", &[&["json"]]),
    ("pull", &[&RUNNING, &["adapter", "verbose"]]),
    ("list", &[&RUNNING, &["adapter", "offline", "verbose"]]),
    ("rm", &[&RUNNING, &["adapter", "offline", "json", "verbose"]]),
    ("completions", &[&RUNNING, &["adapter", "offline", "json", "verbose"]]),
    ("man", &[&RUNNING, &["adapter", "offline", "json", "verbose"]]),
    ("inspect", &[&RUNNING, &["verbose"]]),
    ("fit", &[&["adapter", "split", "cpu-experts", "activations", "kernels", "verbose"]]),
    ("convert", &[&RUNNING, &["verbose"]]),
    ("synth", &[
        &["device", "split", "pin", "cpu-experts", "gpu-memory", "activations", "kernels", "isa", "adapter", "offline",
          "verbose"],
    ]),
    ("doctor", &[
        &["adapter", "split", "cpu-experts", "gpu-memory", "activations", "kernels", "verbose"],
    ]),
];

/// Flags that `-h` explains, of subcommands with more than fit a screen; `--help` explains all.
#[rustfmt::skip]
const EVERYDAY: [(&str, &[&str]); 5] = [
    ("quantize", &[
        "model", "bits", "trellis", "method", "target_size", "max_kld", "out", "name", "format", "dry_run",
        "resume", "force",
    ]),
    ("chat", &[
        "model", "prompt", "system", "no_think", "temperature", "max_tokens", "ctx", "kv", "bits", "draft",
        "server",
    ]),
    ("serve", &[
        "model", "models", "models_dir", "host", "port", "api_key_file", "parallel", "ctx", "kv", "kv_memory",
        "bits", "draft",
    ]),
    ("eval", &["models", "against", "protocol", "text", "text_bytes", "by_depth", "report"]),
    ("bench", &[
        "model", "preset", "bits", "trellis", "simple", "prompt_tokens", "gen_tokens", "depth", "batch", "text",
    ]),
];

/// Shared flags that `nq -h` explains.
const EVERYDAY_SHARED: &[&str] = &["device", "threads", "adapter", "offline", "json", "verbose"];

/// Ends of the subcommands' help.
#[rustfmt::skip]
const EXAMPLES: [(&str, &str); 18] = [
    ("quantize",
        "nq quantize demo --bits 4\n\
         nq quantize Qwen/Qwen3-0.6B --target-size 400MB --max-kld 0.05\n\
         nq quantize ./model --format gptq --out ./model-gptq"),
    ("chat",
        "nq chat demo\n\
         nq chat Qwen3-0.6B-int4 -p \"Why is the sky blue?\" --no-think\n\
         nq chat demo --raw -p \"Once upon a time\" --stop \"The end\"\n\
         cat notes.txt | nq chat demo -p \"Summarize:\" --quiet"),
    ("serve",
        "nq serve demo\n\
         nq serve Qwen3-0.6B-int4 --parallel 32 --ctx 8192\n\
         nq serve --models-dir /data/models --idle 15m\n\
         nq serve ./model --host 0.0.0.0 --api-key-file keys.txt --allow-host box.lan"),
    ("embed",
        "nq embed Qwen/Qwen3-Embedding-0.6B --query \"What is the capital of France?\"\n\
         nq embed ./embedder -f passages.jsonl --out passages.npy --dimensions 256"),
    ("rerank", "nq rerank Qwen/Qwen3-Reranker-0.6B --query \"Who wrote it?\" -f passages.txt --top 10"),
    ("eval",
        "nq eval demo-int4 --against demo --report report.html\n\
         nq eval demo --protocol llama --text book.txt --json"),
    ("rank",
        "nq rank demo demo-int4\n\
         nq rank Qwen/Qwen3-0.6B --list files.txt --report ranking.html"),
    ("bench",
        "nq bench demo-int4\n\
         nq bench --preset qwen3-8b --bits 4 -p 512 -n 64 --depth 4096"),
    ("convert",
        "nq convert demo demo.gguf --format gguf\n\
         nq convert demo-int4 demo-int4.gguf --format gguf --requantize\n\
         nq convert model.gguf ./model --format nq --verify"),
    ("inspect", "nq inspect demo-int4\nnq inspect model.gguf --verify"),
    ("fit",
        "nq fit qwen3:8b\n\
         nq fit Qwen/Qwen3-32B --gpu \"RTX 4090\" --context 16384\n\
         nq fit qwen3-30b-a3b --gpu \"2 x RTX 3090\" --clients 4"),
    ("pull", "nq pull Qwen/Qwen3-0.6B"),
    ("list", "nq list\nnq list /data/models --json"),
    ("rm", "nq rm demo-int4"),
    ("doctor", "nq doctor\nnq doctor demo"),
    ("synth", "nq synth qwen3-0.6b ./random"),
    ("man", "nq man /usr/share/man/man1"),
    ("completions", "nq completions bash > ~/.local/share/bash-completion/completions/nq"),
];

/// The command line with its help: `nq --help` explains the flags of [`Global`]; the help of a
/// subcommand only lists those that affect it.
fn program() -> clap::Command {
    let plain = Cli::command();
    let shared: Vec<clap::Arg> = plain.get_arguments().cloned().collect();
    let plain = plain
        .mut_args(|arg| first_sentence(arg, Some(EVERYDAY_SHARED)))
        .after_help("`nq --help` has all shared options, `nq COMMAND -h` those of a command.");
    EXAMPLES.iter().fold(plain, |program, (name, lines)| {
        let of_no_use = OF_NO_USE.iter().find(|(known, _)| known == name);
        let is_of_use = |a: &&clap::Arg| {
            !of_no_use.is_some_and(|(_, flags)| flags.concat().contains(&a.get_id().as_str()))
        };
        let flags = shared
            .iter()
            .filter(is_of_use)
            .filter_map(clap::Arg::get_long);
        let flags: Vec<String> = flags.map(|long| format!("--{long}")).collect();
        let examples = format!("Examples:\n  {}", lines.replace('\n', "\n  "));
        let more = if flags.is_empty() {
            String::new()
        } else {
            format!("Shared options ({EXPLAINED}):\n  {}\n\n", flags.join(" "))
        };
        let everyday = EVERYDAY
            .iter()
            .find(|(known, _)| known == name)
            .map(|e| e.1);
        let short = match everyday {
            Some(_) => format!("`nq {name} --help` has all options.\n\n{examples}"),
            None => format!("{more}{examples}"),
        };
        // A subcommand's own argument replaces the shared one of the same name.
        let hidden = shared.iter().map(|a| a.clone().hide(true));
        program.mut_subcommand(name, |command| {
            command
                .mut_args(|arg| first_sentence(arg, everyday))
                .args(hidden)
                .after_help(short)
                .after_long_help(format!("{more}{examples}"))
        })
    })
}

/// An argument of which `-h` prints the first sentence, if it is of `everyday` use or all are, and `--help` all.
fn first_sentence(arg: clap::Arg, everyday: Option<&[&str]>) -> clap::Arg {
    let hidden = everyday.is_some_and(|flags| !flags.contains(&arg.get_id().as_str()));
    let arg = arg.hide_short_help(hidden);
    let Some(text) = arg.get_help().map(ToString::to_string) else {
        return arg;
    };
    // What follows a point inside a sentence (e.g. a number) is no capital letter.
    let ends = |at: &usize| text[at + 2..].starts_with(|c: char| c.is_uppercase());
    let end = text.match_indices(". ").map(|(at, _)| at).find(ends);
    match end {
        Some(end) => arg.help(text[..end].to_owned()).long_help(text),
        None => arg,
    }
}

/// Where the shared flags are explained.
const EXPLAINED: &str = "nq --help explains them";

/// Parses a command line, the program's name first. Exits on a wrong command or a request for help.
pub fn parse(words: &[OsString]) -> Cli {
    let matches = program().try_get_matches_from(words);
    let cli = matches.and_then(|matches| Cli::from_arg_matches(&matches));
    cli.unwrap_or_else(|said| leave(&said))
}

/// Prints what is to be said, help or an error, and exits. Help that cannot be written is an error too, unless its
/// reader has gone.
fn leave(said: &clap::Error) -> ! {
    let written = said.print().and_then(|()| io::stdout().flush());
    let code = match written {
        Err(e) if !said.use_stderr() && e.kind() != io::ErrorKind::BrokenPipe => {
            say(&format!("nq: standard output: {e}"));
            1
        }
        _ => said.exit_code(),
    };
    std::process::exit(code)
}

/// Exits as clap does for conflicting flags.
pub(crate) fn refuse(conflict: &Conflict) -> ! {
    let mut program = program();
    program.build();
    let command = program
        .find_subcommand_mut(conflict.subcommand)
        .expect("named by its own code");
    let error = command.error(ErrorKind::ArgumentConflict, &conflict.message);
    leave(&error)
}

/// Runs the chosen subcommand.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    leave_on_signals()?;
    let Cli { command, global } = cli;
    let global = global.with_environment()?;
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
    match command {
        Command::Quantize(args) => commands::quantize::run(&args, &global),
        Command::Chat(args) => commands::chat::run(&args, &global),
        Command::Serve(args) => commands::serve::run(&args, &global),
        Command::Embed(args) => commands::embed::run(&args, &global),
        Command::Rerank(args) => commands::rerank::run(&args, &global),
        Command::Eval(args) => commands::eval::run(&args, &global),
        Command::Rank(args) => commands::rank::run(&args, &global),
        Command::Bench(args) => commands::bench::run(&args, &global),
        Command::Convert(args) => commands::convert::run(&args, &global),
        Command::Fit(args) => commands::fit::run(&args, &global),
        Command::Inspect(args) => commands::inspect::run(&args, &global),
        Command::List(args) => commands::models::list(&args, &global),
        Command::Pull(args) => commands::models::pull(&args, &global),
        Command::Rm(args) => commands::models::remove(&args),
        Command::Doctor(args) => commands::doctor::run(&args, &global),
        Command::Synth(args) => commands::synth::run(&args, &global),
        Command::Man { folder } => {
            clap_mangen::generate_to(manual(), &folder)
                .with_context(|| format!("{}: write manual pages", folder.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "nq", &mut script);
            print_line(String::from_utf8(script)?.trim_end())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The command line as manual pages show it: with the help of every flag, also of those that `-h` leaves out.
fn manual() -> clap::Command {
    let whole = |command: clap::Command| command.mut_args(|arg| arg.hide_short_help(false));
    whole(program()).mut_subcommands(whole)
}

/// The version with the features of this build, as `--version` prints it.
fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let features = [
            (nq_load::gpu::BUILT_IN, "cuda"),
            (cfg!(demo), "demo"),
            (nq_load::wgpu::BUILT_IN, "wgpu"),
        ];
        let features: Vec<&str> = (features.into_iter())
            .filter_map(|(on, name)| on.then_some(name))
            .collect();
        let number = env!("CARGO_PKG_VERSION");
        match features.is_empty() {
            true => format!("{number} (no features)"),
            false => format!("{number} (features: {})", features.join(", ")),
        }
    });
    &VERSION
}

#[cfg(test)]
mod tests {
    /// Lines of 100 columns that `-h` may take.
    const SCREEN: usize = 38;

    use super::{EVERYDAY, OF_NO_USE, RUNNING, program};
    use clap::FromArgMatches;

    #[test]
    fn flags_of_no_use_are_taken_and_left_out_of_help() {
        let mut built = program();
        built.build();
        for (name, flags) in OF_NO_USE {
            let command = built.find_subcommand_mut(name).unwrap();
            let help = command.render_long_help().to_string();
            for flag in flags.iter().copied().flatten() {
                assert!(!help.contains(&format!("--{flag}")), "{name}: {help}");
            }
        }
        for command in built
            .get_subcommands_mut()
            .filter(|c| c.get_name() != "help")
        {
            let help = command.render_help().to_string();
            let everyday = EVERYDAY
                .iter()
                .filter(|(name, _)| *name == command.get_name());
            for id in everyday.flat_map(|(_, ids)| ids.iter()) {
                assert!(command.get_arguments().any(|a| a.get_id() == *id), "{id}");
            }
            let lines = help.lines().count();
            assert!(lines <= SCREEN, "{lines} lines: {help}");
            let example = format!("Examples:\n  nq {}", command.get_name());
            assert!(help.contains(&example), "{help}");
        }
        // Each is explained once and listed where it has an effect.
        let shared = [&RUNNING[..], &["adapter", "offline", "json", "verbose"]].concat();
        let quantize = built.find_subcommand_mut("quantize").unwrap();
        let help = quantize.render_long_help().to_string();
        // The list may take several lines.
        let mut lines = help.lines().skip_while(|l| !l.contains("--isa"));
        let list: Vec<&str> = lines
            .by_ref()
            .take_while(|l| !l.trim().is_empty())
            .collect();
        let listed: Vec<&str> = list.iter().flat_map(|l| l.split_whitespace()).collect();
        let named: Vec<String> = shared.iter().map(|flag| format!("--{flag}")).collect();
        assert_eq!(listed, named);
        let first = |line: &str| line.trim().trim_start_matches("-v, ").to_owned();
        for flag in &named {
            let explained = help
                .lines()
                .filter(|l| !list.contains(l))
                .find(|l| first(l).split_whitespace().next() == Some(flag));
            assert_eq!(explained, None);
        }
        let help = built.render_help().to_string();
        assert!(help.lines().count() <= SCREEN, "{help}");
        let help = built.render_long_help().to_string();
        for flag in &named {
            assert!(help.lines().any(|l| first(l).starts_with(flag)), "{help}");
        }

        let words = [
            "nq", "list", "--device", "cpu", "-v", "--json", "--isa", "scalar",
        ];
        let matches = program().try_get_matches_from(words).unwrap();
        let cli = super::Cli::from_arg_matches(&matches).unwrap();
        assert!(cli.global.verbose && cli.global.json);
        assert_eq!(cli.global.device, nq_runtime::DeviceChoice::Cpu);
        let words = ["nq", "--threads", "1", "rm", "x", "--yes"];
        let matches = program().try_get_matches_from(words).unwrap();
        let cli = super::Cli::from_arg_matches(&matches).unwrap();
        assert_eq!(cli.global.threads, Some(1));
    }
}
