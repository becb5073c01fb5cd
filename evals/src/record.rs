//! A measurement as it is sent to others: what was measured, on what, and how.

use crate::report::{BenchRow, EvalReport};
use nq_formats::hash::HashedFile;
use serde::{Deserialize, Serialize};

/// The form of records that this version writes.
pub const RECORD_FORM: u32 = 1;

/// A measurement of one or several models on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this form.
    pub form: u32,
    /// Version of that nq.
    pub nq: String,
    /// What was done, so that others can do the same: names and settings, no paths.
    pub protocol: String,
    /// The machine.
    pub machine: RecordMachine,
    /// The models, the source of the others first if there is one.
    pub models: Vec<RecordModel>,
    /// Speed, each figure with its spread.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub speed: Vec<BenchRow>,
    /// Quality of the models behind the first one, each figure with its standard error.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quality: Vec<EvalReport>,
    /// Figures of other kinds, by name.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub more: serde_json::Map<String, serde_json::Value>,
}

/// The machine of a [`Record`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordMachine {
    /// The processor's name, if the system tells it.
    pub cpu: Option<String>,
    /// Its logical cores.
    pub logical_cores: usize,
    /// Bytes of memory, if the system tells them.
    pub memory_bytes: Option<u64>,
    /// Names of the GPUs that were there.
    pub gpus: Vec<String>,
    /// Version of the NVIDIA driver.
    pub driver: Option<String>,
}

/// A model of a [`Record`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordModel {
    /// Its short name, such as `Qwen3-8B-int4`.
    pub name: String,
    /// What its codes are called, such as `4-bit mix`.
    pub codes: String,
    /// Bytes of its tensors.
    pub tensor_bytes: u64,
    /// Its weight files; none for random weights, which the name tells.
    pub files: Vec<HashedFile>,
}
