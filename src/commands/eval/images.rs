//! `nq eval --text FILE.jsonl` and `nq quantize --calib FILE.jsonl`: chats, whose messages may hold images.

use super::EvalModel;
use crate::terminal::Terminal;
use crate::texts::{self, Text, read_bounded};
use anyhow::{Context, bail};
use nq_answers::images::{Image, Sight, SightOptions, from_data_url};
use nq_answers::{ChatInput, ModelText, Prompt};
use nq_evals::{EvalSpec, Protocol, SeeingModel, SeenEvaluation, evaluate_seen};
use nq_formats::Checkpoint;
use nq_quantize::{CalibrationSource, SEQUENCE, holds_image};
use nq_runtime::chat_template::image_part;
use nq_runtime::{ImagePrompt, KvType, LoadOptions, Message};
use serde::Deserialize;
use std::fs::File;
use std::path::{Component, Path, PathBuf};

/// Chats of a file.
pub(in crate::commands) struct SeenTexts {
    name: String,
    /// The folder of the file, which images may lie in.
    folder: PathBuf,
    chats: Vec<Vec<Message>>,
}

/// A line of the file; what else it says is for others.
#[derive(Deserialize)]
struct ChatLine {
    messages: Vec<Message>,
}

/// How a model reads chats.
pub(super) struct ChatReader {
    text: ModelText,
    sight: Option<Sight>,
    /// Tokens of a chat at most.
    most: usize,
}

impl ChatReader {
    /// Reads a model's template, and loads its tower if it has one, for images of so many `tokens` at most.
    pub(super) fn new(
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        tokens: u64,
        terminal: &Terminal,
    ) -> anyhow::Result<Self> {
        let text = ModelText::open(checkpoint)?;
        let seen = SightOptions {
            tokens,
            ..SightOptions::default()
        };
        let sight = nq_load::tower(checkpoint, options, seen.tokens, terminal)?.map(|tower| {
            let config = tower.config().clone();
            Sight::new(config, seen, move || Ok(tower.clone()))
        });
        let most = checkpoint.config().max_position_embeddings;
        Ok(ChatReader { text, sight, most })
    }

    /// The chat of this index as the model reads it.
    fn prompt(&self, texts: &SeenTexts, index: usize) -> anyhow::Result<ImagePrompt> {
        let (prompt, images) = self.asked(texts, index)?;
        let Some(sight) = &self.sight else {
            return Ok(ImagePrompt::text(prompt.tokens));
        };
        let placed = sight.placed(&images, &prompt.images, &|| false)?;
        let tokens = sight.config().tokens;
        Ok(ImagePrompt::new(prompt.tokens, placed, tokens)?)
    }

    /// The tokens of a chat, and its images, which are not decoded. An assistant's last message ends it as it is.
    fn asked(&self, texts: &SeenTexts, index: usize) -> anyhow::Result<(Prompt, Vec<Image>)> {
        let read = || {
            let mut chat = ChatInput {
                messages: texts.chats[index].clone(),
                ..ChatInput::default()
            };
            let images = self.images(texts, &mut chat.messages)?;
            chat.images = images.iter().map(Image::tokens).collect();
            if let Some(last) = chat.messages.last_mut().filter(|m| m.role == "assistant") {
                if let Some(parts) = last.content.as_array() {
                    let texts = parts.iter().filter_map(|part| part["text"].as_str());
                    last.content = texts.collect::<String>().into();
                }
                chat.continues = true;
            }
            anyhow::Ok((self.text.ask(chat, self.most)?.prompt, images))
        };
        read().with_context(|| format!("line {} of {}", index + 1, texts.name))
    }

    /// Takes the images out of messages and leaves what templates read.
    fn images(&self, texts: &SeenTexts, messages: &mut [Message]) -> anyhow::Result<Vec<Image>> {
        let lists = messages.iter_mut().filter_map(|m| m.content.as_array_mut());
        let mut images = Vec::new();
        for part in lists.flatten() {
            let place = match part["type"].as_str() {
                Some("image_url") => part["image_url"].get("url").unwrap_or(&part["image_url"]),
                Some("image") => &part["image"],
                _ => continue,
            };
            let place = place
                .as_str()
                .context("image: expected a path or a data: URL")?;
            let Some(sight) = &self.sight else {
                bail!("the model reads text alone, and the chat has an image");
            };
            let bytes = match from_data_url(place) {
                Some(bytes) => bytes.map_err(anyhow::Error::msg)?,
                None => texts.file(place, sight.options().limits.bytes)?,
            };
            images.push(sight.image(bytes, None)?);
            *part = image_part();
        }
        Ok(images)
    }
}

impl SeenTexts {
    /// Reads the chats of a file, of which `most` are measured at most.
    pub(super) fn read(path: &Path, most: Option<usize>) -> anyhow::Result<Self> {
        let name = path.file_name().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        let mut chats = Vec::new();
        for (at, line) in texts::whole(path)?.lines().enumerate() {
            if most.is_some_and(|most| chats.len() == most) {
                break;
            }
            let row: ChatLine = serde_json::from_str(line).with_context(|| {
                format!(
                    "line {} of {name}: expected {{\"messages\": [...]}}",
                    at + 1
                )
            })?;
            chats.push(row.messages);
        }
        let folder = path.canonicalize()?;
        let folder = folder
            .parent()
            .context("a file without a folder")?
            .to_owned();
        Ok(SeenTexts {
            name,
            folder,
            chats,
        })
    }

    /// The chats of a file, if one of them holds an image.
    pub(in crate::commands) fn with_images(path: &Path) -> anyhow::Result<Option<Self>> {
        let holds = |line: &str| {
            let row = serde_json::from_str::<ChatLine>(line);
            row.is_ok_and(|row| row.messages.iter().any(holds_image))
        };
        let all = texts::whole(path)?;
        match all.lines().any(holds) {
            true => Self::read(path, None).map(Some),
            false => Ok(None),
        }
    }

    /// What a quantization that asked for `tokens` tokens is calibrated on: chats as the model reads them, each of which
    /// is a sequence, and by its own tower. Images take half of a sequence at most.
    ///
    /// # Errors
    /// A chat that the model cannot read, or an image that it cannot see, by its line.
    pub(in crate::commands) fn calibration(
        &self,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        tokens: usize,
        terminal: &Terminal,
    ) -> anyhow::Result<CalibrationSource> {
        let reader = ChatReader::new(checkpoint, options, SEQUENCE as u64 / 2, terminal)?;
        let (mut prompts, mut held) = (Vec::new(), 0);
        for index in 0..self.chats.len() {
            if held >= tokens {
                break;
            }
            let prompt = reader.prompt(self, index)?;
            held += prompt.ids().len().min(SEQUENCE);
            prompts.push(prompt);
        }
        let name = self.name.clone();
        Ok(CalibrationSource::Prompts { name, prompts })
    }

    /// Their name, in place of a text.
    pub(super) fn text(&self) -> Text {
        Text {
            name: self.name.clone(),
            text: "".into(),
        }
    }

    /// The bytes of an image's file, which must lie in the folder.
    fn file(&self, place: &str, most: usize) -> anyhow::Result<Vec<u8>> {
        let path = Path::new(place);
        let within = |c: Component<'_>| matches!(c, Component::Normal(_) | Component::CurDir);
        let outside = || {
            format!(
                "image {place:?}: expected a path within {}",
                self.folder.display()
            )
        };
        if !path.components().all(within) {
            bail!("{}", outside());
        }
        let found = self.folder.join(path).canonicalize();
        let found = found.with_context(|| format!("image {place:?}"))?;
        if !found.starts_with(&self.folder) || !found.is_file() {
            bail!("{}", outside());
        }
        let bytes = File::open(&found).and_then(|file| read_bounded(file, most as u64));
        bytes.with_context(|| format!("image {place:?}"))
    }

    /// What is measured, in chats of up to `ctx` tokens, or as many as the longest has.
    pub(super) fn spec(
        &self,
        model: &EvalModel,
        ctx: Option<usize>,
        kv: KvType,
    ) -> anyhow::Result<EvalSpec> {
        let reader = reader(model)?;
        let mut longest = 2;
        for index in 0..self.chats.len() {
            longest = longest.max(reader.asked(self, index)?.0.tokens.len());
        }
        Ok(EvalSpec {
            kv,
            ..EvalSpec::new(Protocol::Texts, ctx.unwrap_or(longest), self.name.clone())
        })
    }

    /// Measures a model on the chats, or on the first `most`, beside a reference if there is one.
    pub(super) fn measure(
        &self,
        model: SeenBy<'_>,
        reference: Option<SeenBy<'_>>,
        most: usize,
        spec: &EvalSpec,
        terminal: &Terminal,
    ) -> anyhow::Result<SeenEvaluation> {
        let failed = |e: anyhow::Error| nq_evals::Error::Text(format!("{e:#}"));
        let prompt = |side: SeenBy<'_>, index| reader(side.model)?.prompt(self, index);
        let of_model = |index: usize| prompt(model, index).map_err(failed);
        let of_reference = |index: usize| prompt(reference.unwrap_or(model), index).map_err(failed);
        let tokens = (reader(model.model)?.sight.as_ref()).map(|sight| sight.config().tokens);
        Ok(evaluate_seen(
            model.seeing(&of_model),
            reference.map(|side| side.seeing(&of_reference)),
            self.chats.len().min(most),
            tokens,
            spec,
            terminal,
        )?)
    }
}

/// A model that is measured, and the type of its keys and values.
#[derive(Clone, Copy)]
pub(super) struct SeenBy<'a> {
    pub(super) model: &'a EvalModel,
    pub(super) kv: KvType,
}

impl<'a> SeenBy<'a> {
    fn seeing(self, prompt: &'a dyn Fn(usize) -> nq_evals::Result<ImagePrompt>) -> SeeingModel<'a> {
        SeeingModel {
            engine: self.model.engine.as_ref(),
            prompt,
            kv: self.kv,
        }
    }
}

fn reader(model: &EvalModel) -> anyhow::Result<&ChatReader> {
    (model.reader.as_ref()).context("a model that was not loaded to read chats")
}
