//! `nq bench`: tokens per second beside the machine's measured bandwidth.

mod alike;
mod image;
mod text;

use super::eval::check_output;
use super::synth::parse_preset;
use crate::adapters;
use crate::at_load;
use crate::draft::DraftFrom;
use crate::flags::{Global, conflict, parse_kv, parse_load_bits};
use crate::machine;
use crate::model::{self, ToRun};
use crate::system;
use crate::terminal::{Terminal, human_bytes, print_line};
use alike::AlikeTokens;
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use nq_cpu::{BandwidthBuffer, Cpu};
use nq_evals::bench::{self, BenchSpec, Machine};
use nq_evals::{BenchRow, ExpertsRow, Record};
use nq_formats::adapter::Lora;
use nq_formats::synth;
use nq_formats::trellis::Code;
use nq_formats::{Bits, Checkpoint, Progress, WeightStore, nq};
use nq_load::device::Device;
use nq_model::Preset;
use nq_quantize::{Codes, Recipe};
use nq_runtime::{Engine, EngineKind, KvType, LoadOptions, SamplingParams, Tokenizer};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Flags of `nq bench`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct BenchArgs {
    /// demo, a folder, a hub id or a name from `nq list` [default: Qwen/Qwen3-0.6B]
    #[arg(conflicts_with = "preset")]
    pub model: Option<OsString>,
    /// Random weights of a published shape, such as qwen3-0.6b (`nq synth --help` lists them)
    #[arg(long, value_parser = parse_preset)]
    pub preset: Option<Preset>,
    /// Quantize an unquantized model at load: 3, 4, 5, 6, 8 or 16 (keep it)
    #[arg(long, value_parser = parse_load_bits)]
    pub bits: Option<u32>,
    /// With --preset: trellis codes of 2, 2.5, 3, 3.5, 4, 5 or 6 bits, as `nq quantize --trellis` makes them
    #[arg(long, value_name = "BITS", requires = "preset", conflicts_with = "bits", value_parser = parse_trellis)]
    pub trellis: Option<Codes>,
    /// With --preset and --bits or --trellis: one scheme for all layers, and more bits for embedding and head,
    /// instead of the mix that `nq quantize` makes by default
    #[arg(long, requires = "preset")]
    pub simple: bool,
    /// What `--simple` leaves out, by its former name
    #[arg(long, hide = true, conflicts_with = "simple")]
    pub mixed: bool,
    /// With --preset: the share that the embeddings of all tokens have in common (0 to 1). Routers of a mixture with
    /// random weights choose among all experts anew for each token; the larger the share, the more they choose the
    /// same again. Decoding then draws tokens, as with --draw [default: 0]
    #[arg(long, value_name = "SHARE", requires = "preset", value_parser = parse_share)]
    pub alike: Option<f64>,
    /// With --preset: the first so many layers of it alone, where all need more memory than there is
    #[arg(long, value_name = "N", requires = "preset", value_parser = parse_count)]
    pub layers: Option<usize>,
    /// Prompt tokens of the prefill test; 0 skips it
    #[arg(short = 'p', long, default_value_t = 512, value_name = "N", value_parser = parse_tokens)]
    pub prompt_tokens: usize,
    /// Tokens of the decode test; 0 skips it
    #[arg(short = 'n', long, default_value_t = 128, value_name = "N", value_parser = parse_tokens)]
    pub gen_tokens: usize,
    /// Tokens already in the context when the test starts
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = parse_tokens)]
    pub depth: usize,
    /// Sequences decoded at once
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = parse_count)]
    pub batch: usize,
    /// Measured repeats, after a warm-up
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = parse_count)]
    pub repeats: usize,
    /// The engine that runs the model
    #[arg(long, value_enum, default_value_t = EngineArg::Nq)]
    pub engine: EngineArg,
    /// Decode with tokens drawn at temperature 1 instead of the likeliest, which random weights soon repeat
    #[arg(long, conflicts_with = "text")]
    pub draw: bool,
    /// Show time, bandwidth and calls per operation
    #[arg(long)]
    pub breakdown: bool,
    /// Write the figures, with the machine and hashes of the model's files, to this file, for others to use
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Skip the chat test
    #[arg(long)]
    pub no_chat: bool,
    /// Also measure an image of this size, such as 1024x1024: its pixels, its encoding, the first token behind it, and
    /// decoding
    #[arg(long, value_name = "WxH", conflicts_with_all = ["text", "engine"], value_parser = image::parse)]
    pub image: Option<image::ImageSize>,
    /// Bits of the KV cache: 8, 16 or 32 [default: 16; 32 for candle, which supports no other]
    #[arg(long, value_parser = parse_kv)]
    pub kv: Option<KvType>,
    /// Measure speculative decoding instead of the other tests: decode with drafts and without, in turns. A
    /// model continues excerpts of this text by -n tokens each; with --preset, the text itself is the answer
    #[arg(long, value_name = "FILE", conflicts_with_all = ["depth", "batch", "breakdown", "engine"])]
    pub text: Option<PathBuf>,
    /// Prompt before the text of --text, for example a file of which --text is an edited version; the text
    /// itself is then the answer, whatever the model would write
    #[arg(long, value_name = "FILE", requires = "text")]
    pub before: Option<PathBuf>,
    /// The drafter for --text: ngram (prompt lookup), mtp (the model's own layer), a smaller MODEL with the same
    /// tokenizer, eagle3:FOLDER (an EAGLE-3 head) or, with --preset, another preset [default: ngram]
    #[arg(long, value_name = "FROM", requires = "text")]
    pub draft: Option<DraftFrom>,
    /// Tokens to draft in each step, whether that pays or not [default: as many as pay]
    #[arg(long, value_name = "N", requires = "text", value_parser = parse_count)]
    pub draft_tokens: Option<usize>,
    /// Number of layers of the preset that drafts [default: that of its published shape]
    #[arg(long, value_name = "N", requires = "draft", value_parser = parse_count)]
    pub draft_layers: Option<usize>,
    /// Acceptance rate to give a drafter with weights (0 to 1), if the text itself is the answer
    #[arg(long, value_name = "SHARE", requires = "draft", value_parser = parse_share)]
    pub draft_right: Option<f64>,
}

impl BenchArgs {
    fn spec(&self, device: Device) -> BenchSpec {
        BenchSpec {
            prompt_tokens: self.prompt_tokens,
            gen_tokens: self.gen_tokens,
            depth: self.depth,
            batch: self.batch,
            repeats: self.repeats,
            kv: self.kv(),
            prompt_rows: device.prompt_rows(),
            draws: self.draw || self.alike.is_some(),
        }
    }

    fn kv(&self) -> KvType {
        self.kv.unwrap_or(match self.engine {
            EngineArg::Nq => KvType::F16,
            EngineArg::Candle => KvType::F32,
        })
    }
}

/// Engines by their command-line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineArg {
    /// nq's own
    Nq,
    /// candle-transformers, the baseline, in a build with the feature `candle`
    Candle,
}

/// Most sequences at once, and most repeats.
const MOST: usize = 1024;
/// Most tokens of a test or a depth: more than any model's context.
const MOST_TOKENS: usize = 1 << 24;

/// With this many positions over all sequences, memory is checked first.
const MANY: usize = 1 << 15;

fn parse_count(s: &str) -> Result<usize, String> {
    match s.parse() {
        Ok(n @ 1..=MOST) => Ok(n),
        _ => Err(format!("expected 1 to {MOST}")),
    }
}

fn parse_share(s: &str) -> Result<f64, String> {
    match s.parse() {
        Ok(share @ 0.0..=1.0) => Ok(share),
        _ => Err("expected 0 to 1".into()),
    }
}

fn parse_tokens(s: &str) -> Result<usize, String> {
    match s.parse() {
        Ok(n @ 0..=MOST_TOKENS) => Ok(n),
        _ => Err(format!("expected 0 to {MOST_TOKENS}")),
    }
}

/// Size of the buffer for measuring bandwidth: far more than any last-level cache.
const BANDWIDTH_BYTES: usize = 1 << 30;

/// Runs `nq bench`. A row that exceeds the machine's limit makes the exit code 1.
pub fn run(args: &BenchArgs, global: &Global) -> anyhow::Result<ExitCode> {
    if args.prompt_tokens == 0 && args.gen_tokens == 0 {
        return Err(conflict(
            "bench",
            "nothing to measure: -p and -n are both 0",
        ));
    }
    if let Some(path) = &args.record {
        check_output("--record", path)?;
    }
    let terminal = Terminal::new();
    if args.mixed {
        terminal.note("--mixed does nothing: the mix is measured unless --simple is given");
    }
    let model = open(args, global, &terminal)?;
    let beside = match &args.draft {
        Some(_) => Some("drafts"),
        None => (!model.loras.is_empty()).then_some("adapters of a quantized model"),
    };
    let global = &global.for_model(&model.checkpoint, beside, &terminal);
    if let Some(file) = &args.text {
        return text::run(args, file, &model, global, &terminal);
    }
    let checkpoint = &model.checkpoint;
    // Before the minutes that the other tests may take.
    let tokenizer = if args.gen_tokens > 1 && !args.no_chat {
        Some(
            Tokenizer::from_files(checkpoint.files())
                .context("the chat test, which --no-chat leaves out")?,
        )
    } else {
        None
    };
    let device = Device::choose(global.device)?;
    let spec = args.spec(device);
    let tower = (args.image).map(|_| image::tower(&model, args, global, &terminal));
    let tower = tower.transpose()?;
    let options = LoadOptions {
        engine: match args.engine {
            EngineArg::Nq => EngineKind::Nq,
            EngineArg::Candle => EngineKind::Candle,
        },
        session: Some(spec.largest_session()),
        ..global.load_options()
    };
    let session = spec.largest_session();
    if session.slots * session.ctx > MANY && device == Device::Cpu {
        let memory = at_load::memory(checkpoint, None, &session)?;
        system::check_memory(
            memory.peak,
            "a smaller --batch, --depth, -p or -n needs less",
        )?;
    }
    let meter = Meter::new(&options)?;
    let engine = adapters::load(checkpoint, &model.loras, &options, &terminal)
        .with_context(|| model.name.clone())?;
    let engine = engine.as_ref();
    let read = || meter.read_gb_s();
    let machine = Machine {
        read_gb_s: &read,
        cache_bytes: meter.cache_bytes()?,
    };
    let mut rows = bare(engine, args, &spec, machine, &terminal)?;
    if let Some(tokenizer) = &tokenizer {
        let sampling = SamplingParams::from_defaults(checkpoint.generation());
        let row = streaming(engine, tokenizer, &sampling, &spec, machine, &terminal)?;
        rows.push(row);
    }
    if let Some((size, tower)) = args.image.zip(tower) {
        rows.push(image::measure(
            size,
            tower.as_ref(),
            engine,
            &spec,
            machine,
            &terminal,
        )?);
    }
    show(args, &model, engine, machine, rows, global, &terminal)
}

/// What `--record` says of how the figures were measured.
fn protocol(args: &BenchArgs) -> String {
    let mut kind = if args.text.is_some() {
        " --text".to_owned()
    } else {
        String::new()
    };
    if let Some(size) = args.image {
        kind = format!(" --image {size}");
    }
    format!(
        "nq bench{kind} -p {} -n {} --depth {} --batch {} --repeats {}, keys and values {}",
        args.prompt_tokens,
        args.gen_tokens,
        args.depth,
        args.batch,
        args.repeats,
        args.kv()
    )
}

/// Prints rows and writes the record that is wanted; a row above the machine's limit makes the exit code 1.
fn show(
    args: &BenchArgs,
    model: &BenchModel,
    engine: &dyn Engine,
    machine: Machine<'_>,
    mut rows: Vec<BenchRow>,
    global: &Global,
    terminal: &Terminal,
) -> anyhow::Result<ExitCode> {
    (rows.iter_mut()).for_each(|row| row.codes.clone_from(&model.codes));
    if global.json {
        print_line(&serde_json::to_string_pretty(&rows)?)?;
    } else {
        print_line(&table(model, engine, machine, &rows))?;
    }
    if let Some(path) = &args.record {
        let of_model =
            machine::record_model(&model.name, &model.codes, &model.checkpoint, terminal)?;
        let record = Record {
            speed: rows.clone(),
            ..machine::record(protocol(args), vec![of_model])
        };
        machine::write_record(path, &record)?;
    }
    let failed = rows.iter().filter_map(|r| r.measurement_error.as_ref());
    let failures = failed.inspect(|why| terminal.note(&format!("measurement error: {why}")));
    Ok(ExitCode::from(u8::from(failures.count() > 0)))
}

/// Prefill and decode without the path of chat, with a breakdown if requested.
fn bare(
    engine: &dyn Engine,
    args: &BenchArgs,
    spec: &BenchSpec,
    machine: Machine<'_>,
    terminal: &Terminal,
) -> nq_evals::Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    if args.prompt_tokens > 0 {
        rows.push(bench::prefill(engine, spec, machine, terminal)?);
    }
    if args.gen_tokens > 0 {
        rows.push(bench::decode(engine, spec, machine, terminal)?);
    }
    for row in &rows {
        if let Some(experts) = &row.experts {
            terminal.note(&experts_line(row, experts));
        }
    }
    for row in rows.iter_mut().filter(|_| args.breakdown) {
        let decoding = row.test.starts_with("tg");
        row.breakdown = bench::breakdown(engine, spec, decoding, terminal)?;
        if row.breakdown.is_none() {
            terminal.note(&format!(
                "--breakdown: engine {} on {} does not time its operations",
                row.engine, row.device
            ));
        }
    }
    Ok(rows)
}

/// Where a test found experts, and what that allows.
fn experts_line(row: &BenchRow, experts: &ExpertsRow) -> String {
    let of_layers = || experts.found_by_layer.iter().copied();
    let mut line = format!(
        "{}: {:.1} % of the choices of experts found them on the GPU ({:.1} to {:.1} % of a layer's)",
        row.test,
        100.0 * experts.found,
        100.0 * of_layers().fold(1.0, f64::min),
        100.0 * of_layers().fold(0.0, f64::max),
    );
    if let Some(limit) = experts.limit_tok_s {
        line += &format!(
            "; a token brings {} over the bus of {:.0} GB/s, and {:.1} experts move. Memory and bus alone allow {:.0} tok/s: \
             {:.0} % of that were reached",
            human_bytes(experts.bus_bytes_per_token as u64),
            experts.bus_gb_s,
            experts.moved,
            limit,
            100.0 * row.tok_s / limit
        );
    }
    line
}

/// A model to measure.
struct BenchModel {
    name: String,
    /// What the codes of its layers are called.
    codes: String,
    checkpoint: Checkpoint,
    /// Adapters beside its weights.
    loras: Vec<Lora>,
}

/// The model, quantized at load if requested, or the preset; and adapters beside its weights.
fn open(args: &BenchArgs, global: &Global, terminal: &Terminal) -> anyhow::Result<BenchModel> {
    let Some(preset) = &args.preset else {
        let ToRun { model, beside } = model::open_to_run(args.model.as_deref(), global, terminal)?;
        let (checkpoint, schemes) = at_load::at_load(model.checkpoint, args.bits, terminal)?;
        model::note_growth(&checkpoint, terminal);
        let codes = match schemes {
            Some(schemes) => schemes.called(None),
            None => nq::called_in(&checkpoint)?,
        };
        let name = model.name;
        return Ok(BenchModel {
            name,
            codes,
            checkpoint,
            loras: beside,
        });
    };
    let all = preset.config().num_hidden_layers;
    let layers = args.layers.unwrap_or(all);
    if layers > all {
        let name = preset.name;
        bail!("--layers: expected at most the {all} of {name}, found {layers}");
    }
    let mut model = random(preset, layers, codes(args)?, args.simple, 0)?;
    if let Some(vision) = preset.vision().filter(|_| args.image.is_some()) {
        model.checkpoint = model.checkpoint.with_random_tower(vision, 0);
    }
    let Some(share) = args.alike else {
        return Ok(model);
    };
    let over = |store| Box::new(AlikeTokens { store, share }) as Box<dyn WeightStore>;
    Ok(BenchModel {
        name: format!("{}, tokens alike by {share}", model.name),
        checkpoint: model.checkpoint.over(over),
        ..model
    })
}

/// Random weights of a preset with so many layers.
fn random(
    preset: &Preset,
    layers: usize,
    codes: Option<Codes>,
    simple: bool,
    seed: u64,
) -> anyhow::Result<BenchModel> {
    let mut config = preset.config();
    let name = if layers == config.num_hidden_layers {
        format!("{} (random weights)", preset.name)
    } else {
        format!("{} of {layers} layers (random weights)", preset.name)
    };
    config.num_hidden_layers = layers;
    config.ngrams = config.ngrams.and_then(|table| table.within(layers));
    let Some(codes) = codes else {
        let checkpoint = synth::checkpoint(&name, &config, seed)?;
        let codes = nq::called_in(&checkpoint)?;
        return Ok(BenchModel {
            name,
            codes,
            checkpoint,
            loras: Vec::new(),
        });
    };
    let recipe = Recipe {
        simple,
        ..codes.into()
    };
    let (schemes, _) = recipe.schemes(&config)?;
    schemes.check(&config)?;
    let called = schemes.called(Some(codes.bits()));
    let scheme = move |name: &str| schemes.of(name);
    let checkpoint = synth::quantized_checkpoint(&name, &config, seed, scheme)?;
    Ok(BenchModel {
        name,
        codes: called,
        checkpoint,
        loras: Vec::new(),
    })
}

/// The codes that the flags ask for; `None` for unquantized weights.
fn codes(args: &BenchArgs) -> anyhow::Result<Option<Codes>> {
    Ok(match (args.trellis, args.bits) {
        (Some(codes), _) => Some(codes),
        (None, None | Some(16)) => None,
        (None, Some(n)) => Some(Bits::try_from(n)?.into()),
    })
}

fn parse_trellis(s: &str) -> Result<Codes, String> {
    let bits = s.parse().map_err(|_| "expected bits".to_owned())?;
    Codes::of_bits(bits, Some(Code::Octagon)).map_err(|e| e.to_string())
}

/// Measures the bandwidth of the memory that holds the model, as read by its device.
enum Meter {
    Cpu(Cpu, BandwidthBuffer),
    /// Different GPUs, which read a part of the model each, or one that reads all of it.
    Gpus(Vec<nq_load::gpu::GpuMeter>),
    Adapter(Box<nq_load::wgpu::AdapterMeter>),
}

impl Meter {
    /// Allocates its memory before the model is loaded.
    fn new(options: &LoadOptions) -> anyhow::Result<Self> {
        if options.engine == EngineKind::Nq {
            let ordinals = match Device::choose(options.device)? {
                Device::Cpu => BTreeSet::new(),
                Device::Cuda(n) => BTreeSet::from([n]),
                Device::Gpus(several) => several.as_slice().iter().copied().collect(),
                Device::Wgpu(n) => {
                    let meter = nq_load::wgpu::AdapterMeter::open(n)?;
                    return Ok(Meter::Adapter(Box::new(meter)));
                }
            };
            if !ordinals.is_empty() {
                let open = nq_load::gpu::GpuMeter::open;
                let meters = ordinals.into_iter().map(open).collect::<Result<_, _>>()?;
                return Ok(Meter::Gpus(meters));
            }
        }
        if let Some(available) = system::available_memory()
            && available < BANDWIDTH_BYTES as u64 * 5 / 4
        {
            bail!(
                "measuring the memory's bandwidth: expected {} of free memory, found {}",
                human_bytes(BANDWIDTH_BYTES as u64 * 5 / 4),
                human_bytes(available)
            );
        }
        let cpu = nq_cpu::open(options)?;
        let buffer = cpu.bandwidth_buffer(BANDWIDTH_BYTES);
        Ok(Meter::Cpu(cpu, buffer))
    }

    /// Median of a few passes, in 10^9 bytes per second.
    fn read_gb_s(&self) -> nq_evals::Result<f64> {
        match self {
            Meter::Cpu(cpu, buffer) => Ok(cpu.read_bandwidth(buffer).median / 1e9),
            Meter::Gpus(gpus) => {
                let each = gpus.iter().map(|gpu| gpu.read_bandwidth());
                Ok(each.sum::<nq_runtime::Result<f64>>()? / 1e9)
            }
            Meter::Adapter(adapter) => Ok(adapter.read_bandwidth()? / 1e9),
        }
    }

    /// Bytes of the last cache before that memory.
    fn cache_bytes(&self) -> anyhow::Result<u64> {
        Ok(match self {
            Meter::Cpu(..) => system::last_level_cache(),
            Meter::Gpus(gpus) => gpus.iter().map(|gpu| gpu.cache_bytes()).sum(),
            // No interface of `wgpu` tells.
            Meter::Adapter(_) => 0,
        })
    }
}

/// The path of chat, with output written as to a terminal, but not to one.
fn streaming(
    engine: &dyn Engine,
    tokenizer: &Tokenizer,
    sampling: &SamplingParams,
    spec: &BenchSpec,
    machine: Machine<'_>,
    progress: &dyn Progress,
) -> nq_evals::Result<BenchRow> {
    let mut sink: Box<dyn Write> = match OpenOptions::new().write(true).open("/dev/null") {
        Ok(file) => Box::new(file), // a system call for every piece, as in a pipe
        Err(_) => Box::new(std::io::sink()),
    };
    bench::streaming(
        engine,
        tokenizer,
        sampling,
        sink.as_mut(),
        spec,
        machine,
        progress,
    )
}

/// The table for people.
fn table(
    model: &BenchModel,
    engine: &dyn Engine,
    machine: Machine<'_>,
    rows: &[BenchRow],
) -> String {
    let d = engine.description();
    let mut out = format!(
        "{}: {}, {} of weights read per token\n\
         {d}\n\
         last-level cache {}; the memory's bandwidth was measured between the repeats\n\n\
         | test | depth | batch | tok/s | GB/s | of the memory's bandwidth | ms/token p50 | p99 | repeats |\n\
         |---|---:|---:|---:|---:|---:|---:|---:|---:|\n",
        model.name,
        model.codes,
        human_bytes(engine.bytes_per_token() as u64),
        human_bytes(machine.cache_bytes),
    );
    let mut notes = Vec::new();
    for r in rows {
        let share = match r.measurement_error {
            Some(_) => "measurement error".to_owned(),
            None => format!(
                "{:.1} % of {:.1}",
                100.0 * r.bandwidth_share,
                r.machine_gb_s
            ),
        };
        out.push_str(&format!(
            "| {}{} | {} | {} | {:.2}{} | {:.2} | {share} | {:.3} | {:.3} | {} |\n",
            r.test,
            r.drafts.as_ref().map_or("", |_| ", drafts"),
            r.depth,
            r.batch,
            r.tok_s,
            r.tok_s_std
                .map_or(String::new(), |std| format!(" ± {std:.2}")),
            r.gb_s,
            r.ms_per_token_p50,
            r.ms_per_token_p99,
            r.repeats
        ));
        if let (Some(overhead), Some(bare)) = (r.streaming_overhead, r.bare_tok_s) {
            notes.push(format!(
                "{}: sampling, detokenizing and writing add {:.1} % to the bare decode loop, which \
                 reached {bare:.2} tok/s between the repeats of this test",
                r.test,
                100.0 * overhead
            ));
        }
        notes.extend(r.drafts.as_ref().map(|d| text::line(&r.test, d)));
        notes.extend(r.image.as_ref().map(|times| image::line(&r.test, times)));
        notes.extend(r.note.iter().map(|n| format!("{}: {n}", r.test)));
    }
    for note in notes {
        out.push_str(&format!("\n{note}"));
    }
    for (row, b) in rows.iter().filter_map(|r| Some((r, r.breakdown.as_ref()?))) {
        out.push_str(&format!(
            "\n\n{}, one token: {:.1} us in {:.1} operations, timed one by one\n\n\
             | operation | calls/token | us/token | GB/s | of bandwidth | share |\n\
             |---|---:|---:|---:|---:|---:|\n",
            row.test, b.us_per_token, b.calls_per_token
        ));
        for o in &b.ops {
            out.push_str(&format!(
                "| {} | {:.2} | {:.2} | {:.2} | {:.1} % | {:.1} % |\n",
                o.op,
                o.calls_per_token,
                o.us_per_token,
                o.gb_s,
                100.0 * o.gb_s / row.machine_gb_s,
                100.0 * o.share
            ));
        }
        out.push_str(&format!(
            "| between operations | | {:.2} | | | {:.1} % |",
            b.other_us_per_token,
            100.0 * b.other_us_per_token / b.us_per_token
        ));
    }
    out
}
