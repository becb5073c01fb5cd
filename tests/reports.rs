//! The reports of `nq eval`: what they show and say of the demo model and of quantized copies of it.

#![cfg(feature = "demo")]

use crate::common::{nq, stderr};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// A home with `four` and `eight`, the demo rounded to 4 and to 8 bits, and three reports.
static HOME: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
    for (name, bits) in [("four", "4"), ("eight", "8")] {
        let how = ["--simple", "--bits", bits, "--method", "rtn"];
        let to = ["--no-measure", "--out", &path(name)];
        succeeds(
            home.path(),
            &[&["quantize", "demo"], &how[..], &to].concat(),
        );
    }
    let (four, eight) = (path("four"), path("eight"));
    let against = ["--against", "demo"];
    let (both, one) = ([&four[..], &eight], [&four[..]]);
    eval(home.path(), &both, &against, "both.html");
    eval(home.path(), &both, &against, "both.md");
    eval(home.path(), &one, &against, "one.html");
    eval(home.path(), &both, &[], "alone.html");
    home
});

fn succeeds(home: &Path, args: &[&str]) -> Vec<u8> {
    let out = nq(home, &[args, &["--device", "cpu", "--offline"]].concat());
    assert!(out.status.success(), "{args:?}: {}", stderr(&out));
    out.stdout
}

/// Ten windows: enough for standard errors over windows.
fn eval(home: &Path, models: &[&str], more: &[&str], report: &str) -> String {
    let report = home.join(report);
    let text = ["--text-bytes", "5000", "--ctx", "96", "--windows", "10"];
    let report = ["--report", report.to_str().unwrap()];
    let args = [&["eval"], models, more, &text[..], &report].concat();
    String::from_utf8(succeeds(home, &args)).unwrap()
}

fn report(name: &str) -> String {
    fs::read_to_string(HOME.path().join(name)).unwrap()
}

/// The part of a report from a heading to the next.
fn part<'a>(report: &'a str, heading: &str) -> &'a str {
    let from = report.split(&format!("<h2>{heading}</h2>")).nth(1);
    let from = from.unwrap_or_else(|| panic!("{heading} is not in {report}"));
    from.split("<h2>").next().unwrap()
}

fn holds(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn a_verdict_in_words_comes_first() {
    let one = report("one.html");
    let verdict = one.split("<table>").next().unwrap();
    holds(
        verdict,
        &[
            "<h1>four against demo</h1>",
            "four is 3.3 times smaller than demo. Its predictions differ from demo",
            "nats per token, ",
            "llama.cpp's Q",
            "prefer the same next token at ",
            "and perplexity changes by ",
        ],
    );
    holds(
        &one,
        &[
            "Yardstick: ",
            "Q4_K_M 0.0149 to 0.0325",
            "over the 10 windows",
        ],
    );
    let both = report("both.html");
    let verdicts = both.split("<table>").next().unwrap();
    holds(
        verdicts,
        &[
            "<li>four: mean KL divergence ",
            "<li>eight: mean KL divergence ",
        ],
    );
    holds(
        &report("alone.html"),
        &["--against SOURCE compares every token"],
    );
}

#[test]
fn several_models_are_rows_and_all_their_figures_columns() {
    let both = report("both.html").replace("&nbsp;", " ");
    let tables: Vec<&str> = both.split("<table>").skip(1).collect();
    let head = |i: usize| tables[i].split("</thead>").next().unwrap();
    assert_eq!(head(0).matches("<th").count() - 1, 8, "{}", head(0));
    // On a phone, where headings are hidden, each value has its own.
    let first = head(0).split("<th").skip(2);
    for name in first.map(|th| th.split(['>', '<']).nth(1).unwrap()) {
        let values = tables[0].matches(&format!("data-head=\"{name}")).count();
        assert!(values >= 2, "{name}: {}", tables[0]);
    }
    holds(
        head(1),
        &["<th>four</th><th>eight</th><th>demo (source)</th>"],
    );
    for figure in [
        "MB of tensors",
        "KLD 99.9 %",
        "KLD floor",
        "perplexity change",
        "RMS dp",
    ] {
        holds(tables[1], &[&format!("<td>{figure}</td>")]);
    }
    // Means have errors.
    for figure in [
        "KLD mean",
        "same best token",
        "perplexity",
        "perplexity change",
    ] {
        let row = tables[1]
            .split(&format!("<td>{figure}</td>"))
            .nth(1)
            .unwrap();
        let row = row.split("</tr>").next().unwrap();
        assert_eq!(row.matches(" ± ").count(), 2, "{figure}: {row}");
    }
    let markdown = report("both.md");
    holds(
        &markdown,
        &["|  | four | eight | demo (source) |", "| model | MB |"],
    );
}

#[test]
fn plots_show_the_source_the_yardstick_and_differences() {
    let both = report("both.html");
    let sizes = part(&both, "Size against quality");
    holds(sizes, &["demo: 0", "Q4_K_M", "four", "eight", "polyline"]);
    let tokens = part(&both, "KL divergence by token");
    holds(tokens, &["% of tokens above it", "var(--c0)", "var(--c1)"]);
    assert_eq!(
        tokens.matches("<circle").count(),
        2,
        "the means of two models"
    );
    holds(
        part(&both, "Change of perplexity by window"),
        &["change of perplexity, %"],
    );
    let one = report("one.html");
    holds(
        part(&one, "KL divergence by token"),
        &["median 0.", "mean 0.", "99 % 0."],
    );
    holds(
        part(&report("alone.html"), "Perplexity by window"),
        &["four", "eight"],
    );
}

#[test]
fn what_both_models_prefer_has_probabilities() {
    let rows = part_of_worst(&report("one.html"));
    assert_eq!(rows.len(), 10);
    for row in &rows {
        assert_eq!(row.matches("\u{a0}→\u{a0}").count(), 3, "{row}");
    }
    holds(&report("both.md"), &["` 0.", " → "]);

    let args = ["--against", "demo", "--json", "-v"];
    let four = HOME.path().join("four");
    let found = eval(HOME.path(), &[four.to_str().unwrap()], &args, "again.html");
    let found: Value = serde_json::from_str(&found).unwrap();
    let number = |v: &Value| v.as_f64().unwrap_or_else(|| panic!("{v} is no number"));
    let errors = &found[0]["errors"];
    assert_eq!(errors["over"], "windows");
    for name in ["ppl", "kld", "same_top1", "ln_ppl_ratio"] {
        assert!(number(&errors[name]) > 0.0, "{errors}");
    }
    for worst in found[0]["worst_tokens"].as_array().unwrap() {
        let p = |token: &str, side: &str| number(&worst[format!("{token}_p")][side]);
        for token in ["target", "reference_top", "model_top"] {
            for side in ["reference", "model"] {
                assert!((0.0..=1.0).contains(&p(token, side)), "{worst}");
            }
            // Nothing is more probable than the best token.
            assert!(p(token, "model") <= p("model_top", "model"), "{worst}");
            assert!(
                p(token, "reference") <= p("reference_top", "reference"),
                "{worst}"
            );
        }
    }
}

/// Rows of the table of a report's worst positions.
fn part_of_worst(report: &str) -> Vec<String> {
    let table = report.split("Where it strays most").nth(1).unwrap();
    let body = table.split("<tbody>").nth(1).unwrap();
    let body = body.split("</tbody>").next().unwrap();
    body.lines()
        .filter(|l| l.starts_with("<tr>"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_terminal_gives_the_verdict_too() {
    let (four, eight) = (HOME.path().join("four"), HOME.path().join("eight"));
    let models = [four.to_str().unwrap(), eight.to_str().unwrap()];
    let said = eval(
        HOME.path(),
        &models,
        &["--against", "demo", "-v"],
        "said.html",
    );
    holds(
        &said,
        &[
            "four: mean KL divergence ",
            "eight: mean KL divergence ",
            "reference demo, 27.80 MB, perplexity ",
            "KLD mean",
            " → ",
        ],
    );
}
