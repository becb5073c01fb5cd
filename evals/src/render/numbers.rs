//! Numbers in the words of documents.

/// A change of perplexity in percent and its standard error, given the logarithm of the ratio.
pub(super) fn percent_change(ln_ratio: f64, se: f64) -> String {
    let ratio = ln_ratio.exp();
    format!(
        "{:+.2} ± {:.2} %",
        100.0 * (ratio - 1.0),
        100.0 * ratio * se
    )
}

/// A divergence and its standard error.
pub(super) fn plus_minus(kld: f64, se: f64) -> String {
    format!("{} ± {}", kld_cell(kld), kld_cell(se))
}

/// A divergence with a suitable number of digits.
pub fn kld_cell(v: f64) -> String {
    if v.abs() >= 1e-5 {
        format!("{v:.5}")
    } else if v.abs() < 1e-12 {
        "0".into()
    } else {
        format!("{v:.1e}")
    }
}
