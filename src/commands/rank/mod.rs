//! `nq rank`: which file of a model is closest to its source at its size.

mod kept;
mod tasks;

use super::eval::{USUAL_WIDTH, blocks, check_output, command_line, date, score_threads};
use crate::at_load;
use crate::flags::{Global, conflict, parse_size};
use crate::machine;
use crate::model::{self, FoundModel};
use crate::names::cache_dir;
use crate::system;
use crate::terminal::{Terminal, human_bytes, print_line, width};
use crate::texts::{self, Text};
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use kept::RankCache;
use nq_answers::{ChatInput, ModelText};
use nq_evals::rank::{
    Answers, FileFacts, FileFigures, KINDS, PROTOCOL, RankedFile, Ranking, SourceFigures,
    TaskAnswers, TaskFigures, TextFigures, WINDOWS, equal_tokens, greedy_answers, mark_frontier,
    prompts, text_spec,
};
use nq_evals::render::{self, DocumentForm, frontier_line, kld_cell, ranking_tables};
use nq_evals::{Error, EvalSpec, KldStats, Record, RecordModel, ReferenceLogits};
use nq_formats::hash::{combined_sha256, sha256_hex};
use nq_formats::{Progress, nq};
use nq_load::{device::Device, stepper};
use nq_model::ModelConfig;
use nq_quantize::Streamed;
use nq_runtime::{ActivationChoice, Engine, KvType, LoadOptions, Message, SessionSpec};
use std::borrow::Cow;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use tasks::answer_tasks;

/// Flags of `nq rank`.
#[derive(Args, Debug)]
pub(crate) struct RankArgs {
    /// The unquantized model: demo, a folder, a file, a hub id or a name from `nq list`
    pub source: OsString,
    /// Its quantized files: folders, GGUF files, hub ids, names from `nq list`
    pub files: Vec<OsString>,
    /// Further files, one a line; lines that begin with # are skipped
    #[arg(long, value_name = "FILE")]
    pub list: Option<PathBuf>,
    /// Order of the files
    #[arg(long, value_enum, default_value_t = SortArg::Size)]
    pub sort: SortArg,
    /// Another text than the protocol's: a file, or wikitext2 for WikiText-2 from the hub
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Most windows of the text, of 1,024 tokens each
    #[arg(long, value_name = "N", default_value_t = WINDOWS, value_parser = parse_windows)]
    pub windows: usize,
    /// Most that is kept on disk from this and earlier runs, which is mostly sources' log-probabilities
    #[arg(long, value_name = "SIZE", default_value = "12GB", value_parser = parse_size)]
    pub keep: u64,
    /// Run the source layer by layer, as is done on a CPU where it does not fit the memory: answers are then left out
    #[arg(long)]
    pub layer_by_layer: bool,
    /// Write a report as self-contained .html
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Write the figures, with the machine and hashes of the files, to this file, for others to use
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
}

/// Orders of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortArg {
    /// The smallest first
    Size,
    /// The closest to the source first
    Kld,
}

/// Most windows that can be asked for: the tokens of as many are kept in memory.
const MOST_WINDOWS: usize = 4096;

/// Rows that a GPU passes through a layer at once, where the source is run layer by layer.
const STREAMED_ROWS: usize = 4096;

/// Bytes of text read for a window: more than its tokens have.
const WINDOW_BYTES: usize = 16 << 10;

fn parse_windows(s: &str) -> Result<usize, String> {
    let n = s.parse().ok().filter(|n| (1..=MOST_WINDOWS).contains(n));
    n.ok_or_else(|| format!("expected 1 to {MOST_WINDOWS}"))
}

/// A model that was found, before it is loaded.
struct Opened {
    model: FoundModel,
    text: ModelText,
    facts: FileFacts,
    recorded: RecordModel,
    /// What results depend on: its weights, its configuration, and how it is loaded.
    key: String,
    options: LoadOptions,
}

impl Opened {
    fn new(model: FoundModel, options: LoadOptions, terminal: &Terminal) -> anyhow::Result<Self> {
        model::check_writes(&model)?;
        let checkpoint = &model.checkpoint;
        let codes = nq::called_in(checkpoint)?;
        let recorded = machine::record_model(&model.name, &codes, checkpoint, terminal)?;
        let facts = FileFacts {
            name: model.name.clone(),
            source: model.source.clone(),
            sha256: combined_sha256(&recorded.files),
            format: checkpoint.store().format().into(),
            bytes: checkpoint.tensor_bytes(),
            parts: checkpoint.part_bytes(),
            bits_per_weight: checkpoint.bits_per_weight(),
        };
        let config = serde_json::to_string(&nq_formats::config::to_json(checkpoint.config()))?;
        // Neither the number of threads nor where they run changes a result.
        let mut how = options;
        (how.threads, how.pin) = (None, false);
        let key = format!(
            "{PROTOCOL}\nnq {}\nweights {}\n{config}\n{} {how:?}",
            env!("CARGO_PKG_VERSION"),
            facts.sha256,
            Device::choose(options.device)?
        );
        Ok(Opened {
            text: ModelText::open(checkpoint)?,
            facts,
            recorded,
            key,
            options,
            model,
        })
    }

    fn config(&self) -> &ModelConfig {
        self.model.checkpoint.config()
    }

    /// Refuses a file of another model than `source`: the token ids of `texts` would mean something else.
    fn check_of(&self, source: &Opened, texts: &[RankText]) -> anyhow::Result<()> {
        let (found, expected) = (self.config().vocab_size, source.config().vocab_size);
        let (own, name) = (&self.facts.source, &source.facts.source);
        if found != expected {
            bail!(
                "{own}: expected a file of {name} with its vocabulary of {expected}, found {found}"
            );
        }
        for text in texts {
            if self.text.tokenizer().encode_whole(&text.text)? != text.tokens {
                let text = &text.spec.text;
                bail!(
                    "{own}: expected a file of {name}, found a tokenizer that reads the text {text:?} differently"
                );
            }
        }
        Ok(())
    }

    /// Fails if it does not fit the memory of a CPU; how much a GPU has left is found out by loading.
    fn check_memory(&self) -> anyhow::Result<()> {
        if Device::choose(self.options.device)? != Device::Cpu {
            return Ok(());
        }
        let checkpoint = &self.model.checkpoint;
        let memory = at_load::memory(checkpoint, None, &SessionSpec::of_one(1, 1))?;
        let how = "files are ranked one after the other, each as a whole";
        system::check_memory(memory.peak, how).with_context(|| self.facts.source.clone())
    }

    fn load(&self, terminal: &Terminal) -> anyhow::Result<Arc<dyn Engine>> {
        let checkpoint = &self.model.checkpoint;
        nq::verify_values(checkpoint)?;
        model::note_growth(checkpoint, terminal);
        self.check_memory()?;
        nq_load::load(self.config(), checkpoint.store(), &self.options, terminal)
            .with_context(|| self.facts.source.clone())
    }
}

/// A text and how it is measured.
struct RankText {
    text: Cow<'static, str>,
    tokens: Vec<u32>,
    spec: EvalSpec,
}

impl RankText {
    fn new(text: Text, source: &Opened, windows: usize) -> anyhow::Result<Self> {
        let Text { name, mut text } = text;
        let cut = text.floor_char_boundary(windows.saturating_mul(WINDOW_BYTES));
        if cut < text.len() {
            text = Cow::Owned(text[..cut].to_owned());
        }
        let tokens = source.text.tokenizer().encode_whole(&text)?;
        let positions = source.config().max_position_embeddings;
        Ok(RankText {
            spec: text_spec(&name, tokens.len(), positions, windows),
            tokens,
            text,
        })
    }

    /// The windows in which it is read.
    fn windows(&self) -> anyhow::Result<impl Iterator<Item = Vec<u32>>> {
        let windows = self.spec.windows(self.tokens.len())?;
        let all = self.tokens.chunks_exact(self.spec.ctx).take(windows);
        Ok(all.map(<[u32]>::to_vec))
    }

    /// What the source's log-probabilities depend on.
    fn key(&self, source: &Opened) -> String {
        let bytes: Vec<u8> = self.tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        let (key, tokens) = (&source.key, sha256_hex(&bytes));
        format!("{key}\ntokens {tokens}\n{:?}", self.spec)
    }
}

/// Runs `nq rank`.
pub(crate) fn run(args: &RankArgs, global: &Global) -> anyhow::Result<ExitCode> {
    if let Some(path) = &args.report {
        if DocumentForm::of(path).ok() != Some(DocumentForm::Html) {
            let found = path.display();
            let why = format!("report: expected a file that ends in .html, found {found}");
            return Err(conflict("rank", why));
        }
        check_output("report", path)?;
    }
    if let Some(path) = &args.record {
        check_output("--record", path)?;
    }
    let mut names = args.files.clone();
    if let Some(list) = &args.list {
        let text = texts::whole(list)?;
        let lines = text.lines().map(str::trim);
        let lines = lines.filter(|l| !l.is_empty() && !l.starts_with('#'));
        names.extend(lines.map(OsString::from));
    }
    if names.is_empty() {
        return Err(conflict("rank", "expected files to rank, found none"));
    }
    score_threads(global);
    let terminal = Terminal::new();
    // All are opened, and found to be of one model, before hours of work on the first one.
    let global = &global.without_adapters();
    let open = |name: &OsString, options| {
        let found = model::open(Some(name), global, &terminal)?;
        Opened::new(found, options, &terminal)
    };
    let exact = LoadOptions {
        activations: ActivationChoice::F32,
        ..global.load_options()
    };
    let mut source = open(&args.source, exact)?;
    if source.model.checkpoint.store().quantization().is_some() {
        terminal.note(&format!(
            "{} is quantized itself ({}): divergences are from it, not from what it was made of",
            source.facts.source, source.recorded.codes
        ));
    }
    let too_large = source.check_memory().err();
    let layer_by_layer = args.layer_by_layer || too_large.is_some();
    if let Some(why) = too_large.filter(|_| !args.layer_by_layer) {
        terminal.note(&format!("{why:#}"));
    }
    if layer_by_layer {
        source.key += "\nlayer by layer";
        terminal.note(&format!(
            "{} is run layer by layer: its answers, calls and JSON are left out",
            source.facts.source
        ));
    }
    let texts = read_texts(args, global, &source, &terminal)?;
    let mut files = Vec::new();
    for name in &names {
        let file = open(name, global.load_options())?;
        file.check_of(&source, &texts)?;
        files.push(file);
    }
    tell_apart(&mut files);
    let bench = Workbench {
        kept: RankCache::open(cache_dir()?.join("rank"), args.keep)?,
        source,
        layer_by_layer,
        texts,
        terminal,
    };
    let ranking = bench.rank(&files, args)?;
    print(&ranking, global.json)?;
    if let Some(path) = &args.report {
        render::write_ranking(path, &ranking)?;
        let note = format!("report written to {}", path.display());
        bench.terminal.note(&note);
    }
    if let Some(path) = &args.record {
        machine::write_record(path, &record(&ranking, &bench.source, &files)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The text of the protocol or another, then those of several kinds.
fn read_texts(
    args: &RankArgs,
    global: &Global,
    source: &Opened,
    terminal: &Terminal,
) -> anyhow::Result<Vec<RankText>> {
    let bytes = args.text.as_ref().map(|_| args.windows * WINDOW_BYTES);
    let text = texts::load(args.text.as_deref(), bytes, global.offline, terminal)?;
    let mut texts = vec![RankText::new(text, source, args.windows)?];
    for (name, text) in KINDS {
        let (name, text) = (name.to_owned(), text.into());
        texts.push(RankText::new(Text { name, text }, source, 1)?);
    }
    Ok(texts)
}

/// Names files by where they are from if two have the same name.
fn tell_apart(files: &mut [Opened]) {
    let names: Vec<String> = files.iter().map(|f| f.facts.name.clone()).collect();
    for file in files {
        if names.iter().filter(|n| **n == file.facts.name).count() > 1 {
            file.facts.name.clone_from(&file.facts.source);
        }
    }
}

/// What the files of a run share.
struct Workbench {
    kept: RankCache,
    source: Opened,
    /// Whether the source is run layer by layer.
    layer_by_layer: bool,
    texts: Vec<RankText>,
    terminal: Terminal,
}

/// The source's side of all comparisons.
struct Recorded {
    figures: SourceFigures,
    /// By text.
    logits: Vec<ReferenceLogits>,
    /// What all of it depends on.
    key: String,
}

impl Workbench {
    fn rank(&self, files: &[Opened], args: &RankArgs) -> anyhow::Result<Ranking> {
        let recorded = self.recorded()?;
        let mut ranked = Vec::new();
        for (i, file) in files.iter().enumerate() {
            let at = format!("{} of {}: {}", i + 1, files.len(), file.facts.name);
            let key = format!("{}\nfile\n{}", recorded.key, file.key);
            let kept: Option<FileFigures> = self.kept.read(&key, &self.terminal);
            let earlier = kept.as_ref().map_or("", |_| ", measured by an earlier run");
            self.terminal.note(&format!("{at}{earlier}"));
            let measured = || self.kept.keep(&key, self.measure(file, &recorded)?);
            ranked.push(RankedFile {
                facts: file.facts.clone(),
                frontier: false,
                figures: kept.map_or_else(measured, Ok)?,
            });
        }
        mark_frontier(&mut ranked);
        ranked.sort_by(|a, b| match args.sort {
            SortArg::Size => a.facts.bytes.cmp(&b.facts.bytes),
            SortArg::Kld => a.kld().total_cmp(&b.kld()),
        });
        Ok(Ranking {
            protocol: PROTOCOL.into(),
            standard: args.text.is_none() && args.windows == WINDOWS,
            program: format!("nq {}", env!("CARGO_PKG_VERSION")),
            command: command_line(),
            date: date(),
            source: self.source.facts.clone(),
            source_engine: recorded.figures.engine,
            floor: recorded.figures.floor,
            files: ranked,
        })
    }

    /// The source's log-probabilities, floor and answers, of which only those are computed that no earlier run kept.
    fn recorded(&self) -> anyhow::Result<Recorded> {
        let keys: Vec<String> = self.texts.iter().map(|t| t.key(&self.source)).collect();
        let prompts = self.prompts()?;
        let key = sha256_hex(format!("{keys:?}{prompts:?}").as_bytes());
        let key = format!("{}\ntexts and prompts {key}", self.source.key);
        let mut engine = None;
        let mut logits = Vec::new();
        for (text, key) in self.texts.iter().zip(&keys) {
            logits.push(self.logits(text, key, &mut engine)?);
        }
        let kept: Option<SourceFigures> = self.kept.read(&key, &self.terminal);
        let figures = match kept.filter(|figures| figures.answer(&prompts)) {
            Some(figures) => figures,
            None => {
                let engine = self.engine(&mut engine)?;
                let figures = self.source_figures(engine, &logits, &prompts)?;
                self.kept.keep(&key, figures)?
            }
        };
        Ok(Recorded {
            figures,
            logits,
            key,
        })
    }

    /// The source's engine, loaded by the first who needs it.
    fn engine<'e>(
        &self,
        engine: &'e mut Option<Arc<dyn Engine>>,
    ) -> anyhow::Result<&'e dyn Engine> {
        if engine.is_none() {
            *engine = Some(match self.layer_by_layer {
                true => self.streamed(&self.texts, KvType::F16)?,
                false => self.source.load(&self.terminal)?,
            });
        }
        engine.as_deref().context("the source was loaded")
    }

    /// The source run layer by layer over texts.
    fn streamed(&self, texts: &[RankText], kv: KvType) -> anyhow::Result<Arc<dyn Engine>> {
        let checkpoint = &self.source.model.checkpoint;
        let mut windows = Vec::new();
        for text in texts {
            windows.extend(text.windows()?);
        }
        nq::verify_values(checkpoint)?;
        let stepper = stepper(
            self.source.config(),
            &self.source.options,
            kv,
            STREAMED_ROWS,
        )?;
        let streamed = Streamed::new(stepper, checkpoint.store(), &windows, &self.terminal);
        Ok(Arc::new(
            streamed.with_context(|| self.source.facts.source.clone())?,
        ))
    }

    fn logits(
        &self,
        text: &RankText,
        key: &str,
        engine: &mut Option<Arc<dyn Engine>>,
    ) -> anyhow::Result<ReferenceLogits> {
        let path = self.kept.path(key, "logits");
        let vocab = self.source.config().vocab_size;
        let open = || ReferenceLogits::open(&path, key, &text.tokens, &text.spec, vocab);
        if path.exists() {
            match open() {
                Ok(logits) => {
                    self.kept.used(&path);
                    return Ok(logits);
                }
                Err(e @ Error::Kept { .. }) => {
                    self.terminal.note(&format!("{e}; computing them again"));
                }
                Err(e) => return Err(e.into()),
            }
        }
        let rows = text.spec.windows(text.tokens.len())? * text.spec.scored().len();
        self.kept.make_room(2 * (rows * vocab) as u64)?;
        let engine = self.engine(engine)?;
        let RankText { tokens, spec, .. } = text;
        ReferenceLogits::record_to(&path, key, engine, tokens, spec, &self.terminal)?;
        Ok(open()?)
    }

    /// Tokens of the protocol's prompts: as chats, or as they are for a model without a chat template. None for a source
    /// that is run layer by layer: each token of an answer would read all of it.
    fn prompts(&self) -> anyhow::Result<Vec<Vec<u32>>> {
        if self.layer_by_layer {
            return Ok(Vec::new());
        }
        let most = self.source.config().max_position_embeddings;
        let text = &self.source.text;
        let tokens = |prompt: &str| {
            if text.template().is_none() {
                return Ok(text.tokenizer().encode_whole(prompt)?);
            }
            let mut chat = ChatInput::default();
            chat.messages.push(Message::new("user", prompt));
            Ok(text.ask(chat, most)?.prompt.tokens)
        };
        prompts().map(tokens).collect()
    }

    fn source_figures(
        &self,
        engine: &dyn Engine,
        logits: &[ReferenceLogits],
        prompts: &[Vec<u32>],
    ) -> anyhow::Result<SourceFigures> {
        let mut floor = KldStats::default();
        // Layer by layer, keys and values are those of the run.
        let exact = match self.layer_by_layer {
            true => Some(self.streamed(&self.texts[1..], KvType::F32)?),
            false => None,
        };
        let otherwise = exact.as_deref().unwrap_or(engine);
        // The short texts tell it as well as the long one.
        for logits in &logits[1..] {
            let found = logits.floor(otherwise, &self.terminal)?;
            if found.mean > floor.mean {
                floor = found;
            }
        }
        Ok(SourceFigures {
            engine: engine.description().to_string(),
            floor,
            answers: match self.layer_by_layer {
                true => Vec::new(),
                false => greedy_answers(engine, prompts, self.source.text.stop(), &self.terminal)?,
            },
            tasks: match self.layer_by_layer {
                true => None,
                false => self.tasks(engine)?,
            },
        })
    }

    /// Calls and JSON as the model writes them, which is asked in the source's words.
    fn tasks(&self, engine: &dyn Engine) -> anyhow::Result<Option<TaskAnswers>> {
        let text = &self.source.text;
        let asked = || answer_tasks(engine, text, &self.terminal);
        text.template().map(|_| asked()).transpose()
    }

    fn measure(&self, file: &Opened, recorded: &Recorded) -> anyhow::Result<FileFigures> {
        let engine = &*file.load(&self.terminal)?;
        let compare = |logits: &ReferenceLogits| -> anyhow::Result<TextFigures> {
            let compared = logits.compare(engine, &self.terminal);
            Ok(compared.with_context(|| file.facts.source.clone())?.into())
        };
        let (text, kinds) = recorded.logits.split_first().context("there is a text")?;
        let answers = &recorded.figures.answers;
        Ok(FileFigures {
            engine: engine.description().to_string(),
            activations: engine.description().activations.clone(),
            text: compare(text)?,
            kinds: kinds.iter().map(compare).collect::<anyhow::Result<_>>()?,
            answers: match answers.is_empty() {
                true => None,
                false => Some(Answers::new(
                    answers,
                    equal_tokens(engine, answers, &self.terminal)?,
                )),
            },
            tasks: match &recorded.figures.tasks {
                Some(source) => (self.tasks(engine)?).map(|found| TaskFigures::new(&found, source)),
                None => None,
            },
        })
    }
}

/// What `--record` writes: the figures of the text, and of the others their means.
fn record(ranking: &Ranking, source: &Opened, files: &[Opened]) -> anyhow::Result<Record> {
    let by_name = |f: &RankedFile| files.iter().find(|o| o.facts.name == f.facts.name);
    let opened = ranking.files.iter().filter_map(by_name);
    let models = std::iter::once(source).chain(opened);
    let Some(first) = ranking.files.first() else {
        bail!("expected a file that was ranked, found none");
    };
    let report = &first.figures.text.report;
    let protocol = format!(
        "{}: {}, {} windows of {}",
        ranking.protocol, report.text, report.windows, report.ctx
    );
    let quality = ranking.files.iter().map(|f| f.figures.text.report.clone());
    Ok(Record {
        quality: quality.collect(),
        more: ranking.more()?,
        ..machine::record(protocol, models.map(|o| o.recorded.clone()).collect())
    })
}

fn print(ranking: &Ranking, json: bool) -> anyhow::Result<()> {
    if json {
        return Ok(print_line(&serde_json::to_string_pretty(ranking)?)?);
    }
    let source = &ranking.source;
    let mut lines = vec![format!(
        "{}: {}, KLD floor {}; {}{}",
        source.name,
        human_bytes(source.bytes),
        kld_cell(ranking.floor.mean),
        ranking.protocol,
        if ranking.standard {
            ""
        } else {
            ", with another text or number of windows"
        }
    )];
    for table in ranking_tables(ranking) {
        lines.push(format!("\n{}", table.title));
        let rows: Vec<Vec<String>> = std::iter::once(table.head).chain(table.rows).collect();
        lines.extend(blocks(&rows, width().unwrap_or(USUAL_WIDTH)));
    }
    lines.push(format!("\n{}", frontier_line(ranking)));
    Ok(print_line(&lines.join("\n"))?)
}
