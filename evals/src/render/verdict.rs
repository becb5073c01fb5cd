//! What the figures of a model mean, in words, beside known quantizations.

use super::document::{Document, Reference, Section};
use super::numbers::{percent_change, plus_minus};

/// A kind of file that readers know, and the range of mean KL divergences that such files have.
pub(super) struct Rung {
    /// Its name in llama.cpp.
    pub(super) name: &'static str,
    /// The least of the measured means, in nats.
    pub(super) low: f64,
    /// The greatest.
    pub(super) high: f64,
    /// Bits per weight of the demo model's file, embedding and head included.
    bits: f64,
}

/// llama.cpp's files, best first. A test takes these figures from the records in `benches/records`.
pub(super) const YARDSTICK: [Rung; 5] = [
    rung("Q8_0", 0.000186, 0.001597, 8.51),
    rung("Q6_K", 0.001911, 0.004751, 6.57),
    rung("Q5_K_M", 0.005229, 0.008843, 5.77),
    rung("Q4_K_M", 0.014919, 0.032531, 5.02),
    rung("Q3_K_M", 0.031898, 0.075857, 4.29),
];

const fn rung(name: &'static str, low: f64, high: f64, bits: f64) -> Rung {
    Rung {
        name,
        low,
        high,
        bits,
    }
}

/// Types differ in size by this factor at most to be called of about the same size.
const ALIKE: f64 = 1.12;

/// Where the yardstick comes from.
const SOURCE: &str = "Yardstick: the mean KL divergence of llama.cpp's files, made with an importance matrix, of \
     two small models: nq's demo model on books and on WikiText-2, and a mixture of experts on books";

/// What the figures of each model mean, in words.
pub fn verdicts(document: &Document<'_>) -> Vec<String> {
    let Some(reference) = &document.reference else {
        return vec![
            "Perplexity alone does not show what quantization changed: \
             --against SOURCE compares every token with the source."
                .into(),
        ];
    };
    let models = document.models.iter();
    models
        .filter_map(|m| verdict(m, reference, document.models.len() > 1))
        .collect()
}

/// What the verdicts are based on; `None` without a reference.
pub(super) fn yardstick(document: &Document<'_>) -> Option<String> {
    document.reference.as_ref()?;
    let rungs = YARDSTICK.iter().rev();
    let rungs: Vec<String> = rungs.map(|r| format!("{} {}", r.name, range(r))).collect();
    Some(format!(
        "{SOURCE}: {}. Other models and texts give other figures: it says which kind of file this one is like, not \
         which of two is better. For that, compare a GGUF file of the same model on the same text: \
         nq eval FILE.gguf --against SOURCE.",
        rungs.join(", ")
    ))
}

/// The verdict on a model: a sentence if it is one of `several`.
fn verdict(section: &Section<'_>, reference: &Reference, several: bool) -> Option<String> {
    let e = section.evaluation;
    let c = e.report.against.as_ref()?;
    let (errors, name, source) = (e.errors(), &section.name, &reference.name);
    let floor = section.self_noise.map_or(0.0, |n| n.mean);
    if c.kld.mean <= floor.max(1e-9) {
        return Some(format!(
            "{name} cannot be told from {source} on this text: its KL divergence is below the floor of the measurement."
        ));
    }
    let mean = plus_minus(c.kld.mean, errors.kld);
    let beside = beside(c.kld.mean) + &of_size(section.bits_per_weight, c.kld.mean);
    if several {
        return Some(format!(
            "{name}: mean KL divergence {mean} from {source}, {beside}."
        ));
    }
    let size = match reference.bytes as f64 / section.bytes as f64 {
        ratio if ratio > 1.005 => format!("{name} is {ratio:.1} times smaller than {source}. "),
        _ => String::new(),
    };
    let ppl = percent_change(c.ln_ppl_ratio, errors.ln_ppl_ratio);
    Some(format!(
        "{size}Its predictions differ from {source}'s by a mean KL divergence of {mean} nats per token, {beside}. Both \
         prefer the same next token at {:.1} % of positions, and perplexity changes by {ppl}.",
        100.0 * c.same_top1,
    ))
}

/// Says which files of the yardstick have a divergence like this.
fn beside(kld: f64) -> String {
    let like: Vec<String> = YARDSTICK
        .iter()
        .filter(|r| (r.low..=r.high).contains(&kld))
        .map(|r| format!("{} ({})", r.name, range(r)))
        .collect();
    if !like.is_empty() {
        return format!("like llama.cpp's {}", like.join(" and "));
    }
    let better = YARDSTICK.iter().rfind(|r| r.high < kld);
    let worse = YARDSTICK.iter().find(|r| r.low > kld);
    match (better, worse) {
        (Some(b), Some(w)) => format!(
            "between llama.cpp's {} ({}) and {} ({})",
            b.name,
            range(b),
            w.name,
            range(w)
        ),
        (None, Some(w)) => format!("closer to it than llama.cpp's {} ({})", w.name, range(w)),
        (Some(b), None) => format!("farther from it than llama.cpp's {} ({})", b.name, range(b)),
        (None, None) => String::new(),
    }
}

/// Says which file of the yardstick is nearest in size, if one is of about this size, and what it has, unless that is like this
/// divergence.
fn of_size(bits: f64, kld: f64) -> String {
    let apart = |r: &Rung| (bits / r.bits).max(r.bits / bits);
    let nearest = YARDSTICK
        .iter()
        .min_by(|a, b| apart(a).total_cmp(&apart(b)));
    nearest
        .filter(|r| apart(r) <= ALIKE)
        .map_or_else(String::new, |r| match (r.low..=r.high).contains(&kld) {
            true => format!("; {} has about its {bits:.1} bits per weight too", r.name),
            false => format!(
                "; at about its {bits:.1} bits per weight, llama.cpp's {} has {}",
                r.name,
                range(r)
            ),
        })
}

fn range(r: &Rung) -> String {
    format!("{:.4} to {:.4}", r.low, r.high)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const DEMO: &str = "2026-11-23-compare-quality.csv";
    /// Parameters of the demo model.
    const PARAMETERS: f64 = 13_900_544.0;

    /// The figures of a type of llama.cpp in a record, in the columns of these names.
    fn figures(file: &str, name: &str, columns: &[&str]) -> Vec<f64> {
        let records = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/records");
        let text = std::fs::read_to_string(records.join(file)).unwrap();
        let mut lines = text.lines().filter(|l| !l.starts_with('#'));
        let head: Vec<&str> = lines.next().unwrap().split(',').collect();
        let row = lines.find(|l| l.starts_with(&format!("llama.cpp,{name},")));
        let row: Vec<&str> = row.unwrap().split(',').collect();
        let texts = head.iter().zip(row);
        let texts = texts.filter(|(h, _)| columns.contains(h));
        texts.map(|(_, v)| v.parse().unwrap()).collect()
    }

    /// The mean divergences of a type of llama.cpp, over all models and texts.
    fn recorded(name: &str) -> Vec<f64> {
        let files = [DEMO, "2026-11-23-mixture-quality.csv"];
        let files = files.iter();
        files
            .flat_map(|file| figures(file, name, &["books_kld", "wiki_kld"]))
            .collect()
    }

    /// Bytes of the demo model's file.
    fn bytes(name: &str) -> f64 {
        figures(DEMO, name, &["tensor_bytes"])[0]
    }

    #[test]
    fn the_yardstick_is_what_was_measured() {
        for rung in &YARDSTICK {
            let found = recorded(rung.name);
            assert_eq!(found.len(), 3, "{}", rung.name);
            let (low, high) = found
                .iter()
                .fold((f64::MAX, 0f64), |(l, h), &v| (l.min(v), h.max(v)));
            assert_eq!((rung.low, rung.high), (low, high), "{}", rung.name);
            let bits = 8.0 * bytes(rung.name) / PARAMETERS;
            assert!((rung.bits - bits).abs() < 0.006, "{}: {bits}", rung.name);
        }
    }

    #[test]
    fn files_are_compared_with_those_of_their_size() {
        assert_eq!(
            of_size(4.9, 0.01),
            "; at about its 4.9 bits per weight, llama.cpp's Q4_K_M has 0.0149 to 0.0325"
        );
        assert_eq!(
            of_size(4.9, 0.02),
            "; Q4_K_M has about its 4.9 bits per weight too"
        );
        assert!(of_size(8.1, 1.0).contains("Q8_0") && of_size(4.4, 1.0).contains("Q3_K_M"));
        assert_eq!(of_size(3.4, 1.0), "");
        assert_eq!(of_size(16.0, 1.0), "");
    }

    #[test]
    fn words_follow_the_figure() {
        for (kld, expected) in [
            (
                0.0001,
                "closer to it than llama.cpp's Q8_0 (0.0002 to 0.0016)",
            ),
            (0.003, "like llama.cpp's Q6_K (0.0019 to 0.0048)"),
            (
                0.011,
                "between llama.cpp's Q5_K_M (0.0052 to 0.0088) and Q4_K_M (0.0149 to 0.0325)",
            ),
            (0.018, "like llama.cpp's Q4_K_M (0.0149 to 0.0325)"),
            (
                0.032,
                "like llama.cpp's Q4_K_M (0.0149 to 0.0325) and Q3_K_M (0.0319 to 0.0759)",
            ),
            (
                0.2,
                "farther from it than llama.cpp's Q3_K_M (0.0319 to 0.0759)",
            ),
        ] {
            assert_eq!(beside(kld), expected);
        }
    }
}
