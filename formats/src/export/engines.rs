//! Engines that load what nq exports: the rows of `engines.csv`, which
//! `benches/compare/engines.py` writes after running them. A combination without a row was not tried.

use std::collections::BTreeMap;

static TABLE: &str = include_str!("engines.csv");

/// The note for GGUF, from `benches/records/2026-11-21-llama-cpp.csv`.
pub(super) const GGUF: &str = "loads in llama.cpp (of llama-cpp-python 0.3.36)";

/// One measurement.
struct EngineMeasurement {
    format: &'static str,
    bits: usize,
    symmetric: bool,
    /// Name and version.
    engine: &'static str,
    loads: bool,
    why: &'static str,
}

fn rows() -> impl Iterator<Item = EngineMeasurement> {
    TABLE.lines().skip(1).map(|line| {
        let mut fields = line.splitn(7, ',');
        let mut next = || fields.next().expect("seven fields");
        let (format, bits, zeros, engine, loads) = (next(), next(), next(), next(), next());
        let _measured = next();
        EngineMeasurement {
            format,
            bits: bits.parse().expect("a number of bits"),
            symmetric: zeros == "sym",
            engine,
            loads: loads == "yes",
            why: next(),
        }
    })
}

/// Notes on engines that read `format` with Linears of `schemes` (bits, symmetric): one line with the
/// engines that load all of them, and one for each engine that does not.
pub(super) fn notes(format: &str, schemes: &[(usize, bool)]) -> Vec<String> {
    let mut engines: BTreeMap<&str, Vec<EngineMeasurement>> = BTreeMap::new();
    for row in rows().filter(|r| r.format == format) {
        if schemes.contains(&(row.bits, row.symmetric)) {
            engines.entry(row.engine).or_default().push(row);
        }
    }
    let loads =
        |rows: &[EngineMeasurement]| rows.len() == schemes.len() && rows.iter().all(|r| r.loads);
    let all: Vec<&str> = engines
        .iter()
        .filter(|(_, rows)| loads(rows))
        .map(|(engine, _)| *engine)
        .collect();
    let mut notes = Vec::new();
    if !all.is_empty() {
        notes.push(format!("loads in {}", all.join(", ")));
    }
    for (engine, rows) in &engines {
        if let Some(row) = rows.iter().find(|r| !r.loads) {
            notes.push(format!("does not load in {engine}: {}", row.why));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_whole() {
        let mut seen = Vec::new();
        for row in rows() {
            assert!(["GPTQ", "AWQ", "compressed-tensors"].contains(&row.format));
            assert!([4, 8].contains(&row.bits) && !row.engine.is_empty());
            assert_eq!(row.loads, row.why.is_empty(), "{}", row.engine);
            let key = (row.format, row.bits, row.symmetric, row.engine);
            assert!(!seen.contains(&key), "{key:?} twice");
            seen.push(key);
        }
        assert!(seen.len() > 10);
    }

    #[test]
    fn engines_that_refuse_are_named() {
        let gptq = notes("GPTQ", &[(4, false)]);
        assert!(
            gptq.iter().any(|n| n.starts_with("does not load in vLLM")),
            "{gptq:?}"
        );
        assert!(notes("GPTQ", &[(4, true)])[0].contains("vLLM 0.26"));
        // One unsupported scheme of several is enough for an engine to refuse.
        let mixed = notes("compressed-tensors", &[(4, true), (4, false)]);
        assert!(
            mixed
                .iter()
                .any(|n| n.contains("does not load in transformers 5.23"))
        );
        assert!(notes("GPTQ", &[]).is_empty());
    }
}
