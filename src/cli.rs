//! The command line: subcommands and the flags that all of them share.
//! The flags of each subcommand are next to its code in [`crate::commands`].

use crate::commands;
use crate::terminal::say;
use clap::builder::styling::{AnsiColor, Styles};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use nq_kernels::KernelSet;
use nq_kernels::cpu::{Isa, IsaChoice};
use nq_runtime::{ActivationChoice, DeviceChoice, KvType, LoadOptions};

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Quantizes Qwen3 models to 4 and 8 bits with measured quality, and runs them fast.
#[derive(Parser)]
#[command(name = "nq", version = version(), styles = STYLES, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub global: Global,
}

#[derive(Subcommand)]
pub enum Command {
    /// Quantize a checkpoint to 3 to 8 bits and measure the loss in quality
    Quantize(commands::quantize::QuantizeArgs),
    /// Talk to a model
    #[command(visible_alias = "run")]
    Chat(commands::chat::ChatArgs),
    /// Serve models to many clients over HTTP, in OpenAI's and Anthropic's protocols
    Serve(commands::serve::ServeArgs),
    /// Compute embedding vectors of texts
    Embed(commands::embed::EmbedArgs),
    /// Score how well documents answer a query, with a reranker
    Rerank(commands::rerank::RerankArgs),
    /// Measure perplexity and, against a reference, KL divergence
    Eval(commands::eval::EvalArgs),
    /// Measure tokens per second and compare them with the memory bandwidth
    Bench(commands::bench::BenchArgs),
    /// Write a checkpoint in another format, without a change of its values if that format allows
    Convert(commands::convert::ConvertArgs),
    /// Show the contents of a checkpoint
    Inspect(commands::inspect::InspectArgs),
    /// Download a model from the hub into its cache
    Pull(commands::models::PullArgs),
    /// List the models in nq's own folder
    List,
    /// Remove a model from nq's own folder
    Rm(commands::models::RmArgs),
    /// Check this machine and say what to do about problems
    Doctor,
    /// Write a checkpoint with random weights in a published Qwen3 shape, for scale tests
    Synth(commands::synth::SynthArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Flags for how a model is run.
const RUNNING: [&str; 7] = [
    "device",
    "threads",
    "pin",
    "cpu-experts",
    "activations",
    "kernels",
    "isa",
];

/// Flags of [`Global`] that make no difference to a subcommand: they are taken, but its help does
/// not name them.
const OF_NO_USE: [(&str, &[&[&str]]); 9] = [
    ("embed", &[&["json"]]),
    ("pull", &[&RUNNING, &["verbose"]]),
    ("list", &[&RUNNING, &["offline", "verbose"]]),
    ("rm", &[&RUNNING, &["offline", "json", "verbose"]]),
    ("completions", &[&RUNNING, &["offline", "json", "verbose"]]),
    ("inspect", &[&RUNNING, &["verbose"]]),
    ("convert", &[&RUNNING, &["verbose"]]),
    (
        "synth",
        &[&[
            "device",
            "pin",
            "cpu-experts",
            "activations",
            "kernels",
            "isa",
            "offline",
            "verbose",
        ]],
    ),
    (
        "doctor",
        &[&[
            "cpu-experts",
            "activations",
            "kernels",
            "offline",
            "verbose",
        ]],
    ),
];

/// Ends of the subcommands' help.
const EXAMPLES: [(&str, &str); 15] = [
    (
        "quantize",
        "nq quantize demo --bits 4\n\
         nq quantize Qwen/Qwen3-0.6B --target-size 400MB --max-kld 0.05\n\
         nq quantize ./model --format gptq --out ./model-gptq",
    ),
    (
        "chat",
        "nq chat demo\n\
         nq chat Qwen3-0.6B-int4 -p \"Why is the sky blue?\" --no-think\n\
         nq chat demo --raw -p \"Once upon a time\" --stop \"The end\"\n\
         cat notes.txt | nq chat demo -p \"Summarize:\" --quiet",
    ),
    (
        "serve",
        "nq serve demo\n\
         nq serve Qwen3-0.6B-int4 --parallel 32 --ctx 8192\n\
         nq serve ./model --host 0.0.0.0 --api-key-file keys.txt --allow-host box.lan",
    ),
    (
        "embed",
        "nq embed Qwen/Qwen3-Embedding-0.6B --query \"What is the capital of France?\"\n\
         nq embed ./embedder -f passages.jsonl --out passages.npy --dimensions 256",
    ),
    (
        "rerank",
        "nq rerank Qwen/Qwen3-Reranker-0.6B --query \"Who wrote it?\" -f passages.txt --top 10",
    ),
    (
        "eval",
        "nq eval demo-int4 --against demo --report report.html\n\
         nq eval demo --protocol llama --text book.txt --json",
    ),
    (
        "bench",
        "nq bench demo-int4\n\
         nq bench --preset qwen3-8b --bits 4 -p 512 -n 64 --depth 4096",
    ),
    (
        "convert",
        "nq convert demo demo.gguf --format gguf\n\
         nq convert demo-int4 demo-int4.gguf --format gguf --requantize\n\
         nq convert model.gguf ./model --format nq --verify",
    ),
    (
        "inspect",
        "nq inspect demo-int4\nnq inspect model.gguf --verify",
    ),
    ("pull", "nq pull Qwen/Qwen3-0.6B"),
    ("list", "nq list\nnq list --json"),
    ("rm", "nq rm demo-int4"),
    ("doctor", "nq doctor"),
    ("synth", "nq synth qwen3-0.6b ./random"),
    (
        "completions",
        "nq completions bash > ~/.local/share/bash-completion/completions/nq",
    ),
];

/// The command line with its help: `nq --help` explains the flags of [`Global`]; the help of a
/// subcommand only lists those that affect it.
fn program() -> clap::Command {
    let plain = Cli::command();
    let shared: Vec<clap::Arg> = plain.get_arguments().cloned().collect();
    EXAMPLES.iter().fold(plain, |program, (name, lines)| {
        let of_no_use = OF_NO_USE.iter().find(|(of, _)| of == name);
        let is_of_use = |a: &&clap::Arg| {
            !of_no_use.is_some_and(|(_, flags)| flags.concat().contains(&a.get_id().as_str()))
        };
        let flags = shared
            .iter()
            .filter(is_of_use)
            .filter_map(clap::Arg::get_long);
        let flags: Vec<String> = flags.map(|long| format!("--{long}")).collect();
        let mut end = if flags.is_empty() {
            String::new()
        } else {
            format!("Shared options ({EXPLAINED}):\n  {}\n\n", flags.join(" "))
        };
        end += &format!("Examples:\n  {}", lines.replace('\n', "\n  "));
        // A subcommand's own argument replaces the shared one of the same name.
        let hidden = shared.iter().map(|a| a.clone().hide(true));
        program.mut_subcommand(name, |command| command.args(hidden).after_help(end))
    })
}

/// Where the shared flags are explained.
const EXPLAINED: &str = "nq --help explains them";

/// Parses the arguments of this process. Exits on a wrong command or a request for help.
pub fn parse() -> Cli {
    let matches = program().get_matches();
    Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit())
}

/// Flags that every subcommand takes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Shared options")]
pub struct Global {
    /// Where to run: auto, cpu, cuda or cuda:N
    #[arg(long, global = true, default_value = "auto", value_parser = parse_device)]
    pub device: DeviceChoice,
    /// CPU threads [default: one per physical core]
    #[arg(long, global = true, value_name = "N", value_parser = parse_threads)]
    pub threads: Option<usize>,
    /// Bind every CPU thread to a physical core (Linux)
    #[arg(long, global = true)]
    pub pin: bool,
    /// Of a mixture on a GPU: layers whose experts stay in the computer's memory and run on the CPU
    /// [default: as few as the GPU's memory requires]
    #[arg(
        long = "cpu-experts",
        id = "cpu-experts",
        global = true,
        value_name = "N"
    )]
    pub cpu_experts: Option<usize>,
    /// How inputs of the linear layers are rounded: auto, f32, bf16, int8 or int16; the
    /// last two may end in -g16, -g32, -g64 or -g128 for groups other than 32 and 128
    #[arg(long, global = true, value_name = "A", default_value = "auto")]
    pub activations: ActivationChoice,
    /// Fused kernels, or the plain ones used as reference
    #[arg(long, global = true, value_enum, default_value_t = KernelArg::Fused)]
    pub kernels: KernelArg,
    /// CPU instruction set
    #[arg(long, global = true, value_enum, default_value_t = IsaArg::Auto)]
    pub isa: IsaArg,
    /// Do not use the network
    #[arg(long, global = true)]
    pub offline: bool,
    /// Print the report as JSON on stdout
    #[arg(long, global = true)]
    pub json: bool,
    /// Print more (kernel choices, timings of stages)
    #[arg(short, long, global = true)]
    pub verbose: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum KernelArg {
    /// The fastest for the device
    Fused,
    /// Plain, unfused
    Reference,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum IsaArg {
    /// The best available
    Auto,
    /// Plain Rust
    Scalar,
    /// AVX2, FMA, F16C
    Avx2,
    /// AVX2 and 256-bit VNNI
    Avxvnni,
    /// AVX-512 with VNNI
    Avx512,
    /// AVX-512 with VNNI and BF16
    Avx512bf16,
    /// Arm NEON with dot product
    Neon,
}

impl Global {
    /// Prints a note if there are more threads than cores.
    pub fn note_threads(&self) {
        let cores = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
        if let Some(threads) = self.threads.filter(|&n| n > cores) {
            say(&format!(
                "nq: --threads {threads} on {cores} cores: slower than --threads {cores}"
            ));
        }
    }

    /// Prints a note on why the CPU is used if there is a GPU and `--device` does not ask for the CPU.
    pub fn note_gpu(&self) {
        if self.device != DeviceChoice::Auto {
            return;
        }
        if let Some(why) = DeviceChoice::why_no_gpu() {
            say(&format!(
                "nq: using the CPU (--device cpu leaves out this note): {why}"
            ));
        }
    }

    /// The library's load options for these flags.
    pub fn load_options(&self) -> LoadOptions {
        LoadOptions {
            device: self.device,
            threads: self.threads,
            pin: self.pin,
            cpu_experts: self.cpu_experts,
            activations: self.activations,
            kernels: match self.kernels {
                KernelArg::Fused => KernelSet::Fused,
                KernelArg::Reference => KernelSet::Reference,
            },
            isa: match self.isa {
                IsaArg::Auto => IsaChoice::Auto,
                IsaArg::Scalar => IsaChoice::Force(Isa::Scalar),
                IsaArg::Avx2 => IsaChoice::Force(Isa::Avx2),
                IsaArg::Avxvnni => IsaChoice::Force(Isa::AvxVnni),
                IsaArg::Avx512 => IsaChoice::Force(Isa::Avx512),
                IsaArg::Avx512bf16 => IsaChoice::Force(Isa::Avx512Bf16),
                IsaArg::Neon => IsaChoice::Force(Isa::Neon),
            },
            ..LoadOptions::default()
        }
    }
}

/// Exits as clap does for conflicting flags of `subcommand`, for conflicts that clap's
/// rules cannot express.
pub fn refuse(subcommand: &str, message: &str) -> ! {
    let mut program = program();
    program.build();
    let command = program
        .find_subcommand_mut(subcommand)
        .expect("named by its own code");
    command.error(ErrorKind::ArgumentConflict, message).exit()
}

/// Parses the bits that a model is quantized to at load; 16 for none.
pub fn parse_load_bits(s: &str) -> Result<u32, String> {
    match s {
        "3" | "4" | "5" | "6" | "8" | "16" => Ok(s.parse().expect("a number")),
        _ => Err("expected 3, 4, 5, 6, 8 or 16".into()),
    }
}

/// Parses the bits of the KV cache; 32 is for comparison with f32 references.
pub fn parse_kv(s: &str) -> Result<KvType, String> {
    match s {
        "8" => Ok(KvType::Int8),
        "16" => Ok(KvType::F16),
        "32" => Ok(KvType::F32),
        _ => Err("expected 8, 16 or 32".into()),
    }
}

fn parse_device(s: &str) -> Result<DeviceChoice, String> {
    match s.split_once(':') {
        None if s == "auto" => Ok(DeviceChoice::Auto),
        None if s == "cpu" => Ok(DeviceChoice::Cpu),
        None if s == "cuda" => Ok(DeviceChoice::Cuda(0)),
        Some(("cuda", n)) => n
            .parse()
            .map(DeviceChoice::Cuda)
            .map_err(|_| format!("cuda:N needs a number, found {n:?}")),
        _ => Err("expected auto, cpu, cuda or cuda:N".into()),
    }
}

fn parse_threads(s: &str) -> Result<usize, String> {
    match s.parse() {
        Ok(n @ 1..=1024) => Ok(n),
        _ => Err("expected 1 to 1024".into()),
    }
}

/// The version with the features of this build, as `--version` prints it.
fn version() -> &'static str {
    match (cfg!(feature = "cuda"), cfg!(demo)) {
        (true, true) => concat!(env!("CARGO_PKG_VERSION"), " (features: cuda, demo)"),
        (true, false) => concat!(env!("CARGO_PKG_VERSION"), " (features: cuda)"),
        (false, true) => concat!(env!("CARGO_PKG_VERSION"), " (features: demo)"),
        (false, false) => concat!(env!("CARGO_PKG_VERSION"), " (no features)"),
    }
}

#[cfg(test)]
mod tests {
    use super::{OF_NO_USE, RUNNING, program};
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
            let example = format!("Examples:\n  nq {}", command.get_name());
            assert!(help.contains(&example), "{help}");
        }
        // Each is explained once and listed where it has an effect.
        let shared = [&RUNNING[..], &["offline", "json", "verbose"]].concat();
        let quantize = built.find_subcommand_mut("quantize").unwrap();
        let help = quantize.render_long_help().to_string();
        let line = help.lines().find(|l| l.contains("--isa")).unwrap();
        let named: Vec<String> = shared.iter().map(|flag| format!("--{flag}")).collect();
        assert_eq!(line.trim(), named.join(" "));
        let first = |line: &str| line.trim().trim_start_matches("-v, ").to_owned();
        for flag in &named {
            let explained = help
                .lines()
                .filter(|&l| l != line)
                .find(|l| first(l).split_whitespace().next() == Some(flag));
            assert_eq!(explained, None);
        }
        let help = built.render_help().to_string();
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
