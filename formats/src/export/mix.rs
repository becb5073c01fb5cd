//! Which type each matrix of a GGUF file has.

use crate::gguf::BlockType;
use nq_model::LinearKind;
use nq_model::names::{EMBEDDING, HEAD, layer_linear, layer_of};

/// Block types of a file's matrices; norms are F32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mix {
    /// For each matrix the type that holds its numbers.
    #[default]
    Keep,
    /// This type, one of `ENCODED`, for all.
    All(BlockType),
    /// Q4_K, with Q6_K for the head and about half of the value and down projections.
    Q4KM,
}

impl Mix {
    /// The type of the matrix `name` (Hugging Face name) in a model of `layers` layers, before its
    /// width is considered; `None` keeps its numbers.
    pub(super) fn kind(self, name: &str, layers: usize, tied: bool) -> Option<BlockType> {
        match self {
            Mix::Keep => None,
            Mix::All(kind) => Some(kind),
            Mix::Q4KM => {
                let head = if tied { EMBEDDING } else { HEAD };
                let more = match layer_linear(name) {
                    Some(linear) => {
                        matches!(linear.kind, LinearKind::V | LinearKind::Down)
                            && more_bits(layer_of(name).unwrap_or(layers), layers)
                    }
                    None => name == head,
                };
                Some(if more {
                    BlockType::Q6_K
                } else {
                    BlockType::Q4_K
                })
            }
        }
    }

    /// `general.file_type`: the customary number of the mix; `most` tells the type of most values.
    pub(super) fn file_type(self, most: impl FnOnce() -> BlockType) -> u32 {
        let kind = match self {
            Mix::Q4KM => return 15,
            Mix::All(kind) => kind,
            Mix::Keep => most(),
        };
        // Numbers of "mostly this type"; 1024 means "guessed".
        match kind {
            BlockType::F32 => 0,
            BlockType::F16 => 1,
            BlockType::Q4_0 => 2,
            BlockType::Q4_1 => 3,
            BlockType::Q8_0 => 7,
            BlockType::Q5_0 => 8,
            BlockType::Q5_1 => 9,
            BlockType::Q2_K => 10,
            BlockType::Q3_K => 12,
            BlockType::Q4_K => 15,
            BlockType::Q5_K => 17,
            BlockType::Q6_K => 18,
            BlockType::IQ2_XXS => 19,
            BlockType::IQ2_XS => 20,
            BlockType::IQ3_XXS => 23,
            BlockType::IQ1_S => 24,
            BlockType::IQ4_NL => 25,
            BlockType::IQ3_S => 26,
            BlockType::IQ2_S => 28,
            BlockType::IQ4_XS => 30,
            BlockType::IQ1_M => 31,
            BlockType::BF16 => 32,
            BlockType::TQ1_0 => 36,
            BlockType::TQ2_0 => 37,
            BlockType::MXFP4 => 38,
            BlockType::NVFP4 => 39,
            _ => 1024,
        }
    }
}

/// True for layers whose value and down projections get 6 bits: the first and last eighths, and
/// every third in between.
fn more_bits(i: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    i < eighth || i >= 7 * layers / 8 || (i - eighth) % 3 == 2
}
