//! What a session keeps of its sequences: pages, states, and snapshots of these.

use crate::buffers::CopyPlaces;
use crate::session::WgpuSession;
use crate::sizes::Part;
use nq_runtime::checks::check_bytes;
use nq_runtime::interface::{Chunk, Pages};
use nq_runtime::{Error, Result};

impl WgpuSession {
    /// True if sequences have states, which cannot be cut.
    pub(crate) fn recurrent(&self) -> bool {
        self.model.config.delta.is_some()
    }

    /// Copies the states at place `from` to place `to`.
    pub(crate) fn copy_states(&self, from: usize, to: usize) {
        self.copy_parts(&self.buffers.states(&self.sizes), &[(from, to)]);
    }

    /// Gives the sequence in `to` the states that the one in `from` had at `len` tokens or, of those kept, shortly
    /// before. Returns that length.
    pub(crate) fn resume(&mut self, from: usize, to: usize, len: usize) -> usize {
        match self.snapshots.nearest(from, len) {
            None => 0,
            Some((place, len)) => {
                self.copy_states(place, to);
                len
            }
        }
    }

    /// True if the sequence can be cut at `len`: if it has states there, or none at all.
    pub(crate) fn ends_whole(&self, slot: usize, len: usize) -> bool {
        !self.recurrent() || len >= self.tables.len(slot) && !self.stateless[slot]
    }

    /// Called when a forward over chunks fails: what that did to states cannot be undone, so their sequences become
    /// empty.
    pub(crate) fn lose(&mut self, chunks: &[Chunk<'_>]) {
        chunks.iter().for_each(|chunk| self.lose_slot(chunk.slot));
    }

    /// As [`WgpuSession::lose`], for one sequence.
    pub(crate) fn lose_slot(&mut self, slot: usize) {
        if self.recurrent() {
            self.tables.truncate(slot, 0);
            self.snapshots.cut(slot, 0);
        }
    }

    /// In each of `all`, copies parts from and to these places.
    pub(crate) fn copy_parts(&self, all: &[CopyPlaces<'_>], moves: &[(usize, usize)]) {
        if moves.iter().all(|(from, to)| from == to) {
            return;
        }
        let (gpu, through) = (&self.model.gpu, &self.buffers[Part::Moved]);
        let mut encoder = gpu.encoder();
        for CopyPlaces { buffer, bytes } in all {
            for (from, to) in moves {
                let size = *bytes as u64;
                let [from, to] = [from, to].map(|at| *at as u64 * size);
                encoder.copy_buffer_to_buffer(buffer, from, through, 0, size);
                encoder.copy_buffer_to_buffer(through, 0, buffer, to, size);
            }
        }
        gpu.submit(encoder);
    }

    /// Appends part `at` of each of `all` to `out`.
    fn read_parts(&self, all: &[CopyPlaces<'_>], at: usize, out: &mut Vec<u8>) -> Result<()> {
        let (gpu, mut values) = (&self.model.gpu, Vec::new());
        for &CopyPlaces { buffer, bytes } in all {
            let staging = gpu.staging(bytes)?;
            let mut encoder = gpu.encoder();
            encoder.copy_buffer_to_buffer(buffer, (at * bytes) as u64, &staging, 0, bytes as u64);
            gpu.submit(encoder);
            values.clear();
            gpu.read(&staging, bytes, &mut values)?;
            out.extend_from_slice(bytemuck::cast_slice(&values));
        }
        Ok(())
    }

    /// Writes what [`WgpuSession::read_parts`] has read to part `at` of each of `all`.
    fn write_parts(&self, all: &[CopyPlaces<'_>], at: usize, from: &[u8]) -> Result<()> {
        let mut rest = from;
        for &CopyPlaces { buffer, bytes } in all {
            let (part, others) = rest.split_at(bytes);
            self.model.gpu.write(buffer, at * bytes, part);
            rest = others;
        }
        self.model.gpu.finish()
    }
}

impl Pages for WgpuSession {
    fn free(&self) -> usize {
        self.tables.free_pages()
    }

    fn page_bytes(&self) -> usize {
        self.sizes.all_of_page()
    }

    fn state_bytes(&self) -> Option<usize> {
        Some(self.sizes.all_states())
    }

    fn read(&mut self, slot: usize, index: usize, out: &mut Vec<u8>) -> Result<()> {
        let page = self.tables.whole_page(slot, index)? as usize;
        self.read_parts(&self.buffers.pages(&self.sizes), page, out)
    }

    fn append(&mut self, slot: usize, page: &[u8]) -> Result<()> {
        check_bytes("a page of keys and values", page, self.page_bytes())?;
        let at = self.tables.append_page(slot, self.spec.ctx)? as usize;
        self.stateless[slot] = self.recurrent();
        self.write_parts(&self.buffers.pages(&self.sizes), at, page)
    }

    fn read_state(&mut self, slot: usize, len: usize, out: &mut Vec<u8>) -> Result<()> {
        let place = match self.ends_whole(slot, len) {
            true => Some((slot, self.tables.len(slot))),
            false => self.snapshots.nearest(slot, len),
        };
        let Some((place, _)) = place.filter(|&(_, there)| there == len) else {
            return Err(Error::Request {
                what: "states of a sequence",
                expected: "a length at which they are kept".into(),
                found: format!("length {len} of slot {slot}"),
            });
        };
        self.read_parts(&self.buffers.states(&self.sizes), place, out)
    }

    fn write_state(&mut self, slot: usize, state: &[u8]) -> Result<()> {
        check_bytes("states of a sequence", state, self.sizes.all_states())?;
        self.write_parts(&self.buffers.states(&self.sizes), slot, state)?;
        self.stateless[slot] = false;
        if self.recurrent()
            && let Some(place) = self.snapshots.take(slot, self.tables.len(slot))
        {
            self.copy_states(slot, place);
        }
        Ok(())
    }
}
