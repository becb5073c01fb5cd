//! Pages of keys and values.

use crate::error::Result;

/// The pages of a session that its sequences are made of, each of
/// [`PAGE`](nq_kernels::pages::PAGE) positions of all layers.
pub trait Pages {
    /// Pages that no sequence uses.
    fn free(&self) -> usize;

    /// Bytes of a page, as [`Pages::read`] returns it.
    fn page_bytes(&self) -> usize;

    /// True if pages are all that a sequence is made of; otherwise [`Pages::append`] is refused.
    fn are_all(&self) -> bool {
        true
    }

    /// Appends to `out` the keys and values of all layers at positions `index * PAGE` to
    /// `(index + 1) * PAGE` of a sequence, in their layout in memory.
    ///
    /// # Errors
    /// [`Error::Request`](crate::Error::Request) if the sequence has fewer positions; errors of the device.
    fn read(&mut self, slot: usize, index: usize, out: &mut Vec<u8>) -> Result<()>;

    /// Appends a page of positions to a sequence that ends with a page: bytes that [`Pages::read`] returned for a
    /// sequence with the same tokens up to there, in a session of the same model and
    /// [`SessionSpec::kv`](crate::SessionSpec::kv).
    ///
    /// # Errors
    /// [`Error::PagesFull`](crate::Error::PagesFull), [`Error::ContextFull`](crate::Error::ContextFull);
    /// [`Error::Request`](crate::Error::Request) if the sequence ends within a page, or if `page` has not
    /// [`Pages::page_bytes`] bytes; [`Error::Unsupported`](crate::Error::Unsupported) unless
    /// [`Pages::are_all`]. The sequence is then unchanged.
    fn append(&mut self, slot: usize, page: &[u8]) -> Result<()>;
}
