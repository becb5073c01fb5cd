//! Page tables on the device.

use crate::{DevicePages, PageEntry, Stream};
use nq_runtime::Result;
use nq_runtime::kv::{PageCopy, PageTables};

/// Makes room for more positions of sequences, given as (slot, positions): queues the copies of shared
/// pages and the changes of the device's page tables, of which `placed` is a copy.
pub(super) fn reserve_pages(
    stream: &Stream,
    tables: &mut PageTables,
    placed: &mut [Vec<u32>],
    pages: &mut DevicePages,
    growth: impl Iterator<Item = (usize, usize)> + Clone,
) -> Result<()> {
    for PageCopy { from, to, .. } in tables.reserve(growth.clone())? {
        // Copies all rows: those past the shared ones are written before they are read.
        stream.copy_page(pages, from, to)?;
    }
    let mut entries = Vec::new();
    for (slot, _) in growth {
        let placed = &mut placed[slot];
        for (index, &page) in tables.all()[slot].iter().enumerate() {
            match placed.get_mut(index) {
                Some(there) if *there == page => continue,
                Some(there) => *there = page,
                None => placed.push(page),
            }
            entries.push(PageEntry { slot, index, page });
        }
    }
    Ok(stream.set_pages(pages, &entries)?)
}
