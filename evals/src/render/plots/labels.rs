//! Where the names of marks stand in a plot.

use super::LABEL;

/// A rectangle of pixels: left, top, right, bottom.
pub(super) type Rect = (i32, i32, i32, i32);

/// Upper left corners for the names of `marks` in a plot: each beside its mark, covering no
/// other mark or name and no obstacle, or as little of them as possible.
pub(super) fn label_places(
    names: &[&str],
    marks: &[(i32, i32)],
    obstacles: &[Rect],
    across: std::ops::Range<i32>,
    down: std::ops::Range<i32>,
) -> Vec<(i32, i32)> {
    const GAP: i32 = 10;
    let height = LABEL as i32 + 2;
    let mut taken: Vec<Rect> = marks
        .iter()
        .map(|&(x, y)| (x - 6, y - 6, x + 6, y + 6))
        .chain(obstacles.iter().copied())
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
        let places = label_places(&names, &marks, &[], 100..800, 10..400);
        let rects: Vec<Rect> = names
            .iter()
            .zip(&places)
            .map(|(n, &(x, y))| (x, y, x + n.len() as i32 * LABEL as i32 * 11 / 20, y + 17))
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
    fn labels_avoid_lines() {
        let line = (200, 99, 500, 101);
        let places = label_places(&["name"], &[(200, 100)], &[line], 0..600, 0..300);
        let (x, y) = places[0];
        assert_eq!(overlap((x, y, x + 35, y + 17), line), 0, "{x}, {y}");
    }
}
