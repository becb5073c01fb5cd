//! Texts that a model reads and does not continue: their flags, where they come from, and the model's
//! session.

use crate::flags::{Global, parse_load_bits};
use crate::library::{LONGEST_TEXT, session_for_texts};
use crate::model;
use crate::terminal::Terminal;
use anyhow::{Context, bail};
use clap::Args;
use nq_formats::{Checkpoint, Progress};
use nq_load::device::Device;
use nq_runtime::{Encoder, LoadOptions, Row, Tokenizer};
use serde_json::Value;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Bytes of a line of input, at most.
const LINE: u64 = 4 << 20;

/// Flags of the commands that read texts.
#[derive(Args, Debug)]
pub(crate) struct ReadArgs {
    /// Read the texts from this file, one per line; - is standard input
    #[arg(short, long, value_name = "FILE", conflicts_with = "texts")]
    pub file: Option<PathBuf>,
    /// Longest text in tokens, including the prompt around it [default: the model's, at most 8192]
    #[arg(long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Cut longer texts
    #[arg(long)]
    pub truncate: bool,
    /// Quantize an unquantized model at load: 3 to 6, 8 or 16 (keep it)
    #[arg(long, value_parser = parse_load_bits)]
    pub bits: Option<u32>,
}

/// A model that reads texts.
pub(crate) struct Session {
    /// Reads them.
    pub encoder: Encoder,
    /// Makes tokens of them.
    pub tokenizer: Tokenizer,
    /// Tokens of a text, at most.
    pub ctx: usize,
}

impl Session {
    /// Loads the model of `checkpoint` for texts as long as `args` allows.
    pub fn new(
        checkpoint: &Checkpoint,
        row: Row,
        args: &ReadArgs,
        global: &Global,
        terminal: &Terminal,
    ) -> anyhow::Result<Self> {
        let config = checkpoint.config();
        let trained = config.longest_context();
        let ctx = match args.ctx {
            None => trained.min(LONGEST_TEXT),
            Some(n) if (2..=trained).contains(&n) => n,
            Some(n) => bail!("--ctx: expected 2 to {trained}, the model's longest, found {n}"),
        };
        let tokenizer = Tokenizer::from_files(checkpoint.files())?;
        tokenizer.check_vocab(config.vocab_size)?;
        let global = &global.for_model(checkpoint, None, terminal);
        let spec = session_for_texts(ctx, Device::choose(global.device)?.prompt_rows());
        model::note_growth(checkpoint, terminal);
        let options = LoadOptions {
            session: Some(spec),
            ..global.load_options()
        };
        let engine = nq_load::load(config, checkpoint.store(), &options, terminal)?;
        if global.verbose {
            terminal.note(&engine.description().to_string());
        }
        Ok(Session {
            encoder: Encoder::new(engine.session(spec)?, row),
            tokenizer,
            ctx,
        })
    }

    /// Refuses a text that has no token or too many.
    pub(crate) fn check_length(&self, line: &Line, tokens: &[u32]) -> anyhow::Result<()> {
        let (place, n, most) = (&line.place, tokens.len(), self.ctx);
        match n {
            0 => bail!("{place}: the text has no tokens"),
            n if n > most => bail!(
                "{place}: {n} tokens, at most {most} are allowed: --truncate cuts the text, --ctx allows more"
            ),
            _ => Ok(()),
        }
    }
}

/// A text and its source.
pub(crate) struct Line {
    /// The source, for messages, e.g. a file and a line.
    pub place: String,
    /// Its number, from 0.
    pub index: usize,
    /// The text.
    pub text: String,
    /// The `id` of its JSON object.
    pub id: Option<Value>,
}

/// Texts of the command line, or the lines of a file. If the first line is a JSON object, every line is one,
/// and its `text` is the text.
pub(crate) struct Lines {
    given: Option<std::vec::IntoIter<String>>,
    reader: Box<dyn BufRead>,
    name: String,
    objects: Option<bool>,
    count: usize,
}

impl Lines {
    /// `texts`, or where there are none the lines of `file` or standard input.
    pub fn open(texts: &[String], file: Option<&Path>) -> anyhow::Result<Self> {
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
            objects: None,
            count: 0,
        })
    }

    /// The next texts, up to `most`, or fewer once they have `bytes` together; none at the end.
    pub fn take(&mut self, most: usize, bytes: usize) -> anyhow::Result<Vec<Line>> {
        let (mut lines, mut held) = (Vec::new(), 0);
        while lines.len() < most && held < bytes {
            let Some(line) = self.next()? else {
                break;
            };
            held += line.text.len();
            lines.push(line);
        }
        Ok(lines)
    }

    /// All texts.
    ///
    /// # Errors
    /// If there are more than `most`, or if they have more than `bytes` together.
    pub fn all(&mut self, most: usize, bytes: usize) -> anyhow::Result<Vec<Line>> {
        let lines = self.take(most + 1, bytes + 1)?;
        let held: usize = lines.iter().map(|l| l.text.len()).sum();
        if lines.len() > most || held > bytes {
            let name = &self.name;
            bail!("{name}: expected at most {most} texts and {bytes} bytes in all");
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
        match object.remove("text") {
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
                "{place}: expected an object with a string \"text\", found {} there",
                found.unwrap_or_default()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: impl Into<Vec<u8>>) -> Lines {
        Lines {
            given: None,
            reader: Box::new(io::Cursor::new(text.into())),
            name: "input".into(),
            objects: None,
            count: 0,
        }
    }

    fn texts(lines: Vec<Line>) -> Vec<String> {
        lines.into_iter().map(|l| l.text).collect()
    }

    #[test]
    fn input_is_read_in_parts_and_within_limits() {
        let mut some = lines("one\ntwo\r\n\nfour");
        assert_eq!(texts(some.take(9, 4).unwrap()), ["one", "two"]);
        assert_eq!(texts(some.take(1, 99).unwrap()), [""]);
        assert_eq!(texts(some.take(9, 99).unwrap()), ["four"]);
        assert!(some.take(9, 99).unwrap().is_empty());

        assert_eq!(lines("one\ntwo").all(2, 6).unwrap().len(), 2);
        for (most, bytes) in [(2, 5), (1, 6)] {
            let error = lines("one\ntwo").all(most, bytes).map(texts).unwrap_err();
            let expected = format!("input: expected at most {most} texts and {bytes} bytes in all");
            assert_eq!(error.to_string(), expected);
        }

        let long = vec![b'x'; LINE as usize];
        let error = lines(long).take(1, 1).map(texts).unwrap_err();
        assert_eq!(
            error.to_string(),
            "input, line 1: expected at most 4194304 bytes"
        );
    }

    #[test]
    fn objects_name_their_texts() {
        let mut objects = lines("{\"text\": \"a\", \"id\": 7}\n{\"texts\": \"b\"}");
        let first = objects.take(1, 99).unwrap().remove(0);
        assert_eq!((first.text.as_str(), first.id), ("a", Some(7.into())));
        let error = objects.take(1, 99).map(texts).unwrap_err().to_string();
        assert!(
            error.starts_with("input, line 2: expected an object"),
            "{error}"
        );
    }
}
