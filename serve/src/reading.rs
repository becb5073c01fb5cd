//! Texts that are embedded or reranked: a model reads them and does not continue them. They go through the
//! engine's queue like all other requests, several at a time.

use crate::engine::{Client, Event, Finish, Refused, Request};
use crate::error::ApiError;
use crate::model::ServedModel;
use nq_runtime::Row;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Texts of one request that are in the engine's queue at once, which leaves room for other requests.
const AT_ONCE: usize = 16;
/// How long to wait before a full queue is asked again.
const RETRY: Duration = Duration::from_millis(50);

/// The row of each of `texts` (token ids), in their order. Dropping the future cancels them.
///
/// # Errors
/// If the engine refuses a request or a text fails.
pub async fn read(
    model: &Arc<ServedModel>,
    row: &Row,
    texts: Vec<Vec<u32>>,
    client: Client,
    deadline: Option<Instant>,
) -> Result<Vec<Vec<f32>>, ApiError> {
    let mut rows: Vec<Vec<f32>> = vec![Vec::new(); texts.len()];
    let mut first = 0;
    let mut texts = texts.into_iter().peekable();
    while texts.peek().is_some() {
        let block: Vec<Vec<u32>> = texts.by_ref().take(AT_ONCE).collect();
        let mut answers = loop {
            let requests = block.iter().map(|tokens| Request {
                row: Some(row.clone()),
                client,
                deadline,
                adapters: model.adapters().to_vec(),
                ..Request::new(tokens.clone(), 1)
            });
            match model.engine().submit(requests.collect()) {
                Err(Refused::QueueFull { .. }) if first > 0 => tokio::time::sleep(RETRY).await,
                answers => break answers?,
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return Err(crate::engine::Failure::Timeout.into());
            }
        };
        while let Some((index, event)) = answers.next().await {
            match event {
                Event::Row(row) => rows[first + index] = row,
                Event::Finished(Finish::Failed(failure)) => return Err(failure.into()),
                _ => {}
            }
        }
        first += block.len();
    }
    Ok(rows)
}
