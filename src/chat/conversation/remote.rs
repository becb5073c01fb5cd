//! Answers from a server that speaks OpenAI's chat protocol.

use super::events::Events;
use super::{Answerer, ChatEvent, ChatSettings, ChatState, End, OnEvent, Turn};
use anyhow::{Context, bail};
use nq_runtime::thinking::Part;
use nq_runtime::{Message, SamplingParams, Stats, StopReason};
use serde_json::{Map, Value, json};
use std::io::BufReader;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// Most bytes of an answer that comes whole.
const MOST_WHOLE: u64 = 16 << 20;
/// How often to check for an interrupt.
const LOOK: Duration = Duration::from_millis(50);
/// How long to wait for the next part of an answer: a long prompt takes its time. What keeps a connection open is
/// no part.
const PATIENCE: Duration = Duration::from_secs(30 * 60);

/// A model behind a server.
pub struct Remote {
    agent: ureq::Agent,
    base: String,
    key: Option<String>,
    model: String,
    context: usize,
    /// The server's default sampling settings.
    sampling: SamplingParams,
    used: usize,
    patience: Duration,
}

/// The data of an event, or why there is none.
type Data = Result<String, String>;

impl Remote {
    /// Connects to the model `model` of the server at `url` (`http://127.0.0.1:8080`), or to its
    /// first one.
    ///
    /// # Errors
    /// A server that does not answer, refuses the key or has no such model.
    pub fn connect(url: &str, model: Option<&str>, key: Option<String>) -> anyhow::Result<Self> {
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        if !base.starts_with("http://") && !base.starts_with("https://") {
            bail!("--server: expected an address such as http://127.0.0.1:8080, found {url}");
        }
        let mut config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(10)));
        if is_here(&base) {
            // A proxy does not reach this machine.
            config = config.proxy(None);
        }
        let config = config.build();
        let mut remote = Remote {
            agent: config.into(),
            base,
            key,
            model: String::new(),
            context: 0,
            sampling: SamplingParams::default(),
            patience: PATIENCE,
            used: 0,
        };
        let request = remote.agent.get(format!("{}/v1/models", remote.base));
        let response = remote
            .with_key(request)
            .call()
            .with_context(|| url.to_owned())?;
        let list: Value = serde_json::from_str(&text(checked(response)?)?)?;
        let cards = list["data"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        let named = |card: &&Value| model.is_none_or(|m| card["id"] == m);
        let Some(card) = cards.iter().find(named) else {
            let names: Vec<&str> = cards.iter().filter_map(|c| c["id"].as_str()).collect();
            bail!(
                "{url} serves {}, not {}",
                names.join(", "),
                model.unwrap_or("a model")
            );
        };
        remote.model = card["id"].as_str().unwrap_or_default().to_owned();
        remote.context = card["max_model_len"].as_u64().unwrap_or(0) as usize;
        remote.sampling = sampling(&card["default_sampling"]);
        Ok(remote)
    }

    /// The name of the model on the server.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The server's default sampling settings.
    pub fn sampling(&self) -> SamplingParams {
        self.sampling
    }

    /// Takes a seed that nobody has chosen: the server chooses one itself, because some know seeds of 32 bits
    /// alone.
    pub(crate) fn leave_seed(&mut self, seed: u64) {
        self.sampling.seed = seed;
    }

    fn with_key<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match &self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        }
    }

    /// The body of the request. It contains only settings that differ from the server's defaults, so that
    /// servers that do not know all settings work too.
    fn body(&self, messages: &[Message], settings: &ChatSettings) -> Value {
        let mut body = json!({
            "model": self.model,
            "messages": messages,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let (asked, own) = (&settings.sampling, &self.sampling);
        if asked.seed != own.seed {
            body["seed"] = json!(asked.seed as i64);
        }
        for ((name, asked), (_, own)) in asked.values().zip(own.values()) {
            if asked != own {
                body[name] = asked;
            }
        }
        if let Some(most) = settings.max_tokens {
            body["max_tokens"] = most.into();
        }
        if !settings.stop.is_empty() {
            body["stop"] = json!(settings.stop);
        }
        if let Some(thinking) = settings.thinking {
            body["chat_template_kwargs"] = json!({"enable_thinking": thinking});
        }
        if let Some(tokens) = settings.thinking_budget {
            body["thinking_budget"] = tokens.into();
        }
        body
    }

    /// Sends the request and reads the events in a separate thread: interrupts need not wait for one.
    fn ask(&self, body: &Value) -> anyhow::Result<Receiver<Data>> {
        let request = self
            .agent
            .post(format!("{}/v1/chat/completions", self.base));
        let request = self
            .with_key(request)
            .header("content-type", "application/json");
        let response = request
            .send(body.to_string())
            .with_context(|| self.base.clone())?;
        let response = checked(response)?;
        let (sender, events) = sync_channel(64);
        let kind = response.headers().get("content-type");
        let kind = kind.and_then(|k| k.to_str().ok()).unwrap_or_default();
        if kind.starts_with("application/json") {
            // A server that does not stream sends the whole answer, as one event does.
            std::thread::spawn(move || sender.send(text(response).map_err(|e| e.to_string())));
            return Ok(events);
        }
        let mut reader = Events::new(BufReader::new(response.into_body().into_reader()));
        std::thread::spawn(move || {
            loop {
                let data = match reader.next() {
                    Ok(None) => return,
                    Ok(Some(data)) => Ok(data),
                    Err(e) => Err(e.to_string()),
                };
                let over = data.is_err();
                if sender.send(data).is_err() || over {
                    return;
                }
            }
        });
        Ok(events)
    }
}

/// True for an address of this machine.
fn is_here(base: &str) -> bool {
    let uri: Option<ureq::http::Uri> = base.parse().ok();
    let host = uri.as_ref().and_then(|u| u.host()).unwrap_or_default();
    let address = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|a| a.is_loopback())
}

/// What an error says, in the forms that servers have for one.
fn said(answer: &Value) -> Option<String> {
    let error = &answer["error"];
    let text = |v: &Value| v.as_str().map(str::to_owned);
    let plain = text(&error["message"]).or(text(error));
    let whole = (answer["object"] == "error" || answer["type"] == "error")
        .then(|| text(&answer["message"]));
    let detail = match &answer["detail"] {
        Value::Null => None,
        Value::String(detail) => Some(detail.clone()),
        detail => Some(detail[0]["msg"].as_str().map_or(detail.to_string(), |msg| {
            let place = detail[0]["loc"].as_array().into_iter().flatten();
            let place: Vec<String> = place
                .map(|p| text(p).unwrap_or_else(|| p.to_string()))
                .collect();
            format!("{}: {msg}", place.join("."))
        })),
    };
    let other = (!error.is_null()).then(|| error.to_string());
    plain.or(whole.flatten()).or(detail).or(other)
}

/// Checks that a response has no error status.
///
/// # Errors
/// The error message that the server sent.
fn checked(
    response: ureq::http::Response<ureq::Body>,
) -> anyhow::Result<ureq::http::Response<ureq::Body>> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let answer: Value = serde_json::from_str(&text(response)?).unwrap_or_default();
    let said = said(&answer).unwrap_or_else(|| "no reason is given".to_owned());
    bail!("the server says {}: {said}", status.as_u16())
}

fn text(response: ureq::http::Response<ureq::Body>) -> anyhow::Result<String> {
    let body = response.into_body().into_with_config().limit(MOST_WHOLE);
    Ok(body.read_to_string()?)
}

/// Reads a server's sampling defaults; if it gives none, OpenAI's.
fn sampling(said: &Value) -> SamplingParams {
    let mut sampling = SamplingParams::default();
    for name in SamplingParams::NAMES {
        sampling.read(name, &said[name].to_string());
    }
    sampling
}

impl Answerer for Remote {
    fn answer(
        &mut self,
        chat: &mut ChatState,
        interrupt: &AtomicBool,
        on_event: &mut OnEvent<'_>,
    ) -> anyhow::Result<Turn> {
        let begun = Instant::now();
        let events = self.ask(&self.body(&chat.messages(), &chat.settings))?;
        let (mut thinking, mut answer) = (String::new(), String::new());
        let mut stats = Stats::default();
        let mut end = End::Generated(StopReason::Eos(0));
        let mut finished = false;
        let mut heard = Instant::now();
        loop {
            if heard.elapsed() > self.patience {
                let seconds = self.patience.as_secs();
                bail!("the server has sent no part of the answer for {seconds} s");
            }
            if interrupt.load(Ordering::Relaxed) {
                end = End::Generated(StopReason::Interrupted);
                break;
            }
            let data = match events.recv_timeout(LOOK) {
                Ok(data) => data.map_err(anyhow::Error::msg)?,
                Err(RecvTimeoutError::Timeout) => continue,
                // Some servers end with the reason why the answer ends.
                Err(RecvTimeoutError::Disconnected) if finished => break,
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("the server closed the connection within an answer")
                }
            };
            if data.trim() == "[DONE]" {
                break;
            }
            let event: Value = serde_json::from_str(&data).context("the server's event")?;
            if let Some(said) = said(&event) {
                bail!("the server says: {said}");
            }
            let choice = &event["choices"][0];
            finished |= choice["finish_reason"].is_string();
            let delta = match &choice["delta"] {
                Value::Null => &choice["message"],
                delta => delta,
            };
            let thought = delta["reasoning_content"]
                .as_str()
                .or(delta["reasoning"].as_str());
            for (part, text, all) in [
                (Part::Thinking, thought, &mut thinking),
                (
                    Part::Answer,
                    delta["content"].as_str().or(choice["text"].as_str()),
                    &mut answer,
                ),
            ] {
                let Some(text) = text.filter(|t| !t.is_empty()) else {
                    continue;
                };
                if stats.first_token.is_zero() {
                    stats.first_token = begun.elapsed();
                }
                all.push_str(text);
                stats.tokens += 1;
                on_event(ChatEvent::Piece(part, text))?;
                heard = Instant::now();
            }
            if choice["finish_reason"] == "length" {
                end = End::Generated(StopReason::MaxTokens);
            }
            // OpenAI's protocol does not distinguish a stop text from the model's own end; nq and vLLM
            // do.
            if choice["stop_reason"].is_string() {
                end = End::Text;
            }
            let count = |value: &Value| value.as_u64().map(|n| n as usize);
            let usage = &event["usage"];
            if let Some(tokens) = count(&usage["completion_tokens"]) {
                stats.tokens = tokens;
                stats.prompt_tokens = count(&usage["prompt_tokens"]).unwrap_or(0);
                let cached = &usage["prompt_tokens_details"]["cached_tokens"];
                stats.reused_tokens = count(cached).unwrap_or(0);
            }
        }
        stats.decode = begun.elapsed().saturating_sub(stats.first_token);
        self.used = stats.prompt_tokens + stats.tokens;
        let mut message = Message::new("assistant", &answer);
        if !thinking.is_empty() {
            let extra = Map::from_iter([("reasoning_content".into(), thinking.clone().into())]);
            message.extra = extra;
        }
        chat.messages.push(message);
        Ok(Turn {
            thinking,
            answer,
            end,
            stats,
        })
    }

    fn context(&self) -> (usize, usize) {
        (self.used, self.context)
    }

    /// Only the server knows whether thinking can be switched.
    fn refuses(&self, setting: &str) -> Option<&'static str> {
        (setting == "on_overflow").then_some("a server keeps all that it is sent, or refuses it")
    }
}

#[cfg(test)]
mod tests;
