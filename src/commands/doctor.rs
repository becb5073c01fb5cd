//! `nq doctor`: a report on this machine, with remedies for problems.

mod model;

use crate::flags::Global;
use crate::machine;
use crate::model::models_dir;
use crate::system;
use crate::terminal::{Terminal, human_bytes, print_line};
use clap::Args;
use model::ModelFinding;
use nq_cpu::Cpu;
use nq_formats::durable;
use nq_formats::hub::HubOptions;
use nq_kernels::{Isa, IsaChoice};
use nq_load::gpu;
use serde::Serialize;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Flags of `nq doctor`.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Also say what running this model takes: demo, a folder, a hub id, or a name from `nq list`
    pub model: Option<OsString>,
}

/// All findings, as `--json` prints them.
#[derive(Serialize)]
struct Findings {
    version: &'static str,
    features: Vec<&'static str>,
    cpu: CpuFindings,
    memory: MemoryFindings,
    gpu: GpuFindings,
    /// GPUs over Vulkan, Metal and Direct3D 12, for `--device wgpu:N`.
    adapters: Vec<AdapterFinding>,
    folders: Vec<UsedFolder>,
    environment: Vec<Variable>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<ModelFinding>,
    problems: Vec<Problem>,
}

#[derive(Serialize)]
struct CpuFindings {
    name: Option<String>,
    architecture: &'static str,
    features: Vec<&'static str>,
    isa: String,
    isas: Vec<&'static str>,
    logical_cores: usize,
    threads: usize,
    last_level_cache_bytes: u64,
}

#[derive(Serialize)]
struct MemoryFindings {
    total_bytes: Option<u64>,
    available_bytes: Option<u64>,
    read_gb_s: Option<f64>,
}

#[derive(Serialize)]
struct GpuFindings {
    built_in: bool,
    driver: Option<String>,
    devices: Vec<String>,
    /// The driver's description of each device that this build can use.
    usable: Vec<UsableGpu>,
    /// The implementation of f32 matrix products when quantizing on the first device.
    products: Option<String>,
    /// The oldest driver version that this build's kernels support.
    driver_needed: Option<u32>,
}

#[derive(Serialize)]
struct UsableGpu {
    name: String,
    memory_bytes: u64,
    compute_capability: String,
    multiprocessors: usize,
    driver_cuda: String,
    /// True if CUDA's Multi-Process Service shares it between processes.
    multi_process: bool,
    /// The rate at which its memory was read, in 10^9 bytes per second.
    read_gb_s: Option<f64>,
    /// The rate at which the computer's memory was copied to it, in 10^9 bytes per second.
    copied_gb_s: Option<f64>,
}

/// A GPU as its driver for Vulkan, Metal or Direct3D 12 presents it, or software that does as one would.
#[derive(Serialize)]
struct AdapterFinding {
    device: String,
    name: String,
    backend: &'static str,
    driver: String,
    kind: &'static str,
    lacks: Vec<String>,
}

fn adapters() -> Vec<AdapterFinding> {
    let finding = |a: nq_load::wgpu::AdapterFound| AdapterFinding {
        device: format!("wgpu:{}", a.ordinal),
        name: a.name,
        backend: a.backend,
        driver: a.driver,
        kind: a.kind,
        lacks: a.lacks,
    };
    nq_load::wgpu::adapters().into_iter().map(finding).collect()
}

/// The GPUs that this build can use, or why it can use none.
fn usable() -> Result<Vec<UsableGpu>, String> {
    let gpus = gpu::found().map_err(|e| e.to_string())?;
    let usable = |g: gpu::GpuFound| UsableGpu {
        name: g.name,
        memory_bytes: g.memory_bytes,
        compute_capability: format!("{}.{}", g.capability.0, g.capability.1),
        multiprocessors: g.multiprocessors,
        driver_cuda: format!("{}.{}", g.driver_cuda.0, g.driver_cuda.1),
        multi_process: g.multi_process,
        read_gb_s: g.bandwidth.map(|b| b / 1e9),
        copied_gb_s: g.copied.map(|b| b / 1e9),
    };
    Ok(gpus.into_iter().map(usable).collect())
}

#[derive(Serialize)]
struct UsedFolder {
    what: &'static str,
    path: PathBuf,
    exists: bool,
    free_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Variable {
    name: &'static str,
    value: String,
}

/// A problem and its remedy.
#[derive(Serialize)]
struct Problem {
    problem: String,
    remedy: String,
}

/// Runs `nq doctor`: the exit code is 0 whatever it finds on the machine, as nq runs anyway.
pub fn run(args: &DoctorArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let terminal = Terminal::new();
    let mut problems = Vec::new();
    let options = global.load_options();
    let findings = Findings {
        version: env!("CARGO_PKG_VERSION"),
        features: [
            (gpu::BUILT_IN, "cuda"),
            (cfg!(demo), "demo"),
            (nq_load::wgpu::BUILT_IN, "wgpu"),
        ]
        .into_iter()
        .filter_map(|(on, name)| on.then_some(name))
        .collect(),
        cpu: cpu(&options.isa, options.threads, &mut problems)?,
        memory: memory(&options, &terminal, &mut problems)?,
        gpu: gpu(&mut problems),
        adapters: adapters(),
        folders: folders(&mut problems),
        environment: environment(),
        model: (args.model.as_deref())
            .map(|name| model::find(name, global, &terminal, &mut problems))
            .transpose()?,
        problems,
    };
    if global.json {
        print_line(&serde_json::to_string_pretty(&findings)?)?;
    } else {
        print_line(&findings.to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// CPU features that kernels use, by their names in `/proc/cpuinfo`.
fn features() -> Vec<&'static str> {
    #[allow(unused_mut, reason = "stays empty on other targets")]
    let mut found: Vec<(&str, bool)> = Vec::new();
    #[cfg(target_arch = "x86_64")]
    found.extend([
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ]);
    #[cfg(target_arch = "aarch64")]
    found.extend([
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        (
            "dotprod",
            std::arch::is_aarch64_feature_detected!("dotprod"),
        ),
        ("i8mm", std::arch::is_aarch64_feature_detected!("i8mm")),
    ]);
    let present = found.into_iter().filter(|f| f.1);
    present.map(|f| f.0).collect()
}

fn cpu(
    choice: &IsaChoice,
    threads: Option<usize>,
    problems: &mut Vec<Problem>,
) -> anyhow::Result<CpuFindings> {
    let isa = choice.resolve()?;
    if isa == Isa::Scalar && *choice == IsaChoice::Auto {
        problems.push(Problem {
            problem: "this CPU has no vector instructions that nq has kernels for".into(),
            remedy: "expect a few tokens per second; AVX2 (x86-64) or dot product (Arm) makes it \
                     many times faster. In a virtual machine, pass the host's CPU features through"
                .into(),
        });
    } else if isa == Isa::Avx2 && *choice == IsaChoice::Auto {
        let missing: Vec<&str> = ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"]
            .into_iter()
            .filter(|f| !features().contains(f))
            .collect();
        if features().contains(&"avx512f") {
            problems.push(Problem {
                problem: format!(
                    "AVX-512 kernels are off: the CPU lacks {}",
                    missing.join(", ")
                ),
                remedy: "in a virtual machine, pass the host's CPU features through".into(),
            });
        }
    }
    Ok(CpuFindings {
        name: system::cpu_name(),
        architecture: std::env::consts::ARCH,
        features: features(),
        isa: isa.to_string(),
        isas: Isa::ALL
            .into_iter()
            .filter(|i| i.available())
            .map(Isa::name)
            .collect(),
        logical_cores: std::thread::available_parallelism().map_or(1, usize::from),
        threads: Cpu::new(threads, *choice)?.threads(),
        last_level_cache_bytes: system::last_level_cache(),
    })
}

fn memory(
    options: &nq_runtime::LoadOptions,
    terminal: &Terminal,
    problems: &mut Vec<Problem>,
) -> anyhow::Result<MemoryFindings> {
    let available = system::available_memory();
    let read_gb_s = machine::read_gb_s(options, terminal)?;
    if read_gb_s.is_none() {
        problems.push(Problem {
            problem: format!(
                "{} of memory are free: too little to measure its bandwidth",
                human_bytes(available.unwrap_or(0))
            ),
            remedy: "close other programs; Qwen3-0.6B at 4 bits needs about 1 GB, 8B about 6 GB"
                .into(),
        });
    }
    Ok(MemoryFindings {
        total_bytes: system::total_memory(),
        available_bytes: available,
        read_gb_s,
    })
}

fn gpu(problems: &mut Vec<Problem>) -> GpuFindings {
    let built_in = gpu::BUILT_IN;
    let (driver, devices) = (machine::driver(), machine::devices());
    if let (Some(version), false) = (&driver, built_in) {
        problems.push(Problem {
            problem: format!(
                "an NVIDIA driver ({version}) is here, but this nq was built for the CPU alone"
            ),
            remedy: "build with `cargo install --path .`, whose default features use the GPU"
                .into(),
        });
    }
    if let Some(why) = nq_load::device::Device::why_no_gpu() {
        problems.push(Problem {
            problem: format!("the GPU cannot be used: {why}"),
            remedy: format!(
                "install driver {} or newer, or in a container pass the GPU through; nq runs on \
                 the CPU meanwhile",
                gpu::driver_needed().unwrap_or_default()
            ),
        });
    }
    let usable = match usable() {
        Ok(usable) => usable,
        Err(why) => {
            // The reason why `auto` does not use it is reported above.
            if driver.is_some() && nq_load::device::Device::why_no_gpu().is_none() {
                problems.push(Problem {
                    problem: format!("the GPU cannot be used: {why}"),
                    remedy: "`--device cpu` runs on the CPU meanwhile".into(),
                });
            }
            Vec::new()
        }
    };
    if usable.iter().any(|g| g.multi_process) {
        problems.push(Problem {
            problem: "CUDA's Multi-Process Service is on: one sequence of a 4-bit model decodes more slowly, \
                      because the kernel that runs all layers at once needs the GPU for itself"
                .into(),
            remedy: "end the service, unless several programs share the GPU".into(),
        });
    }
    let mut products_found = None;
    if !usable.is_empty() {
        match gpu::products(0) {
            Ok(products) => products_found = Some(products),
            Err(why) => problems.push(Problem {
                problem: format!("the GPU cannot quantize: {why}"),
                remedy: "unset NQ_CUBLAS or correct it, if it is set".into(),
            }),
        }
    }
    GpuFindings {
        built_in,
        driver,
        devices,
        usable,
        products: products_found,
        driver_needed: gpu::driver_needed(),
    }
}

/// With less free space than this, a quantized 0.6B model does not fit.
const LITTLE_SPACE: u64 = 2_000_000_000;

fn folders(problems: &mut Vec<Problem>) -> Vec<UsedFolder> {
    let mut folders = Vec::new();
    let mut push = |what, path: Option<PathBuf>| match path {
        Some(path) => {
            let free = durable::available(&path).ok();
            if let Some(free) = free.filter(|&f| f < LITTLE_SPACE) {
                problems.push(Problem {
                    problem: format!(
                        "{what}: {} are free in {}",
                        human_bytes(free),
                        path.display()
                    ),
                    remedy: "free some space, or point HF_HOME (downloads) or NQ_HOME (nq's own \
                             models) to a larger disk"
                        .into(),
                });
            }
            if let Err(why) = durable::check_writable(&path) {
                problems.push(Problem {
                    problem: format!("{what}: {why}"),
                    remedy: "correct its permissions, or set HF_HOME or NQ_HOME to a folder of \
                             yours"
                        .into(),
                });
            }
            folders.push(UsedFolder {
                what,
                exists: path.exists(),
                free_bytes: free,
                path,
            });
        }
        None => problems.push(Problem {
            problem: format!("{what}: no folder for it is known"),
            remedy: "set HOME, or HF_HOME (downloads) and NQ_HOME (nq's own models)".into(),
        }),
    };
    push("hub cache", Some(HubOptions::from_env().cache));
    push("nq's models", models_dir().ok());
    folders
}

/// Environment variables that affect nq.
#[rustfmt::skip]
const VARIABLES: [&str; 10] = [
    "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN", "NQ_HOME", "XDG_DATA_HOME", "NO_COLOR",
    "NQ_CUBLAS", "CUDA_VISIBLE_DEVICES",
];

fn environment() -> Vec<Variable> {
    VARIABLES
        .into_iter()
        .filter_map(|name| {
            let value = std::env::var_os(name)?.to_string_lossy().into_owned();
            let value = if name == "HF_TOKEN" {
                "(set)".to_owned() // secret: reports are pasted into issues
            } else {
                value
            };
            Some(Variable { name, value })
        })
        .collect()
}

impl std::fmt::Display for Findings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = |b: Option<u64>| b.map_or("unknown".into(), human_bytes);
        let features = match self.features.as_slice() {
            [] => "no features".into(),
            some => some.join(", "),
        };
        writeln!(f, "nq {} ({features})", self.version)?;
        let c = &self.cpu;
        let name = c.name.as_deref().unwrap_or("unknown");
        writeln!(f, "\nCPU       {name} ({})", c.architecture)?;
        writeln!(f, "          features {}", c.features.join(" "))?;
        writeln!(f, "          kernels {} (of {})", c.isa, c.isas.join(", "))?;
        writeln!(
            f,
            "          {} threads on {} logical cores, last-level cache {}",
            c.threads,
            c.logical_cores,
            human_bytes(c.last_level_cache_bytes)
        )?;
        let m = &self.memory;
        writeln!(
            f,
            "memory    {} in all, {} available",
            bytes(m.total_bytes),
            bytes(m.available_bytes)
        )?;
        if let Some(rate) = m.read_gb_s {
            writeln!(
                f,
                "          reads {rate:.1} GB/s: an upper limit of {:.0} tok/s for Qwen3-0.6B at \
                 4 bits (0.39 GB a token)",
                rate / 0.387
            )?;
        }
        let gpu = match (self.gpu.built_in, &self.gpu.driver) {
            (false, None) => "none used: this build is for the CPU; no NVIDIA driver found".into(),
            (false, Some(v)) => format!("none used: this build is for the CPU; driver {v} found"),
            (true, None) => "no NVIDIA driver found".into(),
            (true, Some(v)) => format!("{} (driver {v})", self.gpu.devices.join(", ")),
        };
        writeln!(f, "GPU       {gpu}")?;
        for g in &self.gpu.usable {
            writeln!(
                f,
                "          {}: {}, compute capability {}, {} multiprocessors, driver for \
                 CUDA {}",
                g.name,
                human_bytes(g.memory_bytes),
                g.compute_capability,
                g.multiprocessors,
                g.driver_cuda
            )?;
            if let Some(rate) = g.read_gb_s {
                writeln!(f, "          its memory was read at {rate:.0} GB/s")?;
            }
            if let Some(rate) = g.copied_gb_s {
                writeln!(
                    f,
                    "          the computer's memory was copied to it at {rate:.1} GB/s"
                )?;
            }
        }
        if let Some(products) = &self.gpu.products {
            writeln!(f, "          quantizing multiplies by {products}")?;
            if !products.starts_with("cuBLAS") {
                writeln!(
                    f,
                    "          (cuBLAS, of the CUDA toolkit or pip's nvidia-cublas with NQ_CUBLAS \
                     naming its libcublas.so, does more steps of --method auto in the same time)"
                )?;
            }
        }
        if let Some(needed) = self.gpu.driver_needed {
            writeln!(
                f,
                "          this build's kernels need driver {needed} or newer"
            )?;
        }
        for a in &self.adapters {
            let AdapterFinding { device, name, .. } = a;
            writeln!(
                f,
                "{device:<9} {name}: {}, {}, {}",
                a.kind, a.backend, a.driver
            )?;
            for lacks in &a.lacks {
                writeln!(f, "          lacks {lacks}")?;
            }
        }
        for folder in &self.folders {
            writeln!(
                f,
                "folder    {}: {} ({}, {} free)",
                folder.what,
                folder.path.display(),
                if folder.exists {
                    "exists"
                } else {
                    "not yet made"
                },
                bytes(folder.free_bytes)
            )?;
        }
        for v in &self.environment {
            writeln!(f, "set       {}={}", v.name, v.value)?;
        }
        if let Some(model) = &self.model {
            write!(f, "{model}")?;
        }
        if self.problems.is_empty() {
            return write!(f, "\nno problems found");
        }
        for p in &self.problems {
            write!(f, "\nproblem: {}\n  -> {}", p.problem, p.remedy)?;
        }
        Ok(())
    }
}
