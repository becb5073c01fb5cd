//! What is known of a model, loaded or not: what clients ask for before they use it.

use nq_answers::ToolPrompt;
use nq_formats::hash::sha256_hex;
use nq_formats::{Checkpoint, Error, Files, Scheme, Task, nq};
use nq_model::Shape;
use nq_model::vision::VisionConfig;
use nq_runtime::ChatTemplate;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// What tells the weights of a checkpoint from others: its files by their places, sizes and times or, where they are
/// built in, by their contents.
///
/// # Errors
/// A file that is gone.
pub fn identity(checkpoint: &Checkpoint) -> nq_formats::Result<String> {
    let entries = checkpoint.store().entries();
    let names: BTreeSet<String> = entries.into_iter().map(|e| e.file).collect();
    let files = checkpoint.files();
    let mut text = String::new();
    for name in names {
        let path = files.path(&name);
        text += &match (path.canonicalize(), files) {
            (_, Files::Embedded { .. }) | (Err(_), _) => sha256_hex(&files.require(&name)?),
            (Ok(path), _) => {
                let found = path.metadata().and_then(|m| Ok((m.len(), m.modified()?)));
                let (bytes, time) = found.map_err(|e| Error::io(&path, "read", e))?;
                format!("{path:?} {bytes} {time:?}\n")
            }
        };
    }
    Ok(text)
}

/// What is known of a model without its engine.
#[derive(Clone, Debug, PartialEq)]
pub struct About {
    /// What it is for: `generate`, `embed` or `rerank`.
    pub task: &'static str,
    /// Most positions of a sequence.
    pub context: usize,
    /// The format of its files.
    pub format: &'static str,
    /// What its codes are called, such as `4-bit mix`, if its files are in nq's own format.
    pub codes: Option<String>,
    /// The scheme of most of its quantized weights, if its files are quantized so.
    pub scheme: Option<Scheme>,
    /// Bytes of its files of weights.
    pub bytes: u64,
    /// The SHA-256 of their [`identity`], in hexadecimal digits; `None` if one is gone.
    pub digest: Option<String>,
    /// Bits of a weight in its files on average, embedding and head included.
    pub bits_per_weight: f64,
    /// The bits that its weights are quantized to at load, if they are.
    pub bits_at_load: Option<u32>,
    /// What it runs on, if it is loaded.
    pub device: Option<String>,
    /// True if its template presents tools and reads their results.
    pub tools: bool,
    /// True if a request can switch thinking.
    pub switches_thinking: bool,
    /// True if a request can say how much is thought, and the template tells the model.
    pub reads_effort: bool,
    /// What it sees images with, if it does.
    pub tower: Option<AboutTower>,
}

impl About {
    /// What the files and the name for clients say; `context` is the most positions that it will have.
    pub fn of(
        checkpoint: &Checkpoint,
        name: &str,
        template: Option<&ChatTemplate>,
        context: usize,
    ) -> Self {
        let store = checkpoint.store();
        let mut bytes: BTreeMap<String, (u64, Scheme)> = BTreeMap::new();
        for entry in store.entries() {
            let name = entry.name.rsplit_once('.').map_or("", |(name, _)| name);
            if let Some(scheme) = store.scheme(name) {
                let sum = bytes.entry(scheme.to_string()).or_insert((0, scheme));
                sum.0 += entry.bytes;
            }
        }
        let most = bytes.into_values().max_by_key(|(bytes, _)| *bytes);
        About {
            task: match checkpoint.task().clone().of_name(name) {
                Task::Generate => "generate",
                Task::Embed(_) => "embed",
                Task::Rerank => "rerank",
            },
            context,
            format: store.format(),
            codes: nq::record(checkpoint).ok().flatten().map(|r| r.codes()),
            scheme: most.map(|(_, scheme)| scheme),
            bytes: store.file_bytes(),
            digest: identity(checkpoint)
                .ok()
                .map(|text| sha256_hex(text.as_bytes())),
            bits_per_weight: checkpoint.bits_per_weight(),
            bits_at_load: None,
            device: None,
            tools: template.is_some_and(|t| ToolPrompt::of(t).is_templates()),
            switches_thinking: template.is_some_and(ChatTemplate::switches_thinking),
            reads_effort: template.is_some_and(ChatTemplate::reads_effort),
            tower: AboutTower::of(checkpoint, u64::MAX),
        }
    }

    /// The same for a client.
    pub fn json(&self) -> Value {
        let scheme = self.scheme.as_ref();
        json!({
            "task": self.task,
            "max_model_len": self.context,
            "device": self.device,
            "bytes": self.bytes,
            "digest": self.digest,
            "quantization": {
                "format": self.format,
                "codes": self.codes,
                "scheme": scheme.map(|s| s.to_string()),
                "bits": scheme.map(|s| number(s.bits())),
                "bits_at_load": self.bits_at_load,
                "bits_per_weight": (self.bits_per_weight * 100.0).round() / 100.0,
            },
            "tools": self.tools,
            "switches_thinking": self.switches_thinking,
            "reads_effort": self.reads_effort,
            "vision": self.tower.as_ref().map(AboutTower::json),
            "input_modalities": if self.tower.is_some() { &["text", "image"][..] } else { &["text"] },
        })
    }
}

/// What is known of the tower of a model that sees.
#[derive(Clone, Debug, PartialEq)]
pub struct AboutTower {
    /// Its shape, and the sizes of images.
    pub config: VisionConfig,
    /// Tokens of an image at most.
    pub most_tokens: u64,
    /// Bytes of its tensors.
    pub bytes: u64,
}

impl AboutTower {
    /// The tower in the files of a model, if there is one, whose images have `most` tokens at most.
    pub fn of(checkpoint: &Checkpoint, most: u64) -> Option<Self> {
        let config = checkpoint.vision()?;
        Some(AboutTower {
            most_tokens: most.min(config.most_tokens()),
            bytes: checkpoint.tower_bytes(),
            config: config.clone(),
        })
    }

    /// Number of its parameters.
    pub fn parameters(&self) -> usize {
        let shapes = self.config.parameters().into_iter().map(|p| p.shape);
        let sizes = shapes.map(|shape| match shape {
            Shape::Vector(n) => n,
            Shape::Matrix(rows, columns) => rows * columns,
        });
        sizes.sum()
    }

    /// Pixels of a side of the square that becomes a token.
    pub fn token_side(&self) -> usize {
        self.config.patch_size * self.config.spatial_merge_size
    }

    /// Tokens of an image at least.
    pub fn least_tokens(&self) -> u64 {
        let least = self
            .config
            .pixels
            .least
            .div_ceil(self.token_side().pow(2) as u64);
        least.min(self.most_tokens)
    }

    /// The same for a client.
    pub fn json(&self) -> Value {
        let c = &self.config;
        json!({
            "parameters": self.parameters(), "bytes": self.bytes, "blocks": c.depth, "hidden_size": c.hidden_size,
            "heads": c.num_heads, "patch_size": c.patch_size, "token_side": self.token_side(),
            "min_tokens": self.least_tokens(), "max_tokens": self.most_tokens,
        })
    }
}

/// Bits of a code: a whole number wherever it is one, as clients expect.
fn number(bits: f32) -> Value {
    match bits.fract() == 0.0 {
        true => json!(bits as u32),
        false => json!(bits),
    }
}
