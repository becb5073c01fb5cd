//! What every session refuses, and what none may compute.

use crate::error::{Error, Result};
use crate::interface::{Chunk, SessionSpec};

/// Refuses bytes, of `what`, that are not `expected` many.
pub fn check_bytes(what: &'static str, bytes: &[u8], expected: usize) -> Result<()> {
    if bytes.len() == expected {
        return Ok(());
    }
    Err(Error::Request {
        what,
        expected: format!("{expected} bytes"),
        found: bytes.len().to_string(),
    })
}

/// True if `x` contains neither NaN nor infinity.
pub fn all_finite(x: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    // Without an early exit inside a block, the compiler can vectorize the loop.
    let block_finite = |b: &[f32]| {
        b.iter()
            .fold(true, |ok, v| ok & (v.to_bits() & EXPONENT != EXPONENT))
    };
    x.chunks(4096).all(block_finite)
}

/// An error if `x`, the output of layer `layer`, holds a NaN or an infinity.
pub fn check_finite(layer: usize, x: &[f32]) -> Result<()> {
    if all_finite(x) {
        Ok(())
    } else {
        Err(Error::NotFinite {
            what: "the output",
            layer,
        })
    }
}

/// Refuses chunks of sequences that have got pages alone: by slot, `stateless` tells which.
pub fn check_states(chunks: &[Chunk<'_>], stateless: &[bool]) -> Result<()> {
    match chunks.iter().find(|c| stateless[c.slot]) {
        None => Ok(()),
        Some(chunk) => Err(Error::Request {
            what: "chunk",
            expected: "a sequence with states".into(),
            found: format!("slot {}, which has got pages alone", chunk.slot),
        }),
    }
}

/// Refuses chunks that do not fit a session, before anything is computed. `len` returns the
/// number of tokens in a slot.
pub fn check_chunks(
    chunks: &[Chunk<'_>],
    spec: &SessionSpec,
    vocab: usize,
    len: impl Fn(usize) -> usize,
) -> Result<()> {
    let refuse = |what, expected: String, found: String| {
        Err(Error::Request {
            what,
            expected,
            found,
        })
    };
    let rows: usize = chunks.iter().map(|c| c.tokens.len()).sum();
    if rows > spec.max_rows {
        let most = format!("at most {}", spec.max_rows);
        return refuse("tokens of one forward", most, rows.to_string());
    }
    for (i, chunk) in chunks.iter().enumerate() {
        let (slot, n) = (chunk.slot, chunk.tokens.len());
        if slot >= spec.slots {
            let slots = format!("a slot below {}", spec.slots);
            return refuse("chunk", slots, slot.to_string());
        }
        if chunks[..i].iter().any(|c| c.slot == slot) {
            let found = format!("slot {slot} twice");
            return refuse("chunks", "different slots".into(), found);
        }
        if n == 0 {
            return refuse("chunk", "at least one token".into(), "none".into());
        }
        let wanted = chunk.logits.rows(n);
        if wanted.start > wanted.end || wanted.end > n {
            let rows = format!("rows within 0..{n}");
            return refuse("logits window", rows, format!("{wanted:?}"));
        }
        check_tokens(chunk.tokens, vocab)?;
        let needed = len(slot) + n;
        if needed > spec.ctx {
            return Err(Error::ContextFull {
                capacity: spec.ctx,
                needed,
            });
        }
    }
    Ok(())
}

/// An error if a token id is past the vocabulary.
pub fn check_tokens(tokens: &[u32], vocab: usize) -> Result<()> {
    match tokens.iter().find(|&&t| t as usize >= vocab) {
        None => Ok(()),
        Some(token) => Err(Error::Request {
            what: "token id",
            expected: format!("below the vocabulary's {vocab}"),
            found: token.to_string(),
        }),
    }
}
