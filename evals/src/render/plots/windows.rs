//! Quality over the windows of a text, and by depth in them.

use super::{
    Axis, Drawn, LABEL, REFERENCE, colour, linear_ticks, log_ticks, padded, panels, plain,
};
use crate::depth::DepthBucket;
use crate::error::Result;
use crate::render::{Document, Section};
use plotters::prelude::*;

/// A plot for every model: by how many percent perplexity differs from the reference's in every window, as bars from 0,
/// with a dashed line at the whole text's. Without a reference: perplexity by window.
pub(in crate::render) fn by_window(document: &Document<'_>) -> Result<String> {
    let compared = document.reference.is_some();
    let names: Vec<&str> = document.models.iter().map(|m| m.name.as_str()).collect();
    let values: Vec<Vec<f64>> = document
        .models
        .iter()
        .map(|m| match compared {
            true => changes(m),
            false => m.evaluation.window_ppl(),
        })
        .collect();
    let windows = values.iter().map(Vec::len).max().unwrap_or(1) as f64;
    let what = if compared {
        "change of perplexity, %"
    } else {
        "perplexity"
    };
    panels(what, &names, |i, chart| {
        let all = values[i].iter().copied();
        let (low, high) = match compared {
            true => padded(all.chain([0.0])),
            false => padded(all),
        };
        let mut chart =
            chart.build_cartesian_2d(-0.5..windows - 0.5, Axis::new(low..high, linear_ticks))?;
        chart
            .configure_mesh()
            .x_desc("window")
            .y_desc(what)
            .x_labels((windows as usize).min(8))
            .label_style(("sans-serif", LABEL))
            .x_label_formatter(&|v| format!("{v:.0}"))
            .y_label_formatter(&|v| plain(*v))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let c = colour(i);
        let steps = values[i].iter().enumerate().flat_map(|(x, &v)| {
            let (left, right) = (x as f64 - 0.4, x as f64 + 0.4);
            [(left, 0.0), (left, v), (right, v), (right, 0.0)]
        });
        let report = &document.models[i].evaluation.report;
        let whole = if let Some(against) = &report.against {
            chart.draw_series(AreaSeries::new(steps, 0.0, c.mix(0.8)))?;
            100.0 * against.ln_ppl_ratio.exp_m1()
        } else {
            let points = values[i].iter().enumerate().map(|(x, &v)| (x as f64, v));
            chart.draw_series(LineSeries::new(points.clone(), c.stroke_width(1)))?;
            chart.draw_series(points.map(|p| Circle::new(p, 3, c.filled())))?;
            report.ppl
        };
        let line = [(-0.5, whole), (windows - 0.5, whole)];
        chart.draw_series(DashedLineSeries::new(line, 5, 4, BLACK.stroke_width(1)))?;
        if compared {
            let zero = [(-0.5, 0.0), (windows - 0.5, 0.0)];
            chart.draw_series(LineSeries::new(zero, REFERENCE.stroke_width(1)))?;
        }
        Ok(())
    })
}

/// By how many percent a model's perplexity differs from the reference's in every window.
fn changes(model: &Section<'_>) -> Vec<f64> {
    let e = model.evaluation;
    let window = e.scored.len().max(1);
    let change = |(own, pairs): (&[f64], &[crate::PairScore])| {
        let ratios = own.iter().zip(pairs).map(|(nll, p)| nll - p.reference_nll);
        100.0 * crate::stats::mean(ratios).exp_m1()
    };
    e.nll
        .chunks(window)
        .zip(e.pairs.chunks(window))
        .map(change)
        .collect()
}

/// Points of a curve by depth: position, value, and the length of the bars up and down.
type Curve = Vec<(f64, f64, f64)>;

/// Mean KL divergence by depth: a plot for every model, with two standard errors up and down.
pub(in crate::render) fn kld_by_depth(document: &Document<'_>) -> Result<String> {
    let curves = curves(document, |b| {
        let c = b.against?;
        Some((c.kld, 2.0 * c.kld_se))
    });
    by_depth(document, "mean KL divergence, nats", &curves, true)
}

/// By how many percent perplexity differs from the reference's, by depth; without a reference, perplexity.
pub(in crate::render) fn perplexity_by_depth(document: &Document<'_>) -> Result<String> {
    if document.reference.is_none() {
        let curves = curves(document, |b| Some((b.ppl, 2.0 * b.ppl_se)));
        return by_depth(document, "perplexity", &curves, false);
    }
    let curves = curves(document, |b| {
        let c = b.against?;
        let change = 100.0 * c.ln_ppl_ratio.exp_m1();
        Some((change, 2.0 * (100.0 + change) * c.ln_ppl_ratio_se))
    });
    by_depth(document, "change of perplexity, %", &curves, true)
}

/// A curve for every model.
fn curves(
    document: &Document<'_>,
    value: impl Fn(&DepthBucket) -> Option<(f64, f64)>,
) -> Vec<Curve> {
    let point = |b: &DepthBucket| {
        let (value, bar) = value(b)?;
        Some(((b.from + b.to) as f64 / 2.0, value, bar))
    };
    let curve = |m: &Section<'_>| m.evaluation.by_depth().iter().filter_map(point).collect();
    document.models.iter().map(curve).collect()
}

/// Draws a curve for every model over the logarithm of the position, on an axis that has 0 if `from_zero`.
fn by_depth(
    document: &Document<'_>,
    what: &'static str,
    curves: &[Curve],
    from_zero: bool,
) -> Result<String> {
    let names: Vec<&str> = document.models.iter().map(|m| m.name.as_str()).collect();
    let deepest = curves.iter().flatten().map(|p| p.0).fold(128.0, f64::max);
    let (left, right) = (32f64.log10(), (1.5 * deepest).log10());
    panels(what, &names, |i, chart| -> Drawn {
        let ends = curves[i].iter().flat_map(|p| [p.1 - p.2, p.1 + p.2]);
        let (low, high) = padded(ends.chain(from_zero.then_some(0.0)));
        let range = low..high;
        let mut chart = chart.build_cartesian_2d(
            Axis::new(left..right, log_ticks),
            Axis::new(range.clone(), linear_ticks),
        )?;
        chart
            .configure_mesh()
            .x_desc("position")
            .y_desc(what)
            .label_style(("sans-serif", LABEL))
            .x_label_formatter(&|v| plain(10f64.powf(*v)))
            .y_label_formatter(&|v| plain(*v))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let c = colour(i);
        let points = || curves[i].iter().map(|&(x, y, _)| (x.log10(), y));
        chart.draw_series(LineSeries::new(points(), c.stroke_width(2)))?;
        chart.draw_series(points().map(|p| Circle::new(p, 4, c.filled())))?;
        let bars = curves[i].iter().filter(|p| p.2 > 0.0).map(|&(x, y, bar)| {
            let (low, high) = ((y - bar).max(range.start), (y + bar).min(range.end));
            PathElement::new(vec![(x.log10(), low), (x.log10(), high)], c.stroke_width(1))
        });
        chart.draw_series(bars)?;
        if range.start < 0.0 {
            let zero = [(left, 0.0), (right, 0.0)];
            chart.draw_series(LineSeries::new(zero, REFERENCE.stroke_width(1)))?;
        }
        Ok(())
    })
}
