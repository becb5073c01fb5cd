//! What requests may take before a model is asked: bytes of bodies, and threads that read them. Each client has a
//! share of both, so that one that takes all of its own leaves others theirs.
//!
//! A small body needs no room. A large one is received once there is room for the whole of it, and holds that until
//! it has become tokens; large ones are read one after another.

use crate::engine::Client;
use crate::error::ApiError;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Bytes that a body may have without room of its own.
pub(super) const SMALL: usize = 32 << 10;

/// Bytes that one permit is for.
const UNIT: usize = 1 << 10;

/// Threads that read requests of one client at once.
const THREADS: usize = 2;

/// Clients whose shares are remembered before those without requests are forgotten.
const CLIENTS: usize = 256;

/// What is given back to the system after so much was freed: a large body counts as this much, a connection as 1.
const LITTER: usize = 64;

/// The room of a server.
pub(super) struct BodyRoom {
    bytes: Arc<Semaphore>,
    /// Large bodies that are read at once.
    large: Arc<Semaphore>,
    shares: Mutex<HashMap<u64, Weak<ClientShare>>>,
    /// Units that one client may hold.
    share: usize,
    litter: AtomicUsize,
}

/// A client's part of it.
struct ClientShare {
    bytes: Arc<Semaphore>,
    threads: Arc<Semaphore>,
    /// Requests whose images are made rows of at once.
    seeing: Arc<Semaphore>,
}

/// A request's place in the room. Clones are of the same place, which is free once all have gone.
#[derive(Clone)]
pub(super) struct RoomPlace(Arc<Taken>);

struct Taken {
    room: Arc<BodyRoom>,
    share: Arc<ClientShare>,
    held: Mutex<Vec<OwnedSemaphorePermit>>,
}

impl BodyRoom {
    /// Room for `bytes` of bodies, half of it for one client.
    pub(super) fn new(bytes: usize) -> Arc<Self> {
        let units = (bytes / UNIT).clamp(2, u32::MAX as usize);
        Arc::new(BodyRoom {
            bytes: Arc::new(Semaphore::new(units)),
            large: Arc::new(Semaphore::new(1)),
            shares: Mutex::default(),
            share: units / 2,
            litter: AtomicUsize::new(0),
        })
    }

    /// A place for a request of `client`, which holds nothing yet.
    pub(super) fn place(self: &Arc<Self>, client: Client) -> RoomPlace {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if shares.len() >= CLIENTS {
            shares.retain(|_, share| share.strong_count() > 0);
        }
        let known = shares.get(&client.id).and_then(Weak::upgrade);
        let share = known.unwrap_or_else(|| {
            let share = Arc::new(ClientShare {
                bytes: Arc::new(Semaphore::new(self.share)),
                threads: Arc::new(Semaphore::new(THREADS)),
                seeing: Arc::new(Semaphore::new(1)),
            });
            shares.insert(client.id, Arc::downgrade(&share));
            share
        });
        RoomPlace(Arc::new(Taken {
            room: Arc::clone(self),
            share,
            held: Mutex::default(),
        }))
    }

    /// Notes that a connection has gone.
    pub(super) fn connection_left(&self) {
        self.litter.fetch_add(1, Ordering::Relaxed);
    }

    /// True, once, if so much was freed that the allocator may keep a lot for nothing.
    pub(super) fn is_littered(&self) -> bool {
        let much = self.litter.load(Ordering::Relaxed) >= LITTER;
        if much {
            self.litter.store(0, Ordering::Relaxed);
        }
        much
    }
}

impl RoomPlace {
    /// Waits at most `patience` for room for a body of so many bytes.
    ///
    /// # Errors
    /// If there is none for so long.
    pub(super) async fn hold(&self, bytes: usize, patience: Duration) -> Result<(), ApiError> {
        let Taken { room, share, held } = &*self.0;
        let units = bytes.div_ceil(UNIT).min(room.share) as u32;
        let both = async {
            let own = Arc::clone(&share.bytes).acquire_many_owned(units).await;
            let all = Arc::clone(&room.bytes).acquire_many_owned(units).await;
            [own, all]
        };
        let found = timeout(patience, both).await.map_err(|_| {
            ApiError::busy("the server holds as many bytes of requests as it may: try again")
        })?;
        let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
        held.extend(found.into_iter().flatten());
        Ok(())
    }

    fn is_large(&self) -> bool {
        let held = self.0.held.lock().unwrap_or_else(PoisonError::into_inner);
        !held.is_empty()
    }

    /// Runs slow work on a thread of its own, after other work of the same client. If the future is dropped before
    /// it has begun, it never does.
    ///
    /// # Errors
    /// Those of the work; a panic in it.
    pub(super) async fn work<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let Taken { room, share, .. } = &*self.0;
        // None of these is ever closed.
        let own = Arc::clone(&share.threads).acquire_owned().await;
        let large = match self.is_large() {
            true => Some(Arc::clone(&room.large).acquire_owned().await),
            false => None,
        };
        self.run((own, large), f).await
    }

    /// Runs the making of rows from images on a thread of its own, of one request of the same client at a time, beside its
    /// other work. The work is told by what it gets whether the future has been dropped, and ends early then: whoever
    /// sends images and leaves keeps nobody waiting.
    ///
    /// # Errors
    /// Those of the work; a panic in it.
    pub(super) async fn see<T: Send + 'static>(
        &self,
        f: impl FnOnce(&dyn Fn() -> bool) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let own = Arc::clone(&self.0.share.seeing).acquire_owned().await;
        let waits = Arc::new(());
        let waited_for = Arc::downgrade(&waits);
        let done = self.run(own, move || f(&|| waited_for.strong_count() == 0));
        let done = done.await;
        drop(waits);
        done
    }

    /// Runs slow work on a thread of its own, which holds `permits` and this place until it is done.
    async fn run<T: Send + 'static>(
        &self,
        permits: impl Send + 'static,
        f: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let place = self.clone();
        let done = tokio::task::spawn_blocking(move || {
            let _until_it_is_done = (place, permits);
            f()
        });
        let panicked = |_| Err(ApiError::internal("the request could not be read: a panic"));
        done.await.unwrap_or_else(panicked)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !held.is_empty() {
            self.room.litter.fetch_add(LITTER, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(id: u64) -> Client {
        Client {
            id,
            ..Client::default()
        }
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(test);
    }

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn one_client_leaves_others_their_room() {
        run(async {
            let room = BodyRoom::new(8 << 20);
            let (a, b) = (room.place(client(1)), room.place(client(1)));
            a.hold(3 << 20, NOW).await.unwrap();
            assert_eq!(b.hold(2 << 20, NOW).await.unwrap_err().status, 503);
            let other = room.place(client(2));
            other.hold(4 << 20, NOW).await.unwrap();
            let third = room.place(client(3));
            assert_eq!(third.hold(2 << 20, NOW).await.unwrap_err().status, 503);
            assert!(!room.is_littered());
            drop(a);
            assert!(room.is_littered() && !room.is_littered());
            b.hold(2 << 20, NOW).await.unwrap();
        });
    }

    /// Work whose client has gone before it began is never done, and that which has begun keeps its place.
    #[test]
    fn work_is_done_for_those_who_wait() {
        run(async {
            let room = BodyRoom::new(8 << 20);
            let place = room.place(client(1));
            place.hold(1 << 20, NOW).await.unwrap();
            let (go, wait) = std::sync::mpsc::channel::<()>();
            let first = tokio::spawn({
                let place = place.clone();
                async move { place.work(move || Ok(wait.recv().is_ok())).await }
            });
            while room.large.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            let ran = Arc::new(AtomicUsize::new(0));
            let second = tokio::spawn({
                let (place, ran) = (room.place(client(2)), Arc::clone(&ran));
                async move {
                    place.hold(1 << 20, NOW).await?;
                    place
                        .work(move || Ok(ran.fetch_add(1, Ordering::Relaxed)))
                        .await
                }
            });
            tokio::task::yield_now().await;
            second.abort();
            assert!(second.await.is_err());
            let small = room.place(client(3)).work(|| Ok(7)).await;
            assert_eq!(small.unwrap(), 7, "a small body waits for no large one");
            go.send(()).unwrap();
            assert!(first.await.unwrap().unwrap());
            assert_eq!(ran.load(Ordering::Relaxed), 0);
            // Work on images is told that nobody waits for it any more, and the client's next waits for its end.
            let (began, begins) = tokio::sync::oneshot::channel();
            let left = tokio::spawn({
                let place = place.clone();
                async move {
                    let look = move |gone: &dyn Fn() -> bool| {
                        began
                            .send(gone())
                            .map_err(|_| ApiError::internal("nobody"))?;
                        while !gone() {
                            std::thread::yield_now();
                        }
                        Ok(())
                    };
                    place.see(look).await
                }
            });
            assert!(!begins.await.unwrap(), "somebody waits for it");
            left.abort();
            assert!(left.await.is_err());
            assert!(!place.see(|gone| Ok(gone())).await.unwrap());
            let failed: Result<(), _> = place.work(|| panic!("as asked")).await;
            assert_eq!(failed.unwrap_err().status, 500);
        });
    }
}
