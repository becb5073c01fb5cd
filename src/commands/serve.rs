//! `nq serve`: a model for many clients, over HTTP.

use crate::cli::{Global, parse_kv, parse_load_bits};
use crate::commands::chat::{at_load, longest_context};
use crate::commands::quantize::parse_size;
use crate::model;
use crate::system::available_memory;
use crate::terminal::{Terminal, human_bytes, leave_interrupted, print_line, shell_word};
use anyhow::{Context, bail};
use clap::Args;
use nq_formats::{Checkpoint, Progress};
use nq_kernels::cpu::PAGE;
use nq_quantize::schemes::Schemes;
use nq_runtime::{Engine, KvType, LoadOptions, SessionSpec};
use nq_serve::{EngineOptions, Limits, Model, Security, Server};
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Prompt tokens computed together at most, on a CPU and on a GPU.
const ROWS: (usize, usize) = (512, 2048);
/// Prompt tokens computed together at least.
const LEAST_ROWS: (usize, usize) = (16, 64);

/// Slots that keep sequences for prompts to come, for each request at once.
const KEPT_PER_REQUEST: usize = 4;

/// Flags of `nq serve`.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// demo, a folder, a hub id or a name from `nq list` [default: the quantized Qwen3-0.6B]
    pub model: Option<OsString>,
    /// Address to listen on; one that other machines reach needs a key
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8080)]
    pub port: u16,
    /// File with the keys that clients may use, one a line; NQ_API_KEY holds another
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Name that this machine goes by, beside localhost and its addresses
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Origin, a scheme and a host, whose pages may use the server
    #[arg(long, value_name = "ORIGIN")]
    pub allow_origin: Vec<String>,
    /// What clients call the model [default: its own name]
    #[arg(long, value_name = "NAME")]
    pub served_name: Option<String>,
    /// Requests worked on at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub parallel: u16,
    /// Requests that wait at most; more are told to come again
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..))]
    pub queue: u16,
    /// Positions of a sequence [default: the model's, as far as the memory goes]
    #[arg(long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Memory for keys and values of all sequences [default: what they can fill, at most 40 % of
    /// what is free on a CPU and 90 % on a GPU]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub kv_memory: Option<u64>,
    /// Bits of keys and values: 8, 16 or 32
    #[arg(long, default_value = "16", value_parser = parse_kv)]
    pub kv: KvType,
    /// Quantize an unquantized model at load: 4, 8 or 16 (keep it)
    #[arg(long, value_parser = parse_load_bits)]
    pub bits: Option<u32>,
    /// Keep nothing for prompts to come
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Seconds that a request may take in all; 0: as long as it takes
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    pub timeout: u64,
    /// Seconds that answers may go on after the server is told to end
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub grace: u64,
}

/// What is reserved for sequences.
struct Plan {
    spec: SessionSpec,
    page_bytes: u64,
}

/// Runs `nq serve` until it is interrupted.
pub fn run(args: &ServeArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let terminal = Terminal::new();
    // What a flag is wrong about need not wait for the model.
    let security = security(args)?;
    let address = SocketAddr::new(args.host, args.port);
    if !args.host.is_loopback() && !security.needs_key() {
        bail!(
            "--host {}: other machines can reach it, which needs a key: --api-key-file or NQ_API_KEY",
            args.host
        );
    }
    let model = match &args.model {
        Some(name) => model::open(Some(name), global, &terminal)?,
        None => model::open_for_chat(global, &terminal)?,
    };
    let (checkpoint, schemes) = at_load(model.checkpoint, args.bits, &terminal)?;
    model::note_growth(&checkpoint, &terminal);
    let options = global.load_options();
    let engine = nq_runtime::load(checkpoint.config(), checkpoint.store(), &options, &terminal)?;
    let plan = plan(
        args,
        &checkpoint,
        schemes.as_ref(),
        engine.as_ref(),
        &options,
    )?;
    let name = args.served_name.clone().unwrap_or(model.name);
    let device = engine.description().device.clone();
    let on_gpu = is_on_gpu(&options)?;
    let options = EngineOptions {
        parallel: args.parallel.into(),
        queue: args.queue.into(),
        prefix_cache: !args.no_prefix_cache,
        least_rows: match on_gpu {
            true => LEAST_ROWS.1,
            false => LEAST_ROWS.0,
        },
        ..EngineOptions::default()
    };
    let served = Arc::new(Model::new(&name, &checkpoint, engine, plan.spec, options)?);
    let limits = Limits {
        request_time: (args.timeout > 0).then(|| Duration::from_secs(args.timeout)),
        ..Limits::default()
    };
    let keyed = security.needs_key();
    let server = Server::bind(address, vec![served], security, limits)
        .with_context(|| format!("--host {} --port {}", args.host, args.port))?;
    stop_on_signals(&server, Duration::from_secs(args.grace))?;
    announce(
        &server, &name, &device, &plan, args, keyed, global, &terminal,
    )?;
    server.run()?;
    Ok(ExitCode::SUCCESS)
}

/// The keys of `--api-key-file` and `NQ_API_KEY`, and the names and origins.
fn security(args: &ServeArgs) -> anyhow::Result<Security> {
    let mut keys = Vec::new();
    if let Some(path) = &args.api_key_file {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let lines = text.lines().map(str::trim);
        keys.extend(
            lines
                .filter(|l| !l.is_empty() && !l.starts_with('#'))
                .map(str::to_owned),
        );
        if keys.is_empty() {
            bail!("{}: expected a key a line, found none", path.display());
        }
    }
    if let Some(key) = std::env::var_os("NQ_API_KEY").filter(|k| !k.is_empty()) {
        let key = key.into_string();
        keys.push(key.map_err(|_| anyhow::anyhow!("NQ_API_KEY: expected ASCII"))?);
    }
    Security::new(&keys, &args.allow_host, &args.allow_origin).map_err(anyhow::Error::msg)
}

fn is_on_gpu(options: &LoadOptions) -> anyhow::Result<bool> {
    Ok(options.device.resolve()? != nq_runtime::device::Device::Cpu)
}

/// How many sequences of which length, and pages for them.
fn plan(
    args: &ServeArgs,
    checkpoint: &Checkpoint,
    schemes: Option<&Schemes>,
    engine: &dyn Engine,
    options: &LoadOptions,
) -> anyhow::Result<Plan> {
    let parallel = usize::from(args.parallel);
    let trained = longest_context(checkpoint.config());
    let on_gpu = is_on_gpu(options)?;
    let spec = |ctx: usize, pages: usize| SessionSpec {
        slots: parallel * (1 + KEPT_PER_REQUEST),
        ctx,
        pages: Some(pages),
        kv: args.kv,
        max_rows: if on_gpu { ROWS.1 } else { ROWS.0 },
    };
    let kv_bytes = |pages: usize| -> anyhow::Result<u64> {
        let spec = spec(PAGE, pages);
        Ok(match engine.device_memory(&spec) {
            Some(memory) => memory.kv as u64,
            None => nq_quantize::memory::running(checkpoint, schemes, &spec)?.kv,
        })
    };
    let page_bytes = kv_bytes(2)? - kv_bytes(1)?;
    let asked = match args.ctx {
        Some(n) if !(2..=trained).contains(&n) => {
            bail!("--ctx: expected 2 to {trained}, the model's longest, found {n}")
        }
        other => other,
    };
    let free = match engine.device_memory(&spec(asked.unwrap_or(trained), 1)) {
        Some(memory) => (memory.free.saturating_sub(memory.scratch) as f64 * 0.9) as u64,
        None => available_memory().map_or(u64::MAX, |free| free / 5 * 2),
    };
    let most = (parallel * asked.unwrap_or(trained).div_ceil(PAGE)) as u64;
    let pages = match args.kv_memory {
        Some(bytes) => bytes / page_bytes,
        None => (free / page_bytes).min(most),
    };
    let pages = usize::try_from(pages)
        .unwrap_or(usize::MAX)
        .min(u32::MAX as usize);
    let ctx = asked.unwrap_or_else(|| trained.min(pages * PAGE));
    if pages < ctx.div_ceil(PAGE) || pages == 0 {
        bail!(
            "a sequence of {} tokens takes {} of keys and values, and {} are there for them: a \
             smaller --ctx or a larger --kv-memory helps",
            ctx.max(PAGE),
            human_bytes(page_bytes * ctx.div_ceil(PAGE).max(1) as u64),
            human_bytes(args.kv_memory.unwrap_or(free))
        );
    }
    if args.kv_memory.is_some_and(|bytes| bytes > free / 2 * 5) && !on_gpu {
        bail!(
            "--kv-memory: {} are free on this machine",
            human_bytes(available_memory().unwrap_or(0))
        );
    }
    Ok(Plan {
        spec: spec(ctx, pages),
        page_bytes,
    })
}

/// The first signal ends the server in good order, the next one at once.
fn stop_on_signals(server: &Server, grace: Duration) -> anyhow::Result<()> {
    let stopper = server.stopper();
    let stopping = AtomicBool::new(false);
    ctrlc::set_handler(move || {
        if stopping.swap(true, Ordering::SeqCst) {
            leave_interrupted();
        }
        stopper.stop(grace);
    })?;
    Ok(())
}

/// Says what is served, with what, and how to ask.
#[expect(clippy::too_many_arguments, reason = "all that there is to say")]
fn announce(
    server: &Server,
    name: &str,
    device: &str,
    plan: &Plan,
    args: &ServeArgs,
    keyed: bool,
    global: &Global,
    terminal: &Terminal,
) -> anyhow::Result<()> {
    let address = server.address()?;
    let url = format!("http://{address}");
    let SessionSpec { ctx, pages, .. } = plan.spec;
    let pages = pages.unwrap_or(0);
    let bytes = plan.page_bytes * pages as u64;
    if global.json {
        let report = serde_json::json!({
            "model": name, "device": device, "url": url, "ctx": ctx,
            "parallel": args.parallel, "kv_pages": pages, "kv_bytes": bytes, "needs_key": keyed,
        });
        print_line(&report.to_string())?;
        return Ok(());
    }
    terminal.note(&format!(
        "{name} on {device}: {} requests at once, contexts of {ctx} tokens, {} tokens of keys and \
         values in {}{}",
        args.parallel,
        pages * PAGE,
        human_bytes(bytes),
        match args.no_prefix_cache {
            true => "; nothing is kept for prompts to come",
            false => ", shared where prompts begin alike",
        }
    ));
    let key = match keyed {
        true => " -H \"Authorization: Bearer $NQ_API_KEY\"",
        false => "",
    };
    let body = serde_json::json!({
        "model": name, "messages": [{"role": "user", "content": "Hello!"}],
    });
    terminal.note(&format!(
        "try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {}",
        shell_word(&body.to_string())
    ));
    terminal.note(&format!("listening on {url}"));
    Ok(())
}
