//! Plots of a report as inline SVG.

use super::{Document, Section};
use crate::error::{Error, Result};
use plotters::prelude::*;

/// Width and height of a plot in pixels.
const SIZE: (u32, u32) = (900, 380);

/// Colours that readers with any colour vision tell apart (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(60, 60, 60),
];

fn colour(i: usize) -> RGBColor {
    COLOURS[i % COLOURS.len()]
}

/// Shares of samples by decade of their size. Samples below the first bin are in it.
pub(super) struct Histogram {
    lowest: i32,     // log10 of the first bin's lower edge, in steps
    per_decade: i32, // bins of a decade
    shares: Vec<f64>,
}

/// Decades shown below 1 nat; a divergence below 1e-7 is rounding.
const LOWEST_DECADE: i32 = -7;

impl Histogram {
    /// Counts `samples` into `per_decade` bins a decade, from 1e-7 up to the greatest.
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

/// Draws into a fresh SVG. plotters' error types name their backend; here they are words.
fn svg(
    what: &'static str,
    draw: impl FnOnce(
        &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    ) -> Result<(), Box<dyn std::error::Error>>,
) -> Result<String> {
    let mut out = String::new();
    {
        let area = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
        let drawn = area
            .fill(&WHITE)
            .map_err(Into::into)
            .and_then(|()| draw(&area))
            .and_then(|()| area.present().map_err(Into::into));
        drawn.map_err(|e| Error::Plot {
            what,
            why: e.to_string(),
        })?;
    }
    Ok(out)
}

/// Range of samples with a margin, never empty.
fn padded(samples: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = samples.fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return (0.0, 1.0);
    }
    let margin = (0.06 * (high - low)).max(1e-3 * high.abs()).max(1e-9);
    (low - margin, high + margin)
}

/// A line of perplexity over windows for every model and the reference.
pub(super) fn window_perplexity(document: &Document<'_>) -> Result<String> {
    let mut lines: Vec<(String, Vec<f64>)> = document
        .models
        .iter()
        .map(|m| (m.name.clone(), m.evaluation.window_ppl()))
        .collect();
    let reference = document.models.first().map(reference_windows);
    if let (Some(name), Some(ppl)) = (&document.reference, reference) {
        lines.push((format!("{name} (reference)"), ppl));
    }
    svg("perplexity per window", |area| {
        let (low, high) = padded(lines.iter().flat_map(|(_, l)| l.iter().copied()));
        let windows = lines.iter().map(|(_, l)| l.len()).max().unwrap_or(1);
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(60)
            .build_cartesian_2d(0f64..windows.max(2) as f64 - 1.0, low.max(0.0)..high)?;
        chart
            .configure_mesh()
            .x_desc("window")
            .y_desc("perplexity")
            .x_label_formatter(&|v| format!("{v:.0}"))
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (i, (name, ppl)) in lines.iter().enumerate() {
            let c = colour(i);
            let points = ppl.iter().enumerate().map(|(x, &y)| (x as f64, y));
            let line = if ppl.len() == 1 {
                // One window has no line; a mark shows it.
                chart.draw_series(points.map(|p| Circle::new(p, 3, c.filled())))?
            } else {
                chart.draw_series(LineSeries::new(points, c.stroke_width(1)))?
            };
            line.label(name.as_str())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], c.stroke_width(3)));
        }
        legend(&mut chart)
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

/// Share of tokens by KL divergence, a line for every model.
pub(super) fn kld_distribution(document: &Document<'_>) -> Result<String> {
    const PER_DECADE: i32 = 5;
    let histograms: Vec<(&str, Histogram)> = document
        .models
        .iter()
        .map(|m| {
            let klds = m.evaluation.pairs.iter().map(|p| p.kld);
            (m.name.as_str(), Histogram::new(klds, PER_DECADE))
        })
        .collect();
    svg("the KL divergence's distribution", |area| {
        let all = || histograms.iter().flat_map(|(_, h)| h.bins());
        let top = all().map(|b| b.2).fold(0.01, f64::max);
        let right = all().map(|b| b.1).fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(60)
            .build_cartesian_2d((1e-7f64..right).log_scale(), 0f64..100.0 * top * 1.05)?;
        chart
            .configure_mesh()
            .x_desc("KL divergence, nats (everything below 1e-7 in the first bin)")
            .y_desc("% of tokens")
            .x_label_formatter(&|v| format!("{v:.0e}"))
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (i, (name, h)) in histograms.iter().enumerate() {
            let c = colour(i);
            let steps = h
                .bins()
                .flat_map(|(l, r, s)| [(l, 100.0 * s), (r, 100.0 * s)]);
            chart
                .draw_series(AreaSeries::new(steps, 0.0, c.mix(0.15)).border_style(c))?
                .label(*name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], c.stroke_width(3)));
        }
        legend(&mut chart)
    })
}

/// A mark for every model: its bytes, and its mean KL divergence (perplexity without a
/// reference).
pub(super) fn bytes_against_quality(document: &Document<'_>) -> Result<String> {
    let by_kld = document.reference.is_some();
    let quality = |m: &Section<'_>| match &m.evaluation.report.against {
        Some(c) => c.kld.mean,
        None => m.evaluation.report.ppl,
    };
    let points: Vec<(&str, f64, f64)> = document
        .models
        .iter()
        .map(|m| (m.name.as_str(), m.bytes as f64 / 1e6, quality(m)))
        .collect();
    svg("bytes against quality", |area| {
        let (left, right) = padded(points.iter().map(|p| p.1));
        let (low, high) = padded(points.iter().map(|p| p.2));
        let width = right - left;
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(70)
            // Room on the right for names.
            .build_cartesian_2d(left..right + 0.2 * width, low.max(0.0)..high)?;
        chart
            .configure_mesh()
            .x_desc("MB of tensors")
            .y_desc(if by_kld {
                "mean KL divergence, nats"
            } else {
                "perplexity"
            })
            .light_line_style(TRANSPARENT)
            .draw()?;
        chart.draw_series(points.iter().enumerate().map(|(i, &(name, x, y))| {
            let label = Text::new(name.to_owned(), (9, -6), ("sans-serif", 14));
            EmptyElement::at((x, y)) + Circle::new((0, 0), 5, colour(i).filled()) + label
        }))?;
        Ok(())
    })
}

fn legend<'a, X, Y>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
) -> Result<(), Box<dyn std::error::Error>>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .draw()?;
    Ok(())
}
