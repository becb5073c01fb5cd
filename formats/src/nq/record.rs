//! A quantized folder's description of itself: config.json's `quantization_config`.

use crate::blocks::BlockType;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::scheme::{AffineScheme, Bits, Group, Levels, Scales, Scheme, Zeros};
use crate::store::OWN_FORMAT;
use crate::trellis::TrellisScheme;
use crate::weight::QuantizedWeight;
use nq_model::names::{is_layer_linear, parameters};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// The `quant_method` of the format.
pub const METHOD: &str = OWN_FORMAT;
/// The first version: schemes of 4 or 8 bits with an f16 scale per group and even steps.
pub(crate) const FIRST_VERSION: u32 = 1;
/// The newest version that this crate reads: with trellis codes. A folder has the oldest version that allows its
/// schemes.
pub const VERSION: u32 = 3;

/// How one weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorScheme {
    /// What its codes mean.
    pub scheme: Scheme,
    /// True if each input's group is listed (activation order); only affine schemes have groups.
    pub g_idx: bool,
}

/// An affine [`TensorScheme`] as files name it. A [`TrellisScheme`] names itself.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AffineRecord {
    bits: Bits,
    group: Group,
    zeros: Zeros,
    #[serde(default, skip_serializing_if = "Scales::is_half")]
    scales: Scales,
    #[serde(default, skip_serializing_if = "Levels::is_even")]
    levels: Levels,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    g_idx: bool,
}

impl Serialize for TensorScheme {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let AffineScheme {
            bits,
            group,
            zeros,
            scales,
            levels,
        } = match self.scheme {
            Scheme::Trellis(scheme) => return scheme.serialize(to),
            Scheme::Exl3(scheme) => return scheme.serialize(to),
            Scheme::Affine(scheme) => scheme,
        };
        let g_idx = self.g_idx;
        let record = AffineRecord {
            bits,
            group,
            zeros,
            scales,
            levels,
            g_idx,
        };
        record.serialize(to)
    }
}

impl<'de> Deserialize<'de> for TensorScheme {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let fields = Map::deserialize(from)?;
        let trellis = fields.contains_key("trellis");
        let fields = Value::Object(fields);
        let read = if trellis {
            TrellisScheme::deserialize(fields).map(|scheme| TensorScheme {
                scheme: scheme.into(),
                g_idx: false,
            })
        } else {
            AffineRecord::deserialize(fields).map(|r| TensorScheme {
                scheme: Scheme::Affine(AffineScheme {
                    bits: r.bits,
                    group: r.group,
                    zeros: r.zeros,
                    scales: r.scales,
                    levels: r.levels,
                }),
                g_idx: r.g_idx,
            })
        };
        read.map_err(D::Error::custom)
    }
}

impl TensorScheme {
    /// The scheme of `weight`.
    pub fn of(weight: &QuantizedWeight) -> Self {
        TensorScheme {
            scheme: weight.scheme(),
            g_idx: match weight {
                QuantizedWeight::Affine(a) => a.g_idx().is_some(),
                QuantizedWeight::Trellis(_) | QuantizedWeight::Exl3(_) => false,
            },
        }
    }

    /// The oldest version of the format that has such schemes.
    fn version(self) -> u32 {
        match self.scheme {
            Scheme::Affine(scheme) if scheme.is_plain() => FIRST_VERSION,
            Scheme::Affine(_) => 2,
            Scheme::Trellis(_) | Scheme::Exl3(_) => 3,
        }
    }
}

impl fmt::Display for TensorScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = if self.g_idx { " with g_idx" } else { "" };
        write!(f, "{}{listed}", self.scheme)
    }
}

/// What codes of these schemes, those of a model's layers, are called: `4-bit`, `3.5-bit trellis`, `mix of 4 to 6 bits`.
pub fn called(schemes: impl Iterator<Item = Scheme>) -> String {
    let (mut least, mut most, mut trellis) = (f32::INFINITY, 0.0_f32, true);
    for scheme in schemes {
        least = least.min(scheme.bits());
        most = most.max(scheme.bits());
        trellis &= scheme.trellis().is_some();
    }
    let kind = if trellis { " trellis" } else { "" };
    match (most == 0.0, least < most) {
        (true, _) => "unquantized".into(),
        (_, true) => format!("mix of {least} to {most} bits{kind}"),
        (_, false) => format!("{least}-bit{kind}"),
    }
}

/// What the codes of a checkpoint's layers are called: as its record says, or else by their schemes.
///
/// # Errors
/// A record that cannot be read.
pub fn called_in(checkpoint: &Checkpoint) -> Result<String> {
    if let Some(record) = super::record(checkpoint)? {
        return Ok(record.codes());
    }
    // Of a GGUF file, the types of its layers, those of most bytes first.
    let mut types: BTreeMap<String, u64> = BTreeMap::new();
    for entry in checkpoint.store().entries() {
        let blocks = BlockType::from_name(&entry.dtype).is_some_and(|t| t.layout().is_some());
        if blocks && entry.name.starts_with("blk.") {
            *types.entry(entry.dtype).or_default() += entry.bytes;
        }
    }
    if !types.is_empty() {
        let mut types: Vec<_> = types.into_iter().collect();
        types.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let names: Vec<String> = types.into_iter().map(|(name, _)| name).collect();
        return Ok(names.join(" + "));
    }
    let names = parameters(checkpoint.config()).into_iter();
    let layers = names.filter(|(name, _)| is_layer_linear(name));
    Ok(called(
        layers.filter_map(|(name, _)| checkpoint.store().scheme(&name)),
    ))
}

/// Origin of the unquantized weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRecord {
    /// Hub id or folder name.
    pub name: String,
    /// Hash of the weights ([`crate::hash::weights_sha256`]), or the hub's commit; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sha256: String,
    /// The hub's commit, if the model came from the hub.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub revision: String,
}

/// The text that a method was calibrated on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CalibrationRecord {
    /// `self` (sampled from the model) or a file name.
    pub name: String,
    /// Hash of the token ids as little-endian u32.
    pub sha256: String,
    /// Number of tokens used.
    pub tokens: u64,
}

/// The quantization record of a folder. [`super::Writer`] sets the schemes to those written;
/// the caller fills in the rest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QuantizationRecord {
    /// Scheme of the Linears of every layer; `None` if they are unquantized.
    pub linears: Option<TensorScheme>,
    /// Weights that deviate from `linears`, and quantized ones outside the layers; null for
    /// an unquantized one.
    #[serde(default)]
    pub overrides: BTreeMap<String, Option<TensorScheme>>,
    /// The method that computed the codes: `rtn`, `awq`, `gptq`, ...
    pub method: String,
    /// The method's settings, under its own names.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub settings: Map<String, Value>,
    /// The unquantized model.
    pub source: SourceRecord,
    /// Absent for methods that need no calibration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationRecord>,
    /// Seed of every random choice.
    #[serde(default)]
    pub seed: u64,
    /// Weights that the method could not process, and what was done instead.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fallbacks: Vec<String>,
    /// Measured quality, as printed by `nq eval --json`; null if not measured.
    #[serde(default)]
    pub quality: Option<Value>,
}

/// The key of [`QuantizationRecord::settings`] for what the codes are called.
pub const CODES: &str = "codes";

impl QuantizationRecord {
    /// What people call the file's codes: as its maker wrote it, such as `4-bit mix`, or else by its schemes.
    pub fn codes(&self) -> String {
        if let Some(name) = self.settings.get(CODES).and_then(Value::as_str) {
            return name.to_owned();
        }
        let layers = self
            .overrides
            .iter()
            .filter(|(name, _)| is_layer_linear(name));
        called(
            self.linears
                .into_iter()
                .chain(layers.filter_map(|(_, s)| *s))
                .map(|s| s.scheme),
        )
    }

    /// How the weight `name` (without `.weight`) is stored; `None` if unquantized.
    pub fn scheme(&self, name: &str) -> Option<TensorScheme> {
        match self.overrides.get(name) {
            Some(scheme) => *scheme,
            None if is_layer_linear(name) => self.linears,
            None => None,
        }
    }

    /// Reads the `quantization_config` of the config.json at `path`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for another `quant_method` or version; [`Error::Malformed`] for missing
    /// or mistyped keys and invalid schemes.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let malformed = |what: &str, expected: &str, found: String| Error::Malformed {
            path: path.into(),
            what: format!("quantization_config{what}"),
            expected: expected.into(),
            found,
        };
        let get = |key: &str| value.get(key).cloned().unwrap_or_default();
        if get("quant_method") != METHOD {
            let found = get("quant_method").to_string();
            return Err(malformed(".quant_method", "\"nq\"", found));
        }
        match get("version").as_u64() {
            Some(v) if (u64::from(FIRST_VERSION)..=u64::from(VERSION)).contains(&v) => {}
            Some(v) => {
                return Err(Error::Unsupported {
                    path: path.into(),
                    what: format!("version {v} of the nq format"),
                    why: format!("this build reads versions {FIRST_VERSION} to {VERSION}"),
                });
            }
            None => {
                let found = get("version").to_string();
                return Err(malformed(".version", "an integer", found));
            }
        }
        // Absent does not mean null here: leaving schemes out must not mean "unquantized".
        if value.get("linears").is_none() {
            return Err(malformed(
                ".linears",
                "a scheme or null",
                "no such key".into(),
            ));
        }
        let record =
            Self::deserialize(value).map_err(|e| malformed("", "an nq record", e.to_string()))?;
        for (key, scheme) in record.named_schemes() {
            if let Some(Err(e)) = scheme.scheme.affine().map(|s| s.check()) {
                return Err(malformed(&key, "a valid scheme", e.to_string()));
            }
            let version = get("version").as_u64().unwrap_or(0);
            if version < u64::from(scheme.version()) {
                let expected = format!("a scheme of version {version}");
                return Err(malformed(&key, &expected, scheme.to_string()));
            }
        }
        Ok(record)
    }

    /// Every scheme, with its key in the record.
    fn named_schemes(&self) -> impl Iterator<Item = (String, TensorScheme)> {
        let linears = self.linears.map(|s| (".linears".to_owned(), s));
        let overrides = self.overrides.iter();
        let overrides =
            overrides.filter_map(|(name, s)| Some((format!(".overrides.{name}"), (*s)?)));
        linears.into_iter().chain(overrides)
    }

    /// The oldest version of the format that allows all schemes.
    pub fn version(&self) -> u32 {
        let versions = self.named_schemes().map(|(_, s)| s.version());
        versions.max().unwrap_or(FIRST_VERSION)
    }

    /// The `quantization_config` with this record.
    pub fn to_json(&self) -> Value {
        let mut map = Map::new();
        map.insert("quant_method".into(), METHOD.into());
        map.insert("version".into(), self.version().into());
        match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => map.extend(fields),
            other => unreachable!("a struct with string keys is an object: {other:?}"),
        }
        Value::Object(map)
    }

    /// Sets the schemes from those of all matrices, by name: the most frequent one among the
    /// layers' Linears becomes `linears`, the others become overrides.
    pub(crate) fn set_schemes(&mut self, schemes: &BTreeMap<String, Option<TensorScheme>>) {
        let mut counts: Vec<(Option<TensorScheme>, usize)> = Vec::new();
        for (_, scheme) in schemes.iter().filter(|(name, _)| is_layer_linear(name)) {
            match counts.iter_mut().find(|(s, _)| s == scheme) {
                Some((_, n)) => *n += 1,
                None => counts.push((*scheme, 1)),
            }
        }
        // Of equally frequent ones, the first in name order.
        let most = counts.iter().rev().max_by_key(|(_, n)| *n);
        self.linears = most.and_then(|(scheme, _)| *scheme);
        self.overrides.clear();
        for (name, &scheme) in schemes {
            if self.scheme(name) != scheme {
                self.overrides.insert(name.clone(), scheme);
            }
        }
    }
}
