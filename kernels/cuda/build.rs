//! Finds the machine code of the `.cu` files here, which the library embeds, and writes what they declare in Rust
//! (`build/declarations.rs`).
//!
//! It comes from the crates in `kernels/prebuilt`, one for each family of GPUs. The manifest here says which sources
//! it was compiled from; if they differ, or the crates hold other code, the build fails.
//! With the feature `cuda-source` it is compiled here: `NVCC` then names the compiler; otherwise it is
//! looked for in `CUDA_HOME`, `CUDA_PATH`, `PATH`, `/usr/local/cuda` and the packages of a Python
//! environment (`NQ_NVCC_VENV`, `VIRTUAL_ENV`), where pip installs it. `NQ_CUDA_ARCHS` limits the
//! architectures during development, e.g. `90a`; such a library runs on those alone.

#[path = "build/declarations.rs"]
mod declarations;

use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

/// Machine code for these, and PTX for other devices from 10.0 on, the same as in `prebuilt/build`.
const TARGETS: [&str; 5] = ["sm_80", "sm_86", "sm_90a", "sm_120", "compute_100"];

const HOW_TO_GET_NVCC: &str = "\
no nvcc was found. It comes with the CUDA toolkit (then set CUDA_HOME or PATH), or without root
from pip:
    python3 -m venv ~/nvcc
    ~/nvcc/bin/pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' \\
        'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'
    NQ_NVCC_VENV=~/nvcc cargo build --features cuda-source
or set NVCC to the compiler. Without the feature `cuda-source` nothing of this is needed.";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    let sources = sources();
    for source in &sources {
        println!("cargo::rerun-if-changed={}", source.display());
    }
    let code = if feature("CUDA_SOURCE") {
        compile(&sources)
    } else {
        prebuilt(&sources)
    };
    // What code that is loaded at run time must have been compiled from.
    let list = if feature("IMITATE") {
        let lines = sources.iter().map(|path| source_line(path));
        let lines: Vec<String> = lines.map(|l| l["source ".len()..].to_owned()).collect();
        format!("pub(super) const SOURCES: &[&str] = &{lines:?};\n")
    } else {
        String::new()
    };
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let write = |name: &str, text: &str| {
        fs::write(Path::new(&out).join(name), text).expect("OUT_DIR can be written");
    };
    write("code.rs", &(code + &list));
    write("declared.rs", &declared(&sources));
}

fn feature(name: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{name}")).is_some()
}

/// Kernels and headers, sorted by name.
fn sources() -> Vec<PathBuf> {
    let dir = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let mut sources: Vec<PathBuf> = fs::read_dir(&dir)
        .unwrap_or_else(|e| fail(&format!("{}: {e}", dir.display())))
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "cu" || e == "cuh"))
        .collect();
    sources.sort();
    sources
}

/// The structures and constants of `sources` in Rust.
fn declared(sources: &[PathBuf]) -> String {
    let name = |path: &Path| {
        path.file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    };
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path);
        (
            name(path),
            text.unwrap_or_else(|e| fail(&format!("{}: {e}", path.display()))),
        )
    };
    let texts: Vec<(String, String)> = sources.iter().map(read).collect();
    let texts = texts
        .iter()
        .map(|(name, text)| (name.as_str(), text.as_str()));
    declarations::rust(texts).unwrap_or_else(|e| fail(&e))
}

/// Code by target.
type Code = &'static [(&'static str, &'static [u8])];

/// The crates of compiled kernels.
const CRATES: [(&str, Code); 4] = [
    ("nq_kernels_ampere", nq_kernels_ampere::CODE),
    ("nq_kernels_hopper", nq_kernels_hopper::CODE),
    ("nq_kernels_blackwell", nq_kernels_blackwell::CODE),
    ("nq_kernels_ptx", nq_kernels_ptx::CODE),
];

/// Checks that the crates hold the manifest's code, compiled from `sources`; returns the compiler's version and the
/// list of the code.
fn prebuilt(sources: &[PathBuf]) -> String {
    const REMEDY: &str = "kernels/prebuilt/build compiles them for all architectures (with nvcc, 15 \
        core-minutes); the feature cuda-source does without, by nvcc at each build (NQ_CUDA_ARCHS=90a \
        limits it to one architecture); --no-default-features builds for the CPU alone";
    let path = "manifest";
    println!("cargo::rerun-if-changed={path}");
    let manifest = fs::read_to_string(path)
        .unwrap_or_else(|e| fail(&format!("no prebuilt CUDA kernels: {path}: {e}\n{REMEDY}")));
    let told: Vec<&str> = manifest
        .lines()
        .filter(|l| l.starts_with("source "))
        .collect();
    let found: Vec<String> = sources.iter().map(|path| source_line(path)).collect();
    let other: Vec<&str> = told
        .iter()
        .copied()
        .filter(|line| !found.iter().any(|f| f == line))
        .chain(
            found
                .iter()
                .map(String::as_str)
                .filter(|f| !told.contains(f)),
        )
        .filter_map(|line| line.rsplit(' ').next())
        .collect();
    if !other.is_empty() {
        fail(&format!(
            "the prebuilt CUDA kernels were compiled from other sources; {path} and kernels/cuda \
             differ in: {}\n{REMEDY}",
            unique(other).join(", ")
        ));
    }
    let told = manifest.lines().filter_map(|l| l.strip_prefix("code "));
    let mut told: Vec<(&str, &str)> = told
        .filter_map(|l| l.split_once(' ')?.1.split_once(' '))
        .collect();
    let mut code =
        "/// Code by target, by crate.\nstatic CODE: &[&&[(&str, TargetCode)]] = &[".to_owned();
    for (name, targets) in CRATES {
        for (target, bytes) in targets {
            let hash = hash(bytes);
            let Some(at) = told.iter().position(|row| *row == (hash.as_str(), *target)) else {
                fail(&format!(
                    "the crate {name} has other code for {target} than {path} tells\n{REMEDY}"
                ));
            };
            told.remove(at);
        }
        code += &format!("&{name}::CODE,");
    }
    if let Some((_, target)) = told.first() {
        fail(&format!(
            "no crate has the code for {target} that {path} tells\n{REMEDY}"
        ));
    }
    let tool = |key| manifest.lines().find_map(|l| l.strip_prefix(key));
    let compiler = tool("compiler ").unwrap_or_else(|| fail(&format!("{path} names no compiler")));
    let assembler = tool("assembler ").unwrap_or(compiler);
    format!("{}{code}];\n", tools(compiler, assembler))
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// The line of a source in the manifest: its hash and name.
fn source_line(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_else(|e| fail(&format!("{}: {e}", path.display())));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    format!("source {} {name}", hash(&bytes))
}

fn unique(mut names: Vec<&str>) -> Vec<&str> {
    names.sort_unstable();
    names.dedup();
    names
}

/// Constants with the versions of what made PTX and machine code, which are like `13.0.88`.
fn tools(compiler: &str, assembler: &str) -> String {
    let version = |text: &str| {
        let mut parts = text.split('.').map(str::parse::<i32>);
        let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) else {
            fail(&format!("{text:?} is no version of a compiler"));
        };
        format!("Version::new({major}, {minor})")
    };
    format!(
        "/// CUDA version of what made PTX.\nconst COMPILER: Version = {};\n\
         /// CUDA version of what made machine code.\nconst ASSEMBLER: Version = {};\n",
        version(compiler),
        version(assembler)
    )
}

/// Compiles `sources` with nvcc, and returns the table of the results.
fn compile(sources: &[PathBuf]) -> String {
    for name in VARIABLES {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let Some(nvcc) = find_nvcc() else {
        fail(HOW_TO_GET_NVCC);
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let targets = targets();
    let jobs = jobs(sources, &targets, &out);
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
    let version = version(&nvcc);
    let mut code = tools(&version, &version);
    code +=
        "/// Fatbins by target, one for each source.\nstatic CODE: &[&[(&str, TargetCode)]] = &[&[";
    for target in &targets {
        code += &format!("({target:?}, &[");
        for job in jobs.iter().filter(|j| j.target == *target) {
            code += &format!("include_bytes!({:?}),", job.output);
        }
        code += "]),";
    }
    code + "]];\n"
}

/// The version that `nvcc --version` prints, e.g. `13.0.88`.
fn version(nvcc: &Path) -> String {
    let said = Command::new(nvcc).arg("--version").output();
    let said = said.unwrap_or_else(|e| fail(&format!("{}: {e}", nvcc.display())));
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let version = said.split_whitespace().find_map(|w| {
        let version = w.strip_prefix('V')?;
        version
            .starts_with(|c: char| c.is_ascii_digit())
            .then_some(version)
    });
    version
        .unwrap_or_else(|| fail(&format!("{} does not say its version", nvcc.display())))
        .to_owned()
}

/// Environment variables that a build depends on.
const VARIABLES: [&str; 7] = [
    "NVCC",
    "CUDA_HOME",
    "CUDA_PATH",
    "PATH",
    "NQ_NVCC_VENV",
    "VIRTUAL_ENV",
    "NQ_CUDA_ARCHS",
];

/// One source for one target.
struct CompileJob {
    source: PathBuf,
    target: String,
    output: PathBuf,
}

fn targets() -> Vec<String> {
    match env::var("NQ_CUDA_ARCHS") {
        Ok(archs) => archs
            .split(',')
            .map(|a| format!("sm_{}", a.trim()))
            .collect(),
        Err(_) => TARGETS.map(String::from).to_vec(),
    }
}

/// One fatbin per source and target, so that the compiler's work spreads over cores.
fn jobs(sources: &[PathBuf], targets: &[String], out: &Path) -> Vec<CompileJob> {
    let mut jobs = Vec::new();
    for source in sources
        .iter()
        .filter(|s| s.extension().is_some_and(|e| e == "cu"))
    {
        let stem = source.file_stem().unwrap_or_default().to_string_lossy();
        for target in targets {
            jobs.push(CompileJob {
                source: source.clone(),
                target: target.clone(),
                output: out.join(format!("{stem}.{target}.fatbin")),
            });
        }
    }
    jobs
}

impl CompileJob {
    fn run(&self, nvcc: &Path) -> Result<(), String> {
        let (_, arch) = self.target.split_once('_').unwrap_or_default();
        let mut command = Command::new(nvcc);
        command
            .args(["-O3", "-std=c++17", "-fatbin", "-gencode"])
            .arg(format!("arch=compute_{arch},code={}", self.target))
            .arg("-o")
            .arg(&self.output)
            .arg(&self.source);
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

/// The folders under an environment where pip puts nvcc: `lib/pythonX/site-packages/nvidia/*/bin`.
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
