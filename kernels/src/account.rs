//! An account of memory: the bytes held now, and the most held at once.
//!
//! An allocation takes from an account and gives back to it when dropped. A plan goes through the
//! same steps on an account of its own, without allocating. What
//! constructors take on a GPU is found by running them on `nq_cuda::Gpu::dry`, and on a device of
//! [`grad`](crate::grad) by running them on an account itself, which is a device that only counts.
//! Stages that do not overlap need no formula of their own: the largest gives the peak.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Size of the pages in which a GPU's driver hands out memory.
const GPU_PAGE: usize = 2 << 20;

/// Bytes held now, and the most so far. Clones are the same account.
#[derive(Clone, Debug, Default)]
pub struct Account(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    page: Option<usize>,
    held: AtomicUsize,
    most: AtomicUsize,
    /// An account of more devices, which counts the same bytes.
    whole: Option<Account>,
}

impl Account {
    /// An account of the host's memory, with nothing held yet.
    pub fn host() -> Self {
        Self::default()
    }

    /// An account of a GPU's memory, which is handed out in pages of 2 MiB: an allocation takes whole
    /// pages, or a part of one that it shares. Nothing is held yet.
    pub fn gpu() -> Self {
        Account(Arc::new(Counts {
            page: Some(GPU_PAGE),
            ..Counts::default()
        }))
    }

    /// GPU memory allocated by this process, on all devices together, without the memory that the
    /// driver takes for itself.
    pub fn of_all_gpus() -> &'static Self {
        static ALL: LazyLock<Account> = LazyLock::new(Account::gpu);
        &ALL
    }

    /// GPU memory allocated by this process on the device `ordinal`, which is part of that on all devices.
    pub fn of_gpu(ordinal: usize) -> Self {
        static EACH: Mutex<BTreeMap<usize, Account>> = Mutex::new(BTreeMap::new());
        let mut each = EACH.lock().unwrap_or_else(PoisonError::into_inner);
        let account = each.entry(ordinal).or_insert_with(|| {
            Account(Arc::new(Counts {
                page: Some(GPU_PAGE),
                whole: Some(Self::of_all_gpus().clone()),
                ..Counts::default()
            }))
        });
        account.clone()
    }

    /// Takes `bytes` until the result is dropped.
    pub fn hold(&self, bytes: usize) -> Held {
        let taken = match self.0.page {
            Some(page) if bytes >= page => bytes.next_multiple_of(page),
            _ => bytes,
        };
        for account in self.and_whole() {
            let held = account.0.held.fetch_add(taken, Ordering::Relaxed) + taken;
            account.0.most.fetch_max(held, Ordering::Relaxed);
        }
        Held {
            account: self.clone(),
            taken,
        }
    }

    /// This account and the one of which it is a part, if it is one.
    fn and_whole(&self) -> impl Iterator<Item = &Account> {
        std::iter::successors(Some(self), |account| account.0.whole.as_ref())
    }

    /// Bytes held now.
    pub fn held(&self) -> usize {
        self.0.held.load(Ordering::Relaxed)
    }

    /// The most bytes held since [`Account::begin`], or ever.
    pub fn peak(&self) -> usize {
        self.0.most.load(Ordering::Relaxed)
    }

    /// Resets the peak to the bytes held now.
    pub fn begin(&self) {
        self.0.most.store(self.held(), Ordering::Relaxed);
    }
}

/// Bytes held on an [`Account`], given back when dropped.
#[derive(Debug)]
#[must_use = "what is dropped is no longer held"]
pub struct Held {
    account: Account,
    taken: usize,
}

impl Held {
    /// Bytes taken: whole pages if memory is handed out in pages.
    pub fn bytes(&self) -> usize {
        self.taken
    }

    /// Takes another `bytes`, held as long as these.
    pub fn add(&mut self, bytes: usize) {
        let mut more = self.account.hold(bytes);
        self.taken += std::mem::take(&mut more.taken);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for account in self.account.and_whole() {
            account.0.held.fetch_sub(self.taken, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Account, GPU_PAGE};

    #[test]
    fn the_peak_is_that_of_the_greediest_stage() {
        let account = Account::host();
        let mut kept = account.hold(100);
        kept.add(20);
        drop(account.hold(50));
        drop((account.hold(30), account.hold(40)));
        assert_eq!((account.held(), account.peak()), (120, 190));
        account.begin();
        assert_eq!(account.clone().peak(), 120);
        drop(kept);
        assert_eq!((account.held(), account.peak()), (0, 120));
    }

    #[test]
    fn what_a_gpu_holds_counts_among_all() {
        // Of ordinals that no other test has.
        let (one, other) = (Account::of_gpu(1000), Account::of_gpu(1001));
        let mut held = Account::of_gpu(1000).hold(GPU_PAGE);
        held.add(GPU_PAGE + 1);
        assert_eq!((one.held(), other.held()), (3 * GPU_PAGE, 0));
        assert!(Account::of_all_gpus().held() >= 3 * GPU_PAGE);
        drop(held);
        assert_eq!((one.held(), one.peak()), (0, 3 * GPU_PAGE));
        assert_eq!(other.peak(), 0);
    }

    #[test]
    fn large_allocations_of_a_gpu_take_whole_pages() {
        let taken = |bytes| Account::gpu().hold(bytes).bytes();
        assert_eq!(taken(100), 100);
        assert_eq!(taken(GPU_PAGE), GPU_PAGE);
        assert_eq!(taken(GPU_PAGE + 1), 2 * GPU_PAGE);
    }
}
