//! Devices that run models, and their memory.

use super::{gpu, wgpu};
use nq_f32::CpuOps;
use nq_formats::{Checkpoint, Progress};
use nq_kernels::grad::GradWork;
use nq_runtime::interface::{DeviceChoice, Ordinals, SessionSpec, too_many};
use nq_runtime::{Error, Result};
use std::fmt;
use std::fs;
use std::path::Path;

/// A device that is present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// The GPU of this ordinal.
    Cuda(usize),
    /// Several GPUs, which have a part of a model each.
    Gpus(Ordinals),
    /// The adapter of this number, over Vulkan, Metal or Direct3D 12.
    Wgpu(usize),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(n) => write!(f, "cuda:{n}"),
            Device::Gpus(several) => several.fmt(f),
            Device::Wgpu(n) => write!(f, "wgpu:{n}"),
        }
    }
}

impl Device {
    /// [`SessionSpec::prompt_rows`] on this device.
    pub fn prompt_rows(self) -> usize {
        SessionSpec::prompt_rows(self == Device::Cpu)
    }

    /// Runs `work` on this device; on a GPU, f32 products round their operands to TF32.
    ///
    /// # Errors
    /// An absent device, several, or an adapter of `wgpu`; errors of the driver. Errors of the work are in its output.
    pub fn run<W: GradWork>(self, work: W) -> Result<W::Output> {
        match self.single("tuning")? {
            None => Ok(work.run(&CpuOps)),
            Some(n) => gpu::run(n, work),
        }
    }

    /// The GPU, by its ordinal, or `None` for the CPU: where `what` runs, which does not on several GPUs, nor over
    /// `wgpu`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for several, and for adapters of `wgpu`.
    pub fn single(self, what: &'static str) -> Result<Option<usize>> {
        match self {
            Device::Cpu => Ok(None),
            Device::Cuda(n) => Ok(Some(n)),
            Device::Gpus(several) => Err(Error::Unsupported {
                engine: "nq on several GPUs",
                what,
                expected: "one GPU, or the CPU".into(),
                found: several.to_string(),
            }),
            Device::Wgpu(_) => Err(Error::Unsupported {
                engine: "nq over wgpu",
                what,
                expected: "one NVIDIA GPU (--device cuda), or the CPU (--device cpu)".into(),
                found: self.to_string(),
            }),
        }
    }
}

impl Device {
    /// The device that `choice` names. `Auto` takes the first NVIDIA GPU that is usable, or else the CPU: whether another
    /// GPU serves depends on the model ([`Device::for_model`]).
    ///
    /// # Errors
    /// [`Error::Device`] if the requested device is absent; the message says what is missing.
    pub fn choose(choice: DeviceChoice) -> Result<Device> {
        let absent = |device: String, why| Error::Device { device, why };
        let check = |device: Device, ordinals: &[usize], name: String| match gpu::count() {
            Ok(count) if ordinals.iter().all(|n| *n < count) => Ok(device),
            Ok(count) => {
                let why = format!("expected ordinals below {count}, the number of GPUs found");
                Err(absent(name, why))
            }
            Err(why) => Err(absent(name, why)),
        };
        match choice {
            DeviceChoice::Cpu => Ok(Device::Cpu),
            DeviceChoice::Auto => Ok(gpu::first().map_or(Device::Cpu, Device::Cuda)),
            DeviceChoice::Cuda(n) => check(Device::Cuda(n), &[n], format!("cuda:{n}")),
            DeviceChoice::Gpus(several) => check(
                Device::Gpus(several),
                several.as_slice(),
                several.to_string(),
            ),
            DeviceChoice::WgpuOrCpu(number) => Ok(Device::Wgpu(number)),
            DeviceChoice::Wgpu(number) => {
                let name = number.map_or("gpu".into(), |n| format!("wgpu:{n}"));
                let found = wgpu::choose(number).map_err(|why| absent(name, why));
                found.map(Device::Wgpu)
            }
            DeviceChoice::AllGpus => {
                let found = gpu::count().and_then(all);
                found.map_err(|why| absent("cuda:all".into(), why))
            }
        }
    }

    /// What `choice` means for the model of `checkpoint`: `Auto`, where no NVIDIA GPU is usable, is the first other GPU over
    /// `wgpu`, never software. A model that sees images, and one that runs with what `beside` names, such as adapters,
    /// stays on the CPU, as kernels there have neither; so do shapes that they refuse. That is said in a line.
    pub fn for_model(
        choice: DeviceChoice,
        checkpoint: &Checkpoint,
        beside: Option<&str>,
        progress: &dyn Progress,
    ) -> DeviceChoice {
        // Drivers are asked only where the answer matters.
        if choice != DeviceChoice::Auto || gpu::first().is_ok() {
            return choice;
        }
        match wgpu::choose(None) {
            Ok(number) => or_cpu(number, checkpoint, beside, progress),
            Err(_) => choice,
        }
    }

    /// Why [`DeviceChoice::Auto`] takes the CPU although the machine has an NVIDIA GPU and this build has kernels for
    /// it. `None` if it takes the GPU, if there is none, or if `CUDA_VISIBLE_DEVICES` hides it.
    pub fn why_no_gpu() -> Option<String> {
        let why = gpu::first().err().filter(|_| gpu::BUILT_IN)?;
        let hidden = |v: std::ffi::OsString| v.is_empty() || v == "-1";
        if std::env::var_os("CUDA_VISIBLE_DEVICES").is_some_and(hidden) {
            return None;
        }
        has_nvidia_gpu(Path::new("/")).then_some(why)
    }
}

/// The adapter of this number for the model of `checkpoint`, or the CPU, as [`Device::for_model`] says.
fn or_cpu(
    number: usize,
    checkpoint: &Checkpoint,
    beside: Option<&str>,
    progress: &dyn Progress,
) -> DeviceChoice {
    let images = checkpoint.vision().map(|_| "images");
    let lacks = beside
        .or(images)
        .map(|what| format!("it does not run {what}"));
    let shape = || wgpu::unserved(checkpoint.config()).map(|e| e.to_string());
    let Some(why) = lacks.or_else(shape) else {
        return DeviceChoice::WgpuOrCpu(number);
    };
    progress.note(&format!(
        "wgpu:{number} is left alone, the CPU runs this model: {why}"
    ));
    DeviceChoice::Cpu
}

/// All of `count` GPUs, which are at least one.
fn all(count: usize) -> Result<Device, String> {
    let ordinals: Vec<usize> = (0..count).collect();
    match ordinals[..] {
        [one] => Ok(Device::Cuda(one)),
        _ => Ordinals::new(&ordinals)
            .map(Device::Gpus)
            .ok_or_else(|| too_many(count)),
    }
}

/// True if the system below `root` has an NVIDIA GPU: its driver is loaded, or the PCI bus shows a
/// display controller (class 03) of that vendor.
fn has_nvidia_gpu(root: &Path) -> bool {
    if root.join("proc/driver/nvidia/version").exists() {
        return true;
    }
    let devices = fs::read_dir(root.join("sys/bus/pci/devices"));
    devices.into_iter().flatten().flatten().any(|device| {
        let is = |file: &str, start: &str| {
            fs::read_to_string(device.path().join(file)).is_ok_and(|t| t.starts_with(start))
        };
        is("vendor", "0x10de") && is("class", "0x03")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_model::vision::ImageTokens;

    #[test]
    fn all_gpus_are_one_or_a_list_of_up_to_eight() {
        assert_eq!(all(1), Ok(Device::Cuda(0)));
        let two = Ordinals::new(&[0, 1]).unwrap();
        assert_eq!(all(2), Ok(Device::Gpus(two)));
        assert_eq!(all(9), Err("expected at most 8 GPUs, found 9".into()));
    }

    #[test]
    fn models_that_need_more_than_an_adapter_runs_stay_on_the_cpu() {
        let demo = Checkpoint::open(Path::new("../../assets/demo")).unwrap();
        let taken = |checkpoint: &Checkpoint, beside| or_cpu(3, checkpoint, beside, &());
        assert_eq!(taken(&demo, None), DeviceChoice::WgpuOrCpu(3));
        assert_eq!(taken(&demo, Some("drafts")), DeviceChoice::Cpu);
        let tokens = ImageTokens {
            pad: 1,
            start: 2,
            end: 3,
        };
        let tower = nq_testkit::sees::tower(tokens);
        let sees = Checkpoint::open(Path::new("../../assets/demo")).unwrap();
        let sees = sees.with_random_tower(tower, 0);
        assert_eq!(taken(&sees, None), DeviceChoice::Cpu);
        // What is asked for by name is not changed.
        for choice in [DeviceChoice::Cpu, DeviceChoice::Wgpu(Some(0))] {
            assert_eq!(Device::for_model(choice, &demo, None, &()), choice);
        }
    }

    /// Software is asked for by name alone.
    #[test]
    fn other_gpus_are_taken_where_there_is_no_cuda() {
        let demo = Checkpoint::open(Path::new("../../assets/demo")).unwrap();
        let adapter = wgpu::adapters().iter().position(|a| a.hardware);
        let expected = match adapter.filter(|_| gpu::first().is_err()) {
            Some(number) => DeviceChoice::WgpuOrCpu(number),
            None => DeviceChoice::Auto,
        };
        assert_eq!(
            Device::for_model(DeviceChoice::Auto, &demo, None, &()),
            expected
        );
    }

    #[test]
    fn absent_gpus_are_refused_by_name() {
        for name in ["cuda:999", "cuda:0,999", "wgpu:999"] {
            let refused = Device::choose(name.parse().unwrap()).unwrap_err();
            let named = matches!(&refused, Error::Device { device, .. } if device == name);
            assert!(named, "{refused}");
        }
    }

    #[test]
    fn what_runs_on_one_device_is_refused_by_several() {
        let two = Device::Gpus(Ordinals::new(&[0, 0]).unwrap());
        assert_eq!(
            two.single("tuning").unwrap_err().to_string(),
            "engine nq on several GPUs: tuning: expected one GPU, or the CPU, found cuda:0,0"
        );
        assert_eq!(
            Device::Wgpu(1).single("tuning").unwrap_err().to_string(),
            "engine nq over wgpu: tuning: expected one NVIDIA GPU (--device cuda), or the CPU (--device cpu), \
             found wgpu:1"
        );
        assert_eq!(Device::Cuda(3).single("tuning").unwrap(), Some(3));
        assert_eq!(Device::Cpu.single("tuning").unwrap(), None);
    }

    #[test]
    fn a_gpu_is_seen_without_its_driver() {
        let root = tempfile::tempdir().unwrap();
        let add = |name: &str, vendor: &str, class: &str| {
            let device = root.path().join("sys/bus/pci/devices").join(name);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("vendor"), vendor).unwrap();
            fs::write(device.join("class"), class).unwrap();
        };
        assert!(!has_nvidia_gpu(root.path()));
        add("0000:00:01.0", "0x8086\n", "0x030000\n");
        add("0000:01:00.1", "0x10de\n", "0x040300\n"); // its sound
        assert!(!has_nvidia_gpu(root.path()));
        add("0000:01:00.0", "0x10de\n", "0x030200\n");
        assert!(has_nvidia_gpu(root.path()));
    }
}
