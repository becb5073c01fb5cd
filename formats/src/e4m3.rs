//! Floats of 8 bits.

/// The value of an FP8 E4M3 number (OCP 8-bit floating point specification): sign, 4 exponent
/// bits with bias 7, 3 mantissa bits; no infinities, and NaN if all other bits are set.
pub fn e4m3(byte: u8) -> f32 {
    let mantissa = f32::from(byte & 7);
    let magnitude = match (byte >> 3) & 15 {
        15 if byte & 7 == 7 => f32::NAN,
        0 => mantissa / 512.0,
        e => (1.0 + mantissa / 8.0) * f32::powi(2.0, i32::from(e) - 7),
    };
    if byte & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}
