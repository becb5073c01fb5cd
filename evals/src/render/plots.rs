//! Plots of a report as inline SVG.

use super::{Document, Section};
use crate::depth::DepthBucket;
use crate::error::{Error, Result};
use plotters::prelude::*;

/// Width of a plot in pixels.
const WIDTH: u32 = 960;
/// Height of a single plot.
const HEIGHT: u32 = 420;
/// Height of each of several small plots.
const PANEL: u32 = 270;
/// Size of text in pixels: labels, and titles of panels.
const LABEL: u32 = 16;
const TITLE: u32 = 18;

/// Colours that readers with any colour vision can tell apart (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(140, 86, 75),
];

/// The color of the reference, drawn behind the models.
const REFERENCE: RGBColor = RGBColor(140, 140, 140);

fn colour(i: usize) -> RGBColor {
    COLOURS[i % COLOURS.len()]
}

/// Shares of samples by decade of their size. Samples below the first bin are counted in it.
pub(super) struct Histogram {
    lowest: i32,     // log10 of the first bin's lower edge, in steps
    per_decade: i32, // bins of a decade
    shares: Vec<f64>,
}

/// Lowest decade shown; a divergence below 1e-7 is rounding.
const LOWEST_DECADE: i32 = -7;

impl Histogram {
    /// Counts `samples` in `per_decade` bins per decade, from 1e-7 up to the greatest.
    pub(super) fn new(samples: impl Iterator<Item = f64>, per_decade: i32) -> Self {
        let lowest = LOWEST_DECADE * per_decade;
        let mut counts = vec![0usize; (-lowest) as usize];
        let mut n = 0usize;
        for v in samples {
            let bin = (v.max(1e-300).log10() * f64::from(per_decade)).floor() as i32 - lowest;
            let bin = bin.max(0) as usize;
            if bin >= counts.len() {
                counts.resize(bin + 1, 0);
            }
            counts[bin] += 1;
            n += 1;
        }
        Histogram {
            lowest,
            per_decade,
            shares: counts.iter().map(|&c| c as f64 / n.max(1) as f64).collect(),
        }
    }

    /// Lower edge, upper edge and share of every bin.
    pub(super) fn bins(&self) -> impl Iterator<Item = (f64, f64, f64)> + '_ {
        let edge = |i: usize| {
            let step = f64::from(self.lowest + i as i32) / f64::from(self.per_decade);
            10f64.powf(step)
        };
        let shares = self.shares.iter().enumerate();
        shares.map(move |(i, &s)| (edge(i), edge(i + 1), s))
    }
}

/// Draws into a new SVG of this height. plotters' error types depend on their backend, so errors are
/// converted to text.
fn svg(what: &'static str, height: u32, draw: impl FnOnce(&Area<'_>) -> Drawn) -> Result<String> {
    let mut out = String::new();
    {
        let area = SVGBackend::with_string(&mut out, (WIDTH, height)).into_drawing_area();
        let drawn = draw(&area).and_then(|()| area.present().map_err(Into::into));
        drawn.map_err(|e| Error::Plot {
            what,
            why: e.to_string(),
        })?;
    }
    // Text and axes use the page's colour, light or dark.
    Ok(out.replace("#000000", "currentColor"))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// Range of samples with a margin, never empty.
fn padded(samples: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = samples.fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return (0.0, 1.0);
    }
    let margin = (0.06 * (high - low)).max(1e-3 * high.abs()).max(1e-9);
    (low - margin, high + margin)
}

/// Number of columns and rows of small plots.
fn grid(plots: usize) -> (usize, usize) {
    let columns = match plots {
        0 | 1 => 1,
        2..=4 => 2,
        _ => 3,
    };
    (columns, plots.max(1).div_ceil(columns))
}

/// Draws a small plot for every name with `draw`, titled with the name: curves in one plot would hide
/// each other.
fn panels(
    what: &'static str,
    names: &[&str],
    draw: impl Fn(usize, &mut ChartBuilder<'_, '_, SVGBackend<'_>>) -> Drawn,
) -> Result<String> {
    let (columns, rows) = grid(names.len());
    let height = if names.len() == 1 { HEIGHT } else { PANEL };
    svg(what, height * rows as u32, |area| {
        let places = area.split_evenly((rows, columns));
        let room = (WIDTH as usize / columns).saturating_sub(40) * 2 / TITLE as usize;
        for (i, (name, place)) in names.iter().zip(&places).enumerate() {
            let mut chart = ChartBuilder::on(place);
            chart
                .margin(10)
                .x_label_area_size(52)
                .y_label_area_size(74)
                .caption(shortened(name, room), ("sans-serif", TITLE));
            draw(i, &mut chart)?;
        }
        Ok(())
    })
}

/// Removes the middle of a name that is too long.
fn shortened(name: &str, most: usize) -> String {
    let chars: Vec<char> = name.chars().collect();
    if chars.len() <= most {
        return name.to_owned();
    }
    let half = most.saturating_sub(1) / 2;
    let ends = [&chars[..half], &chars[chars.len() - half..]];
    ends.map(|part| part.iter().collect::<String>()).join("…")
}

/// Perplexity by window: a plot for every model, with the reference's line behind it in grey.
pub(super) fn window_perplexity(document: &Document<'_>) -> Result<String> {
    let names: Vec<&str> = document.models.iter().map(|m| m.name.as_str()).collect();
    let lines: Vec<Vec<f64>> = document
        .models
        .iter()
        .map(|m| m.evaluation.window_ppl())
        .collect();
    let reference: Vec<f64> = match (&document.reference, document.models.first()) {
        (Some(_), Some(model)) => reference_windows(model),
        _ => Vec::new(),
    };
    let (low, high) = padded(lines.iter().flatten().chain(&reference).copied());
    let windows = lines.iter().map(Vec::len).max().unwrap_or(1);
    panels("perplexity per window", &names, |i, chart| {
        let mut chart =
            chart.build_cartesian_2d(0f64..windows.max(2) as f64 - 1.0, low.max(0.0)..high)?;
        chart
            .configure_mesh()
            .x_desc("window")
            .y_desc("perplexity")
            .x_labels(6)
            .y_labels(6)
            .label_style(("sans-serif", LABEL))
            .x_label_formatter(&|v| format!("{v:.0}"))
            .y_label_formatter(&|v| format!("{v:.*}", usize::from(high < 10.0)))
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (line, colour) in [(&reference, REFERENCE), (&lines[i], colour(i))] {
            let points = line.iter().enumerate().map(|(x, &y)| (x as f64, y));
            if line.len() == 1 {
                // One window gives no line, so a mark shows it.
                chart.draw_series(points.map(|p| Circle::new(p, 4, colour.filled())))?;
            } else {
                chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
            }
        }
        Ok(())
    })
}

/// The reference's perplexity per window.
fn reference_windows(model: &Section<'_>) -> Vec<f64> {
    let e = model.evaluation;
    e.pairs
        .chunks(e.scored.len().max(1))
        .map(|w| crate::stats::mean(w.iter().map(|p| p.reference_nll)).exp())
        .collect()
}

/// Mean KL divergence by depth: a plot for every model, all with the same scale, with two standard errors
/// up and down.
pub(super) fn kld_by_depth(document: &Document<'_>) -> Result<String> {
    let curve = |m: &Section<'_>| -> Curve {
        let buckets = m.evaluation.by_depth();
        let point = |b: &DepthBucket| {
            let c = b.against?;
            Some((middle(b), c.kld, 2.0 * c.kld_se))
        };
        buckets.iter().filter_map(point).collect()
    };
    let curves: Vec<Curve> = document.models.iter().map(curve).collect();
    let top = curves.iter().flatten().map(|p| p.1 + p.2);
    let range = 0.0..1.05 * top.fold(1e-9, f64::max);
    by_depth(document, "mean KL divergence, nats", range, &curves, &[])
}

/// Perplexity by depth: a plot for every model, with the reference's line behind it in grey.
pub(super) fn perplexity_by_depth(document: &Document<'_>) -> Result<String> {
    let curve = |m: &Section<'_>| -> Curve {
        let buckets = m.evaluation.by_depth();
        let point = |b: &DepthBucket| (middle(b), b.ppl, 2.0 * b.ppl_se);
        buckets.iter().map(point).collect()
    };
    let curves: Vec<Curve> = document.models.iter().map(curve).collect();
    let reference: Curve = document.models.first().map_or_else(Vec::new, |m| {
        let buckets = m.evaluation.by_depth();
        let point = |b: &DepthBucket| Some((middle(b), b.against?.ppl_ref, 0.0));
        buckets.iter().filter_map(point).collect()
    });
    let ends = curves.iter().flatten().flat_map(|p| [p.1 - p.2, p.1 + p.2]);
    let (low, high) = padded(ends.chain(reference.iter().map(|p| p.1)));
    by_depth(
        document,
        "perplexity",
        low.max(0.0)..high,
        &curves,
        &reference,
    )
}

/// Points of a curve by depth: position, value, and the length of the bars up and down.
type Curve = Vec<(f64, f64, f64)>;

/// Where a bucket is on the axis of positions.
fn middle(bucket: &DepthBucket) -> f64 {
    (bucket.from + bucket.to) as f64 / 2.0
}

/// Draws a curve for every model over the logarithm of the position, `behind` it another one in grey.
fn by_depth(
    document: &Document<'_>,
    what: &'static str,
    range: std::ops::Range<f64>,
    curves: &[Curve],
    behind: &[(f64, f64, f64)],
) -> Result<String> {
    let names: Vec<&str> = document.models.iter().map(|m| m.name.as_str()).collect();
    let deepest = curves.iter().flatten().map(|p| p.0).fold(128.0, f64::max);
    panels(what, &names, |i, chart| {
        let x = (32f64..1.5 * deepest).log_scale();
        let mut chart = chart.build_cartesian_2d(x, range.clone())?;
        chart
            .configure_mesh()
            .x_desc("position")
            .y_desc(what)
            .y_labels(5)
            .label_style(("sans-serif", LABEL))
            .x_label_formatter(&|v| format!("{v:.0}"))
            .y_label_formatter(&|v| significant(*v))
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (curve, colour) in [(behind, REFERENCE), (&curves[i][..], colour(i))] {
            let points = || curve.iter().map(|&(x, y, _)| (x, y));
            chart.draw_series(LineSeries::new(points(), colour.stroke_width(2)))?;
            chart.draw_series(points().map(|p| Circle::new(p, 4, colour.filled())))?;
            let bars = curve.iter().filter(|p| p.2 > 0.0).map(|&(x, y, bar)| {
                let (low, high) = ((y - bar).max(range.start), (y + bar).min(range.end));
                PathElement::new(vec![(x, low), (x, high)], colour.stroke_width(1))
            });
            chart.draw_series(bars)?;
        }
        Ok(())
    })
}

/// Share of tokens by KL divergence: a plot for every model, all with the same scale.
pub(super) fn kld_distribution(document: &Document<'_>) -> Result<String> {
    const PER_DECADE: i32 = 5;
    let names: Vec<&str> = document.models.iter().map(|m| m.name.as_str()).collect();
    let histograms: Vec<Histogram> = document
        .models
        .iter()
        .map(|m| Histogram::new(m.evaluation.pairs.iter().map(|p| p.kld), PER_DECADE))
        .collect();
    let all = || histograms.iter().flat_map(Histogram::bins);
    let top = all().map(|b| b.2).fold(0.01, f64::max);
    let right = all().map(|b| b.1).fold(1.0, f64::max);
    panels("the KL divergence's distribution", &names, |i, chart| {
        let x = (1e-7f64..right).log_scale();
        let mut chart = chart.build_cartesian_2d(x, 0f64..100.0 * top * 1.05)?;
        chart
            .configure_mesh()
            .x_desc("KL divergence, nats")
            .y_desc("% of tokens")
            .x_labels(if names.len() > 4 { 4 } else { 8 })
            .y_labels(5)
            .label_style(("sans-serif", LABEL))
            .x_label_formatter(&|v| format!("{v:.0e}"))
            .y_label_formatter(&|v| format!("{v:.0}"))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let c = colour(i);
        let steps = histograms[i]
            .bins()
            .flat_map(|(l, r, s)| [(l, 100.0 * s), (r, 100.0 * s)]);
        let area = AreaSeries::new(steps, 0.0, c.mix(0.25)).border_style(c.stroke_width(2));
        chart.draw_series(area)?;
        Ok(())
    })
}

/// A mark for every model: its bytes, and its mean KL divergence on a logarithmic axis (without a
/// reference, its perplexity).
pub(super) fn bytes_against_quality(document: &Document<'_>) -> Result<String> {
    let by_kld = document.reference.is_some();
    let least = 1e-9; // the reference itself has none
    let quality = |m: &Section<'_>| match &m.evaluation.report.against {
        Some(c) => c.kld.mean.max(least).log10(),
        None => m.evaluation.report.ppl,
    };
    let points: Vec<(&str, f64, f64)> = document
        .models
        .iter()
        .map(|m| (m.name.as_str(), m.bytes as f64 / 1e6, quality(m)))
        .collect();
    svg("bytes against quality", HEIGHT, |area| {
        let (left, right) = padded(points.iter().map(|p| p.1));
        let (low, high) = padded(points.iter().map(|p| p.2));
        let margin = 0.04 * (right - left);
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .x_label_area_size(52)
            .y_label_area_size(96)
            .build_cartesian_2d(left - margin..right + margin, low..high)?;
        chart
            .configure_mesh()
            .x_desc("MB of tensors")
            .y_desc(if by_kld {
                "mean KL divergence, nats (log)"
            } else {
                "perplexity"
            })
            .y_labels(7)
            .label_style(("sans-serif", LABEL))
            .y_label_formatter(&|v| {
                if by_kld {
                    significant(10f64.powf(*v))
                } else {
                    format!("{v:.2}")
                }
            })
            .light_line_style(TRANSPARENT)
            .draw()?;
        chart.draw_series(
            points
                .iter()
                .enumerate()
                .map(|(i, &(_, x, y))| Circle::new((x, y), 6, colour(i).filled())),
        )?;
        let marks: Vec<(i32, i32)> = points
            .iter()
            .map(|&(_, x, y)| chart.backend_coord(&(x, y)))
            .collect();
        let (across, down) = chart.plotting_area().get_pixel_range();
        let names: Vec<&str> = points.iter().map(|p| p.0).collect();
        let style = ("sans-serif", LABEL).into_font().color(&BLACK);
        for (name, at) in names
            .iter()
            .zip(label_places(&names, &marks, (across, down)))
        {
            area.draw(&Text::new((*name).to_owned(), at, style.clone()))?;
        }
        Ok(())
    })
}

/// Two significant digits, without an exponent if that is short.
fn significant(v: f64) -> String {
    match v {
        0.0 => "0".into(),
        0.001.. => format!("{v:.*}", (1 - v.log10().floor() as i32).max(0) as usize),
        _ => format!("{v:.1e}"),
    }
}

/// A rectangle of pixels: left, top, right, bottom.
type Rect = (i32, i32, i32, i32);

/// Upper left corners for the names of `marks` in a plot: each beside its mark, covering no
/// other mark or name, or as little of them as possible.
fn label_places(
    names: &[&str],
    marks: &[(i32, i32)],
    (across, down): (std::ops::Range<i32>, std::ops::Range<i32>),
) -> Vec<(i32, i32)> {
    const GAP: i32 = 10;
    let height = LABEL as i32 + 2;
    let mut taken: Vec<Rect> = marks
        .iter()
        .map(|&(x, y)| (x - 6, y - 6, x + 6, y + 6))
        .collect();
    let mut places = Vec::new();
    for (name, &(x, y)) in names.iter().zip(marks) {
        // In a proportional typeface, letters are about 0.55 of its size wide.
        let width = name.chars().count() as i32 * LABEL as i32 * 11 / 20;
        let beside = [
            x + GAP,
            x - GAP - width,
            x - width / 2,
            x + GAP,
            x - GAP - width,
        ];
        let mut best = (i64::MAX, (x, y));
        for step in 0..6 {
            for up in [1, -1] {
                for left in beside {
                    let top = y - height / 2 + up * step * (height + 2);
                    let rect = (left, top, left + width, top + height);
                    let outside = (across.start - left).max(0)
                        + (rect.2 - across.end).max(0)
                        + (down.start - top).max(0)
                        + (rect.3 - down.end).max(0);
                    let covered: i64 = taken.iter().map(|t| overlap(rect, *t)).sum();
                    let cost = covered * 100
                        + i64::from(outside) * 1000
                        + i64::from(step * height + (left - x).abs() / 8);
                    if cost < best.0 {
                        best = (cost, (left, top));
                    }
                }
            }
        }
        let (left, top) = best.1;
        taken.push((left, top, left + width, top + height));
        places.push((left, top));
    }
    places
}

/// Pixels that two rectangles share.
fn overlap(a: Rect, b: Rect) -> i64 {
    let width = (a.2.min(b.2) - a.0.max(b.0)).max(0);
    let height = (a.3.min(b.3) - a.1.max(b.1)).max(0);
    i64::from(width) * i64::from(height)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_cover_neither_each_other_nor_marks() {
        let names = [
            "demo-int4-rtn",
            "demo-int4-gptq",
            "demo-int4-awq",
            "demo-int4-auto",
            "demo",
        ];
        let marks = [(300, 200), (304, 204), (306, 198), (310, 210), (780, 20)];
        let places = label_places(&names, &marks, (100..800, 10..400));
        let rects: Vec<Rect> = names
            .iter()
            .zip(&places)
            .map(|(n, &(x, y))| (x, y, x + n.len() as i32 * 88 / 10, y + 18))
            .collect();
        for (i, &rect) in rects.iter().enumerate() {
            assert!(
                rect.0 >= 100 && rect.2 <= 800 && rect.1 >= 10 && rect.3 <= 400,
                "{rect:?}"
            );
            for (j, &other) in rects.iter().enumerate() {
                assert!(
                    i == j || overlap(rect, other) == 0,
                    "{} {}",
                    names[i],
                    names[j]
                );
            }
            for &(x, y) in &marks {
                assert_eq!(
                    overlap(rect, (x - 6, y - 6, x + 6, y + 6)),
                    0,
                    "{}",
                    names[i]
                );
            }
        }
    }

    #[test]
    fn numbers_of_an_axis_are_short() {
        for (v, text) in [
            (0.0316, "0.032"),
            (0.2, "0.20"),
            (1.5, "1.5"),
            (12.0, "12"),
            (2e-5, "2.0e-5"),
        ] {
            assert_eq!(significant(v), text);
        }
        assert_eq!(shortened("a-very-long-name", 7), "a-v…ame");
        assert_eq!(shortened("short", 7), "short");
    }
}
