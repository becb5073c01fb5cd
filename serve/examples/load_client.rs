//! Times a server that speaks OpenAI's `/v1/completions` as clients see it: each client
//! streams one request after another, with random, different prompts.
//!
//! ```text
//! cargo run --release -p nq-serve --example load_client -- http://127.0.0.1:8080 \
//!     --in 512 --out 128 --clients 1,16,64 --vocab 151936
//! ```
//!
//! Prompts are token ids, so that servers with other tokenizers are given the same amount of work. A
//! row a number of clients: tokens drawn per second of all, and milliseconds (median, 99th
//! percentile) to the first text, between texts, and between the tokens of an answer on average
//! (guidellm's inter-token latency). `--long N` sends one prompt of N tokens once the clients have
//! begun; its first text is told apart. With `--shared N` all prompts begin with the same N tokens,
//! of which the server is told in advance, and go on with `--in` of their own.

#![allow(clippy::print_stdout, reason = "it prints what it measured")]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

type Error = Box<dyn std::error::Error + Send + Sync>;

struct Options {
    url: String,
    model: String,
    prompt: usize,
    out: usize,
    clients: Vec<usize>,
    /// Number of requests per client.
    each: usize,
    vocab: usize,
    long: Option<usize>,
    /// The common beginning of all prompts.
    shared: Vec<usize>,
}

impl Options {
    fn parse() -> Result<Self, Error> {
        let mut args = std::env::args().skip(1);
        let mut options = Options {
            url: args.next().ok_or("expected the server's address")?,
            model: String::new(),
            prompt: 512,
            out: 128,
            clients: vec![1, 4, 16],
            each: 3,
            vocab: 256,
            long: None,
            shared: Vec::new(),
        };
        let mut shared = 0;
        while let Some(flag) = args.next() {
            let value = args.next().ok_or(format!("{flag}: expected a value"))?;
            match flag.as_str() {
                "--in" => options.prompt = value.parse()?,
                "--out" => options.out = value.parse()?,
                "--each" => options.each = value.parse()?,
                "--vocab" => options.vocab = value.parse()?,
                "--shared" => shared = value.parse()?,
                "--long" => options.long = Some(value.parse()?),
                "--clients" => {
                    let counts = value.split(',').map(str::parse);
                    options.clients = counts.collect::<Result<_, _>>()?;
                }
                _ => return Err(format!("{flag}: no such flag").into()),
            }
        }
        options.shared = random_tokens(shared, options.vocab);
        Ok(options)
    }
}

/// Measurements of one answer.
struct Answer {
    tokens: usize,
    prompt_tokens: usize,
    first: Duration,
    gaps: Vec<Duration>,
    /// From the first text to the last.
    writing: Duration,
}

impl Answer {
    /// The mean time between two tokens.
    fn per_token(&self) -> Duration {
        self.writing / self.tokens.saturating_sub(1).max(1) as u32
    }
}

/// Random tokens that differ in every run, so that no server has seen the prompt before.
fn random_tokens(n: usize, vocab: usize) -> Vec<usize> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let from = NEXT.fetch_add(1, Ordering::Relaxed) as u64;
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed();
    let seed = now.map_or(0, |t| t.as_nanos() as u64) ^ (from << 48);
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    };
    (0..n).map(|_| next() % vocab).collect()
}

/// The name of the first model that the server lists.
fn model(agent: &ureq::Agent, url: &str) -> Result<String, Error> {
    let mut response = agent.get(format!("{url}/v1/models")).call()?;
    let models: Value = serde_json::from_str(&response.body_mut().read_to_string()?)?;
    let id = models["data"][0]["id"].as_str();
    Ok(id.ok_or("/v1/models names no model")?.to_owned())
}

fn ask(agent: &ureq::Agent, options: &Options, n: usize) -> Result<Answer, Error> {
    let prompt = [&options.shared[..], &random_tokens(n, options.vocab)].concat();
    let body = json!({
        "model": options.model, "prompt": prompt, "max_tokens": options.out,
        "stream": true, "stream_options": {"include_usage": true}, "temperature": 0.8, "seed": 1,
        "ignore_eos": true,
    });
    let begun = Instant::now();
    let response = agent
        .post(format!("{}/v1/completions", options.url))
        .header("Content-Type", "application/json")
        .send(body.to_string())?;
    let mut answer = Answer {
        tokens: 0,
        prompt_tokens: 0,
        first: Duration::ZERO,
        gaps: Vec::with_capacity(options.out),
        writing: Duration::ZERO,
    };
    let mut last: Option<Instant> = None;
    for line in BufReader::new(response.into_body().into_reader()).lines() {
        let line = line?;
        let Some(data) = line.strip_prefix("data: ").filter(|d| *d != "[DONE]") else {
            continue;
        };
        let now = Instant::now();
        let event: Value = serde_json::from_str(data)?;
        if let Some(error) = event.get("error") {
            return Err(error.to_string().into());
        }
        if let Some(usage) = event.get("usage").filter(|u| !u.is_null()) {
            let count = |name: &str| usage[name].as_u64().unwrap_or(0) as usize;
            answer.tokens = count("completion_tokens");
            answer.prompt_tokens = count("prompt_tokens");
        }
        let text = event["choices"][0]["text"].as_str().unwrap_or("");
        if !text.is_empty() {
            match last.replace(now) {
                None => answer.first = now - begun,
                Some(before) => answer.gaps.push(now - before),
            }
        }
    }
    answer.writing = answer.gaps.iter().sum();
    Ok(answer)
}

/// The value below which `share` of all lie, in milliseconds.
fn percentile(values: &mut [Duration], share: f64) -> f64 {
    values.sort();
    let at = ((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1));
    values.get(at).map_or(0.0, |d| d.as_secs_f64() * 1e3)
}

fn run(agent: &ureq::Agent, options: &Options, clients: usize) -> Result<(), Error> {
    let answers = Mutex::new(Vec::new());
    let begun = Instant::now();
    let long = std::thread::scope(|scope| -> Result<Option<Answer>, Error> {
        let mut threads = Vec::new();
        for _ in 0..clients {
            threads.push(scope.spawn(|| -> Result<(), Error> {
                for _ in 0..options.each {
                    let answer = ask(agent, options, options.prompt)?;
                    answers
                        .lock()
                        .map_err(|_| "a client panicked")?
                        .push(answer);
                }
                Ok(())
            }));
        }
        let long = options.long.map(|n| {
            std::thread::sleep(Duration::from_millis(500));
            ask(agent, options, n)
        });
        for thread in threads {
            thread.join().map_err(|_| "a client panicked")??;
        }
        long.transpose()
    })?;
    let took = begun.elapsed().as_secs_f64();
    let answers = answers.into_inner()?;
    let tokens: usize = answers.iter().map(|a| a.tokens).sum();
    let prompts: usize = answers.iter().map(|a| a.prompt_tokens).sum();
    let mut firsts: Vec<Duration> = answers.iter().map(|a| a.first).collect();
    let mut gaps: Vec<Duration> = answers.iter().flat_map(|a| a.gaps.clone()).collect();
    let mut per_token: Vec<Duration> = answers.iter().map(Answer::per_token).collect();
    println!(
        "{},{},{clients},{:.1},{:.1},{:.1},{:.2},{:.2},{:.2},{:.2},{}",
        prompts / answers.len().max(1),
        tokens / answers.len().max(1),
        tokens as f64 / took,
        percentile(&mut firsts, 0.5),
        percentile(&mut firsts, 0.99),
        percentile(&mut gaps, 0.5),
        percentile(&mut gaps, 0.99),
        percentile(&mut per_token, 0.5),
        percentile(&mut per_token, 0.99),
        long.map_or(String::new(), |l| format!(
            "{:.1}",
            l.first.as_secs_f64() * 1e3
        )),
    );
    Ok(())
}

fn main() -> Result<(), Error> {
    let mut options = Options::parse()?;
    // A connection for each request: servers close idle ones, and a request may meet one that closes.
    let config = ureq::Agent::config_builder();
    let agent = config.max_idle_connections(0).build().new_agent();
    options.model = model(&agent, &options.url)?;
    if !options.shared.is_empty() {
        ask(&agent, &options, 1)?;
    }
    println!(
        "in,out,clients,tok_s,first_ms_p50,first_ms_p99,gap_ms_p50,gap_ms_p99,token_ms_p50,\
         token_ms_p99,long_first_ms"
    );
    for &clients in &options.clients {
        run(&agent, &options, clients)?;
    }
    Ok(())
}
