//! Instruction sets, detected once at run time.

use crate::error::{Error, Result};
use std::fmt;

/// An instruction set that kernels are written for, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust: always present.
    Scalar,
    /// Arm NEON with dot product.
    Neon,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX2 with FMA, F16C and 256-bit VNNI, in either of its encodings (AVX-VNNI, or AVX-512
    /// VNNI and VL).
    AvxVnni,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// AVX-512 as above, with BF16.
    Avx512Bf16,
}

/// The value of `--isa`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IsaChoice {
    /// The strongest available.
    #[default]
    Auto,
    /// This one; an error if it is not available.
    Force(Isa),
}

impl Isa {
    /// Every instruction set that kernels exist for.
    pub const ALL: [Isa; 6] = [
        Isa::Scalar,
        Isa::Neon,
        Isa::Avx2,
        Isa::AvxVnni,
        Isa::Avx512,
        Isa::Avx512Bf16,
    ];

    /// Its name in `--isa`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
        }
    }

    /// True if this machine can run it.
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => {
                let evex =
                    is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512vnni");
                Isa::Avx2.available() && (Isa::vex_vnni() || evex)
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512.available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                std::arch::is_aarch64_feature_detected!("neon")
                    && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            #[allow(unreachable_patterns, reason = "depends on the target")]
            _ => false,
        }
    }

    /// True if the CPU supports the VEX encoding of VNNI.
    #[cfg(target_arch = "x86_64")]
    pub fn vex_vnni() -> bool {
        is_x86_feature_detected!("avxvnni")
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl IsaChoice {
    /// The instruction set to use on this machine.
    ///
    /// # Errors
    /// [`Error::Isa`] if a forced one is not available.
    pub fn resolve(self) -> Result<Isa> {
        let present = || Isa::ALL.into_iter().filter(|i| i.available());
        match self {
            IsaChoice::Auto => Ok(present().next_back().unwrap_or(Isa::Scalar)),
            IsaChoice::Force(isa) if isa.available() => Ok(isa),
            IsaChoice::Force(isa) => Err(Error::Isa {
                requested: isa.name(),
                available: present().map(Isa::name).collect::<Vec<_>>().join(", "),
            }),
        }
    }
}
