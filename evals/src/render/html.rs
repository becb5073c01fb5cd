//! Renders reports as one HTML file: styles and plots are inside it, and it loads nothing.

use super::{Document, Section, WORST_HEAD, WORST_NOTE, plots};
use super::{depth_table, figures, notes, protocol_line, summary, title, verdicts};
use crate::error::Result;
use std::fmt::Write as _;

const STYLE: &str = "\
:root{color-scheme:light dark;--text:#1c1c1c;--page:#fff;--line:#d8d8d8;--note:#555;\
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#e69f00;--c5:#56b4e9;--c6:#8c564b}\
@media(prefers-color-scheme:dark){:root{--text:#e4e4e4;--page:#17191c;--line:#3b3f45;--note:#a8adb5;\
--c0:#4aa8e0;--c1:#f08a3c;--c2:#35c79d;--c3:#dd9cc0;--c4:#f0b640;--c5:#8fd0f5;--c6:#c08f84}}\
body{font:16px/1.55 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;\
color:var(--text);background:var(--page)}\
h1{font-size:1.6rem;line-height:1.25;overflow-wrap:anywhere}h2{font-size:1.3rem;margin-top:2.4rem}\
h3{font-size:1.05rem}.lead{font-size:1.1rem}ul.lead{padding-left:1.2rem}\
p,ul{max-width:50rem}table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}\
th,td{border-bottom:1px solid var(--line);padding:.3rem .6rem;text-align:right;vertical-align:top}\
th:first-child,td:first-child,td.text,th.text{text-align:left}td:first-child,th:first-child{position:sticky;left:0;background:var(--page)}\
.scroll{overflow-x:auto}code,pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.9em}\
td:not(.text),td:first-child,th{white-space:nowrap}td.after{min-width:13rem;overflow-wrap:anywhere}svg{width:100%;min-width:34rem;max-width:54rem;height:auto}\
.note{color:var(--note);font-size:.92em}.note p{margin:.35rem 0}\
.dot{display:inline-block;width:.7em;height:.7em;border-radius:50%;margin-right:.45em}summary{cursor:pointer}\
@media(max-width:60rem){td:not(.text),td:first-child,th{white-space:normal}td.after{min-width:8rem}}\
@media(max-width:40rem){table,tbody,tr,td{display:block}thead{display:none}\
tr{border-bottom:1px solid var(--line);padding:.5rem 0}tr>td{border:0;padding:.1rem 0;overflow-wrap:anywhere;overflow:hidden}\
td,td.text{text-align:right}td:empty{display:none}\
td::before{content:attr(data-head);float:left;margin-right:1rem;color:var(--note)}tr>td:first-child{position:static;font-weight:bold;text-align:left}}";

/// The document as self-contained HTML.
///
/// # Errors
/// [`crate::Error::Plot`] if a plot cannot be drawn.
pub fn html(document: &Document<'_>) -> Result<String> {
    let mut out = begin(&title(document));
    match &verdicts(document)[..] {
        [one] => {
            let _ = writeln!(out, "<p class=\"lead\">{}</p>", sentence(one));
        }
        several => {
            let items = several
                .iter()
                .map(|v| format!("<li>{}</li>\n", sentence(v)));
            let _ = writeln!(
                out,
                "<ul class=\"lead\">\n{}</ul>",
                items.collect::<String>()
            );
        }
    }
    let several = document.models.len() > 1;
    let compared = document.reference.is_some();
    let (all_head, all_rows) = figures(document);
    if several {
        let (head, rows) = summary(document);
        push_table(&mut out, &head, &rows, |row, column| match column {
            0 => Cell::Model(row),
            _ => Cell::Number,
        });
        out.push_str("<details><summary>All figures</summary>\n");
    }
    push_table(&mut out, &all_head, &all_rows, |_, _| Cell::Number);
    if several {
        out.push_str("</details>\n");
    }
    out.push_str("<div class=\"note\">\n");
    for line in notes(document) {
        let _ = writeln!(out, "<p>{}</p>", escape(&line));
    }
    out.push_str("</div>\n");
    if several || compared {
        let note = match compared {
            true => {
                "Lower is better. Bars: two standard errors. Line: the least divergence up to each size. Grey bands: the \
                 yardstick. The open mark is the source."
            }
            false => "Lower is better. Bars: two standard errors.",
        };
        section(
            &mut out,
            "Size against quality",
            note,
            &plots::size_against_quality(document)?,
        );
    }
    if compared && several {
        let note = "How many tokens stray by more than a value. Marks: the means. Where a curve crosses 1 %, 99 % of \
                    tokens stray by less.";
        section(
            &mut out,
            "KL divergence by token",
            note,
            &(keys(document) + &plots::kld_exceeded(document)?),
        );
    } else if compared {
        let note = "How many tokens stray by how much, on a logarithmic scale. Everything below 1e-7 is in the first bin.";
        section(
            &mut out,
            "KL divergence by token",
            note,
            &plots::kld_distribution(document)?,
        );
    }
    if document.by_depth {
        let note =
            "By the position in a window, with two standard errors. Each model has its own scale.";
        let kld = if compared {
            plots::kld_by_depth(document)?
        } else {
            String::new()
        };
        let ppl = plots::perplexity_by_depth(document)?;
        section(&mut out, "By depth", note, &format!("{kld}{ppl}"));
    }
    let (heading, note) = match compared {
        true => (
            "Change of perplexity by window",
            "Each bar is one window of the text; below 0, the model predicts it better than the source does. Dashed: the \
             whole text. Each model has its own scale.",
        ),
        false => ("Perplexity by window", "Dashed: the whole text."),
    };
    section(&mut out, heading, note, &plots::by_window(document)?);
    for (i, model) in document.models.iter().enumerate() {
        push_model(&mut out, i, model, document.by_depth);
    }
    let _ = write!(
        out,
        "<h2>How this was measured</h2>\n<p>By {} on {}, on the text {}.</p>\n<pre>{}</pre>\n",
        escape(&document.program),
        escape(&document.date),
        escape(&document.text),
        escape(&document.command)
    );
    if let Some(first) = document.models.first() {
        let _ = writeln!(out, "<p>{}.</p>", escape(&protocol_line(first.evaluation)));
    }
    for model in &document.models {
        let _ = writeln!(
            out,
            "<p>{} was run by {}.</p>",
            escape(&model.name),
            escape(&model.engine)
        );
    }
    out.push_str("</body></html>\n");
    Ok(out)
}

/// The beginning of a page, up to its title.
pub(super) fn begin(title: &str) -> String {
    let title = escape(title);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{title}</title>\
         <style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n"
    )
}

/// A heading, what is shown, and a plot.
pub(super) fn section(out: &mut String, heading: &str, note: &str, plot: &str) {
    let _ = writeln!(
        out,
        "<h2>{heading}</h2>\n<p class=\"note\">{note}</p>\n<div class=\"scroll\">{plot}</div>"
    );
}

/// The colours of the models.
fn keys(document: &Document<'_>) -> String {
    let key = |(i, m): (usize, &Section<'_>)| format!("{}{}&emsp;", dot(i), escape(&m.name));
    let keys: String = document.models.iter().enumerate().map(key).collect();
    format!("<p>{keys}</p>\n")
}

fn dot(model: usize) -> String {
    let colour = model % plots::COLOURS.len();
    format!("<span class=\"dot\" style=\"background:var(--c{colour})\"></span>")
}

/// A model's tables.
fn push_model(out: &mut String, i: usize, model: &Section<'_>, by_depth: bool) {
    if !by_depth && model.worst.is_empty() {
        return;
    }
    let _ = writeln!(out, "<h2>{}{}</h2>", dot(i), escape(&model.name));
    if by_depth {
        out.push_str("<h3>By depth</h3>\n");
        let (head, rows) = depth_table(model);
        push_table(out, &head, &rows, |_, column| match column {
            0 => Cell::Text,
            _ => Cell::Number,
        });
    }
    if !model.worst.is_empty() {
        let _ = writeln!(
            out,
            "<h3>Where it strays most</h3>\n<p class=\"note\">{WORST_NOTE}</p>"
        );
        let rows: Vec<Vec<String>> = model
            .worst
            .iter()
            .map(|w| {
                let place = [
                    format!("{:.4}", w.kld),
                    format!("{}:{}", w.window, w.position),
                    format!("{:?}", w.context),
                ];
                let tokens = w
                    .tokens()
                    .map(|(token, p)| format!("{token:?}\n{}", p.replace(' ', "\u{a0}")));
                place.into_iter().chain(tokens).collect()
            })
            .collect();
        push_table(out, &WORST_HEAD, &rows, |_, column| match column {
            0 | 1 => Cell::Number,
            2 => Cell::After,
            _ => Cell::Text,
        });
    }
}

/// What a cell of a table holds.
pub(super) enum Cell {
    Number,
    /// Text, whose line breaks are kept.
    Text,
    /// The text before a position.
    After,
    /// The name of a model, with a dot of its colour.
    Model(usize),
}

/// A table; `kind` says what a cell holds, by its row and column.
pub(super) fn push_table(
    out: &mut String,
    head: &[impl AsRef<str>],
    rows: &[Vec<String>],
    kind: impl Fn(usize, usize) -> Cell,
) {
    let class = |cell: &Cell| match cell {
        Cell::Number => "",
        Cell::After => " class=\"text after\"",
        Cell::Text | Cell::Model(_) => " class=\"text\"",
    };
    out.push_str("<div class=\"scroll\"><table><thead><tr>");
    for (i, h) in head.iter().enumerate() {
        // Headings may break behind these signs where a screen is narrow.
        let head = escape(h.as_ref());
        let head = head.replace('/', "/<wbr>").replace(':', ":<wbr>");
        let _ = write!(out, "<th{}>{head}</th>", class(&kind(0, i)));
    }
    out.push_str("</tr></thead><tbody>\n");
    for (r, row) in rows.iter().enumerate() {
        out.push_str("<tr>");
        for (i, (cell, head)) in row.iter().zip(head).enumerate() {
            let kind = kind(r, i);
            // A phone shows each row as a list, in which headings stand before their values.
            let head = match escape(head.as_ref()) {
                head if head.is_empty() => head,
                head => format!(" data-head=\"{head}\""),
            };
            let dot = match kind {
                Cell::Model(i) => dot(i),
                _ => String::new(),
            };
            let shown = sentence(cell).replace('\n', "<br>");
            let _ = write!(out, "<td{}{head}>{dot}{shown}</td>", class(&kind));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

/// Text whose figures are not broken over lines, but before their errors.
pub(super) fn sentence(text: &str) -> String {
    escape(text)
        .replace(" ± ", " ±&nbsp;")
        .replace(" %", "&nbsp;%")
}

/// Escapes text for HTML.
pub(super) fn escape(text: &str) -> String {
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
