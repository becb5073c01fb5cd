//! Tables of n-grams ([`crate::NgramsSpec`]; transformers' `qwen4_exp`): which rows of a table belong to a token, from the
//! token and those before it.

use crate::{Shape, in_layer};

/// The tables of n-grams of a model: each of some layers has one of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramTable {
    /// The layers that have one, from 0, in order (`ple_layer_ids` less 1).
    pub layers: Vec<usize>,
    /// Width of all rows of a token together (`ple_embed_dim`), a multiple of [`NgramTable::heads`].
    pub width: usize,
    /// Inputs of the convolution over what a table gave (`ple_conv_kernel_size`).
    pub taps: usize,
    /// Tokens of the longest n-gram, from 2 on (`ngram_size`).
    pub longest: usize,
    /// Rows of a token for n-grams of each length from 2 on (`heads_per_ngram`).
    pub heads_per_length: usize,
    /// The rows that a head has are the first primes from this number on (`ngram_vocab_size_base`).
    pub least_rows: usize,
    /// The rows of a table are filled up to a multiple of it (`make_ngram_vocab_size_divisible_by`).
    pub multiple: usize,
    /// Matrices in which files keep a table, of equally many rows (`split_ngram_parts`).
    pub parts: usize,
    /// Seed of the factors that tokens are multiplied by (`seed`).
    pub seed: u64,
    /// A token that ends a text (`eos_token_id`): n-grams do not reach across it.
    pub end: u32,
}

/// The name within a layer of the matrices of its table, which a number follows.
const PART: &str = "ple.ple_embedding.ngram_embedding.shard_";

/// How the rows of a layer's table are found: row `h` of a token `t[0]`, behind `t[1]`, `t[2]` and so on, is
/// `offsets[h] + (t[0] m[0] xor t[1] m[1] xor ...) mod rows[h]`, with as many terms as the head's n-grams have tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramHash {
    /// The odd factors `m`, one for each token of the longest n-gram. A product with a token is below 2^63.
    pub factors: Vec<u64>,
    /// Rows of each head: primes.
    pub rows: Vec<u64>,
    /// The first row of each head.
    pub offsets: Vec<u64>,
    heads_per_length: usize,
    end: u32,
}

impl NgramTable {
    /// The table of published models: of layer `layer`, whose rows for a token are `width` wide together, and texts that
    /// `end` ends.
    pub(crate) fn published(layer: usize, width: usize, end: u32) -> Self {
        NgramTable {
            layers: vec![layer],
            width,
            taps: 4,
            longest: 3,
            heads_per_length: 8,
            least_rows: 20_000_000,
            multiple: 128,
            parts: 128,
            seed: 1234,
            end,
        }
    }

    /// The tables of a model that has the first `layers` layers alone; `None` if none is in these.
    pub fn within(mut self, layers: usize) -> Option<Self> {
        self.layers.retain(|&layer| layer < layers);
        (!self.layers.is_empty()).then_some(self)
    }

    /// Rows of the table that belong to a token.
    pub fn heads(&self) -> usize {
        (self.longest - 1) * self.heads_per_length
    }

    /// Width of a row of the table.
    pub fn row_width(&self) -> usize {
        self.width / self.heads()
    }

    /// Tokens before a row's own that its n-grams reach.
    pub fn context(&self) -> usize {
        self.longest - 1
    }

    /// Rows before a row's own that its convolution reaches.
    pub fn conv_rows(&self) -> usize {
        (self.taps - 1) * self.longest
    }

    /// Which of the tables is that of layer `layer`, if it has one.
    pub fn place(&self, layer: usize) -> Option<usize> {
        self.layers.iter().position(|&l| l == layer)
    }

    /// Rows of the table at `place`, with those that fill it up.
    pub fn table_rows(&self, place: usize) -> usize {
        let rows: usize = self.primes(place).iter().sum();
        rows.next_multiple_of(self.multiple)
    }

    /// Rows of the heads of the table at `place`: primes, each the one after that of the head before.
    fn primes(&self, place: usize) -> Vec<usize> {
        let all = (self.least_rows..).filter(|&n| is_prime(n));
        all.skip(place * self.heads()).take(self.heads()).collect()
    }

    /// How rows of the table at `place` are found in a model of `vocab` tokens.
    pub fn hash(&self, place: usize, vocab: usize) -> NgramHash {
        let rows: Vec<u64> = self.primes(place).iter().map(|&n| n as u64).collect();
        let offsets = rows.iter().scan(0, |next, n| {
            let first = *next;
            *next += n;
            Some(first)
        });
        // Half of the greatest factor whose product with a token is below 2^63.
        let most = (i64::MAX as u64 / vocab.max(1) as u64 / 2).max(1);
        let seed = self.seed.wrapping_add(10007 * place as u64);
        let factor = |i: u64| 2 * (split_mix(seed.wrapping_add(GOLDEN.wrapping_mul(i))) % most) + 1;
        NgramHash {
            factors: (1..=self.longest as u64).map(factor).collect(),
            offsets: offsets.collect(),
            rows,
            heads_per_length: self.heads_per_length,
            end: self.end,
        }
    }

    /// The name of part `part` of the table of layer `layer`.
    pub fn part_name(layer: usize, part: usize) -> String {
        in_layer(layer, &format!("{PART}{part}"))
    }

    /// The name of the tensor that files keep the scale of the values of layer `layer`'s table in, if these are FP8.
    pub fn scale_name(layer: usize) -> String {
        in_layer(layer, "ple.ple_embedding.ngram_embedding.weight_scale")
    }

    /// The number of the part of a table that this is the name of.
    pub fn part_of(name: &str) -> Option<usize> {
        let (_, suffix) = crate::names::split_layer(name)?;
        suffix.strip_prefix(PART)?.parse().ok()
    }

    /// The name within a layer of the integers that files keep of `what` ([`NgramHash`]).
    pub fn integers_name(layer: usize, what: &str) -> String {
        in_layer(layer, &format!("ple.ple_embedding.{what}"))
    }

    /// The parts of all tables, by name.
    pub fn parameters(&self) -> impl Iterator<Item = (String, Shape)> {
        let parts = |(place, &layer): (usize, &usize)| {
            let shape = Shape::Matrix(self.table_rows(place) / self.parts, self.row_width());
            (0..self.parts).map(move |part| (Self::part_name(layer, part), shape))
        };
        self.layers.iter().enumerate().flat_map(parts)
    }

    /// Elements of all tables that one token does not read.
    pub(crate) fn unread(&self) -> usize {
        let rows = |place| self.table_rows(place) - self.heads();
        let rows: usize = (0..self.layers.len()).map(rows).sum();
        rows * self.row_width()
    }
}

impl NgramHash {
    /// Appends to `out` the rows of each of `tokens`, in the order of the heads. `before` are the tokens in front of
    /// them, at most as many as n-grams reach; where there are fewer, the text begins there.
    pub fn rows(&self, before: &[u32], tokens: &[u32], out: &mut Vec<usize>) {
        let longest = self.factors.len();
        let mut behind = vec![self.end; longest]; // the token, then those before it
        for (i, &token) in tokens.iter().enumerate() {
            behind[0] = token;
            let mut ended = false;
            for (distance, seen) in behind.iter_mut().enumerate().skip(1) {
                let earlier = match i.checked_sub(distance) {
                    Some(at) => Some(tokens[at]),
                    None => (before.len() + i)
                        .checked_sub(distance)
                        .map(|at| before[at]),
                };
                ended |= earlier.is_none_or(|t| t == self.end);
                *seen = earlier.filter(|_| !ended).unwrap_or(self.end);
            }
            let mut mixed = u64::from(token) * self.factors[0];
            for length in 2..=longest {
                mixed ^= u64::from(behind[length - 1]) * self.factors[length - 1];
                let first = (length - 2) * self.heads_per_length;
                let heads = first..first + self.heads_per_length;
                out.extend(heads.map(|h| (self.offsets[h] + mixed % self.rows[h]) as usize));
            }
        }
    }
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64's output for a state (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
fn split_mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn is_prime(n: usize) -> bool {
    let mut divisors = (2..).take_while(|d| d * d <= n);
    n >= 2 && divisors.all(|d| !n.is_multiple_of(d))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_table_has_its_factors_primes_and_parts() {
        let table = NgramTable::published(1, 2560, 248_044);
        let hash = table.hash(0, 248_320);
        let factors = [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071];
        assert_eq!(hash.factors, factors);
        let ends = [
            3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171,
        ];
        assert_eq!(hash.rows, ends.map(|n| 20_000_000 + n));
        assert_eq!(hash.offsets[..3], [0, 20_000_003, 40_000_026]);
        assert_eq!(table.table_rows(0), 320_001_536);
        let (name, shape) = table.parameters().last().unwrap();
        assert_eq!(
            name,
            "model.layers.1.ple.ple_embedding.ngram_embedding.shard_127"
        );
        assert_eq!(shape, Shape::Matrix(2_500_012, 160));
        assert_eq!(NgramTable::part_of(&name), Some(127));
        assert_eq!(NgramTable::part_of("model.layers.1.ple.key_proj"), None);
    }

    /// In pieces, the rows are those of the whole text; none depends on tokens before an end.
    #[test]
    fn rows_follow_from_the_tokens_since_the_last_end() {
        let table = NgramTable::published(1, 2560, 248_044);
        let (hash, end) = (table.hash(0, 248_320), table.end);
        let text = [end, 7, 9, 9, end, 9, 9, 11, end, end, 5];
        let mut whole = Vec::new();
        hash.rows(&[], &text, &mut whole);
        for cut in 0..text.len() {
            let mut pieces = Vec::new();
            hash.rows(&[], &text[..cut], &mut pieces);
            let before = &text[cut.saturating_sub(2)..cut];
            hash.rows(before, &text[cut..], &mut pieces);
            assert_eq!(pieces, whole, "cut at {cut}");
        }
        let row = |at: usize| &whole[at * table.heads()..][..table.heads()];
        let alone = |tokens: &[u32]| {
            let mut rows = Vec::new();
            hash.rows(&[], tokens, &mut rows);
            rows[(tokens.len() - 1) * table.heads()..].to_vec()
        };
        assert_eq!(row(5), alone(&[9]));
        assert_eq!(row(6), alone(&[9, 9]));
        assert_ne!(row(6), row(3), "9 9 behind 7 and behind an end");
        assert_eq!(row(6)[..8], row(3)[..8], "the same two tokens");
        // An end still sees the tokens before it.
        assert_eq!(row(8), alone(&[9, 9, 11, end]));
    }
}
