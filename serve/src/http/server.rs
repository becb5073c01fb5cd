//! Connections: their number, time limits and shutdown.

use super::connections::{ConnectionEntry, Connections};
use super::limits::HttpLimits;
use super::noted::{Ledger, Report};
use super::room::BodyRoom;
use super::routes::{Peer, router};
use super::{App, Security};
use crate::models::Models;
use crate::protocol::reading::Rules;
use axum::Extension;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use nq_formats::mapping;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Most connections that wait to be accepted, where the system allows as many. Without room here, a client waits for
/// a second before it tries again.
const BACKLOG: i32 = 4096;

/// A listening server.
pub struct Server {
    listener: StdListener,
    app: App,
    /// How long a model stays loaded that nobody uses; `None`: as long as its memory is not needed.
    idle: Option<Duration>,
    stop: watch::Receiver<Option<Duration>>,
    stopper: Stopper,
}

/// Stops a server from another thread.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<watch::Sender<Option<Duration>>>);

impl Stopper {
    /// Accepts no more requests; those in progress may continue for `grace`.
    pub fn stop(&self, grace: Duration) {
        self.0.send_replace(Some(grace));
    }
}

impl Server {
    /// Listens on `address`, without answering yet.
    ///
    /// # Errors
    /// An unavailable address; one reachable from other machines if no key is required.
    pub fn bind(
        address: SocketAddr,
        models: impl Into<Models>,
        security: Security,
        limits: HttpLimits,
    ) -> io::Result<Self> {
        if !address.ip().is_loopback() && !security.needs_key() {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("{address} can be reached from other machines: that needs a key"),
            ));
        }
        let listener = StdListener::bind(address)?;
        socket2::SockRef::from(&listener).listen(BACKLOG)?;
        listener.set_nonblocking(true)?;
        let (sender, stop) = watch::channel(None);
        Ok(Server {
            listener,
            app: App {
                models: Arc::new(models.into()),
                security,
                limits,
                rules: Rules::default(),
                kept: Arc::default(),
                ledger: Ledger::new(Box::new(|_| {})),
                room: BodyRoom::new(limits.bodies),
            },
            idle: None,
            stop,
            stopper: Stopper(Arc::new(sender)),
        })
    }

    /// Reads requests by these rules, and reports what they have that nq does not know.
    pub fn reading(mut self, rules: Rules, report: Report) -> Self {
        self.app.rules = rules;
        self.app.ledger = Ledger::new(report);
        self
    }

    /// Unloads models that nobody has used for so long.
    pub fn unloading(mut self, idle: Option<Duration>) -> Self {
        self.idle = idle;
        self
    }

    /// The address it listens on.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// A handle for stopping it.
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Serves until it is stopped, and then until all answers have been sent, or ended with an error.
    ///
    /// # Errors
    /// Errors of the system, if it provides no threads or no events.
    pub fn run(self) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(16)
            .thread_name("nq-http")
            .enable_all()
            .build()?;
        let done = runtime.block_on(self.serve());
        runtime.shutdown_timeout(Duration::from_secs(1));
        done
    }

    async fn serve(mut self) -> io::Result<()> {
        let listener = TcpListener::from_std(self.listener)?;
        let app = Arc::new(self.app);
        let router = router(Arc::clone(&app));
        let room = Arc::new(Semaphore::new(app.limits.connections));
        let unloading = self
            .idle
            .map(|idle| tokio::spawn(unload(Arc::clone(&app.models), idle)));
        let sweeping = tokio::spawn(sweep(Arc::clone(&app.room)));
        let (finish, finishing) = watch::channel(false);
        let (all, mut connections) = (Arc::new(Connections::default()), JoinSet::new());
        let grace = loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                grace = stopped(&mut self.stop) => break grace,
            };
            while connections.try_join_next().is_some() {}
            let Ok((stream, peer)) = accepted else {
                // E.g. too many open files: another is closed.
                all.make_room();
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let mut permit = Arc::clone(&room).try_acquire_owned().ok();
            if permit.is_none() {
                all.make_room();
                permit = tokio::select! {
                    permit = Arc::clone(&room).acquire_owned() => permit.ok(),
                    grace = stopped(&mut self.stop) => break grace,
                };
            }
            let (silent, silence) = watch::channel(false);
            let entry = all.enter(peer.ip());
            let peer = Peer {
                address: peer.ip(),
                silence,
                working: entry.working.clone(),
            };
            let router = router.clone().layer(Extension(peer));
            let (limits, finishing, room) = (app.limits, finishing.clone(), Arc::clone(&app.room));
            connections.spawn(async move {
                // What the system does not give leaves the connection without its answer.
                let _ = connection(stream, router, limits, finishing, silent, &entry).await;
                room.connection_left();
                drop(permit);
            });
        };
        sweeping.abort();
        drop(listener);
        unloading.inspect(|task| task.abort());
        let _ = finish.send(true);
        let models = Arc::clone(&app.models);
        let _ = tokio::task::spawn_blocking(move || models.close(grace)).await;
        // Send the engine's last events to those who still listen.
        let rest = async { while connections.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(Duration::from_secs(2), rest).await;
        Ok(())
    }
}

/// Unloads models that nobody has used for `idle`, as long as it is polled.
async fn unload(models: Arc<Models>, idle: Duration) {
    let pause = (idle / 8).clamp(Duration::from_millis(10), Duration::from_secs(30));
    loop {
        tokio::time::sleep(pause).await;
        let models = Arc::clone(&models);
        let _ = tokio::task::spawn_blocking(move || models.unload_unused(idle)).await;
    }
}

/// Gives back to the system what the allocator keeps of large bodies and of connections that have gone, as long as
/// it is polled.
async fn sweep(room: Arc<BodyRoom>) {
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        if room.is_littered() {
            let _ = tokio::task::spawn_blocking(mapping::trim_heap).await;
        }
    }
}

/// Waits for the stop signal.
async fn stopped(stop: &mut watch::Receiver<Option<Duration>>) -> Duration {
    loop {
        if let Some(grace) = *stop.borrow_and_update() {
            return grace;
        }
        if stop.changed().await.is_err() {
            // Nobody can send the signal any more.
            std::future::pending::<()>().await;
        }
    }
}

async fn connection(
    stream: TcpStream,
    router: axum::Router,
    limits: HttpLimits,
    mut finishing: watch::Receiver<bool>,
    silent: watch::Sender<bool>,
    entry: &ConnectionEntry,
) -> io::Result<()> {
    // Tokens are small and must not wait for more data.
    let _ = stream.set_nodelay(true);
    let stream = stream.into_std()?;
    let same = TcpStream::from_std(stream.try_clone()?)?;
    let stream = TcpStream::from_std(stream)?;
    let service = TowerToHyperService::new(router);
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time)
        .max_headers(limits.headers)
        .max_buf_size(limits.head.max(8 << 10))
        // A client that sends no more may still wait for its answer.
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    let mut served = std::pin::pin!(served);
    let mut gone = std::pin::pin!(async {
        tokio::select! {
            () = gone(&same, &silent) => {}
            () = entry.leave.notified() => {}
        }
    });
    tokio::select! {
        // A broken connection is not the server's concern.
        _ = served.as_mut() => return Ok(()),
        _ = gone.as_mut() => return Ok(()),
        _ = finishing.wait_for(|f| *f) => {}
    }
    served.as_mut().graceful_shutdown();
    tokio::select! {
        _ = served => {}
        _ = gone => {}
    }
    Ok(())
}

/// Waits until nobody listens at the other end. A client that has closed its sending side may listen or be
/// gone: which of them, only an error after something was sent to it tells, so this says that it is silent.
async fn gone(stream: &TcpStream, silent: &watch::Sender<bool>) {
    loop {
        match stream.ready(Interest::READABLE).await {
            Err(_) => return,
            Ok(ready) if ready.is_read_closed() => break,
            // There is data for the connection; the next event is the one to wait for.
            Ok(_) => {
                let wait = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
                let _ = stream.try_io(Interest::READABLE, wait);
            }
        }
    }
    while matches!(stream.take_error(), Ok(None)) {
        silent.send_replace(true);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
