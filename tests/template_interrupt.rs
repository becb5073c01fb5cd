//! An interrupt while a template runs, through the real binary.
#![cfg(all(feature = "demo", target_os = "linux"))]

use crate::common::{self, command};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The demo model with another template.
fn model(home: &std::path::Path, template: &str) -> String {
    let dir = home.join("model");
    std::fs::create_dir(&dir).unwrap();
    let demo = format!("{}/assets/demo", env!("CARGO_MANIFEST_DIR"));
    for entry in std::fs::read_dir(demo).unwrap() {
        let path = entry.unwrap().path();
        std::os::unix::fs::symlink(&path, dir.join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(dir.join("chat_template.jinja"), template).unwrap();
    dir.to_str().unwrap().to_owned()
}

#[test]
fn one_signal_ends_a_rendering() {
    // Slow instructions: neither the limit on them nor that on time is reached soon.
    let slow = "{% for i in range(9999) %}{% set x = range(99999)|list|tojson %}{% endfor %}";
    for (signal, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 130)] {
        let home = tempfile::tempdir().unwrap();
        let model = model(home.path(), slow);
        let mut child = command(
            home.path(),
            &["chat", &model, "-p", "hi", "--device", "cpu", "-v"],
        )
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
        // The template's process uses the CPU once rendering has begun.
        let begun = Instant::now();
        while !renders(child.id()) {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "no rendering began"
            );
            assert!(child.try_wait().unwrap().is_none(), "it ended early");
            std::thread::sleep(Duration::from_millis(10));
        }
        let sent = Instant::now();
        // SAFETY: the process is this test's child and has not been waited for.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(code));
        assert!(
            sent.elapsed() < Duration::from_secs(3),
            "{:?}",
            sent.elapsed()
        );
    }
}

/// True if a child of `parent` has used a tenth of a second of processor time.
fn renders(parent: u32) -> bool {
    let Ok(children) = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"))
    else {
        return false;
    };
    children.split_whitespace().any(|child| {
        let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        let times = stat.rsplit(')').next().unwrap_or_default();
        let user: u64 = times
            .split_whitespace()
            .nth(11)
            .and_then(|t| t.parse().ok())
            .unwrap_or(0);
        user >= 10
    })
}

#[test]
fn what_a_template_raises_is_cleaned_and_cut() {
    let home = tempfile::tempdir().unwrap();
    let model = model(
        home.path(),
        "{{ raise_exception('\x1b]52;c;cm0gLXJm\x07' ~ 'y' * 300000) }}",
    );
    let out = command(
        home.path(),
        &["chat", &model, "-p", "hi", "--device", "cpu"],
    )
    .stdin(Stdio::null())
    .output()
    .unwrap();
    assert_eq!(out.status.code(), Some(1));
    let said = common::stderr(&out);
    assert!(
        said.contains(r"\u001b]52;c;cm0gLXJm\u0007yyy"),
        "{said:.400}"
    );
    assert!(!said.contains(['\x1b', '\x07']), "{said:.400}");
    assert!(said.lines().all(|l| l.len() < 2000), "{}", said.len());
}
