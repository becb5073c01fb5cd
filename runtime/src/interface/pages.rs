//! Pages of keys and values.

use crate::error::Result;

/// The pages of a session that its sequences are made of, each of
/// [`PAGE`](nq_kernels::pages::PAGE) positions of all layers.
pub trait Pages {
    /// Pages that no sequence uses.
    fn free(&self) -> usize;

    /// Bytes of a page, as [`Pages::read`] returns it.
    fn page_bytes(&self) -> usize;

    /// Bytes of the states that a sequence has beside its pages, as [`Pages::read_state`] returns them: 0 if pages are
    /// all that it is made of, `None` if its states are not given out.
    fn state_bytes(&self) -> Option<usize> {
        Some(0)
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
    /// [`Pages::page_bytes`] bytes; [`Error::Unsupported`](crate::Error::Unsupported) where
    /// [`Pages::state_bytes`] is `None`. The sequence is then unchanged.
    fn append(&mut self, slot: usize, page: &[u8]) -> Result<()>;

    /// Appends to `out` the states of all layers that a sequence had at `len` tokens, in their layout in memory.
    ///
    /// # Errors
    /// [`Error::Request`](crate::Error::Request) if the sequence cannot be cut at `len`
    /// ([`Session::reach`](crate::Session::reach)); errors of the device.
    fn read_state(&mut self, slot: usize, len: usize, out: &mut Vec<u8>) -> Result<()> {
        let _ = (slot, len, out);
        Ok(())
    }

    /// Gives a sequence whose last pages were appended the states that it has at its length: bytes that
    /// [`Pages::read_state`] returned for the same tokens, in a session of the same model. They are kept as a snapshot
    /// too. A sequence with states can only be continued after this, or once it is cut to where it has states.
    ///
    /// # Errors
    /// [`Error::Request`](crate::Error::Request) if there are not [`Pages::state_bytes`] bytes; errors of the device.
    fn write_state(&mut self, slot: usize, state: &[u8]) -> Result<()> {
        let _ = (slot, state);
        Ok(())
    }
}
