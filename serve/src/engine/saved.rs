//! What the engine knows of pages on disk: which are still to be written, which are being read back, and whether that pays.

use crate::disk::PageKey;
use std::time::Duration;

/// A kept sequence whose pages may not all be on disk.
pub(super) struct Unsaved {
    pub(super) slot: usize,
    pub(super) keys: Vec<PageKey>,
    /// Number of pages on disk.
    pub(super) saved: usize,
    /// Numbers of whole pages at whose ends it has states that are to be written behind the pages.
    pub(super) states: Vec<usize>,
}

/// The measured time of reading pages back, which is done only if computing them takes longer.
#[derive(Default)]
pub(super) struct RestoreTimes {
    /// Seconds a page, a moving average; `None` before the first.
    page: Option<f64>,
    /// True once it has been told that reading takes longer.
    pub(super) told: bool,
}

/// Weight of the latest page in the average.
const LATEST: f64 = 0.2;
/// Factor on the average each time that reading back was skipped, so that a disk that was slow is tried again.
const FORGIVEN: f64 = 0.98;

impl RestoreTimes {
    pub(super) fn learn(&mut self, page: Duration) {
        let new = page.as_secs_f64();
        self.page = Some(self.page.map_or(new, |old| old + LATEST * (new - old)));
    }

    /// True if reading `pages` back takes less time than computing them, or if that is not known.
    pub(super) fn pays(&mut self, pages: usize, computing: Duration) -> bool {
        let known = self.page.filter(|_| computing > Duration::ZERO);
        let pays = known.is_none_or(|page| page * pages as f64 <= computing.as_secs_f64());
        if !pays {
            self.page = self.page.map(|page| page * FORGIVEN);
        }
        pays
    }
}

/// Pages of a prompt that are being read back, and the states that belong to their end.
pub(super) struct Restore {
    pub(super) keys: std::vec::IntoIter<PageKey>,
    pub(super) state: Option<PageKey>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_read_back_where_that_is_faster_than_computing_them() {
        let ms = Duration::from_millis;
        let mut times = RestoreTimes::default();
        assert!(times.pays(10, ms(1)), "nothing is known");
        times.learn(ms(8));
        assert!(times.pays(10, Duration::ZERO), "no prompt was computed yet");
        assert!(times.pays(10, ms(81)) && !times.pays(10, ms(79)));
        // A disk that was slow once is tried again.
        let again = (0..20).find(|_| times.pays(10, ms(60)));
        assert!(again.is_some_and(|n| n > 10), "{again:?}");
    }
}
