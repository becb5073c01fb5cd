//! How the KL divergence is distributed over tokens.

use super::{Axis, HEIGHT, LABEL, colour, decades, panels, svg};
use crate::error::Result;
use crate::render::Document;
use crate::stats;
use plotters::prelude::*;

/// Shares of samples by decade of their size. Samples below the first bin are counted in it.
pub(in crate::render) struct Histogram {
    lowest: i32,     // log10 of the first bin's lower edge, in steps
    per_decade: i32, // bins of a decade
    shares: Vec<f64>,
}

/// Lowest decade shown; a divergence below 1e-7 is rounding.
const LOWEST_DECADE: i32 = -7;

impl Histogram {
    /// Counts `samples` in `per_decade` bins per decade, from 1e-7 up to the greatest.
    pub(in crate::render) fn new(samples: impl Iterator<Item = f64>, per_decade: i32) -> Self {
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

    /// Decimal logarithm of the upper edge of the last bin, at least 0.
    fn end(&self) -> f64 {
        let bins = self.lowest + self.shares.len() as i32;
        (f64::from(bins) / f64::from(self.per_decade)).max(0.0)
    }

    /// Lower edge, upper edge and share of every bin.
    pub(in crate::render) fn bins(&self) -> impl Iterator<Item = (f64, f64, f64)> + '_ {
        let edge = |i: usize| {
            let step = f64::from(self.lowest + i as i32) / f64::from(self.per_decade);
            10f64.powf(step)
        };
        let shares = self.shares.iter().enumerate();
        shares.map(move |(i, &s)| (edge(i), edge(i + 1), s))
    }
}

/// Share of tokens by KL divergence, for one model: with lines at its mean and at the quantiles of 50 and 99 %.
pub(in crate::render) fn kld_distribution(document: &Document<'_>) -> Result<String> {
    const PER_DECADE: i32 = 5;
    let names: Vec<&str> = document.models.iter().map(|m| m.name.as_str()).collect();
    panels("the KL divergence's distribution", &names, |i, chart| {
        let evaluation = document.models[i].evaluation;
        let histogram = Histogram::new(evaluation.pairs.iter().map(|p| p.kld), PER_DECADE);
        let top = 115.0 * histogram.bins().map(|b| b.2).fold(0.01, f64::max);
        let (low, right) = (f64::from(LOWEST_DECADE), histogram.end());
        let mut chart = chart.build_cartesian_2d(Axis::new(low..right, decades), 0f64..top)?;
        chart
            .configure_mesh()
            .x_desc("KL divergence, nats")
            .y_desc("% of tokens")
            .y_labels(5)
            .label_style(("sans-serif", LABEL))
            .x_label_formatter(&|v| power(*v))
            .y_label_formatter(&|v| format!("{v:.0}"))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let c = colour(i);
        let steps = histogram
            .bins()
            .flat_map(|(l, r, s)| [(l.log10(), 100.0 * s), (r.log10(), 100.0 * s)]);
        let area = AreaSeries::new(steps, 0.0, c.mix(0.25)).border_style(c.stroke_width(2));
        chart.draw_series(area)?;
        let Some(against) = &evaluation.report.against else {
            return Ok(());
        };
        let k = &against.kld;
        let style = ("sans-serif", LABEL).into_font().color(&BLACK);
        // The mean is often close to the median: their names stand at different heights.
        for (name, at, up) in [
            ("median", k.median, 1.0),
            ("mean", k.mean, 0.93),
            ("99 %", k.p99, 1.0),
        ] {
            if at > 0.0 && (low..right).contains(&at.log10()) {
                let line = [(at.log10(), 0.0), (at.log10(), up * top)];
                let dashes = DashedLineSeries::new(line, 4, 4, BLACK.stroke_width(1));
                chart.draw_series(dashes)?;
                let name = format!("{name} {}", super::significant(at));
                let beside_line = Text::new(name, (4, 0), style.clone());
                let label = EmptyElement::at((at.log10(), up * top)) + beside_line;
                chart.plotting_area().draw(&label)?;
            }
        }
        Ok(())
    })
}

/// For several models, in one plot: the share of tokens whose KL divergence exceeds a value, both axes logarithmic, so
/// that rare tokens show. A mark on each curve shows its mean.
pub(in crate::render) fn kld_exceeded(document: &Document<'_>) -> Result<String> {
    let curves: Vec<Vec<f64>> = document
        .models
        .iter()
        .map(|m| stats::sorted(m.evaluation.pairs.iter().map(|p| p.kld)))
        .collect();
    let greatest = curves
        .iter()
        .filter_map(|c| c.last())
        .fold(1e-4, |a: f64, &b| a.max(b));
    let most = curves.iter().map(Vec::len).max().unwrap_or(1).max(10);
    let (left, right) = (-6.0, greatest.log10() + 0.15);
    let bottom = 2.0 - (most as f64).log10().min(4.0);
    svg("the KL divergence's distribution", HEIGHT, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(48)
            .y_label_area_size(84)
            .build_cartesian_2d(
                Axis::new(left..right, decades),
                Axis::new(bottom..2.02, decades),
            )?;
        chart
            .configure_mesh()
            .x_desc("KL divergence, nats")
            .y_desc("% of tokens above it")
            .label_style(("sans-serif", LABEL))
            .x_label_formatter(&|v| power(*v))
            .y_label_formatter(&|v| format!("{} %", 10f64.powf(*v)))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let inside = |p: &(f64, f64)| p.0 >= left && p.1 >= bottom;
        for (i, (curve, m)) in curves.iter().zip(&document.models).enumerate() {
            let points = exceeded(curve).map(|(v, s)| (v.max(1e-12).log10(), s.log10()));
            let line = LineSeries::new(points.filter(inside), colour(i).stroke_width(2));
            chart.draw_series(line)?;
            let mean = m
                .evaluation
                .report
                .against
                .as_ref()
                .map_or(0.0, |c| c.kld.mean);
            let above = curve.len() - curve.partition_point(|v| *v <= mean);
            let at = (
                mean.max(1e-12).log10(),
                (100.0 * above as f64 / curve.len().max(1) as f64).log10(),
            );
            if inside(&at) {
                chart.draw_series([Circle::new(at, 5, colour(i).filled())])?;
            }
        }
        Ok(())
    })
}

/// Points of the curve of an ascending sample: a value, and the percentage of samples that are at least as great. As few
/// as show the curve: rare values are all there.
fn exceeded(ascending: &[f64]) -> impl Iterator<Item = (f64, f64)> + '_ {
    let n = ascending.len();
    let mut ranks: Vec<usize> = Vec::new(); // counted from the greatest
    let mut rank = 1usize;
    while rank <= n {
        ranks.push(rank);
        rank = (rank + 1).max((rank as f64 * 1.03) as usize);
    }
    ranks
        .into_iter()
        .rev()
        .map(move |r| (ascending[n - r], 100.0 * r as f64 / n as f64))
}

/// A power of ten, given its exponent, as text.
fn power(exponent: f64) -> String {
    match exponent.round() as i32 {
        e @ -3..=3 => format!("{}", 10f64.powi(e)),
        e => format!("1e{e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_is_the_share_of_tokens_above() {
        let values: Vec<f64> = (1..=1000).map(f64::from).collect();
        let points: Vec<(f64, f64)> = exceeded(&values).collect();
        assert!(points.len() < 300, "{}", points.len());
        for &(v, share) in &points {
            let above = values.iter().filter(|x| **x >= v).count();
            assert!((share - above as f64 / 10.0).abs() < 1e-9, "{v}: {share}");
        }
        assert!(points.is_sorted_by(|a, b| a.0 <= b.0 && a.1 >= b.1));
        assert_eq!(points.last(), Some(&(1000.0, 0.1)));
        assert_eq!(exceeded(&[]).count(), 0);
    }

    #[test]
    fn powers_are_short() {
        let shown = [-6.0, -3.0, -1.0, 0.0, 2.0].map(power);
        assert_eq!(shown, ["1e-6", "0.001", "0.1", "1", "100"]);
    }
}
