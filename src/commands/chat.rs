//! `nq chat`: a conversation in the terminal, or a single answer for a script.

use crate::adapters;
use crate::at_load::{self, at_load, sight};
use crate::chat::Overflow;
use crate::chat::conversation::{ChatSettings, Conversation, LocalModel, Remote};
use crate::chat::input::thinking_switch;
use crate::chat::interrupt;
use crate::chat::piped::{self, StandardInput};
use crate::chat::printer::Thinking;
use crate::chat::repl::{Figures, Repl, Totals};
use crate::demo;
use crate::draft::{self, DraftFrom, DraftWeights};
use crate::flags::{Global, conflict, parse_kv, parse_load_bits};
use crate::heat;
use crate::library::Error;
use crate::model::{self, ToRun};
use crate::sight::SightBytes;
use crate::terminal::{Terminal, has_colours, human_bytes};
use anyhow::{Context, bail};
use clap::Args;
use nq_answers::{ModelText, SightOptions};
use nq_cpu::adapter_bytes;
use nq_formats::adapter::Lora;
use nq_formats::{Checkpoint, Progress};
use nq_load::device::Device;
use nq_model::ModelConfig;
use nq_quantize::schemes::Schemes;
use nq_runtime::{
    ChatTemplate, Engine, KvType, LoadOptions, SamplingChoices, SamplingParams, SessionSpec,
    Tokenizer,
};
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// Positions reserved by default.
const DEFAULT_CTX: usize = 8192;

/// Flags of `nq chat`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct ChatArgs {
    /// demo, a folder, a hub id or a name from `nq list` [default: the quantized Qwen3-0.6B]
    pub model: Option<OsString>,
    /// Talk to a model of the server at this address. MODEL is then its name there.
    /// NQ_API_KEY holds the key, if one is needed
    #[arg(
        long,
        value_name = "URL",
        conflicts_with_all = [
            "raw", "bits", "ctx", "kv", "draft", "on_overflow", "offline",
            "device", "split", "threads", "pin", "cpu-experts", "activations", "kernels", "isa",
        ]
    )]
    pub server: Option<String>,
    /// Answer this prompt and exit; piped text is appended to it, or is the prompt if there is
    /// no -p
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Like -p, with the text of this file
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    pub file: Option<PathBuf>,
    /// An image that goes with the prompt, or with the first message; may be given several times
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    pub image: Vec<PathBuf>,
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Turn thinking off
    #[arg(long)]
    pub no_think: bool,
    /// Do not show the thinking
    #[arg(long)]
    pub hide_thinking: bool,
    /// Continue the text without a chat template; control tokens such as <|im_start|> in it
    /// take effect
    #[arg(long, conflicts_with_all = ["system", "no_think", "hide_thinking"])]
    pub raw: bool,
    /// End an answer before this text; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = parse_stop)]
    pub stop: Vec<String>,
    /// Leave out the line of statistics after an answer
    #[arg(short, long)]
    pub quiet: bool,
    /// Quantize an unquantized model at load: 3, 4, 5, 6, 8 or 16 (keep it)
    #[arg(long, value_parser = parse_load_bits)]
    pub bits: Option<u32>,
    /// Softmax temperature; 0 is greedy [default: the model's]
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Keep this many best tokens; 0 keeps all [default: the model's]
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Keep the smallest set of tokens with this probability [default: the model's]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Drop tokens below this share of the best one's probability [default: the model's]
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Divide the logits of tokens already seen by this [default: the model's]
    #[arg(long, value_name = "R")]
    pub repetition_penalty: Option<f32>,
    /// Subtract this from the logit of a token for each time it was written [default: the
    /// model's]
    #[arg(long, value_name = "R")]
    pub frequency_penalty: Option<f32>,
    /// Subtract this from the logit of a token once if it was written [default: the model's]
    #[arg(long, value_name = "R")]
    pub presence_penalty: Option<f32>,
    /// Seed of the sampler [default: a random one, shown by -v]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Most tokens of one answer [default: as many as the context holds]
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Context length in tokens [default: the model's, at most 8192]
    #[arg(long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Bits of the KV cache: 8, 16 or 32
    #[arg(long, default_value = "16", value_parser = parse_kv)]
    pub kv: KvType,
    /// Speculative decoding, which speeds up answers: ngram, mtp, MODEL, eagle3:FOLDER or none. With ngram, drafts come
    /// from the text so far (prompt lookup); with mtp, from the layer that Qwen3.5 to 3.8 and Qwen3-Next have for it; with
    /// MODEL, from a smaller model with the same tokenizer; with eagle3, from an EAGLE-3 head made for the model; none
    /// turns it off [default: mtp or else ngram where answers stay exactly the same, as on CPUs; else none]
    #[arg(long, value_name = "FROM")]
    pub draft: Option<DraftFrom>,
    /// What to do when the context is full
    #[arg(long, value_enum, default_value_t = Overflow::Stop)]
    pub on_overflow: Overflow,
}

/// Runs `nq chat`: one answer to `-p` and piped text, otherwise a conversation.
pub fn run(args: &ChatArgs, global: &Global) -> anyhow::Result<ExitCode> {
    interrupt::install();
    // Read before the model is loaded: an empty prompt is reported at once.
    let question = question(args)?;
    let terminal = Terminal::new();
    if let Some(url) = &args.server {
        return remote(args, global, url, question, &terminal);
    }
    let ChatModel {
        name,
        checkpoint,
        schemes,
        loras,
    } = open(args, global, &terminal)?;
    let checkpoint = Arc::new(checkpoint);
    let drafts = args.draft.as_ref().map(|_| "drafts");
    let beside = drafts.or((!loras.is_empty()).then_some("adapters of a quantized model"));
    let global = &global.for_model(&checkpoint, beside, &terminal);
    let config = checkpoint.config();
    let sight = sight(&checkpoint, &global.load_options(), SightOptions::default());
    if let (Some(_), None) = (args.image.first(), &sight) {
        return Err(nq_answers::Error::Blind(name).into());
    }
    let sampling = sampling(args, model::sampling(&checkpoint)?)?;
    let ctx = context_length(args.ctx, config)?;
    let tokenizer = Tokenizer::from_files(checkpoint.files())?;
    tokenizer.check_vocab(config.vocab_size)?;
    let template = if args.raw {
        None
    } else {
        Some(ChatTemplate::from_files(checkpoint.files())?)
    };
    if args.no_think
        && !template
            .as_ref()
            .is_some_and(ChatTemplate::switches_thinking)
    {
        terminal.note("--no-think has no effect: this model's template cannot turn thinking off");
    }
    let stop = checkpoint.eos_token_ids();
    let text =
        ModelText::new(tokenizer, template, stop, config.vocab_size).seeing(checkpoint.vision());
    let draft = match &args.draft {
        Some(from) => DraftWeights::open(from, &checkpoint, args.bits, global.offline, &terminal)?,
        None => draft::by_default(&checkpoint, &global.load_options())?,
    };
    let spec = SessionSpec {
        slots: 1,
        ctx,
        kv: args.kv,
        max_rows: Device::choose(global.device)?.prompt_rows().min(ctx),
        drafts: draft::drafted_by(args.draft.as_ref(), draft.as_ref()),
        ..SessionSpec::default()
    };
    // A drafter is loaded first: what it and a session of its own take of a GPU's memory is not there for the model.
    let load_drafts = |draft: &DraftWeights| {
        if global.verbose && Device::choose(global.device)? == Device::Cpu {
            let memory = draft.memory(config, &spec)?;
            terminal.note(&format!("memory: {}", memory.0));
        }
        let loaded = draft.load(&global.load_options(), &checkpoint, &terminal);
        loaded.map_err(Error::untyped)
    };
    let loaded = draft.as_ref().map(load_drafts).transpose()?;
    let beside = loaded.as_ref().map(|d| d.device_memory(&spec).total());
    let options = LoadOptions {
        session: Some(spec),
        reserved: beside.unwrap_or(0),
        ..global.load_options()
    };
    let engine = load(
        &checkpoint,
        schemes.as_ref(),
        &loras,
        &spec,
        &options,
        global,
        &terminal,
    )?;
    let mut session = engine.session(spec)?;
    let device = &engine.description().device;
    let asked = args.draft.as_ref();
    let drafts = draft::drafts(asked, session.as_ref(), device, &terminal, loaded)?;
    let drafts = drafts
        .map(|d| d.speculation(session.as_mut(), asked.is_some()))
        .transpose()?;
    if global.verbose {
        terminal.note(&sampling.to_string());
    }
    let settings = settings(args, sampling);
    let mut repl = Repl {
        conversation: Conversation::new(
            LocalModel {
                name: &name,
                text: &text,
                sight: sight.as_ref(),
                raw: args.raw,
                session,
                drafts,
            },
            args.system.clone(),
            settings,
        ),
        engine: Some(engine.as_ref()),
        model: name.clone(),
        shown: shown_thinking(),
        hide_thinking: args.hide_thinking,
        figures: figures(args, global),
        totals: Totals::default(),
        folder: folder(),
    };
    let place = engine.description().device.clone();
    if question.is_none() && demo::is_demo(config) {
        terminal.note(
            "the demo model is tiny and knows little; it can do this: Tell me about the film The Silent \
             River (1931).",
        );
    }
    args.image.iter().try_for_each(|path| repl.attach(path))?;
    talk(&mut repl, question, &place, ctx, global, &terminal)
}

/// Which figures follow an answer.
fn figures(args: &ChatArgs, global: &Global) -> Figures {
    match (args.quiet, global.verbose) {
        (true, _) => Figures::Quiet,
        (false, true) => Figures::All,
        (false, false) => Figures::Brief,
    }
}

/// Answers the question, or holds a conversation.
fn talk(
    repl: &mut Repl<'_>,
    question: Option<Question>,
    place: &str,
    ctx: usize,
    global: &Global,
    terminal: &Terminal,
) -> anyhow::Result<ExitCode> {
    if let Some((text, thinking)) = question {
        return repl.answer_once(&text, thinking, global.json);
    }
    terminal.note(&format!(
        "{} on {place}, context of {ctx} tokens; /help lists the commands",
        repl.model,
    ));
    repl.run()
}

/// A conversation with a server's model.
fn remote(
    args: &ChatArgs,
    global: &Global,
    url: &str,
    question: Option<Question>,
    terminal: &Terminal,
) -> anyhow::Result<ExitCode> {
    let key = std::env::var("NQ_API_KEY").ok().filter(|k| !k.is_empty());
    // A server's model names are text.
    let name = args.model.as_deref().map(OsStr::to_string_lossy);
    let mut remote = Remote::connect(url, name.as_deref(), key)?;
    let defaults = remote.sampling();
    defaults.validate().with_context(|| url.to_owned())?;
    let sampling = sampling(args, defaults)?;
    if args.seed.is_none() {
        remote.leave_seed(sampling.seed);
    }
    let settings = settings(args, sampling);
    let model = remote.model().to_owned();
    let mut repl = Repl {
        conversation: Conversation::remote(remote, args.system.clone(), settings),
        engine: None,
        model,
        shown: shown_thinking(),
        hide_thinking: args.hide_thinking,
        figures: figures(args, global),
        totals: Totals::default(),
        folder: folder(),
    };
    let ctx = repl.conversation.context().1;
    args.image.iter().try_for_each(|path| repl.attach(path))?;
    talk(&mut repl, question, url, ctx, global, terminal)
}

/// Folder for chats, next to the models.
fn folder() -> Option<PathBuf> {
    Some(model::models_dir().ok()?.parent()?.to_owned())
}

/// A message to answer for a script, and the thinking mode that it selects.
type Question = (String, Option<bool>);

fn settings(args: &ChatArgs, sampling: SamplingParams) -> ChatSettings {
    ChatSettings {
        sampling,
        max_tokens: args.max_tokens,
        thinking: args.no_think.then_some(false),
        thinking_budget: None,
        overflow: args.on_overflow,
        stop: args.stop.clone(),
    }
}

/// The single message to answer: `-p`, piped text, or both. `None` if there is a user to
/// talk to.
fn question(args: &ChatArgs) -> anyhow::Result<Option<Question>> {
    let given = match &args.file {
        Some(path) => Some(piped::read_file(path)?),
        None => args.prompt.clone(),
    };
    let piped = match (piped::kind(&io::stdin()), &given) {
        (StandardInput::Terminal, None) => return Ok(None),
        (StandardInput::Text, Some(_)) => piped::read(
            "waiting for the end of standard input, which goes with the prompt (`< /dev/null` keeps \
             it out)",
        )?,
        (StandardInput::Text, None) => piped::read("waiting for a prompt on standard input")?,
        _ => String::new(),
    };
    if args.raw {
        let text = piped::join(given.as_deref(), &piped)?;
        return Ok(Some((text, None)));
    }
    // Only a typed prompt can switch thinking at its end, not piped text.
    match &given {
        Some(prompt) => {
            let (prompt, thinking) = thinking_switch(prompt);
            Ok(Some((piped::join(Some(prompt), &piped)?, thinking)))
        }
        None => {
            let (text, thinking) = thinking_switch(&piped);
            Ok(Some((piped::join(None, text)?, thinking)))
        }
    }
}

/// The model that answers.
struct ChatModel {
    name: String,
    checkpoint: Checkpoint,
    /// If it is quantized at load.
    schemes: Option<Schemes>,
    /// Adapters beside its weights.
    loras: Vec<Lora>,
}

fn open(args: &ChatArgs, global: &Global, terminal: &Terminal) -> anyhow::Result<ChatModel> {
    let (opened, bits) = match &args.model {
        Some(name) => (model::open_to_run(Some(name), global, terminal)?, args.bits),
        None => {
            let opened = model::open_for_chat(global, terminal)?;
            // Without a named model, an answer should come soon: 4 bits, unless the model has fewer
            // than 16 already.
            let quantized = opened.model.checkpoint.store().quantization().is_some();
            (opened, args.bits.or((!quantized).then_some(4)))
        }
    };
    let ToRun { model, beside } = opened;
    model::check_writes(&model)?;
    let (checkpoint, schemes) = at_load(model.checkpoint, bits, terminal)?;
    Ok(ChatModel {
        name: model.name,
        checkpoint,
        schemes,
        loras: beside,
    })
}

/// Loads the model on its device; with --verbose, reports memory and kernels.
fn load(
    checkpoint: &Checkpoint,
    schemes: Option<&Schemes>,
    loras: &[Lora],
    spec: &SessionSpec,
    options: &LoadOptions,
    global: &Global,
    terminal: &Terminal,
) -> anyhow::Result<Arc<dyn Engine>> {
    if global.verbose && Device::choose(global.device)? == Device::Cpu {
        let memory = at_load::memory(checkpoint, schemes, spec)?;
        let beside = adapter_bytes(checkpoint.config(), loras, spec.max_rows)?;
        terminal.note(&format!(
            "memory: {} on a CPU once the context of {} tokens is full, {} of which are for the context",
            human_bytes(memory.peak + beside as u64),
            spec.ctx,
            human_bytes(memory.kv)
        ));
    }
    if global.verbose
        && let Some(images) = SightBytes::plan(checkpoint, options, &SightOptions::default())?
    {
        terminal.note(&format!("memory: {images}, once there is an image"));
    }
    model::note_growth(checkpoint, terminal);
    let engine = adapters::load(checkpoint, loras, options, terminal)?;
    heat::keep(checkpoint, engine.as_ref(), terminal)?;
    if global.verbose
        && let Some(memory) = engine.device_memory(spec).filter(|m| !m.on_host)
    {
        terminal.note(&format!(
            "memory: {} of weights on the GPU, {} for the context, {} for activations; {} free",
            human_bytes(memory.weights as u64),
            human_bytes(memory.kv as u64),
            human_bytes(memory.scratch as u64),
            human_bytes(memory.free as u64)
        ));
    }
    if global.verbose {
        terminal.note(&engine.description().to_string());
    }
    Ok(engine)
}

/// The model's sampling settings, which are valid, overridden by the flags.
fn sampling(args: &ChatArgs, model: SamplingParams) -> anyhow::Result<SamplingParams> {
    let choices = SamplingChoices {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        frequency_penalty: args.frequency_penalty,
        presence_penalty: args.presence_penalty,
    };
    let sampling = choices.over(SamplingParams {
        seed: args.seed.unwrap_or_else(SamplingParams::random_seed),
        ..model
    });
    match sampling.validate() {
        Ok(()) => Ok(sampling),
        Err(e) => Err(conflict("chat", e.to_string())),
    }
}

/// Number of positions to reserve, at most as many as the model was trained for.
fn context_length(asked: Option<usize>, config: &ModelConfig) -> anyhow::Result<usize> {
    let trained = config.longest_context();
    match asked {
        None => Ok(trained.min(DEFAULT_CTX)),
        Some(n) if (2..=trained).contains(&n) => Ok(n),
        Some(n) => bail!("--ctx: expected 2 to {trained}, the model's longest, found {n}"),
    }
}

fn parse_stop(text: &str) -> Result<String, String> {
    match text {
        "" => Err("expected a text".into()),
        _ => Ok(text.into()),
    }
}

/// Dims thinking on a terminal (with NO_COLOR: tags it), and keeps it out of a pipe.
fn shown_thinking() -> Thinking {
    match (io::stdout().is_terminal(), has_colours(&io::stdout())) {
        (_, true) => Thinking::Dimmed,
        (true, false) => Thinking::Tagged,
        (false, _) => Thinking::Aside,
    }
}
