//! Page tables and reference counts: which pages of a session's pool hold which sequence, on any
//! device.
//!
//! A page is [`PAGE`] positions of all layers. Position `p` of the sequence in a slot is row
//! `p % PAGE` of page `table[p / PAGE]`. A page may be in several tables: sequences forked from
//! one another share their common prefix. New rows after a shared prefix are written to a page of
//! the sequence's own: the first write after a fork in mid-page copies the rows before it
//! (copy on write, as in PagedAttention, arXiv 2309.06180).

use crate::error::{Error, Result};
use crate::interface::SessionSpec;
use nq_kernels::pages::PAGE;
use nq_kernels::pages::SharedPrefix;
use std::ops::Range;

/// A copy of the first rows of a shared page into a page that a sequence has alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The shared page.
    pub from: u32,
    /// The sequence's own page.
    pub to: u32,
    /// Rows to copy: less than a full page.
    pub rows: usize,
}

/// Page reads saved by reading the prefix once for all of its rows.
fn saved(prefix: &SharedPrefix) -> usize {
    prefix.pages * (prefix.rows.len() - 1)
}

/// Tokens that `sequences` must have in common for one read of them to save `least` reads of a page,
/// and one at least; `None` if there are no others to save them for.
pub fn least_prefix(sequences: usize, least: usize) -> Option<usize> {
    let others = sequences.checked_sub(1).filter(|&n| n > 0)?;
    Some(least.max(1).div_ceil(others) * PAGE)
}

/// The pages of a session, and the sequences in them by slot.
#[derive(Debug)]
pub struct PageTables {
    counts: Vec<u32>,      // [pages]: tables that name the page
    free: Vec<u32>,        // pages in no table, the next one last
    tables: Vec<Vec<u32>>, // [slots]
    lengths: Vec<usize>,   // [slots]: positions filled
}

impl PageTables {
    /// Empty sequences, one for each slot of `spec`, over its pages.
    pub fn new(spec: &SessionSpec) -> Self {
        let pages = spec.page_count();
        PageTables {
            counts: vec![0; pages],
            free: (0..pages as u32).rev().collect(),
            tables: vec![Vec::new(); spec.slots],
            lengths: vec![0; spec.slots],
        }
    }

    /// Number of filled positions of a sequence.
    pub fn len(&self, slot: usize) -> usize {
        self.lengths[slot]
    }

    /// The page tables of all slots, each in the order of positions.
    pub fn all(&self) -> &[Vec<u32>] {
        &self.tables
    }

    /// Number of pages that no sequence uses.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Makes room for more positions of sequences, `growth` of (slot, positions) in different
    /// slots: afterwards each may be appended to. Returns the copies that must be made before
    /// anything else is written.
    ///
    /// # Errors
    /// [`Error::PagesFull`] if there are not enough pages; nothing has changed then.
    pub fn reserve(
        &mut self,
        growth: impl Iterator<Item = (usize, usize)> + Clone,
    ) -> Result<Vec<PageCopy>> {
        let pages = |(slot, more): (usize, usize)| {
            let wanted = (self.lengths[slot] + more).div_ceil(PAGE);
            let fresh = wanted.saturating_sub(self.tables[slot].len());
            fresh + usize::from(more > 0 && self.shared_end(slot).is_some())
        };
        let needed: usize = growth.clone().map(pages).sum();
        if needed > self.free.len() {
            return Err(Error::PagesFull {
                needed,
                free: self.free.len(),
                pages: self.counts.len(),
            });
        }
        let mut copies = Vec::new();
        for (slot, more) in growth.filter(|g| g.1 > 0) {
            if let Some(at) = self.shared_end(slot) {
                let (from, to) = (self.tables[slot][at], self.take());
                self.tables[slot][at] = to;
                self.release(from);
                let rows = self.lengths[slot] % PAGE;
                copies.push(PageCopy { from, to, rows });
            }
            let wanted = (self.lengths[slot] + more).div_ceil(PAGE);
            while self.tables[slot].len() < wanted {
                let page = self.take();
                self.tables[slot].push(page);
            }
        }
        Ok(copies)
    }

    /// The full pages of the sequence in `slot`, as the prefix that `rows` of a run after its end share;
    /// `None` if reading it once saves fewer than `least` page reads.
    pub fn prefix_of_run(
        &self,
        slot: usize,
        rows: Range<usize>,
        least: usize,
    ) -> Option<SharedPrefix> {
        let prefix = SharedPrefix {
            slot,
            pages: self.lengths[slot] / PAGE,
            rows: rows.collect(),
        };
        (saved(&prefix) >= least.max(1)).then_some(prefix)
    }

    /// Groups of the given (row, slot) pairs that share a prefix of pages. The groups are disjoint, each
    /// saves at least `least` page reads when its prefix is read once, and they are chosen so that the
    /// total saving is greatest.
    pub fn prefixes(&self, rows: &[(usize, usize)], least: usize) -> Vec<SharedPrefix> {
        let full = |slot: usize| &self.tables[slot][..self.lengths[slot] / PAGE];
        let mut rows = rows.to_vec();
        rows.sort_by_key(|&(_, slot)| full(slot));
        let mut best = self.best_prefixes(&rows, 0).1;
        best.retain(|p| saved(p) >= least.max(1));
        best
    }

    /// The best grouping of `rows`, which are ordered by their pages and share the first `common` ones:
    /// page reads saved, and the groups.
    fn best_prefixes(&self, rows: &[(usize, usize)], common: usize) -> (usize, Vec<SharedPrefix>) {
        let page = |&(_, slot): &(usize, usize), at: usize| {
            let full = self.lengths[slot] / PAGE;
            (at < full).then(|| self.tables[slot][at])
        };
        let [first, .., last] = rows else {
            return (0, Vec::new());
        };
        let mut pages = common;
        while page(first, pages).is_some() && page(first, pages) == page(last, pages) {
            pages += 1;
        }
        let together = SharedPrefix {
            slot: first.1,
            pages,
            rows: rows.iter().map(|r| r.0).collect(),
        };
        let parts =
            rows.chunk_by(|a, b| page(a, pages).is_some() && page(a, pages) == page(b, pages));
        let (mut apart, mut groups) = (0, Vec::new());
        for part in parts {
            let (reads, prefixes) = self.best_prefixes(part, pages + 1);
            apart += reads;
            groups.extend(prefixes);
        }
        match saved(&together) {
            reads if reads >= apart && reads > 0 => (reads, vec![together]),
            _ => (apart, groups),
        }
    }

    /// The index in its table of a sequence's last page, if that is partly filled and shared.
    fn shared_end(&self, slot: usize) -> Option<usize> {
        let at = self.lengths[slot] / PAGE;
        let partly = !self.lengths[slot].is_multiple_of(PAGE);
        (partly && self.counts[self.tables[slot][at] as usize] > 1).then_some(at)
    }

    /// Takes a free page, now in one table. There is one: `reserve` has counted.
    fn take(&mut self) -> u32 {
        let page = self.free.pop().expect("pages were counted");
        self.counts[page as usize] = 1;
        page
    }

    /// Removes `page` from one table.
    fn release(&mut self, page: u32) {
        let count = &mut self.counts[page as usize];
        *count -= 1;
        if *count == 0 {
            self.free.push(page);
        }
    }

    /// Marks `rows` more positions of the sequence as filled; there must be room for them.
    pub fn advance(&mut self, slot: usize, rows: usize) {
        self.lengths[slot] += rows;
        debug_assert!(self.lengths[slot] <= self.tables[slot].len() * PAGE);
    }

    /// The page that holds positions `index * PAGE` to `(index + 1) * PAGE` of a sequence.
    ///
    /// # Errors
    /// [`Error::Request`] if the slot does not exist or the sequence has fewer positions.
    pub fn whole_page(&self, slot: usize, index: usize) -> Result<u32> {
        let len = self.lengths.get(slot).copied().unwrap_or(0);
        match len / PAGE {
            whole if index < whole => Ok(self.tables[slot][index]),
            whole => Err(Error::Request {
                what: "a page of a sequence",
                expected: format!("one of the first {whole} of slot {slot}"),
                found: index.to_string(),
            }),
        }
    }

    /// Adds a page to a sequence whose length is a multiple of [`PAGE`], in a context of `ctx`
    /// positions; the caller fills it.
    ///
    /// # Errors
    /// [`Error::Request`] if the slot does not exist or the sequence ends within a page,
    /// [`Error::ContextFull`], [`Error::PagesFull`]; nothing has changed then.
    pub fn append_page(&mut self, slot: usize, ctx: usize) -> Result<u32> {
        let len = self.lengths.get(slot).copied();
        let Some(len) = len.filter(|len| len.is_multiple_of(PAGE)) else {
            return Err(Error::Request {
                what: "a page to append",
                expected: "a sequence that ends with a page".into(),
                found: format!("slot {slot}, length {len:?}"),
            });
        };
        if len + PAGE > ctx {
            return Err(Error::ContextFull {
                capacity: ctx,
                needed: len + PAGE,
            });
        }
        // Nothing to copy, as the sequence ends with a full page.
        self.reserve([(slot, PAGE)].into_iter())?;
        self.advance(slot, PAGE);
        Ok(self.tables[slot][len / PAGE])
    }

    /// Forgets all but the first `len` positions of a sequence, and frees the pages after them.
    pub fn truncate(&mut self, slot: usize, len: usize) {
        self.lengths[slot] = self.lengths[slot].min(len);
        while self.tables[slot].len() > self.lengths[slot].div_ceil(PAGE) {
            if let Some(page) = self.tables[slot].pop() {
                self.release(page);
            }
        }
    }

    /// Makes the sequence in slot `to` the first `len` positions of the sequence in `from`, sharing its
    /// pages.
    ///
    /// # Errors
    /// [`Error::Request`] if a slot does not exist, if both are the same, or if the sequence has fewer
    /// positions.
    pub fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<()> {
        let slots = self.tables.len();
        let refuse = |what, expected, found: usize| {
            Err(Error::Request {
                what,
                expected,
                found: found.to_string(),
            })
        };
        if let Some(&slot) = [from, to].iter().find(|&&slot| slot >= slots) {
            return refuse("fork", format!("slots below {slots}"), slot);
        }
        if from == to {
            return refuse("fork", "two different slots".into(), to);
        }
        if len > self.lengths[from] {
            let most = format!(
                "at most the {} positions that there are",
                self.lengths[from]
            );
            return refuse("fork", most, len);
        }
        self.truncate(to, 0);
        let shared = self.tables[from][..len.div_ceil(PAGE)].to_vec();
        for &page in &shared {
            self.counts[page as usize] += 1;
        }
        self.tables[to] = shared;
        self.lengths[to] = len;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_kernels::rng::Philox;

    fn tables(slots: usize, pages: usize) -> PageTables {
        PageTables::new(&SessionSpec {
            slots,
            ctx: 100 * PAGE,
            pages: Some(pages),
            ..SessionSpec::default()
        })
    }

    fn grow(tables: &mut PageTables, slot: usize, rows: usize) -> Result<Vec<PageCopy>> {
        let copies = tables.reserve([(slot, rows)].into_iter())?;
        tables.advance(slot, rows);
        Ok(copies)
    }

    #[test]
    fn a_fork_shares_whole_pages_and_copies_the_rows_of_a_part() {
        let mut t = tables(3, 8);
        assert_eq!(grow(&mut t, 0, 2 * PAGE + 5).unwrap(), []);
        assert_eq!(t.free_pages(), 5);
        t.fork(0, 1, 2 * PAGE + 3).unwrap();
        assert_eq!((t.free_pages(), &t.all()[1]), (5, &t.all()[0]));
        // The first to write takes a page of its own; then the last page is no longer shared.
        let (last, own) = (t.all()[0][2], 3);
        let copy = PageCopy {
            from: last,
            to: own,
            rows: 3,
        };
        assert_eq!(grow(&mut t, 1, 1).unwrap(), [copy]);
        assert_eq!(t.all()[1][..2], t.all()[0][..2]);
        assert_eq!(grow(&mut t, 0, 1).unwrap(), []);
        // Nothing to copy at the end of a page.
        t.fork(0, 2, 2 * PAGE).unwrap();
        assert_eq!(grow(&mut t, 2, 1).unwrap(), []);
        assert_eq!(t.free_pages(), 3);
        for slot in 0..3 {
            t.truncate(slot, 0);
        }
        assert_eq!(t.free_pages(), 8);
    }

    /// Rows 10 to 16 over slots 0 to 6: four share five pages, two of those a sixth; others share none.
    #[test]
    fn what_is_in_common_is_grouped_so_that_most_is_saved() {
        let mut t = tables(8, 60);
        grow(&mut t, 0, 5 * PAGE + 3).unwrap();
        t.fork(0, 1, 5 * PAGE).unwrap();
        grow(&mut t, 1, PAGE).unwrap();
        t.fork(1, 2, 6 * PAGE).unwrap();
        t.fork(0, 3, 5 * PAGE + 3).unwrap();
        grow(&mut t, 4, 9 * PAGE).unwrap();
        t.fork(4, 5, 9 * PAGE).unwrap();
        grow(&mut t, 6, PAGE).unwrap();
        let rows: Vec<(usize, usize)> = (0..7).map(|slot| (10 + slot, slot)).collect();
        let groups = |t: &PageTables, least| {
            let mut found: Vec<_> = t
                .prefixes(&rows, least)
                .into_iter()
                .map(|mut p| {
                    p.rows.sort_unstable();
                    (p.pages, p.rows)
                })
                .collect();
            found.sort();
            found
        };
        // Partly filled pages cannot be shared; four rows save 15 reads, two would save 6.
        let (four, two) = ((5, vec![10, 11, 12, 13]), (9, vec![14, 15]));
        assert_eq!(groups(&t, 1), [four.clone(), two]);
        assert_eq!(groups(&t, 10), [four]);
        assert_eq!(groups(&t, 16), []);
        // Two rows that share many more pages save more on their own.
        grow(&mut t, 1, 20 * PAGE).unwrap();
        t.fork(1, 2, 26 * PAGE).unwrap();
        assert_eq!(groups(&t, 10), [(26, vec![11, 12])]);
        assert!(t.prefixes(&rows[..1], 0).is_empty() && t.prefixes(&[], 0).is_empty());
    }

    #[test]
    fn the_more_sequences_have_a_prefix_the_shorter_it_may_be() {
        assert_eq!(least_prefix(16, 128), Some(9 * PAGE));
        assert_eq!(least_prefix(2, 128), Some(128 * PAGE));
        assert_eq!(least_prefix(2, 0), Some(PAGE));
        assert_eq!((least_prefix(1, 1), least_prefix(0, 1)), (None, None));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_figures_and_changes_nothing() {
        let mut t = tables(2, 3);
        grow(&mut t, 0, PAGE + 1).unwrap();
        let refused = t.reserve([(0, PAGE), (1, 1)].into_iter()).unwrap_err();
        assert!(matches!(
            refused,
            Error::PagesFull {
                needed: 2,
                free: 1,
                pages: 3
            }
        ));
        assert_eq!(
            (t.all()[0].len(), t.all()[1].len(), t.free_pages()),
            (2, 0, 1)
        );
        grow(&mut t, 0, PAGE).unwrap();
        // A copy takes a page too.
        t.fork(0, 1, 2 * PAGE + 1).unwrap();
        let refused = grow(&mut t, 1, 1).unwrap_err().to_string();
        assert!(
            refused.contains("0 of 3 pages") && refused.contains("1 more"),
            "{refused}"
        );
        for (from, to, len) in [(0, 0, 1), (0, 2, 1), (2, 0, 1), (0, 1, 2 * PAGE + 2)] {
            assert!(matches!(t.fork(from, to, len), Err(Error::Request { .. })));
        }
    }

    /// Compares with a model that records every row.
    #[test]
    fn every_sequence_keeps_its_rows_and_no_page_is_lost() {
        const SLOTS: usize = 5;
        const PAGES: usize = 24;
        let mut t = tables(SLOTS, PAGES);
        let mut written = vec![[0u64; PAGE]; PAGES];
        let mut expected: Vec<Vec<u64>> = vec![Vec::new(); SLOTS];
        let mut next = 1;
        for step in 0..20_000u64 {
            let [a, b, c, _] = Philox::block([7, 7], 0, step).map(|w| w as usize);
            let slot = a % SLOTS;
            match b % 10 {
                0 => {
                    let len = c % (expected[slot].len() + 1);
                    t.truncate(slot, len);
                    expected[slot].truncate(len);
                }
                1 => {
                    let (to, len) = (
                        (slot + 1 + c % (SLOTS - 1)) % SLOTS,
                        b % (expected[slot].len() + 1),
                    );
                    t.fork(slot, to, len).unwrap();
                    expected[to] = expected[slot][..len].to_vec();
                }
                _ => {
                    let more = c % 70;
                    let Ok(copies) = t.reserve([(slot, more)].into_iter()) else {
                        t.truncate(slot, 0);
                        expected[slot].clear();
                        continue;
                    };
                    for PageCopy { from, to, rows } in copies {
                        let rows = written[from as usize][..rows].to_vec();
                        written[to as usize][..rows.len()].copy_from_slice(&rows);
                    }
                    for _ in 0..more {
                        let at = t.len(slot);
                        t.advance(slot, 1);
                        written[t.all()[slot][at / PAGE] as usize][at % PAGE] = next;
                        expected[slot].push(next);
                        next += 1;
                    }
                }
            }
            let row = |slot: usize, p: usize| written[t.all()[slot][p / PAGE] as usize][p % PAGE];
            for (slot, rows) in expected.iter().enumerate() {
                assert_eq!(t.len(slot), rows.len());
                let kept = rows.iter().enumerate().all(|(p, &r)| row(slot, p) == r);
                assert!(kept, "slot {slot} after {step} steps");
            }
            let mut used: Vec<u32> = t.tables.concat();
            used.sort_unstable();
            used.dedup();
            assert_eq!(used.len() + t.free_pages(), PAGES, "after {step} steps");
        }
    }
}
