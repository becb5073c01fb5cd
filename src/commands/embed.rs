//! `nq embed`: vectors of texts.

use crate::cli::{Global, parse_load_bits};
use crate::commands::chat::{at_load, longest_context};
use crate::model;
use crate::terminal::{Terminal, print_line};
use anyhow::{Context, bail};
use clap::Args;
use nq_formats::{Checkpoint, Progress};
use nq_kernels::cpu::PAGE;
use nq_runtime::device::Device;
use nq_runtime::embedding::{EmbeddingTexts, Purpose, unit};
use nq_runtime::{Encoder, Error, KvType, LoadOptions, Row, SessionSpec, Tokenizer};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Tokens of a text, at most, if no one says how many.
const DEFAULT_CTX: usize = 8192;
/// Texts worked on at once.
const SLOTS: usize = 32;
/// Tokens computed together, on a CPU and on a GPU.
const ROWS: (usize, usize) = (512, 2048);
/// Texts that are read before the first of them is worked on.
const BLOCK: usize = 256;
/// Bytes of a line of input, at most.
const LINE: u64 = 64 << 20;

/// Flags of `nq embed`.
#[derive(Args, Debug)]
pub struct EmbedArgs {
    /// An embedding model: a folder, a hub id such as Qwen/Qwen3-Embedding-0.6B or a name from `nq list`
    pub model: OsString,
    /// Texts [default: lines of standard input]
    pub texts: Vec<String>,
    /// Read texts from this file, one a line; - is standard input
    #[arg(short, long, value_name = "FILE", conflicts_with = "texts")]
    pub file: Option<PathBuf>,
    /// Write the vectors here: NumPy's format for .npy, else a JSON object a line [default: standard
    /// output]
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Keep the first N numbers of a vector [default: all]
    #[arg(long, value_name = "N")]
    pub dimensions: Option<usize>,
    /// The texts are queries: they get the prompt that the model's makers put before queries
    #[arg(long)]
    pub query: bool,
    /// The texts are queries under this instruction
    #[arg(long, value_name = "TEXT")]
    pub instruct: Option<String>,
    /// Longest text in tokens [default: the model's, at most 8192]
    #[arg(long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Cut longer texts
    #[arg(long)]
    pub truncate: bool,
    /// Quantize an unquantized model at load: 4, 8 or 16 (keep it)
    #[arg(long, value_parser = parse_load_bits)]
    pub bits: Option<u32>,
}

/// Runs `nq embed`.
pub fn run(args: &EmbedArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let terminal = Terminal::new();
    let opened = model::open(Some(&args.model), global, &terminal)?;
    let (checkpoint, _) = at_load(opened.checkpoint, args.bits, &terminal)?;
    let texts = EmbeddingTexts::of(&checkpoint).with_context(|| opened.name.clone())?;
    if !texts.adds_end() {
        terminal.note(
            "this model's tokenizer adds no end token: vectors are those of the texts' own last tokens",
        );
    }
    let width = checkpoint.config().hidden_size;
    let dimensions = args.dimensions.unwrap_or(width);
    if !(1..=width).contains(&dimensions) {
        bail!("--dimensions: expected 1 to {width}, found {dimensions}");
    }
    let purpose = match &args.instruct {
        Some(task) => Purpose::Instructed(task.clone()),
        None if args.query => Purpose::Query,
        None => Purpose::Document,
    };
    let mut lines = Lines::open(&args.texts, args.file.as_deref(), "text")?;
    let mut out = Output::create(args.out.as_deref(), dimensions)?;
    let Session {
        mut encoder,
        tokenizer,
        ctx,
    } = Session::new(&checkpoint, Row::Hidden, args.ctx, global, &terminal)?;
    let (begun, mut count, mut tokens) = (Instant::now(), 0, 0);
    loop {
        let block = lines.take(BLOCK)?;
        if block.is_empty() {
            break;
        }
        let mut encoded = Vec::with_capacity(block.len());
        for line in &block {
            let mut ids = texts.encode(&tokenizer, &line.text, &purpose)?;
            if args.truncate {
                texts.truncate(&mut ids, ctx);
            }
            check_length(line, &ids, ctx)?;
            tokens += ids.len();
            encoded.push(ids);
        }
        let mut failed = None;
        let result = encoder.encode(0, &encoded, &mut |i, state| {
            let vector = unit(state, dimensions)?;
            out.write(&block[i], &vector).map_err(|e| {
                failed = Some(e);
                Error::Interrupted
            })
        });
        if let Some(e) = failed {
            return Err(e);
        }
        result?;
        count += block.len();
        out.commit()?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    terminal.note(&format!(
        "{count} texts, {tokens} tokens in {seconds:.1} s ({:.0} tokens/s)",
        tokens as f64 / seconds.max(1e-9)
    ));
    Ok(ExitCode::SUCCESS)
}

/// Refuses a text that has no token or too many.
pub fn check_length(line: &Line, tokens: &[u32], ctx: usize) -> anyhow::Result<()> {
    match tokens.len() {
        0 => bail!("{}: it has no tokens", line.place),
        n if n > ctx => bail!(
            "{}: {n} tokens, and a text may have {ctx}: --truncate cuts it, --ctx allows more",
            line.place
        ),
        _ => Ok(()),
    }
}

/// A model that reads texts.
pub struct Session {
    /// Reads them.
    pub encoder: Encoder,
    /// Makes tokens of them.
    pub tokenizer: Tokenizer,
    /// Tokens of a text, at most.
    pub ctx: usize,
}

impl Session {
    /// Loads the model of `checkpoint` for texts of up to `ctx` tokens.
    pub fn new(
        checkpoint: &Checkpoint,
        row: Row,
        ctx: Option<usize>,
        global: &Global,
        terminal: &Terminal,
    ) -> anyhow::Result<Self> {
        let config = checkpoint.config();
        let trained = longest_context(config);
        let ctx = match ctx {
            None => trained.min(DEFAULT_CTX),
            Some(n) if (2..=trained).contains(&n) => n,
            Some(n) => bail!("--ctx: expected 2 to {trained}, the model's longest, found {n}"),
        };
        let tokenizer = Tokenizer::from_files(checkpoint.files())?;
        tokenizer.check_vocab(config.vocab_size)?;
        let on_cpu = global.device.resolve()? == Device::Cpu;
        let spec = SessionSpec {
            slots: SLOTS,
            ctx,
            // The longest text, or short ones in all slots.
            pages: Some(2 * ctx.div_ceil(PAGE) + SLOTS),
            kv: KvType::F16,
            max_rows: if on_cpu { ROWS.0 } else { ROWS.1 },
        };
        model::note_growth(checkpoint, terminal);
        let options = LoadOptions {
            session: Some(spec),
            ..global.load_options()
        };
        let engine = nq_runtime::load(config, checkpoint.store(), &options, terminal)?;
        if global.verbose {
            terminal.note(&engine.description().to_string());
        }
        Ok(Session {
            encoder: Encoder::new(engine.session(spec)?, row),
            tokenizer,
            ctx,
        })
    }
}

/// A text, and where it stands.
pub struct Line {
    /// For messages.
    pub place: String,
    /// Its number, from 0.
    pub index: usize,
    /// The text.
    pub text: String,
    /// What a JSON object calls it.
    pub id: Option<Value>,
}

/// Texts of the command line, or the lines of a file: each the text itself or, where the first is a
/// JSON object, an object that has it.
pub struct Lines {
    given: Option<std::vec::IntoIter<String>>,
    reader: Box<dyn BufRead>,
    name: String,
    /// The key of a text in an object.
    key: &'static str,
    objects: Option<bool>,
    count: usize,
}

impl Lines {
    /// `texts`, or where there are none the lines of `file` or standard input.
    pub fn open(texts: &[String], file: Option<&Path>, key: &'static str) -> anyhow::Result<Self> {
        let file = file.filter(|f| *f != Path::new("-"));
        let (reader, name): (Box<dyn BufRead>, _) = match file {
            Some(path) => {
                let name = path.display().to_string();
                let file = File::open(path).with_context(|| name.clone())?;
                (Box::new(BufReader::new(file)), name)
            }
            None => (
                Box::new(BufReader::new(io::stdin())),
                "standard input".into(),
            ),
        };
        let given = (!texts.is_empty()).then(|| Vec::from(texts).into_iter());
        let name = if given.is_some() { "text".into() } else { name };
        Ok(Lines {
            given,
            reader,
            name,
            key,
            objects: None,
            count: 0,
        })
    }

    /// The next texts, up to `most`; none at the end.
    pub fn take(&mut self, most: usize) -> anyhow::Result<Vec<Line>> {
        let mut lines = Vec::new();
        while lines.len() < most {
            let Some(line) = self.next()? else {
                break;
            };
            lines.push(line);
        }
        Ok(lines)
    }

    fn next(&mut self) -> anyhow::Result<Option<Line>> {
        let (index, place) = (self.count, format!("{} {}", self.name, self.count + 1));
        self.count += 1;
        if let Some(given) = &mut self.given {
            let line = |text| Line {
                place,
                index,
                text,
                id: None,
            };
            return Ok(given.next().map(line));
        }
        let place = format!("{}, line {}", self.name, index + 1);
        let mut text = String::new();
        let read = (&mut self.reader).take(LINE).read_line(&mut text);
        let read = read.with_context(|| place.clone())? as u64;
        if read == 0 {
            return Ok(None);
        }
        if text.ends_with('\n') {
            text.truncate(text.trim_end_matches('\n').trim_end_matches('\r').len());
        } else if read == LINE {
            bail!("{place}: expected at most {LINE} bytes");
        }
        let object = || serde_json::from_str::<serde_json::Map<String, Value>>(&text);
        if !*self.objects.get_or_insert_with(|| object().is_ok()) {
            return Ok(Some(Line {
                place,
                index,
                text,
                id: None,
            }));
        }
        let mut object = object().with_context(|| place.clone())?;
        match object.remove(self.key) {
            Some(Value::String(text)) => {
                let id = object.remove("id");
                Ok(Some(Line {
                    place,
                    index,
                    text,
                    id,
                }))
            }
            found => bail!(
                "{place}: expected an object with a string {:?}, found {} there",
                self.key,
                found.unwrap_or_default()
            ),
        }
    }
}

/// Where vectors go: each is written as soon as it is known.
enum Output {
    Stdout,
    Lines(File, PathBuf),
    Npy(Npy, PathBuf),
}

impl Output {
    fn create(path: Option<&Path>, dimensions: usize) -> anyhow::Result<Self> {
        let Some(path) = path else {
            return Ok(Output::Stdout);
        };
        let name = || path.display().to_string();
        // Vectors are written as they come: nothing whole could take an older file's place.
        let file = File::options().write(true).create_new(true).open(path);
        let file = file.with_context(name)?;
        let path = path.to_owned();
        Ok(match path.extension().is_some_and(|e| e == "npy") {
            true => Output::Npy(Npy::new(file, dimensions).with_context(name)?, path),
            false => Output::Lines(file, path),
        })
    }

    fn write(&mut self, line: &Line, vector: &[f32]) -> anyhow::Result<()> {
        let object = || {
            let mut object = json!({"index": line.index, "embedding": vector});
            if let Some(id) = &line.id {
                object["id"] = id.clone();
            }
            object.to_string()
        };
        match self {
            Output::Stdout => Ok(print_line(&object())?),
            Output::Lines(file, path) => {
                let line = object() + "\n";
                let written = file.write_all(line.as_bytes());
                written.with_context(|| path.display().to_string())
            }
            Output::Npy(npy, path) => {
                let written = npy.write(vector);
                written.with_context(|| path.display().to_string())
            }
        }
    }

    /// Makes what was written count, whatever happens next.
    fn commit(&mut self) -> anyhow::Result<()> {
        match self {
            Output::Npy(npy, path) => {
                let written = npy.write_header();
                written.with_context(|| path.display().to_string())
            }
            Output::Stdout | Output::Lines(..) => Ok(()),
        }
    }
}

/// A file of NumPy's format 1.0, f32 `[rows, dimensions]`, that has as many rows as its header says
/// whenever a header has been written.
struct Npy {
    file: File,
    rows: usize,
    dimensions: usize,
}

impl Npy {
    /// Bytes before the data.
    const HEADER: usize = 128;

    fn new(file: File, dimensions: usize) -> io::Result<Self> {
        let rows = 0;
        let mut npy = Npy {
            file,
            rows,
            dimensions,
        };
        npy.write_header()?;
        Ok(npy)
    }

    fn write(&mut self, vector: &[f32]) -> io::Result<()> {
        let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.rows += 1;
        self.file.write_all(&bytes)
    }

    /// Writes the header over the old one.
    fn write_header(&mut self) -> io::Result<()> {
        let shape = format!("({}, {})", self.rows, self.dimensions);
        let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
        let length = Self::HEADER - 10;
        let mut header = b"\x93NUMPY\x01\x00".to_vec();
        header.extend((length as u16).to_le_bytes());
        header.extend(format!("{text:<width$}\n", width = length - 1).bytes());
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&header)?;
        self.file.seek(SeekFrom::End(0)).map(drop)
    }
}
