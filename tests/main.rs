//! All tests of the program and the library: one program, so that it is linked once.

mod chat;
mod cli;
mod common;
mod cuda;
mod direction;
mod dry_run;
mod embed;
mod eval_bench;
mod experts;
mod export;
mod families;
mod fit;
mod format_logits;
mod hostile;
#[cfg(all(feature = "demo", target_os = "linux"))]
mod images;
mod inspect;
mod large_files;
mod library;
mod machine;
#[cfg(all(feature = "demo", target_os = "linux"))]
mod pty;
mod quantize;
mod rank;
mod reports;
mod serve;
mod template_interrupt;
