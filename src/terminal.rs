//! What the terminal gets: progress bars, notes and the handling of closed pipes.

use indicatif::{ProgressBar, ProgressStyle};
use nq_formats::{Progress, Unit};
use std::collections::HashSet;
use std::io;
use std::sync::Mutex;
use std::time::Duration;

/// Draws stages on stderr; each note is printed once.
#[derive(Default)]
pub struct Terminal {
    bar: Mutex<Option<ProgressBar>>,
    said: Mutex<HashSet<String>>,
}

impl Terminal {
    /// A fresh terminal.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Progress for Terminal {
    fn begin(&self, stage: &str, total: u64, unit: Unit) {
        let counts = match unit {
            Unit::Bytes => "{bytes}/{total_bytes} {bytes_per_sec}",
            Unit::Tokens => "{human_pos}/{human_len} tokens",
            Unit::Items => "{human_pos}/{human_len}",
        };
        let template = format!("{{msg:28}} {{bar:24}} {counts}  {{elapsed}} (ETA {{eta}})");
        let style = ProgressStyle::with_template(&template)
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::new(total)
            .with_style(style)
            .with_message(stage.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        *self.bar.lock().unwrap_or_else(|e| e.into_inner()) = Some(bar);
    }

    fn advance(&self, n: u64) {
        if let Some(bar) = &*self.bar.lock().unwrap_or_else(|e| e.into_inner()) {
            bar.inc(n);
        }
    }

    fn end(&self) {
        if let Some(bar) = self.bar.lock().unwrap_or_else(|e| e.into_inner()).take() {
            bar.finish_and_clear();
        }
    }

    fn note(&self, message: &str) {
        if !self
            .said
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .insert(message.to_owned())
        {
            return;
        }
        let print = || eprintln!("nq: {message}");
        match &*self.bar.lock().unwrap_or_else(|e| e.into_inner()) {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }
}

/// True if `error` comes of the reader of our output having gone away.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|e| e.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}
