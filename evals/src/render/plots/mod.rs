//! Plots of a report as inline SVG.

mod divergence;
mod labels;
mod sizes;
mod windows;

pub(super) use divergence::{Histogram, kld_distribution, kld_exceeded};
pub(super) use sizes::{SizedFile, size_against_quality, sizes};
pub(super) use windows::{by_window, kld_by_depth, perplexity_by_depth};

use crate::error::{Error, Result};
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use std::ops::Range;

/// Width of a plot in pixels.
const WIDTH: u32 = 800;
/// Height of a single plot.
const HEIGHT: u32 = 380;
/// Height of each of several small plots.
const PANEL: u32 = 250;
/// Size of text in pixels: labels, and titles of panels.
const LABEL: u32 = 15;
const TITLE: u32 = 16;

/// Colours that readers with any colour vision can tell apart (Okabe and Ito). The page has lighter ones for a dark
/// background.
pub(super) const COLOURS: [RGBColor; 7] = [
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

pub(super) fn colour(i: usize) -> RGBColor {
    COLOURS[i % COLOURS.len()]
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
    // Text and axes use the page's colours, light or dark.
    out = out.replace("#000000", "currentColor");
    for (i, RGBColor(r, g, b)) in COLOURS.iter().enumerate() {
        out = out.replace(&format!("#{r:02X}{g:02X}{b:02X}"), &format!("var(--c{i})"));
    }
    Ok(out)
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

/// An axis with ticks at given places.
#[derive(Clone)]
struct Axis {
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Axis {
    /// An axis with the ticks that `places` finds for a range.
    fn new(range: Range<f64>, places: fn(f64, f64) -> Vec<f64>) -> Self {
        Axis {
            ticks: places(range.start, range.end),
            range,
        }
    }
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        RangedCoordf64::from(self.range.clone()).map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() {
            Vec::new()
        } else {
            self.ticks.clone()
        }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// Nice places for the ticks of a linear axis: multiples of 1, 2 or 5 times a power of ten, four to nine of them.
fn linear_ticks(low: f64, high: f64) -> Vec<f64> {
    let wanted = (high - low).max(1e-12) / 8.0;
    let power = 10f64.powf(wanted.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|s| s * power);
    let step = steps
        .into_iter()
        .find(|s| *s >= wanted)
        .unwrap_or(10.0 * power);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|i| i as f64 * step).collect()
}

/// Nice places for the ticks of a logarithmic axis, all as decimal logarithms: powers of ten, with 2 and 5 times
/// these or with all that a linear axis would have where the range is small.
fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    if high - low < 0.9 {
        let ticks = linear_ticks(10f64.powf(low), 10f64.powf(high)).into_iter();
        return ticks.map(f64::log10).collect();
    }
    let factors: &[f64] = if high - low < 3.5 {
        &[1.0, 2.0, 5.0]
    } else {
        &[1.0]
    };
    let powers = low.floor() as i32..=high.ceil() as i32;
    powers
        .flat_map(|p| factors.iter().map(move |f| f64::from(p) + f.log10()))
        .filter(|t| (low..=high).contains(t))
        .collect()
}

/// The powers of ten in a range of decimal logarithms.
fn decades(low: f64, high: f64) -> Vec<f64> {
    (low.ceil() as i32..=high.floor() as i32)
        .map(f64::from)
        .collect()
}

/// A number of an axis without needless digits.
fn plain(v: f64) -> String {
    if v != 0.0 && v.abs() < 1e-4 {
        return format!("{v:.0e}");
    }
    let text = format!("{v:.5}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" {
        "0".into()
    } else {
        text.to_owned()
    }
}

/// Two significant digits, without an exponent if that is short.
fn significant(v: f64) -> String {
    match v {
        0.0 => "0".into(),
        0.001.. => format!("{v:.*}", (1 - v.log10().floor() as i32).max(0) as usize),
        _ => format!("{v:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let plains = [8.0, 2.5, -0.0, 0.005, 1e-6].map(plain);
        assert_eq!(plains, ["8", "2.5", "0", "0.005", "1e-6"]);
        assert_eq!(shortened("a-very-long-name", 7), "a-v…ame");
        assert_eq!(shortened("short", 7), "short");
    }
    #[test]
    fn ticks_are_round_numbers_in_their_range() {
        assert_eq!(linear_ticks(-0.3, 3.1), [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]);
        let back = |low: f64, high: f64| -> Vec<f64> {
            let ticks = log_ticks(low.log10(), high.log10()).into_iter();
            ticks.map(|t| (10f64.powf(t) * 1e6).round() / 1e6).collect()
        };
        assert_eq!(back(7.0, 16.0), [8.0, 10.0, 12.0, 14.0, 16.0]);
        assert_eq!(back(0.0015, 0.09), [0.002, 0.005, 0.01, 0.02, 0.05]);
        assert_eq!(back(0.9, 1e4), [1.0, 10.0, 100.0, 1000.0, 10000.0]);
        assert_eq!(
            decades(-6.0, 0.3),
            [-6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0]
        );
    }
}
