//! PEFT's folders: what their configuration says of an adapter, and what their tensors are.

use super::parts::{Adapter, AdapterPart, LoraProduct, Parts};
use crate::error::{Error, Result};
use crate::files::Files;
use crate::left_over::LeftOver;
use crate::object::Object;
use crate::published::Form;
use crate::shards::{Shards, full_name};
use crate::tensor::Tensor;
use nq_model::FLOATS;
use nq_model::names::EXPERTS;
use regex::Regex;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The file that describes an adapter.
pub(crate) const CONFIG: &str = "adapter_config.json";
/// The file with its tensors.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
/// What PEFT puts before the names of a model's tensors.
const PREFIX: &str = "base_model.model.";
/// The end of a module's name that holds what was there before PEFT wrapped it, one for each time it did.
const WRAPPED: &str = ".base_layer";

/// What a tensor is of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LoraTensor {
    /// `[rank, in]`
    A,
    /// `[out, rank]`
    B,
    /// Of an embedding, `[rank, vocab]`.
    EmbeddingA,
    /// `[hidden, rank]`
    EmbeddingB,
    Magnitude,
    /// Rows of an embedding, for some tokens.
    Tokens,
    /// The module's own weight or bias.
    Whole,
}

/// How PEFT names them. Older files have the adapter's name behind that.
const PARTS: [(&str, LoraTensor); 7] = [
    (".lora_A", LoraTensor::A),
    (".lora_B", LoraTensor::B),
    (".lora_embedding_A", LoraTensor::EmbeddingA),
    (".lora_embedding_B", LoraTensor::EmbeddingB),
    (".lora_magnitude_vector", LoraTensor::Magnitude),
    (".token_adapter.trainable_tokens_delta", LoraTensor::Tokens),
    (".modules_to_save", LoraTensor::Whole),
];

/// The module and the part that a tensor is: `base_model.model.MODULE.lora_A.weight`.
fn part_of(tensor: &str) -> Option<(String, LoraTensor)> {
    let name = tensor.strip_prefix(PREFIX)?;
    for (called, part) in PARTS {
        let Some((module, behind)) = name.split_once(called) else {
            continue;
        };
        let bias = behind.strip_suffix(".bias");
        let adapter = bias.or(behind.strip_suffix(".weight")).unwrap_or(behind);
        let plain = adapter.is_empty() || (adapter.starts_with('.') && !adapter[1..].contains('.'));
        return match (bias, part) {
            _ if !plain => None,
            (None, _) => Some((module.into(), part)),
            (Some(_), LoraTensor::Whole) => Some((format!("{module}.bias"), part)),
            (Some(_), _) => None,
        };
    }
    let module = name.replace(WRAPPED, "");
    let plain = !module.contains("lora_") && !module.contains("_adapter.");
    // A parameter is called as its module, unless it is a bias.
    let called = module.strip_suffix(".weight").unwrap_or(&module);
    plain.then(|| (called.into(), LoraTensor::Whole))
}

/// Opens the adapter in the folder `path`.
pub(super) fn open(path: &Path) -> Result<Adapter> {
    let files = Files::Folder(path.into());
    let (place, json) = (files.path(CONFIG), files.require(CONFIG)?);
    let config = Object::parse(&place, &json)?;
    let rule = Rule::read(&config)?;
    let shards = Shards::open_named(&files, WEIGHTS)?;
    let mut modules: BTreeMap<String, Module> = BTreeMap::new();
    let mut left_over = Vec::new();
    for tensor in shards.names() {
        if tensor.contains(".visual.") {
            left_over.push(LeftOver::new(tensor, "images are not read"));
            continue;
        }
        let (Some((module, part)), Some(values)) = (part_of(tensor), shards.get(tensor)) else {
            return Err(Error::Unsupported {
                path: files.path(WEIGHTS),
                what: format!("tensor {tensor}"),
                why: "nq merges lora_A, lora_B and lora_magnitude_vector of matrices, whole \
                      parameters and trained tokens"
                    .into(),
            });
        };
        let parts = modules.entry(module).or_default();
        if let Some((other, _)) = parts.insert(part, (tensor.into(), values)) {
            return Err(shards.error(tensor, "one of a kind".into(), format!("{other} too")));
        }
    }
    let mut read = Read {
        rule: &rule,
        shards: &shards,
        modules: &modules,
        bare: modules.keys().any(|m| m.starts_with("layers.")),
        sums: BTreeMap::new(),
        whole: BTreeMap::new(),
        tokens: BTreeMap::new(),
        magnitudes: BTreeMap::new(),
    };
    for (module, parts) in &modules {
        read.module(module, parts)?;
    }
    Ok(Adapter {
        path: path.into(),
        form: Form::HuggingFace,
        architecture: None,
        sums: Parts::sums(path, read.sums),
        whole: Parts::replacing(path, read.whole),
        tokens: Parts::replacing(path, read.tokens),
        magnitudes: Parts::lengths(path, read.magnitudes),
        keeps_tied: rule.keeps_tied,
        left_over,
    })
}

/// The parts of a module, each with its name in the file.
type Module = BTreeMap<LoraTensor, (String, Tensor)>;

/// What was read of an adapter so far.
struct Read<'a> {
    rule: &'a Rule,
    shards: &'a Shards,
    modules: &'a BTreeMap<String, Module>,
    /// True if the model has no head, and its parameters are named without `model.`.
    bare: bool,
    sums: BTreeMap<String, AdapterPart>,
    whole: BTreeMap<String, AdapterPart>,
    tokens: BTreeMap<String, AdapterPart>,
    magnitudes: BTreeMap<String, AdapterPart>,
}

impl Read<'_> {
    fn module(&mut self, module: &str, parts: &Module) -> Result<()> {
        let plain = module.replace(WRAPPED, "");
        let experts = plain.ends_with(EXPERTS) && parts.contains_key(&LoraTensor::A);
        // What PEFT calls it where patterns are compared with names.
        let called = match experts {
            true => format!("{plain}.{}", self.parameter(module, &plain, parts)?),
            false => plain,
        };
        let name = full_name(&called, self.bare);
        let product = match self.pair(module, parts)? {
            Some((a, b)) => Some(self.product(&called, experts, a, b)?),
            None => None,
        };
        let dora = self.rule.dora && product.is_some();
        match (dora, parts.get(&LoraTensor::Magnitude)) {
            (true, Some(_)) if parts.contains_key(&LoraTensor::EmbeddingA) => {
                let expected = "no magnitudes of an embedding, which nq does not merge".into();
                return Err(self.error(module, expected, "some".into()));
            }
            (true, Some(magnitude)) => {
                let values = floats(self.shards, magnitude)?;
                let len = values.len();
                let values = AdapterPart::Whole(Tensor::from_f32(vec![len], values)?);
                self.magnitudes.insert(name.clone(), values);
            }
            (false, None) => {}
            (dora, found) => {
                let expected = format!("magnitudes for each matrix, or none: use_dora is {dora}");
                let found = found.map_or("none", |_| "some");
                return Err(self.error(module, expected, found.into()));
            }
        }
        if let Some(product) = product {
            self.sums
                .insert(name.clone(), AdapterPart::Product(product));
        }
        if let Some((tensor, values)) = parts.get(&LoraTensor::Tokens) {
            let rows = self.rule.tokens(&called);
            if values.shape().len() != 2 || values.shape()[0] != rows.len() {
                let expected = format!("a row for each of {} trainable_token_indices", rows.len());
                let found = format!("{:?}", values.shape());
                return Err(self.shards.error(tensor, expected, found));
            }
            let checked = self.whole(tensor, values)?;
            self.tokens
                .insert(name.clone(), AdapterPart::Rows(rows, checked));
        }
        if let Some((tensor, values)) = parts.get(&LoraTensor::Whole) {
            let values = AdapterPart::Whole(self.whole(tensor, values)?);
            self.whole.insert(name, values);
        }
        Ok(())
    }

    /// The tensor, whose values must be finite.
    fn whole(&self, tensor: &str, values: &Tensor) -> Result<Tensor> {
        floats(self.shards, &(tensor.into(), values.clone())).map(|_| values.clone())
    }

    fn error(&self, module: &str, expected: String, found: String) -> Error {
        let tensor = format!("{PREFIX}{module}");
        self.shards.error(&tensor, expected, found)
    }

    /// `A` `[rank, in]` and `B` `[out, rank]` of a module that has one of them.
    fn pair(&self, module: &str, parts: &Module) -> Result<Option<(Matrix, Matrix)>> {
        let read = |part| parts.get(&part).map(|t| Matrix::read(self.shards, t));
        let pairs = [
            (LoraTensor::A, LoraTensor::B),
            (LoraTensor::EmbeddingA, LoraTensor::EmbeddingB),
        ];
        let pairs = pairs.map(|(a, b)| (read(a).transpose(), read(b).transpose()));
        let [(a, b), (inputs, outputs)] = pairs;
        match (a?, b?, inputs?, outputs?) {
            (None, None, None, None) => Ok(None),
            (Some(a), Some(b), None, None) => Ok(Some((a, b))),
            // Of rows that are looked up: of the transposed matrix.
            (None, None, Some(a), Some(b)) => Ok(Some((b.transposed(), a.transposed()))),
            _ => {
                let expected = "lora_A and lora_B, one beside the other".into();
                Err(self.error(module, expected, "one of them".into()))
            }
        }
    }

    /// The parameter of a layer's experts that is changed, which files do not name: PEFT wraps the experts once for
    /// each.
    fn parameter(&self, module: &str, plain: &str, parts: &Module) -> Result<&str> {
        let dims = |parts: &Module| {
            let cols = |part| {
                parts
                    .get(&part)
                    .and_then(|(_, t)| t.shape().get(1).copied())
            };
            let rows = |part| {
                parts
                    .get(&part)
                    .and_then(|(_, t)| t.shape().first().copied())
            };
            (cols(LoraTensor::A), rows(LoraTensor::B))
        };
        let mut others = self.modules.iter();
        let other = others.find(|(m, parts)| {
            let same = m.as_str() != module && m.replace(WRAPPED, "") == plain;
            same && parts.contains_key(&LoraTensor::A)
        });
        let (inputs, outputs) = dims(parts);
        match other.map(|(_, parts)| dims(parts)) {
            None => match &self.rule.parameters[..] {
                [one] => Ok(one),
                several => {
                    let expected = format!("one part for each of target_parameters {several:?}");
                    Err(self.error(module, expected, "one".into()))
                }
            },
            Some((i, o)) if inputs == o && outputs == i.map(|i| 2 * i) => Ok("gate_up_proj"),
            Some((i, o)) if i == outputs && o == inputs.map(|i| 2 * i) => Ok("down_proj"),
            Some(other) => {
                let expected = "inputs and outputs of gate_up_proj and of down_proj".into();
                let found = format!("{:?} and {other:?}", (inputs, outputs));
                Err(self.error(module, expected, found))
            }
        }
    }

    fn product(&self, called: &str, experts: bool, a: Matrix, b: Matrix) -> Result<LoraProduct> {
        let said = self.rule.rank(called);
        let (experts, rank) = match said.filter(|_| experts) {
            Some(rank) if a.rows.is_multiple_of(rank) => (a.rows / rank, rank),
            _ => (1, a.rows),
        };
        let fits = a.rows == b.cols && a.rows > 0 && a.cols > 0 && b.rows > 0;
        if !fits || said.is_some_and(|r| r != rank) {
            let rank = said.map_or("their rank".into(), |r| r.to_string());
            let expected = format!("lora_A [rank, in] and lora_B [out, rank] of rank {rank}");
            let found = format!("{:?} and {:?}", [a.rows, a.cols], [b.rows, b.cols]);
            return Err(self.error(called, expected, found));
        }
        // Experts are the slowest of A's rows and the fastest of B's columns.
        let column = |e: usize, k: usize| k * experts + e;
        let row = |e: usize, r: usize| (0..rank).map(move |k| (r, column(e, k)));
        let order = (0..experts).flat_map(|e| (0..b.rows).flat_map(move |r| row(e, r)));
        Ok(LoraProduct {
            b: order.map(|(r, c)| b.values[r * b.cols + c]).collect(),
            a: a.values,
            experts,
            rank,
            scale: self.rule.scale(called, rank),
        })
    }
}

/// A matrix of an adapter, by rows.
struct Matrix {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

impl Matrix {
    fn read(shards: &Shards, tensor: &(String, Tensor)) -> Result<Self> {
        let &[rows, cols] = tensor.1.shape() else {
            let found = format!("{:?}", tensor.1.shape());
            return Err(shards.error(&tensor.0, "a matrix".into(), found));
        };
        let values = floats(shards, tensor)?;
        Ok(Matrix { rows, cols, values })
    }

    fn transposed(self) -> Self {
        let row = |c: usize| self.values.iter().skip(c).step_by(self.cols).copied();
        Matrix {
            rows: self.cols,
            cols: self.rows,
            values: (0..self.cols).flat_map(row).collect(),
        }
    }
}

fn floats(shards: &Shards, (name, tensor): &(String, Tensor)) -> Result<Vec<f32>> {
    let values = shards.require(name, &FLOATS, tensor.shape())?.to_f32()?;
    match values.iter().find(|v| !v.is_finite()) {
        None => Ok(values),
        Some(v) => Err(shards.error(name, "finite values".into(), v.to_string())),
    }
}

/// Regular expressions of names, each with a value, in the file's order.
struct Patterns(Vec<(Regex, f64)>);

impl Patterns {
    /// Those under `key`: as in PEFT, the end of a name that begins behind a dot must match.
    fn read(config: &Object<'_>, key: &str) -> Result<Self> {
        let pairs = config.typed(key, "names and numbers", |v| {
            let pair = |(k, v): (&String, &Value)| Some((k.clone(), v.as_f64()?));
            v.as_object()?.iter().map(pair).collect::<Option<Vec<_>>>()
        })?;
        let compiled = pairs.unwrap_or_default().into_iter().map(|(name, value)| {
            let pattern = Regex::new(&format!(r"^(?:.*\.)?(?:{name})$"));
            pattern.map(|p| (p, value)).map_err(|e| {
                let why = format!("nq does not read it as a regular expression: {e}");
                config.unsupported(format!("{key} {name}"), &why)
            })
        });
        compiled.collect::<Result<_>>().map(Patterns)
    }

    /// The value of the first that matches.
    fn get(&self, name: &str) -> Option<f64> {
        let mut patterns = self.0.iter();
        let found = patterns.find(|(pattern, _)| pattern.is_match(name));
        found.map(|(_, value)| *value)
    }
}

/// The settings that decide how an adapter is merged.
struct Rule {
    rank: Option<usize>,
    ranks: Patterns,
    alpha: f64,
    alphas: Patterns,
    /// Scales by the root of the rank (Kalajdzievski, arXiv 2312.03732).
    root: bool,
    dora: bool,
    keeps_tied: bool,
    /// Names of parameters within a layer's experts.
    parameters: Vec<String>,
    /// Trained tokens, by the end of a module's name.
    tokens: BTreeMap<String, Vec<usize>>,
}

/// Keys that say how an adapter was trained, or what its tensors show by themselves.
#[rustfmt::skip]
const TOLD_OTHERWISE: [&str; 16] = [
    "auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "modules_to_save", "peft_version",
    "qalora_group_size", "revision", "target_modules", "task_type",
];

/// Starts of training that leave the model as it was published, and those that change it: what they train is added to
/// another model than the published one.
const STARTS: [&str; 4] = ["eva", "gaussian", "mica", "orthogonal"];
const CHANGING_STARTS: [&str; 5] = ["corda", "loftq", "lora_ga", "olora", "pissa"];

/// The module of trained tokens that are not said to be of another one.
const TOKENS_OF: &str = "embed_tokens";

impl Rule {
    fn read(config: &Object<'_>) -> Result<Self> {
        let kind = config.str("peft_type")?.unwrap_or_default();
        if kind != "LORA" {
            let why = "nq merges LoRA and DoRA adapters";
            return Err(config.unsupported(format!("peft_type {kind}"), why));
        }
        let start = config.get("init_lora_weights").filter(|v| !v.is_boolean());
        if let Some(start) = start {
            let name = start.as_str().unwrap_or_default().to_lowercase();
            let why = match CHANGING_STARTS.iter().any(|how| name.starts_with(how)) {
                true => "it changes the model that it is trained on; convert it to plain LoRA",
                false => "nq does not know whether it changes the model that it is trained on",
            };
            if !STARTS.contains(&name.as_str()) {
                return Err(config.unsupported(format!("init_lora_weights {start}"), why));
            }
        }
        let alpha = config.f64("lora_alpha")?;
        let missing = || config.bad("lora_alpha", "a number".into(), "no such key".into());
        let rank = match config.get("r") {
            Some(_) => Some(config.dim("r")?),
            None => None,
        };
        let parameters = config.strings("target_parameters")?.into_iter();
        let expected = "token ids, or lists of them by module";
        let tokens = config.typed("trainable_token_indices", expected, |v| {
            let id = |v: &Value| v.as_u64().and_then(|id| usize::try_from(id).ok());
            let ids = |v: &Value| v.as_array()?.iter().map(id).collect::<Option<Vec<_>>>();
            match v {
                Value::Array(_) => Some(BTreeMap::from([(TOKENS_OF.into(), ids(v)?)])),
                Value::Object(modules) => {
                    let pair = |(name, v): (&String, &Value)| Some((name.clone(), ids(v)?));
                    modules.iter().map(pair).collect()
                }
                _ => None,
            }
        })?;
        let rule = Rule {
            rank,
            ranks: Patterns::read(config, "rank_pattern")?,
            alpha: alpha.ok_or_else(missing)?,
            alphas: Patterns::read(config, "alpha_pattern")?,
            root: config.bool("use_rslora")?.unwrap_or(false),
            dora: config.bool("use_dora")?.unwrap_or(false),
            keeps_tied: config.bool("ensure_weight_tying")?.unwrap_or(false),
            parameters: parameters
                .filter_map(|p| Some(p.rsplit_once("experts.")?.1.to_owned()))
                .collect(),
            tokens: tokens.unwrap_or_default(),
        };
        TOLD_OTHERWISE.iter().for_each(|key| {
            config.get(key);
        });
        match config.unasked() {
            None => Ok(rule),
            Some((key, value)) => {
                let why = "nq merges LoRA and DoRA, whole parameters and trained tokens";
                Err(config.unsupported(format!("{key} {value}"), why))
            }
        }
    }

    /// The rank of a module, if the configuration says one.
    fn rank(&self, name: &str) -> Option<usize> {
        let own = self.ranks.get(name).map(|rank| rank as usize);
        own.or(self.rank).filter(|rank| *rank > 0)
    }

    fn scale(&self, name: &str, rank: usize) -> f64 {
        let alpha = self.alphas.get(name).unwrap_or(self.alpha);
        let rank = rank as f64;
        alpha / if self.root { rank.sqrt() } else { rank }
    }

    /// The trained tokens of a module.
    fn tokens(&self, name: &str) -> Vec<usize> {
        let mut all = self.tokens.iter();
        let found = all.find(|(module, _)| {
            let before = name.strip_suffix(module.as_str());
            before.is_some_and(|b| b.is_empty() || b.ends_with('.'))
        });
        found.map(|(_, rows)| rows.clone()).unwrap_or_default()
    }
}
