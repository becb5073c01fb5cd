//! Models on a CPU: kernels for each instruction set, a team of threads, the operations of a forward pass, and
//! the [`engine`] over them.
//!
//! [`Cpu`] is the device: every operation is a method of it, takes plain slices and
//! spreads itself over the team. An output element is always computed by one thread in
//! one order, so results do not depend on the number of threads.

mod bandwidth;
#[forbid(unsafe_code)]
pub mod engine;
mod kv;
pub mod linear;
mod memory;
mod ops;
mod simd;
mod table;
mod team;

pub use bandwidth::{Bandwidth, BandwidthBuffer};
pub use engine::{
    CpuEngine, CpuLayers, CpuTower, adapter_bytes, open, plan, state_bytes, stepper_bytes,
};
pub use kv::{KvPages, KvSequence};
pub use linear::{Epilogue, Linear, held_bits};
pub use ops::{DeltaRows, DeltaVectors, FEW_ROWS, Span, state_len};
pub use team::{Team, TeamOptions};

pub(crate) use memory::with_scratch;
use nq_kernels::Result;
use nq_kernels::profile::Profile;
use nq_kernels::{Isa, IsaChoice};
use table::KernelTable;

/// A CPU as a compute device.
pub struct Cpu {
    isa: Isa,
    table: &'static KernelTable,
    team: Team,
    profile: Profile,
}

impl Cpu {
    /// The CPU with `threads` threads (`None`: one per physical core) and the chosen
    /// instruction set.
    ///
    /// # Errors
    /// [`nq_kernels::Error::Isa`] if the instruction set is forced and absent.
    pub fn new(threads: Option<usize>, isa: IsaChoice) -> Result<Self> {
        Self::with(
            TeamOptions {
                threads,
                ..TeamOptions::default()
            },
            isa,
        )
    }

    /// The CPU with a team as described and the chosen instruction set.
    pub fn with(team: TeamOptions, isa: IsaChoice) -> Result<Self> {
        let isa = isa.resolve()?;
        Ok(Cpu {
            isa,
            table: KernelTable::of(isa),
            team: Team::with(team),
            profile: Profile::default(),
        })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The profile, which counts the cost of operations.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// The team, for callers with other work to spread.
    pub fn team(&self) -> &Team {
        &self.team
    }
}
