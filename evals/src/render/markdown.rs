//! Renders reports as Markdown.

use super::plots::Histogram;
use super::{Document, WORST_HEAD, WORST_NOTE};
use super::{depth_table, figures, notes, protocol_line, summary, title, verdicts};
use std::fmt::Write as _;

/// The document as GitHub-flavoured Markdown.
pub fn markdown(document: &Document<'_>) -> String {
    let mut out = format!("# {}\n\n", escape(&title(document)));
    for line in verdicts(document) {
        let _ = writeln!(out, "{}\n", escape(&line));
    }
    if document.models.len() > 1 {
        let (head, rows) = summary(document);
        push_table(&mut out, &head, &escaped(rows));
        out.push_str("\n## All figures\n\n");
    }
    let (head, rows) = figures(document);
    let head: Vec<String> = head.iter().map(|name| escape(name)).collect();
    push_table(&mut out, &head, &escaped(rows));
    out.push('\n');
    for line in notes(document) {
        let _ = writeln!(out, "{}\n", escape(&line));
    }
    let _ = writeln!(
        out,
        "Measured by {} on {}. Text: {}.\n\n    {}\n",
        document.program,
        document.date,
        escape(&document.text),
        document.command.replace(['\n', '\r'], " ")
    );
    if let Some(first) = document.models.first() {
        let _ = writeln!(out, "{}.", protocol_line(first.evaluation));
    }
    for model in &document.models {
        let _ = writeln!(
            out,
            "\n## {}\n\nRun by {}.",
            escape(&model.name),
            escape(&model.engine)
        );
        let e = model.evaluation;
        if document.by_depth {
            out.push_str("\n### By depth\n\n");
            let (head, rows) = depth_table(model);
            push_table(&mut out, &head, &rows);
        }
        let windows: Vec<Vec<String>> = e
            .window_ppl()
            .iter()
            .enumerate()
            .map(|(i, ppl)| {
                let mut row = vec![i.to_string(), format!("{ppl:.4}")];
                row.extend(e.window_kld().get(i).map(|k| format!("{k:.5}")));
                row
            })
            .collect();
        if !e.pairs.is_empty() {
            out.push_str("\n### KL divergence, share of tokens\n\n");
            let histogram = Histogram::new(e.pairs.iter().map(|p| p.kld), 1);
            let rows: Vec<Vec<String>> = histogram
                .bins()
                .map(|(low, high, share)| {
                    let bar = "#".repeat((share * 50.0).round() as usize);
                    vec![
                        format!("{low:.0e} to {high:.0e}"),
                        format!("{:.2} %", 100.0 * share),
                        format!("`{bar}`"),
                    ]
                })
                .collect();
            push_table(&mut out, &["KLD", "share", ""], &rows);
        }
        if !model.worst.is_empty() {
            let _ = writeln!(out, "\n### Where it strays most\n\n{WORST_NOTE}\n");
            let rows: Vec<Vec<String>> = model
                .worst
                .iter()
                .map(|w| {
                    let place = [
                        format!("{:.4}", w.kld),
                        format!("{}:{}", w.window, w.position),
                        code(&w.context),
                    ];
                    let tokens = w.tokens().map(|(token, p)| format!("{} {p}", code(token)));
                    place.into_iter().chain(tokens).collect()
                })
                .collect();
            push_table(&mut out, &WORST_HEAD, &rows);
        }
        out.push_str("\n### Windows\n\n");
        let head: &[&str] = if e.pairs.is_empty() {
            &["window", "perplexity"]
        } else {
            &["window", "perplexity", "mean KLD"]
        };
        push_table(&mut out, head, &windows);
    }
    out
}

fn push_table(out: &mut String, head: &[impl AsRef<str>], rows: &[Vec<String>]) {
    let names: Vec<&str> = head.iter().map(AsRef::as_ref).collect();
    let _ = writeln!(out, "| {} |", names.join(" | "));
    let _ = writeln!(out, "|{}", "---|".repeat(head.len()));
    for row in rows {
        let _ = writeln!(out, "| {} |", row.join(" | "));
    }
}

/// Text as a code span within a table cell.
fn code(text: &str) -> String {
    // `{:?}` makes line breaks and control characters visible.
    let shown = format!("{text:?}").replace('|', "\\|").replace('`', "'");
    format!("`{shown}`")
}

/// Cells of plain text.
fn escaped(rows: Vec<Vec<String>>) -> Vec<Vec<String>> {
    let row = |row: Vec<String>| row.iter().map(|cell| escape(cell)).collect();
    rows.into_iter().map(row).collect()
}

/// Plain text, of which nothing is read as Markdown or HTML: names of models and files may hold anything.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' | '`' | '*' | '_' | '[' | ']' | '<' | '>' | '|' | '#' | '~' | '&' => {
                out.extend(['\\', c])
            }
            c if c.is_control() => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_text() {
        let name = "a|b\n# c <img src=x> [d](e) `f` **g**";
        let shown = r"a\|b\n\# c \<img src=x\> \[d\](e) \`f\` \*\*g\*\*";
        assert_eq!(super::escape(name), shown);
    }
}
