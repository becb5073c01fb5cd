//! `nq inspect` on a model of 16 GB: sparse files, which take no space on disk.

#![cfg(target_os = "linux")]
#![allow(clippy::print_stdout, reason = "the test says what it measured")]

use crate::common::program;
use nq_formats::Checkpoint;
use nq_formats::gguf::{BlockType, GgufPlan, metadata, names};
use nq_model::Preset;
use nq_model::names::{Shape, parameters};
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::mem::MaybeUninit;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Writes `head` and leaves the rest of `bytes` as a hole.
fn sparse(path: &Path, head: &[u8], bytes: u64) {
    let mut file = File::create(path).unwrap();
    file.write_all(head).unwrap();
    file.set_len(bytes).unwrap();
}

/// Runs `nq inspect`: its output, processor time and peak memory.
#[expect(
    clippy::zombie_processes,
    reason = "wait4 waits for it, and gives its usage"
)]
fn inspect(path: &Path) -> (Value, Duration, u64) {
    let start = Instant::now();
    let mut child = program()
        .args(["inspect", "--json"])
        .arg(path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let report = serde_json::from_reader(child.stdout.take().unwrap()).unwrap();
    let (mut status, mut usage) = (0, MaybeUninit::<libc::rusage>::zeroed());
    // SAFETY: both pointers are to live variables of the types that wait4 fills; the child is
    // this test's own, and nothing else waits for it.
    let waited = unsafe { libc::wait4(child.id() as i32, &mut status, 0, usage.as_mut_ptr()) };
    assert_eq!((waited, status), (child.id() as i32, 0));
    // SAFETY: zeroes are a valid rusage, and wait4 has filled it.
    let usage = unsafe { usage.assume_init() };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    let busy = time(usage.ru_utime) + time(usage.ru_stime);
    let memory = usage.ru_maxrss as u64 * 1024;
    let name = path.file_name().unwrap_or_default().display();
    println!(
        "{name}: {:.3} s of processor time, {:.3} s by the clock, {:.1} MB of memory",
        busy.as_secs_f64(),
        start.elapsed().as_secs_f64(),
        memory as f64 / 1e6
    );
    (report, busy, memory)
}

/// Set in the process that measures.
const MEASURES: &str = "NQ_TEST_MEASURES";

/// The peak memory of a child counts what its parent had when it began it. Other tests of this program take much, so
/// that a process of its own measures.
#[test]
fn sixteen_gigabytes_are_inspected_in_a_second_and_little_memory() {
    if std::env::var_os(MEASURES).is_some() {
        return measure();
    }
    let name = "large_files::sixteen_gigabytes_are_inspected_in_a_second_and_little_memory";
    let mut alone = Command::new(std::env::current_exe().unwrap());
    alone
        .args(["--exact", name, "--nocapture"])
        .env(MEASURES, "");
    let said = alone.output().unwrap();
    let said = [said.stdout, said.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    println!("{said}");
    assert!(said.contains("1 passed"));
}

fn measure() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("8b");
    fs::create_dir(&folder).unwrap();
    let config = Preset::find("qwen3-8b").unwrap().config();
    let demo = nq_testkit::demo();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(demo.join(name), folder.join(name)).unwrap();
    }
    let text = Value::Object(nq_formats::config::to_json(&config)).to_string();
    fs::write(folder.join("config.json"), text).unwrap();

    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in parameters(&config) {
        let start = end;
        end += 2 * shape.elements() as u64;
        header.insert(
            format!("{name}.weight"),
            json!({"dtype": "BF16", "shape": shape.dims(), "data_offsets": [start, end]}),
        );
    }
    let mut header = Value::Object(header).to_string();
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let head = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    let weights = folder.join("model.safetensors");
    sparse(&weights, &head, head.len() as u64 + end);

    let mut plan = GgufPlan::new();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    metadata::describe_model(&mut plan, &checkpoint, "8b", 32);
    metadata::describe_tokenizer(&mut plan, &checkpoint).unwrap();
    for (name, shape) in parameters(&config) {
        let kind = match shape {
            Shape::Vector(_) => BlockType::F32,
            Shape::Matrix(..) => BlockType::BF16,
        };
        let name = format!(
            "{}.weight",
            names::to_gguf(config.architecture, config.num_hidden_layers, &name).unwrap()
        );
        plan.add(name, kind, shape.dims()).unwrap();
    }
    let gguf = dir.path().join("8b.gguf");
    sparse(&gguf, &plan.head(), plan.file_bytes());

    for (path, format) in [(&folder, "safetensors"), (&gguf, "gguf")] {
        let (report, busy, memory) = inspect(path);
        assert_eq!(report["format"], format);
        assert!(report["file_bytes"].as_u64().unwrap() > 16_000_000_000);
        let bits = report["bits_per_weight"].as_f64().unwrap();
        assert!((bits - 16.0).abs() < 0.01, "{bits}");
        // Processor time: wall time depends on other load.
        assert!(busy < Duration::from_secs(1), "{busy:?}");
        assert!(memory < 100_000_000, "{memory} bytes");
    }
}
