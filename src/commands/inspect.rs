//! `nq inspect`: shows the contents of a checkpoint.

use crate::flags::Global;
use crate::model;
use crate::sight::SightBytes;
use crate::terminal::{Terminal, human_bytes, print_line, shortened};
use anyhow::bail;
use clap::Args;
use nq_answers::SightOptions;
use nq_cpu::state_bytes;
use nq_formats::gguf::GgufFile;
use nq_formats::left_over::{self, LeftOver};
use nq_formats::nq::{self, QuantizationRecord};
use nq_formats::{Checkpoint, Files, Scheme, Task, TensorEntry};
use nq_runtime::weights::held_otherwise;
use nq_runtime::{ChatTemplate, SamplingParams, Tokenizer, is_recurrent, tokenizer};
use nq_serve::about::{About, AboutTower};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::fmt::{self, Write};
use std::process::ExitCode;

/// Flags of `nq inspect`.
#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    /// demo, a folder, a file, a hub id or a name from `nq list`
    pub model: OsString,
    /// Also read every value of every parameter, the tokenizer and the chat template, fail if a value is not
    /// finite or anything else is wrong, and say what only running the model would show
    #[arg(long)]
    pub verify: bool,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
}

/// A model's page on the hub, and the key of GGUF files that says what it says of the licence.
const MODEL_CARD: &str = "README.md";
const GGUF_LICENCE: &str = "general.license";

/// Most bytes of a licence or a model card in which the line is looked for.
const LONGEST_LICENCE: usize = 4096;

/// Most characters of a name in the table; `--json` has all of it.
const LONGEST_NAME: usize = 100;

/// The output of `nq inspect --json`.
#[derive(Serialize)]
struct Report {
    name: String,
    source: String,
    format: String,
    /// What the codes are called, such as `4-bit mix`; null for formats of other programs.
    codes: Option<String>,
    /// Most positions of a sequence.
    context: usize,
    /// What the chat template knows; null without one, or if it cannot be read, which `--verify` reports.
    template: Option<TemplateReport>,
    /// The first line of the licence, and its file.
    licence: Option<String>,
    task: &'static str,
    parameters: usize,
    tensor_bytes: u64,
    file_bytes: u64,
    bits_per_weight: f64,
    /// What it sees images with, and the memory that this takes; null for a model that reads text alone.
    vision: Option<VisionReport>,
    config: Map<String, Value>,
    quantization: Option<Value>,
    verified: bool,
    /// What `--verify` has not checked.
    not_checked: &'static [&'static str],
    left_over: Vec<LeftOver>,
    tensors: Vec<TensorRow>,
}

/// What a chat template knows.
#[derive(Serialize)]
struct TemplateReport {
    tools: bool,
    switches_thinking: bool,
}

/// What a model sees images with.
#[derive(Serialize)]
struct VisionReport {
    #[serde(flatten, serialize_with = "described")]
    tower: AboutTower,
    /// With the options that commands have by default.
    memory: SightBytes,
}

/// A tower as servers describe it.
fn described<S: Serializer>(tower: &AboutTower, serializer: S) -> Result<S::Ok, S::Error> {
    tower.json().serialize(serializer)
}

/// One stored tensor.
#[derive(Serialize)]
struct TensorRow {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    /// Bits per element, or per code if several share a byte.
    bits: f64,
    tensor_bytes: u64,
    file: String,
}

/// Runs `nq inspect`.
pub fn run(args: &InspectArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let opened = model::open(Some(&args.model), global, &Terminal::new())?;
    let checkpoint = &opened.checkpoint;
    if args.verify {
        verify(checkpoint)?;
    }
    let record = nq::record(checkpoint)?;
    let template = ChatTemplate::find(checkpoint.files()).ok().flatten();
    let context = checkpoint.config().longest_context();
    let about = About::of(checkpoint, &opened.name, template.as_ref(), context);
    let row = |e: TensorEntry| row(e, record.as_ref());
    let memory = SightBytes::plan(checkpoint, &global.load_options(), &SightOptions::default())?;
    let vision = about
        .tower
        .zip(memory)
        .map(|(tower, memory)| VisionReport { tower, memory });
    let report = Report {
        name: opened.name,
        source: opened.source,
        format: checkpoint.store().format().into(),
        codes: about.codes,
        context: about.context,
        template: template.map(|_| TemplateReport {
            tools: about.tools,
            switches_thinking: about.switches_thinking,
        }),
        licence: licence(checkpoint)?,
        task: checkpoint.task().name(),
        parameters: checkpoint.config().parameters(),
        tensor_bytes: checkpoint.tensor_bytes(),
        file_bytes: checkpoint.store().file_bytes(),
        bits_per_weight: checkpoint.bits_per_weight(),
        vision,
        config: nq_formats::config::to_json(checkpoint.config()),
        quantization: checkpoint.store().quantization().cloned(),
        verified: args.verify,
        not_checked: if args.verify { &NOT_CHECKED } else { &[] },
        left_over: checkpoint.left_over().to_vec(),
        tensors: checkpoint.store().entries().into_iter().map(row).collect(),
    };
    if global.json {
        print_line(&serde_json::to_string_pretty(&report)?)?;
    } else {
        let mut text = String::new();
        describe(
            &mut text,
            &report,
            checkpoint,
            record.as_ref(),
            args.tensors,
        )?;
        print_line(text.trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What [`verify`] does not look at.
const NOT_CHECKED: [&str; 3] = [
    "whether sums and products of the values stay finite (nq eval computes them)",
    "whether the chat template renders every chat",
    "whether the values are those that were published (nq eval --against compares with a source)",
];

/// Reads every value, the tokenizer and the chat template, and makes tokens of a text and a text of them.
fn verify(checkpoint: &Checkpoint) -> anyhow::Result<()> {
    nq::verify_values(checkpoint)?;
    let files = checkpoint.files();
    let tokenizer = Tokenizer::from_files(files)?;
    tokenizer.check_vocab(checkpoint.config().vocab_size)?;
    let text = "Every letter counts: 1, 2, 3.\n";
    let read = tokenizer.decode(&tokenizer.encode(text)?, false);
    if read != text {
        let path = files.path(tokenizer::TOKENIZER_FILE);
        bail!(
            "{}: expected tokens of {text:?}, found those of {read:?}",
            path.display()
        );
    }
    ChatTemplate::find(files)?;
    model::sampling(checkpoint)?;
    Ok(())
}

fn row(e: TensorEntry, record: Option<&QuantizationRecord>) -> TensorRow {
    let elements: usize = e.shape.iter().product();
    let parameter = e
        .name
        .strip_suffix(".codes")
        .or(e.name.strip_suffix(".zeros"));
    let bits = match parameter.and_then(|p| record?.scheme(p)) {
        Some(scheme) => f64::from(scheme.scheme.bits()),
        None => 8.0 * e.bytes as f64 / elements.max(1) as f64,
    };
    TensorRow {
        name: e.name,
        dtype: e.dtype,
        shape: e.shape,
        bits,
        tensor_bytes: e.bytes,
        file: e.file,
    }
}

/// The parts that only models with several residual streams have.
fn describe_streams(out: &mut String, c: &nq_model::ModelConfig) -> fmt::Result {
    if let Some(h) = c.hyper {
        let (streams, rank) = (h.streams, h.rank);
        writeln!(
            out,
            "  residual         {streams} streams, weighed by matrices of rank {rank}"
        )?;
    }
    if let Some(i) = c.indexer {
        writeln!(
            out,
            "  sparse attention to {} positions in blocks of {}, chosen by {} heads of {}",
            i.budget, i.block, i.heads, i.head_dim
        )?;
    }
    if let Some(n) = &c.ngrams {
        let layers: Vec<String> = n.layers.iter().map(usize::to_string).collect();
        let elements: usize = n.parameters().map(|(_, shape)| shape.elements()).sum();
        writeln!(
            out,
            "  n-grams          of up to {} tokens in layers {}; {elements} of the parameters, read by rows",
            n.longest,
            layers.join(", ")
        )?;
    }
    Ok(())
}

/// The report for people.
fn describe(
    out: &mut String,
    report: &Report,
    checkpoint: &Checkpoint,
    record: Option<&QuantizationRecord>,
    tensors: bool,
) -> fmt::Result {
    let c = checkpoint.config();
    writeln!(out, "{} ({})", report.name, report.source)?;
    describe_use(out, checkpoint, report)?;
    match &report.codes {
        Some(codes) => writeln!(out, "  format           {}, {codes}", report.format)?,
        None => writeln!(out, "  format           {}", report.format)?,
    }
    writeln!(
        out,
        "  model            {} layers, hidden {}, MLP {}, {} heads of {} ({} key/value), \
         vocabulary {}, {} head",
        c.num_hidden_layers,
        c.hidden_size,
        c.mlp_width(),
        c.num_attention_heads,
        c.head_dim,
        c.num_key_value_heads,
        c.vocab_size,
        if c.tie_word_embeddings {
            "tied"
        } else {
            "untied"
        }
    )?;
    match checkpoint.task() {
        Task::Generate => {}
        Task::Embed(_) => writeln!(out, "  task             embeddings of a text's last token")?,
        Task::Rerank => writeln!(out, "  task             scores of documents")?,
    }
    if let Some(e) = c.experts {
        let weights = if e.normalized {
            "whose weights are made to sum to 1"
        } else {
            "whose weights are those of a softmax over all"
        };
        writeln!(
            out,
            "  experts          {} of {} a token, {weights}, each of width {}",
            e.per_token, e.count, e.width
        )?;
        if e.shared > 0 {
            writeln!(out, "  shared expert    of width {}", e.shared)?;
        }
    }
    if let Some(d) = c.delta {
        let layers = c.layers().filter(|l| is_recurrent(l)).count();
        writeln!(
            out,
            "  recurrences      in {layers} layers, {} value heads of {}, {} key heads of {}; {} of state a sequence",
            d.value_heads,
            d.value_dim,
            d.key_heads,
            d.key_dim,
            human_bytes(state_bytes(c) as u64)
        )?;
    }
    describe_streams(out, c)?;
    if c.mtp_layers > 0 {
        let mtp = c.parameters() - c.trunk_parameters();
        writeln!(
            out,
            "  MTP layer        {mtp} of the parameters; only drafts need it"
        )?;
    }
    if let Some(VisionReport { tower, memory }) = &report.vision {
        let (t, side) = (&tower.config, tower.token_side());
        writeln!(
            out,
            "  tower            {} blocks, hidden {}, {} heads of {}; {} parameters ({})",
            t.depth,
            t.hidden_size,
            t.num_heads,
            t.head_dim(),
            tower.parameters(),
            human_bytes(tower.bytes)
        )?;
        writeln!(
            out,
            "  images           {} to {} tokens, one for {side} x {side} pixels",
            tower.least_tokens(),
            tower.most_tokens
        )?;
        writeln!(out, "  memory           {memory}")?;
    }
    writeln!(out, "  parameters       {}", report.parameters)?;
    if c.experts.is_some() {
        writeln!(out, "  of each token    {}", c.active_parameters())?;
    }
    writeln!(
        out,
        "  tensors          {} ({})",
        report.tensor_bytes,
        human_bytes(report.tensor_bytes)
    )?;
    writeln!(
        out,
        "  files            {} ({})",
        report.file_bytes,
        human_bytes(report.file_bytes)
    )?;
    writeln!(out, "  bits per weight  {:.4}", report.bits_per_weight)?;
    if report.verified {
        let checked = "every value is finite; tokenizer and chat template can be read";
        writeln!(out, "  verified         {checked}")?;
    }
    for what in report.not_checked {
        writeln!(out, "  not checked      {what}")?;
    }
    for line in left_over::lines(&report.left_over) {
        writeln!(out, "  not used         {line}")?;
    }
    let (config, store) = (checkpoint.config(), checkpoint.store());
    if let Some(held) = held_otherwise(config, store, Scheme::held_on_gpu) {
        writeln!(out, "  on a GPU         {}", held.join(", "))?;
    } else if let Some(bytes) = model::quantized_on_gpu(checkpoint) {
        writeln!(out, "  on a GPU         {} of weights", human_bytes(bytes))?;
    }
    if let Some(record) = record {
        describe_record(out, record)?;
    }
    match tensors {
        true => {
            writeln!(out)?;
            describe_tensors(out, report)
        }
        false => writeln!(
            out,
            "  in the files     {} tensors (--tensors lists them)",
            report.tensors.len()
        ),
    }
}

/// What a user asks first: context, chat template, sampling and licence.
fn describe_use(out: &mut String, checkpoint: &Checkpoint, report: &Report) -> fmt::Result {
    writeln!(out, "  context          {} tokens", report.context)?;
    let template = match &report.template {
        Some(t) => {
            let knows = [
                (t.tools, "tools"),
                (t.switches_thinking, "thinking on and off"),
            ];
            let knows: Vec<&str> = knows
                .into_iter()
                .filter_map(|(on, what)| on.then_some(what))
                .collect();
            match &knows[..] {
                [] => "yes".to_owned(),
                some => format!("yes, knows {}", some.join(" and ")),
            }
        }
        None => "none: it continues texts (--raw)".into(),
    };
    writeln!(out, "  chat template    {template}")?;
    let s = SamplingParams::from_defaults(checkpoint.generation());
    let sampling = match s.is_greedy() {
        true => "the best token each time".to_owned(),
        false => {
            let mut said = s.words();
            if s.temperature == 1.0 {
                said.insert(0, "temperature 1".into());
            }
            said.join(", ")
        }
    };
    writeln!(out, "  sampling         {sampling}")?;
    let licence = report.licence.as_deref().unwrap_or("none among the files");
    writeln!(out, "  licence          {licence}")
}

/// The model's licence, and what says it: the first line of a file LICENSE, the head of a model card, or a GGUF file's key.
fn licence(checkpoint: &Checkpoint) -> nq_formats::Result<Option<String>> {
    let said = |line: Option<&str>, by: &str| {
        let line = shortened(line.unwrap_or("empty"), LONGEST_NAME);
        Ok(Some(format!("{line} ({by})")))
    };
    let gguf = checkpoint.store().gguf_file();
    if let Some((path, folder)) = gguf.and_then(|path| Some((path, path.parent()?))) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let file = GgufFile::parse(path, Files::Folder(folder.into()).require(&name)?)?;
        return match file.str(GGUF_LICENCE)? {
            Some(licence) => said(Some(licence), GGUF_LICENCE),
            None => Ok(None),
        };
    }
    let files = checkpoint.files();
    let names = files.names()?;
    let start = |name: &str| -> nq_formats::Result<String> {
        let text = files.require(name)?;
        Ok(String::from_utf8_lossy(&text[..text.len().min(LONGEST_LICENCE)]).into_owned())
    };
    if let Some(name) = names.iter().find(|n| n.starts_with("LICENSE")) {
        let text = start(name)?;
        return said(text.lines().map(str::trim).find(|l| !l.is_empty()), name);
    }
    if !names.iter().any(|n| n == MODEL_CARD) {
        return Ok(None);
    }
    let text = start(MODEL_CARD)?;
    let mut head = text.lines().skip_while(|l| *l != "---").skip(1);
    match head.find_map(|l| l.strip_prefix("license:")) {
        Some(licence) => said(Some(licence.trim()), MODEL_CARD),
        None => Ok(None),
    }
}

/// The table of tensors, which may be long.
fn describe_tensors(out: &mut String, report: &Report) -> fmt::Result {
    let shapes: Vec<String> = report
        .tensors
        .iter()
        .map(|t| format!("{:?}", t.shape))
        .collect();
    let names: Vec<_> = report
        .tensors
        .iter()
        .map(|t| shortened(&t.name, LONGEST_NAME))
        .collect();
    let width = |items: &mut dyn Iterator<Item = &str>, least: usize| {
        let longest = items.map(|i| i.chars().count()).max();
        longest.unwrap_or(0).clamp(least, LONGEST_NAME)
    };
    let name = width(&mut names.iter().map(|n| &**n), 6);
    let shape = width(&mut shapes.iter().map(String::as_str), 5);
    let dtype = width(&mut report.tensors.iter().map(|t| t.dtype.as_str()), 5);
    writeln!(
        out,
        "{:name$}  {:dtype$}  {:>shape$}  {:>7}  {:>12}  FILE",
        "TENSOR", "DTYPE", "SHAPE", "BITS", "BYTES"
    )?;
    for ((t, dims), shown) in report.tensors.iter().zip(&shapes).zip(&names) {
        writeln!(
            out,
            "{shown:name$}  {:dtype$}  {dims:>shape$}  {:>7.4}  {:>12}  {}",
            t.dtype, t.bits, t.tensor_bytes, t.file
        )?;
    }
    Ok(())
}

fn describe_record(out: &mut String, record: &QuantizationRecord) -> fmt::Result {
    let scheme = |s: &Option<nq::TensorScheme>| match s {
        Some(s) => s.to_string(),
        None => "unquantized".into(),
    };
    writeln!(out, "  method           {}", record.method)?;
    writeln!(out, "  layers' linears  {}", scheme(&record.linears))?;
    for (name, s) in &record.overrides {
        writeln!(out, "  {name}: {}", scheme(s))?;
    }
    let source = &record.source;
    writeln!(out, "  source           {} {}", source.name, source.sha256)?;
    if let Some(c) = &record.calibration {
        writeln!(
            out,
            "  calibration      {}, {} tokens, sha256 {}",
            c.name, c.tokens, c.sha256
        )?;
    }
    for fallback in &record.fallbacks {
        writeln!(out, "  fallback         {fallback}")?;
    }
    match &record.quality {
        None => writeln!(out, "  quality          not measured")?,
        Some(q) => {
            let number = |pointer: &str| q.pointer(pointer).and_then(Value::as_f64);
            let said: Vec<String> = [
                number("/kld/mean").map(|v| format!("KL divergence {v:.5}")),
                number("/same_top1").map(|v| format!("same best token {:.2} %", 100.0 * v)),
                number("/ppl").map(|v| format!("perplexity {v:.3}")),
                number("/ppl_ref").map(|v| format!("of the source {v:.3}")),
            ]
            .into_iter()
            .flatten()
            .collect();
            writeln!(out, "  quality          {}", said.join(", "))?;
            if let (Some(text), Some(tokens)) =
                (q.get("text").and_then(Value::as_str), q.get("tokens"))
            {
                writeln!(out, "                   on {tokens} tokens of {text}")?;
            }
        }
    }
    Ok(())
}
