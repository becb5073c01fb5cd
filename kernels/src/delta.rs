//! The shape of a gated DeltaNet, on any device.

/// Shape of a gated DeltaNet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Number of heads of queries and keys; divides `value_heads`.
    pub key_heads: usize,
    /// Number of heads of values, each with a state.
    pub value_heads: usize,
    /// Width of a query or a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Width of the causal convolution, at least 1.
    pub conv: usize,
    /// True if value head `h` uses key head `h % key_heads`; otherwise the value heads of a key head are
    /// neighbours.
    pub tiled: bool,
}

impl DeltaShape {
    /// Width of all keys of a token.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Width of all values of a token.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Number of channels that the convolution runs over: queries, keys, values.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// The key head that a value head uses.
    pub fn key_head(&self, value_head: usize) -> usize {
        match self.tiled {
            true => value_head % self.key_heads,
            false => value_head / (self.value_heads / self.key_heads),
        }
    }

    /// Values of a token's queries, keys and values, and behind them the gate of its output.
    pub fn stride(&self) -> usize {
        self.channels() + self.values()
    }
}
