//! What `nq chat` says after an answer.

use nq_runtime::{Stats, StopReason};

/// The line after an answer. `bandwidth` is what the weights' memory was measured to be read
/// at, in bytes per second.
pub fn line(
    stats: &Stats,
    stop: StopReason,
    bytes_per_token: Option<usize>,
    bandwidth: Option<f64>,
) -> String {
    let mut line = format!(
        "{} tokens, first after {:.2} s",
        stats.tokens,
        stats.first_token.as_secs_f64()
    );
    if let Some(rate) = stats.tokens_per_second() {
        line += &format!(", {rate:.1} tok/s");
    }
    if let Some(bytes) = bytes_per_token.and_then(|b| stats.bytes_per_second(b)) {
        line += &format!(", {:.2} GB/s", bytes / 1e9);
        if let Some(b) = bandwidth {
            line += &format!(" ({:.0} % of {:.1} GB/s)", 100.0 * bytes / b, b / 1e9);
        }
    }
    line += &format!(
        "; prompt {} tokens, {} of them cached",
        stats.prompt_tokens, stats.reused_tokens
    );
    match stop {
        StopReason::Eos(_) => {}
        StopReason::MaxTokens => line += "; ended by --max-tokens",
        StopReason::ContextFull => line += "; ended by the context",
        StopReason::Interrupted => line += "; interrupted",
    }
    line
}

/// The name of a stop reason in JSON.
pub fn stop_name(stop: StopReason) -> &'static str {
    match stop {
        StopReason::Eos(_) => "eos",
        StopReason::MaxTokens => "max_tokens",
        StopReason::ContextFull => "context_full",
        StopReason::Interrupted => "interrupted",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn rates_stand_beside_the_bandwidth() {
        let stats = Stats {
            prompt_tokens: 20,
            reused_tokens: 8,
            tokens: 11,
            first_token: Duration::from_millis(250),
            decode: Duration::from_secs(2),
        };
        assert_eq!(
            line(&stats, StopReason::Eos(1), Some(1_000_000_000), Some(20e9)),
            "11 tokens, first after 0.25 s, 5.0 tok/s, 5.00 GB/s (25 % of 20.0 GB/s); \
             prompt 20 tokens, 8 of them cached"
        );
        let cut = line(&stats, StopReason::MaxTokens, Some(1_000_000_000), None);
        assert!(cut.contains(", 5.00 GB/s; prompt 20"));
        assert!(cut.ends_with("; ended by --max-tokens"));
        let one = Stats { tokens: 1, ..stats };
        assert!(!line(&one, StopReason::Interrupted, Some(1), None).contains("tok/s"));
    }
}
