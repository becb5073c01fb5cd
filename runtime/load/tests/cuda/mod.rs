//! The GPU engine compared with the CPU engine. Without a GPU the tests print that they are skipped;
//! `NQ_REQUIRE_CUDA=1` makes that a failure.
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

mod adapters;
mod downloads;
mod drafts;
mod eagle;
mod engine;
mod flash_next;
mod hybrids;
mod images;
mod mtp;
mod sampling;
