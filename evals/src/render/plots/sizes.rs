//! Size against quality.

use super::labels::{Rect, label_places};
use super::{Axis, Drawn, HEIGHT, LABEL, REFERENCE, colour, linear_ticks, log_ticks, padded, svg};
use crate::error::Result;
use crate::render::verdict::YARDSTICK;
use crate::render::{Document, Section};
use plotters::coord::Shift;
use plotters::prelude::*;

/// A mark of the plot, in the units of its axes.
struct PlotMark<'a> {
    name: &'a str,
    x: f64,
    y: f64,
    /// Ends of its error bar.
    bar: (f64, f64),
}

/// A file of the plot, in its own units.
pub(in crate::render) struct SizedFile<'a> {
    /// Its name.
    pub(in crate::render) name: &'a str,
    /// Its bytes.
    pub(in crate::render) bytes: u64,
    /// Its mean KL divergence, or its perplexity.
    pub(in crate::render) value: f64,
    /// The standard error of that.
    pub(in crate::render) se: f64,
}

impl<'a> SizedFile<'a> {
    fn of_section(m: &'a Section<'_>) -> Self {
        let (r, errors) = (&m.evaluation.report, m.evaluation.errors());
        let (value, se) = match &r.against {
            Some(c) => (c.kld.mean, errors.kld),
            None => (r.ppl, errors.ppl),
        };
        SizedFile {
            name: &m.name,
            bytes: m.bytes,
            value,
            se,
        }
    }
}

/// The models of a document by size; see [`sizes`].
pub(in crate::render) fn size_against_quality(document: &Document<'_>) -> Result<String> {
    let files: Vec<SizedFile<'_>> = document.models.iter().map(SizedFile::of_section).collect();
    let source = document.reference.as_ref();
    sizes(&files, source.map(|r| (r.name.as_str(), r.bytes)))
}

/// A mark for every file: its bytes and its mean KL divergence, both on logarithmic axes, with two standard errors
/// up and down, the best of each size joined by a line, the source with its bytes, and the ranges of the yardstick
/// behind. Without a source: perplexity.
pub(in crate::render) fn sizes(
    files: &[SizedFile<'_>],
    source: Option<(&str, u64)>,
) -> Result<String> {
    let by_kld = source.is_some();
    let least = 1e-9; // the reference itself has none
    let scale = |v: f64| if by_kld { v.max(least).log10() } else { v };
    let marks: Vec<PlotMark<'_>> = files
        .iter()
        .map(|f| PlotMark {
            name: f.name,
            x: (f.bytes as f64 / 1e6).log10(),
            y: scale(f.value),
            bar: (scale(f.value - 2.0 * f.se), scale(f.value + 2.0 * f.se)),
        })
        .collect();
    let source = source.map(|(name, bytes)| (format!("{name}: 0"), (bytes as f64 / 1e6).log10()));
    let (left, right) = padded(marks.iter().map(|m| m.x).chain(source.iter().map(|s| s.1)));
    let room = 0.05f64.max(0.04 * (right - left));
    let across = left - room..right + room;
    let down = if by_kld {
        // At least one kind of file is in sight above and below.
        let (low, high) = padded(marks.iter().map(|m| m.y));
        low.min(high - 0.8) - 0.3..high.max(low + 0.8) + 0.3
    } else {
        let (low, high) = padded(marks.iter().flat_map(|m| [m.bar.0, m.bar.1]));
        low..high
    };
    svg("size against quality", HEIGHT, |area| {
        let y = if by_kld { log_ticks } else { linear_ticks };
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .x_label_area_size(48)
            .y_label_area_size(84)
            .build_cartesian_2d(
                Axis::new(across.clone(), log_ticks),
                Axis::new(down.clone(), y),
            )?;
        let plot = chart.plotting_area().clone();
        if by_kld {
            bands(area, &plot, &across, &down)?;
        }
        chart
            .configure_mesh()
            .x_desc("MB of tensors")
            .y_desc(if by_kld {
                "mean KL divergence, nats"
            } else {
                "perplexity"
            })
            .label_style(("sans-serif", LABEL))
            .x_label_formatter(&|v| super::plain(10f64.powf(*v)))
            .y_label_formatter(&|v| super::plain(if by_kld { 10f64.powf(*v) } else { *v }))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let line = if marks.len() > 1 {
            frontier(&marks, across.end)
        } else {
            Vec::new()
        };
        let style = BLACK.mix(0.45).stroke_width(1);
        chart.draw_series(LineSeries::new(line.clone(), style))?;
        let inside = |v: f64| v.clamp(down.start, down.end);
        for (i, m) in marks.iter().enumerate() {
            let bar = vec![(m.x, inside(m.bar.0)), (m.x, inside(m.bar.1))];
            plot.draw(&PathElement::new(bar, colour(i).stroke_width(2)))?;
            plot.draw(&Circle::new((m.x, m.y), 6, colour(i).filled()))?;
        }
        let mut names: Vec<&str> = marks.iter().map(|m| m.name).collect();
        let mut pixels: Vec<(i32, i32)> = marks
            .iter()
            .map(|m| plot.map_coordinate(&(m.x, m.y)))
            .collect();
        if let Some((name, x)) = &source {
            // Zero has no place on the axis: an open mark on its lower end.
            plot.draw(&Circle::new((*x, down.start), 6, REFERENCE.stroke_width(2)))?;
            names.push(name);
            pixels.push(plot.map_coordinate(&(*x, down.start)));
        }
        let steps: Vec<Rect> = line
            .windows(2)
            .map(|ends| {
                let [a, b] = [ends[0], ends[1]].map(|end| plot.map_coordinate(&end));
                (
                    a.0.min(b.0),
                    a.1.min(b.1),
                    a.0.max(b.0) + 1,
                    a.1.max(b.1) + 1,
                )
            })
            .collect();
        let (across, down) = plot.get_pixel_range();
        let style = ("sans-serif", LABEL).into_font().color(&BLACK);
        for (name, at) in names
            .iter()
            .zip(label_places(&names, &pixels, &steps, across, down))
        {
            area.draw(&Text::new((*name).to_owned(), at, style.clone()))?;
        }
        Ok(())
    })
}

type Plane = plotters::coord::cartesian::Cartesian2d<Axis, Axis>;

/// The yardstick's ranges, as bands with their names at the right.
fn bands(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    plot: &DrawingArea<SVGBackend<'_>, Plane>,
    across: &std::ops::Range<f64>,
    down: &std::ops::Range<f64>,
) -> Drawn {
    let style = ("sans-serif", LABEL - 2).into_font().color(&REFERENCE);
    for rung in &YARDSTICK {
        let (low, high) = (
            rung.low.log10().max(down.start),
            rung.high.log10().min(down.end),
        );
        if low >= high {
            continue;
        }
        let corners = [(across.start, low), (across.end, high)];
        plot.draw(&Rectangle::new(corners, BLACK.mix(0.07).filled()))?;
        let (x, y) = plot.map_coordinate(&(across.end, high));
        if plot.map_coordinate(&(across.end, low)).1 - y < LABEL as i32 {
            continue; // no room for its name
        }
        let width = rung.name.len() as i32 * 8 + 6;
        area.draw(&Text::new(rung.name, (x - width, y + 4), style.clone()))?;
    }
    Ok(())
}

/// The least divergence that a size allows, as a staircase that ends at `right`.
fn frontier(marks: &[PlotMark<'_>], right: f64) -> Vec<(f64, f64)> {
    let mut order: Vec<(f64, f64)> = marks.iter().map(|m| (m.x, m.y)).collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let mut line: Vec<(f64, f64)> = Vec::new();
    for (x, y) in order {
        match line.last() {
            Some(&(_, best)) if y >= best => continue,
            Some(&(_, best)) => line.push((x, best)),
            None => {}
        }
        line.push((x, y));
    }
    if let Some(&(_, best)) = line.last() {
        line.push((right, best));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frontier_leaves_out_what_is_larger_and_worse() {
        let mark = |x, y| PlotMark {
            name: "",
            x,
            y,
            bar: (y, y),
        };
        let marks = [
            mark(3.0, 1.0),
            mark(1.0, 5.0),
            mark(2.0, 6.0),
            mark(2.5, 4.0),
        ];
        let expected = [
            (1.0, 5.0),
            (2.5, 5.0),
            (2.5, 4.0),
            (3.0, 4.0),
            (3.0, 1.0),
            (9.0, 1.0),
        ];
        assert_eq!(frontier(&marks, 9.0), expected);
        assert!(frontier(&[], 1.0).is_empty());
    }
}
