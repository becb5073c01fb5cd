//! All tests of engines on devices: one program, so that it is linked once.

mod adapters;
mod ahead;
mod batch;
mod common;
mod cuda;
mod cuts;
mod drafts_ahead;
mod eagle;
mod encoder;
mod exact;
mod experts;
mod families;
mod flash_next;
mod forward;
mod generate;
mod golden;
mod hybrids;
mod mtp;
mod rope;
mod shards;
mod speculation;
mod vision;
mod wgpu;
mod wgpu_hybrids;
mod wgpu_mixtures;
