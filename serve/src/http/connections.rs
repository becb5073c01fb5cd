//! Who is connected. If nobody else fits, the connection goes that waits for its client's request, of the client
//! that has most.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// All connections, from the oldest.
#[derive(Default)]
pub(super) struct Connections(Mutex<Known>);

#[derive(Default)]
struct Known {
    next: u64,
    all: BTreeMap<u64, Connection>,
}

struct Connection {
    address: IpAddr,
    working: Working,
    leave: Arc<Notify>,
}

/// True from a request's last byte to its answer's.
#[derive(Clone, Debug, Default)]
pub(super) struct Working(Arc<AtomicBool>);

impl Working {
    pub(super) fn set(&self, working: bool) {
        self.0.store(working, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A connection's entry, which goes with it.
pub(super) struct ConnectionEntry {
    all: Arc<Connections>,
    number: u64,
    /// Whether it is at work.
    pub(super) working: Working,
    /// Tells it to make room.
    pub(super) leave: Arc<Notify>,
}

impl Connections {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a connection of `address`.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> ConnectionEntry {
        let (working, leave) = (Working::default(), Arc::new(Notify::new()));
        let mut known = self.known();
        let number = known.next;
        known.next += 1;
        let connection = Connection {
            address,
            working: working.clone(),
            leave: Arc::clone(&leave),
        };
        known.all.insert(number, connection);
        drop(known);
        ConnectionEntry {
            all: Arc::clone(self),
            number,
            working,
            leave,
        }
    }

    /// Tells one connection to leave; none if all are at work.
    pub(super) fn make_room(&self) {
        let mut known = self.known();
        let mut count: HashMap<IpAddr, usize> = HashMap::new();
        for connection in known.all.values() {
            *count.entry(connection.address).or_default() += 1;
        }
        let waits = known.all.iter().filter(|(_, c)| !c.working.get());
        // Of equals, the oldest.
        let gone = waits.min_by_key(|(_, c)| usize::MAX - count[&c.address]);
        let gone = gone.map(|(number, _)| *number);
        if let Some(connection) = gone.and_then(|number| known.all.remove(&number)) {
            connection.leave.notify_one();
        }
    }
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        self.all.known().all.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_that_waits_of_the_client_with_most_makes_room() {
        let all = Arc::new(Connections::default());
        let address = |n: u8| IpAddr::from([127, 0, 0, n]);
        let entries: Vec<ConnectionEntry> = [1, 2, 2, 2, 1].map(|n| all.enter(address(n))).into();
        let told = |entry: &ConnectionEntry| {
            let mut told = std::pin::pin!(entry.leave.notified());
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            told.as_mut().poll(&mut context).is_ready()
        };
        entries[1].working.set(true);
        all.make_room();
        let leaves: Vec<bool> = entries.iter().map(told).collect();
        assert_eq!(leaves, [false, false, true, false, false]);
        entries.iter().for_each(|e| e.working.set(true));
        all.make_room();
        assert!(!entries.iter().any(told));
        drop(entries);
        assert!(all.known().all.is_empty());
    }
}
