//! How a model is placed on a device.

use super::ordinals::Ordinals;
use super::session::SessionSpec;
use crate::weights::bits;
use nq_formats::trellis::BLOCK;
use nq_formats::{QuantizedWeight, Weight};
use nq_kernels::{Activations, IsaChoice, KernelSet};
use nq_model::DType;
use std::fmt;
use std::str::FromStr;

/// Which device to run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first usable GPU, otherwise the CPU; the choice and its reason are reported.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this ordinal; an error if it is absent.
    Cuda(usize),
    /// Several GPUs, which have a part of the model each; an error if one is absent.
    Gpus(Ordinals),
    /// All GPUs of the machine; an error if there is none.
    AllGpus,
    /// A GPU over Vulkan, Metal or Direct3D 12: the adapter of this number, or the first that is a GPU; an error if it is
    /// absent.
    Wgpu(Option<usize>),
    /// What `Auto` becomes for a model where no NVIDIA GPU is usable: the adapter of this number, or the CPU for what that
    /// refuses.
    WgpuOrCpu(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    /// Parses `auto`, `cpu`, `cuda`, `cuda:N`, a list as `cuda:N,N`, `cuda:all`, `gpu` (or `wgpu`), or `wgpu:N`.
    fn from_str(s: &str) -> std::result::Result<Self, String> {
        match s.split_once(':') {
            None if s == "auto" => Ok(DeviceChoice::Auto),
            None if s == "cpu" => Ok(DeviceChoice::Cpu),
            None if s == "cuda" => Ok(DeviceChoice::Cuda(0)),
            None if s == "gpu" || s == "wgpu" => Ok(DeviceChoice::Wgpu(None)),
            Some(("wgpu", number)) => match number.parse() {
                Ok(n) => Ok(DeviceChoice::Wgpu(Some(n))),
                Err(_) => Err(format!("wgpu:N needs a number, found {number:?}")),
            },
            Some(("cuda", "all")) => Ok(DeviceChoice::AllGpus),
            Some(("cuda", list)) => {
                let numbers: std::result::Result<Vec<usize>, _> =
                    list.split(',').map(str::parse).collect();
                match numbers.as_deref() {
                    Err(_) => Err(format!("cuda:N needs numbers or `all`, found {list:?}")),
                    Ok([n]) => Ok(DeviceChoice::Cuda(*n)),
                    Ok(several) => Ordinals::new(several)
                        .map(DeviceChoice::Gpus)
                        .ok_or_else(|| too_many(several.len())),
                }
            }
            _ => Err("expected auto, cpu, cuda, cuda:N, cuda:N,M, cuda:all, gpu or wgpu:N".into()),
        }
    }
}

/// What is wrong with a list of `found` GPUs.
pub fn too_many(found: usize) -> String {
    format!("expected at most {} GPUs, found {found}", Ordinals::MOST)
}

/// Type that Linears round their inputs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationChoice {
    /// Per weight: int8 in groups of 32 for 4-bit weights, int16 in groups of 128 for 8-bit
    /// ones, where the device has such kernels; f32 for others.
    #[default]
    Auto,
    /// No rounding.
    F32,
    /// bf16, for bf16 weights; f32 for others.
    Bf16,
    /// bf16 for bf16 weights, which CPUs that have such products run at twice the speed; as with `Auto` for
    /// others.
    AutoBf16,
    /// Signed 8-bit codes with a scale per group, for all quantized weights; f32 for others.
    Int8 {
        /// Inputs that share a scale.
        group: usize,
    },
    /// Like `Int8`, with codes of almost 16 bits.
    Int16 {
        /// Inputs that share a scale.
        group: usize,
    },
}

/// Group sizes that a name may give, and the default group of int8 and of int16.
const GROUPS: [usize; 4] = [16, 32, 64, 128];
const INT8_GROUP: usize = 32;
const INT16_GROUP: usize = 128;
/// Weights of more bits than this would lose more to int8 inputs than prefill gains.
const INT8_BITS: usize = 5;

impl FromStr for ActivationChoice {
    type Err = String;

    /// Parses `auto`, `auto-bf16`, `f32`, `bf16`, `int8` or `int16`; the last two may be followed by `-g16`, `-g32`,
    /// `-g64` or `-g128` for another group than the default.
    fn from_str(s: &str) -> std::result::Result<Self, String> {
        let expected = "expected auto, auto-bf16, f32, bf16, int8 or int16, \
                        or the last two with -g16, -g32, -g64 or -g128";
        let (name, group) = match s.split_once("-g") {
            None => (s, None),
            Some((name, group)) => {
                let group = group.parse().ok().filter(|g| GROUPS.contains(g));
                (name, Some(group.ok_or(expected)?))
            }
        };
        match (name, group) {
            ("auto", None) => Ok(Self::Auto),
            ("auto-bf16", None) => Ok(Self::AutoBf16),
            ("f32", None) => Ok(Self::F32),
            ("bf16", None) => Ok(Self::Bf16),
            ("int8", group) => Ok(Self::Int8 {
                group: group.unwrap_or(INT8_GROUP),
            }),
            ("int16", group) => Ok(Self::Int16 {
                group: group.unwrap_or(INT16_GROUP),
            }),
            _ => Err(expected.into()),
        }
    }
}

impl fmt::Display for ActivationChoice {
    /// Writes a name that [`ActivationChoice::from_str`] parses.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::AutoBf16 => f.write_str("auto-bf16"),
            Self::F32 => f.write_str("f32"),
            Self::Bf16 => f.write_str("bf16"),
            Self::Int8 { group } => write!(f, "int8-g{group}"),
            Self::Int16 { group } => write!(f, "int16-g{group}"),
        }
    }
}

/// Which implementation runs the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// nq's own engine.
    #[default]
    Nq,
    /// candle-transformers, the baseline: unquantized models and GGUF files, on the CPU only, with
    /// the feature `candle`.
    Candle,
}

/// How a model is divided among several GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Each has a part of every layer: some heads, and rows of MLPs.
    Tensors,
    /// Each has some of the layers.
    Layers,
}

impl FromStr for Split {
    type Err = String;

    /// Parses `tensors` or `layers`.
    fn from_str(s: &str) -> std::result::Result<Self, String> {
        match s {
            "tensors" => Ok(Split::Tensors),
            "layers" => Ok(Split::Layers),
            _ => Err("expected tensors or layers".into()),
        }
    }
}

/// Options for placing a model on a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions {
    /// Device.
    pub device: DeviceChoice,
    /// Implementation.
    pub engine: EngineKind,
    /// CPU threads; `None`: one per physical core.
    pub threads: Option<usize>,
    /// Bind CPU threads to cores.
    pub pin: bool,
    /// CPU instruction set.
    pub isa: IsaChoice,
    /// Rounding of Linear inputs.
    pub activations: ActivationChoice,
    /// Family of kernels.
    pub kernels: KernelSet,
    /// Of a mixture of experts on a GPU: number of layers, from the first on, whose experts stay in the
    /// computer's memory and run on the CPU; `None`: as few as the GPU's memory requires.
    pub cpu_experts: Option<usize>,
    /// Most bytes of GPU memory that the process takes for models and sessions; `None`: what is free. Kernels and the
    /// driver's context are not counted.
    pub gpu_memory: Option<usize>,
    /// Most bytes of the computer's memory for weights that the CPU reads, and for experts without room on a GPU, which
    /// are page-locked; `None`: what is free, but for a sixteenth.
    pub host_memory: Option<usize>,
    /// How several GPUs divide it; `None`: by tensors if the model and the GPUs allow it, else by layers.
    pub split: Option<Split>,
    /// A session that will be opened later: a GPU must have room for it too, which is checked before
    /// anything is allocated.
    pub session: Option<SessionSpec>,
    /// True if `session` is the least that will be opened: experts on a GPU leave more to it, if they do not all fit.
    pub session_grows: bool,
    /// Bytes of a GPU's memory to leave to others, such as a session of a draft model, when that is checked.
    pub reserved: usize,
}

impl ActivationChoice {
    /// True if a model must do as it says, or be refused.
    pub fn is_forced(self) -> bool {
        !matches!(self, Self::Auto | Self::AutoBf16 | Self::F32)
    }

    /// Resolves the rounding of the input of the stacked `parts`, where the device has a kernel, which
    /// `supports` tells. Unquantized weights never take integers, nor quantized ones bf16.
    ///
    /// `Auto` rounds for quantized weights: the product then runs in integers, at several times
    /// the speed, and adds an error far below that of the weights. For weights of 6 and 8 bits, int8
    /// inputs would add an error almost as large as the weights' own; two bytes add none that can be
    /// measured. They cost decoding nothing, as it waits for memory, but double prefill's products.
    /// Inputs of a trellis code are rounded after their transform, whose blocks have no outliers: a scale for each
    /// does.
    pub fn resolve(
        self,
        parts: &[&Weight],
        supports: impl Fn(&Weight, Activations) -> bool,
    ) -> Activations {
        let quantized = parts.iter().all(|w| matches!(w, Weight::Quantized(_)));
        let bf16 = |w: &&Weight| matches!(w, Weight::Dense(t) if t.dtype() == DType::BF16);
        match self {
            ActivationChoice::Int8 { group } if quantized => Activations::Int8 { group },
            ActivationChoice::Int16 { group } if quantized => Activations::Int16 { group },
            ActivationChoice::Bf16 | ActivationChoice::AutoBf16 if parts.iter().all(bf16) => {
                Activations::Bf16
            }
            ActivationChoice::Auto | ActivationChoice::AutoBf16 if quantized => {
                let rounded = if parts.iter().any(|w| bits(w) <= INT8_BITS) {
                    let trellis =
                        |w: &&Weight| matches!(w, Weight::Quantized(QuantizedWeight::Trellis(_)));
                    let group = match parts.iter().all(trellis) {
                        true => BLOCK,
                        false => INT8_GROUP,
                    };
                    Activations::Int8 { group }
                } else {
                    Activations::Int16 { group: INT16_GROUP }
                };
                if parts.iter().all(|w| supports(w, rounded)) {
                    rounded
                } else {
                    Activations::F32
                }
            }
            _ => Activations::F32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_named_by_number() {
        for (name, choice) in [
            ("gpu", DeviceChoice::Wgpu(None)),
            ("wgpu", DeviceChoice::Wgpu(None)),
            ("wgpu:2", DeviceChoice::Wgpu(Some(2))),
        ] {
            assert_eq!(name.parse(), Ok(choice));
        }
        for bad in ["wgpu:", "wgpu:0,1", "wgpu:all", "gpu:0", "vulkan"] {
            let refused = bad.parse::<DeviceChoice>().expect_err(bad);
            assert!(refused.contains("wgpu:N"), "{refused}");
        }
    }

    #[test]
    fn choices_are_read_as_they_are_written() {
        let mut all = vec![
            ActivationChoice::Auto,
            ActivationChoice::AutoBf16,
            ActivationChoice::F32,
            ActivationChoice::Bf16,
        ];
        for group in GROUPS {
            all.push(ActivationChoice::Int8 { group });
            all.push(ActivationChoice::Int16 { group });
        }
        for choice in all {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("int8".parse(), Ok(ActivationChoice::Int8 { group: 32 }));
        assert_eq!("int16".parse(), Ok(ActivationChoice::Int16 { group: 128 }));
        for bad in ["", "int4", "int8-", "int8-g8", "int8-g0", "f32-g32", "INT8"] {
            let refused = bad.parse::<ActivationChoice>().expect_err(bad);
            assert!(refused.contains("int16"), "{refused}");
        }
    }

    /// Trellis codes alone take scales of their own groups; beside another weight, those that both have kernels for.
    #[test]
    fn inputs_of_trellis_codes_have_a_scale_for_each_block() {
        let trellis = |bits: &str| {
            let scheme = format!("trellis{bits} octagon").parse().unwrap();
            let words = vec![0; 128 * 128 / 8 * bits.parse::<usize>().unwrap()];
            let scales: Vec<half::f16> = vec![half::f16::ONE; 128];
            let weight = nq_formats::TrellisWeight::new(
                scheme,
                nq_model::Dims::new(128, 128),
                words.into(),
                scales.clone().into(),
                scales.into(),
            );
            Weight::Quantized(QuantizedWeight::Trellis(weight.unwrap()))
        };
        let (three, five) = (trellis("3"), trellis("5"));
        let auto = |parts: &[&Weight]| ActivationChoice::Auto.resolve(parts, |_, _| true);
        assert_eq!(auto(&[&three, &five]), Activations::Int8 { group: 128 });
        let exact = ActivationChoice::Auto.resolve(&[&three], |_, _| false);
        assert_eq!(exact, Activations::F32);
        let forced = ActivationChoice::Int8 { group: 64 };
        let resolved = forced.resolve(&[&three], |_, _| true);
        assert_eq!(resolved, Activations::Int8 { group: 64 });
    }
}
