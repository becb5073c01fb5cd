//! Connections: their number, time limits and shutdown.

use super::routes::{Peer, router};
use super::{App, Security};
use crate::models::Models;
use axum::Extension;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Limits on a request or connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most bytes of a request's body.
    pub body: usize,
    /// Longest time for receiving a body.
    pub body_time: Duration,
    /// Longest time for receiving a request's head.
    pub head_time: Duration,
    /// Most headers of a request.
    pub headers: usize,
    /// Most bytes of a request's head.
    pub head: usize,
    /// Most connections at once; others wait to be accepted.
    pub connections: usize,
    /// Longest time of a request; `None`: unlimited.
    pub request_time: Option<Duration>,
    /// A silent stream sends a sign of life at this interval.
    pub keep_alive: Duration,
    /// A stream whose reader accepts nothing for this long is cancelled.
    pub stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            body: 8 << 20,
            body_time: Duration::from_secs(60),
            head_time: Duration::from_secs(15),
            headers: 100,
            head: 64 << 10,
            connections: 512,
            request_time: Some(Duration::from_secs(3600)),
            keep_alive: Duration::from_secs(10),
            stall: Duration::from_secs(60),
        }
    }
}

/// A listening server.
pub struct Server {
    listener: StdListener,
    app: Arc<App>,
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
        limits: Limits,
    ) -> io::Result<Self> {
        if !address.ip().is_loopback() && !security.needs_key() {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("{address} can be reached from other machines: that needs a key"),
            ));
        }
        let listener = StdListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let (sender, stop) = watch::channel(None);
        Ok(Server {
            listener,
            app: Arc::new(App {
                models: Arc::new(models.into()),
                security,
                limits,
            }),
            stop,
            stopper: Stopper(Arc::new(sender)),
        })
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
        let router = router(Arc::clone(&self.app));
        let room = Arc::new(Semaphore::new(self.app.limits.connections));
        let (finish, finishing) = watch::channel(false);
        let mut connections = JoinSet::new();
        let grace = loop {
            let permit = tokio::select! {
                permit = Arc::clone(&room).acquire_owned() => permit,
                grace = stopped(&mut self.stop) => break grace,
            };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                grace = stopped(&mut self.stop) => break grace,
            };
            while connections.try_join_next().is_some() {}
            let Ok((stream, peer)) = accepted else {
                // E.g. too many open files: others will be closed.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let router = router.clone().layer(Extension(Peer(peer.ip())));
            let (limits, finishing) = (self.app.limits, finishing.clone());
            connections.spawn(async move {
                connection(stream, router, limits, finishing).await;
                drop(permit);
            });
        };
        drop(listener);
        let _ = finish.send(true);
        let models = Arc::clone(&self.app.models);
        let _ = tokio::task::spawn_blocking(move || models.close(grace)).await;
        // Send the engine's last events to those who still listen.
        let rest = async { while connections.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(Duration::from_secs(2), rest).await;
        Ok(())
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
    limits: Limits,
    mut finishing: watch::Receiver<bool>,
) {
    // Tokens are small and must not wait for more data.
    let _ = stream.set_nodelay(true);
    let service = TowerToHyperService::new(router);
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time)
        .max_headers(limits.headers)
        .max_buf_size(limits.head.max(8 << 10))
        .serve_connection(TokioIo::new(stream), service);
    let mut served = std::pin::pin!(served);
    tokio::select! {
        // A broken connection is not the server's concern.
        _ = served.as_mut() => return,
        _ = finishing.wait_for(|f| *f) => {}
    }
    served.as_mut().graceful_shutdown();
    let _ = served.await;
}
