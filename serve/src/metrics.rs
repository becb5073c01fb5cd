//! The metrics at `/metrics`, in Prometheus' text format. Names are those of vLLM with `nq_` in front.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry, Unit};

/// A label with a reason why a request ended or was refused.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Reason {
    /// One of a few words.
    pub reason: &'static str,
}

/// Counters, gauges and histograms of one engine.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Number of requests with a slot.
    pub running: Gauge,
    /// Number of requests in the queue.
    pub waiting: Gauge,
    /// Total pages of keys and values.
    pub pages: Gauge,
    /// Pages that no sequence uses.
    pub pages_free: Gauge,
    /// Total places for snapshots of states.
    pub snapshots: Gauge,
    /// Places without a snapshot.
    pub snapshots_free: Gauge,
    /// Tokens of sequences kept for later prompts.
    pub kept_tokens: Gauge,
    /// Prompt tokens.
    pub prompt_tokens: Counter,
    /// Prompt tokens that were cached.
    pub cached_tokens: Counter,
    /// Prompt tokens that were read back from disk.
    pub restored_tokens: Counter,
    /// Tokens drawn.
    pub generated_tokens: Counter,
    /// Tokens drafted and checked.
    pub drafted_tokens: Counter,
    /// Drafted tokens that were accepted.
    pub accepted_tokens: Counter,
    /// Requests that were preempted by others and started again.
    pub preemptions: Counter,
    /// Requests that ended, by reason.
    pub finished: Family<Reason, Counter>,
    /// Requests that were refused before they began, by reason.
    pub refused: Family<Reason, Counter>,
    /// Seconds in the queue.
    pub queue_time: Histogram,
    /// Seconds from arrival to the first token.
    pub first_token: Histogram,
    /// Seconds between two tokens of a request.
    pub inter_token: Histogram,
    /// Seconds from arrival to the end.
    pub request_time: Histogram,
}

/// A metric that is registered under that name.
fn registered<M: Metric + Clone + Default>(r: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    r.register(name, help, metric.clone());
    metric
}

/// A histogram of seconds that is registered under that name.
fn seconds(r: &mut Registry, name: &str, help: &str) -> Histogram {
    let histogram = Histogram::new(exponential_buckets(0.000_5, 2.0, 20));
    r.register_with_unit(name, help, Unit::Seconds, histogram.clone());
    histogram
}

impl Default for Metrics {
    #[rustfmt::skip]
    fn default() -> Self {
        let mut r = Registry::with_prefix("nq");
        Metrics {
            running: registered(&mut r, "num_requests_running", "Requests that have a slot"),
            waiting: registered(&mut r, "num_requests_waiting", "Requests in the queue"),
            pages: registered(&mut r, "kv_pages", "Pages of keys and values"),
            pages_free: registered(&mut r, "kv_pages_free", "Pages in no sequence"),
            snapshots: registered(&mut r, "state_snapshots", "Places for states of sequences at earlier lengths"),
            snapshots_free: registered(&mut r, "state_snapshots_free", "Such places without a state"),
            kept_tokens: registered(&mut r, "prefix_cache_tokens", "Tokens of ended sequences that are kept"),
            prompt_tokens: registered(&mut r, "prompt_tokens", "Tokens of prompts"),
            cached_tokens: registered(&mut r, "prefix_cache_hit_tokens", "Prompt tokens not computed again"),
            restored_tokens: registered(&mut r, "prefix_cache_disk_tokens", "Prompt tokens read back from disk"),
            generated_tokens: registered(&mut r, "generation_tokens", "Tokens drawn"),
            drafted_tokens: registered(&mut r, "spec_decode_num_draft_tokens", "Tokens drafted and checked"),
            accepted_tokens: registered(&mut r, "spec_decode_num_accepted_tokens", "Drafted tokens that were right"),
            preemptions: registered(&mut r, "num_preemptions", "Requests that began again"),
            finished: registered(&mut r, "requests_finished", "Requests that ended, by reason"),
            refused: registered(&mut r, "requests_refused", "Requests refused, by reason"),
            queue_time: seconds(&mut r, "request_queue_time", "Time in the queue"),
            first_token: seconds(&mut r, "time_to_first_token", "From arrival to the first token"),
            inter_token: seconds(&mut r, "inter_token_latency", "Between two tokens of a request"),
            request_time: seconds(&mut r, "request_latency", "From arrival to the end"),
            registry: r,
        }
    }
}

impl Metrics {
    /// Counts a refused request.
    pub(crate) fn refuse(&self, reason: &'static str) {
        self.refused.get_or_create(&Reason { reason }).inc();
    }

    /// The metrics as text (OpenMetrics 1.0), of this engine alone: see [`together`].
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// Combines the texts of several engines; each sample gets a label with its model's name. A family of
/// metrics is described once, and its samples are grouped.
pub(crate) fn together(texts: &[(String, String)]) -> String {
    // Each family's description and samples, in the order of the first text.
    let mut families: Vec<(String, String)> = Vec::new();
    for (nth, (name, text)) in texts.iter().enumerate() {
        let label = format!("model_name={name:?}");
        let mut at = 0;
        for line in text.lines().filter(|l| *l != "# EOF") {
            let Some(described) = line.strip_prefix("# ") else {
                if let Some(family) = families.get_mut(at - 1) {
                    family.1 += &labelled(line, &label);
                }
                continue;
            };
            at += usize::from(described.starts_with("HELP "));
            if families.len() < at {
                families.push(Default::default());
            }
            if nth == 0 {
                families[at - 1].0 += &format!("{line}\n");
            }
        }
    }
    let all = families
        .iter()
        .flat_map(|(head, samples)| [head.as_str(), samples]);
    all.chain(["# EOF\n"]).collect()
}

/// A sample with an additional label.
fn labelled(line: &str, label: &str) -> String {
    match line.split_once('{') {
        Some((name, rest)) => format!("{name}{{{label},{rest}\n"),
        None => match line.split_once(' ') {
            Some((name, value)) => format!("{name}{{{label}}} {value}\n"),
            None => String::new(),
        },
    }
}
