//! Writing survives a kill at any moment, a full disk, a second process and leftovers of earlier
//! runs. Children are this test program run again (see [`child`]).

use crate::common::{Rng, names, random_affine, random_dense};
use nq_formats::nq::{Opened, Param, QuantizationRecord, Writer, WriterOptions, verify};
use nq_formats::{
    AffineScheme, Bits, Checkpoint, Files, Group, QuantizedWeight, Result, Weight, Zeros,
};
use nq_model::Dims;
use nq_model::names::{Shape, parameters};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const DEST: &str = "NQ_TEST_DEST";
const FORCE: &str = "NQ_TEST_FORCE";
const NO_ESTIMATE: &str = "NQ_TEST_NO_ESTIMATE";

fn source() -> Files {
    Files::Folder(nq_testkit::demo())
}

fn plan() -> Value {
    json!({"bits": 4, "seed": 3})
}

fn options(force: bool) -> WriterOptions {
    WriterOptions {
        resume: true,
        force,
        expected_bytes: 8_600_000,
    }
}

/// Quantizes the demo model with random codes, one step per parameter, continuing staged
/// work. Contents depend on the parameter alone, as they would in a real run.
fn work(dest: &Path, options: WriterOptions) -> Result<()> {
    let writer = match Writer::open(dest, &source(), &plan(), options)? {
        Opened::Writer(writer) => writer,
        Opened::Complete => return Ok(()),
    };
    let demo = Checkpoint::open(&nq_testkit::demo())?;
    let scheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);
    for (i, (name, shape)) in parameters(demo.config()).into_iter().enumerate() {
        if writer.staged(&name)?.is_some() {
            continue;
        }
        let mut rng = Rng(i as u64);
        match shape {
            Shape::Vector(len) => {
                let tensor = random_dense(&mut rng, &[len]);
                writer.put(&name, &[(name.clone(), Param::Vector(&tensor))])?;
            }
            Shape::Matrix(rows, cols) => {
                let weight = random_affine(&mut rng, scheme, Dims::new(rows, cols), false);
                let weight = Weight::Quantized(QuantizedWeight::Affine(weight));
                writer.put(&name, &[(name.clone(), Param::Matrix(&weight))])?;
            }
        }
        writer.set_state(&json!({"done": i}))?;
    }
    let record = QuantizationRecord {
        method: "test".into(),
        ..Default::default()
    };
    writer.finish(record, &()).map(drop)
}

/// The body of a child process: does the work on the given folder or, as a test of its own,
/// on a temporary one. Prints any error.
#[test]
fn child() {
    let given = std::env::var_os(DEST).map(PathBuf::from);
    let dir = tempfile::tempdir().unwrap();
    let dest = given.clone().unwrap_or_else(|| dir.path().join("out"));
    let mut options = options(std::env::var_os(FORCE).is_some());
    if std::env::var_os(NO_ESTIMATE).is_some() {
        options.expected_bytes = 0;
    }
    match (work(&dest, options), given) {
        (Ok(()), _) => verify(&Checkpoint::open(&dest).unwrap()).unwrap(),
        (Err(e), Some(_)) => panic!("the work failed: {e}"),
        (Err(e), None) => panic!("{e}"),
    }
}

/// A command that runs [`child`] on `dest`, behind `shell` (which ends in `exec "$@"`).
fn child_command(dest: &Path, shell: &str) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", shell, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "crash::child", "--nocapture"])
        .env(DEST, dest)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Files of a folder by name.
type Contents = BTreeMap<String, Vec<u8>>;

fn contents(folder: &Path) -> Contents {
    let files = Files::Folder(folder.into());
    let names = files.names().unwrap();
    names
        .into_iter()
        .map(|n| (n.clone(), fs::read(folder.join(n)).unwrap()))
        .collect()
}

/// The files that an undisturbed run writes.
fn undisturbed() -> BTreeMap<String, Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join("out");
    work(&dest, options(false)).unwrap();
    contents(&dest)
}

/// Kills a run at random moments and continues it each time until it ends; returns the number of
/// kills. `full` is the time of an undisturbed run, so that kills hit every part of it.
fn kill_until_done(force: bool, full: Duration, rng: &mut Rng, expected: &Contents) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join("out");
    if force {
        // An older result, valid and different, which will be replaced.
        work(&dest, options(false)).unwrap();
        let config = dest.join("config.json");
        let text = fs::read_to_string(&config).unwrap();
        fs::write(&config, text.replace("\"test\"", "\"older\"")).unwrap();
    }
    let mut killed = 0;
    for _ in 0..200 {
        let mut command = child_command(&dest, "exec \"$@\"");
        if force {
            command.env(FORCE, "1");
        }
        let mut child = command.spawn().unwrap();
        std::thread::sleep(full.mul_f64(rng.below(100) as f64 / 100.0));
        let _ = child.kill();
        let status = child.wait().unwrap();
        // Whatever happened, the destination is whole if it exists.
        if dest.exists() {
            verify(&Checkpoint::open(&dest).unwrap()).unwrap();
        } else {
            assert!(
                !force,
                "the old folder was gone while the new one was not there"
            );
        }
        if status.success() {
            break;
        }
        killed += 1;
    }
    if force || !dest.exists() {
        work(&dest, options(force)).unwrap();
    }
    assert_eq!(&contents(&dest), expected);
    assert!(!dir.path().join("out.partial").exists());
    killed
}

#[test]
fn kills_lose_nothing() {
    let expected = undisturbed();
    let full = {
        let dir = tempfile::tempdir().unwrap();
        let start = Instant::now();
        let status = child_command(&dir.path().join("out"), "exec \"$@\"").output();
        assert!(status.unwrap().status.success());
        start.elapsed()
    };
    let mut rng = Rng(9);
    for force in [false, true] {
        let mut killed = 0;
        for _ in 0..50 {
            killed += kill_until_done(force, full, &mut rng, &expected);
            if killed > 4 {
                break;
            }
        }
        assert!(
            killed > 4,
            "only {killed} runs were killed before they ended"
        );
    }
}

fn failed(output: &Output, parts: &[&str]) {
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

fn steps(dest: &Path) -> usize {
    let steps = dest.with_file_name("out.partial").join("steps");
    fs::read_dir(steps).map_or(0, Iterator::count)
}

/// No file may grow beyond 2000 blocks: the embedding's step fails.
#[test]
fn a_failing_write_keeps_staged_work() {
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join("out");
    let limited = "trap '' XFSZ; ulimit -f 2000; exec \"$@\"";
    let output = child_command(&dest, limited).output().unwrap();
    failed(
        &output,
        &["the work failed", "steps/", "write", "too large"],
    );
    assert!(!dest.exists());
    work(&dest, options(false)).unwrap();
    assert_eq!(contents(&dest), undisturbed());
}

/// A real full disk, if the system lets this process mount one: with 5 MB, a step does not
/// fit; with 12 MB, 7.5 MB of steps fit, but not the result in addition.
#[test]
fn a_full_disk_keeps_staged_work() {
    let expected = undisturbed();
    for (size, least_steps) in [("5m", 1), ("12m", 50)] {
        let dir = tempfile::tempdir().unwrap();
        let [disk, copy] = ["disk", "copy"].map(|n| dir.path().join(n));
        fs::create_dir(&disk).unwrap();
        fs::create_dir(&copy).unwrap();
        let (disk, copy) = (disk.display(), copy.display());
        // The mount disappears with its namespace, so the files left on it are copied out.
        let script = format!(
            "mount -t tmpfs -o size={size} none {disk} && echo mounted && \"$@\"; s=$?
             cp -r {disk}/. {copy}/; exit $s"
        );
        let dest = dir.path().join("disk/out");
        let inner = child_command(&dest, &script);
        let output = Command::new("unshare")
            .arg("-m")
            .arg(inner.get_program())
            .args(inner.get_args())
            .env(DEST, &dest)
            .env(NO_ESTIMATE, "1")
            .output();
        match output {
            Ok(o) if o.stdout.starts_with(b"mounted") => {
                failed(&o, &["not enough disk space", "bytes needed", "available"]);
            }
            _ => return skip("this process may not mount a file system"),
        }
        let saved = dir.path().join("copy/out");
        assert!(!saved.exists());
        assert!(steps(&saved) >= least_steps, "{} steps", steps(&saved));
        work(&saved, options(false)).unwrap();
        assert_eq!(contents(&saved), expected);
    }
}

#[allow(clippy::print_stdout)]
fn skip(why: &str) {
    println!("skipped: {why}");
}

#[test]
fn beginnings_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join("out");
    let open = |plan: &Value, resume, force, expected_bytes| {
        let options = WriterOptions {
            resume,
            force,
            expected_bytes,
        };
        Writer::open(&dest, &source(), plan, options)
    };
    let partial = dir.path().join("out.partial");
    // Too large for any disk: refused before anything is written.
    names(
        open(&plan(), false, false, u64::MAX / 4),
        &[
            "not enough disk space",
            "9223372036854775806 bytes needed",
            "available",
        ],
    );
    assert!(!partial.exists());

    let Opened::Writer(first) = open(&plan(), false, false, 0).unwrap() else {
        panic!("nothing is there")
    };
    names(
        open(&plan(), true, false, 0),
        &["out.partial", "another process"],
    );
    assert!(nq_formats::nq::at_work(&partial));
    drop(first);
    // Nothing was staged, so nothing is left.
    assert!(!partial.exists() && !nq_formats::nq::at_work(&partial));
    let Opened::Writer(second) = open(&json!({"bits": 2, "seed": 3}), false, false, 0).unwrap()
    else {
        panic!("nothing is complete")
    };
    let norm = random_dense(&mut Rng(1), &[512]);
    let put = |w: &Writer, step: &str| w.put(step, &[("model.norm".into(), Param::Vector(&norm))]);
    put(&second, "norm").unwrap();
    names(put(&second, "../norm"), &["step name", "../norm"]);
    names(put(&second, ""), &["step name"]);
    assert!(second.state().unwrap().is_none());
    second.set_state(&json!({"n": 1})).unwrap();
    drop(second);
    names(
        open(&json!({"bits": 2, "seed": 3}), false, false, 0),
        &["out.partial", "--resume", "--force"],
    );
    names(
        open(&plan(), true, false, 0),
        &["plan.json", "expected {\"bits\":4}, found {\"bits\":2}"],
    );
    // Steps without their plan, which a kill while older work is removed leaves, cannot be continued: it begins anew.
    let half = dir.path().join("half");
    let begin = |resume| {
        let options = WriterOptions {
            resume,
            force: false,
            expected_bytes: 0,
        };
        Writer::open(&half, &source(), &plan(), options)
    };
    let Opened::Writer(killed) = begin(false).unwrap() else {
        panic!("nothing is complete")
    };
    put(&killed, "norm").unwrap();
    drop(killed);
    std::fs::remove_file(dir.path().join("half.partial/plan.json")).unwrap();
    names(begin(false), &["half.partial", "--force"]);
    let Opened::Writer(anew) = begin(true).unwrap() else {
        panic!("nothing is complete")
    };
    assert!(!anew.resumed() && anew.staged("norm").unwrap().is_none());
    drop(anew);
    let Opened::Writer(third) = open(&json!({"bits": 2, "seed": 3}), true, false, 0).unwrap()
    else {
        panic!("nothing is complete")
    };
    assert_eq!(third.state().unwrap().unwrap()["n"], 1);
    let staged = third.staged("norm").unwrap().unwrap();
    assert_eq!(
        staged.vector("model.norm", 512).unwrap().data(),
        norm.data()
    );
    assert!(third.staged("other").unwrap().is_none());
    // A folder with a parameter missing never reaches the destination.
    names(
        third.finish(QuantizationRecord::default(), &()),
        &["num_hidden_layers", "layer 0 has no tensor"],
    );
    assert!(!dest.exists());
    assert_eq!(steps(&dest), 1);
    let Opened::Writer(fourth) = open(&json!(3), false, true, 0).unwrap() else {
        panic!("nothing is complete")
    };
    assert_eq!(steps(&dest), 0);
    drop(fourth);

    fs::create_dir(&dest).unwrap();
    names(
        open(&plan(), false, false, 0),
        &["out", "already there", "--force"],
    );
    names(
        open(&plan(), true, false, 0),
        &["out", "already there", "--force"],
    );
}

/// Versions of a result are staged separately; a step that both have is one file, which neither changes.
#[test]
fn sets_of_steps_are_apart() {
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join("out");
    let open = |resume| {
        let options = WriterOptions {
            resume,
            ..WriterOptions::default()
        };
        match Writer::open(&dest, &source(), &plan(), options).unwrap() {
            Opened::Writer(writer) => writer,
            Opened::Complete => panic!("nothing is complete"),
        }
    };
    let norms = [1, 2].map(|seed| random_dense(&mut Rng(seed), &[512]));
    let put = |w: &Writer, step: &str, n: usize| {
        w.put(step, &[("model.norm".into(), Param::Vector(&norms[n]))])
            .unwrap();
    };
    let read = |w: &Writer, step: &str| {
        let staged = w.staged(step).unwrap()?;
        let found = staged.vector("model.norm", 512).unwrap();
        norms.iter().position(|n| n.data() == found.data())
    };

    let mut writer = open(false);
    assert!(!writer.resumed());
    put(&writer, "a", 0);
    put(&writer, "b", 0);
    writer.enter(2).unwrap();
    assert_eq!(writer.sets().unwrap(), [0, 2]);
    assert_eq!(read(&writer, "a"), None);
    writer.adopt(0, "a").unwrap();
    writer.adopt(0, "b").unwrap();
    assert_eq!(read(&writer, "a"), Some(0));
    put(&writer, "b", 1);
    drop(writer);

    let mut writer = open(true);
    assert!(writer.resumed());
    assert_eq!((read(&writer, "a"), read(&writer, "b")), (Some(0), Some(0)));
    writer.enter(2).unwrap();
    assert_eq!((read(&writer, "a"), read(&writer, "b")), (Some(0), Some(1)));
    writer.retain_sets(&[2]).unwrap();
    assert_eq!(writer.sets().unwrap(), [2]);
    assert_eq!(read(&writer, "a"), Some(0));
    assert!(writer.has_room(1).unwrap() && !writer.has_room(u64::MAX).unwrap());
    drop(writer);

    // Kept sets count as unfinished work, and are discarded with it.
    let refused = Writer::open(&dest, &source(), &plan(), WriterOptions::default());
    names(refused, &["out.partial", "--resume"]);
    let force = WriterOptions {
        force: true,
        ..WriterOptions::default()
    };
    let Opened::Writer(fresh) = Writer::open(&dest, &source(), &plan(), force).unwrap() else {
        panic!("nothing is complete")
    };
    assert_eq!(fresh.sets().unwrap(), [0]);
    drop(fresh);
    assert!(!dir.path().join("out.partial").exists());
}
