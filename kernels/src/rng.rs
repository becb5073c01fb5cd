//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
//! a counter-based generator, so that a device and the host draw the same numbers from the
//! same seed and position, in any order.

/// A stream of random numbers, addressed by `(seed, stream, counter)`.
#[derive(Clone, Copy, Debug)]
pub struct Philox {
    key: [u32; 2],
    stream: u64,
    counter: u64,
    block: [u32; 4],
    used: usize,
}

impl Philox {
    /// The generator for `seed`, on one of 2^64 independent streams.
    pub fn new(seed: u64, stream: u64) -> Self {
        let key = [seed as u32, (seed >> 32) as u32];
        Philox {
            key,
            stream,
            counter: 0,
            block: [0; 4],
            used: 4,
        }
    }

    /// The four words of block `counter`.
    pub fn block(key: [u32; 2], stream: u64, counter: u64) -> [u32; 4] {
        let mut c = [
            counter as u32,
            (counter >> 32) as u32,
            stream as u32,
            (stream >> 32) as u32,
        ];
        let mut k = key;
        for _ in 0..10 {
            let p0 = u64::from(c[0]) * 0xD251_1F53;
            let p1 = u64::from(c[2]) * 0xCD9E_8D57;
            c = [
                (p1 >> 32) as u32 ^ c[1] ^ k[0],
                p1 as u32,
                (p0 >> 32) as u32 ^ c[3] ^ k[1],
                p0 as u32,
            ];
            k = [
                k[0].wrapping_add(0x9E37_79B9),
                k[1].wrapping_add(0xBB67_AE85),
            ];
        }
        c
    }

    /// The next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == 4 {
            self.block = Self::block(self.key, self.stream, self.counter);
            self.counter += 1;
            self.used = 0;
        }
        self.used += 1;
        self.block[self.used - 1]
    }

    /// Uniform in `[0, 1)`, with 24 bits.
    pub fn uniform(&mut self) -> f32 {
        (self.next_u32() >> 8) as f32 / (1u32 << 24) as f32
    }

    /// Standard normal (Box-Muller).
    pub fn normal(&mut self) -> f32 {
        let u = 1.0 - self.uniform(); // (0, 1]: its logarithm is finite
        let v = self.uniform();
        (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::Philox;

    /// Known answers of the Random123 distribution (philox4x32, 10 rounds).
    #[test]
    fn known_answers() {
        assert_eq!(
            Philox::block([0, 0], 0, 0),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            Philox::block([u32::MAX; 2], u64::MAX, u64::MAX),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }
}
