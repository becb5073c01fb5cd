//! Counts what a body's JSON holds before it is taken apart: a value takes far more memory than its text.

use crate::error::ApiError;

/// Most objects and lists.
const MOST_CONTAINERS: usize = 1 << 17;

/// Most values of any kind: more than a million token ids.
const MOST_VALUES: usize = 1 << 20;

/// Refuses a body that would hold too much. What is not JSON is left to its reader.
///
/// # Errors
/// More objects, lists or values than any request needs.
pub(super) fn check(body: &[u8]) -> Result<(), ApiError> {
    let (mut containers, mut values) = (0, 1);
    let (mut quoted, mut escaped) = (false, false);
    for &byte in body {
        match (quoted, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => quoted = !quoted,
            (false, b'{' | b'[') => containers += 1,
            (false, b',') => values += 1,
            _ => {}
        }
    }
    for (what, most, found) in [
        ("objects and lists", MOST_CONTAINERS, containers),
        ("values", MOST_VALUES, values),
    ] {
        if found > most {
            let what = format!("the body: expected at most {most} {what}, found {found}");
            return Err(ApiError::bounds(413, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_quoted_does_not_count() {
        let list = |item: &str, n: usize| format!("[{}0]", format!("{item},").repeat(n));
        let refused = |body: &str| check(body.as_bytes()).is_err();
        assert!(refused(&list(r#"{"a":0}"#, MOST_CONTAINERS)));
        assert!(!refused(&list(r#"{"a":0}"#, MOST_CONTAINERS - 1)));
        assert!(refused(&list("1", MOST_VALUES)));
        assert!(!refused(&list("1", MOST_VALUES - 1)));
        assert!(!refused(&format!("\"{}\"", "[{,\\\"".repeat(MOST_VALUES))));
        assert!(refused(&format!(
            "\"\\\\\"{}",
            "[".repeat(MOST_CONTAINERS + 1)
        )));
    }
}
