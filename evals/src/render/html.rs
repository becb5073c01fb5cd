//! Renders reports as one HTML file: styles and plots are inside it, and it loads nothing.

use super::plots;
use super::{Document, WORST_HEAD, depth_table, protocol_line, reference_lines, table, title};
use crate::error::Result;
use std::fmt::Write as _;

const STYLE: &str = "\
:root{color-scheme:light dark;--text:#1c1c1c;--page:#fff;--line:#d8d8d8;--note:#555}\
@media(prefers-color-scheme:dark){:root{--text:#e4e4e4;--page:#17191c;--line:#3b3f45;--note:#a8adb5}}\
body{font:17px/1.55 system-ui,sans-serif;max-width:78rem;margin:2rem auto;padding:0 1rem;\
color:var(--text);background:var(--page)}\
h1{font-size:1.7rem}h2{font-size:1.35rem;margin-top:2.2rem}h3{font-size:1.1rem}\
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}\
th,td{border-bottom:1px solid var(--line);padding:.35rem .6rem;text-align:right;vertical-align:top}\
th:first-child,td:first-child,td.text,th.text{text-align:left}\
.scroll{overflow-x:auto}code,pre{white-space:pre-wrap;font-size:.9em}\
td:not(.text),td:first-child,th{white-space:nowrap}svg{width:100%;height:auto}.note{color:var(--note)}";

/// The document as self-contained HTML.
///
/// # Errors
/// [`crate::Error::Plot`] if a plot cannot be drawn.
pub fn html(document: &Document<'_>) -> Result<String> {
    let mut out = String::from("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    let title = escape(&title(document));
    let _ = write!(
        out,
        "<meta name=\"viewport\" content=\"width=device-width\"><title>{title}</title>\
         <style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<p>Measured by {} on {}. Text: \
         {}.</p>\n<pre class=\"note\">{}</pre>\n",
        escape(&document.program),
        escape(&document.date),
        escape(&document.text),
        escape(&document.command)
    );
    if let Some(first) = document.models.first() {
        let _ = writeln!(out, "<p>{}.</p>", escape(&protocol_line(first.evaluation)));
    }
    for line in reference_lines(document) {
        let _ = writeln!(out, "<p>{}</p>", escape(&line));
    }
    let (head, rows) = table(document);
    push_table(&mut out, &head, &rows, 1);
    if document.models.len() > 1 {
        let _ = writeln!(
            out,
            "<h2>Bytes against quality</h2>\n{}",
            plots::bytes_against_quality(document)?
        );
    }
    if document.by_depth {
        let behind = match document.reference {
            Some(_) => " Grey: the perplexity of the reference.",
            None => "",
        };
        let note = format!("By the position in a window, with two standard errors.{behind}");
        let _ = writeln!(out, "<h2>By depth</h2>\n<p class=\"note\">{note}</p>");
        if document.reference.is_some() {
            out.push_str(&plots::kld_by_depth(document)?);
        }
        out.push_str(&plots::perplexity_by_depth(document)?);
    }
    let _ = writeln!(
        out,
        "<h2>Perplexity per window</h2>\n{}{}",
        match document.reference {
            Some(_) => "<p class=\"note\">Grey: the reference.</p>\n",
            None => "",
        },
        plots::window_perplexity(document)?
    );
    if document.reference.is_some() {
        let _ = writeln!(
            out,
            "<h2>Distribution of the KL divergence</h2>\n<p class=\"note\">Everything below 1e-7 is in \
             the first bin.</p>\n{}",
            plots::kld_distribution(document)?
        );
    }
    for model in &document.models {
        let _ = writeln!(
            out,
            "<h2>{}</h2>\n<p class=\"note\">Run by {}.</p>",
            escape(&model.name),
            escape(&model.engine)
        );
        if document.by_depth {
            out.push_str("<h3>By depth</h3>\n");
            let (head, rows) = depth_table(model);
            push_table(&mut out, &head, &rows, 1);
        }
        if !model.worst.is_empty() {
            out.push_str("<h3>Where it strays most</h3>\n");
            let rows: Vec<Vec<String>> = model
                .worst
                .iter()
                .map(|w| {
                    vec![
                        format!("{:.4}", w.kld),
                        format!("{}:{}", w.window, w.position),
                        format!("{:?}", w.context),
                        format!("{:?}", w.target),
                        format!("{:?}", w.reference_top),
                        format!("{:?}", w.model_top),
                    ]
                })
                .collect();
            push_table(&mut out, &WORST_HEAD, &rows, usize::MAX);
        }
    }
    out.push_str("</body></html>\n");
    Ok(out)
}

/// A table whose first `text_columns` columns are text, aligned left; the others are numbers.
fn push_table(
    out: &mut String,
    head: &[impl AsRef<str>],
    rows: &[Vec<String>],
    text_columns: usize,
) {
    let class = |i: usize| {
        if i < text_columns {
            " class=\"text\""
        } else {
            ""
        }
    };
    out.push_str("<div class=\"scroll\"><table><thead><tr>");
    for (i, h) in head.iter().enumerate() {
        let _ = write!(out, "<th{}>{}</th>", class(i), escape(h.as_ref()));
    }
    out.push_str("</tr></thead><tbody>\n");
    for row in rows {
        out.push_str("<tr>");
        for (i, cell) in row.iter().enumerate() {
            let _ = write!(out, "<td{}>{}</td>", class(i), escape(cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

/// Escapes text for HTML.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}
