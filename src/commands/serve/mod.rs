//! `nq serve`: models for many clients, over HTTP.

mod loading;

use crate::draft::{DraftFrom, DraftWeights};
use crate::flags::{Global, parse_kv, parse_load_bits, parse_size};
use crate::model::{self, Stored, ToRun};
use crate::terminal::{Terminal, leave_interrupted, on_signals, print_line, shell_word};
use anyhow::{Context, bail};
use clap::Args;
use loading::{Loadable, Loaded, LoadingSettings};
use nq_formats::{Progress, Task, mapping};
use nq_load::device::Device;
use nq_runtime::KvType;
use nq_serve::protocol::reading::Rules;
use nq_serve::{HttpLimits, Models, Security, Server};
use serde_json::json;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Flags of `nq serve`.
#[derive(Args, Debug)]
pub(crate) struct ServeArgs {
    /// demo, a folder, a hub id or a name from `nq list` [default: the
    /// quantized Qwen3-0.6B, unless --model or --models-dir names others]
    pub model: Option<OsString>,
    /// Another model, loaded on its first request, and its name for clients
    #[arg(long = "model", value_name = "NAME=MODEL", value_parser = parse_named)]
    pub models: Vec<(String, String)>,
    /// Serve every model in this folder, each loaded on its first request. Its name is its path there, without .gguf
    #[arg(long, value_name = "FOLDER")]
    pub models_dir: Option<PathBuf>,
    /// Another name of a model: clients may ask for NAME and get MODEL, a name that is served
    #[arg(long, value_name = "NAME=MODEL", value_parser = parse_named)]
    pub alias: Vec<(String, String)>,
    /// Name of a model that stays in memory once it is loaded: neither --idle nor another model unloads it
    #[arg(long, value_name = "NAME")]
    pub keep_loaded: Vec<String>,
    /// Address to listen on; one reachable from other machines requires a key
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8080)]
    pub port: u16,
    /// File with the keys that clients may use, one per line. NQ_API_KEY holds another
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Another name of this machine, besides localhost and its addresses
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Origin, a scheme and a host, whose pages may use the server; http://localhost:* and
    /// https://*.example.org stand for many
    #[arg(long, value_name = "ORIGIN")]
    pub allow_origin: Vec<String>,
    /// Name of MODEL for clients [default: its own]
    #[arg(long, value_name = "NAME")]
    pub served_name: Option<String>,
    /// Most requests in progress at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub parallel: u16,
    /// Most requests that wait; further ones are refused with 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..))]
    pub queue: u16,
    /// Most milliseconds that prompts may hold up answers in progress in each step: with less, answers flow more
    /// evenly and prompts take longer [default: two steps' time, or 20 for a prompt that can be computed whole]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u16).range(1..))]
    pub max_pause: Option<u16>,
    /// Context length of a sequence in tokens [default: the model's, as far as memory allows]
    #[arg(long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Memory for keys and values of all sequences of a model. By default as much as they can fill, at most
    /// 40 % of free memory on a CPU and 90 % on a GPU, shared by all models
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub kv_memory: Option<u64>,
    /// Memory for states of sequences at earlier lengths, for a model with recurrences [default: an eighth of that for
    /// keys and values, at most four states for each of --parallel]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub state_memory: Option<u64>,
    /// Bits of keys and values: 8, 16 or 32
    #[arg(long, default_value = "16", value_parser = parse_kv)]
    pub kv: KvType,
    /// Quantize an unquantized model at load: 3, 4, 5, 6, 8 or 16 (keep it)
    #[arg(long, value_parser = parse_load_bits)]
    pub bits: Option<u32>,
    /// Speculative decoding, which speeds up answers: ngram, mtp, MODEL, eagle3:FOLDER or none. With ngram, drafts come
    /// from the text so far (prompt lookup); with mtp, from the layer that Qwen3.5 to 3.8 and Qwen3-Next have for it; with
    /// MODEL, from a smaller model with the same tokenizer as the model served; with eagle3, from an EAGLE-3 head made for
    /// it; none turns it off [default: mtp or else ngram where answers stay exactly the same, as on CPUs; else none]
    #[arg(long, value_name = "FROM")]
    pub draft: Option<DraftFrom>,
    /// Do not keep keys and values of prompts for later requests
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Folder that keeps the keys and values of prompts across restarts; they are read back if that is
    /// faster than computing them
    #[arg(long, value_name = "DIR", conflicts_with = "no_prefix_cache")]
    pub cache_dir: Option<PathBuf>,
    /// Largest size of --cache-dir; the least recently used files are removed
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "8GB", requires = "cache_dir")]
    pub cache_size: u64,
    /// Most tokens of thinking in an answer; requests may ask for fewer. 0 turns thinking off
    #[arg(long, value_name = "N")]
    pub reasoning_budget: Option<usize>,
    /// Most tokens of an image; larger images are made smaller
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub image_tokens: u64,
    /// Hosts that images may be fetched from, if requests give their http addresses: only where they resolve to
    /// public addresses, and without redirects. Otherwise requests hold their images
    #[arg(long, value_name = "HOST,...", value_delimiter = ',')]
    pub image_hosts: Vec<String>,
    /// Unload models that nobody has used for this time, such as 15m; their next requests load them again
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub idle: Option<Duration>,
    /// Refuse requests with fields that nq does not know, instead of noting them
    #[arg(long)]
    pub strict: bool,
    /// Seconds that a request may take, including its time in the queue; 0: unlimited
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    pub timeout: u64,
    /// Seconds that answers may continue after the server is told to stop
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub grace: u64,
}

/// Parses a time such as 15m, 90s or 1h30m.
fn parse_time(text: &str) -> Result<Duration, String> {
    let time: Option<jiff::SignedDuration> = text.parse().ok();
    let time = time.and_then(|t| Duration::try_from(t).ok());
    let expected = || format!("expected a time such as 90s, 15m or 2h, found {text}");
    time.filter(|t| t.as_secs() >= 1).ok_or_else(expected)
}

/// Parses NAME=MODEL.
fn parse_named(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, model)) if !name.is_empty() && !model.is_empty() => {
            Ok((name.to_owned(), model.to_owned()))
        }
        _ => Err("expected NAME=MODEL".into()),
    }
}

/// Runs `nq serve` until it is interrupted.
pub fn run(args: &ServeArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let terminal = Arc::new(Terminal::new());
    // Wrong flags are reported before the model is loaded.
    let security = security(args)?;
    let address = SocketAddr::new(args.host, args.port);
    if !args.host.is_loopback() && !security.needs_key() {
        bail!(
            "--host {}: other machines can reach it, which needs a key: --api-key-file or NQ_API_KEY",
            args.host
        );
    }
    mapping::keep_little();
    let (models, loaded) = models(args, global, &terminal)?;
    let limits = HttpLimits {
        request_time: (args.timeout > 0).then(|| Duration::from_secs(args.timeout)),
        ..HttpLimits::default()
    };
    let keyed = security.needs_key();
    let server = Server::bind(address, models, security, limits)
        .with_context(|| format!("--host {} --port {}", args.host, args.port))?;
    let rules = Rules {
        strict: args.strict,
        reasoning_budget: args.reasoning_budget,
        image_hosts: args
            .image_hosts
            .iter()
            .map(|host| host.to_ascii_lowercase())
            .collect(),
    };
    let notes = Arc::clone(&terminal);
    let server = server
        .reading(rules, Box::new(move |note| notes.note(note)))
        .unloading(args.idle);
    stop_on_signals(&server, Duration::from_secs(args.grace));
    let url = format!("http://{}", server.address()?);
    if global.json {
        announce_json(&url, &loaded, args, keyed)?
    } else {
        announce(&url, &loaded, keyed, &terminal)
    }
    server.run()?;
    Ok(ExitCode::SUCCESS)
}

/// The report about the models: their names, and the memory reserved for the loaded one.
struct Served {
    names: Vec<String>,
    /// Names of the first one's adapters.
    adapters: Vec<String>,
    /// What the first of them is for.
    task: Task,
    first: Option<Reserved>,
}

/// The memory reserved for MODEL.
struct Reserved {
    device: String,
    ctx: usize,
    kv_pages: usize,
    kv_bytes: u64,
    read_once_from: Option<usize>,
}

/// MODEL, loaded, and the models of `--model` and `--models-dir`, found; the default model, if none of them is given.
fn models(
    args: &ServeArgs,
    global: &Global,
    terminal: &Arc<Terminal>,
) -> anyhow::Result<(Models, Served)> {
    // Those without a name are merged into MODEL.
    let (named, merged): (Vec<_>, Vec<_>) =
        (global.adapters.iter().cloned()).partition(|a| a.name.is_some());
    let global = &Global {
        adapters: merged,
        ..global.clone()
    };
    let first = match &args.model {
        Some(name) => {
            let opened = model::open(Some(name), global, &**terminal);
            Some(opened.map_err(|e| or_models_in(e, Path::new(name)))?)
        }
        None if args.models.is_empty() && args.models_dir.is_none() => {
            let ToRun { model, beside } = model::open_for_chat(global, &**terminal)?;
            if !beside.is_empty() {
                bail!(
                    "--adapter: clients ask for one beside a quantized model by name: NAME=FOLDER"
                );
            }
            Some(model)
        }
        None if args.served_name.is_some() => bail!("--served-name: there is no MODEL to name"),
        None => None,
    };
    // A folder may hold any number, so that memory is planned for one of them; others are loaded beside it if they fit.
    let folder = usize::from(args.models_dir.is_some());
    let count = usize::from(first.is_some()) + args.models.len() + folder;
    if count > 1 || folder > 0 {
        let device = Device::choose(global.load_options().device)?;
        device.single("several models in one server")?;
    }
    let settings = LoadingSettings::new(args, global, count, terminal)?;
    let mut models = Models::default();
    let mut served = Served {
        names: Vec::new(),
        adapters: Vec::new(),
        task: Task::Generate,
        first: None,
    };
    let draft = match (&args.draft, &first) {
        (Some(from), None) if from.has_weights() => {
            bail!(
                "--draft: expected a MODEL to draft for; models that are loaded later use prompt lookup only"
            )
        }
        (Some(from), Some(first)) => DraftWeights::open(
            from,
            &first.checkpoint,
            args.bits,
            global.offline,
            &**terminal,
        )?,
        _ => None,
    };
    if let Some(first) = first {
        let first = Loadable::new(args.served_name.as_deref(), first, &settings, terminal)?
            .with_draft(draft)
            .with_adapters(&named)?;
        let Loaded {
            model,
            device,
            spec,
            kv_bytes,
            read_once_from,
        } = first.load(true)?;
        served.names.push(first.name().to_owned());
        served.task = first.task();
        served.first = Some(Reserved {
            device,
            ctx: spec.ctx,
            kv_pages: spec.page_count(),
            kv_bytes,
            read_once_from,
        });
        models.add_loaded(Box::new(first), model);
        for (place, adapter) in named.iter().filter_map(|a| a.name.as_ref()).enumerate() {
            let added = models.adapter(adapter, &served.names[0], place);
            added.with_context(|| format!("--adapter {adapter}"))?;
            served.adapters.push(adapter.clone());
        }
    } else if !named.is_empty() {
        bail!("--adapter: expected a MODEL that it is for; models that are loaded later have none");
    }
    for (name, path) in &args.models {
        if served.names.contains(name) {
            bail!("--model: {name} is the name of two models");
        }
        let model = model::open(Some(path.as_str()), &global.without_adapters(), &**terminal)
            .with_context(|| format!("--model {name}={path}"))?;
        let model = Loadable::new(Some(name), model, &settings, terminal)?;
        if served.names.is_empty() {
            served.task = model.task();
        }
        models.add(name, Box::new(model));
        served.names.push(name.clone());
    }
    if let Some(folder) = &args.models_dir {
        for Stored { name, path } in model::stored_in(folder).context("--models-dir")? {
            if served.names.contains(&name) {
                bail!(
                    "--models-dir {}: {name} is the name of two models",
                    folder.display()
                );
            }
            let opened = model::open(Some(&path), &global.without_adapters(), &**terminal)
                .and_then(|model| Loadable::new(Some(&name), model, &settings, terminal));
            match opened {
                Ok(model) => {
                    if served.names.is_empty() {
                        served.task = model.task();
                    }
                    models.add(&name, Box::new(model));
                    served.names.push(name);
                }
                Err(e) => terminal.note(&format!("{name} is not served: {e:#}")),
            }
        }
        if served.names.is_empty() {
            bail!(
                "--models-dir {}: expected models, found none that can be served",
                folder.display()
            );
        }
    }
    for (alias, name) in &args.alias {
        let aliased = models.alias(alias, name);
        aliased.with_context(|| format!("--alias {alias}={name}"))?;
    }
    for name in &args.keep_loaded {
        models
            .pin(name)
            .with_context(|| format!("--keep-loaded {name}"))?;
    }
    Ok((models, served))
}

/// The error of a MODEL that is none, with advice if it is a folder of models.
fn or_models_in(error: anyhow::Error, folder: &Path) -> anyhow::Error {
    match model::stored_in(folder) {
        Ok(models) if !models.is_empty() => error.context(format!(
            "{}: a folder of {} models, which --models-dir serves",
            folder.display(),
            models.len()
        )),
        _ => error,
    }
}

/// Bytes of a file of keys.
const MOST_KEYS: u64 = 1 << 20;

/// Access rules from the keys of `--api-key-file` and `NQ_API_KEY`, and the names and origins.
fn security(args: &ServeArgs) -> anyhow::Result<Security> {
    let mut keys = Vec::new();
    if let Some(path) = &args.api_key_file {
        let mut text = String::new();
        let read = File::open(path).and_then(|f| f.take(MOST_KEYS + 1).read_to_string(&mut text));
        read.with_context(|| path.display().to_string())?;
        if text.len() as u64 > MOST_KEYS {
            bail!(
                "{}: expected at most {MOST_KEYS} bytes of keys, found more",
                path.display()
            );
        }
        let lines = text.lines().map(str::trim);
        keys.extend(
            lines
                .filter(|l| !l.is_empty() && !l.starts_with('#'))
                .map(str::to_owned),
        );
        if keys.is_empty() {
            bail!("{}: expected one key per line, found none", path.display());
        }
    }
    if let Some(key) = std::env::var_os("NQ_API_KEY").filter(|k| !k.is_empty()) {
        let key = key.into_string();
        keys.push(key.map_err(|_| anyhow::anyhow!("NQ_API_KEY: expected ASCII"))?);
    }
    Security::new(&keys, &args.allow_host, &args.allow_origin).map_err(anyhow::Error::msg)
}

/// The first signal shuts the server down gracefully, the next one ends it at once.
fn stop_on_signals(server: &Server, grace: Duration) {
    let stopper = server.stopper();
    let stopping = AtomicBool::new(false);
    on_signals(move || {
        if stopping.swap(true, Ordering::SeqCst) {
            leave_interrupted();
        }
        stopper.stop(grace);
    });
}

/// Prints as JSON where the server listens and what it serves.
fn announce_json(url: &str, served: &Served, args: &ServeArgs, keyed: bool) -> anyhow::Result<()> {
    let first = served.first.as_ref();
    let report = serde_json::json!({
        "model": served.names[0], "models": served.names, "url": url,
        "adapters": served.adapters, "parallel": args.parallel, "needs_key": keyed,
        "device": first.map(|f| &f.device), "ctx": first.map(|f| f.ctx),
        "kv_pages": first.map(|f| f.kv_pages), "kv_bytes": first.map(|f| f.kv_bytes),
        "read_once_from": first.and_then(|f| f.read_once_from),
    });
    Ok(print_line(&report.to_string())?)
}

/// Prints the models that are loaded later, where the server listens and how to use it.
fn announce(url: &str, served: &Served, keyed: bool, terminal: &Terminal) {
    let later = &served.names[usize::from(served.first.is_some())..];
    if !later.is_empty() {
        terminal.note(&format!("loaded at first use: {}", later.join(", ")));
    }
    if !served.adapters.is_empty() {
        let (names, model) = (served.adapters.join(", "), &served.names[0]);
        terminal.note(&format!("adapters of {model}, asked for by name: {names}"));
    }
    let key = if keyed {
        " -H \"Authorization: Bearer $NQ_API_KEY\""
    } else {
        ""
    };
    let name = &served.names[0];
    let (path, body) = match served.task {
        Task::Embed(_) => ("embeddings", json!({"model": name, "input": "Hello!"})),
        Task::Rerank => (
            "rerank",
            json!({"model": name, "query": "A river?", "documents": ["The Nile", "A cat"]}),
        ),
        Task::Generate => (
            "chat/completions",
            json!({"model": name, "messages": [{"role": "user", "content": "Hello!"}]}),
        ),
    };
    terminal.note(&format!(
        "try: curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {}",
        shell_word(&body.to_string())
    ));
    if !matches!(served.task, Task::Embed(_)) {
        terminal.note(&format!("chat in a browser: {url}"));
    }
    terminal.note(&format!("listening on {url}"));
}
