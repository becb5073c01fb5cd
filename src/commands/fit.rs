//! `nq fit`: which file of a model for a machine.

use crate::draft;
use crate::fit::{
    Beside, Cards, FileKind, FileRow, FitQuestion, Host, Known, Machine, Use, best, cards,
    speed::Cores,
};
use crate::flags::{Global, parse_size};
use crate::library::AdapterFile;
use crate::machine;
use crate::names::{find, models_dir, published};
use crate::sight::SightBytes;
use crate::system;
use crate::terminal::{Terminal, human_bytes, print_line, shell_word};
use anyhow::{Context, bail};
use clap::Args;
use nq_answers::images::SightOptions;
use nq_cpu::{Cpu, adapter_bytes};
use nq_formats::adapter::Adapter;
use nq_formats::hub::{Hub, HubId, HubOptions};
use nq_formats::{Checkpoint, Progress, config};
use nq_load::device::Device;
use nq_load::gpu;
use nq_model::{ModelConfig, Preset};
use nq_runtime::{KvType, SessionSpec};
use serde::Serialize;
use serde_json::Value;
use std::ffi::OsString;
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
    /// The model, if it is here.
    checkpoint: Option<Checkpoint>,
    is_quantized: bool,
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
    beside: Beside,
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
    let files = match &shape.checkpoint {
        Some(checkpoint) if shape.is_quantized => {
            vec![FileKind::existing(checkpoint, machine.cards.is_some())?]
        }
        _ => FileKind::all(c)?,
    };
    let beside = beside(&shape, global, machine.cards.is_none())?;
    let asked = FitQuestion {
        config: c,
        machine: &machine,
        wanted,
        beside,
    };
    let mut rows = Vec::new();
    for file in &files {
        for kv in [KvType::F16, KvType::Int8] {
            rows.push(asked.row(file, kv)?);
        }
    }
    let report = Report {
        model: &shape.name,
        shape_from: shape.from,
        parameters: c.parameters(),
        machine: &machine,
        wanted,
        beside,
        files: &rows,
        speeds_known: Known::Computed,
        divergences_known: Known::Recorded,
        recommendation: best(&rows).map(|row| recommendation(&shape, row, wanted, &machine)),
    };
    print_line(&match global.json {
        true => serde_json::to_string_pretty(&report)?,
        false => text(&report),
    })?;
    Ok(ExitCode::from(u8::from(report.recommendation.is_none())))
}

/// The shape of the model that MODEL names. Reads no weights, and downloads none.
fn shape(args: &FitArgs, global: &Global, progress: &dyn Progress) -> anyhow::Result<ModelShape> {
    let name = args.model.to_string_lossy();
    let preset = |id: &str| Preset::all().find(|p| p.hub_id == id);
    // One that is not here.
    let shape = |model: String, name: String, from, config| ModelShape {
        model,
        name,
        from,
        config,
        checkpoint: None,
        is_quantized: false,
    };
    let here = name == crate::demo::LABEL
        || Path::new(&args.model).exists()
        || (!name.contains(['/', '\\']) && models_dir()?.join(&*name).exists());
    if here {
        let found = find(&args.model, true, progress)?;
        let config = found.checkpoint.config().clone();
        let is_quantized = found.checkpoint.store().quantization().is_some()
            || found.checkpoint.store().format() == "gguf";
        return Ok(ModelShape {
            checkpoint: Some(found.checkpoint),
            is_quantized,
            ..shape(name.into_owned(), found.name, "its files", config)
        });
    }
    let id = published(&name).unwrap_or_else(|| name.clone().into_owned());
    let known = preset(&id).or_else(|| Preset::find(&name));
    if let Some(known) = known {
        let short = known.hub_id.rsplit('/').next().unwrap_or(&id).into();
        let from = "the published shape that nq knows";
        return Ok(shape(known.hub_id.into(), short, from, known.config()));
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
    let named = path.display();
    if bytes > LONGEST_CONFIG {
        bail!("{named}: expected at most {LONGEST_CONFIG} bytes, found {bytes}");
    }
    let json = std::fs::read(&path).with_context(|| named.to_string())?;
    let config = config::parse(&path, &json)?;
    let value: Value = serde_json::from_slice(&json)?;
    if value.get("quantization_config").is_some() {
        bail!(
            "{id}: its config.json describes quantized weights, whose sizes are in its files: name its source, or pull it first"
        );
    }
    Ok(shape(id, parsed.name(), "its config.json", config))
}

/// What the model takes beside its text model and a session, `on_cpu` or on cards, where images are not read and drafts are
/// not made unless they are asked for.
fn beside(shape: &ModelShape, global: &Global, on_cpu: bool) -> anyhow::Result<Beside> {
    let c = &shape.config;
    let mut loras = Vec::new();
    for AdapterFile { path, weight } in global.adapter_files()? {
        loras.push(Adapter::open(&path, weight)?.lora(c)?);
    }
    let rows = SessionSpec::prompt_rows(on_cpu);
    let adapters = match shape.is_quantized {
        true => adapter_bytes(c, &loras, rows)? as u64,
        false => 0, // merged
    };
    let Some(checkpoint) = shape.checkpoint.as_ref().filter(|_| on_cpu) else {
        return Ok(Beside {
            adapters,
            ..Beside::default()
        });
    };
    let load = global.load_options();
    let images = SightBytes::plan(checkpoint, &load, &SightOptions::default())?;
    let own = draft::by_default(checkpoint, &load)?;
    let drafts = own
        .as_ref()
        .map(|d| d.memory(c, &SessionSpec::of_one(1, 1)));
    Ok(Beside {
        images: images.map_or(0, |images| images.total()),
        drafts: drafts.transpose()?.map_or(0, |(_, bytes)| bytes),
        drafted_by: own.map(|d| d.drafted_by()).unwrap_or_default(),
        adapters,
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
    let mut cards = match &args.gpu {
        Some(cards) => Some(cards.clone()),
        None => match of_this_machine(Device::choose(global.device)?)? {
            None => global.gpu_memory.map(|_| Cards::unnamed()),
            found => found,
        },
    };
    if let (Some(cards), Some(bytes)) = (&mut cards, global.gpu_memory) {
        (cards.free_bytes, cards.memory_known) = (bytes, Known::Given);
    }
    // A dense model on a card does not use the computer's memory.
    let read = match cards.is_none() || c.experts.is_some() {
        true => machine::read_gb_s(&options, terminal)?,
        false => None,
    };
    let free = system::available_memory().map(|bytes| (bytes, Known::Measured));
    let given = args.ram.map(|bytes| (bytes, Known::Given));
    let (free_bytes, memory_known) =
        (given.or(free)).context("--ram: this system does not say how much memory is free")?;
    Ok(Machine {
        cards,
        host: Host {
            free_bytes,
            memory_known,
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
        Device::Wgpu(_) => anyhow::bail!(
            "--device {device}: expected cuda or cpu: whether a model fits a GPU over wgpu is found out by loading it"
        ),
    };
    let found = gpu::found()?;
    let mut free_bytes = u64::MAX;
    for &ordinal in &ordinals {
        free_bytes = free_bytes.min(gpu::memory(ordinal)?.free);
    }
    let last = ordinals.last().and_then(|&n| found.get(n));
    let gpu = last.context("a GPU that is not there")?;
    let (major, minor) = gpu.capability;
    Ok(Some(Cards {
        name: gpu.name.clone(),
        count: ordinals.len(),
        free_bytes,
        memory_known: Known::Measured,
        read_gb_s: gpu.bandwidth.map(|b| b / 1e9),
        bandwidth_known: Known::Measured,
        copied_gb_s: gpu.copied.map(|rate| rate / 1e9),
        kernels: cards::kernels(f64::from(major) + f64::from(minor) / 10.0),
    }))
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
    let whole = row.file.is_empty();
    let model = match whole {
        true => shell_word(&shape.model).into_owned(),
        false => made(&shape.name, &row.file),
    };
    let Use { context, clients } = wanted;
    let (run, each) = match clients {
        1 => (format!("nq chat {model}"), String::new()),
        n => (
            format!("nq serve {model} --parallel {n}"),
            format!(" for each of {n} clients"),
        ),
    };
    let kv = if row.kv == "int8" { " --kv 8" } else { "" };
    let limit = match &machine.cards {
        Some(Cards {
            free_bytes,
            memory_known: Known::Given,
            ..
        }) => format!(" --gpu-memory {free_bytes}B"),
        _ => String::new(),
    };
    let mut commands = vec![format!("{run} --ctx {context}{kv}{limit}")];
    let (source, file) = (shell_word(&shape.model), &row.file);
    let what = match whole {
        true if shape.is_quantized => "the file as it is".to_owned(),
        true => "the model as it is".to_owned(),
        false => {
            commands.insert(0, format!("nq quantize {source} {file} --name {model}"));
            format!("the file of `{file}`")
        }
    };
    let mut sentence = format!(
        "For {} on {}, take {what}: it needs {} with {context} tokens of context{each}",
        shape.name,
        machine.place(),
        human_bytes(row.needed_bytes)
    );
    if let Some(tok_s) = row.tok_s_full {
        sentence +=
            &format!(" and should reach about {tok_s:.0} tokens a second once that is full");
    }
    if let Some(experts) = row.gpu_experts {
        sentence += &format!(
            ", with {experts} experts of each layer on the GPU and all in the computer's memory"
        );
    }
    if row.cpu_layers > 0 {
        sentence += &format!(", with the experts of {} layers on the CPU", row.cpu_layers);
    }
    Recommendation {
        file,
        kv: &row.kv,
        sentence: sentence + ".",
        commands,
    }
}

/// The report for people.
fn text(report: &Report<'_>) -> String {
    let (machine, wanted) = (report.machine, report.wanted);
    let (unit, count) = match report.parameters as f64 / 1e6 {
        millions if millions < 1000.0 => ("million", millions),
        millions => ("billion", millions / 1000.0),
    };
    let mut lines = vec![format!(
        "{}: {count:.1} {unit} parameters, by {}; {} tokens of context, {} at once",
        report.model, report.shape_from, wanted.context, wanted.clients
    )];
    lines.extend(machine.cards.as_ref().map(Cards::line));
    let host = &machine.host;
    if machine.cards.is_none() || host.read_gb_s.is_some() {
        lines.push(host.line());
    }
    lines.extend(report.beside.line());
    let several = wanted.clients > 1;
    let all = if several { " tok/s of all |" } else { "" };
    lines.push(format!(
        "\n| file | keys and values | needs | fits | tok/s | at full context |{all} prompt tok/s | KL divergence |"
    ));
    let all = if several { "---:|" } else { "" };
    lines.push(format!("|---|---|---:|---|---:|---:|{all}---:|---:|"));
    lines.extend(report.files.iter().map(|row| row.line(several)));
    lines.push("\nMemory is planned, as loading plans it. –: not known.".into());
    let mut records: Vec<&str> = report.files.iter().filter_map(|r| r.speed_record).collect();
    records.sort_unstable();
    records.dedup();
    if !records.is_empty() {
        lines.push(format!(
            "Speeds are computed, from the bandwidth and similar models in benches/records ({}).",
            records.join(", ")
        ));
    }
    if report.files.iter().any(|row| row.of_other_kernels) {
        lines.push(
            "No record has such a model on the kernels of this card: its speeds rest on those of an H200, whose kernels are others."
                .into(),
        );
    }
    lines.push(
        "Divergences are from a record, of such files of the demo model, which is small: no larger one was measured. `nq eval` measures yours."
            .into(),
    );
    match &report.recommendation {
        Some(found) => {
            lines.push(format!("\n{}", found.sentence));
            lines.extend(found.commands.iter().map(|command| format!("  {command}")));
        }
        None => lines.push(
            "\nNone of these fits: a shorter --context, fewer --clients or a smaller model may."
                .into(),
        ),
    }
    lines.join("\n")
}
