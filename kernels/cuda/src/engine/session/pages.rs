//! The pages and states of a session's sequences, for those that are written to disk and read back.

use super::stream_rows::StreamsKept;
use super::{CudaSession, copy_places, staging};
use crate::DeviceStates;
use nq_kernels::pages::PAGE;
use nq_runtime::checks::check_bytes;
use nq_runtime::interface::Pages;
use nq_runtime::{Error, Result};

impl Pages for CudaSession {
    fn free(&self) -> usize {
        self.tables.free_pages()
    }

    fn page_bytes(&self) -> usize {
        self.pages.page_bytes()
    }

    fn state_bytes(&self) -> Option<usize> {
        let kept = self.kept.as_ref().map_or(0, StreamsKept::place_bytes);
        Some(self.states.as_ref().map_or(0, DeviceStates::place_bytes) + kept)
    }

    fn read(&mut self, slot: usize, index: usize, out: &mut Vec<u8>) -> Result<()> {
        let page = self.tables.whole_page(slot, index)?;
        let through = staging(&mut self.page_host, &self.pages, &self.model.gpu)?;
        Ok(self.stream.read_page(&self.pages, page, through, out)?)
    }

    fn append(&mut self, slot: usize, page: &[u8]) -> Result<()> {
        check_bytes("a page of keys and values", page, self.pages.page_bytes())?;
        let through = staging(&mut self.page_host, &self.pages, &self.model.gpu)?;
        let at = self.tables.append_page(slot, self.spec.ctx)?;
        // The device's page table changes when the sequence next grows.
        let written = (self.stream).write_page(&mut self.pages, at, through, page);
        if written.is_err() {
            self.tables.truncate(slot, self.tables.len(slot) - PAGE);
        } else {
            self.stateless[slot] = self.states.is_some();
            self.behind[slot] = None;
        }
        Ok(written?)
    }

    fn read_state(&mut self, slot: usize, len: usize, out: &mut Vec<u8>) -> Result<()> {
        let ends = len == self.tables.len(slot) && !self.stateless[slot];
        if ends {
            self.settle(slot)?;
        }
        let place = match self.snapshots.nearest(slot, len) {
            // States in memory stand in front of the rows that are kept.
            _ if ends || self.behind[slot] == Some(len) => Some(slot),
            Some((place, there)) if there == len => Some(place),
            _ => None,
        };
        match (&self.states, place) {
            (None, _) => Ok(()),
            (Some(states), Some(place)) => {
                self.stream.read_states(states, place, out)?;
                match &self.kept {
                    Some(kept) => Ok(kept.read(&self.stream, place, out)?),
                    None => Ok(()),
                }
            }
            (Some(_), None) => Err(Error::Request {
                what: "states of a sequence",
                expected: "a length at which they are kept".into(),
                found: format!("length {len} of slot {slot}"),
            }),
        }
    }

    fn write_state(&mut self, slot: usize, state: &[u8]) -> Result<()> {
        let Some(states) = &mut self.states else {
            return Ok(());
        };
        let kept = self.kept.as_ref().map_or(0, StreamsKept::place_bytes);
        check_bytes("states of a sequence", state, states.place_bytes() + kept)?;
        let (state, rest) = state.split_at(states.place_bytes());
        self.stream.write_states(states, slot, state)?;
        if let Some(kept) = &mut self.kept {
            kept.write(&self.stream, slot, rest)?;
        }
        (self.stateless[slot], self.behind[slot]) = (false, None);
        if let Some(place) = self.snapshots.take(slot, self.tables.len(slot)) {
            copy_places(&self.stream, states, &mut self.kept, slot, place)?;
        }
        Ok(())
    }
}
