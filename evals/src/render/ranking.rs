//! Renders rankings.

use super::html::{Cell, begin, escape, push_table, section, sentence};
use super::numbers::{percent_change, plus_minus};
use super::plots::{SizedFile, sizes};
use super::{kld_cell, put};
use crate::error::Result;
use crate::rank::{Answers, FileFacts, RankedFile, Ranking, TaskFigures, TaskShares, TextFigures};
use crate::report::KldStats;
use crate::spread::QuantileErrors;
use crate::stats;
use std::fmt::Write as _;
use std::path::Path;

/// A table: a row for each file of a ranking, which begins with its name.
pub struct RankingTable {
    /// What it shows.
    pub title: &'static str,
    /// Its headings.
    pub head: Vec<String>,
    /// Its rows.
    pub rows: Vec<Vec<String>>,
}

impl RankingTable {
    fn new(ranking: &Ranking, title: &'static str) -> Self {
        let name = |f: &RankedFile| vec![format!("{}{}", mark(f), f.facts.name)];
        RankingTable {
            title,
            head: vec!["file".into()],
            rows: ranking.files.iter().map(name).collect(),
        }
    }

    fn push(&mut self, ranking: &Ranking, head: &str, cell: impl Fn(&RankedFile) -> String) {
        self.head.push(head.into());
        for (row, file) in self.rows.iter_mut().zip(&ranking.files) {
            row.push(cell(file));
        }
    }
}

/// Stands before the name of a file on the frontier.
fn mark(file: &RankedFile) -> &'static str {
    if file.frontier { "* " } else { "" }
}

fn megabytes(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / 1e6)
}

/// A share of a file's answers and its standard error.
fn share(answers: &Answers, share: f64) -> String {
    let answers = answers.source_tokens.len().max(1);
    let se = (share * (1.0 - share) / answers as f64).sqrt();
    format!("{:.0} ± {:.0} %", 100.0 * share, 100.0 * se)
}

/// The mean divergence and its standard error.
fn mean(figures: &TextFigures) -> String {
    let c = figures.report.against.as_ref();
    c.map_or(String::new(), |c| {
        plus_minus(c.kld.mean, figures.errors.kld)
    })
}

/// The tables of a ranking: sizes and divergences, answers, kinds of text, depth.
pub fn ranking_tables(ranking: &Ranking) -> Vec<RankingTable> {
    let mut main = RankingTable::new(ranking, "Size and divergence");
    main.push(ranking, "MB", |f| megabytes(f.facts.bytes));
    main.push(ranking, "bits/weight", |f| {
        format!("{:.2}", f.facts.bits_per_weight)
    });
    main.push(ranking, "mean KLD", |f| mean(&f.figures.text));
    main.push(ranking, "same best token", |f| {
        let same = f.comparison().map_or(0.0, |c| c.same_top1);
        let se = f.figures.text.errors.same_top1;
        format!("{:.2} ± {:.2} %", 100.0 * same, 100.0 * se)
    });
    main.push(ranking, "perplexity change", |f| {
        let ratio = f.comparison().map_or(0.0, |c| c.ln_ppl_ratio);
        percent_change(ratio, f.figures.text.errors.ln_ppl_ratio)
    });

    let mut quantiles = RankingTable::new(ranking, "Quantiles of KLD");
    let quantile = |get: fn(&KldStats) -> f64, se: fn(&QuantileErrors) -> f64| {
        move |f: &RankedFile| {
            let c = f.comparison();
            c.map_or(String::new(), |c| {
                plus_minus(get(&c.kld), se(&f.figures.text.kld_errors))
            })
        }
    };
    quantiles.push(ranking, "median", quantile(|k| k.median, |e| e.median));
    quantiles.push(ranking, "99 %", quantile(|k| k.p99, |e| e.p99));
    quantiles.push(ranking, "99.9 %", quantile(|k| k.p999, |e| e.p999));

    let mut parts = RankingTable::new(ranking, "MB by part");
    parts.push(ranking, "body", |f| megabytes(f.facts.parts.body));
    parts.push(ranking, "embedding, head", |f| {
        megabytes(f.facts.parts.embedding_and_head)
    });
    if ranking.files.iter().any(|f| f.facts.parts.mtp > 0) {
        parts.push(ranking, "MTP", |f| megabytes(f.facts.parts.mtp));
    }
    if ranking.files.iter().any(|f| f.facts.parts.tower > 0) {
        parts.push(ranking, "tower", |f| megabytes(f.facts.parts.tower));
    }
    parts.push(ranking, "format", |f| f.facts.format.clone());
    parts.push(ranking, "activations", |f| f.figures.activations.clone());

    let mut answers = RankingTable::new(ranking, "Greedy answers that are the source's");
    let mut push = |head: &str, cell: fn(&Answers) -> String| {
        answers.push(ranking, head, |f| {
            f.figures.answers.as_ref().map_or(String::new(), cell)
        });
    };
    push("in 32 tokens", |a| share(a, a.same_32));
    push("in 300 tokens", |a| share(a, a.same_300));
    push("tokens until they part", |a| {
        let whole = stats::mean(a.source_tokens.iter().map(|&n| n as f64));
        format!("{:.0} ± {:.0} of {whole:.0}", a.mean_equal, a.mean_equal_se)
    });

    let mut tasks = RankingTable::new(ranking, "Calls of tools and JSON");
    type Shares = fn(&TaskFigures) -> TaskShares;
    let ways: [(Shares, &str, &str); 2] = [
        (|t| t.free, "valid", "the source's"),
        (|t| t.held, "valid, held by a grammar", "the source's, held"),
    ];
    for (shares, valid, same) in ways {
        let cell = |f: &RankedFile, say: fn(TaskShares) -> String| {
            let found = f.figures.tasks.as_ref().map(shares);
            found.map_or(String::new(), say)
        };
        tasks.push(ranking, valid, |f| {
            cell(f, |s| {
                format!("{:.0} of {:.0} %", 100.0 * s.valid, 100.0 * s.source_valid)
            })
        });
        tasks.push(ranking, same, |f| {
            cell(f, |s| format!("{:.0} %", 100.0 * s.same))
        });
    }

    let mut kinds = RankingTable::new(ranking, "Mean KLD by kind of text");
    let first = ranking.files.first().map(|f| &f.figures);
    for (i, kind) in first.into_iter().flat_map(|f| &f.kinds).enumerate() {
        kinds.push(ranking, &kind.report.text, |f| {
            f.figures.kinds.get(i).map_or(String::new(), mean)
        });
    }

    let mut depth = RankingTable::new(ranking, "Mean KLD by position");
    for (i, bucket) in first.into_iter().flat_map(|f| &f.text.by_depth).enumerate() {
        depth.push(ranking, &bucket.name(), |f| {
            let bucket = f.figures.text.by_depth.get(i);
            let against = bucket.and_then(|b| b.against);
            against.map_or(String::new(), |c| plus_minus(c.kld, c.kld_se))
        });
    }
    let mut all = vec![main, quantiles, parts];
    all.extend(first.and_then(|f| f.answers.as_ref()).map(|_| answers));
    all.extend(first.and_then(|f| f.tasks.as_ref()).map(|_| tasks));
    all.extend([kinds, depth]);
    all
}

/// Which files no smaller one is closer than, and which cannot be told from the source.
pub fn frontier_line(ranking: &Ranking) -> String {
    let names = |wanted: &dyn Fn(&RankedFile) -> bool| {
        let files = ranking.files.iter().filter(|f| wanted(f));
        files
            .map(|f| f.facts.name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut line = format!(
        "Closest at their size (*): {}. None of at most the size of one of these has a lower mean KL divergence from {}.",
        names(&|f| f.frontier),
        ranking.source.name
    );
    let like = names(&|f| f.kld() <= ranking.floor.mean);
    if !like.is_empty() {
        let _ = write!(
            line,
            " Not to be told from the source, as below the floor: {like}."
        );
    }
    line
}

/// What was measured, a sentence or two each.
fn notes(ranking: &Ranking) -> Vec<String> {
    let first = ranking.files.first().map(|f| &f.figures);
    let mut lines = vec![
        "KLD: KL(source || file), how far the file's probabilities of the next token are from the source's, in nats per \
         token. 99 %: 99 % of tokens have less. ±: one standard error."
            .to_owned(),
        format!(
            "The floor, which is the source's KLD from itself computed with other rounding, is {} (99 %: {}): less says \
             nothing.",
            kld_cell(ranking.floor.mean),
            kld_cell(ranking.floor.p99)
        ),
    ];
    lines.push(match first.is_some_and(|f| f.answers.is_some()) {
        true => {
            "Answers part at the first token that the file would not have chosen greedily; it reads the source's answer to \
             the prompt up to there."
        }
        false => "The source was run layer by layer over the texts, so that there are no answers of it to compare with.",
    }.to_owned());
    if first.is_some_and(|f| f.tasks.is_some()) {
        lines.push(
            "Calls and JSON: the share of valid answers, of that of the source, and the share of answers that are the \
             source's, without a grammar and held to the schema by one. Answers are cut after 160 tokens."
                .to_owned(),
        );
    }
    if let Some(first) = first {
        let r = &first.text.report;
        lines.push(format!(
            "Text: {}, {} windows of {} tokens, every token but the first of a window scored. KV cache {}. {}{}.",
            r.text,
            r.windows,
            r.ctx,
            r.kv,
            ranking.protocol,
            if ranking.standard { "" } else { ", with another text or number of windows than its own" }
        ));
    }
    lines
}

/// Writes a ranking as a self-contained page of HTML.
///
/// # Errors
/// [`crate::Error::Write`], [`crate::Error::Plot`].
pub fn write_ranking(path: &Path, ranking: &Ranking) -> Result<()> {
    let source = &ranking.source;
    let mut out = begin(&format!(
        "{} files of {}, by size",
        ranking.files.len(),
        source.name
    ));
    let _ = writeln!(
        out,
        "<p class=\"lead\">{}</p>",
        sentence(&frontier_line(ranking))
    );
    let files: Vec<SizedFile<'_>> = ranking
        .files
        .iter()
        .map(|f| SizedFile {
            name: &f.facts.name,
            bytes: f.facts.bytes,
            value: f.kld(),
            se: f.figures.text.errors.kld,
        })
        .collect();
    let note = "Lower is better. Bars: two standard errors. Line: the least divergence up to each size. Grey bands: \
                llama.cpp's types on small models. The open mark is the source.";
    let plot = sizes(&files, Some((&source.name, source.bytes)))?;
    section(&mut out, "Size against divergence", note, &plot);
    for table in ranking_tables(ranking) {
        let _ = writeln!(out, "<h2>{}</h2>", table.title);
        push_table(
            &mut out,
            &table.head,
            &table.rows,
            |row, column| match column {
                0 => Cell::Model(row),
                _ => Cell::Number,
            },
        );
    }
    out.push_str("<div class=\"note\">\n");
    for line in notes(ranking) {
        let _ = writeln!(out, "<p>{}</p>", escape(&line));
    }
    let _ = writeln!(
        out,
        "</div>\n<h2>How this was measured</h2>\n<p>By {} on {}. The source was run by {}.</p>\n<pre>{}</pre>",
        escape(&ranking.program),
        escape(&ranking.date),
        escape(&ranking.source_engine),
        escape(&ranking.command)
    );
    let row = |f: &FileFacts| [&f.name, &f.source, &f.sha256].map(String::clone).to_vec();
    let facts = ranking.files.iter().map(|f| &f.facts);
    let rows: Vec<Vec<String>> = std::iter::once(source).chain(facts).map(row).collect();
    let head = ["file", "from", "SHA-256 of its weights"];
    push_table(&mut out, &head, &rows, |_, _| Cell::Text);
    out.push_str("</body></html>\n");
    put(path, &out)
}
