//! `nq eval`: perplexity, and KL divergence against a reference.

pub(super) mod images;

use crate::adapters;
use crate::flags::{Global, arguments, conflict, parse_kv};
use crate::model::{self, FoundModel, ToRun};
use crate::terminal::{Terminal, human_bytes, shell_word, width};
use crate::texts::{self, Text};
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use images::{ChatReader, SeenBy, SeenTexts};
use nq_answers::SightOptions;
use nq_evals::render::{
    self, Document, Reference, Section, WorstLine, depth_kld_cell, errors_line, protocol_line,
    verdicts,
};
use nq_evals::{
    DepthBucket, EvalReport, EvalSpec, Evaluation, KldStats, Precision, Protocol, ReferenceLogits,
    SeenEvaluation, StandardErrors, WorstToken, compare, evaluate, self_noise,
};
use nq_formats::durable::check_writable;
use nq_formats::{Progress, nq};
use nq_load::device::Device;
use nq_runtime::{ActivationChoice, Engine, EngineDescription, KvType, LoadOptions, Tokenizer};
use serde::Serialize;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Flags of `nq eval`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct EvalArgs {
    /// One or more of: demo, a folder, a hub id, a name from `nq list` [default: Qwen/Qwen3-0.6B]
    pub models: Vec<OsString>,
    /// Compare with this model, token by token
    #[arg(long, value_name = "REF")]
    pub against: Option<OsString>,
    /// Text to evaluate on: a file, wikitext2 for WikiText-2 from the hub, or a .jsonl of chats, which may hold images
    /// [default: a text that is built in]
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Read only this many bytes of the text
    #[arg(long, value_name = "N")]
    pub text_bytes: Option<usize>,
    /// Window length in tokens [default: 2048 (hf) or 512 (llama), at most the model's]
    #[arg(long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Evaluate only the first N windows
    #[arg(long, value_name = "N")]
    pub windows: Option<usize>,
    /// How windows are cut and scored
    #[arg(long, value_enum, default_value_t = ProtocolArg::Hf)]
    pub protocol: ProtocolArg,
    /// Show the figures by position, in windows as long as the model and the text allow (at most 16,384 tokens)
    #[arg(long)]
    pub by_depth: bool,
    /// Bits of the KV cache: 8, 16 or 32
    #[arg(long, default_value = "16", value_parser = parse_kv)]
    pub kv: KvType,
    /// Write a report as .md or self-contained .html
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// Evaluation protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProtocolArg {
    /// Non-overlapping windows, every token but the first scored
    Hf,
    /// Windows of 512, the second half scored
    Llama,
}

impl From<ProtocolArg> for Protocol {
    fn from(arg: ProtocolArg) -> Self {
        match arg {
            ProtocolArg::Hf => Protocol::Hf,
            ProtocolArg::Llama => Protocol::Llama,
        }
    }
}

/// Windows of the self-noise measurement: enough for a floor.
const NOISE_WINDOWS: usize = 4;

/// Longest windows of `--by-depth`, unless `--ctx` says otherwise.
const DEEP: usize = 16_384;

/// Worst positions that reports list.
const WORST: usize = 10;

/// A loaded model.
struct EvalModel {
    model: FoundModel,
    engine: Arc<dyn Engine>,
    tokenizer: Tokenizer,
    /// How it reads chats, if they are measured.
    reader: Option<ChatReader>,
}

/// One model's results, for JSON and documents.
struct Outcome {
    name: String,
    bytes: u64,
    bits_per_weight: f64,
    description: EngineDescription,
    evaluation: Evaluation,
    worst: Vec<(WorstToken, WorstLine)>,
    self_noise: Option<KldStats>,
}

/// The JSON for a model: its report and settings.
#[derive(Serialize)]
struct Json<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<&'a str>,
    tensor_bytes: u64,
    bits_per_weight: f64,
    #[serde(flatten)]
    report: &'a EvalReport,
    errors: StandardErrors,
    #[serde(skip_serializing_if = "Option::is_none")]
    self_noise: Option<KldStats>,
    window_ppl: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    window_kld: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    by_depth: Vec<DepthBucket>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    worst_tokens: Vec<&'a WorstToken>,
}

/// Runs `nq eval`.
pub fn run(args: &EvalArgs, global: &Global) -> anyhow::Result<ExitCode> {
    if args.by_depth && args.protocol == ProtocolArg::Llama {
        let why =
            "--by-depth needs every position: --protocol llama scores the second half of a window";
        return Err(conflict("eval", why.to_owned()));
    }
    if let Some(path) = &args.report {
        if let Err(e) = render::DocumentForm::of(path) {
            return Err(conflict("eval", e.to_string()));
        }
        check_output("report", path)?; // before hours of work, not after
    }
    score_threads(global);
    let terminal = Terminal::new();
    // All are opened before hours of work on the first one.
    let names: Vec<Option<&OsStr>> = match args.models.as_slice() {
        [] => vec![None],
        names => names.iter().map(|n| Some(n.as_os_str())).collect(),
    };
    let open = |name| model::open_to_run(name, global, &terminal);
    // Adapters are for the models that are measured.
    let reference = |name| model::open_to_run(Some(name), &global.without_adapters(), &terminal);
    let against = args.against.as_deref().map(reference).transpose()?;
    let models = names
        .into_iter()
        .map(open)
        .collect::<anyhow::Result<Vec<_>>>()?;
    let jsonl = |path: &&Path| path.extension().is_some_and(|e| e == "jsonl");
    let chats = args.text.as_deref().filter(jsonl);
    if chats.is_some()
        && (args.by_depth || args.text_bytes.is_some() || args.protocol != ProtocolArg::Hf)
    {
        let why = "chats are measured whole: --by-depth, --text-bytes and --protocol are for texts, and --windows takes the first chats";
        return Err(conflict("eval", why.to_owned()));
    }
    let chats = chats
        .map(|path| SeenTexts::read(path, args.windows))
        .transpose()?;
    let text = match &chats {
        Some(chats) => chats.text(),
        None => texts::load(
            args.text.as_deref(),
            args.text_bytes,
            global.offline,
            &terminal,
        )?,
    };
    let load = |model, options: &LoadOptions| load(model, options, chats.is_some(), &terminal);
    let reference = match against {
        Some(model) => {
            // References are never rounded while loading.
            let options = LoadOptions {
                activations: ActivationChoice::F32,
                ..global.load_options()
            };
            Some(load(model, &options)?)
        }
        None => None,
    };
    let mut bench = Workbench {
        args,
        text,
        reference,
        recorded: None,
        noise: None,
        several: models.len() > 1,
        spec: None,
    };
    let mut outcomes = Vec::new();
    for model in models {
        let loaded = load(model, &global.load_options())?;
        outcomes.push(match &chats {
            Some(chats) => bench.measure_chats(chats, &loaded, &terminal)?,
            None => bench.measure(&loaded, &terminal)?,
        });
    }
    bench.print(&outcomes, global)?;
    if let Some(path) = &args.report {
        render::write(path, &bench.document(&outcomes))?;
        terminal.note(&format!("report written to {}", path.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Scores rows of logits, which rayon's threads do, on as many threads as models run on.
pub(super) fn score_threads(global: &Global) {
    if let Some(threads) = global.threads {
        // An existing pool is kept.
        let _ = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global();
    }
}

fn load(
    ToRun { model, beside }: ToRun,
    options: &LoadOptions,
    chats: bool,
    terminal: &Terminal,
) -> anyhow::Result<EvalModel> {
    model::check_writes(&model)?;
    let checkpoint = &model.checkpoint;
    let tokenizer = Tokenizer::from_files(checkpoint.files())?;
    tokenizer.check_vocab(checkpoint.config().vocab_size)?;
    // Devices differ in how NaN propagates; figures of such a model are meaningless on all of them.
    nq::verify_values(checkpoint)?;
    model::note_growth(checkpoint, terminal);
    let adapted = beside.first().map(|_| "adapters of a quantized model");
    let device = Device::for_model(options.device, checkpoint, adapted, terminal);
    let options = &LoadOptions { device, ..*options };
    let engine = adapters::load(checkpoint, &beside, options, terminal)
        .with_context(|| model.source.clone())?;
    let reader = chats.then(|| {
        let tokens = SightOptions::default().tokens;
        ChatReader::new(checkpoint, options, tokens, terminal)
    });
    let reader = reader.transpose()?;
    Ok(EvalModel {
        model,
        engine,
        tokenizer,
        reader,
    })
}

/// State that all models of a run share.
struct Workbench<'a> {
    args: &'a EvalArgs,
    text: Text,
    reference: Option<EvalModel>,
    /// The reference's log-probabilities, when several models are measured against it.
    recorded: Option<ReferenceLogits>,
    /// The reference's divergence from itself, which all models are shown beside.
    noise: Option<KldStats>,
    several: bool,
    /// Settings of the first model; the others must be measured alike.
    spec: Option<EvalSpec>,
}

impl Workbench<'_> {
    fn measure(&mut self, loaded: &EvalModel, terminal: &Terminal) -> anyhow::Result<Outcome> {
        let tokens = loaded.tokenizer.encode_whole(&self.text.text)?;
        if let Some(r) = &self.reference
            && r.tokenizer.encode_whole(&self.text.text)? != tokens
        {
            bail!(
                "{} and {} tokenize the text differently: their distributions cannot be compared",
                loaded.model.source,
                r.model.source
            );
        }
        let spec = self.spec(loaded, tokens.len(), terminal);
        let tokens = spec.begun(tokens, loaded.tokenizer.around());
        let name = || loaded.model.source.clone();
        let engine = loaded.engine.as_ref();
        let evaluation = match &self.reference {
            None => evaluate(engine, &tokens, &spec, terminal).with_context(name)?,
            Some(reference) => {
                if self.noise.is_none() {
                    let most = spec.max_windows.unwrap_or(NOISE_WINDOWS);
                    let few = EvalSpec {
                        max_windows: Some(most.min(NOISE_WINDOWS)),
                        ..spec.clone()
                    };
                    let engine = reference.engine.as_ref();
                    self.noise = Some(self_noise(engine, &tokens, &few, terminal)?);
                }
                if self.several && self.recorded.is_none() {
                    self.recorded = record(reference, &tokens, &spec, terminal)?;
                }
                match &self.recorded {
                    Some(recorded) => recorded.compare(engine, terminal).with_context(name)?,
                    None => compare(engine, reference.engine.as_ref(), &tokens, &spec, terminal)
                        .with_context(name)?,
                }
            }
        };
        Ok(Outcome::new(loaded, evaluation, &tokens, self.noise))
    }

    fn measure_chats(
        &mut self,
        chats: &SeenTexts,
        loaded: &EvalModel,
        terminal: &Terminal,
    ) -> anyhow::Result<Outcome> {
        let spec = match &self.spec {
            Some(spec) => spec,
            None => {
                let spec = chats.spec(loaded, self.args.ctx, self.args.kv)?;
                self.spec.insert(spec)
            }
        };
        let measure = |model, kv, reference, most| {
            chats.measure(SeenBy { model, kv }, reference, most, spec, terminal)
        };
        let side = |kv| self.reference.as_ref().map(|model| SeenBy { model, kv });
        if let (Some(reference), None) = (&self.reference, self.noise) {
            let found = measure(reference, spec.kv, side(KvType::F32), NOISE_WINDOWS)?;
            let against = found.evaluation.report.against;
            self.noise = Some(against.map_or_else(KldStats::default, |c| c.kld));
        }
        let seen = measure(loaded, spec.kv, side(spec.kv), usize::MAX);
        let SeenEvaluation { evaluation, tokens } =
            seen.with_context(|| loaded.model.source.clone())?;
        Ok(Outcome::new(loaded, evaluation, &tokens, self.noise))
    }

    /// The requested context or the protocol's, at most what the models were trained for.
    fn spec(&mut self, loaded: &EvalModel, tokens: usize, terminal: &Terminal) -> EvalSpec {
        if let Some(spec) = &self.spec {
            return spec.clone();
        }
        let protocol = Protocol::from(self.args.protocol);
        let ctx = self.args.ctx.unwrap_or_else(|| {
            let usual = match self.args.protocol {
                ProtocolArg::Hf if self.args.by_depth => DEEP.min(tokens),
                ProtocolArg::Hf => 2048,
                ProtocolArg::Llama => 512,
            };
            let limit = |l: &EvalModel| l.model.checkpoint.config().max_position_embeddings;
            let most = limit(loaded).min(self.reference.as_ref().map_or(usize::MAX, limit));
            if most < usual && !self.args.by_depth {
                terminal.note(&format!(
                    "windows of {most} tokens, the model's limit, instead of the usual {usual}: \
                     perplexities at other lengths do not compare"
                ));
            }
            usual.min(most)
        });
        let spec = EvalSpec {
            kv: self.args.kv,
            max_windows: self.args.windows,
            ..EvalSpec::new(protocol, ctx, self.text.name.clone())
        };
        self.spec = Some(spec.clone());
        spec
    }

    /// Prints JSON, as a list with one object per model, or the table.
    fn print(&self, outcomes: &[Outcome], global: &Global) -> anyhow::Result<()> {
        let document = self.document(outcomes);
        let reference = document.reference.as_ref();
        if global.json {
            let reference = reference.map(|r| r.name.as_str());
            let json: Vec<Json<'_>> = outcomes
                .iter()
                .map(|o| o.json(reference, self.args.by_depth))
                .collect();
            let text = serde_json::to_string_pretty(&json)?;
            return Ok(crate::terminal::print_line(&text)?);
        }
        let Some(first) = outcomes.first() else {
            return Ok(());
        };
        let mut lines = vec![
            format!("text      {}", self.text.name),
            format!("protocol  {}", protocol_line(&first.evaluation)),
        ];
        if let Some(r) = reference {
            let ppl = first
                .evaluation
                .report
                .against
                .as_ref()
                .map_or(0.0, |c| c.ppl_ref);
            lines.push(format!(
                "reference {}, {}, perplexity {ppl:.4}; KL divergence is KL(reference || model), nats per token",
                r.name,
                human_bytes(r.bytes)
            ));
        }
        if let Some(recorded) = &self.recorded
            && recorded.precision() == Precision::F16
        {
            lines.push("          kept as f16: divergences are good to 1e-6".to_owned());
        }
        lines.push(String::new());
        lines.extend(table(&document));
        lines.push(String::new());
        lines.extend(verdicts(&document));
        lines.push(String::new());
        lines.extend(errors_line(&document));
        if reference.is_some() {
            lines.push(LEGEND.to_owned());
        }
        if global.verbose {
            for o in outcomes.iter().filter(|o| !o.worst.is_empty()) {
                lines.push(format!("\nwhere {} strays most", o.name));
                for (_, w) in &o.worst {
                    let [text, reference, model] =
                        w.tokens().map(|(token, p)| format!("{token:?} {p}"));
                    lines.push(format!(
                        "  {:8.4}  {}:{}  ...{:?}: the text {text}, the reference {reference}, the model {model}",
                        w.kld, w.window, w.position, w.context,
                    ));
                }
            }
        }
        Ok(crate::terminal::print_line(&lines.join("\n"))?)
    }

    fn document<'o>(&self, outcomes: &'o [Outcome]) -> Document<'o> {
        Document {
            program: format!("nq {}", env!("CARGO_PKG_VERSION")),
            command: command_line(),
            date: date(),
            text: self.text.name.clone(),
            reference: self.reference.as_ref().map(|r| Reference {
                name: r.model.name.clone(),
                bytes: r.model.checkpoint.tensor_bytes(),
                bits_per_weight: r.model.checkpoint.bits_per_weight(),
            }),
            models: outcomes.iter().map(Outcome::section).collect(),
            by_depth: self.args.by_depth,
        }
    }
}

/// The time of now; empty for a clock past the year 9999, which has no date.
pub(super) fn date() -> String {
    let now = jiff::Timestamp::try_from(std::time::SystemTime::now());
    now.map_or_else(
        |_| String::new(),
        |now| {
            let now = now.to_zoned(jiff::tz::TimeZone::system());
            now.strftime("%Y-%m-%d %H:%M %Z").to_string()
        },
    )
}

/// The command line of this process, quoted for a shell.
pub(super) fn command_line() -> String {
    let words: Vec<String> = arguments()
        .map(|w| shell_word(&w.to_string_lossy()).into_owned())
        .collect();
    format!("nq {}", words.join(" "))
}

/// Checks, as far as possible beforehand, that `what`, a report or a record, can be written to `path`.
pub(super) fn check_output(what: &str, path: &Path) -> anyhow::Result<()> {
    let folder = match path.parent() {
        Some(p) if p != Path::new("") => p,
        _ => Path::new("."),
    };
    if path.is_dir() || !folder.is_dir() {
        bail!(
            "{what}: expected a file in a folder that exists, found {}",
            path.display()
        );
    }
    Ok(check_writable(folder)?)
}

/// Runs the reference once for several models, if its log-probabilities fit a quarter of
/// the free memory.
fn record(
    reference: &EvalModel,
    tokens: &[u32],
    spec: &EvalSpec,
    terminal: &Terminal,
) -> anyhow::Result<Option<ReferenceLogits>> {
    let limit = crate::system::available_memory().unwrap_or(0) / 4;
    match ReferenceLogits::record(reference.engine.as_ref(), tokens, spec, limit, terminal) {
        Ok(recorded) => Ok(Some(recorded)),
        Err(e @ nq_evals::Error::CacheTooLarge { .. }) => {
            terminal.note(&format!("{e}; running the reference again for every model"));
            Ok(None)
        }
        Err(e) => Err(e.into()),
    }
}

fn decode(w: &WorstToken, tokenizer: &Tokenizer) -> WorstLine {
    let one = |id| tokenizer.decode(&[id], false);
    WorstLine {
        kld: w.kld,
        window: w.window,
        position: w.position,
        context: tokenizer.decode(&w.context, false),
        target: one(w.target),
        reference_top: one(w.reference_top),
        model_top: one(w.model_top),
        target_p: w.target_p,
        reference_top_p: w.reference_top_p,
        model_top_p: w.model_top_p,
    }
}

impl Outcome {
    /// The results of a model on a text of these tokens.
    fn new(
        loaded: &EvalModel,
        evaluation: Evaluation,
        tokens: &[u32],
        self_noise: Option<KldStats>,
    ) -> Self {
        let worst = evaluation.worst(tokens, WORST).into_iter();
        let worst = worst.map(|w| {
            let line = decode(&w, &loaded.tokenizer);
            (w, line)
        });
        let checkpoint = &loaded.model.checkpoint;
        Outcome {
            name: loaded.model.name.clone(),
            bytes: checkpoint.tensor_bytes(),
            bits_per_weight: checkpoint.bits_per_weight(),
            description: loaded.engine.description().clone(),
            worst: worst.collect(),
            evaluation,
            self_noise,
        }
    }

    fn json<'a>(&'a self, reference: Option<&'a str>, by_depth: bool) -> Json<'a> {
        Json {
            model: &self.name,
            reference,
            tensor_bytes: self.bytes,
            bits_per_weight: self.bits_per_weight,
            report: &self.evaluation.report,
            errors: self.evaluation.errors(),
            self_noise: self.self_noise,
            window_ppl: self.evaluation.window_ppl(),
            window_kld: self.evaluation.window_kld(),
            by_depth: match by_depth {
                true => self.evaluation.by_depth(),
                false => Vec::new(),
            },
            worst_tokens: self.worst.iter().map(|(w, _)| w).collect(),
        }
    }

    fn section(&self) -> Section<'_> {
        Section {
            name: self.name.clone(),
            bytes: self.bytes,
            bits_per_weight: self.bits_per_weight,
            engine: self.description.to_string(),
            activations: self.description.activations.clone(),
            evaluation: &self.evaluation,
            worst: self.worst.iter().map(|(_, line)| line.clone()).collect(),
            self_noise: self.self_noise,
        }
    }
}

/// Explains the rows of a comparison whose names are not self-explanatory.
const LEGEND: &str = "\
KLD floor: mean KLD of the reference from itself, with its KV cache in f32 and, but for chats, the text fed in pieces of other sizes
RMS dp: root mean square of the change in the probability of the text's tokens";

/// The table, with figures as rows and models as columns, which is readable with several models.
fn table(document: &Document<'_>) -> Vec<String> {
    let (head, figures) = render::figures(document);
    // The source, which has few figures, is named above.
    let columns = 1 + document.models.len();
    let mut rows: Vec<Vec<String>> = [head].into_iter().chain(figures).collect();
    rows.iter_mut().for_each(|row| row.truncate(columns));
    if document.by_depth {
        let depths: Vec<Vec<DepthBucket>> = document
            .models
            .iter()
            .map(|m| m.evaluation.by_depth())
            .collect();
        let names = depths.first().into_iter().flatten().map(DepthBucket::name);
        let (mut kld, mut ppl) = (Vec::new(), Vec::new());
        for (i, name) in names.enumerate() {
            // Models of one run are measured alike.
            let row = |what: &str, cell: &dyn Fn(&DepthBucket) -> Option<String>| {
                let cells = depths.iter().map(|d| cell(&d[i]).unwrap_or_default());
                [format!("{what} at {name}")]
                    .into_iter()
                    .chain(cells)
                    .collect::<Vec<_>>()
            };
            kld.push(row("KLD", &|b| Some(depth_kld_cell(b.against.as_ref()?))));
            ppl.push(row("perplexity", &|b| {
                Some(format!("{:.4} ± {:.4}", b.ppl, b.ppl_se))
            }));
        }
        rows.extend(
            kld.into_iter()
                .filter(|row| row[1..].iter().any(|c| !c.is_empty())),
        );
        rows.extend(ppl);
    }

    blocks(&rows, width().unwrap_or(USUAL_WIDTH))
}

/// Assumed number of columns if the terminal does not say.
pub(super) const USUAL_WIDTH: usize = 100;

/// Formats rows with at most `most` columns of text: if the cells do not fit side by side, in blocks
/// below one another, each with the rows' names.
pub(super) fn blocks(rows: &[Vec<String>], most: usize) -> Vec<String> {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |c: usize| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut lines: Vec<String> = Vec::new();
    let mut from = 1;
    while from < columns {
        let mut to = from + 1;
        let mut used = widths[0] + 2 + widths[from];
        while to < columns && used + 2 + widths[to] <= most {
            used += 2 + widths[to];
            to += 1;
        }
        if from > 1 {
            lines.push(String::new());
        }
        for row in rows {
            let mut line = format!("{:<w$}", row[0], w = widths[0]);
            for (cell, w) in row[from..to].iter().zip(&widths[from..to]) {
                line.push_str(&format!("  {cell:>w$}"));
            }
            lines.push(line.trim_end().to_owned());
        }
        from = to;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::blocks;

    #[test]
    fn models_that_do_not_fit_stand_below() {
        let row = |cells: &[&str]| cells.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>();
        let rows = [
            row(&["", "one", "two", "three"]),
            row(&["KLD", "0.1", "0.25", "0"]),
        ];
        assert_eq!(
            blocks(&rows, 100),
            ["     one   two  three", "KLD  0.1  0.25      0"]
        );
        assert_eq!(
            blocks(&rows, 14),
            [
                "     one   two",
                "KLD  0.1  0.25",
                "",
                "     three",
                "KLD      0"
            ]
        );
        // Too narrow for any: one model per block.
        assert_eq!(blocks(&rows, 3).len(), 3 * 2 + 2);
    }
}
