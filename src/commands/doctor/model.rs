//! `nq doctor MODEL`: a model beside this machine.

use super::Problem;
use crate::flags::Global;
use crate::model;
use crate::sight::SightBytes;
use crate::system;
use crate::terminal::{Terminal, human_bytes};
use nq_answers::SightOptions;
use nq_load::device::Device;
use nq_load::gpu;
use serde::Serialize;
use std::ffi::OsStr;
use std::fmt;

/// What running a model takes of this machine.
#[derive(Serialize)]
pub(super) struct ModelFinding {
    name: String,
    /// The device that its text model runs on.
    device: String,
    /// Its weights without those of the tower: as they are stored, or as an NVIDIA GPU holds them.
    text_bytes: u64,
    /// What seeing takes; absent for a model that reads text alone.
    images: Option<ImageFinding>,
}

#[derive(Serialize)]
struct ImageFinding {
    /// The device that its tower runs on.
    device: String,
    #[serde(flatten)]
    bytes: SightBytes,
}

/// Looks at `name`, and adds to `problems` if this machine has too little memory for it.
pub(super) fn find(
    name: &OsStr,
    global: &Global,
    terminal: &Terminal,
    problems: &mut Vec<Problem>,
) -> anyhow::Result<ModelFinding> {
    let found = model::open(Some(name), global, terminal)?;
    let global = &global.for_model(&found.checkpoint, None, terminal);
    let (checkpoint, options) = (&found.checkpoint, global.load_options());
    let device = Device::choose(global.device)?;
    let tower = nq_load::tower_device(checkpoint, &options, terminal)?;
    let bytes = SightBytes::plan(checkpoint, &options, &SightOptions::default())?;
    let on_gpu = match device {
        Device::Cuda(_) | Device::Gpus(_) => model::quantized_on_gpu(checkpoint),
        Device::Cpu | Device::Wgpu(_) => None,
    };
    let stored = checkpoint.tensor_bytes() - checkpoint.tower_bytes();
    let finding = ModelFinding {
        name: found.name,
        device: device.to_string(),
        text_bytes: on_gpu.unwrap_or(stored),
        images: tower.zip(bytes).map(|(device, bytes)| ImageFinding {
            device: device.to_string(),
            bytes,
        }),
    };
    let room = match device {
        Device::Cpu => system::available_memory(),
        Device::Cuda(n) => gpu::found()?.get(n).map(|g| g.memory_bytes),
        Device::Gpus(_) | Device::Wgpu(_) => None,
    };
    if let Some(room) = room.filter(|room| *room < finding.total()) {
        problems.push(Problem {
            problem: format!(
                "{} takes {} without room for answers, and {device} has {}",
                finding.name,
                human_bytes(finding.total()),
                human_bytes(room)
            ),
            remedy: format!(
                "`nq quantize` makes it smaller; `nq fit` proposes a model and a size{}",
                match device {
                    Device::Cpu => "; weights without room are read from disk, much more slowly",
                    _ => "",
                }
            ),
        });
    }
    Ok(finding)
}

impl ModelFinding {
    fn total(&self) -> u64 {
        let images = self.images.as_ref().map_or(0, |i| i.bytes.total());
        self.text_bytes + images
    }
}

impl fmt::Display for ModelFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ModelFinding { name, device, .. } = self;
        let bytes = human_bytes(self.text_bytes);
        writeln!(
            f,
            "model     {name}: {bytes} of weights for text, on {device}"
        )?;
        match &self.images {
            Some(images) => writeln!(f, "          {}, on {}", images.bytes, images.device),
            None => writeln!(f, "          reads text alone"),
        }
    }
}
