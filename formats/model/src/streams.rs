//! Blocks that only residuals of several streams have: their weights as a device holds them, and their operations.

use crate::packed::{Packed, VectorSpec};
use crate::{HyperSpec, IndexerSpec, NgramsSpec, Product};

/// A block's connections to several streams. See [`HyperSpec`].
pub struct Hyper<L> {
    /// `[rank, streams hidden]`
    pub down: Packed<L>,
    /// `[streams hidden, rank]`
    pub up: Packed<L>,
    /// `[streams, streams hidden]`
    pub inject: Packed<L>,
}

/// What chooses the positions that a row attends to. See [`IndexerSpec`].
pub struct Indexer<L, N> {
    /// `[(heads + 1) head_dim, hidden]`
    pub qk: Packed<L>,
    /// Gains of the norms of a head of the queries and of a block's key, `[head_dim]`.
    pub norms: [N; 2],
}

/// What is made of the rows of a table of n-grams. See [`NgramsSpec`].
pub struct Ngrams<L, N> {
    /// `[streams hidden, width]`
    pub key: Packed<L>,
    /// `[hidden, width]`
    pub value: Packed<L>,
    /// Gains of the norm of each stream's key, `[streams, hidden]`.
    pub key_norm: N,
    /// Gains of the norm of each stream's input of the convolution, `[streams, hidden]`.
    pub conv_norm: N,
    /// The convolution's weights, `[streams hidden, taps]`.
    pub conv: N,
}

/// The operations of such blocks in a layer, beside [`Verbs`](crate::forward::Verbs): of weights `L`, vectors `N`.
///
/// # Errors
/// Every operation returns errors of the device.
pub trait StreamVerbs<L, N, E> {
    /// Begins a block that reads several streams: weighs them, normalized with gains `norm` each, for the projections
    /// that follow. What the block adds is kept until [`StreamVerbs::inject`].
    fn contract(&mut self, layer: usize, norm: &N, hyper: &Hyper<L>) -> Result<(), E>;

    /// Ends such a block: adds what it has added to each of the streams, times the stream's weight.
    fn inject(&mut self) -> Result<(), E>;

    /// Appends the keys of an indexer to the rows' sequences, and chooses the positions to which each row attends
    /// next.
    fn select(&mut self, layer: usize, indexer: &Indexer<L, N>) -> Result<(), E>;

    /// Adds to all streams of `x` what the rows of a table of n-grams become. `x` is normalized.
    fn recall(&mut self, layer: usize, ngrams: &Ngrams<L, N>) -> Result<(), E>;
}

impl<L> Hyper<L> {
    pub(crate) fn new<E>(
        spec: &'static HyperSpec,
        mut pack: impl FnMut(&'static Product) -> Result<Packed<L>, E>,
    ) -> Result<Self, E> {
        Ok(Hyper {
            down: pack(&spec.down)?,
            up: pack(&spec.up)?,
            inject: pack(&spec.inject)?,
        })
    }

    pub(crate) fn linears(&self) -> [&L; 3] {
        [&self.down.linear, &self.up.linear, &self.inject.linear]
    }
}

impl<L, N> Indexer<L, N> {
    pub(crate) fn new<E>(
        spec: &'static IndexerSpec,
        mut pack: impl FnMut(&'static Product) -> Result<Packed<L>, E>,
        mut vector: impl FnMut(VectorSpec) -> Result<N, E>,
    ) -> Result<Self, E> {
        let mut norm = |norm| vector(VectorSpec::Norm(norm));
        Ok(Indexer {
            qk: pack(&spec.qk)?,
            norms: [norm(&spec.q_norm)?, norm(&spec.k_norm)?],
        })
    }
}

impl<L, N> Ngrams<L, N> {
    pub(crate) fn new<E>(
        spec: &'static NgramsSpec,
        mut pack: impl FnMut(&'static Product) -> Result<Packed<L>, E>,
        mut vector: impl FnMut(VectorSpec) -> Result<N, E>,
    ) -> Result<Self, E> {
        Ok(Ngrams {
            key: pack(&spec.key)?,
            value: pack(&spec.value)?,
            key_norm: vector(VectorSpec::Norm(&spec.key_norm))?,
            conv_norm: vector(VectorSpec::Norm(&spec.conv_norm))?,
            conv: vector(VectorSpec::Row(&spec.conv))?,
        })
    }
}
