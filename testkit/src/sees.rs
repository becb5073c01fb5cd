//! A small random model that sees, with the demo model's tokenizer.

use crate::demo;
use crate::models::{delta, rope, tiny};
use nq_formats::safetensors::SafetensorsFile;
use nq_formats::serialize::write_tensors;
use nq_formats::{Tensor, synth};
use nq_kernels::rng::Philox;
use nq_model::vision::{ImageTokens, PixelSpec, VisionConfig};
use nq_model::{ModelConfig, Shape};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// What Qwen3.5's template makes of contents, in messages without tools and thinking.
const TEMPLATE: &str = "{%- macro content(parts) %}{%- if parts is string %}{{- parts }}{%- else %}\
    {%- for part in parts %}{%- if part.type == 'image' %}\
    {{- '<|vision_start|><|image_pad|><|vision_end|>' }}\
    {%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}\
    {%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + content(m.content) + '<|im_end|>\\n' }}\
    {%- if m.tool_calls %}{{- m.tool_calls | tojson }}{%- endif %}{%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

fn text() -> ModelConfig {
    ModelConfig {
        hidden_size: 96,
        intermediate_size: 160,
        delta: Some(delta(6, 16, 4)),
        num_hidden_layers: 4,
        head_dim: 64,
        vocab_size: 4096,
        rope: rope(1e4, Some(16)),
        eos_token_ids: vec![4072],
        ..tiny("qwen35")
    }
}

/// A small tower: a token stands for 8 by 8 pixels, an image has 4 to 64.
pub fn tower(tokens: ImageTokens) -> VisionConfig {
    VisionConfig {
        depth: 2,
        deepstack: Vec::new(),
        hidden_size: 32,
        intermediate_size: 48,
        num_heads: 2,
        patch_size: 4,
        temporal_patch_size: 2,
        spatial_merge_size: 2,
        position_side: 8,
        out_hidden_size: 96,
        tokens,
        pixels: PixelSpec {
            least: 256,
            most: 4096,
            mean: [0.5; 3],
            std: [0.5; 3],
        },
    }
}

/// Writes the model's folder, with the tower that [`tower`] gives or one made of it.
///
/// # Panics
/// If it cannot be written.
pub fn write(folder: &Path, tower: impl Fn(ImageTokens) -> VisionConfig) {
    synth::write(folder, &text(), 5, &()).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(demo().join(name), folder.join(name)).unwrap();
    }
    std::fs::write(folder.join("chat_template.jinja"), TEMPLATE).unwrap();
    let tokenizer: Value =
        serde_json::from_slice(&std::fs::read(folder.join("tokenizer.json")).unwrap()).unwrap();
    let added = tokenizer["added_tokens"].as_array().unwrap();
    let id = |token: &str| {
        let found = added.iter().find(|t| t["content"] == token).unwrap();
        found["id"].as_u64().unwrap() as u32
    };
    let c = tower(ImageTokens {
        pad: id("<|image_pad|>"),
        start: id("<|vision_start|>"),
        end: id("<|vision_end|>"),
    });
    let path = folder.join("model.safetensors");
    let file = SafetensorsFile::parse(&path, std::fs::read(&path).unwrap().into()).unwrap();
    let mut tensors: Vec<(String, Tensor)> = Vec::new();
    for name in file.names() {
        let tensor = file.get(name).unwrap();
        // Larger than as trained, so that what a model sees shows in what it says.
        let scale = if tensor.shape().len() == 2 { 6.0 } else { 1.0 };
        let values = tensor.to_f32().unwrap().iter().map(|v| v * scale).collect();
        let tensor = Tensor::from_f32(tensor.shape().to_vec(), values).unwrap();
        tensors.push((name.replacen("model.", "model.language_model.", 1), tensor));
    }
    drop(file);
    for (stream, parameter) in c.parameters().into_iter().enumerate() {
        let (matrix, shape) = match parameter.shape {
            Shape::Vector(n) => (false, vec![n]),
            Shape::Matrix(rows, _) if parameter.name.ends_with("patch_embed.proj") => {
                (true, vec![rows, 3, 2, 4, 4])
            }
            Shape::Matrix(rows, columns) => (true, vec![rows, columns]),
        };
        let weight = !parameter.name.ends_with(".bias");
        let name = parameter.name + if weight { ".weight" } else { "" };
        let (n, inputs) = (shape.iter().product(), shape[1..].iter().product::<usize>());
        let scale = if matrix {
            2.0 / (inputs as f32).sqrt()
        } else {
            0.3
        };
        let mut rng = Philox::new(9, stream as u64);
        let values = (0..n).map(|_| scale * rng.normal()).collect();
        tensors.push((name, Tensor::from_f32(shape, values).unwrap()));
    }
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write_tensors(&path, &tensors, &metadata).unwrap();
    let mut text: Value =
        serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    text["model_type"] = "qwen3_5_text".into();
    text["torch_dtype"] = "float32".into();
    text.as_object_mut().unwrap().remove("architectures");
    let config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
        "vision_config": {
            "model_type": "qwen3_5", "depth": c.depth, "hidden_size": c.hidden_size, "num_heads": c.num_heads,
            "intermediate_size": c.intermediate_size, "patch_size": 4, "temporal_patch_size": 2,
            "spatial_merge_size": 2, "num_position_embeddings": c.position_side.pow(2), "out_hidden_size": 96,
            "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "deepstack_visual_indexes": [],
        },
        "image_token_id": c.tokens.pad, "vision_start_token_id": c.tokens.start,
        "vision_end_token_id": c.tokens.end, "video_token_id": id("<|video_pad|>"), "tie_word_embeddings": false,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let pixels = json!({
        "size": {"shortest_edge": c.pixels.least, "longest_edge": c.pixels.most}, "patch_size": 4, "merge_size": 2,
        "temporal_patch_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
    });
    std::fs::write(folder.join("preprocessor_config.json"), pixels.to_string()).unwrap();
}
