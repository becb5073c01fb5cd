//! Tensor types of GGUF: one table of blocks, their sizes and how to take them apart.

use super::blocks::{self, Layout};
use std::fmt;

/// The type of a GGUF tensor, a row of [`TYPES`].
#[derive(Clone, Copy)]
pub struct BlockType(&'static Row);

struct Row {
    id: u32,
    name: &'static str,
    elements: usize, // of one block
    bytes: usize,    // of one block
    layout: Option<Layout>,
}

const fn row(id: u32, name: &'static str, elements: usize, bytes: usize) -> Row {
    Row {
        id,
        name,
        elements,
        bytes,
        layout: None,
    }
}

const fn affine(id: u32, name: &'static str, elements: usize, bytes: usize, l: Layout) -> Row {
    Row {
        id,
        name,
        elements,
        bytes,
        layout: Some(l),
    }
}

/// Every type whose size is known, so that files holding them can be listed; those with a
/// layout, and the floats, can be read.
static TYPES: &[Row] = &[
    row(0, "F32", 1, 4),
    row(1, "F16", 1, 2),
    row(30, "BF16", 1, 2),
    affine(2, "Q4_0", 32, 18, blocks::Q4_0),
    affine(3, "Q4_1", 32, 20, blocks::Q4_1),
    affine(6, "Q5_0", 32, 22, blocks::Q5_0),
    affine(7, "Q5_1", 32, 24, blocks::Q5_1),
    affine(8, "Q8_0", 32, 34, blocks::Q8_0),
    affine(10, "Q2_K", 256, 84, blocks::Q2_K),
    affine(11, "Q3_K", 256, 110, blocks::Q3_K),
    affine(12, "Q4_K", 256, 144, blocks::Q4_K),
    affine(13, "Q5_K", 256, 176, blocks::Q5_K),
    affine(14, "Q6_K", 256, 210, blocks::Q6_K),
    affine(20, "IQ4_NL", 32, 18, blocks::IQ4_NL),
    affine(23, "IQ4_XS", 256, 136, blocks::IQ4_XS),
    row(9, "Q8_1", 32, 36),
    row(15, "Q8_K", 256, 292),
    row(16, "IQ2_XXS", 256, 66),
    row(17, "IQ2_XS", 256, 74),
    row(18, "IQ3_XXS", 256, 98),
    row(19, "IQ1_S", 256, 50),
    row(21, "IQ3_S", 256, 110),
    row(22, "IQ2_S", 256, 82),
    row(29, "IQ1_M", 256, 56),
    row(34, "TQ1_0", 256, 54),
    row(35, "TQ2_0", 256, 66),
    row(39, "MXFP4", 32, 17),
    row(24, "I8", 1, 1),
    row(25, "I16", 1, 2),
    row(26, "I32", 1, 4),
    row(27, "I64", 1, 8),
    row(28, "F64", 1, 8),
];

impl BlockType {
    /// 32-bit floats.
    pub const F32: BlockType = BlockType(&TYPES[0]);
    /// 16-bit floats.
    pub const F16: BlockType = BlockType(&TYPES[1]);
    /// bfloat16.
    pub const BF16: BlockType = BlockType(&TYPES[2]);
    /// INT4 with a scale per 32.
    pub const Q4_0: BlockType = BlockType(&TYPES[3]);
    /// INT4 with a scale and an offset per 32.
    pub const Q4_1: BlockType = BlockType(&TYPES[4]);
    /// INT5 with a scale per 32.
    pub const Q5_0: BlockType = BlockType(&TYPES[5]);
    /// INT8 with a scale per 32.
    pub const Q8_0: BlockType = BlockType(&TYPES[7]);
    /// INT4 with a 6-bit scale and minimum per 32, two f16 factors per 256.
    pub const Q4_K: BlockType = BlockType(&TYPES[10]);
    /// INT6 with an 8-bit scale per 16, an f16 factor per 256.
    pub const Q6_K: BlockType = BlockType(&TYPES[12]);

    /// Every known type.
    pub fn all() -> impl Iterator<Item = BlockType> {
        TYPES.iter().map(BlockType)
    }

    /// The type with this number in files.
    pub fn from_id(id: u32) -> Option<BlockType> {
        Self::all().find(|t| t.id() == id)
    }

    /// The type of this name, e.g. `Q4_K`.
    pub fn from_name(name: &str) -> Option<BlockType> {
        Self::all().find(|t| t.name() == name)
    }

    /// Its number in files.
    pub const fn id(self) -> u32 {
        self.0.id
    }

    /// Its customary name.
    pub const fn name(self) -> &'static str {
        self.0.name
    }

    /// Elements of one block; a row is a whole number of blocks.
    pub const fn elements(self) -> usize {
        self.0.elements
    }

    /// Bytes of one block.
    pub const fn bytes(self) -> usize {
        self.0.bytes
    }

    /// How a block's codes and scales are laid out, for the integer types that nq reads.
    pub const fn layout(self) -> Option<&'static Layout> {
        self.0.layout.as_ref()
    }

    /// Bytes of a row of `n` elements, or `None` if it is no whole number of blocks or too long.
    pub fn row_bytes(self, n: u64) -> Option<u64> {
        match n % self.elements() as u64 {
            0 => (n / self.elements() as u64).checked_mul(self.bytes() as u64),
            _ => None,
        }
    }
}

impl PartialEq for BlockType {
    fn eq(&self, other: &Self) -> bool {
        self.id() == other.id()
    }
}

impl Eq for BlockType {}

impl fmt::Debug for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_name_their_rows() {
        for (t, name) in [
            (BlockType::F32, "F32"),
            (BlockType::F16, "F16"),
            (BlockType::BF16, "BF16"),
            (BlockType::Q4_0, "Q4_0"),
            (BlockType::Q4_1, "Q4_1"),
            (BlockType::Q5_0, "Q5_0"),
            (BlockType::Q8_0, "Q8_0"),
            (BlockType::Q4_K, "Q4_K"),
            (BlockType::Q6_K, "Q6_K"),
        ] {
            assert_eq!(t.name(), name);
            assert_eq!(BlockType::from_name(name), Some(t));
            assert_eq!(BlockType::from_id(t.id()), Some(t));
        }
    }

    #[test]
    fn numbers_are_unique_and_blocks_hold_whole_groups() {
        let mut ids: Vec<u32> = BlockType::all().map(BlockType::id).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), TYPES.len());
        for t in BlockType::all() {
            if let Some(layout) = t.layout() {
                assert!(t.elements().is_multiple_of(layout.group as usize), "{t}");
            }
        }
    }
}
