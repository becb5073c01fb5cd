//! Comfort in a terminal conversation, and texts without a template.

use super::*;

/// Ctrl-C clears the line; previous entries are available in the next chat.
#[test]
fn nothing_typed_or_said_is_lost() {
    let home = home();
    let mut pty = terminal(&home, &with(&["--no-think", "--max-tokens", "8"]), &[]);
    pty.line("Hello!");
    pty.wait_for(SAID);
    pty.wait_for(">>> ");
    pty.send(b"half a line");
    pty.wait_for("half a line");
    pty.send(b"\x03");
    // Cleared, then another entry; then Ctrl-Y brings the line back.
    pty.line("/stats");
    pty.wait_for("1 answers");
    pty.wait_for(">>> ");
    pty.send(b"\x19");
    pty.wait_for("half a line");
    pty.send(b"\x03");
    pty.send(b"\x03");
    pty.wait_for("Ctrl-C again");
    pty.wait_for(">>> ");
    // Tab completes a command; a tilde is the home folder.
    pty.send(b"/sa\t~/kept.json\r");
    pty.wait_for("saved to");
    pty.answer(">>> ", "/help save");
    pty.wait_for("--force");
    pty.answer(">>> ", "/exit");
    assert_eq!(pty.exit_code(), 0);
    assert!(home.path().join("kept.json").exists());
    let mut pty = terminal(&home, &[], &[]);
    pty.line("/load");
    pty.wait_for("2 messages from");
    pty.answer(">>> ", "/exit");
    assert_eq!(pty.exit_code(), 0);
}

#[test]
fn lines_break_between_words_at_the_terminals_width() {
    let home = home();
    let mut command = nq(&home);
    command.args(with(&["--no-think", "--quiet", "--max-tokens", "60", "-p"]));
    command.arg("Tell me about the film The Silent River (1931).");
    let whole = {
        let home = self::home();
        let mut same = nq(&home);
        same.args(with(&["--no-think", "--quiet", "--max-tokens", "60", "-p"]));
        same.arg("Tell me about the film The Silent River (1931).");
        same.stdin(Stdio::null()).output().unwrap()
    };
    let mut pty = Pty::with_columns(command, 40);
    let words: Vec<&str> = out(&whole).split_whitespace().collect();
    let printed = pty.wait_for(words.last().unwrap());
    assert_eq!(pty.exit_code(), 0);
    let printed = &printed[printed.find(words[0]).unwrap()..]; // behind the progress bar
    let shown = without_taken_back(printed, 40);
    let lines: Vec<&str> = shown.lines().map(str::trim_end).collect();
    assert!(
        lines.len() > 3 && lines.iter().all(|l| l.chars().count() <= 40),
        "{shown:?}"
    );
    let again: Vec<&str> = shown.split_whitespace().collect();
    assert_eq!(again, words[..again.len()]);
}

/// What a terminal shows after a program has taken words back: cursor to the left, rest of the line erased.
fn without_taken_back(printed: &str, width: usize) -> String {
    let mut line = |line: &str| {
        let mut shown = String::new();
        for (i, part) in line.split("\x1b[").enumerate() {
            let (code, rest) = match i {
                0 => ("", part),
                _ => part.split_at(part.find(|c: char| c.is_ascii_alphabetic()).unwrap() + 1),
            };
            // In the last column, the cursor stays on the character.
            let at = shown.len().min(width - 1);
            match code.strip_suffix('D') {
                Some(n) => shown.truncate(at - n.parse::<usize>().unwrap()),
                None if code == "K" && shown.len() == width => shown.truncate(at),
                None => {}
            }
            shown.push_str(rest);
        }
        shown
    };
    let lines: Vec<String> = printed.lines().map(&mut line).collect();
    lines.join("\n")
}

/// Without a template the model continues the text itself, and an answer ends before a stop text.
#[test]
fn raw_text_goes_on_and_stop_texts_end_it() {
    let ask = |more: &[&str]| {
        let prompt = [
            "--raw",
            "-p",
            "The film was made in ",
            "--max-tokens",
            "30",
            "--json",
        ];
        let output = run(&with(&[&prompt[..], more].concat()), None);
        assert!(output.status.success(), "{}", err(&output));
        serde_json::from_str::<serde_json::Value>(out(&output)).unwrap()
    };
    let whole = ask(&[]);
    // Few tokens: a template would add its own.
    assert!(whole["prompt_tokens"].as_u64().unwrap() < 10, "{whole}");
    let text = whole["answer"].as_str().unwrap();
    let word = text.split_whitespace().nth(2).unwrap();
    let before = &text[..text.find(word).unwrap()];
    let stopped = ask(&["--stop", "no such text", "--stop", word]);
    assert_eq!(stopped["stop"], "stop_text");
    assert_eq!(stopped["answer"], before);
}
