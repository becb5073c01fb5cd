//! Quantizing on a GPU. Without one the tests print that they are skipped; `NQ_REQUIRE_CUDA=1` makes that a failure.
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

mod second_order;
