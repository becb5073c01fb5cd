//! Tensor types of GGUF: one table of blocks, their sizes and their layouts.

use super::grids;
use super::{self as blocks, BlockLayout};
use nq_model::DType;
use std::fmt;

/// Defines the enum and its table from one list: name, number in files, elements and bytes of a
/// block, and the layout of an integer block if nq can read the type.
macro_rules! types {
    ($($(#[$doc:meta])* $name:ident = $id:literal, $elements:literal, $bytes:literal, $layout:expr;)*) => {
        /// The type of a GGUF tensor.
        #[allow(non_camel_case_types, missing_docs, reason = "the names are the format's own")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum BlockType {
            $($(#[$doc])* $name,)*
        }

        const ALL: &[BlockType] = &[$(BlockType::$name),*];

        static ROWS: &[TypeRow] = &[$(TypeRow {
            id: $id,
            name: stringify!($name),
            elements: $elements,
            bytes: $bytes,
            layout: $layout,
        }),*];
    };
}

struct TypeRow {
    id: u32,
    name: &'static str,
    elements: usize, // of one block
    bytes: usize,    // of one block
    layout: Option<BlockLayout>,
}

// All types of known size, so that files with them can be listed; floats and types with a layout
// can be read.
types! {
    /// 32-bit floats.
    F32 = 0, 1, 4, None;
    /// 16-bit floats.
    F16 = 1, 1, 2, None;
    /// bfloat16.
    BF16 = 30, 1, 2, None;
    /// INT4, a scale per 32.
    Q4_0 = 2, 32, 18, Some(blocks::Q4_0);
    /// INT4, a scale and an offset per 32.
    Q4_1 = 3, 32, 20, Some(blocks::Q4_1);
    /// INT5, a scale per 32.
    Q5_0 = 6, 32, 22, Some(blocks::Q5_0);
    /// INT5, a scale and an offset per 32.
    Q5_1 = 7, 32, 24, Some(blocks::Q5_1);
    /// INT8, a scale per 32.
    Q8_0 = 8, 32, 34, Some(blocks::Q8_0);
    /// INT2, a 4-bit scale and minimum per 16, two f16 factors per 256.
    Q2_K = 10, 256, 84, Some(blocks::Q2_K);
    /// INT3, a 6-bit scale per 16, an f16 factor per 256.
    Q3_K = 11, 256, 110, Some(blocks::Q3_K);
    /// INT4, a 6-bit scale and minimum per 32, two f16 factors per 256.
    Q4_K = 12, 256, 144, Some(blocks::Q4_K);
    /// INT5, otherwise as Q4_K.
    Q5_K = 13, 256, 176, Some(blocks::Q5_K);
    /// INT6, an 8-bit scale per 16, an f16 factor per 256.
    Q6_K = 14, 256, 210, Some(blocks::Q6_K);
    /// 4-bit indices of a table of values, a scale per 32.
    IQ4_NL = 20, 32, 18, Some(blocks::IQ4_NL);
    /// As IQ4_NL, a 6-bit scale per 32, an f16 factor per 256.
    IQ4_XS = 23, 256, 136, Some(blocks::IQ4_XS);
    Q8_1 = 9, 32, 36, None;
    Q8_K = 15, 256, 292, None;
    /// Points of a grid of 256, a 4-bit scale per 32.
    IQ2_XXS = 16, 256, 66, Some(grids::IQ2_XXS);
    /// Points of a grid of 512, a 4-bit scale per 16.
    IQ2_XS = 17, 256, 74, Some(grids::IQ2_XS);
    /// Points of a grid of 256, a 4-bit scale per 32.
    IQ3_XXS = 18, 256, 98, Some(grids::IQ3_XXS);
    /// Points of a grid of 2,048, a 3-bit scale and a shift per 32.
    IQ1_S = 19, 256, 50, Some(grids::IQ1_S);
    /// Points of a grid of 512, a 4-bit scale per 32.
    IQ3_S = 21, 256, 110, Some(grids::IQ3_S);
    /// Points of a grid of 1,024, a 4-bit scale per 16.
    IQ2_S = 22, 256, 82, Some(grids::IQ2_S);
    /// Points of a grid of 2,048, a 3-bit scale per 16, a shift per 8.
    IQ1_M = 29, 256, 56, Some(grids::IQ1_M);
    /// Digits of three, a scale per 256.
    TQ1_0 = 34, 256, 54, Some(grids::TQ1_0);
    /// 2-bit codes, a scale per 256.
    TQ2_0 = 35, 256, 66, Some(grids::TQ2_0);
    /// FP4, a power of two per 32.
    MXFP4 = 39, 32, 17, Some(grids::MXFP4);
    /// FP4, an 8-bit float per 16.
    NVFP4 = 40, 64, 36, Some(grids::NVFP4);
    I8 = 24, 1, 1, None;
    I16 = 25, 1, 2, None;
    I32 = 26, 1, 4, None;
    I64 = 27, 1, 8, None;
    F64 = 28, 1, 8, None;
}

impl BlockType {
    /// Every known type.
    pub fn all() -> impl Iterator<Item = BlockType> {
        ALL.iter().copied()
    }

    /// The element type, if elements are floats of their own.
    pub(crate) fn float(self) -> Option<DType> {
        match self {
            BlockType::F32 => Some(DType::F32),
            BlockType::F16 => Some(DType::F16),
            BlockType::BF16 => Some(DType::BF16),
            _ => None,
        }
    }

    /// The type with this number in files, if known.
    pub fn from_id(id: u32) -> Option<BlockType> {
        Self::all().find(|t| t.id() == id)
    }

    /// The type with this name, e.g. `Q4_K`, if known.
    pub fn from_name(name: &str) -> Option<BlockType> {
        Self::all().find(|t| t.name() == name)
    }

    fn row(self) -> &'static TypeRow {
        &ROWS[self as usize]
    }

    /// Its number in files.
    pub fn id(self) -> u32 {
        self.row().id
    }

    /// Its customary name.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Elements of one block; a row is a whole number of blocks.
    pub fn elements(self) -> usize {
        self.row().elements
    }

    /// Bytes of one block.
    pub fn bytes(self) -> usize {
        self.row().bytes
    }

    /// The layout of a block's codes and scales, for the integer types that nq can read.
    pub fn layout(self) -> Option<&'static BlockLayout> {
        self.row().layout.as_ref()
    }

    /// Bytes of a row of `n` elements; `None` if that is not a whole number of blocks or too long.
    pub fn row_bytes(self, n: u64) -> Option<u64> {
        match n % self.elements() as u64 {
            0 => (n / self.elements() as u64).checked_mul(self.bytes() as u64),
            _ => None,
        }
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
    fn types_are_found_by_name_and_number() {
        for t in BlockType::all() {
            assert_eq!(t.name(), format!("{t:?}"));
            assert_eq!(BlockType::from_name(t.name()), Some(t));
            assert_eq!(BlockType::from_id(t.id()), Some(t));
        }
    }

    #[test]
    fn numbers_are_unique_and_blocks_hold_whole_groups() {
        let mut ids: Vec<u32> = BlockType::all().map(BlockType::id).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), ALL.len());
        for t in BlockType::all() {
            if let Some(layout) = t.layout() {
                assert!(t.elements().is_multiple_of(layout.group as usize), "{t}");
            }
        }
    }
}
