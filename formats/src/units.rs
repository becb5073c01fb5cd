//! Formats quantities for people.

/// A byte count in units of powers of 1000: `8.50 MB`.
pub fn human_bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{n} B")
    } else {
        format!("{value:.2} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::human_bytes;

    #[test]
    fn bytes_are_rounded_to_powers_of_1000() {
        assert_eq!(human_bytes(999), "999 B");
        assert_eq!(human_bytes(8_502_784), "8.50 MB");
        assert_eq!(human_bytes(999_950), "1.00 MB");
    }
}
