//! GPUs by name, with their makers' published figures.

use super::speed::{Kernels, lines};
use super::{Cards, DRIVER, Known};

/// The part of the published bandwidth that nq reads: .89 of an H200's (2026-11-26-gpu-hybrids.csv), .93 of an H100's
/// (2026-11-26-gpu-imitated-h100.csv).
const READ: f64 = 0.9;

/// The part of what its lanes of PCIe carry at which a card reads the computer's memory: .82 of an H200's
/// (2026-11-29-gpu-experts.csv).
const COPIED: f64 = 0.8;

struct Card {
    name: &'static str,
    capability: f64,
    gib: f64,
    gb_s: f64,
    pcie_gb_s: f64,
    measured: Option<f64>,
}

fn cards() -> impl Iterator<Item = Card> {
    lines(include_str!("cards.csv")).filter_map(|row| match row[..] {
        [name, capability, gib, gb_s, pcie_gb_s, measured, _] => Some(Card {
            name,
            capability: capability.parse().ok()?,
            gib: gib.parse().ok()?,
            gb_s: gb_s.parse().ok()?,
            pcie_gb_s: pcie_gb_s.parse().ok()?,
            measured: measured.parse().ok(),
        }),
        _ => None,
    })
}

/// A name without what people leave out: spaces, signs, makers.
fn bare(name: &str) -> String {
    let kept = name.chars().filter(|c| c.is_ascii_alphanumeric());
    let lower = kept.collect::<String>().to_ascii_lowercase();
    let shorter = ["nvidia", "geforce", "tesla", "rtx"];
    shorter
        .iter()
        .fold(lower, |name, word| name.replace(word, ""))
}

/// The cards that `text` names: `RTX 4090`, `4090`, `2 x RTX 3090`.
///
/// # Errors
/// A name that means none, or several; with the nearest ones.
pub(crate) fn find(text: &str) -> Result<Cards, String> {
    let many = text.split_once(['x', 'X']);
    let many = many.and_then(|(n, name)| Some((n.trim().parse().ok()?, name)));
    let (count, name) = many.unwrap_or((1, text));
    if !(1..=8).contains(&count) {
        return Err(format!("expected 1 to 8 cards, found {count}"));
    }
    let asked = bare(name);
    let named = |names: &[&str]| names.join(", ");
    let same: Vec<Card> = cards().filter(|c| bare(c.name) == asked).collect();
    let begins = |c: &Card| !asked.is_empty() && bare(c.name).starts_with(&asked);
    // A memory size is a part of the name: `3060` means `RTX 3060 12GB`, but not `RTX 3060 Ti`.
    let sized = |c: &Card| {
        begins(c)
            && bare(c.name)[asked.len()..].ends_with("gb")
            && bare(c.name)[asked.len()..].starts_with(|c: char| c.is_ascii_digit())
    };
    let found = match same.is_empty() {
        false => same,
        true => cards().filter(sized).collect(),
    };
    match &found[..] {
        [card] => Ok(card.cards(count)),
        [] => {
            let distance = |c: &Card| strsim::damerau_levenshtein(&bare(c.name), &asked);
            let mut near: Vec<Card> = cards().collect();
            near.sort_by_key(|c| (!begins(c), distance(c)));
            let near: Vec<&str> = near.iter().take(3).map(|c| c.name).collect();
            Err(format!(
                "no published figures of {:?} are known here: the nearest are {}; --gpu-memory takes the memory of any card",
                name.trim(),
                named(&near)
            ))
        }
        several => {
            let names: Vec<&str> = several.iter().map(|c| c.name).collect();
            Err(format!("{:?} may be {}", name.trim(), named(&names)))
        }
    }
}

impl Card {
    fn cards(&self, count: usize) -> Cards {
        let (read_gb_s, bandwidth_known) = match self.measured {
            Some(measured) => (measured, Known::Recorded),
            None => (READ * self.gb_s, Known::Computed),
        };
        Cards {
            name: self.name.to_owned(),
            count,
            free_bytes: (self.gib * 1_073_741_824.0) as u64 - DRIVER,
            memory_known: Known::Computed,
            read_gb_s: Some(read_gb_s),
            bandwidth_known,
            copied_gb_s: Some(COPIED * self.pcie_gb_s),
            kernels: kernels(self.capability),
        }
    }
}

/// The kernels of a compute capability.
pub(crate) fn kernels(capability: f64) -> Kernels {
    match (9.0..10.0).contains(&capability) {
        true => Kernels::Hopper,
        false => Kernels::Mma,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_matched_loosely_and_unknown_ones_refused_with_the_nearest() {
        for (asked, name, count) in [
            ("RTX 4090", "RTX 4090", 1),
            ("4090", "RTX 4090", 1),
            ("NVIDIA GeForce RTX 3060", "RTX 3060 12GB", 1),
            ("2 x rtx-3090", "RTX 3090", 2),
            ("2x3090", "RTX 3090", 2),
            ("h200", "H200", 1),
            ("a100 80gb", "A100 80GB", 1),
        ] {
            let found = find(asked).unwrap();
            assert_eq!((&*found.name, found.count), (name, count), "{asked}");
        }
        let why = find("RTX 4091").unwrap_err();
        assert!(why.contains("RTX 4090"), "{why}");
        let why = find("A100").unwrap_err();
        assert!(why.contains("A100 40GB, A100 80GB"), "{why}");
        let why = find("H100").unwrap_err();
        assert!(why.contains("H100 SXM"), "{why}");
        assert!(find("").is_err() && find("9 x RTX 4090").is_err());
        assert!(find("RTX").is_err());
    }

    #[test]
    fn published_figures_are_whole_and_those_that_were_measured_are_told() {
        let table = include_str!("cards.csv").lines();
        let rows = table.filter(|line| !line.starts_with('#')).count() - 1;
        assert_eq!(cards().count(), rows);
        let h200 = find("H200").unwrap();
        assert_eq!(
            (h200.read_gb_s, h200.bandwidth_known),
            (Some(4280.0), Known::Recorded)
        );
        let card = find("RTX 3090").unwrap();
        assert_eq!(
            (card.read_gb_s, card.bandwidth_known),
            (Some(0.9 * 936.0), Known::Computed)
        );
        assert_eq!(card.free_bytes, 24 * (1 << 30) - DRIVER);
    }
}
