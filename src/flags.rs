//! Flags that several subcommands have, and what their values mean.

use crate::library::AdapterFile;
use crate::terminal::say;
use anyhow::bail;
use clap::{Args, ValueEnum};
use nq_formats::{Checkpoint, Progress};
use nq_kernels::{Isa, IsaChoice, KernelSet};
use nq_runtime::{ActivationChoice, DeviceChoice, KvType, LoadOptions, Split};
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The command line, the program's name first.
static COMMAND_LINE: OnceLock<Vec<OsString>> = OnceLock::new();

/// The command line of this process: `words` at the first call, the program's name first.
pub(crate) fn command_line(words: impl IntoIterator<Item = OsString>) -> &'static [OsString] {
    COMMAND_LINE.get_or_init(|| words.into_iter().collect())
}

/// The arguments of the command line, without the program's name.
pub(crate) fn arguments() -> impl Iterator<Item = &'static OsString> {
    COMMAND_LINE.get().into_iter().flatten().skip(1)
}

/// Flags that every subcommand takes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Shared options")]
pub(crate) struct Global {
    /// Where to run: auto, cpu, cuda, cuda:N, several GPUs: cuda:0,1 or cuda:all, or gpu, wgpu:N (Vulkan, Metal)
    #[arg(long, global = true, default_value = "auto")]
    pub device: DeviceChoice,
    /// How several GPUs divide the model: tensors (a part of every layer each) or layers [default: tensors, where the
    /// model and the GPUs allow it]
    #[arg(long, global = true, value_name = "HOW")]
    pub split: Option<Split>,
    /// CPU threads [default: NQ_THREADS or one per physical core]
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
    /// Most memory that nq takes on the GPU for models, keys and values, and activations, such as 12GB or 11.5GiB; the
    /// driver and kernels take some hundred MB more [default: what is free]
    #[arg(
        long = "gpu-memory",
        id = "gpu-memory",
        global = true,
        value_name = "SIZE",
        value_parser = parse_size
    )]
    pub gpu_memory: Option<u64>,
    /// How inputs of the linear layers are rounded: auto, auto-bf16 (the same, and bf16 for bf16 weights), f32,
    /// bf16, int8 or int16; the last two may end in -g16, -g32, -g64 or -g128 for groups other than 32 and 128
    #[arg(long, global = true, value_name = "A", default_value = "auto")]
    pub activations: ActivationChoice,
    /// Fused kernels, or the plain ones used as reference
    #[arg(long, global = true, value_enum, default_value_t = KernelArg::Fused)]
    pub kernels: KernelArg,
    /// CPU instruction set
    #[arg(long, global = true, value_enum, default_value_t = IsaArg::Auto)]
    pub isa: IsaArg,
    /// A LoRA or DoRA adapter: PEFT's folder, or a GGUF file. W multiplies it [default of W: 1]. It is merged
    /// into an unquantized model, and stays unmerged with a quantized one. NAME=FOLDER, for serve, leaves the
    /// model as it is, and clients ask for NAME (repeatable)
    #[arg(
        long = "adapter",
        id = "adapter",
        global = true,
        value_name = "[NAME=]FOLDER[=W]",
        value_parser = parse_adapter
    )]
    pub adapters: Vec<AdapterArg>,
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
pub(crate) enum KernelArg {
    /// The fastest for the device
    Fused,
    /// Plain, unfused
    Reference,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum IsaArg {
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

/// A value of `--adapter`.
#[derive(Clone, Debug)]
pub(crate) struct AdapterArg {
    /// The name that clients ask for it by.
    pub name: Option<String>,
    /// The folder or file.
    pub path: PathBuf,
    /// What multiplies it.
    pub weight: f64,
}

impl Global {
    /// The adapters, for a command that has one model, to which all of them apply.
    pub(crate) fn adapter_files(&self) -> anyhow::Result<Vec<AdapterFile>> {
        let file = |AdapterArg { name, path, weight }: &AdapterArg| match name {
            Some(name) => bail!(
                "--adapter {name}={}: names are for `nq serve`",
                path.display()
            ),
            None => Ok(AdapterFile {
                path: path.clone(),
                weight: *weight,
            }),
        };
        self.adapters.iter().map(file).collect()
    }

    /// The same for a further model, which the adapters are not for.
    pub(crate) fn without_adapters(&self) -> Global {
        Global {
            adapters: Vec::new(),
            ..self.clone()
        }
    }

    /// With what the environment says where the command line says nothing.
    ///
    /// # Errors
    /// If `NQ_THREADS` is no number of threads.
    pub(crate) fn with_environment(self) -> anyhow::Result<Global> {
        let threads = match (self.threads, std::env::var_os("NQ_THREADS")) {
            (None, Some(said)) if !said.is_empty() => {
                let parsed = parse_threads(&said.to_string_lossy());
                Some(parsed.map_err(|e| anyhow::anyhow!("NQ_THREADS: {e}, found {said:?}"))?)
            }
            (given, _) => given,
        };
        Ok(Global { threads, ..self })
    }

    /// Prints a note if there are more threads than cores.
    pub(crate) fn note_threads(&self) {
        let cores = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
        if let Some(threads) = self.threads.filter(|&n| n > cores) {
            say(&format!(
                "nq: --threads {threads} on {cores} cores: slower than --threads {cores}"
            ));
        }
    }

    /// Prints a note on why CUDA is not used if there is an NVIDIA GPU and `--device` does not ask for the CPU.
    pub(crate) fn note_gpu(&self) {
        if self.device != DeviceChoice::Auto {
            return;
        }
        if let Some(why) = nq_load::device::Device::why_no_gpu() {
            say(&format!(
                "nq: CUDA is not used (--device cpu leaves out this note): {why}"
            ));
        }
    }

    /// With the device that these flags mean for the model of `checkpoint`, run with what `beside` names
    /// ([`Device::for_model`]).
    ///
    /// [`Device::for_model`]: nq_load::device::Device::for_model
    pub(crate) fn for_model(
        &self,
        checkpoint: &Checkpoint,
        beside: Option<&str>,
        progress: &dyn Progress,
    ) -> Global {
        let of_model = nq_load::device::Device::for_model;
        Global {
            device: of_model(self.device, checkpoint, beside, progress),
            ..self.clone()
        }
    }

    /// The library's load options for these flags.
    pub(crate) fn load_options(&self) -> LoadOptions {
        LoadOptions {
            device: self.device,
            threads: self.threads,
            pin: self.pin,
            cpu_experts: self.cpu_experts,
            gpu_memory: (self.gpu_memory).map(|bytes| bytes.try_into().unwrap_or(usize::MAX)),
            split: self.split,
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

/// Flags of a subcommand that contradict one another in a way that clap's rules cannot express: the program ends
/// as clap ends it.
#[derive(Debug)]
pub(crate) struct Conflict {
    pub subcommand: &'static str,
    pub message: String,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Conflict {}

/// The error of flags of `subcommand` that contradict one another.
pub(crate) fn conflict(subcommand: &'static str, message: impl Into<String>) -> anyhow::Error {
    let message = message.into();
    Conflict {
        subcommand,
        message,
    }
    .into()
}

/// Parses the bits that a model is quantized to at load; 16 for none.
pub(crate) fn parse_load_bits(s: &str) -> Result<u32, String> {
    match s {
        "3" | "4" | "5" | "6" | "8" | "16" => Ok(s.parse().expect("a number")),
        _ => Err("expected 3, 4, 5, 6, 8 or 16".into()),
    }
}

/// Parses the bits of the KV cache; 32 is for comparison with f32 references.
pub(crate) fn parse_kv(s: &str) -> Result<KvType, String> {
    let kind = s.parse().ok().and_then(KvType::of_bits);
    kind.ok_or_else(|| "expected 8, 16 or 32".into())
}

fn parse_adapter(s: &str) -> Result<AdapterArg, String> {
    // A path may hold the sign.
    let exists = |path: &str| Path::new(path).exists();
    let weighed = s.rsplit_once('=').filter(|_| !exists(s));
    let weighed = weighed.and_then(|(path, weight)| Some((path, weight.parse().ok()?)));
    let (named, weight) = weighed.unwrap_or((s, 1.0));
    let (name, path) = match named.split_once('=').filter(|_| !exists(named)) {
        Some((name, path)) => (Some(name.to_owned()), path),
        None => (None, named),
    };
    let empty = path.is_empty() || name.as_ref().is_some_and(String::is_empty);
    match f64::is_finite(weight) && !empty {
        true => Ok(AdapterArg {
            name,
            path: path.into(),
            weight,
        }),
        false => {
            Err("expected a folder or file, with a name before = or a number behind it".into())
        }
    }
}

fn parse_threads(s: &str) -> Result<usize, String> {
    match s.parse() {
        Ok(n @ 1..=1024) => Ok(n),
        _ => Err("expected 1 to 1024".into()),
    }
}

/// Bytes: a number with a unit, such as `4GB` or `512MiB`.
pub(crate) fn parse_size(s: &str) -> Result<u64, String> {
    const UNITS: [(&str, f64); 7] = [
        ("KiB", 1024.0),
        ("MiB", 1_048_576.0),
        ("GiB", 1_073_741_824.0),
        ("KB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
        ("B", 1.0),
    ];
    let found = UNITS.iter().find_map(|&(unit, factor)| {
        let end = s.len().checked_sub(unit.len())?;
        let matches = s.is_char_boundary(end) && s[end..].eq_ignore_ascii_case(unit);
        matches.then(|| (&s[..end], factor))
    });
    let (number, factor) = found.unwrap_or((s, 1.0));
    match number.trim().replace('_', "").parse::<f64>() {
        Ok(x) if x > 0.0 && x * factor <= 1e15 => Ok((x * factor) as u64),
        _ => Err("expected a size such as 400MB, 1.5GB or 8580000".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::{parse_adapter, parse_size};

    #[test]
    fn adapters_have_names_and_weights() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a=b=2");
        std::fs::create_dir(&path).unwrap();
        let path = path.to_str().unwrap();
        let read = |text: &str| {
            let found = parse_adapter(text).unwrap();
            (found.name.unwrap_or_default(), found.path, found.weight)
        };
        for (text, name, path, weight) in [
            ("./style", "", "./style", 1.0),
            ("./style=0.5", "", "./style", 0.5),
            ("one=./style", "one", "./style", 1.0),
            ("one=./style=-2", "one", "./style", -2.0),
            (path, "", path, 1.0),
            (&format!("{path}=3"), "", path, 3.0),
        ] {
            assert_eq!(read(text), (name.to_owned(), path.into(), weight), "{text}");
        }
        for text in [
            "",
            "=",
            "=./style",
            "one=",
            "./style=inf",
            "one=./style=nan",
        ] {
            assert!(parse_adapter(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("8580000", 8_580_000),
            ("8_580_000", 8_580_000),
            ("400MB", 400_000_000),
            ("1.5 gb", 1_500_000_000),
            ("2KiB", 2048),
            ("7B", 7),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in [
            "", "MB", "0", "-1MB", "nan", "inf", "1e30GB", "4 apples", "é",
        ] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
