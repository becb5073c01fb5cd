//! Exports the tower that sees images as a GGUF file of its own, an `mmproj`, with the names and metadata of llama.cpp's
//! converter.

use super::gguf::{How, ParameterPlan, most_common, own_type, write_parameter};
use super::mix::Mix;
use super::report::Change;
use crate::checkpoint::Checkpoint;
use crate::durable::{Form, check_destination, check_space, parent};
use crate::error::{Error, Result};
use crate::exactness::Exactness;
use crate::gguf::mmproj::{PATCHES, PROJECTOR, beside};
use crate::gguf::writer::GgufPlan;
use crate::gguf::{Array, BlockType, encode};
use crate::progress::Progress;
use crate::units::human_bytes;
use crate::weight::Weight;
use nq_model::names::Shape;
use nq_model::vision::{CHANNELS, PATCH_EMBED, POSITIONS, TowerParameter, VisionConfig, gguf_name};
use nq_model::{DType, Dims, tensor_name};
use std::path::Path;

/// Writes the tower of shape `vision` beside `model`, the GGUF file of the text model; returns a note.
///
/// # Errors
/// [`Error::Unsupported`] for weights that no block holds; errors of reading the source or writing the file.
pub(super) fn export(
    checkpoint: &Checkpoint,
    vision: &VisionConfig,
    model: &Path,
    force: bool,
    progress: &dyn Progress,
) -> Result<String> {
    let out = beside(model);
    check_destination(&out, Form::File, force)?;
    let unsupported = |what: String, why: &str| Error::Unsupported {
        path: out.clone(),
        what,
        why: why.into(),
    };
    let frames = vision.temporal_patch_size;
    if frames > PATCHES.len() {
        let why = "its readers know patches of one or two";
        return Err(unsupported(format!("patches of {frames} frames"), why));
    }
    let store = checkpoint.store();
    let patches = Dims::new(vision.hidden_size, vision.patch_values());
    let patches = store.matrix(PATCH_EMBED, patches)?;
    let mut plans = Vec::new();
    let mut file = GgufPlan::new();
    for TowerParameter { name, shape } in vision.parameters() {
        let float = (BlockType::F32, How::Encode);
        let (kind, how) = match shape {
            // Readers take these as F32, which holds every float.
            Shape::Vector(_) => float,
            Shape::Matrix(..) if name == POSITIONS => float,
            Shape::Matrix(..) if name == PATCH_EMBED => match &patches {
                Weight::Dense(t) if t.dtype() == DType::F16 => (BlockType::F16, How::Encode),
                _ => float,
            },
            Shape::Matrix(rows, cols) => {
                let weight = store.stored(&name, Dims::new(rows, cols))?;
                let own = own_type(&weight, cols).filter(|own| own.2 == Exactness::Exact);
                let (kind, how, _) = own.ok_or_else(|| {
                    let what = format!("{name} ({})", weight.scheme_name());
                    unsupported(what, "no block holds the same numbers")
                })?;
                (kind, how)
            }
        };
        let stored = gguf_name(&name, &vision.deepstack).expect("parameters of a tower have names");
        if name == PATCH_EMBED {
            let side = vision.patch_size;
            for stored in &PATCHES[..frames] {
                let shape = vec![vision.hidden_size, CHANNELS, side, side];
                file.add((*stored).into(), kind, shape)?;
            }
        } else {
            file.add(tensor_name(&stored), kind, shape.dims())?;
        }
        plans.push(ParameterPlan {
            name,
            shape,
            rows: None,
            kind,
            how,
            from: String::new(),
            change: Change::Kept(Exactness::Exact),
        });
    }
    describe(
        &mut file,
        vision,
        Mix::Keep.file_type(|| most_common(&plans)),
    );
    check_space(&parent(&out), file.file_bytes())?;
    let plane = vision.patch_size * vision.patch_size;
    let mut values = vec![0.0; vision.patch_values()];
    let mut rest = plans.iter().filter(|plan| plan.name != PATCH_EMBED);
    file.write(&out, progress, &mut |tensor, sink| {
        let Some(frame) = PATCHES.iter().position(|name| *name == tensor.name) else {
            let plan = rest.next().expect("a tensor for each parameter");
            return write_parameter(checkpoint, plan, tensor, &mut |bytes| sink.write(bytes));
        };
        for row in 0..vision.hidden_size {
            patches.dequantize_row(row, &mut values)?;
            let planes = values.chunks_exact(plane).skip(frame).step_by(frames);
            let planes: Vec<f32> = planes.flatten().copied().collect();
            let mut bytes = Vec::with_capacity(planes.len() * size_of::<f32>());
            encode::encode_row(tensor.kind, &planes, &mut bytes)?;
            sink.write(&bytes)?;
        }
        Ok(())
    })?;
    let name = out.file_name().map(|name| name.to_string_lossy());
    Ok(format!(
        "the tower that sees images is in {}, {}: keep it beside the model",
        name.unwrap_or_default(),
        human_bytes(file.file_bytes())
    ))
}

/// Adds what readers need to know of the tower.
fn describe(file: &mut GgufPlan, vision: &VisionConfig, file_type: u32) {
    file.set("general.architecture", "clip");
    file.set("general.type", "mmproj");
    file.set("general.file_type", file_type);
    file.set("clip.has_vision_encoder", true);
    file.set("clip.projector_type", PROJECTOR);
    file.set("clip.use_gelu", true);
    for (key, value) in [
        ("image_size", vision.position_side * vision.patch_size),
        ("patch_size", vision.patch_size),
        ("embedding_length", vision.hidden_size),
        ("feed_forward_length", vision.intermediate_size),
        ("projection_dim", vision.out_hidden_size),
        ("block_count", vision.depth),
        ("attention.head_count", vision.num_heads),
        ("spatial_merge_size", vision.spatial_merge_size),
        // Below 2^26.
        ("image_min_pixels", vision.pixels.least as usize),
        ("image_max_pixels", vision.pixels.most as usize),
    ] {
        file.set(format!("clip.vision.{key}"), value as u32);
    }
    file.set("clip.vision.attention.layer_norm_epsilon", 1e-6f32);
    let (mean, std) = (&vision.pixels.mean, &vision.pixels.std);
    file.set("clip.vision.image_mean", Array::of_f32s(mean));
    file.set("clip.vision.image_std", Array::of_f32s(std));
    let deepstack: Vec<bool> = (0..vision.depth)
        .map(|block| vision.deepstack.contains(&block))
        .collect();
    file.set(
        "clip.vision.is_deepstack_layers",
        Array::of_bools(&deepstack),
    );
}
