//! The arguments of the kernels of attention.

use super::heads::HeadVectors;
use super::pages::CacheArgs;
use crate::driver::Address;

/// `AttentionArgs` of `cuda/attention_decode.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AttentionArgs {
    pub(super) qkv: Address,
    pub(super) vectors: HeadVectors,
    pub(super) cos_sin: Address,
    pub(super) cache: CacheArgs,
    pub(super) step: Address,
    pub(super) out: Address,
    pub(super) half: Address,
    pub(super) columns: Address,
    pub(super) partial: Address,
    pub(super) tops: Address,
    pub(super) arrived: Address,
    pub(super) shared: Address,
    pub(super) parts: i32,
    pub(super) shared_splits: i32,
    pub(super) heads: i32,
    pub(super) padded: i32,
    pub(super) column_rows: i32,
    pub(super) nibbles: i32,
    pub(super) eps: f32,
    pub(super) late: i32,
}
