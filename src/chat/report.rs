//! The figures that `nq chat` prints after an answer.

use super::conversation::End;
use nq_runtime::{Stats, StopReason};

/// Share of the context from which the line after an answer says how full it is.
const FULL: f64 = 0.5;

/// The line after an answer; `used` tokens of `capacity` that fit are in the cache.
pub(crate) fn brief(stats: &Stats, end: End, used: usize, capacity: usize) -> String {
    let mut line = format!("{} tokens", stats.tokens);
    if let Some(rate) = stats.tokens_per_second() {
        line += &format!(", {rate:.1} tok/s");
    }
    let share = used as f64 / capacity.max(1) as f64;
    if share >= FULL {
        line += &format!(", context {:.0} % full", 100.0 * share);
    }
    line + ending(end)
}

/// All figures of an answer. `bandwidth` is the measured read speed of the memory with the weights, in
/// bytes per second.
pub fn line(
    stats: &Stats,
    end: End,
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
    if let Some(each) = stats.accepted_per_step() {
        let (accepted, drafted) = (stats.accepted, stats.drafted);
        line += &format!(", {each:.2} drafted tokens accepted per step ({accepted} of {drafted})");
    }
    line += &format!(
        "; prompt {} tokens, {} of them cached",
        stats.prompt_tokens, stats.reused_tokens
    );
    line + ending(end)
}

fn ending(end: End) -> &'static str {
    match end {
        End::Generated(StopReason::Eos(_)) => "",
        End::Generated(StopReason::MaxTokens) => "; ended by --max-tokens",
        End::Generated(StopReason::ContextFull) => "; ended by the context",
        End::Generated(StopReason::Interrupted) => "; interrupted",
        End::Text => "; ended by --stop",
        End::Call => "; ended by a call",
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
            draft_steps: 0,
            drafted: 0,
            accepted: 0,
            first_token: Duration::from_millis(250),
            decode: Duration::from_secs(2),
        };
        assert_eq!(
            line(
                &stats,
                End::Generated(StopReason::Eos(1)),
                Some(1_000_000_000),
                Some(20e9)
            ),
            "11 tokens, first after 0.25 s, 5.0 tok/s, 5.00 GB/s (25 % of 20.0 GB/s); \
             prompt 20 tokens, 8 of them cached"
        );
        let most = End::Generated(StopReason::MaxTokens);
        let cut = line(&stats, most, Some(1_000_000_000), None);
        assert!(cut.contains(", 5.00 GB/s; prompt 20"));
        assert!(cut.ends_with("; ended by --max-tokens"));
        let drafted = Stats {
            draft_steps: 4,
            drafted: 10,
            accepted: 6,
            ..stats
        };
        let drafted = line(&drafted, most, None, None);
        assert!(
            drafted.contains(", 1.50 drafted tokens accepted per step (6 of 10);"),
            "{drafted}"
        );
        let short = |used| brief(&stats, most, used, 100);
        assert_eq!(short(49), "11 tokens, 5.0 tok/s; ended by --max-tokens");
        assert_eq!(
            short(63),
            "11 tokens, 5.0 tok/s, context 63 % full; ended by --max-tokens"
        );
        let one = Stats { tokens: 1, ..stats };
        assert!(!line(&one, End::Text, Some(1), None).contains("tok/s"));
    }
}
