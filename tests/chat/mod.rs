//! `nq chat` as its users run it: the real binary, scripts and a pseudo-terminal, on the demo
//! model.
#![cfg(all(feature = "demo", target_os = "linux"))]

mod daily;
use crate::common::{peak, program};
use crate::pty::Pty;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};

/// The binary, isolated from the user's own models and settings.
fn nq(home: &tempfile::TempDir) -> Command {
    let mut command = program();
    command
        .env("NQ_HOME", home.path())
        .env("HOME", home.path())
        .env("TERM", "xterm")
        .env_remove("NO_COLOR")
        .args(["chat", "demo", "--device", "cpu"]);
    command
}

fn home() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Runs with `input` on stdin.
fn run(args: &[&str], input: Option<&str>) -> Output {
    let home = home();
    let mut child = nq(&home)
        .args(args)
        .stdin(if input.is_some() {
            Stdio::piped()
        } else {
            Stdio::null()
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    if let Some(text) = input {
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(text.as_bytes()).unwrap();
    }
    child.wait_with_output().unwrap()
}

fn out(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn err(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// Flags for answers that do not depend on rounding.
const GREEDY: [&str; 4] = ["--temperature", "0", "--activations", "f32"];

fn with<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&GREEDY[..], args].concat()
}

/// The greedy continuation that transformers computed for a prompt of one user message, and that
/// message.
fn golden() -> (String, String) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo-golden.json");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let prompt = json["logits"][0]["text"].as_str().unwrap();
    let message = prompt
        .strip_prefix("<|im_start|>user\n")
        .and_then(|p| p.split_once("<|im_end|>"))
        .unwrap()
        .0;
    let text = json["greedy"][0]["text"].as_str().unwrap();
    (
        message.to_owned(),
        text.strip_suffix("<|im_end|>").unwrap().to_owned(),
    )
}

#[test]
fn a_prompt_is_answered_as_transformers_does() {
    let (message, answer) = golden();
    let output = run(&with(&["--no-think", "-p", &message]), None);
    assert!(output.status.success(), "{}", err(&output));
    assert_eq!(out(&output), format!("{answer}\n"));
    // Few figures, unless more are asked for.
    let brief = err(&output).lines().last().unwrap();
    assert!(
        brief.starts_with("nq: ") && brief.ends_with(" tok/s"),
        "{brief}"
    );
    let all = run(&with(&["--no-think", "-v", "-p", &message]), None);
    let last = err(&all).lines().last().unwrap();
    for part in [
        "nq: ",
        " tokens, first after ",
        " tok/s, ",
        " GB/s",
        "prompt 32 tokens",
    ] {
        assert!(last.contains(part), "{part} in {last}");
    }
    let piped = run(&with(&["--no-think"]), Some(&format!("{message}\n")));
    assert_eq!(out(&piped), out(&output), "{}", err(&piped));
}

#[test]
fn answers_depend_on_the_seed_alone() {
    let ask = |seed: &str| {
        let args = [
            "--seed",
            seed,
            "--temperature",
            "1",
            "-p",
            "Hello!",
            "--max-tokens",
            "30",
        ];
        let output = run(&args, None);
        assert!(output.status.success(), "{}", err(&output));
        out(&output).to_owned()
    };
    let first = ask("1");
    assert!(!first.trim().is_empty());
    assert_eq!(first, ask("1"));
    assert!((2..6).any(|seed| ask(&seed.to_string()) != first));
}

#[test]
fn json_holds_the_answer_and_its_figures() {
    let output = run(
        &with(&["--json", "--max-tokens", "5", "--no-think", "-p", "Hello!"]),
        None,
    );
    assert!(output.status.success(), "{}", err(&output));
    let json: serde_json::Value = serde_json::from_str(out(&output)).unwrap();
    assert_eq!(json["stop"], "max_tokens");
    assert_eq!(json["tokens"], 5);
    assert_eq!(json["model"], "demo");
    assert!(!json["answer"].as_str().unwrap().is_empty());
    assert!(json["tok_s"].as_f64().unwrap() > 0.0);
}

/// The demo model thinks before sums.
#[test]
fn thinking_stays_out_of_a_pipe() {
    let sum = "Tom has 3 apples and buys 4 more apples. How many apples does Tom have now?";
    let shown = run(&with(&["--max-tokens", "40", "-p", sum]), None);
    assert!(shown.status.success(), "{}", err(&shown));
    assert!(err(&shown).contains("<think>\n"), "{}", err(&shown));
    assert!(!out(&shown).contains("think>"), "{}", out(&shown));
    let hidden = run(
        &with(&["--max-tokens", "40", "--hide-thinking", "-p", sum]),
        None,
    );
    assert_eq!(out(&hidden), out(&shown));
    assert!(!err(&hidden).contains("think>"), "{}", err(&hidden));
    let off = run(
        &with(&["--max-tokens", "40", "--no-think", "-p", sum]),
        None,
    );
    assert!(!err(&off).contains("think>"), "{}", err(&off));
}

#[test]
fn failures_have_exit_codes_and_reasons() {
    let check = |args: &[&str], input, code, part: &str| {
        let output = run(args, input);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{args:?}: {}",
            err(&output)
        );
        assert!(err(&output).contains(part), "{part} in {}", err(&output));
        assert_eq!(out(&output), "");
    };
    check(&[], Some("  \n"), 1, "no prompt");
    check(&["-p", "x", "--top-p", "0"], None, 2, "top_p");
    check(&["-p", "x", "--stop", ""], None, 2, "--stop");
    check(&["-p", "x", "--raw", "--system", "y"], None, 2, "--system");
    check(
        &["-p", "x", "--ctx", "4096"],
        None,
        1,
        "--ctx: expected 2 to 1024",
    );
    check(&["-p", "x", "--no-such-flag"], None, 2, "--no-such-flag");
    check(
        &["-p", "x", "--on-overflow", "explode"],
        None,
        2,
        "drop-oldest",
    );
    check(&["-p", ""], Some(""), 1, "no prompt");
    let long = "word ".repeat(100);
    check(
        &["-p", &long, "--ctx", "64"],
        None,
        1,
        "context of 64 tokens",
    );
}

/// Piped text goes after the prompt; without any, nothing changes.
#[test]
fn a_prompt_goes_with_what_is_piped_in() {
    let answer = |prompt: &str, input: Option<&str>| -> serde_json::Value {
        let args = ["--max-tokens", "5", "--json", "-p", prompt];
        let output = run(&with(&args), input);
        assert!(output.status.success(), "{}", err(&output));
        let json: serde_json::Value = serde_json::from_str(out(&output)).unwrap();
        serde_json::json!([json["prompt_tokens"], json["answer"], json["thinking"]])
    };
    let both = answer("Name a word of this:", Some("the quick brown fox\n\n"));
    let typed = "Name a word of this:\n\nthe quick brown fox";
    assert_eq!(both, answer(typed, None));
    let alone = answer("Name a word of this:", None);
    assert_ne!(both, alone);
    assert_eq!(alone, answer("Name a word of this:", Some(" \n")));
    // The end of a typed prompt may switch thinking, the end of a piped text may not.
    let switched = answer(
        "Name a word of this: /no_think",
        Some("the quick brown fox"),
    );
    let off = answer(
        "Name a word of this:\n\nthe quick brown fox /no_think",
        None,
    );
    assert_eq!(switched, off);
    let quoted = answer("Name a word of this:", Some("fox /no_think"));
    let fox = answer("Name a word of this:", Some("fox"));
    assert_ne!(quoted[0], fox[0]);
}

/// The error says by how much it is too long, so that the user can cut the text or choose a context.
#[test]
fn a_piped_text_that_is_too_long_says_by_how_much() {
    let long = "word ".repeat(100);
    let count = |ctx: &str| {
        let output = run(
            &with(&["--ctx", ctx, "--max-tokens", "1", "-p", "x"]),
            Some(&long),
        );
        (output.status.code(), err(&output).to_owned())
    };
    let (code, said) = count("64");
    assert_eq!(code, Some(1), "{said}");
    let (_, more) = said.split_once(" tokens, ").expect(&said);
    let more: usize = more.split(' ').next().unwrap().parse().expect(&said);
    let enough = 64 + more;
    assert_eq!(count(&(enough - 1).to_string()).0, Some(1));
    assert_eq!(count(&enough.to_string()).0, Some(0));
}

/// A user who starts it without a terminal and leaves the pipe open learns what it waits for.
#[test]
fn an_open_pipe_is_waited_for_and_that_is_said() {
    let home = home();
    let mut child = nq(&home)
        .args(with(&["--max-tokens", "1", "-p", "Hello!"]))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    stderr.read_line(&mut said).unwrap();
    assert!(
        said.contains("standard input") && said.contains("< /dev/null"),
        "{said}"
    );
    drop(child.stdin.take());
    assert!(child.wait_with_output().unwrap().status.success());
}

#[test]
fn a_full_context_ends_the_answer_and_is_said() {
    let args = [
        "--ctx",
        "40",
        "--temperature",
        "5",
        "--top-k",
        "0",
        "--top-p",
        "1",
    ];
    let output = run(
        &[&args[..], &["--seed", "1", "-p", "Hello!"]].concat(),
        None,
    );
    assert!(output.status.success(), "{}", err(&output));
    assert!(
        err(&output).contains("the context of 40 tokens is full"),
        "{}",
        err(&output)
    );
}

#[test]
fn a_closed_pipe_is_success() {
    let home = home();
    let mut child = nq(&home)
        .args([
            "--temperature",
            "5",
            "--top-k",
            "0",
            "--top-p",
            "1",
            "-p",
            "Hello!",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
}

/// A part of the line after an answer of several tokens.
const SAID: &str = " tokens, ";

/// Starts a conversation in a pseudo-terminal and waits for its prompt.
fn terminal(home: &tempfile::TempDir, args: &[&str], env: &[(&str, &str)]) -> Pty {
    let mut command = nq(home);
    command.args(args).envs(env.iter().copied());
    let mut pty = Pty::spawn(command);
    pty.wait_for("/help lists the commands");
    pty.wait_for(">>> ");
    pty
}

#[test]
fn a_conversation_in_a_terminal() {
    let home = home();
    let mut pty = terminal(
        &home,
        &with(&["--no-think", "-v", "--system", "Be kind."]),
        &[],
    );
    pty.line("/help");
    pty.wait_for("answer the last message again");
    pty.answer(">>> ", "Hello!");
    pty.wait_for("of them cached");
    pty.answer(">>> ", "Tell me more.");
    // The second prompt includes the first turn, most of which was cached.
    let report = pty.wait_for("of them cached");
    assert!(!report.contains(" 0 of them cached"), "{report}");
    pty.answer(">>> ", "/system");
    pty.wait_for("Be kind.");
    pty.answer(">>> ", "/set temperature 0.5");
    pty.wait_for("temperature 0.5");
    pty.answer(">>> ", "/set top_p 7");
    pty.wait_for("top_p: expected above 0, up to 1, found 7");
    pty.answer(">>> ", "/nonsense");
    pty.wait_for("no command /nonsense");
    let file = home.path().join("chat.json");
    let path = file.to_str().unwrap();
    pty.answer(">>> ", &format!("/save {path}"));
    pty.wait_for("saved to");
    pty.answer(">>> ", &format!("/save {path}"));
    pty.wait_for("--force overwrites it");
    pty.answer(">>> ", "/stats");
    pty.wait_for("last answer: ");
    pty.wait_for("of them cached");
    pty.wait_for("2 answers");
    pty.answer(">>> ", "/clear");
    pty.wait_for("forgotten");
    pty.answer(">>> ", "/regen");
    pty.wait_for("no message to answer again");
    pty.answer(">>> ", &format!("/load {path}"));
    // What was said stands there again.
    let shown = pty.wait_for("5 messages from");
    for part in ["system: Be kind.", ">>> Hello!", ">>> Tell me more."] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    pty.answer(">>> ", "/bye");
    assert_eq!(pty.exit_code(), 0);
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(saved["messages"][0]["content"], "Be kind.");
    assert_eq!(saved["messages"][1]["content"], "Hello!");
    assert_eq!(saved["messages"][3]["content"], "Tell me more.");
    let history = std::fs::read_to_string(home.path().join("chat_history")).unwrap();
    assert!(history.contains("Tell me more."), "{history}");
}

#[test]
fn messages_of_several_lines() {
    let home = home();
    let mut pty = terminal(&home, &["--max-tokens", "3"], &[]);
    pty.line("\"\"\"");
    pty.wait_for("... ");
    pty.line("first");
    pty.wait_for("... ");
    pty.line("second\"\"\"");
    pty.wait_for(SAID);
    pty.answer(">>> ", "third\\");
    pty.wait_for("... ");
    pty.line("fourth");
    pty.wait_for(SAID);
    let file = home.path().join("chat.json");
    pty.answer(">>> ", &format!("/save {}", file.display()));
    pty.wait_for("saved to");
    pty.wait_for(">>> ");
    pty.send(b"\x04"); // Ctrl-D
    assert_eq!(pty.exit_code(), 0);
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(saved["messages"][0]["content"], "first\nsecond");
    assert_eq!(saved["messages"][2]["content"], "third\nfourth");
}

/// Lines that come at once, as from a program or a terminal that does not mark what is pasted.
#[test]
fn lines_in_one_burst_are_all_answered() {
    let home = home();
    let mut pty = terminal(&home, &["--max-tokens", "3"], &[]);
    pty.send(b"first\rsecond\r\"\"\"\ra\rb\r\"\"\"\r");
    for _ in 0..3 {
        pty.wait_for(SAID);
    }
    let file = home.path().join("chat.json");
    pty.answer(">>> ", &format!("/save {}", file.display()));
    pty.wait_for("saved to");
    pty.answer(">>> ", "/exit");
    assert_eq!(pty.exit_code(), 0);
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let said = |i: usize| {
        saved["messages"][2 * i]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert_eq!([said(0), said(1), said(2)], ["first", "second", "a\nb"]);
}

/// A temperature so high that the model babbles until the context is full.
const BABBLE: [&str; 8] = [
    "--temperature",
    "9",
    "--top-k",
    "0",
    "--top-p",
    "1",
    "--seed",
    "3",
];

#[test]
fn the_first_interrupt_stops_the_answer_and_the_next_leaves() {
    let home = home();
    let mut pty = terminal(&home, &BABBLE, &[]);
    pty.line("Hello!");
    // After the echo: the editor no longer reads keys, so the terminal sends signals.
    pty.wait_for("Hello!");
    pty.wait_for("\n");
    pty.wait_bytes(40);
    pty.send(b"\x03");
    pty.wait_for("; interrupted");
    pty.wait_for(">>> ");
    // The conversation continues.
    pty.line("/stats");
    pty.wait_for("1 answers");
    pty.wait_for(">>> ");
    pty.send(b"\x03");
    pty.wait_for("Ctrl-C again");
    pty.wait_for(">>> ");
    pty.send(b"\x03");
    pty.wait_for("this chat is kept in");
    assert_eq!(pty.exit_code(), 130);
}

#[test]
fn an_interrupted_script_leaves_with_130() {
    let home = home();
    let mut command = nq(&home);
    command.args(BABBLE).args(["-v", "-p", "Hello!"]);
    let mut pty = Pty::spawn(command);
    // The last note before the answer; after it, no progress is drawn.
    pty.wait_for("presence penalty");
    pty.wait_for("\n");
    pty.wait_bytes(40);
    pty.send(b"\x03");
    pty.wait_for("; interrupted");
    assert_eq!(pty.exit_code(), 130);
}

#[test]
fn thinking_is_dimmed_unless_colours_are_off() {
    let sum = "Tom has 3 apples and buys 4 more apples. How many apples does Tom have now?";
    let home = home();
    let mut pty = terminal(&home, &with(&["--max-tokens", "40"]), &[]);
    pty.line(sum);
    let text = pty.wait_for(SAID);
    assert!(
        text.contains("\x1b[2m") && text.contains("\x1b[0m"),
        "{text:?}"
    );
    assert!(!text.contains("<think>"), "{text:?}");
    pty.answer(">>> ", "/exit");
    assert_eq!(pty.exit_code(), 0);
    // While hidden thinking is written, a spinner shows.
    let mut pty = terminal(
        &home,
        &with(&["--max-tokens", "40", "--hide-thinking"]),
        &[],
    );
    pty.line(sum);
    let text = pty.wait_for(SAID);
    assert!(
        text.contains("thinking 0s") && !text.contains("\x1b[2m"),
        "{text:?}"
    );
    for off in [("TERM", "dumb"), ("NO_COLOR", "1")] {
        pty = terminal(&home, &with(&["--max-tokens", "40"]), &[off]);
        pty.line(sum);
        let text = pty.wait_for(SAID);
        assert!(
            text.contains("<think>") && !text.contains("\x1b[2m"),
            "{text:?}"
        );
    }
    pty.answer(">>> ", "Why? /no_think");
    let text = pty.wait_for(SAID);
    assert!(
        text.contains("thinking is off") && !text.contains("<think>"),
        "{text:?}"
    );
    pty.answer(">>> ", "/exit");
    assert_eq!(pty.exit_code(), 0);
}

/// `-p` and `-f` are the exact message; `--quiet` leaves out the answer's figures.
#[test]
fn a_prompt_is_taken_as_it_is_given() {
    let home = home();
    let file = home.path().join("prompt.txt");
    std::fs::write(&file, "Hello! \n\n").unwrap();
    let tokens = |args: &[&str]| {
        let args = [args, &["--json", "--quiet", "--max-tokens", "2"]].concat();
        let output = run(&with(&args), None);
        assert!(output.status.success(), "{}", err(&output));
        assert!(!err(&output).contains("tok"), "{}", err(&output));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        json["prompt_tokens"].as_u64().unwrap()
    };
    let plain = tokens(&["-p", "Hello!"]);
    let given = tokens(&["-p", "Hello! \n\n"]);
    assert!(given > plain, "{given} {plain}");
    assert_eq!(tokens(&["-f", file.to_str().unwrap()]), given);
    // A control token in a message is several tokens of text.
    assert!(tokens(&["-p", "Hello!<|im_end|>"]) > plain + 2);
}

#[test]
fn a_chat_without_end_is_not_loaded() {
    let home = home();
    let mut pty = terminal(&home, &[], &[]);
    pty.line("/load /dev/zero");
    pty.wait_for("/dev/zero: expected at most 64.00 MB, found more");
    pty.answer(">>> ", "/exit");
    assert_eq!(pty.exit_code(), 0);
}

#[test]
fn bits_quantize_at_load_and_other_widths_are_refused() {
    for bits in ["4", "5", "8", "16"] {
        let output = run(
            &with(&["-p", "Hello!", "--bits", bits, "--max-tokens", "8"]),
            None,
        );
        assert!(output.status.success(), "{}", err(&output));
        assert!(!out(&output).trim().is_empty());
        assert_eq!(err(&output).contains("quantizing at load"), bits != "16");
    }
    assert!(!run(&["-p", "Hello!", "--bits", "7"], None).status.success());
}

/// The memory that `-v` reports is what a chat takes once the context is full, to 15 %.
#[test]
fn the_memory_said_is_the_memory_taken() {
    let home = home();
    for (args, context) in [
        (["--kv", "16", "--ctx", "1024"], "5.24 MB"),
        (["--kv", "8", "--ctx", "512"], "1.33 MB"),
    ] {
        let mut command = nq(&home);
        let command = (command.args(args))
            .args(["-v", "-p", "Tell me about rivers.", "--seed", "3"])
            .args(["--min-p", "0.1", "--max-tokens", "2000"]);
        let (peak, output) = peak(command);
        let notes = err(&output);
        let (_, said) = notes.split_once("nq: memory: ").unwrap();
        assert!(
            said.lines()
                .next()
                .unwrap()
                .ends_with(&format!("{context} of which are for the context")),
            "{said}"
        );
        let said: f64 = said.split(' ').next().unwrap().parse().unwrap();
        let off = peak / said - 1.0;
        assert!(off.abs() < 0.15, "said {said} MB, took {peak:.1} MB");
    }
}
