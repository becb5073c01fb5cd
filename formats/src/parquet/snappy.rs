//! Snappy's raw format: <https://github.com/google/snappy/blob/main/format_description.txt>.

use super::thrift::varint;
use super::{Parsed, malformed};

/// Expands `bytes`, which the page header says become `expected` bytes.
pub(super) fn decompress(bytes: &[u8], expected: usize) -> Parsed<Vec<u8>> {
    let (len, used) = varint(bytes)?;
    if len != expected as u64 {
        return malformed("snappy block", format!("{expected} bytes"), len.to_string());
    }
    let cut = || malformed("snappy block", "whole", "cut short");
    let mut rest = &bytes[used..];
    let mut out = Vec::with_capacity(expected);
    while let Some((&tag, after)) = rest.split_first() {
        rest = after;
        let mut take = |n: usize| -> Option<usize> {
            let (number, after) = rest.split_at_checked(n)?;
            rest = after;
            Some(number.iter().rev().fold(0, |v, &b| v << 8 | usize::from(b)))
        };
        let high = usize::from(tag >> 2);
        if tag & 3 == 0 {
            let len = match high {
                60.. => take(high - 59),
                short => Some(short),
            };
            let Some((literal, after)) = len.and_then(|l| rest.split_at_checked(l + 1)) else {
                return cut();
            };
            out.extend_from_slice(literal);
            rest = after;
        } else {
            let (len, offset) = match tag & 3 {
                1 => ((high & 7) + 4, take(1).map(|low| (high >> 3) << 8 | low)),
                2 => (high + 1, take(2)),
                _ => (high + 1, take(4)),
            };
            let Some(offset) = offset else {
                return cut();
            };
            let Some(start) = out.len().checked_sub(offset).filter(|_| offset > 0) else {
                let found = format!("{offset} at {}", out.len());
                return malformed("snappy copy", "an offset into what came before", found);
            };
            for i in 0..len {
                out.push(out[start + i]); // a copy may overlap itself
            }
        }
        if out.len() > expected {
            break;
        }
    }
    match out.len() == expected {
        true => Ok(out),
        false => malformed(
            "snappy block",
            format!("{expected} bytes"),
            out.len().to_string(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::decompress;

    #[test]
    fn literals_and_overlapping_copies() {
        // "ab", then a copy of 6 bytes from 2 back, then "c".
        let block = [9, 1 << 2, b'a', b'b', (2 << 2) | 1, 2, 0, b'c'];
        assert_eq!(decompress(&block, 9).unwrap(), b"abababab\x63");
        assert!(decompress(&block, 8).is_err(), "another length");
        assert!(decompress(&block[..5], 9).is_err(), "cut short");
        assert!(
            decompress(&[4, 1, 9], 4).is_err(),
            "a copy from before the start"
        );
    }
}
