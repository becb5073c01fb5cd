//! `nq embed`: vectors of texts.

use crate::at_load::at_load;
use crate::commands::reading::{Line, Lines, ReadArgs, Session};
use crate::flags::Global;
use crate::model;
use crate::terminal::{Terminal, print_line};
use anyhow::{Context, bail};
use clap::Args;
use nq_formats::Progress;
use nq_runtime::embedding::{EmbeddingTexts, Purpose, unit};
use nq_runtime::{Error, Row};
use serde_json::json;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Number of texts, and of bytes, that are read before the first of them is embedded.
const BLOCK: (usize, usize) = (256, 16 << 20);

/// Flags of `nq embed`.
#[derive(Args, Debug)]
pub(crate) struct EmbedArgs {
    /// An embedding model: a folder, a hub id such as Qwen/Qwen3-Embedding-0.6B or a name from `nq list`
    pub model: OsString,
    /// Texts [default: lines of standard input]
    pub texts: Vec<String>,
    #[command(flatten)]
    pub read: ReadArgs,
    /// Write the vectors here: NumPy's format for .npy, else one JSON object per line [default: standard
    /// output]
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Keep the first N numbers of a vector [default: all]
    #[arg(long, value_name = "N")]
    pub dimensions: Option<usize>,
    /// The texts are queries: each gets the model's prompt for queries
    #[arg(long)]
    pub query: bool,
    /// The texts are queries: each gets a prompt with this instruction
    #[arg(long, value_name = "TEXT")]
    pub instruct: Option<String>,
}

/// Runs `nq embed`.
pub fn run(args: &EmbedArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let terminal = Terminal::new();
    let opened = model::open(Some(&args.model), global, &terminal)?;
    let (checkpoint, _) = at_load(opened.checkpoint, args.read.bits, &terminal)?;
    let texts = EmbeddingTexts::of(&checkpoint).with_context(|| opened.name.clone())?;
    if !texts.adds_end() {
        terminal.note(
            "this model's tokenizer appends no end token: vectors are taken from the texts' own last tokens",
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
    let mut lines = Lines::open(&args.texts, args.read.file.as_deref())?;
    let mut out = VectorOutput::create(args.out.as_deref(), dimensions)?;
    let mut session = Session::new(&checkpoint, Row::Hidden, &args.read, global, &terminal)?;
    let begun = Instant::now();
    let written = write_all(
        args,
        &mut lines,
        &texts,
        &purpose,
        &mut session,
        &mut out,
        &terminal,
    );
    let (count, tokens) = match written {
        Ok(counts) => counts,
        Err(e) => return Err(out.left(e)),
    };
    let seconds = begun.elapsed().as_secs_f64();
    terminal.note(&format!(
        "{count} texts, {tokens} tokens in {seconds:.1} s ({:.0} tokens/s)",
        tokens as f64 / seconds.max(1e-9)
    ));
    Ok(ExitCode::SUCCESS)
}

/// Embeds all lines and writes the vectors; returns the number of texts and of their tokens.
fn write_all(
    args: &EmbedArgs,
    lines: &mut Lines,
    texts: &EmbeddingTexts,
    purpose: &Purpose,
    session: &mut Session,
    out: &mut VectorOutput,
    terminal: &Terminal,
) -> anyhow::Result<(usize, usize)> {
    let (mut count, mut tokens) = (0, 0);
    loop {
        let block = lines.take(BLOCK.0, BLOCK.1)?;
        if block.is_empty() {
            return Ok((count, tokens));
        }
        let mut encoded = Vec::with_capacity(block.len());
        // The lines with tokens: a line without any has no direction, and gets zeros in its place.
        let mut full = Vec::with_capacity(block.len());
        for (i, line) in block.iter().enumerate() {
            let mut ids = texts.encode(&session.tokenizer, &line.text, purpose)?;
            if args.read.truncate {
                texts.truncate(&mut ids, session.ctx);
            }
            if ids.is_empty() {
                terminal.note(&format!("{}: no text: its vector is zeros", line.place));
                continue;
            }
            session.check_length(line, &ids)?;
            tokens += ids.len();
            encoded.push(ids);
            full.push(i);
        }
        let mut failed = None;
        let mut next = 0;
        let result = session.encoder.encode(0, &encoded, &mut |i, state| {
            let vector = unit(state, out.dimensions)?;
            let zeros = out.write_zeros(&block[next..full[i]]);
            next = full[i] + 1;
            let written = zeros.and_then(|()| out.write(&block[full[i]], &vector));
            written.map_err(|e| {
                failed = Some(e);
                Error::Interrupted
            })
        });
        if let Some(e) = failed {
            return Err(e);
        }
        result?;
        out.write_zeros(&block[next..])?;
        count += block.len();
        out.commit()?;
    }
}

/// The output for vectors: each is written as soon as it is computed.
struct VectorOutput {
    place: VectorSink,
    /// Numbers of a vector.
    dimensions: usize,
    /// Vectors written.
    rows: usize,
}

enum VectorSink {
    Stdout,
    Lines(File, PathBuf),
    Npy(Npy, PathBuf),
}

impl VectorOutput {
    fn create(path: Option<&Path>, dimensions: usize) -> anyhow::Result<Self> {
        let output = |place| VectorOutput {
            place,
            dimensions,
            rows: 0,
        };
        let Some(path) = path else {
            return Ok(output(VectorSink::Stdout));
        };
        let name = || path.display().to_string();
        // Vectors are written as they come: nothing whole could take an older file's place.
        let file = File::options().write(true).create_new(true).open(path);
        let file = file.with_context(name)?;
        let path = path.to_owned();
        Ok(output(match path.extension().is_some_and(|e| e == "npy") {
            true => VectorSink::Npy(Npy::new(file, dimensions).with_context(name)?, path),
            false => VectorSink::Lines(file, path),
        }))
    }

    fn write_zeros(&mut self, lines: &[Line]) -> anyhow::Result<()> {
        let zeros = vec![0.0; self.dimensions];
        lines.iter().try_for_each(|line| self.write(line, &zeros))
    }

    /// Takes the file away if nothing is in it; `error` is why there is no more.
    fn left(mut self, error: anyhow::Error) -> anyhow::Error {
        let committed = self.commit();
        let (VectorSink::Lines(_, path) | VectorSink::Npy(_, path)) = &self.place else {
            return error;
        };
        let path = path.clone();
        if self.rows == 0 {
            // The error that stands is the one before.
            let _ = std::fs::remove_file(&path);
            return error;
        }
        match committed {
            Ok(()) => error.context(format!(
                "{} has the {} vectors before this",
                path.display(),
                self.rows
            )),
            Err(_) => error,
        }
    }

    fn write(&mut self, line: &Line, vector: &[f32]) -> anyhow::Result<()> {
        let object = || {
            let mut object = json!({"index": line.index, "embedding": vector});
            if let Some(id) = &line.id {
                object["id"] = id.clone();
            }
            object.to_string()
        };
        self.rows += 1;
        match &mut self.place {
            VectorSink::Stdout => Ok(print_line(&object())?),
            VectorSink::Lines(file, path) => {
                let line = object() + "\n";
                let written = file.write_all(line.as_bytes());
                written.with_context(|| path.display().to_string())
            }
            VectorSink::Npy(npy, path) => {
                let written = npy.write(vector);
                written.with_context(|| path.display().to_string())
            }
        }
    }

    /// Makes the vectors written so far permanent, whatever happens next.
    fn commit(&mut self) -> anyhow::Result<()> {
        match &mut self.place {
            VectorSink::Npy(npy, path) => {
                let written = npy.write_header();
                written.with_context(|| path.display().to_string())
            }
            VectorSink::Stdout | VectorSink::Lines(..) => Ok(()),
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
