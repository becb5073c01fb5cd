//! Fuzz targets for readers of files that may come from anywhere. A target panics if a reader
//! panics or violates an invariant. `fuzz/run NAME` runs them under libFuzzer;
//! `formats/tests/fuzz_smoke.rs` runs the same functions over `fuzz/seeds` and mutations of valid
//! files.
#![allow(dead_code, unreachable_pub)]

use bytes::Bytes;
use nq_formats::VirtualFiles;
use nq_formats::eagle::EagleConfig;
use nq_formats::gguf::{BlockType, BlockWeight};
use nq_formats::safetensors::SafetensorsFile;
use nq_formats::{Checkpoint, Exactness, Files, GenerationDefaults, Result, nq, tokenizer};
use nq_model::{Dims, ModelConfig, names};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A safetensors file: in an accepted file, tensors are inside it, cover it, and are what the
/// `safetensors` crate reads.
pub fn safetensors(data: &[u8]) {
    let path = Path::new("fuzz.safetensors");
    let Ok(file) = SafetensorsFile::parse(path, Bytes::copy_from_slice(data)) else {
        return;
    };
    let theirs = safetensors::SafeTensors::deserialize(data).expect("a file nq accepts is valid");
    assert_eq!(theirs.len(), file.names().count());
    let mut total = 0;
    for name in file.names() {
        let ours = file.get(name).expect("a listed tensor");
        let view = theirs.tensor(name).expect("the same names");
        assert_eq!(ours.data(), view.data());
        assert_eq!(ours.shape(), view.shape());
        total += ours.data().len();
    }
    assert_eq!(total as u64, file.entries().map(|e| e.bytes).sum::<u64>());
}

/// A GGUF file: in an accepted file, tensors are inside it, every tensor in blocks is dequantized, the
/// tokenizer is rebuilt or refused, and if it opens as a model, all parameters are read.
pub fn gguf(data: &[u8]) {
    let path = Path::new("fuzz.gguf");
    let Ok(file) = nq_formats::gguf::GgufFile::parse(path, Bytes::copy_from_slice(data)) else {
        return;
    };
    let mut total = 0;
    for info in file.tensors().values() {
        let data = file.data(info);
        total += data.len() as u64;
        if let [rows, cols] = info.shape[..]
            && info.kind.layout().is_some()
            && rows.saturating_mul(cols) <= MOST
        {
            dequantize(info.kind, Dims::new(rows, cols), data);
        }
    }
    assert_eq!(total, file.entries().map(|e| e.bytes).sum::<u64>());
    assert!(total <= file.file_bytes());
    let _ = nq_formats::gguf::tokenizer::tokenizer_json(&file);
    let _ = nq_formats::gguf::tokenizer::tokenizer_config_json(&file);
    let files = Files::Virtual(Arc::new(FilesInMemory(vec![(
        "model.gguf",
        Bytes::copy_from_slice(data),
    )])));
    if let Ok(checkpoint) = Checkpoint::open_files(files) {
        read_all(&checkpoint);
    }
}

/// A tensor in GGUF blocks: the number of its type, then the blocks of one row. The values read are
/// those of the canonical weight, except for the rounding of scales.
pub fn blocks(data: &[u8]) {
    let Some((&id, data)) = data.split_first() else {
        return;
    };
    let kind = BlockType::from_id(id.into()).filter(|k| k.layout().is_some());
    let Some(kind) = kind else { return };
    let blocks = data.len() / kind.bytes();
    if blocks > 0 {
        let data = Bytes::copy_from_slice(&data[..blocks * kind.bytes()]);
        dequantize(kind, Dims::new(1, blocks * kind.elements()), data);
    }
}

/// Dequantizes a tensor of an accepted file.
fn dequantize(kind: BlockType, Dims { rows, cols }: Dims, data: Bytes) {
    let weight = BlockWeight::new(kind, Dims::new(rows, cols), data).expect("the file's own shape");
    let mut row = vec![0.0; cols];
    for r in 0..rows {
        weight.dequantize_row(r, &mut row);
    }
    // Refused only for a scale that does not fit a finite f16.
    let Ok(affine) = weight.to_affine() else {
        return;
    };
    assert_eq!((affine.out_features(), affine.in_features()), (rows, cols));
    if BlockWeight::exactness(kind) == Exactness::Exact {
        let mut again = vec![0.0; cols];
        affine.dequantize_row(rows - 1, &mut again);
        assert_eq!(row, again, "{kind}");
    }
}

/// config.json, generation_config.json and tokenizer.json: an accepted config has a size, and
/// reading it after writing gives the same.
pub fn config(data: &[u8]) {
    let path = Path::new("config.json");
    let _ = GenerationDefaults::parse(path, data);
    let _ = tokenizer::largest_id(path, data);
    if let Ok(head) = EagleConfig::parse(path, data) {
        assert!(head.elements() > 0 && head.draft_vocab_size <= head.vocab_size);
    }
    let Ok(config) = nq_formats::config::parse(path, data) else {
        return;
    };
    assert!(config.parameters() > 0);
    let text = serde_json_text(&config);
    let again = nq_formats::config::parse(path, text.as_bytes()).expect("what nq writes it reads");
    let same = ModelConfig {
        dtype: config.dtype.or(again.dtype),
        ..config
    };
    assert_eq!(again, same);
}

fn serde_json_text(config: &ModelConfig) -> String {
    // A map displays as JSON only as a value; each entry's `Display` is JSON.
    let entries: Vec<String> = nq_formats::config::to_json(config)
        .iter()
        .map(|(k, v)| format!("{k:?}: {v}"))
        .collect();
    format!("{{{}}}", entries.join(", "))
}

/// The model shape that [`folder`] combines with the fuzzed record.
pub const SHAPE: &str = r#""architectures":["Qwen3ForCausalLM"],"model_type":"qwen3",
"hidden_size":8,"intermediate_size":16,"num_hidden_layers":1,"num_attention_heads":2,
"num_key_value_heads":1,"head_dim":8,"vocab_size":16,"max_position_embeddings":32,
"rms_norm_eps":1e-6,"rope_theta":10000.0,"tie_word_embeddings":true,"eos_token_id":3"#;

/// The same for a mixture.
pub const MIXTURE: &str = r#""architectures":["Qwen3MoeForCausalLM"],"model_type":"qwen3_moe",
"hidden_size":8,"intermediate_size":16,"moe_intermediate_size":8,"num_experts":2,
"num_experts_per_tok":1,"num_hidden_layers":1,"num_attention_heads":2,
"num_key_value_heads":1,"head_dim":8,"vocab_size":16,"max_position_embeddings":32,
"rms_norm_eps":1e-6,"rope_theta":10000.0,"tie_word_embeddings":true,"eos_token_id":3"#;

/// The same for a hybrid.
pub const HYBRID: &str = r#""architectures":["Qwen3_5ForCausalLM"],"model_type":"qwen3_5_text",
"hidden_size":8,"intermediate_size":16,"num_hidden_layers":2,"num_attention_heads":2,
"num_key_value_heads":1,"head_dim":8,"vocab_size":16,"max_position_embeddings":32,
"full_attention_interval":2,"linear_num_key_heads":1,"linear_num_value_heads":2,
"linear_key_head_dim":4,"linear_value_head_dim":4,"linear_conv_kernel_dim":2,
"rms_norm_eps":1e-6,"rope_theta":10000.0,"tie_word_embeddings":true,"eos_token_id":3,
"mtp_num_hidden_layers":1"#;

/// A quantized folder of any format: a `quantization_config` (JSON, ended by a zero byte), then
/// the weight file. If it opens, all parameters are read and dequantized.
pub fn folder(data: &[u8]) {
    let Some(end) = data.iter().position(|b| *b == 0) else {
        return;
    };
    let Ok(record) = std::str::from_utf8(&data[..end]) else {
        return;
    };
    let weights = Bytes::copy_from_slice(&data[end + 1..]);
    for shape in [SHAPE, MIXTURE, HYBRID] {
        let config = format!(r#"{{{shape},"quantization_config":{record}}}"#);
        let files = Files::Virtual(Arc::new(FilesInMemory(vec![
            ("config.json", config.into()),
            ("model.safetensors", weights.clone()),
        ])));
        if let Ok(checkpoint) = Checkpoint::open_files(files) {
            let _ = nq::verify(&checkpoint);
            read_all(&checkpoint);
        }
    }
}

/// What becomes of one change to a folder of unquantized weights: the first byte says which and to which model, the
/// second where, and the others are a name. A tensor or a key that is added is refused, known to nq's tables, or listed as left over; a
/// tensor that is renamed or dropped is missed. No change goes without a word.
pub fn account(data: &[u8]) {
    let [change, place, name @ ..] = data else {
        return;
    };
    let Ok(name) = std::str::from_utf8(name) else {
        return;
    };
    let base = if change & 4 == 0 { SHAPE } else { HYBRID };
    let mut config = format!("{{{base}}}");
    let shape = nq_formats::config::parse(Path::new("c"), config.as_bytes()).expect("nq's own");
    let mut tensors: Vec<(String, Vec<usize>)> = names::parameters(&shape)
        .into_iter()
        .map(|(name, shape)| {
            let dims = match (name.ends_with("conv1d"), shape.dims()[..].first()) {
                // Of two inputs, as HYBRID says.
                (true, Some(taps)) => vec![taps / 2, 1, 2],
                _ => shape.dims(),
            };
            (names::tensor_name(&name), dims)
        })
        .collect();
    let place = usize::from(*place) % tensors.len();
    if tensors.iter().any(|(n, _)| n == name) || name == "__metadata__" {
        return;
    }
    let dropped = match change % 4 {
        0 => {
            tensors.push((name.into(), vec![8]));
            None
        }
        1 => Some(std::mem::replace(&mut tensors[place].0, name.into())),
        2 => Some(tensors.remove(place).0),
        _ => {
            let mut json: serde_json::Value = serde_json::from_str(&config).expect("an object");
            if json.get(name).is_some() {
                return;
            }
            json[name] = 5.into();
            config = json.to_string();
            None
        }
    };
    // The one weight of a tied model may have either name.
    let head = dropped.as_deref() == Some("model.embed_tokens.weight") && name == "lm_head.weight";
    let files = Files::Virtual(Arc::new(FilesInMemory(vec![
        ("config.json", config.into()),
        ("model.safetensors", floats(&tensors)),
    ])));
    let opened = Checkpoint::open_files(files).and_then(|c| nq::verify(&c).map(|()| c));
    let Ok(opened) = opened else { return };
    if let Some(dropped) = dropped {
        // A model runs without its MTP layer, and is said to.
        let parameter = names::parameter_of(&dropped).unwrap_or(&dropped);
        let missing =
            (opened.left_over().iter()).any(|l| l.why.ends_with(&format!(" {parameter}")));
        let mtp = parameter.starts_with("mtp.") && opened.config().mtp_layers == 0 && missing;
        assert!(head || mtp, "{dropped} was not missed");
        return;
    }
    let told = opened.left_over().iter().any(|l| l.name.ends_with(name));
    let known = nq_formats::keys::table().contains(&format!("`{name}`"));
    assert!(
        told || (change % 4 == 3 && known),
        "{name:?} went without a word"
    );
}

/// A safetensors file of F32 tensors of ones.
fn floats(tensors: &[(String, Vec<usize>)]) -> Bytes {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let start = end;
        end += 4 * shape.iter().product::<usize>();
        let offsets = [start, end];
        let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets });
        header.insert(name.clone(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.into_bytes());
    out.extend(1f32.to_le_bytes().repeat(end / 4));
    out.into()
}

/// Most parameters that a target reads: a shape may claim many more than its file has.
const MOST: usize = 1 << 22;

fn read_all(checkpoint: &Checkpoint) {
    assert!(checkpoint.bits_per_weight().is_finite());
    if checkpoint.config().parameters() > MOST {
        return;
    }
    for (name, shape) in names::parameters(checkpoint.config()) {
        let names::Shape::Matrix(rows, cols) = shape else {
            continue;
        };
        if let Ok(weight) = checkpoint.store().matrix(&name, Dims::new(rows, cols)) {
            assert_eq!(weight.dims(), Dims::new(rows, cols));
            let mut row = vec![0.0; cols];
            for r in 0..rows {
                weight.dequantize_row(r, &mut row).expect("a float weight");
            }
        }
    }
}

/// Files by name.
#[derive(Debug)]
struct FilesInMemory(Vec<(&'static str, Bytes)>);

impl VirtualFiles for FilesInMemory {
    fn root(&self) -> PathBuf {
        "fuzz".into()
    }

    fn names(&self) -> Vec<String> {
        self.0.iter().map(|(name, _)| (*name).into()).collect()
    }

    fn get(&self, name: &str) -> Result<Option<Bytes>> {
        let found = self.0.iter().find(|(n, _)| *n == name);
        Ok(found.map(|(_, bytes)| bytes.clone()))
    }
}
