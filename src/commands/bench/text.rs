//! `nq bench --text`: drafts on real text.

use super::super::synth::parse_preset;
use super::{BenchArgs, BenchModel, Meter, codes, random, show};
use crate::adapters;
use crate::draft::{DraftCheckpoint, DraftFrom, DraftWeights};
use crate::flags::{Global, conflict};
use crate::terminal::Terminal;
use crate::texts;
use anyhow::{Context, bail};
use nq_evals::DraftRow;
use nq_evals::bench::{self, BenchAnswer, DraftBy, Machine, TextSpec};
use nq_formats::{Checkpoint, Progress};
use nq_load::Drafts;
use nq_runtime::{Engine, LoadOptions, SamplingParams, Tokenizer};
use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

/// Number of excerpts of a text that a model continues, and tokens of each.
const PIECES: (usize, usize) = (8, 256);
/// Tokens of the longest answer that is replayed.
const MOST: usize = 8192;

/// Measures a text's decoding with drafts and without.
pub(super) fn run(
    args: &BenchArgs,
    file: &Path,
    model: &BenchModel,
    global: &Global,
    terminal: &Terminal,
) -> anyhow::Result<ExitCode> {
    let checkpoint = &model.checkpoint;
    let text = read(file)?;
    let before = args.before.as_deref().map(read).transpose()?;
    let mut encode = encoder(args, checkpoint, terminal)?;
    let tokens = encode(&text)?;
    let replayed = before.is_some() || args.preset.is_some();
    let (prompt, mut answer) = match &before {
        Some(before) => (encode(before)?, tokens),
        // The first quarter of the text is the prompt, the rest the answer.
        None => {
            let (prompt, rest) = tokens.split_at(tokens.len() / 4);
            (prompt.to_vec(), rest.to_vec())
        }
    };
    let positions = checkpoint.config().longest_context();
    if replayed && prompt.len() + 1 >= positions {
        bail!(
            "the text before the answer has {} tokens: expected fewer than the model's {positions} \
             positions",
            prompt.len()
        );
    }
    answer.truncate(MOST.min(positions - prompt.len().min(positions)));
    let pieces: Vec<Vec<u32>> = [&prompt[..], &answer]
        .concat()
        .chunks_exact(PIECES.1)
        .take(PIECES.0)
        .map(<[u32]>::to_vec)
        .collect();
    let long_enough = match replayed {
        true => !prompt.is_empty() && answer.len() > 1,
        false => !pieces.is_empty() && args.gen_tokens > 1,
    };
    if !long_enough {
        bail!(
            "--text {}: expected a longer text, or a larger -n",
            file.display()
        );
    }
    let answer = match replayed {
        true => BenchAnswer::Replayed {
            prompt: &prompt,
            answer: &answer,
            right: args.draft_right,
        },
        false => BenchAnswer::Own {
            prompts: &pieces,
            tokens: args.gen_tokens,
            sampling: SamplingParams::from_defaults(checkpoint.generation()),
        },
    };
    if args.draft_right.is_some() && !replayed {
        return Err(conflict(
            "bench",
            "--draft-right is for a text that is given: --before or --preset",
        ));
    }
    let meter = Meter::new(&global.load_options())?;
    let options = global.load_options();
    let engine = adapters::load(checkpoint, &model.loras, &options, terminal)
        .with_context(|| model.name.clone())?;
    let (drafts, from) = drafts(args, checkpoint, &options, global, terminal)?;
    let spec = TextSpec {
        answer,
        drafts: (
            match &drafts {
                Drafts::Ngram => DraftBy::Ngram,
                Drafts::Layer(layer) => DraftBy::Head {
                    open: Box::new(|session| Ok(layer.drafter(session)?)),
                    layer: layer.layer(),
                    vocab: checkpoint.config().vocab_size,
                },
                Drafts::Model { engine, vocab, .. } => DraftBy::Model {
                    engine: engine.as_ref(),
                    vocab: *vocab,
                },
            },
            &from,
        ),
        draft_tokens: args.draft_tokens,
        repeats: args.repeats,
        kv: args.kv(),
    };
    let engine: &dyn Engine = engine.as_ref();
    let read = || meter.read_gb_s();
    let machine = Machine {
        read_gb_s: &read,
        cache_bytes: meter.cache_bytes()?,
    };
    let rows = bench::text(engine, &spec, machine, terminal)?.into();
    show(args, model, engine, machine, rows, global, terminal)
}

fn read(path: &Path) -> anyhow::Result<String> {
    texts::whole(path)
}

/// Turns a text into tokens.
type Encoder<'a> = Box<dyn FnMut(&str) -> anyhow::Result<Vec<u32>> + 'a>;

/// The model's tokenizer. Random weights have no vocabulary to speak of: there each word, number and
/// run of signs is a token.
fn encoder<'a>(
    args: &BenchArgs,
    checkpoint: &'a Checkpoint,
    terminal: &Terminal,
) -> anyhow::Result<Encoder<'a>> {
    if args.preset.is_none() {
        let tokenizer = Tokenizer::from_files(checkpoint.files())?;
        return Ok(Box::new(move |text| Ok(tokenizer.encode(text)?)));
    }
    terminal.note("a preset has no vocabulary: words and runs of signs of the text are its tokens");
    let mut ids = HashMap::new();
    let most = checkpoint.config().vocab_size;
    Ok(Box::new(move |text| {
        let ids = &mut ids;
        let words = words(text).into_iter().map(|word| {
            let next = ids.len() as u32;
            *ids.entry(word.to_owned()).or_insert(next)
        });
        let words: Vec<u32> = words.collect();
        match ids.len() < most {
            true => Ok(words),
            false => bail!(
                "expected at most {most} different words, found {}",
                ids.len()
            ),
        }
    }))
}

/// A text in pieces such as tokens are: words of up to six letters with the space before them, digits,
/// runs of signs, runs of white space.
fn words(text: &str) -> Vec<&str> {
    const LONGEST: usize = 6;
    #[derive(PartialEq)]
    enum CharacterKind {
        Letter,
        Digit,
        Space,
        Sign,
    }
    let kind = |c: char| match c {
        c if c.is_alphabetic() => CharacterKind::Letter,
        c if c.is_numeric() => CharacterKind::Digit,
        c if c.is_whitespace() => CharacterKind::Space,
        _ => CharacterKind::Sign,
    };
    let mut pieces = Vec::new();
    let (mut start, mut letters) = (0, 0);
    let mut last: Option<char> = None;
    for (at, c) in text.char_indices() {
        let joins = last.is_none_or(|before| match (kind(before), kind(c)) {
            (CharacterKind::Letter, CharacterKind::Letter) => letters < LONGEST,
            (CharacterKind::Space, CharacterKind::Letter | CharacterKind::Sign) => {
                before == ' ' && at == start + 1
            }
            (CharacterKind::Space, CharacterKind::Space)
            | (CharacterKind::Sign, CharacterKind::Sign) => true,
            _ => false,
        });
        if !joins {
            pieces.push(&text[start..at]);
            (start, letters) = (at, 0);
        }
        letters += usize::from(kind(c) == CharacterKind::Letter);
        last = Some(c);
    }
    if start < text.len() {
        pieces.push(&text[start..]);
    }
    pieces
}

/// The loaded drafter and its name.
fn drafts(
    args: &BenchArgs,
    target: &Checkpoint,
    options: &LoadOptions,
    global: &Global,
    terminal: &Terminal,
) -> anyhow::Result<(Drafts, String)> {
    let name: &OsString = match &args.draft {
        None | Some(DraftFrom::Ngram) => return Ok((Drafts::Ngram, "ngram".into())),
        Some(DraftFrom::None) => bail!("--draft none: there is nothing to measure"),
        Some(DraftFrom::Model(name)) => name,
        Some(from @ (DraftFrom::Eagle3(_) | DraftFrom::Mtp)) => {
            let draft = DraftWeights::open(from, target, args.bits, global.offline, terminal)?;
            let draft = draft.context("--draft: a drafter without weights")?;
            let drafts = draft.load(options, target, terminal)?;
            let name = match from {
                DraftFrom::Eagle3(folder) => folder.display().to_string(),
                _ => "mtp".into(),
            };
            return Ok((drafts, name));
        }
    };
    let preset = args
        .preset
        .as_ref()
        .and_then(|_| parse_preset(name.to_str()?).ok());
    let draft = match preset {
        Some(preset) => {
            let layers = args
                .draft_layers
                .unwrap_or(preset.config().num_hidden_layers);
            let model = random(&preset, layers, codes(args)?, true, 1)?;
            DraftCheckpoint {
                name: model.name,
                checkpoint: model.checkpoint,
                schemes: None,
            }
        }
        None if args.draft_layers.is_some() => {
            bail!("--draft-layers: expected a preset as --draft")
        }
        None => DraftCheckpoint::open(name, target, args.bits, global.offline, terminal)?,
    };
    let drafts = draft.load(options, target.config().vocab_size, terminal)?;
    Ok((drafts, draft.name))
}

/// The result of a measurement with drafts, as a line of text.
pub(super) fn line(test: &str, d: &DraftRow) -> String {
    let mut line = format!(
        "{test}, drafts by {}: {:.2} x the speed without (± {:.2}), {:.2} drafted tokens accepted per \
         step, acceptance rate {:.0} %{}",
        d.from,
        d.speed_up,
        d.speed_up_std,
        d.accepted_per_step,
        100.0 * d.right,
        match d.replayed {
            true => "; the text was given, not the model's own",
            false => "; the model's own text",
        },
    );
    line += match (d.same, d.exact) {
        (true, _) => "",
        (false, true) => "; ITS TOKENS DIFFER from those without drafts",
        (false, false) => {
            "; the text differs from that without drafts after a near tie of two tokens"
        }
    };
    if d.step_ms.len() > 1 {
        let steps = d
            .step_ms
            .iter()
            .map(|(rows, ms)| format!("{rows}: {ms:.2}"));
        line += &format!(
            "; ms of steps by rows: {}",
            steps.collect::<Vec<_>>().join(", ")
        );
    }
    line + &d
        .off
        .as_ref()
        .map_or_else(String::new, |off| format!("; {off}"))
}

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn words_are_such_as_tokens_are() {
        let text = "let value = self.rows[12];\n    }\n";
        let expected = [
            "let", " value", " =", " self", ".", "rows", "[", "1", "2", "];", "\n    ", "}", "\n",
        ];
        assert_eq!(words(text), expected);
        assert_eq!(words("quantization"), ["quanti", "zation"]);
        assert_eq!(words(""), [""; 0]);
    }
}
