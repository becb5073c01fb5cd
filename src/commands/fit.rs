//! `nq fit`: which file of a model for a machine.

use crate::fit::{Cards, FileKind, FileRow, Host, Known, Machine, Use, best, cards, speed::Cores};
use crate::flags::{Global, parse_size};
use crate::machine;
use crate::names::{find, models_dir, published};
use crate::system;
use crate::terminal::{Terminal, human_bytes, print_line, shell_word};
use anyhow::{Context, bail};
use clap::Args;
use nq_cpu::Cpu;
use nq_formats::hub::{Hub, HubId, HubOptions};
use nq_formats::{Checkpoint, Progress, config};
use nq_load::device::Device;
use nq_load::gpu;
use nq_model::{ModelConfig, Preset};
use nq_runtime::KvType;
use serde::Serialize;
use serde_json::Value;
use std::ffi::OsString;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

/// Flags of `nq fit`.
#[derive(Args, Debug)]
pub(crate) struct FitArgs {
    /// A folder, a file, a name such as qwen3:8b, or a hub id, of which only config.json is downloaded
    pub model: OsString,
    /// Answer for this card instead of this machine, such as "RTX 4090" or "2 x RTX 3090", by its published figures
    #[arg(long, value_name = "NAME", value_parser = cards::find)]
    pub gpu: Option<Cards>,
    /// Memory of the card that nq may use [default: what is free; of a named card, all but 0.8 GB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub gpu_memory: Option<u64>,
    /// Memory of the computer that nq may use [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub ram: Option<u64>,
    /// Tokens of each conversation [default: 8192, or as many as the model has]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub context: Option<u32>,
    /// Conversations at once
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub clients: u32,
}

/// Most bytes of a config.json.
const LONGEST_CONFIG: u64 = 16 << 20;
/// Tokens of a conversation unless told otherwise.
const CONTEXT: usize = 8192;

/// The shape of a model, with or without its weights.
struct ModelShape {
    /// What commands call it.
    model: String,
    /// Its short name.
    name: String,
    /// How the shape is known.
    from: &'static str,
    config: ModelConfig,
    /// The model, if it is quantized already.
    quantized: Option<Checkpoint>,
}

/// The output of `nq fit --json`.
#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    shape_from: &'a str,
    parameters: usize,
    #[serde(flatten)]
    machine: &'a Machine,
    #[serde(flatten)]
    wanted: Use,
    files: &'a [FileRow],
    speeds_known: Known,
    divergences_known: Known,
    /// `None` if nothing fits.
    recommendation: Option<Recommendation<'a>>,
}

#[derive(Serialize)]
struct Recommendation<'a> {
    file: &'a str,
    kv: &'a str,
    sentence: String,
    commands: Vec<String>,
}

/// Runs `nq fit`; the exit code is 1 if nothing fits.
pub fn run(args: &FitArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let terminal = Terminal::new();
    let shape = shape(args, global, &terminal)?;
    let c = &shape.config;
    let longest = c.longest_context();
    let wanted = Use {
        context: args.context.map_or(CONTEXT.min(longest), |n| n as usize),
        clients: args.clients as usize,
    };
    if wanted.context > longest {
        bail!(
            "--context: expected at most the model's {longest} positions, found {}",
            wanted.context
        );
    }
    let machine = machine_of(args, global, c, &terminal)?;
    let files = match &shape.quantized {
        Some(checkpoint) => vec![FileKind::existing(checkpoint)?],
        None => FileKind::all(c)?,
    };
    let mut rows = Vec::new();
    for file in &files {
        for kv in [KvType::F16, KvType::Int8] {
            rows.push(FileRow::new(c, file, kv, wanted, &machine)?);
        }
    }
    let recommendation = best(&rows).map(|row| recommendation(&shape, row, wanted, &machine));
    let found = recommendation.is_some();
    if global.json {
        print_line(&serde_json::to_string_pretty(&Report {
            model: &shape.name,
            shape_from: shape.from,
            parameters: c.parameters(),
            machine: &machine,
            wanted,
            files: &rows,
            speeds_known: Known::Computed,
            divergences_known: Known::Recorded,
            recommendation,
        })?)?;
    } else {
        print_line(&text(
            &shape,
            &machine,
            wanted,
            &rows,
            recommendation.as_ref(),
        )?)?;
    }
    Ok(ExitCode::from(u8::from(!found)))
}

/// The shape of the model that MODEL names. Reads no weights, and downloads none.
fn shape(args: &FitArgs, global: &Global, progress: &dyn Progress) -> anyhow::Result<ModelShape> {
    let name = args.model.to_string_lossy();
    let preset = |id: &str| Preset::all().find(|p| p.hub_id == id);
    let here = name == crate::demo::LABEL
        || Path::new(&args.model).exists()
        || (!name.contains(['/', '\\']) && models_dir()?.join(&*name).exists());
    if here {
        let found = find(&args.model, true, progress)?;
        let config = found.checkpoint.config().clone();
        let is_quantized = found.checkpoint.store().quantization().is_some()
            || found.checkpoint.store().format() == "gguf";
        return Ok(ModelShape {
            model: name.into_owned(),
            name: found.name,
            from: "its files",
            config,
            quantized: Some(found.checkpoint).filter(|_| is_quantized),
        });
    }
    let id = published(&name).unwrap_or_else(|| name.clone().into_owned());
    let known = preset(&id).or_else(|| Preset::find(&name));
    if let Some(known) = known {
        return Ok(ModelShape {
            model: known.hub_id.into(),
            name: known.hub_id.rsplit('/').next().unwrap_or(&id).into(),
            from: "the published shape that nq knows",
            config: known.config(),
            quantized: None,
        });
    }
    let Some(parsed) = HubId::parse(&id) else {
        // Says what names there are.
        return Err(match find(&args.model, true, progress) {
            Err(e) => e.into(),
            Ok(found) => anyhow::anyhow!("{}: no shape of it is known", found.name),
        });
    };
    if parsed.kind.is_some() || parsed.file.is_some() {
        bail!(
            "{id}: the shape of a GGUF file is within it: name the model that it was made of, or a file that is here"
        );
    }
    let mut options = HubOptions::from_env();
    options.offline |= global.offline;
    let path = Hub::new(options).fetch_config(&id, progress)?;
    let bytes = std::fs::metadata(&path).context("config.json")?.len();
    if bytes > LONGEST_CONFIG {
        bail!(
            "{}: expected at most {LONGEST_CONFIG} bytes, found {bytes}",
            path.display()
        );
    }
    let json = std::fs::read(&path).with_context(|| path.display().to_string())?;
    let config = config::parse(&path, &json)?;
    let value: Value = serde_json::from_slice(&json)?;
    if value.get("quantization_config").is_some() {
        bail!(
            "{id}: its config.json describes quantized weights, whose sizes are in its files: name its source, or pull it first"
        );
    }
    Ok(ModelShape {
        name: parsed.name(),
        model: id,
        from: "its config.json",
        config,
        quantized: None,
    })
}

/// The machine that is asked about: the card of `--gpu` in this computer, or this machine as it is.
fn machine_of(
    args: &FitArgs,
    global: &Global,
    c: &ModelConfig,
    terminal: &Terminal,
) -> anyhow::Result<Machine> {
    let options = global.load_options();
    let cards = match (&args.gpu, args.gpu_memory) {
        (Some(cards), _) => Some(cards.clone()),
        (None, Some(_)) if Device::choose(global.device)? == Device::Cpu => Some(Cards {
            name: "a card".into(),
            count: 1,
            free_bytes: 0,
            memory_known: Known::Given,
            read_gb_s: None,
            bandwidth_known: Known::Given,
            kernels: cards::kernels(0.0),
        }),
        (None, _) => of_this_machine(Device::choose(global.device)?)?,
    };
    let cards = cards.map(|cards| match args.gpu_memory {
        Some(free_bytes) => Cards {
            free_bytes,
            memory_known: Known::Given,
            ..cards
        },
        None => cards,
    });
    // A dense model on a card does not use the computer's memory.
    let read = match cards.is_none() || c.experts.is_some() {
        true => machine::read_gb_s(&options, terminal)?,
        false => None,
    };
    Ok(Machine {
        cards,
        host: Host {
            free_bytes: match args.ram {
                Some(bytes) => bytes,
                None => system::available_memory()
                    .context("--ram: this system does not say how much memory is free")?,
            },
            memory_known: match args.ram {
                Some(_) => Known::Given,
                None => Known::Measured,
            },
            read_gb_s: read,
            cores: Cores {
                threads: Cpu::new(options.threads, options.isa)?.threads(),
                isa: options.isa.resolve()?,
            },
        },
    })
}

/// The GPUs of `device`, as measured; `None` for the CPU.
fn of_this_machine(device: Device) -> anyhow::Result<Option<Cards>> {
    let ordinals: Vec<usize> = match device {
        Device::Cpu => return Ok(None),
        Device::Cuda(n) => vec![n],
        Device::Gpus(several) => several.as_slice().to_vec(),
    };
    let found = gpu::found()?;
    let mut cards: Option<Cards> = None;
    for &ordinal in &ordinals {
        let gpu = found.get(ordinal).context("a GPU that is not there")?;
        let free_bytes = gpu::memory(ordinal)?.free;
        let (major, minor) = gpu.capability;
        let least = cards
            .as_ref()
            .map_or(free_bytes, |c| c.free_bytes.min(free_bytes));
        cards = Some(Cards {
            name: gpu.name.clone(),
            count: ordinals.len(),
            free_bytes: least,
            memory_known: Known::Measured,
            read_gb_s: gpu.bandwidth.map(|b| b / 1e9),
            bandwidth_known: Known::Measured,
            kernels: cards::kernels(f64::from(major) + f64::from(minor) / 10.0),
        });
    }
    Ok(cards)
}

/// The name of what `flags` make, for `nq quantize --name`.
fn made(name: &str, flags: &str) -> String {
    let parts = flags.split(['-', ' ']).filter(|part| !part.is_empty());
    parts.fold(name.to_owned(), |name, part| format!("{name}-{part}"))
}

/// The best file in a sentence, with the commands that make and run it.
fn recommendation<'a>(
    shape: &ModelShape,
    row: &'a FileRow,
    wanted: Use,
    machine: &Machine,
) -> Recommendation<'a> {
    let kv = match row.kv.as_str() {
        "int8" => " --kv 8",
        _ => "",
    };
    let whole = row.file.is_empty();
    let model = match whole {
        true => shell_word(&shape.model).into_owned(),
        false => made(&shape.name, &row.file),
    };
    let run = match wanted.clients {
        1 => format!("nq chat {model} --ctx {}{kv}", wanted.context),
        n => format!(
            "nq serve {model} --parallel {n} --ctx {}{kv}",
            wanted.context
        ),
    };
    let make = format!(
        "nq quantize {} {} --name {model}",
        shell_word(&shape.model),
        row.file
    );
    let place = match &machine.cards {
        Some(cards) => match cards.count {
            1 => cards.name.clone(),
            n => format!("{n} x {}", cards.name),
        },
        None => "this CPU".into(),
    };
    let what = match (whole, &shape.quantized) {
        (true, Some(_)) => "the file as it is".to_owned(),
        (true, None) => "the model as it is".to_owned(),
        (false, _) => format!("the file of `{}`", row.file),
    };
    let mut sentence = format!(
        "For {} on {place}, take {what}: it needs {} with {} tokens of context{}",
        shape.name,
        human_bytes(row.needed_bytes),
        wanted.context,
        match wanted.clients {
            1 => String::new(),
            n => format!(" for each of {n} clients"),
        }
    );
    if let Some(tok_s) = row.tok_s_full {
        sentence += &format!(" and should reach at least {tok_s:.0} tokens a second");
    }
    if row.cpu_layers > 0 {
        sentence += &format!(", with the experts of {} layers on the CPU", row.cpu_layers);
    }
    Recommendation {
        file: &row.file,
        kv: &row.kv,
        sentence: sentence + ".",
        commands: match whole {
            true => vec![run],
            false => vec![make, run],
        },
    }
}

/// The report for people.
fn text(
    shape: &ModelShape,
    machine: &Machine,
    wanted: Use,
    rows: &[FileRow],
    recommendation: Option<&Recommendation<'_>>,
) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    writeln!(
        out,
        "{}: {:.1} billion parameters, by {}; {} tokens of context, {} at once",
        shape.name,
        shape.config.parameters() as f64 / 1e9,
        shape.from,
        wanted.context,
        wanted.clients
    )?;
    if let Some(cards) = &machine.cards {
        write!(
            out,
            "{} x {}: {} for nq ({})",
            cards.count,
            cards.name,
            human_bytes(cards.free_bytes),
            cards.memory_known.word()
        )?;
        match cards.read_gb_s {
            Some(rate) => writeln!(
                out,
                ", read at {rate:.0} GB/s ({})",
                cards.bandwidth_known.word()
            )?,
            None => writeln!(
                out,
                "; its bandwidth is not known, so no speed is computed (--gpu names a card)"
            )?,
        }
    }
    let host = &machine.host;
    if machine.cards.is_none() || host.read_gb_s.is_some() {
        write!(
            out,
            "this computer: {} for nq ({})",
            human_bytes(host.free_bytes),
            host.memory_known.word()
        )?;
        match host.read_gb_s {
            Some(rate) => writeln!(
                out,
                ", read at {rate:.1} GB/s by {} threads (measured, {} kernels)",
                host.cores.threads, host.cores.isa
            )?,
            None => writeln!(out, "; too little is free to measure its bandwidth")?,
        }
    }
    let several = wanted.clients > 1;
    let all = if several { " tok/s of all |" } else { "" };
    writeln!(
        out,
        "\n| file | keys and values | needs | fits | tok/s | at full context |{all} prompt tok/s | KL divergence |"
    )?;
    writeln!(
        out,
        "|---|---|---:|---|---:|---:|{}---:|---:|",
        if several { "---:|" } else { "" }
    )?;
    for row in rows {
        let figure = |value: Option<f64>| {
            value.map_or("–".to_owned(), |v| match v {
                v if v < 10.0 => format!("{v:.1}"),
                v => format!("{v:.0}"),
            })
        };
        let fits = match (row.fits, row.cpu_layers) {
            (true, 0) => "yes".to_owned(),
            (true, n) => format!("with experts of {n} layers on the CPU"),
            (false, _) => row.why_not.clone().unwrap_or_default(),
        };
        let file = if row.file.is_empty() {
            "as it is"
        } else {
            &row.file
        };
        let all = match several {
            true => format!(" {} |", figure(row.tok_s_all)),
            false => String::new(),
        };
        let (first, full, prompt) = match row.fits {
            true => (row.tok_s, row.tok_s_full, row.prompt_tok_s),
            false => (None, None, None),
        };
        writeln!(
            out,
            "| {file} | {} | {} | {fits} | {} | {} |{all} {} | {} |",
            row.kv,
            human_bytes(row.needed_bytes),
            figure(first),
            figure(full),
            figure(prompt),
            row.kld.map_or("–".into(), |v| format!("{v:.4}"))
        )?;
    }
    let mut records: Vec<&str> = rows.iter().filter_map(|r| r.speed_record).collect();
    records.sort_unstable();
    records.dedup();
    writeln!(
        out,
        "\nMemory is planned, as loading plans it. –: not known."
    )?;
    if !records.is_empty() {
        writeln!(
            out,
            "Speeds are computed, from the bandwidth and similar models in benches/records ({}).",
            records.join(", ")
        )?;
    }
    writeln!(
        out,
        "Divergences are from a record, of such files of the demo model; larger models usually lose less. `nq eval` measures yours."
    )?;
    match recommendation {
        Some(found) => {
            write!(out, "\n{}", found.sentence)?;
            found
                .commands
                .iter()
                .try_for_each(|command| write!(out, "\n  {command}"))?;
        }
        None => write!(
            out,
            "\nNone of these fits: a shorter --context, fewer --clients or a smaller model may."
        )?,
    }
    Ok(out)
}
