//! With the feature `cuda`: compiles `cuda/*.cu` to fatbins, which the library embeds.
//!
//! `NVCC` names the compiler; otherwise it is looked for in `CUDA_HOME`, `CUDA_PATH`, `PATH`,
//! `/usr/local/cuda` and among the packages of a Python environment (`NQ_NVCC_VENV`,
//! `VIRTUAL_ENV`), where pip puts it. `NQ_CUDA_ARCHS` limits the architectures while developing,
//! e.g. `90a`; a library so built runs on those alone.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

/// Architectures with machine code; the last one's PTX serves newer devices.
const ARCHS: &str = "80,86,89,90a,120";

const HOW_TO_GET_NVCC: &str = "\
no nvcc was found. It comes with the CUDA toolkit (then set CUDA_HOME or PATH), or without root
from pip:
    python3 -m venv ~/nvcc
    ~/nvcc/bin/pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' \\
        'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'
    NQ_NVCC_VENV=~/nvcc cargo build --features cuda
or set NVCC to the compiler. Without the feature `cuda` nothing of this is needed.";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed=cuda");
    for name in VARIABLES {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let Some(nvcc) = find_nvcc() else {
        fail(HOW_TO_GET_NVCC);
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let jobs = jobs(&out);
    let next = AtomicUsize::new(0);
    let errors = Mutex::new(Vec::new());
    let threads = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok());
    thread::scope(|scope| {
        for _ in 0..threads.unwrap_or(1usize).min(jobs.len()) {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(e) = job.run(&nvcc) {
                        errors.lock().expect("no thread panics").push(e);
                    }
                }
            });
        }
    });
    if let Some(e) = errors.into_inner().expect("no thread panics").first() {
        fail(e);
    }
    let include = |j: &Job| format!("include_bytes!({:?}),", j.output);
    let list: String = jobs.iter().map(include).collect();
    let code = format!("&[{list}]");
    fs::write(out.join("fatbins.rs"), code).expect("OUT_DIR can be written");
}

/// What a build depends on besides the sources.
const VARIABLES: [&str; 7] = [
    "NVCC",
    "CUDA_HOME",
    "CUDA_PATH",
    "PATH",
    "NQ_NVCC_VENV",
    "VIRTUAL_ENV",
    "NQ_CUDA_ARCHS",
];

/// One source for one architecture: a cubin, or PTX as well for the newest.
struct Job {
    source: PathBuf,
    output: PathBuf,
    gencode: Vec<String>,
}

/// One fatbin per source and architecture, so that the compiler's work spreads over cores.
fn jobs(out: &Path) -> Vec<Job> {
    let archs = env::var("NQ_CUDA_ARCHS").unwrap_or_else(|_| ARCHS.into());
    let archs: Vec<&str> = archs.split(',').map(str::trim).collect();
    let dir = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("cuda");
    let mut sources: Vec<PathBuf> = fs::read_dir(&dir)
        .unwrap_or_else(|e| fail(&format!("{}: {e}", dir.display())))
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "cu"))
        .collect();
    sources.sort();
    let mut jobs = Vec::new();
    for source in &sources {
        let stem = source.file_stem().unwrap_or_default().to_string_lossy();
        for (i, arch) in archs.iter().enumerate() {
            let mut gencode = vec![format!("arch=compute_{arch},code=sm_{arch}")];
            // PTX of an architecture-specific target ("90a") runs on that one alone.
            if i + 1 == archs.len() && arch.bytes().all(|b| b.is_ascii_digit()) {
                gencode.push(format!("arch=compute_{arch},code=compute_{arch}"));
            }
            jobs.push(Job {
                source: source.clone(),
                output: out.join(format!("{stem}.{arch}.fatbin")),
                gencode,
            });
        }
    }
    jobs
}

impl Job {
    fn run(&self, nvcc: &Path) -> Result<(), String> {
        let mut command = Command::new(nvcc);
        command.args(["-O3", "-std=c++17", "-fatbin"]);
        for g in &self.gencode {
            command.arg("-gencode").arg(g);
        }
        command.arg("-o").arg(&self.output).arg(&self.source);
        let shown = format!("{command:?}");
        match command.output() {
            Err(e) => Err(format!("{}: {e}", nvcc.display())),
            Ok(o) if o.status.success() => Ok(()),
            Ok(o) => Err(format!(
                "{shown}\n{}{}",
                String::from_utf8_lossy(&o.stdout),
                String::from_utf8_lossy(&o.stderr)
            )),
        }
    }
}

fn find_nvcc() -> Option<PathBuf> {
    if let Some(nvcc) = env::var_os("NVCC") {
        let nvcc = PathBuf::from(nvcc);
        if !nvcc.is_file() {
            fail(&format!("NVCC={}: no such file", nvcc.display()));
        }
        return Some(nvcc);
    }
    let dirs = |name: &str| env::var_os(name).map(PathBuf::from);
    let mut places: Vec<PathBuf> = Vec::new();
    for root in ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|v| dirs(v)) {
        places.push(root.join("bin"));
    }
    let pythons = ["NQ_NVCC_VENV", "VIRTUAL_ENV"];
    if let Some(explicit) = dirs(pythons[0]) {
        places.extend(pip_places(&explicit));
    }
    if let Some(path) = env::var_os("PATH") {
        places.extend(env::split_paths(&path));
    }
    places.push("/usr/local/cuda/bin".into());
    if let Some(active) = dirs(pythons[1]) {
        places.extend(pip_places(&active));
    }
    places
        .into_iter()
        .map(|p| p.join(format!("nvcc{}", env::consts::EXE_SUFFIX)))
        .find(|p| p.is_file())
}

/// Where pip puts nvcc under an environment: `lib/pythonX/site-packages/nvidia/*/bin`.
fn pip_places(root: &Path) -> Vec<PathBuf> {
    let children = |dir: PathBuf| -> Vec<PathBuf> {
        let entries = fs::read_dir(dir).into_iter().flatten();
        entries.filter_map(|e| e.ok().map(|e| e.path())).collect()
    };
    let mut places = Vec::new();
    for python in children(root.join("lib")) {
        for package in children(python.join("site-packages").join("nvidia")) {
            places.push(package.join("bin"));
        }
    }
    places
}

fn fail(message: &str) -> ! {
    for line in message.lines() {
        println!("cargo::error={line}");
    }
    std::process::exit(1);
}
