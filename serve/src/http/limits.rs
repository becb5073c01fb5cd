//! Limits on requests and connections.

use std::time::Duration;

/// Limits on a request or connection.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Most bytes of a request's body.
    pub body: usize,
    /// Longest time for receiving a body.
    pub body_time: Duration,
    /// Longest time without a further byte of it.
    pub body_pause: Duration,
    /// Most bytes of large bodies at once, of which one client gets half; those that do not fit wait.
    pub bodies: usize,
    /// Longest time for receiving a request's head.
    pub head_time: Duration,
    /// Most headers of a request.
    pub headers: usize,
    /// Most bytes of a request's head.
    pub head: usize,
    /// Most connections at once; for others, those go that wait for their client.
    pub connections: usize,
    /// Longest time of a request; `None`: unlimited.
    pub request_time: Option<Duration>,
    /// A silent stream sends a sign of life at this interval.
    pub keep_alive: Duration,
    /// A stream whose reader accepts nothing for this long is cancelled.
    pub stall: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        HttpLimits {
            // Agents send all images of a conversation again with each turn.
            body: 32 << 20,
            body_time: Duration::from_secs(60),
            body_pause: Duration::from_secs(10),
            bodies: 64 << 20,
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
